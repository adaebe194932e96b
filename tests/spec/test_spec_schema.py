"""The checked-in specs and their JSON Schema are what the models say."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from mlagen.spec import json_schema, load, spec_digest
from mlagen.spec.load import parse, schema_text
from mlagen.spec.models import Model

NAMES = ["dsv32", "glm53", "hyv4", "odd"]


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
        below = [each for each in model.__subclasses__() if each.__module__ == Model.__module__]
        yield from (name for each in below for name in leaves(each)) if below else [model.__name__]

    assert set(leaves(Model)) == {*json_schema()["$defs"], "Spec"}


def test_every_spec_is_here(specs):
    assert sorted(path.stem for path in specs.glob("*.yaml")) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_spec_loads_and_fits_the_schemas_fields(name, specs):
    path = specs / f"{name}.yaml"
    text = path.read_text(encoding="utf-8")
    assert text.splitlines()[0] == "# yaml-language-server: $schema=schema.json"
    assert load(path).name == name
    schema = json_schema()
    data = yaml.safe_load(text)
    parts = {"model": "Dims", "attention": "SparseAttention", "cache": f"{data['cache']['layout'].title()}Cache"}
    for value, part in [(data, schema), *((data[key], schema["$defs"][ref]) for key, ref in parts.items())]:
        assert set(part["required"]) <= set(value) <= set(part["properties"])


@pytest.mark.parametrize(
    ("name", "heads", "row", "dtype", "topk", "sink", "page"),
    [
        ("dsv32", 128, (512, 64, 512), "bf16", 2048, "optional", None),
        ("glm53", 64, (512, 0, 512), "bf16", 2048, "optional", None),
        ("hyv4", 32, (512, 64, 512), "bf16", 2048, "required", None),
        ("odd", 12, (96, 32, 96), "fp16", 100, "optional", 53),
    ],
)
def test_spec_has_its_models_numbers(name, heads, row, dtype, topk, sink, page, specs):
    spec = load(specs / f"{name}.yaml")
    model = spec.model
    assert (model.num_heads, model.dtype) == (heads, dtype)
    assert (model.kv_lora_rank, model.qk_rope_head_dim, model.v_head_dim) == row
    assert (spec.attention.topk, spec.attention.attn_sink) == (topk, sink)
    assert (spec.cache.layout, spec.cache.block_size) == (dtype, page)
    assert (len(spec.wrappers), len(spec.targets)) == (3, 8)


def test_digest_is_of_canonical_json(specs):
    spec = load(specs / "odd.yaml")
    text = json.dumps(spec.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))
    assert spec_digest(spec) == hashlib.sha256(text.encode()).hexdigest()


def test_digest_is_of_what_is_said_not_of_how(specs, valid):
    spec = load(specs / "dsv32.yaml")
    reordered = json.dumps(spec.model_dump(mode="json"), sort_keys=True)
    terse = "\n".join(line.partition(" #")[0] for line in valid.splitlines() if "backend" not in line)
    assert {spec_digest(parse(text, Path("dsv32.yaml"))) for text in (valid, reordered, terse)} == {spec_digest(spec)}


def test_digest_tells_specs_apart(specs, valid):
    digests = {spec_digest(load(specs / f"{name}.yaml")) for name in NAMES}
    digests.add(spec_digest(parse(valid.replace("topk: 2048", "topk: 2049"), Path("dsv32.yaml"))))
    assert len(digests) == len(NAMES) + 1
