"""Innermost frame of the user's code around an exception."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import CodeType

import pytest

from gpuwarden.client.errors.classifier import error_from_exception
from gpuwarden.client.errors.user_frame import find_user_frame
from gpuwarden.protocol.messages import MAX_FRAME_CHARACTERS

HERE = Path(__file__).name


def raised_by(code: CodeType, **names: object) -> BaseException:
    """Run compiled code, and return what it raises."""
    try:
        exec(code, dict(names))  # noqa: S102 - the code of this test
    except Exception as error:  # noqa: BLE001 - of any kind
        return error
    raise AssertionError("nothing was raised")


def test_innermost_of_the_users_code() -> None:
    """Frames of the standard library and of installed packages do not count; the caller within the user's code does."""
    code = compile(
        "import json\ndef load(text):\n    return json.loads(text)\nload('{')\n", "/home/ada/train.py", "exec"
    )
    assert find_user_frame("", raised_by(code)) == "/home/ada/train.py:3 in load"

    for folder in ("/usr/lib/python3/dist-packages/keras/layer.py", "/x/site-packages/torch/nn.py", json.__file__):
        inner = compile("call()", folder, "exec")
        outer = compile("\nrun()", "/home/ada/train.py", "exec")
        error = raised_by(outer, run=lambda inner=inner: exec(inner, {"call": lambda: int("x")}))  # noqa: S102 - likewise
        frame = find_user_frame("", error)
        assert frame is not None
        assert HERE in frame  # the function that this test's file has


def test_callers_that_are_not_unwound() -> None:
    """In a hook inside of the framework, the user's frame has not been unwound: it is found among the callers."""
    seen: list[str | None] = []

    def step() -> None:
        try:
            exec(compile("1 / 0", "/x/site-packages/keras/trainer.py", "exec"))  # noqa: S102 - likewise
        except ZeroDivisionError as error:
            error.__traceback__ = error.__traceback__ and error.__traceback__.tb_next
            seen.append(find_user_frame("", error))

    step()
    assert seen[0] is not None
    assert f"{HERE}:" in seen[0]
    assert seen[0].endswith(" in step")


def test_long_path_and_odd_characters() -> None:
    """A long path keeps its end, and what cannot be printed becomes spaces, so that a message can carry it."""
    error = raised_by(compile("1 / 0", f"/{'a' * 500}/tr\nain.py", "exec"))
    frame = find_user_frame("", error)
    assert frame is not None
    assert frame.endswith("/tr ain.py:1")
    assert len(frame) == MAX_FRAME_CHARACTERS


@pytest.mark.parametrize("sample", ["generator", "operation", "torch_worker", "installed"])
def test_frame_in_the_text(sample: str) -> None:
    """The text's innermost frame of the user's code is nearer to the fault than the call of `fit`."""
    text, expected = {
        "generator": (
            """FileNotFoundError: [Errno 2] No such file or directory: '/data/1.npy'
Traceback (most recent call last):

  File "/x/site-packages/tensorflow/python/ops/script_ops.py", line 269, in __call__
    ret = func(*args)
  File "/home/ada/data.py", line 118, in batches
    open("/data/1.npy")
\t [[{{node PyFunc}}]]""",
            "/home/ada/data.py:118 in batches",
        ),
        "operation": (
            """Detected at node sequential/l/GatherV2 defined at (most recent call last):
  File "/home/ada/fit.py", line 9, in <module>

  File "/home/ada/layers.py", line 197, in call

indices[0] = 9 is not in [0, 3)""",
            "/home/ada/layers.py:197 in call",
        ),
        "torch_worker": (
            """Caught KeyError in DataLoader worker process 0.
Original Traceback (most recent call last):
  File "/x/site-packages/torch/utils/data/_utils/fetch.py", line 52, in fetch
  File "/home/ada/set.py", line 4, in __getitem__
KeyError: 7""",
            "/home/ada/set.py:4 in __getitem__",
        ),
        "installed": ('File "/x/site-packages/keras/src/trainer.py", line 241, in function', "/home/ada/fit.py:1"),
    }[sample]
    error = raised_by(compile("raise RuntimeError(text)", "/home/ada/fit.py", "exec"), text=text)
    assert error_from_exception(error, "train", 0).frame == expected


def test_cause() -> None:
    """The described exception decides: of a chain, the cause with a known kind."""
    inner = raised_by(
        compile("raise MemoryError('Unable to allocate 1 GiB for an array')", "/home/ada/inner.py", "exec")
    )
    outer = RuntimeError("step failed")
    outer.__cause__ = inner
    made = error_from_exception(outer, "train", 0)
    assert (made.kind, made.frame) == ("host_oom", "/home/ada/inner.py:1")


@pytest.mark.parametrize("how", ["-c", "file"])
def test_real_script(tmp_path: Path, how: str) -> None:
    """The own line of a real program is found, whether it runs as a file or as text."""
    text = "import json, sys\nfrom gpuwarden.client.errors.user_frame import find_user_frame\n"
    text += "try:\n    json.loads('{')\nexcept ValueError as error:\n    print(find_user_frame('', error))\n"
    script = tmp_path / "train.py"
    script.write_text(text)
    command = [sys.executable, "-c", text] if how == "-c" else [sys.executable, str(script)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env={"PYTHONPATH": ":".join(sys.path)})
    assert done.stdout.strip() == ("<string>:4" if how == "-c" else f"{script}:4")
