"""Packages broken on purpose: each mutant has to be reported."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def check_mutants(script: str, *arguments: str | Path, more_than: int) -> None:
    """Runs a script of this folder. Its JSON says how many cases of each mutant failed; null: no text to break."""
    command = [sys.executable, str(Path(__file__).with_name(script)), *map(str, arguments)]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert len(found) > more_than, f"only {len(found)} mutants"
    unmatched = [mutant for mutant, failed in found.items() if failed is None]
    assert not unmatched, f"patterns that no longer match: {unmatched}"
    passed = [mutant for mutant, failed in found.items() if not failed]
    assert not passed, f"mutants that passed: {passed}"
