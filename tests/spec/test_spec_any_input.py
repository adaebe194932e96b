"""For any file, `load` returns a valid spec or raises errors of one line each."""

import json
import keyword
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from layout_specs import caches, has_hadamard, indexers, keys_dtype
from pydantic import ValidationError

from mlagen.errors import SpecErrors
from mlagen.spec import Spec, load
from mlagen.spec.load import parse
from mlagen.spec.needs import NEEDS
from mlagen.spec.rules import TAKEN_NAMES
from mlagen.spec.targets import Target

pytestmark = pytest.mark.thorough

VALID = (Path(__file__).parents[2] / "specs" / "dsv32.yaml").read_text(encoding="utf-8")
FILE = Path("specs/dsv32.yaml")  # where a spec is named as its file
SETTINGS = settings(  # no clocks, so that a busy machine fails nothing
    max_examples=150, deadline=None, derandomize=True
)


def lines_or_spec(text: str) -> Spec | None:
    """Parse; check that errors, if any, are in order, each one line with a place inside the text."""
    try:
        return parse(text, FILE)
    except SpecErrors as error:
        errors = error
    places = [(each.place.line, each.place.column) for each in errors.errors]
    assert places == sorted(places)
    assert all(line >= 1 and column >= 1 for line, column in places)
    assert str(errors).splitlines() == list(map(str, errors.errors))
    assert all(str(each).isprintable() and "Input should" not in str(each) for each in errors.errors)
    return None


def unique(options: Sequence[str], most: int) -> st.SearchStrategy[tuple[str, ...]]:
    return st.lists(st.sampled_from(options), min_size=1, max_size=most, unique=True).map(tuple)


def is_free(name: str) -> bool:
    return name not in TAKEN_NAMES and not keyword.iskeyword(name)


LSE = {"lse_base": st.sampled_from(["e", "2"]), "empty_row_lse": st.sampled_from(["+inf", "-inf"])}
DENSE = st.fixed_dictionaries({"kind": st.just("dense"), "window": st.none() | st.integers(1, 1 << 20), **LSE})

MULTI_HEAD = st.fixed_dictionaries(
    {
        "qk_head_dim": st.integers(1, 512),
        "v_head_dim": st.integers(1, 512),
        "num_kv_heads": st.sampled_from([None, 1]),
        "addressing": st.sampled_from(["pointers", "descriptors"]),
    }
)


def sparse(presence: st.SearchStrategy[str]) -> st.SearchStrategy[dict[str, Any]]:
    count = st.integers(1, 65536)
    topk = st.integers(1, 4096)  # which an indexer can pick
    lists = {"kind": st.just("sparse"), "topk": topk, "window": count, "attn_sink": presence, "topk_length": presence}
    return st.fixed_dictionaries({**lists, **LSE})


@st.composite
def valid_data(draw: st.DrawFn) -> dict[str, Any]:
    rank, rope = draw(st.integers(1, 1024)), draw(st.integers(0, 256))
    dtype = draw(st.sampled_from(["bf16", "fp16"]))
    presence = st.sampled_from(["none", "optional", "required"])
    attention = draw(st.sampled_from([draw(sparse(presence)), draw(DENSE), None]))
    kind = attention and attention["kind"]
    multi_head = draw(st.none() | MULTI_HEAD)
    # Multi-head attention has a natural LSE and no sink.
    alike = attention is None or (attention["lse_base"] == "e" and attention.get("attn_sink") != "required")
    indexed = draw(indexers(attention["topk"] if kind == "sparse" else None, dtype)) if kind != "dense" else {}
    fitting = [
        name
        for name, needs in NEEDS.items()
        if not needs.rope
        and (not needs.attention or kind in needs.attention)
        and ((multi_head is not None and alike) or not needs.multi_head)
        and ("indexer" in indexed or not needs.indexer)
        and (keys_dtype(indexed) in needs.indexer_cache or not needs.indexer_cache)
        and (indexed.get("indexer", {}).get("rope_head_dim") or not needs.indexer_rope)
        and (has_hadamard(indexed) or not needs.hadamard)
        and ("candidates" in indexed.get("indexer", {}) or not needs.candidates)
    ]
    wrappers = list(draw(unique(fitting, 10)))
    for name in wrappers:  # those that are added, too
        for group in NEEDS[name].beside:
            if not set(group) & set(wrappers):
                wrappers.append(next(one for one in group if one in fitting))
    splits = any(NEEDS[name].attention for name in wrappers)
    return {
        "name": draw(st.from_regex(r"[a-z][a-z0-9_]{0,62}", fullmatch=True).filter(is_free)),
        "title": draw(st.from_regex(r"[A-Za-z0-9][A-Za-z0-9 ()+,./:;_-]{0,78}", fullmatch=True)),
        "model": {
            "num_heads": draw(st.integers(1, 128)),
            "kv_lora_rank": rank,
            "qk_rope_head_dim": rope,
            "v_head_dim": draw(st.sampled_from([rank, rank + rope])),
            "dtype": dtype,
        },
        "attention": attention,
        "cache": draw(caches(rank, rope, dtype)),
        "extra_cache": draw(st.none() | caches(rank, rope, dtype)) if kind == "sparse" else None,
        "multi_head": multi_head,
        **indexed,
        "wrappers": wrappers,
        "targets": draw(unique(get_args(Target), 8)),
        "backend": draw(st.sampled_from(["auto", "triton", "gluon"])),
        **({"partials": draw(st.sampled_from(["fp32", "bf16", "fp16"]))} if splits else {}),
    }


