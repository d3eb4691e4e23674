"""What must hold between calls, whatever the layout: generated layouts and shapes, in every way of calling."""

import helpers
import numpy as np
import tensorflow as tf
from helpers import assert_product_close, bfloat16, random_values
from hypothesis import given, settings
from hypothesis import strategies as st

from blocksparse import reference as ref
from blocksparse.matmul import BlocksparseMatMul

tf1 = tf.compat.v1

axes = st.sampled_from([0, 1])
bsizes = st.sampled_from([8, 16, 32])
dtypes = st.sampled_from([np.dtype(np.float32), np.dtype(np.float16), bfloat16])
batches = st.lists(st.integers(0, 9), max_size=3)
seeds = st.integers(0, 2**32 - 1)


def activations(bsmm, rng, batch, features, dtype):
    return random_values(rng, (*batch, features) if bsmm.axis else (features, *batch), dtype)


def bits(tensors):
    return [np.asarray(tensor).tobytes() for tensor in tensors]


@settings(max_examples=12)
@given(helpers.layouts(4, 4), bsizes, axes, dtypes, batches, st.booleans(), st.booleans(), seeds)
def test_every_way_of_calling_gives_the_same_bits(device, layout, bsize, axis, dtype, batch, gate_grad, gated, seed):
    """Eagerly; in a function that knows no shape; in one that knows all but the batch; in a v1 graph that is fed. With
    the gradients, and the gradients of a function of the gradients."""
    rng = np.random.default_rng(seed)
    bsmm = BlocksparseMatMul(layout, bsize, axis)
    arrays = [
        activations(bsmm, rng, batch, bsmm.C, dtype),
        random_values(rng, bsmm.w_shape, dtype),
        activations(bsmm, rng, batch, bsmm.K, dtype),
        np.where(rng.random(bsmm.blocks) < 0.3, 0, rng.standard_normal(bsmm.blocks)).astype(np.float32),
    ]

    def product(x, w, gate):
        return bsmm(x, w, gate, gate_grad=gate_grad, dw_gated=gated)

    def with_tapes(x, w, dy, gate):
        wanted = [x, w, gate] if gate_grad else [x, w]
        with tf.GradientTape() as outer:
            outer.watch(wanted)
            with tf.GradientTape() as inner:
                inner.watch(wanted)
                y = product(x, w, gate)
            first = inner.gradient(y, wanted, dy)
            loss = tf.add_n([tf.reduce_sum(tf.cast(g, tf.float32) ** 2) for g in first])
        return [y, *first, *outer.gradient(loss, wanted)]

    with tf.device(device):
        expected = bits(with_tapes(*map(tf.constant, arrays)))
        names = [array.dtype for array in arrays]
        unknown = [tf.TensorSpec(None, name) for name in names]
        assert bits(tf.function(with_tapes, input_signature=unknown)(*arrays)) == expected
        rows = [[None] * len(batch) + [n] if axis else [n] + [None] * len(batch) for n in (bsmm.C, bsmm.K)]
        partly = [tf.TensorSpec(s, n) for s, n in zip((rows[0], bsmm.w_shape, rows[1], bsmm.g_shape), names)]
        concrete = tf.function(with_tapes, input_signature=partly)
        assert bits(concrete(*arrays)) == expected
        shape = concrete.get_concrete_function().structured_outputs[0].shape.as_list()
        assert shape == rows[1]

    with tf.Graph().as_default(), tf1.Session() as session:
        feeds = {tf1.placeholder(spec.dtype, spec.shape): array for spec, array in zip(partly, arrays)}
        x, w, dy, gate = feeds
        with tf.device(device):
            wanted = [x, w, gate] if gate_grad else [x, w]
            y = product(x, w, gate)
            first = tf1.gradients(y, wanted, dy)
            loss = tf.add_n([tf.reduce_sum(tf.cast(g, tf.float32) ** 2) for g in first])
            results = [y, *first, *tf1.gradients(loss, wanted)]
        assert bits(session.run(results, feeds)) == expected
        assert not tf1.global_variables()


