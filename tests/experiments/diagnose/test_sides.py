"""Prefill and decode servers that run apart: which side is short, by their readings alone."""

from __future__ import annotations

import pytest

from fragmeter.experiments.cli.app import DONE, status
from fragmeter.experiments.diagnose import doors
from fragmeter.experiments.diagnose.window import lines, now_of
from fragmeter.experiments.measured.scrapes import readings_of
from fragmeter.experiments.measured.server_metrics import served_load
from http_server import serving

SOURCES = "local_compute", "local_cache_hit", "external_kv_transfer"


def metrics(labels: str, running: float, waiting: float, usage: float, outputs: float, sources: tuple[int, ...]) -> str:
    """The metrics of a server that has served 100 requests."""
    lines = [
        f"vllm:num_requests_running{{{labels}}} {running}",
        f"vllm:num_requests_waiting{{{labels}}} {waiting}",
        f"vllm:kv_cache_usage_perc{{{labels}}} {usage}",
        f"vllm:request_generation_tokens_sum{{{labels}}} {100 * outputs}",
        f"vllm:request_generation_tokens_count{{{labels}}} 100",
    ]
    lines += [
        f'vllm:prompt_tokens_by_source_total{{{labels},source="{source}"}} {tokens}'
        for source, tokens in zip(SOURCES, sources)
    ]
    return "\n".join(lines) + "\n"


def prefill(labels: str, waiting: float, usage: float = 0.4) -> str:
    return metrics(labels, 4, waiting, usage, 1, (90_000, 10_000, 0))


def decode(labels: str, waiting: float, usage: float = 0.3, given: int = 100_000) -> str:
    return metrics(labels, 30, waiting, usage, 200, (5_000, 0, given))


def said(*servers: str) -> str:
    text = "".join(f"{1_790_000_000 + 10 * n}\n{''.join(servers)}" for n in range(6))
    readings = readings_of("m.txt", text)
    return " ".join(lines(now_of(readings, served_load(readings))))


A, B, C = 'instance="a"', 'instance="b"', 'instance="c"'


@pytest.mark.parametrize(
    ("before", "behind", "verdict"),
    [
        (12.0, 0.0, "requests wait for prefill while decode has room. Now, without a restart: send short prompts to the decode"),
        (0.0, 12.0, "requests wait for decode while prefill has room. Now, without a restart: let fewer requests be in flight"),
        (12.0, 12.0, "Both sides are short"),
        (0.0, 0.0, "They are in balance."),
    ],
)  # fmt: skip
def test_the_side_that_is_short_is_named(before, behind, verdict):
    shown = said(prefill(A, before), decode(B, behind), decode(C, behind))
    assert verdict in shown
    assert f"on 1 prefill server 4.0 requests run and {before} wait, 40% of the KV cache is in use" in shown
    assert f"on 2 decode servers 60.0 requests run and {2 * behind} wait, 30% of the KV cache is in use" in shown


def test_a_side_without_a_queue_and_without_room_takes_nothing_over():
    """A decode side at 80 % would not hold what a larger prefill side sends."""
    shown = said(prefill(A, 12.0), decode(B, 0.0, usage=0.8))
    assert "Out of balance" not in shown


def test_servers_that_compute_their_own_prompts_are_no_sides():
    assert "apart" not in said(prefill(A, 12.0), decode(B, 0.0, given=0))
    assert "apart" not in said(decode(A, 12.0), decode(B, 0.0))


def test_two_addresses_are_read_as_two_servers(monkeypatch, capsys):
    monkeypatch.setattr(doors, "_BETWEEN_S", 0.0)
    with (
        serving({"/metrics": prefill('engine="0"', 12.0)}) as (first, _),
        serving({"/metrics": decode('engine="0"', 0.0)}) as (second, _),
    ):
        assert status(["diagnose", "--metrics", f"{first},{second}", "--gpu", "h100-80gb"]) == DONE
    shown = " ".join(capsys.readouterr().out.split())
    assert "on 1 prefill server 4.0 requests run and 12.0 wait" in shown and "fragmeter plan sizes both" in shown
