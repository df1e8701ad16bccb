"""Errors of a log: tracebacks, prefixes, noise, and any input within bounds."""

from __future__ import annotations

import io
import itertools
import random
import re
import time
from types import SimpleNamespace

import pytest
from error_samples import read_samples

from gpuwarden.errors.explanation import ErrorEvent
from gpuwarden.errors.recognition import find_log_problem, find_problem, is_noise
from gpuwarden.explain.events import MAX_ALIKE, EventReader, collect, read_events
from gpuwarden.explain.log_lines import MAX_LINE_CHARACTERS, PREFIXES, LogLine, LogReader, clean_text, parse_line


def events(text: str | bytes) -> list[ErrorEvent]:
    """Return the errors of a log."""
    return read_events(io.BytesIO(text.encode() if isinstance(text, str) else text))


def names(text: str | bytes) -> list[str]:
    """Return the names of the problems of a log."""
    return [event.problem.name for event in events(text)]


# Each form in which a launcher, logger, container or log writes a line whose message is "boom": source and level.
LOGGED = {
    "[rank3]: boom": ("rank3", ""),
    "[default0]:boom": ("default0", ""),
    "[rank0]:[E321 02:07:08.408271257 ProcessGroupNCCL.cpp:607] boom": ("rank0", "error"),
    "12: boom": ("12", ""),
    "[1,6]<stderr>:boom": ("6", ""),
    "Fri Aug 30 11:43:09 2024[1,0]<stderr>:boom": ("0", ""),
    "(VllmWorkerProcess pid=1252) boom": ("VllmWorkerProcess pid=1252", ""),
    "(EngineCore_DP0 pid=900) ERROR 07-09 10:00:00 [core.py:866] boom": ("EngineCore_DP0 pid=900", "error"),
    "ERROR 01-15 10:00:00 engine.py:366] boom": ("", "error"),
    "(pid=123) boom": ("pid=123", ""),
    "(train_fn pid=123, ip=10.0.0.1) [rank0]: boom": ("train_fn pid=123", ""),
    "2024-05-10 09:14:10,123 ERROR worker.py:409 -- boom": ("", "error"),
    "trainer-1  | boom": ("trainer-1", ""),
    "2024-05-10T09:14:10.123456789Z stderr F boom": ("", ""),
    "[pod/train-0/main] boom": ("pod/train-0/main", ""),
    "node:1:2 [0] NCCL WARN boom": ("node:1:2", "warning"),
    "worker-1: [2024-05-10 09:14:10,123] [ERROR] [launch.py:322:sigkill_handler] boom": ("worker-1", "error"),
    "10.0.0.1: boom": ("10.0.0.1", ""),
    "05/10/2024 09:14:10 - WARNING - __main__ - boom": ("", "warning"),
    "2024-05-10 09:14:10,123 - __main__ - ERROR - boom": ("", "error"),
    "[ERROR|trainer.py:1234] 2024-05-10 09:14:10,123 >> boom": ("", "error"),
    "[2024-05-10 09:14:10,123][__main__][ERROR] - boom": ("", "error"),
    "[2024-05-10 09:14:10 +0000] [123] [ERROR] boom": ("", "error"),
    "[NeMo W 2024-05-10 09:14:10 nemo_logging:349] boom": ("", "warning"),
    "2024-05-10 09:14:10.123 | ERROR    | __main__:train:42 - boom": ("", "error"),
    "2024-05-10 09:14:10.5: W tensorflow/core/x.cc:661] boom": ("", "warning"),
    "E0000 00:00:1738697930.202924    7665 cuda_dnn.cc:522] boom": ("", "error"),
    "E0510 09:14:10.123456 140 train.py:12] boom": ("", "error"),
    "W tensorflow/stream_executor/dso_loader.cc:135] boom": ("", "warning"),
    "INFO:tensorflow:Error reported to Coordinator: boom": ("", ""),
    "2025-06-15T17:04:55Z ERROR:root:boom": ("", "error"),
    " 45%|####5     | 45/100 [00:10<00:12,  4.5it/s]boom": ("", ""),
    "Nov 25 12:00:00 box train[7]: boom": ("", ""),
    "2024-11-25T12:00:00+0100 box python[1234]: boom": ("", ""),
    "2024-05-10T09:14:10.123456+02:00 box kernel: [   12.345678] boom": ("", ""),
    "[   12.345678] box kernel: boom": ("", ""),
    "[Fri Aug 30 11:43:09 2024] boom": ("", ""),
    "kern  :err   : [    1.5] boom": ("", ""),
}


