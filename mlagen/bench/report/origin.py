"""Where and with what a run was measured: the driver, the day, the commit, and the packages of peers."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

PEER_PACKAGES = ("vllm", "flash_mla", "flashinfer", "seed_sparse")
DRIVERS = ("nvidia", "amdgpu")  # kernel modules; Linux names the version of those that are loaded
SYSTEM = Path("/sys/module")
CHECKOUT = Path(__file__).resolve().parents[3]
SECONDS = 20  # that a tool may take


@dataclass(frozen=True)
class Origin:
    """What the rows of a run share beside the device and the libraries.

    Attributes:
        driver: version of the GPU's driver.
        date: day the run began, in UTC, as in 2026-12-31.
        commit: of the checkout that measured, with `-dirty` behind it where files differ from it; None where mlagen
            is installed.
    """

    driver: str | None
    date: str
    commit: str | None


def origin() -> Origin:
    """The origin of a run that begins now."""
    return Origin(driver_version(), datetime.now(UTC).date().isoformat(), commit())


def driver_version() -> str | None:
    """Version of the GPU's driver; None if nothing here says."""
    for driver in DRIVERS:
        try:
            return (SYSTEM / driver / "version").read_text(encoding="ascii").strip() or None
        except (OSError, ValueError):
            pass
    said = _said(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"])
    return said.splitlines()[0].strip() if said else None


def commit(checkout: Path = CHECKOUT) -> str | None:
    """The commit of a checkout; None if it is none, even where it lies in another one."""
    return _said(
        ["git", "-C", str(checkout), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"],
        GIT_CEILING_DIRECTORIES=str(checkout.parent),
    )


def peer_versions() -> tuple[str, ...]:
    """The peers' packages that were imported, with their versions."""
    return tuple(f"{name} {_version(name)}" for name in PEER_PACKAGES if sys.modules.get(name) is not None)


def _version(package: str) -> str:
    said = getattr(sys.modules[package], "__version__", None)
    if isinstance(said, str):
        return said
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "of unknown version"


def _said(command: Sequence[str], **environment: str) -> str | None:
    """What a tool prints; None if it is not here, fails or prints nothing."""
    try:
        done = subprocess.run(
            command,
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=True,
        )
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
    return done.stdout.strip() or None
