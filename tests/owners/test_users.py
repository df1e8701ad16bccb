"""User names, from a database that may not respond."""

from __future__ import annotations

import os
import pwd
import threading

import pytest
from services import wait_until
from simulated_box import Clock

from gpuwarden.owners import users
from gpuwarden.owners.users import KEEP_SECONDS, WAIT_SECONDS, UserNames


def test_names_of_this_system() -> None:
    """A user is shown by name, and by number if the system does not know the name."""
    names = UserNames()
    wait_until(lambda: names.name(os.getuid()) == pwd.getpwuid(os.getuid()).pw_name, "the name")
    assert names.name(4_000_000_000) == "4000000000"
    assert names.name(2**40) == str(2**40)


def test_a_database_that_hangs_affects_names_only() -> None:
    """While the database hangs, users are shown by number and one thread waits; afterwards by name."""
    answers, asked = threading.Event(), list[str]()

    def look_up(uid: int) -> str:
        asked.append(threading.current_thread().name)
        answers.wait(60)
        return f"user{uid}"

    names = UserNames(look_up)
    before = threading.active_count()
    assert [names.name(uid) for uid in range(50)] == [str(uid) for uid in range(50)]
    assert len(asked) == 1
    assert threading.active_count() == before + 1
    answers.set()
    wait_until(lambda: [names.name(uid) for uid in range(50)] == [f"user{uid}" for uid in range(50)], "names")


def test_wait_per_minute_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Polls wait for a slow database at most for a minute's budget, and again in the next minute."""
    clock, answers, waits = Clock(), threading.Event(), list[float]()

    def look_up(uid: int) -> str:
        answers.wait(60)
        return f"user{uid}"

    names = UserNames(look_up, clock)
    names.name(1)
    assert names._patience <= 0
    monkeypatch.setattr(users, "wait", lambda _answers, seconds: waits.append(seconds))
    names.name(2)
    assert waits == []
    clock.sleep(61)
    names.name(3)
    assert waits == [WAIT_SECONDS]
    answers.set()


def test_an_old_name_stays_until_the_new_one_is_known() -> None:
    """Names are looked up again after a while; if the database fails then, the old names stay."""
    clock, database = Clock(), {7: "old"}
    names = UserNames(database.__getitem__, clock)
    wait_until(lambda: names.name(7) == "old", "the name")
    database[7] = "new"
    assert names.name(7) == "old"
    clock.sleep(KEEP_SECONDS + 1)
    wait_until(lambda: names.name(7) == "new", "the new name")
    del database[7]
    clock.sleep(KEEP_SECONDS + 1)
    names.name(7)
    names._thread.submit(lambda: None).result(60)  # after the answer
    assert names.name(7) == "new"
