"""The families of kernels that can be measured: which shapes of a package, and how a shape is made ready."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from mlagen.bench.families import (
    cache,
    dense_decode,
    dense_fwd,
    indexer_cache,
    indexer_select,
    indices,
    merge_states,
    mqa_logits,
    sparse_decode,
    sparse_fwd,
    topk,
)
from mlagen.bench.package import BenchPackage
from mlagen.bench.trial import Setting, Sizes, Trial


@dataclass(frozen=True)
class Family:
    """A family of kernels.

    Attributes:
        shapes: shapes that a package is measured at, for some head counts or, None, the usual ones; none if it has no
            wrapper of the family.
        trials: returns the function that readies shapes, for the trials of one run.
        modules: modules of a package with the measured wrappers; it may lack some.
    """

    shapes: Callable[[BenchPackage, Sequence[int] | None], Sequence[Sizes]]
    trials: Callable[[Setting], Callable[[Any], Trial[Any]]]
    modules: tuple[str, ...]


CACHES = ("cache", "extra_cache")

FAMILIES = {
    "prefill": Family(partial(sparse_fwd.shapes_of, "prefill"), sparse_fwd.trials, ("sparse_fwd",)),
    "decode": Family(partial(sparse_fwd.shapes_of, "decode"), sparse_fwd.trials, ("sparse_fwd",)),
    "shared": Family(sparse_fwd.shared_shapes, sparse_fwd.trials, ("sparse_fwd",)),
    "cache": Family(cache.writer_shapes, cache.writer_trials, CACHES),
    "gather": Family(cache.gather_shapes, cache.gather_trials, CACHES),
    "indexer_cache": Family(indexer_cache.indexer_cache_shapes, indexer_cache.indexer_cache_trials, ("indexer_cache",)),
    "indices": Family(indices.indices_shapes, indices.indices_trials, ("indices",)),
    "sparse_decode": Family(sparse_decode.sparse_decode_shapes, sparse_decode.sparse_decode_trials, ("sparse_decode",)),
    "dense_decode": Family(dense_decode.dense_decode_shapes, dense_decode.dense_decode_trials, ("dense_decode",)),
    "dense_fwd": Family(dense_fwd.dense_fwd_shapes, dense_fwd.dense_fwd_trials, ("dense_fwd",)),
    "merge_states": Family(merge_states.merge_states_shapes, merge_states.merge_states_trials, ("merge_states",)),
    "mqa_logits": Family(mqa_logits.logits_shapes, mqa_logits.logits_trials, ("mqa_logits",)),
    "topk": Family(topk.topk_shapes, topk.topk_trials, ("topk",)),
    "indexer_select": Family(indexer_select.pick_shapes, indexer_select.pick_trials, ("indexer_select",)),
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
