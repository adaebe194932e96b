"""Runs the cases of one generated package: a job as JSON on stdin, a JSON object a line on stdout.

    python -m mlagen.verify.worker < job.json

The job:
    package_dir: folder of the package
    device: "cpu" (the interpreter) or "cuda"
    targets: on a CPU, whose tiles to read: all cases with the first's, those marked `every_target` with the others'
        too; null: the spec's targets
    only: shell patterns of case names, or null
    shard: [i, n]: this worker takes every n-th case from the i-th
    done: list of [case, target] to leave out

The answers are {"event": "count", cases} first, {"event": "start", case, target} before and {"event": "result", ...}
after each case, and {"event": "done"} at the end. A worker that stops without a "done" broke off in the case it started
last.
"""

from __future__ import annotations

import fnmatch
import importlib
import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mlagen.verify.case import Case

Answer = Callable[[Mapping[str, Any]], None]


def _take_stdout() -> Answer:
    """Keeps stdout for answers; whatever else prints goes to stderr."""
    stream = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def answer(event: Mapping[str, Any]) -> None:
        stream.write(json.dumps(event) + "\n")
        stream.flush()

    return answer


def _import_package(folder: Path) -> ModuleType:
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
    """Cases and targets of a job, in order: all cases on the first target, those for every target on the others too.

    Another GPU target is another kernel: all cases that compute attention are for it, over rows alone or such as may
    share them where that is what it does.
    """
    from mlagen.verify.case import FEW_HEADS, SHARED_INDICES

    def taken(case: Case, target: str) -> bool:
        if target == FEW_HEADS:
            return case.over_rows
        kernels = targets[0] == "cuda" and (case.can_share if target == SHARED_INDICES else case.attends)
        return case.every_target or kernels

    pairs = [
        (case, target) for number, target in enumerate(targets) for case in found if number == 0 or taken(case, target)
    ]
    if only is None:
        return pairs
    return [pair for pair in pairs if any(fnmatch.fnmatchcase(pair[0].name, pattern) for pattern in only)]


def _prepare(device: str) -> None:
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


def run_job(job: Mapping[str, Any], answer: Answer) -> None:
    """Runs a job, answering as this module's docstring says."""
    device = job["device"]
    _prepare(device)
    import torch

    from mlagen.verify.case import FEW_HEADS, SHARED_INDICES, CaseFailedError, CaseSkippedError
    from mlagen.verify.facts import Facts
    from mlagen.verify.families import cases, run
    from mlagen.verify.results import CaseResult
    from mlagen.verify.subject import SM90_KERNELS, Subject, sm90_modules, swap_ab_modules, union_modules

    package = _import_package(Path(job["package_dir"]))
    spec = package.SPEC["spec"]
    targets = list(job["targets"] or spec["targets"]) if device == "cpu" else [device]
    if device == "cuda" and sm90_modules(package):
        launch = importlib.import_module(f"{package.__name__}._launch")
        if launch.device_facts(torch.device("cuda", 0)).sm90:
            targets += [
                SM90_KERNELS,
                *([FEW_HEADS] if swap_ab_modules(package) else []),
                *([SHARED_INDICES] if union_modules(package) else []),
            ]
    first, step = job["shard"]
    done = {tuple(pair) for pair in job["done"]}
    facts = Facts.of(spec)
    dealt = selected(cases(spec, device), targets, job["only"])[first::step]
    answer({"event": "count", "cases": len(dealt)})
    for case, target in dealt:
        if (case.name, target) in done:
            continue
        answer({"event": "start", "case": case.name, "target": target})
        begin = time.perf_counter()
        figures, skipped, detail, broken = [], None, "", False
        try:
            figures = run(Subject(package, facts, device, target), case)
            over = [figure for figure in figures if not figure.share <= 1]
            detail = "; ".join(f"{one.name} is off by {one.error:.3g}, {one.tolerance:.3g} allowed" for one in over)
        except CaseSkippedError as reason:
            skipped = str(reason)
        except CaseFailedError as failure:
            detail = str(failure)
        except Exception as error:
            cause: BaseException = error  # the interpreter wraps what a kernel raises, once a call
            while cause.__cause__ is not None:
                cause = cause.__cause__
            detail = " ".join(f"{type(cause).__name__}: {cause}".split())[:500]
            if spec.get("backend") == "gluon" and case.attends and detail.endswith("backend is gluon"):
                skipped, detail = detail, ""  # refused, as the package says: no portable kernel takes its place
            broken = device == "cuda" and "CUDA error" in detail
        seconds = time.perf_counter() - begin
        result = CaseResult(
            package=package.__name__,
            case=case.name,
            target=target,
            ok=not detail,
            skipped=skipped,
            figures=tuple(figures),
            seconds=round(seconds, 3),
            detail=detail,
        )
        answer({"event": "result", **result.to_json()})
        if broken:  # the device's context is lost: a fresh worker takes the rest
            return
        if device == "cuda":
            torch.cuda.empty_cache()  # the other workers may need what a large case took
    answer({"event": "done"})


def main() -> None:
    """Reads the job and runs it."""
    answer = _take_stdout()
    run_job(json.load(sys.stdin), answer)


if __name__ == "__main__":
    main()
