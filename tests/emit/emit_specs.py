"""Specs for tests of the emitter: those of real models, and any that is valid."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

from hypothesis import assume
from hypothesis import strategies as st
from layout_specs import caches

from mlagen.errors import LimitError
from mlagen.plan import make_plan
from mlagen.spec import Spec, load
from mlagen.spec.models import Target, WrapperName

ROOT = Path(__file__).parents[2]
PATHS = sorted((ROOT / "specs").glob("*.yaml"))


def make_spec(**changes: Any) -> Spec:
    """The spec of DeepSeek V3.2; `changes` replace fields of any of its parts by name."""
    data = load(ROOT / "specs" / "dsv32.yaml").model_dump()
    for name, value in changes.items():
        (part,) = [part for part in (data, *data.values()) if isinstance(part, dict) and name in part]
        part[name] = value
    return Spec.model_validate(tuples(data))


def tuples(value: Any) -> Any:
    """Lists as tuples, which is what the models take."""
    if isinstance(value, list):
        return tuple(map(tuples, value))
    return {key: tuples(below) for key, below in value.items()} if isinstance(value, dict) else value


def some_of(options: Any) -> st.SearchStrategy[tuple[str, ...]]:
    """At least one of the options, in any order."""
    every = get_args(options)
    return st.lists(st.sampled_from(every), min_size=1, max_size=len(every), unique=True).map(tuple)


@st.composite
def specs(draw: st.DrawFn) -> Spec:
    """Any spec."""
    any_dims = st.tuples(st.integers(1, 1024), st.just(0) | st.integers(0, 256))
    rank, rope = draw(st.sampled_from([(512, 64), (512, 0), (448, 64)]) | any_dims)
    dtype = draw(st.sampled_from(["bf16", "fp16"]))
    window = draw(st.none() | st.integers(1, 65536))
    presence = st.sampled_from(["none", "optional", "required"])
    spec = make_spec(
        title=draw(st.from_regex(r"[A-Za-z0-9][A-Za-z0-9 ()+,./:;_-]{0,78}", fullmatch=True)),
        num_heads=draw(st.integers(1, 128)),
        kv_lora_rank=rank,
        qk_rope_head_dim=rope,
        v_head_dim=draw(st.just(rank) | st.integers(1, rank + rope)),
        dtype=dtype,
        topk=draw(st.integers(1, 65536)),
        attn_sink=draw(presence),
        topk_length=draw(presence),
        lse_base=draw(st.sampled_from(["e", "2"])),
        empty_row_lse=draw(st.sampled_from(["+inf", "-inf"])),
        window=window,
        cache=draw(caches(rank, rope, dtype)),
        extra_cache=None if window is None else draw(st.none() | caches(rank, rope, dtype)),
        wrappers=draw(some_of(WrapperName)),
        targets=draw(some_of(Target)),
    )
    assume(_fits(spec))
    return spec


def _fits(spec: Spec) -> bool:
    try:
        make_plan(spec)
    except LimitError:
        return False
    return True
