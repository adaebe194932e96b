"""Copies of generated/dsv32 with one thing changed each."""
import shutil, sys
from pathlib import Path

OUT = Path(sys.argv[1])
HERE = Path("generated/dsv32")


def put(name, edits=(), topk=None):
    folder = OUT / f"v_{name}"
    shutil.copytree(HERE, folder, dirs_exist_ok=True)
    if topk:
        shutil.copy(topk, folder / "_topk_sm90.py")
    for file, old, new in edits:
        text = (folder / file).read_text()
        assert old in text, (name, file, old)
        (folder / file).write_text(text.replace(old, new))


SPARSE = [("_topk_sm90.py", "SPARSITY = gl.constexpr(24)", "SPARSITY = gl.constexpr(64)")]
RUN = "(block,), 4, 1, facts.pdl)"
P = "_paged_mqa_logits_sm90.py"
SPLIT = "        REGISTERS,\n    )"


def few(regs, second):
    return [
        ("mqa_logits.py", RUN, f"(block,), 4, 1, facts.pdl, registers={regs} if block == 1 else None)"),
        (P, "class Call(NamedTuple):", f"FEW = gl.constexpr([{second}, 40, 40, 40, 40])\n\n\nclass Call(NamedTuple):"),
        (P, "    gl.warp_specialize(", "    split: gl.constexpr = FEW if TOKENS == 1 else REGISTERS\n    gl.warp_specialize("),
        (P, SPLIT, "        split,\n    )"),
    ]


put("old", topk="device/old_topk_sm90.py")
put("new")
put("sp", SPARSE)
put("rg", SPARSE + few(80, 96))
