"""Asks the daemon again and again on a thread of its own, so that one that is slow to answer holds up no key."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, NamedTuple

from gpuwarden.asking import SilenceError, StatusError, ask, url_of
from gpuwarden.config import Address

PATH = "/api/v1/state"
VERSION = 1
EVERY_SECONDS = 1.0
TIMEOUT_SECONDS = 3.0


class Answer(NamedTuple):
    """What the daemon said last, `at` a Unix time, and why it has said nothing since, empty where it has."""

    state: Any = None
    at: float = 0.0
    trouble: str = ""


def ask_once(listen: Address, timeout: float = TIMEOUT_SECONDS) -> Any:
    """Return the state. Blocks for the timeout; raises OSError that says in a line why there is none."""
    url = url_of(listen)
    try:
        state = ask(listen, PATH, timeout)
    except StatusError as error:
        if error.status == HTTPStatus.SERVICE_UNAVAILABLE:
            raise OSError(None, f"the daemon at {url} has no poll to show") from None
        if error.status == HTTPStatus.NOT_FOUND:
            raise OSError(None, f"the daemon at {url} is older than this gpuwarden: it has no {PATH}") from None
        raise OSError(None, f"{url} is no gpuwarden: it answers with status {error.status}") from None
    except SilenceError as error:
        raise OSError(None, f"no daemon answers at {url}: {error}") from None
    if not isinstance(state, dict) or "version" not in state:
        raise OSError(None, f"{url} is no gpuwarden: it answers with something else")
    if state["version"] != VERSION:
        version = repr(state["version"])[:20]
        raise OSError(None, f"the daemon at {url} has version {version} of {PATH}; this gpuwarden knows {VERSION}")
    return state


class Asker:
    """Has the latest answer; `news` is called on its thread after each try."""

    def __init__(self, listen: Address, news: Callable[[], None]) -> None:
        self.answer = Answer()  # replaced as a whole
        self._listen = listen
        self._news = news

    def start(self) -> None:
        """Begin to ask. The thread ends with the process: a call that waits cannot be cancelled."""
        threading.Thread(target=self._keep_asking, name="asker", daemon=True).start()

    def _keep_asking(self) -> None:
        while True:
            began = time.monotonic()
            try:
                self.answer = Answer(ask_once(self._listen), time.time())
            except OSError as error:
                self.answer = Answer(self.answer.state, self.answer.at, error.strerror or str(error))
            self._news()
            time.sleep(max(EVERY_SECONDS - (time.monotonic() - began), EVERY_SECONDS / 4))
