"""The papers' α-β models: what each algorithm sends, at best, expected and at worst, over nodes of several workers."""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np


def expected_union(n: int, k: int, P: int) -> float:
    """E[K], the elements that the sum is expected to have: each of P workers has k of n indices, drawn uniformly.

    Args:
      n: the gradient's length.
      k: elements that each worker has, at most n.
      P: workers.

    Returns:
      ``n (1 - (1 - k/n)**P)``, the closed form of SparCML's sum, without its cancellation.

    References:
      SparCML thesis, section 3.2.1.

    >>> round(expected_union(512, 64, 8), 1)
    336.1
    """
    return -n * math.expm1(P * math.log1p(-k / n)) if k < n else float(n)


class Cluster(NamedTuple):
    """A synchronisation to be modelled: ``nodes`` of ``gpus`` workers each, P in all."""

    n: int
    k: int
    P: int
    gpus: int

    @property
    def nodes(self) -> int:
        return self.P // self.gpus

    @property
    def part(self) -> float:
        return (self.P - 1) / self.P

    @property
    def sharing(self) -> int:
        """How many workers share a link."""
        return self.gpus if self.nodes > 1 else 1

    @property
    def shared(self) -> float:
        """How many times the words of one worker cross a node's link when each sends to all others alike."""
        return self.sharing * (self.P - self.sharing) / (self.P - 1) if self.P > 1 else 1.0

    def butterfly(self, words: list[np.ndarray]) -> "Sent":
        """Rounds of so many words, each twice as far as the one before: the first of them stay inside the nodes."""
        leaving = [self.sharing * sent for i, sent in enumerate(words) if 2 ** (i + 1) > self.sharing]
        return Sent(len(words), sum(words, np.zeros(3)), sum(leaving, np.zeros(3)))

    def union(self, workers: int) -> np.ndarray:
        """How many elements so many workers have together: at best, expected, at worst."""
        return np.array([self.k, expected_union(self.n, self.k, workers), min(self.k * workers, self.n)])

    def smaller(self, elements: np.ndarray) -> np.ndarray:
        """Words of so many elements: sparse, or dense from the thesis's δ on (section 3.3.2), here n/2."""
        return np.minimum(2 * elements, self.n)


class Sent(NamedTuple):
    """What a worker sends: numbers, or three of them: at best, expected, at worst.

    Attributes:
      messages: between nodes; all of them, for an algorithm of one level.
      words: likewise.
      link: words over a node's link meanwhile.
      inner_messages: inside the nodes.
      inner_words: likewise.
    """

    messages: float
    words: float | np.ndarray
    link: float | np.ndarray
    inner_messages: float = 0
    inner_words: float | np.ndarray = 0.0


def _rounds(workers: int) -> int:
    return (workers - 1).bit_length()


def _along(messages: float, words: float | np.ndarray) -> Sent:
    """Rings and trees along the nodes."""
    return Sent(messages, words, words)


def _dense(on: Cluster) -> Sent:
    """Ok-Topk, Table 1, "Dense"."""
    return _along(2 * _rounds(on.P), 2 * on.n * on.part)


def _a2sgd(on: Cluster) -> Sent:
    """A2SGD, Table II: two means, 64 bits, summed."""
    return _along(2 * _rounds(on.P), 4 * on.part)


def _topk_allgather(on: Cluster) -> Sent:
    """Ok-Topk, Table 1, "TopkA"; gTop-k, Table I, "TopKAllReduce"."""
    return _along(_rounds(on.P), 2 * on.k * (on.P - 1))


def _gaussiank(on: Cluster) -> Sent:
    """Ok-Topk, Table 1, "Gaussiank": the published latency, twice that of TopkA."""
    return _along(2 * _rounds(on.P), 2 * on.k * (on.P - 1))


def _split_allgather(on: Cluster, messages: float, split: float | np.ndarray, gathered: float | np.ndarray) -> Sent:
    return Sent(messages, split + gathered, split * on.shared + gathered)


def _topk_dsa(on: Cluster) -> Sent:
    """Ok-Topk, Table 1, "TopkDSA": from 4k to 2k + n, gathered dense where that is less."""
    messages = on.P + 2 * _rounds(on.P) if on.P > 1 else 0
    return _split_allgather(on, messages, 2 * on.k * on.part, on.smaller(on.union(on.P)) * on.part)


