"""What `warmup` compiles can be asked for: calls of every variant are made on a CPU, and not launched."""

from pathlib import Path

import pytest
import torch

from mlagen.bench import load_package
from mlagen.verify.checks import Subject

ROOT = Path(__file__).parents[2]
PACKAGES = sorted(path.parent for path in (ROOT / "generated").glob("*/__init__.py"))


@pytest.mark.parametrize("folder", PACKAGES, ids=lambda path: path.name)
def test_every_module_makes_calls_of_all_its_variants(folder: Path) -> None:
    package = load_package(folder)
    modules = [path.stem for path in sorted(folder.glob("*.py")) if "\ndef variants(" in path.read_text()]
    assert modules
    for target in package.spec["targets"]:
        with Subject(package.root, package.facts, "cpu", target).planned_for(None):
            for module in modules:
                assert package.module(module).variants(torch.device("cpu")), module
