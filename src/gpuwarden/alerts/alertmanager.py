"""The fast path: alerts go from the daemon to Alertmanager's API, a poll after what they tell of.

Each has the labels that Prometheus gives the one of the same rule, so that Alertmanager takes both for the same. To be
imported only where the configuration names an Alertmanager. Each Alertmanager has a thread of its own: one that hangs
costs nobody else anything, and the event loop nothing.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import socket
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any
from urllib.parse import quote_plus

from gpuwarden.alerts.alert import Alert
from gpuwarden.alerts.http_post import Poster, PostError
from gpuwarden.alerts.outbox import Outbox, Post
from gpuwarden.alerts.rules import Choices, annotated
from gpuwarden.config import Alertmanager, Config
from gpuwarden.quantities import lasting
from gpuwarden.state import Posted, State

log = logging.getLogger(__name__)

RESENDS_MISSED = 4  # as many as Prometheus allows for, until an alert that is told no more counts as over
FIRST_REST_SECONDS = 0.5  # after a failure, doubled with each further one
LONGEST_REST_SECONDS = 30.0
# Between two clocks, that matter: an answer has the time in whole seconds, and may have been on its way for some.
CLOCKS_DIFFER_SECONDS = 15.0
STOP_SECONDS = 2.0  # that the daemon's end waits for what is still to be told
_WILDCARDS = {"0.0.0.0", "::"}  # noqa: S104 - to recognise them
_LABEL = re.compile(r"{{ with \$labels\.(\w+) }}([^{]*){{ \. \| urlquery }}{{ end }}")


@dataclass(frozen=True, slots=True)
class Letterhead:
    """What stands on every alert of this daemon: its labels, and where it is to be looked at."""

    labels: Mapping[str, str]  # job and instance
    external: Mapping[str, str]  # as Prometheus' external_labels: an alert's own win
    generator: str
    choices: Choices
    links: dict[str, dict[str, str]] = field(default_factory=dict)  # by alert, with places for its labels; made once

    @classmethod
    def of(cls, config: Config) -> Letterhead:
        """Make it from the configuration."""
        host, port = config.web.listen
        reached = config.web.listen._replace(host=socket.gethostname() if host in _WILDCARDS else host, port=port)
        chosen = config.alertmanager
        return cls(
            labels={"job": chosen.job, "instance": chosen.instance or str(reached)},
            external=dict(chosen.labels),
            generator=f"http://{reached}/",
            choices=Choices(job=chosen.job, docs=chosen.docs, grafana=chosen.grafana),
        )

    def write(self, post: Post, now: float, lasts: float, ahead: float = 0.0) -> dict[str, Any]:
        """Write an alert as the API takes it; one that fires counts as over `lasts` seconds after `now` (Unix time).

        `now` is by the clock of who takes it, which is so many seconds `ahead` of this machine's.
        """
        alert = post.alert
        labels = {
            **self.external,
            **self.labels,
            **alert.labels,
            "alertname": alert.name,
            "severity": alert.rule.severity,
        }
        labels = {name: value for name, value in labels.items() if value}  # an empty label is none
        return {
            "labels": labels,
            "annotations": self._annotations(alert, labels),
            # Never after its end, which Alertmanager refuses: the clock may have been set back.
            "startsAt": _written(min(alert.since + ahead, now - (post.over or 0.0))),
            "endsAt": _written(now + lasts if post.over is None else now - post.over),
            "generatorURL": self.generator,
        }

    def _annotations(self, alert: Alert, labels: Mapping[str, str]) -> dict[str, str]:
        def where_known(found: re.Match[str]) -> str:
            text = labels.get(found[1], "")
            return f"{found[2]}{quote_plus(text)}" if text else ""

        if alert.name not in self.links:
            told = annotated(alert.rule, self.choices)
            self.links[alert.name] = {name: text for name, text in told.items() if name.endswith("_url")}
        owner = f" Owner: {alert.owner}." if alert.owner else ""
        links = {name: _LABEL.sub(where_known, text) for name, text in self.links[alert.name].items()}
        return {"summary": alert.rule.summary, "description": alert.description + owner, **links}


def _written(at: float) -> str:
    """Write Unix time as RFC 3339 has it."""
    return datetime.fromtimestamp(at, timezone.utc).isoformat(timespec="milliseconds")


class AlertmanagerSink:
    """Tells all Alertmanagers of the configuration. Used by one event loop."""

    def __init__(self, config: Config) -> None:
        chosen = config.alertmanager
        head = Letterhead.of(config)
        self._receivers = [Receiver(url, chosen, head) for url in dict.fromkeys(chosen.url)]

    def see(self, firing: Sequence[Alert], ended: Sequence[Alert], state: State) -> None:
        """See Sink."""
        del state  # the alerts say all that is told
        for each in self._receivers:
            each.outbox.see(firing, ended)

    async def stop(self) -> None:
        """Tell what is new, for a short time. What fires is left to expire: another daemon may go on with it."""
        end = time.monotonic() + STOP_SECONDS
        while any(each.outbox.pending for each in self._receivers) and time.monotonic() < end:  # noqa: ASYNC110 - threads
            await asyncio.sleep(0.02)
        for each in self._receivers:
            each.outbox.close()

    @property
    def posted(self) -> dict[str, Posted]:
        """What was told to each, by URL."""
        return {each.url: Posted(each.sent, each.failed, each.outbox.dropped) for each in self._receivers}


class Receiver:
    """One Alertmanager, and the thread that tells it."""

    def __init__(self, url: str, chosen: Alertmanager, head: Letterhead) -> None:
        self.url = url
        self.sent = 0  # alerts
        self.failed = 0  # messages
        self._lasts = RESENDS_MISSED * chosen.resend
        self.outbox = Outbox(chosen.resend, self._lasts)
        self._head = head
        self._poster = Poster(url, chosen)
        self._ahead = 0.0  # seconds by which the Alertmanager's clock is ahead of this machine's
        self._rest = FIRST_REST_SECONDS
        self._trouble: str | None = None
        # A daemon thread: one that waits for a name server cannot be ended, and must not keep the process from it.
        threading.Thread(target=self._run, name="alertmanager", daemon=True).start()

    def _run(self) -> None:
        while posts := self.outbox.take():
            try:
                self._post(posts)
            except PostError as error:
                self._fail(str(error))
                if error.refused:  # another time would be no better: with the others at the next turn
                    self.outbox.told(posts)
            except Exception:  # else nobody would be told any more
                log.exception("alerts cannot be sent to %s by an error of gpuwarden's own, please report it", self.url)
                self._fail("an error of gpuwarden's own")
            else:
                self._succeed(posts)

    def _post(self, posts: Iterable[Post]) -> None:
        """Post them, and once more where the clock that they were told by turns out to be none of the receiver's."""
        for _ in range(2):
            now = time.time() + self._ahead
            alerts = [self._head.write(each, now, self._lasts, self._ahead) for each in posts]
            clock = self._poster.post(json.dumps(alerts).encode())
            if clock is None or not self._corrects(clock - time.time()):
                return

    def _corrects(self, ahead: float) -> bool:
        """Take by how much the receiver's clock is ahead of this machine's; tell whether that is news."""
        if abs(ahead - self._ahead) < CLOCKS_DIFFER_SECONDS:
            return False
        self._ahead = ahead if abs(ahead) >= CLOCKS_DIFFER_SECONDS else 0.0
        if self._ahead:
            log.warning(
                "the clock of %s is %s %s this machine's: alerts are told by it",
                self.url, lasting(abs(ahead)), "ahead of" if ahead > 0 else "behind",
            )  # fmt: skip
        return True

    def _succeed(self, posts: Sequence[Post]) -> None:
        self.outbox.told(posts)
        self.sent += len(posts)
        self._rest = FIRST_REST_SECONDS
        if self._trouble is not None:
            log.warning("alerts are sent to %s again", self.url)
            self._trouble = None

    def _fail(self, why: str) -> None:
        """Count it, wait for longer each time, and tell each kind of trouble once."""
        self.failed += 1
        self.outbox.rest(self._rest)
        self._rest = min(2 * self._rest, LONGEST_REST_SECONDS)
        if why != self._trouble:
            self._trouble = why
            log.warning("alerts cannot be sent to %s: %s; it is tried again, and told once", self.url, why)
