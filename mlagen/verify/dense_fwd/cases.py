"""The cases of multi-head attention: plain data, made from a spec and from where it runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from mlagen.verify.call.case import SM90, Case
from mlagen.verify.checks import merges, variants
from mlagen.verify.checks.merges import PARTS, STATES, Conventions
from mlagen.verify.dense_fwd.invalid import WRAPPER, refused


@dataclass(frozen=True)
class DenseFwdCase(Case):
    """A call of flash_attn_varlen_func.

    Attributes:
        requests: (rows of q, keys) of each request.
        heads, kv_heads: heads of q, and of k and v.
        causal: the argument.
        scale: softmax_scale as a multiple of d_qk ** -0.5; None: not passed.
        before, after: rows of no request, of q and of k and v each, before the first and past the last.
        beyond: cu_seqlens end at the last int32, past the rows.
        q, k, v, out: layout in memory, a key of LAYOUTS in call.memory; `out` None: the wrapper allocates it.
        hint: max_seqlen_q and max_seqlen_k; None: the longest request's.
        window: window_size; None: not passed.
        sink: pattern of the sink that a merge adds; None: none.
    """

    requests: tuple[tuple[int, int], ...]
    heads: int = 2
    kv_heads: int = 2
    causal: bool = True
    scale: float | None = None
    before: int = 0
    after: int = 0
    beyond: bool = False
    q: str = "contiguous"
    k: str = "contiguous"
    v: str = "contiguous"
    out: str | None = None
    hint: int | None = None
    window: tuple[int, int] | None = None
    sink: str | None = None

    @property
    def kernels(self) -> tuple[str, ...]:
        """The sm90 kernel."""
        return (SM90,)


LENGTHS: dict[str, tuple[tuple[int, int], ...]] = {
    "one row, one key": ((1, 1),),
    "one row, many keys": ((1, 300),),
    "more keys": ((37, 290),),
    "fewer keys": ((150, 37),),
    "equal": ((131, 131),),
    "whole tiles": ((128, 128), (64, 64), (128, 256)),
    "tiles and one": ((129, 129), (65, 65)),
    "tiles less one": ((127, 127), (63, 191)),
    "no keys": ((3, 0),),
    "no rows": ((0, 5),),
    "neither": ((0, 0), (0, 0)),
    "empty ones between": ((0, 3), (2, 2), (0, 0), (0, 4), (3, 0), (4, 9), (0, 1)),
    "many of one row": tuple((1, 1 + 3 * number) for number in range(19)),
}


MIXED = ((5, 70), (0, 9), (1, 1), (33, 33), (7, 0), (1, 131), (40, 21))


def _case(name: str, promise: str, **changes: Any) -> DenseFwdCase:
    return replace(DenseFwdCase("", "", MIXED), name=f"dense_fwd: {name}", promise=promise, **changes)


def _lengths(spec: Mapping[str, Any], big: bool) -> Iterator[DenseFwdCase]:
    own = spec["model"]["num_heads"]
    own_kv = spec["multi_head"]["num_kv_heads"] or own
    for causal, which in ((True, "causal"), (False, "all keys")):
        yield _case(f"typical, {which}", "an ordinary batch gives the reference's", causal=causal, every_target=True)
        for name, requests in LENGTHS.items():
            yield _case(f"lengths: {name}, {which}", "any lengths on either side", requests=requests, causal=causal)
        promise = "NaN before the first request and past the last shows nowhere, and nothing is written there"
        yield _case(f"rows of no request, {which}", promise, before=150, after=70, causal=causal, every_target=True)
    promise = "every stage of shared memory is used again, by a program's next tile too"
    yield _case("long", promise, requests=((300, 700), (130, 900)), only_sm90=True, every_target=True)
    for causal in (True, False):
        promise = "the last request ends with the rows, whatever its end says"
        yield _case(f"lengths: past the rows{', causal' if causal else ''}", promise, beyond=True, causal=causal)
    yield _case("requests: none", "a batch of none, with rows of no request", requests=(), before=2)
    yield _case("rows: none", "a batch without a row gives empty results", requests=((0, 7), (0, 0)))
    for heads, kv_heads in ((1, 1), (3, 3), (5, 5), (6, 3), (5, 1), (10, 2), (4, 1)):
        promise = "heads of their own or in groups"
        yield _case(f"heads: {heads} of {kv_heads}", promise, heads=heads, kv_heads=kv_heads)
    yield _case("heads: none", "no head gives empty results", heads=0)
    long = ((700, 3000), (1, 4000), (2500, 2500), (300, 200)) if big else ((7, 60), (2, 3))
    yield _case("heads: the model's own", "the model's own heads", requests=long, heads=own, kv_heads=own_kv)
    for scale in (300.0, 1.0, 0.25, 2.0**-120):
        promise = "any factor of the logits above 0"
        yield _case(f"scale: {scale:g}", promise, scale=scale, requests=((9, 75), (40, 40), (3, 0)))


def _layouts() -> Iterator[DenseFwdCase]:
    for tensor in ("q", "k", "v", "out"):
        for layout in ("slice", "odd", "transposed", "far"):
            changes: dict[str, Any] = {tensor: layout}
            if layout == "far":
                changes |= {"requests": ((3, 3),), "causal": False}
            yield _case(f"layout: {tensor} {layout}", "rows may lie apart, 2^31 elements too", **changes)
    yield _case("layout: all odd", "no row begins at 16 bytes", q="odd", k="odd", v="odd", out="odd", every_target=True)
    for hint in (0, 1, 64, 65, 1 << 20):
        yield _case(f"hint: {hint}", "max_seqlen_q and max_seqlen_k change no result", hint=hint)


def _windows(window: int) -> Iterator[DenseFwdCase]:
    for left in (0, 4, 63, 64, 99):
        few: dict[str, Any] = {"requests": ((150, 300), (5, 70), (3, 0), (40, 21)), "window": (left, 0)}
        promise = "a row sees the last keys up to its own"
        yield _case(f"window: {left}", promise, every_target=left == 63, **few)
        yield _case(f"window: {left}, by its right side", "a right side of 0 is causal", causal=False, **few)
        few["window"] = (left, -1)
        yield _case(f"window: {left}, keys behind", "a row sees all keys behind its own", causal=False, **few)
    promise = "a left side of -1 has no bound"
    yield _case("window: none, causal by its right side", promise, window=(-1, 0), causal=False)
    yield _case("window: the largest", "a window of more keys than there are", window=(2**31 - 1, 0))
    promise = "a window with loads of single elements"
    yield _case("window: all odd", promise, window=(37, 0), q="odd", k="odd", v="odd", out="odd", every_target=True)
    for name in ("no keys", "no rows", "many of one row", "fewer keys"):
        yield _case(f"window: {name}", "any lengths on either side", requests=LENGTHS[name], window=(7, 0))
    long = ((5, window + 97), (70, window + 3), (1, 3))
    yield _case("window: the model's own", "the model's own window", requests=long, window=(window - 1, 0))


def _variants() -> Iterator[DenseFwdCase]:
    for causal in (True, False):
        few: dict[str, Any] = {"requests": ((5, 40),), "causal": causal, "in_full": True}
        which = "causal" if causal else "all keys"
        yield _case(f"variants: tiles, {which}", variants.PROMISES[variants.TILES], check=variants.TILES, **few)
        odd = dict.fromkeys(("q", "k", "v", "out"), "odd")
        yield _case(f"variants: small, {which}", variants.PROMISES[variants.SMALL], check=variants.SMALL, **odd, **few)


def _contract(wrappers: list[str], sink: str, big: bool) -> Iterator[DenseFwdCase]:
    yield _case("contract: torch's defaults", "torch's defaults are neither read nor changed", check="defaults")
    yield _case("contract: same bits twice", "a second call gives the same bits", check="determinism")
    yield _case("contract: out alone", "without return_softmax_lse out is returned alone", check="out alone")
    yield _case(
        "values: NaN stays in its request",
        "NaN and infinity in a request show in no other",
        requests=((5, 40), (6, 50), (7, 60)),
        check="neighbours",
        every_target=True,
    )
    if STATES in wrappers:
        yield _case("merged: context in chunks", "chunks of a context and the rest merge to the whole", check="chunks")
        yield _case(
            "merged: shared prefix",
            "requests attend to a shared prefix as one, then each to its own keys, and the parts merge to the whole",
            requests=((5, 12), (1, 1), (9, 30), (2, 2)),
            check="cascade",
        )
    if PARTS in wrappers:
        yield _case(
            "merged: any number of parts", "keys in parts, one of them empty, merge to the whole", check="parts"
        )
    for name, changes in merges.chains(wrappers, "none" if sink == "none" else "optional"):
        options = {"check": changes["check"], "sink": changes["sink"], "before": 2, "after": 3}
        yield _case(name, merges.PROMISES[changes["check"]], causal=changes["check"] == "quantised", **options)
    if big:
        yield _case("contract: graph", "a captured call replays on new inputs", check="graph")
        yield _case("large: one request", "a long prefill", requests=((5000, 9000),), heads=4, kv_heads=4)
        yield _case("large: many requests", "hundreds of requests", requests=tuple((n % 9, 7 * n) for n in range(300)))
        yield _case("large: decode", "one row of each of many long requests", requests=((1, 5000),) * 40, heads=16)


def cases(spec: Mapping[str, Any], device: str) -> list[Case]:
    """All cases of a package, none where it lacks the wrapper; see mlagen.verify.families."""
    if WRAPPER not in spec["wrappers"]:
        return []
    big = device == "cuda"
    contract = _contract(spec["wrappers"], Conventions.of(spec).sink, big)
    window = spec["multi_head"].get("window")
    windows = _windows(window) if window else ()
    return [*_lengths(spec, big), *_layouts(), *_variants(), *windows, *contract, *refused(has_window=bool(window))]
