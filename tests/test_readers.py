"""The examples' readers: small files, damaged files, and the real ones where they are there."""

import collections
import functools
import gzip
import io
import json
import math
import os
import pathlib
import pickle
import wave

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from examples import train
from examples.data import masked_pairs, read_an4, read_atis, read_libsvm, read_ptb, read_wikitext2, windows
from examples.data.an4 import LABELS, cepstra, spectrogram
from jsparse.bench.images import load_images

DATA = pathlib.Path(os.environ.get("JSPARSE_DATA", "/nowhere"))
RNG = np.random.default_rng(0)


def real(name: str):
    """Marks a test that needs a real data set."""
    return pytest.mark.skipif(not (DATA / name).is_dir(), reason=f"JSPARSE_DATA names no directory with {name}/ in it")


def put(directory: pathlib.Path, files: dict[str, bytes]) -> pathlib.Path:
    for name, content in files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return directory


PTB = {
    "ptb.train.txt": b" a b a \n c \n",
    "ptb.valid.txt": b"c\n",
    "ptb.test.txt": b"b a",
}


def test_ptb(tmp_path):
    text = read_ptb(put(tmp_path, PTB))
    assert text.words == ["a", "<eos>", "b", "c"]
    assert text.train.tolist() == [0, 2, 0, 1, 3, 1]
    assert (text.valid.tolist(), text.test.tolist()) == ([3, 1], [2, 0, 1])
    assert text.train.dtype == np.int32


@pytest.mark.parametrize("names", ["wiki.{}.tokens", "{}.txt"])
def test_wikitext2(names: str, tmp_path):
    contents = " \n = é = \n \n".encode(), b" \n", " é\n".encode()
    files = dict(zip(map(names.format, ("train", "valid", "test")), contents, strict=True))
    text = read_wikitext2(put(tmp_path, files))
    assert [text.words[i] for i in text.train] == ["<eos>", "=", "é", "=", "<eos>", "<eos>"]
    assert [text.words[i] for i in text.test] == ["é", "<eos>"]


def test_windows():
    x, y = windows(np.arange(8), 3)
    assert (x.tolist(), y.tolist()) == ([[0, 1, 2], [3, 4, 5]], [[1, 2, 3], [4, 5, 6]])
    assert [part.shape for part in windows(np.arange(6), 3)] == [(1, 3), (1, 3)]


def test_masked_pairs():
    text = np.arange(8000, dtype=np.int32)
    x, segments, masked, follows = masked_pairs(text, 8000, 4, seed=0)
    assert x.shape == segments.shape == masked.shape == (1000, 11)
    assert segments[5].tolist() == [0] * 6 + [1] * 5
    assert (x[:, [0, 5, 10]] == [8000, 8001, 8001]).all()
    assert (masked[:, [0, 5, 10]] == -1).all()
    predicted = masked >= 0
    assert predicted.sum() == pytest.approx(0.15 * 8000, rel=0.1)
    whole = np.where(predicted, masked, x)
    np.testing.assert_array_equal(whole[:, 1:5], text.reshape(-1, 4)[::2])
    np.testing.assert_array_equal(whole[:, 6] == whole[:, 4] + 1, follows == 1)
    np.testing.assert_array_equal(whole[:, 6:10], whole[:, 6:7] + np.arange(4)[None])
    assert follows.mean() == pytest.approx(0.5, abs=0.06)
    assert (x[predicted] == 8002).mean() == pytest.approx(0.8, abs=0.05)
    assert (x == masked)[predicted].mean() == pytest.approx(0.1, abs=0.04)


ATIS = {
    "atis.train.w-intent.iob": b"BOS to rome EOS\tO O B-to flight\nBOS what EOS\t O O meal\n",
    "atis.test.w-intent.iob": b"BOS from rome EOS\tO O B-from flight#meal\n",
}


def test_atis(tmp_path):
    atis = read_atis(put(tmp_path, ATIS))
    assert atis.words == ["<unk>", "rome", "to", "what"]
    assert atis.slots == ["B-from", "B-to", "O"]
    assert atis.intents == ["flight", "flight#meal", "meal"]
    assert [part.tolist() for part in atis.train] == [[[2, 1], [3, 0]], [2, 1], [[2, 1], [2, 0]], [0, 2]]
    assert [part.tolist() for part in atis.test] == [[[0, 1]], [2], [[2, 0]], [1]]
    assert {part.dtype for part in atis.train} == {np.dtype(np.int32)}


