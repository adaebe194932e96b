"""The families, their cases and the code that runs one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlagen.verify.cache.family import CACHE
from mlagen.verify.case import Case
from mlagen.verify.dense_decode.family import DENSE_DECODE
from mlagen.verify.dense_fwd.family import DENSE_FWD
from mlagen.verify.family import Family
from mlagen.verify.indexer_cache.family import INDEXER_CACHE
from mlagen.verify.indexer_select.family import INDEXER_SELECT
from mlagen.verify.indices.family import INDICES
from mlagen.verify.kept import kept_cases
from mlagen.verify.merge_states.family import MERGE_STATES
from mlagen.verify.mqa_logits.family import MQA_LOGITS
from mlagen.verify.ops import operators
from mlagen.verify.results import Figure
from mlagen.verify.sparse_decode.family import SPARSE_DECODE
from mlagen.verify.sparse_fwd.family import SPARSE_FWD
from mlagen.verify.subject import Subject
from mlagen.verify.topk.family import TOPK

KERNELS: tuple[Family, ...] = (
    SPARSE_FWD,
    CACHE,
    DENSE_DECODE,
    INDICES,
    SPARSE_DECODE,
    MERGE_STATES,
    DENSE_FWD,
    TOPK,
    INDEXER_CACHE,
    MQA_LOGITS,
    INDEXER_SELECT,
)
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
