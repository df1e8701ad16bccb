"""Conditions of training runs, other than of their memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from gpuwarden.config import thresholds
from gpuwarden.formatting import format_elapsed
from gpuwarden.health.model import Check, Condition, Labels, Occurrence, ago_text, run_occurrence, run_text
from gpuwarden.host import procfs
from gpuwarden.host.process_key import parse_run_id
from gpuwarden.runs.outcome import Outcome
from gpuwarden.state import State

_ENDED_SAID = (
    "{{ if $labels.run_id }}Run {{ $labels.run_name }} ({{ $labels.run_id }}){{ else }}A training run{{ end }} of "
    "{{ $labels.instance }} ended as {{ $labels.outcome }}.%{owner_lately}"
)
_ENDED_TOLD = "a run is forgotten `runs.expiry` after its end"

# The conditions of runs that ended, by outcome; one that finished, or of which no more is known, is none.
END_CONDITIONS: Mapping[Outcome, str] = {
    "failed": "RunDied",
    "out_of_memory": "RunDied",
    "crashed": "RunDied",
    "killed": "RunKilled",
}


def _stalled(state: State) -> Iterator[Occurrence]:
    for run in state.runs:
        if run.up and run.report and run.stall:
            yield run_occurrence(
                state,
                run,
                f"no step for {format_elapsed(run.stall.seconds)} ({run.stall.cause})",
                f"{run_text(run)} has made no step for {format_elapsed(run.stall.seconds)}, much longer than its "
                "steps take; "
                f"what it does instead: {run.stall.cause}.",
                since=state.snapshot.time - run.stall.seconds,
            )


def _stall_ending(labels: Labels, state: State) -> str | None:
    """Return None for a run that lives and has not reported since the daemon restarted."""
    run_id = labels.get("run_id", "")
    process = parse_run_id(run_id)
    if process is None:
        return ""  # no run's: the saved alert was edited by hand
    if any(run.peer.run_id == run_id for run in state.runs) or not procfs.is_alive(*process):
        return ""
    return None


def _ended(name: str) -> Check:
    def check(state: State) -> Iterator[Occurrence]:
        for run in state.runs:
            end = run.ending
            if end is not None and end.settled and END_CONDITIONS.get(end.outcome) == name:
                description = f"{run_text(run)} ended as {end.outcome} {ago_text(state, end.at)}: {end.evidence}."
                text = f"{end.outcome.replace('_', ' ')} {ago_text(state, end.at)}"
                yield run_occurrence(state, run, text, description, {"outcome": end.outcome}, happened=end.at)

    return check


# By the run's own series, each run an alert, which fires on when they are forgotten; by the daemon's counter for deaths
# whose run was never scraped.
def _ended_expr(name: str) -> str:
    outcomes = "|".join(outcome for outcome, condition in END_CONDITIONS.items() if condition == name)
    return f"""
        (gpuwarden_run_outcome{{outcome=~"{outcomes}"}} == 1)
          %{{of_run}}
          or on (cluster, job, instance, outcome)
        (
          increase(gpuwarden_runs_ended_total{{outcome=~"{outcomes}"}}[%{{died_told}}]) > 0
            unless on (cluster, job, instance, outcome)
          last_over_time(gpuwarden_run_outcome[%{{died_told}}]) == 1
        )
    """


RUN_CONDITIONS = (
    # How long a step may take is the daemon's to say (runs.stall_factor, runs.stall_after).
    Condition(
        name="RunStalled",
        subject="run",
        severity="warning",
        expr="gpuwarden_run_stalled == 1",
        check=_stalled,
        ending=_stall_ending,
        summary="A training run hangs in a step.",
        description="""Run {{ $labels.run_name }} ({{ $labels.run_id }}) of {{ $labels.instance }} has made no step for
            much longer than its steps take%{cause}.%{owner}""",
        means="""A run is within a step for longer than `runs.stall_factor` times what its slow steps take, and longer
            than `runs.stall_after`. Its process lives. The first step, which compiles, never counts.""",
        look="""the panel *Phase, stalls and ends* for since when, at `gpuwarden_run_stall_cause`, and at
            [runs.md](use/runs.md#stalls) for what each cause mostly means. `py-spy dump --pid PID` shows where it
            stands;
            with several processes the one that stands elsewhere than the others is the one to look at.""",
        do="""what the cause asks for. A run that was stopped goes on by `kill -CONT PID`. One that waits for another of
            its job for good has to be restarted, all of it, from its last checkpoint.""",
        wrong="""some steps take that long by nature (a checkpoint, a new shape that has to be compiled): raise
            `runs.stall_after`.""",
    ),
    Condition(
        name="RunDied",
        subject="run",
        severity="warning",
        expr=_ended_expr("RunDied"),
        names=(),
        keep="%{died_told}",
        check=_ended("RunDied"),
        event_seconds=thresholds.DIED_SECONDS,
        summary="A training run ended before it was finished.",
        description=_ENDED_SAID,
        told=_ENDED_TOLD,
        means="""A run ended by an exception or an exit status other than 0 (*failed*), by an out-of-memory error that
            was not caught or by the kernel's OOM killer (*out_of_memory*), or by an abort or another crash in native
            code, often after a CUDA error (*crashed*).""",
        look="""the daemon's log (`journalctl -u gpuwarden | grep ended:`), which names the run and the evidence, or at
            `gpuwarden runs show ID`; the dashboard's panel *Runs of this time range* has the ids.""",
        do="what [runs.md](use/runs.md#how-a-run-ended) says for that outcome.",
        wrong="""people end their programs with an exit status by habit: silence it for those. Silent where nobody tells
            the daemon how a process ended (*unknown*); runs.md says what that takes.""",
    ),
    # Whoever stops a run sends a signal: a person, a batch system at the end of its time. Mostly that is as meant.
    Condition(
        name="RunKilled",
        subject="run",
        severity="info",
        expr=_ended_expr("RunKilled"),
        names=(),
        keep="%{died_told}",
        check=_ended("RunKilled"),
        event_seconds=thresholds.DIED_SECONDS,
        summary="A training run was ended by a signal.",
        description=_ENDED_SAID,
        told=_ENDED_TOLD,
        means="""A run was ended by a signal such as SIGTERM, SIGINT or SIGKILL, and not by the kernel's OOM killer as
            far as anybody knows. Mostly somebody wanted it so.""",
        look="`gpuwarden runs show ID` for the signal, and at the batch system's account of the job.",
        do="nothing, if it was you. Else find out who did: the kernel does not tell.",
        wrong="""the daemon may not read the kernel log, and it was the OOM killer all the same
            ([runs.md](use/runs.md#evidence-and-permissions)).""",
    ),
    # The quotient of two rates: both count only the seconds in which the wait was observed.
    Condition(
        name="RunInputBound",
        subject="run",
        severity="info",
        expr="""
            rate(gpuwarden_run_input_wait_seconds_total[%{input_bound_window}])
              / rate(gpuwarden_run_input_observed_seconds_total[%{input_bound_window}])
              > %{input_bound_ratio}
        """,
        hold="%{input_bound_hold}",
        summary="A training run waits for its input most of the time.",
        description="""Run {{ $labels.run_name }} ({{ $labels.run_id }}) on {{ $labels.instance }} waits for input {{
            $value | humanizePercentage }} of the time of its steps. docs/use/slow-training.md says how to find out
            why.%{owner}""",
        means="""The run's steps wait for their input more than %{input_bound_ratio.words} of their time, over
            %{input_bound_window.words}. Nothing is wrong with the GPU, it has nothing to do.""",
        look="""the panel *Input wait* for since when, and at
            [slow-training.md](use/slow-training.md#does-it-wait-for-input): is it the run's
            CPUs, one thread, storage, or memory?""",
        do="what the first row that fits says there. A prefetch at the end of the pipeline costs one line.",
        wrong="""the model is small on purpose and the input as fast as it gets. Silent where [the wait cannot be
            known](use/slow-training.md#where-input-wait-is-measured), which is no sign that there is none.""",
    ),
)
