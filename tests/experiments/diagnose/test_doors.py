"""An address, a Prometheus, a log: each door shows what the saved metrics of the same server show, and sends nothing but GET."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from fragmeter.experiments.cli.app import DONE, MISTAKE, status
from fragmeter.experiments.diagnose import doors
from fragmeter.experiments.measured import get, prometheus, server_log
from fragmeter.experiments.measured.scrapes import KV_USAGE, RUNNING, WAITING, read_scrapes, readings_of, total
from fragmeter.experiments.measured.server_metrics import ServerMetrics, served_load
from http_server import RECORDED, dumps, serving

LINE = "vllm serve meta-llama/Llama-3.1-8B-Instruct --max-model-len 16K"


def screen(capsys, *tokens: object) -> str:
    assert status(["diagnose", *map(str, tokens)]) == DONE
    return " ".join(capsys.readouterr().out.split())


def refusal(capsys, *tokens: object) -> str:
    assert status(["diagnose", *map(str, tokens)]) == MISTAKE
    text = capsys.readouterr().err
    assert text.count("\n") == 1
    return text


def answer(instances: tuple[str, ...] = ("10.0.0.7:8000",)) -> str:
    """The recorded metrics as Prometheus answers them, at each of some servers."""
    series: dict[tuple[str, str], list[list[object]]] = {}
    labels_of = {}
    for scrape in read_scrapes(RECORDED).scrapes:
        for (name, labels), value in scrape.samples.items():
            for instance in instances:
                key = (f"{name}{labels}", instance)
                labels_of[key] = {"__name__": name, **dict(labels), "instance": instance, "job": "vllm"}
                series.setdefault(key, []).append([scrape.at_s, str(value)])
    found = [{"metric": labels_of[key], "values": values} for key, values in series.items()]
    return json.dumps({"status": "success", "data": {"resultType": "matrix", "result": found}})


def log() -> str:
    """The recorded metrics as lines of vLLM's log."""
    lines = ["INFO 11-29 13:40:00 [core.py:81] something else: Running: 9 reqs"]
    for scrape in read_scrapes(RECORDED).scrapes:
        running, waiting, usage = (total(scrape.samples, names) or 0.0 for names in (RUNNING, WAITING, KV_USAGE))
        at = datetime.fromtimestamp(round(scrape.at_s), UTC).strftime("%m-%d %H:%M:%S")
        lines.append(
            f"(APIServer pid=1) INFO {at} [loggers.py:259] Engine 000: Avg prompt throughput: 100.0 tokens/s, Avg generation"
            f" throughput: 50.0 tokens/s, Running: {running:.0f} reqs, Waiting: {waiting:.0f} reqs, GPU KV cache usage:"
            f" {100 * usage:.1f}%, Prefix cache hit rate: 20.0%"
        )
    return "\n".join(lines) + "\n"


def saved(**changes: object) -> ServerMetrics:
    return replace(served_load(read_scrapes(RECORDED)), **changes)


