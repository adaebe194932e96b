from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from checked_in import spec_of
from hypothesis import given, settings
from hypothesis import strategies as st

from mlagen import plan as plans
from mlagen.bench.package import load_package
from mlagen.bench.tune.tuned import Tuned
from mlagen.emit import apply, compare, render
from mlagen.errors import LimitError, SpecErrors
from mlagen.plan import TARGETS, DenseDecodePlan, Sm90Row, SparseFwdPlan, load_plan, make_plan
from mlagen.plan.tiles.tile import PlainRow, Tile, TileRow, make_row
from mlagen.plan.tiles.tuned import COLUMNS, TunedFiles, dump_tuned, tuned_path
from mlagen.spec import load

DENSE_DECODE_SPEC = Path(__file__).parents[3] / "specs" / "minicpm3.yaml"
PLAN = make_plan(load(spec_of("odd")))  # small rows: every tile fits
CHUNKS = PLAN.of(SparseFwdPlan).chunks
FITS = PLAN.fits["sparse_fwd"]
EVERY_FITS = {"sparse_fwd": FITS, "sparse_decode": "sparse_decode some", "dense_decode": "dense_decode some"}
H200 = {"device": "NVIDIA H200", "triton": "3.6.0"}

ROW = "{{{}block_h: 16, block_n: 32, num_warps: 4, num_stages: 2, indices_ahead: true, programs_per_sm: 2}}"


def text_of(*limits: str, kind: str = "sparse_fwd", fits: str = FITS) -> str:
    """A file with such a table, which comes first so that its lines count from 2."""
    return f"{kind}:\n" + "".join(f"  - {ROW.format(each)}\n" for each in limits) + f"fits: {{{kind}: {fits}}}\n"


def rows_of(folder: Path, name: str = "some", heads: int = 12, fits: str = FITS) -> dict[str, tuple[TileRow, ...]]:
    return TunedFiles(name, folder, heads).rows(fits, TARGETS, PlainRow(CHUNKS).row)


def write(folder: Path, text: str, target: str = "sm90") -> Path:
    path = tuned_path("some", target, folder)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def refused(folder: Path, text: str) -> list[str]:
    path = write(folder, text)
    with pytest.raises(SpecErrors) as caught:
        rows_of(folder)
    return [str(error).removeprefix(f"{path}:") for error in caught.value.errors]


tiles = st.builds(
    Tile,
    block_h=st.sampled_from([16, 32, 64]),
    block_n=st.sampled_from([16, 32, 64, 128]),
    num_warps=st.sampled_from([1, 2, 4, 8]),
    num_stages=st.integers(1, 4),
    indices_ahead=st.booleans(),
)


@st.composite
def tables(draw: st.DrawFn) -> tuple[TileRow, ...]:
    rows = []
    for heads in (*draw(st.lists(st.integers(1, 128), max_size=3, unique=True).map(sorted)), None):
        for tokens in (*draw(st.lists(st.integers(1, 1 << 20), max_size=3, unique=True).map(sorted)), None):
            row = make_row(draw(tiles), CHUNKS, TARGETS["sm90"], "", heads, tokens)
            rows.append(replace(row, programs_per_sm=draw(st.integers(1, 64))))
    return tuple(rows)


@given(tables())
def test_a_table_comes_back_as_it_was_written(
    tmp_path_factory: pytest.TempPathFactory, rows: tuple[TileRow, ...]
) -> None:
    folder = tmp_path_factory.mktemp("specs")
    write(
        folder,
        dump_tuned("some", "sm90", plans.Tuned({("sparse_fwd", "sm90"): rows}), fits=EVERY_FITS, heads=12, **H200),
    )
    found = rows_of(folder)
    assert {target: tuple(replace(row, reason="") for row in each) for target, each in found.items()} == {"sm90": rows}
    assert {row.reason for row in found["sm90"]} == {"tuned: some on sm90 (measured on NVIDIA H200, triton 3.6.0)"}


def test_the_file_says_where_its_figures_are_from() -> None:
    row = make_row(Tile(16, 32, 4, 2, True), CHUNKS, TARGETS["sm90"], "")
    tables = plans.Tuned({("sparse_fwd", "sm90"): [row]})
    text = dump_tuned("some", "sm90", tables, fits=EVERY_FITS, heads=12, **H200)
    assert text.startswith("# Tiles of some on sm90, measured on NVIDIA H200 with triton 3.6.0.")
    assert text == dump_tuned("some", "sm90", tables, fits=EVERY_FITS, heads=12, **H200)


