"""The demo, as a user of `make demo` sees it."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from services import Daemon, Process, end_processes, fetch, wait_until

from gpuwarden.config.value_types import Address
from gpuwarden.demo import story
from gpuwarden.demo.demonstration import IDLE_GPU, STAND_IN_MIB
from gpuwarden.web.api.api_paths import RUNS
from system_parts import needs_framework

IDLE_UUID = "GPU-51300000-0000-4000-8000-000000000007"
KILLED = """
import os, signal, sys
from pathlib import Path
from gpuwarden.demo.demonstration import running

with running(["sleep", "60"], dict(os.environ), Path(sys.argv[1])) as program:
    print(program.pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.frameworks
@needs_framework("tensorflow")
def test_demo_shows_a_training_and_ends_all_programs(tmp_path: Path) -> None:
    """The training is shown, even if a proxy is set; a closed terminal ends all programs, like Ctrl-C."""
    command = [sys.executable, "-u", "-m", "gpuwarden", "demo", "--listen", "127.0.0.1:0"]
    demo = Process(command, tmp_path / "demo.log", {"http_proxy": "http://127.0.0.1:1", "TMPDIR": str(tmp_path)})
    with end_processes(demo):
        wait_until(lambda: " MiB in use" in demo.output() or demo.popen.poll() is not None, "memory of the training")
        programs = psutil.Process(demo.pid).children(recursive=True)
        assert len(programs) >= 2  # daemon and training, and Prometheus if it is installed
        assert demo.kill(signal.SIGHUP) == 0, demo.output()
        assert not [program for program in programs if program.is_running()]
        assert not list(tmp_path.glob("gpuwarden-demo-*"))


@pytest.mark.frameworks
@needs_framework("tensorflow")
def test_training_survives_on_its_stand_in(tmp_path: Path) -> None:
    """The second training runs out of memory, retries and finishes; its GPU shows the memory that it uses."""
    config = tmp_path / "config.yaml"
    config.write_text(f"simulation: {{stand_in_memory: {STAND_IN_MIB}MiB}}\n")
    daemon = Daemon(tmp_path / "daemon", "--source", "simulated", "--config", str(config))
    with end_processes(daemon):
        reader, seen = story.Story(Address("127.0.0.1", daemon.port), None), list[str]()
        command = [sys.executable, "-m", "gpuwarden.demo.training", "retry", story.RUN_NAME, IDLE_UUID]
        trainer = Process(command, tmp_path / "trainer.log", {"GPUWARDEN_SOCKET": str(daemon.socket)})
        used: list[float] = []

        def has_ended() -> bool:
            seen.extend(reader.new_lines())
            gpu = json.loads(fetch(f"{daemon.url}/api/v1/state"))["gpus"][IDLE_GPU]
            used.append(gpu["memory_used_bytes"] / 2**20)
            return bool(reader.outcomes)

        with end_processes(trainer):
            wait_until(has_ended, "the end of the training", limit=180.0)
    assert reader.outcomes == ["finished"], trainer.output()
    assert any("retried with half the batch" in line for line in seen), seen
    assert 100 < max(used) <= STAND_IN_MIB


def test_killed_demo_leaves_no_program(tmp_path: Path) -> None:
    """Programs of a demo end with it, even by SIGKILL, when it cannot end them."""
    ended = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path / "program.log")], stdout=subprocess.PIPE, text=True, check=False
    )
    assert ended.returncode == -signal.SIGKILL
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(int(ended.stdout)).wait(10)


def test_story_has_a_line_for_each_event(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start, quarters of the memory, leak, pressure, alerts and diagnosis have one line each; no news has none.

    At the end the forecast stands next to what happened.
    """
    run: dict[str, Any] = {"name": story.RUN_NAME, "run_id": "4-2", "up": True, "devices": [{}]}
    alert = {"state": "firing", "labels": {"alertname": "RunNearOutOfMemory", "run_id": "4-2"}}
    alerts: list[Any] = []
    runs = [{"name": "other", "up": True}, run]
    answers: dict[int, Any] = {8: {"runs": runs, "polled_timestamp_seconds": 100.0}, 9: {"data": {"alerts": alerts}}}
    record = {"events": [{"kind": "retry"}, {"kind": "phase"}, {"kind": "retry"}]}

    def fetch(listen: Address, path: str, _timeout: float) -> Any:
        return record if path.startswith(RUNS) else answers[listen.port]

    monkeypatch.setattr(story, "fetch_json", fetch)
    reader = story.Story(Address("127.0.0.1", 8), Address("127.0.0.1", 9))

    def lines(**device: object) -> list[str]:
        run["devices"][0] |= device
        return list(reader.new_lines())

    assert lines() == ["the training started"]
    assert lines(memory_in_use_bytes=100 << 20, headroom_bytes=412 << 20) == []
    assert lines(memory_in_use_bytes=256 << 20, headroom_bytes=256 << 20) == ["256 MiB of 512 MiB in use"]
    assert lines(seconds_to_oom=27.0) == ["leak detected: 256 MiB of 512 MiB in use, out of memory in about 27s"]
    assert lines(pressure="critical")[0].startswith("memory pressure critical: 256 MiB ")
    alerts.append(alert)
    assert lines() == ["ALERT RunNearOutOfMemory is firing"]
    run |= {
        "up": False,
        "ended_timestamp_seconds": 131.0,
        "outcome": "out_of_memory",
        "diagnosis": {"name": "leak", "evidence": "It grew.", "next_step": "Fix it."},
    }
    said = "\n".join(lines())
    assert all(
        each in said
        for each in (
            *("OUT OF MEMORY, cause: leak", "the first forecast was 27s, and it took 31s"),
            *("It grew.", "Fix it.", "gpuwarden runs show 4-2"),
        )
    )
    assert reader.outcomes == ["out_of_memory"]
    assert lines() == []
    answers[8]["runs"].append({"name": story.RUN_NAME, "run_id": "5-3", "up": True})
    assert lines() == ["the training is started again, with fit_with_oom_retry"]
    answers[8]["runs"][-1]["outcome"] = "finished"
    assert lines()[:2] == [
        "the training finished",
        "  out of memory 2 times before, each time retried with half the batch",
    ]
    assert reader.outcomes == ["out_of_memory", "finished"]
