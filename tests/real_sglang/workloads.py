"""Seeded workloads for SGLang's scheduler and ours."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import lcm

import numpy as np

from fragmeter.sim import Workload
from fragmeter.sim.memory.paged.radix_holdings import Windows
from fragmeter.sim.spec.startup.sglang_states import StateRules
from fragmeter.sim.spec.startup.sglang_unified import SharedBuffer
from fragmeter.sim.workload.content import PromptContent

#: Layers of the model that serves all cases.
LAYERS = 40
#: Bytes of a slot of the KV cache in one buffer with states: the least that it aligns to.
SLOT_BYTES = 32


@dataclass(frozen=True)
class Case:
    """One workload and what serves it.

    Attributes:
        name: The kind of workload and its seed.
        workload: Requests in order of arrival.
        num_slots: Slots of the pool.
        page_size, schedule_policy: As in SGLang.
        max_num_seqs: ``--max-running-requests``.
        max_num_batched_tokens: ``--chunked-prefill-size``.
        prefix_caching: Whether the tree keeps what no request locks.
        enable_priority_scheduling, schedule_low_priority_values_first, disable_priority_preemption: As in SGLang.
        priority_scheduling_preemption_threshold, retraction_policy: As in SGLang.
        overlaps: Whether a step is decided while the one before it runs, as by SGLang's default.
        window: ``sliding_window_size`` of layers with a window; 0 for a model without any.
        window_slots: Slots of their pool.
        spare_states: States of their pool beyond what the requests that run need, of a model with layers that keep one; None without any.
        state_chunk, track_interval: Tokens of a chunk of their kernels, and ``--mamba-track-interval``.
        unified: Whether states and slots share one buffer.
        is_bounded: Whether the longest request is bounded by the slots, as with ``--max-total-tokens``; else by all of that buffer.
        state_bytes, window_bytes: Bytes of a state and of a slot of windows there, where a slot of all tokens has 32.
        extra_buffer: Whether copies of states join the tree in any case; they do with the overlap schedule and with pages.
        step_ticks: Duration of every step.
        hicache_ratio: As in SGLang; 0 is no host tier.
        hicache_write_policy: As in SGLang.
        page_ticks, component_ticks: Duration of the copy of a page between device and host, and of a page of windows or a state.
        step_ticks: Duration of every step, but for what it waits for a load.
    """

    name: str
    workload: Workload
    num_slots: int
    max_num_seqs: int
    max_num_batched_tokens: int
    page_size: int = 1
    schedule_policy: str = "fcfs"
    prefix_caching: bool = True
    enable_priority_scheduling: bool = False
    schedule_low_priority_values_first: bool = False
    disable_priority_preemption: bool = False
    priority_scheduling_preemption_threshold: int = 10
    retraction_policy: str = "length"
    overlaps: bool = False
    window: int = 0
    window_slots: int = 0
    spare_states: int | None = None
    state_chunk: int = 64
    track_interval: int = 256
    unified: bool = False
    state_bytes: int = 32
    window_bytes: int = 32
    is_bounded: bool = True
    extra_buffer: bool = True
    hicache_ratio: float = 0
    hicache_write_policy: str = "write_through"
    page_ticks: int = 0
    component_ticks: int = 0
    step_ticks: int = 100

    @property
    def state_rules(self) -> StateRules:
        """See ``StateRules``."""
        if not self.prefix_caching:
            return StateRules(0, 1, 1, 1)
        if not (self.extra_buffer or self.overlaps or self.page_size > 1):
            return StateRules(0, 1, 1, 3)
        grid, tracked = max(self.state_chunk, self.page_size), 1 + self.overlaps
        return StateRules(tracked, grid, lcm(grid, self.track_interval), 3 + tracked)

    @property
    def window_buffer(self) -> SharedBuffer:
        """The buffer that windows and slots share."""
        total = self.num_slots * SLOT_BYTES + self.window_slots * self.window_bytes
        most = self.num_slots if self.is_bounded else None
        return SharedBuffer.of_windows(total, SLOT_BYTES, self.window_bytes, self.page_size, most)

    @property
    def states(self) -> int:
        """States of their pool; 0 for a model without any."""
        return 0 if self.spare_states is None else self.state_rules.of_request * self.max_num_seqs + self.spare_states

    def without(self, row: int) -> Case:
        """The case without one of its requests."""
        left = np.delete(np.arange(len(self.workload)), row)
        columns = {field: getattr(self.workload, field)[left] for field in self.workload.columns()}
        content = self.workload.content
        if content is not None:
            counts = np.diff(content.offsets)
            kept = np.delete(np.arange(len(content.ids)), np.arange(*content.offsets[row : row + 2]))
            offsets = np.cumsum([0, *counts[left]])
            content = PromptContent(offsets, content.ids[kept], content.tokens[kept])
        return replace(self, workload=replace(self.workload, **columns, content=content))


def _drawn(
    name: str,
    draw: random.Random,
    prompt: int,
    output: int,
    strain: float,
    shared: float = 0.5,
    fixed: float = 0,
    most: int = 24,
) -> Case:
    """Requests, and what serves them.

    Args:
        prompt, output: Longest own prompt and output; most are shorter.
        strain: At 1 the pool just holds the longest request, at 0 three times all of them.
        shared: Chance that prompts begin alike.
        fixed: Share of requests that ignore the end of text.
        most: Requests at most.
    """
    number, now, alike = draw.randint(3, most), 0, draw.random() < shared
    arrivals, prompts, outputs, longer, ignores, pieces = [], [], [], [], [], []
    for _ in range(number):
        now += draw.choice((0, 0, 0, 30, 100, 100, 250, 900))
        stems = [(100 * depth + draw.randrange(3), draw.choice((5, 20, 40, 70))) for depth in range(draw.randrange(3))]
        pieces.append(stems if alike else [])
        arrivals.append(now)
        prompts.append(int(prompt * draw.random() ** 2) + sum(tokens for _, tokens in pieces[-1]) or 1)
        outputs.append(1 + int(output * draw.random() ** 2))
        ignores.append(draw.random() < fixed)
        longer.append(0 if ignores[-1] else draw.choice((0, 0, 3, 12, output)))
    every = [piece for each in pieces for piece in each]
    offsets = np.cumsum([0, *map(len, pieces)])
    content = PromptContent(offsets, *np.array(every, dtype=np.int64).reshape(-1, 2).T)
    total, longest = sum(prompts) + sum(outputs), max(map(sum, zip(prompts, outputs, strict=True)))
    columns = {
        "prompt_tokens": prompts,
        "output_tokens": outputs,
        "max_tokens": np.add(outputs, longer),
        "ignore_eos": np.array(ignores, dtype=np.int64),
    }
    return Case(
        name,
        Workload(
            name, np.array(arrivals), **{field: np.array(each) for field, each in columns.items()}, content=content
        ),
        num_slots=longest + 2 + int(3 * total * (1 - strain) ** 3),
        max_num_seqs=draw.choice((1, 2, 4, 8, 64)),
        max_num_batched_tokens=draw.choice((64, 512, 8192)),
    )


def _fcfs(seed: int) -> Case:
    draw = random.Random(f"fcfs/{seed}")
    return _drawn(f"fcfs/{seed}", draw, 100, 40, draw.random())


def _lpm(seed: int) -> Case:
    draw = random.Random(f"lpm/{seed}")
    return replace(_drawn(f"lpm/{seed}", draw, 100, 40, draw.random(), shared=0.9), schedule_policy="lpm")


def _chunks(seed: int) -> Case:
    """Prompts of several chunks."""
    draw = random.Random(f"chunks/{seed}")
    case = _drawn(f"chunks/{seed}", draw, 300, 30, draw.random())
    order, chunk = draw.choice(("fcfs", "lpm")), draw.choice((7, 16, 33, 64))
    return replace(case, schedule_policy=order, max_num_batched_tokens=chunk)


def _retraction(seed: int) -> Case:
    """Outputs far longer than their reserved share, in a pool that hardly holds them."""
    draw = random.Random(f"retraction/{seed}")
    case = _drawn(f"retraction/{seed}", draw, 30, 300, 0.5 + draw.random() / 2)
    return replace(case, schedule_policy=draw.choice(("fcfs", "lpm")), max_num_seqs=draw.choice((4, 8, 64)))


def _ignore_eos(seed: int) -> Case:
    """Requests that generate all of their declared tokens, and others."""
    draw = random.Random(f"ignore_eos/{seed}")
    case = _drawn(f"ignore_eos/{seed}", draw, 60, 150, 0.3 + 0.7 * draw.random(), fixed=draw.choice((0.5, 1)))
    return replace(case, schedule_policy=draw.choice(("fcfs", "lpm")))


def _uncached(seed: int) -> Case:
    """Without a tree; those that ignore the end of text are admitted by another rule then."""
    draw = random.Random(f"uncached/{seed}")
    case = _drawn(f"uncached/{seed}", draw, 60, 150, 0.3 + 0.7 * draw.random(), fixed=draw.choice((0, 0.5, 1)))
    return replace(case, prefix_caching=False)


def _pages(seed: int) -> Case:
    """Pages of several tokens, with and without a tree, in chunks and under retraction."""
    draw = random.Random(f"pages/{seed}")
    prompt, output = draw.choice(((100, 40), (300, 30), (30, 300)))
    strain = draw.random() if output < 300 else 0.7 + draw.random() / 3
    case = _drawn(f"pages/{seed}", draw, prompt, output, strain, shared=0.8, fixed=draw.choice((0, 0, 0, 0.5)))
    page = draw.choice((2, 16, 16, 32, 64, 64))
    return replace(
        case,
        page_size=page,
        num_slots=_paged(case, page),
        max_num_batched_tokens=page * draw.choice((1, 2, 5, 128)),
        schedule_policy=draw.choice(("fcfs", "lpm")),
        prefix_caching=draw.random() < 0.85,
    )


def _paged(case: Case, page: int) -> int:
    """Slots of a pool of whole pages that holds what the case's pool does."""
    longest = int((-(-case.workload.prompt_tokens // page) * page + case.workload.output_tokens).max())
    return -(-max(case.num_slots, longest + page + 1) // page) * page


def _priorities(seed: int) -> Case:
    """Requests with priorities, often as far apart as the threshold, which preempt each other for seats."""
    draw = random.Random(f"priorities/{seed}")
    prompt, output = draw.choice(((60, 120), (30, 300), (200, 100)))
    # Fewer seats than there is room for, or about as many.
    case = _drawn(
        f"priorities/{seed}",
        draw,
        prompt,
        output,
        draw.choice((0.6, 0.9)) * draw.random(),
        fixed=draw.choice((0, 0, 0.5)),
    )
    page, threshold, work = draw.choice((1, 1, 16)), draw.choice((0, 0, 1, 2, 10)), case.workload
    priorities = np.array([draw.randint(0, 2 * threshold + 3) for _ in range(len(work))])
    return replace(
        case,
        workload=replace(work, priority=priorities, arrival_ticks=work.arrival_ticks * draw.choice((2, 5, 10))),
        page_size=page,
        num_slots=_paged(case, page),
        max_num_seqs=draw.choice((2, 3, 4, 5)),
        max_num_batched_tokens=draw.choice((64, 512, 8192)),
        schedule_policy=draw.choice(("fcfs", "fcfs", "lof")),
        prefix_caching=draw.random() < 0.8,
        enable_priority_scheduling=True,
        schedule_low_priority_values_first=draw.random() < 0.5,
        disable_priority_preemption=draw.random() < 0.1,
        priority_scheduling_preemption_threshold=threshold,
        retraction_policy=draw.choice(("length", "priority")),
    )


def _windows(seed: int) -> Case:
    """Layers with a window in a pool of their own; long sequences, as SGLang frees 128 tokens at a time."""
    draw = random.Random(f"windows/{seed}")
    kind = draw.choice((_fcfs, _lpm, _chunks, _retraction, _ignore_eos, _uncached, _pages, _long, _long))
    case = kind(seed)
    page, window = case.page_size, draw.choice((1, 7, 15, 31, 63, 127))
    # One request can hold its prompt's window, its own, and what it has left since: with less SGLang aborts it.
    least = 3 * window + 128 + 4 * page
    slots = least + int(max(0, case.num_slots - least) * draw.random() ** 2)
    return replace(case, name=f"windows/{seed}", window=window, window_slots=slots // page * page)


def _long(seed: int) -> Case:
    draw = random.Random(f"long/{seed}")
    case = _drawn(f"long/{seed}", draw, 400, 400, draw.random(), shared=0.8, fixed=draw.choice((0, 0, 0.5, 1)))
    page = draw.choice((1, 1, 1, 2, 16))
    return replace(
        case,
        page_size=page,
        num_slots=_paged(case, page),
        max_num_batched_tokens=16 * draw.choice((1, 2, 4, 8, 512)),
        schedule_policy=draw.choice(("fcfs", "lpm")),
    )


def _crowd(seed: int) -> Case:
    """Many short requests that begin alike, in a pool that is full of what they left."""
    draw = random.Random(f"crowd/{seed}")
    case = _drawn(f"crowd/{seed}", draw, 40, 20, 0.5 + draw.random() / 2, shared=1, most=80)
    return replace(case, schedule_policy=draw.choice(("fcfs", "lpm")))


def _states(seed: int) -> Case:
    """Layers with a state; few more states than the requests that run need."""
    draw = random.Random(f"states/{seed}")
    kind = draw.choice(
        (_crowd, _crowd, _crowd, _lpm, _chunks, _retraction, _ignore_eos, _uncached, _pages, _priorities, _long, _long)
    )
    case = kind(seed)
    seqs, page = min(case.max_num_seqs, draw.randint(1, 6)), case.page_size
    return replace(
        case,
        name=f"states/{seed}",
        max_num_seqs=seqs,
        # Chunks that end beside the grid of states, too.
        max_num_batched_tokens=draw.choice((case.max_num_batched_tokens, 20, 50))
        if page == 1
        else case.max_num_batched_tokens,
        spare_states=draw.choice((0, 0, 0, 1, 3, 10, 40)),
        state_chunk=draw.choice((1, 4, 8, 16, 64)),
        track_interval=max(page, draw.choice((8, 32, 64, 256))),
        extra_buffer=draw.random() < 0.5,
    )


def _unified(seed: int) -> Case:
    """States in one buffer with the slots, from smaller than a slot to larger than most prompts."""
    draw, case = random.Random(f"unified/{seed}"), _states(seed)
    return replace(
        case,
        name=f"unified/{seed}",
        unified=True,
        state_bytes=4 * draw.choice((3, 8, 13, 40, 100, 401, 1000)),
        max_num_seqs=draw.choice((case.max_num_seqs, case.max_num_seqs, 8, 20)),
    )


def _unified_windows(seed: int) -> Case:
    """Windows in one buffer with the slots, of as many bytes or of more."""
    draw, case = random.Random(f"unified windows/{seed}"), _windows(seed)
    size = 32 * draw.choice((1, 1, 1, 2, 5))
    bounded = draw.random() < 0.5
    case = replace(case, name=f"unified windows/{seed}", unified=True, window_bytes=size, is_bounded=bounded)
    # Without a tree SGLang decides by holes, which is refused here.
    case = replace(case, prefix_caching=True)
    page, work = case.page_size, case.workload
    windows = Windows(case.window, 0, (0, 0), case.max_num_batched_tokens, 0)
    lengths = [*zip(work.prompt_tokens.tolist(), work.output_tokens.tolist(), strict=True)]
    # SGLang aborts a request that the empty buffer does not hold.
    while not all(
        case.window_buffer.holds(prompt + output + page, windows.needed(prompt, output, page), page)
        and prompt + output + page < case.window_buffer.most_tokens
        for prompt, output in lengths
    ):
        case = replace(case, num_slots=case.num_slots + 16 * page)
    return case


def _hicache(seed: int) -> Case:
    """A host tier, often smaller than the device, behind a pool that hardly holds the requests; copies from fast to slow.

    Requests ask for few long prefixes in turns, so that many have been evicted meanwhile.
    """
    draw = random.Random(f"hicache/{seed}")
    stems = [draw.choice((15, 60, 150, 300)) for _ in range(draw.randint(2, 6))]
    rows = draw.randint(5, 40)
    kinds = [draw.randrange(len(stems)) for _ in range(rows)]
    parts = [draw.choice((1, 1, 0.5)) for _ in range(rows)]
    shared = np.array([max(1, int(stems[kind] * part)) for kind, part in zip(kinds, parts, strict=True)])
    prompts = shared + [draw.choice((1, 5, 30, 120)) for _ in range(rows)]
    outputs = np.array([draw.choice((1, 3, 20, 60)) for _ in range(rows)])
    ignores = np.array([draw.random() < 0.2 for _ in range(rows)], dtype=np.int64)
    longer = np.array([draw.choice((0, 0, 5, 40)) for _ in range(rows)]) * (1 - ignores)
    gap = draw.choice((10, 200, 1000))
    work = Workload(
        f"hicache/{seed}",
        np.cumsum([draw.randrange(2 * gap) for _ in range(rows)]),
        prompts,
        outputs,
        max_tokens=outputs + longer,
        ignore_eos=ignores,
        content=PromptContent(np.arange(rows + 1), np.array(kinds), shared),
    )
    page = draw.choice((1, 1, 1, 2, 16))
    longest = int((prompts + outputs).max())
    case = Case(
        work.name,
        work,
        num_slots=longest + 2 + int(longest * draw.choice((0, 0.2, 0.7, 2))),
        max_num_seqs=draw.choice((1, 2, 4, 64)),
        max_num_batched_tokens=page * draw.choice((3, 16, 64, 8192)),
        page_size=page,
        schedule_policy=draw.choice(("fcfs", "lpm")),
        hicache_ratio=draw.choice((0.3, 0.7, 1.5, 2.0, 4.0)),
        hicache_write_policy=draw.choice(("write_through", "write_through", "write_through_selective")),
        page_ticks=page * draw.choice((0, 1, 1, 3, 20)),
    )
    return replace(case, num_slots=_paged(case, page))


def _hicache_states(seed: int) -> Case:
    """States beside a host tier; few more of them than the requests that run need."""
    draw, case = random.Random(f"hicache_states/{seed}"), _hicache(seed)
    return replace(
        case,
        name=f"hicache_states/{seed}",
        max_num_seqs=min(case.max_num_seqs, draw.randint(1, 6)),
        spare_states=draw.choice((1, 5, 10, 20, 40)),
        state_chunk=draw.choice((1, 4, 8, 16, 64)),
        track_interval=max(case.page_size, draw.choice((8, 32, 64))),
        extra_buffer=draw.random() < 0.5,
        component_ticks=draw.choice((0, 1, 10, 50)),
    )


def _hicache_windows(seed: int) -> Case:
    """Windows beside a host tier; half of the outputs long enough to leave windows."""
    draw, case = random.Random(f"hicache_windows/{seed}"), _hicache(seed)
    page, window = case.page_size, draw.choice((1, 7, 15, 31, 63))
    if draw.random() < 0.5:
        work = case.workload
        longer = np.array([draw.choice((0, 0, 150, 300)) for _ in range(len(work))])
        case = replace(
            case,
            workload=replace(work, output_tokens=work.output_tokens + longer, max_tokens=work.max_tokens + longer),
        )
        case = replace(case, num_slots=_paged(case, page) + case.num_slots // page * page)
    least = 4 * window + 256 + 8 * page
    slots = least + int(max(0, case.num_slots - least) * draw.random() ** 2)
    return replace(
        case,
        name=f"hicache_windows/{seed}",
        window=window,
        window_slots=slots // page * page,
        component_ticks=page * draw.choice((0, 1, 3)),
    )


#: Kinds of workloads, by seed.
KINDS: dict[str, Callable[[int], Case]] = {
    "fcfs": _fcfs,
    "lpm": _lpm,
    "chunks": _chunks,
    "retraction": _retraction,
    "ignore_eos": _ignore_eos,
    "uncached": _uncached,
    "pages": _pages,
    "priorities": _priorities,
    "windows": _windows,
    "states": _states,
    "unified": _unified,
    "unified windows": _unified_windows,
    "hicache": _hicache,
    "hicache_states": _hicache_states,
    "hicache_windows": _hicache_windows,
}


def shrunk(case: Case, differs: Callable[[Case], bool]) -> Case:
    """A case that differs, too, without the requests that it needs not."""
    row = len(case.workload) - 1
    while row >= 0:
        if len(case.workload) > 1 and differs(smaller := case.without(row)):
            case = smaller
        row -= 1
        row = min(row, len(case.workload) - 1)
    return case
