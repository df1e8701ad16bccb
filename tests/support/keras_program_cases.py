"""Cases of keras_cases.py: the callback's part in a program: its devices, functions, workers, copies and settings."""

# ruff: noqa: D103 - the tests say what each case shows

from __future__ import annotations

import contextlib
import copy
import io
import json
import os
import pickle
import signal
import time
from pathlib import Path
from typing import Any

import tensorflow as tf
from keras_case_setup import CPU, EARLY, IMPORTED, Daemon, fit, list_wrapped_functions, make_data, model

from gpuwarden.client.frameworks.tensorflow import list_physical_devices
from gpuwarden.client.keras.fit import step_counter
from gpuwarden.keras import GpuWarden, keras
from gpuwarden.protocol.messages import Headroom, Hello, Report


class MemoryRecorder(keras.callbacks.Callback):  # type: ignore[misc] # Keras ships no types
    """Reads TensorFlow's memory in the hooks in which a GpuWarden before it in the list reports."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[dict[str, int]] = []

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:  # noqa: D102, ARG002
        self.seen.append(tf.config.experimental.get_memory_info("CPU:0"))


class WrapRecorder(keras.callbacks.Callback):  # type: ignore[misc] # Keras ships no types
    """Records which of the model's functions are wrapped, each time that one is about to be called."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[list[str]] = []

    def record(self, *_: Any, **__: Any) -> None:
        """Record the names."""
        self.seen.append(list_wrapped_functions(self.model))

    on_train_batch_begin = on_test_batch_begin = on_predict_batch_begin = on_train_end = record


class TrainFunctionRemaker(keras.callbacks.Callback):  # type: ignore[misc] # Keras ships no types
    """Makes the train function again in the third epoch, before GpuWarden's hook."""

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:  # noqa: D102, ARG002
        if epoch == 2:
            self.model.make_train_function(force=True)


