"""Targets of each kind against real servers: payloads and delivery errors."""

from __future__ import annotations

import json
import time
from base64 import b64encode
from dataclasses import replace
from pathlib import Path
from urllib.parse import unquote

import pytest
from alert_samples import OWNER, gpu_down, gpu_hot, near_oom, xid
from message_receivers import (
    MAX_WAIT_SECONDS,
    closing_receiver,
    dripping_receiver,
    http_receiver,
    mail_receiver,
    silent_receiver,
)
from services import free_port

from gpuwarden.alerts.delivery.dispatcher import message_targets
from gpuwarden.alerts.delivery.http_client import Server, find_secrets
from gpuwarden.alerts.delivery.message import Message, Notification
from gpuwarden.alerts.delivery.target import DeliveryError, PartlySentError
from gpuwarden.config.loader import parse
from gpuwarden.config.schema import Config, NotifyConfig
from gpuwarden.config.secrets import HIDDEN, NOT_ASCII, Secret, redact

MESSAGE = Message("box1", "http://box1:9846", (Notification(near_oom()), Notification(gpu_down(9))))
TOKEN = "T0KEN-xoxb-1234567890"  # noqa: S105 - of a test
HOSTILE = Message(
    "box1", "http://box1:9846", (Notification(near_oom("<!channel>\r\nBcc: eve@example.com\n\nGröße模", owner="a\nb")),)
)


def send(settings: NotifyConfig, message: Message = MESSAGE) -> None:
    """Send a message to the only target in the settings."""
    (target,) = message_targets(Config(notify=settings))
    target._deliver(message)


def delivery_error(settings: NotifyConfig) -> DeliveryError:
    """Return the error of a failed delivery."""
    with pytest.raises(DeliveryError) as raised:
        send(settings)
    return raised.value


def test_webhook(tmp_path: Path) -> None:
    """A webhook gets the alert facts as JSON, and its own token."""
    (tmp_path / "token").write_text(f"{TOKEN}\n")
    with http_receiver() as server:
        url = Secret(text=f"{server.url}/alerts?room=gpu")
        send(NotifyConfig(webhook=(url,), webhook_token=Secret(file=tmp_path / "token")))
        got = server.receive()
    assert got.path == "/alerts?room=gpu"
    assert got.headers["Authorization"] == f"Bearer {TOKEN}"
    assert got.headers["Content-Type"] == "application/json"
    run = next(each for each in got.content["firing"] if each["alert"] == "RunNearOutOfMemory")
    assert (run["labels"]["run_name"], run["labels"]["gpu"], run["owner"]) == ("resnet50", "3", OWNER)
    assert "1.2 GiB" in run["description"]
    assert run["do"].startswith("Save a checkpoint now.")


def test_webhook_with_user() -> None:
    """User and password in a URL are sent as basic authentication."""
    with http_receiver() as server:
        send(NotifyConfig(webhook=(Secret(text=server.url.replace("://", "://us%40er:pass@")),)))
        assert server.receive().headers["Authorization"] == "Basic dXNAZXI6cGFzcw=="


@pytest.mark.parametrize("password", ["hunter2:secret", "hu%2Fnter%252%C3%BC", "p%21w"])
def test_credentials_in_an_error_are_redacted(password: str) -> None:
    """User and password from a URL are redacted in any form from the server's error text."""
    plain = unquote(password)
    basic = b64encode(f"bob:{plain}".encode()).decode()
    with http_receiver() as server:
        server.status = 401
        server.answer = f"bob:{plain}, {plain}; {password} ({basic}) pw: {'x' * 90} bob:{plain}".encode()
        address = server.url.replace("://", f"://bob:{password}@")
        said = str(delivery_error(NotifyConfig(webhook=(Secret(text=address),))))
        assert said == f"HTTP status 401: {HIDDEN}, {HIDDEN}; {HIDDEN} ({HIDDEN}) pw: {'x' * 90} {HIDDEN}"
        server.status, server.answer = 401, f"{'x' * 190} {basic}".encode()
        assert str(delivery_error(NotifyConfig(webhook=(Secret(text=address),)))).endswith(f"xxx {HIDDEN}")


