"""vLLM's side of a plugin, in as little code as it needs: names, signatures and who calls whom, of 0.26 or of 0.33.

Without vLLM the plugin runs over this; with it (MLAGEN_VLLM) the same probe runs over vLLM's own Python.
"""

from __future__ import annotations

import os
import sys
import types
from enum import Enum
from typing import Any, NamedTuple

import torch

OVERRIDES: dict[Any, str] = {}


class Capability(NamedTuple):
    major: int
    minor: int


class _Names(Enum):
    def is_overridden(self) -> bool:
        return self in OVERRIDES

    def get_path(self) -> str:
        return OVERRIDES.get(self, self.value)

    def get_class(self) -> type:
        class OnlySm90:
            @classmethod
            def supports_compute_capability(cls, capability: Capability) -> bool:
                return capability.major == 9

        if self.name == "FLASH_ATTN_MLA_SPARSE":
            raise ImportError("no such library here")
        return OnlySm90


class OldNames(_Names):
    FLASHMLA_SPARSE = "vllm.FlashMLASparse"
    FLASH_ATTN_MLA_SPARSE = "vllm.FlashAttnSparse"
    CUSTOM = None


class NewNames(_Names):
    FLASHMLA_SPARSE = "vllm.FlashMLASparse"
    FLASH_ATTN_MLA_SPARSE = "vllm.FlashAttnSparse"
    CUSTOM = None

    @classmethod
    def register(cls, name: str, value: str) -> NewNames:
        if name in cls._member_map_:
            raise ValueError(f"Backend {name} already exists")
        member = object.__new__(cls)
        member._name_, member._value_ = name, value
        cls._member_map_[name] = member
        return member


class Backend:
    supported_dtypes = (torch.float16, torch.bfloat16)
    supported_kv_cache_dtypes = ("auto",)
    is_sparse = classmethod(lambda cls: False)

    @classmethod
    def validate_configuration(cls, device_capability: Capability, **asked: Any) -> list[str]:
        checks = {
            "head_size": asked["head_size"] in cls.get_supported_head_sizes(),  # type: ignore[attr-defined]
            "dtype": asked["dtype"] in cls.supported_dtypes,
            "kv_cache_dtype": asked["kv_cache_dtype"] in cls.supported_kv_cache_dtypes,
            "MLA": asked["use_mla"] == cls.is_mla(),  # type: ignore[attr-defined]
            "sparse": asked["use_sparse"] == cls.is_sparse(),
            "compute capability": cls.supports_compute_capability(device_capability),  # type: ignore[attr-defined]
            "batch invariance": not asked["use_batch_invariant"] or cls.supports_batch_invariance(),  # type: ignore[attr-defined]
        }
        return [f"{name} not supported" for name, fits in checks.items() if not fits]


class CommonBackend(Backend):
    is_mla = classmethod(lambda cls: True)


class PrefillNames(_Names):
    FLASH_ATTN = "vllm.FlashAttnPrefill"
    CUSTOM = None


class PrefillBackend:
    supported_dtypes = (torch.float16, torch.bfloat16)

    def __init__(self, **options: Any) -> None:
        vars(self).update(options)

    @classmethod
    def validate_configuration(cls, device_capability: Capability | None, selector_config: Any) -> list[str]:
        checks = {
            "compute capability": cls.supports_compute_capability(device_capability),  # type: ignore[attr-defined]
            "dtype": selector_config.dtype in cls.supported_dtypes,
            "MLA dimensions": cls.supports_mla_dimensions(selector_config.mla_dimensions),  # type: ignore[attr-defined]
        }
        return [f"{name} not supported" for name, fits in checks.items() if not fits]

    def supports_quant_output(self, quant_key: Any) -> bool:
        return False

    def prepare_metadata(self, metadata: Any) -> None:
        self._prefill_metadata = metadata

    def run_prefill_context_chunk(self, chunk_idx: int, q: Any, k: Any, v: Any) -> Any:
        raise NotImplementedError


class NewPrefillBackend(PrefillBackend):
    """As 0.33 has it: a chunk tells its own requests, and a caller gives memory for the output."""

    def run_prefill_context_chunk(self, chunk: Any, q: Any, k: Any, v: Any, out: Any = None) -> Any:
        raise NotImplementedError


