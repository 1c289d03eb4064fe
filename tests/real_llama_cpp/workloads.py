"""Seeded loads for llama.cpp's server and ours: requests, and the server's slots, cells and batch size."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from fragmeter.sim import Workload
from fragmeter.sim.workload.content import NO_SESSION, PromptContent

#: Duration of every step. The unit of arrivals.
STEP_TICKS = 100
#: llama.cpp pads contexts to a multiple of so many cells.
PADDING = 256
#: Tokens of the model's vocabulary, and the first of them that is a word.
TOKENS, FIRST = 1024, 3


@dataclass(frozen=True)
class Case:
    """One load and what serves it.

    Attributes:
        name: The kind of load and its seed.
        workload: Requests in order of arrival, no two at one tick.
        slots: ``--parallel``.
        cells: ``--ctx-size``.
        max_num_batched_tokens: ``--batch-size``.
        unified: ``--kv-unified``.
        caching: Whether prompts may begin alike. Where not, the server has its default prompt cache in host memory, in which
            no prompt finds anything.
    """

    name: str
    workload: Workload
    slots: int
    cells: int
    max_num_batched_tokens: int
    unified: bool
    caching: bool


@dataclass
class _Request:
    arrival_ticks: int
    prompt_tokens: int
    output_tokens: int
    pieces: tuple[tuple[int, int], ...] = ()
    session: int = NO_SESSION


def _workload(name: str, requests: list[_Request], caching: bool, sparsity: int) -> Workload:
    """Columns of the requests, times between them multiplied by ``sparsity``, later ones of a tick moved to the next."""
    requests = sorted(requests, key=lambda request: request.arrival_ticks)
    arrivals: list[int] = []
    for request in requests:
        arrivals.append(max(request.arrival_ticks * sparsity, arrivals[-1] + 1 if arrivals else 0))
    pieces = [piece for request in requests for piece in request.pieces]
    sessions = np.array([request.session for request in requests])
    content = PromptContent(
        np.cumsum([0, *(len(request.pieces) for request in requests)]),
        np.array([piece for piece, _ in pieces], dtype=np.int64),
        np.array([tokens for _, tokens in pieces], dtype=np.int64),
        sessions if (sessions != NO_SESSION).any() else None,
    )
    return Workload(
        name,
        arrival_ticks=np.array(arrivals),
        prompt_tokens=np.array([request.prompt_tokens for request in requests]),
        output_tokens=np.array([request.output_tokens for request in requests]),
        content=content if caching else None,
    )


def _arrivals(draw: random.Random, requests: int) -> list[int]:
    gaps = draw.choice([(0,), (0, 0, 120), (50, 170, 900), (3000,), (0, 40, 700, 4000)])
    now, arrivals = 0, []
    for _ in range(requests):
        arrivals.append(now)
        now += draw.choice(gaps)
    return arrivals


def _length(draw: random.Random, most: int) -> int:
    return 1 + int((most - 1) * draw.random() ** 2)


def alone(draw: random.Random, most: int) -> list[_Request]:
    """Requests that share nothing."""
    return [
        _Request(now, _length(draw, most * 2 // 3), _length(draw, most // 3))
        for now in _arrivals(draw, draw.randint(3, 40))
    ]


def prefixes(draw: random.Random, most: int) -> list[_Request]:
    """Prompts that begin with one or two of a few texts; some are nothing else."""
    texts = [(number, _length(draw, most // 4)) for number in range(draw.randint(1, 4))]
    requests = []
    for now in _arrivals(draw, draw.randint(5, 40)):
        pieces = tuple(draw.sample(texts, draw.randint(0, min(2, len(texts)))))
        own = _length(draw, most // 4) if not pieces or draw.random() < 0.8 else 0
        prompt = sum(tokens for _, tokens in pieces) + own
        requests.append(_Request(now, prompt, _length(draw, most // 4), pieces))
    return requests


def turns(draw: random.Random, most: int) -> list[_Request]:
    """Chats: a prompt begins with the prompt and the output of the turn before, which may still run."""
    requests = []
    for session in range(draw.randint(1, 8)):
        now, known = draw.choice([0, 0, 500, 2000]), 0
        for _ in range(draw.randint(1, 6)):
            more, output = _length(draw, most // 5), _length(draw, most // 5)
            if known + more + output > most:
                break
            requests.append(_Request(now, known + more, output, session=session))
            known += more + output
            now += draw.choice([1, 400, 1500, 4000, 9000])
    return requests


def _case(
    kind: str, requests: Callable[[random.Random, int], list[_Request]], unified: bool, caching: bool, seed: int
) -> Case:
    name = f"{kind}/{seed}"
    draw = random.Random(name)
    slots = draw.choice([1, 2, 2, 3, 4, 8])
    context = PADDING * draw.choice([1, 1, 2])
    # A unified cache has cells for all slots at once, or for a part of them.
    most = min(context, draw.choice([1, 2, 4, 8]) * context // slots) if unified else context
    return Case(
        name=name,
        # Far apart they leave slots idle, which lose what they keep.
        workload=_workload(name, requests(draw, max(most, 8)), caching, draw.choice([1, 10, 50]) if unified else 1),
        slots=slots,
        cells=context if unified else context * slots,
        # llama-server does not start with batches of one token.
        max_num_batched_tokens=max(slots, 2) + draw.choice([0, 7, 16, 61, 250, 2000]),
        unified=unified,
        caching=caching,
    )


Kind = Callable[[int], Case]


def _kind(name: str, requests: Callable[[random.Random, int], list[_Request]], unified: bool, caching: bool) -> Kind:
    return lambda seed: _case(name, requests, unified, caching, seed)


#: A load by its seed, by kind.
KINDS: dict[str, Kind] = {
    f"{cache} {requests.__name__}": _kind(f"{cache} {requests.__name__}", requests, cache == "unified", caching)
    for cache in ("split", "unified")
    for requests, caching in ((alone, False), (prefixes, True), (turns, True))
}
