"""Code that the kernel families of the portable back end share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from mlagen.layout.layout import MOST_LOADED
from mlagen.plan import Chunk, Family, LatentFamily, Plan
from mlagen.work import ITEMSIZE

# Torch's and Triton's names of dtypes. e2m1 has none, nor have bytes of several fields: their tensors are of uint8.
TORCH_DTYPES = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "fp32": "float32",
    "e4m3": "float8_e4m3fn",
    "e4m3fnuz": "float8_e4m3fnuz",
}
TRITON_FLOATS = {"bf16": "tl.bfloat16", "fp16": "tl.float16", "fp32": "tl.float32"}
LINE_LENGTH = 120  # as pyproject.toml asks of generated files
FULL_ALIGNMENT = MOST_LOADED  # of addresses in bytes, so that a thread loads as many at once as it can

Signature = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Block:
    """A block of a row's columns as attention takes it.

    Attributes:
        name: suffix of its variables.
        start: its first column.
        columns: number of columns; the block's others are masked.
        block: its width.
        masked: whether it is wider than its columns.
        acc: name of its accumulator; empty if it is not part of V.
        alignment, aligned: known alignment of its addresses, as text: the constexpr by name, and as one of `config`.
    """

    name: str
    start: int
    columns: int
    block: int
    masked: bool
    acc: str
    alignment: str
    aligned: str


def sm90_modules(plan: Plan) -> list[str]:
    """Return the modules of the package's sm90 kernels; attention over latent rows comes first."""
    ordered = sorted(plan.families, key=lambda family: not isinstance(family, LatentFamily))
    return [module for family in ordered for module in family.sm90_modules]


def kernels_of(families: Iterable[Family]) -> list[str]:
    """Return the names of the kernels that calls of these families can run, each once."""
    return list(dict.fromkeys(name for family in families for name in family.kernels))


def fields_of(kind: type[Any], found: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of `found` that are fields of a context's class."""
    return {field.name: found[field.name] for field in fields(kind) if field.name in found}


def tuple_text(entries: Iterable[object]) -> str:
    """Format a tuple, in one line, of entries that are text or numbers."""
    texts = [str(entry) for entry in entries]
    return f"({', '.join(texts)}{',' if len(texts) == 1 else ''})"


def imported(module: str, names: list[str]) -> str:
    """Format the names after `import` from a module of the package: one per line if they do not fit one line."""
    line = ", ".join(names)
    if len(f"from .{module} import {line}") <= LINE_LENGTH:
        return line
    return "(\n" + "".join(f"    {name},\n" for name in names) + ")"


def stated_scale(scale: float | None) -> str:
    """Return the spec's softmax scale as text; empty if it has none."""
    return "" if scale is None else repr(scale)


def is_aligned(columns: int, itemsize: int = ITEMSIZE) -> bool:
    """Whether an address this many columns into an aligned row is aligned. A column has `itemsize` bytes."""
    return columns * itemsize % FULL_ALIGNMENT == 0


def alignment_of(column: int) -> str:
    """Return the known alignment of addresses `column` columns into an aligned row: ALIGNMENT or 1."""
    return "ALIGNMENT" if is_aligned(column) else "1"


def columns_text(start: int, block: int) -> str:
    """Return the numbers of a block's columns, from `start` on, as text."""
    return f"{start} + tl.arange(0, {block})" if start else f"tl.arange(0, {block})"


def blocks_of(chunks: Iterable[Chunk]) -> list[Block]:
    """Return the blocks of a row's chunks."""
    chunks = list(chunks)
    in_v = [chunk for chunk in chunks if chunk.in_v]
    found = []
    for chunk in chunks:
        number = f"_{in_v.index(chunk)}" if chunk.in_v and len(in_v) > 1 else ""
        alignment = alignment_of(chunk.start)
        found.append(
            Block(
                name=chunk.name,
                start=chunk.start,
                columns=chunk.columns,
                block=chunk.block,
                masked=chunk.masked,
                acc=f"acc{number}" if chunk.in_v else "",
                alignment=alignment,
                aligned=f"config.{alignment}" if alignment == "ALIGNMENT" else alignment,
            )
        )
    return found