def mfc(frames: int) -> bytes:
    return (13 * frames).to_bytes(4, "big") + RNG.standard_normal(13 * frames).astype(">f4").tobytes()


def wav(samples: np.ndarray, rate: int = 16000) -> bytes:
    content = io.BytesIO()
    with wave.open(content, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(samples.astype("<i2").tobytes())
    return content.getvalue()


AN4 = {
    "etc/an4_train.fileids": b"train/a/one\ntrain/b/two\n",
    "etc/an4_train.transcription": b"GO (one)\n<s> IT'S A </s> (two)\n",
    "etc/an4_test.fileids": b"test/three\n",
    "etc/an4_test.transcription": b"Z (three)\n",
    "feat/train/a/one.mfc": mfc(5),
    "feat/train/b/two.mfc": mfc(9),
    "feat/test/three.mfc": mfc(4),
    "wav/train/a/one.wav": wav(RNG.integers(-9999, 9999, 800)),
    "wav/train/b/two.wav": wav(RNG.integers(-9999, 9999, 320)),
    "wav/test/three.wav": wav(RNG.integers(-9999, 9999, 500)),
}


def test_an4(tmp_path):
    put(tmp_path, AN4)
    train, test = read_an4(tmp_path, "mfcc")
    assert (train.frames.shape, train.lengths.tolist()) == ((2, 9, 13), [5, 9])
    assert (test.frames.shape, test.lengths.tolist()) == ((1, 4, 13), [4])
    spoken = ["".join(LABELS[i] for i in row[:count]) for row, count in zip(train.labels, train.counts, strict=True)]
    assert spoken == ["GO", "IT'S A"]
    assert (test.labels.tolist(), test.counts.tolist()) == ([[LABELS.index("Z")]], [1])
    assert not train.frames[0, 5:].any()
    train, test = read_an4(tmp_path, "spectrogram")
    assert (train.frames.shape, train.lengths.tolist()) == ((2, 4, 161), [4, 1])
    assert test.lengths.tolist() == [2]
    assert {part.dtype.name for part in train} == {"float32", "int32"}


cepstral = functools.partial(read_an4, features="mfcc")
spectral = functools.partial(read_an4, features="spectrogram")


def test_labels_are_29():
    assert len(set(LABELS)) == len(LABELS) == 29


def test_cepstra(tmp_path):
    put(tmp_path, AN4)
    path = tmp_path / "feat/train/a/one.mfc"
    raw = np.fromfile(path, ">f4")[1:].reshape(5, 13)
    found = cepstra(path)
    np.testing.assert_allclose(found, (raw - raw.mean(0)) / raw.std(0), atol=1e-5)


def test_spectrogram(tmp_path):
    """A tone of 2,000 Hz is in the bin of 2,000 Hz, 50 Hz a bin; silence is 0."""
    tone = 20000 * np.sin(2 * np.pi * 2000 / 16000 * np.arange(1600))
    put(tmp_path, {"tone.wav": wav(tone), "silence.wav": wav(np.zeros(320))})
    found = spectrogram(tmp_path / "tone.wav")
    assert found.shape == (9, 161)
    assert (found.argmax(1) == 40).all()
    assert found.mean() == pytest.approx(0, abs=1e-5)
    assert found.std() == pytest.approx(1, abs=1e-5)
    largest = np.log1p(20000 / 2**15 * np.hamming(320).sum() / 2)
    whole = np.log1p(np.abs(np.fft.rfft(tone[:320].astype(np.int16) / 2**15 * np.hamming(320))))
    assert whole[40] == pytest.approx(largest, rel=1e-3)
    np.testing.assert_allclose(np.corrcoef(found[0], whole)[0, 1], 1, atol=1e-6)
    assert not spectrogram(tmp_path / "silence.wav").any()


@pytest.mark.parametrize(
    ("read", "files", "change", "message"),
    [
        (read_ptb, PTB, {"ptb.valid.txt": None}, r"ptb\.valid\.txt: can't be read \(No such file .*imikolov"),
        (read_ptb, PTB, {"ptb.train.txt": b""}, r"ptb\.train\.txt: is empty; fetch the file from"),
        (read_ptb, PTB, {"ptb.train.txt": b"a\nb\xff\n"}, r"ptb\.train\.txt, line 2: byte 1 is not UTF-8"),
        (read_ptb, PTB, {"ptb.test.txt": b"a\na z\n"}, r"ptb\.test\.txt, line 2: the word 'z' is not in ptb\.train"),
        (read_wikitext2, {}, {}, r"wiki\.train\.tokens: can't be read .*Salesforce/wikitext"),
        (read_atis, ATIS, {"atis.test.w-intent.iob": None}, r"atis\.test\..*can't be read .*JointSLU"),
        (read_atis, ATIS, {"atis.test.w-intent.iob": b"BOS a EOS O O x\n"}, r"iob, line 1: there is no tab"),
        (read_atis, ATIS, {"atis.test.w-intent.iob": b"a EOS\tO O x\n"}, r"iob, line 1: the words are not BOS"),
        (
            read_atis,
            ATIS,
            {"atis.train.w-intent.iob": ATIS["atis.test.w-intent.iob"] + b"BOS a EOS\tO x\n"},
            r"iob, line 2: 3 words need 2 slots and an intent; there are 2 in all",
        ),
        (cepstral, AN4, {"feat/train/b/two.mfc": None}, r"two\.mfc: can't be read .*speech\.cs\.cmu\.edu"),
        (cepstral, AN4, {"feat/train/b/two.mfc": mfc(3)[:-4]}, r"two\.mfc: 156 bytes begin with the number 39"),
        (cepstral, AN4, {"feat/train/b/two.mfc": b"\xff" * 4}, r"two\.mfc: 4 bytes begin with the number -1"),
        (cepstral, AN4, {"feat/train/b/two.mfc": mfc(2)[:-4] + b"\xff" * 4}, r"two\.mfc: frame 1 is not finite"),
        (cepstral, AN4, {"etc/an4_test.fileids": b"a\nb\n"}, r"test\.transcription: has 1 lines for 2 fileids"),
        (cepstral, AN4, {"etc/an4_test.transcription": b"Z (four)\n"}, r"transcription, line 1: .*test/three"),
        (cepstral, AN4, {"etc/an4_test.transcription": b"Z9 (three)\n"}, r"transcription, line 1: .*other characters"),
        (spectral, AN4, {"wav/test/three.wav": b"<html>"}, r"three\.wav: is not a wav file"),
        (spectral, AN4, {"wav/test/three.wav": b""}, r"three\.wav: is not a wav file \(it ends too early"),
        (spectral, AN4, {"wav/test/three.wav": wav(np.zeros(400), 8000)}, r"three\.wav: has 8000 Hz, 16 bits"),
        (spectral, AN4, {"wav/test/three.wav": wav(np.zeros(319))}, r"319 samples of 319, and at least 320"),
        (spectral, AN4, {"wav/test/three.wav": wav(np.zeros(400))[:-2]}, r"has 399 samples of 400"),
        (spectral, AN4, {"wav/test/three.wav": None}, r"three\.wav: can't be read"),
    ],
)
def test_damaged_files(read, files: dict, change: dict, message: str, tmp_path):
    put(tmp_path, {name: content for name, content in (files | change).items() if content is not None})
    with pytest.raises(ValueError, match=message) as caught:
        read(tmp_path)
    assert "http" in str(caught.value)


def test_libsvm(tmp_path):
    content = b"# a comment\r\n+1 qid:3 1:0.5 4:-2e1 # another\r\n\n-1\n 2.5 2:1"
    path = put(tmp_path, {"x": content}) / "x"
    rows = read_libsvm(path)
    assert rows.labels.tolist() == [1, -1, 2.5]
    assert rows.indptr.tolist() == [0, 2, 2, 3]
    assert rows.indices.tolist() == [0, 3, 1]
    assert rows.values.tolist() == [0.5, -20, 1]
    assert [part.dtype.name for part in rows] == ["int64", "int32", "float32", "float32"]


@pytest.mark.parametrize(
    ("line", "what"),
    [
        (b"1 0:2", "Invalid index 0"),
        (b"1 2:1 2:1", "sorted and unique"),
        (b"1 3", "to unpack"),
        (b"x 1:1", "could not convert"),
        (b"1 1:nan", "not finite"),
        (b"1 1:1e39", "not finite"),
        (b"inf 1:1", "not finite"),
        (b"1 99999999999:1", "too large"),
        (b"1 1:1\r1 1:1", "to unpack"),
        (b"\xff", "could not convert"),
    ],
)
def test_damaged_libsvm_files(line: bytes, what: str, tmp_path):
    path = put(tmp_path, {"x": b"1 1:1\n\n# 2\n" + line + b"\n1 1:1\n"}) / "x"
    message = rf"x, line 4: .*({what}).*; fetch the file from https.*libsvmtools"
    with pytest.raises(ValueError, match=message):
        read_libsvm(path)
    with pytest.raises(ValueError, match=message):
        joined(path, 3)


def test_parts_of_libsvm_files_that_are_not_there(tmp_path):
    with pytest.raises(ValueError, match=r"none: can't be read \(No such file.*libsvmtools"):
        read_libsvm(tmp_path / "none")
    for part, parts in ((2, 2), (-1, 2), (0, 0)):
        with pytest.raises(ValueError, match=f"part is {part} of {parts}"):
            read_libsvm(tmp_path / "none", part, parts)


def joined(path: pathlib.Path, parts: int) -> list[list[float]]:
    """The rows of all parts, one after the other: label, columns and values."""
    found = []
    for part in range(parts):
        indptr, indices, values, labels = read_libsvm(path, part, parts)
        assert len(indptr) == len(labels) + 1
        for i, label in enumerate(labels.tolist()):
            own = slice(indptr[i], indptr[i + 1])
            found.append([label, *indices[own].tolist(), *values[own].tolist()])
    return found


ROW = st.builds(
    lambda label, qid, columns, comment: b" ".join(
        [b"%d" % label, *qid, *(b"%d:%d" % (column, column % 7) for column in sorted(columns)), *comment]
    ),
    st.integers(-9, 99),
    st.sampled_from([[], [b"qid:3"]]),
    st.sets(st.integers(1, 99), max_size=5),
    st.sampled_from([[], [b"# 1 1:1"]]),
)
LINE = ROW | st.sampled_from([b"", b"  ", b"#", b"# 1 1:1 # 2"])
FILE = st.builds(
    lambda lines, last: b"".join(line + end for line, end in lines) + last,
    st.lists(st.tuples(LINE, st.sampled_from([b"\n", b"\r\n"])), max_size=6),
    LINE,
)


@hypothesis.settings(max_examples=100, deadline=None, database=None)
@hypothesis.given(content=FILE, parts=st.integers(1, 40))
def test_no_row_is_lost_or_doubled_at_the_seams(content: bytes, parts: int, tmp_path_factory):
    path = tmp_path_factory.getbasetemp() / "rows"
    path.write_bytes(content)
    rows = [line.partition(b"#")[0].split() for line in content.split(b"\n")]
    labels = [float(row[0]) for row in rows if row]
    whole = joined(path, 1)
    assert [row[0] for row in whole] == labels
    assert joined(path, parts) == whole


@pytest.mark.full
@hypothesis.settings(max_examples=300, deadline=None, database=None)
@hypothesis.given(
    content=st.lists(st.sampled_from([b"1", b"2:", b" ", b"\n", b"\r", b"#", b"qid:", b"\0", b"x"])).map(b"".join),
    parts=st.integers(1, 12),
)
def test_what_is_damaged_is_damaged_in_its_part(content: bytes, parts: int, tmp_path_factory):
    """Whatever the bytes are, the parts have the file's rows, or the same damaged line."""
    path = tmp_path_factory.getbasetemp() / "damaged"
    path.write_bytes(content)

    def read(parts: int) -> list[list[float]] | str:
        try:
            return joined(path, parts)
        except ValueError as error:
            return str(error)

    assert read(parts) == read(1)


CIFAR10 = {
    name: pickle.dumps({b"data": np.full((2, 3072), i, np.uint8), b"labels": [i, 9]}, protocol=2)
    for i, name in enumerate([*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"])
}


def test_cifar10s_python_version(tmp_path):
    record = np.concatenate([np.zeros(1024), np.full(1024, 255), np.full(1024, 51)]).astype(np.uint8)
    changed = pickle.dumps({b"data": record[None], b"labels": [7]}, protocol=2)
    images = load_images("cifar10", put(tmp_path, CIFAR10 | {"test_batch": changed}))
    assert images.train_y.tolist() == [0, 9, 1, 9, 2, 9, 3, 9, 4, 9]
    np.testing.assert_allclose(images.train_x[2], np.full((32, 32, 3), 1 / 255))
    np.testing.assert_allclose(images.test_x[0, 3, 4], [0, 1, 0.2])
    assert (images.test_y.tolist(), images.test_y.dtype) == ([7], np.int32)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "lacks data_batch_3"),
        (b"<html>", r"data_batch_3 is not a batch .*UnpicklingError"),
        (CIFAR10["data_batch_3"][:-9], "data_batch_3 is not a batch"),
        (pickle.dumps({b"data": np.zeros((2, 9), np.uint8), b"labels": [1, 2]}), r"data of \(2, 9\) uint8"),
        (pickle.dumps(os.getcwd), r"names posix\.getcwd, which is no array"),
        (pickle.dumps({b"data": np.zeros((1, 3072), np.uint8), b"labels": [10]}), "record 0: the label is 10"),
    ],
)
def test_damaged_files_of_cifar10s_python_version(content: bytes | None, message: str, tmp_path):
    put(tmp_path, {name: x for name, x in (CIFAR10 | {"data_batch_3": content}).items() if x is not None})
    with pytest.raises(ValueError, match=message) as caught:
        load_images("cifar10", tmp_path)
    assert "https://www.cs.toronto.edu/~kriz/cifar.html" in str(caught.value)


