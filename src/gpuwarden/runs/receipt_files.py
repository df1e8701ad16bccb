"""The folder of receipts: a file a run, `BEGAN-RUN.json`, and `BEGAN-RUN.part.json` while the run goes on.

Everything here blocks as long as the file system does, and runs on a thread of its own. What is not of this project's
making is left alone.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import stat
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from gpuwarden.runs.fairness import excess
from gpuwarden.runs.kept import Kept, kept
from gpuwarden.runs.receipt import Receipt, ReceiptError, from_plain, to_plain

MAX_FILE_BYTES = 1 << 18
HEAD_BYTES = 4096  # of a file, in which its first keys are
MAX_NAMES = 200_000  # looked at in the folder
ENDED, PART = ".json", ".part.json"

_NAME = re.compile(r"\d{8}T\d{6}Z-\d+-\d+(\.part)?\.json")
_OWNER_AND_END = re.compile(  # as `as_lines` writes them
    rb'^ "uid": (\d+),$.*?^ "updated_timestamp_seconds": (\d+(?:\.\d+)?),$', re.MULTILINE | re.DOTALL
)
_LEFT_BEHIND = re.compile(r"\.\d{8}T\d{6}Z-\d+-\d+(\.part)?\.json\.tmp")


@dataclass(frozen=True, slots=True)
class Found:
    """What lay in the folder, by stem: receipts of runs that ended, the newest end first, and of those that had not.

    The former are ready to be served: many whole ones would take more memory than the daemon.

    `strange` names files that are no receipts of a version that is known here, with what is wrong.
    """

    ended: Mapping[str, Kept] = field(default_factory=dict)
    open: Mapping[str, Receipt] = field(default_factory=dict)
    strange: tuple[str, ...] = ()


def as_lines(receipt: Receipt) -> bytes:
    """Write a receipt as its file has it, a line for each key: with `indent` Python encodes, not C."""
    lines = (f" {json.dumps(key)}: {json.dumps(said)}" for key, said in to_plain(receipt).items())
    return ("{\n" + ",\n".join(lines) + "\n}\n").encode()


def stem_of(receipt: Receipt) -> str:
    """Return the name that a run's files have before their ending: in the order of time, and one for each run."""
    began = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(receipt.began_timestamp_seconds))
    return f"{began}-{receipt.run_id}"


