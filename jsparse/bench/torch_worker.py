"""A PyTorch worker of ``jsparse bench network``: measures what users of its DDP choose from."""

import datetime
import functools
import importlib
import itertools
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

from .._vector.density import elements_kept
from .gradients import leaves_of, worker_gradients
from .job import NetworkJob
from .reports import ask_for_rate, tell
from .timing import Meter

# The ranks of PowerSGD's approximation.
RANKS = (4, 32)


class Bucket:
    """The bucket that DDP passes to a hook.

    It holds all gradients, so that the hook sends the fewest messages.
    """

    def __init__(self, buffer: Any, shapes: Sequence[tuple[int, ...]]):
        self._buffer = buffer
        parts = buffer.split([math.prod(shape) for shape in shapes])
        self._parts = [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]

    def buffer(self):
        return self._buffer

    def gradients(self):
        return self._parts

    def parameters(self):
        return self._parts

    def index(self):
        return 0

    def is_last(self):
        return True


class Peers:
    """PyTorch's forms.

    Each method returns a step that averages the gradient in ``buffer`` over the hosts, in place.
    """

    def __init__(self, job: NetworkJob):
        self.torch = importlib.import_module("torch")
        self.dist = importlib.import_module("torch.distributed")
        hooks = "torch.distributed.algorithms.ddp_comm_hooks"
        self._cast = importlib.import_module(f"{hooks}.default_hooks")
        self._power = importlib.import_module(f"{hooks}.powerSGD_hook")
        self._job = job
        self.buffer = self.torch.zeros(job.size)
        self._bucket = Bucket(self.buffer, leaves_of(job.size))

    def all_reduce(self) -> Callable[[], None]:
        """gloo's all-reduce."""

        def step():
            self.dist.all_reduce(self.buffer)
            self.buffer.div_(self._job.hosts)

        return step

    def float16_hook(self) -> Callable[[], None]:
        """DDP's hook that casts to float16."""
        return lambda: self._cast.fp16_compress_hook(None, self._bucket).wait()

    def top_k(self) -> Callable[[], None]:
        """Top-k, error feedback and an all-gather; values and indices travel in one message."""
        torch, k = self.torch, elements_kept(self._job.density, self._job.size)
        residual = torch.zeros(self._job.size)
        messages = [torch.empty(2, k, dtype=torch.int32) for _ in range(self._job.hosts)]

        def step():
            residual.add_(self.buffer)
            indices = torch.topk(residual.abs(), k, sorted=False).indices
            values = residual[indices]
            residual[indices] = 0
            self.dist.all_gather(messages, torch.stack([values.view(torch.int32), indices.to(torch.int32)]))
            self.buffer.zero_()
            for message in messages:
                self.buffer.index_add_(0, message[1], message[0].view(torch.float32))
            self.buffer.div_(self._job.hosts)

        return step

    def power_sgd(self, rank: int) -> Callable[[], None]:
        """DDP's PowerSGD hook."""
        state = self._power.PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=2)
        return lambda: self._power.powerSGD_hook(state, self._bucket).wait()


TORCH_FORMS: dict[str, Callable[[Peers], Callable[[], None]]] = {
    "torch all_reduce": Peers.all_reduce,
    "torch float16 hook": Peers.float16_hook,
    "torch topk + all_gather": Peers.top_k,
    **{f"torch PowerSGD rank {rank}": functools.partial(Peers.power_sgd, rank=rank) for rank in RANKS},
}


def main(text: str) -> None:
    job = NetworkJob.read(text)
    peers = Peers(job)
    torch, dist = peers.torch, peers.dist
    dist.init_process_group("gloo", timeout=datetime.timedelta(minutes=5))
    own = [torch.from_numpy(grad) for grad in worker_gradients(job.size, dist.get_rank())]

    def agree(number: float) -> float:
        largest = torch.tensor([number], dtype=torch.float32)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        return float(largest[0])

    meter = Meter(agree)
    for name, make in TORCH_FORMS.items():
        if name not in job.forms:
            continue
        step, grads = make(peers), itertools.cycle(own)
        load = functools.partial(lambda grads: peers.buffer.copy_(next(grads)), grads)
        for rate in job.rates:
            ask_for_rate(rate)
            tell(name=name, rate=rate, dense_update=True, **meter.measure(step, job.repeats, load))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
