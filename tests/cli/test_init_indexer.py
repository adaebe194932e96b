"""`mlagen init --from CONFIG --indexer`: the lightning indexer of the models that are known to have one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import pytest
from cli_specs import Run

from mlagen.backends.engines.vllm import INDEXER
from mlagen.emit import apply, compare, render
from mlagen.errors import MlagenError
from mlagen.plan import ProloguePlan, load_plan
from mlagen.plan.families.indexer_cache import KEYS_QUERY
from mlagen.spec import Spec, load
from mlagen.spec.from_config import ENGINES, WRAPPERS, Wishes, spec_from_config
from mlagen.spec.from_config_indexer import NORMED, POOLS, TOKENS
from mlagen.spec.from_config_indexer import SAID as INDEXER_SAID
from mlagen.spec.from_config_indexer import WRAPPERS as INDEXER_WRAPPERS
from mlagen.spec.hf_config import KIN
from mlagen.spec.known import specs_dir
from mlagen.spec.load import parse
from mlagen.spec.models import WrapperName
from mlagen.verify import mismatches, verify_package

CONFIGS = Path(__file__).parent / "configs"
FILE = Path("config.json")
# Of each config: heads, columns, topk, RoPE and where it stands, tokens a key.
FOUND = {
    "deepseek_v32": (64, 128, 2048, "neox", "first", 1),
    "glm5": (32, 128, 2048, "gptj", "first", 1),
    "glm51": (32, 128, 2048, "gptj", "first", 1),
    "glm52": (32, 128, 2048, "gptj", "first", 1),
    "deepseek_v4_flash": (64, 128, 512, "gptj", "last", 4),
    "deepseek_v4_pro": (64, 128, 1024, "gptj", "last", 4),
    "deepseek_v4_saved": (64, 128, 512, "gptj", "last", 4),
    "deepseek_v41": (32, 128, 512, "gptj", "last", 1),
    "hy_v4": (16, 128, 2048, "gptj", "last", 1),
    "dots3": (64, 128, 2048, "gptj", "first", 1),
    "mistral_large4": (32, 128, 2048, "gptj", "first", 1),
    "axk2_light": (16, 128, 2048, "neox", "first", 1),
    "glm53_flash": (32, 128, 2048, None, None, 4),
}
ROPE_COLUMNS = {"axk2_light": 32, "glm53_flash": 0}  # of the others: 64
LAYERS = {"dots3": "full", "mistral_large4": "rope"}
KNOWN = ", ".join(name for name, kin in KIN.items() if kin.indexer is not None)
UNKNOWN = f"an indexer with unknown RoPE; takes {KNOWN}"
NEEDED = "missing, and --indexer needs it; pass --set"


def config(name: str, **changes: Any) -> dict[str, Any]:
    """A config, with some fields changed; those that are None are left out."""
    fields = json.loads((CONFIGS / f"{name}.json").read_text()) | changes
    return {name: value for name, value in fields.items() if value is not None}


def text_of(fields: dict[str, Any], **wishes: Any) -> str:
    return spec_from_config(json.dumps(fields), FILE, Wishes(indexer=True, **wishes)).text


def made(fields: dict[str, Any], **wishes: Any) -> Spec:
    return parse(text_of(fields, **wishes), FILE)


def refusal(fields: dict[str, Any], **wishes: Any) -> str:
    with pytest.raises(MlagenError) as caught:
        text_of(fields, **wishes)
    assert caught.value.exit_code == 2
    return str(caught.value)


@pytest.mark.parametrize("name", FOUND)
@pytest.mark.parametrize("engine", [None, "vllm", "sglang"])
def test_a_config_gives_the_indexer_of_its_model_and_a_spec_that_plans(
    name: str, engine: str | None, tmp_path: Path
) -> None:
    (tmp_path / "my.yaml").write_text(text_of(config(name), engine=engine, layers=LAYERS.get(name)))
    spec = load_plan(tmp_path / "my.yaml").spec
    indexer, cache = spec.indexer, spec.indexer_cache
    assert indexer is not None
    assert cache is not None
    numbers = (indexer.num_heads, indexer.head_dim, indexer.topk, indexer.rope, indexer.rope_at, indexer.compress_ratio)
    assert numbers == FOUND[name]
    assert indexer.rope_head_dim == ROPE_COLUMNS.get(name, 64)
    assert (cache.layout.name, cache.block_size) == ("indexer_fp8", 64)
    pooled = name == "glm53_flash"  # functions over pools in place of those that write keys of tokens
    assert set(INDEXER_WRAPPERS[engine]) - set(spec.wrappers) <= (set(TOKENS) if pooled else set())
    assert (set(POOLS) <= set(spec.wrappers)) == pooled
    assert (NORMED in spec.wrappers) == (name == "deepseek_v41" and engine != "sglang")


def test_without_the_option_a_config_gives_only_attention() -> None:
    alone = parse(spec_from_config(json.dumps(config("deepseek_v32")), FILE, Wishes()).text, FILE)
    both = made(config("deepseek_v32"))
    assert (alone.indexer, alone.indexer_cache) == (None, None)
    assert not set(alone.wrappers) & set(INDEXER_WRAPPERS[None])
    assert both.wrappers[: len(alone.wrappers)] == alone.wrappers


def test_the_known_spec_of_v32_over_rows_has_the_same_indexer() -> None:
    spec, known = made(config("deepseek_v32")), load(specs_dir() / "dsv32.yaml")
    assert (spec.indexer, spec.indexer_cache) == (known.indexer, known.indexer_cache)
    assert set(known.wrappers) - {*ProloguePlan.WRAPPERS, KEYS_QUERY} <= set(spec.wrappers)


@pytest.mark.parametrize(("said", "rope"), [(True, "gptj"), (False, "neox"), (None, None)])
@pytest.mark.parametrize(("name", "own"), [("glm5", "gptj"), ("deepseek_v32", "neox"), ("axk2_light", "neox")])
def test_the_style_of_rope_is_the_configs_where_it_says_one(
    name: str, own: str, said: bool | None, rope: str | None
) -> None:
    indexer = made(config(name, indexer_rope_interleave=said)).indexer
    assert indexer is not None
    assert (indexer.rope, indexer.rope_at) == (rope or own, "first")


def test_a_style_that_no_engine_reads_changes_nothing() -> None:
    assert made(config("hy_v4", indexer_rope_interleave=False)) == made(config("hy_v4"))


def test_layers_without_rope_have_an_indexer_without_rope() -> None:
    spec = made(config("mistral_large4"), layers="nope")
    assert spec.indexer is not None
    assert (spec.model.qk_rope_head_dim, spec.indexer.rope_head_dim, spec.indexer.rope) == (0, 0, None)


@pytest.mark.interpreter
def test_the_package_of_layers_without_rope_holds_typical_cases(tmp_path: Path) -> None:
    (tmp_path / "nope.yaml").write_text(text_of(config("mistral_large4"), layers="nope", name="nope", targets=["sm80"]))
    apply(compare(render(load_plan(tmp_path / "nope.yaml")), tmp_path / "nope"))
    only = [
        "sparse_fwd: typical (flash_mla_sparse_fwd)",
        "writer: typical (concat)",
        "write: typical",
        "query: typical",
    ]
    results = verify_package(tmp_path / "nope", workers=1, targets=["sm80"], only=only)
    assert {result.case for result in results} == {*only}
    assert [str(error) for error in mismatches(results)] == []


def test_every_engine_has_wrappers_that_there_are() -> None:
    assert set(WRAPPERS) == set(ENGINES)
    assert set(INDEXER_WRAPPERS) <= {None, *ENGINES}
    names = {name for kinds in WRAPPERS.values() for of in kinds.values() for name in of}
    names |= {name for of in INDEXER_WRAPPERS.values() for name in of} | {NORMED} | set(INDEXER_SAID)
    assert names <= set(get_args(WrapperName))
    assert set(INDEXER) <= set(INDEXER_WRAPPERS["vllm"])


def test_the_command_line_has_it(run: Run, workspace: Path) -> None:
    result = run("init", "--from", str(CONFIGS / "glm5.json"), "--indexer", "--set", "index_n_heads=8", "--gpu", "all")
    assert (result.exit_code, result.stderr) == (0, "named glm5; for another name, pass --name NAME\n")
    assert "  num_heads: 8 # [--set index_n_heads]\n" in result.stdout
    assert "  rope: gptj # RoPE rotates adjacent columns, as in GLM-5\n" in result.stdout
    alone = run("init", "dsv32", "--indexer")
    said = "--indexer needs --from CONFIG; the spec of dsv32 has its own value\n"
    assert (alone.exit_code, alone.stdout, alone.stderr) == (2, "", said)


@pytest.mark.parametrize(
    ("name", "wishes", "line"),
    [
        ("kimi_k2", {}, "config.json: index_topk: missing, so the model has no indexer; leave out --indexer"),
        (
            "glm53_flash",
            {"values": {"index_kpool": None}},
            f"--set index_kpool: {NEEDED} index_kpool=N",
        ),
        ("glm53_flash", {"values": {"index_head_dim": 64}}, "--set index_head_dim: got 64; keys of pools take 128"),
        ("dots3", {"layers": "sliding"}, "--indexer: got --layers sliding, which have no indexer; takes --layers full"),
        (
            "deepseek_v32",
            {"engine": "flashmla"},
            "--indexer: got --for flashmla, which calls no indexer; takes --for vllm, --for sglang or no --for",
        ),
        *(
            (
                "deepseek_v32",
                wishes,
                "--indexer: takes no value with --prefill or --for transformers, which attend to all keys",
            )
            for wishes in ({"engine": "transformers"}, {"prefill": True})
        ),
        (
            "deepseek_v32",
            {"values": {"index_head_dim": 32}},
            "config.json: qk_rope_head_dim: got 64; takes at most head_dim, 32",
        ),
        (
            "deepseek_v32",
            {"values": {"index_topk": 4097}},
            "--set index_topk: got 4097; takes an integer from 1 to 4096",
        ),
        ("deepseek_v32", {"block_size": 5000}, "--block-size: got 5000; takes an integer from 1 to 4096"),
    ],
)
def test_a_model_without_an_indexer_gives_one_line(name: str, wishes: dict[str, Any], line: str) -> None:
    assert refusal(config(name), **wishes) == line


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"model_type": None}, f"--indexer: got a config without a model type, {UNKNOWN}"),
        ({"index_n_heads": None}, f"config.json: index_n_heads: {NEEDED} index_n_heads=N"),
        ({"index_head_dim": None}, f"config.json: index_head_dim: {NEEDED} index_head_dim=N"),
        ({"index_n_heads": 129}, "config.json: index_n_heads: got 129; takes an integer from 1 to 128"),
        ({"index_head_dim": 513}, "config.json: index_head_dim: got 513; takes an integer from 1 to 512"),
        ({"indexer_rope_interleave": "x"}, "config.json: indexer_rope_interleave: takes true or false"),
    ],
)
def test_a_field_of_the_indexer_that_is_off_is_named(changes: dict[str, Any], line: str) -> None:
    assert refusal(config("deepseek_v32", **changes), name="mine") == line
