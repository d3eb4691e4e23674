"""Derivatives of the elementwise ops, and how `tf.vectorized_map` converts them.

First derivatives are ops of ours. Derivatives of those are composed of TensorFlow ops in float32 and rounded once.
"""

import math

import tensorflow as tf
from tensorflow.python.ops.parallel_for import pfor

from blocksparse import _library
from blocksparse._vectorize import attributes, by_loop, check_unmapped

_ops = _library.op_module

ADD, SUB, MUL, DIV, MAXIMUM, MINIMUM = range(6)
NEG, RCP, SQR, SQRT, EXP, LOG, SIG, TANH, RELU, ELU, GELU, SWISH, BIASADD, GAINMUL = range(6, 20)
FROM_OUTPUT = (SIG, TANH, RELU)
FAST_GELU_ALPHA = 1.702


def _wide(*tensors):
    return [tf.cast(tensor, tf.float32) for tensor in tensors]


# ---------------------------------------------------------------------------------------------------------- binary


@tf.RegisterGradient("EwZXy")
def _binary_gradient(op, dz):
    code = op.get_attr("op")
    if code == ADD:
        return dz, dz
    if code == SUB:
        return dz, _ops.ew_z_xa(dz, op=NEG)
    return tuple(_ops.ew_dxdy_dzxy(dz, *op.inputs, op=code))


@tf.RegisterGradient("EwDxdyDzxy")
def _binary_gradient_gradient(op, g_dx, g_dy):
    code, dtype = op.get_attr("op"), op.inputs[0].dtype
    dz, x, y, g_dx, g_dy = _wide(*op.inputs, g_dx, g_dy)
    if code == MUL:
        grads = g_dx * y + g_dy * x, g_dy * dz, g_dx * dz
    elif code == DIV:
        grads = (
            (g_dx - g_dy * (x / y)) / y,
            -g_dy * dz / y / y,
            (2.0 * g_dy * (x / y) - g_dx) * dz / y / y,
        )
    else:
        first, second = (x >= y, y >= x) if code == MAXIMUM else (x <= y, y <= x)
        grads = tf.where(first, g_dx, 0.0) + tf.where(second, g_dy, 0.0), tf.zeros_like(x), tf.zeros_like(y)
    return [tf.cast(grad, dtype) for grad in grads]


# ----------------------------------------------------------------------------------------------------------- unary


@tf.RegisterGradient("EwZXa")
def _unary_gradient(op, dz):
    code, alpha = op.get_attr("op"), op.get_attr("alpha")
    if code in FROM_OUTPUT:
        return _ops.ew_dx_dzza(dz, op.outputs[0], op=code, alpha=alpha)
    return _ops.ew_dx_dzxa(dz, op.inputs[0], op=code, alpha=alpha)


@tf.RegisterGradient("EwDxDzza")
def _output_gradient_gradient(op, g):
    code, (dz, z) = op.get_attr("op"), op.inputs
    g_dz = _ops.ew_dx_dzza(g, z, op=code)
    if code == RELU:
        return g_dz, tf.zeros_like(z)
    wide_dz, wide_z, g = _wide(dz, z, g)
    slope = 1.0 - 2.0 * wide_z if code == SIG else -2.0 * wide_z
    return g_dz, tf.cast(g * wide_dz * slope, z.dtype)


@tf.RegisterGradient("EwDxDzxa")
def _input_gradient_gradient(op, g):
    code, alpha, (dz, x) = op.get_attr("op"), op.get_attr("alpha"), op.inputs
    g_dz = _ops.ew_dx_dzxa(g, x, op=code, alpha=alpha)
    wide_dz, wide_x, g = _wide(dz, x, g)
    return g_dz, tf.cast(g * wide_dz * _second_derivative(code, alpha, wide_x), x.dtype)


