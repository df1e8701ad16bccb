"""Messages about alerts for people: title and text, limited in length, one for all alerts sent together.

Names of runs, users and jobs are untrusted: characters that do not print or break the line are replaced.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from functools import cache

from gpuwarden.alerts.alert_links import AlertLinks, fill_labels
from gpuwarden.alerts.markdown import render_plain
from gpuwarden.alerts.prometheus_rules import Choices
from gpuwarden.health.conditions import CONDITIONS
from gpuwarden.health.model import Condition, fill_places
from gpuwarden.severity import SEVERITY_RANK
from gpuwarden.state import Alert

MAX_LISTED = 12  # alerts that one message describes; of the others it names only the subjects
MAX_TITLE_CHARS = 160
MAX_NAME_CHARS = 80
MAX_OWNER_CHARS = 160
MAX_DESCRIPTION_CHARS = 400
MAX_REST_CHARS = 400
MAX_TEXT_CHARS = 12000

_WHAT = {"xid": "XID ", "kind": "", "outcome": ""}  # labels, and the prefix of their values
_SAME_AS = re.compile(r"Same as (\w+)")  # a reference to the text of another alert


@dataclass(frozen=True, slots=True)
class Notification:
    """One alert of a message: new, `repeated` because it still fires, or resolved at `resolved_at` (Unix time)."""

    alert: Alert
    repeated: bool = False
    resolved_at: float | None = None


@dataclass(frozen=True, slots=True)
class Message:
    """Content of one message; `standing` counts by name the alerts that were sent before and still fire."""

    host: str
    daemon_url: str  # without a slash at the end
    notifications: tuple[Notification, ...] = ()
    standing: Mapping[str, int] = field(default_factory=dict)
    test: str = ""  # severities that the target gets, in a test message

    @property
    def firing(self) -> list[Notification]:
        """Notifications of firing alerts by severity; the first of each name comes before the second of any."""
        return _rank_fairly(each for each in self.notifications if each.resolved_at is None)

    @property
    def over(self) -> list[Notification]:
        """Notifications of resolved alerts, in the same order."""
        return _rank_fairly(each for each in self.notifications if each.resolved_at is not None)

    @property
    def severity(self) -> str:
        """Highest severity of the firing alerts; empty if none fires."""
        return min((each.alert.severity for each in self.firing), key=SEVERITY_RANK.__getitem__, default="")

    @property
    def title(self) -> str:
        """Subject line."""
        if self.test:
            return f"[TEST] {self.host}: test notification from gpuwarden"
        notifications = self.firing or self.over
        mark = self.severity.upper() or "RESOLVED"
        if notifications and all(each.repeated for each in notifications):
            mark += ", STILL FIRING"
        if len(notifications) == 1 and self.firing:
            summary = clean(notifications[0].alert.description)
        else:
            count = f"{len(notifications)} alerts: " if len(notifications) > 1 else ""
            summary = count + summarize(notifications)
        return clean(f"[{mark}] {self.host}: {summary}", MAX_TITLE_CHARS)

    @property
    def text(self) -> str:
        """Body in plain text, of several lines."""
        text = "\n".join(self._lines()).strip() + "\n"
        return text if len(text) <= MAX_TEXT_CHARS else text[:MAX_TEXT_CHARS].rpartition("\n")[0] + "\n(cut)\n"

    def _lines(self) -> Iterator[str]:
        if self.test:
            yield f"This is a test. Alerts of {self.host} with severity {self.test} are sent here."
            yield "No action is needed."
            return
        listed, rest = self.firing[:MAX_LISTED], self.firing[MAX_LISTED:]
        links = AlertLinks(daemon_url=self.daemon_url)
        for rule, notifications in group_by_condition(listed):
            yield f"{rule.severity.upper()} {rule.name}: {fill_text(rule.title)}"
            for each in notifications:
                yield f"- {clean(each.alert.description, MAX_DESCRIPTION_CHARS)}"
                yield f"  {format_facts(each)}"
                yield f"  Page: {clean(fill_labels(links.dashboard(rule), each.alert.labels), MAX_NAME_CHARS)}"
            yield f"Action: {render_plain(action_text(rule))}"
            yield f"Meaning: {render_plain(fill_text(rule.meaning))}"
            yield f"Runbook: {links.runbook(rule)}"
            yield ""
        if rest:
            yield f"And {len(rest)} more: {summarize(rest)}."
            yield ""
        if self.over:
            yield "RESOLVED"
            for each in self.over[:MAX_LISTED]:
                yield f"- {each.alert.name}: {format_subject(each.alert)}. {format_facts(each)}"
            if self.over[MAX_LISTED:]:
                yield f"- {len(self.over) - MAX_LISTED} more: {summarize(self.over[MAX_LISTED:])}."
            yield ""
        if self.standing:
            yield f"Still firing: {format_standing(self.standing)}."


def clean(text: str, longest: int = MAX_DESCRIPTION_CHARS) -> str:
    """Return the text as one line of at most `longest` characters."""
    line = " ".join(text[: 4 * longest].split())
    shown = "".join(each if each.isprintable() else "\N{REPLACEMENT CHARACTER}" for each in line)
    return shown if len(shown) <= longest else f"{shown[: longest - 1]}…"


def format_subject(alert: Alert) -> str:
    """Return the subject of an alert: its run and GPU, and what happened to them."""
    labels = alert.labels
    run = labels.get("run_name") or labels.get("run_id")
    who = [f"run {clean(run, MAX_NAME_CHARS)}"] if run else []
    who += [f"GPU {clean(labels['gpu'], MAX_NAME_CHARS)}"] if "gpu" in labels else []
    kinds = [f"{word}{clean(labels[name], MAX_NAME_CHARS)}" for name, word in _WHAT.items() if name in labels]
    what = ", ".join([*kinds, *([alert.ending] if alert.ending else [])])
    if not who:
        return what or "host"
    return " on ".join(who) + (f" ({what})" if what else "")


def format_facts(notification: Notification) -> str:
    """Format the owner and start of an alert, or the time it fired."""
    alert = notification.alert
    if notification.resolved_at is not None:
        return f"Fired from {format_time(alert.since)} to {format_time(notification.resolved_at)}."
    who = f"Owner: {clean(alert.owner, MAX_OWNER_CHARS)}. " if alert.owner.strip() else ""
    run = alert.labels.get("run_id", "")
    more = f" Details: gpuwarden runs show {clean(run, MAX_NAME_CHARS)}" if run else ""
    return f"{who}Since {format_time(alert.since)}{' (sent before)' if notification.repeated else ''}.{more}"


def format_time(at: float) -> str:
    """Format a Unix time in the machine's time zone."""
    return time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(at))


