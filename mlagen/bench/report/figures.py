"""`python -m mlagen.bench.report.figures`: writes the figures of the documents from the reports in docs/benchmarks.

A block of a document begins with `<!-- figures: NAME ARGUMENTS -->` and ends with `<!-- end -->`. NAME is of BLOCKS.
The block `picture NAME ARGUMENTS`, NAME of PICTURES, also writes an SVG into docs/pictures and shows it.
A report is `CARD-PACKAGE.json`, or `CARD-PACKAGE-PART.json`. A page with the same name shows all of its rows as tables.
`chosen.yaml` names the rows of the summaries.
"""

from __future__ import annotations

import argparse
import fnmatch
import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import yaml
from pydantic import BaseModel, ConfigDict, TypeAdapter

from mlagen.bench.families import FAMILIES
from mlagen.bench.package import kernels_digest
from mlagen.bench.report import diagrams, pictures
from mlagen.bench.report.rows import Contender, Row
from mlagen.bench.report.saved import read_rows
from mlagen.bench.report.tables import NONE, error, markdown, of_roof, ratio, shape_name, us
from mlagen.diffs import whole
from mlagen.errors import MlagenError, UsageError
from mlagen.layout import compose
from mlagen.spec.stored import LAYOUT_DIMS, NAMED_LAYOUTS

BEGIN = re.compile(r"^<!-- figures: (.+?) -->$")
END = "<!-- end -->"
HERE = "{docs}"  # of a link in a block: docs/, as seen from the document
NO_ROWS = "No report holds these rows yet.\n"


class Chosen(BaseModel):
    """Rows of the summaries: of one package, under one name.

    Attributes:
        kernel: name, with a link from docs/performance.
        package: of the reports.
        shapes: rows of the reports.
        readme: those that the chart of speed also has, and its names of the kernels.
    """

    model_config = ConfigDict(strict=True, extra="forbid")

    kernel: str
    package: str
    shapes: list[str]
    readme: dict[str, str] = {}


@dataclass(frozen=True)
class Report:
    """A report of one card and package.

    Attributes:
        path: of its JSON.
        rows: its rows.
    """

    path: Path
    rows: tuple[Row, ...]

    @property
    def card(self) -> str:
        """The card as people call it: H100."""
        return card_of(self.rows[0])

    @property
    def package(self) -> str:
        """The package that was measured."""
        return self.rows[0].package

    def changed(self, generated: Path) -> dict[str, int]:
        """How many rows of each kind were measured on kernels with another text than now."""
        found: dict[str, int] = {}
        places = {(row.package, row.shape.family) for row in self.rows}
        now = {}
        for name, family in places:
            with whole(generated / name) as folder:
                now[name, family] = kernels_digest(folder, FAMILIES[family].modules)
        for row in self.rows:
            if row.kernels != now[row.package, row.shape.family]:
                found[row.shape.kind] = found.get(row.shape.kind, 0) + 1
        return found


def card_of(row: Row) -> str:
    """A row's card without its maker and sizes: H100 of NVIDIA H100 80GB HBM3."""
    return re.sub(r"^(NVIDIA|AMD) ", "", row.device).split()[0]


