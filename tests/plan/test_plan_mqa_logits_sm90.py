"""Numbers of the sm90 kernels of the indexer's logits, which specs have them, and what their modules say."""

from __future__ import annotations

import ast

import pytest
from plan_specs import make_spec

from mlagen.backends.base import generated
from mlagen.backends.sm90_logits import MQA_LOGITS, PAGED_MQA_LOGITS
from mlagen.emit.render import _body
from mlagen.plan import TARGETS
from mlagen.plan.mqa_logits_sm90 import make_mqa_logits_sm90
from mlagen.plan.plan import Plan
from mlagen.spec import Spec

INDEXER = {"num_heads": 64, "head_dim": 128, "topk": 2048, "rope_head_dim": 64, "rope": "neox", "rope_at": "first"}
WRAPPERS = ("fp8_mqa_logits", "fp8_paged_mqa_logits")
modules = pytest.mark.parametrize("module", [MQA_LOGITS, PAGED_MQA_LOGITS], ids=lambda module: module.MODULE)


def spec_of(layout="indexer_fp8", wrappers=WRAPPERS, indexer=None, **changes):
    data = make_spec(**changes).model_dump()
    data |= {"wrappers": wrappers, "indexer": {**INDEXER, **(indexer or {})}}
    return Spec.model_validate(data | {"indexer_cache": {"layout": layout, "block_size": 64}})


def plan_of(spec):
    """A plan without families, of which these kernels ask nothing yet."""
    return Plan(spec, None, 0, 0, ())


@pytest.mark.parametrize(("heads", "tokens"), [(16, (1, 2, 4, 8)), (32, (1, 2, 4, 8)), (64, (1, 2, 4)), (128, (1, 2))])
def test_numbers_by_hand(heads, tokens):
    sm90 = make_mqa_logits_sm90(spec_of(indexer={"num_heads": heads}))
    assert sm90.block_tokens == tokens
    assert tokens[-1] * heads <= 256  # columns of a product
    assert sm90.expected_products == 2 * 4  # of two consumers, for 128 columns of 32 each
    for stages in (sm90.stages, sm90.paged_stages):
        # Two query blocks with an fp32 weight a row, and tiles of 64 keys with an fp32 scale each; barriers.
        assert sm90.expected_shared(stages) == (2 * tokens[-1] * heads + stages * 64) * 132 + 1024
        assert sm90.expected_shared(stages) <= TARGETS["sm90"].shared_limit


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
def test_a_package_has_the_kernels_of_its_wrappers_alone(module):
    for wrapper, has in zip(WRAPPERS, (module is MQA_LOGITS, module is PAGED_MQA_LOGITS), strict=True):
        assert module.present(plan_of(spec_of(wrappers=(wrapper,)))) == has


@modules
def test_call_and_kernel_name_the_same_arguments(module):
    plan = plan_of(spec_of())
    text, _ = _body(generated(module.MODULE, module.context(plan), module.TEMPLATE))
    tree = {node.name: node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    fields = [node.target.id for node in tree["Call"].body if isinstance(node, ast.AnnAssign)]
    parameters = [argument.arg for argument in tree[module.kernel].args.args]
    assert parameters == [*fields, "TOKENS"]
    assert f"STAGES = gl.constexpr({module.stages(make_mqa_logits_sm90(plan.spec))})" in text
