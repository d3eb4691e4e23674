"""Trains a dense and a block-sparse language model with equally many parameters on the same bytes, and compares them.

    make demo

The block-sparse one spends its weights on a state more than three times as wide, connected as a small world. Figures of
n-gram models on the same held-out text stand beside them; the picture shows a layout and both learning curves.
"""

import dataclasses
import os
import pathlib

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # the figures are the output, not the start-up log

from data import describe, ngram_bits_per_byte
from matplotlib.figure import Figure
from train import HELD_OUT, Options, Training, plot_curves

from blocksparse.topology import mixing_factor, plot_layout

OUT = pathlib.Path("out/demo")
DENSE = Options(layout="dense", width=360, epochs=2.0)
SPARSE = dataclasses.replace(DENSE, layout="watts_strogatz", width=1152, density=7 / 72, block_size=16)


def main():
    trainings = {"dense": Training(DENSE), "block-sparse": Training(SPARSE)}
    dense, sparse = trainings.values()
    print(f"text: {describe(dense.text)}; the last {HELD_OUT:.0%} are held out")
    print(f"{dense.updates} updates of {DENSE.batch} x {DENSE.steps} bytes for each model")
    for name, training in trainings.items():
        print(f"{name}: width {training.options.width}, {training.weights:,} weights in matrices")
    layouts = [sparse.products[name].layout for name in ("multiply", "add", "gates")]
    shares = ", ".join(f"{share:.0%}" for share in mixing_factor(layouts))
    print(f"block-sparse: after each product of a time step a unit has reached {shares} of the state\n")

    for training in trainings.values():
        training.run()

    held = dense.held
    ngrams = {
        f"order-{order} n-grams": ngram_bits_per_byte(dense.text, held.start, held.scored, order) for order in (1, 2)
    }
    prompt = bytes(sparse.text[held.start - 100 : held.start])
    print(f"\nthe block-sparse model goes on from {prompt[-40:].decode(errors='replace')!r}:\n")
    print(sparse.sample(prompt).decode(errors="replace"))

    print(f"\n{'':20}{'width':>8}{'parameters':>12}{'bytes/s':>10}{'seconds':>10}{'validation, bits per byte':>28}")
    for name, training in trainings.items():
        end = training.history[-1]
        print(
            f"{name:20}{training.options.width:8}{training.parameters:12,}{training.bytes_per_second:10,.0f}"
            f"{end['seconds']:10.0f}{end['valid']:28.3f}"
        )
    for name, bits in ngrams.items():
        print(f"{name:20}{bits:68.3f}")
    print(f"both models read {dense.history[-1]['bytes']:,} bytes; text: {describe(dense.text)}")

    OUT.mkdir(parents=True, exist_ok=True)
    figure = Figure(figsize=(12, 5), layout="constrained")
    left, right = figure.subplots(1, 2)
    plot_layout(sparse.products["multiply"].layout, axes=left)
    curves = {f"{name}, width {training.options.width}": training.history for name, training in trainings.items()}
    plot_curves(right, curves, ngrams)
    figure.savefig(OUT / "demo.png", dpi=120)
    print(f"picture: {OUT / 'demo.png'}")

    worse = [
        name for name, training in trainings.items() if not training.history[-1]["valid"] < ngrams["order-1 n-grams"]
    ]
    if worse:
        raise SystemExit(f"{' and '.join(worse)} did no better than order-1 n-grams")


if __name__ == "__main__":
    main()
