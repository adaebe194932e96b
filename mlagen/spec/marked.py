"""Reader of YAML that keeps the position of each value.

Scalars follow YAML 1.2, not PyYAML's 1.1: `no` and `1:30` are text, `1e-5` is a number. A number that YAML versions
read differently (017, 0o17, 0x1f, 1_000) stays text, so that a field for numbers refuses it. Syntax that hides or
repeats content (anchors, tags, merge keys, directives, duplicate keys) is an error.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import yaml

from mlagen.errors import Place, SpecError, SpecErrors

Loc = tuple[str | int, ...]

MAX_DEPTH = 16

_NULL = frozenset({"~", "null", "Null", "NULL"})
_BOOL = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_INT = re.compile(r"[-+]?(0|[1-9][0-9]{0,999})")
_FLOAT = re.compile(
    r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*([eE][-+]?[0-9]+)?|[eE][-+]?[0-9]+))|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"
)

# PyYAML's most common errors, in plain words.
_SYNTAX = (
    ("mapping values are not allowed here", "a second ': ' in one line, or a line indented too far"),
    ("could not find expected ':'", "a line without ': ' where a field is expected"),
    ("found unexpected end of stream", "a quote that is never closed"),
    ("expected <block end>", "a line with an indentation that no line above has"),
    ("expected ',' or ']'", "a list [...] without a comma or its closing bracket"),
    ("expected ',' or '}'", "a mapping {...} without a comma or its closing brace"),
    ("sequence entries are not allowed here", "a '-' where no list entry is allowed"),
    ("found character '@'", "text that begins with '@' needs quotes"),
    ("found character '`'", "text that begins with '`' needs quotes"),
    ("found character '%'", "text that begins with '%' needs quotes"),
    ("expected '<document start>'", "text after the end of the spec"),
    ("expected the node content", "a value that begins with a YAML symbol; such text needs quotes"),
    ("found undefined tag handle", "a tag ('!...'); takes none"),
)

# Names of fields that are not text.
_KEYS = {yaml.AliasEvent: "an alias", yaml.SequenceStartEvent: "a list", yaml.MappingStartEvent: "a mapping"}
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,62}")


@dataclass(frozen=True)
class Mark:
    """A position in the text; line and column count from 1."""

    line: int
    column: int


@dataclass
class Document:
    """The data of one YAML file, and the positions in it.

    Attributes:
        data: mappings as dict, sequences as tuple, scalars as str, int, float, bool or None.
        values: position of each value.
        keys: position of each key of a mapping.
        plain: spelling of each scalar without quotes.
        unread: values with an entry in `errors`, which are None in `data`.
        errors: errors of the YAML itself, in the order of the text.
    """

    data: Any = None
    values: dict[Loc, Mark] = field(default_factory=dict)
    keys: dict[Loc, Mark] = field(default_factory=dict)
    plain: dict[Loc, str] = field(default_factory=dict)
    unread: set[Loc] = field(default_factory=set)
    errors: list[SpecError] = field(default_factory=list)


def read(text: str, file: Path) -> Document:
    """Read one YAML document.

    Args:
        text: the file's text.
        file: the file's path, for error messages.

    Raises:
        SpecErrors: the text is not YAML. Smaller errors are in `Document.errors`.
    """
    return _Reader(text, file).read()


def dotted(loc: Loc) -> str:
    """Return a field's path as text: `cache.block_size`, `targets[3]`."""
    text = ""
    for part in loc:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            text += ("." if text else "") + (part if _NAME.fullmatch(part) else repr(clip(part)))
    return text


def clip(text: str, limit: int = 60) -> str:
    """Shorten text for a message."""
    return text if len(text) <= limit else text[: limit - 3] + "..."


def refuse(errors: list[SpecError]) -> SpecErrors:
    """Return all errors of a file as one, sorted by place."""
    return SpecErrors(sorted(errors, key=_order))


def resolve(text: str) -> str | int | float | bool | None:
    """Return the value of a scalar without quotes. A missing value is empty text, which no field takes."""
    if text in _NULL:
        return None
    if text in _BOOL:
        return _BOOL[text]
    if _INT.fullmatch(text):
        return int(text)
    if _FLOAT.fullmatch(text):
        return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
    return text


