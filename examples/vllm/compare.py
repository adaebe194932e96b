"""Compares what `engine.py` wrote of vLLM's backend and of a package's: report.md, also printed, and report.json."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

MOST = 0.02  # of log-probabilities, up to the first token that differs; bf16's own noise of the tiny models is 0.005
TIE = 0.05  # by how much vLLM's token may lead the next best where the two part
MODES = ("eager", "graphs")


def compare(ours: dict[str, Any], theirs: dict[str, Any], package: str) -> dict[str, Any]:
    """What of two runs is equal, and how fast they are."""
    equal, differences, leads = 0, [0.0], [0.0]
    for a, b in zip(ours["sequences"], theirs["sequences"], strict=True):
        pairs = zip(a["tokens"], b["tokens"], strict=True)
        same = next((number for number, (x, y) in enumerate(pairs) if x != y), len(a["tokens"]))
        equal += same == len(a["tokens"])
        leads += b["leads"][same : same + 1]
        differences += [abs(x - y) for x, y in zip(a["logprobs"][:same], b["logprobs"][:same], strict=True)]
    used = any(f"mlagen_vllm_{package}." in one for one in ours["backends"])
    return {
        "equal": f"{equal} of {len(ours['sequences'])}",
        "logprob": max(differences),
        "lead": max(leads),
        "decides": theirs["decides"],
        "in use": used and not any("mlagen_vllm" in one for one in theirs["backends"]),
        "rates": {"vllm": theirs["rates"], "mlagen": ours["rates"]},
        "holds": used and max(differences) <= MOST and max(leads) <= TIE,
    }


def table(found: dict[str, dict[str, Any]]) -> list[str]:
    """The lines of a Markdown table."""
    lines = [
        "| run | plugin in use | sequences equal | largest difference of a log-probability | lead where tokens part |"
        " context decides | decode tokens/s, vLLM | mlagen | prefill tokens/s, vLLM | mlagen | holds |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, one in found.items():
        rates = [f"{one['rates'][who][what]:,.0f}" for what in ("decode", "prefill") for who in ("vllm", "mlagen")]
        cells = [name, "yes" if one["in use"] else "no", one["equal"], f"{one['logprob']:.4f}", f"{one['lead']:.4f}"]
        lines.append("| " + " | ".join([*cells, one["decides"], *rates, "yes" if one["holds"] else "no"]) + " |")
    return lines


def main(folder: Path, kinds: list[str]) -> int:
    """Writes and prints the report; 1 if a run is missing or does not hold."""
    from engine import KINDS

    runs = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*-*-*.json"))}
    found, missing = {}, []
    for kind in kinds:
        for mode in MODES:
            ours, theirs = (runs.get(f"{kind}-{mode}-{who}") for who in ("mlagen", "vllm"))
            if ours and theirs:
                found[f"{kind}, {mode}"] = compare(ours, theirs, KINDS[kind][0])
            elif list(folder.glob(f"{kind}-{mode}-*.log")):
                missing.append(f"{kind}, {mode}")
    head = ["# Tiny models in vLLM", ""]
    if runs:
        one = next(iter(runs.values()))
        versions = ", ".join(f"{name} {version}" for name, version in one["versions"].items())
        slowest = max(run["ready"] for run in runs.values())
        head += [f"{one['device']}; {versions}; {one['heads']} heads; ready within {slowest:.0f} s", ""]
    text = "\n".join([*head, *table(found), *(f"\nFailed: {name}" for name in missing)]) + "\n"
    (folder / "report.md").write_text(text, encoding="utf-8")
    (folder / "report.json").write_text(json.dumps({"runs": runs, "compared": found, "failed": missing}), "utf-8")
    print(text)
    return int(not found or bool(missing) or not all(one["holds"] for one in found.values()))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
