"""Normalization: against the reference, in every mode, with every malformed operand."""

import helpers
import numpy as np
import pytest
import tensorflow as tf
from helpers import DTYPES, bfloat16
from hypothesis import given
from hypothesis import strategies as st
from norms_expected import BatchNorm, LayerNorm, check

from blocksparse import norms
from blocksparse import reference as ref
from blocksparse.norms import batch_norm, batch_norm_inference, layer_norm

tf1 = tf.compat.v1
f32 = np.float32


def rounder(dtype):
    return lambda x: np.asarray(x, np.float64).astype(f32).astype(dtype)


def layer_case(rng, shape, axis, dtype=f32, **options):
    return LayerNorm(rng, shape, axis, rounder(dtype), np.dtype(dtype).name, **options)


def batch_case(rng, shape, dtype=f32, **options):
    return BatchNorm(rng, shape, rounder(dtype), np.dtype(dtype).name, **options)


def gradients(function, operands, dy):
    """(result, its gradients for the operands where the result's gradient is dy)."""
    operands = [tf.constant(v) for v in operands]
    with tf.GradientTape() as tape:
        tape.watch(operands)
        y = function(*operands)
    return y, tape.gradient(y, operands, output_gradients=tf.constant(dy))


def check_layer(device, case):
    with tf.device(device):
        y, (dx, dg, db) = gradients(lambda *v: layer_norm(*v, **case.options), (case.x, case.g, case.b), case.dy)
    for value, dtype in ((y, case.x.dtype), (dx, case.x.dtype), (dg, f32), (db, f32)):
        assert value.dtype == dtype and device[1:] in value.device
    assert dg.shape == case.g.shape and db.shape == case.b.shape
    case.check_y(y)
    case.check_gradients(dx, dg, db)


@st.composite
def layer_problems(draw):
    shape = draw(st.lists(st.integers(1, 40), min_size=1, max_size=4))
    axis = draw(st.integers(-len(shape), len(shape) - 1))
    segments = draw(st.integers(1, 4))
    shape[axis] = segments * draw(st.sampled_from([1, 2, 3, 7, 8, 16, 31, 32, 33, 64, 100]))
    dtype, relu = draw(st.sampled_from(DTYPES)), draw(st.booleans())
    return (
        tuple(shape),
        axis,
        dtype,
        segments,
        relu,
        draw(st.sampled_from([1e-6, 1e-3])),
        draw(st.integers(0, 2**32 - 1)),
    )


@given(layer_problems())
def test_layer_norm(problem):
    shape, axis, dtype, segments, relu, epsilon, seed = problem
    for device in helpers.devices():
        rng = np.random.default_rng(seed)
        check_layer(device, layer_case(rng, shape, axis, dtype, segments=segments, relu=relu, epsilon=epsilon))


# The sizes of the original's test, with fewer rows where they are long, and both feature axes.
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize(
    ("n", "K"),
    [
        (4, 32),
        (4, 31),
        (4, 33),
        (64, 32),
        (64, 31),
        (64, 33),
        (100, 1024),
        (70, 896),
        (40, 4096),
        (33, 8188),
        (30, 8193),
    ],
)
def test_sizes_of_layer_norm(device, rng, n, K, axis, dtype):
    check_layer(device, layer_case(rng, (n, K) if axis else (K, n), axis, dtype, relu=bool(rng.integers(2))))


@pytest.mark.parametrize(("shape", "axis"), [((50, 1000), 1), ((1000, 50), 0), ((3, 500, 40), 1), ((2000, 3), 0)])
def test_a_large_mean_does_not_cancel(device, rng, shape, axis):
    check_layer(device, layer_case(rng, shape, axis, mean=1e4))


