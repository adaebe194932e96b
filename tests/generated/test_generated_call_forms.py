"""Declarations and calls of vLLM, SGLang, FlashMLA and FlashAttention bind to the wrappers, or a table gives a reason.

The table is call_forms.yaml, the source of docs/signatures.md.
"""

from __future__ import annotations

import inspect
import zipfile
from functools import cache

import call_forms
import pytest
from call_forms import Call, Form, Parameters, Wrapper
from checked_in import PACKAGES, package_of

from mlagen.compile.worker import load_package
from mlagen.verify.call.facts import Facts

WRAPPERS = {wrapper.name: wrapper for wrapper in call_forms.load()}
FORMS = [form for wrapper in WRAPPERS.values() for form in wrapper.forms]
CALLS = [(form, call) for form in FORMS for call in form.calls]
# Public functions that no other project has.
OWN = {"dense_workspace_size", "kvcache_workspace_size", "merge_attn_parts", "supports", "variants", "warmup"}
OWN |= {"candidate_mqa_logits", "paged_candidate_mqa_logits"}
OWN |= {"candidate_indexer_topk", "paged_candidate_indexer_topk"}
OWN |= {"indexer_topk", "paged_indexer_topk", "topk_merge", "workspace_size"}
EITHER = "torch.Tensor | tuple[torch.Tensor, torch.Tensor]"


@cache
def packages() -> dict[str, dict[str, inspect.Signature]]:
    """Signatures of every wrapper, by its name and its package's."""
    found: dict[str, dict[str, inspect.Signature]] = {}
    for folder in PACKAGES:
        package = load_package(folder)
        for name in package.__all__:
            function = getattr(package, name)
            if inspect.isfunction(function):
                found.setdefault(name, {})[folder.name] = inspect.signature(function)
    return found


def ours(form: Form) -> list[tuple[str, inspect.Signature]]:
    return list(packages()[form.wrapper].items())


def wrapper_of(form: Form) -> Wrapper:
    return WRAPPERS[form.wrapper]


def takes_pair(package: str) -> bool:
    return Facts.of(load_package(package_of(package)).SPEC["spec"]).takes_pair


def takes(signature: inspect.Signature, name: str) -> bool:
    variadic = any(one.kind is one.VAR_KEYWORD for one in signature.parameters.values())
    return variadic or name in signature.parameters


def test_every_wrapper_has_forms():
    assert set(packages()) - OWN == set(WRAPPERS)


def test_no_package_has_a_function_that_is_not_generated():
    names = [one.name for one in call_forms.not_generated()]
    assert names
    assert not set(names) & set(packages())
    assert not set(names) & {form.function for form in FORMS}
    assert all(one.of and one.source and one.versions and len(one.why) > 60 for one in call_forms.not_generated())


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_each_name_is_taken_or_refused_for_a_reason(form):
    for package, signature in ours(form):
        lacking = [name for name in call_forms.named(form.parameters) if not takes(signature, name)]
        assert [name for name in lacking if not wrapper_of(form).why_refused(name, form, package)] == [], package


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_each_position_means_the_same_as_upstream_or_is_in_a_table(form):
    theirs = call_forms.positional(form.parameters)
    apart = set()
    for _, signature in ours(form):
        parameters: Parameters = dict(signature.parameters)
        here = call_forms.positional(parameters)
        if not here:  # takes anything
            continue
        count = call_forms.agreeing(form.parameters, parameters)
        bound = signature.bind_partial(*theirs[: min(len(theirs), len(here))]).arguments
        assert all(bound[name] == name for name in theirs[:count])
        apart.add(count < min(len(theirs), len(here)))
        if len(theirs) > len(here):
            with pytest.raises(TypeError, match="too many positional arguments"):
                signature.bind_partial(*theirs)
    assert apart <= {bool(form.next)}


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_each_default_is_the_same_or_a_table_says_why_not(form):
    if form.refused:
        return
    wrapper = wrapper_of(form)
    for package, signature in ours(form):
        for name, theirs in form.parameters.items():
            here = signature.parameters.get(name)
            if here is not None and theirs.default is not theirs.empty and here.default != theirs.default:
                assert name in wrapper.defaults, (package, name, theirs.default, here.default)


