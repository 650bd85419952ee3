"""The papers' α-β models: what each algorithm sends, at best, expected and at worst."""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from ..quantize import QSGD, Block8


def expected_union(n: int, k: int, P: int) -> float:
    """E[K], the expected number of elements of the sum, when indices are drawn uniformly.

    Each of P workers has k of n indices.

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
    """The workers of a modelled synchronisation, and the lengths that they synchronise.

    Of workers that each hold a model in shards it has one device of each: those that hold the same
    shards and exchange messages.

    Attributes:
      n: the gradient's length.
      k: elements that each worker selects.
      P: workers in total.
      local: workers of a node.
      ring: whether sums and all-gathers run round a ring, and not in log P rounds.
    """

    n: int
    k: int
    P: int
    local: int
    ring: bool = False

    @property
    def nodes(self) -> int:
        """The number of nodes."""
        return self.P // self.local

    def rounds(self, workers: int) -> int:
        """The rounds of an all-gather of so many workers; a sum has twice as many."""
        return workers - 1 if self.ring else log2_rounds(workers)

    @property
    def others_fraction(self) -> float:
        """(P-1)/P, the other workers' fraction of a vector that is cut into P equal parts."""
        return (self.P - 1) / self.P

    @property
    def workers_per_link(self) -> int:
        """How many workers share a link: those of a node, or one where there is only one node."""
        return self.local if self.nodes > 1 else 1

    @property
    def link_factor(self) -> float:
        """The words on a node's link over the words of one worker, in an all-to-all.

        Each worker sends equally much to every other worker. Only what it sends to other nodes
        crosses the link, but that of all workers of the node does.
        """
        sharing = self.workers_per_link
        return sharing * (self.P - sharing) / (self.P - 1) if self.P > 1 else 1.0

    def butterfly_cost(self, words: list[np.ndarray]) -> "Sent":
        """The cost of a butterfly's rounds. The first rounds stay inside the nodes.

        Args:
          words: of each round. The partner of a round is twice as far away as that of the round
            before.
        """
        sharing = self.workers_per_link
        leaving = [sharing * sent for i, sent in enumerate(words) if 2 ** (i + 1) > sharing]
        return Sent(len(words), sum(words, np.zeros(3)), sum(leaving, np.zeros(3)))

    def union_sizes(self, workers: int) -> np.ndarray:
        """How many different elements so many workers have: at best, expected, at worst."""
        return np.array([self.k, expected_union(self.n, self.k, workers), min(self.k * workers, self.n)])

    def words_of(self, elements: np.ndarray) -> np.ndarray:
        """The words of so many elements, sparse or dense, whichever is less.

        They are dense from the thesis's δ on (section 3.3.2), here n/2.
        """
        return np.minimum(2 * elements, self.n)


class Sent(NamedTuple):
    """What a worker sends.

    An attribute is one number, or an array of three: at best, expected, at worst.

    Attributes:
      messages: messages between nodes; all messages, for an algorithm of one level.
      words: words between nodes, likewise.
      link: words that cross a node's link meanwhile.
      inner_messages: messages inside the nodes.
      inner_words: words inside the nodes.
    """

    messages: float
    words: float | np.ndarray
    link: float | np.ndarray
    inner_messages: float = 0
    inner_words: float | np.ndarray = 0.0


def log2_rounds(workers: int) -> int:
    """``log P``: the base-2 logarithm of a number of workers, rounded up."""
    return (workers - 1).bit_length()


def ring_or_tree_cost(messages: float, words: float | np.ndarray) -> Sent:
    """The cost of a ring or a tree along the nodes, which crosses each link once."""
    return Sent(messages, words, words)


def split_and_gather_cost(
    cluster: Cluster, messages: float, split: float | np.ndarray, gathered: float | np.ndarray
) -> Sent:
    """The cost of an exchange in which each worker gets its part, and an all-gather of the parts.

    Args:
      cluster: the workers.
      messages: of both together.
      split: words that a worker sends to the others directly.
      gathered: words of the all-gather, a ring or a tree.
    """
    return Sent(messages, split + gathered, split * cluster.link_factor + gathered)


