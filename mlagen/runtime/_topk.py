"""Top-k: schedules, launches and the checks that its wrappers share with those of the indexer."""

import functools
import importlib
import itertools
import operator
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from . import _calls, _facts, _launch, _tiles, _topk_kernels
from ._topk_kernels import COLUMNS

INT32_VALUES = 1 << 31
MOST_COLUMNS = 1 << 30
MOST_K = 4096
LONG_REGISTERS = 255  # most that a thread can have, ptxas's default before Triton 3.8
MERGE = "topk_merge"
SELECTS = ("top_k_per_row_prefill", "top_k_per_row_decode", "persistent_topk", "top_k_page_table_transform")


def check_rows(
    name: str, tensor: torch.Tensor, dtype: torch.dtype, rows: int, columns: int, device: torch.device
) -> None:
    """Check a tensor for rows of results: rows must not overlap."""
    got, _ = _launch.check(name, tensor, dtype, (None, columns), device)
    if got < rows:
        raise ValueError(f"{name}: got {got} rows, takes {rows}, one a row of scores")
    if rows > 1 and tensor.stride(0) < columns:
        raise ValueError(f"{name}: got rows {tensor.stride(0)} elements apart, takes at least {columns}")


def check_vector(name: str, tensor: torch.Tensor, entries: int, device: torch.device, *, exact: bool = False) -> None:
    """Check an int32 tensor with an entry per row. It may have more entries unless `exact`."""
    (got,) = _launch.check(name, tensor, torch.int32, (None,), device)
    if got < entries or (exact and got > entries):
        raise ValueError(f"{name}: got {got} entries, takes {entries}")


class Schedule(NamedTuple):
    """The kernel of a call, by its name for `_launch.force`, and its tile.

    Kernels are "portable", "sm90", and "sm90_collect": programs share a longer row and collect its candidates, from
    which the kernel of "sm90" then selects.
    """

    kernel: str
    tile: Any  # TopkTile of the portable kernel, else TopkSm90Tile


def runs_sm90(facts: _launch.DeviceFacts) -> bool:
    """Whether calls on the device may run the sm90 kernels."""
    return facts.sm90 and bool(_tiles.TOPK_SM90_TILES) and facts.forced.kernel != "portable"


@functools.lru_cache(maxsize=4096)
def schedule(facts: _launch.DeviceFacts, rows: int, columns: int, k: int, plain: bool = False) -> Schedule:
    """Return the kernel and tile of a call.

    Args:
        facts: facts about the device; `_launch.force` overrides the kernel and its tile.
        rows, columns, k: sizes of the call.
        plain: scores are fp32, in 16-byte aligned rows. Only calls of the portable kernel depend on it.
    """
    kernel, tile = facts.forced.kernel, facts.forced.tile
    if runs_sm90(facts):
        chosen = (kernel and tile) or _found(_tiles.TOPK_SM90_TILES, rows, columns, k)
        shares = chosen.parts > 1 and columns > chosen.capacity
        if shares and kernel in (None, "sm90_collect"):
            return Schedule("sm90_collect", chosen)
        if kernel in (None, "sm90"):
            return Schedule("sm90", chosen)
    tiles = [row for row in _tiles.TOPK_TILES if plain or row[-1].is_long]
    return Schedule("portable", (kernel in (None, "portable") and tile) or _found(tiles, columns, k))


def _found(table: Sequence[tuple[Any, ...]], *sizes: int) -> Any:
    """Return the tile of a table's first row that holds these sizes."""
    return next(tile for *most, tile in table if all(map(operator.le, sizes, most)))


def in_groups(logits: torch.Tensor) -> torch.Tensor | None:
    """Return rows for reads in groups of 16 bytes; None if such groups would leave the tensor's memory."""
    size, stride, (rows, columns) = logits.element_size(), logits.stride(0), logits.shape
    if (logits.data_ptr() | size * stride) % 16:
        return None
    spare = -size * columns % 16 // size
    if spare == 0:
        return logits
    _calls.not_kept()  # its signature does not contain the end of memory
    end = logits.storage_offset() + (rows - 1) * stride + columns + spare
    if size * end > logits.untyped_storage().nbytes():
        return None
    return logits.as_strided((rows, columns + spare), (stride, 1))


