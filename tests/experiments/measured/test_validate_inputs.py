"""``fragmeter validate --against``: what files and flags say, and what is refused of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fragmeter.experiments.cli.app import DONE, MISTAKE
from fragmeter.experiments.measured.start import Server as Described
from fragmeter.experiments.measured.start import benchmark, replica
from served_bench import BLOCKS, CHOSEN, FLAGS, SENT, Server, held, validate, with_one_that_failed, written


def leave_out(path: Path, field: str) -> dict[str, Any]:
    """A benchmark's file without a field."""
    document = json.loads(path.read_text())
    del document[field]
    path.write_text(json.dumps(document))
    return document


class TestWhatTheFileSays:
    def test_requests_that_failed_are_left_out(self, tmp_path, capsys):
        path, _ = written(tmp_path, Server(), SENT)
        path.write_text(json.dumps(with_one_that_failed(json.loads(path.read_text()))))
        assert validate("--against", path, *FLAGS, "--json", tmp_path / "all.json") == DONE
        data = json.loads((tmp_path / "all.json").read_text())
        assert (data["requests"], data["failed"], data["error"]) == (len(SENT), 1, pytest.approx(0, abs=1e-9))
        assert "Left out: 1 requests that the server did not answer" in capsys.readouterr().out

    @pytest.mark.slow
    def test_metrics_of_another_load_are_reported(self, tmp_path, capsys):
        path, metrics = written(tmp_path, Server(), SENT)
        assert validate("--against", path, "--metrics", metrics, *FLAGS) == DONE
        assert "another load" not in capsys.readouterr().out
        count = 'time_to_first_token_seconds_count{engine="0",model_name="facebook/opt-13b"} '
        metrics.write_text(metrics.read_text().replace(f"{count}{len(SENT)}.0", f"{count}{2 * len(SENT)}.0"))
        assert validate("--against", path, "--metrics", metrics, *FLAGS) == DONE
        printed = " ".join(capsys.readouterr().out.split())
        assert f"are of {2 * len(SENT)} requests, the benchmark of {len(SENT)}" in printed

    @pytest.mark.parametrize(("blocks", "outcome"), [(1, DONE), (10**20, MISTAKE)])
    def test_a_pool_that_no_server_has(self, blocks, outcome, tmp_path, capsys):
        path, metrics = written(tmp_path, Server(), SENT)
        metrics.write_text(metrics.read_text().replace(f'num_gpu_blocks="{BLOCKS}"', f'num_gpu_blocks="{blocks}"'))
        assert validate("--against", path, "--metrics", metrics, *FLAGS) == outcome
        assert ("num_gpu_blocks_override" in capsys.readouterr().err) == (outcome == MISTAKE)

    def test_without_times_arrivals_are_drawn(self, tmp_path, capsys):
        path, _ = written(tmp_path, Server(), SENT)
        document = leave_out(path, "start_times")
        assert validate("--against", path, *FLAGS) == DONE
        assert "The file has no start_times: arrivals are drawn at its rate" in capsys.readouterr().out
        path.write_text(json.dumps(document | {"request_rate": None}))
        assert validate("--against", path, *FLAGS) == MISTAKE
        assert "start_times = None: is missing, and so is the request rate" in capsys.readouterr().err

    def test_tokens_that_come_in_chunks_have_no_latency_of_their_own(self, tmp_path, capsys):
        outcome = Server().serve(SENT)
        itls = Server().bench(SENT, outcome)["itls"]
        halved = [[sum(gaps[place : place + 2]) for place in range(0, len(gaps), 2)] for gaps in itls]
        path, _ = written(tmp_path, Server(), SENT, itls=halved)
        assert validate("--against", path, *FLAGS, "--json", tmp_path / "all.json") == DONE
        data = json.loads((tmp_path / "all.json").read_text())
        assert not [row for row in data["rows"] if "itl" in row["metric"]]
        assert data["error"] == pytest.approx(0, abs=1e-9)
        assert "Tokens arrived in groups" in capsys.readouterr().out

    def test_a_request_of_one_token_has_no_tpot(self, tmp_path):
        bench = held(tmp_path, Server())[0]
        assert (np.isnan(bench.tpot_s) == (bench.trace.output_tokens == 1)).all()
        assert np.isnan(bench.tpot_s).any()

    def test_of_requests_that_all_come_at_once_nothing_is_drawn(self, tmp_path, capsys):
        path, _ = written(tmp_path, Server(), SENT, request_rate="inf")
        leave_out(path, "start_times")
        assert benchmark(path, None, CHOSEN).arrivals.arrival_ticks.tolist() == [0] * len(SENT)
        assert validate("--against", path, *FLAGS) == DONE
        assert "arrivals are drawn" not in capsys.readouterr().out

    @pytest.mark.parametrize(
        ("field", "value", "complaint"),
        [
            ("ttfts", None, "row 2: ttfts = None: must be seconds, 0 or more"),
            ("ttfts", -1.0, "row 2: ttfts = -1: must be seconds, 0 or more"),
            ("ttfts", 1e300, "row 2: ttfts = 1e+300: must be seconds, 0 or more"),
            ("itls", 0.1, "row 2: itls = 0.1: must be a list of seconds"),
            ("itls", [0.1, "x"], "row 2: itls = 'x': must be seconds, 0 or more"),
        ],
    )
    def test_times_that_cannot_be(self, field, value, complaint, tmp_path, capsys):
        path, _ = written(tmp_path, Server(), SENT)
        document = json.loads(path.read_text())
        document[field][1] = value
        path.write_text(json.dumps(document))
        assert validate("--against", path, *FLAGS) == MISTAKE
        error = capsys.readouterr().err
        assert complaint in error and error.count("\n") == 1

    @pytest.mark.parametrize(
        ("more", "complaint"),
        [
            ({"ttfts": [0.0] * len(SENT)}, "ttfts = 0: is 0 throughout: the answers were not streamed"),
            ({"ttfts": [0.1]}, "ttfts = [0.1]: must be a list with a value for each request"),
            ({"max_concurrency": 0}, "max_concurrency = 0: must be a number above 0"),
            ({"max_concurrency": 10**400}, "must be a number above 0"),
            ({"request_rate": "fast"}, "request_rate = 'fast': must be a number above 0"),
        ],
    )
    def test_a_result_that_cannot_be(self, more, complaint, tmp_path, capsys):
        path, _ = written(tmp_path, Server(), SENT, **more)
        assert validate("--against", path, *FLAGS) == MISTAKE
        assert complaint in capsys.readouterr().err

    def test_a_result_without_details(self, tmp_path, capsys):
        path, _ = written(tmp_path, Server(), SENT)
        leave_out(path, "itls")
        assert validate("--against", path, *FLAGS) == MISTAKE
        assert "itls = None: is missing; run vllm bench serve with --save-detailed" in capsys.readouterr().err

    def test_another_kind_of_trace(self, tmp_path, capsys):
        (tmp_path / "trace.csv").write_text("arrival_s,prompt_tokens,output_tokens\n0,5,5\n")
        assert validate("--against", tmp_path / "trace.csv", *FLAGS) == MISTAKE
        assert "is a table or log of requests, not the result of a benchmark client" in capsys.readouterr().err


