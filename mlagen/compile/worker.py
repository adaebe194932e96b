"""Compiles kernels of one generated package: a job a line on stdin, a result a line on stdout, plain JSON both.

    python worker.py PACKAGE_DIR

Needs Triton and the standard library, and what the generated package imports; nothing of mlagen.

A job holds `module`, `kernel`, `signature` and `constexprs` as pairs, `options` of triton.compile, `backend`, `arch`,
`warp_size`, and `output`, the file the machine code goes to. A result holds `name` (the entry function's), `shared` in
bytes, `tensor_memory` in columns and `seconds`; or `error`, `line` in the module (or null) and `detail`.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import json
import os
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any


class JobError(Exception):
    """A job that does not fit its package; says so in one line."""


def main(package_dir: Path) -> None:
    """Serve jobs until stdin ends.

    Args:
        package_dir: folder of the generated package.
    """
    # Triton, LLVM and ptxas print to descriptor 1: jobs and results pass by copies; 0 becomes empty, 1 becomes stderr.
    jobs, results = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    for line in jobs:
        job = json.loads(line)
        try:
            result = compile_job(package_dir, job)
        except JobError as error:
            result = {"error": str(error), "line": None, "detail": ""}
        except Exception as error:
            result = explain(error, package_dir / f"{job['module'].replace('.', '/')}.py")
        results.write(json.dumps(result) + "\n")


def compile_job(package_dir: Path, job: dict[str, Any]) -> dict[str, Any]:
    """Compile one kernel and write its machine code to the job's output file.

    Args:
        package_dir: folder of the generated package.
        job: see the module's docstring.

    Returns:
        The result, see the module's docstring.

    Raises:
        JobError: the module has no such kernel, or its arguments are not the job's.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource
    from triton.runtime.jit import JITFunction

    module = load_module(package_dir, job["module"])
    fn = getattr(module, job["kernel"], None)
    if not isinstance(fn, JITFunction):
        raise JobError(f"{job['kernel']} is not a @triton.jit function of {job['module']}")
    signature = {name: with_layout(module, kind) for name, kind in job["signature"]}
    constexprs = dict(job["constexprs"])
    given = [*signature, *constexprs]
    if sorted(given) != sorted(fn.arg_names):
        raise JobError(f"the kernel takes ({', '.join(fn.arg_names)}), but the job names ({', '.join(given)})")
    # As a launch does: Triton knows 16-byte alignment of a tensor unless told not to specialise on the argument.
    attrs = {
        (index,): [["tt.divisibility", 16]]
        for index, param in enumerate(fn.params)
        if signature.get(param.name, "").startswith("*")
        and not (param.do_not_specialize or param.do_not_specialize_on_alignment)
    }
    source = (GluonASTSource if fn.is_gluon() else ASTSource)(
        fn=fn,
        signature={name: signature.get(name, "constexpr") for name in fn.arg_names},
        constexprs={(fn.arg_names.index(name),): value for name, value in constexprs.items()},
        attrs=attrs,
    )
    target = GPUTarget(job["backend"], job["arch"], job["warp_size"])
    triton.knobs.nvidia.dump_ptxas_log = fn.is_gluon()  # which Triton prints when it compiles anew, as it does here
    start = time.perf_counter()
    with contextlib.redirect_stdout(io.StringIO()) as log:
        kernel = triton.compile(source, target=target, options=job["options"])
    serialised = [line.strip() for line in log.getvalue().splitlines() if re.search(r"\bC75\d\d\b", line)]
    if serialised:
        raise JobError(f"ptxas serialises its warpgroup products: {serialised[0]}")
    seconds = time.perf_counter() - start
    code = kernel.asm["cubin" if job["backend"] == "cuda" else "amdgcn"]
    Path(job["output"]).write_bytes(code if isinstance(code, bytes) else code.encode())
    return {
        "name": kernel.metadata.name,
        "shared": kernel.metadata.shared,
        "tensor_memory": getattr(kernel.metadata, "tmem_size", None) or 0,
        "seconds": seconds,
    }


def with_layout(module: ModuleType, kind: str) -> str:
    """The type of an argument as Triton names it: a descriptor's shared layout is the name of a constant in the job."""
    found = re.fullmatch(r"(tensordesc<.*\]),(\w+)>", kind)
    return kind if found is None else f"{found[1]},{getattr(module, found[2]).value!r}>"


def load_module(package_dir: Path, module: str) -> ModuleType:
    """Import a module of the package, and the package first, without a search path.

    Args:
        package_dir: folder of the generated package, which becomes a package of the folder's name.
        module: name of the module in it.

    Returns:
        The module.

    Raises:
        JobError: the folder is no package, or its name is that of a module already there.
    """
    name = package_dir.name
    if name not in sys.modules:
        init = package_dir / "__init__.py"
        spec = importlib.util.spec_from_file_location(name, init, submodule_search_locations=[str(package_dir)])
        if spec is None or spec.loader is None or not init.is_file():
            raise JobError(f"{package_dir} is not a package: it has no __init__.py")
        package = sys.modules[name] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(package)
        except BaseException:
            del sys.modules[name]
            raise
    elif getattr(sys.modules[name], "__path__", None) != [str(package_dir)]:
        raise JobError(f"a package cannot be named {name}: a module of that name is in use")
    return importlib.import_module(f"{name}.{module}")


def explain(error: Exception, module: Path) -> dict[str, Any]:
    """Turn what a compilation or an import raised into a result.

    Args:
        error: the exception.
        module: source file of the kernel.

    Returns:
        `error`, the innermost cause in one line; `line`, where in the file; `detail`, everything said.
    """
    chain = list(_causes(error))
    line = next((line for each in reversed(chain) if (line := _line(each, module))), None)
    # A Triton CompilationError's text starts with source lines; what is wrong stands apart.
    message = getattr(chain[-1], "error_message", None) or f"{type(chain[-1]).__name__}: {chain[-1]}"
    return {
        "error": next(text.strip() for text in message.splitlines() if text.strip()),
        "line": line,
        "detail": "\n".join(f"{type(each).__name__}: {each}" for each in chain),
    }


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The exception, what caused it, and so on inward."""
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__


def _line(error: BaseException, module: Path) -> int | None:
    """The line of the file that a Triton CompilationError points at, which itself counts from its function's `def`."""
    source, line = getattr(error, "src", None), getattr(getattr(error, "node", None), "lineno", None)
    text = module.read_text() if module.is_file() else ""
    if not source or not line or source not in text:
        return None
    return text.count("\n", 0, text.index(source)) + int(line)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
