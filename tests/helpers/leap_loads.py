"""Drawn loads under drawn options of a policy, each served with every leap checked.

Values of an option are drawn from its declaration: either value of a bool, one of a list of values, a number within its bounds,
mostly a small one, or one of the ``examples`` of its ``Field``. A text without examples keeps its default.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
from pydantic import TypeAdapter

from fragmeter.sim import Settings, Workload, settings, simulate
from fragmeter.sim.policy.options import option_names
from fragmeter.sim.policy.registry import policy
from fragmeter.sim.types.errors import PluginError, SettingError
from fragmeter.sim.types.ticks import PER_MS
from fragmeter.sim.workload.content import PromptContent
from fragmeter.sim.workload.dialogue import NO_PARENT, Dialogue
from fragmeter.sim.workload.users import Users

#: Loads that are drawn until one reads an option.
_MOST_DRAWS = 1000
#: Largest number that is drawn where a declaration allows more, and smallest share.
_MOST, _LEAST_SHARE = 64, 1e-3


@dataclass(frozen=True)
class Served:
    """A load that was served, or None of a load that reads the option.

    Attributes:
        option: The option that it is to show; None for the defaults.
        chosen: Settings and options that were served, without those at their default; None where every draw was refused.
        why: The last refusal.
    """

    option: str | None
    chosen: dict[str, Any] | None
    why: str = ""


def check_policy(name: str, loads: int, seed: int) -> Iterator[Served]:
    """Serve so many loads under the defaults of a policy, and under drawn values of each of its options.

    Args:
        name: See ``policy.registry.policy``.
        loads: For each option.

    Raises:
        PluginError, SimulationFault: A leap is not what its steps are.
    """
    declared = policy(name).options_type
    for place, option in enumerate((None, *option_names(declared))):
        for load in range(loads):
            yield _serve(name, option, np.random.default_rng((seed, place, load)))


def _serve(name: str, option: str | None, rng: np.random.Generator) -> Served:
    """Draw loads until one is served that reads the option. A setting that is refused is left out."""
    why = ""
    for _ in range(_MOST_DRAWS):
        chosen = _drawn_settings(rng)
        work = _drawn_load(chosen["max_model_len"], rng)
        chosen |= _drawn_options(name, option, rng)
        while option is None or option in chosen:
            try:
                given = settings(policy=name, check_leaps=True, **chosen)
                simulate(given, work)
                return Served(option, chosen)
            except PluginError as error:
                if error.rule == "leap" or not _fails_in_steps(given, work):
                    raise
                why = str(error)
                break
            except SettingError as error:
                why = str(error)
                if error.field not in chosen:
                    break
                del chosen[error.field]
    return Served(option, None, why)


def _fails_in_steps(given: Settings, work: Workload) -> bool:
    """Whether a policy cannot serve a load step by step either, such as a prompt longer than the token budget."""
    try:
        simulate(replace(given, leap=False), work)
    except PluginError:
        return True
    return False


def _drawn_settings(rng: np.random.Generator) -> dict[str, Any]:
    """A replica with a pool that is often too small."""
    length, size = int(rng.choice([96, 400, 1600])), int(rng.choice([1, 2, 4, 16, 32]))
    room = int(length * rng.choice([0.7, 0.9, 1.0, 1.3, 2.0, 50.0]))
    seqs = int(rng.choice([1, 2, 5, 64, 64]))
    chosen: dict[str, Any] = {
        "model": str(rng.choice(["toy-llama"] * 8 + ["gpt-oss-20b", "nemotron-h-8b"])),
        "gpu": "h100-80gb",
        "cost": "roofline",
        "max_model_len": length,
        "max_num_seqs": seqs,
        "max_num_batched_tokens": int(rng.choice([seqs, seqs + 3, length // 3 + seqs, 2560, 2560])),
    }
    if rng.random() < 0.9:
        chosen |= {"block_size": size, "num_gpu_blocks_override": max(1, room // size)}
    if rng.random() < 0.1:
        chosen["tensor_parallel_size"] = 4
    if rng.random() < 0.3:
        chosen["enable_prefix_caching"] = bool(rng.integers(2))
    return chosen


def _drawn_load(max_model_len: int, rng: np.random.Generator) -> Workload:
    """Requests at once, one by one, or anything between, in an open or a closed loop; some share prompts or have priorities."""
    count = int(rng.integers(2, 40))
    # A prompt may go on from another one.
    prompts, outputs = rng.integers(1, max_model_len // 4, count), rng.integers(1, max_model_len // 2 - 9, count)
    gap = rng.choice([0, 0.3, 3, 30, 300]) * PER_MS
    arrivals = np.cumsum(np.rint(rng.exponential(1.0, count) * gap) * rng.integers(0, 2, count)).astype(np.int64)
    facts: dict[str, Any] = {}
    match rng.choice(["plain", "early", "sessions", "samples", "samples", "priorities", "users", "parents"]):
        case "early":
            facts["max_tokens"] = outputs + rng.integers(0, 9, count)
        case "sessions":
            facts["content"] = PromptContent.of_sessions(rng.integers(-1, 1 + count // 3, count))
        case "samples":
            facts["n"] = rng.integers(1, 4, count)
        case "priorities":
            facts["priority"] = rng.integers(0, 3, count)
        case "users":
            facts["users"] = Users(int(rng.integers(1, 9)), np.rint(rng.exponential(1.0, count) * gap).astype(np.int64))
            arrivals = np.zeros(count, dtype=np.int64)
        case "parents":
            parent = np.where(rng.random(count) < 0.5, np.arange(count) - 1, NO_PARENT)
            shared = np.where(parent == NO_PARENT, 0, prompts[parent])
            prompts = prompts + shared
            facts["dialogue"] = Dialogue(parent, shared, np.zeros(count, dtype=bool))
    return Workload("drawn", arrivals, prompts, outputs, **facts)


def _drawn_options(name: str, option: str | None, rng: np.random.Generator) -> dict[str, Any]:
    """A value of an option, other than its default, and of some others; none at all without an option."""
    if option is None:
        return {}
    declared: type = policy(name).options_type
    found: dict[str, Any] = {}
    share = rng.choice([0.0, 0.2, 0.9])
    for other, schema in _schemas(declared).items():
        if other == option or rng.random() < share:
            value = _drawn_value(schema, rng)
            if value != getattr(declared, other):
                found[other] = value
    return found


@cache
def _schemas(declared: type) -> dict[str, dict[str, Any]]:
    """The JSON schema of each option."""
    found: dict[str, dict[str, Any]] = TypeAdapter(declared).json_schema().get("properties", {})
    return found


def _drawn_value(schema: dict[str, Any], rng: np.random.Generator) -> Any:
    """A value that a JSON schema allows."""
    if "anyOf" in schema:
        schema = schema | next(each for each in schema["anyOf"] if each.get("type") != "null")
    choices = schema.get("enum") or schema.get("examples")
    if choices:
        return choices[rng.integers(len(choices))]
    match schema.get("type"):
        case "boolean":
            return bool(rng.integers(2))
        case "integer":
            least = schema.get("minimum", schema.get("exclusiveMinimum", -1) + 1)
            most = min(schema.get("maximum", schema.get("exclusiveMaximum", _MOST + 1) - 1), least + _MOST)
            return int(least + np.expm1(rng.uniform(0, np.log1p(most - least + 0.9))))
        case "number":
            least = max(schema.get("minimum", schema.get("exclusiveMinimum", 0)), _LEAST_SHARE)
            most = min(schema.get("maximum", schema.get("exclusiveMaximum", _MOST)), 4.0)
            return round(float(np.exp(rng.uniform(np.log(least), np.log(max(least, most))))), 4)
    return schema.get("default")
