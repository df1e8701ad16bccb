"""Thread of the run database: blocking calls one after another, outside of the event loop."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

T = TypeVar("T")

MAX_PENDING_CALLS = 64  # beyond this the disk counts as hung


class StoreThread:
    """Thread that makes blocking calls one after another.

    A daemon thread: one in a hanging disk must not keep the process from ending, as an executor's would.
    """

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="records", daemon=True).start()

    async def call(self, function: Callable[..., T], *arguments: Any) -> T:
        """Run a function on the thread; return its result. Raises its exception, or OSError if too many calls wait."""
        if self._calls.qsize() > MAX_PENDING_CALLS:
            raise OSError(None, "the database does not answer")
        future: Future[T] = Future()
        self._calls.put((future, partial(function, *arguments)))
        return await asyncio.wrap_future(future)

    def _run(self) -> None:
        while True:
            future, call = self._calls.get()
            if future.set_running_or_notify_cancel():  # else the caller has given up
                try:
                    future.set_result(call())
                except Exception as error:  # noqa: BLE001 - raised where it is awaited
                    future.set_exception(error)
