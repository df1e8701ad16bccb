"""Trial of the frameworks: the real program on the CPU, and what becomes of its lines."""

from __future__ import annotations

import ast
import json
import os
import signal
import sys
import time
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

import pytest
from commands import run_command
from fake_environment import CUDA_BUILD, FakeEnvironment, real_python

from gpuwarden.doctor.frameworks.builds import FRAMEWORKS, TENSORFLOW, KnownFramework
from gpuwarden.doctor.model import CheckResult, Context
from gpuwarden.doctor.smoke.smoke_checks import Trial, judge_trial, read_trial, run_trials, try_framework
from system_parts import require

STEPS = ["run_devices", "run_matmul", "run_convolution", "run_bandwidth", "run_collective"]
SEEN = {"step": "devices", "device": "", "state": "passed", "text": "GPU:0, GPU:1", "count": 2}


def real_context(tmp_path: Path) -> Context:
    """Return the context of the environment of these tests."""
    return Context(real_python(), dict(os.environ), tmp_path)


def judge(trial: Trial, *, is_gpu_there: bool = True) -> Mapping[str, CheckResult]:
    """Return the results of TensorFlow's trial by step."""
    results = judge_trial(TENSORFLOW, trial, is_gpu_there=is_gpu_there)
    return {each.name.removeprefix("tensorflow."): each for each in results}


def read(*lines: Mapping[str, object]) -> Trial:
    """Return the trial of a program that has written these lines."""
    return read_trial(map(json.dumps, lines))


@pytest.mark.frameworks
@pytest.mark.parametrize("framework", FRAMEWORKS, ids=lambda each: each.module)
def test_each_step_passes_on_two_devices_of_the_cpu(framework: KnownFramework, tmp_path: Path) -> None:
    """The real framework computes, and MirroredStrategy, torch.distributed and psum add up."""
    require(find_spec(framework.module) is not None, f"{framework.title} is not installed")
    trial = try_framework(framework, real_context(tmp_path), "cpu")
    results = list(judge_trial(framework, trial, is_gpu_there=False))
    assert [each.name.partition(".")[2] for each in results] == STEPS
    speed = {each.status for each in results if each.name.endswith("bandwidth")}  # of a busy machine's memory
    assert speed <= {"pass", "warn"}
    others = [each for each in results if not each.name.endswith("bandwidth")]
    assert all(each.status == "pass" for each in others), others


@pytest.mark.frameworks
def test_tensorflow_for_the_cpu_sees_no_gpu(tmp_path: Path) -> None:
    """It is skipped on a machine without one, and a failure on one with."""
    trial = try_framework(TENSORFLOW, real_context(tmp_path), "gpu")
    assert (trial.seen, trial.ended) == (0, "")
    (found,) = judge_trial(TENSORFLOW, trial, is_gpu_there=False)
    assert (found.status, found.found[:23]) == ("skip", "TensorFlow sees no GPU.")
    (found,) = judge_trial(TENSORFLOW, trial, is_gpu_there=True)
    assert found.status == "fail"
    assert found.why
    assert found.fix


def program(environment: FakeEnvironment, text: str) -> FakeEnvironment:
    """Install a module named tensorflow that does something else."""
    environment.add_tensorflow(CUDA_BUILD)
    environment.write("tensorflow/__init__.py", text)
    return environment


def try_program(tmp_path: Path, text: str, patience: float = 60.0) -> Mapping[str, CheckResult]:
    """Try a module named tensorflow."""
    environment = program(FakeEnvironment(tmp_path / "env"), text)
    return judge(try_framework(TENSORFLOW, environment.context(tmp_path), "gpu", patience))


def test_a_framework_that_cannot_be_imported(tmp_path: Path) -> None:
    """Its error is shown, and what to do about that."""
    text = "raise ImportError('libcudnn.so.9: cannot open shared object file: No such file or directory')"
    found = try_program(tmp_path, text)["run_devices"]
    assert found.status == "fail"
    assert found.found.startswith("ImportError: libcudnn.so.9: cannot open shared object file")
    assert "own CUDA packages" in found.fix


@pytest.mark.parametrize(
    ("end", "patience", "text"),
    [
        ("os.kill(os.getpid(), 11)", 60.0, "TensorFlow was ended by SIGSEGV"),
        ("os._exit(3)", 60.0, "TensorFlow ended with status 3"),
        ("os._exit(0)", 60.0, "TensorFlow ended too early"),
        ("time.sleep(600)", 1.0, "TensorFlow took more than 1 s"),
    ],
)
def test_a_framework_that_ends_the_process_or_hangs(tmp_path: Path, end: str, patience: float, text: str) -> None:
    """It costs its own result."""
    results = try_program(tmp_path, f"import os, time\n{end}\n", patience=patience)
    assert {name: (each.status, each.found) for name, each in results.items()} == {"run_devices": ("fail", text)}


def test_what_the_program_has_started_ends_with_it(tmp_path: Path) -> None:
    """Also if it closes its output, as a worker of a data loader may do."""
    text = (
        "import os, subprocess, sys\n"
        "child = subprocess.Popen(['sleep', '600'], stdout=subprocess.DEVNULL)\n"
        f"open({str(tmp_path / 'pid')!r}, 'w').write(str(child.pid))\n"
        "os._exit(1)\n"
    )
    assert try_program(tmp_path, text)["run_devices"].status == "fail"
    pid = int((tmp_path / "pid").read_text())
    deadline = time.monotonic() + 30
    while is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not is_running(pid)


