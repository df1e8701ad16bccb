"""Real error messages (error_messages/README.md): well formed, many, and each classified as what it was."""

import math
import re
from collections import Counter
from typing import Any

from error_samples import SAMPLES, Sample, list_facts, read_file, read_samples

from gpuwarden.errors.recognition import PROBLEMS
from gpuwarden.protocol.codec import decode, encode
from gpuwarden.protocol.messages import ERROR_KINDS

FILES = sorted(SAMPLES.glob("*.yaml"))
FACTS = ["requested_bytes", "shape", "dtype", "device", "allocator", "op"]
FIELDS = {"type", "class", "problem", "source", "message", "note", "allocation", "further_allocations", "held_out"}
BYTES = {"half": 2, "float": 4, "float32": 4, "float64": 8}


def everything() -> list[dict[str, Any]]:
    """Read the samples of all files."""
    return [sample for file in FILES for sample in read_file(file)]


def exceptions() -> list[Sample]:
    """Return the samples that are an exception's text, as the client sees it."""
    return [sample for sample in read_samples() if not sample.is_log]


def allocations(sample: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the facts of a message about the requested memory, one for each device."""
    return [*([sample["allocation"]] if "allocation" in sample else []), *sample.get("further_allocations", [])]


def test_samples_are_well_formed() -> None:
    """Each sample has the fields that a test of the classes reads, and a source."""
    for name, sample in [(file, sample) for file in FILES for sample in read_file(file)]:
        where = f"{name.name}: {sample.get('source')}"
        assert {"type", "class", "problem", "source", "message"} <= set(sample), where
        assert set(sample) <= FIELDS, where
        assert sample["class"] in ERROR_KINDS, where
        assert PROBLEMS[sample["problem"]].kind == sample["class"], where
        assert re.fullmatch(r"https://[^\s]+|produced with .+", sample["source"]), where
        assert re.fullmatch(r"[A-Za-z_][\w.:]*", sample["type"]), where
        assert 0 < len(sample["message"].encode()) <= 6000, where
        assert not re.search(r"[\w.]+@[\w-]+\.\w+|/home/(?!user/)", sample["message"]), f"{where}: names a person"


def test_list_facts_memory_stand_in_the_text() -> None:
    """Only a message about memory has facts of it, and each is in its text or follows from it."""
    for sample in everything():
        assert sample["class"] in {"device_oom", "host_oom"} or not allocations(sample), sample["source"]
        for facts in allocations(sample):
            assert list(facts) == FACTS, sample["source"]
            text = re.sub(r"\s", "", sample["message"])
            for name in ("dtype", "device", "allocator", "op"):
                assert facts[name] is None or re.sub(r"\s", "", facts[name]) in text, f"{sample['source']}: {name}"
            if facts["shape"] is not None:
                assert ",".join(map(str, facts["shape"])) in text, sample["source"]
                assert facts["requested_bytes"] == math.prod(facts["shape"]) * BYTES[facts["dtype"]], sample["source"]


def test_no_message_stands_twice() -> None:
    """Two copies would count as two successes."""
    counted = Counter(sample["message"] for sample in everything())
    assert [message for message, times in counted.items() if times > 1] == []


def test_there_are_enough() -> None:
    """There are enough messages to show that a pattern fits more than a few."""
    assert len(everything()) >= 200


def test_messages() -> None:
    """The kind is the one that the message's thread shows; each fact of an allocation is the one it states."""
    wrong = {}
    for sample in exceptions():
        error = sample.classify()
        found = error.kind, [(fact, found) for fact, _, found in list_facts(sample)]
        if found != (sample.kind, [(fact, stated) for fact, stated, _ in list_facts(sample)]):
            wrong[sample.source] = found
        assert decode(encode(error)) == error, sample.source
    assert wrong == {}


def test_problems() -> None:
    """The first cause is the one that the message's thread shows: of all that were not held out, of 9 in 10 others."""
    everything = list(read_samples())
    wrong = {each.source: found for each in everything if (found := each.find_problem()) != each.problem}
    held_out = {each.source for each in everything if each.held_out}
    assert set(wrong) <= held_out
    assert len(held_out) >= 90
    assert len(wrong) <= len(held_out) // 10


def test_every_kind_is_met() -> None:
    """Each kind has a real message."""
    assert {sample.kind for sample in exceptions()} == set(ERROR_KINDS)
