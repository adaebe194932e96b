"""Attention that quantises its output: its reference, its cases, and packages run on them whole and broken."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from broken import check_mutants
from rotation import by_share
from verify_specs import spec

from mlagen.emit import apply, compare, render
from mlagen.errors import LimitError
from mlagen.plan import load_plan, make_plan
from mlagen.spec import Spec, load
from mlagen.verify import mismatches, verify_package
from mlagen.verify.call.facts import Facts
from mlagen.verify.checks import quantised
from mlagen.verify.checks.out_quant import LARGEST, LEAST, scale_exponents
from mlagen.verify.checks.out_quant import quantised as reference
from mlagen.verify.reference import Attention
from mlagen.verify.sparse_decode.cases import cases as cached_cases
from mlagen.verify.sparse_fwd.cases import cases as row_cases

pytestmark = pytest.mark.interpreter

SPECS = Path(__file__).parents[2] / "specs"
WRAPPERS = ("triton_mla_sparse_attention", "flash_mla_sparse_fwd", "flash_mla_with_kvcache")
# Words of four scales, groups of three heads, a sink and lengths that calls must have.
WORDS: dict[str, Any] = {
    "name": "words",
    "title": "Output in e4m3 with scales in words",
    "model": {
        "num_heads": 12,
        "kv_lora_rank": 448,
        "qk_rope_head_dim": 64,
        "rope": "gptj",
        "v_head_dim": 512,
        "dtype": "bf16",
    },
    "attention": {
        "kind": "sparse",
        "topk": 64,
        "attn_sink": "required",
        "topk_length": "required",
        "lse_base": "2",
        "out_rope": "inverse",
        "out_quant": {"heads_per_group": 3, "scales": "ue8m0"},
    },
    "cache": {"layout": "bf16"},
    "wrappers": WRAPPERS,
    "targets": ("sm80", "sm90", "gfx942"),
}


@pytest.fixture(scope="module")
def package(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("quantised") / "dsv4_flash_out_fp8"
    apply(compare(render(load_plan(SPECS / "dsv4_flash_out_fp8.yaml")), folder))
    return folder


def _attention(out: torch.Tensor) -> Attention:
    rows = torch.zeros(out.shape[:2], dtype=torch.float64)
    return Attention(out, rows, rows, 1e-3 * out.abs(), rows, out.abs())


def _facts(scales: str = "fp32") -> Facts:
    found = {**WORDS, "attention": {**WORDS["attention"], "out_quant": {"heads_per_group": 3, "scales": scales}}}
    return Facts.of(Spec.model_validate(found).model_dump(mode="json"))


def test_a_scale_is_the_least_power_of_two_that_reaches_the_largest_value():
    for largest in (448.0, 448.0001, 447.9999, 224.0, 1.0, 1.75, 1.7500001, LEAST, 0.0, 3e38):
        row = torch.zeros(1, 128)
        row[0, 77] = -largest
        exponent = int(scale_exponents(row)) - 127
        least = max(float(row.abs().max()), LEAST)
        assert least <= LARGEST * 2.0**exponent < 2 * least
        assert exponent == math.ceil(math.log2(least / LARGEST))


@pytest.mark.parametrize("scales", ["fp32", "ue8m0"])
def test_the_reference_of_a_quantised_output_holds_its_own_checks(scales):
    facts, generator = _facts(scales), torch.Generator().manual_seed(0)
    out = torch.randn(5, 6, 512, generator=generator) * torch.exp2(torch.randint(-9, 9, (5, 6, 1), generator=generator))
    out[0, 1] = 0.0
    found = reference(out, 3, packed=scales == "ue8m0")
    figures = quantised.errors(facts, found.values, found.scales, _attention(out.double()), facts.d_qk)
    assert [figure.name for figure in figures if figure.share > 0] == []
    assert quantised.named(facts, tuple(found))["out_scales"] is found.scales


@pytest.mark.parametrize("change", ["a code", "a scale", "every code by 3 %"])
def test_a_wrong_code_and_a_wrong_scale_are_reported(change):
    facts, out = _facts(), torch.randn(7, 6, 512, generator=torch.Generator().manual_seed(1))
    found = reference(out * 1.03 if change == "every code by 3 %" else out, 3, packed=False)
    if change == "a code":
        codes = found.values.view(torch.uint8)
        codes[3, 1, 77] ^= 2
    if change == "a scale":
        found.scales[2, 1, 3] *= 2.0
    figures = quantised.errors(facts, found.values, found.scales, _attention(out.double()), facts.d_qk)
    assert any(figure.share > 1 for figure in figures)


def test_only_specs_that_quantise_have_whole_groups_and_the_refusal():
    plain = spec(wrappers=list(WRAPPERS))
    assert not [case.name for case in row_cases(plain, "cpu") if "whole groups" in case.name]
    groups = load(SPECS / "dsv4_flash_out_fp8.yaml").model_dump(mode="json")
    for found in (row_cases(groups, "cpu"), cached_cases(groups, "cpu")):
        assert any("heads of no whole groups" in case.name for case in found)
        heads = {case.problem.heads for case in found if hasattr(case, "problem")}
        assert heads
        assert all(count % 8 == 0 for count in heads)


def test_blocks_of_v_that_cut_a_scale_are_refused():
    dims = {**WORDS["model"], "kv_lora_rank": 192, "v_head_dim": 256}
    quant = {"heads_per_group": 3, "scales": "fp32"}
    found = {"model": dims, "attention": {**WORDS["attention"], "out_quant": quant}, "cache": {"layout": "ue8m0_v4"}}
    only = {"wrappers": ("flash_mla_with_kvcache",), "targets": ("sm80",)}
    with pytest.raises(LimitError, match=r"attention\.out_quant: .* multiples of 128 columns, but it has 128, 64, 64"):
        make_plan(Spec.model_validate({**WORDS, **found, **only}))


@by_share
def test_words_of_scales_hold_their_cases(tmp_path, choose):
    apply(compare(render(make_plan(Spec.model_validate(WORDS))), tmp_path / "words"))
    only = ["*positions*", "*typical*", "*workspace*", "sparse*refuses*", "*splits: 3*", "*sink: on empty*", "*no *"]
    targets = ["sm80", "sm90, simulated", "sm90_swap_ab, simulated"]
    results = verify_package(tmp_path / "words", workers=1, targets=targets, only=only, choose=choose)
    assert len(results) > (60 if choose is list else 20)
    assert [str(error) for error in mismatches(results)] == []


@pytest.mark.slow
@pytest.mark.mutants
@pytest.mark.parametrize(("kernel", "more_than"), [("portable", 19), ("rows", 5), ("few_heads", 4), ("cache", 6)])
def test_every_mutant_is_reported(package, tmp_path, kernel, more_than):
    check_mutants("quantised_out_mutants.py", package, tmp_path, kernel, more_than=more_than)
