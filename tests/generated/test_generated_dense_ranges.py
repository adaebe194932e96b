"""How the sm90 kernels of dense attention share out keys: their text, run by numpy in the place of Gluon."""

from __future__ import annotations

import importlib
import random
from pathlib import Path
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest

GENERATED = Path(__file__).resolve().parents[2] / "generated"
BASE = "_dense_decode_sm90"
MODULES = (
    *(f"dsv3_fp8.{BASE}{kind}" for kind in ("", "_rows32", "_q_halves")),
    *(f"dsv3.{BASE}{kind}" for kind in ("", "_swap_ab")),
)
TABLE = 1 << 40  # address of the combine's data about requests


class Tensor(np.ndarray):
    """A vector, or a number as one of one element."""

    def to(self, dtype: Any) -> Tensor:
        """Itself as another dtype."""
        return self.astype(dtype)


def tensor(value: Any, dtype: Any = np.int32) -> Tensor:
    """A vector, or a number."""
    return np.atleast_1d(np.asarray(value, dtype)).view(Tensor)


class Gluon:
    """The functions of Gluon that the scheduler calls, on numpy's vectors; memory is a list of lengths and stores."""

    int32, int64 = np.int32, np.int64
    minimum, maximum = np.minimum, np.maximum

    def __init__(self, lengths: list[int]) -> None:
        self.lengths, self.program = tensor(lengths), 0
        self.stored: dict[int, int] = {}

    def program_id(self, _: int) -> Tensor:
        return tensor(self.program)

    @staticmethod
    def arange(start: int, end: int, _: Any) -> Tensor:
        return tensor(np.arange(start, end))

    @staticmethod
    def full(shape: list[Any], value: int, *_: Any) -> Tensor:
        return tensor(np.full([int(size) for size in shape], value))

    @staticmethod
    def where(condition: Any, chosen: Any, other: Any) -> Tensor:
        return tensor(found := np.where(condition, chosen, other), found.dtype)

    @staticmethod
    def sum(vector: Tensor, _: int) -> Tensor:
        return tensor(vector.sum(dtype=np.int32))

    @staticmethod
    def max(vector: Tensor, _: int) -> Tensor:
        return tensor(vector.max())

    @staticmethod
    def associative_scan(vector: Tensor, *_: Any) -> Tensor:
        return vector.cumsum(dtype=np.int32)

    def load(self, requests: Any, mask: Any, other: int) -> Tensor:
        found = self.lengths[np.minimum(requests, len(self.lengths) - 1)]
        return tensor(np.where(mask, found, other))

    def store(self, address: Any, value: Any) -> None:
        self.stored[int(address[0]) - TABLE] = int(value[0])

    @staticmethod
    def pointer_type(_: Any) -> type:
        return np.int64


FUNCTIONS = (
    *("_partition", "_share_out", "_find_range", "_load_lengths", "_num_kv_blocks"),
    *("_request_range", "_store_programs"),
)


def scheduler(module: ModuleType, gl: Gluon) -> SimpleNamespace:
    """The functions of a module, and of the one that it takes some from, which take `gl` for Gluon."""
    base = importlib.import_module(f"{module.__package__}.{BASE}")
    found = vars(base) | vars(module)
    names = {name: getattr(value, "value", value) for name, value in found.items()}
    names |= {name: int(value) for name, value in names.items() if name.isupper() and isinstance(value, int)}
    names |= {"gl": gl, "_make_uniform": lambda number: number}
    for name in FUNCTIONS:
        names[name] = FunctionType(found[name].fn.__code__, names, name)
    return SimpleNamespace(**names)


class Part(NamedTuple):
    """A program's part of a request, in KV blocks, and whether it is the first and the last that has some."""

    program: int
    request: int
    begin: int
    end: int
    starts: bool
    ends: bool