class Builder:
    def __init__(self, kv_cache_spec: Any, layer_names: Any, vllm_config: Any, device: torch.device) -> None:
        self.device = device
        self.reorder_batch_threshold = 1

    def _init_reorder_batch_threshold(
        self, threshold: int, supports_spec_as_decode: bool = False, supports_dcp_with_varlen: bool = False
    ) -> None:
        self.reorder_batch_threshold = threshold


class NewBuilder(Builder):
    """As 0.33 has it: a batch's metadata tell whether the tokens of a request see each other."""

    supports_non_causal_multi_token_decode = False


class Impl:
    dcp_world_size = 1
    need_to_return_lse_for_decode = False  # vLLM sets it where ranks share a context and the class can

    def __init__(self, num_heads: int, head_size: int, scale: float, **options: Any) -> None:
        self.num_heads, self.head_size, self.scale = num_heads, head_size, scale
        self.kv_lora_rank = options["kv_lora_rank"]
        self.topk_indices_buffer = options.get("topk_indices_buffer")


class NewImpl(Impl):
    """As 0.33 has it: indices are converted before a backend's own method is called."""

    def forward_mqa(self, q: Any, cache: torch.Tensor, metadata: Any, layer: Any) -> Any:
        tokens = (q[0] if isinstance(q, tuple) else q).shape[0]
        rows = cache.stride(0) // cache.stride(1)
        found = convert(metadata, self.topk_indices_buffer[:tokens], rows)
        options = {"layer": layer, "block_size": metadata.block_size, "is_decode": True}
        return self._forward_mqa_kernel(q, cache, *found, **options)  # type: ignore[attr-defined]

    def _forward_mqa_kernel(self, *arguments: Any, **options: Any) -> Any:
        raise NotImplementedError


