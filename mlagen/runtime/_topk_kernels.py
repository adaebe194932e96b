"""Top-k kernels: `topk.py` describes and launches them."""

from typing import NamedTuple

import triton
import triton.language as tl

from . import _launch

# Keys are unsigned and ordered as the scores are, +0 and -0 alike; NaN and -inf have key 0, which is never picked.
LAST_KEY = tl.constexpr(0xFF000000)  # of +inf
BEYOND = tl.constexpr(0xFFFFFFFF)  # larger than any key
COLUMNS = tl.constexpr(128)  # of a tile [REPS, SPANS, COLUMNS]; a span, REPS * COLUMNS in order, is a warp's
MARGIN = tl.constexpr(4.0)  # a sample's threshold may miss by this many standard deviations


@triton.jit
def _key(score):
    """fp32 scores as ordered keys: a negative one's counts down from zero's."""
    bits = score.to(tl.uint32, bitcast=True)
    key = tl.where(bits >= 0x80000000, 0 - bits, bits + 0x80000000) - 0x00800000
    return tl.where(key <= LAST_KEY, key, 0)


@triton.jit
def _score(key):
    """The score of a key; of key 0 it is -inf."""
    ordered = key + 0x00800000
    return tl.where(ordered >= 0x80000000, ordered - 0x80000000, 0 - ordered).to(tl.float32, bitcast=True)


@triton.jit
def _columns(begin, REPS: tl.constexpr, SPANS: tl.constexpr):
    """Columns of a tile from `begin` on, [REPS, SPANS, COLUMNS]."""
    first = begin + tl.arange(0, SPANS)[:, None] * (REPS * COLUMNS) + tl.arange(0, COLUMNS)[None, :]
    return first[None, :, :] + tl.arange(0, REPS)[:, None, None] * COLUMNS


@triton.jit
def _count(flags):
    """How many are set of a tile."""
    return tl.sum(tl.reshape(flags.to(tl.int32), [flags.numel], can_reorder=True), 0)


@triton.jit
def _least(keys, flags):
    """The least of a tile's keys that are flagged; BEYOND where none is."""
    return tl.min(tl.reshape(tl.where(flags, keys, BEYOND), [keys.numel], can_reorder=True), 0)


@triton.jit
def _most(keys, flags):
    """The largest of a tile's keys that are flagged; 0 where none is."""
    return tl.max(tl.reshape(tl.where(flags, keys, 0), [keys.numel], can_reorder=True), 0)


@triton.jit
def _inside(key, low, high):
    """A key between two that are apart by more than one; their middle where it is none."""
    middle = low + ((high - low) >> 1)
    return tl.where(key == 0, middle, tl.minimum(tl.maximum(key, low + 1), high - 1))


@triton.jit
def _search(keys, floor, k, slack):
    """(low, high, above, passing): keys from high on, `above` < k of them, and low <= key < high as far as k reaches.

    Keys up to floor are left out; `passing` are above it. Where there are more than k, those from low on are k to
    k + slack, or all in [low, high) are equal. Two guesses a step: where the counts at both ends point to, and the
    middle of the scores; of the keys after two steps that left most of them.
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
        if left == between:  # only keys beyond the interval's own were cut off: it ends at keys that are there
            low, high = _least(keys, keys >= low), _most(keys, keys < high) + 1
        stalls = tl.where((2 * left > between) & (stalls < 3), stalls + 1, 0)
    return low, high, above, passing


@triton.jit
def _flags(keys, low, high):
    """Keys from high on in the lower half of 32 bits, those of [low, high) in the upper one: one sum counts both."""
    return (keys >= high).to(tl.int32) + (((keys >= low) & (keys < high)).to(tl.int32) << 16)


@triton.jit
def _span_starts(keys, low, high, SPANS: tl.constexpr):
    """(starts, total) of a tile's flags: those in the spans before each, [SPANS], and in all."""
    counts = tl.sum(tl.sum(_flags(keys, low, high), 2), 0)
    span = tl.arange(0, SPANS)
    return tl.sum(tl.where(span[:, None] < span[None, :], counts[:, None], 0), 0), tl.sum(counts, 0)


@triton.jit
def _number(flags, wanted):
    """How many are picked: all from high on, and the first `wanted` of those below."""
    return (flags & 0xFFFF) + tl.minimum((flags >> 16) & 0xFFFF, wanted)


class Row(NamedTuple):
    """Scores [first, end) at an address."""

    scores_ptr: tl.tensor
    first: tl.tensor
    end: tl.tensor


class Outputs(NamedTuple):
    """Where a row's results go: indices, and scores and the indices before their pages where they are asked for."""

    out_ptr: tl.tensor
    scores_ptr: tl.tensor
    raw_ptr: tl.tensor
    gives_scores: tl.tensor
    gives_raw: tl.tensor


