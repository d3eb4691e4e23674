"""Normalization on the CPU timed beside Keras's layers, through TensorFlow, in one run.

  python3 bench/norms.py [--output results.json]

Ours and the peer run in turn, as traced functions; the ratio is the median over the rounds of the peer's time over
ours.
Forward alone, and forward with the gradients of x, gain and bias. Floor for the latter: 1.5 times `LayerNormalization`.
On the GPU: bench/norms_gpu.py.
"""

import argparse
import json
import statistics
import time

import numpy as np
import tensorflow as tf
from _common import about

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
        name = f"layer_norm axis {axis} {shape}"
        yield name, lambda x, g, b, a=axis: bs.layer_norm(x, g, b, axis=a), keras_layer_norm(axis, shape), shape, axis
    yield "batch_norm", lambda x, g, b: bs.batch_norm(x, g, b).y, keras_batch_norm, (8, 64, 56, 56), 1


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--output")
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    rng = np.random.default_rng(1)
    results = []
    for name, ours, peer, shape, axis in cases():
        x = tf.constant(rng.standard_normal(shape), tf.float32)
        g, b = (tf.constant(rng.standard_normal(shape[axis]), tf.float32) for _ in range(2))
        for what, change in (("forward", lambda f: f), ("forward and backward", with_gradients)):
            functions = [tf.function(change(f)) for f in (ours, peer)]
            times = []
            for _ in range(options.rounds + 2):
                pair = []
                for function in functions:
                    start = time.perf_counter()
                    tf.nest.map_structure(lambda v: v.numpy(), function(x, g, b))
                    pair.append(time.perf_counter() - start)
                times.append(pair)
            ratio = statistics.median(p / o for o, p in times[2:])
            ms = statistics.median(o for o, _ in times[2:]) * 1e3
            results.append({"op": name, "what": what, "ms": ms, "ratio": ratio})
            print(f"{name:32s} {what:22s} {ms:8.3f} ms  {ratio:5.2f} x", flush=True)
    if options.output:
        with open(options.output, "w") as file:
            json.dump(
                about("/CPU:0", tf.config.threading.get_intra_op_parallelism_threads()) | {"results": results}, file
            )


if __name__ == "__main__":
    main()