@pytest.mark.parametrize("axis", [0, 1])
def test_an_outlier_does_not_spoil_the_statistics(device, rng, axis):
    case = layer_case(rng, (16, 640) if axis else (640, 16), axis)
    x = case.x.copy()
    x[0, 0] = 1e4
    with tf.device(device):
        y = layer_norm(x, case.g, case.b, axis=axis)
    expected = ref.layer_norm_test(x, case.g, case.b, axis)
    g, b = (np.abs(v).reshape((1, -1) if axis else (-1, 1)) for v in (case.g, case.b))
    check("y", y, expected, "float32", (np.abs(ref.layer_norm_test(x, 1 + 0 * g, 0 * b, axis)) + 1) * g + b)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape", [(2, 3, 5), (1, 4, 16), (3, 2, 4, 6), (2, 5, 1), (4, 1, 7, 3, 2), (8, 6), (9, 40, 14, 14)]
)
def test_batch_norm(device, rng, shape, dtype):
    case = batch_case(rng, shape, dtype)
    with tf.device(device):
        x, g, b = (tf.constant(v) for v in (case.x, case.g, case.b))
        with tf.GradientTape() as tape:
            tape.watch([x, g, b])
            y, m, v = batch_norm(x, g, b)
        dx, dg, db = tape.gradient(y, [x, g, b], output_gradients=tf.constant(case.dy))
        assert y.dtype == dx.dtype == case.x.dtype and m.shape == v.shape == dg.shape == g.shape
        case.check_y(y, m, v)
        case.check_gradients(dx, dg, db)


def test_batch_norm_with_a_large_mean(device, rng):
    case = batch_case(rng, (6, 5, 20, 20), mean=1e4)
    with tf.device(device):
        y, m, v = batch_norm(case.x, case.g, case.b)
        case.check_y(y, m, v)
        y, (dx, dg, db) = gradients(lambda *u: batch_norm(*u).y, (case.x, case.g, case.b), case.dy)
        case.check_gradients(dx, dg, db)


@pytest.mark.parametrize("dtype", DTYPES)
def test_batch_norm_inference(device, rng, dtype):
    """Its gradient is the derivative, for the statistics too."""
    case = batch_case(rng, (4, 6, 9), dtype)
    m, v = rng.standard_normal(6).astype(f32), (0.5 + rng.random(6)).astype(f32)
    with tf.device(device):
        y, (dx, dg, db, dm, dv) = gradients(batch_norm_inference, (case.x, case.g, case.b, m, v), case.dy)
    expected = ref.batch_norm_inf_test(case.x, case.g, case.b, m, v)
    check("y", y, expected, np.dtype(dtype).name, np.abs(expected) + 10)
    case.check_gradients(dx, dg, db, m, v)
    wanted = ref.batch_norm_inf_grad_test(case.dy, case.x, case.g, m, v)
    for actual, value in ((dm, wanted[3]), (dv, wanted[4])):
        np.testing.assert_allclose(actual, value, rtol=1e-4, atol=1e-3)


def test_references_are_derivatives(rng):
    """The gradients of the reference by central differences of the reference."""
    x, dy = rng.standard_normal((3, 8, 4)), rng.standard_normal((3, 8, 4))
    g, b, m, v = rng.standard_normal(8), rng.standard_normal(8), rng.standard_normal(8), 0.5 + rng.random(8)

    def differences(function, at, h=1e-6):
        out = np.zeros(at.shape)
        for index in np.ndindex(at.shape):
            step = np.zeros(at.shape)
            step[index] = h
            out[index] = np.sum((function(at + step) - function(at - step)) * dy) / (2 * h)
        return out

    for options in ({"axis": 1}, {"axis": 1, "segments": 2, "relu": True}, {"axis": 0}, {"axis": -1, "epsilon": 0.1}):
        K = x.shape[options["axis"]]
        gk, bk = g[:K], b[:K]
        dx, dg, db = norms.layer_norm_grad_test(dy, x, gk, bk, **options)
        shape = (K, 1) if options["axis"] == 0 else (1, K)
        assert dg.shape == db.shape == shape
        operands = [x, gk, bk]
        for k, actual in enumerate((dx, dg.reshape(-1), db.reshape(-1))):

            def function(u, k=k, operands=operands, options=options):
                return norms.layer_norm_test(*operands[:k], u, *operands[k + 1 :], **options)

            np.testing.assert_allclose(actual, differences(function, operands[k]), rtol=1e-5, atol=1e-6)
    y, mean, variance = norms.batch_norm_test(x, g, b)
    np.testing.assert_allclose(y, norms.batch_norm_inf_test(x, g, b, mean, variance))
    dx, dg, db = norms.batch_norm_grad_test(dy, x, g, mean, variance)
    for actual, function, at in (
        (dx, lambda u: norms.batch_norm_test(u, g, b)[0], x),
        (dg, lambda u: norms.batch_norm_test(x, u, b)[0], g),
        (db, lambda u: norms.batch_norm_test(x, g, u)[0], b),
    ):
        np.testing.assert_allclose(actual, differences(function, at), rtol=1e-5, atol=1e-6)
    for actual, k in zip(ref.batch_norm_inf_grad_test(dy, x, g, m, v), range(5)):
        operands = [x, g, b, m, v]

        def function(u, k=k, operands=operands):
            return norms.batch_norm_inf_test(*operands[:k], u, *operands[k + 1 :])

        np.testing.assert_allclose(actual, differences(function, operands[k]), rtol=1e-5, atol=1e-6)


