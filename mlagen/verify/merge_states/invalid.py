"""Arguments that the merges must refuse."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from mlagen.verify import invalid
from mlagen.verify.invalid import Invalid, RefusedCase

NAME = "merge_states"
STATES, PARTS = "merge_attn_states", "merge_attn_parts"


def _invalid_tensor(argument: str, *, first: bool = False) -> Iterator[Invalid]:
    yield from invalid.tensor(argument, torch.float64, first=first, word="not contiguous")
    if not first:  # which says what sizes the others must have
        yield Invalid(argument, "two heads for one", lambda tensor: torch.cat([tensor, tensor], tensor.dim() - 2))


def _invalid_parts() -> Iterator[Invalid]:
    for argument in ("outputs", "lses", "out", "output_lse"):
        yield from _invalid_tensor(argument, first=argument == "outputs")
    yield Invalid("outputs", "another length of values", lambda outputs: outputs.repeat(1, 1, 1, 3))
    yield Invalid("lses", "a part short", lambda lses: lses[1:])
    for base in ("10", 2, None):
        yield Invalid("lse_base", repr(base), invalid.constant(base))


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
    for count in (-1, 5, 1.0, True):
        yield Invalid("prefill_tokens_with_context", str(count), invalid.constant(count))


def refused(wrappers: Sequence[str]) -> Iterator[RefusedCase]:
    """A case for each invalid argument of the wrappers that are there."""
    for wrapper, found in ((STATES, _invalid_states()), (PARTS, _invalid_parts())):
        if wrapper in wrappers:
            yield from invalid.refused_cases(NAME, {wrapper: wrapper.removeprefix("merge_attn_")}, found)
