"""The three products and their derivatives, against the reference in float64."""

import itertools
import pickle

import helpers
import numpy as np
import pytest
import tensorflow as tf
from helpers import assert_product_close, bfloat16, random_layout, random_values
from hypothesis import given, settings
from hypothesis import strategies as st

from blocksparse import _gradients, reference
from blocksparse.matmul import BlocksparseMatMul, dw_matmul_large_n, largest_block

BLOCK_SIZES = (8, 16, 32, 64, 128)
DTYPES = (np.float32, np.float16, bfloat16)
GATING = (None, (False, False), (False, True), (True, False), (True, True))  # (gate_grad, dw_gated)


def activations(bsmm, rng, batch, features, dtype):
    return random_values(rng, (*batch, features) if bsmm.axis else (features, *batch), dtype)


def random_gate(rng, blocks):
    """Gates of any sign, some of them 0."""
    gate = rng.standard_normal(blocks).astype(np.float32)
    gate[rng.random(blocks) < 0.3] = 0
    return gate


def check_products(rng, device, bsmm, layout, dtype, batch, gating, z_order=True):
    """Forward product and all gradients of one call, outputs poisoned, against the reference."""
    x = activations(bsmm, rng, batch, bsmm.C, dtype)
    w = random_values(rng, bsmm.w_shape, dtype)
    dy = activations(bsmm, rng, batch, bsmm.K, dtype)
    gate = None if gating is None else random_gate(rng, bsmm.blocks)
    gate_grad, dw_gated = gating or (False, False)
    n = int(np.prod(batch))
    tf32 = dtype == np.float32 and device != "/CPU:0" and tf.config.experimental.tensor_float_32_execution_enabled()

    with tf.device(device):
        variables = [tf.constant(x), tf.constant(w)] + ([] if gate is None else [tf.constant(gate)])
        helpers.poison(device, (dy.shape, dtype), (x.shape, dtype), (w.shape, dtype))
        with tf.GradientTape() as tape:
            tape.watch(variables)
            y = bsmm(variables[0], variables[1], *variables[2:], gate_grad=gate_grad, dw_gated=dw_gated)
        dx, dw, *dgate = tape.gradient(y, variables, tf.constant(dy))
    helpers.assert_on(device, y, dx, dw)

    common = (layout, bsmm.bsize, bsmm.axis)
    size = lambda array: None if array is None else np.abs(array.astype(np.float64))  # noqa: E731
    options = dict(gate=gate, z_order=z_order)
    sizes = dict(gate=size(gate), z_order=z_order)
    terms = bsmm.bsize * int(layout.sum(axis=0).max()), bsmm.bsize * int(layout.sum(axis=1).max())
    assert_product_close(
        y,
        reference.matmul(x, w, *common, **options),
        reference.matmul(size(x), size(w), *common, **sizes),
        terms[0],
        tf32,
    )
    assert_product_close(
        dx,
        reference.matmul_dx(dy, w, *common, **options),
        reference.matmul_dx(size(dy), size(w), *common, **sizes),
        terms[1],
        tf32,
    )
    rule = dict(gate_grad=gate_grad, dw_gated=dw_gated)
    assert_product_close(
        dw,
        reference.matmul_dw(x, dy, *common, **options, **rule),
        reference.matmul_dw(size(x), size(dy), *common, **sizes, **rule),
        n,
        tf32,
    )
    if gate is not None and gate_grad:
        assert_product_close(
            dgate[0],
            reference.matmul_dgate(x, dy, w, *common, gate, dw_gated, z_order),
            reference.matmul_dgate(size(x), size(dy), size(w), *common, size(gate), dw_gated, z_order),
            n * bsmm.bsize**2,
            tf32,
        )
    elif gate is not None:
        assert dgate[0] is None


@pytest.fixture(params=[False, True], ids=["", "tf32"])
def tensor_float_32(request, device):
    """TensorFlow's switch, both ways on a GPU."""
    if request.param and device == "/CPU:0":
        pytest.skip("the CPU has no TF32")
    before = tf.config.experimental.tensor_float_32_execution_enabled()
    tf.config.experimental.enable_tensor_float_32_execution(request.param)
    yield request.param
    tf.config.experimental.enable_tensor_float_32_execution(before)


