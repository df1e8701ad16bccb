"""Messages about alerts for people: bounded in length, one for all alerts that are sent together.

Names of runs, users and jobs are other people's: what would not print, or would begin a line of its own, is replaced.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache

from gpuwarden.alerts.alert import Alert
from gpuwarden.alerts.rule import AlertRule, filled
from gpuwarden.alerts.rules import ALERTS, Choices

MOST_LISTED = 12  # alerts that are told one by one, in one message; of the rest the subjects are
LONGEST_TITLE = 160  # characters, as are the others
LONGEST_NAME = 80
LONGEST_OWNER = 160
LONGEST_DESCRIPTION = 400
LONGEST_REST = 400
LONGEST_TEXT = 12000

RANK = {"critical": 0, "warning": 1, "info": 2}

_WHAT = {"xid": "XID ", "kind": "", "outcome": ""}  # labels, and what is said before their values
_AS_FOR = re.compile(r"as for (\w+)")  # a rule that has another's text
_MARKED = re.compile(r"\[(?P<link>[^\]]+)\]\((?P<target>[^)\s]+)\)|`(?P<code>[^`]+)`|\*(?P<emphasis>[^*\s][^*]*)\*")
_BEGIN = re.compile(r"^\[?[a-z]")  # also of a text that begins with a link


@dataclass(frozen=True, slots=True)
class Notification:
    """One alert of a message: new, `repeated` as it fires still, or resolved since `resolved_at`, in Unix time."""

    alert: Alert
    repeated: bool = False
    resolved_at: float | None = None


@dataclass(frozen=True, slots=True)
class Message:
    """Content of one message; `standing` counts by name the alerts that were sent before, and fire still."""

    host: str
    docs: str
    notifications: tuple[Notification, ...] = ()
    standing: Mapping[str, int] = field(default_factory=dict)
    test: str = ""  # of a test message: which alerts the target gets

    @property
    def firing(self) -> list[Notification]:
        """Those that fire, the gravest first, and of each name one before the second of any."""
        return _fairly(each for each in self.notifications if each.resolved_at is None)

    @property
    def over(self) -> list[Notification]:
        """Those that are over."""
        return _fairly(each for each in self.notifications if each.resolved_at is not None)

    @property
    def severity(self) -> str:
        """That of the gravest alert; empty where none fires."""
        return min((each.alert.rule.severity for each in self.firing), key=RANK.__getitem__, default="")

    @property
    def title(self) -> str:
        """One line that says the most."""
        if self.test:
            return f"[TEST] {self.host}: gpuwarden can reach you"
        told = self.firing or self.over
        mark = self.severity.upper() or "OVER"
        if told and all(each.repeated for each in told):
            mark += ", STILL"
        if len(told) == 1 and self.firing:
            said = clean(told[0].alert.description)
        else:
            count = f"{len(told)} alerts: " if len(told) > 1 else ""
            said = count + summed_up(told)
        return clean(f"[{mark}] {self.host}: {said}", LONGEST_TITLE)

    @property
    def text(self) -> str:
        """The whole, as plain text of several lines."""
        text = "\n".join(self._lines()).strip() + "\n"
        return text if len(text) <= LONGEST_TEXT else text[:LONGEST_TEXT].rpartition("\n")[0] + "\n(cut)\n"

    def _lines(self) -> Iterator[str]:
        if self.test:
            yield f"This is a test. Alerts of {self.host} of severity {self.test} come this way."
            yield "Nothing is wrong, and there is nothing to do."
            return
        listed, rest = self.firing[:MOST_LISTED], self.firing[MOST_LISTED:]
        for rule, told in by_rule(listed):
            yield f"{rule.severity.upper()} {rule.name}: {rule.summary}"
            for each in told:
                yield f"- {clean(each.alert.description, LONGEST_DESCRIPTION)}"
                yield f"  {facts(each)}"
            yield f"Do: {plain(what_to_do(rule), self.docs)}"
            yield f"What it means: {plain(texts(rule.means), self.docs)}"
            yield f"More: {self.docs}/{page(rule)}"
            yield ""
        if rest:
            yield f"And {len(rest)} more: {summed_up(rest)}."
            yield ""
        if self.over:
            yield "OVER"
            for each in self.over[:MOST_LISTED]:
                yield f"- {each.alert.name}: {subject(each.alert)}. {facts(each)}"
            if self.over[MOST_LISTED:]:
                yield f"- {len(self.over) - MOST_LISTED} more: {summed_up(self.over[MOST_LISTED:])}."
            yield ""
        if self.standing:
            yield f"Told before, and still there: {still(self.standing)}."


def clean(text: str, longest: int = LONGEST_DESCRIPTION) -> str:
    """Return text for one line, of at most so many characters."""
    line = " ".join(text[: 4 * longest].split())
    shown = "".join(each if each.isprintable() else "\N{REPLACEMENT CHARACTER}" for each in line)
    return shown if len(shown) <= longest else f"{shown[: longest - 1]}…"


def subject(alert: Alert) -> str:
    """Say in few words what an alert is about."""
    labels = alert.labels
    run = labels.get("run_name") or labels.get("run_id")
    who = [f"run {clean(run, LONGEST_NAME)}"] if run else []
    who += [f"GPU {clean(labels['gpu'], LONGEST_NAME)}"] if "gpu" in labels else []
    kinds = [f"{word}{clean(labels[name], LONGEST_NAME)}" for name, word in _WHAT.items() if name in labels]
    what = ", ".join([*kinds, *([alert.ending] if alert.ending else [])])
    if not who:
        return what or "the box"
    return " on ".join(who) + (f" ({what})" if what else "")


def facts(told: Notification) -> str:
    """Say whom it concerns and since when, or how long it was there."""
    alert = told.alert
    if told.resolved_at is not None:
        return f"It fired from {moment(alert.since)} to {moment(told.resolved_at)}."
    who = f"Owner: {clean(alert.owner, LONGEST_OWNER)}. " if alert.owner.strip() else ""
    run = alert.labels.get("run_id", "")
    more = f" On the box: gpuwarden runs show {clean(run, LONGEST_NAME)}" if run else ""
    return f"{who}Since {moment(alert.since)}{', told before' if told.repeated else ''}.{more}"


def plain(markdown: str, docs: str) -> str:
    """Return the text without marks; links lead to pages below `docs`."""

    def unmarked(found: re.Match[str]) -> str:
        if not found["target"]:
            return found["code"] or found["emphasis"]
        where = found["target"] if "://" in found["target"] else f"{docs}/{found['target']}"
        # A link that is named by its page needs no name in addition to its address.
        return where if found["link"] == found["target"].partition("#")[0] else f"{found['link']} ({where})"

    return _MARKED.sub(unmarked, markdown)


def moment(at: float) -> str:
    """Write a time as the box's clock has it."""
    return time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(at))


