from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

import click
import pytest
from bench_packages import MakePackage

from mlagen.bench.families import FAMILIES, shapes_of
from mlagen.bench.package import BenchPackage
from mlagen.cli.measure import bench

ROOT = Path(__file__).parents[3]


def nothing() -> None:
    """A wrapper that is not called."""


V4 = (
    "flash_mla_with_kvcache",
    "flash_mla_sparse_fwd",
    "quantize_and_insert_k_cache",
    "dequantize_and_gather_k_cache",
    "compute_global_topk_indices_and_lens",
    "combine_topk_swa_indices",
)


@pytest.fixture
def v4(make_package: MakePackage) -> BenchPackage:
    """A package of DeepSeek V4's kind, without kernels."""
    wrappers = dict.fromkeys(V4, nothing)
    return make_package(wrappers, "ue8m0_v4", "ue8m0_v4", dims=(448, 64, 512), topk=512, window=128)


def test_every_family_that_a_package_has_wrappers_of_is_measured(v4: BenchPackage) -> None:
    counts = Counter(shape.family for shape in shapes_of(v4))
    rest = {"cache": 5, "gather": 5, "indices": 15}
    assert counts == {"prefill": 6, "ordered": 6, "decode": 10, "sparse_decode": 8, **rest}


def test_a_package_without_wrappers_of_a_family_is_not_measured_in_it(make_package: MakePackage) -> None:
    package = make_package({"concat_and_cache_mla": nothing})
    assert {shape.family for shape in shapes_of(package)} == {"cache"}
    assert shapes_of(package, ["sparse_decode", "prefill"]) == []


def test_families_and_heads_can_be_chosen(v4: BenchPackage) -> None:
    shapes = shapes_of(v4, ["sparse_decode", "gather"], [32])
    assert Counter(shape.family for shape in shapes) == {"sparse_decode": 8, "gather": 5}
    assert {shape.num_heads for shape in shapes if shape.family == "sparse_decode"} == {32}  # type: ignore[attr-defined]


def test_prefills_of_neighbours_are_measured_where_they_share_rows(
    dsv32: BenchPackage, dsv32_fp8: BenchPackage
) -> None:
    shapes = shapes_of(dsv32, ["shared"])
    assert {(shape.num_heads, shape.s_kv, shape.share) for shape in shapes} == {  # type: ignore[attr-defined]
        (16, s_kv << 10, share) for s_kv in (8, 32, 128) for share in (0, 50, 75, 90)
    }
    assert shapes_of(dsv32_fp8, ["shared"]) == []


def test_a_shapes_text_begins_with_its_table(v4: BenchPackage) -> None:
    for shape in shapes_of(v4):
        assert str(shape).startswith(f"{shape.kind} ")
    assert len({str(shape) for shape in shapes_of(v4)}) == len(shapes_of(v4))


def test_the_command_knows_every_family() -> None:
    (only,) = [parameter for parameter in bench.params if parameter.name == "only"]
    assert isinstance(only.type, click.Choice)
    assert tuple(only.type.choices) == tuple(FAMILIES)


def test_packages_are_measured_where_specs_cannot_be_read(dsv32: BenchPackage) -> None:
    """`python -m mlagen.bench --package` needs torch and Triton, but no library that reads a spec."""
    missing = "import sys; sys.modules.update(dict.fromkeys('pydantic click yaml jinja2 matplotlib rich'.split())); "
    code = f"{missing}from mlagen.bench.__main__ import main; sys.exit(main(['--package', '{dsv32.folder}']))"
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert found.returncode in (0, 2), found.stderr
    assert found.returncode == 0 or "benchmarks run on a GPU" in found.stderr
