"""`mlagen init --from CONFIG`: any config gives a spec or one line, and no text of it is passed on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cli_specs import written
from hypothesis import given, settings
from hypothesis import strategies as st

from mlagen.spec.from_config import CACHE_WORDS, ENGINES
from mlagen.spec.hf_config import FIELDS, LAYERS
from mlagen.spec.load import parse

CONFIGS = Path(__file__).parent / "configs"
FILE = Path("config.json")
V32, V4, DOTS3, LARGE4 = (
    json.loads((CONFIGS / f"{name}.json").read_text())
    for name in ("deepseek_v32", "deepseek_v4_flash", "dots3", "mistral_large4")
)

SETTINGS = settings(
    max_examples=150, deadline=None, derandomize=True
)  # no clocks, so that a busy machine fails nothing
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["bfloat16", 64, 512]),
    lambda below: st.lists(below, max_size=3) | st.dictionaries(st.text(max_size=8), below, max_size=3),
    max_leaves=6,
)
OTHERS = (
    "model_type dtype torch_dtype text_config use_mla layer_types per_layer_config sliding_window_size n_heads "
    "no_rope_layers kv_source_layers linear_attn_config hidden_size partial_rotary_factor use_sliding_window "
    "indexer_rope_interleave"
)
FIELD = st.sampled_from([*FIELDS, *OTHERS.split()])
WISHES = st.fixed_dictionaries(
    {},
    optional={
        "engine": st.sampled_from(ENGINES),
        "kv_cache_dtype": st.sampled_from(list(CACHE_WORDS)),
        "layers": st.sampled_from(LAYERS),
        "prefill": st.booleans(),
        "indexer": st.booleans(),
        "dtype": st.sampled_from(["bf16", "fp16"]),
        "name": st.just("mine"),
    },
)


@SETTINGS
@given(text=st.text() | st.recursive(VALUES, st.lists).map(json.dumps), wishes=WISHES)
def test_any_text_is_refused_in_one_line(text: str, wishes: dict[str, Any]) -> None:
    assert written(text, **wishes)[0] is None


@SETTINGS
@given(
    config=st.sampled_from([V32, V4, DOTS3, DOTS3["text_config"], LARGE4["text_config"]]),
    changes=st.dictionaries(FIELD, VALUES, max_size=3),
    wishes=WISHES,
)
def test_any_change_of_a_config_gives_a_spec_or_one_line(
    config: dict[str, Any], changes: dict[str, Any], wishes: dict[str, Any]
) -> None:
    text, refusal = written(config | changes, **wishes)
    if text is not None:
        parse(text, FILE)
        assert text.isascii()
    else:
        assert refusal


@pytest.mark.parametrize("text", ["x\nname: y", "{{ 7 * 7 }}", "\u202e", "a" * 500, "${HOME}", "# ", "ä"])
def test_no_text_of_a_config_reaches_the_spec(text: str) -> None:
    made, refusal = written(V32 | {"model_type": text, "architectures": [text], text: text}, name="mine")
    assert refusal is None
    assert made == written({name: value for name, value in V32.items() if name != "model_type"}, name="mine")[0]
