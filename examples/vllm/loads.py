"""What an engine is given to do. Each load returns what JSON holds: sequences, and what else it saw."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from plan import VOCABULARY

LENGTHS = (5, 17, 64, 70, 129, 300, 1200, 2500, 3000)  # of prompts; the longest hold more tokens than the indices name
TOKENS = 24  # generated from each
PREFIXES = (63, 65, 127, 333, 1237, 2111)  # shared tokens
TAILS = (1, 30, 200)  # tokens behind a shared prefix
REQUESTS = 200  # that come and go
ROUNDS = 3  # of a throughput: the first compiles what is left to compile


@dataclass
class Request:
    """A prompt, how many tokens follow it, and the steps of the engine at which it arrives and is taken back."""

    prompt: list[int]
    count: int = TOKENS
    arrives: int = 0
    aborted: int | None = None
    allowed: list[int] | None = None


@dataclass
class Served:
    """What came of requests, by their numbers, and what was seen on the way."""

    results: dict[int, Any] = field(default_factory=dict)
    aborted: int = 0
    steps: int = 0
    shared: int = 0  # steps in which some requests got tokens while others were still without one
    accepted: int = 0  # tokens beyond one a step and request
    seconds: float = 0.0
    decoded: int = 0  # tokens of the steps in which all requests decode
    decoding: float = 0.0  # seconds of these

    def rows(self, numbers: Sequence[int] | None = None) -> list[dict[str, Any]]:
        """Tokens, the log-probability of each, and by how much it leads the next best."""
        return [_row(self.results[number]) for number in (sorted(self.results) if numbers is None else numbers)]


def _row(result: Any) -> dict[str, Any]:
    (output,) = result.outputs
    best = [sorted((one.logprob for one in each.values()), reverse=True) for each in output.logprobs]
    leads = [each[0] - each[1] for each in best]
    return {"tokens": list(output.token_ids), "logprobs": [each[0] for each in best], "leads": leads}


def serve(llm: Any, requests: list[Request], logprobs: int | None = 2) -> Served:
    """Adds each request at its step, and takes the engine from step to step until none is left."""
    engine, served = llm.llm_engine, Served()
    coming = sorted(range(len(requests)), key=lambda number: requests[number].arrives)
    going = sorted(
        (number for number in coming if requests[number].aborted is not None),
        key=lambda number: requests[number].aborted or 0,
    )
    lengths: dict[int, int] = {}  # tokens so far of the requests that are not done
    start = time.perf_counter()
    while coming or engine.has_unfinished_requests():
        while coming and requests[coming[0]].arrives <= served.steps:
            number = coming.pop(0)
            lengths[number] = 0
            add(engine, number, requests[number], logprobs)
        while going and (requests[going[0]].aborted or 0) <= served.steps:
            number = going.pop(0)
            if number in lengths:
                engine.abort_request([str(number)])
                del lengths[number]
                served.aborted += 1
        served.steps += 1
        if engine.has_unfinished_requests():
            decode = len(lengths) == len(requests) and 0 not in lengths.values()
            began = time.perf_counter()
            tokens = step(engine, served, lengths)
            if decode:
                served.decoded += tokens
                served.decoding += time.perf_counter() - began
    served.seconds = time.perf_counter() - start
    return served


def add(engine: Any, number: int, request: Request, logprobs: int | None) -> None:
    """Adds a request to the engine."""
    from vllm import SamplingParams

    options = {"temperature": 0, "ignore_eos": True, "detokenize": False, "logprobs": logprobs}
    sampling = SamplingParams(max_tokens=request.count, allowed_token_ids=request.allowed, **options)
    engine.add_request(str(number), {"prompt_token_ids": request.prompt}, sampling)


def step(engine: Any, served: Served, lengths: dict[int, int]) -> int:
    """Takes the engine a step on; the tokens that came of it."""
    tokens = 0
    for result in engine.step():
        number = int(result.request_id)
        if number not in lengths:
            continue
        length = len(result.outputs[0].token_ids)
        served.accepted += max(length - lengths[number] - 1, 0)
        tokens += length - lengths[number]
        lengths[number] = length
        if result.finished:
            del lengths[number]
            served.results[number] = result
    served.shared += tokens > 0 and 0 in lengths.values()
    return tokens


def prompt(seed: int, length: int) -> list[int]:
    """Random tokens, of the seed and the length alone."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, VOCABULARY, (length,), generator=generator).tolist()


def plain(llm: Any) -> dict[str, Any]:
    """Prompts of many lengths at once, and in how many pairs of prompts that end alike the first token is another."""
    served = serve(llm, [Request(prompt(length, length)) for length in LENGTHS])
    ends = [prompt(100 + number, 4) for number in range(16)]
    firsts = [serve(llm, [Request(prompt(seed, 60) + end, 1) for end in ends]).rows() for seed in (1, 2)]
    differ = sum(a["tokens"] != b["tokens"] for a, b in zip(*firsts, strict=True))
    return {"sequences": served.rows(), "decides": f"{differ} of {len(ends)}"}


