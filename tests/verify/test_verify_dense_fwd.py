"""Multi-head attention and merges: references by hand, cases, packages run on them, and absorbed attention."""

import importlib
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from broken import check_mutants
from checked_in import package_of, spec_of
from rotation import some

from mlagen.emit import apply, compare, render
from mlagen.plan import load_plan
from mlagen.verify import mismatches, verify_package
from mlagen.verify.call.invalid import RefusedCase
from mlagen.verify.call.memory import LAYOUTS
from mlagen.verify.call.subject import FORCED, Subject, launch_of, sm90_modules, targets_of
from mlagen.verify.dense_fwd.cases import DenseFwdCase
from mlagen.verify.dense_fwd.family import DENSE_FWD
from mlagen.verify.dense_fwd.reference import dense_fwd, merged
from mlagen.verify.merge_states.cases import value_dims
from mlagen.verify.merge_states.family import MERGE_STATES
from mlagen.verify.merge_states.reference import merge

pytestmark = pytest.mark.interpreter

ROOT = Path(__file__).parents[2]
WRAPPERS = ["flash_attn_varlen_func", "merge_attn_states", "merge_attn_parts"]
DEVICES = ["cpu", "cuda"]
SPEC = {
    "model": {"num_heads": 16, "v_head_dim": 0, "dtype": "bf16"},
    "multi_head": {"qk_head_dim": 192, "v_head_dim": 128, "num_kv_heads": None, "addressing": "pointers"},
    "attention": None,
    "wrappers": WRAPPERS,
}


def write_package(folder: Path, name: str, dims: tuple[int, int], **changes: object) -> Path:
    """A package of heads of these columns; `changes` replace lines of its spec."""
    lines = {
        "name": name,
        "title": "Heads",
        "model": "{num_heads: 4, dtype: bf16}",
        "multi_head": f"{{qk_head_dim: {dims[0]}, v_head_dim: {dims[1]}, num_kv_heads: 2}}",
        "wrappers": f"[{', '.join(WRAPPERS)}]",
        "targets": "[sm90, gfx942]",
        **changes,
    }
    path = folder / f"{name}.yaml"
    path.write_text("".join(f"{key}: {value}\n" for key, value in lines.items()))
    apply(compare(render(load_plan(path)), folder / name))
    return folder / name


@pytest.fixture(scope="module")
def heads(tmp_path_factory) -> Path:
    """Heads of 40 and 72 columns, K and V by descriptor, and by pointers where rows are not aligned."""
    dims = "{qk_head_dim: 40, v_head_dim: 72, num_kv_heads: 2, addressing: descriptors}"
    return write_package(tmp_path_factory.mktemp("heads"), "heads", (40, 72), multi_head=dims, targets="[sm90, sm80]")


@pytest.mark.parametrize("name", ["dsv3_prefill", "dsv3", "dsv32_fp8"])
def test_calls_are_forced_onto_sm90_kernels_and_given_back(name):
    package = importlib.import_module(f"generated.{name}")
    launch, device = launch_of(package), torch.device("cuda", 0)
    assert sm90_modules(package)
    with launch.planned_for(launch.DeviceFacts("sm90", 132, True, True)):
        for target in targets_of(package):
            with Subject(package, None, "cuda", target).planned_for(None):
                assert launch.device_facts(device).forced.kernel == FORCED[target]
        assert launch.device_facts(device).forced == launch.Forced()


def test_causal_attention_by_hand():
    # Two rows and three keys: the first row sees two keys, the second all three; logits are 0, so each counts alike.
    q, k, v = torch.zeros(2, 1, 1), torch.zeros(3, 1, 1), torch.tensor([3.0, 6.0, 12.0]).view(3, 1, 1)
    found = dense_fwd(q, k, v, [0, 2], [0, 3], 1.0, True)
    assert found.out.flatten().tolist() == pytest.approx([4.5, 7.0])
    assert found.lse.flatten().tolist() == pytest.approx([math.log(2), math.log(3)])
    # Three rows and one key: it belongs to the last row.
    found = dense_fwd(v, k[:1], v[:1], [0, 3], [0, 1], 1.0, True)
    assert found.out.flatten().tolist() == [0, 0, 3]
    assert found.lse.flatten().tolist() == [-math.inf, -math.inf, 0]
    # Without the mask all rows see it.
    assert dense_fwd(v, k[:1], v[:1], [0, 3], [0, 1], 1.0, False).out.flatten().tolist() == [3, 3, 3]


