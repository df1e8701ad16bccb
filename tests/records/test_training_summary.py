"""Summary of a run for its user's terminal."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from run_record_cases import example_record

from gpuwarden.records.record import RecordedDevice, RunRecord
from gpuwarden.records.record_parts import RecordedDiagnosis, RecordedNonFiniteLoss
from gpuwarden.records.training_summary import summarize_training
from snapshots import GIB

GPUS = {"GPU-0": "3"}


def make_record(**changes: Any) -> RunRecord:
    """Return the record of a training without errors on one GPU."""
    device = RecordedDevice(uuid="GPU-0", name="H100", memory_peak_bytes=5 * GIB, lowest_headroom_bytes=float(GIB))
    bare = replace(
        example_record(), devices=(device,), reported_errors=(), batch_size_advice=None, input_wait_ratio=None
    )
    return replace(bare, **{"throttled_seconds": None, "nonfinite_loss": None, "no_gpu": None, **changes})


def test_figures_that_are_known() -> None:
    """Figures that are known are one line; unknown ones are absent."""
    assert list(summarize_training(make_record(), GPUS)) == ["resnet: GPU 3 peak 5.00 GiB, headroom at least 1.00 GiB"]
    (line,) = summarize_training(
        make_record(
            input_wait_ratio=0.12,
            throttled_seconds={"sw_power_cap": 3.0, "hw_thermal_slowdown": 90.0},
            batch_size_advice=example_record().batch_size_advice,
        ),
        GPUS,
    )
    assert line.endswith("; waited for input 12 % of step time; throttled 1m30s (hardware thermal slowdown)"), line
    assert "; batch size " in line


def test_throttling_is_denied_only_where_it_is_counted() -> None:
    """A run without a GPU, or on one that does not count it, claims nothing; with nothing known there is no line."""
    (line,) = summarize_training(make_record(throttled_seconds={"sw_power_cap": 0.0}), GPUS)
    assert line.endswith("; not throttled")
    assert list(summarize_training(make_record(devices=(), throttled_seconds={}), GPUS)) == []


def test_no_gpu_and_nonfinite_loss() -> None:
    """The line has problems that raised no error."""
    (line,) = summarize_training(
        make_record(devices=(), no_gpu="cpu_build", nonfinite_loss=example_record().nonfinite_loss), GPUS
    )
    assert "no GPU used: the installed framework is built for the CPU" in line
    assert "; loss NaN or infinite in 2 to 40 steps" in line, line
    loss = RecordedNonFiniteLoss(0, 0, 0, 640, 1_700_000_000.0, validations=2)
    (line,) = summarize_training(make_record(nonfinite_loss=loss), GPUS)
    assert line.endswith("; loss NaN or infinite in 2 validations, first after step 640"), line


def test_diagnosis_of_the_last_step() -> None:
    """An out-of-memory after the last step is the whole summary; one that training survived is not in it."""
    error = replace(
        example_record().reported_errors[0], steps=7, diagnosis=RecordedDiagnosis("leak", "It grew.", "Find it.")
    )
    failed = make_record(reported_errors=(error,), steps=7)
    assert list(summarize_training(failed, GPUS)) == [
        "Out of GPU memory: its use kept growing until none was left",
        "It grew.",
        "next step: Find it.",
    ]
    (line,) = summarize_training(replace(failed, steps=9), GPUS)
    assert line.startswith("resnet: GPU 3 peak")
