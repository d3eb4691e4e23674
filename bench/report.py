"""A Markdown table and a picture from a result of bench/matmul.py, bench/matmul_gpu.py or bench/fused_gpu.py.

python bench/report.py bench/results/matmul_cpu_floors.json
"""

import argparse
import json
import math
import pathlib
import statistics

PRODUCTS = ("forward", "dx", "dw")


def table(document):
    """Speed-up over dense, one line for each product, batch, axis and block, one column for each density."""
    rows = document["rows"]
    densities = sorted({row["density"] for row in rows}, reverse=True)
    lines = [
        f"{_machine(document)}, TensorFlow {document['tensorflow']}, {document['date']}, {document.get('commit', '')}"
    ]
    if document["clock"] == "cpu":
        lines += ["", "Judged by CPU time, as others used the machine."]
    lines += ["", "Times as fast as dense `tf.matmul`, over all block sizes and layouts:", "", *ranges(rows)]
    lines += ["Case by case; in brackets with nothing in the caches. * : a busy machine.", ""]
    head = ["product", "dtype", "layout", "size", "N", "axis", "block", *(f"{100 * d:.3g} %" for d in densities)]
    lines += ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    keys = ("product", "dtype", "layout", "size", "n", "axis", "block")
    order = lambda key: (PRODUCTS.index(key[0]), *key[1:])  # noqa: E731
    for key in sorted({tuple(row[k] for k in keys) for row in rows}, key=order):
        found = {row["density"]: row for row in rows if tuple(row[k] for k in keys) == key}
        cells = [_cell(found[d]) if d in found else "" for d in densities]
        lines.append("| " + " | ".join(map(str, (*key, *cells))) + " |")
    return "\n".join(lines + _peers(rows)) + "\n"


def ranges(rows):
    """The span of speed-ups over block sizes (and layouts), one line for each product, dtype, batch and axis."""
    densities = sorted({row["density"] for row in rows}, reverse=True)
    lines = ["| product | dtype | N | axis | " + " | ".join(f"{100 * d:.3g} %" for d in densities) + " |"]
    lines += ["|" + " --- |" * (4 + len(densities))]
    keys = ("product", "dtype", "n", "axis")
    for key in sorted(
        {tuple(row[k] for k in keys) for row in rows}, key=lambda key: (PRODUCTS.index(key[0]), *key[1:])
    ):
        cells = list(map(str, key))
        for density in densities:
            found = [r["speedup"] for r in rows if r["density"] == density and tuple(r[k] for k in keys) == key]
            cells.append(
                " to ".join(f"{x:.1f}" if x < 10 else f"{x:.0f}" for x in (min(found), max(found))) if found else ""
            )
        lines.append("| " + " | ".join(cells) + " |")
    return lines + [""]


def _peers(rows):
    """Milliseconds of the rows that were timed beside sparse peers."""
    names = [
        name for name in ("ours", "dense", "scipy", "mkl") if any("scipy_ms" in r and f"{name}_ms" in r for r in rows)
    ]
    if not names:
        return []
    lines = ["", "Milliseconds; scipy and mkl: their block-sparse rows (BSR).", ""]
    lines += ["| layout | size | N | axis | block | density | " + " | ".join(names) + " |"]
    lines += ["|" + " --- |" * (6 + len(names))]
    for row in rows:
        if "scipy_ms" in row:
            case = [row[k] for k in ("layout", "size", "n", "axis", "block")] + [f"{100 * row['density']:.3g} %"]
            times = [f"{row[f'{name}_ms']:.3g}" for name in names]
            lines.append("| " + " | ".join(map(str, case + times)) + " |")
    return lines


def _machine(document):
    return f"{document['cpu']}, {document['threads']} thread{'s' * (document['threads'] > 1)}"


def _cell(row):
    text = f"{row['speedup']:.2f}" if row["speedup"] < 10 else f"{row['speedup']:.1f}"
    if "cold_speedup" in row:
        text += f" ({row['cold_speedup']:.1f})"
    return text + "*" * (row["kept"] < 3)