def test_a_window_by_hand():
    # Three rows and four keys: each row sees its own key and the one before; logits are 0, so each counts alike.
    q, k, v = torch.zeros(3, 1, 1), torch.zeros(4, 1, 1), torch.tensor([2.0, 4.0, 8.0, 16.0]).view(4, 1, 1)
    found = dense_fwd(q, k, v, [0, 3], [0, 4], 1.0, True, 2)
    assert found.out.flatten().tolist() == pytest.approx([3.0, 6.0, 12.0])
    assert found.lse.flatten().tolist() == pytest.approx([math.log(2)] * 3)
    # Keys behind a row count unless the mask is causal.
    assert dense_fwd(q, k, v, [0, 3], [0, 4], 1.0, False, 1).out.flatten().tolist() == pytest.approx([28 / 3, 12, 16])


def test_groups_of_heads_and_requests_by_hand():
    q, k = torch.zeros(2, 4, 1), torch.zeros(3, 2, 1)
    v = torch.tensor([[1.0, 10.0], [2.0, 20.0], [4.0, 40.0]]).view(3, 2, 1)
    found = dense_fwd(q, k, v, [0, 1, 2], [0, 1, 3], 1.0, False)
    assert found.out[..., 0].tolist() == [[1, 1, 10, 10], [3, 3, 30, 30]]


def test_merge_by_hand():
    inf = math.inf
    lses = torch.tensor([[[0.0, inf, -inf, 1e30]], [[math.log(3), 2.0, inf, 0.0]]])  # [parts, heads, tokens]
    outs = torch.tensor([[4.0, math.nan, math.nan, 5.0], [8.0, 6.0, math.nan, 7.0]]).view(2, 4, 1, 1)
    out, lse, _ = merge(outs, lses)
    assert out.flatten().tolist() == pytest.approx([7.0, 6.0, 0.0, 5.0])
    assert lse.flatten().tolist() == pytest.approx([math.log(4), 2.0, -inf, float(torch.tensor(1e30))])


def test_a_merge_of_parts_is_attention_over_all_keys():
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(rows, 2, 8, generator=generator) for rows in (3, 20, 20))
    spans = [(0, 7), (7, 7), (7, 20)]
    parts = [dense_fwd(q, k[a:b], v[a:b], [0, 3], [0, b - a], 0.3, False) for a, b in spans]
    whole = dense_fwd(q, k, v, [0, 3], [0, 20], 0.3, False)
    out, lse, _ = merge(torch.stack([part.out for part in parts]), torch.stack([part.lse.T for part in parts]))
    torch.testing.assert_close(out, whole.out, atol=1e-6, rtol=0)
    torch.testing.assert_close(lse, whole.lse.T, atol=1e-6, rtol=0)
    torch.testing.assert_close(merged(parts).out, whole.out)


