"""What normalization has to give, from the reference in float64, and how far off a result may be; for tests with and
without TensorFlow.

Entry by entry a result may be off by half the spacing of its dtype, and by what float32 loses: x^ is right to some
units of 2^-24 of |x^| + 1, and a sum of n products to max(16, 2 sqrt(n)) such units of the sum of their absolute values
(rounding errors of random sign grow like sqrt(n)). float16 or bfloat16 sums would lose 2^13 or 2^16 times as much.
"""

import importlib.util
import pathlib

import numpy as np

_path = pathlib.Path(__file__).resolve().parent.parent / "blocksparse" / "reference.py"
_spec = importlib.util.spec_from_file_location("norms_reference", _path)  # its package would load TensorFlow
ref = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(ref)

_UNIT = 2.0**-24
# Bits of the significand and exponent of the smallest normal number, by name: bfloat16 has no type of NumPy's.
_FORMATS = {"float32": (24, -126), "float16": (11, -14), "bfloat16": (8, -126)}


def spacing(x, dtype):
    bits, smallest = _FORMATS[str(dtype)]
    _, exponent = np.frexp(x)
    return np.ldexp(1.0, np.maximum(np.where(x == 0, smallest, exponent - 1), smallest) - (bits - 1))


def check(what, actual, expected, dtype, magnitude, terms=1):
    """Raises AssertionError unless `actual` (any float array) is as near to `expected` as it has to be."""
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    assert actual.shape == expected.shape, f"{what}: shape {actual.shape}, expected {expected.shape}"
    tolerance = spacing(expected, dtype) / 2 + max(16.0, 2 * np.sqrt(terms)) * _UNIT * magnitude
    error = np.abs(actual - expected)
    good = error <= tolerance  # false for NaN
    if not good.all():
        worst = np.unravel_index(np.argmax(np.where(np.isnan(error), np.inf, error / tolerance)), error.shape)
        raise AssertionError(
            f"{what}: {np.count_nonzero(~good)} of {good.size} entries are wrong, the worst at "
            f"{tuple(map(int, worst))}: {actual[worst]!r}, expected {expected[worst]!r} +- {tolerance[worst]:.3g}"
        )


class LayerNorm:
    """Random operands of a layer norm, and the checks of what comes out.

    `dy` is 0 where a relu's input is too near 0 for float32 to tell its sign.
    """

    def __init__(self, rng, shape, axis, round_to, dtype, segments=1, relu=False, epsilon=1e-6, mean=0.0, spread=1.0):
        self.shape, self.axis, self.dtype = shape, axis, dtype
        self.options = {"axis": axis, "segments": segments, "epsilon": epsilon, "relu": relu}
        K = shape[axis]
        # A mean of its own for every row.
        others = [1 if d == axis % len(shape) else n for d, n in enumerate(shape)]
        offsets = mean * (1 + 0.1 * rng.standard_normal(others))
        self.x = round_to(spread * rng.standard_normal(shape) + offsets)
        self.g = (1 + 0.5 * rng.standard_normal(K)).astype(np.float32)
        self.b = rng.standard_normal(K).astype(np.float32)
        self.dy = round_to(rng.standard_normal(shape))
        vector = [K if d == axis % len(shape) else 1 for d in range(len(shape))]
        g, b = self.g.reshape(vector).astype(np.float64), self.b.reshape(vector).astype(np.float64)
        one, zero = np.ones(K), np.zeros(K)
        self.xhat = ref.layer_norm_test(self.x, one, zero, axis, segments, epsilon)
        if relu:
            near = np.abs(self.xhat * g + b) < 1e-4 * (1 + np.abs(g))
            self.dy = round_to(np.where(near, 0.0, np.asarray(self.dy, np.float64)))
        self.vectors = g, b

    def check_y(self, y):
        g, b = self.vectors
        magnitude = (np.abs(self.xhat) + 1) * np.abs(g) + np.abs(b)
        check("y", y, ref.layer_norm_test(self.x, self.g, self.b, **self.options), self.dtype, magnitude)

    def check_gradients(self, dx, dg, db):
        expected = ref.layer_norm_grad_test(self.dy, self.x, self.g, self.b, **self.options)
        g, _ = self.vectors
        axis, segments = self.axis, self.options["segments"]
        cut = ref._segmented(self.x, axis, segments)
        rstd = 1 / np.sqrt(cut.var(axis=2, keepdims=True) + self.options["epsilon"])
        d = np.abs(ref._segmented(np.asarray(self.dy, np.float64) * g, axis, segments))
        xhat = np.abs(ref._segmented(self.xhat, axis, segments))
        magnitude = rstd * (d + d.mean(axis=2, keepdims=True) + (xhat + 1) * (d * xhat).mean(axis=2, keepdims=True))
        check("dx", dx, expected[0], self.dtype, magnitude.reshape(self.shape))
        t = np.abs(ref._segmented(self.dy, axis, segments))
        terms = cut.shape[0] * cut.shape[3]
        for name, actual, wanted, size in (("dg", dg, expected[1], t * (xhat + 1)), ("db", db, expected[2], t)):
            total = size.sum(axis=(0, 3)).reshape(-1)
            check(name, np.asarray(actual).reshape(-1), wanted.reshape(-1), "float32", total, terms)


