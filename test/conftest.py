"""Shared by all tests: fresh random inputs whose seed is printed, and the devices that are present."""

import os
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
    return f"inputs: BLOCKSPARSE_TEST_SEED={SEED}, --hypothesis-seed={config.getoption('--hypothesis-seed')}"


def pytest_generate_tests(metafunc):
    if "device" in metafunc.fixturenames:
        metafunc.parametrize("device", helpers.devices())


@pytest.fixture
def rng(request):
    """A random generator of the test's own: the same for one seed, whichever other tests run."""
    return np.random.default_rng([SEED, zlib.crc32(request.node.nodeid.encode())])
