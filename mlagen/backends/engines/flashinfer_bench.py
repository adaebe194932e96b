"""FlashInfer-Bench's definitions of MLA: their axes, inputs and outputs, and which of them a package serves.

Names, axes and argument order are those of the public definitions, which flashinfer-bench and flashinfer-trace publish
under Apache-2.0: https://github.com/flashinfer-ai/flashinfer-bench. Descriptions and reference code are mlagen's own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mlagen.backends.parts.base import GeneratedFile
from mlagen.errors import UsageError
from mlagen.plan import Plan
from mlagen.spec import DenseAttention, SparseAttention
from mlagen.spec.gpus import GPUS
from mlagen.spec.targets import Target

TEMPLATES = "flashinfer_bench"
ENTRY = "main.py"  # the adapter; its function `run` is the entry point


@dataclass(frozen=True)
class Tensor:
    """A tensor of a definition, or a scalar.

    Attributes:
        shape: names of its axes; None: a scalar.
        dtype: by the schema's name.
        description: one sentence.
    """

    shape: tuple[str, ...] | None
    dtype: str
    description: str


@dataclass(frozen=True)
class Form:
    """Definitions that differ only in the values of their constant axes.

    Attributes:
        kind: short name; the reference template's.
        name: pattern of the definition's name over its constant axes.
        op_type: the schema's category.
        stage: tag of the phase of inference.
        description: one sentence.
        adapter: template of the entry point.
        axes: names of the variable axes.
        inputs, outputs: tensors by name, in the order of arguments.
        constraints: expressions over axes and inputs.
        needs: the spec that serves a definition, with its numbers in braces.
        serves: whether a plan's package computes the definition of these constants.
    """

    kind: str
    name: str
    op_type: str
    stage: str
    description: str
    adapter: str
    axes: tuple[str, ...]
    inputs: dict[str, Tensor]
    outputs: dict[str, Tensor]
    constraints: tuple[str, ...]
    needs: str
    serves: Callable[[Plan, dict[str, int]], bool]


@dataclass(frozen=True)
class Definition:
    """One public definition: its form and the values of its constant axes."""

    form: Form
    constants: dict[str, int]

    @property
    def name(self) -> str:
        """The public name, such as mla_paged_decode_h16_ckv512_kpe64_ps1."""
        return self.form.name.format(**self.constants)

    @property
    def inputs(self) -> dict[str, Tensor]:
        """Inputs in the order of arguments; a page of one token has no length of the last page."""
        single = self.constants.get("page_size") == 1
        return {name: one for name, one in self.form.inputs.items() if not (single and name == "kv_last_page_len")}

    @property
    def variables(self) -> list[str]:
        """The variable axes of its inputs."""
        used = {axis for one in self.inputs.values() for axis in one.shape or ()}
        return [axis for axis in self.form.axes if axis in used]

    @property
    def document(self) -> dict[str, Any]:
        """The definition in the schema's fields, without the text of `reference`."""
        axes: dict[str, Any] = {name: {"type": "const", "value": value} for name, value in self.constants.items()}
        axes |= {name: {"type": "var"} for name in self.variables}
        return {
            "name": self.name,
            "op_type": self.form.op_type,
            "description": self.form.description,
            "tags": [f"stage:{self.form.stage}"],
            "axes": axes,
            "constraints": list(self.form.constraints),
            "inputs": {name: _document(one) for name, one in self.inputs.items()},
            "outputs": {name: _document(one) for name, one in self.form.outputs.items()},
        }

    @property
    def reference(self) -> GeneratedFile:
        """The reference code in plain torch."""
        context = {**self.constants, "arguments": ", ".join(self.inputs)}
        return GeneratedFile("reference.py", f"{TEMPLATES}/reference_{self.form.kind}.py.jinja", context)


def definitions_of(plan: Plan) -> list[Definition]:
    """The public definitions that a plan's package computes, in the order of DEFINITIONS.

    Raises:
        UsageError: there is none; names the specs that the definitions need.
    """
    found = [one for one in DEFINITIONS if one.form.serves(plan, one.constants)]
    if not found:
        needs = "; ".join(dict.fromkeys(one.form.needs.format(**one.constants) for one in DEFINITIONS))
        raise UsageError(f"{plan.spec.name}: serves no definition of flashinfer-bench; they need {needs}")
    return found


