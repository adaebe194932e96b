"""Index kernels broken on purpose; `mutants.py` runs verification on each of them.

Usage: python indices_mutants.py PACKAGE_DIR WORK_DIR [NAMES], as mutants.py.
"""

import re

import mutants
from mutants import Mutant

INDICES, KERNELS, LAUNCH = "indices.py", "_indices_kernels.py", "_launch.py"


def _literal(name: str, old: str, new: str, *only: str, file: str = KERNELS) -> Mutant:
    return Mutant(name, file, re.escape(old), new, only)


MAP_MUTANTS = (
    _literal(
        "an index past the columns reads on", "mask=index < limit", "mask=index < (1 << 31)", "global: indices: e*"
    ),
    _literal("one past the last column is read", "mask=index < limit", "mask=index <= limit", "global: indices: edges"),
    _literal(
        "requests are not bounded", "(request >= 0) & (request < num_requests)", "request >= 0", "global: request: o*"
    ),
    _literal("negative requests are known", "(request >= 0) & ", "", "global: request: outside"),
    _literal("negative blocks name slots", "block < block_limit", "index < limit", "global: blocks: negative"),
    _literal(
        "blocks past int32 name slots",
        "INT32_VALUES // call.block_size",
        "INT32_VALUES",
        "global: blocks: limit*",
        file=INDICES,
    ),
    _literal(
        "the multiplier is rounded down",
        "-(-(1 << (31 + shift)) // divisor)",
        "(1 << (31 + shift)) // divisor",
        "global: block size: *",
        file=LAUNCH,
    ),
    _literal("the shift is one too large", "0), shift", "0), shift + 1", "global: block size: *", file=LAUNCH),
    _literal("slots lack the place in the block", "slot = (index + ", "slot = (", "global: typical"),
    _literal(
        "indices that name nothing count", "count += named.to", "count += (index < limit).to", "global: blocks: l*"
    ),
    _literal("lanes past the last index count", "mask=columns < topk, other=-1)", "other=-1)", "global: topk: 17"),
    _literal("padding tokens count", "tl.where(is_valid, lens, 0)", "lens", "global: mask: none"),
    _literal(
        "the last index is dropped", "mask = columns < topk", "mask = columns < topk - 1", "global: indices: last*"
    ),
    _literal("the last step is dropped", "topk, parts * BLOCK_N)", "topk - 1, parts * BLOCK_N)", "global: topk: 1"),
    _literal(
        "offsets of indices are 32 bits wide",
        "token * indices_stride",
        "(token * indices_stride).to(tl.int32)",
        "global: layout: indices far",
    ),
    _literal(
        "offsets of the block table are 32 bits wide",
        "request.to(tl.int64) * block_table_stride",
        "(request * block_table_stride).to(tl.int32)",
        "global: layout: block table far",
    ),
    Mutant(
        "rows are always called aligned",
        INDICES,
        r"1 if rows % 16 else 16",
        "16",
        ("global: topk: 17", "combine: topk: 17*"),
    ),
    _literal(
        "counts are returned unasked",
        "(slots, counts) if return_valid_counts",
        "(slots, slots) if True",
        "convert: w*",
        file=INDICES,
    ),
    _literal(
        "prefill workspaces are ignored", "if HAS_PREFILL_WORKSPACE:", "if False:", "refuses: HAS_*", file=INDICES
    ),
    _literal(
        "short requests are taken",
        "if requests < tokens:",
        "if False:",
        "refuses: token_to_req, an entry short*",
        file=INDICES,
    ),
)
COMBINE_MUTANTS = (
    _literal("query_start_loc is not rebased", "tl.load(query_start_ptr) + tokens", "tokens", "combine: start"),
    _literal("the search stops before a request's first token", "begin <= place", "begin < place", "combine: typical"),
    _literal(
        "the search runs past the last request", "(probe < num_requests) & (begin", "(begin", "combine: requests: many"
    ),
    _literal(
        "the search is a step short", "0).bit_length()", "0).bit_length() - 1", "combine: requests: *", file=INDICES
    ),
    _literal("tokens past the last request have rows", "known & (place < end)", "known", "combine: tokens: past*"),
    _literal(
        "tokens before their sequence have rows",
        "tl.maximum(seq_len - end + place + 1, 0)",
        "seq_len - end + place + 1",
        "combine: requests: sequence*",
    ),
    _literal(
        "a compressed row counts before it is full",
        "seen // compress_ratio",
        "tl.cdiv(seen, compress_ratio)",
        "combine: typ*",
    ),
    _literal("the window begins a row early", "+ 1 - lens", "- lens", "combine: typical"),
    _literal(
        "all of the sequence counts as gathered",
        "window_row + gather_len",
        "window_row + seq_len",
        "combine: requests: g*",
    ),
    _literal("the window is in the compressed rows", "first_row + window_row", "first_row", "combine: typical"),
    _literal("the first request's rows", "request * request_rows", "request * 0", "combine: typical"),
    _literal("an index of -1 names a row", "((index | row) >= 0)", "(row >= 0)", "combine: indices: none"),
    _literal("a row past int32 is named", "((index | row) >= 0)", "(index >= 0)", "combine: indices: int32 range"),
    _literal(
        "indices past the last column are read",
        "tl.minimum(topk_len, num_indices)",
        "topk_len",
        "combine: topk: 24 of *",
    ),
    _literal(
        "the row is not filled up",
        "tl.where(named, row, -1), mask=there",
        "row, mask=there & named",
        "combine: typical",
    ),
    _literal(
        "the length is the top-k part's",
        "tl.store(lens_ptr + tokens, lens",
        "tl.store(lens_ptr + tokens, topk_len",
        "combine: typ*",
    ),
    _literal(
        "offsets are 32 bits wide",
        "tokens.to(tl.int64) * topk_indices_stride",
        "(tokens * topk_indices_stride).to(tl.int32)",
        "combine: layout: far",
    ),
    _literal(
        "a negative topk is taken",
        '_integer("topk", topk, 0)',
        '_integer("topk", topk, -9)',
        "refuses: topk, -1*",
        file=INDICES,
    ),
    _literal(
        "a window past the request's rows is taken", "if N > M:", "if False:", "refuses: N, more than M*", file=INDICES
    ),
)

if __name__ == "__main__":
    mutants.MUTANTS = (*MAP_MUTANTS, *COMBINE_MUTANTS)
    mutants.TYPICAL = "global: typical"
    mutants.main()
