"""Web configuration file: what it accepts, as promtool does, and the message of every mistake."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
import yaml
from certificates import make_certificates

from gpuwarden.config.web_config import WebConfigError, read_web_config, uses_tls
from system_parts import needs

HASH = "$2b$04$" + "a" * 53
EXAMPLE = Path(__file__).parents[2] / "deploy/web-config.yml"


def read(folder: Path, text: str) -> object:
    """Read a text as the file."""
    path = folder / "web.yml"
    path.write_text(text)
    return read_web_config(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [", "not valid YAML: while parsing a flow node"),
        ("[1]", "expected keys and values"),
        ("tls_config: {}", "tls_config: unknown; did you mean tls_server_config?"),
        ("listen: a", "listen: unknown; known here: tls_server_config, basic_auth_users"),
        ("tls_server_config: {cert_fil: a}", "tls_server_config.cert_fil: unknown; did you mean cert_file?"),
        ("tls_server_config: {cert_file: 1}", "tls_server_config.cert_file: expected text"),
        ("tls_server_config: {cert_file: a}", "tls_server_config: set both cert_file and key_file"),
        (
            "tls_server_config: {cert_file: a, key_file: b, client_ca_file: c}",
            "tls_server_config.client_auth_type: set it to RequireAndVerifyClientCert, or leave out both",
        ),
        (
            "tls_server_config: {cert_file: a, key_file: b, client_auth_type: RequireAndVerifyClientCert}",
            "tls_server_config.client_ca_file: set it, or leave out both",
        ),
        (
            "tls_server_config: {cert_file: a, key_file: b, client_auth_type: RequireAnyClientCert}",
            "client_auth_type: RequireAnyClientCert is not supported; use VerifyClientCertIfGiven or",
        ),
        ("tls_server_config: {cert_file: a, key_file: b, min_version: TLS10}", "TLS10 is not one of TLS12, TLS13"),
        (
            "tls_server_config: {cert_file: a, key_file: b, cipher_suites: [TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256]}",
            "tls_server_config.cipher_suites: not supported; remove it",
        ),
        ("tls_server_config: {cert: a}", "tls_server_config.cert: not supported; set cert_file"),
        ("http_server_config: {headers: {}}", "http_server_config: not supported; remove it; a reverse proxy can"),
        (
            "tls_server_config: {cert_file: a, key_file: b, min_version: TLS13, max_version: TLS12}",
            "tls_server_config.max_version: TLS12 is below min_version; no client could connect",
        ),
        (f"basic_auth_users: {{a: {HASH}, a: {HASH}}}", "not valid YAML: duplicate key a"),
        ("basic_auth_users: {}\nbasic_auth_users: {}", "not valid YAML: duplicate key basic_auth_users"),
        (f"basic_auth_users: {{a: {HASH.replace('04', '32')}}}", "basic_auth_users.a: not a bcrypt hash"),
        (f"basic_auth_users: {{a: {HASH.replace('04', '03')}}}", "basic_auth_users.a: not a bcrypt hash"),
        ("basic_auth_users: {admin: secret}", "basic_auth_users.admin: not a bcrypt hash; make one with: htpasswd"),
        (f"basic_auth_users: {{'a:b': {HASH}}}", "basic_auth_users.a:b: a user name cannot have a colon"),
        ("basic_auth_users: {1: a}", "basic_auth_users: expected keys and values"),
    ],
)
def test_mistakes(tmp_path: Path, text: str, message: str) -> None:
    """Every mistake is an error that names file and key, and says what to do."""
    with pytest.raises(WebConfigError) as caught:
        read(tmp_path, text)
    said = str(caught.value.strerror)
    assert message in said
    assert said.startswith(str(tmp_path / "web.yml") + ": ")
    assert "secret" not in said


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    """A missing or a huge file, a pipe, a device or a folder is an error, and no https."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "huge.yml").write_bytes(bytes((1 << 20) + 1))
    for path, reason in (
        (tmp_path / "none.yml", "No such file"),
        (tmp_path / "huge.yml", "larger than 1 MiB"),
        (tmp_path / "pipe", "not a regular file"),  # to open it would wait for a writer
        (tmp_path, "not a regular file"),
        (Path("/dev/zero"), "not a regular file"),
    ):
        with pytest.raises(WebConfigError, match=f"cannot read: {reason}"):
            read_web_config(path)
        assert not uses_tls(path)
    assert not uses_tls(None)


def test_empty_file_changes_nothing(tmp_path: Path) -> None:
    """A file without contents has neither TLS nor logins, as in exporter-toolkit."""
    for text in ("", "tls_server_config:\n", "tls_server_config: {}\nbasic_auth_users: {}\n"):
        assert read(tmp_path, text) == read(tmp_path, "{}")


@pytest.mark.system
def test_example_is_valid_here_and_for_promtool(tmp_path: Path) -> None:
    """The shipped example, with all its lines switched on, is accepted by promtool and by gpuwarden."""
    shipped = EXAMPLE.read_text(encoding="utf-8")
    contents = re.sub(r"^( *)# ( *[\w-]+:)", r"\1\2", shipped, flags=re.MULTILINE)
    path = tmp_path / "web.yml"
    path.write_text(contents)
    found = yaml.safe_load(contents)
    assert set(found) == {"tls_server_config", "basic_auth_users"}
    assert set(found["tls_server_config"]) >= {"client_ca_file", "client_auth_type", "min_version"}
    make_certificates(tmp_path, "server")
    assert read_web_config(path).tls is not None
    promtool = needs("promtool", "prometheus")
    done = subprocess.run([promtool, "check", "web-config", path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
