"""Hopper's own functions: asynchronous copies, products, barriers, and inline assembly."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import triton.language as tl

from mlagen.verify import sanitizer
from mlagen.verify.gluon import alu, lines, memory, ptx
from mlagen.verify.gluon.barriers import MBarrier
from mlagen.verify.gluon.layouts import places
from mlagen.verify.gluon.program import LANES, KernelError, Partition, Program, partition
from mlagen.verify.gluon.shared import Descriptor, read, written
from mlagen.verify.gluon.values import PER_THREAD, Array, Tensor, decode, encode, itemsize, raw_dtype, tensor

assert alu.REDUCE  # ptx knows no instruction that computes until alu is imported


def allocate_shared_memory(dtype: Any, shape: Any, layout: Any, value: Any = None) -> Descriptor:
    """`gl.allocate_shared_memory`."""
    sizes = tuple(int(getattr(size, "value", size)) for size in shape)
    found = Program.current.arena.allocate(getattr(dtype, "value", dtype), sizes, layout)
    if value is not None:
        found.store(value)
    return found


def warp_specialize(functions: Any, warps: Any, registers: Any = None) -> None:
    """`gl.warp_specialize`."""
    Program.current.specialize(list(functions), [int(getattr(one, "value", one)) for one in warps])


def thread_barrier() -> None:
    """`gl.barrier`: all warps of the partition."""
    program = Program.current
    if program.arena.hand is not None and program.partition is program.main:
        program.arena.hand.barrier()


def fence_async_shared(cluster: bool = False) -> None:
    """Lets asynchronous operations see the partition's writes to shared memory."""
    partition().fence()


def gdc_wait(**_: Any) -> None:
    """Waits for the end of the kernel before; one that the interpreter runs begins after it."""
    if hasattr(Program, "current"):  # else a portable kernel calls it, and no simulated program has run yet
        partition().clock[Program.current.before] = 1


def gdc_launch_dependents(**_: Any) -> None:
    """Lets the next kernel begin, which waits for the end of this one."""


class Mbarrier:
    """The module `mbarrier`."""

    @staticmethod
    def MBarrierLayout(*_: Any) -> None:  # noqa: N802
        """A layout, which counts for nothing here."""

    @staticmethod
    def init(place: Descriptor, count: Any) -> None:
        """Makes an mbarrier."""
        place.store(Tensor(np.zeros(place.shape, np.int64), tl.int64))
        Program.current.arena.barriers[place.start] = MBarrier(int(count))

    @staticmethod
    def invalidate(place: Descriptor) -> None:
        """Ends an mbarrier's use."""
        _barrier(place).check()
        del Program.current.arena.barriers[place.start]

    @staticmethod
    def expect(place: Descriptor, size: Any, pred: Any = True) -> None:
        """Arrives, and has the phase wait for bytes."""
        if bool(pred):
            barrier = _barrier(place)
            barrier.expect(int(size))
            barrier.arrive(1, *partition().released())

    @staticmethod
    def wait(place: Descriptor, phase: Any, pred: Any = True, deps: Any = ()) -> None:
        """Waits for a phase."""
        if bool(pred):
            _barrier(place).wait(int(phase))

    @staticmethod
    def arrive(place: Descriptor, *, count: Any = 1, pred: Any = True) -> None:
        """Arrives."""
        if bool(pred):
            _barrier(place).arrive(int(count), *partition().released())


def _barrier(place: Descriptor) -> MBarrier:
    found = Program.current.arena.barriers.get(place.start)
    if found is None:
        raise KernelError(f"no mbarrier was initialised there, at {lines.at()}")
    return found


