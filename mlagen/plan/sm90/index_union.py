"""Numbers of the sm90 kernels for tiles of neighbouring tokens, and for the union of the rows of K that these name."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from mlagen.plan.sm90.kernel import BLOCK_H, BLOCK_N, Registers, Sm90Plan
from mlagen.plan.sm90.kernel import refusal as sm90_refusal
from mlagen.plan.sm90.seesaw import SPARSE_FWD, Form, form_of, make_sm90
from mlagen.plan.targets import WARP_SIZE
from mlagen.plan.tiles.tile import Sm90Row, calls_text
from mlagen.spec import Spec

MODULE = "_index_union_sm90"  # of the kernel that makes the lists
ROW_BITS = 28  # of an entry; a bit for each token of the group follows
MIN_TOKENS = 512  # a tile of four a multiprocessor
MOST_ROWS = 1 << 17  # of kv that were measured; each window of them is a pass over the indices
WORD_BITS = 32
WINDOW_WORDS = 1 << 13  # of the bitmap in shared memory
STAGED = 1 << 13  # entries put in order at a time; a list's program has as much shared memory again for them
INDICES = 2048  # a step of a list's program
LIST_WARPS = 8
REGISTERS = {  # of the attending kernel, by tokens per group; docs/tritons.md lists spills by Triton
    2: Registers((208, 56), (((3, 9), (216, 56)),)),
    4: Registers((208, 56), (((3, 9), (208, 48)),)),
}


@dataclass(frozen=True)
class IndexUnionPlan:
    """Numbers of the kernels over unions: one makes the list of a group of tokens, the other attends over it.

    Attributes:
        group: neighbouring tokens that share a tile.
        sm90: the attending kernel's plan: that of the sm90 kernel over one token's indices.
        rows: which calls run them, by heads, most last.
        most_rows: rows of kv that such a call may have.
        row_bits: bits of an entry that hold the row; the bits of the tokens that name it stand above.
        window: words of the bitmap, a bit for each token and row.
        staged: entries put in order at a time.
        indices: a step of the list's program.
        num_warps: of the list's program.
    """

    group: int
    sm90: Sm90Plan
    rows: tuple[Sm90Row, ...]
    most_rows: int
    row_bits: int
    window: int
    staged: int
    indices: int
    num_warps: int

    @property
    def heads(self) -> int:
        """Heads of a token in a tile. A call may have fewer."""
        return self.sm90.block_h // self.group

    @property
    def fields(self) -> int:
        """Rows that share a word of the bitmap."""
        return WORD_BITS // self.group

    @property
    def window_rows(self) -> int:
        """Rows of the bitmap."""
        return self.window * self.fields

    @property
    def words_a_thread(self) -> int:
        """Words of the bitmap that a thread of the list's program puts in order at a time."""
        return self.words // (WARP_SIZE * self.num_warps)

    @property
    def least_entry(self) -> int:
        """The least value of an entry that some token names, as an unsigned number."""
        return 1 << self.row_bits

    @property
    def staged_byte(self) -> int:
        """Where in shared memory entries are put in order: behind the bitmap."""
        return 4 * self.window

    @property
    def words(self) -> int:
        """Words of the bitmap that are put in order at a time."""
        return self.staged // self.fields

    @property
    def expected_shared(self) -> int:
        """Expected bytes of shared memory of the list's program: its bitmap, and the rows that it puts in order."""
        return self.staged_byte + 4 * self.staged

    def describe(self) -> Iterator[str]:
        """Yield lines about the kernels and the calls that run them."""
        yield (
            f"\nshared-index prefill: {self.group} neighbouring tokens, up to {self.heads} heads per tile; index union "
            f"from a bitmap of {self.window_rows:,} rows, {self.expected_shared:,} bytes of shared memory"
        )
        yield f"calls that run it, by heads, with up to {self.most_rows:,} rows: {calls_text(self.rows)}"


def refusal(spec: Spec, *, over_rows: bool) -> str | None:
    """Why the kernels over unions cannot be emitted for a spec; None if they can.

    Args:
        spec: the spec.
        over_rows: it has a wrapper of attention over unquantised rows.
    """
    if spec.backend == "triton":
        return "backend is triton, and its kernel needs gluon"
    if not over_rows:
        return "no wrapper computes attention over unquantised rows, the only kind that it supports"
    reason = sm90_refusal(spec)
    sm90 = make_sm90(spec, SPARSE_FWD) if reason is None else None
    if sm90 is not None and sm90.block_n != BLOCK_N:
        return f"a row has {sm90.d_k} columns, and with Q two blocks of {BLOCK_N} do not fit shared memory"
    if sm90 is not None and form_of(sm90.pieces) is Form.OTHER_TAIL:
        return f"V has {sm90.pieces.d_v} columns and {sm90.d_tail} follow, which leaves too few registers for its loop"
    return reason


def make_index_union(group: int, sm90: Sm90Plan) -> IndexUnionPlan:
    """The plan for groups of `group` tokens, 2 or 4: as many heads fit as fill a tile."""
    widest = form_of(sm90.pieces) is not Form.SHORT
    return IndexUnionPlan(
        group=group,
        sm90=replace(sm90, registers=REGISTERS[group] if widest else sm90.registers),
        rows=(Sm90Row(BLOCK_H // group, MIN_TOKENS), Sm90Row(None, None)),
        most_rows=MOST_ROWS,
        row_bits=ROW_BITS,
        window=WINDOW_WORDS,
        staged=STAGED,
        indices=INDICES,
        num_warps=LIST_WARPS,
    )
