"""How other projects declare and call functions whose names the wrappers carry, and what a wrapper makes of it.

python call_forms.py --docs     writes the tables of docs/signatures.md from call_forms.yaml
python call_forms.py WHEEL      prints what a wheel of one of the projects declares otherwise than call_forms.yaml
"""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
import yaml

ROOT = Path(__file__).resolve().parents[2]
FORMS = Path(__file__).with_suffix(".yaml")
DOCS = ROOT / "docs" / "signatures.md"
BEGIN, END = "<!-- of tests/generated/call_forms.yaml -->", "<!-- end -->"
Parameters = dict[str, inspect.Parameter]


def declared(parameters: str) -> Parameters:
    """Parameters of a declaration, in order."""
    scope: dict[str, Any] = {"torch": torch}  # for defaults that are dtypes
    exec(f"def function({parameters}): ...", scope)
    return dict(inspect.signature(scope["function"]).parameters)


def positional(parameters: Parameters) -> list[str]:
    """Names of what a caller may pass by position."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [name for name, one in parameters.items() if one.kind in kinds]


def named(parameters: Parameters) -> list[str]:
    """All names but those of *args and **kwargs."""
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [name for name, one in parameters.items() if one.kind not in variadic]


def agreeing(theirs: Parameters, ours: Parameters) -> int:
    """How many of their positions have the same name here, from the first on."""
    pairs = zip(positional(theirs), positional(ours), strict=False)
    return next(
        (count for count, (one, other) in enumerate(pairs) if one != other),
        min(map(len, map(positional, (theirs, ours)))),
    )


@dataclass(frozen=True)
class Call:
    """A call in a project: the file, how many arguments by position, and the names of the others."""

    source: str
    count: int
    names: tuple[str, ...]


@dataclass(frozen=True)
class Form:
    """A declaration, with the versions that have it."""

    wrapper: str
    of: str
    versions: tuple[str, ...]
    source: str
    parameters: Parameters
    function: str = ""
    next: str = ""
    note: str = ""
    refused: str = ""
    calls: tuple[Call, ...] = ()

    def __str__(self) -> str:
        return f"{self.wrapper} - {self.of} {' '.join(self.versions)}"


@dataclass(frozen=True)
class Refused:
    """Names that a wrapper does not take, of all packages unless some are listed, and why."""

    names: tuple[str, ...]
    why: str
    packages: tuple[str, ...] = ()


@dataclass(frozen=True)
class Wrapper:
    """All that is known of the forms of a wrapper."""

    name: str
    forms: tuple[Form, ...]
    refused: tuple[Refused, ...] = ()
    defaults: dict[str, str] = field(default_factory=dict)
    needed: dict[str, str] = field(default_factory=dict)
    beyond: dict[str, str] = field(default_factory=dict)

    def why_refused(self, name: str, form: Form, package: str) -> str:
        """Why a package's wrapper does not take a name; empty where nothing says so."""
        for one in self.refused:
            if name in one.names and package in (one.packages or (package,)):
                return one.why
        return form.refused


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split(", ")) if text else ()


def _calls(calls: dict[str, list[str]]) -> Iterator[Call]:
    for source, written in calls.items():
        for one in written:
            count, _, names = one.partition(" by position")
            yield Call(source, int(count), _words(names.removeprefix(", ")))


def _form(wrapper: str, data: dict[str, Any]) -> Form:
    parsed = {
        "versions": tuple(map(str, data["versions"])),
        "parameters": declared(data["parameters"]),
        "calls": tuple(_calls(data.get("calls", {}))),
    }
    return Form(wrapper, **{**data, **parsed})


