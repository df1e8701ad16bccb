"""Links of a notification of a daemon with TLS, followed in a real Chromium."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from certificates import make_certificates
from message_receivers import http_receiver
from services import Daemon, end_processes, free_port, wait_until

from browser import Browser
from mock_nvml import MockNvml

pytestmark = pytest.mark.system  # openssl, Chromium


def test_links_of_a_notification_open(tmp_path: Path, mock_nvml: MockNvml) -> None:
    """The links lead over https to the GPU's tile and the alert's page."""
    make_certificates(tmp_path, "server")
    (tmp_path / "web.yml").write_text("tls_server_config: {cert_file: server.pem, key_file: server.key}\n")
    config = tmp_path / "config.yaml"
    with http_receiver() as receiver, contextlib.closing(Browser(tmp_path)) as browser:
        config.write_text(f"""
poll: {{interval: 300ms}}
web: {{config_file: {tmp_path}/web.yml}}
notify: {{webhook: "{receiver.url}", group_wait: 1s}}
""")
        env = mock_nvml.env(gpus=1)
        daemon = Daemon(tmp_path / "daemon", "--config", str(config), env=env, port=free_port())
        with end_processes(daemon):

            def is_notified() -> bool:
                mock_nvml.xid(0, 79)  # the driver stores none for a listener that comes later
                return not receiver.received.empty()

            wait_until(is_notified, "the notification")
            (alert,) = receiver.receive().content["firing"]
            assert alert["page"].startswith(daemon.url)
            assert daemon.url.startswith("https:")
            assert [alert[link].startswith(daemon.url) for link in ("page", "more")] == [True, True]
            _open(browser, alert["page"], "document.querySelector(location.hash)?.innerText.includes('XID 79')")
            _open(browser, alert["more"], f"document.body?.innerText.includes('{alert['alert']}')")


def _open(browser: Browser, url: str, shown: str) -> None:
    """Open a page in a tab of its own, and wait for what it shows."""
    tab = browser.open_tab()
    tab.call("Security.setIgnoreCertificateErrors", ignore=True)
    tab.open(url)
    tab.wait_until(shown)
