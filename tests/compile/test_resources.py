"""Limits and tables, on values made by hand."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from pathlib import Path

import pytest
from checked_in import spec_of
from rich.console import Console

from mlagen.compile import Resources, check_limits, default_cache_dir, resource_markdown, resource_table, target_table
from mlagen.compile.resources import SM90_MODULES
from mlagen.emit import render
from mlagen.plan import DenseDecodePlan, SparseDecodePlan, SparseFwdPlan, Tile, load_plan, make_plan
from mlagen.plan.tiles.allowed import allowed_spills, read_allowed
from mlagen.plan.tritons import TRITONS, minor
from mlagen.spec import Spec, load

ROOT = Path(__file__).parents[2]

FITS = Resources(
    module="_sparse_fwd_kernels",
    kernel="_sparse_fwd_kernel",
    variant="h<=16 [a|b]",
    target="sm90",
    num_warps=8,
    num_stages=2,
    triton="3.7.1",
    key="0123456789abcdef",
    registers=255,
    scalar_registers=None,
    spills=0,
    loop_spills=0,
    shared=232_448,
    shared_limit=232_448,
    block_h=16,
    tabled=True,
    tensor_memory=0,
    instructions={"HGMMA": 12},
    seconds=1.5,
    cached=False,
)


def test_the_limit_itself_fits():
    assert check_limits([FITS]) == []


def test_spills_outside_loops_fit():
    assert check_limits([replace(FITS, spills=8)]) == []


def test_each_broken_limit_is_an_error_of_its_own():
    over = replace(FITS, target="sm100", shared=232_449, spills=8, loop_spills=1200, tensor_memory=608)
    named = "_sparse_fwd_kernels._sparse_fwd_kernel [h<=16 [a|b]] for sm100 under Triton 3.7.1: "
    assert [error.message.removeprefix(named) for error in check_limits([over])] == [
        "shared memory 232,449 bytes - limit 232,448 bytes = 1 bytes too many",
        "spills inside loops: 1,200 spill loads and stores - limit 0 = 1,200 too many; "
        "spills 8 stack bytes a thread with 255 registers a thread and 8 warps a program in use",
        "tensor memory 608 columns - limit 512 columns = 96 columns too many",
    ]


def test_an_error_names_its_triton_and_those_within_the_limits():
    over = replace(FITS, loop_spills=35, triton="3.8.0")
    holds_under = {FITS.key: ["3.6.0", "3.7.1", "3.8.0"], "another": ["3.9.0"]}
    (error,) = check_limits([over], holds_under=holds_under, spec="dsv32")
    assert error.message.startswith(
        "_sparse_fwd_kernels._sparse_fwd_kernel [h<=16 [a|b]] for sm90 under Triton 3.8.0: "
    )
    assert error.message.endswith("; within the limits under Triton 3.6.0, 3.7.1")
    assert error.hint == (
        "fix with one of: --triton 3.7, which keeps the limits; a smaller tile or more warps (now 8) in sparse_fwd of "
        "tuned/dsv32/sm90.yaml next to the spec, with fits.sparse_fwd as `mlagen show plan` prints it; the spec's "
        "targets without sm90"
    )


@pytest.mark.parametrize(
    ("changes", "remedies"),
    [
        ({"module": "cache"}, []),
        ({"tabled": False}, []),
        ({"module": "_dense_decode_kernels", "tabled": False}, []),
        (
            {"module": "_dense_decode_kernels"},
            ["a smaller tile or more warps (now 8) in dense_decode of tuned/NAME/sm90.yaml"],
        ),
        ({"module": "_sparse_decode_kernels"}, ["in sparse_decode of tuned/NAME/sm90.yaml next to the spec"]),
        (
            {"module": "_sparse_decode_sm90"},
            ["`backend: auto` in the spec, which leaves out sm90 kernels over a limit"],
        ),
        (
            {"module": "_dense_fwd_kernels", "kernel": "_dense_fwd_descriptor_kernel"},
            ["`addressing: pointers` in the spec's multi_head"],
        ),
    ],
    ids=str,
)
def test_a_hint_names_fixes_for_a_kernel_over_a_limit(changes, remedies):
    (error,) = check_limits([replace(FITS, loop_spills=1, **changes)])
    first, *found, last = error.hint.removeprefix("fix with one of: ").split("; ")
    assert (first, last) == ("--triton with another version", "the spec's targets without sm90")
    assert len(found) == len(remedies)
    assert all(remedy in one for remedy, one in zip(remedies, found, strict=True))


@pytest.mark.parametrize(
    ("module", "name", "kind"),
    [
        ("_sparse_fwd_kernels", "dsv32", SparseFwdPlan),
        ("_sparse_decode_kernels", "dsv41", SparseDecodePlan),
        ("_dense_decode_kernels", "dsv3", DenseDecodePlan),
    ],
)
def test_the_file_that_a_hint_names_gives_a_spec_other_tiles_wherever_it_lies(tmp_path, module, name, kind):
    (error,) = check_limits([replace(FITS, loop_spills=1, module=module)], spec=name)
    table, file, fits = re.search(r"in (\w+) of (\S+) next to the spec, with fits\.(\w+) as", error.hint).groups()
    spec = tmp_path / "mine.yaml"
    spec.write_text(spec_of(name).read_text())
    tile = "{block_h: 16, block_n: 32, num_warps: 8, num_stages: 1, indices_ahead: true, programs_per_sm: 1}"
    text = f"fits: {{{fits}: '{load_plan(spec).fits[fits]}'}}\n{table}: [{tile}]\n"
    path = tmp_path / file
    path.parent.mkdir(parents=True)
    path.write_text(text)
    assert {row.tile for row in dict(load_plan(spec).of(kind).tiles)["sm90"]} == {Tile(16, 32, 8, 1, True)}


@pytest.mark.parametrize("name", ["dsv32", "dsv3", "glm53_fp8", "dsv3_prefill_tma", "odd"])
def test_a_spec_that_follows_its_hints_has_no_kernel_that_they_are_for(name):
    said = load(spec_of(name)).model_dump()
    said["backend"] = "triton"
    if said["attention"]:
        said["attention"].pop("shared_indices", None)
    if said["multi_head"]:
        said["multi_head"]["addressing"] = "pointers"
    files = render(make_plan(Spec.model_validate(said))).files
    assert not {Path(file.name).stem for file in files} & set(SM90_MODULES)
    assert not any("_dense_fwd_descriptor_kernel" in file.text for file in files)


def test_every_module_of_sm90_kernels_is_known():
    found = {path.stem for path in (ROOT / "generated").glob("*/_*.py")}
    assert {name for name in found if "_sm90" in name} <= set(SM90_MODULES)


def test_time_and_cache_do_not_count():
    again = replace(FITS, seconds=0.0, cached=True)
    assert again == FITS
    assert hash(again) == hash(FITS)
    assert again.to_json() == FITS.to_json()
    assert FITS.to_json()["instructions"] == {"HGMMA": 12}
    assert FITS.to_json()["spill_unit"] == "stack bytes a thread"


def test_table_keeps_brackets_and_numbers():
    console = Console(width=120, file=io.StringIO())
    console.print(resource_table([FITS]))
    text = console.file.getvalue()
    assert "h<=16 [a|b]" in text
    assert "232,448" in text
    assert "100 %" in text


def test_a_target_is_a_row_with_its_peaks_and_the_variants_over_a_limit():
    merge = replace(FITS, kernel="_merge_splits_kernel", key="another", registers=40, shared=0)
    over = replace(FITS, triton="3.8.0", loop_spills=35)
    other = replace(FITS, target="gfx942", num_warps=8, registers=128, shared=1024, shared_limit=65_536)
    console = Console(width=120, file=io.StringIO())
    console.print(target_table({"3.7.1": [FITS, merge, other], "3.8.0": [over]}, lambda one: bool(check_limits([one]))))
    _, *rows = [line.split() for line in console.file.getvalue().splitlines()]
    assert [" ".join(row) for row in rows] == [
        "sm90 2 2 255 of 255 100 % 232,448 of 232,448 100 % 35 1 under 3.8.0",
        "gfx942 1 1 128 of 256 50 % 1,024 of 65,536 2 % 0 -",
    ]


def test_markdown_is_one_row_a_kernel():
    assert resource_markdown(
        [FITS, replace(FITS, target="gfx942", spills=876, loop_spills=210, shared=0, shared_limit=65536)]
    ) == (
        "| kernel | variant | target | warps | stages | registers | spills | in loops | shared | limit | share |\n"
        "| --- | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |\n"
        "| _sparse_fwd_kernel | h<=16 [a\\|b] | sm90 | 8 | 2 | 255 | 0 | 0 | 232,448 | 232,448 | 100 % |\n"
        "| _sparse_fwd_kernel | h<=16 [a\\|b] | gfx942 | 8 | 2 | 255 | 876 | 210 | 0 | 65,536 | 0 % |\n"
    )


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("/tmp/xdg", Path("/tmp/xdg/mlagen")),
        ("relative", Path("/home/me/.cache/mlagen")),
        (None, Path("/home/me/.cache/mlagen")),
    ],
)
def test_cache_lies_where_the_desktop_specification_says(monkeypatch, value, expected):
    monkeypatch.setenv("HOME", "/home/me")
    if value is None:
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    else:
        monkeypatch.setenv("XDG_CACHE_HOME", value)
    assert default_cache_dir() == expected


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, ["12 wgmma instructions in the code - expected 13"]),
        ({"instructions": {}}, ["0 wgmma instructions in the code - expected 13"]),
        ({"instructions": {"HGMMA": 13}}, []),
        ({"block_h": 32}, []),  # not in the plan
        ({"kernel": "_sparse_fwd_split_kernel"}, []),
        ({"target": "sm100"}, []),
    ],
    ids=str,
)
def test_unexpected_products_of_listed_kernels_are_reported(changes, expected):
    errors = check_limits([replace(FITS, **changes)], {("_sparse_fwd_kernel", 16): 13})
    assert [error.message.partition("Triton 3.7.1: ")[2].partition(": ")[0] for error in errors] == expected


def test_a_hint_does_not_ask_for_a_spec_without_targets():
    (error,) = check_limits([replace(FITS, loop_spills=1)], targets=("sm90",))
    assert "targets without" not in error.hint


def test_spills_are_allowed_by_content_key_and_triton_and_not_by_name():
    (one, *_) = read_allowed()
    version = next(version for version in TRITONS if minor(version) == one.triton)
    spilling = replace(FITS, kernel=one.kernel, key=one.key, triton=version, loop_spills=one.spills)
    others = [each for each in TRITONS if allowed_spills(one.key, minor(each)) == 0]
    assert check_limits([spilling]) == []
    assert len(check_limits([replace(spilling, loop_spills=one.spills + 1)])) == 1
    assert len(check_limits([replace(spilling, key="0" * 16)])) == 1
    assert all(check_limits([replace(spilling, triton=each)]) for each in others)
