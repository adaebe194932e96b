"""Generated kernels broken on purpose, and a process that runs verification on each of them.

Usage: python mutants.py PACKAGE_DIR WORK_DIR [NAMES]

Prints {name of mutant: failed cases} as JSON; null where a mutant's pattern matches nothing.

Torch and Triton are imported once; each mutant runs in a fork, since some of them crash.
"""

import fnmatch
import json
import os
import re
import shutil
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

ATTENTION, KERNELS, SPLITS, CACHE = "sparse_fwd.py", "_sparse_fwd_kernels.py", "_splits.py", "cache.py"
TYPICAL = "sparse_fwd: typical (flash_mla_sparse_fwd)"
ONE_BY_ONE = "sparse_fwd: neighbours: one by one"
TARGETS = ["sm90"]
LONGEST = 30  # seconds that a mutant may take


@dataclass(frozen=True)
class Mutant:
    """A substitution in one generated module, and the cases that must notice it."""

    name: str
    file: str
    pattern: str
    text: str
    only: tuple[str, ...]


def _literal(name: str, old: str, new: str, *only: str, file: str = KERNELS) -> Mutant:
    return Mutant(name, file, re.escape(old), new.replace("\\", r"\\"), only or (TYPICAL,))


def _valid(name: str, condition: str, *only: str) -> Mutant:
    """The condition that an index names a row, replaced."""
    return Mutant(name, KERNELS, "valid = .*", f"valid = {condition}", only)


