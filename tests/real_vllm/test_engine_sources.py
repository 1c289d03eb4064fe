"""``compare --engine-source``: five merged pull requests of vLLM, taken back out of the installed wheel, move what they say they move."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from fragmeter.experiments.cli.app import DONE, status
from fragmeter.experiments.runs.engine_sources import Side, first_difference, sides
from fragmeter.sim import settings
from fragmeter.sim.workload.content import PromptContent
from fragmeter.sim.workload.workload import Workload

#: Where the package is, without importing it here.
WHEEL = Path(str(find_spec("vllm").origin)).parents[1]
SECOND = 10**12
CORE = Path("v1", "core")


def without(folder: Path, name: str, *parts: tuple[str, str]) -> Path:
    """The wheel with parts of one file replaced; all other files are links."""
    changed = CORE / name
    for depth in range(len(CORE.parts) + 1):
        inner = Path(*CORE.parts[:depth])
        (folder / "vllm" / inner).mkdir(parents=True)
        for entry in (WHEEL / "vllm" / inner).iterdir():
            place = folder / "vllm" / inner / entry.name
            if entry.name != "__pycache__" and inner / entry.name not in (*changed.parents, changed):
                place.symlink_to(entry)
    text = (WHEEL / "vllm" / changed).read_text()
    for old, new in parts:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    (folder / "vllm" / changed).write_text(text)
    return folder


def load(
    prompts: tuple[int, int], outputs: tuple[int, int], gap_s: float, count: int = 40, shared: bool = False
) -> Workload:
    """Requests with lengths and gaps drawn; of shared ones, each begins with one of six prompts."""
    draw = random.Random(7)
    arrivals = np.cumsum([round(draw.expovariate(1 / gap_s) * SECOND) for _ in range(count)])
    lengths = np.array([draw.randint(*prompts) for _ in range(count)])
    content = None
    if shared:
        offsets, first = 2 * np.arange(count + 1), lengths * 3 // 4
        ids = [each for row in range(count) for each in (draw.randrange(6), 100 + row)]
        pieces = np.column_stack([np.full(count, prompts[0] // 2), lengths - prompts[0] // 2]).ravel()
        assert (pieces > 0).all() and len(first) == count
        content = PromptContent(offsets, np.array(ids), pieces)
    answers = np.array([draw.randint(*outputs) for _ in range(count)])
    return Workload("pull request", arrivals, lengths, answers, answers, content=content)


def metric(name: str) -> Callable[[Side], float]:
    group, _, inner = name.partition(".")
    return lambda side: side.summary[group][inner] if inner else side.summary[group]


class Pull(NamedTuple):
    """A pull request: what takes it back, the load and settings that show it, what it moves, and which way."""

    file: str
    parts: tuple[tuple[str, str], ...]
    work: Workload
    chosen: dict[str, Any]
    measured: Callable[[Side], float]
    sign: int


PLAIN = {"model": "opt-13b", "enable_prefix_caching": False, "max_num_seqs": 64, "max_model_len": 800}
PULLS = {
    # Freed blocks without a hash are taken first, so that fewer cached ones are lost.
    42656: Pull(
        "block_pool.py",
        (("if block.block_hash is None or not self.enable_caching:", "if False:"),),
        load((150, 400), (5, 40), 0.3, shared=True),
        {"model": "opt-13b", "max_model_len": 1000, "enable_prefix_caching": True, "num_gpu_blocks_override": 90},
        metric("prefix_cache.evicted_blocks"),
        -1,
    ),
    # A request is admitted if all of its prompt fits, not its first chunk.
    37307: Pull(
        "kv_cache_manager.py",
        (("if full_sequence_must_fit:", "if False:"),),
        load((300, 700), (10, 40), 0.1, count=16),
        PLAIN | {"num_gpu_blocks_override": 120, "max_num_batched_tokens": 64},
        metric("preemptions.recompute"),
        -1,
    ),
    # Admissions leave a share of the blocks free.
    44594: Pull(
        "kv_cache_manager.py",
        (("            watermark_blocks = self.watermark_blocks\n", "            watermark_blocks = 0\n"),),
        load((20, 100), (60, 150), 0.1, count=20),
        PLAIN | {"num_gpu_blocks_override": 64, "watermark": 0.2},
        metric("preemptions.recompute"),
        -1,
    ),
    # A window's layers ask at an admission for what they will hold, not for the whole prompt.
    40946: Pull(
        "single_type_kv_cache_manager.py",
        (("if apply_admission_cap and self.max_admission_blocks_per_request is not None:", "if False:"),),
        load((4000, 7000), (3, 9), 0.001, count=8),
        {"model": "gpt-oss-20b", "max_model_len": 7100, "enable_prefix_caching": False, "num_gpu_blocks_override": 900, "max_num_batched_tokens": 512},
        metric("mean_ttft_ms"),
        -1,
    ),
    # No blocks are allocated before they are needed.
    16941: Pull(
        "kv_cache_manager.py",
        (
            (
                "        new_blocks = self.coordinator.allocate_new_blocks(\n            request.request_id,\n            num_tokens_need_slot,",
                "        ahead = min(num_tokens_need_slot + 64, self.max_model_len)\n"
                "        if num_blocks_to_allocate and self.block_pool.get_num_free_blocks() > num_blocks_to_allocate + 8:\n"
                "            num_tokens_need_slot = ahead\n"
                "        new_blocks = self.coordinator.allocate_new_blocks(\n            request.request_id,\n            num_tokens_need_slot,",
            ),
        ),
        load((20, 100), (10, 60), 0.2, count=20),
        PLAIN | {"num_gpu_blocks_override": 400},
        lambda side: side.bucket_bytes()["reserved"],
        -1,
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("number", PULLS)
def test_what_a_pull_request_moves_has_the_sign_that_it_promises(number, tmp_path):
    pull = PULLS[number]
    before = without(tmp_path / "before", pull.file, *pull.parts)
    chosen = settings(policy="vllm-real", gpu="h100-80gb", **pull.chosen)
    base, other = sides([before, WHEEL], chosen, pull.work)
    first = first_difference(base, other)
    assert first is not None and base.steps[: first.number] == other.steps[: first.number]
    change = pull.measured(other) - pull.measured(base)
    print(number, first, pull.measured(base), pull.measured(other))
    assert change * pull.sign > 0


@pytest.mark.slow
def test_a_vllm_beside_itself_moves_nothing(tmp_path, capsys):
    found, text = tmp_path / "found.json", tmp_path / "found.md"
    line = ["compare", *("--engine-source", str(WHEEL)) * 2, "--num-prompts", "5", "--request-rate", "5"]
    assert status([*line, "--json", str(found), "--markdown", str(text)]) == DONE
    document = json.loads(found.read_text())
    assert document["first_difference"] is None
    assert document["buckets_bytes"]["live"]["base"] > 0
    assert {each["moved"] for each in document["buckets_bytes"].values()} == {0}
    assert "steps are the same" in text.read_text() and "| live |" in text.read_text()
