"""Rules for names, and rules between values of a spec."""

from __future__ import annotations

import keyword
import sys

from pydantic_core import PydanticCustomError

# Modules that generated code, its callers or their tools import. A package of that name would hide them.
TAKEN_NAMES = sys.stdlib_module_names | {
    *("mlagen", "click", "hypothesis", "jinja2", "numpy", "pip", "pydantic", "pytest", "rich", "setuptools", "yaml"),
    *("accelerate", "helion", "kernels", "pandas", "safetensors", "scipy", "tilelang", "tokenizers", "transformers"),
    *("torch", "torchaudio", "torchvision", "triton", "gluon", "jax", "cutlass", "cupy", "xformers"),
    *("aiter", "deep_gemm", "flash_attn", "flash_attn_interface", "flash_mla", "flashinfer", "fla", "sgl_kernel"),
    *("flash_mla_interface", "lmdeploy", "sgl_flash_mla", "sglang", "tensorrt_llm", "tokenspeed", "vllm"),
}
# Names in torch.ops that a package could have: namespaces of torch's own operators, and functions.
TORCH_NAMESPACES = {
    "aten",
    "c10d",
    "debug_mode_ops",
    "debugprims",
    "export",
    "higher_order",
    "import_module",
    "inductor",
    "inductor_prims",
    "load_library",
    "loaded_libraries",
    "mkl",
    "mkldnn",
    "mkldnn_prepacked",
    "onednn",
    "onnx",
    "prim",
    "prims",
    "profiler",
    "quantization",
    "quantized",
    "rngprims",
    "sparse",
    "static_runtime",
    "symm_mem",
}


def refused(message: str, *at: str | int) -> PydanticCustomError:
    """Return the error of a rule between values. `at` is the path from the checked value to the wrong one."""
    return PydanticCustomError("refused", "{message}", {"message": message, "at": at})


def free_name(name: str) -> str:
    """Return a package's name. Refuse it if it cannot be imported or would hide a module."""
    if keyword.iskeyword(name):
        raise refused(f"got '{name}', a Python keyword; takes a name that can be imported, for example '{name}_mla'")
    if name in TAKEN_NAMES:
        raise refused(
            f"got '{name}', which would hide the Python module of that name; takes another name, for example "
            f"'{name}_mla'"
        )
    return name


def free_namespace(ops: bool, name: str | None) -> bool:
    """Return `ops`. Refuse operators under a name that torch uses; the name is None if it is invalid itself."""
    if ops and name in TORCH_NAMESPACES:
        raise refused(
            f"got true, but torch has its own operators under the name '{name}'; takes another name, for example "
            f"'{name}_mla'"
        )
    return ops


def without_repeats(entries: tuple[str, ...]) -> tuple[str, ...]:
    """Return the entries of a list. Refuse repeats."""
    repeats = [index for index, entry in enumerate(entries) if entry in entries[:index]]
    if repeats:
        again = ", ".join(dict.fromkeys(entries[index] for index in repeats))
        raise refused(f"got {again} more than once; takes each entry once", repeats[0])
    return entries
