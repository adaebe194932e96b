"""The table of a call: the attributes of a wrapper's `_Call`, which kernels take by name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Field:
    """An attribute of a call.

    Attributes:
        name: its name; or the attributes that are assigned together.
        source: its value; "": the constructor's argument of its name.
        rows: the slice of it that a batch of the call takes; "": a batch takes it whole.
        of_batch: its value for a batch where that is no slice.
        said: its shape or its meaning.
    """

    name: str
    source: str = ""
    rows: str = ""
    of_batch: str = ""
    said: str = ""

    @property
    def value(self) -> str:
        """Its value."""
        return self.source or self.name

    @property
    def comment(self) -> str:
        """A comment at the end of its line."""
        return f"  # {self.said}" if self.said else ""

    @property
    def batch(self) -> str:
        """Its value for a batch of the call."""
        return self.of_batch or (f"self.{self.name}[{self.rows}]" if self.rows else f"self.{self.name}")


@dataclass(frozen=True)
class CallTable:
    """The table of a call.

    Attributes:
        call_inputs: the constructor's arguments.
        call_sizes: sizes and strides.
    """

    call_inputs: Sequence[Field]
    call_sizes: Sequence[Field]


def given(*fields: Field | None) -> list[Field]:
    """Return the fields that calls of the package have. The others are None."""
    return [field for field in fields if field is not None]