def idx(*shape: int, fill: int = 0) -> bytes:
    axes = b"".join(length.to_bytes(4, "big") for length in shape)
    return bytes([0, 0, 8, len(shape)]) + axes + bytes([fill]) * math.prod(shape)


MNIST = {
    "train-images-idx3-ubyte": idx(3, 2, 2),
    "train-labels-idx1-ubyte": idx(3),
    "t10k-images-idx3-ubyte": idx(3, 2, 2),
    "t10k-labels-idx1-ubyte": idx(3),
}
ZIPPED = gzip.compress(MNIST["train-labels-idx1-ubyte"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"t10k-labels-idx1-ubyte": idx(2)}, "3 images and 2 labels of t10k"),
        ({"t10k-labels-idx1-ubyte": idx(3, fill=77)}, "t10k-labels-idx1-ubyte, record 0: the label is 77"),
        ({"t10k-labels-idx1-ubyte": idx(3, 2, 2)}, "t10k-labels-idx1-ubyte is not an idx file .* with 1 axes"),
        ({"t10k-images-idx3-ubyte": idx(3, 2, 2)[:9]}, "t10k-images-idx3-ubyte is not an idx file"),
        ({"t10k-images-idx3-ubyte": idx(3, 2, 2)[:-1]}, r"27 bytes, which does not fit its shape \(3, 2, 2\)"),
        (
            {"train-labels-idx1-ubyte": None, "train-labels-idx1-ubyte.gz": ZIPPED[:-9]},
            "train-labels-idx1-ubyte.gz is not a whole gzip file",
        ),
        (
            {"train-labels-idx1-ubyte": None, "train-labels-idx1-ubyte.gz": b"<html>"},
            "train-labels-idx1-ubyte.gz is not a whole gzip file",
        ),
        ({"train-labels-idx1-ubyte": None}, "neither train-labels-idx1-ubyte nor"),
    ],
)
def test_damaged_files_of_mnist(change: dict, message: str, tmp_path):
    put(tmp_path, {name: content for name, content in (MNIST | change).items() if content is not None})
    with pytest.raises(ValueError, match=message) as caught:
        load_images("mnist", tmp_path)
    assert "https://storage.googleapis.com/cvdf-datasets/mnist" in str(caught.value)


