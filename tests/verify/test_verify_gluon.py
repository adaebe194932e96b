"""sm90 kernels in numpy: each module against the reference, and broken on purpose."""

from pathlib import Path

import pytest
from broken import check_mutants
from gluon_mutants import OF_MODULE
from rotation import drawn, some

from mlagen.emit import apply, compare, render
from mlagen.plan import load_plan
from mlagen.verify import mismatches, verify_package
from mlagen.verify.call.subject import SIMULATED

pytestmark = pytest.mark.interpreter

SPECS = Path(__file__).parents[2] / "specs"
# Cases by spec. Each of its sm90 modules runs in one of them.
CASES = {
    "dsv32": (
        "sparse_fwd: typical (f*", "sparse_fwd: splits: 3", "sparse_fwd: neighbours: 75*", "prefill: 4 warps of 3: *",
        "prefill: 4 warps of 1: *", "flat: typical", "paged: typical",
    ),
    "dsv32_fp8": ("sparse_decode: typical", "sparse_decode: heads: 17"),
    "dsv32_fp8_tensor": ("sparse_decode: typical", "sparse_decode: e4m3: q, 3 heads, s_q 1"),
    "dsv4_flash": ("sparse_decode: typical",),
    "dsv41": ("sparse_decode: typical",),
    "dsv3": ("dense_decode: typical", "dense_decode: typical, shared"),
    "dsv3_fp8": ("dense_decode: typical", "dense_decode: e4m3: wide*"),
    "dsv3_fp8_products": ("dense_decode: typical", "dense_decode: e4m3: wide*"),
    "dsv3_prefill": ("dense_fwd: typical, causal",),
    "dsv3_prefill_tma": ("dense_fwd: typical, causal", "dense_fwd: typical, all keys"),
}  # fmt: skip
SPEC_OF = {
    "_dense_fwd_sm90": "dsv3_prefill",
    "_sparse_decode_sm90": "dsv32_fp8",
    "_sparse_decode_sm90_e4m3": "dsv32_fp8_tensor",
    "_dense_decode_sm90": "dsv3",
    "_dense_decode_sm90_swap_ab": "dsv3",
    "_dense_decode_sm90 of e4m3": "dsv3_fp8",
    "_dense_decode_sm90_rows32": "dsv3_fp8",
    "_dense_decode_sm90_q_halves": "dsv3_fp8",
    "_dense_decode_sm90 of e4m3 P": "dsv3_fp8_products",
    "_dense_decode_sm90_rows32 of e4m3 P": "dsv3_fp8_products",
}
QUICK = drawn(("_topk_sm90", "_sparse_fwd_sm90"), 1)  # its mutants are in each run


@pytest.fixture(scope="session")
def rendered(tmp_path_factory):
    """The package of a spec, by the spec's name."""
    packages: dict[str, Path] = {}

    def package(name: str) -> Path:
        if name not in packages:
            packages[name] = tmp_path_factory.mktemp(name) / name
            apply(compare(render(load_plan(SPECS / f"{name}.yaml")), packages[name]))
        return packages[name]

    return package


@pytest.mark.parametrize("name", some(CASES, 5))
def test_sm90_kernels_hold_their_cases_in_numpy(rendered, name):
    results = verify_package(rendered(name), workers=1, targets=[*SIMULATED], only=CASES[name])
    assert len(results) >= len(CASES[name])
    assert [str(error) for error in mismatches(results)] == []
    assert all(result.skipped is None for result in results)


@pytest.mark.mutants
@pytest.mark.parametrize(
    "module", [pytest.param(module, marks=[pytest.mark.slow] * (module not in QUICK)) for module in OF_MODULE]
)
def test_every_mutant_of_an_sm90_kernel_is_noticed(rendered, tmp_path, module):
    package = rendered(SPEC_OF.get(module, "dsv32"))
    check_mutants("gluon_mutants.py", package, tmp_path, module, more_than=2)
