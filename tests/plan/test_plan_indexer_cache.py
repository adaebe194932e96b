"""The numbers around the indexer's keys: every variant once, no kernel too many, and the refused specs."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from enumerated import Enumerated, check_every_list, enumerate_plan, kernels_in

from mlagen.errors import LimitError
from mlagen.plan import IndexerCachePlan, make_plan
from mlagen.plan.indexer import check_one_scale
from mlagen.spec import Spec

WRITE, GATHER, QUERY, NORMALISE, KEYS_QUERY = WRAPPERS = (
    "indexer_k_quant_and_cache",
    "cp_gather_indexer_k_quant_cache",
    "fused_indexer_q_rope_quant",
    "indexer_k_norm_rope_store",
    "indexer_qk_rope_quant_and_cache",
)
SCALES = {"kind": "scales", "of": "row", "dtype": "fp32", "tile": 128, "rounding": "nearest"}
SCALES |= {"divisor": 6.0, "floor": 1e-4, "floor_on": "amax"}


def indexed(layout: Any = "indexer_fp8", wrappers: tuple[str, ...] = WRAPPERS, **indexer: Any) -> Spec:
    """A spec with an indexer and nothing else."""
    rope = {"rope_head_dim": 64, "rope": "neox", "rope_at": "first"}
    return Spec.model_validate(
        {
            "name": "indexed",
            "title": "An indexer",
            "model": {"num_heads": 16, "dtype": "bf16"},
            "indexer": {"num_heads": 64, "head_dim": 128, "topk": 2048, **rope, **indexer},
            "indexer_cache": {"layout": layout},
            "wrappers": wrappers,
            "targets": ("sm90", "gfx942"),
        }
    )


def own(dtype: str, *scales: dict[str, Any]) -> dict[str, Any]:
    """A layout of keys, with such scales."""
    return {"name": "mine", "fields": ({"kind": "row", "dtype": dtype}, *scales)}


@pytest.fixture(scope="module")
def every(tmp_path_factory: pytest.TempPathFactory) -> Enumerated:
    return enumerate_plan(make_plan(indexed()), tmp_path_factory.mktemp("keys"))


def test_variants_are_of_both_alignments_and_of_each_dtype_that_may_be_given(every: Enumerated) -> None:
    check_every_list(every)
    assert {module for module, _ in every.kernels} == {"_indexer_cache_kernels"}
    for target, jobs in every.jobs.items():
        waits = {(dict(job.constexprs)["ALIGNMENT"], dict(job.constexprs)["PDL"]) for job in jobs}
        # Calls that are not aligned do not begin early: fewer variants to compile.
        assert waits == {(1, False), (16, False), *([(16, True)] if target == "sm90" else [])}
        for kernel, weights in (("_quantise_query_kernel", "FP32_WEIGHTS"), ("_normalise_keys_kernel", "FP32_WEIGHT")):
            given = {
                (dict(job.constexprs)["FP32_ANGLES"], dict(job.constexprs)[weights]) for job in every.of(target, kernel)
            }
            assert given == {(one, other) for one in (True, False) for other in (True, False)}
        both = every.of(target, "_keys_and_query_kernel")
        wide = {tuple(dict(job.constexprs)[f"FP32_{name}"] for name in ("ANGLES", "NORM", "WEIGHTS")) for job in both}
        assert wide == {*itertools.product((True, False), repeat=3)}
        assert len(jobs) == (54 if target == "sm90" else 36)


@pytest.mark.parametrize(
    ("wrapper", "kernel", "files"),
    [
        (WRITE, "_write_keys_kernel", {"_indexer_layout.py"}),
        (GATHER, "_gather_keys_kernel", {"_indexer_layout.py"}),
        (QUERY, "_quantise_query_kernel", {"_indexer_layout.py", "_indexer_query.py"}),
        (NORMALISE, "_normalise_keys_kernel", {"_indexer_layout.py"}),
        (KEYS_QUERY, "_keys_and_query_kernel", {"_indexer_layout.py", "_indexer_query.py"}),
    ],
)
def test_a_kernel_that_no_wrapper_launches_is_not_there(wrapper, kernel, files, tmp_path) -> None:
    found = enumerate_plan(make_plan(indexed(wrappers=(wrapper,))), tmp_path)
    assert found.kernels == kernels_in(found) == {("_indexer_cache_kernels", kernel)}
    assert {path.name for path in found.folder.glob("_indexer_[lq]*.py")} == files
    text = (found.folder / "_indexer_layout.py").read_text()
    assert ("store_row" in text) == (wrapper in (WRITE, NORMALISE, KEYS_QUERY))


def test_an_indexer_without_rope_leaves_no_trace_of_it(tmp_path) -> None:
    still = {"rope_head_dim": 0, "rope": None, "rope_at": None}
    found = enumerate_plan(make_plan(indexed(wrappers=WRAPPERS[:-1], **still)), tmp_path)
    check_every_list(found)
    text = (found.folder / "_indexer_cache_kernels.py").read_text()
    assert "ROPE" not in text
    assert "angles" not in text


def test_the_package_says_how_its_keys_are_stored(every: Enumerated) -> None:
    layout = make_plan(indexed()).of(IndexerCachePlan).rows.layout
    found = every.package.SPEC
    assert (found["indexer_layout"], found["indexer_row_bytes"]) == ("indexer_fp8", 132)
    assert found["indexer_layout_fingerprint"] == layout.fingerprint
    assert layout.fingerprint in (every.folder / "indexer_cache.py").read_text()


def test_a_program_has_no_more_heads_than_there_are() -> None:
    tiles = {
        heads: make_plan(indexed(num_heads=heads)).of(IndexerCachePlan).query_tile.rows for heads in (1, 5, 16, 64)
    }
    assert tiles == {1: 1, 5: 8, 16: 16, 64: 16}


@pytest.mark.parametrize(
    ("width", "layout", "changes"),
    [
        (32, "indexer_fp8", {}),
        (32, "indexer_fp8", {"rope": "gptj", "rope_at": "last"}),
        (32, "indexer_mxfp4", {}),
        (32, "indexer_mxfp4", {"head_dim": 256}),
        (16, "indexer_fp8", {"rope_head_dim": 32}),  # neox: halves of 16
        (32, "indexer_fp8", {"rope_head_dim": 32, "rope": "gptj"}),
        (16, "indexer_fp8", {"rope_head_dim": 16, "rope": "gptj", "rope_at": "last"}),
        (16, own("e2m1", {**SCALES, "tile": 16}), {}),
        (None, "indexer_fp8", {"rope_head_dim": 16}),  # halves of 8
        (None, "indexer_fp8", {"rope_head_dim": 40, "rope": "gptj", "rope_at": "last"}),  # begins at column 88
        (None, "indexer_fp8", {"rope_head_dim": 0, "rope": None, "rope_at": None}),
        (None, "indexer_mxfp4", {"head_dim": 512}),  # 16 slices
        (None, "indexer_mxfp4", {"head_dim": 96}),  # no power of two
    ],
)
def test_rows_are_taken_in_slices_that_nothing_divides(width, layout, changes) -> None:
    rows = make_plan(indexed(layout, WRAPPERS[:-1], **changes)).of(IndexerCachePlan).rows
    assert rows.slice_columns == width
    if width:
        indexer, scales = rows.indexer, rows.layout.scales_of(rows.values)
        span = indexer.rope_head_dim // (2 if indexer.rope == "neox" else 1)
        for edge in (rows.rope_start, span, indexer.head_dim, min(scales.tile, indexer.head_dim)):
            assert edge % width == 0


@pytest.mark.parametrize(
    ("layout", "found"),
    [
        (
            own("e4m3", {**SCALES, "divisor": 448.0, "tile": 64}),
            "e4m3 keys with 2 x fp32; takes one fp32 scale per key",
        ),
        (
            own("e4m3fnuz", {**SCALES, "dtype": "ue8m0", "rounding": "power_of_two"}),
            "e4m3fnuz keys with 1 x ue8m0; takes one fp32 scale per key",
        ),
    ],
)
def test_a_query_of_8_bits_takes_keys_of_one_fp32_scale(layout, found) -> None:
    make_plan(indexed(layout, (WRITE, GATHER, NORMALISE)))
    message = f"indexer_cache.layout: got mine, {found} with {QUERY}"
    with pytest.raises(LimitError) as caught:
        make_plan(indexed(layout))
    assert str(caught.value) == message
    rows = make_plan(indexed(layout, (WRITE,))).indexer_rows
    with pytest.raises(LimitError, match=r"with fp8_mqa_logits$"):
        check_one_scale(rows, "fp8_mqa_logits")


@pytest.mark.parametrize("layout", [own("e4m3"), own("e4m3", {"kind": "tensor_scale", "of": "row"})])
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_keys_without_scales_of_their_own_are_refused(layout, wrapper) -> None:
    with pytest.raises(LimitError, match=r"indexer_cache\.layout: got mine, a layout without tile scales; takes"):
        make_plan(indexed(layout, (wrapper,)))


def test_scales_of_4_bit_keys_may_be_any() -> None:
    for scales in (SCALES, {**SCALES, "tile": 16}, {**SCALES, "dtype": "e4m3", "tile": 16, "floor": 0.02}):
        assert make_plan(indexed(own("e2m1", scales))).indexer_rows.packed
