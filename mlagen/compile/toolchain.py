"""The Tritons that compile: the installed one, and others in their own folders in the user's cache."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from mlagen.compile.folder import default_cache_dir
from mlagen.errors import ToolError, UsageError
from mlagen.plan.tritons import TRITONS, minor, minor_text


@dataclass(frozen=True)
class Toolchain:
    """A Triton that compiles.

    Attributes:
        version: version, `3.8.0`. If it is not the installed one and has no folder, it lists a package's variants under
            that version and compiles none.
        folder: folder for a worker's search path; None for the installed Triton.
    """

    version: str
    folder: Path | None = None

    def tool(self, name: str) -> Path:
        """The path of one of NVIDIA's tools that Triton brings, such as `cuobjdump`.

        Raises:
            ToolError: the installed Triton is gone.
        """
        root = self.folder and self.folder / "triton"
        if root is None:
            # find_spec, since the parent process does not need an import of Triton.
            spec = importlib.util.find_spec("triton")
            if spec is None or spec.origin is None:
                raise ToolError("triton is not installed", hint=f"fix with: pip install triton=={TRITONS[-1]}")
            root = Path(spec.origin).parent
        return root / "backends" / "nvidia" / "bin" / name


def installed() -> Toolchain:
    """The installed Triton.

    Raises:
        ToolError: there is none.
    """
    try:
        return Toolchain(importlib.metadata.version("triton"))
    except importlib.metadata.PackageNotFoundError:
        # A build for ROCm goes by another name.
        try:
            import triton
        except ImportError:
            raise ToolError("triton is not installed", hint=f"fix with: pip install triton=={TRITONS[-1]}") from None
        return Toolchain(str(triton.__version__))


def tritons_dir() -> Path:
    """Return the folder of further Tritons, each in a folder named after its version."""
    return default_cache_dir() / "triton"


def cached_tritons() -> tuple[str, ...]:
    """The versions of Triton that lie there, oldest first."""
    found = (path.parent.parent.name for path in tritons_dir().glob("*/triton/__init__.py"))
    return tuple(sorted(found, key=minor))


def parse_tritons(text: str | None) -> tuple[str, ...]:
    """The versions that a `--triton` option names, in the order of TRITONS.

    Args:
        text: minor or whole versions with commas between, `3.6,3.8.0`; `all`; None: the installed one.

    Raises:
        UsageError: one of them is not among TRITONS.
    """
    if text is None:
        return (installed().version,)
    if text == "all":
        return TRITONS
    chosen = set()
    for word in (part.strip() for part in text.split(",")):
        found = [version for version in TRITONS if word in (version, minor_text(minor(version)))]
        if not found:
            takes = ", ".join(minor_text(minor(version)) for version in TRITONS)
            raise UsageError(f"--triton: got {word!r}; takes {takes}, with commas between, or all")
        chosen.update(found)
    return tuple(version for version in TRITONS if version in chosen)


def toolchain(version: str, on_fetch: Callable[[], None] = lambda: None) -> Toolchain:
    """Return a Triton of that version. If the cache lacks it, pip fetches it there.

    Args:
        version: the version.
        on_fetch: called before a fetch.

    Raises:
        ToolError: pip could not fetch it.
    """
    here = installed()
    if here.version == version:
        return here
    folder = tritons_dir() / version
    if not (folder / "triton" / "__init__.py").is_file():
        on_fetch()
        _fetch(version, folder)
    return Toolchain(version, folder)


def _fetch(version: str, folder: Path) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Made next to its place and then moved, so that an interrupted fetch leaves nothing behind.
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{version}.") as temporary:
        made = Path(temporary) / "made"
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
        command += ["--target", str(made), f"triton=={version}"]
        done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
        if done.returncode:
            raise ToolError(f"triton {version} could not be fetched into {folder}", hint=done.stderr.strip()[-2000:])
        if folder.exists():
            shutil.rmtree(folder)
        made.rename(folder)
