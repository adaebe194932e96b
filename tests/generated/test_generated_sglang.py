"""SGLang's plugin has the signatures of SGLang's own functions, replaces them once, and computes the same."""

from __future__ import annotations

import importlib
import inspect
import json
import subprocess
import sys
import types
from pathlib import Path

import call_forms
import pytest
from call_forms import ROOT

from mlagen.emit import apply, compare, render, render_plugin
from mlagen.plan import load_plan

SPECS = ("dsv32_fp8", "dsv4_flash", "dsv3", "dsv3_fp8")
HOOKS = ("flash_mla_sparse_fwd", "flash_mla_with_kvcache")
FORMS = {form.wrapper: form for one in call_forms.load() for form in one.forms if form.of == "SGLang"}
INTERFACE = "sglang.kernels.ops.attention.flash_mla_interface"
TOLERANCE = 0.02  # of bf16 outputs up to 4


@pytest.fixture(scope="module")
def plugins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of plugins with their packages, one of a spec with LSE of base 2."""
    folder = tmp_path_factory.mktemp("plugins")
    other = folder / "base2.yaml"
    text = (ROOT / "specs" / "dsv32.yaml").read_text()
    other.write_text(text.replace("name: dsv32 ", "name: base2 ").replace("lse_base: e", "lse_base: '2'"))
    for path in (*(ROOT / "specs" / f"{name}.yaml" for name in SPECS), other):
        plan = load_plan(path)
        plugin, package = render_plugin(plan, "sglang"), render(plan)
        apply(compare(plugin, folder / plugin.name))
        apply(compare(package, folder / plugin.name / package.name))
    return folder


@pytest.fixture
def plugin(plugins, monkeypatch):
    """The plugin of dsv32_fp8, fresh."""
    monkeypatch.syspath_prepend(str(plugins))
    yield importlib.import_module("mlagen_sglang_dsv32_fp8")
    for name in [name for name in sys.modules if name.startswith("mlagen_sglang_")]:
        del sys.modules[name]


@pytest.mark.parametrize("hook", HOOKS)
def test_a_hook_is_declared_as_sglang_declares_it(plugin, hook):
    theirs = FORMS[hook].parameters
    ours = inspect.signature(getattr(plugin, hook)).parameters
    assert list(ours) == list(theirs)
    assert [(one.kind, one.default) for one in ours.values()] == [(one.kind, one.default) for one in theirs.values()]


def test_registering_twice_replaces_each_function_once(plugin, monkeypatch):
    registered = []
    registry = types.ModuleType("sglang.srt.plugins.hook_registry")
    registry.HookRegistry = types.SimpleNamespace(register=lambda *given: registered.append(given))
    registry.HookType = types.SimpleNamespace(REPLACE="replace")
    for name in ("sglang", "sglang.srt", "sglang.srt.plugins"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, registry.__name__, registry)
    plugin.register()
    plugin.register()
    assert registered == [(f"{INTERFACE}.{hook}", getattr(plugin, hook), "replace") for hook in HOOKS]


@pytest.fixture(scope="module")
def calls(plugins):
    command = [sys.executable, Path(__file__).with_name("sglang_calls.py"), plugins]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.interpreter
def test_calls_of_sglangs_shapes_give_attention(calls):
    assert len(calls["errors"]) == 8
    assert {name: error for name, error in calls["errors"].items() if not error < TOLERANCE} == {}


@pytest.mark.interpreter
def test_unsupported_arguments_are_refused_by_name(calls):
    assert calls["refused"] == {
        "dsv32_fp8: ['kv_format']": "kv_format: got 'V32_NO_ROPE', takes 'V32' or None: layout fp8_ds_mla",
        "dsv4_flash: ['kv_format']": "kv_format: got 'V32', takes None: layout ue8m0_v4",
        "dsv4_flash: ['use_legacy']": "use_legacy: got False, takes True: pages of ue8m0_v4 are others",
        "dsv4_flash: ['descale_k']": "descale_q, descale_k: got a scale, takes None: layout ue8m0_v4 has none",
        "dsv3_fp8: []": "descale_k: got None, takes float32 [1]: layout fp8_per_tensor has a scale",
        "dsv3_fp8: ['descale_k']": (
            "descale_q: got None with torch.float8_e4m3fn, takes a scale with torch.float8_e4m3fn alone"
        ),
        "dsv3_fp8: ['descale_k', 'descale_q']": (
            "descale_q: got a scale with torch.bfloat16, takes a scale with torch.float8_e4m3fn alone"
        ),
    }
