"""Which kernel a call of dense attention over e4m3 runs, by its sizes and the device's memory."""

import pytest
import torch
from plan_specs import ROOT

from mlagen.bench import load_package
from mlagen.errors import LimitError
from mlagen.plan import DenseDecodePlan, load_plan
from mlagen.plan.sm90.dense_decode import ROWS64_CALLS, ROWS64_CALLS_E4M3_P
from mlagen.plan.sm90.e4m3 import P_LOG2, P_MOST_LOG2


@pytest.mark.parametrize(
    ("requests", "keys", "heads", "e4m3", "batch_invariant", "rows"),
    [
        (128, 4096, 16, True, False, 32),
        (16, 4096, 64, True, False, 32),
        (24, 4096, 64, True, False, 64),
        (1, 32768, 64, True, False, 32),
        (8, 32768, 64, True, False, 64),
        (8, 4096, 128, True, False, 32),
        (16, 4096, 128, True, False, 64),
        (1, 32768, 128, True, False, 32),
        (2, 32768, 128, True, False, 64),
        (2, 4096, 256, True, False, 32),
        (128, 32768, 128, False, False, 64),
        (63, 4096, 64, False, False, 32),
        (64, 4096, 64, False, False, 64),
        (3, 32768, 128, False, False, 32),
        (4, 32768, 128, False, False, 64),
        (15, 4096, 256, False, False, 32),
        (16, 4096, 256, False, False, 64),
        (128, 32768, 32, False, False, 32),
        (128, 32768, 128, False, True, 32),
        (1, 64, 64, True, True, 64),
        (64, 4096, 64, True, True, 64),
        (64, 4096, 32, True, True, 32),
        (4, 1024, 17, True, False, 32),
        (4, 1024, 16, False, True, 32),
        (1, 512, 1, False, False, 32),
        (2**12, 2**30, 32, True, False, 32),
    ],
)
def test_calls_over_e4m3_run_the_kernel_that_fits_them(requests, keys, heads, e4m3, batch_invariant, rows):
    package = load_package(ROOT / "generated" / "dsv3_fp8")
    dense, launch = package.root.dense_decode, package.root._launch
    facts = launch.DeviceFacts("sm90", 132, memory_rate=4800)
    found = dense.schedule(facts, 16, requests, 1, heads, 1, 64, keys, batch_invariant, True, e4m3)
    kernel = "sm90_rows32" if rows == 32 else "sm90" if e4m3 else "sm90_q_halves"
    assert (found.kernel, found.tile.block_h) == (kernel, rows)
    assert (found.overhead, found.combine_units) == ((0, 0) if batch_invariant else (3, 3))
    portable = dense.schedule(facts, 16, requests, 1, heads, 1, 64, keys, batch_invariant, False, e4m3)
    assert (portable.kernel, portable.overhead) == ("portable", 0 if batch_invariant else 1)
    assert portable.combine_units == (0 if batch_invariant else 6)


@pytest.mark.parametrize(
    ("heads", "e4m3", "slow", "fast"),
    [(64, True, 160, 80), (128, True, 48, 40), (256, True, 24, 20), (64, False, 384, 256), (128, False, 112, 128)],
)
def test_slow_memory_moves_the_crossing_to_the_kernel_of_64_rows(heads, e4m3, slow, fast):
    package = load_package(ROOT / "generated" / "dsv3_fp8")
    dense, launch = package.root.dense_decode, package.root._launch
    rates = [(rate, slow) for rate in (0, 2039, 3352, 4000)] + [(rate, fast) for rate in (4001, 4800, 8000)]
    for rate, thousands in rates:
        facts = launch.DeviceFacts("sm90", 132, memory_rate=rate)
        for keys, rows in ((thousands * 1024 - 64, 32), (thousands * 1024, 64)):
            found = dense.schedule(facts, 16, 1, 1, heads, 1, 64, keys, False, True, e4m3)
            assert found.tile.block_h == rows, (rate, keys)


