"""A second reader of caches: it takes the bytes from the fields that a spec lists, and asks `CacheLayout` for none.

Kernels and their reference get every offset from `CacheLayout`. If that were wrong, both would agree. Here a running
sum over the spec's fields gives the offsets again, and Python's numbers decode pages that the reference wrote.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from mlagen.layout import CacheLayout, indexer_layout_of, layouts_of
from mlagen.layout.codec import parts_of, write
from mlagen.verify.call.case import Case, CaseFailedError
from mlagen.verify.call.results import Figure

CHECK = "fields"
CACHES = {"cache": "the cache", "extra_cache": "the second cache", "indexer_cache": "the indexer's cache"}
BLOCK_SIZE, PAGES = 5, 2
TENSOR_SCALE = 0.4375
POISON = 0xA5
SIZES = {"bf16": 16, "fp16": 16, "fp32": 32, "e4m3": 8, "e4m3fnuz": 8, "e2m1": 4, "ue8m0": 8}  # bits
# Bits of exponent and of mantissa, and the exponent's bias.
SMALL = {"e4m3": (4, 3, 7), "e4m3fnuz": (4, 3, 8), "e2m1": (2, 1, 1)}
LARGEST = {"e4m3": 448.0, "e4m3fnuz": 240.0, "e2m1": 6.0}


@dataclass(frozen=True)
class FieldsCase(Case):
    """A second reader takes the bytes of a cache from the spec; `cache` is a key of CACHES."""

    cache: str


class Place(NamedTuple):
    """A field of a spec's layout: its entry, the plane of its row, and the byte of that row at which it begins."""

    entry: Mapping[str, Any]
    plane: int
    first: int


class Described(NamedTuple):
    """A cache as its spec describes it.

    Attributes:
        places: each field with its place.
        rows: bytes of a token's row in each plane.
        page: bytes of a page of BLOCK_SIZE tokens.
        columns: by kind of field, the first column and how many there are.
        rule: fields that replace those of the scales' rule.
    """

    places: list[Place]
    rows: list[int]
    page: int
    columns: dict[str, tuple[int, int]]
    rule: Mapping[str, Any]


def cases(spec: Mapping[str, Any]) -> Iterator[FieldsCase]:
    """One for each cache of a package."""
    promise = "each field lies where the spec lists it, behind the one before it"
    for cache, title in CACHES.items():
        if spec.get(cache):
            yield FieldsCase(f"layout: {title}: fields", promise, cache=cache, check=CHECK)


def describe(spec: Mapping[str, Any], cache: str) -> Described:
    """Where the fields of a cache are, from nothing but `SPEC["spec"]`."""
    model, layout = spec["model"], spec[cache]["layout"]
    latent, rope = model["kv_lora_rank"], model["qk_rope_head_dim"]
    if cache == "indexer_cache":
        latent, rope = spec["indexer"]["head_dim"], 0
    columns = {"latent": (0, latent), "rope": (latent, rope), "row": (0, latent + rope)}
    places, rows, tensors = [], [0, 0], [None]
    for number, key in enumerate(("fields", "planar_fields")):
        for entry in layout.get(key) or ():
            plane = number
            if entry.get("tensor") and _nbytes(entry, columns):  # a page of each tensor, one behind the other
                tensors += [entry["tensor"]] if entry["tensor"] not in tensors else []
                plane = tensors.index(entry["tensor"])
                rows += [0] * (plane + 1 - len(rows))
            places.append(Place(entry, plane, rows[plane]))
            rows[plane] += _nbytes(entry, columns)
    multiple = layout.get("page_multiple", 1)
    multiple = rows[0] if multiple == "row" else multiple
    page = math.ceil(BLOCK_SIZE * sum(rows) / multiple) * multiple
    return Described(places, rows, page, columns, spec[cache].get("scale_rule") or {})


def _nbytes(entry: Mapping[str, Any], columns: Mapping[str, tuple[int, int]]) -> int:
    """Bytes of a field a token."""
    kind = entry["kind"]
    if kind == "pad":
        return int(entry["bytes"])
    if kind == "tensor_scale":
        return 0
    count = columns[kind][1] if kind in columns else math.ceil(columns[entry["of"]][1] / entry["tile"])
    return count * SIZES[entry["dtype"]] // 8


