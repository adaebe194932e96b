"""A package as a repository of Hugging Face's `kernels`: its name, its build variants, the context of its templates."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mlagen import GENERATOR
from mlagen.backends.parts.base import GeneratedFile
from mlagen.backends.parts.common import TORCH_DTYPES
from mlagen.errors import UsageError
from mlagen.plan import Plan
from mlagen.plan.targets import TARGETS, Target
from mlagen.plan.tritons import MINORS, minor_text
from mlagen.spec import DenseAttention

LICENSE = "Apache-2.0"  # of mlagen, and of the text that it generates
OWNER = "ORG"  # in the place of a name that the user did not give
BLOCK_SIZE = 64  # tokens a page in benchmarks, where the spec leaves it open

_REPO = re.compile(r"(?P<owner>[A-Za-z0-9][\w.-]*)/(?P<name>[a-z][-a-z0-9]*[a-z0-9])(?:@v(?P<version>\d{1,9}))?")


@dataclass(frozen=True)
class Repo:
    """A place on the Hub.

    Attributes:
        owner: the user or organisation.
        name: the kernel's name.
        version: the version of its API, which the branch `v<version>` holds. 0: the API may still change.
    """

    owner: str
    name: str
    version: int

    @property
    def id(self) -> str:
        """Name of the repository, `owner/name`."""
        return f"{self.owner}/{self.name}"

    @property
    def module(self) -> str:
        """The kernel's name as Python has it."""
        return self.name.replace("-", "_")


@dataclass(frozen=True)
class Variant:
    """A build variant: the folder that `kernels` chooses for a backend of torch.

    Attributes:
        backend: `cuda` or `rocm`.
        targets: the spec's targets for it.
        archs: their names in metadata, `9.0` or `gfx942`.
    """

    backend: str
    targets: tuple[str, ...]
    archs: tuple[str, ...]

    @property
    def name(self) -> str:
        """The folder's name."""
        return f"torch-{self.backend}"


def repo_of(plan: Plan, text: str | None) -> Repo:
    """The repository that a text names, as `ORG/NAME` or `ORG/NAME@vN`; without a text one named for the spec.

    Raises:
        UsageError: the text has another form.
    """
    if text is None:
        return Repo(OWNER, f"mlagen-{plan.spec.name.replace('_', '-')}".rstrip("-"), 0)
    found = _REPO.fullmatch(text)
    if found is None:
        name = "lower-case letters, digits and dashes that begin with a letter and end with no dash"
        raise UsageError(f"--repo: got {text!r}, takes ORG/NAME or ORG/NAME@vN, NAME of {name}")
    return Repo(found["owner"], found["name"], int(found["version"] or 0))


def variants_of(plan: Plan) -> tuple[Variant, ...]:
    """The build variants of a plan's targets."""
    found = []
    for backend, of in (("cuda", "cuda"), ("rocm", "hip")):
        targets = [TARGETS[name] for name in plan.spec.targets if TARGETS[name].backend == of]
        if targets:
            found.append(Variant(backend, tuple(one.name for one in targets), tuple(map(_arch, targets))))
    return tuple(found)


def card_file(
    plan: Plan, repo: Repo, functions: Sequence[str], tritons: Sequence[str], *, verified: bool
) -> GeneratedFile:
    """The card of a repository.

    Args:
        plan: the plan.
        repo: where the kernel is published.
        functions: names that the package exports.
        tritons: the versions of Triton under which all kernels compile within their limits.
        verified: cases of every family passed.
    """
    spec = plan.spec
    context = {
        "title": spec.title,
        "spec": spec.name,
        "generator": GENERATOR,
        "license": LICENSE.lower(),
        "repo": repo,
        "example": spec.wrappers[0],
        "functions": functions,
        "facts": _facts(plan),
        "variants": variants_of(plan),
        "minors": [minor_text(MINORS[0]), minor_text(MINORS[-1])],
        "tritons": tritons,
        "verified": verified,
        "has_benchmark": benchmark_file(plan, repo) is not None,
        "has_ops": plan.ops is not None,
    }
    return GeneratedFile("CARD.md", "hub/CARD.md.jinja", context)