def _gtopk(on: Cluster) -> Sent:
    """A butterfly: both partners of each round compute the same merge, so that no broadcast follows."""
    return on.butterfly([np.array(2 * on.k)] * _rounds(on.P))


def _gtopk_tree(on: Cluster) -> Sent:
    """gTop-k, Table I; Ok-Topk, Table 1, "gTopk": a tree, and a broadcast."""
    return _along(2 * _rounds(on.P), 4 * on.k * _rounds(on.P))


def _oktopk(on: Cluster) -> Sent:
    """Ok-Topk, Table 1, from 2k to 6k: split 2k, balance up to 2k, gather 2k. Uniform indices need no balancing."""
    messages, words = (2 * on.P + 2 * _rounds(on.P) if on.P > 1 else 0), 2 * on.k * on.part
    return _split_allgather(on, messages, words * np.array([1, 1, 2]), words * np.array([0, 1, 1]))


def _ssar_recursive_doubling(on: Cluster) -> Sent:
    """Thesis, Table 3.1: in each round what 1, 2, 4, ... workers have together; in a last, odd one what is missing."""
    merged = [min(2**i, on.P - 2**i) for i in range(_rounds(on.P))]
    return on.butterfly([on.smaller(on.union(workers)) for workers in merged])


def _ssar_split_allgather(on: Cluster) -> Sent:
    """Thesis, Table 3.1; at worst 2 P k, split and gather at their own worst together."""
    split = 2 * on.k * np.array([on.part, on.part, 1]) * (on.P > 1)
    return _split_allgather(on, on.P - 1 + _rounds(on.P), split, on.smaller(on.union(on.P)) * on.part)


def _dsar_split_allgather(on: Cluster) -> Sent:
    """Thesis, Table 3.1, and the best case of section 3.3.4: nothing to split, each worker has its own part only."""
    split = 2 * on.k * np.array([0, on.part, 1]) * (on.P > 1)
    return _split_allgather(on, on.P - 1 + _rounds(on.P), split, on.n * on.part)


def _parameter_server(on: Cluster) -> Sent:
    """A star: the root, whose link has it all, receives everyone's gradient and sends each the sum."""
    return _along(2 * (on.P - 1), 2 * on.n * (on.P - 1))


def _hitopk(on: Cluster) -> Sent:
    """HiTopKComm, equations 7, 9 and 10, with the indices, which equations 9 and 10 leave out; (8) is no traffic."""
    between, inside = 2 * on.k / on.gpus * (on.nodes - 1), (on.gpus - 1) / on.gpus
    gathered = on.smaller(on.union(on.nodes))
    return Sent(
        messages=_rounds(on.nodes),
        words=between,
        link=between * on.gpus,
        inner_messages=on.gpus - 1 + _rounds(on.gpus),
        inner_words=inside * (on.n + gathered),
    )


def _torus(on: Cluster) -> Sent:
    """2D-torus: reduce-scatter inside, all-reduce of the shards between, all-gather inside; rings throughout."""
    between, inside = 2 * on.n / on.gpus * (on.nodes - 1) / on.nodes, (on.gpus - 1) / on.gpus
    return Sent(2 * (on.nodes - 1), between, between * on.gpus, 2 * (on.gpus - 1), 2 * on.n * inside)


def _dense_hierarchical(on: Cluster) -> Sent:
    """A reduction to one worker of each node, the dense all-reduce between these, a broadcast inside."""
    between, inside = 2 * on.n * (on.nodes - 1) / on.nodes, (on.gpus - 1) / on.gpus
    return Sent(2 * _rounds(on.nodes), between, between, 4 * _rounds(on.gpus), 4 * on.n * inside)


MODELS: dict[str, Callable[[Cluster], Sent]] = {
    "dense": _dense,
    "a2sgd": _a2sgd,
    "topk_allgather": _topk_allgather,
    "topk_dsa": _topk_dsa,
    "gtopk": _gtopk,
    "gtopk_tree": _gtopk_tree,
    "gaussiank": _gaussiank,
    "oktopk": _oktopk,
    "ssar_recursive_doubling": _ssar_recursive_doubling,
    "ssar_split_allgather": _ssar_split_allgather,
    "dsar_split_allgather": _dsar_split_allgather,
    "parameter_server": _parameter_server,
    "hitopk": _hitopk,
    "torus": _torus,
    "dense_hierarchical": _dense_hierarchical,
}
