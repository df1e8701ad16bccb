"""Templates of rules: joins of expressions, sentences that descriptions share, and the action for each XID.

Rules contain them as `%{name}`. A sentence queries Prometheus for what the labels lack; it begins with a space, and is
empty if no series has it. `gpu` and `margin` use only the alert itself.
"""

from __future__ import annotations

from collections.abc import Iterator

from gpuwarden.severity import Severity
from gpuwarden.xid.codes import Action, codes, explain

# Joins that add the names of the run or device to a sample.
JOINS = {
    "of_run": "* on (cluster, job, instance, run_id) group_left (run_name) gpuwarden_run_info",
    "of_gpu": "* on (cluster, job, instance, uuid) group_left (gpu, name) gpuwarden:device:info",
}

# An owner with its kind: slurm job 4711.
_OWNER = '{{ reReplaceAll "_" " " .Labels.owner_kind }} {{ .Labels.owner }}'
# Not every target has a cluster: its label is then empty for Prometheus, but nil for vmalert.
_BOX = '(or $labels.cluster "") $labels.job $labels.instance'
_COMMA = "{{ if $n }},{{ end }} "


def _query_template(query: str, labels: str, then: str, otherwise: str = "") -> str:
    """Return a template that queries by labels of the alert and renders the result with `then`, if there is one."""
    other = f"{{{{ else }}}}{otherwise}" if otherwise else ""
    return f'{{{{ with printf "{query}" {_BOX} {labels} | query }}}}{then}{other}{{{{ end }}}}'


def _list_template(each: str, by: str) -> str:
    return f'{{{{ range $n, $each := sortByLabel "{by}" . }}}}{_COMMA}{each}{{{{ end }}}}'


def _owner_of_run(window: str = "") -> str:
    """Return a template of the owner of a run, now or within a window; the user id if no owner is known."""

    def series(name: str) -> str:
        chosen = f"{name}{{cluster=%q,job=%q,instance=%q,run_id=%q}}"
        return f"last_over_time({chosen}[{window}])" if window else chosen

    uid = _query_template(
        series("gpuwarden_run_info"), "$labels.run_id", ' Owner: user id {{ . | first | label "uid" }}.'
    )
    owners = f" Owner:{_list_template(_OWNER, 'owner_kind')}."
    return _query_template(series("gpuwarden:run:owner_info"), "$labels.run_id", owners, uid)


def _users(window: str = "") -> str:
    """Return a template of the users of a GPU, now or within a window, with the names of runs."""
    users = "gpuwarden:gpu:owner{cluster=%q,job=%q,instance=%q,uuid=%q}"
    each = f"{_OWNER}{{{{ with .Labels.run_name }}}} ({{{{ . }}}}){{{{ end }}}}"
    asked = f"last_over_time({users}[{window}])" if window else users
    return _query_template(asked, "$labels.uuid", f" Used by{_list_template(each, 'owner')}.")


def _owned_selector(matching: str) -> str:
    """Return a selector of the memory of a GPU by owner; the GPU's index is the fifth label of the query."""
    owned = f"gpuwarden_owner_gpu_memory_used_bytes{{cluster=%[1]q,job=%[2]q,instance=%[3]q,{matching}}}"
    return f"({owned} and on (cluster, job, instance, uuid) gpuwarden_gpu_info{{gpu=%[5]q}})"


_AMOUNT = f"{_OWNER} ({{{{ .Value | humanize1024 }}}}B)"
_HELD = _owned_selector("owner_kind!='run'")
_OTHERS = _owned_selector("owner!=%[4]q")
_BEFORE = "gpuwarden_owner_gpu_memory_used_bytes offset %{taken_window}"
_THE_RUNS = "last_over_time(gpuwarden:run:owner_info{run_id=%[4]q}[%{taken_window}] offset %{taken_window})"
_TOOK = (
    f"topk(6, ({_OTHERS} - {_BEFORE} or {_OTHERS}) > %{{taken_least}} "
    f"unless on (cluster, job, instance, owner_kind, owner) {_THE_RUNS})"
)

