"""Messages of failures in reports."""

from __future__ import annotations

from mlagen.bench.check import one_line


def test_a_message_names_files_without_their_folders() -> None:
    found = one_line(RuntimeError("failed at /some/lib/torch/shim.h, line 3\nmore"))
    assert found == "RuntimeError: failed at shim.h, line 3"