class AsyncCopy:
    """The module `async_copy`."""

    @staticmethod
    def async_copy_global_to_shared(target: Descriptor, pointer: Tensor, mask: Any = None, **_: Any) -> None:
        """Copies elements; zeros where the mask is not set."""
        own = partition()
        own.copied += 1
        written(target, own, own.copies, own.copied, apart=False)
        dtype = pointer.dtype.element_ty
        addresses = np.asarray(pointer.array)
        launch = sanitizer.current()
        flags = None if mask is None else np.broadcast_to(np.asarray(tensor(mask).array), addresses.shape)
        if launch is not None:
            launch.reads(addresses.astype(np.uint64), np.array(True) if flags is None else flags, itemsize(dtype))

        def copy() -> None:
            bits = _gathered(addresses, flags, dtype)
            target.put_bits(bits)

        own.queues["copies"].append(copy)

    @staticmethod
    def mbarrier_arrive(place: Descriptor, increment_count: bool = True) -> None:
        """Every thread arrives as soon as the copies before are done."""
        own, barrier = partition(), _barrier(place)
        copied, threads = own.copied, own.threads
        if increment_count:
            barrier.pending += threads

        def arrive() -> None:
            clock = np.zeros_like(own.clock)
            clock[own.copies] = copied
            barrier.arrive(threads, clock)

        own.queues["copies"].append(arrive)

    @staticmethod
    def commit_group() -> None:
        """Ends a group of copies."""
        own = partition()
        own.groups.append(own.copied)

    @staticmethod
    def wait_group(outstanding: Any = 0) -> None:
        """Waits for all groups but the last ones."""
        own = partition()
        done = own.groups[: len(own.groups) - int(outstanding)]
        if done:
            own.drain("copies")
            own.clock[own.copies] = max(own.clock[own.copies], done[-1])


def _gathered(addresses: Array, flags: Array | None, dtype: Any) -> Array:
    """Bits of elements, without the sanitizer, which saw them when the copy was issued."""
    raw = raw_dtype(dtype)
    if flags is None or flags.all():
        return memory.Memory.current.read(addresses, raw)
    found: Array = np.zeros(addresses.shape, raw)
    if flags.any():
        found[flags] = memory.Memory.current.read(addresses[flags], raw)
    return found


class Tma:
    """The module `tma`."""

    class tensor_descriptor:  # noqa: N801
        """A type that kernels name."""

    @staticmethod
    def async_copy_global_to_shared(
        descriptor: Any, coordinates: Any, place: Descriptor, target: Descriptor, pred: Any = True, **_: Any
    ) -> None:
        """Copies a box; zeros outside the descriptor's tensor."""
        if not bool(pred):
            return
        own, barrier = partition(), _barrier(place)
        barrier.require_fence()
        memory.Memory.current.require_awaited()
        first = [int(one) for one in coordinates]
        if target.shape != tuple(descriptor.block_shape):
            raise KernelError(f"a box {list(descriptor.block_shape)} to {list(target.shape)} at {lines.at()}")
        written(target, own, barrier.loads, barrier.completed + 1, apart=False)
        size = int(np.prod(target.shape)) * itemsize(target.dtype)

        def copy() -> None:
            target.put_bits(_box(descriptor, first, raw_dtype(target.dtype)))
            barrier.load(size)

        Program.current.loads.append(deque([copy]))


def _box(descriptor: Any, first: Sequence[int], raw: Any) -> Array:
    sizes, strides, block = descriptor.shape, descriptor.strides, descriptor.block_shape
    base = descriptor.base.data_ptr()
    if base % 16:
        raise KernelError("a descriptor's tensor does not begin at 16 bytes")
    inside, address = np.array(True), np.array(base, np.int64)
    for dim, (begin, count) in enumerate(zip(first, block, strict=True)):
        at = begin + np.arange(count, dtype=np.int64)
        shape = [-1 if axis == dim else 1 for axis in range(len(block))]
        inside = inside & ((at >= 0) & (at < sizes[dim])).reshape(shape)
        address = address + (at * (strides[dim] * raw.itemsize)).reshape(shape)
    found = np.zeros(tuple(block), raw)
    if inside.any():
        reached = np.broadcast_to(address, found.shape)[inside]
        launch = sanitizer.current()
        if launch is not None:
            launch.reads(reached.astype(np.uint64), np.array(True), raw.itemsize)
        view, offsets = memory.Memory.current.at(reached, raw)
        found[inside] = view[offsets]
    return found