def adapter(plan: Plan, definition: Definition) -> GeneratedFile:
    """The solution's entry point: it takes a definition's arguments and calls the package's wrapper."""
    attention = plan.spec.attention
    context = {
        **definition.constants,
        "name": plan.spec.name,
        "kind": definition.form.kind,
        "arguments": ", ".join((*definition.inputs, *definition.form.outputs)),
        "two_tensors": _has_two_tensors(plan),
        "lse_base": attention.lse_base if attention else "e",
        "empty_row_lse": attention.empty_row_lse if attention else "-inf",
    }
    return GeneratedFile(ENTRY, f"{TEMPLATES}/{definition.form.adapter}.py.jinja", context)


def target_hardware(targets: tuple[Target, ...]) -> list[str]:
    """GPUs of the targets by the names that flashinfer-bench writes, such as NVIDIA_H100."""
    makers = {target: "AMD" if target.startswith("gfx") else "NVIDIA" for target in targets}
    return [f"{makers[target]}_{gpu.upper().replace('-', '_')}" for target in targets for gpu in GPUS[target]]


def _document(tensor: Tensor) -> dict[str, Any]:
    shape = None if tensor.shape is None else list(tensor.shape)
    return {"shape": shape, "dtype": tensor.dtype, "description": tensor.description}


def _heads(plan: Plan, heads: int) -> bool:
    """Whether a tensor-parallel rank of the model has this many heads, and they are bf16."""
    return plan.spec.model.dtype == "bf16" and plan.spec.model.num_heads % heads == 0


def _latent_dims(plan: Plan, constants: dict[str, int]) -> bool:
    """Whether a package's latent rows have the columns and heads of a definition."""
    dims, latent = plan.spec.model, constants["head_dim_ckv"]
    columns = (dims.kv_lora_rank, dims.qk_rope_head_dim, dims.v_head_dim)
    return columns == (latent, constants["head_dim_kpe"], latent) and _heads(plan, constants["num_qo_heads"])


def _serves_paged(plan: Plan, constants: dict[str, int]) -> bool:
    attention, layout = plan.spec.attention, plan.layout
    return (
        isinstance(attention, DenseAttention)
        and attention.window is None
        and "flash_mla_with_kvcache" in plan.spec.wrappers
        and layout is not None
        and (layout.name == "bf16" or _has_two_tensors(plan))
        and _latent_dims(plan, constants)
    )


def _has_two_tensors(plan: Plan) -> bool:
    """Whether a package reads latent and RoPE columns in bf16 from two tensors, as the definitions keep them."""
    if plan.layout is None:
        return False
    fields = [(field.name, field.dtype, field.plane) for field in plan.layout.fields]
    return plan.layout.tensors == ("kpe_cache",) and fields == [("latent", "bf16", 0), ("rope", "bf16", 1)]


def _serves_ragged(plan: Plan, constants: dict[str, int]) -> bool:
    dims = plan.spec.multi_head
    return (
        dims is not None
        and "flash_attn_varlen_func" in plan.spec.wrappers
        and (dims.qk_head_dim, dims.v_head_dim) == (constants["head_dim_qk"], constants["head_dim_vo"])
        and dims.num_kv_heads in (None, plan.spec.model.num_heads)
        and _heads(plan, constants["num_qo_heads"])
    )


def _serves_sparse(plan: Plan, constants: dict[str, int]) -> bool:
    attention = plan.spec.attention
    return (
        isinstance(attention, SparseAttention)
        and "flash_mla_sparse_fwd" in plan.spec.wrappers
        and (attention.topk, attention.window) == (constants["topk"], None)
        and "required" not in (attention.attn_sink, attention.topk_length)
        and plan.rows_block_size is None
        and _latent_dims(plan, constants)
    )


def _serves_indexer(plan: Plan, constants: dict[str, int]) -> bool:
    indexer, cache = plan.spec.indexer, plan.spec.indexer_cache
    wanted = {"paged_indexer_topk", "get_paged_mqa_logits_metadata"}
    return (
        indexer is not None
        and cache is not None
        and wanted <= {*plan.spec.wrappers}
        and cache.layout.name == "indexer_fp8"
        and (indexer.num_heads, indexer.head_dim) == (constants["num_index_heads"], constants["index_head_dim"])
        and indexer.topk == constants["topk"]
    )


