"""How a cache writer computes a tile's scale from its values, and the stored codes from values and scale."""

from __future__ import annotations

import math
from enum import StrEnum

from mlagen.layout import CacheLayout, DataField, ScalesField

EIGHT_BIT_FLOATS = ("e4m3", "e4m3fnuz")
SHORT_BITS = 8  # of a mantissa
ROUNDED_OFF = 1e-6  # more than two roundings in fp32 turn a power of two by


class Quotient(StrEnum):
    """How values are divided by their scale."""

    POWER_OF_TWO = "power of two"  # a product with its reciprocal, which is exact
    EXACT = "exact"  # rounded as a division, by a product with the reciprocal and a correction
    DOUBLED = "doubled"  # twice the quotient, of few bits, which is as much as e2m1 tells apart
    DIVIDED = "divided"


class AmaxScale(StrEnum):
    """How a tile's largest value becomes its scale, before that is rounded."""

    FLOOR_ON_AMAX = "floor on amax"
    SHORT = "short"  # few bits, by a product with the divisor's reciprocal
    DIVIDED = "divided"


def short_quotients(layout: CacheLayout) -> bool:
    """Return whether values become e2m1 by quotients of few bits, not by exact ones."""
    fields = [field for field in layout.data if field.dtype == "e2m1"]
    scales = [layout.scales_of(field) for field in fields]
    long = any(one and one.dtype == "fp32" and one.rule.rounding == "nearest" for one in scales)
    return bool(fields) and not long and not any(field.tensor_scale for field in fields)


def quotient_of(layout: CacheLayout, field: DataField, scales: ScalesField) -> Quotient:
    """How a field's values are divided by these scales of theirs."""
    if scales.rule.rounding == "power_of_two":
        return Quotient.POWER_OF_TWO
    if scales.dtype == "fp32" and field.dtype in EIGHT_BIT_FLOATS:
        return Quotient.EXACT
    if scales.dtype == "e4m3" and field.dtype == "e2m1" and short_quotients(layout):
        return Quotient.DOUBLED
    return Quotient.DIVIDED


def amax_scale_of(layout: CacheLayout, scales: ScalesField) -> AmaxScale:
    """How a tile's largest value becomes one of these scales."""
    if scales.rule.floor_on == "amax":
        return AmaxScale.FLOOR_ON_AMAX
    if scales.dtype == "e4m3" and _is_short(scales.rule.divisor) and short_quotients(layout):
        return AmaxScale.SHORT
    return AmaxScale.DIVIDED


def by_reciprocal(scales: ScalesField) -> bool:
    """Whether amax times the divisor's reciprocal rounds up to the same power of two as their quotient.

    amax and the divisor have so few bits that no quotient of theirs is near a power of two without being one, and then
    the product is it or just below it. The floor, a constant, may have more bits.
    """
    rule = scales.rule
    if rule.rounding != "power_of_two" or not _is_short(rule.divisor):
        return False
    exponent = math.log2(rule.floor / rule.divisor)
    return rule.floor_on != "amax" or _is_short(rule.floor) or abs(exponent - round(exponent)) > ROUNDED_OFF


def _is_short(number: float) -> bool:
    """Whether few bits hold its mantissa."""
    mantissa, _ = math.frexp(number)
    return (mantissa * (1 << SHORT_BITS)).is_integer()
