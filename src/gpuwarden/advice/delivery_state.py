"""State of the advice to one run: messages sent, their counts, and events in its record."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from gpuwarden.host.process_key import ProcessKey
from gpuwarden.protocol.messages import ADVICE_KINDS, Advice, AdviceKind, Level
from gpuwarden.runs.run_events import RunEvent


@dataclass(frozen=True, slots=True)
class AdviceSubject:
    """Subject of advice: a GPU or MIG instance, and the resource, XID or process on it, as text."""

    kind: AdviceKind
    uuid: str
    of: str = ""


@dataclass(frozen=True, slots=True)
class AdviceMessage:
    """Advice to send to a run; `event` is added to the run's record once it is sent."""

    run: ProcessKey
    subject: AdviceSubject
    advice: Advice
    event: RunEvent | None = None


@dataclass(frozen=True, slots=True)
class AdviceRound:
    """Advice of one poll: messages to send, events for the records of runs by id, and limits that trigger a poll.

    The limits are bytes in use: `gpu_limits` by UUID of a GPU, `run_limits` of a run's allocator, by run id and UUID of
    the GPU or MIG instance.
    """

    messages: tuple[AdviceMessage, ...] = ()
    events: Mapping[str, tuple[RunEvent, ...]] = field(default_factory=dict)
    gpu_limits: Mapping[str, float] = field(default_factory=dict)
    run_limits: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    def events_with(self, sent: Iterable[AdviceMessage]) -> dict[str, list[RunEvent]]:
        """Return the events of each run, with those of the messages that were sent."""
        events = {run_id: list(each) for run_id, each in self.events.items()}
        for message in sent:
            if message.event is not None:
                events[message.run.run_id].append(message.event)
        return events


@dataclass(slots=True)
class DeliveryState:
    """State of one run's advice. Used by one event loop.

    `levels` are the last levels sent, by subject, while they are current. Cleared when the run reconnects, which then
    gets the current ones again. `recorded` are the levels in its record. `serial` is that of the last message.
    """

    connection: int = 0  # of the last advice
    serial: int = 0
    levels: dict[AdviceSubject, Level] = field(default_factory=dict)
    recorded: dict[AdviceSubject, Level] = field(default_factory=dict)
    sent: dict[AdviceKind, int] = field(default_factory=lambda: dict.fromkeys(ADVICE_KINDS, 0))
    co_tenant_at: float | None = None  # monotonic time of the last advice on a co-tenant
