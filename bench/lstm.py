"""The fused LSTM gates beside the cell written out in TensorFlow, on the CPU, in one process; figures of a GPU come
from bench/fused_gpu.py.

    python bench/lstm.py [--clock cpu] [--rounds 7] [--json NAME]

A result is the median over rounds of TensorFlow's time by ours, each the best of a few calls of a graph, in which small
gates stand several times.
"""

import argparse

import tensorflow as tf
from _common import median_ratio, quiet, repeated, rounds, save_cpu

import blocksparse as bs

SHAPES = ((64, 512), (128, 1024), (512, 2048))


def written_out(c, h, bias):
    i, u, f, o = tf.split(tf.nn.bias_add(h, tf.cast(bias, h.dtype)), 4, axis=1)
    c = tf.sigmoid(f + tf.cast(1.0, f.dtype)) * c + tf.sigmoid(i) * tf.tanh(u)
    return c, tf.sigmoid(o) * tf.tanh(c)


def fused(c, h, bias):
    return tuple(bs.fused_lstm_gates(c, h, bias=bias))


def with_gradient(gates):
    def function(c, h, bias):
        with tf.GradientTape() as tape:
            tape.watch([c, h, bias])
            y = gates(c, h, bias)
        return tape.gradient(y, [c, h, bias], [c, c])

    return function


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall", help="cpu: on a machine others use, too")
    parser.add_argument("--json", default="lstm_cpu.json", help="name of the result in bench/results/")
    options = parser.parse_args()
    tf.config.threading.set_intra_op_parallelism_threads(options.threads)
    tf.config.optimizer.set_experimental_options({"dependency_optimization": False})  # for `repeated`
    results = []
    with tf.device("/cpu:0"):
        for dtype in (tf.float32, tf.bfloat16, tf.float16):
            for rows, width in SHAPES:
                c, h = (tf.cast(tf.random.normal([rows, n * width]), dtype) for n in (1, 4))
                operands = c, h, tf.random.normal([4 * width])
                for part, wrap in (("forward", lambda f: f), ("forward and gradient", with_gradient)):
                    count = max(1, 500_000 // (rows * width))
                    ours, theirs = (repeated(wrap(gates), count) for gates in (fused, written_out))
                    calls = {name: lambda f=f, x=operands: f(*x) for name, f in (("tf", theirs), ("ours", ours))}
                    times = rounds(calls, options.rounds, options.clock)
                    kept = quiet(times["tf"])
                    row = {"op": f"gates, {part}", "dtype": dtype.name, "shape": [rows, width], "kept": len(kept)}
                    row["floor"] = 1.5
                    row.update({f"{name}_ms": min(t) * 1e3 / count for name, t in times.items()})
                    row["ratio"] = median_ratio(times["tf"], times["ours"], kept)
                    results.append(row)
                    print(
                        f"{part:21s} {dtype.name:9s} {rows:4d} x {width:4d}  {row['ours_ms']:7.2f} ms, TensorFlow "
                        f"{row['tf_ms']:7.2f} ms: {row['ratio']:5.2f} times as fast ({len(kept)} rounds)",
                        flush=True,
                    )
    print(save_cpu(options, tf.__version__, results))


if __name__ == "__main__":
    main()
