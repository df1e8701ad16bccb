"""Headline of a run: one cause and one next step, on the card, in `explain` and in the record that the pages read."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from run_record_cases import example_record

from gpuwarden.analysis.findings import NO_GPU_GUIDES
from gpuwarden.analysis.oom.diagnosis_rules import RULES
from gpuwarden.errors.explanation import explain_events
from gpuwarden.launcher.card import ProgramFacts, make_card
from gpuwarden.launcher.card_formats import render_text
from gpuwarden.launcher.host_kills import HostKills
from gpuwarden.launcher.program import ProgramEnd
from gpuwarden.records.record import RunRecord, set_headline
from gpuwarden.records.record_parts import RecordedCensus, RecordedDiagnosis, RecordedError, RecordedTensors
from gpuwarden.records.run_headline import CAUSE_TEXTS, list_run_events

KEPT = RecordedTensors(101, 101 << 22, "1024,1024", "float32", "list `keep`", "train.py:9")
CENSUS = RecordedCensus(1.8e9, 100, 0.1, 103, 103 << 22, in_use_bytes=103 << 22, groups=(KEPT,))
SENTENCE = "Of its memory, 98.1 % are 101 tensors float32[1024,1024] kept by list `keep` in train.py:9."
KILLED = "killed by the kernel's OOM killer: its cgroup was out of memory (kernel log)"


def make_record(**changes: Any) -> RunRecord:
    """Make the record of a run that went well, but for the changes."""
    well = {"nonfinite_loss": None, "no_gpu": None, "reported_errors": (), "census": None, "xids": None}
    return set_headline(
        replace(example_record(), **{**well, "outcome": "finished", "evidence": "exit status 0", **changes})
    )


def make_error(cause: str, kind: str = "device_oom", exception: str = "OutOfMemoryError") -> RecordedError:
    """Make an out-of-memory error with a diagnosis."""
    diagnosis = RecordedDiagnosis(cause, "It grew.", "Find it.", "gpuwarden run --census -- python train.py")
    return RecordedError(1.8e9, kind, exception, "DefaultCPUAllocator: can't allocate memory", diagnosis=diagnosis)


def died(cause: str = "leak", **changes: Any) -> RunRecord:
    """Make the record of a run that ended by an out-of-memory of its host."""
    settings = {"reported_errors": (make_error(cause, "host_oom", "RuntimeError"),), "outcome": "out_of_memory"}
    return make_record(**{**settings, "evidence": "exit status 1; last message: uncaught RuntimeError", **changes})


def text_of(record: RunRecord) -> str | None:
    """Return the headline's text."""
    return record.headline.text if record.headline else None


def test_named_holder_is_the_diagnosis() -> None:
    """The holder that a census names is the cause, without advice to take one; a build without CUDA is no cause."""
    headline = died("unknown", census=CENSUS, no_gpu="cpu_build").headline
    assert headline is not None
    assert headline.text == "Out of host memory: tensors that the program keeps fill it"
    assert headline.reasons == (SENTENCE, "It grew.")
    assert "census" not in f"{headline.next_step}{headline.code}"
    assert died(census=CENSUS).headline == replace(
        headline, name="leak", text="Out of host memory: its use kept growing until none was left"
    )


def test_census_without_a_main_holder() -> None:
    """A census that names nothing large leaves the diagnosis, without the command that takes one."""
    small = replace(CENSUS, groups=(replace(KEPT, size_bytes=1 << 20), replace(KEPT, holder=None)))
    headline = died(census=small).headline
    assert headline is not None
    assert (headline.holder, headline.next_step, headline.code) == (None, "Find it.", None)
    assert died("batch_too_large", census=CENSUS).headline == replace(
        headline,
        name="batch_too_large",
        text="Out of host memory: the batch does not fit",
        code="gpuwarden run --census -- python train.py",
    )


def test_kill_for_memory_has_the_holder() -> None:
    """A run that the kernel killed has no error of its own, but perhaps a census."""
    headline = make_record(outcome="out_of_memory", evidence=KILLED, census=CENSUS).headline
    assert headline is not None
    assert headline.text == "Process killed by the kernel for host memory"
    assert headline.reasons == (SENTENCE, "By its record, its processes used up to 3.00 GiB of host memory.")


def test_findings_of_a_run_that_finished() -> None:
    """A loss that is not finite and a GPU that was not used are headlines, the loss first; what was survived is not."""
    loss = example_record().nonfinite_loss
    assert text_of(make_record()) is None
    assert text_of(make_record(reported_errors=(make_error("leak"),), xids={"31": 1})) is None
    no_gpu = f"No GPU used: {NO_GPU_GUIDES['cpu_build'].meaning}"
    assert text_of(make_record(no_gpu="cpu_build")) == no_gpu
    assert text_of(make_record(no_gpu="cpu_build", reported_errors=(make_error("leak"),))) == no_gpu
    assert str(text_of(make_record(no_gpu="cpu_build", nonfinite_loss=loss))).startswith("Loss NaN or infinite in 2 to")


@pytest.mark.parametrize(
    ("exception", "text"),
    [
        ("OutOfMemoryError", "Out of GPU memory: its use kept growing until none was left"),
        ("ValueError", "Error of no known class, raised by the program: ValueError"),
    ],
)
def test_error_that_was_survived_is_no_cause(exception: str, text: str) -> None:
    """A run that halved its batch after an out-of-memory and fails later has not failed by it."""
    failed = make_record(
        outcome="failed",
        evidence=f"exit status 1; last message: uncaught {exception}",
        reported_errors=(make_error("leak"),),
    )
    assert text_of(failed) == text
    assert text_of(make_record(outcome="failed", evidence="exit status 3")) == "Failed without a known cause"


@pytest.mark.parametrize(
    "record",
    [
        died("unknown", census=CENSUS, no_gpu="cpu_build"),
        died("co_tenant", no_gpu="hidden"),
        make_record(outcome="out_of_memory", evidence=KILLED, census=CENSUS, no_gpu="cpu_build"),
        make_record(no_gpu="unused"),
        make_record(outcome="killed", evidence="ended by SIGTERM"),
    ],
)
def test_card_and_explain_have_the_headline(record: RunRecord) -> None:
    """Cause and next step are those of the record."""
    assert record.headline is not None
    explanation = explain_events(list(list_run_events(record)))
    assert explanation is not None
    problem = explanation.root.problem
    assert (problem.title, problem.first_step) == (record.headline.text, record.headline.next_step)
    end = ProgramEnd(record.pid, 256, 1.8e9, 60.0)
    card = make_card(["python", "train.py"], ProgramFacts(end, HostKills(None, 0), ()), [record], {})
    shown = " ".join(render_text(card, 80).split())
    assert f"cause {record.headline.text}" in shown
    assert f"next step {record.headline.next_step}" in shown
    assert all(f"evidence {each}" in shown for each in record.headline.reasons[:1])


def test_each_cause_has_a_text() -> None:
    """A diagnosis is shown by the text of its cause."""
    assert CAUSE_TEXTS.keys() == {rule.cause for rule in RULES} | {"unknown"}
