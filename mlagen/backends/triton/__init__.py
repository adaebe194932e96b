"""The portable Triton back end: one module here a family of kernels, in the order of the package's modules.

A family has MODULE, the generated module and template; WRAPPERS, the wrappers it holds; exports(wrappers),
context(plan) and jobs(plan).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from mlagen.backends.base import GeneratedFile
from mlagen.backends.triton import cache, sparse
from mlagen.backends.triton.common import common
from mlagen.plan import CompileJob, Plan, layout_fingerprint
from mlagen.spec import spec_digest

FAMILIES = (cache, sparse)


def _families(plan: Plan) -> Iterator[tuple[ModuleType, list[str]]]:
    """(family, names the package takes from its module) of the families whose wrappers the spec asks for."""
    for family in FAMILIES:
        wrappers = [name for name in family.WRAPPERS if name in plan.spec.wrappers]
        if wrappers:
            yield family, family.exports(wrappers)


def files(plan: Plan) -> list[GeneratedFile]:
    """The files of the package, in the order they are written: what is imported comes before what imports it."""
    families = list(_families(plan))
    spec = {
        "spec": plan.spec.model_dump(mode="json"),
        "spec_sha256": spec_digest(plan.spec),
        "layout": plan.layout.name,
        "layout_fingerprint": layout_fingerprint(plan.layout),
        "row_bytes": plan.layout.row_bytes,
    }
    modules = [(family.MODULE, names) for family, names in families]
    exported = sorted(["SPEC", "warmup", *(name for _, names in modules for name in names)])
    package = {**common(plan), "modules": modules, "exported": exported, "spec_literal": _literal(spec)}
    return [
        GeneratedFile("_launch.py", "_launch.py.jinja", common(plan)),
        *(
            GeneratedFile(f"{family.MODULE}.py", f"{family.MODULE}.py.jinja", family.context(plan))
            for family, _ in families
        ),
        GeneratedFile("__init__.py", "__init__.py.jinja", package),
    ]


def _literal(value: Any, indent: int = 0) -> str:
    """A Python literal in the house's format: one line where it fits, else one entry a line with a trailing comma."""
    if isinstance(value, dict):
        entries = [f"{json.dumps(key)}: {_literal(item, indent + 4)}" for key, item in value.items()]
        brackets = "{}"
    elif isinstance(value, list):
        entries = [_literal(item, indent + 4) for item in value]
        brackets = "[]"
    else:
        return json.dumps(value) if isinstance(value, str) else repr(value)
    inner = "".join(f"{' ' * (indent + 4)}{entry},\n" for entry in entries)
    return f"{brackets[0]}\n{inner}{' ' * indent}{brackets[1]}" if entries else brackets


def compile_jobs(plan: Plan) -> list[CompileJob]:
    """Every kernel of the package for every target, tile and alignment, with all optional tensors given."""
    return [job for family, _ in _families(plan) for job in family.jobs(plan)]
