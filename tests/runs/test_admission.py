"""Limits on runs: of a user, of a user's new ones a minute, and of all; who makes room for a new run."""

from __future__ import annotations

from pathlib import Path

import pytest
from moved_clock import Clock

from gpuwarden.fairness import fair_eviction
from gpuwarden.fairness.subordinate_uids import READ_SECONDS, SubordinateUids
from gpuwarden.gpu.snapshot import Gpu
from gpuwarden.host.process_key import ProcessKey
from gpuwarden.protocol.codec import ProtocolError
from gpuwarden.protocol.messages import Hello
from gpuwarden.runs.registry import RunRegistry
from snapshots import GIB, gpu, snapshot

HELLO = Hello("resnet", "none", {"GPU:0": "GPU-0"})
VICTIM, ATTACKER = 1000, 1001


def process(pid: int, uid: int) -> ProcessKey:
    """Return a process."""
    return ProcessKey(pid, uid, 1)


class Host:
    """A registry on a host with one GPU."""

    def __init__(self, limit: int, user_limit: int = 2048, new_per_minute: int = 60_000) -> None:
        self.runs = RunRegistry(
            limit=limit, user_limit=user_limit, new_per_minute=new_per_minute, expiry=60.0, overhead=0
        )
        self.now = 0.0

    def start(self, pid: int, uid: int) -> bool:
        """Start a run; return whether it is admitted."""
        try:
            self.runs.receive(process(pid, uid), HELLO, self.now)
        except ProtocolError:
            return False
        return True

    def poll(self, *holders: int) -> list[int]:
        """Poll the GPU, on which these pids hold memory; return the pids of the runs."""
        self.now += 1.0
        return [run.peer.pid for run in self.runs.add_poll(snapshot(held_by(*holders)), self.now)]


def held_by(*pids: int) -> Gpu:
    """Return a GPU with these processes."""
    return gpu(0, held=dict.fromkeys(pids, GIB))


def test_new_runs_of_a_user_have_a_rate() -> None:
    """A user who starts runs without end gets a minute's worth at once, then one at a time; others are not affected."""
    host = Host(1000, new_per_minute=60)
    assert sum(host.start(pid, ATTACKER) for pid in range(1, 301)) == 60
    assert host.start(999, VICTIM)
    host.now += 1.0
    assert [host.start(pid, ATTACKER) for pid in (301, 302)] == [True, False]
    with pytest.raises(
        ProtocolError, match=r"too_many_new_runs: limit of 60 new runs a minute reached \(runs\.new_per"
    ):
        host.runs.receive(process(303, ATTACKER), HELLO, host.now)
    host.now += 3600.0
    host.runs.expire(host.now)
    assert sum(host.start(pid, ATTACKER) for pid in range(400, 600)) == 60


def test_user_with_the_most_runs_allowed() -> None:
    """At `runs.max_per_user` an ended run of the user makes room, and no run of another user does."""
    host = Host(100, user_limit=2)
    assert [host.start(pid, uid) for pid, uid in ((1, VICTIM), (2, ATTACKER), (3, ATTACKER))] == [True] * 3
    host.runs.exited(process(1, VICTIM), 0.5, 0)
    with pytest.raises(ProtocolError, match=r"limit of 2 runs of a user reached \(runs\.max_per_user\)"):
        host.runs.receive(process(4, ATTACKER), HELLO, host.now)
    host.runs.exited(process(2, ATTACKER), 0.5, 0)
    assert host.start(4, ATTACKER)
    assert host.poll() == [2, 1, 3, 4]
    assert host.poll() == [1, 3, 4]


def test_run_on_a_gpu_stays() -> None:
    """Runs without a GPU displace no run that uses one, however many users they are of."""
    host = Host(4)
    for pid in (1, 2, 3):
        host.start(pid, VICTIM)
    host.poll(1, 2, 3)
    admitted = [host.start(100 + number, 5000 + number) for number in range(700)]
    assert admitted.count(True) == 1  # the free place
    assert host.poll(1, 2, 3) == [1, 2, 3, 100]
    assert host.start(4, VICTIM) is False  # by the last poll, without a GPU
    host.poll(1, 2, 3, 4)
    assert host.start(4, VICTIM)
    assert host.poll(1, 2, 3, 4) == [1, 2, 3, 4]


def test_runs_on_gpus_are_shared_fairly() -> None:
    """Among runs that use GPUs the user with the most makes room for another user's."""
    host = Host(3)
    for pid in (1, 2, 3):
        host.start(pid, ATTACKER)
    host.poll(1, 2, 3, 4)
    assert host.start(4, VICTIM)
    assert host.poll(1, 2, 3, 4) == [1, 2, 4]
    assert host.runs.displaced == [process(3, ATTACKER)]


@pytest.fixture
def clock() -> Clock:
    """Return the clock of the subordinate uids."""
    return Clock()


@pytest.fixture
def subordinate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: Clock) -> SubordinateUids:
    """Give the attacker the subordinate uids from 100000."""
    (tmp_path / "subuid").write_text("mallory:100000:65536\n# comment\nbroken:x:1\n3000:200000:10\nldap:300000:5\n")
    (tmp_path / "passwd").write_text(f"root:x:0:0::/:/bin/sh\nmallory:x:{ATTACKER}:1::/:/bin/sh\n")
    found = SubordinateUids(tmp_path / "subuid", tmp_path / "passwd", clock)
    monkeypatch.setattr(fair_eviction, "find_user", found.find_user)
    monkeypatch.setattr("gpuwarden.runs.admission.find_user", found.find_user)
    return found


def test_subordinate_uids_are_their_users(subordinate: SubordinateUids, tmp_path: Path, clock: Clock) -> None:
    """A uid in a range of /etc/subuid is the user's; the file is read again each minute."""
    uids = (0, ATTACKER, 99_999, 100_000, 165_535, 165_536, 200_009, 200_010, 300_004)
    assert list(map(subordinate.find_user, uids)) == [0, 1001, 99_999, 1001, 1001, 165_536, 3000, 200_010, 300_000]
    (tmp_path / "subuid").unlink()
    assert subordinate.find_user(100_000) == 1001
    clock.sleep(READ_SECONDS)
    assert subordinate.find_user(100_000) == 100_000


@pytest.mark.usefixtures("subordinate")
def test_subordinate_uids_displace_nobody() -> None:
    """700 uids of one user's namespace have the share of one user: a run without a GPU stays too."""
    host = Host(4)
    assert [host.start(pid, VICTIM) for pid in (1, 2)] == [True, True]
    assert sum(host.start(100 + number, 100_000 + number) for number in range(700)) == 2
    assert host.poll() == [1, 2, 100, 101]
