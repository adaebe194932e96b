"""Text that YAML versions read differently is read as in YAML 1.2 or refused, never silently changed."""

import math
from pathlib import Path

import pytest
import yaml

from mlagen.spec.load import parse
from mlagen.spec.marked import read, resolve


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0", 0),
        ("-0", 0),
        ("+5", 5),
        ("2048", 2048),
        ("1e-5", 1e-5),
        ("1E3", 1000.0),
        ("1.", 1.0),
        (".5", 0.5),
        ("-1.5e+3", -1500.0),
        ("017.5", 17.5),
        (".inf", math.inf),
        ("-.INF", -math.inf),
        ("true", True),
        ("FALSE", False),
        ("~", None),
        ("null", None),
    ],
)
def test_plain_scalar_has_its_yaml_1_2_value(text, value):
    assert resolve(text) == value
    assert type(resolve(text)) is type(value)


def test_nan_is_a_float():
    assert math.isnan(resolve(".nan"))


LOOKS_LIKE_MORE = [
    *["yes", "no", "on", "off", "y", "n", "Yes", "NO", "tRUE", "nULL", "inf", "+inf", "nan", "="],
    *["017", "08", "0o17", "0x1f", "0b11", "1_000", "1:30", "190:20:30", "2024-01-01", "2024-01-01T00:00:00Z"],
    *["e5", "1e", "1e5e", "1.2.3", "١٢"],
]


@pytest.mark.parametrize("text", LOOKS_LIKE_MORE)
def test_plain_scalar_that_looks_like_more_is_text(text):
    assert resolve(text) == text


@pytest.mark.parametrize("title", ["yes", "on", "017", "1_000", "1:30", "2024-01-01", "0x1f", "NaN", "DeepSeek: 3.2"])
def test_title_is_the_one_in_the_file(title, valid):
    shown = f'"{title}"' if ": " in title else title
    spec = parse(valid.replace("DeepSeek V3.2 sparse MLA", shown), Path("dsv32.yaml"))
    assert spec.title == title


def test_text_over_lines_is_folded(valid):
    text = valid.replace("DeepSeek V3.2 sparse MLA", "DeepSeek V3.2\n  sparse MLA")
    assert parse(text, Path("dsv32.yaml")).title == "DeepSeek V3.2 sparse MLA"


def test_quoted_null_and_bool_are_text():
    assert read("a: 'null'\nb: \"true\"\nc: ''\nd: null\n", Path("x.yaml")).data == {
        "a": "null",
        "b": "true",
        "c": "",
        "d": None,
    }


def test_plain_data_equals_pyyamls_where_yaml_versions_agree(specs):
    def tuples(value):
        if isinstance(value, list):
            return tuple(map(tuples, value))
        return {key: tuples(below) for key, below in value.items()} if isinstance(value, dict) else value

    paths = [*specs.glob("*.yaml")]
    assert paths
    for path in paths:
        text = path.read_text(encoding="utf-8")
        assert read(text, path).data == tuples(yaml.safe_load(text))


def test_marks_count_from_1_and_count_characters():
    document = read("\n  é: [ä, 'x']\n", Path("x.yaml"))
    marks = {loc: (mark.line, mark.column) for loc, mark in document.values.items()}
    assert marks == {(): (2, 3), ("é",): (2, 6), ("é", 0): (2, 7), ("é", 1): (2, 10)}
    assert (document.keys[("é",)].line, document.keys[("é",)].column) == (2, 3)
