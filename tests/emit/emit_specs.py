"""Specs for tests of the emitter: those of real models, and any that is valid."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

from attention_specs import attention_of
from hypothesis import assume
from hypothesis import strategies as st
from layout_specs import caches, has_hadamard, indexers, keys_dtype

from mlagen.errors import LimitError
from mlagen.plan import FAMILIES, make_plan
from mlagen.plan.tiles.chunks import split_columns
from mlagen.spec import NEEDS, SparseAttention, Spec
from mlagen.spec.targets import Target

ROOT = Path(__file__).parents[2]
MOST_BLOCKS = 5  # of V: as many as a latent is cut into at most; lines of dense attention are too wide for more
KINDS = ("sparse", "dense", None)
GENERATED = {name for family in FAMILIES for name in family.WRAPPERS}


def make_spec(**changes: Any) -> Spec:
    """DeepSeek V3.2's attention; `changes` replace fields of any of its parts by name."""
    data = attention_of("dsv32")
    data["attention"]["shared_indices"] = None  # which few dims and targets can have
    data.pop("partials", None)  # which wrappers without attention have not
    for name, value in changes.items():
        if name in ("multi_head", "indexer", "indexer_cache", "partials"):  # which a spec without leaves out
            data[name] = value
            continue
        (part,) = [part for part in (data, *data.values()) if isinstance(part, dict) and name in part]
        part[name] = value
    return Spec.model_validate(tuples(data))


def tuples(value: Any) -> Any:
    """Lists as tuples, as the models take them."""
    if isinstance(value, list):
        return tuple(map(tuples, value))
    return {key: tuples(below) for key, below in value.items()} if isinstance(value, dict) else value


def some_of(options: Sequence[str]) -> st.SearchStrategy[tuple[str, ...]]:
    """At least one of the options, in any order."""
    return st.lists(st.sampled_from(options), min_size=1, max_size=len(options), unique=True).map(tuple)


@st.composite
def attentions(draw: st.DrawFn) -> dict[str, Any] | None:
    """Any attention of a spec, or none."""
    lse = {
        "lse_base": draw(st.sampled_from(["e", "2"])),
        "empty_row_lse": draw(st.sampled_from(["+inf", "-inf"])),
    }
    presence = st.sampled_from(["none", "optional", "required"])
    kind = draw(st.sampled_from(KINDS))
    if kind is None:
        return None
    if kind == "dense":
        return {"kind": kind, "window": draw(st.none() | st.integers(1, 1 << 20)), **lse}
    return {
        "kind": kind,
        "topk": draw(st.integers(1, 4096)),  # which an indexer can pick
        "window": draw(st.none() | st.integers(1, 65536)),
        "attn_sink": draw(presence),
        "topk_length": draw(presence),
        **lse,
    }


@st.composite
def multi_heads(draw: st.DrawFn) -> dict[str, Any]:
    """Any dims of multi-head attention. Its heads have K and V of their own or share one."""
    return {
        "qk_head_dim": draw(st.sampled_from([192, 96, 40]) | st.integers(1, 512)),
        "v_head_dim": draw(st.sampled_from([128, 64, 72]) | st.integers(1, 512)),
        "num_kv_heads": draw(st.sampled_from([None, 1])),
        "addressing": draw(st.sampled_from(["pointers", "descriptors"])),
    }


@st.composite
def specs(draw: st.DrawFn) -> Spec:
    """Any spec."""
    any_dims = st.tuples(st.integers(1, 1024), st.just(0) | st.integers(0, 256))
    rank, rope = draw(st.sampled_from([(512, 64), (512, 0), (448, 64)]) | any_dims)
    style = draw(st.sampled_from([None, "neox", "gptj"])) if rope and rope % 2 == 0 else None
    blocks = len(split_columns(rank)) + len(split_columns(rope) if rope else ())
    values = draw(st.sampled_from([rank, rank + rope] if blocks <= MOST_BLOCKS else [rank]))
    is_whole = values == rank + rope and values >= 128 and values.bit_count() == 1
    dtype = draw(st.sampled_from(["bf16", "fp16"]))
    attention = draw(attentions())
    kind = attention and attention["kind"]
    two_caches = kind == "sparse" and attention["window"] is not None
    multi_head = draw(st.none() | multi_heads())
    # Multi-head attention has a natural LSE and no sink.
    alike = attention is None or (attention["lse_base"] == "e" and attention.get("attn_sink") != "required")
    indexed = draw(indexers(attention["topk"] if kind == "sparse" else None, dtype)) if kind != "dense" else {}
    fitting = [
        name
        for name, needs in NEEDS.items()
        if name in GENERATED
        and (not needs.attention or kind in needs.attention)
        and ((multi_head is not None and alike) or not needs.multi_head)
        and ("indexer" in indexed or not needs.indexer)
        and (indexed.get("indexer", {}).get("rope_head_dim") or not needs.indexer_rope)
        and (style is not None or not needs.rope)
        and ((style == "gptj" and rank % 2 == 0) or not needs.gptj)
        and (is_whole or not needs.whole_values)
        and (keys_dtype(indexed) in needs.indexer_cache or not needs.indexer_cache)
        and (has_hadamard(indexed) or not needs.hadamard)
        and ("candidates" in indexed.get("indexer", {}) or not needs.candidates)
    ]
    wrappers = list(draw(some_of(fitting)))
    for name in wrappers:  # those that are added, too
        for group in NEEDS[name].beside:
            if not set(group) & set(wrappers):
                wrappers.append(next(one for one in group if one in fitting))
    spec = make_spec(
        title=draw(st.from_regex(r"[A-Za-z0-9][A-Za-z0-9 ()+,./:;_-]{0,78}", fullmatch=True)),
        num_heads=draw(st.integers(1, 128)),
        kv_lora_rank=rank,
        qk_rope_head_dim=rope,
        rope=style,
        v_head_dim=values,
        dtype=dtype,
        attention=attention,
        cache=draw(caches(rank, rope, dtype)),
        extra_cache=draw(st.none() | caches(rank, rope, dtype)) if two_caches else None,
        **({} if multi_head is None else {"multi_head": multi_head}),
        **indexed,
        wrappers=tuple(wrappers),
        targets=draw(some_of(get_args(Target))),
    )
    if any(NEEDS[name].attention for name in spec.wrappers):
        spec = spec.model_copy(update={"partials": draw(st.sampled_from(["fp32", "bf16", "fp16"]))})
    spec = spec.model_copy(update={"ops": draw(st.booleans())})
    assume(_fits(spec))
    if not isinstance(spec.attention, SparseAttention):
        return spec
    attention = spec.attention.model_copy(update={"shared_indices": draw(st.sampled_from([None, 2, 4]))})
    shares = spec.model_copy(update={"attention": attention})
    return shares if _fits(shares) else spec


def _fits(spec: Spec) -> bool:
    try:
        make_plan(spec)
    except LimitError:
        return False
    return True
