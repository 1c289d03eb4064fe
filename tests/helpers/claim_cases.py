"""Made-up numbers on either side of every bound of the claims of four texts, by the claim's number."""

from __future__ import annotations

Cases = dict[int, tuple[dict[str, float], list[tuple[str, float, float, str]]]]
"""Values with which every part holds, and for each number (value just within, just beyond, the part's text)."""

CLAIMS: Cases = {
    1: (
        {"orca_max_live_pct": 20.4, "static_live_pct": 8.0},
        [("orca_max_live_pct", 18.4, 18.39, "Orca (Max)"), ("orca_max_live_pct", 22.4, 22.41, "Orca (Max)")],
    ),
    2: (
        {"reserved": 3, "over_estimate": 2545, "free_and_too_small": 1024, "waiting": 1},
        [
            ("reserved", 1, 0, "slots reserved for tokens to come"),
            ("over_estimate", 1, 0, "slots for an output that never comes"),
            ("free_and_too_small", 1, 0, "free slots, too few for the waiting request"),
            ("waiting", 1, 0, "free slots, too few for the waiting request"),
        ],
    ),
    3: (
        {"ended_or_padding_static_pct": 60.0, "ended_or_padding_orca_max_pct": 0.0, "reserved_orca_oracle_pct": 24.0,
         "external_orca_oracle_pct": 37.0, "all_three_vllm_pct": 1.6},
        [
            ("ended_or_padding_orca_max_pct", 59.0, 59.1, "what continuous batching removes"),
            ("reserved_orca_oracle_pct", 1.0, 0.9, "reservation, which remains"),
            ("external_orca_oracle_pct", 1.0, 0.9, "slots lost to rounding up and gaps, which remain"),
            ("all_three_vllm_pct", 4.0, 4.1, "what paging removes"),
        ],
    ),
    4: (
        {"vllm": 20.0, "vllm_over_cap_reserved": 3.0, "vllm_over_output_reserved": 3.0, "vllm_over_fastertransformer": 6.0},
        [
            ("vllm_over_cap_reserved", 2.86, 2.84, "3x over continuous batching that reserves the cap (Orca)"),
            ("vllm_over_output_reserved", 2.86, 2.84, "3x over continuous batching that reserves each output (TGI)"),
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
        {"s3_ends_after": 2, "s2_ends_after": 6, "idle_iterations": 7},
        [
            ("s3_ends_after", 2, 3, "S3, which ends after two iterations"), ("s3_ends_after", 2, 1,
             "S3, which ends after two iterations"),
            ("s2_ends_after", 6, 7, "S2, which ends after six"), ("s2_ends_after", 6, 5, "S2, which ends after six"),
            ("idle_iterations", 1, 0, "idle places in the batch"),
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
        {"vllm": 23.0, "cap_reserved": 23.0, "output_reserved": 5.0, "median_s_fastertransformer": 10.0,
         "median_s_orca-oracle": 5.0},
        [
            ("vllm", 21.9, 21.8, "continuous batching with paged memory"),
            ("cap_reserved", 21.9, 21.8, "continuous batching by itself"),
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
        dict.fromkeys(("opt-13b on 1 a100-80gb, fp16 KV", "llama-2-7b on 1 a100-80gb, fp16 KV", "llama-3.1-8b on 1 a100-40gb, fp16 KV", "llama-3.1-8b on 1 a100-40gb, fp8 KV", "llama-3.1-8b on 1 a100-80gb, fp16 KV", "llama-3.1-70b on 1 h200, fp8 KV", "llama-3.1-70b on 2 h200, fp16 KV"), 300.0),
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