@pytest.mark.parametrize("bsize,axis,dtype", list(itertools.product(BLOCK_SIZES, (0, 1), DTYPES)))
def test_sample(device, bsize, axis, dtype):
    """Every block size, axis and dtype, with layouts, batch shapes, gates and block order as they come."""

    @given(
        layout=helpers.layouts(5, 5),
        batch=st.lists(st.sampled_from([0, 1, 2, 3, 7, 13, 31, 64, 97]), min_size=0, max_size=2),
        gating=st.sampled_from(GATING),
        z_order=st.booleans(),
        tf32=st.booleans(),
        seed=st.integers(0, 2**32 - 1),
    )
    @settings(max_examples=6, database=None)
    def check(layout, batch, gating, z_order, tf32, seed):
        batch = batch if np.prod(batch) <= 500 else batch[:1]
        bsmm = BlocksparseMatMul(layout, bsize, axis, z_order)
        before = tf.config.experimental.tensor_float_32_execution_enabled()
        tf.config.experimental.enable_tensor_float_32_execution(tf32)
        try:
            check_products(np.random.default_rng(seed), device, bsmm, layout, dtype, batch, gating, z_order)
        finally:
            tf.config.experimental.enable_tensor_float_32_execution(before)

    check()


@pytest.mark.full
@pytest.mark.parametrize("gating", GATING, ids=str)
@pytest.mark.parametrize("n", [0, 1, 2, 5, 8, 17, 31, 64, 127, 128, 131, 256, 509, 1021])
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: np.dtype(dtype).name)
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("bsize", BLOCK_SIZES)
def test_every_combination(device, rng, tensor_float_32, bsize, axis, dtype, n, gating):
    CB, KB = rng.integers(1, 9, 2)
    layout = random_layout(rng, CB, KB, rng.choice([0.1, 0.3, 0.6, 1.0]))
    check_products(rng, device, BlocksparseMatMul(layout, bsize, axis), layout, dtype, [n], gating)


@pytest.mark.parametrize("axis", [0, 1])
def test_large_product(device, rng, tensor_float_32, axis):
    """Many blocks and a long batch, where work is split and tiled."""
    layout = random_layout(rng, 16, 12, 0.3)
    layout[:, 3] = True
    layout[:, 7] = False
    layout[5] = False
    for dtype in DTYPES:
        check_products(rng, device, BlocksparseMatMul(layout, 32, axis), layout, dtype, [1201], (True, False))


def test_one_sample_like_dense(device, rng):
    """The matrix-vector product of text generation, in float16."""
    layout = random_layout(rng, 6, 9, 0.4)
    bsmm = BlocksparseMatMul(layout, 32, 1)
    x, w = random_values(rng, (1, bsmm.C), np.float16), random_values(rng, bsmm.w_shape, np.float16)
    dense = reference.dense_weight(w, layout)
    with tf.device(device):
        expected = tf.matmul(tf.constant(x, tf.float32), tf.constant(dense, tf.float32))
        y = bsmm(x, w)
    assert_product_close(y, expected.numpy(), np.abs(x).astype(np.float64) @ np.abs(dense), bsmm.C)


def test_poison_works(device):
    """The check of unwritten outputs can fail: an op that writes nothing shows what was in memory."""
    for shape in ([64, 96], [300, 200]):
        helpers.poison(device, (shape, np.float32))
        with tf.device(device):
            unwritten = tf.raw_ops.Empty(shape=shape, dtype=tf.float32, init=False).numpy()
        assert np.mean(np.isnan(unwritten) | (unwritten > 1e38)) > 0.9


def test_nan_and_infinity(device):
    """As in a dense product over the blocks that are present; a block whose gate is 0 is not read."""
    layout = np.array([[1, 1, 0], [0, 1, 0]])
    for axis, dtype in itertools.product((0, 1), DTYPES):
        bsmm = BlocksparseMatMul(layout, 16, axis)
        w = np.ones(bsmm.w_shape, dtype)
        w[1] = np.nan
        w[2, 0, 0] = np.inf
        x = np.ones(bsmm.i_shape(3), dtype)
        with tf.device(device):
            y = np.asarray(bsmm(x, w), np.float32)
            gated = np.asarray(bsmm(x, w, np.array([1, 0, 1], np.float32)), np.float32)
        y, gated = (y, gated) if axis else (y.T, gated.T)
        assert np.array_equal(y[:, :16], np.full((3, 16), 16)) and np.isnan(y[:, 16:32]).all() and not y[:, 32:].any()
        assert np.isinf(gated[:, 16]).all() and np.array_equal(gated[:, 17:32], np.full((3, 15), 16))


def test_same_bits(device, rng):
    layout = random_layout(rng, 12, 10, 0.4)
    layout[:, 2] = True
    for axis, dtype in itertools.product((0, 1), DTYPES):
        bsmm = BlocksparseMatMul(layout, 32, axis)
        x, w = random_values(rng, bsmm.i_shape(777), dtype), random_values(rng, bsmm.w_shape, dtype)
        gate = random_gate(rng, bsmm.blocks)

        def results(bsmm=bsmm, x=x, w=w, gate=gate):
            with tf.device(device):
                with tf.GradientTape() as tape:
                    operands = [tf.constant(x), tf.constant(w), tf.constant(gate)]
                    tape.watch(operands)
                    y = bsmm(*operands, gate_grad=True)
                return [t.numpy().tobytes() for t in (y, *tape.gradient(y, operands, y))]

        first = results()
        for _ in range(5):
            assert results() == first


