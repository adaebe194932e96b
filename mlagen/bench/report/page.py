"""Rows of a benchmark as one HTML page for people: charts and tables in it, nothing fetched, nothing run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import jinja2
from markupsafe import Markup

from mlagen.bench.report.against import Comparison
from mlagen.bench.report.charts import Style, bars, labels, roofline, styles_of
from mlagen.bench.report.rows import Contender, Row
from mlagen.bench.report.tables import (
    NONE,
    TERMS,
    Table,
    by_kind,
    changes_table,
    conditions,
    error,
    giga,
    of_roof,
    other_times,
    percent,
    ratio,
    rows_table,
    shape_name,
    tera,
    us,
)

TITLES = {
    "prefill": "Prefill",
    "decode": "Decode",
    "ordered": "Prefill of picks in ascending order",
    "shared": "Prefill of neighbours that share indices",
    "sparse_decode": "Decode over a paged cache",
    "dense_decode": "Dense decode over a paged cache",
    "dense_fwd": "Multi-head attention",
    "merge_states": "Merges of parts by their LSE",
    "cache": "Cache writers",
    "gather": "Cache gathers",
    "prologue": "Norms, RoPE and insertion of rows",
    "compressor": "Compressor: states, and rows of windows of them",
    "latents": "Latents of groups of tokens, and their insertion",
    "out_quant": "Attention's output, rotated back and quantised",
    "kpool": "Pools of the indexer's keys",
    "indexer_cache": "The indexer's keys and query",
    "indices": "Index kernels",
    "topk": "Top-k of rows of scores",
    "mqa_logits": "Logits of the lightning indexer",
    "indexer_select": "Logits of the lightning indexer and their top-k",
    "candidates": "Candidate blocks, and the top-k of the keys in them",
    "layer": "Attention of a DeepSeek V4 layer, without its matrix products",
}
DETAILS = (
    *("shape", "kernel", "us", "spread", "by", "TFLOP/s", "GB/s", "of the roof", "×", "after a pause us"),
    *("from Python us", "error"),
)


@dataclass(frozen=True)
class _Kind:
    """Rows of one kind of shape, drawn.

    Attributes:
        name: of the kind.
        shared: the part that all of their shapes have in common.
        rooflines: a chart a roof; none where the kernels are credited no FLOPs.
        bars: name of a shape and its chart.
        tables: a row a shape.
        details: a row a kernel.
    """

    name: str
    shared: str
    rooflines: list[Markup]
    bars: list[tuple[str, Markup]]
    tables: list[Table]
    details: Table


@dataclass(frozen=True)
class _Section:
    """Rows of one package and family.

    Attributes:
        key: its anchor.
        family: of the kernels.
        title: its heading.
        glance: cells of the summary: shapes, at how many ours is ahead, ranges of ×best and of the roof's share.
        styles: of the kernels that ran.
        kinds: the kinds that it shows.
    """

    key: str
    family: str
    title: str
    glance: tuple[str, ...]
    styles: dict[str, Style]
    kinds: list[_Kind]


def page(rows: Sequence[Row], command: str, comparison: Comparison | None = None) -> str:
    """The page, byte for byte the same for the same rows.

    Args:
        rows: the measured rows, at least one.
        command: the command that makes the page.
        comparison: with an earlier run.
    """
    styles = styles_of(rows)
    families = list(dict.fromkeys((row.package, row.shape.family) for row in rows))
    packages = list(dict.fromkeys(row.package for row in rows))
    sections = []
    for number, (package, family) in enumerate(families):
        own = [row for row in rows if (row.package, row.shape.family) == (package, family)]
        title = TITLES.get(family, family)
        sections.append(_section(own, f"s{number}", f"{package}: {title}" if len(packages) > 1 else title, styles))
    return _template().render(
        title=f"{', '.join(packages)} on {rows[0].device}",
        conditions={name: text or "not recorded" for name, text in conditions(rows).items()},
        command=command,
        sections=sections,
        comparison=comparison,
        changes=changes_table(comparison) if comparison else None,
        terms=TERMS,
    )


@cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("mlagen.bench.report", "."),
        undefined=jinja2.StrictUndefined,
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    return environment.get_template("page.html.jinja")


def _section(rows: Sequence[Row], key: str, title: str, styles: dict[str, Style]) -> _Section:
    ran = {each.name for row in rows for each in row.contenders if each.seconds is not None}
    kinds = [_kind(kind, f"{key}k{number}", styles) for number, kind in enumerate(by_kind(rows))]
    return _Section(
        key,
        rows[0].shape.family,
        title,
        _glance(rows),
        {name: each for name, each in styles.items() if name in ran},
        kinds,
    )


def _glance(rows: Sequence[Row]) -> tuple[str, ...]:
    ratios = [row.best_peer.ratio for row in rows if row.best_peer and row.best_peer.ratio]
    shares = [row.roof_seconds / row.ours.seconds for row in rows if row.ours.seconds]
    ahead = f"{sum(each >= 1 for each in ratios)} of {len(ratios)}" if ratios else NONE
    return str(len(rows)), ahead, _range(ratios), _range(shares)


def _range(values: Sequence[float]) -> str:
    return f"{ratio(min(values))} to {ratio(max(values))}" if values else NONE


def _kind(rows: Sequence[Row], key: str, styles: dict[str, Style]) -> _Kind:
    names, shared = labels(rows)
    roofs = dict.fromkeys(row.roof for row in rows)
    counted = [row for row in rows if row.flops and any(each.seconds for each in row.contenders)]
    drawn = [each for each in ([row for row in counted if row.roof == roof] for roof in roofs) if each]
    return _Kind(
        name=rows[0].shape.kind,
        shared=shared,
        rooflines=[Markup(roofline(each, styles, f"{key}r{number}")) for number, each in enumerate(drawn)],
        bars=[
            (name, Markup(bars(row, styles, f"{key}b{number}")))
            for number, (name, row) in enumerate(zip(names, rows, strict=True))
            if any(each.seconds for each in row.contenders)
        ],
        tables=[rows_table(rows), *other_times(rows)],
        details=Table(DETAILS, tuple(_details(row, each) for row in rows for each in row.contenders)),
    )


def _details(row: Row, each: Contender) -> tuple[str, ...]:
    return (
        shape_name(row),
        each.name,
        us(each.seconds),
        percent(each.spread),
        each.method or NONE,
        tera(row, each),
        giga(row, each),
        of_roof(row, each),
        ratio(each.ratio),
        us(each.cool_seconds),
        us(each.eager_seconds),
        error(each),
    )