def alias_file(repo: Repo, identity: str) -> GeneratedFile:
    """The module of the kernel's own name, which older versions of `kernels` load."""
    return GeneratedFile(f"{repo.module}/__init__.py", "hub/alias.py.jinja", {"id": identity})


def benchmark_file(plan: Plan, repo: Repo) -> GeneratedFile | None:
    """The benchmark of a package's attention; None where it has none that plain torch can prepare."""
    spec = plan.spec
    found = _benchmark(plan)
    if found is None:
        return None
    template, context = found
    common = {"repo": repo, "title": spec.title, "dtype": TORCH_DTYPES[spec.model.dtype], "heads": spec.model.num_heads}
    return GeneratedFile("benchmark.py", f"hub/{template}.py.jinja", common | context)


def _arch(target: Target) -> str:
    """A target's name in metadata."""
    return f"{target.arch // 10}.{target.arch % 10}" if isinstance(target.arch, int) else target.arch


def _facts(plan: Plan) -> list[tuple[str, str]]:
    """Rows of the card's table."""
    spec, attention, layout, heads = plan.spec, plan.spec.attention, plan.layout, plan.spec.multi_head
    facts = [("query heads", f"{spec.model.num_heads}; any number at run time"), ("dtype", spec.model.dtype)]
    if attention is not None:
        kind = "dense" if isinstance(attention, DenseAttention) else f"sparse, top-k {attention.topk}"
        facts.append(("attention", kind))
        facts.append(("columns of Q and K, of V", f"{plan.d_qk}, {plan.d_v}"))
    if heads is not None:
        facts.append(("multi-head attention, columns of Q and K, of V", f"{heads.qk_head_dim}, {heads.v_head_dim}"))
    for name, one in (("cache", layout), ("second cache", plan.extra_layout)):
        if one is not None:
            facts.append((name, f"`{one.name}`, {one.row_bytes} bytes a token"))
    rows = plan.indexer_rows
    if rows is not None:
        facts.append(("cache of the indexer", f"`{rows.layout.name}`, {rows.layout.row_bytes} bytes a token"))
    return facts


def _benchmark(plan: Plan) -> tuple[str, dict[str, Any]] | None:
    """The template of a benchmark, and the part of its context that depends on the kind of attention."""
    spec, attention, layout, heads = plan.spec, plan.spec.attention, plan.layout, plan.spec.multi_head
    if heads is not None and "flash_attn_varlen_func" in spec.wrappers:
        kv_heads = heads.num_kv_heads or spec.model.num_heads
        return "dense_fwd", {"d_qk": heads.qk_head_dim, "d_v": heads.v_head_dim, "kv_heads": kv_heads}
    if attention is None or plan.out_rope:
        return None
    context: dict[str, Any] = {"d_qk": plan.d_qk, "d_v": plan.d_v, "sparse": False, "sink": False}
    if isinstance(attention, DenseAttention):
        context["window"] = attention.window
    else:
        sink, lengths = attention.attn_sink != "none", attention.topk_length != "none"
        context |= {"window": None, "sparse": True, "topk": attention.topk, "sink": sink, "lengths": lengths}
    if "flash_mla_sparse_fwd" in spec.wrappers:
        return "sparse_fwd", context | {"block_size": plan.rows_block_size or 1}
    written = {"flash_mla_with_kvcache", "concat_and_cache_mla"} <= {*spec.wrappers}
    if not written or layout is None or layout.tensors or plan.extra_layout is not None:
        return None
    block_size = (spec.cache.block_size if spec.cache else None) or BLOCK_SIZE
    return "decode", context | {
        "block_size": block_size,
        "layout": layout.name if layout.quantised else "auto",
        "quantised": layout.quantised,
        "tensor_scale": layout.tensor_scale,
        "row_bytes": layout.row_bytes,
        "page_bytes": layout.page_bytes(block_size),
        "d_c": spec.model.kv_lora_rank,
        "d_rope": spec.model.qk_rope_head_dim,
    }
