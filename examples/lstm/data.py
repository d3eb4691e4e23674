"""Text as bytes: where it comes from, how it is cut in batches, and what n-gram models make of it."""

import hashlib

import numpy as np

VOCABULARY = 256


def load_text(path=None):
    """The bytes of a file; by default of the English reference text that every CPython carries.

    Args:
      path: any file. None: all topics of `pydoc_data.topics` (what `help("for")` prints), in alphabetical order.

    Returns:
      uint8 array `[bytes]`, read-only.
    """
    if path is not None:
        with open(path, "rb") as file:
            return np.frombuffer(file.read(), np.uint8)
    from pydoc_data.topics import topics

    return np.frombuffer("\n".join(topics[name] for name in sorted(topics)).encode(), np.uint8)


def describe(text):
    """Length and hash: what a figure must be quoted with, as the default text differs between Python versions."""
    return f"{len(text):,} bytes, sha256 {hashlib.sha256(text).hexdigest()}"


class Batches:
    """Training text as parallel streams, each read from window to window, so that state is carried along.

    An epoch turns the text by a random amount, lays it out as `batch` streams of equal length, and reads them in
    windows of `steps` bytes. Everything follows from the seed and the number of the update: training resumes anywhere.

    Args:
      text: uint8 `[bytes]`.
      batch: number of streams.
      steps: bytes per window.
      seed: of the turns.

    Attributes:
      per_epoch: windows in an epoch.
    """

    def __init__(self, text, batch, steps, seed=0):
        self.text, self.batch, self.steps, self.seed = text, batch, steps, seed
        self.per_epoch = (len(text) - 1) // (batch * steps)
        if self.per_epoch < 1:
            raise ValueError(
                f"{len(text)} bytes of training text are too few for one batch of {batch} streams x {steps} bytes"
            )

    def __getitem__(self, update):
        """(inputs, targets, is_first): int32 `[batch, steps]` each, and whether streams start here."""
        epoch, window = divmod(update, self.per_epoch)
        turn = np.random.default_rng((self.seed, epoch)).integers(len(self.text))
        stream_length = self.per_epoch * self.steps
        first = turn + window * self.steps + stream_length * np.arange(self.batch)[:, None]
        window = self.text.take(first + np.arange(self.steps + 1), mode="wrap").astype(np.int32)
        return window[:, :-1], window[:, 1:], update % self.per_epoch == 0


class Held:
    """The held-out end of a text, as streams; each is led in by the window before it, which is not scored.

    Args:
      text: uint8 `[bytes]`, the whole text.
      start: where the held-out part starts.
      batch: number of streams.
      steps: bytes per window.

    Attributes:
      scored: how many bytes are predicted and scored: `text[start + 1 : start + 1 + scored]`.
    """

    def __init__(self, text, start, batch, steps):
        self.text, self.start, self.batch, self.steps = text, start, batch, steps
        self.windows = (len(text) - 1 - start) // (batch * steps)
        if self.windows < 1 or start < steps:
            raise ValueError(
                f"{len(text) - start} held-out bytes are too few for one batch of {batch} streams x {steps} bytes"
            )
        self.scored = self.windows * batch * steps

    def __iter__(self):
        """Yields (inputs, targets, is_scored), int32 `[batch, steps]` each."""
        first = self.start + self.windows * self.steps * np.arange(self.batch)[:, None]
        for index in range(-1, self.windows):
            window = self.text[first + index * self.steps + np.arange(self.steps + 1)].astype(np.int32)
            yield window[:, :-1], window[:, 1:], index >= 0


def ngram_bits_per_byte(text, start, scored, order):
    """What an n-gram model needs for held-out text, in bits per byte.

    Counts from `text[:start]`, interpolated down to the uniform distribution by the method of Witten and Bell (1991):
    after a context seen n times and followed by t different bytes, p(b) = (count(b) + t * p_shorter(b)) / (n + t).

    Args:
      text: uint8 `[bytes]`.
      start, scored: `text[start + 1 : start + 1 + scored]` is scored, as by `Held`.
      order: bytes of context, 0 to 2.
    """
    if not 0 <= order <= 2:
        raise ValueError(f"order must be 0, 1 or 2 (a table of 256^(order + 1) counts is kept), got {order}")
    places = np.arange(start + 1, start + 1 + scored)
    probability = np.full(scored, 1 / VOCABULARY)
    context_of_train = np.zeros(start, np.int64)  # of each byte of the training text, as one number
    context = np.zeros(scored, np.int64)
    for length in range(order + 1):
        if length:
            context_of_train = context_of_train[1:] + (text[: start - length].astype(np.int64) << 8 * (length - 1))
            context = context + (text[places - length].astype(np.int64) << 8 * (length - 1))
        counts = np.zeros((VOCABULARY**length, VOCABULARY), np.int32)
        np.add.at(counts, (context_of_train, text[length:start]), 1)
        seen = counts.sum(1)[context]
        types = np.count_nonzero(counts, axis=1)[context]
        longer = (counts[context, text[places]] + types * probability) / np.maximum(seen + types, 1)
        probability = np.where(seen > 0, longer, probability)
    return -np.log2(probability).mean()
