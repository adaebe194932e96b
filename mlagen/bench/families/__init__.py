"""The families of kernels that can be measured. BENCHMARKS of a family's module has its benchmarks by name."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module

from mlagen.bench.package import BenchPackage
from mlagen.bench.trial import Family, Sizes

# In the order of reports.
MODULES = (
    "sparse_fwd",
    "cache",
    "prologue",
    "compressor",
    "latents",
    "out_quant",
    "kpool",
    "indexer_cache",
    "indices",
    "sparse_decode",
    "dense_decode",
    "dense_fwd",
    "merge_states",
    "mqa_logits",
    "topk",
    "indexer_select",
    "candidates",
    "layer",
)
FAMILIES: dict[str, Family] = {
    name: family for module in MODULES for name, family in import_module(f"{__package__}.{module}").BENCHMARKS.items()
}


def shapes_of(
    package: BenchPackage, families: Sequence[str] = tuple(FAMILIES), heads: Sequence[int] | None = None
) -> list[Sizes]:
    """Shapes that a package is measured at, of the families that it has wrappers of.

    Args:
        package: the package.
        families: names in FAMILIES.
        heads: head counts of attention; None: the usual ones.
    """
    return [shape for name in families for shape in FAMILIES[name].shapes(package, heads)]