def dense_cost(cluster: Cluster) -> Sent:
    """The dense all-reduce: Ok-Topk, Table 1, "Dense"."""
    return ring_or_tree_cost(2 * cluster.rounds(cluster.P), 2 * cluster.n * cluster.others_fraction)


def a2sgd_cost(cluster: Cluster) -> Sent:
    """A2SGD, Table II: an all-reduce of two means, 64 bits."""
    return ring_or_tree_cost(2 * cluster.rounds(cluster.P), 4 * cluster.others_fraction)


def topk_allgather_cost(cluster: Cluster) -> Sent:
    """TopkA: Ok-Topk, Table 1, "TopkA"; gTop-k, Table I, "TopKAllReduce". DGC sends the same."""
    return ring_or_tree_cost(cluster.rounds(cluster.P), 2 * cluster.k * (cluster.P - 1))


def gaussiank_cost(cluster: Cluster) -> Sent:
    """Gaussiank: Ok-Topk, Table 1, with the published latency, twice that of TopkA."""
    return ring_or_tree_cost(2 * cluster.rounds(cluster.P), 2 * cluster.k * (cluster.P - 1))


def topk_dsa_cost(cluster: Cluster) -> Sent:
    """TopkDSA: Ok-Topk, Table 1, "TopkDSA", from 4k to 2k + n.

    The result is gathered dense where that takes fewer words.
    """
    messages = cluster.P + 2 * cluster.rounds(cluster.P) if cluster.P > 1 else 0
    gathered = cluster.words_of(cluster.union_sizes(cluster.P)) * cluster.others_fraction
    return split_and_gather_cost(cluster, messages, 2 * cluster.k * cluster.others_fraction, gathered)


def gtopk_cost(cluster: Cluster) -> Sent:
    """gTop-k as a butterfly.

    Both partners of a round compute the same merge, so that no broadcast follows.
    """
    return cluster.butterfly_cost([np.array(2 * cluster.k)] * log2_rounds(cluster.P))


def gtopk_tree_cost(cluster: Cluster) -> Sent:
    """gTop-k as published, a tree and a broadcast: gTop-k, Table I; Ok-Topk, Table 1, "gTopk"."""
    return ring_or_tree_cost(2 * log2_rounds(cluster.P), 4 * cluster.k * log2_rounds(cluster.P))


def oktopk_cost(cluster: Cluster) -> Sent:
    """Ok-Topk, Table 1, from 2k to 6k: split 2k, balance up to 2k, gather 2k.

    The best case is the split alone. Uniform indices, the expected case, need no balancing, but
    the messages of the split have room for more than k/P elements
    (:class:`jsparse.allreduce.OkTopk`, ``room``).
    """
    messages = 2 * cluster.P + 2 * cluster.rounds(cluster.P) if cluster.P > 1 else 0
    words = 2 * cluster.k * cluster.others_fraction
    room = min(2, 1.25 + math.log2(cluster.P) / 8)
    return split_and_gather_cost(cluster, messages, words * np.array([1, room, 2]), words * np.array([0, 1, 1]))


def ssar_recursive_doubling_cost(cluster: Cluster) -> Sent:
    """SSAR_Rec_Dbl: thesis, Table 3.1.

    In each round a worker sends the elements that 1, 2, 4, ... workers have together. Where P is
    no power of two, the last round brings the elements of the workers that are missing.
    """
    merged = [min(2**i, cluster.P - 2**i) for i in range(log2_rounds(cluster.P))]
    return cluster.butterfly_cost([cluster.words_of(cluster.union_sizes(workers)) for workers in merged])


def ssar_split_allgather_cost(cluster: Cluster) -> Sent:
    """SSAR_Split_AllGather: thesis, Table 3.1.

    The worst case, 2 P k, is the worst case of the split plus that of the all-gather.
    """
    split = 2 * cluster.k * np.array([cluster.others_fraction, cluster.others_fraction, 1]) * (cluster.P > 1)
    gathered = cluster.words_of(cluster.union_sizes(cluster.P)) * cluster.others_fraction
    return split_and_gather_cost(cluster, cluster.P - 1 + cluster.rounds(cluster.P), split, gathered)