# ------------------------------------------------------------------------------------------------------- derivatives


@pytest.mark.parametrize("axis", [0, 1])
def test_finite_differences(device, rng, axis):
    """Each product is linear in each operand, so that a difference over 0.5 is exact but for rounding."""
    layout = np.array([[1, 0, 1], [1, 1, 0]])
    bsmm = BlocksparseMatMul(layout, 8, axis)
    x, w = random_values(rng, bsmm.i_shape(3), np.float32), random_values(rng, bsmm.w_shape, np.float32)
    gate = rng.standard_normal(bsmm.blocks).astype(np.float32)
    before = tf.config.experimental.tensor_float_32_execution_enabled()
    tf.config.experimental.enable_tensor_float_32_execution(False)
    with tf.device(device):
        functions = [
            (lambda x, w, g: bsmm(x, w, g, gate_grad=True), (x, w, gate)),
            (lambda x, dy: bsmm.weight_grad([x], [dy]), (x, random_values(rng, bsmm.o_shape(3), np.float32))),
        ]
        for function, arguments in functions:
            arguments = [tf.constant(a) for a in arguments]
            theory, numeric = tf.test.compute_gradient(function, arguments, delta=0.5)
            for a, b in zip(theory, numeric):
                np.testing.assert_allclose(a, b, atol=2e-5)
    tf.config.experimental.enable_tensor_float_32_execution(before)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("axis", [0, 1])
def test_derivatives_to_third_order(device, rng, axis, gated):
    """Of a function in which x, W and the gate meet nonlinearly, against a dense one in float64."""
    layout = np.array([[1, 0, 1, 0], [1, 1, 0, 0], [0, 1, 1, 0]])
    bsmm = BlocksparseMatMul(layout, 8, axis)
    operands = [random_values(rng, bsmm.i_shape(5), np.float32), 0.3 * rng.standard_normal(bsmm.w_shape)]
    operands += [rng.standard_normal(bsmm.blocks)] if gated else []

    def sparse(x, w, *gate):
        return bsmm(x, w, *gate, gate_grad=gated)

    def dense(x, w, *gate):
        wd = helpers.dense(bsmm, w * gate[0][:, None, None] if gate else w)
        return tf.matmul(x, wd) if axis else tf.matmul(wd, x, transpose_a=True)

    def derivatives(product, dtype):
        variables = [tf.constant(a, dtype) for a in operands]
        with tf.GradientTape() as third:
            third.watch(variables)
            with tf.GradientTape() as second:
                second.watch(variables)
                with tf.GradientTape() as first:
                    first.watch(variables)
                    loss = tf.reduce_mean(tf.sin(product(*variables)))
                g1 = first.gradient(loss, variables)
                norm = tf.add_n([tf.reduce_sum(g**2) for g in g1])
            g2 = second.gradient(norm, variables)
            norm = tf.add_n([tf.reduce_sum(g**2) for g in g2])
        return g1 + g2 + third.gradient(norm, variables)

    before = tf.config.experimental.tensor_float_32_execution_enabled()
    tf.config.experimental.enable_tensor_float_32_execution(False)
    with tf.device(device):
        ours = derivatives(sparse, tf.float32)
    tf.config.experimental.enable_tensor_float_32_execution(before)
    with tf.device("/CPU:0"):
        expected = derivatives(dense, tf.float64)
    for a, b in zip(ours, expected, strict=True):
        assert np.linalg.norm(a.numpy() - b.numpy()) <= 1e-5 * np.linalg.norm(b)  # some ten float32 products in a row


