"""Conditions of training runs, except those of memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from gpuwarden.analysis.findings import (
    NO_GPU_GUIDES,
    NONFINITE_LOSS_STEP,
    NONFINITE_VALIDATION_STEP,
    nonfinite_loss_text,
)
from gpuwarden.config import thresholds
from gpuwarden.formatting import format_elapsed
from gpuwarden.health.model import Check, Condition, Labels, ago_text, run_alert, run_text
from gpuwarden.host import procfs
from gpuwarden.host.process_key import parse_run_id
from gpuwarden.protocol.messages import OOM_KINDS
from gpuwarden.runs.outcome import Ending, Outcome
from gpuwarden.runs.run_snapshot import RunSnapshot
from gpuwarden.state import Alert, State

_ENDED_DESCRIPTION = (
    "{{ if $labels.run_id }}Run {{ $labels.run_name }} ({{ $labels.run_id }}){{ else }}A training run{{ end }} on "
    '{{ $labels.instance }} ended: {{ reReplaceAll "_" " " $labels.outcome }}.%{owner_lately}'
)
_ENDED_FIRES = "until `runs.expiry` after the end of the run"

# Conditions of runs that ended, by outcome; finished and unknown have none.
END_CONDITIONS: Mapping[Outcome, str] = {
    "failed": "RunDied",
    "out_of_memory": "RunDied",
    "crashed": "RunDied",
    "killed": "RunKilled",
}


def _stalled(state: State) -> Iterator[Alert]:
    for run in state.runs:
        if run.up and run.report and run.stall:
            cause = run.stall.cause.replace("_", " ")
            why = "cause unknown" if cause == "unknown" else f"cause: {cause}"
            text = f"stalled: no training step for {format_elapsed(run.stall.seconds)} ({why})"
            since = state.snapshot.time - run.stall.seconds
            yield run_alert(state, run, text, f"{run_text(run)} is {text}.", since=since)


def _stall_ending(labels: Labels, state: State) -> str | None:
    """Return None for a run that is alive and has not reported since the daemon restarted."""
    run_id = labels.get("run_id", "")
    process = parse_run_id(run_id)
    if process is None:
        return ""  # not a run id: the saved file was edited by hand
    if any(run.peer.run_id == run_id for run in state.runs) or not procfs.is_alive(*process):
        return ""
    return None


def _has_reported(run: RunSnapshot, end: Ending) -> bool:
    """Return whether the run ended by an out-of-memory that it reported itself, so that RunOutOfMemory fires."""
    errors = (at for kind, at in run.last_errors.items() if kind in OOM_KINDS)
    return end.outcome == "out_of_memory" and any(end.at - at < thresholds.OOM_END_SECONDS for at in errors)


def _loss_nonfinite(state: State) -> Iterator[Alert]:
    for run in state.runs:
        if (loss := run.nonfinite_loss) and loss.current:
            text = f"has a loss that is {nonfinite_loss_text(loss)}"
            since = (run.last_report or state.snapshot.time) - loss.seconds_ago
            yield run_alert(state, run, text, f"{run_text(run)} {text}.", since=since)


def _without_gpu(state: State) -> Iterator[Alert]:
    for run in state.runs:
        if run.up and run.no_gpu:
            meaning = NO_GPU_GUIDES[run.no_gpu].meaning
            description = f"{run_text(run)} trains on the CPU: {meaning}."
            yield run_alert(state, run, f"uses no GPU: {meaning}", description, {"reason": run.no_gpu})


def _ended(name: str) -> Check:
    def check(state: State) -> Iterator[Alert]:
        for run in state.runs:
            end = run.ending
            if end is None or not end.settled or _has_reported(run, end):
                continue
            if END_CONDITIONS.get(end.outcome) == name:
                text = end.outcome.replace("_", " ")
                description = f"{run_text(run)} ended {ago_text(state, end.at)}: {text} ({end.evidence})."
                yield run_alert(state, run, text, description, {"outcome": end.outcome}, happened=end.at)

    return check


# The runs that `_has_reported` leaves out.
_REPORTED = f"""
            unless on (cluster, job, instance, run_id, outcome)
          (
            gpuwarden_run_outcome{{outcome="out_of_memory"}}
              and on (cluster, job, instance, run_id)
            gpuwarden_run_ended_timestamp_seconds
              - on (cluster, job, instance, run_id) group_right ()
              gpuwarden_run_last_error_timestamp_seconds{{kind=~"device_oom|host_oom"}}
              < {thresholds.OOM_END_SECONDS:g}
          )
