"""Capture files: an unusable one is refused with the reason."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import re
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from recorded_captures import record_capture, replay_capture
from simulated_box import Box

from gpuwarden.capture.capture_file import (
    MAX_FRAMES,
    MIG_HANDLE,
    Capture,
    CaptureError,
    Frame,
    load_capture,
    save_capture,
)
from gpuwarden.capture.replay import CapturedNvml
from gpuwarden.gpu.reader import GpuReader
from gpuwarden.nvml.return_codes import NVMLError

DOCUMENT = Path(__file__).parents[2] / "docs" / "engineering" / "capture.md"
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

    def test_unknown_question(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        """A capture with a question of another version is replayed without it, and one warning names it."""
        file = tmp_path / "newer.json"
        part = {"nvmlDeviceGetUUID": "MIG-1", "nvmlDeviceGetLaterValue(3)": [1]}
        frame = {"driver": {"nvmlSystemGetNews": {"a": 1}}, "gpus": [{f"{MIG_HANDLE}(0)": part}]}
        file.write_text(json.dumps({**GOOD, "frames": [frame]}))
        nvml = CapturedNvml(load_capture(file)).nvml
        gpu = nvml.nvmlDeviceGetHandleByIndex(0)
        assert nvml.nvmlDeviceGetUUID(nvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, 0)) == "MIG-1"
        (record,) = caplog.records
        assert f"file={file} functions=nvmlDeviceGetLaterValue,nvmlSystemGetNews" in record.getMessage()

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

    def test_endless_file(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A small file that unpacks to more than the limit is not unpacked."""
        monkeypatch.setattr("gpuwarden.capture.capture_file.MAX_BYTES", 1 << 20)
        file = tmp_path / "bomb.json.gz"
        file.write_bytes(gzip.compress(b" " * ((1 << 20) + 1)))
        with pytest.raises(CaptureError, match=f"longer than {1 << 20} bytes"):
            load_capture(file)

    @given(st.binary(max_size=80), st.integers(0, 10_000))
    @example(b"0", 91)
    @settings(max_examples=150, deadline=None)
    def test_any_bytes(self, tmp_path_factory: pytest.TempPathFactory, patch: bytes, place: int) -> None:
        """A capture overwritten with any bytes loads or is refused, and if it loads it can be polled."""
        file = tmp_path_factory.getbasetemp() / "patched.json"
        save_capture(ONE_GPU, file)
        whole = file.read_bytes()
        place %= len(whole)
        file.write_bytes(whole[:place] + patch + whole[place + len(patch) :])
        try:
            nvml, _clock = replay_capture(load_capture(file))
        except CaptureError:
            return
        with contextlib.suppress(NVMLError):  # as a driver's; the patch may have renamed a question, which is ignored
            for index in range(nvml.nvmlDeviceGetCount()):
                GpuReader(nvml, nvml.nvmlDeviceGetHandleByIndex(index)).read()


ONE_GPU = record_capture(Box(1), 1)
