"""A file that cannot be read as text gives one clear line."""

import errno
import os
from pathlib import Path

import pytest

from mlagen.errors import SpecErrors
from mlagen.spec import load
from mlagen.spec.load import MAX_BYTES, parse


def refusal(path: Path) -> str:
    with pytest.raises(SpecErrors) as caught:
        load(path)
    (error,) = caught.value.errors
    assert error.exit_code == 2
    return str(error).removeprefix(str(path)).lstrip(":").strip()


FIELDS = (
    "name, title, model, attention, cache, extra_cache, multi_head, indexer, indexer_cache, wrappers, targets, "
    "backend, partials and ops"
)
CONTENT = {
    "empty": (b"", "1:1: the file is empty or has only comments; takes a spec"),
    "comments": (b"# later\n\n", "1:1: the file is empty or has only comments; takes a spec"),
    "empty document": (b"---\n", f"2:1: got nothing; takes a mapping of {FIELDS}"),
    "text": (b"text", f"1:1: got 'text'; takes a mapping of {FIELDS}"),
    "latin 1": (b"name: a\ntitle: caf\xe9\n", "2:11: byte 0xe9 is not UTF-8; save the file as UTF-8"),
    "broken utf-16": (
        "name: a".encode("utf-16")[:-1],
        "begins like UTF-16 but is not valid UTF-16; save the file as UTF-8",
    ),
    "mark of bytes, latin 1": (b"\xef\xbb\xbfname: \xe9\n", "1:7: byte 0xe9 is not UTF-8; save the file as UTF-8"),
    "nul": (b"name: a\r\nti\0tle\n", "2:3: contains U+0000 (control character), which editors do not show; remove it"),
    "escape": (b"a: 1 # \x1b[2J", "1:8: contains U+001B (control character), which editors do not show; remove it"),
    "bidi": (
        b"a: 1\n# \xe2\x80\xae",
        "2:3: contains U+202E (right-to-left override), which editors do not show; remove it",
    ),
    "no width": (b"a: \xe2\x80\x8b1", "1:4: contains U+200B (zero width space), which editors do not show; remove it"),
    "line separator": (
        b"a: 1\xe2\x80\xa8",
        "1:5: contains U+2028 (line separator), which editors do not show; remove it",
    ),
    "directives": (b"%YAML 1.2\n%YAML 1.2\n---\n", "2:1: not YAML: found duplicate YAML directive"),
    "huge version": (b"%YAML 1." + b"9" * 5000 + b"\n---\n", "1:9: not YAML: an escape or a number out of range"),
    "deep lists": (b"[" * 50_000, "1:18: nested more than 16 levels deep; takes at most 16 levels"),
    "deep keys": (b"? " * 30_000, "1:35: nested more than 16 levels deep; takes at most 16 levels"),
    "large": (b" " * (MAX_BYTES + 1), "is larger than 64 KiB; takes a spec of at most that size"),
}


@pytest.mark.parametrize("case", CONTENT)
def test_content_that_is_no_spec_gives_one_line(case, tmp_path):
    data, line = CONTENT[case]
    path = tmp_path / "a.yaml"
    path.write_bytes(data)
    assert refusal(path) == line


def test_missing_file(tmp_path):
    assert refusal(tmp_path / "none.yaml") == "no such file"


def test_folder(tmp_path):
    assert refusal(tmp_path) == "is a folder; takes a YAML file"


def test_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe.yaml")
    assert refusal(tmp_path / "pipe.yaml") == "is not a regular file; takes a YAML file"


def test_file_below_a_file(tmp_path):
    (tmp_path / "a.yaml").touch()
    assert refusal(tmp_path / "a.yaml" / "b.yaml") == "cannot be read: not a directory"


def test_unreadable_file(tmp_path, monkeypatch):
    path = tmp_path / "a.yaml"
    path.touch()

    def deny(*_):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(Path, "open", deny)
    assert refusal(path) == "cannot be read: permission denied"


def test_path_that_no_file_can_have():
    found = refusal(Path("a\0b.yaml"))
    assert found.startswith("cannot be read: ")
    assert "embedded null" in found  # Pythons word the rest differently


@pytest.mark.parametrize("newline", ["\r\n", "\r", "\n"])
def test_any_line_ending_is_read(newline, valid, tmp_path):
    path = tmp_path / "dsv32.yaml"
    path.write_bytes(valid.replace("\n", newline).encode())
    assert load(path) == parse(valid, path)


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16-le", "utf-16-be"])
def test_a_byte_order_mark_is_read(encoding, valid, tmp_path):
    path = tmp_path / "dsv32.yaml"
    path.write_bytes((valid if encoding == "utf-8-sig" else f"\ufeff{valid}").encode(encoding))
    assert load(path) == parse(valid, path)


def test_last_line_needs_no_end(valid, tmp_path):
    path = tmp_path / "dsv32.yaml"
    path.write_text(valid.rstrip("\n"))
    load(path)
