"""Top-k kernels. `topk.py` documents the functions that launch them."""

from typing import NamedTuple

import triton
import triton.language as tl

from . import _launch

# Keys are unsigned, in the order of the scores. +0 and -0 have the same key. NaN and -inf have key 0, which is never
# picked.
LAST_KEY = tl.constexpr(0xFF000000)  # key of +inf
BEYOND = tl.constexpr(0xFFFFFFFF)  # larger than any key
# Columns of a tile [REPS, SPANS, COLUMNS]. Each warp has a span: REPS * COLUMNS consecutive columns.
COLUMNS = tl.constexpr(128)
MARGIN = tl.constexpr(4.0)  # standard deviations between the expected rank in a sample and the rank that is used


@triton.jit
def _key(score):
    """Return the ordered keys of fp32 scores. Keys of negative scores count down from that of zero."""
    bits = score.to(tl.uint32, bitcast=True)
    key = tl.where(bits >= 0x80000000, 0 - bits, bits + 0x80000000) - 0x00800000
    return tl.where(key <= LAST_KEY, key, 0)


@triton.jit
def _score(key):
    """Return the score of a key; -inf for key 0."""
    ordered = key + 0x00800000
    return tl.where(ordered >= 0x80000000, ordered - 0x80000000, 0 - ordered).to(tl.float32, bitcast=True)


@triton.jit
def _columns(begin, REPS: tl.constexpr, SPANS: tl.constexpr):
    """Return the columns of a tile that starts at `begin`. [REPS, SPANS, COLUMNS]"""
    first = begin + tl.arange(0, SPANS)[:, None] * (REPS * COLUMNS) + tl.arange(0, COLUMNS)[None, :]
    return first[None, :, :] + tl.arange(0, REPS)[:, None, None] * COLUMNS


@triton.jit
def _count(flags):
    """Return the number of set flags of a tile."""
    return tl.sum(tl.reshape(flags.to(tl.int32), [flags.numel], can_reorder=True), 0)


@triton.jit
def _least(keys, flags):
    """Return the least flagged key of a tile; BEYOND if there is none."""
    return tl.min(tl.reshape(tl.where(flags, keys, BEYOND), [keys.numel], can_reorder=True), 0)


@triton.jit
def _most(keys, flags):
    """Return the largest flagged key of a tile; 0 if there is none."""
    return tl.max(tl.reshape(tl.where(flags, keys, 0), [keys.numel], can_reorder=True), 0)


@triton.jit
def _inside(key, low, high):
    """Return a key between low and high, which differ by more than 1: `key`, clamped, or their middle if it is 0."""
    middle = low + ((high - low) >> 1)
    return tl.where(key == 0, middle, tl.minimum(tl.maximum(key, low + 1), high - 1))


@triton.jit
def _search(keys, floor, k, slack):
    """Return (low, high, above, passing): the k largest are the keys from high on, and then keys in [low, high).

    `above` keys, fewer than k, are in [high, BEYOND). `passing` keys are above floor; other keys are ignored. If more
    than k pass, either k to k + slack of them are in [low, BEYOND), or all keys in [low, high) are equal.

    Each step tries two thresholds: one interpolated from the counts at both ends, and the middle of the scores. After
    two steps that kept most of the keys, it is the middle of the keys.
    """
    low, high = floor + 1, tl.full([], BEYOND, tl.uint32)
    passing = _count(keys >= low)
    count_low, above, stalls = passing, passing * 0, passing * 0
    if passing > k + slack:
        low = _least(keys, keys >= low)
        high = _most(keys, keys >= low) + 1
    while (count_low > k + slack) & (high - low > 1):
        between = count_low - above
        highest, lowest = _score(high), _score(low)
        base = tl.log2((above + 1).to(tl.float32))
        share = (tl.log2((k + 1).to(tl.float32)) - base) / (tl.log2((count_low + 1).to(tl.float32)) - base)
        near = _inside(_key(highest - (highest - lowest) * share), low, high)
        middle = _inside(tl.where(stalls < 2, _key(0.5 * highest + 0.5 * lowest), tl.zeros([], tl.uint32)), low, high)
        first, second = tl.minimum(near, middle), tl.maximum(near, middle)
        count_first, count_second = _count(keys >= first), _count(keys >= second)
        low = tl.where(count_second >= k, second, tl.where(count_first >= k, first, low))
        count_low = tl.where(count_second >= k, count_second, tl.where(count_first >= k, count_first, count_low))
        high = tl.where(count_first < k, first, tl.where(count_second < k, second, high))
        above = tl.where(count_first < k, count_first, tl.where(count_second < k, count_second, above))
        left = count_low - above
        if left == between:  # no key was excluded: shrink the interval to its least and largest key
            low, high = _least(keys, keys >= low), _most(keys, keys < high) + 1
        stalls = tl.where((2 * left > between) & (stalls < 3), stalls + 1, 0)
    return low, high, above, passing