@pytest.mark.parametrize("dtype", [np.float16, bfloat16], ids=["float16", "bfloat16"])
def test_second_order_in_16_bits(device, rng, dtype):
    """The gradient of <v, dW> is the other two products, also where dW is float32: rounded once."""
    layout = random_layout(rng, 3, 4, 0.6)
    for axis, dw_dtype, dw_gated in itertools.product((0, 1), (dtype, np.float32), (False, True)):
        bsmm = BlocksparseMatMul(layout, 16, axis)
        x, dy = random_values(rng, bsmm.i_shape(9), dtype), random_values(rng, bsmm.o_shape(9), dtype)
        v = random_values(rng, bsmm.w_shape, dw_dtype)
        gate = random_gate(rng, bsmm.blocks)
        present = (gate != 0).astype(np.float32) if dw_gated else None
        before = tf.config.experimental.tensor_float_32_execution_enabled()
        tf.config.experimental.enable_tensor_float_32_execution(False)
        with tf.device(device):
            with tf.GradientTape() as tape:
                operands = [tf.constant(x), tf.constant(dy)]
                tape.watch(operands)
                dw = bsmm.weight_grad(*operands, gate, dw_gated, dw_dtype)
            dx, ddy = tape.gradient(dw, operands, tf.constant(v))
        tf.config.experimental.enable_tensor_float_32_execution(before)
        size = lambda a: np.abs(a.astype(np.float64))  # noqa: E731
        common = (layout, 16, axis, present)
        assert_product_close(
            dx, reference.matmul_dx(dy, v, *common), reference.matmul_dx(size(dy), size(v), *common), bsmm.K
        )
        assert_product_close(ddy, reference.matmul(x, v, *common), reference.matmul(size(x), size(v), *common), bsmm.C)


def test_gradients_not_asked_for_cost_nothing(device, rng, monkeypatch):
    launched = []
    for name in ("blocksparse_matmul_dx", "blocksparse_matmul_dw"):
        op = getattr(_gradients._ops, name)
        monkeypatch.setattr(
            _gradients._ops, name, lambda *a, _op=op, _as=name, **k: launched.append(_as) or _op(*a, **k)
        )
    bsmm = BlocksparseMatMul(np.eye(3), 8, 1)
    x, w = random_values(rng, (5, 24), np.float32), random_values(rng, bsmm.w_shape, np.float32)
    with tf.device(device):
        for wanted, expected in ((0, "blocksparse_matmul_dx"), (1, "blocksparse_matmul_dw")):
            operands = [tf.constant(x), tf.constant(w)]

            def gradient(*operands, wanted=wanted):
                with tf.GradientTape() as tape:
                    tape.watch(operands[wanted])
                    y = bsmm(*operands)
                return tape.gradient(y, operands[wanted])

            gradient(*operands)
            assert launched == [expected]
            launched.clear()
            tf.function(gradient)(*operands)
            assert launched == [expected]
            launched.clear()


# ---------------------------------------------------------------------------------------------- several pairs, rounding


@pytest.mark.parametrize("axis", [0, 1])
def test_weight_grad_sums_pairs_of_any_batch(device, rng, axis):
    layout = random_layout(rng, 4, 3, 0.5)
    bsmm = BlocksparseMatMul(layout, 16, axis)
    for dtype, dw_dtype in itertools.product(DTYPES, DTYPES):
        batches = [(7,), (2, 3), (0,), (1,), (64,)]
        xs = [activations(bsmm, rng, batch, bsmm.C, dtype) for batch in batches]
        dys = [activations(bsmm, rng, batch, bsmm.K, dtype) for batch in batches]
        w, gate = random_values(rng, bsmm.w_shape, dtype), random_gate(rng, bsmm.blocks)
        size = lambda arrays: [np.abs(a.astype(np.float64)) for a in arrays]  # noqa: E731
        tf32 = dtype == np.float32 and device != "/CPU:0"
        with tf.device(device):
            helpers.poison(device, (bsmm.w_shape, dw_dtype))
            dw = bsmm.weight_grad(xs, dys, dw_dtype=dw_dtype)
            dw_selected = bsmm.weight_grad(xs, dys, gate, dw_gated=True, dw_dtype=dw_dtype)
            dw_gated, dgate = bsmm.weight_grad(xs, dys, gate, W=w, gate_grad=True, dw_dtype=dw_dtype)
        helpers.assert_on(device, dw, dw_selected, dw_gated, dgate)
        expected = reference.matmul_dw(xs, dys, layout, 16, axis)
        magnitude = reference.matmul_dw(size(xs), size(dys), layout, 16, axis)
        assert_product_close(dw, expected, magnitude, 78, tf32)
        selected = (gate != 0)[:, None, None]
        assert_product_close(dw_selected, expected * selected, magnitude * selected, 78, tf32)
        factor = gate.astype(np.float64)[:, None, None]
        assert_product_close(dw_gated, expected * factor, magnitude * np.abs(factor), 78, tf32)
        w = w.astype(np.float64)
        sums = (expected * w).sum((1, 2)), (magnitude * np.abs(w)).sum((1, 2))
        assert_product_close(dgate, *sums, 78 * 16 * 16, tf32)


