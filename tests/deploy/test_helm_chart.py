"""Helm chart and the Kubernetes manifests that are rendered from it, checked without a cluster."""

from __future__ import annotations

import json
import re
import tarfile
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml
from services import ROOT

from gpuwarden._version import __version__
from gpuwarden.config.loader import load
from system_parts import require

pytestmark = pytest.mark.system

CHART = ROOT / "deploy/helm/gpuwarden"
RULES = ROOT / "deploy/prometheus/rules/gpuwarden.yml"
POD = ROOT / "deploy/kubernetes/keras-pod.yaml"
MAX_CONFIG_MAP_BYTES = 1 << 20
ALL: dict[str, Any] = {
    "image": {"repository": "images.example.org/gpuwarden", "pullSecrets": [{"name": "images"}]},
    "config": {"poll": {"interval": "2s"}},
    "runtimeClassName": "nvidia",
    "priorityClassName": "system-node-critical",
    "rules": {"enabled": True},
    "dashboards": {"enabled": True},
}


@pytest.fixture(scope="module")
def manifests() -> Any:
    """Return the module that renders the chart, by Helm."""
    return _needs_module("helm_python") and import_module("tools.manifests")


@pytest.fixture(scope="module")
def validator() -> Any:
    """Return the checker of resources."""
    return _needs_module("kubernetes_validate")


def _needs_module(name: str) -> Any:
    require(find_spec(name) is not None, f"{name} is not installed: tools/environment.sh release")
    return import_module(name)


