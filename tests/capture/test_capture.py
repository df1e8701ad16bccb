"""Captures: a replay equals the recording, and an unusable file is refused with the reason."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pynvml
import pytest
from golden_boxes import FOLDER, GOLDENS
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_box import Box, Clock, summarize

from gpuwarden.capture.capture_file import (
    MAX_BYTES,
    MAX_FRAMES,
    MIG_HANDLE,
    Answers,
    Capture,
    CaptureError,
    Frame,
    Struct,
    load_capture,
    save_capture,
)
from gpuwarden.capture.masking import mask_capture
from gpuwarden.capture.recording import SAMPLE_SECONDS, record
from gpuwarden.capture.replay import CapturedNvml
from gpuwarden.gpu.metrics import GpuReadings, MigReadings
from gpuwarden.gpu.poller import Poller
from gpuwarden.gpu.reader import DEFAULT_PLAN, GpuGoneError, GpuReader
from gpuwarden.gpu.snapshot import Snapshot
from gpuwarden.host.host_reader import HostMemory
from gpuwarden.nvml.interface import Nvml
from gpuwarden.nvml.return_codes import NVMLError, code_of
from mock_nvml import MockNvml

PID_MAX_LIMIT = 1 << 22
INTERVAL = 2.0
HOST = HostMemory(size=1 << 40, available=1 << 39)
DOCUMENT = Path(__file__).parents[2] / "docs" / "engineering" / "capture.md"
# Run by a process on the mock library: record the driver, and poll it as the daemon does.
RECORDER = """
import asyncio, json, sys
from pathlib import Path
from gpuwarden.gpu.poller import Poller
from gpuwarden.gpu.reader import DEFAULT_PLAN
from gpuwarden.capture.capture_file import save_capture
from gpuwarden.nvml.driver import binding
from gpuwarden.capture.recording import record
from gpuwarden.capture.masking import mask_capture
from simulated_box import Clock, summarize

capture = record(binding(), 2, 0.01)
save_capture(capture, Path(sys.argv[1]))
save_capture(mask_capture(capture), Path(sys.argv[2]))

async def polls():
    clock = Clock()
    poller = Poller(binding(), 30, clock=clock)
    await poller.poll()
    clock.sleep(DEFAULT_PLAN.slow_interval)
    return await poller.poll()