def test_url_without_secrets_hides_nothing() -> None:
    """A URL without a user hides only itself; an invalid URL is a secret as a whole."""
    assert redact("a host answers: no, not so", *find_secrets("https://host/a")) == "a host answers: no, not so"
    assert redact("json://[x at [x, as bob", *find_secrets("json://[x")) == f"{HIDDEN} at [x, as bob"


def test_short_password_redacts_no_words() -> None:
    """A short password is redacted only as a whole word, so that the error stays readable."""
    with http_receiver() as server:
        server.status, server.answer = 401, b"a password of a: 'a' is no valid password"
        address = server.url.replace("://", "://bob:a@")
        said = str(delivery_error(NotifyConfig(webhook=(Secret(text=address),))))
    assert said == f"HTTP status 401: {HIDDEN} password of {HIDDEN}: '{HIDDEN}' is no valid password"


def test_rejecting_server() -> None:
    """The server's error text is reported, without the secret URL."""
    with http_receiver() as server:
        server.status, server.answer = 403, b"invalid_token /services/" + TOKEN.encode()
        error = delivery_error(NotifyConfig(webhook=(Secret(text=f"{server.url}/services/{TOKEN}"),)))
        assert str(error) == "HTTP status 403: invalid_token /[hidden]/[hidden]"
        assert error.refused


def test_server_that_reads_no_long_request() -> None:
    """An answer is read although the server has closed before it had the whole request."""
    with closing_receiver(b"HTTP/1.1 413 Content Too Large\r\nContent-Length: 7\r\n\r\ntoo big") as port:
        with pytest.raises(DeliveryError) as raised:
            Server(url=Secret(text=f"http://127.0.0.1:{port}/"), timeout=MAX_WAIT_SECONDS).post("x" * (16 << 20))
        assert (str(raised.value), raised.value.refused) == ("HTTP status 413: too big", True)


def test_busy_server() -> None:
    """Retry-After is respected."""
    with http_receiver() as server:
        server.status, server.answer, server.headers = 429, b"", {"Retry-After": "42"}
        error = delivery_error(NotifyConfig(webhook=(Secret(text=server.url),)))
    assert (str(error), error.wait, error.refused) == ("HTTP status 429 (Too Many Requests)", 42.0, False)


def test_redirect_is_not_followed() -> None:
    """A redirect is not followed: message and token stay here."""
    with http_receiver() as server, http_receiver() as elsewhere:
        server.status, server.headers = 302, {"Location": elsewhere.url}
        assert "it redirects to another address" in str(
            delivery_error(NotifyConfig(webhook=(Secret(text=server.url),)))
        )
        assert elsewhere.request_count == 0


def test_unreachable_servers() -> None:
    """A closed port, an unknown host name and a silent server have distinct errors."""
    closed = Secret(text=f"http://127.0.0.1:{free_port()}/{TOKEN}")
    assert str(delivery_error(NotifyConfig(webhook=(closed,)))) == "Connection refused"
    assert "unknown host name" in str(
        delivery_error(NotifyConfig(webhook=(Secret(text="http://gpuwarden.invalid/x"),)))
    )
    with silent_receiver() as port:
        silent = NotifyConfig(webhook=(Secret(text=f"http://127.0.0.1:{port}/"),), timeout=0.2)
        assert str(delivery_error(silent)) == "no answer within 0.2 s"


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (b"HTT", "no answer within 0.5 s"),
        (b"HTTP/1.1 200 OK\r\nA: ", "no answer within 0.5 s"),
        (b"HTTP/1.1 403 Forbidden\r\n\r\n", "HTTP status 403: x"),
    ],
)
def test_slow_server_times_out(answer: bytes, said: str) -> None:
    """A server that sends one byte at a time blocks the sender no longer than the timeout."""
    with dripping_receiver(answer, 0.1) as port:
        began = time.monotonic()
        error = delivery_error(NotifyConfig(webhook=(Secret(text=f"http://127.0.0.1:{port}/"),), timeout=0.5))
        assert time.monotonic() - began < MAX_WAIT_SECONDS / 2
        assert str(error).startswith(said)