class ModelCopier(keras.callbacks.Callback):  # type: ignore[misc] # Keras ships no types
    """Saves, copies and pickles the model in the middle of its fit."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self.copies: list[Any] = []

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:  # noqa: D102, ARG002
        self.model.save(self.folder / f"{epoch}.keras")
        self.copies = [keras.models.load_model(self.folder / f"{epoch}.keras"), copy.deepcopy(self.model)]


def case_default_device(daemon: Daemon) -> Any:
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(f"GPU-{index:036}" for index in range(65))
    fit(model(), GpuWarden(socket=daemon.path))
    del os.environ["CUDA_VISIBLE_DEVICES"]
    return daemon.receive_all()


def case_memory(daemon: Daemon) -> Any:
    options = tf.data.Options()
    options.autotune.enabled = False  # a prefetching thread would allocate between two questions
    steady = tf.data.Dataset.from_tensor_slices(make_data(20)).batch(2).with_options(options)
    before, after = MemoryRecorder(), MemoryRecorder()
    model("adam").fit(steady, verbose=0, callbacks=[before, daemon.callback(interval=0), after])
    reports = [each for each in daemon.receive_all() if each["type"] == "Report"]
    return {"reports": reports, "before": before.seen, "after": after.seen}


def case_functions(daemon: Daemon) -> Any:
    trained, sight = model(), WrapRecorder()
    fit(trained, TrainFunctionRemaker(), daemon.callback(), sight, epochs=3, validation_data=make_data(1))
    trained.predict(make_data()[0], verbose=0, callbacks=[daemon.callback(), sight])
    return {"seen": sight.seen, "left": list_wrapped_functions(trained)}


def case_traced_again(daemon: Daemon) -> Any:
    usual, step_counter.COMPILED_RATIO = (
        step_counter.COMPILED_RATIO,
        1.0,
    )  # on a busy machine other steps may take long too
    try:
        fit(model(), TrainFunctionRemaker(), daemon.callback(), epochs=3)
    finally:
        step_counter.COMPILED_RATIO = usual
    return daemon.receive_all()


def case_copied_while_wrapped(daemon: Daemon) -> Any:
    folder, trained = Path(daemon.path + ".d"), model("adam")
    folder.mkdir()
    kept = ModelCopier(folder)
    fit(trained, daemon.callback(), kept)
    for each in kept.copies:
        fit(each, daemon.callback())
    return {"messages": daemon.receive_all(), "left": [list_wrapped_functions(each) for each in kept.copies]}


def case_forked_workers(daemon: Daemon) -> Any:
    callback, children = daemon.callback(), []

    class Forks(keras.callbacks.Callback):  # type: ignore[misc] # Keras ships no types
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:  # noqa: ARG002
            child = os.fork()
            if child == 0:
                time.sleep(60)  # holds what it has inherited, for as long as the test may take
                os._exit(0)
            children.append(child)

    fit(model(), callback, Forks())
    peer = daemon.accept()
    peer.waiting()
    run = callback._run
    assert run is not None
    run._connection.close()
    ended = peer.receive() is None
    for child in children:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return {"ended": ended, "children": len(children)}


def case_several_workers(daemon: Daemon) -> Any:
    os.environ["TF_CONFIG"] = json.dumps(
        {"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 1}}
    )
    callback = daemon.callback()
    model().predict(make_data()[0], verbose=0, callbacks=[callback])
    del os.environ["TF_CONFIG"]
    return daemon.receive_all()


def case_copies(daemon: Daemon) -> Any:
    callback = daemon.callback(name="original")
    fit(model(), callback)
    for twin in (copy.deepcopy(callback), pickle.loads(pickle.dumps(callback))):  # noqa: S301 - our own
        fit(model(), twin)
    return daemon.receive_all()


def case_copies_within_a_fit(daemon: Daemon) -> Any:
    class Copies(keras.callbacks.Callback):  # type: ignore[misc] # Keras ships no types
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:  # noqa: ARG002
            if batch == 1:
                twins.extend([copy.copy(callback), pickle.loads(pickle.dumps(callback))])  # noqa: S301 - our own

    callback, twins = daemon.callback(), list[Any]()
    fit(model(), callback, Copies())
    for twin in twins:
        twin.on_train_batch_begin(0)
    fit(model(), twins[0])
    return daemon.receive_all()


def case_bad_arguments(daemon: Daemon) -> Any:
    refused = []
    for settings in (
        {"interval": float("nan")},
        {"interval": -1},
        {"devices": ["GPU:0"]},
        {"devices": {0: "GPU-a"}},
        {"devices": {"gpu:0": "GPU-a"}},
        {"logs": "epoch"},
    ):
        try:
            GpuWarden(**settings)
        except (TypeError, ValueError) as error:
            refused.append(str(error).partition(":")[0])
    return refused


def case_unchanged(daemon: Daemon) -> Any:
    def trained(*callbacks: Any) -> tuple[Any, Any]:
        made = model("adam")
        history = fit(made, *callbacks, epochs=3, validation_data=make_data(1)).history
        return [weights.tolist() for weights in made.get_weights()], history

    return {"bare": trained(), "watched": trained(daemon.callback(interval=0))}


def case_disabled(daemon: Daemon) -> Any:
    fit(model(), daemon.callback(disabled=True))
    os.environ["GPUWARDEN_DISABLED"] = "1"
    fit(model(), daemon.callback())
    del os.environ["GPUWARDEN_DISABLED"]
    return daemon.connected()


def case_without_daemon(daemon: Daemon) -> Any:
    callback = GpuWarden(socket=daemon.path + ".absent", devices=CPU)
    return fit(model(), callback).history


def case_daemon_that_never_reads(daemon: Daemon) -> Any:
    callback = daemon.callback(interval=0)
    trained = model("adam")
    trained.fit(*make_data(400), batch_size=2, verbose=0, callbacks=[callback])
    peer = daemon.accept()
    first = len(peer.waiting())
    fit(trained, callback)
    reports = [each for each in peer.waiting() if isinstance(each, Report)]
    return {"first": first, "steps": reports[-1].steps, "dropped": reports[-1].dropped}


def case_early(daemon: Daemon) -> Any:
    os.environ["GPUWARDEN_SOCKET"] = daemon.path
    fit(model(), EARLY)
    del os.environ["GPUWARDEN_SOCKET"]
    hello = daemon.accept().receive()
    assert isinstance(hello, Hello)
    return {"framework": hello.framework, "versions": [tf.__version__, keras.__version__]}


def case_physical_devices(daemon: Daemon) -> Any:
    return list_physical_devices("CPU")


def case_logs(daemon: Daemon) -> Any:
    first, written, printed = daemon.callback(logs=True, interval=0), Path(f"{daemon.path}.csv"), io.StringIO()

    def answer(epoch: int, _logs: Any) -> None:
        if epoch == 1:
            daemon.accept().advise(Headroom(3 << 30))
        elif epoch == 2:
            daemon.kill()

    replies = keras.callbacks.LambdaCallback(on_epoch_begin=answer)
    callbacks = [first, keras.callbacks.CSVLogger(written), replies]
    with contextlib.redirect_stdout(printed):
        trained = model().fit(
            *make_data(), batch_size=2, epochs=3, verbose=2, validation_data=make_data(1), callbacks=callbacks
        )
    plain = fit(model(), daemon.callback())
    return {
        "history": trained.history,
        "csv": written.read_text(),
        "printed": printed.getvalue(),
        "peak": tf.config.experimental.get_memory_info("CPU:0")["peak"],
        "plain": list(plain.history),
    }


def case_hooks(daemon: Daemon) -> Any:
    ours = [name for name in vars(GpuWarden) if name.startswith("on_")]
    return {"ours": ours, "unknown": [name for name in ours if not hasattr(keras.callbacks.Callback, name)]}


def case_imports(daemon: Daemon) -> Any:
    return IMPORTED
