"""Proofs computed again: a few at random, since a row that is forged with its digests shows no other way."""

from __future__ import annotations

import contextlib
import datetime
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mlagen.compile import CompileJob, Resources, Toolchain, compile_jobs, content_keys, default_cache_dir
from mlagen.emit.replace import write_atomically
from mlagen.errors import ProofError
from mlagen.proofs.cases import environment
from mlagen.proofs.folder import Proofs
from mlagen.proofs.rows import CasesRow, Figures
from mlagen.proofs.sources import digest_of
from mlagen.verify import verify_package
from mlagen.verify.pool import Task

VARIANTS, CASES = 2, 1  # proofs of each kind that a build computes again


@dataclass(frozen=True)
class Sample:
    """Proofs of a package to compute again.

    Attributes:
        folder: where the package lies.
        seed: decides which.
    """

    folder: Path
    seed: int

    def compile(self, jobs: Sequence[CompileJob], proofs: Proofs, toolchain: Toolchain, number: int = VARIANTS) -> int:
        """Compile some of the variants that the folders of proofs hold; returns how many.

        Raises:
            ProofError: one takes something else than its proof says.
            ToolError: one does not compile.
        """
        keyed = zip(jobs, content_keys(self.folder, jobs), strict=True)
        proved = [
            (job, figures) for job, key in keyed if (figures := proofs.figures(key, toolchain.version)) is not None
        ]
        chosen = random.Random(self.seed).sample(proved, min(number, len(proved)))
        taken = compile_jobs(self.folder, [job for job, _ in chosen], toolchain=toolchain, workers=1, fresh=True)
        for one, (_, expected) in zip(taken, chosen, strict=True):
            self._compare(one, expected)
        return len(chosen)

    def _compare(self, taken: Resources, expected: Figures) -> None:
        found = Figures.of(taken)
        if not found.agree(expected):
            raise ProofError(
                f"the proof of {taken.module}.{taken.kernel} for {taken.target} under Triton {taken.triton}, key "
                f"{taken.key}, says {_said(expected)}; compiled again it is {_said(found)} (seed {self.seed})"
            )

    def verify(self, rows: Mapping[str, CasesRow], number: int = CASES) -> int:
        """Run some of the cases that are proved; returns how many.

        Raises:
            ProofError: a case does not hold, errs by more than its proof says, or is one of another number of cases.
        """
        chance = random.Random(self.seed)
        families = sorted(family for family, row in rows.items() if row.cases)
        chosen = chance.sample(families, min(number, len(families)))
        for family in chosen:
            row = rows[family]
            listed: list[int] = []

            def one(tasks: Sequence[Task], listed: list[int] = listed) -> Sequence[Task]:
                listed.append(len(tasks))
                return chance.sample(list(tasks), min(1, len(tasks)))

            results = verify_package(
                self.folder, device=row.device, workers=1, families=[family], every=row.every, choose=one
            )
            if listed != [row.cases]:
                raise ProofError(
                    f"the proof of {family} says {row.cases} cases; its family has {listed} (seed {self.seed})"
                )
            for result in results:
                share = 0.0 if result.worst is None else result.worst.share
                if not result.ok or share > row.share:
                    found = result.detail or f"errs by {share:.3f} of its tolerance; the proof says {row.share}"
                    raise ProofError(
                        f"the proof of {family} does not hold: {result.case}, on {result.target}: {found} "
                        f"(seed {self.seed})"
                    )
        return len(chosen)


def _said(figures: Figures) -> str:
    return ", ".join(f"{name} {value}" for name, value in figures._asdict().items())


def _stamp(package: str, versions: Sequence[str], device: str) -> Path:
    day = datetime.datetime.now(tz=datetime.UTC).date()
    return default_cache_dir() / "sampled" / digest_of([package, *versions, device, environment(device), str(day)])


def was_sampled(package: str, versions: Sequence[str], device: str) -> bool:
    """Whether a build of the same package took a sample today, on this machine."""
    return _stamp(package, versions, device).exists()


def note_sample(package: str, versions: Sequence[str], device: str, seed: int) -> None:
    """Say that a sample was taken; a cache that cannot be written is none."""
    with contextlib.suppress(OSError):
        write_atomically(_stamp(package, versions, device), f"{seed}\n")
