"""What validates a prediction: null models fitted to the calibration, the machine's noise, and the errors that would be noticed."""

from __future__ import annotations

from itertools import combinations
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("scipy")

from fragmeter.gpu.calibrate.fitting import least_absolute
from fragmeter.gpu.validate import acceptance
from fragmeter.gpu.validate.acceptance import Run, Sizes
from fragmeter.sim.spec import model

READ = {"kv": 2.0, "weights": 2.0, "kv_share": 0.5}
LITTLE = READ | {"kv_share": 0.33}
#: Time of a step without rows, of each sequence and of each token of a context, in microseconds; attention is curved, as no null model is.
BASE_US, ROW_US, TOKEN_US = 4000, 8, 0.03


def decodes(rng, steps=60) -> Sizes:
    """Steps that decode 16 to 200 sequences over contexts of 200 to 2,000 tokens."""
    rows = rng.integers(16, 200, steps)
    return Sizes(rows, rows * rng.integers(200, 2000, steps), np.zeros(steps, np.int64))


def true_us(sizes: Sizes) -> tuple[np.ndarray, np.ndarray]:
    """Microseconds of steps, and of their attention."""
    attention = TOKEN_US * sizes.context_tokens * (1 + 0.5 * np.sin(sizes.sequences / 20))
    return BASE_US + ROW_US * sizes.sequences + attention, attention


def run(
    seed=1, off=1.0, off_attention=1.0, spread=0.01, read=READ, name="long contexts", nulls=None, predicted=None
) -> Run:
    """A run whose prediction is off by factors, measured three times with this spread."""
    rng = np.random.default_rng(seed)
    sizes, (us, attention) = decodes(rng), (None, None)
    us, attention = true_us(sizes)
    samples = us * (1 + spread * rng.standard_normal((3, len(us))))
    fitted = decodes(np.random.default_rng(99), 20)
    guessed = (
        (us + (off_attention - 1) * attention) * off
        if predicted is None
        else predicted(sizes, np.median(samples, axis=0))
    )
    found = acceptance.null_models(sizes, fitted, true_us(fitted)[0]) if nulls is None else nulls
    of_attention = off * off_attention * attention if predicted is None else np.zeros(len(us))
    return Run(name, guessed, of_attention, samples, 0.5, found, read)


class TestLeastAbsolute:
    @pytest.mark.parametrize("seed", range(5))
    def test_no_constant_is_better(self, seed):
        """All that could be best are among the measured times."""
        measured = np.random.default_rng(seed).lognormal(8, 0.6, 25)
        best = min(acceptance.mape(us, measured) for us in measured)
        (found,) = least_absolute(np.ones((25, 1)), measured)
        assert acceptance.mape(found, measured) == pytest.approx(best, rel=1e-9)

    @pytest.mark.parametrize("seed", range(5))
    def test_no_line_is_better(self, seed):
        """The best line passes through two of the points: all pairs are tried."""
        rng = np.random.default_rng(seed)
        rows, measured = rng.integers(1, 60, 20), rng.lognormal(8, 0.6, 20)
        lines = []
        for one, other in combinations(range(20), 2):
            if rows[one] != rows[other]:
                each = (measured[other] - measured[one]) / (rows[other] - rows[one])
                lines.append(acceptance.mape(measured[one] + each * (rows - rows[one]), measured))
        columns = np.column_stack([np.ones(20), rows])
        assert acceptance.mape(columns @ least_absolute(columns, measured), measured) == pytest.approx(
            min(lines), rel=1e-9
        )


