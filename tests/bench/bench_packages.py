"""Packages without kernels: their wrappers are functions that a test writes, in plain torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import yaml

from mlagen.bench.package import BenchPackage
from mlagen.spec import Spec, load
from mlagen.verify.facts import Facts

MakePackage = Callable[..., BenchPackage]


def spec_in(
    folder: Path,
    wrappers: Iterable[str],
    layout: object = "bf16",
    extra: object = None,
    dims: tuple[int, int, int] = (512, 64, 512),
    **attention: object,
) -> Spec:
    """A spec of 64 heads over pages of 64 tokens that lists the wrappers."""
    d_c, d_rope, d_v = dims
    model = {"num_heads": 64, "kv_lora_rank": d_c, "qk_rope_head_dim": d_rope, "v_head_dim": d_v, "dtype": "bf16"}
    text = {
        "name": "made",
        "title": "Made",
        "model": model,
        "attention": {"kind": "sparse", "topk": 128, **attention},
        "cache": {"layout": layout, "block_size": 64},
        **({"extra_cache": {"layout": extra, "block_size": 16}} if extra else {}),
        "wrappers": list(wrappers),
        "targets": ["sm90"],
    }
    path = folder / "made.yaml"
    path.write_text(yaml.safe_dump(text))
    return load(path)


def package_in(folder: Path, wrappers: dict[str, Callable[..., Any]], *options: Any, **attention: Any) -> BenchPackage:
    """A package of such a spec."""
    spec = spec_in(folder, wrappers, *options, **attention).model_dump(mode="json")
    root = ModuleType("made")
    vars(root).update(wrappers, SPEC={"spec": spec})
    return BenchPackage(folder / "made", root, Facts.of(spec), spec)
