"""The fixed interpreter against torch, byte for byte; the bare one is wrong where this module says so."""

import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import triton

from mlagen.plan.tritons import minor

pytestmark = pytest.mark.interpreter

PROBE = Path(__file__).with_name("interpreter_probe.py")
ROOT = Path(__file__).parents[2]
RIGHT_EXTREMES = minor(triton.__version__) >= (3, 9)  # its own interpreter rounds an fma once and leaves NaN out
DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
}
# Results that Triton's own interpreter gets wrong. A name that turns right upstream can leave the shim.
WRONG_BARE = {
    "bf16 to fp32",
    "e4m3 to fp32",
    "e5m2 to fp32",
    "fp32 to bf16",
    "fp32 to e4m3",
    "fp32 to e5m2",
    "int32 to bf16",
    "fp16 to bf16",
    "fp32 to bf16 rtz",
    "fp32 to fp16 rtz",
    "dot bf16",
    "bf16 sum",
    "int64 argument",
}


def probe(mode: str, folder: Path) -> dict[str, np.ndarray]:
    out = folder / f"{mode}.npz"
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
    subprocess.run([sys.executable, str(PROBE), mode, str(out)], check=True, env=env, timeout=120)
    with np.load(out) as saved:
        return dict(saved)


@pytest.fixture(scope="module")
def fixed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, np.ndarray]:
    return probe("fixed", tmp_path_factory.mktemp("fixed"))


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> dict[str, np.ndarray]:
    return probe("bare", tmp_path_factory.mktemp("bare"))


def patterns(dtype: torch.dtype) -> torch.Tensor:
    if dtype.itemsize == 1:
        return torch.arange(256, dtype=torch.uint8).view(dtype)
    return torch.arange(65536, dtype=torch.int32).to(torch.int16).view(dtype)


def ties(results: dict[str, np.ndarray], name: str) -> torch.Tensor:
    return torch.from_numpy(results[f"ties {name}"]).view(torch.float32)


def nearest(values: torch.Tensor, dtype: torch.dtype) -> np.ndarray:
    """Bits of the nearest value of `dtype`, ties to even bits, found by search over all its values; fp8 saturates."""
    grid, first = np.unique(patterns(dtype).double().abs().numpy(), return_index=True)
    grid, codes = grid[np.isfinite(grid)], first[np.isfinite(grid)]
    at = values.double().abs().numpy()
    if dtype.itemsize == 1:
        at = np.minimum(at, grid[-1])
    else:  # the value after the largest one is infinity's stand-in
        grid = np.append(grid, 2 * grid[-1] - grid[-2])
        codes = np.append(codes, codes[-1] + 1)
    low = np.clip(np.searchsorted(grid, at, side="right") - 1, 0, len(grid) - 2)
    below, above = at - grid[low], grid[low + 1] - at
    up = (above < below) | ((above == below) & (codes[low] % 2 == 1))
    codes = codes[low + up]
    return codes | np.where(np.signbit(values.numpy()), 1 << (8 * dtype.itemsize - 1), 0)


def right(results: dict[str, np.ndarray]) -> set[str]:
    """Names of the probe's results that equal the hardware's."""
    found = set()
    for name, dtype in DTYPES.items():
        if results[f"{name} to fp32"].dtype.kind != "U":
            wide = torch.from_numpy(results[f"{name} to fp32"]).view(torch.float32)
            if torch.equal(wide.nan_to_num(nan=-7.0), patterns(dtype).float().nan_to_num(nan=-7.0)):
                found.add(f"{name} to fp32")
        values = ties(results, name)
        number = ~values.isnan().numpy()
        got = results[f"fp32 to {name}"]
        if got.dtype.kind != "U":
            mask = (1 << (8 * dtype.itemsize)) - 1
            same = (got.astype(np.int64) & mask)[number] == nearest(values, dtype)[number]
            nans = torch.from_numpy(got).view(dtype).isnan().numpy()[~number]
            if same.all() and nans.all():
                found.add(f"fp32 to {name}")
        exact = torch.from_numpy(results[f"a {name}"]) @ torch.from_numpy(results[f"b {name}"])
        if torch.allclose(torch.from_numpy(results[f"dot {name}"]).double(), exact, rtol=1e-5, atol=1e-4):
            found.add(f"dot {name}")
    for name in ("bf16", "fp16"):
        values, got = ties(results, name), results[f"fp32 to {name} rtz"]
        if got.dtype.kind != "U":
            kept = torch.from_numpy(got).view(DTYPES[name]).double()
            number = values.isfinite()
            step = torch.from_numpy(got + 1).view(DTYPES[name]).double().abs()
            toward_zero = (kept.abs() <= values.double().abs()) & (~(step <= values.double().abs()))
            if toward_zero[number].all() and torch.equal(kept.signbit()[number], values.signbit()[number]):
                found.add(f"fp32 to {name} rtz")
    for source, target in (("fp16", "bf16"), ("bf16", "fp16")):
        got = results[f"{source} to {target}"]
        expected = patterns(DTYPES[source]).to(DTYPES[target])
        if got.dtype.kind != "U" and torch.equal(
            torch.from_numpy(got).view(DTYPES[target]).float().nan_to_num(nan=-7.0),
            expected.float().nan_to_num(nan=-7.0),
        ):
            found.add(f"{source} to {target}")
    expected = torch.from_numpy(results["integers"]).float().bfloat16().view(torch.int16).numpy()
    if np.array_equal(results["int32 to bf16"], expected):
        found.add("int32 to bf16")
    if results["loop bound"].dtype.kind != "U" and results["loop bound"][0] == 5:
        found.add("loop bound")
    if results["int64 argument"].dtype.kind != "U" and results["int64 argument"][0] == 8 * 2**30:
        found.add("int64 argument")
    if results["bf16 sum"].dtype.kind != "U" and results["bf16 sum"][0] == 0x4000:
        found.add("bf16 sum")
    return found


