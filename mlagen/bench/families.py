"""The families of kernels that can be measured: which shapes of a package, and how a shape is made ready."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from mlagen.bench import attention, cache, dense, heads, index, kvcache
from mlagen.bench.package import BenchPackage
from mlagen.bench.trial import Setting, Sizes, Trial


@dataclass(frozen=True)
class Family:
    """A family of kernels.

    Attributes:
        shapes: what a package is measured at, for some head counts or, None, the usual ones; none if it has no wrapper
            of the family.
        trials: makes what readies shapes, for the trials of one run.
    """

    shapes: Callable[[BenchPackage, Sequence[int] | None], Sequence[Sizes]]
    trials: Callable[[Setting], Callable[[Any], Trial[Any]]]


FAMILIES = {
    "prefill": Family(partial(attention.shapes_of, "prefill"), attention.trials),
    "decode": Family(partial(attention.shapes_of, "decode"), attention.trials),
    "shared": Family(attention.shared_shapes, attention.trials),
    "cache": Family(cache.writer_shapes, cache.writer_trials),
    "gather": Family(cache.gather_shapes, cache.gather_trials),
    "index": Family(index.index_shapes, index.index_trials),
    "kvcache": Family(kvcache.kvcache_shapes, kvcache.kvcache_trials),
    "dense": Family(dense.dense_shapes, dense.dense_trials),
    "heads": Family(heads.heads_shapes, heads.heads_trials),
    "merge": Family(heads.merge_shapes, heads.merge_trials),
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