@settings(max_examples=25)
@given(helpers.layouts(5, 5), bsizes, dtypes, st.integers(0, 40), seeds)
def test_relations_between_products(device, layout, bsize, dtype, n, seed):
    rng = np.random.default_rng(seed)
    last, first = (BlocksparseMatMul(layout, bsize, axis) for axis in (1, 0))
    turned = BlocksparseMatMul(layout.T, bsize, 1)
    columns = BlocksparseMatMul(layout, bsize, 1, z_order=False)
    x, w = random_values(rng, (n, last.C), dtype), random_values(rng, last.w_shape, dtype)
    dy = random_values(rng, (n, last.K), dtype)
    gate = rng.integers(0, 2, last.blocks).astype(np.float32)
    size = [np.abs(v) for v in (x, w, dy)]
    bound = ref.matmul(size[0], size[1], layout, bsize, 1)
    tf32 = dtype == np.float32 and device != "/CPU:0"

    def close(y, expected, bound):
        # Both were rounded: what is called expected is off by as much again.
        rounding = helpers.ulp(np.asarray(expected, np.float64), dtype) / 2
        allowed = bound + rounding / (4 * 2.0**-24)
        assert_product_close(np.asarray(y), np.asarray(expected, np.float64), allowed, last.C + last.K + n, tf32)

    with tf.device(device):
        y = last(x, w)
        # The feature axis moves the features and nothing else.
        close(tf.transpose(first(x.T.copy(), w)), y, bound)
        # The order of the blocks is the order of the weight.
        place = {block: w for w, block in enumerate(last.updat_list)}
        close(columns(x, w[[place[block] for block in columns.updat_list]]), y, bound)
        # The input gradient is the product with the transposed weight.
        ids = [place[k, c] for c, k in turned.updat_list]
        with tf.GradientTape() as tape:
            variable = tf.constant(x)
            tape.watch(variable)
            value = last(variable, w)
        bound_dx = ref.matmul_dx(size[2], size[1], layout, bsize, 1)
        close(tape.gradient(value, variable, dy), turned(dy, w[ids].transpose(0, 2, 1)), bound_dx)
        # And the weight gradient changes its lists with it.
        bound_dw = ref.matmul_dw(size[0], size[2], layout, bsize, 1)
        dw = last.weight_grad(x, dy)
        close(tf.transpose(turned.weight_grad(dy, x), [0, 2, 1]), tf.gather(dw, ids), bound_dw[ids])
        # A gate of 0 and 1 is another weight, and what pruning by it leaves.
        gated = last(x, w, gate)
        close(gated, last(x, w * gate.astype(dtype)[:, None, None]), bound)
        if gate.any():
            pruned_w, ones = last.prune(w, gate)
            close(gated, BlocksparseMatMul(last.layout, bsize, 1)(x, pruned_w, ones), bound)
        # Batches are independent: each part as in the whole.
        part = slice(n // 3, n - n // 3)
        close(last(x[part], w), y[part], bound[part])


@settings(max_examples=15)
@given(helpers.layouts(4, 4), bsizes, axes, dtypes, batches, st.integers(1, 5), seeds)
def test_vectorized_map_is_one_more_batch_dimension(device, layout, bsize, axis, dtype, batch, many, seed):
    rng = np.random.default_rng(seed)
    bsmm = BlocksparseMatMul(layout, bsize, axis)
    x = np.stack([activations(bsmm, rng, batch, bsmm.C, dtype) for _ in range(many)])
    w = random_values(rng, bsmm.w_shape, dtype)
    size = np.abs(x), np.abs(w)
    with tf.device(device):
        y = tf.vectorized_map(lambda one: bsmm(one, w), tf.constant(x), fallback_to_while_loop=False)
    expected = np.stack([ref.matmul(one, w, layout, bsize, axis) for one in x])
    bound = np.stack([ref.matmul(one, size[1], layout, bsize, axis) for one in size[0]])
    assert_product_close(y, expected, bound, bsmm.C, dtype == np.float32 and device != "/CPU:0")
