"""The examples: their gradients, their data, exact resuming, and that each runs."""

import dataclasses
import importlib.util
import pathlib
import sys

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.framework.config import disable_op_determinism

EXAMPLES = pathlib.Path(__file__).parent.parent / "examples"
sys.path.insert(0, str(EXAMPLES / "lstm"))

import data  # noqa: E402
import demo  # noqa: E402
import model  # noqa: E402
import train  # noqa: E402

TINY = train.Options(width=32, density=0.5, block_size=8, embedding=8, batch=6, steps=2, epochs=1.0, evaluations=4)


@pytest.fixture
def text_file(rng, tmp_path):
    """192 bytes to train on and 22 held out: 16 updates of TINY."""
    path = tmp_path / "text"
    path.write_bytes(rng.choice(np.frombuffer(b"abcd", np.uint8), 214).tobytes())
    return str(path)


def plain_unroll(step, products, inputs, state, weights, parameters):
    """What `model.unroll` computes, left to automatic differentiation."""
    outputs = []
    for now in tf.unstack(inputs):
        state = step(lambda name, x: products[name](x, weights[name]), now, state, parameters)
        outputs.append(state[0])
    return outputs, state


@pytest.mark.parametrize("wrap", [lambda f: f, tf.function(autograph=False)], ids=["eager", "function"])
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("layout", ["dense", "watts_strogatz"])
@pytest.mark.usefixtures("true_float32")
def test_grouped_gradient_is_that_of_plain_differentiation(rng, monkeypatch, layout, axis, wrap):
    products = model.make_products(32, 3, layout, density=0.75, block_size=8, embedding=8, axis=axis)
    net = model.LanguageModel(products, internal_steps=3)
    state = tuple(tf.constant(rng.standard_normal(part.shape), tf.float32) for part in net.zero_state(2))
    inputs, targets = (tf.constant(rng.integers(256, size=(2, 3)), tf.int32) for _ in range(2))

    def gradients(state):
        with tf.GradientTape() as tape:
            tape.watch(state)
            logits, (h, c) = net(inputs, state)
            loss = train.cross_entropy(logits, targets) + tf.reduce_sum(h * h) + tf.reduce_sum(tf.sin(c))
        return [tf.convert_to_tensor(dx) for dx in tape.gradient(loss, [*net.trainable_variables, *state])]

    grouped = wrap(gradients)(state)
    monkeypatch.setattr(model, "unroll", plain_unroll)
    plain = gradients(state)
    assert len(grouped) == len(plain) > len(products)
    for ours, theirs in zip(grouped, plain):
        error = np.linalg.norm(ours - theirs) / np.linalg.norm(theirs)
        assert error < 1e-6, error  # sums of a few terms in another order


def test_block_sparse_model_has_as_many_weights_as_its_dense_equal():
    sparse = model.make_products(128, 4, "balanced_random", density=1 / 16, block_size=8)
    dense = model.make_products(32, 4)
    assert sparse.keys() == dense.keys()
    for name in dense:
        assert np.prod(sparse[name].w_shape) == np.prod(dense[name].w_shape), name


@pytest.mark.parametrize(
    "change, message",
    [
        ({"internal_steps": 1}, "internal_steps must be at least 2, got 1"),
        ({"density": None}, "needs a density"),
        ({"block_size": 24}, "block_size must divide width, embedding and 256"),
        ({"layout": "lattice"}, "topology must be one of .*, got 'lattice'"),
    ],
)
def test_bad_models(change, message):
    good = {"width": 32, "internal_steps": 2, "layout": "random", "density": 0.5, "block_size": 8, "embedding": 8}
    with pytest.raises(ValueError, match=message):
        model.make_products(**good | change)


def test_batches_read_every_byte_of_every_stream_in_turn(rng):
    text = rng.integers(256, size=103).astype(np.uint8)
    batches = data.Batches(text, batch=4, steps=5, seed=1)
    assert batches.per_epoch == 5
    for epoch in range(2):
        inputs, targets, first = zip(*(batches[epoch * 5 + window] for window in range(5)))
        assert list(first) == [True, False, False, False, False]
        read = np.concatenate(inputs, axis=1).reshape(-1)  # 100 bytes in a row, from wherever the epoch starts
        turn = next(turn for turn in range(103) if (np.roll(text, -turn)[:100] == read).all())
        assert (np.concatenate(targets, axis=1).reshape(-1) == np.roll(text, -turn)[1:101]).all()
    with pytest.raises(ValueError, match="too few for one batch of 4 streams x 26 bytes"):
        data.Batches(text, batch=4, steps=26)


def test_held_out_text_is_scored_once(rng):
    text = rng.integers(256, size=200).astype(np.uint8)
    held = data.Held(text, start=120, batch=3, steps=5)
    inputs, targets, scored = zip(*held)
    assert list(scored) == [False] + [True] * 5 and held.scored == 75
    assert (np.concatenate(targets[1:], axis=1).reshape(-1) == text[121:196]).all()
    streams = np.concatenate(inputs, axis=1)  # each after the bytes before it
    assert all((stream == text[115 + 25 * index :][:30]).all() for index, stream in enumerate(streams))


