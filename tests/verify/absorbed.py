"""Prefill of one MLA model three ways, in Triton's interpreter; prints how far they lie apart as JSON.

Usage: python absorbed.py FOLDER, which holds the packages `plain`, `absorbed` and `rows`.

A token's latent row c [64] and RoPE columns r [16] are all that is cached. Head h has K = [c W_k[h] | r], V = c W_v[h]:
multi-head attention makes both (`plain`); absorbed attention takes q W_k[h]' for q and c itself for K and V, and then
applies W_v[h] (`absorbed`, dense; `rows`, over the rows that indices name).
"""

import json
import os
import sys

os.environ["TRITON_INTERPRET"] = "1"
sys.path.insert(0, sys.argv[1])

import importlib

import torch

from mlagen.verify import interpreter

HEADS, LATENT, ROPE, NOPE = 4, 64, 16, 32
LENGTHS = [(5, 37), (1, 20), (12, 12)]  # rows of q and keys of each request


def package(name):
    found = importlib.import_module(name)
    facts = found._launch.DeviceFacts("sm90", 8)
    found._launch.device_facts = lambda device: facts
    return found


def main():
    interpreter.install()
    torch.manual_seed(0)
    rows, keys = (sum(length[side] for length in LENGTHS) for side in (0, 1))
    c, r = torch.randn(keys, LATENT).bfloat16(), torch.randn(keys, ROPE).bfloat16()
    w_k, w_v = torch.randn(2, HEADS, LATENT, NOPE) * LATENT**-0.5
    q = torch.randn(rows, HEADS, NOPE + ROPE).bfloat16()
    scale = (NOPE + ROPE) ** -0.5
    cu = [torch.tensor([0, *(length[side] for length in LENGTHS)]).cumsum(0).to(torch.int32) for side in (0, 1)]
    longest = [max(length[side] for length in LENGTHS) for side in (0, 1)]

    # As kv_b_proj gives them: a head's K without RoPE and its V side by side, V a slice of both.
    both = torch.einsum("tc,hcl->thl", c.float(), torch.cat([w_k, w_v], 2)).bfloat16()
    k = torch.cat([both[..., :NOPE], r[:, None].expand(-1, HEADS, -1)], 2)
    out, lse = package("plain").flash_attn_varlen_func(
        q, k, both[..., NOPE:], *cu, *longest, softmax_scale=scale, causal=True
    )

    latent_q = torch.einsum("thl,hcl->thc", q[..., :NOPE].float(), w_k).bfloat16()
    absorbed_q = torch.cat([latent_q, q[..., NOPE:]], 2)
    kv = torch.cat([c, r], 1)[:, None]
    results = {
        "absorbed": package("absorbed").flash_attn_varlen_func(
            absorbed_q, kv, kv[..., :LATENT], *cu, *longest, softmax_scale=scale, causal=True
        )
    }
    # Indices name the keys that a row sees.
    indices = torch.full((rows, 1, longest[1]), -1, dtype=torch.int32)
    row = 0
    for (s_q, s_k), begin in zip(LENGTHS, cu[1].tolist(), strict=False):
        for number in range(s_q):
            seen = number + s_k - s_q + 1
            indices[row, 0, :seen] = torch.arange(begin, begin + seen)
            row += 1
    latent, _, sparse_lse = package("rows").flash_mla_sparse_fwd(absorbed_q, kv, indices, scale, LATENT)
    results["sparse"] = latent, sparse_lse.T

    without = absorbed_q.clone()
    without[..., LATENT:] = 0
    other, _ = package("absorbed").flash_attn_varlen_func(
        without, kv, kv[..., :LATENT], *cu, *longest, softmax_scale=scale, causal=True
    )
    found = {}
    for name, (latent, other_lse) in results.items():
        heads = torch.einsum("thc,hcl->thl", latent.float(), w_v)
        roped = torch.einsum("thc,hcl->thl", other.float(), w_v)
        found[name] = {
            "out": (heads - out.float()).abs().max().item(),
            "lse": (other_lse - lse).abs().max().item(),
            "without rope": (roped - out.float()).abs().max().item(),
        }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