def convert(metadata: Any, positions: torch.Tensor, page_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of the cache, and how many count, of positions in the request of each token."""
    pages = metadata.block_table[metadata.req_id_per_token[: len(positions)].long()].long()
    page = pages.gather(1, (positions.clamp(min=0) // metadata.block_size).long())
    rows = (page * page_rows + positions % metadata.block_size).int()
    return torch.where(positions < 0, 0, rows), (positions >= 0).sum(
        1
    ).int()  # behind the count a row that must not join


def _module(name: str, **contents: Any) -> None:
    sys.modules[name] = module = types.ModuleType(name)
    module.__path__ = []  # type: ignore[attr-defined]
    vars(module).update(contents)
    parent, _, child = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], child, module)


def _indexer() -> None:
    """Modules that score index keys by names of their own, and that pick by operators of torch's namespace."""

    def per_row(name: str) -> Any:
        return lambda *arguments: getattr(torch.ops._C, name)(*arguments)

    def deep_gemm(*arguments: Any, **options: Any) -> torch.Tensor:
        raise RuntimeError("no DeepGEMM here")

    names = ("top_k_per_row_prefill", "top_k_per_row_decode")
    _module("vllm._custom_ops", **{name: per_row(name) for name in names})
    logits = dict.fromkeys(("fp8_fp4_mqa_logits", "fp8_fp4_paged_mqa_logits"), deep_gemm)
    layer = {"has_deep_gemm": lambda: False, "ops": sys.modules["vllm._custom_ops"], **logits}
    layer |= {"has_cutedsl": lambda: False, "get_dcp_group": lambda: None, "_merge_dcp_topk_global": deep_gemm}
    _module("vllm.model_executor.layers.sparse_attn_indexer", **layer)
    metadata = {"has_deep_gemm": lambda: False, "get_paged_mqa_logits_metadata": deep_gemm}
    _module("vllm.v1.attention.backends.mla.indexer", **metadata)


def _prefill(base: type) -> None:
    """Modules of the MLA prefill backends."""
    _module("vllm.v1.attention.backends.mla.prefill")
    _module("vllm.v1.attention.backends.mla.prefill.base", MLAPrefillBackend=base)
    parts = {
        "MLAPrefillBackendEnum": PrefillNames,
        "register_mla_prefill_backend": lambda member, path: OVERRIDES.update({member: path}),
    }
    _module("vllm.v1.attention.backends.mla.prefill.registry", **parts)


def install(version: str, capability: Capability | None) -> None:
    """Puts the stand-in for "0.26" or "0.33" where vLLM would be imported from, on a GPU of a capability or none."""
    new = version == "0.33"
    names: Any = NewNames if new else OldNames

    def register_backend(backend: Any, class_path: str) -> None:
        OVERRIDES[names.register(backend, class_path) if isinstance(backend, str) else backend] = class_path

    def global_index(req_id, block_table, positions, BLOCK_SIZE, NUM_TOPK_TOKENS, return_valid_counts):
        of = types.SimpleNamespace(req_id_per_token=req_id, block_table=block_table, block_size=BLOCK_SIZE)
        return convert(of, positions, BLOCK_SIZE)

    platform = types.SimpleNamespace(is_cuda=lambda: capability is not None, get_device_capability=lambda: capability)
    sparse = {"SparseMLACommonMetadataBuilder": Builder, "SparseMLACommonImpl": NewImpl if new else Impl}
    if new:
        sparse["SparseMLACommonMetadata"] = type("SparseMLACommonMetadata", (), {})
    level = types.SimpleNamespace(UNIFORM_BATCH="uniform batch", ALWAYS="always")
    for package in ("vllm", "vllm.model_executor", "vllm.model_executor.layers", "vllm.v1"):
        _module(package)
    _module("vllm.envs", VLLM_BATCH_INVARIANT=os.environ.get("VLLM_BATCH_INVARIANT") == "1")
    _module("vllm.config", get_current_vllm_config=lambda: None)
    _module("vllm.platforms", current_platform=platform)
    _module("vllm.model_executor.layers.attention")
    _module("vllm.model_executor.layers.attention.sparse_mla_attention", **sparse)
    uniform = types.SimpleNamespace(UNIFORM="uniform")
    builder = NewBuilder if new else Builder
    common = {"MLACommonBackend": CommonBackend, "MLACommonImpl": Impl, "MLACommonMetadataBuilder": builder}
    _module("vllm.model_executor.layers.attention.mla_attention", QueryLenSupport=uniform, **common)
    _module("vllm.v1.attention")
    multiple = type("MultipleOf", (int,), {})
    parts = {
        "AttentionBackend": Backend,
        "AttentionMetadata": type("AttentionMetadata", (), {}),
        "MultipleOf": multiple,
    }
    _module("vllm.v1.attention.backend", AttentionCGSupport=level, **parts)
    _module("vllm.v1.attention.backends")
    _module("vllm.v1.attention.backends.registry", AttentionBackendEnum=names, register_backend=register_backend)
    _module("vllm.v1.attention.backends.mla")
    own = {"triton_convert_req_index_to_global_index": global_index}
    _module("vllm.v1.attention.backends.mla.sparse_utils", align_blocks_to_rows=lambda spec: spec, **own)
    _prefill(NewPrefillBackend if new else PrefillBackend)
    _indexer()
    _module("vllm.v1.worker")
    absent = {"is_workspace_manager_initialized": lambda: False, "current_workspace_manager": lambda: None}
    _module("vllm.v1.worker.workspace", **absent)


def install_v4() -> types.SimpleNamespace:
    """DeepSeek V4's modules over `install`; returns the values that a test sets: metadata and vLLM's own class."""
    context = types.SimpleNamespace(attn_metadata=None)

    class Workspace:
        @staticmethod
        def get_simultaneous(*parts: Any) -> list[torch.Tensor]:
            """Memory that holds NaN, and -1 as integers."""
            sizes = [(shape, dtype, int(torch.tensor(shape).prod()) * dtype.itemsize) for shape, dtype in parts]
            return [torch.full((n,), 0xFF, dtype=torch.uint8).view(dtype).view(shape) for shape, dtype, n in sizes]

    context.own = type("DeepseekV4FlashMLAAttention", (), {})
    for package in ("vllm.models", "vllm.models.deepseek_v4", "vllm.models.deepseek_v4.nvidia"):
        _module(package)
    _module("vllm.forward_context", get_forward_context=lambda: context)
    _module("vllm.models.deepseek_v4.nvidia.flashmla", DeepseekV4FlashMLAAttention=context.own)
    _module("vllm.models.deepseek_v4.sparse_mla", DeepseekV4FlashMLABackend=Backend)
    _module("vllm.models.deepseek_v4.nvidia.model", _select_dsv4_attn_cls=lambda config: context.own)
    sys.modules["vllm.v1.worker.workspace"].current_workspace_manager = Workspace  # type: ignore[attr-defined]
    return context