class TestReplica:
    def test_a_pasted_line_and_the_flags_that_count_in_its_place(self, tmp_path, capsys):
        path, _ = written(tmp_path, Server(), SENT)
        line = "vllm serve facebook/opt-13b --max-num-seqs 16 --enforce-eager --max-model-len 512"
        line += " --no-async-scheduling --no-enable-prefix-caching"
        flags = ("--gpu", "a100-40gb", "--block-size", 4, "--num-gpu-blocks-override", BLOCKS)
        flags += ("--max-num-batched-tokens", 64, "--max-num-seqs", 16, "--cost", "paper", "--outside-ms", 0)
        assert validate("--against", path, "--serve", line, *flags, "--json", tmp_path / "all.json") == DONE
        data = json.loads((tmp_path / "all.json").read_text())
        assert data["settings"]["max_model_len"] == 512
        assert data["error"] == pytest.approx(0, abs=1e-9)

    def test_the_benchmark_names_the_model(self):
        """The number format is the checkpoint's own."""
        chosen = replica(
            Described(None, None, "h100-80gb", None, None, {"gpu": "h100-80gb"}), None, "Qwen/Qwen3-32B-FP8"
        )
        assert (chosen.policy, chosen.model, chosen.quantization) == ("vllm-v1", "Qwen/Qwen3-32B-FP8", None)

    @pytest.mark.parametrize(
        ("flags", "complaint"),
        [
            ([], "gpu = None: is missing; give the server's GPU with --gpu"),
            (
                ["--gpu", "a100-40gb", "--vllm", "0.16"],
                "vllm = '0.16': applies only to a vllm serve line; give --serve",
            ),
            (
                ["--gpu", "a100-40gb", "--startup-log", "x"],
                "startup_log = 'x': applies only to a vllm serve line; give --serve",
            ),
            (["--serve", "vllm serve opt-13b"], "gpu = None: is missing; give the server's GPU"),
            (
                ["--gpu", "a100-40gb", "--serve", "vllm serve opt-66b"],
                "serve: it does not start by the estimated memory: ",
            ),
            (
                ["--gpu", "a100-80gb", "--serve", "vllm serve opt-13b -dp 2"],
                "--data-parallel-size = 2: one replica is simulated",
            ),
            (
                ["--gpu", "h200", "--model", "qwen3-30b-a3b", "--data-parallel-size", "2"],
                "--data-parallel-size = 2: one replica is simulated",
            ),
            (["--gpu", "a100-40gb", "--device", "cpu"], "device = 'cpu': has no effect with --against; leave it out"),
            (["--gpu", "a100-40gb", "--quick"], "quick = True: has no effect with --against; leave it out"),
            (["--gpu", "a100-40gb", "--plan", "p.npz"], "plan = 'p.npz': has no effect with --against; leave it out"),
            (["--gpu", "a100-40gb", "--check"], "check = True: has no effect with --against; leave it out"),
            (["--gpu", "a100-40gb", "--dtype", "fp16"], "dtype = 'fp16': has no effect with --against; leave it out"),
            (["--gpu", "a100-40gb", "--max-model-len", "40"], "row 1: prompt_tokens + output_tokens = 73: longer"),
        ],
    )
    def test_what_cannot_be_is_said_in_a_line(self, flags, complaint, tmp_path, capsys):
        path, _ = written(tmp_path, Server(), SENT)
        assert validate("--against", path, *flags) == MISTAKE
        error = capsys.readouterr().err
        assert complaint in error and error.count("\n") == 1

    @pytest.mark.slow
    def test_the_help_says_that_several_engines_are_refused(self, capsys):
        assert validate("--help-all") == DONE
        assert "--data-parallel-size INT Only 1: one engine" in " ".join(
            capsys.readouterr().out.replace("│", " ").split()
        )

    @pytest.mark.parametrize(
        ("flags", "field"),
        [(["--metrics", "m.txt"], "metrics"), (["--serve", "x"], "serve"), (["--policy", "vllm-v1"], "policy")],
    )
    def test_what_is_of_a_server_needs_a_benchmark(self, flags, field, capsys):
        assert validate(*flags) == MISTAKE
        error = capsys.readouterr().err
        assert f"{field} = {flags[1]!r}: applies only to a real server; give its benchmark by --against" in error
