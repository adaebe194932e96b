"""This machine: its GPUs, as the drivers report them, and the libraries that run kernels. Imports none of them."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import shlex
import subprocess
from pathlib import Path

from mlagen.errors import ToolError

KFD = Path("/sys/class/kfd/kfd/topology/nodes")  # list of devices of the ROCm driver
LIBRARIES = ("torch", "triton", "numpy")  # for compiling and running kernels; rendering needs none
SECONDS = 10  # limit for a call of the driver's tool


def require_libraries() -> None:
    """Check that the libraries for compiling and running kernels are installed.

    Raises:
        ToolError: one is missing.
    """
    missing = [name for name in LIBRARIES if importlib.util.find_spec(name) is None]
    if missing:
        raise ToolError(f"not installed: {', '.join(missing)}", hint=f"fix with: {pip_install(*missing)}")


def pip_install(*libraries: str) -> str:
    """Return the command that installs libraries in versions that mlagen accepts."""
    try:
        wanted = importlib.metadata.requires("mlagen") or []
    except importlib.metadata.PackageNotFoundError:  # a checkout that is only on the path
        wanted = []
    ranges = {re.match(r"[\w.-]+", each)[0]: each for each in wanted if ";" not in each}  # type: ignore[index]
    return shlex.join(["pip", "install", *(ranges.get(name, name) for name in libraries)])


def gpus_of_machine() -> list[str]:
    """Return the architectures of this machine's GPUs, for example sm90 or gfx942, each once."""
    return list(dict.fromkeys([*_cuda(), *_rocm(KFD)]))


def _cuda() -> list[str]:
    try:
        asked = subprocess.run(
            ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return []
    return [f"sm{major}{minor}" for major, minor in re.findall(r"(?m)^(\d+)\.(\d)$", asked.stdout)]


def _rocm(folder: Path) -> list[str]:
    found = []
    for properties in sorted(folder.glob("*/properties")):
        try:
            version = re.search(r"(?m)^gfx_target_version (\d+)$", properties.read_text())
        except OSError:
            continue
        if version is not None and int(version[1]):  # a CPU has 0; 90402 is gfx942
            major, minor, step = int(version[1]) // 10000, int(version[1]) // 100 % 100, int(version[1]) % 100
            found.append(f"gfx{major}{minor:x}{step:x}")
    return found