_SCALE = Tensor(None, "float32", "Factor of the logits.")
_LATENT = ("num_qo_heads", "head_dim_ckv")
_ROPE = ("num_qo_heads", "head_dim_kpe")
_CACHES = {
    "ckv_cache": Tensor(("num_pages", "page_size", "head_dim_ckv"), "bfloat16", "Latent columns of the cache."),
    "kpe_cache": Tensor(("num_pages", "page_size", "head_dim_kpe"), "bfloat16", "RoPE columns of the cache."),
}


def _query(rows: str) -> dict[str, Tensor]:
    return {
        "q_nope": Tensor((rows, *_LATENT), "bfloat16", "Latent columns of the query."),
        "q_pe": Tensor((rows, *_ROPE), "bfloat16", "RoPE columns of the query."),
    }


def _results(rows: str, columns: str) -> dict[str, Tensor]:
    return {
        "output": Tensor((rows, "num_qo_heads", columns), "bfloat16", "Attention's output."),
        "lse": Tensor((rows, "num_qo_heads"), "float32", "Log-sum-exp of the scaled logits in base 2."),
    }


def _paged(requests: str) -> dict[str, Tensor]:
    return {
        "kv_indptr": Tensor(("len_indptr",), "int32", "Where each request's pages begin in kv_indices."),
        "kv_indices": Tensor(("num_kv_indices",), "int32", "Pages of all requests in order."),
        "kv_last_page_len": Tensor((requests,), "int32", "Tokens in each request's last page."),
        "sm_scale": _SCALE,
    }


