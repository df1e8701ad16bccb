"""Each kind of target against a real server: what arrives, and what is said when it does not."""

from __future__ import annotations

import json
import time
from base64 import b64encode
from dataclasses import replace
from pathlib import Path
from urllib.parse import unquote

import pytest
from alert_samples import OWNER, gpu_down, gpu_hot, near_oom, xid
from message_receivers import PATIENCE, dripping_receiver, http_receiver, mail_receiver, silent_receiver
from services import free_port

from gpuwarden.alerts.delivery.dispatcher import message_targets
from gpuwarden.alerts.delivery.http_client import find_secrets
from gpuwarden.alerts.delivery.message import Message, Notification
from gpuwarden.alerts.delivery.target import DeliveryError, PartlySentError
from gpuwarden.config.loader import parse
from gpuwarden.config.schema import NotifyConfig
from gpuwarden.config.secrets import HIDDEN, NOT_ASCII, Secret, redact

MESSAGE = Message("box1", "docs", (Notification(near_oom()), Notification(gpu_down(9))))
TOKEN = "T0KEN-xoxb-1234567890"  # noqa: S105 - of a test
HOSTILE = Message(
    "box1", "docs", (Notification(near_oom("<!channel>\r\nBcc: eve@example.com\n\nGröße模", owner="a\nb")),)
)


def send(settings: NotifyConfig, message: Message = MESSAGE) -> None:
    """Send a message to the one target of the settings."""
    (target,) = message_targets(settings)
    target._deliver(message)


def refusal(settings: NotifyConfig) -> DeliveryError:
    """Return what is said of a message that does not get through."""
    with pytest.raises(DeliveryError) as raised:
        send(settings)
    return raised.value


def test_webhook(tmp_path: Path) -> None:
    """A webhook gets JSON with what matters, and the token that is its own."""
    (tmp_path / "token").write_text(f"{TOKEN}\n")
    with http_receiver() as server:
        url = Secret(text=f"{server.url}/alerts?room=gpu")
        send(NotifyConfig(webhook=(url,), webhook_token=Secret(file=tmp_path / "token")))
        got = server.next()
    assert got.path == "/alerts?room=gpu"
    assert got.headers["Authorization"] == f"Bearer {TOKEN}"
    assert got.headers["Content-Type"] == "application/json"
    run = next(each for each in got.content["firing"] if each["alert"] == "RunNearOutOfMemory")
    assert (run["labels"]["run_name"], run["labels"]["gpu"], run["owner"]) == ("resnet50", "3", OWNER)
    assert "1.2 GiB" in run["description"]
    assert run["do"].startswith("Save a checkpoint now.")


def test_webhook_with_user() -> None:
    """A user and a password in an address are shown to its server as such."""
    with http_receiver() as server:
        send(NotifyConfig(webhook=(Secret(text=server.url.replace("://", "://us%40er:pass@")),)))
        assert server.next().headers["Authorization"] == "Basic dXNAZXI6cGFzcw=="


@pytest.mark.parametrize("password", ["hunter2:secret", "hu%2Fnter%252%C3%BC", "p%21w"])
def test_user_that_a_server_repeats(password: str) -> None:
    """Of a user and a password in an address, what a server repeats of them in an error is hidden, in any form."""
    plain = unquote(password)
    basic = b64encode(f"bob:{plain}".encode()).decode()
    with http_receiver() as server:
        server.status = 401
        server.answer = f"bob:{plain}, {plain}; {password} ({basic}) pw: {'x' * 90} bob:{plain}".encode()
        address = server.url.replace("://", f"://bob:{password}@")
        said = str(refusal(NotifyConfig(webhook=(Secret(text=address),))))
        assert said == f"HTTP status 401: {HIDDEN}, {HIDDEN}; {HIDDEN} ({HIDDEN}) pw: {'x' * 90} {HIDDEN}"
        server.status, server.answer = 401, f"{'x' * 190} {basic}".encode()
        assert str(refusal(NotifyConfig(webhook=(Secret(text=address),)))).endswith(f"xxx {HIDDEN}")


def test_address_without_secrets_hides_nothing() -> None:
    """What has no user hides no more than itself, and what is no address is a secret as a whole."""
    assert redact("a host answers: no, not so", *find_secrets("https://host/a")) == "a host answers: no, not so"
    assert redact("json://[x at [x, as bob", *find_secrets("json://[x")) == f"{HIDDEN} at [x, as bob"


def test_short_password_hides_no_words() -> None:
    """A short password is hidden where it stands by itself, and what is said can be read still."""
    with http_receiver() as server:
        server.status, server.answer = 401, b"a password of a: 'a' is no valid password"
        address = server.url.replace("://", "://bob:a@")
        said = str(refusal(NotifyConfig(webhook=(Secret(text=address),))))
    assert said == f"HTTP status 401: {HIDDEN} password of {HIDDEN}: '{HIDDEN}' is no valid password"


