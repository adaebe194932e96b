"""Keys and the query in one launch: the tensors of a call, their expected values after it, and its faults."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from mlagen.verify.call.memory import LAYOUTS, Placed, place, seeded
from mlagen.verify.call.results import Figure
from mlagen.verify.call.subject import Subject
from mlagen.verify.checks import require_bits, require_none
from mlagen.verify.indexer_cache.cases import KeysQueryCase
from mlagen.verify.indexer_cache.inputs import EPS, SCALES, Inputs, KeysInputs, build_keys
from mlagen.verify.indexer_cache.side import KEYS_QUERY, NORMALISE, QUERY, IndexerSide, takes_ratio
from mlagen.verify.paged.values import VALUES

POISON = 0x5A


@dataclass
class KeysQueryInputs(Inputs):
    """A call for keys and the query.

    Attributes:
        keys: the same keys, as a call of NORMALISE has them.
        table: cosines and sines, as separate functions take them.
        outputs: the results, by name.
    """

    keys: KeysInputs
    table: torch.Tensor
    outputs: dict[str, torch.Tensor] = field(default_factory=dict)

    def renew(self) -> Iterator[None]:
        """The cache as it was, and tokens in another order."""
        for _ in self.keys.renew():
            self.arguments["q"].copy_(self.arguments["q"].flip(0))
            yield


def _placed(case: KeysQueryCase, side: IndexerSide, device: str, seed: int, keys: KeysInputs) -> dict[str, Placed]:
    """The query, its weights, the norm's tensors and the tables."""
    generator, tokens = seeded(seed + 1), len(keys.arguments["k_pre"])
    values = VALUES[case.values](side, max(tokens * case.heads, 1), generator)
    rows = values[torch.arange(tokens * case.heads) % len(values)].view(tokens, case.heads, side.layout.columns)
    weights = torch.randn(tokens, case.heads, generator=generator).to(side.dtype)
    bias = torch.randn(side.layout.columns, generator=generator).to(side.dtype)
    table = keys.arguments["cos_sin_cache"].cpu()
    cos, sin = table.split(side.rope // 2, 1)

    def laid(name: str, tensor: torch.Tensor, layout: str) -> Placed:
        return place((tensor.float() if name in case.wide else tensor).to(device), LAYOUTS[layout], 0.0)

    return {
        "q": place(rows.to(device), LAYOUTS[case.q], 0.0),
        "weights": laid("weights", weights, case.weights),
        "norm": laid("norm", keys.arguments["rms_norm_weight"].cpu()[None], case.keys.tables),
        "bias": laid("norm", bias[None], case.keys.tables),
        "cos": laid("angles", cos, case.keys.tables),
        "sin": laid("angles", sin, "contiguous"),
    }


def build_keys_query(subject: Subject, case: KeysQueryCase, side: IndexerSide, seed: int) -> KeysQueryInputs:
    """The inputs of a call. Raises CaseSkippedError: the device has too little memory."""
    keys = build_keys(case.keys, side, subject.device, seed)
    placed, device = _placed(case, side, subject.device, seed, keys), subject.device
    tokens, heads, _ = placed["q"].view.shape
    cos, sin = placed["cos"].view, placed["sin"].view
    keys.arguments["rms_norm_weight"] = placed["norm"].view[0]
    keys.arguments["cos_sin_cache"] = torch.cat([cos, sin], 1)
    if case.layer:
        keys.arguments["norm_bias"] = placed["bias"].view[0]
    shapes = {"values": side.query.data[0].nbytes}
    if side.packed:
        shapes["scales"] = side.query.plane_bytes[1]
    given = {}
    for name, width in shapes.items():
        poison = torch.full((tokens, heads, width), POISON, dtype=torch.uint8, device=device)
        given[name] = place(poison, LAYOUTS["contiguous"], 0)
    given["weights"] = place(torch.full((tokens, heads), float("nan"), device=device), LAYOUTS["contiguous"], 0.0)
    scales = side.scales
    arguments = {
        "q": placed["q"].view,
        "q_out": given["values"].view,
        "weights": placed["weights"].view,
        "weights_out": given["weights"].view,
        "k": keys.arguments["k_pre"],
        "kv_cache": keys.arguments["k_cache"],
        "slot_mapping": keys.arguments["kv_slot_mapping"],
        "norm_weight": placed["norm"].view[0],
        "norm_bias": placed["bias"].view[0] if case.layer else None,
        "positions": keys.arguments["positions"],
        "cos_cache": cos[:, None] if case.spread else cos,
        "sin_cache": sin[:, None] if case.spread else sin,
        "epsilon": EPS,
        "quant_block_size": scales.tile if scales.count > 1 else side.layout.columns,
        "scale_fmt": "ue8m0" if scales.rule.rounding == "power_of_two" else None,
        "weights_scale": SCALES[0],
        "preshuffle": False,
        "is_neox": side.neox,
    }
    if side.packed:
        arguments["q_scale_out"] = given["scales"].view
    if case.keys.ratio is not None and takes_ratio(side, subject.package.SPEC["spec"]["wrappers"]):
        arguments["compress_ratio"] = case.keys.ratio
    del keys.placed["weight"], keys.placed["angles"]
    return KeysQueryInputs(
        side,
        arguments,
        keys,
        keys.arguments["cos_sin_cache"],
        {name: one.view for name, one in given.items()},
        placed={**placed, **keys.placed},
        given=given,
    )


def call_keys_query(run: Any, **changes: Any) -> dict[str, torch.Tensor]:
    """Calls by position, as engines do."""
    arguments = {**run.inputs.arguments, **changes}
    named = {name: arguments.pop(name) for name in ("q_scale_out", "compress_ratio") if name in arguments}
    require_none(run.subject.call(KEYS_QUERY, *arguments.values(), **named))
    return dict(run.inputs.outputs)


def beside(run: Any) -> list[Figure]:
    """The bits are those of the separate functions."""
    inputs: KeysQueryInputs = run.inputs
    wrappers = run.subject.package.SPEC["spec"]["wrappers"]
    results = run.call()
    run.compare(results)
    if QUERY in wrappers:
        of = {name: inputs.arguments[name] for name in ("positions", "q", "weights")}
        q, weights = run.subject.call(QUERY, of["positions"], of["q"], inputs.table, of["weights"], SCALES[0], 1.0)
        pair = q if isinstance(q, tuple) else (q,)
        other = {**dict(zip(("values", "scales"), pair, strict=False)), "weights": weights}
        require_bits("separate call", {**other, "values": other["values"].view(torch.uint8)}, results)
    if NORMALISE in wrappers:
        keys, together = inputs.keys, inputs.keys.memory.buffer.clone()
        keys.memory.buffer.copy_(keys.before)
        run.subject.call(NORMALISE, **keys.arguments)
        require_bits("separate call", {"keys": together}, {"keys": keys.memory.buffer})
    return []


def expected_of(inputs: KeysQueryInputs) -> tuple[Any, ...]:
    """Arguments of the query's reference but its side."""
    q = inputs.tensor("q")
    scales = (inputs.arguments["weights_scale"], 1.0)
    return (q, inputs.tensor("positions")[: len(q)], inputs.table.cpu(), inputs.tensor("weights"), *scales)
