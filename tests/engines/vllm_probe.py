"""Runs a plugin over vLLM's Python, or over its stand-in, in Triton's interpreter, and prints its findings as JSON.

Arguments: the folder that holds the plugin, its name, the engine ("vllm", or "0.26" or "0.33" for the stand-in's),
the platform's compute capability, such as 8.6, or "none", and the part to look at, such as "attention" or "indexer".
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import os
import sys
import types
import unittest.mock
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

import torch
import vllm_indexer

HEADS, TOPK, PAGE, PAGES = 4, 128, 64, 3
LENGTHS = (32, 1, 0, 7, 32)  # of the tokens of a sparse call, and of the requests of a dense one
CAPABILITIES = ((7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0), (12, 1))
SCALE = 0.0723


def place(engine: str, capability_name: str) -> None:
    """Makes the engine importable, on a platform that tells the capability."""
    import stand_in

    capability = None if capability_name == "none" else stand_in.Capability(*map(int, capability_name.split(".")))
    if engine != "vllm":
        stand_in.install(engine, capability)
        return
    from vllm import platforms
    from vllm.platforms.interface import DeviceCapability

    _without_triton(stand_in)
    if capability is not None:
        platforms.current_platform.is_cuda = lambda: True  # type: ignore[method-assign]
        platforms.current_platform.get_device_capability = lambda *_: DeviceCapability(*capability)  # type: ignore


def _without_triton(stand_in: Any) -> None:
    """Converts indices in torch under the signature of vLLM, which has no Triton where it finds no GPU."""
    from vllm.v1.attention.backends.mla import sparse_utils

    signature = inspect.signature(sparse_utils.triton_convert_req_index_to_global_index)

    def converted(*arguments: Any, **options: Any) -> Any:
        given = signature.bind(*arguments, **options).arguments
        req_id, table, positions = (given[name] for name in ("req_id", "block_table", "token_indices"))
        metadata = types.SimpleNamespace(req_id_per_token=req_id, block_table=table, block_size=given["BLOCK_SIZE"])
        return stand_in.convert(metadata, positions, given["BLOCK_SIZE"])

    sparse_utils.triton_convert_req_index_to_global_index = converted


def registered(plugin: Any) -> dict[str, Any]:
    """The names that stand for the backend after two calls of `register`."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    plugin.register()
    once = {name: member.get_path() for name, member in AttentionBackendEnum.__members__.items() if _is(member, plugin)}
    plugin.register()
    twice = {
        name: member.get_path() for name, member in AttentionBackendEnum.__members__.items() if _is(member, plugin)
    }
    return {"names": sorted(once), "same": once == twice}


def _is(member: Any, plugin: Any) -> bool:
    return (member.is_overridden() or member.name == plugin.NAME) and member.get_path() == plugin.BACKEND


def refusals(backend: Any, spec: dict[str, Any]) -> dict[str, list[str]]:
    """vLLM's reasons against the backend for the spec's model, by capability."""
    import stand_in

    try:
        from vllm.platforms.interface import DeviceCapability
    except ImportError:
        DeviceCapability = stand_in.Capability
    asked = {
        "head_size": spec["model"]["kv_lora_rank"] + spec["model"]["qk_rope_head_dim"],
        "dtype": torch.bfloat16,
        "kv_cache_dtype": backend.supported_kv_cache_dtypes[0],
        "block_size": 64,
        "use_mla": True,
        "has_sink": False,
        "use_sparse": spec["attention"]["kind"] == "sparse",
        "use_mm_prefix": False,
        "use_per_head_quant_scales": False,
        "attn_type": "decoder",
        "use_batch_invariant": True,
    }
    return {
        f"{major}.{minor}": backend.validate_configuration(device_capability=DeviceCapability(major, minor), **asked)
        for major, minor in CAPABILITIES
    }


