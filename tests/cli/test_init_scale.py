"""`mlagen init --from CONFIG`: the softmax scale of a model, and fields that change its scores otherwise."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cli_specs import Run

from mlagen.errors import MlagenError
from mlagen.spec import Spec
from mlagen.spec.from_config import MadeSpec, Wishes, spec_from_config
from mlagen.spec.hf_scores import SCORES
from mlagen.spec.load import parse

CONFIGS = Path(__file__).parent / "configs"
FILE = Path("config.json")
PLAIN = 192**-0.5  # of heads of 128 + 64 columns


def yarn(factor: float, amount: float = 1.0) -> float:
    """The scale of such heads as DeepSeek's classes compute it."""
    mscale = 0.1 * amount * math.log(factor) + 1.0
    return PLAIN * mscale * mscale


SCALES = {
    "deepseek_v2": yarn(40, 0.707),
    "deepseek_v2_lite": yarn(40, 0.707),
    "deepseek_v3": yarn(40),
    "deepseek_r1": yarn(40),
    "deepseek_v31": yarn(40),
    "deepseek_v32": yarn(40),
    "deepseek_v4_flash": 512**-0.5,
    "deepseek_v41": 512**-0.5,
    "kimi_k2": yarn(32),
    "kimi_k25": yarn(64),
    "kimi_k3": PLAIN,
    "glm5": 1 / 16,
    "glm47_flash": 1 / 16,
    "glm53_flash": 1 / 16,
    "minicpm3": 96**-0.5,
    "longcat_flash": PLAIN,
    "kimi_linear": PLAIN,
    "ling3_flash": PLAIN,
    "axk2_light": 96**-0.5,
    "mistral_large3_params": PLAIN,
}


def fields_of(name: str, **changes: Any) -> dict[str, Any]:
    """A config, with some fields changed; those that are None are left out."""
    fields = json.loads((CONFIGS / f"{name}.json").read_text()) | changes
    return {name: value for name, value in fields.items() if value is not None}


def made(fields: dict[str, Any], **wishes: Any) -> MadeSpec:
    return spec_from_config(json.dumps(fields), FILE, Wishes(**{"dtype": "bf16", "name": "mine", **wishes}))


def spec_of(fields: dict[str, Any], **wishes: Any) -> Spec:
    return parse(made(fields, **wishes).text, FILE)


def refusal(fields: dict[str, Any], **wishes: Any) -> str:
    with pytest.raises(MlagenError) as caught:
        made(fields, **wishes)
    assert caught.value.exit_code == 2
    return str(caught.value)


def scale_of(fields: dict[str, Any], **wishes: Any) -> float | None:
    attention = spec_of(fields, **wishes).attention
    assert attention is not None
    return attention.softmax_scale


def test_deepseek_v31_has_yarns_factor_squared() -> None:
    assert scale_of(fields_of("deepseek_v31")) == pytest.approx(192**-0.5 * 1.3688879454113936**2, rel=1e-15)
    assert f"{yarn(40):.4f}" == "0.1352"


@pytest.mark.parametrize("name", SCALES)
def test_a_config_gives_the_scale_that_its_models_class_computes(name: str) -> None:
    assert scale_of(fields_of(name)) == SCALES[name]


@pytest.mark.parametrize("name", ["deepseek_v31", "minicpm3", "glm5"])
def test_attention_before_absorption_has_the_same_scale(name: str) -> None:
    multi_head = spec_of(fields_of(name), prefill=True).multi_head
    assert multi_head is not None
    assert multi_head.softmax_scale == SCALES[name]


V31 = fields_of("deepseek_v31", rope_scaling=None)
YARN = {"rope_type": "yarn", "factor": 40, "mscale_all_dim": 1.0}