def _second_derivative(code, alpha, x):
    if code == NEG:
        return tf.zeros_like(x)
    if code == RCP:
        return 2.0 / (x * x * x)
    if code == SQR:
        return tf.fill(tf.shape(x), 2.0)
    if code == SQRT:
        return -0.25 / (x * tf.sqrt(x))
    if code == EXP:
        return tf.exp(x)
    if code == LOG:
        return -1.0 / (x * x)
    if code == ELU:
        return tf.where(x > 0, 0.0, alpha * tf.exp(tf.minimum(x, 0.0)))
    if code == GELU:  # x sigmoid(c (x + alpha x^3))
        c = 2.0 * math.sqrt(2.0 / math.pi)
        return _gate_second_derivative(x, c * (x + alpha * x**3), c * (1.0 + 3.0 * alpha * x * x), 6.0 * c * alpha * x)
    return _gate_second_derivative(x, alpha * x, alpha, 0.0)  # swish


def _gate_second_derivative(x, v, dv, ddv):
    """Of x sigmoid(v(x)), given v and its derivatives."""
    s = tf.sigmoid(v)
    ds = s * (1.0 - s)
    return 2.0 * ds * dv + x * ds * ((1.0 - 2.0 * s) * dv * dv + ddv)


# ---------------------------------------------------------------------------------------------------- bias and gain


def _over_axis(vector, like, axis):
    """A vector of channels in the shape that broadcasts over `like` along an axis."""
    rank = like.shape.rank
    if rank is None:
        ranks = tf.range(tf.rank(like))
        return tf.reshape(vector, tf.where(tf.equal(ranks, axis % tf.rank(like)), -1, 1))
    return tf.reshape(vector, [-1 if d == axis % rank else 1 for d in range(rank)])


def _spread(vector, like, axis):
    """A vector of channels as a tensor like `like`."""
    return tf.broadcast_to(tf.cast(_over_axis(vector, like, axis), like.dtype), tf.shape(like))


def _channel_sum(x, axis, like):
    rank = x.shape.rank
    ranks = tf.range(tf.rank(x)) if rank is None else tf.range(rank)
    others = tf.boolean_mask(ranks, tf.not_equal(ranks, axis % tf.rank(x)))
    return tf.reshape(tf.reduce_sum(x, others), tf.shape(like))


@tf.RegisterGradient("EwZXb")
def _vector_gradient(op, dz):
    code, (x, b) = op.get_attr("op"), op.inputs
    if code == BIASADD:
        return dz, _ops.ew_db_dzb(dz, b, op=code)
    return tuple(_ops.ew_dxdg_dzxg(dz, x, b, op=code))


@tf.RegisterGradient("EwDbDzb")
def _vector_bias_gradient_gradient(op, g):
    return _spread(g, op.inputs[0], -1), None


@tf.RegisterGradient("EwDxdgDzxg")
def _gain_gradient_gradient(op, g_dx, g_dg):
    dz, x, g = op.inputs
    wide_dz, wide_x, g_dx = _wide(dz, x, g_dx)
    g_dg = _over_axis(g_dg, x, -1)
    return (
        tf.cast(g_dx * _over_axis(g, x, -1) + g_dg * wide_x, dz.dtype),
        tf.cast(g_dg * wide_dz, x.dtype),
        _channel_sum(g_dx * wide_dz, -1, g),
    )


@tf.RegisterGradient("BiasRelu")
def _bias_relu_gradient(op, dy):
    relu, axis, (x, b) = op.get_attr("relu"), op.get_attr("axis"), op.inputs
    bench = op.get_attr("bench")
    if relu == 0:
        return dy, _ops.bias_grad(dy, b, axis=axis, bench=bench)
    return tuple(_ops.bias_relu_grad(dy, op.outputs[0] if relu == 1 else x, b, axis=axis, relu=relu, bench=bench))


@tf.RegisterGradient("BiasGrad")
def _bias_gradient_gradient(op, g):
    return _spread(g, op.inputs[0], op.get_attr("axis")), None


