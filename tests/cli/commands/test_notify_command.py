"""`gpuwarden notify --test` and the section `notify` of the configuration."""

from __future__ import annotations

import contextlib
import re
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from commands import run_command
from message_receivers import http_receiver, mail_receiver
from services import free_port

from gpuwarden.alerts.delivery import validation
from gpuwarden.alerts.delivery.message import Message
from gpuwarden.alerts.delivery.webhook import WebhookTarget
from gpuwarden.cli.commands import notify_command
from gpuwarden.cli.main import main
from gpuwarden.config.schema import Config, NotifyConfig
from gpuwarden.config.secrets import NOT_ASCII, Secret
from tests.config.test_schema import problems

TOKEN = "T0KEN-xoxb-1234567890"  # noqa: S105 - of a test


def gpuwarden(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a command and return its output."""
    return run_command(*arguments, env=env)


def test_each_target_is_reported(tmp_path: Path) -> None:
    """Each target gets a test message, and has a line that says whether it was sent or why not."""
    config = tmp_path / "config.yaml"
    unused = free_port()
    with http_receiver() as server, mail_receiver() as mail:
        (tmp_path / "hook").write_text(f"{server.url}/services/{TOKEN}")
        config.write_text(f"""
notify:
  webhook:
    - {server.url}/hook
    - http://127.0.0.1:{unused}/{TOKEN}
    - file:{tmp_path}/hook
  apprise: mailto://{mail.address}?from=gpuwarden@box.example.com&to=ops@example.com
  apprise_severity: critical
""")
        ended = gpuwarden("notify", "--test", "--config", str(config))
        assert (ended.returncode, ended.stderr) == (1, "")
        assert ended.stdout.splitlines() == [
            "webhook at 127.0.0.1: sent",
            "webhook at 127.0.0.1: NOT sent: Connection refused",
            f"webhook at the file {tmp_path}/hook: sent",
            "apprise (mailto): sent",
        ]
        got = [server.receive(), server.receive()]
        hook = next(each for each in got if each.path == "/hook").content
        assert (hook["test"], hook["firing"], hook["over"]) == (True, [], [])
        assert "test notification from gpuwarden" in next(each for each in got if each.path != "/hook").content["title"]
        letter = mail.receive()
        assert letter["Subject"].endswith("test notification from gpuwarden")
        assert "with severity critical are sent here" in letter.get_content()
        config.write_text(f"notify: {{webhook: '{server.url}'}}")
        ended = gpuwarden("notify", "--test", "--config", str(config))
        assert (ended.returncode, ended.stdout) == (0, "webhook at 127.0.0.1: sent\n")


def test_slow_target_is_given_up(tmp_path: Path) -> None:
    """A server that answers byte by byte without end is given up at the timeout."""
    stop = threading.Event()

    def drip(server: socket.socket) -> None:
        with contextlib.suppress(OSError), server.accept()[0] as caller:
            while not stop.wait(0.1):
                caller.sendall(b"x")

    config = tmp_path / "config.yaml"
    with socket.create_server(("127.0.0.1", 0)) as server:
        place = f"127.0.0.1:{server.getsockname()[1]}"
        config.write_text(f"""
notify: {{webhook: "http://{place}", timeout: 300ms}}
""")
        thread = threading.Thread(target=drip, args=(server,))
        thread.start()
        try:
            ended = gpuwarden("notify", "--test", "--config", str(config))
        finally:
            stop.set()
            thread.join()
    assert (ended.returncode, ended.stderr) == (1, "")
    assert ended.stdout == "webhook at 127.0.0.1: NOT sent: no answer within 0.3 s\n"


def test_bug_reveals_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    """An unexpected error is reported by its type and its place, not by its text, which may have a password."""

    def fails(_target: WebhookTarget, _message: Message) -> None:
        raise UnicodeEncodeError("ascii", TOKEN, 0, 1, "ordinal not in range")

    monkeypatch.setattr(WebhookTarget, "_deliver", fails)
    said: list[str] = []
    config = Config(notify=NotifyConfig(webhook=(Secret(text="http://127.0.0.1:1/"),)))
    assert notify_command.send_test(config, said.append) == 1
    assert re.search(r": NOT sent: bug in gpuwarden, please report it: UnicodeEncodeError in .*\.fails:\d+$", said[0])
    assert TOKEN not in said[0]


def test_no_target() -> None:
    """Without a target the command says what to do."""
    ended = gpuwarden("notify", "--test")
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "add one under `notify:`" in ended.stderr


def test_wrong_configuration_is_reported_in_full(tmp_path: Path) -> None:
    """Each wrong value is reported with its place, in lists too; one that may be a secret is not repeated."""
    text = f"""
notify:
  webhook:
    - https://h.example.com/x
    - "ftp://{TOKEN}"
    - {{a: b}}
  slack: {TOKEN}
  mail_to: [ops@example.com]
  mail_password: {TOKEN}
  webhook_token: {TOKEN}
  webhook_severity: bad
  apprise: ["{TOKEN}", "file:relative"]
  resend: 1
"""
    found = problems(text)
    assert [line.partition(": ")[0] for line in found] == [
        f"bad.yaml:{place}" for place in ("5:7", "6:7", "7:3", "8:3", "9:3", "10:3", "11:3", "12:13", "12:38", "13:3")
    ]
    assert TOKEN not in "\n".join(found)
    assert found[2].startswith("bad.yaml:7:3: notify.slack: unknown")
    assert found[3].startswith("bad.yaml:8:3: notify.mail_to: unknown")
    assert found[0].endswith(
        "notify.webhook: this is not a secret URL; write https://…, or file:/PATH or env:NAME where it is kept"
    )
    file = tmp_path / "bad.yaml"
    file.write_text(text)
    ended = gpuwarden("check-config", str(file))
    assert (ended.returncode, len(ended.stderr.splitlines())) == (2, len(found))


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("mute: [RunDied, RunDyed]", "notify.mute: there is no alert RunDyed; did you mean RunDied?"),
        ("webhook_token: file:/dev/null", "notify.webhook_token: set notify.webhook too"),
        ("webhook: " + str(["https://h/"] * 17), "notify.webhook: 17 values are too many; maximum 16"),
        ("timeout: [a]", "notify.timeout: expects one value, not a list or a section"),
    ],
)
def test_contradicting_options(lines: str, message: str) -> None:
    """Options that need another option or a file are reported."""
    assert any(message in line for line in problems(f"notify:\n  {lines}\n"))


def test_missing_file_or_variable_is_a_warning(tmp_path: Path) -> None:
    """Files and variables may exist for the service only: check-config warns, and the test reports each target."""
    config, absent = tmp_path / "config.yaml", tmp_path / "url"
    with http_receiver() as server:
        config.write_text(f"""
notify:
  webhook: ["file:{absent}", env:GPUWARDEN_NOT_SET, "{server.url}"]
  ca_file: /nonexistent/ca
""")
        ended = gpuwarden("check-config", str(config))
        assert (ended.returncode, ended.stdout.splitlines()[0]) == (0, f"{config}: OK")
        assert [line.partition(";")[0] for line in ended.stderr.splitlines() if ": warning: " in line] == [
            f"{config}: warning: notify.webhook: the file {absent} cannot be read: No such file or directory",
            f"{config}: warning: notify.webhook: the variable GPUWARDEN_NOT_SET is not set",
            f"{config}: warning: notify.ca_file: /nonexistent/ca cannot be read: No such file or directory",
        ]
        config.write_text(config.read_text().replace("ca_file: /nonexistent/ca", ""))
        ended = gpuwarden("notify", "--test", "--config", str(config))
    assert ended.stdout.splitlines() == [
        f"webhook at the file {absent}: NOT sent: the file {absent} cannot be read: No such file or directory",
        "webhook at the variable GPUWARDEN_NOT_SET: NOT sent: the variable GPUWARDEN_NOT_SET is not set",
        "webhook at 127.0.0.1: sent",
    ]


def test_token_outside_ascii_is_a_warning() -> None:
    """A token outside ASCII, which HTTP cannot send, is a warning of the check."""
    wrong = Secret(text="Schlüssel")
    found = validation.missing(Config(notify=NotifyConfig(webhook=(Secret(text="https://x"),), webhook_token=wrong)))
    assert dict(found) == {"notify.webhook_token": f"the configuration {NOT_ASCII}"}


def test_missing_apprise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """If apprise is not installed, the check says how to install it."""
    config = tmp_path / "config.yaml"
    config.write_text("notify: {apprise: 'json://127.0.0.1/'}")
    monkeypatch.setattr(validation, "find_spec", lambda _name: None)
    assert main(["check-config", str(config)]) == 0
    printed = capsys.readouterr().err
    assert f"{config}: warning: notify.apprise: needs the package apprise" in printed
    assert f"{sys.executable} -m pip install apprise" in printed
