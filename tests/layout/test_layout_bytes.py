"""Where the bytes of a cached token are, against numbers worked out by hand."""

from __future__ import annotations

import io
import itertools
import re
import subprocess
import sys
import tokenize
from dataclasses import FrozenInstanceError, replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from layout_specs import FNUZ, KEYS, NINE, OWN, ROOT, make, rows

from mlagen.layout import (
    CacheLayout,
    DataField,
    LayoutError,
    PadField,
    ScalesField,
    compose,
    indexer_layout_of,
    indexer_query_layout_of,
    layouts_of,
)
from mlagen.layout.layout import SCALES
from mlagen.spec.stored import INDEXER_DIMS, INDEXER_LAYOUTS, LAYOUT_DIMS, NAMED_LAYOUTS

SETTINGS = settings(max_examples=200, deadline=None, derandomize=True)

E2M1 = "512 x e2m1, two a byte, the even column in the low half"
TABLES = {
    "bf16": (1152, ("[0, 1024)     latent  512 x bf16", "[1024, 1152)  rope    64 x bf16")),
    "fp16": (1152, ("[0, 1024)     latent  512 x fp16", "[1024, 1152)  rope    64 x fp16")),
    "fp8_per_tensor": (576, ("[0, 576)  row     576 x e4m3, one scale a tensor",)),
    "fp8_ds_mla": (
        656,
        (
            "[0, 512)    latent         512 x e4m3",
            "[512, 528)  latent_scales  4 x fp32, one for 128 columns",
            "[528, 656)  rope           64 x bf16",
        ),
    ),
    "ue8m0_v4": (
        584,
        (
            "[0, 448)    latent         448 x e4m3",
            "[448, 576)  rope           64 x bf16",
            "behind the rows of all tokens of the page, for each token:",
            "[0, 7)      latent_scales  7 x ue8m0, one for 64 columns",
            "[7, 8)      pad            1 byte, 0",
            "a page is rounded up to a multiple of 576 bytes",
        ),
    ),
    "mxfp8_v41": (
        528,
        ("[0, 512)    row         512 x e4m3", "[512, 528)  row_scales  16 x ue8m0, one for 32 columns"),
    ),
    "nvfp4_v41": (
        288,
        (f"[0, 256)    row         {E2M1}", "[256, 288)  row_scales  32 x e4m3, one for 16 columns"),
    ),
    "nvfp4_ds_mla": (
        352,
        (
            f"[0, 256)    latent         {E2M1}",
            "[256, 320)  rope           64 x e4m3",
            "[320, 352)  latent_scales  32 x e4m3, one for 16 columns; scale s at byte 8 * (s % 4) + s // 4",
        ),
    ),
    "nvfp4_bf16_rope": (
        432,
        (
            f"[0, 256)    latent         {E2M1}",
            "[256, 288)  latent_scales  32 x e4m3, one for 16 columns",
            "[288, 304)  pad            16 bytes, 0",
            "[304, 432)  rope           64 x bf16",
        ),
    ),
}
BEHIND = "behind the rows of all tokens of the page, for each token:"
KEY_TABLES = {
    "indexer_fp8": (
        132,
        ("[0, 128)  row         128 x e4m3", BEHIND, "[0, 4)    row_scales  1 x fp32, one for 128 columns"),
    ),
    "indexer_mxfp4": (
        68,
        (
            "[0, 64)  row         128 x e2m1, two a byte, the even column in the low half",
            BEHIND,
            "[0, 4)   row_scales  4 x ue8m0, one for 32 columns",
        ),
    ),
}
# Bytes of a row without RoPE: 512 latent columns.
WITHOUT_ROPE = {
    "bf16": 1024,
    "fp16": 1024,
    "fp8_per_tensor": 512,
    "fp8_ds_mla": 528,
    "mxfp8_v41": 528,
    "nvfp4_v41": 288,
    "nvfp4_ds_mla": 288,
    "nvfp4_bf16_rope": 304,
}


@pytest.mark.parametrize("name", NINE)
def test_a_layout_has_the_bytes_that_the_field_gives_it(name):
    layout = make(name)
    assert (layout.row_bytes, layout.byte_table) == TABLES[name]
    assert layout.columns == sum(LAYOUT_DIMS.get(name, ((512, 64),))[0])


