"""Derivatives of the ops of the LSTM gates, and how `tf.vectorized_map` converts them.

First derivatives are ops of ours. Derivatives of those are TensorFlow's, of the formulas written out in float32.
"""

from __future__ import annotations

import numpy as np
import tensorflow as tf
from tensorflow.python.ops.parallel_for import pfor

from blocksparse import _library
from blocksparse._vectorize import check_unmapped

_ops = _library.op_module


def _given(gradient):
    """`[gradient]`, or `[]` where it is known to be zero, as for an output that nothing depends on."""
    if gradient is None:
        return []
    if isinstance(gradient, tf.__internal__.EagerTensor):
        return [gradient]
    if gradient.op.type == "ZerosLike":
        return []
    value = gradient.op.inputs[1] if gradient.op.type == "Fill" else gradient
    constant = tf.get_static_value(value) if value.op.type == "Const" else None
    return [gradient] if constant is None or np.any(constant) else []


@tf.RegisterGradient("LSTMGates")
def _gates_gradient(op, dc_next, dh_next):
    c, h, *bias = op.inputs
    grads = _ops.lstm_gates_grad(c, h, bias, _given(dc_next), _given(dh_next), forget_bias=op.get_attr("forget_bias"))
    return grads.dc, grads.dh, *grads.dbias


@tf.RegisterGradient("LSTMGates4")
def _gates4_gradient(op, dc_next, dh_next):
    return tuple(
        _ops.lstm_gates4_grad(*op.inputs, _given(dc_next), _given(dh_next), forget_bias=op.get_attr("forget_bias"))
    )


def _backward(c, i, u, f, o, dc_next, dh_next, forget_bias):
    si, tu, sf, so = tf.sigmoid(i), tf.tanh(u), tf.sigmoid(f + forget_bias), tf.sigmoid(o)
    tc = tf.tanh(sf * c + si * tu)
    d = dc_next + dh_next * so * (1.0 - tc * tc)
    return (
        d * sf,
        d * tu * si * (1.0 - si),
        d * si * (1.0 - tu * tu),
        d * c * sf * (1.0 - sf),
        dh_next * tc * so * (1.0 - so),
    )


def _gradient_of_gradient(op, operands, backward, output_gradients):
    """`operands` are the inputs but for the upstream gradients, of which one may be missing."""
    nc, nh = op.get_attr("nc"), op.get_attr("nh")
    wide = [tf.cast(x, tf.float32) for x in op.inputs]
    upstream = wide[len(wide) - nc - nh :]
    zero = tf.zeros_like(wide[0])
    with tf.GradientTape() as tape:
        tape.watch(wide)
        dc_next, dh_next = upstream[0] if nc else zero, upstream[-1] if nh else zero
        outputs = backward(*wide[:operands], dc_next, dh_next)
    grads = tape.gradient(
        outputs, wide, [tf.cast(g, tf.float32) for g in output_gradients], unconnected_gradients="zero"
    )
    return [tf.cast(grad, x.dtype) for grad, x in zip(grads, op.inputs)]


@tf.RegisterGradient("LSTMGatesGrad")
def _gates_gradient_gradient(op, *output_gradients):
    nbias, forget_bias = op.get_attr("nbias"), op.get_attr("forget_bias")

    def backward(c, h, *rest):
        *bias, dc_next, dh_next = rest
        flat = [tf.reshape(b, [-1]) for b in bias]
        gates = tf.split(h + flat[0] if bias else h, 4, axis=-1)
        dc, *dgates = _backward(c, *gates, dc_next, dh_next, forget_bias)
        dh = tf.concat(dgates, -1)
        if not bias:
            return dc, dh
        return dc, dh, tf.reshape(tf.reduce_sum(tf.reshape(dh, [-1, tf.shape(flat[0])[0]]), 0), tf.shape(bias[0]))

    return _gradient_of_gradient(op, 2 + nbias, backward, output_gradients)


@tf.RegisterGradient("LSTMGates4Grad")
def _gates4_gradient_gradient(op, *output_gradients):
    forget_bias = op.get_attr("forget_bias")
    return _gradient_of_gradient(op, 5, lambda *x: _backward(*x, forget_bias), output_gradients)


# --------------------------------------------------------------------------------------------- tf.vectorized_map


def _stacked(pfor_input, bias):
    """The inputs, all but those in `bias` with the mapped dimension, which is one more dimension of rows."""
    check_unmapped(pfor_input, dict.fromkeys(bias, "the bias"))
    pfor_input.stack_inputs([i for i in range(pfor_input.num_inputs) if i not in bias])
    return [pfor_input.input(i).t for i in range(pfor_input.num_inputs)]


@pfor.RegisterPFor("LSTMGates")
def _convert_gates(pfor_input):
    bias = range(2, 2 + pfor_input.get_attr("nbias"))
    c, h, *bias = _stacked(pfor_input, bias)
    return [pfor.wrap(y, True) for y in _ops.lstm_gates(c, h, bias, forget_bias=pfor_input.get_attr("forget_bias"))]


@pfor.RegisterPFor("LSTMGates4")
def _convert_gates4(pfor_input):
    inputs = _stacked(pfor_input, ())
    return [pfor.wrap(y, True) for y in _ops.lstm_gates4(*inputs, forget_bias=pfor_input.get_attr("forget_bias"))]


@pfor.RegisterPFor("LSTMGatesGrad")
def _convert_gates_gradient(pfor_input):
    nbias, nc = pfor_input.get_attr("nbias"), pfor_input.get_attr("nc")
    c, h, *rest = _stacked(pfor_input, range(2, 2 + nbias))
    bias, upstream = rest[:nbias], rest[nbias:]
    grads = _ops.lstm_gates_grad(
        c, h, bias, upstream[:nc], upstream[nc:], forget_bias=pfor_input.get_attr("forget_bias")
    )
    outputs = [grads.dc, grads.dh]
    if bias:  # one for each element of the map
        rows = tf.reshape(tf.cast(grads.dh, tf.float32), [tf.shape(c)[0], -1, tf.size(bias[0])])
        shape = tf.concat([tf.shape(c)[:1], tf.shape(bias[0])], 0)
        outputs.append(tf.reshape(tf.reduce_sum(rows, 1), shape))
    return [pfor.wrap(y, True) for y in outputs]


@pfor.RegisterPFor("LSTMGates4Grad")
def _convert_gates4_gradient(pfor_input):
    inputs, nc = _stacked(pfor_input, ()), pfor_input.get_attr("nc")
    grads = _ops.lstm_gates4_grad(
        *inputs[:5], inputs[5 : 5 + nc], inputs[5 + nc :], forget_bias=pfor_input.get_attr("forget_bias")
    )
    return [pfor.wrap(y, True) for y in grads]
