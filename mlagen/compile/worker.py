"""Lists and compiles kernels of one generated package: JSON requests on stdin, JSON results on stdout, one per line.

    python worker.py PACKAGE_DIR VERSION

VERSION selects rows of the package's tables. It is the version of the imported Triton, or another one to list that
version's variants.

Needs Triton, the standard library and the generated package's imports, but not mlagen and no GPU: a stand-in driver
answers Triton's questions about the target.

A request with `variants` names a `target`, with its `backend`, `arch` and `warp_size`. Its result has `variants`: all
variants that a call on the target can launch, as jobs without the target. A job has `module`, `kernel`, `signature` and
`constexprs` as pairs, `options` of the launch, the target as above, and `output`, the file for the machine code. Its
result has `name` (of the entry function), `shared` in bytes, `tensor_memory` in columns and `seconds`. If a job also
has `salt` and `known`, its result has `ir`, a key of its IR. If the folder `known` has a result of that key, the result
has only `ir`, and compilation stops there. A request with `triton_key` asks for a hash of this Triton. Any result may
instead have `error`, `line` in the module (or null) and `detail`.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
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
from typing import Any, ClassVar


class JobError(Exception):
    """A job that does not fit its package; says so in one line."""


class KnownIRError(Exception):
    """The result of a kernel's IR is known. Holds the key."""


def main(package_dir: Path, version: str) -> None:
    """Serve requests until stdin ends.

    Args:
        package_dir: folder of the generated package.
        version: see the module's docstring.
    """
    # Triton, LLVM and ptxas print to descriptor 1: jobs and results pass by copies; 0 becomes empty, 1 becomes stderr.
    jobs, results = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    import triton

    triton.__version__ = version
    # Objects without the folder's name. Set as a knob, since environment variables are part of Triton's cache keys.
    triton.knobs.propagate_env = False
    triton.knobs.compilation.disable_line_info = True
    for line in jobs:
        job = json.loads(line)
        try:
            result = answer(package_dir, job)
        except JobError as error:
            result = {"error": str(error), "line": None, "detail": ""}
        except Exception as error:
            module = job.get("module", "__init__")
            result = explain(error, package_dir / f"{module.replace('.', '/')}.py")
        results.write(json.dumps(result) + "\n")


def answer(package_dir: Path, request: dict[str, Any]) -> dict[str, Any]:
    """The result of a request, see the module's docstring."""
    if "triton_key" in request:
        return {"triton_key": triton_key()}
    return list_variants(package_dir, request) if "variants" in request else compile_job(package_dir, request)


def triton_key() -> str:
    """Return a hash of the key of this Triton in its cache, as the generated `_ahead.py` computes it."""
    from triton.runtime import cache

    return hashlib.sha256(cache.triton_key().encode()).hexdigest()[:16]


class StandIn:
    """The driver of one target, as far as Triton needs it to compile. Each target is a separate device to Triton."""

    numbers: ClassVar[dict[str, int]] = {}

    def __init__(self, target: dict[str, Any]) -> None:
        self._target = target
        self._number = self.numbers.setdefault(target["target"], len(self.numbers))

    def get_current_target(self) -> Any:
        """The target, as a driver names its device's."""
        from triton.backends.compiler import GPUTarget

        return GPUTarget(self._target["backend"], self._target["arch"], self._target["warp_size"])

    def get_current_device(self) -> int:
        """Return the target's own number. Triton caches compilations by it."""
        return self._number

    def get_current_stream(self, device: int | None = None) -> int:
        """No stream: nothing is launched."""
        return 0


def stand_in(target: dict[str, Any]) -> None:
    """Make Triton compile for the target from here on."""
    from triton.runtime.driver import driver

    driver.set_active(StandIn(target))


# Variants that calls on a target can launch, by their description.
_variants: dict[str, dict[str, Any]] = {}