MUTANTS = (
    _literal(
        "flags are read the wrong way round", "recompute_ptr + group) != 0", "recompute_ptr + group) == 0", ONE_BY_ONE
    ),
    _literal("a group's last token is left out", "first + head_blocks * GROUP", "first + head_blocks * 3", ONE_BY_ONE),
    _literal("a group begins a head block late", "first = group *", "first = 1 + group *", ONE_BY_ONE),
    _literal("scores have the wrong sign", "scores * inputs.sm_scale_log2", "scores * -inputs.sm_scale_log2"),
    _literal(
        "scale applied twice", "scores * inputs.sm_scale_log2", "scores * inputs.sm_scale_log2 * inputs.sm_scale_log2"
    ),
    _literal("loop ends an index early", "0, end, config.BLOCK_N", "0, end - 1, config.BLOCK_N", "sparse_fwd: topk: 1"),
    Mutant(
        "the last index is dropped",
        KERNELS,
        r"(step|offsets|following) < count",
        r"\1 < count - 1",
        ("sparse_fwd: indices: last column",),
    ),
    Mutant(
        "load of K is not masked", KERNELS, r"mask=valid\[:, None\], other=0\.0\)(?=  # \[BLOCK_N)", ")", (TYPICAL,)
    ),
    Mutant(
        "masked rows read row 0",
        KERNELS,
        r"kv_rows = inputs.kv_ptr \+ .*(\n(?:.*\n)*?.*?)mask=valid\[:, None\], other=0\.0\)(?=  # \[BLOCK_N)",
        r"kv_rows = inputs.kv_ptr + tl.where(valid, index, 0).to(tl.int64) * inputs.kv_row_stride\1)",
        (TYPICAL,),
    ),
    _literal(
        "scores are not masked",
        'tl.where(valid[None, :], scores * inputs.sm_scale_log2, float("-inf"))',
        "scores * inputs.sm_scale_log2",
    ),
    _valid("one past the last row is valid", "(index >= 0) & (index <= inputs.s_kv)", "sparse_fwd: indices: last row"),
    _valid("the last row is not valid", "(index >= 0) & (index < inputs.s_kv - 1)", "sparse_fwd: indices: last row"),
    _valid("negative indices are valid", "index < inputs.s_kv", TYPICAL),
    Mutant(
        "row offsets are 32 bits wide",
        KERNELS,
        r"kv_rows = inputs.kv_ptr \+ .*",
        "kv_rows = inputs.kv_ptr + (index * inputs.kv_row_stride).to(tl.int32)",
        ("sparse_fwd: offsets: kv *",),
    ),
    _literal(
        "token is not 64 bits wide",
        "inputs.q_ptr + token * inputs.q_token_stride",
        "inputs.q_ptr + (token * inputs.q_token_stride).to(tl.int32)",
        "sparse_fwd: offsets: tokens *",
    ),
    _literal(
        "RoPE is left out",
        "tl.trans(k_rope)",
        "tl.trans(tl.zeros_like(k_rope))",
    ),
    _literal(
        "alpha is not applied to l", "l * alpha + tl.sum(p, 1)", "l + tl.sum(p, 1)", "sparse_fwd: topk: *", file=SPLITS
    ),
    _literal("alpha is not applied to acc", "acc * alpha[:, None])", "acc)", "sparse_fwd: topk: *"),
    _literal("P is not rounded like V", "p = p.to(k_nope.dtype)", "p = (p * 1.01).to(k_nope.dtype)"),
    _literal("LSE lacks the sum", "(m + tl.log2(l)) * LN2", "m * LN2", file=SPLITS),
    _literal("LSE is base 2", "(m + tl.log2(l)) * LN2", "(m + tl.log2(l))", file=SPLITS),
    _literal("max_logits is base 2", "maximum * LN2)", "maximum)", file=SPLITS),
    _literal(
        "an empty row's max_logits is finite",
        'tl.where(l == 0, float("-inf"), maximum * LN2)',
        "maximum * LN2",
        "sparse_fwd: indices: none",
        file=SPLITS,
    ),
    _literal(
        "an empty row's LSE is -inf", 'float("inf"), (m', 'float("-inf"), (m', "sparse_fwd: indices: none", file=SPLITS
    ),
    _literal(
        "an empty row is divided by 0",
        "tl.where(l == 0, 0.0, 1.0 / denominator)",
        "1.0 / denominator",
        "sparse_fwd: indices: none",
        file=SPLITS,
    ),
    Mutant(
        "the sink enters LSE",
        KERNELS,
        r"_splits\.store_stats\((.*), m, l\)",
        r"sink = tl.load(outputs.attn_sink_ptr + heads % inputs.num_heads)\n"
        r"    _splits.store_stats(\1, m, l + tl.exp2(sink * _splits.LOG2E - m))",
        ("sparse_fwd: sink: random",),
    ),
    _literal("the sink is base 2", "sink * LOG2E - m", "sink - m", "sparse_fwd: sink: random", file=SPLITS),
    _literal(
        "topk_length is ignored",
        "length = tl.maximum(tl.load(inputs.topk_length_ptr + token), 0)",
        "length = inputs.topk",
        "sparse_fwd: topk_length: mixed",
    ),
    _literal(
        "indices past a length count", "valid &= offsets < length", "valid = valid", "sparse_fwd: topk_length: mixed"
    ),
    _literal(
        "a negative topk_length is taken as it is",
        "tl.maximum(tl.load(inputs.topk_length_ptr + token), 0)",
        "tl.load(inputs.topk_length_ptr + token)",
        "sparse_fwd: topk_length: negative*",
    ),
    Mutant(
        "a head too many is written",
        KERNELS,
        r"head_mask = heads < .*num_heads",
        r"\g<0> + 1",
        ("sparse_fwd: contract: buffers *",),
    ),
    Mutant("splits run to the end", KERNELS, r"tl\.minimum\((.*), size\)", r"\1", ("sparse_fwd: splits: 3",)),
    Mutant("splits run past the end", KERNELS, r"tl\.minimum\(.*, size\)", "size", ("sparse_fwd: splits: 7",)),
    _literal(
        "splits begin an index late",
        "indices_token_stride + begin",
        "indices_token_stride + begin + 1",
        "sparse_fwd: splits: 3",
    ),
    _literal(
        "merge weights by the wrong maximum",
        "tl.exp2(part_m - m_new)",
        "tl.exp2(part_m - m)",
        "sparse_fwd: splits: 3",
        file=SPLITS,
    ),
    _literal(
        "merge adds without weights",
        "part * (weight * power)[:, None]",
        "part * power[:, None]",
        "sparse_fwd: splits: 3",
        file=SPLITS,
    ),
    _literal(
        "merge keeps no earlier part",
        "acc = acc * alpha + tl.sum",
        "acc = tl.sum",
        "sparse_fwd: splits: more *",
        file=SPLITS,
    ),
    _literal(
        "merge adds its first parts again",
        "splits += BLOCK_S",
        "splits += 0",
        "sparse_fwd: splits: more *",
        file=SPLITS,
    ),
    _literal(
        "merge takes another head's sink",
        "head = row - token * num_heads",
        "head = row * 0",
        "sparse_fwd: workspace: with *",
        file=SPLITS,
    ),
    _literal(
        "pieces take the first tokens' indices",
        "self.indices[part]",
        "self.indices[: last - first]",
        "sparse_fwd: workspace: *",
        file=ATTENTION,
    ),
    _literal(
        "pieces take the first tokens' lengths",
        "self.topk_length[part]",
        "self.topk_length[: last - first]",
        "sparse_fwd: workspace: with *",
        file=ATTENTION,
    ),
    _literal(
        "splits depend on the batch",
        "num_splits == 0 and batch_invariant",
        "False",
        "sparse_fwd: batch invariant: rows *",
        file=SPLITS,
    ),
    _literal(
        "rows are always called aligned", "if rows % 16:", "if rows < 0:", "sparse_fwd: layout: kv odd", file=ATTENTION
    ),
    _literal(
        "indices are always called grouped", "1 if groups % 16 else 16", "16", "sparse_fwd: topk: 17", file=ATTENTION
    ),
    _literal(
        "out is allocated though given",
        "if tensor is None:",
        "if True:",
        "sparse_fwd: contract: buffers *",
        file=SPLITS,
    ),
    _literal("any number is a scale", "_launch.scale(", "_launch.number(", "refuses: sm_scale*", file=ATTENTION),
    _literal(
        "dtype of indices is not checked",
        '_launch.check("indices", indices, torch.int32',
        '_launch.check("indices", indices, indices.dtype',
        "refuses: indices, dtype*",
        file=ATTENTION,
    ),
)