class Cache:
    """Pages of random rows as vLLM keeps them, and the same rows in float64 as readers find them; the rest is NaN."""

    def __init__(self, spec: dict[str, Any], apart: bool) -> None:
        from mlagen.layout import layouts_of
        from mlagen.layout.codec import decode, encode

        layout, _ = layouts_of(spec)
        assert layout is not None
        columns = spec["model"]["kv_lora_rank"] + spec["model"]["qk_rope_head_dim"]
        rows = torch.randn(PAGES * PAGE, columns, generator=torch.Generator().manual_seed(1)).bfloat16()
        self.scale = torch.tensor([0.03]) if layout.tensor_scale else None
        planes = encode(layout, rows, self.scale)
        self.rows = decode(layout, planes, self.scale).double()
        stored = planes[0].view(PAGES, PAGE, layout.row_bytes)
        pages = torch.full((PAGES, 2 * PAGE if apart else PAGE, layout.row_bytes), 0xFF, dtype=torch.uint8)
        self.pages = pages[:, :PAGE]
        self.pages.copy_(stored)
        if not layout.quantised:
            self.pages = pages.view(torch.bfloat16)[:, :PAGE]
        elif layout.tensor_scale:
            self.pages = pages.view(torch.float8_e4m3fn)[:, :PAGE]


def attend(q: torch.Tensor, keys: torch.Tensor, d_v: int) -> torch.Tensor:
    """Attention of one token's heads [h, d] over its keys [n, d], in float64; 0 without a key."""
    return ((q.double() @ keys.T) * SCALE).softmax(1) @ keys[:, :d_v]


