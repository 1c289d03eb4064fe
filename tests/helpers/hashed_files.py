"""Small traces with hash_ids."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

MOONCAKE = [
    {"timestamp": 0, "input_length": 1100, "output_length": 5, "hash_ids": [0, 1, 2]},
    {"timestamp": 3000, "input_length": 1024, "output_length": 5, "hash_ids": [0, 1]},
    {"timestamp": 3000, "input_length": 600, "output_length": 5, "hash_ids": [0, 7]},
]


SIZED = [
    {"arrival_s": 0.5, "prompt_tokens": 30, "output_tokens": 5, "hash_ids": [8, 9, 8], "block_tokens": [10, 12, 3]},
    {"arrival_s": 1, "prompt_tokens": 30, "output_tokens": 5, "hash_ids": [], "block_tokens": []},
    {"arrival_s": 1, "prompt_tokens": 30, "output_tokens": 5, "hash_ids": [9, 8], "block_tokens": [12, 18]},
]


def put(folder, rows, name="trace.jsonl") -> Path:
    path = folder / name
    text = "\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows) + "\n"
    path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    return path
