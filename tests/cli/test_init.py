"""`mlagen init`: specs of known models, specs from a model's config.json, and errors of one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cli_specs import Run, written
from click.testing import CliRunner

from mlagen.cli import main
from mlagen.plan import CompressorPlan, LatentsPlan, OutQuantPlan, ProloguePlan, load_plan
from mlagen.plan.families.indexer_cache import KEYS_QUERY
from mlagen.spec import load
from mlagen.spec.from_config import CACHE_WORDS, ENGINES
from mlagen.spec.gpus import TARGETS
from mlagen.spec.known import known_names, specs_dir
from mlagen.spec.load import parse

CONFIGS = Path(__file__).parent / "configs"
TEXT_ONLY = ("--no-compile", "--no-verify")
V32 = json.loads((CONFIGS / "deepseek_v32.json").read_text())
FILE = Path("config.json")
# The values that a config lacks.
SAYING = {
    "dots3": ("--layers", "full"),
    "mistral_large4": ("--layers", "rope"),
    "longcat_flash": ("--dtype", "bf16"),  # the model's own has no dtype
    "mistral_large3_params": ("--dtype", "bf16", "--name", "mistral_large3"),  # nor has params.json, and no model_type
}
DIMS = {  # of each config: heads; latent, RoPE and V; topk and window
    "deepseek_v2": (128, (512, 64, 512), None, None),
    "deepseek_v2_lite": (16, (512, 64, 512), None, None),
    "deepseek_v3": (128, (512, 64, 512), None, None),
    "deepseek_r1": (128, (512, 64, 512), None, None),
    "deepseek_v31": (128, (512, 64, 512), None, None),
    "deepseek_v32": (128, (512, 64, 512), 2048, None),
    "deepseek_v4_flash": (64, (448, 64, 512), 512, 128),
    "deepseek_v4_pro": (128, (448, 64, 512), 1024, 128),
    "deepseek_v4_saved": (64, (448, 64, 512), 512, 128),
    "deepseek_v41": (64, (448, 64, 512), 512, 128),
    "axk2_light": (32, (128, 32, 128), 2048, None),
    "dots3": (128, (512, 64, 512), 2048, None),
    "glm47_flash": (20, (512, 64, 512), None, None),
    "glm5": (64, (512, 64, 512), 2048, None),
    "glm51": (64, (512, 64, 512), 2048, None),
    "glm52": (64, (512, 64, 512), 2048, None),
    "glm53_flash": (64, (512, 0, 512), 2048, None),
    "hy_v4": (32, (512, 64, 512), 2048, None),
    "kimi_k2": (64, (512, 64, 512), None, None),
    "kimi_k25": (64, (512, 64, 512), None, None),
    "kimi_k3": (96, (512, 64, 512), None, None),
    "kimi_linear": (32, (512, 64, 512), None, None),
    "ling3_flash": (32, (512, 64, 512), None, None),
    "longcat_flash": (64, (512, 64, 512), None, None),
    "minicpm3": (40, (256, 32, 256), None, None),
    "mistral_large3": (128, (512, 64, 512), None, None),
    "mistral_large3_params": (128, (512, 64, 512), None, None),
    "mistral_large4": (64, (512, 64, 512), 2048, None),
}
# A known spec that a config also gives, with the options for it.
SAME = {
    "axk2_light": ("axk2_light", ()),
    "dots3": ("dots3", ()),
    "dots3_sliding": ("dots3", ("--layers", "sliding")),
    "dsv2_lite": ("deepseek_v2_lite", ()),
    "dsv3": ("deepseek_v3", ()),
    "dsv3_fp8": ("deepseek_r1", ("--kv-cache-dtype", "fp8")),
    "dsv32_fp8": ("deepseek_v32", ("--kv-cache-dtype", "fp8_ds_mla")),
    "dsv32_nvfp4": ("deepseek_v32", ("--kv-cache-dtype", "nvfp4")),
    "dsv4_flash": ("deepseek_v4_flash", ()),
    "dsv4_pro": ("deepseek_v4_pro", ("--kv-cache-dtype", "fp8")),
    "dsv41": ("deepseek_v41", ()),
    "dsv41_fp8": ("deepseek_v41", ("--kv-cache-dtype", "fp8")),
    "glm47_flash": ("glm47_flash", ()),
    "glm5": ("glm5", ("--kv-cache-dtype", "fp8")),
    "glm53": ("glm53_flash", ()),
    "glm53_fp8": ("glm53_flash", ("--kv-cache-dtype", "fp8_e4m3")),
    "hyv4": ("hy_v4", ()),
    "kimi_k2": ("kimi_k25", ()),
    "kimi_k3": ("kimi_k3", ()),
    "kimi_linear": ("ling3_flash", ()),
    "minicpm3": ("minicpm3", ()),
    "mistral_large3": ("mistral_large3", ()),
    "mistral_large4": ("mistral_large4", ()),
    "dsv3_prefill": ("deepseek_v3", ("--prefill",)),
    "glm5_prefill": ("glm5", ("--for", "transformers")),
    "minicpm3_prefill": ("minicpm3", ("--for", "transformers")),
}

Init = Callable[..., Path]


@pytest.fixture
def init(run: Run, workspace: Path) -> Init:
    """Calls `mlagen init`, for all targets unless arguments name some, and returns the file with its output."""

    def call(*arguments: str) -> Path:
        result = run("init", *map(str, arguments), *([] if "--gpu" in arguments else ["--gpu", "all"]))
        assert result.exit_code == 0, result.stderr
        (workspace / "my.yaml").write_text(result.stdout)
        return workspace / "my.yaml"

    return call


def options(config: str) -> tuple[str, ...]:
    return ("--from", str(CONFIGS / f"{config}.json"), *SAYING.get(config, ()))


@pytest.mark.parametrize("name", known_names())
def test_every_known_spec_comes_back_as_it_is(init: Init, name: str) -> None:
    path = init(name)
    assert load(path) == load(specs_dir() / f"{name}.yaml")
    assert "$schema" not in path.read_text()  # which would not be found there


@pytest.mark.parametrize("name", known_names())
def test_a_known_spec_takes_another_name_and_fewer_gpus(init: Init, name: str) -> None:
    for target in load(specs_dir() / f"{name}.yaml").targets:
        plan = load_plan(init(name, "--name", "mine", "--gpu", target))
        assert (plan.spec.name, plan.spec.targets) == ("mine", (target,))


def test_the_output_of_init_builds(init: Init, run: Run, workspace: Path) -> None:
    init("dsv3_prefill")
    assert run("build", "my.yaml", *TEXT_ONLY).exit_code == 0
    assert (workspace / "generated" / "dsv3_prefill" / "dense_fwd.py").exists()


def test_known_specs_are_those_of_the_repository() -> None:
    assert specs_dir() == Path(__file__).parents[2] / "specs"
    assert {"dsv32", "dsv4_flash", "ckv_kpe"} <= set(known_names())
    assert not {"schema", "tuned"} & set(known_names())


def test_every_config_is_looked_at() -> None:
    assert sorted(path.stem for path in CONFIGS.glob("*.json")) == sorted(DIMS)


@pytest.mark.parametrize("config", DIMS)
def test_a_config_gives_a_spec_of_its_dims_that_plans(init: Init, config: str) -> None:
    spec = load_plan(init(*options(config))).spec
    attention = spec.attention
    assert attention is not None
    found = (spec.model.kv_lora_rank, spec.model.qk_rope_head_dim, spec.model.v_head_dim)
    assert (spec.model.num_heads, found, getattr(attention, "topk", None), attention.window) == DIMS[config]
    assert (spec.model.dtype, spec.targets) == ("bf16", TARGETS)


@pytest.mark.parametrize("name", SAME)
def test_a_config_gives_the_known_spec_of_its_model(init: Init, name: str) -> None:
    config, more = SAME[name]
    known = load(specs_dir() / f"{name}.yaml").model_dump()
    made = load(init(*options(config), *more, *(["--indexer"] if known["indexer"] else []))).model_dump()
    for part in (one for one in ("attention", "multi_head") if known[one] and known[one]["softmax_scale"] is None):
        made[part]["softmax_scale"] = None  # of models that one spec has in common
    if known["attention"] and "shared_indices" in known["attention"]:  # a choice for speed, which init leaves
        made["attention"]["shared_indices"] = known["attention"]["shared_indices"]
    if heads := made["multi_head"]:  # the fastest on sm90; by pointers in the checked-in specs without tma in the name
        assert heads.pop("addressing") == ("descriptors" if heads["v_head_dim"] <= 128 else "pointers")
        known["multi_head"].pop("addressing")
    for part in ("model", "attention", "multi_head", "indexer", "indexer_cache"):
        assert made[part] == known[part]
    for part in ("cache", "extra_cache"):
        assert (made[part] and made[part]["layout"]) == (known[part] and known[part]["layout"])
        assert (made[part] or {}).get("scale_rule") == (known[part] or {}).get("scale_rule")
    more_wrappers = {"triton_convert_req_index_to_global_index", "flash_mla_sparse_fwd", "merge_attn_parts"}
    # Engines call no plugin for these.
    more_wrappers |= {
        "merge_attn_states",
        *ProloguePlan.WRAPPERS,
        *CompressorPlan.WRAPPERS,
        *LatentsPlan.WRAPPERS,
        *OutQuantPlan.WRAPPERS,
        KEYS_QUERY,
    }
    assert set(made["wrappers"]) ^ set(known["wrappers"]) <= more_wrappers


def test_layers_with_a_window_have_a_spec_of_their_own(init: Init) -> None:
    spec = load_plan(init("--from", str(CONFIGS / "dots3.json"), "--layers", "sliding")).spec
    model = spec.model
    assert (model.num_heads, model.kv_lora_rank, model.qk_rope_head_dim, model.v_head_dim) == (64, 1024, 64, 1024)
    assert spec.attention is not None
    assert (spec.name, spec.attention.kind, spec.attention.window) == ("dots3_sliding", "dense", 513)


def test_layers_with_a_window_have_one_before_absorption_too(init: Init) -> None:
    spec = load_plan(init("--from", str(CONFIGS / "dots3.json"), "--layers", "sliding", "--prefill")).spec
    assert spec.multi_head is not None
    heads = spec.multi_head
    assert (heads.qk_head_dim, heads.v_head_dim, heads.window, heads.softmax_scale) == (256, 128, 513, 1 / 16)


@pytest.mark.parametrize("engine", [None, *ENGINES])
@pytest.mark.parametrize("config", ["deepseek_v3", "deepseek_v32", "deepseek_v4_flash"])
def test_every_engine_and_cache_gives_a_spec_that_plans_or_a_line(
    tmp_path: Path, engine: str | None, config: str
) -> None:
    made = 0
    for word in CACHE_WORDS:
        text, refusal = written(
            json.loads((CONFIGS / f"{config}.json").read_text()), engine=engine, kv_cache_dtype=word
        )
        assert (refusal is None) != (text is None)
        if text is not None:
            (tmp_path / "my.yaml").write_text(text)
            load_plan(tmp_path / "my.yaml")
            made += 1
    assert made >= (1 if engine == "transformers" else 4) or config == "deepseek_v4_flash"


def test_the_engine_picks_the_wrappers(init: Init) -> None:
    config = options("deepseek_v32")
    assert load(init(*config, "--for", "sglang")).wrappers == ("flash_mla_sparse_fwd",)
    assert "concat_and_cache_mla" in load(init(*config, "--for", "vllm")).wrappers
    heads = load(init(*config, "--for", "transformers"))
    assert (heads.wrappers, heads.name) == (("flash_attn_varlen_func",), "deepseek_v32_prefill")
    assert heads.multi_head is not None
    assert (heads.multi_head.qk_head_dim, heads.multi_head.v_head_dim, heads.cache) == (192, 128, None)


def test_pages_are_asked_for_where_rows_would_be_flat(init: Init) -> None:
    for more, size in ((), None), (("--block-size", "53"), 53), (("--kv-cache-dtype", "fp8"), 64):
        cache = load(init(*options("deepseek_v32"), *more)).cache
        assert cache is not None
        assert cache.block_size == size


def test_a_config_is_found_in_a_folder_and_read_from_stdin(run: Run, workspace: Path) -> None:
    text = json.dumps(V32)
    (workspace / "config.json").write_text(text)
    from_folder = run("init", "--from", ".", "--gpu", "all").stdout
    from_stdin = CliRunner().invoke(main, ["init", "--from", "-", "--gpu", "all"], input=text)
    assert from_folder == from_stdin.stdout
    assert "name: deepseek_v32\n" in from_folder


def test_an_unknown_model_type_is_taken_with_a_comment(init: Init) -> None:
    text, _ = written(V32 | {"model_type": "newer_v9"})
    assert text is not None
    assert "mlagen does not know this model type" in text
    assert parse(text, FILE).name == "newer_v9"


def test_a_value_of_the_command_line_stands_for_the_configs_and_is_marked(init: Init) -> None:
    values = ("num_attention_heads=5", "index_topk=none", "index_topk=64")
    path = init(*options("deepseek_v32"), *(word for value in values for word in ("--set", value)))
    assert "num_heads: 5 # [--set num_attention_heads]" in path.read_text()
    assert "topk: 64 # [--set index_topk]" in path.read_text()
    dense, _ = written(V32 | {"model_type": "newer"}, values={"index_topk": None})
    assert dense is not None
    assert "kind: dense" in dense


def without(*names: str, **changes: Any) -> dict[str, Any]:
    """V3.2's config without some fields, and with others."""
    return {name: value for name, value in V32.items() if name not in names} | changes


