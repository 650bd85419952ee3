"""The layout of a pytree's leaves in the flat vectors that are synchronised."""

import dataclasses
import itertools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kernels_pallas import bitmap, reaches, sample_places, varying_as, zero_of

from .parts import Parts
from .sparse_vector import Leaf, SparseVector, first_from, to_dense

# How many elements of a sparse vector are added to a leaf at a time.
CHUNK = 1024
# How many elements of a long leaf are added and marked at a time: as many as a core's cache holds.
PIECE = 2**17


@dataclasses.dataclass(frozen=True)
class Layout:
    """The places of some leaves in one flat vector.

    Attributes:
      shapes, dtypes: those of the leaves.
      offsets: where each leaf begins, and at the end the length of all leaves together.
    """

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[jnp.dtype, ...]
    offsets: tuple[int, ...]

    @staticmethod
    def of(leaves: Sequence[jax.Array]) -> "Layout":
        sizes = [math.prod(leaf.shape) for leaf in leaves]
        return Layout(
            tuple(leaf.shape for leaf in leaves),
            tuple(jnp.dtype(leaf.dtype) for leaf in leaves),
            tuple(itertools.accumulate(sizes, initial=0)),
        )

    @property
    def n(self) -> int:
        return self.offsets[-1]

    @property
    def lengths(self) -> list[int]:
        """How many elements each leaf has."""
        return [end - begin for begin, end in itertools.pairwise(self.offsets)]

    @property
    def dtype(self) -> jnp.dtype:
        """The type of the flat vector: the widest of the leaves' types, at least float32."""
        return jnp.result_type(jnp.float32, *self.dtypes)

    def ravel(self, leaves: Sequence[Leaf]) -> jax.Array:
        """The leaves as one new vector."""
        return jnp.concatenate([to_dense(leaf).reshape(-1).astype(self.dtype) for leaf in leaves])

    def run(self, leaves: Sequence[Leaf]) -> SparseVector:
        """The leaves as one run. Sparse ones are one run each.

        It has a place for each place of a sparse leaf, and for each element of the others.
        """
        runs = []
        for part, offset in zip(leaves, self.offsets, strict=False):
            if isinstance(part, SparseVector):
                runs.append(
                    (part.values.astype(self.dtype), jnp.where(part.indices < part.n, offset + part.indices, self.n))
                )
            else:
                runs.append((part.reshape(-1).astype(self.dtype), offset + lax.iota(jnp.int32, part.size)))
        values = jnp.concatenate([values for values, _ in runs])
        x = SparseVector(values, jnp.concatenate([indices for _, indices in runs]), self.n)
        # Unused places of a leaf that is not the last stand between the others.
        return x if len(runs) == 1 else x.join(min(values.size, self.n))

    def unravel(self, vector: Parts | jax.Array) -> list[jax.Array]:
        """The leaves that a dense vector holds, in their own types."""
        return [part.astype(dtype) for part, dtype in zip(self.windows(vector), self.dtypes, strict=True)]

    def windows(self, vector: Parts | jax.Array) -> list[jax.Array]:
        """The leaves that a dense vector holds, in its type."""
        places = list(itertools.pairwise(self.offsets))
        if isinstance(vector, Parts) and [part.size for part in vector.parts] == [end - begin for begin, end in places]:
            return [part.reshape(shape) for part, shape in zip(vector.arrays(), self.shapes, strict=True)]
        vector = to_dense(vector)
        return [vector[begin:end].reshape(shape) for (begin, end), shape in zip(places, self.shapes, strict=True)]

    def align(self, vector: jax.Array, unit: int, multiple: int) -> jax.Array:
        """A flat vector in which each leaf begins at a multiple of ``unit``.

        What of a leaf is in its last unit is repeated until then, so that the unit's mean is about
        that of the leaf's own elements. Zeros follow, until the length is a multiple of
        ``multiple``.
        """
        units = []
        for begin, end in itertools.pairwise(self.offsets):
            last = (end - begin) % unit
            units.append(vector[begin : end - last])
            if last:
                units.append(jnp.pad(vector[end - last : end], (0, unit - last), mode="wrap"))
        aligned = jnp.concatenate(units)
        return jnp.pad(aligned, (0, -aligned.size % multiple))

    def unalign(self, vector: jax.Array, unit: int) -> jax.Array:
        """The vector of which :meth:`align` made this one."""
        sizes = [end - begin for begin, end in itertools.pairwise(self.offsets)]
        begins = itertools.accumulate((-(-size // unit) * unit for size in sizes), initial=0)
        return jnp.concatenate([vector[begin : begin + size] for begin, size in zip(begins, sizes, strict=False)])

    def add_leaves(self, vector: jax.Array, leaves: Sequence[Leaf], keep: jax.Array, limit: float) -> jax.Array:
        """Adds each leaf to its window of the vector where ``keep`` is true.

        This is in place if the vector may be overwritten. The result is clipped to magnitudes of
        at most ``limit``.
        """
        zero = zero_of(keep)
        parts = [leaf if isinstance(leaf, SparseVector) else leaf.reshape(-1) for leaf in leaves]
        if len(parts) == 1 and not isinstance(parts[0], SparseVector):
            # A window over the whole vector would be the sum itself. XLA would compute it again
            # wherever it is read, and keep a copy of the old vector for that.
            parts = jnp.split(parts[0], [parts[0].size // 2])
        for part, begin in zip(parts, itertools.accumulate((part.size for part in parts), initial=0), strict=False):
            if isinstance(part, SparseVector):
                x = part.where(keep)
                places = jnp.where(x.indices < x.n, begin + x.indices, self.n)
                sums = vector.at[places].get(mode="fill", fill_value=0) + x.values.astype(self.dtype)
                vector = vector.at[places].set(jnp.clip(sums, -limit, limit), mode="drop")
                continue
            vector = self._add_window(vector, part, begin + zero, keep, limit)
        return vector

    def _add_window(
        self, vector: jax.Array, part: jax.Array, begin: jax.Array, keep: jax.Array, limit: float
    ) -> jax.Array:
        window = lax.dynamic_slice(vector, (begin,), (part.size,))
        return lax.dynamic_update_slice(vector, self._sum(window, part, keep, limit), (begin,))

    def _sum(self, window: jax.Array, part: jax.Array, keep: jax.Array, limit: float) -> jax.Array:
        return jnp.clip(window + jnp.where(keep, part.astype(self.dtype), 0), -limit, limit)

    def has_long_leaves(self, leaves: Sequence[Leaf]) -> bool:
        """Whether most elements are in the pieces of long leaves, and no leaf is sparse."""
        if any(isinstance(leaf, SparseVector) for leaf in leaves):
            return False
        return sum(end - begin for begin, end in self._pieces()) > self.n // 2

    def _pieces(self) -> list[tuple[int, int]]:
        """The longest window of each leaf that consists of pieces, and of squares of a bitmap.

        The windows of leaves with less than two pieces are left out.
        """
        windows = []
        for begin, end in itertools.pairwise(self.offsets):
            first = -(-begin // bitmap.SQUARE) * bitmap.SQUARE
            count = max(end - first, 0) // PIECE
            if count > 1:
                windows.append((first, first + count * PIECE))
        return windows

    def add_sample(
        self, vector: jax.Array, leaves: Sequence[jax.Array], keep: jax.Array, limit: float, size: int
    ) -> jax.Array:
        """What :meth:`add_leaves` gives at ``size`` places, without the rest.

        The places are those of ``kernels_pallas.sample_places``.
        """
        places = sample_places(lax.iota(jnp.uint32, size), self.n, size).astype(jnp.int32)
        at = sample_places(np.arange(size, dtype=np.uint32), self.n, size)
        edges = itertools.pairwise(np.searchsorted(at, self.offsets))
        here = [places[begin:end] - offset for offset, (begin, end) in zip(self.offsets, edges, strict=False)]
        return self._add_at(vector, leaves, keep, limit, here)

    def add_samples(
        self, vector: jax.Array, leaves: Sequence[jax.Array], keep: jax.Array, limit: float, sizes: Sequence[int]
    ) -> jax.Array:
        """What :meth:`add_leaves` gives at some places of each leaf, one leaf after another.

        Args:
          vector, leaves, keep, limit: as of :meth:`add_leaves`.
          sizes: for each leaf, at how many of its places: as of ``kernels_pallas.sample_places``.
        """
        none = jnp.zeros(0, jnp.int32)
        here = [
            sample_places(lax.iota(jnp.uint32, size), n, size).astype(jnp.int32) if size else none
            for n, size in zip(self.lengths, sizes, strict=True)
        ]
        return self._add_at(vector, leaves, keep, limit, here)

    def _add_at(
        self,
        vector: jax.Array,
        leaves: Sequence[jax.Array],
        keep: jax.Array,
        limit: float,
        places: Sequence[jax.Array],
    ) -> jax.Array:
        """What :meth:`add_leaves` gives at these places of each leaf."""
        used = [(leaf, offset, at) for leaf, offset, at in zip(leaves, self.offsets, places, strict=False) if at.size]
        window = vector[jnp.concatenate([offset + at for _, offset, at in used])]
        part = jnp.concatenate([leaf.reshape(-1)[at].astype(self.dtype) for leaf, _, at in used])
        return self._sum(window, part, keep, limit)

    def add_and_mark(
        self, vector: jax.Array, leaves: Sequence[jax.Array], keep: jax.Array, limit: float, threshold: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Adds as :meth:`add_leaves`, and finds which elements of the sum reach a threshold.

        A long leaf is added in pieces. Each is marked while it is still in the core's cache, so
        that the sum is not read from memory again.

        Args:
          vector, leaves, keep, limit: as of :meth:`add_leaves`.
          threshold: a scalar, or one for each leaf.

        Returns:
          The sum; and the bitmap of the elements that reach the threshold.
        """
        # It depends on the threshold, so XLA computes first what that depends on. Only then can it
        # overwrite the vector in place.
        zero = zero_of(jnp.all(threshold >= 0))
        thresholds = [threshold[i] if threshold.ndim else threshold for i in range(len(leaves))]
        windows, marked = self._pieces(), []
        for leaf, own, (begin, end) in zip(leaves, thresholds, itertools.pairwise(self.offsets), strict=True):
            part = leaf.reshape(-1)
            first, last = next(((b, e) for b, e in windows if begin <= b < end), (end, end))
            for b, e in ((begin, first), (last, end)):
                if b < e:
                    vector = self._add_window(vector, part[b - begin : e - begin], b + zero, keep, limit)
            if first < last:
                begins = range(first, last, PIECE)
                vector, columns = self._add_pieces(vector, part, begin, begins, keep, limit, own)
                marked.append(columns)
        # The squares between the windows.
        whole = self.n // bitmap.SQUARE * bitmap.SQUARE
        begins, ends = [0, *(end for _, end in windows)], [*(begin for begin, _ in windows), whole]
        between = [self._mark(vector, threshold, b, e) for b, e in zip(begins, ends, strict=True)]
        squares = [
            *between[0],
            *itertools.chain(*([own, *rest] for own, rest in zip(marked, between[1:], strict=True))),
        ]
        return vector, bitmap.of_squares(squares, self._reaches(vector, threshold, whole, self.n))

    def _mark(self, vector: jax.Array, threshold: jax.Array, begin: int, end: int) -> list[jax.Array]:
        """Marks the squares of a part of the vector: their columns, in one array or several."""
        # The stretches of whole squares with one threshold each, and what is between them. XLA
        # would mark them all together in six times the time.
        edges = [begin, end]
        if threshold.ndim:
            for b, e in itertools.pairwise(np.clip(self.offsets, begin, end).tolist()):
                first, last = -(-b // bitmap.SQUARE) * bitmap.SQUARE, e // bitmap.SQUARE * bitmap.SQUARE
                edges += [first, last] if first < last else []
        parts = itertools.pairwise(sorted(edges))
        return [_columns(self._reaches(vector, threshold, b, e)) for b, e in parts if b < e]

    def _reaches(self, vector: jax.Array, threshold: jax.Array, begin: int, end: int) -> jax.Array:
        """Which elements of a part of the vector reach the threshold, or that of their leaf."""
        if not threshold.ndim:
            return reaches(vector[begin:end], threshold)
        edges = np.clip(self.offsets, begin, end).tolist()
        masks = [reaches(vector[b:e], threshold[i]) for i, (b, e) in enumerate(itertools.pairwise(edges)) if b < e]
        return jnp.concatenate(masks) if masks else jnp.zeros(0, bool)

    def _add_pieces(
        self,
        vector: jax.Array,
        part: jax.Array,
        offset: int,
        begins: range,
        keep: jax.Array,
        limit: float,
        threshold: jax.Array,
    ) -> tuple[jax.Array, jax.Array]:
        """Adds pieces of a leaf, and marks them.

        Args:
          vector: to which the pieces are added.
          part: the leaf.
          offset: where the leaf begins in the vector.
          begins: where its pieces begin in the vector.

        Returns:
          The vector; and the columns of the pieces' squares.
        """

        def add(i: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            vector, columns = carry
            here = begins.start + i * PIECE
            piece = lax.dynamic_slice(part, (here - offset,), (PIECE,))
            vector = self._add_window(vector, piece, here, keep, limit)
            squares = _columns(reaches(lax.dynamic_slice(vector, (here,), (PIECE,)), threshold))
            return vector, lax.dynamic_update_slice(columns, squares, (i * (PIECE // bitmap.SQUARE), 0))

        columns = jnp.zeros((len(begins) * (PIECE // bitmap.SQUARE), bitmap.WORD), jnp.uint32)
        return lax.fori_loop(0, len(begins), add, (vector, varying_as(columns, vector)))

    def add_sparse(self, leaves: Sequence[jax.Array], x: SparseVector) -> list[jax.Array]:
        """Adds each element of a sparse vector to the leaf that holds its index.

        This is in place if the leaves may be overwritten.
        """
        flat = [varying_as(leaf.reshape(-1), x.values) for leaf in leaves]
        if x.values.ndim == 1:
            flat = self._add_run(flat, x)
        else:
            flat, _ = lax.scan(lambda flat, run: (self._add_run(flat, run), None), flat, x)
        return [leaf.reshape(shape) for leaf, shape in zip(flat, self.shapes, strict=True)]

    def _add_run(self, leaves: list[jax.Array], x: SparseVector) -> list[jax.Array]:
        edges = first_from(x.indices, jnp.array(self.offsets, jnp.int32))
        values = jnp.pad(x.values, (0, CHUNK))
        indices = jnp.pad(x.indices, (0, CHUNK), constant_values=x.n)

        def add(leaf, begin, end, offset):
            # The last chunk may also hold elements of later leaves. Their indices are past this
            # leaf, so they are dropped.
            def chunk(i, leaf):
                here = begin + i * CHUNK
                places = lax.dynamic_slice(indices, (here,), (CHUNK,)) - offset
                part = lax.dynamic_slice(values, (here,), (CHUNK,)).astype(leaf.dtype)
                return leaf.at[places].add(part, mode="drop", indices_are_sorted=True)

            return lax.fori_loop(0, (end - begin + CHUNK - 1) // CHUNK, chunk, leaf)

        return [
            add(leaf, edges[i], edges[i + 1], self.offsets[i]) if leaf.size else leaf for i, leaf in enumerate(leaves)
        ]


def _columns(mask: jax.Array) -> jax.Array:
    """The columns of the squares of a mask."""
    return bitmap.pack_squares(mask.reshape(-1, bitmap.WORD, bitmap.WORD))
