"""The indexer's logits: their reference by hand, their cases, and packages run on them."""

import itertools
from pathlib import Path

import pytest
import torch
from broken import check_mutants
from rotation import by_share
from verify_specs import dsv32_text

from mlagen.emit import apply, compare, render
from mlagen.plan import load_plan
from mlagen.verify import mismatches, verify_package
from mlagen.verify.mqa_logits.cases import RANGES, FlatCase, PagedCase, ScheduleCase, cases
from mlagen.verify.mqa_logits.facts import FLAT_PAIR, PAGED_PAIR, SCHEDULE, WRAPPERS
from mlagen.verify.mqa_logits.inputs import schedule
from mlagen.verify.mqa_logits.reference import mqa_logits

pytestmark = pytest.mark.interpreter

PACKED = (FLAT_PAIR, PAGED_PAIR, SCHEDULE)
FNUZ = """
  layout:
    name: own
    fields:
      - {kind: row, dtype: e4m3fnuz}
      - {kind: pad, bytes: 4}
      - {kind: scales, of: row, tile: 64, dtype: fp32, rounding: nearest, divisor: 240, floor: 1e-4, floor_on: scale}"""


def package_of(folder: Path, heads: int, columns: int, layout: str, wrappers: tuple[str, ...] = WRAPPERS) -> Path:
    """DeepSeek V3.2's package with the logits and nothing else."""
    head, _, rest = dsv32_text().partition("wrappers:")
    tail = rest[rest.index("targets:") :].replace("partials: fp16", "#")
    indexer = (
        f"indexer: {{num_heads: {heads}, head_dim: {columns}, topk: 2048, rope_head_dim: 0}}\nindexer_cache:{layout}\n"
    )
    text = "".join(
        [head.replace("name: dsv32", "name: logits"), indexer, "wrappers: [", ", ".join(wrappers), "]\n", tail]
    )
    (folder / "logits.yaml").write_text(text)
    apply(compare(render(load_plan(folder / "logits.yaml")), folder / "logits"))
    return folder / "logits"


@pytest.fixture(scope="module")
def package(tmp_path_factory) -> Path:
    return package_of(tmp_path_factory.mktemp("logits"), 3, 24, " {layout: indexer_fp8}")


def test_logits_by_hand():
    q = torch.tensor([[[1.0, 2.0], [-1.0, 0.5]]]).double()
    k = torch.tensor([[3.0, 1.0], [-2.0, 4.0], [0.0, -1.0]]).double()
    found = mqa_logits(q, k, torch.tensor([1.0, 0.5, 2.0]).double(), torch.tensor([[2.0, -3.0]]).double())
    # Of heads: 5 and -2.5; 6 and 4; -2 and -0.5.
    assert found.values.tolist() == [[10.0, 0.5 * (12 - 12), 0.0]]
    assert found.size.tolist() == [[2 * 5 + 3 * 3.5, 0.5 * (2 * 10 + 3 * 4), 2 * (2 * 2 + 3 * 0.5)]]


@pytest.mark.parametrize("ranges", [1, 3, 7, 132])
def test_a_schedule_has_every_kv_block_once_and_ranges_differ_by_one(ranges):
    lengths = torch.tensor([130, 0, 1, 700, -4, 64, 0])
    kv_blocks = [
        (request, kv_block) for request, length in enumerate(lengths.tolist()) for kv_block in range(-(-length // 64))
    ]
    bounds = [tuple(row) for row in schedule(lengths, ranges, 64).tolist()]
    shared = [
        [kv_block for kv_block in kv_blocks if first <= kv_block < last] for first, last in itertools.pairwise(bounds)
    ]
    assert list(itertools.chain(*shared)) == kv_blocks
    assert max(map(len, shared)) - min(map(len, shared)) <= 1


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_cases_have_names_of_their_own_and_the_sizes_that_break_kernels(device, package):
    found = cases(load_plan(package.with_name("logits.yaml")).spec.model_dump(mode="json"), device)
    names = [case.name for case in found]
    assert len(set(names)) == len(names)
    flat = [case for case in found if isinstance(case, FlatCase)]
    paged = [case for case in found if isinstance(case, PagedCase)]
    assert {case.ranges for case in flat} == set(RANGES)
    assert {0, 1} <= {case.tokens for case in flat} & {case.keys for case in flat}
    assert any(case.tokens * case.keys > 2**31 for case in flat) == (device == "cuda")
    assert {1, 2, 3, 8} <= {case.next_n for case in paged}
    assert {1, 53, 64, 256} <= {case.block_size for case in paged}
    assert any(0 in case.lengths for case in paged)
    assert any(isinstance(case, ScheduleCase) for case in found)


@pytest.mark.slow
def test_a_package_of_fp8_keys_holds_every_case(package):
    results = verify_package(package, workers=1, targets=["sm90"])
    assert len(results) > 180
    assert [str(error) for error in mismatches(results)] == []


@pytest.mark.parametrize(
    ("heads", "columns", "layout", "wrappers"),
    [
        pytest.param(1, 20, " {layout: indexer_fp8}", WRAPPERS, marks=pytest.mark.slow),
        (16, 200, " {layout: indexer_mxfp4}", PACKED),
        pytest.param(32, 64, FNUZ, WRAPPERS, marks=pytest.mark.slow),
        pytest.param(128, 128, " {layout: indexer_mxfp4}", PACKED, marks=pytest.mark.slow),
    ],
)
@by_share
def test_any_heads_columns_and_layout_hold_on_every_target(heads, columns, layout, wrappers, tmp_path, choose):
    folder = package_of(tmp_path, heads, columns, layout, wrappers)
    only = ["*: typical", "*: next_n: 3", "*codes", "*NaN", "*: q odd", "*, tokenwise, clean", "*far apart*", "*words"]
    results = verify_package(folder, workers=1, only=only, choose=choose)
    assert len(results) > 9
    assert [str(error) for error in mismatches(results)] == []


@pytest.mark.slow
@pytest.mark.mutants
def test_every_mutant_is_reported(package, tmp_path):
    check_mutants("mqa_logits_mutants.py", package, tmp_path, more_than=35)
