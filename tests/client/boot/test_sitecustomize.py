"""Entry of gpuwarden into a Python program: it never changes what the program does, and keeps what ended it."""

from __future__ import annotations

import ast
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from instrumented_program import SITE, SOURCE, run_instrumented, run_instrumented_command

from gpuwarden.client.boot.program_error import MAX_FRAMES
from gpuwarden.protocol.run_folder import MAX_TEXT_BYTES

SAYS = "import sys; print('ran', *sys.argv[1:])"


def write(path: Path, text: str) -> Path:
    """Write a program."""
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize("flags", [[], ["-s"], ["-P"], ["-E"], ["-I"], ["-S"]])
def test_flags(tmp_path: Path, flags: list[str]) -> None:
    """The program runs the same under each of Python's flags; -E, -I and -S leave gpuwarden out."""
    if flags == ["-P"] and sys.version_info < (3, 11):
        pytest.skip("-P is new in Python 3.11")
    program = write(tmp_path / "program.py", f"{SAYS}\nprint(*map(type, sys.meta_path))\n")
    ended = run_instrumented(tmp_path, *flags, program, "an argument")
    assert (ended.status, ended.errors, ended.runs, ended.notes) == (0, "", [], [])
    ran, finders = ended.output.splitlines()
    assert ran == "ran an argument"
    assert ("_ImportHook" in finders) == (flags not in (["-E"], ["-I"], ["-S"]))


def test_module_command_and_shell(tmp_path: Path) -> None:
    """`-m`, `-c`, standard input, and a shell script around Python: an error of each is kept."""
    write(tmp_path / "module.py", "raise ValueError('of a module')")
    script = write(tmp_path / "script.sh", f"#!/bin/sh\n{sys.executable} -c 'raise KeyError(1)'\nexit 7\n")
    for number, (command, status, error) in enumerate(
        [
            ((sys.executable, "-m", "module"), 1, "ValueError"),
            ((sys.executable, "-c", "raise TypeError"), 1, "TypeError"),
            (("/bin/sh", str(script)), 7, "KeyError"),
        ]
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        ended = run_instrumented_command(folder, *command, path=(SOURCE, tmp_path))
        (note,) = ended.notes
        assert note.error is not None
        assert (ended.status, note.error.type, note.error.thread) == (status, error, False)
        assert f"{error}" in ended.errors  # printed as without gpuwarden


def test_path_is_the_program_s(tmp_path: Path) -> None:
    """`sys.path` and what a program imports are as without gpuwarden, and children start with it too."""
    program = write(
        tmp_path / "program.py",
        "import subprocess, sys\nprint(sys.path)\n"
        "if len(sys.argv) == 1: subprocess.run([sys.executable, __file__, 'child'])\n"
        "else: raise SystemError('child')\n",
    )
    ended = run_instrumented(tmp_path, program)
    bare = subprocess.run(
        [sys.executable, program, "child"],
        check=False,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(SOURCE)},
    )
    assert set(ended.output.splitlines()) == set(bare.stdout.splitlines())
    assert [note.error and note.error.type for note in ended.notes] == ["SystemError"]


def test_own_sitecustomize(tmp_path: Path) -> None:
    """The program's own sitecustomize runs, is the one in `sys.modules`, and its hooks stay in use."""
    own = tmp_path / "own"
    own.mkdir()
    write(
        own / "sitecustomize.py", "import sys\nsys.excepthook = lambda *error: print('own hook', error[0].__name__)\n"
    )
    program = write(tmp_path / "program.py", "import sys\nprint(sys.modules['sitecustomize'].__file__)\n1 / 0\n")
    ended = run_instrumented(tmp_path, program, path=(own, SOURCE))
    assert ended.output.splitlines() == [str(own / "sitecustomize.py"), "own hook ZeroDivisionError"]
    (note,) = ended.notes
    assert note.error is not None
    assert note.error.type == "ZeroDivisionError"