def value(row: bytes, dtype: str, number: int) -> float:
    """The value of that number in a run of values."""
    nbytes = SIZES[dtype] // 8
    part = row[number * nbytes : (number + 1) * nbytes]
    if dtype in ("bf16", "fp32"):
        return float(struct.unpack("<f", bytes(4 - nbytes) + part)[0])
    if dtype == "fp16":
        return float(struct.unpack("<e", part)[0])
    if dtype == "ue8m0":
        return 2.0 ** (part[0] - 127)
    code = row[number // 2] >> 4 * (number % 2) & 15 if dtype == "e2m1" else part[0]
    exponent_bits, mantissa_bits, bias = SMALL[dtype]
    sign, rest = divmod(code, 1 << exponent_bits + mantissa_bits)
    exponent, mantissa = divmod(rest, 1 << mantissa_bits)
    significand = mantissa / (1 << mantissa_bits) + (1 if exponent else 0)
    return (-1.0 if sign else 1.0) * significand * 2.0 ** (max(exponent, 1) - bias)


def rows_of(tokens: int, columns: int) -> list[list[float]]:
    """Rows with scales that differ between tiles of any width; every dtype of a model holds the values."""

    def drawn(*places: int) -> int:
        found = 1
        for place in places:
            found = (found * 1000003 + place) * 2654435761 % 2**32
            found ^= found >> 15
        return found

    rows = []
    for token in range(tokens):
        row = []
        for column in range(columns):
            own = drawn(token, column)
            exponent = 2 * (drawn(token, column // 128, 1) % 4) + drawn(token, column // 16, 2) % 4 + own % 2 - 4
            row.append((-1) ** (own >> 3 & 1) * (1 + (own >> 5 & 3) / 4) * 2.0**exponent)
        rows.append(row)
    return rows


class _Page:
    """A page, read as its spec describes it."""

    def __init__(self, described: Described, page: bytes) -> None:
        self.described, self.page = described, page

    def row(self, place: Place, token: int) -> bytes:
        """The stored bytes of a token from a field's first byte on."""
        rows = self.described.rows
        begin = BLOCK_SIZE * sum(rows[: place.plane]) + token * rows[place.plane]
        return self.page[begin + place.first :]

    def check(self, token: int, row: list[float]) -> None:
        """Raises CaseFailedError unless a token's bytes hold its row."""
        for place in self.described.places:
            kind = place.entry["kind"]
            stored = self.row(place, token)
            if kind == "pad" and any(stored[: place.entry["bytes"]]):
                raise CaseFailedError(f"the pad at byte {place.first} of token {token} is not 0")
            if kind in self.described.columns:
                first, count = self.described.columns[kind]
                self._check_columns(place, token, stored, row[first : first + count])

    def _check_columns(self, place: Place, token: int, stored: bytes, row: list[float]) -> None:
        dtype = place.entry["dtype"]
        scales = self._scales(place, token, row)
        for column, (wanted, scale) in enumerate(zip(row, scales, strict=True)):
            found, allowed = value(stored, dtype, column) * scale, 0.0
            if dtype in SMALL:
                _, mantissa_bits, bias = SMALL[dtype]
                half_step = 2.0 ** -(mantissa_bits + 1) * max(abs(wanted), scale * 2.0 ** (1 - bias))
                allowed = 1.01 * half_step + max(0.0, abs(wanted) - LARGEST[dtype] * scale)  # beyond which it saturates
            if not abs(found - wanted) <= allowed:
                where = f"{place.entry['kind']} of token {token}, column {column}, at byte {place.first} of its row"
                raise CaseFailedError(f"{where}: the spec's fields say {found:g}; {wanted:g} was written")

    def _scales(self, place: Place, token: int, row: list[float]) -> list[float]:
        """The scale of each column of a field."""
        own = [one for one in self.described.places if one.entry.get("of") == place.entry["kind"]]
        if not own:
            return [1.0] * len(row)
        if own[0].entry["kind"] == "tensor_scale":
            return [TENSOR_SCALE] * len(row)
        entry, stored = own[0].entry, self.row(own[0], token)
        tile, interleave = entry["tile"], entry.get("interleave", 1)
        count = math.ceil(len(row) / tile)
        found = []
        for number in range(count):
            at = number % interleave * (count // interleave) + number // interleave
            scale = value(stored, entry["dtype"], at)
            expected = self._expected_scale(entry, max(map(abs, row[number * tile : (number + 1) * tile])))
            if not expected / 2 <= scale <= 2 * expected:
                where = f"scale {number} of {place.entry['kind']} of token {token}"
                raise CaseFailedError(f"{where}: the spec's fields say {scale:g}; takes about {expected:g}")
            found += [scale] * tile
        return found[: len(row)]

    def _expected_scale(self, entry: Mapping[str, Any], amax: float) -> float:
        """A scale before it is rounded."""
        names = ("divisor", "floor", "floor_on")
        divisor, floor, floor_on = (self.described.rule.get(name) or entry[name] for name in names)
        return float(max(amax, floor) / divisor if floor_on == "amax" else max(amax / divisor, floor))


def layout_of(spec: Mapping[str, Any], cache: str) -> CacheLayout:
    """The layout that kernels and reference go by."""
    found = dict(zip(CACHES, (*layouts_of(spec), indexer_layout_of(spec)), strict=True))[cache]
    assert found is not None
    return found


def check_fields(spec: Mapping[str, Any], cache: str) -> list[Figure]:
    """Reads pages that the reference wrote.

    Args:
        spec: `SPEC["spec"]` of a package.
        cache: a key of CACHES.

    Raises:
        CaseFailedError: a byte is elsewhere than the spec's fields say.
    """
    layout, described = layout_of(spec, cache), describe(spec, cache)
    rows = rows_of(PAGES * BLOCK_SIZE, described.columns["row"][1])
    sizes = (layout.page_bytes(BLOCK_SIZE), layout.row_bytes, layout.columns)
    wanted = (described.page, sum(described.rows), len(rows[0]))
    if sizes != wanted:
        raise CaseFailedError(f"bytes of a page, bytes of a row, columns: got {sizes}; the spec's fields make {wanted}")
    # A page more takes the bytes that go astray.
    pages = torch.full((PAGES + 1, described.page), POISON, dtype=torch.uint8)[:PAGES]
    write(
        layout,
        parts_of(layout, pages, BLOCK_SIZE),
        BLOCK_SIZE,
        torch.arange(len(rows)),
        torch.tensor(rows),
        TENSOR_SCALE,
    )
    for number, page in enumerate(pages):
        read = _Page(described, bytes(page.tolist()))
        for token in range(BLOCK_SIZE):
            read.check(token, rows[number * BLOCK_SIZE + token])
        if any(one != POISON for one in read.page[BLOCK_SIZE * sum(described.rows) :]):
            raise CaseFailedError("a byte behind the rows of a page was written")
    return []
