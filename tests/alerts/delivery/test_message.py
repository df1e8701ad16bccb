"""Alert messages: complete, limited in length, and safe for any run name."""

from __future__ import annotations

import re
from dataclasses import replace

from alert_samples import OWNER, gpu_down, gpu_hot, near_oom, xid

from gpuwarden.alerts.delivery import webhook
from gpuwarden.alerts.delivery.apprise import disable_links
from gpuwarden.alerts.delivery.message import (
    MAX_TEXT_CHARS,
    MAX_TITLE_CHARS,
    Message,
    Notification,
    action_text,
    fill_text,
)
from gpuwarden.alerts.markdown import render_plain
from gpuwarden.health.conditions import ALERTS
from gpuwarden.state import Alert

PAGES = "https://ops.example.com/box1"
HOSTILE = (
    "<!channel> @here\r\nBcc: eve@example.com\n\n*x* `y` <https://evil.example|click> \u202edlrow\x00" + "z" * 5000
)


def message(*firing: Alert, over: tuple[Alert, ...] = (), daemon_url: str = "http://box1:9846") -> Message:
    """Return a message with firing and resolved alerts."""
    return Message(
        "box1",
        daemon_url,
        (*map(Notification, firing), *(Notification(each, resolved_at=each.since + 60) for each in over)),
    )


def test_message_has_all_facts() -> None:
    """Title and text name host, run, GPU, owner and value, and the action to take."""
    one = message(near_oom())
    assert (
        one.title
        == "[CRITICAL] box1: Run resnet50 (77-1) can allocate only 1.2 GiB more on GPU 3 (NVIDIA H100 80GB HBM3)."
    )
    for part in (
        "CRITICAL RunNearOutOfMemory: Training run is almost out of GPU memory",
        "- Run resnet50 (77-1) can allocate only 1.2 GiB more on GPU 3",
        f"Owner: {OWNER}. Since 20",
        "Details: gpuwarden runs show 77-1",
        "Action: Save a checkpoint now. Then stop the co-tenant, or restart the run with a smaller batch.",
        "Page: http://box1:9846/run/77-1",
        "Runbook: http://box1:9846/alerts/RunNearOutOfMemory",
    ):
        assert part in one.text


def test_second_gpu_is_not_hidden() -> None:
    """Several instances of an alert share one heading and one action, with one line each."""
    both = message(gpu_down(10), gpu_down(9), gpu_hot())
    assert both.title == "[CRITICAL] box1: 3 alerts: GpuDown (2): GPU 9, GPU 10; GpuNearThermalSlowdown: GPU 2"
    lines = both.text.splitlines()
    assert [line[:8] for line in lines if line.startswith("- ")] == ["- GPU 9 ", "- GPU 10", "- GPU 2 "]
    first, second = (line for line in lines if line.startswith("Action: "))
    assert first.startswith(
        "Action: Stop the runs on it and reset it (docs/start/install.md#reset-a-gpu); if it is lost, restart"
    )
    assert "lower the power limit (nvidia-smi -pl WATTS)." in second


def test_resolved_alert() -> None:
    """A resolved alert shows when it fired; alone, it makes the title."""
    past = message(over=(gpu_down(),))
    assert past.title == "[RESOLVED] box1: GpuDown: GPU 3"
    assert re.search(r"RESOLVED\n- GpuDown: GPU 3\. Fired from \S+ \S+ \S+ to \S+ \S+ \S+\.\n", past.text)
    assert "Action:" not in past.text


def test_ending_without_recovery() -> None:
    """An alert that ended without recovery shows its ending in the line and the title."""
    past = message(over=(replace(gpu_down(), ending="the driver no longer lists it"),))
    assert past.title == "[RESOLVED] box1: GpuDown: GPU 3 (the driver no longer lists it)"
    assert "\n- GpuDown: GPU 3 (the driver no longer lists it). Fired from" in past.text


def test_repeated_alert() -> None:
    """A repeated alert is marked as such."""
    again = Message(
        "box1", "http://box1:9846", (Notification(gpu_down(), repeated=True),), {"RunStalled": 2, "GpuXidWarning": 1}
    )
    assert again.title.startswith("[CRITICAL, STILL FIRING] box1: GPU 3 ")
    assert " (sent before)." in again.text
    assert "Still firing: GpuXidWarning, RunStalled (2).\n" in again.text


