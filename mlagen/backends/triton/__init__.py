"""The portable Triton back end: one module here a family of kernels, in the order of the package's modules.

A family has MODULE, the generated module and template; WRAPPERS, the wrappers it holds; exports(wrappers) and
context(plan). What several families import is a module too, which each of them names in SHARED: it has MODULE and
context(plan). Either may have TEMPLATE, where that is not named like the module, and present(plan), where a package may
do without it; products(plan), where the plan knows how many matrix products its kernels have.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from mlagen import GENERATOR
from mlagen.backends.base import GeneratedFile
from mlagen.backends.triton import (
    cache,
    dense_decode,
    dense_fwd,
    extra_cache,
    indices,
    merge_states,
    sparse_decode,
    sparse_fwd,
)
from mlagen.backends.triton.common import common, imported, sm90_modules
from mlagen.plan import TARGETS, Plan
from mlagen.plan.cache import EARLY_PROGRAMS
from mlagen.plan.tritons import MINORS, TRITONS, minors
from mlagen.spec import spec_digest

# What the text that every package shares asks for.
LAUNCH = {
    "proven": (MINORS[0], MINORS[-1]),
    "early_programs": EARLY_PROGRAMS,
    "e4m3_targets": [name for name, target in TARGETS.items() if target.has_e4m3],
    "e4m3_rounding_targets": [name for name, target in TARGETS.items() if target.rounds_e4m3],
    "dependent_targets": [name for name, target in TARGETS.items() if target.dependent_launch],
}
INLINE_LENGTH = 70  # of a literal that shares its line with its key

FAMILIES = (cache, dense_decode, dense_fwd, extra_cache, indices, merge_states, sparse_decode, sparse_fwd)


def _families(plan: Plan) -> Iterator[tuple[ModuleType, list[str]]]:
    """(family, names the package takes from its module) of the families whose wrappers the spec asks for."""
    for family in FAMILIES:
        wrappers = [name for name in family.WRAPPERS if name in plan.spec.wrappers]
        if wrappers and _present(family, plan):
            yield family, family.exports(wrappers)


def _present(module: ModuleType, plan: Plan) -> bool:
    return not hasattr(module, "present") or bool(module.present(plan))


def _shared(plan: Plan) -> list[ModuleType]:
    """The modules that those families import, each once."""
    named = [module for family, _ in _families(plan) for module in getattr(family, "SHARED", ())]
    return [module for module in dict.fromkeys(named) if _present(module, plan)]


def files(plan: Plan) -> list[GeneratedFile]:
    """The files of the package, in the order they are written: what is imported comes before what imports it."""
    families = list(_families(plan))
    spec: dict[str, Any] = {
        "spec": plan.spec.model_dump(mode="json"),
        "spec_sha256": spec_digest(plan.spec),
        "generator": GENERATOR,
        "triton": list(minors(TRITONS)),
    }
    if plan.layout is not None:
        spec |= {
            "layout": plan.layout.name,
            "layout_fingerprint": plan.layout.fingerprint,
            "row_bytes": plan.layout.row_bytes,
        }
    if plan.extra_layout is not None:
        spec |= {
            "extra_layout": plan.extra_layout.name,
            "extra_layout_fingerprint": plan.extra_layout.fingerprint,
            "extra_row_bytes": plan.extra_layout.row_bytes,
        }
    modules = [(family.MODULE, names) for family, names in families]
    names = ["SPEC", "supports", "variants", "warmup"]
    exported = [*names, *(name for module, names in modules for name in names or [module])]
    package = {
        **common(plan),
        "title": plan.spec.title,
        "modules": modules,
        "imports": [
            (module, imported(module, sorted(names, key=_export_order)))
            for module, names in [("_launch", ["supports"]), *modules]
            if names
        ],
        "exported": sorted(exported, key=_export_order),
        "spec_literal": _literal(spec),
    }
    kernels = [module.MODULE for module in [*_shared(plan), *(family for family, _ in families)]]
    facts = {
        "targets": plan.spec.targets,
        "kernel_modules": ["_launch", *kernels],
        "sm90_modules_literal": _literal(sm90_modules(plan)),
    }
    return [
        GeneratedFile("_facts.py", "_facts.py.jinja", facts),
        GeneratedFile("_launch.py", "_launch.py.jinja", LAUNCH),
        *(
            GeneratedFile(
                f"{module.MODULE}.py", f"{getattr(module, 'TEMPLATE', module.MODULE)}.py.jinja", module.context(plan)
            )
            for module in [*_shared(plan), *(family for family, _ in families)]
        ),
        GeneratedFile("__init__.py", "__init__.py.jinja", package),
    ]


def _export_order(name: str) -> tuple[bool, bool, str]:
    """Constants before classes before functions, as the house sorts what a module exports."""
    return not name.isupper(), name[0].islower(), name


def _literal(value: Any, indent: int = 0) -> str:
    """A Python literal in the house's format: scalars side by side in one line, else one entry a line."""
    if not isinstance(value, dict | list):
        return json.dumps(value) if isinstance(value, str) else repr(value)
    brackets = "{}" if isinstance(value, dict) else "[]"
    items = list(value.values()) if isinstance(value, dict) else value
    keys = [f"{json.dumps(key)}: " for key in value] if isinstance(value, dict) else [""] * len(items)
    entries = [key + _literal(item, indent + 4) for key, item in zip(keys, items, strict=True)]
    line = brackets[0] + ", ".join(entries) + brackets[1]
    if len(line) <= INLINE_LENGTH and not any(isinstance(item, dict | list) and item for item in items):
        return line
    inner = "".join(f"{' ' * (indent + 4)}{entry},\n" for entry in entries)
    return f"{brackets[0]}\n{inner}{' ' * indent}{brackets[1]}" if entries else brackets


def expected_products(plan: Plan) -> dict[tuple[str, int | None], int]:
    """Warpgroup products (wgmma) that the plan expects in a kernel's code, by kernel and BLOCK_H (None without one).

    A kernel that is not named is not judged.
    """
    found: dict[tuple[str, int | None], int] = {}
    for module in _shared(plan):
        if hasattr(module, "products"):
            found |= module.products(plan)
    return found
