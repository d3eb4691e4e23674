"""Rewriting of gradient graphs: many weight gradients of one weight, one for each time step, become a few.

All of it needs the time steps to be ops of one graph: a `tf.compat.v1` graph, or a loop unrolled in a `tf.function`.
What works everywhere is `BlocksparseMatMul.weight_grad(xs, dys)`.
"""

from __future__ import annotations

import itertools
import re
from typing import NamedTuple

import tensorflow as tf

from blocksparse import _library

__all__ = ["add_control_input", "block_reduced_full_dw", "get_bsmm_dx_ops", "get_parents", "group_param_grads"]

_ops = _library.op_module

_DX, _DG = "BlocksparseMatmulDX", "BlocksparseMatmulDG"
_WEIGHT_GRADIENTS = ("BlocksparseMatmulDW", "BlocksparseMatmulDWA")
_PRODUCTS = ("BlocksparseMatmul", _DX, *_WEIGHT_GRADIENTS)
_SUMS = ("AddN", "AddN8", "Add", "AddV2", "AccumulateNV2")
# What ends a graph: the ops on the other side belong to a loop, a branch or another function.
_BOUNDARIES = (
    "While StatelessWhile If StatelessIf Case StatelessCase PartitionedCall StatefulPartitionedCall "
    "SymbolicGradient Enter Exit NextIteration Switch Merge RefEnter RefExit RefSwitch RefMerge"
).split()
_ELSEWHERE = (
    "this works where the time steps are ops of one graph: a tf.compat.v1 graph, or a loop unrolled in a tf.function. "
    "In every mode, BlocksparseMatMul.weight_grad(xs, dys) sums over pairs in one launch"
)


class _Sum(NamedTuple):
    """A tensor that sums weight gradients, with its terms: the tensor added, and the same before any casts."""

    total: tf.Tensor
    terms: list[tuple[tf.Tensor, tf.Tensor]]


def group_param_grads(param_grad, group_size: int = 8, cast32: bool = False):
    """Replaces the weight gradients that one weight gets from its uses, time steps mostly, by sums in fewer launches.

    Finds, going back from `param_grad`, the sums of `BlocksparseMatmulDW` outputs (or, with a gate's gradient, of
    `BlocksparseMatmulDG` outputs), and puts in the place of each one op for `group_size` time steps, the latest first,
    which adds to the one before it in float32; the last rounds. The input gradient that follows a group waits for it,
    so that a group's activations are free before earlier time steps are worked on. Terms of other kinds stay in the
    sum; so do terms that have a layout or gate for themselves.

    Args:
      param_grad: a weight's gradient, from `tf.gradients` or a tape in a function.
      group_size: time steps in one launch, at least 1.
      cast32: give float32 where the gradient is the sum itself.

    Returns:
      The gradient of equal value. The new tensor where `param_grad` was such a sum; else `param_grad` itself, whose
      inputs have changed (it is a cast or the gradient of a normalization, say). Unchanged with less than two uses.

    Raises:
      ValueError: eagerly, or where the time steps are behind a loop or a function call.
    """
    if group_size < 1:
        raise ValueError(f"group_size must be at least 1, got {group_size}")
    found = _find_sums(param_grad, "group_param_grads")
    scope = _scope(param_grad)
    result = param_grad
    for weight_sum in found:
        is_result = weight_sum.total is param_grad
        dtype = tf.float32 if is_result and cast32 else weight_sum.total.dtype
        grouped = _group_sum(weight_sum, dtype, group_size, scope)
        if grouped is None:
            continue
        if is_result:
            result = grouped
        else:
            for consumer in weight_sum.total.consumers():
                _replace_input(consumer, weight_sum.total, grouped)
    return tf.cast(result, tf.float32) if cast32 else result


