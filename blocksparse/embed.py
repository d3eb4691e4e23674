"""Embedding lookup with a dense gradient.

The gradient of the table is a dense tensor, summed in float32 in an order that depends on the indices alone: the same
bits from run to run, on CPUs and GPUs, however often an index repeats.
"""

from __future__ import annotations

import tensorflow as tf
from tensorflow.python.ops.parallel_for import pfor

from blocksparse import _library
from blocksparse._vectorize import check_unmapped
from blocksparse._xla import check_not_xla

__all__ = ["embedding_lookup"]

_ops = _library.op_module

embedding_lookup_op = _ops.embedding_lookup
embedding_lookup_grad_op = _ops.embedding_lookup_grad

_DTYPES = (tf.float32, tf.float16, tf.bfloat16)


def embedding_lookup(emb, idx, sort_grad: bool = True, bench: int = 0, use_tf: bool = False) -> tf.Tensor:
    """Rows of a table: `y[..., :] = emb[idx[...], :]`.

    An index that is negative or too large gives a row of zeros, and has no part in the gradient.

    Args:
      emb: `[C, K]` tensor or variable, float32, float16 or bfloat16. Its gradient is a dense tensor of the same dtype.
      idx: any shape, any integer dtype.
      sort_grad: accepted for compatibility; the gradient is always summed in sorted order.
      bench: if more than 0, also run so many times, and print the time.
      use_tf: use TensorFlow's gather (and its sum of slices, made dense) in place of our ops. Float32 sums of 16-bit
        gradients are then not to be had, nor are indices out of range.

    Returns:
      `idx.shape + [K]`, of emb's dtype.
    """
    emb, idx = tf.convert_to_tensor(emb), tf.convert_to_tensor(idx)
    if emb.dtype not in _DTYPES:
        raise ValueError(f"emb has dtype {emb.dtype.name}, allowed are float32, float16 and bfloat16")
    if not idx.dtype.is_integer:
        raise ValueError(f"idx has dtype {idx.dtype.name}, must be integers")
    if emb.shape.rank not in (None, 2):
        raise ValueError(f"emb must be [C, K], got shape {emb.shape}")
    if use_tf:
        return _gather(emb, idx if idx.dtype in (tf.int32, tf.int64) else tf.cast(idx, tf.int64))
    check_not_xla("embedding_lookup")
    return embedding_lookup_op(emb, idx, bench=bench)


@tf.custom_gradient
def _gather(emb, idx):
    return tf.gather(emb, idx), lambda dy: (tf.convert_to_tensor(_slices(emb, idx, dy)), None)


def _slices(emb, idx, dy):
    shape = tf.shape(emb, out_type=tf.int64)
    return tf.IndexedSlices(tf.reshape(dy, [-1, shape[1]]), tf.reshape(idx, [-1]), shape)


@tf.RegisterGradient("EmbeddingLookup")
def _lookup_gradient(op, dy):
    emb, idx = op.inputs
    with tf.device("/cpu:0"):
        rows = tf.shape(emb, out_type=tf.int64)[0]
    return embedding_lookup_grad_op(dy, idx, rows, bench=op.get_attr("bench")), None


@tf.RegisterGradient("EmbeddingLookupGrad")
def _lookup_gradient_gradient(op, g):
    return embedding_lookup_op(g, op.inputs[1]), None, None


@pfor.RegisterPFor("EmbeddingLookup")
def _convert_lookup(pfor_input):
    check_unmapped(pfor_input, {0: "the table"})
    return pfor.wrap(embedding_lookup_op(pfor_input.input(0).t, pfor_input.stacked_input(1)), True)


@pfor.RegisterPFor("EmbeddingLookupGrad")
def _convert_lookup_gradient(pfor_input):
    """One table for each element of the map, as one table with all their rows."""
    pfor_input.stack_inputs([0, 1])
    dy, idx, rows = pfor_input.stacked_input(0), pfor_input.stacked_input(1), pfor_input.unstacked_input(2)
    idx = tf.cast(idx, tf.int64)
    elements = tf.shape(idx, out_type=tf.int64)[0]
    first = tf.reshape(tf.range(elements) * rows, tf.concat([[-1], tf.ones([tf.rank(idx) - 1], tf.int32)], 0))
    idx = tf.where(tf.logical_and(idx >= 0, idx < rows), idx + first, -1)
    dw = embedding_lookup_grad_op(dy, idx, elements * rows)
    return pfor.wrap(tf.reshape(dw, tf.stack([elements, rows, tf.shape(dw, out_type=tf.int64)[1]])), True)
