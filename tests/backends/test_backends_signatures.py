"""Readers of calls' signatures, from the arguments that wrappers declare."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from jinja2 import Environment, FileSystemLoader

from mlagen.backends.parts.common import LINE_LENGTH
from mlagen.backends.parts.signatures import _context
from mlagen.emit.render import template_dir
from mlagen.runtime import _calls, _internals, _launch, _notes

WRAPPERS = '''
class Sizes(_calls.CallState):
    """Sizes."""


@_calls.validated(q_rope="q[1]")
def attend(
    q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    kv: torch.Tensor,
    scale: float,
    sink: torch.Tensor | None = None,
    window: tuple[int, int] | None = None,
    *,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
    sizes: Sizes | None = None,
    causal: bool = False,
) -> None: ...


def other(q: torch.Tensor) -> None: ...
'''


def reader(find: Callable[..., Any], known: _calls.KnownCalls) -> Any:
    """The reader of `attend`."""
    annotated = WRAPPERS.replace("sizes: Sizes | None", "sizes: Sizes")
    environment = Environment(loader=FileSystemLoader(template_dir()), trim_blocks=True, lstrip_blocks=True)
    text = environment.get_template("_signatures.py.jinja").render(**_context({"attention.py": annotated}))
    assert max(map(len, text.split("\n"))) <= LINE_LENGTH
    space: dict[str, Any] = {"__name__": "mlagen.runtime._signatures", "__package__": "mlagen.runtime"}
    exec(text, space)
    assert [name for name in space if name.startswith("attention_")] == ["attention_attend"]
    call = space["attention_attend"](lambda arguments: (arguments,), known, find)
    call.__defaults__ = (None, None)
    call.__kwdefaults__ = {"out": None, "sizes": _notes.CallState(), "causal": False}
    return call


def read(*given: Any, **named: Any) -> tuple[Any, ...]:
    """The signature, the addresses and the arguments of a call; the arguments alone if it has no signature."""

    def find(values: tuple[Any, ...], tensors: tuple[Any, ...]) -> Any:
        found = _notes.signature_of(values, tensors)
        assert isinstance(hash(found), int)
        return lambda addresses, arguments: (found, addresses, arguments)

    found = reader(find, _calls.KnownCalls())(*given, **named)
    assert isinstance(found, tuple)
    return found


Q, KV = torch.zeros(2, 4), torch.zeros(8, 4, dtype=torch.int32)


def signature(*given: Any, **named: Any) -> Any:
    """The signature of a call."""
    return read(*given, **named)[0]


def test_the_addresses_are_those_of_tensors_in_order() -> None:
    sink, out = torch.zeros(4), (torch.zeros(1), torch.zeros(2))
    _, addresses, arguments = read((Q, KV), KV, 0.5, sink, out=out)
    assert addresses == [one.data_ptr() for one in (Q, KV, KV, sink, *out)]
    assert arguments[:4] == ((Q, KV), KV, 0.5, sink)
    assert read(Q, KV, 0.5)[1] == [Q.data_ptr(), None, KV.data_ptr(), None, None, None]


def test_equal_calls_have_equal_signatures() -> None:
    assert signature(Q, KV, 0.5) == signature(torch.ones(2, 4), KV.clone(), 0.5, causal=False)
    assert signature(Q, kv=KV, scale=0.5) == signature(Q, KV, 0.5)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ((Q, KV[:, :2], 0.5), {}),
        ((Q.mT.contiguous().mT, KV, 0.5), {}),
        ((Q.double(), KV, 0.5), {}),
        ((Q.to("meta"), KV, 0.5), {}),
        ((torch.zeros(9)[1:].view(2, 4), KV, 0.5), {}),
        (((Q, Q), KV, 0.5), {}),
        ((Q, KV, 1), {}),
        ((Q, KV, 0.0), {}),
        ((Q, KV, -0.0), {}),
        ((Q, KV, 0.5, Q), {}),
        ((Q, KV, 0.5, None, (1, 2)), {}),
        ((Q, KV, 0.5, None, [1, 2]), {}),
        ((Q, KV, 0.5, None, (1.0, 2)), {}),
        ((Q, KV, 0.5), {"out": (Q, Q)}),
        ((Q, KV, 0.5), {"out": [Q, Q]}),
        ((Q, KV, 0.5), {"causal": 0}),
        ((Q, KV, 0.5), {"causal": True}),
    ],
)
def test_another_call_has_another_signature(given: tuple[Any, ...], named: dict[str, Any]) -> None:
    plain = [signature(Q, KV, 0.5), signature(Q, KV, 1.0), signature(Q, KV, 0.25, None, (1, 2), out=(KV, KV))]
    assert signature(*given, **named) not in plain
    assert signature(*given, **named) == signature(*given, **named)


class Own(torch.Tensor):
    """A tensor of a subclass."""


@pytest.mark.parametrize("q", [None, 1, (Q,), (Q, None), iter((Q, Q)), Q.as_subclass(Own)])
def test_an_argument_that_is_no_tensor_goes_to_the_wrapper(q: Any) -> None:
    assert len(read(q, KV, 0.5)) == 1


def test_a_parameter_is_a_tensor() -> None:
    assert signature(torch.nn.Parameter(Q), KV, 0.5) == signature(Q, KV, 0.5)


def test_a_forced_call_goes_to_the_wrapper() -> None:
    with _launch.force(num_splits=1):
        assert len(read(Q, KV, 0.5)) == 1
    assert not _launch.steering
    assert _internals.dispatch_modes() == 0