class ReceiptFiles:
    """Keeps at most `most` receipts of ended runs in `folder`; beyond that the user with most loses their oldest.

    Used by one thread at a time.
    """

    def __init__(self, folder: Path, most: int) -> None:
        self.folder = folder
        self._most = most
        self._lock: int | None = None
        self._ended: dict[str, int] = {}  # uids by names of files, the oldest end first

    def open(self, newest: int) -> Found:
        """Take hold of the folder, made if need be, and read it; of ended runs so many, by the same rule.

        Raises OSError.
        """
        self._take_hold()
        names = self._names()
        strange: list[str] = []
        for name in names:
            if _LEFT_BEHIND.fullmatch(name):
                (self.folder / name).unlink(missing_ok=True)
            elif not _NAME.fullmatch(name):
                strange.append(f"{name}: not its name")
        names = [name for name in names if _NAME.fullmatch(name)]
        self._ended = self._in_order(names, strange)
        older = set(self._beyond(newest))
        ended = {name: self._kept(name, strange) for name in reversed(self._ended) if name not in older}
        parts = {name: self._read(name, strange) for name in self._parts(names)}
        return Found(
            {name.removesuffix(ENDED): receipt for name, receipt in ended.items() if receipt},
            {name.removesuffix(PART): receipt for name, receipt in parts.items() if receipt},
            tuple(strange),
        )

    def _names(self) -> list[str]:
        with os.scandir(self.folder) as entries:
            return sorted(entry.name for entry in islice(entries, MAX_NAMES))

    def _in_order(self, names: Iterable[str], strange: list[str]) -> dict[str, int]:
        """Return the receipts of ended runs by their ends, as names of files have their begins; with their uids."""
        names = [name for name in names if _NAME.fullmatch(name) and not name.endswith(PART)]
        known = ((found[1], name, found[0]) for name in names if (found := self._owner_and_end(name, strange)))
        return {name: uid for _, name, uid in sorted(known)}

    def _owner_and_end(self, name: str, strange: list[str]) -> tuple[int, float] | None:
        """Return whose run it was, and when it ended or was last seen; None of what is no receipt."""
        with suppress(ReceiptError, OSError):
            found = _OWNER_AND_END.search(self._content(name, HEAD_BYTES))
            if found:
                return int(found[1]), float(found[2])
        receipt = self._read(name, strange)  # written by other hands
        return (receipt.uid, receipt.updated_timestamp_seconds) if receipt else None

    def _beyond(self, most: int) -> list[str]:
        """Return the names of files that are too many, oldest first."""
        return excess(((name, uid, 1) for name, uid in self._ended.items()), most)

    def _parts(self, names: list[str]) -> Iterator[str]:
        """Return the names of runs that had not ended; what a crash has left beside a whole receipt is removed."""
        for name in names:
            if name.endswith(PART):
                if name.removesuffix(PART) + ENDED in names:
                    (self.folder / name).unlink(missing_ok=True)
                else:
                    yield name

    def _take_hold(self) -> None:
        """Make the folder, if need be; keep a second daemon out, whose receipts would be taken for this one's past."""
        if not self.folder.is_dir():
            self.folder.mkdir(parents=True)
            self.folder.chmod(0o750)  # whatever the umask
        if self._lock is not None:
            return
        folder = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(folder)
            raise OSError(errno.EBUSY, "another daemon keeps its receipts there") from None
        except OSError:
            pass  # a file system without locks
        self._lock = folder

    def _kept(self, name: str, strange: list[str]) -> Kept | None:
        receipt = self._read(name, strange)
        return kept(receipt) if receipt else None

    def _read(self, name: str, strange: list[str]) -> Receipt | None:
        try:
            return self._receipt(name)
        except (OSError, ReceiptError) as error:
            strange.append(f"{name}: {error.strerror if isinstance(error, OSError) else error}")
            return None

    def _content(self, name: str, most: int) -> bytes:
        # Whatever lies there: a link leads elsewhere, and to open a FIFO would wait for its writer.
        file = os.open(self.folder / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            if not stat.S_ISREG(os.fstat(file).st_mode):
                raise ReceiptError("no file")
            return os.read(file, most)
        finally:
            os.close(file)

    def _receipt(self, name: str) -> Receipt:
        content = self._content(name, MAX_FILE_BYTES + 1)
        if len(content) > MAX_FILE_BYTES:
            raise ReceiptError(f"more than {MAX_FILE_BYTES} bytes")
        try:
            receipt = from_plain(json.loads(content))
        except (ReceiptError, RecursionError):
            raise ReceiptError("no receipt of a version known here") from None
        except ValueError:
            raise ReceiptError("no JSON") from None
        if stem_of(receipt) != name.partition(".")[0]:
            raise ReceiptError("the receipt of another run")
        return receipt

    def _keep_hold(self) -> None:
        """Go on in what is in the folder's place, where somebody has removed it or put another there."""
        if self._lock is not None:
            if self.folder.is_dir() and os.path.samestat(self.folder.stat(), os.fstat(self._lock)):
                return
            os.close(self._lock)
            self._lock = None
        self._take_hold()
        self._ended = self._in_order(self._names(), [])

    def write(self, receipts: Mapping[str, Receipt]) -> None:
        """Write receipts by stem, and remove what is beyond the limit. Raises OSError after the first that fails."""
        self._keep_hold()
        for stem, receipt in receipts.items():
            if receipt.outcome is None:
                self._put(stem + PART, receipt)
                continue
            self._put(stem + ENDED, receipt)
            (self.folder / (stem + PART)).unlink(missing_ok=True)
            self._ended.pop(stem + ENDED, None)
            self._ended[stem + ENDED] = receipt.uid
        for name in self._beyond(self._most) if len(self._ended) > self._most else ():
            self._remove(name)

    def _put(self, name: str, receipt: Receipt) -> None:
        """Put a whole file in place of another: whoever reads it, or a power cut, finds the one or the other."""
        aside = self.folder / f".{name}.tmp"
        content = as_lines(receipt)
        file = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o640)
        try:
            with open(file, "wb") as writing:  # noqa: PTH123 - a descriptor has no path
                os.fchmod(file, 0o640)  # whatever the umask
                writing.write(content)
                writing.flush()
                if receipt.outcome is not None:
                    os.fsync(file)
            aside.rename(self.folder / name)
        except OSError:
            with suppress(OSError):
                aside.unlink()
            raise

    def _remove(self, name: str) -> None:
        del self._ended[name]
        try:
            self._receipt(name)
        except (ReceiptError, OSError):
            return  # one that is none of ours stays
        (self.folder / name).unlink(missing_ok=True)