def mutated(mutant: Mutant, package: Path, folder: Path) -> Path | None:
    """A copy of the package with the mutant's substitution made; None if its pattern is not there."""
    target = folder / re.sub(r"\W+", "_", mutant.name) / package.name
    shutil.copytree(package, target)
    file = target / mutant.file
    text, count = re.subn(mutant.pattern, mutant.text, file.read_text())
    if not count:
        return None
    file.write_text(text)
    return target


def run_cases(package: Path, only: tuple[str, ...], out: Path, families: tuple[str, ...] | None = None) -> None:
    """Runs the cases on TARGETS; each case's name goes to `out` before it begins, its result after it."""
    from mlagen.verify.worker import Run

    run = Run(
        {
            "package_dir": str(package),
            "device": "cpu",
            "targets": TARGETS,
            "only": only,
            "families": families,
            "every": True,
        }
    )
    with out.open("w", buffering=1) as stream:
        for number, (case, _) in enumerate(run.pairs):
            stream.write(json.dumps({"case": case.name}) + "\n")
            result, _ = run.result(number)
            stream.write(json.dumps(result.to_json()) + "\n")


def failed_of(out: Path) -> list[str]:
    """Names of cases that failed, or that killed the process, from the output of `run_cases`."""
    answers = [json.loads(line) for line in out.read_text().splitlines()]
    if not answers:
        raise RuntimeError(f"{out.stem}: no case ran")
    failed = [answer["case"] for answer in answers if not answer.get("ok", True)]
    return failed if "ok" in answers[-1] else [*failed, answers[-1]["case"]]


def main() -> None:
    package, folder = Path(sys.argv[1]), Path(sys.argv[2])
    wanted = sys.argv[3] if len(sys.argv) > 3 else "*"
    warm = folder / "warm.jsonl"
    run_cases(package, (TYPICAL,), warm)
    if failed_of(warm):
        raise RuntimeError(f"{package} fails unbroken: {warm.read_text()}")
    found: dict[str, list[str] | None] = {}
    for mutant in MUTANTS:
        if not fnmatch.fnmatchcase(mutant.name, wanted):
            continue
        broken = mutated(mutant, package, folder)
        if broken is None:
            found[mutant.name] = None
            continue
        out = broken.parent / "answers.jsonl"
        child = os.fork()
        if not child:
            signal.alarm(LONGEST)  # a mutant that runs on forever is noticed, too
            try:
                run_cases(broken, mutant.only, out)
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        found[mutant.name] = failed_of(out)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
