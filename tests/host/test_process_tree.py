"""Usage of runs' processes, with real processes that work, write, end and are orphaned."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from services import sleeping_process, wait_until

from gpuwarden.host import process_tree, procfs
from gpuwarden.host.process_key import ProcessKey
from gpuwarden.host.process_tree import HostUsage, PresentProcesses, ProcessTrees

MIB = 2**20
TICKS = 4 / os.sysconf("SC_CLK_TCK")  # the kernel rounds each of four figures down
# A process that runs one command per line, and prints "done". A forked process runs the rest of the line.
SCRIPT = """
import os, signal, sys, time

def burn(seconds):
    end = time.process_time() + float(seconds)
    while time.process_time() < end:
        pass

def hold(mib):
    held.append(b"x" * (int(mib) << 20))

def write(path):
    with open(path, "wb") as file:
        file.write(b"x" * (8 << 20))
        os.fsync(file.fileno())

def fork(*words):
    pid = os.fork()
    if not pid:
        obey(words)
        if words[0] != "fork":
            print("done", os.getpid(), flush=True)
        time.sleep(600)
        os._exit(0)
    children.append(pid)

def stay():
    pass

def leave(*words):
    fork(*words) if words else None
    os._exit(0)

def end():
    os.kill(children[-1], signal.SIGKILL)

def wait():
    os.waitpid(children.pop(), 0)

def never_wait():
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)

def call(*words):
    fork("then_exit", *words)
    wait()

def then_exit(*words):
    obey(words)
    os._exit(0)

held, children = [], []

def obey(words):
    globals()[words[0]](*words[1:])

for line in sys.stdin:
    obey(line.split())
    if not line.startswith("fork"):
        print("done", os.getpid(), flush=True)
"""


class Program:
    """A process in its own session, which ends with all processes it forked."""

    def __init__(self) -> None:
        self._popen = subprocess.Popen(
            [sys.executable, "-S", "-c", SCRIPT],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.peer = peer(self._popen.pid)

    def do(self, line: str) -> int:
        """Send it a command; return the pid of the process that ran it."""
        assert self._popen.stdin
        assert self._popen.stdout
        self._popen.stdin.write(f"{line}\n")
        self._popen.stdin.flush()
        done, _, pid = self._popen.stdout.readline().partition(" ")
        assert done == "done", line
        return int(pid)

    def close(self) -> None:
        """End it and its children."""
        with self._popen:
            os.killpg(self._popen.pid, signal.SIGKILL)  # even without the program, its children may be alive


def peer(pid: int) -> ProcessKey:
    """Return a living process as the kernel identifies it for a connection."""
    stat = procfs.read_stat(pid)
    assert stat
    return ProcessKey(pid, os.getuid(), stat.start)


@pytest.fixture
def program() -> Iterator[Program]:
    """Yield a program that runs commands."""
    program = Program()
    yield program
    program.close()


def present(usage: HostUsage) -> PresentProcesses:
    """Return the processes that are present."""
    assert usage.present
    return usage.present


def test_workers_count_for_their_run(program: Program) -> None:
    """CPU and memory of a child and its child belong to the run, and both are counted."""
    trees = ProcessTrees()
    alone = trees.read([program.peer])[program.peer]
    assert present(alone).processes == 1
    program.do("fork burn 0.3")
    program.do("fork fork hold 64")
    with_workers = trees.read([program.peer])[program.peer]
    assert present(with_workers).processes == 4
    assert with_workers.cpu_seconds >= alone.cpu_seconds + 0.3 - TICKS
    assert present(with_workers).memory > present(alone).memory + 64 * MIB
    assert present(with_workers).cpus == len(os.sched_getaffinity(0))


def test_worker_that_was_waited_for_counts_once(program: Program) -> None:
    """The usage of an ended child stays in its run's counter, once, whether it was sampled or not."""
    trees = ProcessTrees()
    for seen in (True, False):
        before = trees.read([program.peer])[program.peer].cpu_seconds
        program.do("fork burn 0.3")
        if seen:
            assert before + 0.3 - TICKS <= trees.read([program.peer])[program.peer].cpu_seconds < before + 0.55
        program.do("end")
        program.do("wait")
        for _ in range(3):
            usage = trees.read([program.peer])[program.peer]
            assert before + 0.3 - TICKS <= usage.cpu_seconds < before + 0.55
            assert present(usage).processes == 1


