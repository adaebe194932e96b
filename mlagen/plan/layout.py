"""CacheLayout: where every byte of a cached token is. Writers, attention loads, the reference and the docs ask it."""

from __future__ import annotations

from dataclasses import dataclass

from mlagen.spec import Spec

ITEMSIZE = {"bf16": 2, "fp16": 2, "fp32": 4}


@dataclass(frozen=True)
class CacheField:
    """One field of a cached token's row.

    Attributes:
        name: `latent` or `rope`.
        dtype: storage dtype.
        lanes: values a token.
        first_lane: lane of the KV row at which the field begins.
        offset: byte of the row at which the field begins.
    """

    name: str
    dtype: str
    lanes: int
    first_lane: int
    offset: int

    @property
    def nbytes(self) -> int:
        """Bytes of the field in one row."""
        return self.lanes * ITEMSIZE[self.dtype]


@dataclass(frozen=True)
class CacheLayout:
    """Byte layout of a KV cache: row p of a page lies at `page + p * row_bytes`.

    Attributes:
        name: the layout's name in specs and fingerprints.
        fields: the fields of a row in byte order.
        block_size: tokens a page as attention addresses it; 1 where rows are flat.
    """

    name: str
    fields: tuple[CacheField, ...]
    block_size: int

    @property
    def row_bytes(self) -> int:
        """Bytes of one token's row."""
        return sum(field.nbytes for field in self.fields)

    @property
    def lanes(self) -> int:
        """Lanes of one token's row (d_qk)."""
        return sum(field.lanes for field in self.fields)

    @property
    def byte_table(self) -> tuple[str, ...]:
        """One line a field, `[0, 1024)  latent  512 x bf16`, for docstrings and docs."""
        spans = [f"[{field.offset}, {field.offset + field.nbytes})" for field in self.fields]
        width = max(len(span) for span in spans)
        return tuple(
            f"{span:<{width}}  {field.name:<6}  {field.lanes} x {field.dtype}"
            for span, field in zip(spans, self.fields, strict=True)
        )


def make_layout(spec: Spec) -> CacheLayout:
    """The cache layout a spec names."""
    dims = spec.model
    fields: list[CacheField] = []
    lane = offset = 0
    for name, lanes in (("latent", dims.kv_lora_rank), ("rope", dims.qk_rope_head_dim)):
        if lanes:
            fields.append(CacheField(name, spec.cache.layout, lanes, lane, offset))
            lane += lanes
            offset += fields[-1].nbytes
    return CacheLayout(spec.cache.layout, tuple(fields), spec.cache.block_size or 1)
