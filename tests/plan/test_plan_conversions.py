"""How writers divide by scales, which decides the text of a package's layout module."""

from __future__ import annotations

import pytest
from plan_specs import make_spec

from mlagen.plan import make_plan
from mlagen.plan.conversions import AmaxScale, Quotient, amax_scale_of, quotient_of, short_quotients

RULE = {"floor": 0.001953125, "floor_on": "scale"}
NVFP4 = {"kind": "scales", "of": "latent", "dtype": "e4m3", "tile": 16, "rounding": "nearest", "divisor": 6, **RULE}
FP8 = {"kind": "scales", "of": "latent", "dtype": "fp32", "tile": 128, "rounding": "nearest", "divisor": 448, **RULE}


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
