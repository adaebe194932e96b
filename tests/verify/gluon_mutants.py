"""sm90 kernels broken on purpose; `mutants.py` runs verification on each of them, in numpy.

Usage: python gluon_mutants.py PACKAGE_DIR WORK_DIR MODULE, a key of OF_MODULE.
"""

import re
import sys

import mutants
from mutants import Mutant

SPARSE = "sparse_fwd: typical (f*"
SHARED = "sparse_fwd: neighbours: 75*"
DENSE, STORED, CAUSAL = "dense_decode: typical", "sparse_decode: typical", "dense_fwd: typical, causal"
SEARCHED = "prefill: 4 warps of 3: *"


TOPK = "_topk_sm90.py"
TOPK_VALUES = {  # texts, and the pattern of scores that shows them
    "parts forget where they begin": ("ids_ptr + place, begin + start", "ids_ptr + place, start", "normal"),
    "candidates are another part's": ("(part * CAPACITY)[", "((part + 1) * CAPACITY)[", "normal"),
    "a candidate past a part's count is read": ("there = at < own", "there = at <= own", "normal"),
    "a row's end is in no part": ("gl.cdiv(length, PARTS * LANES)", "length // (PARTS * LANES)", "ascending"),
    "all equals are picked": ("ties & (ties_before < wanted)", "ties", "equal"),
    "equals of earlier tiles are forgotten": ("ties_taken += whole >> 16", "ties_taken += 0", "equal"),
    "keys of earlier tiles are forgotten": ("            taken += whole\n", "            taken += 0\n", "normal"),
    "the bin's own keys are not looked at": ("narrows = more &", "narrows = (k < 0) & more &", "normal"),
    "a bin too far": ("digit = LAST - number", "digit = LAST - number - 1", "normal"),
    "keys before a bin are not taken off": ("left - before, left)", "left, left)", "normal"),
    "the largest keys are in no bin": ("shift).to(gl.int32), LAST)", "shift).to(gl.int32), LAST + 1)", "normal"),
    "the first bin ends as others do": ("gl.where(digit == LAST, span", "gl.where(digit > LAST, span", "wide"),
    "too few candidates are enough": ("((count >= k) |", "((count >= 0) |", "searched"),
    "too many candidates are enough": ("if (taken <= CAPACITY) &", "if (taken <= CAPACITY * 9) &", "equal"),
    "candidates are columns": ("if ids != 0:", "if ids < 0:", "normal"),
    "NaN is picked": ('gl.maximum(score, float("-inf")) + 0.0', "score + 0.0", "special"),
    "the floor is a count": ("2 * first + 1).to(gl.float32", "2 * first + 2).to(gl.float32", "negative"),
    "zeros are told apart": (' float("-inf")) + 0.0', ' float("-inf"))', "zeros"),
    "-inf is picked": ("- MINUS_INF_BITS\n", "- MINUS_INF_BITS + 1\n", "few"),
    "nothing is filled": ("range(number, k,", "range(k, k,", "few"),
}


def _cases_over(scores: str) -> tuple[str, ...]:
    """Cases of top-k over these scores, in rows that fit and in longer ones; or those that are searched in memory."""
    if scores == "searched":
        return (SEARCHED,)
    return tuple(f"prefill: * hold 1024 of {columns}: {scores}" for columns in (1023, 1025, 5197))


def _dropped(name: str, file: str, line: str, *only: str) -> Mutant:
    """A statement that is one line, left out."""
    return Mutant(name, file, rf"(?m)^( +){re.escape(line)}.*$", r"\1pass", only)


def _literal(name: str, file: str, old: str, new: str, *only: str) -> Mutant:
    return Mutant(name, file, re.escape(old), new.replace("\\", r"\\"), only)


def _attention(
    file: str, case: str, arrive: str, wait: str, half: str = "columns = START + gl.arange(0, D_HALF"
) -> tuple[Mutant, ...]:
    """A negated softmax, exchanged halves of V, an arrive and a wait that are left out."""
    other = half.replace("START", "(D_HALF - START)").replace("HALF * D_HALF", "(1 - HALF) * D_HALF")
    return (
        Mutant("the softmax is negated", file, r"gl\.exp2\(scores", "gl.exp2(-scores", (case,)),
        _literal("halves of V are exchanged", file, half, other, case),
        _dropped("an arrive is dropped", file, arrive, case),
        _dropped("a wait is dropped", file, wait, case),
    )


