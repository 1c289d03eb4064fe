"""Claims about sequences that have tokens in common: samples, beams, forks, rollbacks, copies on write.

``wrong_rows`` carries out a recorded plan on integers, step by step. A token's id stands for its keys and values. Every row should find in its block table the tokens that its sequence
holds; one that finds others has been overwritten.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache

import numpy as np

from fragmeter.experiments.paper.figures import fig14
from fragmeter.experiments.paper.paper import ALPACA_SET, FIG15, Source
from fragmeter.experiments.paper.rate_sweep.panels import ORACLE, VLLM
from fragmeter.experiments.paper.rate_sweep.rate_sweep import Search, crossing_of
from fragmeter.experiments.paper.settings import paper_settings
from fragmeter.experiments.paper.sharing import SAVED, SharingCase, measure
from fragmeter.experiments.runs.crossing import Crossing
from fragmeter.sim import Workload, simulate
from fragmeter.sim.policy.options import FITTED_BEAM_SURVIVAL
from fragmeter.sim.recording.plans import Plan, record
from fragmeter.sim.types.ticks import PER_SECOND
from fragmeter.sim.workload.dialogue import NO_PARENT, Dialogue

from .claim import Code, Judged, Part, Values
from .runs import Trial, few
from .throughput import ROUNDED
from .waste import EARLIER


def stretched(found: Crossing, stretch: float) -> float:
    """The crossing of the same load if all steps take ``stretch`` times as long, with the curve taken as a power law."""
    return found.at * stretch ** -(1 + found.exponent)


def wrong_rows(plan: Plan, skipped_copy: int | None = None) -> int:
    """Rows (sequences of a step) that find another token than their own somewhere in their table.

    Args:
        plan: Paged, recorded from the first step, without swaps.
        skipped_copy: Number of a copy that is left out.
    """
    size = plan.meta["block_size"]
    slots = np.full((plan.meta["num_blocks"], size), -1, dtype=np.int64)
    slots.reshape(-1)[plan.initial_slots] = plan.initial_token_ids
    wrong = row = done = 0
    for number in range(plan.num_steps):
        step = plan.step(number)
        carried_out = [place for place in range(len(step.copies)) if done + place != skipped_copy]
        source, target = step.copies[carried_out].reshape(-1, 2).T
        slots[target] = slots[source]
        done += len(step.copies)
        slots.reshape(-1)[step.slot_mapping] = step.token_ids
        for place, context in enumerate(step.context_lens.tolist()):
            found = slots[plan.block_table(number, place)].reshape(-1)[:context]
            wrong += not np.array_equal(found, plan.logical_tokens(number, place))
            row += 1
    return wrong


_PANEL, _SAMPLES, _BLOCK = "f", 4, 4
_BEAMS, _REQUESTS = fig14.PANELS[_PANEL][1], fig14.MOST_REQUESTS[fig14.BEAMS]
#: Fig 14's step time is fitted with it, whatever seed its requests are of.
_FIRST_SEED = 0
_SAVING = replace(FIG15, duration_s=200, window_s=(100, 200))
_HISTORY = 1000
#: Requests of a burst.
_BURST = 200
#: Whether the parent is rolled back, and the number of tokens that its child continues for.
_BRANCHES = {"fork": (False, 40), "longer rollback": (True, 40), "shorter rollback": (True, 10)}


def beam_searches(seed: int) -> dict[str, Search]:
    """By series, the search that Fig 14f makes for its requests of a seed."""
    source = Source(tuple(dict.fromkeys((_FIRST_SEED, seed))))
    panel = fig14.build_panel(_PANEL, source, _REQUESTS)
    return {series: panel.search(series, seed) for series in panel.systems}


@lru_cache(8)
def _crossings(seed: int) -> dict[str, Crossing]:
    return {series: crossing_of(search) for series, search in beam_searches(seed).items()}


def beam_rates(trial: Trial) -> Values:
    """Requests/s by series at which Fig 14f's mean normalised latency crosses its target."""
    return {series: stretched(found, trial.stretch) for series, found in _crossings(trial.seed).items()}


def _beams(trial: Trial) -> Values:
    rates = beam_rates(trial)
    return {f"over {name}": rates[VLLM] / rates[name] for name in EARLIER} | {"vllm_requests_per_s": rates[VLLM]}


