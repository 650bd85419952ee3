"""DataCache: equal samples from every tier, each read once from the source, whatever happens."""

import collections
import contextlib
import errno
import fcntl
import gc
import json
import os
import pathlib
import pickle
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import tracemalloc
import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jsparse.cli
from jsparse.data import DataCache
from jsparse.data import cache as cache_module
from jsparse.data.cache import OVERHEAD
from jsparse.data.entry import decode, encode, sound
from tiers import quick

ROOT = pathlib.Path(__file__).parent.parent
# A process that has jsparse.data without the rest of the library, and so without JAX.
PRELUDE = f"""
import os, pickle, random, signal, sys, threading, time, types
whole = types.ModuleType("jsparse")
whole.__path__ = [{str(ROOT / "jsparse")!r}]
sys.modules["jsparse"] = whole
from jsparse.data import DataCache
assert "jax" not in sys.modules
"""


class Counted:
    """A source that counts its reads, by index."""

    def __init__(self, samples):
        self.samples, self.reads = samples, collections.Counter()

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        assert type(index) is int
        self.reads[index] += 1
        return self.samples[index]


def numbered(count: int, elements: int = 10) -> Counted:
    return Counted([{"x": np.full(elements, i, np.float32), "y": i} for i in range(count)])


def assert_same(got, expected):
    """Asserts equal values of equal types."""
    assert type(got) is type(expected)
    if isinstance(expected, dict):
        assert list(got) == list(expected)
        got, expected = list(got.values()), list(expected.values())
    if isinstance(expected, (list, tuple)):
        assert len(got) == len(expected)
        for mine, other in zip(got, expected, strict=True):
            assert_same(mine, other)
    elif isinstance(expected, (np.ndarray, np.generic)):
        assert got.dtype == expected.dtype
        assert got.shape == expected.shape
        assert got.tobytes() == expected.tobytes()
    else:
        assert repr(got) == repr(expected)


def folder(directory) -> pathlib.Path:
    """The only key's folder."""
    (found,) = pathlib.Path(directory).iterdir()
    return found


def entries(directory) -> list[pathlib.Path]:
    return sorted(path for path in folder(directory).iterdir() if path.name.isdigit())


def unfinished(directory) -> list[pathlib.Path]:
    return list((folder(directory) / "unfinished").iterdir())


def counts(cache: DataCache) -> tuple[int, int, int]:
    """Samples from source, disk and memory."""
    return cache.stats.source.samples, cache.stats.disk.samples, cache.stats.memory.samples


# The contract.


def test_three_tiers(tmp_path):
    source, prepared = numbered(5), []

    def prepare(sample):
        prepared.append(sample["y"])
        return {"x": 2 * sample["x"], "y": sample["y"]}

    def make():
        return DataCache(source, tmp_path / "new" / "folder", key="k", prepare=prepare)

    for cache in (make(), make()):
        for _ in range(3):
            for i, sample in enumerate(cache):
                assert_same(sample, {"x": np.full(10, 2 * i, np.float32), "y": i})
        fresh = cache.stats.source.samples == 5
        assert counts(cache) == ((5, 0, 10) if fresh else (0, 5, 10))
        size = sum(path.stat().st_size for path in entries(tmp_path / "new" / "folder"))
        assert cache.stats.source.bytes + cache.stats.disk.bytes == size
        assert cache.stats.memory.bytes == 2 * size
        assert cache.stats.memory.seconds > 0
    assert source.reads == collections.Counter(range(5))
    assert prepared == list(range(5))
    assert not unfinished(tmp_path / "new" / "folder")


def test_indices(tmp_path):
    cache = DataCache(numbered(4), tmp_path, key="k")
    assert len(cache) == 4
    assert [cache[i]["y"] for i in (-1, -4, np.int64(2), np.uint8(3), True)] == [3, 0, 2, 3, 1]
    for index in (4, -5, 10**30):
        with pytest.raises(IndexError, match="this cache has 4 samples"):
            cache[index]
    for index in (1.0, "1", None):
        with pytest.raises(TypeError):
            cache[index]
    with pytest.raises(TypeError, match=r"\[cache\[i\] for i in range"):
        cache[1:2]
    empty = DataCache([], tmp_path / "empty", key="k")
    assert list(empty) == []
    with pytest.raises(IndexError):
        empty[0]


