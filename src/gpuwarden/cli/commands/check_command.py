"""Command `gpuwarden check`: whether the node and its GPUs are fit for a job, by the running daemon."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping
from typing import Any

from gpuwarden.cli.common.config_flags import load_config
from gpuwarden.cli.common.terminal import complain, say
from gpuwarden.config.loader import ConfigError
from gpuwarden.formatting import sanitize
from gpuwarden.protocol.control_client import send_command

UNFIT, UNKNOWN = 2, 3  # exit statuses; fit is 0, warning 1
TIMEOUT_SECONDS = 0.6  # for the daemon's answer: with its start, the command takes less than a second
MAX_GPU_NUMBER = 1024  # in a range of a job's GPUs
_NO_GPUS = ("NoDevFiles", "-1")  # Slurm's and CUDA's end of a list
_NAGIOS = ("OK", "WARNING", "CRITICAL", "UNKNOWN")
# Environment variables with a job's GPUs, and whether they have numbers of device files rather than indexes.
_JOB_GPUS = (("SLURM_JOB_GPUS", True), ("CUDA_VISIBLE_DEVICES", False))


def run(parsed: argparse.Namespace) -> int:
    """Ask the daemon, print its answer, and return the exit status."""
    try:
        question = question_from_flags(parsed, os.environ)
        path = load_config(parsed, known_names={}).control_socket  # the daemon has checked them
        done, text = send_command(path, f"check {json.dumps(question)}", TIMEOUT_SECONDS)
        answer = json.loads(text) if done else _unknown(text)
    except ConfigError as error:
        answer = _unknown(str(error).replace("\n", "; "))
    except (OSError, ValueError) as error:
        answer = _unknown(getattr(error, "strerror", None) or str(error))
    _print(answer, parsed)
    code = int(answer["code"])
    return 0 if parsed.stage in ("prolog", "epilog") and code != UNFIT and not parsed.strict else code


def question_from_flags(parsed: argparse.Namespace, environ: Mapping[str, str]) -> dict[str, Any]:
    """Return the question: the GPUs of `--gpus`, or with a stage those of the job in the environment.

    Raises ValueError for what names no GPU.
    """
    question: dict[str, Any] = {
        "stage": parsed.stage,
        "job": environ.get("SLURM_JOB_ID", ""),
        "off": sorted({name for each in parsed.off for name in each.split(",") if name}),
    }
    if parsed.gpus is not None:
        return {**question, "gpus": _expand(parsed.gpus)}
    if parsed.stage == "none":
        return question
    for variable, by_minor in _JOB_GPUS:
        if (value := environ.get(variable)) is not None:
            return {**question, "gpus": _expand(value), "by_minor": by_minor or bool(environ.get("SLURM_JOB_ID"))}
    # A job of Slurm without GPUs needs only the node.
    return {**question, "gpus": []} if environ.get("SLURM_JOB_ID") else question


def _expand(text: str) -> list[str]:
    """Return the GPUs of a list such as `0-2,5`, in Slurm's notation, or of UUIDs. Raises ValueError."""
    found: list[str] = []
    for each in map(str.strip, text.split(",")):
        if each in _NO_GPUS:
            break
        first, _, last = each.partition("-")
        if first.isdecimal() and last.isdecimal() and int(first) <= int(last):
            found += map(str, range(int(first), min(int(last), MAX_GPU_NUMBER) + 1))
        elif each.isdecimal() or each.startswith(("GPU-", "MIG-")):
            found.append(each)
        elif text:
            raise ValueError(f"{each!r} is not a GPU; write UUIDs or indexes, such as 0,2-3")
    return found


def _unknown(text: str) -> dict[str, Any]:
    return {"status": "unknown", "code": UNKNOWN, "text": text, "gpus": [], "findings": [], "checks": {}}


def _print(answer: Mapping[str, Any], parsed: argparse.Namespace) -> None:
    text = sanitize(str(answer["text"]))
    if parsed.json:
        say(json.dumps(answer))
    elif parsed.nagios:
        counts = [sum(each["status"] == status for each in answer["findings"]) for status in ("unfit", "warning")]
        perfdata = f"unfit={counts[0]} warnings={counts[1]} gpus={len(answer['gpus'])}"
        say(f"GPU {_NAGIOS[answer['code']]} - {text.replace('|', '/')} | {perfdata}")
    else:
        (complain if answer["code"] == UNKNOWN else say)(f"{answer['status']}: {text}")
