"""Packages of dense attention, of specs that are made for tests."""

from pathlib import Path

from sparse_decode_specs import ODD

from mlagen.emit import apply, compare, render
from mlagen.plan import load_plan

TEXT = """\
name: dense_{name}
title: Dense attention over {name}
model: {{num_heads: {heads}, kv_lora_rank: {latent}, qk_rope_head_dim: {rope}, v_head_dim: {d_v}, dtype: {dtype}}}
attention: {{kind: dense{attention}}}
cache: {{layout: {cache}, block_size: 64}}
wrappers: [{wrappers}]
targets: [sm80, sm90, gfx942]
"""
BOTH = "flash_mla_with_kvcache, decode_attention_fwd"
# name: (heads, latent, RoPE, V, dtype, layout, the rest of `attention`, wrappers)
SPECS = {
    "plain": (16, 64, 16, 64, "bf16", "bf16", "", BOTH),
    "window": (6, 32, 16, 32, "bf16", "bf16", ", window: 100", BOTH),
    "tensor": (20, 64, 32, 64, "bf16", "fp8_per_tensor", "", BOTH),
    "odd": (12, 96, 32, 128, "fp16", ODD, ', window: 37, lse_base: "2", empty_row_lse: -inf', "decode_attention_fwd"),
    "v3": (128, 512, 64, 512, "bf16", "fp8_ds_mla", "", BOTH),
    "cpm": (40, 256, 32, 256, "bf16", "bf16", "", "flash_mla_with_kvcache"),
}


def write_spec(name: str, folder: Path, **changes: object) -> Path:
    """The YAML of one of SPECS; `changes` replace fields of TEXT."""
    fields = ("heads", "latent", "rope", "d_v", "dtype", "cache", "attention", "wrappers")
    path = folder / f"dense_{name}.yaml"
    path.write_text(TEXT.format(name=name, **(dict(zip(fields, SPECS[name], strict=True)) | changes)))
    return path


def write_package(name: str, folder: Path) -> Path:
    """The package of one of SPECS."""
    path = write_spec(name, folder)
    package = folder / path.stem
    apply(compare(render(load_plan(path)), package))
    return package