def test_every_conversion_and_dot_of_the_fixed_interpreter_is_right(fixed: dict[str, np.ndarray]) -> None:
    everything = {
        name
        for name in fixed
        if not name.startswith(("ties ", "a ", "b "))
        and name not in ("integers", "bf16 sum", "fma", "extrema", "true claim", "false claim")
    }
    assert everything - right(fixed) == set()


def test_arithmetic_on_bf16_is_refused_rather_than_wrong(fixed: dict[str, np.ndarray]) -> None:
    assert fixed["bf16 sum"].dtype.kind == "U"


def test_fma_rounds_once(bare: dict[str, np.ndarray], fixed: dict[str, np.ndarray]) -> None:
    third = np.float32(1 / 3).astype(np.float64) * 3 - 1
    assert fixed["fma"].tolist() == [-(2.0**-24), float(third), 1.0, math.inf]
    assert (bare["fma"].tolist() == fixed["fma"].tolist()) == RIGHT_EXTREMES


def test_a_maximum_leaves_nan_out(bare: dict[str, np.ndarray], fixed: dict[str, np.ndarray]) -> None:
    rows, low, high = np.split(fixed["extrema"], [4, 20])
    assert rows[:3].tolist() == [3.0, -1.0, math.inf]
    assert np.isnan(rows[3])
    assert low.tolist() == [1, 2, 2, 2, 2, -1, -5, -9, 2, 2, 0, 0, 2, 2, 2, 2]
    assert high.tolist() == [1, -2, 3, -2, -2, -1, -2, -2, math.inf, -2, 0, 0, -2, -2, -2, -2]
    assert np.isnan(bare["extrema"][4:]).any() != RIGHT_EXTREMES


def test_a_false_claim_of_alignment_is_refused(bare: dict[str, np.ndarray], fixed: dict[str, np.ndarray]) -> None:
    assert fixed["true claim"].tolist() == [32.0]
    assert fixed["false claim"].dtype.kind == "U"
    assert bare["false claim"].tolist() == [32.0]


def test_the_bare_interpreter_is_still_wrong(bare: dict[str, np.ndarray]) -> None:
    assert right(bare) & WRONG_BARE == set()


def test_conversions_match_torch_byte_for_byte(fixed: dict[str, np.ndarray]) -> None:
    for name in ("bf16", "fp16"):
        values = ties(fixed, name)
        expected = values.to(DTYPES[name]).view(torch.int16).numpy()
        number = ~values.isnan().numpy()
        assert np.array_equal(fixed[f"fp32 to {name}"][number], expected[number])


def test_e4m3_saturates_and_rounds_to_even(fixed: dict[str, np.ndarray]) -> None:
    values, got = ties(fixed, "e4m3"), fixed["fp32 to e4m3"]
    at = {value: int(code) for value, code in zip(values.tolist(), got.tolist(), strict=True)}
    assert at[1000.0] == 0x7E  # 448
    assert at[-1000.0] == 0xFE
    assert at[float("inf")] == 0x7E
    assert set(got[values.isnan().numpy()].tolist()) == {0x7F}
    assert at[17.0] == 0x58  # between 16 and 18
