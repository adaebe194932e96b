"""Numbers of the sm90 kernels: the specs that have them, the calls that run them, their resources."""

import re
from dataclasses import replace

import pytest
from enumerated import enumerate_plan
from hypothesis import given
from hypothesis import strategies as st
from plan_specs import DENSE, ROOT, make_spec

from mlagen.emit import render
from mlagen.errors import LimitError, MlagenError
from mlagen.plan import TARGETS, DenseDecodePlan, Sm90Row, SparseDecodePlan, SparseFwdPlan, load_plan, make_plan
from mlagen.plan.sm90 import row_pieces
from mlagen.plan.sm90.caches import least_unit, load_unit, reads_cache
from mlagen.plan.sm90.index_union import REGISTERS
from mlagen.plan.sm90.kernel import BARRIERS
from mlagen.plan.sm90.stored import StoredRows
from mlagen.plan.tiles.tuned import Tuned, dump_tuned
from mlagen.plan.tritons import MINORS
from mlagen.spec import load


def sm90(**changes):
    return make_plan(make_spec(**changes)).of(SparseFwdPlan).sm90


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"targets": ("sm80", "sm100")}, "targets lack sm90"),
        ({"v_head_dim": 576}, "model.v_head_dim is 576, and it supports 64 to 512"),
        ({"kv_lora_rank": 48, "v_head_dim": 48}, "model.v_head_dim is 48, and it supports 64 to 512"),
        ({"qk_rope_head_dim": 40}, "a row has 552 columns, 512 of them in V, and it supports multiples of 16"),
        ({"qk_rope_head_dim": 144}, "a row has 144 columns after V, and it supports at most 128"),
    ],
    ids=str,
)
def test_specs_without_sm90_kernels_get_none_or_a_reason(changes, reason):
    assert sm90(**changes) is None
    with pytest.raises(LimitError, match=reason):
        sm90(backend="gluon", **changes)


def test_dense_attention_has_one_that_calls_of_few_rows_and_requests_do_not_run():
    dense = make_plan(make_spec(attention={"kind": "dense"}, **DENSE)).of(DenseDecodePlan)
    assert dense.sm90.rows == (Sm90Row(16, 1), Sm90Row(32, 5), Sm90Row(None, 1))
    assert dense.sm90.expected_products == sm90().expected_products
    assert dense.sm90.expected_shared == sm90().expected_shared - 2 * 64 * 4  # it gives no maximum logits


def test_dense_attention_over_e4m3_has_three_and_numbers_by_hand():
    dense = load_plan(ROOT / "specs" / "dsv3_fp8.yaml").of(DenseDecodePlan)
    rows32, rows64, q_halves = dense.sm90_rows32, dense.sm90, dense.sm90_q_halves
    names = ("_dense_decode_sm90", "_dense_decode_sm90_rows32", "_dense_decode_sm90_q_halves")
    assert dense.sm90_modules == names
    assert (rows32.block_h, rows64.block_h, q_halves.block_h) == (32, 64, 64)
    assert rows64.rows == (Sm90Row(None, 1),)
    # Q of 64 rows or of both halves of 32, four blocks of 64 keys, P of three in 16 bits, and vectors of fp32.
    assert rows64.expected_shared == (64 + 4 * 64) * 576 + 3 * 64 * 64 * 2 + 7 * 64 * 4
    assert rows32.expected_shared == (2 * 32 + 4 * 64) * 576 + 3 * 32 * 64 * 2 + 8 * 32 * 4
    # Both halves of 64 rows, four blocks of 64 keys, RoPE of two of them, and P of two.
    assert q_halves.expected_shared == (2 * 64 + 4 * 64) * 576 - 2 * 64 * 64 + 2 * 64 * 64 * 2 + 8 * 64 * 4
    assert q_halves.expected_products == 4 * 18 + 2 * 4 * 8
    # 576 columns 32 at a time of two blocks; then 128 keys 16 at a time, of 4 times 64 columns a warpgroup.
    assert rows32.expected_products == rows64.expected_products == 2 * 18 + 2 * 4 * 8
    for plan in (rows32, rows64, q_halves):  # the third warpgroup has the rest of 168 registers a thread
        wg1, producer = plan.registers.split
        assert 208 <= 3 * 168 - wg1 - producer <= 240


