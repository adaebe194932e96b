"""Latents: their reference against loops, their cases, and the cases of packages."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from broken import check_mutants
from rotation import by_share, drawn, some
from verify_specs import spec

from mlagen.emit import apply, compare, render
from mlagen.plan import make_plan
from mlagen.spec import Spec
from mlagen.verify import mismatches, verify_package
from mlagen.verify.call.invalid import RefusedCase
from mlagen.verify.call.memory import LAYOUTS
from mlagen.verify.latents.cases import PoolCase, cases
from mlagen.verify.latents.family import LATENTS
from mlagen.verify.latents.reference import Groups, pooled
from mlagen.verify.latents.side import INSERT, KEYS, POOL

pytestmark = pytest.mark.interpreter

KEYS_OF = {"num_heads": 4, "head_dim": 128, "topk": 64, "rope_head_dim": 64, "rope": "gptj", "rope_at": "last"}
PACKAGES: dict[str, dict[str, Any]] = {
    "v41": {"layout": "mxfp8_v41", "extra": "nvfp4_v41", "keys": "indexer_mxfp4", "ops": True},
    "v4": {"layout": "ue8m0_v4", "extra": "ue8m0_v4", "keys": "indexer_fp8"},
    "mixed": {"layout": "ue8m0_v4", "extra": "mxfp8_v41"},
    "odd": {"layout": "bf16", "dims": (90, 30, 90), "rope": "neox"},
    "tensor": {"layout": "fp8_per_tensor"},
    "halves": {"layout": "fp16", "dtype": "fp16", "dims": (512, 64, 512)},
    "wide": {"layout": "fp8_ds_mla", "dims": (512, 64, 512), "rope": "neox"},
}
FIRST = drawn(("v41", "v4", "odd"), 1)  # which a run holds to its cases, another for each commit


def made(name: str, wrappers: tuple[str, ...] = (POOL, INSERT)) -> Spec:
    """A spec with caches and nothing else."""
    given = PACKAGES[name]
    latent, rope, v = given.get("dims", (448, 64, 512))
    dims = {"num_heads": 4, "kv_lora_rank": latent, "qk_rope_head_dim": rope, "v_head_dim": v}
    parts: dict[str, Any] = {}
    if "extra" in given:
        parts["extra_cache"] = {"layout": given["extra"], "block_size": 64}
    if "keys" in given:
        parts |= {"indexer": KEYS_OF, "indexer_cache": {"layout": given["keys"], "block_size": 64}}
        wrappers = (*wrappers, KEYS)
    return Spec.model_validate(
        {
            "name": name,
            "title": "Latents",
            "model": {**dims, "rope": given.get("rope", "gptj"), "dtype": given.get("dtype", "bf16")},
            "cache": {"layout": given["layout"], "block_size": 64},
            **parts,
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
    assert len(results) > 6
    assert [str(error) for error in mismatches(results)] == []


def test_a_latent_equals_loops():
    """A group of three: a token of the ring and two of the call, by sums of Python's numbers."""
    values, states, weight = torch.randn(2, 8), torch.randn(2, 4, 8), torch.randn(4)
    groups = Groups(values, [4, 5], [4, 5], 3, states, [0, 2], [0, 0])
    (end,), (latent,), _ = pooled(groups, weight, 0.5)
    assert int(end) == 1
    rows = [states[1, 3], values[0], values[1]]  # positions 3, 4 and 5, in a ring of 4
    want = []
    for column in range(4):
        shares = [math.exp(float(row[4 + column])) for row in rows]
        pairs = zip(shares, rows, strict=True)
        want.append(sum(share * float(row[column]) for share, row in pairs) / sum(shares))
    mean = sum(one * one for one in want) / 4
    want = [one / math.sqrt(mean + 0.5) * float(weight[column]) for column, one in enumerate(want)]
    torch.testing.assert_close(latent, torch.tensor(want, dtype=torch.float64), rtol=1e-6, atol=1e-6)


def test_a_ring_keeps_the_last_tokens_of_each_request():
    groups = Groups(torch.zeros(5, 2), [0, 1, 2, 9, 10], [0, 1, 0, 3, -1], 2, torch.zeros(2, 2, 2), [0, 3, 5], [0] * 5)
    assert list(groups.saved()) == [(1, 0, 1), (2, 0, 0), (3, 1, 1)]


def test_tokens_outside_end_no_group():
    positions, slots = [1, 1, -1, 2**31 + 1, 2, 5], [0, -1, 0, 0, 0, 99]
    groups = Groups(torch.zeros(6, 2), positions, slots, 1, None, [], [])
    assert [token for token, _ in groups.members()] == [0, 4, 5]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("name", PACKAGES)
def test_cases_have_names_and_patterns_of_their_own(name, device):
    found = cases(made(name).model_dump(mode="json"), device)
    names = [case.name for case in found]
    assert len(set(names)) == len(names)
    assert {type(case) for case in found} == {*LATENTS.kinds, RefusedCase}
    checks = {case.check for case in found if not isinstance(case, RefusedCase)}
    assert checks == set(LATENTS.checks) - ({"graph"} if device == "cpu" else set())
    for case in found:
        assert case.promise[-1] not in " ."
        if not isinstance(case, RefusedCase):
            assert case.rows in LAYOUTS


def test_the_values_that_break_kernels_are_there():
    found = [case for case in cases(made("v41").model_dump(mode="json"), "cpu") if isinstance(case, PoolCase)]
    assert {1, 2, 3, 8} <= {case.ratio for case in found}
    assert {"own", "negative", "beyond", "shorter", "none"} == {case.slots for case in found}
    assert {"own", "garbage", "longer", "last"} == {case.positions for case in found}
    assert {"random", "equal", "large", "infinite"} == {case.scores for case in found}
    steps = {(case.ratio, case.steps) for case in found if case.check == "chain"}
    assert steps == {(ratio, steps) for ratio in (1, 2, 3) for steps in ("chunks", "single", "drafts")}


def test_a_spec_without_the_wrappers_has_no_cases():
    assert cases(spec(wrappers=["flash_mla_sparse_fwd"]), "cpu") == []


@pytest.mark.parametrize(
    "name", [*FIRST, *(pytest.param(name, marks=pytest.mark.slow) for name in PACKAGES if name not in FIRST)]
)
@by_share
def test_a_package_holds_its_cases(name, tmp_path, choose):
    # Of targets one without e4m3 and one that rounds to it.
    check_cases(write(tmp_path, name), targets=["sm80", "sm90"] if name == "v41" else ["sm90"], choose=choose)


@pytest.mark.parametrize("wrapper", some([POOL, INSERT], 1))
def test_each_wrapper_alone_holds_its_cases(wrapper, tmp_path):
    only = ["latents: typical*", "latents: rows*", "latents: latents*", "latents refuses: compress_ratio*"]
    check_cases(write(tmp_path, "mixed", (wrapper,)), targets=["sm90"], only=only)


@pytest.mark.slow
@pytest.mark.mutants
@pytest.mark.parametrize("name", ["v4", "v41"])
def test_every_mutant_is_reported(name, tmp_path):
    check_mutants("latents_mutants.py", write(tmp_path, name), tmp_path, more_than=30)
