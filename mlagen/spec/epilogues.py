"""Work on the output that attention's kernels do before they store it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from mlagen.spec.base import Model
from mlagen.spec.rules import refused

EPILOGUES = ("out_rope", "out_quant")  # of attention
QUANT_BLOCK = 128  # columns of V with one scale
COLUMNS = {"fp32": (128, 256, 512, 1024), "ue8m0": (512,)}  # of V, by the dtype of scales: four ue8m0 fill a word


class OutQuant(Model):
    """Quantisation of attention's output to e4m3, with a power of two for each block of 128 columns of a head."""

    heads_per_group: Annotated[
        int,
        Field(ge=1, le=128, description="heads of a group, which are a row of the matrix product behind attention"),
    ]
    scales: Annotated[
        Literal["fp32", "ue8m0"],
        Field(description="dtype of the scales; ue8m0: those of a head's four blocks in an int32"),
    ]


def check_quant(quant: OutQuant, num_heads: int, d_v: int) -> None:
    """Refuses heads that are no whole groups, and columns of V that no program has as whole blocks."""
    columns = COLUMNS[quant.scales]
    if d_v not in columns:
        takes = f"takes {quant.scales} only if model.v_head_dim is {' or '.join(map(str, columns))}, but it is {d_v}"
        raise refused(f"got {quant.scales}; {takes}", "out_quant", "scales")
    if num_heads % quant.heads_per_group:
        takes = f"takes a divisor of model.num_heads, {num_heads}"
        raise refused(f"got {quant.heads_per_group}; {takes}", "out_quant", "heads_per_group")
