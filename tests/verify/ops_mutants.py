"""Modules of operators broken on purpose, and a process that runs verification on each of them; see mutants.py."""

import re

import mutants
from mutants import Mutant

TYPICAL = "merge 96: *typical*"
OPS = "ops.py"


def _literal(name: str, old: str, new: str, only: str) -> Mutant:
    return Mutant(name, OPS, re.escape(old), new.replace("\\", r"\\"), (only,))


OPS_MUTANTS = (
    _literal(
        "a cache that is written to is not declared",
        "Tensor(a!) kv_cache",
        "Tensor kv_cache",
        "ops: opcheck: concat_and_cache_mla",
    ),
    _literal(
        "an LSE that is written to is not declared",
        "Tensor(b!)? output_lse=None",
        "Tensor? output_lse=None",
        "ops: opcheck: merge_attn_states",
    ),
    _literal(
        "results of an out variant are not declared",
        "Tensor(a!) out, Tensor(b!) output_lse",
        "Tensor(a!) out, Tensor output_lse",
        "ops: opcheck: merge_attn_parts",
    ),
    _literal("values have the inputs' dtype", "dtype=DTYPE if", "dtype=like.dtype if", "ops: fake: merge_attn_parts"),
    _literal("a quantised result is not", "else torch.float8_e4m3fn", "else DTYPE", "ops: fake: merge_attn_parts"),
    _literal("LSE has one layout", 'if lse_layout == "ht" else (tokens, num_heads)', "", "ops: fake: merge_attn_parts"),
    _literal("stats are halves", "dtype=torch.float32", "dtype=DTYPE", "ops: opcheck: flash_mla_sparse_fwd"),
    _literal(
        "an out variant runs nothing",
        "        wrapper(*args, **kwargs)",
        "        pass",
        "ops: compile: merge_attn_parts",
    ),
    _literal(
        "a default is another",
        "str lse_layout='ht') -> (",
        "str lse_layout='th') -> (",
        "ops: compile: merge_attn_parts",
    ),
    _literal(
        "a result is an input",
        "        merge_states.merge_attn_parts,\n",
        "        lambda outputs, lses, **given: (outputs[0], lses[0]),\n",
        "ops: opcheck: merge_attn_parts",
    ),
)

if __name__ == "__main__":
    mutants.MUTANTS, mutants.TYPICAL = OPS_MUTANTS, TYPICAL
    mutants.main()
