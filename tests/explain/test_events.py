"""Errors of a log: tracebacks, prefixes, noise, and any input within bounds."""

from __future__ import annotations

import io
import random
import time

import pytest

from gpuwarden.explain.events import MAX_EVENTS, ErrorEvent, read_events
from gpuwarden.explain.log_lines import MAX_LINE_CHARACTERS, LogLine, clean_text, parse_line, read_lines


def events(text: str | bytes) -> list[ErrorEvent]:
    """Return the errors of a log."""
    return read_events(io.BytesIO(text.encode() if isinstance(text, str) else text))


def names(text: str | bytes) -> list[str]:
    """Return the names of the problems of a log."""
    return [event.problem.name for event in events(text)]


@pytest.mark.parametrize(
    ("line", "source", "level", "text"),
    [
        ("[rank3]: boom", "rank3", "", "boom"),
        ("[rank0]:[E321 02:07:08.408271257 ProcessGroupNCCL.cpp:607] boom", "rank0", "error", "boom"),
        ("12: boom", "12", "", "boom"),
        ("[1,6]<stderr>:boom", "6", "", "boom"),
        ("(VllmWorkerProcess pid=1252) boom", "VllmWorkerProcess pid=1252", "", "boom"),
        ("trainer-1  | boom", "trainer-1", "", "boom"),
        ("node:1:2 [0] NCCL WARN boom", "node:1:2", "warning", "boom"),
        ("2024-05-10 09:14:10.5: W tensorflow/core/x.cc:661] boom", "", "warning", "boom"),
        ("E0000 00:00:1738697930.202924    7665 cuda_dnn.cc:522] boom", "", "error", "boom"),
        ("I tensorflow/stream_executor/dso_loader.cc:135] boom", "", "info", "boom"),
        ("2025-06-15T17:04:55Z ERROR:root:boom", "", "error", "boom"),
        ("[   21.091872] NVRM: boom", "", "", "NVRM: boom"),
        ("Nov 25 12:00:00 box kernel: boom", "", "", "boom"),
        ("    indented", "", "", "    indented"),
    ],
)
def test_prefixes(line: str, source: str, level: str, text: str) -> None:
    """The source and the level of a line are taken from loggers' and launchers' prefixes."""
    parsed = parse_line(1, line)
    assert (parsed.source, parsed.level, parsed.text) == (source, level, text)


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
    assert names(xid.format(45) + xid.format(46)) == ["gpu_fault"]
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
    assert max(len(line) for _, line in read_lines(io.BytesIO(log))) <= 1 << 16
    assert len(clean_text(b"x" * 100_000)) == MAX_LINE_CHARACTERS


def test_large_log_takes_seconds() -> None:
    """Five megabytes of steps with one error at their end: found, in a time that a busy machine keeps too."""
    steps = "".join(
        f"step {number} loss {number / 7:.4f} max memory allocated {number} on cuda:0\n" for number in range(100_000)
    )
    began = time.process_time()
    assert names(steps + "RuntimeError: CUDA error: an illegal memory access was encountered\n") == ["illegal_address"]
    assert time.process_time() - began < 3


def test_many_different_errors_are_bounded() -> None:
    """A log of nothing but different errors keeps a bounded number, in a bounded time."""
    words = random.Random(1)  # noqa: S311 - no secret
    text = "".join(f"CUDA error: out of memory {''.join(words.choices('ghijklmnop', k=12))}\n" for _ in range(3_000))
    assert len(events(text)) == MAX_EVENTS


def test_error_after_many_different_warnings_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit on searched lines leaves room for those that a logger marks as errors."""
    monkeypatch.setattr("gpuwarden.explain.events._MAX_SEARCHES", 500)
    words = random.Random(2)  # noqa: S311 - no secret
    warnings = "".join(f"warning {''.join(words.choices('ghijkm', k=14))} failed\n" for _ in range(600))
    assert names(warnings + "2024-05-10 09:14:10.5: E x/cuda_dnn.cc:4] could not create cudnn handle\n") == [
        "library_init_failed"
    ]


def test_line_is_a_value() -> None:
    """A line without prefixes has no source and no level."""
    assert parse_line(3, "plain") == LogLine(3, "plain")