print(json.dumps(summarize(asyncio.run(polls()))))
"""


def recorded(box: Box, frames: int = 3) -> Capture:
    """Record a simulated machine, advancing its clock."""
    return record(box.nvml, frames, INTERVAL, host_memory=lambda: HOST, sleep=box.clock.sleep, clock=box.clock)


def poll_once(nvml: Nvml) -> Snapshot:
    """Poll once, as the daemon does."""
    return asyncio.run(Poller(nvml, 30).poll())


def replayed(capture: Capture) -> tuple[Nvml, Clock]:
    """Replay a capture on a separate clock."""
    clock = Clock()
    nvml = CapturedNvml(capture, clock).nvml
    nvml.nvmlInit()
    return nvml, clock


def polled_twice(capture: Capture) -> Snapshot:
    """Replay its first frame until rates between two slow readings are there."""
    clock = Clock()
    nvml = CapturedNvml(replace(capture, frames=capture.frames[:1]), clock).nvml

    async def polls() -> Snapshot:
        poller = Poller(nvml, 30, clock=clock)
        await poller.poll()
        clock.sleep(DEFAULT_PLAN.slow_interval)
        return await poller.poll()

    return asyncio.run(polls())


def recording(mock_nvml: MockNvml, folder: Path) -> str:
    """Record two GPUs of the mock library into capture.json and masked.json; return the result of a poll after it."""
    env = {**os.environ, **mock_nvml.env(gpus=2, frozen=1), "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", RECORDER, str(folder / "capture.json"), str(folder / "masked.json")]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout


class TestReplay:
    """A replay returns what was recorded."""

    @pytest.mark.parametrize("name", ["box.json", "box.json.gz"])
    def test_every_frame_reads_as_recorded(self, name: str, tmp_path: Path) -> None:
        """All readings and processes of each frame are replayed, from either kind of file."""
        save_capture(recorded(Box(), 3), tmp_path / name)
        original, (nvml, clock) = Box(), replayed(load_capture(tmp_path / name))
        for index in range(8):
            original.read(index)  # as for the first samples: a sum in other steps differs in its last digit
        for frame in range(3):
            clock.now = frame * INTERVAL
            original.clock.now = SAMPLE_SECONDS + frame * INTERVAL
            for index in range(8):
                assert GpuReader(nvml, nvml.nvmlDeviceGetHandleByIndex(index)).read() == original.read(index)

    def test_polls_do_not_differ(self) -> None:
        """A poll of the replay and a poll of the machine have the same GPUs, versions and readings."""
        box = Box()
        box.clock.sleep(SAMPLE_SECONDS)
        real, again = poll_once(box.nvml), poll_once(replayed(recorded(Box()))[0])
        assert [gpu.identity for gpu in again.gpus] == [gpu.identity for gpu in real.gpus]
        assert [gpu.readings for gpu in again.gpus] == [gpu.readings for gpu in real.gpus]
        assert again.driver == real.driver

    def test_recording_a_replay_gives_the_same_capture(self) -> None:
        """Recording a replay loses and changes nothing."""
        capture = recorded(Box())
        nvml, clock = replayed(capture)
        again = record(nvml, 3, INTERVAL, host_memory=lambda: HOST, sleep=clock.sleep, clock=clock)
        assert again == capture

    def test_frames_follow_the_clock_and_repeat(self) -> None:
        """Each frame lasts its interval, and the first one follows the last."""
        frames = tuple(Frame({"nvmlDeviceGetCount": count}, ({},) * count) for count in (1, 2, 3))
        nvml, clock = replayed(Capture(INTERVAL, frames))
        counts = []
        for clock.now in (0, 1.9, 2, 3.9, 4, 5.9, 6, 8, 601):
            counts.append(nvml.nvmlDeviceGetCount())
        assert counts == [1, 1, 2, 2, 3, 3, 1, 2, 1]

    def test_faults_are_replayed(self) -> None:
        """Lost GPUs and failing calls are replayed as the same faults, in their frames only."""
        box = Box()
        healthy = recorded(box, 1)
        box.simulation.gpu(2).lose()
        box.simulation.gpu(4).fail("nvmlDeviceGetPowerUsage", pynvml.NVML_ERROR_UNKNOWN)
        box.simulation.gpu(5).fail("nvmlDeviceGetTemperature", pynvml.NVML_ERROR_GPU_IS_LOST)
        box.simulation.gpu(6).fail("nvmlDeviceGetMarginTemperature", pynvml.NVML_ERROR_NOT_SUPPORTED)
        nvml, clock = replayed(replace(healthy, frames=healthy.frames + recorded(box, 1).frames))

        async def polls() -> tuple[Snapshot, Snapshot, Snapshot]:
            poller = Poller(nvml, 30)
            before = await poller.poll()
            clock.now = INTERVAL
            broken = await poller.poll(), await poller.poll()  # the second one looks the lost GPU up again
            return before, *broken

        before, *broken = asyncio.run(polls())
        assert all(gpu.up for gpu in before.gpus)
        for snapshot in broken:
            faults = {gpu.identity.index: gpu.fault for gpu in snapshot.gpus if gpu.fault}
            assert faults == {2: "gpu_is_lost", 5: "gpu_is_lost"}
            assert snapshot.gpus[4].value(GpuReadings.power_usage_watts) is None
            assert snapshot.gpus[6].value(GpuReadings.temperature_margin_celsius) is not None
        assert broken[0].gpus[4].errors == {"unknown": 1}

    def test_gpu_without_uuid_hides_no_other(self) -> None:
        """A GPU that failed during the recording is down in the replay, and the others are there."""
        box = Box(2)
        box.simulation.gpu(1).fail("nvmlDeviceGetUUID", pynvml.NVML_ERROR_UNKNOWN)
        snapshot = poll_once(replayed(recorded(box, 1))[0])
        assert [gpu.up for gpu in snapshot.gpus] == [True, False]

    def test_driver_that_does_not_count_is_replayed(self) -> None:
        """A frame in which the driver failed fails again."""
        box = Box()
        box.simulation.driver.fail("nvmlDeviceGetCount", pynvml.NVML_ERROR_UNKNOWN)
        assert poll_once(replayed(recorded(box, 1))[0]).fault == "unknown"

    def test_gpu_that_is_no_longer_counted_is_lost(self) -> None:
        """In a frame with fewer GPUs, those that are gone have no readings."""
        fewer = recorded(Box(1), 1).frames
        nvml, clock = replayed(Capture(INTERVAL, recorded(Box(2), 1).frames + fewer))
        handle = nvml.nvmlDeviceGetHandleByIndex(1)
        uuid = nvml.nvmlDeviceGetUUID(handle)
        clock.now = INTERVAL
        with pytest.raises(GpuGoneError):
            GpuReader(nvml, handle).read()
        with pytest.raises(NVMLError) as caught:
            nvml.nvmlDeviceGetHandleByUUID(uuid)
        assert code_of(caught.value) == pynvml.NVML_ERROR_NOT_FOUND

    def test_unrecorded_call_is_not_supported(self) -> None:
        """A capture of an older gpuwarden lacks newer calls, like an older driver."""
        nvml, _clock = replayed(recorded(Box(1), 1))
        with pytest.raises(NVMLError) as caught:
            nvml.nvmlDeviceGetTemperatureThreshold(nvml.nvmlDeviceGetHandleByIndex(0), 99)
        assert code_of(caught.value) == pynvml.NVML_ERROR_NOT_SUPPORTED

    def test_pids_have_no_owner(self) -> None:
        """A recorded pid is not taken for the process with that pid on the replaying machine."""
        answers: Answers = {
            "nvmlDeviceGetComputeRunningProcesses": [
                {"pid": os.getpid(), "usedGpuMemory": 1},
                {"pid": 7, "usedGpuMemory": None},
            ]
        }
        nvml, _clock = replayed(Capture(1.0, (Frame({"nvmlDeviceGetCount": 1}, (answers,)),)))
        found = nvml.nvmlDeviceGetComputeRunningProcesses(nvml.nvmlDeviceGetHandleByIndex(0))
        assert [process.pid for process in found] == [os.getpid() + PID_MAX_LIMIT, 7 + PID_MAX_LIMIT]
        assert [process.usedGpuMemory for process in found] == [1, None]

    def test_real_binding(self, mock_nvml: MockNvml, tmp_path: Path) -> None:
        """Structs, byte strings and errors of nvidia-ml-py are recorded and replayed."""
        mock_nvml.processes(0, {4242: 3 << 30})
        done = recording(mock_nvml, tmp_path)
        again = polled_twice(load_capture(tmp_path / "capture.json"))
        assert summarize(again) == json.loads(done)
        assert len(again.gpus) == 2
        assert [process.pid for process in again.gpus[0].processes] == [4242 + PID_MAX_LIMIT]

    def test_divided_gpu(self, mock_nvml: MockNvml, tmp_path: Path) -> None:
        """MIG instances are replayed completely, also from a masked file, with stable names."""
        mock_nvml.mig(0, "3g.40gb", "1c.3g.40gb", "1g.10gb")
        mock_nvml.processes(0, {pid: pid << 30 for pid in range(1, 5)})
        done = recording(mock_nvml, tmp_path)
        plain, shared = load_capture(tmp_path / "capture.json"), load_capture(tmp_path / "masked.json")
        before, again = polled_twice(plain), polled_twice(shared)
        assert summarize(before) == json.loads(done)
        (gpu, _), (masked_gpu, _) = before.gpus, again.gpus
        assert len(gpu.mig) == 3
        assert gpu.mig[0].value(MigReadings.sm_active_ratio) == 0.5
        for one, other in zip(gpu.mig, masked_gpu.mig, strict=True):
            assert one.identity.uuid not in (tmp_path / "masked.json").read_text()
            assert replace(other.identity, uuid=one.identity.uuid) == one.identity
            hidden = {MigReadings.info}
            assert {row: value for row, value in one.readings.items() if row not in hidden} == {
                row: value for row, value in other.readings.items() if row not in hidden
            }
        names = dict(zip((i.identity.uuid for i in gpu.mig), (i.identity.uuid for i in masked_gpu.mig), strict=True))
        assert len(set(names.values())) == 3
        assert [names[str(process.instance)] for process in gpu.processes] == [p.instance for p in masked_gpu.processes]

    def test_activity(self, mock_nvml: MockNvml, tmp_path: Path) -> None:
        """GPM is replayed in every frame, the first included, and in frames closer together than its samples."""
        mock_nvml.set(1, "util", 40)
        recording(mock_nvml, tmp_path)
        capture = load_capture(tmp_path / "capture.json")
        for frame in capture.frames:
            again = polled_twice(replace(capture, frames=(frame,)))
            assert [gpu.value(GpuReadings.sm_active_ratio) for gpu in again.gpus] == [0.5, 0.4]
            assert again.gpus[1].value(GpuReadings.pipe_active_ratio, "tensor") == 0.16
        calls = mock_nvml.calls()
        assert calls["nvmlGpmSampleAlloc"] - calls["nvmlGpmSampleFree"] == 4  # those of the poll after it

    def test_older_capture(self) -> None:
        """Without GPM and MIG in the capture, the GPU has neither."""
        (frame,) = recorded(Box(1), 1).frames
        older = {
            asked: [{"pid": 7, "usedGpuMemory": 1}] if "ComputeRunning" in asked else answer
            for asked, answer in frame.gpus[0].items()
            if "Gpm" not in asked and "Mig" not in asked
        }
        snapshot = polled_twice(Capture(INTERVAL, (replace(frame, gpus=(older,)),)))
        assert snapshot.gpus[0].up
        assert snapshot.gpus[0].errors == {}
        assert snapshot.gpus[0].mig == ()
        assert not snapshot.gpus[0].readings[GpuReadings.pipe_active_ratio]
        assert [(process.memory, process.instance) for process in snapshot.gpus[0].processes] == [(1, None)]

    def test_reconfiguration(self) -> None:
        """An instance that is missing in a later frame is gone."""
        instance: Answers = {
            "nvmlDeviceGetUUID": "MIG-1",
            "nvmlDeviceGetName": "H100 MIG 1g.10gb",
            "nvmlDeviceGetGpuInstanceId": 7,
            "nvmlDeviceGetComputeInstanceId": 0,
        }
        (frame,) = recorded(Box(1), 1).frames
        without: Answers = {**frame.gpus[0], "nvmlDeviceGetMigMode": [1, 1], "nvmlDeviceGetMaxMigDeviceCount": 7}
        frames = [replace(frame, gpus=(answers,)) for answers in ({**without, f"{MIG_HANDLE}(3)": instance}, without)]
        nvml, clock = replayed(Capture(INTERVAL, tuple(frames)))

        async def polls() -> tuple[Snapshot, Snapshot]:
            poller = Poller(nvml, 30, clock=clock)
            first = await poller.poll()
            clock.now = INTERVAL
            return first, await poller.poll()

        before, after = asyncio.run(polls())
        assert [each.identity.profile for each in before.gpus[0].mig] == ["1g.10gb"]
        assert after.gpus[0].mig == ()
        assert after.gpus[0].errors["mig_reconfigured"] == 1


class TestRecording:
    """Limits of a recording."""

    @pytest.mark.parametrize(
        ("frames", "interval"), [(0, 1.0), (MAX_FRAMES + 1, 1.0), (1, 0.0), (1, float("nan")), (2, 1e300), (2, 5e-324)]
    )
    def test_bounds(self, frames: int, interval: float) -> None:
        """Too many frames, or none, are refused before the driver is called."""
        with pytest.raises(ValueError, match=f"expected 1 to {MAX_FRAMES} frames"):
            record(Box(1).nvml, frames, interval)

    def test_capture_that_is_too_large_is_not_written(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A file that could not be loaded again is refused, with what to do."""
        monkeypatch.setattr("gpuwarden.capture.capture_file.MAX_BYTES", 1000)
        with pytest.raises(OSError, match="record fewer frames"):
            save_capture(recorded(Box(1), 1), tmp_path / "long.json")
        assert not (tmp_path / "long.json").exists()

    def test_largest_capture_can_be_replayed(self, tmp_path: Path) -> None:
        """The maximum number of frames of a usual machine with eight GPUs fits into a file."""
        file = tmp_path / "box.json"
        save_capture(recorded(Box(), 2), file)
        assert file.stat().st_size / 2 * MAX_FRAMES < MAX_BYTES

    def test_missing_driver_fails(self) -> None:
        """Without a driver recording fails."""
        box = Box(1)
        box.simulation.driver.lose(pynvml.NVML_ERROR_DRIVER_NOT_LOADED)
        with pytest.raises(NVMLError):
            recorded(box)


