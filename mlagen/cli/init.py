"""`mlagen init`: a spec to begin with, of a known model or from a model's config.json."""

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
@click.option(
    "--from", "config", metavar="CONFIG", help="A model's config.json, the folder that has it, or - for stdin."
)
@click.option("--name", metavar="NAME", help="The spec's name, and the generated package's.")
@click.option(
    "--gpu",
    "gpus",
    multiple=True,
    metavar="GPU",
    help="For this one, such as h200 or sm90; repeatable. all: every target. [this machine's]",
)
@click.option("--for", "engine", type=click.Choice(ENGINES), help="Whose wrappers to take; transformers: --prefill.")
@click.option("--kv-cache-dtype", type=click.Choice(list(CACHE_WORDS)), help="vLLM's word for the cache. [auto]")
@click.option("--prefill", is_flag=True, help="Attention before absorption, which prefill runs.")
@click.option("--indexer", is_flag=True, help="Also the lightning indexer, which picks what sparse attention reads.")
@click.option("--layers", type=click.Choice(LAYERS), help="Which layers, where some have a sliding window.")
@click.option("--dtype", type=click.Choice(["bf16", "fp16"]), help="The model's dtype, instead of the config's.")
@click.option("--softmax-scale", type=click.FloatRange(1e-6, 1e6), help="Factor of the logits, not the config's.")
@click.option("--block-size", type=click.IntRange(min=1), help="Tokens a page of the cache.")
@click.option(
    "--set", "settings", multiple=True, metavar="FIELD=N", help="A field instead of the config's; repeatable."
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
    """Prints a spec to begin with: of a known model by its NAME, such as dsv32, or --from a model's config.json.

    \b
        mlagen init dsv32 > my.yaml
        mlagen init --from config.json --for vllm --gpu h200 > my.yaml
        mlagen build my.yaml

    What a config does not say is asked for; the options that say it go with --from, but for --name and --gpu. Without
    --gpu the spec is for the GPUs of this machine.
    """
    if (known is None) == (config is None):
        got = "neither a NAME nor --from" if known is None else "both a NAME and --from"
        raise UsageError(f"got {got}; takes --from CONFIG, or a NAME: {', '.join(known_names())}")
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
                raise UsageError(f"{option} goes with --from; a known spec, such as {known}, says it itself")
        known_text(known, name=name)  # says what is wrong before a GPU is asked for
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
    """Whether someone can be asked."""
    return sys.stdin.isatty()


def _targets(gpus: tuple[str, ...]) -> tuple[str, ...]:
    """The targets of GPUs by name; without a name those of this machine, or of one that is asked for; empty: all."""
    if ALL in gpus:
        return ()
    if not gpus:
        found = gpus_of_machine()
        if found:
            named = f"{'s' * (len(found) > 1)}, {' and '.join(found)}; give --gpu for another, or --gpu all"
            err.print(f"for this machine's GPU{named}", markup=False, soft_wrap=True)
        elif is_terminal():
            found = [click.prompt("GPU, such as h200, rtx4090, mi300x or sm90, or all", err=True)]
        else:
            raise UsageError("--gpu: missing, and this machine has no GPU; give --gpu h200, of any GPU, or --gpu all")
        return _targets(tuple(found))
    return tuple(dict.fromkeys(map(target_of, gpus)))


def _check_plugin(text: str, engine: str) -> None:
    """Refuses a spec whose cache the engine's backend over a package does not take."""
    spec = parse(text, Path("spec.yaml"))
    if spec.attention is None:  # attention before absorption has wrappers for the engine, and no backend
        return
    with contextlib.suppress(LimitError):  # of a target: `build` says so
        try:
            PLUGINS[engine].plugin_files(make_plan(spec))
        except UsageError as error:
            raise UsageError(f"--for {engine}: {str(error).partition(': ')[2]}") from None


def _read(config: str) -> tuple[str, Path]:
    """The text of a config, and the path that its errors name."""
    if config == STDIN:
        return decode(sys.stdin.buffer.read(CONFIG_FILE.max_bytes + 1), Path("stdin"), CONFIG_FILE), Path("stdin")
    path = Path(config)
    with contextlib.suppress(ValueError):  # a path that no file can have: reading says so
        path = path / "config.json" if path.is_dir() else path
    return read_text(path, CONFIG_FILE), path


def _setting(text: str) -> tuple[str, int | None]:
    """A field and its value, of `--set`."""
    found = re.fullmatch(r"(\w+)=([0-9]{1,9}|none)", text, re.ASCII)
    if found is None or found[1] not in FIELDS:
        raise UsageError(f"--set: got {text!r}; takes FIELD=N, N a number or none, FIELD one of {', '.join(FIELDS)}")
    return found[1], None if found[2] == "none" else int(found[2])
