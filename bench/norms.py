"""Normalization on the CPU timed beside Keras's layers, through TensorFlow, in one run.

  python3 bench/norms.py [--clock cpu] [--json NAME]

A result is the median over rounds of the peer's time by ours, each the best of a few calls.
Forward alone, and forward with the gradients of x, gain and bias. Floor for the latter: 1.5 times `LayerNormalization`.
On the GPU: bench/fused_gpu.py.
"""

import argparse

import numpy as np
import tensorflow as tf
from _common import median_ratio, quiet, rounds, save_cpu

import blocksparse as bs


def with_gradients(function):
    def run(*operands):
        with tf.GradientTape() as tape:
            tape.watch(operands)
            y = function(*operands)
        return tape.gradient(y, operands, y)

    return run


def keras_layer_norm(axis, shape):
    layer = tf.keras.layers.LayerNormalization(axis=axis, epsilon=1e-6)
    layer.build(shape)

    def run(x, g, b):
        return layer.stateless_call([g, b], [], x)[0]

    return run


def keras_batch_norm(x, g, b):
    y, _, _ = tf.compat.v1.nn.fused_batch_norm(tf.transpose(x, [0, 2, 3, 1]), g, b, epsilon=1e-6)
    return tf.transpose(y, [0, 3, 1, 2])


def cases():
    for shape, axis in (((2048, 1024), 1), ((1024, 4096), 1), ((1024, 2048), 0)):
        name = f"layer_norm axis {axis}"
        yield name, lambda x, g, b, a=axis: bs.layer_norm(x, g, b, axis=a), keras_layer_norm(axis, shape), shape, axis
    yield "batch_norm", lambda x, g, b: bs.batch_norm(x, g, b).y, keras_batch_norm, (8, 64, 56, 56), 1


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall", help="cpu: on a machine others use, too")
    parser.add_argument("--json", default="norms_cpu.json", help="name of the result in bench/results/")
    options = parser.parse_args()
    tf.config.threading.set_intra_op_parallelism_threads(options.threads)
    rng = np.random.default_rng(1)
    results = []
    for name, ours, peer, shape, axis in cases():
        x = tf.constant(rng.standard_normal(shape), tf.float32)
        g, b = (tf.constant(rng.standard_normal(shape[axis]), tf.float32) for _ in range(2))
        for part, change in (("forward", lambda f: f), ("forward and gradient", with_gradients)):
            graphs = {key: tf.function(change(f), autograph=False) for key, f in (("tf", peer), ("ours", ours))}
            calls = {key: lambda f=f, v=(x, g, b): f(*v) for key, f in graphs.items()}
            times = rounds(calls, options.rounds, options.clock)
            kept = quiet(times["tf"])
            row = {"op": f"{name}, {part}", "dtype": "float32", "shape": list(shape), "kept": len(kept), "floor": 1.5}
            row.update({f"{key}_ms": min(t) * 1e3 for key, t in times.items()})
            row["ratio"] = median_ratio(times["tf"], times["ours"], kept)
            results.append(row)
            print(
                f"{name:32s} {part:22s} {row['ours_ms']:8.3f} ms, Keras {row['tf_ms']:8.3f} ms: {row['ratio']:5.2f}",
                flush=True,
            )
    print(save_cpu(options, tf.__version__, results))


if __name__ == "__main__":
    main()
