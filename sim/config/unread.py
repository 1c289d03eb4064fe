"""Refuses settings that a run does not read.

A setting is *given* if its value differs from the default. Values without an effect (a watermark of 0, a swap space of
0) are accepted by every run. A run reads the options that its policy declares, unless the declaration
states why it does not (``Options.why_unread``). ``tests/sim/config/test_unread_settings.py`` compares this with runs:
every setting under every policy, on loads in which the setting would have an effect.
"""

from __future__ import annotations

from dataclasses import replace

from ..cost import default_cost
from ..policy.options import LEAVE_OUT, either, option_names
from ..policy.registry import declaring, readers
from ..spec import gpu, model
from ..types.errors import SettingError
from ..workload.workload import Workload
from .cluster import Cluster
from .settings import SHARED, Settings, default_of

#: Fields of a cluster that one router reads.
OF_PREFIX_AFFINE = ("cache_threshold", "balance_abs_threshold", "balance_rel_threshold")


def why_unread(field: str, settings: Settings, workload: Workload | None = None) -> str | None:
    """Why a run does not read a setting, whatever its value, and what to do; None where it does.

    Args:
        workload: None takes one that would show it.

    Raises:
        SettingError: A model that is not known.
    """
    kind = settings.kind
    if field in ("data_parallel_size", "enable_expert_parallel"):
        return _why_unshared(field, settings)
    if field in SHARED:
        if field != "max_num_batched_tokens" or kind.has_token_budget:
            return None
        return f"{settings.policy} schedules whole batches and has no token budget; use --max-num-seqs, {LEAVE_OUT}"
    if field in option_names(kind.options_type):
        by_cost = _why_other_kernels(settings) if field == "attention_backend" else None
        by_cost = _why_other_sampler(settings) if field == "sampling" else by_cost
        return by_cost or settings.policy_options.why_unread(field, settings, workload)
    if is_required(field):
        # ``refuse_lacking`` refuses the run.
        return None
    return f"{settings.policy} does not read it; use --policy {either(readers(field))}, {LEAVE_OUT}"


def _why_unshared(field: str, settings: Settings) -> str | None:
    """Why a run does not read a setting of the division of experts; None where it does."""
    shape = model(settings.model)
    if shape.experts is None:
        use = "--num-replicas for engines that share nothing, " if field == "data_parallel_size" else ""
        return (
            f"{shape.name} has no experts; use {use}{LEAVE_OUT}" if use else f"{shape.name} has no experts; {LEAVE_OUT}"
        )
    if field == "enable_expert_parallel" and settings.tensor_parallel_size == settings.data_parallel_size == 1:
        return f"one GPU holds all experts; use --tensor-parallel-size or --data-parallel-size, {LEAVE_OUT}"
    return None


def _why_other_kernels(settings: Settings) -> str | None:
    """Why a run does not read the backend of attention; None where step times or the memory depend on it."""
    shape, card = model(settings.model), gpu(settings.gpu)
    name = settings.cost or default_cost(shape, card, settings.quantization)
    if shape.has_vectors:
        return f"{shape.name} has latent attention, for which vLLM chooses other backends; {LEAVE_OUT}"
    if settings.num_gpu_blocks_override is None or name not in ("paper", "roofline"):
        return None
    return f"--cost {name} has no kernels by backend, and --num-gpu-blocks-override sets the pool; {LEAVE_OUT}"


def _why_other_sampler(settings: Settings) -> str | None:
    """Why a run does not read how tokens are chosen; None where step times depend on it."""
    return f"--cost paper has no sampler; {LEAVE_OUT}" if settings.cost == "paper" else None


def is_given(field: str, value: object) -> bool:
    """Whether the value of a setting asks for more than its default."""
    if value == default_of(field):
        return False
    declared = None if field in SHARED else declaring(field)
    return declared is None or field not in declared.no_effect or value != declared.no_effect[field]


def is_required(field: str) -> bool:
    """Whether a setting changes what requests ask for, so that no run may ignore it."""
    declared = None if field in SHARED else declaring(field)
    return declared is not None and field in declared.required


#: What asks for nearly the same under other policies.
_INSTEAD = {"shared_prefix_tokens": ", or --random-prefix-len with --input-len, which prefix caching finds"}


def refuse_lacking(settings: Settings) -> None:
    """Refuse an option that changes what requests ask for, under a policy that lacks it.

    Raises:
        SettingError: Names it, and the policies that have it.
    """
    own = option_names(settings.kind.options_type)
    for name, value in settings.options:
        if name not in own and is_required(name):
            instead = _INSTEAD.get(name, "")
            remedy = f"{settings.policy} does not support it; use --policy {either(readers(name))}{instead}"
            raise SettingError(name, value, remedy)


def refuse_unread(settings: Settings, workload: Workload) -> None:
    """Refuse a setting that was given and that a run does not read.

    Raises:
        SettingError: Names the first one, why it is not read, and what to do.
    """
    for field, value in settings.given().items():
        why = why_unread(field, settings, workload) if is_given(field, value) else None
        if why is not None:
            raise SettingError(field, value, why)


def only_read(settings: Settings, workload: Workload | None = None) -> Settings:
    """The settings of the same run, with what it does not read at its default: see ``reset_unread``."""
    return reset_unread(settings, workload)[0]


def reset_unread(settings: Settings, workload: Workload | None = None) -> tuple[Settings, dict[str, str]]:
    """The settings of the same run, with what it does not read at its default, and why it does not read each of these.

    For settings that a program makes for several runs, or that come from a pasted command line. Reset one after the
    other, as one may be read for the sake of another that is not.

    Raises:
        SettingError: An option that the policy lacks and that no run may ignore.
    """
    refuse_lacking(settings)
    reasons = {}
    for field, value in settings.given().items():
        if is_given(field, value) and (why := why_unread(field, settings, workload)) is not None:
            settings, reasons[field] = replace(settings, **{field: default_of(field)}), why
    return settings, reasons


def why_unread_in_cluster(field: str, cluster: Cluster, workload: Workload | None = None) -> str | None:
    """As ``why_unread``, of a field of ``Cluster``; those of prefill and decode are checked there."""
    arriving = cluster.prefill_replicas or cluster.num_replicas
    if field == "decode_router" and cluster.decode_replicas == 1:
        return f"only one replica decodes; use more --decode-replicas, {LEAVE_OUT}"
    if field in ("router", *OF_PREFIX_AFFINE) and arriving == 1:
        return f"all requests arrive at one replica; use --num-replicas or more --prefill-replicas, {LEAVE_OUT}"
    if field in OF_PREFIX_AFFINE and cluster.router != "prefix-affine":
        return f"{cluster.router} does not read it; use --router prefix-affine, {LEAVE_OUT}"
    if field == "cache_threshold" and workload is not None and not workload.may_share_prefixes:
        return f"no prompts are known to share a prefix; use a trace with hash_ids or session_id, {LEAVE_OUT}"
    return None


def refuse_unread_in_cluster(cluster: Cluster, workload: Workload) -> None:
    """As ``refuse_unread``, of the fields of a cluster."""
    for field, value in vars(cluster).items():
        given = value != getattr(type(cluster), field)
        why = why_unread_in_cluster(field, cluster, workload) if given else None
        if why is not None:
            raise SettingError(field, value, why)
