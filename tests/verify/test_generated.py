"""The checked-in packages hold their cases; broken copies of one do not."""

import re
from pathlib import Path

import pytest
import torch
from attention_specs import attention_of
from broken import check_mutants
from checked_in import PACKAGES, package_of, spec_of
from rotation import by_share, drawn

from mlagen.emit import apply, compare, render
from mlagen.plan import load_plan, make_plan
from mlagen.spec import Spec
from mlagen.verify import mismatches, verify_package

pytestmark = pytest.mark.interpreter

ROOT = Path(__file__).parents[2]
PREFILL = {
    path.name for path in PACKAGES if path.name.endswith(("_prefill", "_prefill_tma"))
}  # test_verify_dense_fwd.py
DSV32 = package_of("dsv32")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def messages(package: Path, **options) -> list[str]:
    results = verify_package(package, **options)
    assert len(results) > 6
    return [str(error) for error in mismatches(results)]


@pytest.mark.slow
def test_dsv32_holds_every_case_of_attention_in_the_interpreter(tmp_path):
    apply(compare(render(make_plan(Spec.model_validate(attention_of("dsv32")))), tmp_path / "dsv32"))
    # Cases of variants are for a package's proof.
    choose = lambda tasks: [task for task in tasks if ": variants: " not in task.case]  # noqa: E731
    assert messages(tmp_path / "dsv32", workers=1, targets=["sm80", "sm90", "gfx942"], choose=choose) == []


def modules_of(package: Path) -> str:
    """The texts of its modules; only `__init__.py` names the model."""
    modules = sorted(path for path in package.glob("*.py") if path.name != "__init__.py")
    return "\n".join(path.read_text() for path in modules)


# Of packages that differ in nothing but the model's title, one. Small packages also run every case elsewhere.
DISTINCT = list({modules_of(path): path for path in PACKAGES if path.name not in ("dsv32", *PREFILL)}.values())
SLOW = ("dsv41", "dsv41_fp8", "dsv4_flash_out_fp8", "dsv4_flash_out_rope", "dsv4_pro", "hyv4", "odd", "odd_fp8")
DRAWN = drawn([path.name for path in DISTINCT if path.name not in SLOW], 2)  # in every run
MORE = {
    "glm53": ["*sink*", "*splits*"],
    "hyv4": ["*sink*", "*splits*", "*length*"],
    "odd": ["*sink*", "*length*", "*indices*", "*splits*", "*layout*", "*workspace*"],
    "dsv41": ["sparse_decode*split*", "sparse_decode*length*", "sparse_decode*indices*"],
    "odd_fp8": ["sparse_decode*split*", "sparse_decode*length*", "sparse_decode*layout*"],
}


@pytest.mark.parametrize(
    "package",
    [pytest.param(path, marks=[pytest.mark.slow] if path.name not in DRAWN else [], id=path.name) for path in DISTINCT],
)
@by_share
def test_the_others_hold_what_their_specs_make_different(package, choose):
    only = ["*typical*", "writer*every*", "*block size 53*", "refuses*", *MORE.get(package.name, ())]
    specified = load_plan(spec_of(package.name)).spec.targets
    targets = [target for target in ("sm90", "sm80") if target in specified]  # with e4m3 in hardware and without
    assert messages(package, workers=1, targets=targets, only=only, choose=choose) == []


@pytest.mark.parametrize(
    ("latent", "rope", "d_v"),
    [(23, 8, 31), *(pytest.param(*dims, marks=pytest.mark.slow) for dims in ((31, 8, 31), (9, 0, 9)))],
)
@by_share
def test_v_may_have_any_number_of_columns(tmp_path, latent, rope, d_v, choose):
    text = (ROOT / "specs" / "dsv32.yaml").read_text().replace("name: dsv32", "name: other")
    for name, columns in {"kv_lora_rank": latent, "qk_rope_head_dim": rope, "v_head_dim": d_v}.items():
        text = re.sub(rf"{name}: \d+", f"{name}: {columns}", text)
    (tmp_path / "other.yaml").write_text(re.sub(r"\n +shared_indices: .*", "", text))  # which takes d_v 512
    apply(compare(render(load_plan(tmp_path / "other.yaml")), tmp_path / "other"))
    only = ["*typical*", "*splits: 3*", "*sink*"]
    assert messages(tmp_path / "other", workers=1, targets=["sm90"], only=only, choose=choose) == []


@pytest.mark.slow
def test_a_package_over_a_cache_may_share_rows_too(tmp_path):
    text = (ROOT / "specs" / "dsv32_fp8.yaml").read_text().replace("name: dsv32_fp8", "name: other")
    (tmp_path / "other.yaml").write_text(text.replace("\nattention:\n", "\nattention:\n  shared_indices: 2\n"))
    apply(compare(render(load_plan(tmp_path / "other.yaml")), tmp_path / "other"))
    only = [
        "sparse_decode: typical*",
        "sparse_decode*split*",
        "sparse_fwd: typical*",
        "sparse_fwd: splits: 3",
        "sparse_fwd: neighbours*",
    ]
    assert messages(tmp_path / "other", workers=1, targets=["sm90"], only=only) == []


@pytest.mark.slow
@pytest.mark.mutants
def test_every_mutant_of_dsv32_is_reported(tmp_path):
    check_mutants("mutants.py", DSV32, tmp_path, more_than=40)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("package", PACKAGES, ids=lambda path: path.name)
def test_packages_hold_every_case_on_a_gpu(package):
    assert messages(package, device="cuda", workers=4) == []
