"""Timing on a GPU by way of PyTorch: launches in a graph, each on other buffers, so that none finds its operands in the
cache and none waits for the host."""

import json
import pathlib
import subprocess
import time

import torch

ROOT = pathlib.Path(__file__).resolve().parent.parent
PEAK = 4270.0  # GB/s that a large copy reaches on an H200


def graph_ms(launches, replays=7):
    """Median time of one of the launches, all of them in a graph, one after another."""
    for launch in launches[:2]:
        launch()
    torch.cuda.synchronize()
    graph, kept = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        for launch in launches:
            kept.append(launch())  # or PyTorch would give the next one the same output
    times = []
    for _ in range(replays + 1):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return sorted(times[1:])[replays // 2] / len(launches)


class Bench:
    """Collects rows of a table: ours and PyTorch's time for each case."""

    TOTAL = 2 << 30  # bytes that the launches of one graph move: many times the cache

    def __init__(self):
        self.rows = []

    def sets(self, nbytes):
        return max(3, min(200, -(-self.TOTAL // nbytes)))

    def record(self, op, dtype, shape, nbytes, ours, peer=None, floor=None):
        """ours, peer: lists of launches that each move nbytes, counted once."""
        ms = graph_ms(ours)
        row = {"op": op, "dtype": str(dtype).removeprefix("torch."), "shape": list(shape), "ms": ms}
        row["percent"] = nbytes / ms / 1e6 / PEAK * 100
        if peer is not None:
            row["torch_ms"] = graph_ms(peer)
        if floor is not None:
            row["floor"] = floor
        self.rows.append(row)
        beside = f" torch {row['torch_ms'] / ms:5.2f}x" if peer else ""
        low = " LOW" if floor and row["percent"] < floor else ""
        print(f"{op:32s} {row['dtype']:9s} {shape!s:20s} {ms:.4f} ms {row['percent']:5.1f} %{beside}{low}", flush=True)

    def save(self, path):
        commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=ROOT)
        about = {
            "device": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "date": time.strftime("%Y-%m-%d %H:%M"),
            "commit": commit.stdout.strip() or "unknown",
            "peak_GBs": PEAK,
        }
        pathlib.Path(path).write_text(json.dumps({**about, "rows": self.rows}, indent=1) + "\n")