@tf.RegisterGradient("BiasReluGrad")
def _bias_relu_gradient_gradient(op, g_dx, g_db):
    relu, axis, (dy, other, b) = op.get_attr("relu"), op.get_attr("axis"), op.inputs
    wide_dy, other, g_dx = _wide(dy, other, g_dx)
    total = g_dx + _over_axis(g_db, dy, axis)
    if relu == 1:
        return tf.cast(tf.where(other > 0, total, 0.0), dy.dtype), None, None
    v = other + _over_axis(b, dy, axis)
    s = tf.sigmoid(FAST_GELU_ALPHA * v)
    g_dy = total * (s + FAST_GELU_ALPHA * v * s * (1.0 - s))
    g_x = total * wide_dy * _second_derivative(SWISH, FAST_GELU_ALPHA, v)
    return tf.cast(g_dy, dy.dtype), tf.cast(g_x, dy.dtype), _channel_sum(g_x, axis, b)


# ---------------------------------------------------------------------------------------------------- linear in x


@tf.RegisterGradient("FilterTensor")
def _filter_gradient(op, dy):
    attrs = {name: op.get_attr(name) for name in ("saturate", "zero_infs", "zero_nans")}
    return _ops.filter_tensor(dy, op.inputs[1], **attrs), None


@tf.RegisterGradient("FloatCast")
def _cast_gradient(op, dy):
    dtype = tf.as_dtype(op.get_attr("dx_dtype"))
    return dy if dy.dtype == dtype else _ops.float_cast(dy, TY=dtype, dx_dtype=dy.dtype)


@tf.RegisterGradient("AddN8")
def _add_n_gradient(op, dy):
    return [dy] * len(op.inputs)


@tf.RegisterGradient("Dropout")
def _dropout_gradient(op, dy, _):
    return _ops.apply_dropout_mask(dy, op.outputs[1], op.inputs[2], no_mask_shape()), None, None


@tf.RegisterGradient("ApplyDropoutMask")
def _apply_mask_gradient(op, dy):
    return _ops.apply_dropout_mask(dy, *op.inputs[1:]), None, None, None


def no_mask_shape():
    with tf.device("/cpu:0"):
        return tf.zeros([0], tf.int64)


tf.no_gradient("GenDropoutMask")


@tf.RegisterGradient("FancyGather")
def _gather_gradient(op, dy):
    x, idx = op.inputs
    if not x.dtype.is_floating:
        return None, None
    return _ops.fancy_gather_grad(dy, idx, tf.shape(x, out_type=tf.int64)), None


@tf.RegisterGradient("FancyGatherGrad")
def _gather_gradient_gradient(op, g):
    return _ops.fancy_gather(g, op.inputs[1]), None, None


@tf.RegisterGradient("ReduceMax")
def _reduce_max_gradient(op, dy, _):
    shape = tf.shape(op.inputs[0], out_type=tf.int64)
    return _ops.reduce_max_grad(dy, op.outputs[1], shape, axis=op.get_attr("axis"))


@tf.RegisterGradient("ReduceMaxGrad")
def _reduce_max_gradient_gradient(op, g):
    dy, places, shape = op.inputs
    axis = op.get_attr("axis")
    axis = axis + (g.shape.rank if g.shape.rank is not None else tf.rank(g)) if axis < 0 else axis
    reduced = tf.concat([shape[:axis], shape[axis + 1 :]], 0)
    # one_hot counts its axis in the result, where -1 is the last.
    places = tf.expand_dims(tf.reshape(places, reduced), axis)
    steps = _over_axis(tf.range(shape[axis]), g, axis)
    return tf.reshape(tf.reduce_sum(tf.where(steps == places, g, tf.zeros_like(g)), axis), tf.shape(dy)), None, None


# ---------------------------------------------------------------------------------------------------------- gates


def _limits(op):
    return {name: op.get_attr(name) for name in ("limit_a", "limit_b")}


@tf.RegisterGradient("ConcreteGate")
def _concrete_gradient(op, d_gate, d_concrete):
    temperature, concrete = op.inputs[2], op.outputs[1]
    d_loga = _ops.concrete_gate_grad(d_gate, concrete, temperature, **_limits(op))
    return d_loga + d_concrete * concrete * (1.0 - concrete) / temperature, None, None


