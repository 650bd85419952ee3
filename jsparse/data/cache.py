"""DataCache: reads each sample once from a slow store, then from the local disk, then from memory.

It follows section 4.1 of "Towards Scalable Distributed Training of Deep Learning on Public Cloud
Clusters" (Shi et al., MLSys 2021). It needs no JAX.
"""

import contextlib
import hashlib
import operator
import os
import re
import secrets
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from typing import IO, Any, NamedTuple, Protocol, SupportsIndex

from .entry import decode, encode, sound

# Changes with the format of an entry, so that other versions' entries are not read.
FORMAT = 1
# Python's own memory for an entry that is kept, beside its bytes object.
OVERHEAD = 120
# How many seconds a process waits for another one to count its bytes.
PATIENCE = 1.0


class Source(Protocol):
    """What gives the samples: it has a length, and reads the sample of an index."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Any: ...


class Tier(NamedTuple):
    """What came from one place.

    Attributes:
      samples: how many samples.
      bytes: their length as entries, in bytes.
      seconds: time from the call to the sample, summed over samples and threads. For the source it
        includes preparing the sample and writing its entry.
    """

    samples: int = 0
    bytes: int = 0
    seconds: float = 0.0


class CacheStats(NamedTuple):
    """Where the samples came from that one process read.

    Attributes:
      source: samples from the source.
      disk: samples from the local disk.
      memory: samples from this process's memory.
      damaged: entries on the disk with a wrong checksum; their samples came from the source.
    """

    source: Tier = Tier()
    disk: Tier = Tier()
    memory: Tier = Tier()
    damaged: int = 0


class _Process:
    """What one process has in memory. No other process inherits it."""

    def __init__(self):
        self.pid = os.getpid()
        self.lock = threading.Lock()
        self.entries: dict[int, bytes] = {}
        self.bytes = 0
        self.reading: dict[int, threading.Lock] = {}
        self.stats = CacheStats()
        self.warned = False


class DataCache:
    """A source of samples that reads each sample of a slow source once.

    The first read of a sample takes it from the source, prepares it, and writes it to a file in a
    directory on the local disk. Later reads take it from there, and the next ones from memory. A
    ``DataCache`` is itself a source: it has a length and indices, as grain and PyTorch expect.

    Processes may share a directory, at the same time and one after another, and threads a cache. A
    process may be killed at any moment. What it leaves half-written is never read, and the next
    cache in the directory removes it. An entry whose checksum is wrong is read from the source
    again. Where the disk can't be written, the cache warns once and reads from the source.

    A sample is made of dicts, lists, tuples, NumPy arrays and scalars, bool, int, float, str,
    bytes and None. Each read returns new objects, which the caller may change.

    Source: Shi et al., MLSys 2021, section 4.1.

    Args:
      source: has ``__len__`` and ``__getitem__``. Its exceptions pass through.
      directory: a directory on the local disk. It is made at the first write.
      key: names the source and the preparation. Change it when either changes: caches with another
        key, or with a source of another length, keep their entries apart in the directory.
      prepare: makes what is cached from what the source gives, such as an image from a file's
        bytes. Augment after the cache: what is random here is drawn once.
      memory_bytes: how many bytes of entries each process keeps in memory, with Python's overhead.
        The first that fit stay. 0 keeps none.
      disk_bytes: how many bytes the key's entries may have in the directory. The first that fit
        stay, and others are not written. None for no bound. Pass the same number in all processes.
      share: ``(rank, size)``; the cache has the source's samples ``rank``, ``rank + size``, and
        so on. Shares differ in length by at most one. The default is the whole source.

    Raises:
      TypeError, ValueError: an argument is wrong.
      OSError: the system has no POSIX file locks.
    """

    def __init__(
        self,
        source: Source,
        directory: str | os.PathLike[str],
        *,
        key: str,
        prepare: Callable[[Any], Any] | None = None,
        memory_bytes: int = 2**30,
        disk_bytes: int | None = None,
        share: tuple[int, int] = (0, 1),
    ):
        if os.name != "posix":
            raise OSError(f"DataCache needs POSIX file locks, which {os.name} lacks: read from the source itself")
        for method in ("__len__", "__getitem__"):
            if not hasattr(source, method):
                raise TypeError(f"source is a {type(source).__name__} without {method}: pass a source that has it")
        if not isinstance(key, str) or not key:
            raise ValueError(f"key is {key!r}; pass a text that names the source and its preparation")
        if prepare is not None and not callable(prepare):
            raise TypeError(f"prepare is {prepare!r}; pass a function of a sample, or None")
        try:
            rank, size = map(operator.index, share)
        except (TypeError, ValueError):
            raise ValueError(f"share is {share!r}; pass two whole numbers, (rank, size)") from None
        if not 0 <= rank < size:
            raise ValueError(f"share is {share!r}; pass (rank, size) with 0 <= rank < size")
        directory = os.path.abspath(os.fsdecode(directory))
        if os.path.exists(directory) and not os.path.isdir(directory):
            raise ValueError(f"directory is {directory}, which is a file: name a directory")
        self._source, self._prepare, self._rank, self._size = source, prepare, rank, size
        self._memory_bytes = _whole("memory_bytes", memory_bytes)
        self._disk_bytes = None if disk_bytes is None else _whole("disk_bytes", disk_bytes)
        self._samples, self._key = len(source), key
        self._salt = hashlib.sha256(repr((FORMAT, key, self._samples)).encode()).digest()
        # The key's first letters tell people whose entries these are; the digest tells them apart.
        self._folder = os.path.join(directory, f"{re.sub(r'[^A-Za-z0-9]+', '-', key)[:40]}-{self._salt.hex()[:16]}")
        self._unfinished = os.path.join(self._folder, "unfinished")
        self._process = _Process()
        if os.path.isdir(self._folder):
            self._clean()

    def __len__(self) -> int:
        return len(range(self._rank, self._samples, self._size))

    def __getitem__(self, index: SupportsIndex) -> Any:
        """Reads a sample.

        Args:
          index: from ``-len(self)`` to ``len(self) - 1``.

        Raises:
          IndexError: there is no such sample.
          TypeError: the index is no whole number, or the sample can't be cached.
        """
        begin = time.perf_counter()
        if isinstance(index, slice):
            raise TypeError(f"index is {index}; a cache reads one sample at a time: [cache[i] for i in range(...)]")
        try:
            number = range(self._rank, self._samples, self._size)[operator.index(index)]
        except IndexError:
            raise IndexError(f"index is {index}; this cache has {len(self)} samples") from None
        here = self._here()
        tier, entry = self._find(here, number)
        sample = decode(entry)
        with here.lock:
            samples, length, seconds = getattr(here.stats, tier)
            taken = Tier(samples + 1, length + len(entry), seconds + time.perf_counter() - begin)
            here.stats = here.stats._replace(**{tier: taken})
        return sample

    def __iter__(self) -> Iterator[Any]:
        # Python's own iteration would take an IndexError of the source for the end.
        return (self[index] for index in range(len(self)))

    def __repr__(self) -> str:
        # grain compares it with a checkpoint's: nothing of one process or host may be in it.
        return f"DataCache(key={self._key!r}, share={(self._rank, self._size)}, samples={len(self)})"

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_process"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _process=_Process())

    @property
    def stats(self) -> CacheStats:
        """What this process has read since it made, unpickled or inherited the cache."""
        return self._here().stats

    def _here(self) -> _Process:
        # A thread of the parent may have held the locks when it forked.
        if self._process.pid != os.getpid():
            self._process = _Process()
        return self._process

    def _find(self, here: _Process, number: int) -> tuple[str, bytes]:
        """The entry of a source's sample, and where it came from."""
        with here.lock:
            if number in here.entries:
                return "memory", here.entries[number]
            alone = here.reading.setdefault(number, threading.Lock())
        with alone:  # Threads that want the same sample wait for the first of them.
            try:
                with here.lock:
                    if number in here.entries:
                        return "memory", here.entries[number]
                tier, entry = "disk", self._read(here, number)
                if entry is None:
                    sample = self._source[number]
                    entry = encode(sample if self._prepare is None else self._prepare(sample), self._salt_of(number))
                    tier = "source"
                    self._write(here, number, entry)
                self._keep(here, number, entry)
                return tier, entry
            finally:
                with here.lock:
                    here.reading.pop(number, None)

    def _keep(self, here: _Process, number: int, entry: bytes) -> None:
        """Keeps an entry in memory, if there is room.

        What is there stays. If epochs do not fit, an entry that replaced another would mostly be
        replaced before it is read again.
        """
        size = sys.getsizeof(entry) + OVERHEAD
        with here.lock:
            if here.bytes + size <= self._memory_bytes and number not in here.entries:
                here.entries[number] = entry
                here.bytes += size

    def _salt_of(self, number: int) -> bytes:
        return self._salt + str(number).encode()

    def _path(self, number: int) -> str:
        return os.path.join(self._folder, str(number))

    def _read(self, here: _Process, number: int) -> bytes | None:
        """An entry from the disk; None if it is not there or damaged."""
        try:
            with open(self._path(number), "rb") as file:
                entry = file.read()
        except FileNotFoundError:
            return None
        except OSError as error:
            self._warn(here, error)
            return None
        if sound(entry, self._salt_of(number)):
            return entry
        with here.lock:
            here.stats = here.stats._replace(damaged=here.stats.damaged + 1)
        with contextlib.suppress(OSError):
            os.unlink(self._path(number))  # So that the next count of all bytes leaves it out.
        return None

    def _write(self, here: _Process, number: int, entry: bytes) -> None:
        """Writes an entry to the disk, if it can be written."""
        try:
            try:
                self._write_file(number, entry)
            except FileNotFoundError:  # Someone removed the directory.
                self._write_file(number, entry)
        except BlockingIOError:
            pass  # Another process counts the bytes anew: a later read writes the entry.
        except OSError as error:
            self._warn(here, error)

    def _write_file(self, number: int, entry: bytes) -> None:
        """Writes to another file and renames it, so that no reader sees a part of an entry."""
        os.makedirs(self._unfinished, exist_ok=True)
        unfinished, counted = os.path.join(self._unfinished, secrets.token_hex(8)), 0
        try:
            with open(unfinished, "xb") as file:
                _lock(file)  # While the writer lives: the kernel unlocks a dead process's files.
                if self._disk_bytes is not None:
                    file.truncate(len(entry))  # Who counts all files sees its length from now on.
                    if not self._count(len(entry)):
                        return
                    counted = len(entry)
                file.write(entry)
                file.flush()
                os.replace(unfinished, self._path(number))
        except OSError:
            if counted:
                self._count(-counted)
            raise
        finally:
            with contextlib.suppress(OSError):
                os.unlink(unfinished)

    def _count(self, change: int | None) -> bool:
        """Counts bytes on the disk, for all processes in a file: a change, or all anew (None).

        Returns:
          False if the bytes would be more than the bound. Then they are not counted.
        """
        assert self._disk_bytes is not None
        with open(os.open(os.path.join(self._folder, "bytes"), os.O_RDWR | os.O_CREAT, 0o666), "r+b", 0) as file:
            last = time.monotonic() + PATIENCE
            while True:
                try:
                    _lock(file)
                    break
                except BlockingIOError:
                    if time.monotonic() > last:
                        raise
                    time.sleep(1e-3)
            text = file.read(20) or b""
            used = self._measure() if change is None or not text.strip().isdigit() else int(text) + change
            if change and change > 0 and used > self._disk_bytes:
                return False
            file.seek(0)
            file.write(b"%20d" % max(used, 0))
            return True

    def _measure(self) -> int:
        """The bytes of all entries; one that is renamed meanwhile counts once or twice."""
        total = 0
        for folder in (self._unfinished, self._folder):
            with contextlib.suppress(FileNotFoundError), os.scandir(folder) as files:
                for file in files:
                    with contextlib.suppress(FileNotFoundError):
                        total += file.stat().st_size if file.is_file() and file.name != "bytes" else 0
        return total

    def _clean(self) -> None:
        """Removes what dead processes left unfinished, and counts the bytes anew."""
        with contextlib.suppress(OSError):
            for name in os.listdir(self._unfinished):
                left = os.path.join(self._unfinished, name)
                with contextlib.suppress(OSError), open(left, "r+b") as file:
                    _lock(file)  # Refused while its writer lives.
                    os.unlink(left)
        if self._disk_bytes is not None:
            with contextlib.suppress(OSError):
                self._count(None)

    def _warn(self, here: _Process, error: OSError) -> None:
        """Warns once in each process that the disk doesn't serve."""
        with here.lock:
            warned, here.warned = here.warned, True
        if not warned:
            warnings.warn(
                f"DataCache can't use {self._folder}: {error}. Samples that are not there come from the source in "
                "every epoch: free space on the disk, or name a directory that you may write to",
                RuntimeWarning,
                stacklevel=5,
            )


def _lock(file: IO[bytes]) -> None:
    """Locks a file until it is closed, or its process dies; BlockingIOError if it is locked."""
    import fcntl  # Windows has none.

    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _whole(name: str, number: int) -> int:
    """A number of bytes that an argument gives."""
    if isinstance(number, bool) or not hasattr(number, "__index__") or number < 0:
        raise ValueError(f"{name} is {number!r}; pass a whole number of bytes, 0 or more, such as 4 * 2**30")
    return operator.index(number)