def test_endless_success_body() -> None:
    """A success status counts as delivered, even if the body never ends."""
    with http_receiver() as server:
        server.may_finish.clear()
        server.answer = b""
        send(NotifyConfig(webhook=(Secret(text=server.url),), timeout=0.5))
        assert server.request_count == 1


def test_endless_error_body() -> None:
    """The first part of an error body is enough, even if the body never ends."""
    with http_receiver() as server:
        server.may_finish.clear()
        server.status, server.answer = 403, b"no such channel"
        error = delivery_error(NotifyConfig(webhook=(Secret(text=server.url),), timeout=0.5))
    assert str(error) == "HTTP status 403: no such channel"


def test_malformed_success_body() -> None:
    """A success status counts as delivered, even if the body is malformed."""
    with http_receiver() as server:
        server.headers, server.answer = {"Transfer-Encoding": "chunked"}, b"nonsense\r\n"
        send(NotifyConfig(webhook=(Secret(text=server.url),)))
        assert server.request_count == 1


def test_url_file_without_a_url(tmp_path: Path) -> None:
    """An error about a file without a URL names the file, not its content."""
    settings = NotifyConfig(webhook=(Secret(file=tmp_path / "url"),))
    assert str(delivery_error(settings)) == f"the file {tmp_path}/url cannot be read: No such file or directory"
    (tmp_path / "url").write_text(TOKEN)
    assert str(delivery_error(settings)) == f"the file {tmp_path}/url has no address that starts with https://"


def test_token_outside_ascii() -> None:
    """An error about a token with non-ASCII characters names where the token is configured."""
    token = Secret(text="T0KEN-łódź")
    assert str(delivery_error(NotifyConfig(webhook=(Secret(text="http://127.0.0.1:1/"),), webhook_token=token))) == (
        f"the configuration {NOT_ASCII}"
    )


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # raised by imports of apprise
def test_apprise() -> None:
    """An apprise URL works, here with a web server that takes apprise's own JSON."""
    pytest.importorskip("apprise")
    with http_receiver() as server:
        send(NotifyConfig(apprise=(Secret(text=f"json://127.0.0.1:{server.port}/{TOKEN}"),)))
        got = server.receive()
        assert got.content["title"].startswith("[CRITICAL] box1: 2 alerts")
        assert got.content["type"] == "failure"
        for part in ("resnet50", "GPU 9", "1.2 GiB", OWNER, "Action: Save a checkpoint now."):
            assert part in got.content["message"]
        send(
            NotifyConfig(apprise=(Secret(text=f"json://127.0.0.1:{server.port}/"),)),
            replace(
                MESSAGE,
                daemon_url="https://x/box1",
                notifications=(Notification(near_oom("@here [a](https://evil.example)")),),
            ),
        )
        got = server.receive()
        named = "Run @\u2060here [a]\u2060(https:\u2060//evil.example) (77-1) can allocate"
        assert named in got.content["title"]
        assert named in got.content["message"]
        assert "Runbook: https://x/box1/alerts/RunNearOutOfMemory" in got.content["message"]
        server.status = 500
        error = delivery_error(NotifyConfig(apprise=(Secret(text=f"json://127.0.0.1:{server.port}/{TOKEN}"),)))
        assert "500" in str(error)
        assert TOKEN not in str(error)
    assert "does not support" in str(delivery_error(NotifyConfig(apprise=(Secret(text="nosuch://x/"),))))


def mail_url(port: int, to: str = "ops@example.com,ml@example.com", user: str = "") -> NotifyConfig:
    """Return settings for mail through a local server."""
    address = f"mailto://{user}127.0.0.1:{port}?from=gpuwarden@box.example.com&to={to}"
    return NotifyConfig(apprise=(Secret(text=address),))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # raised by imports of apprise
