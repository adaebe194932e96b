"""Writers and gathers broken on purpose; `mutants.py` runs verification on each of them.

Usage: python cache_mutants.py PACKAGE_DIR WORK_DIR [NAMES], as mutants.py; the package's name says which it has.
"""

import re
import sys
from pathlib import Path

import mutants
from mutants import Mutant

CACHE, KERNELS, LAYOUT = "cache.py", "_cache_kernels.py", "_layout.py"


def _cache(name: str, old: str, new: str, *only: str) -> Mutant:
    return Mutant(name, CACHE, re.escape(old), new.replace("\\", r"\\"), only)


def _kernel(name: str, old: str, new: str, *only: str) -> Mutant:
    return Mutant(name, KERNELS, re.escape(old), new, only)


def _layout(name: str, old: str, new: str, *only: str) -> Mutant:
    return Mutant(name, LAYOUT, re.escape(old), new, only)


ANY_LAYOUT = (
    _kernel(
        "slots are off by one",
        "page_offsets = index - pages *",
        "page_offsets = index + 1 - pages *",
        "writer: typical (insert)",
    ),
    _kernel("a slot past the cache is written", "(slots < num_slots)", "(slots <= num_slots)", "writer: slots past *"),
    _kernel("negative slots are written", "(slots >= 0) & ", "", "writer: negative slots *"),
    _kernel("slots are cut to 32 bits", "slots < num_slots", "slots.to(tl.int32) < num_slots", "writer: slots past *"),
    _cache("the token count is the rows'", "= call.slot_mapping.shape[0]", "= call.kv_c.shape[0]", "writer: fewer *"),
    _kernel(
        "the last token is dropped", "exists = tokens < num_tokens", "exists = tokens < num_tokens - 1", "writer: s*"
    ),
    _cache("rows are always called aligned", "1 if (addresses | strides) % 16 else 16", "16", "writer: sources odd *"),
    _kernel("RoPE comes from the latent", "ptrs = k_pe_ptr +", "ptrs = kv_c_ptr +", "writer: typical (insert)"),
    _kernel("a block table has no last column", "& (columns < num_columns.to(tl.uint32))", "", "gather: table too *"),
    _kernel(
        "pages past the last are read",
        "pages < cache.num_pages.to(tl.uint32)",
        "pages < (1 << 31)",
        "gather: pages out*",
    ),
    _kernel("a position lacks its page's begin", "(pages - columns) *", "pages *", "gather: block size 53 *"),
    _kernel(
        "rows past a length are written",
        "tl.where(tokens < end, _take(slots, taken, BLOCK_T), -1)",
        "_take(slots, taken, BLOCK_T)",
        "gather: few programs *",
    ),
    _cache(
        "no token is gathered where none is expected",
        'max(_launch.count("max_gather_len", max_gather_len, 0), 1)',
        '_launch.count("max_gather_len", max_gather_len, 0)',
        "gather: max_gather_len 0 *",
    ),
    _cache(
        "tokens past those expected are left out",
        '"max_tokens": max_tokens - offset}',
        '"max_tokens": tokens}',
        "gather: max_gather_len *",
    ),
    _cache("another kind of e4m3 is taken", ", use_fnuz, ", ", use_fnuz, use_fnuz, ", "refuses: use_fnuz*"),
    _cache(
        "rows of other bytes are taken",
        ", bytes_per_token, ",
        ", bytes_per_token, bytes_per_token, ",
        "refuses: bytes_per*",
    ),
    _kernel("rows past out are written", "end = tl.minimum(end, max_tokens)", "", "gather: few programs, less*"),
    _kernel("a program repeats a block's pages", "taken += BLOCK_T", "taken += 0", "gather: few programs *"),
    _kernel("a program looks up once", "taken == LOOKUP_T", "taken < 0", "gather: few programs *"),
    _kernel(
        "a program takes one block", "range(begin, end, step)", "range(begin, end, 1 << 30)", "gather: few programs *"
    ),
    _kernel("requests share what 32 have", "num_requests > LOOKUP_T", "num_requests < 0", "gather: many requests *"),
    _kernel("gather_lens are not looked at", "first = end - count", "first = 0", "gather: typical (requests)"),
    _cache("the offset is not looked at", "out[:, offset:]", "out", "gather: offset *"),
    _kernel(
        "a request runs into the next",
        "(tokens < end), positions",
        "(tokens <= end), positions",
        "gather: tokens past *",
    ),
    _kernel("requests have no end", "(request < num_requests)", "(request < (1 << 30))", "gather: requests that *"),
    _kernel("negative requests are there", "(request >= 0) & ", "", "gather: requests that *"),
    _kernel(
        "seq_starts are not looked at", "positions += skipped", "positions += 0 * skipped", "gather: typical (tokens)"
    ),
    _kernel("seq_starts are needed", "if seq_starts_ptr is not None", "if True", "gather: without seq_starts *"),
    _cache("a layout's name does not count", ", *KV_CACHE_DTYPES", ", kv_cache_dtype", "refuses: kv_c*"),
    _layout(
        "page offsets are 32 bits wide",
        "page.to(tl.int64) * page_stride",
        "(page * page_stride).to(tl.int32)",
        "writer: far pages *",
        "gather: far pages *",
    ),
    _layout("a NaN is stored as a number", "tl.where(values == values, code, 0x7F)", "code", "writer: not finite *"),
    _layout("values have half the precision", "* 1048576.0", "* 2097152.0", "writer: typical *"),
    _layout("a NaN is read as a number", "magnitude == 0x7F", "magnitude == 0x80", "gather: typical *"),
)
PLANAR = (
    _layout("the floor is left out", "tl.maximum(amax, 0.0001)", "amax", "writer: tiles *"),
    _layout("the divisor is off", "(1.0 / 448.0)", "(1.0 / 447.0)", "writer: tiles *"),
    _layout("scales are rounded to the nearest", "+ 0x7FFFFF)", "+ 0x400000)", "writer: typical *"),
    _layout(
        "infinite scales divide by a number", "tl.where(exponents == 255, 0, bits)", "bits", "writer: not finite *"
    ),
    _layout(
        "padding is not written", "tl.where((tiles < 7)[None, :], stored_scales, 0)", "stored_scales", "writer: t*"
    ),
    _layout(
        "the smallest scale is 0", ", 1 << 22)  # 2^-127 is a subnormal\n    return bits", ", 0)\n    return bits", "*"
    ),
    _layout(
        "rows of the second plane are dense",
        "SECOND_PLANE_BYTES = tl.constexpr(8)",
        "SECOND_PLANE_BYTES = tl.constexpr(7)",
        "writer: t*",
    ),
    _cache("pages that overlap are taken", "page_stride < _page_size(block_size)", "False", "refuses: *overlap*"),
    _cache("rows that lie apart are taken", "if row_stride != _layout.ROW_BYTES", "if False", "refuses: *apart*"),
)
QUOTIENTS = (
    _layout(
        "quotients are not corrected", "return tl.fma(remainders, reciprocals, quotients)", "return quotients", "w*"
    ),
    _layout("zeros lose their sign", "x * (factors * -1.0)", "0.0 - x * factors", "writer: every *"),
    _layout("the floor is that of other scales", "1.1754943508222875e-38", "0.0001", "writer: tiles *"),
    _layout("the row stride is assumed", "* row_stride", "* (512 + 144)", "*: row s*"),
    _cache("a wrong dtype is taken", "if cache.dtype not in CACHE_DTYPES", "if False", "refuses: k*_cache, dtype*"),
    _cache("rows that overlap are taken", "if size > 1 and stride < extent", "if False", "refuses: *overlap*"),
    _cache("a begin off its values is taken", "% _layout.ROW_ALIGNMENT", "% 1", "refuses: *a begin*"),
    _cache("None is no token", '_launch.integer("num_tokens"', '_launch.count("num_tokens"', "refuses: num_tokens*"),
)
FOUR_BIT = (
    _layout(
        "the even column is in the high half",
        "_e2m1_codes(even) + (_e2m1_codes(odd) - 1536.0)",
        "_e2m1_codes(odd) + (_e2m1_codes(even) - 1536.0)",
        "writer: typical *",
    ),
    _layout(
        "the even column is read from the high half",
        "packed & 15, packed >> 4",
        "packed >> 4, packed & 15",
        "gather: t*",
    ),
    _layout("ties go up", "counts + 1540.0", "(counts + 0.01) + 1540.0", "writer: every *", "writer: tiles *"),
    _layout(
        "a NaN keeps its sign",
        "tl.minimum(doubles.to(tl.float16), tl.full(doubles.shape, 12.0, tl.float16))",
        "doubles.to(tl.float16)",
        "writer: not finite *",
    ),
    _layout(
        "scales are stored in order", "tl.permute(stored_scales, 0, 2, 1).reshape", "stored_scales.reshape", "*: t*"
    ),
    _layout("an infinite scale is no number", ", 448.0))", ', float("inf")))', "writer: not finite *"),
)
OF_PACKAGE = {"planar": PLANAR, "quotients": QUOTIENTS, "four_bit": FOUR_BIT}

if __name__ == "__main__":
    own = OF_PACKAGE[Path(sys.argv[1]).name]
    mutants.MUTANTS = (*ANY_LAYOUT, *own) if own is PLANAR else own
    mutants.TYPICAL = "gather: typical (tokens)"
    mutants.TARGETS = ["sm80"]  # without e4m3 in hardware, so that the kernels' own rounding is at work
    mutants.main()
