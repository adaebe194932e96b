"""Runs the sm90 kernel of top-k in numpy, program by program: Triton's interpreter does not know Gluon.

A generated module is imported with stand-ins for Triton and Gluon, and its kernel is called as a function. Tensors have
values and no layouts. Inline assembly is known by its text. AssertionError: a read or write out of bounds, two stores
to one place, or a race. In a race two warps touch a word of shared memory between two barriers of the program, and one
of them writes it, or one counts atomically and the other does not.
"""

from __future__ import annotations

import importlib
import math
import re
import sys
from pathlib import Path
from types import ModuleType

import numpy as np

LANES = 32
INT, UINT, FLOAT = np.dtype("i4"), np.dtype("u4"), np.dtype("f4")
TYPES = {"int32": "i4", "uint32": "u4", "int64": "i8", "float32": "f4"}
WIDTHS = [np.dtype(name) for name in ("?", "i4", "u4", "i8", "f4")]  # of two operands, the later is the result's
OPERATORS = {
    **{name: getattr(np, name) for name in ("add", "subtract", "multiply", "divide")},
    **{f"bitwise_{name}": getattr(np, f"bitwise_{name}") for name in ("and", "or", "xor")},
    "floor_divide": lambda x, y: x // np.where(y == 0, 1, y),
    "remainder": lambda x, y: x % np.where(y == 0, 1, y),
    "left_shift": lambda x, y: np.where(y >= 32, 0, np.left_shift(x, y & 31)),
    "right_shift": lambda x, y: np.where(y >= 32, 0, np.right_shift(x, y & 31)),
    **{name: getattr(np, name) for name in ("less", "less_equal", "greater", "greater_equal", "equal", "not_equal")},
}
METHODS = {
    "add": "add", "subtract": "sub", "multiply": "mul", "divide": "truediv", "bitwise_and": "and", "bitwise_or": "or",
    "bitwise_xor": "xor", "floor_divide": "floordiv", "remainder": "mod", "left_shift": "lshift",
    "right_shift": "rshift", "less": "lt", "less_equal": "le", "greater": "gt", "greater_equal": "ge", "equal": "eq",
    "not_equal": "ne",
}  # fmt: skip


class Values:
    """A tensor, or a scalar."""

    def __init__(self, array):
        self.array = np.asarray(array)

    shape = property(lambda self: self.array.shape)

    def to(self, dtype, bitcast=False):
        array = self.array
        if bitcast:
            return Values(array.reshape(-1).view(dtype).reshape(array.shape))
        return Values(array.astype(dtype))

    def __getitem__(self, index):
        return Values(self.array[index])

    def __index__(self):
        return int(self.array)

    def __bool__(self):
        return bool(self.array)

    def taken(self, name, other, turned=False):
        if isinstance(other, Pointer):
            return NotImplemented
        mine, its = _alike(self, other)
        with np.errstate(all="ignore"):
            return Values(OPERATORS[name](*((its, mine) if turned else (mine, its))))


for _name, _method in METHODS.items():
    setattr(Values, f"__{_method}__", lambda self, other, name=_name: self.taken(name, other))
    if _method not in ("lt", "le", "gt", "ge", "eq", "ne"):
        setattr(Values, f"__r{_method}__", lambda self, other, name=_name: self.taken(name, other, turned=True))


class Pointer:
    """An address in an array."""

    def __init__(self, memory, offset=0):
        self.memory, self.offset = memory, offset

    def __add__(self, other):
        return Pointer(self.memory, self.offset + np.asarray(_values(other).array, np.int64))

    def masked(self, mask):
        """(mask, offsets), of one shape, of which those in the mask are in the array."""
        mask, offsets = np.broadcast_arrays(_values(mask).array.astype(bool), self.offset)
        assert ((offsets[mask] >= 0) & (offsets[mask] < len(self.memory))).all(), "out of bounds"
        return mask, offsets


def _values(given):
    if isinstance(given, Values):
        return given
    return Values(np.float32(given) if isinstance(given, float) else np.array(given & 0xFFFFFFFF, "u4").view("i4"))


def _alike(one, other):
    """The arrays of two operands, in the dtype of their result: a number has that of a tensor."""
    dtypes = [given.array.dtype for given in (one, other) if isinstance(given, Values)]
    if any(isinstance(given, float) for given in (one, other)):
        dtypes.append(FLOAT)
    elif len(dtypes) < 2:
        dtypes.append(dtypes[0] if dtypes and dtypes[0].kind != "b" else INT)
    dtype = max(dtypes, key=WIDTHS.index)
    arrays = []
    for given in (one, other):
        if isinstance(given, Values):
            arrays.append(given.array.astype(dtype))
        elif dtype == FLOAT:
            arrays.append(np.float32(given))
        else:
            arrays.append(np.array(given & 0xFFFFFFFF, "u4").view("i4").astype(dtype))
    return arrays


def _load(pointer, mask=True, other=0):
    mask, offsets = pointer.masked(mask)
    return Values(np.where(mask, pointer.memory[np.where(mask, offsets, 0)], np.array(other, pointer.memory.dtype)))