def test_a_program_that_leaves_a_service_is_not_waited_for(tmp_path: Path) -> None:
    """One in a session of its own goes on, and keeps the program's output open."""
    text = (
        "import os, subprocess\n"
        "child = subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
        f"open({str(tmp_path / 'pid')!r}, 'w').write(str(child.pid))\n"
        "os._exit(3)\n"
    )
    found = try_program(tmp_path, text)["run_devices"].found
    os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)
    assert found == "TensorFlow ended with status 3"


def is_running(pid: int) -> bool:
    """Return whether a process runs, and is not only waiting for its parent."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_the_users_variables_reach_the_program_but_no_memory_is_reserved(tmp_path: Path) -> None:
    """A training may run on the same GPU."""
    text = (
        "import os\nnames = ['CUDA_VISIBLE_DEVICES', 'TF_FORCE_GPU_ALLOW_GROWTH', 'XLA_PYTHON_CLIENT_PREALLOCATE']\n"
        "raise RuntimeError(' '.join(os.environ[name] for name in names))\n"
    )
    environment = program(FakeEnvironment(tmp_path / "env"), text)
    environ = {"CUDA_VISIBLE_DEVICES": "1", "TF_FORCE_GPU_ALLOW_GROWTH": "false"}
    trial = try_framework(TENSORFLOW, environment.context(tmp_path, environ), "gpu")
    assert judge(trial)["run_devices"].found == "RuntimeError: 1 true false"


def test_the_frameworks_log_says_why_it_sees_no_gpu(tmp_path: Path) -> None:
    """The first line that names a known problem, and its first step."""
    line = "failed call to cuInit: CUDA_ERROR_NO_DEVICE: no CUDA-capable device is detected"
    trial = read({**SEEN, "count": 0, "text": ""})._replace(hint=line)
    found = judge(trial)["run_devices"]
    assert (found.status, found.found) == ("fail", f"TensorFlow sees no GPU. Its log: {line}")


def test_a_step_that_fails_on_one_gpu_names_it() -> None:
    """The other GPU's result stands next to it; other steps keep theirs."""
    wrong = "WrongResultError: the result is on CPU:0, not on GPU:1"
    results = judge(
        read(
            SEEN,
            {"step": "matmul", "device": "GPU:0", "state": "passed", "text": "45.00 TFLOP/s"},
            {"step": "matmul", "device": "GPU:1", "state": "failed", "text": wrong},
            {"step": "convolution", "device": "GPU:0", "state": "passed", "text": "0.3 s for the first"},
        )
    )
    assert {name: each.status for name, each in results.items()} == {
        "run_devices": "pass",
        "run_matmul": "fail",
        "run_convolution": "pass",
    }
    assert results["run_matmul"].found == f"GPU:1: {wrong}"


def test_a_step_in_which_the_program_ended_names_the_gpu() -> None:
    """Steps that passed on the other GPU are not shown as passed."""
    began = {"step": "convolution", "device": "GPU:1", "state": "began"}
    passed = {"step": "convolution", "device": "GPU:0", "state": "passed", "text": "0.3 s for the first"}
    found = judge(read(SEEN, passed, began)._replace(ended=f"was ended by {signal.SIGABRT.name}"))
    assert found["run_convolution"].found == "GPU:1: TensorFlow was ended by SIGABRT"


@pytest.mark.parametrize(("rate", "status"), [(0.4e9, "warn"), (12e9, "pass")])
def test_a_slow_copy_is_a_warning(rate: float, status: str) -> None:
    """A link of the first generation moves more."""
    line = {"step": "bandwidth", "device": "GPU:0", "state": "passed", "text": "0.4 GB/s to it", "rate": rate}
    assert judge(read(SEEN, line))["run_bandwidth"].status == status


def test_lines_of_the_framework_are_no_steps() -> None:
    """Text, JSON of another form, and half a line."""
    log = '{"step": [1], "device": {}, "state": 3}'
    trial = read_trial(
        [log, "{", "{}", '{"step": 1}', "[1]", '{"a":' * 9000, "2026-11-25 I tensorflow", json.dumps(SEEN)]
    )
    assert (len(trial.steps), trial.seen) == (1, 2)


def test_without_a_framework_or_an_interpreter_there_is_no_trial(tmp_path: Path) -> None:
    """The static checks say so."""
    environment = FakeEnvironment(tmp_path / "env")
    assert list(run_trials(environment.context(tmp_path))) == []
    assert list(run_trials(Context(tmp_path / "missing", {}, tmp_path))) == []


def test_the_command_tries_frameworks_only_with_its_option(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed trial is a failed check."""
    environment = program(FakeEnvironment(tmp_path / "env"), "raise RuntimeError('broken')")
    monkeypatch.chdir(tmp_path)
    found = []
    for options in ([], ["--run"]):
        ended = run_command("doctor", "--json", "--python", str(environment.python), *options)
        found.append({each["name"]: each for each in json.loads(ended.stdout)["checks"]})
    assert not [name for name in found[0] if ".run_" in name]
    assert found[1]["tensorflow.run_devices"]["status"] == "fail"
    assert found[1]["tensorflow.run_devices"]["found"] == "RuntimeError: broken"


def test_the_program_is_for_older_interpreters() -> None:
    """An environment of TensorFlow 2.12 may have Python 3.8."""
    text = (Path(sys.modules[try_framework.__module__].__file__ or "").parent / "smoke_program.py").read_text()
    tree = ast.parse(text, feature_version=(3, 8))
    assert not [node for node in ast.walk(tree) if type(node).__name__ in ("Match", "TypeAlias")]
    imported = {name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names}
    assert imported <= sys.stdlib_module_names
