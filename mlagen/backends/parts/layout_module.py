"""Context of the template of a cache's layout, and of its parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mlagen.layout import CacheLayout
from mlagen.plan import Chunk
from mlagen.plan.conversions import AmaxScale, Quotient


@dataclass(frozen=True)
class Scales:
    """Template context for the scales of a chunk.

    Attributes:
        tile: columns that a scale is for.
        count: number of scales.
        block: scales that a block holds; with padding if `masked`.
        masked: whether it has padding.
        order: "in order", "runs" or "scattered": how the field holds them.
        first: number in the field of the first of them.
        interleave: runs of the field.
        per_run: scales of a run.
        rows: addresses of the scales of each row, as text.
        alignment: known alignment of these, as text; None: not beyond the element size.
        dtype: of the field.
    """

    tile: int
    count: int
    block: int
    masked: bool
    order: str
    first: int
    interleave: int
    per_run: int
    rows: str
    alignment: str | None
    dtype: str


@dataclass(frozen=True)
class LoadedScales(Scales):
    """Template context for scales that are loaded.

    Attributes:
        one: whether there is one, of a whole chunk.
        selected: whether the padding is loaded as well and then replaced.
        loaded: variable that takes the loaded scales.
        adds_factor: whether they take over the factor that decoded columns lack.
    """

    one: bool
    selected: bool
    loaded: str
    adds_factor: bool


@dataclass(frozen=True)
class StoredScales(Scales):
    """Template context for scales that are stored.

    Attributes:
        power_of_two: whether they are powers of two.
        rounded: whether they are rounded to e4m3.
        of_amax: how a tile's largest value becomes a scale before rounding.
        by_reciprocal: whether that is a product with the divisor's reciprocal.
        divisor, floor: of the rule.
        largest: largest value of their dtype; None if that is fp32's.
        quotient: how columns are divided by their scales.
        fills_pad: whether the padding behind the scales takes the padding of their block.
    """

    power_of_two: bool
    rounded: bool
    of_amax: AmaxScale
    by_reciprocal: bool
    divisor: float
    floor: float
    largest: float | None
    quotient: Quotient
    fills_pad: bool


@dataclass(frozen=True)
class Columns:
    """Template context for the columns of a chunk in a row of the cache.

    Attributes:
        name: suffix of the variables that hold them.
        start, end: the columns.
        masked: whether their block has padding.
        quantised: whether they are stored in another dtype than the model's.
        mask: the mask of loads and stores, as text.
        tensor_scale: whether they have the tensor's scale.
        rows: addresses of the columns of each row, as text.
        alignment: known alignment of these, as text; None: not beyond the element size.
        dtype: of the field.
    """

    name: str
    start: int
    end: int
    masked: bool
    quantised: bool
    mask: str
    tensor_scale: bool
    rows: str
    alignment: str | None
    dtype: str


@dataclass(frozen=True)
class LoadedColumns(Columns):
    """Template context of a chunk that attention loads.

    Attributes:
        columns: number of columns.
        lacks_factor: whether decoded columns lack a factor that no scale takes over.
        scales: their scales, or None.
        pairs: whether they are stored two a byte, and a block has both columns of every byte.
        nibbles: whether they are stored two a byte, and a block has one column of some bytes.
        first_nibble: position in its byte of the first column.
    """

    columns: int
    lacks_factor: bool
    scales: LoadedScales | None
    pairs: bool
    nibbles: bool
    first_nibble: int


@dataclass(frozen=True)
class StoredColumns(Columns):
    """Template context of a chunk that writers store.

    Attributes:
        scales: their scales, or None.
        block: columns of a block.
        places, count: stored elements of a block and of its columns.
        quotients: variable of the columns divided by their scales.
        limited: whether columns are clamped before they are divided by the tensor's scale.
        how: text behind the columns, for docstrings.
    """

    scales: StoredScales | None
    block: int
    places: int
    count: int
    quotients: str
    limited: bool
    how: str


@dataclass(frozen=True)
class Pad:
    """Template context of padding.

    Attributes:
        block: elements of a block.
        rows: addresses of the padding of each row, as text.
        alignment: known alignment of these, as text; None: not beyond the element size.
        mask: the mask of stores, as text.
    """

    block: int
    rows: str
    alignment: str | None
    mask: str


@dataclass(frozen=True)
class Decodes:
    """The dtypes that a module decodes."""

    e4m3: bool
    e4m3fnuz: bool
    e2m1: bool
    ue8m0: bool


@dataclass(frozen=True)
class Encodes:
    """The helpers that a module encodes columns and scales with.

    Attributes:
        e4m3, e4m3fnuz, e2m1: encoders of these dtypes.
        e2m1_halves: whether the encoder of e2m1 computes in fp16.
        short: quotients of few bits.
        exponents: exponents of the next powers of two.
        reciprocals: reciprocals of powers of two.
        quotients: exact quotients.
    """

    e4m3: bool = False
    e4m3fnuz: bool = False
    e2m1: bool = False
    e2m1_halves: bool = False
    short: bool = False
    exponents: bool = False
    reciprocals: bool = False
    quotients: bool = False


@dataclass(frozen=True)
class Slices:
    """Template context for quantising a row from its slices.

    Attributes:
        width: columns of a slice.
        places: stored elements of a slice.
        each: slices of a tile.
        tile_parameters: parameters of the function that stores a tile, as text.
        tiles: scales and arguments of each call of that function, as text.
        halves: scales at even and at odd positions, joined, as text; empty if all are joined at once.
        joined: all scales, joined, as text; None for one.
    """

    width: int
    places: int
    each: int
    tile_parameters: str
    tiles: Sequence[tuple[str, str]]
    halves: Mapping[str, str]
    joined: str | None


@dataclass(frozen=True)
class TensorArgument:
    """Template context of a tensor of fields besides the cache tensor.

    Attributes:
        name: its argument of wrappers.
        rows: addresses of tokens' rows in it.
        columns: elements of a row.
        dtype: torch's name of its dtype.
        contents: its fields, for docstrings.
    """

    name: str
    rows: str
    columns: int
    dtype: str
    contents: str


@dataclass(frozen=True)
class Arguments:
    """Text for argument lists of a layout's helpers in kernels.

    Attributes:
        rows: results of row_pointers.
        row_strides: arguments of row_pointers after page_stride.
        places: the same as names.
        declared, passed: the same as parameters of a kernel, and as its arguments, with a line for each tensor.
        tensors: tensors of fields besides the cache tensor.
    """

    rows: str
    row_strides: str
    places: Sequence[str] = ()
    declared: str = ""
    passed: str = ""
    tensors: Sequence[TensorArgument] = ()


@dataclass(frozen=True)
class RowWriter:
    """Facts of a layout that templates of kernels take which write rows.

    Attributes:
        unit_name: "bytes" or "columns", the elements of the cache tensor.
        element: Triton's name of the model's dtype.
        args: text for argument lists of the layout's helpers.
        pads: padding that they store.
    """

    unit_name: str
    element: str
    args: Arguments
    pads: Sequence[Pad]


@dataclass(frozen=True)
class LayoutModule(RowWriter):
    """Context of a layout's template.

    Attributes:
        dtype: the model's dtype.
        layout: the layout.
        plane_sizes: elements of a row in each plane.
        row_constant: name of the constant with a row's elements.
        row_sum, row_size: that number, as a sum of fields and as one.
        row_alignment: rows begin at multiples of this many elements.
        page_multiple: pages are rounded up to multiples of this many elements.
        load_parameters, store_parameters, pad_parameters, slices_parameters: parameters of these functions, as text.
        reads: whether a kernel loads rows.
        stored: chunks that writers store.
        decodes, encodes: helpers for its dtypes.
        stores: rows of the cache, as text.
        attends: whether attention reads the cache by indices.
        chunks: blocks of a row's loads.
        loaded: chunks that attention loads.
        slices: how a row is quantised from its slices; None: not from slices.
        whole: whether rows are stored whole.
    """

    dtype: str
    layout: CacheLayout
    plane_sizes: Sequence[int]
    row_constant: str
    row_sum: str
    row_size: int
    row_alignment: int
    page_multiple: int
    load_parameters: str
    store_parameters: str
    pad_parameters: str
    slices_parameters: str
    reads: bool
    stored: Sequence[StoredColumns]
    decodes: Decodes
    encodes: Encodes
    stores: str = "a cached token"
    attends: bool = False
    chunks: Sequence[Chunk] = ()
    loaded: Sequence[LoadedColumns] = ()
    slices: Slices | None = None
    whole: bool = True
