"""Claims about how much memory is wasted, and on what: Fig 2's load under every policy.

Waste is what is not live, in percent of the pool. What people call waste of the last block is, of a policy that takes
blocks on demand, all that is held and not live: slots that will be filled, too.
"""

from __future__ import annotations

from collections.abc import Mapping

from fragmeter.sim.metrics.views import WASTE, amount

from .claim import Code, Judged, Part, Values
from .runs import Trial

#: The paper's baselines, used where a text says "earlier systems" without a name.
EARLIER = {"Orca (Max)": "orca-max", "Orca (Pow2)": "orca-pow2", "Orca (Oracle)": "orca-oracle"}
#: A share of the pool, in percent, from which a kind of waste is there.
THERE_PCT = 1.0
_POINTS = 2.0
_WASTE_OF_PAGING_PCT = 4.0


def held_waste(shares: Mapping[str, float]) -> float:
    """Percent of the pool that is held and not live."""
    return amount(shares, WASTE)


def _effective(trial: Trial) -> Values:
    return {
        "orca_max_live_pct": trial.shares("orca-max")["live"],
        "static_live_pct": trial.shares("static")["live"],
    }


def judge_effective(values: Mapping[str, float]) -> Judged:
    """20.4 % of the pool, within two points, under Orca (Max)."""
    live, static = values["orca_max_live_pct"], values["static_live_pct"]
    return Judged(
        (Part("Orca (Max)", live, 20.4 - _POINTS, 20.4 + _POINTS),),
        f"Orca (Max) {live:.1f} % live; naive static {static:.1f} %",
        "The value is that of a system that reserves the model's maximum for every request; static batches also hold"
        " slots of finished sequences and padding.",
    )


def _three_kinds(trial: Trial) -> Values:
    static, orca, oracle, paged = (
        trial.shares(policy) for policy in ("static", "orca-max", "orca-oracle", "vllm-sosp23")
    )
    return {
        "ended_or_padding_static_pct": static["finished_hold"],
        "ended_or_padding_orca_max_pct": orca["finished_hold"],
        "reserved_orca_oracle_pct": oracle["reserved"],
        "external_orca_oracle_pct": oracle["round_up"] + oracle["stranded"],
        "all_three_vllm_pct": held_waste(paged),
    }


def judge_three_kinds(values: Mapping[str, float]) -> Judged:
    """Each kind is there above 1 % of the pool where it is said to be, and paging leaves less than 4 % of all
    three.
    """
    cured = values["ended_or_padding_static_pct"] - values["ended_or_padding_orca_max_pct"]
    reserved, external, paged = (
        values[name] for name in ("reserved_orca_oracle_pct", "external_orca_oracle_pct", "all_three_vllm_pct")
    )
    return Judged(
        (
            Part("what continuous batching removes", cured, THERE_PCT),
            Part("reservation, which remains", reserved, THERE_PCT),
            Part("slots lost to rounding up and gaps, which remain", external, THERE_PCT),
            Part("what paging removes", paged, most=_WASTE_OF_PAGING_PCT),
        ),
        f"slots of ended sequences and padding {values['ended_or_padding_static_pct']:.1f} % (static),"
        f" {values['ended_or_padding_orca_max_pct']:.1f} % (Orca); reservation {reserved:.1f} % and slots lost to rounding up and"
        f" gaps {external:.1f} % even under Orca (Oracle); all three {paged:.1f} % (vLLM)",
        "Iteration-level scheduling frees the slots of finished sequences; only allocation on demand frees the rest.",
    )


def _kinds_of_waste(trial: Trial) -> Values:
    earlier = {name: trial.shares(policy)["waste"] for name, policy in EARLIER.items()}
    return earlier | {"vLLM": trial.shares("vllm-sosp23")["waste"]}


def judge_traditional(values: Mapping[str, float]) -> Judged:
    """Each baseline wastes 40 to 60 %, and paging 4 % within a point."""
    parts = [Part(name, values[name], 40, 60) for name in EARLIER]
    shares = ", ".join(f"{name} {values[name]:.1f} %" for name in (*EARLIER, "vLLM"))
    return Judged(
        (*parts, Part("paging's 4 %", values["vLLM"], 3, 5)),
        shares,
        f"A baseline that knows every output wastes {values['Orca (Oracle)']:.0f} %: chunks of powers of two, and"
        " slots that are reserved and still empty.",
    )


def _on_demand(trial: Trial) -> Values:
    policies = {
        "on_demand_pct": "vllm-v0",
        "tgi_pct": "tgi",
        "orca_oracle_pct": "orca-oracle",
        "vattention_pct": "vattention",
    }
    return {name: held_waste(trial.shares(policy)) for name, policy in policies.items()}


def judge_on_demand(values: Mapping[str, float]) -> Judged:
    """What is held and not live is at least 1 % of the pool less than with memory taken ahead of need."""
    demand = values["on_demand_pct"]
    return Judged(
        (
            Part("memory reserved at admission for max_tokens (TGI)", values["tgi_pct"] - demand, THERE_PCT),
            Part("memory reserved for the true output (Orca (Oracle))", values["orca_oracle_pct"] - demand, THERE_PCT),
            Part("memory mapped in pages of 2 MiB (vAttention)", values["vattention_pct"] - demand, THERE_PCT),
        ),
        f"held and empty: {demand:.1f} % on demand in blocks of 16; {values['tgi_pct']:.1f} % reserved at admission"
        f" (TGI), {values['orca_oracle_pct']:.1f} % (Orca (Oracle)), {values['vattention_pct']:.1f} % in 2 MiB pages"
        " (vAttention)",
        "Small units allocated on demand leave little empty; asynchronous allocation hides latency and saves no memory.",
    )


def _last_block(trial: Trial) -> Values:
    shares = trial.shares("vllm-sosp23")
    return {"waste_pct": shares["waste"], "last_block_pct": held_waste(shares)}


def judge_last_block(values: Mapping[str, float]) -> Judged:
    """Less than 4 % of the pool; and 95 % of that in last blocks."""
    waste, last = values["waste_pct"], values["last_block_pct"]
    return Judged(
        (
            Part("less than 4 %", waste, most=_WASTE_OF_PAGING_PCT),
            Part("only in the last block", last / waste, 0.95),
        ),
        f"{waste:.2f} % of the pool, of which {last:.2f} points in last blocks and {waste - last:.2f} free",
        "The rest is free: the watermark, and blocks too few for the head of the queue.",
    )


def _less(trial: Trial) -> Values:
    policies = EARLIER | {"naive static": "static", "vLLM": "vllm-sosp23"}
    return {name: trial.shares(policy)["waste"] for name, policy in policies.items()}


def judge_less(values: Mapping[str, float]) -> Judged:
    """Half or less of what each way of preallocating wastes."""
    baselines = [name for name in values if name != "vLLM"]
    saved = {name: 100 * (1 - values["vLLM"] / values[name]) for name in baselines}
    return Judged(
        tuple(Part(f"against {name}", saved[name], 50) for name in baselines),
        "down by "
        + ", ".join(f"{saved[name]:.0f} % ({name}, {values[name]:.1f} %)" for name in baselines)
        + f", to {values['vLLM']:.1f} %",
        "A system that preallocates holds mostly empty slots; blocks on demand leave less than one block a sequence empty.",
    )


PROBES: Code = {
    1: (_effective, judge_effective),
    3: (_three_kinds, judge_three_kinds),
    8: (_kinds_of_waste, judge_traditional),
    11: (_on_demand, judge_on_demand),
    12: (_last_block, judge_last_block),
    25: (_less, judge_less),
}