@pytest.mark.parametrize(("count", "size"), [(0, 1), (1, 3), (10, 1), (10, 3), (10, 10), (10, 11)])
def test_shares_are_the_source(tmp_path, count: int, size: int):
    source = numbered(count)
    shares = [DataCache(source, tmp_path, key="k", share=(rank, size)) for rank in range(size)]
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    assert sorted(sample["y"] for share in shares for sample in share) == list(range(count))
    # The entries are the source's, however it is shared.
    assert [sample["y"] for sample in DataCache(source, tmp_path, key="k")] == list(range(count))
    assert source.reads == collections.Counter(range(count))


def test_sources_and_keys_are_kept_apart(tmp_path):
    """Two sources in one directory, and one source prepared in two ways."""
    for _ in range(2):
        for key, source in (("a", [1, 2]), ("b", [3, 4]), ("a", [5, 6, 7]), ("A", [8, 9]), ("a/../b", [0])):
            assert list(DataCache(source, tmp_path, key=key)) == source
    assert len(list(tmp_path.iterdir())) == 5


def test_samples_may_be_changed(tmp_path):
    cache = DataCache(numbered(1), tmp_path, key="k")
    for _ in range(3):
        sample = cache[0]
        np.testing.assert_array_equal(sample["x"], 0)
        sample["x"] += 1
        sample.clear()


def test_what_the_source_raises_passes_through(tmp_path):
    class Flaky(Counted):
        broken = True

        def __getitem__(self, index):
            sample = super().__getitem__(index)
            if self.broken:
                raise TimeoutError("the store is away")
            return sample

    source = Flaky([7])
    cache = DataCache(source, tmp_path, key="k")
    for _ in range(2):
        with pytest.raises(TimeoutError, match="the store is away"):
            cache[0]
    assert counts(cache) == (0, 0, 0)
    source.broken = False
    assert cache[0] == cache[0] == 7
    assert counts(cache) == (1, 0, 1)


def test_an_index_error_of_the_source_does_not_end_the_samples(tmp_path):
    class Hole(Counted):
        def __getitem__(self, index):
            raise IndexError("a hole")

    with pytest.raises(IndexError, match="a hole"):
        list(DataCache(Hole([1, 2]), tmp_path, key="k"))


def good(**options):
    return {"source": [1, 2], "key": "k", **options}


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (good(source=iter([1])), TypeError, "source is a list_iterator without __len__"),
        (good(source={1, 2}), TypeError, "source is a set without __getitem__"),
        (good(key=""), ValueError, "key is ''; pass a text"),
        (good(key=3), ValueError, "key is 3; pass a text"),
        (good(prepare=3), TypeError, "prepare is 3; pass a function"),
        (good(memory_bytes=-1), ValueError, "memory_bytes is -1; pass a whole number of bytes"),
        (good(memory_bytes=1e9), ValueError, "memory_bytes is 1000000000.0; pass a whole number of bytes"),
        (good(memory_bytes=None), ValueError, "memory_bytes is None; pass"),
        (good(memory_bytes=True), ValueError, "memory_bytes is True; pass"),
        (good(disk_bytes=-1), ValueError, "disk_bytes is -1; pass a whole number of bytes"),
        (good(share=3), ValueError, r"share is 3; pass two whole numbers, \(rank, size\)"),
        (good(share=(0, 1, 2)), ValueError, "pass two whole numbers"),
        (good(share=(0.0, 1)), ValueError, "pass two whole numbers"),
        (good(share=(2, 2)), ValueError, r"share is \(2, 2\); pass \(rank, size\) with 0 <= rank < size"),
        (good(share=(0, 0)), ValueError, "with 0 <= rank < size"),
    ],
)
def test_wrong_arguments(tmp_path, options, error, message: str):
    with pytest.raises(error, match=message):
        DataCache(directory=tmp_path, **options)
    assert not list(tmp_path.iterdir())


