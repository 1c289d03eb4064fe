"""``plan --again``: the question of a ``plan.json`` with the inputs of now, and what moved the bill.

question   every flag that was given, as ``plan.json`` keeps it under ``asked``; files are read where they are now
inputs     of a candidate: its settings, the KV cache that its start leaves, two step times, and the interval of step times. With the
           prices and the hash of the requests they are all that a bill follows from, beside the rules of the code
bill       then -> the same fleet at the prices of now -> the fleet of now of the same candidate -> the cheapest candidate of now;
           without a wanted rate the price of a million tokens at the full rate
           the three differences add up to the whole. The first is of the prices alone, the second of the inputs of that candidate that
           differ, or of the code's rules where none does, the third is what another candidate saves
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from ...sim import Settings
from ...sim.types.errors import SettingError
from ...sim.types.optional import not_none
from ...sim.types.ticks import PER_MS
from ...sim.types.user_files import json_value, text_of
from ..runs.grid import NONE
from ..runs.slo_check import compiled_cost
from .answer import Answer, Bill
from .candidates import Candidate
from .prices import GPU_HOURS, Prices
from .uncertainty import uncertainty

#: Key of ``plan.json`` with the flags that were given.
ASKED = "asked"
#: Sequences and tokens of the steps that stand for the step times of a candidate.
_DECODES, _TOKENS = 32, 1024
#: A difference of two bills or prices below this share is rounding.
_ROUNDING = 1e-9
#: What each input of a candidate follows from.
_SOURCES = {
    "prompt_ms": "ms of a step with a prompt of 1,024 tokens (kernel tables, cost model)",
    "decode_ms": "ms of a step with 32 decodes of 1,024 tokens (kernel tables, cost model)",
    "step_scales": "interval of step times (measured servers)",
    "kv_cache_blocks": "KV cache in blocks, low, likely and high (rules of the start, facts of model and card)",
}


def as_asked(line: Mapping[str, Any], groups: Mapping[str, Any]) -> dict[str, Any]:
    """The flags that differ from their defaults, as JSON values: those without a group, and those of each group by its name.

    Args:
        groups: Groups of flags, each of which can be made without arguments.
    """
    asked = {name: value for name, value in line.items() if value is not None}
    for name, group in groups.items():
        plain = type(group)()
        given = {each.name: getattr(group, each.name) for each in fields(group)}
        given = {field: value for field, value in given.items() if value != getattr(plain, field)}
        if given:
            asked[name] = {field: str(value) if isinstance(value, Path) else value for field, value in given.items()}
    return asked


def read_plan(path: Path) -> dict[str, Any]:
    """A ``plan.json`` with the flags that it answers.

    Raises:
        SettingError: It cannot be read, or is none.
    """
    try:
        document = json_value(text_of(path, "again"))
    except ValueError as error:
        raise SettingError("again", str(path), f"is no JSON ({error}); give the plan.json of --out or --json") from None
    if not isinstance(document, dict) or not isinstance(document.get(ASKED), dict) or "candidates" not in document:
        raise SettingError(
            "again", str(path), "has no flags of a plan (asked); give a plan.json of this release or later"
        )
    return document


def inputs_of(candidate: Candidate) -> dict[str, Any]:
    """What the size of a candidate's fleet follows from, beside its settings and the requests."""
    chosen = not_none(candidate.settings)
    cost, about = compiled_cost(chosen), uncertainty(candidate)
    pairs = _TOKENS * _TOKENS // 2
    return {
        "prompt_ms": cost.step_ticks(0, 0, _TOKENS, pairs) / PER_MS,
        "decode_ms": cost.step_ticks(_DECODES, _DECODES * _TOKENS, 0, 0) / PER_MS,
        "step_scales": list(about.scales),
        "kv_cache_blocks": [each.num_blocks for each in about.memories],
    }


