"""Runs a package's checks of graphs and streams in the interpreter, where a replay is the same call once more.

Usage: python replayed.py PACKAGE_DIR

Prints {case: largest share of a tolerance, or the error} as JSON.
"""

import contextlib
import json
import os
import sys
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from mlagen.verify import interpreter
from mlagen.verify.call.facts import Facts
from mlagen.verify.call.subject import Subject
from mlagen.verify.families import FAMILIES
from mlagen.verify.worker import import_package

LENGTHS = (70, 3, 0, 40)  # of dense attention's requests; a graph's check changes their order


class FakeCuda:
    """Stands for torch.cuda; it is also the graph, and the stream."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def noted(self, family: Any) -> Any:
        """The family. Its calls are noted with their results."""

        def call(run: Any, **given: Any) -> Any:
            self.calls.append((run, family.call(run, **given)))
            return self.calls[-1][1]

        return replace(family, call=call)

    def replay(self) -> None:
        """Calls the last noted call's wrapper again, and puts the results where that call's results are."""
        run, results = self.calls[-1]
        again = run.call()
        self.calls.pop()
        for name, tensor in results.items():
            tensor.copy_(again[name])

    def synchronize(self) -> None: ...

    def install(self, cuda: Any) -> None:
        cuda.CUDAGraph = cuda.Stream = lambda: self
        cuda.graph = cuda.stream = lambda _: contextlib.nullcontext()
        cuda.synchronize = self.synchronize
        cuda._sleep = lambda _: None


def kind(case: Any) -> tuple[Any, ...]:
    return type(case), getattr(case, "wrapper", None), getattr(case, "module", None)


def small_cases(family: Any, spec: Any) -> Iterator[Any]:
    """Small ones of the sizes that a CPU bears, with the checks that a GPU's ask for."""
    typical = {kind(case): case for case in reversed(family.cases(spec, "cpu")) if ": typical" in case.name}
    for case in family.cases(spec, "cuda"):
        if case.check in ("graph", "stream"):
            like = typical[kind(case)]
            if "lengths" in vars(getattr(like, "problem", like)):
                like = replace(like, problem=replace(like.problem, lengths=LENGTHS))
            yield replace(like, name=case.name, check=case.check)


def main() -> None:
    np.seterr(all="ignore")
    interpreter.install()
    fake = FakeCuda()
    fake.install(torch.cuda)
    package = import_package(Path(sys.argv[1]))
    spec = package.SPEC["spec"]
    subject = Subject(package, Facts.of(spec), "cpu", spec["targets"][0])
    found: dict[str, Any] = {}
    for family in FAMILIES:
        for case in small_cases(family, spec):
            try:
                figures = fake.noted(family).run(subject, case)
                found[case.name] = max([figure.share for figure in figures], default=0.0)
            except Exception as error:
                found[case.name] = repr(error)
    print(json.dumps(found, indent=0))


if __name__ == "__main__":
    main()
