"""Layouts with fields in several tensors: positions of bytes, stored rows, and refusals."""

import pytest
import torch

from mlagen.layout import LayoutError, compose
from mlagen.layout.codec import encode, golden_page, golden_rows, planes_of, read, write
from mlagen.verify.cache.fields import check_fields

SCALES = {
    "kind": "scales",
    "of": "latent",
    "dtype": "fp32",
    "tile": 128,
    "rounding": "nearest",
    "divisor": 448,
    "floor": 1e-4,
    "floor_on": "amax",
    "tensor": "ckv_scale_arr",
}
KPE = {"kind": "rope", "dtype": "bf16", "tensor": "kpe_cache"}
TWO = {"name": "ckv_kpe", "fields": [{"kind": "latent", "dtype": "bf16"}, KPE]}
THREE = {"name": "three", "fields": [KPE, {"kind": "latent", "dtype": "e4m3"}, SCALES]}


def test_each_tensor_has_rows_of_its_own():
    layout = compose(TWO, 512, 64)
    assert (layout.tensors, layout.plane_bytes, layout.row_bytes) == (("kpe_cache",), (1024, 128), 1152)
    assert (layout.planar, layout.takes_heads) == (False, False)
    assert layout.page_bytes(64) == 64 * 1152
    assert [part.byte_table for part in layout.parts] == [
        ("[0, 1024)  latent  512 x bf16",),
        ("[0, 128)  rope    64 x bf16",),
    ]
    assert layout.byte_table == (
        "[0, 1024)  latent  512 x bf16",
        "in the tensor kpe_cache, for each token:",
        "[0, 128)   rope    64 x bf16",
    )


def test_the_cache_tensor_comes_first_and_the_others_as_they_are_named():
    layout = compose(THREE, 512, 64)
    assert layout.tensors == ("kpe_cache", "ckv_scale_arr")
    assert [(field.name, field.plane, field.offset) for field in layout.fields] == [
        ("latent", 0, 0),
        ("rope", 1, 0),
        ("latent_scales", 2, 0),
    ]
    assert [part.element for part in layout.parts] == ["u8", "bf16", "fp32"]
    assert [part.widest for part in layout.parts] == [1, 2, 4]


def test_a_model_without_rope_has_no_tensor_of_it():
    assert compose(THREE, 512, 0).tensors == ("ckv_scale_arr",)
    assert compose(TWO, 512, 0).parts == (compose(TWO, 512, 0),)


def test_a_layout_of_one_tensor_is_its_own_part():
    one = compose(
        {"name": "one", "fields": [{"kind": "latent", "dtype": "bf16"}, {"kind": "rope", "dtype": "bf16"}]}, 8, 4
    )
    assert one.parts == (one,)
    assert one.takes_heads


def test_fingerprints_tell_tensors_from_rows_and_planes():
    inside = {"name": "ckv_kpe", "fields": [{"kind": "latent", "dtype": "bf16"}, {"kind": "rope", "dtype": "bf16"}]}
    planar = {"name": "ckv_kpe", "fields": inside["fields"][:1], "planar_fields": inside["fields"][1:]}
    other = {"name": "ckv_kpe", "fields": [TWO["fields"][0], {**KPE, "tensor": "ckv_scale_arr"}]}
    assert len({compose(one, 512, 64).fingerprint for one in (TWO, inside, planar, other)}) == 4


@pytest.mark.parametrize("composition", [TWO, THREE])
def test_rows_come_back_from_pages_of_any_stride(composition):
    layout = compose(composition, 512, 64)
    size, slots = 4, torch.tensor([9, 0, 5, 11, -1, 12])
    wide = [torch.full((3, size, nbytes + 16), 0xA5, dtype=torch.uint8) for nbytes in layout.plane_bytes]
    pages = tuple(one[:, :, :nbytes] for one, nbytes in zip(wide, layout.plane_bytes, strict=True))
    rows = golden_rows(6, 576).to(torch.bfloat16)
    write(layout, pages, size, slots, rows)
    found = read(layout, pages, size, slots[:4])
    assert torch.allclose(found, rows[:4].float(), rtol=0.07, atol=0.02)
    assert torch.equal(found[:, 512:], rows[:4, 512:].float())
    for one, nbytes, plane in zip(wide, layout.plane_bytes, encode(layout, rows[:1]), strict=True):
        assert torch.equal(one[2, 1, :nbytes], plane[0])
        assert bool((one[:, :, nbytes:] == 0xA5).all())
        assert int((one[:, :, :nbytes] != 0xA5).any(2).sum()) == 4


def test_a_golden_page_is_a_page_of_each_tensor_in_turn():
    layout = compose(TWO, 512, 64)
    page = golden_page(layout, 8)
    latent, rope = page[: 8 * 1024].view(8, 1024), page[8 * 1024 :].view(8, 128)
    expected = golden_rows(8, 576).to(torch.bfloat16)
    assert torch.equal(latent.view(torch.bfloat16), expected[:, :512])
    assert torch.equal(rope.view(torch.bfloat16), expected[:, 512:])
    assert len(planes_of(layout, (latent[None], rope[None]), 8)) == 2


@pytest.mark.parametrize("composition", [TWO, THREE])
@pytest.mark.parametrize("rope", [0, 64])
def test_a_second_reader_finds_each_field_where_the_spec_lists_it(composition, rope):
    model = {"kv_lora_rank": 512, "qk_rope_head_dim": rope}
    assert check_fields({"model": model, "cache": {"layout": composition}}, "cache") == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"planar_fields": [{"kind": "pad", "bytes": 4}]}, "got kpe_cache; takes none with planar_fields"),
        ({"page_multiple": 64}, "got 64; takes 1, since fields lie in kpe_cache"),
        (
            {"fields": [{"kind": "row", "dtype": "bf16", "tensor": "kpe_cache"}]},
            "hold no byte of this model's rows in the",
        ),
        (
            {"fields": [TWO["fields"][0], {"kind": "pad", "bytes": 1, "tensor": "kpe_cache"}, KPE]},
            "rope would begin at byte 1",
        ),
        (
            {"fields": [*TWO["fields"], {"kind": "pad", "bytes": 1, "tensor": "kpe_cache"}]},
            "make rows of 129 bytes; takes a multiple of 2, the bytes of bf16",
        ),
    ],
)
def test_what_several_tensors_cannot_hold_is_refused(changes, message):
    with pytest.raises(LayoutError, match=message):
        compose({**TWO, **changes}, 512, 64)


def test_tensors_of_narrow_values_may_have_rows_of_any_size():
    fields = [{"kind": "latent", "dtype": "bf16"}, {"kind": "rope", "dtype": "e4m3", "tensor": "kpe_cache"}]
    assert compose({"name": "narrow", "fields": fields}, 8, 3).plane_bytes == (16, 3)
