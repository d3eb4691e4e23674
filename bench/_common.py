"""What the benchmarks share: the machine they ran on, fair timing beside a peer, results as JSON."""

import functools
import json
import os
import pathlib
import platform
import statistics
import subprocess
import time

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"


def about(device, threads):
    """Where and when: what a reader needs to trust a figure."""
    model, caches = platform.processor(), {}
    for line in _lines("lscpu"):
        key, _, value = line.partition(":")
        if key == "Model name":
            model = value.strip()
        if "cache" in key:
            caches[key.strip()] = value.strip()
    return {
        "device": device,
        "cpu": model,
        "cores": os.cpu_count(),
        "threads": threads,
        "caches": caches,
        "commit": next(iter(_lines("git", "-C", str(ROOT), "rev-parse", "--short", "HEAD")), "unknown"),
        "date": time.strftime("%Y-%m-%d %H:%M"),
    }


def _lines(*command):
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    except (OSError, subprocess.CalledProcessError):
        return []


def last_level_cache_bytes():
    sizes = [0]
    for path in pathlib.Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text().strip()
        sizes.append(int(text[:-1]) * {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}[text[-1]])
    return max(sizes) or 32 << 20


class Scrubber:
    """Reads an array of twice the last-level cache, so that the next call finds none of its operands there."""

    def __init__(self):
        self.array = np.ones(last_level_cache_bytes() // 4, np.float64)

    def __call__(self):
        return float(self.array.sum())


# "cpu" counts the seconds this process computed, on all threads: figures from a machine that others use, too. It does
# not see a thread that waits, so it is no measure of how well two threads share the work.
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


def random_layout(blocks, density, seed=0):
    """Blocks at random, equally many in every column: what Blocked-ELL can hold, too."""
    rng = np.random.default_rng(seed)
    layout = np.zeros((blocks, blocks), bool)
    for column in layout.T:
        column[rng.choice(blocks, max(1, round(density * blocks)), replace=False)] = True
    return layout


def best(call, clock="wall", seconds=0.05, least=2, most=8, before=None):
    """The fastest of a few calls in seconds: `least` of them, more while they fit in the time."""
    now, fastest, spent, calls = CLOCKS[clock], float("inf"), 0.0, 0
    while calls < least or (spent < seconds and calls < most):
        if before is not None:
            before()
        start = now()
        call()
        took = now() - start
        fastest, spent, calls = min(fastest, took), spent + took, calls + 1
    return fastest


def rounds(calls, count, clock="wall", before=None):
    """Times of several calls in seconds, `{name: [time of each round]}`.

    In each round every call has its turn, so that what slows the machine down for a while slows all of them.
    """
    times = {name: [] for name in calls}
    for _ in range(count):
        for name, call in calls.items():
            times[name].append(best(call, clock, before=before))
    return times


def repeated(function, count):
    """`count` calls in one graph, one after another: the time of small ones is not that of calling a graph.

    Needs "dependency_optimization" off, which leaves out what only others wait for.
    """

    import tensorflow as tf

    @functools.partial(tf.function, autograph=False)
    def run(*operands):
        done = []
        for _ in range(count):
            with tf.control_dependencies(done):  # each call has its own, so that they are not found to be the same
                y = function(*operands)
                done = [tensor.op for tensor in tf.nest.flatten(y)]
        return y

    return run


def quiet(times, slack=1.2):
    """The rounds in which the peer (the dense product) ran near its best: in others the machine was busy elsewhere."""
    fastest = min(times)
    return [i for i, t in enumerate(times) if t <= slack * fastest]


def median_ratio(peer, ours, kept):
    """Median over the kept rounds of how many times faster ours was than the peer."""
    return statistics.median(peer[i] / ours[i] for i in kept)


def save(name, document):
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / name
    path.write_text(json.dumps(document, indent=1) + "\n")
    return path


def save_cpu(options, tensorflow, results):
    """The results of operators beside TensorFlow's on the CPU, by the options that these benchmarks share."""
    machine = about("cpu", options.threads) | {"tensorflow": tensorflow}
    return save(options.json, {"about": machine, "clock": options.clock, "results": results})
