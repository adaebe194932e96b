"""Runs small kernels in Triton's interpreter, fixed or bare, and saves their results; a process of its own.

Usage: python interpreter_probe.py (fixed | bare) OUT.npz
"""

import os
import sys

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import torch
import triton
import triton.language as tl

EIGHT_BITS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


@triton.jit
def _convert(src_ptr, dst_ptr, N: tl.constexpr, ROUNDING: tl.constexpr):
    offsets = tl.arange(0, N)
    tl.store(dst_ptr + offsets, tl.load(src_ptr + offsets).to(dst_ptr.dtype.element_ty, ROUNDING))


@triton.jit
def _dot(a_ptr, b_ptr, out_ptr, N: tl.constexpr):
    offsets = tl.arange(0, N)
    at = offsets[:, None] * N + offsets[None, :]
    tl.store(out_ptr + at, tl.dot(tl.load(a_ptr + at), tl.load(b_ptr + at)))


@triton.jit
def _count(length_ptr, out_ptr):
    length = tl.load(length_ptr)
    steps = 0
    for _ in tl.range(0, length):
        steps += 1
    tl.store(out_ptr, steps)


@triton.jit
def _far(out_ptr, stride: tl.int64):
    tl.store(out_ptr, tl.program_id(0) + 8 * stride)


@triton.jit
def _add(a_ptr, out_ptr):
    tl.store(out_ptr, tl.load(a_ptr) + tl.load(a_ptr))


@triton.jit
def _fma(x_ptr, y_ptr, z_ptr, out_ptr):
    offsets = tl.arange(0, 4)
    tl.store(out_ptr + offsets, tl.fma(tl.load(x_ptr + offsets), tl.load(y_ptr + offsets), tl.load(z_ptr + offsets)))


@triton.jit
def _extrema(x_ptr, out_ptr):
    x = tl.load(x_ptr + tl.arange(0, 16)).reshape(4, 4)
    tl.store(out_ptr + tl.arange(0, 4), tl.max(x, 1))
    low, high = tl.minimum(x, 2.0), tl.maximum(x, -2.0)
    at = tl.arange(0, 4)[:, None] * 4 + tl.arange(0, 4)[None, :]
    tl.store(out_ptr + 4 + at, low)
    tl.store(out_ptr + 20 + at, high)


@triton.jit
def _claim(in_ptr, out_ptr):
    rows = in_ptr + tl.arange(0, 4)[:, None] * 8 + tl.arange(0, 8)[None, :]
    tl.store(out_ptr, tl.sum(tl.sum(tl.load(tl.multiple_of(rows, [1, 16])).to(tl.float32), 1), 0))


def bits(tensor: torch.Tensor) -> np.ndarray:
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize]).numpy()


def patterns(dtype: torch.dtype) -> torch.Tensor:
    """Every value of a dtype of 8 or 16 bits, in the order of its bits."""
    if dtype.itemsize == 1:
        return torch.arange(256, dtype=torch.uint8).view(dtype)
    return torch.arange(65536, dtype=torch.int32).to(torch.int16).view(dtype)


def around_ties(dtype: torch.dtype) -> torch.Tensor:
    """fp32: each value of `dtype`, the midpoint to the next one, and both fp32 neighbours of each; and larger ones."""
    values = patterns(dtype).double()
    values = torch.unique(values[values.isfinite()])
    ties = torch.cat([values, (values[1:] + values[:-1]) / 2, values[-1:] * 1.5, values[-1:] * 4]).float()
    beyond = torch.tensor([float("inf"), -float("inf"), float("nan"), -0.0, 1000.0, -1000.0])
    below = torch.nextafter(ties, torch.tensor(-torch.inf))
    return torch.cat([ties, torch.nextafter(ties, torch.tensor(torch.inf)), below, beyond])


def convert(src: torch.Tensor, dtype: torch.dtype, rounding: str | None = None) -> torch.Tensor:
    size = triton.next_power_of_2(src.numel())
    padded = torch.cat([src, src.new_zeros(size - src.numel())]) if size > src.numel() else src
    dst = torch.empty(size, dtype=dtype)
    _convert[(1,)](padded, dst, N=size, ROUNDING=rounding)
    return dst[: src.numel()]


