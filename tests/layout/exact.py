"""A second encoder and decoder, in numpy's float64 over tables of exact values, to check the codec against.

It shares no code with mlagen.layout.codec: values are found by a search in the table of a dtype's values.
"""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np

from mlagen.layout import CacheLayout, ScalesField


def _e4m3(bias: int, codes: int) -> np.ndarray:
    """Magnitudes of the codes, in order: four bits of exponent, three of mantissa."""
    values = []
    for code in range(codes):
        exponent, mantissa = code >> 3, code & 7
        power = Fraction(2) ** ((exponent or 1) - bias)
        values.append(float((Fraction(mantissa, 8) + (1 if exponent else 0)) * power))
    return np.array(values)


MAGNITUDES = {
    "e4m3": _e4m3(7, 127),  # the code 127 is NaN
    "e4m3fnuz": _e4m3(8, 128),
    "e2m1": np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]),
}
SIGN = {"e4m3": 128, "e4m3fnuz": 128, "e2m1": 8}
NAN = {"e4m3": 0x7F, "e4m3fnuz": 0x80, "e2m1": 7}
FLOATS = {"fp16": "<f2", "fp32": "<f4"}


def decoded(dtype: str) -> np.ndarray:
    """The value of each code of a dtype of eight bits or fewer, float64."""
    if dtype == "ue8m0":
        return np.array([math.ldexp(1.0, code - 127) for code in range(255)] + [math.inf])
    magnitudes = MAGNITUDES[dtype]
    if dtype == "e4m3":
        magnitudes = np.append(magnitudes, math.nan)
    values = np.concatenate([magnitudes, -magnitudes])
    if dtype == "e4m3fnuz":
        values[NAN[dtype]] = math.nan
    return values


def codes(x: np.ndarray, dtype: str) -> np.ndarray:
    """The code nearest each value, ties to the even one, the largest finite one beyond it."""
    table = MAGNITUDES[dtype]
    magnitude = np.minimum(np.abs(np.where(np.isnan(x), 0.0, x)), table[-1])
    middles = (table[:-1] + table[1:]) / 2
    below, above = np.searchsorted(middles, magnitude, "left"), np.searchsorted(middles, magnitude, "right")
    found = np.where(below % 2 == 0, below, above)  # they differ in a tie alone
    # fnuz has no negative zero.
    sign = (x < 0) & (found > 0) if dtype == "e4m3fnuz" else np.signbit(x)
    return np.where(np.isnan(x), NAN[dtype], found + sign * SIGN[dtype]).astype(np.uint8)


def fp32(x: np.ndarray | float) -> np.ndarray:
    """The nearest fp32 values, as float64; also of a quotient of two fp32 values: float64 has bits enough."""
    with np.errstate(over="ignore"):
        return np.asarray(x, np.float64).astype(np.float32).astype(np.float64)


def _ceil_log2(s: float) -> int:
    if math.isinf(s):
        return 128
    mantissa, exponent = math.frexp(s)
    return exponent - 1 if mantissa == 0.5 else exponent


def scale(amax: float, scales: ScalesField) -> tuple[bytes, float]:
    """A tile's scale: its bytes, and its value for readers."""
    rule = scales.rule
    floor, divisor = float(fp32(rule.floor)), float(fp32(rule.divisor))
    s = float(fp32(max(amax, floor) / divisor)) if rule.floor_on == "amax" else max(float(fp32(amax / divisor)), floor)
    if scales.dtype == "e4m3":
        code = int(codes(np.array(s), "e4m3"))
        return bytes([code]), float(decoded("e4m3")[code])
    if scales.dtype == "ue8m0":
        code = min(max(_ceil_log2(s) + 127, 0), 255)
        return bytes([code]), float(decoded("ue8m0")[code])
    if rule.rounding == "power_of_two":
        s = 2.0 ** _ceil_log2(s)
    value = fp32(s).astype(np.float32)
    return value.tobytes(), float(value)


def stored(x: np.ndarray, dtype: str) -> np.ndarray:
    """Bytes of values [T, N] without a scale."""
    if dtype == "e2m1":
        found = codes(x, dtype)
        return found[:, ::2] | found[:, 1::2] << 4
    if dtype in MAGNITUDES:
        return codes(x, dtype)
    assert dtype in FLOATS
    with np.errstate(over="ignore"):
        return np.ascontiguousarray(x.astype(FLOATS[dtype])).view(np.uint8)


def encode(layout: CacheLayout, rows: np.ndarray, tensor_scale: float | None = None) -> list[np.ndarray]:
    """Planes of rows [T, columns] float64 that bf16 or fp16 holds; bf16 fields are taken from the rows' upper bits."""
    planes = [np.zeros((len(rows), nbytes), np.uint8) for nbytes in layout.plane_bytes]
    for field in layout.data:
        x = rows[:, field.first_column : field.first_column + field.count]
        scales = layout.scales_of(field)
        if field.tensor_scale:
            assert tensor_scale is not None
            x = fp32(x / float(fp32(tensor_scale)))
        if scales:
            divided = np.empty_like(x)
            for number in range(scales.count):
                tile = slice(number * scales.tile, (number + 1) * scales.tile)
                at = scales.offset + scales.position(number) * scales.itemsize
                for row in range(len(rows)):
                    magnitudes = np.abs(x[row, tile])
                    amax = max((float(one) for one in magnitudes if not math.isnan(one)), default=0.0)
                    nbytes, value = scale(amax, scales)
                    planes[scales.plane][row, at : at + scales.itemsize] = list(nbytes)
                    with np.errstate(invalid="ignore"):
                        divided[row, tile] = fp32(x[row, tile] / value)
            x = divided
        if field.dtype == "bf16":
            found = np.ascontiguousarray(x.astype("<f4")).view(np.uint8).reshape(len(x), -1, 4)[:, :, 2:]
            found = found.reshape(len(x), -1)
        else:
            found = stored(x, field.dtype)
        planes[field.plane][:, field.offset : field.offset + field.nbytes] = found
    return planes