def test_both_spellings_of_rope_are_read_the_newer_first() -> None:
    for name in ("rope_scaling", "rope_parameters"):
        assert scale_of({**V31, name: YARN}) == yarn(40)
        assert scale_of({**V31, name: {**YARN, "rope_type": "deepseek_yarn"}}) == yarn(40)
    assert scale_of({**V31, "rope_parameters": {"rope_type": "default"}, "rope_scaling": YARN}) == PLAIN


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "mscale_all_dim": 1.0, "factor": 40},
        {"rope_type": "yarn", "factor": 40},
        {"rope_type": "yarn", "factor": 40, "mscale": 1.0, "mscale_all_dim": 0},
        {"rope_type": "yarn", "factor": 1, "mscale_all_dim": 1.0},
        {**YARN, "apply_yarn_scaling": False},
    ],
)
def test_without_a_factor_of_all_columns_the_scale_is_plain(rope: dict[str, Any]) -> None:
    assert scale_of({**V31, "rope_parameters": rope}) == PLAIN


def test_mistrals_params_json_says_whether_yarn_scales() -> None:
    fields = fields_of("mistral_large3_params")
    assert scale_of(fields | {"yarn": fields["yarn"] | {"apply_scale": True}}) == yarn(36)


def test_rope_of_each_kind_of_layers_gives_each_its_own_scale() -> None:
    dots = fields_of("dots3")
    rope = {"full_attention": YARN, "sliding_attention": {"rope_type": "default"}}
    dots["text_config"] |= {"rope_parameters": rope}
    assert scale_of(dots, layers="full") == yarn(40)
    assert scale_of(dots, layers="sliding") == (192 + 64) ** -0.5


@pytest.mark.parametrize("layers", ["rope", "nope"])
def test_layers_with_and_without_rope_have_the_scale_of_equal_heads(layers: str) -> None:
    assert scale_of(fields_of("mistral_large4"), layers=layers) == 128**-0.5


REFUSED = {
    "no factor": (
        {"rope_parameters": {"rope_type": "yarn", "mscale_all_dim": 1.0}},
        "config.json: rope_parameters.factor: missing; takes a number above 0, up to 1e+06; pass --softmax-scale X",
    ),
    "text": (
        {"rope_scaling": {**YARN, "factor": "40"}},
        "config.json: rope_scaling.factor: got no number; takes a number above 0, up to 1e+06; pass --softmax-scale X",
    ),
    "no type": (
        {"rope_scaling": {"factor": 40, "mscale_all_dim": 1.0}},
        "config.json: rope_scaling.rope_type: missing, and so is type, although mscale_all_dim is given; pass "
        "--softmax-scale X",
    ),
    "a list": ({"rope_scaling": [1]}, "config.json: rope_scaling: takes an object with RoPE's parameters"),
    "no columns": (
        {"qk_nope_head_dim": None},
        "config.json: qk_nope_head_dim: missing, and the softmax scale needs it; pass --set qk_nope_head_dim=N",
    ),
    "a class of its own": (
        {"model_type": "mistral4"},
        "config.json: rope_parameters: missing, and the model's class then has its own softmax scale; "
        "pass --softmax-scale X",
    ),
    "a cap": (
        {"attn_logit_softcapping": 50.0},
        "config.json: attn_logit_softcapping: soft-caps the logits, which no kernel supports",
    ),
    "another rule": (
        {"query_pre_attn_scalar": 256},
        "config.json: query_pre_attn_scalar: gives the softmax scale as X**-0.5, which is not MLA's rule; "
        "pass --softmax-scale X",
    ),
    "a sink in dense attention": (
        {"attention_sink": True},
        "config.json: attention_sink: gives each head a sink, which kernels of dense attention do not support",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_config_with_unknown_scores_is_refused_by_field(case: str) -> None:
    changes, line = REFUSED[case]
    assert refusal({name: value for name, value in (V31 | changes).items() if value is not None}) == line


def test_the_option_stands_for_the_config() -> None:
    unknown = {**V31, "query_pre_attn_scalar": 256, "rope_parameters": {"rope_type": "yarn", "mscale_all_dim": 1.0}}
    text = made(unknown, softmax_scale=0.25).text
    assert "  softmax_scale: 0.25 # [--softmax-scale]\n" in text


def test_a_sink_is_taken_where_kernels_have_one() -> None:
    sparse = spec_of(fields_of("deepseek_v32", attention_sink=True)).attention
    assert getattr(sparse, "attn_sink", None) == "required"
    line = "--prefill, --for transformers: the model has sinks, which kernels before absorption do not support"
    assert refusal(fields_of("hy_v4"), prefill=True) == line


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("longcat_flash", "scales the latent by (hidden_size / kv_lora_rank)**0.5 [mla_scale_kv_lora]"),
        ("longcat_flash", "scales q by (hidden_size / q_lora_rank)**0.5 [mla_scale_q_lora]"),
        (
            "dots3",
            "scales q by (hidden_size / q_lora_rank)**0.5 and the latent by (hidden_size / kv_lora_rank)**0.5 "
            "[apply_mla_qkv_lora_rescale]",
        ),
        (
            "mistral_large4",
            "scales q and the indexer's query by a * ln(position + 1) + b, with a and b of each head from the "
            "checkpoint [softmax_scaling]",
        ),
        ("mistral_large3_params", "scales q by its position [llama_4_scaling]"),
    ],
)
def test_work_left_to_the_caller_is_named_in_the_spec_and_on_stderr(name: str, said: str) -> None:
    spec = made(fields_of(name), layers={"dots3": "full", "mistral_large4": "rope"}.get(name))
    assert f"# Before attention the caller {said}.\n" in spec.text
    assert f"before attention the caller {said}" in spec.notes


