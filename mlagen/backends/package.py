"""The files of a package.

A family's folder has a module `portable`, and a module `sm90` if it has sm90 kernels:

- `portable.private_files(plan, family)` returns the files that its modules import, `portable.modules(plan, family)` its
  public modules.
- `sm90.KERNELS` lists the modules of its sm90 kernels.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from mlagen import GENERATOR
from mlagen.backends.parts import ops, signatures
from mlagen.backends.parts.base import GeneratedFile, Module, copied, generated
from mlagen.backends.parts.common import LINE_LENGTH, imported, kernels_of, sm90_modules, tuple_text
from mlagen.backends.parts.gluon import Sm90Kernels
from mlagen.plan import TARGETS, Family, Plan
from mlagen.plan.families.cache import PDL_MAX_PROGRAMS
from mlagen.plan.family import PORTABLE
from mlagen.plan.tritons import TRITONS, minors
from mlagen.spec import spec_digest

RUNTIME = ("_internals", "_launch", "_ahead", "_notes", "_calls")  # modules that every package copies
INLINE_LENGTH = 70  # columns of a literal on the line of its key


@dataclass(frozen=True)
class Facts:
    """Context of the template of `_facts.py`. The facts with defaults are equal in all packages.

    Attributes:
        targets: the spec's targets.
        wrappers_literal, sm90_modules_literal: wrappers, and modules of sm90 kernels, as text of lists.
        kernel_modules: modules with kernels.
        kernels: names of the kernels that calls can run.
        pdl_max_programs: most programs per multiprocessor of a kernel that overlaps with the kernel before.
        e4m3_targets, e4m3_rounding_targets, pdl_targets: targets that convert e4m3, round to it, and overlap launches.
    """

    targets: Sequence[str]
    wrappers_literal: str
    kernel_modules: Sequence[str]
    sm90_modules_literal: str
    kernels: Sequence[str]
    pdl_max_programs: int = PDL_MAX_PROGRAMS
    e4m3_targets: Sequence[str] = tuple(name for name, target in TARGETS.items() if target.has_e4m3)
    e4m3_rounding_targets: Sequence[str] = tuple(name for name, target in TARGETS.items() if target.rounds_e4m3)
    pdl_targets: Sequence[str] = tuple(name for name, target in TARGETS.items() if target.pdl)


@dataclass(frozen=True)
class Init:
    """Context of the template of `__init__.py`.

    Attributes:
        title: the spec's title.
        modules_tuple: the public modules, as text of a tuple.
        submodules: modules that it imports, as text.
        imports: modules and the names that it imports from each, as text.
        exported: names that it exports.
        spec_literal: SPEC, as text.
    """

    title: str
    modules_tuple: str
    submodules: str
    imports: Sequence[tuple[str, str]]
    exported: Sequence[str]
    spec_literal: str


@cache
def _portable(family: str) -> ModuleType:
    """Return the module of a family's portable kernels."""
    return import_module(f"{__package__}.{family}.portable")


@cache
def _sm90(family: str) -> tuple[Sm90Kernels, ...]:
    """Return the modules of a family's sm90 kernels."""
    name = f"{__package__}.{family}.sm90"
    found: tuple[Sm90Kernels, ...] = import_module(name).KERNELS if find_spec(name) else ()
    return found


def _present(plan: Plan, family: Family) -> list[Sm90Kernels]:
    """Return the modules of a family's sm90 kernels that the package has."""
    return [kernels for kernels in _sm90(family.NAME) if kernels.present(plan)]


def _imported(plan: Plan, family: Family) -> list[GeneratedFile]:
    """Return all files that a family's modules import."""
    kernels = [generated(one.module, one.context(plan), one.template) for one in _present(plan, family)]
    return [*_portable(family.NAME).private_files(plan, family), *kernels]


def files(plan: Plan, tritons: Sequence[str] = TRITONS) -> list[GeneratedFile]:
    """Return the files of the package. Imported files come before their importers.

    Args:
        plan: the plan.
        tritons: the versions under which all kernels of the package are known to compile within their limits.
    """
    private = {file.name: file for family in plan.families for file in _imported(plan, family)}
    modules: list[Module] = [
        module for family in plan.families for module in _portable(family.NAME).modules(plan, family)
    ]
    modules.sort(key=lambda module: module.file.name)
    kernels = [*private.values(), *(module.file for module in modules)]
    facts = Facts(
        targets=plan.spec.targets,
        wrappers_literal=_literal(list(plan.spec.wrappers)),
        kernel_modules=["_launch", *(file.module for file in kernels)],
        sm90_modules_literal=_literal(sm90_modules(plan)),
        kernels=[PORTABLE, *(name for name in kernels_of(plan.families) if name != PORTABLE)],
    )
    registered = [ops.file(plan, modules)] if plan.ops else []
    first = [generated("_facts", vars(facts)), *map(copied, RUNTIME)]
    init = generated("__init__", vars(_init(plan, modules, tritons)))
    return [*first, *kernels, *signatures.files(plan), *registered, init]


def _init(plan: Plan, modules: list[Module], tritons: Sequence[str]) -> Init:
    """Context of the template of `__init__.py`."""
    exports = [(module.file.module, list(module.exports)) for module in modules]
    names = ["SPEC", "supports", "variants", "warmup"]
    operators = [ops.MODULE] if plan.ops else []
    exported = [*names, *operators, *(name for module, taken in exports for name in taken or [module])]
    return Init(
        title=plan.spec.title,
        modules_tuple=_tuple([module for module, _ in exports], "    modules = "),
        submodules=imported("", sorted(["_ahead", "_launch", *operators, *(module for module, _ in exports)])),
        imports=[
            (module, imported(module, sorted(taken, key=_export_order)))
            for module, taken in [("_launch", ["supports"]), *exports]
            if taken
        ],
        exported=sorted(exported, key=_export_order),
        spec_literal=_literal(_spec(plan, tritons)),
    )


def _spec(plan: Plan, tritons: Sequence[str]) -> dict[str, Any]:
    """Return the package's SPEC."""
    spec: dict[str, Any] = {
        "spec": plan.spec.model_dump(mode="json"),
        "spec_sha256": spec_digest(plan.spec),
        "generator": GENERATOR,
        "triton": list(minors(tritons)),
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
    if plan.indexer_rows is not None:
        layout = plan.indexer_rows.layout
        spec |= {
            "indexer_layout": layout.name,
            "indexer_layout_fingerprint": layout.fingerprint,
            "indexer_row_bytes": layout.row_bytes,
        }
    return spec


def _export_order(name: str) -> tuple[bool, bool, str]:
    """Sort key of exports: constants, then classes, then functions."""
    return not name.isupper(), name[0].islower(), name


def _tuple(names: Sequence[str], before: str) -> str:
    """Format a tuple of names behind the text `before`: one per line if they do not fit one line."""
    line = tuple_text(names)
    if len(before) + len(line) <= LINE_LENGTH:
        return line
    indent = len(before) - len(before.lstrip())
    return "(\n" + "".join(f"{' ' * (indent + 4)}{name},\n" for name in names) + f"{' ' * indent})"


def _literal(value: Any, indent: int = 0) -> str:
    """Format a Python literal: scalars in one line, other values with an entry per line."""
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
    """Return the number of wgmma instructions expected in a kernel's code, by kernel and BLOCK_H (None without one).

    Kernels that are not listed are not checked.
    """
    found: dict[tuple[str, int | None], int] = {}
    for family in plan.families:
        for kernels in _present(plan, family):
            found |= kernels.products(plan)
    return found
