"""Writers and gathers: their cases, and packages of every kind of layout run on them."""

import re
from pathlib import Path

import pytest
from broken import check_mutants
from rotation import by_share, some
from verify_specs import dsv32_text, spec

from mlagen.emit import apply, compare, render
from mlagen.plan import load_plan
from mlagen.verify import mismatches, verify_package
from mlagen.verify.cache.cases import GatherCase, WriteCase, cases
from mlagen.verify.cache.fields import FieldsCase
from mlagen.verify.cache.sides import GATHERS, INSERT, REQUESTS, SHORT, WRITERS
from mlagen.verify.call.invalid import RefusedCase
from mlagen.verify.call.memory import LAYOUTS
from mlagen.verify.paged.values import AMAX, VALUES

pytestmark = pytest.mark.interpreter

WRAPPERS = [*WRITERS, *GATHERS]
DEVICES = ["cpu", "cuda"]
V4 = {"kv_lora_rank": 448, "qk_rope_head_dim": 64, "v_head_dim": 512}
NEAREST = "{ rounding: nearest, floor: 1.1754943508222875e-38, floor_on: scale }"


def scales(of: str, dtype: str, tile: int, **changes) -> str:
    """A field of scales, as a layout says it."""
    rule = {"rounding": "nearest", "divisor": 448, "floor": 0.001953125, "floor_on": "scale", **changes}
    given = ", ".join(f"{name}: {value}" for name, value in rule.items())
    return f"{{ kind: scales, of: {of}, dtype: {dtype}, tile: {tile}, {given} }}"


def layout(*fields: str, planar: tuple[str, ...] = (), more: str = "") -> str:
    """A layout of fields, as a spec says it."""
    text = f"{{ name: made_up, fields: [{', '.join(fields)}]"
    return text + (f", planar_fields: [{', '.join(planar)}]" if planar else "") + f"{more} }}"


def data(kind: str, dtype: str) -> str:
    return f"{{ kind: {kind}, dtype: {dtype} }}"


def build(folder: Path, name: str, cached: str, wrappers=WRAPPERS, extra: str = "", rule: str = "", **dims) -> Path:
    """A package of DeepSeek V3.2 with another cache, and with other dims."""
    text = dsv32_text().replace("name: dsv32", f"name: {name}")
    for field, value in dims.items():
        text = re.sub(rf"{field}: \w+", f"{field}: {value}", text)
    if extra:
        text = text.replace("topk: 2048", "window: 128\n  topk: 2048")
    head, _, rest = text.partition("cache:\n")
    tail = rest[rest.index("targets:") :]
    lines = [f"cache:\n  layout: {cached}", *([f"  scale_rule: {rule}"] if rule else [])]
    lines += [f"extra_cache:\n  layout: {extra}"] if extra else []
    lines += [f"wrappers: [{', '.join(wrappers)}]", tail]
    (folder / f"{name}.yaml").write_text(head + "\n".join(lines))
    apply(compare(render(load_plan(folder / f"{name}.yaml")), folder / name))
    return folder / name


@pytest.fixture(scope="module")
def packages(tmp_path_factory) -> dict[str, Path]:
    """A page-planar cache, one with scales of any fp32, and one of four bits."""
    folder = tmp_path_factory.mktemp("cache")
    return {
        "planar": build(folder, "planar", "ue8m0_v4", **V4),
        "quotients": build(folder, "quotients", "fp8_ds_mla", rule=NEAREST),
        "four_bit": build(folder, "four_bit", "nvfp4_ds_mla"),
    }


def messages(package: Path, **options) -> list[str]:
    results = verify_package(package, workers=1, **options)
    assert len(results) > 6
    return [str(error) for error in mismatches(results)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("name", "rank"), [("bf16", 512), ("fp8_ds_mla", 512), ("ue8m0_v4", 448)])
def test_cases_have_names_and_patterns_of_their_own(device, name, rank, packages):
    del packages
    said = spec(wrappers=WRAPPERS, kv_lora_rank=rank)
    said["cache"]["layout"] = named_layout(name)
    found = cases(said, device)
    names = [case.name for case in found]
    assert len(set(names)) == len(names)
    assert {type(case) for case in found} == {WriteCase, GatherCase, RefusedCase, FieldsCase}
    writes = [case for case in found if isinstance(case, WriteCase)]
    gathers = [case for case in found if isinstance(case, GatherCase)]
    assert {case.source for case in writes} | {case.out for case in gathers} <= set(LAYOUTS)
    assert {case.values for case in writes} <= set(VALUES)
    for case in found:
        assert case.promise[-1] not in " ."
        assert isinstance(case, FieldsCase) or f"({SHORT[case.wrapper]})" in case.name


def named_layout(name: str) -> dict:
    """A named layout as a package's SPEC holds it."""
    from mlagen.spec.stored import NAMED_LAYOUTS, Layout

    return Layout.model_validate(NAMED_LAYOUTS[name]).model_dump(mode="json")


@pytest.mark.parametrize("device", DEVICES)
def test_the_sizes_that_break_kernels_are_there(device):
    said = spec(wrappers=WRAPPERS, kv_lora_rank=448)
    said["cache"]["layout"] = named_layout("ue8m0_v4")
    found = cases(said, device)
    for kind in (WriteCase, GatherCase):
        mine = [case for case in found if isinstance(case, kind)]
        assert {1, 2, 53, 64, 69, 256, 480, 576} <= {case.pages.block_size for case in mine}
        assert any(case.pages.far for case in mine)
        assert any(case.pages.page_gap for case in mine)
        assert any(case.pages.offset for case in mine)
        assert {"uint8", "int8", "float8"} == {case.pages.dtype for case in mine}
    values = {case.values for case in found if isinstance(case, WriteCase)}
    assert values == set(VALUES)
    assert {0.0, 1e-5, 1e-4, 0.0447, 0.0448, 447.0, 448.0, 449.0, 448 * 2.0**-22, 448 * 2.0**6} <= set(AMAX)