def _store(pointer, value, mask=True):
    mask, offsets = pointer.masked(mask)
    assert offsets.ndim == 0 or len(np.unique(offsets[mask])) == mask.sum(), "two stores to one place"
    pointer.memory[offsets[mask]] = np.broadcast_to(_values(value).array, mask.shape)[mask]


class Interval:
    """Accesses to shared memory since the last barrier: for each kind, the warps and the line that touched a word."""

    KINDS = ("read", "write", "atomic")

    def __init__(self, words):
        shape = (len(self.KINDS), words)
        self.first, self.last = np.full(shape, words, INT), np.full(shape, -1, INT)  # warps; none at first
        self.line = np.zeros(shape, INT)

    def touch(self, kind, words, warps):
        """Records an access. Raises AssertionError if another warp's access to one of the words races with it."""
        own, line = self.KINDS.index(kind), _kernel_line()
        np.minimum.at(self.first[own], words, warps)
        np.maximum.at(self.last[own], words, warps)
        self.line[own][words] = line
        for other, name in enumerate(self.KINDS):
            if {kind, name} not in ({"read"}, {"atomic"}):
                races = (self.first[other][words] < warps) | (self.last[other][words] > warps)
                lines = sorted(set(self.line[other][words[races]].tolist()))
                assert not lines, f"race: line {line} has a {kind}, line {lines[0]} a {name} by another warp"


def _kernel_line():
    """The line of the kernel's function that asks for an access, past its wrappers of inline assembly."""
    frame = sys._getframe(1)
    while frame.f_code.co_filename == __file__ or frame.f_code.co_name.endswith(("_shared", "_take_four")):
        frame = frame.f_back
    return frame.f_lineno


class Program:
    """What a program has beside its arguments: its number and words of shared memory."""

    number, words, start, interval = 0, np.zeros(0, INT), 0, Interval(0)

    def __init__(self, start, length):
        self.start, self.length = start, length

    def index(self, row):
        return Program(int(row) * self.length, self.length)

    def store(self, values):
        Program.words[self.start : self.start + self.length] = values.array


def _allocated(_dtype, shape, _layout):
    Program.words = np.random.default_rng(0).integers(-(2**31), 2**31, math.prod(shape)).astype(INT)
    Program.interval = Interval(len(Program.words))
    return Program(0, shape[1])


REDUCTIONS = {"add.s32": np.add, "min.u32": np.minimum, "max.u32": np.maximum}


def _by_lanes(function, array):
    """A function of what the lanes of each warp have, [..., LANES] to [..., LANES]."""
    return function(array.reshape(*array.shape[:-1], -1, LANES)).reshape(array.shape)


def _in_order(flags):
    """(before, total), as the kernel's function has it: a warp's [halves, 4, LANES] flags stand in order."""
    halves, fours, threads = flags.shape
    ordered = flags.astype(bool).reshape(halves * fours, -1, LANES).swapaxes(0, 1)
    through = ordered.reshape(len(ordered), -1).cumsum(1).astype(INT)
    before = (through.reshape(ordered.shape) - ordered).swapaxes(0, 1).reshape(flags.shape).astype(INT)
    total = np.zeros_like(before)
    total[0, 0] = np.repeat(through[:, -1], LANES)
    return Values(before), Values(total.reshape(halves, fours, threads))


def _change(instruction, words, at, value, changes=None):
    at, value, changes = np.broadcast_arrays(at, value, 1 if changes is None else changes)
    at, value = at[changes != 0], value[changes != 0]
    assert ((at >= 0) & (at < len(words))).all(), "out of shared memory"
    if instruction.startswith("st"):
        words[at] = value.view(INT) if value.dtype == UINT else value
        return
    action = REDUCTIONS[instruction.removeprefix("red.shared.").replace("add.u32", "add.s32")]
    action.at(words.view(UINT), at, np.ascontiguousarray(value).view(UINT))


