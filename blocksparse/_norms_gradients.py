"""Derivatives of the normalization ops, and how `tf.vectorized_map` converts them.

With `x^ = (x - m) r`, where m and r are of what is normalized together (n elements), and d the gradient for x^, the
gradient for x is `M d = r (d - mean(d) - x^ mean(d x^))`: M is the derivative of x^ for x, and symmetric. The gradients
of the gradient follow, for its inputs dy (t where a relu passed, d = t * gain) and x, and given `a`, `b`, `e` for its
outputs dx, dgain, dbias, from `L = sum(a M d) + sum(b t x^) + sum(e t)`:

    dL/dt = gain * M a + b x^ + e,   dL/dgain = sum(t * M a)
    dL/dx = M (b t - r (mean(d x^) a + mean(a x^) d)) - r x^ mean(a M d)

where the last term comes from r itself, `dr/dx = -r^2 x^ / n`. They are composed of TensorFlow's ops, in float32, so
derivatives of every higher order are there too.
"""

import tensorflow as tf
from tensorflow.python.ops.parallel_for import pfor

from blocksparse import _library
from blocksparse._vectorize import attributes, by_loop, check_unmapped

_ops = _library.op_module


def _zeros_for(value, like):
    return tf.zeros(tf.shape(like), tf.float32) if value is None else tf.cast(value, tf.float32)


def _second(a, b, e, dy, x, gain, bias, stat_axes, gain_axes, epsilon, relu=False, given=None):
    """Gradients of (dx, dgain, dbias) for (dy, x, gain), all in one broadcast shape.

    `given`: (mean, rstd) that are constants, as in inference; then M d is r d alone.
    """

    def mean(v):
        return tf.reduce_mean(v, axis=stat_axes, keepdims=True)

    if given is None:
        centred = x - mean(x)
        centred -= mean(centred)  # what float32 could not hold of the mean
        r = tf.math.rsqrt(mean(tf.square(centred)) + epsilon)
        xhat = centred * r
    else:
        xhat, r = (x - given[0]) * given[1], given[1]

    def m(v):
        return r * v if given is not None else r * (v - mean(v) - xhat * mean(v * xhat))

    mask = tf.cast(xhat * gain + bias > 0, tf.float32) if relu else 1.0
    t = dy * mask
    d = t * gain
    ma = m(a)
    d_dy = mask * (gain * ma + b * xhat + e)
    d_gain = tf.reduce_sum(t * ma, axis=gain_axes, keepdims=True)
    if given is None:
        d_x = m(b * t - r * (mean(d * xhat) * a + mean(a * xhat) * d)) - r * xhat * mean(a * m(d))
    else:
        d_x = r * b * t
    return d_dy, d_x, d_gain


# ----------------------------------------------------------------------------------------------------- layer norm

_LAYER_ATTRS = ("S", "axis", "epsilon", "relu", "bench")


@tf.RegisterGradient("LayerNorm")
def _layer_norm_gradient(op, dy, *_):
    x, g, b = op.inputs
    return list(_ops.layer_norm_grad(dy, x, g, b, *op.outputs[1:], **attributes(op, _LAYER_ATTRS)))


@tf.RegisterGradient("LayerNormGrad")
def _layer_norm_gradient_gradient(op, a, dg, db):
    dy, x, g, b = op.inputs[:4]
    axis, segments = op.get_attr("axis"), op.get_attr("S")
    shape = tf.shape(x, tf.int64)
    rank = tf.rank(x)
    axis = axis if axis >= 0 else axis + rank
    outer, inner = tf.reduce_prod(shape[:axis]), tf.reduce_prod(shape[axis + 1 :])
    features = shape[axis] // segments
    full, vector = tf.stack([outer, segments, features, inner]), tf.stack([1, segments, features, 1])
    d_dy, d_x, d_g = _second(
        *(tf.reshape(_zeros_for(v, like), to) for v, like, to in ((a, x, full), (dg, g, vector), (db, b, vector))),
        *(tf.reshape(tf.cast(v, tf.float32), full) for v in (dy, x)),
        *(tf.reshape(v, vector) for v in (g, b)),
        stat_axes=[2],
        gain_axes=[0, 3],
        epsilon=op.get_attr("epsilon"),
        relu=op.get_attr("relu"),
    )
    return [
        tf.cast(tf.reshape(d_dy, shape), dy.dtype),
        tf.cast(tf.reshape(d_x, shape), x.dtype),
        tf.reshape(d_g, tf.shape(g)),
        tf.zeros_like(b),
        None,
        None,
        None,
    ]


# ----------------------------------------------------------------------------------------------------- batch norm

_BATCH_ATTRS = ("eps", "bench")


@tf.RegisterGradient("BatchNormNCDHW")
def _batch_norm_gradient(op, dy, *_):
    x, g, b = op.inputs
    _, m, v, residual = op.outputs
    dx, dg, db = _ops.batch_norm_grad_ncdhw(dy, x, g, m, v, residual, **attributes(op, _BATCH_ATTRS))
    return [dx, dg, tf.reshape(db, tf.shape(b))]


