"""Top-k of rows of scores: exact, and the same bits in every run, batch and split.

A row's k largest scores are picked. Among equal scores (+0 and -0 are equal) the smallest indices are picked. NaN and
-inf are never picked. Indices are in ascending order, padded with -1. Scores, if requested, are in the order of their
indices, padded with -inf; a score of -0 is returned as 0.
"""

from types import SimpleNamespace

import torch

from . import _calls, _launch, _topk
from ._launch import integer
from ._topk import MOST_COLUMNS, MOST_K, call_of, check_rows, check_vector, variants

__all__ = [
    "persistent_topk",
    "top_k_page_table_transform",
    "top_k_per_row_decode",
    "top_k_per_row_prefill",
    "topk_merge",
    "variants",
]


def _check_logits(name: str, logits: torch.Tensor) -> tuple[int, torch.device]:
    """Check scores. Returns their columns and device."""
    dtype = torch.bfloat16 if getattr(logits, "dtype", None) is torch.bfloat16 else torch.float32
    _, columns = _launch.check(name, logits, dtype, (None, None), None)
    if columns > MOST_COLUMNS:
        raise ValueError(f"{name}: got {columns} columns, takes at most {MOST_COLUMNS}")
    if logits.stride(0) < 0:
        raise ValueError(f"{name}: got row stride {logits.stride(0)}, takes none below 0")
    _launch.device_facts(logits.device)
    return columns, logits.device


def _check_strides(logits: torch.Tensor, num_rows: int, stride0: int, stride1: int) -> int:
    """Check the sizes and strides that callers of vLLM's operators pass. Returns the number of rows."""
    rows = integer("num_rows", num_rows, 0, logits.shape[0])
    if rows > 1:
        integer("stride0", stride0, logits.stride(0), logits.stride(0))
    if logits.shape[1] > 1:
        integer("stride1", stride1, 1, 1)
    return rows


def _sources(logits: str, lens: str, out: str) -> dict[str, str | tuple[str, ...]]:
    """Return the wrapper arguments behind each kernel argument, including stand-ins for absent tensors."""
    return {
        "logits": logits,
        "lens": lens,
        "starts": ("row_starts", lens),
        "out": out,
        "raw": ("out_raw_indices", out),
        "scores": ("scores", lens),
        "page_table": ("src_page_table", lens),
        "row_to_batch": ("row_to_batch", lens),
        "page_starts": ("page_table_row_starts", "row_starts", lens),
        "candidates": ("scores", lens),
        "candidate_ids": lens,
        "counts": lens,
    }


@_calls.validated(**_sources("logits", "row_ends", "indices"))
def top_k_per_row_prefill(
    logits: torch.Tensor,
    row_starts: torch.Tensor,
    row_ends: torch.Tensor,
    indices: torch.Tensor,
    num_rows: int,
    stride0: int,
    stride1: int,
    topk: int,
    *,
    scores: torch.Tensor | None = None,
) -> None:
    """Top-k of columns [start, end) of each row, with vLLM's signature.

    Args:
        logits: fp32 or bf16 [num_rows or more, N], any row stride. Columns outside a row's range are not read.
        row_starts, row_ends: int32 [num_rows or more], clamped to [0, N]; a range may be empty.
        indices: int32 [num_rows or more, topk], any row stride, to write picked columns to, relative to row_starts.
        num_rows: rows to select from.
        stride0, stride1: strides of logits; stride1 is 1.
        topk: number of columns to pick, 1 to 4096.
        scores: fp32 [num_rows or more, topk], any row stride, to write their scores to.

    Raises:
        TypeError, ValueError: an argument has an unsupported dtype, shape, stride or device.
    """
    _, device = _check_logits("logits", logits)
    rows = _check_strides(logits, num_rows, stride0, stride1)
    check_vector("row_starts", row_starts, rows, device)
    check_vector("row_ends", row_ends, rows, device)
    k = integer("topk", topk, 1, MOST_K)
    check_rows("indices", indices, torch.int32, rows, k, device)
    if scores is not None:
        check_rows("scores", scores, torch.float32, rows, k, device)
    _topk.select(call_of(logits, row_ends, indices, rows, k, scores, starts=row_starts, lens_are_ends=True))


