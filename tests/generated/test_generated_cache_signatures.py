"""Index kernels and cache kernels take the calls of vLLM 0.24 and of newer versions, each position as both mean it."""

import importlib
import inspect
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BY_POSITION = {
    "triton_convert_req_index_to_global_index": "req_id block_table token_indices BLOCK_SIZE",
    "combine_topk_swa_indices": "topk_indices query_start_loc seq_lens gather_lens window_size compress_ratio topk M N",
    "concat_and_cache_mla": "kv_c k_pe kv_cache slot_mapping kv_cache_dtype scale skip_scale",
    "quantize_and_insert_k_cache": "k k_cache slot_mapping block_size is_ue8m0 use_fnuz bytes_per_token",
    "dequantize_and_gather_k_cache": (
        "out k_cache seq_lens gather_lens block_table block_size offset use_fnuz max_gather_len"
    ),
    "compute_global_topk_indices_and_lens": "topk_indices token_to_req block_table block_size is_valid_token",
}
BY_NAME = {
    "triton_convert_req_index_to_global_index": (
        "NUM_TOPK_TOKENS BLOCK_N HAS_PREFILL_WORKSPACE prefill_workspace_request_ids prefill_workspace_starts "
        "return_valid_counts",
        "BLOCK_STRIDE_ROWS NUM_TOPK_TOKENS return_valid_counts out valid_counts_out idx_mapping dcp_size dcp_rank "
        "cp_kv_cache_interleave_size compact",
    ),
    "combine_topk_swa_indices": ("", "out left_visible right_visible max_image_tokens compact"),
    "compute_global_topk_indices_and_lens": ("", "compact"),
}
PACKAGES = ("dsv32_fp8", "dsv4_flash", "odd_fp8")


@pytest.fixture(scope="module")
def wrappers():
    """Every wrapper of BY_POSITION, of each package that has it."""
    sys.path.insert(0, str(ROOT / "generated"))
    try:
        packages = [importlib.import_module(name) for name in PACKAGES]
    finally:
        sys.path.remove(str(ROOT / "generated"))
    return {name: [getattr(one, name) for one in packages if hasattr(one, name)] for name in BY_POSITION}


def positional(function) -> list[str]:
    parameters = inspect.signature(function).parameters.values()
    return [one.name for one in parameters if one.kind is one.POSITIONAL_OR_KEYWORD]


@pytest.mark.parametrize("name", BY_POSITION)
def test_positions_are_those_that_every_version_agrees_on(wrappers, name):
    assert wrappers[name]
    for function in wrappers[name]:
        assert positional(function) == BY_POSITION[name].split()


@pytest.mark.parametrize(("name", "names"), [(name, names) for name, calls in BY_NAME.items() for names in calls])
def test_calls_of_either_version_bind(wrappers, name, names):
    given = dict.fromkeys(names.split())
    for function in wrappers[name]:
        inspect.signature(function).bind(*BY_POSITION[name].split(), **given)


def test_requests_of_tokens_have_two_names(wrappers):
    (function,) = wrappers["compute_global_topk_indices_and_lens"]
    names = BY_POSITION[function.__name__].replace("token_to_req", "token_to_req_indices").split()
    inspect.signature(function).bind(**dict.fromkeys(names))


def test_what_versions_mean_otherwise_is_refused_by_position(wrappers):
    (function,) = wrappers["triton_convert_req_index_to_global_index"]
    with pytest.raises(TypeError, match="positional"):
        inspect.signature(function).bind(1, 2, 3, 64, 2048)
