"""The utilities that rewrite gradient graphs: same gradients from fewer launches."""

import helpers
import numpy as np
import pytest
import tensorflow as tf
from helpers import random_layout, random_values

from blocksparse import reference
from blocksparse.matmul import (
    BlocksparseMatMul,
    add_control_input,
    block_reduced_full_dw,
    get_bsmm_dx_ops,
    get_parents,
    group_param_grads,
)

tf1 = tf.compat.v1

KINDS = ("plain", "cast", "l2_normalize", "gated", "gate_grad", "two gates", "also dense")


def run(device, mode, build, arrays):
    """`build(*tensors)` in a v1 graph with variables or in a function; what it gives, as arrays."""
    if mode != "v1":
        with tf.device(device):
            return [t.numpy() for t in tf.function(lambda *tensors: build(*tensors))(*map(tf.constant, arrays))]
    with tf.Graph().as_default(), tf1.Session() as session, tf.device(device):
        variables = [tf1.get_variable(f"v{i}", initializer=array) for i, array in enumerate(arrays)]
        results = build(*variables)
        session.run(tf1.global_variables_initializer())
        return session.run(results)


def net(bsmm, kind, steps, x, w, gates):
    """A recurrent net whose weight is read once for each step, and its loss."""
    h = x
    if kind == "l2_normalize":
        w = bsmm.l2_normalize(w)
    for step in range(steps):
        gate = {"gated": gates[0], "gate_grad": gates[0], "two gates": gates[step % 2]}.get(kind)
        operands = (tf.cast(h, tf.float16), tf.cast(w, tf.float16)) if kind == "cast" else (h, w)
        h = tf.tanh(tf.cast(bsmm(*operands, gate=gate, gate_grad=kind != "gated"), tf.float32))
    loss = tf.reduce_sum(h * h)
    return loss + tf.reduce_sum(w * w) if kind == "also dense" else loss


@pytest.mark.usefixtures("true_float32")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", ["v1", "function", "tape"])
def test_same_gradients_from_fewer_launches(device, rng, mode, kind):
    layout, steps, group_size = random_layout(rng, 3, 3, 0.6), 10, 4
    bsmm = BlocksparseMatMul(layout, 8, 1)
    arrays = [random_values(rng, (5, 24), np.float32), 0.3 * random_values(rng, bsmm.w_shape, np.float32)]
    arrays += [rng.standard_normal(bsmm.blocks).astype(np.float32) for _ in range(2)]
    launches = []

    def build(x, w, *gates, grouped):
        if mode == "tape":
            with tf.GradientTape() as tape:
                tape.watch([x, w, *gates])
                loss = net(bsmm, kind, steps, x, w, gates)
            gradients = tape.gradient(loss, [w, *gates])
        else:
            loss = net(bsmm, kind, steps, x, w, gates)
            gradients = tf1.gradients(loss, [w, *gates])
        if grouped:
            gradients[0] = group_param_grads(gradients[0], group_size)
            needed = [
                op for op in ancestors(gradients) if op.type.startswith("BlocksparseMatmulDW") and op.get_attr("tf32")
            ]
            launches.append(sorted(op.get_attr("params") for op in needed))
        return [g for g in gradients if g is not None]

    plain = run(device, mode, lambda *t: build(*t, grouped=False), arrays)
    grouped = run(device, mode, lambda *t: build(*t, grouped=True), arrays)
    assert launches == [[1, 1, 4, 4] if kind == "two gates" else [2, 4, 4]]
    tolerance = 2e-3 if kind == "cast" else 1e-5
    assert len(plain) == {"gate_grad": 2, "two gates": 3}.get(kind, 1)
    for a, b in zip(plain, grouped, strict=True):
        assert a.dtype == b.dtype and np.linalg.norm(a - b) <= tolerance * np.linalg.norm(a)