def share_out(
    module: ModuleType, lengths: list[int], num_programs: int, heads: int = 16, block_keys: int = 128, **sizes: int
) -> tuple[list[Part], dict[int, int]]:
    """All parts of a batch of one query token a request, and the stored table."""
    gl = Gluon(lengths)
    run = scheduler(module, gl)
    facts: dict[str, Any] = {"s_q": 1, "num_heads": heads, "num_kv_heads": 1, "max_keys": 1 << 30, "overhead": 1}
    facts |= {"combine_units": 6, "causal": 0, "unit_keys": block_keys, "cache_seqlens_ptr": 0, "block_table_stride": 1}
    facts |= {
        "num_rows": tensor(0),
        "partial_ptr": tensor(TABLE, np.int64),
        "block_table_ptr": tensor(0, np.int64),
        **sizes,
    }
    call = SimpleNamespace(num_requests=len(lengths), num_programs=num_programs, **facts)
    blocks, parts = -(-heads // run.BLOCK_H), []
    for gl.program in range(0, num_programs * blocks, blocks):
        work = run._partition(call, run.BLOCK_H)
        start = work.start_offset
        for request in range(int(work.first[0]), int(work.end[0])):
            keys = run._request_range(call, work, tensor(request), start)
            start = keys.next_offset
            run._store_programs(call, work, keys, tensor(request))
            begin, end = int(keys.begin[0]) // block_keys, -(-int(keys.end[0]) // block_keys)
            parts.append(
                Part(
                    gl.program // blocks,
                    request,
                    begin,
                    max(end, 1),
                    bool(keys.starts_request[0]),
                    bool(keys.ends_request[0]),
                )
            )
    return parts, gl.stored


def check(parts: list[Part], table: dict[int, int], lengths: list[int], block_keys: int = 128) -> None:
    """Each block once, programs of a request end to end, the first and the last named, and the table theirs."""
    for request, length in enumerate(lengths):
        own = sorted(part for part in parts if part.request == request)
        blocks = max(-(-length // block_keys), 1)
        assert [part.begin for part in own] == [0, *(part.end for part in own[:-1])]
        assert own[-1].end == blocks
        assert [part.program for part in own] == list(range(own[0].program, own[0].program + len(own)))
        assert [part.starts for part in own] == [number == 0 for number in range(len(own))]
        assert [part.ends for part in own] == [number == len(own) - 1 for number in range(len(own))]
        assert (table[2 * request], table[2 * request + 1]) == (own[0].program, len(own))


@pytest.fixture(params=MODULES)
def module(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    pytest.importorskip("triton.experimental.gluon")
    monkeypatch.syspath_prepend(str(GENERATED))
    return importlib.import_module(request.param)


@pytest.mark.parametrize("requests", [1, 2, 3, 16, 32, 33, 132, 257])
def test_each_block_of_a_request_goes_to_one_program(module: ModuleType, requests: int) -> None:
    draw = random.Random(requests)
    for most in (1, 5000, 40000):
        for lengths in ([most] * requests, [draw.randint(0, most) for _ in range(requests)]):
            for num_programs in (33, 132):
                parts, table = share_out(module, lengths, num_programs)
                check(parts, table, lengths)
                assert max(part.program for part in parts) < num_programs


@pytest.mark.parametrize(
    ("requests", "num_programs", "parts_each"), [(16, 33, 2), (16, 66, 4), (16, 132, 8), (64, 132, 2)]
)
def test_equal_requests_go_to_as_many_programs_each(
    module: ModuleType, requests: int, num_programs: int, parts_each: int
) -> None:
    parts, table = share_out(module, [4096] * requests, num_programs)
    check(parts, table, [4096] * requests)
    assert [table[2 * request + 1] for request in range(requests)] == [parts_each] * requests
    assert len({part.program for part in parts}) == len(parts)  # none begins twice


def test_no_range_is_longer_than_an_equal_one_by_more_than_a_request_begun(module: ModuleType) -> None:
    draw = random.Random(0)
    for _ in range(8):
        requests = draw.randint(2, 132)
        lengths = [draw.randint(1, 4096) for _ in range(requests)]
        parts, _ = share_out(module, lengths, 132)
        blocks = [sum(part.end - part.begin for part in parts if part.program == program) for program in range(132)]
        total = sum(-(-length // 128) + 1 for length in lengths)
        assert max(blocks) <= -(-total // 132) + 6


def test_batch_invariant_bits_depend_only_on_the_row(module: ModuleType) -> None:
    for lengths in ([4096] * 4, [1, 0, 5000, 1024, 1025]):
        parts, table = share_out(module, lengths, 5 * len(lengths), block_keys=1024, overhead=0, combine_units=0)
        check(parts, table, lengths, 1024)
        assert all(part.end - part.begin == 1 for part in parts)


def test_keys_of_many_long_requests_are_counted_without_wrapping(module: ModuleType) -> None:
    lengths = [(1 << 30) - 7 * number for number in range(64)]
    parts, table = share_out(module, lengths, 132)
    check(parts, table, lengths)
