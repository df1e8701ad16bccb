"""Checks of `gpuwarden doctor --run`: each installed framework computes on each GPU, in a process of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple

from gpuwarden.doctor.frameworks.builds import FRAMEWORKS, KnownFramework, has_gpu
from gpuwarden.doctor.frameworks.environment import InterpreterError, read_environment
from gpuwarden.doctor.model import CheckResult, CheckRow, Context, Status
from gpuwarden.errors.recognition import find_problem, find_step

Kind = Literal["gpu", "cpu"]

PATIENCE_SECONDS = 180.0  # for all steps of a framework; compiling PTX for a new GPU takes longer
MAX_TEXT = 300  # characters of a line of the log
MIN_BYTES_PER_SECOND = 1e9  # of a copy: PCIe 1.0 with eight lanes moves 2 GB/s
PROGRAM = Path(__file__).parent / "smoke_program.py"
# Next to a training, and at the same time as the other framework: take only the memory that is needed.
VARIABLES = {"TF_FORCE_GPU_ALLOW_GROWTH": "true", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}

STEPS = {
    "devices": "It starts and sees a GPU.",
    "matmul": "A product of matrices runs on each GPU, and is right.",
    "convolution": "A convolution runs on each GPU, and is right.",
    "bandwidth": "Data is copied to each GPU and back unchanged, at 1 GB/s or more.",
    "collective": "Two GPUs add up a gradient (MirroredStrategy, torch.distributed, psum), and both have the sum.",
}
_WHY = {
    "devices": "Everything it computes runs on the CPU, many times slower.",
    "matmul": "No model works on that GPU.",
    "convolution": "It needs cuDNN: models with convolutions do not work on that GPU.",
    "bandwidth": "The input waits for the copy: the PCIe link may be slow, or the host busy.",
    "collective": "Training on several GPUs fails, hangs, or computes wrong gradients.",
}
_FIX = {
    "devices": "Mend the first problem in this report, then run it again.",
    "matmul": "Mend the first problem in this report; wrong numbers without one are a defect of the GPU.",
    "convolution": "Compare the libraries of this framework above; then run with CUDNN_LOGINFO_DBG=1.",
    "bandwidth": "Compare gpu.pcie, and run again while the machine is idle.",
    "collective": "Run with NCCL_DEBUG=INFO; try NCCL_P2P_DISABLE=1, and a larger /dev/shm in a container.",
}


class StepEnd(NamedTuple):
    """Last word on a step on a device: it passed, it failed, or it began and the program ended."""

    step: str
    device: str
    state: str
    text: str
    rate: float = 0.0  # of a copy, in bytes a second


class Trial(NamedTuple):
    """Trial of a framework. `ended` says how the program ended if not by itself; `seen` is the number of devices.

    `hint` is the first line of the framework's log that names a known problem.
    """

    steps: tuple[StepEnd, ...]
    seen: int
    ended: str = ""
    hint: str = ""


def run_trials(context: Context) -> Iterator[CheckResult]:
    """Try each installed framework, one after the other. Raises nothing."""
    try:
        environment = read_environment(context)
    except InterpreterError:
        return  # python.environment says so
    for framework in FRAMEWORKS:
        if environment.find_file(framework.module, "__init__.py") is not None:
            trial = try_framework(framework, context, "gpu")
            yield from judge_trial(framework, trial, is_gpu_there=has_gpu(context))


def try_framework(framework: KnownFramework, context: Context, kind: Kind, patience: float = PATIENCE_SECONDS) -> Trial:
    """Run the program of the steps, and end it and its children when it takes too long."""
    # Files, not pipes: a process that the program leaves in a session of its own may keep a pipe open.
    with (
        tempfile.TemporaryFile("w+", errors="replace") as output,
        tempfile.TemporaryFile("w+", errors="replace") as log,
    ):
        process = subprocess.Popen(
            [str(context.python), str(PROGRAM), framework.module, kind],
            env={**context.environ, **VARIABLES},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=log,
            start_new_session=True,
        )
        try:
            ended = _describe_end(process.wait(patience))
        except subprocess.TimeoutExpired:
            ended = f"took more than {patience:.0f} s"
        finally:
            with suppress(ProcessLookupError):  # its children too
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        log.seek(0)
        hint = next((line.strip()[:MAX_TEXT] for line in log if find_problem(line)), "")
        return read_trial(output)._replace(ended=ended, hint=hint)


def read_trial(lines: Iterable[str]) -> Trial:
    """Read the program's lines; a framework may print others."""
    steps: dict[tuple[str, str], StepEnd] = {}
    seen = 0
    for facts in filter(None, map(_parse, lines)):
        seen = facts.get("count", seen)
        end = StepEnd(facts["step"], facts["device"], facts["state"], facts.get("text", ""), facts.get("rate", 0.0))
        steps[end.step, end.device] = end
    return Trial(tuple(steps.values()), seen)


def judge_trial(framework: KnownFramework, trial: Trial, *, is_gpu_there: bool) -> Iterator[CheckResult]:
    """Yield a result for each step that began."""
    title = framework.title
    by_step = {step: [each for each in trial.steps if each.step == step] for step in STEPS}
    devices = by_step["devices"] or [StepEnd("devices", "", "began", "")]  # the interpreter did not get that far
    if devices[0].state == "passed" and not trial.seen:
        log = f" Its log: {trial.hint}" if trial.hint else ""
        yield _result(framework, "devices", "fail" if is_gpu_there else "skip", f"{title} sees no GPU.{log}")
        return
    for step, ends in {**by_step, "devices": devices}.items():
        failed = [f"{_name_place(each)}{each.text}" for each in ends if each.state == "failed"]
        failed += [
            f"{_name_place(each)}{title} {trial.ended or 'ended too early'}" for each in ends if each.state == "began"
        ]
        passed = [f"{_name_place(each)}{each.text}" for each in ends if each.state == "passed"]
        if failed:
            yield _result(framework, step, "fail", "; ".join(failed))
        elif step == "bandwidth" and any(each.rate < MIN_BYTES_PER_SECOND for each in ends):
            yield _result(framework, step, "warn", "; ".join(passed))
        elif passed:
            yield _result(framework, step, "pass", "; ".join(passed))


def _name_place(end: StepEnd) -> str:
    return f"{end.device}: " if end.device else ""


def _result(framework: KnownFramework, step: str, status: Status, found: str) -> CheckResult:
    if status not in ("warn", "fail"):
        return CheckResult(f"{framework.module}.run_{step}", status, found)
    problem = find_problem(found)
    fix = _FIX[step] if problem is None else find_step(problem, f"{framework.module}: {found}")
    return CheckResult(f"{framework.module}.run_{step}", status, found, _WHY[step], fix)


def _parse(line: str) -> Mapping[str, Any] | None:
    try:
        facts = json.loads(line) if line.startswith("{") else None
    except (ValueError, RecursionError):
        return None
    if not isinstance(facts, dict):
        return None
    return facts if all(isinstance(facts.get(key), str) for key in ("step", "device", "state")) else None


def _describe_end(status: int) -> str:
    if status >= 0:
        return f"ended with status {status}" if status else ""
    return f"was ended by {signal.Signals(-status).name}"


TRIALS = CheckRow(
    run_trials, {f"{each.module}.run_{step}": f"`--run`: {text}" for each in FRAMEWORKS for step, text in STEPS.items()}
)
