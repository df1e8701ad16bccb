"""Entry of gpuwarden into a Python program: it never changes what the program does, and keeps what ended it."""

from __future__ import annotations

import ast
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from instrumented_program import SITE, SOURCE, run_instrumented, run_instrumented_command

from gpuwarden.launcher.card import list_error_events

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
    assert (ended.status, ended.errors, ended.runs, ended.kept) == (0, "", [], [])
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
        (kept,) = ended.kept
        assert (ended.status, kept.type, kept.origin) == (status, error, "program")
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
    assert [error.type for error in ended.kept] == ["SystemError"]


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
    (error,) = ended.kept
    assert error.type == "ZeroDivisionError"


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
    assert (ended.status, ended.kept) == (1, [])


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
    """Errors of threads are kept, and the error that ended the program later."""
    program = write(
        tmp_path / "program.py",
        "import threading\n"
        "def fail(error): raise error\n"
        "for error in (OSError('first'), LookupError('second'), LookupError('again')):\n"
        "    thread = threading.Thread(target=fail, args=(error,)); thread.start(); thread.join()\n"
        "raise RuntimeError('CUDA error: out of memory')\n",
    )
    ended = run_instrumented(tmp_path, program)
    found = [(error.type, error.origin) for error in ended.kept]
    assert found == [("OSError", "thread"), ("LookupError", "thread"), ("RuntimeError", "program")]
    assert ended.errors.count("Traceback") == 4


NO_MEMORY = """
import resource
kept = []
resource.setrlimit(resource.RLIMIT_AS, (4096 * int(open("/proc/self/statm").read().split()[0]) + (32 << 20),) * 2)
while True:
    kept.append([len(kept)] * 4)
"""
NO_DESCRIPTOR = """
import resource, socket
resource.setrlimit(resource.RLIMIT_NOFILE, (80, 80))
kept = []
while True:
    kept.append(socket.socket())
"""


@pytest.mark.parametrize(("program", "error"), [(NO_MEMORY, "MemoryError"), (NO_DESCRIPTOR, "OSError")])
def test_nothing_left(tmp_path: Path, program: str, error: str) -> None:
    """An error is kept where there is no memory or no descriptor left to keep it with."""
    ended = run_instrumented(tmp_path, "-c", program)
    (kept,) = ended.kept
    assert (ended.status, kept.type) == (1, error)


def test_error_after_an_interrupt(tmp_path: Path) -> None:
    """An error while an interrupt ends the program is kept as such; an interrupt alone ends it as it does anyway."""
    program = "import os\ntry:\n    os.kill(os.getpid(), 2)\nfinally:\n    if {}: raise OSError('cannot save')"
    ended = run_instrumented(tmp_path, "-c", program.format(1))
    (error,) = ended.kept
    assert (ended.status, error.origin) == (1, "interrupt")
    bare = tmp_path / "bare"
    bare.mkdir()
    ended = run_instrumented(bare, "-c", program.format(0))
    assert (ended.status, ended.kept) == (-signal.SIGINT, [])


def test_text_of_errors(tmp_path: Path) -> None:
    """The text has causes, the place of a wrong syntax, and of each frame its place."""
    program = write(
        tmp_path / "program.py",
        "def f():\n    compile('x =', 'model.py', 'exec')\n"
        "try:\n    f()\nexcept SyntaxError as error:\n    raise LookupError('no model') from error\n",
    )
    (error,) = run_instrumented(tmp_path, program).kept
    assert error.text.splitlines() == [
        "Traceback (most recent call last):",
        f'  File "{program}", line 4, in <module>',
        f'  File "{program}", line 2, in f',
        '  File "model.py", line 1',
        "SyntaxError: invalid syntax (model.py, line 1)",
        "",
        "The above exception was the direct cause of the following exception:",
        "",
        "Traceback (most recent call last):",
        f'  File "{program}", line 6, in <module>',
        "LookupError: no model",
    ]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="groups are new in Python 3.11")
def test_group_of_errors(tmp_path: Path) -> None:
    """The members of a group are kept in its place."""
    (error,) = run_instrumented(tmp_path, "-c", "raise ExceptionGroup('several', [KeyError(1), OSError(2)])").kept
    assert [each for each in error.text.splitlines() if "Error: " in each] == ["OSError: 2", "KeyError: 1"]


def test_own_excepthook(tmp_path: Path) -> None:
    """An error is kept, too, where the program has replaced the hook: the interpreter remembers it until its end."""
    ended = run_instrumented(tmp_path, "-c", "import sys; sys.excepthook = lambda *_: print('own'); 1 / 0")
    (error,) = ended.kept
    assert (ended.output, error.type) == ("own\n", "ZeroDivisionError")


def test_ignored_errors(tmp_path: Path) -> None:
    """An error of an exit handler is kept as ignored."""
    ended = run_instrumented(tmp_path, "-c", "import atexit; atexit.register(lambda: 1 / 0)")
    (error,) = ended.kept
    assert (ended.status, error.origin) == (0, "finalizer")


def test_exits_are_no_errors(tmp_path: Path) -> None:
    """`sys.exit` is no error."""
    ended = run_instrumented(tmp_path, "-c", "import sys; sys.exit('enough')")
    assert (ended.status, ended.errors, ended.kept) == (1, "enough\n", [])


def test_text_is_bounded(tmp_path: Path) -> None:
    """Both ends of a long message are kept, and the innermost frames of a deep recursion."""
    program = (
        "import sys; sys.setrecursionlimit(10**6)\n"
        "def f(n):\n    if n: f(n - 1)\n    raise ValueError('the start' + 'x' * 99999 + 'the end')\nf(6000)"
    )
    (error,) = run_instrumented(tmp_path, "-c", program).kept
    assert len(error.text) < 10_000
    assert "ValueError: the start" in error.text
    assert error.text.endswith("the end")
    assert error.text.count("in f\n") == 100
    assert "line 4, in f\n" in error.text


@pytest.mark.frameworks
def test_error_in_a_tf_function(tmp_path: Path) -> None:
    """An error in a tf.function is at the program's own line, not at AutoGraph's copy of it."""
    program = write(
        tmp_path / "train.py",
        "import tensorflow as tf\n\n"
        "@tf.function\ndef step(x):\n    if tf.reduce_sum(x) > 0:\n        x = x @ tf.ones((7, 7))\n    return x\n\n"
        "step(tf.ones((2, 3)))\n",
    )
    (error,) = run_instrumented(tmp_path, program).kept
    (event,) = list_error_events(error)
    assert event.frame == f"{program}:6 in step"


def test_fatal_signal(tmp_path: Path) -> None:
    """After a fatal signal, faulthandler's text is in the log; status and terminal stay as they are."""
    ended = run_instrumented(tmp_path, "-c", "import ctypes; ctypes.string_at(0)")
    assert (ended.status, ended.errors) == (-signal.SIGSEGV, "")
    assert ended.crash.startswith("Fatal Python error: Segmentation fault")
    assert "string_at" in ended.crash


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
