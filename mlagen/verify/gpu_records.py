"""Records of sm90 kernels: the text that ran on a GPU, the card, the date and the calls that it passed.

A record stands under the kernel's content: the function, all that it calls and every constant that they read. Packages
with equal kernels share it. A change of the text leaves the kernel without one. The file has a line per record.
"""

from __future__ import annotations

import ast
import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from mlagen.diffs import SUFFIX, whole
from mlagen.digest import SourceDigests, kernels_of
from mlagen.errors import UnprovedError, UsageError
from mlagen.verify.random.syncs import sm90_files

FILE = Path("proofs") / "gpu.json"  # in the folder of packages
MLAGEN = Path(__file__).resolve().parents[1]
RECORD = "python -m mlagen.verify.random PACKAGES --report REPORT.json on a GPU, then mlagen record REPORT.json"


@dataclass(frozen=True)
class Kernel:
    """A kernel of a package, and the key of its content."""

    package: str
    module: str
    name: str
    key: str


@dataclass(frozen=True)
class Record:
    """Results of a kernel's text on a GPU.

    Attributes:
        module, kernel: where the text stands.
        card, driver, torch, triton: where it ran.
        date, commit: of the report.
        cases: that packages with the kernel passed there.
        calls, delayed_calls: random calls that launched it, all right, without and with delays.
        seconds: that these took.
        reports: hashes of the reports that are counted.
    """

    module: str
    kernel: str
    card: str
    driver: str
    torch: str
    triton: str
    date: str
    commit: str
    cases: int = 0
    calls: int = 0
    delayed_calls: int = 0
    seconds: float = 0.0
    reports: tuple[str, ...] = ()

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Record:
        """From plain data."""
        return cls(**{**value, "reports": tuple(value["reports"])})


def sm90_kernels(folder: Path) -> list[Kernel]:
    """The sm90 kernels of a package that are launched, each with its key.

    Raises:
        ToolError: a module does not parse.
    """
    digests, found = SourceDigests(folder), []
    for path in sm90_files(folder):
        for function in kernels_of(ast.parse(path.read_text(encoding="utf-8"))):
            if function.name.endswith("_kernel"):
                key = digests.digest(path.stem, function.name)
                found.append(Kernel(folder.name, path.stem, function.name, key))
    return found


def read_records(path: Path) -> dict[str, Record]:
    """Records by key; none where there is no file.

    Raises:
        UsageError: the file is no file of records.
    """
    if not path.is_file():
        return {}
    try:
        return {key: Record.from_json(one) for key, one in json.loads(path.read_text(encoding="utf-8")).items()}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise UsageError(f"{path}: no file of records: {error}") from error


def records_of(folder: Path) -> dict[str, Record]:
    """The records for the packages of a folder: its own, else those inside an installed mlagen or in its checkout."""
    places = (folder / FILE, MLAGEN / "_proofs" / FILE.name, MLAGEN.parent / "generated" / FILE)
    return read_records(next((place for place in places if place.is_file()), places[-1]))


def unrecorded(folders: Iterable[Path], records: Mapping[str, Record]) -> list[Kernel]:
    """The sm90 kernels of packages that have no record for the text that they have."""
    found = []
    for folder in folders:
        with whole(folder) as place:
            found += [kernel for kernel in sm90_kernels(place) if kernel.key not in records]
    return found


def names_of(kernels: Iterable[Kernel]) -> str:
    """Kernels for people: each module once, with its packages."""
    packages: dict[str, list[str]] = {}
    for kernel in kernels:
        packages.setdefault(kernel.module, []).append(kernel.package)
    parts = (f"{module} ({', '.join(dict.fromkeys(names))})" for module, names in sorted(packages.items()))
    return ", ".join(parts)


def add_report(report_path: Path, folder: Path) -> list[str]:
    """Adds a report of random calls to the records of a folder of packages; the keys that it is for.

    Raises:
        UnprovedError: calls of the report were wrong, or it is of another text than that of the folder.
        UsageError: it is no such report, or is counted already.
    """
    raw = report_path.read_bytes()
    try:
        report = json.loads(raw)
        packages: dict[str, Any] = dict(report["packages"])
        about = {name: str(report[name]) for name in ("card", "driver", "torch", "triton", "date", "commit")}
        wrong, delays, cases = int(report["wrong"]), bool(report["delays"]), report.get("cases", {})
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{report_path}: no report of random calls: {error!r}") from error
    if about["card"] == "cpu":
        raise UsageError(f"{report_path}: got calls in the interpreter, takes those of a GPU")
    failed = wrong + sum(int(one["failed"]) for one in cases.values())
    if failed:
        raise UnprovedError(f"{report_path}: {failed} calls or cases are wrong; a record takes a report without any")
    path = folder / FILE
    records, digest = read_records(path), hashlib.sha256(raw).hexdigest()[:16]
    keys = []
    for name, package in packages.items():
        with whole(folder / name) as place:
            _require_same(report_path, folder / name, place, package["files"])
            kernels = sm90_kernels(place)
        for kernel in kernels:
            counts = package["kernels"].get(f"{kernel.module}:{kernel.name}")
            if counts is None:
                continue
            count = int(counts["calls"])
            new = Record(
                kernel.module,
                kernel.name,
                card=about["card"],
                driver=about["driver"],
                torch=about["torch"],
                triton=about["triton"],
                date=about["date"],
                commit=about["commit"],
                cases=int(cases.get(name, {}).get("passed", 0)),
                calls=0 if delays else count,
                delayed_calls=count if delays else 0,
                seconds=float(counts["seconds"]),
                reports=(digest,),
            )
            records[kernel.key] = _together(records.get(kernel.key), new, kernel.key in keys, report_path)
            keys.append(kernel.key)
    present = {kernel.key for one in sorted(folder.iterdir()) for kernel in _kernels_in(one)}
    kept = {key: asdict(record) for key, record in sorted(records.items()) if key in present}
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(f" {json.dumps(key)}: {json.dumps(record)}" for key, record in kept.items())
    path.write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")
    return list(dict.fromkeys(keys))


def _kernels_in(path: Path) -> list[Kernel]:
    """The sm90 kernels of a package's folder or diff; none of another path."""
    with whole(path.with_suffix("") if path.suffix == SUFFIX else path) as place:
        return sm90_kernels(place) if sm90_files(place) else []


def _require_same(report: Path, folder: Path, place: Path, files: Mapping[str, str]) -> None:
    """Raises UnprovedError unless a package's files, which are at a place, are those that a report is of."""
    here = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in place.glob("*.py")}
    others = sorted(name for name in here.keys() | files.keys() if here.get(name) != files.get(name))
    if others:
        raise UnprovedError(f"{report}: is of another text of {folder}: {', '.join(others[:5])}")


def _together(old: Record | None, new: Record, again: bool, report: Path) -> Record:
    """A record with the counts of a report added; `again`: of another package of the same report."""
    if old is None:
        return new
    if not again and set(new.reports) <= set(old.reports):
        raise UsageError(f"{report}: is counted already")
    return replace(
        new,
        cases=old.cases + new.cases,
        calls=old.calls + new.calls,
        delayed_calls=old.delayed_calls + new.delayed_calls,
        seconds=round(old.seconds + new.seconds, 3),
        reports=tuple(dict.fromkeys((*old.reports, *new.reports))),
    )