def test_a_factor_by_position_is_found_among_ropes_parameters() -> None:
    rope = {**YARN, "llama_4_scaling_beta": 0.1}
    spec = made({**V31, "model_type": "mistral4", "rope_parameters": rope})
    assert "before attention the caller scales q by its position [rope_parameters.llama_4_scaling_beta]" in spec.notes


def switched(name: str) -> Iterator[dict[str, Any]]:
    """Configs with a field of SCORES that is off."""
    for value in (None, False, 0, 0.0):
        if not (name == "learnable_sink_init" and value is not False and value is not None):
            yield {**V31, name: value}


@pytest.mark.parametrize("name", SCORES)
def test_a_field_that_is_turned_off_changes_nothing(name: str) -> None:
    plain = made(V31)
    for fields in switched(name):
        assert made(fields) == plain


@pytest.mark.parametrize("name", SCORES)
def test_a_field_that_is_on_is_never_dropped(name: str) -> None:
    fields = {**V31, name: 0.5}
    effect = SCORES[name].effect
    if effect == "caller":
        assert name in made(fields).text
    else:
        assert refusal(fields).startswith(f"config.json: {name}: ")


def test_the_command_line_says_the_scale_and_the_notes(run: Run, workspace: Path) -> None:
    (workspace / "config.json").write_text(json.dumps(fields_of("longcat_flash", torch_dtype="bfloat16")))
    result = run("init", "--from", "config.json", "--gpu", "h200", "--softmax-scale", "0.5")
    assert result.exit_code == 0
    assert "softmax_scale: 0.5 # [--softmax-scale]" in result.stdout
    assert "before attention the caller scales q by (hidden_size / q_lora_rank)**0.5" in result.stderr


SPARSE = {"index_topk": 64, "index_n_heads": 64, "index_head_dim": 128, "model_type": "deepseek_v32"}


@pytest.mark.interpreter
@pytest.mark.parametrize("changes", [{}, SPARSE], ids=["dense", "sparse"])
def test_wrappers_without_a_scale_have_the_models(
    changes: dict[str, Any], run: Run, workspace: Path, tmp_path: Path
) -> None:
    (workspace / "config.json").write_text(json.dumps(fields_of("deepseek_v31", **changes)))
    spec = run("init", "--from", "config.json", "--gpu", "a100", "--name", "mine", "--for", "vllm")
    (workspace / "my.yaml").write_text(spec.stdout)
    assert run("build", "my.yaml", "--no-compile", "--no-verify").exit_code == 0
    called = [sys.executable, str(CONFIGS.parent / "scale_call.py"), "generated", "mine", repr(yarn(40))]
    done = subprocess.run(called, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    errors = json.loads(done.stdout)
    assert len(errors) == 2
    for with_yarn, without in errors:
        assert with_yarn < 0.02 < 0.2 < without  # of outputs up to 4 in bf16
