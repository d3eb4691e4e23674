"""Trains a byte-level language model with dense or block-sparse weights, on the CPU or a GPU.

    PYTHONPATH=. python examples/lstm/train.py --layout watts_strogatz --width 1152 --density 0.1
    PYTHONPATH=. python examples/lstm/train.py --resume

Prints validation bits per byte and a sample of text; writes checkpoints and the learning curve below --out. A resumed
run gives the same bits as one that was never interrupted.
"""

import argparse
import dataclasses
import json
import math
import pathlib
import statistics
import time

import keras
import numpy as np
import tensorflow as tf
from data import VOCABULARY, Batches, Held, describe, load_text
from model import LanguageModel, make_products
from tqdm import tqdm

from blocksparse.topology import TOPOLOGIES

HELD_OUT = 0.1  # the end of the text is kept for validation


@dataclasses.dataclass(frozen=True)
class Options:
    """All that a training run follows from, together with the text. The command line explains each."""

    data: str | None = None
    layout: str = "watts_strogatz"
    width: int = 1152
    density: float = 0.1
    block_size: int = 16
    internal_steps: int = 2
    embedding: int = 64
    axis: int = 1
    precision: str = "float32"
    batch: int = 64
    steps: int = 32
    epochs: float = 4.0
    learning_rate: float = 4e-3
    evaluations: int = 10
    seed: int = 0


