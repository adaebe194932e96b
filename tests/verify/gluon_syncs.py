"""Synchronisation of sm90 kernels, dropped a statement at a time, and the simulated cases that notice it.

    PYTHONPATH=. python tests/verify/gluon_syncs.py --report syncs.json
    PYTHONPATH=. python tests/verify/gluon_syncs.py --modules 'dsv32/_topk_sm90' --only '*:_barrier:*'

Prints a line a mutant, then the table. Exits with 1 if fewer than 97 of 100 are noticed. Statements that
`redundant_syncs.yaml` lists do not count, and run only with --all.

Torch and Triton are imported once; each mutant runs in a fork.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import shutil
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from checked_in import package_of  # noqa: E402
from noticed import forked  # noqa: E402

from mlagen.verify.random.mutants import Outcome, redundant_names, table  # noqa: E402
from mlagen.verify.random.reached import REACHED  # noqa: E402
from mlagen.verify.random.syncs import Sync, syncs_of, without  # noqa: E402

REDUNDANT = Path(__file__).with_name("redundant_syncs.yaml")
FEWEST = 97.0  # of 100
# A package for each module and for each of its texts that synchronises otherwise.
MODULES = {
    "dsv32": (
        "_topk_sm90", "_mqa_logits_sm90", "_paged_mqa_logits_sm90", "_index_union_sm90", "_sparse_fwd_sm90",
        "_sparse_fwd_sm90_shared", "_sparse_fwd_sm90_swap_ab",
    ),
    "dsv32_fp8": ("_sparse_decode_sm90",),
    "dsv32_fp8_tensor": ("_sparse_decode_sm90", "_sparse_decode_sm90_e4m3"),
    "dsv4_flash": ("_sparse_decode_sm90",),
    "dsv41": ("_sparse_decode_sm90",),
    "dsv3": ("_dense_decode_sm90", "_dense_decode_sm90_swap_ab"),
    "dsv3_fp8": ("_dense_decode_sm90", "_dense_decode_sm90_rows32", "_dense_decode_sm90_q_halves"),
    "dsv3_prefill": ("_dense_fwd_sm90",),
    "dsv3_prefill_tma": ("_dense_fwd_sm90",),
}  # fmt: skip


def mutants(modules: str, only: str) -> list[tuple[str, Sync]]:
    """Packages and statements, by a pattern of PACKAGE/MODULE and one of names in a module."""
    return [
        (package, sync)
        for package, names in MODULES.items()
        for name in names
        if fnmatch.fnmatchcase(f"{package}/{name}", modules)
        for sync in syncs_of(package_of(package) / f"{name}.py")
        if fnmatch.fnmatchcase(f"{package}/{sync.name}", only)
    ]


def outcome_of(package: str, sync: Sync, work: Path, seed: int) -> Outcome:
    """How the package fares without the statement."""
    folder = work / package
    shutil.copytree(package_of(package), folder)
    path = folder / f"{sync.module}.py"
    path.write_text(without(path.read_text(), sync))
    family, kernel = REACHED[sync.module]
    begin = time.monotonic()
    found = forked(folder, ["sm90"], (family,), kernel, seed)
    shutil.rmtree(folder)
    how = "survived" if found is None else "wrong" if "differs by" in found else "rule"
    return Outcome(how, found or "", seconds=round(time.monotonic() - begin, 1))


def main() -> int:
    parser = argparse.ArgumentParser(description="Drops synchronisation of sm90 kernels, in numpy.")
    parser.add_argument("--modules", default="*", help="shell pattern of PACKAGE/MODULE")
    parser.add_argument("--only", default="*", help="shell pattern of PACKAGE/MODULE:FUNCTION:CALL:NUMBER")
    parser.add_argument("--seed", type=int, default=0, help="of the order of cases")
    parser.add_argument("--all", action="store_true", help="run those that are redundant as well")
    parser.add_argument("--report", type=Path, help="write outcomes here, after each one")
    parser.add_argument("--read", type=Path, nargs="+", help="print the table of these reports and end")
    options = parser.parse_args()
    outcomes: dict[str, Outcome] = {}
    redundant = redundant_names([REDUNDANT])
    for path in options.read or ():
        outcomes |= {name: Outcome(**one) for name, one in json.loads(path.read_text()).items()}
    if not options.read:
        from mlagen.verify.worker import prepare

        prepare("cpu")
        import mlagen.verify.families  # noqa: F401  torch and Triton, before the first fork

        with tempfile.TemporaryDirectory() as work:
            for package, sync in mutants(options.modules, options.only):
                name = f"{package}/{sync.name}"
                if name in redundant and not options.all:
                    outcomes[name] = Outcome("redundant")
                    continue
                one = outcomes[name] = outcome_of(package, sync, Path(work), options.seed)
                print(f"{name} (line {sync.line}): {one.how} in {one.seconds} s  {one.detail[:200]}", flush=True)
                if options.report:
                    options.report.write_text(
                        json.dumps({name: asdict(one) for name, one in outcomes.items()}, indent=1)
                    )
    lines = list(table(outcomes, redundant))
    print("\n".join(lines))
    return 0 if float(lines[-1].rpartition(": ")[2].removesuffix(" %")) >= FEWEST else 1


if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "1"
    sys.exit(main())
