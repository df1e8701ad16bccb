"""Thread for blocking calls that may hang, such as those to a disk, a directory server or the driver."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

T = TypeVar("T")


class CallThread:
    """Thread that makes blocking calls one after another, started by the first.

    A daemon thread: one that hangs must not keep the process from ending, as an executor's would.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    @property
    def pending(self) -> int:
        """Number of calls that have not begun."""
        return self._calls.qsize()

    def submit(self, function: Callable[..., T], *arguments: Any) -> Future[T]:
        """Call a function on the thread, after the earlier calls; one cancelled before its turn is left out."""
        future: Future[T] = Future()
        self._calls.put((future, partial(function, *arguments)))
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        return future

    def _run(self) -> None:
        while True:
            future, call = self._calls.get()
            if future.set_running_or_notify_cancel():
                complete(future, call)


def complete(future: Future[T], call: Callable[[], T]) -> None:
    """Make a call, and set its result, or the exception that it raised, on the future."""
    try:
        future.set_result(call())
    except Exception as error:  # noqa: BLE001 - raised where the result is read
        future.set_exception(error)
