"""Selections that are measured, and how wrong ones show."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mlagen.bench.families.topk import DECODE, PREFILL, TopkInputs, TopkShape, call_of, make_inputs, topk_error


def _select(inputs: TopkInputs, wrong: int = 0) -> Any:
    def function(*_: Any) -> None:
        for row, end in enumerate(inputs.ends.tolist()):
            picked = inputs.logits[row, :end].topk(min(inputs.indices.shape[1], end)).indices
            inputs.indices[row] = -1
            inputs.indices[row, : len(picked)] = picked.int()
        if wrong:
            inputs.indices[0, 0] = inputs.logits[0, : inputs.ends[0]].argmin()

    return function


@pytest.mark.parametrize("kind", [PREFILL, DECODE])
def test_results_of_selections_are_checked(kind: str) -> None:
    (inputs,) = make_inputs(TopkShape(kind, 6, 40, 8), torch.device("cpu"), 1)
    assert inputs.ends.tolist() == ([35, 36, 37, 38, 39, 40] if kind == PREFILL else [40] * 6)
    assert topk_error(inputs, call_of(kind, _select(inputs), inputs)) == 0
    assert topk_error(inputs, call_of(kind, _select(inputs, wrong=1), inputs)) > 0


def test_what_causal_rows_see_is_counted() -> None:
    assert TopkShape(PREFILL, 4, 10, 2).seen == 7 + 8 + 9 + 10
    assert TopkShape(DECODE, 4, 10, 2).seen == 40