def dsar_split_allgather_cost(cluster: Cluster) -> Sent:
    """DSAR_Split_AllGather: thesis, Table 3.1, and the best case of section 3.3.4.

    In the best case each worker has elements of its own part only, so there is nothing to split.
    """
    split = 2 * cluster.k * np.array([0, cluster.others_fraction, 1]) * (cluster.P > 1)
    gathered = cluster.n * cluster.others_fraction
    return split_and_gather_cost(cluster, cluster.P - 1 + cluster.rounds(cluster.P), split, gathered)


def quantized_cost(cluster: Cluster) -> Sent:
    """A dense vector in 8 bits a value: an all-to-all of its parts, an all-gather of the sums."""
    part = Block8().words(cluster.n, np.float32) * cluster.others_fraction
    return split_and_gather_cost(cluster, cluster.P - 1 + cluster.rounds(cluster.P), part, part)


def qsgd_cost(cluster: Cluster) -> Sent:
    """QSGD with 4 levels: every worker gathers all vectors."""
    return ring_or_tree_cost(cluster.rounds(cluster.P), QSGD().words(cluster.n, np.float32) * (cluster.P - 1))


def parameter_server_cost(cluster: Cluster) -> Sent:
    """A star: the root receives every worker's gradient and sends each worker the sum.

    All of it crosses the root's link.
    """
    return ring_or_tree_cost(2 * (cluster.P - 1), 2 * cluster.n * (cluster.P - 1))


def hitopk_cost(cluster: Cluster) -> Sent:
    """HiTopKComm, equations 7, 9 and 10; equation 8 is no traffic.

    The indices are counted, too; equations 9 and 10 leave them out.
    """
    between = 2 * cluster.k / cluster.local * (cluster.nodes - 1)
    inside = (cluster.local - 1) / cluster.local
    gathered = cluster.words_of(cluster.union_sizes(cluster.nodes))
    return Sent(
        messages=cluster.rounds(cluster.nodes),
        words=between,
        link=between * cluster.local,
        inner_messages=cluster.local - 1 + cluster.rounds(cluster.local),
        inner_words=inside * (cluster.n + gathered),
    )


def torus_cost(cluster: Cluster) -> Sent:
    """2D-torus all-reduce, of rings only.

    It is a reduce-scatter inside the nodes, an all-reduce of the shards between them, and an
    all-gather inside.
    """
    between = 2 * cluster.n / cluster.local * (cluster.nodes - 1) / cluster.nodes
    inside = (cluster.local - 1) / cluster.local
    return Sent(
        messages=2 * (cluster.nodes - 1),
        words=between,
        link=between * cluster.local,
        inner_messages=2 * (cluster.local - 1),
        inner_words=2 * cluster.n * inside,
    )


def dense_hierarchical_cost(cluster: Cluster) -> Sent:
    """A reduction to one worker a node, a dense all-reduce between these, a broadcast inside."""
    between = 2 * cluster.n * (cluster.nodes - 1) / cluster.nodes
    inside = (cluster.local - 1) / cluster.local
    return Sent(
        messages=2 * cluster.rounds(cluster.nodes),
        words=between,
        link=between,
        inner_messages=4 * log2_rounds(cluster.local),
        inner_words=4 * cluster.n * inside,
    )


# The model of each algorithm, by the algorithm's name.
MODELS: dict[str, Callable[[Cluster], Sent]] = {
    "dense": dense_cost,
    "a2sgd": a2sgd_cost,
    "topk_allgather": topk_allgather_cost,
    "topk_dsa": topk_dsa_cost,
    "gtopk": gtopk_cost,
    "gtopk_tree": gtopk_tree_cost,
    "gaussiank": gaussiank_cost,
    "oktopk": oktopk_cost,
    "ssar_recursive_doubling": ssar_recursive_doubling_cost,
    "ssar_split_allgather": ssar_split_allgather_cost,
    "dsar_split_allgather": dsar_split_allgather_cost,
    "dgc": topk_allgather_cost,
    "quantized": quantized_cost,
    "qsgd": qsgd_cost,
    "parameter_server": parameter_server_cost,
    "hitopk": hitopk_cost,
    "torus": torus_cost,
    "dense_hierarchical": dense_hierarchical_cost,
}
