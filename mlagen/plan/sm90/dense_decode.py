"""Numbers of the sm90 kernels of dense attention over a cache of e4m3, and of few rows over the model's dtype."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from mlagen.errors import LimitError
from mlagen.layout import CacheLayout
from mlagen.plan.sm90.e4m3 import of_e4m3, reads_e4m3, shared_bytes
from mlagen.plan.sm90.kernel import BLOCK_H, BLOCK_N, D_V, E4M3_PRODUCT_DEPTH, Registers, Sm90Plan, refusal
from mlagen.plan.sm90.seesaw import DENSE_DECODE, make_sm90
from mlagen.plan.sm90.swap_ab import DENSE_DECODE as SWAP_AB
from mlagen.plan.sm90.swap_ab import make_swap_ab
from mlagen.plan.splits import PartialRow
from mlagen.plan.targets import SLOW_MEMORY, SM90, TARGETS
from mlagen.plan.tiles.tile import Sm90Row, most_text
from mlagen.plan.tritons import TableRow, span_text
from mlagen.spec import DenseAttention, Spec
from mlagen.work import ITEMSIZE

REGISTERS = Registers((232, 32), under=(((3, 7), (232, 40)),))
ROWS_32_REGISTERS = Registers((224, 56))
ROWS = (Sm90Row(None, 1),)  # calls that run the kernels, of those that they can run
E4M3_TAILS = (0, 32, 64)  # columns behind V; with 128 no Triton compiles the kernel of few rows
BARRIERS = 640  # bytes for barriers, and for the values that a program passes to its partitions
E4M3_TAKES = (  # limits of the kernels over e4m3
    f"it supports {D_V} columns of V, {', '.join(map(str, E4M3_TAILS))} after them, and partials of fp32 or bf16"
)
ROWS_32 = 32  # of a program; both e4m3 halves of their Q fill the rows of a product
ROWS64_TRITONS = ((3, 6), (3, 7))  # under which the kernel of 64 rows spills in no loop


@dataclass(frozen=True)
class Rows64Row(TableRow):
    """Which calls of up to so many rows run a kernel of 64 rows, under the Tritons it holds for.

    Attributes:
        max_rows: heads of query tokens of a KV head; None: any.
        max_rate: GB/s of the device's memory; None: any.
        min_keys: keys that the block tables of all requests of such a call name, with a q of e4m3; None: none does.
        min_keys_q_halves: likewise with a q in two e4m3 halves.
    """

    max_rows: int | None
    max_rate: int | None
    min_keys: int | None
    min_keys_q_halves: int | None


# From where programs of 64 rows have enough to do. Two programs of 32 rows read the same keys, one of them from L2, so
# they wait less for memory: the slower it is, the later 64 rows win. Measured on an H100 and on an H200. More than 128
# rows have half of its keys, for at least twice as many blocks of 64.
ROWS64_CALLS = (
    Rows64Row(ROWS_32, None, None, None),
    Rows64Row(64, SLOW_MEMORY, 160 * 1024, 384 * 1024, tritons=ROWS64_TRITONS),
    Rows64Row(64, None, 80 * 1024, 256 * 1024, tritons=ROWS64_TRITONS),
    Rows64Row(128, SLOW_MEMORY, 48 * 1024, 112 * 1024, tritons=ROWS64_TRITONS),
    Rows64Row(128, None, 40 * 1024, 128 * 1024, tritons=ROWS64_TRITONS),
    Rows64Row(None, SLOW_MEMORY, 24 * 1024, 56 * 1024, tritons=ROWS64_TRITONS),
    Rows64Row(None, None, 20 * 1024, 64 * 1024, tritons=ROWS64_TRITONS),
    Rows64Row(None, None, None, None),
)

# With P in e4m3, 32 rows have all of V ahead and 64 rows half of it, so 32 rows gain more. For 256K keys of 64 heads an
# H100 takes 77 us with 32 rows and 85 with 64, and for 4096K 1,107 and 887. By the logarithm of keys the ratio is 1 at
# 640K. For 64K keys of 128 heads 64 rows win where requests are equally long (41.8 to 44.5 us), and 32 rows where they
# are not (32.6 to 34.3). Other counts and memories are not measured.
_CROSSING_E4M3_P = replace(ROWS64_CALLS[1], min_keys=640 * 1024)
ROWS64_CALLS_E4M3_P = (ROWS64_CALLS[0], _CROSSING_E4M3_P, *ROWS64_CALLS[2:])

# 16 requests of 1 to 4K keys and 128 heads take 36.0 us over e4m3 on an H100, with 1 step 40.6.
SM90_REQUEST_OVERHEAD, E4M3_REQUEST_OVERHEAD = 2, 3
SM90_COMBINE_UNITS = 3  # with 6 a program takes a request of 512 keys whole: 6 us more on an H200


def rows64_calls(q_halves: Sm90Plan | None, *, e4m3_p: bool) -> tuple[Rows64Row, ...]:
    """ROWS64_CALLS of a spec's kernels, by the plan of the kernel of a q in two e4m3 halves, if any."""
    calls = ROWS64_CALLS_E4M3_P if e4m3_p else ROWS64_CALLS
    return calls if q_halves else tuple(replace(row, min_keys_q_halves=None) for row in calls)