def test_burst_is_bounded() -> None:
    """Two hundred alerts make one message of bounded length with room for each name."""
    many = message(
        *(xid(index) for index in range(150)), *(near_oom(f"run-{i}", f"7-{i}") for i in range(49)), gpu_hot()
    )
    assert len(many.title) <= MAX_TITLE_CHARS
    assert len(many.text) <= MAX_TEXT_CHARS
    assert "GpuXidCritical (150)" in many.title
    assert "And 188 more: GpuXidCritical (1" in many.text
    body = webhook.render_body(many)
    assert (len(body["firing"]), body["left_out"]) == (200, 0)
    assert webhook.render_body(message(*(xid(index) for index in range(201)), over=(gpu_hot(),)))["left_out"] == 2


def test_longest_texts_are_bounded() -> None:
    """The maximum number of alerts with the longest texts fits the limit of a message."""
    worst = message(*(near_oom(HOSTILE + str(i), f"7-{i}", HOSTILE) for i in range(40)))
    assert len(worst.title) <= MAX_TITLE_CHARS
    assert len(worst.text) <= MAX_TEXT_CHARS


def test_hostile_names_are_escaped() -> None:
    """A run name starts no new line, mentions no user, adds no link and does not reverse the text."""
    one = message(near_oom(HOSTILE, owner=HOSTILE))
    assert "\n" not in one.title
    assert not re.search(r"^Bcc", one.text, re.MULTILINE)
    assert all(line.isprintable() for line in one.text.splitlines())


def test_name_in_chat_markup() -> None:
    """A run name is escaped in chat markup: it adds no link and mentions no user."""
    for name in (
        "@everyone",
        "<@&4711>",
        "<!here>",
        "[urgent](https://evil.example)",
        "https://evil.example/login",
        "HTTP://WWW.evil.example",
        "www.evil.example",
        "mailto:eve@evil.example",
        f"{PAGES}@evil.example/",
        f"[docs]({PAGES}/x)",
        f"<{PAGES}/x|docs>",
    ):
        made = disable_links(f"Run {name} stalls. More: {PAGES}/a.md", PAGES)
        assert made.replace("\u2060", "") == f"Run {name} stalls. More: {PAGES}/a.md"
        assert made.endswith(f" More: {PAGES}/a.md")
        text = made.replace(f"{PAGES}/", "")
        assert not re.search(r"@[\w&]|<[@!#]|\]\(|://|\bwww\.|mailto:", text, re.IGNORECASE), name


def test_links_in_chat_markup() -> None:
    """Only links to the daemon's pages are links."""
    assert (
        disable_links(f"{PAGES}/a {PAGES}.evil/", PAGES) == f"{PAGES}/a {PAGES.replace(':', ':' + chr(0x2060))}.evil/"
    )


def test_unicode_is_kept() -> None:
    """A name in any script is sent unchanged."""
    assert "模型-Größe🚀" in message(near_oom("模型-Größe🚀")).text


def test_every_rule_has_plain_text() -> None:
    """The texts of every rule have no Markdown, no unfilled placeholder and no reference to another alert."""
    offenders = [
        (name, said)
        for name, rule in ALERTS.items()
        for text in (action_text(rule), fill_text(rule.meaning))
        for said in [render_plain(text)]
        if re.search(r"[`*\[\]]|%\{|\]\(|Same as", said) or not (said[0].isupper() or text.startswith("`"))
    ]
    assert offenders == []


def test_webhook_body() -> None:
    """The body matches docs/use/notifications.md."""
    body = webhook.render_body(message(near_oom(), over=(replace(gpu_down(), owner=""),)))
    assert {key: body[key] for key in ("version", "host", "test", "severity", "left_out", "still")} == {
        "version": 1, "host": "box1", "test": False, "severity": "critical", "left_out": 0, "still": "",
    }  # fmt: skip
    assert body["title"].startswith("[CRITICAL] box1: Run resnet50")
    assert body["firing"] == [
        {
            "alert": "RunNearOutOfMemory",
            "severity": "critical",
            "labels": dict(near_oom().labels),
            "summary": "Run resnet50 on GPU 3 of box1 is almost out of GPU memory",
            "description": near_oom().description,
            "owner": OWNER,
            "do": "Save a checkpoint now. Then stop the co-tenant, or restart the run with a smaller batch.",
            "more": "http://box1:9846/alerts/RunNearOutOfMemory",
            "page": "http://box1:9846/run/77-1",
            "since": "2026-09-21T14:13:20Z",
            "over": None,
            "ending": "",
            "again": False,
        }
    ]
    assert [(each["alert"], each["over"]) for each in body["over"]] == [("GpuDown", "2026-09-21T14:14:20Z")]
