"""Commands that look: show, schema, explain, doctor."""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from cli_specs import Run
from proof_rows import ONE

from mlagen import GENERATOR
from mlagen.emit.render import HEADER_LINES
from mlagen.plan import SparseFwdPlan, load_plan
from mlagen.plan.tiles.findings import Findings, LeftOut, dump_findings, findings_path
from mlagen.plan.tiles.replacements import Replacement
from mlagen.proofs import CasesRow, Proofs, package_key
from mlagen.proofs.sources import family_names
from mlagen.spec.known import specs_dir


def test_the_plan_is_shown_to_people_and_as_json(run: Run) -> None:
    assert "A small model" in run("show", "plan", "specs/small.yaml").stdout
    plan = json.loads(run("show", "plan", "specs/small.yaml", "--json").stdout)
    assert plan["d_qk"] == 48
    assert [target for target, _ in plan["sparse_fwd"]["tiles"]] == ["sm80", "gfx942"]


def test_the_plan_of_attention_over_a_cache_has_its_own_tiles(run: Run, workspace: Path) -> None:
    assert "over the cache" not in run("show", "plan", "specs/small.yaml").stdout
    wrappers = "wrappers: [flash_mla_sparse_fwd, flash_mla_with_kvcache]"
    (workspace / "specs" / "two.yaml").write_text(re.sub("wrappers: .*", wrappers, TWO_CACHES))
    shown = run("show", "plan", "specs/two.yaml").stdout
    table = shown[shown.index("one token over the cache: 0 MFLOP, 0.02 MB") :]
    plan = json.loads(run("show", "plan", "specs/two.yaml", "--json").stdout)
    ((target, rows),) = plan["sparse_decode"]["tiles"]
    assert target == "sm90"
    for row in rows:
        assert f"{row['tile']['block_h']}x{row['tile']['block_n']} w{row['tile']['num_warps']}" in table
        assert f"{row['expected_shared']:,}" in table


