"""Reads the plan's own data files: YAML that a model checks, with file:line:column of every error."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from mlagen.errors import Place, SpecError
from mlagen.spec.base import Model
from mlagen.spec.load import lies_within, place_of, read_text
from mlagen.spec.marked import Document, Loc, read, refuse
from mlagen.spec.prose import Guide

Checked = TypeVar("Checked", bound=Model)


def read_checked(path: Path, model: type[Checked]) -> tuple[Checked, Document]:
    """A file's data as `model` has it, and where each value stands.

    Raises:
        SpecErrors: the file is invalid: all its errors, each with its line and column.
    """
    return _check(read_text(path), path, model)


@functools.cache
def _check(text: str, path: Path, model: type[Checked]) -> tuple[Checked, Document]:
    document = read(text, path)
    checked, findings = None, []
    try:
        checked = model.model_validate(document.data)
    except ValidationError as error:
        guide = Guide(model.model_json_schema(), document.data, document.plain)
        findings = guide.findings(error.errors(include_url=False))
    errors = list(document.errors)
    for finding in findings:
        if not lies_within(finding.loc, document.unread):
            mark = place_of(finding, document)
            errors.append(SpecError(str(finding), place=Place(path, mark.line, mark.column)))
    if checked is None or errors:
        raise refuse(errors)
    return checked, document


def place_at(path: Path, document: Document, *loc: str | int) -> Place:
    """Where a value of a file stands."""
    where: Loc = loc
    mark = document.values[where]
    return Place(path, mark.line, mark.column)
