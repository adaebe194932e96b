"""Results of the indexer's logits and picks are compared at every token, against a plain sum a token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mlagen.bench.families.indexer_select import PickInputs, pick_error
from mlagen.bench.families.mqa_logits import (
    ERROR_LIMIT,
    FLAT,
    PAGED,
    LogitsInputs,
    LogitsShape,
    logits_error,
    make_flat_inputs,
    make_paged_inputs,
)
from mlagen.layout import indexer_layout_of
from mlagen.spec import load

LAYOUT = indexer_layout_of(load(Path(__file__).parents[3] / "specs" / "dsv32.yaml").model_dump(mode="json"))
CPU = torch.device("cpu")


@pytest.fixture(params=[FLAT, PAGED])
def inputs(request: pytest.FixtureRequest) -> LogitsInputs:
    """Seven tokens of one request over 100 keys; over pages, two of each of three requests."""
    assert LAYOUT is not None
    if request.param == FLAT:
        return make_flat_inputs(LogitsShape(FLAT, 1, 7, 4, 100), LAYOUT, CPU, 1)[0]
    return make_paged_inputs(LogitsShape(PAGED, 3, 2, 4, 100), LAYOUT, 64, CPU, 1)[0]


def plain(inputs: LogitsInputs) -> torch.Tensor:
    """Logits in fp32, a token at a time; keys that it does not see stay as poison left them."""
    values, ends = inputs.q[0].float(), inputs.end.flatten().tolist()
    out = torch.full((len(ends), 100), 7.0)
    for token, end in enumerate(ends):
        if inputs.block_table is None:
            keys = inputs.keys[0][:end].float() * inputs.keys[1][:end, None]
        else:
            slots = [int(inputs.block_table[token // 2, key // 64]) * 64 + key % 64 for key in range(end)]
            pages = inputs.cache.flatten(0, 1)[:, 0]
            page = 64 * 132
            keys = torch.stack([row(pages.reshape(-1), slot // 64 * page, slot % 64) for slot in slots])
        out[token, :end] = (inputs.weights[token][:, None] * (values[token] @ keys.T).relu()).sum(0)
    return out


def row(cache: torch.Tensor, page: int, place: int) -> torch.Tensor:
    """A key of a page. All values precede all scales in the page."""
    values = cache[page + place * 128 :][:128].view(torch.float8_e4m3fn).float()
    return values * cache[page + 64 * 128 + place * 4 :][:4].view(torch.float32)


def test_right_logits_pass_and_one_wrong_key_of_any_token_does_not(inputs: LogitsInputs) -> None:
    assert logits_error(inputs, lambda: plain(inputs)) < 1e-6
    largest = inputs.expected.where(inputs.expected > -torch.inf, 0.0).abs().argmax(1)
    for token, key in enumerate(largest.tolist()):

        def wrong(token: int = token, key: int = key) -> torch.Tensor:
            out = plain(inputs)
            out[token, key] *= 2
            return out

        assert logits_error(inputs, wrong) > ERROR_LIMIT


def test_picks_are_compared_at_every_token(inputs: LogitsInputs) -> None:
    one = PickInputs(inputs, torch.empty(len(inputs.weights), 20, dtype=torch.int32))

    def picks(change: Any = None) -> Any:
        def call() -> torch.Tensor:
            best = inputs.expected.topk(20, 1).indices.int()
            if change is not None:
                change(best)
            return best

        return call

    def twice(best: torch.Tensor) -> None:
        best[-1, 0] = best[-1, 1]

    def none(best: torch.Tensor) -> None:
        best[2, 5] = -1

    def worse(best: torch.Tensor) -> None:
        best[4, 0] = int(inputs.expected[4, : int(inputs.end.flatten()[4])].argmin())

    assert pick_error(one, picks()) == 0
    for change in (twice, none, worse):
        assert pick_error(one, picks(change)) > ERROR_LIMIT
