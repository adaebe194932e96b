"""Quantised caches that the sm90 kernel of sparse attention reads, and why it does not read others."""

from __future__ import annotations

import math
from collections.abc import Mapping

from mlagen.layout import CacheLayout
from mlagen.layout.layout import MOST_LOADED
from mlagen.plan.sm90.dense_decode import E4M3_TAKES
from mlagen.plan.sm90.e4m3 import is_plain_e4m3, reads_e4m3
from mlagen.plan.sm90.kernel import D_V
from mlagen.plan.sm90.seesaw import SCALE_TILE, V4_SCALE_TILE, V41_SCALE_TILE
from mlagen.spec import DenseAttention, Spec

SCALE_BYTES = 4  # of an fp32 scale: rows of fewer than four scales may begin at multiples of their scales' bytes
# Columns behind V by those of V, of rows of e4m3: halves of V are whole scales, a warp shares out a row evenly, and two
# blocks of 64 rows fit together with Q.
CACHED_COLUMNS = {256: (0, 32, 64, 128), D_V: (0, 32, 64)}
PLANES_COLUMNS = {D_V: (0,)}  # likewise of V4's and V4.1's
V4_SCALES = 8  # bytes of a token in the second plane: seven scales and a pad
# Columns and scales of a row of V4.1, of the first and of the second cache.
V41_RUNS = (("e4m3", D_V, "ue8m0", 32), ("e2m1", D_V, "e4m3", V41_SCALE_TILE))


def cache_refusal(spec: Spec, layout: CacheLayout, extra_layout: CacheLayout | None) -> str | None:
    """Why no sm90 kernel reads quantised caches of a spec that `refusal` lets pass; None if one does.

    For dense attention over e4m3 that is why it has none: the call does not ask whether it has one.
    """
    dims = spec.model
    if isinstance(spec.attention, DenseAttention):
        if reads_e4m3(layout):
            return f"over a cache of {layout.name} {E4M3_TAKES}"
        return f"no sm90 kernel of dense attention reads a cache of {layout.name}" if layout.quantised else None
    if not reads_cache(layout, extra_layout) or dims.dtype != "bf16":  # as which the kernel takes Q apart
        names = layout.name if extra_layout is None else f"{layout.name} with a second one of {extra_layout.name}"
        return f"no sm90 kernel reads a cache of {names} for {dims.dtype}"
    if layout.planar or extra_layout is not None:
        return dims_refusal(spec, PLANES_COLUMNS)
    reason = dims_refusal(spec, CACHED_COLUMNS)
    if reason is None and not layout.tensor_scale and layout.data[0].count != dims.v_head_dim:
        reason = f"{layout.data[0].count} columns of a row have scales, and it supports scales of V's {dims.v_head_dim}"
    begins, least = load_unit(layout), least_unit(layout)
    if reason is None and begins < least:
        return (
            f"a row of {layout.row_bytes} bytes, or a field of it, is aligned to {begins} bytes, and it needs {least}"
        )
    return reason


def dims_refusal(spec: Spec, wanted: Mapping[int, tuple[int, ...]]) -> str | None:
    """Return why a kernel over a cache does not take a spec's rows, or None.

    Args:
        spec: the spec.
        wanted: numbers of columns behind V, by columns of V.
    """
    d_v = spec.model.v_head_dim
    tail = spec.model.d_qk - d_v
    if tail in wanted.get(d_v, ()):
        return None
    takes = ", or ".join(f"{columns} and {' or '.join(map(str, tails))}" for columns, tails in wanted.items())
    return f"a row has {d_v} columns of V and {tail} after them, and over such a cache it supports {takes}"


def reads_cache(layout: CacheLayout, extra_layout: CacheLayout | None) -> bool:
    """Whether the kernel that dequantises K reads caches of such kinds, of some dims.

    A cache of e4m3 with an fp32 scale for 128 columns, or with one scale a tensor; V4's caches; V4.1's two.
    fp32 scales stand in the row, and RoPE lies behind V or nowhere; ue8m0 ones, for 64 columns, in a second plane, and
    RoPE in V. V4.1's two caches have all columns as one run, e4m3 and e2m1, with their scales behind.
    """
    if extra_layout not in (None, layout):
        return (_run(layout), _run(extra_layout)) == V41_RUNS
    if layout.tensor_scale:
        return extra_layout is None and is_plain_e4m3(layout)
    latent, *tail = layout.data
    scales = layout.scales_of(latent)
    if scales is None or latent.dtype != "e4m3" or latent.offset != 0:
        return False
    if [field.dtype for field in tail] not in ([], ["bf16"]) or scales.interleave != 1:
        return False
    if layout.planar:
        return (
            [field.count for field in layout.data] == [7 * V4_SCALE_TILE, V4_SCALE_TILE]
            and (scales.dtype, scales.tile, scales.plane, scales.offset) == ("ue8m0", V4_SCALE_TILE, 1, 0)
            and (tail[0].offset, tail[0].plane) == (latent.count, 0)
            and layout.plane_bytes == (latent.count + 2 * tail[0].count, V4_SCALES)
        )
    return extra_layout is None and (scales.dtype, scales.tile) == ("fp32", SCALE_TILE)


def load_unit(layout: CacheLayout) -> int:
    """Return the greatest unit in bytes, at most a load's, that divides the first plane's rows and fields' offsets."""
    return math.gcd(MOST_LOADED, layout.plane_bytes[0], *(field.offset for field in layout.fields if field.plane == 0))


def least_unit(layout: CacheLayout) -> int:
    """Return the least unit of a cache without planes that the kernel reads: a row's scales are one load."""
    scales = layout.scales_of(layout.data[0])
    return MOST_LOADED if scales is None else min(MOST_LOADED, SCALE_BYTES * layout.data[0].count // scales.tile)


def _run(layout: CacheLayout) -> tuple[str, int, str, int] | None:
    """Dtype and columns of a row of one run, dtype of its scales in order and columns a scale; None: it is another."""
    row, *others = layout.data
    scales = layout.scales_of(row)
    if others or scales is None or layout.planar or scales.interleave != 1:
        return None
    if row.offset != 0 or scales.offset % MOST_LOADED or layout.row_bytes % MOST_LOADED:
        return None
    return row.dtype, row.count, scales.dtype, scales.tile
