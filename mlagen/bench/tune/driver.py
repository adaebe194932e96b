"""Runs a package's attention with a kernel, a tile and a split count of one's own, by the module's own launch."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, fields
from typing import Any

from mlagen.bench.families.cache import block_size_of
from mlagen.bench.families.dense_decode import window_of
from mlagen.bench.package import BenchPackage
from mlagen.bench.trial import Call
from mlagen.bench.tune.choose import RESIDENT
from mlagen.plan import SM90, Sm90Row, Tile

PORTABLE = "portable"
MOST_SPLITS = 128
CROWDED = 4  # splits that give every slot of the device more programs than this are not tried
MOST_RESIDENT = 64  # that a tuned file may name
LEAST_RESIDENT = 4  # programs a multiprocessor; dense attention is tried up to this many even if the model says fewer


def split_counts(blocks: int, programs: int, slots: int) -> Iterator[int]:
    """Powers of two up to `blocks`, while they do not crowd a device that holds `slots` programs at once."""
    splits = 1
    while splits <= min(blocks, MOST_SPLITS) and (splits == 1 or programs * splits <= CROWDED * slots):
        yield splits
        splits *= 2


class Driver:
    """Schedules a package's sparse attention with any tile.

    Args:
        package: the package.
        module: name of the generated module that holds the attention.
        facts: the device as its tile table knows it: `target`, `multiprocessors`, and `sm90` if it has such kernels.

    Attributes:
        sm90: the tile that stands for the module's sm90 kernel; None where there is none, or the device cannot.
        sm90_rows: which calls run that kernel by the package's own table; empty where the target has none.
    """

    def __init__(self, package: BenchPackage, module: str, facts: Any) -> None:
        self.package = package
        self.facts = facts
        self._module = package.module(module)
        self._launch, self._splits, self._tiles = (package.module(name) for name in ("_launch", "_splits", "_tiles"))
        table = getattr(self._tiles, f"{module.upper()}_SM90_CALLS", ()) if facts.target == SM90 else ()
        most = self._tiles.ANY
        self.sm90 = _plain(self._splits.SM90_TILE) if table and facts.sm90 else None
        self.sm90_rows = tuple(
            Sm90Row(heads if heads < most else None, fewest if fewest < most else None) for heads, fewest in table
        )

    def current(self, num_heads: int, tokens: int) -> tuple[Tile, int]:
        """The portable tile of a call by the package's own table, and the programs a multiprocessor it plans with."""
        tile = self._made({"kernel": PORTABLE}, tokens, num_heads, (1,) * self._lists).tile
        return _plain(tile), tile.programs_per_sm

    @property
    def _lists(self) -> int:
        """Lists of indices of a token."""
        return 1 + ("extra_topk" in inspect.signature(self._module.schedule).parameters)

    def _made(self, choices: dict[str, Any], tokens: int, num_heads: int, counts: Sequence[int]) -> Any:
        """The Schedule that the module makes of these choices for aligned calls."""
        facts = self.facts._replace(forced=self._launch.Forced(**choices))
        counts = (*counts, *[0] * (self._lists - len(counts)))
        can_sm90 = {} if self.sm90 is None else {"can_sm90": True}  # which packages without the kernel do not take
        return self._module.schedule(facts, self._splits.ALIGNED, tokens, num_heads, *counts, **can_sm90)

    def _choices(self, tile: Tile, resident: int, tokens: int, num_heads: int, counts: Sequence[int]) -> dict[str, Any]:
        """The forced choices that make calls of these sizes run a tile."""
        if tile != self.sm90:
            return {"kernel": PORTABLE, "tile": self._tiles.Tile(**asdict(tile), programs_per_sm=resident)}
        return {"kernel": self._sm90_kernel(tokens, num_heads, counts)}

    def _sm90_kernel(self, tokens: int, num_heads: int, counts: Sequence[int]) -> str:
        """The sm90 kernel of calls of these sizes."""
        swap_ab = num_heads <= max(vars(self._module).get("SWAP_AB_HEADS", (0,)))
        return "sm90_swap_ab" if swap_ab else SM90

    def schedule(
        self, tile: Tile, resident: int, tokens: int, num_heads: int, counts: Sequence[int], splits: int = 0
    ) -> Any:
        """The module's Schedule for a tile: the split count its rule picks, or as near to `splits` as blocks allow.

        Args:
            tile: the tile; `sm90` runs the sm90 kernel.
            resident: programs a multiprocessor that the rule plans with; the sm90 kernel is always alone on one.
            tokens, num_heads: sizes of the call.
            counts: indices a token in each of its lists.
            splits: how many; 0: as the rule says.
        """
        choices = {**self._choices(tile, resident, tokens, num_heads, counts), "num_splits": splits}
        return self._made(choices, tokens, num_heads, counts)

    def splits_of(self, schedule: Any) -> int:
        """The split count of a schedule."""
        return int(schedule.num_splits)

    def wishes(self, tile: Tile, resident: int, tokens: int, num_heads: int, counts: Sequence[int]) -> list[int]:
        """Split counts that may be a tile's best, most first; `resident` programs fit a multiprocessor."""
        blocks = sum(-(-count // tile.block_n) for count in counts)
        programs = tokens * -(-num_heads // tile.block_h)
        return list(split_counts(blocks, programs, self.facts.multiprocessors * resident))[::-1]

    def residents(self, resident: int) -> range:
        """Programs a multiprocessor that the rule may plan with, for a tile that fits one `resident` times."""
        return RESIDENT

    def smallest(self, tile: Tile, counts: Sequence[int]) -> list[Any]:
        """Schedules of one token and head that launch every kernel with the tile."""
        return [self.schedule(tile, 1, 1, 1, counts, splits) for splits in (1, 2)]

    def scheduled(self, schedule: Any, call: Call) -> Callable[[], Any]:
        """A call of one of the module's wrappers that runs by that schedule instead of its own."""
        choices = {"kernel": schedule.kernel, **self._forced(schedule)}
        if schedule.kernel == PORTABLE:
            choices["tile"] = schedule.tile

        def run() -> Any:
            with self._launch.force(**choices):
                return call()

        return run

    def _forced(self, schedule: Any) -> dict[str, Any]:
        """The settings besides kernel and tile that give a call this schedule."""
        return {"num_splits": schedule.num_splits}


class DenseDecodeDriver(Driver):
    """Schedules a package's dense attention with any tile.

    Calls have rows of one KV head for heads, requests for tokens, and the keys of a request for counts. Splits are the
    programs among which the batch is shared out.
    """

    def __init__(self, package: BenchPackage, module: str, facts: Any) -> None:
        super().__init__(package, module, facts)
        if self.sm90 is not None:
            aligned, page_size = self._splits.ALIGNED, block_size_of(package)
            if not self._module._can_sm90(facts, aligned, page_size):
                self.sm90 = None  # calls over pages of the spec's size run portable

    def schedule(
        self, tile: Tile, resident: int, tokens: int, num_heads: int, counts: Sequence[int], splits: int = 0
    ) -> Any:
        """The module's Schedule for a tile: with `resident` programs a multiprocessor, or as near to `splits`.

        A tile makes way for the small one if its BLOCK_N does not divide a page, as in every call. The sm90 kernel's
        programs follow from the sizes only.
        """
        sm90 = tile == self.sm90
        if splits and not sm90:
            found = [self.schedule(tile, each, tokens, num_heads, counts) for each in range(1, MOST_RESIDENT + 1)]
            return min(found, key=lambda schedule: abs(schedule.programs - splits))
        return self._made(self._choices(tile, resident, tokens, num_heads, counts), tokens, num_heads, counts)

    @property
    def _lists(self) -> int:
        """Lists of keys of a request."""
        return 1

    def _made(self, choices: dict[str, Any], requests: int, rows: int, counts: Sequence[int]) -> Any:
        """The same for rows of one query token."""
        facts = self.facts._replace(forced=self._launch.Forced(**choices))
        page_size, window = block_size_of(self.package), window_of(self.package)
        sizes = (requests, 1, rows, 1, page_size, self._max_keys(counts))
        windows = () if window is None else (window,)
        can_sm90 = {} if self.sm90 is None else {"can_sm90": True}
        return self._module.schedule(facts, self._splits.ALIGNED, *sizes, *windows, False, **can_sm90)

    def _max_keys(self, counts: Sequence[int]) -> int:
        """The keys of a request's row of the block table."""
        page_size = block_size_of(self.package)
        return -(-max(counts) // page_size) * page_size

    def _sm90_kernel(self, tokens: int, num_heads: int, counts: Sequence[int]) -> str:
        """The sm90 kernel of calls of these sizes; over e4m3, with a q of the model's dtype."""
        module = vars(self._module)
        if "_sm90_kernel" in module:
            return str(module["_sm90_kernel"](self.facts, tokens * self._max_keys(counts), num_heads, False))
        swap_ab = num_heads <= max(module.get("SWAP_AB_ROWS", (0,)))
        return "sm90_swap_ab" if swap_ab else SM90

    def _forced(self, schedule: Any) -> dict[str, Any]:
        """Nothing: how a batch is shared out follows from the tile."""
        return {}

    def splits_of(self, schedule: Any) -> int:
        """The programs of a schedule."""
        return int(schedule.programs)

    def wishes(self, tile: Tile, resident: int, tokens: int, num_heads: int, counts: Sequence[int]) -> list[int]:
        """Numbers of programs that may be a tile's best, most first; `resident` of them fit a multiprocessor."""
        tried = reversed(self.residents(resident))
        return list(dict.fromkeys(self.schedule(tile, each, tokens, num_heads, counts).programs for each in tried))

    def residents(self, resident: int) -> range:
        """Programs a multiprocessor that are tried, where so many are expected to fit one: up to two rounds of them."""
        return range(1, max(LEAST_RESIDENT, 2 * resident) + 1)

    def smallest(self, tile: Tile, counts: Sequence[int]) -> list[Any]:
        """A schedule of one request and row with shared-out keys, so that the merge also runs."""
        return [self.schedule(tile, 1, 1, 1, counts)]


def _plain(tile: Any) -> Tile:
    """A tile of a package's table, without its programs a multiprocessor."""
    return Tile(**{field.name: getattr(tile, field.name) for field in fields(Tile)})
