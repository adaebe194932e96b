"""Pools of keys: the reference against loops, its cases, and packages run on them."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from broken import check_mutants
from rotation import by_share, some
from verify_specs import spec

from mlagen.emit import apply, compare, render
from mlagen.errors import MlagenError
from mlagen.plan import make_plan
from mlagen.spec import Spec
from mlagen.verify import mismatches, verify_package
from mlagen.verify.call.invalid import RefusedCase
from mlagen.verify.kpool.cases import PoolsCase, SelectCase, UpdateCase, cases
from mlagen.verify.kpool.family import KPOOL
from mlagen.verify.kpool.reference import Step, expanded, hadamard, pooled, seeded_tail
from mlagen.verify.kpool.side import COMPRESS, EXPAND, NEEDED, QUERY, SEED, SHORT, UPDATE

pytestmark = pytest.mark.interpreter

RULE = {"kind": "scales", "of": "row", "dtype": "fp32", "tile": 128, "floor": 1e-4, "floor_on": "amax"}
# Rows of one plane, scales of any value, and padding that writers fill.
FNUZ: dict[str, Any] = {
    "name": "keys_fnuz",
    "fields": (
        {"kind": "row", "dtype": "e4m3fnuz"},
        {**RULE, "rounding": "nearest", "divisor": 224.0},
        {"kind": "pad", "bytes": 4},
    ),
}
PACKAGES: dict[str, dict[str, Any]] = {"fp8": {}, "fnuz": {"layout": FNUZ, "dtype": "fp16", "ops": True}}


def made(name: str, wrappers: tuple[str, ...] = tuple(SHORT), **indexer: Any) -> Spec:
    """A spec with an indexer and nothing else."""
    given = PACKAGES[name]
    keys = {"num_heads": 4, "head_dim": 128, "topk": 16, "rope_head_dim": 0, "compress_ratio": 4, **indexer}
    dims = {"num_heads": 4, "kv_lora_rank": 64, "qk_rope_head_dim": 0, "v_head_dim": 64}
    return Spec.model_validate(
        {
            "name": name,
            "title": "Pools of keys",
            "model": {**dims, "dtype": given.get("dtype", "bf16")},
            "indexer": keys,
            "indexer_cache": {"layout": given.get("layout", "indexer_fp8")},
            "wrappers": wrappers,
            "ops": given.get("ops", False),
            "targets": ("sm80", "sm90", "gfx942"),
        }
    )


def write(parent: Path, name: str, *args: Any) -> Path:
    apply(compare(render(make_plan(made(name, *args))), parent / name))
    return parent / name


def check_cases(package: Path, **choices: Any) -> None:
    results = verify_package(package, workers=1, **choices)
    assert len(results) > 5
    assert [str(error) for error in mismatches(results)] == []


def test_the_matrix_has_the_signs_of_common_bits():
    matrix = hadamard() * math.sqrt(128)
    for row in range(0, 128, 5):
        signs = [(-1) ** bin(row & column).count("1") for column in range(128)]
        torch.testing.assert_close(matrix[row], torch.tensor(signs, dtype=torch.float64))
    torch.testing.assert_close(hadamard() @ hadamard(), torch.eye(128, dtype=torch.float64))


def test_a_pool_of_equal_scores_is_its_mean():
    k = torch.randn(4, 128).bfloat16()
    found = pooled(k, torch.ones(4, 128).bfloat16(), torch.zeros(4, 128), torch.bfloat16)
    mean = (k.double().sum(0) / 4).bfloat16().double()
    want = [
        sum(float(x) * (-1) ** bin(i & j).count("1") for j, x in enumerate(mean)) / math.sqrt(128) for i in range(128)
    ]
    torch.testing.assert_close(found.row, torch.tensor(want).bfloat16())


def test_a_ring_has_the_last_tokens_of_each_request():
    tail = torch.zeros(3, 2, 4, 128)
    key = torch.arange(1.0, 10.0)[:, None].expand(-1, 128)
    # Five tokens at positions 2 to 6 in block 2, one of padding, and three at 0 to 2 in block 0.
    seeded_tail(tail, key, -key, [10, 11, 8, 9, 10, -1, 0, 1, 2], 4)
    assert tail[2, 0, :, 0].tolist() == [3, 4, 5, 2]
    assert tail[0, 1, :, 5].tolist() == [-7, -8, -9, 0]
    assert not tail[1].any()


def test_a_step_completes_pools_and_leaves_the_last_tokens():
    tail, key = torch.zeros(1, 2, 2, 128).bfloat16(), torch.randn(1, 5, 128).bfloat16()
    step = Step(key, key, torch.zeros(2, 128), [[0, 1, 0, 1, 0]], [[-1, 7, 3, 5, 6]], [[0, 1, 2, 3, 4]])
    found = dict(step.run(tail, 7))
    assert list(found) == [5]  # 7 is past the cache, and only every second token completes a pool
    torch.testing.assert_close(found[5], pooled(key[0, 2:4], key[0, 2:4], torch.zeros(2, 128), torch.bfloat16))
    assert torch.equal(tail[0, 0], key[0, [4, 3]])


def test_pools_become_tokens():
    ids = torch.tensor([[1, -1, 3], [0, 2, 2**40]])
    found = expanded(ids, torch.tensor([13, -5], dtype=torch.int32), 4)
    assert found[0].tolist() == [4, 5, 6, 7, *[-1] * 8, 12, -1, -1]
    assert found[1].tolist() == [-1] * 15


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("name", PACKAGES)
def test_cases_have_names_and_patterns_of_their_own(name, device):
    found = cases(made(name).model_dump(mode="json"), device)
    names = [case.name for case in found]
    assert len(set(names)) == len(names)
    assert {type(case) for case in found} == {*KPOOL.kinds, RefusedCase} - {SelectCase}  # without logits
    checks = {case.check for case in found if not isinstance(case, RefusedCase)}
    assert checks == set(KPOOL.checks) - {"select"} - ({"graph"} if device == "cpu" else set())
    assert all(case.promise[-1] not in " ." for case in found)


def test_the_values_that_break_kernels_are_there():
    found = cases(made("fp8").model_dump(mode="json"), "cpu")
    pools = [case for case in found if isinstance(case, PoolsCase)]
    assert {1, 2, 4, 16} <= {case.pool for case in pools}
    assert {"shuffled", "negative", "beyond"} == {case.slots for case in pools}
    steps = [case for case in found if isinstance(case, UpdateCase)]
    assert {case.steps for case in steps if case.check == "chain"} == {"chunks", "single", "accepted", "drafts"}
    assert {"", "tail", "slots", "positions", "padding"} == {case.garbage for case in steps}
    assert any(case.next_n > case.pool * case.rings for case in steps)


def test_a_package_with_logits_and_top_k_goes_from_keys_to_tokens():
    found = cases(made("fp8", tuple(dict.fromkeys((*SHORT, *NEEDED)))).model_dump(mode="json"), "cpu")
    assert {(case.pool, case.check) for case in found if isinstance(case, SelectCase)} == {
        (4, "select"),
        (16, "select"),
    }


def test_a_spec_without_the_wrappers_has_no_cases():
    assert cases(spec(wrappers=["flash_mla_sparse_fwd"]), "cpu") == []


def test_other_keys_are_refused():
    for changes in ({"head_dim": 64}, {"rope_head_dim": 64, "rope": "neox", "rope_at": "first"}):
        with pytest.raises((MlagenError, ValueError), match="keys of 128 columns without RoPE"):
            made("fp8", **changes)


@pytest.mark.parametrize("name", ["fp8", pytest.param("fnuz", marks=pytest.mark.slow)])
@by_share
def test_a_package_holds_its_cases(name, tmp_path, choose):
    # Of targets one without e4m3 and one that rounds to it.
    check_cases(write(tmp_path, name), targets=["sm80", "sm90"] if name == "fp8" else ["sm90"], choose=choose)


@pytest.mark.parametrize("wrapper", some([QUERY, COMPRESS, SEED, UPDATE, EXPAND], 2))
def test_each_wrapper_alone_holds_its_cases(wrapper, tmp_path):
    short = SHORT[wrapper]
    check_cases(
        write(tmp_path, "fp8", (wrapper,)), targets=["sm90"], only=[f"kpool: typical*({short})", "kpool refuses: *"]
    )


@pytest.mark.slow
@pytest.mark.mutants
def test_every_mutant_is_reported(tmp_path):
    check_mutants("kpool_mutants.py", write(tmp_path, "fp8"), tmp_path, more_than=40)
