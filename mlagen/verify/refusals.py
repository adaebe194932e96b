"""Wrong arguments, each of which a wrapper must refuse by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from mlagen.verify.facts import Facts

FLASH = ("flash_mla_sparse_fwd",)
SPARSE = ("flash_mla_sparse_fwd", "triton_mla_sparse_attention")
VLLM = ("triton_mla_sparse_attention",)


@dataclass(frozen=True)
class Change:
    """A change that makes a valid call wrong.

    Attributes:
        argument: the argument that is off, which the error must name.
        name: in what way.
        apply: changes the arguments in place, given what the spec says.
        wrappers: the wrappers it is for.
        applies: whether it makes a call wrong under a spec.
    """

    argument: str
    name: str
    apply: Callable[[dict[str, Any], Facts], None]
    wrappers: tuple[str, ...]
    applies: Callable[[Facts], bool] = lambda facts: True


def _sets(argument: str, change: Callable[[torch.Tensor], Any]) -> Callable[[dict[str, Any], Facts], None]:
    """Replaces an argument by what `change` makes of it."""

    def apply(arguments: dict[str, Any], facts: Facts) -> None:
        arguments[argument] = change(arguments[argument])

    return apply


def _gives(
    argument: str, make: Callable[[torch.Tensor, Facts], Any], like: str = "q"
) -> Callable[[dict[str, Any], Facts], None]:
    """Gives an argument that `make` makes from the tensor `like` and the spec."""

    def apply(arguments: dict[str, Any], facts: Facts) -> None:
        arguments[argument] = make(arguments[like], facts)

    return apply


def _every_other_lane(tensor: torch.Tensor) -> torch.Tensor:
    """The same shape with a stride of 2 in the last dimension."""
    return tensor.repeat_interleave(2, dim=-1)[..., ::2]


def _wider(tensor: torch.Tensor) -> torch.Tensor:
    """Eight lanes more."""
    return tensor.new_zeros(*tensor.shape[:-1], tensor.shape[-1] + 8)


def _elsewhere(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor on another kind of device."""
    return tensor.to("cpu" if tensor.device.type == "cuda" else "meta")


def _longer(tensor: torch.Tensor) -> torch.Tensor:
    """One entry more in the first dimension."""
    return torch.cat([tensor, tensor[:1]])


def _tensor_changes(
    argument: str, wrappers: tuple[str, ...], wrong_dtype: torch.dtype, lanes: str | None = None
) -> list[Change]:
    """What may be wrong with any tensor; `lanes` is the fact that says how long its last dimension is."""
    changes: dict[str, Callable[[torch.Tensor], Any]] = {
        f"dtype {str(wrong_dtype).removeprefix('torch.')}": lambda tensor: tensor.to(wrong_dtype),
        "not a tensor": lambda tensor: tensor.tolist(),
        "a dimension short": lambda tensor: tensor[0],
        "last dimension not contiguous": _every_other_lane,
        "another device": _elsewhere,
    }
    if argument in ("q", "kv_c"):  # the first tensor says which device the others must be on
        del changes["another device"]

    def there(facts: Facts) -> bool:
        return lanes is None or getattr(facts, lanes) > 0

    def several(facts: Facts) -> bool:
        return lanes is None or getattr(facts, lanes) > 1

    return [
        Change(argument, name, _sets(argument, change), wrappers, several if change is _every_other_lane else there)
        for name, change in changes.items()
    ]


def _out(
    dtype: torch.dtype | None = None, lanes: int = 0, step: int = 1
) -> Callable[[torch.Tensor, Facts], torch.Tensor]:
    def make(q: torch.Tensor, facts: Facts) -> torch.Tensor:
        shape = (*q.shape[:2], (facts.d_v + lanes) * step)
        return torch.zeros(shape, dtype=dtype or q.dtype, device=q.device)[..., ::step]

    return make


def _f32(*grow: int, dtype: torch.dtype = torch.float32) -> Callable[[torch.Tensor, Facts], torch.Tensor]:
    """[tokens, heads] for two arguments, [heads] for one: q's sizes, each grown by its argument."""

    def make(q: torch.Tensor, facts: Facts) -> torch.Tensor:
        sizes = q.shape[2 - len(grow) : 2]
        return torch.zeros([size + more for size, more in zip(sizes, grow, strict=True)], dtype=dtype, device=q.device)

    return make


def _lengths(more: int, dtype: torch.dtype = torch.int32) -> Callable[[torch.Tensor, Facts], torch.Tensor]:
    return lambda q, facts: torch.ones(q.shape[0] + more, dtype=dtype, device=q.device)


