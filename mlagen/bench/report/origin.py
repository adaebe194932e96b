"""The origin of a measurement: the driver, the day, the commit, and the packages of peers."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from mlagen.errors import UsageError

PEER_PACKAGES = ("vllm", "flash_mla", "flashinfer", "deep_gemm", "seed_sparse")
DRIVERS = ("nvidia", "amdgpu")  # kernel modules; Linux names the version of those that are loaded
SYSTEM = Path("/sys/module")
CHECKOUT = Path(__file__).resolve().parents[3]
SECONDS = 20  # that a tool may take
UNKNOWN = "of unknown version"


@dataclass(frozen=True)
class Origin:
    """The origin that all rows of a run share, besides the device and the libraries.

    Attributes:
        driver: version of the GPU's driver.
        date: day the run began, in UTC, as in 2026-12-31.
        commit: of the checkout that measured, with `-dirty` behind it where files differ from it; None where mlagen
            is installed and none was given.
        peers: versions that were given of packages that do not say theirs.
    """

    driver: str | None
    date: str
    commit: str | None
    peers: Mapping[str, str] = field(default_factory=dict)

    def peer_versions(self) -> tuple[str, ...]:
        """The peers' packages that were imported, with their versions."""
        imported = [name for name in PEER_PACKAGES if sys.modules.get(name) is not None]
        return tuple(f"{name} {self.peers.get(name) or _version(name) or UNKNOWN}" for name in imported)

    def complete(self, *, peers: bool) -> Origin:
        """The same, if a report may be saved with it.

        Args:
            peers: peers are measured, so that each that is installed needs a version.

        Raises:
            UsageError: something is missing; names the option that gives it.
        """
        if self.driver is None:
            raise UsageError("no report is saved: the driver's version is not known here")
        if self.commit is None:
            raise UsageError(
                "no report is saved without a commit, and this is no checkout of mlagen; pass --commit COMMIT"
            )
        for name in PEER_PACKAGES if peers else ():
            if name not in self.peers and _installed(name) and _version(name) is None:
                way = f"pass --peer {name}=VERSION"
                raise UsageError(f"no report is saved without the peers' versions: {name} has none; {way}")
        return self


def origin(commit: str | None = None, peers: Sequence[str] = ()) -> Origin:
    """The origin of a run that begins now.

    Args:
        commit: where the checkout does not say it.
        peers: NAME=VERSION of peers' packages that do not say theirs.

    Raises:
        UsageError: a peer is none, or has no version.
    """
    given = dict(each.partition("=")[::2] for each in peers)
    for name, version in given.items():
        if name not in PEER_PACKAGES or not version:
            raise UsageError(f"--peer {name}={version}: takes NAME=VERSION, NAME one of {', '.join(PEER_PACKAGES)}")
    return Origin(driver_version(), datetime.now(UTC).date().isoformat(), commit or checked_out(), given)


def driver_version() -> str | None:
    """Version of the GPU's driver; None if nothing here says."""
    for driver in DRIVERS:
        try:
            return (SYSTEM / driver / "version").read_text(encoding="ascii").strip() or None
        except (OSError, ValueError):
            pass
    said = _said(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"])
    return said.splitlines()[0].strip() if said else None


def checked_out(checkout: Path = CHECKOUT) -> str | None:
    """The commit of a checkout; None if it is none, even where it lies in another one."""
    return _said(
        ["git", "-C", str(checkout), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"],
        GIT_CEILING_DIRECTORIES=str(checkout.parent),
    )


def _installed(package: str) -> bool:
    if package in sys.modules:
        return sys.modules[package] is not None
    return importlib.util.find_spec(package) is not None


def _version(package: str) -> str | None:
    """Version of a package; None if nothing says, or it does not import."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        pass
    try:
        said = getattr(importlib.import_module(package), "__version__", None)
    except Exception:  # any error of someone else's package; its kernels are absent then
        return UNKNOWN
    return said if isinstance(said, str) else None


def _said(command: Sequence[str], **environment: str) -> str | None:
    """Return a tool's output; None if it is not here, fails or prints nothing."""
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
