"""The checked-in specs and their JSON Schema agree with the models."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from checked_in import SPECS, spec_of

from mlagen.spec import Spec, json_schema, load, spec_digest
from mlagen.spec.base import Model
from mlagen.spec.load import parse, schema_text
from mlagen.spec.stored import INDEXER_DIMS, INDEXER_LAYOUTS, LAYOUT_DIMS, NAMED_LAYOUTS, Layout

# Heads, kv_lora_rank, qk_rope_head_dim and v_head_dim, dtype, topk, window, sink; of each cache: layout, tokens a page.
# Dense attention has neither topk nor a sink.
NUMBERS = {
    "axk2_light": (32, (128, 32, 128), "bf16", 2048, None, "optional", ("bf16", None), None),
    "ckv_kpe": (128, (512, 64, 512), "bf16", None, None, None, ("ckv_kpe", 64), None),
    "dots3": (128, (512, 64, 512), "bf16", 2048, None, "optional", ("bf16", None), None),
    "dots3_sliding": (64, (1024, 64, 1024), "bf16", None, 513, None, ("bf16", 64), None),
    "dsv2_lite": (16, (512, 64, 512), "bf16", None, None, None, ("bf16", 64), None),
    "dsv32": (128, (512, 64, 512), "bf16", 2048, None, "optional", ("bf16", None), None),
    "dsv32_fp8": (128, (512, 64, 512), "bf16", 2048, None, "optional", ("fp8_ds_mla", 64), None),
    "dsv32_fp8_tensor": (128, (512, 64, 512), "bf16", 2048, None, "optional", ("fp8_per_tensor", 64), None),
    "dsv32_nvfp4": (128, (512, 64, 512), "bf16", 2048, None, "optional", ("nvfp4_ds_mla", 64), None),
    "dsv3": (128, (512, 64, 512), "bf16", None, None, None, ("bf16", 64), None),
    "dsv3_fp8": (128, (512, 64, 512), "bf16", None, None, None, ("fp8_per_tensor", 64), None),
    "dsv3_fp8_products": (128, (512, 64, 512), "bf16", None, None, None, ("fp8_per_tensor", 64), None),
    "dsv41": (64, (448, 64, 512), "bf16", 512, 128, "optional", ("mxfp8_v41", 64), ("nvfp4_v41", 64)),
    "dsv41_fp8": (64, (448, 64, 512), "bf16", 512, 128, "optional", ("ue8m0_v4", 64), ("ue8m0_v4", 64)),
    "dsv4_flash": (64, (448, 64, 512), "bf16", 512, 128, "optional", ("ue8m0_v4", 64), ("ue8m0_v4", 64)),
    "dsv4_flash_out_fp8": (64, (448, 64, 512), "bf16", 512, 128, "optional", ("ue8m0_v4", 64), ("ue8m0_v4", 64)),
    "dsv4_flash_out_rope": (64, (448, 64, 512), "bf16", 512, 128, "optional", ("ue8m0_v4", 64), ("ue8m0_v4", 64)),
    "dsv4_pro": (128, (448, 64, 512), "bf16", 1024, 128, "optional", ("ue8m0_v4", 64), ("ue8m0_v4", 64)),
    "glm47_flash": (20, (512, 64, 512), "bf16", None, None, None, ("bf16", 64), None),
    "glm5": (64, (512, 64, 512), "bf16", 2048, None, "optional", ("fp8_ds_mla", 64), None),
    "glm53": (64, (512, 0, 512), "bf16", 2048, None, "optional", ("bf16", None), None),
    "glm53_fp8": (64, (512, 0, 512), "bf16", 2048, None, "optional", ("fp8_ds_mla", 64), None),
    "hyv4": (32, (512, 64, 512), "bf16", 2048, None, "required", ("bf16", None), None),
    "kimi_k2": (64, (512, 64, 512), "bf16", None, None, None, ("bf16", 64), None),
    "kimi_k3": (96, (512, 64, 512), "bf16", None, None, None, ("bf16", 64), None),
    "kimi_linear": (32, (512, 64, 512), "bf16", None, None, None, ("bf16", 64), None),
    "minicpm3": (40, (256, 32, 256), "bf16", None, None, None, ("bf16", 64), None),
    "mistral_large3": (128, (512, 64, 512), "bf16", None, None, None, ("bf16", 64), None),
    "mistral_large4": (64, (512, 64, 512), "bf16", 2048, None, "optional", ("bf16", None), None),
    "odd": (12, (96, 32, 96), "fp16", 100, None, "optional", ("fp16", 53), None),
    "odd_fp8": (12, (96, 32, 128), "fp16", 100, 37, "optional", ("odd_planar", 53), ("fp8_per_tensor", 7)),
    "own_layout": (128, (512, 64, 512), "bf16", 2048, None, "optional", ("nvfp4_bf16_rope", 64), None),
}
# Heads, dtype, columns of k and of v, heads of k and v, window, addressing, and how many targets.
V3_SCALE = 0.1352337788608801  # 192**-0.5 * (0.1 ln 40 + 1)**2
PREFILL = {
    "dsv3_prefill": (128, "bf16", 192, 128, None, None, "pointers", V3_SCALE, 8),
    "dsv3_prefill_tma": (128, "bf16", 192, 128, None, None, "descriptors", V3_SCALE, 3),
    "glm5_prefill": (64, "bf16", 256, 256, None, None, "pointers", 1 / 16, 8),
    "minicpm3_prefill": (40, "bf16", 96, 64, None, None, "pointers", 96**-0.5, 8),
    "odd_prefill": (12, "fp16", 40, 72, 3, None, "pointers", None, 8),
}
NAMES = sorted(NUMBERS | PREFILL)


def objects(schema: dict) -> Iterator[dict]:
    yield schema
    yield from schema["$defs"].values()


def test_schema_file_is_current(specs):
    text = (specs / "schema.json").read_text(encoding="utf-8")
    assert text == schema_text(), "specs/schema.json is stale; write mlagen.spec.load.schema_text() to it"
    assert text.endswith("}\n")
    assert text.splitlines()[1].startswith('  "')


def test_schema_is_strict_and_described():
    schema = json_schema()
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    for part in objects(schema):
        assert part["additionalProperties"] is False
        assert part["title"]
        assert part["description"]
        for name, field in part["properties"].items():
            assert field.get("description"), name
            assert "$ref" in field or field["title"] == name


def test_schema_knows_every_model():
    def leaves(model: type[Model]) -> Iterator[str]:
        below = [each for each in model.__subclasses__() if each.__module__.startswith("mlagen.spec.")]
        yield from (name for each in below for name in leaves(each)) if below else [model.__name__]

    # A KV cache has its own model, and the cache of an indexer extends it.
    assert {*leaves(Model), "Cache"} == {*json_schema()["$defs"], "Spec"}


def test_every_spec_is_here():
    assert [path.stem for path in SPECS] == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_spec_loads_and_fits_the_schemas_fields(name, specs):
    path = spec_of(name)
    text = path.read_text(encoding="utf-8")
    key, place = text.splitlines()[0].split("=")
    assert key == "# yaml-language-server: $schema"
    assert (path.parent / place).resolve() == specs / "schema.json"
    assert load(path).name == name
    schema = json_schema()
    data = yaml.safe_load(text)
    parts = [(data, schema)]
    for key, part in (
        ("model", "Dims"),
        ("attention", "DenseAttention" if load(path).attention_kind == "dense" else "SparseAttention"),
        ("cache", "Cache"),
        ("extra_cache", "Cache"),
        ("multi_head", "MultiHead"),
    ):
        if key in data:
            parts.append((data[key], schema["$defs"][part]))
            layout = data[key].get("layout")
            parts += [(layout, schema["$defs"]["Layout"])] if isinstance(layout, dict) else []
    for value, part in parts:
        assert set(part["required"]) <= set(value) <= set(part["properties"])


@pytest.mark.parametrize("name", PREFILL)
def test_prefill_spec_has_its_models_numbers(name, specs):
    spec = load(spec_of(name))
    numbers = (spec.model.num_heads, spec.model.dtype, *spec.multi_head.model_dump().values(), len(spec.targets))
    assert numbers == PREFILL[name]


def test_a_spec_comes_back_from_its_values(specs):
    spec = load(specs / "dsv32.yaml")
    assert Spec.model_validate(spec.model_dump()) == spec


@pytest.mark.parametrize("name", NUMBERS)
def test_spec_has_its_models_numbers(name, specs):
    spec = load(spec_of(name))
    model, attention = spec.model, spec.attention
    row = (model.kv_lora_rank, model.qk_rope_head_dim, model.v_head_dim)
    caches = [cache and (cache.layout.name, cache.block_size) for cache in (spec.cache, spec.extra_cache)]
    numbers = (getattr(attention, "topk", None), attention.window, getattr(attention, "attn_sink", None))
    assert (model.num_heads, row, model.dtype, *numbers, *caches) == NUMBERS[name]
    assert len(spec.targets) == {"dsv32_fp8_tensor": 1, "dsv3_fp8_products": 1, "dsv41_fp8": 7}.get(name, 8)


def test_glm5_takes_any_fp32_for_a_scale(specs):
    rule = load(specs / "glm5.yaml").cache.scale_rule
    assert (rule.rounding, rule.floor, rule.floor_on, rule.divisor) == ("nearest", 2.0**-126, "scale", None)


@pytest.mark.parametrize("name", NAMED_LAYOUTS)
def test_named_layout_is_one_that_a_spec_could_write_itself(name, specs):
    written = Layout.model_validate(NAMED_LAYOUTS[name])
    spec = load(specs / "dsv32.yaml").model_dump()
    (rank, rope), *_ = LAYOUT_DIMS[name]
    dtype = "fp16" if name == "fp16" else "bf16"
    spec["model"] |= {"kv_lora_rank": rank, "qk_rope_head_dim": rope, "v_head_dim": rank, "dtype": dtype}
    named, mapped = (
        Spec.model_validate({**spec, "cache": {"layout": layout}}) for layout in (name, NAMED_LAYOUTS[name])
    )
    assert named.cache.layout == mapped.cache.layout == written
    assert spec_digest(named) == spec_digest(mapped)
    assert Spec.model_validate(named.model_dump()) == named


@pytest.mark.parametrize("name", INDEXER_LAYOUTS)
def test_named_layout_of_keys_is_one_that_a_spec_could_write_itself(name, specs):
    written = Layout.model_validate(INDEXER_LAYOUTS[name])
    spec = load(specs / "dsv32_nvfp4.yaml").model_dump()  # its wrappers support any keys
    ((columns, _),) = INDEXER_DIMS[name]
    rope = {"rope_head_dim": 64, "rope": "neox", "rope_at": "first"}
    spec["indexer"] = {"num_heads": 64, "head_dim": columns, "topk": 2048, **rope}
    named, mapped = (
        Spec.model_validate({**spec, "indexer_cache": {"layout": layout}}) for layout in (name, INDEXER_LAYOUTS[name])
    )
    assert named.indexer_cache.layout == mapped.indexer_cache.layout == written
    assert spec_digest(named) == spec_digest(mapped)
    assert Spec.model_validate(named.model_dump()) == named


@pytest.mark.parametrize(("cache", "names"), [("Cache", NAMED_LAYOUTS), ("IndexerCache", INDEXER_LAYOUTS)])
def test_schema_takes_a_layouts_name_or_its_fields(cache, names):
    layout = json_schema()["$defs"][cache]["properties"]["layout"]
    assert layout["anyOf"] == [{"enum": list(names), "type": "string"}, {"$ref": "#/$defs/Layout"}]


def test_digest_is_of_canonical_json(specs):
    spec = load(spec_of("odd"))
    text = json.dumps(spec.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))
    assert spec_digest(spec) == hashlib.sha256(text.encode()).hexdigest()


def test_the_digest_ignores_the_style_of_the_yaml(valid):
    spec = parse(valid, Path("dsv32.yaml"))
    reordered = json.dumps(spec.model_dump(mode="json"), sort_keys=True)
    terse = "\n".join(line.partition(" #")[0] for line in valid.splitlines() if "backend" not in line)
    assert {spec_digest(parse(text, Path("dsv32.yaml"))) for text in (valid, reordered, terse)} == {spec_digest(spec)}


def test_digest_tells_specs_apart(valid):
    digests = {spec_digest(load(path)) for path in SPECS}
    digests.add(spec_digest(parse(valid.replace("topk: 2048", "topk: 2049"), Path("dsv32.yaml"))))
    assert len(digests) == len(NAMES) + 1