def test_mail_by_apprise() -> None:
    """A mail has all facts in subject and text; a run name adds no header; any script is kept."""
    with mail_receiver() as server:
        send(mail_url(server.port))
        mail = server.receive()
        assert mail["From"] == "gpuwarden@box.example.com"
        assert mail["Subject"].startswith("[CRITICAL] box1: 2 alerts: GpuDown: GPU 9; RunNearOutOfMemory: run resnet50")
        text = mail.get_content().replace("\r\n", "\n")
        for part in (
            "Run resnet50 (77-1)",
            "GPU 9 (",
            "1.2 GiB",
            f"Owner: {OWNER}.",
            "\nAction: Save a checkpoint now.",
        ):
            assert part in text
        assert server.receive()["To"] == "ml@example.com"
        send(mail_url(server.port, to="ops@example.com"), HOSTILE)
        mail = server.receive()
        assert mail["Bcc"] is None
        assert "Größe模" in mail["Subject"]
        assert "Größe模" in mail.get_content()
        assert server.recipients[-1] == ["ops@example.com"]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # raised by imports of apprise
@pytest.mark.filterwarnings("ignore:Requiring AUTH")  # the mail server has no TLS here
def test_rejected_mail() -> None:
    """The error has the server's reason and no password; a mail accepted for some recipients is not re-sent."""
    with mail_receiver() as server:
        server.refused = {"ml@example.com"}
        error = delivery_error(mail_url(server.port))
        assert isinstance(error, PartlySentError)
        assert "no such user here" in str(error)
        server.refused = {"ml@example.com", "ops@example.com"}
        assert not isinstance(delivery_error(mail_url(server.port)), PartlySentError)
    with mail_receiver(passwords={"alerts": "right"}) as server:
        server.refusal = "550 s3cret-password"
        error = delivery_error(mail_url(server.port, user="alerts:s3cret-password@"))
        assert "535" in str(error)
        assert "s3cret" not in str(error)
    assert "refused" in str(delivery_error(mail_url(free_port())))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # raised by imports of apprise
@pytest.mark.parametrize(
    ("longest", "chosen", "pieces", "whole"),
    [
        (1500, "", 3, True),
        (100, "", 1, False),
        (9000, "", 1, True),
        (1500, "?overflow=truncate", 1, False),
        (1500, "?overflow=upstream", 1, True),
    ],
)
def test_apprise_service_with_short_messages(
    monkeypatch: pytest.MonkeyPatch, longest: int, chosen: str, pieces: int, *, whole: bool
) -> None:
    """A long message is split for a service with a length limit, or truncated if too many; the URL may choose."""
    apprise = pytest.importorskip("apprise")
    alerts = (near_oom(), gpu_hot(), xid(1), *(gpu_down(index) for index in range(30)))
    long = Message("box1", "http://box1:9846", tuple(map(Notification, alerts)))
    with http_receiver() as server:
        url = f"json://127.0.0.1:{server.port}/{chosen}"
        monkeypatch.setattr(type(apprise.Apprise.instantiate(url)), "body_maxlen", longest)
        send(NotifyConfig(apprise=(Secret(text=url),)), long)
        assert server.request_count == pieces
        texts = [server.receive().content["message"] for _ in range(pieces)]
    assert all(len(text) <= longest for text in texts) == ("upstream" not in chosen)
    if whole:
        assert " ".join(texts).split() == long.text.split()
    else:
        assert long.text.startswith(texts[0])


def test_target_names_show_no_secret() -> None:
    """The target name in logs and counters shows no secret."""
    config = parse(
        json.dumps(
            {
                "notify": {
                    "webhook": [f"https://u:p4ssword@h.example.com/{TOKEN}", f"https://h.example.com/{TOKEN}"],
                    "apprise": [f"tgram://{TOKEN}/1", "file:/etc/x"],
                }
            }
        ),
        "f",
    )
    assert [(each.name, each.place) for each in message_targets(config)] == [
        ("webhook", "webhook at h.example.com"),
        ("webhook-2", "webhook at h.example.com"),
        ("apprise", "apprise (tgram)"),
        ("apprise-2", "apprise (the file /etc/x)"),
    ]
    assert TOKEN not in repr(config)
