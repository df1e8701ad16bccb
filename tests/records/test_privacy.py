"""Private texts of run records: who reads them, and that no text of an error is forgotten."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import get_args

import pytest
from run_record_cases import example_record

from gpuwarden.records.figure import list_keys
from gpuwarden.records.privacy import WITHHELD, find_private_keys, reader, withhold_texts
from gpuwarden.records.record import RunRecord
from gpuwarden.records.record_parts import (
    RecordedAllocation,
    RecordedCensus,
    RecordedError,
    RecordedHeadline,
    RecordedTensors,
)
from gpuwarden.records.store import render_record

# Words of ours, numbers, the name of a type, and the framework's words, which have none of the user's.
PUBLIC = {
    "name",
    "evidence",
    "code",
    "kind",
    "exception",
    "phase",
    "shape",
    "dtype",
    "device",
    "allocator",
    "next_step",
}
ALICE, BOB, SERVICE = 1001, 1002, 990


def test_each_text_of_an_error_is_private_or_known_to_be_public() -> None:
    """A new text of an error must be declared Private, or added to PUBLIC with a reason."""
    private, texts = set[str](), set[str]()
    for part in (RecordedError, RecordedAllocation, RecordedTensors, RecordedHeadline):
        hints = {name: kind for name, kind, _ in list_keys(part)}
        texts |= {name for name, hint in hints.items() if hint is str or str in get_args(hint)}
        private |= {name for name, key in find_private_keys(part).items() if key.part is None}
    assert texts - private == PUBLIC
    assert {"frame", "op", "holder", "place"} <= private
    assert set(find_private_keys(RunRecord)) == {"reported_errors", "headline", "census", "run_folder"}


@pytest.mark.parametrize(
    ("uid", "own", "show", "readable"),
    [
        (None, 0, "own", set()),  # over HTTP, of root's daemon
        (None, SERVICE, "own", {SERVICE}),  # of the service, whose user has no runs
        (None, ALICE, "own", {ALICE}),  # of a user's own daemon
        (None, ALICE, "false", set()),
        (None, 0, "true", {0, ALICE, BOB, SERVICE}),
        (-1, ALICE, "own", set()),  # over the Unix socket, from a container
        (BOB, SERVICE, "own", {BOB}),
        (BOB, SERVICE, "false", {BOB}),
        (BOB, ALICE, "own", {BOB}),
        (0, SERVICE, "false", {0, ALICE, BOB, SERVICE}),
        (SERVICE, SERVICE, "false", {0, ALICE, BOB, SERVICE}),
    ],
)
def test_readers(uid: int | None, own: int, show: str, readable: set[int]) -> None:
    """A client reads the texts of these users' runs."""
    may_read = reader(uid, own, show)
    assert {each for each in (0, ALICE, BOB, SERVICE) if may_read(each)} == readable


def test_only_texts_are_withheld() -> None:
    """Kind, type, numbers and diagnosis stay, names of the program do not; a record without such texts stays."""
    tensors = RecordedTensors(1204, 4096, "2,3", "float32", "list `history`", "train.py:88")
    record = replace(example_record(), uid=ALICE, census=RecordedCensus(1.0, 7, 0.1, 1204, 4096, groups=(tensors,)))
    whole = render_record(record)
    seen, kept = json.loads(withhold_texts(whole, lambda uid: uid == BOB)), json.loads(whole)
    for error in kept["reported_errors"]:
        error["text"] = WITHHELD
        del error["frame"]
        del error["allocations"][0]["op"]
    del kept["run_folder"]
    for group in kept["census"]["groups"]:
        del group["holder"], group["place"]
    assert kept["reported_errors"]
    assert seen == kept
    assert withhold_texts(whole, lambda uid: uid == ALICE) == whole
    bare = render_record(replace(record, reported_errors=(), census=None, run_folder=None, headline=None))
    assert withhold_texts(bare, lambda _uid: False) is bare