@pytest.mark.parametrize("name", KEYS)
def test_a_key_has_the_bytes_that_deepgemm_gives_it(name):
    layout = make(name)
    assert (layout.row_bytes, layout.byte_table) == KEY_TABLES[name]
    assert (layout.columns, layout.planar) == (128, True)
    for tokens in (1, 32, 64):
        assert layout.page_bytes(tokens) == tokens * KEY_TABLES[name][0]


def test_every_named_layout_of_keys_is_tested():
    files = sorted((ROOT / "mlagen" / "spec" / "layouts" / "indexer").glob("*.yaml"))
    assert [path.stem for path in files] == list(INDEXER_LAYOUTS) == list(INDEXER_DIMS) == list(KEY_TABLES)


def test_the_query_is_quantised_as_keys_are_but_for_what_its_rule_changes():
    keys = {"layout": INDEXER_LAYOUTS["indexer_fp8"], "scale_rule": {"rounding": "nearest", "floor": None}}
    spec = {"indexer": {"head_dim": 128, "q_scale_rule": {"floor": 1e-10, "rounding": None}}, "indexer_cache": keys}
    query = indexer_query_layout_of(spec)
    assert indexer_layout_of(spec) == make("indexer_fp8", rounding="nearest")
    assert [(field.name, field.count, field.plane) for field in query.fields] == [("row", 128, 0), ("row_scales", 1, 1)]
    assert query.fields[1].formula == "max(amax, 1e-10) / 448, to the nearest fp32"
    assert indexer_query_layout_of({"indexer": None, "indexer_cache": None}) is None


@pytest.mark.parametrize(("columns", "row"), [(96, 96), (97, 100)])
def test_a_query_of_any_width_keeps_its_scales_aligned(columns, row):
    own = {"name": "mine", "fields": [{**LATENT, "kind": "row"}, *([] if row == columns else [PAD])]}
    own["planar_fields"] = [{**SCALE, "of": "row"}]
    spec = {"indexer": {"head_dim": columns}, "indexer_cache": {"layout": own}}
    assert indexer_query_layout_of(spec).plane_bytes == (row, 4)


def test_every_named_layout_is_tested():
    assert set(TABLES) == {*NAMED_LAYOUTS, OWN["name"]}
    files = sorted((ROOT / "mlagen" / "spec" / "layouts").glob("*.yaml"))
    assert [path.stem for path in files] == list(NAMED_LAYOUTS) == list(LAYOUT_DIMS)


@pytest.mark.parametrize("name", WITHOUT_ROPE)
def test_a_model_without_rope_has_no_rope_in_any_layout(name):
    layout = make(name, 512, 0)
    assert (layout.row_bytes, layout.columns) == (WITHOUT_ROPE[name], 512)
    assert "rope" not in "\n".join(layout.byte_table)


def test_scales_follow_the_latent_with_rope_and_without():
    with_rope, without = make("fp8_ds_mla"), make("fp8_ds_mla", 512, 0)
    assert without.fields == with_rope.fields[:2]
    assert without.fields[1].offset == 512


@pytest.mark.parametrize(
    ("rank", "rope", "d_qk", "row_bytes"), [(512, 64, 576, 1152), (512, 0, 512, 1024), (256, 32, 288, 576)]
)
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_unquantised_rows_are_two_bytes_a_column(rank, rope, d_qk, row_bytes, dtype):
    layout = make(dtype, rank, rope)
    assert (layout.name, layout.columns, layout.row_bytes) == (dtype, d_qk, row_bytes)
    assert not layout.quantised


@pytest.mark.parametrize(("tokens", "nbytes"), [(2, 1728), (16, 9792), (64, 37_440), (128, 74_880), (256, 149_760)])
def test_a_planar_page_is_rounded_up_to_whole_rows(tokens, nbytes):
    layout = make("ue8m0_v4")
    assert layout.plane_bytes == (576, 8)
    assert layout.planar
    assert layout.page_bytes(tokens) == nbytes


@pytest.mark.parametrize("name", sorted({*NINE} - {"ue8m0_v4"}))
@pytest.mark.parametrize("tokens", [1, 53, 64])
def test_any_other_page_is_its_rows(name, tokens):
    layout = make(name)
    assert layout.page_bytes(tokens) == tokens * TABLES[name][0]
    assert (layout.planar, layout.plane_bytes) == (False, (TABLES[name][0],))


