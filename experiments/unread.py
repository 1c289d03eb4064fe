"""Flags that nothing would read: each is of some policies or routers, and under another one it changes nothing.

Who gives one asks for what is not done, so ``fragmeter simulate`` says so and does not serve without it. What is
as it is by default asks for nothing, and neither does a watermark of 0 where there is none. Settings made by a
program are not looked at: those of a sweep over policies hold for the ones that read them.
"""

from __future__ import annotations

from ..sim.cluster import Cluster
from ..sim.errors import SettingError
from ..sim.settings import Settings

#: Policies that read a setting.
READ_BY = {
    "page_size": ("vattention",),
    "watermark": ("vllm-sosp23", "vllm-v0", "sarathi", "vattention"),
    "preemption_mode": ("vllm-sosp23", "vllm-v0"),
    "waiting_served_ratio": ("tgi",),
    "max_waiting_tokens": ("tgi",),
    "output_estimate": ("lightllm",),
    "schedule_policy": ("sglang",),
}
#: What only the router prefix-affine reads.
OF_PREFIX_AFFINE = ("cache_threshold", "balance_abs_threshold", "balance_rel_threshold")


def refuse_unread(settings: Settings, cluster: Cluster) -> None:
    """Refuse what neither the policy nor the router reads.

    Raises:
        SettingError: Names the first such setting, and who reads it.
    """
    for field, policies in READ_BY.items():
        value = getattr(settings, field)
        asks = value != getattr(Settings, field) and (field, value) != ("watermark", 0)
        if asks and settings.policy not in policies:
            remedy = f"{settings.policy} does not read it; take {_either(policies)}, or leave it out"
            raise SettingError(field, value, remedy)
    if not settings.use_beam_search and settings.beam_survival != Settings.beam_survival:
        remedy = "is of beams; give --use-beam-search, or leave it out"
        raise SettingError("beam_survival", settings.beam_survival, remedy)
    for field in OF_PREFIX_AFFINE:
        value = getattr(cluster, field)
        if cluster.router != "prefix-affine" and value != getattr(Cluster, field):
            remedy = f"{cluster.router} does not read it; give --router prefix-affine, or leave it out"
            raise SettingError(field, value, remedy)


def _either(names: tuple[str, ...]) -> str:
    return ", ".join(names[:-1]) + " or " + names[-1] if len(names) > 1 else names[0]
