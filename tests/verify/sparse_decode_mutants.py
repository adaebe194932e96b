"""Attention over a cache broken on purpose; `mutants.py` runs verification on each of them.

Usage: python sparse_decode_mutants.py PACKAGE_DIR WORK_DIR [NAMES], as mutants.py. The package has two
caches of ue8m0_v4, or multiplies a q of e4m3: `kv_mixed`.
"""

import re
import sys
from pathlib import Path

import mutants
from mutants import SPLITS, Mutant

SPARSE_DECODE, KERNELS, LAYOUT = "sparse_decode.py", "_sparse_decode_kernels.py", "_layout.py"


def _literal(name: str, old: str, new: str, *only: str, file: str = SPARSE_DECODE) -> Mutant:
    return Mutant(name, file, re.escape(old), new.replace("\\", r"\\"), only or (mutants.TYPICAL,))


def _kernel(name: str, old: str, new: str, *only: str) -> Mutant:
    return _literal(name, old, new, *only, file=KERNELS)


def _chosen(what: str, extra: str, main: str, *only: str) -> Mutant:
    """A difference of the second cache from the first, taken from the first."""
    return _kernel(f"{what} is the first cache's", f"tl.where(in_extra, {extra}, {main})", main, *only)


mutants.TYPICAL = "sparse_decode: typical"
CACHE_MUTANTS = (
    _chosen("the cache", "extra_cache.k_cache_ptr", "cache.k_cache_ptr"),
    _chosen("the page size", "extra_cache.page_size", "cache.page_size"),
    _chosen("the page stride", "extra_cache.page_stride", "cache.page_stride"),
    _chosen("the list of indices", "extra_indices_ptr", "indices_ptr"),
    _chosen(
        "the number of slots",
        "extra_cache.num_slots",
        "cache.num_slots",
        "sparse_decode: indices: last row, second cache",
    ),
    _kernel(
        "the count is the first list's", "tl.where(in_extra, extra_count, count)", "count", "sparse_decode: topk: 1*"
    ),
    _kernel(
        "one past the last slot is valid", "valid = slot < ", "valid = slot <= ", "sparse_decode: indices: last row*"
    ),
    _kernel("offsets go on in the second list", "start - tl.where(in_extra, extra_start, 0)", "start"),
    _kernel("RoPE columns are not joined", "tl.where(in_first[None, :, None], first, last)", "first"),
    _kernel("RoPE columns are joined a slice early", "tl.arange(0, SLICES) < ", "1 + tl.arange(0, SLICES) < "),
    _kernel(
        "indices past a length count",
        "valid &= offsets < tl.where",
        "valid &= offsets >= 0 * tl.where",
        "sparse_decode: length: m*",
    ),
    _kernel(
        "the loop ends with the first list", "total = extra_start + tl.maximum(extra_end, 0)", "total = extra_start"
    ),
    _kernel(
        "a negative length is taken as it is",
        "tl.maximum(tl.load(cache.topk_length_ptr + request), 0)",
        "tl.load(cache.topk_length_ptr + request)",
        "sparse_decode: splits: negative*",
    ),
    _kernel(
        "requests and positions are swapped",
        "request = (token // query.s_q)",
        "request = (token % query.s_q)",
        "sparse_decode: s_q: 2",
    ),
    _kernel("q is the request's first", " + position * query.q_token_stride", "", "sparse_decode: s_q: 2"),
    _kernel("indices are the request's first", " + position * cache.indices_token_stride", "", "sparse_decode: s_q: 2"),
    _kernel(
        "offsets of q are 32 bits wide",
        "request * query.q_request_stride",
        "(request * query.q_request_stride).to(tl.int32)",
        "sparse_decode: offsets: tokens*",
    ),
    _literal(
        "page offsets are 32 bits wide",
        "page.to(tl.int64) * page_stride",
        "(page.to(tl.int64) * page_stride).to(tl.int32)",
        "sparse_decode: offsets: cache*",
        file=LAYOUT,
    ),
    _literal(
        "rows of NaN are empty",
        "tl.where(l == 0, float(",
        "tl.where((l == 0) | (l != l), float(",
        "sparse_decode: logits: NaN*",
        file=SPLITS,
    ),
    _literal("scales are left out", " * scales[:, :, None]", " * (scales[:, :, None] * 0 + 1)", file=LAYOUT),
    _literal(
        "scales of other rows are read",
        "stored_scales = tl.load(scale_ptrs, mask=valid[:, None], other=0)",
        "stored_scales = tl.load(scale_ptrs)",
        file=LAYOUT,
    ),
    _literal(
        "subnormal scales are 0",
        "tl.maximum(stored.to(tl.int32) << 23, 1 << 22)",
        "stored.to(tl.int32) << 24",
        file=LAYOUT,
    ),
)
SPLIT_MUTANTS = (
    _kernel(
        "each split takes the second list from its begin",
        "extra_first = tl.maximum(first - steps_end, 0)",
        "extra_first = 0 * first",
        "sparse_decode: splits: 20 *",
    ),
    _kernel(
        "each split takes the second list to its end",
        "extra_end = tl.minimum(extra_cache.topk, first + size - steps_end)",
        "extra_end = extra_cache.topk",
        "sparse_decode: splits: 20 *",
    ),
    _kernel(
        "splits take the first list to its end",
        "tl.minimum(cache.topk - main_first, size)",
        "cache.topk - main_first",
        "sparse_decode: splits: 20 *",
    ),
    _literal(
        "the second list's steps are not counted",
        " + triton.cdiv(extra_topk, tile.block_n)",
        "",
        "sparse_decode: splits: 20 *",
    ),
    _kernel("pieces take the first tokens", "first_token + token", "token", "sparse_decode: workspace: *"),
    _literal("pieces write the first rows", "out[first:last]", "out[: last - first]", "sparse_decode: workspace: *"),
    _literal(
        "pieces write the first rows' LSE", "lse[first:last]", "lse[: last - first]", "sparse_decode: workspace: *"
    ),
    _literal(
        "splits depend on the batch",
        "num_splits == 0 and batch_invariant",
        "False",
        "sparse_decode: batch invariant: rows keep their bits",
        file=SPLITS,
    ),
)
CALL_MUTANTS = (
    _literal(
        "LSE is by token",
        "(s_q * num_heads, 1, num_heads)",
        "(s_q * num_heads, s_q, 1)",
        "sparse_decode: s_q: 2",
    ),
    _literal(
        "softmax_scale is always the model's",
        "if softmax_scale is None else",
        "if True else",
        "sparse_decode: logits: *",
    ),
    _literal(
        "any number is a softmax_scale",
        '_launch.scale("softmax_scale"',
        '_launch.number("softmax_scale"',
        "refuses: softmax_scale*",
    ),
    _literal("what is no bool is causal", '_launch.flag("causal", causal)', "causal", "refuses: causal*"),
    _literal(
        "what is no bool is is_fp8_kvcache",
        '_launch.flag("is_fp8_kvcache", is_fp8_kvcache)',
        "is_fp8_kvcache",
        "refuses: is_fp8_kvcache*",
    ),
    _literal("metadata is not compared", "self.config != config", "False", "sparse_decode: contract: metadata"),
    _literal(
        "sizes are recorded too early",
        "metadata.check(config)",
        "_calls.remember(tile_scheduler_metadata, config)",
        "refuses: workspace, too small*",
    ),
    _literal(
        "a lone page's stride counts", "if pages > 1 else 0", "", "sparse_decode: cache: one page, odd*", file=SPLITS
    ),
    _literal("rows are always called aligned", "if rows % 16:", "if rows < 0:", "sparse_decode: layout: q odd"),
    _literal("indices are always called grouped", "1 if groups % 16 else 16", "16", "sparse_decode: topk: 17*"),
    _literal("caches are always called aligned", " * strides | addresses", " * strides", "sparse_decode: cache: odd*"),
    _literal("out is allocated though given", "if out is None:", "if True:", "sparse_decode: contract: out *"),
    _literal("rows of another layout are taken", "cache.shape[3] != row", "False", "refuses: k_cache, rows of*"),
    _literal("rows may lie apart", "row_stride != row", "False", "refuses: k_cache, rows apart*"),
    _literal("pages may overlap", "page_stride < page_bytes", "False", "refuses: k_cache, pages*"),
    _literal(
        "an unquantised call is taken",
        'if not _launch.flag("is_fp8_kvcache", is_fp8_kvcache):',
        "if False:",
        "refuses: is_fp8_kvcache*",
    ),
    _literal("a causal call is taken", 'if _launch.flag("causal", causal):', "if False:", "refuses: causal*"),
    _literal(
        "dtype of the second list is not checked",
        "_launch.check(name, extra_indices, torch.int32",
        "_launch.check(name, extra_indices, extra_indices.dtype",
        "refuses: extra_indices_in_kvcache, dtype*",
    ),
)

