"""The cost of a synchronisation by the papers' α-β models.

A message of L words (of 4 bytes) takes ``α + β L`` seconds. A sparse element is two words, its
value and its index. ``log`` is to base 2 and rounded up, since that is the number of rounds if the
number of workers is not a power of two. The model does not contain the time for computing,
selecting and summing.
"""

import dataclasses
import math

import numpy as np

from .models import MODELS, Cluster


def _check_link(alpha: float, beta: float) -> None:
    if not (0 <= alpha < math.inf and 0 <= beta < math.inf):
        raise ValueError(
            f"alpha is {alpha} and beta is {beta}; they are the seconds of a message and of a word, so they must be "
            "finite and at least 0: make them with jsparse.cost.link(gbit, microseconds)"
        )


@dataclasses.dataclass(frozen=True)
class Node:
    """A machine with several workers, and the network inside it.

    Its workers share one link to the other machines. A collective that the backend runs as a ring
    or a tree along the machines (the sum, the all-gather) crosses that link once. Messages that
    workers send to each other directly (an all-to-all, the rounds of a butterfly) cross it side by
    side: of each worker's words, the part that leaves the machine.

    Attributes:
      gpus: the number of its workers, at least 1.
      alpha: seconds for a message inside it.
      beta: seconds for a word of each worker inside it.
    """

    gpus: int = 1
    alpha: float = 0.0
    beta: float = 0.0

    def __post_init__(self):
        if self.gpus < 1:
            raise ValueError(f"gpus is {self.gpus}; it is the number of a node's workers, so it must be at least 1")
        _check_link(self.alpha, self.beta)


@dataclasses.dataclass(frozen=True)
class Load:
    """The cost of one synchronisation.

    Attributes:
      messages: how many messages the busiest worker sends, one after the other.
      words: how many words of 4 bytes it sends.
      seconds: how long this takes.
    """

    messages: float
    words: float
    seconds: float


@dataclasses.dataclass(frozen=True)
class Prediction:
    """The cost of an algorithm, for different positions of the workers' elements.

    Attributes:
      algorithm: its name.
      best: all workers have the same indices: the sum has K = k elements.
      expected: indices are drawn uniformly: K is :func:`expected_union`.
      worst: no two workers have an index in common: K = k P, and at most n.
    """

    algorithm: str
    best: Load
    expected: Load
    worst: Load


def link(gbit: float, microseconds: float) -> tuple[float, float]:
    """α and β of a network.

    Args:
      gbit: its bandwidth, in 10^9 bits a second, above 0.
      microseconds: its latency, from one worker's call to the other's.

    Returns:
      Seconds for a message, and seconds for a word of 4 bytes.

    >>> link(1, 50)
    (5e-05, 3.2e-08)
    """
    if not gbit > 0:
        raise ValueError(f"the bandwidth is {gbit} Gbit/s; it must be above 0")
    if not microseconds >= 0:
        raise ValueError(f"the latency is {microseconds} microseconds; it must be at least 0")
    return microseconds / 1e6, 32 / (gbit * 1e9)


def predict(algorithm: str, n: int, k: int, P: int, alpha: float, beta: float, *, node: Node = Node()) -> Prediction:
    """The cost of one synchronisation, by the paper's model of the algorithm.

    Args:
      algorithm: one of ``ALGORITHMS``.
      n: the gradient's length.
      k: the number of elements that a worker selects, from 1 to n.
      P: the number of workers.
      alpha: seconds for a message; between nodes, if there are several.
      beta: seconds for a word of 4 bytes; likewise (:func:`link` makes both).
      node: what is inside a node. P must be a multiple of its workers, or not above their number.
        Only ``hitopk``, ``torus`` and ``dense_hierarchical`` use both levels. The others run at
        ``alpha`` and ``beta`` throughout (inside a single node, at the node's own), and share the
        nodes' links as :class:`Node` says.

    Returns:
      Messages, words and seconds: best, expected and worst.

    Raises:
      ValueError: an argument is out of range.

    >>> predict("oktopk", 1_000_000, 10_000, 8, 0.25, 1.0).worst
    Load(messages=22.0, words=52500.0, seconds=52505.5)
    """
    if algorithm not in MODELS:
        raise ValueError(f"algorithm is {algorithm!r}; choose one of {', '.join(MODELS)}")
    if not 1 <= k <= n:
        raise ValueError(f"k is {k}; for {n} elements it must be from 1 to {n}")
    gpus = min(node.gpus, P)
    if P < 1 or P % gpus:
        raise ValueError(
            f"{P} workers do not fill nodes of {node.gpus}: choose a multiple of {node.gpus}, or from 1 to {node.gpus}"
        )
    _check_link(alpha, beta)
    if P == gpus > 1:
        alpha, beta = node.alpha, node.beta
    sent = MODELS[algorithm](Cluster(n, k, P, gpus))
    figures = (
        sent.messages + sent.inner_messages,
        sent.words + sent.inner_words,
        sent.messages * alpha + sent.link * beta + sent.inner_messages * node.alpha + sent.inner_words * node.beta,
    )
    messages, words, seconds = (np.broadcast_to(figure, 3).astype(float).tolist() for figure in figures)
    return Prediction(algorithm, *map(Load, messages, words, seconds))


def choose(n: int, k: int, P: int, alpha: float, beta: float, *, node: Node = Node(), selection: float = 0.0) -> str:
    """The name of the algorithm whose expected time is least, dense ones included.

    It compares times, not what is delivered. ``topk_allgather`` and similar algorithms deliver
    everything that was selected, K elements. ``oktopk`` and ``gtopk`` deliver only k of them.
    ``a2sgd`` delivers none of it, and is left out.

    Args:
      n, k, P, alpha, beta, node: as in :func:`predict`.
      selection: seconds for the selection, which dense algorithms do not need.

    Returns:
      One of ``ALGORITHMS``. If several take the same time, it is the first of them.

    >>> choose(25_000_000, 25_000, 32, *link(1, 50))
    'oktopk'
    >>> choose(25_000_000, 25_000, 32, *link(100, 5), selection=0.02)
    'dense'
    """

    def seconds(algorithm: str) -> float:
        expected = predict(algorithm, n, k, P, alpha, beta, node=node).expected.seconds
        return expected if algorithm in DENSE else expected + selection

    return min((name for name in ALGORITHMS if name not in DIFFERING), key=seconds)


#: The names of the algorithms with a model. ``gtopk`` is a butterfly, ``gtopk_tree`` the published
#: tree.
ALGORITHMS = tuple(MODELS)
#: The algorithms that leave workers with different updates: what they save does not compare with
#: the others.
DIFFERING = ("a2sgd",)
#: The algorithms that send whole gradients.
DENSE = ("dense", "parameter_server", "torus", "dense_hierarchical")