class TestAddress:
    @pytest.fixture(autouse=True)
    def _at_once(self, monkeypatch):
        monkeypatch.setattr(doors, "_BETWEEN_S", 0.01)

    MODELS = json.dumps({"data": [{"id": "small", "root": "org/model", "max_model_len": 2048, "parent": None}]})

    @pytest.mark.slow
    def test_it_is_read_as_what_it_answers(self):
        responses = dumps()[10 : 10 + doors._SCRAPES]
        answers = {"/metrics": list(responses), "/v1/models": self.MODELS, "/version": '{"version": "0.32.0"}'}
        with serving(answers) as (url, asked):
            seen = doors.opened(f"{url}/metrics", None, None, None)
        found = served_load(seen.readings)
        file = served_load(readings_of("file", "".join(f"{n}\n{text}\n" for n, text in enumerate(responses))))
        timeless = {"elapsed_s": None, "arrival_rate": None, "loop": None, "prompt_rate": None, "output_rate": None}
        assert replace(found, **timeless) == replace(file, **timeless)
        assert asked == ["/metrics"] * doors._SCRAPES + ["/v1/models", "/version"]
        assert (seen.about.model, seen.about.max_model_len, seen.about.vllm) == ("org/model", 2048, "0.32")

    @pytest.mark.slow
    def test_the_first_screen_needs_neither_line_nor_gpu(self, capsys):
        with serving({"/metrics": dumps()[5:]}) as (url, _):
            shown = screen(capsys, "--metrics", url)
        assert shown.startswith("Measured: ") and "The KV cache is full" in shown
        assert "without a restart: let at most" in shown and "give the GPU" in shown

    @pytest.mark.slow
    def test_a_token_is_sent_from_the_environment(self, capsys, monkeypatch):
        with serving({"/metrics": dumps()[5:]}, token="secret") as (url, _):
            assert f"the variable {get.TOKEN}" in refusal(capsys, "--metrics", url)
            monkeypatch.setenv(get.TOKEN, "secret")
            assert "requests run" in screen(capsys, "--metrics", url)

    @pytest.mark.slow
    def test_an_address_without_answer_is_one_line(self, capsys):
        with serving({"/metrics": 302}) as (url, _):
            # Followed, the redirection would get the token.
            assert "redirects to 'http://elsewhere/metrics'" in refusal(capsys, "--metrics", url)
        assert "does not answer" in refusal(capsys, "--metrics", url)
        assert "is an address" in refusal(capsys, "--log", url)


class TestPrometheus:
    def test_an_answer_is_read_as_the_metrics_of_the_same_times(self, tmp_path, capsys):
        path = tmp_path / "range.json"
        path.write_text(answer())
        seen = doors.opened(None, str(path), None, None)
        found = served_load(seen.readings)
        assert replace(found, config={}) == saved(config={})
        assert found.running and found.preemptions and found.first_tokens
        assert "give it to diagnose as --prometheus" in refusal(capsys, "--metrics", path)

    def test_the_busiest_of_several_servers_is_taken(self, tmp_path):
        found = served_load(prometheus.readings_of("p", answer(("a:1", "b:1"))))
        assert (found.engine, found.num_engines, found.num_replicas) == ("a:1/0", 2, 2)
        assert found.running == saved().running

    @pytest.mark.slow
    def test_a_window_is_asked_for(self):
        with serving({"/api/v1/query_range": answer()}) as (url, asked):
            found = prometheus.asked(url, 1800, now_s=1_000_000.0)
        assert len(found.scrapes) == len(read_scrapes(RECORDED).scrapes)
        assert "start=998200.0&end=1000000.0&step=8" in asked[0] and "num_requests_running" in asked[0]

    def test_a_restart_begins_the_readings_anew(self):
        def series(name: str, *values: float) -> dict[str, object]:
            return {"metric": {"__name__": name}, "values": [[10 * n, str(value)] for n, value in enumerate(values)]}

        result = [series("vllm:num_requests_running", 5, 6, 1, 2), series("vllm:num_preemptions_total", 7, 9, 0, 1)]
        text = json.dumps({"status": "success", "data": {"result": result}})
        found = prometheus.readings_of("p", text)
        assert [scrape.at_s for scrape in found.scrapes] == [20, 30]
        assert served_load(found).preemptions == 1

    @pytest.mark.parametrize(
        ("text", "says"),
        [
            ('{"status": "error", "error": "parse error"}', "Prometheus answers 'parse error'"),
            ('{"status": "success", "data": {"result": [{"metric": {}, "values": []}]}}', "a series without a name"),
            ('{"status": "success", "data": {"result": []}}', "has no metrics of vLLM"),
            ('{"some": 1}', "data.result is missing"),
            ('{"status": ', "is no JSON"),
        ],
    )
    def test_anything_else_is_one_line(self, text, says, tmp_path, capsys):
        (tmp_path / "range.json").write_text(text)
        assert says in refusal(capsys, "--prometheus", tmp_path / "range.json")

    @pytest.mark.parametrize(("text", "seconds"), [("30m", 1800), ("90s", 90), ("2h", 7200), ("1d", 86_400)])
    def test_windows(self, text, seconds, capsys):
        assert prometheus.window_s(text) == seconds
        assert "window of a Prometheus" in refusal(capsys, "--metrics", RECORDED, "--window", text)


