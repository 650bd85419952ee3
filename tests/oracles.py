"""What the algorithms should do, in NumPy, from the papers' text.

These functions are slow and plain, and share no code with the library.
"""

import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np


class Expected(NamedTuple):
    """The outcome of one step.

    Attributes:
      total: shape ``(n,)``, the sum of what was delivered.
      delivered: shape ``(P, n)``, each worker's share of it.
      exact: whether the outcome is fully determined. Otherwise an implementation may deliver a
        little less.
      overflowed: shape ``(P,)``, how many of each worker's selected elements did not fit into a
        message; None if it is not computed.
    """

    total: np.ndarray
    delivered: np.ndarray
    exact: bool = True
    overflowed: np.ndarray | None = None


def top_k(acc: np.ndarray, k: int) -> np.ndarray:
    """Indices of the k largest magnitudes, ascending.

    The lowest index wins a tie. Zeros are never selected.
    """
    order = np.lexsort((np.arange(len(acc)), -np.abs(acc)))[:k]
    return np.sort(order[acc[order] != 0])


def ms_top_k(x: np.ndarray, k: int, searches: int, turn: int) -> np.ndarray:
    """Algorithm 1 of MSTopK, with its ratio over the representable numbers: ascending indices.

    If fewer than k elements reach the mean, it searches below the mean. The window begins at
    ``turn`` times its length, round a circle.
    """
    a = np.abs(x)
    bits = a.view(np.int32)

    def nnz(threshold: int) -> int:
        return np.count_nonzero((bits >= threshold) & (a > 0))

    tiny, mean = np.array([np.finfo(x.dtype).tiny, a.mean(dtype=np.float64)], x.dtype).view(np.int32).tolist()
    if nnz(tiny) <= k:
        return np.flatnonzero(a)
    l, r = (mean, int(bits.max()) + 1) if nnz(mean) > k else (tiny, mean)
    for _ in range(searches):
        threshold = l + (r - l) // 2
        if nnz(threshold) <= k:
            r = threshold
        else:
            l = threshold
    above = np.flatnonzero(bits >= r)
    between = np.flatnonzero((bits < r) & (bits >= l))
    missing = k - len(above)
    return np.sort(np.concatenate([above, np.roll(between, -(turn * missing % max(len(between), 1)))[:missing]]))


def ms_top_k_as_printed(x: np.ndarray, k: int, searches: int, rng: np.random.Generator) -> np.ndarray:
    """Algorithm 1 of MSTopK, line by line: ascending indices.

    If every probe finds more than k elements, ``thres1`` stays 0, and all elements are chosen.
    """
    a = np.abs(x.astype(np.float64))
    mean, u = a.mean(), a.max()
    l, r = 0.0, 1.0
    k1, k2 = 0, len(x)
    thres1 = thres2 = 0.0
    for _ in range(searches):
        ratio = l + (r - l) / 2
        thres = mean + ratio * (u - mean)
        nnz = np.count_nonzero(a >= thres)
        if nnz <= k:
            r = ratio
            if nnz > k1:
                k1, thres1 = nnz, thres
        else:
            l = ratio
            if nnz < k2:
                k2, thres2 = nnz, thres
    first = np.flatnonzero(a >= thres1)
    second = np.flatnonzero((a < thres1) & (a >= thres2))
    rand = rng.integers(max(1, len(second) - (k - k1) + 1))
    return np.sort(np.concatenate([first, second[rand : rand + k - k1]]))


