"""Derivatives of the matmul ops, and how `tf.vectorized_map` converts them.

Forward product, input gradient and weight gradient are one trilinear form, so each is a derivative of the others and
derivatives of every order are made of the same ops:

    L(x, W, dy) = sum over blocks w at (c, k) of  x[:, c] W[w] dy[:, k]^T

    forward y = dL/d(dy),   input gradient dx = dL/dx,   weight gradient dW = dL/dW

A gate multiplies each block's term. Without `gate_grad` the weight gradient leaves the gate out (except that `gated_dw`
drops blocks whose gate is 0) and the gate gets no gradient: a rule of the interface, not a derivative.
"""

import tensorflow as tf
from tensorflow.python.ops.parallel_for import pfor

from blocksparse import _library

_ops = _library.op_module

_LAYOUT_ATTRS = ("axis", "bsize", "C", "K", "tf32", "bench")


def _attrs(op, *names):
    return {name: op.get_attr(name) for name in names}


def _needed(op, index):
    """Whether anybody asks for this input's gradient. Eagerly TensorFlow knows; a graph drops what is not read."""
    return index not in (getattr(op, "skip_input_indices", None) or ())


def _name(op, suffix):
    """The name of a gradient op, after its forward op's: the grouping utilities sort by it. Eager ops have none."""
    name = getattr(op, "name", None)
    return name and name.rsplit("/", 1)[-1] + suffix


def _gradients(op, product, suffix, other, x, dy):
    """Gradients of all inputs of an op that reads W: of the activations by `product(other, ...)`, of W by the pair
    `(x, dy)`, of the gate by both; by the table of `BlocksparseMatMul.__call__`."""
    _, w, table, *gate = op.inputs
    attrs = _attrs(op, *_LAYOUT_ATTRS, "gate_grad", "gated_dw", "dw_dtype")
    activations = dw = dgate = None
    if _needed(op, 0):
        activations = product(other, w, table, gate, name=_name(op, suffix), **attrs)
    gate_grad, gated_dw, dw_dtype = bool(gate) and attrs.pop("gate_grad"), attrs.pop("gated_dw"), attrs.pop("dw_dtype")
    if _needed(op, 1) or (gate_grad and _needed(op, 3)):
        dw = _ops.blocksparse_matmul_dw(
            [x],
            [dy],
            table,
            gate if gated_dw else [],
            gated_dw=bool(gate) and gated_dw,
            # With a gate gradient DG rounds, so that dW is rounded once.
            dw_dtype=tf.float32 if gate_grad else dw_dtype,
            blocks=tf.compat.dimension_value(w.shape[0]) or 0,
            name=_name(op, "_updat"),
            **{name: attrs[name] for name in _LAYOUT_ATTRS},
        )
        if gate_grad:
            dw, dgate = _ops.blocksparse_matmul_dg(
                dw, w, gate[0], dw_dtype=dw_dtype, bsize=attrs["bsize"], gated=gated_dw, name=_name(op, "_dgate")
            )
    return [activations, dw, None, *([dgate] if gate else [])]


@tf.RegisterGradient("BlocksparseMatmul")
def _forward_gradient(op, dy):
    return _gradients(op, _ops.blocksparse_matmul_dx, "_bprop", dy, op.inputs[0], dy)


@tf.RegisterGradient("BlocksparseMatmulDX")
def _input_gradient_gradient(op, g):
    return _gradients(op, _ops.blocksparse_matmul, "_fprop", g, g, op.inputs[0])


def _pair_gradients(op, g):
    """Gradients of the x and dy lists of a weight gradient: the two other products, with g in the place of W."""
    params = op.get_attr("params")
    xs, dys, table = op.inputs[:params], op.inputs[params : 2 * params], op.inputs[2 * params]
    dtype = xs[0].dtype
    # A float32 gradient of 16-bit operands keeps its precision up to the one rounding at the end.
    compute = dtype if g.dtype == dtype else tf.float32
    gated = op.get_attr("gated_dw") and op.get_attr("ngate") > 0
    present = [tf.cast(tf.not_equal(op.inputs[2 * params + 1], 0), tf.float32)] if gated else []
    attrs = dict(_attrs(op, *_LAYOUT_ATTRS), gated_dw=gated, dw_dtype=compute)
    g = tf.cast(g, compute)

    def gradient(product, operand):
        return tf.cast(product(tf.cast(operand, compute), g, table, present, **attrs), dtype)

    dxs = [gradient(_ops.blocksparse_matmul_dx, dy) if _needed(op, p) else None for p, dy in enumerate(dys)]
    ddys = [gradient(_ops.blocksparse_matmul, x) if _needed(op, params + p) else None for p, x in enumerate(xs)]
    return dxs + ddys + [None] * (1 + op.get_attr("ngate"))


@tf.RegisterGradient("BlocksparseMatmulDW")
def _weight_gradient_gradient(op, g):
    return _pair_gradients(op, g)


