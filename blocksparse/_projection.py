"""Projections onto a subset of the feature rows."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

__all__ = ["SparseProj"]


class SparseProj:
    """Picks a sorted subset of the feature rows of `[nhidden, ...]`, and puts rows back.

    Nothing is changed in place and everything is differentiable to any order, with the same bits from run to run.

    Args:
      nhidden: number of feature rows.
      nproj: size of the subset, at most nhidden. Without `gather_lut`: that many random rows, from `np.random`.
      proj_stride: at most nhidden: rows 0, s, 2s, ... as many as the largest multiple of `block_size` that fits.
      block_size: see `proj_stride`.
      gather_lut: the subset itself, distinct row numbers; `nproj` must be given too.
      name: prefix of the op names.

    Attributes:
      name, nhidden, nproj: as given, or as they follow.
      gather_lut: int32 `[nproj]`, the row numbers.
      scatter_lut: int32 `[nhidden]`, the place of a row in the subset, -1 where it is not in it.
    """

    def __init__(
        self,
        nhidden: int,
        nproj: int | None = None,
        proj_stride: int | None = None,
        block_size: int = 32,
        gather_lut=None,
        name: str | None = None,
    ):
        if gather_lut is not None:
            gather_lut = np.array(gather_lut, np.int32)
            if nproj is None or gather_lut.shape != (nproj,):
                raise ValueError(f"gather_lut needs nproj, its length, got nproj {nproj} and shape {gather_lut.shape}")
        elif nproj is not None:
            if not 0 < nproj <= nhidden:
                raise ValueError(f"nproj must be 1 to nhidden ({nhidden}), got {nproj}")
            rows = np.arange(nhidden, dtype=np.int32)
            np.random.shuffle(rows)  # noqa: NPY002 (np.random.seed decides)
            gather_lut = np.sort(rows[:nproj])
        elif proj_stride is not None:
            if not 0 < proj_stride <= nhidden:
                raise ValueError(f"proj_stride must be 1 to nhidden ({nhidden}), got {proj_stride}")
            nproj = nhidden // proj_stride // block_size * block_size
            if nproj == 0:
                raise ValueError(
                    f"proj_stride {proj_stride} leaves {nhidden // proj_stride} of {nhidden} rows, less than "
                    f"block_size ({block_size})"
                )
            gather_lut = np.arange(nproj, dtype=np.int32) * np.int32(proj_stride)
        else:
            raise ValueError("missing nproj, proj_stride or gather_lut")
        if gather_lut.min() < 0 or gather_lut.max() >= nhidden or np.unique(gather_lut).size != nproj:
            raise ValueError(f"gather_lut must hold distinct rows from 0 to {nhidden - 1}")
        self.name = name or "SparseProj"
        self.nhidden, self.nproj = nhidden, nproj
        self.gather_lut = gather_lut
        self.scatter_lut = np.full(nhidden, -1, np.int32)
        self.scatter_lut[gather_lut] = np.arange(nproj, dtype=np.int32)

    def __getstate__(self):
        return self.nhidden, self.nproj, self.gather_lut, self.name

    def __setstate__(self, state):
        nhidden, nproj, gather_lut, name = state
        self.__init__(nhidden, nproj, gather_lut=gather_lut, name=name)

    def gather(self, x):
        """`y[i] = x[gather_lut[i]]`: `[nhidden, ...]` to `[nproj, ...]`."""
        return self._gather(self._rows("x", x, self.nhidden))

    def scatter(self, x):
        """`y[gather_lut[i]] = x[i]`, 0 in the other rows: `[nproj, ...]` to `[nhidden, ...]`."""
        return self._scatter(self._rows("x", x, self.nproj))

    def scatter_add(self, x, y):
        """`x [nhidden, ...]` with `y [nproj, ...]` added to the rows of the subset."""
        x, y = self._pair(x, y)
        return tf.where(self._subset(x), x + self._scatter(y), x)

    def scatter_mul(self, x, y):
        """`x [nhidden, ...]` with the rows of the subset multiplied by `y [nproj, ...]`."""
        x, y = self._pair(x, y)
        return tf.where(self._subset(x), x * self._scatter(y), x)

    # Gather and scatter are each other's gradient. TensorFlow's own gradient of a gather adds up rows, on a GPU with
    # atomics; here every row has one source.

    def _gather(self, x):
        @tf.custom_gradient
        def gather(x):
            # int64: TensorFlow keeps int32 on the host, and would copy the row numbers to a GPU each time.
            return tf.gather(x, tf.constant(self.gather_lut, tf.int64)), self._scatter

        with tf.name_scope(self.name):
            return gather(x)

    def _scatter(self, x):
        @tf.custom_gradient
        def scatter(x):
            rows = tf.gather(x, tf.constant(np.maximum(self.scatter_lut, 0), tf.int64))
            return tf.where(self._subset(rows), rows, tf.zeros_like(rows)), self._gather

        with tf.name_scope(self.name):
            return scatter(x)

    def _subset(self, x):
        """Which rows of `x [nhidden, ...]` are in the subset, in a shape that broadcasts over x."""
        shape = tf.concat([[self.nhidden], tf.ones(tf.rank(x) - 1, tf.int32)], 0)
        return tf.reshape(tf.constant(self.scatter_lut >= 0), shape)

    def _rows(self, name, x, rows):
        x = tf.convert_to_tensor(x)
        if x.dtype not in (tf.float32, tf.float16, tf.bfloat16):
            raise ValueError(f"{name} has dtype {x.dtype.name}, allowed are float32, float16 and bfloat16")
        if x.shape.rank is not None and (x.shape.rank == 0 or not x.shape[:1].is_compatible_with([rows])):
            raise ValueError(f"{name} must have {rows} rows in its first dimension, got shape {x.shape}")
        return x

    def _pair(self, x, y):
        x, y = self._rows("x", x, self.nhidden), self._rows("y", y, self.nproj)
        if x.dtype != y.dtype:
            raise ValueError(f"x and y must have one dtype, got {x.dtype.name} and {y.dtype.name}")
        if x.shape.rank is not None and y.shape.rank is not None and not x.shape[1:].is_compatible_with(y.shape[1:]):
            raise ValueError(f"x and y must agree in all dimensions but the first, got {x.shape} and {y.shape}")
        return x, y
