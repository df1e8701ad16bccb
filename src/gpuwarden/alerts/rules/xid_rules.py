"""What the alerts on XIDs take from the table of codes: which fire them, and what to do about each."""

from __future__ import annotations

from collections.abc import Iterator

from gpuwarden.xid.codes import Action, Severity, codes, explain

_FOLDS: tuple[Severity, ...] = ("page", "warn")


def values() -> Iterator[tuple[str, str]]:
    """Give what fills the places that rules have for codes and for what to do about them."""
    for severity in ("page", "warn", "info"):
        yield f"xids.{severity}", "|".join(map(str, codes(severity)))
    for severity in _FOLDS:
        yield f"xids.{severity}.actions", _actions(severity)


def _actions(severity: Severity) -> str:
    """Write a template that says what to do about the XID of an alert; what most need is said of all others."""
    by_action: dict[Action, list[int]] = {}
    for code in codes(severity):
        by_action.setdefault(explain(code).action, []).append(code)
    unknown = explain(0)
    usual = unknown.action if unknown.severity == severity else max(by_action, key=lambda each: len(by_action[each]))
    by_action.pop(usual, None)
    cases = [
        f'if match "^({"|".join(map(str, those))})$" $labels.xid }}}}{action.value}{{{{'
        for action, those in by_action.items()
    ]
    return "{{ " + "- else ".join(cases) + f"- else }}}}{usual.value}{{{{ end }}}}"
