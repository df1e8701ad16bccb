"""Guard against a temporary systemd that changes the machine's kernel, on a folder in place of /proc/sys."""

from __future__ import annotations

from pathlib import Path

import pytest
import throwaway_systemd


def test_changed_setting_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A setting that differs afterwards fails the test with both values; what the kernel counts does not."""
    monkeypatch.setattr(throwaway_systemd, "SETTINGS", tmp_path)
    (tmp_path / "kernel").mkdir()
    counter, setting = tmp_path / "kernel/ns_last_pid", tmp_path / "kernel/pid_max"
    setting.write_text("32768\n")
    counter.write_text("1\n")
    with throwaway_systemd.unchanged_settings():
        counter.write_text("2\n")
    with (
        pytest.raises(AssertionError, match="this machine's kernel: kernel/pid_max from 32768 to 9"),
        throwaway_systemd.unchanged_settings(),
    ):
        setting.write_text("9\n")