def processes(answers: Answers) -> list[Struct]:
    """Return the list of compute processes in a GPU's answers."""
    found = answers["nvmlDeviceGetComputeRunningProcesses"]
    assert isinstance(found, list)
    return found


OF_THE_MODEL = {
    "nvmlDeviceGetName",
    "nvmlDeviceGetVbiosVersion",
    "nvmlDeviceGetBoardPartNumber",
    "nvmlDeviceGetInforomImageVersion",
    "nvmlDeviceGetInforomVersion",
    "nvmlDeviceGetGspFirmwareVersion",
}


def texts(answers: Answers) -> list[tuple[str, str]]:
    """Return all texts among the answers of a GPU and its instances, by function."""
    found = [(asked, answer) for asked, answer in answers.items() if isinstance(answer, str)]
    for asked, answer in answers.items():
        if isinstance(answer, dict):
            own = [(asked, value) for value in answer.values() if isinstance(value, str)]
            found += texts(answer) if asked.startswith(MIG_HANDLE) else own
    return found


def identifying(answers: Answers) -> list[str]:
    """Return the identifiers of a GPU, its instances, its slot and its processes; UUIDs without their common prefix."""
    named = (text for asked, text in texts(answers) if asked.partition("(")[0] not in OF_THE_MODEL)
    found = [text.partition("-")[2] or text for text in named]
    lists = (answer for answer in answers.values() if isinstance(answer, list))
    return found + [str(entry["pid"]) for each in lists for entry in each if isinstance(entry, dict)]


