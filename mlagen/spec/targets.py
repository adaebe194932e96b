"""Targets of GPUs: the target that a GPU runs, and the target to name in a spec."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Literal, get_args

Target = Literal["sm80", "sm86", "sm89", "sm90", "sm100", "sm120", "gfx942", "gfx950"]
TARGETS: tuple[str, ...] = get_args(Target)

_CUDA = re.compile(r"(?:sm|compute)[_-]?(\d+)\.?(\d)[af]?")  # also sm_103a, compute_103, sm10.3
_FAMILIES = {"sm110": "Thor", "sm75": "Turing", "sm70": "Volta"}  # without a target
_ROCM = re.compile(r"gfx[0-9a-f]+")


def runs(gpu: str, targets: Iterable[str]) -> str | None:
    """Return the target among `targets` that a GPU runs, or None.

    A CUDA device runs the newest target of its major compute capability that is not newer than itself. A ROCm device
    runs only the target of its own name. A generated package's `supports` follows the same rule.
    """
    cuda = _CUDA.fullmatch(gpu)
    fits = [f"sm{cuda[1]}{minor}" for minor in range(int(cuda[2]), -1, -1)] if cuda else [gpu]
    known = set(targets)
    return next((target for target in fits if target in known), None)


def instead(gpu: str) -> str | None:
    """Return the advice for a GPU that is not a target itself; None for targets and for other text."""
    gpu = gpu.strip().lower()
    cuda = _CUDA.fullmatch(gpu)
    if cuda is None and _ROCM.fullmatch(gpu) is None:
        return None
    name = f"sm{cuda[1]}{cuda[2]}" if cuda else gpu
    target = runs(name, TARGETS)
    if target is not None:
        return None if target == name else f"{name} runs {target}'s portable kernels; name {target}"
    called = f" ({_FAMILIES[name]})" if name in _FAMILIES else ""
    none = f": no target has compute capability {cuda[1]}.{cuda[2]} or an earlier {cuda[1]}.x" if cuda else ""
    return f"{name}{called} runs no target's kernels{none}"
