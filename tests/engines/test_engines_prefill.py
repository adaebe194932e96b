"""The MLA prefill backend of vLLM's plugin: registration, validation, and both of its methods against float64.

Over a stand-in for vLLM 0.26 and 0.33 everywhere; over vLLM's own Python where MLAGEN_VLLM is the PYTHONPATH for
`import vllm`.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from once import findings
from padded_spec import BOTH, spec_of
from rotation import some

from mlagen.backends.engines import vllm
from mlagen.cli import main
from mlagen.emit import render_plugin
from mlagen.plan import load_plan

PROBE = Path(__file__).with_name("prefill_probe.py")
SPECS = Path(__file__).resolve().parents[2] / "specs"
NAMES = ("dsv3_prefill", "dsv3_prefill_tma", "glm5_prefill", "minicpm3_prefill", BOTH)
MOST = 1 / 64  # error of out: a unit of bf16 at 2
MOST_LSE = 1e-5
CUSTOM = """--attention-config '{"mla_prefill_backend": "CUSTOM"}'"""
WITHOUT_DESCRIPTORS = {"8.0", "8.6", "8.9"}  # dsv3_prefill_tma has no kernels there

pytestmark = pytest.mark.interpreter
of_package = pytest.mark.parametrize("name", some(NAMES, 3))
of_engine = pytest.mark.parametrize("engine", ["0.26", "0.33", "vllm"])


def probe(folder: Path, name: str, engine: str, what: str, invariant: str = "0") -> Any:
    """The probe's findings."""
    environment = dict(os.environ) | {"VLLM_BATCH_INVARIANT": invariant}
    if engine == "vllm":
        if "MLAGEN_VLLM" not in environment:
            pytest.skip("MLAGEN_VLLM names no vLLM")
        environment["PYTHONPATH"] = environment["MLAGEN_VLLM"]
    capability = "9.0" if name == "dsv3_prefill_tma" else "8.6"
    command = [str(PROBE), str(folder), f"mlagen_vllm_{name}", engine, capability, what]
    return findings(folder, command, environment, invariant)


@of_package
@of_engine
def test_custom_stands_for_the_backend_unless_another_plugin_took_it(name: str, engine: str, unpacked) -> None:
    found = probe(unpacked(name), name, engine, "registry")
    ours = f"mlagen_vllm_{name}.prefill.PrefillBackend"
    assert (found["once"], found["twice"], found["taken"]) == (ours, ours, "another.Backend")
    assert found["said of the name"].endswith(": the name CUSTOM is taken by another.Backend")
    assert found["said of no registry"].endswith(
        ": this vLLM has no registry of MLA prefill backends and computes prefills itself"
    )


@of_package
@of_engine
def test_every_gpu_with_kernels_and_every_model_with_such_heads_is_taken(name: str, engine: str, unpacked) -> None:
    found = probe(unpacked(name), name, engine, "calls")["refusals"]
    lacking = {"7.5"} | (WITHOUT_DESCRIPTORS if name == "dsv3_prefill_tma" else set())
    taken = {capability for capability, reasons in found.items() if capability[0].isdigit() and not reasons}
    assert taken == {"8.0", "8.6", "8.9", "9.0", "10.0", "10.3", "12.0", "12.1"} - lacking
    assert len(found["7.5"]) == 1
    assert len(found["fp16"]) == 1
    assert not found["without rope"]
    assert found["wider v"][-1].startswith(f"{name} takes heads of ")
    assert len(found.get("no capability", "1")) == 1
    assert not found["quantised out"]
    assert found["layer"].startswith("heads: got ")
    assert found.get("selected", f"mlagen_vllm_{name}.prefill.PrefillBackend").startswith(
        f"mlagen_vllm_{name}.prefill."
    )


@of_package
@of_engine
def test_new_tokens_and_chunks_of_a_context_are_attention(name: str, engine: str, unpacked) -> None:
    found = probe(unpacked(name), name, engine, "calls")["attention"]
    for error, lse_error in (found["new"], found["chunks"][:2], found["chunks"][2:]):
        assert error < MOST
        assert lse_error < MOST_LSE
    assert found["lse"] == "torch.float32"
    assert found["empty"]  # 0 and -inf without a key
    assert found["without its LSE"]
    assert found["in place"]
    assert found["output_scale"] == "output_scale: got a tensor, takes None: out is not quantised"
    assert found.get("forward", 0.0) < MOST  # vLLM's own method, which calls both and merges


@of_engine
@pytest.mark.parametrize("invariant", ["0", "1"])
def test_a_batch_invariant_call_has_the_same_bits_in_every_batch(engine: str, invariant: str, unpacked) -> None:
    name = "minicpm3_prefill"  # on sm90 its tiles differ by the longest request
    assert probe(unpacked(name), name, engine, "invariance", invariant) == (invariant == "1")


def test_a_package_has_the_backends_of_its_wrappers(tmp_path: Path) -> None:
    files = {}
    for name in ("dsv3_prefill", "dsv3", BOTH):
        plan = load_plan(spec_of(name, tmp_path))
        files[name] = {file.name for file in render_plugin(plan, "vllm").files}
        command = vllm.serve_command(plan)
        assert (CUSTOM in command) == (name != "dsv3")
        assert ("--attention-backend" in command) == (name != "dsv3_prefill")
    assert files["dsv3_prefill"] == {"prefill.py", "__init__.py"}
    assert files["dsv3"] == {"backend.py", "__init__.py"}
    assert files[BOTH] == {"backend.py", "prefill.py", "__init__.py"}


def test_a_window_which_vllms_calls_do_not_name_is_refused(tmp_path: Path) -> None:
    text = (SPECS / "dsv3_prefill.yaml").read_text(encoding="utf-8")
    (tmp_path / "dsv3_prefill.yaml").write_text(text.replace("multi_head:\n", "multi_head:\n  window: 512\n"), "utf-8")
    command = ["package", str(tmp_path / "dsv3_prefill.yaml"), "--for", "vllm", "--out", str(tmp_path)]
    done = CliRunner().invoke(main, command)
    assert done.exit_code == 2
    said = "multi_head.window: got 512; a package for vLLM takes none: vLLM's prefill calls name none"
    assert said in done.stderr
