"""SGLang's plugin: which specs have one, which functions it replaces, and that it reads as if written by hand."""

from __future__ import annotations

import ast
import subprocess
import sys

import pytest
from checked_in import SPECS
from emit_specs import ROOT, make_spec

from mlagen.emit import render_plugin
from mlagen.errors import UsageError
from mlagen.plan import load_plan, make_plan

PLANS = {path.stem: load_plan(path) for path in SPECS}
REFUSED = {
    "dots3_sliding": "attention.window: got 513; a package for SGLang takes none",
    "dsv32_fp8_tensor": "cache.layout: got 'fp8_per_tensor'; a package for SGLang takes fp8_ds_mla, ue8m0_v4",
    "dsv4_flash_out_fp8": "attention.out_rope: got 'inverse'; a package for SGLang takes none",
    "dsv4_flash_out_rope": "attention.out_rope: got 'inverse'; a package for SGLang takes none",
    "dsv32_nvfp4": "cache.layout: got 'nvfp4_ds_mla'; a package for SGLang takes fp8_ds_mla, ue8m0_v4, mxfp8_v41 with",
    "odd": "cache.block_size: got 53; a package for SGLang takes none",
    "odd_fp8": "cache.layout: got 'odd_planar'",
    "ckv_kpe": "cache.layout: got 'ckv_kpe'",
    "own_layout": "cache.layout: got 'nvfp4_bf16_rope'",
    **{name: "wrappers: got flash_attn_varlen_func" for name in PLANS if "_prefill" in name},
}
TAKEN = sorted(set(PLANS) - set(REFUSED))


def text(name: str) -> str:
    (file,) = render_plugin(PLANS[name], "sglang").files
    return file.text


@pytest.mark.parametrize("name", TAKEN)
def test_a_plugin_replaces_the_functions_that_the_spec_names(name):
    functions = {node.name for node in ast.parse(text(name)).body if isinstance(node, ast.FunctionDef)}
    wrappers = {one for one in PLANS[name].spec.wrappers if one.startswith("flash_mla_")}
    assert functions == {"register", *wrappers}


@pytest.mark.parametrize("name", REFUSED)
def test_a_spec_whose_attention_sglang_does_not_call_is_refused(name):
    with pytest.raises(UsageError) as refused:
        render_plugin(PLANS[name], "sglang")
    assert str(refused.value).startswith(REFUSED[name])


def test_pages_of_v41_are_those_of_the_newer_flashmla():
    assert "    if use_legacy:\n        raise" in text("dsv41")
    assert "    if not use_legacy:\n        raise" in text("dsv4_flash")


def test_an_lse_of_base_2_is_changed_where_sglang_expects_base_e():
    natural, other = text("dsv32_fp8"), render_plugin(make_plan(make_spec(lse_base="2")), "sglang").files[0].text
    assert "if use_legacy:\n        max_logits.mul_(LOG2_E)" in natural
    assert "if not use_legacy:\n        max_logits.mul_(LN_2)" in other
    assert "LOG2_E" not in other


def test_plugins_are_formatted_and_lint_free(tmp_path):
    for name in TAKEN:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(text(name))
    config = ["--config", str(ROOT / "pyproject.toml"), str(tmp_path)]
    for command in (["format", "--check"], ["check"]):
        done = subprocess.run(
            [sys.executable, "-m", "ruff", *command, *config], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