def test_fields_know_their_columns_their_scales_and_their_bytes():
    layout = make("nvfp4_ds_mla")
    latent, rope, scales = layout.fields
    assert isinstance(latent, DataField)
    assert isinstance(scales, ScalesField)
    assert (latent.first_column, rope.first_column) == (0, 512)
    assert (layout.scales_of(latent), layout.scales_of(rope)) == (scales, None)
    assert [field.nbytes for field in layout.fields] == [256, 64, 32]
    assert [field.itemsize for field in layout.fields] == [1, 1, 1]
    assert layout.data == (latent, rope)
    assert isinstance(make("ue8m0_v4").fields[3], PadField)


def test_scales_stand_in_the_order_of_the_layout():
    in_order, permuted = make("nvfp4_v41").fields[1], make("nvfp4_ds_mla").fields[2]
    assert [in_order.position(scale) for scale in range(32)] == list(range(32))
    positions = [permuted.position(scale) for scale in range(32)]
    assert positions[:9] == [0, 8, 16, 24, 1, 9, 17, 25, 2]
    assert positions == [8 * (scale & 3) + (scale >> 2) for scale in range(32)]
    assert sorted(positions) == list(range(32))


def test_the_table_says_where_wider_scales_of_another_order_are():
    fields = [dict(NAMED_LAYOUTS["fp8_ds_mla"]["fields"][1], interleave=2), *NAMED_LAYOUTS["fp8_ds_mla"]["fields"]]
    layout = compose({"name": "mine", "fields": [fields[0], fields[1], fields[3]]}, 512, 64)
    assert layout.byte_table[0].endswith("scale s at byte 8 * (s % 2) + 4 * (s // 2)")


@pytest.mark.parametrize(
    ("layout", "formula"),
    [
        (make("ue8m0_v4"), "2^ceil(log2(max(amax, 0.0001) / 448))"),
        (make("ue8m0_v4", floor_on="scale"), "2^ceil(log2(max(amax / 448, 0.0001)))"),
        (make("nvfp4_v41"), "max(amax / 6, 0.001953125), to the nearest e4m3"),
        (make("fp8_ds_mla", rounding="nearest", floor=2.0**-126), f"max(amax / 448, {2.0**-126}), to the nearest fp32"),
    ],
)
def test_a_scale_rule_reads_as_a_formula(layout, formula):
    assert [field.formula for field in layout.fields if isinstance(field, ScalesField)] == [formula]


def test_a_layout_cannot_be_changed():
    layout = make("ue8m0_v4")
    with pytest.raises(FrozenInstanceError):
        layout.name = "mine"
    with pytest.raises(FrozenInstanceError):
        layout.fields[2].rule.floor = 1.0
    assert hash(layout) == hash(make("ue8m0_v4"))


def test_a_spec_as_plain_data_gives_its_layouts():
    dims = {"kv_lora_rank": 448, "qk_rope_head_dim": 64}
    main = {"layout": NAMED_LAYOUTS["mxfp8_v41"], "block_size": 64, "scale_rule": None}
    second = {"layout": NAMED_LAYOUTS["nvfp4_v41"], "block_size": 64, "scale_rule": {"floor": 1.0, "divisor": None}}
    assert layouts_of({"model": dims, "cache": main}) == (make("mxfp8_v41"), None)
    assert layouts_of({"model": dims, "cache": main, "extra_cache": second}) == (
        make("mxfp8_v41"),
        make("nvfp4_v41", floor=1.0),
    )


@SETTINGS
@given(row=rows())
def test_fields_lie_end_to_end_in_each_plane(row):
    composition, rank, rope = row
    layout = compose(composition, rank, rope)
    offsets = [0, 0]
    for field in layout.fields:
        assert field.offset == offsets[field.plane]
        assert field.offset % field.itemsize == 0
        offsets[field.plane] += field.nbytes
    assert layout.plane_bytes == tuple(offsets[: len(layout.plane_bytes)])
    assert offsets[len(layout.plane_bytes) :] in ([], [0])
    assert layout.row_bytes == sum(offsets)
    assert [field.plane for field in layout.fields] == sorted(field.plane for field in layout.fields)