def test_a_file_is_no_directory(tmp_path):
    path = tmp_path / "file"
    path.touch()
    with pytest.raises(ValueError, match="which is a file: name a directory"):
        DataCache([1], path, key="k")


# Samples.

DTYPES = ["?", "i1", "<u2", ">i4", "<i8", "<f2", "<f4", ">f8", "<c8", "<M8[ns]", "<U3", "S2", "bfloat16", "int4"]
DTYPES += [[("a", "<i4"), ("b", "<f8", (2,))]]
ARRAYS = st.builds(
    lambda dtype, shape, seed: (
        np.frombuffer(np.random.default_rng(seed).bytes(int(np.prod(shape)) * np.dtype(dtype).itemsize), np.uint8)
        .view(np.dtype(dtype))
        .reshape(shape)
        if dtype != "<U3"
        else np.full(shape, "äb")
    ),
    st.sampled_from(DTYPES),
    st.lists(st.integers(0, 3), max_size=3).map(tuple),
    st.integers(0, 9),
)
LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters(codec=None))
    | st.binary()
    | ARRAYS
    | ARRAYS.filter(lambda x: x.size).map(lambda x: x.reshape(-1)[0])
)
KEYS = st.integers() | st.text(max_size=3) | st.tuples(st.integers(), st.booleans())
SAMPLES = st.recursive(
    LEAVES,
    lambda children: (
        st.lists(children, max_size=3)
        | st.lists(children, max_size=3).map(tuple)
        | st.dictionaries(KEYS, children, max_size=3)
    ),
    max_leaves=6,
)


@settings(max_examples=60, deadline=None)
@given(SAMPLES)
def test_any_sample(sample):
    entry = encode(sample, b"salt")
    assert sound(entry, b"salt")
    assert not sound(entry, b"sale")
    assert_same(decode(entry), sample)


def test_layouts(tmp_path):
    """Arrays that are not contiguous, or files in memory."""
    mapped = np.lib.format.open_memmap(tmp_path / "x.npy", "w+", np.int16, (3, 4))
    mapped[:] = np.arange(12).reshape(3, 4)
    samples = [np.arange(12.0).reshape(3, 4).T, np.arange(12)[::-2], np.broadcast_to(np.float32(1), (3, 2)), mapped]
    cache = DataCache(samples, tmp_path / "cache", key="k")
    for _ in range(2):
        for sample, expected in zip(cache, samples, strict=True):
            assert_same(sample, np.array(expected))


@pytest.mark.parametrize(
    "sample",
    [{1}, object(), 1j, np.array([None]), np.ma.masked_array([1], [True]), collections.Counter(), [{"x": {2}}]],
    ids=lambda sample: type(sample).__name__,
)
def test_samples_that_cannot_be_cached(tmp_path, sample):
    cache = DataCache([sample], tmp_path, key="k")
    for _ in range(2):
        with pytest.raises(TypeError, match=r"which can't be cached.*let prepare return such a sample"):
            cache[0]
    assert not list(tmp_path.iterdir())


# Memory.


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_what_comes_first_stays(data):
    """Every read comes from the tier that a model of the cache names."""
    sizes = data.draw(st.lists(st.integers(0, 3000), min_size=1, max_size=8), "sizes")
    samples = [bytes([i]) * size for i, size in enumerate(sizes)]
    bound = data.draw(st.integers(0, 12_000), "memory_bytes")
    kept: dict[int, int] = {}
    seen = set()
    with tempfile.TemporaryDirectory() as directory:
        cache = DataCache(samples, directory, key="k", memory_bytes=bound)
        for i in data.draw(st.lists(st.integers(0, len(sizes) - 1), max_size=40), "reads"):
            before = cache.stats
            assert cache[i] == samples[i]
            tier = "memory" if i in kept else "disk" if i in seen else "source"
            for name in ("source", "disk", "memory"):
                assert getattr(cache.stats, name).samples == getattr(before, name).samples + (name == tier)
            seen.add(i)
            size = sys.getsizeof((pathlib.Path(folder(directory)) / str(i)).read_bytes()) + OVERHEAD
            if i not in kept and sum(kept.values()) + size <= bound:
                kept[i] = size