class Pages(NamedTuple):
    """Pages that indices are mapped through, where a call has any: a row's of the table; the last that int32 holds."""

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
    """A row's scores, by its number."""
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
    """A row's pages, by its number."""
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
    """Keys of columns in whole, aligned groups; 0 outside the row. The row's last group is there whole."""
    limit = (row.end + GROUP - 1) // GROUP * GROUP
    scores = tl.load(pointers, mask=columns < limit, other=float("-inf")).to(tl.float32)
    return tl.where((columns >= row.first) & (columns < row.end), _key(scores), 0)


@triton.jit
def _load_keys(row, begin, GROUP: tl.constexpr, REPS: tl.constexpr, SPANS: tl.constexpr):
    """Keys of a tile from a group's column on."""
    columns = _columns(begin // GROUP * GROUP, REPS, SPANS)
    ALIGNMENT: tl.constexpr = 16 if GROUP > 1 else 1
    pointers = tl.multiple_of(row.scores_ptr + columns, [1, 1, ALIGNMENT])
    return _masked_keys(row, columns, pointers, GROUP)  # [REPS, SPANS, COLUMNS]


@triton.jit
def _sample_floor(row, k, SAMPLE: tl.constexpr):
    """A key that more than k of a row's are likely above, by 8 neighbouring columns of every so many; 0: any."""
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
    """(column, key, picked, place, flags) of a tile's rep, [SPANS, COLUMNS], and its flags of each span.

    Spans stand in order, and so do a span's reps: `starts` has the flags before each.
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
    """Writes a tile's picked scores and their columns, or the ids that stand in their places, in order."""
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
    """(number, floor): the k largest of a row's candidates go to the other half; later ones have to exceed `floor`."""
    BLOCK: tl.constexpr = REPS * SPANS * COLUMNS
    tl.debug_barrier()  # other warps' writes are read
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
    """(offset, number): a row's candidates, in order: keys above floor that no k others exceed or come before.

    They fill half of the buffer at most, which is a tile, and come by half a tile, which k does not exceed: where the
    next ones would not fit, the k largest of those so far are kept.
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
    tl.debug_barrier()  # other warps' writes are read
    return offset, count


@triton.jit
def _write(outputs, pages, place, index, keys, picked):
    """A row's picked indices, each at its place."""
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
    """-1, and as score -inf, behind a row's picked indices."""
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
    """The k largest of each row, exact and in ascending order of columns; of equals the first.

    Grid: (programs,), each for every so many rows. logits f32, or bf16 where ITEMSIZE is 2, [num_rows, num_columns];
    lens i32 [num_rows / next_n]; starts, row_to_batch, page_starts i32 [num_rows] and page_table i32
    [num_batches, any] where their flags say so; out, scores, raw [num_rows, k]; candidates, of logits' dtype, and
    candidate_ids i32 [programs, 2, BLOCK], for rows longer than a tile. Where a flag is 0, its tensor is not touched.
    """
    BLOCK: tl.constexpr = REPS * SPANS * COLUMNS
    GROUP: tl.constexpr = max(ALIGNMENT // ITEMSIZE, 1)
    program = tl.program_id(0)
    _launch.pdl_wait(PDL)
    buffer_ptr = candidates_ptr + program.to(tl.int64) * 2 * BLOCK
    ids_ptr = candidate_ids_ptr + program.to(tl.int64) * 2 * BLOCK
    for turn in range(program, num_rows, programs):
        number = turn + program * 0  # a tensor in the interpreter too
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
                remains = (count < k) & (floor > 0)  # the sample was not like the row
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
            tl.debug_barrier()  # candidates are read before the next row's overwrite them


@_launch.kernel
def _merge_kernel(
    scores_ptr, ids_ptr, out_ptr, out_scores_ptr, num_columns, group_columns, num_groups, k, gives_scores,
    scores_stride: tl.int64, ids_stride: tl.int64, out_stride: tl.int64, out_scores_stride: tl.int64,
    REPS: tl.constexpr, SPANS: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The k largest of each group of a row's candidates, in ascending order of ids; of equals those of smaller ids.

    Grid: (num_rows * num_groups,). scores f32, ids i32 [num_rows, num_columns]; a group has group_columns of them, a
    tile at most; out i32, out_scores f32 [num_rows, num_groups * k]; each program writes k columns of them, at most
    BLOCK_K, first unordered. out_scores is untouched where gives_scores is 0.
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
    # Among equals the smaller id has the larger key.
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
    tl.debug_barrier()  # all are read before any is overwritten
    tl.store(out_row + ranks, tl.where(ranks < number, (pairs >> 32).to(tl.int32), -1), mask=ranks < k)  # [BLOCK_K]
    if gives_scores != 0:
        taken = (pairs & 0xFFFFFFFF).to(tl.uint32).to(tl.float32, bitcast=True)
        tl.store(scores_row + ranks, tl.where(ranks < number, taken, float("-inf")), mask=ranks < k)  # [BLOCK_K]
