"""How writers divide by scales, which decides the text of a package's layout module."""

from __future__ import annotations

import math

import pytest
import torch
from plan_specs import make_spec

from mlagen.plan import make_plan
from mlagen.plan.conversions import (
    AmaxScale,
    Quotient,
    amax_scale_of,
    by_reciprocal,
    quotient_of,
    short_quotients,
)

RULE = {"floor": 0.001953125, "floor_on": "scale"}
NVFP4 = {"kind": "scales", "of": "latent", "dtype": "e4m3", "tile": 16, "rounding": "nearest", "divisor": 6, **RULE}
FP8 = {"kind": "scales", "of": "latent", "dtype": "fp32", "tile": 128, "rounding": "nearest", "divisor": 448, **RULE}
UP = {"rounding": "power_of_two"}
ON_AMAX = {**UP, "floor_on": "amax"}


@pytest.mark.parametrize(
    ("dtype", "scales", "quotient", "amax", "short"),
    [
        ("e4m3", FP8, Quotient.EXACT, AmaxScale.DIVIDED, False),
        ("e4m3", FP8 | {"rounding": "power_of_two"}, Quotient.POWER_OF_TWO, AmaxScale.DIVIDED, False),
        ("e4m3", FP8 | {"floor_on": "amax"}, Quotient.EXACT, AmaxScale.FLOOR_ON_AMAX, False),
        ("e2m1", NVFP4, Quotient.DOUBLED, AmaxScale.SHORT, True),
        ("e2m1", NVFP4 | {"divisor": 5.99}, Quotient.DOUBLED, AmaxScale.DIVIDED, True),
        ("e2m1", NVFP4 | {"dtype": "fp32"}, Quotient.DIVIDED, AmaxScale.DIVIDED, False),
    ],
)
def test_a_writer_divides_as_dtypes_and_rules_ask(dtype, scales, quotient, amax, short):
    fields = ({"kind": "latent", "dtype": dtype}, scales, {"kind": "rope", "dtype": "bf16"})
    layout = make_plan(make_spec(cache={"layout": {"name": "some", "fields": fields}})).layout
    (latent, _), own = layout.data, layout.scales_of(layout.data[0])
    found = (quotient_of(layout, latent, own), amax_scale_of(layout, own), short_quotients(layout))
    assert found == (quotient, amax, short)


def scales_of(dtype, rule):
    fields = ({"kind": "latent", "dtype": dtype}, {**FP8, **rule}, {"kind": "rope", "dtype": "bf16"})
    layout = make_plan(make_spec(cache={"layout": {"name": "some", "fields": fields}})).layout
    return layout.scales_of(layout.data[0])


def next_powers(amax, rule, divide):
    """The powers of two that scales of these largest values are rounded up to; divide takes fp32 and the divisor."""
    floor = torch.tensor(rule.floor, dtype=torch.float32)
    if rule.floor_on == "amax":
        scales = divide(amax.maximum(floor), rule.divisor)
    else:
        scales = divide(amax, rule.divisor).maximum(floor)
    return (scales.view(torch.int32) + 0x7FFFFF) >> 23


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "rule",
    [
        *({**UP, "divisor": divisor, "floor": floor} for divisor in (448, 240, 6, 7, 1) for floor in (2.0**-126, 1e-4)),
        *({**ON_AMAX, "divisor": divisor, "floor": 1e-4} for divisor in (448, 240, 6)),
        {**ON_AMAX, "divisor": 6, "floor": 6 * 2.0**-126},
        {**ON_AMAX, "divisor": 448, "floor": 448 * 2.0**-20},
    ],
)
def test_the_reciprocal_gives_the_same_power_of_two_of_every_value(dtype, rule):
    scales = scales_of("e2m1" if rule["divisor"] == 6 else "e4m3", rule)
    assert by_reciprocal(scales)
    amax = torch.arange(1 << 15).to(torch.int16).view(dtype)
    amax = amax[amax.isfinite()].float()
    wanted = next_powers(amax, scales.rule, lambda x, divisor: x / divisor)
    assert torch.equal(next_powers(amax, scales.rule, lambda x, divisor: x * (1.0 / divisor)), wanted)


@pytest.mark.parametrize(
    "rule",
    [
        {"rounding": "nearest"},
        {**UP, "divisor": 5.99},  # more bits than a quotient can have and be far from a power of two
        {**ON_AMAX, "floor": 448 * math.nextafter(2.0**-10, 1)},
    ],
)
def test_elsewhere_scales_are_divided(rule):
    assert not by_reciprocal(scales_of("e4m3", rule))
