"""Small workloads of FlashInfer-Bench's definitions: sizes, and inputs that may not be random. They never change."""

from __future__ import annotations

import json
import math
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.random import RandomState  # its streams are the same in every numpy

from mlagen.backends.engines.flashinfer_bench import Definition

INT32, INT8, FLOAT32 = "I32", "I8", "F32"  # dtypes of safetensors
_NUMPY = {INT32: "<i4", INT8: "<i1", FLOAT32: "<f4"}
_SPARE_PAGES = 3  # pages of a cache that no request has

Lengths = Sequence[int]


@dataclass
class Workload:
    """One call of a definition.

    Attributes:
        axes: values of the variable axes.
        tensors: inputs that come from a file, by name: the dtype and the values.
        uuid: its identifier, from the definition's name and its number.
    """

    axes: dict[str, int]
    tensors: dict[str, tuple[str, np.ndarray]] = field(default_factory=dict)
    uuid: str = ""

    def document(self, definition: Definition, scale: float, blob: str) -> dict[str, Any]:
        """The workload in the schema's fields.

        Args:
            definition: the definition.
            scale: the softmax scale.
            blob: path of the file of `tensors`, from the data set's root.
        """
        inputs: dict[str, Any] = {}
        for name, tensor in definition.inputs.items():
            if name in self.tensors:
                inputs[name] = {"type": "safetensors", "path": blob, "tensor_key": name}
            elif tensor.shape is None:
                inputs[name] = {"type": "scalar", "value": scale}
            else:
                inputs[name] = {"type": "random"}
        return {"uuid": self.uuid, "axes": {name: self.axes[name] for name in definition.variables}, "inputs": inputs}


def workloads_of(definition: Definition) -> list[Workload]:
    """The workloads of a definition, the smallest first."""
    made = [make(definition.constants, RandomState(seed)) for seed, make in enumerate(_MAKERS[definition.form.kind])]
    for number, workload in enumerate(made):
        workload.uuid = str(uuid.uuid5(uuid.NAMESPACE_URL, f"mlagen/{definition.name}/{number}"))
    return made


def safetensors(tensors: Mapping[str, tuple[str, np.ndarray]]) -> bytes:
    """A file of the safetensors format: the header's length, the header, and the tensors' bytes one after the other."""
    header: dict[str, Any] = {}
    data = b""
    for name, (dtype, values) in sorted(tensors.items()):
        raw = values.astype(_NUMPY[dtype]).tobytes()
        header[name] = {"dtype": dtype, "shape": list(values.shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + data


def _indptr(lengths: Lengths) -> np.ndarray:
    return np.concatenate(([0], np.cumsum(lengths)))


def _paged(kv: Lengths, constants: Mapping[str, int], random: RandomState) -> Workload:
    """Requests of these lengths over pages in random order."""
    page_size = constants["page_size"]
    pages = [math.ceil(length / page_size) for length in kv]
    total = sum(pages)
    tensors = {
        "kv_indptr": (INT32, _indptr(pages)),
        "kv_indices": (INT32, random.permutation(total + _SPARE_PAGES)[:total]),
    }
    if page_size > 1:
        last = [length - (count - 1) * page_size for length, count in zip(kv, pages, strict=True)]
        tensors["kv_last_page_len"] = (INT32, np.array(last))
    axes = {
        "batch_size": len(kv),
        "num_pages": total + _SPARE_PAGES,
        "len_indptr": len(kv) + 1,
        "num_kv_indices": total,
    }
    return Workload(axes, tensors)


def _decode(*kv: int) -> Callable[[Mapping[str, int], RandomState], Workload]:
    return lambda constants, random: _paged(kv, constants, random)


def _prefill(q: Lengths, kv: Lengths) -> Callable[[Mapping[str, int], RandomState], Workload]:
    def make(constants: Mapping[str, int], random: RandomState) -> Workload:
        workload = _paged(kv, constants, random)
        workload.axes["total_q"] = sum(q)
        workload.tensors["qo_indptr"] = (INT32, _indptr(q))
        return workload

    return make


def _ragged(q: Lengths, kv: Lengths) -> Callable[[Mapping[str, int], RandomState], Workload]:
    def make(constants: Mapping[str, int], random: RandomState) -> Workload:
        axes = {"total_q": sum(q), "total_kv": sum(kv), "len_indptr": len(q) + 1}
        return Workload(axes, {"qo_indptr": (INT32, _indptr(q)), "kv_indptr": (INT32, _indptr(kv))})

    return make


def _sparse(tokens: int, rows: int, *valid: int) -> Callable[[Mapping[str, int], RandomState], Workload]:
    """Tokens that name distinct rows of a cache; `valid` counts those of a token, in turn."""

    def make(constants: Mapping[str, int], random: RandomState) -> Workload:
        indices = np.full((tokens, constants["topk"]), -1)
        for token in range(tokens):
            count = valid[token % len(valid)]
            indices[token, :count] = random.permutation(rows)[:count]
        axes = {"num_tokens": tokens, "num_pages": rows // constants["page_size"]}
        return Workload(axes, {"sparse_indices": (INT32, indices)})

    return make


def _indexer(max_num_pages: int, *lens: int) -> Callable[[Mapping[str, int], RandomState], Workload]:
    """Requests of these lengths; pages may belong to several of them."""

    def make(constants: Mapping[str, int], random: RandomState) -> Workload:
        page_size, columns = constants["page_size"], constants["index_head_dim"]
        pages = max_num_pages + _SPARE_PAGES
        table = np.stack([random.permutation(pages)[:max_num_pages] for _ in lens])
        # e4m3 of either sign with exponents 2^-3 to 2^2, and scales of 1/2 to 3/2
        sign, magnitude = (random.randint(*bounds, size=(pages, page_size * columns)) for bounds in ((0, 2), (32, 80)))
        values = (sign * 128 + magnitude).astype(np.uint8)
        scales = random.uniform(0.5, 1.5, size=(pages, page_size)).astype("<f4")
        keys = np.concatenate((values, scales.view(np.uint8)), axis=1).view(np.int8)
        axes = {"batch_size": len(lens), "max_num_pages": max_num_pages, "num_pages": pages}
        tensors = {
            "k_index_cache_fp8": (INT8, keys.reshape(pages, page_size, 1, -1)),
            "seq_lens": (INT32, np.array(lens)),
            "block_table": (INT32, table),
        }
        return Workload(axes, tensors)

    return make


_MAKERS: dict[str, tuple[Callable[[Mapping[str, int], RandomState], Workload], ...]] = {
    "paged_decode": (_decode(1, 70, 200), _decode(4096), _decode(*(2048 - 17 * request for request in range(8)))),
    "paged_prefill": (
        _prefill((3, 1, 9), (3, 65, 130)),
        _prefill((512,), (2048,)),
        _prefill((128, 256, 384), (1120, 256, 1000)),
    ),
    "ragged_prefill": (
        _ragged((5, 1, 20), (5, 40, 30)),
        _ragged((2048,), (2048,)),
        _ragged((128, 256, 384), (1120, 256, 1000)),
    ),
    "sparse_attention": (_sparse(2, 8192, 100, 2048), _sparse(1, 8192, 2048), _sparse(32, 8192, 2048, 1500)),
    "topk_indexer": (_indexer(40, 100, 2500), _indexer(64, 4096), _indexer(96, *range(6144, 4096, -256))),
}