@tf.RegisterGradient("BatchNormInferenceNCDHW")
def _batch_norm_inference_gradient(op, dy):
    x, g, b, m, v = op.inputs
    dx, dg, db = _ops.batch_norm_grad_ncdhw(
        dy, x, g, m, v, tf.zeros_like(m), inference=True, **attributes(op, _BATCH_ATTRS)
    )
    # dL/dm = -rstd sum(dy gain), dL/dv = -rstd^2 / 2 sum(dy gain x^)
    v_flat, g_flat, dg_flat, db_flat = (tf.reshape(u, [-1]) for u in (v, g, dg, db))
    r = tf.math.rsqrt(v_flat + op.get_attr("eps"))
    dm, dv = -r * g_flat * db_flat, -0.5 * tf.square(r) * g_flat * dg_flat
    return [dx, dg, tf.reshape(db, tf.shape(b)), tf.reshape(dm, tf.shape(m)), tf.reshape(dv, tf.shape(v))]


@tf.RegisterGradient("BatchNormGradNCDHW")
def _batch_norm_gradient_gradient(op, a, dg, db):
    dy, x, g, m, v, _ = op.inputs
    inference = op.get_attr("inference")
    shape = tf.shape(x, tf.int64)
    full = tf.stack([shape[0], shape[1], tf.reduce_prod(shape[2:])])
    vector = tf.stack([1, shape[1], 1])
    a, dy32, x32 = (tf.reshape(u, full) for u in (_zeros_for(a, x), tf.cast(dy, tf.float32), tf.cast(x, tf.float32)))
    b, e, gain = (tf.reshape(u, vector) for u in (_zeros_for(dg, g), _zeros_for(db, g), g))
    given = None
    if inference:
        given = tf.reshape(m, vector), tf.math.rsqrt(tf.reshape(v, vector) + op.get_attr("eps"))
    d_dy, d_x, d_g = _second(
        a, b, e, dy32, x32, gain, None, stat_axes=[0, 2], gain_axes=[0, 2], epsilon=op.get_attr("eps"), given=given
    )
    d_m = d_v = None
    if inference:
        # dx = dy gain r and x^ = (x - m) r depend on the statistics given.
        r, xhat = given[1], (x32 - given[0]) * given[1]
        d_r = tf.reduce_sum(a * dy32 * gain + b * dy32 * xhat / r, axis=[0, 2], keepdims=True)
        d_m = tf.reshape(-r * tf.reduce_sum(b * dy32, axis=[0, 2], keepdims=True), tf.shape(m))
        d_v = tf.reshape(-0.5 * r**3 * d_r, tf.shape(v))
    return [
        tf.cast(tf.reshape(d_dy, shape), dy.dtype),
        tf.cast(tf.reshape(d_x, shape), x.dtype),
        tf.reshape(d_g, tf.shape(g)),
        d_m,
        d_v,
        None,
    ]


# ------------------------------------------------------------------------------------------------- tf.vectorized_map


@pfor.RegisterPFor("LayerNorm")
def _convert_layer_norm(pfor_input):
    """Mapped activations are one more batch dimension: one launch for all."""
    check_unmapped(pfor_input, {1: "the gain", 2: "the bias"})
    attrs = attributes(pfor_input.op, _LAYER_ATTRS)
    if attrs["axis"] >= 0:
        attrs["axis"] += 1
    x = pfor_input.stacked_input(0)
    y, *statistics = _ops.layer_norm(x, pfor_input.unstacked_input(1), pfor_input.unstacked_input(2), **attrs)
    # [S, mapped, ...] to [mapped, S, ...]
    rest = tf.range(2, tf.rank(x))
    order = tf.concat([[1, 0], rest], 0)
    return [pfor.wrap(y, True), *(pfor.wrap(tf.transpose(v, order), True) for v in statistics)]


@pfor.RegisterPFor("LayerNormGrad")
def _convert_layer_norm_grad(pfor_input):
    op = pfor_input.op
    signature = (op.get_attr("T"), tf.float32, tf.float32)
    return by_loop(pfor_input, _ops.layer_norm_grad, attributes(op, _LAYER_ATTRS), signature)


@pfor.RegisterPFor("BatchNormNCDHW")
def _convert_batch_norm(pfor_input):
    op = pfor_input.op
    signature = (op.get_attr("T"), tf.float32, tf.float32, tf.float32)
    return by_loop(pfor_input, _ops.batch_norm_ncdhw, attributes(op, _BATCH_ATTRS), signature)


@pfor.RegisterPFor("BatchNormInferenceNCDHW")
def _convert_batch_norm_inference(pfor_input):
    op = pfor_input.op
    return by_loop(pfor_input, _ops.batch_norm_inference_ncdhw, attributes(op, _BATCH_ATTRS), (op.get_attr("T"),))


@pfor.RegisterPFor("BatchNormGradNCDHW")
def _convert_batch_norm_grad(pfor_input):
    op = pfor_input.op
    signature = (op.get_attr("T"), tf.float32, tf.float32)
    attrs = attributes(op, (*_BATCH_ATTRS, "inference"))
    return by_loop(pfor_input, _ops.batch_norm_grad_ncdhw, attrs, signature)