def test_many_steps_round_once(device, rng):
    """32 time steps in float16 that mostly cancel: one launch gives the float64 sum to one rounding."""
    layout = random_layout(rng, 3, 3, 0.7)
    bsmm = BlocksparseMatMul(layout, 32, 0)
    xs = [random_values(rng, bsmm.i_shape(64), np.float16) for _ in range(32)]
    dys = [random_values(rng, bsmm.o_shape(64), np.float16) for _ in range(32)]
    with tf.device(device):
        dw = bsmm.weight_grad(xs, dys)
    size = lambda arrays: [np.abs(a.astype(np.float64)) for a in arrays]  # noqa: E731
    expected = reference.matmul_dw(xs, dys, layout, 32, 0)
    assert_product_close(dw, expected, reference.matmul_dw(size(xs), size(dys), layout, 32, 0), 64 * 32)
    # What rounding every step would give is far outside of that.
    steps = np.sum([helpers.round_to(reference.matmul_dw(x, d, layout, 32, 0), np.float16) for x, d in zip(xs, dys)], 0)
    with pytest.raises(AssertionError, match="are wrong"):
        assert_product_close(steps.astype(np.float16), expected, np.abs(expected), 1)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: np.dtype(dtype).name)
def test_accumulating_weight_gradient(device, rng, dtype):
    """The op that adds to an earlier sum, and its derivative."""
    layout = random_layout(rng, 3, 4, 0.5)
    bsmm = BlocksparseMatMul(layout, 16, 1)
    x, dy = random_values(rng, (21, bsmm.C), dtype), random_values(rng, (21, bsmm.K), dtype)
    earlier = rng.standard_normal(bsmm.w_shape).astype(np.float32)
    op = bsmm_ops().blocksparse_matmul_dwa
    attrs = dict(axis=1, bsize=16, C=bsmm.C, K=bsmm.K, dw_dtype=dtype, tf32=False)
    with tf.device(device):
        with tf.GradientTape() as tape:
            dwi = tf.constant(earlier)
            tape.watch(dwi)
            dw = op([x], [dy], bsmm._table(True), [], dwi, **attrs)
        assert tape.gradient(dw, dwi, tf.cast(earlier, dtype)).numpy().tolist() == earlier.astype(dtype).tolist()
    expected = reference.matmul_dw(x, dy, layout, 16, 1) + earlier
    size = lambda a: np.abs(a.astype(np.float64))  # noqa: E731
    assert_product_close(dw, expected, reference.matmul_dw(size(x), size(dy), layout, 16, 1) + size(earlier), 22)


def test_dw_dtype(device, rng):
    bsmm = BlocksparseMatMul(np.ones((2, 2)), 8, 1)
    for dtype, dw_dtype in itertools.product(DTYPES, (None, *DTYPES)):
        x, w = random_values(rng, (5, 16), dtype), random_values(rng, bsmm.w_shape, dtype)
        with tf.device(device):
            with tf.GradientTape() as tape:
                w = tf.constant(w)
                tape.watch(w)
                y = bsmm(x, w, dw_dtype=dw_dtype)
            dw = tape.gradient(y, w)
        assert dw.dtype == tf.as_dtype(dw_dtype or dtype)
        ones = np.ones((5, 16), dtype)
        expected = reference.matmul_dw(x, ones, np.ones((2, 2)), 8, 1)
        magnitude = reference.matmul_dw(np.abs(x.astype(np.float64)), ones, np.ones((2, 2)), 8, 1)
        assert_product_close(dw, expected, magnitude, 5, tf32=dtype == np.float32 and device != "/CPU:0")


# ------------------------------------------------------------------------------------------------------ normalization


@pytest.mark.parametrize("bsize", [8, 64])
@pytest.mark.parametrize("gain", [False, True])
def test_l2_normalize(device, rng, bsize, gain):
    layout = random_layout(rng, 4, 5, 0.4)
    layout[:, 2] = False
    bsmm = BlocksparseMatMul(layout, bsize, 0)
    gain = rng.standard_normal(bsmm.K).astype(np.float32) if gain else None
    for dtype, out in itertools.product(DTYPES, DTYPES):
        w, dy = random_values(rng, bsmm.w_shape, dtype), random_values(rng, bsmm.w_shape, out)
        w[:, :, 1] = 0  # a feature of norm 0, below epsilon
        operands = [tf.constant(w)] + ([] if gain is None else [tf.constant(gain)])
        with tf.device(device):
            with tf.GradientTape() as tape:
                tape.watch(operands)
                y = bsmm.l2_normalize(*operands, dtype=out)
            dw, *dgain = tape.gradient(y, operands, tf.constant(dy))
        helpers.assert_on(device, y, dw)
        expected, _ = reference.l2_normalize(w, layout, gain)
        assert_product_close(y, expected, np.abs(expected), 16)
        expected, expected_dgain = reference.l2_normalize_grad(w, dy, layout, gain)
        close = dict(rtol=2e-5 if dtype == np.float32 else 2e-2, atol=2e-5 if dtype == np.float32 else 2e-2)
        np.testing.assert_allclose(np.asarray(dw, np.float64), helpers.round_to(expected, dtype).astype(float), **close)
        if gain is not None:
            np.testing.assert_allclose(dgain[0], expected_dgain, rtol=1e-5, atol=1e-5)