def test_refusing_server() -> None:
    """What a server says against a message is told, without the address, which is a secret."""
    with http_receiver() as server:
        server.status, server.answer = 403, b"invalid_token /services/" + TOKEN.encode()
        error = refusal(NotifyConfig(webhook=(Secret(text=f"{server.url}/services/{TOKEN}"),)))
        assert str(error) == "HTTP status 403: invalid_token /[hidden]/[hidden]"
        assert error.refused


def test_busy_server() -> None:
    """A server that asks for time gets it."""
    with http_receiver() as server:
        server.status, server.answer, server.headers = 429, b"", {"Retry-After": "42"}
        error = refusal(NotifyConfig(webhook=(Secret(text=server.url),)))
    assert (str(error), error.wait, error.refused) == ("HTTP status 429 (Too Many Requests)", 42.0, False)


def test_sends_nothing_on() -> None:
    """A server that points elsewhere does not get the message, or the token, carried there."""
    with http_receiver() as server, http_receiver() as elsewhere:
        server.status, server.headers = 302, {"Location": elsewhere.url}
        assert "it redirects to another address" in str(refusal(NotifyConfig(webhook=(Secret(text=server.url),))))
        assert elsewhere.asked == 0


def test_nobody_answers() -> None:
    """A port where nobody listens, a name that nobody has, and a server that says nothing are told as such."""
    nobody = Secret(text=f"http://127.0.0.1:{free_port()}/{TOKEN}")
    assert str(refusal(NotifyConfig(webhook=(nobody,)))) == "Connection refused"
    assert "unknown host name" in str(refusal(NotifyConfig(webhook=(Secret(text="http://gpuwarden.invalid/x"),))))
    with silent_receiver() as port:
        silent = NotifyConfig(webhook=(Secret(text=f"http://127.0.0.1:{port}/"),), timeout=0.2)
        assert str(refusal(silent)) == "no answer within 0.2 s"


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (b"HTT", "no answer within 0.5 s"),
        (b"HTTP/1.1 200 OK\r\nA: ", "no answer within 0.5 s"),
        (b"HTTP/1.1 403 Forbidden\r\n\r\n", "HTTP status 403: x"),
    ],
)
def test_server_that_drips(answer: bytes, said: str) -> None:
    """A server that sends a byte now and then holds its sender for the timeout, and no longer."""
    with dripping_receiver(answer, 0.1) as port:
        began = time.monotonic()
        error = refusal(NotifyConfig(webhook=(Secret(text=f"http://127.0.0.1:{port}/"),), timeout=0.5))
        assert time.monotonic() - began < PATIENCE / 2
        assert str(error).startswith(said)


def test_answer_that_never_ends() -> None:
    """A server that says that it took a message has taken it, though the rest of its answer never comes."""
    with http_receiver() as server:
        server.whole.clear()
        server.answer = b""
        send(NotifyConfig(webhook=(Secret(text=server.url),), timeout=0.5))
        assert server.asked == 1


def test_refusal_that_never_ends() -> None:
    """The first piece of a server's reason is enough: it may send the rest a byte at a time."""
    with http_receiver() as server:
        server.whole.clear()
        server.status, server.answer = 403, b"no such channel"
        error = refusal(NotifyConfig(webhook=(Secret(text=server.url),), timeout=0.5))
    assert str(error) == "HTTP status 403: no such channel"


def test_answer_that_is_broken() -> None:
    """So has one whose answer is no HTTP after its head."""
    with http_receiver() as server:
        server.headers, server.answer = {"Transfer-Encoding": "chunked"}, b"nonsense\r\n"
        send(NotifyConfig(webhook=(Secret(text=server.url),)))
        assert server.asked == 1


def test_http_address_that_went_bad(tmp_path: Path) -> None:
    """A file that lost its address is told by its name, and not by what is in it."""
    settings = NotifyConfig(webhook=(Secret(file=tmp_path / "url"),))
    assert str(refusal(settings)) == f"the file {tmp_path}/url cannot be read: No such file or directory"
    (tmp_path / "url").write_text(TOKEN)
    assert str(refusal(settings)) == f"the file {tmp_path}/url has no address that starts with https://"