class Training:
    """A model, its optimizer, and its place in the text.

    Args:
      options: Options.
      directory: where checkpoints are kept, or None.

    Attributes:
      updates: how many the whole training takes; `done` of them are behind.
      weights: number of weights in the model's matrices. parameters: of all trainable numbers.
      history: one dict for each evaluation: updates, bytes, seconds (of training alone), and bits per byte: train (the
        mean since the evaluation before) and valid.
    """

    def __init__(self, options, directory=None):
        self.options = options
        self.text = load_text(options.data)
        start = round(len(self.text) * (1 - HELD_OUT))
        self.batches = Batches(self.text[:start], options.batch, options.steps, options.seed)
        self.held = Held(self.text, start, options.batch, options.steps)
        self.updates = math.ceil(options.epochs * self.batches.per_epoch)

        self.products = make_products(
            options.width,
            options.internal_steps,
            options.layout,
            options.density,
            options.block_size,
            options.embedding,
            options.axis,
            options.seed,
        )
        self.model = LanguageModel(self.products, options.internal_steps, options.precision, options.seed)
        self.weights = sum(math.prod(weight.shape) for weight in self.model.weights.values())
        self.parameters = sum(math.prod(variable.shape) for variable in self.model.trainable_variables)

        warmup = self.updates // 20
        rate = keras.optimizers.schedules.CosineDecay(
            0.0, self.updates - warmup, warmup_target=options.learning_rate, warmup_steps=warmup
        )
        self.optimizer = keras.optimizers.Adam(rate, beta_2=0.99, global_clipnorm=1.0)
        if options.precision == "float16":  # cannot hold gradients as small as they come
            self.optimizer = keras.optimizers.LossScaleOptimizer(self.optimizer)
        self.optimizer.build(self.model.trainable_variables)

        self.state = [tf.Variable(part, trainable=False) for part in self.model.zero_state(options.batch)]
        self.done = tf.Variable(0)
        self.seconds = tf.Variable(0.0, dtype=tf.float64)
        self.history, self.losses, self.durations = [], [], []
        self.checkpoints = directory and tf.train.CheckpointManager(
            tf.train.Checkpoint(
                model=self.model, optimizer=self.optimizer, state=self.state, done=self.done, seconds=self.seconds
            ),
            directory,
            max_to_keep=2,
        )

    def run(self, stop=None):
        """Trains on, to the end or to the given number of updates; evaluates on the way, and then saves.

        Returns:
          The history.
        """
        stop = self.updates if stop is None else min(stop, self.updates)
        evaluations = self.options.evaluations
        evaluate_at = {round(self.updates * part / evaluations) for part in range(1, evaluations + 1)}
        with tqdm(total=self.updates, initial=int(self.done), desc=self.options.layout, unit="update") as bar:
            for update in range(int(self.done), stop):
                began = time.perf_counter()
                self.losses.append(float(self._update(*self.batches[update])))
                self.durations.append(time.perf_counter() - began)
                self.seconds.assign_add(self.durations[-1])
                self.done.assign_add(1)
                recent = statistics.mean(self.losses[-20:])
                bar.set_postfix_str(f"loss {recent:.3f}, {recent / math.log(2):.3f} bits per byte", refresh=False)
                bar.update()
                if update + 1 in evaluate_at:
                    self._record()
        return self.history

    @property
    def bytes_per_second(self):
        """Speed of training: of the median update since the start or the last restore, which leaves out its first."""
        return self.options.batch * self.options.steps / statistics.median(self.durations)

    def _record(self):
        done = int(self.done)
        self.history.append(
            {
                "updates": done,
                "bytes": done * self.options.batch * self.options.steps,
                "seconds": float(self.seconds),
                "train": statistics.mean(self.losses) / math.log(2),
                "valid": self.evaluate(),
            }
        )
        self.losses.clear()
        if self.checkpoints:
            path = self.checkpoints.save(done)
            pathlib.Path(f"{path}.history.json").write_text(json.dumps(self.history, indent=1))

    def restore(self):
        """Goes back to the last checkpoint."""
        path = self.checkpoints.restore_or_initialize()
        if path is None:
            raise FileNotFoundError(f"no checkpoint in {self.checkpoints.directory}")
        self.losses.clear()
        self.history = json.loads(pathlib.Path(f"{path}.history.json").read_text())

    @tf.function(autograph=False)
    def _step(self, inputs, targets):
        with tf.GradientTape() as tape:
            logits, state = self.model(inputs, tuple(self.state))
            loss = cross_entropy(logits, targets)
            scaled = self.optimizer.scale_loss(loss)
        variables = self.model.trainable_variables
        self.optimizer.apply(tape.gradient(scaled, variables), variables)
        for variable, value in zip(self.state, state):
            variable.assign(value)
        return loss

    def _update(self, inputs, targets, is_first):
        if is_first:
            for part in self.state:
                part.assign(tf.zeros_like(part))
        return self._step(tf.constant(inputs), tf.constant(targets))

    @tf.function(autograph=False)
    def _predict(self, inputs, state):
        return self.model(inputs, state)

    def evaluate(self):
        """Bits per byte on held-out text."""
        state = self.model.zero_state(self.options.batch)
        losses = []
        for inputs, targets, is_scored in self.held:
            logits, state = self._predict(tf.constant(inputs), state)
            if is_scored:
                losses.append(float(cross_entropy(logits, targets)))
        return statistics.mean(losses) / math.log(2)

    def sample(self, prompt, length=400, temperature=0.7):
        """Text that the model goes on to write, byte by byte.

        Args:
          prompt: bytes to begin with, at least 1.
          length: bytes to write.
          temperature: below 1 prefers what is likely; seldom wrong, less varied.

        Returns:
          The bytes written.
        """
        random = np.random.default_rng(self.options.seed)
        state = self.model.zero_state(1)
        written = list(prompt)
        for place in range(len(prompt) + length - 1):
            logits, state = self._predict(tf.constant([[written[place]]]), state)
            if place + 1 >= len(prompt):
                probability = tf.nn.softmax(tf.cast(logits[0], tf.float64) / temperature)
                written.append(int(random.choice(VOCABULARY, p=probability / np.sum(probability))))
        return bytes(written[len(prompt) :])


def cross_entropy(logits, targets):
    """Mean over a window, in nats: logits `[steps * batch, 256]` as the model gives them, targets `[batch, steps]`."""
    labels = tf.reshape(tf.transpose(targets), [-1])
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))