@_calls.validated(**_sources("logits", "seq_lens", "indices"))
def top_k_per_row_decode(
    logits: torch.Tensor,
    next_n: int,
    seq_lens: torch.Tensor,
    indices: torch.Tensor,
    num_rows: int,
    stride0: int,
    stride1: int,
    topk: int,
    *,
    scores: torch.Tensor | None = None,
) -> None:
    """Top-k of each query token of a decode, with vLLM's signature.

    Row r is query token n = r % next_n of request r // next_n. It has columns [0, length - next_n + n + 1) if lengths
    are given per request, and [0, length) if they are given per token.

    Args:
        logits: fp32 or bf16 [num_rows or more, N], any row stride. Columns past a row's last are not read.
        next_n: query tokens per request.
        seq_lens: int32 [num_rows / next_n or more], keys of each request, or [num_rows / next_n or more, next_n], keys
            of each query token, contiguous; limited to N.
        indices: int32 [num_rows or more, topk], any row stride, to write picked columns to.
        num_rows: rows to select from, a multiple of next_n.
        stride0, stride1: strides of logits; stride1 is 1.
        topk: number of columns to pick, 1 to 4096.
        scores: fp32 [num_rows or more, topk], any row stride, to write their scores to.

    Raises:
        TypeError, ValueError: an argument has an unsupported dtype, shape, stride or device.
    """
    _, device = _check_logits("logits", logits)
    rows = _check_strides(logits, num_rows, stride0, stride1)
    next_n = integer("next_n", next_n, 1)
    if rows % next_n:
        raise ValueError(f"next_n: got {next_n}, takes a divisor of num_rows, {rows}")
    if isinstance(seq_lens, torch.Tensor) and seq_lens.dim() == 2:
        if seq_lens.shape[1] != next_n or not seq_lens.is_contiguous():
            got = f"shape {list(seq_lens.shape)}, strides {list(seq_lens.stride())}"
            raise ValueError(f"seq_lens: got {got}, takes [any, {next_n}], contiguous")
        seq_lens, next_n = seq_lens.view(-1), 1
    check_vector("seq_lens", seq_lens, rows // next_n, device)
    k = integer("topk", topk, 1, MOST_K)
    check_rows("indices", indices, torch.int32, rows, k, device)
    if scores is not None:
        check_rows("scores", scores, torch.float32, rows, k, device)
    _topk.select(call_of(logits, seq_lens, indices, rows, k, scores, next_n=next_n))


@_calls.validated(**_sources("logits", "lengths", "indices"))
def persistent_topk(
    logits: torch.Tensor,
    lengths: torch.Tensor,
    indices: torch.Tensor,
    workspace: torch.Tensor | None,
    k: int,
    max_seq_len: int,
    *,
    scores: torch.Tensor | None = None,
) -> None:
    """Top-k of columns [0, length) of each row, with vLLM's signature.

    Args:
        logits: fp32 or bf16 [T, N], any row stride. Columns past a row's length are not read.
        lengths: int32 [T] or [any, any] of T contiguous entries; limited to N.
        indices: int32 [T, k], any row stride, to write picked columns to.
        workspace: a tensor or None, ignored; this package allocates memory with torch if needed.
        k: number of columns to pick, 1 to 4096.
        max_seq_len: most columns of any row; further columns are ignored.
        scores: fp32 [T, k], any row stride, to write their scores to.

    Raises:
        TypeError, ValueError: an argument has an unsupported dtype, shape, stride or device.
    """
    columns, device = _check_logits("logits", logits)
    rows = logits.shape[0]
    if isinstance(lengths, torch.Tensor) and lengths.dim() == 2 and lengths.is_contiguous():
        lengths = lengths.view(-1)
    check_vector("lengths", lengths, rows, device, exact=True)
    k = integer("k", k, 1, MOST_K)
    check_rows("indices", indices, torch.int32, rows, k, device)
    most = integer("max_seq_len", max_seq_len, 0)
    if scores is not None:
        check_rows("scores", scores, torch.float32, rows, k, device)
    if workspace is not None and not isinstance(workspace, torch.Tensor):
        raise TypeError(f"workspace: got {type(workspace).__name__}, takes a tensor or None")
    _topk.select(call_of(logits if most >= columns else logits[:, :most], lengths, indices, rows, k, scores))


@_calls.validated(**_sources("input", "lengths", "out"))
def top_k_page_table_transform(
    input: torch.Tensor,  # noqa: A002
    src_page_table: torch.Tensor,
    lengths: torch.Tensor,
    k: int,
    row_to_batch: torch.Tensor | None = None,
    deterministic: bool = False,
    tie_break: int = 0,
    dsa_graph_safe: bool = False,
    row_starts: torch.Tensor | None = None,
    page_table_row_starts: torch.Tensor | None = None,
    *,
    page_size: int = 1,
    out: torch.Tensor | None = None,
    out_raw_indices: torch.Tensor | None = None,
    scores: torch.Tensor | None = None,
) -> torch.Tensor:
    """Top-k of each row as cache slots, with FlashInfer's signature.

    A row has columns [start, start + length), and a picked column's index counts from its start:

        slot = src_page_table[batch, table_start + index // page_size] * page_size + index % page_size

    Args:
        input: scores, fp32 or bf16 [T, N], any row stride. Columns outside a row's range are not read.
        src_page_table: int32 [B, pages], any row stride.
        lengths: int32 [T]; limited to N.
        k: number of columns to pick, 1 to 4096.
        row_to_batch: int32 [T], batch of each row; None: the row's number.
        deterministic, dsa_graph_safe: ignored; results are always deterministic, and calls can always be captured.
        tie_break: 0 or 1; both pick the smallest indices among equal scores.
        row_starts: int32 [T], first column of each row; None: 0.
        page_table_row_starts: int32 [T], first entry of each row in the page table; None: row_starts.
        page_size: slots per page, any number.
        out: int32 [T, k], any row stride, to write slots to.
        out_raw_indices: int32 [T, k], any row stride, to write indices to.
        scores: fp32 [T, k], any row stride, to write their scores to.

    Returns:
        slots: int32 [T, k], in the order of their indices, padded with -1. An index is also -1 if it lies past the page
        table's row, its batch is outside [0, B), or its page is negative or has slots beyond int32.

    Raises:
        TypeError, ValueError: an argument has an unsupported dtype, shape, stride or device.
    """
    _, device = _check_logits("input", input)
    rows = input.shape[0]
    batches, pages = _launch.check("src_page_table", src_page_table, torch.int32, (None, None), device)
    check_vector("lengths", lengths, rows, device, exact=True)
    k = integer("k", k, 1, MOST_K)
    integer("tie_break", tie_break, 0, 1)
    vectors = {"row_to_batch": row_to_batch, "row_starts": row_starts, "page_table_row_starts": page_table_row_starts}
    for name, vector in vectors.items():
        if vector is not None:
            check_vector(name, vector, rows, device, exact=True)
    size = integer("page_size", page_size, 1)
    if out is None:
        out = _calls.empty(rows, k, dtype=torch.int32, device=device)
    check_rows("out", out, torch.int32, rows, k, device)
    if out_raw_indices is not None:
        check_rows("out_raw_indices", out_raw_indices, torch.int32, rows, k, device)
    if scores is not None:
        check_rows("scores", scores, torch.float32, rows, k, device)
    call = call_of(input, lengths, out, rows, k, scores, starts=row_starts)
    call.has_pages, call.page_table, call.page_table_stride = 1, src_page_table, src_page_table.stride(0)
    call.num_batches, call.num_pages, call.page_size = batches, pages, size
    if row_to_batch is not None:
        call.row_to_batch, call.has_batches = row_to_batch, 1
    page_starts = row_starts if page_table_row_starts is None else page_table_row_starts
    if page_starts is not None:
        call.page_starts, call.has_page_starts = page_starts, 1
    if out_raw_indices is not None:
        call.raw, call.gives_raw = out_raw_indices, 1
    _topk.select(call)
    return out


@_calls.validated()
def topk_merge(
    scores: torch.Tensor,
    ids: torch.Tensor,
    k: int,
    out: torch.Tensor | None = None,
    out_scores: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Top-k of candidates from several ranks or parts of a row.

    Among equal scores the smallest ids are picked, in any order of candidates. So merging the top-k of the parts of a
    row gives the top-k of the row.

    Args:
        scores: fp32 [T, N], any row stride, for example the R * k candidates of R ranks side by side.
        ids: int32 [T, N], any row stride, unique in a row. Negative ids are never picked.
        k: number of columns to pick, 1 to 4096.
        out: int32 [T, k], any row stride, to write ids to.
        out_scores: fp32 [T, k], any row stride, to write scores to.

    Returns:
        ids: int32 [T, k], in ascending order, padded with -1.
        scores: fp32 [T, k], of each id, padded with -inf.

    Raises:
        TypeError, ValueError: an argument has an unsupported dtype, shape, stride or device.
    """
    rows, columns = _launch.check("scores", scores, torch.float32, (None, None), None)
    device = scores.device
    _launch.device_facts(device)
    if columns > MOST_COLUMNS:
        raise ValueError(f"scores: got {columns} columns, takes at most {MOST_COLUMNS}")
    _launch.check("ids", ids, torch.int32, (rows, columns), device)
    k = integer("k", k, 1, MOST_K)
    if out is None:
        out = _calls.empty(rows, k, dtype=torch.int32, device=device)
    if out_scores is None:
        out_scores = _calls.empty(rows, k, dtype=torch.float32, device=device)
    check_rows("out", out, torch.int32, rows, k, device)
    check_rows("out_scores", out_scores, torch.float32, rows, k, device)
    _topk.merge(SimpleNamespace(scores=scores, ids=ids, k=k, out=out, out_scores=out_scores))
    return out, out_scores
