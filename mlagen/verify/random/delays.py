"""Copies of packages with delays: their sm90 kernels sleep a pseudo-random time before each sync and store.

A warp's delay hashes its clock, its number, its multiprocessor and the place in the text. Most are 0, so that calls
stay short; some are long, so that one warp is far behind the others.
"""

from __future__ import annotations

import ast
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from mlagen.digest import kernels_of
from mlagen.verify.random.syncs import ISSUES, STORES, SYNCS, called, sm90_files, statements

HELPER = '''

@gluon.jit
def _delay(place: gl.constexpr):
    """Sleeps: a quarter of the warps that come by up to 1 us, one in 64 up to 16 us, one in 512 up to 65 us."""
    gl.inline_asm_elementwise(
        """{
        .reg .pred sleeps, longer, longest;
        .reg .b32 hash, part;
        mov.u32 hash, %clock;
        mov.u32 part, %warpid;
        mad.lo.u32 hash, part, 0x9E3779B1, hash;
        mov.u32 part, %smid;
        mad.lo.u32 hash, part, 0x85EBCA77, hash;
        mad.lo.u32 hash, $1, 0xC2B2AE3D, hash;
        shr.u32 part, hash, 15;
        xor.b32 hash, hash, part;
        mul.lo.u32 hash, hash, 0x2C1B3C6D;
        shr.u32 part, hash, 12;
        xor.b32 hash, hash, part;
        shfl.sync.idx.b32 hash, hash, 0, 31, 0xffffffff;
        and.b32 part, hash, 63;
        setp.eq.u32 longer, part, 0;
        and.b32 part, hash, 511;
        setp.eq.u32 longest, part, 0;
        and.b32 part, hash, 3;
        setp.eq.u32 sleeps, part, 0;
        shr.u32 hash, hash, 9;
        and.b32 hash, hash, 1023;
        @longer shl.b32 hash, hash, 4;
        @longest shl.b32 hash, hash, 2;
        @sleeps nanosleep.u32 hash;
        mov.b32 $0, hash;
        }""",
        "=r,r",
        [gl.program_id(0) * 0 + place],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )
'''


def places(text: str) -> Iterator[int]:
    """Lines of a module before which a delay stands: syncs, copies to shared memory, and stores."""
    before = {*SYNCS, *ISSUES, *STORES, ".store"}
    for function in kernels_of(ast.parse(text)):
        for statement in statements(function):
            calls = [node for node in ast.walk(statement) if isinstance(node, ast.Call)]
            if any(called(call) in before for call in calls):
                yield statement.lineno


def delayed(text: str) -> str:
    """A module's text with delays; unchanged where it synchronises nowhere."""
    lines, found = text.splitlines(), sorted(set(places(text)))
    if not found:
        return text
    for place, line in reversed(list(enumerate(found, 1))):
        indent = lines[line - 1][: len(lines[line - 1]) - len(lines[line - 1].lstrip())]
        lines.insert(line - 1, f"{indent}_delay({place})")
    return "\n".join(lines) + "\n" + HELPER


def delayed_copies(folders: Sequence[Path], work: Path) -> list[Path]:
    """Copies of packages with delays, in `work`, each under its own name."""
    copies = []
    for folder in folders:
        copy = work / folder.name
        shutil.copytree(folder, copy)
        for path in sm90_files(copy):
            path.write_text(delayed(path.read_text(encoding="utf-8")), encoding="utf-8")
        copies.append(copy)
    return copies
