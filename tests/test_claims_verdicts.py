"""Every rule of the claims on made-up numbers: each part just within its bound and just beyond it, and no other
moved.

A case is a number of the probe with values that lie on either side of a bound of one part, by the part's text.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fragmeter.experiments.claim import FAILS, HOLDS, HOLDS_ONLY, UNTESTED, Foreseen, Judged, Part, Probe, Source
from fragmeter.experiments.claim import Measured, differences, table_row
from fragmeter.experiments.claims import claims, systems

#: Values with which every part holds, and for each number (value just within, just beyond, the part's text).
CLAIMS: dict[int, tuple[dict[str, float], list[tuple[str, float, float, str]]]] = {
    1: (
        {"orca_max_live_pct": 20.4, "static_live_pct": 8.0},
        [("orca_max_live_pct", 18.4, 18.39, "Orca (Max)"), ("orca_max_live_pct", 22.4, 22.41, "Orca (Max)")],
    ),
    2: (
        {"reserved": 3, "over_estimate": 2545, "free_and_too_small": 1024, "waiting": 1},
        [
            ("reserved", 1, 0, "slots reserved for tokens to come"),
            ("over_estimate", 1, 0, "slots for an output that never comes"),
            ("free_and_too_small", 1, 0, "free slots, too few for who waits"),
            ("waiting", 1, 0, "free slots, too few for who waits"),
        ],
    ),
    3: (
        {"ended_or_padding_static_pct": 60.0, "ended_or_padding_orca_max_pct": 0.0, "reserved_orca_oracle_pct": 24.0,
         "external_orca_oracle_pct": 37.0, "all_three_vllm_pct": 1.6},
        [
            ("ended_or_padding_orca_max_pct", 59.0, 59.1, "what continuous batching removes"),
            ("reserved_orca_oracle_pct", 1.0, 0.9, "reservation, which remains"),
            ("external_orca_oracle_pct", 1.0, 0.9, "external fragmentation, which remains"),
            ("all_three_vllm_pct", 4.0, 4.1, "what paging removes"),
        ],
    ),
    4: (
        {"vllm": 20.0, "vllm_over_told_cap": 3.0, "vllm_over_told_length": 3.0, "vllm_over_fastertransformer": 6.0},
        [
            ("vllm_over_told_cap", 2.86, 2.84, "3x over continuous batching that reserves the cap (Orca)"),
            ("vllm_over_told_length", 2.86, 2.84, "3x over continuous batching that is told every length (TGI)"),
            ("vllm_over_fastertransformer", 5.71, 5.69, "6x over static batches of FasterTransformer"),
            ("vllm", 5.71, 5.69, "6x over naive static batches"),
        ],
    ),
    5: (
        {"over Orca (Max)": 12.0, "over Orca (Pow2)": 12.0, "over Orca (Oracle)": 12.0, "vllm_requests_per_s": 5.5},
        [(f"over {name}", 10.0, 9.9, name) for name in ("Orca (Max)", "Orca (Pow2)", "Orca (Oracle)")],
    ),
    6: (
        {"copies_of_full_prompt_blocks_half_full": 1, "copies_of_full_prompt_blocks_full": 1,
         "blocks_copied_half_full": 3,
         "blocks_copied_full": 0},
        [
            ("copies_of_full_prompt_blocks_full", 1, 2, "one copy of the prompt's full blocks"),
            ("blocks_copied_half_full", 3, 4, "copies where outputs begin in a shared block"),
            ("blocks_copied_half_full", 3, 2, "copies where outputs begin in a shared block"),
            ("blocks_copied_full", 0, 1, "none elsewhere"),
        ],
    ),
    7: (
        {"preallocated_pct": 90.0, "blocks_of_32_pct": 3.0, "blocks_of_64_pct": 6.0},
        [("blocks_of_32_pct", 9.0, 9.1, "blocks of 32 tokens"), ("blocks_of_64_pct", 9.0, 9.1,
         "blocks of 64 tokens")],
    ),
    8: (
        {"Orca (Max)": 50.0, "Orca (Pow2)": 50.0, "Orca (Oracle)": 50.0, "vLLM": 4.0},
        [
            *((name, inside, beyond, name) for name in ("Orca (Max)", "Orca (Pow2)", "Orca (Oracle)")
              for inside, beyond in ((40.0, 39.9), (60.0, 60.1))),
            ("vLLM", 3.0, 2.9, "paging's 4 %"), ("vLLM", 5.0, 5.1, "paging's 4 %"),
        ],
    ),
    9: (
        {f"{kind}_{memory}_{unit}": 1000.0 if memory == "contiguous" else 0.0
         for kind in ("fork", "longer rollback", "shorter rollback") for memory in ("contiguous", "paged")
         for unit in ("slots", "us")},
        [
            *((f"{kind}_contiguous_slots", 1000, 999, f"{kind}s, which copy all without paging")
              for kind in ("fork", "longer rollback", "shorter rollback")),
            ("fork_paged_slots", 16, 17, "paged memory, which copies a block at most"),
            ("shorter rollback_paged_slots", 16, 17, "paged memory, which copies a block at most"),
        ],
    ),
    10: (
        {"rows": 13, "wrong_rows": 0, "wrong_rows_without_a_copy": 3},
        [
            ("wrong_rows", 0, 1, "tables with counts and copies, which are right"),
            ("wrong_rows_without_a_copy", 1, 0, "a copy left out, which is noticed"),
        ],
    ),
    11: (
        {"on_demand_pct": 2.0, "tgi_pct": 70.0, "orca_oracle_pct": 60.0, "vattention_pct": 18.0},
        [
            ("tgi_pct", 3.0, 2.9, "memory reserved at admission for max_tokens (TGI)"),
            ("orca_oracle_pct", 3.0, 2.9, "memory reserved for the true output (Orca (Oracle))"),
            ("vattention_pct", 3.0, 2.9, "memory mapped in pages of 2 MiB (vAttention)"),
        ],
    ),
    12: (
        {"waste_pct": 3.9, "last_block_pct": 3.9},
        [("waste_pct", 4.0, 4.05, "less than 4 %"), ("last_block_pct", 3.71, 3.70, "only in the last block")],
    ),
    13: (
        {"beams_saved_pct": 55.0, "samples_saved_pct": 55.0, "beams_over_oracle": 2.2, "samples_over_unshared": 2.2,
         "samples_over_unshared_swapped": 2.2},
        [
            ("beams_saved_pct", 50.0, 49.9, "memory of beams, 55 %"), ("beams_saved_pct", 60.0, 60.1,
             "memory of beams, 55 %"),
            ("samples_saved_pct", 50.0, 49.9, "memory of samples, 55 %"),
            ("beams_over_oracle", 2.1, 2.08, "throughput of beams, 2.2x Orca (Oracle)"),
            ("samples_over_unshared", 2.1, 2.08, "throughput of samples, 2.2x what sharing nothing gives"),
        ],
    ),
    14: (
        {"finishes_that_differ": 0, "buckets_that_differ": 0, "held_and_empty_pct": 0,
         "entries_a_token_against_16": 16,
         "table_bytes_a_token": 4},
        [
            ("finishes_that_differ", 0, 1, "equality with paged blocks of one token"),
            ("buckets_that_differ", 0, 1, "equality with paged blocks of one token"),
            ("held_and_empty_pct", 0, 0.01, "nothing empty"),
        ],
    ),
    15: (
        {"s3_ends_after": 2, "s2_ends_after": 6, "idle_seat_iterations": 7},
        [
            ("s3_ends_after", 2, 3, "S3, which ends after two iterations"), ("s3_ends_after", 2, 1,
             "S3, which ends after two iterations"),
            ("s2_ends_after", 6, 7, "S2, which ends after six"), ("s2_ends_after", 6, 5, "S2, which ends after six"),
            ("idle_seat_iterations", 1, 0, "seats that idle"),
        ],
    ),
    16: (
        {"most_equal": 0, "least_unequal": 5},
        [("most_equal", 0, 1, "equal lengths, which lose nothing"), ("least_unequal", 1, 0,
         "unequal ones, which lose something")],
    ),
    17: (
        {"s5_after_s3": 1, "s6_after_s1": 1, "s7_after_s4": 1},
        [(name, 1, beyond, text) for name, text in (("s5_after_s3", "S5 for S3"), ("s6_after_s1", "S6 for S1"),
         ("s7_after_s4", "S7 for S4"))
         for beyond in (0, 2)],
    ),
    18: (
        {"weights_gb": 26, "gflop_a_token": 26, "read_ms": 16.0, "compute_ms": 0.1, "share_of_flops_pct": 1,
         "tokens_that_balance": 160},
        [("compute_ms", 1.6, 1.61, "one query token")],
    ),
    19: (
        {"pauses_at_12": 0.0, "pauses_at_13": 0.0, "pauses_at_14": 1.0, "steps_until_one_is_taken": 96.0},
        [
            ("pauses_at_12", 0.0, 1.0, "12 waiting on 10"), ("pauses_at_13", 0.0, 1.0, "13 waiting on 10"),
            ("pauses_at_14", 1.0, 0.0, "14 waiting on 10"), ("steps_until_one_is_taken", 50, 49,
             "one waiting, however long"),
        ],
    ),
    20: (
        {"vllm": 23.0, "told_cap": 23.0, "told_length": 5.0, "median_s_fastertransformer": 10.0,
         "median_s_orca-oracle": 5.0},
        [
            ("vllm", 21.9, 21.8, "continuous batching with paged memory"),
            ("told_cap", 21.9, 21.8, "continuous batching by itself"),
            ("median_s_orca-oracle", 9.5, 9.6, "median latency"),
        ],
    ),
    21: (
        {"paged_16_pct": 1.5, "pages_of_64_kib_pct": 0.5, "pages_of_2048_kib_pct": 2.0, "table_pct_of_kv": 2.0},
        [
            ("table_pct_of_kv", 1.0, 0.9, "the tables' memory"),
            ("pages_of_64_kib_pct", 2.5, 2.6, "pages of 64 KiB, which leave no more empty than paging"),
            ("pages_of_2048_kib_pct", 2.5, 2.6, "pages of 2 MiB, which leave no more empty than paging"),
        ],
    ),
    22: (
        {"kv_exponent": 2.0, "paged_exponent": 0.5, "table_and_tail_exponent": 0.5, "table_and_tail_at_16": 272,
         "table_and_tail_at_sqrt": 128},
        [
            ("kv_exponent", 1.95, 1.94, "memory that grows as n^2 without paging"),
            ("kv_exponent", 2.05, 2.06, "memory that grows as n^2 without paging"),
            ("paged_exponent", 0.55, 0.56, "memory that grows as sqrt(n) with it"),
            ("paged_exponent", 0.45, 0.44, "memory that grows as sqrt(n) with it"),
            ("table_and_tail_exponent", 0.55, 0.56,
             "table entries and empty slots of the last block alone, at blocks of sqrt(n)"),
        ],
    ),
    23: (
        {"chunks": 16} | {f"{key}_{size}_pct": 1.0 for key in ("chat", "at_16k") for size in (512, 1024, 4096)},
        [
            ("chunks", 16, 17, "16 chunks of 1,024"), ("chat_512_pct", 4.0, 4.1,
             "blocks of 512 tokens, on chat lengths"),
            ("chat_4096_pct", 4.0, 4.1, "blocks of 4,096 tokens, on chat lengths"),
            ("at_16k_1024_pct", 4.0, 4.1, "blocks of 1,024 tokens, at 16K of context"),
        ],
    ),
    24: (
        {name: 300.0 for name in (
            "opt-13b on 1 a100-80gb, fp16 KV", "llama-2-7b on 1 a100-80gb, fp16 KV",
             "llama-3.1-8b on 1 a100-40gb, fp16 KV",
            "llama-3.1-8b on 1 a100-40gb, fp8 KV", "llama-3.1-8b on 1 a100-80gb, fp16 KV",
             "llama-3.1-70b on 1 h200, fp8 KV",
            "llama-3.1-70b on 2 h200, fp16 KV",
        )},
        [("opt-13b on 1 a100-80gb, fp16 KV", 256, 255.9, "opt-13b on 1 a100-80gb, fp16 KV")],
    ),
    25: (
        {"Orca (Max)": 80.0, "Orca (Pow2)": 70.0, "Orca (Oracle)": 60.0, "naive static": 90.0, "vLLM": 4.0},
        [(name, 8.0, 7.9, f"against {name}") for name in ("Orca (Max)", "Orca (Pow2)", "Orca (Oracle)",
         "naive static")],
    ),
    26: (
        {"a100_pct": 50.0, "h100_pct": 50.0, "h200_pct": 50.0, "padded_over_useful": 2.0},
        [
            ("a100_pct", 52.6, 52.7, "a contiguous kernel on an A100"), ("h100_pct", 52.6, 52.7,
             "a contiguous kernel on an H100"),
            ("h200_pct", 52.6, 52.7, "a contiguous kernel on an H200"),
            ("padded_over_useful", 1.91, 1.89, "attention over padded static batches"),
        ],
    ),
    27: (
        {"context_tokens": 1024, "kv_mb": 38, "weights_mb": 249, "kv_share_pct": 13, "one_sequence": 2.0,
         "any_batch": 2.0,
         "sequences_that_fit": 1000},
        [("one_sequence", 1.72, 1.70, "one sequence"), ("any_batch", 1.72, 1.70, "any batch")],
    ),
    28: (
        {"activations_gb": 4.3, "kv_gb": 86, "saved_pct": 76},
        [("saved_pct", 72.3, 72.1, "what crosses from stage to stage")],
    ),
    30: (
        {"fp16_weights_gb": 70, "usable_gb": 80, "int4_weights_gb": 35, "kv_fp16_gb": 43, "kv_fp8_gb": 21,
         "kv_int4_gb": 11}
        | {f"tokens_per_s_{dtype}": 900 for dtype in ("fp16", "fp8", "int4")},
        [
            ("fp16_weights_gb", 80, 80.1, "weights of 16 bits, which fit"),
            *((f"tokens_per_s_{dtype}", 779.1, 778.9, f"4-bit weights and {dtype} KV") for dtype in ("fp16", "fp8",
             "int4")),
        ],
    ),
    31: (
        {"bytes_of_20b": 30e9, "v100_bytes": 32e9, "weights_gb": 10, "card_gb": 40},
        [("weights_gb", 16.8, 16.9, "2.5 times the parameters"), ("bytes_of_20b", 32e9, 32.1e9, "20B on a V100")],
    ),
    32: (
        {"block_size_of_22_pct": 245, "blocks_of_16_pct": 1.6, "blocks_of_128_pct": 22.0, "least_before_pct": 60.0,
         "most_before_pct": 80.0, "prefill_ms": 100.0, "fill_ms": 150.0}
        | {f"throughput_over_{name}": 2.0 for name in ("Orca (Max)", "Orca (Pow2)", "Orca (Oracle)")},
        [
            ("least_before_pct", 68.0, 68.1, "68 % before"), ("most_before_pct", 68.0, 67.9, "68 % before"),
            ("blocks_of_128_pct", 20.95, 20.85, "22 % after, at blocks of up to 128 tokens"),
            ("throughput_over_Orca (Max)", 1.55, 1.54, "1.6 times the throughput of Orca (Max)"),
            ("throughput_over_Orca (Oracle)", 1.55, 1.54, "1.6 times the throughput of Orca (Oracle)"),
            ("fill_ms", 131, 129, "a start 2.4 times as fast"),
        ],
    ),
    33: (
        {"kernel_pct": 5, "batch": 30, "step_ms": 43} | {f"blocks_of_{size}_pct": 15.0 for size in (8, 16, 64, 256)},
        [(f"blocks_of_{size}_pct", 14.26, 14.24, f"blocks of {size} tokens") for size in (8, 16, 64, 256)],
    ),
}  # fmt: skip

SYSTEMS: dict[int, tuple[dict[str, float], list[tuple[str, float, float, str]]]] = {
    1: (
        {"least_pct": 60.0, "most_pct": 80.0, "vllm_pct": 4.0},
        [
            ("least_pct", 58.0, 57.9, "the least wasteful baseline"), ("least_pct", 82.0, 82.1,
             "the least wasteful baseline"),
            ("most_pct", 82.0, 82.1, "the most wasteful one"), ("most_pct", 58.0, 57.9, "the most wasteful one"),
        ],
    ),
    2: ({"least_pct": 60.0, "most_pct": 80.0, "vllm_pct": 3.0}, [("vllm_pct", 4.0, 4.1, "vLLM")]),
    3: ({"hf": 14.0, "anyscale_slowness": 1.0}, [("hf", 13.31, 13.29, "Hugging Face Transformers")]),
    4: (
        {"tgi_told_nothing": 3.0, "tgi_told_the_output": 3.0},
        [
            ("tgi_told_nothing", 2.1, 2.08, "a TGI that is told no max_new_tokens"),
            ("tgi_told_the_output", 2.1, 2.08, "a TGI that is told each output's length"),
        ],
    ),
    5: ({"hf": 9.0, "anyscale_slowness": 1.0}, [("hf", 8.08, 8.07, "Hugging Face Transformers")]),
    6: (
        {"tgi_told_nothing": 4.0, "tgi_told_the_output": 4.0},
        [
            ("tgi_told_nothing", 3.14, 3.13, "a TGI that is told no max_new_tokens"),
            ("tgi_told_the_output", 3.14, 3.13, "a TGI that is told each output's length"),
        ],
    ),
    7: (
        {"beams_saved_pct": 55.0, "samples_saved_pct": 9.0, "beams_over_oracle": 2.2, "samples_over_unshared": 1.0},
        [
            ("beams_saved_pct", 60.0, 60.1, "memory that beams save"), ("beams_saved_pct", 50.0, 49.9,
             "memory that beams save"),
            ("beams_over_oracle", 2.1, 2.08, "throughput of beams over Orca (Oracle)"),
        ],
    ),
    8: (
        {"fastertransformer": 4.0, "told_cap": 8.0, "told_length": 8.0, "vllm": 23.0},
        [
            ("told_cap", 6.0, 5.9, "continuous batching that reserves the cap"), ("told_cap", 10.0, 10.1,
             "continuous batching that reserves the cap"),
            ("told_length", 10.0, 10.1, "continuous batching that is told each length"),
            ("vllm", 17.26, 17.24, "vLLM"), ("vllm", 28.74, 28.76, "vLLM"),
        ],
    ),
    9: (
        {"over_batches_of_8": 37.0, "over_one_at_a_time": 37.0, "over_the_better": 37.0, "orca_requests_per_s": 8.0,
         "limit_s": 0.09},
        [("over_the_better", 35.1, 35.0, "FasterTransformer")],
    ),
    10: (
        {"times_fitted": 2.3, "times_roofline": 1.0, "slowness": 1.5, "vllm_failed_pct": 28.0}
        | {f"{name}_per_s_{step}": 1.0 for name in ("fastgen", "vllm") for step in ("fitted", "roofline")},
        [("times_fitted", 2.19, 2.18, "effective throughput")],
    ),
    11: (
        {"Mistral-7B": 3.0, "Yi-34B": 4.0, "Falcon-180B": 6.0},
        [("Mistral-7B", 2.48, 2.46, "Mistral-7B"), ("Yi-34B", 3.52, 3.51, "Yi-34B"), ("Falcon-180B", 5.33, 5.31,
         "Falcon-180B")],
    ),
    12: (
        {"most_shared": 7.0, "half_shared": 7.0, "nothing_shared": 7.0},
        [
            ("most_shared", 6.09, 6.07, "1,400 of 1,440 prompt tokens in common, outputs of 16"),
            ("half_shared", 6.09, 6.07, "half of 1,440 in common, outputs of 128"),
            ("nothing_shared", 6.09, 6.07, "nothing in common"),
        ],
    ),
    13: (
        {"pages_of_64_kib": 1.3, "pages_of_2048_kib": 1.3},
        [("pages_of_64_kib", 1.17, 1.16, "pages of 64 KiB"), ("pages_of_2048_kib", 1.17, 1.16, "pages of 2 MiB")],
    ),
}  # fmt: skip

#: By number of another system, a number of the probe that is too small and decides nothing, and one that refutes.
OPEN = {3: ("hf", 0.1, None), 5: ("hf", 0.1, None), 9: ("over_the_better", 17.6, 17.5),
        10: ("times_fitted", 0.1, None), 11: ("Falcon-180B", 0.1, None)}  # fmt: skip

TABLES = {"claim": (claims(), CLAIMS), "system": (systems(), SYSTEMS)}
BEYOND_REACH = {"claim": {29, 34, 35}, "system": set()}


def cases() -> Iterator:
    for name, (table, made_up) in TABLES.items():
        probes = {probe.number: probe for probe in table.probes}
        for number, (base, bounds) in made_up.items():
            for key, within, beyond, text in bounds:
                yield pytest.param(
                    probes[number], base, key, within, beyond, text, id=f"{name}-{number}-{key}-{beyond:g}"
                )


def held(judged: Judged) -> dict[str, bool]:
    return {part.text: part.holds for part in judged.parts}


@pytest.mark.parametrize(("probe", "base", "key", "within", "beyond", "text"), list(cases()))
def test_a_number_decides_its_part_at_its_bound_and_no_other(probe, base, key, within, beyond, text):
    everything = held(probe.judge(base))
    assert all(everything.values()), everything
    assert held(probe.judge(base | {key: within})) == everything
    assert held(probe.judge(base | {key: beyond})) == everything | {text: False}


@pytest.mark.parametrize(("number", "key", "small", "refuting"), [(number, *case) for number, case in OPEN.items()])
def test_a_lower_bound_that_is_too_small_decides_nothing_and_the_row_names_the_experiment(
    number, key, small, refuting
):
    probe, base = systems().probes[number - 1], SYSTEMS[number][0]
    assert probe.experiment
    open_part = next(part for part in probe.judge(base | {key: small}).parts if part.open)
    assert open_part.value == small
    if refuting is not None:
        assert probe.judge(base | {key: refuting}).verdict == FAILS


def test_no_other_number_is_a_lower_bound():
    for name, (table, made_up) in TABLES.items():
        for probe in table.probes:
            base = made_up.get(probe.number, ({}, []))[0]
            bounded = bool(base) and any(part.up_to is not None for part in probe.judge(base).parts)
            assert bounded == (name == "system" and probe.number in OPEN)


@pytest.mark.parametrize("name", TABLES)
def test_every_probe_has_a_case_with_a_bound_for_each_kind_of_part(name):
    table, made_up = TABLES[name]
    assert {probe.number for probe in table.probes} - set(made_up) == BEYOND_REACH[name]


@pytest.mark.parametrize(
    ("values", "up_to", "verdict", "condition"),
    [
        ((1, 1), None, HOLDS, None),
        ((1, 0), None, HOLDS_ONLY, "for this; not for that"),
        ((0, 1), None, HOLDS_ONLY, "for that; not for this"),
        ((0, 0), None, FAILS, None),
        ((1, 1), 2, HOLDS, None),
        ((1, 0), 1, HOLDS_ONLY, "for this; open for that"),
        ((0, 0), 1, UNTESTED, "not for this; open for that"),
        ((0, 0), 0.9, FAILS, None),
    ],
)
def test_the_verdict_follows_from_the_parts(values, up_to, verdict, condition):
    judged = Judged((Part("this", values[0], 1), Part("that", values[1], 1, up_to=up_to)), "", "")
    assert (judged.verdict, judged.condition) == (verdict, condition)


def test_one_part_that_is_open_cannot_be_tested():
    judged = Judged((Part("it", 0.5, 1, up_to=float("inf")),), "", "")
    assert (judged.verdict, judged.condition) == (UNTESTED, None)
    assert not Part("it", 3, most=2, up_to=4).open


def test_what_needs_something_else_cannot_be_tested_whatever_its_parts():
    probe = Probe(
        1, "", "", lambda _: {}, lambda _: Judged((Part("it", 1, 1),), "", ""), needs=("simulation", "a GPU")
    )
    row = table_row(Source("A", "it", "measurement", ""), probe, Measured({}))
    assert (row["verdict"], row["condition"]) == (UNTESTED, None)
    assert probe.missing == ["a GPU"]


@pytest.mark.parametrize(("value", "verdict", "told"), [(2.0, HOLDS, []), (3.0, HOLDS, []), (3.1, HOLDS,
 ["a b: 3.1, foreseen 2 to 3"]),
                                                     (1.9, FAILS, ["a b: 1.9, foreseen 2 to 3",
                                                      "verdict: does not hold, foreseen holds"])])  # fmt: skip
def test_what_comes_out_otherwise_than_foreseen_is_told(value, verdict, told):
    probe = Probe(
        1, "", "", lambda _: {}, lambda _: Judged((), "", ""), foreseen=(Foreseen("a_b", 2, 3),), verdict=HOLDS
    )
    assert differences(probe, {"a_b": value}, verdict) == told
