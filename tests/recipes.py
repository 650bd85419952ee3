"""Rounds of local steps by hand, as their papers write them, and the table of recipes."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jsparse
import oracles
from transports import AXIS

SIZE = 4
EVERY = 5
EXAMPLES = 24  # Of all workers in a step.
TILE = 4  # The side of a tile, and 2 of its elements are sent.
BUCKET = 32  # The values that share a scale in four bits.
DENSITY = 0.1

Tree = dict[str, np.ndarray]


def params() -> Tree:
    rng = np.random.default_rng(1)
    layers = rng.standard_normal((3, 6, 6)) / 4
    return jax.tree.map(np.float32, {"in": rng.standard_normal((4, 6)), "layers": layers, "out": np.ones(6)})


def loss_fn(params, batch):
    x, y = batch
    h = jnp.tanh(x @ params["in"])
    for layer in params["layers"]:
        h = h + jnp.tanh(h @ layer)
    return jnp.mean((h @ params["out"] - y) ** 2)


def batches(seed: int = 0, every: int = EVERY):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((every, EXAMPLES, 4)).astype(np.float32)
    return x, np.sin(x.sum(-1))


def poisoned(*spoilt: tuple[int, int, int]):
    """Batches in which some gradients are not finite: those of ``(round, step, worker)``."""

    def data(seed: int):
        x, y = batches(seed)
        for number, step, worker in spoilt:
            if number == seed:
                y[step, worker * EXAMPLES // SIZE] = np.inf
        return x, y

    return data


gradient = jax.jit(jax.value_and_grad(loss_fn))


class Sgd:
    """Stochastic gradient descent; with momentum, Nesterov's or the older one."""

    def __init__(self, rate: float, momentum: float = 0.0, nesterov: bool = False):
        self.rate, self.momentum, self.nesterov = rate, momentum, nesterov
        self.velocity: Tree = {}

    def __call__(self, grads: Tree, params: Tree) -> Tree:
        new = {}
        for name, g in grads.items():
            v = self.velocity[name] = g + self.momentum * self.velocity.get(name, 0)
            new[name] = params[name] - self.rate * (g + self.momentum * v if self.nesterov else v)
        return new


class Adam:
    """AdamW: Loshchilov and Hutter, 2019, Algorithm 2; with Nesterov's momentum, Dozat's NAdam."""

    def __init__(self, rate: float, decay: float = 0.0, nesterov: bool = False):
        self.rate, self.decay, self.nesterov = rate, decay, nesterov
        self.m: Tree = {}
        self.v: Tree = {}
        self.t = 0

    def __call__(self, grads: Tree, params: Tree) -> Tree:
        self.t += 1
        new = {}
        for name, g in grads.items():
            v = self.v[name] = 0.999 * self.v.get(name, 0) + 0.001 * g**2
            m = self.m[name] = 0.9 * self.m.get(name, 0) + 0.1 * g
            m = unbiased(m, g, 0.9, self.t) if self.nesterov else m / (1 - 0.9**self.t)
            v = v / (1 - 0.999**self.t)
            new[name] = params[name] - self.rate * (m / (np.sqrt(v) + 1e-8) + self.decay * params[name])
        return new


def unbiased(m: np.ndarray, g: np.ndarray, beta: float, t: int) -> np.ndarray:
    """Nesterov's average of a gradient and the momentum, each over the sum of its weights."""
    return beta * m / (1 - beta ** (t + 1)) + (1 - beta) * g / (1 - beta**t)