def list_variants(package_dir: Path, request: dict[str, Any]) -> dict[str, Any]:
    """List all variants that a call on a target can launch, from `package.variants`.

    Args:
        package_dir: folder of the generated package.
        request: see the module's docstring.

    Returns:
        The result, see the module's docstring.

    Raises:
        JobError: the package does not list them.
    """
    if not hasattr(load_package(package_dir), "variants"):
        raise JobError("the package does not list its variants")
    return {"variants": [json.loads(key) for key in _variants_of(package_dir, request)]}


def _variants_of(package_dir: Path, target: dict[str, Any]) -> dict[str, Any]:
    name = target["target"]
    if name not in _variants:
        stand_in(target)
        package = load_package(package_dir)
        listed = getattr(package, "variants", None)
        _variants[name] = {} if listed is None else {_key(describe(one)): one for one in listed(name)}
    return _variants[name]


def _key(description: dict[str, Any]) -> str:
    return json.dumps({name: description[name] for name in ("module", "kernel", "signature", "constexprs", "options")})


def describe(variant: Any) -> dict[str, Any]:
    """Return a variant's job as plain values, without its target."""
    signature, constexprs = [], []
    given = (*variant.arguments, *variant.constexprs)
    for param, value in zip(variant.kernel.params, given, strict=True):
        if param.is_constexpr or value is None:
            constexprs.append([param.name, value])
        else:
            signature.append([param.name, kind_of(param, value)])
    function = variant.kernel.fn
    return {
        "module": function.__module__.partition(".")[2],
        "kernel": function.__name__,
        "signature": signature,
        "constexprs": constexprs,
        "options": variant.options,
    }


def kind_of(param: Any, value: Any) -> str:
    """Return Triton's name of an argument's type. For a tensor descriptor it includes block and shared layout."""
    if hasattr(value, "block_shape"):
        block = ",".join(map(str, value.block_shape))
        layout = f",{value.layout!r}" if hasattr(value, "layout") else ""
        return f"tensordesc<{_element(value.base)}[{block}]{layout}>"
    if hasattr(value, "data_ptr"):
        return f"*{_element(value)}"
    return param.annotation_type or {bool: "u1", int: "i32", float: "fp32"}[type(value)]


# Triton's names of torch's dtypes.
_ELEMENTS = {
    "bfloat16": "bf16",
    "float16": "fp16",
    "float32": "fp32",
    "float8_e4m3fn": "fp8e4nv",
    "bool": "i1",
    "uint8": "u8",
    "int32": "i32",
    "int64": "i64",
}


def _element(tensor: Any) -> str:
    return _ELEMENTS[str(tensor.dtype).removeprefix("torch.")]


class IRKey:
    """Key of a compilation by the IR after Triton's first stage, the input of the later and longer stages.

    Set it as Triton's hook for stages. In that IR, helpers are inlined and only the kernel's name is left.

    Args:
        salt: other inputs of the results: Triton's version, the target.
        known: folder with a file `KEY.json` per known result.

    Attributes:
        key: hexadecimal digits; empty before a compilation.
    """

    def __init__(self, salt: str, known: Path) -> None:
        self._salt, self._known = salt, known
        self.key = ""

    def __call__(
        self,
        backend: Any = None,
        stages: dict[str, Any] | None = None,
        options: Any = None,
        language: Any = None,
        capability: int | None = None,
    ) -> tuple[str, str] | None:
        """Wrap the second stage.

        Raises:
            KnownIRError: in that stage, if there is a result.
        """
        if stages is None:
            return "", ""  # Triton asks for the hook's part of its cache keys
        second = list(stages)[1]
        after = stages[second]
        given = {name: value for name, value in vars(options).items() if name != "extern_libs"}  # these hold paths

        def keyed(module: Any, metadata: Any) -> Any:
            text = module.str_nodebug()
            entry = re.search(r"tt\.func public @(\w+)", text)
            if entry:
                text = re.sub(rf"@{entry[1]}\b", "@kernel", text)
            self.key = hashlib.sha256(f"{self._salt}{sorted(given.items())}{text}".encode()).hexdigest()
            if (self._known / f"{self.key}.json").exists():
                raise KnownIRError(self.key)
            return after(module, metadata)

        stages[second] = keyed
        return None


