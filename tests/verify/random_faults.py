"""Random faults in generated kernels, and how many of them verification notices.

    PYTHONPATH=. python tests/verify/random_faults.py --seed 1 --faults 20 odd odd_fp8
    PYTHONPATH=. python tests/verify/random_faults.py --seed 1 --faults 7 --sm90

Prints a line a fault: the case that noticed it, or that none did; then a table. Exits with 1 if too few are noticed. A
fault that survives and is known to change nothing that a call can see stands in `harmless_faults.yaml` with the reason,
and does not count. With --sm90, faults go into the sm90 modules, so many in each, and their
cases run in numpy. One that passes them all is compiled then, as `build` does, since numpy knows little of layouts.

Torch and Triton are imported once a package; each fault runs in a fork, since some of them crash or never end.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml
from noticed import forked

sys.path.append(str(Path(__file__).resolve().parents[1]))
from checked_in import package_of

ROOT = Path(__file__).resolve().parents[2]
FEWEST_NOTICED = 0.97  # of those that change anything
HARMLESS = Path(__file__).with_name("harmless_faults.yaml")
PACKAGES = ("odd", "odd_fp8", "odd_prefill", "minicpm3", "dsv4_flash")
TARGETS = ["sm80", "sm90", "gfx942"]  # all cases with the first one's tiles, some with the others'
# The packages with broken sm90 modules, one text of each module.
SM90 = {
    "_topk_sm90": "dsv32",
    "_mqa_logits_sm90": "dsv32",
    "_paged_mqa_logits_sm90": "dsv32",
    "_index_union_sm90": "dsv32",
    "_sparse_fwd_sm90": "dsv32",
    "_sparse_fwd_sm90_shared": "dsv32",
    "_sparse_fwd_sm90_swap_ab": "dsv32",
    "_sparse_decode_sm90": "dsv4_flash",
    "_sparse_decode_sm90_e4m3": "dsv32_fp8_tensor",
    "_dense_decode_sm90": "dsv3",
    "_dense_decode_sm90_swap_ab": "dsv3",
    "_dense_decode_sm90_rows32": "dsv3_fp8",
    "_dense_decode_sm90_q_halves": "dsv3_fp8",
    "_dense_fwd_sm90": "dsv3_prefill",
}
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
    function: str
    line: int
    begin: int
    end: int
    new: str
    text: str  # the line as it is
    number: int = 1  # of the function's lines with this text, which one

    def apply(self, source: str) -> str:
        """The module with the fault in it."""
        lines = source.splitlines(keepends=True)
        lines[self.line - 1] = self._broken(lines[self.line - 1])
        return "".join(lines)

    def _broken(self, line: str) -> str:
        return line[: self.begin] + self.new + line[self.end :]

    @property
    def key(self) -> str:
        """Its name in `harmless_faults.yaml`: module and function, and the line before and after.

        Of several lines with one text, those from the second on have their number in it.
        """
        place = f"{self.module}:{self.function}" + (f":{self.number}" if self.number > 1 else "")
        return f"{place}: {self.text.strip()} -> {self._broken(self.text).strip()}"


def faults_of(folder: Path, module: str | None = None) -> list[Fault]:
    """Every fault that may be put into a module of a package; None: into its portable kernels."""
    found = []
    for path in sorted(folder.glob("_*.py")):
        source = path.read_text()
        kernels = "@triton.jit" in source or "@_launch.kernel" in source
        if path.stem != module if module else "_sm90" in path.name or not kernels:
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
            alike = [one.strip() for one in lines[function.lineno - 1 : node.lineno]].count(line.strip())
            # ast counts bytes; the kernels' lines that hold code are ASCII.
            yield Fault(module, function.name, node.lineno, begin, end, new, line, alike)

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
                if name in ("tl.program_id", "gl.program_id"):
                    yield from fault(node, node.col_offset, node.end_col_offset, f"({ast.unparse(node)} + 1)")
                if name in ("tl.where", "gl.where") and node.lineno == node.end_lineno:
                    condition, one, other = (ast.unparse(argument) for argument in node.args)
                    swapped = f"{name}({condition}, {other}, {one})"
                    yield from fault(node, node.col_offset, node.end_col_offset, swapped)
                for keyword in node.keywords:
                    value = keyword.value
                    if keyword.arg == "mask" and value.end_col_offset is not None:
                        kept = ast.unparse(value.left) if isinstance(value, ast.BinOp) else "None"
                        yield from fault(value, value.col_offset, value.end_col_offset, kept)


def score(package: str, chosen: list[Fault], seed: int, work: Path) -> list[tuple[Fault, str | None]]:
    """Puts faults into a package, one at a time, and names the case that noticed each."""
    results = []
    for number, fault in enumerate(chosen):
        folder = work / str(number) / package
        shutil.copytree(package_of(package), folder)
        path = folder / f"{fault.module}.py"
        path.write_text(fault.apply(path.read_text()))
        results.append((fault, _noticed(folder, fault.module, seed)))
        shutil.rmtree(folder)
        print(f"{package} {fault.line}: {fault.key}\n    {results[-1][1] or 'NOT NOTICED'}", flush=True)
    return results


def _noticed(folder: Path, module: str, seed: int) -> str | None:
    from mlagen.verify.random.reached import REACHED

    if module not in REACHED:
        return forked(folder, TARGETS, FAMILIES.get(module), "", seed)
    family, kernel = REACHED[module]
    return forked(folder, ["sm90"], (family,), kernel, seed) or _compilation(folder, module)


def _compilation(folder: Path, module: str) -> str | None:
    """The failure of a kernel of the module to compile for sm90, with each choice of absent tensors."""
    from mlagen.compile import compile_jobs, list_variants
    from mlagen.compile.job import KernelError

    with tempfile.TemporaryDirectory() as cache:
        jobs = [job for job in list_variants(folder, ["sm90"], cache_dir=Path(cache)) if job.module == module]
        chosen = {(job.kernel, *(name for name, _ in job.signature)): job for job in reversed(jobs)}
        try:
            compile_jobs(folder, list(chosen.values()), workers=1, cache_dir=Path(cache))
        except KernelError as error:
            return f"compilation: {' '.join(str(error).split())[:160]}"
    return None


def harmless() -> dict[str, str]:
    """Faults that change nothing, each with the reason."""
    known = yaml.safe_load(HARMLESS.read_text(encoding="utf-8"))
    assert isinstance(known, dict)
    return known


def main() -> None:
    parser = argparse.ArgumentParser(description="Puts random faults into generated kernels.")
    parser.add_argument("packages", nargs="*", default=PACKAGES)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--faults", type=int, default=20, help="in each package, or in each module")
    parser.add_argument("--sm90", nargs="*", help="into these sm90 modules; without a name into all")
    options = parser.parse_args()
    os.environ["TRITON_INTERPRET"] = "1"
    sys.path.insert(0, str(ROOT))
    from mlagen.verify.worker import prepare

    prepare("cpu")
    import mlagen.verify.families  # noqa: F401  torch and Triton, before the first fork

    known, rows = harmless(), []
    if options.sm90 is None:
        places = [(package, None) for package in options.packages]
    else:
        places = [(SM90[module], module) for module in options.sm90 or SM90]
    with tempfile.TemporaryDirectory() as work:
        for package, module in places:
            name = f"{package}/{module}" if module else package
            chosen = random.Random(f"{name} {options.seed}").sample(
                faults_of(package_of(package), module), options.faults
            )
            results = score(package, chosen, options.seed, Path(work))
            survivors = [fault for fault, what in results if what is None]
            same = [fault for fault in survivors if fault.key in known]
            rows.append((name, len(results), len(results) - len(survivors), len(same)))
            for fault in survivors:
                print(f"{name}: survived: {fault.key}: {known.get(fault.key, 'NOT KNOWN TO BE HARMLESS')}")
    print(f"{'package':<40} faults  noticed  harmless  missed")
    for name, count, noticed, same in rows:
        print(f"{name:<40} {count:>6} {noticed:>8} {same:>9} {count - noticed - same:>7}")
    changing, found = (sum(row[at] - row[3] * (at == 1) for row in rows) for at in (1, 2))
    print(f"{found} of {changing} that change anything: {found / changing:.1%}")
    sys.exit(found < FEWEST_NOTICED * changing)


if __name__ == "__main__":
    main()
