"""Reference of pools of keys, in plain torch, pool by pool and token by token."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from mlagen.layout import CacheLayout, PadField, ScalesField
from mlagen.layout.codec import decode, encode
from mlagen.verify.call.case import CaseFailedError
from mlagen.verify.kpool.side import COLUMNS
from mlagen.verify.paged.rope import MOST_OFF

FEW_OFF = 4  # values that may be off in however few rows
ULP = 2.0**-7  # of bf16, relative: by how much a value before quantisation may be off
MEAN_OFF = 2.0**-18  # of its terms' sizes: how far a mean in fp32 may be off, with approximate exponentials
E4M3_STEP, SUBNORMAL_STEP = 2.0**-3, 2.0**-9  # of e4m3: relative, and absolute below its normal numbers


def hadamard() -> torch.Tensor:
    """The Hadamard matrix over its norm, float64 [128, 128]: each block is [[A, A], [A, -A]]."""
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < COLUMNS:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix.div(COLUMNS**0.5)


def transformed(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Rows [N, 128] times the Hadamard matrix, rounded to the model's dtype."""
    return (rows.double() @ hadamard()).to(dtype)


class Pooled(NamedTuple):
    """The key of a pool before it is quantised.

    Attributes:
        row: [128], in the model's dtype.
        turned: by how much each column may be off, since fp32 rounds a mean next to a border to the other side.
    """

    row: torch.Tensor
    turned: float


def pooled(k: torch.Tensor, score: torch.Tensor, ape: torch.Tensor, dtype: torch.dtype) -> Pooled:
    """The key of a pool's tokens [pool_size, 128]."""
    weights = torch.softmax((score.float() + ape).double(), 0)
    mean = (weights * k.double()).sum(0)
    off = MEAN_OFF * (weights * k.double().abs()).sum(0)
    apart = (mean + off).to(dtype).double() - (mean - off).to(dtype).double()
    return Pooled(transformed(mean.to(dtype)[None], dtype)[0], float(apart.abs().nan_to_num().sum() / COLUMNS**0.5))


def seeded_tail(tail: torch.Tensor, key: torch.Tensor, score: torch.Tensor, tslot: list[int], kpool: int) -> None:
    """Copies each request's last tokens into its ring, in place. tail: [blocks, 2, ring, 128]"""
    ring = tail.shape[2]
    for token, slot in enumerate(tslot):
        if not 0 <= slot < len(tail) * ring:
            continue
        ahead = tslot[token + kpool] if token + kpool < len(tslot) else -1
        if ahead // ring != slot // ring:
            tail[slot // ring, 0, slot % ring] = key[token]
            tail[slot // ring, 1, slot % ring] = score[token]


@dataclass(frozen=True)
class Step:
    """The tensors of a decode step, on the CPU.

    Attributes:
        key, score: [requests, next_n, 128].
        ape: fp32 [pool_size, 128].
        tail_slots, slots, positions: of the tokens, by request.
    """

    key: torch.Tensor
    score: torch.Tensor
    ape: torch.Tensor
    tail_slots: list[list[int]]
    slots: list[list[int]]
    positions: list[list[int]]

    def run(self, tail: torch.Tensor, num_slots: int) -> Iterator[tuple[int, Pooled]]:
        """Change the tails token by token; yield the slot and the key of each pool that is completed."""
        ring, size = tail.shape[2], len(self.ape)
        for request, positions in enumerate(self.positions):
            for token, position in enumerate(positions):
                tail_slot, slot = self.tail_slots[request][token], self.slots[request][token]
                if not (0 <= position < 2**31 and 0 <= tail_slot < len(tail) * ring):
                    continue
                entries = tail[tail_slot // ring]
                # The ring may be a pool: the token's entry is the one that the pool needs no more.
                entries[0, position % ring] = self.key[request, token]
                entries[1, position % ring] = self.score[request, token]
                if 0 <= slot < num_slots and (position + 1) % size == 0:
                    places = [(position + 1 - size + number) % ring for number in range(size)]
                    yield slot, pooled(entries[0, places], entries[1, places], self.ape, tail.dtype)


def expanded(ids: torch.Tensor, lens: torch.Tensor, size: int) -> torch.Tensor:
    """Tokens i32 [rows, pools * size + size - 1] of picked pools, then those behind the last complete pool."""
    rows, picked = ids.shape
    found = torch.full((rows, (picked + 1) * size - 1), -1, dtype=torch.int64)
    for row, length in enumerate(lens.clamp(min=0).tolist()):
        there = (ids[row] >= 0) & (ids[row] < length // size)
        first = torch.where(there, ids[row], 0).long() * size
        tokens = first[:, None] + torch.arange(size)
        found[row, : picked * size] = torch.where(there[:, None], tokens, -1).flatten()
        tail = torch.arange(length // size * size, length)
        found[row, picked * size : picked * size + len(tail)] = tail
    return found.int()


def check_rows(layout: CacheLayout, got: list[torch.Tensor], rows: torch.Tensor, turned: torch.Tensor) -> None:
    """Raises CaseFailedError unless bytes by plane are those of rows [N, 128], but for few neighbouring codes.

    turned: [N], see `Pooled`
    """
    (values,) = layout.data
    scales = layout.scales_of(values)
    assert isinstance(scales, ScalesField)
    want = encode(layout, rows)
    for field in layout.fields:
        part = slice(field.offset, field.offset + field.nbytes)
        if isinstance(field, PadField) and not torch.equal(got[field.plane][:, part], want[field.plane][:, part]):
            raise CaseFailedError(f"{field.name} differs from the reference's")
    place = slice(scales.offset, scales.offset + scales.nbytes)
    one, other = (each[scales.plane][:, place].contiguous().view(torch.float32)[:, 0] for each in (got, want))
    amax = rows.float().abs().amax(1) if len(rows) else torch.zeros(0)
    if scales.rule.rounding == "power_of_two":
        # The largest column may be off by a last bit, which turns its scale only if a power lies in between.
        low, high = (torch.log2((amax + sign * (ULP * amax + turned)) / scales.rule.divisor).ceil() for sign in (-1, 1))
        border = low != high
        wrong = (one != other) & ~(border & ((one == 2 * other) | (other == 2 * one)))
    else:
        wrong = ~((one - other).abs() <= ULP * other + turned / scales.rule.divisor)
    if bool(wrong.any()):
        raise CaseFailedError(f"{int(wrong.sum())} of {len(wrong)} scales differ from the reference's")
    same = (one == other)[:, None]
    have, need = decode(layout, tuple(got)), decode(layout, want)
    step = torch.maximum(need.abs() * E4M3_STEP, torch.maximum(one, other)[:, None] * SUBNORMAL_STEP)
    step = torch.where(same, step, step + ULP * need.abs()) + turned[:, None]
    off = (have != need) & ~(have.isnan() & need.isnan())
    far = off & ~((have - need).abs() <= step)
    near = off & same & (turned == 0)[:, None]
    if bool(far.any()) or int(near.sum()) > max(FEW_OFF, MOST_OFF * near.numel()):
        raise CaseFailedError(f"{int(off.sum())} of {off.numel()} columns differ from the reference's")
