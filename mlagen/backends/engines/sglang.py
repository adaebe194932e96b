"""The SGLang plugin of a package: the supported specs, and the template's context."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mlagen.backends.parts.base import GeneratedFile
from mlagen.errors import UsageError
from mlagen.plan import Plan

SUMMARY = "SGLang's FlashMLA functions by a generated package"
ENTRY_POINTS = "sglang.srt.plugins"  # SGLang calls the functions of this group in every process
HOOKED = ("flash_mla_sparse_fwd", "flash_mla_with_kvcache")  # functions of its flash_mla_interface, in file order


@dataclass(frozen=True)
class Cache:
    """A cache of SGLang that `flash_mla_with_kvcache` reads.

    Attributes:
        legacy: SGLang's `use_legacy`, which selects the byte layout of a page.
        kv_format: SGLang's names of the layout without and with RoPE columns; None if it has none.
    """

    legacy: bool = True
    kv_format: tuple[str, str] | None = None


@dataclass(frozen=True)
class Init:
    """Context of the plugin's template.

    Attributes:
        name, title: the spec's.
        hooks: functions that the package replaces.
        natural_lse: whether the LSE is of base e.
        layout_name: name of the cache's layout; empty without a cache.
        legacy, kv_format: see Cache.
        tensor_scale: whether the cache has one scale.
    """

    name: str
    title: str
    hooks: Sequence[str]
    natural_lse: bool
    layout_name: str
    legacy: bool
    kv_format: str | None
    tensor_scale: bool


# By kind of attention and layout of the cache.
CACHES = {
    ("sparse", "fp8_ds_mla"): Cache(kv_format=("V32_NO_ROPE", "V32")),
    ("sparse", "ue8m0_v4"): Cache(),
    ("sparse", "mxfp8_v41"): Cache(legacy=False),
    ("dense", "bf16"): Cache(),
    ("dense", "fp16"): Cache(),
    ("dense", "fp8_per_tensor"): Cache(),
}


def plugin_name(plan: Plan) -> str:
    """Return the name of the plugin's Python package. It contains the generated package under the spec's name."""
    return f"mlagen_sglang_{plan.spec.name}"


def serve_command(plan: Plan) -> str:
    """Return the command that serves MODEL with the plugin.

    Raises:
        UsageError: SGLang calls no attention of the spec's kind.
    """
    hooks, attention = _hooks(plan), plan.attention.kind
    plugin = f"SGLANG_PLUGINS=mlagen_{plan.spec.name} "
    command = f"{plugin}python -m sglang.launch_server --model-path MODEL"
    if attention == "dense":
        fp8 = plan.layout is not None and plan.layout.quantised
        return f"{command} --attention-backend flashmla{' --kv-cache-dtype fp8_e4m3' if fp8 else ''}"
    if plan.extra_layout is not None:  # SGLang picks the attention backend of V4 itself
        return command
    cached = "flash_mla_with_kvcache" in hooks
    dtype, decode = ("fp8_e4m3", "flashmla_kv") if cached else ("bfloat16", "flashmla_sparse")
    choices = f"--dsa-prefill-backend flashmla_sparse --dsa-decode-backend {decode}"
    return f"{command} --attention-backend dsa --kv-cache-dtype {dtype} {choices}"


def plugin_files(plan: Plan) -> list[GeneratedFile]:
    """Return the files of the plugin, without the generated package.

    Raises:
        UsageError: SGLang calls no attention of the spec's kind.
    """
    return [GeneratedFile("__init__.py", "sglang/__init__.py.jinja", vars(_context(plan)))]


def _hooks(plan: Plan) -> list[str]:
    """Return the functions that the package replaces. Raises UsageError that names the allowed values."""
    spec = plan.spec
    hooks: list[str] = [name for name in HOOKED if name in spec.wrappers]
    if not hooks:
        raise _refused("wrappers", ", ".join(spec.wrappers), f"{' or '.join(HOOKED)} among them")
    assert spec.attention is not None  # needed by those wrappers
    if plan.out_rope:
        raise _refused("attention.out_rope", "'inverse'", "none: SGLang's layers rotate the output themselves")
    if "flash_mla_sparse_fwd" in hooks and plan.rows_block_size is not None:
        raise _refused("cache.block_size", str(plan.rows_block_size), "none: SGLang's indices name flat rows")
    if "flash_mla_with_kvcache" in hooks:
        assert plan.layout is not None
        kind = spec.attention.kind
        if (kind, plan.layout.name) not in CACHES:
            layouts = ", ".join(layout for of, layout in CACHES if of == kind)
            raise _refused("cache.layout", f"'{plan.layout.name}'", f"{layouts} with {kind} attention")
        if kind == "dense" and spec.attention.window is not None:
            raise _refused("attention.window", str(spec.attention.window), "none: SGLang's calls name no window")
    return hooks


def _refused(field: str, got: str, takes: str) -> UsageError:
    return UsageError(f"{field}: got {got}; a package for SGLang takes {takes}")


def _context(plan: Plan) -> Init:
    """Template context."""
    hooks, attention, layout = _hooks(plan), plan.attention, plan.layout
    cache = CACHES.get((plan.spec.attention.kind, layout.name), Cache()) if plan.spec.attention and layout else Cache()
    return Init(
        name=plan.spec.name,
        title=plan.spec.title,
        hooks=hooks,
        natural_lse=attention.lse_base == "e",
        layout_name=layout.name if layout else "",
        legacy=cache.legacy,
        kv_format=cache.kv_format[plan.spec.model.qk_rope_head_dim > 0] if cache.kv_format else None,
        tensor_scale=layout is not None and layout.tensor_scale,
    )
