"""The output's quantisation: its reference against numbers by hand, its cases, and the cases of packages."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from broken import check_mutants
from rotation import by_share
from verify_specs import spec

from mlagen.emit import apply, compare, render
from mlagen.plan import make_plan
from mlagen.spec import Spec
from mlagen.verify import mismatches, verify_package
from mlagen.verify.call.invalid import RefusedCase
from mlagen.verify.checks.out_quant import padded, quantised, scale_exponents
from mlagen.verify.out_quant.cases import FP32, PACKED, WIDE, cases
from mlagen.verify.out_quant.family import OUT_QUANT
from mlagen.verify.out_quant.inputs import VALUES
from mlagen.verify.out_quant.side import WRAPPER

pytestmark = pytest.mark.interpreter

DIMS: dict[str, tuple[int, int, str]] = {
    "v4": (448, 64, "bf16"),
    "halves": (496, 16, "fp16"),
    "small": (122, 6, "bf16"),
}


def made(name: str, **parts: Any) -> Spec:
    """A spec with the wrapper and nothing else."""
    latent, rope, dtype = DIMS[name]
    model = {"num_heads": 4, "kv_lora_rank": latent, "qk_rope_head_dim": rope, "v_head_dim": latent + rope}
    return Spec.model_validate(
        {
            "name": name,
            "title": "Quantised output",
            "model": {**model, "rope": "gptj", "dtype": dtype},
            "wrappers": (WRAPPER,),
            "targets": ("sm80", "sm90", "gfx942"),
            **parts,
        }
    )


def write(parent: Path, name: str, **parts: Any) -> Path:
    apply(compare(render(make_plan(made(name, **parts))), parent / name))
    return parent / name


def check_cases(package: Path, **choices: Any) -> None:
    results = verify_package(package, workers=1, **choices)
    assert len(results) > 6
    assert [str(error) for error in mismatches(results)] == []


def exponent_of(*largest: float) -> int:
    row = torch.zeros(128)
    row[: len(largest)] = torch.tensor(largest)
    return int(scale_exponents(row)) - 127


def test_a_scale_is_the_next_power_of_two():
    assert [exponent_of(value) for value in (448.0, -448.0, 224.0, 1.0, 449.0)] == [0, 0, -1, -8, 1]
    above = float(torch.nextafter(torch.tensor(448.0), torch.tensor(math.inf)))
    below = float(torch.nextafter(torch.tensor(448.0), torch.tensor(0.0)))
    assert (exponent_of(above), exponent_of(below)) == (1, 0)
    assert exponent_of(0.0) == exponent_of(1e-45) == exponent_of(1e-10) == -42
    assert (exponent_of(math.inf), exponent_of(math.nan), exponent_of(math.nan, 448.0)) == (128, -42, 0)


def test_results_lie_as_vllms_do():
    rows = torch.arange(6, dtype=torch.float32)[:, None, None].expand(6, 4, 512) + 1.0
    for packed in (False, True):
        found = quantised(rows, 2, packed)
        columns = 2 if packed else 8
        assert (found.values.shape, found.values.stride()) == ((6, 2, 1024), (1024, 6144, 1))
        assert (found.scales.shape, found.scales.stride()) == ((6, 2, columns), (1, columns * 8, 8))
        whole = padded(found.scales)
        assert whole.shape == (8, 2, columns)
        assert bool((whole[:6] != 0).all())
        assert not bool(whole[6:].any())
    stored = torch.tensor([119, 120, 120, 121, 121, 121], dtype=torch.int32)  # 2^-8 holds 1, 2^-7 holds up to 3.5
    assert torch.equal(found.scales[:, 0, 0], stored * 0x01010101)


def test_values_round_to_even_and_keep_their_sign():
    row = torch.zeros(1, 1, 512)
    row[..., :8] = torch.tensor([448.0, 17.0, 19.0, -17.0, -0.0, 2.0**-10, 3 * 2.0**-10, math.nan])
    codes = quantised(row, 1, False).values.view(torch.uint8)[0, 0, :8].tolist()
    assert codes == [0x7E, 0x58, 0x5A, 0xD8, 0x80, 0x00, 0x02, 0x7F]


def test_an_infinity_leaves_zeros_beside_it():
    row = torch.ones(1, 1, 512)
    row[..., :3] = torch.tensor([math.inf, -1.0, -math.inf])
    found = quantised(row, 1, False)
    assert found.values.view(torch.uint8)[0, 0, :4].tolist() == [0x7F, 0x80, 0x7F, 0x00]
    assert found.scales[0, 0].tolist() == [math.inf, 2.0**-8, 2.0**-8, 2.0**-8]
    assert quantised(row, 1, True).scales.item() == 0x777777FF


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("name", DIMS)
def test_cases_have_names_and_patterns_of_their_own(name, device):
    found = cases(made(name).model_dump(mode="json"), device)
    names = [case.name for case in found]
    assert len(set(names)) == len(names)
    assert {type(case) for case in found} == {*OUT_QUANT.kinds, RefusedCase}
    calls = [case for case in found if not isinstance(case, RefusedCase)]
    assert {case.check for case in calls} == set(OUT_QUANT.checks) - ({"graph"} if device == "cpu" else set())
    assert {case.values for case in calls} == {*VALUES}
    assert {case.scales for case in calls} == ({FP32, PACKED, WIDE} if name != "small" else {FP32, WIDE})
    assert {0, 1, 3, 4} <= {case.tokens for case in calls}
    assert {"", "random", "zero", "garbage", "longer"} == {case.positions for case in calls}


def test_a_spec_without_the_wrapper_has_no_cases():
    assert cases(spec(wrappers=["flash_mla_sparse_fwd"]), "cpu") == []


@pytest.mark.parametrize("name", DIMS)
@by_share
def test_a_package_holds_its_cases(name, tmp_path, choose):
    # Of targets one without e4m3 and one that rounds to it.
    check_cases(write(tmp_path, name, ops=name == "v4"), targets=["sm80", "sm90"], choose=choose)


@pytest.mark.slow
@pytest.mark.mutants
def test_every_mutant_is_reported(tmp_path):
    check_mutants("out_quant_mutants.py", write(tmp_path, "v4"), tmp_path, more_than=30)