def ancestors(tensors):
    ops, behind = set(), [t.op for t in tensors if t is not None]
    while behind:
        op = behind.pop()
        if op not in ops:
            ops.add(op)
            behind += [t.op for t in op.inputs] + list(op.control_inputs)
    return ops


def graph_of_steps(bsmm, steps, dtype=tf.float32, names=None):
    """In the current graph: the gradient of W over some steps, and the pairs of each step."""
    x = tf1.placeholder(dtype, bsmm.i_shape(None))
    w = tf1.placeholder(dtype, bsmm.w_shape)
    h, pairs = x, []
    for step in range(steps):
        y = bsmm(h, w, name=names and names[step])
        pairs.append([h, y])
        h = tf.tanh(y)
    loss = tf.reduce_sum(h)
    gradient = tf1.gradients(loss, [w])[0]
    for pair in pairs:
        pair[1] = tf1.gradients(loss, pair[1])[0]
    return x, w, gradient, pairs


def test_order_of_events(rng):
    """Groups go from the last step to the first, and a step before a group waits for it."""
    bsmm = BlocksparseMatMul(np.eye(3), 8, 1, name="fc")
    with tf.Graph().as_default():
        _, _, gradient, _ = graph_of_steps(bsmm, 12)
        dx_ops = get_bsmm_dx_ops(gradient)
        assert [op.name.rsplit("/", 1)[-1] for op in dx_ops] == [f"fc_{step:06d}_bprop" for step in range(11, -1, -1)]
        grouped = group_param_grads(gradient, 5)
        last, middle, first = grouped.op, grouped.op.inputs[-1].op, grouped.op.inputs[-1].op.inputs[-1].op
        names = [op.name for op in (first, middle, last)]
        assert names == [f"gradients/matmul_concat_updat_{offset:03d}" for offset in (0, 5, 10)]
        assert [op.get_attr("params") for op in (first, middle, last)] == [5, 5, 2]
        # Steps 11 to 7 are the first group: the input gradient of step 7 waits for it.
        waits = {step: [op.name for op in dx_ops[11 - step].control_inputs] for step in range(12)}
        expected = {7: [first.name], 2: [middle.name], 0: [last.name]}
        assert waits == {step: expected.get(step, []) for step in range(12)}


def test_names_in_the_wrong_order_make_no_cycle(device, rng):
    """Names that say nothing about time: the sum is right, and nothing waits for itself."""
    bsmm = BlocksparseMatMul(np.ones((2, 2)), 8, 1)
    names = [f"step_{n:06d}" for n in (3, 0, 5, 1, 4, 2)]
    with tf.Graph().as_default(), tf1.Session() as session, tf.device(device):
        x, w, gradient, _ = graph_of_steps(bsmm, 6, names=names)
        grouped = group_param_grads(gradient, 2)
        feeds = {x: random_values(rng, (4, 16), np.float32), w: 0.3 * random_values(rng, bsmm.w_shape, np.float32)}
        a, b = session.run([gradient, grouped], feeds)
    assert np.linalg.norm(a - b) <= (1e-5 if device == "/CPU:0" else 5e-3) * np.linalg.norm(a)


@pytest.mark.parametrize("axis", [0, 1])
def test_grouped_steps_round_once(device, rng, axis):
    """32 float16 steps, over several groups, equal the float64 sum to one rounding."""
    layout = random_layout(rng, 2, 3, 0.7)
    bsmm = BlocksparseMatMul(layout, 16, axis)
    xs = [random_values(rng, bsmm.i_shape(40), np.float16) for _ in range(32)]
    dys = [random_values(rng, bsmm.o_shape(40), np.float16) for _ in range(32)]
    with tf.Graph().as_default(), tf1.Session() as session, tf.device(device):
        w = tf1.placeholder_with_default(np.zeros(bsmm.w_shape, np.float16), bsmm.w_shape)
        ys = [bsmm(tf.constant(x), w) for x in xs]
        gradient = tf1.gradients(ys, [w], [tf.constant(dy) for dy in dys])[0]
        results = session.run([gradient, *(group_param_grads(gradient, size) for size in (8, 32, 5))])
    expected = reference.matmul_dw(xs, dys, layout, 16, axis)
    size = lambda arrays: [np.abs(a.astype(np.float64)) for a in arrays]  # noqa: E731
    magnitude = reference.matmul_dw(size(xs), size(dys), layout, 16, axis)
    for grouped in results[1:]:
        helpers.assert_product_close(grouped, expected, magnitude, 32 * 40)
    with pytest.raises(AssertionError, match="are wrong"):
        helpers.assert_product_close(results[0], expected, magnitude, 32 * 40)


