"""Many descriptors, few wake-ups, and nobody is forgotten."""

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Iterator

import pytest

from gpuwarden.runs import rounds
from gpuwarden.runs.rounds import BURST, Rounds

PAUSE_SECONDS = 0.05


class Pipes:
    """Pipes that rounds look after, and the bytes that were read of each, in order."""

    def __init__(self) -> None:
        self.open: list[int] = []
        self.read: list[int] = []

    def add(self, to: Rounds, content: bytes = b"") -> int:
        """Add one with something in it; return its number."""
        number = len(self.open) // 2
        out, into = os.pipe()
        self.open += [out, into]
        os.write(into, content)
        to.add(out, lambda: self._take(number, out))
        return number

    def _take(self, number: int, out: int) -> None:
        os.read(out, 1)
        self.read.append(number)

    def write(self, number: int, content: bytes) -> None:
        """Write into one."""
        os.write(self.open[2 * number + 1], content)

    async def until(self, condition: Callable[[], object]) -> None:
        """Let the loop run until the condition holds, at most 10 s."""

        async def wait() -> None:
            while not condition():
                await asyncio.sleep(0.001)

        await asyncio.wait_for(wait(), 10)

    async def until_read(self, count: int) -> None:
        """Let the loop run until so many bytes were read."""
        await self.until(lambda: len(self.read) == count)


@pytest.fixture
def pipes() -> Iterator[Pipes]:
    """Have no pipe yet; close all in the end."""
    made = Pipes()
    yield made
    for each in made.open:
        with contextlib.suppress(OSError):
            os.close(each)


def test_all_are_called_for(pipes: Pipes) -> None:
    """Of more than the kernel hands out at once each is called for, for as long as it has something, and no more."""

    async def scenario() -> None:
        with running() as there:
            for _ in range(40):
                pipes.add(there, b"xy")
            await pipes.until(lambda: len(pipes.read) == 80)
            pipes.write(7, b"z")
            await pipes.until(lambda: len(pipes.read) == 81)
        assert sorted(pipes.read[:80]) == sorted([*range(40)] * 2)
        assert pipes.read[80] == 7

    asyncio.run(scenario())


def test_one_that_floods_waits_for_the_others(pipes: Pipes) -> None:
    """In a round nobody is called for more than BURST times, and all others that have something are, too."""

    async def scenario() -> None:
        with running() as there:
            flood = pipes.add(there, b"x" * 10 * BURST)
            others = [pipes.add(there, b"x") for _ in range(40)]
            await pipes.until(lambda: pipes.read)
            first_round = list(pipes.read)
            assert first_round.count(flood) <= BURST
            assert set(first_round) == {flood, *others}
            await pipes.until(lambda: pipes.read.count(flood) == 10 * BURST)

    asyncio.run(scenario())


