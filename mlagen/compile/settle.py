"""Replacement of kernels over a limit under a Triton: by other registers, by another tile, or by the portable kernel.

The first variant that exceeds a limit, or that the compiler refuses, ends a compilation. A register split or a tile
within the limits becomes a finding, and the compilation starts again. Known variants come from the cache.
"""

from __future__ import annotations

import contextlib
import itertools
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mlagen.compile.candidates import Place, place_of, splits_like, tiles_like
from mlagen.compile.job import CompileJob, KernelError
from mlagen.compile.pool import compile_jobs, content_keys, list_variants
from mlagen.compile.resources import Resources, short_reason
from mlagen.compile.toolchain import toolchain
from mlagen.emit import apply, compare, render
from mlagen.emit.replace import write_atomically
from mlagen.errors import LimitError, MlagenError
from mlagen.plan import Plan, TiledFamily, load_plan
from mlagen.plan.sm90.index_union import MODULE as UNION_MODULE
from mlagen.plan.tiles.findings import Findings, LeftOut, RegisterSplit, dump_findings, findings_path, read_findings
from mlagen.plan.tiles.replacements import Replacement, read_replacements
from mlagen.plan.tritons import minor, minor_text

MOST_TRIES = 12  # of candidates in the place of one

Judge = Callable[[Resources], None]
Prove = Callable[[str, Judge], list[Resources]]
Check = Callable[[Resources], Sequence[LimitError]]
JobsOf = Callable[[Plan, Path], Sequence[CompileJob]]
Show = Callable[[str], contextlib.AbstractContextManager[object]]


class BrokenLimitError(Exception):
    """A variant that breaks a limit; ends a compilation.

    Attributes:
        taken: resources of the variant.
        error: the limit that it breaks.
    """

    def __init__(self, taken: Resources, error: LimitError) -> None:
        super().__init__(str(error))
        self.taken, self.error = taken, error


@dataclass(frozen=True)
class Kernel:
    """An sm90 kernel of a family.

    Attributes:
        family: the family's name.
        name: the kernel's in it, such as `sm90_swap_ab`.
    """

    family: str
    name: str


@dataclass(frozen=True)
class _Failure:
    """A variant that does not hold.

    Attributes:
        job: the compilation.
        version: the Triton.
        reason: why, in a few words.
        by_registers: whether another split of registers may hold.
        error: the same as an error.
    """

    job: CompileJob
    version: str
    reason: str
    by_registers: bool
    error: MlagenError


