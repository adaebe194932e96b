"""vLLM's plugin of a package: it registers, names the GPUs that it runs on, and computes vLLM's calls.

Over a stand-in for vLLM 0.26 and 0.33 everywhere; over vLLM's own Python where MLAGEN_VLLM is the PYTHONPATH for
`import vllm`.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from once import findings
from rotation import some

PROBE = Path(__file__).with_name("vllm_probe.py")
NAMES = ("dsv32", "dsv32_fp8", "dsv3", "dsv3_fp8", "glm53_fp8_vllm")
ENGINES = ("0.26", "0.33", "vllm")
MOST = dict.fromkeys(NAMES, 0.01) | {"dsv3_fp8": 0.02}  # errors; half a unit of bf16 at 2 is 0.004
SETTINGS = ("MLAGEN_INDEXER", "VLLM_BATCH_INVARIANT")
PICKED = ["top_k_per_row_prefill", "top_k_per_row_decode", "persistent_topk", "cooperative_topk"]
EVERYWHERE = ("8.0", "8.6", "8.9", "9.0", "10.0", "10.3", "12.0", "12.1")

pytestmark = pytest.mark.interpreter
of_package = pytest.mark.parametrize("name", some(NAMES, 3))
of_engine = pytest.mark.parametrize("engine", ENGINES)
of_one_engine = pytest.mark.parametrize("engine", [*some(["0.26", "0.33"], 1), "vllm"])  # of the stand-ins


def probe(
    folder: Path, name: str, engine: str, capability: str = "8.6", what: str = "attention", said: str = ""
) -> dict[str, Any]:
    """The probe's findings, with the indexer's setting in the environment."""
    environment = {key: value for key, value in os.environ.items() if key not in SETTINGS}
    environment |= dict(word.split("=") for word in said.split())
    if engine == "vllm":
        if "MLAGEN_VLLM" not in environment:
            pytest.skip("MLAGEN_VLLM names no vLLM")
        environment["PYTHONPATH"] = environment["MLAGEN_VLLM"]
    command = [str(PROBE), str(folder), f"mlagen_vllm_{name}", engine, capability, what]
    found: dict[str, Any] = findings(folder, command, environment, said)
    return found


@of_package
@of_engine
def test_registering_twice_is_as_registering_once(name: str, engine: str, unpacked) -> None:
    found = probe(unpacked(name), name, engine)["registered"]
    assert found["same"]
    assert f"MLAGEN_{name.upper()}" in found["names"] or "CUSTOM" in found["names"]


@of_package
@of_engine
def test_every_gpu_with_kernels_is_taken_and_no_other(name: str, engine: str, unpacked) -> None:
    refusals = probe(unpacked(name), name, engine)["refusals"]
    assert [capability for capability, reasons in refusals.items() if not reasons] == list(EVERYWHERE)
    assert refusals["7.5"] == ["compute capability not supported"]


@of_package
@of_engine
def test_vllms_calls_run_attention_over_its_cache(name: str, engine: str, unpacked) -> None:
    found = probe(unpacked(name), name, engine)
    for way in ("forward", "apart"):  # pages one after another, and with those of another layer between
        if way in found:
            assert found[way]["error"] < MOST[name]
            assert found[way]["empty"] == 0


@pytest.mark.parametrize("name", ["dsv32", "dsv32_fp8"])
@pytest.mark.parametrize("engine", ["0.26", "0.33"])
def test_batch_invariance_holds_in_whatever_order_indices_come(name: str, engine: str, unpacked) -> None:
    assert probe(unpacked(name), name, engine, what="order", said="MLAGEN_INDEXER=0")["reordered"]  # vLLM picks


@pytest.mark.parametrize("name", ["dsv3", "dsv3_fp8"])
@of_engine
def test_ranks_that_share_a_context_merge_to_the_whole(name: str, engine: str, unpacked) -> None:
    found = probe(unpacked(name), name, engine)
    assert found["can share a context"]
    for one in found["ranks"]:
        assert one["error"] < MOST[name]
        assert one["empty"] == 0
    assert found["several tokens"] == "q: got 4 tokens of 2 requests, takes one each of a context that ranks share"
    assert found["uneven tokens"] == "q: got 5 tokens of 2 requests, takes as many of each"


@pytest.mark.parametrize("name", ["dsv32_fp8", "glm53_fp8_vllm", "dsv32"])
@of_one_engine
def test_ranks_that_share_a_context_of_sparse_attention_merge_to_the_whole(name: str, engine: str, unpacked) -> None:
    found = probe(unpacked(name), name, engine)
    assert found["can share a context"]
    for one in found["ranks"]:
        assert one["error"] < 0.01
        assert one["empty"]  # 0 and -inf
        assert one["keyless"]


@pytest.mark.parametrize("name", ["dsv32", "dsv3", "dsv3_fp8"])
@of_engine
def test_ranks_of_a_context_are_offered_and_ranks_of_a_prefill_are_not(name: str, engine: str, unpacked) -> None:
    found = probe(unpacked(name), name, engine, what="declared")
    assert (found["supports_dcp"], found["supports_pcp"]) == (True, False)
    if name != "dsv32":  # of equal numbers of query tokens, by the host's plan
        assert not found["supports_device_cpu_query_lens_mismatch"]


@pytest.mark.parametrize("name", ["dsv32", "dsv32_fp8", "dsv3"])
def test_a_backend_named_for_one_kind_of_layer_leaves_the_others_to_vllm(name: str, unpacked) -> None:
    found = probe(unpacked(name), name, "vllm", "9.0", "kinds")["kinds"]
    assert found["mla"] == f"mlagen_vllm_{name}.backend.Backend"
    assert found["full"].startswith("vllm.v1.attention.backends.")
    assert "is not valid for this configuration" in found["window"]
    assert "'sliding window not supported'" in found["window"]
    assert "Unknown KV cache group kind 'mla'" in found["unknown"]


@of_engine
def test_without_an_owner_filter_no_ranks_share_a_context(engine: str, unpacked) -> None:
    assert not probe(unpacked("dsv32_unshared"), "dsv32_unshared", engine)["can share a context"]


@pytest.mark.parametrize("name", ["dsv3", "dsv3_fp8"])
@pytest.mark.parametrize(("engine", "declared"), [("0.26", False), ("0.33", True)])
def test_tokens_that_see_each_other_are_offered_where_vllm_tells_them(
    name: str, engine: str, declared: bool, unpacked
) -> None:
    found = probe(unpacked(name), name, engine)["non causal"]
    assert found["error"] < MOST[name]
    assert (found["declared"], found["built"]) == (declared, True)


def test_logits_on_sm100_are_refused_at_start(unpacked) -> None:
    with pytest.raises(AssertionError, match="MLAGEN_INDEXER: got 1 on sm100, takes 0 or no value there"):
        probe(unpacked("dsv32"), "dsv32", "0.33", "10.0", "indexer", "MLAGEN_INDEXER=1")


@pytest.mark.parametrize(
    ("name", "whose"), [("dsv32_unshared", "vLLM's"), ("dsv32_fp8", "mlagen_vllm_dsv32_fp8.dsv32_fp8")]
)
@of_engine
def test_places_of_indices_are_vllms_by_the_packages_function_if_it_has_one(
    name: str, whose: str, engine: str, unpacked
) -> None:
    found = probe(unpacked(name), name, engine)["conversion"]
    assert found["whose"] == whose
    if whose != "vLLM's":
        assert (found["wrong"], found["calls"]) == (0, 12)


@pytest.mark.parametrize(
    ("name", "capability", "taken"),
    [
        ("dsv32", "8.0", ["FLASHMLA_SPARSE"]),
        ("dsv32", "8.9", ["FLASHMLA_SPARSE"]),
        ("dsv32", "9.0", []),
        ("dsv32", "12.0", []),
        ("dsv32", "none", []),
        ("dsv3", "8.6", []),
    ],
)
def test_the_platforms_own_list_is_joined_where_vllm_has_no_backend(
    name: str, capability: str, taken: list[str], unpacked
) -> None:
    names = probe(unpacked(name), name, "0.33", capability, "registration")["registered"]["names"]
    assert [one for one in names if not one.startswith("MLAGEN")] == taken


@pytest.mark.parametrize("name", ["dsv32", "dsv32_fp8"])
@of_engine
def test_the_indexer_scores_and_picks_by_the_package(name: str, engine: str, unpacked) -> None:
    found = probe(unpacked(name), name, engine, what="indexer")
    assert found["flat"] < 1e-5
    assert found["paged"] < 1e-5
    assert found["picks"] == PICKED
    assert found["merges"]


@pytest.mark.parametrize(
    ("capability", "said", "scores", "picks"),
    [
        ("9.0", "", True, True),
        ("10.0", "", False, False),
        ("9.0", "MLAGEN_INDEXER=0", False, False),
        ("10.0", "VLLM_BATCH_INVARIANT=1", False, True),
        ("9.0", "VLLM_BATCH_INVARIANT=1 MLAGEN_INDEXER=0", False, False),
        ("8.6", "MLAGEN_INDEXER=0", False, False),
        ("none", "", False, False),
    ],
)
def test_who_scores_and_who_picks_is_as_one_says(
    capability: str, said: str, scores: bool, picks: bool, unpacked
) -> None:
    found = probe(unpacked("dsv32"), "dsv32", "0.33", capability, "indexer", said)
    assert (found["flat"] is not None, found["paged"] is not None) == (scores, scores)
    assert found["picks"] == (PICKED if picks else [])
    assert found["merges"] == picks