def test_l2_normalize_at_epsilon_and_second_order(device, rng):
    layout = np.array([[1, 0], [1, 1]])
    bsmm = BlocksparseMatMul(layout, 8, 1)
    # At S equal to epsilon the norm counts; next below it does not.
    w = np.zeros(bsmm.w_shape, np.float32)
    w[0, 0, :] = 0.5
    dy = random_values(rng, bsmm.w_shape, np.float32)
    for epsilon in (0.25, np.nextafter(np.float32(0.25), np.float32(1))):
        with tf.device(device):
            with tf.GradientTape() as tape:
                variable = tf.constant(w)
                tape.watch(variable)
                y = bsmm.l2_normalize(variable, epsilon=float(epsilon))
            dw = tape.gradient(y, variable, tf.constant(dy))
        expected, _ = reference.l2_normalize_grad(w, dy, layout, epsilon=float(epsilon))
        np.testing.assert_allclose(dw, expected, rtol=1e-5, atol=1e-6)

    w = random_values(rng, bsmm.w_shape, np.float32)

    def second(normalize, dtype):
        variable = tf.constant(w, dtype)
        with tf.GradientTape() as outer:
            outer.watch(variable)
            with tf.GradientTape() as inner:
                inner.watch(variable)
                loss = tf.reduce_sum(normalize(variable) * tf.cast(dy, dtype))
            norm = tf.reduce_sum(inner.gradient(loss, variable) ** 2)
        return outer.gradient(norm, variable)

    def dense(w):
        c, k = bsmm.updat_lut.T
        sums = tf.math.unsorted_segment_sum(tf.reduce_sum(w**2, 1), k, bsmm.KB)
        return w / tf.sqrt(tf.gather(sums, k))[:, None]

    with tf.device(device):
        ours = second(bsmm.l2_normalize, tf.float32)
    with tf.device("/CPU:0"):
        expected = second(dense, tf.float64)
    assert np.linalg.norm(ours.numpy() - expected.numpy()) <= 1e-5 * np.linalg.norm(expected)


# ------------------------------------------------------------------------------------------- the object, weights, prune


def test_attributes():
    layout = np.array([[1, 0, 1, 1], [1, 1, 0, 1], [0, 1, 0, 1], [0, 0, 0, 1]])
    bsmm = BlocksparseMatMul(layout, 8, 0, name="fc")
    assert (bsmm.axis, bsmm.bsize, bsmm.z_order, bsmm.name, bsmm.count) == (0, 8, True, "fc", 0)
    assert (bsmm.CB, bsmm.KB, bsmm.C, bsmm.K, bsmm.blocks) == (4, 4, 32, 32, 9)
    assert (bsmm.sparsity, bsmm.flops, bsmm.w_shape, bsmm.g_shape) == (0.562, 1152, (9, 8, 8), (9,))
    assert bsmm.updat_list == [(0, 0), (1, 0), (1, 1), (2, 1), (0, 2), (0, 3), (1, 3), (2, 3), (3, 3)]
    assert [bsmm.block_coord(i) for i in range(9)] == bsmm.updat_list
    assert bsmm.fprop_list[0] == (0, [(0, 0), (1, 1)]) and bsmm.bprop_list[3] == (3, [(3, 8)])
    assert bsmm.updat_lut.dtype == np.int32 and bsmm.updat_lut.tolist() == [list(block) for block in bsmm.updat_list]
    assert bsmm.fprop_lut[:8].tolist() == [8, 2, 0, 0, 10, 2, 1, 0] and bsmm.l2_lut.size == 26
    assert (bsmm.fprop_segments, bsmm.bprop_segments, bsmm.fprop_locks, bsmm.bprop_locks) == (4, 4, 0, 0)
    assert (bsmm.fprop_shared, bsmm.bprop_shared, bsmm.l2_shared) == (32, 24, 16)
    assert bsmm.i_shape(3) == (32, 3) and BlocksparseMatMul(layout, 8, 1).o_shape(3) == (3, 32)
    assert "blocks=9" in repr(bsmm)
    with pytest.raises(AttributeError, match="no_such"):
        bsmm.no_such  # noqa: B018


def test_layout_is_the_objects_own():
    a, b = BlocksparseMatMul(np.eye(3), 8), BlocksparseMatMul(np.eye(3), 8)
    a.layout[0, 0] = False
    assert b.layout[0, 0] and a.blocks == 3


