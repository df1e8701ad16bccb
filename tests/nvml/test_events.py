"""Driver events through the real binding on the mock: received once, despite losses, reloads and hangs."""

from __future__ import annotations

import ctypes
import json
from pathlib import Path
from typing import Any

import pynvml
import pytest
from commands import run_command

from mock_nvml import MockNvml

SCRIPT = Path(__file__).parents[1] / "support/event_cases.py"

OPERATIONAL = pytest.mark.parametrize("case_result", [{"driver": "615.32"}], indirect=True, ids=["R615"])


@pytest.fixture
def case_result(request: pytest.FixtureRequest, mock_nvml: MockNvml) -> Any:
    """Run the case that the test is named after, on two GPUs; return its result."""
    name = request.function.__name__.removeprefix("test_")
    done = run_command(name, script=SCRIPT, env=mock_nvml.env(gpus=2, **getattr(request, "param", {})))
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    return json.loads(done.stdout)


def test_receives_events(case_result: Any) -> None:
    """Each event comes once, in order, with its GPU: two in a row are two, and any code is accepted."""
    assert case_result == [[0, 13], [1, 79], [1, 79], [0, 4_000]]


def test_receives_xid_of_lost_gpu(case_result: Any) -> None:
    """The XID of a lost GPU is assigned to it."""
    received, up = case_result
    assert received == [[1, 79]]
    assert up == 1


def test_continues_with_a_gpu_without_events(case_result: Any) -> None:
    """A GPU without events is queried once and does not affect the other."""
    assert case_result == [[[0, 31]], 2]


def test_ends_where_no_gpu_has_events(case_result: Any) -> None:
    """Without any GPU that has events there is no thread, no event set, and no further attempt."""
    assert case_result == [0, False, 1]


def test_ends_where_the_library_has_no_events(case_result: Any) -> None:
    """A library without events has no thread, no event set, and no further attempt either."""
    assert case_result == [0, False, {"EventSetCreate": 1}]


def test_retries_a_gpu_that_failed_once(case_result: Any) -> None:
    """A GPU whose registration failed for a moment joins the others in their set."""
    assert case_result == [[[0, 31]], 1]


def test_registers_a_gpu_that_came_back(case_result: Any) -> None:
    """When a GPU is back, all are registered in a new set, the old one is freed, and no event comes twice."""
    received, freed, threads = case_result
    assert sorted(received) == [[0, 31], [1, 31]]
    assert (freed, threads) == (1, 1)


def test_registers_after_driver_reload(case_result: Any) -> None:
    """After a reload of the driver events are received again."""
    assert sorted(case_result) == [[0, 31], [1, 48]]


def test_survives_waits_that_fail(case_result: Any) -> None:
    """A set whose waits fail is created again; until then waits are a second apart."""
    received, waits = case_result
    assert received == [[0, 31]]
    assert waits < 50


def test_keeps_the_set_after_one_failed_wait(case_result: Any) -> None:
    """An event that waits behind a failure is still received."""
    assert case_result == [[[0, 79]], 1]


def test_hang_affects_events_only(case_result: Any) -> None:
    """A wait that hangs affects the events only: it is reported, not repeated, and continues when the driver does."""
    up, threads, released, still, again, received, after = case_result
    assert up == 2
    assert (threads, released, still, again) == (1, False, 1, 1)
    assert received == [[0, 31]]
    assert after == 1


def test_releases_the_driver(case_result: Any) -> None:
    """After a release the thread and its set are gone, the driver can be closed, and listening can start again."""
    released, threads, listening, freed, received = case_result
    assert (released, threads, listening, freed) == (True, 0, False, 1)
    assert received == [[0, 31], [1, 48]]


def test_receives_pending_events_before_registering_again(case_result: Any) -> None:
    """Events that the old set still holds are not lost with it."""
    assert case_result == [[0, 31], [0, 32], [0, 43], [0, 79]]


def test_drains_no_more_than_fit(case_result: Any) -> None:
    """While events are not drained the driver keeps the rest, and none is lost."""
    assert case_result == [3, 0]


