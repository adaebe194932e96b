"""Results of merges, against plain torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mlagen.bench.families.merge_states import (
    PARTS,
    STATES,
    MergeStatesShape,
    make_merge_inputs,
    merge_call,
    merge_reference,
)


@pytest.mark.parametrize("kind", [STATES, PARTS])
def test_results_of_merges_are_checked(kind: str) -> None:
    (inputs,) = make_merge_inputs(MergeStatesShape(kind, 20, 3, 8, 2), torch.bfloat16, torch.device("cpu"), 1)

    def merged(outs: Any, lses: Any) -> Any:
        return (lses.softmax(0).transpose(1, 2)[..., None] * outs.float()).sum(0)

    def states(out: Any, prefix: Any, prefix_lse: Any, suffix: Any, suffix_lse: Any, _: Any) -> None:
        out.copy_(merged(torch.stack([prefix, suffix]), torch.stack([prefix_lse, suffix_lse])))

    def parts(outs: Any, lses: Any, out: Any, _: Any) -> Any:
        return out.copy_(merged(outs, lses)), lses

    right: Any = states if kind == STATES else parts
    assert merge_reference(inputs).error_of(merge_call(kind, right, inputs)) < 0.01
    before = merge_reference(inputs)
    assert before.expected.shape == inputs.out.shape
    inputs.lses[0] += 1
    assert before.error_of(merge_call(kind, right, inputs)) > 0.05

    def stale(*arguments: Any) -> Any:
        result = right(*arguments)
        inputs.out.mul_(1.1)
        return result

    assert merge_reference(inputs).error_of(merge_call(kind, stale, inputs)) > 0.05
