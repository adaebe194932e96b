"""GPUs by the names that people know them by, as the targets whose kernels they run."""

from __future__ import annotations

import re
from typing import get_args

from mlagen.errors import UsageError
from mlagen.spec.targets import Target, instead

TARGETS: tuple[str, ...] = get_args(Target)
GPUS: dict[str, tuple[str, ...]] = {
    "sm80": ("a100", "a800", "a30"),
    "sm86": ("a10", "a16", "a40", "rtx-a6000", "rtx-3090"),
    "sm89": ("l4", "l40", "l40s", "rtx-4090", "rtx-6000-ada"),
    "sm90": ("h100", "h200", "h20", "h800", "gh200"),
    "sm100": ("b200", "b100", "gb200", "b300", "gb300"),
    "sm120": ("rtx-pro-6000", "rtx-5090", "gb10"),
    "gfx942": ("mi300x", "mi300a", "mi325x"),
    "gfx950": ("mi350x", "mi355x"),
}
_BY_NAME = {name: target for target, names in GPUS.items() for name in names}


def target_of(gpu: str) -> str:
    """The target whose kernels a GPU runs.

    Args:
        gpu: a GPU's name, such as `h100` or `RTX PRO 6000`, or an architecture's, such as `sm90` or `sm103`. A CUDA
            device runs the newest target of its own major compute capability that is not newer than itself.

    Raises:
        UsageError: no target is for such a GPU.
    """
    name = re.sub(r"[ _]+", "-", gpu.strip().lower())
    if name in TARGETS:
        return name
    if name in _BY_NAME:
        return _BY_NAME[name]
    found = re.fullmatch(r"sm-?([0-9]{1,2})([0-9])a?", name)
    if found is not None:
        older = [target for target in TARGETS if re.fullmatch(rf"sm{found[1]}[0-9]", target) and target[-1] <= found[2]]
        if older:
            return max(older)
    known = ", ".join(names[0] for names in GPUS.values())
    other = instead(name)
    why = f"; {other}" if other else ""
    raise UsageError(f"--gpu: got {gpu!r}; takes a GPU such as {known}, or a target: {', '.join(TARGETS)}{why}")
