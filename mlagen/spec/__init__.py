"""The validated spec."""

from mlagen.spec.epilogues import QUANT_BLOCK, OutQuant
from mlagen.spec.gpus import name_instead
from mlagen.spec.indexer import Indexer
from mlagen.spec.load import json_schema, load, spec_digest
from mlagen.spec.models import DenseAttention, Presence, SparseAttention, Spec
from mlagen.spec.needs import NEEDS
from mlagen.spec.targets import runs

__all__ = [
    "NEEDS",
    "QUANT_BLOCK",
    "DenseAttention",
    "Indexer",
    "OutQuant",
    "Presence",
    "SparseAttention",
    "Spec",
    "json_schema",
    "load",
    "name_instead",
    "runs",
    "spec_digest",
]
