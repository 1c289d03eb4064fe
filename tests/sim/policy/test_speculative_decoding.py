"""Speculative decoding of vllm-v1: steps verify drafts, and sequences gain those that are accepted."""

from __future__ import annotations

import json
from dataclasses import replace

import hypothesis
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_runs import LONG_MODEL
from fragmeter.sim.cluster import cluster, simulate_cluster
from fragmeter.sim.cluster.summary import cluster_summary
from fragmeter.sim.config.settings import Settings, settings
from fragmeter.sim.cost import cost as cost_of
from fragmeter.sim.engine.observer import Observer
from fragmeter.sim.engine.replica import build
from fragmeter.sim.engine.run import simulate
from fragmeter.sim.memory.accounting.drafts import Speculation
from fragmeter.sim.memory.accounting.ledger import DRAFT, Leap
from fragmeter.sim.memory.paged.speculative import SpeculativeMemory
from fragmeter.sim.metrics.openmetrics import openmetrics
from fragmeter.sim.metrics.requests import request_times
from fragmeter.sim.metrics.result import memory_table
from fragmeter.sim.metrics.summary import summary
from fragmeter.sim.recording.blocks.recording import BlockRecording
from fragmeter.sim.recording.plans.recording import PlanRecording
from fragmeter.sim.runs.run import Run
from fragmeter.sim.spec import Deployment, gpu, model
from fragmeter.sim.spec.speculative import one_layer, parse_speculative
from fragmeter.sim.spec.startup.capacity import capacity
from fragmeter.sim.spec.startup.launch import Launch
from fragmeter.sim.types.errors import SettingError
from fragmeter.sim.types.sequence import Sequence, StepPlan
from fragmeter.sim.workload.content import PromptContent
from fragmeter.sim.workload.workload import Workload
from shared_prefixes import SharedCase, caching_settings, shared_cases
from strategies import LineCost

few = hypothesis.settings(max_examples=40)
METHODS = ("draft_model", "eagle3", "ngram")
ahead = pytest.mark.parametrize("ahead", [False, True], ids=["sync", "async"])


def config(method: str, drafts: int, rates: list[float] | float) -> dict[str, object]:
    """vLLM's configuration; a number is the rate at which each draft is accepted if those before it are."""
    if not isinstance(rates, list):
        rates = [rates**place for place in range(1, drafts + 1)]
    found = {"method": method, "num_speculative_tokens": drafts, "synthetic_acceptance_rates": rates}
    return found | {"rejection_sample_method": "synthetic"} | ({"model": LONG_MODEL} if method == "draft_model" else {})


def one_request(output_tokens: int, prompt_tokens: int = 8) -> Workload:
    return Workload("one", np.array([0]), np.array([prompt_tokens]), np.array([output_tokens]))


class Flat(LineCost):
    """Steps of 100 ticks."""

    def step_ticks(self, decodes: int, decode_context: int, prefill_tokens: int, prefill_pairs: int) -> int:
        return 100

    def decode_line(self, decodes: int, context: int) -> tuple[int, int, int | None]:
        return 100, 0, None


def chosen(drafting: dict[str, object] | None, **others: object) -> Settings:
    given = {"num_gpu_blocks_override": 100, "block_size": 4, "max_model_len": 64, "model": LONG_MODEL} | others
    return settings(policy="vllm-v1", speculative_config=drafting, outside_ms=0, **given)


