"""Notifications by a real daemon over HTTP and by mail: each alert and its resolution once, also over a restart."""

from __future__ import annotations

import os
import pwd
import signal
from pathlib import Path

import pytest
from message_receivers import http_receiver, mail_receiver
from services import Daemon, end_processes, wait_until

from mock_nvml import MockNvml
from tests.advice.test_advice_over_socket import GIB, Run, set_memory

pytestmark = pytest.mark.slow  # RunNearOutOfMemory keeps firing for a minute

OWNER = f"user {pwd.getpwuid(os.geteuid()).pw_name}"
KEPT_SECONDS = 60.0  # RunNearOutOfMemory keeps firing for so long
UUID = "GPU-a0b1c2d0-4d4f-434b-8000-000000000000"


def test_faults_are_notified(tmp_path: Path, mock_nvml: MockNvml) -> None:
    """Faults of two GPUs are one message, a run near out of memory is the next, and its recovery the last."""
    config = tmp_path / "config.yaml"
    with http_receiver() as server, mail_receiver() as mail:
        config.write_text(f"""
poll: {{interval: 300ms}}
notify:
  webhook: {server.url}
  apprise: mailto://{mail.address}?from=gpuwarden@box.example.com&to=ops@example.com
  group_wait: 1s
  resolve_after: 0
""")
        start = ("--config", str(config))
        daemon = Daemon(tmp_path / "daemon", *start, env=mock_nvml.env(gpus=2, frozen=1))
        with end_processes(daemon):
            run = Run(
                tmp_path / "runs", daemon, {UUID: 39 * GIB}, lambda pid: set_memory(mock_nvml, 0, 40000, {pid: 40})
            )
            with end_processes(run):
                _wait_for_xid_events(daemon)
                mock_nvml.xid(0, 79)
                mock_nvml.xid(1, 79)
                content = server.receive().content
                assert [(each["labels"]["gpu"], each["labels"]["xid"]) for each in content["firing"]] == [
                    ("0", "79"),
                    ("1", "79"),
                ]
                assert content["firing"][0]["owner"].startswith(OWNER)
                text = mail.receive().get_content()
                assert "GPU 0 (" in text
                assert "GPU 1 (" in text
                assert "\nAction: Stop the runs on that GPU" in text.replace("\r", "")

                set_memory(mock_nvml, 0, 500, {run.pid: 40})
                content = server.receive().content
                assert [each["alert"] for each in content["firing"]] == ["RunNearOutOfMemory"]
                assert content["firing"][0]["owner"].startswith(OWNER)
                assert "of memory left on GPU 0" in content["title"]
                assert content["still"] == "GpuXidCritical (2)"
                set_memory(mock_nvml, 0, 40000, {run.pid: 40})
                over = server.receive(extra_seconds=KEPT_SECONDS).content["over"]
                assert [each["alert"] for each in over] == ["RunNearOutOfMemory"]
                wait_until(
                    lambda: daemon.samples().value("gpuwarden_notify_messages_total", target="webhook") == 3,
                    "messages are counted",
                )
                assert daemon.samples().value("gpuwarden_notify_errors_total", target="apprise") == 0
                assert daemon.kill(signal.SIGTERM) == 0

        again = Daemon(tmp_path / "daemon", *start, env=mock_nvml.env(gpus=2, frozen=1))
        with end_processes(again):
            _wait_for_xid_events(again)
            mock_nvml.xid(1, 95)
            content = server.receive().content
            assert [(each["labels"]["gpu"], each["labels"]["xid"]) for each in content["firing"]] == [("1", "95")]


def _wait_for_xid_events(daemon: Daemon) -> None:
    """Wait until the daemon receives XIDs: the driver does not store them for a later listener."""
    wait_until(lambda: daemon.samples().value("gpuwarden_access", source="nvml_events") == 1, "it listens for XIDs")
