"""Peers: kernels to measure a package against. None is required: those that do not import are absent, with a reason."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from mlagen.bench.package import BenchPackage
from mlagen.bench.peers.cache import gather_peers, writer_peers
from mlagen.bench.peers.dense_decode import dense_decode_peers
from mlagen.bench.peers.dense_fwd import dense_fwd_peers
from mlagen.bench.peers.indexer_cache import indexer_cache_peers
from mlagen.bench.peers.indexer_select import indexer_select_peers
from mlagen.bench.peers.indices import indices_peers
from mlagen.bench.peers.merge_states import merge_states_peers
from mlagen.bench.peers.mqa_logits import mqa_logits_peers
from mlagen.bench.peers.sparse_decode import sparse_decode_peers
from mlagen.bench.peers.sparse_fwd import sparse_fwd_peers
from mlagen.bench.peers.topk import topk_peers
from mlagen.bench.trial import Entrant, Sizes

PEERS: dict[str, Callable[[BenchPackage, Any, Sequence[Any]], Iterable[Entrant[Any]]]] = {
    "prefill": sparse_fwd_peers,
    "decode": sparse_fwd_peers,
    "shared": sparse_fwd_peers,
    "cache": writer_peers,
    "gather": gather_peers,
    "indexer_cache": indexer_cache_peers,
    "indices": indices_peers,
    "sparse_decode": sparse_decode_peers,
    "dense_decode": dense_decode_peers,
    "dense_fwd": dense_fwd_peers,
    "merge_states": merge_states_peers,
    "mqa_logits": mqa_logits_peers,
    "topk": topk_peers,
    "indexer_select": indexer_select_peers,
}


def peers_of(package: BenchPackage, shape: Sizes, inputs: Sequence[Any]) -> list[Entrant[Any]]:
    """Others' kernels that compete with a package's at a shape, also those that cannot run it or are not installed.

    Args:
        package: the package.
        shape: sizes of the call.
        inputs: its trial's input sets.
    """
    return list(PEERS[shape.family](package, shape, inputs))
