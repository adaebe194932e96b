"""Spill loads and stores inside a loop, on short pieces of real output of nvdisasm and LLVM."""

from __future__ import annotations

import textwrap

import pytest

from mlagen.compile.binary import GCN_FLOW, SASS_FLOW, Flow, loop_spills


def count(flow: Flow, text: str) -> int:
    return loop_spills(flow, textwrap.dedent(text))


def test_only_code_inside_a_loop_counts():
    text = """\
    .text._wide_kernel:
            /*04a0*/                   STL.64 [R1+0x10], R8 ;
            /*0500*/                   UMOV UR4, 0x4 ;
    .L_x_0:
            /*0510*/                   STL [R1+0x238], R249 ;
            /*0830*/                   LDL.LU R249, [R1+0x238] ;
            /*0840*/              @!P1 LDL R245, [R1+0x234] ;
            /*38c0*/               @P0 BRA `(.L_x_0) ;
            /*38d0*/                   LDL.LU R247, [R1+0xc4] ;
            /*46d0*/                   EXIT ;
    """
    assert count(SASS_FLOW, text) == 3


def test_a_loop_that_a_uniform_predicate_closes_counts():
    text = """\
    .L_x_0:
            /*0510*/                   STL [R1], R249 ;
            /*6610*/                   BRA.U UP0, `(.L_x_0) ;
            /*6620*/                   LDL R249, [R1] ;
            /*7c70*/                   EXIT ;
    """
    assert count(SASS_FLOW, text) == 1


def test_nested_loops_count_once():
    text = """\
    .L_x_0:
            /*0510*/                   STL [R1], R2 ;
    .L_x_1:
            /*0520*/                   LDL R2, [R1] ;
            /*0530*/               @P0 BRA `(.L_x_1) ;
            /*0540*/                   STL [R1], R2 ;
            /*0550*/               @P1 BRA `(.L_x_0) ;
            /*0560*/                   EXIT ;
    """
    assert count(SASS_FLOW, text) == 3


MULTIPLYING = """\
    .L_x_0:
            /*0510*/                   STL [R1], R2 ;
            /*0518*/              @!P2 BRA `(.L_x_2) ;
    .L_x_1:
            /*0520*/                   LDL R2, [R1] ;
            /*0528*/                   HGMMA.64x256x16.F32.BF16 R24, R4, gdesc[UR4], R24 ;
            /*0530*/               @P0 BRA `(.L_x_1) ;
    .L_x_2:
            /*0540*/                   STL [R1], R2 ;
            /*0550*/               @P1 BRA `(.L_x_0) ;
            /*0560*/                   EXIT ;
    """


def test_code_around_a_loop_with_products_does_not_count():
    assert count(SASS_FLOW, MULTIPLYING) == 1
    assert count(SASS_FLOW, MULTIPLYING.replace("HGMMA.64x256x16.F32.BF16", "FFMA")) == 3


def test_a_loop_before_one_that_multiplies_does_not_count_and_one_behind_it_does():
    loop = """\
    .L_x_8:
            /*0010*/                   STL [R1], R2 ;
            /*0020*/               @P0 BRA `(.L_x_8) ;
    """
    loop, multiplying = textwrap.dedent(loop), textwrap.dedent(MULTIPLYING)
    behind = multiplying.replace(multiplying.splitlines()[-2] + "\n", "")
    assert count(SASS_FLOW, loop + multiplying) == 1
    assert count(SASS_FLOW, behind + loop) == 2


def test_a_loop_that_multiplies_counts_with_the_waits_inside_it():
    waiting = MULTIPLYING.replace("LDL R2, [R1]", "NOP").replace("HGMMA", "SYNCS").replace("STL", "HMMA R2 ; STL", 1)
    lines = waiting.splitlines()
    at = next(number for number, line in enumerate(lines) if "HMMA" in line)
    lines[at : at + 1] = [
        lines[at].replace("HMMA R2 ; ", ""),
        "            /*0512*/                   HMMA.16816.F32.BF16 R4 ;",
    ]
    assert count(SASS_FLOW, "\n".join(lines)) == 2


def test_a_zero_that_is_passed_on_the_stack_is_no_spill():
    text = """\
    .L_x_0:
            /*0510*/                   STL.64 [R1], RZ ;
            /*0520*/                   HMMA.16816.F32.BF16 R4 ;
            /*0530*/               @P0 BRA `(.L_x_0) ;
    """
    assert [count(SASS_FLOW, text.replace("RZ", each)) for each in ("RZ", "R2")] == [0, 1]


def test_the_trap_behind_a_function_is_no_loop_with_spills():
    text = """\
            /*4690*/                   STL [R1], R2 ;
            /*46d0*/                   EXIT ;
    .L_x_1:
            /*46e0*/                   BRA `(.L_x_1);
            /*46f0*/                   NOP;
    .L_x_2:
    """
    assert count(SASS_FLOW, text) == 0