def test_half_the_memory_serves_half_of_each_epoch(tmp_path):
    cache = DataCache([bytes(1000)] * 10, tmp_path, key="k", memory_bytes=5 * (1000 + 200 + OVERHEAD))
    for epoch in range(3):
        for i in np.random.default_rng(epoch).permutation(10):
            cache[i]
        assert counts(cache) == (10, 5 * epoch, 5 * epoch)


def test_an_entry_that_two_threads_keep_counts_once(tmp_path):
    cache = DataCache([b""], tmp_path, key="k")
    here = cache._here()
    for _ in range(2):
        cache._keep(here, 0, b"entry")
    assert here.bytes == sys.getsizeof(b"entry") + OVERHEAD


@pytest.mark.parametrize("elements", quick([0, 100_000], 100_000))
def test_memory_is_bounded(tmp_path, elements: int):
    """Measured, for tiny samples and for large ones."""
    count, bound = (2500, 150_000) if not elements else (60, 3_000_000)
    cache = DataCache([bytes(elements)] * count, tmp_path, key="k", memory_bytes=bound)
    for _ in cache:
        break
    tracemalloc.start()
    try:
        for _ in cache:
            pass
        gc.collect()
        grown = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert bound / 2 < grown < bound * 1.02
    assert cache[0] == bytes(elements)
    assert cache.stats.memory.samples == 2


# The disk.


def entry_bytes(directory) -> int:
    return sum(path.stat().st_size for path in entries(directory))


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 3000), min_size=1, max_size=12), st.integers(0, 9000), st.randoms())
def test_the_disk_is_bounded(sizes, bound: int, shuffled):
    source = Counted([bytes(size) for size in sizes])
    with tempfile.TemporaryDirectory() as directory:
        for _ in range(2):  # The second cache finds what the first one wrote.
            cache = DataCache(source, directory, key="k", memory_bytes=0, disk_bytes=bound)
            reads = list(range(len(sizes))) * 2
            shuffled.shuffle(reads)
            for i in reads:
                written = {int(path.name) for path in entries(directory)} if list(os.scandir(directory)) else set()
                before = source.reads[i]
                assert cache[i] == source.samples[i]
                assert source.reads[i] == before + (i not in written)
                assert entry_bytes(directory) <= bound
        # Whatever would still fit is there.
        used = entry_bytes(directory)
        for i, sample in enumerate(source.samples):
            assert (folder(directory) / str(i)).exists() or used + len(encode(sample, b"")) > bound


def test_the_disk_is_counted_anew(tmp_path):
    """A count that is lost, damaged, or of entries that are gone; and what was not written."""
    make = lambda: DataCache([bytes(100)] * 20, tmp_path, key="k", memory_bytes=0, disk_bytes=1000)  # noqa: E731
    list(make())
    written = len(entries(tmp_path))
    assert 5 < written < 9
    for spoil in (lambda path: path.unlink(), lambda path: path.write_bytes(b"?" * 20), lambda path: None):
        spoil(folder(tmp_path) / "bytes")
        entries(tmp_path)[0].unlink()
        list(make())
        assert len(entries(tmp_path)) == written
        assert entry_bytes(tmp_path) <= 1000
    cache = make()
    entries(tmp_path)[0].write_bytes(bytes(2000))
    list(cache)
    list(make())  # What replaces it has room.
    assert len(entries(tmp_path)) == written
    assert entry_bytes(tmp_path) <= 1000
    entries(tmp_path)[0].unlink()
    cache = make()
    with limited(50), pytest.warns(RuntimeWarning, match="File too large"):
        list(cache)
    list(cache)
    assert len(entries(tmp_path)) == written


