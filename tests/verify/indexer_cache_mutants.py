"""Kernels around the indexer's keys broken on purpose; `mutants.py` runs verification on each of them.

Usage: python indexer_cache_mutants.py PACKAGE_DIR WORK_DIR [NAMES], as mutants.py; packages: halves, pairs, blocks.
"""

import re
import sys
from pathlib import Path

import mutants
from mutants import Mutant

WRAPPERS, KERNELS, LAYOUT, QUERY = (
    "indexer_cache.py",
    "_indexer_cache_kernels.py",
    "_indexer_layout.py",
    "_indexer_query.py",
)


def _literal(name: str, old: str, new: str, *only: str, file: str = KERNELS) -> Mutant:
    return Mutant(name, file, re.escape(old), new.replace("\\", r"\\"), only)


ANY = (
    _literal(
        "slots are off by one", "page_offsets = index - pages *", "page_offsets = index + 1 - pages *", "write: typical"
    ),
    _literal("a slot past the cache is written", "(slots < num_slots)", "(slots <= num_slots)", "write: slots past *"),
    _literal("negative slots are written", "(slots >= 0) & ", "", "write: negative slots"),
    _literal("slots are cut to 32 bits", "slots < num_slots", "slots.to(tl.int32) < num_slots", "write: slots past *"),
    _literal(
        "the last token is dropped", "exists = tokens < num_tokens\n", "exists = tokens < num_tokens - 1\n", "write: s*"
    ),
    _literal(
        "a page's stride is its rows'",
        "page.to(tl.int64) * page_stride",
        "page.to(tl.int64) * (page_size * ROW_BYTES)",
        "write: page stride, *",
        file=LAYOUT,
    ),
    _literal(
        "page offsets are 32 bits wide",
        "page.to(tl.int64) * page_stride",
        "(page * page_stride).to(tl.int32)",
        "write: far pages",
        file=LAYOUT,
    ),
    _literal(
        "scales stand at the page's begin",
        "plane_rows = pages + page_size.to(tl.int64) * FIRST_PLANE_BYTES",
        "plane_rows = pages",
        "write: typical",
        file=LAYOUT,
    ),
    _literal(
        "scales stand a token late",
        "page_size.to(tl.int64) * FIRST_PLANE_BYTES",
        "(page_size + 1).to(tl.int64) * FIRST_PLANE_BYTES",
        "write: block size 53",
        file=LAYOUT,
    ),
    Mutant("keys have no floor", LAYOUT, r"tl\.maximum\(amax, [^)]*\)", "amax", ("write: tiles",)),
    Mutant("the query has no floor", QUERY, r"tl\.maximum\(amax, [^)]*\)", "amax", ("query: tiles",)),
    Mutant("keys have half the divisor", LAYOUT, r"\(1\.0 / (448|6)\.0\)", r"(2.0 / \1.0)", ("write: typical",)),
    _literal("exponents are cut off", "+ 0x7FFFFF) >> 23", ") >> 23", "query: typical", file=QUERY),
    _literal("weights lack the heads' factor", " * head_scale", "", "query: typical"),
    _literal("weights lack the softmax's factor", "weights * softmax_scale", "weights", "query: typical"),
    _literal("the query's heads follow each other", "* q_head_stride", "* D_K", "query: layout: query slice"),
    _literal(
        "offsets of tokens are 32 bits wide",
        "token * q_token_stride",
        "(token * q_token_stride).to(tl.int32)",
        "query: layout: query far",
    ),
    _literal("weights of tokens follow each other", "* weights_stride", "* num_heads", "query: layout: weights *"),
    _literal(
        "rows of the table follow each other", "* angles.cos_stride", "* (2 * D_HALF)", "*angles slice", "*tables slice"
    ),
    _literal(
        "positions past the table are taken",
        "positions < angles.num_positions",
        "positions < 0x7FFFFFFFFFFFFFF",
        "*positions: garbage",
    ),
    _literal(
        "positions are off by one", "tl.where(known, positions, 0)", "tl.where(known, positions + 1, 0)", "query*"
    ),
    _literal(
        "a head too many is written", "exists = heads < num_heads", "exists = heads <= num_heads", "query: heads*"
    ),
    _literal(
        "every token has a key", "((position + 1) % compress_ratio == 0)", "(position >= 0)", "normalise: ratio *"
    ),
    _literal(
        "a group's first token has its key",
        "((position + 1) % compress_ratio == 0)",
        "(position % compress_ratio == 0)",
        "normalise: ratio *",
    ),
    _literal(
        "keys are rotated to their own position",
        "// compress_ratio * compress_ratio",
        "* 1",
        "normalise: ratio *",
    ),
    _literal("the mean square lacks the mean", "tl.sum(squares, 1) / D_K", "tl.sum(squares, 1)", "normalise: typical"),
    _literal(
        "the mean square lacks a slice", "squares += row_1 * row_1", "squares += row_0 * row_0", "normalise: typ*"
    ),
    _literal("the norm has no weight", "x * factors * weight", "x * factors", "normalise: typical"),
    _literal("slices are weighted alike", "(weight_ptrs + 96,", "(weight_ptrs + 64,", "normalise: typical"),
    _literal(
        "the norm is not rounded",
        "row_3 = _normalise(row_3, factors, weight, bias, has_bias)",
        "row_3 = row_3 * (factors * 1.02) * weight",
        "normalise: typical",
    ),
    _literal("a block table has no last column", "& (columns < num_columns.to(tl.uint32))", "", "gather: table too *"),
    _literal(
        "pages past the last are read", "pages < num_pages.to(tl.uint32)", "pages < (1 << 31)", "gather: pages out*"
    ),
    _literal("the search stops early", "(begin <= tokens), probe", "(begin < tokens), probe", "gather: requests: *"),
    _literal(
        "a request's first token has no key", "exists & (begin <= tokens)", "exists & (begin < tokens)", "gather: t*"
    ),
    _literal(
        "the search is a step short", "0).bit_length()", "0).bit_length() - 1", "gather: requests: m*", file=WRAPPERS
    ),
    _literal(
        "tokens past the last request have keys",
        "(begin <= tokens) & (tokens < end)",
        "(begin <= tokens)",
        "gather: s*",
    ),
    _literal("keys that are not there stay", "mask=exists)", "mask=exists & valid)", "gather: pages out*"),
    _literal("rows of values follow each other", "* values_stride", "* 1 * values.shape[0]", "gather: out slice"),
    _literal(
        "any rounding is taken", ", scale_fmt, ", ", scale_fmt, scale_fmt, ", "refuses: scale_fmt*", file=WRAPPERS
    ),
    _literal("rows of results may overlap", "tensor.stride(0) < nbytes", "False", "refuses: dst_*", file=WRAPPERS),
    _literal(
        "fewer positions than tokens are taken",
        "if known < tokens:",
        "if False:",
        "refuses: positions, one*",
        file=WRAPPERS,
    ),
    _literal(
        "cos and sin change places", "return cos.to(tl.float32), sin", "return sin.to(tl.float32), cos", "query: typ*"
    ),
)
IN_ONE = (
    _literal("the mean stays", "row_1 -= mean", "row_1 -= 0.0 * mean", "keys, query: typical"),
    _literal(
        "an RMSNorm subtracts the mean",
        "has_bias != 0, tl.sum(total",
        "has_bias >= 0, tl.sum(total",
        "keys, query: RMS*",
    ),
    _literal("the mean lacks a slice", "total += row_2", "total += row_1", "keys, query: typical"),
    _literal("the bias is left out", "scaled + bias, scaled", "scaled, scaled", "keys, query: typical"),
    _literal("slices have the same bias", "(bias_ptrs + 96,", "(bias_ptrs + 64,", "keys, query: typical"),
    _literal(
        "a program of the query takes keys", "block < key_programs", "block <= key_programs", "keys, query: typical"
    ),
    _literal("the query begins where the keys do", "block - key_programs", "block", "keys, query: typical"),
    _literal("sines are cosines", "angles.sin_ptr + angle_row", "angles.cos_ptr + angle_row", "keys, query: typical"),
    _literal("sines lie as cosines do", "* angles.sin_stride", "* angles.cos_stride", "keys, query: tables slice"),
    _literal("weights lack their factor", "weights_scale, 1.0, q_token", "1.0, 1.0, q_token", "keys, query: typical"),
    _literal(
        "keys of all tokens are written",
        "call.num_tokens = call.slot_mapping.shape[0]\n    call.key",
        "call.num_tokens = call.k.shape[0]\n    call.key",
        "keys, query: slots: shorter",
        file=WRAPPERS,
    ),
    _literal("any style is taken", ", is_neox, ", ", is_neox, is_neox, ", "refuses: is_neox*", file=WRAPPERS),
    _literal(
        "results may have gaps",
        "if not out.is_contig",
        "if False and out.is_contig",
        "refuses: q_out, tok*",
        file=WRAPPERS,
    ),
)
IN_HALVES = (
    _literal("halves turn as pairs", "_rotate_slices(row_0, row_1,", "_rotate_slices(row_0, row_0,", "query: typical"),
    _literal(
        "the last columns turn",
        "row_0, row_1 = _rotate_slices(row_0, row_1,",
        "row_2, row_3 = _rotate_slices(row_2, row_3,",
        "query: typical",
    ),
    _literal("halves turn the other way", "x * cos - y * sin", "x * cos + y * sin", "query: typical"),
    _literal("a slice is stored twice", "x = slices[number]", "x = slices[0]", "normalise: typical", file=LAYOUT),
    _literal("weights lack the heads' scales", "weights *= scale", "weights *= 1.0", "query: typical"),
    _literal(
        "a tile's amax lacks a slice",
        "tl.static_range(1, 4)",
        "tl.static_range(1, 3)",
        "query: heads: 128",
        file=QUERY,
    ),
)
IN_PAIRS = (
    _literal(
        "the first columns turn", "row_2 = _rotate_slice(row_2,", "row_0 = _rotate_slice(row_0,", "query: typical"
    ),
    _literal("slices turn by the same angles", "known, 16, ALIGNMENT", "known, 0, ALIGNMENT", "query: typical"),
    _literal("pairs turn the other way", "even * cos - odd * sin", "even * cos + odd * sin", "query: typical"),
    _literal(
        "pairs turn as halves",
        "tl.split(x.to(tl.float32).reshape(x.shape[0], D_SLICE // 2, 2))",
        "tl.split(tl.permute(x.to(tl.float32).reshape(x.shape[0], 2, D_SLICE // 2), 0, 2, 1))",
        "query: typical",
    ),
    _literal("pairs are put back as halves", "tl.interleave(rotated_even, rotated_odd)", "x", "query: typical"),
    _literal(
        "scales change places",
        "tl.join(tl.join(scales_0, scales_2), tl.join(scales_1, scales_3))",
        "tl.join(tl.join(scales_0, scales_1), tl.join(scales_2, scales_3))",
        "normalise: typical",
        file=LAYOUT,
    ),
)
IN_BLOCKS = (
    _literal("halves turn as pairs", "D_STEP = tl.constexpr(20)", "D_STEP = tl.constexpr(1)", "query: typical"),
    _literal(
        "the last columns turn", "ROPE_START = tl.constexpr(0)", "ROPE_START = tl.constexpr(56)", "query: typical"
    ),
    _literal("halves turn the other way", "x * cos - ahead * sin", "x * cos + ahead * sin", "query: typical"),
    _literal("halves are weighted alike", "factors, first_weight", "factors, second_weight", "normalise: typical"),
    _literal("the mean square lacks the mean", "squares / D_K", "squares", "normalise: typical"),
)
NAMED = {"halves": (*ANY, *IN_ONE, *IN_HALVES), "pairs": (*ANY, *IN_ONE, *IN_PAIRS), "blocks": IN_BLOCKS}

if __name__ == "__main__":
    mutants.MUTANTS = NAMED[Path(sys.argv[1]).name]
    mutants.TYPICAL = "query: typical"
    mutants.main()
