from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlagen.bench.families.dense_decode import DenseDecodeShape
from mlagen.bench.families.merge_states import STATES, MergeStatesShape
from mlagen.bench.families.sparse_decode import SparseDecodeShape
from mlagen.bench.families.sparse_fwd import SharedShape, SparseFwdShape
from mlagen.bench.report.rows import Row
from mlagen.bench.report.saved import read_rows, rows_of_files
from mlagen.bench.report.tables import to_json
from mlagen.bench.roofline import ROOFS, Roof
from mlagen.bench.shapes import Batch
from mlagen.bench.trial import Sizes
from mlagen.errors import UsageError

OLDER = Path(__file__).parents[2] / "cli" / "older_run.json"
MERGE = MergeStatesShape(STATES, 128, 16, 512, 2)
SHAPES = [
    SparseFwdShape("prefill", 4096, 128, 8192, 2048),
    SharedShape("shared", 4096, 16, 8192, 2048, 75),
    Batch("gather", "gather_and_maybe_dequant_cache", 4096, 8),
    SparseDecodeShape(16, 2, 64, 128, 512),
    DenseDecodeShape(128, 2, 128, 32768, "random"),
    MERGE,
]


def write(path: Path, value: object) -> Path:
    path.write_text(json.dumps(value))
    return path


def refusal(path: Path) -> str:
    """Why a file is refused; nothing if it is read."""
    try:
        read_rows(path)
    except UsageError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.family)
def test_what_is_written_is_read_again(row: Row, shape: Sizes, tmp_path: Path) -> None:
    absent = replace(row.contenders[2], error=None)  # JSON has no NaN
    rows = [replace(row, shape=shape, contenders=(*row.contenders[:2], absent))]
    assert read_rows(write(tmp_path / "rows.json", [to_json(each) for each in rows])) == rows
    copies = [replace(rows[0], roof=Roof(float("inf"), 4.2e12, "a copy"))]
    assert read_rows(write(tmp_path / "rows.json", [to_json(each) for each in copies])) == copies


def test_files_of_older_versions_are_read() -> None:
    rows = read_rows(OLDER)
    assert len(rows) == len(json.loads(OLDER.read_text()))
    assert {row.roof for row in rows} == {ROOFS["NVIDIA H200"]}
    assert rows[0].torch is None


def test_fields_of_shapes_are_read_by_their_older_names(row: Row, tmp_path: Path) -> None:
    older = to_json(replace(row, shape=MERGE))
    older["shape"]["lanes"] = older["shape"].pop("columns")
    (read,) = read_rows(write(tmp_path / "rows.json", [older]))
    assert read.shape == MERGE


def test_a_shape_of_two_files_is_taken_from_the_later(row: Row, tmp_path: Path) -> None:
    first = write(tmp_path / "1.json", [to_json(row)])
    second = write(tmp_path / "2.json", [to_json(replace(row, rounds=3)), to_json(replace(row, package="glm5"))])
    assert [each.rounds for each in rows_of_files([first, second])] == [3, 11]
    third = write(tmp_path / "3.json", [to_json(replace(row, device="NVIDIA B200"))])
    with pytest.raises(UsageError, match="several devices: NVIDIA B200, NVIDIA H200"):
        rows_of_files([first, third])


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no time": ({"contenders": [{"name": "ours", "seconds": "fast"}]}, r"\[0\]\.contenders\[0\]\.seconds"),
    "a time of zero": ({"contenders": [{"name": "ours", "seconds": 0}]}, r"\[0\]\.contenders\[0\]\.seconds"),
    "not ours": ({"contenders": [{"name": "theirs"}]}, r"\[0\]\.contenders\[0\]\.name: got 'theirs'; takes 'ours'"),
    "nobody": ({"contenders": []}, r"\[0\]\.contenders"),
    "no shape": ({"shape": {"kind": "decode"}}, r"\[0\]\.shape: got the keys 'kind'"),
    "a key of two lines": ({"shape": {"a\nb": None}}, "shape.a.b"),
    "no size": ({"shape": {"kind": "decode", "tokens": "x", "num_heads": 1, "s_kv": 1, "topk": 1}}, "shape.tokens"),
    "no roof": ({"roof_bytes_per_s": None, "roof_origin": "high"}, r"\[0\]\.roof_origin: got 'high'; takes '690"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_row_is_refused_by_its_place(name: str, row: Row, tmp_path: Path) -> None:
    change, message = BAD[name]
    path = write(tmp_path / "rows.json", [to_json(row) | change])
    with pytest.raises(UsageError, match=message) as caught:
        read_rows(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '{"rows": []}', "[[]]", '"\\ud800"'])
def test_a_file_of_something_else_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text(text)
    with pytest.raises(UsageError):
        read_rows(path)
    with pytest.raises(UsageError, match="cannot be read"):
        read_rows(tmp_path / "none.json")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("a\n", max_size=8), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_change_of_a_file_is_an_accident(data: st.DataObject, row: Row, tmp_path: Path) -> None:
    """With anything in place of a value, the file is read or refused."""
    document = [to_json(row)]
    holders = [document[0], document[0]["shape"], *document[0]["contenders"]]
    holder = data.draw(st.sampled_from(holders))
    holder[data.draw(st.sampled_from(sorted(holder)))] = data.draw(JSON)
    assert "\n" not in refusal(write(tmp_path / "rows.json", document))