@pytest.mark.parametrize("device", DEVICES)
def test_cases_have_names_and_patterns_of_their_own(device):
    for family in (DENSE_FWD, MERGE_STATES):
        found = family.cases(SPEC, device)
        names = [case.name for case in found]
        assert len(set(names)) == len(names)
        assert {type(case) for case in found} == {*family.kinds, RefusedCase}
        assert all(case.promise[-1] not in " ." for case in found)
    ours = [case for case in DENSE_FWD.cases(SPEC, device) if isinstance(case, DenseFwdCase)]
    assert {case.check for case in ours} == set(DENSE_FWD.checks) - ({"graph"} if device == "cpu" else set())
    assert {layout for case in ours for layout in (case.q, case.k, case.v, case.out) if layout} == set(LAYOUTS)
    assert {0, 1} <= {side for case in ours for request in case.requests for side in request}
    assert any(rows > keys for case in ours for rows, keys in case.requests)
    assert {1, 2, 5} <= {case.heads // case.kv_heads for case in ours if case.heads}


def test_what_a_spec_lacks_is_left_out():
    for wrapper in WRAPPERS:
        spec = {**SPEC, "wrappers": [wrapper]}
        assert bool(DENSE_FWD.cases(spec, "cpu")) == (wrapper == WRAPPERS[0])
        assert bool(MERGE_STATES.cases(spec, "cpu")) == (wrapper != WRAPPERS[0])
    checks = {case.check for case in DENSE_FWD.cases({**SPEC, "wrappers": WRAPPERS[:1]}, "cpu")}
    assert checks.isdisjoint({"chunks", "cascade", "parts"})
    rows = {**SPEC, "multi_head": None, "model": {**SPEC["model"], "v_head_dim": 512}, "wrappers": WRAPPERS[1:2]}
    assert value_dims(rows) == [512]
    assert value_dims({**rows, "multi_head": SPEC["multi_head"]}) == [128, 512]


def messages(package: Path, **options) -> list[str]:
    results = verify_package(package, workers=1, **options)
    assert len(results) > 5
    return [str(error) for error in mismatches(results)]


@pytest.mark.slow
def test_a_package_by_descriptors_holds_every_case(heads):
    assert messages(heads, targets=["sm90"]) == []


@pytest.mark.slow
def test_the_odd_package_holds_every_case_by_pointers():
    assert messages(package_of("odd_prefill"), targets=["sm80"]) == []


@pytest.mark.parametrize(
    "name",
    [
        *(pytest.param(each, marks=pytest.mark.slow) for each in ("dsv3_prefill", "glm5_prefill", "minicpm3_prefill")),
        "dsv3_prefill_tma",
    ],
)
def test_the_models_packages_hold_what_their_dims_make_different(name):
    only = ["*typical*", "dense_fwd: rows of*", "dense_fwd: merged*", "dense_fwd: lengths: tiles*"]
    assert messages(package_of(name), targets=["sm90", "sm120"], only=only) == []


@pytest.mark.parametrize("dims", some([(48, 48), (24, 17), (1, 1), (7, 130)], 1), ids=str)
def test_heads_of_any_columns_hold_their_cases(tmp_path, dims):
    package = write_package(tmp_path, "some", dims)
    only = ["*typical*", "dense_fwd: layout: all odd", "dense_fwd: lengths: more keys*", "merge *: lse: mixed"]
    assert messages(package, targets=["sm90", "gfx942"], only=only) == []


@pytest.mark.parametrize("wrapper", some(WRAPPERS, 1))
def test_each_wrapper_alone_holds_its_cases(tmp_path, wrapper):
    package = write_package(tmp_path, "one", (48, 48), wrappers=f"[{wrapper}]")
    assert messages(package, targets=["sm90"], only=["*typical*", "*defaults", "refuses*"]) == []


def test_a_package_merges_values_of_two_lengths(tmp_path):
    model = "{num_heads: 4, kv_lora_rank: 96, qk_rope_head_dim: 32, v_head_dim: 96, dtype: fp16}"
    package = write_package(tmp_path, "two", (48, 40), model=model)
    only = ["merge 40: typical", "merge 96: typical", "merge parts 40: typical", "merge parts 96: typical", "refuses*"]
    assert messages(package, targets=["sm90"], only=only) == []


@pytest.fixture(scope="module")
def windows(tmp_path_factory) -> Path:
    """Heads with a window, K and V by descriptor, and by pointers where rows are not aligned."""
    dims = "{qk_head_dim: 40, v_head_dim: 72, num_kv_heads: 2, window: 37, addressing: descriptors}"
    return write_package(tmp_path_factory.mktemp("windows"), "windows", (40, 72), multi_head=dims, targets="[sm90]")


def test_a_package_with_a_window_holds_its_cases(windows):
    assert (
        messages(windows, targets=["sm90"], only=["dense_fwd: window: *", "*typical*", "refuses: window_size*"]) == []
    )


@pytest.mark.slow
@pytest.mark.mutants
def test_every_mutant_of_a_window_is_reported(windows, tmp_path):
    check_mutants("dense_fwd_window_mutants.py", windows, tmp_path, more_than=8)


@pytest.mark.slow
@pytest.mark.mutants
def test_every_mutant_is_reported(heads, tmp_path):
    check_mutants("dense_fwd_mutants.py", heads, tmp_path, more_than=50)


def test_absorbed_and_decompressed_attention_of_one_model_agree(tmp_path):
    """Latent rank 64, RoPE 16; heads of 32 + 16 and 32 columns; multi-head, multi-query over rows, and sparse."""
    write_package(tmp_path, "plain", (48, 32), wrappers="[flash_attn_varlen_func]")
    rows = "{qk_head_dim: 80, v_head_dim: 64, num_kv_heads: 1}"
    write_package(tmp_path, "absorbed", (80, 64), multi_head=rows, wrappers="[flash_attn_varlen_func]")
    latent = spec_of("odd").read_text().replace("name: odd", "name: rows").replace("fp16", "bf16")
    latent = latent.replace("kv_lora_rank: 96", "kv_lora_rank: 64").replace("v_head_dim: 96", "v_head_dim: 64")
    latent = latent.replace("qk_rope_head_dim: 32", "qk_rope_head_dim: 16").replace("  block_size: 53", "  # flat")
    (tmp_path / "rows.yaml").write_text(latent.replace('lse_base: "2"', "lse_base: e"))
    apply(compare(render(load_plan(tmp_path / "rows.yaml")), tmp_path / "rows"))
    command = [sys.executable, str(Path(__file__).with_name("absorbed.py")), str(tmp_path)]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert set(found) == {"absorbed", "sparse"}
    for name, errors in found.items():
        # Latent rows, K and V of each head are rounded to bf16 on one way or the other: 2^-8 of values of size 1.
        assert errors["out"] < 0.02, name
        assert errors["lse"] < 0.02, name
        assert errors["without rope"] > 0.05, "RoPE has to count"