"""


# By the run's own series (one alert a run, kept by keep_firing_for); by the daemon's counter for runs never scraped.
def _ended_expr(name: str, left_out: str = "") -> str:
    outcomes = "|".join(outcome for outcome, condition in END_CONDITIONS.items() if condition == name)
    return f"""
        (gpuwarden_run_outcome{{outcome=~"{outcomes}"}} == 1{left_out.rstrip()})
          %{{of_run}}
          or on (cluster, job, instance, outcome)
        (
          increase(gpuwarden_runs_ended_total{{outcome=~"{outcomes}"}}[%{{died_reported}}]) > 0
            unless on (cluster, job, instance, outcome)
          last_over_time(gpuwarden_run_outcome[%{{died_reported}}]) == 1
        )
    """


RUN_CONDITIONS = (
    # The daemon decides how long a step may take (runs.stall_factor, runs.stall_after).
    Condition(
        name="RunStalled",
        subject="run",
        severity="warning",
        expr="gpuwarden_run_stalled == 1",
        check=_stalled,
        ending=_stall_ending,
        summary="%{the_run} is stalled: no step",
        description="""Run {{ $labels.run_name }} ({{ $labels.run_id }}) on {{ $labels.instance }} is stalled: no step
            for much longer than its steps take%{cause}.%{owner}""",
        meaning="""A step takes longer than `runs.stall_factor` times the run's slow steps, and longer than
            `runs.stall_after`. The process is alive.""",
        diagnosis="""`gpuwarden_run_stall_cause` ([causes](use/runs.md#stalls)); `py-spy dump --pid PID` shows the
            position in the code. With several processes, look at the one whose position differs.""",
        action="""Depends on the cause. Resume a stopped run with `kill -CONT PID`. If one waits for another process of
            its job forever, restart the whole job from its last checkpoint.""",
        false_positives="A checkpoint or a compilation takes that long: raise `runs.stall_after`.",
    ),
    Condition(
        name="RunLossNotFinite",
        subject="run",
        severity="warning",
        expr="gpuwarden_run_loss_nonfinite == 1",
        check=_loss_nonfinite,
        summary="%{the_run} has a loss of NaN or infinity",
        description="""The loss of run {{ $labels.run_name }} ({{ $labels.run_id }}) on {{ $labels.instance }} is NaN or
            infinite.%{owner}""",
        fires="until the run reports a finite loss, or `runs.expiry` after its end",
        meaning="""The last known loss, of training or of a validation, is NaN or infinite. After a training loss of NaN
            the weights are usually NaN too, so every later step is wasted.""",
        diagnosis="`gpuwarden runs show ID` has the first such step and its time.",
        action=f"{NONFINITE_LOSS_STEP} If only validations had such a loss: {NONFINITE_VALIDATION_STEP}",
        false_positives="""One bad batch whose update the program skips. Never fires where [no loss is
            known](use/runs.md#losses-that-are-not-finite).""",
    ),
    Condition(
        name="RunWithoutGpu",
        subject="run",
        severity="warning",
        expr="gpuwarden_run_no_gpu_info == 1",
        for_="1m",
        check=_without_gpu,
        summary="%{the_run} trains on the CPU",
        description="""Run {{ $labels.run_name }} ({{ $labels.run_id }}) on {{ $labels.instance }} trains on the CPU,
            though the host has GPUs (reason: {{ reReplaceAll "_" " " $labels.reason }}).%{owner}""",
        meaning="The host has GPUs, and the framework computes on the CPU.",
        diagnosis="`gpuwarden runs show ID` has the [reason](use/runs.md#training-without-a-gpu).",
        action="The next step that `gpuwarden runs show ID` prints for the reason.",
        false_positives="A small model that trains on the CPU on purpose.",
    ),
    Condition(
        name="RunDied",
        subject="run",
        severity="warning",
        expr=_ended_expr("RunDied", _REPORTED),
        joins=(),
        keep_firing_for="%{died_reported}",
        check=_ended("RunDied"),
        event_seconds=thresholds.DIED_SECONDS,
        summary="%{the_run} failed",
        description=_ENDED_DESCRIPTION,
        fires=_ENDED_FIRES,
        meaning="""A run ended with an exception or an exit status other than 0 (*failed*), by the kernel's OOM killer
            (*out_of_memory*), or by a crash in native code, often after a CUDA error (*crashed*). A run that ends by an
            out-of-memory error that it reported fires RunOutOfMemory only.""",
        diagnosis="`gpuwarden runs show ID`; the dashboard panel *Runs in this time range* has the ids.",
        action="""Follow the next step on the run's page or of `gpuwarden runs show ID`
            ([outcomes](use/runs.md#how-a-run-ended)).""",
        false_positives="""Programs that always end with an exit status other than 0. Never fires where the outcome is
            [*unknown*](use/runs.md#evidence-and-permissions).""",
    ),
    # People and batch systems stop runs by signals, usually on purpose.
    Condition(
        name="RunKilled",
        subject="run",
        severity="info",
        expr=_ended_expr("RunKilled"),
        joins=(),
        keep_firing_for="%{died_reported}",
        check=_ended("RunKilled"),
        event_seconds=thresholds.DIED_SECONDS,
        summary="%{the_run} was ended by a signal",
        description=_ENDED_DESCRIPTION,
        fires=_ENDED_FIRES,
        meaning="""A run was ended by a signal such as SIGTERM, SIGINT or SIGKILL, and, as far as known, not by the OOM
            killer.""",
        diagnosis="`gpuwarden runs show ID` for the signal, and the accounting of the batch system.",
        action="None if you stopped it. Otherwise find out who did: the kernel does not record the sender.",
        false_positives="""It was the OOM killer, and the daemon [may not read the kernel
            log](use/runs.md#evidence-and-permissions).""",
    ),
    # Both rates count only the seconds in which the wait was observed.
    Condition(
        name="RunInputBound",
        subject="run",
        severity="info",
        expr="""
            rate(gpuwarden_run_input_wait_seconds_total[%{input_bound_window}])
              / rate(gpuwarden_run_input_observed_seconds_total[%{input_bound_window}])
              > %{input_bound_ratio}
        """,
        for_="%{input_bound_hold}",
        summary="%{the_run} is input-bound",
        description="""Run {{ $labels.run_name }} ({{ $labels.run_id }}) on {{ $labels.instance }} waits for input {{
            $value | humanizePercentage }} of its step time.%{owner}""",
        meaning="""The run's steps wait for input more than %{input_bound_ratio.words} of their time, over
            %{input_bound_window.words}. The GPU is fine, and idle.""",
        diagnosis="""[Slow training](use/slow-training.md#does-it-wait-for-input): is it the run's CPUs, one thread,
            storage, or memory?""",
        action="""Follow the first row that applies in [slow training](use/slow-training.md). A prefetch at the end of
            the pipeline is one line.""",
        false_positives="""A small model on purpose. Never fires where [the wait is not
            known](use/slow-training.md#where-input-wait-is-measured).""",
    ),
)
