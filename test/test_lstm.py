"""The LSTM gates and cells on every device, in every mode, against reference.py."""

import functools

import numpy as np
import pytest
import tensorflow as tf
from helpers import DTYPES, assert_close, assert_on, check_derivatives, random_values, wide
from hypothesis import given, settings
from hypothesis import strategies as st

import blocksparse as bs
from blocksparse import lstm
from blocksparse import reference as ref

widths = st.one_of(st.sampled_from([0, 1, 3, 4, 8, 15, 16, 17, 32, 33, 100, 256]), st.integers(1, 150))
row_counts = st.one_of(st.sampled_from([0, 1, 2, 31, 33]), st.integers(1, 60))
seeds = st.integers(0, 2**32 - 1)
dtypes = st.sampled_from(DTYPES)
pytestmark = pytest.mark.usefixtures("on_device", "true_float32")


# ----------------------------------------------------------------------------------------------------------- gates


def case(rng, rows, width, dtype):
    """c, the four gates, the upstream gradients; the arguments of sigmoids lie between -12 and 12."""
    tensors = [random_values(rng, (rows, width), np.float32) * scale for scale in (1, 3, 3, 3, 3, 1, 1)]
    return [np.clip(x, -12, 12).astype(dtype) for x in tensors]


def check_gates(results, grads, c, gates, dc_next, dh_next, dtype, forget_bias):
    wide_gates = [wide(g) for g in gates]
    c_next, h_next = ref.lstm_gates(c, *wide_gates, forget_bias)
    expected = ref.lstm_gates_grad(dc_next, dh_next, c, *wide_gates, forget_bias)
    # What cancels: the terms of c_next, and in derivatives 1 - tanh^2 and s (1 - s), of terms of order 1. The rounding
    # of an argument x moves e^x by |x| units.
    size = 1 + np.abs(wide(c))
    assert_close(results[0], c_next, dtype, 8, size)
    assert_close(results[1], h_next, dtype, 8, np.minimum(size, 2))
    upstream = (np.abs(wide(dc_next)) + np.abs(wide(dh_next))) * size
    for actual, value in zip(grads, expected):
        assert_close(actual, value, dtype, 8, upstream)


@settings(max_examples=150)
@given(rows=row_counts, width=widths, dtype=dtypes, seed=seeds, forget_bias=st.sampled_from([0.0, 1.0, -0.7]))
def test_four_gates(device, rows, width, dtype, seed, forget_bias):
    rng = np.random.default_rng(seed)
    c, *gates, dc, dh = case(rng, rows, width, dtype)
    sources = [tf.constant(x) for x in (c, *gates)]
    with tf.GradientTape() as tape:
        tape.watch(sources)
        y = bs.fused_lstm_gates(*sources, forget_bias=forget_bias)
    grads = tape.gradient(y, sources, [tf.constant(dc), tf.constant(dh)])
    assert_on(device, *y, *grads)
    check_gates((y.c_next, y.h_next), grads, c, gates, dc, dh, dtype, forget_bias)


@settings(max_examples=200)
@given(rows=row_counts, width=widths, dtype=dtypes, seed=seeds, with_bias=st.booleans(), large=st.booleans())
def test_merged_gates(device, rows, width, dtype, seed, with_bias, large):
    rng = np.random.default_rng(seed)
    rows = rows * 13 if large else rows  # so that sums are cut
    c, *gates, dc, dh = case(rng, rows, width, dtype)
    h = np.concatenate(gates, 1)
    bias = [random_values(rng, 4 * width, np.float32)] if with_bias else []
    sources = [tf.constant(x) for x in (c, h, *bias)]
    with tf.GradientTape() as tape:
        tape.watch(sources)
        y = bs.fused_lstm_gates(*sources[:2], bias=sources[2] if bias else None)
    d_c, d_h, *d_bias = tape.gradient(y, sources, [tf.constant(dc), tf.constant(dh)])
    assert_on(device, *y, d_c, d_h, *d_bias)
    biased = [wide(g) + (bias[0][i * width : (i + 1) * width] if bias else 0) for i, g in enumerate(gates)]
    check_gates(y, [d_c, *np.split(d_h.numpy(), 4, 1)], c, biased, dc, dh, dtype, 1.0)
    if bias:
        expected = np.concatenate(ref.lstm_gates_grad(dc, dh, c, *biased)[1:], 1)
        upstream = np.tile((np.abs(wide(dc)) + np.abs(wide(dh))) * (1 + np.abs(wide(c))), (1, 4))
        assert_close(d_bias[0], expected.sum(0), np.float32, max(16, rows**0.5) / 2, upstream.sum(0))


