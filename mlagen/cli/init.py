"""`mlagen init`: a first spec, of a known model or from a model's config.json."""

from __future__ import annotations

import contextlib
import re
import sys
from pathlib import Path

import click

from mlagen.cli.console import err
from mlagen.cli.machine import gpus_of_machine
from mlagen.emit import ENGINES as PLUGINS
from mlagen.errors import LimitError, UsageError
from mlagen.plan import make_plan
from mlagen.spec.from_config import CACHE_WORDS, ENGINES, Wishes, spec_from_config
from mlagen.spec.gpus import ALL, TARGETS, target_of
from mlagen.spec.hf_config import CONFIG_FILE, FIELDS, LAYERS
from mlagen.spec.known import known_names, known_text
from mlagen.spec.load import decode, parse, read_text

STDIN = "-"


@click.command()
@click.argument("known", metavar="[NAME]", required=False)
@click.option("--from", "config", metavar="CONFIG", help="A model's config.json, its folder, or - for stdin.")
@click.option("--name", metavar="NAME", help="Name of the spec and of its package.")
@click.option(
    "--gpu",
    "gpus",
    multiple=True,
    metavar="GPU",
    help="GPU to generate for, for example h200 or sm90, or all; repeatable. [default: this machine's GPUs]",
)
@click.option(
    "--for",
    "engine",
    type=click.Choice(ENGINES),
    help="Engine that calls the wrappers. transformers implies --prefill.",
)
@click.option(
    "--kv-cache-dtype", type=click.Choice(list(CACHE_WORDS)), help="Cache dtype, named as in vLLM. [default: auto]"
)
@click.option("--prefill", is_flag=True, help="Multi-head attention before absorption, for prefill.")
@click.option(
    "--indexer", is_flag=True, help="Also generate the lightning indexer, which picks the keys of sparse attention."
)
@click.option("--layers", type=click.Choice(LAYERS), help="Layers to generate for, if the model has two kinds.")
@click.option("--dtype", type=click.Choice(["bf16", "fp16"]), help="Dtype of the model, in place of the config's.")
@click.option("--softmax-scale", type=click.FloatRange(1e-6, 1e6), help="Softmax scale, in place of the config's.")
@click.option("--block-size", type=click.IntRange(min=1), help="Page size of the cache, in tokens.")
@click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="FIELD=N",
    help="Value of a field, in place of the config's; repeatable.",
)
def init(
    known: str | None,
    config: str | None,
    name: str | None,
    gpus: tuple[str, ...],
    engine: str | None,
    kv_cache_dtype: str | None,
    prefill: bool,
    indexer: bool,
    layers: str | None,
    dtype: str | None,
    softmax_scale: float | None,
    block_size: int | None,
    settings: tuple[str, ...],
) -> None:
    """Print a spec: of a known model by its NAME, for example dsv32, or --from a model's config.json.

    \b
        mlagen init dsv32 > my.yaml
        mlagen init --from config.json --for vllm --gpu h200 > my.yaml
        mlagen build my.yaml

    If the config lacks a value, an error names the option that supplies it. A known model takes only --name and --gpu.
    """
    if (known is None) == (config is None):
        got = "neither NAME nor --from" if known is None else "both NAME and --from"
        raise UsageError(f"got {got}; takes --from CONFIG or one NAME: {', '.join(known_names())}")
    if known is not None:
        said = {
            "--for": engine,
            "--kv-cache-dtype": kv_cache_dtype,
            "--prefill": prefill,
            "--indexer": indexer,
            "--layers": layers,
            "--dtype": dtype,
            "--softmax-scale": softmax_scale,
            "--block-size": block_size,
            "--set": settings,
        }
        for option, value in said.items():
            if value:
                raise UsageError(f"{option} needs --from CONFIG; the spec of {known} has its own value")
        known_text(known, name=name)  # reports a wrong name before asking for a GPU
        click.echo(known_text(known, name=name, targets=_targets(gpus)), nl=False)
        return
    values = dict(map(_setting, settings))
    text, file = _read(str(config))
    wishes = Wishes(
        name=name,
        engine=engine,
        kv_cache_dtype=kv_cache_dtype or "auto",
        dtype=dtype,
        softmax_scale=softmax_scale,
        block_size=block_size,
        targets=_targets(gpus) or TARGETS,
        prefill=prefill,
        indexer=indexer,
        layers=layers,
        values=values,
    )
    made = spec_from_config(text, file, wishes)
    if engine in PLUGINS:
        _check_plugin(made.text, engine)
    for note in made.notes:
        err.print(note, markup=False, soft_wrap=True)
    click.echo(made.text, nl=False)


def is_terminal() -> bool:
    """Whether stdin is a terminal, so that the user can be asked."""
    return sys.stdin.isatty()


def _targets(gpus: tuple[str, ...]) -> tuple[str, ...]:
    """Return the targets of named GPUs, or else of this machine's, or else of one the user names. Empty means all."""
    if ALL in gpus:
        return ()
    if not gpus:
        found = gpus_of_machine()
        if found:
            named = f"{'s' * (len(found) > 1)}, {' and '.join(found)}; pass --gpu NAME or --gpu all for others"
            err.print(f"targets: this machine's GPU{named}", markup=False, soft_wrap=True)
        elif is_terminal():
            found = [click.prompt("GPU (for example h200, rtx4090, mi300x or sm90), or all", err=True)]
        else:
            raise UsageError(
                "--gpu: missing, and this machine has no GPU; pass a GPU, for example --gpu h200, or --gpu all"
            )
        return _targets(tuple(found))
    return tuple(dict.fromkeys(map(target_of, gpus)))


def _check_plugin(text: str, engine: str) -> None:
    """Refuse a spec with a cache that the engine's plugin does not support."""
    spec = parse(text, Path("spec.yaml"))
    if spec.attention is None:  # attention before absorption has wrappers for the engine, with or without a plugin
        return
    with contextlib.suppress(LimitError):  # of a target; `build` reports it
        try:
            PLUGINS[engine].plugin_files(make_plan(spec))
        except UsageError as error:
            raise UsageError(f"--for {engine}: {error.message}") from None


def _read(config: str) -> tuple[str, Path]:
    """Return the text of a config, and the path for error messages."""
    if config == STDIN:
        return decode(sys.stdin.buffer.read(CONFIG_FILE.max_bytes + 1), Path("stdin"), CONFIG_FILE), Path("stdin")
    path = Path(config)
    with contextlib.suppress(ValueError):  # an impossible path; reading it reports the error
        if "\0" not in config and not path.exists():
            raise UsageError(f"{path}: no such file; takes the path of a config.json or of its folder, no repository")
        path = path / "config.json" if path.is_dir() else path
    return read_text(path, CONFIG_FILE), path


def _setting(text: str) -> tuple[str, int | None]:
    """Return the field and the value of a `--set`."""
    found = re.fullmatch(r"(\w+)=([0-9]{1,9}|none)", text, re.ASCII)
    if found is None or found[1] not in FIELDS:
        raise UsageError(f"--set: got {text!r}; takes FIELD=N, N a number or none, FIELD one of {', '.join(FIELDS)}")
    return found[1], None if found[2] == "none" else int(found[2])
