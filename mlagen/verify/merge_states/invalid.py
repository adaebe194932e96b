"""Arguments that the merges must refuse."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from mlagen.verify.call import invalid
from mlagen.verify.call.invalid import Invalid, RefusedCase
from mlagen.verify.checks.merges import PARTS, STATES

NAME = "merge_states"


def _invalid_tensor(argument: str, *, first: bool = False) -> Iterator[Invalid]:
    strided = "lse" not in argument  # its elements may lie apart
    yield from invalid.tensor(argument, torch.float64, first=first, strided=strided, word="not contiguous")
    if not first:  # it sets the sizes of the others
        yield Invalid(argument, "two heads for one", lambda tensor: torch.cat([tensor, tensor], tensor.dim() - 2))


def _invalid_parts() -> Iterator[Invalid]:
    for argument in ("outputs", "lses", "out", "output_lse"):
        yield from _invalid_tensor(argument, first=argument == "outputs")
    yield Invalid("outputs", "another length of values", lambda outputs: outputs.repeat(1, 1, 1, 3))
    yield Invalid("lses", "a part short", lambda lses: lses[1:])
    for base in ("10", 2):
        yield Invalid("lse_base", repr(base), invalid.constant(base))
    yield Invalid("output_lse", "a part's memory", lambda lses: lses[1], like="lses")
    yield Invalid("out", "not quantised", invalid.constant(torch.ones(1)), changes="output_scale")
    yield Invalid("out", "quantised without a scale", lambda out: out.to(torch.float8_e4m3fn))


def _invalid_states() -> Iterator[Invalid]:
    for argument in ("output", "prefix_output", "prefix_lse", "suffix_output", "suffix_lse", "output_lse"):
        yield from _invalid_tensor(argument, first=argument == "output")
    yield Invalid("prefix_output", "a token short", lambda output: output[1:])
    yield Invalid("prefix_output", "a token too many", invalid.longer)
    yield Invalid("prefix_lse", "a token short", lambda lse: lse[:, 1:])
    yield Invalid("prefix_lse", "a token too many", lambda lse: torch.cat([lse, lse[:, :1]], 1))
    yield Invalid("suffix_output", "a token short", lambda output: output[1:])
    yield Invalid("suffix_lse", "a token short", lambda lse: lse[:, 1:])
    yield Invalid("output", "another length of values", lambda output: output.repeat(1, 1, 3))
    for argument in ("prefix_lse", "suffix_lse"):
        yield Invalid("output_lse", f"{argument}'s memory", lambda lse: lse, like=argument)
        yield Invalid("output_lse", f"an element of {argument}", _at_the_last, like=argument)
        yield Invalid("output_lse", f"{argument}'s memory, transposed", _swapped, like=argument)
    yield Invalid("output", "not quantised", invalid.constant(torch.ones(1)), changes="output_scale")
    yield Invalid("output", "quantised without a scale", lambda output: output.to(torch.float8_e4m3fn))
    for count in (-1, 5, 1.0, True):
        yield Invalid("prefill_tokens_with_context", str(count), invalid.constant(count))


def _at_the_last(lse: torch.Tensor) -> torch.Tensor:
    """An LSE that begins where another has its last element."""
    last = sum((size - 1) * stride for size, stride in zip(lse.shape, lse.stride(), strict=True))
    return lse.as_strided(lse.shape, lse.stride(), int(lse.storage_offset() + last))


def _swapped(lse: torch.Tensor) -> torch.Tensor:
    """The memory of an LSE with other strides."""
    return lse.as_strided(lse.shape, (1, lse.shape[0]), int(lse.storage_offset()))


def _invalid_shared(sink: str) -> Iterator[Invalid]:
    """Invalid arguments of either merge besides its tensors, for attention with a sink or without one."""
    for layout in ("hd", None, 3):
        yield Invalid("lse_layout", repr(layout), invalid.constant(layout))
    yield from invalid.output_scale()
    if sink == "none":
        yield Invalid("attn_sink", "given to a spec without", invalid.constant(torch.zeros(3)))
        return
    heads = {"a head too many": torch.zeros(4), "dtype float64": torch.zeros(3, dtype=torch.float64), "a number": 1.0}
    for how, value in heads.items():
        yield Invalid("attn_sink", how, invalid.constant(value))


def refused(wrappers: Sequence[str], sink: str) -> Iterator[RefusedCase]:
    """A case for each invalid argument of the wrappers that are there."""
    shared = list(_invalid_shared(sink))
    for wrapper, found in ((STATES, [*_invalid_states(), *shared]), (PARTS, [*_invalid_parts(), *shared])):
        if wrapper in wrappers:
            yield from invalid.refused_cases(NAME, {wrapper: wrapper.removeprefix("merge_attn_")}, found)
