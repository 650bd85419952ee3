"""The cost of a synchronisation by the papers' α-β models.

A message of L words (of 4 bytes) takes ``α + β L`` seconds. A sparse element is two words, its
value and its index. ``log`` is to base 2 and rounded up, since that is the number of rounds if the
number of workers is not a power of two. Sums and all-gathers may also run round a ring. The model
does not contain the time for computing, selecting and summing.
"""

import dataclasses
import math

import numpy as np

from .._vector.arguments import check_count, check_fields, check_kind
from .models import MODELS, Cluster


def _check_link(alpha: float, beta: float) -> None:
    if not (0 <= alpha < math.inf and 0 <= beta < math.inf):
        raise ValueError(
            f"alpha is {alpha} and beta is {beta}; they are the seconds of a message and of a word, so they must be "
            "finite and at least 0: make them with jsparse.cost.link(gbit, microseconds)"
        )


@dataclasses.dataclass(frozen=True)
class Node:
    """A machine with several GPUs, the network inside it, and its links to the other machines.

    Its GPUs share its links, and what they send is spread over all of them evenly. A collective
    that the backend runs as a ring or a tree along the machines (the sum, the all-gather) crosses
    them once. Messages that workers send to each other directly (an all-to-all, the rounds of a
    butterfly) cross them side by side: of each worker's words, the part that leaves the machine.

    Attributes:
      gpus: the number of its GPUs, at least 1. Each is a worker, or one of the ``shards`` of a
        worker in :func:`predict`.
      alpha: seconds for a message inside it.
      beta: seconds for a word of each GPU inside it.
      links: the number of its links to the other machines, from 1 to ``gpus``: 1 where a machine
        has one network card, ``gpus`` where each GPU has one.
    """

    gpus: int = 1
    alpha: float = 0.0
    beta: float = 0.0
    links: int = 1

    def __post_init__(self):
        check_fields(self)
        check_count("gpus", self.gpus, "the number of a node's GPUs")
        _check_link(self.alpha, self.beta)
        if not 1 <= self.links <= self.gpus:
            raise ValueError(
                f"links is {self.links}; it is the number of a node's links to the others, which its {self.gpus} GPUs "
                f"share, so it must be from 1 to {self.gpus}"
            )

    def workers(self, shards: int) -> int:
        """How many whole workers of so many GPUs it holds; 1 if a worker fills several nodes."""
        return max(1, self.gpus // shards)


@dataclasses.dataclass(frozen=True)
class Load:
    """The cost of one synchronisation.

    A worker is one device, or several that hold a model in shards and send at the same time.

    Attributes:
      messages: how many messages a device of the busiest worker sends, one after the other.
      words: how many words of 4 bytes this device sends.
      seconds: how long this takes.
      worker_words: how many words all devices of the worker send together.
    """

    messages: float
    words: float
    seconds: float
    worker_words: float


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

    Raises:
      ValueError: a number is out of range.

    >>> link(1, 50)
    (5e-05, 3.2e-08)
    """
    check_kind("gbit", gbit, float)
    check_kind("microseconds", microseconds, float)
    if not gbit > 0:
        raise ValueError(f"the bandwidth is {gbit} Gbit/s; it must be above 0")
    if not microseconds >= 0:
        raise ValueError(f"the latency is {microseconds} microseconds; it must be at least 0")
    return microseconds / 1e6, 32 / (gbit * 1e9)


def predict(
    algorithm: str,
    n: int,
    k: int,
    P: int,
    alpha: float,
    beta: float,
    *,
    node: Node | None = None,
    ring: bool = False,
    shards: int = 1,
) -> Prediction:
    """The cost of one synchronisation, by the paper's model of the algorithm.

    Args:
      algorithm: one of ``ALGORITHMS``.
      n: the gradient's length.
      k: the number of elements that a worker selects, from 1 to n.
      P: the number of workers.
      alpha: seconds for a message; between nodes, if there are several.
      beta: seconds for a word of 4 bytes on a link; likewise (:func:`link` makes both).
      node: what a node holds. By default it holds one worker, whose GPUs share one link. Otherwise
        P must be a multiple of its workers, or not above their number. Only ``hitopk``, ``torus``
        and ``dense_hierarchical`` use both levels. The others run at ``alpha`` and ``beta``
        throughout (inside a single node, at the node's own), and share the nodes' links as
        :class:`Node` says.
      ring: whether sums and all-gathers run round a ring, as backends may have it: in
        ``2 (P-1)`` and ``P - 1`` messages, one after the other. The papers' formulas, the default,
        count ``2 log P`` and ``log P``. The words are the same.
      shards: the number of GPUs that hold a worker's parameters in equal shards. Each synchronises
        its shard with the same GPU of the other workers: n / shards elements, of which it selects
        k / shards, both rounded up. All of them do so at the same time. A node holds one or more
        whole workers, or a worker fills several nodes.

    Returns:
      Messages, words and seconds: best, expected and worst.

    Raises:
      ValueError: an argument is out of range, or a time is too large for a float.

    >>> predict("oktopk", 1_000_000, 10_000, 8, 0.25, 1.0).worst
    Load(messages=22.0, words=52500.0, seconds=52505.5, worker_words=52500.0)
    >>> predict("oktopk", 1_000_000, 10_000, 8, 0.25, 1.0, shards=4).worst
    Load(messages=22.0, words=13125.0, seconds=52505.5, worker_words=52500.0)
    >>> predict("oktopk", 1_000_000, 10_000, 8, 0.25, 1.0, shards=4, node=Node(4, links=4)).worst
    Load(messages=22.0, words=13125.0, seconds=13130.5, worker_words=52500.0)
    """
    if algorithm not in MODELS:
        raise ValueError(f"algorithm is {algorithm!r}; choose one of {', '.join(MODELS)}")
    for name, value in (("n", n), ("k", k), ("alpha", alpha), ("beta", beta)):
        check_kind(name, value, float)
    check_kind("P", P, int)
    check_count("shards", shards, "the number of a worker's GPUs")
    if max(n, P) > 2**53:
        raise ValueError(f"there are {n} elements and {P} workers; the model computes in floats: up to 2**53 of each")
    if not 1 <= k <= n:
        raise ValueError(f"k is {k}; for {n} elements it must be from 1 to {n}")
    node = Node(shards) if node is None else node
    if node.gpus % shards and shards % node.gpus:
        raise ValueError(
            f"workers of {shards} GPUs do not fill nodes of {node.gpus}: choose shards that divide {node.gpus}, or a "
            "multiple of it"
        )
    whole = node.workers(shards)
    local = min(whole, P)
    if P < 1 or P % local:
        raise ValueError(
            f"{P} workers do not fill nodes of {whole}: choose a multiple of {whole}, or from 1 to {whole}"
        )
    _check_link(alpha, beta)
    # What a node's links carry of a worker's GPUs, over what one link carries of one GPU.
    sharing = min(shards, node.gpus) / node.links
    if P == local > 1:
        alpha, beta, sharing = node.alpha, node.beta, 1
    sent = MODELS[algorithm](Cluster(-(-n // shards), -(-k // shards), P, local, ring))
    words = sent.words + sent.inner_words
    figures = (
        sent.messages + sent.inner_messages,
        words,
        sent.messages * alpha
        + sent.link * sharing * beta
        + sent.inner_messages * node.alpha
        + sent.inner_words * node.beta,
        words * shards,
    )
    loads = [np.broadcast_to(figure, 3).astype(float).tolist() for figure in figures]
    if not max(loads[2]) < 1e300:  # So that it is finite in milliseconds, too.
        raise ValueError(
            f"with alpha = {alpha} and beta = {beta} seconds, {algorithm} of {n} elements on {P} workers takes longer "
            "than floats can tell: give the network's real latency and bandwidth"
        )
    return Prediction(algorithm, *map(Load, *loads))


@dataclasses.dataclass(frozen=True)
class Rounds:
    """How often workers synchronise: the arguments of :func:`jsparse.local_steps`.

    Attributes:
      every: the inner steps of a round, at least 1. With 1, every step is synchronised.
      fragments: the parts of the parameters, at least 1, and at most ``every``. They are
        synchronised one after the other, evenly spread over a round.
      overlap: inner steps that are taken while a part's messages are under way; at most those
        between one part and the next.
    """

    every: int = 1
    fragments: int = 1
    overlap: int = 0

    def __post_init__(self):
        check_fields(self)
        if not 1 <= self.fragments <= self.every:
            raise ValueError(
                f"every is {self.every} and fragments is {self.fragments}; a round has at least one step, and at least "
                "one for each fragment"
            )
        if not 0 <= self.overlap <= self.every // self.fragments:
            raise ValueError(
                f"overlap is {self.overlap}; there are {self.every // self.fragments} steps from one fragment to the "
                "next, so it must be from 0 to so many"
            )

    def seconds(self, step: float, one: float) -> float:
        """The time of a round.

        Args:
          step: seconds of an inner step.
          one: seconds to synchronise a fragment.
        """
        return self.every * step + self.fragments * max(0.0, one - self.overlap * step)

    def budget(self, step: float, utilisation: float) -> float:
        """The most seconds that a fragment may take, so that computing is this part of a round.

        Args:
          step: seconds of an inner step.
          utilisation: the part of a round's time in which steps are computed, above 0, at most 1.

        Raises:
          ValueError: it is out of that range.
        """
        check_kind("utilisation", utilisation, float)
        if not 0 < utilisation <= 1:
            raise ValueError(f"utilisation is {utilisation}; it is a part of the time, above 0, at most 1")
        return self.overlap * step + self.every * step * (1 / utilisation - 1) / self.fragments


def bandwidth(
    algorithm: str,
    n: int,
    k: int,
    P: int,
    alpha: float,
    seconds: float,
    *,
    node: Node | None = None,
    ring: bool = False,
    shards: int = 1,
) -> float:
    """The least bandwidth between nodes at which a synchronisation takes at most so long.

    Args:
      algorithm, n, k, P, alpha, node, ring, shards: as in :func:`predict`.
      seconds: the time that it may take, expected.

    Returns:
      10^9 bits a second, of each link; ``inf`` if the latencies alone take as long, and 0 if
      nothing is sent between nodes.

    Raises:
      ValueError: as in :func:`predict`, or the time is not above 0.

    >>> bandwidth("oktopk", 1_000_000, 10_000, 8, 0.0, 1e-3)
    1.47
    """
    check_kind("seconds", seconds, float)
    if not seconds > 0:
        raise ValueError(f"seconds is {seconds}; it is the time that a synchronisation may take, above 0")
    free, slow = (
        predict(algorithm, n, k, P, alpha, beta, node=node, ring=ring, shards=shards).expected.seconds
        for beta in (0.0, 1.0)
    )
    if slow == free:
        return 0.0
    return 32 * (slow - free) / (seconds - free) / 1e9 if seconds > free else math.inf


def choose(
    n: int,
    k: int,
    P: int,
    alpha: float,
    beta: float,
    *,
    node: Node | None = None,
    selection: float = 0.0,
    ring: bool = False,
    shards: int = 1,
) -> str:
    """The name of the algorithm whose expected time is least, dense ones included.

    It compares times, not what is delivered. ``topk_allgather`` and similar algorithms deliver
    everything that was selected, K elements. ``oktopk`` and ``gtopk`` deliver only k of them.
    ``a2sgd`` delivers none of it, and is left out. So are ``quantized`` and ``qsgd``, which round
    every element.

    Args:
      n, k, P, alpha, beta, node, ring, shards: as in :func:`predict`.
      selection: seconds for the selection, which dense algorithms do not need. Of a sharded model,
        that is a GPU's selection from its shard.

    Returns:
      One of ``ALGORITHMS``. If several take the same time, it is the first of them.

    Raises:
      ValueError: as from :func:`predict`.

    >>> choose(25_000_000, 25_000, 32, *link(1, 50))
    'oktopk'
    >>> choose(25_000_000, 25_000, 32, *link(100, 5), selection=0.02)
    'dense'
    """

    def seconds(algorithm: str) -> float:
        prediction = predict(algorithm, n, k, P, alpha, beta, node=node, ring=ring, shards=shards)
        return prediction.expected.seconds + (0 if algorithm in DENSE else selection)

    return min((name for name in ALGORITHMS if name not in DIFFERING + ROUNDING), key=seconds)


#: The names of the algorithms with a model. ``gtopk`` is a butterfly, ``gtopk_tree`` the published
#: tree.
ALGORITHMS = tuple(MODELS)
#: The algorithms that leave workers with different updates: what they save does not compare with
#: the others.
DIFFERING = ("a2sgd",)
#: The algorithms that send all elements in fewer bits: what rounding takes and loses is not in the
#: model.
ROUNDING = ("quantized", "qsgd")
#: The algorithms that send whole gradients.
DENSE = ("dense", "parameter_server", "torus", "dense_hierarchical")