class Settler:
    """Finds registers and tiles within the limits for the kernels of one spec.

    Args:
        path: the spec's file.
        plan: the plan, from the spec and the files next to it.
        staged: folder of the package, which is written again with every finding.
        check: returns the limits that a variant exceeds.
        say: prints a line about a finding.
        show: shows a title while its block runs.

    Attributes:
        plan: the plan with all findings.
        findings: those that the plan has.
    """

    def __init__(
        self,
        path: Path,
        plan: Plan,
        staged: Path,
        check: Check,
        say: Callable[[str], None],
        show: Show = contextlib.nullcontext,
    ) -> None:
        self.plan = plan
        self.findings = read_findings(findings_path(plan.spec.name, path.parent)).of(plan.fits.values())
        self._path, self._staged, self._check, self._say, self._show = path, staged, check, say, show
        self._failed: set[tuple[CompileJob, str]] = set()
        self._computed: set[tuple[str, str]] = set()  # Triton and key of compiled variants

    def settle(self, versions: Sequence[str], prove: Prove) -> dict[str, list[Resources]]:
        """Compile, and add findings, until every variant that a call can launch holds.

        Args:
            versions: the Tritons.
            prove: compiles all variants of the staged package under one, and gives each result to the judge as it
                comes.

        Returns:
            The results of `prove` for the last package, by Triton.

        Raises:
            LimitError: a kernel that cannot be left out does not hold.
            ToolError: such a kernel does not compile, or a worker died or took too long.
        """
        while True:
            before = self.findings
            proofs = {version: self._settle(version, prove) for version in versions}
            if self.findings == before:
                return {version: list(map(self._as_computed, found)) for version, found in proofs.items()}

    def write(self) -> list[Path]:
        """Write new findings next to the spec, and return the written files."""
        path = findings_path(self.plan.spec.name, self._path.parent)
        text = dump_findings(self.plan.spec.name, self.findings)
        if not self.findings or (path.is_file() and path.read_text(encoding="utf-8") == text):
            return []
        write_atomically(path, text)
        return [path]

    def _settle(self, version: str, prove: Prove) -> list[Resources]:
        while True:
            try:
                return prove(version, self._judge)
            except BrokenLimitError as broken:
                taken = broken.taken
                fits = taken.shared <= taken.shared_limit
                failure = _Failure(self._job_of(taken, version), version, short_reason(taken), fits, broken.error)
            except KernelError as refused:
                reason = f"the compiler refuses it: {refused.reason}"
                failure = _Failure(refused.job, version, reason, True, refused)
            self._find(failure)
            apply(compare(render(self.plan), self._staged), force=True)

    def _as_computed(self, taken: Resources) -> Resources:
        """Say of a variant that an earlier compilation of this settler computed that it was not known."""
        return replace(taken, cached=False) if (taken.triton, taken.key) in self._computed else taken

    def _judge(self, taken: Resources) -> None:
        if not taken.cached:
            self._computed.add((taken.triton, taken.key))
        for error in self._check(taken):
            raise BrokenLimitError(taken, error)

    def _variants(self, target: str, version: str) -> list[CompileJob]:
        return list_variants(self._staged, [target], toolchain=toolchain(version))

    def _job_of(self, taken: Resources, version: str) -> CompileJob:
        jobs = self._variants(taken.target, version)
        keys = content_keys(self._staged, jobs)
        return next(job for job, key in zip(jobs, keys, strict=True) if key == taken.key)

    def _find(self, failure: _Failure) -> None:
        """Add the finding for a variant that does not hold.

        Raises:
            LimitError, ToolError: nothing takes the place of its kernel.
        """
        kind = self._kind(failure.job, failure.version)
        variants = self._variants(failure.job.target, failure.version)
        alike = [job for job in variants if self._kind(job, failure.version) == kind]
        number = f" ({len(alike)} variants)" if len(alike) > 1 else ""
        under = f"under {minor_text(minor(failure.version))}: {failure.reason}{number}"
        failure.error.message = f"{failure.error.message.removesuffix(number)}{number}"
        if (failure.job, failure.version) in self._failed:  # the finding did not free it
            raise failure.error
        self._failed.add((failure.job, failure.version))
        if isinstance(kind, Place):
            self._find_tile(kind, failure, under)
        elif isinstance(kind, Kernel) and self.plan.spec.backend != "gluon":
            jobs = [failure.job, *(job for job in alike if job != failure.job)]
            self._find_registers(kind, jobs, failure, under)
        else:
            raise failure.error

    def _kind(self, job: CompileJob, version: str) -> Place | Kernel | str:
        """The job's tile or sm90 kernel; the name of any other kernel, which nothing replaces."""
        for family in self.plan.tiled:
            if job.module == UNION_MODULE and "sm90_shared" in family.SM90_KERNELS:
                return Kernel(family.NAME, "sm90_shared")
            for name, module in family.sm90_kernels.items():
                if job.module == module:
                    return Kernel(family.NAME, name)
        return place_of(job, self.plan, minor(version)) or f"{job.module}.{job.kernel}"

    def _find_registers(self, kernel: Kernel, jobs: list[CompileJob], failure: _Failure, under: str) -> None:
        """Find another split of registers, or leave the kernel out."""
        family, triton = self._family(kernel.family), minor(failure.version)
        splits = failure.by_registers and failure.job.module != UNION_MODULE
        registers = family.registers(kernel.name) if splits else None
        named, tried = f"{self.plan.spec.name}: {kernel.family} {kernel.name}", 0
        for split in itertools.islice(splits_like(registers, triton) if registers else (), MOST_TRIES):
            tried += 1
            found = self.findings.with_split(RegisterSplit(family.fits, kernel.name, triton, split))
            with self._show(f"{named}: other registers, {tried} of at most {MOST_TRIES}"):
                holds = self._holds(found, lambda *_: jobs, failure.version)
            if holds:
                self._take(found, f"{named}: registers {split} {under}")
                return
        left = LeftOut(family.fits, kernel.name, triton, failure.reason)
        found = replace(self.findings, left_out=(*self.findings.left_out, left))
        self._take(
            found, f"{named} not used {under}; {tried} other register splits tried; its calls run the portable kernel"
        )

    def _find_tile(self, place: Place, failure: _Failure, under: str) -> None:
        """Find another tile.

        Raises:
            LimitError, ToolError: all candidates exceed a limit.
        """
        family, triton = self._family(place.family), minor(failure.version)
        named = f"{self.plan.spec.name}: {place.family} on {place.target}"
        table = (family.fits, place.table, place.target)
        known = [
            one
            for one in (*read_replacements(), *self.findings.replacements)
            if (one.fits, one.table, one.target) == table and triton in one.tritons
        ]
        # The tile, and the tiles that it replaces already.
        origins = [place.tile, *(one.tile for one in known if one.instead == place.tile)]
        kept = tuple(one for one in self.findings.replacements if one not in known or one.instead != place.tile)
        bad, tried = {*origins, *(one.tile for one in known)}, 0
        for tile in (tile for tile in tiles_like(place.tile, place.target) if tile not in bad):
            entries = (Replacement(*table, one, (triton,), tile) for one in origins)
            found = replace(self.findings, replacements=(*kept, *entries))
            with self._show(f"{named}: other tiles, {tried + 1} of at most {MOST_TRIES}"):
                holds = self._holds(found, self._jobs_at(replace(place, tile=tile), failure.version), failure.version)
            if holds:
                self._take(found, f"{named}: tile {tile} instead of {place.tile} {under}")
                return
            tried += holds is not None
            if tried == MOST_TRIES:
                break
        raise failure.error

    def _holds(self, found: Findings, jobs_of: JobsOf, version: str) -> bool | None:
        """Whether jobs with these findings stay within the limits; None if the tiles do not fit or are unused."""
        try:
            plan = load_plan(self._path, findings=found)
        except LimitError:
            return None
        with tempfile.TemporaryDirectory(prefix="mlagen-") as temporary:
            package = Path(temporary) / plan.spec.name
            apply(compare(render(plan), package))
            jobs = jobs_of(plan, package)
            if not jobs:
                return None
            try:
                compile_jobs(package, jobs, toolchain=toolchain(version), on_done=self._judge)
            except (BrokenLimitError, KernelError):
                return False
        return True

    def _jobs_at(self, place: Place, version: str) -> JobsOf:
        """Return a function that finds the jobs with the tile at a place."""

        def jobs_of(plan: Plan, package: Path) -> Sequence[CompileJob]:
            jobs = list_variants(package, [place.target], toolchain=toolchain(version))
            return [job for job in jobs if place_of(job, plan, minor(version)) == place]

        return jobs_of

    def _family(self, name: str) -> TiledFamily[Any]:
        return next(family for family in self.plan.tiled if name == family.NAME)

    def _take(self, found: Findings, line: str) -> None:
        self.findings, self.plan = found, load_plan(self._path, findings=found)
        self._say(line)