def forward(backend: Any, spec: dict[str, Any], apart: bool) -> dict[str, float]:
    """The largest error of the method that vLLM calls, and the largest value of the rows without a key."""
    import stand_in

    model, requests, sparse = spec["model"], len(LENGTHS), spec["attention"]["kind"] == "sparse"
    per_request = 1 if sparse else 2  # query tokens; of two the first does not see the last key
    cache, d_v = Cache(spec, apart), model["kv_lora_rank"]
    generator = torch.Generator().manual_seed(2)
    q = torch.randn(requests * per_request, HEADS, cache.rows.shape[1], generator=generator).bfloat16()
    table = torch.tensor([[2, 0], [1, 2], [0, 1], [1, 0], [0, 2]], dtype=torch.int32)
    positions = torch.full((requests, TOPK), -1, dtype=torch.int32)
    for request, length in enumerate(LENGTHS):
        positions[request, :length] = torch.randperm(2 * PAGE, generator=generator)[:length].int()
    metadata = types.SimpleNamespace(
        req_id_per_token=torch.arange(requests, dtype=torch.int32),
        block_table=table,
        block_size=PAGE,
        num_decode_tokens=len(q),
        num_decodes=requests,
        decode=types.SimpleNamespace(block_table=table, seq_lens=torch.tensor(LENGTHS, dtype=torch.int32)),
    )
    impl = make_impl(backend, model, cache, positions)
    layer = types.SimpleNamespace(_k_scale=cache.scale)
    latent = q[..., :d_v].transpose(0, 1).contiguous().transpose(0, 1)  # as a batched product by heads leaves it
    query = (latent, q[..., d_v:].contiguous())
    with unittest.mock.patch.object(torch, "cat", None):  # the two stay where they are
        if hasattr(impl, "prepare_for_batch") and sparse:  # 0.33's, which needs an engine
            rows = stand_in.convert(metadata, positions, cache.pages.stride(0) // cache.pages.stride(1))
            out, lse = impl._forward_mqa_kernel(query, cache.pages, *rows, layer=layer, block_size=PAGE, is_decode=True)
        else:
            out, lse = impl.forward_mqa(query, cache.pages, metadata, layer)
    assert lse is None
    wanted = torch.zeros(len(q), HEADS, d_v, dtype=torch.float64)
    empty = []
    for token in range(len(q)):
        request, later = divmod(token, per_request)
        length = LENGTHS[request] - (per_request - 1 - later)
        if length <= 0:
            empty.append(token)
            continue
        at = positions[request, :length].long() if sparse else torch.arange(length)
        wanted[token] = attend(q[token], cache.rows[table[request, at // PAGE].long() * PAGE + at % PAGE], d_v)
    return {"error": (out.double() - wanted).abs().max().item(), "empty": out[empty].abs().max().item()}


def reordered(backend: Any, spec: dict[str, Any]) -> bool:
    """Whether a batch-invariant call gives the same bits for any order of the indices, which it leaves."""
    cache, model, outs = Cache(spec, apart=False), spec["model"], []
    generator = torch.Generator().manual_seed(2)
    q = torch.randn(1, HEADS, cache.rows.shape[1], generator=generator).bfloat16()
    table = torch.tensor([[2, 0]], dtype=torch.int32)
    metadata = types.SimpleNamespace(
        req_id_per_token=torch.zeros(1, dtype=torch.int32), block_table=table, block_size=PAGE, num_decode_tokens=1
    )
    for _ in range(2):
        positions = torch.randperm(2 * PAGE, generator=generator).int()[None]
        impl = make_impl(backend, model, cache, positions)
        impl._batch_invariant, before = True, positions.clone()
        outs.append(impl.forward_mqa(q, cache.pages, metadata, types.SimpleNamespace(_k_scale=cache.scale))[0])
        if not torch.equal(positions, before):  # which another stream may read
            return False
    return torch.equal(*outs)


def ranks(backend: Any, spec: dict[str, Any], count: int) -> dict[str, Any]:
    """The largest error of parts of a context on `count` ranks, merged as in vLLM, and the values of keyless rows.

    Token t of a request lies on rank t % count. Formula: `correct_attn_out` of vLLM's ops/common.py, and a sum.
    """
    d_v, requests = spec["model"]["kv_lora_rank"], len(LENGTHS)
    cache = Cache(spec, apart=False)
    q = torch.randn(requests, HEADS, cache.rows.shape[1], generator=torch.Generator().manual_seed(2)).bfloat16()
    table = torch.tensor([[2, 0], [1, 2], [0, 1], [1, 0], [0, 2]], dtype=torch.int32)
    impl = make_impl(backend, spec["model"], cache, torch.zeros(0))
    impl.need_to_return_lse_for_decode = True
    outs, lses, empty = [], [], []
    for rank in range(count):
        lengths = torch.tensor([(length + count - 1 - rank) // count for length in LENGTHS], dtype=torch.int32)
        decode = types.SimpleNamespace(block_table=table.roll(rank, 0), seq_lens=lengths)
        metadata = types.SimpleNamespace(num_decode_tokens=requests, num_decodes=requests, decode=decode)
        out, lse = impl.forward_mqa(q, cache.pages, metadata, types.SimpleNamespace(_k_scale=cache.scale))
        assert lse.shape == (requests, HEADS)
        assert lse.dtype == torch.float32
        outs.append(out.double())
        lses.append(torch.where(lse == torch.inf, -torch.inf, lse).double())
        empty.append(out[lengths == 0])
    total = torch.stack(lses).logsumexp(0)
    factors = [(lse - total).nan_to_num(nan=-torch.inf).exp() for lse in lses]
    merged = sum(out * factor[..., None] for out, factor in zip(outs, factors, strict=True))
    wanted = torch.zeros(requests, HEADS, d_v, dtype=torch.float64)
    for request, length in enumerate(LENGTHS):
        at = [(torch.arange(length)[rank::count] // count, table.roll(rank, 0)[request]) for rank in range(count)]
        keys = torch.cat([cache.rows[pages[local // PAGE].long() * PAGE + local % PAGE] for local, pages in at])
        if length:
            wanted[request] = attend(q[request], keys, d_v)
    return {"error": (merged - wanted).abs().max().item(), "empty": torch.cat(empty).abs().max().item()}


def sparse_ranks(backend: Any, spec: dict[str, Any], count: int, interleave: int) -> dict[str, Any]:
    """The same of sparse attention: `interleave` neighbouring tokens of a request lie on one rank.

    Also whether every token without a key on a rank has 0 and -inf there, and how many such tokens there are.
    """
    d_v, requests = spec["model"]["kv_lora_rank"], len(LENGTHS)
    cache = Cache(spec, apart=False)
    generator = torch.Generator().manual_seed(2)
    q = torch.randn(requests, HEADS, cache.rows.shape[1], generator=generator).bfloat16()
    table = torch.tensor([[2, 0], [1, 2], [0, 1], [1, 0], [0, 2]], dtype=torch.int32)
    positions = torch.full((requests, TOPK), -1, dtype=torch.int32)
    for request, length in enumerate(LENGTHS):
        positions[request, :length] = torch.randperm(2 * PAGE * count, generator=generator)[:length].int()
    owner = positions // interleave % count
    local = (positions // (count * interleave) * interleave + positions % interleave).long()
    rows = torch.stack([table.roll(rank, 0) for rank in range(count)])  # [rank, request, block]
    outs, lses, empty, keyless = [], [], [], 0
    for rank in range(count):
        impl = make_impl(backend, spec["model"], cache, positions)
        vars(impl).update(dcp_world_size=count, dcp_rank=rank, need_to_return_lse_for_decode=True)
        metadata = types.SimpleNamespace(
            req_id_per_token=torch.arange(requests, dtype=torch.int32),
            block_table=rows[rank].contiguous(),
            block_size=PAGE,
            num_decode_tokens=requests,
            cp_kv_cache_interleave_size=interleave,
        )
        out, lse = impl.forward_mqa(q, cache.pages, metadata, types.SimpleNamespace(_k_scale=cache.scale))
        assert (lse.shape, lse.dtype) == ((requests, HEADS), torch.float32)
        none = ((owner == rank) & (positions >= 0)).sum(1) == 0
        empty.append(bool((out[none] == 0).all() and (lse[none] == -torch.inf).all() and lse[~none].isfinite().all()))
        keyless += int(none.sum())
        outs.append(out.double())
        lses.append(lse.double())
    total = torch.stack(lses).logsumexp(0)
    factors = [(lse - total).nan_to_num(nan=-torch.inf).exp() for lse in lses]
    merged = sum(out * factor[..., None] for out, factor in zip(outs, factors, strict=True))
    wanted = torch.zeros(requests, HEADS, d_v, dtype=torch.float64)
    for request, length in enumerate(LENGTHS):
        of, at = owner[request, :length].long(), local[request, :length]
        if length:
            pages = rows[of, request, at // PAGE].long()
            wanted[request] = attend(q[request], cache.rows[pages * PAGE + at % PAGE], d_v)
    return {"error": (merged - wanted).abs().max().item(), "empty": all(empty), "keyless": keyless}


def non_causal(backend: Any, spec: dict[str, Any]) -> float:
    """The largest error of two query tokens of a request that both see all of its keys."""
    d_v, requests = spec["model"]["kv_lora_rank"], 2
    cache = Cache(spec, apart=False)
    q = torch.randn(2 * requests, HEADS, cache.rows.shape[1], generator=torch.Generator().manual_seed(2)).bfloat16()
    table, lengths = torch.tensor([[2, 0], [1, 2]], dtype=torch.int32), (70, 2)
    decode = types.SimpleNamespace(block_table=table, seq_lens=torch.tensor(lengths, dtype=torch.int32))
    metadata = types.SimpleNamespace(num_decode_tokens=len(q), num_decodes=requests, decode=decode, causal=False)
    impl = make_impl(backend, spec["model"], cache, torch.zeros(0))
    out, _ = impl.forward_mqa(q, cache.pages, metadata, types.SimpleNamespace(_k_scale=cache.scale))
    errors = []
    for token in range(len(q)):
        at = torch.arange(lengths[token // 2])
        keys = cache.rows[table[token // 2, at // PAGE].long() * PAGE + at % PAGE]
        errors.append((out[token].double() - attend(q[token], keys, d_v)).abs().max().item())
    return max(errors)


def several_tokens(backend: Any, spec: dict[str, Any], tokens: int, shares: bool) -> str:
    """The answer to several query tokens of two requests; whether ranks share a context."""
    cache = Cache(spec, apart=False)
    impl = make_impl(backend, spec["model"], cache, torch.zeros(0))
    impl.need_to_return_lse_for_decode = shares
    decode = types.SimpleNamespace(block_table=torch.zeros(2, 1).int(), seq_lens=torch.ones(2).int())
    metadata = types.SimpleNamespace(num_decode_tokens=tokens, num_decodes=2, decode=decode)
    try:
        impl.forward_mqa(torch.zeros(tokens, HEADS, cache.rows.shape[1]).bfloat16(), cache.pages, metadata, None)
    except ValueError as error:
        return str(error)
    return "nothing"


def conversion(backend: Any, engine: str) -> dict[str, Any]:
    """The module of the function that finds the places of indices, and how many of its calls differ from vLLM's."""
    module = sys.modules[backend.__module__]
    own = getattr(module, "triton_convert_req_index_to_global_index", None)
    if own is None:
        return {"whose": "vLLM's"}
    theirs = _vllm_conversion() if engine == "vllm" else _places
    generator, wrong, calls = torch.Generator().manual_seed(3), 0, 0
    for block_size in (1, 16, 64, 128):
        for tokens, requests, blocks in ((1, 1, 3), (9, 4, 5), (33, 2, 7)):
            table = torch.randint(0, 1000, (requests, blocks), generator=generator, dtype=torch.int32)
            request = torch.randint(0, requests, (tokens,), generator=generator, dtype=torch.int32)
            positions = torch.randint(0, blocks * block_size, (tokens, TOPK), generator=generator, dtype=torch.int32)
            lengths = torch.randint(0, TOPK + 1, (tokens, 1), generator=generator)
            positions[torch.arange(TOPK) >= lengths] = -1  # as the indexer leaves entries without a name
            asked = {"BLOCK_SIZE": block_size, "NUM_TOPK_TOKENS": TOPK, "return_valid_counts": True}
            got, wanted = (one(request, table, positions, **asked) for one in (own, theirs))
            wrong += any(not torch.equal(a, b) for a, b in zip(got, wanted, strict=True))
            calls += 1
    return {"whose": own.__module__.rpartition(".")[0], "wrong": wrong, "calls": calls}


def _places(req_id: Any, block_table: Any, token_indices: Any, BLOCK_SIZE: int, **asked: Any) -> Any:
    """By the docstring of vLLM's function."""
    pages = block_table[req_id.long()].long().gather(1, (token_indices.clamp(min=0) // BLOCK_SIZE).long())
    found = (pages * BLOCK_SIZE + token_indices % BLOCK_SIZE).int()
    return torch.where(token_indices < 0, -1, found), (token_indices >= 0).sum(1).int()


def _vllm_conversion() -> Any:
    """vLLM's own function, by a second reading of its module with Triton, which the interpreter runs."""
    import triton
    import triton.language as tl
    from vllm import triton_utils
    from vllm.v1.attention.backends.mla import sparse_utils

    triton_utils.triton, triton_utils.tl = triton, tl
    assert sparse_utils.__file__ is not None
    spec = importlib.util.spec_from_file_location("sparse_utils_with_triton", sparse_utils.__file__)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.triton_convert_req_index_to_global_index


def make_impl(backend: Any, model: dict[str, Any], cache: Cache, positions: torch.Tensor) -> Any:
    """The attention of a layer; vLLM's own initialisation needs an engine around it, so that its results stand here."""
    cls = backend.get_impl_cls()
    impl = cls.__new__(cls)
    vars(impl).update(num_heads=HEADS, scale=SCALE, kv_lora_rank=model["kv_lora_rank"], dcp_world_size=1)
    vars(impl).update(_scratch=None, _batch_invariant=False, kv_cache_dtype=backend.supported_kv_cache_dtypes[0])
    vars(impl).update(_indexer=None)
    vars(impl)["_topk_indices_buffer" if hasattr(cls, "topk_indices_buffer") else "topk_indices_buffer"] = positions
    return impl


def declared(backend: Any) -> dict[str, bool]:
    """Capabilities that vLLM reads: ranks and query lengths, by the methods of its class where it has them."""
    asked = {name: getattr(backend.Impl, name) for name in ("supports_dcp", "supports_pcp")}
    named = ("supports_dcp", "supports_pcp", "supports_device_cpu_query_lens_mismatch")
    heard = {name: getattr(backend.Backend, name)() for name in named if hasattr(backend.Backend, name)}
    assert all(heard.get(name, value) == value for name, value in asked.items())
    return asked | heard


def kinds(plugin: Any, backend: Any) -> dict[str, str]:
    """The backends that vLLM's own selector gives layers on sm90: the package is named for MLA, nothing for others.

    Two more entries have its errors for a kind that the package does not serve, and for an unknown one.
    """
    from vllm.config.attention import AttentionConfig
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    sys.modules.setdefault("vllm._C_stable_libtorch", types.ModuleType("compiled"))
    from vllm import platforms
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.platforms import cuda
    from vllm.platforms.interface import DeviceCapability
    from vllm.v1.attention import selector

    class Hopper(cuda.CudaPlatformBase):
        get_device_capability = classmethod(lambda cls, device_id=0: DeviceCapability(9, 0))  # type: ignore[assignment]
        get_device_name = classmethod(lambda cls, device_id=0: "a GPU")  # type: ignore[assignment]

    platforms._current_platform = Hopper()

    def chosen(named: dict[str, str], **asked: Any) -> str:
        selector._cached_get_attn_backend.cache_clear()
        try:
            with set_current_vllm_config(VllmConfig(attention_config=AttentionConfig(backend_per_kind=named))):
                found = selector.get_attn_backend(dtype=torch.bfloat16, **asked)
        except ValueError as error:
            return str(error)
        return f"{found.__module__}.{found.__qualname__}"

    of_package = {"kv_cache_dtype": backend.supported_kv_cache_dtypes[0], "use_sparse": backend.is_sparse()}
    of_package |= {"head_size": backend.get_supported_head_sizes()[0], "use_mla": True}
    name = plugin.NAME if hasattr(AttentionBackendEnum, "register") else "CUSTOM"
    named = {"mla_attention": name}
    return {
        "mla": chosen(named, **of_package),
        "full": chosen(named, kv_cache_dtype="auto", head_size=128),
        "window": chosen({"sliding_window_mla": name}, has_sliding_window=True, **of_package),
        "unknown": chosen({"mla": name}, **of_package),
    }


def main(folder: str, name: str, engine: str, capability_name: str, what: str) -> None:
    """Prints the findings."""
    from mlagen.verify import interpreter

    interpreter.install()
    sys.path.insert(0, folder)
    if engine == "vllm":  # its modules ask for CUDA's libraries once the platform says that it is CUDA
        importlib.import_module(f"{name}.backend")
        importlib.import_module(vllm_indexer.LAYER)
    place(engine, capability_name)
    plugin = importlib.import_module(name)
    found = {"registered": registered(plugin)}
    if what == "indexer":
        package = importlib.import_module(f"{name}.{name.removeprefix('mlagen_vllm_')}")
        with package._launch.planned_for(package._launch.facts_of("sm80")):
            indexer = importlib.import_module(f"{name}.indexer")
            share = getattr(indexer, "share", lambda: None)
            print(json.dumps(vllm_indexer.look(package.SPEC["spec"]) | {"merges": vllm_indexer.merges(share)}))
        return
    if what == "registration":
        print(json.dumps(found))
        return
    backend = importlib.import_module(f"{name}.backend")
    if what == "kinds":
        print(json.dumps({"kinds": kinds(plugin, backend.Backend)}))
        return
    if what == "declared":
        print(json.dumps(declared(backend)))
        return
    package = importlib.import_module(f"{name}.{name.removeprefix('mlagen_vllm_')}")
    spec = package.SPEC["spec"]
    if what == "order":
        with package._launch.planned_for(package._launch.facts_of("sm80")):
            print(json.dumps({"reordered": reordered(backend.Backend, spec)}))
        return
    found["refusals"] = refusals(backend.Backend, spec)
    found["graphs"] = str(backend.MetadataBuilder._cudagraph_support)
    with package._launch.planned_for(package._launch.facts_of("sm80")):
        found["forward"] = forward(backend.Backend, spec, apart=False)
        if spec["attention"]["kind"] == "sparse":
            found["conversion"] = conversion(backend.Backend, engine)
            if engine != "vllm":  # 0.33's own method needs an engine
                found["reordered"] = reordered(backend.Backend, spec)
        if spec["attention"]["kind"] == "sparse":
            found["can share a context"] = backend.Impl.supports_dcp
            if backend.Impl.supports_dcp:
                sizes = ((2, 1), (2, 64), (4, 16), (8, 1), (8, 64))  # ranks, and neighbours on one
                found["ranks"] = [sparse_ranks(backend.Backend, spec, *size) for size in sizes]
        if spec["attention"]["kind"] == "dense":
            found["ranks"] = [ranks(backend.Backend, spec, count) for count in (2, 3)]
            found["several tokens"] = several_tokens(backend.Backend, spec, 4, shares=True)
            found["uneven tokens"] = several_tokens(backend.Backend, spec, 5, shares=False)
            found["can share a context"] = backend.Impl.can_return_lse_for_decode
            found["non causal"] = {"error": non_causal(backend.Backend, spec)}
            found["non causal"]["declared"] = backend.Backend.supports_non_causal()
            found["non causal"]["built"] = backend.MetadataBuilder.supports_non_causal_multi_token_decode
        if engine != "0.26" and not (engine == "vllm" and not hasattr(backend.Impl, "prepare_for_batch")):
            found["apart"] = forward(backend.Backend, spec, apart=True)
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
