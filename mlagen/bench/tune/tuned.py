"""Sweeps a spec's attention kernels on the device at hand, and writes their tables: `specs/tuned/<spec>/<target>.yaml`.

The times of a sweep give few tiles (`choose`), the number of programs a multiprocessor that makes the package's own
rule pick the best split count, and the calls that run the sm90 kernel.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import triton

from mlagen import plan as plans
from mlagen.bench.package import load_package
from mlagen.bench.tune.choose import Regime
from mlagen.bench.tune.progress import Progress
from mlagen.bench.tune.sweep import Figure, Sweep, Swept
from mlagen.bench.tune.tunable import DENSE_DECODE, SPARSE_DECODE, SPARSE_FWD, tunables_of
from mlagen.emit.replace import write_atomically
from mlagen.errors import UsageError
from mlagen.plan import Sm90Row, Tile, TileRow, make_plan
from mlagen.plan.tiles.tuned import dump_tuned, tuned_path
from mlagen.spec import Spec, spec_digest

NOTHING = Swept((), (), (), complete=True)


@dataclass(frozen=True)
class Tuned:
    """The tuned tables of a spec on a target.

    Attributes:
        spec_name, target, device, triton: those that they hold for.
        sparse_fwd: tiles of attention over rows; none where the package has no such kernels.
        sparse_decode, dense_decode: tiles of attention over a cache and of dense attention, likewise.
        sparse_fwd_sm90, sparse_decode_sm90, dense_decode_sm90: which calls of each run the sm90 kernel, likewise.
        figures: the measurement behind each row.
        complete: every size of call was swept; False where the budget ended before.
        fits: which kernels they hold for, by family, `Plan.fits`.
        heads: of the model.
    """

    spec_name: str
    target: str
    device: str
    triton: str
    sparse_fwd: tuple[TileRow, ...]
    sparse_decode: tuple[TileRow, ...]
    dense_decode: tuple[TileRow, ...]
    sparse_fwd_sm90: tuple[Sm90Row, ...]
    sparse_decode_sm90: tuple[Sm90Row, ...]
    dense_decode_sm90: tuple[Sm90Row, ...]
    figures: tuple[Figure, ...]
    complete: bool
    fits: Mapping[str, str]
    heads: int

    @property
    def row_count(self) -> int:
        """Rows of all tile tables."""
        return len(self.sparse_fwd) + len(self.sparse_decode) + len(self.dense_decode)

    def text(self) -> str:
        """The tuned file."""
        families = (SPARSE_FWD.name, SPARSE_DECODE.name, DENSE_DECODE.name)
        tables = plans.Tuned(
            tiles={(family, self.target): getattr(self, family) for family in families},
            sm90={family: getattr(self, f"{family}_sm90") for family in families},
        )
        return dump_tuned(
            self.spec_name,
            self.target,
            tables,
            fits=self.fits,
            heads=self.heads,
            device=self.device,
            triton=self.triton,
        )

    def write(self, specs_dir: Path) -> Path:
        """Writes the tuned file below `specs_dir`, and gives its path."""
        path = tuned_path(self.spec_name, self.target, specs_dir)
        write_atomically(path, self.text())
        return path


def tune(
    spec: Spec,
    package_dir: Path,
    *,
    budget: float | None = None,
    log: Path | None = None,
    heads: Collection[int] = (),
    tokens: Collection[int] = (),
    tiles: Collection[Tile] | None = None,
    report: Progress | None = None,
) -> Tuned:
    """Finds the tables of a spec's attention for the current device.

    Args:
        spec: the validated spec.
        package_dir: folder of the package generated from it.
        budget: seconds after which no further tile is tried; the table then follows from the cells measured so far.
        log: JSON lines of measurements; a later call with the same file, package, Triton and device goes on there.
        heads, tokens: sweep only the sizes of call measured at these (of dense attention: rows a KV head, requests);
            others keep the package's rows. Empty: all.
        tiles: portable candidates to keep to, `read_tiles`: those that also fit under other Tritons; None: all.
        report: shows progress.

    Raises:
        UsageError: no device, or the package is not the spec's.
        ToolError: a kernel left the device unusable; a call with the same log goes on behind it.
    """
    deadline = time.monotonic() + budget if budget is not None else None
    if not torch.cuda.is_available():
        raise UsageError("no CUDA or ROCm device: tiles are tuned on a GPU")
    package = load_package(package_dir)
    if package.root.SPEC["spec_sha256"] != spec_digest(spec):
        raise UsageError(f"{package_dir} was generated from another spec", hint=f"mlagen build specs/{spec.name}.yaml")
    plan = make_plan(spec)

    def wanted(regime: Regime) -> bool:
        return (not heads or regime.num_heads in heads) and (not tokens or regime.tokens in tokens)

    swept = {}
    for kernels in tunables_of(spec.wrappers, spec.attention_kind):
        sweep = Sweep(kernels, plan, package, log, deadline, tiles, report or Progress())
        every = kernels.regimes(spec.model.num_heads)
        swept[kernels] = sweep.run(every, [regime for regime in every if wanted(regime)])
    if not swept:
        raise UsageError(f"{spec.name} has no attention kernels whose tiles are tuned")
    device = torch.device("cuda", torch.cuda.current_device())
    families = (SPARSE_FWD, SPARSE_DECODE, DENSE_DECODE)
    sparse_fwd, sparse_decode, dense_decode = (swept.get(kernels, NOTHING) for kernels in families)
    return Tuned(
        spec_name=spec.name,
        target=package.device_facts(device).target,
        device=torch.cuda.get_device_name(device),
        triton=triton.__version__,
        sparse_fwd=sparse_fwd.rows,
        sparse_decode=sparse_decode.rows,
        dense_decode=dense_decode.rows,
        sparse_fwd_sm90=sparse_fwd.sm90_rows,
        sparse_decode_sm90=sparse_decode.sm90_rows,
        dense_decode_sm90=dense_decode.sm90_rows,
        figures=tuple(figure for each in swept.values() for figure in each.figures),
        complete=all(each.complete for each in swept.values()),
        fits=plan.fits,
        heads=spec.model.num_heads,
    )


def summary(tuned: Tuned) -> str:
    """A Markdown table of the gain from tuning."""
    lines = [
        "| call | back end | tile | splits | us | best found us | before us |",
        "| --- | --- | --- | ---: | ---: | ---: | ---: |",
    ]
    for each in tuned.figures:
        back_end = "gluon" if each.sm90 else "triton"
        times = " | ".join(_us(seconds) for seconds in (each.seconds, each.best_seconds, each.before_seconds))
        lines.append(f"| {each.kernels} {each.regime} | {back_end} | {each.tile} | {each.splits} | {times} |")
    return "\n".join(lines) + "\n"


def _us(seconds: float | None) -> str:
    return "–" if seconds is None else f"{seconds * 1e6:.1f}"