def learnable(name: str, directory: pathlib.Path) -> pathlib.Path:
    """Writes files of a data set from which there is something to learn."""
    if name == "cifar10":
        labels = np.arange(32, dtype=np.uint8) % 10
        pixels = np.where(np.arange(3072)[None] // 300 == labels[:, None], 255, 0).astype(np.uint8)
        batch = np.concatenate([labels[:, None], pixels], axis=1).tobytes()
        return put(directory, {f"{name}.bin": batch for name in CIFAR10})
    if name == "ptb":
        lines = b"a b c d e f g h i j\n" * 200
        return put(directory, dict.fromkeys(PTB, lines))
    if name == "atis":
        lines = b"BOS to rome EOS\tO O B-to flight\nBOS what is served EOS\tO O O O meal\n" * 32
        return put(directory, dict.fromkeys(ATIS, lines))
    names = [f"x{i}" for i in range(64)]
    etc = {}
    for part in ("train", "test"):
        etc[f"etc/an4_{part}.fileids"] = "\n".join(names).encode()
        etc[f"etc/an4_{part}.transcription"] = "\n".join(f"AB ({name})" for name in names).encode()
    return put(directory, etc | {f"feat/{name}.mfc": mfc(12) for name in names})


@pytest.mark.full
@pytest.mark.parametrize(
    ("model", "data", "algorithm"),
    [
        ("fnn3", "cifar10", "gtopk"),
        ("vgg-small", "cifar10", "oktopk"),
        ("lstm-small", "ptb", "hitopk"),
        ("transformer-small", "ptb", "topk_dsa"),
        ("bert-small", "ptb", "dgc"),
        ("lstm-atis", "atis", "a2sgd"),
        ("lstm-an4-small", "an4", "topk_allgather"),
    ],
)
def test_train_takes_models_by_name(model: str, data: str, algorithm: str, tmp_path):
    directory = learnable(data, tmp_path)
    arguments = ["--model", model, "--data", data, "--data-dir", str(directory), "--algorithm", algorithm]
    arguments += ["--workers", "2", "--batch", "8", "--epochs", "4", "--density", "0.1", "--optimizer", "adam"]
    train.main([*arguments, "--json", str(tmp_path / "x.json"), "--plot", str(tmp_path / "x.png")])
    (run,) = json.loads((tmp_path / "x.json").read_text())
    assert run["settings"]["model"] == model
    assert np.mean(run["loss"][-3:]) < 0.9 * np.mean(run["loss"][:2])
    assert np.isfinite(run["accuracy"]).all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "vgg16", "--data", "mnist"], "vgg16 learns cifar10, not mnist: change --data or --model"),
        (["--model", "lstm-ptb"], "ptb is read from files: name their directory with --data-dir"),
        (["--model", "lstm-atis", "--data-dir", "/nowhere"], "/nowhere/atis.train.w-intent.iob: can't be read"),
    ],
)
def test_wrong_models_and_data(arguments: list[str], message: str, capsys):
    with pytest.raises(SystemExit):
        train.main(arguments)
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(("model", "least"), [("lstm-small", 21), ("bert-small", 32)])
def test_texts_that_are_too_short(model: str, least: int, tmp_path, capsys):
    with pytest.raises(SystemExit):
        train.main(["--model", model, "--data-dir", str(put(tmp_path, PTB))])
    assert f"a part of the text has 6 words, and a row needs {least}: take a longer text" in capsys.readouterr().err