class TestNullModels:
    def test_each_finds_what_it_knows(self):
        rng = np.random.default_rng(3)
        fitted, sizes = (Sizes(*rng.integers(1, 300, (3, count))) for count in (20, 7))
        worlds = {
            "constant": lambda of: np.full(len(of.sequences), 5000.0),
            "tokens": lambda of: 3000 + 7.5 * (of.sequences + of.prompt_tokens),
            "contexts": lambda of: 3000 + 9.0 * of.sequences + 0.5 * of.context_tokens + 25 * of.prompt_tokens,
        }
        assert worlds.keys() == acceptance.NULLS.keys()
        for name, us in worlds.items():
            assert acceptance.null_models(sizes, fitted, us(fitted))[name] == pytest.approx(us(sizes), rel=1e-7)

    def test_of_another_model_they_are_scaled_by_its_bytes(self):
        """Three times the weights and half the KV of a token."""
        rng = np.random.default_rng(4)
        fitted, sizes = (Sizes(*rng.integers(1, 300, (3, count))) for count in (20, 7))
        us = 3000 + 9.0 * fitted.sequences + 0.5 * fitted.context_tokens + 25 * fitted.prompt_tokens
        found = acceptance.null_models(sizes, fitted, us, weights=3, kv=0.5)["contexts"]
        wanted = 9000 + 27.0 * sizes.sequences + 0.25 * sizes.context_tokens + 75 * sizes.prompt_tokens
        assert found == pytest.approx(wanted, rel=1e-7)

    def test_they_are_fitted_to_whole_steps_of_a_calibration(self):
        """32 decodes; 8 decodes beside a prompt of 64 tokens; a step of a file that lacks its sizes."""
        points = [
            {"op": "gemm", "us": 3.0},
            {"op": "step", "rows": 32, "decodes": 32, "context_tokens": 9000, "us": 1.0, "whole_us": 700.0},
            {
                "op": "prefill_step",
                "rows": 9,
                "tokens": 72,
                "decodes": 8,
                "context_tokens": 500,
                "us": 2.0,
                "whole_us": 900.0,
            },
            {"op": "step", "rows": 64, "us": 1.0, "whole_us": 800.0},
        ]
        sizes, us = acceptance.calibrated_steps(points)
        assert [found.tolist() for found in sizes] == [[32, 8], [9000, 500], [0, 64]] and us.tolist() == [700, 900]

    def test_without_such_steps_there_are_none_and_nothing_is_validated(self):
        assert acceptance.null_models(decodes(np.random.default_rng(0)), *acceptance.calibrated_steps([])) == {}
        said = acceptance.acceptance([run(nulls={})])
        assert [reason.partition(",")[0] for reason in said["reasons"]] == [
            "the calibration lacks whole steps with their sizes"
        ]
        assert run(nulls={}).as_dict()["times_better"] is None


class TestNoise:
    def test_each_repetition_is_predicted_by_the_others(self):
        """Of 100, 100 and 125: the third is predicted as 100, a fifth too short; the first two by 112.5."""
        found = acceptance.noise(np.array([[100.0, 100], [100, 100], [125, 125]]))
        assert found == {"step_mape": round((2 * 0.125 + 0.2) / 3, 4), "throughput": round((2 * 0.125 + 0.2) / 3, 4)}

    def test_errors_of_steps_cancel_in_the_sum(self):
        assert acceptance.noise(np.array([[90.0, 110], [110, 90]]))["throughput"] == 0

    def test_one_repetition_has_none(self):
        assert acceptance.noise(np.array([[100.0, 90]])) is None


