"""Arguments that the index kernels' wrappers must refuse."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch

from mlagen.verify.call import invalid
from mlagen.verify.call.invalid import Invalid, RefusedCase

NAME = "indices"
GLOBAL = "compute_global_topk_indices_and_lens"
CONVERT = "triton_convert_req_index_to_global_index"
COMBINE = "combine_topk_swa_indices"
SHORT = {GLOBAL: "global", CONVERT: "convert", COMBINE: "combine"}

FIRST = {"topk_indices": (GLOBAL, COMBINE), "token_indices": (CONVERT,)}  # say which device the others must be on
VECTORS = {
    "token_to_req": (GLOBAL,),
    "req_id": (CONVERT,),
    "is_valid_token": (GLOBAL,),
    "query_start_loc": (COMBINE,),
    "seq_lens": (COMBINE,),
    "gather_lens": (COMBINE,),
}
INTEGERS = {  # the least that each may be
    "block_size": (1, (GLOBAL,)),
    "BLOCK_SIZE": (1, (CONVERT,)),
    **dict.fromkeys(("window_size", "topk", "M", "N"), (0, (COMBINE,))),
    "compress_ratio": (1, (COMBINE,)),
    "max_image_tokens": (0, (COMBINE,)),
    "dcp_rank": (0, (CONVERT,)),
    **dict.fromkeys(("dcp_size", "cp_kv_cache_interleave_size"), (1, (CONVERT,))),
}


def _invalid_tensors() -> Iterator[Invalid]:
    for argument, wrappers in {**FIRST, "block_table": (GLOBAL, CONVERT), **VECTORS}.items():
        for one in invalid.tensor(argument, torch.int64, first=argument in FIRST, word="not contiguous"):
            yield replace(one, wrappers=wrappers)
    for argument, wrappers in VECTORS.items():
        if argument != "seq_lens":  # says how many requests there are
            yield Invalid(argument, "an entry short", lambda vector: vector[:-1], wrappers=wrappers)
        if argument in ("is_valid_token", "query_start_loc", "gather_lens"):
            yield Invalid(argument, "an entry too many", invalid.longer, wrappers=wrappers)


def _invalid_results() -> Iterator[Invalid]:
    """Tensors that take results."""
    for how, make in {
        "dtype int64": lambda indices: indices.long(),
        "a row short": lambda indices: indices[1:].clone(),
        "a column short": lambda indices: indices[:, 1:].clone(),
        "rows that overlap": lambda indices: indices[:1].clone().expand(len(indices), -1),
        "the indices themselves": lambda indices: indices,
    }.items():
        yield Invalid("out", how, make, like="token_indices", wrappers=(CONVERT,))
    for how, counts in {
        "dtype int64": torch.zeros(3, dtype=torch.int64),
        "an entry short": torch.zeros(2).int(),
    }.items():
        yield Invalid("valid_counts_out", how, invalid.constant(counts), wrappers=(CONVERT,))

    def pair(late: int, columns: int, gap: int) -> Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
        def make(indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            rows = indices.new_zeros(2048)[late:].as_strided((len(indices), columns), (columns + gap, 1))
            return rows, indices.new_zeros(len(indices))

        return make

    yield Invalid("out", "not a pair", lambda indices: indices, like="topk_indices", wrappers=(COMBINE,))
    for how, sizes in {"narrower": (0, 127, 1), "4 bytes late": (1, 128, 0), "rows 8 bytes late": (0, 128, 2)}.items():
        yield Invalid("out", how, pair(*sizes), like="topk_indices", wrappers=(COMBINE,))


def _invalid_options() -> Iterator[Invalid]:
    """Arguments that only newer versions of vLLM take."""
    for value in (1, None, "yes"):
        yield Invalid("compact", repr(value), invalid.constant(value))
    for rows in (63, 0, -64, 2**31, 64.0, True):
        yield Invalid("BLOCK_STRIDE_ROWS", str(rows), invalid.constant(rows), wrappers=(CONVERT,))
    yield Invalid("dcp_rank", "past the last rank", invalid.constant(1), wrappers=(CONVERT,))
    yield Invalid("idx_mapping", "given", invalid.constant(torch.zeros(3).int()), wrappers=(CONVERT,))
    for argument in ("left_visible", "right_visible"):
        alone = invalid.zeros(3, dtype=torch.int32)
        yield Invalid(argument, "without the other", alone, like="topk_indices", wrappers=(COMBINE,))
    yield Invalid("token_to_req_indices", "as well", lambda one: one, like="token_to_req", wrappers=(GLOBAL,))


def _invalid() -> Iterator[Invalid]:
    yield from _invalid_tensors()
    yield from _invalid_results()
    yield from _invalid_options()
    for argument, (least, wrappers) in INTEGERS.items():
        for value in (least - 1, 2**31, 2.5, None, True):
            yield Invalid(argument, str(value), invalid.constant(value), wrappers=wrappers)
    yield Invalid("topk", "with the window past int32", invalid.constant(2**31 - 100), wrappers=(COMBINE,))
    yield Invalid("M", "rows past int32", invalid.constant(2**30 + 1), wrappers=(COMBINE,))
    yield Invalid("N", "more than M", invalid.constant(2**31 - 1), wrappers=(COMBINE,))
    yield Invalid("token_indices", "not of NUM_TOPK_TOKENS", lambda indices: indices[:, 1:], wrappers=(CONVERT,))
    yield Invalid("NUM_TOPK_TOKENS", "a float", invalid.constant(5.0), wrappers=(CONVERT,))
    yield Invalid("HAS_PREFILL_WORKSPACE", "True", invalid.constant(True), wrappers=(CONVERT,))
    for argument in ("prefill_workspace_request_ids", "prefill_workspace_starts"):
        yield Invalid(argument, "given", invalid.constant(torch.zeros(2)), wrappers=(CONVERT,))
    yield Invalid("prefill_workspace_rank_stride", "given", invalid.constant(64), wrappers=(CONVERT,))


def refused(wrappers: Sequence[str]) -> Iterator[RefusedCase]:
    """A case for each invalid argument of the wrappers that are there."""
    return invalid.refused_cases(
        NAME, {wrapper: short for wrapper, short in SHORT.items() if wrapper in wrappers}, _invalid()
    )
