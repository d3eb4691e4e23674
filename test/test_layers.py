"""The Keras layer."""

import helpers
import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import random_layout

from blocksparse import reference
from blocksparse.layers import BlocksparseDense

pytestmark = pytest.mark.soft_placement  # Keras has ops of its own that run on the CPU alone


@pytest.fixture(autouse=True)
def _policy():
    yield
    keras.config.set_dtype_policy("float32")


def data(rng, features, n=256):
    x = rng.standard_normal((n, features)).astype(np.float32)
    return x, x[:, :3].sum(axis=1, keepdims=True)


def model_of(*layers, features=64):
    return keras.Sequential([keras.Input((features,)), *layers, keras.layers.Dense(1)])


@pytest.mark.parametrize("shape", [(5,), (2, 3), (1, 4, 2)], ids=str)
def test_output(device, rng, shape):
    layout = random_layout(rng, 4, 3, 0.5)
    layer = BlocksparseDense(48, layout, block_size=16, activation="relu", bias_initializer="random_normal")
    x = rng.standard_normal((*shape, 64)).astype(np.float32)
    with tf.device(device):
        y = layer(tf.constant(x))
    helpers.assert_on(device, y)
    w, bias = (variable.numpy() for variable in (layer.kernel, layer.bias))
    expected = np.maximum(reference.matmul(x, w, layout, 16, 1) + bias, 0)
    np.testing.assert_allclose(y, expected, atol=1e-5 if device == "/CPU:0" else 2e-2)
    assert y.shape == layer.compute_output_shape(x.shape) and len(layer.weights) == 2
    plain = BlocksparseDense(48, layout, block_size=16, use_bias=False)
    plain(x)
    assert plain.bias is None and len(plain.weights) == 1


@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16", "mixed_float16"])
def test_fit_with_default_arguments(device, rng, policy):
    keras.config.set_dtype_policy(policy)
    x, y = data(rng, 64)
    with tf.device(device):
        layers = [BlocksparseDense(64, density=0.4, block_size=16, activation="relu") for _ in range(2)]
        model = model_of(*layers)
        model.compile("adam", "mse")
        losses = model.fit(x, y, epochs=5, verbose=0).history["loss"]
    assert not model.jit_compile and np.all(np.isfinite(losses)) and losses[-1] < losses[0]
    assert layers[0].kernel.dtype == "float32" and layers[0].compute_dtype == policy.replace("mixed_", "")
    outputs = layers[0](x)
    assert outputs.dtype == layers[0].compute_dtype
    assert layers[0].kernel.value.device.endswith(device.replace("/", "device:"))


def test_asked_for_jit_compile_is_declined(rng):
    x, y = data(rng, 64)
    model = model_of(BlocksparseDense(64, density=0.4, block_size=16))
    with pytest.warns(UserWarning, match="jit"):
        model.compile("sgd", "mse", jit_compile=True)
        model.fit(x, y, epochs=1, verbose=0)


def test_regularizer_and_constraint(rng):
    x, y = data(rng, 64)
    layer = BlocksparseDense(
        32, density=0.5, block_size=16, kernel_regularizer="l2", bias_regularizer="l1", kernel_constraint="non_neg"
    )
    model = model_of(layer)
    model.compile("sgd", "mse")
    model.fit(x, y, epochs=1, verbose=0)
    assert len(layer.losses) == 2 and layer.kernel.numpy().min() >= 0
    np.testing.assert_allclose(layer.losses[0], 0.01 * np.sum(layer.kernel.numpy() ** 2), rtol=1e-5)


