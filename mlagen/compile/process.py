"""A compile worker: its start and its requests."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mlagen.compile.binary import Measured, read_amdgcn, read_cubin
from mlagen.compile.cache import ResultCache, content_key
from mlagen.compile.job import CompileJob, KernelError
from mlagen.compile.resources import label
from mlagen.compile.toolchain import Toolchain
from mlagen.errors import Place, ToolError
from mlagen.plan.targets import TARGETS
from mlagen.workers import Limit, Worker, WorkerError

# Limit of a job in CPU seconds; the largest kernels take a few.
TIMEOUT_S = 300.0

# Variables that change the output of Triton, LLVM or ptxas. The cache's key does not contain them.
_STEERING = ("TRITON_", "MLIR_", "LLVM_", "AMDGCN_", "NVPTX_", "PTXAS_", "DISABLE_", "USE_IR_LOC")


class Compiler(Worker):
    """A worker process that lists and compiles the kernels of one package.

    Args:
        package_dir: folder of the generated package.
        folder: the worker's own, for Triton's cache and machine code.
        toolchain: the Triton that it imports.
        kernels_dir: where Triton's cache keeps the binaries; None: in a folder that goes with the worker.
    """

    def __init__(self, package_dir: Path, folder: Path, toolchain: Toolchain, kernels_dir: Path | None = None) -> None:
        folder.mkdir()
        self._package_dir, self._folder, self._toolchain = package_dir, folder, toolchain
        # By its file, not -m: importing the package would bring the plan and the spec with it.
        command = [sys.executable, "-P", str(Path(__file__).with_name("worker.py")), str(package_dir)]
        super().__init__([*command, toolchain.version], _environment(kernels_dir or folder / "triton", toolchain))

    def variants(self, target: str) -> list[CompileJob]:
        """List all variants that a call of the package can launch on a target.

        Raises:
            ToolError: the package cannot be imported or does not list them, or the worker died or took too long.
        """
        request = {"variants": target, **_target_of(target)}
        what = f"{self._package_dir.name}: variants for {target}"
        return [job_of(target, description) for description in self._ask(request, what, "__init__")["variants"]]

    def triton_key(self) -> str:
        """Return the hash of the worker's Triton for the name of an archive of kernels."""
        return str(self._ask({"triton_key": True}, f"triton {self._toolchain.version}", "__init__")["triton_key"])

    def compile(self, job: CompileJob, cache: ResultCache | None) -> tuple[Measured, bool]:
        """Compile a job and read the machine code.

        Args:
            job: the compilation.
            cache: results, also by IR. If the job's IR is known, its result is returned. None: always compile.

        Returns:
            The kernel's figures, and whether they came from `cache`.

        Raises:
            KernelError: the compiler refuses the job.
            ToolError: the worker died, hung, or took more CPU than TIMEOUT_S.
        """
        output = self._folder / "code"
        request = {**request_of(job), "output": str(output)}
        salt = content_key("ir", self._toolchain.version, job.target)
        by_ir = {} if cache is None else {"salt": salt, "known": str(cache.folder)}
        result = self._ask(request | by_ir, label(job), job.module, job)
        if cache is not None and "name" not in result:
            if (known := cache.get(result["ir"])) is not None:
                return known, True
            result = self._ask(request, label(job), job.module, job)
        cuda = TARGETS[job.target].backend == "cuda"
        usage = read_cubin(output, result["name"], self._toolchain) if cuda else read_amdgcn(output)
        measured = Measured(
            **usage, shared=result["shared"], tensor_memory=result["tensor_memory"], seconds=result["seconds"]
        )
        if cache is not None and result["ir"]:
            cache.put(result["ir"], measured)
        return measured, False

    def _ask(self, request: dict[str, Any], what: str, module: str, job: CompileJob | None = None) -> dict[str, Any]:
        printed = self.printed()
        try:
            result = self.ask(request, Limit(TIMEOUT_S))
        except WorkerError as error:
            how = error.late or f"died ({error.end})"
            raise ToolError(f"{what}: the compile worker {how}", hint=error.words or None) from None
        if "error" in result:
            # MLIR and ptxas print details on stderr that the exception lacks.
            hint = "\n".join(part for part in (result["detail"], self.words(printed)) if part)
            path, line = self._package_dir / f"{module.replace('.', '/')}.py", result["line"]
            place = Place(path, line) if line else None
            if job is not None:
                raise KernelError(job, what, result["error"], place=place, hint=hint or None)
            raise ToolError(f"{what}: {result['error']}", place=place, hint=hint or None)
        return result


@contextlib.contextmanager
def compiler(package_dir: Path, toolchain: Toolchain) -> Iterator[Compiler]:
    """One worker, which ends with the block."""
    with (
        tempfile.TemporaryDirectory(prefix="mlagen-compile-") as folder,
        contextlib.closing(Compiler(package_dir, Path(folder) / "0", toolchain)) as worker,
    ):
        yield worker


def ask_triton_key(toolchain: Toolchain) -> str:
    """The hash that stands for a Triton in the name of an archive of kernels.

    Raises:
        ToolError: the worker died or took too long.
    """
    with compiler(Path(), toolchain) as worker:
        return worker.triton_key()


def request_of(job: CompileJob) -> dict[str, Any]:
    """Return all inputs of a compilation except the source, as plain JSON values.

    Args:
        job: the compilation.

    Returns:
        The worker's job, see mlagen/compile/worker.py, without its output file.

    Raises:
        ToolError: mlagen knows no such target.
    """
    if job.target not in TARGETS:
        raise ToolError(f"{label(job)}: no such target", hint=f"targets: {', '.join(TARGETS)}")
    options: dict[str, Any] = {"num_warps": job.num_warps, "num_stages": job.num_stages, "enable_fp_fusion": True}
    if job.dependent:
        options["launch_pdl"] = True
    if job.registers is not None:
        options["maxnreg"] = job.registers
    return {
        "module": job.module,
        "kernel": job.kernel,
        "signature": [list(pair) for pair in job.signature],
        "constexprs": [list(pair) for pair in job.constexprs],
        "options": options,
        **_target_of(job.target),
    }


def job_of(target: str, description: dict[str, Any]) -> CompileJob:
    """The job of a variant that a worker described; `request_of` gives the description back."""
    options = description["options"]
    return CompileJob(
        module=description["module"],
        kernel=description["kernel"],
        target=target,
        signature=tuple((name, kind) for name, kind in description["signature"]),
        constexprs=tuple((name, value) for name, value in description["constexprs"]),
        num_warps=options["num_warps"],
        num_stages=options["num_stages"],
        dependent=options.get("launch_pdl", False),
        registers=options.get("maxnreg"),
    )


def _target_of(name: str) -> dict[str, Any]:
    target = TARGETS[name]
    return {"target": name, "backend": target.backend, "arch": target.arch, "warp_size": target.warp_size}


def _environment(kernels_dir: Path, toolchain: Toolchain) -> dict[str, str]:
    """The worker's environment: nothing that steers a compiler, no GPU, no bytecode left in the package."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_STEERING)}
    return kept | {
        "TRITON_CACHE_DIR": str(kernels_dir),
        "CUDA_VISIBLE_DEVICES": "",
        "HIP_VISIBLE_DEVICES": "",
        "PYTHONDONTWRITEBYTECODE": "1",
        **({"PYTHONPATH": str(toolchain.folder)} if toolchain.folder else {}),
    }
