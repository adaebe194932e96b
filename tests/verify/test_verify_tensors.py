"""Caches in several tensors: packages held to their cases, whole and broken."""

from pathlib import Path

import pytest
from broken import check_mutants
from rotation import by_share

from mlagen.emit import apply, compare, render
from mlagen.plan import load_plan
from mlagen.verify import mismatches, verify_package

pytestmark = pytest.mark.interpreter

HERE = Path(__file__).parent
DENSE = """\
name: tensors_dense
title: Dense attention over two tensors
model: {num_heads: 6, kv_lora_rank: 64, qk_rope_head_dim: 16, v_head_dim: 64, dtype: bf16}
attention: {kind: dense, window: 100}
cache:
  layout: {name: ckv_kpe, fields: [{kind: latent, dtype: bf16}, {kind: rope, dtype: bf16, tensor: kpe_cache}]}
  block_size: 64
wrappers: [flash_mla_with_kvcache, decode_attention_fwd]
targets: [sm80, sm90, gfx942]
"""
# Of bytes, halves and floats, with a row of scales that is no multiple of 16 bytes.
SPARSE = """\
name: tensors_sparse
title: Sparse attention over three tensors of odd sizes
model: {num_heads: 12, kv_lora_rank: 96, qk_rope_head_dim: 32, v_head_dim: 96, dtype: fp16}
attention: {kind: sparse, topk: 100, lse_base: "2", empty_row_lse: -inf}
cache:
  layout:
    name: odd_tensors
    fields:
      - {kind: latent, dtype: e4m3}
      - {kind: rope, dtype: fp16, tensor: kpe_cache}
      - {kind: scales, of: latent, dtype: fp32, tile: 32, tensor: ckv_scale_arr, rounding: nearest, divisor: 448,
         floor: 1.0e-4, floor_on: amax}
  block_size: 53
wrappers: [flash_mla_with_kvcache, concat_and_cache_mla, gather_and_maybe_dequant_cache]
targets: [sm80, sm90, gfx942]
ops: true
"""
# Fields of a tensor as bytes, padding in each of two, and e4m3 RoPE.
MIXED = SPARSE.replace("tensors_sparse", "tensors_mixed").replace(
    "      - {kind: rope, dtype: fp16, tensor: kpe_cache}\n",
    "      - {kind: pad, bytes: 8}\n      - {kind: rope, dtype: e4m3, tensor: kpe_cache}\n"
    "      - {kind: pad, bytes: 5, tensor: kpe_cache}\n",
)


@pytest.fixture(scope="module")
def packages(tmp_path_factory) -> dict[str, Path]:
    folder, found = tmp_path_factory.mktemp("tensors"), {}
    for name, text in {"dense": DENSE, "sparse": SPARSE, "mixed": MIXED}.items():
        path = folder / f"tensors_{name}.yaml"
        path.write_text(text)
        found[name] = folder / path.stem
        apply(compare(render(load_plan(path)), found[name]))
    return found


@pytest.mark.parametrize("name", ["dense", "sparse"])
@by_share
def test_packages_over_tensors_hold_their_cases(packages, name, choose):
    results = verify_package(packages[name], workers=1, targets=["sm80"], choose=choose)
    assert len(results) > 10
    assert [str(error) for error in mismatches(results)] == []


def test_a_tensor_of_bytes_and_padding_hold_what_their_bytes_make_different(packages):
    only = [
        "*typical*",
        "*tiles*",
        "*odd cache*",
        "*odd beside*",
        "*block size 53*",
        "*any codes*",
        "layout*",
        "refuses: k*",
    ]
    results = verify_package(packages["mixed"], workers=1, targets=["gfx942"], only=only)
    assert len(results) > 30
    assert [str(error) for error in mismatches(results)] == []


@pytest.mark.slow
@pytest.mark.mutants
@pytest.mark.parametrize(("name", "more_than"), [("dense", 8), ("sparse", 20)])
def test_every_mutant_is_reported(packages, tmp_path, name, more_than):
    check_mutants("tensors_mutants.py", packages[name], tmp_path, name, more_than=more_than)
