"""Block-sparse matrix products: activations times a weight of which only the blocks of a layout exist.

`BlocksparseMatMul` is the operator; `SparseProj` picks feature rows; `group_param_grads` and its kin rewrite gradient
graphs. Works eagerly, in `tf.function` and in `tf.compat.v1` graphs, on CPUs and GPUs.

The ops themselves are here under their generated names: `blocksparse_matmul`, `blocksparse_matmul_dx`,
`blocksparse_matmul_dw`, `blocksparse_matmul_dwa`, `blocksparse_matmul_dg`. Others that the original package had are
compositions now and have no op: `blocksparse_reduced_dw` (use `block_reduced_full_dw`), `l2_normalize_ck`,
`l2_normalize_gain_ck` and their gradients (`BlocksparseMatMul.l2_normalize`), `identity_init` (`IdentityInit`),
`gather_scatter_op`, `scatter_add_mul_op`, `scatter_mul_grad_op` (`SparseProj`).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.ops import init_ops

from blocksparse import _gradients, _library, reference  # noqa: F401 (_gradients registers itself)
from blocksparse._constants import get_constant, host_constant
from blocksparse._grouping import (
    add_control_input,
    block_reduced_full_dw,
    get_bsmm_dx_ops,
    get_parents,
    group_param_grads,
)
from blocksparse._projection import SparseProj
from blocksparse._xla import check_not_xla
from blocksparse.layout import SEG_MAX, BlockLayout, xprop_lut

__all__ = [
    "SEG_MAX",
    "BlocksparseMatMul",
    "IdentityInit",
    "SparseProj",
    "add_control_input",
    "block_reduced_full_dw",
    "dw_matmul_large_n",
    "get_bsmm_dx_ops",
    "get_constant",
    "get_parents",
    "group_param_grads",
    "largest_block",
]

_ops = _library.op_module
blocksparse_matmul = _ops.blocksparse_matmul
blocksparse_matmul_dx = _ops.blocksparse_matmul_dx
blocksparse_matmul_dw = _ops.blocksparse_matmul_dw
blocksparse_matmul_dwa = _ops.blocksparse_matmul_dwa
blocksparse_matmul_dg = _ops.blocksparse_matmul_dg

_BLOCK_SIZES = (8, 16, 32, 64, 128)
_DTYPES = (tf.float32, tf.float16, tf.bfloat16)

# What a layout gives its operator as it is: the lists and lookup tables of the original package, built when asked for.
_LAYOUT_ATTRIBUTES = frozenset(
    "updat_list updat_lut fprop_list bprop_list fprop_lut bprop_lut l2_lut fprop_segments bprop_segments fprop_locks "
    "bprop_locks fprop_shared bprop_shared l2_shared".split()
)


class IdentityInit(init_ops.Initializer):
    """Initializer of a weight that passes its input on: `W[w, i, i] = scale` where `c mod KB == k mod CB`, else 0.

    A rectangular layout gets a repeated identity. Gives a tensor `[blocks, bsize, bsize]` of `dtype` (default float32).

    Args:
      lut: int `[blocks, 2]`, `(c, k)` of each block.
      CB, KB: block counts of the layout. blocks, bsize: shape of the weight. scale: the value on the diagonal.
    """

    def __init__(self, lut, CB: int, KB: int, blocks: int, bsize: int, scale: float = 1.0):
        self.lut, self.CB, self.KB, self.blocks, self.bsize, self.scale = np.asarray(lut), CB, KB, blocks, bsize, scale

    def __call__(self, shape, dtype=None, partition_info=None, **kwargs):
        if tuple(shape) != (self.blocks, self.bsize, self.bsize):
            raise ValueError(
                f"shape must be {(self.blocks, self.bsize, self.bsize)} for this layout, got {tuple(shape)}"
            )
        diagonal = self.lut[:, 0] % self.KB == self.lut[:, 1] % self.CB
        w = np.zeros((self.blocks, self.bsize, self.bsize), np.float32)
        w[diagonal] = self.scale * np.eye(self.bsize, dtype=np.float32)
        return tf.cast(w, dtype or tf.float32)


class BlocksparseMatMul:
    """The product of activations with a block-sparse weight.

    The dense equivalent of the weight is `Wd [C, K]`: block w of `W [blocks, bsize, bsize]`, at `(c, k)` of the layout,
    is the piece with rows `c * bsize...` and columns `k * bsize...`; everything else is 0. Calling the object gives

    * with `feature_axis=1`, features last:   `I [..., C]`, output `[..., K] = I Wd`
    * with `feature_axis=0`, features first:  `I [C, ...]`, output `[K, ...] = Wd^T I`

    with all other dimensions as batch, of any number and size.

    Args:
      layout: `[CB, KB]` array of bool, integers or floats; an entry other than 0 means that the block is present. Rows
        are blocks of input features, columns of output features. They may be empty, but not all of them.
      block_size: 8, 16, 32, 64 or 128.
      feature_axis: 0 or 1, see above.
      z_order: number the blocks in Morton order, bits of c in even positions, of k in odd ones; else column by column.
      name: default name of the ops.

    Raises:
      TypeError, ValueError: for a layout that is not such an array, or another block size or axis.

    Attributes:
      axis, bsize, z_order, name: as given.
      CB, KB, C, K: block counts and feature counts, `C = CB * bsize`.
      blocks: number of blocks present.
      sparsity: `blocks / (CB * KB)`, rounded to 3 digits (the density).
      flops: floating-point operations of one batch entry.
      w_shape, g_shape: shapes of weight and gate.
      count: number of calls so far, which numbers the op names.
      layout: bool `[CB, KB]`, this object's own: `prune` clears entries of it.
      updat_list, updat_lut, fprop_list, bprop_list, fprop_lut, bprop_lut, l2_lut, fprop_segments, bprop_segments,
        fprop_locks, bprop_locks, fprop_shared, bprop_shared, l2_shared: see `blocksparse.layout.BlockLayout`.
    """

    def __init__(
        self, layout, block_size: int = 32, feature_axis: int = 0, z_order: bool = True, name: str | None = None
    ):
        if block_size not in _BLOCK_SIZES:
            raise ValueError(f"block_size must be one of {_BLOCK_SIZES}, got {block_size!r}")
        if feature_axis not in (0, 1):
            raise ValueError(f"feature_axis must be 0 (features first) or 1 (features last), got {feature_axis!r}")
        self._blocks = BlockLayout(layout, z_order)
        self.axis, self.bsize, self.z_order = int(feature_axis), int(block_size), bool(z_order)
        self.name = name or "BlocksparseMatMul"
        self.CB, self.KB, self.blocks = self._blocks.CB, self._blocks.KB, self._blocks.blocks
        self.C, self.K = self.CB * self.bsize, self.KB * self.bsize
        if max(self.C, self.K) >= 2**31:
            raise ValueError(f"feature counts must stay below 2^31, got C={self.C} and K={self.K}")
        self.sparsity = round(self._blocks.density, 3)
        self.flops = self.blocks * self.bsize * self.bsize * 2
        self.w_shape = (self.blocks, self.bsize, self.bsize)
        self.g_shape = (self.blocks,)
        self.count = 0
        self.layout = self._blocks.layout.copy()
        self._attrs = dict(axis=self.axis, bsize=self.bsize, C=self.C, K=self.K)
        self._w_shape = tf.TensorShape(self.w_shape)
        self._eager_table = None

    def __getattr__(self, name):
        if name in _LAYOUT_ATTRIBUTES:
            return getattr(self._blocks, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __repr__(self):
        return (
            f"BlocksparseMatMul({self.name!r}, C={self.C}, K={self.K}, block_size={self.bsize}, "
            f"feature_axis={self.axis}, blocks={self.blocks}, density={self.sparsity})"
        )

    def __getstate__(self):
        return self.layout, self.bsize, self.axis, self.z_order, self.name

    def __setstate__(self, state):
        self.__init__(*state)

    def i_shape(self, N: int) -> tuple[int, int]:
        """Shape of an input with N batch entries."""
        return (N, self.C) if self.axis else (self.C, N)

    def o_shape(self, N: int) -> tuple[int, int]:
        """Shape of an output with N batch entries."""
        return (N, self.K) if self.axis else (self.K, N)

    def block_coord(self, block: int) -> tuple[int, int]:
        """`(c, k)` of a block."""
        return self.updat_list[block]

    def xprop_lut(self, KB, cs, ks, vs, idx, max_seg, min_seg):
        """See `blocksparse.layout.xprop_lut`."""
        return xprop_lut(KB, cs, ks, vs, idx, max_seg, min_seg)

    # --------------------------------------------------------------------------------------------------- the product

    def __call__(
        self,
        I,
        W,
        gate=None,
        gate_grad: bool = False,
        dw_gated: bool = False,
        name: str | None = None,
        bench: int = 0,
        dw_dtype: Any = None,
    ):
        """The product; see the class.

        Accumulates in float32 and rounds once; gives the same bits from run to run. On a GPU float32 follows
        `tf.config.experimental.enable_tensor_float_32_execution`.

        Gradients by the gate's options, with `dW0[w] = I_c^T dO_k` the gradient without a gate:

        | gate | gate_grad | dw_gated | dI    | dW                              | dgate                            |
        |------|-----------|----------|-------|---------------------------------|----------------------------------|
        | no   |           |          | exact | `dW0`                           |                                  |
        | yes  | False     | False    | gated | `dW0`, also where the gate is 0 | None                             |
        | yes  | False     | True     | gated | `dW0`, 0 where the gate is 0    | None                             |
        | yes  | True      | False    | gated | `gate * dW0`                    | `sum(dW0[w] * W[w])`             |
        | yes  | True      | True     | gated | `gate * dW0`                    | the same, 0 where the gate is 0  |

        Args:
          I: float32, float16 or bfloat16, `[..., C]` or `[C, ...]`.
          W: `w_shape`, of I's dtype.
          gate: float32 `[blocks]`: every block counts that many times. Blocks whose gate is 0 are not read.
          gate_grad: differentiate with respect to the gate.
          dw_gated: no gradient for blocks whose gate is 0.
          name: name of the op in a graph; default `"<name>_%06d"`, with the number of the call.
          bench: time this many launches and print the mean.
          dw_dtype: dtype of W's gradient, default W's. Another one works where all of W's gradients share it and no
            while loop carries them; elsewhere TensorFlow raises its own error.

        Returns:
          I's shape with K features, of I's dtype.

        Raises:
          ValueError: for shapes and dtypes that do not fit.
          NotImplementedError: under `jit_compile=True`.
        """
        I, W = _tensor(I), _tensor(W)
        self._check_operand("I", I, self.C)
        self._check_weight(W, I.dtype)
        gates = [] if gate is None else [self._gate(gate)]
        number = self.count
        self.count += 1
        eager = tf.executing_eagerly()
        return _ops.blocksparse_matmul(
            I,
            W,
            self._table(eager),
            gates,
            gate_grad=bool(gates) and gate_grad,
            gated_dw=bool(gates) and dw_gated,
            dw_dtype=W.dtype if dw_dtype is None else _weight_dtype(dw_dtype),
            bench=bench,
            name=None if eager else name or f"{self.name}_{number:06d}",
            **self._attrs,
        )

    matmul = __call__

    def weight_grad(
        self,
        xs,
        dys,
        gate=None,
        dw_gated: bool = False,
        dw_dtype: Any = None,
        W=None,
        gate_grad: bool = False,
        name: str | None = None,
    ):
        """The weight gradient summed over pairs of activations and output gradients, in one launch and rounded once.

        What a recurrent net needs of its time steps: `dW[w] = sum over p of x_p[:, block c]^T dy_p[:, block k]`. Works
        eagerly, in functions, loops and graphs, so a recurrent loop with a custom gradient that keeps its xs and dys
        can form the gradient of its weight at the end, in place of one for each step.

        Args:
          xs, dys: lists of equal length: `[..., C]` and `[..., K]` (features first with `feature_axis=0`), one dtype,
            each pair with a batch of its own. Or one pair of tensors.
          gate, gate_grad, dw_gated: as for the product; `gate_grad` needs W.
          dw_dtype: dtype of the result, default that of the activations.
          W: `w_shape`.
          name: name of the op in a graph.

        Returns:
          dW, `w_shape`; with `gate_grad` the pair of dW and the gate's gradient, float32 `[blocks]`.

        Raises:
          ValueError: for shapes, dtypes and lengths that do not fit.
          NotImplementedError: under `jit_compile=True`.
        """
        if not isinstance(xs, (list, tuple)):
            xs, dys = [xs], [dys]
        xs, dys = [_tensor(x) for x in xs], [_tensor(dy) for dy in dys]
        if not xs or len(xs) != len(dys):
            raise ValueError(f"xs and dys must be lists of equal length, at least 1, got {len(xs)} and {len(dys)}")
        for p, (x, dy) in enumerate(zip(xs, dys)):
            self._check_operand(f"xs[{p}]", x, self.C)
            self._check_operand(f"dys[{p}]", dy, self.K)
            if x.dtype != xs[0].dtype or dy.dtype != xs[0].dtype:
                raise ValueError(
                    f"xs and dys must have one dtype, got {xs[0].dtype.name} and in pair {p} "
                    f"{x.dtype.name} and {dy.dtype.name}"
                )
            batches = self._batch_shape(x), self._batch_shape(dy)
            if not batches[0].is_compatible_with(batches[1]):
                raise ValueError(f"xs[{p}] and dys[{p}] must have one batch shape, got {x.shape} and {dy.shape}")
        if gate_grad and (gate is None or W is None):
            raise ValueError("gate_grad needs the gate and W")
        gates = [self._gate(gate)] if gate is not None and dw_gated else []
        dtype = xs[0].dtype if dw_dtype is None else _weight_dtype(dw_dtype)
        dw = _ops.blocksparse_matmul_dw(
            xs,
            dys,
            self._table(tf.executing_eagerly()),
            gates,
            gated_dw=bool(gates),
            dw_dtype=tf.float32 if gate_grad else dtype,
            blocks=self.blocks,
            name=name,
            **self._attrs,
        )
        if not gate_grad:
            return dw
        W = _tensor(W)
        self._check_weight(W, xs[0].dtype)
        return tuple(
            _ops.blocksparse_matmul_dg(dw, W, self._gate(gate), dw_dtype=dtype, bsize=self.bsize, gated=dw_gated)
        )

    def _table(self, eager):
        """The layout's table as the ops read it: int32, on the host."""
        if eager:
            if self._eager_table is None:
                self._eager_table = host_constant(self._blocks.fingerprint, self._blocks.table)
            return self._eager_table
        check_not_xla(self.name)
        table = host_constant(self._blocks.fingerprint, self._blocks.table)
        if isinstance(table, tf.__internal__.EagerTensor):
            self._eager_table = table
        return table

    # -------------------------------------------------------------------------------------------------------- checks

    def _check_operand(self, name, x, features):
        if x.dtype not in _DTYPES:
            raise ValueError(f"{name} has dtype {x.dtype.name}, allowed are float32, float16 and bfloat16")
        shape = x.shape
        if shape.rank is None:
            return
        dims = shape.as_list()
        if not dims:
            raise ValueError(f"{name} must have at least one dimension, of {features} features, got a scalar")
        given, other = (dims[-1], dims[0]) if self.axis else (dims[0], dims[-1])
        if given is None or given == features:
            return
        ends = ("first", "last")
        hint = ""
        if other == features:
            hint = f". Its {ends[1 - self.axis]} dimension fits: BlocksparseMatMul(..., feature_axis={1 - self.axis})"
        raise ValueError(
            f"{name} must have {features} features in its {ends[self.axis]} dimension (feature_axis={self.axis}), "
            f"got shape {shape}{hint}"
        )

    def _check_weight(self, W, dtype=None):
        if W.dtype not in _DTYPES:
            raise ValueError(f"W has dtype {W.dtype.name}, allowed are float32, float16 and bfloat16")
        if dtype is not None and W.dtype != dtype:
            raise ValueError(f"I and W must have one dtype, got {dtype.name} and {W.dtype.name}")
        # Equality first: it takes a tenth of the time, and nearly always holds.
        if not (W.shape == self._w_shape or W.shape.is_compatible_with(self._w_shape)):
            raise ValueError(f"W must have shape {self.w_shape} for this layout, got {W.shape}")

    def _gate(self, gate):
        gate = tf.convert_to_tensor(gate) if tf.is_tensor(gate) else tf.convert_to_tensor(gate, tf.float32)
        if gate.dtype != tf.float32:
            raise ValueError(f"gate must be float32, got {gate.dtype.name}")
        if not gate.shape.is_compatible_with(self.g_shape):
            raise ValueError(f"gate must have shape {self.g_shape}, one entry for each block, got {gate.shape}")
        return gate

    def _batch_shape(self, x):
        if x.shape.rank is None:
            return x.shape
        return x.shape[:-1] if self.axis else x.shape[1:]

    # ------------------------------------------------------------------------------------------- weights and their norm

    def l2_normalize(self, W, gain=None, epsilon: float = 1e-12, dtype: Any = tf.float32):
        """Gives the weights of each output feature Euclidean norm 1, or its gain (Salimans and Kingma, 2016).

        With `S[j]` the sum of squares over all rows of all blocks that lead to output feature j:
        `Y[w, i, j] = gain[j] * W[w, i, j] / sqrt(max(S[j], epsilon))`, in float32. Differentiable to any order.

        Args:
          W: `w_shape`, float32, float16 or bfloat16.
          gain: float32 `[K]`, or None for 1.
          epsilon: lower bound of `S`.
          dtype: dtype of the result.

        Returns:
          `w_shape`.
        """
        W = _tensor(W)
        self._check_weight(W)
        w = tf.cast(W, tf.float32)
        scale = 1.0 / tf.sqrt(tf.maximum(self._column_sums(tf.square(w)), epsilon))
        if gain is not None:
            gain = tf.convert_to_tensor(gain)
            if gain.dtype != tf.float32 or not gain.shape.is_compatible_with([self.K]):
                raise ValueError(f"gain must be float32 [{self.K}], got {gain.dtype.name} {gain.shape}")
            scale *= gain
        return tf.cast(w * self._spread(scale), dtype)

    # Both are products with ones in true float32, each the gradient of the other. Nothing else has `tf32=False`: that
    # is how the grouping utilities tell them from weight gradients.

    def _column_sums(self, w):
        """The sum over each column of the dense weight, `[K]`."""
        ones, table = tf.ones([1, self.C]), self._table(tf.executing_eagerly())
        sums = _ops.blocksparse_matmul(
            ones, w, table, [], dw_dtype=tf.float32, tf32=False, **dict(self._attrs, axis=1), name="column_sums"
        )
        return tf.reshape(sums, [self.K])

    def _spread(self, v):
        """A weight with `v [K]` in every row of the dense equivalent."""
        ones, table = tf.ones([1, self.C]), self._table(tf.executing_eagerly())
        return _ops.blocksparse_matmul_dw(
            [ones],
            [v[None]],
            table,
            [],
            dw_dtype=tf.float32,
            tf32=False,
            blocks=self.blocks,
            name="spread",
            **dict(self._attrs, axis=1),
        )

    def identity_init(self, scale: float = 1.0, gpu: bool | None = None) -> IdentityInit:
        """Initializer of a weight that passes its input on, see `IdentityInit`. `gpu` is accepted and ignored."""
        return IdentityInit(self.updat_lut, self.CB, self.KB, self.blocks, self.bsize, scale)

    def ortho_init(self):
        """Initializer with orthonormal columns within each block column, or, of a dense layout, of the whole weight.

        Returns:
          `f(shape, dtype=np.float32, partition_info=None)`, which draws from `np.random` and gives an array `w_shape`,
          whatever the shape asked for.
        """

        def orthonormal(rows, columns):
            u, _, v = np.linalg.svd(np.random.standard_normal((rows, columns)), full_matrices=False)  # noqa: NPY002
            return u if u.shape == (rows, columns) else v

        def init(shape, dtype=np.float32, partition_info=None, **kwargs):
            b, layout = self.bsize, self._blocks
            w = np.empty(self.w_shape, np.float32)
            if self.blocks == self.CB * self.KB:
                print(f"{self.name} ortho_init dense")
                dense = orthonormal(self.C, self.K).reshape(self.CB, b, self.KB, b)
                w[:] = dense[layout.update[:, 0], :, layout.update[:, 1]]
            else:
                print(f"{self.name} ortho_init sparsity({self.sparsity:.2f})")
                for k in np.flatnonzero(np.diff(layout.column_ptr)):
                    ids = layout.column_w[layout.column_ptr[k] : layout.column_ptr[k + 1]]
                    w[ids] = orthonormal(len(ids) * b, b).reshape(len(ids), b, b)
            return w.astype(tf.as_dtype(dtype).as_numpy_dtype)

        return init

    def checker_init(self):
        """Initializer of a gate, float32 `[blocks]`: 1 where `c + k` is even, else 0, a checkerboard."""

        def init(shape=None, dtype=np.float32, partition_info=None, **kwargs):
            return (1 - self._blocks.update.sum(axis=1) % 2).astype(tf.as_dtype(dtype).as_numpy_dtype)

        return init

    def prune(self, param, gate):
        """Drops the blocks whose gate is 0, on the host.

        Clears their entries in `self.layout` and leaves everything else of this object as it is; make a new one of that
        layout for the new weight.

        Args:
          param: `[blocks, bsize, bsize]`. gate: `[blocks]`.

        Returns:
          `param` without those blocks, the others in order, and a gate of ones for it, of the gate's dtype.
        """
        param, gate = np.asarray(param), np.asarray(gate)
        if param.shape != self.w_shape or gate.shape != self.g_shape:
            raise ValueError(
                f"param must be {self.w_shape} and gate {self.g_shape}, got {param.shape} and {gate.shape}"
            )
        kept = gate != 0
        blocks = int(np.count_nonzero(kept))
        if blocks < self.blocks:
            c, k = self._blocks.update[~kept].T
            self.layout[c, k] = False
            param = param[kept]
        print(f"prune:  {self.blocks} {blocks} {100 * blocks / (self.CB * self.KB):.1f}%")
        return param, np.ones(blocks, gate.dtype)

    # ---------------------------------------------------------------- references in NumPy, see blocksparse.reference

    def fprop_test(self, I, W, gate=None):
        """The product in float64 NumPy."""
        return reference.matmul(I, W, self._blocks.layout, self.bsize, self.axis, gate, self.z_order)

    def bprop_test(self, E, W, gate=None):
        """The gradient for the input in float64 NumPy."""
        return reference.matmul_dx(E, W, self._blocks.layout, self.bsize, self.axis, gate, self.z_order)

    def updat_test(self, I, E, gate=None, dw_gated: bool = False):
        """The gradient for the weight in float64 NumPy; with `dw_gated` every block times its gate."""
        dw = reference.matmul_dw(I, E, self._blocks.layout, self.bsize, self.axis, z_order=self.z_order)
        return dw if gate is None or not dw_gated else dw * np.asarray(gate, np.float64)[:, None, None]

    def l2_normalize_test(self, W, epsilon: float = 1e-12):
        """`l2_normalize` without gain in float64 NumPy."""
        return reference.l2_normalize(W, self._blocks.layout, None, epsilon, self.z_order)[0]

    def l2_normalize_grad_test(self, W, U, epsilon: float = 1e-12):
        """The gradient of `l2_normalize` without gain for the output gradient U, which it overwrites and returns."""
        U[:] = reference.l2_normalize_grad(W, U, self._blocks.layout, None, epsilon, self.z_order)[0]
        return U


