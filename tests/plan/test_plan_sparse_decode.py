"""The plan of attention over a cache: blocks, tiles against compilers' figures, tuned rows and the work of a call."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from enumerated import check_every_list, check_tiles, enumerate_plan
from hypothesis import given, reject, settings
from hypothesis import strategies as st
from plan_specs import ROOT, dims, make_spec

from mlagen.emit import render
from mlagen.errors import LimitError, SpecErrors
from mlagen.layout import CacheLayout, LayoutError, compose
from mlagen.plan import (
    TARGETS,
    Chunk,
    Plan,
    SparseDecodePlan,
    SparseFwdPlan,
    Tile,
    TileRow,
    layout_chunks,
    load_plan,
    make_plan,
)
from mlagen.plan.tiles.cached_row import CachedRow, cached_row, join_chunks
from mlagen.plan.tiles.tile import PlainRow
from mlagen.plan.tiles.tuned import Tuned, TunedFiles, dump_tuned, tuned_path
from mlagen.plan.tritons import MINORS, rows_under
from mlagen.spec.stored import NAMED_LAYOUTS

WRAPPER = "flash_mla_with_kvcache"
V32: dict[str, Any] = {"cache": {"layout": "fp8_ds_mla", "block_size": 64}}
V4_DIMS = {"kv_lora_rank": 448, "qk_rope_head_dim": 64, "v_head_dim": 512}
V4: dict[str, Any] = {"cache": {"layout": "ue8m0_v4"}, "extra_cache": {"layout": "ue8m0_v4"}, "window": 128, **V4_DIMS}
V41: dict[str, Any] = V4 | {"cache": {"layout": "mxfp8_v41"}, "extra_cache": {"layout": "nvfp4_v41"}}
NVFP4: dict[str, Any] = {"cache": {"layout": "nvfp4_ds_mla"}}
GLM: dict[str, Any] = {"cache": {"layout": "fp8_ds_mla"}, "qk_rope_head_dim": 0}
PLAIN: dict[str, Any] = {"cache": {"layout": "bf16"}}
PER_TENSOR = {"layout": "fp8_per_tensor"}
TENSOR: dict[str, Any] = {"cache": PER_TENSOR, "extra_cache": PER_TENSOR, "window": 64}
MODELS = {"v32": V32, "v4": V4, "v41": V41, "nvfp4": NVFP4, "glm": GLM, "plain": PLAIN, "tensor": TENSOR}


def plan_of(changes: dict[str, Any], **more: Any) -> Plan:
    return make_plan(make_spec(**{"wrappers": (WRAPPER,), **changes, **more}))


def some_layout(name: str, dims: dict[str, int]) -> CacheLayout:
    """A named layout on dims that do not all suit it."""
    try:
        return compose(NAMED_LAYOUTS[name], dims["kv_lora_rank"] * 2, dims["qk_rope_head_dim"] * 2)
    except LayoutError:
        reject()


def row_of(changes: dict[str, Any]) -> CachedRow:
    plan = plan_of(changes, targets=("sm90",))
    return plan.of(SparseDecodePlan).cached


def test_a_package_without_the_wrapper_has_no_plan_of_it():
    assert make_plan(make_spec()).find(SparseDecodePlan) is None


def test_v_that_holds_a_rope_field_of_another_dtype_is_one_block():
    sparse_decode = plan_of(V4).of(SparseDecodePlan)
    assert [chunk.name for chunk in sparse_decode.caches.chunks] == ["nope", "rope"]
    assert sparse_decode.chunks == (Chunk("kv", 0, 512, 512, True),)
    assert sparse_decode.joined


@pytest.mark.parametrize("model", sorted(MODELS.keys() - {"v4"}))
def test_other_rows_are_multiplied_in_the_blocks_they_are_read_in(model):
    sparse_decode = plan_of(MODELS[model]).of(SparseDecodePlan)
    assert sparse_decode.chunks == sparse_decode.caches.chunks
    assert not sparse_decode.joined


@settings(max_examples=200, deadline=None, derandomize=True)
@given(dims=dims(), name=st.sampled_from(sorted(NAMED_LAYOUTS)))
def test_joined_blocks_are_the_columns_of_both(dims, name):
    layout = some_layout(name, dims)
    loaded = layout_chunks(layout, dims["v_head_dim"])
    chunks = join_chunks(loaded)
    if chunks == loaded:
        return
    (block,) = chunks
    first, last = loaded
    assert (block.start, block.columns, block.block) == (0, first.columns + last.columns, first.block)
    assert last.start % last.block == 0
    assert not block.masked


# Bytes that Triton 3.7.1 takes for the split kernel: (model, target, tile): bytes; Triton 3.6.0 takes the same.
TAKEN = {
    ("v32", "sm80", Tile(16, 64, 8, 2, True)): 158_720,
    ("v32", "sm80", Tile(16, 32, 4, 2, True)): 88_576,
    ("v32", "sm80", Tile(16, 16, 4, 2, True)): 53_504,
    ("v32", "sm90", Tile(64, 64, 8, 2, False)): 189_696,
    ("v32", "sm90", Tile(64, 32, 8, 3, True)): 152_576,
    ("v32", "sm100", Tile(64, 64, 8, 2, False)): 190_240,
    ("v32", "gfx942", Tile(16, 32, 4, 2, False)): 36_864,
    ("v32", "gfx942", Tile(32, 16, 4, 2, False)): 32_768,
    ("v4", "sm80", Tile(16, 64, 4, 2, True)): 188_928,
    ("v4", "sm80", Tile(16, 32, 4, 2, True)): 102_400,
    ("v4", "sm90", Tile(64, 64, 8, 2, False)): 172_544,
    ("v4", "sm90", Tile(64, 32, 8, 2, False)): 131_072,
    ("v4", "sm100", Tile(64, 16, 8, 2, False)): 92_880,
    ("v4", "gfx942", Tile(16, 32, 4, 2, False)): 32_768,
    ("v41", "sm80", Tile(16, 32, 4, 2, True)): 98_816,
    ("v41", "sm90", Tile(64, 64, 8, 2, False)): 165_120,
    ("v41", "sm100", Tile(64, 32, 8, 2, False)): 115_472,
    ("nvfp4", "sm80", Tile(16, 64, 8, 2, True)): 108_544,
    ("nvfp4", "sm80", Tile(16, 32, 8, 2, True)): 63_488,
    ("nvfp4", "sm90", Tile(64, 64, 8, 2, False)): 170_240,
    ("nvfp4", "gfx950", Tile(16, 32, 4, 2, False)): 35_840,
    ("glm", "sm80", Tile(16, 64, 8, 2, True)): 148_480,
    ("glm", "sm90", Tile(64, 64, 8, 2, True)): 164_864,
    ("glm", "sm100", Tile(64, 16, 8, 2, False)): 90_960,
}


@pytest.mark.parametrize(("model", "target", "tile"), TAKEN, ids=str)
def test_a_program_takes_no_more_shared_memory_than_is_expected_and_hardly_less(model, target, tile):
    taken = TAKEN[model, target, tile]
    expected = row_of(MODELS[model]).shared(tile, TARGETS[target])
    assert taken <= expected <= 1.2 * taken


@pytest.mark.parametrize("target", list(TARGETS))
@pytest.mark.parametrize("model", MODELS)
def test_every_target_takes_every_named_layout(target, model):
    plan = plan_of(MODELS[model], targets=(target,))
    facts, ((_, rows),) = TARGETS[target], plan.of(SparseDecodePlan).tiles
    for row in (*rows, *dict(plan.of(SparseDecodePlan).unaligned)[target]):
        assert 0 < row.expected_shared <= facts.shared_limit
        assert row.programs_per_sm >= 1
        assert row.reason
    rows = rows_under(plan.of(SparseDecodePlan).tiles, target, MINORS[0])
    *bounded, last = [row.max_heads for row in rows]
    assert last is None
    assert bounded == sorted(set(bounded))
    if model != "plain" and facts.dot in ("wgmma", "tcgen05"):
        assert [row.tile.block_h for row in rows] == [16, 64]


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    dims=dims(),
    name=st.sampled_from(sorted(NAMED_LAYOUTS)),
    target=st.sampled_from(list(TARGETS)),
    heads=st.integers(1, 128),
)
def test_any_dims_have_tiles_that_fit_or_are_told_why_not(dims, name, target, heads):
    layout = some_layout(name, dims)
    loaded = layout_chunks(layout, dims["v_head_dim"])
    cached, facts = cached_row(layout, None, loaded), TARGETS[target]
    rows, refusal = (), ""
    try:
        rows = cached.untuned(heads, facts)
    except LimitError as error:
        refusal = error.message
    assert all(0 < row.expected_shared <= facts.shared_limit for row in rows)
    assert rows or re.match(rf"{target}: (V of .*, more than |tile .* a program gets)", refusal)


def test_one_request_of_few_heads_leaves_room_for_a_second_program():
    rows = dict(plan_of(V32).of(SparseDecodePlan).tiles)["sm90"]
    assert [(row.max_heads, row.programs_per_sm) for row in rows] == [(16, 2), (None, 1)]


CHANGES = [
    *MODELS.values(),
    V4 | {"topk_length": "none", "attn_sink": "none"},
    V41 | {"topk_length": "required", "attn_sink": "required"},
    V41 | {"topk_length": "none"},
    TENSOR | {"topk_length": "none"},
]


@pytest.mark.parametrize("changes", CHANGES, ids=str)
def test_a_package_of_any_caches_lists_every_variant_of_its_tiles(changes, tmp_path):
    found = enumerate_plan(plan_of(changes, targets=("sm80", "sm90", "gfx942")), tmp_path)
    assert {module for module, _ in found.kernels} - {"_sparse_decode_sm90"} == {"_splits", "_sparse_decode_kernels"}
    check_every_list(found)
    check_tiles(found)


@pytest.mark.parametrize("changes", [V4, V41], ids=["one layout", "two layouts"])
def test_calls_without_the_second_cache_are_a_variant_of_their_own_where_its_layout_differs(changes, tmp_path):
    found = enumerate_plan(plan_of(changes, targets=("sm90",)), tmp_path)
    second = {"extra_k_cache_ptr", "extra_indices_ptr"}
    for kernel in ("_sparse_decode_kernel", "_sparse_decode_split_kernel", "_sparse_decode_sm90_kernel"):
        for lengths in (set(), {"topk_length_ptr"}):
            given = {
                frozenset(second & {name for name, _ in job.signature})
                for job in found.of("sm90", kernel)
                if lengths <= {name for name, _ in job.signature}
            }
            # Of one layout the first cache stands for an absent second one.
            assert given == ({frozenset(), frozenset(second)} if changes is V41 else {frozenset(second)})


def test_a_hash_of_a_kernel_takes_in_the_modules_it_imports(tmp_path):
    from mlagen.digest import SourceDigests
    from mlagen.emit import apply, compare

    folder = tmp_path / "package"
    apply(compare(render(plan_of(V41, targets=("sm90",))), folder))

    def digest() -> str:
        return SourceDigests(folder).digest("_sparse_decode_kernels", "_sparse_decode_kernel")

    for name, old in (("_layout.py", "<< 23"), ("_extra_layout.py", "16384.0"), ("_splits.py", "tl.exp2(m - m_new)")):
        before = digest()
        file = folder / name
        text = file.read_text()
        assert old in text
        file.write_text(text.replace(old, f"{old} + 0", 1))
        assert digest() != before


def test_work_of_a_call_by_hand():
    plan = plan_of(V4)
    sparse_decode = plan.of(SparseDecodePlan)
    assert [one.topk for one in sparse_decode.indexed] == [128, 2048]
    # 3 tokens x 16 heads x 2,176 keys x (512 + 512) multiply-adds, two FLOPs each.
    assert sparse_decode.flops(3, 16) == 213_909_504
    # q and out 3 x 16 x 1,024 x 2 = 98,304; indices 3 x 2,176 x 4 = 26,112; rows (3 x 128 + 1,000) x 584 = 808,256.
    assert sparse_decode.bytes(3, 16, 10_000, 1000) == 98_304 + 26_112 + 808_256
    assert [one.topk for one in plan_of(V32, window=64).of(SparseDecodePlan).indexed] == [2112]


ROW = "{block_h: 16, block_n: 32, num_warps: 4, num_stages: 2, indices_ahead: true, programs_per_sm: 2}"


FITS = {"sparse_fwd": "sparse_fwd some", "sparse_decode": "sparse_decode some"}


def write(folder: Path, text: str, target: str = "sm90", fits: dict[str, str] = FITS) -> Path:
    path = tuned_path("some", target, folder)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}fits: {{sparse_fwd: {fits['sparse_fwd']}, sparse_decode: {fits['sparse_decode']}}}\n")
    return path


def read(folder: Path, cached: CachedRow) -> dict[str, tuple[TileRow, ...]]:
    return TunedFiles("some", folder, 64).rows(FITS["sparse_decode"], TARGETS, cached.row)


def test_a_tuned_file_may_hold_rows_of_both_kernels_or_of_either(tmp_path):
    cached, chunks = row_of(V32), make_plan(make_spec()).of(SparseFwdPlan).chunks
    write(tmp_path, f"sparse_fwd:\n  - {ROW}\nsparse_decode:\n  - {ROW}\n", "sm90")
    write(tmp_path, f"sparse_decode:\n  - {ROW}\n", "sm80")
    write(tmp_path, f"sparse_fwd:\n  - {ROW}\n", "sm100")
    assert set(TunedFiles("some", tmp_path, 64).rows(FITS["sparse_fwd"], TARGETS, PlainRow(chunks).row)) == {
        "sm90",
        "sm100",
    }
    found = read(tmp_path, cached)
    assert set(found) == {"sm80", "sm90"}
    (row,) = found["sm80"]
    assert row.expected_shared == cached.shared(row.tile, TARGETS["sm80"])
    text = dump_tuned(
        "some",
        "sm80",
        Tuned({("sparse_decode", "sm80"): found["sm80"]}),
        fits=FITS,
        heads=64,
        device="A",
        triton="3.7.1",
    )
    tuned_path("some", "sm80", tmp_path).write_text(text)
    again = read(tmp_path, cached)
    assert again["sm80"][0].reason == "tuned: some on sm80 (measured on A, triton 3.7.1)"
    assert {**again, "sm80": tuple(replace(row, reason=found["sm80"][0].reason) for row in again["sm80"])} == found


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "takes one or more of sparse_fwd, sparse_decode, dense_decode, sparse_fwd_sm90, sparse_"),
        ("sparse_decode: []\n", "sparse_decode"),
        (f"sparse_decode:\n  - {ROW}\n  - {ROW}\n", "3:5: sparse_decode[1]"),
        (
            f"sparse_fwd:\n  - {ROW}\nsparse_decode:\n  - {ROW.replace('32', '33')}\n",
            "sparse_decode[0].block_n: got 33",
        ),
    ],
)
def test_a_tuned_file_that_is_off_is_told_at_its_place(tmp_path, text, complaint):
    write(tmp_path, text)
    with pytest.raises(SpecErrors) as caught:
        read(tmp_path, row_of(V32))
    assert complaint in "".join(map(str, caught.value.errors))


def test_a_tuned_tile_too_large_for_its_target_is_over_its_limit(tmp_path):
    path = write(tmp_path, f"sparse_decode:\n  - {ROW.replace('block_n: 32', 'block_n: 64')}\n", "sm86")
    with pytest.raises(LimitError, match="of attention over a cache needs") as caught:
        read(tmp_path, row_of(V32))
    assert str(caught.value).startswith(f"{path}:2:5: sm86: tile 16x64")


def test_tuned_rows_replace_a_targets_own(tmp_path):
    spec = (ROOT / "specs" / "dsv32_fp8.yaml").read_text().replace("name: dsv32_fp8", "name: some")
    (tmp_path / "some.yaml").write_text(spec)
    write(tmp_path, f"sparse_decode:\n  - {ROW}\n", fits=load_plan(tmp_path / "some.yaml").fits)
    plan = load_plan(tmp_path / "some.yaml")
    (row,) = rows_under(plan.of(SparseDecodePlan).tiles, "sm90", MINORS[0])
    assert (row.tile, row.programs_per_sm) == (Tile(16, 32, 4, 2, True), 2)
    assert row.reason.startswith("tuned: ")


@pytest.mark.parametrize(
    ("layout", "latent", "rope", "loads_at"),
    [
        ("fp8_ds_mla", 512, 64, 16),
        ("fp8_ds_mla", 256, 64, 8),  # 392 bytes
        ("fp8_ds_mla", 384, 64, 16),  # 524: loads of 4 bytes are no gain
        ("ue8m0_v4", 448, 64, 16),
        ("bf16", 96, 4, 8),
    ],
)
def test_rows_begin_where_as_many_bytes_are_loaded_at_once(layout, latent, rope, loads_at):
    assert compose(NAMED_LAYOUTS[layout], latent, rope).loads_at == loads_at


@pytest.mark.parametrize(("begin", "rows"), [(0, 16), (8, 16), (4, 1)])
def test_rows_of_392_bytes_are_loaded_eight_at_a_time(begin, rows, tmp_path):
    dims = {"kv_lora_rank": 256, "qk_rope_head_dim": 64, "v_head_dim": 256}
    found = enumerate_plan(make_plan(make_spec(layout="fp8_ds_mla", wrappers=(WRAPPER,), **dims)), tmp_path)
    module = found.module("sparse_decode")
    cache = torch.zeros(3 * 392 + begin, dtype=torch.uint8)[begin:].view(1, 3, 1, 392)
    q, indices = torch.zeros(1, 1, 16, 320, dtype=torch.bfloat16), torch.zeros(1, 1, 16, dtype=torch.int32)
    checked = module._check_call(q, q[..., 256:], cache, indices, None, None, None, None)
    assert checked.alignment.rows == rows
    assert "8 if ALIGNMENT >= 8 else 1" in (found.folder / "_layout.py").read_text()
