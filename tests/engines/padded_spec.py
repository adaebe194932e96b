"""Specs by name: those that come with mlagen, and three others.

One has padded rows, one cannot share a context among ranks, and one has a cache and prefills before absorption.
"""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# GLM-5.3 over the rows that vLLM writes as fp8_ds_mla: 128 bytes for RoPE columns that it has not.
PADDED = "glm53_fp8_vllm"
PADDED_LAYOUT = """
  layout:
    name: fp8_ds_mla_without_rope
    fields:
      - {kind: latent, dtype: e4m3}
      - {kind: scales, of: latent, dtype: fp32, tile: 128, rounding: power_of_two, divisor: 448,
         floor: 1.0e-4, floor_on: scale}
      - {kind: pad, bytes: 128}
"""

UNSHARED = "dsv32_unshared"  # without the owner filter of indices

BOTH = "dsv3_both"  # decodes over a cache, and prefills before absorption
HEADS = """
multi_head:
  qk_head_dim: 192
  v_head_dim: 128
  softmax_scale: 0.1352337788608801

wrappers:
  - flash_attn_varlen_func
"""


def spec_of(name: str, folder: Path) -> Path:
    """The file of a spec; those that do not come with mlagen are written into the folder."""
    if name == UNSHARED:
        text = (ROOT / "specs" / "dsv32.yaml").read_text(encoding="utf-8").replace("name: dsv32 ", f"name: {UNSHARED} ")
        path = folder / f"{UNSHARED}.yaml"
        path.write_text(text.replace("  - triton_convert_req_index_to_global_index\n", "", 1), "utf-8")
        return path
    if name == BOTH:
        text = (ROOT / "specs" / "dsv3.yaml").read_text(encoding="utf-8").replace("name: dsv3\n", f"name: {BOTH}\n", 1)
        path = folder / f"{BOTH}.yaml"
        path.write_text(text.replace("\nwrappers:\n", HEADS, 1), "utf-8")
        return path
    if name != PADDED:
        return ROOT / "specs" / f"{name}.yaml"
    text = (ROOT / "specs" / "glm53_fp8.yaml").read_text(encoding="utf-8")
    (line,) = (line for line in text.splitlines(keepends=True) if line.startswith("  layout: fp8_ds_mla"))
    path = folder / f"{PADDED}.yaml"
    path.write_text(text.replace(line, PADDED_LAYOUT[1:]).replace("name: glm53_fp8\n", f"name: {PADDED}\n", 1), "utf-8")
    return path
