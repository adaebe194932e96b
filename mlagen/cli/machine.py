"""The GPUs of this machine, by their drivers' own tools: torch need not be imported to know them."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

KFD = Path("/sys/class/kfd/kfd/topology/nodes")  # where ROCm's driver lists its devices
SECONDS = 10  # that a driver's tool may take


def gpus_of_machine() -> list[str]:
    """The architectures of this machine's GPUs, such as sm90 or gfx942, each once; none found: empty."""
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
        if version is not None and int(version[1]):  # 0 of a CPU; 90402 is gfx942
            major, minor, step = int(version[1]) // 10000, int(version[1]) // 100 % 100, int(version[1]) % 100
            found.append(f"gfx{major}{minor:x}{step:x}")
    return found
