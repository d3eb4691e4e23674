"""Block layouts: which blocks of a weight are present, in which order they are stored, and the tables made from that.

Pure NumPy, no TensorFlow and no device. A layout is a matrix with one entry per block of the dense weight `Wd [C, K]`,
rows for blocks of input features (C), columns for blocks of output features (K); an entry other than 0 means that the
block is present. Present blocks are numbered, and the weight is stored as `W [blocks, bsize, bsize]` in that order.
"""

import functools
import hashlib
import itertools
import threading
import weakref

import numpy as np

__all__ = ["SEG_MAX", "BlockLayout", "segmentation", "xprop_lut"]

SEG_MAX = 2**63 - 1  # a segment length that never cuts
_INT32_MAX = 2**31 - 1

# The table's format: the C++ side reads the same in src/kernels/layout_table.h.
_TABLE_VERSION = 1
_HEADER_WORDS = 16
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2^64 divided by the golden ratio
_SEEDS = (np.uint64(0x243F6A8885A308D3), np.uint64(0x13198A2E03707344))  # digits of pi

_cache = weakref.WeakValueDictionary()
_cache_lock = threading.Lock()


class BlockLayout:
    """The blocks of a layout in storage order, with the lists by output column and by input row.

    Layouts are interned: while one is alive, constructing another of the same content (shape, present blocks and
    `z_order`) gives the same object, also from other threads and from pickles. So `==` and `hash` go by content.
    Everything is read-only; treat the Python lists as such too, since all users of a layout share them.

    Args:
      layout: two-dimensional array-like of bool, integers or floats, `[CB, KB]`, at least one entry other than 0.
      z_order: number the blocks in Morton order, bits of c in even and bits of k in odd positions (G. M. Morton, 1966),
        so that neighbours in storage share inputs and outputs. False: column by column, c ascending in each.

    Raises:
      TypeError: the entries are neither bool nor integers nor real numbers.
      ValueError: the layout is not two-dimensional, has no block, holds NaN, or has 2^31 rows, columns or blocks.

    Attributes:
      CB, KB: rows and columns.
      blocks: number of blocks present.
      z_order: as given.
      density: `blocks / (CB * KB)`.
      layout: bool `[CB, KB]`.
      update: int32 `[blocks, 2]`, `(c, k)` of each block.
      column_ptr, column_c, column_w: int32 `[KB + 1]`, `[blocks]`, `[blocks]`: column k has the entries
        `column_ptr[k]` to `column_ptr[k + 1]`, each the row c and the block id w, c ascending.
      row_ptr, row_k, row_w: int32 `[CB + 1]`, `[blocks]`, `[blocks]`: likewise for rows, k ascending.
      table: int32, all of this in one piece, as the ops take it.
      fingerprint: 32 hexadecimal digits that stand for `CB`, `KB` and `update`.
    """

    def __new__(cls, layout, z_order=True):
        shape, present = _present(layout)
        z_order = bool(z_order)
        key = (shape, z_order, hashlib.blake2b(present, digest_size=32).digest())
        with _cache_lock:
            found = _cache.get(key)
        if found is not None:
            return found
        built = super().__new__(cls)
        built._build(*shape, present, z_order)
        with _cache_lock:
            return _cache.setdefault(key, built)  # another thread may have been faster

    def _build(self, CB, KB, present, z_order):
        # Positions are int64: CB * KB may pass 2^31.
        blocks = present.size
        c, k = np.divmod(present, KB)  # row by row
        by_column = np.argsort(k * CB + c)
        ids = np.empty(blocks, np.int32)
        ids[np.argsort(morton(c, k)) if z_order else by_column] = np.arange(blocks, dtype=np.int32)
        column_lengths, row_lengths = np.bincount(k, minlength=KB), np.bincount(c, minlength=CB)

        table = np.zeros(_HEADER_WORDS + CB + KB + 2 + 6 * blocks, np.int32)
        self.column_ptr, self.column_c, self.column_w, self.row_ptr, self.row_k, self.row_w, update = np.split(
            table[_HEADER_WORDS:], np.cumsum([KB + 1, blocks, blocks, CB + 1, blocks, blocks])
        )
        self.update = update.reshape(blocks, 2)
        np.cumsum(column_lengths, out=self.column_ptr[1:])
        self.column_c[:] = c[by_column]
        self.column_w[:] = ids[by_column]
        np.cumsum(row_lengths, out=self.row_ptr[1:])
        self.row_k[:] = k
        self.row_w[:] = ids
        self.update[ids, 0] = c
        self.update[ids, 1] = k

        mark = fingerprint(CB, KB, self.update)
        table[:4] = _TABLE_VERSION, CB, KB, blocks
        table[4:8] = mark.view(np.int32)
        table[8:12] = (
            column_lengths.max(),
            row_lengths.max(),
            np.count_nonzero(column_lengths),
            np.count_nonzero(row_lengths),
        )

        self.CB, self.KB, self.blocks, self.z_order = CB, KB, blocks, z_order
        self.density = blocks / (CB * KB)
        self.table = table
        self.fingerprint = "".join(f"{word:08x}" for word in mark)
        _freeze(table, self.update, self.column_ptr, self.column_c, self.column_w)
        _freeze(self.row_ptr, self.row_k, self.row_w)

    @functools.cached_property
    def layout(self):
        present = np.zeros((self.CB, self.KB), bool)
        present[self.update[:, 0], self.update[:, 1]] = True
        _freeze(present)
        return present

    def __reduce__(self):
        return BlockLayout, (self.layout, self.z_order)

    def __repr__(self):
        return (
            f"BlockLayout({self.CB} x {self.KB}, blocks={self.blocks}, density={self.density:.3g}, "
            f"z_order={self.z_order})"
        )

    # The lists and lookup tables of the original package, kept for callers that read them; our kernels do not.

    @functools.cached_property
    def updat_list(self):
        """List of `(c, k)`, indexed by block id."""
        return list(map(tuple, self.update.tolist()))

    @property
    def updat_lut(self):
        """int32 `[blocks, 2]`, `(c, k)` of each block."""
        return self.update

    @functools.cached_property
    def fprop_list(self):
        """List of `(k, [(c, w), ...])`: non-empty columns ascending, then the empty ones."""
        return _nested(self.column_ptr, self.column_c, self.column_w)

    @functools.cached_property
    def bprop_list(self):
        """List of `(c, [(k, w), ...])`: non-empty rows ascending, then the empty ones."""
        return _nested(self.row_ptr, self.row_k, self.row_w)

    @functools.cached_property
    def _fprop(self):
        return _segment_lut(self.fprop_list, *segmentation(np.diff(self.column_ptr)))

    @functools.cached_property
    def _bprop(self):
        # Cut by the columns' statistics too: layouts are taken to be about symmetric.
        return _segment_lut(self.bprop_list, *segmentation(np.diff(self.column_ptr)))

    @property
    def fprop_lut(self):
        """int32, flat: `(offset in pairs, count, k, lock)` of each segment, then the entries `(c, w)`."""
        return self._fprop[0]

    @property
    def bprop_lut(self):
        """int32, flat: `(offset in pairs, count, c, lock)` of each segment, then the entries `(k, w)`."""
        return self._bprop[0]

    @property
    def fprop_segments(self):
        """Number of segments in `fprop_lut`."""
        return self._fprop[1]

    @property
    def bprop_segments(self):
        """Number of segments in `bprop_lut`."""
        return self._bprop[1]

    @property
    def fprop_locks(self):
        """Number of columns cut into several segments."""
        return self._fprop[2]

    @property
    def bprop_locks(self):
        """Number of rows cut into several segments."""
        return self._bprop[2]

    @property
    def fprop_shared(self):
        """8 bytes for each entry of the longest segment of a column."""
        return 8 * self._fprop[3]

    @property
    def bprop_shared(self):
        """8 bytes for each entry of the longest segment of a row."""
        return 8 * self._bprop[3]

    @functools.cached_property
    def l2_lut(self):
        """int32, flat: `(offset, count, k, 0)` of each column, then the block ids, then a 0 if the length were odd."""
        header, ids = [], []
        for k, entries in self.fprop_list:
            header += (4 * self.KB + len(ids), len(entries), k, 0)
            ids += (w for _, w in entries)
        return _frozen_int32(header + ids + [0] * (len(ids) % 2))

    @property
    def l2_shared(self):
        """4 bytes for each block of the longest column."""
        return 4 * int(np.diff(self.column_ptr).max())