def select(call: Any, how: Schedule | None = None) -> None:
    """Select with the schedule of `schedule`, or with `how`. The call has all arguments except sizes."""
    logits = call.logits
    if not _launch.is_current(logits.device):
        with torch.cuda.device(logits.device):
            select(call, how)
        return
    if call.num_rows == 0:
        return
    call.num_columns, call.logits_stride = logits.shape[1], logits.stride(0)
    call.out_stride = call.out.stride(0)
    call.scores_stride, call.raw_stride = call.scores.stride(0), call.raw.stride(0)
    call.page_multiplier, call.page_shift = _launch.divider(call.page_size)
    call.page_limit = INT32_VALUES // call.page_size - 1
    facts = _launch.device_facts(logits.device)
    grouped = None if runs_sm90(facts) else in_groups(logits)
    how = how or schedule(
        facts, call.num_rows, call.num_columns, call.k, grouped is not None and logits.dtype == torch.float32
    )
    if how.kernel != "portable":
        _select_sm90(call, facts, how)
        return
    call.logits = logits if grouped is None else grouped
    _select_portable(call, facts, how.tile, 1 if grouped is None else 16)


def _select_portable(call: Any, facts: _launch.DeviceFacts, tile: _tiles.TopkTile, alignment: int) -> None:
    """Launch the portable kernel for rows that are read in groups of `alignment` bytes."""
    size = call.logits.element_size()
    call.programs = call.num_rows
    call.candidates, call.candidate_ids = call.scores, call.lens
    if tile.is_long:
        call.programs = min(call.num_rows, tile.programs_per_sm * facts.multiprocessors)
        room = (call.programs, 2, tile.reps * tile.spans * COLUMNS.value)
        call.candidates = _calls.empty(*room, dtype=call.logits.dtype, device=call.logits.device)
        call.candidate_ids = _calls.empty(*room, dtype=torch.int32, device=call.logits.device)
    constexprs = (size, alignment, tile.is_long, tile.reps, tile.spans)
    pdl = (facts.pdl, _launch.pdl_max_programs(facts))
    bounded = tile.is_long and facts.target.startswith("sm") and _launch.TRITON >= (3, 8)
    registers = LONG_REGISTERS if bounded else None
    kernel = _topk_kernels._topk_kernel
    _launch.launch(kernel, call.programs, call, constexprs, tile.spans, 1, *pdl, registers=registers)


def _select_sm90(call: Any, facts: _launch.DeviceFacts, how: Schedule) -> None:
    """Launch the sm90 kernel, after the collecting kernel where the schedule has it."""
    _topk_sm90 = importlib.import_module("._topk_sm90", __package__)  # not every Triton has this Gluon

    tile, device = how.tile, call.logits.device
    parts = tile.parts if how.kernel == "sm90_collect" else 1
    size, is_long = call.logits.element_size(), call.num_columns > tile.capacity
    pdl = facts.pdl and call.num_rows <= _tiles.TOPK_SM90_PDL_ROWS
    constexprs = (size, tile.capacity, parts, tile.warps, tile.halves, pdl)
    registers = None if is_long and size == 2 else tile.registers  # long bf16 rows would spill
    options: dict[str, Any] = {"pdl": pdl, "registers": registers}
    call.candidates = call.scores
    call.candidate_ids = call.counts = call.lens
    if how.kernel == "sm90_collect":
        room, programs = (call.num_rows, parts, tile.capacity), call.num_rows * parts
        call.candidates = _calls.empty(*room, dtype=torch.float32, device=device)
        call.candidate_ids = _calls.empty(*room, dtype=torch.int32, device=device)
        call.counts = _calls.empty(call.num_rows, parts, 2, dtype=torch.int32, device=device)
        kernel = _topk_sm90._topk_collect_sm90_kernel
        _launch.launch(kernel, programs, call, constexprs, tile.warps, 1, **options)
    kernel = _topk_sm90._topk_sm90_kernel
    _launch.launch(kernel, call.num_rows, call, (is_long, *constexprs), tile.warps, 1, **options)


def call_of(
    logits: torch.Tensor,
    lens: torch.Tensor,
    out: torch.Tensor,
    num_rows: int,
    k: int,
    scores: torch.Tensor | None,
    *,
    starts: torch.Tensor | None = None,
    next_n: int = 1,
    lens_are_ends: bool = False,
) -> SimpleNamespace:
    """Return the kernel arguments of a call without pages. Tensors of the same dtype stand in for absent ones."""
    return SimpleNamespace(
        logits=logits, lens=lens, starts=lens if starts is None else starts, out=out, num_rows=num_rows, k=k,
        scores=lens.view(torch.float32) if scores is None else scores, raw=out, next_n=next_n,
        has_starts=int(starts is not None), lens_are_ends=int(lens_are_ends),
        gives_scores=int(scores is not None), gives_raw=0,
        page_table=lens, row_to_batch=lens, page_starts=lens, has_pages=0, has_batches=0, has_page_starts=0,
        num_batches=0, num_pages=0, page_size=1, page_table_stride=0,
    )  # fmt: skip


