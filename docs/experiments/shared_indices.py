"""Sparse prefill over unions: neighbouring tokens share a tile and the K rows that any of their indices names.

An experiment that ran, not part of mlagen: it takes the names of generated/dsv32 as of commit 158d729. What it gave and
what is open, stands in docs/performance.md.

A tile of 64 rows is GROUP tokens of 64 // GROUP heads. A first kernel, small, makes each group's entries: a row of kv
in the low 28 bits, a bit a token above them. A row stands once for all tokens that name it; an index that a token
repeats stands again for that token alone, so that it counts as often as it occurs. The seesaw walks entries as it walks
indices, and a warp, whose 16 rows are of one token, masks by that token's bits.
"""

from typing import NamedTuple

import torch
import triton.experimental.gluon.language as gl
import triton.language as tl
from dsv32 import _launch, _splits
from dsv32._sparse_hopper import (
    BLOCK_H,
    BLOCK_N,
    D_HALF,
    D_TAIL,
    D_V,
    HALF,
    K0_LEFT,
    K0_RIGHT,
    K1_LEFT,
    K1_RIGHT,
    MAX_0,
    MAX_1,
    NEG_LARGE,
    ROWS,
    SCORES,
    STEP,
    SUM_0,
    SUM_1,
    TILE,
    VECTOR,
    WEIGHTS_0,
    WEIGHTS_1,
    Shared,
    _await,
    _copy,
    _own_sum,
    _rescale,
    _rescale_sum,
    _row_scale,
    _score_left,
    _signal,
    _steps,
    _store_stats,
    _zero,
    async_copy,
    async_load,
    barrier,
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)  # fmt: skip
from triton.experimental import gluon

REGISTERS = gl.constexpr([216, 56])
ROW_BITS = tl.constexpr(28)  # of an entry; a bit for each token of the group follows
MOST_ROWS = 1 << ROW_BITS.value


STAGE = gl.constexpr(1 << 13)  # entries that are put in order at a time