@pytest.mark.parametrize("line", [*LOGGED, "[   21.091872] NVRM: boom", "    indented boom"])
def test_prefixes(line: str) -> None:
    """The source and the level of a line are taken from loggers' and launchers' prefixes."""
    parsed = parse_line(1, line)
    message = line if line not in LOGGED and line[0] == " " else line[line.index("NVRM") if "NVRM" in line else -4 :]
    assert (parsed.source, parsed.level, parsed.text) == (*LOGGED.get(line, ("", "")), message)


def test_each_prefix_has_a_sample() -> None:
    """A prefix that begins no sample, and no rest of one, would be a dead row."""
    rests = {line[start:] for line in LOGGED for start in range(len(line))}
    assert [regex for regex in PREFIXES if not any(re.match(regex, rest) for rest in rests)] == []


@pytest.mark.parametrize("line", [*LOGGED, "an unknown logger, 17: boom"])
def test_traceback_through_a_logger_is_read(line: str) -> None:
    """A traceback is read whatever stands before each of its lines; its error is never one of its frames."""
    traceback = (
        "Traceback (most recent call last):",
        '  File "train.py", line 9, in step',
        "    loss.backward()",
        '  File "/x/site-packages/torch/memory_error.py", line 52, in backward',
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.00 GiB.",
    )
    (event,) = events("\n".join(line.replace("boom", each) for each in traceback))
    assert (event.problem.name, event.frame, event.text) == (
        "device_out_of_memory",
        "train.py:9 in step",
        traceback[-1],
    )


def test_traceback_that_interrupts_a_progress_bar_is_read() -> None:
    """Only its first line is behind the bar; a bar alone keeps its loss."""
    bar = "Epoch 3:  45%|####5     | 45/100 [00:10<00:12,  4.5it/s, loss=nan]"
    (event,) = events(f'{bar}Traceback (most recent call last):\n  File "train.py", line 9\nKeyError: "x"\n')
    assert (event.problem.name, event.frame, event.text) == ("program_error", "train.py:9", 'KeyError: "x"')
    assert names(bar) == ["nan_loss"]


def test_traceback_in_a_box_is_read() -> None:
    """Rich draws a frame around a traceback and prints the error below it."""
    (event,) = events(
        "╭──────── Traceback (most recent call last) ────────╮\n"
        "│ /home/user/train.py:12 in main                    │\n"
        "│                                                   │\n"
        "│    9 def main():                                  │\n"
        "│ ❱ 12     step()                                   │\n"
        "│                                                   │\n"
        "│ /x/site-packages/torch/optim.py:3 in step         │\n"
        "╰───────────────────────────────────────────────────╯\n"
        "ValueError: nothing that is known\n"
    )
    assert (event.text, event.frame) == ("ValueError: nothing that is known", "/home/user/train.py:12 in main")


def test_frame_without_a_traceback_is_no_error() -> None:
    """A frame whose traceback begins before the text, or is cut by it, shows nothing by the name of its file."""
    assert names('  File "/x/out_of_memory/CUDA error: out of memory.py", line 52, in cudaMalloc failed\n') == []


def test_traceback_is_one_event_with_the_users_own_line() -> None:
    """A traceback counts once; its place is the innermost line outside of packages."""
    (event,) = events(
        'Traceback (most recent call last):\n  File "train.py", line 9, in step\n    loss.backward()\n'
        '  File "/x/site-packages/torch/_tensor.py", line 522, in backward\n    f()\n'
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.00 GiB.\nmore of the message\n"
    )
    assert (event.problem.name, event.line, event.frame) == ("device_out_of_memory", 1, "train.py:9 in step")
    assert event.text.endswith("more of the message")