def judge_beams(values: Mapping[str, float]) -> Judged:
    """More than ten times the rate of each baseline."""
    return Judged(
        tuple(Part(name, values[f"over {name}"], 10) for name in EARLIER),
        f"with {_BEAMS} beams vLLM serves {values['vllm_requests_per_s']:.2f} req/s; "
        + ", ".join(f"{values[f'over {name}']:.1f}x {name}" for name in EARLIER),
        "A system that reserves the model's maximum for each of six beams has room for one request; one that knows the"
        " outputs has room for many.",
    )


def _one_prompt(trial: Trial) -> Values:
    """Samples of a prompt that leaves its last block half full, and of one that fills it."""
    found = {}
    for name, prompt in {"half_full": _BLOCK + 2, "full": 2 * _BLOCK}.items():
        plan = _samples_plan(prompt)
        tables = [plan.block_table(plan.num_steps - 1, row)[: prompt // _BLOCK] for row in range(_SAMPLES)]
        found[f"copies_of_full_prompt_blocks_{name}"] = float(len({tuple(table.tolist()) for table in tables}))
        found[f"blocks_copied_{name}"] = float(len(plan.copies))
    return found


def _samples_plan(prompt: int) -> Plan:
    chosen = paper_settings(model="toy-opt", policy="vllm-sosp23", block_size=_BLOCK, num_gpu_blocks_override=64)
    return record(chosen, few([prompt], [4], n=[_SAMPLES]))[1]


def judge_one_prompt(values: Mapping[str, float]) -> Judged:
    """One copy of the full blocks; n - 1 copies of a block that is half full, and none where the prompt fills it."""
    kept = [values[f"copies_of_full_prompt_blocks_{name}"] for name in ("half_full", "full")]
    half, full = values["blocks_copied_half_full"], values["blocks_copied_full"]
    return Judged(
        (
            Part("one copy of the prompt's full blocks", max(kept), 1, 1),
            Part("copies where outputs begin in a shared block", half, _SAMPLES - 1, _SAMPLES - 1),
            Part("none elsewhere", full, most=0),
        ),
        f"{_SAMPLES} samples: full blocks of the prompt held {max(kept):.0f} time; copied {half:.0f} blocks where"
        f" the prompt ends within one, {full:.0f} where it fills it",
        "A shared block is copied before a sequence writes to it; full blocks are never written again.",
    )


def _branches(trial: Trial) -> Values:
    found: Values = {}
    for name, policy in {"paged": "vllm-v0", "contiguous": "orca-oracle"}.items():
        for kind, branch in _BRANCHES.items():
            run = simulate(paper_settings(policy=policy), _branch(*branch))
            copies = run.log.copies
            found[f"{kind}_{name}_slots"] = int(copies["slots"].sum())
            found[f"{kind}_{name}_us"] = int(copies["ticks"].sum()) * 1e6 / PER_SECOND
    return found


def _branch(rolls_back: bool, more_tokens: int) -> Workload:
    """A request of 1,010 tokens; when it is finished, another continues from its first 1,000 for ``more_tokens``."""
    base = few([_HISTORY - 10, _HISTORY + 1], [20, more_tokens - 1], arrivals_s=[0, 60])
    tree = Dialogue(np.array([NO_PARENT, 0]), np.array([0, _HISTORY]), np.array([False, rolls_back]))
    return replace(base, dialogue=tree)


def judge_branches(values: Mapping[str, float]) -> Judged:
    """Contiguous memory copies the whole history, paged memory no more than a block."""
    contiguous = {kind: values[f"{kind}_contiguous_slots"] for kind in _BRANCHES}
    paged = max(values[f"{kind}_paged_slots"] for kind in _BRANCHES)
    return Judged(
        (
            *(Part(f"{kind}s, which copy all without paging", copied, _HISTORY) for kind, copied in contiguous.items()),
            Part("paged memory, which copies a block at most", paged, most=16),
        ),
        f"slots copied of a history of {_HISTORY:,} tokens, contiguous: "
        + ", ".join(f"{kind} {copied:,.0f}" for kind, copied in contiguous.items())
        + f" ({values['fork_contiguous_us']:,.0f} us for all of it); paged at most {paged:.0f}"
        f" ({values['fork_paged_us']:.0f} us)",
        "Contiguous memory copies shared tokens, and tokens that outgrow their piece.",
    )


def _race(trial: Trial) -> Values:
    plan = _samples_plan(_BLOCK + 2)
    return {
        "rows": float(len(plan.sequence)),
        "wrong_rows": float(wrong_rows(plan)),
        "wrong_rows_without_a_copy": float(wrong_rows(plan, skipped_copy=0)),
    }


def judge_race(values: Mapping[str, float]) -> Judged:
    """Every table holds its sequence's tokens; with one copy left out some do not."""
    wrong, without = values["wrong_rows"], values["wrong_rows_without_a_copy"]
    return Judged(
        (
            Part("tables with counts and copies, which are right", wrong, most=0),
            Part("a copy left out, which is noticed", without, 1),
        ),
        f"of {values['rows']:.0f} table reads {wrong:.0f} find another sequence's tokens; with one copy left out"
        f" {without:.0f}",
        "Two sequences that share a block overwrite each other's tokens unless one gets a copy first.",
    )


@lru_cache(8)
def saving(trial: Trial) -> Values:
    """Memory that beams and samples save on Alpaca, and what they gain of throughput."""
    source = Source((trial.seed,), drawn_from=ALPACA_SET)
    work = source.workload(_SAVING, trial.seed)
    beams = measure(work, SharingCase(_SAVING, trial.seed, _BEAMS, FITTED_BEAM_SURVIVAL)).values[SAVED]
    samples = measure(work, SharingCase(_SAVING, trial.seed, _BEAMS)).values[SAVED]
    together, apart, swapped = samples_per_s(trial), unshared_per_s(trial), unshared_per_s(trial, "swap")
    rates = beam_rates(trial)
    return {
        "beams_saved_pct": beams,
        "samples_saved_pct": samples,
        "beams_over_oracle": rates[VLLM] / rates[ORACLE],
        "samples_over_unshared": together / apart,
        "samples_over_unshared_swapped": together / swapped,
    }


def samples_per_s(trial: Trial) -> float:
    """Output tokens/s of 200 requests for six samples each, which share their prompt."""
    return trial.burst(ALPACA_SET, _BURST, "vllm-sosp23", _BEAMS)


def unshared_per_s(trial: Trial, preemption_mode: str = "recompute") -> float:
    """Output tokens/s of the sequences of ``samples_per_s`` without shared blocks: each is a request of its own.

    Args:
        preemption_mode: As the setting of the policy: recompute or swap.
    """
    return trial.burst(ALPACA_SET, _BURST, "vllm-sosp23", copies=_BEAMS, preemption_mode=preemption_mode)


def judge_saving(values: Mapping[str, float]) -> Judged:
    """55 % within 5 points and 2.2 times, from 95 % on, for beams and for samples."""
    return Judged(
        (
            Part("memory of beams, 55 %", values["beams_saved_pct"], 50, 60),
            Part("memory of samples, 55 %", values["samples_saved_pct"], 50, 60),
            Part("throughput of beams, 2.2x Orca (Oracle)", values["beams_over_oracle"], 2.2 * ROUNDED),
            Part(
                "throughput of samples, 2.2x what sharing nothing gives",
                values["samples_over_unshared"],
                2.2 * ROUNDED,
            ),
        ),
        f"{_BEAMS} sequences a request on Alpaca: beams save {values['beams_saved_pct']:.1f} % of the blocks,"
        f" samples {values['samples_saved_pct']:.1f} %; throughput of beams {values['beams_over_oracle']:.2f}x Orca"
        f" (Oracle), of samples {values['samples_over_unshared']:.2f}x the same engine without sharing, and"
        f" {values['samples_over_unshared_swapped']:.2f}x if that swaps, too",
        "Samples have the prompt in common and nothing else; beams also most of what they generated. Samples of one"
        " request are swapped where single sequences are computed again, which is quicker here.",
    )


PROBES: Code = {
    5: (_beams, judge_beams),
    6: (_one_prompt, judge_one_prompt),
    9: (_branches, judge_branches),
    10: (_race, judge_race),
    13: (saving, judge_saving),
}
