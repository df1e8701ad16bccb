"""Real out-of-memories and their causes: `python diagnosis_cases.py UUID` runs a case for each line of its input.

The CPU stands for a GPU of 256 MiB, which the test sets. It prints the type that each raised.
"""

# ruff: noqa: D103, T201 - the tests say what each case shows

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from gpuwarden import watch
from gpuwarden.keras import GpuWarden

MIB = 1 << 18  # elements of four bytes
DEVICES = {"CPU:0": sys.argv[1]}


def model() -> Any:
    layers = [keras.layers.Dense(1000, activation="relu") for _ in range(3)]
    made = keras.Sequential([keras.layers.Input((1,)), *layers, keras.layers.Dense(1)])
    made.compile(optimizer="sgd", loss="mse")
    return made


def batches(*sizes: int) -> Any:
    """Make data in which memory is only wanted by computing with it."""

    def each() -> Iterator[tuple[Any, Any]]:
        for size in sizes:
            yield tf.zeros((size, 1)), tf.zeros((size, 1))

    return tf.data.Dataset.from_generator(each, output_signature=(tf.TensorSpec((None, 1)), tf.TensorSpec((None, 1))))


def callback(name: str) -> Any:
    return GpuWarden(name=name, devices=DEVICES)


def case_batch() -> None:
    model().fit(batches(30_000), verbose=0, callbacks=[callback("batch")])


def case_validation() -> None:
    model().fit(batches(*[500] * 10), validation_data=batches(50_000), verbose=0, callbacks=[callback("validation")])


def case_large_batch() -> None:
    model().fit(batches(*[500] * 10, 30_000), verbose=0, callbacks=[callback("large_batch")])


def case_fragmented() -> None:
    with watch("fragmented", devices=DEVICES) as run:
        run.step()
        blocks = [tf.zeros((8, MIB)) for _ in range(26)]
        del blocks[::2]
        tf.zeros((60, MIB))


def case_leak() -> None:
    kept = []
    with watch("leak", devices=DEVICES) as run:
        for _ in range(100):  # it begins late
            run.step()
            time.sleep(0.02)
        while True:
            kept.append(tf.zeros((2, MIB)))
            run.step()
            time.sleep(0.02)  # a real step takes its time


def run_case(name: str) -> dict[str, str]:
    """Run a case; return the exception."""
    raised = ""
    try:
        globals()[f"case_{name}"]()
    except tf.errors.ResourceExhaustedError as error:
        raised = type(error).__name__
    gc.collect()
    return {"case": name, "raised": raised}


def main() -> None:
    """Run a case for each line of the input."""
    tf.zeros(1)  # the devices are there
    print(json.dumps({"case": "start"}), flush=True)
    for line in sys.stdin:
        print(json.dumps(run_case(line.strip())), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
