"""A package as a wheel, by the binary distribution format: the same bytes from the same spec, without a build tool."""

from __future__ import annotations

import base64
import hashlib
import io
import zipfile
from collections.abc import Sequence
from pathlib import Path

from mlagen import GENERATOR, __version__
from mlagen.emit.render import ENGINES, Package, render, render_plugin
from mlagen.emit.replace import write_atomically
from mlagen.plan import Plan
from mlagen.plan.tritons import MINORS, TRITONS, minor_text

EPOCH = (1980, 1, 1, 0, 0, 0)  # the oldest time of a zip's entry: no build has one of its own
TAG = "py3-none-any"


def engine_wheel(plan: Plan, engine: str, tritons: Sequence[str] = TRITONS) -> tuple[str, bytes]:
    """File name and bytes of the wheel that plugs a plan's package into an engine, one of ENGINES.

    Args:
        plan: the plan.
        engine: the engine's name.
        tritons: the versions under which all kernels of the package are known to compile within their limits.

    Raises:
        UsageError: the engine calls no attention of the spec's kind.
    """
    plugin, package = render_plugin(plan, engine), render(plan, tritons)
    stem = f"{plugin.name}-{__version__}"
    information = {
        "METADATA": _metadata(plan, plugin, ENGINES[engine].SUMMARY),
        "WHEEL": f"Wheel-Version: 1.0\nGenerator: {GENERATOR}\nRoot-Is-Purelib: true\nTag: {TAG}\n",
        "entry_points.txt": f"[{ENGINES[engine].ENTRY_POINTS}]\nmlagen_{package.name} = {plugin.name}:register\n",
    }
    texts = {f"{plugin.name}/{file.name}": file.text for file in plugin.files}
    texts |= {f"{plugin.name}/{package.name}/{file.name}": file.text for file in package.files}
    texts |= {f"{stem}.dist-info/{name}": text for name, text in information.items()}
    record = f"{stem}.dist-info/RECORD"
    texts[record] = "".join(f"{name},{_hash(text)},{len(text.encode())}\n" for name, text in texts.items())
    texts[record] += f"{record},,\n"
    return f"{stem}-{TAG}.whl", _archive(texts)


def write_wheel(name: str, data: bytes, folder: Path) -> Path:
    """Writes a wheel into a folder, whole or not at all, and returns its path."""
    write_atomically(folder / name, data)
    return folder / name


def _metadata(plan: Plan, plugin: Package, summary: str) -> str:
    major, last = MINORS[-1]
    return (
        "Metadata-Version: 2.1\n"
        f"Name: {plugin.name.replace('_', '-')}\n"
        f"Version: {__version__}\n"
        f"Summary: {summary}: {plan.spec.title}\n"
        "Requires-Python: >=3.11\n"
        "Requires-Dist: torch\n"
        f"Requires-Dist: triton>={minor_text(MINORS[0])},<{major}.{last + 1}\n"
    )


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"sha256={base64.urlsafe_b64encode(digest).rstrip(b'=').decode()}"


def _archive(texts: dict[str, str]) -> bytes:
    written = io.BytesIO()
    with zipfile.ZipFile(written, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in texts.items():
            entry = zipfile.ZipInfo(name, EPOCH)
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.create_system, entry.external_attr = 3, 0o100644 << 16  # Unix, a file that all may read
            archive.writestr(entry, text.encode())
    return written.getvalue()
