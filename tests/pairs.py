"""Two caches of any named layouts in one kernel: every ordered pair of them, at the dims of every model."""

from __future__ import annotations

from pathlib import Path

from attention_specs import attention_of

from mlagen.spec import Spec
from mlagen.spec.stored import NAMED_LAYOUTS

ROOT = Path(__file__).parents[1]
Dims = tuple[int, int, int]  # kv_lora_rank, qk_rope_head_dim, v_head_dim
V32: Dims = (512, 64, 512)
V4: Dims = (448, 64, 512)
DIMS: tuple[Dims, ...] = (V32, V4, (512, 0, 512), (256, 32, 256))
SLACK = 1.45  # expected bytes of shared memory over those that a compiler took, at most


def make_pair(dims: Dims, first: str, second: str, targets: tuple[str, ...]) -> Spec:
    """The spec of sparse attention over a cache of the first layout and one of the second."""
    data = attention_of("dsv32")
    data["attention"] |= {"shared_indices": None, "window": 128}
    names = ("kv_lora_rank", "qk_rope_head_dim", "v_head_dim")
    data["model"] |= dict(zip(names, dims, strict=True)) | {"dtype": "fp16" if "fp16" in (first, second) else "bf16"}
    data |= {"cache": {"layout": first}, "extra_cache": {"layout": second}}
    data |= {"wrappers": ("flash_mla_with_kvcache",), "targets": targets}
    return Spec.model_validate(data)


def all_pairs(targets: tuple[str, ...]) -> dict[tuple[Dims, str, str], Spec]:
    """Every ordered pair at all dims that both layouts fit."""
    found = {}
    for dims in DIMS:
        for first in NAMED_LAYOUTS:
            for second in NAMED_LAYOUTS:
                try:
                    found[dims, first, second] = make_pair(dims, first, second, targets)
                except ValueError:
                    continue  # a layout that these dims, or this dtype, cannot have
    return found