@pytest.mark.parametrize("rope", [0, 32, 64])
def test_dense_attention_over_e4m3_has_one_of_q_in_two_halves(rope):
    spec = make_spec(attention={"kind": "dense"}, layout="fp8_per_tensor", qk_rope_head_dim=rope, **DENSE)
    dense = make_plan(spec).of(DenseDecodePlan)
    assert dense.sm90_rows32 is not None
    assert dense.sm90_q_halves is not None
    assert any(row.min_keys_q_halves for row in dense.rows64_calls)


@pytest.mark.parametrize(("latent", "rope"), [(256, 32), (384, 64), (512, 16), (512, 48), (512, 128)])
def test_dense_attention_over_e4m3_of_other_dims_has_no_sm90_kernel(latent, rope):
    dims = {**DENSE, "kv_lora_rank": latent, "v_head_dim": latent, "qk_rope_head_dim": rope}
    dense = make_plan(make_spec(attention={"kind": "dense"}, layout="fp8_per_tensor", **dims)).of(DenseDecodePlan)
    assert (dense.sm90, dense.sm90_rows32, dense.sm90_q_halves) == (None, None, None)


def test_dense_attention_over_other_quantised_rows_or_a_window_has_none_of_e4m3():
    for changes in ({"layout": "fp8_ds_mla"}, {"attention": {"kind": "dense", "window": 512}}):
        spec = make_spec(**{"attention": {"kind": "dense"}, "layout": "fp8_per_tensor", **DENSE, **changes})
        dense = make_plan(spec).of(DenseDecodePlan)
        assert (dense.sm90, dense.sm90_rows32, dense.rows64_calls) == (None, None, ())


def test_dense_attention_with_a_window_has_none():
    attention = {"kind": "dense", "window": 512}
    with pytest.raises(LimitError, match="only without a window"):
        make_plan(make_spec(attention=attention, backend="gluon", **DENSE))
    assert make_plan(make_spec(attention=attention, **DENSE)).of(DenseDecodePlan).sm90 is None


def test_the_portable_back_end_has_no_sm90_kernels():
    assert sm90(backend="triton") is None


def test_with_the_gluon_back_end_every_call_runs_sm90_kernels():
    assert sm90(backend="gluon").rows == (Sm90Row(None, 1),)


def test_attention_over_a_cache_needs_no_kernel_over_rows():
    assert make_plan(make_spec(wrappers=("concat_and_cache_mla",))).find(SparseFwdPlan) is None