def compile_job(package_dir: Path, job: dict[str, Any]) -> dict[str, Any]:
    """Compile one kernel as its launch would, and write its machine code to the job's output file.

    Args:
        package_dir: folder of the generated package.
        job: see the module's docstring.

    Returns:
        The result, see the module's docstring.

    Raises:
        JobError: the module has no such kernel, or its arguments are not the job's.
    """
    import triton

    stand_in(job)
    variant = _variants_of(package_dir, job).get(_key(job))
    if variant is None:
        kernel, arguments = _made(package_dir, job)
        made = functools.partial(kernel.warmup, *arguments, grid=(1,), **job["options"])
    else:
        kernel, made = variant.kernel, variant.compile
    triton.knobs.nvidia.dump_ptxas_log = kernel.is_gluon()  # which Triton prints when it compiles anew, as it does here
    ir = IRKey(job["salt"], Path(job["known"])) if "known" in job else None
    triton.knobs.runtime.add_stages_inspection_hook = ir
    start = time.perf_counter()
    with contextlib.redirect_stdout(io.StringIO()) as log:
        try:
            compiled = made()
        except KnownIRError as known:
            return {"ir": str(known)}
    serialised = [line.strip() for line in log.getvalue().splitlines() if re.search(r"\bC75\d\d\b", line)]
    if serialised:
        raise JobError(f"ptxas serialises its warpgroup products: {serialised[0]}")
    seconds = time.perf_counter() - start
    code = compiled.asm["cubin" if job["backend"] == "cuda" else "amdgcn"]
    Path(job["output"]).write_bytes(code if isinstance(code, bytes) else code.encode())
    return {
        "name": compiled.metadata.name,
        "shared": compiled.metadata.shared,
        "tensor_memory": getattr(compiled.metadata, "tmem_size", None) or 0,
        "seconds": seconds,
        "ir": ir.key if ir is not None else "",
    }


def _made(package_dir: Path, job: dict[str, Any]) -> tuple[Any, list[Any]]:
    """(kernel, arguments) of a job that its package does not list."""
    import torch
    from triton.runtime.jit import JITFunction

    kernel = getattr(load_module(package_dir, job["module"]), job["kernel"], None)
    if not isinstance(kernel, JITFunction):
        raise JobError(f"{job['kernel']} is not a @triton.jit function of {job['module']}")
    dtypes = {f"*{element}": getattr(torch, name) for name, element in _ELEMENTS.items()}
    given = dict(job["constexprs"])
    for name, kind in job["signature"]:
        # A number without properties for Triton, and an aligned tensor.
        given[name] = torch.empty(0, dtype=dtypes[kind]) if kind in dtypes else 1.5 if kind == "fp32" else 2
    if sorted(given) != sorted(kernel.arg_names):
        raise JobError(f"the kernel takes ({', '.join(kernel.arg_names)}), but the job names ({', '.join(given)})")
    return kernel, [given[name] for name in kernel.arg_names]


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
    return importlib.import_module(f"{load_package(package_dir).__name__}.{module}")


def load_package(package_dir: Path) -> ModuleType:
    """Import the package, as one of the folder's name.

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
    return sys.modules[name]


def explain(error: Exception, module: Path) -> dict[str, Any]:
    """Turn the exception of a compilation or an import into a result.

    Args:
        error: the exception.
        module: source file of the kernel.

    Returns:
        `error`, the innermost cause in one line; `line`, where in the file; `detail`, everything said.
    """
    chain = list(_causes(error))
    line = next((line for each in reversed(chain) if (line := _line(each, module))), None)
    # A Triton CompilationError's text starts with source lines; its message is separate.
    message = getattr(chain[-1], "error_message", None) or f"{type(chain[-1]).__name__}: {chain[-1]}"
    return {
        "error": next(text.strip() for text in message.splitlines() if text.strip()),
        "line": line,
        "detail": "\n".join(f"{type(each).__name__}: {each}" for each in chain),
    }


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield the exception and its causes, from the outside in."""
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
    main(Path(sys.argv[1]), sys.argv[2])
