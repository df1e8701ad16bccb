"""State of the advice to one run: what it was sent, how often, and what its record has of it."""

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
    """Advice that is to be sent to a run; `event` belongs in the run's record once it was sent."""

    run: ProcessKey
    subject: AdviceSubject
    advice: Advice
    event: RunEvent | None = None


@dataclass(frozen=True, slots=True)
class AdviceRound:
    """Advice of one poll: messages to be sent, events for the records of runs by id, and when there may be more.

    That is when more bytes are in use than `gpu_limits` has by UUID of a GPU, or `run_limits` by run id and UUID of the
    GPU or MIG instance, in the run's allocator.
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

    `levels` are those that the run knows: of each subject the level last sent, as long as it is current. Cleared when
    the run reconnects, which is then sent the current ones. `recorded` is what its record has. `serial` is the last
    message's.
    """

    connection: int = 0  # on which it last read advice
    serial: int = 0
    levels: dict[AdviceSubject, Level] = field(default_factory=dict)
    recorded: dict[AdviceSubject, Level] = field(default_factory=dict)
    sent: dict[AdviceKind, int] = field(default_factory=lambda: dict.fromkeys(ADVICE_KINDS, 0))
    neighbour_at: float | None = None  # monotonic: when it was last advised of one
