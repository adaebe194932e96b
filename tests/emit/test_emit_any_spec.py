"""The package of any spec is Python that linter and formatter accept unchanged, each name bound once."""

from __future__ import annotations

import dis
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from emit_specs import ROOT, make_spec, specs
from hypothesis import given, settings

from mlagen.emit import Package, render
from mlagen.plan import make_plan
from mlagen.spec import Spec

pytestmark = pytest.mark.thorough

WIDTH = 120
# A table that keeps only the rows for the installed Triton, under its own name.
KEEPS_ROWS = re.compile(r"^(\w+) = .*_launch\.for_triton\(\1\)", re.MULTILINE)

# Specs that few draws come upon: bf16 rows of two planes, e4m3 rows without RoPE and rounded partials, and an indexer's
# writer that rotates nothing.
TURNS = {"rope_head_dim": 64, "rope": "neox", "rope_at": "first"}
PLANES = {
    "name": "planes",
    "fields": ({"kind": "latent", "dtype": "bf16"},),
    "planar_fields": ({"kind": "rope", "dtype": "bf16"},),
}
E4M3 = {"name": "e4m3", "fields": ({"kind": "row", "dtype": "e4m3"}, {"kind": "tensor_scale", "of": "row"})}
RARE: tuple[dict[str, Any], ...] = (
    {"attention": {"kind": "dense"}, "cache": {"layout": PLANES}, "wrappers": ("flash_mla_with_kvcache",)},
    {
        "attention": {"kind": "dense"},
        "qk_rope_head_dim": 0,
        "partials": "bf16",
        "cache": {"layout": E4M3},
        "wrappers": ("flash_mla_with_kvcache",),
    },
    {
        "indexer": {"num_heads": 2, "head_dim": 128, "topk": 2048, **TURNS},
        "indexer_cache": {"layout": "indexer_fp8"},
        "wrappers": ("indexer_k_quant_and_cache",),
    },
)


@pytest.fixture(scope="module")
def packages() -> list[tuple[Spec, Package]]:
    """Packages of many specs."""
    drawn = [(spec, render(make_plan(spec))) for spec in (make_spec(**changes) for changes in RARE)]

    @settings(max_examples=200, deadline=None, derandomize=True)
    @given(spec=specs())
    def draw(spec: Spec) -> None:
        drawn.append((spec, render(make_plan(spec))))

    draw()
    return drawn


@pytest.fixture(scope="module")
def written(packages, tmp_path_factory) -> Path:
    """A folder with all of them, named as the repository's is, since the linter's configuration names it."""
    root = tmp_path_factory.mktemp("root")
    for number, (_, package) in enumerate(packages):
        folder = root / "generated" / f"package_{number}"
        folder.mkdir(parents=True)
        for file in package.files:
            (folder / file.name).write_text(file.text, encoding="utf-8")
    return root


def ruff(root: Path, *arguments: str) -> str:
    """Ruff's findings in the packages under `root`."""
    command = [sys.executable, "-m", "ruff", *arguments, "--no-cache", "--config", str(ROOT / "pyproject.toml")]
    done = subprocess.run([*command, "generated"], cwd=root, capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else done.stdout[:4000] + done.stderr


def test_every_file_is_python_within_the_line_width_and_binds_no_name_twice(packages):
    for spec, package in packages:
        for file in package.files:
            code = compile(file.text, file.name, "exec", dont_inherit=True)
            bound = Counter(step.argval for step in dis.get_instructions(code) if step.opname == "STORE_NAME")
            bound.subtract(KEEPS_ROWS.findall(file.text))
            assert [name for name, times in bound.items() if times > 1] == [], (file.name, spec.model_dump_json())
            wide = [line for line in file.text.split("\n") if len(line) > WIDTH]
            assert wide == [], spec.model_dump_json()


def test_every_file_is_formatted(written):
    assert ruff(written, "format", "--diff", "--line-length", str(WIDTH)) == ""


def test_every_file_passes_the_linter(written):
    assert ruff(written, "check", "--output-format", "concise") == ""