def test_results_by_producer():
    """A sum becomes a new tensor; what stands behind a cast keeps its name and gets new inputs."""
    bsmm = BlocksparseMatMul(np.eye(2), 8, 1)
    with tf.Graph().as_default():
        _, _, gradient, _ = graph_of_steps(bsmm, 1)
        assert group_param_grads(gradient) is gradient
        _, _, gradient, _ = graph_of_steps(bsmm, 3)
        grouped = group_param_grads(gradient)
        assert grouped is not gradient and grouped.op.type == "BlocksparseMatmulDW"
        _, _, gradient, _ = graph_of_steps(bsmm, 3, tf.float16)
        cast = tf.cast(gradient, tf.float32)
        assert group_param_grads(cast) is cast and cast.op.inputs[0].op.get_attr("params") == 3
        _, _, gradient, _ = graph_of_steps(bsmm, 3, tf.float16)
        as_float32 = group_param_grads(gradient, cast32=True)
        assert as_float32.dtype == tf.float32 and as_float32.op.type == "BlocksparseMatmulDW"
        unrelated = tf.constant(1.0) + 2.0
        assert group_param_grads(unrelated) is unrelated


def test_many_terms():
    """Sums nested deeper than Python can recurse."""
    bsmm = BlocksparseMatMul([[1]], 8, 1)
    with tf.Graph().as_default():
        x = tf1.placeholder(tf.float32, [None, 8])
        total = step = bsmm.weight_grad(x, x)
        for _ in range(1100):
            total = total + step
        assert group_param_grads(total, 2000).op.get_attr("params") == 1101


# --------------------------------------------------------------------------------------------------------- importance


@pytest.mark.usefixtures("true_float32")
@pytest.mark.parametrize("norm", ["max", "l2"])
@pytest.mark.parametrize("axis", [0, 1])
def test_block_reduced_full_dw(device, rng, axis, norm):
    layout = random_layout(rng, 3, 3, 0.5)
    bsmm = BlocksparseMatMul(layout, 8, axis)
    for dtype in (tf.float32, tf.float16, tf.bfloat16):
        with tf.Graph().as_default(), tf1.Session() as session, tf.device(device):
            x, w, gradient, pairs = graph_of_steps(bsmm, 5, dtype)
            scale = tf1.placeholder(tf.float32, [])
            results = [
                block_reduced_full_dw(gradient, 0.5, norm, 2),
                block_reduced_full_dw(gradient, scale, norm),
                block_reduced_full_dw(gradient, 0, norm),
                block_reduced_full_dw(group_param_grads(gradient, 2), 0.5, norm),
            ]
            assert results[0].op.name == "gradients/block_reduced_full_dw_004"
            feeds = {
                x: random_values(rng, bsmm.i_shape(7), dtype.as_numpy_dtype),
                w: (0.3 * random_values(rng, bsmm.w_shape, np.float32)).astype(dtype.as_numpy_dtype),
            }
            results, pairs = session.run([results, pairs], feeds | {scale: 0.5})
            nothing = session.run(block_reduced_full_dw(gradient, scale, norm), feeds | {scale: 0})
        expected = reference.block_reduced_full_dw(*zip(*pairs), 8, axis, 0.5, norm)
        for result in (results[0], results[1], results[3]):
            assert result.dtype == np.float32 and result.shape == (3, 3)
            np.testing.assert_allclose(result, expected, rtol=1e-5)
        assert not results[2].any() and not nothing.any()