def test_token_outside_ascii() -> None:
    """A token that a header cannot hold is told by where it stands."""
    token = Secret(text="T0KEN-łódź")
    assert str(refusal(NotifyConfig(webhook=(Secret(text="http://127.0.0.1:1/"),), webhook_token=token))) == (
        f"the configuration {NOT_ASCII}"
    )


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what apprise loads
def test_apprise() -> None:
    """What apprise knows is told through it; here a web server that takes apprise's own JSON."""
    pytest.importorskip("apprise")
    with http_receiver() as server:
        send(NotifyConfig(apprise=(Secret(text=f"json://127.0.0.1:{server.port}/{TOKEN}"),)))
        got = server.next()
        assert got.content["title"].startswith("[CRITICAL] box1: 2 alerts")
        assert got.content["type"] == "failure"
        for part in ("resnet50", "GPU 9", "1.2 GiB", OWNER, "Action: Save a checkpoint now."):
            assert part in got.content["message"]
        send(
            NotifyConfig(apprise=(Secret(text=f"json://127.0.0.1:{server.port}/"),)),
            replace(
                MESSAGE,
                docs="https://x/docs",
                notifications=(Notification(near_oom("@here [a](https://evil.example)")),),
            ),
        )
        got = server.next()
        named = "Run @\u2060here [a]\u2060(https:\u2060//evil.example) (77-1) can allocate"
        assert named in got.content["title"]
        assert named in got.content["message"]
        assert "Docs: https://x/docs/reference/alerts.md#runnearoutofmemory" in got.content["message"]
        server.status = 500
        error = refusal(NotifyConfig(apprise=(Secret(text=f"json://127.0.0.1:{server.port}/{TOKEN}"),)))
        assert "500" in str(error)
        assert TOKEN not in str(error)
    assert "does not support" in str(refusal(NotifyConfig(apprise=(Secret(text="nosuch://x/"),))))


def mail_url(port: int, to: str = "ops@example.com,ml@example.com", user: str = "") -> NotifyConfig:
    """Return settings for mail through a server of this machine."""
    address = f"mailto://{user}127.0.0.1:{port}?from=gpuwarden@box.example.com&to={to}"
    return NotifyConfig(apprise=(Secret(text=address),))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what apprise loads
def test_mail_by_apprise() -> None:
    """A mail has all that matters in its subject and its text; a run's name adds no header; any script arrives."""
    with mail_receiver() as server:
        send(mail_url(server.port))
        mail = server.next()
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
        assert server.next()["To"] == "ml@example.com"
        send(mail_url(server.port, to="ops@example.com"), HOSTILE)
        mail = server.next()
        assert mail["Bcc"] is None
        assert "Größe模" in mail["Subject"]
        assert "Größe模" in mail.get_content()
        assert server.to[-1] == ["ops@example.com"]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what apprise loads
@pytest.mark.filterwarnings("ignore:Requiring AUTH")  # of the mail server, which has no TLS here
def test_mail_that_is_refused() -> None:
    """The error has the server's reason and no password; where some recipients took it, it is not sent again."""
    with mail_receiver() as server:
        server.refused = {"ml@example.com"}
        error = refusal(mail_url(server.port))
        assert isinstance(error, PartlySentError)
        assert "no such user here" in str(error)
        server.refused = {"ml@example.com", "ops@example.com"}
        assert not isinstance(refusal(mail_url(server.port)), PartlySentError)
    with mail_receiver(passwords={"alerts": "right"}) as server:
        server.refusal = "550 s3cret-password"
        error = refusal(mail_url(server.port, user="alerts:s3cret-password@"))
        assert "535" in str(error)
        assert "s3cret" not in str(error)
    assert "refused" in str(refusal(mail_url(free_port())))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what apprise loads
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
    """A service with a limit gets a long message in pieces, or its begin if they were many; the URL may choose."""
    apprise = pytest.importorskip("apprise")
    told = (near_oom(), gpu_hot(), xid(1), *(gpu_down(index) for index in range(30)))
    long = Message("box1", "docs", tuple(map(Notification, told)))
    with http_receiver() as server:
        url = f"json://127.0.0.1:{server.port}/{chosen}"
        monkeypatch.setattr(type(apprise.Apprise.instantiate(url)), "body_maxlen", longest)
        send(NotifyConfig(apprise=(Secret(text=url),)), long)
        assert server.asked == pieces
        texts = [server.next().content["message"] for _ in range(pieces)]
    assert all(len(text) <= longest for text in texts) == ("upstream" not in chosen)
    if whole:
        assert " ".join(texts).split() == long.text.split()
    else:
        assert long.text.startswith(texts[0])


def test_places_are_no_secrets() -> None:
    """How a target is called in the log and in counters tells nothing of its secret."""
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
    assert [(each.name, each.place) for each in message_targets(config.notify)] == [
        ("webhook", "webhook at h.example.com"),
        ("webhook-2", "webhook at h.example.com"),
        ("apprise", "apprise (tgram)"),
        ("apprise-2", "apprise (the file /etc/x)"),
    ]
    assert TOKEN not in repr(config)