TEXTS = {
    # Subjects of summaries.
    "the_run": "{{ with $labels.run_id }}Run {{ or $labels.run_name . }}{{ else }}A training run{{ end }}"
    "{{ with $labels.gpu }} on GPU {{ . }} of{{ else }} on{{ end }} {{ $labels.instance }}",
    "the_gpu": "GPU {{ $labels.gpu }} of {{ $labels.instance }}",
    "on_host": "{{ with $labels.instance }} on {{ . }}{{ end }}",
    "gpu": "GPU {{ $labels.gpu }} ({{ $labels.name }}, {{ $labels.uuid }}) on {{ $labels.instance }}",
    "margin": '{{ reReplaceAll "^-" "" (humanize $value) }} °C {{ if lt $value 0.0 }}above{{ else }}below{{ end }}',
    "users": _users(),
    # A failed GPU lists no processes: name those of the last minutes.
    "late_users": _users("10m"),
    "owner": _owner_of_run(),
    "owner_lately": _owner_of_run("%{oom_reported}"),
    # For a MIG instance these are the owners of its whole GPU: the driver does not separate the processes.
    "holders": _query_template(
        f"sort_desc(topk(6, {_HELD}))",
        "$labels.uuid $labels.gpu",
        f" GPU memory by owner:{_list_template(_AMOUNT, 'owner_kind')}.",
    ),
    # Owners whose memory has grown, without the run's own owners if they are known.
    "takers": _query_template(
        f"sort_desc({_TOOK})",
        "$labels.run_id $labels.gpu",
        f" Growth by owner:{_list_template(_AMOUNT, 'owner_kind')}.",
    ),
    "cause": _query_template(
        "gpuwarden_run_stall_cause{cluster=%q,job=%q,instance=%q,run_id=%q} == 1",
        "$labels.run_id",
        ' (cause: {{ . | first | label "cause" | reReplaceAll "_" " " }})',
    ),
    "soon": _query_template(
        "gpuwarden_run_seconds_to_oom{cluster=%q,job=%q,instance=%q,run_id=%q,uuid=%q}",
        "$labels.run_id $labels.uuid",
        " At its current growth it lasts {{ . | first | value | humanizeDuration }}.",
    ),
    "growth": _query_template(
        "60 * gpuwarden_run_memory_growth_bytes_per_second{cluster=%q,job=%q,instance=%q,run_id=%q,uuid=%q}",
        "$labels.run_id $labels.uuid",
        " at {{ . | first | value | humanize1024 }}B per minute",
    ),
    "host_growth": _query_template(
        "60 * gpuwarden_run_host_memory_growth_bytes_per_second{cluster=%q,job=%q,instance=%q,run_id=%q}",
        "$labels.run_id",
        " at {{ . | first | value | humanize1024 }}B per minute",
    ),
}


def xid_values() -> Iterator[tuple[str, str]]:
    """Yield the placeholders of XIDs: for each severity the action for each code."""
    severity: Severity
    for severity in ("critical", "warning"):
        yield f"xids.{severity}.actions", _actions(severity)


def _actions(severity: Severity) -> str:
    """Return a template of the action for the XID of an alert; the most frequent action is its last branch."""
    by_action: dict[Action, list[int]] = {}
    for code in codes(severity):
        by_action.setdefault(explain(code, severity).action, []).append(code)
    unknown = explain(0)
    usual = unknown.action if unknown.severity == severity else max(by_action, key=lambda each: len(by_action[each]))
    by_action.pop(usual, None)
    cases = [
        f'if match "^({"|".join(map(str, those))})$" $labels.xid }}}}{action.value}{{{{'
        for action, those in by_action.items()
    ]
    return "{{ " + "- else ".join(cases) + f"- else }}}}{usual.value}{{{{ end }}}}"
