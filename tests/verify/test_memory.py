"""The tensors that the cases hand to a wrapper: numbers where they count, poison everywhere else."""

import pytest
import torch
from verify_specs import spec

from mlagen.verify.call.facts import Facts
from mlagen.verify.call.memory import LAYOUTS, bits, place
from mlagen.verify.call.patterns import INDEX_PATTERNS
from mlagen.verify.reference import valid_indices
from mlagen.verify.sparse_fwd.cases import Problem
from mlagen.verify.sparse_fwd.inputs import build

FLAT = Facts.of(spec(kv_lora_rank=24, qk_rope_head_dim=8, v_head_dim=24))
PAGED = Facts.of(spec(kv_lora_rank=24, qk_rope_head_dim=8, v_head_dim=24, block_size=7))
NAN = float("nan")


@pytest.mark.parametrize("name", sorted(set(LAYOUTS) - {"far"}))
def test_a_placed_tensor_is_surrounded_by_poison(name):
    values = torch.arange(24.0).view(2, 3, 4).bfloat16()
    placed = place(values, LAYOUTS[name], NAN)
    assert torch.equal(placed.view, values)
    assert placed.view.stride(2) == 1
    assert int((~placed.buffer.isnan()).sum()) == 24
    begin = placed.view.storage_offset() * 2
    assert (begin % 16 == 0) == (name != "odd")
    assert placed.view.stride(0) > placed.view.stride(1) or name == "transposed"


def test_a_write_anywhere_is_noticed():
    placed = place(torch.zeros(2, 3, 4), LAYOUTS["slice"], NAN)
    assert not placed.changed()
    placed.view[1, 2, 3] = 1
    assert placed.changed()
    assert not placed.spilled()
    placed.buffer[placed.view.storage_offset() - 1] = 1
    assert placed.spilled()


@pytest.mark.parametrize("facts", [FLAT, PAGED])
@pytest.mark.parametrize("pattern", sorted(set(INDEX_PATTERNS) - {"far"}))
@pytest.mark.parametrize("length", [None, "mixed"])
def test_valid_indices_name_numbers_and_all_other_rows_are_nan(facts, pattern, length):
    inputs = build(Problem(5, 2, 40, 60, indices=pattern, length=length), facts, "cpu", 1)
    pages, size, columns = inputs.kv.shape
    assert size == (facts.block_size or 1)
    rows = inputs.kv.reshape(pages * size, columns)
    named = set()
    for token in range(5):
        count = None if inputs.length is None else int(inputs.length[token])
        named |= set(valid_indices(inputs.indices[token, 0], count, len(rows)).tolist())
    assert named or pattern in ("none", "some rows none")
    assert not named or pattern != "none"
    assert not rows[sorted(named)].isnan().any()
    assert rows.isnan().all(1).sum() >= len(rows) // 3 - 1
    assert (0 in named) == (pattern == "row zero")
    if length:  # entries behind a length name poison
        follow = inputs.indices[1, 0]  # length 0
        assert rows[follow[follow >= 0].long()].isnan().all()


def test_the_same_seed_gives_the_same_inputs():
    problem = Problem(2, 3, 10, 20, sink="mixed", length="random", out="odd")
    one, two, other = (build(problem, FLAT, "cpu", seed) for seed in (1, 1, 2))
    assert torch.equal(bits(one.kv), bits(two.kv))
    assert torch.equal(one.q, two.q)
    assert not torch.equal(one.q, other.q)
    assert one.given["out"].buffer.isnan().all()