@pytest.mark.parametrize(("rope", "columns"), [(64, 576), (0, 512)])
@pytest.mark.parametrize(("partials", "split_shared"), [("fp32", (0, 0)), ("bf16", (0, 0)), ("fp16", (640, 1280))])
def test_numbers_of_few_heads_by_hand(rope, columns, partials, split_shared):
    spec = make_spec(qk_rope_head_dim=rope).model_copy(update={"partials": partials})
    plans = make_plan(spec).of(SparseFwdPlan).sm90_swap_ab
    assert tuple(plan.block_h for plan in plans) == (16, 32)
    assert tuple(plan.split_shared for plan in plans) == split_shared
    for plan in plans:
        # Each warpgroup: 16 columns a product of scores; 4 products of 64 weights for each 64 of V's 512 columns.
        assert plan.expected_products == 2 * (columns // 16 + 8 * 4)
        # Q, two blocks of K and a third left half, weights; six statistics of rows, maxima of 2 x 4 warps.
        tiles = 2 * ((plan.block_h + 128) * columns + 64 * 256 + 2 * 64 * plan.block_h)
        assert plan.expected_shared == tiles + 4 * (6 * plan.block_h + 8 * plan.block_h)


@pytest.mark.parametrize(("rope", "columns"), [(64, 576), (0, 512)])
def test_numbers_by_hand(rope, columns):
    plan = sm90(qk_rope_head_dim=rope)
    assert (plan.step, plan.d_half, plan.d_tail) == (128, 256, rope)
    # 16 columns a product of scores, three times over; 4 products of 64 weights for each of 3 half-blocks, twice.
    assert plan.expected_products == 3 * columns // 16 + 3 * 2 * 4
    # Q and two blocks of K, 64 rows each; weights of one block, or of both where no place of K is free for them.
    weights = 64 * 64 * (1 if rope else 2)
    assert plan.expected_shared == 2 * (3 * 64 * columns + weights) + 6 * 64 * 4


@pytest.mark.parametrize(
    ("latent", "rope", "pieces", "block_n"),
    [
        (64, 64, (64, 64, 0), 64),  # of V WG1 holds nothing
        (256, 64, (128, 128, 64), 64),
        (256, 32, (128, 128, 32), 64),
        (320, 64, (256, 64, 64), 64),
        (384, 32, (256, 128, 32), 64),
        (384, 128, (256, 128, 128), 64),
        (400, 80, (256, 256, 0), 64),  # RoPE fills the right half behind V, and zeros the rest
        (448, 128, (256, 256, 64), 64),
        (512, 16, (256, 256, 16), 64),
        (512, 80, (256, 256, 128), 32),
        (512, 128, (256, 256, 128), 32),
    ],
)
def test_a_row_is_cut_into_powers_of_two_by_hand(latent, rope, pieces, block_n):
    plan = make_plan(make_spec(kv_lora_rank=latent, v_head_dim=latent, qk_rope_head_dim=rope)).of(SparseFwdPlan)
    found = plan.sm90.pieces
    assert (found.left, found.right, found.tail) == pieces
    assert (plan.sm90.block_n, plan.sm90.step) == (block_n, 2 * block_n)
    assert (found.pads_v, found.pads_k) == (sum(pieces[:2]) > latent, sum(pieces) > latent + rope)
    # Q and two blocks of K; P of both warpgroups, but that WG0's takes the place of a tail of its size.
    probs = 64 * block_n * (1 if pieces[2] == block_n == 64 else 2)
    assert plan.sm90.expected_shared == 2 * ((64 + 2 * block_n) * sum(pieces) + probs) + 6 * 64 * 4
    assert plan.sm90.expected_products == 3 * sum(pieces) // 16 + 3 * 2 * block_n // 16
    assert [one.block_h for one in plan.sm90_swap_ab] == ([16] if block_n == 32 else [16, 32])


@given(d_v=st.integers(1, 600), behind=st.integers(0, 200))
def test_pieces_hold_every_row_that_is_not_refused_and_fit(d_v, behind):
    reason = row_pieces.refuses(d_v, d_v + behind)
    assert (reason is None) == (64 <= d_v <= 512 and d_v % 16 == behind % 16 == 0 and behind <= 128)
    if reason is not None:
        return
    pieces = row_pieces.cut_row(d_v, d_v + behind)
    assert {pieces.left, pieces.right} <= {64, 128, 256}
    assert pieces.tail in (0, 16, 32, 64, 128)
    assert pieces.right <= pieces.left <= d_v <= pieces.of_v  # padding is WG1's
    assert pieces.columns >= pieces.d_k
    assert not pieces.tail or pieces.of_v + pieces.tail // 2 < pieces.d_k  # half of the tail would not do
    plan = sm90(kv_lora_rank=d_v, v_head_dim=d_v, qk_rope_head_dim=behind)
    assert plan.expected_shared + BARRIERS <= TARGETS["sm90"].shared_limit


def test_pages_and_blocks_are_counted_in_columns_that_a_row_has():
    plan = make_plan(make_spec(kv_lora_rank=400, v_head_dim=400, qk_rope_head_dim=64)).of(SparseFwdPlan)
    assert (plan.sm90.d_k, plan.sm90.block_bytes) == (464, 64 * 464 * 2)
    assert plan.sm90.most_page * 464 <= 1 << 31 < (plan.sm90.most_page + 1) * 464


def tuned_spec(tmp_path, root, text):
    (tmp_path / "dsv32.yaml").write_text((root / "specs" / "dsv32.yaml").read_text())
    folder = tmp_path / "tuned" / "dsv32"
    folder.mkdir(parents=True)
    (folder / "sm90.yaml").write_text(text)
    return tmp_path / "dsv32.yaml"


def test_tuned_rows_select_the_calls_of_sm90_kernels(tmp_path, pytestconfig):
    rows = (Sm90Row(16, None), Sm90Row(64, 8), Sm90Row(None, 2))
    fits = make_plan(load(pytestconfig.rootpath / "specs" / "dsv32.yaml")).fits
    text = dump_tuned(
        "dsv32", "sm90", Tuned(sm90={"sparse_fwd": rows}), fits=fits, heads=128, device="a device", triton="3.6.0"
    )
    plan = load_plan(tuned_spec(tmp_path, pytestconfig.rootpath, text))
    assert plan.of(SparseFwdPlan).sm90.rows == rows


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sparse_fwd_sm90:\n  - {max_heads: 16}\n", "sm90.yaml:2:"),
        (
            "sparse_fwd_sm90:\n  - {max_heads: 16}\n  - {max_heads: 8}\n  - {min_tokens: 2}\n",
            "in the order of their heads",
        ),
        ("sparse_fwd_sm90:\n  - {min_tokens: 0}\n", "min_tokens"),
        ("sparse_fwd_sm90:\n  - {min_tokens: 1, backend: triton}\n", "backend"),
    ],
)
def test_invalid_tuned_rows_are_reported_at_their_place(tmp_path, pytestconfig, text, message):
    text += "fits: {sparse_fwd: sparse_fwd some}\n"
    with pytest.raises(MlagenError) as error:
        load_plan(tuned_spec(tmp_path, pytestconfig.rootpath, text))
    assert message in str(error.value)


