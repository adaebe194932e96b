"""PTX instructions that compute, as functions of numpy arrays of bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from mlagen.verify.gluon.layouts import LANES
from mlagen.verify.gluon.ptx import PtxError, Threads, instruction
from mlagen.verify.gluon.values import Array

Parts = tuple[str, ...]
HALF_OF_E4M3: Array = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).half().numpy().view("u2")
COMPARE = {"eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater,
           "ge": np.greater_equal}  # fmt: skip
REDUCE = {"add": np.add, "min": np.minimum, "max": np.maximum, "or": np.bitwise_or, "and": np.bitwise_and}


def _pair(low: Array, high: Array) -> Array:
    """Two fp16 or raw 16-bit values as one word."""
    low, high = (np.ascontiguousarray(half).view("u2").astype("u4") for half in (low, high))
    return low | (high << np.uint32(16))


def _halves(word: Array) -> tuple[Array, Array]:
    """The two fp16 values of a word."""
    word = np.asarray(word)
    low, high = (word & np.uint32(0xFFFF)).astype("u2"), (word >> np.uint32(16)).astype("u2")
    return low.view("f2"), high.view("f2")


@instruction("mov")
def _mov(threads: Threads, parts: Parts, operands: Parts) -> Any:
    given = operands[0]
    if given.startswith("{"):
        low, high = (threads.value(name.strip(), "u16") for name in given[1:-1].split(","))
        return low.astype("u4") | (high.astype("u4") << np.uint32(16))
    return threads.value(given, parts[-1])


def _add(threads: Threads, parts: Parts, operands: Parts) -> Any:
    return threads.value(operands[0], parts[-1]) + threads.value(operands[1], parts[-1])


def _sub(threads: Threads, parts: Parts, operands: Parts) -> Any:
    return threads.value(operands[0], parts[-1]) - threads.value(operands[1], parts[-1])


def _mul(threads: Threads, parts: Parts, operands: Parts) -> Any:
    if parts[-1] == "f16x2":
        one, other = (_halves(threads.value(name, "u32")) for name in operands)
        return _pair(one[0] * other[0], one[1] * other[1])
    if parts[0] == "hi" or parts[0] == "wide":
        raise PtxError(f"mul.{'.'.join(parts)} is not known")
    return threads.value(operands[0], parts[-1]) * threads.value(operands[1], parts[-1])


instruction("add")(_add)
instruction("sub")(_sub)
instruction("mul")(_mul)


@instruction("fma")
def _fma(threads: Threads, parts: Parts, operands: Parts) -> Any:
    if parts[-1] != "f16x2":
        raise PtxError(f"fma.{'.'.join(parts)} is not known")
    a, b, c = (_halves(threads.value(name, "u32")) for name in operands)
    wide = [(x.astype("f8") * y.astype("f8") + z).astype("f2") for x, y, z in zip(a, b, c, strict=True)]
    return _pair(wide[0], wide[1])


@instruction("mad")
def _mad(threads: Threads, parts: Parts, operands: Parts) -> Any:
    kind = parts[1]
    if parts[0] == "lo":
        a, b, c = (threads.value(name, kind) for name in operands)
        return a * b + c
    if parts[0] == "wide":
        wide = np.dtype("i8" if kind[0] == "s" else "u8")
        a, b = (threads.value(name, kind).astype(wide) for name in operands[:2])
        return a * b + threads.value(operands[2], f"{kind[0]}64")
    raise PtxError(f"mad.{'.'.join(parts)} is not known")


@instruction("and")
def _and(threads: Threads, parts: Parts, operands: Parts) -> Any:
    return threads.value(operands[0], parts[-1]) & threads.value(operands[1], parts[-1])


@instruction("or")
def _or(threads: Threads, parts: Parts, operands: Parts) -> Any:
    return threads.value(operands[0], parts[-1]) | threads.value(operands[1], parts[-1])


@instruction("xor")
def _xor(threads: Threads, parts: Parts, operands: Parts) -> Any:
    return threads.value(operands[0], parts[-1]) ^ threads.value(operands[1], parts[-1])


def _shifted(threads: Threads, parts: Parts, operands: Parts, left: bool) -> Any:
    value, by = threads.value(operands[0], parts[-1]), threads.value(operands[1], "u32")
    bits = value.dtype.itemsize * 8
    near = np.minimum(by, bits - 1).astype(value.dtype)
    far = np.zeros_like(value) if left or value.dtype.kind == "u" else value >> np.array(bits - 1, value.dtype)
    return np.where(by >= bits, far, value << near if left else value >> near)


instruction("shl")(lambda threads, parts, operands: _shifted(threads, parts, operands, True))
instruction("shr")(lambda threads, parts, operands: _shifted(threads, parts, operands, False))


@instruction("bfe")
def _bfe(threads: Threads, parts: Parts, operands: Parts) -> Any:
    if parts[-1] != "u32":
        raise PtxError(f"bfe.{'.'.join(parts)} is not known")
    value, begin, length = (threads.value(name, "u32") for name in operands)
    return (value >> begin) & ((np.uint32(1) << length) - np.uint32(1))


@instruction("lop3")
def _lop3(threads: Threads, _parts: Parts, operands: Parts) -> Any:
    given = [threads.value(name, "b32") for name in operands[:3]]
    table, found = int(operands[3], 0), np.uint32(0)
    for row in range(8):
        if table >> row & 1:
            term = np.uint32(0xFFFFFFFF)
            for at, value in enumerate(given):
                term = term & (value if row >> (2 - at) & 1 else ~value)
            found = found | term
    return found


@instruction("prmt")
def _prmt(threads: Threads, _parts: Parts, operands: Parts) -> Any:
    low, high, selector = (threads.value(name, "b32").astype("u8") for name in operands)
    whole = low | (high << np.uint64(32))
    found = np.zeros(whole.shape, "u4")
    for number in range(4):
        nibble = (selector >> np.uint64(4 * number)) & np.uint64(15)
        byte = (whole >> (np.uint64(8) * (nibble & np.uint64(7)))) & np.uint64(255)
        byte = np.where(nibble & np.uint64(8), np.where(byte & np.uint64(128), 255, 0), byte)
        found = found | (byte.astype("u4") << np.uint32(8 * number))
    return found


@instruction("selp")
def _selp(threads: Threads, parts: Parts, operands: Parts) -> Any:
    flag = threads.value(operands[2], "pred")
    return np.where(flag, threads.value(operands[0], parts[-1]), threads.value(operands[1], parts[-1]))


@instruction("setp")
def _setp(threads: Threads, parts: Parts, operands: Parts) -> Any:
    found = COMPARE[parts[0]](threads.value(operands[0], parts[-1]), threads.value(operands[1], parts[-1]))
    if len(parts) == 3 and parts[1] == "and":
        found = found & threads.value(operands[2], "pred")
    elif len(parts) != 2:
        raise PtxError(f"setp.{'.'.join(parts)} is not known")
    return found.astype("u1")


def _extreme(threads: Threads, parts: Parts, operands: Parts, larger: bool) -> Any:
    choose = np.maximum if larger else np.minimum
    if parts == ("NaN", "xorsign", "abs", "bf16x2") and larger:
        return _max_magnitude(*(threads.value(name, "u32") for name in operands))
    if parts == ("u16x2",):
        halves = [
            (word & np.uint32(0xFFFF), word >> np.uint32(16))
            for word in (threads.value(name, "u32") for name in operands)
        ]
        return choose(halves[0][0], halves[1][0]) | (choose(halves[0][1], halves[1][1]) << np.uint32(16))
    if parts in (("u32",), ("s32",)):
        return choose(threads.value(operands[0], parts[0]), threads.value(operands[1], parts[0]))
    raise PtxError(f"max.{'.'.join(parts)} is not known")


instruction("max")(lambda threads, parts, operands: _extreme(threads, parts, operands, True))
instruction("min")(lambda threads, parts, operands: _extreme(threads, parts, operands, False))


def _max_magnitude(one: Array, other: Array) -> Array:
    """The larger magnitudes of two pairs of bf16, NaN above all; the sign is of both signs."""
    found: Array = np.uint32(0)
    for shift in (np.uint32(0), np.uint32(16)):
        a, b = (one >> shift) & np.uint32(0xFFFF), (other >> shift) & np.uint32(0xFFFF)
        magnitude = np.maximum(a & np.uint32(0x7FFF), b & np.uint32(0x7FFF))  # NaN has the largest bits
        magnitude = np.where(magnitude > 0x7F80, np.uint32(0x7FFF), magnitude | ((a ^ b) & np.uint32(0x8000)))
        found = found | (magnitude << shift)
    return found


@instruction("cvt")
def _cvt(threads: Threads, parts: Parts, operands: Parts) -> Any:
    if parts == ("rn", "f16x2", "e4m3x2"):
        pair = threads.value(operands[0], "u16")
        low, high = HALF_OF_E4M3[pair & np.uint16(255)], HALF_OF_E4M3[pair >> np.uint16(8)]
        return low.astype("u4") | (high.astype("u4") << np.uint32(16))
    if parts == ("rn", "f16x2", "f32"):
        high, low = (threads.value(name, "f32").astype("f2") for name in operands)
        return _pair(low, high)
    if parts == ("rn", "bf16x2", "f32"):
        from mlagen.verify.gluon.values import _bf16_bits

        high, low = (_bf16_bits(np.ascontiguousarray(threads.value(name, "f32"))) for name in operands)
        return _pair(low, high)
    if parts == ("f32", "f16"):
        return np.asarray(threads.value(operands[0], "f16")).astype("f4")
    raise PtxError(f"cvt.{'.'.join(parts)} is not known")


@instruction("popc")
def _popc(threads: Threads, _parts: Parts, operands: Parts) -> Any:
    return np.bitwise_count(threads.value(operands[0], "u32")).astype("u4")


@instruction("clz")
def _clz(threads: Threads, _parts: Parts, operands: Parts) -> Any:
    value = np.asarray(threads.value(operands[0], "u32"))
    exact = np.frexp(value.astype("f8"))[1]  # bits up to the highest one
    return (32 - np.where(value == 0, 0, exact)).astype("u4")


def _by_warps(values: Array) -> Array:
    return values.reshape(*values.shape[:-1], -1, LANES)


def _every_thread(threads: Threads, values: Array) -> Array:
    """Values with an entry for each thread."""
    count = threads.count
    values = np.asarray(values)
    return values if values.ndim and values.shape[-1] == count else np.broadcast_to(values, (count,))


def _require_all_lanes(operand: str) -> None:
    if int(operand, 0) != 0xFFFFFFFF:
        raise PtxError(f"an instruction over some lanes of a warp is not known: {operand}")


@instruction("vote")
def _vote(threads: Threads, parts: Parts, operands: Parts) -> Any:
    _require_all_lanes(operands[1])
    flags = _by_warps(_every_thread(threads, threads.value(operands[0], "pred")))
    if parts == ("sync", "ballot", "b32"):
        weights = np.uint32(1) << np.arange(LANES, dtype="u4")
        ballots = (flags * weights).sum(-1, dtype="u4")
    elif parts == ("sync", "all", "pred"):
        ballots = flags.all(-1).astype("u1")
    else:
        raise PtxError(f"vote.{'.'.join(parts)} is not known")
    return np.repeat(ballots, LANES, axis=-1)


@instruction("redux")
def _redux(threads: Threads, parts: Parts, operands: Parts) -> Any:
    _require_all_lanes(operands[1])
    values = _by_warps(_every_thread(threads, threads.value(operands[0], parts[2])))
    return np.repeat(REDUCE[parts[1]].reduce(values, axis=-1, dtype=values.dtype), LANES, axis=-1)


@instruction("shfl")
def _shfl(threads: Threads, parts: Parts, operands: Parts) -> Any:
    if parts != ("sync", "up", "b32") or operands[2] != "0":
        raise PtxError(f"shfl.{'.'.join(parts)} is not known")
    _require_all_lanes(operands[3])
    values = _by_warps(_every_thread(threads, threads.value(operands[0], "u32")))
    by = int(operands[1])
    found = values.copy()
    found[..., by:] = values[..., : LANES - by]
    has = np.broadcast_to(np.arange(LANES) >= by, values.shape)
    whole = (*values.shape[:-2], -1)
    return found.reshape(whole), has.reshape(whole).astype("u1")
