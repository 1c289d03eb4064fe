"""Refuses fields of a cluster that a run does not read, as ``engine.unread`` refuses settings."""

from __future__ import annotations

from ..policy.options import LEAVE_OUT
from ..types.errors import SettingError
from ..workload.workload import Workload
from .config import Cluster

#: Fields of a cluster that one router reads.
OF_PREFIX_AFFINE = ("cache_threshold", "balance_abs_threshold", "balance_rel_threshold")


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
