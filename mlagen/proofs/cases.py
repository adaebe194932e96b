"""Proofs of cases: the families of a package that were run with its text, and new proofs of the others."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import math
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path

from mlagen.compile import default_cache_dir
from mlagen.emit.replace import write_atomically
from mlagen.proofs.folder import Proofs, cases_key
from mlagen.proofs.rows import CasesRow
from mlagen.proofs.sources import digest_of, family_names
from mlagen.verify import CaseResult

_DIGITS = 3  # of a share, after the point


def environment(device: str) -> str:
    """The versions that a result on a device depends on, without their builds, and a GPU's name."""
    versions = [f"{name} {importlib.metadata.version(name).partition('+')[0]}" for name in ("torch", "triton", "numpy")]
    if device != "cpu":
        import torch

        versions.append(torch.cuda.get_device_name())
    return f"python {'.'.join(platform.python_version_tuple()[:2])}, {', '.join(versions)}"


def wanted(package: str, family: str, device: str, *, every: bool) -> CasesRow:
    """The proof that is asked for, without its figures."""
    return CasesRow(package, family, device, every, environment(device), 0, 0, 0, 0.0)


def proved_before(proofs: Proofs, package: str, device: str, *, every: bool) -> dict[str, CasesRow]:
    """The proofs of a package's families, from the folders of proofs and from the user's cache.

    A proof of all cases is one of the representative set.
    """
    found = {}
    for family in family_names():
        for asked in {every, True}:
            row = wanted(package, family, device, every=asked)
            known = proofs.cases(row) or _cached(row)
            if known is not None:
                found[family] = known
    return found


def proof_of(
    package: str, family: str, device: str, results: Sequence[CaseResult], of: int, *, every: bool
) -> CasesRow:
    """The proof that results of a family give.

    Raises:
        ValueError: a case does not hold.
    """
    if not all(one.ok for one in results):
        raise ValueError("no proof: a case does not hold")
    shares = [one.worst.share for one in results if one.worst is not None]
    return CasesRow(
        *(package, family, device, every or len(results) == of, environment(device)),
        cases=len(results),
        of=of,
        skipped=sum(one.skipped is not None for one in results),
        share=min(1.0, math.ceil(max(shares, default=0.0) * 10**_DIGITS) / 10**_DIGITS),
    )


def _path(key: str) -> Path:
    return default_cache_dir() / "verified" / f"{key}.json"


def keep(row: CasesRow) -> None:
    """Keep a proof in the user's cache; a cache that cannot be written is none."""
    key, values = cases_key(row), row.to_json()
    with contextlib.suppress(OSError):
        write_atomically(_path(key), json.dumps({"key": key, "row": values, "digest": _signed(key, values)}))


def _cached(asked: CasesRow) -> CasesRow | None:
    """The proof in the user's cache; None where there is none, or one that is not as it was written."""
    key = cases_key(asked)
    try:
        found = json.loads(_path(key).read_text(encoding="utf-8"))
        if found["key"] != key or found["digest"] != _signed(key, found["row"]):
            return None
        row = CasesRow.from_json(found["row"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return row if row.place == asked.place else None


def _signed(key: str, values: object) -> str:
    return digest_of([key, json.dumps(values)])


def totals(rows: Mapping[str, CasesRow]) -> tuple[int, int]:
    """How many cases ran, and how many there are."""
    return sum(row.cases for row in rows.values()), sum(row.of for row in rows.values())