class Documents:
    """The documents of a checkout, and the reports in it.

    Args:
        root: the checkout.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.folder = root / "docs" / "benchmarks"
        self.drawn: dict[Path, str] = {}  # pictures of the blocks so far: file and text

    @cached_property
    def reports(self) -> list[Report]:
        """All reports, by card and name.

        Raises:
            UsageError: one does not read, or its name, card and packages do not agree, or its origin is not whole.
        """
        found = []
        for path in sorted(self.folder.glob("*.json")):
            report = Report(path, tuple(read_rows(path)))
            for row in report.rows:
                name = f"{card_of(row).lower()}-{row.package}"
                if path.stem != name and not path.stem.startswith(f"{name}-"):
                    raise UsageError(f"{path}: holds a row of {row.package} on {row.device}; takes those of its name")
                said = (row.driver, row.date, row.commit, row.torch, row.triton, row.peers is not None, row.kernels)
                if not all(said) or any("unknown" in each for each in row.peers or ()):
                    raise UsageError(f"{path}: {row.shape} has no whole origin: driver, day, commit, versions, kernels")
                if (row.commit or "").endswith("-dirty"):
                    raise UsageError(f"{path}: {row.shape} was measured at {row.commit}, on files that no commit holds")
            found.append(report)
        return found

    @cached_property
    def chosen(self) -> list[Chosen]:
        """The rows of the summaries, of `chosen.yaml`."""
        said = yaml.safe_load((self.folder / "chosen.yaml").read_text(encoding="utf-8"))
        return TypeAdapter(list[Chosen]).validate_python(said)

    @cached_property
    def cards(self) -> list[str]:
        """Cards with a report."""
        return sorted({report.card for report in self.reports})

    def rows(self, package: str, family: str | None = None) -> dict[str, dict[str, Row]]:
        """Rows of a package by shape, and of each shape by card."""
        found: dict[str, dict[str, Row]] = {}
        for report in self.reports:
            for row in report.rows if report.package == package else ():
                if family in (None, row.shape.family):
                    found.setdefault(str(row.shape), {})[report.card] = row
        return found

    def files(self) -> dict[Path, str]:
        """The text of each document that holds figures, and of each report's page."""
        found = {report.path.with_suffix(".md"): _report_page(report) for report in self.reports}
        documents = [self.root / "README.md", *sorted((self.root / "docs").glob("*.md"))]
        for folder in ("decisions", "performance"):
            documents += sorted((self.root / "docs" / folder).glob("*.md"))
        documents.append(self.folder / "README.md")
        for path in documents:
            text = path.read_text(encoding="utf-8")
            if "<!-- figures: " in text:
                found[path] = self.filled(text, path)
        return found | self.drawn

    def filled(self, text: str, path: Path) -> str:
        """A document with its blocks filled.

        Raises:
            UsageError: a block is unknown, or has no end.
        """
        lines, kept = text.splitlines(), list[str]()
        number = 0
        while number < len(lines):
            kept.append(lines[number])
            if begin := BEGIN.match(lines[number]):
                name, *arguments = begin[1].split()
                if name not in BLOCKS or END not in lines[number:]:
                    raise UsageError(f"{path}:{number + 1}: takes a block {', '.join(BLOCKS)}, and {END} behind it")
                block = BLOCKS[name](self, *arguments).rstrip("\n")
                kept += ["", block.replace(HERE, os.path.relpath(self.root / "docs", path.parent)), ""]
                number = lines.index(END, number) - 1
            number += 1
        return "\n".join(kept) + "\n"


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    text = ["---"] * len(header)
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (header, text, *rows))


def _cells(row: Row | None, *, whole: bool) -> list[str]:
    """A row's cells of one card: us, best peer, ratio, share of the roof; if `whole`, also repeated calls, errors."""
    if row is None:
        return [NONE] * (7 if whole else 4)
    best = row.best_peer
    ours = row.ours
    cells = [us(ours.quoted_seconds)]
    cells += [f"{best.name} {us(best.quoted_seconds)}", _ratio(best)] if best else [NONE, NONE]
    if whole:
        again = f"{us(ours.seconds)}, {ratio(best.ratio if best else None)}"
        cells.append(again if ours.behind_seconds else NONE)
    cells.append(of_roof(row, ours))
    return cells + ([error(ours), error(best) if best else NONE] if whole else [])


def _ratio(best: Contender) -> str:
    """The quoted ratio, bold where ours is slower."""
    value = best.quoted_ratio
    return f"**{ratio(value)}**" if value is not None and value < pictures.LEVEL else ratio(value)


def _header(cards: Sequence[str], names: Sequence[str]) -> list[str]:
    """Names of columns, with the card before the first one's."""
    return [f"{card} {name}" if number == 0 else name for card in cards for number, name in enumerate(names)]


