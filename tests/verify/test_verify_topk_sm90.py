"""The sm90 kernel of top-k against the reference, in numpy, and broken on purpose."""

import re
from pathlib import Path

import gluon_in_numpy
import numpy as np
import pytest
import torch
from verify_specs import dsv32_text

from mlagen.backends.sm90_topk import COLLECT_ARGUMENTS
from mlagen.emit import apply, compare, render
from mlagen.plan import load_plan
from mlagen.plan.topk_sm90 import LANES
from mlagen.verify.topk.cases import SCORE_PROMISES
from mlagen.verify.topk.inputs import scores_of
from mlagen.verify.topk.invalid import SHORT
from mlagen.verify.topk.reference import top_k

NONE = np.zeros(1, np.int32)
TILES = ((8, 2, 2048, 1), (16, 1, 2048, 1), (4, 1, 1024, 1), (4, 2, 1024, 3))  # warps, halves, capacity, parts
COLLECTS = [name for name, _ in COLLECT_ARGUMENTS]


@pytest.fixture(scope="module")
def package(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("topk_sm90")
    head, _, rest = dsv32_text().partition("wrappers:")
    text = f"{head}wrappers: [{', '.join(SHORT)}]\n\n{rest[rest.index('targets:') :]}"
    (folder / "dsv32.yaml").write_text(text)
    apply(compare(render(load_plan(folder / "dsv32.yaml")), folder / "picks"))
    return folder / "picks"


def select(module, scores, k, tile, ranges=None):
    """(indices, scores) that the kernel picks from rows of scores, by a tile."""
    rows, columns = scores.shape
    ranges = ranges or [(0, columns)] * rows
    indices, picked = np.full((rows, k), -7, np.int32), np.full((rows, k), 7, np.float32)
    starts, ends = (np.array(each, np.int32) for each in zip(*ranges, strict=True))
    arguments = {
        "logits_ptr": scores.numpy().ravel(), "starts_ptr": starts, "lens_ptr": ends, "page_table_ptr": NONE,
        "row_to_batch_ptr": NONE, "page_starts_ptr": NONE, "out_ptr": indices.ravel(), "scores_ptr": picked.ravel(),
        "raw_ptr": NONE, "candidates_ptr": NONE, "candidate_ids_ptr": NONE, "counts_ptr": NONE,
        "num_columns": columns, "k": k, "next_n": 1, "has_starts": 1, "lens_are_ends": 1, "gives_scores": 1,
         "gives_raw": 0, "has_pages": 0, "has_batches": 0, "has_page_starts": 0, "num_batches": 0,
        "num_pages": 0, "page_size": 1, "page_limit": 2**31 - 1, "page_multiplier": 0, "page_shift": 0,
        "logits_stride": columns, "page_table_stride": 0, "out_stride": k, "scores_stride": k, "raw_stride": 0,
    }  # fmt: skip
    warps, halves, capacity, parts = tile
    constexprs = {"ITEMSIZE": 4, "CAPACITY": capacity, "PARTS": parts, "WARPS": warps, "HALVES": halves, "PDL": False}
    if parts > 1 and columns > capacity:
        room = rows * parts * capacity
        arguments["candidates_ptr"], arguments["counts_ptr"] = np.full(room, np.nan, "f4"), np.full(room, -9, "i4")
        arguments["candidate_ids_ptr"] = np.full(room, -9, np.int32)
        given = {name: arguments[name] for name in COLLECTS}
        for program in range(rows * parts):
            gluon_in_numpy.run(module._topk_collect_sm90_kernel, program, given, constexprs)
    for row in range(rows):
        gluon_in_numpy.run(module._topk_sm90_kernel, row, arguments, {**constexprs, "IS_LONG": columns > capacity})
    return torch.from_numpy(indices), torch.from_numpy(picked)


def differing(module, tile, pattern, columns, k, ranges=None):
    """Rows of a pattern whose results are not the reference's."""
    scores = scores_of(pattern, len(ranges or (0, 0)), columns, torch.Generator().manual_seed(columns))
    if pattern == "misled":  # what the sample of a row sees are the largest, and k are not among them
        distance = columns // (4 * LANES * tile[0] * tile[1] // 8)
        scores += 100.0 * (torch.arange(columns) % max(distance, 8) < 8)
    indices, picked = select(module, scores, k, tile, ranges)
    wrong = []
    for row, values in enumerate(scores):
        first, end = (min(max(each, 0), columns) for each in (ranges or [(0, columns)] * len(scores))[row])
        want, found = top_k(values[first : max(first, end)], k)
        if not (
            torch.equal(indices[row], want) and torch.equal(picked[row].view(torch.int32), found.view(torch.int32))
        ):
            wrong.append(row)
    return wrong


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("pattern", SCORE_PROMISES)
def test_every_pattern_is_selected_from(package, monkeypatch, tile, pattern):
    module = gluon_in_numpy.stand_in(package, monkeypatch)
    capacity = tile[2]
    for columns in (capacity - 3, capacity, capacity + 1, 7 * capacity + 77):
        for k in (1, 100, capacity // 2):
            assert differing(module, tile, pattern, columns, k) == [], (columns, k)


def test_ranges_are_those_of_the_call(package, monkeypatch):
    module = gluon_in_numpy.stand_in(package, monkeypatch)
    starts, ends = (0, 3, 250, 401, 499, 500, 501, -7, 300), (100, 104, 500, 500, 9999, 9999, 500, 99, 200)
    assert differing(module, TILES[0], "normal", 500, 100, [*zip(starts, ends, strict=True)]) == []
    for tile in TILES[2:]:
        assert differing(module, tile, "ties", 3000, 100, [(1, 2999), (700, 1200), (1001, 9999), (-3, 2222)]) == []


@pytest.mark.parametrize("tile", TILES)
def test_a_sample_that_misleads_costs_time_alone(package, monkeypatch, tile):
    module = gluon_in_numpy.stand_in(package, monkeypatch)
    assert differing(module, tile, "misled", 6 * tile[2], 150) == []


RACED = {  # rows and picks that the search in memory decides after candidates were counted
    "few values": (torch.arange(9713)[None].mul(2654435761).remainder(3).sub(1).float(), 4096, (16, 2, 8192, 8)),
    "descending": (-torch.arange(38147.0)[None], 11, (16, 2, 8192, 8)),
    "descending, of few warps": (-torch.arange(20000.0)[None], 5, (4, 2, 1024, 3)),
    "descending, of one program": (-torch.arange(20000.0)[None], 5, (4, 2, 1024, 1)),
}


@pytest.mark.parametrize("name", RACED)
def test_warps_do_not_race_where_candidates_do_not_decide(package, monkeypatch, name):
    scores, k, tile = RACED[name]
    indices, _ = select(gluon_in_numpy.stand_in(package, monkeypatch), scores, k, tile)
    assert torch.equal(indices[0], top_k(scores[0], k)[0])


BARRIERS = ("_over_warps", "_find_bin", "_find_bin", "_collect", "_select_long", "_select_long", "_clear_shared")


@pytest.mark.parametrize("number", range(len(BARRIERS)))
def test_warps_race_without_any_barrier(package, monkeypatch, tmp_path, number):
    for file in package.glob("_topk_*.py"):
        text = file.read_text()
        if file.stem == "_topk_sm90":
            found = list(re.finditer(r"^ +_barrier\(\w+\)\n", text, flags=re.MULTILINE))
            assert len(found) == len(BARRIERS)
            begin, end = found[number].span()
            assert text[text.rindex("def ", 0, begin) :].startswith(f"def {BARRIERS[number]}(")
            text = text[:begin] + found[number][0].replace("_barrier(", "id(") + text[end:]
        (tmp_path / file.name).write_text(text)
    module = gluon_in_numpy.stand_in(tmp_path, monkeypatch)
    with pytest.raises(AssertionError, match="race"):  # noqa: PT012
        for scores, k, tile in RACED.values():
            select(module, scores, k, tile)


MUTANTS = {
    "parts forget where they begin": ("ids_ptr + place, begin + start", "ids_ptr + place, start", "normal"),
    "candidates are another part's": ("(part * CAPACITY)[", "((part + 1) * CAPACITY)[", "normal"),
    "a row's end is in no part": ("gl.cdiv(length, PARTS * LANES)", "length // (PARTS * LANES)", "ascending"),
    "all equals are picked": ("ties & (ties_before < wanted)", "ties", "equal"),
    "one equal more is picked": ("(ties_before < wanted)", "(ties_before <= wanted)", "ties"),
    "equals of earlier tiles are forgotten": ("ties_taken += whole >> 16", "ties_taken += 0", "equal"),
    "keys of earlier tiles are forgotten": ("            taken += whole\n", "            taken += 0\n", "normal"),
    "the bin's own keys are not looked at": ("narrows = more &", "narrows = (k < 0) & more &", "normal"),
    "a bin too far": ("digit = LAST - number", "digit = LAST - number - 1", "normal"),
    "what stands before is not taken off": ("left - before, left)", "left, left)", "normal"),
    "the largest keys are in no bin": ("shift).to(gl.int32), LAST)", "shift).to(gl.int32), LAST + 1)", "normal"),
    "the first bin ends as others do": ("gl.where(digit == LAST, span", "gl.where(digit > LAST, span", "wide"),
    "too few candidates are enough": ("((count >= k) |", "((count >= 0) |", "misled"),
    "too many candidates are enough": ("if (taken <= CAPACITY) &", "if (taken <= CAPACITY * 9) &", "equal"),
    "candidates are columns": ("if ids != 0:", "if ids < 0:", "normal"),
    "NaN is picked": ('gl.maximum(score, float("-inf")) + 0.0', "score + 0.0", "special"),
    "zeros are told apart": (' float("-inf")) + 0.0', ' float("-inf"))', "zeros"),
    "-inf is picked": ("- MINUS_INF_BITS\n", "- MINUS_INF_BITS + 1\n", "few"),
    "nothing is filled": ("range(number, k,", "range(k, k,", "few"),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_every_mutant_is_noticed(package, monkeypatch, tmp_path, name):
    old, new, pattern = MUTANTS[name]
    for file in package.glob("_topk_*.py"):
        text = file.read_text()
        if file.stem == "_topk_sm90":
            assert old in text
            text = text.replace(old, new)
        (tmp_path / file.name).write_text(text)
    module = gluon_in_numpy.stand_in(tmp_path, monkeypatch)
    found = False
    for columns, k in ((1000, 150), (1000, 700), (5000, 150), (5000, 700)):
        try:
            found |= any(differing(module, tile, pattern, columns, k) for tile in TILES[2:])
        except AssertionError:  # out of bounds
            found = True
    assert found
