"""Kernels compiled ahead: Triton's cache after a warm-up, in an archive that a package's warmup() loads."""

from __future__ import annotations

import io
import json
import tarfile
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from mlagen.compile.job import CompileJob
from mlagen.compile.pool import compile_jobs, list_variants
from mlagen.compile.process import ask_triton_key
from mlagen.compile.resources import Resources
from mlagen.compile.toolchain import Toolchain
from mlagen.emit.replace import write_atomically

KEPT = (".cubin", ".hsaco", ".json")  # files of an entry; Triton loads it without the stages before the machine code
GROUP = "__grp__"  # Triton's prefix of the file that names an entry's other files


def archive_name(target: str, version: str, triton_key: str) -> str:
    """Return the name of the archive for a target and a Triton. `_ahead.py` finds it by target and key."""
    return f"kernels-{target}-triton{version}-{triton_key}.tar.xz"


def write_kernels(
    package_dir: Path,
    target: str,
    into: Path,
    *,
    toolchain: Toolchain,
    on_list: Callable[[Sequence[CompileJob]], None] | None = None,
    on_start: Callable[[CompileJob], None] | None = None,
    on_done: Callable[[Resources], None] | None = None,
) -> Path:
    """Compile all that a call of a package can launch on a target, and write it as an archive; needs no GPU.

    Args:
        package_dir: folder of the generated package, with the text that will be imported where the archive is used.
        target: the target, which has to be the device's own compute capability.
        into: folder of the archive, made if it is not there.
        toolchain: the Triton that compiles. Its cache's keys hold a hash of its files: the archive serves the same
            release for the same Python version.
        on_list: called with the variants.
        on_start: called in a worker's thread with each as its compilation begins.
        on_done: called with each that is compiled.

    Returns:
        The archive's path.

    Raises:
        ToolError: a kernel does not compile.
    """
    jobs = list_variants(package_dir, [target], toolchain=toolchain)
    if on_list is not None:
        on_list(jobs)
    with tempfile.TemporaryDirectory(prefix="mlagen-kernels-") as temporary:
        cache = Path(temporary) / "cache"
        cache.mkdir()
        compile_jobs(package_dir, jobs, toolchain=toolchain, kernels_dir=cache, on_start=on_start, on_done=on_done)
        path = into / archive_name(target, toolchain.version, ask_triton_key(toolchain))
        partial = Path(temporary) / path.name
        _pack(cache, partial)
        write_atomically(path, partial.read_bytes())
    return path


def _pack(cache: Path, archive: Path) -> None:
    """Pack a cache of Triton's: each entry's binary and metadata, and its group with names in place of paths."""
    with tarfile.open(archive, "w:xz") as tar:
        for entry in sorted(cache.iterdir()):
            for group in sorted(entry.glob(f"{GROUP}*.json")):
                names = [name for name in json.loads(group.read_text())["child_paths"] if name.endswith(KEPT)]
                _add(tar, f"{entry.name}/{group.name}", json.dumps(names).encode())
                for name in names:
                    _add(tar, f"{entry.name}/{name}", (entry / name).read_bytes())


def _add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    # Nothing but name and bytes: the archive is the same wherever it is made.
    member = tarfile.TarInfo(name)
    member.size = len(data)
    tar.addfile(member, io.BytesIO(data))
