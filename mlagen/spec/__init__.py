"""The spec: what the user says, validated."""

from mlagen.spec.load import json_schema, load, spec_digest
from mlagen.spec.models import Spec

__all__ = ["Spec", "json_schema", "load", "spec_digest"]
