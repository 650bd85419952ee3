"""What a synchronisation costs by the papers' α-β models.

A message of L words (of 4 bytes) takes ``α + β L`` seconds; a sparse element is two words, its value and its index.
``log`` is to base 2 and rounded up: that is how many rounds a number of workers takes that is no power of two. Time for
computing, selecting and summing is not in the model.
"""

import dataclasses
import math

import numpy as np

from .models import MODELS, Cluster


def _check_link(alpha: float, beta: float) -> None:
    if not (0 <= alpha < math.inf and 0 <= beta < math.inf):
        raise ValueError(
            f"alpha is {alpha} and beta {beta}; they are seconds a message and a word, at least 0: "
            "jsparse.cost.link(gbit, microseconds) makes them"
        )


@dataclasses.dataclass(frozen=True)
class Node:
    """A machine with several workers, and the network inside it.

    Its workers share one link to the other machines. A collective that the backend runs as a ring or a tree along the
    machines (the sum, the all-gather) crosses that link once. What workers send to each other directly (an all-to-all,
    the rounds of a butterfly) crosses it side by side: of each worker's words, the part that leaves the machine.

    Attributes:
      gpus: workers in it, at least 1.
      alpha: seconds a message inside it.
      beta: seconds a word inside it, of each worker.
    """

    gpus: int = 1
    alpha: float = 0.0
    beta: float = 0.0

    def __post_init__(self):
        if self.gpus < 1:
            raise ValueError(f"gpus is {self.gpus}; a node has at least 1 worker")
        _check_link(self.alpha, self.beta)


@dataclasses.dataclass(frozen=True)
class Load:
    """What one synchronisation costs.

    Attributes:
      messages: that the busiest worker sends, one after the other.
      words: of 4 bytes, that it sends.
      seconds: that this takes.
    """

    messages: float
    words: float
    seconds: float


@dataclasses.dataclass(frozen=True)
class Prediction:
    """What an algorithm costs, by where the workers' elements lie.

    Attributes:
      algorithm: its name.
      best: all workers have the same indices: the sum has K = k elements.
      expected: indices are drawn uniformly: K is :func:`expected_union`.
      worst: no two workers have one in common: K = k P, and at most n.
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
      Seconds a message, and seconds a word of 4 bytes.

    >>> link(1, 50)
    (5e-05, 3.2e-08)
    """
    if not gbit > 0:
        raise ValueError(f"the bandwidth is {gbit} Gbit/s; it is above 0")
    if not microseconds >= 0:
        raise ValueError(f"the latency is {microseconds} microseconds; it is at least 0")
    return microseconds / 1e6, 32 / (gbit * 1e9)


def predict(algorithm: str, n: int, k: int, P: int, alpha: float, beta: float, *, node: Node = Node()) -> Prediction:
    """What one synchronisation costs, by the paper's model of the algorithm.

    Args:
      algorithm: one of ``ALGORITHMS``.
      n: the gradient's length.
      k: elements that a worker selects, from 1 to n.
      P: workers.
      alpha: seconds a message; between nodes, where there are several.
      beta: seconds a word of 4 bytes; likewise (:func:`link` makes both).
      node: what is inside a node; P is a multiple of its workers, or not above them. Only ``hitopk``, ``torus`` and
        ``dense_hierarchical`` use both levels. The others run at ``alpha`` and ``beta`` throughout (inside a single
        node, at its own), sharing the nodes' links as :class:`Node` says.

    Returns:
      Messages, words and seconds, at best, at worst and expected.

    Raises:
      ValueError: an argument is out of range.

    >>> predict("oktopk", 1_000_000, 10_000, 8, 0.25, 1.0).worst
    Load(messages=22.0, words=52500.0, seconds=52505.5)
    """
    if algorithm not in MODELS:
        raise ValueError(f"algorithm is {algorithm!r}; choose one of {', '.join(MODELS)}")
    if not 1 <= k <= n:
        raise ValueError(f"k is {k}; of {n} elements it is from 1 to {n}")
    gpus = min(node.gpus, P)
    if P < 1 or P % gpus:
        raise ValueError(f"{P} workers do not fill nodes of {node.gpus}: take a multiple of that, or fewer")
    _check_link(alpha, beta)
    if P == gpus > 1:
        alpha, beta = node.alpha, node.beta
    sent = MODELS[algorithm](Cluster(n, k, P, gpus))
    messages, words, seconds = (
        np.broadcast_to(figure, 3).astype(float).tolist()
        for figure in (
            sent.messages + sent.inner_messages,
            sent.words + sent.inner_words,
            sent.messages * alpha + sent.link * beta + sent.inner_messages * node.alpha + sent.inner_words * node.beta,
        )
    )
    return Prediction(algorithm, *map(Load, messages, words, seconds))


def choose(n: int, k: int, P: int, alpha: float, beta: float, *, node: Node = Node(), selection: float = 0.0) -> str:
    """Names the algorithm whose expected time is least, dense ones included.

    It compares times, not what is delivered: ``topk_allgather`` and its like deliver everything that was selected, K
    elements, ``oktopk`` and ``gtopk`` only k of them. ``a2sgd``, which delivers nothing of it, is left out.

    Args:
      n, k, P, alpha, beta, node: as in :func:`predict`.
      selection: seconds that selecting takes, which dense algorithms do without.

    Returns:
      One of ``ALGORITHMS``; of equals the first.

    >>> choose(25_000_000, 25_000, 32, *link(1, 50))
    'oktopk'
    >>> choose(25_000_000, 25_000, 32, *link(100, 5), selection=0.02)
    'dense'
    """

    def seconds(algorithm: str) -> float:
        expected = predict(algorithm, n, k, P, alpha, beta, node=node).expected.seconds
        return expected if algorithm in DENSE else expected + selection

    return min((name for name in ALGORITHMS if name not in DIFFERING), key=seconds)


#: The names of the algorithms that are modelled. ``gtopk`` is a butterfly, ``gtopk_tree`` the published tree.
ALGORITHMS = tuple(MODELS)
#: Those of them that leave workers with updates of their own: what they save is not to be compared with the others'.
DIFFERING = ("a2sgd",)
#: Those of them that send whole gradients.
DENSE = ("dense", "parameter_server", "torus", "dense_hierarchical")