def test_the_gluon_back_end_is_refused_without_a_kernel_for_the_cache(tmp_path, pytestconfig):
    text = (pytestconfig.rootpath / "specs" / "dsv32_nvfp4.yaml").read_text() + "\nbackend: gluon\n"
    (tmp_path / "dsv32_nvfp4.yaml").write_text(text)
    with pytest.raises(LimitError, match="no sm90 kernel reads a cache of"):
        load_plan(tmp_path / "dsv32_nvfp4.yaml")


@pytest.mark.parametrize(("name", "scale_columns"), [("glm53_fp8", 4), ("dsv41", 32)])
def test_caches_without_rope_of_their_own_have_a_kernel(name, scale_columns, pytestconfig):
    sm90 = load_plan(pytestconfig.rootpath / "specs" / f"{name}.yaml").of(SparseDecodePlan).sm90
    assert (sm90.d_tail, sm90.scale_columns) == (0, scale_columns)
    assert sm90.rows[-1].min_tokens is not None


def over_cache(layout, latent, rope, **changes):
    """The plan of sparse attention over a cache of such rows."""
    dims = {"kv_lora_rank": latent, "v_head_dim": latent, "qk_rope_head_dim": rope}
    return make_plan(make_spec(layout=layout, wrappers=("flash_mla_with_kvcache",), **(dims | changes)))


