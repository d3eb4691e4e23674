"""Elementwise kernels on a GPU, timed beside PyTorch's; needs PyTorch, not TensorFlow.

    make kernels && python bench/ewops_gpu.py [library.so] [output.json]

Rates count each byte once: every input read once, every output written once. Percent is of 4.27 TB/s, what a copy
reaches on an H200.
"""

import json
import pathlib
import sys
import time

import torch
import torch.nn.functional as F

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "test"))
from gpu_ewops import BINARY, ROOT, UNARY, Kernels

PEAK = 4270.0  # GB/s
OP = {name: code for code, name in enumerate(BINARY + UNARY)}


class Timer:
    """Time of one launch within a graph, so that nothing waits for the host. Before each launch the second-level cache
    is filled by reading something else; what that takes by itself is subtracted."""

    LAUNCHES, REPEATS = 6, 7

    def __init__(self):
        self.other = torch.zeros(1 << 26, dtype=torch.int32, device="cuda")
        self.alone = self.replay_ms(None)

    def replay_ms(self, function):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(self.LAUNCHES):
                torch.amax(self.other)
                if function is not None:
                    function()
        times = []
        for _ in range(self.REPEATS + 1):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(end))
        return sorted(times[1:])[self.REPEATS // 2]

    def __call__(self, function):
        function()
        return (self.replay_ms(function) - self.alone) / self.LAUNCHES


def main():
    library = next((a for a in sys.argv[1:] if a.endswith(".so")), ROOT / "build" / "libblocksparse_kernels.so")
    output = next((a for a in sys.argv[1:] if a.endswith(".json")), None)
    k = Kernels(library)
    time_ms = Timer()
    results = []

    def record(name, dtype, shape, launch, nbytes, peer=None):
        ms = time_ms(launch)
        row = {"op": name, "dtype": str(dtype)[6:], "shape": list(shape), "ms": ms, "GBs": nbytes / ms / 1e6}
        row["percent"] = row["GBs"] / PEAK * 100
        if peer is not None:
            try:
                row["torch_ms"] = time_ms(peer)
            except RuntimeError as error:
                row["torch_error"] = str(error)[:100]
        results.append(row)
        peer_text = f" torch {row['torch_ms'] / ms:5.2f}x" if "torch_ms" in row else ""
        print(f"{name:28s} {row['dtype']:9s} {shape!s:14s} {ms:.4f} ms {row['percent']:5.1f} %{peer_text}", flush=True)

    def channels(dtype, shape, axis, x, y, z, dz, size):
        C = shape[axis]
        b, db, dg = (torch.randn(C, device="cuda") for _ in range(3))
        bb = b.to(dtype) if axis == 1 else b.to(dtype)[:, None]
        for act, name in enumerate(("bias", "bias relu", "bias fast_gelu")):
            peer = [lambda: x + bb, lambda: F.relu(x + bb), lambda: (v := x + bb) * torch.sigmoid(1.702 * v)][act]
            label = f"{name} axis {axis}"
            record(label, dtype, shape, k.channel(dtype, shape, axis, act, x=x, y=z, bias=b), 2 * size, peer)
            if act == 0:
                launch = k.channel(dtype, shape, axis, dy=dz, dbias=db)
                record(f"{label} gradient", dtype, shape, launch, size, lambda a=axis: dz.sum(1 - a))
            else:
                other = {"y": y} if act == 1 else {"x": x}
                launch = k.channel(dtype, shape, axis, act, dy=dz, dx=z, bias=b, dbias=db, **other)
                record(f"{label} gradient", dtype, shape, launch, 3 * size)
        record(f"gain axis {axis}", dtype, shape, k.channel(dtype, shape, axis, x=x, y=z, gain=b), 2 * size)
        launch = k.channel(dtype, shape, axis, dy=dz, x=x, dx=z, gain=b, dgain=dg)
        record(f"gain axis {axis} gradient", dtype, shape, launch, 3 * size)

    def large(dtype, shape, full):
        n = shape[0] * shape[1]
        x, y, dz = (torch.randn(shape, device="cuda", dtype=dtype) for _ in range(3))
        z, z2 = torch.empty_like(x), torch.empty_like(x)
        positive = x.abs() + 0.1
        size = n * x.element_size()
        record("copy (torch)", dtype, shape, lambda: z.copy_(x), 2 * size)
        for name in ("add", "multiply", "divide", "maximum") if full else ("add",):
            peer = {"add": torch.add, "multiply": torch.mul, "divide": torch.div, "maximum": torch.maximum}[name]
            record(name, dtype, shape, k.ew(OP[name], [x, y], [z]), 3 * size, lambda f=peer: f(x, y, out=z2))
        for name in ("multiply", "divide", "maximum") if full else ():
            record(f"{name} gradient", dtype, shape, k.ew(OP[name], [dz, x, y], [z, z2], gradient=True), 5 * size)
        for name in UNARY if full else ("gelu",):
            peer = {
                "exp": torch.exp, "log": torch.log, "sigmoid": torch.sigmoid, "tanh": torch.tanh, "sqrt": torch.sqrt,
                "reciprocal": torch.reciprocal, "negative": torch.neg,
            }.get(name)  # fmt: skip
            peer = {
                "relu": F.relu,
                "gelu": lambda v: F.gelu(v, approximate="tanh"),
                "swish": F.silu,
                "elu": F.elu,
            }.get(name, peer)
            alpha = 0.044715 if name == "gelu" else 1.0
            record(
                name, dtype, shape, k.ew(OP[name], [positive], [z], alpha=alpha), 2 * size,
                None if peer is None else lambda f=peer: f(positive),
            )  # fmt: skip
            record(f"{name} gradient", dtype, shape, k.ew(OP[name], [dz, positive], [z], True, alpha), 3 * size)
        record("filter", dtype, shape, k.ew(20, [x], [z], low=-65504.0, high=65504.0, infs=True, nans=True), 2 * size)
        for to in (torch.float32, torch.float16, torch.bfloat16):
            if to != dtype:
                out = torch.empty(shape, device="cuda", dtype=to)
                moved = size + n * out.element_size()
                record(f"cast to {str(to)[6:]}", dtype, shape, k.cast(x, out), moved, lambda o=out: o.copy_(x))
        if full:
            xs = [torch.randn(shape, device="cuda", dtype=dtype) for _ in range(8)]
            record("add_n of 8", dtype, shape, k.add_n(xs, z), 9 * size)
            del xs
        mask = torch.empty(n // 32, device="cuda", dtype=torch.int32)
        moved = 2 * size + n // 8
        record("dropout", dtype, shape, k.dropout(dtype, n, 0.7, (1, 2), mask, x, z), moved, lambda: F.dropout(x, 0.3))
        record("dropout gradient", dtype, shape, k.dropout(dtype, n, 0.7, (1, 2), mask, dz, z, False), moved)
        record("dropout mask", dtype, shape, k.dropout(dtype, n, 0.7, (1, 2), mask), n // 8)
        for axis in (1, 0):
            channels(dtype, shape, axis, x, y, z, dz, size)

    def indices(dtype):
        outer, dim, inner = 8192, 32, 128
        x = torch.randn(outer * dim * inner, device="cuda", dtype=dtype)
        size = x.numel() * x.element_size()
        y = torch.empty(outer * inner, device="cuda", dtype=dtype)
        argmax = torch.empty(outer * inner, device="cuda", dtype=torch.int64)
        shape = (outer, dim, inner)
        view = x.reshape(shape)
        record("reduce_max axis 1", dtype, shape, k.reduce_max(x, y, argmax, *shape), size, lambda: view.max(1))
        record("reduce_max gradient", dtype, shape, k.reduce_max(y, x, argmax, *shape, gradient=True), size)
        wide = (8192, 4096, 1)
        y1 = torch.empty(8192, device="cuda", dtype=dtype)
        a1 = torch.empty(8192, device="cuda", dtype=torch.int64)
        rows = x.reshape(8192, 4096)
        record("reduce_max last axis", dtype, wide, k.reduce_max(x, y1, a1, *wide), size, lambda: rows.max(1))
        index = torch.randint(0, dim, (outer,), device="cuda", dtype=torch.int32)
        record("fancy_gather gradient", dtype, shape, k.fancy_gather(y, index, x, *shape, gradient=True), size)

    def small(dtype, shape):  # time between launches in a graph, where nothing waits for the host
        xs, dys, zs = (torch.randn(shape, device="cuda", dtype=dtype) for _ in range(3))
        b, db = torch.randn(shape[1], device="cuda"), torch.randn(shape[1], device="cuda")
        bb = b.to(dtype)
        for name, launch, peer in (
            ("small add", k.ew(0, [xs, dys], [zs]), lambda: xs + dys),
            ("small bias relu", k.channel(dtype, shape, 1, 1, x=xs, y=zs, bias=b), lambda: F.relu(xs + bb)),
            (
                "small bias relu gradient",
                k.channel(dtype, shape, 1, 1, dy=dys, y=xs, dx=zs, bias=b, dbias=db),
                None,
            ),
        ):
            row = {"op": name, "dtype": str(dtype)[6:], "shape": list(shape)}
            for key, function in (("us", launch), ("torch_us", peer)):
                if function is None:
                    continue
                function()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    for _ in range(50):
                        function()
                graph.replay()
                torch.cuda.synchronize()
                start = time.perf_counter()
                for _ in range(5):
                    graph.replay()
                torch.cuda.synchronize()
                row[key] = (time.perf_counter() - start) / 250 * 1e6
            results.append(row)
            print({key: round(v, 2) if isinstance(v, float) else v for key, v in row.items()}, flush=True)

    for dtype in (torch.float32, torch.bfloat16):
        large(dtype, (8192, 4096), True)
        large(dtype, (16384, 8192), False)
        indices(dtype)
        for shape in ((64, 64), (256, 512), (512, 500)):
            small(dtype, shape)
    if output:
        machine = torch.cuda.get_device_name()
        pathlib.Path(output).write_text(
            json.dumps({"machine": machine, "torch": torch.__version__, "results": results})
        )


if __name__ == "__main__":
    main()