def merge(call: Any, tile: _tiles.TopkMergeTile | None = None) -> None:
    """Merge candidates in as many levels as a row needs. The call has the kernel arguments by name."""
    if not _launch.is_current(call.ids.device):
        with torch.cuda.device(call.ids.device):
            merge(call, tile)
        return
    rows, columns = call.ids.shape
    if rows == 0:
        return
    facts, device = _launch.device_facts(call.ids.device), call.ids.device
    tile = tile or facts.forced.tile or _found(_tiles.TOPK_MERGE_TILES, call.k)
    block, final = tile.reps * tile.spans * COLUMNS.value, (call.out, call.out_scores)
    pdl = (facts.pdl, _launch.pdl_max_programs(facts))
    while True:
        call.num_columns, call.num_groups = columns, max(-(-columns // block), 1)
        call.group_columns = min(block, columns)
        call.gives_scores = 1
        if call.num_groups == 1:
            call.out, call.out_scores = final
        else:
            columns = call.num_groups * call.k
            call.out = _calls.empty(rows, columns, dtype=torch.int32, device=device)
            call.out_scores = _calls.empty(rows, columns, dtype=torch.float32, device=device)
        call.scores_stride, call.ids_stride = call.scores.stride(0), call.ids.stride(0)
        call.out_stride, call.out_scores_stride = call.out.stride(0), call.out_scores.stride(0)
        constexprs, programs = (tile.reps, tile.spans, tile.block_k), rows * call.num_groups
        _launch.launch(_topk_kernels._merge_kernel, programs, call, constexprs, tile.spans, 1, *pdl)
        if call.num_groups == 1:
            return
        call.scores, call.ids = call.out_scores, call.out


def _portable_variants(device: torch.device) -> list[Callable[[], None]]:
    calls: list[Callable[[], None]] = []
    none = torch.zeros((1, 1), dtype=torch.int32, device=device)
    tiles = {tile for _, _, tile in _tiles.TOPK_TILES}
    for dtype in (torch.float32, torch.bfloat16):
        room = torch.zeros(32, dtype=dtype, device=device)
        for first in (0, 1):  # aligned, and not
            plain = dtype == torch.float32 and first == 0
            for tile in sorted(tile for tile in tiles if plain or tile.is_long):
                call = call_of(room[first : first + 16][None], none[0], none, 1, 1, none.view(torch.float32))
                calls.append(functools.partial(select, call, Schedule("portable", tile)))
    return calls


def _sm90_variants(device: torch.device) -> list[Callable[[], None]]:
    """Return a call for each schedule, and for each form of its kernel that some size runs."""
    facts, table = _launch.device_facts(device), _tiles.TOPK_SM90_TILES
    most_rows, most_k = {row[0] for row in table}, {row[2] for row in table}
    most_columns = {row[1] for row in table} | {row[3].capacity for row in table}
    sizes = [
        [1, *(bound + 1 for bound in sorted(each) if bound < _tiles.ANY)] for each in (most_rows, most_columns, most_k)
    ]
    found: dict[tuple[Schedule, bool, bool], tuple[int, int]] = {}
    for rows, columns, k in itertools.product(*sizes):
        how = schedule(facts, rows, columns, min(k, MOST_K))
        found.setdefault((how, columns > how.tile.capacity, rows <= _tiles.TOPK_SM90_PDL_ROWS), (rows, columns))
    calls: list[Callable[[], None]] = []
    for (how, *_), (rows, columns) in found.items():
        out = torch.zeros((rows, 1), dtype=torch.int32, device=device)
        for dtype in (torch.float32, torch.bfloat16):
            row = torch.zeros((1, columns), dtype=dtype, device=device).expand(rows, columns)
            calls.append(functools.partial(select, call_of(row, out[:, 0], out, rows, 1, None), how))
    return calls


def variants(device: torch.device) -> list[Callable[[], None]]:
    """Return tiny calls that launch every variant of the top-k kernels that a call on `device` can reach."""
    calls: list[Callable[[], None]] = []
    if not set(SELECTS).isdisjoint(_facts.WRAPPERS):
        calls += _sm90_variants(device) if _launch.device_facts(device).sm90 else _portable_variants(device)
    if MERGE not in _facts.WRAPPERS:
        return calls
    none = torch.zeros((1, 1), dtype=torch.int32, device=device)
    for _, tile in _tiles.TOPK_MERGE_TILES:
        scores = none.view(torch.float32)
        call = SimpleNamespace(scores=scores, ids=none, k=1, out=none, out_scores=scores)
        calls.append(functools.partial(merge, call, tile))
    return calls