def plot_curves(axes, histories, baselines=None):
    """Draws bits per byte against bytes read.

    Args:
      axes: matplotlib axes.
      histories: label -> history of a Training.
      baselines: label -> bits per byte, drawn as level lines.
    """
    for label, history in histories.items():
        scanned = [entry["bytes"] / 1e6 for entry in history]
        (line,) = axes.plot(scanned, [entry["valid"] for entry in history], "o-", label=f"{label}, validation")
        axes.plot(
            scanned, [entry["train"] for entry in history], ":", color=line.get_color(), label=f"{label}, training"
        )
    for label, bits in (baselines or {}).items():
        axes.axhline(bits, color="grey", linewidth=0.8)
        axes.annotate(label, (0.99, bits), xycoords=("axes fraction", "data"), ha="right", va="bottom", color="grey")
    axes.set_xlabel("MB read")
    axes.set_ylabel("bits per byte")
    axes.legend()


def parse(arguments=None):
    """(Options, namespace with out and resume) from the command line."""
    default = Options()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)

    def option(name, help, **kwargs):
        value = getattr(default, name)
        kind = {} if "choices" in kwargs or value is None else {"type": type(value)}
        parser.add_argument(
            f"--{name.replace('_', '-')}", default=value, help=f"{help} (default: {value})", **kind, **kwargs
        )

    option("data", "file to learn, any bytes; None: the reference text that comes with Python")
    option("layout", "dense, or the topology of block-sparse weights", choices=["dense", *TOPOLOGIES])
    option("width", "units of the state")
    option("density", "share of the recurrent weights' blocks that are present; input and output get its square root")
    option("block_size", "8, 16, 32, 64 or 128")
    option("internal_steps", "steps that mix the state before the gates, at least 2")
    option("embedding", "features that stand for a byte")
    option("axis", "feature axis of activations", choices=[0, 1], type=int)
    option("precision", "of products; all else is float32", choices=["float32", "bfloat16", "float16"])
    option("batch", "streams of text read side by side")
    option("steps", "bytes of each stream that an update looks at")
    option("epochs", "passes over the training text")
    option("learning_rate", "of Adam at its peak; rises over the first twentieth, then falls to 0 along a cosine")
    option("evaluations", "how often to evaluate, and save, over the whole training")
    option("seed", "of weights, layouts, order and sample")
    parser.add_argument(
        "--out", default="out/lstm", help="directory for checkpoints and picture (default: %(default)s)"
    )
    parser.add_argument(
        "--resume", action="store_true", help="go on from the last checkpoint in --out, with its options"
    )
    given = parser.parse_args(arguments)
    return Options(**{field.name: getattr(given, field.name) for field in dataclasses.fields(Options)}), given


def main(arguments=None):
    options, given = parse(arguments)
    out = pathlib.Path(given.out)
    saved = out / "options.json"
    if given.resume:
        options = Options(**json.loads(saved.read_text()))
    elif saved.exists():
        raise SystemExit(f"{out} holds a training run: --resume goes on with it, --out names another place")
    training = Training(options, str(out))
    if given.resume:
        training.restore()
    else:
        out.mkdir(parents=True, exist_ok=True)
        saved.write_text(json.dumps(dataclasses.asdict(options), indent=1))
    print(f"text: {describe(training.text)}; the last {HELD_OUT:.0%} are held out")
    print(f"{options.layout}, width {options.width}: {training.weights:,} weights, {training.parameters:,} parameters")

    history = training.run()
    prompt = bytes(training.text[training.held.start - 100 : training.held.start])
    print(f"validation: {history[-1]['valid']:.4f} bits per byte")
    print(f"sample:\n{training.sample(prompt).decode(errors='replace')}")

    from matplotlib.figure import Figure

    figure = Figure(layout="constrained")
    plot_curves(figure.add_subplot(), {options.layout: history})
    figure.savefig(out / "curve.png")
    print(f"learning curve: {out / 'curve.png'}")


if __name__ == "__main__":
    tf.config.experimental.enable_op_determinism()  # on a GPU the same bits need it for TensorFlow's cross-entropy
    main()