def test_a_sweep_writes_the_tables_of_every_kind_of_attention(tmp_path: Path) -> None:
    row = make_row(Tile(16, 32, 4, 2, True), CHUNKS, TARGETS["sm90"], "")
    calls = (
        (Sm90Row(16, None), Sm90Row(64, 9), Sm90Row(None, 1)),
        (Sm90Row(None, 33),),
        (Sm90Row(32, None), Sm90Row(None, 5)),
    )
    tables = ((row,), (row,), (row,), *calls)
    tuned = Tuned("some", "sm90", *H200.values(), *tables, (), complete=True, fits=EVERY_FITS, heads=12)
    assert tuned.row_count == 3
    path = tuned.write(tmp_path)
    assert path == tuned_path("some", "sm90", tmp_path)
    files = TunedFiles("some", tmp_path, 12)
    assert [files.sm90_rows(EVERY_FITS[family], "sm90") for family in COLUMNS] == list(calls)
    text = path.read_text()
    assert [text.count(f"\n{kind}:") for kind in COLUMNS] == [1, 1, 1]
    assert (
        "\ndense_decode_sm90: # calls of so many requests and more run the sm90 kernel; without min_requests none do"
        "\n  - {max_rows: 32}\n  - {min_requests: 5}\n"
    ) in text


@pytest.fixture
def dense_decode_spec(tmp_path: Path) -> Path:
    """A spec of dense attention in a folder of its own."""
    path = tmp_path / DENSE_DECODE_SPEC.name
    path.write_text(DENSE_DECODE_SPEC.read_text())
    return path


@settings(deadline=None)  # the first example reads all tuned files
@given(rows=tables())
def test_a_table_of_dense_attention_comes_back_as_it_was_written(
    tmp_path_factory: pytest.TempPathFactory, rows: tuple[TileRow, ...]
) -> None:
    cached = load_plan(DENSE_DECODE_SPEC).of(DenseDecodePlan).cached

    def dense(row: TileRow) -> TileRow:
        tile = replace(row.tile, num_stages=1)  # which fits
        made = cached.row(tile, TARGETS["sm90"], "", row.max_heads, row.max_tokens)
        return replace(made, programs_per_sm=row.programs_per_sm)

    rows = tuple(map(dense, rows))
    folder = tmp_path_factory.mktemp("specs")
    write(
        folder,
        dump_tuned("some", "sm90", plans.Tuned({("dense_decode", "sm90"): rows}), fits=EVERY_FITS, heads=12, **H200),
    )
    found = TunedFiles("some", folder, 12).rows(EVERY_FITS["dense_decode"], ["sm90"], cached.row)["sm90"]
    assert tuple(replace(row, reason="") for row in found) == rows
    assert rows_of(folder) == {}


def test_a_package_takes_what_a_sweep_of_dense_attention_wrote(dense_decode_spec: Path) -> None:
    before = load_plan(dense_decode_spec)
    tile, small = Tile(64, 32, 8, 2, False), Tile(16, 64, 4, 2, True)
    cached = before.of(DenseDecodePlan).cached
    rows = (
        replace(cached.row(small, TARGETS["sm90"], "", 32, 4), programs_per_sm=3),
        replace(cached.row(tile, TARGETS["sm90"], "", 32, None), programs_per_sm=1),
        replace(cached.row(small, TARGETS["sm90"], ""), programs_per_sm=2),
    )
    fits, tables = before.fits, ((), (), rows, *[()] * 3)
    tuned = Tuned("minicpm3", "sm90", *H200.values(), *tables, (), complete=True, fits=fits, heads=40)
    tuned.write(dense_decode_spec.parent)
    plan = load_plan(dense_decode_spec)
    found, untuned = dict(plan.of(DenseDecodePlan).tiles), dict(before.of(DenseDecodePlan).tiles)
    assert [replace(row, reason="") for row in found["sm90"]] == list(rows)
    assert {row.reason for row in found["sm90"]} == {"tuned: minicpm3 on sm90 (measured on NVIDIA H200, triton 3.6.0)"}
    assert {**found, "sm90": None} == {**untuned, "sm90": None}
    folder = dense_decode_spec.parent / "minicpm3_tuned"
    apply(compare(render(plan), folder))
    table = load_package(folder).module("_tiles").DENSE_DECODE_TILES["sm90"]
    assert [(most, requests, tuple(tile)) for most, requests, tile in table] == [
        (32, 4, (16, 64, 4, 2, True, 3)),
        (32, 1 << 31, (64, 32, 8, 2, False, 1)),
        (1 << 31, 1 << 31, (16, 64, 4, 2, True, 2)),
    ]


