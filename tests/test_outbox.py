"""What a receiver of alerts is still to be told: what comes when, what replaces what, and what is given up."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

from gpuwarden.alerts.alert import Alert
from gpuwarden.alerts.outbox import BATCH, MOST_ENDED, Outbox, Post

RESEND = 30.0
LASTS = 120.0


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        """Tell the time."""
        return self.now


def alert(number: int = 0, text: str = "") -> Alert:
    """Make one of many."""
    return Alert("RunStalled", {"run_id": str(number)}, text, 1.0)


def outbox() -> tuple[Outbox, Clock]:
    """Make an empty one."""
    clock = Clock()
    return Outbox(RESEND, LASTS, clock), clock


def due(box: Outbox) -> list[Post]:
    """Take what is due now; nothing where its thread would wait."""
    return box.take() if box.pending else []


def tell(box: Outbox) -> list[Post]:
    """Take and tell what is due."""
    posts = due(box)
    box.told(posts)
    return posts


def test_alert_is_told_at_once_and_again() -> None:
    """It is told with what is said of it then, until it is over, and that it is over once."""
    box, clock = outbox()
    box.see([alert(text="a")], [])
    assert tell(box) == [Post(alert(text="a"), over=None)]
    clock.now += RESEND - 1
    box.see([alert(text="b")], [])
    assert tell(box) == []
    clock.now += 1
    assert tell(box) == [Post(alert(text="b"), over=None)]
    box.see([], [alert(text="c")])
    clock.now += RESEND - 1
    assert tell(box) == []
    clock.now += 1
    assert tell(box) == [Post(alert(text="c"), over=RESEND)]
    clock.now += RESEND
    box.see([], [])
    assert tell(box) == []


def test_what_was_not_told_stays_due() -> None:
    """A message that was not taken is given out again, but not before the rest."""
    box, clock = outbox()
    box.see([alert()], [])
    first = due(box)
    box.rest(5)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(box.take)
        clock.now += 5
        box.see([alert(), alert(1)], [])  # wakes it
        assert first[0] in waiting.result(10)


def test_end_that_was_not_told_is_left_to_expire() -> None:
    """Once the receiver has taken it for over by itself, there is nothing to say."""
    box, clock = outbox()
    box.see([alert()], [])
    tell(box)
    box.see([], [alert()])
    clock.now += LASTS - 1
    box.see([], [])
    assert due(box) == [Post(alert(), over=LASTS - 1)]
    clock.now += 1
    box.see([], [])
    assert due(box) == []
    assert box.dropped == 0


def test_alert_nobody_could_be_told_of_is_counted() -> None:
    """One that is over before it was ever tried is given up."""
    box, _clock = outbox()
    box.see([alert()], [])
    box.see([], [alert()])
    assert due(box) == []
    assert box.dropped == 1


def test_alert_that_was_never_taken_is_counted() -> None:
    """It was tried, and was over before the receiver came back: late enough that it is forgotten, or in between."""
    for late in (RESEND, LASTS):
        box, clock = outbox()
        box.see([alert()], [])
        due(box)
        box.see([], [alert()])
        clock.now += late
        box.see([], [])
        tell(box)
        assert box.dropped == 1


def test_alert_that_comes_back() -> None:
    """It is told anew, whatever has become of the word that it was over."""
    box, clock = outbox()
    box.see([alert()], [])
    tell(box)
    box.see([], [alert()])
    clock.now += RESEND
    over = due(box)
    box.see([alert(text="again")], [])
    box.told(over)
    assert tell(box) == [Post(alert(text="again"), over=None)]


def test_end_while_its_message_is_under_way() -> None:
    """What ends in between is told as over, though the message that it fires was taken."""
    box, clock = outbox()
    box.see([alert()], [])
    posts = due(box)
    box.see([], [alert()])
    box.told(posts)
    clock.now += RESEND
    assert tell(box) == [Post(alert(), over=RESEND)]


def test_messages_and_ends_are_bounded() -> None:
    """Many go in several messages, and of too many ends the oldest are given up and counted."""
    box, clock = outbox()
    many = [alert(number) for number in range(MOST_ENDED + 10)]
    box.see(many, [])
    sizes = []
    while posts := tell(box):
        sizes.append(len(posts))
    assert sum(sizes) == len(many)
    assert max(sizes) == BATCH
    for each in many:
        clock.now += 0.001
        box.see([], [each])
    assert box.dropped == 10
    clock.now += RESEND
    assert due(box)[0].alert == many[10]


def test_close_ends_the_wait() -> None:
    """The thread that waits gets nothing, and may end."""
    box, _clock = outbox()
    box.see([alert()], [])
    tell(box)
    box.see([alert()], [])
    threading.Timer(0.05, box.close).start()
    assert box.take() == []