def rows_block(documents: Documents, packages: str, family: str, *like: str) -> str:
    """Rows of a family as a table per kind, cards side by side.

    Args:
        documents: with the reports.
        packages: a package, or several with commas between, which share one table. In it, rows name their kind only
            if their package has several.
        family: family of the rows.
        like: patterns of shapes, with `?` for a space; without one, all rows.
    """
    found = [
        (package, shape, row)
        for package in packages.split(",")
        for shape, row in documents.rows(package, family).items()
        if not like or any(fnmatch.fnmatch(shape, each) for each in like)
    ]
    if not found:
        return NO_ROWS
    cards = [card for card in documents.cards if any(card in row for _, _, row in found)]
    header = _header(cards, ("us", "best peer", "ratio", "repeated: us, ratio", "of the roof", "error", "the peer's"))
    if "," in packages:
        kinds = list(dict.fromkeys((package, _any(row).shape.kind) for package, _, row in found))
        alone = {package for package, _ in kinds if [each for each, _ in kinds].count(package) == 1}
        lines = [
            [f"`{package}`: {shape_name(_any(row)) if package in alone else shape}", *_cards(row, cards, whole=True)]
            for package, shape, row in found
        ]
        return _table([f"package: {' or '.join(dict.fromkeys(kind for _, kind in kinds))}", *header], lines)
    tables = []
    for kind in dict.fromkeys(_any(row).shape.kind for _, _, row in found):
        own = [row for _, _, row in found if _any(row).shape.kind == kind]
        lines = [[shape_name(_any(row)), *_cards(row, cards, whole=True)] for row in own]
        tables.append(_table([f"`{packages}`, {kind}", *header], lines))
    return "\n".join(tables)


def _any(row: dict[str, Row]) -> Row:
    """One of the rows of a shape."""
    return next(iter(row.values()))


def _cards(row: dict[str, Row], cards: Sequence[str], *, whole: bool) -> list[str]:
    return [cell for card in cards for cell in _cells(row.get(card), whole=whole)]


def summary_block(documents: Documents) -> str:
    """The chosen rows, cards side by side."""
    lines = []
    for each in documents.chosen:
        rows = documents.rows(each.package)
        kernel = each.kernel
        for shape in each.shapes:
            if row := rows.get(shape):
                lines.append([kernel, shape, *_cards(row, documents.cards, whole=False)])
                kernel = ""
    names = ("us", "best peer", "ratio", "of the roof")
    return _table(["kernel", "shape", *_header(documents.cards, names)], lines) if lines else NO_ROWS


def slower_block(documents: Documents) -> str:
    """How many rows are slower than their best peer, a table each card, a line each package and kind."""
    lines = []
    for card in documents.cards:
        rows = [row for report in documents.reports if report.card == card for row in report.rows]
        judged = [(row, _best(row)) for row in rows if row.ours.seconds is not None and row.best_peer]
        slower = [(row, value) for row, value in judged if value < pictures.LEVEL]
        lines.append(
            f"On an {card}, {len(slower)} of {len(judged)} rows with a peer are slower than the best of them.\n"
        )
        table = []
        for kind in dict.fromkeys((row.package, row.shape.kind) for row, _ in slower):
            own = [(row, value) for row, value in judged if (row.package, row.shape.kind) == kind]
            found = sorted(((value, shape_name(row)) for row, value in own if value < pictures.LEVEL))
            ratios = " to ".join(dict.fromkeys(ratio(value) for value, _ in (found[0], found[-1])))
            table.append([f"`{kind[0]}`, {kind[1]}", f"{len(found)} of {len(own)}", ratios, found[0][1]])
        lines.append(_table(["package, kernel", "slower rows", "ratios", "the slowest"], table) if table else "")
    return "\n".join(lines) if lines else NO_ROWS


def _best(row: Row) -> float:
    """The quoted ratio to the best peer; 1 without one."""
    return (row.best_peer.quoted_ratio if row.best_peer else None) or 1.0


def reports_block(documents: Documents) -> str:
    """All reports, and which of their rows were measured on kernels that are others now."""
    lines = []
    for report in documents.reports:
        row, stem = report.rows[0], report.path.stem
        changed = report.changed(documents.root / "generated")
        said = ", ".join(f"{count} {kind}" for kind, count in changed.items()) or NONE
        commit = ", ".join(dict.fromkeys((each.commit or "")[:8] for each in report.rows))
        name = f"[{stem.partition('-')[2]}]({stem}.md)"
        cells = [row.device, name, f"[JSON]({stem}.json)", str(len(report.rows)), row.date or "", commit, said]
        lines.append(cells)
    header = ["card", "report", "data", "rows", "day", "commit", "rows of kernels that changed since"]
    return _table(header, lines) if lines else NO_ROWS


