"""Peers of a DeepSeek V4 layer: the same steps by vLLM's operators, DeepGEMM's logits and FlashMLA."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from mlagen.bench.families.compressor import EPS, compress_call
from mlagen.bench.families.indexer_cache import keys_of, query_arguments
from mlagen.bench.families.layer import LayerInputs, LayerShape, compressor_calls
from mlagen.bench.families.mqa_logits import SCHEDULE, schedule_of
from mlagen.bench.package import BenchPackage
from mlagen.bench.peers.compressor import OPS, SIZES
from mlagen.bench.peers.libraries import (
    DEEP_GEMM_MODULES,
    FLASH_MLA,
    FLASH_MLA_HEADS,
    FLASH_MLA_MODULES,
    TRITON_OPS,
    first_module,
    load_vllm_operators,
    pad_heads,
    triton_op,
)
from mlagen.bench.peers.sparse_decode import pad_indices
from mlagen.bench.peers.topk import WORKSPACE, cuda_operator
from mlagen.bench.trial import Call, Entrant
from mlagen.verify.compressor.side import SAVE
from mlagen.verify.indexer_cache.side import QUERY
from mlagen.verify.prologue.side import PADDED

GROUP = 8  # heads of the output's projection that vLLM rotates back together
Select = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int], None]


def _per_row() -> Select:
    function = cuda_operator("top_k_per_row_decode")

    def select(logits: torch.Tensor, lengths: torch.Tensor, picks: torch.Tensor, context: int) -> None:
        function(logits, 1, lengths, picks, len(logits), *logits.stride(), picks.shape[1])

    return select


def _persistent() -> Select:
    function = cuda_operator("persistent_topk")
    space = torch.zeros(WORKSPACE, dtype=torch.uint8, device="cuda")

    def select(logits: torch.Tensor, lengths: torch.Tensor, picks: torch.Tensor, context: int) -> None:
        function(logits, lengths, picks, space, picks.shape[1], context)

    return select


def _picked(shape: LayerShape, package: BenchPackage, inputs: LayerInputs, select: Select) -> Call:
    """Query, logits, top-k and slots by five launches; gives out slots, and how many each token has."""
    one, gemm = inputs.scored, first_module(DEEP_GEMM_MODULES)
    assert one is not None
    keys, angles = keys_of(package), inputs.angles
    schedule = schedule_of(getattr(gemm, SCHEDULE), one.lengths, keys.block_size)
    pages, context = keys.rows(one.pages)[:, :, None], shape.context // shape.ratio
    query = triton_op(QUERY, f"{OPS}.fused_indexer_q")
    asked = query_arguments(keys, angles.positions, one.q, angles.table, one.weights)
    map_slots = triton_op("compute_global_topk_indices_and_lens", TRITON_OPS)
    valid = torch.ones(shape.tokens, dtype=torch.bool, device=one.q.device)

    def call() -> tuple[torch.Tensor, torch.Tensor]:
        values, weights = query(*asked)
        where = (one.lengths, inputs.table, schedule, context)
        logits = gemm.fp8_paged_mqa_logits(values[:, None], pages, weights, *where, clean_logits=False)
        select(logits, one.lengths, one.picks, context)
        found: tuple[torch.Tensor, torch.Tensor] = map_slots(
            one.picks, inputs.requests, inputs.table, inputs.rows.block_size, valid
        )
        return found

    return call


def _prepare(shape: LayerShape, package: BenchPackage, select: Callable[[], Select], inputs: LayerInputs) -> Call:
    load_vllm_operators()
    insert = getattr(torch.ops._C, PADDED)
    save = triton_op(SAVE, f"{OPS}.save_partial_states")
    function = triton_op("compress_norm_rope_store_triton", f"{OPS}.fused_compress_quant_cache")
    turn = triton_op("fused_inv_rope_fp8_quant", f"{OPS}.fused_inv_rope_fp8_quant")

    def compress(rows: Any, made: Any) -> Call:
        return compress_call(function, rows, made, *SIZES[rows.side.layout.name], metadata=True)

    made = compressor_calls(shape, package, inputs, save, compress)
    pick = None if inputs.scored is None else _picked(shape, package, inputs, select())
    module, angles, heads = first_module(FLASH_MLA_MODULES), inputs.angles, shape.num_heads
    padded = next(count for count in FLASH_MLA_HEADS if heads <= count)
    where = (inputs.window.pages, inputs.slots, angles.positions, angles.table, padded, EPS, inputs.window.block_size)
    _, sink = pad_heads(inputs.q, inputs.sink)
    main, extra = inputs.window.view(inputs.q.dtype), inputs.rows.view(inputs.q.dtype)
    window = inputs.window.indices
    options: dict[str, Any] = {"softmax_scale": inputs.scale, "is_fp8_kvcache": True, "indices": window}
    options |= {"attn_sink": sink, "extra_k_cache": extra}
    options["topk_length"] = torch.full((shape.tokens,), window.shape[2], dtype=torch.int32, device=window.device)
    every = pad_indices(inputs.rows.indices)
    lengths = (every[:, 0] >= 0).sum(1, dtype=torch.int32)
    group = min(GROUP, heads)
    metadata, _ = module.get_mla_metadata()

    def call() -> torch.Tensor:
        q = insert(inputs.q, inputs.row, *where)
        for each in made:
            each()
        slots, counts = (every, lengths) if pick is None else pick()
        chosen = {"extra_indices_in_kvcache": slots.view(shape.tokens, 1, -1), "extra_topk_length": counts}
        arguments = (q[:, None], main, None, None, package.facts.d_v, metadata)
        out, _ = module.flash_mla_with_kvcache(*arguments, **options, **chosen)
        table = (angles.positions, angles.table)
        turned, _ = turn(out[:, 0, :heads], *table, heads // group, group, quantize=False)
        result: torch.Tensor = turned.unflatten(2, (group, -1))  # no copy: its heads lie in groups
        return result

    call()
    return call


def layer_peers(
    package: BenchPackage, shape: LayerShape, inputs: Sequence[LayerInputs]
) -> Iterator[Entrant[LayerInputs]]:
    """vLLM's layer at a step; its top-k per row, and the persistent one."""
    ways = {"per row": _per_row, "persistent": _persistent} if inputs[0].scored else {"": _per_row}
    for name, select in ways.items():
        title = f"vLLM, {FLASH_MLA}" + (f", top-k {name}" if name else "")
        yield Entrant(title, partial(_prepare, shape, package, select))


BENCHMARKS = {"layer": layer_peers}