class Accumulator(Tensor):
    """The result of a product, readable once it was waited for."""

    def __init__(self, own: Partition, number: int, shape: Sequence[int], layout: Any) -> None:
        self._own, self._number, self._shape = own, number, list(shape)
        self._values: Array | None = None
        self._line = lines.here()
        self.dtype, self.layout = tl.float32, layout

    @property
    def shape(self) -> list[int]:
        """Its dimensions."""
        return self._shape

    @property
    def array(self) -> Array:
        """Its values.

        Raises:
            KernelError: the product may still be under way.
        """
        if self._own.clock[self._own.products] < self._number:
            raise KernelError(
                f"the product of {lines.place(self._line)} is used before it was waited for, at {lines.at()}"
            )
        assert self._values is not None
        return self._values


def warpgroup_mma(
    a: Any, b: Descriptor, acc: Tensor, *, use_acc: Any = True, precision: Any = None,
    max_num_imprecise_acc: Any = None, is_async: bool = False,
) -> Tensor:  # fmt: skip
    """A product of a warpgroup, in order with its other ones."""
    own = partition()
    own.multiplied += 1
    number = own.multiplied
    seen = np.where(Program.current.threaded(), own.fenced, own.clock)
    for operand in (a, b):
        if isinstance(operand, Descriptor):
            read(operand, own, own.products, number, seen)
    left = a if isinstance(a, Descriptor) else np.asarray(a.array, "f8")
    adds = bool(use_acc)
    start = acc if isinstance(acc, Accumulator) else np.asarray(acc.array)
    shape = [a.shape[0], b.shape[1]]
    found = Accumulator(own, number, shape, acc.layout)
    if list(acc.shape) != shape or a.shape[1] != b.shape[0]:
        raise KernelError(f"a product of {list(a.shape)} and {list(b.shape)} to {list(acc.shape)}")

    def multiply() -> None:
        one = left.values().astype("f8") if isinstance(left, Descriptor) else left
        total = one @ b.values().astype("f8")
        if adds:
            total = total + (start._values if isinstance(start, Accumulator) else start)
        found._values = total.astype("f4")

    own.queues["products"].append(multiply)
    if own.program.rng.random() < 0.5:
        own.drain("products")
    if not is_async:
        warpgroup_mma_wait(0)
    return found


def warpgroup_mma_wait(num_outstanding: Any = 0, deps: Any = None) -> Any:
    """Waits for all products of the partition but the last ones."""
    own, left = partition(), int(num_outstanding)
    own.drain("products", left)
    done = own.multiplied - left
    own.clock[own.products] = max(own.clock[own.products], done)
    if deps is None:
        return None
    return deps[0] if len(deps) == 1 else tuple(deps)


def inline_asm_elementwise(asm: Any, constraints: Any, args: Any, dtype: Any, is_pure: bool, pack: Any) -> Any:
    """Runs a text; see mlagen.verify.gluon.ptx."""
    text, given = getattr(asm, "value", asm), [tensor(one) for one in args]
    several = isinstance(dtype, (tuple, list))
    dtypes = [getattr(one, "value", one) for one in (dtype if several else (dtype,))]
    listed, together = str(getattr(constraints, "value", constraints)), int(getattr(pack, "value", pack))
    found = _Call(text, listed, given, dtypes, together).run()
    return tuple(found) if several else found[0]


