"""Calls a package's wrappers without a softmax scale, in Triton's interpreter; prints the worst errors as JSON.

    python scale_call.py FOLDER NAME SCALE

Errors are of outputs against attention in float64: with the scale, and with (128 + 64)**-0.5.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Iterator

os.environ["TRITON_INTERPRET"] = "1"
sys.path.insert(0, sys.argv[1])

import torch

from mlagen.verify import interpreter

KEYS, HEADS = 70, 4


def outputs(package, q: torch.Tensor, rows: torch.Tensor) -> Iterator[torch.Tensor]:
    """Outputs of wrappers for q [HEADS, 576] over rows [KEYS, 576]."""
    if hasattr(package, "flash_mla_sparse_fwd"):
        indices = torch.arange(KEYS, dtype=torch.int32)[None, None]
        yield package.flash_mla_sparse_fwd(q[None], rows[:, None], indices, None)[0][0]
        yield package.triton_mla_sparse_attention(q[None], rows[:, None], indices, None)[0]
        return
    pages = torch.zeros(2, 64, 1, 576, dtype=q.dtype)
    pages.view(-1, 576)[:KEYS] = rows
    table, lengths = torch.tensor([[0, 1]], dtype=torch.int32), torch.tensor([KEYS], dtype=torch.int32)
    meta, _ = package.get_mla_metadata()
    yield package.flash_mla_with_kvcache(q[None, None], pages, table, lengths, 512, meta)[0][0, 0]
    out, lse = q.new_zeros(1, HEADS, 512), torch.zeros(1, HEADS)
    package.decode_attention_fwd(
        q[None], pages, pages[..., :512], out, lse, table, lengths, None, 1, None, page_size=64
    )
    yield out[0]


def main() -> None:
    """Prints, of each wrapper, the worst error with the model's scale and with that without YaRN."""
    interpreter.install()
    package, scale = importlib.import_module(sys.argv[2]), float(sys.argv[3])
    facts = package._launch.facts_of("sm80")
    package._launch.device_facts = lambda device: facts
    torch.manual_seed(0)
    q, rows = (2 * torch.randn(HEADS, 576)).bfloat16(), torch.randn(KEYS, 576).bfloat16()
    logits = q.double() @ rows.double().T
    found = []
    for out in outputs(package, q, rows):
        wanted = [(logits * one).softmax(-1) @ rows[:, :512].double() for one in (scale, 192**-0.5)]
        found.append([(out.double() - one).abs().max().item() for one in wanted])
    print(json.dumps(found))


main()
