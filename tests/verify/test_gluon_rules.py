"""Rules of kernels in numpy; a breach fails: races, barriers that do not fit, products that were not waited for."""

import re

import numpy as np
import pytest
import torch
import triton.language as tl

from mlagen.verify import sanitizer
from mlagen.verify.gluon import hopper, language, lines, ptx
from mlagen.verify.gluon.layouts import places
from mlagen.verify.gluon.program import KernelError, Program
from mlagen.verify.gluon.shared import Descriptor
from mlagen.verify.gluon.values import Tensor
from mlagen.verify.gluon.warps import Warps

lines.FILES.add(__file__)


def run(kernel, seeds=range(6)) -> None:
    """Runs a kernel as one program, under several orders of its partitions."""
    for seed in seeds:
        program = Program.current = Program(0, 1, 4, seed)
        kernel()
        program.finish()


def swizzled(width: int):
    from triton.experimental.gluon.language import NVMMASharedLayout

    return NVMMASharedLayout(width, 16, 2)


def shared(*shape: int, dtype=tl.float32, layout=None) -> Descriptor:
    return hopper.allocate_shared_memory(dtype, shape, layout)


def mbarrier(count: int) -> Descriptor:
    found = shared(1, dtype=tl.int64)
    hopper.Mbarrier.init(found, count)
    return found


def ones(*shape: int, dtype=tl.float32) -> Tensor:
    return language.full(shape, 1.0, dtype)


def asm(text: str) -> None:
    hopper.inline_asm_elementwise(f"{text}; mov.b32 $0, 0;", "=r,r", [0], tl.int32, False, 1)


def pair(first, second):
    """Runs two partitions of a warpgroup each."""
    hopper.warp_specialize([(first, ()), (second, ())], [4])


def handed_over(*, arrives=1, waits=1, fences=True, count=1):
    """A partition writes memory that another one reads, or its product."""

    def kernel():
        memory, ready = shared(64, 64, dtype=tl.float16), mbarrier(count)

        def writer():
            memory.store(ones(64, 64, dtype=tl.float16))
            if fences:
                hopper.fence_async_shared()
            for _ in range(arrives):
                hopper.Mbarrier.arrive(ready)

        def reader():
            for _ in range(waits):
                hopper.Mbarrier.wait(ready, 0)
            found = hopper.warpgroup_mma(memory, memory, ones(64, 64), is_async=True)
            found = hopper.warpgroup_mma_wait(0, deps=[found])
            assert (found.array == 65).all()

        pair(writer, reader)

    return kernel


def test_a_kernel_that_keeps_the_rules_passes():
    run(handed_over())


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"waits": 0}, r"race in shared memory of .*: read by reader .*, written at .*|.* that nobody wrote, at .*"),
        ({"arrives": 0}, r"deadlock: reader \(partition 1\) waits for phase 0 of the mbarrier of .*reader\)"),
        ({"waits": 2}, r"reader \(partition 1\) waits twice for one phase of the mbarrier of .*"),
        ({"fences": False}, r"race .*, without a fence_async_shared between them"),
        ({"arrives": 3, "count": 2}, r"the mbarrier of .* is left with 1 of 2 arrivals, .*"),
    ],
)
def test_a_broken_rule_is_named(changes, said):
    with pytest.raises(KernelError) as failure:
        run(handed_over(**changes))
    assert re.fullmatch(said, str(failure.value)), failure.value


def test_arrivals_past_a_phase_are_refused():
    def kernel():
        hopper.Mbarrier.arrive(mbarrier(2), count=3)

    with pytest.raises(KernelError, match="gets more arrivals than the 2 of a phase"):
        run(kernel)


def test_memory_is_not_written_while_a_product_reads_it():
    def kernel():
        memory = shared(64, 64, dtype=tl.float16)
        memory.store(ones(64, 64, dtype=tl.float16))
        hopper.fence_async_shared()
        hopper.warpgroup_mma(memory, memory, ones(64, 64), is_async=True)
        memory.store(ones(64, 64, dtype=tl.float16))

    with pytest.raises(KernelError, match="race in shared memory"):
        run(kernel)


def test_a_product_is_not_used_before_it_was_waited_for():
    def kernel():
        memory = shared(64, 64, dtype=tl.float16)
        memory.store(ones(64, 64, dtype=tl.float16))
        hopper.fence_async_shared()
        first = hopper.warpgroup_mma(memory, memory, ones(64, 64), is_async=True)
        second = hopper.warpgroup_mma(memory, memory, ones(64, 64), is_async=True)
        hopper.warpgroup_mma_wait(1)
        assert ((first + 1.0).array == 66).all()
        _ = second + 1.0

    with pytest.raises(KernelError, match="is used before it was waited for"):
        run(kernel)


