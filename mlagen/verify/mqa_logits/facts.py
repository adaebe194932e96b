"""Facts of a package's spec about the indexer, as verification reads it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from mlagen.layout import CacheLayout, DataField, ScalesField, indexer_layout_of
from mlagen.layout.codec import decode, encode

FLAT, FLAT_PAIR = "fp8_mqa_logits", "fp8_fp4_mqa_logits"
PAGED, PAGED_PAIR = "fp8_paged_mqa_logits", "fp8_fp4_paged_mqa_logits"
SCHEDULE = "get_paged_mqa_logits_metadata"
WRAPPERS = (FLAT, FLAT_PAIR, PAGED, PAGED_PAIR, SCHEDULE)
E2M1_SIGNS, UE8M0_ONE = (10, 0, 2), 127  # codes of -1, 0 and 1, and the byte of 1
DTYPES = {"e4m3": torch.float8_e4m3fn, "e4m3fnuz": torch.float8_e4m3fnuz}


@dataclass(frozen=True)
class LogitsFacts:
    """The indexer of a package.

    Attributes:
        heads, columns: of its query.
        layout: bytes of a key.
        wrappers: those of the family that the package has.
    """

    heads: int
    columns: int
    layout: CacheLayout
    wrappers: tuple[str, ...]

    @classmethod
    def of(cls, spec: Mapping[str, Any]) -> LogitsFacts | None:
        """The facts of `SPEC["spec"]`; None where no wrapper is the family's."""
        wrappers = tuple(name for name in WRAPPERS if name in spec["wrappers"])
        layout = indexer_layout_of(spec)
        if not wrappers or layout is None:
            return None
        return cls(spec["indexer"]["num_heads"], spec["indexer"]["head_dim"], layout, wrappers)

    @property
    def keys(self) -> DataField:
        """The field of a key's columns."""
        return self.layout.data[0]

    @property
    def scales(self) -> ScalesField:
        """The field of a key's scales."""
        found = self.layout.scales_of(self.keys)
        assert found is not None
        return found

    @property
    def packed(self) -> bool:
        """Whether a byte holds two columns, and a head of the query has scales as a key has."""
        return self.keys.dtype == "e2m1"


@dataclass(frozen=True)
class Rows:
    """Rows as they are stored.

    Attributes:
        values, scales: uint8 [N, bytes].
    """

    values: torch.Tensor
    scales: torch.Tensor

    @classmethod
    def random(cls, facts: LogitsFacts, count: int, contents: str, generator: torch.Generator) -> Rows:
        """Rows of contents "normal", "codes": of any finite bytes, and scales far apart, or "whole".

        The last are of 0, 1 and -1 times a power of two, so that every sum of a logit is exact, and many are equal.
        """
        keys, scales = facts.keys, facts.scales
        if contents == "normal":
            planes = encode(facts.layout, torch.randn(count, facts.columns, generator=generator))
            values = planes[keys.plane][:, keys.offset : keys.offset + keys.nbytes]
            return cls(values, planes[scales.plane][:, scales.offset : scales.offset + scales.nbytes].contiguous())
        if contents == "whole":
            return cls._whole(facts, count, generator)
        values = torch.randint(0, 256, (count, keys.nbytes), generator=generator, dtype=torch.uint8)
        if facts.packed:
            exponents = torch.randint(100, 154, (count, scales.count), generator=generator)
            return cls(values, exponents.to(torch.uint8))
        values[values.view(DTYPES[keys.dtype]).float().isnan()] = 0
        powers = torch.randint(-20, 20, (count, 1), generator=generator).float()
        return cls(values, torch.ldexp(1 + torch.rand(count, 1, generator=generator), powers).view(torch.uint8))

    @classmethod
    def _whole(cls, facts: LogitsFacts, count: int, generator: torch.Generator) -> Rows:
        keys, scales = facts.keys, facts.scales
        powers = torch.randint(-1, 2, (count, scales.count), generator=generator)
        signs = torch.randint(-1, 2, (count, facts.columns), generator=generator)
        if facts.packed:
            codes = torch.tensor(E2M1_SIGNS, dtype=torch.uint8)[signs + 1]
            return cls(codes[:, ::2] | codes[:, 1::2] << 4, (powers + UE8M0_ONE).to(torch.uint8))
        return cls(signs.float().to(DTYPES[keys.dtype]).view(torch.uint8), torch.exp2(powers.float()).view(torch.uint8))

    def decoded(self, facts: LogitsFacts) -> tuple[torch.Tensor, torch.Tensor]:
        """Columns f64 [N, columns], and the factors of logits, f64 [N]."""
        keys, scales = facts.keys, facts.scales
        if not facts.packed:
            values = self.values.view(DTYPES[keys.dtype]).double()
            return values, self.scales.contiguous().view(torch.float32)[:, 0].double()
        planes = tuple(self.values.new_zeros(len(self.values), width) for width in facts.layout.plane_bytes)
        planes[keys.plane][:, keys.offset : keys.offset + keys.nbytes] = self.values
        planes[scales.plane][:, scales.offset : scales.offset + scales.nbytes] = self.scales
        return decode(facts.layout, planes).double(), torch.ones(
            len(self.values), dtype=torch.float64, device=self.values.device
        )

    def poison(self, facts: LogitsFacts, rows: torch.Tensor) -> None:
        """Makes rows NaN, or as large as they may be where their dtype has none, in place."""
        self.values[rows] = poison_byte(facts)
        self.scales[rows] = 0xFF


def poison_byte(facts: LogitsFacts) -> int:
    """A byte that is NaN as a column, or large; as those of a scale it is NaN or infinite, or large."""
    return 0x80 if facts.keys.dtype == "e4m3fnuz" else 0xFF
