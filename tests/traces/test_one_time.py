"""One rule of time: what a trace counts from, and in which unit, changes nothing but the printed start."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from datetime import datetime, timedelta
from decimal import Decimal
from pathlib import Path

import pandas as pd
import pytest

from fragmeter.experiments.cli.app import DONE, MISTAKE, status
from fragmeter.sim.types.errors import MissingSetting, SettingError, TraceError
from fragmeter.sim.types.notes import collected_notes
from fragmeter.traces import Reading, read, read_with_content, trace_of_frame
from paths import ROOT, SAMPLES
from same_trace import assert_same

PROBE = ROOT / "tests" / "data" / "probe" / "turns.jsonl"
SHIFT_S = 1_000_000
#: Units of a second.
PER_SECOND = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
#: Samples with times: the unit, and the column, or a pattern before each number.
CSV = {
    "burstgpt.csv": ("s", "Timestamp"),
    "burstgpt_sessions.csv": ("s", "Timestamp"),
    "splitwise.csv": ("s", "arrival_timestamp"),
    "vidur_timed.csv": ("s", "arrived_at"),
}
JSON = {
    "mooncake.jsonl": ("ms", '"timestamp": '),
    "timed_trace.jsonl": ("s", '"timestamp": '),
    "bailian.jsonl": ("s", '"timestamp": '),
    "ragpulse/0_trace.jsonl": ("s", '"timestamp": "'),
    "ours.jsonl": ("s", '"arrival_s": '),
    "aiperf.jsonl": ("ns", '"request_start_ns":'),
    "guidellm.json": ("s", '"request_start_time": '),
    "guidellm_0.3.json": ("s", '"start_time": '),
    "inference_perf.json": ("s", '"start_time": '),
    "otel_spans.jsonl": ("ns", '"startTimeUnixNano": "'),
    "jaeger.json": ("us", '"startTime": '),
    "agents.jsonl": ("s", '"t": '),
}
DATED = ("azure2023.csv", "azure2024.csv", "litellm.jsonl", "litellm.csv", "langfuse.json")
Change = Callable[[Decimal], Decimal]


def plain(number: Decimal) -> str:
    return f"{number.normalize():f}"


def rewritten(name: str, folder: Path, change: Change, delay: Change = lambda delay: delay) -> Path:
    """A sample with other times, under its own name."""
    path = folder / Path(name).name
    text = (SAMPLES / name).read_text()
    if name in CSV:
        header, *rows = [line.split(",") for line in text.splitlines()]
        place = header.index(CSV[name][1])
        for row in rows:
            row[place] = plain(change(Decimal(row[place])))
        text = "\n".join(map(",".join, [header, *rows]))
    else:
        text = re.sub(f"(?<={re.escape(JSON[name][1])})[0-9.]+", lambda m: plain(change(Decimal(m[0]))), text)
        text = re.sub(
            '("delay": |"think_time": |"api_time": )([0-9.]+)', lambda m: m[1] + plain(delay(Decimal(m[2]))), text
        )
    path.write_text(text)
    for chunks in (SAMPLES / "ragpulse").glob("[1-5]_*") if name.startswith("ragpulse") else ():
        (folder / chunks.name).write_bytes(chunks.read_bytes())
    return path


@pytest.mark.parametrize("name", [*CSV, *JSON])
@pytest.mark.parametrize("shift_s", [SHIFT_S, 1_763_847_600])
def test_a_shift_changes_only_the_start(tmp_path, name, shift_s):
    unit = (CSV | JSON)[name][0]
    found = read_with_content(SAMPLES / name)
    shifted = read_with_content(rewritten(name, tmp_path, lambda time: time + shift_s * PER_SECOND[unit]))
    assert_same(shifted, found)
    assert found.arrival_ticks[0] == 0 and found.start.unit == shifted.start.unit == unit
    assert Decimal(shifted.start.written) - Decimal(found.start.written) == shift_s * PER_SECOND[unit]
    assert shifted.start.text is not None


@pytest.mark.parametrize("name", DATED)
def test_dates_on_another_day_change_only_the_start(tmp_path, name):
    def later(match: re.Match[str]) -> str:
        return (datetime.fromisoformat(match[0]) + timedelta(seconds=SHIFT_S)).isoformat(match[0][10])

    text = (SAMPLES / name).read_text()
    (tmp_path / name).write_text(re.sub(r"\d{4}-\d\d-\d\d[ T][\d:]{8}", later, text))
    moved, found = read_with_content(tmp_path / name), read_with_content(SAMPLES / name)
    assert_same(moved, found)
    begins, began = (datetime.fromisoformat(trace.start.date) for trace in (moved, found))
    assert (begins - began).total_seconds() == SHIFT_S


@pytest.mark.parametrize("unit", PER_SECOND)
@pytest.mark.parametrize("name", [*CSV, *JSON])
def test_a_unit_is_decided_or_the_flag_is_named(tmp_path, name, unit):
    factor = Decimal(PER_SECOND[unit]) / PER_SECOND[(CSV | JSON)[name][0]]
    path = rewritten(name, tmp_path, lambda time: time * factor, lambda delay: delay * factor)
    found = read_with_content(SAMPLES / name)
    assert_same(read_with_content(path, Reading(time_unit=unit)), found)
    try:
        assert_same(read_with_content(path), found)
    except AssertionError:
        # The column, or the program that wrote it, names its unit.
        assert name in ("ours.jsonl", "inference_perf.json", "agents.jsonl", "otel_spans.jsonl")
    except (MissingSetting, TraceError) as error:
        assert "--time-unit" in str(error)


@pytest.mark.parametrize("shift_s", [SHIFT_S, 1_763_847_600])
def test_a_benchmark_and_a_probe(tmp_path, shift_s):
    document = json.loads((SAMPLES / "bench_serve.json").read_text())
    document["start_times"] = [time + shift_s for time in document["start_times"]]
    (tmp_path / "bench_serve.json").write_text(json.dumps(document))
    assert_same(read_with_content(tmp_path / "bench_serve.json"), read_with_content(SAMPLES / "bench_serve.json"))
    header, *lines = map(json.loads, PROBE.read_text().splitlines())
    later_ns = shift_s * 10**9
    header |= {"monotonic_ns": header["monotonic_ns"] + later_ns, "unix_ns": header["unix_ns"] + later_ns}
    for line in lines:
        line |= {name: line[name] + later_ns for name in ("start", "end") if name in line}
        for event in line.get("events", []):
            for place in {"add": (3, 4), "finish": (2,)}.get(event[0], ()):
                event[place] += later_ns
    (tmp_path / PROBE.name).write_text(
        "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in [header, *lines])
    )
    assert_same(read_with_content(tmp_path / PROBE.name), read_with_content(PROBE))


#: One request a second, from 0 on, and the same times in other words.
SECONDS = [0, 0.25, 1.75, 4]
DATES = [f"2025-11-22T{21 + int(s > 3)}:59:{(58 + s) % 60:05.2f}" for s in SECONDS]
WORDS = {
    "date": [date.replace("T", " ").replace("22:59", "22:00") for date in DATES],
    "zone": [f"{date.replace('22:59', '22:00')}+01:00" for date in DATES],
    "utc": [f"{date.replace('22:59', '22:00')}Z" for date in DATES],
    "unix s": [1_763_848_798 + s for s in SECONDS],
    "unix ms": [1_763_848_798_000 + int(s * 1e3) for s in SECONDS],
    "unix us": [1_763_848_798_000_000 + int(s * 1e6) for s in SECONDS],
    "unix ns": [1_763_848_798_000_000_000 + int(s * 1e9) for s in SECONDS],
    "text": [str(s) for s in SECONDS],
}


@pytest.mark.parametrize("column", ["arrival_s", "timestamp"])
@pytest.mark.parametrize(
    ("words", "form"),
    # Text in a table is no number.
    [
        (words, form)
        for words in WORDS
        for form in ("csv", "jsonl", "parquet", "frame")
        if words != "text" or form in ("csv", "jsonl")
    ],
)
def test_dates_and_times_since_1970_in_any_column(tmp_path, words, form, column):
    frame = pd.DataFrame({column: WORDS[words], "prompt_tokens": [9, 8, 7, 6], "output_tokens": 5})
    path = tmp_path / f"t.{form}"
    if form == "frame":
        found = trace_of_frame(frame)
    else:
        {"csv": lambda: frame.to_csv(path, index=False), "parquet": lambda: frame.to_parquet(path),
         "jsonl": lambda: frame.to_json(path, orient="records", lines=True)}[form]()  # fmt: skip
        found = read_with_content(path)
    assert (found.arrival_ticks / 1e12).tolist() == SECONDS
    if words != "text":
        assert found.start.date.startswith("2025-11-22") and found.start.text is not None


def test_a_column_of_pandas_dates(tmp_path):
    times = pd.to_datetime(pd.Series(WORDS["zone"]))
    frame = pd.DataFrame({"timestamp": times, "prompt_tokens": 1, "output_tokens": 5})
    frame.to_parquet(tmp_path / "t.parquet")
    for found in (trace_of_frame(frame), read_with_content(tmp_path / "t.parquet")):
        assert (found.arrival_ticks / 1e12).tolist() == SECONDS


def moments(
    folder: Path, times: list, column: str = "timestamp", keys: tuple[str, str] = ("input_length", "output_length")
) -> Path:
    path = folder / "times.jsonl"
    path.write_text("".join(json.dumps({column: time, keys[0]: 20, keys[1]: 4}) + "\n" for time in times))
    return path


@pytest.mark.parametrize(
    ("times", "unit", "duration_s"),
    [
        ([0.0, 0.5, 1.75, 9.0], "s", 9),  # GuideLLM's replay: 333 requests/s in ms
        ([0, 500, 1750, 9000], "ms", 9),
        ([0, 27_482, 27_482.5], "ms", 27.4825),  # one in three hours in s
        ([0, 500_000, 1_750_000, 3_000_000], "us", 3),  # 0.001/s in ms, 1,000/s in ns
        ([10**9, 10**9 + 3000], "ms", 3),  # 2001 is no year of a trace
        ([0, 0, 1, 1, 2, 2], "s", 2),  # 2,500 requests/s in ms
        ([5, 5, 5], "ms", 0),
        ([7], "ms", 0),
    ],
)
def test_the_unit_of_mooncakes_keys_is_decided_by_values(tmp_path, times, unit, duration_s):
    trace = read_with_content(moments(tmp_path, times))
    assert trace.start.unit == unit and (trace.start.reason is None) == (unit == "ms")
    assert trace.arrival_ticks[-1] == round(duration_s * 10**12)


def test_milliseconds_that_may_be_seconds_are_said(tmp_path):
    # One request in 3 s, or 333 in one; as in Mooncake's own traces, 3.3 in one are no likely seconds.
    trace = read_with_content(moments(tmp_path, [3 * row for row in range(10)]))
    assert (trace.start.unit, trace.arrival_ticks[-1]) == ("ms", 27 * 10**9)
    assert "milliseconds" in trace.start.text and "in s they would be 0.333 requests/s" in trace.start.text
    assert (
        read_with_content(moments(tmp_path, [3 * row for row in range(10)]), Reading(time_unit="s")).start.unit == "s"
    )
    assert read_with_content(moments(tmp_path, [300 * row for row in range(10)])).start.text is None


def test_one_mistyped_time_decides_no_unit(tmp_path):
    times = [1000 * row for row in range(40)]
    assert read_with_content(moments(tmp_path, [*times, 10**12]), Reading(skip_bad=True)).left_out.bad == 1
    with pytest.raises(TraceError, match="line 41: timestamp = 1000000000000: is more than 97 days after the first"):
        read_with_content(moments(tmp_path, [*times, 10**12]))


def test_a_unit_that_is_not_clear_is_asked_for(tmp_path):
    # One request in 5 s, in us: 0.2/s, or 200/s in ns.
    path = moments(tmp_path, [5_000_000 * row for row in range(4)])
    with pytest.raises(
        MissingSetting, match=r"time_unit: .*timestamp: in ms they would be 0.0002 requests/s, 0.2 in us or 200 in ns"
    ):
        read_with_content(path)
    assert read_with_content(path, Reading(time_unit="us")).arrival_ticks[-1] == 15 * 10**12
    # Nothing makes it likely: it stays what it is.
    assert read_with_content(moments(tmp_path, [0, 10**-3, 2 * 10**-3], "arrival_s")).start.unit == "s"
    assert read_with_content(moments(tmp_path, [0, 8_000_000], "arrival_s")).start.unit == "s"


def test_flags_that_contradict_the_file(tmp_path):
    with pytest.raises(SettingError, match="time_unit = 'ms': .*has dates, which need no unit; leave it out"):
        read_with_content(SAMPLES / "azure2023.csv", Reading(time_unit="ms"))
    with pytest.raises(SettingError, match="excludes timed_trace_sec_multiplier"):
        Reading(time_unit="ms", timed_trace_sec_multiplier=1)
    path = moments(tmp_path, [0.0, 0.5, 1.75, 9.0])
    assert read_with_content(path, Reading(timed_trace_sec_multiplier=0.001)).arrival_ticks[-1] == 9 * 10**9


class TestCommands:
    """The commands print the start in front of the answer, and nothing else differs."""

    SERVED = ("--policy", "vllm-v1", "--model", "opt-13b")

    @staticmethod
    def burst(path: Path, first: int) -> None:
        """BurstGPT's rows, from ``first`` on."""
        rows = "".join(f"{first + row},ChatGPT,{100 + row},20,120,API log\n" for row in range(40))
        path.write_text(f"Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n{rows}")

    @pytest.mark.slow
    @pytest.mark.parametrize(
        "command",
        [
            ("simulate", *SERVED, "--trace", "{}", "--out", "{out}"),
            ("compare", "--set", "block_size=8", "--set", "block_size=16", "--seeds", "1", "--trace", "{}", "--json", "{out}/c.json"),
            ("sweep", *SERVED, "--grid", "block_size=8,16", "--trace", "{}", "--out", "{out}"),
            ("plan", "--model", "opt-13b", "--gpu", "a100-40gb", "--goodput", "ttft:5000", "--seeds", "1", "--trace", "{}"),
            ("diagnose", "--serve", "vllm serve facebook/opt-13b", "--gpu", "a100-40gb", "--trace", "{}", "--seeds", "1", "--num-prompts", "50"),
            ("traces", "stats", "{}"),
            ("traces", "convert", "{}", "{out}/new.csv"),
            ("traces", "synth", "{}", "--out", "{out}/load.json"),
        ],
        ids=lambda command: " ".join(command[:2]),
    )  # fmt: skip
    def test_same_bytes(self, command, tmp_path, capsys):
        seen, out, path = [], tmp_path / "out", tmp_path / "burst.csv"
        said = "imes begin at 2600000 s, which is 0 here."
        for first in (0, 2_600_000):
            self.burst(path, first)
            out.mkdir()
            assert status([token.format(path, out=out) for token in command]) == DONE
            printed = capsys.readouterr()
            assert printed.err == ""
            shown = " ".join(printed.out.split())
            assert shown.count(said) == (1 if first else 0)
            assert not first or shown.startswith(f"{path.name}: t{said}")
            files = (file for file in out.rglob("*") if file.is_file() and "points" not in file.parts)
            written = {file.relative_to(out): file.read_bytes() for file in files}
            if (document := written.get(Path("c.json"))) is not None:
                content = json.loads(document)
                assert bool(content.pop("notes", None)) == bool(first)
                written[Path("c.json")] = json.dumps(content).encode()
            seen.append((shown.replace(f"{path.name}: t{said}", "").split(), written))
            out.rename(tmp_path / f"out{first}")
        assert seen[0] == seen[1]

    @pytest.mark.slow
    def test_every_command_takes_the_unit(self, tmp_path, capsys):
        path = moments(tmp_path, [5_000_000 * row for row in range(60)])
        for command in (
            ("simulate", *self.SERVED),
            ("traces", "stats"),
            (
                "diagnose",
                "--serve",
                "vllm serve facebook/opt-13b",
                "--gpu",
                "a100-40gb",
                "--seeds",
                1,
                "--num-prompts",
                50,
            ),
        ):
            named = [str(path)] if command[0] == "traces" else ["--trace", str(path)]
            tokens = [*map(str, command), *named]
            assert status(tokens) == MISTAKE
            error = capsys.readouterr().err
            assert "--time-unit us or ns" in error and error.count("\n") == 1
            assert status([*tokens, "--time-unit", "us"]) == DONE
            assert "imes read as microseconds" in "".join(capsys.readouterr())


