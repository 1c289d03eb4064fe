"""As ``claim_cases``, of what other systems say of themselves."""

from __future__ import annotations

from claim_cases import Cases

SYSTEMS: Cases = {
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
        {"tgi_without_max_tokens": 3.0, "tgi_output_as_max_tokens": 3.0},
        [
            ("tgi_without_max_tokens", 2.1, 2.08, "TGI without max_new_tokens"),
            ("tgi_output_as_max_tokens", 2.1, 2.08, "TGI with each output's length as max_new_tokens"),
        ],
    ),
    5: ({"hf": 9.0, "anyscale_slowness": 1.0}, [("hf", 8.08, 8.07, "Hugging Face Transformers")]),
    6: (
        {"tgi_without_max_tokens": 4.0, "tgi_output_as_max_tokens": 4.0},
        [
            ("tgi_without_max_tokens", 3.14, 3.13, "TGI without max_new_tokens"),
            ("tgi_output_as_max_tokens", 3.14, 3.13, "TGI with each output's length as max_new_tokens"),
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
        {"fastertransformer": 4.0, "cap_reserved": 8.0, "output_reserved": 8.0, "vllm": 23.0},
        [
            ("cap_reserved", 6.0, 5.9, "continuous batching that reserves the cap"), ("cap_reserved", 10.0, 10.1,
             "continuous batching that reserves the cap"),
            ("output_reserved", 10.0, 10.1, "continuous batching that reserves each output"),
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
