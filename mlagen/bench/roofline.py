"""The roof over a shape: no call beats its FLOPs at the device's rate, nor its bytes at the device's bandwidth."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch

from mlagen.bench.measure import event_time

MATMUL = 8192
COPY_BYTES = 2 << 30


@dataclass(frozen=True)
class Roof:
    """A device's two ceilings.

    Attributes:
        flops_per_s: 16-bit matrix product of a warm card; infinite over kernels that are credited no FLOPs.
        bytes_per_s: device memory.
        origin: where the figures are from.
    """

    flops_per_s: float
    bytes_per_s: float
    origin: str

    def seconds(self, flops: int, moved: int) -> float:
        """Least seconds of a call of that many FLOPs and bytes."""
        return max(flops / self.flops_per_s, moved / self.bytes_per_s)

    def products_bound(self, flops: int, moved: int) -> bool:
        """Whether a call's FLOPs take longer than its bytes."""
        return flops / self.flops_per_s > moved / self.bytes_per_s


# A warm H200 slows down at its power limit: 690 T in a run of 8192³ products, 818 T after idling. 4,445 G is a read.
ROOFS = {"NVIDIA H200": Roof(690e12, 4.445e12, "690 TFLOP/s, 4,445 GB/s: a warm H200, measured")}


@functools.cache
def roof_of(device: torch.device) -> Roof:
    """The device's ceilings: as tabled, or measured now by a copy and a matrix product."""
    name = torch.cuda.get_device_name(device)
    return ROOFS.get(name) or measure_roof(device)


def measure_roof(device: torch.device) -> Roof:
    """Ceilings of the device as it is: bytes read and written by a copy, FLOPs of a bf16 product. About 1 s."""
    a = torch.randn(MATMUL, MATMUL, dtype=torch.bfloat16, device=device)
    b = torch.randn(MATMUL, MATMUL, dtype=torch.bfloat16, device=device)
    product = torch.empty_like(a)
    matmul_s = event_time(lambda: torch.mm(a, b, out=product), rounds=51, flush=False)
    flops_per_s, bytes_per_s = 2 * MATMUL**3 / matmul_s, _copy_rate(device)
    origin = f"{flops_per_s / 1e12:.0f} TFLOP/s, {bytes_per_s / 1e9:,.0f} GB/s: matrix product and copy of this run"
    return Roof(flops_per_s, bytes_per_s, origin)


def copy_roof(device: torch.device) -> Roof:
    """The ceiling of kernels that read and write alike: a large copy, measured now; they are credited no FLOPs."""
    bytes_per_s = _copy_rate(device)
    return Roof(math.inf, bytes_per_s, f"{bytes_per_s / 1e9:,.0f} GB/s: a large copy in this run")


def _copy_rate(device: torch.device) -> float:
    """Bytes read and written a second by a copy that is much larger than L2."""
    source = torch.randint(0, 256, (COPY_BYTES,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * COPY_BYTES / event_time(lambda: target.copy_(source), rounds=21)
