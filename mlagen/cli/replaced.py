"""Whether a build would replace the package of another spec."""

from __future__ import annotations

from pathlib import Path

from mlagen.cli.console import err
from mlagen.cli.packages import said_spec
from mlagen.errors import DriftError
from mlagen.spec import Spec, spec_digest
from mlagen.spec.load import SPECS


def check_replaced(folder: Path, spec: Spec, file: Path, *, force: bool) -> None:
    """Says on stderr which parts of a package's spec change.

    A package does not say which file its spec was read from, so that it is the same bytes from any place: a moved file
    changes nothing. Specs are told apart by their titles, and in a folder `specs` by their names, which are their
    files'.

    Args:
        folder: the package's.
        spec: the spec that is built.
        file: where it was read from.
        force: also replace the package of another spec.

    Raises:
        DriftError: the folder holds the package of a spec with another title, and `force` is off.
    """
    earlier = said_spec(folder)
    if earlier is None or spec_digest(earlier) == spec_digest(spec):
        return
    if earlier.title != spec.title and file.absolute().parent.name != SPECS and not force:
        raise DriftError(
            f"{folder}: is the package of '{earlier.title}', not of '{spec.title}', and not replaced",
            hint="give the spec another name, or replace the package with --force",
        )
    old, new = earlier.model_dump(mode="json"), spec.model_dump(mode="json")
    changed = [part for part in {**old, **new} if old.get(part) != new.get(part)]
    err.print(f"{folder}: replaces the package of a spec with other {', '.join(changed)}", markup=False, soft_wrap=True)