@SETTINGS
@given(row=rows())
def test_each_column_is_stored_once_and_each_scaled_column_has_a_scale(row):
    composition, rank, rope = row
    layout = compose(composition, rank, rope)
    column = 0
    for field in layout.data:
        assert field.first_column == column
        column += field.count
        scales = layout.scales_of(field)
        assert not (scales and field.tensor_scale)
        if scales:
            assert (scales.count - 1) * scales.tile < field.count <= scales.count * scales.tile
            assert sorted(map(scales.position, range(scales.count))) == list(range(scales.count))
    assert column == layout.columns == rank + rope


@SETTINGS
@given(row=rows())
def test_rows_and_pages_that_stand_end_to_end_keep_alignment(row):
    layout = compose(*row)
    widest = max(field.itemsize for field in layout.fields)
    for tokens in (1, 3, 64):
        assert layout.page_bytes(tokens) % widest == 0
        assert 0 <= layout.page_bytes(tokens) - tokens * layout.row_bytes < layout.page_multiple
    assert all(nbytes % widest == 0 for nbytes in layout.plane_bytes)


def test_fingerprints_tell_layouts_of_equal_bytes_apart():
    separate = {
        "name": "mxfp8_planar",
        "fields": NAMED_LAYOUTS["mxfp8_v41"]["fields"][:1],
        "planar_fields": NAMED_LAYOUTS["mxfp8_v41"]["fields"][1:],
    }
    alike = [make("fp8_ds_mla", 512, 0), make("mxfp8_v41"), compose(separate, 448, 64)]
    assert {layout.row_bytes for layout in alike} == {528}
    assert len({layout.fingerprint for layout in alike}) == 3
    four_bits = [make("nvfp4_v41"), make("nvfp4_ds_mla", 512, 0), make("fp8_per_tensor", 256, 32)]
    assert {layout.row_bytes for layout in four_bits} == {288}
    assert len({layout.fingerprint for layout in four_bits}) == 3


def test_fingerprints_depend_on_the_name_and_on_each_byte():
    variants = [
        make(name, rank, rope)
        for name, rank, rope in itertools.product(NINE, (448, 512), (0, 64))
        if name != "ue8m0_v4" or rank == 448
    ]
    latent, rope = make("bf16").fields
    swap_ab = (replace(rope, first_column=0, offset=0), replace(latent, first_column=64, offset=128))
    variants.append(CacheLayout("bf16", swap_ab, 1))
    variants += [replace(make("bf16"), name="mine"), replace(make("bf16"), page_multiple=4)]
    # A row knows no boundary between latent and RoPE columns: the same bytes, read the same.
    tables = {(layout.name, layout.byte_table) for layout in variants}
    assert len({layout.fingerprint for layout in variants}) == len(tables) > 30
    assert all(re.fullmatch("[0-9a-f]{16}", layout.fingerprint) for layout in variants)


def test_how_a_scale_is_found_is_no_part_of_the_fingerprint():
    plain, changed = make("fp8_ds_mla"), make("fp8_ds_mla", rounding="nearest", floor=1e-30)
    assert plain != changed
    assert plain.fingerprint == changed.fingerprint


LATENT = {"kind": "latent", "dtype": "e4m3"}
ROPE = {"kind": "rope", "dtype": "bf16"}
SCALE = {"kind": "scales", "of": "latent", "dtype": "fp32", "tile": 128}
SCALE |= {"rounding": "nearest", "divisor": 448.0, "floor": 1e-4, "floor_on": "scale"}
PAD = {"kind": "pad", "bytes": 3}


