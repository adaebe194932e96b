"""`mlagen init --from CONFIG`: names of specs, where a model's fields are, hybrids, and caches that engines refuse."""

from __future__ import annotations

import codecs
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from cli_specs import Run

from mlagen.errors import MlagenError
from mlagen.spec.from_config import MadeSpec, Wishes, spec_from_config
from mlagen.spec.load import parse
from mlagen.spec.rules import TAKEN_NAMES

CONFIGS = Path(__file__).parent / "configs"
V3 = json.loads((CONFIGS / "deepseek_v3.json").read_text())
KIMI_VL = {"model_type": "kimi_vl", "torch_dtype": "bfloat16", "text_config": V3, "vision_config": {"num_heads": 16}}


def made(fields: dict[str, Any], file: str = "config.json", **wishes: Any) -> MadeSpec:
    return spec_from_config(json.dumps(fields), Path(file), Wishes(**wishes))


def name_of(fields: dict[str, Any], file: str = "/models/config.json") -> str:
    return parse(made(fields, file).text, Path("my.yaml")).name


HUB = "/data/huggingface/hub/models--{}/snapshots/f7361cd9ff99396dbf6bd644ad846015e59ed4fc/config.json"


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("DeepSeek-R1/config.json", "deepseek_r1"),
        ("DeepSeek-V3.1/config.json", "deepseek_v3_1"),
        ("deepseek_v31.json", "deepseek_v31"),
        ("Moonlight-16B-A3B/config.json", "moonlight_16b_a3b"),
        (HUB.format("deepseek-ai--DeepSeek-V3.1-Terminus"), "deepseek_v3_1_terminus"),
        (HUB.format("some-one--Own"), "own"),
        ("work/config.json", "deepseek_v3"),
        ("2024/params.json", "deepseek_v3"),
        ("stdin", "deepseek_v3"),
    ],
)
def test_a_place_that_tells_names_the_spec(file: str, name: str) -> None:
    assert name_of(V3, file if file == "stdin" or file.startswith("/") else f"/models/{file}") == name


def test_else_the_outermost_model_type_does() -> None:
    assert name_of(KIMI_VL) == "kimi_vl"
    assert name_of(KIMI_VL, "/models/Kimi-VL-A3B-Instruct/config.json") == "kimi_vl_a3b_instruct"
    assert name_of(json.loads((CONFIGS / "mistral_large3.json").read_text())) == "mistral3"


def test_how_to_name_it_otherwise_is_said() -> None:
    assert made(V3, "/models/DeepSeek-R1/config.json").notes == (
        "named deepseek_r1; for another name, pass --name NAME",
    )
    assert made(V3, name="mine").notes == ()


@pytest.mark.parametrize("name", ["vllm", "sglang", "transformers", "flash_mla", "deep_gemm", "torch", "numpy", "json"])
def test_names_of_others_modules_are_reserved(name: str) -> None:
    with pytest.raises(MlagenError, match=f"--name: got '{name}', which would hide the Python module of that name"):
        made(V3, name=name)
    assert sys.stdlib_module_names < TAKEN_NAMES


def test_fields_are_found_at_any_depth_and_their_path_is_named() -> None:
    fields = {"model_type": "omni", "torch_dtype": "bfloat16", "thinker_config": {"text_config": V3}}
    text = made(fields).text
    assert "Brackets name the config's fields (of thinker_config.text_config).\n" in text
    assert "  kv_lora_rank: 512 # [thinker_config.text_config.kv_lora_rank]\n" in text
    assert parse(text, Path("my.yaml")).name == "omni"
    without = {name: value for name, value in V3.items() if name != "num_attention_heads"}
    fields["thinker_config"] = {"text_config": without}
    with pytest.raises(MlagenError, match=r"config\.json: thinker_config\.text_config\.num_attention_heads: missing"):
        made(fields)


def test_an_object_of_attention_takes_other_fields_from_the_objects_around_it() -> None:
    dims = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    outer = {name: value for name, value in V3.items() if name not in dims}
    spec = parse(made(outer | {"attention": {name: V3[name] for name in dims}}).text, Path("my.yaml"))
    plain = parse(made(V3).text, Path("my.yaml"))
    assert spec == plain
    with pytest.raises(MlagenError, match=r"config\.json: num_attention_heads: got -1; takes an integer"):
        made(outer | {"num_attention_heads": -1, "attention": {name: V3[name] for name in dims}})


def test_two_models_in_a_config_are_refused_with_their_paths() -> None:
    fields = {"model_type": "two", "talker": V3, "thinker": V3}
    with pytest.raises(MlagenError, match=r"kv_lora_rank: appears in several objects: talker, thinker; takes the"):
        made(fields)


