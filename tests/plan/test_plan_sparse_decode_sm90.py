"""Sparse attention that multiplies a q of e4m3 on sm90: its numbers, and the specs that it is refused to."""

import pytest
from plan_specs import ROOT, make_spec

from mlagen.errors import LimitError
from mlagen.plan import SparseDecodePlan, load_plan, make_plan

PER_TENSOR = {"cache": {"layout": "fp8_per_tensor", "block_size": 64}, "wrappers": ("flash_mla_with_kvcache",)}


def test_sparse_attention_over_e4m3_has_one_more_where_the_spec_asks_and_numbers_by_hand():
    sparse = load_plan(ROOT / "specs" / "dsv32_fp8_tensor.yaml").of(SparseDecodePlan)
    assert sparse.sm90_modules == ("_sparse_decode_sm90", "_sparse_decode_sm90_e4m3")
    assert sparse.sm90_e4m3.rows == sparse.sm90.rows
    assert sparse.sm90_e4m3.expected_shared == (64 + 4 * 64) * 576 + 3 * 64 * 64 * 2 + 7 * 64 * 4
    assert sparse.sm90_e4m3.expected_products == 2 * 18 + 2 * 4 * 8
    for _, (wg1, producer) in (*sparse.sm90_e4m3.registers.under, (None, sparse.sm90_e4m3.registers.split)):
        assert wg1 == 3 * 168 - wg1 - producer  # the consumers are alike
    plain = make_plan(make_spec(**PER_TENSOR)).of(SparseDecodePlan)
    assert (plain.sm90_modules, plain.sm90_e4m3) == (("_sparse_decode_sm90",), None)


def products_spec(partials="fp32", **changes):
    spec = make_spec(**{"products": "mixed", **PER_TENSOR, **changes})
    return spec if partials == "fp32" else spec.model_copy(update={"partials": partials})


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"targets": ("sm80",)}, "targets lack sm90, the only target that runs it"),
        ({"backend": "triton"}, "backend is triton"),
        ({"cache": {"layout": "fp8_ds_mla", "block_size": 64}}, "the cache has layout fp8_ds_mla"),
        (
            {"extra_cache": {"layout": "fp8_per_tensor", "block_size": 64}, "window": 64},
            "reads one cache, and the spec",
        ),
        (
            {"qk_rope_head_dim": 32},
            "a row has 512 columns of V and 32 after them, and over such a cache it supports 512 and 64",
        ),
        ({"kv_lora_rank": 256, "v_head_dim": 256}, "a row has 256 columns of V and 64 after them"),
        ({"partials": "fp16"}, "partials are fp16, and it supports fp32 and bf16"),
        ({"wrappers": ("concat_and_cache_mla",)}, "no wrapper computes attention over a cache"),
    ],
)
def test_products_of_e4m3_that_cannot_be_emitted_are_refused_in_one_line(changes, reason):
    with pytest.raises(LimitError) as caught:
        make_plan(products_spec(**changes))
    message = str(caught.value)
    assert "attention.products: got mixed, which cannot be emitted: " in message
    assert reason in message
    assert "\n" not in message


def test_products_of_e4m3_go_with_partials_of_bf16():
    assert make_plan(products_spec(partials="bf16")).of(SparseDecodePlan).sm90_e4m3 is not None