class _Call:
    """One call of a text: its operands by threads, or, where no thread counts, by elements."""

    def __init__(self, text: str, constraints: str, given: list[Tensor], dtypes: list[Any], pack: int) -> None:
        self.text, self.given, self.dtypes, self.pack = text, given, dtypes, pack
        listed = [one.strip() for one in constraints.split(",") if not one.strip().startswith("~")]
        self.outputs = sum(one.startswith("=") for one in listed)
        self.inputs = listed[self.outputs :]
        arrays = [np.asarray(one.array) for one in given]
        blocks = [one for one in given if one.layout is not PER_THREAD and np.ndim(one.array)]
        self.shape = np.broadcast_shapes(*(np.shape(one.array) for one in blocks)) if blocks else ()
        self.layout = next((one.layout for one in blocks if one.layout is not None), None)
        own = partition()
        self.own = own
        counts = "%" in text or "sync" in text or "global_smem" in text or pack > 1
        self.places = None
        if blocks and (counts or any(one.layout is PER_THREAD for one in given)):
            self.places = places(self.layout, self.shape)
        self.arrays = arrays

    def _bits(self, one: Tensor) -> Array:
        """An operand's bits, by threads if they count."""
        if one.dtype.is_ptr():
            return np.asarray(one.array).astype("i8").view("u8")
        bits = np.ascontiguousarray(encode(np.asarray(one.array), one.dtype))
        bits = bits.view(f"u{bits.itemsize}").reshape(np.shape(one.array))
        if self.places is None or one.layout is PER_THREAD or not bits.ndim:
            return bits
        return np.broadcast_to(bits, self.shape).reshape(-1)[self.places]

    def run(self) -> list[Tensor]:
        """Runs it; the tensors of its outputs."""
        registers: dict[str, Array] = {}
        number, tied = self.outputs, iter(self.inputs)
        for one in self.given:
            bits = self._bits(one)
            for part in self._packed(bits):
                constraint = next(tied)
                registers[f"${number}"] = part
                if constraint.isdigit():
                    registers[f"${constraint}"] = part
                number += 1
        threads = ptx.Threads(
            registers, self.own.first_warp * LANES, self.own.threads, Program.current.programs, self._memory, self._bar
        )
        threads.run(self.text)
        each = self.outputs // len(self.dtypes)
        return [
            self._result([registers.get(f"${at * each + part}") for part in range(each)], dtype)
            for at, dtype in enumerate(self.dtypes)
        ]

    def _packed(self, bits: Array) -> list[Array]:
        """The registers of an operand: one for each of `pack` elements, or for as many as fit 32 bits."""
        if self.pack == 1:
            return [bits]
        if bits.ndim < 2:
            bits = np.broadcast_to(bits, (self.pack, self.own.threads))
        groups = bits.reshape(-1, self.pack, bits.shape[-1])
        if bits.itemsize >= 4:
            return [groups[:, one] for one in range(self.pack)]
        per = 4 // bits.itemsize
        wide = groups.astype("u4")
        found = []
        for begin in range(0, self.pack, per):
            word = np.zeros(wide[:, 0].shape, "u4")
            for number in range(min(per, self.pack - begin)):
                word |= wide[:, begin + number] << np.uint32(8 * bits.itemsize * number)
            found.append(word)
        return found

    def _result(self, parts: list[Any], dtype: Any) -> Tensor:
        """An output, from its registers."""
        raw = raw_dtype(dtype)
        size = raw.itemsize
        filled = [np.uint32(0) if part is None else part for part in parts]
        if self.pack == 1:
            bits = np.asarray(filled[0]).astype(f"u{size}")
        else:
            per = max(4 // size, 1) if size < 4 else 1
            columns = [
                (np.asarray(part) >> np.uint32(8 * size * number)).astype(f"u{size}") if per > 1 else np.asarray(part)
                for part in filled
                for number in range(per)
            ][: self.pack]
            bits = np.stack(np.broadcast_arrays(*columns), axis=1)
            bits = bits.reshape(-1, bits.shape[-1])
        return self._unplaced(bits, dtype, raw)

    def _unplaced(self, bits: Array, dtype: Any, raw: Any) -> Tensor:
        if self.places is not None:
            block = np.empty(int(np.prod(self.shape)), bits.dtype)
            block[self.places] = np.broadcast_to(bits, self.places.shape)
            return Tensor(decode(block.reshape(self.shape).view(raw), dtype), dtype, self.layout)
        if self.shape:
            bits = np.broadcast_to(bits, self.shape)
            return Tensor(decode(np.ascontiguousarray(bits).view(raw), dtype), dtype, self.layout)
        bits = np.asarray(bits)
        if bits.ndim and (bits == bits[0]).all():
            bits = bits[0]
        found = decode(np.array(bits).view(raw), dtype)
        return Tensor(found if np.ndim(found) else found[()], dtype, PER_THREAD if np.ndim(found) else None)

    def _bar(self, action: str, number: int, threads: int | None) -> None:
        program = Program.current
        if threads is None:
            if program.partition is not program.main:
                raise KernelError("a barrier of all threads among partitions")
            thread_barrier()
        elif action == "arrive":
            program.named.arrive(number, threads)
        elif action == "sync":
            program.named.sync(number, threads)
        else:
            raise ptx.PtxError(f"bar.{action} is not known")

    def _memory(self, space: str, action: str, address: Array, mask: Any, value: Any, number: int, width: int) -> Array:
        """One register of a load, store or atomic."""
        sizes = [np.shape(address), np.shape(mask), () if value is None else np.shape(value)]
        if space == "shared" or action != "ld":
            sizes.append((self.own.threads,) if not self.shape else ())
        shape = np.broadcast_shapes(*sizes)
        address = np.broadcast_to(address, shape) + 4 * number
        active = np.broadcast_to(np.asarray(mask, bool), shape)
        if space == "global":
            if action == "prefetch":
                memory.prefetch(address, active, width)
                return address
            if action != "ld":
                raise ptx.PtxError(f"{action} to global memory is not known")
            if (address[active] & (4 * width - 1)).any() and number == 0:
                raise KernelError(f"a load of {4 * width} bytes is not aligned, at {lines.at()}")
            found = np.zeros(shape, "u4")
            if active.any():
                found[active] = memory.gather(address[active], None, tl.uint32)
            return found
        return self._shared(action, address, active, value, width)

    def _shared(self, action: str, address: Array, active: Array, value: Any, width: int) -> Array:
        words_of = Program.current.arena.words
        reached = address[active]
        if reached.size and ((reached < 0) | (reached >= Program.current.arena.end) | (reached % 4 != 0)).any():
            raise KernelError(f"an address is out of shared memory, at {lines.at()}")
        words = reached // 4
        hand = Program.current.arena.hand
        if hand is None and reached.size:
            raise KernelError(f"shared memory is addressed in a kernel that is not watched, at {lines.at()}")
        found = np.zeros(address.shape, "u4")
        if not reached.size:
            return found
        warps = np.broadcast_to(np.arange(address.shape[-1]) // LANES, address.shape)[active]
        kind = {"ld": "read", "st": "write"}.get(action, "atomic")
        hand.touch(words, warps, kind)
        if action == "ld":
            found[active] = words_of[words]
            return found
        values = np.broadcast_to(value, address.shape)[active].astype("u4")
        if action == "st":
            words_of[words] = values
            return found
        found[active] = words_of[words]
        ufunc = alu.REDUCE[action]
        if len(np.unique(words)) != len(words) and kind == "atomic":
            found[active] = _one_by_one(words_of, words, values, ufunc)
        else:
            ufunc.at(words_of, words, values)
        return found


def _one_by_one(memory_words: Array, words: Array, values: Array, ufunc: Any) -> Array:
    """Atomics of one instruction, one after the other; the words that each found."""
    order = np.argsort(words, kind="stable")
    found = np.empty(len(words), "u4")
    for at in order.tolist():
        found[at] = memory_words[words[at]]
        memory_words[words[at]] = ufunc(memory_words[words[at]], values[at])
    return found