@pytest.mark.parametrize("spec", ["dsv3", "dsv3_fp8", "dots3_sliding"])
def test_a_package_with_a_sm90_kernel_of_dense_attention_runs_the_calls_that_a_sweep_gave_it(
    tmp_path: Path, spec: str
) -> None:
    """Others, with a window, have no table of such calls."""
    path = tmp_path / f"{spec}.yaml"
    path.write_text((DENSE_DECODE_SPEC.parent / path.name).read_text())
    plan = load_plan(path)
    before = render(plan)
    calls = (Sm90Row(32, None), Sm90Row(64, 12), Sm90Row(None, 1))
    tables = (*[()] * 5, calls)
    Tuned(spec, "sm90", *H200.values(), *tables, (), complete=True, fits=plan.fits, heads=128).write(tmp_path)
    plan = load_plan(path)
    if spec != "dots3_sliding":
        sm90 = plan.of(DenseDecodePlan).sm90
        assert sm90 is not None
        assert sm90.rows == calls
        apply(compare(render(plan), tmp_path / f"{spec}_given"))
        table = load_package(tmp_path / f"{spec}_given").module("_tiles").DENSE_DECODE_SM90_CALLS
        assert table == [(32, (1 << 31) + 1), (64, 12), (1 << 31, 1)]
    else:
        assert render(plan) == before


@pytest.mark.parametrize(
    ("rows", "complaint"),
    [
        (["max_heads: 16", ""], "2:6: dense_decode_sm90[0].max_heads: unknown field; takes max_rows and min_requests"),
        (["min_tokens: 4"], "2:6: dense_decode_sm90[0].min_tokens: unknown field; takes max_rows and min_requests"),
        (["min_requests: 0"], "2:20: dense_decode_sm90[0].min_requests: got 0; takes"),
        (["max_rows: 16"], "2:16: dense_decode_sm90[0].max_rows: got 16; takes none in the last row"),
        (
            ["max_rows: 32", "max_rows: 32, min_requests: 4", ""],
            "3:5: dense_decode_sm90[1]: takes rows in the order of their rows",
        ),
    ],
)
def test_calls_of_the_dense_decode_sm90_kernel_that_are_off_are_refused(
    dense_decode_spec: Path, rows: list[str], complaint: str
) -> None:
    path = tuned_path("minicpm3", "sm90", dense_decode_spec.parent)
    path.parent.mkdir(parents=True)
    fits = "fits: {dense_decode: dense_decode some}\n"
    path.write_text("dense_decode_sm90:\n" + "".join(f"  - {{{row}}}\n" for row in rows) + fits)
    with pytest.raises(SpecErrors) as caught:
        load_plan(dense_decode_spec)
    assert str(caught.value.errors[0]).startswith(f"{path}:{complaint}")


@pytest.mark.parametrize(
    ("limits", "complaint"),
    [
        (["max_heads: 16, ", ""], "2:6: dense_decode[0].max_heads: unknown field"),
        (["max_rows: 0, ", ""], "2:16: dense_decode[0].max_rows: got 0; takes"),
        (["max_rows: 16, "], "2:16: dense_decode[0].max_rows: got 16; takes none in the last row"),
        (
            ["max_rows: 32, ", "max_rows: 16, ", ""],
            "3:5: dense_decode[1]: takes rows in the order of their rows, then of their requests",
        ),
        (
            ["max_rows: 16, max_requests: 8, ", ""],
            "2:34: dense_decode[0].max_requests: got 8; takes none in the last row of its rows",
        ),
    ],
)
def test_a_table_of_dense_attention_that_is_off_is_refused(
    dense_decode_spec: Path, limits: list[str], complaint: str
) -> None:
    path = tuned_path("minicpm3", "sm90", dense_decode_spec.parent)
    path.parent.mkdir(parents=True)
    path.write_text(text_of(*limits, kind="dense_decode"))
    with pytest.raises(SpecErrors) as caught:
        load_plan(dense_decode_spec)
    assert str(caught.value.errors[0]).startswith(f"{path}:{complaint}")


def test_a_tile_of_dense_attention_too_large_for_the_target_is_over_its_limit(dense_decode_spec: Path) -> None:
    path = tuned_path("minicpm3", "sm86", dense_decode_spec.parent)
    path.parent.mkdir(parents=True)
    fits = load_plan(dense_decode_spec).fits["dense_decode"]
    path.write_text(text_of("", kind="dense_decode", fits=fits).replace("block_n: 32", "block_n: 256"))
    with pytest.raises(LimitError, match=r"sm86: tile 16x256 .* more than the 101,376 a program gets") as caught:
        load_plan(dense_decode_spec)
    assert str(caught.value).startswith(f"{path}:2:5: ")


