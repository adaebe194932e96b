"""Multi-head attention and merges broken on purpose; `mutants.py` runs verification on each of them.

Usage: python dense_fwd_mutants.py PACKAGE_DIR WORK_DIR [NAMES], as mutants.py. The package's heads have 40
and 72 columns; K and V come by descriptor, and by pointers where rows are not aligned.
"""

import re

import mutants
from mutants import Mutant

ATTENTION, KERNELS = "dense_fwd.py", "_dense_fwd_kernels.py"
LAUNCH = "_launch.py"
MERGE, MERGE_KERNELS = "merge_states.py", "_merge_states_kernels.py"
TYPICAL, WHOLE, POINTERS = "dense_fwd: typical, causal", "dense_fwd: typical, all keys", "dense_fwd: layout: all odd"


def _literal(name: str, old: str, new: str, *only: str, file: str = KERNELS) -> Mutant:
    return Mutant(name, file, re.escape(old), new.replace("\\", r"\\"), only or (TYPICAL, POINTERS))


DENSE_FWD_MUTANTS = (
    _literal("the scale is natural", "scale * math.log2(math.e)", "scale", file=ATTENTION),
    _literal(
        "keys that no row sees count",
        "p = tl.where(seen, p, 0.0)",
        "p = p",
        "dense_fwd: no*",
        TYPICAL,
    ),
    _literal("keys are not masked", "tl.where(seen, scores, NEG_LARGE)", "scores", "dense_fwd: scale: 300"),
    _literal("a row sees one key too many", "rows + (s_k - s_q + 1)", "rows + (s_k - s_q + 2)"),
    _literal("causal rows begin at the first key", "rows + (s_k - s_q + 1)", "rows + 1"),
    _literal("all keys are whole steps", "whole = s_k // BLOCK_N * BLOCK_N", "whole = s_k", WHOLE),
    _literal(
        "unmasked steps go too far",
        "tl.maximum(row + (s_k - s_q + 1), 0)",
        "tl.maximum(row + (s_k - s_q + BLOCK_N), 0)",
        "dense_fwd: lengths: *",
    ),
    _literal("the last step is left out", "tl.minimum(row + BLOCK_M, s_q) + (s_k - s_q)", "row + (s_k - s_q)"),
    _literal(
        "rows of V past the request are not zeroed",
        "v_0 = tl.where(valid, v_0, 0.0)",
        "v_0 = v_0",
        "dense_fwd: values: NaN*",
    ),
    Mutant(
        "rows of V past the request are read",
        KERNELS,
        r"v_0 = tl\.load\(v_ptrs, mask=valid, other=0\.0\) if MASKED else ",
        "v_0 = ",
        ("dense_fwd: layout: all odd",),
    ),
    _literal(
        "columns of K past the row are read",
        "k_mask = (k_1_columns < START_K_1 + COLUMNS_K_1)",
        "k_mask = (k_1_columns < 56)",
        POINTERS,
    ),
    _literal("the narrow block is left out", "tl.trans(k_1)", "tl.trans(tl.zeros_like(k_1))"),
    _literal(
        "alpha is not applied to l", "l * alpha + tl.sum(p, 1)", "l + tl.sum(p, 1)", "dense_fwd: lengths: one row, m*"
    ),
    _literal("alpha is not applied to acc", "acc_1 * alpha[:, None]", "acc_1", "dense_fwd: lengths: one row, m*"),
    _literal("P is not rounded like V", "p = p.to(k_0.dtype)", "p = (p * 1.01).to(k_0.dtype)"),
    _literal("LSE lacks the sum", "(m + tl.log2(l)) * LN2", "m * LN2"),
    _literal("LSE is base 2", "(m + tl.log2(l)) * LN2", "(m + tl.log2(l))"),
    _literal("an empty row's LSE is +inf", 'tl.where(l == 0, float("-inf")', 'tl.where(l == 0, float("inf")', TYPICAL),
    _literal("an empty row is divided by 0", "tl.where(l == 0, 0.0, 1.0 / l)", "1.0 / l", TYPICAL),
    _literal("heads read another's K", "kv_head = head // heads_per_kv", "kv_head = head * 0", TYPICAL),
    _literal(
        "groups are taken for heads", "kv_head = head // heads_per_kv", "kv_head = head // 1", "dense_fwd: heads: *"
    ),
    _literal("rows past the request are written", "row_mask = rows < s_q", "row_mask = rows < s_q + 1"),
    _literal("the last row is not written", "row_mask = rows < s_q", "row_mask = rows < s_q - 1"),
    _literal("the search stops before a request's tile", "+ probe <= slot", "+ probe < slot"),
    _literal(
        "the search is a step short",
        "(self.num_requests - 1).bit_length()",
        "max(0, (self.num_requests - 1).bit_length() - 1)",
        file=ATTENTION,
    ),
    _literal(
        "requests begin at row 0", "origin = tl.load(cu_seqlens_q_ptr)", "origin = 0", "dense_fwd: rows of no request*"
    ),
    _literal(
        "a slot too few", "+ self.num_requests\n", "+ self.num_requests - 1\n", "dense_fwd: lengths: *", file=ATTENTION
    ),
    _literal("head groups overlap", "head = group * head_group + position", "head = position", "dense_fwd: hint: *"),
    _literal(
        "offsets of q are 32 bits wide",
        "(q_begin + rows).to(tl.int64) * q_row_stride",
        "((q_begin + rows) * q_row_stride).to(tl.int32)",
        "dense_fwd: layout: q far",
    ),
    _literal(
        "rows are always called aligned",
        "return bits % 16 == 0",
        "return True",
        "dense_fwd: layout: k odd",
        POINTERS,
        file=ATTENTION,
    ),
    _literal(
        "alignment of V is not looked at",
        "_aligned(q, k, v, out)",
        "_aligned(q, k, k, out)",
        "dense_fwd: layout: v odd",
        file=ATTENTION,
    ),
    _literal("descriptors of no rows are made", "total_k > 0 and ", "", "dense_fwd: lengths: no keys*", file=ATTENTION),
    _literal(
        "descriptors take the heads for the rows",
        "[head_stride, row_stride, 1]",
        "[row_stride, head_stride, 1]",
        TYPICAL,
        file=ATTENTION,
    ),
    _literal("keys begin with the batch's first", "kv.k_begin + start", "start", TYPICAL),
    _literal("the descriptor kernel's head is fixed", "load([kv.kv_head, ", "load([0, ", TYPICAL),
    _literal(
        "dropout is taken", "dropout_p=(dropout_p, 0.0)", "dropout_p=(0.0, 0.0)", "refuses: dropout_p*", file=ATTENTION
    ),
    _literal(
        "a scale of 0 is taken",
        "if LEAST_SCALE <= value",
        "if 0 <= value",
        "refuses: softmax_scale*",
        file=LAUNCH,
    ),
    _literal(
        "a scale of inf is taken",
        "value <= MOST_SCALE",
        "value == value",
        "refuses: softmax_scale*",
        file=LAUNCH,
    ),
    _literal(
        "causal is what its truth is",
        '_launch.flag("causal", causal)',
        "causal = bool(causal)",
        "refuses: causal*",
        file=ATTENTION,
    ),
    _literal(
        "heads that do not divide are taken", "or num_heads % num_kv_heads", "", "refuses: k, heads*", file=ATTENTION
    ),
)
MERGE_KERNEL_MUTANTS = tuple(
    Mutant(name, MERGE_KERNELS, re.escape(old), new, only)
    for name, old, new, only in (
        (
            "plus infinity is no empty part",
            '(lse == float("inf")) | (',
            "(",
            ("merge 72: lse: mixed", "merge parts 72: lse: mixed"),
        ),
        ("minus infinity is no empty part", ' | (lse == float("-inf"))', "", ("merge 72: lse: mixed",)),
        (
            "an empty prefix is looked at",
            "no_prefix[:, None]",
            "no_prefix[:, None] & (prefix == prefix)",
            ("merge 72: lse: mixed",),
        ),
        ("weights are base 2", "(suffix_lse - m) * to_log2", "(suffix_lse - m)", ("merge 72: lse: normal",)),
        (
            "LSE of the whole is base 2",
            "m + tl.log2(divisor) * from_log2",
            "m + tl.log2(divisor)",
            ("merge 72: lse: normal",),
        ),
        ("the prefix weighs nothing", "prefix_weight * scale", "0.0 * scale", ("merge 72: lse: normal",)),
        (
            "the maximum is the suffix's",
            "m = tl.maximum(tl.where(no_prefix, LOWEST, prefix_lse), ",
            "m = (",
            ("merge 72: lse: far*",),
        ),
        (
            "a row without keys is divided by 0",
            "tl.where(l == 0, 1.0, l)",
            "l",
            ("merge 72: lse: none", "merge parts 72: lse: none"),
        ),
        (
            "LSE of a row without keys is +inf",
            'tl.where(l == 0, float("-inf")',
            'tl.where(l == 0, float("inf")',
            ("merge 72: lse: none",),
        ),
        ("all tokens have a prefix", "tokens < num_prefix_tokens", "tokens < num_tokens", ("merge 72: prefixes: 13",)),
        ("heads of a block are tokens", "row // BLOCK_H", "row % BLOCK_H", ("merge 72: sizes: 700x12",)),
        (
            "LSE share a stride",
            "heads * suffix_lse_head_stride",
            "heads * out_lse_head_stride",
            ("merge 72: prefixes: 13, *", "merge 72: layout: *"),
        ),
        (
            "columns past a value are written",
            "(columns < D_V)",
            "(columns < D_V + 1)",
            ("merge 72: layout: output slice",),
        ),
        (
            "parts past the last count",
            "exists = part < parts.num_parts",
            "exists = part < parts.num_parts + 1",
            ("merge parts 72: parts: 5", "merge parts 72: layout: odd*"),
        ),
        ("earlier parts are not rescaled", "acc * alpha[:, None]", "acc", ("merge parts 72: parts: 33",)),
        ("parts have one LSE", "tl.cast(part, tl.int64) * parts.lses_stride", "0", ("merge parts 72: typical",)),
    )
)
MERGE_MUTANTS = tuple(
    Mutant(name, MERGE, re.escape(old), new, only)
    for name, old, new, only in (
        (
            "prefixes take the suffix's strides",
            "_ = prefix_output.stride()",
            "_ = suffix_output.stride()",
            ("merge 72: layout: prefix *",),
        ),
        (
            "rows of parts are always called aligned",
            "return 1 if bits % 16 else 16",
            "return 16",
            ("merge 72: layout: prefix odd",),
        ),
        (
            "base 2 is taken for e",
            '"2": Base(1.0, 1.0',
            '"2": Base(LOG2E.value, 1.0',
            ("merge parts 72: lse_base: 2",),
        ),
        ("base e is taken for 2", "BASES[lse_base]", 'BASES["2"]', ("merge parts 72: lse_base: e",)),
        (
            "columns of parts are halves of float32",
            "torch.float32 if getattr",
            "DTYPE if getattr",
            ("merge parts 72: layout: *",),
        ),
    )
)

if __name__ == "__main__":
    mutants.MUTANTS = (*DENSE_FWD_MUTANTS, *MERGE_KERNEL_MUTANTS, *MERGE_MUTANTS)
    mutants.TYPICAL = TYPICAL
    mutants.main()
