"""The loads of ``make server-check``, as arguments of ``vllm bench serve``.

Two servers with the same model: the pool of one holds every request that may run, the pool of the other is full much earlier,
so that it preempts. Lengths are random or those of conversations (ShareGPT, drawn from its published marginals); contents
repeat in shared prefixes and in the growing prompts of sessions. The first load of the first server ramps up, and half of its
prompts share prefixes: it covers every batch size, and chunks after short and long contexts. Step times are calibrated on
it alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from fragmeter.traces import sample

from .server import VOCABULARY, word

MAX_MODEL_LEN, BLOCK_SIZE = 2048, 32
_FLAGS = {
    "block-size": BLOCK_SIZE,
    "max-model-len": MAX_MODEL_LEN,
    "max-num-seqs": 32,
    "max-num-batched-tokens": 512,
}
#: Conversations in the file of prompts, and the longest of them.
_CONVERSATIONS, _LONGEST = 400, 1000
#: Sessions, turns of each, seconds between two turns, and tokens that a turn adds to the prompt.
_SESSIONS, _TURNS, _PAUSE_S, _ADDED = 12, 9, 3.5, (32, 96)
#: Requests that ramp up, the rates at the start and the end (requests/s), and the prefixes that half of them share.
_RAMP, _RAMP_RPS, _PREFIXES = 130, (1.0, 7.0), 8
_SEED = 20


@dataclass(frozen=True)
class Load:
    """One call of ``vllm bench serve``.

    Attributes:
        name: Name in results.
        requests: Number of requests.
        arguments: Further arguments.
    """

    name: str
    requests: int
    arguments: tuple[str, ...]


@dataclass(frozen=True)
class Session:
    """A server and the loads that it serves, one after the other.

    Attributes:
        name: Name of the folder with its results.
        flags: Flags of ``vllm serve``.
        loads: In order.
        times: How many times as many requests its ramp has as that of a CPU.
    """

    name: str
    flags: Mapping[str, int]
    loads: tuple[Load, ...]
    times: int = 1


def _random(name: str, requests: int, *pace: str, seed: int) -> Load:
    lengths = ("--random-input-len", "200", "--random-output-len", "100", "--random-range-ratio", "0.9")
    return Load(f"random-{name}", requests, ("--dataset-name", "random", *lengths, *pace, "--seed", str(seed)))


def _sharegpt(name: str, requests: int, *pace: str, seed: int) -> Load:
    data = ("--dataset-name", "sharegpt", "--dataset-path", "sharegpt.json")
    return Load(f"sharegpt-{name}", requests, (*data, *pace, "--seed", str(seed)))


def _prefixes(name: str, requests: int, *pace: str, seed: int) -> Load:
    lengths = {"prefix": 256, "suffix": 64, "output": 64}
    data = [each for what, tokens in lengths.items() for each in (f"--prefix-repetition-{what}-len", str(tokens))]
    data += ["--dataset-name", "prefix_repetition", "--prefix-repetition-num-prefixes", "8"]
    return Load(f"prefixes-{name}", requests, (*data, *pace, "--seed", str(seed)))


def _trace(name: str, file: str, requests: int) -> Load:
    labels = {"timestamp": "timestamp", "input-length": "input_length", "output-length": "output_length"}
    data = ["--dataset-name", "timed_trace", "--dataset-path", file, "--timed-trace-sec-multiplier", "0.001"]
    data += ["--timed-trace-chunk-hash-size", str(BLOCK_SIZE), "--timed-trace-label-hash-ids", "hash_ids"]
    data += [each for name, label in labels.items() for each in (f"--timed-trace-label-{name}", label)]
    return Load(name, requests, (*data, "--seed", "0"))


_BURST = ("--request-rate", "inf")
_CHATS = _trace("sessions", "sessions.jsonl", _SESSIONS * _TURNS)
SESSIONS = (
    Session(
        "ample",
        _FLAGS | {"num-gpu-blocks-override": 1200},
        (
            _trace("ramp", "ramp.jsonl", _RAMP),
            _random("light", 45, "--request-rate", "1.5", seed=2),
            _random("medium", 80, "--request-rate", "3", seed=3),
            _random("saturated", 140, *_BURST, seed=4),
            _sharegpt("medium", 30, "--request-rate", "1", seed=5),
            _sharegpt("closed", 50, *_BURST, "--max-concurrency", "12", seed=6),
            _prefixes("medium", 112, "--request-rate", "4", seed=7),
            _CHATS,
        ),
    ),
    Session(
        "tight",
        _FLAGS | {"num-gpu-blocks-override": 130},
        (
            _random("medium", 80, "--request-rate", "3", seed=8),
            _random("saturated", 120, *_BURST, seed=9),
            _sharegpt("saturated", 40, *_BURST, seed=10),
            _prefixes("saturated", 144, *_BURST, seed=11),
            _CHATS,
        ),
    ),
)
#: Where step times are calibrated.
CALIBRATION = "ample", "ramp"


#: Loads of the first session that one server serves in some minutes: the calibration, requests that arrive, and full servers.
SHORT = ("ramp", "random-medium", "random-saturated", "sharegpt-closed", "prefixes-medium")
#: Serves first, and tells the speed of a server.
SPEED = "speed"
#: Output tokens/s with which the rates of all loads are those of their names.
PACE_TOKENS_PER_S = 500


def short(times: int = 1) -> Session:
    """The short session of one server.

    Args:
        times: For a GPU: so many times as many sequences and requests as for a CPU, over a pool of vLLM's own size; 1 is the CPU's.
    """
    session = SESSIONS[0]
    flags = dict(session.flags)
    if times > 1:
        del flags["num-gpu-blocks-override"]
        flags |= {"max-num-seqs": times * flags["max-num-seqs"], "max-num-batched-tokens": 2048}
    loads = (_random(SPEED, 60, *_BURST, seed=12), *(load for load in session.loads if load.name in SHORT))
    loads = (replace(loads[0], name=SPEED), *loads[1:])
    return Session(session.name, flags, tuple(_larger(load, times) for load in loads), times)


def _larger(load: Load, times: int) -> Load:
    arguments = list(load.arguments)
    if "--max-concurrency" in arguments:
        place = arguments.index("--max-concurrency") + 1
        arguments[place] = str(times * int(arguments[place]))
    return replace(load, requests=times * load.requests, arguments=tuple(arguments))


def at_rates(session: Session, factor: float) -> Session:
    """The session with all request rates multiplied."""
    rates = ("--request-rate", "--timed-trace-sec-multiplier")

    def paced(arguments: tuple[str, ...]) -> tuple[str, ...]:
        found = list(arguments)
        for place, (name, value) in enumerate(zip(arguments, arguments[1:])):
            if name in rates and value != "inf":
                # A timed trace has the time of a unit, not a rate.
                found[place + 1] = str(float(value) / factor if name == rates[-1] else float(value) * factor)
        return tuple(found)

    return replace(session, loads=tuple(replace(load, arguments=paced(load.arguments)) for load in session.loads))


def write_data(folder: Path, times: int = 1) -> None:
    """Write the files that the loads name.

    Args:
        times: See ``Session``.
    """
    random = np.random.default_rng(_SEED)
    lengths = sample("vllm_sosp23_sharegpt_opt", _CONVERSATIONS, random, _LONGEST)
    conversations = [
        {"conversations": [{"value": _text(random, tokens)} for tokens in pair]}
        for pair in zip(lengths.prompt_tokens.tolist(), lengths.output_tokens.tolist(), strict=True)
    ]
    (folder / "sharegpt.json").write_text(json.dumps(conversations))
    for name, lines in (("sessions", _turns(random)), ("ramp", _ramp(random, times * _RAMP))):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def _text(random: np.random.Generator, tokens: int) -> str:
    return " ".join(map(word, random.integers(3, VOCABULARY, tokens).tolist()))


def _turns(random: np.random.Generator) -> Iterator[dict[str, object]]:
    """Turns in order of time; a prompt is the blocks of the turn before and some more."""
    starts = random.uniform(0, _PAUSE_S, _SESSIONS)
    added = random.integers(*_ADDED, (_SESSIONS, _TURNS), endpoint=True)
    prompts = added.cumsum(axis=1)
    outputs = random.integers(16, 64, (_SESSIONS, _TURNS))
    times = starts[:, None] + _PAUSE_S * np.arange(_TURNS) + random.uniform(0, _PAUSE_S / 2, (_SESSIONS, _TURNS))
    for place in times.ravel().argsort(kind="stable").tolist():
        session, turn = divmod(place, _TURNS)
        tokens = int(prompts[session, turn])
        yield {
            "timestamp": round(float(times[session, turn]) * 1e3),
            "input_length": tokens,
            "output_length": int(outputs[session, turn]),
            "hash_ids": [session * 1000 + block for block in range(-(-tokens // BLOCK_SIZE))],
        }


def _ramp(random: np.random.Generator, requests: int) -> Iterator[dict[str, object]]:
    """Requests at a rate that grows linearly; every other one starts with one of a few prefixes."""
    first, last = _RAMP_RPS
    duration = 2 * requests / (first + last)
    # The expected number of arrivals until t is first * t + (last - first) * t^2 / (2 * duration).
    expected = random.exponential(size=requests).cumsum() * (requests / (requests + 1))
    growth = (last - first) / (2 * duration)
    times = (np.sqrt(first**2 + 4 * growth * expected) - first) / (2 * growth)
    prefixes = random.integers(1, 24, _PREFIXES)
    for place, time in enumerate(times.tolist()):
        prefix = place // 2 % _PREFIXES
        shared = [prefix * 1000 + block for block in range(prefixes[prefix])] if place % 2 else []
        own = int(random.integers(8, 128) if shared else random.integers(8, 400))
        fresh = [(_PREFIXES + place) * 1000 + block for block in range(-(-own // BLOCK_SIZE))]
        yield {
            "timestamp": round(time * 1e3),
            "input_length": len(shared) * BLOCK_SIZE + own,
            "output_length": int(random.integers(10, 190)),
            "hash_ids": shared + fresh,
        }