@pytest.mark.parametrize("raised", ["ImportError('no')", "SystemExit(3)", "KeyboardInterrupt"])
def test_own_sitecustomize_fails(tmp_path: Path, raised: str) -> None:
    """A sitecustomize that fails does what it does without gpuwarden."""
    own = tmp_path / "own"
    own.mkdir()
    write(own / "sitecustomize.py", f"raise {raised}\n")
    program = write(tmp_path / "program.py", SAYS)
    ended = run_instrumented(tmp_path, program, path=(own, SOURCE))
    bare = subprocess.run(
        [sys.executable, program],
        check=False,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join((str(own), str(SOURCE)))},
    )
    assert (ended.status, ended.output) == (bare.returncode, bare.stdout)
    assert ended.errors.splitlines()[-1:] == bare.stderr.splitlines()[-1:]


def test_no_folder(tmp_path: Path) -> None:
    """A folder that is gone costs the program nothing."""
    ended = run_instrumented(tmp_path, "-c", f"{SAYS}; 1 / 0", GPUWARDEN_RUN_FOLDER=str(tmp_path / "gone"))
    assert (ended.status, ended.output) == (1, "ran\n")
    assert ended.errors.endswith("ZeroDivisionError: division by zero\n")


def test_not_a_run(tmp_path: Path) -> None:
    """The folder in PYTHONPATH alone does nothing."""
    ended = run_instrumented(tmp_path, "-c", "1 / 0", GPUWARDEN_RUN="0")
    assert (ended.status, ended.notes) == (1, [])


def test_old_python() -> None:
    """The file parses on Python 3.6, where it does nothing."""
    ast.parse((SITE / "sitecustomize.py").read_text(encoding="utf-8"), feature_version=(3, 6))


def test_imports_at_start(tmp_path: Path) -> None:
    """A start imports two modules of Python's own and none of gpuwarden's: each would cost every process its time."""
    listing = "import sys; print(*sorted(sys.modules))"
    imported = set(run_instrumented(tmp_path, "-c", listing).output.split())
    bare = subprocess.run([sys.executable, "-c", listing], check=True, capture_output=True, text=True).stdout.split()
    assert imported - set(bare) <= {"sitecustomize", "atexit", "faulthandler", "fcntl"}


def test_errors_of_threads(tmp_path: Path) -> None:
    """The error that ends the program counts, and the first error of a thread is kept as its possible root."""
    program = write(
        tmp_path / "program.py",
        "import threading\n"
        "def fail(error): raise error\n"
        "for error in (OSError('first'), LookupError('second')):\n"
        "    thread = threading.Thread(target=fail, args=(error,)); thread.start(); thread.join()\n",
    )
    (note,) = run_instrumented(tmp_path, program).notes
    assert note.error is not None
    assert (note.error.type, note.error.thread, note.thread_error) == ("OSError", True, None)
    write(program, program.read_text(encoding="utf-8") + "raise RuntimeError('CUDA error: out of memory')\n")
    again = tmp_path / "again"
    again.mkdir()
    ended = run_instrumented(again, program)
    (note,) = ended.notes
    assert note.error is not None
    assert note.thread_error is not None
    assert (note.error.type, note.error.thread, note.error.framework_kind) == ("RuntimeError", False, "device_oom")
    assert note.thread_error.type == "OSError"
    assert ended.errors.count("Traceback") == 3


def test_own_excepthook(tmp_path: Path) -> None:
    """An error is kept, too, where the program has replaced the hook: the interpreter remembers it until its end."""
    ended = run_instrumented(tmp_path, "-c", "import sys; sys.excepthook = lambda *_: print('own'); 1 / 0")
    (note,) = ended.notes
    assert note.error is not None
    assert (ended.output, note.error.type) == ("own\n", "ZeroDivisionError")


def test_ignored_errors(tmp_path: Path) -> None:
    """An error of an exit handler is kept as ignored."""
    ended = run_instrumented(tmp_path, "-c", "import atexit; atexit.register(lambda: 1 / 0)")
    (note,) = ended.notes
    assert note.error is not None
    assert (ended.status, note.error.unraisable) == (0, True)


def test_exits_leave_no_note(tmp_path: Path) -> None:
    """`sys.exit` is no error."""
    ended = run_instrumented(tmp_path, "-c", "import sys; sys.exit('enough')")
    assert (ended.status, ended.errors, ended.notes) == (1, "enough\n", [])


