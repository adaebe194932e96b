"""Compare the declarations and calls of other projects with the wrappers that are named after them.

python call_forms.py --docs     writes the tables of docs/signatures.md from call_forms.yaml
python call_forms.py WHEEL      prints the declarations of a wheel that call_forms.yaml does not have
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
NOT_GENERATED = "not_generated"
DOCS = ROOT / "docs" / "signatures.md"
BEGIN, END = "<!-- of tests/generated/call_forms.yaml -->", "<!-- end -->"
Parameters = dict[str, inspect.Parameter]


def declared(parameters: str) -> Parameters:
    """Parameters of a declaration, in order."""
    scope: dict[str, Any] = {"torch": torch}  # for defaults that are dtypes
    exec(f"def function({parameters}): ...", scope)
    return dict(inspect.signature(scope["function"]).parameters)


def positional(parameters: Parameters) -> list[str]:
    """Return the names of the positional parameters."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [name for name, one in parameters.items() if one.kind in kinds]


def named(parameters: Parameters) -> list[str]:
    """Return all names except those of *args and **kwargs."""
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [name for name, one in parameters.items() if one.kind not in variadic]


def agreeing(theirs: Parameters, ours: Parameters) -> int:
    """Return how many leading positions have the same name here."""
    pairs = zip(positional(theirs), positional(ours), strict=False)
    return next(
        (count for count, (one, other) in enumerate(pairs) if one != other),
        min(map(len, map(positional, (theirs, ours)))),
    )


@dataclass(frozen=True)
class Call:
    """A call in a project: its file, the number of positional arguments, and the names of the others."""

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
    """Names that a wrapper does not accept, in all packages or in those listed, and the reason."""

    names: tuple[str, ...]
    why: str
    packages: tuple[str, ...] = ()


@dataclass(frozen=True)
class Wrapper:
    """The known forms of a wrapper."""

    name: str
    forms: tuple[Form, ...]
    refused: tuple[Refused, ...] = ()
    defaults: dict[str, str] = field(default_factory=dict)
    needed: dict[str, str] = field(default_factory=dict)
    beyond: dict[str, str] = field(default_factory=dict)

    def why_refused(self, name: str, form: Form, package: str) -> str:
        """Return why a package's wrapper refuses a name; empty if no reason is recorded."""
        for one in self.refused:
            if name in one.names and package in (one.packages or (package,)):
                return one.why
        return form.refused


@dataclass(frozen=True)
class NotGenerated:
    """A function of another project that no package has, and the reason."""

    name: str
    of: str
    versions: tuple[str, ...]
    source: str
    why: str


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
    """Return the content of call_forms.yaml."""
    wrappers = []
    for name, data in yaml.safe_load(FORMS.read_text()).items():
        if name == NOT_GENERATED:
            continue
        forms = tuple(_form(name, one) for one in data.pop("forms"))
        refused = tuple(
            Refused(_words(one["names"]), one["why"], _words(one.get("packages", "")))
            for one in data.pop("refused", ())
        )
        wrappers.append(Wrapper(name, forms, refused, **data))
    return tuple(wrappers)


@cache
def not_generated() -> tuple[NotGenerated, ...]:
    """Return the functions of call_forms.yaml that no package has."""
    found = yaml.safe_load(FORMS.read_text())[NOT_GENERATED]
    return tuple(NotGenerated(name, **{**one, "versions": tuple(one["versions"])}) for name, one in found.items())


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _rows(wrapper: Wrapper, ours: Parameters) -> Iterator[str]:
    yield "| upstream | versions | equal positions | next position upstream | the same call here |"
    yield "|---|---|---|---|---|"
    rows: dict[tuple[str, ...], list[str]] = {}  # to the versions that have it
    for form in wrapper.forms:
        theirs = positional(form.parameters)
        count = agreeing(form.parameters, ours)
        then, here = "", "binds"
        if positional(ours) and count < len(theirs):
            then = f"`{theirs[count]}`"
            here = form.next or "raises a TypeError; there is no further position"
        here = "; ".join(filter(None, (here, form.note)))
        upstream = form.of if not form.function or form.function in form.of else f"{form.of}, {form.function}"
        rows.setdefault((_cell(upstream), str(count), then, _cell(here)), []).extend(form.versions)
    for (upstream, *cells), versions in rows.items():
        yield f"| {upstream} | {', '.join(versions)} | {' | '.join(cells)} |"


def tables(signatures: dict[str, Parameters]) -> str:
    """Return the section of docs/signatures.md about every wrapper, in Markdown.

    Args:
        signatures: the parameters of each wrapper, by its name.
    """
    lines = []
    for wrapper in load():
        ours = signatures[wrapper.name]
        here = ", ".join(positional(ours)) or "any number, ignored"
        lines += [
            f"### {wrapper.name}",
            "",
            textwrap.fill(f"Positional arguments: {here}.", 120),
            "",
            *_rows(wrapper, ours),
            "",
        ]
        refused = []
        for one in wrapper.refused:
            where = f" ({', '.join(one.packages)})" if one.packages else ""
            refused.append((", ".join(f"`{name}`" for name in one.names) + where, one.why))
        refused += [(f"all other arguments of {one.of}", one.refused) for one in wrapper.forms if one.refused]
        refused = list(dict.fromkeys(refused))
        if refused:
            lines += ["| not accepted | reason |", "|---|---|"]
            lines += [f"| {names} | {_cell(why)} |" for names, why in refused] + [""]
        others = [(f"`{name}`", why) for name, why in wrapper.defaults.items()]
        others += [(f"`{name}`, required", why) for name, why in wrapper.needed.items()]
        if others:
            lines += ["| different default here | value or reason |", "|---|---|"]
            lines += [f"| {name} | {_cell(why)} |" for name, why in others] + [""]
        if wrapper.beyond:
            lines += [f"`{name}` may also be {value}." for name, value in wrapper.beyond.items()] + [""]
    lines += ["### Functions without a wrapper", "", "| function | upstream | versions | reason |", "|---|---|---|---|"]
    lines += [f"| {one.name} | {one.of} | {', '.join(one.versions)} | {_cell(one.why)} |" for one in not_generated()]
    lines += [""]
    return "\n".join(lines)


def documented(text: str, made: str) -> str:
    """Return the page with its tables replaced."""
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n\n{made}\n{END}{rest.split(END)[1]}"


def differences(wheel: Path) -> Iterator[str]:
    """Yield the declarations of a wheel's functions that no form has."""
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
    """Return the parameters of each wrapper, from the first package that has it."""
    sys.path.append(str(ROOT / "tests"))
    from checked_in import PACKAGES

    from mlagen.compile.worker import load_package

    found: dict[str, Parameters] = {}
    wanted = {wrapper.name for wrapper in load()}
    for folder in PACKAGES:
        package = load_package(folder)
        for name in wanted.intersection(package.__all__):
            found.setdefault(name, dict(inspect.signature(getattr(package, name)).parameters))
    return found


def main(argument: str) -> int:
    """Write the tables, or print a wheel's differences and return 1 if there are any."""
    if argument == "--docs":
        DOCS.write_text(documented(DOCS.read_text(), tables(signatures())))
        return 0
    found = list(differences(Path(argument)))
    print("\n".join(found) or "as call_forms.yaml has it")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
