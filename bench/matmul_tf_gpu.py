"""What TensorFlow adds to the product on a GPU: chains of products inside one `tf.function`, as a network has them,
beside the same chains through the C interface (which needs PyTorch) and beside `tf.matmul` of the dense weight.

    python bench/matmul_tf_gpu.py --json matmul_tf_gpu.json

Each chain goes through several weights in turn, so that none stays in the L2 cache. A product's time is the difference
between a long and a short chain over the number of products between them: what a call costs once drops out.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time

import _common
import numpy as np

SIZE, DENSITY, WEIGHTS = 12288, 0.1, 4
SHORT, LONG = 8, 48
BATCHES, BLOCKS = (4096, 64), (16, 32, 64, 128)


def per_product(run, prepare=lambda: None):
    """Seconds for each product; `run(count)` waits for a chain of so many, `prepare` comes before it untimed."""
    differences = []
    for _ in range(9):
        took = []
        for count in (SHORT, LONG):
            prepare()
            start = time.perf_counter()
            run(count)
            took.append(time.perf_counter() - start)
        differences.append((took[1] - took[0]) / (LONG - SHORT))
    return statistics.median(differences[2:])


def through_c(library):
    """`{(n, block): seconds}` of our products, with PyTorch's memory."""
    import torch
    from matmul_gpu import FORWARD, Matmul, load

    lib, times = load(library), {}
    for bsize in BLOCKS:
        matmul = Matmul(lib, _common.random_layout(SIZE // bsize, DENSITY), bsize, 1)
        scale = (DENSITY * SIZE) ** -0.5
        shape = (matmul.layout.blocks, bsize, bsize)
        ws = [scale * torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(WEIGHTS)]
        for n in BATCHES:
            x, *ys = [torch.randn(n, SIZE, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
            steps = [matmul.args(FORWARD, [ys[i % 2]], [ws[i % WEIGHTS]], ys[1 - i % 2]) for i in range(LONG)]

            def run(count, steps=steps, matmul=matmul):
                for args in steps[:count]:
                    matmul.run(args)
                torch.cuda.synchronize()

            def prepare(x=x, ys=ys):
                ys[0].copy_(x)  # or hundreds of products in a row would grow or shrink
                torch.cuda.synchronize()

            times[f"{n} {bsize}"] = per_product(run, prepare)
            assert 0.1 < ys[0].float().std() < 10
    return times


def through_tensorflow():
    import tensorflow as tf

    from blocksparse import BlocksparseMatMul

    def time_chain(product, ws, n):
        x = tf.random.normal([n, SIZE], dtype=tf.bfloat16)

        @tf.function
        def chain(x, ws, count):
            y = x
            for i in range(count):
                y = product(y, ws[i % WEIGHTS])
            return y[0, :8]

        for count in (SHORT, LONG):
            values = chain(x, ws, count).numpy().astype(np.float32)
            assert np.isfinite(values).all() and values.any()
        return per_product(lambda count: chain(x, ws, count).numpy())

    times = {}
    with tf.device("/GPU:0"):
        for bsize in BLOCKS:
            bsmm = BlocksparseMatMul(_common.random_layout(SIZE // bsize, DENSITY), bsize, 1)
            scale = (DENSITY * SIZE) ** -0.5
            ws = [tf.cast(scale * tf.random.normal(bsmm.w_shape), tf.bfloat16) for _ in range(WEIGHTS)]
            for n in BATCHES:
                times[f"{n} {bsize}"] = time_chain(bsmm, ws, n)
        ws = [tf.cast(SIZE**-0.5 * tf.random.normal([SIZE, SIZE]), tf.bfloat16) for _ in range(WEIGHTS)]
        for n in BATCHES:
            times[f"{n} dense"] = time_chain(tf.matmul, ws, n)
    return times, tf.__version__


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", default=str(_common.ROOT / "build" / "libblocksparse_kernels.so"))
    parser.add_argument("--torch-python", default=sys.executable, help="a Python that has PyTorch")
    parser.add_argument("--json", help="name of the result in bench/results/")
    parser.add_argument("--through-c", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.through_c:
        print(json.dumps(through_c(options.library)))
        return
    clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "LD_LIBRARY_PATH")}
    command = [options.torch_python, __file__, "--through-c", "--library", options.library]
    done = subprocess.run(command, capture_output=True, text=True, env=clean)
    if done.returncode:
        raise SystemExit(done.stderr)
    kernels = json.loads(done.stdout.splitlines()[-1])
    ours, version = through_tensorflow()
    rows = []
    for n in BATCHES:
        for bsize in BLOCKS:
            kernel, through = (times[f"{n} {bsize}"] * 1e6 for times in (kernels, ours))
            row = {"N": n, "block": bsize, "c_us": kernel, "tensorflow_us": through, "added_us": through - kernel}
            rows.append({k: round(v, 2) for k, v in (row | {"tf.matmul_us": ours[f"{n} dense"] * 1e6}).items()})
            print(rows[-1], flush=True)
    if options.json:
        gpu = _common._lines("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")
        about = {"what": f"bfloat16 forward products {SIZE} x {SIZE} at {DENSITY:.0%} in a tf.function"}
        about |= {"device": gpu[0] if gpu else "", "tensorflow": version, "date": time.strftime("%Y-%m-%d")}
        about["commit"] = os.environ.get("BLOCKSPARSE_COMMIT", "")
        _common.save(options.json, about | {"rows": rows})


if __name__ == "__main__":
    main()