@pytest.mark.parametrize("how", ["layout", "density"])
def test_save_and_load(rng, tmp_path, how):
    layout = random_layout(rng, 4, 5, 0.5)
    options = {"layout": dict(layout=layout), "density": dict(density=0.4, topology="random", seed=3)}[how]
    model = model_of(BlocksparseDense(80, block_size=16, activation="tanh", **options))
    x, y = data(rng, 64)
    model.compile("sgd", "mse")
    model.fit(x, y, epochs=1, verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert np.array_equal(model.predict(x, verbose=0), loaded.predict(x, verbose=0))
    assert np.array_equal(loaded.layers[0].bsmm.layout, model.layers[0].bsmm.layout)
    loaded.fit(x, y, epochs=1, verbose=0)
    model.export(tmp_path / "exported", verbose=False)
    served = tf.saved_model.load(tmp_path / "exported")
    np.testing.assert_allclose(served.serve(x), model.predict(x, verbose=0), atol=1e-6)


def test_config():
    layer = BlocksparseDense(
        64, density=0.5, topology="watts_strogatz", seed=5, block_size=8, kernel_initializer="he_normal"
    )
    copy = BlocksparseDense.from_config(layer.get_config())
    assert copy.get_config() == layer.get_config() and copy.layout is None
    copy.build((None, 64)), layer.build((None, 64))
    assert np.array_equal(copy.layout, layer.layout)
    again = BlocksparseDense.from_config(layer.get_config())
    assert np.array_equal(again.layout, layer.layout) and again.get_config() == layer.get_config()


def test_seeds():
    def layout(**options):
        layer = BlocksparseDense(128, density=0.3, topology="random", block_size=8, **options)
        layer.build((None, 128))
        return layer.layout.tolist()

    assert layout(seed=1) == layout(seed=1) != layout(seed=2)
    assert layout() != layout()
    keras.utils.set_random_seed(4)
    first = layout()
    keras.utils.set_random_seed(4)
    assert layout() == first


@pytest.mark.parametrize(
    "initializer,variance",
    # The variance of the dense initializer with the number of inputs and outputs a unit has: a quarter of all.
    [("glorot_uniform", 2 / (512 / 4 + 256 / 4)), ("he_normal", 2 / (512 / 4)), ("lecun_uniform", 1 / (512 / 4))],
)
def test_initializers_count_the_present_blocks(initializer, variance):
    layer = BlocksparseDense(256, density=0.25, block_size=8, kernel_initializer=initializer)
    layer.build((None, 512))
    assert layer.bsmm.blocks == 64 * 32 // 4
    assert abs(layer.kernel.numpy().var() / variance - 1) < 0.05
    assert keras.initializers.get(initializer).scale in (1.0, 2.0)  # Keras's own is as it was


def test_identity_initializer(rng):
    layer = BlocksparseDense(32, np.eye(4), block_size=8, kernel_initializer="identity", use_bias=False)
    x = rng.standard_normal((3, 32)).astype(np.float32)
    np.testing.assert_allclose(layer(x), x, rtol=1e-3)


@pytest.mark.parametrize(
    "options,message",
    [
        (dict(units=32), "either a layout or a density"),
        (dict(units=32, density=0.5, layout=np.eye(4)), "either a layout or a density"),
        (dict(units=33, density=0.5), r"units must be a positive multiple of the block size \(8\), got 33"),
        (dict(units=0, density=0.5), "units must be a positive multiple"),
        (dict(units=32, layout=np.eye(3)), "layout must have 4 columns for 32 units at block size 8, got 3"),
        (dict(units=32, layout=np.ones(4)), r"layout must be two-dimensional, got shape \(4,\)"),
        (dict(units=32, density=0.5, topology="none"), "topology must be one of .*watts_strogatz.*, got 'none'"),
    ],
    ids=lambda value: str(value) if isinstance(value, str) else None,
)
def test_constructor_errors(options, message):
    with pytest.raises(ValueError, match=message):
        BlocksparseDense(**options, block_size=8)


def test_build_errors():
    with pytest.raises(ValueError, match=r"input features must be a multiple of the block size \(8\), got 20"):
        BlocksparseDense(32, density=0.5, block_size=8).build((None, 20))
    with pytest.raises(ValueError, match="layout must have 3 rows for 24 input features at block size 8, got 4"):
        BlocksparseDense(32, np.eye(4), block_size=8).build((None, 24))
    with pytest.raises(ValueError, match="float64"):
        BlocksparseDense(32, np.eye(4), block_size=8, dtype="float64")(np.ones((2, 32)))
