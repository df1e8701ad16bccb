"""docs/use/trackers.md: its code, run against stand-ins with the interface that each library documents."""

from __future__ import annotations

import io
import json
import os
import re
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, fields
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from promql import SAMPLES
from receiver import Receiver

from gpuwarden.protocol.messages import End, Hello, Report
from gpuwarden.web.api.run_document import DeviceDocument, RunDocument

PAGE = (Path(__file__).parents[3] / "docs/use/trackers.md").read_text(encoding="utf-8")


def run_block(heading: str, number: int = 0, **names: Any) -> dict[str, Any]:
    """Execute a block of code below a heading of the page, and return its names."""
    section = re.search(rf"^## {heading}\n(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE)
    assert section
    code = re.findall(r"^```python\n(.*?)^```", section[1], re.DOTALL | re.MULTILINE)[number]
    exec(compile(code, heading, "exec"), names)  # noqa: S102 - the page's own code
    return names


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Callable[..., ModuleType]:
    """Return a function that puts a module with these names in a library's place."""

    def place(name: str, **names: Any) -> ModuleType:
        module = ModuleType(name)
        vars(module).update(names)
        monkeypatch.setitem(sys.modules, name, module)
        return module

    return place


def received(daemon: Receiver) -> tuple[Hello, Report]:
    """Return the hello and the last report of the one run."""
    messages = daemon.accept().waiting()
    hello, last = messages[0], [each for each in messages if isinstance(each, Report)][-1]
    assert isinstance(hello, Hello)
    assert not any(isinstance(each, End) for each in messages)  # that is the process's
    return hello, last


def test_hugging_face(daemon: Receiver, stand_in: Callable[..., ModuleType]) -> None:
    """Hooks of two epochs of three steps, with an evaluation after each, are six steps, five of them timed.

    Evaluations before and after the training report nothing.
    """
    stand_in("transformers", TrainerCallback=object)
    callback = run_block("Hugging Face Trainer")["StepReporter"]()
    arguments = SimpleNamespace(run_name="my run", train_batch_size=4, gradient_accumulation_steps=2)

    def call(hook: str, epoch: float) -> None:
        getattr(callback, hook)(arguments, SimpleNamespace(epoch=epoch), SimpleNamespace(), model=None)

    call("on_evaluate", 0)
    call("on_train_begin", 0)
    for epoch in range(2):
        call("on_epoch_begin", epoch)
        for step in range(1, 4):
            call("on_step_end", epoch + step / 3)
        call("on_evaluate", epoch + 1)
        call("on_save", epoch + 1)
    call("on_train_end", 2)
    call("on_evaluate", 2)
    hello, last = received(daemon)
    assert hello.name == "my run"
    assert (last.steps, sum(last.step_buckets), last.examples, last.phase) == (6, 5, 48, "idle")


def test_lightning(daemon: Receiver, stand_in: Callable[..., ModuleType]) -> None:
    """Hooks of a validation, a sanity check, and two epochs of three batches are six steps, five of them timed."""
    stand_in("lightning")
    stand_in("lightning.pytorch", Callback=object)
    callback = run_block("Lightning")["StepReporter"]()
    trainer = SimpleNamespace(current_epoch=0, state=SimpleNamespace(fn="validate"))
    callback.on_validation_end(trainer, None)
    trainer.state.fn = "fit"
    callback.on_fit_start(trainer, None)
    callback.on_validation_end(trainer, None)
    for trainer.current_epoch in range(2):
        callback.on_train_epoch_start(trainer, None)
        for batch in range(3):
            callback.on_train_batch_end(trainer, None, {}, object(), batch)
        callback.on_validation_end(trainer, None)
    callback.on_fit_end(trainer, None)
    _, last = received(daemon)
    assert (last.steps, sum(last.step_buckets), last.epoch, last.phase) == (6, 5, 1, "idle")


def test_weights_and_biases(stand_in: Callable[..., ModuleType]) -> None:
    """Each filter selects a metric of the endpoint."""
    given: dict[str, Any] = {}
    stand_in("wandb", Settings=dict, init=lambda **arguments: given.update(arguments))
    run_block("Weights & Biases")
    (endpoint,) = given["settings"]["x_stats_open_metrics_endpoints"]
    for each in given["settings"]["x_stats_open_metrics_filters"]:
        assert any(re.fullmatch(each, f"{endpoint}.{name}") for name in SAMPLES), each


def test_mlflow_with_keras(stand_in: Callable[..., ModuleType]) -> None:
    """GpuWarden comes before MLflow's callback, with logs, which test_callback_in_program.py shows to reach it."""
    passed: dict[str, Any] = {}
    stand_in("mlflow", keras=SimpleNamespace(MlflowCallback=lambda: "MLflow's"), start_run=nullcontext)
    stand_in("gpuwarden.keras", GpuWarden=lambda **settings: settings)
    model = SimpleNamespace(fit=lambda _data, **arguments: passed.update(arguments))
    run_block("MLflow", model=model, data=None)
    assert passed["callbacks"] == [{"logs": True}, "MLflow's"]


def test_mlflow_by_the_api(stand_in: Callable[..., ModuleType], monkeypatch: pytest.MonkeyPatch) -> None:
    """Known figures of this process's run are recorded under the API's names."""
    logged: list[dict[str, float]] = []
    stand_in("mlflow", log_metrics=lambda metrics, step: logged.append({**metrics, "step": step}))
    device = asdict(DeviceDocument(uuid="GPU-5", memory_in_use_bytes=3 << 30, headroom_bytes=None))
    runs = [{"pid": os.getpid(), "devices": [device]}, {"pid": 1, "devices": [{**device, "headroom_bytes": 1}]}]
    assert runs[0].keys() <= {each.name for each in fields(RunDocument)}
    answer = json.dumps({"runs": runs}).encode()
    monkeypatch.setattr("urllib.request.urlopen", lambda _url, timeout: io.BytesIO(answer) if timeout else None)
    run_block("MLflow", 1)["log_memory"](7)
    assert logged == [{"GPU-5/memory_in_use_bytes": 3 << 30, "step": 7}]


def test_mlflow_without_a_daemon(stand_in: Callable[..., ModuleType]) -> None:
    """A training goes on while no daemon answers."""
    stand_in("mlflow")
    run_block("MLflow", 1)["log_memory"](7, address="http://127.0.0.1:1")
