"""Elementwise operators timed beside TensorFlow's, through TensorFlow, in one run.

  python3 bench/ewops.py [--device /CPU:0] [--clock cpu] [--json NAME]

A result is the median over rounds of TensorFlow's time by ours, each the best of a few calls of a graph. "fused" rows
stand against the composition of TensorFlow ops that a user would write.
"""

import argparse
import functools

import numpy as np
import tensorflow as tf
from _common import median_ratio, quiet, repeated, rounds, save_cpu

import blocksparse as bs


def gradient(function, dy):
    """dy is a tensor and no constant of the graph, or TensorFlow would fold it into its own gradients."""

    def run(*operands):
        with tf.GradientTape() as tape:
            tape.watch(operands)
            y = function(*operands)
        return tape.gradient(y, operands, dy)

    return run


def cases(shape):
    """`(name, ours, TensorFlow's, operands, floor)`; floor is the ratio to reach."""
    rng = np.random.default_rng(1)
    n, k = shape
    x, y = (tf.constant(np.abs(rng.standard_normal(shape)) + 0.1, tf.float32) for _ in range(2))
    b, column = tf.constant(rng.standard_normal(k), tf.float32), tf.constant(rng.standard_normal(n), tf.float32)
    h = tf.cast(x, tf.bfloat16)
    grad = functools.partial(gradient, dy=tf.constant(rng.standard_normal(shape), tf.float32))
    for name, peer in (
        ("add", tf.add), ("multiply", tf.multiply), ("divide", tf.divide), ("maximum", tf.maximum),
    ):  # fmt: skip
        yield name, getattr(bs, name), peer, (x, y), 1.0
        yield f"{name} gradient", grad(getattr(bs, name)), grad(peer), (x, y), 1.0
    for name, peer in (
        ("negative", tf.negative), ("reciprocal", tf.math.reciprocal), ("square", tf.square), ("sqrt", tf.sqrt),
        ("exp", tf.exp), ("log", tf.math.log), ("sigmoid", tf.sigmoid), ("tanh", tf.tanh), ("relu", tf.nn.relu),
        ("elu", tf.nn.elu), ("gelu", lambda v: tf.nn.gelu(v, approximate=True)), ("swish", tf.nn.silu),
    ):  # fmt: skip
        yield name, getattr(bs, name), peer, (x,), 1.0
        yield f"{name} gradient", grad(getattr(bs, name)), grad(peer), (x,), 1.0
    yield "exp bfloat16", bs.exp, tf.exp, (h,), 1.0
    yield "cast to bfloat16", lambda v: bs.float_cast(v, tf.bfloat16), lambda v: tf.cast(v, tf.bfloat16), (x,), 1.0
    yield "cast to float16", lambda v: bs.float_cast(v, tf.float16), lambda v: tf.cast(v, tf.float16), (x,), 1.0
    yield "cast from bfloat16", lambda v: bs.float_cast(v, tf.float32), lambda v: tf.cast(v, tf.float32), (h,), 1.0
    xs = (x, y, x, y, x, y, x, y)
    yield "add_n of 8", lambda *v: bs.add_n(v), lambda *v: tf.add_n(v), xs, 1.0
    yield "reduce_max last axis", lambda v: bs.reduce_max(v, 1), lambda v: tf.reduce_max(v, 1), (x,), 1.0
    yield "reduce_max first axis", lambda v: bs.reduce_max(v, 0), lambda v: tf.reduce_max(v, 0), (x,), 1.0

    def relu(v, b):
        return tf.nn.relu(tf.nn.bias_add(v, b))

    def fast_gelu(v, b):
        v = tf.nn.bias_add(v, b)
        return v * tf.sigmoid(1.702 * v)

    def first_axis(v, b):
        return tf.nn.relu(v + b[:, None])

    for name, ours, peer, operands in (
        ("bias relu", lambda v, b: bs.bias_relu(v, b, relu=True), relu, (x, b)),
        ("bias fast_gelu", lambda v, b: bs.bias_relu(v, b, fast_gelu=True), fast_gelu, (x, b)),
        ("bias relu axis 0", lambda v, b: bs.bias_relu(v, b, axis=0, relu=True), first_axis, (x, column)),
    ):
        yield f"fused {name}", ours, peer, operands, 1.5
        yield f"fused {name} gradient", grad(ours), grad(peer), operands, 1.5
    yield "bias", bs.bias_relu, tf.nn.bias_add, (x, b), 1.0
    yield "gain gradient", grad(bs.multiply), grad(tf.multiply), (x, b), 1.0

    def drop(v):
        return bs.dropout(v, 0.7)[0]

    def tf_drop(v):
        return tf.nn.dropout(v, 0.3)

    yield "fused dropout", drop, tf_drop, (x,), 1.5
    yield "fused dropout gradient", grad(drop), grad(tf_drop), (x,), 1.5


def wait(y):
    """A call on a CPU returns when it is done; on a GPU the last element has to come first."""
    last = tf.nest.flatten(y)[0]
    if "GPU" in last.device:
        tf.reshape(last, [-1])[-1].numpy()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="/CPU:0")
    parser.add_argument("--shape", type=int, nargs=2, action="append", help="rows and columns; may be repeated")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall", help="cpu: on a machine others use, too")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--json", default="ewops_cpu.json", help="name of the result in bench/results/")
    options = parser.parse_args()
    tf.config.threading.set_intra_op_parallelism_threads(options.threads)
    tf.config.optimizer.set_experimental_options({"dependency_optimization": False})  # for `repeated`
    results = []
    for shape in options.shape or [(2048, 4096), (64, 1000)]:
        count = max(1, 4_000_000 // (shape[0] * shape[1]))
        with tf.device(options.device):
            for name, ours, peer, operands, floor in cases(shape):
                if options.only not in name:
                    continue
                graphs = {"tf": repeated(peer, count), "ours": repeated(ours, count)}
                calls = {key: lambda f=f, x=operands: wait(f(*x)) for key, f in graphs.items()}
                times = rounds(calls, options.rounds, options.clock)
                kept = quiet(times["tf"])
                row = {"op": name, "shape": list(shape), "kept": len(kept), "floor": floor}
                row.update({f"{key}_ms": min(t) * 1e3 / count for key, t in times.items()})
                row["ratio"] = median_ratio(times["tf"], times["ours"], kept)
                results.append(row)
                print(
                    f"{name:34s} {shape!s:13s} {row['ours_ms']:8.3f} ms, TensorFlow {row['tf_ms']:8.3f} ms: "
                    f"{row['ratio']:5.2f} (floor {floor}){'' if row['ratio'] >= floor else '  below'}",
                    flush=True,
                )
    print(save_cpu(options, tf.__version__, results))


if __name__ == "__main__":
    main()
