"""Pydantic's errors in plain words: the place, the value found and the values allowed.

The allowed values come from the JSON Schema, so a new field or cache layout needs no new text.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from pydantic_core import ErrorDetails

from mlagen.spec.gpus import TARGETS, name_instead
from mlagen.spec.marked import Loc, clip, dotted, resolve

Schema = dict[str, Any]

_NUMBERLIKE = re.compile(r"[-+.]?[0-9]")


@dataclass(frozen=True)
class Finding:
    """One error of a spec.

    Attributes:
        loc: the field, as keys of the YAML.
        at: position to report: the field's value, its key, or the key of the mapping that lacks it.
        text: the value found and the values allowed, without the field's name.
    """

    loc: Loc
    at: Literal["value", "key", "parent"]
    text: str

    def __str__(self) -> str:
        return f"{dotted(self.loc)}: {self.text}" if self.loc else self.text


class Guide:
    """Turns pydantic's errors about `data` into findings.

    Args:
        schema: the JSON Schema of the spec.
        data: the validated data.
        plain: the spelling of each scalar without quotes.
    """

    def __init__(self, schema: Schema, data: Any, plain: dict[Loc, str]) -> None:
        self.schema = schema
        self.data = data
        self.plain = plain

    def findings(self, errors: list[ErrorDetails]) -> list[Finding]:
        """Return one finding per field. A container is not reported for errors of its entries."""
        found = {finding.loc: finding for finding in map(self._finding, errors)}
        containers = {loc[:length] for loc in found for length in range(len(loc))}
        return [finding for loc, finding in found.items() if loc not in containers]

    def _finding(self, error: ErrorDetails) -> Finding:
        kind = error["type"]
        context = error.get("ctx", {})
        loc, schema, value = self._follow(error["loc"], unknown=kind == "extra_forbidden")
        if kind == "extra_forbidden":
            return Finding(loc, "key", self._unknown(loc, schema))
        if kind == "missing":
            return Finding(loc, "parent", f"missing; takes {self._takes(schema)}")
        if kind == "refused":
            return Finding((*loc, *context["at"]), "value", context["message"])
        if kind in ("union_tag_not_found", "union_tag_invalid"):
            return self._untagged(loc, schema, value)
        if kind == "too_long":
            return Finding(loc, "value", f"got {len(value)} entries; takes at most {schema['maxItems']}")
        return Finding(loc, "value", self._mismatch(loc, schema, value))

    def _follow(self, path: Loc, *, unknown: bool) -> tuple[Loc, Schema, Any]:
        """Follow pydantic's path, which includes union members, and return the file's path with its schema and value.

        For a field that does not exist (`unknown`), the schema is that of the mapping it stands in.
        """
        loc: Loc = ()
        value = self.data
        schema = self._meant(self.schema, value)
        for index, part in enumerate(path):
            if unknown and index == len(path) - 1:
                return (*loc, part), schema, value.get(part)
            if isinstance(part, int):
                schema, value = schema["items"], value[part]
            elif part in schema.get("properties", ()):
                schema = schema["properties"][part]
                value = value.get(part) if isinstance(value, dict) else None
            else:
                continue  # the tag of a union's member
            schema = self._meant(schema, value)
            loc = (*loc, part)
        return loc, schema, value

    def _meant(self, schema: Schema, value: Any) -> Schema:
        """Resolve references, optional values, and tagged unions."""
        if "$ref" in schema:
            return self._meant(self.schema["$defs"][schema["$ref"].rpartition("/")[2]], value)
        if "anyOf" in schema:
            options = [self._meant(option, value) for option in schema["anyOf"] if option.get("type") != "null"]
            if len(options) == 1:
                return options[0]
            fit = [option for option in options if option.get("type") == "object" and isinstance(value, dict)]
            return fit[0] if fit else {"anyOf": options}
        if "discriminator" in schema and isinstance(value, dict):
            tag = value.get(schema["discriminator"]["propertyName"])
            member = schema["discriminator"]["mapping"].get(tag) if isinstance(tag, str) else None
            return self._meant({"$ref": member}, value) if member else schema
        return schema

    def _mismatch(self, loc: Loc, schema: Schema, value: Any) -> str:
        hint = self._hint(schema, value, self.plain.get(loc))
        return f"got {_found(value, self.plain.get(loc))}; takes {self._takes(schema)}" + (f"; {hint}" if hint else "")

    def _untagged(self, loc: Loc, schema: Schema, value: dict[str, Any]) -> Finding:
        tag = schema["discriminator"]["propertyName"]
        schema = {"enum": list(schema["discriminator"]["mapping"])}
        loc = (*loc, tag)
        if tag in value:
            return Finding(loc, "value", self._mismatch(loc, schema, value[tag]))
        return Finding(loc, "parent", f"missing; takes {self._takes(schema)}")

    def _unknown(self, loc: Loc, schema: Schema) -> str:
        fields, name = list(schema["properties"]), str(loc[-1])
        meant = difflib.get_close_matches(name.lower(), fields, n=1) or [
            dotted(path) for path in self._paths(self.schema) if path[-1] == name and path != loc
        ]
        return f"unknown field; takes {_listed(fields, 'and')}" + (f"; did you mean {meant[0]}?" if meant else "")

    def _paths(self, schema: Schema, above: Loc = ()) -> Iterator[Loc]:
        """Yield every field that a spec can have."""
        if "$ref" in schema:
            schema = self.schema["$defs"][schema["$ref"].rpartition("/")[2]]
        for name, below in schema.get("properties", {}).items():
            yield (*above, name)
            yield from self._paths(below, (*above, name))
        for option in (*schema.get("oneOf", ()), *schema.get("anyOf", ())):
            yield from self._paths(option, above)

    def _takes(self, schema: Schema) -> str:
        """Return the allowed values of a schema, in words."""
        schema = self._meant(schema, None)
        if "anyOf" in schema:
            first, *others = [self._takes(option) for option in schema["anyOf"]]
            return first + "".join(f"{',' if ' or ' in first else ''} or {other}" for other in others)
        choices = _choices(schema)
        if choices:
            return _listed([_spelled(choice) for choice in choices], "or")
        if "discriminator" in schema:
            tag = schema["discriminator"]
            return f"a mapping with {tag['propertyName']}: {_listed(list(tag['mapping']), 'or')}"
        match schema.get("type"):
            case "object":
                return f"a mapping of {_listed(list(schema['properties']), 'and')}"
            case "array":
                entry = self._takes(schema["items"])
                entries = (
                    f"mappings{entry.removeprefix('a mapping')}" if entry.startswith("a mapping") else f"of {entry}"
                )
                return f"a list of {'one or more ' if schema.get('minItems') else ''}{entries}"
            case "string":
                return (
                    "text"
                    if "pattern" not in schema
                    else f"text: {schema.get('patternErrorMessage', schema['pattern'])}"
                )
            case "integer":
                return f"an integer{_bounds(schema)}"
            case "number":
                return f"a number{_bounds(schema)}"
            case other:
                return f"a {other}"

    def _hint(self, schema: Schema, value: Any, plain: str | None) -> str | None:
        """Return a small change that would fix the value, or None."""
        if "anyOf" in schema:
            return next(filter(None, (self._hint(option, value, plain) for option in schema["anyOf"])), None)
        choices = _choices(schema)
        if schema.get("type") in ("integer", "number"):
            numbers = (int,) if schema["type"] == "integer" else (int, float)
            if isinstance(value, str) and plain is None and type(resolve(value)) in numbers:
                return "remove the quotes"
            if isinstance(value, float) and value.is_integer() and schema["type"] == "integer":
                fits = schema.get("minimum", value) <= value <= schema.get("maximum", value)
                return f"write {int(value)}" if fits and value in (choices or [value]) else None
            if isinstance(value, str) and plain is not None and _NUMBERLIKE.match(plain):
                return "write plain decimal digits"
            return None
        if isinstance(value, str) and choices:
            if choices == list(TARGETS) and (other := name_instead(clip(value.strip().lower()))):
                return other
            close = difflib.get_close_matches(value.strip().lower(), choices, n=1)
            return f"did you mean {_spelled(close[0])}?" if close else None
        fits = plain is not None and (plain in choices or re.fullmatch(schema.get("pattern", "(?!)"), plain))
        if fits and not isinstance(value, str):
            return f'write it in quotes: "{plain}"'
        if isinstance(value, str) and schema.get("type") == "array" and value in _choices(schema["items"]):
            return f"write it as a list: [{value}]"
        return None


def _choices(schema: Schema) -> list[Any]:
    return [schema["const"]] if "const" in schema else schema.get("enum", [])


def _bounds(schema: Schema) -> str:
    words = (("from", "minimum"), ("above", "exclusiveMinimum"), ("to", "maximum"))
    return "".join(f" {word} {schema[key]:.12g}" for word, key in words if key in schema)


def _found(value: Any, plain: str | None) -> str:
    match value:
        case None:
            return plain or "null"
        case dict():
            return "a mapping" if value else "an empty mapping"
        case tuple():
            return "a list" if value else "an empty list"
        case str():
            return "nothing" if plain == "" else repr(clip(value))
        case _:
            return clip(plain or repr(value))


def _spelled(choice: str | int) -> str:
    """Return the spelling of a value in YAML."""
    return str(choice) if isinstance(choice, int) or isinstance(resolve(choice), str) else f'"{choice}"'


def _listed(words: list[str], joint: str) -> str:
    return f"{', '.join(words[:-1])} {joint} {words[-1]}" if len(words) > 1 else words[0]
