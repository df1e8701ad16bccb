"""Blocks made of copies of one box's series: a real Prometheus reads each copy as what it was made from."""

from __future__ import annotations

import math
import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import backfill
import pytest
from cloned_blocks import Copies, write_block

from system_parts import needs

BEGIN, DAY, STEP = 1_763_596_800, 86_400, 60  # midnight
SAMPLES = 700  # of a series: several chunks


def _lines(name: str) -> Iterator[str]:
    for number in range(SAMPLES):
        for gpu in ("a", "b"):
            value = math.sin(number) if gpu == "a" else 3 * number
            yield f'{name}{{instance="box",uuid="{gpu}",owner="ü"}} {value} {BEGIN + number * STEP}\n'


def _of_box(number: int, symbol: str) -> str:
    return {"box": f"box-{number:02}", "a": f"{number}-a", "b": f"{number}-b"}.get(symbol, symbol)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make forty boxes of a box's two blocks, and a day before of the one, of three other boxes."""
    needs("prometheus", "prometheus")
    needs("promtool", "prometheus")
    folder = tmp_path_factory.mktemp("cloned")
    for name in ("gpus", "runs"):
        backfill.add(folder / name, _lines(name))
    gpus, runs = ([path.parent for path in (folder / name).glob("*/meta.json")] for name in ("gpus", "runs"))
    assert len(gpus) == len(runs) == 1
    boxes = [partial(_of_box, number) for number in range(40)]
    assert write_block(folder / "data", [Copies(gpus[0], boxes), Copies(runs[0], boxes)]) == 160
    assert write_block(folder / "data", [Copies(gpus[0], boxes[:3], later=-DAY * 1000)]) == 6
    return folder / "data"


def test_every_copy_has_what_the_original_has(data: Path) -> None:
    """All samples of all copies are there, at their times, and each is found by each of its labels."""
    end = BEGIN + SAMPLES * STEP
    with backfill.serving(data, STEP, "--storage.tsdb.max-block-duration=1d") as url:
        for name in ("gpus", "runs"):
            counts = backfill.ask(url, "query", query=f"count_over_time({name}[{SAMPLES * STEP}s])", time=end)
            assert [each["value"][1] for each in counts["result"]] == [str(SAMPLES)] * 80
        for box in ("box-00", "box-39"):
            query = f'runs{{instance="{box}",uuid=~"\\\\d+-a"}}'
            (found,) = backfill.ask(url, "query_range", query=query, start=BEGIN, end=end - STEP, step=STEP)["result"]
            assert [float(value) for _time, value in found["values"]] == [math.sin(n) for n in range(SAMPLES)]
            assert found["metric"] == {"__name__": "runs", "instance": box, "uuid": f"{int(box[4:])}-a", "owner": "ü"}
        found = backfill.ask(url, "series", **{"match[]": '{uuid="39-b"}'}, start=BEGIN, end=end)
        assert [each["__name__"] for each in found] == ["gpus", "runs"]


def test_copies_of_another_day_have_its_times(data: Path) -> None:
    """What was moved by a day is there a day before, and nothing else is."""
    begin, end = BEGIN - DAY, BEGIN - DAY + SAMPLES * STEP
    with backfill.serving(data, STEP, "--storage.tsdb.max-block-duration=1d") as url:
        found = backfill.ask(url, "query_range", query='{uuid=~".+"}', start=begin, end=end - STEP, step=STEP)["result"]
        assert sorted(each["metric"]["uuid"] for each in found) == ["0-a", "0-b", "1-a", "1-b", "2-a", "2-b"]
        for each in found:
            told = [(float(time), float(value)) for time, value in each["values"]]
            value = math.sin if each["metric"]["uuid"].endswith("a") else lambda number: 3.0 * number
            assert told == [(begin + n * STEP, value(n)) for n in range(SAMPLES)]


def test_promtool_finds_the_blocks_sound(data: Path) -> None:
    """Promtool reads the index whole, and counts what is in it."""
    block = max(data.glob("*/meta.json"), key=lambda path: (path.parent / "index").stat().st_size).parent
    command = ["promtool", "tsdb", "analyze", str(data), block.name]
    told = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert "Series: 160" in told
    assert "Label names: 4" in told