def test_named_barriers_order_both_sides():
    def kernel():
        memory = shared(8)

        def writer():
            memory.store(ones(8))
            asm("bar.arrive 5, 256")

        def reader():
            asm("bar.sync 5, 256")
            assert (memory.load().array == 1).all()

        pair(writer, reader)

    run(kernel)


@pytest.mark.parametrize(
    ("first", "second", "said"),
    [
        (("bar.arrive 5, 256",), (), "named barrier 5 is left incomplete"),
        (("bar.sync 5, 256",), (), "deadlock"),
        (("bar.arrive 5, 256", "bar.arrive 5, 256"), (), "and did so at"),
        (("bar.arrive 5, 256",), ("bar.sync 5, 384",), "is of 256 threads, and of 384|is of 384 threads, and of 256"),
        (("bar.arrive 16, 256",), (), "there are 16"),
    ],
)
def test_named_barriers_that_do_not_fit_are_refused(first, second, said):
    def kernel():
        def one():
            for text in first:
                asm(text)

        def other():
            for text in second:
                asm(text)

        pair(one, other)

    with pytest.raises(KernelError, match=said):
        run(kernel)


def test_columns_of_a_swizzle_lie_apart():
    def kernel():
        tile = shared(16, 128, dtype=tl.float16, layout=swizzled(128))
        tile.store(language.reshape(language.arange(0, 2048), [16, 128]).to(tl.float16))
        pieces = tile.reinterpret(tl.float16, [2, 16, 64], swizzled(128))
        whole = np.arange(2048).reshape(16, 128)
        assert (pieces.index(1).load().array == whole[:, 64:]).all()
        assert (tile.slice(64, 64, dim=1).load().array == whole[:, 64:]).all()
        assert (tile.permute([1, 0]).load().array == whole.T).all()

    run(kernel)


def test_warps_race_unless_a_barrier_or_atomics_order_them():
    words, warps = np.arange(64), np.arange(64) // 32
    one = Warps(128)
    one.touch(words, warps, "write")
    one.touch(words, warps, "read")  # own words
    one.barrier()
    one.touch(words * 0, warps, "atomic")
    with pytest.raises(KernelError, match="race of warps at word 0"):
        one.touch(words[:1], warps[:1], "read")


def test_layouts_give_each_element_to_the_threads_that_hold_it():
    from triton.experimental.gluon.language import BlockedLayout, NVMMADistributedLayout, SliceLayout

    rows = BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    found = places(rows, (16, 64))
    assert found.shape == (8, 128)
    assert found[:, 9].tolist() == list(range(64 + 8, 64 + 16))  # the second row, and 16 bytes of it
    product = NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    found = places(product, (64, 64))
    assert found[:4, 5].tolist() == [64 + 2, 64 + 3, 9 * 64 + 2, 9 * 64 + 3]
    assert places(SliceLayout(1, product), (64,))[:, 37].tolist() == [17, 25]


def words(text: str, *given: int) -> int:
    registers = {f"${number}": np.full(32, value, "u4") for number, value in enumerate(given, 1)}
    threads = ptx.Threads(registers, 0, 32, 1, None, None)
    threads.run(text)
    return int(np.asarray(threads.registers["$0"]).reshape(-1)[0])


@pytest.mark.parametrize(
    ("text", "given", "found"),
    [
        ("prmt.b32 $0, $1, $2, 0x5140;", (0x33221100, 0x77665544), 0x55114400),
        ("lop3.b32 $0, $1, $2, $3, 0xea;", (0xF0, 0xCC, 0x01), 0xC1),
        ("bfe.u32 $0, $1, 5, 2;", (0x60,), 3),
        ("cvt.rn.f16x2.e4m3x2 $0, $1;", (0x7E38,), 0x5F003C00),
        ("max.NaN.xorsign.abs.bf16x2 $0, $1, $2;", (0xC0003F80, 0x3F80BF80), 0xC000BF80),
        ("{ .reg .pred p; setp.lt.u32 p, $1, $2; vote.sync.ballot.b32 $0, p, 0xffffffff; }", (1, 2), 0xFFFFFFFF),
        ("redux.sync.add.s32 $0, $1, 0xffffffff;", (3,), 96),
        ("clz.b32 $0, $1;", (1,), 31),
        ("{ .reg .pred p; mov.b32 $0, 7; setp.eq.s32 p, $1, 0; @p bra OUT; mov.b32 $0, 8; OUT: }", (0,), 7),
    ],
)
def test_assembly_is_executed(text, given, found):
    assert words(text, *given) == found


