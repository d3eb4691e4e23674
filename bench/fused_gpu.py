"""Elementwise operators, norms, LSTM gates and the embedding on a GPU, timed beside PyTorch; needs PyTorch, not
TensorFlow.

    make kernels && python bench/fused_gpu.py [library.so] [output.json] [ewops] [norms] [lstm] [embed] [brief]

Percent is of 4.27 TB/s, what a large copy reaches on an H200, each byte counted once: every input read once, every
output written once. Each launch works on other buffers than the ones before it, gigabytes in all, so that nothing is
found in the cache; times include the launch. Families: all, if none is named; `brief` leaves PyTorch out.
"""

import functools
import pathlib
import sys
import time

import numpy as np
import torch
import torch.nn.functional as F
from _gpu import ROOT, Bench, graph_ms

sys.path.insert(0, str(ROOT / "test"))
import gpu_ewops
import gpu_lstm_embed
import gpu_norms
from gpu_ewops import BINARY, UNARY

OP = {name: code for code, name in enumerate(BINARY + UNARY)}
SHAPES = (8192, 4096), (16384, 8192)


def normal(shape, dtype):
    return torch.randn(shape, device="cuda", dtype=dtype)


def timed(bench, brief, op, dtype, shape, nbytes, make, floor=None):
    """make(): (ours, PyTorch's or None, what to keep), on new buffers."""
    made = [make() for _ in range(bench.sets(nbytes))]
    peers = None if brief or made[0][1] is None else [m[1] for m in made]
    bench.record(op, dtype, shape, nbytes, [m[0] for m in made], peers, floor)


def ewops(bench, k, brief):
    for dtype in (torch.float32, torch.bfloat16):
        for shape in SHAPES:
            elementwise(bench, k, brief, dtype, shape)
        indices(bench, k, brief, dtype)