@tf.RegisterGradient("ConcreteGateGrad")
def _concrete_gradient_gradient(op, g):
    d_gate, s, temperature = op.inputs
    low, high = _limits(op).values()
    inside = tf.logical_and(s * (high - low) + low >= 0, s * (high - low) + low <= 1)
    g_s = g * d_gate * (high - low) / temperature * (1.0 - 2.0 * s)
    g_gate = _ops.concrete_gate_grad(g, s, temperature, **_limits(op))
    return g_gate, tf.where(inside, g_s, tf.zeros_like(g_s)), None


@tf.RegisterGradient("ConcreteGateInfer")
def _infer_gradient(op, d_gate):
    with tf.device("/cpu:0"):
        one = tf.constant(1.0)
    return _ops.concrete_gate_grad(d_gate, tf.sigmoid(op.inputs[0]), one, **_limits(op))


# --------------------------------------------------------------------------------------------- tf.vectorized_map


def _convert_elementwise(pfor_input, function, attrs, host=()):
    """Operands of one shape: a mapped dimension is one dimension more."""
    tensors = [i for i in range(pfor_input.num_inputs) if i not in host]
    check_unmapped(pfor_input, {i: f"input {i}" for i in host})
    pfor_input.stack_inputs(tensors)
    inputs = [pfor_input.input(i).t for i in range(pfor_input.num_inputs)]
    if pfor_input.op_type == "AddN8":
        inputs = [inputs]
    outputs = function(*inputs, **{name: pfor_input.get_attr(name) for name in attrs})
    outputs = [outputs] if tf.is_tensor(outputs) else outputs
    return [pfor.wrap(output, True) for output in outputs]


for _name, _function, _attrs, _host in (
    ("EwZXy", _ops.ew_z_xy, ("op",), ()),
    ("EwZXa", _ops.ew_z_xa, ("op", "alpha"), ()),
    ("EwDxdyDzxy", _ops.ew_dxdy_dzxy, ("op",), ()),
    ("EwDxDzza", _ops.ew_dx_dzza, ("op", "alpha"), ()),
    ("EwDxDzxa", _ops.ew_dx_dzxa, ("op", "alpha"), ()),
    ("AddN8", _ops.add_n8, (), ()),
    ("FilterTensor", _ops.filter_tensor, ("saturate", "zero_infs", "zero_nans"), (1,)),
    ("ConcreteGateGrad", _ops.concrete_gate_grad, ("limit_a", "limit_b"), (2,)),
    ("ConcreteGateInfer", _ops.concrete_gate_infer, ("limit_a", "limit_b"), ()),
):
    pfor.RegisterPForWithArgs(_name, _function, _attrs, _host)(
        lambda pfor_input, _, function, attrs, host: _convert_elementwise(pfor_input, function, attrs, host)
    )


@pfor.RegisterPFor("FloatCast")
def _convert_cast(pfor_input):
    attrs = {name: pfor_input.get_attr(name) for name in ("TY", "dx_dtype")}
    return pfor.wrap(_ops.float_cast(pfor_input.stacked_input(0), **attrs), True)


def _moved(attrs):
    """An axis counted from the first dimension, with the mapped one before it."""
    return {name: value + 1 if name == "axis" and value >= 0 else value for name, value in attrs.items()}


@pfor.RegisterPFor("EwZXb")
@pfor.RegisterPFor("BiasRelu")
def _convert_channels(pfor_input):
    """Mapped activations are one more batch dimension: one launch for all."""
    vector = "the gain" if pfor_input.op_type == "EwZXb" and pfor_input.get_attr("op") == GAINMUL else "the bias"
    check_unmapped(pfor_input, {1: vector})
    x, b = pfor_input.stacked_input(0), pfor_input.unstacked_input(1)
    if pfor_input.op_type == "EwZXb":
        return pfor.wrap(_ops.ew_z_xb(x, b, op=pfor_input.get_attr("op")), True)
    attrs = _moved(attributes(pfor_input.op, ("axis", "relu", "bench")))
    return pfor.wrap(_ops.bias_relu(x, b, **attrs), True)