@pytest.mark.parametrize("dtype", DTYPES)
def test_large_and_small_arguments(device, dtype):
    """Saturated gates are exactly 0 or 1, small ones keep their relative accuracy, NaN comes through."""
    x = np.array([-300, -30, -1e-3, -1e-6, 0, 1e-6, 1e-3, 0.59, 0.61, 30, 300], dtype)
    one, zero = np.full_like(x, 100), np.zeros_like(x)
    c_next, h_next = bs.fused_lstm_gates(zero, one, x, zero, one)
    expected, h = ref.lstm_gates(zero, one, x, zero, one)
    assert_close(c_next, expected, dtype, 4)
    assert_close(h_next, np.tanh(expected), dtype, 8)
    assert np.array_equal(bs.fused_lstm_gates(x, -one, x, one, one).c_next, x)
    assert np.isnan(wide(bs.fused_lstm_gates(x, one, x * np.array(np.nan, dtype), zero, one).c_next)).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_missing_gradient_counts_as_zero(device, dtype, rng):
    c, *gates, dc, dh = case(rng, 7, 33, dtype)
    h, zero, none = np.concatenate(gates, 1), np.zeros_like(dc), []
    bias = random_values(rng, 132, np.float32)
    for given_dc, given_dh in ((dc, None), (None, dh), (None, None)):
        lists = [none if g is None else [g] for g in (given_dc, given_dh)]
        filled = [[zero if g is None else g] for g in (given_dc, given_dh)]
        for actual, expected in (
            (lstm.lstm_gates4_grad_op(c, *gates, *lists), lstm.lstm_gates4_grad_op(c, *gates, *filled)),
            (lstm.lstm_gates_grad_op(c, h, [bias], *lists), lstm.lstm_gates_grad_op(c, h, [bias], *filled)),
        ):
            for a, e in zip(tf.nest.flatten(actual), tf.nest.flatten(expected)):
                assert np.array_equal(a, e)


@pytest.mark.parametrize("output", [0, 1])
def test_graphs_pass_no_zeros(output):
    """An output that is not used costs the gradient nothing: no zeros are made for it, nor read."""

    def gradient_op(graph):
        (op,) = [op for op in graph.get_operations() if op.type == "LSTMGatesGrad"]
        return op.get_attr("nc"), op.get_attr("nh")

    for shape in ([3, 5], [None, 5], [300, 500]):
        with tf.Graph().as_default() as graph:
            c = tf.compat.v1.placeholder(tf.float32, shape)
            h = tf.compat.v1.placeholder(tf.float32, [shape[0], 4 * shape[1]])
            tf.gradients(bs.fused_lstm_gates(c, h)[output], [c, h])
            assert gradient_op(graph) == (1 - output, output)

        @tf.function
        def function(c, h):
            with tf.GradientTape() as tape:
                tape.watch(c)
                y = bs.fused_lstm_gates(c, h)[output]
            return tape.gradient(y, c)

        specs = tf.TensorSpec(shape), tf.TensorSpec([shape[0], 4 * shape[1]])
        assert gradient_op(function.get_concrete_function(*specs).graph) == (1 - output, output)


def test_repeats_bit_for_bit(device, rng):
    c, *gates, dc, dh = case(rng, 1000, 96, np.float32)
    h, bias = np.concatenate(gates, 1), random_values(rng, 384, np.float32)
    first = lstm.lstm_gates_grad_op(c, h, [bias], [dc], [dh])
    for _ in range(3):
        again = lstm.lstm_gates_grad_op(c, h, [bias], [dc], [dh])
        assert all(np.array_equal(a, b) for a, b in zip(tf.nest.flatten(first), tf.nest.flatten(again)))


