"""Runs the cases of one generated package: requests and answers as JSON, an object a line on stdin and stdout.

    python -m mlagen.verify.worker

The first request is the job:
    package_dir: folder of the package
    device: "cpu" (the interpreter) or "cuda"
    targets: on a CPU, targets with tiles to read: all cases with the first's, and those marked `every_target` also with
        the others'; if sm90 is among them, also the cases of its own kernels, in numpy; null: the spec's targets
    only: shell patterns of case names, or null
    families: names of the families to run, or null: all
    every: whether to run all of their cases, or a representative set

Its answer is {"cases": [[case, target, family], ...], "of": {family: number of all its cases}}. Each request after it
is {"case": number}, the place of one of them. Its answer is the result, and "broken": whether the worker
can run no further case.
"""

from __future__ import annotations

import fnmatch
import importlib
import importlib.util
import json
import os
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from mlagen.verify.call.case import Case
    from mlagen.verify.call.results import CaseResult


def take_stdout() -> TextIO:
    """Keeps stdout for answers; all other prints go to stderr."""
    stream = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    os.dup2(2, 1)
    return stream


def import_package(folder: Path) -> ModuleType:
    """Imports a package by its folder, without a look at sys.path.

    Raises:
        FileNotFoundError: the folder holds no package.
    """
    init = folder / "__init__.py"
    if not init.is_file():
        raise FileNotFoundError(f"{folder} holds no __init__.py")
    spec = importlib.util.spec_from_file_location(folder.name, init, submodule_search_locations=[str(folder)])
    assert spec is not None
    assert spec.loader is not None
    for name in [name for name in sys.modules if name.split(".")[0] == folder.name]:
        del sys.modules[name]  # another package of this name
    module = importlib.util.module_from_spec(spec)
    sys.modules[folder.name] = module
    spec.loader.exec_module(module)
    return module


def selected(found: Iterable[Case], targets: list[str], only: list[str] | None) -> list[tuple[Case, str]]:
    """Cases and targets of a job, in order: all cases on the first target, those for every target also on the others.

    A target that forces an sm90 kernel has cases that the kernel may run: on a CPU all; on a GPU, which also runs them
    without force, those that compute attention, those for every target and those for sm90 only.
    """
    from mlagen.verify.call.case import SM90
    from mlagen.verify.call.kept import CHECK
    from mlagen.verify.call.subject import FORCED, SIMULATED

    def taken(case: Case, target: str, number: int) -> bool:
        if target in SIMULATED:  # launches of kept calls are the interpreter's
            return SIMULATED[target] in case.kernels and case.check != CHECK
        if target in FORCED:
            more = case.every_target or case.only_sm90
            return (case.attends or more) and FORCED[target] in (case.kernels or (SM90,))
        if case.only_sm90:
            return target == "cuda"
        return number == 0 or case.every_target

    pairs = [(case, target) for number, target in enumerate(targets) for case in found if taken(case, target, number)]
    if only is None:
        return _without_most_simulated(pairs)
    return [pair for pair in pairs if any(fnmatch.fnmatchcase(pair[0].name, pattern) for pattern in only)]


def representative(pairs: Sequence[tuple[Case, str]]) -> list[tuple[Case, str]]:
    """Those of a family's cases and targets that stand for all, in their order.

    On the first target these are the first and the last case of each group, which share a name but for its last part,
    and of each check in it, and one refusal of each wrapper. On another target it is one case of each check. On a
    simulated target `selected` has left few already, and all of them stay. Cases that only the full set has are left
    out.
    """
    from mlagen.verify.call.invalid import RefusedCase
    from mlagen.verify.call.subject import SIMULATED

    groups: dict[tuple[str, ...], list[int]] = {}
    for number, (case, target) in enumerate(pairs):
        if case.in_full:
            continue
        if target in SIMULATED:
            kind: tuple[str, ...] = (target, str(number))
        elif target != pairs[0][1]:
            kind = (target, case.check)
        elif isinstance(case, RefusedCase):
            kind = (target, "refuses", case.module, case.wrapper)
        else:
            kind = (target, case.check, case.name.rpartition(": ")[0])
        groups.setdefault(kind, []).append(number)
    first = [numbers[0] for numbers in groups.values()]
    last = [numbers[-1] for kind, numbers in groups.items() if kind[0] == pairs[0][1] and kind[1] != "refuses"]
    return [pairs[number] for number in sorted({*first, *last})]


def _without_most_simulated(pairs: Sequence[tuple[Case, str]]) -> list[tuple[Case, str]]:
    """The pairs without most simulated ones: cases for every target stay, and of others with names alike the first."""
    from mlagen.verify.call.subject import SIMULATED

    kept: dict[tuple[str, ...], tuple[Case, str]] = {}
    for number, (case, target) in enumerate(pairs):
        alike = target in SIMULATED and not case.every_target
        group = (case.check, case.name.rpartition(": ")[0]) if alike else (str(number),)
        kept.setdefault((target, *group), (case, target))
    return list(kept.values())