@ahead
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("rate", "gain"), [(0, 1), (1, 4)])
def test_acceptance_0_and_1_have_closed_forms(method: str, rate: float, gain: int, ahead: bool):
    """A step for the prompt, and one for each token (each 4 tokens) of the output after the first; its length and time."""
    for outputs in (1, 2, 5, 9, 30, 31):
        run = simulate(chosen(config(method, 3, rate), async_scheduling=ahead), one_request(outputs), Flat())
        steps = 1 + -(-(outputs - 1) // gain)
        times = request_times(run)
        assert times.finish_ticks.tolist() == [100 * steps]
        # The time of a token after the first, times their number.
        assert (times.finish_ticks - times.first_token_ticks).tolist() == [100 * (steps - 1)]
        found = summary(run)["speculative_decoding"]
        assert found["spec_decode_num_drafts"] == steps - 1
        assert found["spec_decode_acceptance_length"] == (gain if steps > 1 else 0)
        assert found["spec_decode_acceptance_rate"] == (100.0 * rate if steps > 1 else 0)


@ahead
@pytest.mark.parametrize("method", ["ngram", "eagle"])
def test_blocks_of_a_finished_request_are_cached_while_nothing_runs(method: str, ahead: bool):
    """Two requests of 8 tokens and 5 of output, of which 12 have KV at the end: three blocks of 4. The first one's stay cached from
    its end on at 500, also under the second, which begins at 10,000."""
    work = Workload("two", np.array([0, 10_000]), np.array([8, 8]), np.array([5, 5]))
    given = chosen(config(method, 2, 0), async_scheduling=ahead, enable_prefix_caching=True)
    run = simulate(given, work, Flat())
    assert run.log.end_ticks == 10_500
    assert run.accounts.window().slot_ticks["cached"] == 12 * (10_500 - 500)
    assert run.accounts.window(2000, 3000).slot_ticks["cached"] == 12 * 1000


class _Slots(Observer):
    """Live and rejected slots, blocks and drafts of each step."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def run_started(self, engine, refused) -> None:
        self.engine = engine

    def step_started(self, now: int, ticks: int, leap: Leap, plan: StepPlan) -> None:
        memory = self.engine.memory
        blocks = {each.index: len(table[0]) for each, table in memory.kept.tables.items()}
        drafts = {each.index: number for each, number in plan.drafts.items()}
        self.lines.append(f"{now}: blocks {blocks}, drafts {drafts}, prompt {plan.prefill_tokens}")


def test_a_story_of_slots():
    """Blocks of 4. EAGLE's first step reserves 6 tokens and 2 to look ahead; a step with drafts reserves 3 tokens and 2 more; one of
    two drafts is accepted. The last step has no room for drafts below ``max_model_len``."""
    log = _Slots()
    work, drafting = one_request(6, prompt_tokens=6), config("eagle", 2, [1.0, 0.0])
    run = simulate(chosen(drafting, async_scheduling=False, max_model_len=12), work, Flat(), observers=[log])
    assert log.lines == [
        "0: blocks {0: 2}, drafts {}, prompt 6",
        "100: blocks {0: 3}, drafts {0: 2}, prompt 0",
        "200: blocks {0: 3}, drafts {0: 2}, prompt 0",
        "300: blocks {0: 3}, drafts {0: 0}, prompt 0",
    ]
    table = memory_table(run)
    assert table["live"].tolist() == [6, 8, 10, 11]
    assert table["rejected"].tolist() == [0, 1, 1, 0]
    assert (table["live"] + table["rejected"] + table["reserved"] + table["block_tail"]).tolist() == [8, 12, 12, 12]
    assert run.log.drafts["accepted"].tolist() == run.log.drafts["kept"].tolist() == [1, 1]


def _speculating(case: SharedCase, method: str, drafts: int, rate: float, **others: object) -> Settings:
    tokens = max(case.limits.max_num_batched_tokens, drafts + 1)
    found = caching_settings(case, speculative_config=config(method, drafts, rate), **others)
    return replace(found, max_num_batched_tokens=tokens)


def _check_conserved(run: Run) -> None:
    """Every request is served, every token once, and every slot is in one bucket."""
    served, log = ~run.refused, run.log
    assert sorted({*log.residencies["index"].tolist()}) == np.flatnonzero(served).tolist()
    assert not {*log.evictions["index"].tolist()} - {*log.residencies["index"].tolist()}
    work = summary(run)["work"]["tokens"]
    # What is computed and not lost: prompts and outputs, but for tokens found in the cache and the last of each.
    assert min(work.values()) >= 0
    table = memory_table(run)
    others = ("start_ticks", "largest_free_run", "host_held")
    names = [name for name in table if name not in others and "." not in name]
    assert (table[names].sum(axis=1) == log.capacity_slots).all()
    assert table.drop(columns="host_held", errors="ignore").to_numpy().min(initial=0) >= 0
    assert min(run.window.slot_ticks.values()) >= 0 <= min(run.window.slot_steps.values())
    memory = run.replica.memory
    assert isinstance(memory, SpeculativeMemory)
    assert memory.kept.pool.num_free == memory.num_blocks and not memory.kept.tables


@pytest.mark.slow
@ahead
@few
@given(
    case=shared_cases(), method=st.sampled_from(METHODS), drafts=st.integers(1, 4), rate=st.sampled_from([0, 0.6, 1])
)
def test_slots_are_conserved_and_nothing_is_stuck(case: SharedCase, method: str, drafts: int, rate: float, ahead: bool):
    """Under pools so tight that sequences are preempted, budgets that end within drafts, and prefixes in common."""
    found = _speculating(case, method, drafts, rate, async_scheduling=ahead)
    run = simulate(found, case.workload, case.cost)
    _check_conserved(run)
    stepped = simulate(replace(found, leap=False), case.workload, case.cost)
    assert summary(stepped) == summary(run)


@ahead
@pytest.mark.parametrize("method", ["mtp", "ngram"])
@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("name", ["gemma-3-27b", "qwen3-next-80b-a3b", "nemotron-h-8b"])
def test_slots_are_conserved_beside_windows_and_states(name: str, caching: bool, method: str, ahead: bool):
    """In a pool that holds little more than the longest request."""
    lengths = np.array([40, 900, 1500, 300, 1200, 30]), np.array([60, 20, 90, 150, 40, 70])
    content = PromptContent.of_sessions(np.array([0, 1, 0, 1, 0, 1]))
    work = Workload("six", np.zeros(6, dtype=np.int64), *lengths, content=content)
    given = {"gpu": "h200", "tensor_parallel_size": 4, "max_model_len": 2048, "enable_prefix_caching": caching}
    given |= {"async_scheduling": ahead, "speculative_config": config(method, 3, 0.6), "max_num_batched_tokens": 700}
    wide = build(settings(policy="vllm-v1", model=name, **given))
    least = int(wide.policy.smallest_pool_blocks(work, wide.block_size).max())
    for blocks in (least, least + 20):
        run = simulate(settings(policy="vllm-v1", model=name, num_gpu_blocks_override=blocks, **given), work)
        assert not run.refused.any()
        _check_conserved(run)


@pytest.mark.slow
@few
@given(case=shared_cases(), drafts=st.integers(1, 4))
def test_what_is_accepted_depends_on_no_schedule(case: SharedCase, drafts: int):
    """For each place of an output as many drafts, as far as a step verifies them."""
    speculation = Speculation(parse_speculative(json.dumps(config("eagle", drafts, 0.6))), seed=0)
    for ahead, caching in ((False, True), (True, True), (True, False)):
        found = _speculating(case, "eagle", drafts, 0.6, async_scheduling=ahead, enable_prefix_caching=caching)
        log = simulate(found, case.workload, case.cost).log
        known = {}
        for index, start, tokens in zip(*(log.residencies[name] for name in ("index", "start_step", "tokens"))):
            known.setdefault(int(index), []).append((int(start), int(tokens)))
        gained = dict.fromkeys(((index, start) for index, each in known.items() for start, _ in each), 0)
        for index, step, number, accepted, kept in zip(*(log.drafts[name].tolist() for name in DRAFT)):
            start, tokens = max(each for each in known[index] if each[0] <= step)
            prompt, output = int(case.workload.prompt_tokens[index]), int(case.workload.output_tokens[index])
            place = tokens + step - start + gained[index, start] - prompt
            # What pads the first step of a sequence is rejected.
            drawn = speculation.accepted(Sequence(index, prompt, output, output), place) if step > start else 0
            pads = start == step and not accepted
            assert pads or accepted == min(number, drawn)
            assert kept == min(accepted, output - place - 1)
            gained[index, start] += kept


def test_rates_are_those_of_the_draws():
    """Of 4,000 places, within four standard deviations."""
    rates = [0.8, 0.5, 0.1]
    speculation = Speculation(parse_speculative(json.dumps(config("eagle", 3, rates))), seed=3)
    sequence = Sequence(0, 1, 4000, 4000)
    drawn = np.array([speculation.accepted(sequence, place) for place in range(4000)])
    # Each request has a random stream of its own, the 24th of the seed.
    stream = np.random.default_rng(np.random.SeedSequence(3, spawn_key=(24, 0))).random((4000, 1))
    assert drawn.tolist() == (stream < rates).sum(axis=1).tolist()
    for place, rate in enumerate(rates):
        assert abs((drawn > place).mean() - rate) < 4 * (rate * (1 - rate) / 4000) ** 0.5
    # Another request has another stream, and the same one has the same.
    assert [speculation.accepted(Sequence(1, 1, 50, 50), at) for at in range(50)] != drawn[:50].tolist()
    again = Speculation(speculation.config, seed=3)
    assert [again.accepted(sequence, at) for at in range(4000)] == drawn.tolist()


def test_the_same_settings_give_the_same_run():
    work = Workload("many", np.arange(20) * 50, np.arange(5, 25), np.arange(20, 40))
    runs = [simulate(chosen(config("eagle", 3, 0.6), seed=seed), work, Flat()) for seed in (0, 0, 1)]
    kept = [run.log.drafts["kept"].tolist() for run in runs]
    assert kept[0] == kept[1] != kept[2]
    assert summary(runs[0]) == summary(runs[1])


def test_a_step_takes_the_time_of_its_rows_and_of_the_drafter():
    """The second step: 8 tokens have KV, it computes 4 rows; then the drafter computes these, and twice the row of a token."""
    given = {"model": "llama-3.1-8b", "gpu": "h100-80gb", "cost": "roofline", "async_scheduling": False}
    ends = {}
    for method in ("ngram", "eagle"):
        run = simulate(chosen(config(method, 3, 0), **given), one_request(2))
        ends[method] = request_times(run)
    target = build(settings(policy="vllm-v1", block_size=4, max_model_len=64, **given)).cost
    layer = one_layer(model("llama-3.1-8b"), with_experts=False)
    deployment = Deployment(cuda_graphs=True)
    drafter = cost_of("roofline", layer, gpu("h100-80gb"), block_size=4, deployment=deployment, asynchronous=True)
    verified = target.step_ticks(4, 9 + 3, 0, 0)
    assert (ends["ngram"].finish_ticks - ends["ngram"].first_token_ticks).tolist() == [verified]
    passes = drafter.step_ticks(4, 12, 0, 0) + drafter.step_ticks(1, 10, 0, 0) + drafter.step_ticks(1, 11, 0, 0)
    assert (ends["eagle"].finish_ticks - ends["eagle"].first_token_ticks).tolist() == [verified + passes]
    assert layer.num_layers == 1 and 0 < passes < verified


@pytest.mark.parametrize(("method", "layers"), [("eagle3", 1), ("mtp", 1), ("draft_model", 16), ("ngram", 0)])
def test_a_drafter_takes_memory_and_slots_from_the_pool(method: str, layers: int):
    """A block has the target's 32 layers and the drafter's; Llama 3.2 1B has 16 of half as wide heads, so 8 layers' bytes."""
    drafting = config(method, 3, 0.6) | ({"model": "llama-3.2-1b"} if method == "draft_model" else {})
    given = {
        "model": model("llama-3.1-8b"),
        "gpu": gpu("h100-80gb"),
        "max_model_len": 8192,
        "max_num_seqs": 256,
        "max_num_batched_tokens": 8192,
    }
    plain = capacity(Launch(**given))
    found = capacity(Launch(**given, speculative=parse_speculative(json.dumps(drafting))))
    kept = layers / 2 if method == "draft_model" else layers
    assert found.stage.block_bytes * 32 == plain.stage.block_bytes * (32 + kept)
    weights = found.stage.weights.likely - plain.stage.weights.likely
    if method == "ngram":
        assert weights == 0 and found.stage.block_bytes == plain.stage.block_bytes
        return
    # Graphs of steps with drafts are of other sizes, and the second model runner keeps the drafts' rows outside of the step.
    graphs = found.stage.cuda_graphs.likely - plain.stage.cuda_graphs.likely
    rows = found.stage.non_torch.likely - plain.stage.non_torch.likely
    assert rows > 0
    assert found.stage.kv_cache_bytes == plain.stage.kv_cache_bytes - weights - graphs - rows
    assert found.num_blocks < plain.num_blocks
    # Of a layer of Llama 3.1 8B: 218 million parameters, and two or three squares of the hidden size; Llama 3.2 1B: 1.24 billion.
    hidden = 4096 * 4096 * {"eagle3": 3, "mtp": 2}.get(method, 0)
    expected = 1_235_814_400 if method == "draft_model" else 218_112_000 + hidden
    assert weights == 2 * expected
    chosen = {"model": "llama-3.1-8b", "gpu": "h100-80gb", "max_model_len": 8192}
    replica = build(settings(policy="vllm-v1", speculative_config=drafting, **chosen))
    assert replica.num_blocks < build(settings(policy="vllm-v1", **chosen)).num_blocks


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("{", r"^speculative_config = '{': is no JSON"),
        ("[]", r"^speculative_config = '\[\]': must be an object"),
        (
            '{"method": "medusa", "num_speculative_tokens": 2}',
            r"^speculative_config.method = 'medusa': must be one of ",
        ),
        ('{"method": "eagle"}', r"^speculative_config.num_speculative_tokens = None: must be a number from 1 to 64$"),
        ('{"model": "x"}', r"^speculative_config.num_speculative_tokens = None: "),
        ('{"num_speculative_tokens": 2}', r"^speculative_config.model = None: must name the draft model"),
        ('{"method": "eagle", "num_speculative_tokens": 2}', r"does not say how many drafts are accepted; add "),
        ('{"method": "eagle", "tree": 1}', r"^speculative_config.tree = 1: is not simulated; leave it out$"),
    ],
)
def test_a_configuration_that_is_not_simulated_is_refused(text: str, error: str):
    with pytest.raises(SettingError, match=error) as found:
        settings(policy="vllm-v1", speculative_config=text)
    assert "\n" not in str(found.value)