def test_a_prologue_in_branches_and_an_exit_by_call_are_no_loop():
    text = """\
            /*2780*/               @P0 BRA `(.L_x_0) ;
            /*27e0*/                   STL [R1], R2 ;
            /*2a10*/                   BRA `(.L_x_1) ;
    .L_x_0:
            /*2a70*/                   STL [R1], R14 ;
    .L_x_6:
            /*3650*/                   BSSY B0, `(.L_x_2) ;
            /*3910*/               @P4 BRA `(.L_x_3) ;
            /*3920*/                   STL [R1+0x4], R25 ;
    .L_x_3:
            /*3940*/                   BSYNC B0 ;
    .L_x_2:
            /*5a00*/               @P0 CALL.REL.NOINC `(.L_x_1) ;
            /*5a10*/                   BRA `(.L_x_6) ;
    .L_x_1:
            /*5a20*/                   LDL.LU R16, [R1+0x4] ;
            /*7210*/              @!P0 EXIT ;
            /*7230*/                   EXIT ;
    """
    assert count(SASS_FLOW, text) == 1


def test_a_wait_moved_behind_the_function_makes_no_loop_of_the_code_between():
    text = """\
            /*41b0*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [UR11+0x2c290], R4 ;
            /*41c0*/              @!P1 BRA `(.L_x_13) ;
    .L_x_12:
            /*41d0*/                   STL [R1], R4 ;
            /*d220*/                   EXIT ;
    .L_x_13:
            /*d260*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [UR11+0x2c290], R4 ;
            /*d270*/              @!P1 BRA `(.L_x_13) ;
            /*d280*/                   BRA `(.L_x_12) ;
    """
    assert count(SASS_FLOW, text) == 0


def test_a_loop_through_a_block_behind_the_function_counts():
    text = """\
    .L_x_31:
            /*80b0*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P3, [UR70], R3 ;
            /*80c0*/              @!P3 BRA `(.L_x_23) ;
    .L_x_37:
            /*80d0*/                   STL [R1], R4 ;
            /*afa0*/              @!P3 BRA `(.L_x_31) ;
            /*d220*/                   EXIT ;
    .L_x_23:
            /*d2c0*/                   LDL R3, [R1] ;
            /*d2e0*/                   BRA `(.L_x_37) ;
    """
    assert count(SASS_FLOW, text) == 2


def test_a_block_that_control_never_comes_to_is_no_way_into_a_loop():
    text = """\
    .L_x_9:
            /*0010*/                   NOP ;
    .L_x_0:
            /*0020*/                   LDL R3, [R1] ;
    .L_x_1:
            /*0030*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [UR70], R3 ;
            /*0040*/              @!P1 BRA `(.L_x_8) ;
    .L_x_3:
            /*0050*/                   HGMMA.64x256x16.F32.BF16 R24, R4, gdesc[UR4], R24 ;
            /*0060*/               @P0 BRA `(.L_x_1) ;
            /*0070*/                   STL [R1], R4 ;
            /*0080*/               @P2 BRA `(.L_x_0) ;
            /*0090*/               @P3 BRA `(.L_x_9) ;
            /*00a0*/                   EXIT ;
    .L_x_8:
            /*00b0*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [UR70], R3 ;
            /*00c0*/              @!P1 BRA `(.L_x_8) ;
            /*00d0*/                   BRA `(.L_x_3) ;
    """
    assert count(SASS_FLOW, text) == 0


def test_a_called_function_leads_back_to_no_label():
    text = """\
    .text._combine_kernel:
            /*0510*/                   STL [R1], R2 ;
            /*0520*/                   CALL.REL.NOINC `($__internal_0_$__cuda_sm20_div_s64) ;
            /*0530*/                   LDL R2, [R1] ;
            /*0540*/                   EXIT ;
            .type           $__internal_0_$__cuda_sm20_div_s64,@function
    $__internal_0_$__cuda_sm20_div_s64:
            /*0550*/                   RET.REL.NODEC R12 `(_combine_kernel) ;
    """
    assert count(SASS_FLOW, text) == 0


@pytest.mark.parametrize(
    ("branch", "expected"), [("s_cbranch_scc0 .LBB0_39", 1), ("s_cbranch_scc1 .LBB0_28", 2), ("s_branch .LBB0_39", 0)]
)
def test_an_amd_loop_is_where_its_branches_say(branch, expected):
    text = f"""\
    _sparse_fwd_kernel:                     ; @_sparse_fwd_kernel
    \tscratch_store_dword off, v8, off offset:1880 ; 4-byte Folded Spill
    \ts_branch .LBB0_28
    .LBB0_27:                               ;   in Loop: Header=BB0_28 Depth=1
    \tscratch_load_dword v8, off, off offset:1880 ; 4-byte Folded Reload
    \t{branch}
    .LBB0_28:                               ; =>This Inner Loop Header: Depth=1
    \ts_cbranch_execz .LBB0_27
    ; %bb.37:                               ;   in Loop: Header=BB0_28 Depth=1
    \tscratch_store_dword off, v9, off ; 4-byte Folded Spill, unlike .LBB0_28's
    \ts_cbranch_scc1 .LBB0_{"27" if expected == 2 else "39"}
    .LBB0_39:                               ; %Flow
    \tscratch_load_dword v9, off, off
    \ts_endpgm
    """
    assert count(GCN_FLOW, text) == expected


def test_an_amd_block_below_that_jumps_back_is_no_loop():
    text = """\
    \ts_cbranch_scc1 .LBB0_4
    .LBB0_2:
    \tscratch_store_dword off, v8, off
    \ts_branch .LBB0_7
    .LBB0_4:
    \tscratch_store_dword off, v9, off
    \ts_cbranch_scc1 .LBB0_2
    .LBB0_7:
    \ts_endpgm
    """
    assert count(GCN_FLOW, text) == 0
