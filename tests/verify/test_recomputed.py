"""Results that are computed again: none but those that the inputs ask for."""

import pytest
import torch

from mlagen.verify.call.case import CaseFailedError
from mlagen.verify.checks.recomputed import note_call, note_launch, noted, require_calls, require_flags

YES, NO = torch.tensor([True]), torch.tensor([False])


def test_flags_of_each_launch_are_kept_as_they_were():
    flags = torch.tensor([0, 1], dtype=torch.int32)
    note_launch("kernel", {"recompute_ptr": flags}, ())  # which nobody asked for
    with noted() as found:
        note_launch("kernel", {"recompute_ptr": flags}, ())
        note_launch("other", {}, ())
        flags[0] = 1
        note_launch("kernel", {"recompute_ptr": flags}, ())
    assert found.after("kernel").tolist() == [False, True, True, True]
    assert found.after("other").tolist() == []


@pytest.mark.parametrize(("found", "needed", "allowed"), [(YES, NO, NO), (NO, YES, YES)])
def test_flags_that_nothing_asks_for_and_those_that_lack_fail(found, needed, allowed):
    require_flags("attention", found, found, found)
    with pytest.raises(CaseFailedError, match="attention: groups 0 of 1 are"):
        require_flags("attention", found, needed, allowed)


@pytest.mark.parametrize("asked", [False, True])
def test_heads_are_computed_again_where_they_have_to_be_and_nowhere_else(asked):
    with noted() as found:
        require_calls(found, not asked)  # no kernel ran that could
        note_launch("kernel", {}, {"_recompute_heads": None})
        if asked:
            note_call()
    require_calls(found, asked)
    with pytest.raises(CaseFailedError, match="computed again"):
        require_calls(found, not asked)