def test_ngrams_against_a_plain_loop(rng):
    text = rng.choice(np.frombuffer(b"abc", np.uint8), 120, p=[0.6, 0.3, 0.1])
    start, scored = 80, 30

    def probability(byte, context):
        following = [text[i] for i in range(len(context), start) if (text[i - len(context) : i] == context).all()]
        shorter = probability(byte, context[1:]) if len(context) else 1 / 256
        types = len(set(following))
        return (following.count(byte) + types * shorter) / (len(following) + types) if following else shorter

    for order in range(3):
        places = range(start + 1, start + 1 + scored)
        bits = [-np.log2(probability(text[place], text[place - order : place])) for place in places]
        assert data.ngram_bits_per_byte(text, start, scored, order) == pytest.approx(np.mean(bits), rel=1e-12)
    with pytest.raises(ValueError, match="order must be 0, 1 or 2"):
        data.ngram_bits_per_byte(text, start, scored, 3)


def test_default_text():
    text = data.load_text()
    assert len(text) > 300_000 and b"lambda" in text.tobytes()
    assert "bytes, sha256" in data.describe(text)


@pytest.fixture
def deterministic():
    """On a GPU, TensorFlow's cross-entropy has no one order of additions otherwise."""
    tf.config.experimental.enable_op_determinism()
    yield
    disable_op_determinism()


@pytest.mark.usefixtures("deterministic")
def test_resumed_training_gives_the_same_bits(text_file, tmp_path):
    options = dataclasses.replace(TINY, data=text_file)
    straight = train.Training(options, str(tmp_path))
    assert straight.updates == 16
    straight.run(stop=10)  # saved after updates 4 and 8
    resumed = train.Training(options, str(tmp_path))
    resumed.restore()
    assert int(resumed.done) == 8
    straight.run()
    resumed.run()
    for ours, theirs in zip(resumed.model.trainable_variables, straight.model.trainable_variables):
        np.testing.assert_array_equal(ours, theirs)
    untimed = [[{**entry, "seconds": None} for entry in training.history] for training in (resumed, straight)]
    assert untimed[0] == untimed[1] and len(untimed[0]) == 4


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_training_in_reduced_precision_learns(text_file, precision):
    options = dataclasses.replace(
        TINY, data=text_file, precision=precision, epochs=4.0, evaluations=2, learning_rate=0.02
    )
    history = train.Training(options).run()
    assert history[-1]["train"] < 3  # 8 before it learns, 2 when it knows that there are four letters


def test_command_line(text_file, tmp_path, capsys):
    out = tmp_path / "out"
    tiny = "--width 32 --density 0.5 --block-size 8 --embedding 8 --batch 6 --steps 2 --epochs 0.3 --evaluations 1"
    train.main([*tiny.split(), "--data", text_file, "--out", str(out)])
    printed = capsys.readouterr().out
    assert "text: 214 bytes, sha256" in printed and "validation:" in printed and "sample:" in printed
    assert (out / "curve.png").stat().st_size > 0
    with pytest.raises(SystemExit, match="--resume goes on with it"):
        train.main(["--out", str(out)])
    assert train.parse(["--internal-steps", "4", "--layout", "random"])[0] == dataclasses.replace(
        train.Options(), internal_steps=4, layout="random"
    )


def test_demo_compares_equals():
    dense, sparse = (
        sum(np.prod(product.w_shape) for product in products.values())
        for products in (
            model.make_products(
                options.width, options.internal_steps, options.layout, options.density, options.block_size
            )
            for options in (demo.DENSE, demo.SPARSE)
        )
    )
    assert min(dense, sparse) >= 400_000
    assert sparse == pytest.approx(dense, rel=0.01)
    assert demo.SPARSE.width >= 3 * demo.DENSE.width
    fields = [field.name for field in dataclasses.fields(train.Options)]
    differ = {name for name in fields if getattr(demo.DENSE, name) != getattr(demo.SPARSE, name)}
    assert differ <= {"layout", "width", "density", "block_size"}


@pytest.mark.parametrize("mode", [[], ["--v1"]], ids=["eager", "v1"])
def test_simple(monkeypatch, capsys, mode):
    spec = importlib.util.spec_from_file_location("simple", EXAMPLES / "simple.py")
    simple = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(simple)
    monkeypatch.setattr(simple, "HIDDEN", 256)
    simple.main(mode)
    assert "relative error" in capsys.readouterr().out
    monkeypatch.setattr(simple, "to_dense", lambda bsmm, w: np.ones((bsmm.C, bsmm.K), np.float32))
    with pytest.raises(SystemExit, match="differs from the dense one"):
        simple.main(mode)


def test_demo_reports_what_came_out(monkeypatch, tmp_path, text_file, capsys):
    dense = dataclasses.replace(TINY, data=text_file, layout="dense", width=16, epochs=0.2, evaluations=1)
    monkeypatch.setattr(demo, "DENSE", dense)
    monkeypatch.setattr(demo, "SPARSE", dataclasses.replace(dense, layout="watts_strogatz", width=32))
    monkeypatch.setattr(demo, "OUT", tmp_path / "out")
    with pytest.raises(SystemExit, match="dense and block-sparse did no better than order-1 n-grams"):
        demo.main()  # three updates are far too few
    printed = capsys.readouterr().out
    assert "order-2 n-grams" in printed and "sha256" in printed and "goes on from" in printed
    assert (tmp_path / "out" / "demo.png").stat().st_size > 0