@pytest.mark.parametrize(
    ("changed", "error"),
    [
        ({"synthetic_acceptance_rates": [0.5, 0.6]}, "must not rise"),
        ({"synthetic_acceptance_rates": [0.5]}, "must be 2 numbers"),
        (
            {"synthetic_acceptance_length": 1.5},
            "^speculative_config.synthetic_acceptance_length = 1.5: is given beside synthetic_acceptance_rates; leave out one",
        ),
        (
            {"rejection_sample_method": None},
            '^speculative_config.rejection_sample_method = None: must be "synthetic" beside synthetic_acceptance_rates; add'
            ' "rejection_sample_method": "synthetic"$',
        ),
        (
            {
                "rejection_sample_method": "standard",
                "synthetic_acceptance_rates": None,
                "synthetic_acceptance_length": 2,
            },
            "^speculative_config.rejection_sample_method = 'standard': must be \"synthetic\" beside synthetic_acceptance_length; ",
        ),
        ({"synthetic_acceptance_rates": None}, "does not say how many"),
        ({"synthetic_acceptance_rates": None, "synthetic_acceptance_length": 3.5}, "must be from 1 to 3"),
    ],
)
def test_rates_that_cannot_be_are_refused(changed: dict[str, object], error: str):
    with pytest.raises(SettingError, match=error):
        settings(policy="vllm-v1", speculative_config=config("eagle", 2, 0.5) | changed)