def test_what_a_spec_lacks_is_left_out():
    (fields,) = cases(spec(wrappers=["flash_mla_sparse_fwd"]), "cpu")
    assert isinstance(fields, FieldsCase)
    for wrapper in WRAPPERS:
        found = cases(spec(wrappers=[wrapper]), "cpu")
        assert {case.wrapper for case in found if case != fields} == {wrapper}


@pytest.mark.parametrize(
    "name", [*(pytest.param(name, marks=pytest.mark.slow) for name in ("planar", "quotients")), "four_bit"]
)
@by_share
def test_a_package_of_each_kind_holds_its_cases(packages, name, choose):
    assert messages(packages[name], targets=["sm80", "sm90"], choose=choose) == []


MADE_UP = {
    "rows of one dtype": (layout(data("row", "bf16")), {}),
    "unquantised planes": (
        layout(
            data("latent", "bf16"),
            "{ kind: pad, bytes: 6 }",
            planar=(data("rope", "bf16"),),
            more=", page_multiple: row",
        ),
        {},
    ),
    "a tile holds latent and RoPE columns": (
        layout(data("row", "e4m3"), scales("row", "fp32", 64, floor="1.0e-4", rounding="power_of_two")),
        {"kv_lora_rank": 40, "qk_rope_head_dim": 40, "v_head_dim": 40},
    ),
    "scales that no block holds in order": (
        layout(data("latent", "e2m1"), scales("latent", "e4m3", 16, divisor=6, interleave=3), data("rope", "bf16")),
        {"kv_lora_rank": 96, "qk_rope_head_dim": 16, "v_head_dim": 96},
    ),
    "a last tile that is not full": (
        layout(
            data("latent", "e4m3"),
            scales("latent", "ue8m0", 32, rounding="power_of_two", floor="1.0e-4"),
            "{ kind: pad, bytes: 2 }",
            "{ kind: pad, bytes: 9 }",
            data("rope", "e4m3fnuz"),
        ),
        {"kv_lora_rank": 70, "qk_rope_head_dim": 8, "v_head_dim": 70},
    ),
    "e4m3 with e4m3 scales": (
        layout(data("latent", "e4m3"), scales("latent", "e4m3", 32), data("rope", "e4m3")),
        {"kv_lora_rank": 64, "qk_rope_head_dim": 32, "v_head_dim": 64},
    ),
    "four bits with scales of 32": (
        layout(data("latent", "e2m1"), data("rope", "bf16"), scales("latent", "fp32", 32, divisor=6, floor="1.0e-4")),
        {"kv_lora_rank": 64, "qk_rope_head_dim": 16, "v_head_dim": 64},
    ),
    "four bits without scales": (
        layout(data("latent", "e2m1"), data("rope", "e2m1")),
        {"kv_lora_rank": 64, "qk_rope_head_dim": 16, "v_head_dim": 64},
    ),
    "one scale a tensor, of fnuz": (
        layout(data("latent", "e4m3fnuz"), data("rope", "bf16"), "{ kind: tensor_scale, of: latent }"),
        {"kv_lora_rank": 64, "qk_rope_head_dim": 0, "v_head_dim": 64},
    ),
    "one scale a tensor, of four bits": (
        layout(data("row", "e2m1"), "{ kind: tensor_scale, of: row }"),
        {"kv_lora_rank": 64, "qk_rope_head_dim": 16, "v_head_dim": 80},
    ),
    "scales in the second plane": (
        layout(
            data("row", "e4m3fnuz"),
            planar=(
                scales("row", "fp32", 16, divisor=224, floor="1.0e-4", floor_on="amax"),
                "{ kind: pad, bytes: 12 }",
            ),
            more=", page_multiple: 512",
        ),
        {"kv_lora_rank": 64, "qk_rope_head_dim": 16, "v_head_dim": 80},
    ),
}


@pytest.mark.parametrize("name", some(MADE_UP, 2))
def test_any_layout_holds_what_its_bytes_make_different(tmp_path, name):
    cached, dims = MADE_UP[name]
    dims = {"kv_lora_rank": 48, "qk_rope_head_dim": 16, "v_head_dim": 48, **dims}
    package = build(tmp_path, "made_up", cached, **dims)
    only = ["*typical*", "*tiles*", "*not finite*", "*odd cache*", "*block size 53*", "refuses*"]
    assert messages(package, targets=["sm80"], only=only) == []


def test_a_second_cache_of_another_layout_has_a_module_of_its_own(tmp_path):
    package = build(tmp_path, "two_caches", "mxfp8_v41", [INSERT, REQUESTS], "nvfp4_v41", **V4)
    only = ["*typical*", "*every value*", "*tiles*", "extra refuses*"]
    assert messages(package, targets=["sm90"], only=only) == []
    names = {result.case for result in verify_package(package, workers=1, targets=["sm90"], only=["*typical*"])}
    assert {"writer: typical (insert)", "extra writer: typical (insert)", "extra gather: typical (requests)"} <= names


@pytest.mark.parametrize("name", ["planar", "quotients", "four_bit"])
@pytest.mark.slow
@pytest.mark.mutants
def test_every_mutant_is_reported(packages, tmp_path, name):
    more_than = 30 if name == "planar" else 5  # with those of any layout
    check_mutants("cache_mutants.py", packages[name], tmp_path, more_than=more_than)