@triton.jit
def _flags(keys, low, high):
    """Return flags. The lower 16 bits of their sum count keys from high on, the upper ones keys in [low, high)."""
    return (keys >= high).to(tl.int32) + (((keys >= low) & (keys < high)).to(tl.int32) << 16)


@triton.jit
def _span_starts(keys, low, high, SPANS: tl.constexpr):
    """Return (starts, total): the sum of a tile's flags in the spans before each span, [SPANS], and in all spans."""
    counts = tl.sum(tl.sum(_flags(keys, low, high), 2), 0)
    span = tl.arange(0, SPANS)
    return tl.sum(tl.where(span[:, None] < span[None, :], counts[:, None], 0), 0), tl.sum(counts, 0)


@triton.jit
def _number(flags, wanted):
    """Return the number of picked keys: all from high on, and the first `wanted` of the keys in [low, high)."""
    return (flags & 0xFFFF) + tl.minimum((flags >> 16) & 0xFFFF, wanted)


class Row(NamedTuple):
    """A row: scores [first, end) at an address."""

    scores_ptr: tl.tensor
    first: tl.tensor
    end: tl.tensor


class Outputs(NamedTuple):
    """Memory for the results of a row: indices; scores, and indices before the page table, if requested."""

    out_ptr: tl.tensor
    scores_ptr: tl.tensor
    raw_ptr: tl.tensor
    gives_scores: tl.tensor
    gives_raw: tl.tensor


class Pages(NamedTuple):
    """The page table of a row, if the call has one. Slots of pages up to `limit` fit int32."""

    table_ptr: tl.tensor
    num_pages: tl.tensor
    page_size: tl.tensor
    limit: tl.tensor
    multiplier: tl.tensor
    shift: tl.tensor
    given: tl.tensor


