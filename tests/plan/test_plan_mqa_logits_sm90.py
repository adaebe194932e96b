"""Numbers of the sm90 kernels of the indexer's logits, the specs that have them, and their modules."""

from __future__ import annotations

import ast

import pytest
from plan_specs import make_spec

from mlagen.backends.mqa_logits.sm90 import MQA_LOGITS, PAGED_MQA_LOGITS
from mlagen.backends.parts.base import generated
from mlagen.emit.render import _body
from mlagen.plan import TARGETS
from mlagen.plan.plan import Plan
from mlagen.plan.sm90.mqa_logits import make_mqa_logits_sm90
from mlagen.spec import Spec

INDEXER = {"num_heads": 64, "head_dim": 128, "topk": 2048, "rope_head_dim": 64, "rope": "neox", "rope_at": "first"}
WRAPPERS = ("fp8_mqa_logits", "fp8_paged_mqa_logits")
modules = pytest.mark.parametrize("module", [MQA_LOGITS, PAGED_MQA_LOGITS], ids=lambda module: module.module)


def spec_of(layout="indexer_fp8", wrappers=WRAPPERS, indexer=None, block_size=64, **changes):
    data = make_spec(**changes).model_dump()
    data |= {"wrappers": wrappers, "indexer": {**INDEXER, **(indexer or {})}}
    return Spec.model_validate(data | {"indexer_cache": {"layout": layout, "block_size": block_size}})


def plan_of(spec):
    """A plan without families: these kernels ask nothing of it yet."""
    return Plan(spec, None, ())


@pytest.mark.parametrize(
    ("heads", "tokens", "paged_tokens"),
    [(16, (2, 4, 8), (1, 2, 4)), (32, (2, 4, 8), (1, 2, 4)), (64, (2, 4), (1, 2, 4)), (128, (2,), (1, 2))],
)
def test_numbers_by_hand(heads, tokens, paged_tokens):
    sm90 = make_mqa_logits_sm90(spec_of(indexer={"num_heads": heads}))
    assert (sm90.tokens, sm90.paged_tokens) == (tokens, paged_tokens)
    # Columns of a product: a consumer holds two over flat keys, one over pages, in half of its registers.
    assert tokens[-1] // 2 * heads <= 128
    assert paged_tokens[-1] * heads <= 256
    # 128 columns of 32 each; of two consumers. Each multiplies two halves of a tile before its loop and in it.
    assert (sm90.expected_products, sm90.expected_paged_products) == (2 * 4 * 4, 4)
    # Two query blocks with an fp32 weight a row, and tiles of 128 keys with an fp32 scale each; barriers.
    assert sm90.expected_shared == (2 * tokens[-1] * heads + 8 * 128) * 132 + 4096
    assert sm90.expected_shared <= TARGETS["sm90"].shared_limit
    # Programs over pages share a multiprocessor's registers and memory: accumulators, weights, and some 32 of either.
    for one, programs in sm90.programs.items():
        columns = one * heads
        weights = 0 if columns == sm90.lean_columns else columns // 4
        assert programs * 128 * (columns // 2 + weights + 32) <= 1 << 16
        # Query blocks, an fp32 weight a row of two, and pages of 64 keys. There is room for no further program.
        needed = max(2 * columns, sm90.q_columns) * 128 + 2 * columns * 4 + sm90.paged_stages * 64 * 128 + 1024
        assert programs * needed <= TARGETS["sm90"].shared_limit + 1024 < (programs + 1) * needed
    # A unit of DeepGEMM's schedules falls to a multiprocessor's programs in equal parts.
    assert all(sm90.unit_pages % programs == 0 for programs in sm90.programs.values())


@pytest.mark.parametrize(
    "changes",
    [
        {"targets": ("sm80", "sm100")},
        {"backend": "triton"},
        {"indexer": {"num_heads": 48}},
        {"indexer": {"head_dim": 64}},
        {"layout": "indexer_mxfp4", "wrappers": ("fp8_fp4_mqa_logits", "fp8_fp4_paged_mqa_logits")},
    ],
    ids=str,
)
@modules
def test_a_spec_that_cannot_have_them_goes_without(changes, module):
    spec = spec_of(**changes)
    assert make_mqa_logits_sm90(spec) is None
    assert not module.present(plan_of(spec))


@modules
def test_a_package_has_only_the_kernels_of_its_wrappers(module):
    for wrapper, has in zip(WRAPPERS, (module is MQA_LOGITS, module is PAGED_MQA_LOGITS), strict=True):
        assert module.present(plan_of(spec_of(wrappers=(wrapper,)))) == has


@pytest.mark.parametrize(("keys", "has"), [(64, True), (None, True), (32, False)])
def test_pages_of_another_size_have_none(keys, has):
    spec = spec_of(block_size=keys)
    assert (MQA_LOGITS.present(plan_of(spec)), PAGED_MQA_LOGITS.present(plan_of(spec))) == (True, has)


@modules
def test_call_and_kernel_name_the_same_arguments(module):
    plan = plan_of(spec_of())
    text, _ = _body(generated(module.module, module.context(plan), module.template))
    tree = {node.name: node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    fields = [node.target.id for node in tree["Call"].body if isinstance(node, ast.AnnAssign)]
    parameters = [argument.arg for argument in tree[module.kernel].args.args]
    assert parameters == [*fields, *module.constexprs]
    if module is MQA_LOGITS:  # over pages, a program is one warpgroup
        partitions = text[text.index("gl.warp_specialize") :].count("(call, shared, share")
        (registers,) = [line for line in text.splitlines() if line.startswith("REGISTERS")]
        assert partitions == 1 + len(registers.split(","))  # the first has none in the list