def what_to_do(rule: AlertRule) -> str:
    """Return what to do about an alert, in Markdown."""
    other = _AS_FOR.match(rule.do)
    if other is None:
        return texts(rule.do)
    return what_to_do(ALERTS[other[1]]).rstrip(".") + rule.do[other.end() :]


def texts(markdown: str) -> str:
    """Return a rule's text with its numbers, and with a capital letter at its start."""
    return _BEGIN.sub(lambda found: found[0].upper(), filled(markdown, _values()))


@cache
def _values() -> Mapping[str, str]:
    """Return what fills the places of rules' texts, made once: a message may have hundreds of alerts."""
    return Choices().values()


def page(rule: AlertRule) -> str:
    """Return where docs/ has more about it."""
    return f"alerts.md#{rule.name.lower()}"


def by_rule(told: Iterable[Notification]) -> Iterator[tuple[AlertRule, list[Notification]]]:
    """Give alerts by their rules, in the order in which the rules come first."""
    found: dict[str, list[Notification]] = {}
    for each in told:
        found.setdefault(each.alert.name, []).append(each)
    for name, group in found.items():
        yield ALERTS[name], group


def summed_up(told: Iterable[Notification]) -> str:
    """Name the subjects of alerts, by alert, each of which has its share of the room."""
    groups = [(rule.name, [subject(each.alert) for each in group]) for rule, group in by_rule(told)]
    room = max(LONGEST_REST // max(len(groups), 1), LONGEST_NAME)
    return "; ".join(
        f"{name}{f' ({len(who)})' if len(who) > 1 else ''}: {clean(', '.join(dict.fromkeys(who)), room)}"
        for name, who in groups
    )


def still(standing: Mapping[str, int]) -> str:
    """Count alerts by name."""
    return ", ".join(f"{name} ({count})" if count > 1 else name for name, count in sorted(standing.items()))


def _natural(text: str) -> list[tuple[int, str]]:
    """Give an order in which GPU 10 comes after GPU 9."""
    return [(int(digits[:18] or 0), rest) for digits, rest in re.findall(r"([0-9]*)([^0-9]*)", text, re.ASCII)]


def _fairly(told: Iterable[Notification]) -> list[Notification]:
    """Put the gravest first; within a severity the first of each name before the second of any: none is hidden."""
    ordered = sorted(told, key=lambda each: (_natural(subject(each.alert)), each.alert.key))
    seen: Counter[str] = Counter()
    ranked = []
    for each in ordered:
        name = each.alert.name
        ranked.append(((RANK[each.alert.rule.severity], seen[name]), each))
        seen[name] += 1
    return [each for _rank, each in sorted(ranked, key=lambda pair: pair[0])]
