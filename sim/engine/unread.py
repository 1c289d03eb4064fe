"""Which settings a run reads, and the refusal of those that were given and that it does not read.

A setting is given where it differs from its default; a value that asks for nothing of a thing (a watermark of 0, a
swap space of 0) may be given to any run. ``tests/test_unread_settings.py`` holds the table against runs: every setting
under every policy, on loads that would show it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..policy import HYBRID, POLICIES
from ..policy.orca import OrcaMax, OrcaPaper
from ..spec import hybrid_layout, model
from ..types.errors import SettingError
from ..workload.workload import Workload
from .settings import Settings

if TYPE_CHECKING:
    from ..cluster import Cluster

#: Why a setting is not read, and what to do; None where it is read. Without a workload, as of one that would show it.
Why = Callable[[Settings, Workload | None], str | None]

#: Settings that every run reads.
ALWAYS = frozenset(
    """
    tensor_parallel_size pipeline_parallel_size quantization kv_cache_dtype enforce_eager block_size
    num_gpu_blocks_override enable_prefix_caching max_model_len max_num_seqs shared_prefix_tokens cost step_scale window
    """.split()
)
#: Settings that are refused in no run, and why.
EXEMPT = {
    "policy": "names what is simulated",
    "model": "names what is simulated",
    "gpu": "names what is simulated",
    "leap": "changes no result by design",
    "ids": "changes no result by design; recordings set it",
    "seed": "results say by which seed they came, also where nothing is drawn",
}
#: Values that ask for nothing of a thing, besides the defaults.
NOTHING: dict[str, Any] = {"watermark": 0, "swap_space": 0}

#: Fields of a cluster that one router reads.
OF_PREFIX_AFFINE = ("cache_threshold", "balance_abs_threshold", "balance_rel_threshold")

_SWAPPING = ("vllm-sosp23", "vllm-v0")
_CHUNKED = tuple(name for name, kind in POLICIES.items() if issubclass(kind, OrcaMax))
_WITH_BEAMS = (*_SWAPPING, *(name for name, kind in POLICIES.items() if issubclass(kind, OrcaPaper)))
_BATCHED_WHOLE = ("static", "fastertransformer")
_LEAVE_OUT = "or leave it out"


def _of(*policies: str) -> Why:
    """A setting of some policies."""

    def why(settings: Settings, workload: Workload | None) -> str | None:
        if settings.policy in policies:
            return None
        return f"{settings.policy} does not read it; use {either(policies)}, {_LEAVE_OUT}"

    return why


def _page_size(settings: Settings, workload: Workload | None) -> str | None:
    if settings.policy == "vattention" and settings.block_size is not None:
        return f"block_size = {settings.block_size} says what a page holds; leave out one of the two"
    return _of("vattention")(settings, workload)


def _max_num_batched_tokens(settings: Settings, workload: Workload | None) -> str | None:
    if settings.policy not in _BATCHED_WHOLE:
        return None
    return f"{settings.policy} pads whole batches and has no budget of tokens; use --max-num-seqs, {_LEAVE_OUT}"


def _max_waiting_tokens(settings: Settings, workload: Workload | None) -> str | None:
    if settings.policy == "tgi" and not settings.waiting_served_ratio:
        return f"with waiting_served_ratio = 0 nobody waits for a larger batch; raise that, {_LEAVE_OUT}"
    return _of("tgi")(settings, workload)


def _use_beam_search(settings: Settings, workload: Workload | None) -> str | None:
    # Policies without beams refuse them by themselves (``grouping``).
    if workload is None or workload.shares or settings.policy not in _WITH_BEAMS:
        return None
    return f"every request asks for one sequence; use --n, {_LEAVE_OUT}"


def _beam_survival(settings: Settings, workload: Workload | None) -> str | None:
    if settings.policy not in _WITH_BEAMS:
        return _of(*_WITH_BEAMS)(settings, workload)
    if not settings.use_beam_search:
        return f"is of beams; use --use-beam-search, {_LEAVE_OUT}"
    return _use_beam_search(settings, workload)


def _preemption_mode(settings: Settings, workload: Workload | None) -> str | None:
    if settings.policy not in _SWAPPING:
        return f"{settings.policy} never swaps; use {either(_SWAPPING)}, {_LEAVE_OUT}"
    if workload is not None and workload.dialogue is not None:
        return "where requests have parents nothing is swapped; leave it out"
    # Requests of several sequences are swapped in any case, which is what "swap" asks for.
    return None


def _swap_space(settings: Settings, workload: Workload | None) -> str | None:
    able = f"{either(_SWAPPING)} with --preemption-mode swap"
    if settings.policy not in _SWAPPING:
        return f"{settings.policy} never swaps; use {able}, {_LEAVE_OUT}"
    if workload is not None and workload.dialogue is not None:
        return "where requests have parents nothing is swapped; leave it out"
    if settings.preemption_mode == "swap" or workload is None or workload.shares:
        return None
    return f"nothing is swapped; use --preemption-mode swap, {_LEAVE_OUT}"


def _disable_hybrid_kv_cache_manager(settings: Settings, workload: Workload | None) -> str | None:
    if settings.policy not in HYBRID:
        return f"under {settings.policy} every layer keeps every token; use {either(tuple(HYBRID))}, {_LEAVE_OUT}"
    shape = model(settings.model)
    longest = settings.max_model_len or shape.max_model_len
    if hybrid_layout(shape, longest) is None:
        return f"{shape.name} has no window shorter than {longest} tokens that is kept apart; leave it out"
    if settings.shared_prefix_tokens or (workload is not None and _shares_blocks(settings, workload)):
        return "where sequences share blocks every layer keeps every token; leave it out"
    return None


def _shares_blocks(settings: Settings, workload: Workload) -> bool:
    return settings.policy in _SWAPPING and (workload.shares or workload.dialogue is not None)


#: Settings that some runs read.
SOMETIMES: dict[str, Why] = {
    "page_size": _page_size,
    "max_num_batched_tokens": _max_num_batched_tokens,
    "watermark": _of("vllm-sosp23", "vllm-v0", "sarathi", "vattention"),
    "arena": _of(*_CHUNKED),
    "preemption_mode": _preemption_mode,
    "waiting_served_ratio": _of("tgi"),
    "max_waiting_tokens": _max_waiting_tokens,
    "output_estimate": _of("lightllm"),
    "schedule_policy": _of("sglang"),
    "use_beam_search": _use_beam_search,
    "beam_survival": _beam_survival,
    "swap_space": _swap_space,
    "disable_hybrid_kv_cache_manager": _disable_hybrid_kv_cache_manager,
}


def why_unread(field: str, settings: Settings, workload: Workload | None = None) -> str | None:
    """Why a run does not read a setting, whatever its value, and what to do; None where it does.

    Args:
        workload: None takes one that would show it.

    Raises:
        SettingError: A model that is not known.
    """
    why = SOMETIMES.get(field)
    return None if why is None else why(settings, workload)


def is_given(field: str, value: Any) -> bool:
    """Whether a value of ``Settings`` asks for more than its default."""
    return value != getattr(Settings, field) and (field not in NOTHING or value != NOTHING[field])


def refuse_unread(settings: Settings, workload: Workload) -> None:
    """Refuse a setting that was given and that a run does not read.

    Raises:
        SettingError: Names the first one, why it is not read, and what to do.
    """
    for field, value in vars(settings).items():
        why = why_unread(field, settings, workload) if is_given(field, value) else None
        if why is not None:
            raise SettingError(field, value, why)


def only_read(settings: Settings, workload: Workload | None = None) -> Settings:
    """The settings of the same run, with what it does not read at its default.

    For settings that a program makes for several runs, or that come from a pasted command line. Reset one after the
    other, as one may be read for the sake of another that is not.
    """
    for field in SOMETIMES:
        if is_given(field, getattr(settings, field)) and why_unread(field, settings, workload) is not None:
            settings = replace(settings, **{field: getattr(Settings, field)})
    return settings


def why_unread_in_cluster(field: str, cluster: Cluster, workload: Workload | None = None) -> str | None:
    """As ``why_unread``, of a field of ``Cluster``; those of prefill and decode are checked there."""
    arriving = cluster.prefill_replicas or cluster.num_replicas
    if field == "decode_router" and cluster.decode_replicas == 1:
        return f"there is one replica that decodes; use more --decode-replicas, {_LEAVE_OUT}"
    if field in ("router", *OF_PREFIX_AFFINE) and arriving == 1:
        return f"requests arrive at one replica; use --num-replicas or more --prefill-replicas, {_LEAVE_OUT}"
    if field in OF_PREFIX_AFFINE and cluster.router != "prefix-affine":
        return f"{cluster.router} does not read it; use --router prefix-affine, {_LEAVE_OUT}"
    if field == "cache_threshold" and workload is not None and not workload.may_share_prefixes:
        return f"no two prompts are known to begin alike; use a trace with hash_ids or session_id, {_LEAVE_OUT}"
    return None


def refuse_unread_in_cluster(cluster: Cluster, workload: Workload) -> None:
    """As ``refuse_unread``, of the fields of a cluster."""
    for field, value in vars(cluster).items():
        given = value != getattr(type(cluster), field)
        why = why_unread_in_cluster(field, cluster, workload) if given else None
        if why is not None:
            raise SettingError(field, value, why)


def either(names: Iterable[str]) -> str:
    """Names, of which one is meant."""
    *most, last = names
    return f"{', '.join(most)} or {last}" if most else last
