"""Names of containers and pods, from the API of Docker and Podman, and from the names of Kubernetes' log files.

The API is queried once per container, in a task concurrent to the polls; until it answers, or without permission, the
id is used. `GET /containers/ID/json` is the same in both (docs.docker.com/reference/api/engine, docs.podman.io).
Kubelet names logs /var/log/containers/POD_NAMESPACE_CONTAINER-ID.log and /var/log/pods/NAMESPACE_POD_UID.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from gpuwarden.formatting import format_fields
from gpuwarden.metrics.labels import sanitize_label
from gpuwarden.owners import unix_http
from gpuwarden.owners.cgroup_path import CgroupOwner, Container

log = logging.getLogger(__name__)

RETRY_SECONDS = 30.0  # after a failed query
ANSWER_SECONDS = 2.0
ACCESS_SECONDS = 10.0  # between checks of permissions
MAX_LOG_FILES = 10_000
SHORT_ID = 12  # characters, as `docker ps` shows

_OK = 200
_CONTAINER_LOG = re.compile(r"([^_]+)_([^_]+)_(.+)-([0-9a-f]{64})\.log")
_POD_LOGS = re.compile(r"([^_]+)_([^_]+)_([0-9a-f-]{32,36})")


class ContainerNames:
    """Lookup of names, which are kept as long as their containers run. Used by one event loop.

    `docker` and `podman` are the system's sockets, `logs` the folder of Kubernetes' logs, each None to disable it.
    `users` has the folders with the sockets of users' own runtimes.
    """

    def __init__(
        self, docker: Path | None, podman: Path | None, logs: Path | None, users: Path = Path("/run/user")
    ) -> None:
        self._sockets = {"docker": docker, "podman": podman}
        self._users = users
        self._logs = logs
        self._containers: dict[Container, str] = {}
        self._pods: dict[str, str] = {}
        self._unnamed: dict[Container, float] = {}  # when to query again
        self._scan_at = 0.0
        self._asking: asyncio.Task[None] | None = None
        self._access: dict[str, bool] = {}
        self._access_at = 0.0

    def container_name(self, container: Container) -> str:
        """Return the container's name, or its short id."""
        return self._containers.get(container) or sanitize_label(container.id)[:SHORT_ID]

    def pod_name(self, uid: str) -> str:
        """Return the pod's namespace/name, or its uid."""
        return self._pods.get(uid, uid)

    def refresh(self, places: Iterable[CgroupOwner]) -> None:
        """Look up new containers and pods, and drop those that are gone. To be called on the loop."""
        now = time.monotonic()
        there, in_pods, pods = set[Container](), set[Container](), set[str]()
        for place in places:
            if place.container:
                there.add(place.container)
            if place.pod_uid:
                pods.add(place.pod_uid)
            if place.container and place.pod_uid:
                in_pods.add(place.container)
        self._prune(there, pods)
        # A pod may get a container at any time, for example by a restart.
        unnamed = bool(pods - self._pods.keys() or in_pods - self._containers.keys())
        if self._logs and unnamed and now >= self._scan_at:
            self._scan_at = now + RETRY_SECONDS
            self._scan(self._logs, there - self._containers.keys(), pods - self._pods.keys())
        for container in there - self._containers.keys():
            if any(self._sockets_of(container)):
                self._unnamed.setdefault(container, now)
        due = [container for container, when in self._unnamed.items() if when <= now]
        if due and (self._asking is None or self._asking.done()):
            self._unnamed |= dict.fromkeys(due, now + RETRY_SECONDS)
            self._asking = asyncio.get_running_loop().create_task(self._inspect_all(due))

    def access(self) -> Mapping[str, bool]:
        """Return whether each source of names that exists may be read."""
        now = time.monotonic()
        if now >= self._access_at:
            self._access_at = now + ACCESS_SECONDS
            pods = self._logs / "pods" if self._logs else None
            sources = [(name, path, os.W_OK) for name, path in self._sockets.items()]
            found = ((name, _is_accessible(path, how)) for name, path, how in [*sources, ("kubernetes", pods, os.R_OK)])
            self._access = {name: may for name, may in found if may is not None}
        return self._access

    def stop(self) -> None:
        """Stop the queries."""
        if self._asking is not None:
            self._asking.cancel()

    def _prune(self, there: set[Container], pods: set[str]) -> None:
        for container in (self._containers.keys() | self._unnamed.keys()) - there:
            self._containers.pop(container, None)
            self._unnamed.pop(container, None)
        for uid in self._pods.keys() - pods:
            del self._pods[uid]

    def _scan(self, logs: Path, unnamed: set[Container], pods: set[str]) -> None:
        """Find names among the log files, of which there may be many, but on a local disk."""
        for name in _names_in(logs / "pods"):
            if (match := _POD_LOGS.fullmatch(name)) and match[3] in pods:
                self._pods[match[3]] = sanitize_label(f"{match[1]}/{match[2]}")
        by_id = {container.id: container for container in unnamed}
        for name in _names_in(logs / "containers"):
            if (match := _CONTAINER_LOG.fullmatch(name)) and (container := by_id.get(match[4])):
                self._name(container, f"{match[2]}/{match[1]}/{match[3]}")

    async def _inspect_all(self, containers: Iterable[Container]) -> None:
        silent: set[Path] = set()  # failed sockets, not queried again in this pass
        for container in containers:
            for socket in self._sockets_of(container):
                if socket in silent:
                    continue
                try:
                    name = await _inspect(socket, container.id)
                except OSError as error:
                    silent.add(socket)
                    fields = format_fields(container=container.id, socket=socket, error=error)
                    log.debug("cannot query container runtime %s", fields)
                    continue
                if name:
                    self._name(container, name)

    def _sockets_of(self, container: Container) -> Iterator[Path]:
        """Return the sockets of the runtimes that may have the container."""
        for runtime in ("docker", "podman"):
            if container.runtime in (runtime, ""):
                system = self._sockets[runtime]
                if container.uid is None:
                    yield from [system] if system else []
                else:
                    yield self._users / str(container.uid) / _OF_A_USER[runtime]

    def _name(self, container: Container, name: str) -> None:
        self._containers[container] = sanitize_label(name)
        self._unnamed.pop(container, None)


_OF_A_USER = {"docker": "docker.sock", "podman": "podman/podman.sock"}


async def _inspect(socket: Path, container: str) -> str:
    """Return the container's name; empty if this runtime does not have it. Raises OSError."""
    status, body = await unix_http.get(socket, f"/containers/{container}/json", ANSWER_SECONDS)
    if status != _OK:
        return ""
    try:
        name = json.loads(body)["Name"]
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise OSError(f"{socket}: unexpected response: {error!r}") from None
    return name.removeprefix("/") if isinstance(name, str) else ""


def _names_in(folder: Path) -> list[str]:
    try:
        with os.scandir(folder) as entries:
            return [entry.name for _, entry in zip(range(MAX_LOG_FILES), entries, strict=False)]
    except OSError:
        return []


def _is_accessible(path: Path | None, how: int) -> bool | None:
    """Return whether `path` may be used; None if it does not exist."""
    if path is None:
        return None
    try:
        path.stat()
    except PermissionError:  # on a parent folder
        return False
    except OSError:
        return None
    return os.access(path, how, effective_ids=True)  # otherwise capabilities would not count
