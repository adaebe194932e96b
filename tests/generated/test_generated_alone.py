"""A generated package needs torch, triton and the standard library, nothing of mlagen, and raises no warning."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from checked_in import PACKAGES as EVERY

ALONE = Path(__file__).with_name("alone.py")
# `alone.py` has no arguments for a cache in two tensors, nor for the wrappers of latents: `valid_calls.py` has.
PACKAGES = [folder for folder in EVERY if folder.name != "ckv_kpe"]
by_package = pytest.mark.parametrize("package", PACKAGES, ids=lambda path: path.name)
# Unmended, Triton's interpreter is right only for fp16; 3.6 takes no tensor as a loop bound under numpy 2.4,
# and 3.9 no mask that joins a scalar and a block.
BARE_INTERPRETER = not importlib.metadata.version("triton").startswith(("3.6.", "3.9."))

# Merges begin with the least float32. Times log2(e) it is -inf, and its weight is 0.
MERGED = "ignore:overflow encountered in multiply:RuntimeWarning"


def alone(packages: Sequence[Path], mode: str, cwd: Path, **environment: str) -> dict[str, list[str]]:
    """By package, lines that its wrappers print in a process of the packages' own, in another folder."""
    command = [sys.executable, "-I", "-B", "-W", "error", "-W", MERGED, str(ALONE), mode, *map(str, packages)]
    env = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")} | environment
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert list(cwd.iterdir()) == []
    said: dict[str, list[str]] = {package.name: [] for package in packages}
    for line in done.stdout.splitlines():
        name, _, rest = line.partition(" ")
        said[name].append(rest)
    return said


@pytest.fixture(scope="module")
def refusals(tmp_path_factory) -> dict[str, list[str]]:
    return alone(PACKAGES, "refuse", tmp_path_factory.mktemp("elsewhere"))


FIRST_ARGUMENT = {
    "flash_mla_sparse_fwd": "q",
    "triton_mla_sparse_attention": "q",
    "flash_mla_with_kvcache": "q",
    "flash_attn_varlen_func": "q",
    "merge_attn_states": "output",
    "merge_attn_parts": "outputs",
    "concat_and_cache_mla": "kv_c",
    "quantize_and_insert_k_cache": "k",
    "dequantize_and_gather_k_cache": "out",
    "gather_and_maybe_dequant_cache": "src_cache",
    "compute_global_topk_indices_and_lens": "topk_indices",
    "combine_topk_swa_indices": "topk_indices",
    "triton_convert_req_index_to_global_index": "req_id",
    "fused_inv_rope_fp8_quant": "o",
    "indexer_k_quant_and_cache": "k",
    "indexer_k_norm_rope_store": "k_pre",
    "fused_indexer_q_rope_quant": "positions",
    "indexer_qk_rope_quant_and_cache": "q",
    "cp_gather_indexer_k_quant_cache": "kv_cache",
    "fwht128_quant_fp8": "q",
    "kpool_compress_and_write_cache": "slot_k",
    "kpool_seed_tail_cache": "key",
    "kpool_decode_update_and_maybe_write_cache_batched": "key",
    "expand_pools_and_append_tail": "pool_ids",
    "fp8_mqa_logits": "weights",
    "fp8_fp4_mqa_logits": "weights",
    "get_paged_mqa_logits_metadata": "context_lens",
    "fp8_paged_mqa_logits": "weights",
    "fp8_fp4_paged_mqa_logits": "weights",
    "top_k_per_row_prefill": "logits",
    "top_k_per_row_decode": "logits",
    "persistent_topk": "logits",
    "top_k_page_table_transform": "input",
    "topk_merge": "scores",
    "indexer_topk": "weights",
    "paged_indexer_topk": "weights",
    "select_candidate_blocks": "logits",
    "candidate_mqa_logits": "weights",
    "paged_candidate_mqa_logits": "weights",
    "candidate_indexer_topk": "weights",
    "paged_candidate_indexer_topk": "weights",
}


@by_package
def test_wrappers_refuse_a_wrong_argument_before_any_launch(package, refusals):
    lines = refusals[package.name]
    said = {
        name: [line.partition(": ")[2] for line in lines if line.startswith(f"{name}: ")] for name in FIRST_ARGUMENT
    }
    said = {name: found for name, found in said.items() if found}
    (wrappers,) = [line for line in (package / "__init__.py").read_text().split("\n\n") if line.startswith("__all__")]
    assert sorted(said) == sorted(name for name in FIRST_ARGUMENT if f'"{name}"' in wrappers)
    for name, (dtype, absent, device) in said.items():
        argument = FIRST_ARGUMENT[name]
        assert device == "device: got cpu, takes a CUDA or ROCm device"
        assert dtype == device or dtype.startswith(f"{argument}: got torch.float64, takes torch.")
        assert absent in (device, f"{argument}: got None, takes a tensor")


@pytest.mark.skipif(not BARE_INTERPRETER, reason="this Triton's interpreter needs mending")
@pytest.mark.parametrize("name", ["odd", "odd_fp8", "odd_prefill"])
@pytest.mark.interpreter
def test_the_fp16_packages_run_each_wrapper_on_the_interpreter(name, tmp_path):
    (package,) = [package for package in PACKAGES if package.name == name]
    assert alone([package], "run", tmp_path, TRITON_INTERPRET="1")[name]
