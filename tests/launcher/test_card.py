"""Cause on the card, from what the processes of a program left."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpuwarden.launcher.card import Card, ProgramFacts, make_card
from gpuwarden.launcher.host_kills import HostKills
from gpuwarden.launcher.program import ProgramEnd
from gpuwarden.protocol.run_folder import ProcessLog

FAILED = 1 << 8  # status of wait(2)


def card(*errors: str, status: int = FAILED) -> Card:
    """Return the card of process 7, whose log has errors: head and traceback."""
    log = ProcessLog(7, "".join(f"\0{each}\0" for each in errors))
    facts = ProgramFacts(ProgramEnd(7, status, 0.0, 1.0), HostKills(None, 0), [log])
    return make_card(["python", "train.py"], facts, [], {})


def message(found: Card) -> str | None:
    """Return the message of the cause."""
    return found.explanation.root.text if found.explanation else None


@pytest.mark.parametrize(("status", "expected"), [(FAILED, "KeyError: 'of a thread'"), (0, None)])
def test_error_of_a_thread(status: int, expected: str | None) -> None:
    """It is a cause where the program failed, not where it finished."""
    assert message(card("7 1 thread KeyError\nKeyError: 'of a thread'", status=status)) == expected


def test_error_of_a_child() -> None:
    """It is a cause also where the program finished: a shell's status is that of its last command."""
    assert message(card("8 1 program KeyError\nKeyError: 'x'", status=0)) == "KeyError: 'x'"


def test_interrupt() -> None:
    """An error while tidying up is no cause; one from before the interrupt is."""
    tidying = "7 2 interrupt OSError\nKeyboardInterrupt\n\nOSError: cannot save"
    found = card(tidying)
    assert (found.outcome, found.evidence) == ("killed", "exit status 1 after an interrupt")
    assert (message(found), found.next_step) == (None, None)
    assert message(card(tidying, "8 1 program KeyError\nKeyError: 'before'")) == "KeyError: 'before'"


def test_first_rank_to_fail() -> None:
    """The error that came first is the cause, whichever process had it; other ranks only lost their peer."""
    echo = "RuntimeError: [gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:16943"
    first = "ValueError: label 11 of sample 93 is out of bounds"
    found = card(f"8 3 program RuntimeError\n{echo}", f"9 2 program ValueError\n{first}", "7 4 program E\nE: echo")
    assert message(found) == first


@pytest.mark.parametrize(("name", "outcome"), [("MemoryError", "out_of_memory"), ("KeyError", "failed")])
def test_out_of_memory(name: str, outcome: str) -> None:
    """The program's own error of memory is its outcome; one that a thread or a child had is not."""
    assert card(f"7 1 program {name}\n{name}").outcome == outcome
    assert card(f"8 1 program {name}\n{name}", f"7 1 thread {name}\n{name}").outcome == "failed"


def test_bare_assertion(tmp_path: Path) -> None:
    """The card has the condition."""
    script = tmp_path / "train.py"
    script.write_text("x = 3\nassert x == 2\n")
    trace = f'Traceback (most recent call last):\n  File "{script}", line 2, in <module>\nAssertionError'
    assert message(card(f"7 1 program AssertionError\n{trace}")) == "AssertionError: assert x == 2"
