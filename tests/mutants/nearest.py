"""The tests nearest to each module, in the order in which they run beside its mutants: what fails soonest first."""

from __future__ import annotations

from paths import TESTS

#: Test files and folders under ``tests`` by the beginning of a module's path. A module has those of all its entries, the longest
#: path first.
NEAREST: dict[str, tuple[str, ...]] = {
    "experiments/capacity/": (
        "experiments/capacity/test_small_parts.py",
        "experiments/capacity/test_small_days.py",
        "experiments/capacity/test_made_up_engines.py",
        "experiments/capacity/test_made_up_plans.py",
        "experiments/capacity/test_decisions.py",
        "experiments/capacity/test_fleet.py",
        "experiments/capacity/test_confidence.py",
        "experiments/capacity/test_max_rate.py",
        "experiments/capacity/test_planning.py",
        "experiments/capacity",
    ),
    "experiments/capacity/day.py": (
        "experiments/capacity/test_small_days.py",
        "experiments/capacity/test_day.py",
    ),
    "experiments/capacity/search.py": ("experiments/capacity/test_made_up_plans.py",),
    "experiments/capacity/loads.py": ("experiments/capacity/test_loads.py",),
    "experiments/capacity/plan.py": ("experiments/capacity/test_made_up_plans.py",),
    "experiments/capacity/answer.py": (
        "experiments/capacity/test_made_up_plans.py",
        "experiments/capacity/test_planning.py",
    ),
    "experiments/capacity/detail.py": (
        "experiments/capacity/test_small_parts.py",
        "experiments/capacity/test_detail.py",
    ),
    "experiments/capacity/fleet.py": (
        "experiments/capacity/test_made_up_engines.py",
        "experiments/capacity/test_fleet.py",
    ),
    "experiments/capacity/load.py": (
        "experiments/capacity/test_small_days.py",
        "experiments/capacity/test_max_rate.py",
    ),
    "experiments/capacity/max_rate.py": (
        "experiments/capacity/test_made_up_engines.py",
        "experiments/capacity/test_max_rate.py",
    ),
    "experiments/capacity/confidence.py": (
        "experiments/capacity/test_small_parts.py",
        "experiments/capacity/test_confidence.py",
    ),
    "experiments/capacity/split.py": (
        "experiments/capacity/test_small_parts.py",
        "experiments/capacity/test_split.py",
    ),
    "experiments/capacity/pairs.py": ("experiments/capacity/test_pairs.py",),
    "experiments/capacity/tasks.py": (
        "experiments/capacity/test_tasks.py",
        "experiments/capacity/test_planning.py",
        "experiments/capacity/test_plan_command.py",
    ),
    "experiments/capacity/contender.py": (
        "experiments/capacity/test_made_up_plans.py",
        "experiments/capacity/test_planning.py",
    ),
    "experiments/capacity/planning.py": (
        "experiments/capacity/test_made_up_plans.py",
        "experiments/capacity/test_planning.py",
    ),
    "sim/memory/": (
        "sim/memory/test_known_answers.py",
        "sim/memory",
        "sim/metrics",
        "sim/engine/test_closed_forms.py",
        "sim/engine/test_rings.py",
        "sim/engine/test_states.py",
        "sim/engine/test_hybrid.py",
        "sim/engine/test_hybrid_caching.py",
        "sim/engine/test_repeated_reads.py",
        "sim/engine/test_prefix_caching.py",
        "sim/engine/test_schedulers.py",
        "sim/engine/test_core.py",
        "sim/engine/test_families.py",
        "sim/engine/test_oracle.py",
        "sim/recording/test_plan.py",
        "sim/recording/test_blocks.py",
    ),
    "sim/memory/accounting/": (
        "sim/memory/test_known_answers.py",
        "sim/engine/test_core.py",
        "sim/engine/test_leaps.py",
        "sim/policy/test_compositions.py",
    ),
    "sim/memory/prefix/block_tables.py": (
        "sim/memory/test_known_answers.py",
        "sim/memory/test_sharing.py",
        "sim/recording/test_plan.py",
        "sim/policy/test_llama_cpp.py",
    ),
    "sim/memory/paged/cached.py": ("sim/engine/test_prefix_caching.py", "sim/engine/test_core.py"),
    "sim/memory/paged/cells.py": ("sim/policy/test_llama_cpp.py",),
    "sim/memory/paged/deferred.py": ("sim/policy/test_vattention.py", "sim/policy/test_vattention_pages.py"),
    "sim/memory/paged/dialogue.py": ("sim/memory/test_dialogue.py", "sim/engine/test_families.py"),
    "sim/memory/paged/group_": (
        "sim/memory/test_known_answers.py",
        "sim/engine/test_hybrid_caching.py",
        "sim/engine/test_states.py",
        "sim/policy/test_exported_states.py",
    ),
    "sim/memory/paged/host_": ("sim/policy/test_kv_offloading.py", "sim/policy/test_kv_offloading_serial.py"),
    "sim/memory/prefix/host_": ("sim/policy/test_kv_offloading.py", "sim/policy/test_kv_offloading_serial.py"),
    "sim/memory/paged/offload.py": ("sim/policy/test_kv_offloading.py", "sim/policy/test_kv_offloading_serial.py"),
    "sim/memory/paged/counts.py": ("sim/memory/test_known_answers.py", "sim/runs/test_growth.py"),
    "sim/memory/paged/phases.py": ("sim/runs/test_growth.py", "sim/engine/test_hybrid.py"),
    "sim/memory/paged/paged.py": ("sim/memory/test_known_answers.py", "sim/policy/test_compositions.py"),
    "sim/memory/paged/radix": (
        "sim/policy/test_sglang.py",
        "sim/policy/test_sglang_tree.py",
        "sim/memory/test_memory_machines.py",
    ),
    "sim/memory/paged/reserved.py": ("sim/policy/test_tgi.py", "sim/policy/test_lightllm.py"),
    "sim/memory/paged/sharing": (
        "sim/memory/test_sharing.py",
        "sim/memory/test_sharing_schedulers.py",
        "sim/engine/test_families.py",
        "sim/recording/test_plan_stories.py",
    ),
    "sim/memory/paged/skipped.py": (
        "sim/memory/test_known_answers.py",
        "sim/engine/test_hybrid.py",
        "sim/engine/test_states.py",
    ),
    "sim/memory/paged/streams.py": ("sim/policy/test_llama_cpp.py", "sim/engine/test_schedulers.py"),
    "sim/memory/accounting/drafts.py": ("sim/policy/test_speculative_decoding.py",),
    "sim/memory/paged/speculative.py": ("sim/policy/test_speculative_decoding.py",),
    "sim/memory/paged/transaction.py": (
        "sim/memory/test_known_answers.py",
        "sim/policy/test_exported_states.py",
        "sim/engine/test_schedulers.py",
        "sim/engine/test_states.py",
        "sim/engine/test_hybrid_caching.py",
        "sim/policy/test_compositions.py",
    ),
    "sim/runs/": (
        "sim/runs",
        "sim/memory/test_known_answers.py",
        "sim/engine/test_core.py",
        "sim/engine/test_leaps.py",
        "sim/metrics",
    ),
}


def nearest(path: str) -> list[str]:
    """The test files of a module, each once. Folders are not left to pytest, which would take their files in its own order."""
    entries = sorted((entry for entry in NEAREST if path.startswith(entry)), key=len, reverse=True)
    named = [TESTS / name for entry in entries for name in NEAREST[entry]]
    files = [file for each in named for file in (sorted(each.rglob("test_*.py")) if each.is_dir() else [each])]
    return [file.relative_to(TESTS).as_posix() for file in dict.fromkeys(files)]