def format_utc(at: float, timespec: str = "seconds") -> str:
    """Format a Unix time as RFC 3339 in UTC."""
    return datetime.fromtimestamp(at, timezone.utc).isoformat(timespec=timespec).replace("+00:00", "Z")


def action_text(rule: Condition) -> str:
    """Return the action for an alert, in Markdown."""
    other = _SAME_AS.match(rule.action)
    if other is None:
        return fill_text(rule.action)
    return action_text(CONDITIONS[other[1]]).rstrip(".") + rule.action[other.end() :]


def fill_text(markdown: str) -> str:
    """Return a text of a rule with its placeholders replaced."""
    return fill_places(markdown, _values())


@cache
def _values() -> Mapping[str, str]:
    """Return the placeholders' values, computed once: a message can have hundreds of alerts."""
    return Choices().values()


def group_by_condition(notifications: Iterable[Notification]) -> Iterator[tuple[Condition, list[Notification]]]:
    """Group notifications by rule, in the order of each rule's first one."""
    found: dict[str, list[Notification]] = {}
    for each in notifications:
        found.setdefault(each.alert.name, []).append(each)
    for name, group in found.items():
        yield CONDITIONS[name], group


def summarize(notifications: Iterable[Notification]) -> str:
    """List the subjects of each alert; the alerts share MAX_REST_CHARS equally."""
    groups = [
        (rule.name, [format_subject(each.alert) for each in group]) for rule, group in group_by_condition(notifications)
    ]
    room = max(MAX_REST_CHARS // max(len(groups), 1), MAX_NAME_CHARS)
    return "; ".join(
        f"{name}{f' ({len(who)})' if len(who) > 1 else ''}: {clean(', '.join(dict.fromkeys(who)), room)}"
        for name, who in groups
    )


def format_standing(standing: Mapping[str, int]) -> str:
    """Count alerts by name."""
    return ", ".join(f"{name} ({count})" if count > 1 else name for name, count in sorted(standing.items()))


def _natural_key(text: str) -> list[tuple[int, str]]:
    """Return a sort key that places GPU 10 after GPU 9."""
    return [(int(digits[:18] or 0), rest) for digits, rest in re.findall(r"([0-9]*)([^0-9]*)", text, re.ASCII)]


def _rank_fairly(notifications: Iterable[Notification]) -> list[Notification]:
    """Sort by severity, then the first alert of each name before the second of any, so that no name is cut off."""
    ordered = sorted(notifications, key=lambda each: (_natural_key(format_subject(each.alert)), each.alert.key))
    seen: Counter[str] = Counter()
    ranked = []
    for each in ordered:
        name = each.alert.name
        ranked.append(((SEVERITY_RANK[each.alert.severity], seen[name]), each))
        seen[name] += 1
    return [each for _rank, each in sorted(ranked, key=lambda pair: pair[0])]