@pytest.mark.parametrize("state", ["new", "old"])
def test_pickle(rng, state):
    layout = random_layout(rng, 5, 4, 0.5)
    bsmm = BlocksparseMatMul(layout, 16, 1, z_order=False, name="fc")
    if state == "old":  # what the original package pickled
        copy = BlocksparseMatMul.__new__(BlocksparseMatMul)
        copy.__setstate__((layout, 16, 1, False, "fc"))
    else:
        copy = pickle.loads(pickle.dumps(bsmm))
    assert copy.updat_list == bsmm.updat_list and np.array_equal(copy.layout, layout)
    assert (copy.bsize, copy.axis, copy.z_order, copy.name) == (16, 1, False, "fc")


def test_prune(rng, capsys):
    layout = random_layout(rng, 4, 5, 0.7)
    bsmm = BlocksparseMatMul(layout, 8, 1)
    w = random_values(rng, bsmm.w_shape, np.float32)
    gate = np.ones(bsmm.blocks, np.float32)
    same, ones = bsmm.prune(w, gate)
    assert same is w and ones.tolist() == gate.tolist()
    gate[::2] = 0
    kept, ones = bsmm.prune(w, gate)
    assert capsys.readouterr().out.splitlines()[1] == (f"prune:  {bsmm.blocks} {len(kept)} {100 * len(kept) / 20:.1f}%")
    assert ones.dtype == np.float32 and ones.shape == (len(kept),) and ones.all()
    smaller = BlocksparseMatMul(bsmm.layout, 8, 1)
    x = random_values(rng, (3, bsmm.C), np.float32)
    assert smaller.w_shape == kept.shape
    with tf.device("/CPU:0"):  # where a block that is skipped changes no order of summation
        assert np.array_equal(smaller(x, kept), bsmm(x, w, gate))


@pytest.mark.parametrize("shape", [(3, 3), (2, 5), (5, 2), (4, 2)])
def test_identity_init(rng, shape):
    layout = random_layout(rng, *shape, 0.6)
    for z_order, bsize in ((True, 8), (False, 32)):
        bsmm = BlocksparseMatMul(layout, bsize, z_order=z_order)
        w = bsmm.identity_init(scale=0.5, gpu=True)(bsmm.w_shape)
        assert w.dtype == tf.float32 and np.array_equal(w, reference.identity(layout, bsize, 0.5, z_order))
    assert bsmm.identity_init()(bsmm.w_shape, tf.float16).dtype == tf.float16
    with pytest.raises(ValueError, match="shape must be"):
        bsmm.identity_init()((1, 2, 3))


@pytest.mark.parametrize("shape,density", [((4, 3), 0.5), ((1, 4), 0.5), ((3, 4), 1.0), ((4, 3), 1.0)])
def test_ortho_init(rng, capsys, shape, density):
    layout = random_layout(rng, *shape, density)
    if density < 1:
        layout[0, 0] = False
        layout[-1, -1] = True
    bsmm = BlocksparseMatMul(layout, 16, name="fc")
    w = bsmm.ortho_init()(None)
    assert w.dtype == np.float32 and w.shape == bsmm.w_shape
    assert reference.orthonormality_error(w, layout) < 1e-5
    kind = "dense" if density == 1 else f"sparsity({bsmm.sparsity:.2f})"
    assert capsys.readouterr().out.strip() == f"fc ortho_init {kind}"
    assert bsmm.ortho_init()(bsmm.w_shape, tf.float16).dtype == np.float16


def test_initializers_of_v1_variables(rng):
    layout = random_layout(rng, 3, 4, 0.5)
    layout[0, 0], layout[1, 1] = False, True
    bsmm = BlocksparseMatMul(layout, 8)
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        variables = [
            tf.compat.v1.get_variable("identity", bsmm.w_shape, initializer=bsmm.identity_init()),
            tf.compat.v1.get_variable("ortho", bsmm.w_shape, initializer=bsmm.ortho_init()),
            tf.compat.v1.get_variable("gate", bsmm.g_shape, initializer=bsmm.checker_init()),
        ]
        session.run(tf.compat.v1.global_variables_initializer())
        identity, ortho, gate = session.run(variables)
    assert np.array_equal(identity, reference.identity(layout, 8))
    assert reference.orthonormality_error(ortho, layout) < 1e-5
    assert np.array_equal(gate, reference.checker(layout))


