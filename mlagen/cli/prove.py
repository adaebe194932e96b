"""The steps of a build that prove a package. Each looks up proofs and computes the missing ones."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mlagen.cli.progress import stage
from mlagen.compile import Judge, Resources, Toolchain, compile_jobs, content_keys, list_variants, toolchain
from mlagen.plan.tritons import TRITONS
from mlagen.proofs import CasesRow, Proofs, keep, proof_of, proved_before
from mlagen.proofs.sample import CASES, VARIANTS, Sample, note_sample, was_sampled
from mlagen.proofs.sources import family_names
from mlagen.verify import CaseResult, verify_package
from mlagen.verify.pool import Task


@dataclass
class Cases:
    """The cases of a package in a build.

    Attributes:
        rows: proofs of the families without a failed case, by name.
        before: the families among them that were proved before.
        results: results of the cases that ran now.
    """

    rows: dict[str, CasesRow] = field(default_factory=dict)
    before: frozenset[str] = frozenset()
    results: list[CaseResult] = field(default_factory=list)


@dataclass(frozen=True)
class Prover:
    """How one build proves its packages.

    Attributes:
        proofs: known proofs; new ones are added.
        versions: Tritons to compile with.
        device: "cpu" or "cuda", where kernels run; None: kernels do not run.
        every: run all cases instead of a representative set.
        fresh: compute everything.
        seed: picks the proofs to compute again; None: random.
    """

    proofs: Proofs
    versions: tuple[str, ...]
    device: str | None
    every: bool = False
    fresh: bool = False
    seed: int | None = None

    @property
    def proves(self) -> bool:
        """Whether this build both compiles and verifies, and so adds proofs."""
        return bool(self.versions) and self.device is not None

    def compile(self, label: str, staged: Path, targets: Sequence[str], version: str, judge: Judge) -> list[Resources]:
        """Compile all variants of a package under one Triton, except those with known figures.

        `judge` gets each result as it arrives.
        """
        title = f"{label}: compile with triton {version}"
        with stage(f"{title}: list variants") as bar:
            chosen = toolchain(version, on_fetch=lambda: bar.show("fetch this Triton"))
            jobs = list_variants(staged, targets, toolchain=chosen)
        with stage(title) as bar:
            bar.expect(jobs)

            def done(taken: Resources) -> None:
                bar.step(taken)
                judge(taken)

            return compile_jobs(
                staged,
                jobs,
                toolchain=chosen,
                known=lambda key: self.proofs.measured(key, version),
                fresh=self.fresh,
                on_start=lambda job: bar.show(f"{job.target} {job.kernel}"),
                on_done=done,
            )

    def verify(self, label: str, staged: Path, key: str, device: str) -> Cases:
        """Run the cases of a package that are not proved. Keep the proof of each family once all its cases ran."""
        known = {} if self.fresh else proved_before(self.proofs, key, device, every=self.every)
        cases = Cases(known, frozenset(known))
        missing = [family for family in family_names() if family not in known]
        if not missing:
            return cases
        waiting: Counter[str] = Counter()
        of: dict[str, int] = {}

        def chosen(tasks: Sequence[Task]) -> Sequence[Task]:
            waiting.update(task.family for task in tasks)
            return tasks

        def prove(family: str) -> None:
            ran = [one for one in cases.results if one.family == family]
            if all(one.ok for one in ran):
                cases.rows[family] = proof_of(key, family, device, ran, of[family], every=self.every)
                keep(cases.rows[family])

        def done(result: CaseResult) -> None:
            bar.step(result)
            cases.results.append(result)
            waiting[result.family] -= 1
            if not waiting[result.family]:
                prove(result.family)

        with stage(f"{label}: verify on {device}") as bar:
            verify_package(
                staged,
                device=device,
                families=missing,
                every=self.every,
                choose=chosen,
                on_totals=of.update,
                on_tasks=bar.expect,
                on_start=lambda case, target: bar.show(f"{target} {case}"),
                on_done=done,
            )
        for family in missing:
            if family not in waiting:
                prove(family)
        return cases

    def sample(self, label: str, staged: Path, key: str, targets: Sequence[str], cases: Cases) -> int:
        """Compute some looked-up proofs again, once a day at most, and return their number.

        Raises:
            ProofError: a result differs from its proof.
        """
        assert self.device is not None
        if self.fresh or (self.seed is None and was_sampled(key, self.versions, self.device)):
            return 0
        seed = random.SystemRandom().randrange(1 << 32) if self.seed is None else self.seed
        sample, number = Sample(staged, seed), 0
        with stage(f"{label}: compute proofs again") as bar:
            version = random.Random(seed).choice(self.versions)
            chosen = toolchain(version)
            bar.show(f"{VARIANTS} variants with triton {version}")
            number += sample.compile(list_variants(staged, targets, toolchain=chosen), self.proofs, chosen)
            bar.show(f"{CASES} case on {self.device}")
            number += sample.verify({family: cases.rows[family] for family in cases.before})
        note_sample(key, self.versions, self.device, seed)
        return number

    def proved_keys(self, label: str, staged: Path, key: str, targets: Sequence[str]) -> dict[str, list[str]]:
        """Return the keys of a package's variants under each other Triton that is proved for all of them."""
        row, found = self.proofs.package(key), {}
        for version in TRITONS:
            if version in self.versions:
                continue
            if row is not None and version in row.keys:
                keys = list(row.keys[version])
            elif row is None:
                with stage(f"{label}: look up figures of triton {version}"):
                    keys = content_keys(staged, list_variants(staged, targets, toolchain=Toolchain(version)))
            else:
                continue
            if self.proofs.all_hold(keys, version):
                found[version] = keys
        return found
