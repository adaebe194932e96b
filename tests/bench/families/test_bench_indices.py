"""Trials of index kernels, against each rule spelled out a token at a time."""

from __future__ import annotations

import pytest
import torch

from mlagen.bench.families.indices import (
    COMBINE,
    CONTEXT,
    CONVERT,
    GLOBAL,
    CombineInputs,
    MapInputs,
    combine_call,
    combined_width,
    convert_call,
    global_call,
    index_error,
    make_combine_inputs,
    make_map_inputs,
)
from mlagen.bench.shapes import Batch
from mlagen.work import combine_bytes, map_bytes

CPU = torch.device("cpu")


def slots(indices: torch.Tensor, requests: torch.Tensor, table: torch.Tensor, block_size: int) -> torch.Tensor:
    found = [
        [int(table[request, index // block_size]) * block_size + index % block_size for index in row]
        for request, row in zip(requests.tolist(), indices.tolist(), strict=True)
    ]
    return torch.tensor(found, dtype=torch.int32)


@pytest.fixture
def mapping() -> MapInputs:
    return make_map_inputs(Batch("indices", GLOBAL, 6, 2, 5), 64, CPU, 2)[1]


@pytest.fixture
def combination() -> CombineInputs:
    return make_combine_inputs(Batch("indices", COMBINE, 6, 2, 12), 8, CPU, 2)[1]


def test_slots_and_counts_are_checked(mapping: MapInputs) -> None:
    def right(
        indices: torch.Tensor, requests: torch.Tensor, table: torch.Tensor, block_size: int, valid: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return slots(indices, requests, table, block_size), (indices >= 0).sum(1).int() * valid

    def wrong(*arguments: object) -> tuple[torch.Tensor, torch.Tensor]:
        found, counts = right(*arguments)  # type: ignore[arg-type]
        counts[0] += 1
        return found, counts

    assert index_error(mapping, global_call(right, mapping)) == 0
    assert index_error(mapping, global_call(wrong, mapping)) == pytest.approx(1 / 6)


def test_converted_indices_are_checked(mapping: MapInputs) -> None:
    def right(
        requests: torch.Tensor, table: torch.Tensor, indices: torch.Tensor, block_size: int, **options: int
    ) -> torch.Tensor:
        assert options == {"NUM_TOPK_TOKENS": 5}
        return slots(indices, requests, table, block_size)

    assert index_error(mapping, convert_call(right, mapping)) == 0
    wrong = convert_call(lambda *arguments, **options: right(*arguments, **options) + 1, mapping)
    assert index_error(mapping, wrong) == 1


def combined(
    indices: torch.Tensor,
    starts: torch.Tensor,
    seq_lens: torch.Tensor,
    gather_lens: torch.Tensor,
    window: int,
    ratio: int,
    topk: int,
    rows: int,
    compressed: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    out = torch.full((len(indices), combined_width(topk + window)), -1, dtype=torch.int32)
    lens = torch.zeros(len(indices), dtype=torch.int32)
    for request, (first, end) in enumerate(zip(starts.tolist(), starts[1:].tolist(), strict=False)):
        for token in range(first, end):
            position = int(seq_lens[request]) - (end - first) + token - first
            named = [int(index) + rows * request for index in indices[token][: min((position + 1) // ratio, topk)]]
            begin = int(seq_lens[request] - gather_lens[request])
            run = range(position - min(position + 1, window) + 1, position + 1)
            named += [rows * request + compressed + each - begin for each in run]
            out[token, : len(named)] = torch.tensor(named, dtype=torch.int32)
            lens[token] = len(named)
    return out, lens


def test_combined_rows_are_checked(combination: CombineInputs) -> None:
    assert index_error(combination, combine_call(combined, combination)) == 0

    def wrong(*arguments: object) -> tuple[torch.Tensor, torch.Tensor]:
        out, lens = combined(*arguments)  # type: ignore[arg-type]
        out[2, -1] = 0
        return out, lens

    assert index_error(combination, combine_call(wrong, combination)) > 0


def test_combined_rows_are_full_and_lie_in_their_requests_part(combination: CombineInputs) -> None:
    rows, lens = combined(*combination.arguments)
    assert set(lens.tolist()) == {12 + 8}
    for token, row in enumerate(rows.tolist()):
        assert all(combination.rows * (token // 3) <= each < combination.rows * (token // 3 + 1) for each in row[:20])


def test_indices_name_tokens_of_their_request(mapping: MapInputs) -> None:
    assert int(mapping.indices.min()) >= 0
    assert int(mapping.indices.max()) < CONTEXT
    assert mapping.block_table.shape == (2, CONTEXT // 64)
    assert mapping.requests.tolist() == [0, 0, 0, 1, 1, 1]


def test_bytes_count_what_is_read_and_written_once() -> None:
    assert map_bytes(10, 512, 100, counts=False) == (2 * 10 * 512 + 10 + 100) * 4
    assert map_bytes(1, 8, 100, counts=True) == (2 * 8 + 1 + 8) * 4 + 1 + 4
    assert combine_bytes(10, 512, 640, 2) == (10 * (512 + 640 + 1) + 7) * 4


def test_a_kernel_of_another_width_is_wrong(mapping: MapInputs) -> None:
    assert index_error(mapping, convert_call(lambda *_, **options: torch.zeros(6, 4, dtype=torch.int32), mapping)) == 1


def test_the_wrappers_are_told_apart() -> None:
    assert len({GLOBAL, COMBINE, CONVERT}) == 3
