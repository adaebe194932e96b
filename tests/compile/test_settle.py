"""A build when a kernel does not hold: other registers, another tile, or the package without the kernel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from mlagen.compile import CompileJob, Judge, Resources, Settler, compile_jobs, installed, list_variants, settle
from mlagen.compile.job import KernelError
from mlagen.emit import apply, compare, render
from mlagen.errors import LimitError, MlagenError
from mlagen.plan import Plan, SparseFwdPlan, load_plan
from mlagen.plan.tiles.findings import findings_path
from mlagen.plan.tritons import minor, minor_text

pytestmark = pytest.mark.compilation

SPEC = """\
name: small
title: A small model
model: {num_heads: 4, kv_lora_rank: 64, qk_rope_head_dim: 16, v_head_dim: 64, dtype: bf16}
attention: {kind: sparse, topk: 64, attn_sink: none, topk_length: none}
cache: {layout: bf16}
wrappers: [triton_mla_sparse_attention]
targets: [TARGET]
"""
VERSION = installed().version
HERE = minor_text(minor(VERSION))
SWAP_AB = "_sparse_fwd_sm90_swap_ab"


class Build:
    """A spec in a folder of its own, and the settling of its package."""

    def __init__(self, folder: Path, target: str, more: str = "") -> None:
        self.spec = folder / "small.yaml"
        self.spec.write_text(SPEC.replace("TARGET", target) + more)
        self.target, self.staged = target, folder / "staged" / "small"
        self.lines: list[str] = []
        apply(compare(render(load_plan(self.spec)), self.staged))

    def settler(self, broken: Callable[[Resources], bool]) -> Settler:
        """A settler; `broken` says whether a variant breaks a limit."""

        def check(taken: Resources) -> Sequence[LimitError]:
            return [LimitError("spills", hint="fix with: less")] if broken(taken) else []

        return Settler(self.spec, load_plan(self.spec), self.staged, check, self.lines.append)

    def jobs(self, module: str) -> list[CompileJob]:
        return [job for job in list_variants(self.staged, [self.target]) if job.module == module]

    def prove(self, module: str) -> Callable[[str, Judge], list[Resources]]:
        """Compile one variant of a module, if calls launch any."""
        return lambda version, judge: compile_jobs(self.staged, self.jobs(module)[:1], on_done=judge)


class FirstKeys:
    """The first so many kernels by content that are looked at break a limit."""

    def __init__(self, most: int) -> None:
        self._most, self._keys = most, dict[str, None]()

    def __call__(self, taken: Resources) -> bool:
        self._keys.setdefault(taken.key)
        return taken.key in list(self._keys)[: self._most]


def text_of(plan: Plan) -> list[str]:
    return [file.text for file in render(plan).files]


def test_a_kernel_that_no_split_of_registers_frees_is_left_out_and_the_rest_is_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settle, "MOST_TRIES", 1)
    build = Build(tmp_path, "sm90")
    variants = len(build.jobs(SWAP_AB))
    settler = build.settler(lambda taken: taken.module == SWAP_AB)
    assert settler.settle([VERSION], build.prove(SWAP_AB)) == {VERSION: []}
    assert build.lines == [
        f"small: sparse_fwd sm90_swap_ab not used under {HERE}: its machine code differs from the plan "
        f"({variants} variants); 1 other register splits tried; its calls run the portable kernel"
    ]
    (left,) = settler.plan.of(SparseFwdPlan).left_out
    assert (left.kernel, left.triton) == ("sm90_swap_ab", minor(VERSION))
    assert build.jobs(SWAP_AB) == []
    assert build.jobs("_sparse_fwd_sm90") != []
    assert settler.write() == [findings_path("small", tmp_path)]
    assert text_of(load_plan(build.spec)) == text_of(settler.plan)
    assert settler.write() == []


def test_another_split_of_registers_is_taken_that_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "empty"))
    build = Build(tmp_path, "sm90")
    before = load_plan(build.spec).of(SparseFwdPlan).sm90_swap_ab[0].registers.at(minor(VERSION))
    settler = build.settler(FirstKeys(1))
    (taken,) = settler.settle([VERSION], build.prove(SWAP_AB))[VERSION]
    (split,) = settler.findings.registers
    assert taken.module == SWAP_AB
    assert not taken.cached  # the search compiled it
    assert split.split == settler.plan.of(SparseFwdPlan).sm90_swap_ab[0].registers.at(minor(VERSION)) != before
    assert [line.partition(" (")[0] for line in build.lines] == ["small: sparse_fwd sm90_swap_ab: registers"]
    assert settler.findings.left_out == ()


def test_a_kernel_that_the_compiler_refuses_is_tried_anew(tmp_path: Path) -> None:
    build = Build(tmp_path, "sm90")
    file = build.staged / f"{SWAP_AB}.py"
    lines = file.read_text().splitlines(keepends=True)
    at = next(index for index, line in enumerate(lines) if line.startswith(f"def {SWAP_AB}_kernel("))
    body = next(index for index in range(at, len(lines)) if lines[index].startswith("):")) + 1
    lines.insert(body, '    gl.static_assert(False, "broken on purpose")\n')
    file.write_text("".join(lines))
    settler = build.settler(lambda taken: False)
    settler.settle([VERSION], build.prove(SWAP_AB))
    assert "the compiler refuses it" in build.lines[0]
    assert "broken on purpose" in build.lines[0]


def test_another_tile_is_taken_that_holds(tmp_path: Path) -> None:
    build = Build(tmp_path, "sm80")
    settler = build.settler(FirstKeys(1))
    settler.settle([VERSION], build.prove("_sparse_fwd_kernels"))
    (entry,) = settler.findings.replacements
    family = settler.plan.of(SparseFwdPlan)
    table = dict(family.tiles if entry.table == "tiles" else family.unaligned)["sm80"]
    assert [row.tile for row in table if row.tritons == (minor(VERSION), minor(VERSION))] == [entry.instead]
    assert build.lines[0].startswith(f"small: sparse_fwd on sm80: tile {entry.instead} instead of {entry.tile} under")
    settler.write()
    assert text_of(load_plan(build.spec)) == text_of(settler.plan)


@pytest.mark.parametrize(
    ("target", "module", "more"),
    [("sm90", SWAP_AB, "backend: gluon\n"), ("sm80", "_sparse_fwd_kernels", "")],
    ids=["a spec that asks for the kernel", "no tile holds"],
)
def test_one_error_counts_all_variants_of_a_kernel_without_replacement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str, module: str, more: str
) -> None:
    monkeypatch.setattr(settle, "MOST_TRIES", 1)
    build = Build(tmp_path, target, more)
    settler = build.settler(lambda taken: True)
    with pytest.raises(MlagenError, match=r"^spills( \(\d+ variants\))?$"):
        settler.settle([VERSION], build.prove(module))
    assert build.lines == []
    assert not findings_path("small", tmp_path).exists()


def test_a_build_fails_if_no_finding_frees_a_variant(tmp_path: Path) -> None:
    build = Build(tmp_path, "sm90")
    job = build.jobs(SWAP_AB)[0]
    settler = build.settler(lambda taken: False)

    def prove(version: str, judge: Judge) -> list[Resources]:
        raise KernelError(job, "one", "no", place=None, hint=None)

    with pytest.raises(KernelError, match=r"^one: no \(\d+ variants\)$"):
        settler.settle([VERSION], prove)
    assert len(build.lines) == 1
