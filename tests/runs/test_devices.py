"""Resolution of a run's devices to GPUs, only by evidence, and proof that it uses them."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from gpuwarden.gpu.snapshot import Gpu
from gpuwarden.owners.processes import ProcessIdentity
from gpuwarden.protocol.messages import Hello
from gpuwarden.runs.devices import list_processes, resolve, resolve_mps_limits
from snapshots import GIB, gpu, mig_gpu, snapshot

BOX = snapshot(gpu(0), gpu(1, held={7: 1}), gpu(2), gpu(3))
MIXED = snapshot(gpu(0, name="T4"), gpu(1, held={7: 1}), gpu(2))
DIVIDED = snapshot(mig_gpu(0, free=(1, 2, 3), held={7: 1}), gpu(1))
ONE = {"GPU:0": None}
TWO = {"GPU:0": None, "GPU:1": None}


def hello(devices: Mapping[str, str | None], visible: str | None = None, order: str | None = None) -> Hello:
    """Make a run's first message."""
    return Hello("run", "tensorflow", devices, visible, order)


def test_host_of_equal_gpus() -> None:
    """Equal models keep PCI order in CUDA, so indices and CUDA_VISIBLE_DEVICES identify the GPU."""
    cases: list[tuple[Hello, dict[str, str]]] = [
        (hello({"CPU:0": "GPU-2"}), {"CPU:0": "GPU-2"}),
        (hello({"CPU:0": "GPU-9"}), {}),
        (hello({"GPU:0": "GPU-9"}), {}),  # in another container than the daemon's
        (hello({"GPU:0": "GPU-9", "GPU:1": None}, "0,1"), {"GPU:1": "GPU-1"}),
        (hello({"CPU:0": None}), {}),
        (hello(TWO), {"GPU:0": "GPU-0", "GPU:1": "GPU-1"}),
        (hello(TWO, "3,1"), {"GPU:0": "GPU-3", "GPU:1": "GPU-1"}),
        (hello(TWO, " 3 , GPU-1 "), {"GPU:0": "GPU-3", "GPU:1": "GPU-1"}),
        (hello(TWO, "3,9,1"), {"GPU:0": "GPU-3"}),
        (hello(TWO, "-1,2"), {}),
        (hello(TWO, ""), {}),
        (hello(TWO, "GPU-"), {}),
        (hello({"GPU:x": None, "GPU:²": None, "TPU:0": None}), {}),
    ]
    assert [(said, resolve(said, 99, BOX)) for said, _ in cases] == cases


def test_mixed_models_need_pci_order() -> None:
    """CUDA orders different models by speed: an index is evidence only if PCI order is set."""
    assert resolve(hello(TWO, "1,2"), 99, MIXED) == {}
    assert resolve(hello(TWO, "1,2", "PCI_BUS_ID"), 99, MIXED) == {"GPU:0": "GPU-1", "GPU:1": "GPU-2"}


def test_single_device_is_where_the_process_has_memory() -> None:
    """A run of one device on a mixed host is resolved by its process's memory, if that is on one GPU only."""
    assert resolve(hello({"GPU:0": None}), 7, MIXED) == {"GPU:0": "GPU-1"}
    assert resolve(hello({"GPU:0": "GPU-9"}), 7, MIXED) == {"GPU:0": "GPU-1"}
    assert resolve(hello({"GPU:0": None}), 8, MIXED) == {}
    both = snapshot(gpu(0, name="T4", held={7: 1}), gpu(1, held={7: 1}))
    assert resolve(hello({"GPU:0": None}), 7, both) == {}


def test_mig_instance() -> None:
    """A run is on the MIG instance it names or has memory on; a divided GPU and an index are no evidence."""
    cases: list[tuple[Hello, int, dict[str, str]]] = [
        (hello({"CPU:0": "MIG-0-2"}), 99, {"CPU:0": "MIG-0-2"}),
        (hello(ONE, "MIG-0-1"), 99, {"GPU:0": "MIG-0-1"}),
        (hello(ONE, "MIG-0-1,MIG-0-2"), 99, {"GPU:0": "MIG-0-1"}),  # CUDA takes one
        (hello(TWO, "MIG-0-1,MIG-0-2"), 99, {"GPU:0": "MIG-0-1"}),
        (hello(ONE, "MIG-GPU-0/2/0"), 99, {"GPU:0": "MIG-0-2"}),  # as it was written before R470
        (hello(ONE, "MIG-GPU-0/2/1"), 99, {}),
        (hello(ONE, "MIG-0-"), 99, {}),
        (hello(ONE, "MIG-9"), 99, {}),
        (hello(ONE, "GPU-1"), 99, {"GPU:0": "GPU-1"}),
        (hello(ONE, "GPU-0"), 99, {}),
        (hello(ONE), 7, {"GPU:0": "MIG-0-1"}),
        (hello(ONE, "0"), 7, {"GPU:0": "MIG-0-1"}),
        (hello(ONE), 99, {}),
    ]
    assert [(said, pid, resolve(said, pid, DIVIDED)) for said, pid, _ in cases] == cases


