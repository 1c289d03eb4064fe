"""Requests as gateways, tracing tools, batch APIs and agent benchmarks log them; the forms are those of their documentation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from fragmeter.experiments.cli.app import DONE, status
from fragmeter.sim.types.errors import TraceError
from fragmeter.traces import Reading, Trace, read, read_with_content
from fragmeter.traces.readers.readers import format_of
from paths import SAMPLES

START_NS = 1_763_847_600_000_000_000


def lines(folder: Path, *records: Any, name: str = "log.jsonl") -> Path:
    path = folder / name
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def lengths(trace: Trace) -> list[tuple[int, int]]:
    return list(zip(trace.prompt_tokens.tolist(), trace.output_tokens.tolist(), strict=True))


def seconds(trace: Trace) -> list[float]:
    return (trace.arrival_ticks / 1e12).tolist()


class TestLogs:
    def test_litellms_table_and_its_payload_are_one(self, tmp_path):
        spend, table = read_with_content(SAMPLES / "litellm.jsonl"), read_with_content(SAMPLES / "litellm.csv")
        assert lengths(spend) == lengths(table) == [(30, 5), (100, 20)]
        assert seconds(spend) == seconds(table) == [0, 2.25]
        assert (spend.rows.lines.tolist(), table.rows.lines.tolist()) == ([3, 1], [4, 2])
        assert spend.content.session_id.tolist() == table.content.session_id.tolist() == [1, 1]
        records = list(map(json.loads, (SAMPLES / "litellm.jsonl").read_text().splitlines()))
        (tmp_path / "page.json").write_text(json.dumps({"data": records, "total": 3, "page": 1}))
        (tmp_path / "array.json").write_text(json.dumps(records, indent=1))
        frame = pd.read_csv(SAMPLES / "litellm.csv")
        frame.to_parquet(tmp_path / "table.parquet")
        for name in ("page.json", "array.json", "table.parquet"):
            found = read_with_content(tmp_path / name)
            assert (lengths(found), seconds(found)) == (lengths(spend), seconds(spend))
            assert (found.left_out.failed, len(found.remarks)) == (1, 1)

    def test_payloads_with_times_since_1970(self, tmp_path):
        usage = {"prompt_tokens": 9, "completion_tokens": 3, "trace_id": "t", "status": "success"}
        found = read(lines(tmp_path, usage | {"startTime": 1763847600.5}, usage | {"startTime": 1763847601.25}))
        assert (lengths(found), seconds(found)) == ([(9, 3)] * 2, [0, 0.75])

    def test_a_log_of_failures_is_refused(self, tmp_path):
        failure = {"prompt_tokens": 0, "completion_tokens": 0, "startTime": "2025-04-21T10:00:02Z"}
        with pytest.raises(TraceError, match="has no request that was answered"):
            read(lines(tmp_path, failure, failure))

    def test_a_wrong_length_names_its_line(self, tmp_path):
        good = {"prompt_tokens": 9, "completion_tokens": 3, "startTime": "2025-04-21T10:00:02Z"}
        with pytest.raises(TraceError, match="request 2: prompt_tokens = '9': must be a finite number"):
            read(lines(tmp_path, good, good | {"prompt_tokens": "9"}))
        with pytest.raises(TraceError, match="request 2: startTime = 'soon': must be a date and time"):
            read(lines(tmp_path, good, good | {"startTime": "soon"}))

    def test_columns_of_our_own_are_no_log(self, tmp_path):
        row = {"arrival_s": 5, "prompt_tokens": 9, "output_tokens": 3, "start_time": 1}
        assert format_of(lines(tmp_path, row)) == "our own columns"
        # What has no start is read as before.
        assert read(lines(tmp_path, {"usage": {"input_tokens": 9, "output_tokens": 3}})).arrival_ticks is None

    def test_spans_of_agents_and_tools_are_no_requests(self):
        found = read_with_content(SAMPLES / "otel_spans.jsonl")
        assert (lengths(found), seconds(found), found.left_out.failed) == ([(100, 30), (1200, 300)], [0, 0.25], 0)
        found = read(SAMPLES / "langfuse.json")
        assert (lengths(found), seconds(found)) == ([(100, 7), (13, 353)], [0, 2])

    def test_nanoseconds_in_text_are_exact(self, tmp_path):
        attributes = {"gen_ai.usage.input_tokens": 9, "gen_ai.usage.output_tokens": 3}
        spans = [
            {"spanId": "1", "startTimeUnixNano": str(START_NS + later), "attributes": attributes} for later in (0, 1, 3)
        ]
        assert (read(lines(tmp_path, *spans)).arrival_ticks // 1000).tolist() == [0, 1, 3]

    def test_spans_of_a_console(self, tmp_path):
        span = {
            "name": "chat m",
            "context": {"trace_id": "0x1", "span_id": "0x2"},
            "start_time": "2025-11-22T21:40:00.250000Z",
            "attributes": {"gen_ai.usage.input_tokens": 9, "gen_ai.usage.output_tokens": 3},
        }
        other = span | {"start_time": "2025-11-22T21:40:00.000000Z", "attributes": {"http.method": "GET"}}
        path = tmp_path / "spans.json"
        path.write_text("\n".join(json.dumps(each, indent=4) for each in (other, span, span)))
        assert lengths(read(path)) == [(9, 3)] * 2

    def test_each_record_has_tokens_where_it_has_them(self, tmp_path):
        """The place of the first record is not asked of the others."""
        start = {"startTime": "2025-04-21T10:00:02Z", "type": "GENERATION", "traceId": "t"}
        found = read(
            lines(
                tmp_path,
                start | {"promptTokens": 9, "completionTokens": 3},
                start | {"usage": {"input": 8, "output": 2, "unit": "TOKENS"}},
                start | {"usageDetails": {"input": 5, "cache_read_input_tokens": 2, "output": 1}},
                start | {"usage": {"input_tokens": 1, "cache_creation_input_tokens": 4, "output_tokens": 6}},
                start | {"usage": {"prompt_tokens": 4, "completion_tokens": 5}},
            )
        )
        assert lengths(found) == [(9, 3), (8, 2), (7, 1), (5, 6), (4, 5)]


class TestBatches:
    def test_outputs_arrive_at_once(self, capsys):
        found = read(SAMPLES / "batch_output.jsonl")
        assert (lengths(found), seconds(found), found.left_out.failed) == ([(24, 15), (8, 5)], [0, 0], 1)
        flags = ("--policy", "vllm-v1", "--model", "opt-13b", "--trace", str(SAMPLES / "batch_output.jsonl"))
        for paced in ((), ("--request-rate", "2")):
            assert status(["simulate", *flags, *paced]) == DONE
            said = " ".join(capsys.readouterr().out.split())
            assert said.startswith("batch_output.jsonl: a batch has no times: all requests arrive at once.")

    def test_anthropics_results(self, tmp_path):
        message = {"usage": {"input_tokens": 8, "cache_read_input_tokens": 90, "output_tokens": 4}}
        found = read(
            lines(
                tmp_path,
                {"custom_id": "a", "result": {"type": "errored", "error": {"type": "invalid_request"}}},
                {"custom_id": "b", "result": {"type": "succeeded", "message": message}},
            )
        )
        assert (lengths(found), found.rows.lines.tolist(), found.left_out.failed) == ([(98, 4)], [2], 1)

    def test_inputs_need_a_tokenizer(self, tmp_path, capsys):
        body = {"model": "m", "messages": [{"role": "system", "content": "one two"}], "max_tokens": 40}
        parts = [{"type": "text", "text": "three four"}, {"type": "text", "text": "five"}]
        chat = {"messages": [*body["messages"], {"role": "user", "content": parts}], "max_completion_tokens": 7}
        bodies = (body, chat, {"prompt": "six", "max_tokens": 2})
        path = lines(tmp_path, *({"custom_id": "a", "url": "/v1", "body": each} for each in bodies))
        with pytest.raises(
            TraceError, match="is the input of a batch, without lengths; give the batch's output, or --tok"
        ):
            read(path)
        tokenizers = pytest.importorskip("tokenizers")
        words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"?": 0}, unk_token="?"))
        words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
        words.save(str(tmp_path / "tokenizer.json"))
        reading = Reading(tokenizer=tmp_path / "tokenizer.json")
        flags = ("simulate", "--policy", "vllm-v1", "--model", "opt-13b", "--trace", str(path))
        assert status([*flags, "--tokenizer", str(reading.tokenizer)]) == DONE
        assert "are assumed to be as long as max_tokens" in " ".join(capsys.readouterr().out.split())
        found = read(path, reading)
        assert (lengths(found), seconds(found)) == ([(2, 40), (5, 7), (1, 2)], [0, 0, 0])
        assert "no answers" in found.remarks[0] and "at once" in found.remarks[1]
        path = lines(tmp_path, {"custom_id": "a", "body": body}, {"custom_id": "b", "body": {"prompt": "x"}})
        with pytest.raises(TraceError, match="line 2: max_tokens = None: is missing"):
            read(path, reading)
        path = lines(tmp_path, {"custom_id": "a", "body": {"messages": [{"role": "user"}], "max_tokens": 1}})
        with pytest.raises(TraceError, match="line 1: messages = .*: must be messages with a text"):
            read(path, reading)


def turn(t: float, prompt: int, ids: list[int], **more: Any) -> dict[str, Any]:
    return {"t": t, "type": "s", "in": prompt, "out": 7, "hash_ids": ids} | more


class TestAgents:
    def test_sessions_share_blocks_only_within(self):
        found = read_with_content(SAMPLES / "agents.jsonl")
        assert seconds(found) == [0, 2, 3.25, 3.5, 6.5]
        assert found.content.session_id.tolist() == [1, 2, 3, 2, 1]
        # The sub-agent's last answer comes at 4 s: of the agent's 5 s before 6.5 s half are left.
        assert (found.delay_ticks / 1e12).tolist() == [0, 0, 2.25, 1, 2.5]
        assert found.spawner.tolist() == [-1, 0, -1, -1, -1]
        main, agent, other, again, last = (
            found.content.ids[start:end].tolist()
            for start, end in zip(found.content.offsets, found.content.offsets[1:], strict=False)
        )
        assert last[:2] == main and again[:1] == agent and not set(other) & {*main, *agent, *again, *last}
        assert set(found.content.tokens.tolist()) == {64}

    def test_global_ids_are_shared(self, tmp_path):
        sessions = [
            {"id": name, "block_size": 16, "hash_id_scope": scope, "requests": [turn(0, 40, [1, 2])]}
            for name, scope in (("a", "global"), ("b", "global"), ("c", "local"), ("d", "local"))
        ]
        ids = read_with_content(lines(tmp_path, *sessions)).content.ids.tolist()
        assert ids[:2] == ids[2:4] == [1, 2] and len(set(ids)) == 6

    def test_agents_within_count_from_their_own_entry(self, tmp_path):
        inner = [turn(0.0, 40, [5]), turn(3.0, 50, [5])]
        agent = {"t": 185.0, "type": "subagent", "agent_id": "x", "requests": inner}
        session = {"id": "a", "block_size": 16, "requests": [turn(0, 40, [1]), turn(17, 40, [1]), agent]}
        path = tmp_path / "trace_0001.json"
        path.write_text(json.dumps(session, indent=2))
        assert seconds(read(path)) == [0, 17, 185, 188]

    def test_delays_that_are_not_given_follow_from_the_times(self, tmp_path):
        turns = [turn(0, 40, [1], api_time=1.5), turn(4, 50, [1], api_time=5), turn(6, 60, [1]), turn(9, 60, [1])]
        found = read_with_content(lines(tmp_path, {"id": "a", "block_size": 16, "requests": turns}))
        assert (found.delay_ticks / 1e12).tolist() == [0, 2.5, 0, 0]
        plain = [{name: value for name, value in each.items() if name != "api_time"} for each in turns]
        assert read_with_content(lines(tmp_path, {"id": "a", "block_size": 16, "requests": plain})).delay_ticks is None

    def test_a_pause_of_weeks_is_a_pause(self, tmp_path):
        sessions = [
            {"id": name, "block_size": 16, "requests": [turn(0, 40, [1]), turn(20 * 86_400, 40, [1])]} for name in "ab"
        ]
        found = read(lines(tmp_path, *sessions))
        assert seconds(found) == [0, 0, 20 * 86_400, 20 * 86_400]

    def test_errors_name_the_request(self, tmp_path):
        session = {"id": "a", "block_size": 16, "requests": [turn(0, 40, [1]), turn(1, 40, [1, 2, 3])]}
        with pytest.raises(TraceError, match="request 2: block_tokens = .*: adds up to 48, more than the prompt's 40"):
            read_with_content(lines(tmp_path, session))
        with pytest.raises(TraceError, match="request 3: in = None: is missing"):
            read(lines(tmp_path, session, session | {"requests": 1.5}))
        session["requests"][1] = 5
        with pytest.raises(TraceError, match="request 2: row = 5: is not a JSON object"):
            read(lines(tmp_path, session))

    def test_turns_wait_for_answers(self, tmp_path, capsys):
        """The time of the second turn is ignored: it is sent 1,000 s after the answer."""
        turns = [turn(0, 40, [1, 2], think_time=0), turn(5, 100, [1, 2, 3], think_time=1000)]
        path = lines(tmp_path, {"id": "a", "block_size": 16, "requests": turns})
        out = tmp_path / "out"
        assert (
            status(["simulate", "--policy", "vllm-v1", "--model", "opt-13b", "--trace", str(path), "--out", str(out)])
            == DONE
        )
        capsys.readouterr()
        requests = pd.read_parquet(next(out.rglob("requests.parquet")))
        first, second = requests.arrival_ticks.tolist(), requests.finish_ticks.tolist()
        assert first[1] == second[0] + 1000 * 10**12
