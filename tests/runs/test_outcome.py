"""Outcome of a run for each case of evidence, and OOM kills parsed from the kernel log."""

from __future__ import annotations

import signal

from gpuwarden.analysis.memory.leak_detector import Leak
from gpuwarden.host.kernel_log import KernelRecord
from gpuwarden.host.oom_killer import PREFIXES, OomKill, parse_oom_kills
from gpuwarden.protocol.messages import End, Error
from gpuwarden.runs.outcome import Ending, Evidence, conclude

KILL = OomKill(7, in_cgroup=True, earliest=1.0, latest=1.0)
GOODBYE = End("exit")
FAILURE = End("uncaught ValueError", "failed")
OOM = Error("device_oom", "ResourceExhaustedError", "OOM when allocating tensor", "train", 9)
HOST_OOM = Error("host_oom", "MemoryError", "Unable to allocate 8 GiB", "train", 9)
ILLEGAL = Error("illegal_address", "InternalError", "an illegal memory access was encountered", "train", 9)
GROWTH = Leak(3 * 2**20, 12 * 2**30)
EXIT_3, CORE = 3 << 8, 0x80

CASES: dict[str, tuple[Evidence, str, str]] = {
    "goodbye, exit 0": (Evidence(GOODBYE, 0), "finished", "exit status 0; last message: exit"),
    "killed for memory that had grown": (
        Evidence(None, signal.SIGKILL, cgroup_oom_kills=1, host_leak=GROWTH),
        "out_of_memory",
        (
            "ended by SIGKILL; the OOM killer killed processes of its cgroup (kills: 1); the host memory of the "
            "run's processes had grown by 12.0 GiB at 180 MiB a minute"
        ),
    ),
    "ended, while memory grew": (
        Evidence(GOODBYE, 0, host_leak=GROWTH),
        "finished",
        "exit status 0; last message: exit",
    ),
    "goodbye alone": (Evidence(GOODBYE), "finished", "last message: exit"),
    "no goodbye, exit 0": (Evidence(None, 0), "finished", "exit status 0"),
    "exception": (Evidence(FAILURE, 1 << 8), "failed", "exit status 1; last message: uncaught ValueError"),
    "exception, status hidden": (Evidence(FAILURE), "failed", "last message: uncaught ValueError"),
    "sys.exit(3) after a goodbye": (Evidence(GOODBYE, EXIT_3), "failed", "exit status 3; last message: exit"),
    "no goodbye, exit 3": (Evidence(None, EXIT_3), "failed", "exit status 3"),
    "SIGTERM": (Evidence(None, signal.SIGTERM), "killed", "ended by SIGTERM"),
    "interrupted": (
        Evidence(End("uncaught KeyboardInterrupt", "failed"), signal.SIGINT),
        "killed",
        "ended by SIGINT; last message: uncaught KeyboardInterrupt",
    ),
    "real-time signal": (Evidence(None, 40), "killed", "ended by signal 40"),
    "SIGKILL": (Evidence(None, signal.SIGKILL), "killed", "ended by SIGKILL"),
    "SIGKILL by the OOM killer": (
        Evidence(None, signal.SIGKILL, KILL),
        "out_of_memory",
        "killed by the kernel's OOM killer: its cgroup was out of memory (kernel log)",
    ),
    "OOM killer, host": (
        Evidence(None, None, OomKill(7, in_cgroup=False, earliest=1.0, latest=1.0)),
        "out_of_memory",
        "killed by the kernel's OOM killer: the host was out of memory (kernel log)",
    ),
    "OOM killer, old kernel": (
        Evidence(None, None, OomKill(7, in_cgroup=None, earliest=1.0, latest=1.0)),
        "out_of_memory",
        "killed by the kernel's OOM killer: its cgroup or the host was out of memory (kernel log)",
    ),
    "OOM killer after its goodbye": (
        Evidence(GOODBYE, None, KILL),
        "out_of_memory",
        "killed by the kernel's OOM killer: its cgroup was out of memory (kernel log); last message: exit",
    ),
    "SIGKILL, kill in its cgroup": (
        Evidence(None, signal.SIGKILL, cgroup_oom_kills=1),
        "out_of_memory",
        "ended by SIGKILL; the OOM killer killed processes of its cgroup (kills: 1)",
    ),
    "status hidden, kill in its cgroup": (
        Evidence(cgroup_oom_kills=2),
        "out_of_memory",
        (
            "the process is gone without a last message, exit status unknown; "
            "the OOM killer killed processes of its cgroup (kills: 2)"
        ),
    ),
    "SIGTERM, kill in its cgroup": (Evidence(None, signal.SIGTERM, cgroup_oom_kills=1), "killed", "ended by SIGTERM"),
    "a worker was killed": (
        Evidence(FAILURE, 1 << 8, cgroup_oom_kills=1),
        "failed",
        "exit status 1; the OOM killer killed processes of its cgroup (kills: 1); last message: uncaught ValueError",
    ),
    "out of memory, not caught": (
        Evidence(End("uncaught ResourceExhaustedError", "failed"), 1 << 8, error=OOM),
        "out_of_memory",
        (
            "exit status 1; last message: uncaught ResourceExhaustedError; "
            "last error: ResourceExhaustedError, out of device memory"
        ),
    ),
    "out of host memory, not caught, status hidden": (
        Evidence(End("uncaught MemoryError", "failed"), error=HOST_OOM),
        "out_of_memory",
        "last message: uncaught MemoryError; last error: MemoryError, out of host memory",
    ),
    "out of memory, caught, then another exception": (
        Evidence(FAILURE, 1 << 8, error=OOM),
        "failed",
        ("exit status 1; last message: uncaught ValueError; last error: ResourceExhaustedError, out of device memory"),
    ),
    "out of memory, caught, then sys.exit(3)": (
        Evidence(GOODBYE, EXIT_3, error=OOM),
        "failed",
        "exit status 3; last message: exit; last error: ResourceExhaustedError, out of device memory",
    ),
    "out of memory, caught, finished": (
        Evidence(GOODBYE, 0, error=OOM),
        "finished",
        "exit status 0; last message: exit",
    ),
    "abort": (Evidence(None, signal.SIGABRT | CORE), "crashed", "ended by SIGABRT, with a core dump"),
    "abort after an XID": (
        Evidence(None, signal.SIGABRT, xids=(43, 31)),
        "crashed",
        (
            "ended by SIGABRT; just before, its GPU reported XID 31 (illegal address): "
            "A program accessed an address that is not mapped on the GPU"
        ),
    ),
    "abort after another XID": (
        Evidence(None, signal.SIGABRT, xids=(79, 45)),
        "crashed",
        (
            "ended by SIGABRT; just before, its GPU reported XID 79: "
            "The GPU has fallen off the bus: it no longer answers over PCIe"
        ),
    ),
    "abort after an error": (
        Evidence(None, signal.SIGABRT, error=ILLEGAL),
        "crashed",
        "ended by SIGABRT; last error: InternalError, an illegal address error",
    ),
    "abort at exit": (Evidence(GOODBYE, signal.SIGABRT), "crashed", "ended by SIGABRT; last message: exit"),
    "abort at exit, out of memory, not caught": (
        Evidence(End("uncaught ResourceExhaustedError", "failed"), signal.SIGABRT, error=OOM),
        "out_of_memory",
        (
            "ended by SIGABRT; last message: uncaught ResourceExhaustedError; "
            "last error: ResourceExhaustedError, out of device memory"
        ),
    ),
    "abort at exit, out of memory, caught": (
        Evidence(GOODBYE, signal.SIGABRT, error=OOM),
        "crashed",
        "ended by SIGABRT; last message: exit; last error: ResourceExhaustedError, out of device memory",
    ),
    "status hidden, after an XID": (
        Evidence(xids=(13,)),
        "crashed",
        (
            "the process is gone without a last message, exit status unknown; just before, its GPU reported XID 13 "
            "(illegal address): A kernel did something invalid, such as an out-of-bounds access"
        ),
    ),
    "status hidden, after the aftermath of something": (
        Evidence(xids=(45,)),
        "unknown",
        "the process is gone without a last message, exit status unknown",
    ),
    "SIGSEGV": (Evidence(None, signal.SIGSEGV), "crashed", "ended by SIGSEGV"),
    "SIGBUS": (Evidence(None, signal.SIGBUS), "crashed", "ended by SIGBUS"),
    "SIGFPE": (Evidence(None, signal.SIGFPE), "crashed", "ended by SIGFPE"),
    "SIGILL": (Evidence(None, signal.SIGILL), "crashed", "ended by SIGILL"),
    "nothing": (Evidence(), "unknown", "the process is gone without a last message, exit status unknown"),
    "caught error, finished": (Evidence(GOODBYE, 0, error=ILLEGAL), "finished", "exit status 0; last message: exit"),
}