def _floats(*shape: int, dtype: torch.dtype = torch.float32) -> Callable[[torch.Tensor, Facts], torch.Tensor]:
    return lambda q, facts: torch.zeros(shape, dtype=dtype, device=q.device)


def _drops(argument: str) -> Callable[[dict[str, Any], Facts], None]:
    return lambda arguments, facts: arguments.__setitem__(argument, None)


def _wrong_page(arguments: dict[str, Any], facts: Facts) -> None:
    pages, size, lanes = arguments["kv"].shape
    arguments["kv"] = arguments["kv"].new_zeros(pages, size + 1, lanes)


def _wrong_d_v(arguments: dict[str, Any], facts: Facts) -> None:
    arguments["d_v"] = facts.d_v + 16


CHANGES: tuple[Change, ...] = (
    *_tensor_changes("q", SPARSE, torch.float32, "d_qk"),
    Change("q", "wider than a KV row", _sets("q", _wider), SPARSE),
    *_tensor_changes("kv", SPARSE, torch.float32, "d_qk"),
    Change("kv", "wider rows", _sets("kv", _wider), SPARSE),
    Change("kv", "another page size", _wrong_page, SPARSE),
    *_tensor_changes("indices", SPARSE, torch.int64),
    Change("indices", "more tokens than q", _sets("indices", _longer), SPARSE),
    Change("indices", "two index sets", _sets("indices", lambda t: t.repeat(1, 2, 1)), SPARSE),
    Change("d_v", "not the spec's", _wrong_d_v, FLASH),
    Change("sm_scale", "None", _gives("sm_scale", lambda q, facts: None), SPARSE),
    Change("sm_scale", "a tensor", _gives("sm_scale", lambda q, facts: torch.ones((), device=q.device)), SPARSE),
    Change("num_kv_splits", "negative", _gives("num_kv_splits", lambda q, facts: -1), VLLM),
    Change("num_kv_splits", "a float", _gives("num_kv_splits", lambda q, facts: 2.5), VLLM),
    Change("sm_count", "zero", _gives("sm_count", lambda q, facts: 0), VLLM),
    Change("attn_sink", "a head too many", _gives("attn_sink", _f32(1)), FLASH, lambda facts: facts.sink != "none"),
    Change(
        "attn_sink",
        "dtype float64",
        _gives("attn_sink", _f32(0, dtype=torch.float64)),
        FLASH,
        lambda facts: facts.sink != "none",
    ),
    Change("attn_sink", "missing", _drops("attn_sink"), SPARSE, lambda facts: facts.sink == "required"),
    Change(
        "attn_sink", "given to a spec without", _gives("attn_sink", _f32(0)), FLASH, lambda facts: facts.sink == "none"
    ),
    Change(
        "topk_length",
        "a token too many",
        _gives("topk_length", _lengths(1)),
        FLASH,
        lambda facts: facts.length != "none",
    ),
    Change(
        "topk_length",
        "dtype int64",
        _gives("topk_length", _lengths(0, torch.int64)),
        FLASH,
        lambda facts: facts.length != "none",
    ),
    Change("topk_length", "missing", _drops("topk_length"), SPARSE, lambda facts: facts.length == "required"),
    Change(
        "topk_length",
        "given to a spec without",
        _gives("topk_length", _lengths(0)),
        FLASH,
        lambda facts: facts.length == "none",
    ),
    Change("out", "dtype float32", _gives("out", _out(torch.float32)), SPARSE),
    Change("out", "too wide", _gives("out", _out(lanes=8)), SPARSE),
    Change("out", "last dimension not contiguous", _gives("out", _out(step=2)), SPARSE, lambda facts: facts.d_v > 1),
    Change("lse", "a token too many", _gives("lse", _f32(1, 0)), SPARSE),
    Change("lse", "dtype float64", _gives("lse", _f32(0, 0, dtype=torch.float64)), SPARSE),
    Change("max_logits", "a token too many", _gives("max_logits", _f32(1, 0)), FLASH),
    Change("max_logits", "dtype float64", _gives("max_logits", _f32(0, 0, dtype=torch.float64)), FLASH),
    Change("workspace", "too small", _gives("workspace", _floats(16)), SPARSE),
    Change("workspace", "dtype float16", _gives("workspace", _floats(1 << 20, dtype=torch.float16)), SPARSE),
    Change("workspace", "two dimensions", _gives("workspace", _floats(1024, 1024)), SPARSE),
)