@pytest.mark.parametrize(
    ("layout", "latent", "rope", "unit", "scales"),
    [
        ("fp8_ds_mla", 512, 64, 16, 4),
        ("fp8_ds_mla", 512, 32, 16, 4),
        ("fp8_ds_mla", 256, 64, 8, 2),  # 392 bytes
        ("fp8_ds_mla", 256, 32, 8, 2),
        ("fp8_ds_mla", 256, 128, 8, 2),
        ("fp8_ds_mla", 256, 0, 8, 2),
        ("fp8_per_tensor", 512, 64, 16, 0),
        ("fp8_per_tensor", 512, 0, 16, 0),
        ("fp8_per_tensor", 256, 32, 16, 0),
    ],
)
def test_rows_of_e4m3_of_other_columns_are_read(layout, latent, rope, unit, scales):
    plan = over_cache(layout, latent, rope)
    sm90 = plan.of(SparseDecodePlan).sm90
    assert (sm90.pieces.left, sm90.pieces.right, sm90.pieces.tail) == (latent // 2, latent // 2, rope)
    assert (load_unit(plan.layout), sm90.scale_columns) == (unit, scales)
    assert unit >= least_unit(plan.layout)
    stored = StoredRows(sm90, plan.layout, None, dual=False)
    assert (1 << stored.unit_shift, stored.thread_columns * 32) == (unit, latent)
    assert stored.copies_tail == (rope > 0 and scales > 0)
    # Q and two blocks of K; P of both, but that WG0's takes a tail's place; 3 rows' statistics; 128 offsets and scales.
    tiles = 2 * (3 * 64 * (latent + rope) + 64 * 64 * (1 if rope == 64 else 2))
    assert sm90.expected_shared == tiles + 3 * 64 * 4 + 128 * (4 + 2 * scales)
    assert sm90.expected_shared + sm90.split_shared <= TARGETS["sm90"].shared_limit


@pytest.mark.parametrize(
    ("layout", "latent", "rope", "changes", "reason"),
    [
        (
            "fp8_ds_mla",
            384,
            64,
            {},
            "a row has 384 columns of V and 64 after them, and over such a cache it supports 256 and",
        ),
        ("fp8_ds_mla", 512, 128, {}, "a row has 512 columns of V and 128 after them"),
        (
            "fp8_ds_mla",
            256,
            256,
            {"v_head_dim": 512},
            "256 columns of a row have scales, and it supports scales of V's 512",
        ),
        ("fp8_per_tensor", 512, 48, {}, "a row has 512 columns of V and 48 after them"),
        ("fp8_per_tensor", 512, 64, {"dtype": "fp16"}, "no sm90 kernel reads a cache of fp8_per_tensor for fp16"),
        ("nvfp4_ds_mla", 512, 64, {}, "no sm90 kernel reads a cache of nvfp4_ds_mla for bf16"),
    ],
)
def test_rows_that_are_not_read_say_why(layout, latent, rope, changes, reason):
    assert over_cache(layout, latent, rope, **changes).of(SparseDecodePlan).sm90 is None
    with pytest.raises(LimitError, match=reason):
        over_cache(layout, latent, rope, backend="gluon", **changes)


def test_rows_whose_scales_no_load_reaches_are_not_read():
    how = {"rounding": "nearest", "divisor": 448, "floor": 1e-4, "floor_on": "amax"}
    scales = {"kind": "scales", "of": "latent", "dtype": "fp32", "tile": 128, **how}
    fields = (
        {"kind": "latent", "dtype": "e4m3"},
        scales,
        {"kind": "pad", "bytes": 8},
        {"kind": "rope", "dtype": "bf16"},
    )
    with pytest.raises(
        LimitError, match="a row of 664 bytes, or a field of it, is aligned to 8 bytes, and it needs 16"
    ):
        over_cache({"name": "padded", "fields": fields}, 512, 64, backend="gluon")


@pytest.mark.parametrize(
    ("latent", "rope", "rows"),
    [
        (512, 64, (Sm90Row(16, 16), Sm90Row(32, 16), Sm90Row(None, 3))),
        (512, 0, (Sm90Row(16, 16), Sm90Row(32, 16), Sm90Row(None, 3))),
        (512, 128, (Sm90Row(32, 16), Sm90Row(None, 1))),
        (256, 64, (Sm90Row(32, 16), Sm90Row(None, 1))),
    ],
)
def test_calls_with_few_heads_and_tokens_run_the_portable_kernel_for_all_dims(latent, rope, rows):
    assert sm90(kv_lora_rank=latent, v_head_dim=latent, qk_rope_head_dim=rope).rows == rows


@pytest.mark.parametrize(
    ("layout", "latent", "rope", "rows"),
    [
        ("fp8_ds_mla", 512, 64, ((16, 33), (32, 4), (64, 2), (None, 1))),
        ("fp8_ds_mla", 512, 0, ((16, 33), (32, 4), (64, 2), (None, 1))),
        ("fp8_per_tensor", 512, 64, ((16, 32), (32, 16), (None, 1))),
        ("fp8_per_tensor", 256, 64, ((16, 32), (32, 16), (None, 1))),
        ("fp8_ds_mla", 256, 64, ((16, 2), (None, 1))),  # 392 bytes
    ],
)
def test_calls_of_few_heads_and_tokens_over_caches_run_the_portable_kernel(layout, latent, rope, rows):
    expected = tuple(Sm90Row(*row) for row in rows)
    assert over_cache(layout, latent, rope).of(SparseDecodePlan).sm90.rows == expected
    assert over_cache(layout, latent, rope, backend="gluon").of(SparseDecodePlan).sm90.rows == (Sm90Row(None, 1),)


def test_of_two_layouts_those_of_v41_are_read_in_their_order_alone(pytestconfig):
    v41 = load_plan(pytestconfig.rootpath / "specs" / "dsv41.yaml")
    v4 = load_plan(pytestconfig.rootpath / "specs" / "dsv4_flash.yaml")
    assert reads_cache(v41.layout, v41.extra_layout)
    for layout, extra in [(v41.extra_layout, v41.layout), (v4.layout, v41.layout), (v41.layout, v4.layout)]:
        assert not reads_cache(layout, extra)
    for alone in (v41.layout, v41.extra_layout):
        assert not reads_cache(alone, None)
        assert not reads_cache(alone, alone)


def test_gluon_alone_is_had_over_a_cache_that_a_kernel_reads(tmp_path, pytestconfig):
    text = (pytestconfig.rootpath / "specs" / "dsv32_fp8.yaml").read_text() + "\nbackend: gluon\n"
    (tmp_path / "dsv32_fp8.yaml").write_text(text)
    assert load_plan(tmp_path / "dsv32_fp8.yaml").of(SparseDecodePlan).sm90.rows == (Sm90Row(None, 1),)


@pytest.mark.parametrize(("group", "heads", "rows"), [(2, 32, 131072), (4, 16, 65536)])
def test_neighbours_share_a_tile_and_a_bitmap(group, heads, rows, tmp_path):
    plan = make_plan(make_spec(shared_indices=group))
    union = plan.of(SparseFwdPlan).sm90_shared
    assert (union.group * union.heads, union.heads) == (64, heads)
    assert union.rows == (Sm90Row(heads, 512), Sm90Row(None, None))
    assert (union.window_rows * group, union.window_rows) == (32 * union.window, rows)
    assert union.most_rows <= 1 << union.row_bits
    assert union.row_bits + union.group <= 32
    assert union.words * union.fields == union.staged  # each row of a word may be named
    assert union.words_a_thread * 32 * union.num_warps == union.words
    assert union.expected_shared == 2 * 32768
    assert union.sm90 == replace(plan.of(SparseFwdPlan).sm90, registers=REGISTERS[group])
    # Groups that they cannot share are done again with the tile of calls of so many heads.
    found = enumerate_plan(plan, tmp_path)
    tiles = found.module("_tiles")
    table = tiles.SPARSE_FWD_TILES["sm90"]
    tile = next(tile for most, tokens, tile in table if most >= heads and tokens == tiles.ANY)
    jobs = [job for job in found.of("sm90", "_sparse_fwd_recompute_kernel") if ("INDEX_GROUP", 16) in job.constexprs]
    again = {(dict(job.constexprs)["BLOCK_H"], dict(job.constexprs)["BLOCK_N"], job.num_warps) for job in jobs}
    assert again == {(tile.block_h, tile.block_n, tile.num_warps)}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"targets": ("sm80", "sm100")}, "targets lack sm90"),
        ({"v_head_dim": 576}, "model.v_head_dim is 576, and it supports 64 to 512"),
        (
            {"qk_rope_head_dim": 80},
            "a row has 592 columns, and with Q two blocks of 64 do not fit shared memory",
        ),
        ({"qk_rope_head_dim": 32}, "V has 512 columns and 32 follow, which leaves too few registers for its loop"),
        ({"backend": "triton"}, "backend is triton, and its kernel needs gluon"),
        ({"wrappers": ("concat_and_cache_mla",)}, "no wrapper computes attention over unquantised rows"),
    ],
    ids=str,
)
def test_shared_indices_that_cannot_be_had_are_refused_with_the_reason(changes, reason):
    assert make_plan(make_spec(**changes)).union is None
    message = f"attention.shared_indices: got 4, which cannot be emitted: {reason}"
    with pytest.raises(LimitError, match=message):
        make_plan(make_spec(shared_indices=4, **changes))


