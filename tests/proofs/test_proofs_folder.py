"""Proofs in folders: rows that are looked up, written and dropped."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from proof_rows import ONE

from mlagen.plan.tritons import TRITONS
from mlagen.proofs import CasesRow, Figures, Proofs, carry_over, folder
from mlagen.proofs.cases import keep, proof_of, proved_before
from mlagen.proofs.rows import CompileRow
from mlagen.proofs.sources import family_names
from mlagen.verify import CaseResult, Figure

OTHER = replace(ONE, key="00000000000000bb", target="gfx942", scalar_registers=96, registers=128, spills=0)
PRODUCTS = replace(ONE, module="_sparse_fwd_sm90", target="sm90", instructions={"HGMMA": 12, "QGMMA": 4, "LDL": 3})
RESULT = CaseResult("small", "refuses: q", "sm80", True, None, (Figure("out", 0.2504, 1.0),), 0.1, "", "cache")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "mlagen" / "verified"


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """A folder with two packages, each of one variant, that one Triton proved."""
    for name in ("small", "other"):
        (tmp_path / "out" / name).mkdir(parents=True)
    proofs = Proofs(tmp_path / "out", tmp_path / "none")
    proofs.add_compiled([ONE, OTHER])
    proofs.add_package("small", "k1", {"3.7.1": [ONE.key]})
    proofs.add_package("other", "k2", {"3.7.1": [ONE.key, OTHER.key]})
    proofs.save()
    return tmp_path / "out"


def opened(out: Path) -> Proofs:
    return Proofs(out, out.parent / "none")


def test_figures_read_back_as_they_were_written(out: Path) -> None:
    proofs = opened(out)
    assert proofs.faults() == []
    assert proofs.figures(ONE.key, "3.7.1") == Figures(255, 4096, 8)
    assert proofs.figures(OTHER.key, "3.7.1") == Figures(128, 4096, 0, 0, 96)
    assert proofs.figures(ONE.key, "3.8.0") is None
    measured = proofs.measured(OTHER.key, "3.7.1")
    assert measured is not None
    assert (measured.scalar_registers, measured.registers, measured.spills) == (96, 128, 0)
    assert proofs.tritons("k1") == proofs.tritons("k2") == ("3.7.1",)
    assert proofs.tritons("k3") == ()
    assert proofs.save() == []


def test_figures_hold_the_products_of_sm90_modules_alone() -> None:
    assert Figures.of(PRODUCTS).products == 16
    assert Figures.of(replace(PRODUCTS, module="_sparse_fwd_kernels")).products == 0
    assert Figures.of(PRODUCTS).measured("sm90").instructions == {"HGMMA": 16}


@pytest.mark.parametrize(
    "figures", [{"loop_spills": 1}, {"shared": 166_913}, {"tensor_memory": 513}], ids=lambda one: next(iter(one))
)
def test_a_package_with_a_variant_over_a_limit_is_not_proved(out: Path, figures: dict[str, int]) -> None:
    proofs = opened(out)
    proofs.add_compiled([replace(ONE, **figures)])
    assert proofs.tritons("k1") == ()


def test_a_package_with_a_variant_without_a_row_is_not_proved(out: Path) -> None:
    path = out / "proofs" / "compile.json"
    path.write_text("".join(line for line in path.read_text().splitlines(keepends=True) if OTHER.key not in line))
    proofs = opened(out)
    assert (proofs.tritons("k1"), proofs.tritons("k2")) == (("3.7.1",), ())
    assert proofs.faults() == [(path, "rows were added or deleted by hand")]


def test_a_file_that_is_no_text_is_a_fault_until_the_next_build_replaces_it(out: Path) -> None:
    path = out / "proofs" / "compile.json"
    text = path.read_bytes()
    path.write_bytes(b"\xff\x00")
    proofs = opened(out)
    ((found, fault),) = proofs.faults()
    assert found == path
    assert fault.startswith("cannot be read: ")
    proofs.add_compiled([ONE, OTHER])
    assert path in proofs.save()
    assert path.read_bytes() == text


def test_rows_that_no_package_needs_are_dropped(out: Path) -> None:
    proofs = opened(out)
    proofs.add_compiled([replace(ONE, key="00000000000000cc")])
    proofs.add_package("other", "k3", {"3.7.1": [ONE.key]})
    proofs.save()
    proofs = opened(out)
    assert proofs.variant(OTHER.key) is None
    assert proofs.variant("00000000000000cc") is None
    assert (proofs.package("k2"), proofs.tritons("k1"), proofs.tritons("k3")) == (None, ("3.7.1",), ("3.7.1",))
    for name in ("small", "other"):
        (out / name).rmdir()
    proofs.save()
    assert opened(out).variant(ONE.key) is None


def test_figures_of_another_triton_outlive_a_build_without_it(out: Path) -> None:
    proofs = opened(out)
    proofs.add_compiled([replace(ONE, triton="3.9.0")])
    proofs.add_package("other", "k2", {"3.7.1": [ONE.key, OTHER.key]})  # 3.9.0 lacks figures of the second
    proofs.save()
    proofs = opened(out)
    assert proofs.figures(ONE.key, "3.9.0") == Figures(255, 4096, 8)
    assert proofs.tritons("k2") == ("3.7.1",)


def test_what_comes_with_mlagen_is_found_and_copied_where_it_is_needed(out: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    (mine / "renamed").mkdir(parents=True)
    proofs = Proofs(mine, out / "proofs")
    assert proofs.tritons("k2") == ("3.7.1",)
    proofs.add_package("renamed", "k1", {"3.7.1": [ONE.key]})
    proofs.save()
    alone = Proofs(mine, tmp_path / "none")
    assert alone.tritons("k1") == ("3.7.1",)
    assert alone.variant(OTHER.key) is None


def test_rows_that_other_code_measured_are_not_believed(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlagen.proofs.folder.measuring_code", lambda: "other")
    proofs = opened(out)
    assert proofs.variant(ONE.key) is None
    assert proofs.tritons("k1") == ()
    assert [path.name for path, _ in proofs.faults()] == ["compile.json"]


def test_figures_that_a_change_leaves_are_carried_over(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlagen.proofs.folder.measuring_code", lambda: "other")
    assert carry_over(out, lambda figures: figures.spills == 0) == 1
    proofs = opened(out)
    assert proofs.faults() == []
    assert proofs.variant(ONE.key) is None
    assert proofs.figures(OTHER.key, "3.7.1") == Figures(128, 4096, 0, 0, 96)


def test_a_columns_number_that_is_not_known_agrees_with_any() -> None:
    known, unknown = Figures(128, tensor_memory=64), Figures(128, tensor_memory=None)
    assert known.agree(unknown)
    assert not known.agree(Figures(128, tensor_memory=65))
    assert not known.agree(Figures(129, tensor_memory=None))
    row = CompileRow("sm100", "_kernel", {"3.7.1": unknown})
    assert CompileRow.from_json(row.to_json()) == row
    assert list(row.broken("key", "3.7.1")) == []


def test_a_number_that_is_not_known_stays_so_until_it_is_measured(out: Path) -> None:
    proofs, one = opened(out), replace(ONE, target="sm100", cached=True)
    row = CompileRow("sm100", one.kernel, {"3.7.1": Figures.of(one)._replace(tensor_memory=None)})
    proofs._own.compiled[one.key] = row
    proofs.add_compiled([one])
    assert proofs.variant(one.key) == row
    proofs.add_compiled([replace(one, cached=False, tensor_memory=64)])
    assert proofs.figures(one.key, "3.7.1") == Figures.of(replace(one, tensor_memory=64))


def row(**changes: object) -> CasesRow:
    return replace(proof_of("k1", "cache", "cpu", [RESULT], 7, every=False), **changes)


def test_a_proof_of_cases_holds_their_number_and_the_largest_share(out: Path) -> None:
    assert (row().cases, row().of, row().share, row().every) == (1, 7, 0.251, False)
    proofs = opened(out)
    proofs.add_cases(row())
    assert not proofs.verified("k1")
    for family in family_names():
        proofs.add_cases(row(family=family))
    proofs.save()
    assert opened(out).verified("k1")
    assert opened(out).cases(row()) == row()
    assert opened(out).cases(row(every=True)) is None
    assert opened(out).cases(row(device="cuda")) is None


def test_families_without_cases_share_a_row(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    proofs, none = opened(out), {"cases": 0, "of": 0, "skipped": 0, "share": 0.0}
    proofs.add_cases(row())
    for family in ("topk", "kpool"):
        proofs.add_cases(row(family=family, **none))
        proofs.add_cases(row(family=family, package="k2", **none))
    proofs.save()
    lines = (out / "proofs" / "verify.json").read_text().splitlines()
    assert sorted(re.findall(r'\["(k\d)", "([^"]+)"', "\n".join(lines))) == [
        ("k1", "cache"),
        ("k1", "kpool topk"),
        ("k2", "kpool topk"),
    ]
    assert set(proved_before(opened(out), "k1", "cpu", every=False)) == {"cache", "kpool", "topk"}
    code = folder.family_code
    monkeypatch.setattr(folder, "family_code", lambda family: "new" if family == "topk" else code(family))
    assert set(proved_before(opened(out), "k1", "cpu", every=False)) == {"cache"}


def test_a_case_that_fails_is_no_proof() -> None:
    with pytest.raises(ValueError, match="no proof"):
        proof_of("k1", "cache", "cpu", [RESULT, replace(RESULT, ok=False)], 7, every=False)


@pytest.mark.parametrize("figures", [{"share": 1.1}, {"cases": 8}, {"skipped": 2}, {"share": float("nan")}])
def test_figures_that_no_proof_has_are_refused(figures: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="no proof"):
        row(**figures)


def test_cases_of_other_code_or_versions_are_not_proved(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    proofs = opened(out)
    proofs.add_cases(row())
    assert set(proved_before(proofs, "k1", "cpu", every=False)) == {"cache"}
    assert proved_before(proofs, "k1", "cpu", every=True) == {}
    monkeypatch.setattr("mlagen.proofs.folder.family_code", lambda family: "other")
    assert proved_before(proofs, "k1", "cpu", every=False) == {}
    monkeypatch.undo()
    monkeypatch.setattr("mlagen.proofs.cases.environment", lambda device: "python 3.99")
    assert proved_before(proofs, "k1", "cpu", every=False) == {}


def test_the_users_cache_is_believed_only_as_it_was_written(out: Path, cache: Path) -> None:
    proofs, asked = opened(out), {"cache"}
    keep(row())
    assert set(proved_before(proofs, "k1", "cpu", every=False)) == asked
    (path,) = cache.iterdir()
    whole = path.read_text()
    for text in ("", "{}", "[]", whole[:40], whole.replace("0.251", "0.151"), whole.replace('"k1"', '"k2"')):
        assert text != whole
        path.write_text(text)
        assert proved_before(proofs, "k1", "cpu", every=False) == {}
    path.write_text(whole)
    path.rename(path.with_name("0123456789abcdef.json"))
    assert proved_before(proofs, "k1", "cpu", every=False) == {}


def test_the_order_of_tritons_is_theirs(out: Path) -> None:
    proofs = opened(out)
    for version in reversed(TRITONS):
        proofs.add_compiled([replace(ONE, triton=version)])
    proofs.add_package("small", "k1", {version: [ONE.key] for version in reversed(TRITONS)})
    assert proofs.tritons("k1") == TRITONS
