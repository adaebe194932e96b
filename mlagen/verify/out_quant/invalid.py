"""Arguments that the wrapper of out_quant must refuse."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from mlagen.verify.call import invalid
from mlagen.verify.call.invalid import Invalid, RefusedCase
from mlagen.verify.out_quant.side import NAME, WRAPPER, OutSide


def _arguments(side: OutSide) -> Iterator[Invalid]:
    yield from invalid.tensor("o", torch.float64, first=True)
    yield Invalid("o", "wider heads", invalid.wider(128))
    yield from invalid.tensor("positions", torch.int32)
    yield Invalid("positions", "one short", lambda tensor: tensor[:-1])
    yield Invalid("positions", "missing beside a table", invalid.constant(None))
    yield from invalid.tensor("cos_sin_cache", torch.float64)
    yield Invalid("cos_sin_cache", "the model's dtype", lambda table: table.to(side.dtype))
    yield Invalid("cos_sin_cache", "wider", invalid.wider(2))
    yield Invalid("cos_sin_cache", "missing beside positions", invalid.constant(None))
    for name in ("n_groups", "heads_per_group"):
        for value in (0, -1, 2.5, None, True, "2"):
            yield Invalid(name, repr(value), invalid.constant(value))
    yield Invalid("heads_per_group", "more heads than there are", lambda width: width + 1)
    yield Invalid("heads_per_group", "fewer heads than there are", lambda width: width - 1)
    for name, value in (("nope_dim", side.first), ("rope_dim", side.rope), ("quant_group_size", 128)):
        yield Invalid(name, "another", invalid.constant(value // 2))
        yield Invalid(name, "None", invalid.constant(None))
    for name in ("tma_aligned_scales", "quantize"):
        yield from (one for one in invalid.flag(name) if not one.like)
    if not side.packs:
        yield Invalid("tma_aligned_scales", "True", invalid.constant(True))


def refused(side: OutSide) -> Iterator[RefusedCase]:
    """A case for each invalid argument."""
    yield from invalid.refused_cases(NAME, {WRAPPER: "output"}, _arguments(side), prefix=f"{NAME} ")
