"""Provisioning of Grafana: its files and the compose file are consistent."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import dashboards
import yaml
from offenders import check_all

from gpuwarden._version import __version__

REPOSITORY = Path(__file__).parents[2]
DEPLOY, PROVISIONING = REPOSITORY / "deploy", REPOSITORY / "grafana" / "provisioning"
COMPOSE: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
CONTAINERFILE = (DEPLOY / "Containerfile").read_text()
(SOURCE,) = yaml.safe_load((PROVISIONING / "datasources" / "gpuwarden.yaml").read_text())["datasources"]
(PROVIDER,) = yaml.safe_load((PROVISIONING / "dashboards" / "gpuwarden.yaml").read_text())["providers"]
PROMETHEUS: dict[str, Any] = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())


# Readiness endpoint of each service.
HEALTH = {
    "prometheus": ("127.0.0.1:9090", "/-/ready"),
    "alertmanager": ("127.0.0.1:9093", "/-/ready"),
    "grafana": ("127.0.0.1:3000", "/api/health"),
}


def _folders(service: str) -> dict[str, Path]:
    """Return the mounts of the repository in a service: folders there by folders in the container."""
    mounts = (mount.split(":") for mount in SERVICES[service]["volumes"])
    return {inside: DEPLOY / folder for folder, inside, *_mode in mounts if folder.startswith(".")}


def host_path(service: str, path: str) -> Path:
    """Return the repository file at a path in a service's container."""
    ((inside, folder),) = ((i, o) for i, o in _folders(service).items() if path.startswith(f"{i}/"))
    return folder / path.removeprefix(f"{inside}/")


def test_provisioning_matches_the_shipped_prometheus() -> None:
    """Grafana's data source has Prometheus' port and the scrape interval of the shipped configuration."""
    assert (SOURCE["type"], SOURCE["url"]) == ("prometheus", "http://localhost:9090")
    assert SOURCE["jsonData"]["timeInterval"] == PROMETHEUS["global"]["scrape_interval"]
    assert (PROVIDER["type"], PROVIDER["allowUiUpdates"]) == ("file", False)
    assert Path(PROVIDER["options"]["path"]).is_absolute()


@check_all({name: name for name in HEALTH})
def test_compose_service_is_complete(service: str) -> None:
    """Each service is pinned, reaches the daemon and the other services on the host, and mounts existing files."""
    known = {"image", "network_mode", "restart", "command", "environment", "volumes", "healthcheck"}
    assert set(SERVICES[service]) <= known
    assert SERVICES[service]["network_mode"] == "host"
    assert re.search(r"[a-z]:v?\d+\.\d+\.\d+$", SERVICES[service]["image"])
    # The images have BusyBox, whose wget has only an exit status.
    *wget, url = SERVICES[service]["healthcheck"]["test"]
    assert wget == ["CMD", "wget", "--quiet", "--spider"]
    address, path = HEALTH[service]
    assert url == f"http://{address}{path}"
    settings = {*SERVICES[service].get("command", ()), *map(str, SERVICES[service].get("environment", {}).values())}
    assert f"--web.listen-address={address}" in settings or set(address.split(":")) <= settings
    assert all(folder.is_dir() for folder in _folders(service).values())
    named = {mount.split(":")[0] for mount in SERVICES[service]["volumes"]} - {
        mount for mount in (each.split(":")[0] for each in SERVICES[service]["volumes"]) if mount.startswith(".")
    }
    assert named <= set(COMPOSE["volumes"])


def test_compose_daemon_has_no_rights() -> None:
    """The daemon has the image's version and no capability, all GPUs, and folders that belong to its user."""
    daemon = SERVICES["gpuwarden"]
    assert daemon["image"] == f"gpuwarden:{__version__}"
    assert (daemon["cap_drop"], daemon["security_opt"]) == (["ALL"], ["no-new-privileges:true"])
    assert {"cap_add", "privileged", "user"} & set(daemon) == set()
    assert (daemon["network_mode"], daemon["pid"]) == ("host", "host")
    # podman-compose ignores a device without the capability gpu.
    (device,) = daemon["deploy"]["resources"]["reservations"]["devices"]
    assert device == {"driver": "nvidia", "count": "all", "capabilities": ["gpu", "utility"]}
    sockets, records = daemon["volumes"]
    folder = sockets["source"]
    assert sockets == {"type": "bind", "source": folder, "target": folder, "bind": {"create_host_path": False}}
    ((user, group),) = re.findall(r"^USER (\d+):(\d+)$", CONTAINERFILE, re.MULTILINE)
    assert f"echo 'd {folder} 0755 {user} {group}'" in (REPOSITORY / "docs/start/containers.md").read_text()
    assert f"install -d -o {user} -g {group} {folder} {records.partition(':')[2]}\n" in CONTAINERFILE


def test_compose_health_check_has_the_configuration() -> None:
    """The daemon's health check reads the image's configuration file: without it, it fails under TLS."""
    (command,) = re.findall(r"^CMD (\[.*\])$", CONTAINERFILE, re.MULTILINE)
    assert SERVICES["gpuwarden"]["healthcheck"]["test"][-2:] == json.loads(command)[-2:]


def test_compose_grafana_finds_dashboards_and_prometheus() -> None:
    """Grafana has the folder of the dashboards, its home dashboard, and the address of its data source."""
    folders = _folders("grafana")
    assert folders[PROVIDER["options"]["path"]].resolve() == dashboards.COMMITTED
    assert folders["/etc/grafana/provisioning"].resolve() == PROVISIONING
    home = SERVICES["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert host_path("grafana", home).is_file()
    assert (
        f"--web.listen-address={SOURCE['url'].replace('http://localhost', '127.0.0.1')}"
        in SERVICES["prometheus"]["command"]
    )
    ((target,),) = (
        c["targets"] for manager in PROMETHEUS["alerting"]["alertmanagers"] for c in manager["static_configs"]
    )
    assert f"--web.listen-address={target}" in SERVICES["alertmanager"]["command"]