def test_ranks_that_write_at_once_are_told_apart() -> None:
    """Lines of two tracebacks that alternate belong to their ranks."""
    first = ["Traceback (most recent call last):", '  File "a.py", line 1, in f', "RuntimeError: CUDA out of memory. x"]
    second = ["Traceback (most recent call last):", '  File "b.py", line 2, in g', "FileNotFoundError: [Errno 2] y"]
    lines = [f"[rank{rank}]: {line}" for pair in zip(first, second, strict=True) for rank, line in enumerate(pair)]
    found = {(event.source, event.problem.name, event.frame) for event in events("\n".join(lines))}
    assert found == {("rank0", "device_out_of_memory", "a.py:1 in f"), ("rank1", "file_not_found", "b.py:2 in g")}


def test_crash_report_has_the_own_line_of_the_thread_that_crashed() -> None:
    """The innermost own frame of the crashed thread is the place of a crash; errors after the report are read too."""
    (crash, later) = events(
        "Fatal Python error: Segmentation fault\n\n"
        'Thread 0x00007f01 (most recent call first):\n  File "loader.py", line 3 in fetch\n\n'
        "Current thread 0x00007f02 (most recent call first):\n"
        '  File "/usr/lib/python3.11/ctypes/__init__.py", line 519 in string_at\n'
        '  File "train.py", line 8 in step\n  File "train.py", line 20 in <module>\n\n'
        "Extension modules: numpy.core._multiarray_umath (total: 1)\n"
        "RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB\n"
    )
    assert (crash.problem.name, crash.line, crash.frame) == ("segmentation_fault", 1, "train.py:8 in step")
    assert (later.problem.name, later.line) == ("device_out_of_memory", 12)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("train.sh: line 22:  7880 Bus error               (core dumped) python train.py", "bus_error"),
        ("train.sh: line 22:  7880 Segmentation fault      (core dumped) python train.py", "segmentation_fault"),
        ("train.sh: line 22:  7880 Illegal instruction     (core dumped) python train.py", "segmentation_fault"),
        ("train.sh: line 22:  7880 Floating point exception(core dumped) python train.py", "segmentation_fault"),
        ("train.sh: line 22:  7880 Aborted                 (core dumped) python train.py", "process_aborted"),
        ("train.sh: line 22:  7880 Killed                  python train.py", "process_killed"),
        ("train.sh: line 22:  7880 Terminated              python train.py", "process_killed"),
        ("zsh: bus error (core dumped)  python train.py", "bus_error"),
        ("zsh: illegal hardware instruction (core dumped)  python train.py", "segmentation_fault"),
        ("zsh: floating point exception (core dumped)  python train.py", "segmentation_fault"),
        ("zsh: abort (core dumped)  python train.py", "process_aborted"),
        ("zsh: killed     python train.py", "process_killed"),
        ("zsh: terminated  python train.py", "process_killed"),
        ("Fatal Python error: Bus error", "bus_error"),
        ("Fatal Python error: Aborted", "process_aborted"),
        ("Fatal Python error: Floating point exception", "segmentation_fault"),
        ("Fatal Python error: Illegal instruction", "segmentation_fault"),
    ],
)
def test_signals_as_shells_and_python_report_them(line: str, problem: str) -> None:
    """The line of a shell or of faulthandler after a signal ended the program names the death."""
    assert names(line) == [problem]


def test_words_of_a_log_are_no_signals() -> None:
    """A sentence that begins with the name of a signal is no death."""
    assert names("Terminated training early: no improvement in 5 epochs\nabort: repository default not found\n") == []


@pytest.mark.parametrize(
    "line",
    [
        "epoch 2 step 100 loss nan",
        "loss nan lr 0.001",
        "iter 10: loss nan, time 13.1ms",
        "step 3 | train loss inf | val loss 0.3",
        "loss: nan",
        "loss=nan",
        "Loss is NaN",
        "Loss became infinite or NaN at iteration=10!",
        "val_loss: nan - val_accuracy: 0.1",
        "train_loss=nan.0, v_num=3",
        "loss_cls: nan, loss_bbox: 0.3",
        "Loss/total: nan",
        '{"loss": NaN, "step": 3}',
        "loss=tensor(nan, device='cuda:0')",
        "loss: -Infinity",
    ],
)
def test_loss_that_is_not_finite(line: str) -> None:
    """The loss in a log is NaN or infinite, in the forms that training loops print."""
    assert names(line) == ["nan_loss"]