def _present(layout):
    """Checks a layout; gives its shape and the row-major positions, int64, of the blocks that are present."""
    expected = "a two-dimensional array of bool, integers or real numbers, one entry per block, 0 where it is absent"
    try:
        array = np.asarray(layout)
    except ValueError as error:  # ragged lists
        raise ValueError(f"layout must be {expected}: {error}") from None
    if array.dtype.name == "bfloat16":  # not a kind of number for NumPy
        array = array.astype(np.float32)
    if array.dtype.kind not in "buif":
        raise TypeError(f"layout must be {expected}, got dtype {array.dtype}")
    if array.ndim != 2:
        raise ValueError(f"layout must be {expected}, got shape {array.shape}")
    if max(array.shape) > _INT32_MAX:
        raise ValueError(f"layout has shape {array.shape}, at most {_INT32_MAX} rows and columns are allowed")
    present = np.flatnonzero(array != 0)
    if array.dtype.kind == "f":
        c, k = np.divmod(present, max(array.shape[1], 1))
        nan = np.flatnonzero(np.isnan(array[c, k]))
        if nan.size:
            raise ValueError(f"layout must hold numbers, got NaN at row {c[nan[0]]}, column {k[nan[0]]}")
    if not present.size:
        raise ValueError(f"layout must have at least one entry other than 0, got shape {array.shape} without any")
    if present.size > _INT32_MAX:
        raise ValueError(f"layout has {present.size} blocks, at most {_INT32_MAX} are allowed")
    return array.shape, present