def test_dates_with_a_decimal_comma_are_those_with_a_point(tmp_path):
    rows = [("2026-03-29 10:00:00,125", 5), ("2026-03-29 10:00:01,500", 6), ("2026-03-29 10:00:09", 7)]
    read_in = []
    for mark in ",.":
        path = tmp_path / "log.jsonl"
        path.write_text(
            "".join(
                json.dumps({"timestamp": time.replace(",", mark), "prompt_tokens": prompt, "completion_tokens": 1})
                + "\n"
                for time, prompt in rows
            )
        )
        read_in.append(read(path).arrival_ticks.tolist())
    assert read_in[0] == read_in[1] == [0, 1_375_000_000_000, 8_875_000_000_000]


@pytest.mark.parametrize("name", ["arrival", "created_at", "start", "Time", "request_time"])
@pytest.mark.parametrize("ending", [".csv", ".jsonl"])
def test_a_column_of_times_that_is_not_read_is_named_with_what_reads_it(name, ending, tmp_path):
    path = tmp_path / f"log{ending}"
    rows = [{name: f"2026-03-29T10:00:0{second}Z", "prompt_tokens": 5, "output_tokens": 6} for second in (0, 4)]
    text = [",".join(rows[0]), *(",".join(map(str, row.values())) for row in rows)]
    path.write_text("\n".join(text if ending == ".csv" else map(json.dumps, rows)) + "\n")
    with collected_notes() as said:
        assert read(path).arrival_ticks is None
    columns = re.search(r"--columns (\S+)\.", said[0])[1]
    named = read(path, Reading(columns=columns))
    assert named.arrival_ticks.tolist() == [0, 4_000_000_000_000]


@pytest.mark.parametrize("name", ["end_time", "finish_ts", "latency", "first_token_time", "user"])
def test_other_columns_are_not_taken_for_times(name, tmp_path):
    path = tmp_path / "log.csv"
    path.write_text(f"{name},prompt_tokens,output_tokens\n1,5,6\n")
    with collected_notes() as said:
        read(path)
    assert said == []
