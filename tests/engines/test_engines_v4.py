"""DeepSeek V4's plugin over a stand-in for vLLM: which class a model takes, and attention of every kind of layer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from once import findings

from mlagen.cli import main

ROOT = Path(__file__).resolve().parents[2]
PROBE = Path(__file__).with_name("v4_probe.py")
OWN = "DeepseekV4FlashMLAAttention"

pytestmark = pytest.mark.interpreter


def probe(folder: Path, engine: str, capability: str) -> dict[str, Any]:
    """The probe's findings."""
    return findings(folder, [str(PROBE), str(folder), "mlagen_vllm_dsv4_flash", engine, capability])


@pytest.mark.parametrize("engine", ["0.26", "0.33"])
@pytest.mark.parametrize(("capability", "alone"), [("8.6", "Attention"), ("9.0", OWN), ("12.0", OWN)])
def test_class_is_chosen_by_name_or_where_vllm_has_none(engine: str, capability: str, alone: str, unpacked) -> None:
    found = probe(unpacked("dsv4_flash"), engine, capability)["selected"]
    assert found == {"ours": "Attention", "another": OWN, "nothing": alone, "again": "same"}


@pytest.mark.parametrize("engine", ["0.26", "0.33"])
def test_vllms_module_is_wrapped_when_vllm_imports_it_and_not_before(engine: str, unpacked) -> None:
    assert probe(unpacked("dsv4_flash"), engine, "9.0")["imported"] == {
        "by the plugin": False,
        "waits once": True,
        "reads what vLLM has set": True,
        "plugins": 1,
        "another": "vLLM's",
        "still waits": False,
    }


def test_heads_are_as_many_as_vllms_norm_of_the_query_takes(unpacked) -> None:
    assert probe(unpacked("dsv4_flash"), "0.26", "9.0")["heads"] == [8, 8, 16, 16, 64, 128, 128]


@pytest.mark.parametrize("ratio", ["1", "4", "128"])
def test_a_layer_is_attention_over_both_caches(ratio: str, unpacked) -> None:
    found = probe(unpacked("dsv4_flash"), "0.26", "8.6")["forward"][ratio]
    assert found["decode"] < 0.01
    assert found["prefill"] < 0.01
    assert found["without a batch"] == 0


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("attn_sink: optional", "attn_sink: none"), "attention.attn_sink: got 'none'"),
        (("  - combine_topk_swa_indices", "#"), "wrappers: got "),
        (("  window: 128", "  out_rope: inverse\n  window: 128"), "attention.out_rope: got 'inverse'"),
    ],
)
def test_other_attention_than_v4s_is_refused_in_one_line(change: tuple[str, str], said: str, tmp_path: Path) -> None:
    text = (ROOT / "specs" / "dsv4_flash.yaml").read_text(encoding="utf-8")
    assert change[0] in text
    (tmp_path / "dsv4_flash.yaml").write_text(text.replace(*change), encoding="utf-8")
    command = ["package", str(tmp_path / "dsv4_flash.yaml"), "--for", "vllm", "--out", str(tmp_path)]
    done = CliRunner().invoke(main, command)
    assert done.exit_code == 2, done.output
    assert said in done.stderr.splitlines()[0]
    assert len(done.stderr.splitlines()) == 1
