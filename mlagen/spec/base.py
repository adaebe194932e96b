"""The base of every part of a spec."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

Dtype = Literal["bf16", "fp16"]
SIZES_ONLY = "it sizes cases and benchmarks; a call may have any other number"  # of a field without a place in kernels


class Model(BaseModel):
    """Base of every part of a spec: frozen, strict, no unknown field."""

    model_config = ConfigDict(
        frozen=True,
        strict=True,
        extra="forbid",
        field_title_generator=lambda name, _: name,  # editors show a field under the name that the file spells
    )
