"""A block-sparse product, checked against the dense one and timed beside it.

    PYTHONPATH=. python examples/simple.py          eagerly
    PYTHONPATH=. python examples/simple.py --v1     in a graph with a session, TensorFlow 1 style

Prints relative errors, which it checks, and the speed-up.
"""

import sys
import time

import numpy as np
import tensorflow as tf

from blocksparse import BlocksparseMatMul

HIDDEN, BLOCK, BATCH, DENSITY = 4096, 32, 64, 0.1


def run_eager(bsmm, x, w, dy, w_dense):
    """The product y, the gradient of w given that of y, y by the dense weight, and the seconds each product takes."""
    x, w, w_dense = tf.constant(x), tf.Variable(w), tf.constant(w_dense)
    with tf.GradientTape() as tape:
        y = bsmm(x, w)
    dw = tape.gradient(y, w, output_gradients=dy)
    seconds = best_time(lambda: bsmm(x, w).numpy())
    dense_seconds = best_time(lambda: tf.matmul(x, w_dense).numpy())
    return y.numpy(), dw.numpy(), tf.matmul(x, w_dense).numpy(), seconds, dense_seconds


def run_v1(bsmm, x, w, dy, w_dense):
    """The same as a graph."""
    v1 = tf.compat.v1
    with tf.Graph().as_default(), v1.Session() as session:
        x_in = v1.placeholder(tf.float32, [None, bsmm.C])
        weight = v1.get_variable("w", initializer=w)
        dense_weight = v1.get_variable("w_dense", initializer=w_dense)
        y = bsmm(x_in, weight)
        (dw,) = tf.gradients(y, weight, grad_ys=dy)
        y_dense = tf.matmul(x_in, dense_weight)
        session.run(v1.global_variables_initializer())
        seconds = best_time(lambda: session.run(y, {x_in: x}))
        dense_seconds = best_time(lambda: session.run(y_dense, {x_in: x}))
        return *session.run([y, dw, y_dense], {x_in: x}), seconds, dense_seconds


def best_time(function, repeats=30):
    """Seconds of the fastest call: what the machine takes when nothing disturbs it."""
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        function()
        times.append(time.perf_counter() - began)
    return min(times)


def to_dense(bsmm, w):
    """The dense weight `[C, K]` that w `[blocks, block, block]` stands for: zero where no block is."""
    dense = np.zeros((bsmm.CB, bsmm.bsize, bsmm.KB, bsmm.bsize), w.dtype)
    c, k = np.array(bsmm.updat_list).T
    dense[c, :, k, :] = w
    return dense.reshape(bsmm.C, bsmm.K)


def relative_error(value, expected):
    return np.linalg.norm(value - expected) / np.linalg.norm(expected)


def main(arguments):
    rng = np.random.default_rng(0)
    layout = rng.random((HIDDEN // BLOCK, HIDDEN // BLOCK)) < DENSITY  # which blocks of the weight exist
    bsmm = BlocksparseMatMul(layout, block_size=BLOCK, feature_axis=1)
    x = rng.standard_normal((BATCH, HIDDEN), np.float32)
    w = rng.standard_normal(bsmm.w_shape, np.float32)
    dy = rng.standard_normal((BATCH, HIDDEN), np.float32)

    run = run_v1 if "--v1" in arguments else run_eager
    y, dw, y_dense, seconds, dense_seconds = run(bsmm, x, w, dy, to_dense(bsmm, w))

    dw_dense = (x.T @ dy) * to_dense(bsmm, np.ones_like(w))  # blocks that are absent have no gradient
    y_error = relative_error(y, y_dense)
    dw_error = relative_error(to_dense(bsmm, dw), dw_dense)
    print(
        f"{bsmm.blocks} blocks of {BLOCK} x {BLOCK}, {layout.mean():.1%} of a {HIDDEN} x {HIDDEN} weight, batch {BATCH}"
    )
    print(f"relative error: product {y_error:.1e}, weight gradient {dw_error:.1e}")
    print(
        f"block-sparse {seconds * 1e3:.2f} ms, dense {dense_seconds * 1e3:.2f} ms: {dense_seconds / seconds:.1f} times"
    )
    # Both round sums of up to 4096 float32 products, each in an order of its own. On a GPU TensorFlow by
    # default rounds the factors to TF32, 11 bits.
    tf32 = tf.config.list_physical_devices("GPU") and tf.config.experimental.tensor_float_32_execution_enabled()
    if not max(y_error, dw_error) < (1e-3 if tf32 else 1e-5):
        raise SystemExit("the block-sparse product differs from the dense one")


if __name__ == "__main__":
    main(sys.argv[1:])
