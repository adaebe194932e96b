"""Imports a generated package where the generator and all it needs cannot be imported, and calls its wrappers.

    python -I -W error alone.py PACKAGE_DIR {run|refuse}

`run` calls each wrapper on Triton's interpreter, checks what it gives and prints its name; `refuse` calls each with a
wrong argument and on a CPU, and prints what it says.
"""

import importlib.abc
import importlib.util
import sys
from pathlib import Path

GENERATOR = {"click", "jinja2", "mlagen", "pydantic", "pydantic_core", "rich", "yaml"}


class Refuse(importlib.abc.MetaPathFinder):
    """Finds nothing of the generator's."""

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in GENERATOR:
            raise ImportError(f"{name} is not to be imported here")


def import_package(folder):
    spec = importlib.util.spec_from_file_location(
        folder.name, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    package = sys.modules[folder.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(package)
    return package


def arguments(package):
    """Small arguments of each wrapper, by name: two tokens, and a cache whose rows past the first page are NaN."""
    import torch

    said = package.SPEC["spec"]
    model, cache, sparse = said["model"], said["cache"], said["attention"]
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[model["dtype"]]
    d_c, d_rope = model["kv_lora_rank"], model["qk_rope_head_dim"]
    page = cache["block_size"] or 1
    torch.manual_seed(0)
    kv = torch.full((64 // page + 2, page, d_c + d_rope), float("nan")).to(dtype)
    kv.view(-1, d_c + d_rope)[:8] = torch.randn(8, d_c + d_rope).to(dtype)
    attention = {
        "q": torch.randn(2, 3, d_c + d_rope).to(dtype),
        "kv": kv,
        "indices": torch.tensor([[[0, 7, -1, 3]], [[5, 5, 1 << 30, -9]]], dtype=torch.int32),
        "sm_scale": 0.25,
    }
    if sparse["attn_sink"] == "required":
        attention["attn_sink"] = torch.zeros(3)
    if sparse["topk_length"] == "required":
        attention["topk_length"] = torch.full((2,), 4, dtype=torch.int32)
    calls = {
        "flash_mla_sparse_fwd": attention,
        "triton_mla_sparse_attention": attention,
        "concat_and_cache_mla": {
            "kv_c": torch.randn(2, d_c).to(dtype),
            "k_pe": torch.randn(2, d_rope).to(dtype) if d_rope else None,
            "kv_cache": torch.zeros_like(kv),
            "slot_mapping": torch.tensor([5, -1]),
        },
    }
    return {name: calls[name] for name in said["wrappers"]}


def check_attention(call, out):
    """Compares an output with what plain torch gives."""
    import torch

    q, rows = call["q"].double(), call["kv"].double().flatten(0, 1)
    for token, indices in enumerate(call["indices"][:, 0].tolist()):
        k = rows[[index for index in indices if 0 <= index < len(rows)]]
        weights = torch.softmax(q[token] @ k.T * call["sm_scale"], -1)
        torch.testing.assert_close(out[token].double(), weights @ k[:, : out.shape[2]], atol=4e-3, rtol=4e-3)


def run(package):
    """Calls each wrapper on the interpreter, whose tensors lie on the CPU."""
    facts = package._launch.DeviceFacts(package.SPEC["spec"]["targets"][0], 4)
    package._launch.device_facts = lambda device: facts
    for name, call in arguments(package).items():
        result = getattr(package, name)(**call)
        if name == "concat_and_cache_mla":
            written = call["kv_cache"].flatten(0, 1)
            assert written[5].tolist() == [*call["kv_c"][0].tolist(), *call["k_pe"][0].tolist()]
            assert written.count_nonzero() == written[5].count_nonzero()
        else:
            check_attention(call, result[0] if isinstance(result, tuple) else result)
        print(name)


def refuse(package):
    """Calls each wrapper with its first argument of another dtype, then without it, and attention on a CPU."""
    for name, call in arguments(package).items():
        wrong = next(iter(call))
        for changed in ({**call, wrong: call[wrong].double()}, {**call, wrong: None}):
            try:
                getattr(package, name)(**changed)
            except TypeError as error:
                print(f"{name}: {error}")
        if name != "concat_and_cache_mla":
            try:
                getattr(package, name)(**call)
            except ValueError as error:
                print(f"{name}: {error}")


def main():
    sys.meta_path.insert(0, Refuse())
    package = import_package(Path(sys.argv[1]))
    {"run": run, "refuse": refuse}[sys.argv[2]](package)
    assert GENERATOR.isdisjoint(sys.modules)


if __name__ == "__main__":
    main()
