"""Names of GPUs, as people type them and drivers print them, with the target of each."""

from __future__ import annotations

import difflib
import re
from typing import get_args

from mlagen.errors import UsageError
from mlagen.spec.targets import Target, instead, runs

ALL = "all"  # every target
TARGETS: tuple[str, ...] = get_args(Target)
# Words that nvidia-smi and rocm-smi print around these names are ignored, and so are spaces and dashes.
GPUS: dict[str, tuple[str, ...]] = {
    "sm80": ("a100", "a800", "a30", "a100x"),
    "sm86": (
        *("a10", "a10g", "a2", "a16", "a40", "a2000", "a4000", "a4500", "a5000", "a5500", "rtx-a6000"),
        *("rtx-3050", "rtx-3060", "rtx-3070", "rtx-3080", "rtx-3090", "orin"),
    ),
    "sm89": (
        *("l4", "l40", "l40s", "l40g", "l20", "l2"),
        *("rtx-4060", "rtx-4070", "rtx-4080", "rtx-4090", "rtx-4000-ada", "rtx-5000-ada", "rtx-6000-ada"),
    ),
    "sm90": ("h100", "h200", "h20", "h20-3e", "h800", "gh200"),
    "sm100": ("b200", "b100", "gb200", "b300", "gb300"),
    "sm120": ("rtx-pro-6000", "rtx-pro-5000", "rtx-5060", "rtx-5070", "rtx-5080", "rtx-5090", "gb10", "dgx-spark"),
    "gfx942": ("mi300x", "mi300a", "mi308x", "mi325x"),
    "gfx950": ("mi350x", "mi355x"),
}
# GPUs that run no target's kernels, by architecture.
OTHERS: dict[str, tuple[str, ...]] = {
    "sm60": ("p100",),
    "sm70": ("v100",),
    "sm75": ("t4", "quadro-rtx-6000", "quadro-rtx-8000", "rtx-2080", "titan-rtx"),
    "sm110": ("thor",),
    "gfx908": ("mi100",),
    "gfx90a": ("mi210", "mi250", "mi250x"),
    "gfx1100": ("rx-7900",),
    "gfx1201": ("rx-9070",),
}
# Words around a GPU's own name: maker, series, memory, form factor.
_NOISE = re.compile(
    r"nvidia|geforce|tesla|amd|instinct|radeon|jetson|agx|dgx|hgx|igx|gpu|laptop|mobile|max|q|blackwell|workstation|server|"
    r"edition|generation|superchip|hbm\d?e?|pcie|sxm\d?|nvl\d*|oam|mig|\d+g|\d+gb|ti|super|d|xtx?"
)


def _key(gpu: str) -> str:
    """Return a GPU's name without the words around it."""
    words = [word for word in re.split(r"[^a-z0-9]+", gpu.strip().lower()) if word]
    own = [word for word in words if not _NOISE.fullmatch(word)]
    return re.sub(r"^(?:quadro)?(?:rtx|rx)(?=.)|(?:ti|super|d)+$", "", "".join(own)) if own else ""


_BY_KEY = {_key(name): target for target, names in GPUS.items() for name in names}
_OTHER_BY_KEY = {_key(name): arch for arch, names in OTHERS.items() for name in names if not name.startswith("quadro")}


def name_instead(gpu: str) -> str | None:
    """Return the advice for the name of a GPU or of an architecture where a target is expected.

    None for a target, and for text that names neither.
    """
    architecture = instead(gpu)
    if architecture is not None or gpu in TARGETS:
        return architecture
    target = _named(gpu)
    if target is not None:
        return f"{gpu} runs {target}'s kernels; name {target}"
    other = _OTHER_BY_KEY.get(_key(gpu))
    return instead(other) if other is not None else None


def _named(gpu: str) -> str | None:
    """Return the target of a GPU's own name, or None."""
    key = _key(gpu)
    return _BY_KEY.get(key) or _BY_KEY.get(f"{key}x")  # MI325 of MI325X


def target_of(gpu: str) -> str:
    """Return the target that a GPU runs.

    Args:
        gpu: name of a GPU, for example `h100`, `rtx4090` or `NVIDIA H100 80GB HBM3`, or of an architecture, for example
            `sm90` or `sm103`. A CUDA device runs the newest target of its major compute capability that is not newer
            than itself.

    Raises:
        UsageError: no target runs on this GPU.
    """
    name = re.sub(r"[ _-]+", "", gpu.strip().lower())
    found = runs(name.removesuffix("a") if name.startswith("sm") else name, TARGETS)
    if found is None and not name.startswith(("sm", "gfx")):
        found = _named(gpu)
        if found is None:
            name = _OTHER_BY_KEY.get(_key(gpu), name)
    if found is not None:
        return found
    known = ", ".join(names[0] for names in GPUS.values())
    every = {_key(one): one for names in GPUS.values() for one in names}
    close = difflib.get_close_matches(_key(gpu), every, n=3, cutoff=0.7)
    other = instead(name)
    why = f"; {other}" if other else f"; did you mean {' or '.join(every[one] for one in close)}?" if close else ""
    raise UsageError(f"--gpu: got {gpu!r}; takes a GPU, for example {known}, or a target: {', '.join(TARGETS)}{why}")
