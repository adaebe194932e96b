"""Each kernel of a package, forced by name in a small call on a CPU: sm90 kernels run in numpy.

Usage: python forced.py PACKAGE_DIR

Prints {"family/kernel": [the case's failure, [function launched, ...]], ...} as JSON. An empty text: the case holds.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

from mlagen.verify.worker import Run, cause


def _cases(run: Run) -> Iterator[tuple[str, str, Any]]:
    """A small case for each kernel of each family: family, kernel, case."""
    from mlagen.verify.call.case import SM90_KERNELS
    from mlagen.verify.call.subject import kernels_of
    from mlagen.verify.families import KERNELS, cases_of

    for family in KERNELS:
        found = [case for case in cases_of(family, run.spec, "cpu") if case.check == "reference" and not case.in_full]
        for kernel in kernels_of(run.package):
            run_by = SM90_KERNELS[:1] if kernel not in SM90_KERNELS else (kernel,)
            fits = [case for case in found if {*run_by} & {*case.kernels} and (kernel in run_by or not case.only_sm90)]
            if fits:
                yield family.name, kernel, min(fits, key=lambda case: case.only_sm90)


def main() -> None:
    job = {"package_dir": sys.argv[1], "device": "cpu", "targets": ["sm90"], "only": [], "families": None}
    run = Run({**job, "every": True})
    from mlagen.verify import families
    from mlagen.verify.call.subject import Subject, launch_of, targets_of

    class Forced(Subject):
        """A subject on a simulated sm90, whose calls are forced to any kernel."""

        forced = ""

        @property
        def kernel(self) -> str:
            return self.forced

    launch, launched = launch_of(run.package), list[str]()
    (target, *_) = (*targets_of(run.package, "cpu"), run.spec["targets"][0])
    inner = launch.launch

    def noting(kernel: Any, *arguments: Any, **named: Any) -> None:
        launched.append(kernel.fn.__name__)
        inner(kernel, *arguments, **named)

    launch.launch = noting
    found = {}
    for family, kernel, case in _cases(run):
        Forced.forced = kernel
        launched.clear()
        wrong = ""
        try:
            over = families.run(Forced(run.package, run.facts, "cpu", target), case)
            wrong = "; ".join(one.name for one in over if not one.share <= 1)
        except Exception as error:
            wrong = cause(error)
        found[f"{family}/{kernel}"] = (wrong, list(dict.fromkeys(launched)))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
