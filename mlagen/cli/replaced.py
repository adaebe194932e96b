"""The check that a build does not replace the package of another spec."""

from __future__ import annotations

from pathlib import Path

from mlagen.cli.console import err
from mlagen.cli.packages import said_spec
from mlagen.errors import DriftError
from mlagen.spec import Spec, spec_digest
from mlagen.spec.load import SPECS


def check_replaced(folder: Path, spec: Spec, file: Path, *, force: bool) -> None:
    """Print on stderr the parts of a package's spec that change.

    A package does not name the file of its spec, so a moved file changes nothing. Specs count as different if their
    titles differ. In a folder `specs` only names count, since they are file names.

    Args:
        folder: folder of the package.
        spec: the spec to build.
        file: file of the spec.
        force: also replace the package of another spec.

    Raises:
        DriftError: the folder holds the package of a spec with another title, and `force` is off.
    """
    earlier = said_spec(folder)
    if earlier is None or spec_digest(earlier) == spec_digest(spec):
        return
    if earlier.title != spec.title and file.absolute().parent.name != SPECS and not force:
        raise DriftError(
            f"{folder}: holds the package of '{earlier.title}', not of '{spec.title}', and was not replaced",
            hint="give the spec another name, or replace the package with --force",
        )
    old, new = earlier.model_dump(mode="json"), spec.model_dump(mode="json")
    changed = [part for part in {**old, **new} if old.get(part) != new.get(part)]
    err.print(f"{folder}: replaces a package; changed in its spec: {', '.join(changed)}", markup=False, soft_wrap=True)