def test_forward_mode(device, rng):
    bsmm = BlocksparseMatMul(random_layout(rng, 3, 4, 0.5), 8, 1)
    x, w = random_values(rng, (5, 24), np.float32), random_values(rng, bsmm.w_shape, np.float32)
    tangent = random_values(rng, (5, 24), np.float32)
    with tf.device(device):
        x, tangent = tf.constant(x), tf.constant(tangent)
        with tf.autodiff.ForwardAccumulator(x, tangent) as accumulator:
            y = bsmm(x, w)
        assert np.array_equal(accumulator.jvp(y), bsmm(tangent, w))


def test_checker_init(rng):
    layout = random_layout(rng, 4, 5, 0.6)
    bsmm = BlocksparseMatMul(layout, 8)
    assert np.array_equal(bsmm.checker_init()(bsmm.g_shape), reference.checker(layout))


@pytest.mark.parametrize("axis", [0, 1])
def test_references(rng, axis):
    """The object's own, by their documented names."""
    layout = random_layout(rng, 3, 4, 0.6)
    bsmm = BlocksparseMatMul(layout, 8, axis)
    x, e = rng.standard_normal(bsmm.i_shape(5)), rng.standard_normal(bsmm.o_shape(5))
    w, gate = rng.standard_normal(bsmm.w_shape), rng.random(bsmm.blocks)
    wd = reference.dense_weight(w, layout, gate)
    y, dx = (x @ wd, e @ wd.T) if axis else (wd.T @ x, wd @ e)
    np.testing.assert_allclose(bsmm.fprop_test(x, w, gate), y)
    np.testing.assert_allclose(bsmm.bprop_test(e, w, gate), dx)
    dw = bsmm.updat_test(x, e)
    np.testing.assert_allclose(np.sum(dw * w * gate[:, None, None]), np.sum(y * e))
    np.testing.assert_allclose(bsmm.updat_test(x, e, gate, dw_gated=True), dw * gate[:, None, None])
    np.testing.assert_allclose(bsmm.updat_test(x, e, gate), dw)
    y = bsmm.l2_normalize_test(w)
    np.testing.assert_allclose((reference.dense_weight(y, layout) ** 2).sum(0)[np.any(wd, axis=0)], 1)
    u = rng.standard_normal(w.shape)
    expected, _ = reference.l2_normalize_grad(w, u, layout)
    assert bsmm.l2_normalize_grad_test(w, u) is u and np.array_equal(u, expected)


def test_largest_block():
    assert [largest_block(n) for n in (64, 48, 24)] == [(32, 2), (16, 3), (8, 3)]
    with pytest.raises(ValueError, match="dimension not multiple of 8, 16, or 32"):
        largest_block(12)


@pytest.mark.usefixtures("true_float32")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("batch, C, K", [((20011,), 32, 8), ((7, 3), 5, 12), ((0,), 4, 4), ((1,), 64, 8), ((3,), 0, 2)])
def test_dw_matmul_large_n(device, rng, dtype, batch, C, K):
    x, e = random_values(rng, (*batch, C), dtype), random_values(rng, (*batch, K), dtype)
    with tf.device(device):
        u = dw_matmul_large_n(x, e)
    wide = [v.astype(np.float64).reshape(int(np.prod(batch)), -1 if v.size else v.shape[-1]) for v in (x, e)]
    magnitude = np.abs(wide[0]).T @ np.abs(wide[1])
    assert_product_close(u.numpy(), wide[0].T @ wide[1], magnitude, np.prod(batch))
    with pytest.raises(ValueError, match="must have the same dimensions but for the last"):
        dw_matmul_large_n(x, e[None])
    with pytest.raises(ValueError, match="must both be float32, float16 or bfloat16, got .* and int32"):
        dw_matmul_large_n(x, e.astype(np.int32))


def test_calls_are_counted_and_legacy_arguments_accepted(rng):
    bsmm = BlocksparseMatMul(np.eye(2), 8, 1, name="fc")
    x, w = np.ones((2, 16), np.float32), np.ones(bsmm.w_shape, np.float32)
    bsmm(x, w)
    with tf.Graph().as_default():
        names = [
            bsmm(x, w, dw_dtype=tf.float32, bench=0).op.name,
            bsmm.matmul(x, w, name="mine").op.name,
            bsmm(x, w).op.name,
        ]
    assert names == ["fc_000001", "mine", "fc_000003"] and bsmm.count == 4


def test_bench_prints_and_is_right(device, rng, capfd):
    bsmm = BlocksparseMatMul(np.eye(2), 8, 1)
    x, w = random_values(rng, (3, 16), np.float32), random_values(rng, bsmm.w_shape, np.float32)
    with tf.device(device):
        y = bsmm(x, w, bench=2)
        plain = bsmm(x, w)
    assert np.array_equal(y, plain)
    assert "FPROP" in capfd.readouterr().out


def bsmm_ops():
    return _gradients._ops
