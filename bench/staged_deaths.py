"""Deaths of programs, as `gpuwarden run` shows them: `python bench/staged_deaths.py [NAME ...]` prints a table.

Each death is a real process that dies so; outcome and problem were written down before the first run. A death is shown
right if both are as expected. Names, or parts of them, select deaths.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import signal
import subprocess  # noqa: TID251 - plays programs
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "tests" / "support"))

from control_groups import limited  # noqa: E402 - found only now

TIME = 300  # seconds for one program
QUIET = {"TF_CPP_MIN_LOG_LEVEL": "3", "JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""}
SMALL_DEVICE = {  # TensorFlow's allocator of a GPU, with this many MiB of the host: its errors name the CPU
    "TF_CPU_ALLOCATOR_USE_BFC": "1",
    "TF_CPU_BFC_MEM_LIMIT_IN_MB": "64",
    "TF_ENABLE_ONEDNN_OPTS": "0",
}


@dataclass(frozen=True)
class Death:
    """Program, as Python code or as a shell command, and what is to be shown of its death.

    `problem` is None where the program says nothing that would be a cause. `frameworks` have to be installed.
    """

    name: str
    outcome: str
    problem: str | None
    code: str = ""
    script: str = ""
    frameworks: tuple[str, ...] = ()
    memory: int = 0  # bytes, limit of a control group
    environment: tuple[tuple[str, str], ...] = ()


def _signal(name: str, outcome: str, problem: str | None) -> Death:
    return Death(f"signal {name}", outcome, problem, f"import os, signal; os.kill(os.getpid(), signal.SIG{name})")


KERAS = """
import numpy as np, keras
model = keras.Sequential([keras.layers.Input((8,)), keras.layers.Dense(16), keras.layers.Dense(1)])
model.compile("sgd", "mse")
x = np.ones((64, 8), "float32")
"""
DEATHS = (
    # Ends that are no failure.
    Death("finished", "finished", None, "print(1)"),
    Death("exit status 0 of a shell", "finished", None, script="true"),
    Death("handled exception", "finished", None, "try:\n    1 / 0\nexcept ZeroDivisionError:\n    pass"),
    # Exit statuses.
    Death("sys.exit(3)", "failed", None, "import sys; sys.exit(3)"),
    Death("os._exit(9)", "failed", None, "import os; os._exit(9)"),
    Death("exit status of a shell", "failed", None, script="exit 5"),
    Death("command not found in a shell", "failed", None, script="gpuwarden-no-such-command"),
    Death("time limit of timeout(1)", "failed", None, script="timeout 1 sleep 20"),
    # Signals.
    _signal("KILL", "killed", "process_killed"),
    _signal("TERM", "killed", "process_killed"),
    _signal("HUP", "killed", "process_killed"),
    _signal("INT", "killed", None),  # Python ends itself by the signal, after its KeyboardInterrupt
    _signal("SEGV", "crashed", "segmentation_fault"),
    _signal("BUS", "crashed", "bus_error"),
    _signal("ABRT", "crashed", "process_aborted"),
    _signal("FPE", "crashed", "segmentation_fault"),
    _signal("ILL", "crashed", "segmentation_fault"),
    _signal("USR1", "killed", "process_killed"),
    Death("null pointer", "crashed", "segmentation_fault", "import ctypes; ctypes.string_at(0)"),
    Death("abort of C", "crashed", "process_aborted", "import os; os.abort()"),
    Death("kill -9 in a shell", "killed", "process_killed", script="kill -9 $$"),
    Death("CPU time limit", "killed", "process_killed",
        "import resource\nresource.setrlimit(resource.RLIMIT_CPU, (1, 2))\nwhile True:\n    pass"),
    # The host's memory.
    Death("memory limit of a control group", "out_of_memory", "killed_by_kernel",
        "x = b'1' * (1 << 30)", memory=150 << 20),
    Death("growth to a limit of a control group", "out_of_memory", "killed_by_kernel",
        "import time\nkept = []\nwhile True:\n    kept.append(bytearray(b'1' * (4 << 20)))\n    time.sleep(0.01)",
        memory=200 << 20),
    Death("MemoryError of Python", "out_of_memory", "host_out_of_memory", "x = b'1' * (1 << 60)"),
    Death("array larger than the host", "out_of_memory", "host_out_of_memory",
        "import numpy as np; np.ones((1 << 22, 1 << 22))"),
    # The program's own.
    Death("assertion", "failed", "assertion_failed", "assert 1 == 2, 'not equal'"),
    Death("missing module", "failed", "missing_module", "import no_such_module_of_ours"),
    Death("missing name in a module", "failed", "missing_module", "from json import no_such_name"),
    Death("missing file", "failed", "file_not_found", "open('/no/such/file.csv')"),
    Death("no permission", "failed", "permission_denied",
        "import os\nos.seteuid(65534)\ntry:\n    open('/etc/shadow')\nfinally:\n    os.seteuid(0)"),
    Death("disk full", "failed", "disk_full", "f = open('/dev/full', 'w', buffering=1); f.write('x\\n')"),
    Death("key error", "failed", "program_error", "{}['label']"),
    Death("type error", "failed", "program_error", "len(3)"),
    Death("recursion", "failed", "program_error", "def f():\n    f()\nf()"),
    Death("syntax error", "failed", "program_error", "exec('def f(:')"),
    Death("error in a thread", "finished", "program_error",
        "import threading\nt = threading.Thread(target=lambda: {}['a'])\nt.start()\nt.join()"),
    Death("cause and consequence", "failed", "file_not_found",
        "try:\n    open('/no/such/file')\nexcept OSError as e:\n    raise RuntimeError('cannot load the data') from e"),
    # Shapes and types.
    Death("NumPy shapes", "failed", "shape_mismatch", "import numpy as np; np.ones((2, 3)) @ np.ones((2, 3))"),
    Death("Keras rank", "failed", "shape_mismatch",
        f"{KERAS}model(np.ones((4, 4, 4), 'float32'))", frameworks=("keras",)),
    Death("Keras labels", "failed", "shape_mismatch",
        f"{KERAS}model.fit(x, np.ones((32, 1)), verbose=0)", frameworks=("keras",)),
    Death("TensorFlow matmul", "failed", "shape_mismatch",
        "import tensorflow as tf; tf.matmul(tf.ones((2, 3)), tf.ones((2, 3)))", frameworks=("tensorflow",)),
    Death("TensorFlow types", "failed", "dtype_mismatch",
        "import tensorflow as tf; tf.ones(3, tf.int32) + tf.ones(3, tf.float32)", frameworks=("tensorflow",)),
    Death("torch shapes", "failed", "shape_mismatch",
        "import torch; torch.nn.Linear(3, 4)(torch.ones(2, 5))", frameworks=("torch",)),
    Death("torch types", "failed", "dtype_mismatch",
        "import torch; torch.nn.Linear(3, 4)(torch.ones(2, 3, dtype=torch.float64))", frameworks=("torch",)),
    Death("JAX shapes", "failed", "shape_mismatch",
        "import jax.numpy as jnp; jnp.ones((2, 3)) @ jnp.ones((2, 3))", frameworks=("jax",)),
    # Memory of the device.
    Death("TensorFlow, batch of Keras too large", "out_of_memory", "cpu_out_of_memory",
        f"{KERAS}wide = keras.Sequential([keras.layers.Input((8,)), keras.layers.Dense(4000), keras.layers.Dense(1)])\n"
        "wide.compile('sgd', 'mse')\n"
        "big = np.ones((8192, 8), 'float32')\n"
        "wide.fit(big, big[:, :1], batch_size=8192, verbose=0)", frameworks=("tensorflow",),
        environment=tuple(SMALL_DEVICE.items())),
    Death("TensorFlow, eager", "out_of_memory", "cpu_out_of_memory",
        "import tensorflow as tf\nkept = [tf.zeros((1 << 18,)) + 1 for _ in range(1000)]", frameworks=("tensorflow",),
        environment=tuple(SMALL_DEVICE.items())),
    Death("JAX on the CPU", "out_of_memory", "device_out_of_memory",
        "import jax.numpy as jnp; print(jnp.ones((1 << 22, 1 << 22))[0, 0])", frameworks=("jax",)),
    Death("torch on the CPU", "out_of_memory", "host_out_of_memory",
        "import torch; torch.empty(1 << 46)", frameworks=("torch",)),
    # GPUs that are not there.
    Death("torch built for the CPU", "failed", "cpu_only_build",
        "import torch; torch.ones(1).cuda()", frameworks=("torch",)),
    Death("JAX without a GPU", "failed", "no_device_visible",
        "import jax; jax.devices('gpu')", frameworks=("jax",), environment=(("JAX_PLATFORMS", ""),)),
    Death("TensorFlow, device that is missing", "failed", "no_device_visible",
        "import tensorflow as tf\n"
        "tf.config.set_soft_device_placement(False)\n"
        "with tf.device('/GPU:0'):\n    tf.ones(3) + tf.ones(3)", frameworks=("tensorflow",)),
    # Losses, ranks, workers.
    Death("loss of NaN", "finished", "nan_loss",
        f"{KERAS}import sys\nx[:] = np.nan\nmodel.fit(x, x[:, :1], epochs=3, verbose=0)", frameworks=("keras",)),
    Death("rank of torchrun", "failed", "program_error",
        script=f"cd $(mktemp -d) && echo \"import os; {{}}['rank ' + os.environ['RANK']]\" > rank.py && "
        f"{sys.executable} -m torch.distributed.run --nproc-per-node 2 rank.py", frameworks=("torch",)),
    Death("killed worker of a torch loader", "out_of_memory", "input_out_of_memory",
        "import os, signal, torch\n"
        "class Data(torch.utils.data.Dataset):\n"
        "    def __len__(self): return 8\n"
        "    def __getitem__(self, i): os.kill(os.getpid(), signal.SIGKILL)\n"
        "if __name__ == '__main__':\n"
        "    list(torch.utils.data.DataLoader(Data(), num_workers=1))", frameworks=("torch",)),
    Death("error in a worker of multiprocessing", "failed", "file_not_found",
        "import multiprocessing as mp\n"
        "if __name__ == '__main__':\n"
        "    with mp.get_context('fork').Pool(1) as pool:\n"
        "        pool.map(open, ['/no/such/file'])"),
    Death("refused connection", "failed", "program_error", "import socket; socket.create_connection(('127.0.0.1', 1))"),
    Death("error at exit", "finished", "program_error",
        "import atexit\n@atexit.register\ndef save():\n    raise ValueError('nothing to save')"),
    Death("text of sys.exit", "failed", None, "import sys; sys.exit('give a configuration')"),
)  # fmt: skip


def main() -> int:
    """Play and print; return exit status 1 if a death is not shown as expected."""
    parser = argparse.ArgumentParser(description="Let programs die, and compare what `gpuwarden run` says of it.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="deaths, or parts of their names; all by default")
    wanted = parser.parse_args().names
    chosen = [each for each in DEATHS if not wanted or any(name in each.name for name in wanted)]
    chosen = [each for each in chosen if all(importlib.util.find_spec(name) for name in each.frameworks)]
    began, right = time.perf_counter(), 0
    print("| death | outcome, problem | shown | right |\n| --- | --- | --- | --- |")
    for death in chosen:
        shown = play(death)
        is_right = shown == (death.outcome, death.problem)
        right += is_right
        verdict = "yes" if is_right else "no"
        print(f"| {death.name} | {death.outcome}, {death.problem} | {shown[0]}, {shown[1]} | {verdict} |", flush=True)
    print(f"\n{right} of {len(chosen)} deaths shown right, in {time.perf_counter() - began:.0f} s")
    return int(right < len(chosen))


def play(death: Death) -> tuple[str | None, str | None]:
    """Let one program die; return the outcome and the problem on its card."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "train.py").write_text(death.code)
        command = ["sh", "-c", death.script] if death.script else [sys.executable, str(folder / "train.py")]
        if death.memory:
            with limited(death.memory) as group:
                _run(_inside(group, command), folder, death)
        else:
            _run(command, folder, death)
        try:
            card = json.loads((folder / "card.json").read_text())
        except FileNotFoundError:
            return None, None
        return card.get("outcome"), card.get("problem")


def _inside(group: Path, command: list[str]) -> list[str]:
    """Return a command that enters a control group and then becomes the program."""
    return ["sh", "-c", f'echo $$ > {group}/cgroup.procs; exec "$@"', "sh", *command]


def _run(command: list[str], folder: Path, death: Death) -> None:
    run = [sys.executable, "-m", "gpuwarden", "run", "--card", str(folder / "card.json"), "--", *command]
    environment = {**os.environ, **QUIET, **dict(death.environment), "GPUWARDEN_SOCKET": str(folder / "none.sock")}
    subprocess.run(
        run,
        env=environment,
        cwd=folder,
        capture_output=True,
        timeout=TIME,
        check=False,
        preexec_fn=_restore_signals,
    )


def _restore_signals() -> None:
    """Do as in a terminal: a job in the background ignores some signals, and so would its programs."""
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)


if __name__ == "__main__":
    sys.exit(main())
