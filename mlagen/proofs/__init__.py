"""Proofs by content: results of compilation and of verification that a build finds instead of computing them."""

from mlagen.proofs.cases import keep, proof_of, proved_before, totals
from mlagen.proofs.folder import NAME, Proofs, carry_over, shipped_dir
from mlagen.proofs.rows import CasesRow, CompileRow, Figures
from mlagen.proofs.sources import package_key, rendered_key

__all__ = [
    "NAME",
    "CasesRow",
    "CompileRow",
    "Figures",
    "Proofs",
    "carry_over",
    "keep",
    "package_key",
    "proof_of",
    "proved_before",
    "rendered_key",
    "shipped_dir",
    "totals",
]