class Muon:
    """Muon (Jordan et al., 2024) for matrices, as optax has it, and NAdam for the rest.

    Jordan's code has no division by the sums of the weights. So the gradient weighs less there in
    the first steps.
    """

    def __init__(self, rate: float, beta: float = 0.95):
        self.rate, self.beta, self.t = rate, beta, 0
        self.m: Tree = {}
        self.adam = Adam(rate, nesterov=True)

    def __call__(self, grads: Tree, params: Tree) -> Tree:
        self.t += 1
        new = self.adam({name: g for name, g in grads.items() if g.ndim != 2}, params)
        for name, g in grads.items():
            if g.ndim != 2:
                continue
            m = self.m[name] = self.beta * self.m.get(name, 0) + (1 - self.beta) * g
            direction = self.orthogonal(unbiased(m, g, self.beta, self.t))
            new[name] = params[name] - self.rate * np.sqrt(max(1, g.shape[1] / g.shape[0])) * direction
        return new

    @staticmethod
    def orthogonal(m: np.ndarray) -> np.ndarray:
        """Five steps of Newton and Schulz."""
        x = m / np.linalg.norm(m)
        for _ in range(5):
            gram = x @ x.T
            x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
        return x


# What a synchronisation makes of the outer gradients of all workers: their mean. ``state`` is that
# of the library after the round, for what no paper determines.
Mean = Callable[[list[Tree], Any], Tree]


def plain_mean(moved: list[Tree], state: Any) -> Tree:
    return {name: np.mean([tree[name] for tree in moved], axis=0) for name in moved[0]}


def of_vectors(mean: Callable[[np.ndarray, Any], np.ndarray]) -> Mean:
    """A mean of trees, from one of vectors of all elements, shape ``(P, n)``."""

    def of_trees(moved: list[Tree], state: Any) -> Tree:
        names = sorted(moved[0])
        vector = mean(np.stack([np.concatenate([tree[name].ravel() for name in names]) for tree in moved]), state)
        ends = np.cumsum([moved[0][name].size for name in names])[:-1]
        parts = zip(names, np.split(vector, ends), strict=True)
        return {name: part.reshape(moved[0][name].shape) for name, part in parts}

    return of_trees


def rounded(values: np.ndarray, magnitudes: np.ndarray) -> np.ndarray:
    """Each row of values in four bits."""
    return np.stack([oracles.nearest(row, magnitudes, BUCKET) if row.any() else row for row in values])


def in_four_bits(magnitudes: np.ndarray) -> Mean:
    """Streaming DiLoCo, section 2.4: each worker's outer gradient is rounded, and nothing else."""
    return of_vectors(lambda moved, state: rounded(moved, magnitudes).mean(0))


