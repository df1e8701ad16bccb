"""Formatting for people: durations, bytes, energy, ratios, counts, untrusted text; fields of log lines."""

from __future__ import annotations

_TIB, _GIB, _MIB, _KIB = 2**40, 2**30, 2**20, 2**10
_MINUTE, _HOUR, _DAY = 60, 3600, 86400
_TENTHS_BELOW_SECONDS = 10.0  # below which tenths are shown
_MIN_MILLISECONDS = 0.001  # less is 0
_WATT_HOUR = 3600.0  # joules


def format_duration(seconds: float) -> str:
    """Format an exact time, such as a step's: 12.3ms, 1.25s, and longer ones like `format_elapsed`."""
    milliseconds = float(f"{seconds * 1000:.3g}")  # rounding may change the unit
    if milliseconds < 1000:  # noqa: PLR2004 - a second
        return f"{milliseconds:.15g}ms" if milliseconds >= _MIN_MILLISECONDS else "0ms"
    return f"{seconds:.3g}s" if seconds < _TENTHS_BELOW_SECONDS else format_elapsed(seconds)


def format_elapsed(seconds: float) -> str:
    """Format a time that is as exact as the polls: 0.4s, 45s, 2h13m."""
    if round(seconds, 1) < _TENTHS_BELOW_SECONDS:
        return f"{seconds:.1f}s" if seconds else "0s"
    whole = round(seconds)
    if whole < _MINUTE:
        return f"{whole}s"
    if whole < _HOUR:
        return f"{whole // _MINUTE}m{whole % _MINUTE:02d}s"
    if whole < _DAY:
        return f"{whole // _HOUR}h{whole % _HOUR // _MINUTE:02d}m"
    return f"{whole // _DAY}d{whole % _DAY // _HOUR:02d}h"


def format_forecast(seconds: float, lower: float | None, upper: float | None) -> str:
    """Format a forecast with its bounds: in about 33s (31s to 35s); without a lower bound, from now."""
    if not seconds:
        return "at any moment"
    least = "now" if lower is None else format_elapsed(lower)
    return f"in about {format_elapsed(seconds)} ({least} to {'longer' if upper is None else format_elapsed(upper)})"


_BYTE_UNITS = ((_TIB, "TiB"), (_GIB, "GiB"), (_MIB, "MiB"), (_KIB, "KiB"))


def format_bytes(count: float) -> str:
    """Format bytes with three digits: 187 MiB, 1.25 GiB."""
    for unit, name in _BYTE_UNITS:
        if count >= unit:
            value = count / unit
            places = 2 if value < 9.995 else 1 if value < 99.95 else 0  # noqa: PLR2004 - as rounded
            return f"{value:.{places}f} {name}"
    return f"{count:.0f} B"


def format_part(count: float | None, whole: float) -> str:
    """Format bytes as a part of a total, in the unit of the total: 60.3/79.6 GiB; a dash if they are unknown."""
    unit, name = next(((unit, name) for unit, name in _BYTE_UNITS if whole >= unit), (1, "B"))
    return f"{'-' if count is None else f'{count / unit:.1f}'}/{whole / unit:.1f} {name}"


def format_growth(bytes_per_second: float) -> str:
    """Format a growth rate by the minute, or by the hour if it is slow: 305 MiB a minute."""
    by_minute = bytes_per_second * _MINUTE
    return (
        f"{format_bytes(by_minute)} a minute"
        if by_minute >= _MIB
        else f"{format_bytes(bytes_per_second * _HOUR)} an hour"
    )


def format_energy(joules: float) -> str:
    """Format joules in Wh, from 1 kWh in kWh: 4.7 Wh, 473 Wh, 1.25 kWh."""
    hours = joules / _WATT_HOUR
    if hours < 999.5:  # noqa: PLR2004 - rounds to 1000
        return f"{hours:.{0 if hours >= 99.95 else 1}f} Wh"  # noqa: PLR2004 - three digits
    return f"{hours / 1000:.2f} kWh"


def format_ratio(share: float) -> str:
    """Format a ratio in percent."""
    return f"{round(share * 100, 1):.15g} %"


def format_margin(celsius: float) -> str:
    """Format the distance of a temperature to the throttle point."""
    return f"{abs(celsius):.0f} °C {'above' if celsius < 0 else 'below'} its throttle point"


def format_count(count: int) -> str:
    """Format a count in at most five characters: 99999, 100k, 1.5M."""
    for unit, letter in ((1, ""), (1e3, "k"), (1e6, "M"), (1e9, "G")):
        rounded = float(f"{count / unit:.3g}") if letter else count
        if rounded < (1000 if letter else 100_000):
            break
    return f"{rounded:.15g}{letter}"


_UNITS = (("d", _DAY, "day"), ("h", _HOUR, "hour"), ("m", _MINUTE, "minute"), ("s", 1, "second"))


def format_promql_duration(seconds: float) -> str:
    """Write seconds as PromQL does, in the largest unit without a remainder: 90s, 10m, 500ms."""
    unit, size, _ = _largest_unit(seconds)
    return f"{seconds / size:g}{unit}" if unit != "s" or seconds == int(seconds) else f"{round(seconds * 1000)}ms"


def format_whole_duration(seconds: float) -> str:
    """Write seconds in words, in the largest unit without a remainder: 90 seconds, 10 minutes."""
    _, size, word = _largest_unit(seconds)
    count = seconds / size
    return f"{count:g} {word}{'' if count == 1 else 's'}"


def cut_middle(text: str, limit: int) -> str:
    """Cut a long text to its front and, twice as long, its end: messages of errors have the facts in one of them."""
    return text if len(text) <= limit else f"{text[: limit // 3]} ... {text[-limit * 2 // 3 :]}"


def _largest_unit(seconds: float) -> tuple[str, int, str]:
    return next((unit for unit in _UNITS if seconds >= unit[1] and seconds % unit[1] == 0), _UNITS[-1])


def format_fields(**fields: object) -> str:
    """Write the fields of a log line: `run=4711-99 name="my net" seconds=60`; a field that is None is left out.

    Text that is empty or has blanks, quotes, `=` or characters that do not print is quoted, those characters escaped:
    names come from users, and must not forge a field or a line. Floats have three decimals at most.

        log.warning("run stalled %s", format_fields(run=run_id, name=name, seconds=60))
    """
    return " ".join(f"{name}={_field(value)}" for name, value in fields.items() if value is not None)


def _field(value: object) -> str:
    if isinstance(value, float):
        return f"{round(value, 3):.15g}"
    text = str(value) or (type(value).__name__ if isinstance(value, BaseException) else "")
    if text and text.isprintable() and not any(character in " \"'=\\" for character in text):
        return text
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return (
        '"' + "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in escaped) + '"'
    )


def sanitize(text: str) -> str:
    """Replace characters that a terminal would interpret instead of showing."""
    return "".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in text)
