"""Every way in which the library can fail to fit is an ImportError that names it and the command that mends it.

Each import runs in a fresh process, on a copy of _library.py beside a library and a _build_info.json of our making. A
stand-in for TensorFlow keeps that fast, but for one import with the real one.
"""

import json
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

BUILD_ID = bytes(range(1, 21))
ROOT = pathlib.Path(__file__).parents[1]
TENSORFLOW = """
__version__ = "2.21.3"
class errors:
    class OpError(Exception): pass
def load_op_library(path):
    raise errors.OpError(path + ": undefined symbol: _ZN10tensorflow")
"""


class Package:
    """A package folder with nothing in it but _library.py, a library and what describes it."""

    def __init__(self, folder):
        self.folder = folder
        self.package = folder / "blocksparse"
        self.package.mkdir()
        for name in ("_library.py", "_eager.py"):
            shutil.copy(ROOT / "blocksparse" / name, self.package)
        (self.package / "__init__.py").touch()
        self.library = self.package / "blocksparse_ops.so"
        self.library.write_bytes(b"ELF, " + BUILD_ID + b", a library")
        self.info = self.package / "_build_info.json"
        self.describe()
        (folder / "tensorflow.py").write_text(TENSORFLOW)

    def describe(self, **changes):
        info = {"tensorflow": "2.21.0", "abi": 1, "cuda_archs": "", "compiler": "g++"}
        info |= {"build_id": BUILD_ID.hex(), "bytes": self.library.stat().st_size} | changes
        self.info.write_text(json.dumps({name: value for name, value in info.items() if value is not None}))

    def make_source_tree(self, abi):
        (self.folder / "Makefile").touch()
        header = self.folder / "src" / "kernels" / "abi.h"
        header.parent.mkdir(parents=True)
        header.write_text(f"#define BLOCKSPARSE_ABI {abi}\n")

    def import_error(self):
        run = subprocess.run(
            [sys.executable, "-c", "import blocksparse._library"], cwd=self.folder, capture_output=True, text=True
        )
        assert run.returncode == 1, run.stdout + run.stderr
        last = run.stderr.strip().splitlines()[-1]
        assert last.startswith("ImportError: "), run.stderr
        return last


@pytest.fixture
def package(tmp_path):
    return Package(tmp_path)


def test_no_library(package):
    package.library.unlink()
    assert re.search(r"blocksparse_ops\.so does not exist.*pip install", package.import_error())
    package.make_source_tree(abi=1)
    assert re.search(rf"does not exist.*run `make` in {package.folder}$", package.import_error())


def test_no_description(package):
    package.info.unlink()
    assert re.search(r"cannot tell what .* was built for .*No such file.*pip install", package.import_error())


def test_unreadable_description(package):
    package.info.write_text('{"tensorflow": ')
    assert re.search(r"cannot tell what .* was built for .*pip install", package.import_error())


def test_incomplete_description(package):
    package.describe(abi=None, compiler=None)
    assert re.search(r"_build_info\.json lacks abi, compiler; expected tensorflow, abi", package.import_error())


def test_other_tensorflow(package):
    package.describe(tensorflow="2.20.0")
    error = package.import_error()
    assert "built for TensorFlow 2.20, and TensorFlow 2.21.3 is installed; pip install 'tensorflow==2.20.*'" in error
    package.make_source_tree(abi=1)
    assert "TensorFlow 2.21.3 is installed; run `make`" in package.import_error()


def test_no_tensorflow(package):
    (package.folder / "tensorflow.py").write_text("raise ImportError('none here')")
    assert re.search(r"needs TensorFlow 2\.21.*none here.*pip install 'tensorflow==2\.21\.\*'", package.import_error())


def test_other_abi(package):
    package.make_source_tree(abi=2)
    assert re.search(r"has ABI 1, and this source tree needs ABI 2; run `make`", package.import_error())


def test_another_library(package):
    package.library.write_bytes(package.library.read_bytes().replace(BUILD_ID, bytes(20)))
    error = package.import_error()
    assert re.search(rf"is not the file that _build_info.json describes.*build id {BUILD_ID.hex()}.*pip install", error)


def test_truncated_library(package):
    size = package.library.stat().st_size
    package.library.write_bytes(package.library.read_bytes()[:-1])
    assert re.search(rf"\({size - 1} bytes\) is not the file.*expected {size} bytes", package.import_error())


def test_library_that_does_not_load(package):
    assert re.search(r"does not load .*undefined symbol.*pip install", package.import_error())


def test_public_import_checks_first(tmp_path):
    """With the real package and the real TensorFlow: a library of another TensorFlow is refused, not loaded."""
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "blocksparse", tmp_path / "blocksparse", ignore=ignore)
    info = tmp_path / "blocksparse" / "_build_info.json"
    info.write_text(json.dumps(json.loads(info.read_text()) | {"tensorflow": "2.17.1"}))
    program = "import blocksparse, blocksparse._library"
    run = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 1
    assert "ImportError: blocksparse was built for TensorFlow 2.17, and TensorFlow 2." in run.stderr


def test_loaded_library():
    from blocksparse import _library

    header = (ROOT / "src" / "kernels" / "abi.h").read_text()
    assert f"#define BLOCKSPARSE_ABI {_library.handle.bs_abi_version()}\n" in header
    assert callable(_library.op_module.blocksparse_matmul)