@pytest.mark.parametrize("text", ["sin.approx.f32 $0, $1;", "cvt.f64.f32 $0, $1;", "st.local.b32 [$1], $1;"])
def test_assembly_that_is_not_known_is_an_error(text):
    with pytest.raises(ptx.PtxError, match="not known"):
        words(text, 1)


@pytest.mark.parametrize("waits", [True, False])
def test_copies_end_before_scratch_memory_is_taken(waits):
    source = torch.ones(64, dtype=torch.float32)

    def kernel():
        hopper.memory.Memory.current = hopper.memory.Memory([source])
        target, ready = shared(64), mbarrier(128)
        pointers = Tensor(source.data_ptr() + 4 * np.arange(64), tl.pointer_type(tl.float32))

        def copying():
            hopper.AsyncCopy.async_copy_global_to_shared(target, pointers)
            hopper.AsyncCopy.mbarrier_arrive(ready, increment_count=False)
            if waits:
                hopper.Mbarrier.wait(ready, 0)

        pair(copying, lambda: None)
        assert language.FUNCTIONS["sum"](ones(64), 0).array == 64

    if waits:
        run(kernel)
    else:
        with pytest.raises(KernelError, match=r"copying \(partition 0\) ended before its copies did"):
            run(kernel)


@pytest.mark.parametrize("waits", [True, False])
def test_memory_is_touched_behind_the_wait_for_the_kernel_before(waits):
    source = torch.ones(1, dtype=torch.float32)
    hopper.memory.Memory.current = hopper.memory.Memory([source], early=True)
    Program.current = Program(0, 1, 4, 0)
    if waits:
        hopper.gdc_wait()
        hopper.memory.load(Tensor(np.int64(source.data_ptr()), tl.pointer_type(tl.float32)))
    else:
        with pytest.raises(hopper.memory.EarlyError, match="touched before gdc_wait"):
            hopper.memory.load(Tensor(np.int64(source.data_ptr()), tl.pointer_type(tl.float32)))


@pytest.mark.parametrize("waits", ["one", "one before a barrier", "both"])
def test_each_partition_is_ordered_behind_the_kernel_before(waits):
    source = torch.ones(1, dtype=torch.float32)
    hopper.memory.Memory.current = hopper.memory.Memory([source], early=True)

    def waiting():
        hopper.gdc_wait()
        if waits == "one before a barrier":
            asm("bar.arrive 5, 256")

    def touching():
        if waits == "one before a barrier":
            asm("bar.sync 5, 256")
        if waits == "both":
            hopper.gdc_wait()
        hopper.memory.load(Tensor(np.int64(source.data_ptr()), tl.pointer_type(tl.float32)))

    if waits == "one":
        with pytest.raises(hopper.memory.EarlyError, match="touched before gdc_wait"):
            run(lambda: pair(waiting, touching))
    else:
        run(lambda: pair(waiting, touching))


def test_a_descriptor_is_fetched_ahead_by_its_parameter():
    run(lambda: asm("prefetch.param.tensormap [kernel_param_17]"))


def test_a_grid_has_one_dimension():
    Program.current = Program(3, 5, 4, 0)
    assert [int(language.program_id(axis)) for axis in (0, 1)] == [3, 0]
    assert [int(language.num_programs(axis)) for axis in (0, 1)] == [5, 1]


def test_a_prefetch_reaches_no_further_than_a_tensor_of_the_launch():
    tensor = torch.zeros(64)

    def fetch(first: int) -> None:
        address = Tensor(np.int64(tensor.data_ptr() + 4 * first), tl.int64)
        text = "cp.async.bulk.prefetch.L2.global [$1], 128; mov.b32 $0, 0;"
        with sanitizer.watched("kernel", "", {"k_ptr": tensor}):
            run(lambda: hopper.inline_asm_elementwise(text, "=r,l", [address], tl.int32, False, 1))

    fetch(0)
    fetch(32)
    with pytest.raises(sanitizer.SanitizerError, match=r"prefetches k_ptr\[33\]"):
        fetch(33)
