"""A Markdown table and a picture from a result of bench/matmul.py.

python bench/report.py bench/results/matmul_cpu_floors.json
"""

import argparse
import json
import pathlib

PRODUCTS = ("forward", "dx", "dw")


def table(document):
    """Speed-up over dense, one line for each product, batch, axis and block, one column for each density."""
    rows = document["rows"]
    densities = sorted({row["density"] for row in rows}, reverse=True)
    lines = [f"{_machine(document)}, TensorFlow {document['tensorflow']}, {document['date']}, {document['commit']}"]
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


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("json", type=pathlib.Path)
    path = parser.parse_args().json
    document = json.loads(path.read_text())
    path.with_suffix(".md").write_text(table(document))
    plot(document, path.with_suffix(".png"))
    print(f"wrote {path.with_suffix('.md')} and {path.with_suffix('.png')}")


if __name__ == "__main__":
    main()
