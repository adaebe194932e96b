"""A generated package as the bench sees it: its spec, its layouts and its wrappers."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from mlagen.diffs import check_whole
from mlagen.digest import SourceDigests, kernels_of
from mlagen.errors import UsageError
from mlagen.layout import CacheLayout, layouts_of
from mlagen.verify.call.facts import Facts

_HEADER = re.compile(r"\A(# .*\n)+")


@dataclass(frozen=True)
class BenchPackage:
    """A generated package, imported.

    Attributes:
        folder: where it lies.
        root: the package.
        facts: the facts of its spec.
        spec: the validated spec, `SPEC["spec"]`.
    """

    folder: Path
    root: ModuleType
    facts: Facts
    spec: dict[str, Any]

    @property
    def name(self) -> str:
        """Name of the package."""
        return self.folder.name

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of q, of rows that are not quantised and of the output."""
        dtype = getattr(torch, self.facts.dtype)
        assert isinstance(dtype, torch.dtype)
        return dtype

    @property
    def row_bytes(self) -> int:
        """Bytes of a KV row as the model computes it."""
        return self.facts.d_qk * self.dtype.itemsize

    @cached_property
    def layouts(self) -> tuple[CacheLayout | None, CacheLayout | None]:
        """The layouts of the cache and of the second cache; None for one that it lacks."""
        return layouts_of(self.spec)

    @property
    def attention_spec(self) -> dict[str, Any]:
        """The spec's `attention`; empty without it."""
        attention = self.spec["attention"] or {}
        assert isinstance(attention, dict)
        return attention

    @property
    def cached(self) -> tuple[CacheLayout, CacheLayout | None]:
        """The same of a package that has a cache.

        Raises:
            UsageError: its fields lie in several tensors.
        """
        main, extra = self.layouts
        assert main is not None
        if main.tensors:
            raise UsageError(f"{self.name}: got a cache with {' and '.join(main.tensors)}; benchmarks take one tensor")
        return main, extra

    def has(self, wrapper: str) -> bool:
        """Whether the spec lists a wrapper."""
        return wrapper in self.facts.wrappers

    def wrapper(self, name: str) -> Callable[..., Any]:
        """A wrapper of the package, or of one of its modules: `extra_cache.concat_and_cache_mla`.

        Raises:
            UsageError: it has none of that name.
        """
        found: Any = self.root
        for part in name.split("."):
            found = getattr(found, part, None)
        if not callable(found):
            raise UsageError(f"{self.name} has no {name}")
        return found  # type: ignore[no-any-return]

    def module(self, name: str) -> Any:
        """One of its modules."""
        return importlib.import_module(f"{self.root.__name__}.{name}")

    def device_facts(self, device: torch.device) -> Any:
        """The device as the package's tile tables know it: target and multiprocessors."""
        return self.module("_launch").device_facts(device)


def load_package(package_dir: Path) -> BenchPackage:
    """Imports a generated package from its folder, without a search path.

    Raises:
        UsageError: the folder holds no generated package, or one of its name from elsewhere is already imported.
    """
    check_whole(package_dir)
    folder = package_dir.resolve()
    root = sys.modules.get(folder.name)
    if root is None:
        init = folder / "__init__.py"
        spec = importlib.util.spec_from_file_location(folder.name, init, submodule_search_locations=[str(folder)])
        if spec is None or spec.loader is None or not init.is_file():
            raise UsageError(f"{package_dir} holds no generated package: it has no __init__.py")
        root = sys.modules[folder.name] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(root)
        except BaseException:
            del sys.modules[folder.name]
            raise
    if list(getattr(root, "__path__", [])) != [str(folder)]:
        raise UsageError(f"{package_dir}: another module named {folder.name} is already imported")
    if not hasattr(root, "SPEC"):
        raise UsageError(f"{package_dir} holds no generated package: it has no SPEC")
    return BenchPackage(folder, root, Facts.of(root.SPEC["spec"]), root.SPEC["spec"])


def kernels_digest(package_dir: Path, modules: Iterable[str]) -> str:
    """Sixteen hex digits that stand for the kernels some modules of a package launch, the same under every Python.

    Comments, docstrings, wrappers and tables do not count.
    """
    queue, seen, digests = [*modules], set[str](), SourceDigests(package_dir)
    kernels = {}
    while queue:
        path = package_dir / f"{(name := queue.pop())}.py"
        if name in seen or not path.is_file():
            continue
        seen.add(name)
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.level == 1:
                queue += [node.module] if node.module else [alias.name for alias in node.names]
        for function in kernels_of(tree):
            kernels[name, function.name] = digests.digest(name, function.name)
    return hashlib.sha256(repr(sorted(kernels.items())).encode()).hexdigest()[:16]


def kernels_hash(package_dir: Path) -> str:
    """Sixteen hex digits that stand for the package's kernels; new tables or wrappers leave them as they are."""
    modules = sorted(path for path in package_dir.glob("_[a-z]*.py") if path.name != "_tiles.py")
    return hashlib.sha256("".join(_HEADER.sub("", path.read_text()) for path in modules).encode()).hexdigest()[:16]
