"""GPUs by name: which target's kernels each runs, and what to name in a spec for it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Literal, get_args

Target = Literal["sm80", "sm86", "sm89", "sm90", "sm100", "sm120", "gfx942", "gfx950"]
TARGETS: tuple[str, ...] = get_args(Target)

_CUDA = re.compile(r"(?:sm|compute)[_-]?(\d+)\.?(\d)[af]?")  # others' spellings too: sm_103a, compute_103, sm10.3
_FAMILIES = {"sm110": "Thor", "sm75": "Turing", "sm70": "Volta"}  # that no target is for
_ROCM = re.compile(r"gfx[0-9a-f]+")


def runs(gpu: str, targets: Iterable[str]) -> str | None:
    """The target of `targets` whose kernels a GPU runs; None where there is none.

    A CUDA device runs the newest target of its own major compute capability that is not newer than itself, a ROCm
    device that of its own name alone; a generated package's `supports` says the same.
    """
    cuda = _CUDA.fullmatch(gpu)
    fits = [f"sm{cuda[1]}{minor}" for minor in range(int(cuda[2]), -1, -1)] if cuda else [gpu]
    known = set(targets)
    return next((target for target in fits if target in known), None)


def instead(gpu: str) -> str | None:
    """What to name in a spec instead of a GPU that is no target; None for a target, and for what is no GPU's name."""
    gpu = gpu.strip().lower()
    cuda = _CUDA.fullmatch(gpu)
    if cuda is None and _ROCM.fullmatch(gpu) is None:
        return None
    name = f"sm{cuda[1]}{cuda[2]}" if cuda else gpu
    target = runs(name, TARGETS)
    if target is not None:
        return None if target == name else f"{name} runs {target}'s portable kernels; name {target}"
    called = f" ({_FAMILIES[name]})" if name in _FAMILIES else ""
    none = f": none is of compute capability {cuda[1]}.{cuda[2]} or an earlier {cuda[1]}.x" if cuda else ""
    return f"{name}{called} runs no target's kernels{none}"