def test_block_reduced_full_dw_of_overflow(device, rng):
    """A pair with a sum that is not finite counts nothing there."""
    bsmm = BlocksparseMatMul(np.eye(2), 8, 1)
    xs = [random_values(rng, (3, 16), np.float32) for _ in range(3)]
    dys = [random_values(rng, (3, 16), np.float32) for _ in range(3)]
    xs[1][0, 2] = np.inf
    dys[2][1, 9] = np.nan
    with tf.Graph().as_default(), tf1.Session() as session, tf.device(device):
        w = tf1.placeholder_with_default(np.zeros(bsmm.w_shape, np.float32), bsmm.w_shape)
        ys = [bsmm(tf.constant(x), w) for x in xs]
        gradient = tf1.gradients(ys, [w], [tf.constant(dy) for dy in dys])[0]
        result = session.run(block_reduced_full_dw(gradient, group_size=2))
    np.testing.assert_allclose(
        result, reference.block_reduced_full_dw(xs, dys, 8, 1), rtol=1e-5 if device == "/CPU:0" else 5e-3
    )


# ------------------------------------------------------------------------------------------------------- small things


def test_get_parents():
    with tf.Graph().as_default():
        a = tf1.placeholder(tf.float32, [])
        b, c = tf.exp(a), tf.sin(a)
        d = b + c
        assert get_parents(d, "Exp") == [b.op] and get_parents(d, "AddV2") == [d.op]
        assert get_parents(d, "Placeholder") == [a.op] and get_parents(d, "Tan") == []
        late = tf.exp(tf.identity(a)) + a
        assert get_parents(late, "Placeholder") == [a.op, a.op]  # in two waves


def test_add_control_input():
    with tf.Graph().as_default():
        a, b = tf.no_op(), tf.no_op()
        add_control_input(a, b)
        assert a.control_inputs == [b]


UTILITIES = (group_param_grads, block_reduced_full_dw, get_bsmm_dx_ops)


@pytest.mark.parametrize("utility", UTILITIES)
def test_eager_gradients_are_refused(utility):
    bsmm = BlocksparseMatMul(np.eye(2), 8, 1)
    gradient = bsmm.weight_grad(tf.ones([2, 16]), tf.ones([2, 16]))
    with pytest.raises(ValueError, match=r"graph, got EagerTensor: .*weight_grad\(xs, dys\)"):
        utility(gradient)


@pytest.mark.parametrize("utility", UTILITIES)
@pytest.mark.parametrize("boundary", ["loop", "function"])
def test_gradients_behind_a_boundary_are_refused(utility, boundary):
    bsmm = BlocksparseMatMul(np.eye(2), 8, 1)

    @tf.function
    def step(h, w):
        return tf.tanh(bsmm(h, w))

    @tf.function
    def gradient(x, w):
        if boundary == "loop":
            h = tf.while_loop(lambda h: tf.reduce_sum(h) < 1e9, lambda h: bsmm(h, w), [x])[0]
        else:
            h = step(step(x, w), w)
        return utility(tf.gradients(h, w)[0])

    with pytest.raises(ValueError, match=r"no weight gradient before it: .*weight_grad\(xs, dys\)"):
        gradient(tf.ones([2, 16]), tf.ones(bsmm.w_shape))


def test_errors():
    with tf.Graph().as_default():
        with pytest.raises(ValueError, match="BlocksparseMatmulDW op not found"):
            block_reduced_full_dw(tf.constant(1.0))
        for utility in (group_param_grads, block_reduced_full_dw):
            with pytest.raises(ValueError, match="group_size must be at least 1, got 0"):
                utility(tf.constant(1.0), group_size=0)
