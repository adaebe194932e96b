"""Builds and calls solutions with flashinfer-bench, in Triton's interpreter; prints how far each is off as JSON.

    python flashinfer_bench_calls.py CACHE DATA_SET...

Every DATA_SET is a folder that `write_trace_set` wrote. CACHE takes the sources that flashinfer-bench unpacks.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"
os.environ["FIB_CACHE_PATH"] = sys.argv[1]

import numpy as np
import torch
from flashinfer_bench.bench.evaluators.utils import allocate_outputs, normalize_result
from flashinfer_bench.bench.utils import gen_inputs, load_safetensors
from flashinfer_bench.compile import BuilderRegistry, Runnable
from flashinfer_bench.data import Definition, TraceSet

from mlagen.verify import interpreter


def build(definition: Definition, data: TraceSet) -> Runnable:
    """The only solution; its package plans as for an A100."""
    (solution,) = data.solutions[definition.name]
    found = BuilderRegistry.get_instance().build(definition, solution)
    main = sys.modules[found.metadata.misc["module_name"]]
    name = solution.name.removeprefix("mlagen_").removesuffix(f"_{definition.name}")
    package = getattr(main, name)
    facts = package._launch.facts_of("sm80")
    package._launch.device_facts = lambda device: facts
    return found


def with_edges(inputs: dict) -> dict:
    """The inputs with one request or token that sees nothing, and with both caches in one tensor."""
    changed = {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in inputs.items()}
    for name in ("kv_indptr", "seq_lens", "sparse_indices"):
        if name in changed and name == "kv_indptr":
            changed[name][1] = 0  # the next request has the keys of the first one too
        elif name in changed:
            changed[name][0] = 0 if name == "seq_lens" else -1
    if "ckv_cache" in changed:
        columns = changed["ckv_cache"].shape[-1]
        pool = torch.cat((changed["ckv_cache"], changed["kpe_cache"]), dim=-1)
        changed["ckv_cache"], changed["kpe_cache"] = pool[..., :columns], pool[..., columns:]
    return changed


def with_repeated_rows(inputs: dict) -> dict:
    """Inputs of sparse attention with fewer rows in the cache than indices, so that rows repeat."""
    page_size = inputs["ckv_cache"].shape[1]
    indices = inputs["sparse_indices"]
    caches = {name: inputs[name][: 2048 // page_size] for name in ("ckv_cache", "kpe_cache")}
    return {**inputs, **caches, "sparse_indices": torch.where(indices >= 0, indices % 2048, -1)}


def errors(definition: Definition, solution: Runnable, reference: Runnable, inputs: dict) -> dict[str, float]:
    """The largest error of each output; of indices, how many rows name other keys than the reference."""
    found = allocate_outputs(definition, list(inputs.values()), "cpu")
    solution(*inputs.values(), *found)
    wanted = normalize_result(definition, reference(*inputs.values()), "cpu")
    off = {}
    for name, ours, theirs in zip(definition.outputs, found, wanted, strict=True):
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
        if ours.dtype is torch.int32:
            off[name] = float((ours.sort().values != theirs.sort().values).any(-1).sum())
        else:
            off[name] = torch.where(ours == theirs, 0, (ours.double() - theirs.double()).abs()).max().item()
    return off


def calls(root: Path) -> Iterator[dict]:
    data = TraceSet.from_path(str(root))
    for name, definition in data.definitions.items():
        solution, reference = build(definition, data), BuilderRegistry.get_instance().build_reference(definition)
        workload = data.workloads[name][0].workload
        given = gen_inputs(definition, workload, "cpu", load_safetensors(definition, workload, root))
        assert definition.get_axes_values_from_inputs(given) == workload.axes
        inputs = dict(zip(definition.inputs, given, strict=True))
        cases = {"workload": inputs, "edges": with_edges(inputs)}
        if "sparse_indices" in inputs:
            cases["few rows"] = with_repeated_rows(inputs)
        for case, called in cases.items():
            yield {"definition": name, "case": case, "errors": errors(definition, solution, reference, called)}


if __name__ == "__main__":
    interpreter.install()
    torch.manual_seed(1)
    torch.use_deterministic_algorithms(True)  # memory that nothing wrote holds NaN
    with np.errstate(divide="ignore", invalid="ignore"):
        print(json.dumps([call for root in sys.argv[2:] for call in calls(Path(root))]))
