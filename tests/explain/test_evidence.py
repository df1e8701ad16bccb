"""Evidence for causes on a machine laid out as files, and the text that shows it."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from doctor_machine import Machine

from gpuwarden.doctor.model import Context
from gpuwarden.doctor.runner.checks import CHECKS, run_checks
from gpuwarden.errors.device_problems import DRIVER_NOT_LOADED, NO_DEVICE_VISIBLE
from gpuwarden.errors.explanation import explain_events
from gpuwarden.errors.memory_problems import DEVICE_OUT_OF_MEMORY, KILLED_BY_KERNEL
from gpuwarden.errors.problems import FRAMEWORK_REGEXES
from gpuwarden.errors.recognition import PROBLEMS
from gpuwarden.explain.events import read_events
from gpuwarden.explain.evidence import weigh_causes
from gpuwarden.explain.explanation_text import explanation_document, render_explanation

LOG = (
    "[rank0]: Traceback (most recent call last):\n"
    '[rank0]:   File "/home/user/a_rather_long_folder_name/of_a_project/train.py", line 88, in training_step\n'
    "[rank0]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 132.00 MiB. GPU 1 has a total capacity of "
    "79.10 GiB of which 98.00 MiB is free.\n"
    "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: train.py FAILED\n"
)


@pytest.fixture
def context(tmp_path: Path) -> Context:
    """Return a machine on which nothing is wrong, but for CUDA_VISIBLE_DEVICES."""
    machine = Machine(tmp_path)
    machine.make_healthy(gpus=2)
    machine.environ["CUDA_VISIBLE_DEVICES"] = ""
    return machine.context


def test_causes_name_checks_of_the_doctor() -> None:
    """Each check of the table exists, so that a renamed one is noticed."""
    known = {name for row in CHECKS for name in row.names}
    for problem in PROBLEMS.values():
        for check in (name for cause in problem.causes for name in cause.checks):
            subject, _, what = check.partition(".")
            names = {f"{framework}.{what}" for framework in FRAMEWORK_REGEXES} if subject == "framework" else {check}
            assert names <= known, (problem.name, check)


def test_evidence_ranks_the_causes(context: Context) -> None:
    """A cause that a check found goes before one without evidence, and one whose checks found nothing is the last."""
    causes = weigh_causes(NO_DEVICE_VISIBLE, "failed call to cuInit", context)
    assert causes[0].text.startswith("CUDA_VISIBLE_DEVICES")
    assert (causes[0].confirmed, causes[0].contradicted) == (True, False)
    assert [each.contradicted for each in causes] == sorted(each.contradicted for each in causes)
    loaded = {each.text: each for each in weigh_causes(DRIVER_NOT_LOADED, "", context)}
    assert loaded["The machine has no NVIDIA driver, or no GPU."].contradicted


def test_free_memory_is_no_evidence_against_a_past_error(context: Context) -> None:
    """A log of a process killed for memory is not contradicted by memory that is free now."""
    assert {each.status for each in run_checks(context, {"memory.gpu"})} == {"pass"}
    for problem in (KILLED_BY_KERNEL, DEVICE_OUT_OF_MEMORY):
        assert not [cause for cause in weigh_causes(problem, "", context) if cause.contradicted]


def test_no_context_has_no_evidence() -> None:
    """The causes of a log of another machine keep the order of the table."""
    causes = weigh_causes(NO_DEVICE_VISIBLE, "", None)
    assert [each.text for each in causes] == [each.text for each in NO_DEVICE_VISIBLE.causes]
    assert not any(each.confirmed or each.contradicted for each in causes)


@pytest.mark.parametrize("width", [80, 60, 200])
def test_text_fits_the_terminal(context: Context, width: int) -> None:
    """Everything is within the width, with the problem, its place, the causes, the step, and the consequence."""
    explanation = explain_events(read_events(io.BytesIO(LOG.encode())))
    assert explanation is not None
    lines = list(render_explanation(explanation, weigh_causes(explanation.root.problem, LOG, context), width))
    assert max(map(len, lines)) <= width
    text = "\n".join(lines)
    for part in ("GPU memory exhausted (device_out_of_memory)", "rank0", "Likely causes", "Do first", "Followed"):
        assert part in text


def test_document_has_the_evidence(context: Context) -> None:
    """The JSON has the checks' results with their causes."""
    explanation = explain_events(read_events(io.BytesIO(b"failed call to cuInit: CUDA_ERROR_NO_DEVICE\n")))
    assert explanation is not None
    document = explanation_document(explanation, weigh_causes(explanation.root.problem, "", context))
    assert document["problem"] == "no_device_visible"
    assert document["causes"][0]["checks"][0]["name"] == "device.visible"
    assert document["root"]["line"] == 1