@pytest.mark.parametrize(
    "line",
    [
        "val_loss: 0.3 nan_to_num",
        "loss nan_to_num",
        "loss = nanmean(errors)",
        "loss nan check enabled",
        "loss is not nan",
        "loss: 0.3 nan values dropped: 12",
        "loss_scale: inf",
        "loss scale inf",
        "loss: information",
        "lossless: nan",
        "best loss inf -> 0.3",
        "best loss: inf",
        "best_val_loss=inf",
        "val_loss improved from inf to 0.29, saving model",
        f"nan: loss{'_a/' * 20_000}",
    ],
)
def test_finite_loss_with_words_of_one_that_is_not(line: str) -> None:
    """Functions, counts, scales and the start value of the best loss are no NaN."""
    assert names(line) == []


def test_chain_of_exceptions_is_one_event() -> None:
    """A chain counts as its known exception, not as the wrapper raised from it."""
    text = (
        'Traceback (most recent call last):\n  File "a.py", line 1, in f\nRuntimeError: CUDA error: out of memory\n\n'
        "The above exception was the direct cause of the following exception:\n\n"
        'Traceback (most recent call last):\n  File "a.py", line 3, in g\nValueError: step failed\n'
    )
    assert names(text) == ["device_out_of_memory"]


def test_frame_that_a_message_names_counts() -> None:
    """The line of a compiled step is in TensorFlow's message; its traceback ends where the step was called."""
    log = (
        b'Traceback (most recent call last):\n  File "/home/u/train.py", line 9, in <module>\n    step(x)\n'
        b'  File "/v/site-packages/tensorflow/python/util/traceback_utils.py", line 153, in error_handler\n'
        b"ValueError: in user code:\n\n"
        b'    File "/home/u/train.py", line 6, in step  *\n        x = x @ tf.ones((7, 7))\n\n'
        b"    ValueError: Dimensions must be equal, but are 3 and 7 for '{{node MatMul}}'\n"
    )
    (event,) = read_events(io.BytesIO(log))
    assert event.frame == "/home/u/train.py:6 in step"


def test_notebook_traceback_is_one_event_with_its_cell() -> None:
    """A notebook's frames are not indented, and a cell is the user's own code; a chain of exceptions is one error."""
    (event,) = events(
        "---------------------------------------------------------------------------\n"
        "InternalError                             Traceback (most recent call last)\n"
        "Cell In[12], line 5, in <module>\n      4 x = model(batch)\n----> 5 step(x)\n\n"
        "File ~/train.py:88, in step(x)\n     87 def step(x):\n---> 88     return f(x)\n\n"
        "File ~/.local/lib/python3.8/site-packages/keras/src/utils/traceback_utils.py:70, in handler(*args)\n"
        "---> 70     raise error\n\n"
        "InternalError: Blas GEMM launch failed : a.shape=(30, 64)\n\n"
        "During handling of the above exception, another exception occurred:\n\n"
        "StepError                             Traceback (most recent call last)\n"
        "Cell In[12], line 7\n----> 7 raise StepError\n\nStepError: step failed\n"
    )
    assert (event.problem.name, event.line, event.frame) == ("cublas_launch_failed", 2, "Cell In[12]:7")
    assert event.text == "InternalError: Blas GEMM launch failed : a.shape=(30, 64)"


def test_frames_of_a_notebook_end_at_a_line_of_a_logger() -> None:
    """A notebook's traceback that is cut does not take the errors after it."""
    cut = "ValueError      Traceback (most recent call last)\nCell In[1], line 1\n"
    assert names(f"{cut}2024-05-10 09:14:10.5: E x/cuda.cc:66] CUDA error: out of memory\n") == ["device_out_of_memory"]


def test_exception_of_cpp_is_one_event_with_its_message() -> None:
    """The line after it says what failed, the one after that is another error."""
    first, second = events(
        "terminate called after throwing an instance of 'c10::DistBackendError'\n"
        "  what():  [Rank 6] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=880)\n"
        "CUDA error: out of memory\n"
    )
    assert (first.problem.name, first.line) == ("collective_timeout", 1)
    assert (second.problem.name, second.line) == ("device_out_of_memory", 3)