def _touch(kind, at, changes=1):
    """Records that threads touch words: each thread one of the last dimension, or all a scalar."""
    at, changes, thread = np.broadcast_arrays(at, changes, np.arange(at.shape[-1] if at.ndim else 2 * LANES))
    Program.interval.touch(kind, at[changes != 0], thread[changes != 0] // LANES)


def _asm(text, _constraints, args, **_):
    arrays, words = [_values(one).array for one in args], Program.words
    if text.startswith("bar.sync"):
        Program.interval = Interval(len(words))
        return None
    if "ld.shared.v4" in text:
        assert ((arrays[0] >= 0) & (arrays[0] + 3 < len(words)) & (arrays[0] % 4 == 0)).all(), "out of shared memory"
        _touch("write", np.add.outer(np.arange(4), arrays[0]))
        taken = [words[arrays[0] + of_four].copy() for of_four in range(4)]
        words[np.add.outer(arrays[0], np.arange(4))] = 0
        return tuple(map(Values, taken))
    if "ld.shared" in text:
        assert ((arrays[0] >= 0) & (arrays[0] < len(words))).all(), "out of shared memory"
        _touch("read", arrays[0])
        return Values(words[arrays[0]].copy())
    if changed := re.search(r"((?:st|red)\.shared\.\S+) \[", text):
        _touch("write" if changed[1].startswith("st") else "atomic", arrays[0], *arrays[2:])
        return _change(changed[1], words, *arrays)
    if "vote.sync" in text:
        return _in_order(arrays[0])
    if "shfl.sync.up" in text:
        return Values(_by_lanes(lambda lanes: lanes.cumsum(-1, dtype=INT), arrays[0]))
    if reduced := re.match(r"redux\.sync\.(\S+)", text):
        reduction, unsigned = REDUCTIONS[reduced[1]], reduced[1].endswith("u32")
        array = arrays[0].view(UINT) if unsigned else arrays[0]

        def spread(lanes):
            found = reduction.reduce(lanes, axis=-1, keepdims=True, dtype=lanes.dtype)
            return np.broadcast_to(found, lanes.shape)

        return Values(_by_lanes(spread, array).view(INT))
    assert text.startswith("clz"), text
    return Values(np.array(32 - int(arrays[0].view(UINT)).bit_length(), INT))


def _reduced(function):
    return lambda values, axis: Values(function.reduce(values.array, axis=axis, dtype=values.array.dtype))


def _chosen(mask, one, other):
    return Values(np.where(_values(mask).array, *_alike(one, other)))


def _larger(one, other):
    return Values(np.fmax(*_alike(one, other)))


def _smaller(one, other):
    return Values(np.fmin(*_alike(one, other)))


def _high(one, other):
    return Values(((one.array.astype("u8") * other.array.astype("u8")) >> np.uint64(32)).astype("u4"))


class Constant:
    """gl.constexpr: the value."""

    def __new__(cls, value):
        return value


def _jit(function=None, **_):
    if function is None:
        return _jit
    function.fn = function
    return function


def _language():
    """gl and tl, as far as the kernel asks for them."""
    nothing = dict.fromkeys(("BlockedLayout", "SliceLayout", "SwizzledSharedLayout"), lambda *_: None)
    return {
        **{name: np.dtype(code) for name, code in TYPES.items()},
        **nothing,
        "constexpr": Constant,
        "constexpr_function": lambda function: function,
        "tensor": Values,
        "static_range": range,
        "program_id": lambda _: Values(np.array(Program.number, INT)),
        "arange": lambda begin, end, _=None: Values(np.arange(begin, end, dtype=INT)),
        "full": lambda shape, value, dtype, _=None: Values(np.full(shape, value, dtype)),
        "full_like": lambda values, value, dtype: Values(np.full(values.shape, value, dtype)),
        "zeros": lambda shape, dtype, _=None: Values(np.zeros(shape, dtype)),
        "where": _chosen,
        "maximum": _larger,
        "minimum": _smaller,
        "sum": _reduced(np.add),
        "max": _reduced(np.maximum),
        "min": _reduced(np.minimum),
        "sqrt": lambda values: Values(np.sqrt(values.array)),
        "cdiv": lambda number, divisor: (number + (divisor - 1)) // divisor,
        "umulhi": _high,
        "load": _load,
        "store": _store,
        "allocate_shared_memory": _allocated,
        "inline_asm_elementwise": _asm,
    }


def stand_in(package: Path, monkeypatch) -> ModuleType:
    """The module of the sm90 kernel of a package's top-k, whose functions run in numpy."""
    language = _language()
    modules = {
        "triton": {"jit": _jit},
        "triton.language": language,
        "triton.language.extra": {},
        "triton.language.extra.cuda": {"gdc_launch_dependents": None, "gdc_wait": None},
        "triton.experimental": {},
        "triton.experimental.gluon": {"jit": _jit, "constexpr_function": lambda function: function},
        "triton.experimental.gluon.language": language,
        "in_numpy": {"__path__": [str(package)]},
        "in_numpy._launch": {"kernel": _jit, "pdl_wait": None},
    }
    made = {}
    for name, contents in modules.items():
        made[name] = ModuleType(name)
        vars(made[name]).update(contents)
        parent, _, own = name.rpartition(".")
        if parent:
            setattr(made[parent], own, made[name])
        monkeypatch.setitem(sys.modules, name, made[name])
    for name in ("in_numpy._topk_kernels", "in_numpy._topk_sm90"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return importlib.import_module("in_numpy._topk_sm90")


def run(kernel, number: int, arguments: dict, constexprs: dict) -> None:
    """Runs a program of a kernel; arrays are given as pointers, numbers as scalars of 32 bits, strides of 64."""
    Program.number = number
    given = {}
    for name, value in arguments.items():
        if isinstance(value, np.ndarray):
            given[name] = Pointer(value)
        else:
            given[name] = Values(np.array(value, "i8" if name.endswith("_stride") else "i4"))
    kernel(**given, **constexprs)
