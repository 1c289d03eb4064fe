"""Seeded workloads for a real scheduler and ours: what is asked, of which pool, under which limits."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from fragmeter.sim import Workload
from fragmeter.sim.workload.content import NO_SESSION, PromptContent

from .shapes import Layer, compressed_layers


def number_of_workloads(usual: int) -> int:
    """Workloads of a kind that a test compares: as the variable ``WORKLOADS`` says, for a longer run."""
    return int(os.environ.get("WORKLOADS", usual))


#: How a request ends: at its declared ``max_tokens``, or earlier at a token that stops it.
LENGTH, EOS = "length", "eos"


@dataclass(frozen=True)
class Case:
    """One workload and what serves it.

    Attributes:
        name: The kind of workload and its seed.
        workload: Requests in order of arrival.
        ends: How each request ends, ``LENGTH`` or ``EOS``.
        num_blocks: Blocks of the pool, vLLM's null block included.
        block_size, max_model_len, max_num_seqs, max_num_batched_tokens: As in vLLM.
        prefix_caching: Whether blocks that are freed keep their contents.
        layers: What the model keeps.
        step_ticks: Duration of every step.
        options: Options of the scheduler, by the names of vLLM's command line.
        parallel: Options of vLLM's ``ParallelConfig``; ours are in ``options``, but for pipeline stages, each with ``layers``.
    """

    name: str
    workload: Workload
    ends: tuple[str, ...]
    num_blocks: int
    block_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    prefix_caching: bool
    layers: tuple[Layer, ...] = (Layer(),)
    step_ticks: int = 100
    options: Mapping[str, Any] = field(default_factory=dict)
    parallel: Mapping[str, Any] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        return self.name.partition("/")[0]


@dataclass(frozen=True)
class _Asked:
    """Requests before they are put into columns; ``pieces`` are (id, tokens), ``session`` is ``NO_SESSION`` or a number."""

    arrival_ticks: int
    prompt_tokens: int
    output_tokens: int
    pieces: tuple[tuple[int, int], ...] = ()
    session: int = NO_SESSION


def _columns(name: str, asked: list[_Asked], ends: list[str]) -> Workload:
    asked = sorted(asked, key=lambda one: one.arrival_ticks)
    pieces = [piece for one in asked for piece in one.pieces]
    offsets = np.cumsum([0, *(len(one.pieces) for one in asked)])
    sessions = np.array([one.session for one in asked])
    content = PromptContent(
        offsets,
        np.array([piece for piece, _ in pieces], dtype=np.int64),
        np.array([tokens for _, tokens in pieces], dtype=np.int64),
        sessions if (sessions != NO_SESSION).any() else None,
    )
    output = np.array([one.output_tokens for one in asked])
    longer = np.array([0 if end == LENGTH else 7 for end in ends])
    return Workload(
        name,
        arrival_ticks=np.array([one.arrival_ticks for one in asked]),
        prompt_tokens=np.array([one.prompt_tokens for one in asked]),
        output_tokens=output,
        max_tokens=output + longer,
        content=content,
    )


def _case(name: str, draw: random.Random, asked: list[_Asked], strain: float, **fixed: object) -> Case:
    """A case with what serves it drawn: at ``strain`` 1 the pool just holds the longest request, at 0 three times all.

    Args:
        fixed: Fields of ``Case`` that are not drawn.
    """
    ends = [draw.choice([LENGTH, LENGTH, EOS]) for _ in asked]
    block_size = draw.choice([1, 4, 8, 16, 16, 32])
    longest = max(one.prompt_tokens + one.output_tokens for one in asked)
    total = sum(one.prompt_tokens + one.output_tokens for one in asked)
    max_model_len = longest + draw.choice([0, 1, 50])
    # vLLM does not start where the pool cannot hold a request as long as the model's longest.
    least = -(-max_model_len // block_size) + 1
    most = least + 3 * (total // block_size + len(asked))
    seqs = draw.choice([1, 2, 4, 8, 16, 64])
    case = Case(
        name=name,
        workload=_columns(name, asked, ends),
        ends=tuple(ends),
        num_blocks=least + int((most - least) * (1 - strain) ** 3),
        block_size=block_size,
        max_model_len=max_model_len,
        max_num_seqs=seqs,
        max_num_batched_tokens=seqs + draw.choice([0, 7, 16, 61, 250, 2000]),
        prefix_caching=draw.random() < 0.5,
    )
    return replace(case, **fixed)  # type: ignore[arg-type]


def story(prompt_tokens: int = 5) -> Case:
    """Two requests in an ample pool: three tokens up to the declared length, and two up to an end of text.

    Args:
        prompt_tokens: Of the first request.
    """
    asked = [_Asked(0, prompt_tokens, 3), _Asked(50, 4, 2)]
    ends = [LENGTH, EOS]
    return Case("story", _columns("story", asked, ends), tuple(ends), 21, 4, 20, 4, 16, prefix_caching=False)


def in_vain() -> Case:
    """The first request ends with an end of text, unknown to the next decision; the last one waits for its blocks."""
    asked, ends = [_Asked(0, 4, 2), _Asked(0, 4, 6), _Asked(50, 9, 2)], [EOS, LENGTH, LENGTH]
    return Case("in vain", _columns("in vain", asked, ends), tuple(ends), 6, 4, 20, 4, 16, prefix_caching=False)


def short_of_blocks() -> Case:
    """Three requests for five blocks, all of which need their second one at once."""
    asked, ends = [_Asked(0, 4, 9), _Asked(0, 4, 9), _Asked(0, 4, 6)], [LENGTH] * 3
    work = _columns("short of blocks", asked, ends)
    return Case("short of blocks", work, tuple(ends), 6, 4, 20, 4, 16, prefix_caching=False)


def _lengths(draw: random.Random, prompt: int, output: int) -> tuple[int, int]:
    """A prompt and an output, short ones more often."""
    return 1 + int(prompt * draw.random() ** 2), 1 + int(output * draw.random() ** 2)


def _arrivals(draw: random.Random, number: int, gaps: tuple[int, ...]) -> list[int]:
    now, arrivals = 0, []
    for _ in range(number):
        now += draw.choice(gaps)
        arrivals.append(now)
    return arrivals


def mixed(seed: int) -> Case:
    """Requests that share nothing, now and then."""
    draw = random.Random(f"mixed/{seed}")
    arrivals = _arrivals(draw, draw.randint(1, 90), (0, 37, 100, 250, 3000))
    asked = [_Asked(now, *_lengths(draw, 150, 60)) for now in arrivals]
    return _case(f"mixed/{seed}", draw, asked, draw.choice([0.5, 0.8, 0.95]))


def bursts(seed: int) -> Case:
    """Many at once, then none for a while."""
    draw = random.Random(f"bursts/{seed}")
    asked = []
    for burst in range(draw.randint(1, 7)):
        now = burst * draw.choice([500, 5000, 20_000])
        asked += [_Asked(now, *_lengths(draw, 120, 50)) for _ in range(draw.randint(5, 25))]
    return _case(f"bursts/{seed}", draw, asked, draw.choice([0.6, 0.9]))


def tight(seed: int) -> Case:
    """A pool that just holds the longest request: preemptions at every step, of oneself among them."""
    draw = random.Random(f"tight/{seed}")
    arrivals = _arrivals(draw, draw.randint(5, 70), (0, 0, 100, 700))
    asked = [_Asked(now, *_lengths(draw, 60, 90)) for now in arrivals]
    return _case(f"tight/{seed}", draw, asked, draw.choice([0.9, 0.97, 1.0]))


def prefixes(seed: int) -> Case:
    """Prompts that begin with one of a few texts, or with two of them."""
    draw = random.Random(f"prefixes/{seed}")
    texts = [(number, draw.randint(1, 120)) for number in range(draw.randint(1, 4))]
    asked = []
    for now in _arrivals(draw, draw.randint(5, 90), (0, 0, 60, 100, 900)):
        pieces = tuple(draw.sample(texts, draw.randint(0, min(2, len(texts)))))
        own, output = _lengths(draw, 60, 40)
        asked.append(_Asked(now, sum(tokens for _, tokens in pieces) + own, output, pieces))
    strain = draw.choice([0.6, 0.9, 0.98, 1.0])
    return _case(f"prefixes/{seed}", draw, asked, strain, prefix_caching=True)


def turns(seed: int) -> Case:
    """Sessions: each prompt begins with the prompt and the output of the turn before."""
    draw = random.Random(f"turns/{seed}")
    asked = []
    for session in range(draw.randint(1, 20)):
        now, known = draw.choice([0, 0, 500, 2000]), 0
        for _ in range(draw.randint(1, 6)):
            more, output = _lengths(draw, 40, 30)
            asked.append(_Asked(now, known + more, output, session=session))
            known += more + output
            now += draw.choice([1, 400, 1500, 4000, 9000])
    strain = draw.choice([0.6, 0.9, 0.98, 1.0])
    return _case(f"turns/{seed}", draw, asked, strain, prefix_caching=True)


def chunks(seed: int) -> Case:
    """Prompts longer than the budget of a step."""
    draw = random.Random(f"chunks/{seed}")
    arrivals = _arrivals(draw, draw.randint(3, 40), (0, 100, 350, 2000))
    asked = [_Asked(now, *_lengths(draw, 500, 40)) for now in arrivals]
    seqs = draw.choice([2, 4, 8])
    limits = {"max_num_seqs": seqs, "max_num_batched_tokens": seqs + draw.choice([1, 5, 16, 33, 64])}
    return _case(f"chunks/{seed}", draw, asked, draw.choice([0.6, 0.9, 0.98]), **limits)


def windows(seed: int) -> Case:
    """Layers that keep a window beside layers that keep every token; without a prefix cache."""
    draw = random.Random(f"windows/{seed}")
    arrivals = _arrivals(draw, draw.randint(1, 40), (0, 0, 100, 250, 3000))
    asked = [_Asked(now, *_lengths(draw, 250, 90)) for now in arrivals]
    return _in_windows(draw, _case(f"windows/{seed}", draw, asked, 1.0, prefix_caching=False))


def windows_cached(seed: int) -> Case:
    """The same with a prefix cache: texts in common, turns, or chunks."""
    draw = random.Random(f"windows_cached/{seed}")
    case = draw.choice([prefixes, turns, chunks])(seed)
    return _in_windows(draw, replace(case, name=f"windows_cached/{seed}", prefix_caching=True))


def _in_windows(draw: random.Random, case: Case) -> Case:
    """The case over layers that keep a window, with or without others that keep all tokens."""
    # Of windows vLLM's attention layers choose blocks of whole multiples of 16 tokens.
    size, budget = draw.choice([16, 32]), case.max_num_batched_tokens
    window = min(draw.choice([1, 4, 16, 17, 33, 64, 200]), case.max_model_len - 1)
    kinds = {"f": Layer(), "w": Layer("sliding", window)}
    layers = tuple(kinds[letter] for letter in draw.choice(["fw", "wf", "fww", "wwf", "wfw", "wwwf", "ffw", "w"]))
    # The bound by which vLLM starts, of two steps in flight.
    held = -(-min(window - 1 + 2 * budget, case.max_model_len) // size) + 1
    number = layers.count(kinds["f"])
    least = number * -(-case.max_model_len // size) + (len(layers) - number) * held + 1
    return replace(case, layers=layers, block_size=size, num_blocks=least + draw.choice([0, 0, 1, 5, 20, 100]))


def block_sizes(seed: int) -> Case:
    """Layers with a window beside layers of other heads that keep every token, so that blocks of the one kind have some times the tokens
    of the other's (Gemma 4, MiMo-V2-Flash): with and without a cache."""
    draw = random.Random(f"block_sizes/{seed}")
    case = draw.choice([prefixes, turns, chunks, mixed, tight])(seed)
    full_heads, heads = draw.choice([(1, 2), (1, 2), (2, 1), (1, 4), (4, 1), (1, 3), (3, 1), (2, 4)])
    window = min(draw.choice([1, 4, 16, 17, 33, 64, 200]), case.max_model_len - 1)
    kinds = {"f": Layer(kv_heads=full_heads), "w": Layer("sliding", window, kv_heads=heads)}
    pattern = draw.choice(["fw", "wf", "fww", "wwf", "wfw", "wwwf", "ffw"])
    size, most = draw.choice([16, 16, 32]), max(full_heads, heads)
    sizes = {"f": size * most // full_heads, "w": size * most // heads}
    # The bound by which vLLM starts, of two steps in flight.
    held = -(-min(window - 1 + 2 * case.max_num_batched_tokens, case.max_model_len) // sizes["w"]) + 1
    least = pattern.count("f") * -(-case.max_model_len // sizes["f"]) + pattern.count("w") * held + 1
    return replace(
        case,
        name=f"block_sizes/{seed}",
        layers=tuple(kinds[letter] for letter in pattern),
        block_size=size,
        num_blocks=least + draw.choice([0, 0, 1, 5, 20, 100]),
    )


def states(seed: int) -> Case:
    """Layers with a fixed-size state beside layers that keep every token, with and without a cache: gated delta nets, which
    export no states from within a prefill, or Mamba-2, which does."""
    draw = random.Random(f"states/{seed}")
    case = draw.choice([prefixes, turns, chunks, mixed, tight])(seed)
    # Of 8 key elements a head and so many value elements: blocks of 16 tokens hold a state, or are raised to 32.
    values = draw.choice([8, 40, 80])
    state = Layer("state", state_shapes=((16 + values, 3), (1, values, 8)), state_dtypes=("float16", "float32"))
    kinds = {"f": Layer(), "s": state}
    layers = tuple(kinds[letter] for letter in draw.choice(["sf", "ssf", "fs", "sfsf", "sssf", "ffs", "ssfssf"]))
    size = 32 if values == 80 else 16
    number = min(layers.count(kinds["f"]), layers.count(state))
    pages = [-(-layers.count(kind) // number) for kind in kinds.values()]
    least = pages[0] * -(-case.max_model_len // size) + 2 * pages[1] + 1
    num_blocks = least + draw.choice([0, 0, 2, 5, 20, 100])
    if draw.random() < 0.5:
        layers = tuple(replace(layer, export_tokens=1) if layer is state else layer for layer in layers)
        num_blocks += pages[1]
    return replace(case, name=f"states/{seed}", layers=layers, block_size=16, num_blocks=num_blocks)


def rings(seed: int) -> Case:
    """Layers with a state beside layers of sparse latent attention, with pages of several sizes and a buffer a sequence (GLM-5.3-Flash):
    with and without a cache, and states that prefills export or do not. Requests are as long as vLLM's own workloads, or of a few blocks."""
    draw = random.Random(f"rings/{seed}")
    case = _longer(draw.choice([prefixes, turns, chunks, mixed, tight])(seed), draw.choice([1, 4, 8]))
    # Of one head and latent vectors of so many elements: blocks are raised to 128 or 640 tokens.
    latent = draw.choice([512, 512, 64])
    state = Layer(
        "state",
        state_shapes=((3, 384), (1, 128, 128)),
        state_dtypes=("float16", "float32"),
        export_tokens=draw.choice([0, 16]),
    )
    sparse = (Layer("rows", head_size=latent), Layer("key", 4, head_size=132), Layer("ring", 4, head_size=256))
    pattern = draw.choice(["sf", "ssf", "sssf", "fs", "sfsf", "ssfsf"])
    layers = tuple(layer for letter in pattern for layer in ({"s": (state,), "f": sparse}[letter]))
    size, groups = 128 if latent == 512 else 640, -(-pattern.count("s") // pattern.count("f"))
    # Of the longest sequence: its tokens, a ring, two states a group or three, and the null block.
    least = -(-case.max_model_len // size) + 1 + (2 + (state.export_tokens > 0)) * groups + 1
    num_blocks = least + draw.choice([0, 0, 2, 5, 20, 100])
    return replace(case, name=f"rings/{seed}", layers=layers, block_size=128, num_blocks=num_blocks)


def compressed(seed: int) -> Case:
    """The caches of DeepSeek V4, in blocks of 256, 64, 8 and 4 tokens and windows of three lengths, with and without a cache: requests of a
    few blocks of 256 tokens, some as long as vLLM's own workloads, which have few hits then."""
    draw = random.Random(f"compressed/{seed}")
    case = _longer(draw.choice([prefixes, turns, chunks, mixed, tight])(seed), draw.choice([1, 2, 4]))
    ratios = draw.choice([[0, 4, 128, 4], [4, 128], [128, 4], [0, 4], [4], [0, 0, 0, 4], [4, 4, 128, 0]])
    layers = compressed_layers(ratios, window=draw.choice([128, 128, 64, 200]))
    window = next(layer.tokens for layer in layers if layer.kind == "window")
    # Groups of each window have as many layers as have ratio 4, of which there are fewest.
    windows = [(window, 64)] * -(-len(ratios) // ratios.count(4)) + [(8, 4)] + [(128, 8)] * (128 in ratios)
    # The bound by which vLLM starts, of two steps in flight.
    longest, in_flight = case.max_model_len, 2 * case.max_num_batched_tokens
    held = (-(-min(tokens - 1 + in_flight, longest) // size) + 1 for tokens, size in windows)
    num_blocks = -(-longest // 256) + sum(held) + 1 + draw.choice([0, 0, 1, 5, 20, 100, 400])
    return replace(case, name=f"compressed/{seed}", layers=layers, block_size=256, num_blocks=num_blocks)


def _longer(case: Case, times: int) -> Case:
    """The case with so many times longer requests, and as many times more tokens in a step."""
    work = case.workload
    content = work.content
    assert content is not None
    longer = replace(
        work,
        prompt_tokens=work.prompt_tokens * times,
        output_tokens=work.output_tokens * times,
        max_tokens=None if work.max_tokens is None else work.max_tokens * times,
        content=replace(content, tokens=content.tokens * times),
    )
    return replace(
        case,
        workload=longer,
        max_model_len=case.max_model_len * times,
        max_num_batched_tokens=case.max_num_batched_tokens * times,
    )


#: Every kind of workload, by name.
KINDS: dict[str, Callable[[int], Case]] = {
    make.__name__: make
    for make in (
        mixed, bursts, tight, prefixes, turns, chunks, windows, windows_cached, states, rings, block_sizes, compressed,
    )
}  # fmt: skip


def _long_prefills(case: Case) -> Case:
    """A bound on the tokens of one sequence in a step, fixed or adaptive."""
    draw = random.Random(f"long_prefills/{case.name}")
    tokens = min(draw.choice([1, 3, 8, 16, 17, 40, 200]), case.max_model_len)
    adaptive = draw.choice([False, False, True])
    options = {"long_prefill_token_threshold": tokens, "long_prefill_token_threshold_adaptive": adaptive}
    return with_options(case, options)


def _active(case: Case) -> Case:
    """Fewer sequences at once than the server is sized for."""
    draw = random.Random(f"active/{case.name}")
    return with_options(case, {"max_num_active_seqs": draw.randint(1, max(1, case.max_num_seqs - 1))})


def _first_chunks(case: Case) -> Case:
    """Only the blocks of the first chunk must be free at an admission."""
    return with_options(case, {"scheduler_reserve_full_isl": False})


def _intervals(case: Case) -> Case:
    """Prompts in one of some steps."""
    draw = random.Random(f"intervals/{case.name}")
    return with_options(case, {"prefill_schedule_interval": draw.choice([2, 2, 3, 5, 16, 50])})


def _priorities(case: Case) -> Case:
    """Requests with one of a few priorities; equal ones go by arrival."""
    draw = random.Random(f"priorities/{case.name}")
    most = draw.choice([0, 1, 3, 50])
    priority = np.array([draw.randint(-most, most) for _ in range(len(case.workload))])
    return with_options(
        replace(case, workload=replace(case.workload, priority=priority)), {"scheduling_policy": "priority"}
    )


def _combined(case: Case) -> Case:
    """Several options at once."""
    draw = random.Random(f"combined/{case.name}")
    for name in draw.sample(list(_SINGLE), draw.randint(2, len(_SINGLE))):
        case = _SINGLE[name](case)
    return case


def with_options(case: Case, options: Mapping[str, Any]) -> Case:
    """The case under further options."""
    return replace(case, options={**case.options, **options})


_SINGLE: dict[str, Callable[[Case], Case]] = {
    "long_prefills": _long_prefills,
    "active": _active,
    "first_chunks": _first_chunks,
    "intervals": _intervals,
    "priorities": _priorities,
}
#: Options of the scheduler that change admission, one by one and several at once: each draws its values for a case.
OPTIONS: dict[str, Callable[[Case], Case]] = {**_SINGLE, "combined": _combined}

#: Kinds of one size of blocks, which ``vllm-real`` serves and recordings of the probe are read of.
ONE_SIZE = [kind for kind in KINDS if kind not in ("block_sizes", "compressed")]
