"""Captures: a replay equals the recording."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pynvml
import pytest
from recorded_captures import HOST, INTERVAL, poll_once, record_capture, replay_capture
from simulated_box import Box, Clock, summarize

from gpuwarden.capture.capture_file import (
    MAX_BYTES,
    MAX_FRAMES,
    MIG_HANDLE,
    Answers,
    Capture,
    Frame,
    load_capture,
    save_capture,
)
from gpuwarden.capture.recording import SAMPLE_SECONDS, record
from gpuwarden.capture.replay import CapturedNvml
from gpuwarden.gpu.metrics import GpuReadings, MigReadings
from gpuwarden.gpu.poller import Poller
from gpuwarden.gpu.reader import DEFAULT_PLAN, GpuGoneError, GpuReader
from gpuwarden.gpu.snapshot import Snapshot
from gpuwarden.nvml.return_codes import NVMLError, code_of
from mock_nvml import MockNvml

PID_MAX_LIMIT = 1 << 22
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
        save_capture(record_capture(Box(), 3), tmp_path / name)
        original, (nvml, clock) = Box(), replay_capture(load_capture(tmp_path / name))
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
        real, again = poll_once(box.nvml), poll_once(replay_capture(record_capture(Box()))[0])
        assert [gpu.identity for gpu in again.gpus] == [gpu.identity for gpu in real.gpus]
        assert [gpu.readings for gpu in again.gpus] == [gpu.readings for gpu in real.gpus]
        assert again.driver == real.driver

    def test_recording_a_replay_gives_the_same_capture(self) -> None:
        """Recording a replay loses and changes nothing."""
        capture = record_capture(Box())
        nvml, clock = replay_capture(capture)
        again = record(nvml, 3, INTERVAL, host_memory=lambda: HOST, sleep=clock.sleep, clock=clock)
        assert again == capture

    def test_frames_follow_the_clock_and_repeat(self) -> None:
        """Each frame lasts its interval, and the first one follows the last."""
        frames = tuple(Frame({"nvmlDeviceGetCount": count}, ({},) * count) for count in (1, 2, 3))
        nvml, clock = replay_capture(Capture(INTERVAL, frames))
        counts = []
        for clock.now in (0, 1.9, 2, 3.9, 4, 5.9, 6, 8, 601):
            counts.append(nvml.nvmlDeviceGetCount())
        assert counts == [1, 1, 2, 2, 3, 3, 1, 2, 1]

    def test_faults_are_replayed(self) -> None:
        """Lost GPUs and failing calls are replayed as the same faults, in their frames only."""
        box = Box()
        healthy = record_capture(box, 1)
        box.simulation.gpu(2).lose()
        box.simulation.gpu(4).fail("nvmlDeviceGetPowerUsage", pynvml.NVML_ERROR_UNKNOWN)
        box.simulation.gpu(5).fail("nvmlDeviceGetTemperature", pynvml.NVML_ERROR_GPU_IS_LOST)
        box.simulation.gpu(6).fail("nvmlDeviceGetMarginTemperature", pynvml.NVML_ERROR_NOT_SUPPORTED)
        nvml, clock = replay_capture(replace(healthy, frames=healthy.frames + record_capture(box, 1).frames))

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
        snapshot = poll_once(replay_capture(record_capture(box, 1))[0])
        assert [gpu.up for gpu in snapshot.gpus] == [True, False]

    def test_driver_that_does_not_count_is_replayed(self) -> None:
        """A frame in which the driver failed fails again."""
        box = Box()
        box.simulation.driver.fail("nvmlDeviceGetCount", pynvml.NVML_ERROR_UNKNOWN)
        assert poll_once(replay_capture(record_capture(box, 1))[0]).fault == "unknown"

    def test_gpu_that_is_no_longer_counted_is_lost(self) -> None:
        """In a frame with fewer GPUs, those that are gone have no readings."""
        fewer = record_capture(Box(1), 1).frames
        nvml, clock = replay_capture(Capture(INTERVAL, record_capture(Box(2), 1).frames + fewer))
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
        nvml, _clock = replay_capture(record_capture(Box(1), 1))
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
        nvml, _clock = replay_capture(Capture(1.0, (Frame({"nvmlDeviceGetCount": 1}, (answers,)),)))
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
        (frame,) = record_capture(Box(1), 1).frames
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
        (frame,) = record_capture(Box(1), 1).frames
        without: Answers = {**frame.gpus[0], "nvmlDeviceGetMigMode": [1, 1], "nvmlDeviceGetMaxMigDeviceCount": 7}
        frames = [replace(frame, gpus=(answers,)) for answers in ({**without, f"{MIG_HANDLE}(3)": instance}, without)]
        nvml, clock = replay_capture(Capture(INTERVAL, tuple(frames)))

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
            save_capture(record_capture(Box(1), 1), tmp_path / "long.json")
        assert not (tmp_path / "long.json").exists()

    def test_largest_capture_can_be_replayed(self, tmp_path: Path) -> None:
        """The maximum number of frames of a usual machine with eight GPUs fits into a file."""
        file = tmp_path / "box.json"
        save_capture(record_capture(Box(), 2), file)
        assert file.stat().st_size / 2 * MAX_FRAMES < MAX_BYTES

    def test_missing_driver_fails(self) -> None:
        """Without a driver recording fails."""
        box = Box(1)
        box.simulation.driver.lose(pynvml.NVML_ERROR_DRIVER_NOT_LOADED)
        with pytest.raises(NVMLError):
            record_capture(box)
