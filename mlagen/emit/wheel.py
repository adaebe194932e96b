"""A package as a wheel, by the binary distribution format: the same bytes from the same spec, without a build tool."""

from __future__ import annotations

import base64
import email
import hashlib
import io
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from mlagen import GENERATOR, __version__
from mlagen.emit.render import ENGINES, Package, render, render_plugin
from mlagen.emit.replace import write_atomically
from mlagen.errors import UsageError
from mlagen.plan import Plan
from mlagen.plan.tritons import MINORS, TRITONS, minor_text

EPOCH = (1980, 1, 1, 0, 0, 0)  # the oldest time of a zip's entry: no build has one of its own
TAG = "py3-none-any"


def engine_wheel(
    plan: Plan, engine: str, tritons: Sequence[str] = TRITONS, *, archives: Mapping[str, bytes] | None = None
) -> tuple[str, bytes]:
    """File name and bytes of the wheel that plugs a plan's package into an engine, one of ENGINES.

    Its version ends with a hash of the content, such as 0.1.0+g1a2b3c4d, so that pip replaces one of other content.

    Args:
        plan: the plan.
        engine: the engine's name.
        tritons: the versions under which all kernels of the package are known to compile within their limits.
        archives: kernels compiled ahead for the package's folder, by file name.

    Raises:
        UsageError: the engine calls no attention of the spec's kind.
    """
    plugin, package = render_plugin(plan, engine), render(plan, tritons)
    entry_points = f"[{ENGINES[engine].ENTRY_POINTS}]\nmlagen_{package.name} = {plugin.name}:register\n"
    files = {f"{plugin.name}/{file.name}": file.text.encode() for file in plugin.files}
    files |= {f"{plugin.name}/{package.name}/{file.name}": file.text.encode() for file in package.files}
    files |= {f"{plugin.name}/{package.name}/{name}": data for name, data in sorted((archives or {}).items())}
    metadata = _metadata(plan, plugin, ENGINES[engine].SUMMARY)
    version = _version({**files, "METADATA": metadata.encode(), "entry_points.txt": entry_points.encode()})
    stem = f"{plugin.name}-{version}"
    information = {
        "METADATA": metadata.replace("\nSummary: ", f"\nVersion: {version}\nSummary: ", 1),
        "WHEEL": f"Wheel-Version: 1.0\nGenerator: {GENERATOR}\nRoot-Is-Purelib: true\nTag: {TAG}\n",
        "entry_points.txt": entry_points,
    }
    files |= {f"{stem}.dist-info/{name}": text.encode() for name, text in information.items()}
    record = f"{stem}.dist-info/RECORD"
    rows = "".join(f"{name},{_hash(data)},{len(data)}\n" for name, data in files.items())
    files[record] = f"{rows}{record},,\n".encode()
    return f"{stem}-{TAG}.whl", _archive(files)


def write_wheel(name: str, data: bytes, folder: Path) -> Path:
    """Writes a wheel into a folder, whole or not at all, and returns its path; earlier ones of its spec are removed.

    Raises:
        UsageError: the folder holds a wheel of that name of another spec.
    """
    earlier = [path for path in sorted(folder.glob(f"{name.partition('-')[0]}-*.whl")) if path.name != name]
    summary = _summary(io.BytesIO(data))
    for path in earlier:
        found = _summary(path)
        if found != summary:
            what = f"holds {found!r}, not {summary!r}" if found else "is no wheel of mlagen's"
            raise UsageError(f"{path}: {what}; takes another --out, or a spec of another name")
    write_atomically(folder / name, data)
    for path in earlier:
        path.unlink(missing_ok=True)
    return folder / name


def _version(files: Mapping[str, bytes]) -> str:
    """mlagen's version with a hash of a wheel's content as the local part."""
    digest = hashlib.sha256("".join(f"{name} {_hash(data)}\n" for name, data in files.items()).encode()).hexdigest()
    return f"{__version__}{'.' if '+' in __version__ else '+'}g{digest[:8]}"


def _summary(wheel: Path | io.BytesIO) -> str:
    """The summary that a wheel's metadata says, which names its spec's title; empty where there is none."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
            return str(email.message_from_bytes(archive.read(name))["Summary"] or "")
    except (OSError, StopIteration, zipfile.BadZipFile):
        return ""


def _metadata(plan: Plan, plugin: Package, summary: str) -> str:
    """A wheel's metadata but for the version."""
    major, last = MINORS[-1]
    return (
        "Metadata-Version: 2.1\n"
        f"Name: {plugin.name.replace('_', '-')}\n"
        f"Summary: {summary}: {plan.spec.title}\n"
        "Requires-Python: >=3.11\n"
        "Requires-Dist: torch\n"
        f"Requires-Dist: triton>={minor_text(MINORS[0])},<{major}.{last + 1}\n"
    )


def _hash(data: bytes) -> str:
    digest = hashlib.sha256(data).digest()
    return f"sha256={base64.urlsafe_b64encode(digest).rstrip(b'=').decode()}"


def _archive(files: Mapping[str, bytes]) -> bytes:
    written = io.BytesIO()
    with zipfile.ZipFile(written, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            entry = zipfile.ZipInfo(name, EPOCH)
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.create_system, entry.external_attr = 3, 0o100644 << 16  # Unix, a file that all may read
            archive.writestr(entry, data)
    return written.getvalue()