@pytest.mark.parametrize(
    ("fields", "at", "message"),
    [
        ([LATENT], ("fields",), "no rope columns"),
        ([{"kind": "pad", "bytes": 1}], ("fields",), "no latent columns"),
        ([LATENT, ROPE, LATENT], ("fields", 2, "kind"), "latent holds already"),
        ([{**LATENT, "kind": "row"}, ROPE], ("fields", 1, "kind"), "row holds already"),
        ([LATENT, {**SCALE, "of": "row"}, ROPE], ("fields", 1, "of"), "takes latent or rope"),
        ([LATENT, {**SCALE, "of": "rope"}, ROPE], ("fields", 1, "of"), "rope, which is bf16"),
        ([LATENT, SCALE, SCALE, ROPE], ("fields", 2, "of"), "has scales already"),
        ([LATENT, {**SCALE, "interleave": 3}, ROPE], ("fields", 1, "interleave"), "a divisor of 4"),
        ([{**LATENT, "dtype": "e2m1"}, SCALE, ROPE], ("fields", 1, "divisor"), "at most 6"),
        ([{**LATENT, "dtype": "e4m3fnuz"}, SCALE, ROPE], ("fields", 1, "divisor"), "at most 240"),
        ([LATENT, {**SCALE, "dtype": "ue8m0"}, ROPE], ("fields", 1, "rounding"), "power_of_two"),
        ([LATENT, {**SCALE, "dtype": "e4m3", "rounding": "power_of_two"}, ROPE], ("fields", 1, "rounding"), "nearest"),
        ([LATENT, {**SCALE, "floor": 1e-39}, ROPE], ("fields", 1, "floor"), "from 1.175e-38"),
        ([LATENT, {"kind": "pad", "bytes": 1}, ROPE], ("fields", 2), "byte 513; takes a multiple of 2"),
        ([LATENT, ROPE, {"kind": "pad", "bytes": 1}], ("fields",), "rows of 641 bytes; takes a multiple of 2"),
    ],
)
def test_what_no_row_can_be_is_refused_at_its_entry(fields, at, message):
    with pytest.raises(LayoutError, match=re.escape(message)) as caught:
        compose({"name": "mine", "fields": fields}, 512, 64)
    assert caught.value.at == at


@pytest.mark.parametrize("dtype", SCALES)
@pytest.mark.parametrize("floor_on", ["amax", "scale"])
def test_a_floor_gives_a_scale_that_its_dtype_holds(dtype, floor_on):
    rounding = "nearest" if dtype == "e4m3" else "power_of_two"
    scale = {**SCALE, "dtype": dtype, "rounding": rounding, "floor_on": floor_on, "divisor": 2.0}

    def layout(smallest: float) -> CacheLayout:
        floor = smallest * 2 if floor_on == "amax" else smallest
        return compose({"name": "mine", "fields": [LATENT, {**scale, "floor": floor}, ROPE]}, 512, 64)

    low, high = SCALES[dtype]
    assert layout(low) != layout(high)
    for outside in (low * (1 - 2**-20), high * (1 + 2**-20)):
        with pytest.raises(LayoutError, match="smallest scale"):
            layout(outside)


def test_a_floor_is_what_fp32_makes_of_it():
    # In decimals just below the smallest normal number, and nearest to it.
    layout = compose({"name": "mine", "fields": [LATENT, {**SCALE, "floor": 1.17549435e-38}, ROPE]}, 512, 64)
    assert layout.fields[1].rule.floor < 2.0**-126


def test_a_model_without_rope_needs_bytes_in_its_first_plane():
    with pytest.raises(LayoutError, match="no byte") as caught:
        compose({"name": "mine", "fields": [ROPE], "planar_fields": [LATENT], "page_multiple": "row"}, 512, 0)
    assert caught.value.at == ("fields",)


def test_the_layouts_of_fnuz_engines_have_a_divisor_that_fits():
    layout = make(FNUZ["name"])
    assert (layout.row_bytes, layout.fields[2].rule.divisor) == (656, 224)


def test_the_layout_needs_the_standard_library_alone():
    code = "import mlagen.layout, sys; print(sorted({'torch', 'numpy', 'pydantic', 'yaml'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# The columns and bytes of known rows, which other code bases repeat as literals.
ROW_SIZES = re.compile(r"\b(?:576|656|584|528|1152)\b")
# The sizes in peers' own kernels are facts of theirs.
PEERS = Path("mlagen/bench/peers")


def without_comments(text: str) -> str:
    """Python source without comments: they may name the dims of a measurement."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return " ".join(token.string for token in tokens if token.type != tokenize.COMMENT)


def test_no_row_size_stands_in_the_sources_as_a_literal():
    found = {}
    sources = [
        (ROOT / "mlagen").rglob("*.py"),
        (ROOT / "templates").rglob("*.jinja"),
        (ROOT / "mlagen").rglob("*.yaml"),
    ]
    for path in sorted(itertools.chain(*sources)):
        text = path.read_text(encoding="utf-8")
        sizes = ROW_SIZES.findall(without_comments(text) if path.suffix == ".py" else text)
        if sizes and path.relative_to(ROOT).parent != PEERS:
            found[str(path.relative_to(ROOT))] = sizes
    assert found == {}