class TestAcceptance:
    def test_a_perfect_prediction_is_validated_and_says_what_it_would_have_noticed(self):
        said = acceptance.acceptance([run(), run(2, read=LITTLE, name="static")])
        assert said["validated"] and said["reasons"] == []
        assert 0.005 <= said["noticed"]["time"] <= 0.03 and 0.01 <= said["noticed"]["attention"] <= 0.1
        assert said["limits"]["planted"] == {"time": 0.03, "attention": 0.1}

    @pytest.mark.parametrize("name", [*acceptance.NULLS])
    def test_a_null_model_is_not_validated_though_it_is_fitted_to_the_very_run(self, name):
        """Nor does it notice errors of attention, of which it knows nothing."""

        def fitted(sizes, measured):
            return acceptance.null_models(sizes, sizes, measured)[name]

        said = acceptance.acceptance([run(predicted=fitted)])
        assert not said["validated"] and said["noticed"]["attention"] is None
        assert any("attention would not have been noticed" in reason for reason in said["reasons"])

    @pytest.mark.parametrize("name", [*acceptance.NULLS])
    def test_a_null_model_is_not_better_than_itself(self, name):
        one = run()
        said = acceptance.acceptance([Run(one.name, one.nulls[name], one.attention_us, *_rest(one))])
        assert any(reason.startswith("long contexts: a step is off by") for reason in said["reasons"])

    @pytest.mark.parametrize("off", [0.97, 1.03])
    def test_an_error_of_3_percent_in_all_steps_is_refused(self, off):
        said = acceptance.acceptance([run(off=off), run(2, off=off, read=LITTLE, name="static")])
        way = "shorter" if off > 1 else "longer"
        assert any(reason.startswith(f"with the time of all steps 3% {way}") for reason in said["reasons"])

    @pytest.mark.parametrize("off", [0.9, 1.1])
    def test_an_error_of_10_percent_in_attention_is_refused(self, off):
        said = acceptance.acceptance([run(off_attention=off), run(2, off_attention=off, read=LITTLE, name="static")])
        way = "shorter" if off > 1 else "longer"
        assert any(reason.startswith(f"with the time of attention 10% {way}") for reason in said["reasons"])

    def test_where_the_machine_is_noisy_small_errors_pass_unnoticed_and_so_nothing_is_validated(self):
        """Each step of each repetition is off by a third."""
        said = acceptance.acceptance([run(spread=0.4)])
        assert not said["validated"]
        assert all(
            least is None or least > limit for least, limit in zip(said["noticed"].values(), (0.03, 0.1), strict=True)
        )

    def test_runs_that_read_little_kv_cannot_validate(self):
        """Nor must they be better than a null model; but not worse by more than the noise."""
        said = acceptance.acceptance([run(read=LITTLE)])
        assert any(reason.startswith("no run reads a third") for reason in said["reasons"])
        little = run(2, read=LITTLE, name="static")
        near = {"contexts": little.measured_us}
        assert acceptance.acceptance(
            [run(), Run(little.name, little.predicted_us, little.attention_us, *_rest(little, near))]
        )["validated"]
        off = Run(little.name, 1.02 * little.predicted_us, little.attention_us, *_rest(little, near))
        said = acceptance.acceptance([run(), off])
        assert said["reasons"] == [
            f"static: a step is off by {off.error:.1%}, and by 0.0% with a plane in sequences, context and prompt tokens"
        ]

    def test_an_error_beyond_the_limit_and_the_noise_is_a_reason(self):
        found = run(off=1.12, spread=0)
        said = acceptance.acceptance([found])
        assert {
            "long contexts: a step is off by 12.0%, allowed are 10.0%",
            "long contexts: the throughput is off by 10.7%, allowed are 5.0%",
        } < set(said["reasons"])


def _rest(one: Run, nulls=None) -> tuple:
    return one.samples_us, one.quantile, one.nulls if nulls is None else nulls, one.read


def test_bytes_are_those_of_all_matrices_and_all_contexts(monkeypatch):
    """toy-llama in fp32: 4 layers of 786,432 + 2 x 786,432 + 262,144 + ... elements, and a head of 8,192 x 512."""
    contexts = {0: [100, 50], 3: [7]}
    monkeypatch.setattr(
        acceptance, "batch_of", lambda plan, step: SimpleNamespace(context_lens=np.array(contexts[step]))
    )
    spec = model("toy-llama")
    found = acceptance.read_bytes(None, spec, 4, [0, 3])
    layer = 512 * (512 + 2 * 128) + 512 * 512 + 3 * 512 * 1536
    assert found["weights"] == 2 * 4 * (4 * layer + 8192 * 512)
    assert found["kv"] == 157 * spec.slot_bytes("fp32")
    assert found["kv_share"] == round(found["kv"] / (found["kv"] + found["weights"]), 4)
