"""Compares what `engine.py` wrote of vLLM's backend and of a package's: report.md, also printed, and report.json.

`compare.py FOLDER KIND... [--modes MODE...]`.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

STEP = 2.0**-10  # of a bf16 logit of these models, whose largest are 0.125 to 0.25: they part in such steps
MOST = 4 * STEP  # of log-probabilities up to the first token that differs, and of vLLM's token's lead there
APART = 0.02  # of a head's output by its largest column, from the same inputs; bf16 rounds by 0.004

Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Parted:
    """How two lists of sequences differ: how many are equal, and the largest differences."""

    equal: int
    of: int
    logprob: float
    lead: float

    def within(self) -> bool:
        """Whether they part by no more than bf16 does."""
        return self.of > 0 and max(self.logprob, self.lead) <= MOST

    def __str__(self) -> str:
        return f"{self.equal} of {self.of}"


def parted(ours: Rows, theirs: Rows) -> Parted:
    """Where sequences part; leads are those of `theirs`."""
    equal, differences, leads = 0, [0.0], [0.0]
    for a, b in zip(ours, theirs, strict=True):
        pairs = zip(a["tokens"], b["tokens"], strict=True)
        same = next((number for number, (x, y) in enumerate(pairs) if x != y), len(a["tokens"]))
        equal += same == len(a["tokens"])
        leads += b["leads"][same : same + 1]
        differences += [abs(x - y) for x, y in zip(a["logprobs"][:same], b["logprobs"][:same], strict=True)]
    return Parted(equal, len(ours), max(differences), max(leads))


def bit_equal(one: dict[str, Any]) -> tuple[int, int]:
    """How many of the requests alone have the tokens and the log-probabilities that they have in the batch."""
    pairs = zip(one["alone"], one["sequences"][::2], strict=True)
    same = [a["tokens"] == b["tokens"] and a["logprobs"] == b["logprobs"] for a, b in pairs]
    return sum(same), len(same)


def seen(mode: str, one: dict[str, Any]) -> tuple[str, bool]:
    """What a load saw beside its sequences, in words, and whether that is what it is there for."""
    if mode in ("mixed", "pieces"):
        return f"{one['shared']} of {one['steps']} steps decode while prompts wait or are in chunks", one["shared"] > 0
    if mode == "prefix":
        got, wanted = (sum(pair[place] for pair in one["cached"]) for place in (0, 1))
        return f"{got} of {wanted} shared tokens from the cache", all(a == b for a, b in one["cached"])
    if mode == "speculative":
        return f"{one['accepted']} drafts accepted in {one['steps']} steps", one["accepted"] > 0
    if mode == "load":
        alone = parted(one["sequences"], one["alone"])
        words = f"{one['aborted']} of {one['requests']} aborted; {alone} as alone, {one['rate']:,.0f} tokens/s"
        return words, alone.within() and one["aborted"] > 0
    if mode == "invariant":
        same, of = bit_equal(one)
        return f"{same} of {of} bit-equal alone and in a batch of {len(one['sequences'])}", same == of
    words, holds = f"context decides {one['decides']}", True
    if mode == "graphs" and one.get("steps") is not None:
        full = one["steps"].get("FULL", 0)
        words += f"; {full} of {sum(one['steps'].values())} steps by a graph"
        holds = full > 0
    if "apart" in one:
        apart = one["apart"]
        worst = max(apart, key=lambda name: apart[name][0])
        mean = (sum(each[1] for each in apart.values()) / sum(each[2] for each in apart.values())) ** 0.5
        words += (
            f"; attention on the same inputs apart by {apart[worst][0]:.4f} at most ({worst}), {mean:.4f} on average"
        )
        holds = holds and apart[worst][0] <= APART
    return words, holds


def called(run: dict[str, Any], kind: str) -> tuple[list[str], bool]:
    """What a run's layers called, in words, and whether that is what its kind and its engine say.

    A package takes the query in its two parts, as vLLM has it, but for V4's, which is one, and where ranks share a
    context: there vLLM puts them together. V4's layers project attention's output by `v4.py`.
    """
    calls = run.get("calls", {})
    if kind == "v4":
        projected, captured = calls.get("projected", [0, 0])
        return [f"output projected in float32 {projected:,} times, {captured} into graphs"], projected > 0
    if run["who"] == "vllm":
        return [], True
    (pairs, captured), (others, _) = (calls.get(name, [0, 0]) for name in ("pair", "whole"))
    words = [f"q in two parts in {pairs:,} of {pairs + others:,} calls, {captured} into graphs"]
    if "merged" in calls:
        merged, captured = calls["merged"]
        words.append(f"picks of ranks merged by the package {merged:,} times, {captured} into graphs")
    return words, (others > 0 if run["dcp"] > 1 else pairs > 0 and others == 0)


def whole(one: dict[str, Any] | None) -> bool:
    """Whether a load was done to its end."""
    return one is not None and "sequences" in one and "failed" not in one


def compare(mode: str, ours: dict[str, Any], theirs: dict[str, Any], kind: str) -> dict[str, Any]:
    """What of two runs of a mode is equal, and how fast they are; vLLM's may have refused."""
    from plan import KINDS

    a, b = ours["modes"][mode], theirs["modes"][mode]
    used = any(f"mlagen_vllm_{KINDS[kind][0]}." in one for one in ours["backends"])
    words, holds = seen(mode, a)
    more, right = called(ours, kind)
    found: dict[str, Any] = {"equal": "–", "rates": {}, "seen": "; ".join([words, *more])}
    if whole(b):
        both = parted(a["sequences"], b["sequences"])
        found |= {"equal": str(both), "logprob": both.logprob, "lead": both.lead}
        other, same = seen(mode, b)
        their, right_too = called(theirs, kind)
        different = [one for one in (other, *their) if one not in (words, *more)]
        found["seen"] += f"; vLLM's: {'; '.join(different)}" if different else ""
        same = same or mode in ("load", "invariant")  # theirs need not hold all
        holds = holds and right_too and both.within() and same
        used = used and not any("mlagen_vllm" in one for one in theirs["backends"])
    else:
        found["seen"] += f"; vLLM's own backend: {b['failed'].splitlines()[0][:160]}"
    if "rates" in a and "rates" in b:
        found["rates"] = {"vllm": b["rates"], "mlagen": a["rates"]}
    indexes = used and "mlagen_vllm" in (ours.get("indexer") or "")
    in_use = "with its indexer" if indexes else "yes" if used else "no"
    return found | {"in use": in_use, "holds": used and right and holds}


