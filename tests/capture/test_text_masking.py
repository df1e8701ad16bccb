"""Masking of text for a bug report."""

from __future__ import annotations

import pytest

from gpuwarden.capture.masking import Masks, TextMasks

UUID = "GPU-a0b1c2d0-4d4f-434b-8000-000000000000"
MASKED_UUID = "GPU-00000000-0000-4000-8000-000000000000"


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        (f"lost gpu={UUID} index=0", f"lost gpu={MASKED_UUID} index=0"),
        ("pci=00000000:3B:00.0", "pci=00000000:01:00.0"),
        ("at 12:34:56.789 of 2026-11-26", "at 12:34:56.789 of 2026-11-26"),
        ("user ada, adaptive, x-ada, ada@box.", "user NAME-1, adaptive, x-ada, NAME-1@NAME-2."),
        ('run_name="café"', 'run_name="NAME-1"'),
        ("cannot open /home/ada/data/train.npz: denied", "cannot open PATH-1: denied"),
        ("kept /proc/4711/stat, /usr/bin/python3, /api/v1/state, /metrics", None),
        ("a ratio of 3/4, and/or src/gpuwarden/x.py", None),
        ("GET https://hooks.example.org/T1/secret, ok", "GET URL-1, ok"),
        ("listening on http://127.0.0.1:9846/", None),
        ("peer 10.1.2.3:4711, any 0.0.0.0:9846", "peer ADDRESS-1:4711, any 0.0.0.0:9846"),
        ("peer 2001:db8::dead:beef, [fe80::1:2]:9093, 1:2:3:4:5:6:7:8", "peer ADDRESS-1, [ADDRESS-2]:9093, ADDRESS-3"),
        ("at [::1]:9846, [::]:9846, 20:59:25, gpuwarden:gpu:owner, std::move", None),
        (
            "http://localhost.example.org/x http://localhost:80 http://127.0.0.1/",
            "URL-1 http://localhost:80 http://127.0.0.1/",
        ),
        ('file="/home/ada/my secret plan/model.keras"', 'file="PATH-1"'),
        ("driver 590.48.01, VBIOS 96.00.A5.00.01", None),
        ('phase="train"', None),
    ],
)
def test_mask(text: str, masked: str | None) -> None:
    """Identifying parts are replaced and the rest stays; None: the text is unchanged."""
    masks = TextMasks(Masks(), ["ada", "box", "café", "train", "x"])
    assert masks.mask(text) == (text if masked is None else masked)


def test_equal_parts_stay_equal() -> None:
    """The same value has one replacement in all texts, another value another one."""
    masks = TextMasks(Masks(), ["ada", "grace", "ada-2"])
    assert masks.mask("ada grace ada-2") == "NAME-1 NAME-2 NAME-3"
    assert masks.mask("grace: /a/b /a/c /a/b") == "NAME-2: PATH-1 PATH-2 PATH-1"


def test_without_names() -> None:
    """A text is masked where no names are known."""
    assert TextMasks(Masks(), []).mask(f"{UUID} /home/ada") == f"{MASKED_UUID} PATH-1"