@pytest.mark.parametrize("name", ["glm53_fp8", "dsv41"])
def test_caches_are_read_for_bf16_queries_alone(name, tmp_path, pytestconfig):
    text = (pytestconfig.rootpath / "specs" / f"{name}.yaml").read_text().replace("dtype: bf16", "dtype: fp16", 1)
    (tmp_path / f"{name}.yaml").write_text(text)
    assert load_plan(tmp_path / f"{name}.yaml").of(SparseDecodePlan).sm90 is None
    (tmp_path / f"{name}.yaml").write_text(text + "\nbackend: gluon\n")
    with pytest.raises(LimitError, match=r"no sm90 kernel reads a cache of .* for fp16"):
        load_plan(tmp_path / f"{name}.yaml")


def sm90_registers(plan):
    """The split of registers of each sm90 kernel's module."""
    found = {f"_{family.NAME}_sm90": family.sm90 for family in plan.tiled}
    if "_dense_decode_sm90" in found:
        found["_dense_decode_sm90_swap_ab"] = next(iter(plan.of(DenseDecodePlan).sm90_swap_ab), None)
    if "_sparse_fwd_sm90" in found:
        found["_sparse_fwd_sm90_swap_ab"] = next(iter(plan.of(SparseFwdPlan).sm90_swap_ab), None)
        found["_sparse_fwd_sm90_shared"] = plan.union and plan.union.sm90
    return {module: one.registers for module, one in found.items() if one is not None}


@pytest.mark.parametrize("name", ["dsv32", "dsv3", "glm53_fp8", "dsv41", "glm5_prefill", "dsv3_prefill_tma"])
def test_under_each_triton_a_kernel_has_the_split_of_registers_that_the_plan_gives_it(name, pytestconfig):
    plan = load_plan(pytestconfig.rootpath / "specs" / f"{name}.yaml")
    texts = {file.name.removesuffix(".py"): file.text for file in render(plan).files}
    splits = sm90_registers(plan)
    assert any(registers.under for registers in splits.values())
    for module, registers in splits.items():
        (expression,) = re.findall(r"^REGISTERS = gl\.constexpr\((.*)\)$", texts[module], re.MULTILINE)
        assert {triton for triton, _ in registers.under} <= set(MINORS)
        for triton in MINORS:
            assert tuple(eval(expression, {"TRITON": triton})) == dict(registers.under).get(triton, registers.split)
        assert ("from ._launch import TRITON" in texts[module]) == bool(registers.under)
