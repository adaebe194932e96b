"""A package as a data set of FlashInfer-Bench: definitions, one solution for each, and workloads.

The schema is that of flashinfer-bench 0.1.2 (`flashinfer_bench.data`); the folders are those that its `TraceSet` reads.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mlagen.backends import GeneratedFile
from mlagen.backends.engines.flashinfer_bench import ENTRY, Definition, adapter, definitions_of, target_hardware
from mlagen.emit.render import Package, bodies, render
from mlagen.emit.replace import write_atomically
from mlagen.emit.workloads import safetensors, workloads_of
from mlagen.plan import Plan
from mlagen.plan.tritons import MINORS, TRITONS, minor_text

AUTHOR = "mlagen"
FOLDERS = ("definitions", "solutions", "workloads", "blob")


def trace_set(plan: Plan, tritons: Sequence[str] = TRITONS) -> dict[str, bytes]:
    """The files of the data set by their path. Pure: the same arguments and templates give the same bytes.

    Args:
        plan: the plan.
        tritons: the versions under which all kernels of the package are known to compile within their limits.

    Raises:
        UsageError: the package serves no definition.
    """
    served = definitions_of(plan)
    package = render(plan, tritons)
    files: dict[str, bytes] = {}
    for one in served:
        place = f"{one.form.op_type}/{one.name}"
        definition = {**one.document, "reference": _text(one.reference)}
        files[f"definitions/{place}.json"] = _json(definition)
        solution = _solution(plan, package, one)
        files[f"solutions/{AUTHOR}/{place}/{solution['name']}.json"] = _json(solution)
        lines = []
        for workload in workloads_of(one):
            blob = f"blob/workloads/{place}/{one.name}_{workload.uuid}.safetensors"
            files[blob] = safetensors(workload.tensors)
            document = workload.document(one, _scale(plan), blob)
            lines.append({"definition": one.name, "workload": document, "solution": None, "evaluation": None})
        files[f"workloads/{place}.jsonl"] = "".join(f"{json.dumps(line)}\n" for line in lines).encode()
    return files


def write_trace_set(files: Mapping[str, bytes], folder: Path) -> None:
    """Writes a data set into a folder. It replaces FOLDERS there; others, such as `traces` with results, are kept.

    Raises:
        OSError: a file cannot be written; names the path.
    """
    for name in FOLDERS:
        if (folder / name).is_dir():
            shutil.rmtree(folder / name)
    for path, data in files.items():
        write_atomically(folder / path, data)


def _solution(plan: Plan, package: Package, definition: Definition) -> dict[str, Any]:
    """The solution in the schema's fields: the package's files, and an adapter that is the entry point."""
    major, last = MINORS[-1]
    sources = [{"path": ENTRY, "content": _text(adapter(plan, definition))}]
    sources += [{"path": f"{package.name}/{file.name}", "content": file.text} for file in package.files]
    return {
        "name": f"mlagen_{plan.spec.name}_{definition.name}",
        "definition": definition.name,
        "author": AUTHOR,
        "description": f"Kernels that mlagen generated from the spec {plan.spec.name}: {plan.spec.title}.",
        "spec": {
            "language": "triton",
            "target_hardware": target_hardware(plan.spec.targets),
            "entry_point": f"{ENTRY}::run",
            "dependencies": ["torch", f"triton>={minor_text(MINORS[0])},<{major}.{last + 1}"],
            "destination_passing_style": True,
        },
        "sources": sources,
    }


def _scale(plan: Plan) -> float:
    """The softmax scale of the spec; its wrappers take it for None."""
    heads, attention = plan.spec.multi_head, plan.spec.attention
    stated = (heads and heads.softmax_scale) or (attention and attention.softmax_scale)
    columns = heads.qk_head_dim if heads else plan.d_qk
    return float(stated or columns**-0.5 if columns else 1.0)


def _text(file: GeneratedFile) -> str:
    ((_, text, _),) = bodies([file])
    return text


def _json(document: dict[str, Any]) -> bytes:
    return f"{json.dumps(document, indent=2)}\n".encode()
