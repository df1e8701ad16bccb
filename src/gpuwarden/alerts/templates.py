"""Templates in rules: joins of expressions, sentences that descriptions share, and what to do about each XID.

They stand in rules as `%{name}`. A sentence asks Prometheus for what the labels lack: each gives a sentence with a
blank before it, or a part of one, and nothing where no series has it. `gpu` alone is no question: it names the GPU by
the alert's labels.
"""

from __future__ import annotations

from collections.abc import Iterator

from gpuwarden.xid.codes import Action, Severity, codes, explain

# Joins that give a sample the names of its run or device, by which people know them.
JOINS = {
    "of_run": "* on (cluster, job, instance, run_id) group_left (run_name) gpuwarden_run_info",
    "of_gpu": "* on (cluster, job, instance, uuid) group_left (gpu, name) gpuwarden:device:info",
}

# An owner by its kind, as people say it: slurm job 4711.
_OWNER = '{{ reReplaceAll "_" " " .Labels.owner_kind }} {{ .Labels.owner }}'
_BOX = "$labels.cluster $labels.job $labels.instance"
_COMMA = "{{ if $n }},{{ end }} "


def _query_template(query: str, labels: str, then: str, otherwise: str = "") -> str:
    """Return a template of a query with labels of the alert, and of what to write of its result."""
    said = f"{{{{ else }}}}{otherwise}" if otherwise else ""
    return f'{{{{ with printf "{query}" {_BOX} {labels} | query }}}}{then}{said}{{{{ end }}}}'


def _list_template(each: str, by: str) -> str:
    return f'{{{{ range $n, $each := sortByLabel "{by}" . }}}}{_COMMA}{each}{{{{ end }}}}'


def _owner_of_run(window: str = "") -> str:
    """Return a template of whose run it is, or was within a window; the user id where that is all that is known."""

    def series(name: str) -> str:
        chosen = f"{name}{{cluster=%q,job=%q,instance=%q,run_id=%q}}"
        return f"last_over_time({chosen}[{window}])" if window else chosen

    uid = _query_template(
        series("gpuwarden_run_info"), "$labels.run_id", ' Owner: user id {{ . | first | label "uid" }}.'
    )
    owners = f" Owner:{_list_template(_OWNER, 'owner_kind')}."
    return _query_template(series("gpuwarden:run:owner_info"), "$labels.run_id", owners, uid)


def _users(window: str = "") -> str:
    """Return a template of who uses a GPU, or used it within a window, with the names of runs."""
    users = "gpuwarden:gpu:owner{cluster=%q,job=%q,instance=%q,uuid=%q}"
    each = f"{_OWNER}{{{{ with .Labels.run_name }}}} ({{{{ . }}}}){{{{ end }}}}"
    asked = f"last_over_time({users}[{window}])" if window else users
    return _query_template(asked, "$labels.uuid", f" In use by{_list_template(each, 'owner')}.")


def _owned_selector(matching: str) -> str:
    """Return a selector of what owners hold of a GPU; its index is the fifth label of the query."""
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
    "gpu": "GPU {{ $labels.gpu }} ({{ $labels.name }}, {{ $labels.uuid }}) of {{ $labels.instance }}",
    "users": _users(),
    # A GPU that has failed tells no processes any more, so those are named that it had a moment ago.
    "late_users": _users("10m"),
    "owner": _owner_of_run(),
    "owner_lately": _owner_of_run("%{oom_told}"),
    # Of a MIG instance too, these are the owners of its GPU: the driver lists processes of the whole.
    "holders": _query_template(
        f"sort_desc(topk(6, {_HELD}))",
        "$labels.uuid $labels.gpu",
        f" Memory of that GPU is held by{_list_template(_AMOUNT, 'owner_kind')}.",
    ),
    # Owners that hold more than they did; those that the run itself has are left out, where they are known.
    "takers": _query_template(
        f"sort_desc({_TOOK})",
        "$labels.run_id $labels.gpu",
        f" More than before is held by{_list_template(_AMOUNT, 'owner_kind')}.",
    ),
    "cause": _query_template(
        "gpuwarden_run_stall_cause{cluster=%q,job=%q,instance=%q,run_id=%q} == 1",
        "$labels.run_id",
        '; what it does instead: {{ . | first | label "cause" }}',
    ),
    "soon": _query_template(
        "gpuwarden_run_seconds_to_oom{cluster=%q,job=%q,instance=%q,run_id=%q,uuid=%q}",
        "$labels.run_id $labels.uuid",
        " If it goes on to grow as it does, that is gone in {{ . | first | value | humanizeDuration }}.",
    ),
    "growth": _query_template(
        "60 * gpuwarden_run_memory_growth_bytes_per_second{cluster=%q,job=%q,instance=%q,run_id=%q,uuid=%q}",
        "$labels.run_id $labels.uuid",
        " by {{ . | first | value | humanize1024 }}B a minute",
    ),
    "host_growth": _query_template(
        "60 * gpuwarden_run_host_memory_growth_bytes_per_second{cluster=%q,job=%q,instance=%q,run_id=%q}",
        "$labels.run_id",
        " by {{ . | first | value | humanize1024 }}B a minute",
    ),
}


def xid_values() -> Iterator[tuple[str, str]]:
    """Yield what fills the places for XIDs by severity, and for what to do about each."""
    severity: Severity
    for severity in ("page", "warn", "info"):
        yield f"xids.{severity}", "|".join(map(str, codes(severity)))
    for severity in ("page", "warn"):
        yield f"xids.{severity}.actions", _actions(severity)


def _actions(severity: Severity) -> str:
    """Return a template of what to do about the XID of an alert; what most of them need is its last branch."""
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