def morton(c, k):
    """Morton codes: bits of c in even positions, of k in odd ones. Integers below 2^32, any shape; gives uint64."""
    return _spread(c) | _spread(k) << np.uint64(1)


def _spread(x):
    """Moves bit i of each number to bit 2i, halves first (uint64)."""
    x = np.asarray(x).astype(np.uint64)
    for shift, mask in (
        (16, 0x0000FFFF0000FFFF),
        (8, 0x00FF00FF00FF00FF),
        (4, 0x0F0F0F0F0F0F0F0F),
        (2, 0x3333333333333333),
        (1, 0x5555555555555555),
    ):
        x = (x | x << np.uint64(shift)) & np.uint64(mask)
    return x


def fingerprint(CB, KB, update):
    """128 bits, uint32 `[4]`, that depend on CB, KB and the update list `[blocks, 2]` in order.

    The same numbers as `Fingerprint` in src/kernels/layout_table.cc, which checks them.
    """
    pairs = np.ascontiguousarray(update, np.int32).view(np.uint32).astype(np.uint64)
    pairs = pairs[:, 0] << np.uint64(32) | pairs[:, 1]
    position = np.arange(1, pairs.size + 1, dtype=np.uint64) * _GOLDEN
    size = np.array([CB << 32 | KB], np.uint64)
    sums = [_mix(_mix(size + seed) + _mix((pairs ^ seed) + position).sum(dtype=np.uint64)) for seed in _SEEDS]
    return np.concatenate(sums).astype("<u8").view("<u4").astype(np.uint32)


def _mix(z):
    """The finalizer of SplitMix64 (Steele, Lea, Flood 2014), modulo 2^64."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def segmentation(lengths):
    """How long columns are cut into segments of about equal work: `(segment size, shortest rest)` from their lengths.

    With max and min the largest and smallest length that is not 0: nothing is cut unless max / min > 2; then the size
    is `max(ceil(max / 4), 2 min)`, and a rest shorter than `max(ceil(size / 4), 4)` stays with the segment before it.
    """
    lengths = lengths[lengths > 0]
    longest, shortest = int(lengths.max()), int(lengths.min())
    size = max(-(-longest // 4), 2 * shortest) if longest > 2 * shortest else SEG_MAX
    return size, max(-(-size // 4), 4)


def xprop_lut(KB, cs, ks, vs, idx, max_seg, min_seg):
    """Builds the list and the segment table of one direction.

    Args:
      KB: number of output blocks.
      cs, ks, vs: input block, output block and block id of each entry.
      idx: the order in which to read the entries, by output block and within it by input block; None: as they come.
      max_seg, min_seg: the segment size and the shortest rest, see `segmentation`.

    Returns:
      `(list, lut, segments, locks, longest)`: the nested list as in `fprop_list`, the int32 table as in `fprop_lut`,
      the number of segments, of output blocks cut into several, and of entries in the longest segment.
    """
    order = np.arange(len(ks)) if idx is None else np.asarray(idx)
    cs, ks, vs = (np.asarray(values)[order] for values in (cs, ks, vs))
    if np.any(np.diff(ks) < 0):
        raise ValueError("entries must come sorted by output block: give their order as idx")
    ptr = np.concatenate([[0], np.cumsum(np.bincount(ks, minlength=KB))])
    nested = _nested(ptr, cs, vs)
    return (nested, *_segment_lut(nested, max_seg, min_seg))


def _nested(ptr, inner, ids):
    """`[(outer, [(inner, id), ...]), ...]` from offsets and entries, the empty ones last."""
    entries = list(zip(inner.tolist(), ids.tolist()))
    ptr = ptr.tolist()
    lists = [(outer, entries[begin:end]) for outer, (begin, end) in enumerate(itertools.pairwise(ptr))]
    return sorted(lists, key=lambda item: not item[1])  # stable: each part stays ascending


def _segment_lut(nested, size, rest):
    """`(lut, segments, locks, longest segment)` of a nested list."""
    segments, locks = [], 0  # segments: (entries, output block, lock)
    for outer, entries in nested:
        cuts = max(0, (len(entries) - rest) // size)
        locks += cuts > 0
        bounds = [size * i for i in range(cuts + 1)] + [len(entries)]
        segments += [(entries[a:b], outer, locks if cuts else 0) for a, b in itertools.pairwise(bounds)]
    header, pairs = [], []
    for entries, outer, lock in segments:
        header += (2 * len(segments) + len(pairs), len(entries), outer, lock)
        pairs += entries
    lut = _frozen_int32(header + [number for pair in pairs for number in pair])
    return lut, len(segments), locks, max(len(entries) for entries, _, _ in segments)


def _frozen_int32(numbers):
    array = np.array(numbers, np.int32)
    _freeze(array)
    return array


def _freeze(*arrays):
    for array in arrays:
        array.flags.writeable = False