# ------------------------------------------------------------------------------------------------ second derivatives


def plain_layer_norm(x, g, b, axis, segments, relu):
    return layer_norm(x, g, b, axis=axis, segments=segments, relu=relu, use_tf=True)


def plain_batch_norm(x, g, b):
    dims, vector = [0, *range(2, x.shape.rank)], [1, -1] + [1] * (x.shape.rank - 2)
    m = tf.reduce_mean(x, dims, keepdims=True)
    v = tf.reduce_mean(tf.square(x - m), dims, keepdims=True)
    return (x - m) * tf.math.rsqrt(v + 1e-6) * tf.reshape(g, vector) + tf.reshape(b, vector)


def plain_inference(x, g, b, m, v):
    vector = [1, -1] + [1] * (x.shape.rank - 2)
    g, b, m, v = (tf.reshape(u, vector) for u in (g, b, m, v))
    return (x - m) * tf.math.rsqrt(v + 1e-6) * g + b


@pytest.mark.parametrize("kind", ["rows", "columns", "middle", "batch", "inference"])
def test_second_derivatives(device, rng, kind):
    """Against those that TensorFlow takes of the composition."""
    shape = {"rows": (5, 12), "columns": (12, 5), "middle": (2, 12, 3)}.get(kind, (3, 12, 4))
    axis = {"rows": -1, "columns": 0, "middle": 1}.get(kind, 1)
    operands = [rng.standard_normal(s).astype(f32) for s in (shape, 12, 12)]
    if kind == "inference":
        operands += [rng.standard_normal(12).astype(f32), (0.5 + rng.random(12)).astype(f32)]
    ours, plain = {
        "batch": (lambda *u: batch_norm(*u).y, plain_batch_norm),
        "inference": (batch_norm_inference, plain_inference),
    }.get(
        kind,
        (
            lambda *u: layer_norm(*u, axis=axis, segments=3, relu=kind == "rows"),
            lambda *u: plain_layer_norm(*u, axis, 3, kind == "rows"),
        ),
    )
    weights = [tf.constant(rng.standard_normal(shape).astype(f32)) for _ in range(2)]

    def second(function):
        values = [tf.constant(v) for v in operands]
        with tf.GradientTape() as outer:
            outer.watch(values)
            with tf.GradientTape() as inner:
                inner.watch(values)
                loss = tf.reduce_sum(weights[0] * tf.sin(function(*values)))
            first = inner.gradient(loss, values)
            total = tf.reduce_sum(weights[1] * first[0]) + sum(tf.reduce_sum(tf.sin(d)) for d in first[1:])
        return first, outer.gradient(total, values)

    with tf.device(device):
        for found, expected in zip(second(ours), second(plain)):
            for a, e in zip(found, expected):
                np.testing.assert_allclose(a, e, rtol=2e-3, atol=2e-3 * np.abs(e).max())


# --------------------------------------------------------------------------------------------------------- every mode


def in_graph(device, function, operands, shapes):
    """Runs function on placeholders of the given shapes in a graph of its own."""
    with tf.Graph().as_default(), tf1.Session() as session:
        feeds = [tf1.placeholder(v.dtype, s) for v, s in zip(operands, shapes)]
        with tf.device(device):
            results = function(*feeds)
        return session.run(results, dict(zip(feeds, operands)))