def table(found: dict[str, dict[str, Any]]) -> list[str]:
    """The lines of a Markdown table."""
    lines = [
        "| run | plugin in use | sequences equal | largest difference of a log-probability | lead where tokens part |"
        " decode tokens/s, vLLM | mlagen | prefill tokens/s, vLLM | mlagen | seen | holds |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, one in found.items():
        numbers = [f"{one[what]:.4f}" if what in one else "–" for what in ("logprob", "lead")]
        rates = [
            f"{one['rates'][who][what]:,.0f}" if one["rates"] else "–"
            for what in ("decode", "prefill")
            for who in ("vllm", "mlagen")
        ]
        cells = [name, one["in use"], one["equal"], *numbers, *rates, one["seen"]]
        lines.append("| " + " | ".join([*cells, "yes" if one["holds"] else "no"]).replace("\n", " ") + " |")
    return lines


def failure(mode: str, runs: dict[str, dict[str, Any] | None]) -> str | None:
    """What kept a mode from being compared, or None: a run that wrote nothing, or the part that failed."""
    from plan import MAY_REFUSE

    for who, run in runs.items():
        one = (run or {"modes": {}})["modes"].get(mode)
        if one is None:
            return f"{who}: no result"
        if not whole(one) and not (who == "vllm" and mode in MAY_REFUSE and "failed" in one):
            return f"{who}: {one.get('failed', 'stopped before its end')}"
    return None


def results(folder: Path, kinds: list[str], modes: list[str]) -> tuple[dict[str, Any], dict[str, str], dict[str, Any]]:
    """The modes that both ran, those that failed with the reason, and all that was written."""
    from plan import MODES

    runs = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*-*-*.json"))}
    found, failed = {}, {}
    for kind in kinds:
        for mode in (one for one in MODES if one in modes):
            of = {who: runs.get(f"{kind}-{MODES[mode]}-{who}") for who in ("vllm", "mlagen")}
            reason = failure(mode, of)
            if reason is not None:
                failed[f"{kind}, {mode}"] = reason.splitlines()[0]
                continue
            try:
                found[f"{kind}, {mode}"] = compare(mode, of["mlagen"], of["vllm"], kind)
            except (KeyError, ValueError) as error:  # a run of fewer sequences than the other's, say
                failed[f"{kind}, {mode}"] = f"comparison: {type(error).__name__}: {error}"
    return found, failed, runs


def sharing(runs: list[dict[str, Any]]) -> str:
    """How many parts of a context ranks share, in words, and with which backends they do not."""
    parts = max(run["dcp"] for run in runs)
    if parts == 1:
        return ""
    alone = {f"{run['kind']} by {run['who']}" for run in runs if run["dcp"] == 1}
    return f" that share {parts} parts of a context" + (f", but not in {', '.join(sorted(alone))}" if alone else "")


def main(folder: Path, kinds: list[str], modes: list[str]) -> int:
    """Writes and prints the report; 1 if a run failed or does not hold."""
    found, failed, runs = results(folder, kinds, modes)
    head = ["# Tiny models in vLLM", ""]
    ready = [run for run in runs.values() if "ready" in run]
    if ready:
        one = ready[0]
        versions = ", ".join(f"{name} {version}" for name, version in one["versions"].items())
        ranks = f", {one['tp']} ranks" if one["tp"] > 1 else ""
        ranks += sharing(ready)
        slowest = max(run["ready"] for run in ready)
        head += [f"{one['device']}; {versions}; {one['heads']} heads{ranks}; ready within {slowest:.0f} s", ""]
    text = "\n".join([*head, *table(found), *(f"\nFailed: {name}: {why}" for name, why in failed.items())]) + "\n"
    (folder / "report.md").write_text(text, encoding="utf-8")
    (folder / "report.json").write_text(json.dumps({"runs": runs, "compared": found, "failed": failed}), "utf-8")
    print(text)
    return int(not found or bool(failed) or not all(one["holds"] for one in found.values()))


if __name__ == "__main__":
    from plan import KINDS, MODES

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("kinds", nargs="+", choices=KINDS)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    asked = parser.parse_args()
    sys.exit(main(asked.folder, asked.kinds, asked.modes))