def test_what_was_not_written_is_not_counted(tmp_path, monkeypatch):
    cache = DataCache([bytes(100)] * 2, tmp_path, key="k", memory_bytes=0, disk_bytes=150)

    def full(*paths):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        with pytest.warns(RuntimeWarning, match="No space left"):
            cache[0]
    assert int((folder(tmp_path) / "bytes").read_bytes()) == 0
    cache[1]
    assert len(entries(tmp_path)) == 1


@contextlib.contextmanager
def limited(length: int):
    """As on a full disk: what writes beyond this length of a file fails, after a part of it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (length, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk(tmp_path):
    source = numbered(3, 1000)
    cache = DataCache(source, tmp_path, key="k", memory_bytes=0)
    with limited(2000), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            assert [cache[i]["y"] for i in range(3)] == [0, 1, 2]
    assert [str(warning.message) for warning in caught] == [
        f"DataCache can't use {folder(tmp_path)}: [Errno 27] File too large. Samples that are not there come from the "
        "source in every epoch: free space on the disk, or name a directory that you may write to"
    ]
    assert caught[0].filename == __file__
    assert not entries(tmp_path)
    assert not unfinished(tmp_path)
    for _ in range(2):  # There is room again.
        assert [sample["y"] for sample in cache] == [0, 1, 2]
    assert counts(cache) == (9, 3, 0)


def test_a_disk_that_cannot_be_written(tmp_path):
    (tmp_path / "file").touch()
    source = numbered(3)
    cache = DataCache(source, tmp_path / "file" / "folder", key="k", disk_bytes=10**6)
    with pytest.warns(RuntimeWarning, match="can't use") as caught:
        assert [cache[i]["y"] for i in (0, 1, 2, 0, 1, 2)] == [0, 1, 2, 0, 1, 2]
    assert len(caught) == 1
    assert counts(cache) == (3, 0, 3)


def test_a_directory_that_is_removed(tmp_path):
    source = numbered(2)
    cache = DataCache(source, tmp_path / "cache", key="k", memory_bytes=0, disk_bytes=10**6)
    for _ in range(3):
        assert [sample["y"] for sample in cache] == [0, 1]
        assert [sample["y"] for sample in cache] == [0, 1]
        shutil.rmtree(tmp_path / "cache")
    assert counts(cache) == (6, 6, 0)


def test_a_directory_that_is_removed_during_a_write(tmp_path, monkeypatch):
    cache, removed, make = DataCache([5], tmp_path / "cache", key="k"), [], os.makedirs

    def removing(path, **options):
        make(path, **options)
        if not removed:
            removed.append(shutil.rmtree(tmp_path / "cache"))

    monkeypatch.setattr(os, "makedirs", removing)
    assert cache[0] == 5
    assert removed
    assert len(entries(tmp_path / "cache")) == 1


# Damage.


@pytest.mark.parametrize("how", ["flip", "bit", "cut", "longer", "zeros"])
def test_damage_at_every_byte(tmp_path, how: str):
    source = Counted([{"x": np.arange(3, dtype=np.int16), "b": b"bytes", "s": "text"}])
    cache = DataCache(source, tmp_path, key="k", memory_bytes=0)
    cache[0]
    (path,) = entries(tmp_path)
    entry = path.read_bytes()
    for at in range(len(entry)):
        if how == "cut":  # The first is empty.
            damaged = entry[:at]
        elif how == "longer":
            damaged = entry + bytes(at + 1)
        elif how == "zeros":
            damaged = entry[:at].ljust(len(entry), b"\0")
        else:
            damaged = entry[:at] + bytes([entry[at] ^ (255 if how == "flip" else 1 << at % 8)]) + entry[at + 1 :]
        if damaged == entry:
            continue
        path.write_bytes(damaged)
        path.chmod(0o400)
        before = cache.stats
        assert_same(cache[0], source.samples[0])
        assert cache.stats.damaged == before.damaged + 1
        assert cache.stats.source.samples == before.source.samples + 1
        assert path.read_bytes() == entry
        path.chmod(0o600)
    assert cache.stats.damaged > len(entry) * 0.9


def test_entries_that_belong_elsewhere(tmp_path):
    """An entry under another index's or another key's name is sound, but not this sample."""
    source = numbered(2)
    list(DataCache(source, tmp_path / "a", key="a"))
    list(DataCache([5, 6], tmp_path / "b", key="b"))
    shutil.copy(folder(tmp_path / "a") / "0", folder(tmp_path / "a") / "1")
    shutil.copy(folder(tmp_path / "b") / "0", folder(tmp_path / "a") / "0")
    cache = DataCache(source, tmp_path / "a", key="a")
    assert [sample["y"] for sample in cache] == [0, 1]
    assert cache.stats.damaged == 2


def test_a_stopped_process_stops_no_other(tmp_path, monkeypatch):
    """One that holds the count: the others go on, without a warning, and write later."""
    monkeypatch.setattr(cache_module, "PATIENCE", 0.05)
    cache = DataCache([5, 6], tmp_path, key="k", memory_bytes=0, disk_bytes=1000)
    cache[0]
    with open(folder(tmp_path) / "bytes", "rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert cache[1] == 6
        assert DataCache([5, 6], tmp_path, key="k", disk_bytes=1000)[0] == 5
    assert len(entries(tmp_path)) == 1
    assert cache[1] == 6
    assert len(entries(tmp_path)) == 2
    assert not unfinished(tmp_path)


def test_an_entry_that_cannot_be_read(tmp_path):
    cache = DataCache([5], tmp_path, key="k")
    (tmp_path / cache._folder / "0").mkdir(parents=True)
    with pytest.warns(RuntimeWarning, match="Is a directory"):
        assert cache[0] == 5


# Threads and processes.


def test_threads(tmp_path):
    """They get the right samples, and the source is read once for each."""

    class Slow(Counted):
        def __getitem__(self, index):
            time.sleep(0.002)
            return super().__getitem__(index)

    source = Slow([bytes([i]) * 100 * i for i in range(30)])
    cache = DataCache(source, tmp_path, key="k", memory_bytes=30_000)
    wrong = []

    def work(seed):
        draw = random.Random(seed)
        for i in draw.choices(range(30), k=150):
            if cache[i] != source.samples[i]:
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert set(source.reads.values()) == {1}
    assert sum(counts(cache)) == 8 * 150
    here = cache._here()
    assert here.bytes == sum(sys.getsizeof(entry) + OVERHEAD for entry in here.entries.values()) <= 30_000
    assert not here.reading


def child(code: str, *arguments) -> subprocess.Popen:
    command = [sys.executable, "-c", PRELUDE + code, *map(str, arguments)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def finish(process: subprocess.Popen, sent: bytes = b"") -> bytes:
    out, err = process.communicate(sent, timeout=120)
    assert not process.returncode, err.decode()
    return out


def test_pickled_to_another_process(tmp_path):
    """The other process finds the entries, and begins with its own memory and counters."""
    cache = DataCache([b"a", b"b", b"c"], tmp_path, key="k", share=(1, 2), disk_bytes=10**6)
    assert cache[0] == cache[0] == b"b"
    code = """