@pytest.mark.parametrize("known", ["everything", "rank", "nothing"])
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_modes_give_the_same_bits(device, rng, known, axis):
    case = layer_case(rng, (24, 8, 16), axis, segments=2, relu=True)
    operands = [case.x, case.g, case.b, case.dy]
    shapes = {"everything": [v.shape for v in operands], "rank": [[None] * v.ndim for v in operands]}.get(
        known, [None] * 4
    )

    def all_of_it(x, g, b, dy):
        y = layer_norm(x, g, b, **case.options)
        return [y, *tf.gradients(y, [x, g, b], dy)]

    with tf.device(device):
        y, grads = gradients(lambda *u: layer_norm(*u, **case.options), operands[:3], case.dy)
        signature = [tf.TensorSpec(s, v.dtype) for s, v in zip(shapes, operands)]
        in_function = tf.function(all_of_it, input_signature=signature)(*operands)
    expected = [np.asarray(v).tobytes() for v in (y, *grads)]
    assert [np.asarray(v).tobytes() for v in in_function] == expected
    assert [v.tobytes() for v in in_graph(device, all_of_it, operands, shapes)] == expected


def test_batch_norm_in_a_graph_without_shapes(device, rng):
    case = batch_case(rng, (4, 6, 5, 7))

    def all_of_it(x, g, b, dy):
        y, m, v = batch_norm(x, g, b)
        inference = batch_norm_inference(x, g, b, m, v)
        return [y, m, v, *tf.gradients(y, [x, g, b], dy), inference]

    y, m, v, dx, dg, db, inference = in_graph(device, all_of_it, [case.x, case.g, case.b, case.dy], [None] * 4)
    case.check_y(y, m, v)
    case.check_gradients(dx, dg, db)
    case.check_y(inference, m, v)


@pytest.mark.parametrize("shape", [(0, 8), (4, 0, 8), (3, 8, 0), (3, 0)])
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_empty_tensors(device, shape, axis):
    K = shape[axis]
    with tf.device(device):
        y, (dx, dg, db) = gradients(
            lambda *u: layer_norm(*u, axis=axis),
            (np.zeros(shape, f32), np.ones(K, f32), np.ones(K, f32)),
            np.zeros(shape, f32),
        )
    assert y.shape == dx.shape == shape
    assert np.array_equal(dg, np.zeros(K)) and np.array_equal(db, np.zeros(K))


def test_batch_norm_of_nothing(device):
    operands = np.zeros((0, 3, 4), f32), np.ones(3, f32), np.ones(3, f32)
    with tf.device(device):
        y, m, v = batch_norm(*operands)
        _, (dx, dg, db) = gradients(lambda *u: batch_norm(*u).y, operands, operands[0])
    assert y.shape == dx.shape == (0, 3, 4)
    for value in (m, v, dg, db):
        assert np.array_equal(value, np.zeros(3))


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_vectorized_map(device, rng, axis):
    case = layer_case(rng, (8, 4, 16), axis)
    x, dy = (np.stack([v, 2 * v, v + 1]) for v in (case.x, case.dy))
    K = case.shape[axis]

    def one(operands):
        x, dy = operands
        g, b = tf.constant(case.g), tf.constant(case.b)
        with tf.GradientTape() as tape:
            tape.watch([x, g, b])
            y = layer_norm(x, g, b, axis=axis)
        return [y, *tape.gradient(y, [x, g, b], output_gradients=dy)]

    with tf.device(device):
        mapped = tf.vectorized_map(one, (tf.constant(x), tf.constant(dy)), fallback_to_while_loop=False)
        for i in range(3):
            for found, expected in zip(mapped, one((tf.constant(x[i]), tf.constant(dy[i])))):
                np.testing.assert_allclose(found[i], expected, rtol=1e-5, atol=1e-5)
        with pytest.raises(ValueError, match="the gain must be the same for all elements"):
            tf.vectorized_map(
                lambda g: layer_norm(case.x, g, case.b, axis=axis), tf.ones([3, K]), fallback_to_while_loop=False
            )


def test_vectorized_map_of_batch_norm(device, rng):
    case = batch_case(rng, (4, 6, 5))
    x = tf.constant(np.stack([case.x, case.x * 3 + 1]))
    with tf.device(device):
        y, m, v = tf.vectorized_map(lambda x: batch_norm(x, case.g, case.b), x, fallback_to_while_loop=False)
        for i in range(2):
            for found, expected in zip((y, m, v), batch_norm(x[i], case.g, case.b)):
                np.testing.assert_array_equal(found[i], expected)