def _e4m3_p(file: str, case: str) -> tuple[Mutant, ...]:
    """P in e4m3: its order of keys, that of V, its bounds, an arrive and a wait."""
    return (
        _literal("P has its keys in order", file, "[1, 0, 2, 4, 3, 5]", "[1, 0, 2, 3, 4, 5]", case),
        _literal("words of V are exchanged", file, "first1, 0x5410", "first1, 0x1054", case),
        _literal("a new P passes 448", file, "P_LOG2 = gl.constexpr(5)", "P_LOG2 = gl.constexpr(9.5)", case),
        _literal(
            "a later P passes 448", file, "P_MOST_LOG2 = gl.constexpr(8.75)", "P_MOST_LOG2 = gl.constexpr(12)", case
        ),
        _literal("the second chunk of V is the first", file, "tile.slice(CHUNK, CHUNK,", "tile.slice(0, CHUNK,", case),
        _dropped("an arrive is dropped", file, '_k_free(2 * stage, "arrive")', case),
        _dropped("a wait is dropped", file, "mbarrier.wait(shared.k_ready.index(2 * stage + 1)", case),
    )


OF_MODULE = {
    "_sparse_fwd_sm90": _attention(
        "_sparse_fwd_sm90.py", SPARSE, "_bar_arrive(P1_READY, zero)", "_bar_sync(P0_READY, zero)"
    ),
    "_sparse_fwd_sm90_swap_ab": _attention(
        "_sparse_fwd_sm90_swap_ab.py",
        SPARSE,
        "_bar_arrive(K_R_FREE + BLOCK, zero)",
        "mbarrier.wait(shared.k_r_ready.index(BLOCK), phase)",
        "columns = HALF * D_HALF +",
    ),
    # The portable kernel computes results of NaN again, so these show only in its flags.
    "_sparse_fwd_sm90_shared": (
        *_attention("_sparse_fwd_sm90_shared.py", SHARED, "_bar_arrive(P1_READY, zero)", "_bar_sync(P0_READY, zero)"),
        _literal(
            "results are NaN",
            "_sparse_fwd_sm90_shared.py",
            "is_nan = gl.max((acc != acc)",
            'acc = acc * float("nan")\n    is_nan = gl.max((acc != acc)',
            SHARED,
        ),
        _literal(
            "no group is flagged",
            "_index_union_sm90.py",
            "recompute_ptr + group, repeated)",
            "recompute_ptr + group, repeated * 0)",
            "sparse_fwd: neighbours: repeats",
        ),
    ),
    "_index_union_sm90": (
        _literal(
            "a token has another's rows",
            "_index_union_sm90.py",
            "(bits << ROW_BITS)",
            "((bits ^ 1) << ROW_BITS)",
            SHARED,
        ),
        _dropped("bits meet zeros", "_index_union_sm90.py", "barrier()  # no thread sets", SHARED),
        _dropped("the bitmap is read early", "_index_union_sm90.py", "barrier()  # no thread reads the", SHARED),
        _dropped("entries are read early", "_index_union_sm90.py", "barrier()  # no thread reads entries", SHARED),
    ),
    "_topk_sm90": (
        _literal(
            "one equal more is picked",
            TOPK,
            "(ties_before < wanted)",
            "(ties_before <= wanted)",
            SEARCHED,
            *_cases_over("ties"),
        ),
        *(
            Mutant(
                f"barrier {number} is dropped",
                TOPK,
                rf"(?ms)\A((?:.*?^ +_barrier\(\w+\)$){{{number}}}.*?)^( +)_barrier\(\w+\)$",
                r"\1\2pass",
                ("prefill: 4 warps of ?: *", *_cases_over("ties")),
            )
            for number in range(7)
        ),
        *(_literal(name, TOPK, old, new, *_cases_over(scores)) for name, (old, new, scores) in TOPK_VALUES.items()),
    ),
    "_mqa_logits_sm90": (
        _literal("the relu is negated", "_mqa_logits_sm90.py", "dots + gl.abs", "dots - gl.abs", "flat: typical"),
        _dropped("a tile is not freed", "_mqa_logits_sm90.py", "mbarrier.arrive(shared.k_free", "flat: long"),
        _dropped("a tile is read early", "_mqa_logits_sm90.py", "mbarrier.wait(shared.k_ready", "flat: typical"),
    ),
    "_paged_mqa_logits_sm90": (
        _literal(
            "the relu is negated", "_paged_mqa_logits_sm90.py", "dots + gl.abs", "dots - gl.abs", "paged: typical"
        ),
        _literal(
            "pages of ranges before the first are nobody's",
            "_paged_mqa_logits_sm90.py",
            "gl.where(number == 0, 0, call.unlaunched + number)",
            "(call.unlaunched + number)",
            "paged: lengths: *, many ranges",
        ),
        _dropped("a page is read early", "_paged_mqa_logits_sm90.py", "mbarrier.wait(shared.k_ready", "paged: typical"),
    ),
    "_dense_decode_sm90": _attention(
        "_dense_decode_sm90.py", DENSE, "_bar_arrive(P1_READY, zero)", "_bar_sync(P0_READY, zero)"
    ),
    "_dense_decode_sm90_swap_ab": _attention(
        "_dense_decode_sm90_swap_ab.py",
        DENSE,
        "_bar_arrive(K_R_FREE + BLOCK, zero)",
        "mbarrier.wait(shared.k_r_ready.index(BLOCK), phase)",
        "columns = HALF * D_HALF +",
    ),
    "_dense_decode_sm90 of e4m3": _attention(
        "_dense_decode_sm90.py",
        "dense_decode: e4m3: wide, q of e4m3",
        '_k_free(place, "arrive")',
        "mbarrier.wait(shared.k_ready.index(place)",
    ),
    "_dense_decode_sm90_rows32": _attention(
        "_dense_decode_sm90_rows32.py",
        DENSE,
        '_k_free(place, "arrive")',
        "mbarrier.wait(shared.k_ready.index(place)",
    ),
    "_dense_decode_sm90_q_halves": _attention(
        "_dense_decode_sm90_q_halves.py",
        "dense_decode: e4m3: wide",
        '_k_free(place, "arrive")',
        "mbarrier.wait(shared.k_ready.index(place)",
    ),
    "_dense_decode_sm90 of e4m3 P": _e4m3_p("_dense_decode_sm90.py", "dense_decode: e4m3: wide*, q of e4m3"),
    "_dense_decode_sm90_rows32 of e4m3 P": _e4m3_p(
        "_dense_decode_sm90_rows32.py", "dense_decode: e4m3: wide*, q of e4m3"
    ),
    "_sparse_decode_sm90": (
        *_attention("_sparse_decode_sm90.py", STORED, "_bar_arrive(P1_READY, zero)", "_bar_sync(P0_READY, zero)"),
        _literal(
            "all heads are computed again", "_sparse_decode_sm90.py", "largest < MAX_Q", "largest < MIN_Q", STORED
        ),
    ),
    "_sparse_decode_sm90_e4m3": _attention(
        "_sparse_decode_sm90_e4m3.py",
        "sparse_decode: e4m3: q, 3 heads, s_q 1",
        '_k_free(place, "arrive")',
        "mbarrier.wait(shared.k_ready.index(place)",
    ),
    "_dense_fwd_sm90": (
        Mutant("the softmax is negated", "_dense_fwd_sm90.py", r"gl\.exp2\(scores", "gl.exp2(-scores", (CAUSAL,)),
        _literal("V is shifted", "_dense_fwd_sm90.py", "rows, valid, 0, D_V)", "rows, valid, 8, D_V)", CAUSAL),
        _dropped("an arrive is dropped", "_dense_fwd_sm90.py", "mbarrier.arrive(shared.v_free", CAUSAL),
        _dropped("a wait is dropped", "_dense_fwd_sm90.py", "mbarrier.wait(shared.v_ready", CAUSAL),
    ),
}
KERNELS = {"_sparse_fwd_sm90_swap_ab": "sm90_swap_ab", "_dense_decode_sm90_swap_ab": "sm90_swap_ab"}
KERNELS |= {"_sparse_fwd_sm90_shared": "sm90_shared", "_index_union_sm90": "sm90_shared"}
KERNELS |= {"_dense_decode_sm90_rows32": "sm90_rows32", "_dense_decode_sm90_q_halves": "sm90_q_halves"}
KERNELS |= {"_sparse_decode_sm90_e4m3": "sm90_e4m3", "_dense_decode_sm90_rows32 of e4m3 P": "sm90_rows32"}
ALSO = {"_topk_sm90": ["sm90_collect, simulated"]}  # targets of modules with several kernels

if __name__ == "__main__":
    module = sys.argv.pop()
    mutants.MUTANTS = OF_MODULE[module]
    mutants.TYPICAL = mutants.MUTANTS[0].only[0]
    mutants.TARGETS = [f"{KERNELS.get(module, 'sm90')}, simulated", *ALSO.get(module, [])]
    mutants.main()