class _Reader:
    """Builds the data from PyYAML's events. Unlike its constructor, they resolve no types and no anchors."""

    def __init__(self, text: str, file: Path) -> None:
        self.text = text
        self.file = file
        self.document = Document()

    def read(self) -> Document:
        self._refuse_hidden_characters()
        events = self._events()
        next(events)  # the stream's start
        event = next(events)
        if isinstance(event, yaml.StreamEndEvent):
            self._stop("the file is empty or has only comments; takes a spec", Mark(1, 1))
        if event.version or event.tags:
            self._error((), "got a YAML directive ('%'); takes none", _mark(event))
        self.document.data = self._value(next(events), events, ())
        next(events)  # the document's end
        event = next(events)
        if isinstance(event, yaml.DocumentStartEvent):
            self._error((), "got a second YAML document; takes one spec per file", _mark(event))
        return self.document

    def _events(self) -> Iterator[Any]:
        loader = yaml.SafeLoader(self.text)
        try:
            while loader.check_event():
                yield loader.get_event()  # type: ignore[no-untyped-call]
        except yaml.MarkedYAMLError as error:
            problem = error.problem or error.context or "cannot be read"
            # PyYAML finds an open quote or bracket at the file's end; report where it begins
            opened = problem.startswith(("found unexpected end of stream", "expected ',' or")) and error.context_mark
            mark = opened or error.problem_mark or error.context_mark or loader.get_mark()
            self._stop(f"not YAML: {_plainly(problem)}", Mark(mark.line + 1, mark.column + 1))
        except (ValueError, OverflowError):  # bugs of PyYAML, for example with "\\UFFFFFFFF", which is beyond Unicode
            mark = loader.get_mark()
            self._stop("not YAML: an escape or a number out of range", Mark(mark.line + 1, mark.column + 1))
        finally:
            loader.dispose()

    def _value(self, event: Any, events: Iterator[Any], loc: Loc) -> Any:
        mark = self.document.values.setdefault(loc, _mark(event))
        if len(loc) > MAX_DEPTH:
            self._stop(f"nested more than {MAX_DEPTH} levels deep; takes at most {MAX_DEPTH} levels", mark)
        if isinstance(event, yaml.AliasEvent):
            return self._unread(loc, f"got an alias ('*{clip(str(event.anchor))}'); takes the value itself")
        if event.anchor is not None:
            self._error(loc, f"got an anchor ('&{clip(event.anchor)}'); takes the value without it", mark)
        if event.tag is not None:
            tag = event.tag.replace("tag:yaml.org,2002:", "!!")
            self._unread(loc, f"got a tag ({clip(tag)!r}); takes the value without it")
        if isinstance(event, yaml.SequenceStartEvent):
            value: Any = self._sequence(events, loc)
        elif isinstance(event, yaml.MappingStartEvent):
            value = self._mapping(events, loc)
        else:
            value = self._scalar(event, loc)
        return None if loc in self.document.unread else value

    def _sequence(self, events: Iterator[Any], loc: Loc) -> tuple[Any, ...]:
        values: list[Any] = []
        while not isinstance(event := next(events), yaml.SequenceEndEvent):
            values.append(self._value(event, events, (*loc, len(values))))
        return tuple(values)

    def _mapping(self, events: Iterator[Any], loc: Loc) -> dict[str, Any]:
        values: dict[str, Any] = {}
        while not isinstance(event := next(events), yaml.MappingEndEvent):
            key = self._key(event, events, loc)
            first = self.document.keys.get((*loc, key)) if key is not None else None
            if first:
                self._error((*loc, str(key)), f"appears twice; remove it here or in line {first.line}", _mark(event))
            if key is None or first:
                self._skip(next(events), events)
            else:
                self.document.keys[(*loc, key)] = _mark(event)
                values[key] = self._value(next(events), events, (*loc, key))
        return values

    def _key(self, event: Any, events: Iterator[Any], loc: Loc) -> str | None:
        """Return the name of a field. After an error, return None."""
        found = None
        if not isinstance(event, yaml.ScalarEvent):
            found = _KEYS[type(event)]
            self._skip(event, events)
        elif event.implicit[0] and event.value == "<<":
            self._error(loc, "got a merge key ('<<'); takes the fields themselves", _mark(event))
            return None
        elif event.implicit[0] and (not event.value or not isinstance(resolve(event.value), str)):
            found = clip(event.value) or "nothing"
        elif not event.value.isprintable():
            found = repr(clip(event.value))
        if found is not None:
            self._error(loc, f"got {found} as a field's name; takes text", _mark(event))
            return None
        if event.anchor is not None or event.tag is not None:
            self._error(
                (*loc, event.value), "got an anchor or a tag at a field's name; takes the name without it", _mark(event)
            )
        return str(event.value)

    def _scalar(self, event: Any, loc: Loc) -> Any:
        if _hidden(event.value) is not None:
            return self._unread(loc, f"got {clip(event.value)!r}, with a hidden character; takes plain text")
        if not event.implicit[0]:
            return event.value
        self.document.plain[loc] = event.value
        return resolve(event.value)

    def _skip(self, event: Any, events: Iterator[Any]) -> None:
        """Skip a value with an invalid key."""
        depth = 0
        while True:
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth == 0:
                return
            if depth > MAX_DEPTH:
                self._stop(f"nested more than {MAX_DEPTH} levels deep; takes at most {MAX_DEPTH} levels", _mark(event))
            event = next(events)

    def _refuse_hidden_characters(self) -> None:
        index = _hidden(self.text)
        if index is None:
            return
        before = self.text[:index].replace("\r\n", "\n").replace("\r", "\n")
        mark = Mark(before.count("\n") + 1, len(before) - before.rfind("\n"))
        character = self.text[index]
        name = unicodedata.name(character, "control character").lower()
        self._stop(f"contains U+{ord(character):04X} ({name}), which editors do not show; remove it", mark)

    def _error(self, loc: Loc, message: str, mark: Mark) -> None:
        text = f"{dotted(loc)}: {message}" if loc else message
        self.document.errors.append(SpecError(text, place=Place(self.file, mark.line, mark.column)))

    def _unread(self, loc: Loc, message: str) -> None:
        self._error(loc, message, self.document.values[loc])
        self.document.unread.add(loc)

    def _stop(self, message: str, mark: Mark) -> NoReturn:
        self._error((), message, mark)
        raise refuse(self.document.errors)


def _order(error: SpecError) -> tuple[int, int]:
    place = error.place
    return (place.line or 0, place.column or 0) if place else (0, 0)


def _mark(event: Any) -> Mark:
    return Mark(event.start_mark.line + 1, event.start_mark.column + 1)


def _hidden(text: str) -> int | None:
    """Return the index of the first character that editors do not show or PyYAML refuses, or None."""
    for index, character in enumerate(text):
        if not character.isprintable() and character not in " \t\n\r" and unicodedata.category(character) != "Zs":
            return index
    return None


def _plainly(problem: str) -> str:
    if problem == "found character '\\t' that cannot start any token":
        return "a tab; indent and separate with spaces"
    return next((plainly for theirs, plainly in _SYNTAX if problem.startswith(theirs)), " ".join(problem.split()))