cache = pickle.load(sys.stdin.buffer)
assert [cache[0], cache[-1]] == [b"b", b"b"]
assert (len(cache), repr(cache)) == (1, "DataCache(key='k', share=(1, 2), samples=1)")
stats = cache.stats
assert (stats.source.samples, stats.disk.samples, stats.memory.samples) == (0, 1, 1)
"""
    finish(child(code), pickle.dumps(cache))


def test_after_a_fork(tmp_path):
    """A child that is forked while a thread holds the locks doesn't wait for it."""
    code = """
cache = DataCache([b"a", b"b"], sys.argv[1], key="k")
cache[0]
cache._here().lock.acquire()
pid = os.fork()
if not pid:
    signal.alarm(20)
    ok = [cache[0], cache[1]] == [b"a", b"b"] and cache.stats.disk.samples == 1
    os._exit(0 if ok else 1)
assert os.waitpid(pid, 0)[1] == 0
"""
    finish(child(code, tmp_path))


def test_processes_share_a_directory(tmp_path):
    """Each of them reads everything at the same time, within one bound on the disk."""
    code = """
samples = [bytes([i]) * 500 for i in range(60)]
cache = DataCache(samples, sys.argv[1], key="k", memory_bytes=0, disk_bytes=20_000)
order = list(range(60))
random.Random(sys.argv[2]).shuffle(order)
sys.stdin.read()
assert all(cache[i] == samples[i] for i in order)
print(cache.stats.damaged)
"""
    workers = [child(code, tmp_path, rank) for rank in range(3)]
    for worker in workers:
        worker.stdin.close()
        worker.stdin = None
    assert [finish(worker) for worker in workers] == [b"0\n"] * 3
    assert entry_bytes(tmp_path) <= 20_000
    assert 25 < len(entries(tmp_path)) < 40
    assert entry_bytes(tmp_path) <= min(20_000, int((folder(tmp_path) / "bytes").read_bytes()))
    assert not unfinished(tmp_path)