class TestNames:
    def test_rays_are_vllms(self, tmp_path):
        text = re.sub(r"(?m)^vllm:", "ray_vllm_", RECORDED.read_text())
        assert served_load(readings_of("ray", text)) == saved()


class TestLog:
    def test_periodic_lines_are_readings(self, tmp_path):
        found = served_load(server_log.readings_of("log", log()))
        for name in ("running", "waiting"):
            busy = [each for each in read_scrapes(RECORDED).scrapes if total(each.samples, RUNNING)]
            assert getattr(found, name) > 0 and len(busy) > 5
        whole = [each.samples for each in server_log.readings_of("log", log()).scrapes]
        for names in (RUNNING, WAITING):
            assert [total(each, names) for each in whole] == [
                total(each.samples, names) for each in read_scrapes(RECORDED).scrapes
            ]
        assert found.hit_rate == pytest.approx(0.2) and found.kv_usage[1] == pytest.approx(
            saved().kv_usage[1], abs=1e-3
        )
        # Computed tokens are those that the cache did not have.
        assert found.prompt_rate == pytest.approx(100 / 0.8, rel=0.1)
        assert found.output_rate == pytest.approx(50, rel=0.1)

    def test_of_several_pods_the_busiest(self):
        line = "[pod/vllm-{0}/vllm] 2026-11-29T10:0{1}:00.123Z INFO Engine 000: Avg prompt throughput: 1.0 tokens/s, Running: {2} reqs, Waiting: 0 reqs, GPU KV cache usage: 1.0%"
        text = "\n".join(line.format(pod, minute, 3 * pod + 1) for minute in range(3) for pod in range(2))
        found = served_load(server_log.readings_of("log", text))
        assert (found.engine, found.num_replicas, found.running) == ("vllm-1/0", 2, 4.0)
        assert found.elapsed_s == 120

    SGLANG = """\
[2026-11-29 03:12:00 TP0] Prefill batch, #new-seq: 2, #new-token: 800, #cached-token: 200, token usage: 0.10, #running-req: 0, #queue-req: 0
[2026-11-29 03:12:05 TP0] Prefill batch, #new-seq: 2, #new-token: 800, #cached-token: 200, token usage: 0.10, #running-req: 0, #queue-req: 0
[2026-11-29 03:12:10 TP0] Decode batch, #running-req: 2, #token: 1000, token usage: 0.12, gen throughput (token/s): 80.0, #queue-req: 0
[2026-11-29 03:12:20 TP0] KV cache pool is full. Retract requests. #retracted_reqs: 3, #new_token_ratio: 0.5
[2026-11-29 03:12:30 TP0] Decode batch, #running-req: 41, #token: 81234, token usage: 0.99, gen throughput (token/s): 900.0, #queue-req: 63
"""

    def test_sglangs_is_measured(self, tmp_path, capsys):
        (tmp_path / "sglang.log").write_text(self.SGLANG)
        found = served_load(server_log.readings_of("log", self.SGLANG))
        assert (found.server, found.preemptions, found.kv_usage[1]) == ("SGLang", 3.0, 0.99)
        assert found.hit_rate == pytest.approx(0.2)
        shown = screen(capsys, "--log", tmp_path / "sglang.log")
        assert "3 retractions" in shown and "Not simulated: give the GPU" in shown
        assert "are of SGLang, not of the vLLM server" in refusal(
            capsys, "--log", tmp_path / "sglang.log", "--serve", LINE
        )

    SGLANG_START = """\
[2026-11-29 03:11:00] server_args=ServerArgs(model_path='Qwen/Qwen3-8B', dtype='auto', kv_cache_dtype='auto', mem_fraction_static=0.55, \
max_running_requests=None, chunked_prefill_size=8192, page_size=1, tp_size=2, dp_size=1, attention_backend='fa3', disable_cuda_graph=False, \
schedule_policy='lpm', schedule_conservativeness=1.0, speculative_algorithm=None, disaggregation_mode='null', enable_mixed_chunk=True)
[2026-11-29 03:11:40 TP0] max_total_num_tokens=60000, chunked_prefill_size=8192, max_running_requests=2048, context_len=40960
"""

    def test_the_start_of_sglangs_settles_line_and_pool(self, tmp_path, capsys):
        (tmp_path / "sglang.log").write_text(self.SGLANG_START + self.SGLANG)
        out = tmp_path / "found.json"
        small = ("--gpu", "h100-80gb", "--num-prompts", 100, "--seeds", 1, "--jobs", 1, "--json", out)
        shown = screen(capsys, "--log", tmp_path / "sglang.log", "--input-len", 500, "--output-len", 50, *small)
        found = json.loads(out.read_text())
        assert found["kv_cache"] == {"num_gpu_blocks": 60_000, "tokens": 60_000, "origin": "log"}
        chosen = {name: found["settings"][name] for name in ("policy", "tensor_parallel_size", "schedule_policy")}
        assert chosen == {"policy": "sglang", "tensor_parallel_size": 2, "schedule_policy": "lpm"}
        assert not found["assumed"] and "Without --enable-mixed-chunk, not counted" in shown
        # Of the changes each is a flag of SGLang's.
        assert all("--chunked-prefill-size" in each["flags"] or "--m" in each["flags"] for each in found["changes"])
        assert "--max-num" not in shown
        # Without its start the log does not say what is served; the user's line does, and its pool is computed.
        (tmp_path / "sglang.log").write_text(self.SGLANG)
        assert "nothing says which model" in refusal(capsys, "--log", tmp_path / "sglang.log", *small)
        line = "python3 -m sglang.launch_server --model-path qwen3-8b"
        screen(
            capsys, "--log", tmp_path / "sglang.log", "--serve", line, "--input-len", 500, "--output-len", 50, *small
        )
        assert json.loads(out.read_text())["kv_cache"]["origin"] == "computed"

    def test_tokens_of_sglangs_decode_lines_are_counted(self):
        """A decode line has the tokens/s since the decode line before it."""
        found = served_load(server_log.readings_of("log", self.SGLANG))
        assert found.output_rate == pytest.approx(900.0 * 20 / 30)

    @pytest.mark.slow
    def test_a_start_in_front_settles_line_and_pool(self, tmp_path, capsys):
        start = (
            "INFO 11-29 13:00:00 [api_server.py:1] vLLM API server version 0.30.0\n"
            "INFO 11-29 13:00:01 [utils.py:1] non-default args: {'model_tag': 'meta-llama/Llama-3.1-8B-Instruct', 'host': '0.0.0.0',"
            " 'model': 'meta-llama/Llama-3.1-8B-Instruct', 'max_model_len': 8192, 'max_num_seqs': 64}\n"
            "INFO 11-29 13:01:00 [kv_cache_utils.py:1] GPU KV cache size: 40,000 tokens\n"
        )
        (tmp_path / "server.log").write_text(start + log())
        out = tmp_path / "found.json"
        small = ("--gpu", "h100-80gb", "--num-prompts", 250, "--seeds", 2, "--jobs", 1, "--json", out)
        shown = screen(capsys, "--log", tmp_path / "server.log", *small)
        found = json.loads(out.read_text())
        assert found["kv_cache"] == {"num_gpu_blocks": 2500, "tokens": 40_000, "origin": "log"}
        assert (found["settings"]["max_num_seqs"], found["settings"]["max_model_len"]) == (64, 8192)
        assert not found["assumed"] and "which the measured tokens/s" in shown
        # Without its start the log does not say what is served.
        (tmp_path / "server.log").write_text(log())
        assert "nothing says which model" in refusal(capsys, "--log", tmp_path / "server.log", *small)

    def test_a_log_without_them_is_one_line(self, tmp_path, capsys):
        (tmp_path / "server.log").write_text("INFO 11-29 13:00:00 starting\n")
        assert "has no periodic line" in refusal(capsys, "--log", tmp_path / "server.log")


def test_one_door_at_a_time(capsys, tmp_path):
    assert "give one of them" in refusal(capsys, "--metrics", RECORDED, "--log", RECORDED)
    assert "serve = None: is missing" in refusal(capsys, "--gpu", "h100-80gb")
    assert "cannot be read" in refusal(capsys, "--prometheus", Path(tmp_path, "none"))
