"""What goes into the oracle and what comes out."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Request:
    """One request; ``max_tokens`` is its declared output, None for the most the model allows.

    ``prompt_ids`` and ``output_ids`` are its tokens, equal where contents are; None: no request shares a token with it.
    """

    arrival_ticks: int
    prompt_tokens: int
    output_tokens: int
    max_tokens: int | None = None
    prompt_ids: tuple[object, ...] | None = None
    output_ids: tuple[object, ...] | None = None


@dataclass(frozen=True)
class Pool:
    """The KV pool: ``num_blocks * block_size`` slots, and the blocks of host memory to swap to."""

    num_blocks: int
    block_size: int
    host_blocks: int = 0

    @property
    def slots(self) -> int:
        return self.num_blocks * self.block_size


@dataclass(frozen=True)
class Limits:
    """The scheduler's settings. ``max_num_seqs`` None: 2048 for vllm-sosp23 and sglang, 256 for others; batches must be
    given it.

    The last three: TGI's decode steps after which a new batch needs no minimum size, and that minimum as a part of the
    running sequences; the order of SGLang's queue.
    """

    max_model_len: int
    max_num_batched_tokens: int = 2560
    max_num_seqs: int | None = None
    watermark_fraction: float = 0.01
    preemption_mode: str = "recompute"
    ft_max_tokens: int = 2040
    max_waiting_tokens: int = 20
    waiting_served_ratio: float = 0.3
    schedule_policy: str = "lpm"


@dataclass(frozen=True)
class Step:
    """One schedule and the time it took; ids are indices into the list of requests.
    ``running`` holds all that hold slots in the step, a static batch's ended members too. It is empty where a schedule
       preempted and left nothing to run: such a step lasts its swap ticks. ``prefilled`` pairs id and tokens computed,
       padding included. ``preempted`` names every victim, ``swapped_out`` those of them that went to the host. ``buckets``
       gives slots by name. The next two are None where a policy has no positions: ``free_chunks`` the arena's free chunks
       as (first block, blocks) by address, ``largest_free_run_blocks`` the longest run of free blocks, through chunks that
       touch. The last two are the iteration systems' alone: ``decodes`` computes one token each after its prefill,
       ``paused`` holds slots and computes nothing, also where no sequence runs; ``prefilled`` has chunks there.
    """

    start_ticks: int
    ticks: int
    running: tuple[int, ...]
    prefilled: tuple[tuple[int, int], ...]
    preempted: tuple[int, ...]
    swapped_out: tuple[int, ...]
    swapped_in: tuple[int, ...]
    buckets: dict[str, int]
    free_chunks: tuple[tuple[int, int], ...] | None = None
    largest_free_run_blocks: int | None = None
    decodes: tuple[int, ...] = ()
    paused: tuple[int, ...] = ()


@dataclass(frozen=True)
class Outcome:
    """What a simulation leaves. ``requests[i]``: first_scheduled_ticks, first_token_ticks, finish_ticks (None where it
    never came to that), preemptions, token_ticks (one a token), refused (a reason or None)."""

    steps: list[Step]
    requests: list[dict]


@dataclass(eq=False)
class Sequence:
    """A request on its way; compared by identity."""

    index: int
    request: Request
    generated: int = 0
    first_scheduled_ticks: int | None = None
    finish_ticks: int | None = None
    preemptions: int = 0
    refused: str | None = None
    token_ticks: list[int] = field(default_factory=list)

    @property
    def arrival_order(self) -> tuple[int, int]:
        return self.request.arrival_ticks, self.index

    @property
    def computed_tokens(self) -> int:
        """Tokens computed once this step is done: the prompt in its prefill, one more in each step after it.

        Also what a prefill computes: the prompt, and after a recompute preemption what was generated as well.
        """
        return self.request.prompt_tokens + self.generated

    @property
    def final_tokens(self) -> int:
        """Prompt and true output; a preemption leaves it as it is."""
        return self.request.prompt_tokens + self.request.output_tokens

    @property
    def done(self) -> bool:
        return self.generated == self.request.output_tokens

    def add_token(self, now_ticks: int) -> None:
        self.generated += 1
        self.token_ticks.append(now_ticks)

    def summary(self) -> dict:
        return {
            "first_scheduled_ticks": self.first_scheduled_ticks,
            "first_token_ticks": self.token_ticks[0] if self.token_ticks else None,
            "finish_ticks": self.finish_ticks,
            "preemptions": self.preemptions,
            "token_ticks": list(self.token_ticks),
            "refused": self.refused,
        }


def allowed_output_tokens(request: Request, limits: Limits) -> int:
    """The output that the server must be ready for."""
    return limits.max_model_len - request.prompt_tokens if request.max_tokens is None else request.max_tokens


def check(requests: list[Request], limits: Limits) -> None:
    """Refuse what cannot be true, with ValueError."""
    if limits.preemption_mode not in ("recompute", "swap"):
        raise ValueError(f"preemption_mode = {limits.preemption_mode!r}")
    for index, request in enumerate(requests):
        if min(request.prompt_tokens, request.output_tokens) < 1 or request.arrival_ticks < 0:
            raise ValueError(f"request {index} has no tokens or comes before time 0: {request}")
        if request.prompt_tokens + request.output_tokens > limits.max_model_len:
            raise ValueError(f"request {index} is longer than the model's {limits.max_model_len} tokens: {request}")
        if request.output_tokens > allowed_output_tokens(request, limits):
            raise ValueError(f"request {index} generates more than its max_tokens: {request}")
