"""Embedding lookup and its dense gradient beside TensorFlow's gather, whose slices are made dense, on the CPU, in one
process; figures of a GPU come from bench/fused_gpu.py.

    python bench/embed.py [--clock cpu] [--rounds 7] [--json NAME]

A result is the median over rounds of TensorFlow's time by ours, each the best of a few calls.
"""

import argparse

import numpy as np
import tensorflow as tf
from _common import median_ratio, quiet, rounds, save_cpu

import blocksparse as bs

SHAPES = ((4096, 32000, 256), (16384, 256, 512))  # indices, rows, width


def draw(rng, kind, count, rows):
    if kind == "equal":
        return np.full(count, rows // 2)
    return np.minimum(rng.zipf(1.2, count), rows) - 1 if kind == "zipf" else rng.integers(rows, size=count)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall", help="cpu: on a machine others use, too")
    parser.add_argument("--json", default="embed_cpu.json", help="name of the result in bench/results/")
    options = parser.parse_args()
    tf.config.threading.set_intra_op_parallelism_threads(options.threads)
    rng, results = np.random.default_rng(0), []
    with tf.device("/cpu:0"):
        for dtype in (tf.float32, tf.bfloat16):
            for count, rows, width in SHAPES:
                for kind in ("uniform", "zipf", "equal"):
                    idx = tf.constant(draw(rng, kind, count, rows))
                    emb = tf.cast(tf.random.normal([rows, width]), dtype)
                    dy = tf.cast(tf.random.normal([count, width]), dtype)

                    def gradient(use_tf, emb=emb, idx=idx, dy=dy):
                        with tf.GradientTape() as tape:
                            tape.watch(emb)
                            y = bs.embedding_lookup(emb, idx, use_tf=use_tf)
                        return tape.gradient(y, emb, dy)

                    def lookup(use_tf, emb=emb, idx=idx):
                        return bs.embedding_lookup(emb, idx, use_tf=use_tf)

                    for part, function in (("lookup", lookup), ("lookup and gradient", gradient)):
                        graphs = {
                            n: tf.function(lambda u=u, f=function: f(u)) for n, u in (("tf", True), ("ours", False))
                        }
                        calls = {name: lambda g=graph: g() for name, graph in graphs.items()}
                        times = rounds(calls, options.rounds, options.clock)
                        kept = quiet(times["tf"])
                        row = {"op": f"{part}, {kind} indices", "dtype": dtype.name, "shape": [count, rows, width]}
                        row.update({"floor": 1.0, "kept": len(kept)})
                        row.update({f"{name}_ms": min(t) * 1e3 for name, t in times.items()})
                        row["ratio"] = median_ratio(times["tf"], times["ours"], kept)
                        results.append(row)
                        print(
                            f"{part:20s} {kind:8s} {dtype.name:9s} {count:6d} of {rows:6d} x {width:4d}  "
                            f"{row['ours_ms']:7.2f} ms, TensorFlow {row['tf_ms']:7.2f} ms: {row['ratio']:5.2f} times "
                            f"as fast ({len(kept)} rounds)",
                            flush=True,
                        )
    print(save_cpu(options, tf.__version__, results))


if __name__ == "__main__":
    main()