for _name, _function, _attrs, _signature in (
    ("EwDbDzb", _ops.ew_db_dzb, ("op",), (tf.float32,)),
    ("EwDxdgDzxg", _ops.ew_dxdg_dzxg, ("op",), ("T", tf.float32)),
    ("BiasGrad", _ops.bias_grad, ("axis", "bench"), (tf.float32,)),
    ("BiasReluGrad", _ops.bias_relu_grad, ("axis", "relu", "bench"), ("T", tf.float32)),
    ("GenDropoutMask", _ops.gen_dropout_mask, (), (tf.int32,)),
    ("Dropout", _ops.dropout, (), ("T", tf.int32)),
    ("ConcreteGate", _ops.concrete_gate, ("limit_a", "limit_b", "epsilon"), (tf.float32, tf.float32)),
):
    pfor.RegisterPForWithArgs(_name, _function, _attrs, _signature)(
        lambda pfor_input, _, function, attrs, signature: by_loop(
            pfor_input,
            function,
            attributes(pfor_input.op, attrs),
            tuple(pfor_input.get_attr("T") if dtype == "T" else dtype for dtype in signature),
        )
    )


@pfor.RegisterPFor("ApplyDropoutMask")
def _convert_apply_mask(pfor_input):
    """One mask for all elements is broadcast; of masks that differ each starts a word of its own: a loop."""
    check_unmapped(pfor_input, {2: "keep_prob", 3: "mask_shape"})
    if pfor_input.input(1).is_stacked:
        return by_loop(pfor_input, _ops.apply_dropout_mask, {}, (pfor_input.get_attr("T"),))
    x, (mask, keep_prob, mask_shape) = pfor_input.stacked_input(0), (pfor_input.unstacked_input(i) for i in (1, 2, 3))
    with tf.device("/cpu:0"):
        shape = tf.cond(tf.equal(tf.size(mask_shape), 0), lambda: tf.shape(x, tf.int64)[1:], lambda: mask_shape)
        shape = tf.concat([[1], shape], 0)
    return pfor.wrap(_ops.apply_dropout_mask(x, mask, keep_prob, shape), True)


@pfor.RegisterPFor("FancyGather")
def _convert_gather(pfor_input):
    """A mapped dimension is one more leading dimension of both."""
    pfor_input.stack_inputs([0, 1])
    return pfor.wrap(_ops.fancy_gather(pfor_input.stacked_input(0), pfor_input.stacked_input(1)), True)


def _stacked_shape(pfor_input, index):
    with tf.device("/cpu:0"):
        count = tf.cast(pfor_input.pfor.loop_len_vector, tf.int64)
        return tf.concat([count, pfor_input.unstacked_input(index)], 0)


@pfor.RegisterPFor("FancyGatherGrad")
def _convert_gather_gradient(pfor_input):
    check_unmapped(pfor_input, {2: "the shape"})
    pfor_input.stack_inputs([0, 1])
    dy, idx = pfor_input.stacked_input(0), pfor_input.stacked_input(1)
    return pfor.wrap(_ops.fancy_gather_grad(dy, idx, _stacked_shape(pfor_input, 2)), True)


@pfor.RegisterPFor("ReduceMax")
def _convert_reduce_max(pfor_input):
    attrs = _moved(attributes(pfor_input.op, ("axis", "keepdims", "bench")))
    return [pfor.wrap(v, True) for v in _ops.reduce_max(pfor_input.stacked_input(0), **attrs)]


@pfor.RegisterPFor("ReduceMaxGrad")
def _convert_reduce_max_gradient(pfor_input):
    check_unmapped(pfor_input, {2: "the shape"})
    pfor_input.stack_inputs([0, 1])
    dy, places = pfor_input.stacked_input(0), pfor_input.stacked_input(1)
    attrs = _moved(attributes(pfor_input.op, ("axis",)))
    return pfor.wrap(_ops.reduce_max_grad(dy, places, _stacked_shape(pfor_input, 2), **attrs), True)
