"""Normalization kernels on a GPU, timed beside PyTorch's: python3 bench/norms_gpu.py [library] [output.json]

Rates count each byte once: every input read once, every output written once. Percent is of 4.27 TB/s, what a copy
reaches on an H200. The second-level cache is flushed before each launch; median of the repeats. Small tensors are timed
in a graph of launches, where nothing waits for the host.
"""

import json
import pathlib
import sys
import time

import torch
import torch.nn.functional as F

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "test"))
from gpu_norms import DTYPES, ROOT, BatchArgs, Kernels, LayerArgs

PEAK = 4270.0  # GB/s
LAYER = [
    ((8192, 4096), 1), ((8192, 8192), 1), ((8192, 12288), 1), ((8192, 16384), 1), ((32768, 1024), 1),
    ((4096, 8192), 0), ((4096, 16384), 0), ((2048, 16384), 0), ((1024, 32768), 0), ((64, 512, 2048), 1),
]  # fmt: skip


def time_ms(function, repeats=11):
    function()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for start, end in events:
        time_ms.flush.zero_()
        start.record()
        function()
        end.record()
    torch.cuda.synchronize()
    return sorted(start.elapsed_time(end) for start, end in events)[repeats // 2]


def time_in_graph_us(function, launches=50):
    function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(launches):
            function()
    graph.replay()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(5):
        graph.replay()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / (5 * launches) * 1e6


def main():
    library = next((a for a in sys.argv[1:] if a.endswith(".so")), ROOT / "build" / "libblocksparse_kernels.so")
    output = next((a for a in sys.argv[1:] if a.endswith(".json")), None)
    kernels = Kernels(library)
    time_ms.flush = torch.empty(1 << 28, dtype=torch.uint8, device="cuda")
    results = []

    def launch(args):
        return kernels.launch(
            args,
            lambda size: torch.empty(max(size, 1), dtype=torch.uint8, device="cuda"),
            lambda: torch.cuda.current_stream().cuda_stream,
        )

    def record(name, dtype, shape, function, nbytes, peer=None):
        ms = time_ms(function)
        row = {"op": name, "dtype": dtype, "shape": list(shape), "ms": ms, "percent": nbytes / ms / 1e6 / PEAK * 100}
        if peer is not None:
            row["torch_ms"] = time_ms(peer)
        results.append(row)
        beside = f"torch {row['torch_ms'] / ms:5.2f}x" if peer else ""
        print(f"{name:28s} {dtype:9s} {shape!s:20s} {ms:.4f} ms {row['percent']:5.1f} % {beside}", flush=True)

    def layer(dtype, shape, axis, relu=False):
        outer, K, inner = 1, shape[axis], 1
        for n in shape[:axis]:
            outer *= n
        for n in shape[axis + 1 :]:
            inner *= n
        x, dy = (torch.randn(shape, device="cuda", dtype=getattr(torch, dtype)) for _ in range(2))
        out = torch.empty_like(x)
        g, b, dg, db = (torch.randn(K, device="cuda") for _ in range(4))
        stats = [torch.empty(outer * inner, device="cuda") for _ in range(3)]
        common = {
            "relu": relu, "dtype": DTYPES[dtype], "epsilon": 1e-6, "outer": outer, "segments": 1, "features": K,
            "inner": inner, "x": x.data_ptr(), "gain": g.data_ptr(), "bias": b.data_ptr(),
            **{name: v.data_ptr() for name, v in zip(("mean", "residual", "rstd"), stats)},
        }  # fmt: skip
        forward = launch(LayerArgs(y=out.data_ptr(), **common))
        backward = launch(
            LayerArgs(
                gradient=1, dy=dy.data_ptr(), dx=out.data_ptr(), dgain=dg.data_ptr(), dbias=db.data_ptr(), **common
            )
        )
        keep = (x, dy, out, g, b, dg, db, stats)
        return forward, backward, x, dy, g, b, x.numel() * x.element_size(), keep

    for dtype in ("float32", "bfloat16"):
        for shape, axis in LAYER:
            forward, backward, x, dy, g, b, size, keep = layer(dtype, shape, axis)
            peer = grad = None
            if axis == 1 and len(shape) == 2:
                gt, bt = g.to(x.dtype).requires_grad_(), b.to(x.dtype).requires_grad_()
                xt = x.clone().requires_grad_()
                y = F.layer_norm(xt, (shape[1],), gt, bt)

                def peer(xt=xt, gt=gt, bt=bt):
                    with torch.no_grad():
                        F.layer_norm(xt, gt.shape, gt, bt)

                def grad(y=y, xt=xt, gt=gt, bt=bt, dy=dy):
                    torch.autograd.grad(y, (xt, gt, bt), dy, retain_graph=True)

            record(f"layer_norm axis {axis}", dtype, shape, forward, 2 * size, peer)
            record(f"layer_norm axis {axis} gradient", dtype, shape, backward, 3 * size, grad)
            del keep, x, dy
        for relu_shape, axis in (((8192, 4096), 1), ((4096, 8192), 0)):
            forward, backward, *_, size, keep = layer(dtype, relu_shape, axis, relu=True)
            record(f"layer_norm relu axis {axis}", dtype, relu_shape, forward, 2 * size)
            record(f"layer_norm relu axis {axis} gradient", dtype, relu_shape, backward, 3 * size)
        shape = (64, 256, 56, 56)
        x, dy = (torch.randn(shape, device="cuda", dtype=getattr(torch, dtype)) for _ in range(2))
        out, size = torch.empty_like(x), x.numel() * x.element_size()
        g, b, *sums = (torch.randn(256, device="cuda") for _ in range(7))
        common = {
            "dtype": DTYPES[dtype], "epsilon": 1e-6, "outer": 64, "channels": 256, "inner": 3136, "x": x.data_ptr(),
            "gain": g.data_ptr(), "bias": b.data_ptr(),
            **{name: v.data_ptr() for name, v in zip(("mean", "residual", "variance"), sums)},
        }  # fmt: skip
        xt, gt, bt = x.clone().requires_grad_(), g.clone().requires_grad_(), b.clone().requires_grad_()
        y = F.batch_norm(xt, None, None, gt, bt, training=True)
        record(
            "batch_norm", dtype, shape, launch(BatchArgs(y=out.data_ptr(), **common)), 2 * size,
            lambda x=x, g=g, b=b: F.batch_norm(x, None, None, g, b, training=True),
        )  # fmt: skip
        gradient = {"gradient": 1, "dy": dy.data_ptr(), "dx": out.data_ptr()}
        gradient |= {"dgain": sums[3].data_ptr(), "dbias": sums[4].data_ptr()}
        record(
            "batch_norm gradient", dtype, shape, launch(BatchArgs(**gradient, **common)), 3 * size,
            lambda y=y, xt=xt, gt=gt, bt=bt, dy=dy: torch.autograd.grad(y, (xt, gt, bt), dy, retain_graph=True),
        )  # fmt: skip
        inference = launch(BatchArgs(inference=1, y=out.data_ptr(), **common))
        record("batch_norm inference", dtype, shape, inference, 2 * size)
        del x, dy, out, xt, y
        for shape, axis in (((64, 512), 1), ((256, 1024), 1), ((512, 256), 0)):
            forward, backward, x, dy, g, b, size, keep = layer(dtype, shape, axis)
            row = {"op": f"small layer_norm axis {axis}", "dtype": dtype, "shape": list(shape)}
            row |= {"us": time_in_graph_us(forward), "gradient_us": time_in_graph_us(backward)}
            if axis == 1:
                row["torch_us"] = time_in_graph_us(lambda: F.layer_norm(x, (shape[1],)))  # noqa: B023
            results.append(row)
            print({key: round(v, 2) if isinstance(v, float) else v for key, v in row.items()}, flush=True)
    if output:
        machine = torch.cuda.get_device_name()
        pathlib.Path(output).write_text(
            json.dumps({"machine": machine, "torch": torch.__version__, "results": results})
        )


if __name__ == "__main__":
    main()
