"""Writes docs/results/servers.md, and the errors that intervals come from (``experiments.measured.servers_like``), from the document of
``fragmeter reproduce servers --runs FOLDER --json FILE``. The errors are written if no run is left out."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from fragmeter.experiments.measured.intervals import COVERAGE, LEAST_RUNS, SHARE
from fragmeter.experiments.reproduce.board import STEP_TIMES_CHANGED
from fragmeter.experiments.reproduce.servers import REQUEST_COLUMNS, facts
from fragmeter.reports.page.table import markdown
from fragmeter.sim.cost.backends import PACKED_K
from fragmeter.sim.policy.options import OUTSIDE_MS

HEAD = """\
# Measured servers beside the simulation

`fragmeter reproduce servers` simulates {runs} published runs of real servers. This page is its result, written by `make servers`, and is not
edited by hand. Errors are simulated over measured, less one. Output tokens/s is empty where the quoted figures have none; at a
constant rate below saturation it is the rate times the output length.

```sh
fragmeter reproduce servers                     # the runs that follow from published figures
fragmeter reproduce servers --runs FOLDER       # also those that need a file of their requests
fragmeter reproduce servers --add FILE          # also measured runs of your own (below)
```

Every run takes step times from `--cost fitted`, the profile of its card, and adds the *constants of a server*:

| constant | meaning |
|---|---|
| `outside_ms` | a request's time in HTTP, tokenizer and network, before its first step and after its last token; part of TTFT and E2E, not of TPOT |
| `step_us` | time that the GPU loses in each step between its operations |
| `host_us` | the host's time for a step; hidden behind the GPU under asynchronous scheduling, so that these runs do not determine it |