def dot(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(32, 32, generator=generator).to(dtype) for _ in range(2))
    out = torch.empty(32, 32)
    _dot[(1,)](a, b, out, N=32)
    return a.double(), b.double(), out


def attempt(results: dict, name: str, run) -> None:
    """Saves the result of `run`, or the name of its exception."""
    try:
        results[name] = run()
    except Exception as error:
        results[name] = np.array(type(error).__name__)


def count() -> np.ndarray:
    steps = torch.zeros(1, dtype=torch.int32)
    _count[(1,)](torch.tensor([5], dtype=torch.int32), steps)
    return steps.numpy()


def far() -> np.ndarray:
    out = torch.zeros(1, dtype=torch.int64)
    _far[(1,)](out, 2**30)
    return out.numpy()


def add() -> np.ndarray:
    out = torch.zeros(1, dtype=torch.bfloat16)
    _add[(1,)](torch.ones(1, dtype=torch.bfloat16), out)
    return bits(out)


def fma() -> np.ndarray:
    """x * y + z where the product's low bits are all that is left of it."""
    x, y = torch.tensor([1 + 2.0**-12, 3.0, 1e-20, 1e30]), torch.tensor([1 - 2.0**-12, 1 / 3, 1e-20, 1e30])
    out = torch.zeros(4)
    _fma[(1,)](x, y, torch.tensor([-1.0, -1.0, 1.0, 1.0]), out)
    return out.numpy()


def extrema() -> np.ndarray:
    """Maxima of rows with NaN, signalling ones among them, and element by element with a number."""
    nan = np.array([0x7F810000, 0x7FC00000, 0xFF810000, 0xFFC00000], dtype=np.uint32).view(np.float32)
    x = np.array([[1, nan[0], 3, nan[1]], [nan[2], -1, -5, -9], [np.inf, nan[0], 0, 0], [*nan]], dtype=np.float32)
    out = torch.zeros(36)
    _extrema[(1,)](torch.from_numpy(x), out)
    return out.numpy()


def claim(offset: int) -> np.ndarray:
    """Result of a kernel that calls its rows 16-byte aligned; they begin `offset` elements after such an address."""
    out = torch.zeros(1)
    _claim[(1,)](torch.ones(48, dtype=torch.bfloat16)[offset:], out)
    return out.numpy()


def main() -> None:
    np.seterr(all="ignore")
    if sys.argv[1] == "fixed":
        from mlagen.verify.interpreter import install

        install()
    results: dict = {}
    narrow = {"bf16": torch.bfloat16, "fp16": torch.float16, **EIGHT_BITS}
    for name, dtype in narrow.items():
        attempt(results, f"{name} to fp32", lambda dtype=dtype: bits(convert(patterns(dtype), torch.float32)))
        results[f"ties {name}"] = bits(around_ties(dtype))
        attempt(results, f"fp32 to {name}", lambda dtype=dtype: bits(convert(around_ties(dtype), dtype)))
    for name in ("bf16", "fp16"):
        dtype = narrow[name]
        attempt(results, f"fp32 to {name} rtz", lambda dtype=dtype: bits(convert(around_ties(dtype), dtype, "rtz")))
    attempt(results, "fp16 to bf16", lambda: bits(convert(patterns(torch.float16), torch.bfloat16)))
    attempt(results, "bf16 to fp16", lambda: bits(convert(patterns(torch.bfloat16), torch.float16)))
    results["integers"] = torch.arange(-2048, 2048, dtype=torch.int32).numpy() * 4099
    attempt(
        results, "int32 to bf16", lambda: bits(convert(torch.from_numpy(results["integers"].copy()), torch.bfloat16))
    )
    for name, dtype in narrow.items():
        results[f"a {name}"], results[f"b {name}"], results[f"dot {name}"] = (t.numpy() for t in dot(dtype))
    attempt(results, "loop bound", count)
    attempt(results, "int64 argument", far)
    attempt(results, "bf16 sum", add)
    attempt(results, "fma", fma)
    attempt(results, "extrema", extrema)
    attempt(results, "true claim", lambda: claim(8))
    attempt(results, "false claim", lambda: claim(1))
    np.savez(sys.argv[2], **results)


if __name__ == "__main__":
    main()
