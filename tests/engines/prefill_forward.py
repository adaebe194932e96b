"""vLLM's own attention of prefills (`forward_mha`) by a prefill backend: parts of a context, merged by their LSE.

The operators that need a GPU, a gather of rows and the merge, are replaced by torch.
"""

from __future__ import annotations

import inspect
import types
from typing import Any
from unittest import mock

import torch

PAGE, WORKSPACE, LATENT, ROPE = 16, 48, 32, 32
NEW, CONTEXT = (5, 34, 1), (41, 3, 0)  # vLLM sorts requests without a context to the end


class Projection:
    """kv_b_proj: a row of the latent becomes K and V of all heads."""

    def __init__(self, columns: int) -> None:
        self.weight = torch.randn(columns, LATENT, generator=torch.Generator().manual_seed(5)).bfloat16() / LATENT**0.5

    def __call__(self, rows: torch.Tensor) -> tuple[torch.Tensor]:
        return (rows @ self.weight.T,)


def gather(*, src_cache: Any, dst: Any, block_table: Any, cu_seq_lens: Any, token_to_seq: Any, **asked: Any) -> None:
    """`gather_and_maybe_dequant_cache` of rows that need no conversion."""
    tokens = asked["num_tokens"]
    request = token_to_seq[:tokens].long()
    position = asked["seq_starts"][request] + torch.arange(tokens) - cu_seq_lens[request]
    dst[:tokens] = src_cache[block_table[request, position.long() // PAGE].long(), position.long() % PAGE]


def merge(
    *, output: Any, prefix_output: Any, prefix_lse: Any, suffix_output: Any, suffix_lse: Any, **asked: Any
) -> None:
    """`merge_attn_states`: LSEs are [heads, tokens], of base e, and -inf without a key."""
    assert prefix_output.stride(1) == suffix_output.stride(1)  # vLLM's kernels know one stride
    total = torch.logaddexp(prefix_lse, suffix_lse)
    weights = [(lse - total).nan_to_num(nan=-torch.inf).exp().T[..., None] for lse in (prefix_lse, suffix_lse)]
    output.copy_(prefix_output * weights[0] + suffix_output * weights[1])
    if asked.get("output_lse") is not None:
        asked["output_lse"].copy_(total)


def unpinned(function: Any) -> Any:
    """Return a factory of tensors that leaves memory unpinned, as there is no GPU."""
    return lambda *sizes, pin_memory=False, **options: function(*sizes, **options)


def forward(layer: Any, attend: Any) -> float:
    """The largest error of the output; `attend` is attention in float64."""
    from vllm.model_executor.layers.attention import mla_attention as theirs

    nope, v, heads = layer.qk_nope_head_dim, layer.v_head_dim, layer.num_heads
    generator = torch.Generator().manual_seed(4)
    context = torch.tensor(CONTEXT, dtype=torch.int32)
    starts = torch.tensor((0, *NEW)).cumsum(0).int()
    asked = {
        "context_lens_cpu": context,
        "prefill_query_start_loc_cpu": starts,
        "num_prefills": len(NEW),
        "chunked_prefill_workspace": torch.full((WORKSPACE, LATENT + ROPE), torch.nan).bfloat16(),
        "chunked_prefill_workspace_size": WORKSPACE,
        "block_size": PAGE,
        "align_chunk_to_block": True,
        "device": torch.device("cpu"),
        "dcp_world_size": 1,
        "dcp_local_block_size": 1,
        "dcp_virtual_block_size": 1,
    }
    known = inspect.signature(theirs.build_mla_chunked_context_metadata).parameters
    patched = {name: unpinned(getattr(torch, name)) for name in ("empty", "zeros", "tensor")}
    with mock.patch.multiple(torch, **patched):
        chunked = theirs.build_mla_chunked_context_metadata(**{name: asked[name] for name in known if name in asked})
    table = torch.randperm(9, generator=generator).int().view(3, 3)
    prefill = theirs.MLACommonPrefillMetadata(
        block_table=table,
        query_start_loc=starts,
        max_query_len=max(NEW),
        chunked_context=chunked,
        q_data_type=torch.bfloat16,
        output_dtype=torch.bfloat16,
        prefill_backend=layer,
    )
    layer.prepare_metadata(prefill)
    cache = torch.randn(9, PAGE, LATENT + ROPE, generator=generator).bfloat16()
    rows = torch.randn(sum(NEW), LATENT + ROPE, generator=generator).bfloat16()
    q = torch.randn(sum(NEW), heads, nope + ROPE, generator=generator).bfloat16()
    own: Any = types.SimpleNamespace(dcp_world_size=1, kv_cache_dtype="auto", _use_flashinfer_concat_mla_k=False)
    vars(own).update(num_heads=heads, kv_lora_rank=LATENT, qk_nope_head_dim=nope, v_head_dim=v)
    own.kv_b_proj = Projection(heads * (nope + v))
    for name in ("_concat_k_nope_k_pe", "_compute_prefill_context"):
        setattr(own, name, types.MethodType(getattr(theirs.MLACommonBaseImpl, name), own))
    replaced = {"ops": types.SimpleNamespace(gather_and_maybe_dequant_cache=gather), "merge_attn_states": merge}
    if hasattr(theirs, "mask_empty_context"):  # the backend leaves nothing to mask
        replaced["mask_empty_context"] = lambda *arguments: None
    output = torch.full((sum(NEW), heads * v), torch.nan).bfloat16()
    metadata = types.SimpleNamespace(prefill=prefill, num_prefills=len(NEW))
    latent, rope = rows[:, :LATENT], rows[:, None, LATENT:]
    with mock.patch.multiple(theirs, **replaced):
        theirs.MLACommonBaseImpl.forward_mha(own, q, latent, rope, cache, metadata, None, output)  # type: ignore[arg-type]
    keys = []
    for request, (length, new) in enumerate(zip(CONTEXT, rows.split(NEW), strict=True)):
        keys.append(torch.cat((cache[table[request].long()].flatten(0, 1)[:length], new)))
    all_rows = torch.cat(keys)
    made = own.kv_b_proj(all_rows[:, :LATENT])[0].view(-1, heads, nope + v)
    k = torch.cat((made[..., :nope], all_rows[:, None, LATENT:].expand(-1, heads, -1)), 2)
    wanted, _ = attend(q, k, made[..., nope:], NEW, tuple(len(one) for one in keys), causal=True)
    return float((output.view_as(wanted).double() - wanted).abs().max())