def render(manifests: Any, values: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the resources that the chart renders, without the notes."""
    texts = [text for name, text in manifests.render_chart(values).items() if name != "NOTES"]
    return [each for text in texts for each in load_all(text) if each]


def load_all(text: str) -> Iterator[Any]:
    """Load the documents of a YAML file, by libyaml: the dashboards are large."""
    return yaml.load_all(text, yaml.CSafeLoader)


def only(manifests: Any, kind: str, values: dict[str, Any]) -> dict[str, Any]:
    """Return the only resource of a kind."""
    (found,) = (each for each in render(manifests, values) if each["kind"] == kind)
    return found


@pytest.mark.parametrize("version", ["1.29", "1.37"])
def test_resources_are_valid(manifests: Any, validator: Any, version: str) -> None:
    """Each resource of Kubernetes itself is valid by the schemas of an older and a newer version."""
    for each in render(manifests, {**ALL, "monitor": {"kind": "ServiceMonitor"}}):
        if "monitoring.coreos.com" not in each["apiVersion"]:
            validator.validate(each, version, strict=True)


def test_lint_finds_nothing(manifests: Any) -> None:
    """Helm's own checker has neither errors nor warnings."""
    found = manifests.helm.lint(str(CHART))
    assert [message for message in found["messages"] if message["error"] != "icon is recommended"] == []
    assert found["errors"] == []


@pytest.mark.parametrize(
    "values",
    [
        {"images": {}},
        {"image": {"pullPolicy": "Sometimes"}},
        {"port": "9846"},
        {"config": {"web": {"listen": "0.0.0.0:1"}}},
        {"config": {"web": {"config_file": "/etc/gpuwarden/web-config.yml"}}},
        {"monitor": {"kind": "podmonitor"}},
        {"monitor": {"interval": "15"}},
        {"rules": {"enabled": "yes"}},
        {"socketFolder": "run/gpuwarden"},
    ],
    ids=str,
)
def test_wrong_values_are_refused(manifests: Any, values: dict[str, Any]) -> None:
    """A misspelled or mistyped value is an error of the installation, by values.schema.json."""
    with pytest.raises(manifests.helm.HelmValuesError):
        render(manifests, values)


def test_version_is_the_packages(manifests: Any) -> None:
    """Chart, application and image have the version of the package."""
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert (chart["version"], chart["appVersion"]) == (__version__, __version__)
    (container,) = only(manifests, "DaemonSet", {})["spec"]["template"]["spec"]["containers"]
    assert container["image"] == f"gpuwarden:{__version__}"


def test_daemon_has_no_rights(manifests: Any) -> None:
    """No container is privileged; the daemon is not root, without capabilities, and writes only to its two folders."""
    pod = only(manifests, "DaemonSet", ALL)["spec"]["template"]["spec"]
    (first,), (daemon,) = pod["initContainers"], pod["containers"]
    assert {"hostNetwork", "hostIPC"} & set(pod) == set()
    assert pod["automountServiceAccountToken"] is False
    assert first["securityContext"].pop("capabilities") == {"drop": ["ALL"], "add": ["CHOWN"]}
    assert daemon["securityContext"].pop("capabilities") == {"drop": ["ALL"]}
    locked = {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True}
    assert first["securityContext"] == {"runAsUser": 0, "runAsNonRoot": False, **locked}
    assert daemon["securityContext"] == locked
    (user,) = re.findall(r"^USER (\d+):\1$", (ROOT / "deploy/Containerfile").read_text(), re.MULTILINE)
    assert {pod["securityContext"]["runAsUser"], pod["securityContext"]["runAsGroup"]} == {int(user)}
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert first["command"][1] == f"{user}:{user}"
    writable = {mount["mountPath"] for mount in daemon["volumeMounts"] if not mount.get("readOnly")}
    assert writable == set(first["command"][2:]) == {"/run/gpuwarden", "/var/lib/gpuwarden"}


def test_labels_of_nodes_replace_the_default(manifests: Any) -> None:
    """Without GPU feature discovery no node has the default label: a label of one's own is then the only one."""
    for values, labels in (({}, {"nvidia.com/gpu.present": "true"}), ({"nodeSelector": {"gpu": "1"}}, {"gpu": "1"})):
        assert only(manifests, "DaemonSet", values)["spec"]["template"]["spec"]["nodeSelector"] == labels


def test_configuration_is_the_daemons(manifests: Any, tmp_path: Path) -> None:
    """The daemon accepts the configuration, with the values' options, and listens on the pod's address."""
    (file := tmp_path / "config.yaml").write_text(
        only(manifests, "ConfigMap", {**ALL, "dashboards": {}})["data"]["config.yaml"]
    )
    config = load(file)
    assert (str(config.web.listen), config.poll.interval) == ("0.0.0.0:9846", 2.0)


@pytest.mark.parametrize("kind", ["PodMonitor", "ServiceMonitor"])
def test_monitor_selects_the_daemons(manifests: Any, kind: str) -> None:
    """The monitor has the release label, finds the daemon's port, and names the job that the rules expect."""
    resources = {
        each["kind"]: each for each in render(manifests, {"monitor": {"kind": kind, "labels": {"release": "watch"}}})
    }
    monitor, template = resources[kind], resources["DaemonSet"]["spec"]["template"]
    assert monitor["metadata"]["labels"]["release"] == "watch"
    target = resources["Service"] if kind == "ServiceMonitor" else template
    assert monitor["spec"]["selector"]["matchLabels"].items() <= target["metadata"]["labels"].items()
    assert target["metadata"]["labels"][monitor["spec"]["jobLabel"]] == "gpuwarden"
    (endpoint,) = monitor["spec"]["endpoints" if kind == "ServiceMonitor" else "podMetricsEndpoints"]
    (port,) = template["spec"]["containers"][0]["ports"]
    assert endpoint["port"] == port["name"]
    if kind == "ServiceMonitor":
        (service,) = target["spec"]["ports"]
        assert (service["name"], service["targetPort"]) == (endpoint["port"], port["name"])
        assert target["spec"]["selector"].items() <= template["metadata"]["labels"].items()


def test_rules_and_dashboards_are_the_committed_ones(manifests: Any) -> None:
    """PrometheusRule and ConfigMaps hold the files of the tree, with the labels by which they are found."""
    resources = render(manifests, {**ALL, "monitor": {"labels": {"release": "watch"}}})
    (rule,) = (each for each in resources if each["kind"] == "PrometheusRule")
    assert rule["spec"] == yaml.safe_load(RULES.read_text())
    assert rule["metadata"]["labels"]["release"] == "watch"
    maps = [each for each in resources if "grafana_dashboard" in each["metadata"]["labels"]]
    assert all(sum(map(len, each["data"].values())) < MAX_CONFIG_MAP_BYTES for each in maps)
    found = {name: json.loads(text) for each in maps for name, text in each["data"].items()}
    committed = (ROOT / "grafana/dashboards").glob("*.json")
    assert found == {path.name: json.loads(path.read_text()) for path in committed}


def test_written_manifests(manifests: Any, tmp_path: Path) -> None:
    """`make manifests` writes every resource once, and a chart without links, which is complete elsewhere."""
    manifests.write_manifests(tmp_path)
    written = [each for path in tmp_path.glob("*.yaml") for each in load_all(path.read_text())]
    wanted = render(
        manifests, {"monitor": {"kind": "PodMonitor"}, "rules": {"enabled": True}, "dashboards": {"enabled": True}}
    )
    assert sorted(written, key=str) == sorted(wanted, key=str)
    with tarfile.open(tmp_path / f"gpuwarden-{__version__}.tgz") as packed:
        assert all(member.isfile() for member in packed)
        (rules,) = (member for member in packed if member.name.endswith("files/rules.yml"))
        read = packed.extractfile(rules)
        assert read is not None
        assert read.read() == RULES.read_bytes()


def test_example_pod_mounts_the_socket_folder(validator: Any) -> None:
    """The pod that trains is valid, and mounts the folder of the daemon's socket and nothing else of the node."""
    pod = yaml.safe_load(POD.read_text())
    validator.validate(pod, "1.37", strict=True)
    (volume,), (container,) = pod["spec"]["volumes"], pod["spec"]["containers"]
    (mount,) = container["volumeMounts"]
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    assert volume["hostPath"]["path"] == values["socketFolder"]
    assert (mount["mountPath"], mount["readOnly"]) == ("/run/gpuwarden", True)