def test_inputs_are_left_alone(device, rng):
    c, *gates, dc, dh = (tf.constant(x) for x in case(rng, 20, 40, np.float32))
    h = tf.concat(gates, 1)
    before = [x.numpy().copy() for x in (c, h, *gates)]
    bs.fused_lstm_gates(c, h)
    bs.fused_lstm_gates(c, *gates)
    tf.function(lambda: bs.fused_lstm_gates(c * 1.0, h * 1.0) + bs.fused_lstm_gates(c, *gates))()
    lstm.lstm_gates_grad_op(c, h, [], [dc], [dh])
    lstm.lstm_gates4_grad_op(c, *gates, [dc], [dh])
    assert all(np.array_equal(a, b) for a, b in zip(before, (c, h, *gates)))


def test_modes_agree(device, rng):
    c, *gates, _, _ = case(rng, 6, 10, np.float32)
    h, bias = np.concatenate(gates, 1), random_values(rng, 40, np.float32)

    def everything(c, h, bias):
        c, y = bs.fused_lstm_gates(c, h, bias=bias)
        c, y = bs.fused_lstm_gates(c, *bs.split4(h + bs.concat4(y, c, y, y)), forget_bias=0.5)
        return c + bs.sparse_relu(y)

    def with_gradients(c, h, bias):
        with tf.GradientTape() as tape:
            tape.watch([c, h, bias])
            y = everything(c, h, bias)
        return [y, *tape.gradient(y, [c, h, bias])]

    eager = with_gradients(*map(tf.constant, (c, h, bias)))
    signature = [tf.TensorSpec(shape, tf.float32) for shape in ([None, 10], [None, 40], [40])]
    traced = tf.function(with_gradients, input_signature=signature)(c, h, bias)
    anonymous = [tf.TensorSpec(None, tf.float32)] * 3
    unknown = tf.function(
        lambda c, h, bias: with_gradients(c, tf.ensure_shape(h, [None, 40]), bias), input_signature=anonymous
    )(c, h, bias)
    with tf.Graph().as_default(), tf.device(device):
        inputs = [tf.compat.v1.placeholder(tf.float32, shape) for shape in ([None, 10], [None, 40], [40])]
        y = everything(*inputs)
        outputs = [y, *tf.gradients(y, inputs)]
        with tf.compat.v1.Session() as session:
            graph = session.run(outputs, dict(zip(inputs, (c, h, bias))))
    for e, t, u, g in zip(eager, traced, unknown, graph):
        np.testing.assert_allclose(e, t, rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(e, u, rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(e, g, rtol=1e-6, atol=1e-6)


def test_any_number_of_rows_dimensions(device, rng):
    c, h = random_values(rng, (2, 3, 4, 5), np.float32), random_values(rng, (2, 3, 4, 20), np.float32)
    deep, flat = bs.fused_lstm_gates(c, h), bs.fused_lstm_gates(c.reshape(24, 5), h.reshape(24, 20))
    for a, b in zip(deep, flat):
        assert np.array_equal(np.reshape(a, (24, 5)), b)


def test_vectorized_map(device, rng):
    c, *gates, _, _ = (tf.constant(x.reshape(5, 4, 6)) for x in case(rng, 20, 6, np.float32))
    h, bias = tf.concat(gates, -1), tf.constant(random_values(rng, 24, np.float32))

    def gradients(c, h):
        return tf.concat(tf.gradients(bs.fused_lstm_gates(c, h, bias=bias)[1], [c, h, bias])[:2], -1)

    def bias_gradient(c, h):
        return tf.gradients(bs.fused_lstm_gates(c, h, bias=bias), bias)[0]

    for function, operands in (
        (lambda x: bs.fused_lstm_gates(x[0], x[1], bias=bias)[1], (c, h)),
        (lambda x: bs.fused_lstm_gates(*x)[0], (c, *gates)),
        (lambda x: bs.fused_lstm_gates(c[0], *x)[0], tuple(gates)),
        (lambda x: gradients(*x), (c, h)),
        (lambda x: bias_gradient(*x), (c, h)),
        (lambda x: tf.gradients(bs.fused_lstm_gates(*x), x[1])[0], (c, *gates)),
    ):
        mapped = tf.function(lambda x, f=function: tf.vectorized_map(f, x, fallback_to_while_loop=False))(operands)
        one = tf.function(function)
        expected = np.stack([one(tf.nest.map_structure(lambda t, k=k: t[k], operands)) for k in range(5)])
        np.testing.assert_allclose(mapped, expected, rtol=1e-6, atol=1e-6)
    with pytest.raises(ValueError, match="bias must be the same"):
        biases = tf.stack([bias] * 5)
        tf.function(
            lambda: tf.vectorized_map(
                lambda x: bs.fused_lstm_gates(x[0], x[1], bias=x[2])[1], (c, h, biases), fallback_to_while_loop=False
            )
        )()


@pytest.mark.parametrize("outputs", ["c", "h", "both"])
def test_derivatives(device, outputs, rng):
    def pick(y):
        return {"c": y[0], "h": y[1], "both": tf.concat(list(y), 1)}[outputs]

    c, *gates, _, _ = (x / 2 for x in case(rng, 2, 3, np.float32))
    bias = random_values(rng, 12, np.float32)
    check = functools.partial(check_derivatives, atol=5e-3)
    check(lambda c, h, b: pick(bs.fused_lstm_gates(c, h, bias=b)), c, np.concatenate(gates, 1), bias)
    check(lambda c, h: pick(bs.fused_lstm_gates(c, h)), c, np.concatenate(gates, 1))
    check(lambda *x: pick(bs.fused_lstm_gates(*x, forget_bias=0.0)), c, *gates)


@pytest.mark.parametrize("dtype", DTYPES)
def test_sparse_relu(device, dtype, rng):
    x, dy = random_values(rng, (4, 5, 33), dtype), random_values(rng, (4, 5, 33), dtype)
    source = tf.constant(x)
    for alpha in (1.0, 0.25, tf.constant(-0.5)):
        with tf.GradientTape() as tape:
            tape.watch(source)
            y = bs.sparse_relu(source, alpha)
        assert_close(y, lstm.sparse_relu_test(wide(x), alpha), dtype, 4, np.abs(wide(x)).max())
        assert np.array_equal(wide(tape.gradient(y, source, tf.constant(dy))), np.where(wide(y) > 0, wide(dy), 0))


X, H = np.ones((3, 4), np.float32), np.ones((3, 16), np.float32)

BAD = {
    "number of tensors": (lambda: bs.fused_lstm_gates(X, X, X), "either h or the four gates.*got 2"),
    "bias of four": (lambda: bs.fused_lstm_gates(X, X, X, X, X, bias=np.ones(16, np.float32)), "bias must be None"),
    "dtype": (lambda: bs.fused_lstm_gates(tf.ones([3, 4], tf.float64), H), "float64.*float32, float16 and bfloat16"),
    "mixed dtypes": (lambda: bs.fused_lstm_gates(X, H.astype(np.float16)), "one dtype.*float32.*float16"),
    "bias dtype": (lambda: bs.fused_lstm_gates(X, H, bias=np.ones(16, np.float16)), "float16.*must be float32"),
    "bias length": (lambda: bs.fused_lstm_gates(X, H, bias=np.ones(4, np.float32)), r"bias must have 4 \* 4.*\(4,\)"),
    "width of h": (lambda: bs.fused_lstm_gates(X, np.ones((3, 12), np.float32)), "four times as wide|equal"),
    "shape of a gate": (lambda: bs.fused_lstm_gates(X, X, X, X, X[:2]), "one shape|equal"),
    "scalar": (lambda: bs.fused_lstm_gates(1.0, H), "dimension|rank"),
    "xla": (
        lambda: tf.function(lambda: bs.fused_lstm_gates(X, H), jit_compile=True)(),
        "no XLA kernels",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_errors(device, name):
    call, message = BAD[name]
    with pytest.raises((ValueError, NotImplementedError, tf.errors.InvalidArgumentError), match=message):
        call()


# ----------------------------------------------------------------------------------------------------------- cells


def cell_reference(xs, kernel, bias, c, h, forget_bias=1.0):
    """`[batch, time, features]` through a cell, in float64: all h, the last c and h."""
    outputs = []
    for t in range(xs.shape[1]):
        gates = np.concatenate([xs[:, t], h], 1) @ kernel + bias
        c, h = ref.lstm_gates(c, *np.split(gates, 4, 1), forget_bias)
        outputs.append(h)
    return np.stack(outputs, 1), c, h


def derived_cell():
    """The fused cell over TensorFlow's own, as it is where TensorFlow runs on Keras 2."""
    module = pytest.importorskip("tensorflow.python.keras.layers.legacy_rnn.rnn_cell_impl")
    return type("FusedBasicLSTMCell", (lstm._FusedGates, module.BasicLSTMCell), {})


@pytest.fixture(params=["alone", "derived"])
def cell_class(request):
    return bs.FusedBasicLSTMCell if request.param == "alone" else derived_cell()


@pytest.mark.parametrize("state_is_tuple", [True, False])
def test_cell_in_dynamic_rnn(cell_class, state_is_tuple, rng):
    xs = random_values(rng, (3, 5, 4), np.float32)
    with tf.Graph().as_default():
        cell = cell_class(6, forget_bias=0.5, state_is_tuple=state_is_tuple)
        assert cell.output_size == 6 and tf.nest.flatten(cell.state_size) == ([6, 6] if state_is_tuple else [12])
        inputs = tf.compat.v1.placeholder(tf.float32, [None, 5, 4])
        state = cell.zero_state(3, tf.float32)
        outputs, final = tf.compat.v1.nn.dynamic_rnn(cell, inputs, initial_state=state)
        variables = tf.compat.v1.trainable_variables()
        assert [v.name.split("/")[-1] for v in variables] == ["kernel:0", "bias:0"]
        assert [v.shape.as_list() for v in variables] == [[10, 24], [24]]
        grads = tf.gradients(outputs, [inputs, *variables])
        with tf.compat.v1.Session() as session:
            session.run(tf.compat.v1.global_variables_initializer())
            session.run(variables[1].assign(random_values(rng, 24, np.float32)))
            kernel, bias = session.run(variables)
            y, final, grads = session.run([outputs, final, grads], {inputs: xs})
    expected, c, h = cell_reference(xs, kernel, bias, np.zeros((3, 6)), np.zeros((3, 6)), 0.5)
    np.testing.assert_allclose(y, expected, atol=1e-6)
    np.testing.assert_allclose(np.concatenate(final, 1) if state_is_tuple else final, np.hstack([c, h]), atol=1e-6)
    step = random_values(rng, kernel.shape, np.float32) * 1e-3
    moved = [cell_reference(xs, kernel + s * step, bias, np.zeros((3, 6)), np.zeros((3, 6)), 0.5)[0] for s in (1, -1)]
    np.testing.assert_allclose((grads[1] * step).sum(), (moved[0] - moved[1]).sum() / 2, rtol=1e-3, atol=1e-6)


def test_cells_name_and_share_variables(cell_class):
    with tf.Graph().as_default():
        x, y = tf.ones([2, 3]), tf.ones([2, 3])
        for name, reuse in (("a", None), ("a", True), (None, None), (None, None)):
            cell = cell_class(4, name=name, reuse=reuse)
            h, state = cell(x, cell.get_initial_state(inputs=y))
            assert h.shape == [2, 4] and state.c.shape == [2, 4]
        assert len(tf.compat.v1.global_variables()) == 6
        with tf.compat.v1.Session() as session:
            session.run(tf.compat.v1.global_variables_initializer())
            assert np.isfinite(session.run(h)).all()


@pytest.mark.parametrize("dtype", [tf.float16, tf.bfloat16])
def test_cell_of_16_bits(dtype):
    cell = bs.FusedBasicLSTMCell(8)
    h, state = cell(tf.ones([2, 3], dtype), cell.zero_state(2, dtype))
    assert h.dtype == state.c.dtype == dtype and [v.dtype for v in cell.variables] == [tf.float32, dtype]


def test_cell_eagerly_and_in_a_function(rng):
    cell = bs.FusedBasicLSTMCell(6)
    xs = random_values(rng, (3, 5, 4), np.float32)

    @tf.function
    def run(xs):
        state, outputs = cell.get_initial_state(batch_size=3, dtype=tf.float32), []
        for x in tf.unstack(xs, axis=1):
            h, state = cell(x, state)
            outputs.append(h)
        return tf.stack(outputs, 1)

    traced = run(xs)
    assert len(cell.trainable_variables) == 2
    np.testing.assert_allclose(run.python_function(tf.constant(xs)), traced, atol=1e-6)
    kernel = next(v for v in cell.variables if v.shape.rank == 2)
    expected = cell_reference(xs, kernel.numpy(), np.zeros(24), np.zeros((3, 6)), np.zeros((3, 6)))[0]
    np.testing.assert_allclose(traced, expected, atol=1e-6)


def test_errors_of_cells():
    with pytest.raises(ValueError, match="activation must be tanh"):
        bs.FusedBasicLSTMCell(4, activation=tf.nn.relu)
    with pytest.raises(ValueError, match=r"\[batch, features\]"):
        bs.FusedBasicLSTMCell(4)(tf.ones([1, 2, 3]), None)
    with pytest.raises(ValueError, match="batch_size"):
        bs.FusedBasicLSTMCell(4).get_initial_state()


@pytest.mark.parametrize("unroll", [False, True])
def test_keras_cell(unroll, tmp_path, rng):
    import keras

    from blocksparse.layers import FusedLSTMCell

    xs, y = random_values(rng, (8, 5, 4), np.float32), random_values(rng, (8, 5, 6), np.float32)
    cell = FusedLSTMCell(6, forget_bias=0.5, bias_initializer="random_normal")
    model = keras.Sequential([keras.layers.RNN(cell, return_sequences=True, unroll=unroll, input_shape=(5, 4))])
    kernel, recurrent, bias = (w.numpy() for w in cell.weights)
    zero = np.zeros((8, 6))
    expected = cell_reference(xs, np.concatenate([kernel, recurrent]), bias, zero, zero, 0.5)[0]
    np.testing.assert_allclose(model(xs), expected, atol=1e-6)
    model.compile("adam", "mse")
    before = model.evaluate(xs, y, verbose=0)
    model.fit(xs, y, epochs=30, verbose=0)
    assert model.evaluate(xs, y, verbose=0) < before
    model.save(tmp_path / "model.keras")
    again = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_allclose(again(xs), model(xs), atol=1e-6)


def test_keras_cell_is_keras_own_but_for_the_order_of_gates(rng):
    import keras

    from blocksparse.layers import FusedLSTMCell

    xs = random_values(rng, (3, 7, 4), np.float32)
    ours, theirs = keras.layers.RNN(FusedLSTMCell(5, forget_bias=0.0)), keras.layers.LSTM(5)
    ours(xs), theirs(xs)
    for mine, other in zip(ours.cell.weights, theirs.cell.weights):
        i, f, c, o = np.split(other.numpy(), 4, -1)
        mine.assign(np.concatenate([i, c, f, o], -1))
    np.testing.assert_allclose(ours(xs), theirs(xs), atol=1e-5)


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_keras_cell_of_mixed_precision(policy, rng):
    import keras

    from blocksparse.layers import FusedLSTMCell

    xs = random_values(rng, (3, 7, 4), np.float32)
    layer = keras.layers.RNN(FusedLSTMCell(5, dtype=policy), dtype=policy)
    y = layer(xs)
    assert y.dtype == policy[6:] and all(w.dtype == "float32" for w in layer.weights)
    assert np.isfinite(wide(y)).all()


# ------------------------------------------------------------------------------------ recurrence, grouped gradients


def grouped_reference(xs, kernel, bias, gain, c, h):
    outputs = []
    for t in range(xs.shape[1]):
        gates = np.concatenate([xs[:, t], h], 1) @ kernel
        if gain is None:
            gates = gates + bias
        else:
            parts = np.stack(np.split(gates, 4, 1))
            parts = (parts - parts.mean(-1, keepdims=True)) / np.sqrt(parts.var(-1, keepdims=True) + 1e-6)
            gates = np.concatenate(list(parts), 1) * gain + bias
        c, h = ref.lstm_gates(c, *np.split(gates, 4, 1))
        outputs.append(h)
    return np.stack(outputs, 1), c, h


@pytest.mark.parametrize("dtype", [np.dtype(np.float32), np.dtype(np.float16)])
@pytest.mark.parametrize("group_size", [None, 1, 2])
@pytest.mark.parametrize("layernorm", [False, True])
def test_grouped_lstm_in_a_v1_graph(layernorm, group_size, dtype, rng):
    xs, state = random_values(rng, (2, 5, 3), dtype), random_values(rng, (2, 2, 4), dtype)
    with tf.Graph().as_default():
        inputs, c, h = tf.constant(xs), *tf.unstack(tf.constant(state))
        first, last = bs.grouped_lstm(inputs, 4, 5, (c, h), scope="lstm", layernorm=layernorm)
        again, _ = bs.grouped_lstm(
            first[:, :, :3], 4, 5, last, scope="lstm", reuse=True, lstm_id=1, layernorm=layernorm
        )
        params = tf.compat.v1.trainable_variables()
        assert [p.name for p in params] == [f"lstm/{n}:0" for n in ("kernel", "bias", "gain")[: 2 + layernorm]]
        loss = tf.reduce_sum(tf.cast(first, tf.float32) ** 2) + tf.reduce_sum(tf.cast(again, tf.float32))
        plain, grads = tf.gradients(loss, params), tf.gradients(loss, params)
        same = bs.group_lstm_grads(grads, params, scope="lstm", group_size=group_size)
        assert same is grads and grads[0] is not plain[0] and grads[0].dtype == plain[0].dtype == dtype
        products, ahead, seen = set(), [grads[0].op], set()
        while ahead:
            op = ahead.pop()
            if "group_lstm_grads" in op.name and op.name not in seen:
                seen.add(op.name)
                products |= {op.name} if op.type == "MatMul" else set()
                ahead += [x.op for x in op.inputs]
        assert len(products) == 2 * -(-5 // (group_size or 5))
        with tf.compat.v1.Session() as session:
            session.run(tf.compat.v1.global_variables_initializer())
            session.run(params[1].assign(random_values(rng, 16, np.float32)))
            values, y, final, expected, grouped = session.run([params, first, last, plain, grads])
    kernel, bias, *gain = map(wide, values)
    kernel = kernel.astype(dtype).astype(np.float64)
    y_ref, c_ref, h_ref = grouped_reference(wide(xs), kernel, bias, *(gain or [None]), *wide(state))
    tolerance = 1e-5 if dtype == np.float32 else 1e-2
    for actual, value in zip((y, *final), (y_ref, c_ref, h_ref)):
        np.testing.assert_allclose(wide(actual), value, atol=tolerance)
    for a, b in zip(grouped, expected):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance * np.abs(b).max())


@pytest.mark.parametrize("timesteps", [1, 3])
def test_grouped_lstm_in_a_function(timesteps, rng):
    xs, state = random_values(rng, (2, timesteps, 3), np.float32), tf.zeros([2, 4])
    variables = [tf.Variable(random_values(rng, shape, np.float32)) for shape in ((7, 16), 16)]
    variables[0] = tf.Variable(variables[0], name="grouped_lstm/kernel")

    @tf.function
    def run(xs, grouped):
        with tf.GradientTape() as tape:
            y, _ = bs.grouped_lstm(xs, 4, timesteps, (state, state), layernorm=False, variables=variables)
            loss = tf.reduce_sum(y**2)
        grads = tape.gradient(loss, variables)
        return y, *(bs.group_lstm_grads(grads, variables) if grouped else grads)

    for a, b in zip(run(xs, True), run(xs, False)):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    eager = bs.grouped_lstm(xs, 4, timesteps, (state, state), layernorm=False, variables=variables)[0]
    np.testing.assert_allclose(eager, run(xs, False)[0], atol=1e-6)


def test_errors_of_grouped_lstm(rng):
    xs, state = tf.ones([2, 3, 4]), (tf.zeros([2, 5]), tf.zeros([2, 5]))
    kernel = tf.Variable(tf.ones([9, 20]), name="grouped_lstm/kernel")
    for call, message in (
        (lambda: bs.grouped_lstm(xs, 5, 3, state), "variables in tf.compat.v1 graphs"),
        (lambda: bs.grouped_lstm(xs, 5, 4, state), "timesteps is 4"),
        (lambda: bs.grouped_lstm(xs, 5, 3, state, variables=[kernel]), "variables must be"),
        (lambda: bs.grouped_lstm(tf.cast(xs, tf.int32), 5, 3, state), "inputs has dtype int32"),
        (lambda: bs.group_lstm_grads([kernel], [kernel]), "needs a tensor of a graph"),
        (lambda: bs.group_lstm_grads([tf.ones(3)], [kernel]), "needs a tensor of a graph"),
        (lambda: bs.group_lstm_grads([tf.ones(3)], [kernel], group_size=0), "group_size must be at least 1"),
        (lambda: tf.function(lambda: bs.group_lstm_grads([kernel * 2.0], [kernel]))(), "no weight gradient"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    with pytest.raises(AssertionError, match="none of the parameters"):
        bs.group_lstm_grads([kernel], [tf.Variable(1.0)])
