"""Checks that all families share, on wrappers of one line: each passes a right one and notices a wrong one."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from checked_in import package_of
from rotation import some

from mlagen.verify import checks
from mlagen.verify.call.case import Case, CaseFailedError
from mlagen.verify.call.family import Family, Inputs
from mlagen.verify.call.invalid import Invalid, RefusedCase, check_refused, refused_cases
from mlagen.verify.call.memory import LAYOUTS, NAN, place, place_vector
from mlagen.verify.call.subject import Subject, launch_of
from mlagen.verify.checks import Variant, Workspaces
from mlagen.verify.worker import import_package

ROOT = Path(__file__).parents[2]
SIZES = {"for all": 8, "for one": 4}


@dataclass
class Rows(Inputs):
    """Some rows. A call returns their doubles."""

    q: torch.Tensor

    def pick(self, rows):
        return replace(self, q=self.q[list(rows)].clone(), placed={}, given={})


def right(run, out=None, workspace=None):
    """Doubles rows, through a workspace if it is given one."""
    if workspace is not None:
        if len(workspace) < SIZES["for one"]:
            raise ValueError("workspace: too small")
        workspace.zero_()
    given = run.inputs.given
    out = given["out"].view if "out" in given else torch.empty_like(run.inputs.q)
    return {"out": out.copy_(2 * run.inputs.q)}


def compare(run, results):
    if not torch.equal(results["out"], 2 * run.inputs.q):
        raise CaseFailedError("not the double")
    return []


def build(subject, case, seed):
    placed = place_vector(torch.arange(6.0), NAN)
    given = {"out": place(torch.full((1, 6), NAN), LAYOUTS["contiguous"], NAN)} if case.check == "reference" else {}
    given = {name: replace(one, view=one.view[0]) for name, one in given.items()}
    return Rows(q=placed.view, placed={"q": placed}, given=given)


def variants(run):
    yield Variant("beside others", run.inputs.pick([0, 0, 0]), [0])


FAMILY = Family(
    name="doubles",
    kinds=(Case,),
    cases=lambda spec, device: [],
    build=build,
    call=right,
    compare=compare,
    checks={
        "reference": checks.reference,
        "determinism": checks.determinism,
        "defaults": checks.defaults,
        "invariance": checks.invariance(Rows.pick, variants, crowd=lambda rows, big: [0] * rows),
        "workspace": checks.workspace(lambda run: Workspaces(SIZES, lambda flat: not flat.isnan().any(), 3)),
    },
    valid=lambda subject, case: {},
)
SUBJECT = Subject(import_package(package_of("odd")), None, "cpu", "sm90")


def run(check, call):
    return replace(FAMILY, call=call).run(SUBJECT, Case("doubles: some", "it doubles", check=check))


def changing(change):
    """The right call, after or before something that it should not do."""
    return lambda run, **given: change(run, right(run, **given), **given)


def spills(run, results, **given):
    run.inputs.given["out"].buffer[0] = 1.0
    return results


def writes(run, results, **given):
    run.inputs.placed["q"].buffer[-1] = 1.0
    return results


def leaves_defaults(run, results, **given):
    torch.set_default_dtype(torch.float16)
    return results


def writes_past(run, results, workspace=None):
    if workspace is not None:
        workspace.as_strided((len(workspace) + 1,), (1,), workspace.storage_offset()).zero_()
    return results


@pytest.mark.parametrize("check", FAMILY.checks)
def test_a_right_call_passes(check):
    assert run(check, right) == []


@pytest.mark.parametrize(
    ("check", "call", "message"),
    [
        ("reference", changing(lambda run, results: {"out": results["out"].clone()}), "another tensor was returned"),
        ("reference", changing(lambda run, results: {"out": results["out"].fill_(3)}), "not the double"),
        ("reference", changing(spills), "wrote outside out"),
        ("determinism", changing(writes), "wrote to its input q"),
        ("determinism", lambda run: {"out": torch.rand(6)}, "second call: . of 6 elements of out have other bits"),
        ("defaults", changing(leaves_defaults), "changed torch's default dtype or device"),
        ("invariance", lambda run: {"out": run.inputs.q * len(run.inputs.q)}, "alone: 1 of 1 elements"),
        ("workspace", lambda run, workspace=None: right(run), "a workspace for all is not used"),
        ("workspace", changing(writes_past), "wrote outside a workspace for all"),
        ("workspace", lambda run, workspace=None: (workspace is None or workspace.zero_(), right(run))[1], "too small"),
    ],
)
def test_what_is_wrong_is_noticed(check, call, message):
    with pytest.raises(CaseFailedError, match=message):
        run(check, call)


def test_a_call_that_reads_torchs_defaults_fails():
    with pytest.raises((CaseFailedError, RuntimeError)):
        run("defaults", lambda run: {"out": torch.zeros(6).copy_(2 * run.inputs.q)})


def test_an_argument_is_made_invalid_from_its_own_or_from_another():
    def applied(**fields):
        arguments = {"a": 1, "b": 5}
        Invalid("a", "wrong", lambda value: value + 10, **fields).apply(arguments)
        return arguments

    assert applied() == {"a": 11, "b": 5}
    assert applied(like="b") == {"a": 15, "b": 5}
    assert applied(like="b", changes="b") == {"a": 1, "b": 15}


def test_refused_cases_are_made_for_the_wrappers_that_have_the_argument():
    found = [Invalid("a", "None", lambda _: None), Invalid("b", "None", lambda _: None, wrappers=("two",))]
    names = [case.name for case in refused_cases("doubles", {"one": "1", "two": "2"}, found, prefix="extra ")]
    assert names == ["extra refuses: a, None (1)", "extra refuses: a, None (2)", "extra refuses: b, None (2)"]


def refusal(raised, metadata=None):
    """Runs a refusal of a wrapper that raises this; `says` is also asked for."""

    def wrapper(**arguments):
        if raised:
            raise raised

    sys.modules["refusing._launch"] = launch_of(SUBJECT.package)
    subject = Subject(SimpleNamespace(__name__="refusing", double=wrapper), None, "cpu", "sm90")
    invalid = Invalid("size", "None", lambda _: None, says="row.of")
    try:
        check_refused(subject, RefusedCase("", "", "doubles", "double", invalid), {"tile_scheduler_metadata": metadata})
    finally:
        del sys.modules["refusing._launch"]


def test_a_refusal_names_the_argument_and_what_else_it_must():
    refusal(ValueError("size: got None for row.of"))
    refusal(TypeError("size: got None for row.of"), SimpleNamespace(config=None))
    for raised, message in (
        (None, "took an invalid size"),
        (ValueError("sizes: got None for row.of"), "does not name size"),
        (ValueError("size: got None for row_of"), "does not name row.of"),
    ):
        with pytest.raises(CaseFailedError, match=message):
            refusal(raised)
    with pytest.raises(CaseFailedError, match="recorded its sizes"):
        refusal(ValueError("size: row.of"), SimpleNamespace(config=1))
    with pytest.raises(RuntimeError):
        refusal(RuntimeError("size: row.of"))


REPLAYED = {
    "odd": {"sparse_fwd", "writer", "merge 96"},
    "odd_fp8": {"writer", "gather", "extra writer", "extra gather", "sparse_decode"},
    "odd_prefill": {"merge 72", "dense_fwd"},
    "dsv2_lite": {"writer", "gather", "dense_decode"},
}


@pytest.mark.interpreter
@pytest.mark.parametrize("package", some(REPLAYED, 2))
def test_graphs_and_streams_are_checked_where_a_replay_is_another_call(package):
    families = REPLAYED[package]
    command = [sys.executable, str(Path(__file__).with_name("replayed.py")), str(package_of(package))]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert {name.split(":")[0] for name in found} == families
    assert {name: share for name, share in found.items() if not isinstance(share, float) or share > 1} == {}
