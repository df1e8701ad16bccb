"""Cause on the card, from what the processes of a program left."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpuwarden.launcher.card import Card, ProgramFacts, make_card
from gpuwarden.launcher.card_formats import render_text
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


def test_error_of_the_program_counts_before_a_thread_s() -> None:
    """Threads may fail, and the program go on for hours."""
    thread, own = "7 1 thread KeyError\nKeyError: 'of a thread'", "7 2 program LookupError\nLookupError: own"
    assert message(card(thread, own)) == "LookupError: own"


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


@pytest.mark.parametrize(
    "echo",
    [
        "[/src/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:16943",
        "[/src/gloo/transport/tcp/pair.cc:547] Read error [10.1.0.4]:2201: Connection reset by peer",
        "Rank 0 failed to pass monitoredBarrier in 60000 ms",
        "[3] is retrieving ncclUniqueId by c10d store, but store->get('0') got error: Connection reset by peer",
    ],
)
def test_rank_that_lost_its_peer(echo: str) -> None:
    """The peer's error is the cause, also where it ends its process later: it may close the group first."""
    cause = "ValueError: label 11 of sample 93 is too large"
    for first, second in ((1, 2), (2, 1)):
        found = card(f"8 {first} program RuntimeError\nRuntimeError: {echo}", f"9 {second} program ValueError\n{cause}")
        assert message(found) == cause


def test_first_rank_to_fail() -> None:
    """The error that came first is the cause, whichever process had it."""
    found = card("8 3 program ValueError\nValueError: later", "9 2 program ValueError\nValueError: first")
    assert message(found) == "ValueError: first"


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


def stderr_card(stderr: bytes, *errors: str, status: int = FAILED) -> Card:
    """Return the card of process 7 with what it wrote."""
    log = ProcessLog(7, "".join(f"\0{each}\0" for each in errors))
    return make_card(
        ["train"], ProgramFacts(ProgramEnd(7, status, 0.0, 1.0), HostKills(None, 0), [log], stderr), [], {}
    )


@pytest.mark.parametrize(
    ("stderr", "status"),
    [
        (b"no dataset in /data/imagenet\n", FAILED),
        (b"run: kernels/gemm.cc:88: void launch(int): Assertion `tiles > 0' failed.\n", 6),
        (b"terminate called after throwing an instance of 'plan::Mismatch'\n  what():  plan of another GPU\n", 6),
        (b"double free or corruption (!prev)\n", 6),
    ],
)
def test_last_words(stderr: bytes, status: int) -> None:
    """The card has the words of an exit or an abort, which Python does not see."""
    found = stderr_card(b"epoch 1\n" * 40 + stderr, status=status)
    assert found.last_words[-1] == stderr.decode().splitlines()[-1].strip()
    assert f"stderr      {'epoch 1'}" in render_text(found, 100)


def test_error_in_last_words() -> None:
    """An error that a program only printed is the cause; not where the error that ended it is known."""
    printed = b"RuntimeError: CUDA error: an illegal memory access was encountered\n"
    assert message(stderr_card(printed)) == printed.decode().strip()
    assert message(stderr_card(printed, "7 1 program KeyError\nKeyError: 'x'")) == "KeyError: 'x'"
    assert message(stderr_card(printed, status=0)) is None