def _report_page(report: Report) -> str:
    stem = report.path.stem
    title = f"# {stem.partition('-')[2]} on one {report.rows[0].device}"
    head = f"The tables show every row of [{stem}.json]({stem}.json). To measure again, see [Benchmarks](README.md)."
    return f"{title}\n\n{head}\n\n{markdown(report.rows)}"


def picture_block(documents: Documents, name: str, *arguments: str) -> str:
    """A picture, shown: `speed`, `layouts`, `pipeline`, `seesaw`, or `roofline FAMILY PACKAGE/FAMILY...`.

    Raises:
        UsageError: no picture has this name.
    """
    if name not in PICTURES:
        raise UsageError(f"picture {name}: takes {', '.join(PICTURES)}")
    picture = PICTURES[name](documents, *arguments)
    if picture is None:
        return NO_ROWS
    file = f"pictures/{'-'.join([name, *arguments[:1]])}.svg"
    documents.drawn[documents.root / "docs" / file] = picture.svg
    return f"![{picture.alt}]({HERE}/{file})"


def _speed(documents: Documents) -> pictures.Picture | None:
    """The chosen rows of the chart of speed, by card; None if no report holds one."""
    bars: dict[str, list[pictures.Bar]] = {}
    for each in documents.chosen:
        rows = documents.rows(each.package)
        for shape, name in each.readme.items():
            for card, row in rows.get(shape, {}).items():
                if (best := row.best_peer) and (value := best.quoted_ratio):
                    bars.setdefault(card, []).append(
                        pictures.Bar(name.replace("`", ""), shape_name(row), value, best.name)
                    )
    return pictures.speed(bars) if bars else None


def _roofline(documents: Documents, family: str, *groups: str) -> pictures.Picture | None:
    """Rows of `PACKAGE/FAMILY` groups; None if no report holds one."""
    found = {}
    for group in groups:
        package, _, own = group.partition("/")
        if rows := [row for cards in documents.rows(package, own).values() for row in cards.values()]:
            found[package if own == family else f"{package} {own}"] = rows
    return pictures.roofline(family, found) if found else None


def _layouts(_: Documents) -> pictures.Picture:
    """Every named layout of a KV cache on the first of its models' dims; fp16 is as bf16."""
    every = [
        (compose(NAMED_LAYOUTS[name], *dims[0]), f"{dims[0][0]} + {dims[0][1]}")
        for name, dims in LAYOUT_DIMS.items()
        if name != "fp16"
    ]
    return pictures.layouts(every)


PICTURES: dict[str, Callable[..., pictures.Picture | None]] = {
    "speed": _speed,
    "roofline": _roofline,
    "layouts": _layouts,
    "pipeline": lambda _: diagrams.pipeline(),
    "seesaw": lambda _: diagrams.seesaw(),
}
BLOCKS: dict[str, Callable[..., str]] = {
    "picture": picture_block,
    "rows": rows_block,
    "summary": summary_block,
    "slower": slower_block,
    "reports": reports_block,
}


def main(arguments: list[str] | None = None) -> int:
    """Writes the documents, or says which differ."""
    parser = argparse.ArgumentParser(
        prog="python -m mlagen.bench.report.figures", description="Writes the documents' figures from the reports."
    )
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a document differs")
    parser.add_argument("--root", type=Path, default=Path(), help="the checkout; default: this folder")
    options = parser.parse_args(arguments)
    differing = 0
    try:
        for path, text in Documents(options.root).files().items():
            if not path.is_file() or path.read_text(encoding="utf-8") != text:
                differing += 1
                print(path)
                if not options.check:
                    path.parent.mkdir(exist_ok=True)
                    path.write_text(text, encoding="utf-8")
    except MlagenError as failure:
        print(failure, file=sys.stderr)
        return failure.exit_code
    return 1 if options.check and differing else 0


if __name__ == "__main__":
    sys.exit(main())