class TestMasking:
    """A masked capture can be shared."""

    def test_identifying_answers_are_replaced(self, tmp_path: Path) -> None:
        """The file has no UUID, serial number or pid of the machine."""
        box, file = Box(), tmp_path / "shared.json"
        capture = recorded(box)
        save_capture(mask_capture(capture), file)
        for index in range(8):
            assert box.nvml.nvmlDeviceGetUUID(box.handle(index)) not in file.read_text()
            assert box.nvml.nvmlDeviceGetSerial(box.handle(index)) not in file.read_text()
            assert all(str(process.pid) not in file.read_text() for process in box.read(index).processes)

    @pytest.mark.parametrize("name", GOLDENS)
    def test_no_original_is_left(self, name: str, tmp_path: Path) -> None:
        """The file has no identifier of a GPU, an instance, a slot or a process, in any spelling."""
        capture, file = load_capture(FOLDER / f"{name}.json"), tmp_path / "shared.json"
        save_capture(mask_capture(capture), file)
        originals = {text for frame in capture.frames for gpu in frame.gpus for text in identifying(gpu)}
        assert originals
        text = file.read_text().lower()
        assert [original for original in originals if original.lower() in text] == []

    @pytest.mark.parametrize("name", GOLDENS)
    def test_texts_that_stay_are_of_the_model(self, name: str) -> None:
        """All texts that are left are the same for every board of the model and driver."""
        capture = load_capture(FOLDER / f"{name}.json")
        for before, after in zip(capture.frames, mask_capture(capture).frames, strict=True):
            for old, new in zip(before.gpus, after.gpus, strict=True):
                stays = {asked.partition("(")[0] for asked, answer in texts(old) if (asked, answer) in texts(new)}
                assert stays <= OF_THE_MODEL

    def test_pseudonyms_are_stable(self) -> None:
        """A GPU or process keeps its pseudonym through all frames, and different ones stay different."""
        original, shared = recorded(Box()), mask_capture(recorded(Box()))
        names: dict[object, object] = {}
        pids: dict[object, object] = {}
        for before, after in zip(original.frames, shared.frames, strict=True):
            for old, new in zip(before.gpus, after.gpus, strict=True):
                name = new["nvmlDeviceGetUUID"]
                assert names.setdefault(old["nvmlDeviceGetUUID"], name) == name
                for was, became in zip(processes(old), processes(new), strict=True):
                    assert pids.setdefault(was["pid"], became["pid"]) == became["pid"]
        assert len(set(names.values())) == 8
        assert len(set(pids.values())) == len(pids) == 6

    def test_readings_stay(self) -> None:
        """Masking changes identifiers, not readings."""
        capture = recorded(Box())
        plain, shared = (poll_once(replayed(each)[0]) for each in (capture, mask_capture(capture)))
        assert [gpu.readings for gpu in plain.gpus] == [gpu.readings for gpu in shared.gpus]