def plot(document, path):
    """Speed-up against density, one line a block size, one panel for each product and batch.

    Of the first row's dtype and layout; features last where both axes are there.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    first = document["rows"][0]
    axis = max(row["axis"] for row in document["rows"])
    chosen = {"dtype": first["dtype"], "layout": first["layout"], "axis": axis}
    rows = [row for row in document["rows"] if chosen.items() <= row.items()]
    panels = sorted(
        {(row["n"], row["product"]) for row in rows}, key=lambda panel: (panel[0], PRODUCTS.index(panel[1]))
    )
    across = max(1, len({product for _, product in panels}))
    down = -(-len(panels) // across)
    figure, axes = plt.subplots(down, across, figsize=(4 * across, 3.2 * down), squeeze=False, sharex=True)
    for axis, (n, product) in zip(axes.flat, panels):
        mine = [row for row in rows if (row["n"], row["product"]) == (n, product)]
        for bsize in sorted({row["block"] for row in mine}):
            line = sorted((100 * row["density"], row["speedup"]) for row in mine if row["block"] == bsize)
            axis.plot(*zip(*line), marker="o", markersize=3, label=f"block {bsize}")
        densities = sorted({100 * row["density"] for row in mine})
        axis.plot(densities, [100 / d for d in densities], "k:", linewidth=1, label="1 / density")
        axis.axhline(1, color="gray", linewidth=1)
        axis.set(xscale="log", yscale="log", title=f"{product}, N = {n}", xlabel="density, %")
        axis.set_xticks(densities, [f"{d:.3g}" for d in densities], minor=False)
        axis.minorticks_off()
    for row in axes:
        row[0].set_ylabel("times as fast as dense")
    axes[0][0].legend(fontsize=7)
    figure.suptitle(f"{_machine(document)}, {first['dtype']}", fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


PEERS = {"cublas": "cuBLAS, dense", "bsr": "PyTorch BSR", "bell": "cuSPARSE Blocked-ELL", "stk": "STK"}
CASE = ("product", "dtype", "C", "density", "layout", "N", "axis", "gated", "block")


def gpu_rows(document):
    """One row for each case: the median where a case was run several times."""
    repeats = {}
    for row in document["rows"]:
        repeats.setdefault(tuple(row[key] for key in CASE), []).append(row)
    rows = []
    for key, same in repeats.items():
        row = dict(zip(CASE, key)) | {"choice": same[-1].get("choice", "")}
        clocks = [r["mhz"] for r in same if r.get("mhz")]
        row["mhz"] = round(statistics.median(clocks)) if clocks else ""
        for name in ("ours", *PEERS):
            times = [r[f"{name}_us"] for r in same if f"{name}_us" in r]
            if times:
                row[f"{name}_us"] = statistics.median(times)
                row[f"{name}_tflops"] = statistics.median(r[f"{name}_tflops"] for r in same if f"{name}_us" in r)
        rows.append(row)
    return rows


def gpu_table(document):
    """Microseconds and TFLOP/s on present blocks, ours and the peers', and where sparse meets dense."""
    rows = gpu_rows(document)
    names = [name for name in ("ours", *PEERS) if any(f"{name}_us" in row for row in rows)]
    lines = [
        f"{document['device']}, driver {document['driver']}, CUDA {document['cuda']}, PyTorch {document['torch']}, "
    ]
    lines[0] += f"{document['date']}, {document.get('commit', '')}"
    lines += [
        "",
        "Microseconds (TFLOP/s on present blocks). The L2 cache was full of other data before each call; medians.",
        "",
    ]
    head = ["product", "dtype", "size", "density", "layout", "N", "axis", "gates", "block"]
    clocks = any(row["mhz"] for row in rows)
    head += ["ours", *(PEERS[name] for name in names if name != "ours"), *["MHz"] * clocks, "kernel"]
    lines += ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    for row in rows:
        cells = [*(row[key] for key in CASE[:7]), "yes" if row["gated"] else "", row["block"]]
        cells += [f"{row[f'{n}_us']:.1f} ({row[f'{n}_tflops']:.0f})" if f"{n}_us" in row else "" for n in names]
        cells += [*[row["mhz"]] * clocks, row["choice"]]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    meetings = gpu_breakeven(rows)
    if meetings:
        lines += ["", "The density up to which ours is faster than cuBLAS on the dense matrix (interpolated):", ""]
        lines += ["| size | N | block | density |", "| --- | --- | --- | --- |"]
        lines += [f"| {size} | {n} | {block} | {text} |" for (size, n, block), text in meetings.items()]
    return "\n".join(lines) + "\n"


def _by_density(rows):
    """{(size, N, block): [(density, times as fast as cuBLAS)]} of random layouts, forward."""
    lines = {}
    for row in rows:
        plain = row["product"] == "forward" and row["layout"] == "random" and not row["gated"] and row["axis"] == 1
        if plain and "cublas_us" in row and "ours_us" in row:
            key = row["C"], row["N"], row["block"]
            lines.setdefault(key, []).append((row["density"], row["cublas_us"] / row["ours_us"]))
    return {key: sorted(line) for key, line in sorted(lines.items()) if len(line) > 1}


