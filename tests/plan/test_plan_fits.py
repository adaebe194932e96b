"""Specs that tuned tables fit: those with the same kernels, under any name."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from checked_in import SPECS as CHECKED_IN
from checked_in import spec_of

from mlagen.errors import SpecErrors
from mlagen.plan import Plan, load_plan, make_plan
from mlagen.plan.tiles.fits import TILED, family_of
from mlagen.plan.tiles.tuned import TunedFiles, tuned_path
from mlagen.spec import NEEDS, load
from mlagen.spec.known import specs_dir

SPECS = Path(__file__).parents[2] / "specs"
ROW = "{block_h: 16, block_n: 32, num_warps: 4, num_stages: 1, indices_ahead: true, programs_per_sm: 3}"


def copied(folder: Path, name: str, as_name: str, **changes: str) -> Path:
    """A spec of the checkout in another folder, under another name; `changes` are of lines `key: value`.

    With changes it is without its indexer, so that each key has one line.
    """
    path = folder / f"{as_name}.yaml"
    text = spec_of(name).read_text().replace(f"name: {name}", f"name: {as_name}", 1)
    if changes:
        text = re.sub(r"^indexer(_cache)?:\n(  .*\n)+", "", text, flags=re.MULTILINE)
        indexing = "|".join(wrapper for wrapper, needs in NEEDS.items() if needs.indexer)
        text = re.sub(rf"^  - ({indexing})\b.*\n", "", text, flags=re.MULTILINE)
    for key, value in changes.items():
        (before,) = [line for line in text.splitlines() if line.strip().startswith(f"{key}:")]
        text = text.replace(before, before[: before.index(key)] + f"{key}: {value}")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def rows_of(plan: Plan, target: str = "sm90") -> Any:
    return dict(plan.latent[0].tiles)[target]


def write(folder: Path, name: str, fits: str, heads: int, kind: str = "sparse_fwd", warps: int = 4) -> Path:
    path = tuned_path(name, "sm90", folder)
    path.parent.mkdir(parents=True, exist_ok=True)
    row = ROW.replace("num_warps: 4", f"num_warps: {warps}")
    path.write_text(f"{kind}:\n  - {row}\nfits: {{{kind}: {fits}}}\nheads: {heads}\n")
    return path


def test_specs_and_their_tuned_tables_are_those_of_the_checkout() -> None:
    assert specs_dir() == SPECS


@pytest.mark.parametrize("name", sorted(path.parent.name for path in SPECS.glob("tuned/*/sm90.yaml")))
def test_a_tuned_file_is_of_its_own_spec(name: str) -> None:
    plan = load_plan(spec_of(name))
    files = TunedFiles(name, SPECS, plan.spec.model.num_heads)
    text = tuned_path(name, "sm90", SPECS).read_text()
    assert f"\nheads: {plan.spec.model.num_heads} #" in text
    for part in plan.latent:
        if part.fits in text:
            reasons = {row.reason for row in dict(part.tiles)["sm90"] if not row.reason.startswith("instead of ")}
            assert reasons == {f"tuned: {name} on sm90 (measured on NVIDIA H200, triton 3.6.0)"}
            if part.sm90 is not None:
                assert part.sm90.rows == files.sm90_rows(part.fits, "sm90")


@pytest.mark.parametrize("name", ["dsv32", "dsv3", "hyv4"])
def test_a_renamed_spec_elsewhere_has_all_rows_of_the_one_that_was_tuned(tmp_path: Path, name: str) -> None:
    tuned, mine = load_plan(spec_of(name)), load_plan(copied(tmp_path, name, "mine"))
    assert len(rows_of(tuned)) >= 6
    assert replace(mine, spec=tuned.spec) == tuned
    reasons = {row.reason for row in rows_of(mine) if not row.reason.startswith("instead of ")}
    assert reasons == {f"tuned: {name} on sm90 (measured on NVIDIA H200, triton 3.6.0)"}


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("dsv32", {"kv_lora_rank": "256", "v_head_dim": "256", "shared_indices": "null"}),
        ("dsv32", {"dtype": "fp16", "layout": "fp16"}),
        ("dsv32", {"partials": "bf16"}),
        ("dsv3", {"block_size": "32"}),
        ("dsv3", {"layout": "fp8_per_tensor"}),
        ("dsv3", {"kind": "dense\n  window: 512"}),
    ],
    ids=str,
)
def test_other_kernels_have_none_of_its_rows(tmp_path: Path, name: str, changes: dict[str, str]) -> None:
    mine = load_plan(copied(tmp_path, name, "mine", **changes))
    assert mine == make_plan(mine.spec)
    assert load_plan(spec_of(name)).fits != mine.fits


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("dsv32", {"num_heads": "16"}),
        ("dsv32", {"topk": "512"}),
        ("dsv32", {"attn_sink": "none"}),
        ("hyv4", {"title": "B"}),
    ],
    ids=str,
)
def test_run_time_arguments_do_not_change_fits(tmp_path: Path, name: str, changes: dict[str, str]) -> None:
    mine = load_plan(copied(tmp_path, name, "mine", **changes))
    tuned = load_plan(spec_of(name))
    assert mine.fits == tuned.fits
    assert rows_of(mine) != rows_of(make_plan(mine.spec))


def test_fits_describe_kernels_by_family() -> None:
    found = {path.stem: make_plan(load(path)).fits for path in CHECKED_IN}
    assert found["dsv32"] == {"sparse_fwd": "sparse_fwd d512+64 v512 bf16 partials fp16"}
    assert found["odd"]["sparse_fwd"] == "sparse_fwd d64+32+32 v96 fp16 pages 53 partials fp32"
    assert found["dsv3_prefill_tma"] == {"dense_fwd": "dense_fwd d128+64 v128 bf16 descriptors"}
    assert found["dsv3_prefill"]["dense_fwd"] == "dense_fwd d128+64 v128 bf16 pointers"
    assert found["dots3_sliding"]["dense_decode"].endswith(" pages 64 window partials fp32")
    assert found["dots3_sliding"] != found["kimi_k2"] == found["dsv3"] == found["mistral_large3"]
    assert found["dsv4_pro"]["sparse_decode"].count("ue8m0_v4:") == 2
    for each in found.values():
        assert all(family_of(text) == family for family, text in each.items())
        assert set(each) <= set(TILED)


def test_tables_beside_the_spec_go_before_those_of_mlagen_and_the_specs_own_before_others(tmp_path: Path) -> None:
    spec = copied(tmp_path, "dsv32", "mine")
    fits = load_plan(spec).fits["sparse_fwd"]
    write(tmp_path, "others", fits, 128)
    (row,) = rows_of(load_plan(spec))
    assert (row.tile.num_stages, row.programs_per_sm, row.reason) == (1, 3, "tuned: others on sm90")
    write(tmp_path, "mine", fits, 16)
    (row,) = rows_of(load_plan(spec))
    assert row.reason == "tuned: mine on sm90"
    write(tmp_path, "mine", fits, 16, warps=8)  # a file that changes is read anew
    (row,) = rows_of(load_plan(spec))
    assert row.tile.num_warps == 8


def test_of_others_that_of_as_many_heads_is_taken_or_of_the_next_more(tmp_path: Path) -> None:
    fits = "sparse_fwd some"
    for name, heads in (("a", 16), ("b", 128), ("c", 64), ("d", 64)):
        write(tmp_path, name, fits, heads)

    def taken(num_heads: int) -> str:
        found = TunedFiles("mine", tmp_path, num_heads)._find(fits, "sm90")
        assert found is not None
        return found.path.parent.name

    assert [taken(heads) for heads in (8, 16, 17, 64, 65, 128, 256)] == ["a", "a", "c", "c", "b", "b", "b"]


def test_a_spec_whose_own_table_is_of_other_kernels_is_refused(tmp_path: Path) -> None:
    spec = copied(tmp_path, "dsv32", "mine")
    path = write(tmp_path, "mine", "sparse_fwd d512+64 v512 bf16 partials bf16", 128)
    with pytest.raises(SpecErrors) as caught:
        load_plan(spec)
    assert str(caught.value) == (
        f"{path}:3:20: fits.sparse_fwd: got 'sparse_fwd d512+64 v512 bf16 partials bf16'; takes "
        "'sparse_fwd d512+64 v512 bf16 partials fp16', the kernels of mine"
    )


def test_tables_of_other_kernels_are_ignored(tmp_path: Path) -> None:
    spec = copied(tmp_path, "dsv32", "mine")
    before = load_plan(spec)
    write(tmp_path, "others", "sparse_fwd d512+64 v512 bf16 partials bf16", 128)
    write(tmp_path, "mine", "dense_decode d512+64", 128, kind="dense_decode")  # its own, of a family that it has not
    assert load_plan(spec) == before
    spec = copied(tmp_path / "more", "dsv32", "dsv3")  # a known spec's name, but other kernels
    assert rows_of(load_plan(spec)) == rows_of(before)


def test_a_table_names_its_kernels(tmp_path: Path) -> None:
    spec = copied(tmp_path, "dsv32", "mine")
    path = tuned_path("mine", "sm90", tmp_path)
    path.parent.mkdir(parents=True)
    path.write_text(f"heads: 16\nsparse_fwd:\n  - {ROW}\n")
    with pytest.raises(SpecErrors) as caught:
        load_plan(spec)
    message = "sparse_fwd: takes fits.sparse_fwd as well, the kernels that it is valid for"
    assert str(caught.value).startswith(f"{path}:3:3: {message}")
