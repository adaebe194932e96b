"""The families, their cases and the code that runs one.

A family's module is `mlagen.verify.<family>.family`, or stands in `mlagen.verify.chains`. It has the family under its
name in capitals, for example SPARSE_FWD.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from mlagen.verify.call.case import Case
from mlagen.verify.call.family import Family
from mlagen.verify.call.kept import kept_cases
from mlagen.verify.call.results import Figure
from mlagen.verify.call.subject import Subject
from mlagen.verify.chains.ops import operators

# Modules of families, in the order of their cases.
MODULES = (
    "sparse_fwd.family",
    "cache.family",
    "prologue.family",
    "compressor.family",
    "dense_decode.family",
    "indices.family",
    "chains.indices_attention",
    "sparse_decode.family",
    "merge_states.family",
    "dense_fwd.family",
    "topk.family",
    "indexer_cache.family",
    "kpool.family",
    "latents.family",
    "out_quant.family",
    "mqa_logits.family",
    "chains.indexer_select.family",
    "chains.candidates.family",
)


def _family(module: str) -> Family:
    """Return the family of a module."""
    name = module.removeprefix("chains.").removesuffix(".family").upper()
    family: Family = getattr(import_module(f"{__package__}.{module}"), name)
    return family


KERNELS = tuple(map(_family, MODULES))
FAMILIES: tuple[Family, ...] = (*KERNELS, operators(KERNELS))


def cases_of(family: Family, spec: Mapping[str, Any], device: str) -> list[Case]:
    """All cases of a family, with those of kept calls; `cases` says how they are made."""
    found = list(family.cases(spec, device))
    return [*found, *kept_cases(found)]


def cases(spec: Mapping[str, Any], device: str) -> list[Case]:
    """All cases of a package.

    Args:
        spec: `SPEC["spec"]` of the package. A case about something that it lacks is left out.
        device: "cpu" gives sizes that the interpreter bears, "cuda" the model's own.
    """
    return [case for family in FAMILIES for case in cases_of(family, spec, device)]


def run(subject: Subject, case: Case) -> list[Figure]:
    """Runs a case; returns its figures, none where it compares bits.

    Raises:
        CaseFailedError: the case does not hold; other exceptions of the package pass through.
        CaseSkippedError: the case cannot run here.
    """
    (family,) = [family for family in FAMILIES if family.has(case)]
    return family.run(subject, case)