@cache
def load() -> tuple[Wrapper, ...]:
    """What call_forms.yaml holds."""
    wrappers = []
    for name, data in yaml.safe_load(FORMS.read_text()).items():
        forms = tuple(_form(name, one) for one in data.pop("forms"))
        refused = tuple(
            Refused(_words(one["names"]), one["why"], _words(one.get("packages", "")))
            for one in data.pop("refused", ())
        )
        wrappers.append(Wrapper(name, forms, refused, **data))
    return tuple(wrappers)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _rows(wrapper: Wrapper, ours: Parameters) -> Iterator[str]:
    yield "| upstream | versions | positions | the next there | here |"
    yield "|---|---|---|---|---|"
    for form in wrapper.forms:
        theirs = positional(form.parameters)
        count = agreeing(form.parameters, ours)
        then, here = "", "binds"
        if positional(ours) and count < len(theirs):
            then = f"`{theirs[count]}`"
            here = form.next or "TypeError: there is no further position"
        here = "; ".join(filter(None, (here, form.note)))
        upstream = form.of if not form.function or form.function in form.of else f"{form.of}, {form.function}"
        yield f"| {_cell(upstream)} | {', '.join(form.versions)} | {count} | {then} | {_cell(here)} |"


def tables(signatures: dict[str, Parameters]) -> str:
    """What docs/signatures.md says of every wrapper, in Markdown.

    Args:
        signatures: a wrapper of each name.
    """
    lines = []
    for wrapper in load():
        ours = signatures[wrapper.name]
        here = ", ".join(positional(ours)) or "any"
        lines += [
            f"### {wrapper.name}",
            "",
            textwrap.fill(f"By position here: {here}.", 120),
            "",
            *_rows(wrapper, ours),
            "",
        ]
        refused = []
        for one in wrapper.refused:
            where = f" ({', '.join(one.packages)})" if one.packages else ""
            refused.append((", ".join(f"`{name}`" for name in one.names) + where, one.why))
        refused += [(f"all others of {one.of}", one.refused) for one in wrapper.forms if one.refused]
        refused = list(dict.fromkeys(refused))
        if refused:
            lines += ["| not taken | why |", "|---|---|"]
            lines += [f"| {names} | {_cell(why)} |" for names, why in refused] + [""]
        others = [(f"`{name}`", why) for name, why in wrapper.defaults.items()]
        others += [(f"`{name}`, required", why) for name, why in wrapper.needed.items()]
        if others:
            lines += ["| another default here | why |", "|---|---|"]
            lines += [f"| {name} | {_cell(why)} |" for name, why in others] + [""]
        if wrapper.beyond:
            lines += ["| taken here beside | what |", "|---|---|"]
            lines += [f"| `{name}` | {_cell(what)} |" for name, what in wrapper.beyond.items()] + [""]
    return "\n".join(lines)


def documented(text: str, made: str) -> str:
    """The page with the tables in their place."""
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n\n{made}\n{END}{rest.split(END)[1]}"


def differences(wheel: Path) -> Iterator[str]:
    """What a wheel's functions of the same files declare that no form has."""
    known: dict[tuple[str, str], list[list[str]]] = {}
    for wrapper in load():
        for form in wrapper.forms:
            known.setdefault((form.source, form.function or wrapper.name), []).append(list(form.parameters))
    with zipfile.ZipFile(wheel) as archive:
        for (source, function), forms in known.items():
            if source not in archive.namelist():
                continue
            for node in ast.walk(ast.parse(archive.read(source))):
                if isinstance(node, ast.FunctionDef) and node.name == function:
                    found = node.args
                    names = [
                        one.arg
                        for one in (*found.posonlyargs, *found.args, found.vararg, *found.kwonlyargs, found.kwarg)
                        if one
                    ]
                    if names not in forms:
                        yield f"{source}: {function}({', '.join(names)})"


def signatures() -> dict[str, Parameters]:
    """A wrapper of each name, of the first package that has it."""
    from mlagen.compile.worker import load_package

    found: dict[str, Parameters] = {}
    wanted = {wrapper.name for wrapper in load()}
    for folder in sorted(path.parent for path in (ROOT / "generated").glob("*/__init__.py")):
        package = load_package(folder)
        for name in wanted.intersection(package.__all__):
            found.setdefault(name, dict(inspect.signature(getattr(package, name)).parameters))
    return found


def main(argument: str) -> int:
    """Writes the tables, or prints a wheel's differences; 1 if it has some."""
    if argument == "--docs":
        DOCS.write_text(documented(DOCS.read_text(), tables(signatures())))
        return 0
    found = list(differences(Path(argument)))
    print("\n".join(found) or "as call_forms.yaml has it")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