Q_SCALE = ("sparse_decode: e4m3: q, 3 heads, s_q 1", "sparse_decode: e4m3: q slice")
E4M3_MUTANTS = (
    _literal("q_scale is left out", "(q.float() * q_scale)", "q.float()", *Q_SCALE),
    _literal("q_scale counts twice", "(q.float() * q_scale)", "(q.float() * q_scale * q_scale)", *Q_SCALE),
    _literal("q of e4m3 has the cache's scale", "(q.float() * q_scale)", "(q.float() * 0.4375)", *Q_SCALE),
    _literal(
        "the RoPE part of a pair is the latent's",
        "torch.cat((q, q_rope), -1)",
        "torch.cat((q, q[..., : D_QK - q.shape[-1]]), -1)",
        "sparse_decode: *pair*, e4m3*",
    ),
    _literal(
        "a scale goes with q of bf16",
        "DTYPE if q_scale is None else torch.float8_e4m3fn",
        "DTYPE if q_scale is None else DTYPE",
        "refuses: q, *of e4m3*",
    ),
    _literal(
        "q of e4m3 needs no scale",
        "DTYPE if q_scale is None else torch.float8_e4m3fn",
        "torch.float8_e4m3fn",
        "refuses: q, *of e4m3*",
        "sparse_decode: typical",
    ),
)

if __name__ == "__main__":
    mutants.MUTANTS = (*CACHE_MUTANTS, *SPLIT_MUTANTS, *CALL_MUTANTS)
    if Path(sys.argv[1]).name == "kv_mixed":
        mutants.MUTANTS = E4M3_MUTANTS
    mutants.main()
