"""Alerts for Slack's incoming webhooks, and for those who take the same form, as one text in Slack's own marks.

`text` alone, and no blocks: Mattermost and Rocket.Chat know no other.
"""

from __future__ import annotations

from collections.abc import Iterator

from gpuwarden.alerts.notify.markdown import Piece, inert, link, pieces
from gpuwarden.alerts.notify.message import (
    LONGEST_DESCRIPTION,
    MOST_LISTED,
    Message,
    Told,
    by_rule,
    clean,
    facts,
    page,
    still,
    subject,
    summed_up,
    what_to_do,
)
from gpuwarden.alerts.notify.post import host_of, post
from gpuwarden.alerts.notify.target import digest_of
from gpuwarden.config import Notify
from gpuwarden.secret import Secret

LONGEST_TEXT = 10000  # characters; Slack cuts at 40000

SIGNS = {"critical": "🔴", "warning": "🟠", "info": "🔵"}
OVER, TEST = "✅", "🧪"


class Slack:
    """Posts to one channel."""

    def __init__(self, name: str, url: Secret, settings: Notify) -> None:
        self.name = name
        self.least = settings.slack_severity
        self.place = f"Slack's webhook at {host_of(url)}"
        self._url = url
        self._settings = settings

    def whom(self) -> str | None:
        """Return a digest of the address."""
        return digest_of(self._url)

    def send(self, message: Message) -> None:
        """Post it."""
        post(self._url, {"text": text(message), "link_names": False, "unfurl_links": False}, self._settings)


def text(message: Message) -> str:
    """Return the message in Slack's marks."""
    whole = "\n".join(_lines(message)).strip()
    return whole if len(whole) <= LONGEST_TEXT else whole[:LONGEST_TEXT].rpartition("\n")[0] + "\n(cut)"


def escaped(text: str) -> str:
    """Return text in which nothing is a link or calls somebody: names of runs are other people's."""
    return inert(text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;"))


def _lines(message: Message) -> Iterator[str]:
    sign = TEST if message.test else SIGNS.get(message.severity, OVER)
    yield f"{sign} {_bold(message.title)}"
    if message.test:
        yield escaped(message.text.strip())
        return
    firing, over = message.firing, message.over
    for rule, told in by_rule(firing[:MOST_LISTED]):
        yield f"{SIGNS[rule.severity]} {_bold(rule.name)}: {escaped(rule.summary)}"
        for each in told:
            yield f"• {escaped(clean(each.alert.description, LONGEST_DESCRIPTION))} {escaped(facts(each))}"
        yield f"*Do:* {marked(what_to_do(rule), message.docs)} More: {_link(page(rule), page(rule), message.docs)}"
    if firing[MOST_LISTED:]:
        yield f"And {len(firing) - MOST_LISTED} more: {escaped(summed_up(firing[MOST_LISTED:]))}."
    for each in over[:MOST_LISTED]:
        yield _over(each)
    if over[MOST_LISTED:]:
        yield f"{OVER} {len(over) - MOST_LISTED} more: {escaped(summed_up(over[MOST_LISTED:]))}."
    if message.standing:
        yield f"Told before, and still there: {escaped(still(message.standing))}."


def _over(told: Told) -> str:
    return f"{OVER} {told.alert.name}: {escaped(subject(told.alert))}. {escaped(facts(told))}"


def marked(markdown: str, docs: str) -> str:
    """Return a rule's text with Slack's marks for its own."""
    return "".join(_marked(piece, docs) for piece in pieces(markdown))


def _marked(piece: Piece, docs: str) -> str:
    if piece.code:
        return f"`{escaped(piece.text)}`"
    if piece.emphasis:
        return f"_{escaped(piece.text)}_"
    return _link(piece.text, piece.target, docs) if piece.target else escaped(piece.text)


def _link(name: str, target: str, docs: str) -> str:
    where = link(target, docs)
    if "://" in where:
        return f"<{where}|{escaped(name)}>"
    return where if name == target.partition("#")[0] or name == target else f"{escaped(name)} ({where})"


def _bold(text: str) -> str:
    # A star within would end it.
    return f"*{escaped(text.replace('*', '∗'))}*"  # noqa: RUF001 - looks like one, and is none
