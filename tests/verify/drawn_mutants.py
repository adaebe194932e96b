"""One mutant of each family, drawn by a seed; the slow tests run all of them.

Usage: python drawn_mutants.py WORK_DIR SEED

Prints {"family: name of mutant": failed cases} as JSON. Torch and Triton are imported once for all families.
"""

import json
import os
import random
import re
import shutil
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import mutants
from mutants import LONGEST, Mutant, failed_of, mutated, run_cases

ROWS = mutants.MUTANTS
import cache_mutants  # noqa: E402
import compressor_mutants  # noqa: E402
import dense_decode_mutants  # noqa: E402, F401

DENSE = mutants.MUTANTS  # as that import leaves it
import candidates_mutants  # noqa: E402
import dense_fwd_mutants  # noqa: E402
import indexer_cache_mutants  # noqa: E402
import indexer_select_mutants  # noqa: E402
import indices_mutants  # noqa: E402
import kpool_mutants  # noqa: E402
import latents_mutants  # noqa: E402
import merges_mutants  # noqa: E402
import mqa_logits_mutants  # noqa: E402
import ops_mutants  # noqa: E402
import out_quant_mutants  # noqa: E402
import prologue_mutants  # noqa: E402
import sparse_decode_mutants  # noqa: E402
import topk_mutants  # noqa: E402

sys.path.append(str(Path(__file__).resolve().parents[1]))
from checked_in import package_of  # noqa: E402

CACHE = (*sparse_decode_mutants.CACHE_MUTANTS, *sparse_decode_mutants.SPLIT_MUTANTS)
# By family: a checked-in package with the text of most of its mutants, and the mutants.
FAMILIES: dict[str, tuple[str, Sequence[Mutant]]] = {
    "sparse_fwd": ("dsv32", ROWS),
    "cache": ("dsv4_flash", (*cache_mutants.ANY_LAYOUT, *cache_mutants.PLANAR)),
    "prologue": ("dsv4_flash", (*prologue_mutants.ANY, *prologue_mutants.HEADS)),
    "compressor": ("dsv4_flash", compressor_mutants.MUTANTS),
    "dense_decode": ("dsv3", DENSE),
    "indices": ("dsv4_flash", (*indices_mutants.MAP_MUTANTS, *indices_mutants.COMBINE_MUTANTS)),
    "indices_attention": ("dsv32_fp8", indices_mutants.CHAIN_MUTANTS),
    "sparse_decode": ("dsv4_flash", (*CACHE, *sparse_decode_mutants.CALL_MUTANTS)),
    "merge_states": ("odd", merges_mutants.MERGES_MUTANTS),
    "dense_fwd": ("odd_prefill", dense_fwd_mutants.DENSE_FWD_MUTANTS),
    "topk": ("dsv4_flash", topk_mutants.MUTANTS),
    "kpool": ("glm53", kpool_mutants.MUTANTS),
    "latents": ("dsv41", latents_mutants.MUTANTS),
    "out_quant": ("dsv4_flash", out_quant_mutants.MUTANTS),
    "indexer_cache": ("dsv32", (*indexer_cache_mutants.ANY, *indexer_cache_mutants.IN_ONE)),
    "mqa_logits": ("dsv4_flash", mqa_logits_mutants.LOGITS_MUTANTS),
    "indexer_select": ("dsv4_flash", indexer_select_mutants.MUTANTS),
    "candidates": ("dsv41", candidates_mutants.MUTANTS),
    "ops": ("odd", ops_mutants.OPS_MUTANTS),
}
# Mutants that these packages have the text of, but show late, or only in other packages of the slow tests.
ELSEWHERE = {
    "lengths may be too long",
    "requests after the first begin where it does",
    "results may lie in the indices",
    "rows of results may overlap",
}
TARGETS = {
    "cache": ["sm80"],
    "out_quant": ["sm80"],
}  # its kernels round by themselves; other families take the target of mutants.py


def fitting(package: Path, found: Sequence[Mutant]) -> Iterator[Mutant]:
    """The mutants that the package has the text of."""
    for mutant in found:
        file = package / mutant.file
        fits = file.exists() and re.search(mutant.pattern, file.read_text())
        if fits and mutant.name not in ELSEWHERE:
            yield mutant


def noticed(family: str, mutant: Mutant, package: Path, folder: Path) -> list[str] | None:
    """The cases that fail with a mutant; None if the package has none of the cases that it names."""
    broken = mutated(mutant, package, folder / family)
    assert broken is not None
    out = broken.parent / "answers.jsonl"
    child = os.fork()
    if not child:
        signal.alarm(LONGEST)
        try:
            mutants.TARGETS = TARGETS.get(family, mutants.TARGETS)
            run_cases(broken, mutant.only, out, (family,))
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    shutil.rmtree(broken)
    return failed_of(out) if out.exists() and out.read_text() else None


def main() -> None:
    folder, seed = Path(sys.argv[1]), int(sys.argv[2])
    run_cases(package_of("odd"), (merges_mutants.TYPICAL,), folder / "warm.jsonl")  # imports all that cases need
    found = {}
    for family, (name, all_mutants) in FAMILIES.items():
        package = package_of(name)
        drawn = list(fitting(package, all_mutants))
        random.Random(seed).shuffle(drawn)
        for mutant in drawn:
            failed = noticed(family, mutant, package, folder)
            if failed is not None:
                found[f"{family}: {mutant.name}"] = failed
                break
    print(json.dumps(found))


if __name__ == "__main__":
    main()