FRAME: dict[str, object] = {"driver": {}, "gpus": [{}]}
GOOD = {"format": "gpuwarden-capture", "version": 1, "interval": 1, "frames": [FRAME]}


def capture_with_answer(question: str, answer: object) -> dict[str, object]:
    """Return a capture of one frame with that answer."""
    return {**GOOD, "frames": [{"driver": {}, "gpus": [{question: answer}]}]}


class TestLoading:
    """Files that cannot be replayed are refused with what to do."""

    def test_good_file(self, tmp_path: Path) -> None:
        """The smallest possible capture loads."""
        file = tmp_path / "capture.json"
        file.write_text(json.dumps(GOOD))
        assert load_capture(file) == Capture(1.0, (Frame({}, ({},)),))

    def test_documented_file(self, tmp_path: Path) -> None:
        """The example in the documentation loads."""
        (example,) = re.findall(r"```json\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
        file = tmp_path / "example.json"
        file.write_text(example)
        assert len(load_capture(file).frames[0].gpus) == 2

    @pytest.mark.parametrize(
        ("content", "complaint"),
        [
            ("", "not a capture, or corrupted"),
            ("{", "not a capture, or corrupted"),
            ("[" * 100_000, "not a capture, or corrupted"),
            ([1], "not a capture of gpuwarden"),
            ({"version": 1}, "not a capture of gpuwarden"),
            ({**GOOD, "version": 2}, "capture version 2 is not supported, only 1"),
            ({**GOOD, "interval": 0}, "interval: expected 1e-06 to "),
            ({**GOOD, "interval": float("nan")}, "interval: expected 1e-06 to "),
            ({**GOOD, "interval": True}, "interval: expected 1e-06 to "),
            ({**GOOD, "interval": 10**400}, "interval: expected 1e-06 to "),
            ({**GOOD, "interval": 5e-324}, "interval: expected 1e-06 to "),
            ({**GOOD, "frames": []}, f"frames: expected a list of 1 to {MAX_FRAMES}"),
            ({**GOOD, "frames": [FRAME] * (MAX_FRAMES + 1)}, f"frames: expected a list of 1 to {MAX_FRAMES}"),
            ({**GOOD, "frames": [7]}, "corrupted capture"),
            ({**GOOD, "frames": [{"driver": {}}]}, "corrupted capture"),
            ({**GOOD, "frames": [{"driver": [], "gpus": []}]}, "expected an object"),
            ({**GOOD, "frames": [{"driver": {}, "gpus": 3}]}, "corrupted capture"),
            (capture_with_answer("os.system", 1), "'os.system' is not a call of NVML"),
            (capture_with_answer("nvmlDeviceSetPowerManagementLimit", 1), "is not a call of NVML"),
            (capture_with_answer("nvmlDeviceGetPowerUsage", "much"), "'much' is not a valid answer"),
            (capture_with_answer("nvmlDeviceGetPowerUsage", True), "True is not a valid answer"),
            (capture_with_answer("nvmlDeviceGetPowerUsage", 10**400), "is not a valid answer"),
            ({**GOOD, "frames": [{"driver": {"nvmlDeviceGetCount": 10**7}, "gpus": []}]}, "but the frame has 0"),
            (capture_with_answer("nvmlDeviceGetUUID", 1), "1 is not a valid answer"),
            (capture_with_answer("nvmlDeviceGetPowerUsage", {"error": "lost"}), "is not a valid answer"),
            (capture_with_answer("nvmlDeviceGetMemoryInfo", {"total": 1, "free": 1}), "is not a valid answer"),
            (
                capture_with_answer("nvmlDeviceGetComputeRunningProcesses", [{"usedGpuMemory": 1}]),
                "is not a valid answer",
            ),
            (capture_with_answer("nvmlGpmMetricsGet(2)", "busy"), "'busy' is not a valid answer"),
            (capture_with_answer("nvmlDeviceGetMigMode", [1, "on"]), "is not a valid answer"),
            (capture_with_answer(f"{MIG_HANDLE}(0)", 1), "1 is not a valid answer"),
            (capture_with_answer(f"{MIG_HANDLE}(0)", {}), "is not a valid answer"),
            (
                capture_with_answer(f"{MIG_HANDLE}(0)", {"nvmlDeviceGetUUID": 7}),
                "nvmlDeviceGetUUID: 7 is not a valid answer",
            ),
            (capture_with_answer(f"{MIG_HANDLE}(0)", {f"{MIG_HANDLE}(0)": {"error": 6}}), "is not a valid answer"),
        ],
    )
    def test_bad_file(self, content: object, complaint: str, tmp_path: Path) -> None:
        """The message names the file, the error in it, and what to do."""
        file = tmp_path / "capture.json"
        file.write_text(content if isinstance(content, str) else json.dumps(content))
        with pytest.raises(CaptureError, match=complaint) as caught:
            load_capture(file)
        assert str(caught.value).startswith(f"{file}: ")
        assert "record it again" in str(caught.value)

    def test_missing_file(self, tmp_path: Path) -> None:
        """A missing file is named."""
        with pytest.raises(CaptureError, match=r"absent\.json: cannot read the capture: No such file"):
            load_capture(tmp_path / "absent.json")

    @pytest.mark.parametrize("name", ["pipe.json", "pipe.json.gz"])
    def test_fifo(self, name: str, tmp_path: Path) -> None:
        """A FIFO is refused at once, without waiting for its writer."""
        os.mkfifo(tmp_path / name)
        with pytest.raises(CaptureError, match=r"cannot read the capture: not a regular file"):
            load_capture(tmp_path / name)

    @pytest.mark.parametrize(
        "content", [b"no gzip", gzip.compress(b"{}")[:-5], b""], ids=["no gzip", "cut off", "empty"]
    )
    def test_damaged_compression(self, content: bytes, tmp_path: Path) -> None:
        """A compressed file that is cut short or not compressed is a damaged capture."""
        file = tmp_path / "capture.json.gz"
        file.write_bytes(content)
        with pytest.raises(CaptureError, match="corrupted"):
            load_capture(file)

    def test_endless_file(self, tmp_path: Path) -> None:
        """A small file that unpacks to more than the limit is not unpacked."""
        file = tmp_path / "bomb.json.gz"
        file.write_bytes(gzip.compress(b" " * (MAX_BYTES + 1)))
        with pytest.raises(CaptureError, match=f"longer than {MAX_BYTES} bytes"):
            load_capture(file)

    @given(st.binary(max_size=80), st.integers(0, 10_000))
    @settings(max_examples=150, deadline=None)
    def test_any_bytes(self, tmp_path_factory: pytest.TempPathFactory, patch: bytes, place: int) -> None:
        """A capture overwritten with any bytes loads or is refused, and if it loads it can be polled."""
        file = tmp_path_factory.getbasetemp() / "patched.json"
        save_capture(ONE_GPU, file)
        whole = file.read_bytes()
        place %= len(whole)
        file.write_bytes(whole[:place] + patch + whole[place + len(patch) :])
        try:
            nvml, _clock = replayed(load_capture(file))
        except CaptureError:
            return
        for index in range(nvml.nvmlDeviceGetCount()):
            GpuReader(nvml, nvml.nvmlDeviceGetHandleByIndex(index)).read()


ONE_GPU = recorded(Box(1), 1)