def gpu_breakeven(rows):
    """{(size, N, block): text}"""
    found = {}
    for key, line in _by_density(rows).items():
        wins = [point for point in line if point[1] >= 1]
        later = [point for point in line if point[1] < 1 and wins and point[0] > wins[-1][0]]
        if not wins:
            found[key] = f"under {line[0][0]:.3g}"
        elif not later:
            found[key] = f"over {wins[-1][0]:.3g}"
        else:  # along a line in the logarithms of both
            (d0, s0), (d1, s1) = wins[-1], later[0]
            found[key] = f"{d0 * (d1 / d0) ** (math.log(s0) / math.log(s0 / s1)):.3g}"
    return found


def gpu_plot(document, path):
    """TFLOP/s against block size with the peers, and speed-up over cuBLAS against density."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = gpu_rows(document)
    bars = [r for r in rows if r["product"] == "forward" and r["layout"] == "random" and r["axis"] == 1]
    bars = [r for r in bars if r["dtype"] == "bf16" and not r["gated"] and "ours_us" in r]
    counts = {}
    for row in bars:
        counts.setdefault((row["C"], row["density"], row["N"]), []).append(row)
    panels = [(key, mine) for key, mine in counts.items() if len(mine) > 1 and any("bsr_us" in r for r in mine)][:3]
    lines = _by_density(rows)
    sweeps = list(dict.fromkeys((size, n) for size, n, _ in lines))[:6]
    if not panels and not sweeps:
        return False
    total = len(panels) + len(sweeps)
    across = min(3, total)
    figure, axes = plt.subplots(
        -(-total // across), across, figsize=(4.4 * across, 3.4 * -(-total // across)), squeeze=False
    )
    for axis in axes.flat[total:]:
        axis.set_visible(False)
    for axis, ((size, density, n), mine) in zip(axes.flat, panels):
        for name, label in ({"ours": "ours"} | PEERS).items():
            line = sorted((r["block"], r[f"{name}_tflops"]) for r in mine if f"{name}_us" in r)
            if line and name == "cublas":  # a dense product's worth on present blocks
                axis.axhline(statistics.median(v for _, v in line), color="gray", linewidth=1, label=label)
            elif line:
                axis.plot(*zip(*line), marker="o", markersize=3, label=label)
        axis.set(xscale="log", yscale="log", xlabel="block", ylabel="TFLOP/s on present blocks")
        axis.set_title(f"{size} x {size}, {100 * density:.3g} %, N = {n}", fontsize=9)
        axis.set_xticks(blocks := sorted({r["block"] for r in mine}), blocks)
        axis.minorticks_off()
        axis.legend(fontsize=7)
    for axis, (size, n) in zip(axes.flat[len(panels) :], sweeps):
        densities = set()
        for (s, m, block), line in lines.items():
            if (s, m) == (size, n):
                axis.plot(*zip(*((100 * d, v) for d, v in line)), marker="o", markersize=3, label=f"block {block}")
                densities |= {100 * d for d, _ in line}
        axis.axhline(1, color="gray", linewidth=1)
        axis.set(xscale="log", yscale="log", xlabel="density, %", ylabel="times as fast as cuBLAS, dense")
        axis.set_title(f"{size} x {size}, N = {n}", fontsize=9)
        axis.set_xticks(sorted(densities), [f"{d:.3g}" for d in sorted(densities)], fontsize=7)
        axis.minorticks_off()
        axis.legend(fontsize=7)
    figure.suptitle(f"{document['device']}, forward", fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    return True


def bandwidth_table(document):
    """Percent of the memory's rate and PyTorch's time by ours, one line for each case of bench/fused_gpu.py."""
    about = (document[key] for key in ("device", "torch", "date", "commit"))
    lines = ["{}, PyTorch {}, {}, {}".format(*about), "", *([document["note"], ""] if "note" in document else [])]
    lines += [f"Percent of {document['peak_GBs'] / 1e3:.2f} TB/s, each byte counted once. * : below the floor.", ""]
    lines += ["| operator | dtype | shape | us | percent | floor | times as fast as PyTorch |", "|" + " --- |" * 7]
    for row in document["rows"]:
        us, peer = row.get("us") or 1e3 * row["ms"], row.get("torch_us") or 1e3 * row.get("torch_ms", 0)
        percent = f"{row['percent']:.1f}" + "*" * (row["percent"] < row.get("floor", 0)) if "percent" in row else ""
        cells = [row["op"], row["dtype"], " x ".join(map(str, row["shape"])), f"{us:.1f}", percent]
        cells += [str(row.get("floor", "")), f"{peer / us:.2f}" if peer else ""]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def bandwidth_plot(document, path):
    """Percent of the memory's rate, a mark for each case, its floor and PyTorch."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = [row for row in document["rows"] if "percent" in row and row["percent"] > 10]
    dtypes = list(dict.fromkeys(row["dtype"] for row in rows))
    names = list(dict.fromkeys(row["op"] for row in rows))
    figure, axes = plt.subplots(1, len(dtypes), figsize=(4.5 * len(dtypes), 0.2 * len(names) + 1), sharey=True)
    for axis, dtype in zip(axes, dtypes):
        mine = [row for row in rows if row["dtype"] == dtype]
        at = [names.index(row["op"]) for row in mine]
        peers = [row["percent"] * row["ms"] / row["torch_ms"] if "torch_ms" in row else float("nan") for row in mine]
        axis.plot(peers, at, "x", color="tab:orange", markersize=4, label="PyTorch")
        axis.plot([row.get("floor", float("nan")) for row in mine], at, "|", color="gray", markersize=8, label="floor")
        axis.plot([row["percent"] for row in mine], at, "o", markersize=3, label="ours")
        axis.set(title=dtype, xlim=(0, 110), xlabel=f"% of {document['peak_GBs'] / 1e3:.2f} TB/s")
        axis.grid(axis="y", linewidth=0.3)
    axes[0].set_yticks(range(len(names)), names, fontsize=7)
    axes[0].set_ylim(len(names) - 0.5, -0.5)
    axes[0].legend(fontsize=7)
    figure.suptitle(f"{document['device']}, {document['date']}", fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def peer_table(document):
    """TensorFlow's time over ours, a line for each operator, largest shapes first."""
    about = document["about"]
    lines = [f"{_machine(about)}, TensorFlow {about['tensorflow']}, {about['date']}, {about['commit']}"]
    if document["clock"] == "cpu":
        lines += ["", "Judged by CPU time, as others used the machine."]
    lines += ["", "TensorFlow's time over ours; * : a busy machine. **Bold** is below what was asked for.", ""]
    lines += ["| operator | dtype | shape | ms | TensorFlow, ms | ratio | asked |", "|" + " --- |" * 7]
    for row in document["results"]:
        ratio = f"{row['ratio']:.2f}"
        ratio = (ratio if row["ratio"] >= row["floor"] else f"**{ratio}**") + "*" * (row["kept"] < 3)
        shape = " x ".join(map(str, row["shape"]))
        cells = (
            row["op"],
            row.get("dtype", ""),
            shape,
            f"{row['ours_ms']:.3f}",
            f"{row['tf_ms']:.3f}",
            ratio,
            row["floor"],
        )
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines) + "\n"