@pytest.mark.full
@real("ptb")
def test_the_real_ptb():
    text = read_ptb(DATA / "ptb")
    assert (len(text.train), len(text.valid), len(text.test)) == (929_589, 73_760, 82_430)
    assert len(text.words) == 10_000


@pytest.mark.full
@real("wikitext-2")
def test_the_real_wikitext2():
    text = read_wikitext2(DATA / "wikitext-2")
    assert (len(text.train), len(text.valid), len(text.test)) == (2_088_628, 217_646, 245_569)
    assert len(text.words) == 33_278


@pytest.mark.full
@real("an4")
def test_the_real_an4():
    train, test = read_an4(DATA / "an4", "mfcc")
    assert (len(train.lengths), len(test.lengths)) == (948, 130)
    # Each has enough frames for CTC's labels, after the model has halved them.
    assert all(((part.lengths + 1) // 2 > part.counts).all() for part in (train, test))


@pytest.mark.full
@real("atis")
def test_the_real_atis():
    atis = read_atis(DATA / "atis")
    assert (len(atis.train.intents), len(atis.test.intents)) == (4978, 893)
    of_intent = collections.Counter(atis.intents[i] for i in atis.train.intents)
    assert of_intent.most_common(1) == [("atis_flight", 3666)]


@pytest.mark.full
@real("libsvm")
@pytest.mark.parametrize(
    ("name", "rows", "columns"),
    [("a9a", 32_561, 123), ("w8a", 49_749, 300), ("reuters_earn_tfidf.train", 9603, 30_704)],
)
def test_real_libsvm_files(name: str, rows: int, columns: int):
    whole = read_libsvm(DATA / "libsvm" / name)
    assert (len(whole.labels), whole.indices.max() + 1) == (rows, columns)
    parts = [read_libsvm(DATA / "libsvm" / name, part, 7) for part in range(7)]
    assert max(len(part.labels) for part in parts) < rows / 4
    for i in (1, 2, 3):
        np.testing.assert_array_equal(np.concatenate([part[i] for part in parts]), whole[i])


@pytest.mark.full
@real("cifar10")
def test_the_real_cifar10():
    images = load_images("cifar10", DATA / "cifar10")
    assert (images.train_x.shape, images.test_x.shape) == ((50_000, 32, 32, 3), (10_000, 32, 32, 3))
    assert images.test_y[:5].tolist() == [3, 8, 8, 0, 6]
