"""Verifies generated kernels against plain torch: on a GPU, or in Triton's interpreter on a CPU."""

from mlagen.verify.call.results import CaseResult, Figure
from mlagen.verify.pool import verify_package
from mlagen.verify.report import mismatches, verify_markdown, verify_table

__all__ = [
    "CaseResult",
    "Figure",
    "mismatches",
    "verify_markdown",
    "verify_package",
    "verify_table",
]