def prepare(device: str) -> None:
    """Makes torch and Triton ready; for a CPU, before Triton is first imported."""
    # Workers share the cores; numpy's BLAS reads these when it is first imported.
    os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    if device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
    else:
        os.environ.pop("TRITON_INTERPRET", None)
    import torch

    torch.set_num_threads(1)
    if device == "cpu":
        import numpy as np

        from mlagen.verify import interpreter

        np.seterr(all="ignore")  # a GPU warns of no overflow either
        interpreter.install()


def _simulate(package: ModuleType) -> None:
    """Has the package's sm90 kernels run in numpy, if it has any."""
    from mlagen.verify.call.subject import sm90_modules

    if sm90_modules(package):
        from mlagen.verify.gluon.functions import install

        install()


class Run:
    """The cases of a job, ready to run.

    Args:
        job: see the module's docstring.

    Attributes:
        pairs: each case and its target.
        families: the name of the family of each of them.
        of: how many cases each family has.
    """

    def __init__(self, job: Mapping[str, Any]) -> None:
        self.device = job["device"]
        prepare(self.device)
        from mlagen.verify.call.facts import Facts
        from mlagen.verify.families import FAMILIES, cases_of

        self.package = import_package(Path(job["package_dir"]))
        if self.device == "cpu":
            _simulate(self.package)
        self.spec = self.package.SPEC["spec"]
        self.facts = Facts.of(self.spec)
        self.pairs: list[tuple[Case, str]] = []
        self.families: list[str] = []
        self.of: dict[str, int] = {}
        targets = self._targets(job)
        for family in FAMILIES:
            if job["families"] is None or family.name in job["families"]:
                found = selected(cases_of(family, self.spec, self.device), targets, job["only"])
                self.of[family.name] = len(found)
                self.pairs += found if job["every"] else representative(found)
                self.families += [family.name] * (len(self.pairs) - len(self.families))

    def _targets(self, job: Mapping[str, Any]) -> list[str]:
        """On a CPU names of targets; on a GPU the kinds of kernels that the package has for it."""
        import torch

        from mlagen.verify.call.subject import launch_of, targets_of

        if self.device == "cpu":
            targets = list(job["targets"] or self.spec["targets"])
            return [*targets, *targets_of(self.package, "cpu")] if "sm90" in targets else targets
        kernels = targets_of(self.package)
        if not kernels or not launch_of(self.package).device_facts(torch.device("cuda", 0)).sm90:
            return [self.device]
        return [self.device, *kernels]

    def result(self, number: int) -> tuple[CaseResult, bool]:
        """Runs the case of that number in `pairs`; its result, and whether the device's context is lost."""
        from mlagen.verify.call.case import CaseFailedError, CaseSkippedError
        from mlagen.verify.call.results import CaseResult
        from mlagen.verify.call.subject import Subject
        from mlagen.verify.families import run

        case, target = self.pairs[number]
        begin = time.perf_counter()
        figures, skipped, detail = [], None, ""
        try:
            figures = run(Subject(self.package, self.facts, self.device, target), case)
            over = [figure for figure in figures if not figure.share <= 1]
            detail = "; ".join(f"{one.name} differs by {one.error:.3g}, {one.tolerance:.3g} allowed" for one in over)
        except CaseSkippedError as reason:
            skipped = str(reason)
        except CaseFailedError as failure:
            detail = str(failure)
        except Exception as error:
            detail = cause(error)
            if self.spec.get("backend") == "gluon" and case.attends and detail.endswith("backend is gluon"):
                skipped, detail = detail, ""  # refused, as the package says: no portable kernel takes its place
        result = CaseResult(
            package=self.package.__name__,
            case=case.name,
            target=target,
            ok=not detail,
            skipped=skipped,
            figures=tuple(figures),
            seconds=round(time.perf_counter() - begin, 3),
            detail=detail,
            family=self.families[number],
        )
        return result, self.device == "cuda" and "CUDA error" in detail


def cause(error: BaseException) -> str:
    """The exception that was raised first, in a line: the interpreter wraps a kernel's errors, once a call."""
    while error.__cause__ is not None:
        error = error.__cause__
    return " ".join(f"{type(error).__name__}: {error}".split())[:500]


def main() -> None:
    """Reads the job, then runs its cases as they are asked for."""
    answers = take_stdout()
    run = Run(json.loads(sys.stdin.readline()))
    cases = [(case.name, target, family) for (case, target), family in zip(run.pairs, run.families, strict=True)]
    answers.write(json.dumps({"cases": cases, "of": run.of}) + "\n")
    for line in sys.stdin:
        result, broken = run.result(json.loads(line)["case"])
        answers.write(json.dumps({**result.to_json(), "broken": broken}) + "\n")
        if run.device == "cuda" and not broken:
            import torch

            torch.cuda.empty_cache()  # the other workers may need a large case's memory


if __name__ == "__main__":
    main()