def in_four_bits_twice(magnitudes: np.ndarray) -> Mean:
    """A worker adds up a part of all vectors, and rounds the sum. Its own part is not sent."""

    def mean(moved: np.ndarray, state: Any) -> np.ndarray:
        length = -(-moved.shape[1] // (2 * SIZE)) * 2
        total = []
        for owner in range(SIZE):
            part = moved[:, owner * length : (owner + 1) * length]
            sent = np.where(np.arange(SIZE)[:, None] == owner, part, rounded(part, magnitudes))
            total.append(rounded(sent.sum(0)[None], magnitudes)[0])
        return np.concatenate(total) / SIZE

    return of_vectors(mean)


class SparseLoCo:
    """SparseLoCo (Sarfi et al., 2025): block top-k in tiles, 2 bits, a residual that decays.

    Attributes:
      over: what a sum is divided by: ``"workers"`` as in the paper, ``"contributors"`` as in its
        code.
    """

    def __init__(self, over: str = "workers"):
        self.over = over
        self.residuals: list[Tree] = [{} for _ in range(SIZE)]

    def __call__(self, moved: list[Tree], state: Any) -> Tree:
        sums, counts = ({name: np.zeros(x.size) for name, x in moved[0].items()} for _ in range(2))
        for tree, residual in zip(moved, self.residuals, strict=True):
            for name, x in tree.items():
                order = oracles.tile_order(x.shape, TILE)
                acc = 0.95 * residual.get(name, 0) + x.ravel()[order]
                chosen = oracles.block_top_k(acc, 2, TILE**2)
                sent = np.zeros_like(acc)
                sent[chosen] = oracles.codebook(acc[chosen], 2)
                residual[name] = acc - sent
                sums[name][order] += sent
                counts[name][order[chosen]] += 1
        over = {name: SIZE if self.over == "workers" else np.maximum(count, 1) for name, count in counts.items()}
        return {name: (total / over[name]).reshape(moved[0][name].shape) for name, total in sums.items()}


class OkTopk:
    """Ok-Topk, Algorithm 1, of outer gradients. A threshold that it reuses is the library's."""

    def __init__(self):
        self.residual: Any = 0
        self.starts, self.step = None, 0

    def __call__(self, moved: list[Tree], state: Any) -> Tree:
        return of_vectors(self.mean)(moved, state)

    def mean(self, moved: np.ndarray, state: Any) -> np.ndarray:
        reduce = state.buckets[0].reducer.reduce
        n = moved.shape[1]
        if self.starts is None:
            self.starts = np.arange(SIZE) * -(-n // SIZE)
        acc = self.residual + moved
        threshold = np.asarray(reduce.threshold)[0]
        want = oracles.oktopk(acc, density=DENSITY, step=self.step, starts=self.starts, threshold=threshold)
        self.residual = acc - want.delivered
        self.starts, self.step = np.asarray(reduce.starts)[:SIZE], self.step + 1
        return want.total / SIZE


class ByHand:
    """The algorithms as their papers write them, one step and one worker after another.

    Streaming DiLoCo is Algorithm 2 of its paper: fragment p of F is sent H (p + 1) / F - τ steps
    after the beginning of a round, and arrives τ steps later. DiLoCo is the case F = 1, τ = 0.

    Args:
      inner, outer, sync: make a worker's optimizer, the outer one, and the synchronisation of a
        fragment.
      which: the fragment of each leaf, or of each index of its leading axis.
      poison: the (round, step, worker) whose gradients are not finite.
      steps, weights, overlap, merge, eager: as for ``local_steps``.
    """

    def __init__(
        self,
        *,
        inner: Callable[[], Any] = lambda: Adam(1e-2),
        outer: Callable[[], Any] = lambda: Sgd(0.7, 0.9, nesterov=True),
        sync: Callable[[], Mean] = lambda: plain_mean,
        which: dict[str, Any] | None = None,
        steps: Sequence[int] = (EVERY,) * SIZE,
        weights: str = "workers",
        overlap: int = 0,
        merge: float = 0.0,
        eager: bool = False,
        poison: Sequence[tuple[int, int, int]] = (),
    ):
        self.which = which or dict.fromkeys(params(), 0)
        self.count = 1 + max(int(np.max(f)) for f in self.which.values())
        self.steps, self.weights, self.overlap, self.merge, self.eager = steps, weights, overlap, merge, eager
        self.poison = poison
        start = {name: leaf.astype(np.float64) for name, leaf in params().items()}
        self.anchors = [dict(start) for _ in range(SIZE)]  # They differ only with eager updates.
        self.own = [dict(start) for _ in range(SIZE)]
        self.inner = [inner() for _ in range(SIZE)]
        self.outer = [[outer() for _ in range(self.count)] for _ in range(SIZE)]
        self.sync = [sync() for _ in range(self.count)]
        self.since = np.zeros((SIZE, self.count))
        self.taken, self.number = np.zeros(SIZE, int), 0
        nothing = {name: np.zeros_like(leaf) for name, leaf in start.items()}
        self.last = [[self.take(nothing, f)] * SIZE for f in range(self.count)]

    def rows(self, name: str, f: int) -> Any:
        """Where a leaf has a fragment: everywhere, or in some rows."""
        which = np.asarray(self.which[name])
        return ... if which.ndim == 0 else np.flatnonzero(which == f)

    def take(self, tree: Tree, f: int) -> Tree:
        return {name: x[self.rows(name, f)] for name, x in tree.items() if (np.asarray(self.which[name]) == f).any()}

    def put(self, tree: Tree, f: int, part: Tree) -> None:
        for name, new in part.items():
            tree[name] = tree[name].copy()
            tree[name][self.rows(name, f)] = new

    def outer_gradients(self, f: int) -> list[Tree]:
        return [{name: anchor[name] - own[name] for name in own} for anchor, own in self.both(f)]

    def both(self, f: int) -> list[tuple[Tree, Tree]]:
        """A fragment of the anchors, and of workers' own parameters."""
        return [(self.take(anchor, f), self.take(own, f)) for anchor, own in zip(self.anchors, self.own, strict=True)]

    def weighted(self, f: int, moved: list[Tree]) -> list[Tree] | None:
        """What workers moved, so scaled that the plain mean is the weighted one."""
        weights = np.minimum(self.since[:, f], 1) if self.weights == "workers" else self.since[:, f]
        if not weights.sum():
            return None
        # A mean over those that sent an element needs no factor.
        factors = weights * (1 if getattr(self.sync[f], "over", "") == "contributors" else SIZE / weights.sum())
        return [{name: w * x for name, x in tree.items()} for w, tree in zip(factors, moved, strict=True)]

    def arrive(self, f: int, means: list[Tree]) -> None:
        """Each worker's outer step, and what it makes of its own parameters."""
        for i, mean in enumerate(means):
            self.put(self.anchors[i], f, self.outer[i][f](mean, self.take(self.anchors[i], f)))

    def merged(self, f: int) -> None:
        for i, (anchor, own) in enumerate(self.both(f)):
            self.put(self.own[i], f, {name: self.merge * own[name] + (1 - self.merge) * anchor[name] for name in own})

    def step(self, i: int, number: int, batch: Any, losses: np.ndarray) -> None:
        share = EXAMPLES // SIZE
        part = jax.tree.map(lambda x: x[number, i * share : (i + 1) * share], batch)
        loss, grads = gradient(jax.tree.map(np.float32, self.own[i]), part)
        if (self.number, number, i) in self.poison:
            return
        self.own[i] = self.inner[i]({name: np.asarray(g, np.float64) for name, g in grads.items()}, self.own[i])
        self.since[i] += 1
        self.taken[i] += 1
        losses[number, i] = loss

    def round(self, batch: Any, state: Any) -> np.ndarray:
        """One round; the losses of its steps and workers, NaN for those that were not taken."""
        losses, self.taken = np.full((EVERY, SIZE), np.nan), np.zeros(SIZE, int)
        for f in range(self.count):
            begin, end = EVERY * f // self.count, EVERY * (f + 1) // self.count
            # A worker has taken its share of the steps at each time, and a step that is begun.
            early, late = (
                [math.ceil(s * b / EVERY) - math.ceil(s * a / EVERY) for s in self.steps]
                for a, b in ((begin, end - self.overlap), (end - self.overlap, end))
            )
            for i in range(SIZE):
                for number in range(begin, begin + early[i]):
                    self.step(i, number, batch, losses)
            moved = self.outer_gradients(f)
            if self.eager:
                # The mean of the round before, in which a worker's own share is replaced.
                mean, before = self.sync[f](self.last[f], state.sync[f]), self.last[f]
                self.last[f] = self.weighted(f, moved) or [{name: 0 * x for name, x in moved[0].items()}] * SIZE
                pairs = list(zip(self.last[f], before, strict=True))
                means = [{name: mean[name] + (new[name] - old[name]) / SIZE for name in mean} for new, old in pairs]
            else:
                sent = self.weighted(f, moved)
                means = [] if sent is None else [self.sync[f](sent, state.sync[f])] * SIZE
            self.since[:, f] = 0
            for i in range(SIZE):
                for number in range(end - self.overlap, end - self.overlap + late[i]):
                    self.step(i, number, batch, losses)
            self.arrive(f, means)
            self.merged(f)
            if self.merge == 0:
                self.since[:, f] = 0  # The steps since it was sent are discarded.
        self.number += 1
        return losses


def by_layers(params):
    return {"in": 0, "layers": np.array([0, 1, 0]), "out": 1}


@dataclasses.dataclass(frozen=True, eq=False)
class Recipe:
    """A form of rounds.

    Attributes:
      options: of ``local_steps``.
      hand: of :class:`ByHand`.
      close: the relative tolerance; more where an optimizer enlarges rounding.
    """

    options: dict[str, Any]
    hand: dict[str, Any]
    close: float = 1e-5


def both(**options: Any) -> Recipe:
    """A form whose options have the same names by hand."""
    return Recipe(options, options)


E3M0 = np.array([0, *(2.0 ** np.arange(-6, 1))])
SEVENTHS = np.arange(8) / 7
UNLIKE = {"steps": (5, 3, 1, 0)}
LAYERS = {"fragments": by_layers}, {"which": by_layers(None)}


def in_layers(**options: Any) -> Recipe:
    return Recipe(LAYERS[0] | options, LAYERS[1] | options)


def nesterov(rate: float, momentum: float = 0.9) -> tuple[Any, Any]:
    """optax's, and by hand."""
    return optax.sgd(rate, momentum=momentum, nesterov=True), lambda: Sgd(rate, momentum, nesterov=True)


def sparseloco(over: Any) -> Recipe:
    sync = jsparse.sparse_allreduce(
        AXIS,
        select=jsparse.select.BlockTopK(2, block=TILE**2),
        scope="leaf",
        tiles=TILE,
        allreduce=jsparse.allreduce.TopkAllGather(),
        wire=jsparse.wire.Compact(jsparse.quantize.Codebook(2)),
        error_feedback=jsparse.ErrorFeedback(decay=0.95),
        mean=over,
    )
    return Recipe(
        {"sync": sync, "outer": optax.sgd(1.0)}, {"sync": lambda: SparseLoCo(over), "outer": lambda: Sgd(1.0)}
    )


def four_bits(quantize: Any, **options: Any) -> Any:
    return jsparse.quantized(AXIS, quantize=quantize(bucket=BUCKET), error_feedback=False, **options)


# What local_steps itself does, whatever the synchronisation and the optimizers are.
FORMS = {
    "unlike": both(**UNLIKE),
    "weighted": both(**UNLIKE, weights="steps"),
    "fragments": Recipe({"fragments": 2}, {"which": {"in": 0, "layers": 1, "out": 1}}),
    "layers": in_layers(),
    "overlap": both(overlap=2),
    "merged": in_layers(overlap=1, merge=0.5),
    "merged-unlike": in_layers(overlap=1, merge=0.25, steps=(5, 4, 2, 1), weights="steps"),
    "eager-layers": in_layers(eager=True),
    "eager-weighted": both(**UNLIKE, weights="steps", eager=True),
}
# The methods that docs/local_steps.md has.
RECIPES = {
    "local_sgd": Recipe(
        {"inner": optax.sgd(0.1), "outer": optax.sgd(1.0)}, {"inner": lambda: Sgd(0.1), "outer": lambda: Sgd(1.0)}
    ),
    "diloco": Recipe({"inner": optax.adamw(1e-2, weight_decay=0.1)}, {"inner": lambda: Adam(1e-2, decay=0.1)}),
    "muloco": Recipe(
        {"inner": optax.contrib.muon(0.02), "outer": nesterov(0.7, 0.6)[0]},
        {"inner": lambda: Muon(0.02), "outer": nesterov(0.7, 0.6)[1]},
        close=1e-3,
    ),
    "streaming": Recipe(
        LAYERS[0] | {"overlap": 1, "merge": 0.5, "outer": nesterov(0.4)[0], "sync": four_bits(jsparse.quantize.Float4)},
        LAYERS[1] | {"overlap": 1, "merge": 0.5, "outer": nesterov(0.4)[1], "sync": lambda: in_four_bits_twice(E3M0)},
    ),
    "eager": both(eager=True),
    "float4": Recipe({"sync": four_bits(jsparse.quantize.Float4, split=False)}, {"sync": lambda: in_four_bits(E3M0)}),
    "int4": Recipe({"sync": four_bits(jsparse.quantize.Int4)}, {"sync": lambda: in_four_bits_twice(SEVENTHS)}),
    "sparseloco": sparseloco("workers"),
    "sparseloco-contributors": sparseloco("contributors"),
    "oktopk": Recipe({"sync": jsparse.oktopk(AXIS, density=DENSITY)}, {"sync": OkTopk}),
}