def test_only_what_dead_processes_left_is_removed(tmp_path):
    """Killed between the last byte and the name."""
    code = """
def stop(*paths):
    print("written", flush=True)
    time.sleep(600)
os.replace = stop
DataCache([bytes(1000)], sys.argv[1], key="k", disk_bytes=1100)[0]
"""
    writer = child(code, tmp_path)
    try:
        assert writer.stdout.readline() == b"written\n"
        make = lambda: DataCache([bytes(1000)], tmp_path, key="k", memory_bytes=0, disk_bytes=1100)  # noqa: E731
        cache = make()
        assert len(unfinished(tmp_path)) == 1
        # What the living one is writing is counted.
        assert cache[0] == bytes(1000)
        assert not entries(tmp_path)
    finally:
        writer.kill()
        writer.communicate()
    assert len(unfinished(tmp_path)) == 1
    cache = make()
    assert not unfinished(tmp_path)
    assert cache[0] == cache[0] == bytes(1000)
    assert counts(cache) == (1, 1, 0)


@pytest.mark.parametrize("seconds", [1.2, pytest.param(30.0, marks=pytest.mark.full)])
def test_processes_that_are_killed(tmp_path, seconds: float):
    """Processes read and remove entries at random, and are killed at random moments."""
    code = """
draw = random.Random(sys.argv[2])
lengths = [0, 1, 10_000, 300_000, 2_000_000]
samples = [{"i": i, "x": bytes([i]) * lengths[i % 5]} for i in range(40)]
cache = DataCache(samples, sys.argv[1], key="k", memory_bytes=draw.choice([0, 10**6]), disk_bytes=15_000_000)
print("ready", flush=True)
while True:
    i = draw.randrange(40)
    assert cache[i] == samples[i], i
    if draw.random() < 0.3:
        try:
            os.unlink(cache._path(draw.randrange(40)))
        except OSError:
            pass
"""
    draw = random.Random(seconds)
    workers, left, killed = [child(code, tmp_path, rank) for rank in range(3)], 0, 0
    end = time.monotonic() + seconds
    try:
        while killed < 3 or time.monotonic() < end:
            chosen = draw.randrange(3)
            worker = workers[chosen]
            assert worker.stdout.readline() == b"ready\n"
            time.sleep(draw.uniform(0, 0.15))
            worker.send_signal(signal.SIGKILL)
            _, err = worker.communicate()
            assert worker.returncode == -signal.SIGKILL, err.decode()
            killed += 1
            left = max(left, len(unfinished(tmp_path)))
            workers[chosen] = child(code, tmp_path, draw.random())
    finally:
        for worker in workers:
            worker.kill()
            worker.communicate()
    assert seconds < 10 or left
    samples = [bytes([i]) * [0, 1, 10_000, 300_000, 2_000_000][i % 5] for i in range(40)]
    cache = DataCache([{"i": i, "x": x} for i, x in enumerate(samples)], tmp_path, key="k", disk_bytes=15_000_000)
    assert not unfinished(tmp_path)
    assert entry_bytes(tmp_path) <= 15_000_000
    found = len(entries(tmp_path))
    assert [sample["x"] for sample in cache] == samples
    assert cache.stats.damaged == 0
    assert cache.stats.disk.samples == found


