"""Packages with attention over a cache, of specs that are made for tests."""

from pathlib import Path

from mlagen.emit import apply, compare, render
from mlagen.plan import load_plan

TEXT = """\
name: {name}
title: Attention over {name}
model: {{num_heads: {heads}, kv_lora_rank: {latent}, qk_rope_head_dim: {rope}, v_head_dim: {d_v}, dtype: {dtype}}}
attention: {{kind: sparse, topk: {topk}{attention}}}
cache: {{layout: {cache}, block_size: 64}}
{extra}wrappers: [flash_mla_with_kvcache]
targets: [sm80, sm90, gfx942]
"""
ODD = """{name: odd_planar, fields: [{kind: latent, dtype: e4m3fnuz}, {kind: rope, dtype: fp16}], planar_fields: [\
{kind: scales, of: latent, dtype: fp32, tile: 32, rounding: nearest, divisor: 224, floor: 1.0e-4, floor_on: amax},\
{kind: pad, bytes: 4}], page_multiple: row}"""
REQUIRED = ', attn_sink: required, topk_length: required, lse_base: "2", empty_row_lse: -inf'
LACKING = ", attn_sink: none, topk_length: none"
# name: (heads, latent, RoPE, V, dtype, layout, second layout, topk, the rest of `attention`)
SPECS = {
    "v32": (128, 512, 64, 512, "bf16", "fp8_ds_mla", None, 2048, ""),
    "v32_nvfp4": (128, 512, 64, 512, "bf16", "nvfp4_ds_mla", None, 2048, ""),
    "v4": (64, 448, 64, 512, "bf16", "ue8m0_v4", "ue8m0_v4", 512, ", window: 128"),
    "v41": (64, 448, 64, 512, "bf16", "mxfp8_v41", "nvfp4_v41", 512, ", window: 128"),
    "odd": (12, 96, 32, 128, "fp16", ODD, "fp8_per_tensor", 100, ", window: 37" + REQUIRED),
    "plain": (5, 64, 16, 64, "bf16", "bf16", None, 48, ", window: 16" + LACKING),
    "eight": (3, 256, 32, 256, "bf16", "fp8_ds_mla", None, 48, ", window: 16"),  # rows of 328 bytes
    "mixed": (3, 512, 64, 512, "bf16", "fp8_per_tensor", None, 48, ", products: mixed"),
    "tensor": (3, 64, 32, 96, "bf16", "fp8_per_tensor", "fp8_per_tensor", 48, ", window: 16"),
}


def write_spec(name: str, folder: Path, **changes: object) -> Path:
    """The YAML of one of SPECS; `changes` replace fields of TEXT."""
    fields = ("heads", "latent", "rope", "d_v", "dtype", "cache", "second", "topk", "attention")
    values = dict(zip(fields, SPECS[name], strict=True)) | {"name": f"kv_{name}"} | changes
    second = values.pop("second")
    values["extra"] = f"extra_cache: {{layout: {second}, block_size: 7}}\n" if second else ""
    path = folder / f"{values['name']}.yaml"
    path.write_text(TEXT.format(**values))
    return path


def write_package(name: str, folder: Path) -> Path:
    """The package of one of SPECS."""
    path = write_spec(name, folder)
    package = folder / path.stem
    apply(compare(render(load_plan(path)), package))
    return package
