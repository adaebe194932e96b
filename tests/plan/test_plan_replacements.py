"""Rows by version of Triton: when each holds, its replacement, and the tables that packages make of them."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from checked_in import SPECS as CHECKED_IN
from hypothesis import given
from hypothesis import strategies as st

from mlagen.bench.package import load_package
from mlagen.emit import apply, compare, render
from mlagen.errors import LimitError, SpecErrors
from mlagen.plan import DenseFwdTile, Plan, SparseFwdPlan, Tile, TileRow, Tuned, make_plan
from mlagen.plan.tiles.replacements import PATH, Replacement, read_replacements
from mlagen.plan.tritons import MINORS, has_versions, minor, proved_for, rows_under
from mlagen.spec import load

ROOT = Path(__file__).parents[2]
SPECS = ROOT / "specs"
SPEC_OF = {
    "sparse_fwd": "dsv32",
    "sparse_decode": "glm5",
    "dense_decode": "dots3_sliding",
    "dense_fwd": "dsv3_prefill_tma",
}
SPLIT = {"tiles": ((3, 8), (3, 9)), "unaligned": ((3, 7),)}  # versions that the made-up entries are of


def part_of(plan: Plan, family: str) -> Any:
    return next(one for one in plan.families if family == one.NAME)


def smaller(tile: Any) -> Any:
    """Another tile, which fits where the tile does."""
    return replace(tile, num_warps=tile.num_warps // 2)


def plan_with(family: str, **instead: Any) -> tuple[Plan, Plan]:
    """The plan of a spec of the family without entries, and with one for each table on sm90."""
    spec = load(SPECS / f"{SPEC_OF[family]}.yaml")
    plan = make_plan(spec, Tuned(replacements=()))
    replacements = []
    for table, tritons in SPLIT.items():
        tile = dict(getattr(part_of(plan, family), table))["sm90"][-1].tile
        replacements.append(
            Replacement(plan.fits[family], table, "sm90", tile, tritons, instead.get(table, smaller(tile)))
        )
    return plan, make_plan(spec, Tuned(replacements=replacements))


def test_the_file_is_read_and_fits_the_plans_of_all_specs() -> None:
    known = {text for path in CHECKED_IN for text in make_plan(load(path), Tuned(replacements=())).fits.values()}
    assert {each.fits for each in read_replacements()} <= known


@pytest.mark.parametrize(
    ("installed", "proved"), [((3, 5), (3, 6)), ((3, 6), (3, 6)), ((3, 8), (3, 8)), ((3, 10), (3, 9)), ((4, 0), (3, 9))]
)
def test_other_tritons_take_the_rows_of_the_newest_that_is_not_newer(
    installed: tuple[int, int], proved: tuple[int, int]
) -> None:
    assert proved_for(installed) == proved


@given(last=st.sampled_from(MINORS), first=st.sampled_from(MINORS))
def test_a_row_holds_from_its_first_to_its_last_version(first: tuple[int, int], last: tuple[int, int]) -> None:
    row = TileRow(None, None, Tile(16, 16, 4, 2, False), 1, 1, "", tritons=(first, last))
    for triton in MINORS:
        assert rows_under([("sm90", (row,))], "sm90", triton) == ((row,) if first <= triton <= last else ())
    assert has_versions([("sm90", (row,))])
    assert not has_versions([("sm90", (replace(row, tritons=None),))])


@pytest.mark.parametrize("family", SPEC_OF)
def test_under_each_triton_a_table_is_as_before_but_for_tiles_that_are_held(family: str) -> None:
    before, after = plan_with(family)
    for table, tritons in SPLIT.items():
        old, new = getattr(part_of(before, family), table), getattr(part_of(after, family), table)
        assert has_versions(new)
        assert not has_versions(old)
        assert [target for target, _ in new] == [target for target, _ in old]
        replaced = dict(old)["sm90"][-1].tile
        for triton in MINORS:
            for target, rows in old:
                found = rows_under(new, target, triton)
                for row, mine in zip(rows, found, strict=True):
                    if target == "sm90" and triton in tritons and row.tile == replaced:
                        assert mine.tile == smaller(replaced)
                        assert mine.reason.startswith(f"instead of {replaced}, which spills under 3.")
                        assert mine.expected_shared > 0
                    else:
                        assert replace(mine, tritons=None) == row
                    for limit in ("max_heads", "max_tokens", "max_queries"):
                        assert getattr(mine, limit, 0) == getattr(row, limit, 0)


def test_a_replacing_row_names_the_replaced_tile() -> None:
    before, after = plan_with("sparse_fwd")
    rows = dict(after.of(SparseFwdPlan).tiles)["sm90"]
    replaced = dict(before.of(SparseFwdPlan).tiles)["sm90"][-1].tile
    assert [row.reason for row in rows if row.tritons == ((3, 8), (3, 9))] == [
        f"instead of {replaced}, which spills under 3.8 and 3.9"
    ]
    small = dict(after.of(SparseFwdPlan).unaligned)["sm90"]
    assert [row.tritons for row in small] == [((3, 6), (3, 6)), ((3, 7), (3, 7)), ((3, 8), (3, 9))]


def test_other_kernels_and_targets_keep_their_tiles() -> None:
    before, _ = plan_with("sparse_fwd")
    spec, tile = before.spec, dict(before.of(SparseFwdPlan).tiles)["sm90"][-1].tile
    for fits, table, target in (
        ("sparse_fwd d512 v512 bf16 partials fp16", "tiles", "sm90"),
        (before.fits["sparse_fwd"], "unaligned", "sm90"),
        (before.fits["sparse_fwd"], "tiles", "gfx942"),
    ):
        entry = Replacement(fits, table, target, tile, MINORS, smaller(tile))
        assert make_plan(spec, Tuned(replacements=[entry])) == before


def test_a_tile_that_is_held_everywhere_makes_way_without_versions() -> None:
    before, _ = plan_with("sparse_fwd")
    tile = dict(before.of(SparseFwdPlan).tiles)["sm90"][-1].tile
    entry = Replacement(before.fits["sparse_fwd"], "tiles", "sm90", tile, MINORS, smaller(tile))
    after = make_plan(before.spec, Tuned(replacements=[entry]))
    assert not has_versions(after.of(SparseFwdPlan).tiles)
    assert dict(after.of(SparseFwdPlan).tiles)["sm90"][-1].tile == smaller(tile)


def test_a_replacement_that_does_not_fit_is_reported_with_its_place() -> None:
    with pytest.raises(LimitError, match=r"tile 256x256 .* more than the 232,448 a program gets"):
        plan_with("sparse_fwd", tiles=Tile(256, 256, 8, 2, False))
    with pytest.raises(LimitError, match=r"tile 256x256 .* more than the 232,448 a program gets"):
        plan_with("dense_fwd", tiles=DenseFwdTile(256, 256, 8, 6))


@pytest.fixture(scope="module", params=SPEC_OF)
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Plan, Path]:
    """A family, a plan with rows by version, and the folder of its package."""
    _, plan = plan_with(request.param)
    folder = tmp_path_factory.mktemp("packages") / f"by_version_{request.param}"
    apply(compare(render(plan), folder))
    return request.param, plan, folder


def table_of(module: ModuleType, name: str, target: str) -> Any:
    return getattr(module, name)[target]


def test_a_package_has_the_rows_of_the_triton_at_hand(written: tuple[str, Plan, Path]) -> None:
    family, plan, folder = written
    package = load_package(folder)
    tiles, launch = package.module("_tiles"), package.module("_launch")
    assert proved_for(minor(importlib.metadata.version("triton"))) == launch.TRITON
    part = part_of(plan, family)
    for target, _ in part.tiles:
        rows = rows_under(part.tiles, target, launch.TRITON)
        table = table_of(tiles, f"{family.upper()}_TILES", target)
        assert [list(row[-1][:4]) for row in table] == [list(vars(row.tile).values())[:4] for row in rows]
        assert all(len(row) == len(table[0]) for row in table)
        (unaligned,) = rows_under(part.unaligned, target, launch.TRITON)
        assert (
            list(table_of(tiles, f"{family.upper()}_UNALIGNED_TILES", target)[:4])
            == list(vars(unaligned.tile).values())[:4]
        )


@pytest.mark.parametrize("triton", MINORS)
def test_for_triton_keeps_the_rows_of_one_version(
    written: tuple[str, Plan, Path], triton: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    family, _, folder = written
    launch = load_package(folder).module("_launch")
    tiles = load_package(folder).module("_tiles")
    tile = tiles.DenseFwdTile if family == "dense_fwd" else tiles.Tile
    a, b = (tile(*[size] * len(tile._fields)) for size in (16, 32))
    table = {"sm90": [(16, a), (32, a, (3, 6), (3, 7)), (32, b, (3, 8), (3, 9)), (64, b)], "sm80": [(a,)]}
    monkeypatch.setattr(launch, "TRITON", triton)
    assert launch.for_triton(table) == {
        "sm90": [(16, a), (32, a if triton <= (3, 7) else b), (64, b)],
        "sm80": [(a,)],
    }


def test_generated_tables_are_formatted(written: tuple[str, Plan, Path]) -> None:
    _, _, folder = written
    settings = ["--config", str(ROOT / "pyproject.toml")]
    subprocess.run([sys.executable, "-m", "ruff", "format", "--check", *settings, folder], check=True)
    subprocess.run([sys.executable, "-m", "ruff", "check", "--ignore", "E741", *settings, folder], check=True)


def test_packages_without_such_rows_do_not_speak_of_versions() -> None:
    for family in SPEC_OF:
        before, _ = plan_with(family)
        assert not any("for_triton(" in file.text for file in render(before).files if file.name != "_launch.py")


TILE = "{block_h: 32, block_n: 64, num_warps: 4, num_stages: 2, indices_ahead: true}"
OTHER, THIRD = (TILE.replace("num_warps: 4", f"num_warps: {warps}") for warps in (8, 2))
ENTRY = {
    "fits": "sparse_fwd d512+64 v512 bf16 partials fp16",
    "target": "sm90",
    "tritons": '["3.8", "3.9"]',
    "tile": TILE,
    "instead": OTHER,
}
HEADS = {"fits": "dense_fwd d128+64 v128 bf16 pointers"}
DENSE_FWD_TILE = "{block_m: 128, block_n: 128, num_warps: 8, num_stages: 2}"


def replacements_text(*entries: dict[str, str]) -> str:
    lines = [", ".join(f"{key}: {value}" for key, value in {**ENTRY, **each}.items()) for each in entries]
    return "replacements:\n" + "".join(f"  - {{{line}}}\n" for line in lines)


def test_entries_are_read(tmp_path: Path) -> None:
    path = tmp_path / "replacements.yaml"
    small = DENSE_FWD_TILE.replace("n: 128", "n: 64")
    path.write_text(replacements_text({}, {**HEADS, "table": "unaligned", "tile": DENSE_FWD_TILE, "instead": small}))
    first, second = read_replacements(path)
    assert replace(first, place=None) == Replacement(
        ENTRY["fits"],
        "tiles",
        "sm90",
        Tile(32, 64, 4, 2, True),
        ((3, 8), (3, 9)),
        Tile(32, 64, 8, 2, True),
    )
    assert (second.table, second.instead) == ("unaligned", DenseFwdTile(128, 64, 8, 2))
    assert str(second.place) == f"{path}:3:5"


@pytest.mark.parametrize(
    ("entries", "complaint"),
    [
        (
            [{"fits": "sparse d512"}],
            "2:12: replacements[0].fits: got 'sparse d512'; takes a text that begins with a family: sparse_fwd,",
        ),
        ([{"target": "sm70"}], "replacements[0].target: got 'sm70'; takes a target: sm80,"),
        ([{"tritons": '["3.5"]'}], "replacements[0].tritons[0]: got '3.5'; takes minor versions: 3.6, 3.7, 3.8, 3.9"),
        ([{"tritons": "[]"}], "replacements[0].tritons: "),
        ([{"instead": TILE}], "replacements[0].instead: takes a tile that differs from the replaced one"),
        ([HEADS], "replacements[0].tile: got block_h, indices_ahead; takes block_m, as a tile of dense_fwd"),
        (
            [{"tile": DENSE_FWD_TILE}],
            "replacements[0].tile: got block_m; takes block_h and indices_ahead, as a tile of sparse_fwd",
        ),
        ([{"table": "rows"}], "replacements[0].table: got 'rows'; takes"),
        (
            [{}, {"tritons": '["3.9"]'}],
            "3:5: replacements[1]: has a tile and a Triton that replacements[0] also has",
        ),
        (
            [{}, {"tile": OTHER, "instead": THIRD}],
            "replacements[0].instead: got a tile that replacements[1] replaces",
        ),
        (
            [{"tile": OTHER, "instead": THIRD}, {}],
            "replacements[1].instead: got a tile that replacements[0] replaces",
        ),
    ],
)
def test_entries_that_are_off_are_refused_at_their_place(
    tmp_path: Path, entries: list[dict[str, str]], complaint: str
) -> None:
    path = tmp_path / "replacements.yaml"
    path.write_text(replacements_text(*entries))
    with pytest.raises(SpecErrors) as caught:
        read_replacements(path)
    assert any(complaint in str(error) for error in caught.value.errors), str(caught.value)


def test_the_packaged_file_lies_beside_its_reader() -> None:
    assert PATH.parent == Path(read_replacements.__code__.co_filename).parent