def elementwise(bench, k, brief, dtype, shape):
    n = shape[0] * shape[1]
    size = n * dtype.itemsize

    def new():
        return normal(shape, dtype)

    def empty(dtype=dtype):
        return torch.empty(shape, device="cuda", dtype=dtype)

    def run(op, nbytes, make, floor):
        timed(bench, brief, op, dtype, shape, nbytes, make, floor)

    def copy():
        x, y = new(), empty()
        return lambda: y.copy_(x), None, None

    run("copy (PyTorch)", 2 * size, copy, None)
    large = shape == SHAPES[1]

    def binary(name, peer):
        def make():
            x, y, z = new(), new(), empty()
            return k.ew(OP[name], [x, y], [z]), lambda: peer(x, y, out=z)

        return make

    run("add", 3 * size, binary("add", torch.add), 88)
    if not large:
        run("divide", 3 * size, binary("divide", torch.div), 88)

        def divide_gradient():
            x, y, dz, dx, dy = new(), new(), new(), empty(), empty()
            return k.ew(OP["divide"], [dz, x, y], [dx, dy], gradient=True), None

        run("divide gradient", 5 * size, divide_gradient, 85)

    def unary(name):
        peers = {
            "exp": torch.exp, "log": torch.log, "sigmoid": torch.sigmoid, "tanh": torch.tanh,
            "gelu": lambda v: F.gelu(v, approximate="tanh"), "swish": F.silu, "elu": F.elu, "relu": F.relu,
        }  # fmt: skip
        alpha = 0.044715 if name == "gelu" else 1.0

        def make():
            x, z = new().abs_().add_(0.1), empty()
            return k.ew(OP[name], [x], [z], alpha=alpha), lambda: peers[name](x)

        def gradient():
            x, dz, dx = new(), new(), empty()
            return k.ew(OP[name], [dz, x], [dx], True, alpha), None

        run(name, 2 * size, make, 88)
        run(f"{name} gradient", 3 * size, gradient, 85)

    for name in ("gelu",) if large else ("relu", "exp", "log", "sigmoid", "tanh", "elu", "gelu", "swish"):
        unary(name)
    for to in (torch.float32, torch.float16, torch.bfloat16):
        if to != dtype:

            def cast(to=to):
                x, y = new(), empty(to)
                return k.cast(x, y), lambda: y.copy_(x)

            run(f"cast to {str(to)[6:]}", size + n * to.itemsize, cast, 88)

    def dropout():
        x, y, mask = new(), empty(), torch.empty(n // 32, device="cuda", dtype=torch.int32)
        return k.dropout(dtype, n, 0.7, (1, 2), mask, x, y), lambda: F.dropout(x, 0.3)

    def dropout_gradient():
        x, y = new(), empty()
        mask = torch.randint(-(2**31), 2**31, (n // 32,), device="cuda", dtype=torch.int32)
        return k.dropout(dtype, n, 0.7, (1, 2), mask, x, y, False), None

    run("dropout", 2 * size + n // 8, dropout, 88)
    run("dropout gradient", 2 * size + n // 8, dropout_gradient, 85)
    for axis in (1, 0):
        for act, name in enumerate(("bias", "bias relu", "bias fast_gelu")):

            def forward(act=act, axis=axis):
                x, y, b = new(), empty(), torch.randn(shape[axis], device="cuda")
                bb = b.to(dtype) if axis == 1 else b.to(dtype)[:, None]
                peer = [
                    lambda: x + bb,
                    lambda: F.relu(x + bb),
                    lambda: (v := x + bb) * torch.sigmoid(1.702 * v),
                ]
                return k.channel(dtype, shape, axis, act, x=x, y=y, bias=b), peer[act]

            def backward(act=act, axis=axis):
                dy, other, b = new(), new(), torch.randn(shape[axis], device="cuda")
                db = torch.empty_like(b)
                if act == 0:
                    return k.channel(dtype, shape, axis, dy=dy, dbias=db), lambda: dy.sum(1 - axis)
                other = {"y": other} if act == 1 else {"x": other}
                return k.channel(dtype, shape, axis, act, dy=dy, dx=empty(), bias=b, dbias=db, **other), None

            run(f"{name}, axis {axis}", 2 * size, forward, 88)
            run(f"{name}, axis {axis}, gradient", (1 if act == 0 else 3) * size, backward, 85)

        def gain_gradient(axis=axis):
            g, dg = (torch.randn(shape[axis], device="cuda") for _ in range(2))
            return k.channel(dtype, shape, axis, dy=new(), x=new(), dx=empty(), gain=g, dgain=dg), None

        run(f"gain, axis {axis}, gradient", 3 * size, gain_gradient, 85)


LAYER = [
    ((8192, 4096), 1), ((8192, 8192), 1), ((8192, 16384), 1), ((32768, 1024), 1),
    ((4096, 8192), 0), ((4096, 16384), 0), ((2048, 16384), 0), ((1024, 32768), 0), ((64, 512, 2048), 1),
]  # fmt: skip


def launch(k, args):
    return k.launch(
        args,
        lambda size: torch.empty(max(size, 1), dtype=torch.uint8, device="cuda"),
        lambda: torch.cuda.current_stream().cuda_stream,
    )


def addresses(**tensors):
    return {name: tensor.data_ptr() for name, tensor in tensors.items()}


def layer_norm(k, shape, axis, dtype, gradient, relu=False):
    outer, inner, features = int(np.prod(shape[:axis])), int(np.prod(shape[axis + 1 :])), shape[axis]
    x, out, dy = normal(shape, dtype), torch.empty(shape, device="cuda", dtype=dtype), None
    g, b, dg, db = (torch.randn(features, device="cuda") for _ in range(4))
    mean, residual, rstd = (torch.rand(outer * inner, device="cuda") for _ in range(3))
    args = {
        "relu": relu, "dtype": gpu_norms.DTYPES[str(dtype)[6:]], "epsilon": 1e-6, "outer": outer, "segments": 1,
        "features": features, "inner": inner,
        **addresses(x=x, gain=g, bias=b, mean=mean, residual=residual, rstd=rstd),
    }  # fmt: skip
    if gradient:
        dy = normal(shape, dtype)
        pointers = addresses(dy=dy, dx=out, dgain=dg, dbias=db)
        ours = launch(k, gpu_norms.LayerArgs(gradient=1, **args, **pointers))
    else:
        ours = launch(k, gpu_norms.LayerArgs(y=out.data_ptr(), **args))
    gt, bt = g.to(dtype), b.to(dtype)

    def forward():
        return F.layer_norm(x, (features,), gt, bt)

    def backward():
        which = (True, True, True)
        statistics = mean.view(outer, 1), rstd.view(outer, 1)
        return torch.ops.aten.native_layer_norm_backward(dy, x, (features,), *statistics, gt, bt, which)

    peer = (backward if gradient else forward) if axis == len(shape) - 1 and not relu else None
    return ours, peer, (x, out, dy, g, b, dg, db, mean, residual, rstd)


def batch_norm(k, shape, dtype, gradient=False, inference=False):
    x, out, dy = normal(shape, dtype), torch.empty(shape, device="cuda", dtype=dtype), None
    g, b, dg, db, mean, residual, variance = (torch.rand(shape[1], device="cuda") for _ in range(7))
    args = {
        "dtype": gpu_norms.DTYPES[str(dtype)[6:]], "epsilon": 1e-6, "outer": shape[0], "channels": shape[1],
        "inner": int(np.prod(shape[2:])), "inference": inference,
        **addresses(x=x, gain=g, bias=b, mean=mean, residual=residual, variance=variance),
    }  # fmt: skip
    if gradient:
        dy = normal(shape, dtype)
        ours = launch(k, gpu_norms.BatchArgs(gradient=1, **args, **addresses(dy=dy, dx=out, dgain=dg, dbias=db)))
    else:
        ours = launch(k, gpu_norms.BatchArgs(y=out.data_ptr(), **args))

    def forward():
        return F.batch_norm(x, mean, variance, g, b, training=not inference)

    def backward():
        which = (True, True, True)
        return torch.ops.aten.native_batch_norm_backward(dy, x, g, None, None, mean, variance, True, 1e-6, which)

    return ours, backward if gradient else forward, (x, out, dy, g, b, dg, db, mean, residual, variance)


def norms(bench, k, brief):
    for dtype in (torch.float32, torch.bfloat16):

        def run(op, shape, tensors, floor, make, dtype=dtype):
            nbytes = tensors * int(np.prod(shape)) * dtype.itemsize
            timed(bench, brief, op, dtype, shape, nbytes, make, floor)

        for shape, axis in LAYER:
            for relu in (False, True) if shape in ((8192, 4096), (4096, 8192)) else (False,):
                make = functools.partial(layer_norm, k, shape, axis, dtype, relu=relu)
                name = f"layer_norm{' relu' * relu}, axis {axis}"
                run(name, shape, 2, 82, functools.partial(make, False))
                run(f"{name}, gradient", shape, 3, 72, functools.partial(make, True))
        shape = (64, 256, 56, 56)
        make = functools.partial(batch_norm, k, shape, dtype)
        run("batch_norm", shape, 2, 60, make)
        run("batch_norm, gradient", shape, 3, 52, functools.partial(make, gradient=True))
        run("batch_norm, inference", shape, 2, None, functools.partial(make, inference=True))


def gates(k, shape, dtype, biased=False, four=False, gradient=False):
    rows, width = shape
    c, h, y, z = normal(shape, dtype), normal((rows, 4 * width), dtype), normal(shape, dtype), normal(shape, dtype)
    b = torch.randn(4 * width, device="cuda") if biased else None
    if four:
        h = [t.contiguous() for t in h.chunk(4, 1)]
    if gradient:
        d_h = [torch.empty_like(t) for t in h] if four else torch.empty_like(h)
        return k.gates(c, h, (torch.empty_like(c), d_h), b, (y, z), torch.empty_like(b) if biased else None), None

    def composed():
        i, u, f, o = (h + b).to(dtype).chunk(4, 1)
        n = torch.sigmoid(f + 1) * c + torch.sigmoid(i) * torch.tanh(u)
        return n, torch.sigmoid(o) * torch.tanh(n)

    return k.gates(c, h, (y, z), b), composed if biased else None


def lstm(bench, k, brief):
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for shape in ((8192, 4096), (16384, 2048)):
            size = shape[0] * shape[1] * dtype.itemsize
            for name, options in (("gates, bias", {"biased": True}), ("gates", {}), ("four gates", {"four": True})):
                make = functools.partial(gates, k, shape, dtype, **options)
                timed(bench, brief, name, dtype, shape, 7 * size, make, 85)
                make = functools.partial(make, gradient=True)
                timed(bench, brief, f"{name}, gradient", dtype, shape, 12 * size, make, 85)


def lookup(k, values, rows, width, dtype, gradient=False):
    index, table = torch.tensor(values, device="cuda"), normal((len(values) if gradient else rows, width), dtype)
    if gradient:
        dw = torch.empty(rows, width, device="cuda", dtype=dtype)
        peer = torch.ops.aten.embedding_dense_backward
        return k.embed(index, table, dw, rows, True), lambda: peer(table, index, rows, -1, False)
    y = torch.empty(len(values), width, device="cuda", dtype=dtype)
    return k.embed(index, table, y, rows), lambda: F.embedding(index, table)


def embed(bench, k, brief):
    rng = np.random.default_rng(0)
    for dtype in (torch.float32, torch.bfloat16):
        for shape in ((65536, 50304, 1024), (131072, 256, 512), (8192, 50304, 4096)):
            count, rows, width = shape
            for kind in ("uniform", "zipf", "equal"):
                values = gpu_lstm_embed.indices(rng, kind, count, rows)
                size, read = dtype.itemsize * width, len(np.unique(values))
                make = functools.partial(lookup, k, values, rows, width, dtype)
                timed(bench, brief, f"lookup, {kind}", dtype, shape, (count + read) * size + 8 * count, make, 80)
                if not brief:
                    make, nbytes = functools.partial(make, gradient=True), (count + rows) * size + 8 * count
                    timed(bench, brief, f"lookup gradient, {kind}", dtype, shape, nbytes, make)


def indices(bench, k, brief, dtype):
    outer, dim, inner = shape = (8192, 32, 128)
    size = outer * dim * inner * dtype.itemsize

    def operands(outer=outer, inner=inner):
        argmax = torch.randint(dim, (outer * inner,), device="cuda")
        return normal(shape, dtype), torch.empty(outer * inner, device="cuda", dtype=dtype), argmax

    def maximum():
        x, y, argmax = operands()
        return k.reduce_max(x, y, argmax, *shape), lambda: x.max(1)

    def maximum_gradient():
        x, y, argmax = operands()
        return k.reduce_max(y, x, argmax, *shape, gradient=True), None

    def gather_gradient():
        x, y, _ = operands()
        index = torch.randint(dim, (outer,), device="cuda", dtype=torch.int32)
        return k.fancy_gather(y, index, x, *shape, gradient=True), None

    timed(bench, brief, "reduce_max", dtype, shape, size + size // dim + 8 * outer * inner, maximum)
    timed(bench, brief, "reduce_max gradient", dtype, shape, size + size // dim + 8 * outer * inner, maximum_gradient)
    timed(bench, brief, "fancy_gather gradient", dtype, shape, size + size // dim, gather_gradient)


def small(bench, kernels, dtype):
    """Tensors under a megabyte: the time from one launch to the next, in a graph, on the same buffers."""
    shape = (256, 512)
    x, y, z = (normal(shape, dtype) for _ in range(3))
    b, db = torch.randn(512, device="cuda"), torch.empty(512, device="cuda")
    ew, lstm_embed = kernels["ewops"], kernels["lstm"]
    bb, kept = b.to(dtype), []
    cases = {"add": (ew.ew(OP["add"], [x, y], [z]), lambda: x + y)}
    cases["bias relu"] = ew.channel(dtype, shape, 1, 1, x=x, y=z, bias=b), lambda: F.relu(x + bb)
    cases["bias relu gradient"] = ew.channel(dtype, shape, 1, 1, dy=y, y=x, dx=z, bias=b, dbias=db), None
    for gradient in (False, True):
        ours, peer, *keep = layer_norm(kernels["norms"], shape, 1, dtype, gradient)
        kept.append(keep)
        cases["layer_norm" + " gradient" * gradient] = ours, peer
        cases["gates" + " gradient" * gradient] = gates(lstm_embed, (64, 512), dtype, True, gradient=gradient)
    for name, (ours, peer) in cases.items():
        row = {"op": f"small {name}", "dtype": str(dtype)[6:], "shape": list(shape), "us": 1e3 * graph_ms([ours] * 50)}
        if peer is not None:
            row["torch_us"] = 1e3 * graph_ms([peer] * 50)
        bench.rows.append(row)
        print(" ".join(f"{v:.2f}" if isinstance(v, float) else str(v) for v in row.values()), flush=True)


def main():
    start = time.time()
    library = next((a for a in sys.argv[1:] if a.endswith(".so")), ROOT / "build" / "libblocksparse_kernels.so")
    output = next((a for a in sys.argv[1:] if a.endswith(".json")), None)
    bench, brief = Bench(), "brief" in sys.argv
    if brief:
        bench.TOTAL = 1 << 30
    families = {"ewops": (ewops, gpu_ewops), "norms": (norms, gpu_norms)}
    families |= {"lstm": (lstm, gpu_lstm_embed), "embed": (embed, gpu_lstm_embed)}
    named = [name for name in families if name in sys.argv] or list(families)
    kernels = {name: module.Kernels(library) for name, (_, module) in families.items()}
    for name in named:
        families[name][0](bench, kernels[name], brief)
        print(f"-- {name}: {time.time() - start:.0f} s", flush=True)
    if len(named) == len(families):
        for dtype in (torch.float32, torch.bfloat16):
            small(bench, kernels, dtype)
    if output:
        bench.save(pathlib.Path(output))


if __name__ == "__main__":
    main()