@pytest.mark.parametrize("mark", [codecs.BOM_UTF8, codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE])
def test_a_byte_order_mark_is_read(mark: bytes, run: Run, workspace: Path) -> None:
    encodings = {codecs.BOM_UTF8: "utf-8", codecs.BOM_UTF16_LE: "utf-16-le", codecs.BOM_UTF16_BE: "utf-16-be"}
    (workspace / "config.json").write_bytes(mark + json.dumps(V3).encode(encodings[mark]))
    result = run("init", "--from", "config.json", "--gpu", "h200", "--name", "mine")
    assert (result.exit_code, result.stderr) == (0, "")
    (workspace / "my.yaml").write_bytes(mark + result.stdout.encode(encodings[mark]))
    assert run("show", "plan", "my.yaml").exit_code == 0


KDA = {"full_attn_layers": [4, 8], "kda_layers": [1, 2, 3, 5, 6, 7]}
FOUR = ["linear_attention"] * 3 + ["full_attention"]
HYBRIDS = {
    "numbers": ({"linear_attn_config": KDA, "num_hidden_layers": 8}, "2 of 8 layers with MLA, 3, 7 counted from 0"),
    "kinds": ({"layer_types": FOUR * 2}, "2 of 8 layers with MLA, 3, 7 counted from 0 [layer_types]"),
    "another kind": ({"layer_types": ["mamba", "attention"]}, "1 of 2 layers with MLA, 1 counted from 0"),
    "many": ({"layer_types": FOUR * 9}, "9 of 36 layers with MLA, 3, 7, 11, 15, 19, 23, ... counted from 0"),
    "groups": (
        {"layer_group_size": 8, "num_hidden_layers": 20},
        "6 of 20 layers with MLA, 7, 15, 16, 17, 18, 19 counted from 0 [layer_group_size]",
    ),
    "not given": ({"linear_attn_config": {"num_heads": 32}}, "its layers with MLA; others have linear attention"),
}


@pytest.mark.parametrize("model_type", ["kimi_linear", "newer_v9"])
@pytest.mark.parametrize("case", HYBRIDS)
def test_the_spec_of_a_hybrid_names_the_layers_of_the_package(case: str, model_type: str) -> None:
    changes, said = HYBRIDS[case]
    spec = made(V3 | changes | {"model_type": model_type})
    assert f"# For {said}" in spec.text
    assert any(note.startswith(f"for {said}") for note in spec.notes)


@pytest.mark.parametrize("kinds", [["full_attention"] * 2, ["sliding_attention", "full_attention"], [], "linear", [3]])
def test_a_model_with_mla_in_all_layers_names_no_layers(kinds: Any) -> None:
    assert "layers with MLA" not in made(V3 | {"layer_types": kinds}).text


KINDS = {
    ("dots3", "full"): ("13 of 46 layers: 0, 1, 5, 9, 13, 17, ... counted from 0 [layer_types]", "sliding"),
    ("dots3", "sliding"): ("33 of 46 layers: 2, 3, 4, 6, 7, 8, ... counted from 0 [layer_types]", "full"),
    ("mistral_large4", "rope"): ("54 of 72 layers: 0, 1, 2, 4, 5, 6, ... counted from 0 [no_rope_layers]", "nope"),
    ("mistral_large4", "nope"): ("18 of 72 layers: 3, 7, 11, 15, 19, 23, ... counted from 0 [no_rope_layers]", "rope"),
}


@pytest.mark.parametrize(("config", "kind"), KINDS)
def test_the_spec_of_one_kind_of_layers_names_them_and_the_other_spec(config: str, kind: str) -> None:
    said, other = KINDS[config, kind]
    spec = made(json.loads((CONFIGS / f"{config}.json").read_text()), layers=kind)
    assert f"# For its {kind} layers, {said}.\n# The other layers need their own spec: --layers {other}.\n" in spec.text
    assert f"for its {kind} layers, {said}; for the others, run init again with --layers {other}" in spec.notes


LARGE4 = json.loads((CONFIGS / "mistral_large4.json").read_text())


def test_layers_that_read_the_cache_of_an_earlier_layer_are_counted() -> None:
    sources = [layer - layer % 8 + layer % 4 for layer in range(72)]  # of each eight layers, the last four share
    spec = made(LARGE4 | {"text_config": LARGE4["text_config"] | {"kv_source_layers": sources}}, layers="nope")
    assert "counted from 0 [no_rope_layers]; 9 of them read an earlier layer's cache [kv_source_layers].\n" in spec.text


