"""Loader of the configuration: validates the values of a file and of flags, each alone and together."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import fields
from difflib import get_close_matches
from itertools import combinations
from pathlib import Path
from typing import Any, TypeAlias

from gpuwarden.config.schema import LISTS, OPTIONS, SECTIONS, AlertmanagerConfig, Config
from gpuwarden.config.value_types import printable
from gpuwarden.config.yaml_reader import Entry, FileContents, Mistake, parse_text, read_file

# By the key of an option: the noun of its names for messages, and a function that returns the valid names.
KnownNames: TypeAlias = "Mapping[str, tuple[str, Callable[[], Collection[str]]]]"
_UNCHECKED: KnownNames = {}


class ConfigError(Exception):
    """Invalid configuration; `problems` has every problem, in the order of the file.

    `config` has the valid options, and the defaults of the others.
    """

    def __init__(self, problems: Sequence[Mistake], config: Config) -> None:
        super().__init__("\n".join(map(str, problems)))
        self.problems = tuple(problems)
        self.config = config


def load(
    path: Path | None,
    overrides: Mapping[str, str] | None = None,
    flags: Mapping[str, str] | None = None,
    known_names: KnownNames = _UNCHECKED,
) -> Config:
    """Load the file at `path`, or the defaults for None; `overrides`, by key, take precedence over the file.

    `flags` has the source of an override for messages, such as `{"web.listen": "--listen"}`.
    `known_names` has the options whose names are checked.
    Raises ConfigError with every problem of the file and the overrides.
    """
    contents = FileContents() if path is None else read_file(path, OPTIONS, LISTS)
    given = [Entry(key, text, (flags or {}).get(key, key)) for key, text in (overrides or {}).items()]
    return _build_config([*contents.entries, *given], contents.problems, known_names)


def parse(text: str, name: str, known_names: KnownNames = _UNCHECKED) -> Config:
    """Parse `text` as the contents of a file called `name`; raises ConfigError."""
    contents = parse_text(text, name, OPTIONS, LISTS)
    return _build_config(contents.entries, contents.problems, known_names)


def _build_config(entries: Sequence[Entry], problems: Sequence[Mistake], known_names: KnownNames) -> Config:
    values: dict[str, Any] = {}
    found = list(problems)
    written = {entry.key: entry for entry in entries}
    wrong: set[str] = set()  # sections
    for entry in entries:
        try:
            value = OPTIONS[entry.key].kind.read(entry.text)
            values[entry.key] = (*values.get(entry.key, ()), *value) if entry.of_list else value
        except ValueError as error:
            found.append(entry.problem(str(error)))
            wrong.add(entry.key.partition(".")[0])
    sections = {
        name: type(default)(
            **{item.name: values[key] for item in fields(default) if (key := f"{name}.{item.name}") in values}
        )
        for name, default in SECTIONS.items()
    }
    config = Config(**sections, **{key: value for key, value in values.items() if "." not in key})
    for keys, message in _contradictions(config, known_names):
        if wrong.isdisjoint(key.partition(".")[0] for key in keys):
            found.append(next(written[key] for key in keys if key in written).problem(message))
    if found:
        found.sort(key=lambda problem: (problem.place is None, problem.place or ()))
        raise ConfigError(found, config)
    return config


def _contradictions(config: Config, known_names: KnownNames) -> Iterator[tuple[Sequence[str], str]]:
    """Yield options that are valid alone but not together: their keys, the one to change first, and the message."""
    for name in ("memory", "oom", "thermal"):
        less, more = f"{name}_critical", f"{name}_warning"
        low, high = getattr(config.pressure, less), getattr(config.pressure, more)
        if low >= high:
            keys = (f"pressure.{less}", f"pressure.{more}")
            yield keys, f"{keys[0]} ({low:g}) must be less than {keys[1]} ({high:g})"
    sockets = {
        "runs.socket": config.runs.socket,
        "control.socket": config.control_socket,
        "web.socket": config.web_socket,
    }
    for one, other in combinations(sockets, 2):
        if sockets[one] == sockets[other]:
            yield (other, one), f"{one} and {other} are both {printable(str(sockets[one]))}; use two paths"
    yield from _alertmanager_contradictions(config.alertmanager)
    if config.notify.webhook_token and not config.notify.webhook:
        yield ("notify.webhook_token",), "set notify.webhook too: the token is sent there"
    expected = config.check.gpus
    if not ((len(expected) == 1 and expected[0].isdecimal()) or all(each.startswith("GPU-") for each in expected)):
        yield ("check.gpus",), "write UUIDs, such as GPU-…, or the number of GPUs; indexes change"
    for key, (noun, known) in known_names.items():
        section, _, item = key.partition(".")
        for name in getattr(getattr(config, section), item):
            if name not in (valid := known()):
                near = get_close_matches(name, valid, n=1)
                yield (key,), f"there is no {noun} {name}" + (f"; did you mean {near[0]}?" if near else "")


def _alertmanager_contradictions(chosen: AlertmanagerConfig) -> Iterator[tuple[Sequence[str], str]]:
    if not chosen.url:
        return
    secure = [url for url in chosen.url if url.startswith("https:")]
    given = [name for name in ("ca_file", "cert_file", "key_file") if getattr(chosen, name) is not None]
    if given and not secure:
        yield (f"alertmanager.{given[0]}",), "only for https:// URLs, and alertmanager.url has none"
    if chosen.key_file is not None and chosen.cert_file is None:
        yield ("alertmanager.key_file",), "set alertmanager.cert_file too: the key needs its certificate"
    if chosen.bearer_token and chosen.user:
        yield ("alertmanager.bearer_token",), "set either this or alertmanager.user"
    if chosen.user and not chosen.password:
        yield ("alertmanager.user",), "set alertmanager.password too"
    if chosen.password and not chosen.user:
        yield ("alertmanager.password",), "set alertmanager.user too"
    names = [name for name, _value in chosen.labels]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        yield ("alertmanager.labels",), f"duplicate label {', '.join(twice)}"