def test_noise_of_every_start_is_no_error() -> None:
    """TensorFlow's harmless lines of level E and W, information, and a library for TensorRT count as nothing."""
    assert (
        names(
            "2024-05-10 09:14:00.1: E external/x/cuda_fft.cc:479] Unable to register cuFFT factory: Attempting to\n"
            "2024-05-10 09:14:00.1: E external/x/cuda_dnn.cc:10] Unable to register cuDNN factory: Attempting to\n"
            "2024-05-10 09:14:00.2: W tensorflow/x/py_utils.cc:38] TF-TRT Warning: Could not find TensorRT\n"
            "2024-05-10 09:14:00.2: W x/dso_loader.cc:64] Could not load dynamic library 'libnvinfer.so.7'; dlerror\n"
            "2024-05-10 09:14:00.3: I tensorflow/x/gpu_device.cc:2019] Created device with 13272 MB memory: CUDA\n"
        )
        == []
    )


def test_good_run_has_no_errors() -> None:
    """Lines of a run that is well, with words that errors have too, count as nothing."""
    assert (
        names(
            "Epoch 3: val_loss improved from 0.31 to 0.29, saved weights to best.weights.h5\n"
            "Gradient overflow.  Skipping step, loss scaler 0 reducing loss scale to 32768.0\n"
            "Restarting the data iterator; closing the connection to the tracker\n"
            "All 8 replicas on the same device type; expected speed 1200 examples/s\n"
            "2024-05-10 09:14:00.4: I x/rendezvous.cc:424] Local rendezvous recv item cancelled\n"
            "Process finished with exit code 0\n"
        )
        == []
    )


def test_codes_are_no_mere_numbers() -> None:
    """Lines that differ in the number of an XID or of an exit status only are different errors."""
    xid = "NVRM: Xid (PCI:0000:18:00): {}, pid=1, name=python, Ch 00000001\n"
    assert names(xid.format(45) + xid.format(46)) == ["xid_notice", "gpu_fault"]
    assert names("Process finished with exit code 0\nProcess finished with exit code 137\n") == ["process_killed"]


def test_bare_assertion_has_its_condition() -> None:
    """An assertion without a message is explained by its line of code."""
    frames = 'Traceback (most recent call last):\n  File "train.py", line 7, in main\n'
    (event,) = events(f"{frames}    assert len(labels) == classes\nAssertionError\n")
    assert (event.problem.name, event.text) == ("assertion_failed", "AssertionError: assert len(labels) == classes")
    assert names(f"{frames}    assert(torch.cuda.is_available())\nAssertionError\n") == ["no_device_visible"]


def test_traceback_pasted_as_one_line_is_read() -> None:
    """A traceback that lost its line ends is searched as a line."""
    pasted = 'Traceback (most recent call last): File "train.py", line 7 f() RuntimeError: CUDNN_STATUS_MAPPING_ERROR\n'
    assert names(pasted) == ["kernel_launch_failed"]


def test_information_that_is_an_error_anyway() -> None:
    """TensorFlow reports a missing driver as information."""
    (event,) = events("2024-05-10 09:14:00.3: I x/cudart_stub.cc:32] Could not find cuda drivers on your machine\n")
    assert (event.problem.name, event.warning) == ("no_device_visible", True)


def test_alike_errors_count_once() -> None:
    """Errors that differ in numbers only are one, with their count."""
    (event,) = events("".join(f"CUDA error: out of memory at {number}\n" for number in range(50)))
    assert event.repeats == 49


def test_progress_bar_and_colors_are_cleaned() -> None:
    """States of a progress bar are lines of one number; escape sequences are not shown."""
    (event,) = events(b"\n 1/9 [=>]\r 2/9 [==>]\r\x1b[31mRuntimeError: CUDA out of memory\x1b[0m\x07\xe2\x80\xae\n")
    assert (event.line, event.text) == (2, "RuntimeError: CUDA out of memory")


