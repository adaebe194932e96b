"""Peers of the lightning indexer's logits: DeepGEMM. The wrappers have its signatures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from mlagen.bench.families.mqa_logits import FP8, SCHEDULE, LogitsInputs, LogitsShape, logits_call
from mlagen.bench.package import BenchPackage
from mlagen.bench.peers.libraries import DEEP_GEMM, DEEP_GEMM_MODULES, first_module
from mlagen.bench.trial import Call, Entrant

HEADS, COLUMNS, KEYS_A_PAGE = (32, 64), (32, 64, 128), 64  # of its sm90 kernels
MOST_QUERIES = 2


def unsupported(shape: LogitsShape, inputs: LogitsInputs) -> str | None:
    """Why DeepGEMM's sm90 kernels cannot run a call, in one line; None if they can."""
    (field,) = inputs.layout.data
    if field.dtype != "e4m3" or inputs.layout.name != "indexer_fp8":
        return "keys in the layout indexer_fp8 only"
    if shape.num_heads not in HEADS or inputs.layout.columns not in COLUMNS:
        return f"{' or '.join(map(str, HEADS))} heads of {', '.join(map(str, COLUMNS))} columns only"
    if inputs.block_table is not None and (inputs.size != KEYS_A_PAGE or shape.s_q > MOST_QUERIES):
        return f"pages of {KEYS_A_PAGE} keys and at most {MOST_QUERIES} query tokens only"
    return None


def prepare(kind: str, inputs: LogitsInputs) -> Call:
    """A call of DeepGEMM, which compiles at its first one. Raises ImportError where it is not installed."""
    module, pair = first_module(DEEP_GEMM_MODULES), FP8.get(kind, kind)
    return logits_call(pair, getattr(module, pair), getattr(module, SCHEDULE), inputs)


def mqa_logits_peers(
    package: BenchPackage, shape: LogitsShape, inputs: Sequence[LogitsInputs]
) -> Iterator[Entrant[LogitsInputs]]:
    """Others' kernels at a shape of the family."""
    yield Entrant(DEEP_GEMM, partial(prepare, shape.kind), unsupported(shape, inputs[0]))


BENCHMARKS = {"mqa_logits": mqa_logits_peers}
