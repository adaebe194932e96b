"""Which kernel a call of dense attention over e4m3 runs, by its sizes and the device's memory."""

import pytest
from plan_specs import ROOT

from mlagen.bench import load_package


@pytest.mark.parametrize(
    ("requests", "keys", "heads", "e4m3", "batch_invariant", "rows"),
    [
        (128, 4096, 16, True, False, 32),
        (16, 4096, 64, True, False, 32),
        (24, 4096, 64, True, False, 64),
        (1, 32768, 64, True, False, 32),
        (8, 32768, 64, True, False, 64),
        (8, 4096, 128, True, False, 32),
        (16, 4096, 128, True, False, 64),
        (1, 32768, 128, True, False, 32),
        (2, 32768, 128, True, False, 64),
        (2, 4096, 256, True, False, 32),
        (128, 32768, 128, False, False, 64),
        (63, 4096, 64, False, False, 32),
        (64, 4096, 64, False, False, 64),
        (3, 32768, 128, False, False, 32),
        (4, 32768, 128, False, False, 64),
        (15, 4096, 256, False, False, 32),
        (16, 4096, 256, False, False, 64),
        (128, 32768, 32, False, False, 32),
        (128, 32768, 128, False, True, 32),
        (1, 64, 64, True, True, 64),
        (64, 4096, 64, True, True, 64),
        (64, 4096, 32, True, True, 32),
        (4, 1024, 17, True, False, 32),
        (4, 1024, 16, False, True, 32),
        (1, 512, 1, False, False, 32),
        (2**12, 2**30, 32, True, False, 32),
    ],
)
def test_calls_over_e4m3_run_the_kernel_that_fits_them(requests, keys, heads, e4m3, batch_invariant, rows):
    package = load_package(ROOT / "generated" / "dsv3_fp8")
    dense, launch = package.root.dense_decode, package.root._launch
    facts = launch.DeviceFacts("sm90", 132, memory_rate=4800)
    found = dense.schedule(facts, 16, requests, 1, heads, 1, 64, keys, batch_invariant, True, e4m3)
    kernel = "sm90_rows32" if rows == 32 else "sm90" if e4m3 else "sm90_q_in_parts"
    assert (found.kernel, found.tile.block_h) == (kernel, rows)
    assert (found.overhead, found.combine_units) == ((0, 0) if batch_invariant else (3, 3))
    portable = dense.schedule(facts, 16, requests, 1, heads, 1, 64, keys, batch_invariant, False, e4m3)
    assert (portable.kernel, portable.overhead) == ("portable", 0 if batch_invariant else 1)
    assert portable.combine_units == (0 if batch_invariant else 6)


@pytest.mark.parametrize(
    ("heads", "e4m3", "slow", "fast"),
    [(64, True, 160, 80), (128, True, 48, 40), (256, True, 24, 20), (64, False, 384, 256), (128, False, 112, 128)],
)
def test_slow_memory_moves_the_crossing_to_the_kernel_of_64_rows(heads, e4m3, slow, fast):
    package = load_package(ROOT / "generated" / "dsv3_fp8")
    dense, launch = package.root.dense_decode, package.root._launch
    rates = [(rate, slow) for rate in (0, 2039, 3352, 4000)] + [(rate, fast) for rate in (4001, 4800, 8000)]
    for rate, thousands in rates:
        facts = launch.DeviceFacts("sm90", 132, memory_rate=rate)
        for keys, rows in ((thousands * 1024 - 64, 32), (thousands * 1024, 64)):
            found = dense.schedule(facts, 16, 1, 1, heads, 1, 64, keys, False, True, e4m3)
            assert found.tile.block_h == rows, (rate, keys)
