"""Which compiled variants of a package the verification cases launch; no kernel runs.

Usage: python reach.py PACKAGE_DIR

Calls of all cases for all targets are made, and launches are recorded in place of being done. A variant is taken for
reached if a case launches its text: the kernel with the same constexprs, dtypes and absent arguments, on any target.
Warps, stages, registers and PDL do not count, as an interpreter does not see them.

Prints {"reached": [variant, ...], "missed": [variant, ...]} as JSON, a variant as an interpreter sees it.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import sys
from dataclasses import replace
from typing import Any

from mlagen.verify.worker import Run

UNSEEN = ("PDL", "NUM_STAGES")  # constexprs


def text_of(variant: Any) -> str:
    """An interpreter's view of a launch, as JSON."""
    names = list(inspect.signature(variant.kernel.fn).parameters)
    given = dict(zip(names, variant.arguments, strict=False))
    constexprs = dict(zip(names[len(given) :], variant.constexprs, strict=True))
    tensors = {name: getattr(one, "base", one) for name, one in given.items()}
    text = {
        "kernel": variant.kernel.fn.__name__,
        "constexprs": {name: value for name, value in constexprs.items() if name not in UNSEEN},
        "absent": [name.removesuffix("_ptr") for name, one in given.items() if one is None],
        "dtypes": {name: str(one.dtype).partition(".")[2] for name, one in tensors.items() if hasattr(one, "dtype")},
    }
    return json.dumps(text)


def main() -> None:
    job = {"package_dir": sys.argv[1], "device": "cpu", "targets": None, "only": None, "families": None, "every": True}
    run = Run(job)
    import torch

    from mlagen.verify.call.invalid import RefusedCase
    from mlagen.verify.call.kept import CHECK
    from mlagen.verify.call.subject import Subject, launch_of
    from mlagen.verify.checks import quantised
    from mlagen.verify.families import KERNELS

    quantised.padded = torch.zeros_like  # the padding of scales, which nothing writes here and each call looks at
    launch = launch_of(run.package)
    listed: dict[str, None] = {}
    for target in run.spec["targets"]:
        with launch.planned_for(launch.facts_of(target)), launch.recording() as recorded:
            for call in run.package._calls(torch.device("cpu")):
                call()
        listed |= dict.fromkeys(map(text_of, recorded.values()))
    reached = set()
    families = {family.name: replace(family, compare=lambda run, results: []) for family in KERNELS}
    for (case, target), family in zip(run.pairs, run.families, strict=True):
        if family not in families or isinstance(case, RefusedCase) or case.check == CHECK:
            continue
        # A check may look at results that nothing has written.
        with launch.recording() as recorded, contextlib.suppress(Exception):
            families[family].run(Subject(run.package, run.facts, "cpu", target), case)
        reached |= set(map(text_of, recorded.values()))
    found: dict[str, list[Any]] = {"reached": [], "missed": []}
    for text in listed:
        found["reached" if text in reached else "missed"].append(json.loads(text))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