def test_any_bytes_are_a_log() -> None:
    """Random bytes, NULs, no line end, and nothing at all do not raise."""
    noise = random.Random(5)  # noqa: S311 - no secret
    for _ in range(50):
        events(noise.randbytes(4000))
    assert events(b"") == events(b"\0" * 100_000) == events(b"\r" * 100_000) == []
    assert clean_text(b"a\x00\x1b]0;title\x07b") == "ab"


def test_utf_16_is_read() -> None:
    """PowerShell writes it."""
    assert names("step 1\r\nRuntimeError: CUDA error: out of memory\r\n".encode("utf-16")) == ["device_out_of_memory"]


def test_long_lines_are_cut_and_counted_once() -> None:
    """A line of megabytes costs only its beginning, and the next one has the right number."""
    log = b"x" * 3_000_000 + b"\nCUDA out of memory\n"
    assert [event.line for event in events(log)] == [2]
    assert max(len(line) for _, line in LogReader(io.BytesIO(log))) <= 1 << 16
    assert len(clean_text(b"x" * 100_000)) == MAX_LINE_CHARACTERS


def test_large_log_takes_seconds() -> None:
    """Five megabytes of steps with one error at their end: found, in a time that a busy machine keeps too."""
    steps = "".join(
        f"step {number} loss {number / 7:.4f} max memory allocated {number} on cuda:0\n" for number in range(100_000)
    )
    began = time.process_time()
    assert names(steps + "RuntimeError: CUDA error: an illegal memory access was encountered\n") == ["illegal_address"]
    assert time.process_time() - began < 3


def different_lines(prefix: str, count: int) -> str:
    """Return lines that have no two words in common, but for their beginning."""
    words = random.Random(1)  # noqa: S311 - no secret
    return "".join(f"{prefix} {''.join(words.choices('ghijklmnop', k=14))}\n" for _ in range(count))


def test_many_different_errors_are_counted() -> None:
    """A bounded number is kept of a problem, and the others count for its first one; no other problem is left out."""
    found = events(different_lines("CUDA error: out of memory", 3_000) + "could not create cudnn handle: x\n")
    assert [len(found), found[0].repeats, found[-1].problem.name] == [
        MAX_ALIKE + 1,
        3_000 - MAX_ALIKE,
        "library_init_failed",
    ]


@pytest.mark.parametrize("prefix", ["RuntimeError: step", "plain words", "\n\r\n\r", "[rank1]: ValueError: "])
def test_time_is_bounded(prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the lines, the last ones are searched; those that were left out are counted."""
    clock = itertools.count()
    monkeypatch.setattr("gpuwarden.explain.log_lines.time", SimpleNamespace(monotonic=lambda: next(clock) / 1000))
    monkeypatch.setattr("gpuwarden.explain.log_lines._CHUNK_BYTES", 1 << 12)
    text = different_lines(prefix, 5_000) + "CUDA error: out of memory"
    log = LogReader(io.BytesIO(text.encode()), 3.0)
    assert collect(EventReader().read(log))[-1].problem.name == "device_out_of_memory"
    assert next(clock) < 4100  # times that it looked at the clock, which is each line
    lines = text.count("\n") + 1
    assert log.first_left_out + log.left_out < lines < log.left_out + 4100


def test_log_that_is_read_whole_leaves_nothing_out() -> None:
    """A log within the time is complete."""
    log = LogReader(io.BytesIO(b"one\n\ntwo\rthree\nfour"))
    assert list(log) == [(1, b"one"), (3, b"two"), (3, b"three"), (4, b"four")]
    assert log.left_out == 0


def test_each_line_of_the_samples_reaches_the_patterns() -> None:
    """Each line of a real message that a pattern knows is an error of a log that has that line alone."""
    for line in {line for sample in read_samples() for line in sample.message.splitlines()}:
        parsed = parse_line(1, clean_text(line.encode()))
        problem = (find_log_problem if parsed.level == "info" else find_problem)(parsed.text)
        if problem is not None and not is_noise(parsed.text):
            assert names(line) == [problem.name], line


def test_line_is_a_value() -> None:
    """A line without prefixes has no source and no level."""
    assert parse_line(3, "plain") == LogLine(3, "plain")