@tf.RegisterGradient("BlocksparseMatmulDWA")
def _accumulated_weight_gradient_gradient(op, g):
    return [*_pair_gradients(op, g), tf.cast(g, tf.float32)]


@tf.RegisterGradient("BlocksparseMatmulDG")
def _gate_gradient_gradient(op, g_dw, g_dgate):
    dw, w, gate = op.inputs
    g_dw = tf.cast(g_dw, tf.float32)
    if op.get_attr("gated"):
        g_dgate = tf.where(tf.equal(gate, 0), tf.zeros_like(g_dgate), g_dgate)
    per_block = g_dgate[:, None, None]
    return [
        gate[:, None, None] * g_dw + per_block * tf.cast(w, tf.float32),
        tf.cast(per_block * dw, w.dtype),
        tf.reduce_sum(g_dw * dw, axis=[1, 2]),
    ]


# ------------------------------------------------------------------------------------------------- tf.vectorized_map


def _unmapped(pfor_input, index, what):
    value, mapped, _ = pfor_input.input(index)
    if mapped:
        raise ValueError(
            f"{pfor_input.op_type}: {what} must be the same for all elements under tf.vectorized_map, got one that "
            "differs between them. Map over activations only, or use tf.map_fn"
        )
    return value


def _convert_product(pfor_input, product):
    """Mapped activations are one more batch dimension: one launch for all."""
    w = _unmapped(pfor_input, 1, "the weight")
    table = _unmapped(pfor_input, 2, "the layout")
    gate = [_unmapped(pfor_input, i, "the gate") for i in range(3, pfor_input.num_inputs)]
    x = pfor_input.stacked_input(0)
    attrs = _attrs(pfor_input.op, *_LAYOUT_ATTRS, "gate_grad", "gated_dw", "dw_dtype")
    features_first = attrs["axis"] == 0
    y = product(_swap_first_two(x) if features_first else x, w, table, gate, **attrs)
    return pfor.wrap(_swap_first_two(y) if features_first else y, True)


def _swap_first_two(x):
    rank = x.shape.rank
    rest = tf.range(2, tf.rank(x)) if rank is None else list(range(2, rank))
    return tf.transpose(x, tf.concat([[1, 0], rest], 0) if rank is None else [1, 0, *rest])


@pfor.RegisterPFor("BlocksparseMatmul")
def _convert_forward(pfor_input):
    return _convert_product(pfor_input, _ops.blocksparse_matmul)


@pfor.RegisterPFor("BlocksparseMatmulDX")
def _convert_input_gradient(pfor_input):
    return _convert_product(pfor_input, _ops.blocksparse_matmul_dx)


def _convert_weight_gradient(pfor_input, product, addend):
    """Each element has a weight gradient of its own: a loop of launches, each like the op's."""
    op = pfor_input.op
    params = op.get_attr("params")
    table = _unmapped(pfor_input, 2 * params, "the layout")
    gate_end = 2 * params + 1 + op.get_attr("ngate")
    gate = [_unmapped(pfor_input, i, "the gate") for i in range(2 * params + 1, gate_end)]
    attrs = _attrs(op, *_LAYOUT_ATTRS, "gated_dw", "dw_dtype", "blocks")
    indices = [*range(2 * params), *range(gate_end, gate_end + addend)]
    mapped = [i for i in indices if pfor_input.input(i).is_stacked]

    def one(elements):
        values = dict(zip(mapped, elements))
        operands = [values[i] if i in values else pfor_input.input(i).t for i in indices]
        pairs = operands[: 2 * params]
        return product(pairs[:params], pairs[params:], table, gate, *operands[2 * params :], **attrs)

    dtype = attrs["dw_dtype"]
    stacked = tf.map_fn(one, [pfor_input.input(i).t for i in mapped], fn_output_signature=dtype)
    return pfor.wrap(stacked, True)


@pfor.RegisterPFor("BlocksparseMatmulDW")
def _convert_dw(pfor_input):
    return _convert_weight_gradient(pfor_input, _ops.blocksparse_matmul_dw, addend=False)


@pfor.RegisterPFor("BlocksparseMatmulDWA")
def _convert_dwa(pfor_input):
    return _convert_weight_gradient(pfor_input, _ops.blocksparse_matmul_dwa, addend=True)


@pfor.RegisterPFor("BlocksparseMatmulDG")
def _convert_dg(pfor_input):
    w = _unmapped(pfor_input, 1, "the weight")
    gate = _unmapped(pfor_input, 2, "the gate")
    dw = pfor_input.stacked_input(0)
    attrs = _attrs(pfor_input.op, "dw_dtype", "bsize", "gated")

    def one(dw):
        return tuple(_ops.blocksparse_matmul_dg(dw, w, gate, **attrs))

    dw_out, dgate = tf.map_fn(one, dw, fn_output_signature=(attrs["dw_dtype"], tf.float32))
    return [pfor.wrap(dw_out, True), pfor.wrap(dgate, True)]