V4 = json.loads((CONFIGS / "deepseek_v4_flash.json").read_text())
DOTS3 = json.loads((CONFIGS / "dots3.json").read_text())
NO_MLA = "so the model has no MLA; mlagen generates kernels only for MLA"
ASK_DTYPE = "pass --dtype bf16 or --dtype fp16"
LINES = {
    "not JSON": ('{"a": 1,\n  b}', {}, "config.json:2:3: not JSON: expecting property name enclosed in double quotes"),
    "empty": ("", {}, "config.json:1:1: not JSON: expecting value"),
    "list": ("[]", {}, "config.json: got a list; takes an object, a model's config.json"),
    "deep": ("[" * 100_000, {}, "config.json: not readable JSON: a number is too long, or it is nested too deep"),
    "long number": ("1" * 5000, {}, "config.json: not readable JSON: a number is too long, or it is nested too deep"),
    "twice": ('{"a": 1, "a": 2}', {}, 'config.json: "a" appears twice in one object; takes each field once'),
    "nothing": ({}, {}, f"config.json: kv_lora_rank: missing, {NO_MLA}"),
    "no MLA": ({"model_type": "llama", "num_attention_heads": 32}, {}, f"config.json: kv_lora_rank: missing, {NO_MLA}"),
    "MLA off": (without(use_mla=False), {}, f"config.json: use_mla: got false, {NO_MLA}"),
    "nested text": (
        {"text_config": 3},
        {},
        "config.json: text_config: got 3; takes an object with the language model's fields",
    ),
    "nested place": (
        {"model_type": "kimi_k25", "text_config": without("num_attention_heads")},
        {},
        "config.json: text_config.num_attention_heads: missing; pass --set num_attention_heads=N",
    ),
    "text": (
        without(num_attention_heads="many"),
        {},
        'config.json: num_attention_heads: got "many"; takes an integer of at least 1',
    ),
    "negative": (without(kv_lora_rank=-1), {}, "config.json: kv_lora_rank: got -1; takes an integer of at least 1"),
    "truth": (
        without(qk_rope_head_dim=True),
        {},
        "config.json: qk_rope_head_dim: got true; takes an integer of at least 0",
    ),
    "fraction": (without(index_topk=2.5), {}, "config.json: index_topk: got 2.5; takes an integer of at least 1"),
    "object": (without(index_topk={}), {}, "config.json: index_topk: got an object; takes an integer of at least 1"),
    "too many heads": (
        without(num_attention_heads=129),
        {},
        "config.json: num_attention_heads: got 129; takes an integer from 1 to 128",
    ),
    "too many for an option": (
        V32,
        {"values": {"kv_lora_rank": 4096}},
        "--set kv_lora_rank: got 4096; takes an integer from 0 to 1024",
    ),
    "no topk": (
        without("index_topk"),
        {},
        "config.json: index_topk: missing, and DeepSeek V3.2 is sparse; pass --set index_topk=N",
    ),
    "no RoPE": (
        without("qk_rope_head_dim"),
        {},
        "config.json: qk_rope_head_dim: missing; pass --set qk_rope_head_dim=N",
    ),
    "no window": (
        {name: value for name, value in V4.items() if name != "sliding_window"},
        {},
        "config.json: sliding_window: missing; pass --set sliding_window=N",
    ),
    "RoPE fills the row": (
        V4 | {"qk_rope_head_dim": 512},
        {},
        "config.json: qk_rope_head_dim: got 512; takes less than head_dim, 512",
    ),
    "no head": (
        without("v_head_dim"),
        {"prefill": True},
        "config.json: v_head_dim: missing; pass --set v_head_dim=N",
    ),
    "wide head": (
        without(qk_nope_head_dim=512),
        {"prefill": True},
        "config.json: qk_nope_head_dim + qk_rope_head_dim: got 576; takes an integer from 1 to 512",
    ),
    "no dtype": (without("torch_dtype"), {}, f"config.json: dtype: missing, and so is torch_dtype; {ASK_DTYPE}"),
    "dtype": (
        without(torch_dtype="float32"),
        {},
        f'config.json: torch_dtype: got "float32"; takes bfloat16 or float16; {ASK_DTYPE}',
    ),
    "dtypes": (
        without(dtype="float16"),
        {},
        f'config.json: dtype: got "float16", but torch_dtype is "bfloat16"; {ASK_DTYPE}',
    ),
    "model type": (without(model_type=4), {}, "config.json: model_type: got 4; takes text"),
    "no model type": (
        without("model_type"),
        {},
        "the config has no model_type to name the spec after; pass --name NAME",
    ),
    "model type is a module's": (
        without(model_type="json"),
        {},
        "--name: got 'json', which would hide the Python module of that name; takes another name, for example "
        "'json_mla'",
    ),
    "name": (
        V32,
        {"name": "a b"},
        "--name: got 'a b'; takes text: a lower-case letter, then up to 62 lower-case letters, digits or underscores",
    ),
    "two kinds of layers": (
        DOTS3,
        {},
        "config.json: text_config.sliding_window: some layers have a sliding window and other dims; "
        "pass --layers full or --layers sliding",
    ),
    "one kind of layers": (
        V32,
        {"layers": "full"},
        "--layers: got full; leave it out, since by its config the model has only one kind of layers",
    ),
    "two windows": (
        without("index_topk", model_type="newer", sliding_window=512, sliding_window_size=513),
        {},
        "config.json: sliding_window: got 512, but sliding_window_size is 513; pass --set sliding_window=N, the number "
        "of keys that a token sees, including its own",
    ),
    "cache of another model": (
        V4,
        {"kv_cache_dtype": "nvfp4"},
        "--kv-cache-dtype: got nvfp4; takes auto, bf16, fp8, fp8_ds_mla for DeepSeek V4 in bf16",
    ),
    "cache of another dtype": (
        V32,
        {"kv_cache_dtype": "fp8", "dtype": "fp16"},
        "--kv-cache-dtype: got 'fp8_ds_mla', which holds rope columns in bf16; takes fp16 (model.dtype) or a "
        "quantised dtype there",
    ),
    "page": (V32, {"block_size": 5000}, "--block-size: got 5000; takes an integer from 1 to 4096"),
    "cache of no cache": (
        V32,
        {"kv_cache_dtype": "fp8", "engine": "transformers"},
        "--kv-cache-dtype: takes no value with --prefill or --for transformers, which read no cache",
    ),
    "heads of one row": (
        V4,
        {"prefill": True},
        "DeepSeek V4 has one row of K and V for all heads; leave out --prefill and --for transformers",
    ),
}