@gluon.jit
def _name(word, bit):
    """Sets bits of words at the front of shared memory; what the words were. Nothing where bit is 0."""
    return gl.inline_asm_elementwise(
        """{
        .reg .pred names;
        .reg .b32 address;
        setp.ne.b32 names, $2, 0;
        mov.u32 address, global_smem;
        mad.lo.u32 address, $1, 4, address;
        mov.b32 $0, 0;
        @names atom.shared.or.b32 $0, [address], $2;
        }""",
        "=&r,r,r,~{memory}",
        [word, bit],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.constexpr_function
def _stage_text(window):
    return f"""{{
        .reg .pred names;
        .reg .b32 address;
        setp.ge.u32 names, $2, {1 << ROW_BITS.value};
        mov.u32 address, global_smem;
        mad.lo.u32 address, $1, 4, address;
        @names st.shared.b32 [address + {4 * window}], $2;
        mov.b32 $0, 0;
        }}"""


@gluon.jit
def _stage(place, entry, WINDOW: gl.constexpr):
    """Stores entries to places in shared memory behind the window, where there is one: a token's bit is set."""
    text: gl.constexpr = _stage_text(WINDOW)
    gl.inline_asm_elementwise(text, "=&r,r,r,~{memory}", [place, entry], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit(do_not_specialize=range(9))
def _union_kernel(
    indices_ptr,
    topk_length_ptr,
    entries_ptr,
    counts_ptr,
    tokens,
    topk,
    s_kv,
    capacity: gl.int64,
    indices_token_stride: gl.int64,
    GROUP: gl.constexpr,
    BLOCK: gl.constexpr,
    WINDOW: gl.constexpr,
):
    """Entries of GROUP tokens' indices, sorted by row in windows of rows, each behind those of repeated indices.

    Grid: (cdiv(tokens, GROUP),). indices i32 [tokens, topk], entries i32 [groups, capacity >= GROUP * topk], counts i32
    [groups]. A window takes WINDOW words of shared memory.
    """
    FIELDS: gl.constexpr = 32 // GROUP  # rows a word: a bit for each token
    BLOCK_W: gl.constexpr = STAGE // FIELDS  # words a step
    BLOCKS: gl.constexpr = WINDOW // BLOCK_W
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    words = gl.allocate_shared_memory(gl.int32, [BLOCKS + FIELDS, BLOCK_W], VECTOR)
    WORDS: gl.constexpr = gl.BlockedLayout([BLOCK_W // 32 // gl.num_warps()], [32], [gl.num_warps()], [0])
    group = gl.program_id(0)
    entries = entries_ptr + group * capacity
    lane = gl.arange(0, BLOCK, LANES)
    lane_w = gl.arange(0, BLOCK_W, WORDS)
    lane_e = gl.arange(0, BLOCK_W, LANES)
    one = gl.full_like(lane, 1)
    gl.store(counts_ptr + group, 0)
    for first in range(0, s_kv, WINDOW * FIELDS):
        rows = gl.minimum(s_kv - first, WINDOW * FIELDS)
        blocks = gl.cdiv(rows, FIELDS * BLOCK_W)
        for i in range(blocks):
            words.index(i).store(gl.zeros_like(lane_w))
        barrier()
        for member in range(gl.minimum(tokens - group * GROUP, GROUP)):
            token = group * GROUP + member
            indices = indices_ptr + token * indices_token_stride
            end = topk
            if topk_length_ptr is not None:
                end = gl.minimum(end, gl.load(topk_length_ptr + token))
            for start in range(0, end, BLOCK):
                index = gl.load(indices + start + lane, mask=start + lane < end, other=-1)  # [BLOCK]
                row = (index - first).to(gl.uint32, bitcast=True)  # a negative one is a row past every end
                valid = row < rows.to(gl.uint32, bitcast=True)
                bit = gl.where(valid, one << (index % FIELDS * GROUP + member), 0)
                before = _name((row // FIELDS).to(gl.int32, bitcast=True), bit)  # [BLOCK]
                again = (before & bit) != 0
                place = gl.atomic_add(counts_ptr + group + gl.zeros_like(lane), one, mask=again, sem="relaxed")
                gl.store(entries + place, index | (one << (ROW_BITS + member)), mask=again)
        barrier()
        count = gl.load(counts_ptr + group, cache_modifier=".cg")
        for i in range(blocks):
            word = words.index(i).load(WORDS)  # [BLOCK_W]
            found = word.to(gl.uint32, bitcast=True)
            found |= found >> 1
            if GROUP == 4:
                found = (found | (found >> 2)) & 0x11111111
            else:
                found &= 0x55555555
                found = (found & 0x33333333) + ((found >> 2) & 0x33333333)
            found = (found + (found >> 4)) & 0x0F0F0F0F
            found = ((found * 0x01010101) >> 24).to(gl.int32, bitcast=True)  # rows of the word that any token names
            ends = gl.associative_scan(found, 0, _add)
            place = ends - found
            total = gl.max(ends, 0)
            row = first + (i * BLOCK_W + lane_w) * FIELDS
            for field in gl.static_range(FIELDS):
                bits = (word >> (field * GROUP)) & ((1 << GROUP) - 1)
                _stage(place, (row + field) | (bits << ROW_BITS), WINDOW)
                place += (bits != 0).to(gl.int32)
            barrier()
            for j in range(gl.cdiv(total, BLOCK_W)):
                staged = j * BLOCK_W + lane_e
                gl.store(entries + count + staged, words.index(BLOCKS + j).load(LANES), mask=staged < total)
            count += total
            barrier()
        gl.store(counts_ptr + group, count)


class Call(NamedTuple):
    """What a launch passes: pointers, None where a tensor is absent; sizes; strides in elements."""

    q_ptr: gl.tensor
    kv_ptr: gl.tensor
    entries_ptr: gl.tensor
    counts_ptr: gl.tensor
    attn_sink_ptr: gl.tensor
    out_ptr: gl.tensor
    max_logits_ptr: gl.tensor
    lse_ptr: gl.tensor
    tokens: gl.tensor
    num_heads: gl.tensor
    capacity: gl.tensor
    num_tiles: gl.tensor
    sm_scale_log2: gl.tensor
    q_token_stride: gl.tensor
    q_head_stride: gl.tensor
    kv_row_stride: gl.tensor
    out_token_stride: gl.tensor
    out_head_stride: gl.tensor


@gluon.jit
def _place(tile, LAYOUT: gl.constexpr, GROUP: gl.constexpr):
    """Token and head of each row of a tile [BLOCK_H]."""
    SLOTS: gl.constexpr = BLOCK_H // GROUP
    row = _zero(tile) + gl.arange(0, BLOCK_H, gl.SliceLayout(1, LAYOUT))  # else its products stay in registers
    return tile * GROUP + row // SLOTS, row % SLOTS


@gluon.jit
def _span(call, tile):
    """Pointer to a tile's entries, and how many there are."""
    return call.entries_ptr + tile.to(gl.int64) * call.capacity, gl.load(call.counts_ptr + tile)


@gluon.jit
def _lane_entry(entries, begin, end):
    """The entry at begin + lane of a warp, 0 from end on: a value of each thread, which Gluon takes for a scalar."""
    return gl.inline_asm_elementwise(
        """{
        .reg .pred inside;
        .reg .b32 lane;
        .reg .b64 address;
        mov.u32 lane, %laneid;
        mad.wide.u32 address, lane, 4, $1;
        setp.lt.s32 inside, lane, $2;
        mov.b32 $0, 0;
        @inside ld.global.b32 $0, [address];
        }""",
        "=r,l,r",
        [(entries + begin).to(gl.int64), end - begin],
        dtype=gl.int32,
        is_pure=True,
        pack=1,
    )


@gluon.constexpr_function
def _ballot_text(group):
    warps = group.bit_length() - 1  # the token of a warp: its number in the warpgroup, but for the last bits
    return f"""{{
        .reg .pred named;
        .reg .b32 token;
        mov.u32 token, %tid.x;
        bfe.u32 token, token, {7 - warps}, {warps};
        add.u32 token, token, 28;
        shr.u32 token, $1, token;
        and.b32 token, token, 1;
        setp.ne.u32 named, token, 0;
        vote.sync.ballot.b32 $0, named, 0xffffffff;
        }}"""


@gluon.jit
def _ballot(entry, GROUP: gl.constexpr):
    """A bit for each lane of the warp: whether its entry is one of the warp's token."""
    text: gl.constexpr = _ballot_text(GROUP)
    return gl.inline_asm_elementwise(text, "=r,r", [entry], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _mask(scores, low, high):
    """Scores [BLOCK_H, BLOCK_N] of the columns whose bit is set in low or high, -inf in the others."""
    columns = gl.arange(0, BLOCK_N, gl.SliceLayout(0, SCORES))
    bits = gl.where(columns < 32, low, high) >> (columns & 6)  # a thread's columns differ in the other bits
    return gl.where(((bits & (1 << (columns & 25))) != 0)[None, :], scores, float("-inf"))


@gluon.jit
def _load_q(call, shared, tile, GROUP: gl.constexpr):
    """Copies Q of a tile; rows past the last token or head are the last one's again, whose results nobody stores."""
    tokens, heads = _place(tile, ROWS, GROUP)
    tokens = gl.minimum(tokens, call.tokens - 1).to(gl.int64)
    heads = gl.minimum(heads, call.num_heads - 1).to(gl.int64)
    rows = (call.q_ptr + tokens * call.q_token_stride + heads * call.q_head_stride)[:, None]
    lanes = gl.arange(0, D_HALF, gl.SliceLayout(0, ROWS))[None, :]
    async_load(shared.q_left.index(0), gl.multiple_of(rows + lanes, [1, 16]))  # [BLOCK_H, D_HALF]
    async_load(shared.q_right.index(0), gl.multiple_of(rows + D_HALF + lanes, [1, 16]))  # [BLOCK_H, D_HALF]
    lanes = gl.arange(0, D_TAIL, gl.SliceLayout(0, ROWS))[None, :]
    async_load(shared.q_tail.index(0), gl.multiple_of(rows + D_V + lanes, [1, 16]))  # [BLOCK_H, D_TAIL]
    async_copy.mbarrier_arrive(shared.q_ready, increment_count=False)


@gluon.jit
def _step_left(call, shared, scores, acc, m, l, low, high, at, GROUP: gl.constexpr):
    """A step of the left warpgroup from its scores on; leaves the product with the right one's weights running."""
    scores = _mask(scores, _ballot(low, GROUP), _ballot(high, GROUP))
    m_new = gl.maximum(m, gl.max(scores, 1) * call.sm_scale_log2)
    shared.m0.store(m_new)
    _signal(MAX_0, at)
    alpha = gl.exp2(m - m_new)
    p = gl.exp2(scores * call.sm_scale_log2 - m_new[:, None])  # [BLOCK_H, BLOCK_N]
    acc = _rescale(acc, alpha)
    weights = gl.convert_layout(p.to(shared.p1.dtype), gl.DotOperandLayout(0, HALF, 2))
    acc = warpgroup_mma(weights, shared.k0_left.index(at), acc, is_async=True)
    l = _rescale_sum(l, alpha, _own_sum(p))
    _await(MAX_1, at)
    m = shared.m1.load(gl.SliceLayout(1, SCORES))
    alpha = gl.exp2(m_new - m)
    shared.p0.index(0).store((p * alpha[:, None]).to(shared.p0.dtype))
    fence_async_shared()
    _signal(WEIGHTS_0, at)
    l = _rescale_sum(l, alpha, 0.0)
    acc = warpgroup_mma_wait(0, deps=[acc])
    _signal(K0_LEFT, at)
    acc = _rescale(acc, alpha)
    _await(WEIGHTS_1, at)
    acc = warpgroup_mma(shared.p1.index(at), shared.k1_left.index(at), acc, is_async=True)
    return acc, m, l


@gluon.jit
def _left(call, shared, GROUP: gl.constexpr):
    """The left warpgroup: scores of block 0, the left half of V's lanes, and the copies of Q."""
    zeros = gl.full([BLOCK_H, BLOCK_N], 0.0, gl.float32, SCORES)
    _load_q(call, shared, gl.program_id(0), GROUP)
    phase = 0
    q_phase = 0
    _signal(K0_LEFT, q_phase)
    _signal(K1_LEFT, q_phase)
    for tile in range(gl.program_id(0), call.num_tiles, gl.num_programs(0)):
        entries, end = _span(call, tile)
        steps = _steps(end)
        low = _lane_entry(entries, 0, end)
        high = _lane_entry(entries, 32, end)
        m = gl.full([BLOCK_H], NEG_LARGE, gl.float32, gl.SliceLayout(1, SCORES))
        l = _own_sum(zeros)
        acc = gl.full([BLOCK_H, D_HALF], 0.0, gl.float32, HALF)
        mbarrier.wait(shared.q_ready, q_phase)
        fence_async_shared()
        # A product that runs over a loop's end would make ptxas serialise them all: the scores of the first step come
        # before the loop, those of each next one at its end, and the last step after it.
        scores, acc = _score_left(shared, acc, phase, _zero(tile), zeros, False)
        for i in range(1, steps):
            at = _zero(i)
            acc, m, l = _step_left(call, shared, scores, acc, m, l, low, high, at, GROUP)
            phase ^= 1
            low = _lane_entry(entries, i * STEP, end)
            high = _lane_entry(entries, i * STEP + 32, end)
            scores, acc = _score_left(shared, acc, phase, at, zeros, True)
        acc, m, l = _step_left(call, shared, scores, acc, m, l, low, high, _zero(tile + 1), GROUP)
        phase ^= 1
        # Both warpgroups have their last scores of this tile: Q's place is free.
        _load_q(call, shared, gl.minimum(tile + gl.num_programs(0), call.num_tiles - 1), GROUP)
        acc = warpgroup_mma_wait(0, deps=[acc])
        _signal(K1_LEFT, q_phase)
        row_sum = gl.convert_layout(gl.sum(l, 1), gl.SliceLayout(1, SCORES))
        shared.l0.store(row_sum)
        _signal(SUM_0, q_phase)
        _await(SUM_1, q_phase)
        l = row_sum + shared.l1.load(gl.SliceLayout(1, SCORES))
        _store(call, acc, m, l, tile, 0, GROUP)
        q_phase ^= 1


@gluon.jit
def _right(call, shared, GROUP: gl.constexpr):
    """The right warpgroup: scores of block 1, and the right half of V's lanes."""
    zeros = gl.full([BLOCK_H, BLOCK_N], 0.0, gl.float32, SCORES)
    phase = 0
    q_phase = 0
    _signal(K0_RIGHT, q_phase)
    _signal(K1_RIGHT, q_phase)
    for tile in range(gl.program_id(0), call.num_tiles, gl.num_programs(0)):
        entries, end = _span(call, tile)
        low = _lane_entry(entries, BLOCK_N, end)
        high = _lane_entry(entries, BLOCK_N + 32, end)
        m = gl.full([BLOCK_H], NEG_LARGE, gl.float32, gl.SliceLayout(1, SCORES))
        l = _own_sum(zeros)
        acc = gl.full([BLOCK_H, D_HALF], 0.0, gl.float32, HALF)
        mbarrier.wait(shared.q_ready, q_phase)
        fence_async_shared()
        for i in range(_steps(end)):
            at = _zero(i)
            mbarrier.wait(shared.k_ready.index(3), phase)
            scores = warpgroup_mma(
                shared.q_right.index(at), shared.k1_right.index(at).permute((1, 0)), zeros, use_acc=False, is_async=True
            )
            scores = warpgroup_mma(
                shared.q_tail.index(at), shared.k1_tail.index(at).permute((1, 0)), scores, is_async=True
            )
            mbarrier.wait(shared.k_ready.index(2), phase)
            scores = warpgroup_mma(
                shared.q_left.index(at), shared.k1_left.index(at).permute((1, 0)), scores, is_async=True
            )
            named_low = _ballot(low, GROUP)
            named_high = _ballot(high, GROUP)
            low = _lane_entry(entries, (i + 1) * STEP + BLOCK_N, end)
            high = _lane_entry(entries, (i + 1) * STEP + BLOCK_N + 32, end)
            scores = _mask(warpgroup_mma_wait(0, deps=[scores]), named_low, named_high)
            maximum = gl.max(scores, 1) * call.sm_scale_log2
            _await(MAX_0, at)
            m_new = gl.maximum(shared.m0.load(gl.SliceLayout(1, SCORES)), maximum)
            shared.m1.store(m_new)
            _signal(MAX_1, at)
            alpha = gl.exp2(m - m_new)
            m = m_new
            p = gl.exp2(scores * call.sm_scale_log2 - m[:, None])  # [BLOCK_H, BLOCK_N]
            acc = _rescale(acc, alpha)
            rounded = p.to(shared.p1.dtype)
            weights = gl.convert_layout(rounded, gl.DotOperandLayout(0, HALF, 2))
            acc = warpgroup_mma(weights, shared.k1_right.index(at), acc, is_async=True)
            shared.p1.index(0).store(rounded)
            fence_async_shared()
            _signal(WEIGHTS_1, at)
            l = _rescale_sum(l, alpha, _own_sum(p))
            _await(WEIGHTS_0, at)
            acc = warpgroup_mma(shared.p0.index(at), shared.k0_right.index(at), acc, is_async=True)
            acc = warpgroup_mma_wait(1, deps=[acc])
            _signal(K1_RIGHT, at)
            acc = warpgroup_mma_wait(0, deps=[acc])
            _signal(K0_RIGHT, at)
            phase ^= 1
        row_sum = gl.convert_layout(gl.sum(l, 1), gl.SliceLayout(1, SCORES))
        shared.l1.store(row_sum)
        _signal(SUM_1, q_phase)
        _await(SUM_0, q_phase)
        l = row_sum + shared.l0.load(gl.SliceLayout(1, SCORES))
        _store(call, acc, m, l, tile, D_HALF, GROUP)
        q_phase ^= 1


@gluon.jit
def _store(call, acc, m, l, tile, START: gl.constexpr, GROUP: gl.constexpr):
    """Stores lanes [START, START + D_HALF) of the result; with START 0 the statistics too."""
    tokens, heads = _place(tile, HALF, GROUP)
    mask = (tokens < call.tokens) & (heads < call.num_heads)
    lanes = START + gl.arange(0, D_HALF, gl.SliceLayout(0, HALF))
    stat_tokens, stat_heads = _place(tile, SCORES, GROUP)
    stat_mask = (stat_tokens < call.tokens) & (stat_heads < call.num_heads)
    scale = _row_scale(m, l, call.attn_sink_ptr, stat_heads, stat_mask)
    out = _rescale(acc, scale).to(call.out_ptr.dtype.element_ty)
    rows = call.out_ptr + tokens.to(gl.int64) * call.out_token_stride + heads.to(gl.int64) * call.out_head_stride
    pointers = gl.multiple_of(rows[:, None] + lanes[None, :], [1, 16])
    gl.store(pointers, out, mask=mask[:, None])  # [BLOCK_H, D_HALF]
    if START == 0:
        stat_rows = stat_tokens.to(gl.int64) * call.num_heads + stat_heads
        _store_stats(call.max_logits_ptr, call.lse_ptr, stat_rows, stat_mask, m, l)


@gluon.jit
def _rows(call, entry):
    """Pointers to the rows of entries [BLOCK_N, 1]."""
    row = entry & ((1 << ROW_BITS) - 1)
    return (call.kv_ptr + row.to(gl.int64) * call.kv_row_stride)[:, None]


@gluon.jit
def _produce(call, shared):
    """The copying warpgroup: rows of K, in the order in which the others need them."""
    lane = gl.arange(0, BLOCK_N, gl.SliceLayout(1, ROWS))
    for tile in range(gl.program_id(0), call.num_tiles, gl.num_programs(0)):
        entries, end = _span(call, tile)
        entry0 = gl.load(entries + lane, mask=lane < end, other=0)  # [BLOCK_N]
        entry1 = gl.load(entries + BLOCK_N + lane, mask=BLOCK_N + lane < end, other=0)  # [BLOCK_N]
        for i in range(_steps(end)):
            rows0 = _rows(call, entry0)
            rows1 = _rows(call, entry1)
            valid0 = (i * STEP + lane < end)[:, None]
            valid1 = (i * STEP + BLOCK_N + lane < end)[:, None]
            following = (i + 1) * STEP + lane
            entry0 = gl.load(entries + following, mask=following < end, other=0)  # [BLOCK_N]
            entry1 = gl.load(entries + BLOCK_N + following, mask=BLOCK_N + following < end, other=0)  # [BLOCK_N]
            _await(K0_LEFT, i)
            _copy(shared.k0_left, rows0, valid0, 0, D_HALF)
            async_copy.mbarrier_arrive(shared.k_ready.index(0), increment_count=False)
            _await(K1_RIGHT, i)
            _copy(shared.k1_tail, rows1, valid1, D_V, D_TAIL)
            _copy(shared.k1_right, rows1, valid1, D_HALF, D_HALF)
            async_copy.mbarrier_arrive(shared.k_ready.index(3), increment_count=False)
            _await(K0_RIGHT, i)
            _copy(shared.k0_tail, rows0, valid0, D_V, D_TAIL)
            _copy(shared.k0_right, rows0, valid0, D_HALF, D_HALF)
            async_copy.mbarrier_arrive(shared.k_ready.index(1), increment_count=False)
            _await(K1_LEFT, i)
            _copy(shared.k1_left, rows1, valid1, 0, D_HALF)
            async_copy.mbarrier_arrive(shared.k_ready.index(2), increment_count=False)
    # The last signals of the others, which nothing more is copied for: a barrier must be left complete.
    _await(K0_LEFT, call.num_tiles)
    _await(K0_RIGHT, call.num_tiles)
    _await(K1_LEFT, call.num_tiles)
    _await(K1_RIGHT, call.num_tiles)


@gluon.jit(do_not_specialize=range(18))
def _sparse_union_kernel(
    q_ptr,
    kv_ptr,
    entries_ptr,
    counts_ptr,
    attn_sink_ptr,
    out_ptr,
    max_logits_ptr,
    lse_ptr,
    tokens,
    num_heads,
    capacity,
    num_tiles,
    sm_scale_log2,
    q_token_stride: gl.int64,
    q_head_stride: gl.int64,
    kv_row_stride: gl.int64,
    out_token_stride: gl.int64,
    out_head_stride: gl.int64,
    GROUP: gl.constexpr,
):
    """Attention of GROUP tokens, of at most BLOCK_H // GROUP heads, over the union of their indices a tile.

    Grid: (min(num_tiles, multiprocessors),), where num_tiles counts groups of tokens.
    q [tokens, num_heads, 576], kv rows of 576 lanes, out [tokens, num_heads, 512]: bf16.
    entries i32 [num_tiles, capacity], counts i32 [num_tiles]. max_logits, lse f32 [tokens, num_heads].
    """
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    q_left = gl.allocate_shared_memory(dtype, [1, BLOCK_H, D_HALF], TILE)
    q_right = gl.allocate_shared_memory(dtype, [1, BLOCK_H, D_HALF], TILE)
    k0_left = gl.allocate_shared_memory(dtype, [1, BLOCK_N, D_HALF], TILE)
    k0_right = gl.allocate_shared_memory(dtype, [1, BLOCK_N, D_HALF], TILE)
    k1_left = gl.allocate_shared_memory(dtype, [1, BLOCK_N, D_HALF], TILE)
    k1_right = gl.allocate_shared_memory(dtype, [1, BLOCK_N, D_HALF], TILE)
    q_tail = gl.allocate_shared_memory(dtype, [1, BLOCK_H, D_TAIL], TILE)
    k0_tail = gl.allocate_shared_memory(dtype, [1, BLOCK_N, D_TAIL], TILE)
    k1_tail = gl.allocate_shared_memory(dtype, [1, BLOCK_N, D_TAIL], TILE)
    p0 = k0_tail  # of one size, and its scores are done before the weights come
    p1 = gl.allocate_shared_memory(dtype, [1, BLOCK_H, BLOCK_N], TILE)
    m0 = gl.allocate_shared_memory(gl.float32, [BLOCK_H], VECTOR)
    m1 = gl.allocate_shared_memory(gl.float32, [BLOCK_H], VECTOR)
    l0 = gl.allocate_shared_memory(gl.float32, [BLOCK_H], VECTOR)
    l1 = gl.allocate_shared_memory(gl.float32, [BLOCK_H], VECTOR)
    q_ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    k_ready = gl.allocate_shared_memory(gl.int64, [4, 1], mbarrier.MBarrierLayout())  # k0 left, right; k1 left, right
    mbarrier.init(q_ready, count=128)
    for i in gl.static_range(4):
        mbarrier.init(k_ready.index(i), count=128)
    fence_async_shared()
    barrier()
    call = Call(
        q_ptr, kv_ptr, entries_ptr, counts_ptr, attn_sink_ptr, out_ptr, max_logits_ptr, lse_ptr, tokens, num_heads,
        capacity, num_tiles, sm_scale_log2, q_token_stride, q_head_stride, kv_row_stride, out_token_stride,
        out_head_stride,
    )  # fmt: skip
    shared = Shared(
        q_left, q_right, k0_left, k0_right, k1_left, k1_right, q_tail, k0_tail, k1_tail, p0, p1, m0, m1, l0, l1,
        q_ready, k_ready,
    )  # fmt: skip
    gl.warp_specialize(
        [(_left, (call, shared, GROUP)), (_right, (call, shared, GROUP)), (_produce, (call, shared))],
        [4, 4],
        REGISTERS,
    )


class UnionTile(NamedTuple):
    """Launch parameters of the union kernel: indices a step, words of rows at a time, and warps."""

    block: int
    window: int
    num_warps: int


UNION_TILE = UnionTile(2048, 1 << 13, 8)


def group_size(num_heads: int) -> int:
    """Tokens of a tile; 1: none share."""
    return 4 if num_heads <= 16 else 2 if num_heads <= 32 else 1


def make_union(indices, s_kv, group, topk_length=None, tile=UNION_TILE):
    """Entries i32 [groups, group * topk] of the groups of tokens, and how many each has [groups]."""
    tokens, _, topk = indices.shape
    groups = -(-tokens // group)
    entries = torch.empty(groups, group * topk, dtype=torch.int32, device=indices.device)
    counts = torch.empty(groups, dtype=torch.int32, device=indices.device)
    _union_kernel[(groups,)](
        indices, topk_length, entries, counts, tokens, topk, s_kv, group * topk, indices.stride(0), group, tile.block,
        tile.window, num_warps=tile.num_warps,
    )  # fmt: skip
    return entries, counts


def attend_union(q, kv, entries, counts, group, sm_scale, attn_sink=None, multiprocessors=132):
    """Launches the seesaw over unions; gives out, max_logits and lse."""
    tokens, num_heads, _ = q.shape
    out = torch.empty(tokens, num_heads, D_V.value, dtype=q.dtype, device=q.device)
    max_logits = torch.empty(tokens, num_heads, dtype=torch.float32, device=q.device)
    lse = torch.empty_like(max_logits)
    tiles = counts.shape[0]
    _sparse_union_kernel[(min(tiles, multiprocessors),)](
        q, kv, entries, counts, attn_sink, out, max_logits, lse, tokens, num_heads, entries.shape[1], tiles,
        sm_scale * _splits.LOG2E.value, *q.stride()[:2], kv.stride(0), *out.stride()[:2], group, num_warps=4,
    )  # fmt: skip
    return out, max_logits, lse


def flash_mla_sparse_fwd_union(q, kv, indices, sm_scale, attn_sink=None, topk_length=None, tile=UNION_TILE):
    """As flash_mla_sparse_fwd: q bf16 [tokens, num_heads <= 32, 576], kv bf16 [s_kv < 2**28, 1, 576], indices i32
    [tokens, 1, topk]."""
    group = group_size(q.shape[1])
    assert group > 1
    assert kv.shape[0] < MOST_ROWS
    assert sm_scale > 0
    multiprocessors = _launch.device_facts(q.device).multiprocessors
    entries, counts = make_union(indices, kv.shape[0], group, topk_length, tile)
    return attend_union(q, kv, entries, counts, group, sm_scale, attn_sink, multiprocessors)