@pytest.mark.parametrize("name", ["layer_norm", "batch_norm", "batch_norm_inference"])
def test_xla_is_refused_by_name(name):
    vectors = [np.ones(4, f32)] * (4 if name == "batch_norm_inference" else 2)

    @tf.function(jit_compile=True)
    def compiled(x):
        return getattr(norms, name)(x, *vectors)

    with pytest.raises(NotImplementedError, match=f"{name}: blocksparse ops have no XLA kernels"):
        compiled(tf.zeros([2, 4, 3]))


@pytest.mark.parametrize("axis", [0, 1])
def test_the_same_bits_every_time(device, rng, axis):
    case = layer_case(rng, (500, 256), axis, bfloat16)

    def bits():
        y, grads = gradients(lambda *u: layer_norm(*u, **case.options), (case.x, case.g, case.b), case.dy)
        return [np.asarray(v).tobytes() for v in (y, *grads)]

    with tf.device(device):
        first = bits()
        assert all(bits() == first for _ in range(5))


def test_nan_and_infinity_stay_in_their_row(device):
    x = np.ones((3, 40), f32) * np.arange(40, dtype=f32)
    x[0, 3], x[2, 5] = np.nan, np.inf
    with tf.device(device):
        for relu in (False, True):
            y = np.asarray(layer_norm(x, np.ones(40, f32), np.ones(40, f32), relu=relu))
            assert np.isnan(y[0]).all() and np.isfinite(y[1]).all() and np.isnan(y[2]).all()


def test_bench_repeats_do_not_read_what_they_wrote(device, rng):
    """Where the input is nobody else's, and an output could lie in its place."""
    x, g, b = (tf.constant(v) for v in (layer_case(rng, (12, 64), 1).x, rng.random(64, "f") + 2, rng.random(64, "f")))

    def run(bench):
        with tf.device(device):
            return tf.function(lambda x: layer_norm(3 * x, g, b, bench=bench))(x)

    np.testing.assert_array_equal(run(3), run(0))


def test_options_that_change_nothing(device, rng, capfd):
    case = layer_case(rng, (12, 64), 1)
    with tf.device(device):
        y = np.asarray(layer_norm(case.x, case.g, case.b))
        shaped = layer_norm(case.x, case.g[None], case.b[:, None], atomics=False, bench=3)
        np.testing.assert_array_equal(y, shaped)
        assert "LayerNorm " in capfd.readouterr().out
        case.check_y(layer_norm(case.x, case.g, case.b, use_tf=True))
    variables = [tf.Variable(v) for v in (case.x, case.g, case.b)]
    np.testing.assert_allclose(layer_norm(*variables), y, rtol=1e-6, atol=1e-6)


# -------------------------------------------------------------------------------------------------------------- errors

ONES = {n: np.ones(n, f32) for n in (4, 5, 6, 8)}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((np.ones((2, 4)), ONES[4], ONES[4]), "x has dtype float64, allowed are float32, float16 and bfloat16"),
        ((np.ones((2, 4), f32), ONES[5], ONES[4]), r"gain must have 4 elements, .* got shape \(5,\)"),
        ((np.ones((2, 4), f32), ONES[4], ONES[5]), r"bias must have 4 elements, .* got shape \(5,\)"),
        ((np.ones((2, 4), f32), tf.ones(4, tf.float16), ONES[4]), "gain has dtype float16, must be float32"),
        ((np.ones((2, 4), f32), ONES[4], tf.ones(4, tf.bfloat16)), "bias has dtype bfloat16, must be float32"),
        ((np.ones((2, 4), f32), ONES[4], ONES[4], 2), r"axis must be -2 to 1 for x of shape \(2, 4\), got 2"),
        ((np.ones((2, 4), f32), ONES[4], ONES[4], -3), "axis must be -2 to 1 .* got -3"),
        ((np.float32(1), ONES[4], ONES[4], 0), "x is a scalar"),
        ((np.ones((2, 4), f32), ONES[4], ONES[4], 1.5), "axis must be an int, got 1.5"),
        (
            (np.ones((2, 4), f32), ONES[4], ONES[4], 1, 3),
            "segments must be at least 1 and divide the 4 features, got 3",
        ),
        ((np.ones((2, 4), f32), ONES[4], ONES[4], 1, 0), "segments must be at least 1 .* got 0"),
        ((np.ones((2, 4), f32), ONES[4], ONES[4], 1, 1, -1.0), "epsilon must be a finite number .* got -1.0"),
    ],
)
def test_errors_of_layer_norm(arguments, words):
    with pytest.raises(ValueError, match=words):
        layer_norm(*arguments)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((np.ones((2, 4, 3), np.int32), ONES[4], ONES[4]), "x has dtype int32"),
        ((np.ones(4, f32), ONES[4], ONES[4]), r"x must be \[N, C, ...\], of rank 2 or more, got shape \(4,\)"),
        ((np.ones((2, 4, 3), f32), ONES[5], ONES[4]), "gain must have 4 elements"),
        ((np.ones((2, 4, 3), f32), ONES[4], ONES[5]), "bias must have 4 elements"),
    ],
)
def test_errors_of_batch_norm(arguments, words):
    with pytest.raises(ValueError, match=words):
        batch_norm(*arguments)
    with pytest.raises(ValueError, match=words):
        batch_norm_inference(*arguments, ONES[4], ONES[4])


