"""Runs an example in several processes, on one machine or on many, with checkpoints."""

import contextlib
import logging
import pathlib
from collections.abc import Iterator
from typing import Any

import jax


def devices(workers: int) -> list[Any]:
    """The first ``workers`` devices of each process, ordered by process.

    They are accelerators where every process has enough of them, else virtual CPU devices.
    """
    found: list[Any] = []
    for platform in (None, "cpu"):
        found = jax.devices(platform)
        each = [[d for d in found if d.process_index == p][:workers] for p in range(jax.process_count())]
        if workers >= 1 and all(len(some) == workers for some in each):
            return [device for some in each for device in some]
    raise ValueError(
        f"{workers} workers need as many devices; this process has {len(jax.local_devices())}: change --workers"
    )


def on_one_device(workers: int, asked: bool) -> bool:
    """Whether all workers share the first device.

    They do if it is asked for; else if this is the only process, and has accelerators, but fewer
    than workers.
    """
    alone = jax.process_count() == 1
    if not asked:
        return alone and jax.default_backend() != "cpu" and len(jax.devices()) < workers
    if not alone:
        raise ValueError("--simulate is for one process, and there are several: leave it out, or --distributed")
    if workers < 1:
        raise ValueError(f"{workers} workers can't be simulated: change --workers")
    return True


def own_part(count: int) -> slice:
    """This process's part of a batch of ``count`` examples."""
    each = count // jax.process_count()
    return slice(jax.process_index() * each, (jax.process_index() + 1) * each)


class Checkpoints:
    """The checkpoints of one run, in a directory: its training state and its figures."""

    def __init__(self, manager: Any):
        self._manager = manager

    @staticmethod
    @contextlib.contextmanager
    def open(directory: pathlib.Path | None, name: str) -> "Iterator[Checkpoints]":
        """Opens the checkpoints in ``directory/name``; without a directory there are none.

        When the block ends, all checkpoints are written.
        """
        if directory is None:
            yield Checkpoints(None)
            return
        try:
            import orbax.checkpoint as ocp
        except ImportError as error:
            raise ValueError("--checkpoint needs orbax: pip install orbax-checkpoint") from error
        logging.getLogger("absl").setLevel(logging.ERROR)
        options = ocp.CheckpointManagerOptions(max_to_keep=2, cleanup_tmp_directories=True)
        folder = (directory / name).absolute()
        if folder.exists() and not folder.is_dir():
            raise ValueError(f"{folder} is a file, where checkpoints need a folder: name another directory")
        with ocp.CheckpointManager(folder, options=options) as manager:
            yield Checkpoints(manager)

    def restore(self, state: Any, run: dict[str, Any]) -> tuple[int, Any, dict[str, Any]]:
        """Restores the last checkpoint.

        Args:
          state: the state of a run that begins.
          run: the figures of a run that begins.

        Returns:
          The checkpoint's number, state and figures; 0 and the arguments where there is none.

        Raises:
          ValueError: the checkpoint is of a run with other settings, or damaged.
        """
        last = self._manager.latest_step() if self._manager else None
        if last is None:
            return 0, state, run
        import orbax.checkpoint as ocp

        saved = self._read(last, run=ocp.args.JsonRestore())
        was, now = saved["settings"], run["settings"]
        differ = [f"{key} {was.get(key)}" for key in now if was.get(key) != now[key]]
        if differ:
            raise ValueError(
                f"{self._manager.directory} is of another run, with {', '.join(differ)}: name another directory"
            )
        return last, self._read(last, state=ocp.args.StandardRestore(state)), saved

    def _read(self, number: int, **item: Any) -> Any:
        """Reads one item of a checkpoint."""
        import orbax.checkpoint as ocp

        try:
            (read,) = self._manager.restore(number, args=ocp.args.Composite(**item)).values()
        except Exception as error:  # orbax raises errors of many kinds.
            raise ValueError(
                f"{self._manager.directory / str(number)} can't be read ({type(error).__name__}): remove it, to go on "
                "from the checkpoint before it if there is one; or name another directory"
            ) from error
        return read

    def save(self, number: int, state: Any, run: dict[str, Any]) -> None:
        """Saves a checkpoint while training goes on.

        A checkpoint that is not complete when the run is killed does not count.
        """
        if self._manager:
            import orbax.checkpoint as ocp

            save: Any = {"state": ocp.args.StandardSave(state), "run": ocp.args.JsonSave(run)}
            self._manager.save(number, args=ocp.args.Composite(**save))