def test_worker_without_a_wait_is_kept(program: Program) -> None:
    """If the parent ignores SIGCHLD, the children's usage in the last sample is kept."""
    trees = ProcessTrees()
    program.do("never_wait")
    worker = program.do("fork burn 0.5")
    before = trees.read([program.peer])[program.peer].cpu_seconds
    program.do("end")
    wait_until(lambda: not Path(f"/proc/{worker}").exists(), "the worker is gone")
    program.do("burn 0.2")
    assert before + 0.2 - TICKS <= trees.read([program.peer])[program.peer].cpu_seconds < before + 0.5


def test_worker_that_ends_during_sampling_counts_once(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that ends after its parent was read counts once, because the parent is read again."""
    trees = ProcessTrees()
    before = trees.read([program.peer])[program.peer].cpu_seconds
    worker = program.do("fork burn 0.5")
    trees.read([program.peer])
    read = procfs.read_process

    def ending(pid: int, start: int, before: procfs.ProcessSample | None) -> procfs.ProcessSample | None:
        if pid == worker and Path(f"/proc/{pid}").exists():
            program.do("end")
            program.do("wait")
        return read(pid, start, before)

    monkeypatch.setattr(procfs, "read_process", ending)
    for _ in range(3):
        assert before + 0.5 - TICKS <= trees.read([program.peer])[program.peer].cpu_seconds < before + 0.9


def test_zombie_keeps_its_usage_and_is_no_live_process(program: Program) -> None:
    """A worker that ended and is not yet waited for keeps its CPU time, and does not count as living."""
    trees = ProcessTrees()
    worker = program.do("fork burn 0.3")
    before = trees.read([program.peer])[program.peer]
    program.do("end")
    wait_until(lambda: (stat := procfs.read_stat(worker)) and stat.state == b"Z", "the worker is a zombie")
    after = trees.read([program.peer])[program.peer]
    assert after.cpu_seconds >= before.cpu_seconds
    assert (present(before).processes, present(after).processes) == (2, 1)


def test_orphan_still_belongs_to_its_run(program: Program) -> None:
    """A worker whose parent ended first is init's child, and still belongs to the run; so does its child."""
    trees = ProcessTrees()
    program.do("fork fork fork stay")
    before = trees.read([program.peer])[program.peer]
    tree = trees._trees[program.peer]
    (_, upper, orphan, last) = tree.members
    assert tree.members[orphan].parent == upper
    os.kill(upper, 9)
    wait_until(lambda: (stat := procfs.read_stat(orphan)) and stat.parent != upper, "the orphan is adopted")
    program.do("wait")
    for _ in range(3):
        after = trees.read([program.peer])[program.peer]
        assert present(after).processes == present(before).processes - 1
        assert after.cpu_seconds >= before.cpu_seconds
    assert last in tree.members
    os.kill(orphan, 9)
    wait_until(lambda: not Path(f"/proc/{orphan}").exists(), "the orphan is gone")
    assert trees.read([program.peer])[program.peer].cpu_seconds >= after.cpu_seconds


def test_counters_never_fall_while_workers_come_and_go(program: Program) -> None:
    """Counters only rise with short-lived workers, and end with the total usage."""
    trees = ProcessTrees()
    began = last = trees.read([program.peer])[program.peer].cpu_seconds
    for _ in range(10):
        assert program._popen.stdin
        assert program._popen.stdout
        program._popen.stdin.write("call call burn 0.05\n")
        program._popen.stdin.flush()
        for _ in range(25):
            now = trees.read([program.peer])[program.peer].cpu_seconds
            assert now >= last
            last = now
        program._popen.stdout.readline()
    used = trees.read([program.peer])[program.peer].cpu_seconds - began
    assert 0.5 - 10 * TICKS <= used < 0.9  # ten times 0.05 s and the forks


def test_io_is_counted_once(program: Program, tmp_path: Path) -> None:
    """Bytes written by a worker count once, also after it was waited for, when the kernel adds them to the parent."""
    trees = ProcessTrees()
    before = trees.read([program.peer])[program.peer]
    assert before.written_bytes is not None
    assert before.read_bytes is not None
    program.do(f"fork write {tmp_path}/worker")
    for line in ("stay", "end", "wait", "stay"):
        program.do(line)
        written = trees.read([program.peer])[program.peer].written_bytes
        assert written is not None
        assert 8 * MIB <= written - before.written_bytes < 16 * MIB
    assert trees.io_allowed


FOREIGN = """
import os, sys
from gpuwarden.host.process_key import ProcessKey
from gpuwarden.host.process_tree import ProcessTrees
if not os.getuid():
    os.setgroups([]); os.setgid(65534); os.setuid(65534)
    other = ProcessKey(int(sys.argv[1]), 0, int(sys.argv[2]))
else:
    from gpuwarden.host.procfs import stat
    other = ProcessKey(1, 0, int(stat(1)[19]))
trees = ProcessTrees()
usage = trees.read([other])[other]
now = usage.present
print(usage.read_bytes, usage.written_bytes, trees.io_allowed)
print(usage.cpu_seconds > 0, now.memory > 0, now.cpus > 0)
"""


def test_io_of_other_users_needs_a_permission(program: Program) -> None:
    """Without the permission a run's bytes are absent, and gpuwarden_access shows it; CPU and memory stay."""
    program.do("burn 0.05")
    command = [sys.executable, "-c", FOREIGN, str(program.peer.pid), str(program.peer.start)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("None None False\nTrue True True\n", "")


def test_nested_run_has_its_own_processes(program: Program) -> None:
    """A child that reports as a run counts as a separate run from then on."""
    trees = ProcessTrees()
    child = peer(program.do("fork fork burn 0.3"))
    before = trees.read([program.peer])[program.peer]
    assert present(before).processes == 3
    stat = procfs.read_stat(child.pid)
    assert stat
    parent = stat.parent
    for _ in range(2):
        usages = trees.read([program.peer, child])
        assert present(usages[program.peer]).processes == 2
        assert present(usages[child]).processes == 1
        assert usages[child].cpu_seconds >= 0.3 - TICKS
        assert usages[program.peer].cpu_seconds >= before.cpu_seconds  # it keeps what was counted before
    assert parent in trees._trees[program.peer].members


def test_ended_run_keeps_its_counters(program: Program) -> None:
    """Once the main process is gone only totals are left, even if a worker is still alive."""
    trees = ProcessTrees()
    program.do("fork burn 0.3")
    before = trees.read([program.peer])[program.peer]
    os.kill(program.peer.pid, 9)
    program._popen.wait()
    for _ in range(2):
        after = trees.read([program.peer])[program.peer]
        assert after.present is None
        assert after.cpu_seconds == before.cpu_seconds
    assert trees.read([]) == {}
    assert trees._known == {}


def test_other_process_with_the_pid_is_not_the_run(program: Program) -> None:
    """A pid that was reused, never existed, or is outside of this namespace has no usage."""
    program.do("fork stay")
    reused = ProcessKey(program.peer.pid, 0, program.peer.start - 1)
    assert (
        ProcessTrees().read([reused, ProcessKey(4194305, 0, 7), ProcessKey(0, 0, 1), ProcessKey(os.getpid(), 0, 0)])
        == {}
    )


def test_reused_pid_of_a_parent_has_no_children(program: Program) -> None:
    """A process older than the one that has its parent's pid now is not its child."""
    trees = ProcessTrees()
    trees.read([program.peer])
    pid, start = program.peer.pid, program.peer.start
    trees._known = {
        pid: procfs.ProcessEntry(1, 1, start),
        7: procfs.ProcessEntry(2, pid, start - 1),
        8: procfs.ProcessEntry(3, pid, start),
    }
    assert trees._assign({pid: program.peer}) == {program.peer: [pid, 8]}


def test_folder_of_another_process_is_read_again(program: Program) -> None:
    """A pid with a new folder in /proc is another process, and is read."""
    known = dict(procfs.list_processes({}))
    real = known[program.peer.pid]
    assert real.inode == Path(f"/proc/{program.peer.pid}").stat().st_ino
    stale = known | {program.peer.pid: procfs.ProcessEntry(real.inode + 1, 1, 2)}
    assert dict(procfs.list_processes(stale))[program.peer.pid] == real


def test_state_of_the_main_process(program: Program) -> None:
    """A process that waits for its next line sleeps; a stopped one is reported as stopped."""

    def state() -> str | None:
        return present(ProcessTrees().read([program.peer])[program.peer]).state

    wait_until(lambda: state() == "sleeping", "it sleeps")
    os.kill(program.peer.pid, signal.SIGSTOP)
    wait_until(lambda: state() == "stopped", "it is stopped")
    os.kill(program.peer.pid, signal.SIGCONT)


def test_processes_of_a_run_are_bounded(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the limit the youngest processes are left out and counted; known ones stay, so totals do not jump."""
    monkeypatch.setattr(process_tree, "MAX_PROCESSES", 2)
    trees = ProcessTrees()
    program.do("fork stay")
    trees.read([program.peer])
    seen = set(trees._trees[program.peer].members)
    program.do("fork stay")
    program.do("fork stay")
    assert present(trees.read([program.peer])[program.peer]).processes == 4
    assert set(trees._trees[program.peer].members) == seen
    assert trees.dropped == 2


def test_name_of_a_process_cannot_confuse() -> None:
    """Brackets and blanks in a process name do not shift the fields."""
    with Path("/proc/self/comm").open("r+") as comm:
        name = comm.read().strip()
    try:
        Path("/proc/self/comm").write_text("a) R 1 (b")
        assert peer(os.getpid()).start > 1
        stat = procfs.read_stat(os.getpid())
        assert stat
        assert stat.parent == os.getppid()
    finally:
        Path("/proc/self/comm").write_text(name)


def kill_without_wait(process: subprocess.Popen[bytes]) -> None:
    """Kill a process without waiting for it."""
    os.kill(process.pid, signal.SIGKILL)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)


def test_process_that_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process with the same start is alive; a zombie is not.

    Also if a container's system call filter refuses a pidfd.
    """
    for refused in (False, True):
        if refused:
            monkeypatch.setattr(os, "pidfd_open", raising(OSError(errno.EPERM, "refused")))
        with sleeping_process() as process:
            start = peer(process.pid).start
            lives = [procfs.is_alive(process.pid, each) for each in (start, 0, 7)]  # 0: unknown
            kill_without_wait(process)
            assert procfs.read_stat(process.pid)
            lives.append(procfs.is_alive(process.pid, start))
            process.wait()
            lives += [procfs.is_alive(process.pid, each) for each in (start, 0)]
            assert lives == [True, True, False, False, False, False]
    assert not procfs.is_alive(2**70, 0)


def test_process_hidden_in_proc(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel still shows whether the process exists; without a free descriptor it counts as alive."""
    monkeypatch.setattr(procfs, "_content", lambda _path: b"")
    with sleeping_process() as process:
        lives = [procfs.is_alive(process.pid, each) for each in (99, 0)]
        kill_without_wait(process)
        lives.append(procfs.is_alive(process.pid, 99))
        process.wait()
        lives.append(procfs.is_alive(process.pid, 0))
        assert lives == [True, True, False, False]
    monkeypatch.setattr(os, "pidfd_open", raising(OSError(errno.EMFILE, "too many open files")))
    assert procfs.is_alive(os.getpid(), 99)


def test_process_whose_main_thread_has_ended() -> None:
    """A process without its main thread continues, but has the state of an ended one."""
    program = "import threading, time, ctypes; threading.Thread(target=time.sleep, args=(600,)).start(); "
    program += "ctypes.CDLL(None).pthread_exit(None)"
    with subprocess.Popen([sys.executable, "-c", program]) as process:
        try:
            wait_until(lambda: (stat := procfs.read_stat(process.pid)) and stat.state == b"Z", "the main thread's end")
            assert procfs.is_alive(process.pid, peer(process.pid).start)
        finally:
            process.kill()


def raising(error: OSError) -> Callable[[int], int]:
    """Return a function that raises the error."""

    def refuse(_pid: int) -> int:
        raise error

    return refuse


def test_nearest_listed_ancestor() -> None:
    """A process belongs to itself, or to the nearest listed process above it; a hidden one to none."""
    with sleeping_process() as process:
        assert procfs.find_nearest_ancestor(process.pid, {process.pid, os.getpid()}) == process.pid
        assert procfs.find_nearest_ancestor(process.pid, {os.getpid(), os.getppid()}) == os.getpid()
        assert procfs.find_nearest_ancestor(process.pid, {os.getppid()}) == os.getppid()
        assert procfs.find_nearest_ancestor(process.pid, {2**30}) == 0
    assert procfs.find_nearest_ancestor(process.pid, {os.getpid()}) == 0