def test_a_mean_length_has_the_smallest_variance():
    given = {"method": "mtp", "num_speculative_tokens": 3, "rejection_sample_method": "synthetic"}
    found = parse_speculative(json.dumps(given | {"synthetic_acceptance_length": 2.75}))
    assert found.acceptance_rates == (1.0, 0.75, 0.0)
    assert parse_speculative(json.dumps(given | {"synthetic_acceptance_length": 4})).acceptance_rates == (1.0, 1.0, 1.0)


@pytest.mark.parametrize(
    "beside",
    [
        {"pipeline_parallel_size": 2, "async_scheduling": False},
        {"model": "glm-5.3-flash", "gpu": "h200", "tensor_parallel_size": 4},
    ],
    ids=lambda beside: next(iter(beside)),
)
def test_what_it_is_not_simulated_with_is_refused(beside: dict[str, object]):
    given = {"model": "llama-3.1-8b", "gpu": "h100-80gb"} | beside
    with pytest.raises(SettingError, match=r"^(speculative_config|model) = [^\n]+; leave out [^\n]+$"):
        build(settings(policy="vllm-v1", speculative_config=config("eagle", 2, 0.5), **given))


def test_a_cluster_counts_the_drafts_of_its_replicas():
    work = Workload("many", np.arange(12) * 1000, np.full(12, 9), np.full(12, 20))
    drafting = chosen(config("eagle", 3, 0.6))
    served = simulate_cluster(drafting, work, cluster(num_replicas=2))
    drafts = [part.log.drafts for part in served.runs]
    found = cluster_summary(served)
    pooled = found["speculative_decoding"]
    assert pooled["spec_decode_num_drafts"] == sum(len(each["index"]) for each in drafts)
    assert pooled["spec_decode_accepted_tokens"] == sum(int(each["accepted"].sum()) for each in drafts)
    apart = simulate_cluster(drafting, work, cluster(prefill_replicas=1, decode_replicas=1))
    prefills, decodes = (part.log.drafts for part in apart.runs)
    # A request of one token has no use for drafts.
    assert not prefills["kept"].sum()
    assert decodes["kept"].sum() > 0


def test_metrics_are_vllms():
    run = simulate(chosen(config("eagle", 2, [1.0, 0.0])), one_request(6), Flat())
    last = {}
    for line in "".join(openmetrics([run], "m")).splitlines():
        if line.startswith("vllm:spec_decode"):
            name, value, _ = line.rsplit(" ", 2)
            last[name.replace('job="fragmeter",engine="0",model_name="m"', "")] = int(value)
    assert last == {
        "vllm:spec_decode_num_drafts_total{}": 3,
        "vllm:spec_decode_num_draft_tokens_total{}": 6,
        "vllm:spec_decode_num_accepted_tokens_total{}": 3,
        'vllm:spec_decode_num_accepted_tokens_per_pos_total{,position="0"}': 3,
        'vllm:spec_decode_num_accepted_tokens_per_pos_total{,position="1"}': 0,
    }


@pytest.mark.parametrize("observer", [BlockRecording, PlanRecording])
def test_recordings_know_nothing_of_drafts(observer):
    work, drafting = one_request(6), chosen(config("eagle", 2, 0.5), ids=True)
    with pytest.raises(SettingError, match="verifies drafts, of which a recording knows nothing"):
        simulate(drafting, work, Flat(), observers=[observer(drafting, work)])
