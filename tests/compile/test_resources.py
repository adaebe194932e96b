"""Limits and tables, on values made by hand."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from mlagen.compile import Resources, check_limits, default_cache_dir, resource_markdown, resource_table

FITS = Resources(
    module="sparse_attention",
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
    messages = [error.message.removeprefix("sparse_attention._sparse_fwd_kernel ") for error in check_limits([over])]
    assert messages == [
        "[h<=16 [a|b]] for sm100: shared memory 232,449 bytes - limit 232,448 bytes = 1 bytes too many",
        "[h<=16 [a|b]] for sm100: spills inside loops: 1,200 stack instructions - limit 0 = 1,200 too many; "
        "spills 8 stack bytes a thread with 255 registers a thread and 8 warps a program in use",
        "[h<=16 [a|b]] for sm100: tensor memory 608 columns - limit 512 columns = 96 columns too many",
    ]


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
    ("changes", "told"),
    [
        ({}, ["12 warpgroup products in the code - expected 13"]),
        ({"instructions": {}}, ["0 warpgroup products in the code - expected 13"]),
        ({"instructions": {"HGMMA": 13}}, []),
        ({"block_h": 32}, []),  # of which the plan expects nothing
        ({"kernel": "_sparse_split_kernel"}, []),
        ({"target": "sm100"}, []),
    ],
    ids=str,
)
def test_products_that_the_plan_did_not_expect_are_told_of_the_kernels_that_it_names(changes, told):
    errors = check_limits([replace(FITS, **changes)], {("_sparse_fwd_kernel", 16): 13})
    assert [str(error).partition("sm90: ")[2].partition("\n")[0] for error in errors] == told