@triton.jit
def _row(
    logits_ptr, starts_ptr, lens_ptr, number, num_columns, next_n, has_starts, lens_are_ends, logits_stride
):  # fmt: skip
    """Return the scores of a row, by its number."""
    length = tl.maximum(tl.load(lens_ptr + number // next_n), 0) - next_n + number % next_n + 1
    first = tl.load(starts_ptr + number, mask=has_starts != 0, other=0)
    first = tl.minimum(tl.maximum(first, 0), num_columns)
    end = tl.where(lens_are_ends != 0, length, tl.minimum(length, num_columns) + first)
    return Row(logits_ptr + number.to(tl.int64) * logits_stride, first, tl.minimum(end, num_columns))


@triton.jit
def _pages(
    page_table_ptr, row_to_batch_ptr, page_starts_ptr, number, has_pages, has_batches, has_page_starts,
    num_batches, num_pages, page_size, page_limit, page_multiplier, page_shift, page_table_stride,
):  # fmt: skip
    """Return the pages of a row, by its number."""
    batch = tl.load(row_to_batch_ptr + number, mask=has_batches != 0, other=number)
    known = (batch >= 0) & (batch < num_batches)
    page_start = tl.load(page_starts_ptr + number, mask=has_page_starts != 0, other=0)
    return Pages(
        page_table_ptr + batch.to(tl.int64) * page_table_stride + page_start,
        tl.where(known & (page_start >= 0), num_pages - page_start, 0),
        page_size, page_limit, page_multiplier, page_shift, has_pages,
    )  # fmt: skip


@triton.jit
def _masked_keys(row, columns, pointers, GROUP: tl.constexpr):
    """Return the keys of columns in aligned groups; 0 outside the row. Memory has the whole last group of a row."""
    limit = (row.end + GROUP - 1) // GROUP * GROUP
    scores = tl.load(pointers, mask=columns < limit, other=float("-inf")).to(tl.float32)
    return tl.where((columns >= row.first) & (columns < row.end), _key(scores), 0)


@triton.jit
def _load_keys(row, begin, GROUP: tl.constexpr, REPS: tl.constexpr, SPANS: tl.constexpr):
    """Return the keys of a tile. It starts at the group that contains column `begin`."""
    columns = _columns(begin // GROUP * GROUP, REPS, SPANS)
    ALIGNMENT: tl.constexpr = 16 if GROUP > 1 else 1
    pointers = tl.multiple_of(row.scores_ptr + columns, [1, 1, ALIGNMENT])
    return _masked_keys(row, columns, pointers, GROUP)  # [REPS, SPANS, COLUMNS]


@triton.jit
def _sample_floor(row, k, SAMPLE: tl.constexpr):
    """Return a key that probably more than k keys of the row exceed, from a sample; 0: no limit.

    The sample consists of runs of 8 adjacent columns at equal distances.
    """
    length = row.end - row.first
    drawn = tl.arange(0, SAMPLE)
    columns = row.first + drawn // 8 * (length // (SAMPLE // 8)) + drawn % 8
    keys = _key(tl.load(row.scores_ptr + columns).to(tl.float32))  # [SAMPLE]
    expected = k.to(tl.float32) * SAMPLE / length.to(tl.float32)
    rank = (expected + MARGIN * tl.sqrt(expected)).to(tl.int32) + 2
    low, _, _, passing = _search(keys, tl.zeros([], tl.uint32), rank, rank >> 3)
    return tl.where(passing > rank, low - 1, 0)


@triton.jit
def _picked(row, begin, rep, starts, low, high, wanted, GROUP: tl.constexpr, REPS: tl.constexpr, SPANS: tl.constexpr):
    """Return (column, key, picked, place, flags) of one rep of a tile, [SPANS, COLUMNS], and the sum of flags per span.

    Spans are in the order of columns, and so are the reps of a span. `starts` has the sum of the flags before each.
    """
    places = (tl.arange(0, SPANS)[:, None] * REPS + rep) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    columns = begin // GROUP * GROUP + places
    ALIGNMENT: tl.constexpr = 16 if GROUP > 1 else 1
    pointers = tl.multiple_of(row.scores_ptr + columns, [1, ALIGNMENT])
    keys = _masked_keys(row, columns, pointers, GROUP)  # [SPANS, COLUMNS]
    flags = _flags(keys, low, high)
    before = starts[:, None] + tl.cumsum(flags, 1) - flags
    picked = (keys >= high) | ((keys >= low) & (((before >> 16) & 0xFFFF) < wanted))
    return columns, keys, picked, _number(before, wanted), tl.sum(flags, 1)


@triton.jit
def _append(
    row, begin, source_ids_ptr, scores_ptr, ids_ptr, starts, low, high, wanted,
    HAS_IDS: tl.constexpr, GROUP: tl.constexpr, REPS: tl.constexpr, SPANS: tl.constexpr,
):  # fmt: skip
    """Write the picked scores of a tile and their columns, or with HAS_IDS the ids of these columns, in order."""
    for rep in range(REPS):
        columns, keys, picked, place, flags = _picked(
            row, begin, rep, starts, low, high, wanted, GROUP, REPS, SPANS
        )  # fmt: skip
        tl.store(scores_ptr + place, _score(keys).to(scores_ptr.dtype.element_ty), mask=picked)  # [SPANS, COLUMNS]
        if HAS_IDS:
            columns = tl.load(source_ids_ptr + columns, mask=picked, other=0)  # [SPANS, COLUMNS]
        tl.store(ids_ptr + place, columns, mask=picked)  # [SPANS, COLUMNS]
        starts += flags


@triton.jit
def _cut(
    buffer_ptr, ids_ptr, count, offset, floor, k, GROUP: tl.constexpr, REPS: tl.constexpr, SPANS: tl.constexpr
):  # fmt: skip
    """Copy the k largest candidates of a row to the other half of the buffer.

    Return (number, floor): their number, and the key that later candidates must exceed.
    """
    BLOCK: tl.constexpr = REPS * SPANS * COLUMNS
    tl.debug_barrier()  # the writes of other warps are read
    kept = Row(buffer_ptr + offset, count * 0, count)
    keys = _load_keys(kept, 0, GROUP, REPS, SPANS)
    low, high, above, passing = _search(keys, floor, k, 0)
    starts, total = _span_starts(keys, low, high, SPANS)
    other = BLOCK - offset
    _append(
        kept, 0, ids_ptr + offset, buffer_ptr + other, ids_ptr + other, starts, low, high, k - above,
        True, GROUP, REPS, SPANS,
    )  # fmt: skip
    return _number(total, k - above), tl.where(passing >= k, low, floor)


@triton.jit
def _collect(
    row, buffer_ptr, ids_ptr, floor, k, GROUP: tl.constexpr, REPS: tl.constexpr, SPANS: tl.constexpr
):  # fmt: skip
    """Collect the candidates of a row in the buffer, in order. Return (offset, number) of them.

    Candidates are keys above floor that may be among the k largest. They use one half of the buffer, which holds a
    tile. The row is read by half tiles, and k is at most half a tile. If the next candidates do not fit, the k largest
    so far are moved to the other half.
    """
    BLOCK: tl.constexpr = REPS * SPANS * COLUMNS
    count, offset = 0, 0
    for begin in range(row.first // GROUP * GROUP, row.end, BLOCK // 2):
        keys = _load_keys(row, begin, GROUP, REPS // 2, SPANS)
        starts, passing = _span_starts(keys, floor, floor + 1, SPANS)
        if count + (passing & 0xFFFF) > BLOCK:
            count, floor = _cut(buffer_ptr, ids_ptr, count, offset, floor, k, GROUP, REPS, SPANS)
            offset = BLOCK - offset
            starts, passing = _span_starts(_load_keys(row, begin, GROUP, REPS // 2, SPANS), floor, floor + 1, SPANS)
        if (passing & 0xFFFF) > 0:
            _append(
                row, begin, ids_ptr, buffer_ptr + offset + count, ids_ptr + offset + count, starts, floor, floor + 1, 0,
                False, GROUP, REPS // 2, SPANS,
            )  # fmt: skip
            count += passing & 0xFFFF
    tl.debug_barrier()  # the writes of other warps are read
    return offset, count


@triton.jit
def _write(outputs, pages, place, index, keys, picked):
    """Write the picked indices of a row to their places."""
    slot = index
    if pages.given != 0:
        quotient = tl.umulhi(2 * index.to(tl.uint32), pages.multiplier.to(tl.uint32, bitcast=True))
        page = (quotient >> pages.shift).to(tl.int32)
        known = picked & (page < pages.num_pages)
        physical = tl.load(pages.table_ptr + page, mask=known, other=-1)  # [SPANS, COLUMNS]
        in_page = index - page * pages.page_size
        slot = tl.where((physical >= 0) & (physical <= pages.limit), physical * pages.page_size + in_page, -1)
    tl.store(outputs.out_ptr + place, slot, mask=picked)  # [SPANS, COLUMNS]
    if outputs.gives_scores != 0:
        tl.store(outputs.scores_ptr + place, _score(keys), mask=picked)  # [SPANS, COLUMNS]
    if outputs.gives_raw != 0:
        tl.store(outputs.raw_ptr + place, index, mask=picked)  # [SPANS, COLUMNS]


@triton.jit
def _fill(outputs, number, k):
    """Write -1, and -inf as score, after the picked indices of a row."""
    for start in range(number, k, COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        tl.store(outputs.out_ptr + columns, -1, mask=columns < k)  # [COLUMNS]
        if outputs.gives_scores != 0:
            tl.store(outputs.scores_ptr + columns, float("-inf"), mask=columns < k)  # [COLUMNS]
        if outputs.gives_raw != 0:
            tl.store(outputs.raw_ptr + columns, -1, mask=columns < k)  # [COLUMNS]


@_launch.kernel
def _topk_kernel(
    logits_ptr, starts_ptr, lens_ptr, page_table_ptr, row_to_batch_ptr, page_starts_ptr,
    out_ptr, scores_ptr, raw_ptr, candidates_ptr, candidate_ids_ptr,
    num_rows, num_columns, k, next_n, has_starts, lens_are_ends, gives_scores, gives_raw,
    has_pages, has_batches, has_page_starts, num_batches, num_pages, page_size, page_limit, page_multiplier,
    page_shift, programs,
    logits_stride: tl.int64, page_table_stride: tl.int64, out_stride: tl.int64, scores_stride: tl.int64,
    raw_stride: tl.int64,
    ITEMSIZE: tl.constexpr, ALIGNMENT: tl.constexpr, IS_LONG: tl.constexpr, REPS: tl.constexpr, SPANS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Select the k largest of each row, exactly, in ascending order of columns. Among equals, select the first.

    Grid: (programs,). A program takes every `programs`-th row. logits is f32, or bf16 if ITEMSIZE is 2, [num_rows,
    num_columns]. lens is i32 [num_rows / next_n]; starts, row_to_batch and page_starts are i32 [num_rows]; page_table
    is i32 [num_batches, any]; out, scores and raw are [num_rows, k]. Rows longer than a tile use candidates, of the
    dtype of logits, and candidate_ids, i32, both [programs, 2, BLOCK]. If a flag is 0, its tensor is not accessed.
    """
    BLOCK: tl.constexpr = REPS * SPANS * COLUMNS
    GROUP: tl.constexpr = max(ALIGNMENT // ITEMSIZE, 1)
    program = tl.program_id(0)
    _launch.pdl_wait(PDL)
    buffer_ptr = candidates_ptr + program.to(tl.int64) * 2 * BLOCK
    ids_ptr = candidate_ids_ptr + program.to(tl.int64) * 2 * BLOCK
    for turn in range(program, num_rows, programs):
        number = turn + program * 0  # also a tensor in the interpreter
        row = _row(
            logits_ptr, starts_ptr, lens_ptr, number, num_columns, next_n, has_starts, lens_are_ends, logits_stride
        )  # fmt: skip
        line = number.to(tl.int64)
        begin, offset, chosen = row.first // GROUP * GROUP, 0, row
        buffered = row.end - begin > BLOCK
        if IS_LONG and buffered:
            floor = _sample_floor(row, k, BLOCK // 2)
            count, remains = 0, True
            while remains:
                offset, count = _collect(row, buffer_ptr, ids_ptr, floor, k, GROUP, REPS, SPANS)
                remains = (count < k) & (floor > 0)  # the sample did not represent the row
                floor = floor * 0
            begin, chosen = 0, Row(buffer_ptr + offset, count * 0, count)
        keys = _load_keys(chosen, begin, GROUP, REPS, SPANS)
        low, high, above, _ = _search(keys, tl.zeros([], tl.uint32), k, 0)
        starts, total = _span_starts(keys, low, high, SPANS)
        outputs = Outputs(
            out_ptr + line * out_stride, scores_ptr + line * scores_stride, raw_ptr + line * raw_stride,
            gives_scores, gives_raw,
        )  # fmt: skip
        pages = _pages(
            page_table_ptr, row_to_batch_ptr, page_starts_ptr, number, has_pages, has_batches, has_page_starts,
            num_batches, num_pages, page_size, page_limit, page_multiplier, page_shift, page_table_stride,
        )  # fmt: skip
        for rep in range(REPS):
            columns, picks, picked, place, flags = _picked(
                chosen, begin, rep, starts, low, high, k - above, GROUP, REPS, SPANS
            )  # fmt: skip
            index = columns - row.first
            if IS_LONG:
                stored = tl.load(ids_ptr + offset + columns, mask=picked & buffered, other=0)  # [SPANS, COLUMNS]
                index = tl.where(buffered, stored - row.first, index)
            _write(outputs, pages, place, index, picks, picked)
            starts += flags
        _fill(outputs, _number(total, k - above), k)
        if IS_LONG:
            tl.debug_barrier()  # read all candidates before those of the next row overwrite them


@_launch.kernel
def _merge_kernel(
    scores_ptr, ids_ptr, out_ptr, out_scores_ptr, num_columns, group_columns, num_groups, k, gives_scores,
    scores_stride: tl.int64, ids_stride: tl.int64, out_stride: tl.int64, out_scores_stride: tl.int64,
    REPS: tl.constexpr, SPANS: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Select the k largest of each group of candidates, in ascending order of ids. Among equals, select smaller ids.

    Grid: (num_rows * num_groups,). scores is f32, and ids is i32, [num_rows, num_columns]. A group has group_columns of
    these columns, at most a tile. out is i32, and out_scores is f32, [num_rows, num_groups * k]. Each program writes
    its k columns, at most BLOCK_K, first unordered. If gives_scores is 0, out_scores is not accessed.
    """
    program = tl.program_id(0)
    _launch.pdl_wait(PDL)
    line = (program // num_groups).to(tl.int64)
    group = program % num_groups
    first = group * group_columns
    columns = _columns(first, REPS, SPANS)
    inside = columns < tl.minimum(first + group_columns, num_columns)
    ids = tl.load(ids_ptr + line * ids_stride + columns, mask=inside, other=-1)  # [REPS, SPANS, COLUMNS]
    scores = tl.load(scores_ptr + line * scores_stride + columns, mask=ids >= 0, other=float("-inf"))
    keys = _key(scores)
    nothing = tl.zeros([], tl.uint32)
    low, high, above, _ = _search(keys, nothing, k, 0)
    # Among equal scores, the smaller id has the larger key.
    order = tl.where((keys >= low) & (keys < high), 0x80000000 - ids.to(tl.uint32, bitcast=True), 0)
    least, _, _, _ = _search(order, nothing, k - above, 0)
    chosen = ((keys >= high) | (order >= least)).to(tl.uint32)
    starts, total = _span_starts(chosen, nothing + 1, nothing + 2, SPANS)
    sums = tl.sum(chosen.to(tl.int32), 2)  # [REPS, SPANS]
    before = tl.cumsum(sums, 0) - sums + ((starts >> 16) & 0xFFFF)[None, :]
    place = before[:, :, None] + tl.cumsum(chosen.to(tl.int32), 2) - 1
    out_row = out_ptr + line * out_stride + group * k
    scores_row = out_scores_ptr + line * out_scores_stride + group * k
    tl.store(out_row + place, ids, mask=(chosen > 0) & (place < k))  # [REPS, SPANS, COLUMNS]
    if gives_scores != 0:
        tl.store(scores_row + place, _score(keys), mask=(chosen > 0) & (place < k))  # [REPS, SPANS, COLUMNS]
    tl.debug_barrier()
    number = tl.minimum((total >> 16) & 0xFFFF, k)
    ranks = tl.arange(0, BLOCK_K)
    found = tl.load(out_row + ranks, mask=ranks < number, other=0x7FFFFFFF)  # [BLOCK_K]
    taken = tl.load(scores_row + ranks, mask=(ranks < number) & (gives_scores != 0), other=float("-inf"))  # [BLOCK_K]
    pairs = (found.to(tl.int64) << 32) | taken.to(tl.uint32, bitcast=True).to(tl.int64)
    pairs = tl.sort(pairs)
    tl.debug_barrier()  # read all before any is overwritten
    tl.store(out_row + ranks, tl.where(ranks < number, (pairs >> 32).to(tl.int32), -1), mask=ranks < k)  # [BLOCK_K]
    if gives_scores != 0:
        taken = (pairs & 0xFFFFFFFF).to(tl.uint32).to(tl.float32, bitcast=True)
        tl.store(scores_row + ranks, tl.where(ranks < number, taken, float("-inf")), mask=ranks < k)  # [BLOCK_K]
