"""The GPUs of this machine, as the drivers report them. Does not import torch."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

KFD = Path("/sys/class/kfd/kfd/topology/nodes")  # list of devices of the ROCm driver
SECONDS = 10  # limit for a call of the driver's tool


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
