"""Masking of captures: identifying answers are replaced, readings stay."""

from __future__ import annotations

from pathlib import Path

import pytest
from golden_boxes import FOLDER, GOLDENS
from recorded_captures import poll_once, record_capture, replay_capture
from simulated_box import Box

from gpuwarden.capture.capture_file import MIG_HANDLE, Answers, Struct, load_capture, save_capture
from gpuwarden.capture.masking import mask_capture


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
        capture = record_capture(box)
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
        original, shared = record_capture(Box()), mask_capture(record_capture(Box()))
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
        capture = record_capture(Box())
        plain, shared = (poll_once(replay_capture(each)[0]) for each in (capture, mask_capture(capture)))
        assert [gpu.readings for gpu in plain.gpus] == [gpu.readings for gpu in shared.gpus]
