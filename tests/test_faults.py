"""Faults, each of a real process: killed, frozen, killed while it saves."""

import functools
import os
import pathlib
import re
import signal
import tempfile

import numpy as np
import pytest

import processes

STEPS = 20


@pytest.mark.parametrize(
    ("victim", "number"),
    [
        (1, signal.SIGKILL),
        pytest.param(0, signal.SIGKILL, marks=pytest.mark.slow),
        pytest.param(1, signal.SIGSTOP, marks=pytest.mark.slow),
        pytest.param(0, signal.SIGSTOP, marks=pytest.mark.slow),
    ],
)
def test_the_others_end_with_an_error_in_bounded_time(victim: int, number: signal.Signals):
    """Killed, it closes its connections and they notice at once; frozen, after the heartbeat's timeout."""
    with processes.start("process_training.py", 3, "") as started:
        processes.until(lambda: all("step 3" in p.text for p in started), started, 240, "train")
        started[victim].kill(number)
        others = [process for process in started if process.rank != victim]
        statuses = processes.wait(others, 3 * processes.HEARTBEAT + processes.SHUTDOWN)
        assert all(statuses), statuses
        for process in others:
            assert re.search("Gloo|JAX distributed service detected fatal errors", process.text)


def test_a_run_goes_on_from_its_last_checkpoint(tmp_path: pathlib.Path):
    """All are killed in the midst of it, and started again: every bit is as in a run that nobody stopped."""
    with processes.start("process_training.py", 2, tmp_path, STEPS, devices=2) as started:
        processes.until(lambda: saved(tmp_path)[1:] and reached(started) >= 5, started, 240, "save some steps")
        kill(started)
        assert reached(started) < STEPS
    check(tmp_path, at_least=1)


def test_what_is_killed_while_it_saves_leaves_the_checkpoint_before_it(tmp_path: pathlib.Path):
    """They are frozen in the midst of writing, which is made sure of, and killed."""
    with processes.start("process_training.py", 2, tmp_path, STEPS, devices=2) as started:
        good: list[int] = []
        while not (good and unfinished(tmp_path)):
            for process in started:
                process.kill(signal.SIGCONT)
            processes.until(lambda: saved(tmp_path) and unfinished(tmp_path), started, 240, "save")
            for process in started:
                process.kill(signal.SIGSTOP)
            good = saved(tmp_path)
        kill(started)
        assert good == saved(tmp_path)
        assert max(unfinished(tmp_path)) > max(good)
    check(tmp_path, at_least=max(good))


def saved(directory: pathlib.Path) -> list[int]:
    """The checkpoints that are whole."""
    return sorted(int(path.name) for path in directory.glob("checkpoints/*") if path.name.isdigit())


def unfinished(directory: pathlib.Path) -> list[int]:
    """Those that are being written."""
    return [int(path.name.split(".")[0]) for path in directory.glob("checkpoints/*.orbax-checkpoint-tmp*")]


def reached(started: list[processes.Process]) -> int:
    return max(int(number) for number in ["0", *re.findall(r"^step (\d+)$", started[0].text, flags=re.M)])


def kill(started: list[processes.Process]) -> None:
    for process in started:
        process.kill()
    assert {process.popen.wait() for process in started} == {-signal.SIGKILL}


def check(directory: pathlib.Path, at_least: int) -> None:
    """Starts the run again, and compares it with one that was not broken."""
    texts = processes.run("process_training.py", 2, directory, STEPS, devices=2)
    begun = [int(re.search(r"begins after step (\d+)", text)[1]) for text in texts]
    assert at_least <= begun[0] == begun[1] < STEPS
    for rank, expected in enumerate(unbroken()):
        got = np.load(directory / f"{rank}.npz")
        assert set(got) == set(expected)
        for what, value in expected.items():
            assert value.any()
            np.testing.assert_array_equal(got[what], value, err_msg=what)


@functools.cache
def unbroken() -> list[dict[str, np.ndarray]]:
    with tempfile.TemporaryDirectory() as directory:
        processes.run("process_training.py", 2, directory, STEPS, devices=2)
        return [dict(np.load(os.path.join(directory, f"{rank}.npz"))) for rank in range(2)]