@OPERATIONAL
def test_receives_events_of_a_newer_driver(case_result: Any) -> None:
    """A driver with operational events reports XIDs that have none too: each comes once, in order."""
    assert case_result == [[[0, 13], [1, 79], [1, 79], [0, 4_000]], 0]


@OPERATIONAL
def test_receives_operational_events(case_result: Any) -> None:
    """Events have severity, category, role, module, and the driver's time where that is plausible.

    An XID counts once for a group of events, and not if the fault is older than the driver.
    """
    events, timed, xids = case_result
    module = "GPU-OPERATIONAL-"
    assert events == [
        ["fatal", "interconnect_error", "primary", module, 3, [79]],
        ["fatal", "timeout", "propagated", module, 3, [79]],
        ["corrected", "category_99", "propagated", module, 3, [45]],
        ["recoverable", "interconnect_error", "other", module, 3, []],
        ["fatal", "interconnect_error", "other", module, 3, [63]],
    ]
    assert timed == [True, True, True, False, False]
    assert xids == [[1, 79], [1, 45], [0, 31]]


@OPERATIONAL
def test_continues_with_a_gpu_without_operational_events(case_result: Any) -> None:
    """A GPU that refuses operational events still reports its XIDs."""
    assert case_result == [[0, 48], [1, 31]]


def test_receives_bindings(case_result: Any) -> None:
    """An unbinding and a binding come once each, in order, with the GPU's PCI address, next to XIDs."""
    bindings, xids = case_result
    assert bindings == [["0000:11:00.0", False], ["0000:11:00.0", True], ["0000:10:00.0", False]]
    assert xids == [[0, 31], [0, 48]]


def test_receives_bindings_where_no_gpu_has_events(case_result: Any) -> None:
    """System events need no GPU that has XID events; XIDs are not listened to then."""
    bindings, listening = case_result
    assert bindings == [["0000:10:00.0", True]]
    assert not listening


def test_finds_a_gpu_bound_without_an_event(case_result: Any) -> None:
    """A GPU bound while no event set existed is found by the kernel's list: the driver is opened once more."""
    unnoticed, reopened, xids = case_result
    assert unnoticed == [1, 0]
    assert reopened == 1
    assert xids == [[1, 31]]


def test_waits_for_no_bindings_where_the_driver_has_none(case_result: Any) -> None:
    """A driver without system events is asked once, and costs the XIDs nothing."""
    assert case_result == [1, True, [[0, 31], [1, 48]]]


def test_bindings_that_fail_cost_no_xid(case_result: Any) -> None:
    """A set of system events whose waits fail is freed and created again; XIDs are received all the time, from one set.

    So it is if only the calls for system events say that the driver is not initialized.
    """
    bindings, leaked, sets, xids = case_result
    assert bindings == [["0000:10:00.0", True]]
    assert leaked == 0
    assert sets == 1
    assert xids == [[0, 31], [1, 48]] * 2


def test_hanging_bindings_cost_no_xid(case_result: Any) -> None:
    """While a wait for system events hangs, XIDs are received; only its own release has to wait for its return."""
    listening, xids, released = case_result
    assert listening
    assert xids == [[0, 31], [1, 48]]
    assert released == [True, False, True]


def test_layouts_are_those_of_the_binding() -> None:
    """The mock, which checks these sizes when it is compiled, has the layouts of nvidia-ml-py."""
    sizes = {
        pynvml.c_nvmlGpuOperationalEventConfig_v1_t: 104,
        pynvml.c_nvmlEventSetWait_v3_t: 224,
        pynvml.c_nvmlEventSetGetContextInfo_v1_t: 20,
        pynvml.c_nvmlEventSetGetContextData_v1_t: 16,
        pynvml.c_nvmlSystemEventSetCreateRequest_v1_t: 16,
        pynvml.c_nvmlSystemEventSetFreeRequest_v1_t: 16,
        pynvml.c_nvmlSystemRegisterEventRequest_v1_t: 24,
        pynvml.c_nvmlSystemEventData_v1_t: 16,
        pynvml.c_nvmlSystemEventSetWaitRequest_v1_t: 32,
    }
    assert {layout: ctypes.sizeof(layout) for layout in sizes} == sizes
