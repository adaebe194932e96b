"""The spec: what the user says, validated."""

from mlagen.spec.load import json_schema, load, spec_digest
from mlagen.spec.models import NEEDS, DenseAttention, Presence, SparseAttention, Spec

__all__ = ["NEEDS", "DenseAttention", "Presence", "SparseAttention", "Spec", "json_schema", "load", "spec_digest"]