@pytest.mark.full
def test_many_entries(tmp_path):
    """100,000 of them in a directory: each is read once, and another cache opens it quickly."""
    source = Counted(range(100_000))
    cache = DataCache(source, tmp_path, key="k", memory_bytes=0, disk_bytes=10**9)
    assert list(cache) == list(range(100_000))
    begin = time.monotonic()
    cache = DataCache(source, tmp_path, key="k", memory_bytes=0, disk_bytes=10**9)
    assert time.monotonic() - begin < 20
    assert all(cache[i] == i for i in range(0, 100_000, 97))
    assert set(source.reads.values()) == {1}
    assert int((folder(tmp_path) / "bytes").read_bytes()) == entry_bytes(tmp_path)


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.full)])
def test_as_a_source_of_grain(tmp_path, workers: int):
    grain = pytest.importorskip("grain.python")
    pytest.importorskip("absl.flags").FLAGS(["test"])
    cache = DataCache([{"x": np.full(3, i)} for i in range(8)], tmp_path, key="k")
    assert isinstance(cache, grain.RandomAccessDataSource)
    sampler = grain.IndexSampler(8, grain.NoSharding(), shuffle=True, num_epochs=2, seed=0)
    loader = grain.DataLoader(data_source=cache, sampler=sampler, worker_count=workers)
    assert sorted(int(sample["x"][0]) for sample in loader) == sorted([*range(8)] * 2)
    assert len(entries(tmp_path)) == 8
    assert [int(sample["x"][0]) for sample in grain.MapDataset.source(cache)] == list(range(8))
    assert counts(cache) == ((0, 8, 0) if workers else (8, 0, 16))


# The benchmark.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--latency", "nan"], "argument --latency: it is nan; give a finite number, at least 0"),
        (["--latency", "inf"], "argument --latency: it is inf"),
        (["--latency", "1e300"], "--latency is 1e+300 and --rate 1; so a sample takes 1e+297 s"),
        (["--rate", "0"], "argument --rate: it is 0; give a finite number, above 0"),
        (["--size", "1e15"], "argument --size: it is 1e15; give a whole number, from 0 to 2147483647"),
        (["--size", "2e9", "--samples", "1e6"], "--samples is 1,000,000 and --size 2,000,000,000: that takes"),
        (["--directory", "/proc"], "--directory is /proc, and no directory can be made there"),
        (["--directory", "/no/such"], "name a directory that you may write to"),
        (["--epochs", "0"], "argument --epochs: it is 0"),
    ],
)
def test_wrong_options_of_the_benchmark(options: list[str], message: str, capsys):
    with pytest.raises(SystemExit):
        jsparse.cli.main(["bench", "data", *options])
    assert message in capsys.readouterr().err


def test_the_benchmark(tmp_path, capsys):
    jsparse.cli.main(["bench", "data", "--samples", "10", "--latency", "10", "--repeats", "2", "--json", "-"])
    figures = json.loads(capsys.readouterr().out)
    forms = {form["name"]: form for form in figures["forms"]}
    assert [epoch["from"] for epoch in forms["cache"]["epochs"]] == ["source", "memory", "memory"]
    assert [epoch["from"] for epoch in forms["no cache"]["epochs"]] == ["source"] * 3
    for form in forms.values():
        for epoch in form["epochs"]:
            slow = epoch["from"] == "source"
            assert (epoch["median_ms"] >= 100) == slow
            assert (epoch["times_faster"] > 2) == (not slow)
    assert all(epoch["times_faster"] > 10 for epoch in forms["cache"]["epochs"][1:])
