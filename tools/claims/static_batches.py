"""Duration of static batches formed by the rules of two published scripts, which differ from the simulator's own rule.

    generate            Hugging Face's, as vLLM's benchmark of 2023 calls it (run_hf of its
                        benchmarks/benchmark_throughput.py): the next request joins while longest prompt + longest
                        output stay within 2,048 tokens and the batch is not full; all are padded to the longest prompt
                        and run for the longest output, each once per requested sample
    FasterTransformer   as Orca's authors serve it (OSDI'22, section 6.2): the waiting requests, up to a limit, form a batch;
                        the first iteration computes as many tokens of every prompt as the shortest one has; the rest
                        of the longer prompts is computed at one token per iteration

A batch of B sequences computes c prompt tokens of each in its first step. Step j = 1, 2 ... computes a token of each
over c + j tokens. No sequence is released before the last step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from fragmeter.sim.cost import StepCost

#: Tokens of the longest prompt and the longest output of one of the benchmark's batches.
GENERATE_TOKENS = 2048


def batch_ticks(cost: StepCost, sequences: int, computed: int, steps: int) -> int:
    """Ticks of a batch of ``steps`` steps; the first step computes ``computed`` prompt tokens of each sequence."""
    pairs = computed * (computed + 1) // 2
    first = cost.step_ticks(0, 0, sequences * computed, sequences * pairs)
    return first + sum(cost.step_ticks(sequences, sequences * (computed + step), 0, 0) for step in range(1, steps))


def generate_ticks(cost: StepCost, prompts: np.ndarray, outputs: np.ndarray, most: int, n: int = 1) -> int:
    """Ticks of the benchmark's batches, one after the other.

    Args:
        prompts, outputs: Tokens, int64 [requests], in the order of service.
        most: Maximum requests of a batch, the script's ``--hf-max-batch-size``.
        n: Samples of each request.
    """
    return sum(
        batch_ticks(cost, n * (end - start), int(prompts[start:end].max()), int(outputs[start:end].max()))
        for start, end in generate_batches(prompts, outputs, most)
    )


def generate_batches(prompts: np.ndarray, outputs: np.ndarray, most: int) -> Iterator[tuple[int, int]]:
    """First request of each batch and the index after its last request."""
    start, prompt, output = 0, 0, 0
    for index, tokens in enumerate(zip(prompts.tolist(), outputs.tolist())):
        longer = max(prompt, tokens[0]), max(output, tokens[1])
        if index > start and (index - start == most or sum(longer) > GENERATE_TOKENS):
            yield start, index
            start, longer = index, tokens
        prompt, output = longer
    yield start, len(prompts)


def fastertransformer_ticks(cost: StepCost, prompts: np.ndarray, outputs: np.ndarray) -> int:
    """Ticks of one batch of FasterTransformer; tokens as int64 [sequences]."""
    shortest = int(prompts.min())
    return batch_ticks(cost, len(prompts), shortest, int((prompts - shortest + outputs).max()))


def finishes(arrivals: np.ndarray, most: int, ticks_of: Callable[[slice], int]) -> np.ndarray:
    """End of each request's batch in ticks, int64 [requests].

    At the end of a batch the waiting requests form the next one, first come first served.

    Args:
        arrivals: Ticks, ascending.
        most: Maximum requests of a batch.
        ticks_of: Duration of a batch of these requests.
    """
    result, start, free = np.zeros(len(arrivals), dtype=np.int64), 0, 0
    while start < len(arrivals):
        begins = max(free, int(arrivals[start]))
        end = min(start + most, int(np.searchsorted(arrivals, begins, side="right")))
        free = begins + ticks_of(slice(start, end))
        result[start:end] = free
        start = end
    return result