_INDPTR = {
    "qo_indptr": Tensor(("len_indptr",), "int32", "Where each request's query tokens begin."),
}
_NEEDS_PAGED = (
    "flash_mla_with_kvcache, dense without a window, over bf16 rows of {head_dim_ckv} + {head_dim_kpe} columns, in one "
    "tensor or with kpe_cache, and a multiple of 8 heads"
)
_PAGED_NAME = "h{num_qo_heads}_ckv{head_dim_ckv}_kpe{head_dim_kpe}_ps{page_size}"
PAGED_DECODE = Form(
    kind="paged_decode",
    name=f"mla_paged_decode_{_PAGED_NAME}",
    op_type="mla_paged",
    stage="decode",
    description="MLA of one query token a request over a paged cache of two tensors.",
    adapter="mla_paged",
    axes=("batch_size", "num_pages", "len_indptr", "num_kv_indices"),
    inputs={**_query("batch_size"), **_CACHES, **_paged("batch_size")},
    outputs=_results("batch_size", "head_dim_ckv"),
    constraints=("len_indptr == batch_size + 1", "num_kv_indices == kv_indptr[-1].item()"),
    needs=_NEEDS_PAGED,
    serves=_serves_paged,
)
PAGED_PREFILL = Form(
    kind="paged_prefill",
    name=f"mla_paged_prefill_causal_{_PAGED_NAME}",
    op_type="mla_paged",
    stage="prefill",
    description="Causal MLA of each request's last tokens over a paged cache of two tensors.",
    adapter="mla_paged",
    axes=("total_q", "batch_size", "num_pages", "len_indptr", "num_kv_indices"),
    inputs={**_query("total_q"), **_CACHES, **_INDPTR, **_paged("batch_size")},
    outputs=_results("total_q", "head_dim_ckv"),
    constraints=("total_q == qo_indptr[-1].item()", "num_kv_indices == kv_indptr[-1].item()"),
    needs=_NEEDS_PAGED,
    serves=_serves_paged,
)
RAGGED = Form(
    kind="ragged_prefill",
    name="mla_ragged_prefill_causal_h{num_qo_heads}_qk{head_dim_qk}_vo{head_dim_vo}",
    op_type="mla_ragged",
    stage="prefill",
    description="Causal multi-head attention of requests of any lengths, before absorption.",
    adapter="mla_ragged",
    axes=("total_q", "total_kv", "len_indptr"),
    inputs={
        "q": Tensor(("total_q", "num_qo_heads", "head_dim_qk"), "bfloat16", "Queries of all requests."),
        "k": Tensor(("total_kv", "num_qo_heads", "head_dim_qk"), "bfloat16", "Keys of all requests."),
        "v": Tensor(("total_kv", "num_qo_heads", "head_dim_vo"), "bfloat16", "Values of all requests."),
        **_INDPTR,
        "kv_indptr": Tensor(("len_indptr",), "int32", "Where each request's keys begin."),
        "sm_scale": _SCALE,
    },
    outputs=_results("total_q", "head_dim_vo"),
    constraints=("total_q == qo_indptr[-1].item()", "total_kv == kv_indptr[-1].item()"),
    needs="flash_attn_varlen_func with heads of {head_dim_qk} and {head_dim_vo} columns and a multiple of 8 of them",
    serves=_serves_ragged,
)
SPARSE = Form(
    kind="sparse_attention",
    name="dsa_sparse_attention_h{num_qo_heads}_ckv{head_dim_ckv}_kpe{head_dim_kpe}_topk{topk}_ps{page_size}",
    op_type="dsa_paged",
    stage="attention",
    description="MLA of each token over the cache rows that its indices name.",
    adapter="dsa_sparse_attention",
    axes=("num_tokens", "num_pages"),
    inputs={
        **_query("num_tokens"),
        **_CACHES,
        "sparse_indices": Tensor(("num_tokens", "topk"), "int32", "page * page_size + offset of each row; -1: none."),
        "sm_scale": _SCALE,
    },
    outputs=_results("num_tokens", "head_dim_ckv"),
    constraints=("sparse_indices.shape[0] == num_tokens", "ckv_cache.shape[1] == page_size"),
    needs="flash_mla_sparse_fwd over flat bf16 rows of {head_dim_ckv} + {head_dim_kpe} columns, topk {topk} and a "
    "multiple of {num_qo_heads} heads",
    serves=_serves_sparse,
)
INDEXER = Form(
    kind="topk_indexer",
    name="dsa_topk_indexer_fp8_h{num_index_heads}_d{index_head_dim}_topk{topk}_ps{page_size}",
    op_type="dsa_paged",
    stage="indexer",
    description="The keys of each request with the largest sum over heads of weight * relu(q . k).",
    adapter="dsa_topk_indexer",
    axes=("batch_size", "max_num_pages", "num_pages"),
    inputs={
        "q_index_fp8": Tensor(("batch_size", "num_index_heads", "index_head_dim"), "float8_e4m3fn", "Queries."),
        "k_index_cache_fp8": Tensor(
            ("num_pages", "page_size", "kv_cache_num_heads", "head_dim_with_scale"),
            "int8",
            "Bytes of each page: e4m3 columns of all its tokens, then a float32 scale for each token.",
        ),
        "weights": Tensor(("batch_size", "num_index_heads"), "float32", "Weights of the heads."),
        "seq_lens": Tensor(("batch_size",), "int32", "Keys of each request."),
        "block_table": Tensor(("batch_size", "max_num_pages"), "int32", "Pages of each request in order."),
    },
    outputs={
        "topk_indices": Tensor(("batch_size", "topk"), "int32", "page * page_size + offset of each key; -1: none."),
    },
    constraints=("topk <= max_num_pages * page_size",),
    needs="paged_indexer_topk with {num_index_heads} heads of {index_head_dim} columns, topk {topk} and layout "
    "indexer_fp8",
    serves=_serves_indexer,
)
_ROWS = {"head_dim_ckv": 512, "head_dim_kpe": 64}
_KEYS = {"topk": 2048, "kv_cache_num_heads": 1, "head_dim_with_scale": 132}
DEFINITIONS: tuple[Definition, ...] = (
    *(
        Definition(form, {"num_qo_heads": heads, **_ROWS, "page_size": page_size})
        for form in (PAGED_DECODE, PAGED_PREFILL)
        for heads in (16, 8)
        for page_size in (1, 64)
    ),
    *(Definition(RAGGED, {"num_qo_heads": heads, "head_dim_qk": 192, "head_dim_vo": 128}) for heads in (16, 8)),
    *(Definition(SPARSE, {"num_qo_heads": 16, **_ROWS, "page_size": size, "topk": 2048}) for size in (1, 64)),
    Definition(INDEXER, {"num_index_heads": 64, "index_head_dim": 128, "page_size": 64, **_KEYS}),
)