def test_text_is_bounded(tmp_path: Path) -> None:
    """The end of a long text is kept; the note is one whole file of JSON, of the process with that start."""
    program = "import os; print(open('/proc/self/stat').read()); raise ValueError('x' * 99999 + 'the end')"
    ended = run_instrumented(tmp_path, "-c", program)
    (note,) = ended.notes
    assert note.error is not None
    assert len(note.error.text) == MAX_TEXT_BYTES
    assert note.error.text.endswith("the end\n")
    stat = ended.output.split()
    assert (note.pid, note.start) == (int(stat[0]), int(stat[21]))
    assert set(json.loads((ended.folder / f"{note.pid}.json").read_text())) >= {"pid", "start", "error"}


def test_deep_recursion(tmp_path: Path) -> None:
    """An error deep in a recursion has its innermost frames only: to format a million would take 20 s."""
    program = "import sys; sys.setrecursionlimit(10**6)\ndef f(n): return f(n - 1) if n else 1 / 0\nf(6000)"
    (note,) = run_instrumented(tmp_path, "-c", program).notes
    assert note.error is not None
    assert f"[Previous line repeated {MAX_FRAMES - 3} more times]" in note.error.text


@pytest.mark.frameworks
def test_error_in_a_tf_function(tmp_path: Path) -> None:
    """An error in a tf.function is at the program's own line, not at AutoGraph's copy of it."""
    program = write(
        tmp_path / "train.py",
        "import tensorflow as tf\n\n"
        "@tf.function\ndef step(x):\n    if tf.reduce_sum(x) > 0:\n        x = x @ tf.ones((7, 7))\n    return x\n\n"
        "step(tf.ones((2, 3)))\n",
    )
    (note,) = run_instrumented(tmp_path, program).notes
    assert note.error is not None
    assert note.error.frame == f"{program}:6 in step"


def test_fatal_signal(tmp_path: Path) -> None:
    """After a fatal signal, faulthandler's text is in its file; status and terminal stay as they are."""
    crash = "import os, ctypes; print(os.getpid(), flush=True); ctypes.string_at(0)"
    ended = run_instrumented(tmp_path, "-c", crash)
    assert (ended.status, ended.errors) == (-signal.SIGSEGV, "")
    text = (ended.folder / f"{int(ended.output)}.faults").read_text()
    assert text.startswith("Fatal Python error: Segmentation fault")
    assert "string_at" in text


def test_files_of_a_program_that_closed_all(tmp_path: Path) -> None:
    """A crash writes nothing into the files of a program that has closed all descriptors, as a daemon does."""
    crash = "import os, ctypes; os.closerange(3, 4096); file = open('data', 'w'); ctypes.string_at(0)"
    assert run_instrumented(tmp_path, "-c", crash).status == -signal.SIGSEGV
    assert (tmp_path / "data").read_text() == ""


def test_own_faulthandler(tmp_path: Path) -> None:
    """A program with a faulthandler of its own keeps it."""
    for number, flags in enumerate((["-X", "faulthandler"], [])):
        folder = tmp_path / str(number)
        folder.mkdir()
        crash = "import ctypes, faulthandler; faulthandler.enable(); ctypes.string_at(0)"
        ended = run_instrumented(folder, *flags, "-c", crash)
        assert ended.errors.startswith("Fatal Python error: Segmentation fault")


def test_gpuwarden_of_the_tool(tmp_path: Path) -> None:
    """A program without gpuwarden gets the tool's by its place; the tool's other packages stay out of its path."""
    ended = run_instrumented(
        tmp_path, "-S", "-c", f"import sys; sys.path.insert(0, {str(SITE)!r}); import sitecustomize; "
        "import gpuwarden; print(gpuwarden.__file__, [each for each in sys.path if 'gpuwarden' in each])",
        path=(),
    )  # fmt: skip
    assert ended.output.split() == [str(SOURCE / "gpuwarden/__init__.py"), "[]"]


def test_folder_named_gpuwarden(tmp_path: Path) -> None:
    """A folder named gpuwarden next to the script, such as a clone of it, is not taken for the package."""
    (tmp_path / "gpuwarden").mkdir()
    program = write(tmp_path / "program.py", "import gpuwarden\nprint(gpuwarden.__file__)\n")
    assert run_instrumented(tmp_path, program, path=()).output.strip().endswith("gpuwarden/__init__.py")
