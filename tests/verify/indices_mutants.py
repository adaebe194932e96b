"""Index kernels broken on purpose; `mutants.py` runs verification on each of them.

Usage: python indices_mutants.py PACKAGE_DIR WORK_DIR [NAMES], as mutants.py. With attention: CHAIN_MUTANTS alone.
"""

import re
import sys
from pathlib import Path

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
        "lengths reach past the last slot",
        "lengths = tl.where(named,",
        "lengths = tl.where(index < limit,",
        "global: *",
    ),
    _literal(
        "lengths count slots", "lengths = tl.where(named, columns + 1, lengths)", "lengths += named", "global: typ*"
    ),
    _literal(
        "a length ends with the last slot", "(named, columns + 1, lengths)", "(named, columns, lengths)", "global: typ*"
    ),
    _literal("columns past the last index count", "mask=columns < topk, other=-1)", "other=-1)", "global: topk: 17"),
    _literal("padding tokens count", "tl.where(is_valid, lens, 0)", "lens", "global: mask: none"),
    _literal(
        "the last index is dropped", "mask = columns < topk", "mask = columns < topk - 1", "global: indices: last*"
    ),
    Mutant(
        "slots of later steps overwrite the first ones",
        KERNELS,
        r"lens \+ tl.cumsum",
        "tl.cumsum",
        ("global: compact: topk 2049",),
    ),
    _literal(
        "compact slots begin a place late", "named.to(tl.int32), 0) - 1", "named.to(tl.int32), 0)", "global: comp*"
    ),
    _literal(
        "nothing follows compact slots", "range(lens, topk, BLOCK_N)", "range(topk, topk, BLOCK_N)", "global: comp*"
    ),
    _literal(
        "the last of what follows is left out",
        "tl.store(out_row + columns, -1, mask=columns < topk)",
        "pass",
        "global: comp*",
    ),
    _literal("other ranks' tokens count", "mask=own & (index < limit)", "mask=index < limit", "convert: ranks*"),
    _literal("tokens of a rank keep their numbers", "index - (group - turn) * interleave", "index", "convert: ranks*"),
    _literal("blocks follow each other", "block * page_rows", "block * block_size", "convert: blocks: 64 of *"),
    _literal(
        "blocks past int32 are named where they lie apart",
        "// call.page_rows + 1)",
        "// call.page_rows + 2)",
        "convert: blocks: * of *",
        file=INDICES,
    ),
    _literal("results go into a new tensor", "if call.out is None:", "if True:", "convert: out: *", file=INDICES),
    _literal("rows of results follow each other", "token * out_stride", "token * topk", "convert: out: slice"),
    _literal(
        "results may lie in the indices",
        "if out.data_ptr() < _end(source)",
        "if False",
        "refuses: out, *",
        file=INDICES,
    ),
    _literal("rows of results may overlap", "out.stride(0) < shape[1]", "False", "refuses: out, *", file=INDICES),
    _literal(
        "a stride below the block size is taken",
        "BLOCK_STRIDE_ROWS, block_size)",
        "BLOCK_STRIDE_ROWS, 1)",
        "refuses: BLOCK_*",
        file=INDICES,
    ),
    _literal(
        "a rank past the last is taken", "dcp_rank, 0, ranks - 1)", "dcp_rank, 0)", "refuses: dcp_rank*", file=INDICES
    ),
    _literal("a mapping is ignored", ", idx_mapping, None", ", None, None", "refuses: idx_*", file=INDICES),
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
        "prefill workspaces are ignored", ", HAS_PREFILL_WORKSPACE, F", ", False, F", "refuses: HAS_*", file=INDICES
    ),
    _literal(
        "strides of ranks' prefill workspaces are ignored",
        ", prefill_workspace_rank_stride, None",
        ", None, None",
        "refuses: prefill_workspace_rank_stride*",
        file=INDICES,
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
    _literal("query_start_loc is not rebased", "base = tl.load(batch.query_start_ptr)", "base = 0", "combine: start"),
    _literal(
        "the search stops before a request's first token", "begin <= tokens", "begin < tokens", "combine: typical"
    ),
    _literal(
        "the search runs past the last request",
        "(probe < batch.num_requests) & (begin",
        "(begin",
        "combine: requests: many",
    ),
    _literal(
        "the search is a step short", "0).bit_length()", "0).bit_length() - 1", "combine: requests: *", file=INDICES
    ),
    _literal("tokens past the last request have rows", "known & (behind >= 0)", "known", "combine: tokens: past*"),
    _literal(
        "tokens before their sequence have rows",
        "tl.maximum(seq_len - behind, 0)",
        "seq_len - behind",
        "combine: requests: sequence*",
    ),
    _literal(
        "a negative sequence length wraps",
        "seq_len = tl.maximum(tl.load(batch.seq_lens_ptr + request, mask=known, other=0), 0)",
        "seq_len = tl.load(batch.seq_lens_ptr + request, mask=known, other=0)",
        "combine: requests: any*",
    ),
    _literal(
        "a negative gathered length wraps",
        "gather_len = tl.maximum(tl.load(batch.gather_lens_ptr + request, mask=known, other=0), 0)",
        "gather_len = tl.load(batch.gather_lens_ptr + request, mask=known, other=0)",
        "combine: requests: any*",
    ),
    _literal(
        "a compressed row counts before it is full",
        "seen // batch.compress_ratio",
        "tl.cdiv(seen, batch.compress_ratio)",
        "combine: typ*",
    ),
    _literal(
        "the window begins a row early",
        "stop = batch.window_size, gather_len - behind",
        "stop = batch.window_size, gather_len - behind - 1",
        "combine: typical",
    ),
    _literal(
        "all of the sequence counts as gathered", "gather_len - behind", "seq_len - behind", "combine: requests: g*"
    ),
    _literal(
        "rows that were not gathered are named",
        "first = tl.maximum(stop - tl.minimum(seen, window_len), 0)",
        "first = stop - tl.minimum(seen, window_len)",
        "combine: window: gathered*",
    ),
    _literal(
        "a window runs into the next request's rows",
        "tl.minimum(stop, batch.window_rows)",
        "stop",
        "combine: window: gathered*",
    ),
    _literal(
        "images are not seen behind a token",
        "stop += tl.minimum(tl.maximum(right, 0), behind)",
        "pass",
        "combine: images: *",
    ),
    _literal("images are not seen before a token", "tl.minimum(left, 0x7FFFFFFE) + 1", "0", "combine: images: *"),
    _literal(
        "images behind the request are seen",
        "tl.minimum(tl.maximum(right, 0), behind)",
        "tl.maximum(right, 0)",
        "combine: images: *",
    ),
    _literal(
        "images take more columns than they may",
        "rows = tl.minimum(rows, batch.window_size + batch.image_tokens)",
        "pass",
        "combine: images: *",
    ),
    _literal(
        "top-k indices of later steps overwrite the first ones",
        "found + tl.cumsum",
        "tl.cumsum",
        "combine: topk: wide*",
    ),
    _literal(
        "compact rows keep their top-k part's length",
        "window_row + first - found",
        "window_row + first - topk_len",
        "combine: *, compact",
    ),
    _literal("compact rows begin with the window", "columns >= found)", "columns >= 0)", "combine: *, compact"),
    _literal(
        "compact rows are not filled up",
        "row = tl.where(columns < lens, window_shift + columns, -1)",
        "row = window_shift + columns",
        "combine: *, compact",
    ),
    _literal("the window is in the compressed rows", "first_row + window_row", "first_row", "combine: typical"),
    _literal("the first request's rows", "request * request_rows", "request * 0", "combine: typical"),
    _literal("an index of -1 names a row", "(compressed | (", "((index < window_row) | (", "combine: indices: none"),
    _literal(
        "an index past the compressed rows is named", "(compressed | (", "((index >= 0) | (", "combine: indices: edges"
    ),
    _literal("rows of results may begin anywhere", "% 64:", "% 1:", "refuses: out, *", file=INDICES),
    _literal(
        "indices past the last column are read",
        "tl.minimum(topk_len, num_indices)",
        "topk_len",
        "combine: topk: 24 of *",
    ),
    _literal(
        "the row is not filled up",
        "tl.where(named, row, -1), mask=exists",
        "row, mask=exists & named",
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
        '_launch.integer("topk", topk, 0)',
        '_launch.integer("topk", topk, -9)',
        "refuses: topk, -1*",
        file=INDICES,
    ),
    _literal(
        "a window past the request's rows is taken", "if N > M:", "if False:", "refuses: N, more than M*", file=INDICES
    ),
)

# Noticed by the attention that the results go into.
CHAIN_MUTANTS = (
    _literal("other ranks' keys count", "mask=own & (index < limit)", "mask=index < limit", "convert: attention of*"),
    _literal("slots lie a place on", "slot = (index + ", "slot = (index + 1 + ", "convert: attention*"),
    _literal(
        "lengths leave the last key out",
        "(named, columns + 1, lengths)",
        "(named, columns, lengths)",
        "convert: attention, holes",
    ),
)

if __name__ == "__main__":
    chained = (Path(sys.argv[1]) / "sparse_decode.py").exists()
    mutants.MUTANTS = CHAIN_MUTANTS if chained else (*MAP_MUTANTS, *COMBINE_MUTANTS)
    mutants.TYPICAL = "convert: typical" if chained else "global: typical"
    mutants.main()
