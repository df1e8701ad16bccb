"""Rules that find the cause of an out-of-memory: a table in the order in which they are tried; the first to hold wins.

A new cause is a row here, a function in the module of its subject, and a test. docs/understand/oom-diagnosis.md is
written from the
table.
"""

from __future__ import annotations

from dataclasses import replace

from gpuwarden.analysis.oom.co_tenant_rules import find_co_tenant_growth, find_occupied_device
from gpuwarden.analysis.oom.context import FailureContext
from gpuwarden.analysis.oom.device_rules import find_fragmentation, find_leak, find_phase_peak
from gpuwarden.analysis.oom.diagnosis import Diagnosis, Rule
from gpuwarden.analysis.oom.host_rules import describe_unknown_host_cause, find_host_input, find_host_leak
from gpuwarden.analysis.oom.size_rules import describe_unknown_device_cause, find_batch_too_large, find_too_big
from gpuwarden.formatting import format_growth

RULES: tuple[Rule, ...] = (
    Rule(
        "host_input",
        "host_oom",
        "The host could not give memory, and the message or the traceback names the input pipeline: a function of "
        "tf.data's, a worker of torch's loader, pinned or shared memory, an array of NumPy's.",
        "The host, not the device, could not give 382 MiB for tf.data's own function.",
        find_host_input,
    ),
    Rule(
        "leak",
        "host_oom",
        "The host could not give memory, and that of the run's processes grew significantly before.",
        "The host memory of the run's processes had grown by 12.1 GiB, at 190 MiB a minute, before the host could "
        "not give 64.0 MiB.",
        find_host_leak,
    ),
    Rule(
        "neighbour",
        "device_oom",
        "What other processes took of the device since the run could last allocate as much is at least what was "
        "missing, more than the run itself has grown by, and no limit of the run's own came first.",
        "The run needed 9.50 GiB beside 4.10 GiB and could have 2.20 GiB: python process 4711 of bob took 31.0 GiB "
        "of the device in the 12s before and holds 31.0 GiB.",
        find_co_tenant_growth,
    ),
    Rule(
        "leak",
        "device_oom",
        "Memory in use between steps kept growing, and without that the step would have fitted. Growth counts where it "
        "is significant, or else where it is steady and as large as what was missing.",
        "Memory in use between steps had grown by 8.20 GiB over 5120 steps to 9.90 GiB of 11.0 GiB that the run can "
        "have: without that 512 MiB would have fitted.",
        find_leak,
    ),
    Rule(
        "fragmentation",
        "device_oom",
        "What was asked for is less than what was free in sum, and enough was in use to cut that up. How much that was "
        "is known exactly of an operation by itself and in torch; of a compiled step the allocator's peak bounds it, "
        "and of a step as large as none before twice as much must have been free, and a fifth of all.",
        "100 MiB for shape [100,262144] did not fit in one piece though 288 MiB of 512 MiB were free in sum: "
        "224 MiB was in use.",
        find_fragmentation,
    ),
    Rule(
        "neighbour",
        "device_oom",
        "Other processes have held what was missing since before the run needed it, or most of the device, as they "
        "have to where the step was larger than all before it; alone the run would have had room for what failed, and "
        "no limit of its own came first. Where the message has no size, they have most of the device and left the run "
        "next to nothing.",
        "The run could have 2.20 GiB, as python process 4711 of bob has held 21.0 GiB of the device for 2h 10min: "
        "without that 9.50 GiB would fit beside 1.10 GiB.",
        find_occupied_device,
    ),
    Rule(
        "phase_peak",
        "device_oom",
        "Training steps went well, and validation or prediction, or one step of training that was larger than all "
        "before it in the same fit, did not fit.",
        "Validation asked for 153 MiB for shape [40000,1000], of 256 MiB that the run can have, while training, 20 "
        "steps, peaked at 35.7 MiB.",
        find_phase_peak,
    ),
    Rule(
        "too_big",
        "device_oom",
        "Weights or optimizer state did not fit, or fill nine tenths of what the run can have, or one tensor is larger "
        "than the device, or one example alone does not fit.",
        "67.3 MiB for shape [4200,4200] for the model's weights did not fit beside 202 MiB in use of 256 MiB that "
        "the run can have.",
        find_too_big,
    ),
    Rule(
        "batch_too_large",
        "device_oom",
        "What did not fit grows with the batch: its first dimension is the batch size or a multiple, it has a shape "
        "that no weight has, it was asked for in the forward or backward pass, or it is more than all weights.",
        "61.0 MiB for shape [16000,1000] grows with the batch of 16000, and did not fit, while 11.9 MiB of 256 MiB "
        "were in use between steps.",
        find_batch_too_large,
    ),
)


def diagnose(failure: FailureContext) -> Diagnosis:
    """Return the cause by the first rule that holds, else "unknown" with what was looked for."""
    for rule in RULES:
        if rule.kind == failure.error.kind and (found := rule.find(failure)):
            return _add_leak(Diagnosis(rule.cause, found.evidence, found.next_step), failure)
    found = (
        describe_unknown_host_cause(failure)
        if failure.error.kind == "host_oom"
        else describe_unknown_device_cause(failure)
    )
    return _add_leak(Diagnosis("unknown", found.evidence, found.next_step), failure)


def _add_leak(diagnosis: Diagnosis, failure: FailureContext) -> Diagnosis:
    """Add a leak that is reported: it was not what was missing this time, and will be once the rest is mended."""
    if failure.leak is None or failure.error.kind != "device_oom" or diagnosis.cause == "leak":
        return diagnosis
    growing = f"memory in use grows too, at {format_growth(failure.leak.bytes_per_second)}"
    return replace(diagnosis, evidence=f"{diagnosis.evidence[:-1]}; {growing}.")