def dgc_thresholds(acc: np.ndarray, density: float, stride: int) -> list[float]:
    """DGC's threshold for each first element of its sample.

    See ``_sparsify`` in the authors' ``dgc/compression.py``.
    """
    k = max(1, round(density * len(acc)))
    importance, found = np.abs(acc), []
    for first in range(stride):
        sample = importance[first::stride][: len(acc) // stride]
        threshold = np.sort(sample)[-math.ceil(density * len(sample))]
        for _ in range(10):
            if np.count_nonzero(importance >= threshold) >= 0.8 * k:
                break
            threshold = np.float32(threshold * np.float32(0.8))
        if np.count_nonzero(importance >= threshold) > 1.3 * k:
            threshold = np.sort(importance)[-k]
        found.append(threshold)
    return found


def stochastic_probabilities(v: np.ndarray, k: int, rule: str) -> np.ndarray:
    """The two rules of the thesis, section 2.4.1."""
    v = np.abs(v.astype(np.float64))
    n, one, infinity = len(v), v.sum(), v.max()
    if rule == "capped":
        return np.minimum(1, k * v / one)
    if infinity <= one / k:
        return k * v / one
    epsilon = (k * infinity - one) / (n - k)
    return k * (v + epsilon) / (one + n * epsilon)


def stochastic_in_buckets(
    v: np.ndarray, k: int, numbers: np.ndarray, *, bucket: int, step: int, rule: str = "exact"
) -> np.ndarray:
    """The thesis's selector, section 4.3.3: ascending indices.

    An element is drawn if its number is below its probability by the norms of its bucket. The
    first drawn elements of a bucket are taken, up to its share of k. Shares that are no whole
    numbers go round by multiples of the golden ratio.
    """
    n = len(v)
    turn = int(np.float32(step * 2654435769 % 2**32 // 2**8) * np.float32(n / 2**24))
    chosen = []
    for begin in range(0, n, bucket):
        part = v[begin : begin + bucket]
        share = ((begin + len(part)) * k + turn) // n - (begin * k + turn) // n
        if share == 0 or not part.any():
            continue
        certain = share >= len(part)
        probability = np.ones(len(part)) if certain else stochastic_probabilities(part, share, rule)
        drawn = (numbers[begin : begin + bucket] < probability) | (probability > 1 - 1e-9)
        chosen.append(begin + np.flatnonzero(drawn & (part != 0))[:share])
    return np.concatenate([*chosen, np.zeros(0, int)])


def block_top_k(acc: np.ndarray, k: int, block: int) -> np.ndarray:
    """The k largest magnitudes of each block: ascending indices.

    Of a shorter last block k is scaled by its length, and at least 1.
    """
    begins = range(0, len(acc), block)
    parts = [acc[begin : begin + block] for begin in begins]
    counts = [max(1, round(min(k, block) / block * len(part))) for part in parts]
    chosen = [begin + top_k(part, count) for begin, part, count in zip(begins, parts, counts, strict=True)]
    return np.concatenate([*chosen, np.zeros(0, int)])


def top_k_per_leaf(acc: np.ndarray, density: float, lengths: Sequence[int]) -> np.ndarray:
    """The ``max(1, round(density n))`` largest magnitudes of each leaf: ascending indices."""
    edges = np.cumsum([0, *lengths])
    chosen = [
        begin + top_k(acc[begin : begin + n], max(1, round(density * n)))
        for begin, n in zip(edges, lengths, strict=False)
    ]
    return np.concatenate(chosen)


def tile_order(shape: tuple[int, ...], side: int | None) -> np.ndarray:
    """A leaf's elements in the order of its tiles, by their places in the leaf.

    Elements of a tile are compared by the kind of their tile first (whole, at the right edge, at
    the bottom, in the corner), then by the tile's place, then by their own.
    """
    places = np.arange(math.prod(shape))
    lengths = [length for length in shape if length > 1]
    if side is None or len(lengths) < 2:
        return places
    rows, columns = math.prod(lengths[:-1]), lengths[-1]
    row, column = places // columns, places % columns
    narrow, low = column >= columns // side * side, row >= rows // side * side
    return np.lexsort((column, row, column // side, row // side, narrow, low))


def reused_threshold(acc: np.ndarray, k: int, last: float, step: int, period: int) -> np.ndarray:
    """Lines 2 to 4 of Ok-Topk's Algorithm 1, and what they select: ascending indices.

    ``last`` is the threshold of the step before. If more than k elements reach the threshold, k of
    them are taken, others in each step.
    """
    magnitudes = np.abs(acc)
    threshold = np.sort(magnitudes)[-k] if step % period == 0 or last == 0 else last
    chosen = np.flatnonzero((magnitudes >= threshold) & (acc != 0))
    return np.sort(np.roll(chosen, -(step * k % len(chosen)))[:k]) if len(chosen) > k else chosen


def dense(accs: np.ndarray, **_) -> Expected:
    return Expected(accs.sum(0, dtype=accs.dtype), accs)


def topk_allgather(accs: np.ndarray, *, density: float, selected: list[np.ndarray] | None = None, **_) -> Expected:
    """TopkA: every worker's top-k, added in the order of ranks.

    ``selected`` replaces the top-k.
    """
    k = max(1, round(density * accs.shape[1]))
    delivered = np.zeros_like(accs)
    for worker, acc in enumerate(accs):
        chosen = top_k(acc, k) if selected is None else selected[worker]
        delivered[worker, chosen] = acc[chosen]
    return Expected(_ordered_sum(delivered), delivered)


def vote(accs: np.ndarray, **_) -> np.ndarray:
    """The sign of the sum of the workers' signs; a tie gives 0."""
    return np.sign(np.sign(accs).sum(0))


def over_contributors(accs: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """The largest k of each worker: each element's sum over the workers that sent it, divided by
    their number; and what each worker sent.
    """
    sent = np.zeros(accs.shape)
    for mine, acc in zip(sent, accs, strict=True):
        chosen = top_k(acc, k)
        mine[chosen] = acc[chosen]
    return sent.sum(0) / np.maximum(np.count_nonzero(sent, axis=0), 1), sent


def one_bit(accs: np.ndarray, sizes: Sequence[int], bucket: int) -> tuple[np.ndarray, np.ndarray]:
    """The mean by signs in both directions, and what each worker delivers, shape ``(P, n)``.

    A leaf is cut into buckets. Its last one is filled up with its own elements, in turns. Each
    worker owns as many buckets, of which the last ones are zeros.
    """
    workers = len(accs)
    leaves = np.split(accs, np.cumsum(sizes)[:-1], axis=1)
    rows = [leaf[:, begin : begin + bucket] for leaf in leaves for begin in range(0, leaf.shape[1], bucket)]
    wide = np.stack([[np.resize(mine, bucket) for mine in row] for row in rows], axis=1).astype(np.float64)
    wide = np.concatenate([wide, np.zeros((workers, -wide.shape[1] % workers, bucket))], axis=1)
    owner = np.arange(wide.shape[1]) // (wide.shape[1] // workers)

    def signs(rows: np.ndarray) -> np.ndarray:
        return np.sqrt((rows**2).mean(-1, keepdims=True)) * np.where(rows < 0, -1, 1)

    own = np.arange(workers)[:, None, None] == owner[None, :, None]
    sent = np.where(own, wide, signs(wide))
    total = sent.sum(0)
    delivered = np.where(own, wide + (signs(total) - total), sent)

    def narrow(rows: np.ndarray) -> np.ndarray:
        parts, first = [], 0
        for size in sizes:
            count = -(-size // bucket)
            parts.append(rows[first : first + count].reshape(-1)[:size])
            first += count
        return np.concatenate(parts)

    return narrow(signs(total)) / workers, np.array(list(map(narrow, delivered)))


def cyclic_top_k(accs: np.ndarray, *, density: float, step: int, **_) -> Expected:
    """CLT-k of ScaleCom: the top-k of worker t mod P says which elements all workers send."""
    k = max(1, round(density * accs.shape[1]))
    chosen = top_k(accs[step % len(accs)], k)
    delivered = np.zeros_like(accs)
    delivered[:, chosen] = accs[:, chosen]
    return Expected(_ordered_sum(delivered), delivered)


def cosines(x: np.ndarray, *, back: bool = False) -> np.ndarray:
    """The orthonormal DCT-II of the last axis, by its sum, or its inverse."""
    n = x.shape[-1]
    sums = np.zeros_like(x, np.float64)
    for k in range(n):
        scale = math.sqrt((1 if k == 0 else 2) / n)
        for i in range(n):
            factor = scale * math.cos(math.pi / n * (i + 0.5) * k)
            sums[..., i if back else k] += factor * x[..., k if back else i]
    return sums


def frequencies(vectors: np.ndarray, shapes: Sequence[tuple[int, ...]], side: int, *, back: bool = False) -> np.ndarray:
    """The DCT of each tile of leaves that are in the order of tiles, or of each stretch; or back.

    ``vectors`` has shape ``(P, n)``. The coefficients of a tile stand column by column.
    """

    def cut(length: int) -> list[list[int]]:
        return [[side] * (length // side), [length % side] * (length % side > 0)]

    result, begin = np.zeros(vectors.shape), 0
    for shape in shapes:
        lengths = [length for length in shape if length > 1]
        matrix = len(lengths) > 1
        rows, columns = (math.prod(lengths[:-1]), lengths[-1]) if matrix else (1, math.prod(shape))
        for heights, widths in itertools.product(cut(rows) if matrix else [[1]], cut(columns)):
            for height, width in itertools.product(heights, widths):
                end = begin + height * width
                shape = (width, height) if back else (height, width)
                turned = cosines(vectors[:, begin:end].reshape(-1, *shape), back=back)
                turned = cosines(turned.swapaxes(1, 2), back=back)
                result[:, begin:end] = turned.reshape(len(vectors), -1)
                begin = end
    assert begin == vectors.shape[1]
    return result


def dion(accs: np.ndarray, q: np.ndarray, momentum: float) -> tuple[np.ndarray, np.ndarray]:
    """Dion, Algorithm 1, of one matrix, with the share of each worker taken off its momentum.

    ``accs`` are the momenta with the gradients, shape ``(P, a, b)``. The result is the update, and
    what is taken off each momentum.
    """
    accs = accs.astype(np.float64)
    basis, _ = np.linalg.qr(np.mean(accs @ q, axis=0))
    right = np.mean(accs.transpose(0, 2, 1) @ basis, axis=0)
    lengths = np.linalg.norm(right, axis=0)
    some = lengths > max(accs.shape[1:]) * np.finfo(np.float32).eps * lengths.max()
    unit = np.where(some, right / np.where(some, lengths, 1), 0)  # Rounding errors have no direction.
    scale = math.sqrt(accs.shape[2] / accs.shape[1])
    return scale * basis @ unit.T, (1 - momentum) * basis @ (basis.T @ accs)


def parameter_server(accs: np.ndarray, *, staleness: int = 0, before: Sequence[np.ndarray] = (), **_) -> Expected:
    """The root adds the vectors of this step, or of an earlier one, in the order of ranks.

    ``before`` are the vectors of earlier steps, the latest at the end.
    """
    arrives = [*(np.zeros_like(accs) for _ in range(staleness)), *before, accs][-1 - staleness]
    return Expected(_ordered_sum(arrives), arrives)


def torus(accs: np.ndarray, *, gpus: int, **_) -> Expected:
    """2D torus: workers with the same rank in their nodes have the same shard, and add theirs."""
    shard = math.ceil(accs.shape[1] / gpus)
    total = np.concatenate([accs[j::gpus, j * shard : (j + 1) * shard].sum(0, dtype=accs.dtype) for j in range(gpus)])
    return Expected(total, accs)


def hitopk(accs: np.ndarray, *, density: float, gpus: int, step: int, searches: int | None = None, **_) -> Expected:
    """HiTopKComm, Algorithm 2 from line 5 on: the top-k of each shard of a node's sum, added.

    They are added between the nodes. The row of ``accs`` for worker ``j`` of a node is its shard
    of the sum (lines 2 to 4), with zeros elsewhere. With ``searches`` MSTopK selects.
    """
    n = accs.shape[1]
    shard = math.ceil(n / gpus)
    delivered = np.zeros_like(accs)
    for worker, acc in enumerate(accs):
        begin, k = worker % gpus * shard, max(1, round(density * shard))
        part = np.pad(acc, (0, shard))[begin : begin + shard]
        chosen = begin + (top_k(part, k) if searches is None else ms_top_k(part, k, searches, step))
        delivered[worker, chosen] = acc[chosen]
    return Expected(_ordered_sum(delivered), delivered)


def gaussiank(
    accs: np.ndarray, *, density: float, step: int, threshold: np.ndarray, adjust: str = "enough", **_
) -> Expected:
    """Gaussian-k: elements beyond a quantile of a normal distribution.

    The threshold is adjusted by :func:`adjusted`.

    ``threshold`` are the workers' own thresholds. This function checks them against its own before
    it uses them, because a tie may depend on the last bit. A threshold that differs by steps of
    its rule must be explained by such a tie.
    """
    k = max(1, round(density * accs.shape[1]))
    delivered = np.zeros_like(accs)
    for worker, acc in enumerate(accs.astype(np.float64)):
        own = abs(acc.mean()) + statistics.NormalDist(sigma=max(acc.std(), 1e-300)).inv_cdf(1 - density / 2)
        own = min(own, np.abs(acc).max())
        magnitudes = np.abs(acc)
        own = adjusted(magnitudes, k, own, adjust) if own else own
        step_down = {"enough": 0.9, "oktopk": 1 / 1.02, "never": 1.0}[adjust]
        if own and abs(threshold[worker] / own - 1) > 1e-4:
            hangs = [
                np.count_nonzero(magnitudes >= t * (1 - 1e-5)) != np.count_nonzero(magnitudes >= t * (1 + 1e-5))
                for t in (own * step_down, own, own / step_down)
            ]
            assert any(hangs) or own < 1e-2, (worker, threshold[worker], own)
        chosen = np.flatnonzero((np.abs(accs[worker]) >= threshold[worker]) & (accs[worker] != 0))
        if len(chosen) > k:
            chosen = np.roll(chosen, -(step * k % len(chosen)))[:k]
        delivered[worker, chosen] = accs[worker, chosen]
    return Expected(_ordered_sum(delivered), delivered)


def adjusted(magnitudes: np.ndarray, k: int, threshold: float, rule: str) -> float:
    """Gaussian-k's threshold: raised while too many elements reach it, then lowered while too few
    do.
    """
    least, most, factor, limit = {
        "enough": (3 / 4, 4 / 3, 0.9, 66),
        "oktopk": (3 / 4, 5 / 4, 1 / 1.02, 20),
        "never": (0, 1, 1, 0),
    }[rule]
    rounds = 0
    while np.count_nonzero(magnitudes >= threshold) > most * k and rounds < limit:
        threshold, rounds = threshold / factor, rounds + 1
    rounds = 0
    while np.count_nonzero(magnitudes >= threshold) < least * k and rounds < limit:
        threshold, rounds = threshold * factor, rounds + 1
    return threshold


def gaussian_in_oktopks_code(acc: np.ndarray, density: float) -> np.ndarray:
    """``GaussianCompressor.compress`` of Ok-Topk's ``VGG/compression.py``: ascending indices."""
    k = max(int(len(acc) * density), 1)
    mean, std, magnitudes = acc.mean(), acc.std(ddof=1), np.abs(acc)
    threshold = mean - statistics.NormalDist().inv_cdf(density / 2) * std
    initial, loops = np.count_nonzero(magnitudes > threshold), 0
    if initial < 3 * k // 4:
        while loops < 20 and np.count_nonzero(magnitudes > threshold) < 3 * k // 4:
            threshold, loops = threshold / 1.02, loops + 1
    elif initial > 5 * k // 4:
        while loops < 20 and np.count_nonzero(magnitudes > threshold) > 5 * k // 4:
            threshold, loops = threshold * 1.02, loops + 1
    return np.flatnonzero(magnitudes > threshold)


def bfloat16(values: np.ndarray) -> np.ndarray:
    """The nearest float32 whose lower 16 bits are zero; of two, the one whose 17th bit is zero."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) & np.uint32(0xFFFF0000)).view(np.float32)


def split_in_bfloat16(accs: np.ndarray, *, density: float, **_) -> Expected:
    """SSAR_Split_AllGather with rounding.

    Each worker rounds its own values, and the owner of a region rounds their sum. If a region has
    more than k elements, no regions are gathered but what the workers rounded.
    """
    workers, n = accs.shape
    k = max(1, round(density * n))
    delivered = np.zeros_like(accs)
    for worker, acc in enumerate(accs):
        chosen = top_k(acc, k)
        delivered[worker, chosen] = bfloat16(acc[chosen])
    whole = _ordered_sum(delivered)
    owner = owners(n, workers)
    if np.bincount(owner[delivered.any(0)], minlength=workers).max() > k:
        return Expected(whole, delivered)
    delivered[owner, np.arange(n)] += bfloat16(whole) - whole
    return Expected(bfloat16(whole), delivered)


def owners(n: int, workers: int) -> np.ndarray:
    """Who owns each index: a group of as many indices as workers is dealt from another one on.

    Which one is Wellons' lowbias32 of the group's number; the first one, for the indices that make
    no whole group.
    """
    dealt = []
    for first in range(0, n, workers):
        bits = first // workers
        for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B), (16, 1)):
            bits = (bits ^ bits >> shift) * factor % 2**32
        turn = bits if first + workers <= n else 0
        dealt += [(turn + card) % workers for card in range(min(workers, n - first))]
    return np.array(dealt)


def gtopk(accs: np.ndarray, *, density: float, topology: str = "butterfly", put_back: str = "exact", **_) -> Expected:
    """gTop-k, which follows each worker's elements through the merges one by one.

    What is cut from a sum is taken from the workers whose elements it consists of, or, with an
    owner, from one of the workers that know the sum. In the tree, only the worker that receives
    knows it. What a worker gives to a sum of 0 is delivered. The paper's rule is Algorithm 4, line
    10: a worker has delivered what has an index of the result.
    """
    workers, n = accs.shape
    k = max(1, round(density * n))
    sent = np.zeros_like(accs)
    for worker, acc in enumerate(accs):
        chosen = top_k(acc, k)
        sent[worker, chosen] = acc[chosen]
    delivered = sent.copy()

    # What the sum that a worker knows consists of: each worker's elements.
    groups = {worker: {worker: sent[worker].copy()} for worker in range(workers)}

    def value(group):
        # Integers are exact in any order. Other numbers are added in the order of the pairs.
        return _ordered_sum([part.astype(np.float64) for _, part in sorted(group.items())]).astype(accs.dtype)

    def meet(members, knowing):
        """The groups of ``members`` become one, which the workers ``knowing`` know."""
        whole = {worker: part for member in members for worker, part in groups[member].items()}
        values = value(whole)
        kept = np.zeros(n, bool)
        kept[top_k(values, k)] = True
        for index in np.flatnonzero(~kept & (values != 0)):
            if put_back == "owner" or topology == "tree":
                delivered[knowing[index % len(knowing)], index] -= values[index]
            else:
                for worker, part in whole.items():
                    delivered[worker, index] -= part[index]
        whole = {worker: np.where(kept, part, 0) for worker, part in whole.items()}
        groups.update(dict.fromkeys(knowing, whole))

    power = 2 ** int(np.log2(workers))
    if topology == "allgather":
        meet(range(workers), range(workers))
    elif topology == "tree":
        distance = 1
        while distance < workers:
            for rank in range(0, workers - distance, 2 * distance):
                meet([rank, rank + distance], [rank])
            distance *= 2
    else:
        for guest in range(power, workers):
            meet([guest - power, guest], [guest - power])
        distance = 1
        while distance < power:
            for rank in range(0, power, 2 * distance):
                meet([rank, rank + distance], range(rank, rank + 2 * distance))
            distance *= 2
    total = value(groups[0])
    if put_back == "paper":
        delivered = np.where(total != 0, sent, 0)
    return Expected(total, delivered)


class Compressed(NamedTuple):
    """The outcome of one step of :func:`dgc`.

    The total has shape ``(n,)``. The velocity and the residual after the step have shape
    ``(P, n)``.
    """

    total: np.ndarray
    velocity: np.ndarray
    residual: np.ndarray


def dgc(
    gradients: Sequence[np.ndarray],
    *,
    density: float,
    momentum: float,
    nesterov: bool = False,
    clip_norm: float = math.inf,
    factor_masking: bool = True,
) -> list[Compressed]:
    """Deep Gradient Compression, Algorithm 4 (nesterov: 5), with exact top-k.

    It runs all steps; each gradient has shape ``(P, n)``.
    """
    workers, n = gradients[0].shape
    u, v = np.zeros((workers, n)), np.zeros((workers, n))
    steps = []
    for gradient in gradients:
        total = np.zeros(n)
        for worker, g in enumerate(gradient.astype(np.float64)):
            g = g * min(1, clip_norm / np.sqrt(workers) / max(np.linalg.norm(g), 1e-300))
            if nesterov:
                # As printed: this u is momentum times the u of momentum SGD.
                u[worker] = momentum * (u[worker] + g)
                v[worker] = v[worker] + u[worker] + g
            else:
                u[worker] = momentum * u[worker] + g
                v[worker] = v[worker] + u[worker]
            mask = np.zeros(n, bool)
            mask[top_k(v[worker], max(1, round(density * n)))] = True
            total += v[worker] * mask
            v[worker] *= ~mask
            if factor_masking:
                u[worker] *= ~mask
        # The library's u is not yet multiplied by momentum.
        steps.append(Compressed(total, u / momentum if nesterov else u.copy(), v.copy()))
    return steps


def qsgd_rounding(gradients: np.ndarray, levels: int = 4, bucket: int = 512) -> np.ndarray:
    """The most by which QSGD changes each element of the sum: for every worker one level, the norm
    of the element's bucket over the number of levels (Algorithm 1). Shape ``(P, N)`` to ``(N,)``.
    """
    n = gradients.shape[1]
    rows = np.pad(gradients.astype(np.float64), ((0, 0), (0, -n % bucket))).reshape(len(gradients), -1, bucket)
    return np.repeat(np.linalg.norm(rows, axis=2).sum(0) / levels, bucket)[:n]


def nearest(values: np.ndarray, magnitudes: np.ndarray, bucket: int | None) -> np.ndarray:
    """Each value rounded to the nearest of plus or minus these magnitudes, times a scale.

    The scale is the largest magnitude of the value's bucket, which is not zero.
    """
    rounded = np.zeros_like(values)
    for begin in range(0, len(values), bucket or len(values)):
        part = values[begin : begin + (bucket or len(values))]
        scale = np.abs(part).max()
        levels = np.sort(np.concatenate([-magnitudes, magnitudes])) * scale.astype(np.float64)
        chosen = np.argmin(np.abs(part[:, None].astype(np.float64) - levels), axis=1)
        rounded[begin : begin + len(part)] = levels[chosen]
    return rounded


def codebook(values: np.ndarray, bits: int) -> np.ndarray:
    """Each value replaced by its sign and the mean magnitude of its bin.

    There are ``2 ** (bits - 1)`` bins between the smallest and the largest magnitude, all with the
    same ratio of their ends. No value is zero.
    """
    magnitudes = np.abs(values)
    bins = 2 ** (bits - 1)
    edges = np.geomspace(magnitudes.min(), magnitudes.max(), bins + 1)[1:-1]
    which = np.searchsorted(edges, magnitudes, side="right")
    means = [magnitudes[which == number].mean() if (which == number).any() else 0 for number in range(bins)]
    return np.sign(values) * np.array(means)[which]


def deviation_codebook(values: np.ndarray, bits: int) -> np.ndarray:
    """Each value replaced by the mean of its bin, as ``tplr/compress.py`` and MuLoCo quantize.

    The bins are centered on the mean, and 6 standard deviations over their number wide. No value
    is zero.
    """
    bins = 2**bits
    centered = values - values.mean()
    width = 6 * np.linalg.norm(centered) / np.sqrt(len(values) - 1) / bins
    which = np.clip(np.round(centered / width) + bins // 2, 0, bins - 1)
    means = {number: values[which == number].mean() for number in np.unique(which)}
    return np.array([means[number] for number in which])


class Projected(NamedTuple):
    """The outcome of one step of :func:`powersgd`: shapes ``(m, n)``, and ``(P, m, n)`` after the
    step.
    """

    update: np.ndarray
    residual: np.ndarray


def powersgd(gradients: Sequence[np.ndarray], q: np.ndarray, subtract: str) -> list[Projected]:
    """PowerSGD, Algorithms 1 and 2, of one matrix; the whole run, each of shape ``(P, m, n)``.

    ``q`` is the right factor that it begins with. All that leaves this function depends on the
    space that the columns of P span, and not on how they were made orthonormal.
    """
    residual, steps = np.zeros(gradients[0].shape), []
    q = q.astype(np.float64)
    for gradient in gradients:
        acc = gradient.astype(np.float64) + residual
        basis, _ = np.linalg.qr(np.mean(acc @ q, axis=0))
        q = np.mean(acc.transpose(0, 2, 1) @ basis, axis=0)
        update = basis @ q.T
        residual = acc - (update if subtract == "mean" else basis @ (basis.T @ acc))
        steps.append(Projected(update, residual))
    return steps


def oktopk(
    accs: np.ndarray,
    *,
    density: float,
    step: int,
    starts: np.ndarray,
    threshold: float,
    tau_threshold: int = 32,
    tau_region: int | None = 1,
    room: float | None = None,
    put_back: str = "senders",
    selected: list[np.ndarray] | None = None,
) -> Expected:
    """Algorithm 1 of Ok-Topk with messages of at most ``room`` times k/P elements in the split.

    ``starts`` are the regions' first indices, as the step before left them. ``threshold`` is the
    global threshold of the implementation. It is used in steps in which the algorithm reuses or
    interpolates a threshold (lines 9-12). ``selected`` replaces the exact local top-k.
    """
    workers, n = accs.shape
    k = max(1, round(density * n))
    share = math.ceil(k / workers)
    room = math.ceil((room or min(2, 1.25 + math.log2(workers) / 8)) * share)
    room = min(k, room, max(share, 2 * k // workers))
    local = selected or [top_k(acc, k) for acc in accs]

    if step == 0 and workers <= k < n and tau_region is not None:
        cuts = oktopk_cuts(local, starts)
        starts = np.sum(cuts // workers, axis=0)
    ends = np.append(starts[1:], n)

    sent, overflowed = np.zeros_like(accs), np.zeros(workers, int)
    occurs = np.zeros(n, bool)
    for worker, indices in enumerate(local):
        for owner, (start, end) in enumerate(zip(starts, ends, strict=True)):
            message = indices[(indices >= start) & (indices < end)]
            # What an owner holds of its own region need not be sent.
            most = k if owner == worker and put_back != "senders" else room
            if len(message) > most:
                overflowed[worker] += len(message) - most
                first = (step * most) % len(message)
                message = np.roll(message, -first)[:most]
            sent[worker, message] = accs[worker, message]
            occurs[message] = True
    reduced = _ordered_sum(sent)
    if put_back == "server":
        for owner, (start, end) in enumerate(zip(starts, ends, strict=True)):
            joins = start + np.flatnonzero(occurs[start:end] & (sent[owner, start:end] == 0))
            sent[owner, joins] = accs[owner, joins]
            reduced[joins] += accs[owner, joins]
    magnitudes = np.abs(reduced)
    if put_back == "senders":
        # Sums that cancel are named in turns, as if they were the region's largest.
        most = max(1, share // 16)
        for start, end in zip(starts, ends, strict=True):
            cancelled = start + np.flatnonzero((occurs & (reduced == 0))[start:end])
            if len(cancelled) > most:
                cancelled = np.roll(cancelled, -((step * most) % len(cancelled)))[:most]
            magnitudes[cancelled] = max(magnitudes[start:end], default=0) or 1
    candidates = np.flatnonzero(occurs & (magnitudes != 0))

    exact = step % tau_threshold == 0
    if k >= n:
        threshold = 0.0
    elif exact:
        ranked = np.sort(magnitudes[candidates])[::-1]
        threshold = ranked[k - 1] if len(ranked) >= k else 0.0
    chosen = candidates[magnitudes[candidates] >= threshold]
    # If ties give more elements than the gathered parts hold, one step can't deliver them all.
    exact = exact and len(chosen) <= share * workers

    delivered = np.zeros_like(accs)
    delivered[:, chosen] = sent[:, chosen]
    total = np.zeros(n, accs.dtype)
    total[chosen] = reduced[chosen]
    if put_back != "senders":
        delivered = sent
        for owner, (start, end) in enumerate(zip(starts, ends, strict=True)):
            delivered[owner, start:end] -= (reduced - total)[start:end]
    return Expected(total, delivered, exact, overflowed)


def oktopk_cuts(local: Sequence[np.ndarray], starts: np.ndarray) -> np.ndarray:
    """Where each worker cuts its selected indices into P equal parts: shape ``(P, P)``."""
    workers, cuts = len(local), []
    for indices in local:
        count = len(indices)
        own = [indices[rank * count // workers] for rank in range(workers)] if count >= workers else starts
        cuts.append([0, *own[1:]])
    return np.array(cuts)


def a2sgd(leaves: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Algorithm 1 of A2SGD, lines 3 to 7, on gradients of shape ``(P, n)``.

    Each leaf has means of its own. It follows equation 2 and line 6 as printed, except that zeros
    stay zero if no element is positive.
    """
    updates = []
    for gradients in leaves:
        workers = []
        for g in gradients.astype(np.float64):
            plus = np.mean(g[g >= 0]) if (g >= 0).any() else 0.0
            minus = np.mean(np.abs(g[g < 0])) if (g < 0).any() else 0.0
            pos = np.where((g >= plus) & (g > 0), 1.0, 0.0)
            neg = np.where((g <= -minus) & (g < 0), 1.0, 0.0)
            workers.append((g, pos, neg, plus, minus))
        shared_plus = np.mean([plus for *_, plus, _ in workers])
        shared_minus = np.mean([minus for *_, minus in workers])
        rows = []
        for g, pos, neg, plus, minus in workers:
            eps = g - (pos * plus - neg * minus)
            rows.append(eps + pos * shared_plus - neg * shared_minus)
        updates.append(np.stack(rows))
    return updates


def of_each_leaf(
    oracle: Callable[[list[np.ndarray]], list[np.ndarray]], gradients: np.ndarray, lengths: Sequence[int]
) -> np.ndarray:
    """What an oracle makes of gradients of shape ``(P, n)``, cut into leaves of these lengths."""
    return np.concatenate(oracle(np.split(gradients, np.cumsum(lengths)[:-1], axis=1)), axis=1)


def _ordered_sum(rows: np.ndarray) -> np.ndarray:
    total = np.zeros_like(rows[0])
    for row in rows:
        total = total + row
    return total