@pytest.mark.parametrize("name", WRAPPERS)
def test_required_arguments_of_a_wrapper_are_in_a_form(name):
    wrapper = WRAPPERS[name]
    known = {parameter for form in wrapper.forms for parameter in form.parameters} | set(wrapper.needed)
    for signature in packages()[name].values():
        required = [one.name for one in signature.parameters.values() if one.default is one.empty]
        assert set(required) - {"args", "kwargs"} <= known


def arguments(form: Form, call: Call) -> tuple[list[str], dict[str, str]]:
    """Each argument is the name that it has there."""
    by_position = call_forms.positional(form.parameters)[: call.count]
    assert len(by_position) == call.count, "more positions than declared"
    return by_position, {name: name for name in call.names}


@pytest.mark.parametrize(("form", "call"), CALLS, ids=lambda one: str(one) if isinstance(one, Form) else one.source)
def test_each_call_binds_each_argument_to_its_own_name(form, call):
    by_position, by_name = arguments(form, call)
    inspect.Signature(list(form.parameters.values())).bind(*by_position, **by_name)  # as the project itself has it
    bound = 0
    for package, signature in ours(form):
        refused = [name for name in by_name if not takes(signature, name)]
        assert all(wrapper_of(form).why_refused(name, form, package) for name in refused)
        if refused:
            continue
        required = [one.name for one in signature.parameters.values() if one.default is one.empty]
        if set(required) & set(wrapper_of(form).needed):
            continue
        found = signature.bind(*by_position, **by_name).arguments
        wrong = {name: value for name, value in found.items() if value != name and name not in ("args", "kwargs")}
        assert not wrong or form.next, (package, wrong)
        bound += 1
    assert bound or any(wrapper_of(form).why_refused(name, form, "") for name in call.names)


@pytest.mark.parametrize("name", WRAPPERS)
def test_the_tables_have_no_outdated_entries(name):
    wrapper = WRAPPERS[name]
    theirs = {parameter for form in wrapper.forms for parameter in form.parameters}
    for refused in wrapper.refused:
        for package, signature in packages()[name].items():
            if package in (refused.packages or (package,)):
                assert not [one for one in refused.names if takes(signature, one)], package
        assert set(refused.names) <= theirs
    differing = set()
    for form in wrapper.forms:
        for _, signature in ours(form):
            for one in set(form.parameters).intersection(signature.parameters):
                default = form.parameters[one].default
                if default is not inspect.Parameter.empty and default != signature.parameters[one].default:
                    differing.add(one)
    assert set(wrapper.defaults) <= differing


@pytest.mark.parametrize("name", WRAPPERS)
def test_pairs_are_documented_for_each_wrapper_that_takes_one(name):
    wrapper = WRAPPERS[name]
    annotations = [
        (package, one.name, str(one.annotation))
        for package, signature in packages()[name].items()
        for one in signature.parameters.values()
    ]
    pairs = {argument for _, argument, annotation in annotations if annotation == EITHER}
    assert set(wrapper.beyond) == pairs
    for package, argument, annotation in annotations:
        if argument in pairs:
            assert (annotation == EITHER) is takes_pair(package), package


def test_the_page_has_these_tables():
    """Mended by `python tests/generated/call_forms.py --docs`."""
    text = call_forms.DOCS.read_text()
    assert call_forms.documented(text, call_forms.tables(call_forms.signatures())) == text


def test_a_wheel_with_other_signatures_is_reported(tmp_path):
    form = next(form for form in FORMS if form.wrapper == "concat_and_cache_mla" and "0.33.0" in form.versions)
    for names, found in (
        (form.parameters, []),
        (
            (*form.parameters, "newer"),
            [f"{form.source}: concat_and_cache_mla({', '.join((*form.parameters, 'newer'))})"],
        ),
    ):
        wheel = tmp_path / "other.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr(form.source, f"def concat_and_cache_mla({', '.join(names)}): ...\n")
        assert list(call_forms.differences(wheel)) == found