class Quoting(yaml.SafeDumper):
    """Quotes text, since PyYAML does not quote numbers of YAML 1.2."""

    def ignore_aliases(self, data: object) -> bool:
        return True


Quoting.add_representer(str, lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"'))


@pytest.mark.parametrize(
    "write", [json.dumps, lambda data: yaml.dump(data, Dumper=Quoting, width=1000)], ids=["json", "yaml"]
)
@SETTINGS
@given(data=valid_data())
def test_valid_spec_comes_back_from_yaml(write, data):
    spec = Spec.model_validate(tuples(data))
    assert parse(write(json.loads(spec.model_dump_json())), Path(f"{spec.name}.yaml")) == spec


@SETTINGS
@given(data=st.binary(max_size=200))
def test_any_bytes(data, tmp_path_factory):
    path = tmp_path_factory.getbasetemp() / "dsv32.yaml"
    path.write_bytes(data)
    with pytest.raises(SpecErrors):
        load(path)


@SETTINGS
@given(
    text=st.text() | st.text(alphabet="ab01 \n\t\r-?:,[]{}#&*!|>'\"%@`\\.<=~_eXxuU/").map(lambda text: f"name: {text}")
)
def test_any_text(text):
    assert lines_or_spec(text) is None


# Text with a meaning in YAML, and text that it cannot read.
SIGNS = [
    *[
        "\n",
        "\n  ",
        "\n-",
        ": ",
        ":",
        "#",
        " #",
        "- ",
        "? ",
        "[",
        "]",
        "{",
        "}",
        ",",
        "'",
        '"',
        "\\",
        "|",
        ">-\n",
        "|0",
    ],
    *["&a ", "*a", "!!int ", "!a ", "!<a>", "!a%0A ", "<<: ", "<<: *a", "---\n", "...\n", "%YAML 1.1\n", "name: a\n"],
    *['"\\x', '"\\UFFFFFFFF"', '"\\uD800"', "\t", "\r", "\ufeff", "\0", "\u202e", "\ud7ff", "\U0001f600"],
    *["null", "~", "true", ".nan", "-.inf", "1e5", "017", "0x10", "1_0", "1:30", "2048.0", "''", "bf16"],
]
PIECES = st.sampled_from(SIGNS) | st.text(max_size=3) | st.integers().map(str)


@st.composite
def mutants(draw: st.DrawFn) -> str:
    text = VALID
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(text)))
        text = text[:at] + draw(PIECES) + text[at + draw(st.integers(0, 12)) :]
    return text


@SETTINGS
@given(text=mutants())
def test_valid_text_with_pieces_changed(text):
    lines_or_spec(text)


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["bf16", "fp16", "sm90", "2", "ue8m0_v4", "row", "scales", "e2m1", "nearest", 1e-40, 16.0]),
    lambda below: st.lists(below, max_size=3) | st.dictionaries(st.text(max_size=8), below, max_size=3),
    max_leaves=6,
)


def spots(data: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) of a tree."""
    entries = list(data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ())
    return [(data, key) for key, _ in entries] + [spot for _, below in entries for spot in spots(below)]


@st.composite
def changed_data(draw: st.DrawFn) -> dict[str, Any]:
    data = json.loads(json.dumps(draw(valid_data()))) | {"name": "dsv32"}
    for _ in range(draw(st.integers(1, 3))):
        all_spots = spots(data)
        if not all_spots:
            break
        container, key = draw(st.sampled_from(all_spots))
        match draw(st.sampled_from(["replace", "remove", "add", "copy"])):
            case "replace":
                container[key] = draw(VALUES)
            case "remove":
                del container[key]
            case "add" if isinstance(container, dict):
                container[
                    draw(st.text(max_size=8) | st.sampled_from(["topk", "num_head", "bf16", "layout", "kind"]))
                ] = draw(VALUES)
            case _ if isinstance(container, list):
                container.append(container[key])
    return data


def tuples(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(map(tuples, value))
    return {key: tuples(below) for key, below in value.items()} if isinstance(value, dict) else value


@SETTINGS
@given(data=changed_data())
def test_load_accepts_exactly_the_specs_that_the_models_accept(data):
    text = yaml.dump(data, Dumper=Quoting, allow_unicode=False)
    try:
        spec = Spec.model_validate(tuples(data))
    except ValidationError:
        spec = None
    if spec is not None and spec.name != "dsv32":
        spec = None
    assert lines_or_spec(text) == spec