def test_short_rounds_go_on_where_they_ended(pipes: Pipes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the time suffices for some of those who flood it is everybody's turn before it is anybody's again."""
    monkeypatch.setattr(rounds, "LONGEST_SECONDS", 0.0)

    async def scenario() -> None:
        with running() as there:
            numbers = [pipes.add(there, b"x" * 100) for _ in range(40)]
            await pipes.until(lambda: len(pipes.read) >= 40)
        assert set(pipes.read[:48]) == set(numbers)

    asyncio.run(scenario())


def test_pause_between_rounds(pipes: Pipes) -> None:
    """What comes right after a round waits for the next."""

    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        with running() as there:
            number = pipes.add(there, b"x")
            await pipes.until(lambda: pipes.read)
            first = loop.time()
            for count in range(2, 6):
                pipes.write(number, b"x")
                await pipes.until_read(count)
            assert loop.time() - first > 3 * PAUSE_SECONDS  # a lower bound, which no load of the machine breaks

    asyncio.run(scenario())


def test_busy_ones_are_not_watched_anew(pipes: Pipes) -> None:
    """While each round finds something the loop is not told to watch; once none does, what comes is read again."""

    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        watched: list[object] = []
        add_reader = loop.add_reader

        def counted(what: object, callback: Callable[[], object]) -> None:
            watched.append(what)
            add_reader(what, callback)  # type: ignore[arg-type] # a descriptor

        with running() as there:
            number = pipes.add(there, b"x")
            await pipes.until(lambda: pipes.read)
            loop.add_reader = counted  # type: ignore[method-assign, assignment]
            pipes.write(number, b"x" * 10 * BURST)  # for ten rounds
            await pipes.until_read(1 + 9 * BURST)
            assert not watched
            await pipes.until(lambda: watched)
            assert len(pipes.read) == 1 + 10 * BURST
            pipes.write(number, b"x")
            await pipes.until_read(2 + 10 * BURST)
            assert len(watched) == 1

    asyncio.run(scenario())


def test_a_call_that_fails_costs_the_others_nothing(pipes: Pipes) -> None:
    """An error of our own is told by the loop, and rounds go on."""
    told: list[dict[str, object]] = []

    async def scenario() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))
        with running() as there:
            good, bad = pipes.add(there), pipes.add(there)
            out = pipes.open[2 * bad]
            there.remove(out)

            def fail() -> None:
                os.read(out, 1)
                raise ArithmeticError

            there.add(out, fail)
            for count in range(1, 6):
                pipes.write(good, b"x")
                pipes.write(bad, b"x")
                await pipes.until_read(count)
                await pipes.until(lambda count=count: len(told) == count)  # type: ignore[misc]
        assert all(isinstance(each["exception"], ArithmeticError) for each in told)

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("took", "pause"),
    [(0.001, PAUSE_SECONDS), (0.003, 0.06), (0.02, 1.5 * PAUSE_SECONDS), (0.04, 0.1), (0.08, 0.2), (60.0, 0.25)],
)
def test_pause_by_what_there_is_to_do(pipes: Pipes, took: float, pause: float) -> None:
    """It is longer where rounds take their time, lest they take a third of it; not where the daemon was stopped."""
    now = 100.0
    there = Rounds(PAUSE_SECONDS, lambda: now)
    number = pipes.add(there)
    out = pipes.open[2 * number]

    def work() -> None:
        nonlocal now
        os.read(out, 1)
        now += took

    there.remove(out)
    there.add(out, work)
    pipes.write(number, b"x")
    assert there._go_round()
    assert there._next - now == pytest.approx(pause)
    there._epoll.close()


def test_long_rounds_are_followed_by_long_pauses() -> None:
    """However much there is to do it takes a part of the time only."""
    took: list[float] = []

    def work() -> None:
        begin = time.monotonic()
        time.sleep(0.005)
        took.append(time.monotonic() - begin)

    async def scenario() -> float:
        out, into = os.pipe()
        there = Rounds(0.0)
        there.add(out, work)
        os.write(into, b"x")  # and nobody reads it
        begin = time.monotonic()
        there.start()
        while len(took) < 40:
            await asyncio.sleep(0.001)
        there.stop()
        os.close(out)
        os.close(into)
        return time.monotonic() - begin

    elapsed = asyncio.run(scenario())
    assert sum(took) / elapsed < 0.5


def test_removed_one_is_not_called_for(pipes: Pipes) -> None:
    """What a call removes is not called for in the same round, not even under the number of another's descriptor."""

    async def scenario() -> None:
        with running() as there:
            called: list[str] = []
            one, other = os.pipe(), os.pipe()
            new: list[int] = []

            def replace_other() -> None:
                called.append("one")
                os.read(one[0], 1)
                there.remove(other[0])
                os.close(other[0])
                new.extend(os.pipe())
                there.add(new[0], lambda: called.append("new"))

            there.add(one[0], replace_other)
            there.add(other[0], lambda: called.append("other"))
            os.write(one[1], b"x")  # the kernel names first what was ready first
            os.write(other[1], b"x")
            await asyncio.sleep(4 * PAUSE_SECONDS)
            assert new[0] == other[0]
            assert called == ["one"]
            pipes.open += [*one, other[1], *new]

    asyncio.run(scenario())


@contextlib.contextmanager
def running() -> Iterator[Rounds]:
    """Have rounds while the context lasts."""
    there = Rounds(PAUSE_SECONDS)
    there.start()
    try:
        yield there
    finally:
        there.stop()