def rows64_text(calls: Sequence[Rows64Row], *, q_halves: bool) -> Iterator[str]:
    """Yield lines about the calls that run a 64-row kernel, for either dtype of q."""
    kinds = [("e4m3", [row.min_keys for row in calls])]
    kinds += [("2-byte values", [row.min_keys_q_halves for row in calls])] if q_halves else []
    for q, fewest in kinds:
        said = (
            f"{most_text(row.max_rows)}{'' if row.max_rate is None else f' and {row.max_rate:,} GB/s'}: "
            f"{'none' if keys is None else f'from {keys:,}'}"
            f"{f' under {span_text(row.tritons)}' if row.tritons else ''}"
            for row, keys in zip(calls, fewest, strict=True)
        )
        yield f"calls with q of {q} of the 64-row kernel, by rows, memory and keys of all requests: {'; '.join(said)}"


def has_e4m3_p(spec: Spec) -> bool:
    """Whether a spec asks for P in e4m3."""
    return isinstance(spec.attention, DenseAttention) and spec.attention.products == "fp8"


def check_e4m3_p(spec: Spec, layout: CacheLayout | None, sm90: Sm90Plan | None) -> None:
    """Raise LimitError if a spec asks for P in e4m3, and it cannot be emitted.

    Args:
        spec: the spec.
        layout: of its cache; None if no wrapper computes attention over it.
        sm90: of the kernel that would have such a P; None without one.
    """
    if not has_e4m3_p(spec) or (sm90 is not None and layout is not None and reads_e4m3(layout)):
        return
    if layout is None:
        reason = "no wrapper computes attention over a cache"
    elif spec.backend == "triton":
        reason = "backend is triton"
    elif not reads_e4m3(layout):
        reason = f"it needs e4m3 rows with one scale per tensor, and the cache has layout {layout.name}"
    else:
        reason = refusal(spec) or E4M3_TAKES
    raise LimitError(f"attention.products: got fp8, which cannot be emitted: {reason}")


def make_dense_e4m3(spec: Spec, rows: Sequence[Sm90Row] | None) -> Sm90Plan | None:
    """The plan of the sm90 kernel of dense attention over e4m3.

    None where one over the model's dtype would be none, and for other dims than its text is written for.
    """
    sm90 = make_sm90(spec, DENSE_DECODE, rows or ROWS)
    if sm90 is None or PartialRow(spec.partials, D_V).scaled:
        return None
    if sm90.pieces.d_v != D_V or sm90.pieces.pads_k or sm90.d_tail not in E4M3_TAILS:
        return None
    return of_e4m3(sm90, REGISTERS)


def make_rows32(sm90: Sm90Plan) -> Sm90Plan:
    """Plan of the 32-row kernel. A Q that is no e4m3 becomes two e4m3 halves, which together fill a product's rows."""
    return replace(
        sm90,
        block_h=ROWS_32,
        registers=ROWS_32_REGISTERS,
        expected_shared=shared_bytes(sm90, ROWS_32, 2 * ROWS_32, 8),
    )


def make_q_halves(sm90: Sm90Plan) -> Sm90Plan | None:
    """Plan of the 64-row kernel of a Q in two e4m3 halves; None where shared memory has no room for both.

    The kernel has one P of each warpgroup, and only two blocks of K of the columns behind V.
    """
    unused = BLOCK_H * BLOCK_N * ITEMSIZE + 2 * BLOCK_N * sm90.d_tail
    shared = shared_bytes(sm90, BLOCK_H, 2 * BLOCK_H, 8) - unused
    if shared + BARRIERS > TARGETS[SM90].shared_limit:
        return None
    values = sm90.expected_products - 2 * sm90.d_k // E4M3_PRODUCT_DEPTH
    return replace(
        sm90,
        expected_shared=shared,
        expected_products=values + 4 * sm90.d_k // E4M3_PRODUCT_DEPTH,
    )


def make_dense_swap_ab(sm90: Sm90Plan, partials: PartialRow) -> tuple[Sm90Plan, ...]:
    """The plans of the swap-AB kernel over rows of the model's dtype, fewest rows first.

    Empty where the other kernel's blocks are narrower: it takes pages that hold no whole block of this one's.
    """
    if sm90.block_n < BLOCK_N:
        return ()
    return make_swap_ab(SWAP_AB, sm90, partials)