def peer_plot(document, path):
    """A bar for each operator, one panel for each group of shapes of one size."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    panels = list(dict.fromkeys((tuple(row["shape"]), row.get("dtype", "")) for row in document["results"]))
    down = -(-len(panels) // 2)
    most = max(sum((tuple(r["shape"]), r.get("dtype", "")) == panel for r in document["results"]) for panel in panels)
    figure, axes = plt.subplots(down, min(2, len(panels)), figsize=(12, down * (1 + 0.2 * most)), squeeze=False)
    for axis in axes.flat[len(panels) :]:
        axis.axis("off")
    for axis, (shape, dtype) in zip(axes.flat, panels):
        rows = [r for r in document["results"] if (tuple(r["shape"]), r.get("dtype", "")) == (shape, dtype)][::-1]
        colors = ["C0" if row["ratio"] >= row["floor"] else "C3" for row in rows]
        axis.barh([row["op"] for row in rows], [row["ratio"] for row in rows], color=colors)
        axis.plot([row["floor"] for row in rows], [row["op"] for row in rows], "k|")
        axis.set(title=f"{' x '.join(map(str, shape))} {dtype}", xlabel="times as fast as TensorFlow; | : asked")
        axis.axvline(1, color="gray", linewidth=1)
        axis.margins(y=0.01)
        axis.tick_params(axis="y", labelsize=7)
    figure.suptitle(_machine(document["about"]), fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=100)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("json", type=pathlib.Path)
    path = parser.parse_args().json
    document = json.loads(path.read_text())
    drawn = True
    if "peak_GBs" in document:
        path.with_suffix(".md").write_text(bandwidth_table(document))
        bandwidth_plot(document, path.with_suffix(".png"))
    elif "about" in document:
        path.with_suffix(".md").write_text(peer_table(document))
        peer_plot(document, path.with_suffix(".png"))
    elif document["device"] != "cpu":
        path.with_suffix(".md").write_text(gpu_table(document))
        drawn = gpu_plot(document, path.with_suffix(".png"))
    else:
        path.with_suffix(".md").write_text(table(document))
        plot(document, path.with_suffix(".png"))
    print(f"wrote {path.with_suffix('.md')}" + f" and {path.with_suffix('.png')}" * drawn)


if __name__ == "__main__":
    main()