def beside(llm: Any) -> dict[str, Any]:
    """By how much the plugin's attention and vLLM's own part on the same inputs; prompts arrive beside decodes."""
    llm.collective_rpc("compare_attention")
    serve(llm, [Request(prompt(length, length), 16, 3 * order) for order, length in enumerate(LENGTHS)])
    return {"apart": llm.collective_rpc("apart")[0]}


def throughput(llm: Any) -> dict[str, float]:
    """Tokens a second, the best of `ROUNDS`: of 64 requests once all of them decode, of 8 prompts of 3000 tokens."""
    short = [Request(prompt(n, 512), 73) for n in range(64)]
    long = [Request(prompt(n, 3000), 1) for n in range(8)]
    decodes = [serve(llm, short, None) for _ in range(ROUNDS)]
    prefill = min(serve(llm, long, None).seconds for _ in range(ROUNDS))
    return {"decode": max(one.decoded / one.decoding for one in decodes), "prefill": 8 * 3000 / prefill}


def mixed(llm: Any) -> dict[str, Any]:
    """Long prompts, computed in chunks, that arrive while others decode."""
    lengths = [(40, 1100, 7, 3000, 129, 700, 63, 2300)[number % 8] + number for number in range(24)]
    served = serve(llm, [Request(prompt(n, n), 24 + n % 25, 2 * order) for order, n in enumerate(lengths)])
    return {"sequences": served.rows(), "steps": served.steps, "shared": served.shared}


def prefix(llm: Any, page: int) -> dict[str, Any]:
    """Prompts that begin alike, after the first of them; whole pages of so many tokens come from the cache."""
    rows, cached = [], []
    for length in PREFIXES:
        shared = prompt(length, length)
        serve(llm, [Request(shared, 1)])
        prompts = [shared + prompt(10_000 * (order + 1) + length, tail) for order, tail in enumerate(TAILS)]
        served = serve(llm, [Request(one) for one in prompts])
        rows += served.rows()
        cached += [[served.results[number].num_cached_tokens, length // page * page] for number in range(len(TAILS))]
    return {"sequences": rows, "cached": cached}


def speculative(llm: Any) -> dict[str, Any]:
    """Prompts that repeat, and answers of few tokens, so that what stood there before is often what comes next."""
    requests = []
    for period, length in ((3, 40), (5, 65), (8, 130), (13, 300), (6, 700), (7, 1500), (11, 2500), (4, 64)):
        pattern = prompt(period, period)
        requests.append(Request((pattern * length)[:length], 48, allowed=sorted(set(pattern))[:4]))
    served = serve(llm, requests)
    return {"sequences": served.rows(), "steps": served.steps, "accepted": served.accepted}


def coming_and_going() -> list[Request]:
    """Requests of random lengths at random steps, of which every tenth is taken back before its end."""
    chance, arrives, requests = random.Random(25), 0, []
    for number in range(REQUESTS):
        arrives += chance.choice((0, 0, 1, 2, 3))
        length = chance.randint(2100, 2600) if number % 25 == 7 else chance.randint(1, 600)
        aborted = arrives + chance.randint(1, 6) if number % 10 == 3 else None
        count = 32 if aborted is not None else chance.randint(1, 32)
        requests.append(Request(prompt(1000 + number, length), count, arrives, aborted))
    return requests


def load(llm: Any) -> dict[str, Any]:
    """200 requests that come and go."""
    requests = coming_and_going()
    served = serve(llm, requests)
    numbers = [number for number, request in enumerate(requests) if request.aborted is None]
    tokens = sum(len(one.outputs[0].token_ids) for one in served.results.values())
    found = {"sequences": served.rows(numbers), "aborted": served.aborted, "rate": tokens / served.seconds}
    return found | {"requests": len(requests)}


def load_alone(llm: Any) -> dict[str, Any]:
    """The same requests, each alone in the engine."""
    kept = [Request(one.prompt, one.count) for one in coming_and_going() if one.aborted is None]
    return {"alone": [serve(llm, [one]).rows()[0] for one in kept]}


def invariant(llm: Any) -> dict[str, Any]:
    """32 requests whose prompts fit one step, some longer than the indices, together; every other one alone."""
    requests = [Request(prompt(n, 5 + 13 * n + 2048 * (n % 8 == 6))) for n in range(32)]
    return {
        "sequences": serve(llm, requests).rows(),
        "alone": [serve(llm, [one]).rows()[0] for one in requests[::2]],
    }
