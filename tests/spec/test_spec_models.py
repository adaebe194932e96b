"""The models hold their own rules, with or without a file."""

import keyword
from pathlib import Path

import pytest
from pydantic import ValidationError

from mlagen.errors import SpecErrors
from mlagen.spec import Spec
from mlagen.spec.load import parse, spec_digest


@pytest.fixture
def spec(valid) -> Spec:
    return parse(valid, Path("dsv32.yaml"))


def changed(spec: Spec, **fields: object) -> Spec:
    return Spec.model_validate({**spec.model_dump(), **fields})


def test_spec_is_frozen(spec):
    with pytest.raises(ValidationError):
        spec.name = "other"
    with pytest.raises(ValidationError):
        spec.model.num_heads = 1


@pytest.mark.parametrize(
    "name", ["torch", "triton", "numpy", "mlagen", "functools", "typing", "math", "warnings", "if"]
)
def test_name_hides_no_module_and_is_no_keyword(name, spec):
    with pytest.raises(ValidationError, match=f"got '{name}'.*'{name}_mla'"):
        changed(spec, name=name)
    assert changed(spec, name=f"{name}_mla").name == f"{name}_mla"


@pytest.mark.parametrize("name", sorted(set(keyword.kwlist) - {"True", "False", "None"}))
def test_no_keyword_is_a_name(name, spec):
    with pytest.raises(ValidationError):
        changed(spec, name=name)


@pytest.mark.parametrize("name", ["", "A", "1a", "a-b", "a.b", "a/b", "../a", "a ", "a\n", "ä", "_a", "a" * 64])
def test_name_is_a_plain_identifier(name, spec):
    with pytest.raises(ValidationError):
        changed(spec, name=name)


@pytest.mark.parametrize("character", "\"'\\{}%`$<>&|#\n\t\0é")
def test_title_carries_nothing_into_a_docstring(character, spec):
    with pytest.raises(ValidationError):
        changed(spec, title=f"A{character}b")


def test_v_is_the_latent_or_the_whole_row(spec):
    dims = spec.model.model_dump()
    assert changed(spec, model={**dims, "v_head_dim": 576}).model.v_head_dim == 576
    for columns in (1, 128, 511, 513, 575, 577):
        with pytest.raises(ValidationError, match=f"got {columns}; takes 512, or 576 if V includes the RoPE columns"):
            changed(spec, model={**dims, "v_head_dim": columns})
    with pytest.raises(ValidationError, match="got 128; takes 512: after absorption"):
        changed(spec, model={**dims, "qk_rope_head_dim": 0, "rope": None, "v_head_dim": 128})


def test_name_is_the_files_in_a_folder_specs_and_any_elsewhere(valid, tmp_path, monkeypatch):
    text = valid.replace("name: dsv32", "name: mine")
    for file in ("specs/mine.yaml", "mine.yaml", "my.yaml", "specs/of/mine/my.yaml"):
        assert parse(text, Path(file)).name == "mine"
    (tmp_path / "specs").mkdir()
    monkeypatch.chdir(tmp_path / "specs")
    with pytest.raises(SpecErrors, match=r"my.yaml:\d+:7: name: got 'mine', but the file is my.yaml"):
        parse(text, Path("my.yaml"))


def test_shared_indices_change_the_hash(spec):
    off = changed(spec, attention={**spec.attention.model_dump(), "shared_indices": None})
    assert changed(spec, attention=off.attention.model_dump()) == off
    digests = [
        spec_digest(changed(spec, attention={**off.attention.model_dump(), "shared_indices": group}))
        for group in (None, 2, 4)
    ]
    assert digests[0] == spec_digest(off)
    assert len(set(digests)) == 3


def test_exact_maxima_change_the_hash(spec):
    assert spec.attention.rescaling == "lagged"
    exact = changed(spec, attention={**spec.attention.model_dump(), "rescaling": "exact"})
    assert exact.model_dump(mode="json")["attention"]["rescaling"] == "exact"
    assert spec_digest(exact) != spec_digest(spec)
    with pytest.raises(ValidationError, match="'lagged' or 'exact'"):
        changed(spec, attention={**spec.attention.model_dump(), "rescaling": "never"})


def test_rounded_partials_change_the_hash(spec):
    assert spec.partials == "fp32"
    assert changed(spec, partials="fp32") == spec
    rounded = changed(spec, partials="bf16")
    assert rounded.model_dump(mode="json")["partials"] == "bf16"
    assert spec_digest(rounded) != spec_digest(spec)