MPS = {4711: ProcessIdentity(0, "nvidia-cuda-mps")}
COMPUTE = ("compute", "graphics")


def verify(own: set[int], *gpus: Gpu, before: Mapping[str, bool] | None = None, **more: Any) -> dict[str, bool]:
    """Verify a claim of all devices by a run with these pids."""
    settings: dict[str, Any] = {"identities": {}, "sees_host": True, "trust_reports": False, **more}
    claimed = [uuid for gpu in gpus for uuid in (gpu.identity.uuid, *(each.identity.uuid for each in gpu.mig))]
    return list_processes(snapshot(*gpus), **settings).verify(claimed, own, before or {})


def test_claim_without_a_process_does_not_count() -> None:
    """A run uses the GPUs on which the driver lists one of its processes; a claim of another GPU is dropped."""
    box = [replace(gpu(0, held={7: 1, 4711: 1}), process_lists=COMPUTE), replace(gpu(1), process_lists=COMPUTE)]
    assert verify({7}, *box) == {"GPU-0": True}
    assert verify({6, 7}, *box) == {"GPU-0": True}  # by a child
    assert verify({99}, *box) == {}
    mig = replace(mig_gpu(2, free=(1, 2), held={7: 1}), process_lists=COMPUTE)
    assert verify({7}, mig) == {"MIG-2-1": True}


def test_claim_is_unverified_where_the_list_cannot_show_the_process() -> None:
    """In another pid namespace, under MPS and without a list, a claim may be true."""
    box = replace(gpu(0, held={4711: 1}), process_lists=COMPUTE)
    assert verify({99}, box, sees_host=False) == {"GPU-0": False}
    assert verify({99}, box, identities=MPS) == {"GPU-0": False}
    assert verify(set(), box) == {"GPU-0": False}
    assert verify({99}, replace(box, process_lists=("graphics",))) == {"GPU-0": False}
    assert verify({4711}, box, sees_host=False) == {"GPU-0": True}


def test_gpu_that_does_not_answer_keeps_its_runs() -> None:
    """A lost GPU lists nothing: its runs stay as they were, and a new claim is unverified."""
    lost = Gpu(gpu(0).identity, fault="gpu_is_lost")
    assert verify({7}, lost, before={"GPU-0": True, "MIG-0-1": True}) == {"GPU-0": True, "MIG-0-1": True}
    assert verify({7}, lost) == {"GPU-0": False}
    answers = replace(gpu(0), process_lists=COMPUTE)
    assert verify({7}, answers, before={"GPU-0": True}) == {}


def test_reports_can_be_trusted() -> None:
    """Every claim counts with runs.trust_reports: a CPU that stands in for a GPU has no process there."""
    assert verify({99}, replace(gpu(0), process_lists=COMPUTE), trust_reports=True) == {"GPU-0": True}


def test_mps_memory_limits() -> None:
    """CUDA_MPS_PINNED_DEVICE_MEM_LIMIT names devices by CUDA's ordinal or by UUID; other entries are left out."""
    uuids = {"GPU:0": "GPU-aa", "GPU:1": "GPU-bb"}
    cases: dict[str | None, dict[str, int]] = {
        None: {},
        "": {},
        "0=2G,1=512M": {"GPU-aa": 2 * GIB, "GPU-bb": GIB // 2},
        " 1 = 512MB ": {"GPU-bb": GIB // 2},
        "GPU-b=3gb,9=1G": {"GPU-bb": 3 * GIB},
        "0=1000": {"GPU-aa": 1000},
        "0=-1,1=much,=2G,None=1G,0": {},
        f"0={'9' * 99}G": {},
    }
    found = {text: resolve_mps_limits(replace(hello(TWO), mps_memory_limit=text), uuids) for text in cases}
    assert found == cases
