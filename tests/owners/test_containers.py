"""Names of containers and pods, from a runtime's socket and from Kubernetes' file names."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from container_runtime import Runtime
from folders import make_accessible

from gpuwarden.metrics.labels import MAX_CHARACTERS
from gpuwarden.owners import containers, unix_http
from gpuwarden.owners.cgroup_path import CgroupOwner, Container
from gpuwarden.owners.containers import RETRY_SECONDS, SHORT_ID, ContainerNames
from system_parts import needs, require

ID = "0123456789abcdef" * 4
OTHER = "fedcba9876543210" * 4
POD = "1a2b3c4d-0000-1111-2222-123456789abc"
DOCKER, PODMAN = Container(ID, "docker"), Container(ID, "podman")


async def wait_until(condition: Callable[[], object]) -> None:
    """Wait until a task has made the condition true."""

    async def wait() -> None:
        while not condition():
            await asyncio.sleep(0.005)

    await asyncio.wait_for(wait(), 20)


def disable_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Never retry a failed lookup while a test runs."""
    monkeypatch.setattr(containers, "RETRY_SECONDS", 1e9)


def retry_immediately(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retry a failed lookup at the next call."""
    monkeypatch.setattr(containers, "RETRY_SECONDS", 0)


def test_docker_names_its_containers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A container has its id as its name until Docker returns its name, which is requested once."""
    disable_retries(monkeypatch)

    async def scenario() -> None:
        async with Runtime(tmp_path / "docker.sock", {ID: "/train"}) as docker:
            names = ContainerNames(docker.socket, None, None)
            places = [CgroupOwner(DOCKER), CgroupOwner(DOCKER), CgroupOwner(Container(OTHER, "docker"))]
            names.refresh(places)
            assert names.container_name(DOCKER) == ID[:SHORT_ID]
            await wait_until(lambda: len(docker.requests) == 2)
            await wait_until(lambda: names.container_name(DOCKER) == "train")
            assert names.container_name(Container(OTHER, "docker")) == OTHER[:SHORT_ID]  # 404
            names.refresh(places)
            assert sorted(docker.requests) == [f"/containers/{ID}/json", f"/containers/{OTHER}/json"]
            names.refresh([])
            assert names.container_name(DOCKER) == ID[:SHORT_ID]  # dropped with its container

    asyncio.run(scenario())


def test_each_runtime_is_queried_for_its_containers(tmp_path: Path) -> None:
    """Podman is queried for its containers, both for an unknown runtime, and a user's runtime for that user."""

    async def scenario() -> None:
        async with (
            Runtime(tmp_path / "docker.sock", {}) as docker,
            Runtime(tmp_path / "podman.sock", {ID: "train"}) as podman,
            Runtime(tmp_path / "users/1000/podman/podman.sock", {ID: "mine"}) as users,
        ):
            names = ContainerNames(docker.socket, podman.socket, None, tmp_path / "users")
            unsaid, own = Container(ID, ""), Container(ID, "podman", 1000)
            names.refresh([CgroupOwner(PODMAN)])
            await wait_until(lambda: names.container_name(PODMAN) == "train")
            assert not docker.requests
            names.refresh(
                [
                    CgroupOwner(unsaid),
                    CgroupOwner(own),
                    CgroupOwner(Container(OTHER, "cri-o")),
                    CgroupOwner(Container("101", "lxc")),
                ]
            )
            await wait_until(lambda: (names.container_name(unsaid), names.container_name(own)) == ("train", "mine"))
            assert (len(docker.requests), len(podman.requests), len(users.requests)) == (1, 2, 1)
            assert names.container_name(Container("101", "lxc")) == "101"

    asyncio.run(scenario())


def test_a_runtime_that_hangs_is_queried_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A runtime that hangs is queried for one container, and no call waits; later it is queried again."""
    retry_immediately(monkeypatch)
    monkeypatch.setattr(containers, "ANSWER_SECONDS", 0.2)

    async def scenario() -> None:
        async with Runtime(tmp_path / "docker.sock", {ID: "/train"}) as docker:
            docker.silent = True
            names = ContainerNames(docker.socket, None, None)
            many = [CgroupOwner(Container(f"{n:064x}", "docker")) for n in range(50)]
            names.refresh(many)
            await wait_until(lambda: names._asking and names._asking.done())
            assert len(docker.requests) == 1
            docker.silent = False
            names.refresh([CgroupOwner(DOCKER)])
            await wait_until(lambda: names.container_name(DOCKER) == "train")

    asyncio.run(scenario())


def test_a_socket_without_accept_does_not_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stopped runtime, its queue full, does not block the event loop."""
    monkeypatch.setattr(containers, "ANSWER_SECONDS", 0.2)

    async def scenario() -> None:
        with contextlib.ExitStack() as stack:
            full = stack.enter_context(socket.socket(socket.AF_UNIX))
            full.bind(str(tmp_path / "docker.sock"))
            full.listen(0)
            with contextlib.suppress(BlockingIOError):
                for _ in range(9):
                    waiting = stack.enter_context(socket.socket(socket.AF_UNIX))
                    waiting.setblocking(False)
                    waiting.connect(str(tmp_path / "docker.sock"))
            names = ContainerNames(tmp_path / "docker.sock", None, None)
            names.refresh([CgroupOwner(DOCKER)])
            await asyncio.wait_for(asyncio.shield(names._asking or asyncio.sleep(0)), 20)
            assert names.container_name(DOCKER) == ID[:SHORT_ID]

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"HTTP/1.1 200 OK\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n[]",
        b'HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n{"Name":7}',
        b'HTTP/1.1 500 Oh\r\nContent-Length: 14\r\n\r\n{"Name":"oops"}',
        b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\n\xff\xfe{",
        b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n" + b"[" * 100000,
        b"HTTP/1.1 200 OK\r\n\r\n" + b" " * (1 << 20),
        b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 10000,
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: tcp\r\n\r\n",
        b"SSH-2.0-OpenSSH\r\n",
    ],
)
def test_invalid_responses(raw: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After any response of a socket's owner, the id stays the name, and the task ends without an exception."""
    disable_retries(monkeypatch)

    async def scenario() -> None:
        async with Runtime(tmp_path / "docker.sock", {}, raw) as docker:
            names = ContainerNames(docker.socket, None, None)
            names.refresh([CgroupOwner(DOCKER)])
            assert names._asking
            await asyncio.wait_for(names._asking, 20)
            assert names.container_name(DOCKER) == ID[:SHORT_ID]

    asyncio.run(scenario())


def test_a_large_response_is_bounded_and_does_not_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A large response of a user's own runtime is limited, and does not block the event loop."""
    monkeypatch.setattr(unix_http, "MAX_RESPONSE_BYTES", 1 << 19)
    chunks = 100_000
    flood = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"1\r\nx\r\n" * chunks
    turns = 0

    async def count_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async def scenario() -> None:
        async with Runtime(tmp_path / "docker.sock", {}, flood) as docker:
            task = asyncio.create_task(count_turns())
            with pytest.raises(OSError, match=f"exceeds {unix_http.MAX_RESPONSE_BYTES} bytes"):
                await unix_http.get(docker.socket, f"/containers/{ID}/json", 60)
            task.cancel()

    asyncio.run(scenario())
    assert turns > 50


def test_names_are_bounded(tmp_path: Path) -> None:
    """A name from a user's own runtime is truncated in the label."""

    async def scenario() -> None:
        async with Runtime(tmp_path / "docker.sock", {ID: "/" + "x" * 100_000}) as docker:
            names = ContainerNames(docker.socket, None, None)
            names.refresh([CgroupOwner(DOCKER)])
            await wait_until(lambda: len(names.container_name(DOCKER)) == MAX_CHARACTERS)

    asyncio.run(scenario())


def test_stop_cancels_a_query(tmp_path: Path) -> None:
    """A daemon that stops does not wait for a runtime."""

    async def scenario() -> None:
        async with Runtime(tmp_path / "docker.sock", {}) as docker:
            docker.silent = True
            names = ContainerNames(docker.socket, None, None)
            names.refresh([CgroupOwner(DOCKER)])
            await wait_until(lambda: docker.requests)
            names.stop()
            assert names._asking
            with pytest.raises(asyncio.CancelledError):
                await asyncio.wait_for(names._asking, 20)

    asyncio.run(scenario())


def test_kubernetes_names_by_file_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names of kubelet's log files give pods and containers their names, also if the files come later."""
    retry_immediately(monkeypatch)
    place = CgroupOwner(Container(ID, "containerd"), POD)
    (tmp_path / "pods/other_one_00000000-0000-0000-0000-000000000000").mkdir(parents=True)
    (tmp_path / "containers").mkdir()

    async def scenario() -> None:
        names = ContainerNames(None, None, tmp_path)
        names.refresh([place])
        assert (names.container_name(Container(ID, "containerd")), names.pod_name(POD)) == (ID[:SHORT_ID], POD)
        (tmp_path / f"pods/ml_train-0_{POD}").mkdir()
        (tmp_path / f"containers/train-0_ml_trainer-gpu-{ID}.log").touch()
        names.refresh([place])
        assert (names.container_name(Container(ID, "containerd")), names.pod_name(POD)) == (
            "ml/train-0/trainer-gpu",
            "ml/train-0",
        )
        names.refresh([])
        assert names.pod_name(POD) == POD

    asyncio.run(scenario())


def test_a_named_pod_gets_another_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new or restarted container in a known pod is looked up too, at intervals until it has a name."""
    looks: list[Path] = []
    names_in = containers._names_in

    def look(folder: Path) -> list[str]:
        looks.append(folder)
        return names_in(folder)

    monkeypatch.setattr(containers, "_names_in", look)
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    first, second = Container(ID, "containerd"), Container(OTHER, "containerd")
    (tmp_path / f"pods/ml_train-0_{POD}").mkdir(parents=True)
    (tmp_path / "containers").mkdir()
    (tmp_path / f"containers/train-0_ml_trainer-{ID}.log").touch()
    names = ContainerNames(None, None, tmp_path)
    names.refresh([CgroupOwner(first, POD)])
    assert (names.pod_name(POD), names.container_name(first), len(looks)) == ("ml/train-0", "ml/train-0/trainer", 2)
    both = [CgroupOwner(first, POD), CgroupOwner(second, POD)]
    names.refresh(both)
    assert len(looks) == 2
    now += RETRY_SECONDS
    for _ in range(3):
        names.refresh(both)
    assert (names.container_name(second), len(looks)) == (OTHER[:SHORT_ID], 4)
    (tmp_path / f"containers/train-0_ml_eval-{OTHER}.log").touch()
    now += RETRY_SECONDS
    names.refresh(both)
    assert (names.container_name(second), len(looks)) == ("ml/train-0/eval", 6)
    now += RETRY_SECONDS
    names.refresh([*both, CgroupOwner(Container("101", "lxc"))])  # no log names it
    assert len(looks) == 6


def test_access_shows_what_is_denied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Access is 1 if readable, 0 if denied, absent if it does not exist; a change is detected."""
    require(os.geteuid() == 0, "only root can try what another user may: run this as root")
    monkeypatch.setattr(containers, "ACCESS_SECONDS", 0)
    (tmp_path / "pods").mkdir(mode=0o700)
    (tmp_path / "podman").mkdir(mode=0o700)
    make_accessible(tmp_path)
    with socket.socket(socket.AF_UNIX) as docker, socket.socket(socket.AF_UNIX) as podman:
        docker.bind(str(tmp_path / "docker.sock"))
        (tmp_path / "docker.sock").chmod(0o666)
        podman.bind(str(tmp_path / "podman/podman.sock"))
        names = ContainerNames(tmp_path / "docker.sock", tmp_path / "podman/podman.sock", tmp_path)
        assert names.access() == {"docker": True, "podman": True, "kubernetes": True}
        assert ContainerNames(tmp_path / "none", None, tmp_path / "none").access() == {}
        read, write = os.pipe()
        child = os.fork()
        if not child:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
            os.write(write, repr(names.access()).encode())
            os._exit(0)
        os.waitpid(child, 0)
        os.close(write)
        with os.fdopen(read) as said:
            assert said.read() == repr({"docker": True, "podman": False, "kubernetes": False})


def test_a_capability_grants_access(tmp_path: Path) -> None:
    """The capability in docs/start/install.md makes a folder of kubelet's logs readable, and access shows it."""
    require(os.geteuid() == 0, "only root can give capabilities: run this as root")
    (tmp_path / "pods").mkdir(mode=0o700)
    look = (
        "import sys; from pathlib import Path; from gpuwarden.owners.containers import ContainerNames;"
        "print(ContainerNames(None, None, Path(sys.argv[1])).access())"
    )
    as_nobody = [needs("setpriv", "util-linux"), "--reuid=65534", "--regid=65534", "--clear-groups"]
    capable = [*as_nobody, "--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"]
    done = subprocess.run([*capable, sys.executable, "-c", look, tmp_path], capture_output=True, text=True, check=True)
    assert done.stdout == "{'kubernetes': True}\n"


def test_access_is_cached(tmp_path: Path) -> None:
    """Access is cached between two checks, so polls are not delayed."""
    names = ContainerNames(tmp_path / "docker.sock", None, None)
    assert names.access() == {}
    (tmp_path / "docker.sock").touch()
    assert names.access() == {}
    assert names._access_at > time.monotonic()