A profile knows operations, not the server. Constants of *nothing* are the shipped defaults: `--outside-ms {outside:g}`, the time outside of the engine of the
Llama 2 7B runs below as it was fitted before the sampler was simulated (47 ms in runs at the chat endpoint), and no other. A run is *fitted* where its own measurement determined the constants. Everywhere else it is
*predicted*: by the defaults, or by constants of other runs. A run is *held out* where no coefficient, constant or default was fitted to it or
chosen on it ([below](#held-out-runs)); where it led to a correction of the simulation, that is marked.

{constants}

## Limits

Mean absolute error of means over the runs, with its bias. {missed}

{targets}

The H100 limits are not blind: two choices were made after H100 runs had been seen, for reasons in the source of FlashAttention and of vLLM. Models with one
query head a KV head take k = 1 in mixed steps (after Llama 2 7B), and the time of the sampler is simulated (after Llama 3.1 70B and Qwen3 14B):
[what was chosen](#what-was-chosen-and-on-which-runs).

TTFT by constants of Llama 2 7B misses since that choice: its steps are now too long, so that the fit has less time outside of the engine, 5.5 ms. Where that model alone samples
greedily, which takes no time, the fit has 7.0 ms, the default, with which TTFT of these runs misses by 10.5 %. A third of the error is one run with a measured standstill
([below](#where-it-misses)); medians of TTFT are 2.1 % off in the mean with 7 ms. The default stays at 7 ms: over the {light} open-loop runs below saturation that nothing was fitted to the median error of TTFT is {ttft:.1%}.

{board}
"""
BOARD = """\
## Median errors by class

Median absolute error by class of runs, with the shipped defaults. A class is a card, the attention kernels that vLLM takes there (FA2 and FA3 are
FlashAttention 2 and 3), the kind of model and the load. *Quantised* weights have fewer than 16 bits. A run is
*fitted* where a constant or a choice of the defaults rests on it; these are classes of their own. It is *seen* where its measurement was used by {changed},
the day of the last change of step times, and else *unseen*.

{classes}

`make test-all` fails if a median of a class is larger by 2 points or more than in
`experiments/reproduce/facts/server_classes.json`. `fragmeter reproduce servers --runs FOLDER --accept-medians` writes that file anew.

Median absolute errors that other simulators publish, and ours of the same runs:

{peers}

### Intervals

Commands print an interval that holds the measured value of {share:.0%} of the servers of a class, from the errors of the runs above that nothing was fitted to. Here each run is
judged by intervals found without the errors of its server, calibration included. *Score* is the interval score (Winkler): the width, and 20 times the
distance by which the interval misses, as a share of the simulated value; the lower, the better. *Box* is that of the interval from the lowest to the highest error of the
class's other servers. *Interval* is from all runs, times the simulated value. A class with fewer than {least} runs, or of one server, counts without its load; if it is still as small, its runs are printed instead.

{intervals}

`make test` fails if the coverage of a metric leaves {low:.0%} to {high:.0%}, or its score is not better than that of the box.
[docs/limits.md](../limits.md) has the method.

### Measured runs of your own

`--add FILE` takes a JSON file of this form. Its runs count as unseen, and join the classes on the terminal and in `--json`.

```json
{{"runs": [{{
  "name": "my server, 4 requests/s",
  "source": "vllm bench serve on our H100, 2026-11-20",
  "settings": {{"gpu": "h100-80gb", "model": "qwen3-14b", "vllm_release": "0.23", "max_num_seqs": 256}},
  "random": {{"requests": 500, "prompt_tokens": 1024, "output_tokens": 128, "request_rate": 4.0}},
  "measured": {{"output_throughput": 510.2, "ttft_ms": {{"mean": 81.0, "p99": 190.0}}, "tpot_ms": {{"mean": 14.9}}, "e2el_ms": {{"mean": 1980.0}}}}
}}]}}
```

| field | meaning |
|---|---|
| `name`, `source` | of the run, and where its figures are from |
| `settings` | settings of `fragmeter simulate` by their names with underscores; others have the defaults of `vllm serve` |
| `measured` | `output_throughput` in tokens/s; `ttft_ms`, `tpot_ms` and `e2el_ms` with `mean`, `median` and `p99`. Any may be left out |
| `endpoint` | `completions` (default) or `chat`, of which every request has 47 ms outside of the engine in place of 7 |
| `published_errors` | of other simulators: `{{"NAME": {{"mean_ttft_ms": -0.12}}}}`, simulated over measured, less one |
| `first_used` | day on which the run was first compared with a simulation, such as `2026-11-20` |

The load is one of these:

| load | fields |
|---|---|
| `random` | `requests`, `prompt_tokens`, `output_tokens`, `request_rate`: one length, Poisson arrivals; all at once without a rate |
| `sharegpt` | `requests`, `total_input_tokens`, `total_output_tokens`, `request_rate`: lengths like ShareGPT, a constant rate; all at once without one |
| `closed_loop` | `requests`, `max_concurrency`, `prompt_tokens`, `output_tokens`: users with one request at a time; the shortest and longest length each |
| `poisson` | `requests`, `request_rate`, `prompt_tokens`, `output_tokens`: quantiles of the lengths at evenly spaced ranks, the first the minimum |
| `shared_prefix` | `requests`, `request_rate`, `system_prompts`, `users`, `system_prompt_tokens`, `output_tokens`, `prompt_tokens` with `min`, `median`, `p90`, `max`: fixed prompts in turn |
| `requests_file` | a CSV beside the file: {columns} |
"""
GIVEN = """\
## Given runs

Runs of class *given* came to the project together with the errors of its step times, and are simulated without constants of a server. Their loads are drawn from
published totals; where the flags of the server are not stated, those of other runs of the same source are taken.

{lines}

"""
HELD_OUT = """\
## Held-out runs

Runs of class *held out* were collected after all coefficients were fitted. No coefficient, constant or default is fitted to them or chosen on them.
They are simulated with the shipped defaults and no constants of a server. A fault that such a run shows is corrected only for a reason in vLLM's
source or in a table of kernels. All of them had been simulated once before the three [corrections](#faults-that-these-runs-showed-and-their-correction);
rows of the runs that led to one are marked *corrected after*. The runs are:

| runs | source |
|---|---|
| H100, A100 80 GB and L40S: Qwen3 14B, CodeLlama 34B, Mixtral 8x7B and 8x22B, warm prompts, one run in overload | inference-sim/sim-to-real-accuracy-validation, inference-sim/training |
| H100, H200 and B200: gpt-oss-120b and Llama 3.1 70B in fp8, cold prompts without prefix cache, closed loop | SemiAnalysis InferenceX, quoted by inference-sim/inference-sim |
| two RTX PRO 6000 over PCIe: Qwen3 32B (tensor parallel, overload), Qwen3 30B A3B (data and expert parallel) | casys-kaist/LLMServingSim |

Mean absolute error over the runs of a card and model, and bias in brackets. Errors of a run are in the table below.

{groups}

\\* *Corrected after* these runs were seen. Mean absolute error and bias in the first simulation of all held-out runs, and now. No mean of any other
held-out run has changed by more than 1.3 points, but for those of TTFT and E2E, to which the 7.0 ms outside of the engine were added later, on 2026-11-28.

{corrected}

{lines}

{notes}
"""
NOTES = """\

## What was chosen, and on which runs

- The profiles of the two RTX cards are fitted to tables of single layers, measured on these cards in vLLM 0.19. The runs of these servers
  had no part in that.
- Attention of steps that decode and prefill is prefill + k x decode, with k by the [attention backend](../step-times.md#mixed-steps). The rule is tested on four tables of such
  calls, of two cards with FlashAttention 2, and no coefficient of it is fitted to a server. No table is of an A100: which part of its
  L2 cache counts, and that no reads are shared there, was chosen among variants after its bursts had been simulated. The RTX profiles have the operation itself, `mixed_attention`, for models with the four query heads a KV head of their tables.
- The rule came after runs of Qwen3 14B on an A100 that are not on this page were seen 30 % too fast, where all requests arrive at once. Kernels that pack the query heads of a KV head (FlashAttention 3,
  Triton) take k = {packed:g}, which is assumed: their source says 1.
- Models with one query head a KV head (Llama 2 7B) take k = 1. That was decided after the Llama 2 7B runs at 20
  requests/s came out 37 % too long, and for a reason in FlashAttention's source: the faster path for decodes, which mixed calls lose, exists for
  grouped heads only.
- Experts and all-reduces have tables of their own ([step-times.md](../step-times.md)), fitted without a server. Before, the experts that a step reaches
  counted as one GEMM, and all-reduces as a ring at 0.8 of the data sheet's links and 10 us.
- Until 2026-11-28 the sizes in the tables of all-reduces were taken for bytes. They are elements of two bytes (aiconfigurator asks for tokens times the hidden size),
  so that all-reduces of all cards were up to twice as long. It was found on the prompts of Llama 3.1 70B on eight H100s (TTFT +22 to +45 %, now +2 to +16 %), and is certain without
  them: NCCL's own table had 153 GB/s between two H100s for 128 MiB, and vLLM's benchmark (pull requests 24111 and 42324) has half of the times.
- On H100, H200 and Blackwell small all-reduces also normalise since vLLM 0.17 (`fuse_allreduce_rms`; up to 64 MiB on two GPUs, 2 MiB on four, 0.5 MiB on eight of Hopper), where an engine
  is alone. That had been decided for all releases after the run of Llama 2 70B at 20 requests/s came out 16 % too long, which was the fault above. The wheels of 0.13 to
  0.16 have it off.
- The sampler takes time (`--sampling`): clients of the H100, A100 and L40S runs with warm prompts (inference-perf) send no temperature, so that the server samples by
  `generation_config.json` of the model: Llama with top-p, Qwen3 with top-k and top-p, CodeLlama and Mixtral with neither. Its time is PyTorch's sort, of a table (`sim/cost/sampler.py`).
  It was found by comparing Llama 3.1 70B with Llama 2 70B on the same four GPUs: 96,000 more logits a row take 0.6 ms more at 5 requests/s and 1.1 ms at 10, the simulation had 0.1.
- Changed with these three, one after the other, medians of TPOT over the 22 dense runs on H100 that nothing was fitted to: 2.8 % before; 3.7 % with elements; 3.5 % without fusion before
  0.17; 1.8 % with the sampler. Of the six fitted ones: 1.7, 1.7, 1.3 and 5.5 %: Llama 2 7B, on one GPU, is now 3 to 10 % too long. No all-reduce is
  in these, and the sampler adds 0.2 to 0.4 ms to steps of 7 to 17 ms, without which they are -1 to +4 %. At a constant rate longer steps meet more sequences, and take longer still: with all steps
  3 % shorter its three runs at 8 to 20/s are +1 to +3 %, as 1 % of a step is 1.6 to 2.9 % of TPOT there. Which part is too long no table tells.
- Step times may fall over tokens since the held-out runs on B200 showed a fault ([above](#faults-that-these-runs-showed-and-their-correction)). Fitted runs
  changed by 0.2 points at most.
- Gated delta nets, sparse attention and unpacked weights have tables since 2026-11-28 ([step-times.md](../step-times.md#layers-with-states)), fitted without a server; their runs on this page had been seen before, at E2E -76 % (Qwen3.5
  35B A3B), throughput +172 and +147 % (DeepSeek V3.2), +41 % (AWQ) and +49 % (FP8 on an A100). The small kernels of layers with experts and states are counted from vLLM's models, for the time of the shortest calls in
  the tables. Seen beforehand was that steps of hybrids and of MoE with few users were too short; that dense layers keep their four kernels was decided as their runs show none missing. After the first result (E2E -19 %) one
  thing was added: the four kernels that gated delta nets launch before vLLM 0.18, by pull request 36596, which took it to -16 %.
- Weights of 4 and 8 bits on an A100 take no less than the rate of Marlin's experts, 156 TFLOP/s in SGLang's table. The rate is of the table; that dense GEMMs take it, too, was decided with the two bursts of Qwen3 14B at hand
  ([step-times.md](../step-times.md#gemms-of-weights-that-are-unpacked)).
- gpt-oss-120b on a B200 takes the table of its server's kernel (`flashinfer_trtllm_mxfp4_mxfp8`) since 2026-11-29, which has DeepSeek V4's experts. It is fitted without a server; that its runs were +34 to +54 % with that of the default
  kernel, and that one factor of 0.55 would explain them, was known.
- H100 runs: prompts repeat, so nearly all of a prompt is found in the prefix cache. These runs test decode steps and short prefills, not
  long prompts. The release is 0.15.1 by the design document of sim-to-real-accuracy-validation for 16 experiments, and taken for its later ones; runs of InferenceX of
  2025-10-29 are taken for 0.11, by their date.

## Where it misses

- **Tails of the H100 runs.** Figures without constants are without the 7.0 ms outside of the engine here. With the constants of Llama 2 7B, measured p99 of TTFT is up to {tail:.0f} times the simulated one, in runs with a median within 7 %: 0.99 s in the run of
  Llama 2 70B at 20 requests/s, where simulated queues never form. The arrivals have a constant rate and the lengths hardly vary, so nothing in the
  load causes it. The runs publish no times of single requests that would show when it happened. Tried on that run, without constants (p99 of TTFT -93 %): without asynchronous scheduling -95 %,
  eager -93 %, a budget of 512 tokens -93 %; Poisson arrivals +306 % and steps 1.03 times as long +541 %, with a median of +299 and +4,531 % where it is -11 %; one standstill of 3 s in front of the engine
  -8 %, with a median of -11 % and a p99 of E2E of +2 %. So a server that stood still once explains it, and a slower one does not. On Mixtral 8x22B at 5/s such a standstill of 7 s gives +14 %, but p99 of E2E
  is still -30 %: its steps were slow, too. Steps 1.5 times as long leave p99 of TTFT at -91 %, without prefix cache it is -92 %. Means of TTFT in these runs miss by what the
  tail adds. Held-out runs, with the defaults, with more than ten times: {held_out_tails}.
- **Median TTFT of the RTX PRO 6000.** The run fills its 128 places after 120 requests, and later ones wait in a growing queue. The median lies
  where that queue begins: 300 us more a step, 0.9 % of it, move it from -12.5 to -9.8 %, and the mean by less. LLMServingSim's median is 8.7 % too short.
- **Mixtral 8x7B**: TPOT {moe:+.1%} in the mean over its five runs. Its prompts repeat, and may reach fewer experts than the even
  draws of the simulation. Even routing alone, in place of its mean with skewed routing, would take 3 to 6 % less time for the experts of such steps.
- **At 20 requests/s on H100** TPOT is 0 to 10 % too long, whatever the model, and at low rates it is not. 45 prompts repeat over 70 to 110 running sequences. Tried: if KV that
  several sequences share were read once, the five models with grouped heads are -2 to +3 %, but Llama 2 7B -24 %; k = 1 in mixed steps takes 2 to 5 points. No table has reads of shared KV.
- **ShareGPT bursts on an A100**: a time before the first step is missing, not time of steps. Of bf16, measured less simulated is the same at median, mean and p99 of TTFT and in the duration
  of the run: 11.0, 12.1, 12.2 and 12.4 s. The lengths are substitutes, as neither the data set nor its tokens in Qwen's tokenizer are here; over six draws of them a line through
  these four is 11.1 to 12.9 s plus 0.98 to 1.02 times the simulated time. Of AWQ it is 12.6 to 14.3 s plus 1.06 to 1.09 times, of FP8 13.8 to 15.9 s plus 1.20 to 1.24 times (both without Marlin's rate, see the end): about the same wait
  in three servers, and steps of bf16 within 2 %. By such a line 500 prompts of 4,096 tokens had 7 s, 100 of 32,768 none. With 12 s in front of the engine throughput of bf16 is +0 % in place of +13 %.
  What takes the time is not published. An API server parses a burst whole before the engine gets any of it ([event loops](../measured-server.md#event-loops-of-the-api-server)), in 1 s by the measured
  times. Ten and twenty times as much gives throughput of bf16 +7 and +2 %, but a median TPOT of -5 and -13 %, which is +2 % without. No default has it: it would be a constant of this server. Other causes move throughput
  of bf16 by 2 points at most: no CUDA graphs, budgets of 2,048 and 8,192 tokens or no prefix cache +13 %, 128 places +15 %, another sampler +12 %; lengths of another cut of ShareGPT, in Llama 2's tokens, gave +26 and +25 %.
  FP8 and AWQ are multiplied by Marlin, whose dense GEMMs have no table: they take the time of TensorRT-LLM's kernels, at most at the rate of Marlin's experts. Without that rate their throughput was +39 and +22 %, with it +10 and -1 %.
  As the wait in front is missing for them, too, -1 % means that steps with AWQ are simulated too long.

## What other simulators publish

LLMServingSim publishes its own simulation of the two RTX runs (its error is in the tables where it has the figure). Of other runs: BLIS E2E
11.8 % and TTFT 22.8 % over 38 runs, AISimulate TPOT 2.8 to 5.2 % and TTFT 13.5 to 15.7 %. Those are mean absolute errors over other sets of
runs.
"""
#: Measured over simulated p99 of TTFT from which a held-out run is named.
_LONG_TAIL = 10
#: Runs that led to a correction: which, and their errors in the first simulation of all held-out runs, before it.
_BEFORE = {
    "b200 gpt-oss-120b": (
        "padded experts",
        {"mean_ttft_ms": "14.6% (+14.6%)", "mean_tpot_ms": "43.5% (+43.5%)"},
    ),
    "b200 llama-3.1-70b": (
        "step times may fall",
        {"mean_ttft_ms": "41.9% (-41.9%)", "mean_tpot_ms": "15.4% (+6.9%)"},
    ),
    "rtx-pro-6000 qwen3-30b-a3b": (
        "lock step",
        {"mean_ttft_ms": "87.2% (-87.2%)", "mean_tpot_ms": "14.9% (-14.9%)"},
    ),
}
#: What held-out runs showed.
HELD_OUT_NOTES = """\
### Faults that these runs showed, and their correction

**A single slow kernel slowed every batch.** Every step of Llama 3.1 70B in fp8 on a B200 took 22 % too long with 4 users. 71 GB of weights
take 9.2 ms at the preset's 7.7 TB/s. The table of GEMMs has 14.9 ms for 4 rows and 19.1 ms for one, and the simulated step had 19.1 ms at all batches up to 128, as
step times never fell over tokens. Now they follow the table. Steps of fp8 models on B200 had been 7 to 78 % too long at batches of 2 to 64, those in nvfp4 up
to 5 %, those of all other cards less than 4 %. Nothing was fitted. All runs of this page were seen before. Two changed by more than 1.5 points: TPOT with 4 users from
+22.3% to {b200_4}, with 64 users from -8.6% to {b200_64}.

**Experts in mxfp4 are padded on some cards.** Engine logs of gpt-oss-120b in InferenceX have the size of the KV cache. On one B200 2,543,846 tokens were
logged and 2,784,534 computed. Of the 8.3 GiB between them 7.8 are the padding of 2,880 inputs and outputs to 3,072, which `mxfp4.py` of vLLM 0.22 creates for its default
kernels on B200 to GB300 (0.33 pads inputs to 3,072 and widths to 2,944 there), and for Marlin below compute capability 9. With it the computation is within 0.7 % of three logs on B200. On H100 the computed cache of two,
four and eight GPUs is 14, 5 and 3 % larger than logged: these servers set Marlin, which pads as much; the default does not.

**Engines that share experts did not wait for each other.** One of the two engines of Qwen3 30B A3B was simulated, with half of the requests, as if the other computed
as many tokens in each of its steps; its prefills delayed no step. Now both are simulated in [lock step](../cluster.md#data-and-expert-parallelism), as `DPEngineCoreProc` of vLLM
runs them. Nothing was fitted. Two engines without lock step have a TPOT of -13.4 % and a mean TTFT of -76 %, in lock step {dp_tpot} and {dp_ttft}.

### Errors of more than 10 %, and their causes

| runs | error | cause, and how it was found |
|---|---|---|
| gpt-oss-120b on H100 and H200 | TTFT -31 to -54 %, TPOT within 14 % | The server: it sets `VLLM_MXFP4_USE_MARLIN=1`. The profile has vLLM's default kernel there, OpenAI's Triton one, as the table's `kernel_source` says. Of a prompt of 7,372 tokens on two H100 the experts take 63 of 111 simulated ms, at 0.42 PFLOP/s a GPU, or 0.15 with the missing time. |
| gpt-oss-120b on B200 | TPOT +3 to +19 %, TTFT -10 to -37 % | The shape of the experts. The server sets `VLLM_USE_FLASHINFER_MOE_MXFP4_MXFP8=1`, whose kernel has a table of DeepSeek V4's experts alone, so that gpt-oss's are extrapolated. With the table of the default kernel, of 16-bit activations, TPOT was +34 to +54 % and TTFT +20 to +33 %, which hid that TTFT is too short, as on H100 and H200. Tried with that table: with experts in 0.55 of their time, one factor, TPOT of all four runs is -5 to +0 % (TTFT -17 to -35 % without time outside of the engine); with all steps in 0.65 of theirs it is -14 to 0 %, so that it is not the whole step. Without asynchronous scheduling TPOT is +47 to +59 %, and a budget of 2,048 tokens changes it by 2 points at most. |
| Llama 3.1 70B on two H100, 8k1k, 64 users | TTFT -80 %, TPOT +48 % | The server: its KV cache had 16 bits. The engine's settings are not published for these runs; the script of the same name sets fp8. With `kv_cache_dtype` auto TTFT is +4 % and TPOT +1 %. |
| Llama 3.1 70B on H100, other prompts | TTFT +2 to +22 %, TPOT -12 to +4 % | TTFT was +12 to +47 % with all-reduces of twice the size ([what was chosen](#what-was-chosen-and-on-which-runs)). TPOT of eight GPUs and 64 users is now 8 and 12 % too short. All-reduces are one suspect: since 0.11 vLLM takes its own kernel below 256 KiB on eight H100 and symmetric memory above, as the table of 0.24 does; where the fabric has no multicast, it takes its own kernel up to 8 MiB, as the H100's table of 0.14 does (17.3 us for 1 MiB in place of 15.0), or NCCL (25.4 us). With the table of 0.14 these runs are -4.5 and -7.9 %, with NCCL's for large messages -4.0 and -0.1 %. Which one the server took is not published. |
| Llama 3.1 70B on a B200, 8k1k, 64 users | TTFT -68 %, TPOT -13 % | The server has a smaller KV cache than simulated; its size is not published. Requests hardly wait for the simulated one of 587,000 tokens in fp8 (TTFT 2.4 s), and wait long for half of it, in 16 bits (35 s, TPOT -28 %); measured were 7.8 s. |
| CodeLlama 34B, reasoning; Mixtral 8x22B, reasoning | TTFT -66 %; -93 %; TPOT -12 %; +4 % | Overload of 128 places, or its edge: requests wait in proportion to the difference of rate and capacity. Mixtral's measured server with a TPOT of 20.8 ms has places for 4.2 of 4 requests/s. TPOT's -12 % is the whole error of CodeLlama. Tried before the all-reduces were corrected: with all steps 12 % longer TTFT is +4 % (p99 -4 %) and TPOT -0 %; without asynchronous scheduling TPOT -9 %, without prefix cache +7 %, with a KV cache of 0.7 of the card no change. |
| Mixtral 8x7B on two A100, 8/s and 20/s | TPOT +10 and +11 %, TTFT at 20/s +45 % | With k = 1 in mixed steps it is +9 and +7 %, so that the most of it is not attention; experts are 33 of 38 ms of a step of 64 sequences, by a table of skewed routing. It was +18 and +20 % while the L2 cache was asked for the sum of all contexts: 45 prompts repeat, and 0.56 and 0.43 of the slots are distinct. That is a fault of the rule, found on these runs; no other run of this page changed. At 20/s requests that waited for more than 300 s were given up and are not in the measured means. |
| Qwen3 14B on an A100, 6/s | TPOT -11 % | It was -15 % without the sampler, as which these were tried. Partly attention of mixed steps: with k = 5, its query heads a KV head, in all of them, TPOT is -6 %, and with k = 1 -18 %. The KV of one KV head, 25 MB, is a fifth more than the half of the L2 cache that counts, and the rule takes it from there. Nothing in the settings: without asynchronous scheduling +2 points, eager, 256 places or a budget of 512 tokens no change; without prefix cache it is +34 %. At 2.5/s TPOT is -1 %. |
| Qwen3 14B on an L40S, 6/s | TTFT -68 %, TPOT -2 % | Near saturation: 108 of 128 places are taken in the mean, and the measured p99 of E2E, 24 s, means 144. Some requests waited for seconds. Tried, mean and p99 of TTFT: all steps 1.1 times as long -63 and -95 % (and TPOT +15 %), Poisson arrivals -67 and -96 %, without asynchronous scheduling -80 and -97 %, a budget of 512 tokens no change. One standstill of 10 s in which requests wait in front of the engine gives -46 and 0 %, and p99 of E2E -7 % in place of -28 %. |
| Qwen3 32B on two RTX PRO 6000 | TPOT -18 % with vLLM 0.19, -3 % with 0.28 | One server reduces by vLLM's own kernel, of which the table is, the other, slower one by NCCL. |
| Qwen3 30B A3B, two engines | TPOT {dp_tpot}, TTFT {dp_ttft}, in the median {dp_median} | Requests wait for 128 places, so that mean TTFT multiplies the error of the steps. With the requests of the run itself (`requests.jsonl` of the source, in place of a draw from their quantiles) TTFT is -40 %, in the median -1 %; with 8 % longer steps -7 %, TPOT -1 % and E2E -1 %. Steps with prompts are too short: between recorded tokens, 522 prompt tokens on one engine beside 15 sequences on each took 45 ms, simulated 39, and 319 and 346 on both 57, simulated 37. Steps without are nearer: 41.9 ms with about 110 sequences on each, simulated 40, and 34.1 with about 53, simulated 34. Prompts of more than 256 tokens run without CUDA graphs there, and exchange uneven numbers of tokens; no table has either. The exchange of even numbers is no cause: the source's table of NCCL has 27 and 29 us for 128 tokens, the simulation 36. |
| Llama 4 Scout on two H100 | TPOT +12 and +15 % | The checkpoint: RedHatAI's, in fp8 scaled by row and column, of which vLLM multiplies the experts by its CUTLASS kernels. The table is of fp8 in blocks, by Triton's. Experts are 11 to 18 ms of a step. With them in 0.9 and 0.8 of their time, and attention in 16 bits as the example of llm-compressor for this model leaves it, TPOT is +5 and +7 %, and -3 and -4 %; without the sampler +10 and +11 %. No interval is given from these runs to experts in other kernels. |
| MiniMax-M2.5 on four H200 | TTFT -44 to -69 %, TPOT -15 to +21 % | Not found. One user's token lacks 1.1 ms, eight users' none. Tried: 4 us for the choice of experts, as vLLM's pull request 34206 has it on an H200, in place of the shortest call: one user -13 %, 32 users +8 %. The router in fp32 by PyTorch, as up to 0.22 (pull request 47973, GB200): one user -13 %, but 32 users +29 %; since 0.23 it takes 2 us (the same), so that one user is -19 % by that release. The tables have neither kernel. Rows of GEMMs in fp8 of few tokens take 60 us on Hopper and 180 to 320 us on Blackwell, which is the host's time of a launch that a captured graph does not have: not used. With 1 to 8 users prompts take 60 to 74 ms more than simulated, and on four B200 3 ms more with 4 users, so that the client is unlikely to be the cause. Release and flags are not published. |
| Other warm runs | TTFT -24 to +3 % | Without the 7.0 ms outside of the engine -5 to -34 %. Those of more than 10 %: Mixtral 8x22B at 5/s has a tail (below), Qwen3 14B at 20/s on an H100 and at 2.5/s on an A100 took 6 to 8 ms more. |

Left out: experiments 27 and 57 of the same table, which repeat runs of this page (Mixtral 8x7B with a budget of 1,024 tokens, CodeLlama 34B at 2.5 and 6/s) with a
TPOT four times as long, without a stated cause; `reasoning` runs in which 1,600 and more of 4,800 requests were given up after 300 s, as the simulation's requests
wait on. Of Llama 4 Scout the source publishes measured means and p99 of TTFT and E2E (column `actual` of error_records.csv) beside the errors of other
simulators; two stages are among the [given runs](#given-runs). Of the loads on DeepSeek-V4, GLM-5 and Kimi in the same InferenceX table none was simulated."""
_METRICS = {
    "output_throughput": "output tokens/s",
    **{
        f"{which}_{name}_ms": f"{label}, {which}"
        for name, label in (("ttft", "TTFT"), ("tpot", "TPOT"), ("e2el", "E2E"))
        for which in ("mean", "median", "p99")
    },
}

#: Fields of the board that are stored for the intervals.
_STORED = ("server", "gpu", "backend", "kernels", "kind", "load", "busy", "overload", "standing", "errors", "source")
_BOARD_METRICS = {"throughput": "output tokens/s", "ttft": "TTFT", "tpot": "TPOT", "e2el": "E2E"}


def page(found: Mapping[str, Any]) -> str:
    """The page, in Markdown."""
    rows = found["rows"]
    names = list(dict.fromkeys(row["run"] for row in rows))
    missed = sum(target["outcome"] == "fail" for target in found["targets"])
    light = [
        abs(row["errors"]["ttft"])
        for row in found["board"]
        if row["load"] == "open loop" and not row["busy"] and row["standing"] != "fitted" and "ttft" in row["errors"]
    ]
    head = HEAD.format(
        light=len(light),
        ttft=median(light),
        outside=OUTSIDE_MS,
        runs=len(names),
        constants="\n".join(_constants(found["constants"])),
        missed="All limits are met." if not missed else f"{missed} of {len(found['targets'])} limits are missed.",
        targets="\n".join(_targets(found["targets"])),
        board=_board(found),
    )
    held_out, given = ([row for row in rows if row["kind"] == kind] for kind in ("held out", "given"))
    others = [row for row in rows if row["kind"] in ("fitted", "predicted")]
    below = HELD_OUT.format(
        groups="\n".join(_groups(found["summary"])),
        corrected="\n".join(_before_and_after(found["summary"])),
        lines="\n".join(error_table(held_out)),
        notes=HELD_OUT_NOTES.format(**_corrected(held_out)),
    )
    parts = [
        head,
        "## Errors\n",
        *error_table(others),
        "",
        below,
        GIVEN.format(lines="\n".join(error_table(given))),
        "## Measured and simulated\n",
        *_values(rows),
    ]
    parts += ["\n## Sources\n", *_sources(rows)]
    h100 = [row for row in others if row["run"].startswith("h100") and row["constants"] != "nothing"]
    moe = [row["error"] for row in h100 if "mixtral" in row["run"] and row["metric"] == "mean_tpot_ms"]
    tail = max(row["measured"] / row["simulated"] for row in h100 if row["metric"] == "p99_ttft_ms")
    tails = ", ".join(_long_tails(held_out))
    notes = NOTES.format(packed=PACKED_K, moe=sum(moe) / len(moe), tail=tail, held_out_tails=tails)
    return "\n".join([*parts, notes])


def _board(found: Mapping[str, Any]) -> str:
    columns = ", ".join(f"`{name}`" for name in REQUEST_COLUMNS)
    classes, peers = "\n".join(_classes(found["classes"])), "\n".join(_peers(found["peers"]))
    low, high = COVERAGE
    intervals = "\n".join(_intervals(found["intervals"]))
    about = {"share": SHARE, "least": LEAST_RUNS, "low": low, "high": high, "intervals": intervals}
    return BOARD.format(changed=STEP_TIMES_CHANGED, classes=classes, peers=peers, columns=columns, **about)


def _intervals(intervals: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line for each metric and class."""
    lines = []
    for each in intervals:
        ends = f"{each['low']:.2f} to {each['high']:.2f}" if "low" in each else ""
        shares = (f"{each[name]:.1%}" for name in ("coverage", "half_width"))
        scores = (f"{each[name]:.2f}" for name in ("interval_score", "box_score"))
        counts = str(each["runs"]), str(each["servers"])
        lines.append((_BOARD_METRICS[each["metric"]], each["class"] or "all", *counts, *shares, *scores, ends))
    return markdown(("metric", "class", "runs", "servers", "covered", "half width", "score", "box", "interval"), lines)


def _classes(classes: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line for each class."""
    lines = []
    for each in classes:
        errors = each["median_absolute_error"]
        cells = (f"{errors[metric]:.1%}" if metric in errors else "" for metric in _BOARD_METRICS)
        lines.append((each["class"], str(len(each["runs"])), str(each["unseen"]), *cells))
    return markdown(("class", "runs", "unseen", *_BOARD_METRICS.values()), lines)


def _peers(peers: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line for each other simulator and metric."""
    lines = []
    for each in peers:
        errors = f"{each['peer_median']:.1%}", f"{each['our_median']:.1%}"
        lines.append((each["peer"], _BOARD_METRICS[each["metric"]], str(each["runs"]), *errors))
    return markdown(("simulator", "", "runs", "published", "ours"), lines)


def _constants(fits: Mapping[str, Mapping[str, Any]]) -> list[str]:
    lines = []
    for name, fit in fits.items():
        on = ", ".join(fit["fitted_on"]) or "-"
        lines.append((name, on, f"{fit['outside_ms']:.1f}", f"{fit['step_us']:.0f}"))
    return markdown(("constants of", "fitted on", "outside_ms", "step_us"), lines)


def _targets(targets: Sequence[Mapping[str, Any]]) -> list[str]:
    lines = []
    for target in targets:
        about = (f"{target['runs']} ({target['num_runs']})", target["constants"], target["kind"])
        numbers = f"{target['limit']:.0%}", f"{target['mean_absolute_error']:.1%}", f"{target['bias']:+.1%}"
        lines.append((*about, _METRICS[target["metric"]], *numbers, target["outcome"]))
    return markdown(("runs", "constants of", "", "metric", "limit", "error", "bias", "outcome"), lines)


def _corrected(rows: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Errors after the correction of runs that had others before."""
    engines = "rtx-pro-6000 qwen3-30b-a3b 2 engines"
    names = {
        "b200_4": ("b200 llama-3.1-70b 8k1k 4 users", "mean_tpot_ms"),
        "b200_64": ("b200 llama-3.1-70b 8k1k 64 users", "mean_tpot_ms"),
        "dp_tpot": (engines, "mean_tpot_ms"),
        "dp_ttft": (engines, "mean_ttft_ms"),
        "dp_median": (engines, "median_ttft_ms"),
    }
    errors = {(row["run"], row["metric"]): row["error"] for row in rows}
    return {key: f"{errors[name]:+.1%}" for key, name in names.items()}


def _long_tails(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Runs with a measured p99 of TTFT of more than ``_LONG_TAIL`` times the simulated one, and that factor; the longest first."""
    found = [(row["measured"] / row["simulated"], row["run"]) for row in rows if row["metric"] == "p99_ttft_ms"]
    for factor, name in sorted(found, reverse=True):
        if factor > _LONG_TAIL:
            yield f"{factor:.0f} times in {name}"


def _groups(summary: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line for each card and model with held-out runs."""
    shown = ("output_throughput", "mean_ttft_ms", "mean_tpot_ms", "mean_e2el_ms")
    table = []
    lines: dict[str, dict[str, str]] = {}
    runs: dict[str, int] = {}
    for row in summary:
        if row["kind"] == "held out":
            value = f"{row['mean_absolute_error']:.1%} ({row['bias']:+.1%})"
            lines.setdefault(row["runs"], {})[row["metric"]] = value
            runs[row["runs"]] = max(row["num_runs"], runs.get(row["runs"], 0))
    for name, values in lines.items():
        mark = " \\*" if name in _BEFORE else ""
        table.append((f"{name} ({runs[name]}){mark}", *(values.get(metric, "") for metric in shown)))
    return markdown(("runs", *(_METRICS[metric] for metric in shown)), table)


def _before_and_after(summary: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line for each card and model with runs that led to a correction."""
    metrics = ("mean_ttft_ms", "mean_tpot_ms")
    headings = (f"{_METRICS[metric]}, {when}" for metric in metrics for when in ("first", "now"))
    lines = []
    now = {
        (row["runs"], row["metric"]): f"{row['mean_absolute_error']:.1%} ({row['bias']:+.1%})"
        for row in summary
        if row["kind"] == "held out"
    }
    for name, (correction, before) in _BEFORE.items():
        values = ((before[metric], now.get((name, metric), "")) for metric in metrics)
        lines.append((name, correction, *(cell for pair in values for cell in pair)))
    return markdown(("runs", "correction", *headings), lines)


def error_table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Markdown of the errors: a line for each run and its server constants, followed by a line for each other simulator that published
    errors of that run."""
    table = []
    lines: dict[tuple[str, str, str], dict[str, float]] = {}
    for row in rows:
        lines.setdefault((row["run"], row["constants"], row["kind"]), {})[row["metric"]] = row["error"]
        for key, error in row.items():
            if key.startswith("published_"):
                by = key.removeprefix("published_").removesuffix("_error")
                lines.setdefault((row["run"], f"*{by}*", "published"), {})[row["metric"]] = error
    for about, errors in sorted(lines.items(), key=lambda line: line[0][0]):
        table.append((*about, *(f"{errors[metric]:+.1%}" if metric in errors else "" for metric in _METRICS)))
    return markdown(("run", "constants of", "", *_METRICS.values()), table)


def _values(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Measured and simulated values, in ms unless stated."""
    yield "Measured, then simulated with no constants; ms unless stated.\n"
    table = []
    lines: dict[str, dict[str, str]] = {}
    for row in rows:
        if row["constants"] == "nothing":
            value = f"{_number(row['measured'])}, {_number(row['simulated'])}"
            lines.setdefault(row["run"], {})[row["metric"]] = value
    for name, values in sorted(lines.items()):
        table.append((name, *(values.get(metric, "") for metric in _METRICS)))
    yield from markdown(("run", *_METRICS.values()), table)


def _sources(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    by_source: dict[str, list[str]] = {}
    for name, source in dict.fromkeys((row["run"], row["source"]) for row in rows):
        by_source.setdefault(source, []).append(name)
    for source, names in by_source.items():
        yield f"- {source}: {', '.join(names)}."


def errors(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The errors of each run with the shipped defaults, its class and standing, and the settings that the board does not name."""
    settings = {fact["name"]: fact["settings"] for fact in facts()["runs"]}
    return [
        {
            "run": row["run"],
            "model": settings[row["run"]]["model"],
            "data_parallel_size": settings[row["run"]].get("data_parallel_size", 1),
            "quantization": settings[row["run"]].get("quantization"),
            "kv_cache_dtype": settings[row["run"]].get("kv_cache_dtype"),
            **{name: row[name] for name in _STORED},
        }
        for row in found["board"]
    ]


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


if __name__ == "__main__":
    document = json.loads(Path(sys.argv[1]).read_text("utf-8"))
    (Path(__file__).parent / "results" / "servers.md").write_text(page(document), encoding="utf-8")
    if not document["left_out"]:
        rows = ",\n".join(json.dumps(row) for row in errors(document))
        (Path(__file__).parents[1] / "experiments/measured/facts/server_errors.json").write_text(f"[\n{rows}\n]\n")