def block_reduced_full_dw(param_grad, scale=1.0, norm: str = "max", group_size: int = 8):
    """How much each position of a layout, present or not, would matter: a map for growing networks.

    For the pairs `(x, dy)` of the weight gradients behind `param_grad`, with `size(v)` the largest magnitude of a block
    of features (`norm="max"`) or its Euclidean norm (any other):

      `out[c, k] = sum over pairs and batch entries n of scale * size(x[n, block c]) * size(dy[n, block k])`

    A pair whose sum at a position is not finite counts 0 there. Computed in float32, on the CPU or GPU that has the
    activations, in groups with the same order of events as in `group_param_grads`.

    Args:
      param_grad: a weight's gradient, from `tf.gradients` or a tape in a function; before `group_param_grads` or after.
      scale: number or scalar tensor; where it is 0, the result is 0 and nothing is computed.
      norm: see above.
      group_size: weight gradients in one group, at least 1.

    Returns:
      float32 `[CB, KB]`.

    Raises:
      ValueError: eagerly, where the time steps are behind a loop or a function call, or without weight gradients.
    """
    if group_size < 1:
        raise ValueError(f"group_size must be at least 1, got {group_size}")
    weight_gradients = _weight_gradient_ops(param_grad, "block_reduced_full_dw")
    if not weight_gradients:
        raise ValueError("BlocksparseMatmulDW op not found")
    constant = not tf.is_tensor(scale)
    bsize, C, K = (weight_gradients[0].get_attr(name) for name in ("bsize", "C", "K"))
    scope = _scope(param_grad)
    total = tf.zeros([C // bsize, K // bsize])
    for offset, group in _chunks(weight_gradients, group_size):
        pairs = [pair for op in group for pair in _pairs(op)]
        axis = group[0].get_attr("axis")

        def add(total=total, pairs=pairs, axis=axis):
            for x, dy in pairs:
                x, dy = _block_sizes(x, C, axis, bsize, norm), _block_sizes(dy, K, axis, bsize, norm)
                partial = tf.cast(scale, tf.float32) * tf.matmul(x, dy, transpose_a=True)
                total += tf.where(tf.math.is_finite(partial), partial, tf.zeros_like(partial))
            return total

        name = f"{scope}block_reduced_full_dw_{offset:03d}"
        with tf.device(group[0].device or None):
            if not constant:
                total = tf.cond(tf.not_equal(scale, tf.zeros([], scale.dtype)), add, lambda total=total: total)
            elif scale != 0:
                total = add()
            total = tf.identity(total, name)
        _hold_back(group, total.op)
    return total


def get_bsmm_dx_ops(param_grad) -> list[tf.Operation]:
    """The `BlocksparseMatmulDX` ops that read the same output gradients as the weight gradients, latest step first."""
    ops = _weight_gradient_ops(param_grad, "get_bsmm_dx_ops")
    return [dx for op in ops for _, dy in _pairs(op) for dx in _dx_ops(dy)]


def get_parents(grad, op_type: str) -> list[tf.Operation]:
    """The ops of a type behind a tensor, found wave by wave and not passed.

    An op that is reached in several waves is listed several times. `[grad.op]` where that has the type itself.
    """
    _check_graph(grad, "get_parents")
    if grad.op.type == op_type:
        return [grad.op]
    found, wave = [], [grad.op]
    while wave:
        parents = dict.fromkeys(tensor.op for op in wave for tensor in op.inputs)
        found += [op for op in parents if op.type == op_type]
        wave = [op for op in parents if op.type != op_type]
    return found


def add_control_input(op: tf.Operation, control: tf.Operation) -> None:
    """Makes `op` of a graph wait for `control`, an op of the same graph."""
    op._add_control_input(control)


# ------------------------------------------------------------------------------------------------- finding the sums


def _check_graph(tensor, caller):
    if not isinstance(tensor, tf.Tensor) or isinstance(tensor, tf.__internal__.EagerTensor):
        raise ValueError(f"{caller} needs a tensor of a graph, got {type(tensor).__name__}: {_ELSEWHERE}")


def _is_weight_gradient(op):
    # With tf32 off it is part of l2_normalize or of its gradient.
    return op.type in _WEIGHT_GRADIENTS and op.get_attr("tf32")


def _weight_gradient_of(term):
    """The op whose output a term is, through a gate's gradient; None for terms of other kinds."""
    op = term.op
    if op.type == _DG and term is op.outputs[0]:
        op = op.inputs[0].op
    return op if _is_weight_gradient(op) else None


def _find_sums(tensor, caller) -> list[_Sum]:
    """The largest sums behind a tensor that have weight gradients among their terms."""
    _check_graph(tensor, caller)
    sums, behind, seen, crossed = [], [tensor], set(), None
    while behind:
        total = behind.pop()
        if total.ref() in seen:
            continue
        seen.add(total.ref())
        terms = [(term, _without_casts(term)) for term in _terms(total)]
        if any(_weight_gradient_of(inner) for _, inner in terms):
            sums.append(_Sum(total, terms))
        for _, inner in terms:
            op = inner.op
            if op.type in _BOUNDARIES:
                crossed = op
            elif op.type in _SUMS:  # under a cast
                behind.append(inner)
            elif op.type not in _PRODUCTS and op.type != _DG:
                behind += op.inputs
            elif getattr(_weight_gradient_of(inner), "type", None) == "BlocksparseMatmulDWA":
                behind.append(_weight_gradient_of(inner).inputs[-1])
    if not sums and crossed is not None:
        raise ValueError(
            f"{caller} met {crossed.type} op {crossed.name!r} and no weight gradient before it: {_ELSEWHERE}"
        )
    return sums


def _terms(total):
    """What a sum adds, sums of sums opened; a tensor that is no sum is its own only term."""
    terms, ahead = [], [total]
    while ahead:
        tensor = ahead.pop()
        if tensor.op.type in _SUMS:
            ahead += reversed(tensor.op.inputs)
        else:
            terms.append(tensor)
    return terms


def _without_casts(tensor):
    while tensor.op.type in ("Cast", "Identity") and tensor.op.inputs[0].dtype.is_floating:
        tensor = tensor.op.inputs[0]
    return tensor


def _weight_gradient_ops(param_grad, caller):
    ops = (_weight_gradient_of(inner) for found in _find_sums(param_grad, caller) for _, inner in found.terms)
    return _latest_first(dict.fromkeys(op for op in ops if op is not None))


def _latest_first(ops):
    """By the number of the call in the name, descending; without one by creation, which is back-propagation's order."""
    ops = list(ops)
    names = [op.name.rsplit("/", 1)[-1] for op in ops]
    if len(set(names)) == len(names) and all(re.search(r"_\d{6,}_updat$", name) for name in names):
        return [op for _, op in sorted(zip(names, ops), key=lambda item: item[0], reverse=True)]
    wanted = set(ops)
    return [op for op in ops[0].graph.get_operations() if op in wanted] if ops else []


# ------------------------------------------------------------------------------------------------------- replacing


def _family(term):
    """Weight gradients of one family can be one op."""
    op = _weight_gradient_of(term)
    key = (_table(op).ref(), *(_source(gate).ref() for gate in _gate(op)), *_attributes(op).values())
    if term.op.type == _DG:
        _, w, gate = term.op.inputs
        key += (_source(w).ref(), _source(gate).ref(), term.op.get_attr("gated"))
    return key


def _source(tensor):
    """What tells whether two operands are one weight or gate: their variable, where each use reads it anew."""
    tensor = _without_casts(tensor)
    if tensor.op.type == "ReadVariableOp":
        handle = tensor.op.inputs[0]
        # A function may write between two reads; a graph has no such order unless the caller makes one.
        if not tensor.graph.building_function or all(op.type == "ReadVariableOp" for op in handle.consumers()):
            return handle
    return tensor


def _table(op):
    return op.inputs[2 * op.get_attr("params")]


def _gate(op):
    """The gate that a weight gradient reads, as a list; mostly empty."""
    start = 2 * op.get_attr("params") + 1
    return list(op.inputs[start : start + op.get_attr("ngate")]) if op.get_attr("gated_dw") else []


def _attributes(op):
    return {name: op.get_attr(name) for name in ("T", "axis", "bsize", "C", "K", "gated_dw", "bench")}


def _group_sum(weight_sum, dtype, group_size, scope):
    """The same sum with its families grouped, or None if there is nothing to group."""
    families, others = {}, []
    for term, inner in weight_sum.terms:
        op = _weight_gradient_of(inner)
        if op is not None and op.type == "BlocksparseMatmulDW":
            families.setdefault(_family(inner), []).append((term, inner))
        else:
            others.append(term)
    if all(len(family) == 1 for family in families.values()):
        return None
    for family in families.values():
        if len(family) == 1:
            others.append(family[0][0])
            continue
        inner = [inner for _, inner in family]
        # A weight gradient that is added twice is two terms.
        ops = [_weight_gradient_of(term) for term in inner]
        ops = [op for op in _latest_first(dict.fromkeys(ops)) for _ in range(ops.count(op))]
        if inner[0].op.type == _DG:
            dw = _group(ops, tf.float32, group_size, scope)
            others.append(_group_gate_gradients([term.op for term in inner], dw, dtype))
        else:
            others.append(_group(ops, dtype, group_size, scope))
    others = [tf.cast(term, dtype) for term in others]
    return tf.add_n(others) if len(others) > 1 else others[0]


def _group(ops, dtype, group_size, scope):
    """The sum of weight gradients of one family, `group_size` of them to an op."""
    first = ops[0]
    table, gate = _table(first), _gate(first)
    blocks = tf.compat.dimension_value(first.outputs[0].shape[0]) or 0
    total = None
    for offset, group in _chunks(ops, group_size):
        xs, dys = map(list, zip(*(pair for op in group for pair in _pairs(op))))
        attrs = {name: value for name, value in _attributes(first).items() if name != "T"}
        attrs["blocks"] = blocks
        attrs["dw_dtype"] = dtype if offset + group_size >= len(ops) else tf.float32
        attrs["name"] = f"{scope}matmul_concat_updat_{offset:03d}"
        with tf.device(first.device or None):
            if total is None:
                total = _ops.blocksparse_matmul_dw(xs, dys, table, gate, **attrs)
            else:
                total = _ops.blocksparse_matmul_dwa(xs, dys, table, gate, total, **attrs)
        _hold_back(group, total.op)
    return total


def _group_gate_gradients(dg_ops, dw, dtype):
    """One gate gradient for the sum of the weight gradients; takes the place of the sum of the gate gradients too."""
    first = dg_ops[0]
    _, w, gate = first.inputs
    attrs = {name: first.get_attr(name) for name in ("bsize", "gated")}
    with tf.device(first.device or None):
        dw, dgate = _ops.blocksparse_matmul_dg(dw, w, gate, dw_dtype=dtype, **attrs)

    old = {op.outputs[1].ref() for op in dg_ops}
    total = first.outputs[1]
    while len(total.consumers()) == 1 and total.consumers()[0].type in _SUMS:
        total = total.consumers()[0].outputs[0]
    inputs = _sum_inputs(total)
    replaced = [(op, i) for op, i in inputs if op.inputs[i].ref() in old]
    inside = {op for op, _ in inputs} - {total.op}
    # Where the gradients meet elsewhere, or are read one by one, the old ops stay.
    if len(replaced) == len(dg_ops) and all(len(op.outputs[0].consumers()) == 1 for op in inside):
        nothing = tf.zeros_like(dgate)
        for (op, i), value in zip(replaced, itertools.chain([dgate], itertools.repeat(nothing))):
            op._update_input(i, value)
    return dw


def _sum_inputs(total):
    """`(op, index)` of each input of a sum and of the sums that it adds."""
    inputs, ahead = [], [total]
    while ahead:
        op = ahead.pop().op
        if op.type in _SUMS:
            inputs += [(op, i) for i in range(len(op.inputs))]
            ahead += op.inputs
    return inputs


def _replace_input(op, old, new):
    for i, tensor in enumerate(op.inputs):
        if tensor is old:
            op._update_input(i, new)


def _chunks(ops, size):
    return [(offset, ops[offset : offset + size]) for offset in range(0, len(ops), size)]


def _pairs(op):
    params = op.get_attr("params")
    return list(zip(op.inputs[:params], op.inputs[params : 2 * params]))


def _dx_ops(dy):
    return [op for op in dy.consumers() if op.type == _DX]


def _hold_back(group, op):
    """Lets the step before a group wait for it, unless the group needs that step."""
    _, dy = _pairs(group[-1])[-1]
    for dx in _dx_ops(dy):
        if not _depends_on(op, dx):
            add_control_input(dx, op)


def _depends_on(op, other):
    seen, behind = set(), [op]
    while behind:
        op = behind.pop()
        if op is other:
            return True
        if op not in seen:
            seen.add(op)
            behind += [tensor.op for tensor in op.inputs]
            behind += op.control_inputs
    return False


def _block_sizes(x, features, axis, bsize, norm):
    """`[N, blocks of features]`: the largest magnitude or the Euclidean norm of each, float32."""
    x = tf.cast(x, tf.float32)
    if axis == 0:
        x = tf.transpose(tf.reshape(x, [features // bsize, bsize, -1]), [2, 0, 1])
    else:
        x = tf.reshape(x, [-1, features // bsize, bsize])
    return tf.reduce_max(tf.abs(x), axis=2) if norm == "max" else tf.norm(x, axis=2)


def _scope(tensor):
    """The absolute name scope of a tensor's op."""
    scope = tensor.op.name.rpartition("/")[0]
    return f"{scope}/" if scope else ""