def what_moved(
    then: Mapping[str, Any],
    now: Mapping[str, Any],
    ranks: Sequence[tuple[Answer, Bill]],
    candidates: Sequence[Candidate],
    prices: Prices,
) -> list[str]:
    """Lines on the difference of two plans for one question.

    Args:
        then, now: Their documents.
        ranks, candidates, prices: Of now: the answers with their bills, all that was searched, and the prices.
    """
    before, after = (_best(each) for each in (then, now))
    releases = (then["fragmeter"], now["fragmeter"])
    lines = [f"Then ({releases[0]}): {_bought(before, then)}. Now ({releases[1]}): {_bought(after, now)}."]
    if then["requests_sha256"] != now["requests_sha256"]:
        lines.append("The requests differ: the file of the load, or how they are drawn.")
    if before is None:
        return lines
    same = next((each for each in candidates if _is(each, before["candidate"])), None)
    if same is None or same.settings is None:
        return [*lines, "The candidate of then is not searched now, or does not start."]
    answered = next((bill for answer, bill in ranks if _is(answer.candidate, before["candidate"])), None)
    changed = list(_changed(before, same.settings, inputs_of(same)))
    if then["currency"] != now["currency"] or GPU_HOURS in (then["currency"], now["currency"]):
        lines.append("The bills are in different currencies, or of GPUs without a price: they are not compared.")
    else:
        lines += _parts(then, now, answered, same, prices, changed)
    return lines + (
        [f"Of {same.name} differ: {'; '.join(changed)}."] if changed else [f"No input of {same.name} differs."]
    )


def _parts(
    then: Mapping[str, Any],
    now: Mapping[str, Any],
    answered: Bill | None,
    same: Candidate,
    prices: Prices,
    changed: Sequence[str],
) -> list[str]:
    """The difference of the costs: by prices, by the fleet of the candidate of then, and by another candidate."""
    name = "per_hour" if now["wanted_request_rate"] else "full_per_million"
    unit = f"{now['currency']}{'/h' if name == 'per_hour' else ' a million tokens'}"
    before, gpu = then["candidates"][0]["bill"][name], same.started.launch.gpu.name
    priced = before * prices.of(gpu) / then["prices"][gpu]["price"]
    steps = [(f"the price of {gpu}", before, priced)]
    if answered is not None:
        why = "what differs of it" if changed else "the requests or the rules of the code, as no input of it differs"
        own = getattr(answered, name)
        steps.append((f"the size of {same.name} ({why})", priced, own))
        if (best := _best(now)) is not None:
            steps.append(("a cheaper candidate", own, best["bill"][name]))
    lines = [
        f"{high - low:+,.2f} {unit} by {cause}: {low:,.2f} to {high:,.2f}."
        for cause, low, high in steps
        if abs(high - low) > _ROUNDING * max(high, low)
    ]
    if answered is None:
        lines.append(f"{same.name} has no bill now: it is too dear (not_cheaper), or misses the goal.")
    return lines or ["The bill has not moved."]


def _changed(before: Mapping[str, Any], chosen: Settings, inputs: Mapping[str, Any]) -> Iterator[str]:
    """The settings and inputs of a candidate that differ, each with its values of then and now."""
    settings, given = before["settings"], chosen.as_dict()
    for name in sorted(settings.keys() | given.keys()):
        if name != "num_gpu_blocks_override" and _plain(settings.get(name)) != _plain(given.get(name)):
            yield f"{name} {settings.get(name)} to {given.get(name)}"
    for name, value in inputs.items():
        if before["inputs"].get(name) != value:
            yield f"{_SOURCES[name]}: {_shown(before['inputs'].get(name))} to {_shown(value)}"


def _plain(value: Any) -> Any:
    """A value as JSON gives it back."""
    return [*map(_plain, value)] if isinstance(value, (list, tuple)) else value


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(map(_shown, value))
    return f"{value:,.4g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)


def _best(document: Mapping[str, Any]) -> dict[str, Any] | None:
    """The data of the recommended candidate; None if none is recommended."""
    return document["candidates"][0] if document["recommended"] else None


def _bought(best: Mapping[str, Any] | None, document: Mapping[str, Any]) -> str:
    if best is None:
        return "nothing is enough"
    bill = best["bill"]
    price = "" if document["currency"] == GPU_HOURS else f", {bill['per_hour']:,.2f} {document['currency']}/h"
    return f"{bill['gpus']:,} x {best['candidate']['gpu']}{price}"


def _is(candidate: Candidate, values: Mapping[str, str]) -> bool:
    """Whether a candidate has these values; axes that one of them does not have are as the model is named."""
    own = candidate.axis_values
    return all(own.get(name, NONE) == values.get(name, NONE) for name in own.keys() | values.keys())
