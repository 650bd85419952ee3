"""Faults, each of a real process: killed, frozen, killed while it saves."""

import pathlib
import re
import signal

import numpy as np
import pytest

import processes

STEPS = 20


@pytest.mark.parametrize(
    ("victim", "number"),
    [
        pytest.param(1, signal.SIGKILL, marks=pytest.mark.full),
        pytest.param(0, signal.SIGKILL, marks=pytest.mark.slow),
        pytest.param(1, signal.SIGSTOP, marks=pytest.mark.slow),
        pytest.param(0, signal.SIGSTOP, marks=pytest.mark.slow),
    ],
)
def test_the_others_end_with_an_error_in_bounded_time(victim: int, number: signal.Signals):
    """The others notice a killed process at once, since it closes its connections.

    They notice a frozen process after the heartbeat's timeout.
    """
    with processes.start("process_training.py", 3, "") as started:
        processes.until(lambda: all("step 3" in p.text for p in started), started, 480, "train")
        started[victim].kill(number)
        others = [process for process in started if process.rank != victim]
        statuses = processes.wait(others, 3 * processes.HEARTBEAT + processes.SHUTDOWN)
        assert all(statuses), statuses
        for process in others:
            assert re.search("Gloo|JAX distributed service detected fatal errors", process.text)


@pytest.mark.full
def test_a_run_that_is_killed_ends_as_if_it_had_not_been(tmp_path: pathlib.Path):
    """Killed between two checkpoints, then while it writes one; each time it starts again."""
    arguments = "process_training.py", 2, tmp_path, STEPS
    with processes.start(*arguments, devices=2) as started:
        processes.until(lambda: saved(tmp_path)[1:] and reached(started) >= 5, started, 480, "save some steps")
        kill(started)
        assert reached(started) < STEPS
    before, left = max(saved(tmp_path)), unfinished(tmp_path)

    with processes.start(*arguments, devices=2) as started:
        good: list[int] = []
        while not (good and unfinished(tmp_path) - left):
            for process in started:
                process.kill(signal.SIGCONT)
            processes.until(lambda: reached(started) > before and unfinished(tmp_path) - left, started, 480, "save")
            for process in started:
                process.kill(signal.SIGSTOP)
            good = saved(tmp_path)
        kill(started)
        assert begun(started) >= before
    assert good == saved(tmp_path)
    assert all(int(name.split(".")[0]) > max(good) for name in unfinished(tmp_path) - left)

    with processes.start(*arguments, devices=2) as started:
        assert not any(processes.wait(started, 480)), processes.written(started)
        assert begun(started) == max(good) < STEPS
    for rank in range(2):
        leaves = np.load(tmp_path / f"{rank}.npz")
        names = [name.removeprefix("unbroken") for name in leaves if name.startswith("unbroken")]
        assert sum("residual" in name or "params" in name for name in names) == 3
        for name in names:
            np.testing.assert_array_equal(leaves[f"broken{name}"], leaves[f"unbroken{name}"], err_msg=name)


def saved(directory: pathlib.Path) -> list[int]:
    """The checkpoints that are whole."""
    return sorted(int(path.name) for path in directory.glob("checkpoints/*") if path.name.isdigit())


def unfinished(directory: pathlib.Path) -> set[str]:
    """Those that are being written, or that nobody has finished."""
    return {path.name for path in directory.glob("checkpoints/*.orbax-checkpoint-tmp*")}


def reached(started: list[processes.Process]) -> int:
    return max(int(number) for number in ["0", *re.findall(r"^step (\d+)$", started[0].text, flags=re.M)])


def kill(started: list[processes.Process]) -> None:
    for process in started:
        process.kill()
    assert {process.popen.wait() for process in started} == {-signal.SIGKILL}


def begun(started: list[processes.Process]) -> int:
    """After which step; all processes alike."""
    (step,) = {int(re.search(r"begins after step (\d+)", process.text)[1]) for process in started}
    return step
