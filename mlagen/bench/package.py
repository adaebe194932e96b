"""A generated package as the bench sees it: its spec, and calls of its wrappers."""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from mlagen.bench.shapes import Inputs
from mlagen.compile.worker import JobError, load_module
from mlagen.errors import UsageError
from mlagen.verify.facts import Facts

WRAPPERS = ("triton_mla_sparse_attention", "flash_mla_sparse_fwd")  # the one that gives out alone first
_HEADER = re.compile(r"\A(# .*\n)+")
_TILE_TABLE = re.compile(r"^TILES = \{\n.*?^\}\n", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class BenchPackage:
    """A generated package, imported.

    Attributes:
        name: of the package.
        module: its sparse_attention.
        facts: what its spec says.
        spec: SPEC, spec and hashes.
        kernels: hash of its attention kernels and their launch, whatever tiles its table holds.
    """

    name: str
    module: ModuleType
    facts: Facts
    spec: dict[str, Any]
    kernels: str

    @property
    def row_bytes(self) -> int:
        """Bytes of a cached token."""
        return int(self.spec["row_bytes"])

    def device_facts(self, device: torch.device) -> Any:
        """The device as the package's tile table knows it: target and multiprocessors."""
        return self.module._launch.device_facts(device)

    def call(self, inputs: Inputs, *, batch_invariant: bool = False) -> Callable[[], torch.Tensor]:
        """A call of the plainest wrapper there is; the wrapper allocates out and workspace each time."""
        attention = next(getattr(self.module, name) for name in WRAPPERS if hasattr(self.module, name))
        options: dict[str, Any] = {"enable_batch_invariant": batch_invariant}
        if inputs.attn_sink is not None:
            options["attn_sink"] = inputs.attn_sink
        if inputs.topk_length is not None:
            options["topk_length"] = inputs.topk_length

        def call() -> torch.Tensor:
            result = attention(inputs.q, inputs.kv, inputs.indices, inputs.sm_scale, **options)
            out = result[0] if isinstance(result, tuple) else result
            assert isinstance(out, torch.Tensor)
            return out

        return call


def load_package(package_dir: Path) -> BenchPackage:
    """Imports a generated package from its folder.

    Raises:
        UsageError: the folder holds no package with sparse attention.
    """
    if not (package_dir / "sparse_attention.py").is_file():
        raise UsageError(f"{package_dir} holds no generated sparse attention: sparse_attention.py is missing")
    package_dir = package_dir.resolve()
    try:
        module = load_module(package_dir, "sparse_attention")
    except JobError as error:
        raise UsageError(str(error)) from error
    spec = sys.modules[package_dir.name].SPEC
    return BenchPackage(package_dir.name, module, Facts.of(spec["spec"]), spec, kernels_hash(package_dir))


def kernels_hash(package_dir: Path) -> str:
    """Sixteen hex digits that stand for a package's attention kernels; a new tile table leaves them as they are."""
    texts = [(package_dir / name).read_text() for name in ("_launch.py", "sparse_attention.py")]
    bare = "".join(_TILE_TABLE.sub("", _HEADER.sub("", text)) for text in texts)
    return hashlib.sha256(bare.encode()).hexdigest()[:16]