def dw_matmul_large_n(x, e, name: str | None = None) -> tf.Tensor:
    """The gradient of a dense weight, in float32 whatever the operands are: `u[c, k] = sum_n x[n, c] e[n, k]`.

    A composition of TensorFlow's ops, so its gradients are TensorFlow's.

    Args:
      x: `[..., C]`, float32, float16 or bfloat16.
      e: `[..., K]`, of x's dtype and leading dimensions.
      name: of the ops.

    Returns:
      float32 `[C, K]`; accumulated in float32. Float32 operands are rounded to TF32 where TensorFlow's switch says so.
    """
    x, e = _tensor(x), _tensor(e)
    if x.dtype not in _DTYPES or e.dtype != x.dtype:
        raise ValueError(f"x and e must both be float32, float16 or bfloat16, got {x.dtype.name} and {e.dtype.name}")
    if x.shape.rank == 0 or e.shape.rank == 0 or not x.shape[:-1].is_compatible_with(e.shape[:-1]):
        raise ValueError(f"x and e must have the same dimensions but for the last, got {x.shape} and {e.shape}")
    with tf.name_scope(name or "dw_matmul_large_n"):
        n = tf.reduce_prod(tf.shape(x)[:-1])
        x, e = (tf.cast(tf.reshape(t, [n, tf.shape(t)[-1]]), tf.float32) for t in (x, e))
        return tf.matmul(x, e, transpose_a=True)


def largest_block(dim: int) -> tuple[int, int]:
    """The largest of 32, 16 and 8 that divides `dim`, and how often."""
    for block in (32, 16, 8):
        if dim % block == 0:
            return block, dim // block
    raise ValueError(f"dimension not multiple of 8, 16, or 32: {dim}")


def _tensor(value):
    return value if isinstance(value, tf.Tensor) else tf.convert_to_tensor(value)


def _weight_dtype(dtype):
    dtype = tf.as_dtype(dtype)
    if dtype not in _DTYPES:
        raise ValueError(f"dw_dtype must be float32, float16 or bfloat16, got {dtype.name}")
    return dtype
