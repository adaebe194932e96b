"""The tensors of calls around pools of keys, and their expected values after them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from mlagen.layout.codec import planes_of
from mlagen.verify.call import family
from mlagen.verify.call.case import CaseFailedError
from mlagen.verify.call.memory import GARBAGE, LAYOUTS, NAN, Placed, bits, place, place_vector, seeded
from mlagen.verify.call.patterns import INT32, INT64
from mlagen.verify.call.results import Figure
from mlagen.verify.kpool.cases import ExpandCase, PoolsCase, RowsCase, SeedCase, UpdateCase
from mlagen.verify.kpool.reference import Pooled, Step, check_rows, expanded, pooled, seeded_tail, transformed
from mlagen.verify.kpool.side import COLUMNS, KpoolSide
from mlagen.verify.paged.pages import CacheMemory, draw_slots, random_pages

WRITTEN = ("kv_cache", "tail_kv_cache")
Keys = dict[int, Pooled]  # by their slots


@dataclass
class KpoolInputs(family.Inputs):
    """A call.

    Attributes:
        side: the cache's; None in a package without.
        case: the case.
        arguments: by name, in the order of the wrapper's signature.
        memory: the cache, if the call writes one.
        before: its bytes before the call; of a far cache nothing.
        tail: the tails in their buffer, if the call writes them.
    """

    side: KpoolSide | None
    case: Any
    arguments: dict[str, Any]
    memory: CacheMemory | None = None
    before: torch.Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.uint8))
    tail: Placed | None = None

    def reset(self) -> None:
        """Put back the cache and the tails as they were before any call."""
        if self.memory is not None and len(self.before):
            self.memory.buffer.copy_(self.before)
        if self.tail is not None and self.tail.before is not None:
            self.tail.buffer.copy_(self.tail.before)

    def renew(self) -> Iterator[None]:
        """The same call, then one with other keys or pools."""
        first = next(one for name, one in self.arguments.items() if name not in WRITTEN)
        for turned in (False, True):
            if turned:
                first.copy_(first.flip(0))
            self.reset()
            yield

    def here(self) -> dict[str, Any]:
        """The arguments on the CPU."""
        found = {name: one for name, one in self.arguments.items() if name != "kv_cache"}
        return {name: one.cpu() if isinstance(one, torch.Tensor) else one for name, one in found.items()}

    def compare(self, results: family.Results) -> list[Figure]:
        """Nothing. Raises CaseFailedError unless results, cache and tails are the reference's, and all else is kept."""
        match self.case:
            case RowsCase():
                self._compare_rows(results)
            case ExpandCase():
                given = self.here()
                want = expanded(given["pool_ids"], given["seq_lens"], given["pool_size"])
                if not torch.equal(results["indices"].cpu(), want):
                    wrong = int((results["indices"].cpu() != want).sum())
                    raise CaseFailedError(f"{wrong} of {want.numel()} indices differ from the reference's")
            case _:
                keys = self._run()
                if self.memory is not None:
                    self.check_keys(keys)
        return []

    def _compare_rows(self, results: family.Results) -> None:
        assert self.side is not None
        q, scales = results["q_fp8"], results["q_scale"]
        rows = transformed(self.arguments["q"].cpu(), self.side.dtype)
        if q.dtype != self.side.values_dtype or q.shape != rows.shape or scales.shape != (len(rows), 1):
            raise CaseFailedError(f"returned {q.dtype} {list(q.shape)} and {list(scales.shape)}")
        check_rows(self.side.query, [bits(q.cpu()), scales.cpu().view(torch.uint8)], rows, torch.zeros(len(rows)))

    def _run(self) -> Keys:
        """The keys that the call writes; checks the tails."""
        assert self.side is not None
        given = self.here()
        slots = 0 if self.memory is None else self.memory.pages * self.case.pages.block_size
        if isinstance(self.case, PoolsCase):
            mask = given.get("write_mask")
            return {
                slot: pooled(given["slot_k"][pool], given["slot_score"][pool], given["ape"], self.side.dtype)
                for pool, slot in enumerate(given["loc"].tolist())
                if 0 <= slot < slots and (mask is None or bool(mask[pool]))
            }
        assert self.tail is not None
        assert self.tail.before is not None
        view = self.tail.view
        want = self.tail.before.cpu().clone()
        tail = want.as_strided(view.shape, view.stride(), view.storage_offset())
        keys: Keys = {}
        if isinstance(self.case, SeedCase):
            seeded_tail(tail, given["key"], given["gate_score"], given["tslot"].tolist(), given["kpool"])
        else:
            names = ("tail_slot_mapping", "slot_mapping", "positions")
            step = Step(given["key"], given["slot_score"], given["ape"], *(given[name].tolist() for name in names))
            keys = dict(step.run(tail, slots))
        wrong = int((bits(self.tail.buffer.cpu()) != bits(want)).sum())
        if wrong:
            raise CaseFailedError(f"{wrong} elements of the tails or around them differ from the reference's")
        return keys

    def check_keys(self, keys: Keys) -> None:
        """Raises CaseFailedError unless the cache has these keys and else its bytes as they were."""
        assert self.side is not None
        assert self.memory is not None
        layout, size = self.side.layout, self.case.pages.block_size
        slots = torch.tensor([*keys], dtype=torch.int64)
        none = torch.zeros(0, COLUMNS, dtype=self.side.dtype)
        rows = torch.stack([key.row for key in keys.values()]) if keys else none
        turned = torch.tensor([key.turned for key in keys.values()], dtype=torch.float64)
        where = slots.to(self.memory.buffer.device)
        planes = planes_of(layout, self.memory.in_buffer(self.memory.buffer), size)
        got = [plane[where // size, where % size].cpu() for plane in planes]
        check_rows(layout, got, rows, turned)
        if self.case.pages.far:
            return
        expected = self.before.cpu().clone()
        for plane, found in zip(planes_of(layout, self.memory.in_buffer(expected), size), got, strict=True):
            plane[slots // size, slots % size] = found
        if not torch.equal(self.memory.buffer.cpu(), expected):
            raise CaseFailedError("bytes outside the keys that are written changed")


def _normal(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=generator)


def build_rows(case: RowsCase, side: KpoolSide, device: str, seed: int) -> KpoolInputs:
    """Rows of the query, the same for the same seed."""
    q = _normal(seeded(seed), case.rows, COLUMNS)
    match case.values:
        case "zero":
            q[::2] = 0.0
        case "tiny":
            q *= 2.0**-20
        case "large":
            q *= 2.0**9
        case "one":
            q = torch.eye(COLUMNS)[torch.arange(case.rows) % COLUMNS] * (1.0 + torch.arange(case.rows))[:, None]
        case "nan":
            q[::3, 5] = NAN
    placed = place(q.to(side.dtype).to(device), LAYOUTS[case.q], NAN)
    return KpoolInputs(side, case, {"q": placed.view}, placed={"q": placed})


def _scores(case: PoolsCase, generator: torch.Generator) -> torch.Tensor:
    shape = (case.pools, case.pool, COLUMNS)
    scores = 2 * _normal(generator, *shape)
    match case.scores:
        case "equal":
            scores.fill_(-7.0)
        case "large":
            scores = scores * 1e3 + (torch.randint(0, 3, shape, generator=generator) - 1.0) * 2.0**14
        case "infinite":
            scores[torch.rand(shape, generator=generator) < 0.4] = -torch.inf
            scores[:, : case.pool // 2, ::7] = -torch.inf
            scores[:, -1] = _normal(generator, case.pools, COLUMNS)
        case "no":
            scores[::2, :, 3] = -torch.inf
    return scores


def _cache(case: Any, side: KpoolSide, count: int, device: str, generator: torch.Generator) -> CacheMemory:
    pages = max(3, -(-2 * count // case.pages.block_size))
    return random_pages(side, case.pages, pages, device, generator)


def _before(case: Any, memory: CacheMemory) -> torch.Tensor:
    return memory.buffer[:0] if case.pages.far else memory.buffer.clone()


def build_pools(case: PoolsCase, side: KpoolSide, device: str, seed: int) -> KpoolInputs:
    """Tokens of pools and a cache, the same for the same seed."""
    generator = seeded(seed)
    memory = _cache(case, side, case.pools, device, generator)
    slots = draw_slots(case, case.pools, memory.pages * case.pages.block_size, generator)
    mask = torch.arange(case.pools) % 3 != 1 if case.mask == "mixed" else torch.zeros(case.pools, dtype=torch.bool)
    k = _normal(generator, case.pools, case.pool, COLUMNS)
    placed = {
        "slot_k": place(k.to(side.dtype).to(device), LAYOUTS[case.rows], NAN),
        "slot_score": place(_scores(case, generator).to(side.dtype).to(device), LAYOUTS[case.rows], NAN),
        "ape": place(_normal(generator, case.pool, COLUMNS).to(device), LAYOUTS[case.ape], NAN),
        "loc": place_vector(slots.to(device), 0),
        **({"write_mask": place_vector(mask.to(device), 1)} if case.mask else {}),
    }
    views = {name: one.view for name, one in placed.items()}
    masked = {"write_mask": views.pop("write_mask")} if case.mask else {}
    arguments = {"kv_cache": memory.tensor, **views, "pool_size": case.pool, **masked, "round_scale": side.rounds}
    return KpoolInputs(side, case, arguments, memory, _before(case, memory), placed=placed)


def _tail(blocks: int, ring: int, layout: str, side: KpoolSide, device: str, generator: torch.Generator) -> Placed:
    """Tails [blocks, 2, ring, 128] of random keys and scores."""
    values = _normal(generator, blocks, 2 * ring, COLUMNS).to(side.dtype).to(device)
    placed = place(values, LAYOUTS[layout], NAN)
    view = placed.view.view(blocks, 2, ring, COLUMNS)
    return Placed(view, placed.buffer, placed.before)


def build_seed(case: SeedCase, side: KpoolSide, device: str, seed: int) -> KpoolInputs:
    """Tokens of requests and their rings, the same for the same seed."""
    generator = seeded(seed)
    ring, blocks = case.pool * case.rings, len(case.requests) + 2
    block_of = torch.randperm(blocks, generator=generator).tolist()
    slots = [
        block_of[request] * ring + position % ring
        for request, (first, length) in enumerate(case.requests)
        for position in range(first, first + length)
    ]
    tslot = torch.tensor(slots, dtype=torch.int64)
    if case.slots != "own":
        # The last tokens of a request: with a gap, two of the others could have one place in the ring.
        late = [number >= -(-2 * length // 3) for _, length in case.requests for number in range(length)]
        largest = INT64 if case.wide else INT32
        end = blocks * ring
        wrong = [-1, largest.min, -ring] if case.slots == "negative" else [end, largest.max, end + 1]
        if case.wide and case.slots == "beyond":
            wrong += [2**32, 2**32 + ring]
        drawn = torch.tensor(wrong)[torch.arange(len(tslot)) % len(wrong)]
        tslot = torch.where(torch.tensor(late, dtype=torch.bool), drawn, tslot)
    tail = _tail(blocks, ring, case.tail, side, device, generator)
    rows = (len(slots) + case.further, COLUMNS)
    placed = {
        name: place(_normal(generator, *rows).to(side.dtype).to(device), LAYOUTS[case.rows], NAN)
        for name in ("key", "gate_score")
    }
    placed["tslot"] = place_vector((tslot if case.wide else tslot.int()).to(device), 0)
    views = {name: one.view for name, one in placed.items()}
    arguments = {"tail_kv_cache": tail.view, **views, "kpool": case.pool}
    return KpoolInputs(side, case, arguments, tail=tail, placed=placed)


def _garbage(case: UpdateCase, named: dict[str, torch.Tensor], limits: dict[str, int]) -> None:
    """Puts entries that name nothing among the integers."""
    if case.garbage == "padding":
        for number in range(1, len(case.first)):
            for tensor in named.values():
                tensor[number, case.next_n - number % case.next_n :] = -1
    elif case.garbage:
        tensor, wide = named[case.garbage].flatten(), case.garbage in case.wide
        wrong = [-1, INT32.min, -2] if case.garbage == "positions" else [limits[case.garbage], INT32.max, -1, INT32.min]
        if wide:
            wrong += [INT64.min, INT64.max, 2**32 + 1, 2**32 + case.pool - 1, -(2**32) + 3]
        some = tensor[::2] if case.garbage == "positions" else tensor[1::2]
        some.copy_(torch.tensor(wrong)[torch.arange(len(some)) % len(wrong)])
        named[case.garbage].copy_(tensor.view(named[case.garbage].shape))


def build_update(case: UpdateCase, side: KpoolSide, device: str, seed: int) -> KpoolInputs:
    """A decode step, its rings and its cache, the same for the same seed."""
    generator = seeded(seed)
    requests, ring = len(case.first), case.pool * case.rings
    blocks, shape = requests + 2, (requests, case.next_n)
    memory = _cache(case, side, requests * case.next_n, device, generator)
    end = memory.pages * case.pages.block_size
    positions = torch.tensor(case.first, dtype=torch.int64)[:, None] + torch.arange(case.next_n)
    block_of = torch.randperm(blocks, generator=generator)[:requests, None]
    few = min(end, 2 * requests * case.next_n + 64)
    slots = torch.randperm(few, generator=generator)[: requests * case.next_n].view(shape)
    slots = end - 1 - slots if case.pages.far else slots
    # A slot of a token that completes no pool is not looked at: engines have -1 there.
    slots = torch.where(((positions + 1) % case.pool == 0) | (slots % 3 > 0), slots, -1)
    named = {"tail": block_of * ring + positions % ring, "slots": slots, "positions": positions}
    _garbage(case, named, {"tail": blocks * ring, "slots": end})
    tail = _tail(blocks, ring, case.tail, side, device, generator)
    placed: dict[str, Placed] = {}
    for name in ("key", "slot_score"):
        placed[name] = place(_normal(generator, *shape, COLUMNS).to(side.dtype).to(device), LAYOUTS[case.rows], NAN)
    placed["ape"] = place(_normal(generator, case.pool, COLUMNS).to(device), LAYOUTS[case.rows], NAN)
    for name, values in named.items():
        dtype = torch.int64 if name in case.wide else torch.int32
        placed[name] = place(values.to(dtype).to(device), LAYOUTS[case.integers], 0)
    views = {name: one.view for name, one in placed.items()}
    arguments = {
        "kv_cache": memory.tensor,
        "tail_kv_cache": tail.view,
        "tail_slot_mapping": views["tail"],
        **{name: views[name] for name in ("key", "slot_score", "ape")},
        "slot_mapping": views["slots"],
        "positions": views["positions"],
        "pool_size": case.pool,
        "round_scale": side.rounds,
    }
    return KpoolInputs(side, case, arguments, memory, _before(case, memory), tail, placed=placed)


def build_expand(case: ExpandCase, side: KpoolSide | None, device: str, seed: int) -> KpoolInputs:
    """Picked pools and lengths, the same for the same seed."""
    generator = seeded(seed)
    lens = torch.randint(0, 40 * case.pool, (case.rows,), generator=generator)
    match case.lens:
        case "zero":
            lens[::2] = 0
        case "negative":
            lens[::2] = torch.tensor([-1, INT32.min, -case.pool])[torch.arange(len(lens[::2])) % 3]
        case "largest":
            lens[::2] = INT32.max - torch.arange(len(lens[::2]))
        case "short":
            lens %= case.pool
    complete = lens.clamp(min=0) // case.pool
    shape = (case.rows, case.picked)
    ids = (torch.rand(shape, generator=generator).double() * complete[:, None]).long()
    ids = torch.where(complete[:, None] > 0, ids, -1)
    ids[torch.rand(shape, generator=generator) < 0.125] = -1
    match case.ids:
        case "none":
            ids[:] = -1
        case "complete":
            ids = complete[:, None] - 1 - torch.arange(case.picked)
        case "outside":
            edges = torch.tensor([-2, INT32.min, INT32.max, GARBAGE, 2**29, 2**30])
            if case.wide:
                edges = torch.cat([edges, torch.tensor([INT64.min, INT64.max, 2**32, 2**32 + 1, -(2**32)])])
            wrong = edges[torch.randint(0, len(edges), shape, generator=generator)]
            wrong = torch.where(torch.rand(shape, generator=generator) < 0.3, complete[:, None], wrong)
            ids = torch.where(torch.rand(shape, generator=generator) < 0.5, wrong, ids)
    placed = {
        "pool_ids": place((ids if case.wide else ids.int()).to(device), LAYOUTS[case.memory], 0),
        "seq_lens": place_vector(lens.int().to(device), 9),
    }
    arguments = {**{name: one.view for name, one in placed.items()}, "pool_size": case.pool}
    return KpoolInputs(side, case, arguments, placed=placed)
