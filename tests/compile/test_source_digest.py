"""Dependencies of a kernel's digest."""

from __future__ import annotations

import pytest

from mlagen.digest import SourceDigests
from mlagen.errors import ToolError


def digest(folder, module="tiny", kernel="_tiny_kernel"):
    return SourceDigests(folder).digest(module, kernel)


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("tiny.py", "DIM = tl.constexpr(64)", "DIM = tl.constexpr(128)"),
        ("tiny.py", "return x * x", "return x * x * x"),
        ("tiny.py", 'do_not_specialize=["rows", "bias_ptr"]', 'do_not_specialize=["rows"]'),
        ("tiny.py", "SCALE: tl.constexpr):", "SCALE: tl.constexpr = 1.0):"),
        ("tiny.py", "def wrapper", "DIM.value = 32\n\n\ndef wrapper"),
        ("tiny.py", "def wrapper", "if True:\n    DIM = tl.constexpr(32)\n\n\ndef wrapper"),
        ("scale.py", "1.4426950408889634", "1.0"),
        ("scale.py", "return x * LOG2_E", "return LOG2_E * x"),
    ],
)
def test_code_that_reaches_the_kernel_counts(package, copied, file, old, new):
    text = (copied / file).read_text()
    assert old in text
    (copied / file).write_text(text.replace(old, new))
    assert digest(copied) != digest(package)


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("tiny.py", "import triton\n", "\n# A comment.\n\nimport triton\n"),
        ("tiny.py", '"""Square elementwise."""', '"""Square every element."""'),
        ("tiny.py", "return TILES[16] * rows", "return rows"),
        ("tiny.py", "TILES = {16: 4}", "TILES = {16: 8}"),
        ("scale.py", "return x + 1.0", "return x + 2.0"),
        ("misfits.py", "return x + y", "return x - y"),
        ("__init__.py", "Small kernels", "Kernels"),
    ],
)
def test_text_that_does_not_reach_the_kernel_is_ignored(package, copied, file, old, new):
    text = (copied / file).read_text()
    assert old in text
    (copied / file).write_text(text.replace(old, new))
    assert digest(copied) == digest(package)


@pytest.mark.parametrize(
    ("statement", "call"),
    [
        ("from .scale import *", "to_log2"),
        ("from . import scale", "scale.to_log2"),
        ("from .scale import to_log2 as renamed", "renamed"),
        ("from .inner.deep import to_log2", "to_log2"),
    ],
)
def test_every_form_of_relative_import_is_followed(copied, statement, call):
    (copied / "inner").mkdir()
    (copied / "inner" / "__init__.py").touch()
    (copied / "inner" / "deep.py").write_text("from ..scale import to_log2\n")
    text = (copied / "tiny.py").read_text()
    text = text.replace("from .scale import to_log2", statement).replace("to_log2(tl", f"{call}(tl")
    (copied / "tiny.py").write_text(text)
    before = digest(copied)
    scale = copied / "scale.py"
    scale.write_text(scale.read_text().replace("1.4426950408889634", "1.0"))
    assert digest(copied) != before


@pytest.fixture
def named(copied):
    """The package. Its kernel calls a function of one of its modules."""
    tiny = copied / "tiny.py"
    text = tiny.read_text().replace("from .scale import to_log2", "from . import scale, misfits")
    tiny.write_text(text.replace("to_log2(tl", "scale.to_log2(tl"))
    return copied


def test_only_referenced_names_of_a_module_count(named):
    before = digest(named)
    scale = named / "scale.py"
    scale.write_text(scale.read_text().replace("return x + 1.0", "return x + 2.0"))
    assert digest(named) == before
    scale.write_text(scale.read_text().replace("1.4426950408889634", "1.0"))
    assert digest(named) != before


def test_a_module_that_its_package_imports_by_its_name_is_followed_as_narrowly(named):
    before = digest(named)
    init = named / "__init__.py"
    init.write_text(init.read_text() + "\nfrom . import scale\n")
    assert digest(named) == before


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("tiny.py", "import scale, misfits", "import misfits as scale, scale as misfits"),
        ("tiny.py", "def wrapper", "scale = misfits\n\n\ndef wrapper"),
        ("__init__.py", "", "from . import misfits as scale\n"),
        ("scale.py", "", "\nfor name in ():\n    LOG2_E.value = name\n"),
    ],
)
def test_the_object_behind_a_name_counts(named, file, old, new):
    (named / "misfits.py").write_text((named / "scale.py").read_text())
    before = digest(named)
    text = (named / file).read_text()
    (named / file).write_text(text.replace(old, new, 1) if old else text + new)
    assert digest(named) != before


def test_a_file_that_does_not_parse_is_shown(copied):
    (copied / "tiny.py").write_text("x = 1\ndef (\n")
    with pytest.raises(ToolError, match="does not parse") as caught:
        digest(copied)
    assert str(caught.value.place) == f"{copied / 'tiny.py'}:2"
