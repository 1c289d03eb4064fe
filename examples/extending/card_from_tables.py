"""Made-up operation tables of a card, and a profile that is fitted to them: 6 us, or 140 TFLOP/s, or 0.9 TB/s, whichever takes longest.

    python examples/extending/card_from_tables.py

In the checkout; it needs scipy (``pip install -e '.[fit]'``), and writes my-tables, my-gpu.json and profile.json.
"""

import csv
import json
from itertools import product
from pathlib import Path

from fragmeter.sim.cost import cost
from fragmeter.sim.spec import gpu, model
from tools.profiles import fit_profiles


def measured_ms(flops, moved_bytes):
    return round(max(0.006, flops / 140e9, moved_bytes / 0.9e9), 4)


bf16 = {"attn_dtype": "bfloat16", "kv_cache_dtype": "bfloat16"}
heads = {"num_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
gemms, decodes, prefills = [], [], []
for m, n, k in product((1, 64, 512, 4096), (4096, 28672), (4096, 14336)):
    ms = measured_ms(2 * m * n * k, 2 * (n * k + m * (n + k)))
    gemms.append({"gemm_dtype": "bfloat16", "m": m, "n": n, "k": k, "latency": ms})
for batch, tokens in product((1, 16, 64), (128, 512, 2048, 8192)):
    ms = measured_ms(4 * batch * tokens * 32 * 128, 4 * batch * (tokens * 8 + 32) * 128)
    decodes.append(bf16 | heads | {"batch_size": batch, "step": tokens - 1, "latency": ms})
    ms = measured_ms(2 * batch * tokens * (tokens + 1) * 32 * 128, 4 * batch * tokens * 40 * 128)
    prefills.append(bf16 | heads | {"batch_size": batch, "isl": tokens, "latency": ms})

Path("my-tables").mkdir()
names = ("gemm_perf", "generation_attention_perf", "context_attention_perf")
for name, rows in zip(names, (gemms, decodes, prefills)):
    with open(f"my-tables/{name}.csv", "w", newline="") as file:
        table = csv.DictWriter(file, rows[0])
        table.writeheader()
        table.writerows(rows)
print(*Path("my-tables/gemm_perf.csv").read_text().splitlines()[:3], sep="\n")

card = {
    "name": "my-gpu", "memory_bytes": 25250627584, "memory_gb_per_s": 1008, "fp16_tflops": 165.2, "pcie_gb_per_s": 32,
    "profile": "profile.json", "source": "data sheet of the vendor",
}  # fmt: skip
Path("my-gpu.json").write_text(json.dumps(card))
fit_profiles.main(["--gpu", "my-gpu.json", "--tables", "my-tables", "--out", "profile.json"])
step = cost("fitted", model("llama-3.1-8b"), gpu("my-gpu.json"))
print(f"{step.step_ticks(16, 16_000, 0, 0) / 1e9:.1f} ms for 16 sequences of 1,000 tokens")