class BatchNorm:
    """The same of a batch norm."""

    def __init__(self, rng, shape, round_to, dtype, epsilon=1e-6, mean=0.0, spread=1.0):
        self.shape, self.dtype, self.epsilon = shape, dtype, epsilon
        C = shape[1]
        offsets = ref._channel_vector(
            mean * (1 + 0.1 * rng.standard_normal(C)), np.zeros([1] * len(shape)).repeat(C, 1)
        )
        self.x = round_to(spread * rng.standard_normal(shape) + offsets)
        self.g = (1 + 0.5 * rng.standard_normal(C)).astype(np.float32)
        self.b = rng.standard_normal(C).astype(np.float32)
        self.dy = round_to(rng.standard_normal(shape))
        self.terms = int(np.prod(shape)) // max(C, 1)

    def _size(self, m, v):
        x = np.asarray(self.x, np.float64)
        m, v = ref._channel_vector(m, x), ref._channel_vector(v, x)
        return np.abs((x - m) / np.sqrt(v + self.epsilon)), 1 / np.sqrt(v + self.epsilon)

    def check_y(self, y, m, v):
        wanted, mean, variance = ref.batch_norm_test(self.x, self.g, self.b, self.epsilon)
        xhat, _ = self._size(mean, variance)
        g, b = (np.abs(ref._channel_vector(u, xhat)) for u in (self.g, self.b))
        check("m", np.reshape(m, -1), mean, "float32", np.sqrt(variance))
        check("v", np.reshape(v, -1), variance, "float32", variance, self.terms)
        check("y", y, wanted, self.dtype, (xhat + 1) * g + b, self.terms)

    def check_inference(self, y, m, v):
        """m and v are constants, whatever x is."""
        x = np.asarray(self.x, np.float64)
        m, v, g, b = (ref._channel_vector(np.asarray(u, np.float64), x) for u in (m, v, self.g, self.b))
        xhat = (x - m) / np.sqrt(v + self.epsilon)
        check("y of inference", y, xhat * g + b, self.dtype, (np.abs(xhat) + 1) * np.abs(g) + np.abs(b), self.terms)

    def check_gradients(self, dx, dg, db, m=None, v=None):
        """Of inference, where m and v are given."""
        inference = m is not None
        if not inference:
            _, m, v = ref.batch_norm_test(self.x, self.g, self.b, self.epsilon)
        xhat, rstd = self._size(m, v)
        gradient = ref.batch_norm_inf_grad_test if inference else ref.batch_norm_grad_test
        expected = gradient(self.dy, self.x, self.g, m, v, self.epsilon)
        dy, g = np.abs(np.asarray(self.dy, np.float64)), np.abs(ref._channel_vector(self.g, xhat))
        dims = ref._other_dims(xhat)
        mean = 0 if inference else dy.mean(axis=dims, keepdims=True)
        slope = 0 if inference else (xhat + 1) * (dy * xhat).mean(axis=dims, keepdims=True)
        check("dx", dx, expected[0], self.dtype, g * rstd * (dy + mean + slope), self.terms)
        check("dg", np.reshape(dg, -1), expected[1], "float32", (dy * (xhat + 1)).sum(axis=dims), self.terms)
        check("db", np.reshape(db, -1), expected[2], "float32", dy.sum(axis=dims), self.terms)
