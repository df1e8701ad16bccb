"""Censuses of real tensors: who holds them, and that the program is as it was."""

from __future__ import annotations

import functools
import gc
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from services import ROOT

from gpuwarden.client.census.holder_walk import ENOUGH_RATIO, HolderWalk
from gpuwarden.client.census.roots import Root, list_roots, read_locals
from system_parts import skip_without

SCRIPT = ROOT / "tests/support/staged_leaks.py"
STAGED = (
    "module_list",
    "keras_callback",
    "callback_dict",
    "closure",
    "lru_cache",
    "pytrees",
    "local_list",
    "losses_with_graphs",
)


def run_script(*arguments: str, status: int = 0) -> list[str]:
    """Run a script with as much time for the census as it needs; return its lines."""
    done = subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "STAGED_UNHURRIED": "1", "TF_CPP_MIN_LOG_LEVEL": "3"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == status, done.stderr[-2000:]
    return done.stdout.splitlines()


@functools.cache
def take_censuses(framework: str, *cases: str) -> dict[str, dict[str, Any]]:
    """Return what the censuses of staged leaks found, by case."""
    lines = run_script(str(SCRIPT), framework, *cases)
    return dict(zip(cases, map(json.loads, lines), strict=True))


@pytest.mark.parametrize(
    ("framework", "case"),
    [(each, case) for each in ("tensorflow", "jax", "torch") for case in STAGED],
)
@pytest.mark.frameworks
def test_the_holder_is_named(framework: str, case: str) -> None:
    """The largest group is the staged leak: its holder, its line, its tensors."""
    skip_without(framework)
    found = take_censuses(framework, *STAGED)[case]
    first = found["groups"][0]
    assert first["holder"] == found["holder"]
    assert (first["place"] or "").rpartition(":")[2] == str(found["line"] or "")
    assert first["bytes"] >= ENOUGH_RATIO**2 * 500 * 128 * 128 * 4  # the walk ends when nearly all have a holder
    assert first["shape"] == "128,128"
    assert first["dtype"] == "float32"


TRAPS = """
import gc, sys, threading, weakref
import tensorflow as tf
from gpuwarden.client.census.take_census import take_census

class Hostile:
    def __getattribute__(self, name): raise KeyboardInterrupt(name)
    def __eq__(self, other): raise KeyboardInterrupt
    def __hash__(self): raise KeyboardInterrupt
    def __repr__(self): raise KeyboardInterrupt
    def __len__(self): raise KeyboardInterrupt
    def __bool__(self): raise KeyboardInterrupt

hostile = [Hostile(), {"key": Hostile()}, tf.zeros(8)]

def hold_and_drop():
    kept = tf.zeros(1024)
    mine = locals()
    mine["extra"] = 1
    take_census(1, None)
    assert mine["extra"] == 1 and mine["kept"] is kept, "the program's snapshot of its locals has lost a name"
    del mine["mine"]
    del mine
    gone = weakref.ref(kept)
    take_census(1, None)
    assert kept is not None
    kept = None
    assert gone() is None, "the census keeps a tensor alive"

hold_and_drop()
for switch in (gc.enable, gc.disable):
    switch()
    was = gc.isenabled()
    assert take_census(1, None) is not None
    assert gc.isenabled() == was

def traced():
    value = tf.zeros(4)
    take_census(1, None)
    return value

sys.settrace(lambda *_: None)
assert traced() is not None
sys.settrace(None)
print("done")
"""


@pytest.mark.frameworks
def test_the_program_is_as_it_was() -> None:
    """No code of the program runs, its locals stay, no tensor is kept, the collector stays on or off."""
    skip_without("tensorflow")
    assert run_script("-c", TRAPS) == ["done"]


SAVED = """
import torch
from gpuwarden.client.census.take_census import take_census
unpacked = []
def unpack(tensor):
    unpacked.append(1)
    return tensor
class Own(torch.Tensor):
    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        raise KeyboardInterrupt(function)
take_census.__globals__.update(LISTING_SECONDS=60.0, WALK_SECONDS=60.0, NAMING_SECONDS=60.0)
weight = torch.zeros(256, 256, requires_grad=True)
losses = []
with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, unpack):
    for _ in range(50):
        losses.append((weight * 2).relu().sum())
own = [torch.zeros(1024, 1024).as_subclass(Own), torch.zeros(3, device="meta")]
census = take_census(1, None)
assert not unpacked
assert sum(group.count for group in census.groups if group.holder == "list `own`") == 1
print(census.groups[0].holder)
"""


@pytest.mark.frameworks
def test_hooks_of_saved_tensors_do_not_run() -> None:
    """Unpacking what torch saved for the backward pass may compute it again, or copy it to the GPU."""
    skip_without("torch")
    assert run_script("-c", SAVED) == ["list `losses`"]


RUNNING_LOSS = """
import torch
from gpuwarden.client.census.take_census import take_census
take_census.__globals__.update(LISTING_SECONDS=60.0, WALK_SECONDS=60.0, NAMING_SECONDS=60.0)
class Trainer:
    def __init__(self):
        self.weight = torch.zeros(256, 256, requires_grad=True)
        self.total = 0
    def train(self):
        for _ in range(50):
            self.total += (self.weight * 2).exp().mean()
trainer = Trainer()
trainer.train()
print(take_census(1, None).groups[0].holder)
"""


@pytest.mark.frameworks
def test_running_loss_with_its_graph() -> None:
    """A tensor that keeps others is named, and not the object whose attribute it is."""
    skip_without("torch")
    assert run_script("-c", RUNNING_LOSS) == ["Tensor `trainer.total`"]


OUT_OF_MEMORY = """
import atexit
import tensorflow as tf
from gpuwarden.client.census.take_census import take_census
take_census.__globals__.update(LISTING_SECONDS=60.0, WALK_SECONDS=60.0, NAMING_SECONDS=60.0)
weights = tf.zeros(8)
def report():
    first = take_census(1, None).groups[0]
    print(first.holder, first.place)
def train():
    outputs = []
    while True:
        outputs.append(tf.zeros(1024))
        if len(outputs) == 100:
            raise MemoryError
try:
    train()
except MemoryError:
    report()
report()
atexit.register(report)
train()
"""


@pytest.mark.frameworks
def test_locals_of_functions_that_an_exception_has_left(tmp_path: Path) -> None:
    """They are named while the exception is handled, not after it, and again at the exit after an uncaught one."""
    skip_without("tensorflow")
    script = tmp_path / "train.py"
    script.write_text(OUT_OF_MEMORY)
    handled, between, uncaught = run_script(str(script), status=1)
    line = 1 + OUT_OF_MEMORY.splitlines().index("        outputs.append(tf.zeros(1024))")
    assert handled == uncaught == f"list `outputs` of train() {script}:{line}"
    assert "outputs" not in between


def test_walk_is_cut_at_its_deadline() -> None:
    """A walk without time ends at once and says so."""
    walk = HolderWalk({}, {}, skip_host=False, deadline=0.0)
    walk.run([Root("names", {"a": [1]}, __file__)], all_listed=True)
    assert walk.was_cut


def test_locals_of_a_frame_leave_no_snapshot() -> None:
    """Values in a frame's locals are not kept after the program has dropped them."""

    class Value:
        pass

    def hold() -> int:
        value = Value()
        assert read_locals(sys._getframe())["value"] is value
        before = len([each for each in gc.get_objects() if type(each) is Value])
        value = None  # type: ignore[assignment]
        return before - len([each for each in gc.get_objects() if type(each) is Value])

    assert hold() == 1
    assert any(root.name == "STAGED" for root in list_roots())
