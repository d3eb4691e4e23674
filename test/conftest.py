"""Shared by all tests: fresh random inputs whose seed is printed, and the devices that are present."""

import os
import pathlib
import zlib

import helpers
import hypothesis
import numpy as np
import pytest

# The GPU's memory is not for TensorFlow alone: some tests call the kernels without it.
os.environ.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")

SEED = int(os.environ.get("BLOCKSPARSE_TEST_SEED") or np.random.SeedSequence().entropy % 2**32)

hypothesis.settings.register_profile("blocksparse", deadline=None, print_blob=True, derandomize=False)
hypothesis.settings.load_profile("blocksparse")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config):
    if config.getoption("--hypothesis-seed") is None:
        config.option.hypothesis_seed = str(SEED)


def pytest_report_header(config):
    info = pathlib.Path(__file__).parents[1] / "blocksparse" / "_build_info.json"
    return [
        f"inputs: BLOCKSPARSE_TEST_SEED={SEED}, --hypothesis-seed={config.getoption('--hypothesis-seed')}",
        f"library: {info.read_text().strip() if info.exists() else 'not built'}",
    ]


def pytest_collection_modifyitems(config, items):
    """Tests marked `full` are the whole table of which others draw a sample; `make test-all` runs them."""
    if not os.environ.get("BLOCKSPARSE_TEST_ALL"):
        full = [item for item in items if item.get_closest_marker("full")]
        config.hook.pytest_deselected(items=full)
        items[:] = [item for item in items if not item.get_closest_marker("full")]


def pytest_generate_tests(metafunc):
    if "device" in metafunc.fixturenames:
        metafunc.parametrize("device", helpers.devices())


@pytest.fixture
def true_float32():
    """Float32 without TF32, which dense products take on a GPU by TensorFlow's default."""
    import tensorflow as tf

    before = tf.config.experimental.tensor_float_32_execution_enabled()
    tf.config.experimental.enable_tensor_float_32_execution(False)
    yield
    tf.config.experimental.enable_tensor_float_32_execution(before)


@pytest.fixture(autouse=True)
def _strict_placement(request):
    """Tests on a device fail where TensorFlow would move an op elsewhere; `soft_placement` marks those that may."""
    if "device" not in request.fixturenames or request.node.get_closest_marker("soft_placement"):
        yield
        return
    import tensorflow as tf

    tf.config.set_soft_device_placement(False)
    yield
    tf.config.set_soft_device_placement(True)


@pytest.fixture
def on_device(request):
    """For a module's `usefixtures`: each test on a device runs there, in memory that was poisoned."""
    if "device" not in request.fixturenames:
        yield
        return
    import tensorflow as tf

    device = request.getfixturevalue("device")
    helpers.poison(device)
    with tf.device(device):
        yield


@pytest.fixture
def rng(request):
    """A random generator of the test's own: the same for one seed, whichever other tests run."""
    return np.random.default_rng([SEED, zlib.crc32(request.node.nodeid.encode())])