def test_layers_that_a_config_does_not_list_are_not_numbered() -> None:
    text_config = {name: value for name, value in LARGE4["text_config"].items() if name != "no_rope_layers"}
    assert "# For its rope layers.\n" in made(LARGE4 | {"text_config": text_config}, layers="rope").text


def test_heads_before_absorption_are_the_same_with_and_without_rope() -> None:
    specs = [
        parse(made(LARGE4, prefill=True, name="mine", layers=kind).text, Path("my.yaml")) for kind in KINDS_OF_ROPE
    ]
    assert [(spec.multi_head.qk_head_dim, spec.multi_head.v_head_dim) for spec in specs if spec.multi_head] == [
        (128, 128)
    ] * 3


KINDS_OF_ROPE = (None, "rope", "nope")
WRONG_KINDS = {
    "none": (
        LARGE4,
        None,
        "config.json: text_config.no_rope_layers: some layers have no RoPE columns; pass --layers rope or "
        "--layers nope",
    ),
    "sliding": (LARGE4, "sliding", "--layers: got sliding; Mistral Large 4 takes --layers rope or --layers nope"),
    "no RoPE": (
        V3,
        "nope",
        "--layers: got nope; DeepSeek V3 takes --layers full or --layers sliding if it has a sliding window",
    ),
}


@pytest.mark.parametrize("case", WRONG_KINDS)
def test_a_kind_of_layers_that_a_model_lacks_is_refused(case: str) -> None:
    fields, layers, line = WRONG_KINDS[case]
    with pytest.raises(MlagenError) as caught:
        made(fields, layers=layers)
    assert (str(caught.value), caught.value.exit_code) == (line, 2)


V41 = json.loads((CONFIGS / "deepseek_v41.json").read_text())
V4_ROWS = ["ue8m0_v4", "ue8m0_v4"]
SM100_ROWS = ["mxfp8_v41", "nvfp4_v41"]


@pytest.mark.parametrize(
    ("targets", "word", "layouts", "noted"),
    [
        (["sm90"], "auto", V4_ROWS, False),
        (["sm80", "gfx942"], "auto", V4_ROWS, False),
        (["sm100"], "auto", SM100_ROWS, False),
        (["sm90", "sm100"], "auto", SM100_ROWS, True),
        (["sm90", "sm100"], "fp8", V4_ROWS, False),
        (["sm100"], "fp8_ds_mla", V4_ROWS, False),
    ],
)
def test_v41_has_the_caches_that_engines_use_on_its_gpus(
    targets: list[str], word: str, layouts: list[str], noted: bool
) -> None:
    result = made(V41, targets=targets, kv_cache_dtype=word)
    spec = parse(result.text, Path("my.yaml"))
    assert [cache.layout.name for cache in (spec.cache, spec.extra_cache) if cache] == layouts
    note = "engines use these caches on sm100 only; for other GPUs, run init again with --kv-cache-dtype fp8"
    assert (note in result.notes) == noted


@pytest.mark.parametrize(
    ("config", "options", "line"),
    [
        ("deepseek_v32", ("--kv-cache-dtype", "nvfp4"), "cache.layout: got 'nvfp4_ds_mla'; a package for vLLM takes "),
        (
            "deepseek_v3",
            ("--kv-cache-dtype", "fp8_ds_mla"),
            "cache.layout: got 'fp8_ds_mla'; a package for vLLM takes ",
        ),
        ("glm53_flash", ("--kv-cache-dtype", "fp8"), "cache.layout: got rows of 528 bytes; a package for vLLM takes "),
        ("deepseek_v32", ("--block-size", "64"), "cache.block_size: got 64; a package for vLLM takes none"),
    ],
)
def test_a_cache_that_the_engines_backend_refuses_is_refused_at_once(
    run: Run, workspace: Path, config: str, options: tuple[str, ...], line: str
) -> None:
    path = str(CONFIGS / f"{config}.json")
    result = run("init", "--from", path, "--gpu", "h200", "--for", "vllm", *options)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(f"--for vllm: {line}")
    assert result.stderr.count("\n") == 1
    assert run("init", "--from", path, "--gpu", "h200", *options).exit_code == 0


def test_a_spec_that_the_engines_plugin_supports_is_printed(run: Run, workspace: Path) -> None:
    for engine, word in (("vllm", "auto"), ("vllm", "fp8"), ("sglang", "fp8_ds_mla"), ("transformers", "auto")):
        config = str(CONFIGS / "deepseek_v32.json")
        result = run("init", "--from", config, "--gpu", "h200", "--for", engine, "--kv-cache-dtype", word)
        assert result.exit_code == 0, result.stderr