def dense(name: str) -> DenseDecodePlan:
    return load_plan(ROOT / "specs" / f"{name}.yaml").of(DenseDecodePlan)


def test_p_of_e4m3_halves_its_bytes_and_the_products_with_v():
    plain, coarse = dense("dsv3_fp8"), dense("dsv3_fp8_products")
    assert coarse.sm90.expected_shared == (64 + 4 * 64) * 576 + 3 * 64 * 64 + 7 * 64 * 4
    assert coarse.sm90_rows32.expected_shared == (64 + 4 * 64) * 576 + 3 * 32 * 64 + 8 * 32 * 4
    assert coarse.sm90.expected_products == coarse.sm90_rows32.expected_products == 2 * 18 + 2 * 4 * 4
    assert (coarse.sm90.v_ahead, coarse.sm90_rows32.v_ahead) == (1, 2)
    assert coarse.sm90_q_halves == plain.sm90_q_halves
    assert (plain.sm90.v_ahead, plain.sm90_rows32.v_ahead) == (0, 0)


def test_other_dims_over_e4m3_say_which_have_an_sm90_kernel(tmp_path):
    path = tmp_path / "dsv3_fp8.yaml"
    text = (ROOT / "specs" / path.name).read_text()
    assert text.count(": 512") == 2  # the latent, and V
    path.write_text(text.replace(": 512", ": 256"))
    plan = load_plan(path)
    reason = plan.no_sm90(plan.of(DenseDecodePlan))
    assert reason is not None
    assert reason.startswith("over a cache of fp8_per_tensor it supports 512 columns of V, 0, 32, 64 after them")


def test_bounds_of_p_are_within_what_e4m3_holds():
    largest = torch.tensor([2.0**P_MOST_LOG2, 2.0**P_LOG2])
    assert torch.equal(largest.to(torch.float8_e4m3fn).float(), torch.tensor([416.0, 32.0]))
    assert torch.finfo(torch.float8_e4m3fn).max > 2.0**P_MOST_LOG2


def test_p_of_e4m3_moves_the_crossing_where_it_was_measured_and_no_other():
    assert dense("dsv3_fp8_products").rows64_calls == ROWS64_CALLS_E4M3_P
    assert dense("dsv3_fp8").rows64_calls == ROWS64_CALLS
    changed = [(old, new) for old, new in zip(ROWS64_CALLS, ROWS64_CALLS_E4M3_P, strict=True) if old != new]
    (old, new), *others = changed
    assert not others
    assert (old.max_rows, old.max_rate, old.min_keys_q_halves) == (new.max_rows, new.max_rate, new.min_keys_q_halves)
    assert 64 * 4096 < new.min_keys <= 128 * 32768


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        (
            "layout: fp8_per_tensor",
            "layout: bf16",
            "needs e4m3 rows with one scale per tensor, and the cache has",
        ),
        ("layout: fp8_per_tensor", "layout: fp8_ds_mla", "and the cache has layout fp8_ds_mla"),
        ("targets: [sm90]", "targets: [sm80, sm100]", "targets lack sm90, the only target that runs it"),
        ("targets:", "backend: triton\ntargets:", "backend is triton"),
        ("kind: dense", "kind: dense\n  window: 100", "attention.window is set"),
        ("qk_rope_head_dim: 64", "qk_rope_head_dim: 128", "it supports 512 columns of V, 0, 32, 64 after them"),
        ("  - flash_mla_with_kvcache # FlashMLA's signature\n  - decode_attention_fwd", "  #", "no wrapper computes"),
    ],
)
def test_p_of_e4m3_that_cannot_be_emitted_is_refused_in_one_line(tmp_path, old, new, reason):
    text = (ROOT / "specs" / "dsv3_fp8_products.yaml").read_text()
    assert old in text
    path = tmp_path / "dsv3_fp8_products.yaml"
    path.write_text(text.replace(old, new))
    with pytest.raises(LimitError) as caught:
        load_plan(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: attention.products: got fp8, which cannot be emitted: ")
    assert reason in message
    assert "\n" not in message
