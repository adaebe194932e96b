"""Packages without kernels; a test writes their wrappers in plain torch. And a peer's module in plain torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import yaml

from mlagen.bench.package import BenchPackage
from mlagen.spec import Spec, load
from mlagen.verify.call.facts import Facts

MakePackage = Callable[..., BenchPackage]


def spec_in(
    folder: Path,
    wrappers: Iterable[str],
    layout: object = "bf16",
    extra: object = None,
    dims: tuple[int, int, int] = (512, 64, 512),
    **attention: object,
) -> Spec:
    """A spec of 64 heads over pages of 64 tokens that lists the wrappers."""
    d_c, d_rope, d_v = dims
    model = {"num_heads": 64, "kv_lora_rank": d_c, "qk_rope_head_dim": d_rope, "v_head_dim": d_v, "dtype": "bf16"}
    text = {
        "name": "made",
        "title": "Made",
        "model": model,
        "attention": {"kind": "sparse", "topk": 128, **attention},
        "cache": {"layout": layout, "block_size": 64},
        **({"extra_cache": {"layout": extra, "block_size": 16}} if extra else {}),
        "wrappers": list(wrappers),
        "targets": ["sm90"],
    }
    path = folder / "made.yaml"
    path.write_text(yaml.safe_dump(text))
    return load(path)


def package_in(folder: Path, wrappers: dict[str, Callable[..., Any]], *options: Any, **attention: Any) -> BenchPackage:
    """A package of such a spec."""
    spec = spec_in(folder, wrappers, *options, **attention).model_dump(mode="json")
    root = ModuleType("made")
    vars(root).update(wrappers, SPEC={"spec": spec})
    return BenchPackage(folder / "made", root, Facts.of(spec), spec)


class FlashInferModule:
    """`flashinfer.mla` as far as a peer asks for it: requests of equally many query tokens, unquantised rows."""

    class BatchMLAPagedAttentionWrapper:
        def __init__(self, float_workspace_buffer: torch.Tensor) -> None:
            assert float_workspace_buffer.dtype == torch.uint8

        def plan(
            self,
            qo_indptr: torch.Tensor,
            kv_indptr: torch.Tensor,
            kv_indices: torch.Tensor,
            kv_len_arr: torch.Tensor,
            num_heads: int,
            head_dim_ckv: int,
            head_dim_kpe: int,
            page_size: int,
            causal: bool,
            sm_scale: float,
            q_data_type: torch.dtype,
            kv_data_type: torch.dtype,
        ) -> None:
            assert (head_dim_ckv, head_dim_kpe) == (512, 64)
            for metadata in (qo_indptr, kv_indptr, kv_indices, kv_len_arr):
                assert (metadata.dtype, metadata.ndim, metadata.is_contiguous()) == (torch.int32, 1, True)
            self.tokens, self.pages = qo_indptr.diff().tolist(), kv_indices.split(kv_indptr.diff().tolist())
            self.lengths = kv_len_arr.tolist()
            self.num_heads, self.size, self.causal, self.sm_scale = num_heads, page_size, causal, sm_scale
            self.dtypes = (q_data_type, kv_data_type)

        def run(
            self, q_nope: torch.Tensor, q_pe: torch.Tensor, ckv_cache: torch.Tensor, kpe_cache: torch.Tensor
        ) -> torch.Tensor:
            assert ckv_cache.shape[1] == kpe_cache.shape[1] == self.size
            assert (q_nope.dtype, ckv_cache.dtype) == self.dtypes
            assert q_nope.shape[1] == self.num_heads
            queries = torch.cat([q_nope, q_pe], 2).float().split(self.tokens)
            return torch.cat(
                [
                    self.attend(q, torch.cat([ckv_cache[table], kpe_cache[table]], 2).flatten(0, 1), length)
                    for q, table, length in zip(queries, self.pages, self.lengths, strict=True)
                ]
            ).to(q_nope.dtype)

        def attend(self, q: torch.Tensor, rows: torch.Tensor, length: int) -> torch.Tensor:
            assert length <= len(rows) < length + self.size
            kv = rows[:length].float()
            logits = self.sm_scale * torch.einsum("thd,kd->thk", q, kv)
            if self.causal:
                hidden = torch.ones(len(q), length).triu(length - len(q) + 1).bool()
                logits.masked_fill_(hidden[:, None], float("-inf"))
            return logits.softmax(2) @ kv[:, :512]
