"""Random faults in generated kernels, and how many of them verification notices.

    PYTHONPATH=. python tests/verify/random_faults.py --seed 1 --faults 20 odd odd_fp8

Prints a line a fault: the case that noticed it, or that none did; then a table. Exits with 1 if too few are noticed. A
fault that survives and is known to change nothing that a call can see stands in `harmless_faults.yaml` with the reason,
and does not count.

Torch and Triton are imported once a package; each fault runs in a fork, since some of them crash or never end.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]
GENERATED = ROOT / "generated"
FEWEST_NOTICED = 0.97  # of those that change anything
HARMLESS = Path(__file__).with_name("harmless_faults.yaml")
PACKAGES = ("odd", "odd_fp8", "odd_prefill", "minicpm3", "dsv4_flash")
TARGETS = ["sm80", "sm90", "gfx942"]  # all cases with the first one's tiles, some with the others'
CASE_SECONDS = 60  # in which a case ends but for a loop without an end
# Which families' cases run a module's functions; of other modules all do.
FAMILIES = {
    "_cache_kernels": ("cache",),
    "_indices_kernels": ("indices",),
    "_merge_states_kernels": ("merge_states",),
    "_sparse_fwd_kernels": ("sparse_fwd",),
    "_sparse_decode_kernels": ("sparse_decode",),
    "_dense_decode_kernels": ("dense_decode",),
    "_dense_fwd_kernels": ("dense_fwd",),
}
OPERATORS = {
    ast.Add: "-",
    ast.Sub: "+",
    ast.Mult: "+",
    ast.FloorDiv: "*",
    ast.Mod: "//",
    ast.BitAnd: "|",
    ast.BitOr: "&",
}
COMPARISONS = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "=="}
SIGNS = {
    ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.FloorDiv: "//", ast.Mod: "%", ast.BitAnd: "&", ast.BitOr: "|",
    ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!=",
}  # fmt: skip


@dataclass(frozen=True)
class Fault:
    """A replacement in one line of a generated module, which stands in `begin` to `end` of it."""

    module: str
    line: int
    begin: int
    end: int
    new: str
    text: str  # the line as it is

    def apply(self, source: str) -> str:
        """The module with the fault in it."""
        lines = source.splitlines(keepends=True)
        lines[self.line - 1] = self._broken(lines[self.line - 1])
        return "".join(lines)

    def _broken(self, line: str) -> str:
        return line[: self.begin] + self.new + line[self.end :]

    @property
    def key(self) -> str:
        """What names it in `harmless_faults.yaml`: the line before and after."""
        return f"{self.text.strip()} -> {self._broken(self.text).strip()}"


def faults_of(folder: Path) -> list[Fault]:
    """Every fault that may be put into the portable kernels of a package."""
    found = []
    for path in sorted(folder.glob("_*.py")):
        source = path.read_text()
        if "_sm90" in path.name or "@triton.jit" not in source + source.replace("@_launch.kernel", "@triton.jit"):
            continue
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef) and any(
                "jit" in ast.dump(one) or "kernel" in ast.dump(one) for one in node.decorator_list
            ):
                found += list(_of_function(path.stem, node, source))
    return found


def _of_function(module: str, function: ast.FunctionDef, source: str) -> Iterator[Fault]:
    lines = source.splitlines()

    def fault(node: ast.expr, begin: int, end: int, new: str) -> Iterator[Fault]:
        if node.lineno == node.end_lineno:
            line = lines[node.lineno - 1]
            # ast counts bytes; the kernels' lines that hold code are ASCII.
            yield Fault(module, node.lineno, begin, end, new, line)

    for statement in function.body:
        for node in ast.walk(statement):
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                continue
            if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS and node.left.end_lineno == node.right.lineno:
                between = lines[node.lineno - 1][node.left.end_col_offset : node.right.col_offset]
                sign = SIGNS[type(node.op)]
                if sign in between and node.left.end_col_offset is not None:
                    at = node.left.end_col_offset + between.index(sign)
                    yield from fault(node, at, at + len(sign), OPERATORS[type(node.op)])
            elif isinstance(node, ast.Compare) and type(node.ops[0]) in COMPARISONS:
                other = node.comparators[0]
                if node.left.end_lineno == other.lineno and node.left.end_col_offset is not None:
                    between = lines[node.lineno - 1][node.left.end_col_offset : other.col_offset]
                    sign = SIGNS[type(node.ops[0])]
                    at = node.left.end_col_offset + between.index(sign)
                    yield from fault(node, at, at + len(sign), COMPARISONS[type(node.ops[0])])
            elif (
                isinstance(node, ast.Constant) and type(node.value) in (int, float) and node.end_col_offset is not None
            ):
                yield from fault(node, node.col_offset, node.end_col_offset, repr(node.value + 1))
            elif isinstance(node, ast.Call) and node.end_col_offset is not None:
                name = ast.unparse(node.func)
                if name == "tl.program_id":
                    yield from fault(node, node.col_offset, node.end_col_offset, f"({ast.unparse(node)} + 1)")
                if name == "tl.where" and node.lineno == node.end_lineno:
                    condition, one, other = (ast.unparse(argument) for argument in node.args)
                    swapped = f"tl.where({condition}, {other}, {one})"
                    yield from fault(node, node.col_offset, node.end_col_offset, swapped)
                for keyword in node.keywords:
                    value = keyword.value
                    if keyword.arg == "mask" and value.end_col_offset is not None:
                        kept = ast.unparse(value.left) if isinstance(value, ast.BinOp) else "None"
                        yield from fault(value, value.col_offset, value.end_col_offset, kept)


class _TooLongError(BaseException):
    pass


def _stop(*_: object) -> None:
    raise _TooLongError


def noticed_by(folder: Path, module: str, seed: int) -> str | None:
    """The first case, in some order, that does not hold for a package; None if all that run the module do."""
    from mlagen.verify.families import FAMILIES as KNOWN
    from mlagen.verify.worker import Run

    signal.signal(signal.SIGALRM, _stop)
    try:
        job = {
            "package_dir": str(folder),
            "device": "cpu",
            "targets": TARGETS,
            "only": None,
            "families": None,
            "every": True,
        }
        run = Run(job)
    except Exception as error:
        return f"import: {type(error).__name__}"
    names = FAMILIES.get(module)
    known = [family for family in KNOWN if names is None or family.name in names]
    numbers = [number for number, (case, _) in enumerate(run.pairs) if any(one.has(case) for one in known)]
    numbers = [number for number in numbers if "refuses" not in run.pairs[number][0].name]
    random.Random(seed).shuffle(numbers)
    for number in numbers:
        signal.alarm(CASE_SECONDS)
        try:
            result, _ = run.result(number)
        except _TooLongError:
            return f"{run.pairs[number][0].name}: no end"
        finally:
            signal.alarm(0)
        if not result.ok:
            return f"{result.case}: {result.detail[:160]}"
    return None


def score(package: str, seed: int, count: int, work: Path) -> list[tuple[Fault, str | None]]:
    """Puts so many faults into a package, each alone, and says what noticed each."""
    source = GENERATED / package
    chosen = random.Random(f"{package} {seed}").sample(faults_of(source), count)
    results = []
    for number, fault in enumerate(chosen):
        folder = work / str(number) / package
        shutil.copytree(source, folder)
        path = folder / f"{fault.module}.py"
        path.write_text(fault.apply(path.read_text()))
        results.append((fault, _forked(folder, fault.module, seed)))
        shutil.rmtree(folder)
        print(f"{package} {fault.module}:{fault.line}: {fault.key}\n    {results[-1][1] or 'NOT NOTICED'}", flush=True)
    return results


def _forked(folder: Path, module: str, seed: int) -> str | None:
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException), os.fdopen(writing, "w") as answer:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            answer.write(json.dumps(noticed_by(folder, module, seed)))
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as answer:
        text = answer.read()
    os.waitpid(child, 0)
    return str(json.loads(text)) if text and text != "null" else (None if text else "the process died")


def harmless() -> dict[str, str]:
    """Faults that change nothing, each with the reason."""
    known = yaml.safe_load(HARMLESS.read_text(encoding="utf-8"))
    assert isinstance(known, dict)
    return known


def main() -> None:
    parser = argparse.ArgumentParser(description="Puts random faults into generated kernels.")
    parser.add_argument("packages", nargs="*", default=PACKAGES)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--faults", type=int, default=20)
    options = parser.parse_args()
    os.environ["TRITON_INTERPRET"] = "1"
    sys.path.insert(0, str(ROOT))
    from mlagen.verify.worker import prepare

    prepare("cpu")
    import mlagen.verify.families  # noqa: F401  torch and Triton, before the first fork

    known, rows = harmless(), []
    with tempfile.TemporaryDirectory() as work:
        for package in options.packages:
            results = score(package, options.seed, options.faults, Path(work))
            survivors = [fault for fault, what in results if what is None]
            same = [fault for fault in survivors if fault.key in known]
            rows.append((package, len(results), len(results) - len(survivors), len(same)))
            for fault in survivors:
                print(f"{package}: survived: {fault.key}: {known.get(fault.key, 'NOT KNOWN TO BE HARMLESS')}")
    print("package        faults  noticed  harmless  missed")
    for package, count, noticed, same in rows:
        print(f"{package:<14} {count:>6} {noticed:>8} {same:>9} {count - noticed - same:>7}")
    changing, found = (sum(row[at] - row[3] * (at == 1) for row in rows) for at in (1, 2))
    print(f"{found} of {changing} that change anything: {found / changing:.1%}")
    sys.exit(found < FEWEST_NOTICED * changing)


if __name__ == "__main__":
    main()