def test_errors_of_statistics():
    for m, v, words in ((ONES[5], ONES[4], "mean must have 4"), (ONES[4], ONES[6], "variance must have 4")):
        with pytest.raises(ValueError, match=words):
            batch_norm_inference(np.ones((2, 4, 3), f32), ONES[4], ONES[4], m, v)


@pytest.mark.parametrize(
    ("x", "g", "b", "attrs", "words"),
    [
        ((2, 4), 5, 4, {}, r"gain must have 4 elements, one for each feature, got \[5\]"),
        ((2, 4), 4, 5, {}, r"bias must have 4 elements, one for each feature, got \[5\]"),
        ((2, 4), 4, 4, {"axis": 2}, r"axis must be -2 to 1 for x of shape \[2,4\], got 2"),
        ((2, 4), 4, 4, {"S": 3}, "segments must be at least 1 and divide the 4 features, got 3"),
        ((2, 4), 4, 4, {"S": -2}, "segments must be at least 1"),
        ((), 1, 1, {"axis": 0}, r"x must have at least one dimension, got \[\]"),
    ],
)
def test_errors_of_the_running_op(device, x, g, b, attrs, words):
    """Where shapes are not known before."""

    def run(x, g, b):
        return norms.layer_norm_op(x, g, b, **attrs)[0]

    with pytest.raises(tf.errors.InvalidArgumentError, match=words):
        in_graph(device, run, [np.ones(s, f32) for s in (x, (g,), (b,))], [None] * 3)


def test_errors_of_the_gradient_op(device, rng):
    x, rows = np.ones((3, 4), f32), np.ones((1, 3), f32)

    def run(*operands):
        return norms.layer_norm_grad_op(*operands)

    good = [x, x, ONES[4], ONES[4], rows, rows, rows]
    for index, wrong, words in (
        (0, np.ones((3, 5), f32), r"dy must be \[3,4\], got \[3,5\]"),
        (4, np.ones((1, 4), f32), r"mean must be \[1,3\], got \[1,4\]"),
        (6, np.ones((3,), f32), r"rstd must be \[1,3\], got \[3\]"),
    ):
        with pytest.raises(tf.errors.InvalidArgumentError, match=words):
            in_graph(device, run, [*good[:index], wrong, *good[index + 1 :]], [None] * 7)


def test_static_shapes():
    with tf.Graph().as_default():
        x, g = tf1.placeholder(tf.float16, [None, 8, 5]), tf1.placeholder(tf.float32, [8])
        y, mean, residual, rstd = norms.layer_norm_op(x, g, g, axis=1, S=2)
        assert y.shape.as_list() == [None, 8, 5] and y.dtype == tf.float16
        assert mean.shape.as_list() == residual.shape.as_list() == rstd.shape.as_list() == [2, None, 5]
        assert layer_norm(tf1.placeholder(tf.float32), g, g).shape.rank is None
        y, m, v = batch_norm(x, g, g)
        assert y.shape.as_list() == [None, 8, 5] and m.shape.as_list() == v.shape.as_list() == [8]