def test_a_spec_without_tuned_files_has_no_rows(tmp_path: Path) -> None:
    assert rows_of(tmp_path) == {}


def test_targets_have_files_of_their_own(tmp_path: Path) -> None:
    write(tmp_path, text_of("max_heads: 16, ", ""), "sm90")
    write(tmp_path, text_of(""), "gfx942")
    assert {target: len(rows) for target, rows in rows_of(tmp_path).items()} == {
        "gfx942": 1,
        "sm90": 2,
    }


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ("block_h: 16", None),
        ("block_h: 17", "2:15: sparse_fwd[0].block_h: got 17; takes a power of two"),
        ("block_h: 8", "2:15: sparse_fwd[0].block_h: got 8; takes an integer from 16 to 256"),
        ("block_n: 48", "sparse_fwd[0].block_n: got 48; takes a power of two"),
        ("num_warps: 3", "sparse_fwd[0].num_warps: got 3; takes a power of two"),
        ("num_warps: 16", "sparse_fwd[0].num_warps: got 16; takes an integer from 1 to 8"),
        ("num_stages: 7", "sparse_fwd[0].num_stages: got 7; takes an integer from 1 to 6"),
        ("num_stages: 2.5", "sparse_fwd[0].num_stages: got 2.5; takes an integer"),
        ("indices_ahead: 1", "sparse_fwd[0].indices_ahead: got 1; takes a boolean"),
        ("programs_per_sm: 0", "sparse_fwd[0].programs_per_sm: got 0; takes an integer from 1 to 64"),
        ("num_warpz: 4", "sparse_fwd[0].num_warpz: unknown field"),
    ],
)
def test_values_are_checked_at_their_place(tmp_path: Path, change: str, complaint: str | None) -> None:
    name = change.split(":")[0]
    entries = [entry for entry in ROW.format("").strip("{}").split(", ") if not entry.startswith(name)]
    text = f"sparse_fwd:\n  - {{{', '.join([change, *entries])}}}\nfits: {{sparse_fwd: {FITS}}}\n"
    if complaint is None:
        write(tmp_path, text)
        assert rows_of(tmp_path)
    else:
        assert any(complaint in error for error in refused(tmp_path, text))


@pytest.mark.parametrize(
    ("limits", "place"),
    [
        (["max_heads: 16, "], "2:17"),
        (["max_tokens: 16, "], "2:18"),
        (["", ""], "3:5"),
        (["", "max_heads: 16, "], "3:5"),
        (["max_heads: 32, ", "max_heads: 16, ", ""], "3:5"),
        (["max_tokens: 8, ", "max_tokens: 8, ", ""], "3:5"),
        (["max_heads: 16, max_tokens: 8, ", ""], "2:33"),
    ],
)
def test_tables_that_miss_a_call_or_have_dead_rows_are_refused(tmp_path: Path, limits: list[str], place: str) -> None:
    (error,) = refused(tmp_path, text_of(*limits))
    assert error.startswith(f"{place}: sparse_fwd[")


def test_a_file_for_no_target_is_refused(tmp_path: Path) -> None:
    write(tmp_path, text_of(""), "sm99")
    with pytest.raises(SpecErrors, match=r"sm99\.yaml: 'sm99' is not a target"):
        rows_of(tmp_path)


@pytest.mark.parametrize(
    "text", ["", "sparse_fwd: []", "sparse_fwd: 3", "sparse_fwd: [", "tiles: []", "sparse_fwd:\n  - 3\n", "- 1"]
)
def test_what_is_no_table_is_refused(tmp_path: Path, text: str) -> None:
    assert refused(tmp_path, text)


def test_a_tile_too_large_for_the_target_is_over_its_limit(tmp_path: Path) -> None:
    large = ROW.format("").replace("block_h: 16", "block_h: 256").replace("block_n: 32", "block_n: 256")
    path = write(tmp_path, f"sparse_fwd:\n  - {large}\nfits: {{sparse_fwd: {FITS}}}\n", "sm86")
    with pytest.raises(LimitError, match="bytes of shared memory") as caught:
        rows_of(tmp_path)
    assert str(caught.value).startswith(f"{path}:2:5: sm86: tile 256x256")
