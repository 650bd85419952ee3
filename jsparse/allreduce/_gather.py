"""Gathers of parts of unequal length, and other messages whose length depends on the data."""

import bisect
import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from kernels_pallas import bitmap

from .._comm.comm import Comm
from .._vector.parts import Parts
from .._vector.random import key_of
from .._vector.sparse_vector import SparseVector, Vector
from ..quantize import Quantizer
from ..quantize._coded import Coded
from ..wire import Compact, Messages

# The lengths that a message may have, in units of an equal share. The shortest that fits is sent.
PART_LENGTHS = (1.0625, 1.125, 1.25, 1.5, 2.0, 3.0, 4.0)
BALANCING_LENGTHS = (0.0625, 0.125, 0.25, 0.5, 1.0)
# The longest part, in shares, that may take fewer words as it is than balanced.
WORTH = 2.0
SHORTEST = 32


def lengths_between(least: int, most: int) -> list[int]:
    """Static lengths for a message that usually holds ``least`` to ``most`` elements.

    They ascend, and each is √2 times the one before. None is below ``SHORTEST``, since a shorter
    message takes as long.

    >>> lengths_between(50, 450)
    [50, 70, 100, 141, 200, 282, 400, 450]
    """
    least = max(least, min(SHORTEST, most))
    powers = {math.isqrt(least**2 << i) for i in range(2 * (most // least).bit_length())}
    return [*sorted(length for length in powers if length < most), most]


def fitting(count: jax.Array, lengths: Sequence[int]) -> jax.Array:
    """The place of the first of ascending lengths that holds ``count`` elements: int32 scalar.

    If none holds them, it is the place after the last.
    """
    return jnp.sum(count > jnp.array(lengths), dtype=jnp.int32)


def delta(n: int, dtype: DTypeLike, wire: Messages) -> int:
    """δ, the largest number of elements that take no more words than ``n`` dense values.

    At full width it is ``n * isize / (c + isize)``, for values of ``isize`` and indices of ``c``
    bytes (Renggli, SparCML thesis, section 3.3.2).
    """
    words = n * jnp.dtype(dtype).itemsize // 4
    return max(1, bisect.bisect_right(range(n + 1), words, key=lambda length: wire.words(length, n, dtype)) - 1)


def gather_dense(
    comm: Comm, mine: jax.Array, size: int, quantize: Quantizer, step: jax.Array
) -> tuple[Vector, jax.Array]:
    """Gathers each worker's vector of ``m`` values on every worker, quantized.

    Returns:
      The first ``size`` values of all workers, in the order of ranks, alike on all workers; and
      this worker's vector as others read it.
    """
    if quantize.lossless:
        return comm.all_gather(mine).reshape(-1)[:size], mine
    m, dtype = mine.shape[0], mine.dtype
    message = quantize.encode(mine, quantizer_key(quantize, step, comm.rank()))
    everyone = Coded.of(comm.all_gather(message), quantize, m, size, dtype)
    return Parts([everyone]), quantize.decode(message, m, dtype)


def quantizer_key(quantize: Quantizer, *numbers: jax.Array) -> jax.Array:
    """The random key of a quantizer: from its seed, if it has one, and these numbers."""
    return key_of(getattr(quantize, "seed", 0), *numbers)


def gather_parts(
    comm: Comm,
    region: SparseVector,
    chosen: jax.Array,
    parts: jax.Array,
    share: int,
    *,
    balance_above: float | None,
    step: jax.Array,
    wire: Messages,
) -> tuple[SparseVector, SparseVector | None]:
    """Gathers chosen elements of each worker on every worker.

    If a part is long, the parts are balanced first. This is Ok-Topk's ``balance_and_allgatherv``
    (section 3.1.2). Elements that do not fit are left out, different ones in each step.

    Args:
      comm: the workers.
      region: this worker's elements, one run. Their indices are above those of all workers of
        lower rank.
      chosen: a bitmap of the places of the elements that are gathered.
      parts: int32, shape ``(P,)``, alike on all workers: about how many elements each worker has
        chosen.
      share: the length of an equal share. Balanced parts have this length.
      balance_above: the largest part, in shares, that is gathered without balancing. With None
        the parts are balanced where that saves more than an eighth of the words.
      step: int32 scalar, alike on all workers.
      wire: the layout of the messages.

    Returns:
      ``(total, rounding)``: the elements of all workers as one run, alike on all workers; and what
      this worker added to some of them by rounding, or None where the wire is lossless.
    """
    lengths = _part_lengths(WORTH if balance_above is None else balance_above, share, region.capacity)
    amounts = _lengths(BALANCING_LENGTHS, share, share)
    balances = lengths[-1] < region.capacity and balance_above != math.inf
    capacity = min(comm.size * lengths[-1], region.n)
    # What rounding changed has the same places in each branch. Only a part that is balanced may
    # have been rounded where it was longer than all lengths.
    widest = region.capacity if balances and wire.elementwise else max(*lengths, share)

    def gather(part: SparseVector) -> tuple[SparseVector, SparseVector]:
        message = wire.encode(part)
        everyone = wire.decode(comm.all_gather(message), part.capacity, part.n, part.values.dtype)
        return everyone, difference(wire.as_read(part, message), part)

    def told(total: SparseVector, change: SparseVector) -> tuple[SparseVector, SparseVector | None]:
        return total, None if wire.lossless else comm.varying(change.resize(widest))

    index = fitting(jnp.max(parts), lengths)
    shortest = jnp.minimum(index, len(lengths) - 1)

    def direct() -> tuple[SparseVector, SparseVector | None]:
        limit = jnp.array(lengths)[shortest]
        part = region.pick(chosen, lengths[-1], bitmap.turn(step, limit), limit)

        def send(length: int) -> tuple[SparseVector, SparseVector | None]:
            everyone, change = gather(part.resize(length))
            return told(everyone.concatenate(capacity), change)

        return comm.switch(shortest, [functools.partial(send, length) for length in lengths], replicated=True)

    def balanced() -> tuple[SparseVector, SparseVector | None]:
        mine, rounded = round_once(wire, region.pick(chosen, region.capacity))
        counts = comm.all_gather(mine.count)
        everyone, change = gather(_balance(comm, mine, counts, share, amounts, step, forward(wire)))
        return told(everyone.join(capacity), change if rounded is None else rounded)

    if not balances:
        return direct()
    worth = index == len(lengths)
    if balance_above is None:

        def words(wire: Messages, length: int) -> int:
            return wire.words(length, region.n, region.values.dtype)

        directly = [words(wire, length) for length in lengths]
        # Balancing takes P - 1 + log P further messages, and time to put the parts in order.
        most = jnp.array([*(count - count // 8 for count in directly), 2**31 - 1])[index]
        moved = jnp.max(moves(_reduce_to(parts, share * comm.size), share)[1])
        to_move = jnp.array([words(forward(wire), amount) for amount in amounts])[fitting(moved, amounts)]
        worth = words(wire, share) + to_move + 1 < most
    return comm.switch(worth.astype(jnp.int32), [direct, balanced], replicated=True)


def forward(wire: Messages) -> Messages:
    """The messages for values that were read once and are sent again without another rounding."""
    return wire if wire.elementwise else Compact().at(wire.step)


def round_once(wire: Messages, x: SparseVector) -> tuple[SparseVector, SparseVector | None]:
    """Rounds a run before it is sent, if the wire does not change such values again.

    Returns:
      The run, and what rounding changed in it. If the wire is lossless, or would round again, the
      run is unchanged and the change is None.
    """
    if wire.lossless or not wire.elementwise:
        return x, None
    read = wire.as_read(x, wire.encode(x))
    return read, difference(read, x)


def difference(a: SparseVector, b: SparseVector) -> SparseVector:
    """``a - b``, for two runs with the same indices."""
    return SparseVector(a.values - b.values, a.indices, a.n)


def _balance(
    comm: Comm,
    mine: SparseVector,
    counts: jax.Array,
    share: int,
    lengths: Sequence[int],
    step: jax.Array,
    wire: Messages,
) -> SparseVector:
    """Moves elements to workers with fewer, so that each has at most ``share``.

    A message has one of ``lengths``.
    """
    rank = comm.rank()
    kept = _reduce_to(counts, share * comm.size)
    turn = bitmap.turn(step, kept[rank])
    mine = mine.window(jnp.int32(0), counts[rank], mine.capacity, turn, limit=kept[rank])

    first, amount = moves(kept, share)

    def exchange(length: int) -> SparseVector:
        outgoing = mine.window(first[rank], amount[rank], length)
        return wire.decode(comm.all_to_all(wire.encode(outgoing)), length, mine.n, mine.values.dtype).resize(share)

    received = comm.switch(
        fitting(jnp.max(amount), lengths), [functools.partial(exchange, length) for length in lengths]
    )
    own = mine.window(jnp.int32(0), jnp.minimum(kept[rank], share), share)
    return own.followed_by(received).join(share)


def moves(counts: jax.Array, share: int | jax.Array) -> tuple[jax.Array, jax.Array]:
    """Plans which elements each worker sends to each other, so that none has above ``share``.

    Each surplus is spread over all deficits in proportion, so that no message is long. What
    rounding leaves over is put end to end, as are the deficits that it leaves: where the rest of
    one worker overlaps the deficit of another, the first sends to the second as many elements.

    Returns:
      ``(first, amount)``, shape ``(P, P)``: worker ``i`` sends ``amount[i, j]`` elements to worker
      ``j``, from place ``first[i, j]`` on.
    """
    surplus = jnp.maximum(counts - share, 0)
    deficit = jnp.maximum(share - counts, 0)
    amount = jax.vmap(lambda d: _scaled(surplus, d, jnp.sum(deficit, dtype=jnp.int32)), out_axes=1)(deficit)
    rests = surplus - amount.sum(1, dtype=jnp.int32), deficit - amount.sum(0, dtype=jnp.int32)
    ends = [jnp.cumsum(rest, dtype=jnp.int32) for rest in rests]
    begins = [jnp.append(0, end[:-1]) for end in ends]
    overlap = jnp.minimum(ends[0][:, None], ends[1][None]) - jnp.maximum(begins[0][:, None], begins[1][None])
    amount += jnp.maximum(overlap, 0)
    return share + jnp.cumsum(amount, axis=1, dtype=jnp.int32) - amount, amount


def _reduce_to(counts: jax.Array, room: int) -> jax.Array:
    """Reduces the counts in proportion where their sum exceeds ``room``."""
    total = jnp.sum(counts, dtype=jnp.int32)
    return jnp.where(total > room, _scaled(counts, room, total), counts)


def _scaled(counts: jax.Array, part: int | jax.Array, whole: jax.Array) -> jax.Array:
    """``counts * part / whole``, or a little less, in 32-bit integers."""
    shift = jnp.maximum(16 - lax.clz(whole), 0)
    share = ((part >> shift) << 14) // jnp.maximum(-(-whole >> shift), 1)
    high, low = counts >> 14, counts & (2**14 - 1)
    return high * share + (low * share >> 14)


def _part_lengths(balance_above: float, share: int, most: int) -> list[int]:
    shares = [f for f in PART_LENGTHS if f < balance_above]
    return _lengths([*shares, balance_above], share, most)


def _lengths(shares: Sequence[float], share: int, most: int) -> list[int]:
    """The static lengths of a message, ascending: multiples of ``share``, at most ``most``."""
    return sorted({math.ceil(min(f * share, most)) for f in shares})
