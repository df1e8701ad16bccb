"""Rules that find the cause of an out-of-memory: a table in the order in which they are tried; the first to hold wins.

A new cause is a row here, a function in the module of its subject, and a test. docs/understand/oom-diagnosis.md is
generated from the table.
"""

from __future__ import annotations

from dataclasses import replace

from gpuwarden.analysis.oom.co_tenant_rules import find_co_tenant_growth, find_occupied_device
from gpuwarden.analysis.oom.context import FailureContext
from gpuwarden.analysis.oom.device_rules import (
    find_fragmentation,
    find_kept_outputs,
    find_leak,
    find_phase_peak,
)
from gpuwarden.analysis.oom.diagnosis import Diagnosis, Rule
from gpuwarden.analysis.oom.host_rules import (
    describe_unknown_host_cause,
    find_host_input,
    find_host_leak,
    find_oversized_array,
)
from gpuwarden.analysis.oom.size_rules import (
    describe_unknown_device_cause,
    find_base_jump,
    find_batch_too_large,
    find_oversized_tensor,
    find_too_big,
)
from gpuwarden.formatting import format_growth

RULES: tuple[Rule, ...] = (
    Rule(
        "host_input",
        "host_oom",
        "A host allocation failed, and the message or traceback names the input pipeline: a tf.data function, a "
        "PyTorch loader worker, a loader in `run.batches`, pinned or shared memory.",
        "The host (not the GPU) could not allocate 382 MiB for a tf.data function.",
        find_host_input,
    ),
    Rule(
        "too_big",
        "host_oom",
        "One array of the program is larger than the host's whole memory.",
        "One array of shape [2000000,2000000] needs 29.1 TiB, more than the host has (62.7 GiB).",
        find_oversized_array,
    ),
    Rule(
        "leak",
        "host_oom",
        "A host allocation failed, and the memory of the run's processes had grown significantly before.",
        "The host memory of the run's processes had grown by 12.1 GiB at 190 MiB a minute; then the host could not "
        "allocate 64.0 MiB.",
        find_host_leak,
    ),
    Rule(
        "co_tenant",
        "device_oom",
        "Since the run last had enough memory, co-tenants allocated at least what was missing, and more than the run "
        "itself grew by. No limit of the run's own was reached first.",
        "The run needed 9.50 GiB on top of 4.10 GiB, but only 2.20 GiB was left: python process 4711 of bob allocated "
        "31.0 GiB on the device in the 12s before and now uses 31.0 GiB.",
        find_co_tenant_growth,
    ),
    Rule(
        "leak",
        "device_oom",
        "Memory in use between steps kept growing, and without that growth the step would have fitted. If memory was "
        "full only inside the step, as with a tensor that every step joins to a larger one: the growth is at least as "
        "large as the request.",
        "Memory in use between steps had grown by 8.20 GiB over 5120 steps, to 9.90 GiB of the 10.0 GiB available to "
        "the run. Without this growth 512 MiB would have fitted.",
        find_leak,
    ),
    Rule(
        "leak",
        "device_oom",
        "Outside of training steps, single operations filled the memory: what was kept since the last step is at least "
        "20 times the failed request.",
        "Since the last training step memory in use had grown by 229 MiB, to 233 MiB of the 234 MiB available to the "
        "run, in pieces as small as 1.00 MiB for shape [1024,256].",
        find_kept_outputs,
    ),
    Rule(
        "co_tenant",
        "device_oom",
        "Co-tenants allocated what was missing before the run needed it, or they have most of the device. Alone, "
        "the run would have had enough, and no limit of its own was reached first.",
        "Only 2.20 GiB was available to the run, because python process 4711 of bob has used 21.0 GiB of the device "
        "for 2h10m: without that 9.50 GiB would fit next to 1.10 GiB.",
        find_occupied_device,
    ),
    Rule(
        "fragmentation",
        "device_oom",
        "After the request at least a twentieth of the available memory would still have been free (in PyTorch: the "
        "request was smaller than what it had reserved and did not use), and enough was in use to split that. For a "
        "step larger than all before, twice the request and a fifth of all memory must have been free.",
        "100 MiB for shape [100,262144] did not fit in one piece, although 288 MiB of 512 MiB were free in total; "
        "224 MiB was in use.",
        find_fragmentation,
    ),
    Rule(
        "too_big",
        "device_oom",
        "Memory in use between steps jumped after the first steps and stayed there: optimizer slots, unfrozen layers, "
        "a second model. Before that a step of this size fitted.",
        "Memory in use between steps jumped by 97.6 MiB, to 146 MiB of the 204 MiB available to the run, and stayed "
        "there: 61.0 MiB did not fit next to it.",
        find_base_jump,
    ),
    Rule(
        "too_big",
        "device_oom",
        "One tensor is larger than the whole device, and nothing shows that a smaller batch would make it smaller.",
        "One tensor of shape [3000000,32] needs 366 MiB, more than the device has (256 MiB).",
        find_oversized_tensor,
    ),
    Rule(
        "phase_peak",
        "device_oom",
        "Training steps fitted, but validation, prediction, what the program did outside of training, or one training "
        "step larger than all before it in the same fit needed more and did not.",
        "Validation requested 153 MiB for shape [40000,1000] with 256 MiB available to the run, while training (20 "
        "steps) peaked at 35.7 MiB.",
        find_phase_peak,
    ),
    Rule(
        "too_big",
        "device_oom",
        "Weights or optimizer state did not fit or fill nine tenths of the available memory, or a single example does "
        "not fit.",
        "67.3 MiB for shape [4200,4200] for the model's weights did not fit: 202 MiB of the 256 MiB available to the "
        "run were already in use.",
        find_too_big,
    ),
    Rule(
        "batch_too_large",
        "device_oom",
        "The failed allocation grows with the batch: its first dimension is the batch size or a multiple, no weight "
        "has its shape, it was requested in the forward or backward pass, or it is larger than all weights.",
        "61.0 MiB for shape [16000,1000] grows with the batch size (16000) and did not fit: 11.9 MiB of 256 MiB were "
        "in use between steps.",
        find_batch_too_large,
    ),
)


def diagnose(failure: FailureContext) -> Diagnosis:
    """Return the cause by the first rule that holds, else "unknown" with what was checked."""
    for rule in RULES:
        if rule.kind == failure.error.kind and (found := rule.find(failure)):
            return _add_leak(Diagnosis(rule.cause, found.evidence, found.next_step, found.code), failure)
    found = (
        describe_unknown_host_cause(failure)
        if failure.error.kind == "host_oom"
        else describe_unknown_device_cause(failure)
    )
    return _add_leak(Diagnosis("unknown", found.evidence, found.next_step, found.code), failure)


def _add_leak(diagnosis: Diagnosis, failure: FailureContext) -> Diagnosis:
    """Add a reported leak: it was not the cause this time, and will be the next one."""
    if failure.leak is None or failure.error.kind != "device_oom" or diagnosis.cause == "leak":
        return diagnosis
    growing = f"memory in use also grows, at {format_growth(failure.leak.bytes_per_second)}"
    return replace(diagnosis, evidence=f"{diagnosis.evidence[:-1]}; {growing}.")
