"""Facts of a package's spec about the output of a head, and its wrapper."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from mlagen.verify.call.facts import Facts
from mlagen.verify.checks.out_quant import GROUP

NAME, WRAPPER = "out_quant", "fused_inv_rope_fp8_quant"
WORD = 4  # scales of a packed word


@dataclass(frozen=True)
class OutSide:
    """The output of a head.

    Attributes:
        columns: of a head.
        rope: the last of them, which RoPE rotated.
        heads: of the model.
        dtype: the model's dtype.
        neox: False; a pair's columns are neighbours.
    """

    columns: int
    rope: int
    heads: int
    dtype: torch.dtype
    neox: bool = False

    @property
    def first(self) -> int:
        """The first column that RoPE rotated."""
        return self.columns - self.rope

    @property
    def packs(self) -> bool:
        """Whether the scales of a head fill words."""
        return self.columns % (WORD * GROUP) == 0


def side_of(spec: Mapping[str, Any]) -> OutSide | None:
    """The output of a head of `SPEC["spec"]`; None if the package does not quantise it."""
    if WRAPPER not in spec["wrappers"]:
        return None
    facts = Facts.of(spec)
    return OutSide(facts.d_v, facts.d_rope, facts.num_heads, getattr(torch, facts.dtype))