def test_outcome_and_evidence() -> None:
    """Each case of evidence has its outcome, with a text that names the evidence."""
    concluded = {case: conclude(evidence) for case, (evidence, _outcome, _words) in CASES.items()}
    assert concluded == {case: (outcome, words) for case, (_evidence, outcome, words) in CASES.items()}


def test_exit_signal() -> None:
    """An ending names the signal that ended the process; only a status other than 0 is a failure."""
    endings = {status: Ending("unknown", "", 1.0, exit_status=status) for status in (None, 0, EXIT_3, signal.SIGTERM)}
    assert {status: ending.exit_signal for status, ending in endings.items() if ending.has_failed} == {
        EXIT_3: None,
        signal.SIGTERM: "SIGTERM",
    }
    assert endings[0].exit_signal is endings[None].exit_signal is None


# As several kernel versions print them (mm/oom_kill.c), one from this project's own tests.
LINES: dict[str, tuple[int, bool | None] | None] = {
    "oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=/,mems_allowed=0,oom_memcg=/a,task_memcg=/a,"
    "task=python3,pid=10111,uid=0": (10111, True),
    "oom-kill:constraint=CONSTRAINT_NONE,nodemask=(null),cpuset=user.slice,mems_allowed=0-1,global_oom,"
    "task_memcg=/user.slice/session-1.scope,task=python,pid=77,uid=1000": (77, False),
    "Memory cgroup out of memory: Killed process 10111 (python3) total-vm:221384kB, anon-rss:32384kB": (10111, True),
    "Out of memory: Killed process 4242 (python) total-vm:1kB, UID:1000 pgtables:1kB oom_score_adj:0": (4242, False),
    "Out of memory (oom_kill_allocating_task): Killed process 5 (a) total-vm:1kB": (5, False),
    "Killed process 31 (python) total-vm:1kB, anon-rss:1kB": (31, None),
    # Users choose process names.
    "oom-kill:constraint=CONSTRAINT_NONE,global_oom,task_memcg=/,task=x,pid=1,uid=0,pid=88,uid=5": (88, False),
    "oom-kill:constraint=CONSTRAINT_NONE,global_oom,task_memcg=/,task=x,pid=1,uid=0": (1, False),
    "Out of memory: Killed process 9 (Killed process 1) total-vm:1kB": (9, False),
    "oom-kill:constraint=CONSTRAINT_MEMCG,task_memcg=/a,task=python3,pid=all,uid=0": None,
    "Out of memory: Kill process 9 (python) score 900 or sacrifice child": None,
    "Out of memory and no killable processes...": None,
    "Killed process (python)": None,
}


def test_oom_kill_lines_of_the_kernel() -> None:
    """Each format gives the pid and whether a cgroup's limit was the reason; other lines give nothing."""
    assert [line for line in LINES if not line.encode().startswith(PREFIXES)] == []
    kills = {line: next(parse_oom_kills([KernelRecord(line.encode(), 1.0, 2.0, 3.0)]), None) for line in LINES}
    assert {line: kill and (kill.pid, kill.in_cgroup) for line, kill in kills.items()} == LINES