def test_rows_for_some_tritons_are_shown_with_their_versions(
    run: Run, workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = load_plan(workspace / "specs" / "small.yaml")
    shown = run("show", "plan", "specs/small.yaml").stdout
    assert f"tiles are valid for: {plan.fits['sparse_fwd']}\n" in shown
    assert "triton" not in shown
    tile = dict(plan.of(SparseFwdPlan).tiles)["sm80"][0].tile
    entry = Replacement(plan.fits["sparse_fwd"], "tiles", "sm80", tile, ((3, 8), (3, 9)), replace(tile, num_warps=8))
    monkeypatch.setattr("mlagen.plan.plan.read_replacements", lambda: (entry,))
    shown = run("show", "plan", "specs/small.yaml").stdout
    assert re.search(rf"sm80 .* 3\.6 to 3\.7 +{tile} ", shown)
    assert re.search(rf"sm80 .* 3\.8 to 3\.9 +{entry.instead} ", shown)
    assert re.search(r"gfx942 .* any +\d+x\d+ ", shown)


def test_show_plan_names_unused_kernels(run: Run, workspace: Path) -> None:
    spec = workspace / "specs" / "mine.yaml"
    spec.write_text((specs_dir() / "dsv32.yaml").read_text().replace("name: dsv32", "name: mine"))
    left = LeftOut(load_plan(spec).fits["sparse_fwd"], "sm90_swap_ab", (3, 9), "8 spills in loops")
    path = findings_path("mine", spec.parent)
    path.parent.mkdir(parents=True)
    path.write_text(dump_findings("mine", Findings(left_out=(left,))))
    shown = run("show", "plan", "specs/mine.yaml").stdout
    assert "sparse_fwd sm90_swap_ab not used under Triton 3.9: 8 spills in loops; its calls run the portable" in shown


def test_show_plan_names_the_origin_of_tuned_rows(run: Run, workspace: Path) -> None:
    text = (specs_dir() / "dsv32.yaml").read_text().replace("name: dsv32", "name: mine")
    (workspace / "specs" / "mine.yaml").write_text(text)
    shown = run("show", "plan", "specs/mine.yaml").stdout
    assert (
        shown.count("tuned: dsv32 on sm90 (measured on NVIDIA H200, triton 3.6.0)") >= 15
    )  # more where versions differ


def test_the_sm90_kernels_are_shown_with_the_calls_that_run_them(run: Run, workspace: Path) -> None:
    assert "sm90 kernel" not in run("show", "plan", "specs/small.yaml").stdout
    (workspace / "specs" / "two.yaml").write_text(TWO_CACHES)
    folder = workspace / "specs" / "tuned" / "two"
    folder.mkdir(parents=True)
    fits = load_plan(workspace / "specs" / "two.yaml").fits["sparse_fwd"]
    calls = "[{max_heads: 16}, {max_heads: 64, min_tokens: 9}, {min_tokens: 1}]"
    (folder / "sm90.yaml").write_text(f"sparse_fwd_sm90: {calls}\nfits: {{sparse_fwd: {fits}}}\n")
    shown = run("show", "plan", "specs/two.yaml").stdout
    sm90 = json.loads(run("show", "plan", "specs/two.yaml", "--json").stdout)["sparse_fwd"]["sm90"]
    (wg1, producer), (under,) = sm90["registers"]["split"], sm90["registers"]["under"]
    assert under[0] == [3, 9]
    for figure in (
        f"{sm90['block_h']} heads and {2 * sm90['block_n']} indices per step",
        f"of WG1 and the producer: {wg1} and {producer}, under Triton 3.9 {under[1][0]} and {under[1][1]};",
        f"{sm90['expected_shared']:,} bytes of shared memory",
        f"{sm90['expected_products']} wgmma",
    ):
        assert figure in shown
    assert "calls that run it, by heads: up to 16: none; up to 64: from 9 tokens; any: from 1 tokens" in shown
    assert "sm90 rescales O when a row's maximum rises by more than 2^7\n" in shown
    exact = TWO_CACHES.replace("kind: sparse", "kind: sparse, rescaling: exact")
    assert exact != TWO_CACHES
    (workspace / "specs" / "two.yaml").write_text(exact)
    shown = run("show", "plan", "specs/two.yaml").stdout
    assert "sm90 rescales O whenever a row's maximum rises\n" in shown


def test_the_layout_names_every_byte(run: Run) -> None:
    shown = run("show", "layout", "specs/small.yaml").stdout
    assert "96 bytes a token, 6,144 bytes a page of 64" in shown
    assert "[64, 96)" in shown
    assert "warning" not in shown


TWO_CACHES = """\
name: two
title: Two caches
model: {num_heads: 4, kv_lora_rank: 448, qk_rope_head_dim: 64, v_head_dim: 512, dtype: bf16}
attention: {kind: sparse, topk: 16, window: 8}
cache: {layout: mxfp8_v41, block_size: 2}
extra_cache: {layout: nvfp4_v41, scale_rule: {divisor: 5}}
wrappers: [flash_mla_sparse_fwd]
targets: [sm90]
"""


def test_both_caches_are_shown_with_their_scales_and_pages(run: Run, workspace: Path) -> None:
    (workspace / "specs" / "two.yaml").write_text(TWO_CACHES)
    lines = run("show", "layout", "specs/two.yaml").stdout.splitlines()
    assert lines[0] == "cache: mxfp8_v41 on 448 + 64 columns: 528 bytes a token, 1,056 bytes a page of 2"
    assert "  row scales: 2^ceil(log2(max(amax, 0.0001) / 448))" in lines
    assert "  row scales: max(amax / 5, 0.001953125), to the nearest e4m3" in lines
    warnings = [line for line in lines if "warning" in line]
    assert [line.split(";")[0] for line in warnings] == [
        "  warning: fp8_ds_mla on 512 columns also has 528 bytes a token"
    ]
    found = json.loads(run("show", "layout", "specs/two.yaml", "--json").stdout)
    assert [(name, one["page_bytes"], one["same_bytes"]) for name, one in found.items()] == [
        ("cache", 1056, ["fp8_ds_mla"]),
        ("extra_cache", 288 * 64, []),
    ]
    assert f"fingerprint {found['cache']['fingerprint']}" in "".join(lines)
    assert f"sha256 {found['extra_cache']['golden_sha256']}" in "".join(lines)


def test_an_inline_layout_is_shown(run: Run, workspace: Path) -> None:
    own = "cache: {layout: {name: mine, fields: [{kind: row, dtype: e4m3}, {kind: tensor_scale, of: row}]}}"
    path = workspace / "specs" / "small.yaml"
    path.write_text(path.read_text().replace("cache: {layout: fp16}", own))
    shown = run("show", "layout", "specs/small.yaml").stdout
    assert "mine on 32 + 16 columns: 48 bytes a token" in shown
    # The same bytes under another name are another layout.
    assert "fp8_per_tensor on 32 + 16 columns also has 48 bytes a token" in shown


def test_all_layouts_are_shown_side_by_side(run: Run) -> None:
    shown = run("show", "layouts").stdout
    found = json.loads(run("show", "layouts", "--json").stdout)
    assert len({one["name"] for one in found}) == 10
    for one in found:
        assert f"{one['row_bytes']:,}" in shown
        assert f"{one['page_bytes']:,}" in shown
        assert all(line in shown for line in one["byte_table"])


INDEXED = """\
name: indexed
title: An indexer alone
model: {num_heads: 4, dtype: bf16}
indexer: {num_heads: 64, head_dim: 128, topk: 512, rope_head_dim: 64, rope: gptj, rope_at: last, compress_ratio: 4}
indexer_cache: {layout: indexer_mxfp4, block_size: 32}
wrappers: [cp_gather_indexer_k_quant_cache]
targets: [sm90]
"""


def test_the_cache_of_an_indexers_keys_is_shown(run: Run, workspace: Path) -> None:
    (workspace / "specs" / "indexed.yaml").write_text(INDEXED)
    lines = run("show", "layout", "specs/indexed.yaml").stdout.splitlines()
    assert lines[0] == "indexer_cache: indexer_mxfp4 on 128 columns: 68 bytes a token, 2,176 bytes a page of 32"
    assert "  [0, 4)   row_scales  4 x ue8m0, one for 32 columns" in lines
    found = json.loads(run("show", "layout", "specs/indexed.yaml", "--json").stdout)
    assert [*found] == ["indexer_cache"]
    assert found["indexer_cache"]["fingerprint"] in "".join(lines)
    shown = run("show", "plan", "specs/indexed.yaml").stdout
    sizes = "indexer: 64 heads of 128 columns, RoPE gptj on the last 64, topk 512, one key for 4 tokens"
    assert f"{sizes}; keys indexer_mxfp4, 68 bytes" in " ".join(shown.split())
    plan = json.loads(run("show", "plan", "specs/indexed.yaml", "--json").stdout)
    assert plan["indexer_layout"]["fingerprint"] == found["indexer_cache"]["fingerprint"]


def test_a_layout_is_shown_without_torch(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlagen.layout.codec", None)
    shown = run("show", "layout", "specs/small.yaml").stdout
    assert "fingerprint" in shown
    assert "golden" not in shown


def test_the_schema_is_json(run: Run) -> None:
    assert json.loads(run("schema").stdout)["additionalProperties"] is False


def test_a_generated_line_is_traced_to_its_template(run: Run, workspace: Path) -> None:
    run("build", "--no-compile", "--no-verify")
    lines = (workspace / "generated" / "small" / "_sparse_fwd_kernels.py").read_text().split("\n")
    number = next(number for number, line in enumerate(lines, 1) if "_splits.online_softmax(scores, m, l)" in line)
    explained = run("explain", f"generated/small/_sparse_fwd_kernels.py:{number}")
    assert explained.exit_code == 0
    assert "_sparse_fwd_kernels.py.jinja:" in explained.stdout
    assert "_splits.online_softmax(scores, m, l)" in explained.stdout


def test_a_spec_outside_of_a_folder_specs_is_found_by_its_name(run: Run, workspace: Path) -> None:
    (workspace / "specs" / "small.yaml").rename(workspace / "my.yaml")
    assert run("build", "my.yaml", "--no-compile", "--no-verify").exit_code == 0
    lines = (workspace / "generated" / "small" / "_sparse_fwd_kernels.py").read_text().split("\n")
    number = next(number for number, line in enumerate(lines, 1) if line.startswith("import"))
    explained = run("explain", f"generated/small/_sparse_fwd_kernels.py:{number}", "--specs", ".")
    assert explained.exit_code == 0
    assert "_sparse_fwd_kernels.py.jinja:" in explained.stdout
    assert run("explain", f"generated/small/_sparse_fwd_kernels.py:{number}").stdout == explained.stdout
    init = workspace / "generated" / "small" / "__init__.py"
    init.write_text(init.read_text().replace("SPEC = {", "SPEC: dict = {"))
    missing = run("explain", "generated/small/sparse_fwd.py:10")
    assert missing.exit_code == 2
    assert "no spec in specs is named 'small'" in missing.stderr
    assert "no such file" in run("explain", "elsewhere/cache.py:10").stderr
    Path("elsewhere.yaml").touch()
    assert "is not a generated file" in run("explain", "elsewhere.yaml:1").stderr


@pytest.mark.parametrize("kept", [True, False])
def test_a_package_in_any_folder_is_explained_by_the_spec_that_it_says_it_is_of(run: Run, workspace: Path, kept: bool):
    assert run("build", "specs/small.yaml", "--out", "elsewhere", "--no-compile", "--no-verify").exit_code == 0
    spec = workspace / "specs" / "small.yaml"
    if kept:
        spec.write_text(spec.read_text().replace("topk: ", "topk: 1"))  # by now another
    else:
        spec.unlink()
    for file in (workspace / "elsewhere" / "small").glob("*.py"):
        text = file.read_text().split("\n")
        number = next(number for number, line in enumerate(text, 1) if number > HEADER_LINES and line)
        explained = run("explain", f"elsewhere/small/{file.name}:{number}")
        assert explained.exit_code == 0, explained.stderr
        assert re.search(rf"\b{file.name}(\.jinja)?:\d+: ", explained.stdout)


def test_a_line_that_cannot_be_traced_says_why(run: Run, workspace: Path) -> None:
    run("build", "--no-compile", "--no-verify")
    path = "generated/small/sparse_fwd.py"
    for place, why in ((f"{path}:1", "header"), (f"{path}:99999", "has lines 1 to"), (path, "takes FILE:LINE")):
        result = run("explain", place)
        assert result.exit_code == 2
        assert why in result.stderr
    edited = workspace / path
    edited.write_text(edited.read_text() + "# mine\n")
    assert "differs from the file" in run("explain", f"{path}:10").stderr


def test_the_doctor_finds_this_machine_fit(run: Run) -> None:
    result = run("doctor", "--json")
    assert result.exit_code == 0
    assert {"python", "torch", "triton", "templates"} <= {check["name"] for check in json.loads(result.stdout)}


def proved(workspace: Path, run: Run, *tritons: str) -> Path:
    """The package of the small spec, with proofs that name the Tritons and all families."""
    assert run("build", "--no-compile", "--no-verify").exit_code == 0
    package = workspace / "generated" / "small"
    proofs = Proofs(package.parent, workspace / "none")
    key = package_key({path.name: path.read_text() for path in package.glob("*.py")})
    proofs.add_compiled([replace(ONE, triton=version) for version in tritons])
    proofs.add_package("small", key, {version: [ONE.key] for version in tritons})
    for family in family_names():
        proofs.add_cases(CasesRow(key, family, "cpu", True, "python 3.11", 1, 1, 0, 0.5))
    proofs.save()
    return package


def doctored(run: Run, *arguments: str) -> tuple[int, dict[str, dict[str, object]]]:
    """The exit code and the checks of doctor, by name."""
    result = run("doctor", "--json", *arguments)
    return result.exit_code, {check["name"]: check for check in json.loads(result.stdout)}


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Callable[[str | None], None]:
    """Names the version of the installed Triton."""

    def name(version: str | None) -> None:
        monkeypatch.setattr(sys.modules["mlagen.cli.show"], "_installed", {"torch": "2.13.0", "triton": version}.get)

    return name


@pytest.mark.parametrize("tritons", [("3.7.1",), ("3.6.0", "3.7.1")], ids=str)
def test_a_package_that_the_installed_triton_proved_is_fit(
    run: Run,
    workspace: Path,
    installed: Callable[[str], None],
    tritons: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(sys.modules, "small", raising=False)
    proved(workspace, run, *tritons)
    installed("3.7.0")  # a minor version stands for its releases
    code, said = doctored(run)
    assert code == 0
    assert said["packages"]["found"] == "1 of 1 in generated are proved with Triton 3.7.0"
    assert "small" not in said
    assert "small" not in sys.modules  # it is read, not imported


def test_doctor_names_the_command_for_a_triton_that_did_not_prove_a_package(
    run: Run, workspace: Path, installed: Callable[[str], None]
) -> None:
    proved(workspace, run, "3.6.0", "3.7.1")
    installed("3.8.0")
    code, said = doctored(run)
    assert code == 1
    assert said["triton"]["ok"] is True
    assert said["small"] == {
        "name": "small",
        "ok": False,
        "found": "proved with Triton 3.6.0, 3.7.1; not with 3.8.0",
        "fix": "mlagen build specs/small.yaml --triton 3.8",
    }
    result = run("doctor")
    assert "fix with: mlagen build specs/small.yaml --triton 3.8" in result.stdout
    assert result.stderr == "failed checks: small; the lines above name their fixes\n"


@pytest.mark.parametrize(("version", "nearest"), [("3.5.1", "3.6.0"), ("3.10.0.dev20270101+git1", "3.9.0")])
def test_a_triton_out_of_the_range_is_not_ok(
    run: Run, workspace: Path, installed: Callable[[str], None], version: str, nearest: str
) -> None:
    proved(workspace, run, "3.6.0", "3.9.0")
    installed(version)
    code, said = doctored(run)
    assert code == 1
    for name, found in (
        ("triton", f"{version}; mlagen supports 3.6 to 3.9"),
        ("small", f"proved with Triton 3.6.0, 3.9.0; not with {version}"),
    ):
        assert (said[name]["ok"], said[name]["found"]) == (False, found)
        assert said[name]["fix"] == f"pip install 'triton=={nearest}'"


def test_a_missing_tool_is_worse_than_a_triton_out_of_the_range(
    run: Run, workspace: Path, installed: Callable[[str | None], None]
) -> None:
    proved(workspace, run, "3.9.0")
    installed(None)
    code, said = doctored(run)
    assert code == 3
    assert said["triton"]["fix"] == "pip install 'triton==3.9.0'"


def test_a_package_that_is_not_as_this_mlagen_makes_it_is_told_with_the_command(
    run: Run, workspace: Path, installed: Callable[[str], None]
) -> None:
    installed("3.7.1")
    package = proved(workspace, run, "3.7.1")
    init, splits, kernels = (package / name for name in ("__init__.py", "_splits.py", "_sparse_fwd_kernels.py"))
    build, original, header = "mlagen build specs/small.yaml", splits.read_text(), init.read_text()
    splits.write_text(f"{original}# mine\n")
    assert fault_of(run) == ("edited by hand: _splits.py", f"{build} --force")
    splits.write_text(original)
    assert fault_of(run) is None
    init.write_text(header.replace(GENERATOR, "mlagen 0.0", 1))
    assert fault_of(run) == (f"built by mlagen 0.0; this is {GENERATOR}", build)
    init.write_text(header)
    head, _, body = kernels.read_text().split("\n", 2)
    body += "\nONE = 1\n"
    signed = f"# body {hashlib.sha256(body.removeprefix(chr(10)).encode()).hexdigest()[:16]}"
    whole = kernels.read_text()
    kernels.write_text("\n".join([head, signed, body]))
    assert fault_of(run) == ("proved with no Triton: no proof of its text in generated/proofs", build)
    kernels.write_text(whole)
    assert fault_of(run) is None
    (workspace / "generated" / "proofs" / "verify.json").unlink()
    assert fault_of(run) == ("not proved: no proof of its cases in generated/proofs", build)
    (workspace / "specs" / "small.yaml").rename(workspace / "mine.yaml")
    assert fault_of(run) == ("not proved: no proof of its cases in generated/proofs", "mlagen build mine.yaml")


def fault_of(run: Run) -> tuple[object, object] | None:
    """The finding about the small package, and the command that fixes it."""
    code, said = doctored(run)
    assert code == ("small" in said)
    return (said["small"]["found"], said["small"]["fix"]) if "small" in said else None


def test_the_doctor_looks_where_it_is_told(run: Run, workspace: Path, installed: Callable[[str], None]) -> None:
    proved(workspace, run, "3.6.0").parent.rename(workspace / "other folder")
    installed("3.7.1")
    assert doctored(run)[1]["packages"]["found"] == "none in generated"
    code, said = doctored(run, "--out", "other folder")
    assert code == 1
    assert said["small"]["fix"] == "mlagen build specs/small.yaml --out 'other folder' --triton 3.7"


def test_the_tritons_beside_the_installed_one_are_told(
    run: Run, workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(workspace / "cache"))
    assert doctored(run)[1]["tritons"]["ok"] is None
    for version in ("3.10.0", "3.8.0"):
        (workspace / "cache" / "mlagen" / "triton" / version / "triton").mkdir(parents=True)
        (workspace / "cache" / "mlagen" / "triton" / version / "triton" / "__init__.py").touch()
    (workspace / "cache" / "mlagen" / "triton" / "3.9.0").mkdir()  # an installation that broke off
    found = f"3.8.0, 3.10.0 in {workspace / 'cache' / 'mlagen' / 'triton'}"
    assert doctored(run)[1]["tritons"]["found"] == found


def test_tuning_without_a_gpu_says_so(run: Run) -> None:
    import torch

    if not torch.cuda.is_available():
        result = run("tune", "specs/small.yaml")
        assert result.exit_code == 2
        assert "GPU" in result.stderr