@pytest.mark.parametrize("case", LINES)
def test_a_config_without_a_spec_gives_one_line(case: str) -> None:
    config, wishes, line = LINES[case]
    assert written(config, **wishes) == (None, line)


NAMES = ", ".join(known_names())
USAGE = {
    "nothing": ((), f"got neither NAME nor --from; takes --from CONFIG or one NAME: {NAMES}"),
    "both": (("dsv32", "--from", "."), f"got both NAME and --from; takes --from CONFIG or one NAME: {NAMES}"),
    "upper case": (("DSV32",), f"NAME: got 'DSV32'; takes one of {NAMES}; did you mean dsv32?"),
    "a repository": (
        ("deepseek-ai/DeepSeek-V3.2",),
        f"NAME: got 'deepseek-ai/DeepSeek-V3.2'; takes one of {NAMES}; did you mean dsv32 or dsv32_fp8 or "
        "dsv32_fp8_tensor?",
    ),
    "nothing like it": (("llama",), f"NAME: got 'llama'; takes one of {NAMES}"),
    "unknown": (("dsv4_flahs",), f"NAME: got 'dsv4_flahs'; takes one of {NAMES}; did you mean dsv4_flash?"),
    "path": (("../../specs/mine",), f"NAME: got '../../specs/mine'; takes one of {NAMES}"),
    "engine": (("dsv32", "--for", "vllm"), "--for needs --from CONFIG; the spec of dsv32 has its own value"),
    "name": (
        ("dsv32", "--name", "My"),
        "--name: got 'My'; takes text: a lower-case letter, then up to 62 lower-case letters, digits or underscores",
    ),
    "gpu": (
        ("dsv3_prefill_tma", "--gpu", "a100"),
        "--gpu: got a GPU of sm80; dsv3_prefill_tma takes GPUs of sm90, sm100, sm120",
    ),
    "no file": (
        ("--from", "none.json"),
        "none.json: no such file; takes the path of a config.json or of its folder, no repository",
    ),
    "no path": (("--from", "a\0b"), "a\0b: cannot be read: embedded null byte"),
}


@pytest.mark.parametrize("case", USAGE)
def test_bad_usage_is_one_line_and_prints_no_spec(run: Run, case: str) -> None:
    arguments, line = USAGE[case]
    result = run("init", *arguments)
    assert (result.exit_code, result.stdout, result.stderr) == (2, "", f"{line}\n")


@pytest.mark.parametrize("setting", ["heads=5", "kv_lora_rank", "kv_lora_rank=-1", "kv_lora_rank=x", "=5", "a\n=5"])
def test_a_setting_that_is_none_is_refused(run: Run, setting: str) -> None:
    result = run("init", "--from", ".", "--set", setting)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"--set: got {setting!r}; takes FIELD=N, N a number or none, FIELD one of num_")
