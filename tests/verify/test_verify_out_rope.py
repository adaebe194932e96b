"""Attention that rotates its output back: its reference, its cases, and packages run on them whole and broken."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from broken import check_mutants
from rotation import by_share
from verify_specs import spec

from mlagen.emit import apply, compare, render
from mlagen.plan import load_plan, make_plan
from mlagen.spec import Spec
from mlagen.verify import mismatches, verify_package
from mlagen.verify.call.facts import Facts
from mlagen.verify.checks.out_rope import PATTERNS, TABLE, Rotation, draw
from mlagen.verify.reference import Attention
from mlagen.verify.sparse_decode.cases import cases as cached_cases
from mlagen.verify.sparse_fwd.cases import cases as row_cases

pytestmark = pytest.mark.interpreter

SPECS = Path(__file__).parents[2] / "specs"
WRAPPERS = ("triton_mla_sparse_attention", "flash_mla_sparse_fwd", "flash_mla_with_kvcache", "merge_attn_parts")
# V in blocks of 64, 32 and 32 columns: RoPE's begin in one of them and go on in the next, which is masked.
ODD: dict[str, Any] = {
    "name": "turned",
    "title": "Odd columns whose output is rotated back",
    "model": {
        "num_heads": 5,
        "kv_lora_rank": 90,
        "qk_rope_head_dim": 30,
        "rope": "gptj",
        "v_head_dim": 120,
        "dtype": "fp16",
    },
    "attention": {
        "kind": "sparse",
        "topk": 64,
        "attn_sink": "required",
        "topk_length": "required",
        "lse_base": "2",
        "out_rope": "inverse",
    },
    "cache": {"layout": {"name": "rows", "fields": ({"kind": "row", "dtype": "fp16"},)}},
    "wrappers": WRAPPERS,
    "targets": ("sm80", "gfx942"),
    "partials": "bf16",
}


@pytest.fixture(scope="module")
def package(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("turned") / "dsv4_flash_out_rope"
    apply(compare(render(load_plan(SPECS / "dsv4_flash_out_rope.yaml")), folder))
    return folder


def test_the_reference_rotates_pairs_as_a_loop_does():
    generator = torch.Generator().manual_seed(0)
    angle = 6 * torch.rand(7, 3, generator=generator)
    table = torch.cat([angle.cos(), angle.sin()], 1)
    positions = torch.tensor([6, 0, 3, -1, 7, 2**40])
    out = torch.randn(6, 2, 10, generator=generator, dtype=torch.float64)
    rows = torch.zeros(6, 2)
    found = Rotation(6, positions, table, 4).turned(Attention(out, rows, rows, out.abs(), rows, out.abs()))
    for token, position in enumerate(positions.tolist()):
        for head in range(2):
            for pair in range(3):
                first, second = (float(out[token, head, 4 + 2 * pair + part]) for part in (0, 1))
                cos, sin = (float(table[position, pair + part]) for part in (0, 3)) if 0 <= position < 7 else (1.0, 0.0)
                got = found.out[token, head, 4 + 2 * pair : 6 + 2 * pair].tolist()
                assert math.isclose(got[0], first * cos + second * sin, abs_tol=1e-12)
                assert math.isclose(got[1], second * cos - first * sin, abs_tol=1e-12)
    assert torch.equal(found.out[..., :4], out[..., :4])
    assert torch.equal(found.out[3:], out[3:])


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("tokens", [0, 1, 3, 200])
def test_rows_of_the_table_that_no_token_names_are_nan(pattern, tokens):
    facts = Facts.of(spec() | {"attention": {"out_rope": "inverse"}})
    rotation, placed = draw(facts, pattern, tokens, "cpu", torch.Generator().manual_seed(1))
    assert rotation is not None
    assert set(placed) == {"positions", "cos_sin_cache"}
    positions = rotation.positions[:tokens]
    assert len(positions) == tokens
    named = set(positions[(positions >= 0) & (positions < TABLE)].tolist())
    numbers = {row for row in range(TABLE) if not bool(rotation.table[row].isnan().any())}
    assert numbers == named
    assert not set(rotation.positions[tokens:].tolist()) & named


def test_only_specs_that_rotate_have_the_cases():
    plain = spec(wrappers=list(WRAPPERS))
    assert not [case.name for case in row_cases(plain, "cpu") if "positions" in case.name]
    turned = spec(wrappers=list(WRAPPERS), v_head_dim=576, shared_indices=None)
    turned["attention"]["out_rope"] = "inverse"
    turned["attention"]["kind"] = "sparse"
    for found in (row_cases(turned, "cpu"), cached_cases(turned, "cpu")):
        names = [case.name for case in found]
        for pattern in PATTERNS:
            assert any(f"positions: {pattern}" in name and "split" in name for name in names)
        assert any("refuses: positions" in name for name in names)


@by_share
def test_odd_columns_hold_their_cases(tmp_path, choose):
    apply(compare(render(make_plan(Spec.model_validate(ODD))), tmp_path / "turned"))
    only = ["*positions*", "*typical*", "*workspace*", "*merged*", "sparse*refuses*", "*splits: 3*", "*sink: on empty*"]
    results = verify_package(tmp_path / "turned", workers=1, targets=["sm80"], only=only, choose=choose)
    assert len(results) > (60 if choose is list else 20)
    assert [str(error) for error in mismatches(results)] == []


@pytest.mark.slow
@pytest.mark.mutants
@pytest.mark.parametrize(("kernel", "more_than"), [("portable", 15), ("rows", 5), ("few_heads", 5), ("cache", 7)])
def test_every_mutant_is_reported(package, tmp_path, kernel, more_than):
    check_mutants("out_rope_mutants.py", package, tmp_path, kernel, more_than=more_than)
