"""The loop that moves time, and what every policy does alike."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from .model import Outcome, Request, Sequence, Step


@dataclass
class Work:
    """What one schedule decided. ``cost_arguments``: decodes, decode_context, prefill_tokens, prefill_pairs.

    ``decodes`` and ``paused`` are for the log, as in ``Step``.
    """

    running: list[Sequence] = field(default_factory=list)
    prefilled: list[tuple[Sequence, int]] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)
    swapped_out: list[Sequence] = field(default_factory=list)
    swapped_in: list[Sequence] = field(default_factory=list)
    decodes: list[Sequence] = field(default_factory=list)
    paused: list[Sequence] = field(default_factory=list)
    swapped_out_blocks: int = 0
    swapped_in_blocks: int = 0
    cost_arguments: tuple[int, int, int, int] = (0, 0, 0, 0)


class System:
    """A policy with its memory; this class serves those that schedule anew in every step."""

    def __init__(self) -> None:
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []

    def refusal(self, sequence: Sequence) -> str | None:
        """Why the pool can never hold the sequence, or None."""
        raise NotImplementedError

    def schedule(self) -> Work:
        """Decide the next step and take its memory; called only when there is something to do."""
        raise NotImplementedError

    def buckets(self) -> dict[str, int]:
        """Every slot of the pool, by bucket, as the last schedule left it."""
        raise NotImplementedError

    def release(self, sequence: Sequence) -> None:
        """Give back the memory of a sequence that finished."""
        raise NotImplementedError

    def rest(self) -> None:
        """There is nothing to do until the next request arrives."""

    def free_chunks(self) -> tuple[tuple[int, int], ...] | None:
        """Free chunks by address; None where the policy has no positions."""
        return None

    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def complete(self, now_ticks: int) -> None:
        """The step is over: a token each, and those that have all theirs leave, in order of request index."""
        for sequence in sorted(self.running, key=lambda sequence: sequence.index):
            sequence.add_token(now_ticks)
            if sequence.done:
                sequence.finish_ticks = now_ticks
                self.running.remove(sequence)
                self.release(sequence)


def cost_arguments(running: list[Sequence], prefilled: list[tuple[Sequence, int]]) -> tuple[int, int, int, int]:
    """Decodes, their context, prompt tokens, and prompt tokens paired with those before them and themselves."""
    prompts = [tokens for _, tokens in prefilled]
    decoding = [sequence for sequence in running if all(sequence is not other for other, _ in prefilled)]
    decode_context = sum(sequence.computed_tokens for sequence in decoding)
    return len(decoding), decode_context, sum(prompts), sum(p * (p + 1) // 2 for p in prompts)


def largest_run(chunks: tuple[tuple[int, int], ...]) -> int:
    """The longest run of blocks through chunks that touch; ``chunks`` by address."""
    longest, run_blocks, run_end = 0, 0, None
    for start, blocks in chunks:
        run_blocks = run_blocks + blocks if start == run_end else blocks
        run_end = start + blocks
        longest = max(longest, run_blocks)
    return longest


def _ids(sequences: list[Sequence]) -> tuple[int, ...]:
    return tuple(sequence.index for sequence in sequences)


def _log(system: System, work: Work, start_ticks: int, ticks: int) -> Step:
    chunks = system.free_chunks()
    return Step(
        start_ticks=start_ticks,
        ticks=ticks,
        running=_ids(work.running),
        prefilled=tuple((sequence.index, tokens) for sequence, tokens in work.prefilled),
        preempted=_ids(work.preempted),
        swapped_out=_ids(work.swapped_out),
        swapped_in=_ids(work.swapped_in),
        buckets=system.buckets(),
        free_chunks=chunks,
        largest_free_run_blocks=None if chunks is None else largest_run(chunks),
        decodes=_ids(work.decodes),
        paused=_ids(work.paused),
    )


def _duration(work: Work, cost: Callable, swap_out: Callable, swap_in: Callable) -> int:
    """Swap-out, swap-in and, if anything runs, the computation."""
    ticks = swap_out(work.swapped_out_blocks) if work.swapped_out_blocks else 0
    ticks += swap_in(work.swapped_in_blocks) if work.swapped_in_blocks else 0
    return ticks + (cost(*work.cost_arguments) if work.running else 0)


def _arrive(system: System, coming: list[Sequence], now_ticks: int) -> None:
    """Move what has arrived by now from ``coming`` to the queue, but for what the pool can never hold."""
    while coming and coming[0].request.arrival_ticks <= now_ticks:
        sequence = coming.pop(0)
        sequence.refused = system.refusal(sequence)
        if sequence.refused is None:
            system.waiting.append(sequence)


def run(system: System, requests: list[Request], cost: Callable, swap_out: Callable, swap_in: Callable) -> Outcome:
    """Schedule, log, wait, complete, until no request is left."""
    sequences = [Sequence(index, request) for index, request in enumerate(requests)]
    coming = sorted(sequences, key=lambda sequence: sequence.arrival_order)
    steps: list[Step] = []
    now_ticks = 0
    while coming or system.has_work():
        if not system.has_work() and now_ticks < coming[0].request.arrival_ticks:
            system.rest()
            now_ticks = max(now_ticks, coming[0].request.arrival_ticks)
        _arrive(system, coming, now_ticks)
        if not system.has_work():
            continue
        work = system.schedule()
        if not work.running and not work.preempted:
            raise AssertionError(f"at tick {now_ticks} the policy neither runs nor preempts, and a request waits")
        for sequence in work.running:
            if sequence.first_scheduled_ticks is None:
                sequence.first_scheduled_ticks = now_ticks
        ticks = _duration(work, cost, swap_out, swap_in)
        steps.append(_log(system, work, now_ticks, ticks))
        now_ticks += ticks
        system.complete(now_ticks)
    return Outcome(steps, [sequence.summary() for sequence in sequences])
