"""What the Makefile promises: nothing is made again without cause, nothing is missed, and errors say what to do.

Most of it runs the real Makefile over a toy source tree, which compiles in a second.
"""

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import time

import pytest

ROOT = pathlib.Path(__file__).parents[1]
LIBRARY = ROOT / "blocksparse" / "blocksparse_ops.so"


def test_no_cuda_library_is_needed():
    """One file serves machines with and without a GPU; what TensorFlow exports of CUDA's runtime is not used."""
    dynamic = subprocess.run(["readelf", "-d", LIBRARY], capture_output=True, text=True, check=True).stdout
    needed = [line.split("[")[1].rstrip("]") for line in dynamic.splitlines() if "(NEEDED)" in line]
    assert "libtensorflow_framework.so.2" in needed
    assert not [name for name in needed if "cuda" in name or "nvidia" in name or "python" in name]
    symbols = subprocess.run(
        ["nm", "-D", "--undefined-only", LIBRARY], capture_output=True, text=True, check=True
    ).stdout
    assert not [name for name in symbols.split() if name.startswith(("cuda", "cu", "nv"))]


class Tree:
    """The Makefile over sources that need no TensorFlow: three files, one header that two of them include."""

    def __init__(self, folder):
        self.folder = folder
        for name in ("Makefile", "pyproject.toml", "setup.py"):
            shutil.copy(ROOT / name, folder)
        sources = {
            "src/kernels/abi.h": "#define BLOCKSPARSE_ABI 7\n",
            "src/kernels/a.cc": '#include "kernels/abi.h"\nint a() { return BLOCKSPARSE_ABI; }\n',
            "src/cpu/b_avx2.cc": "int b() { return __AVX2__; }\n",
            "src/ops/c.cc": '#include "kernels/abi.h"\nint c() { return BLOCKSPARSE_ABI; }\n',
            "blocksparse/__init__.py": "",
            "site/tensorflow/__init__.py": "",
            "site/tensorflow-2.21.0.dist-info/METADATA": "",
        }
        for name, text in sources.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        framework = folder / "site" / "tensorflow" / "libtensorflow_framework.so.2"
        subprocess.run(["g++", "-shared", "-x", "c++", "/dev/null", "-o", framework], check=True)

    def make(self, *arguments, path=None):
        """The files that were compiled, and everything that was printed."""
        drop = ("MAKEFLAGS", "MAKELEVEL", "VIRTUAL_ENV", "CONDA_PREFIX", "CONDA_DEFAULT_ENV", "CUDA_HOME")
        environment = {name: value for name, value in os.environ.items() if name not in drop}
        environment["PYTHONPATH"] = str(self.folder / "site")
        environment["PATH"] = path or environment["PATH"]
        run = subprocess.run(["make", *arguments], cwd=self.folder, env=environment, capture_output=True, text=True)
        self.returncode = run.returncode
        output = run.stdout + run.stderr
        return {line.split()[1] for line in output.splitlines() if line.startswith("  c++ ")}, output

    def build(self, *arguments):
        compiled, output = self.make(f"PYTHON={sys.executable}", "NVCC=", *arguments)
        assert self.returncode == 0, output
        return compiled, output

    def info(self):
        return json.loads((self.folder / "blocksparse" / "_build_info.json").read_text())


@pytest.fixture
def tree(tmp_path):
    return Tree(tmp_path)


ALL = {"src/kernels/a.cc", "src/cpu/b_avx2.cc", "src/ops/c.cc"}


def test_rebuilds_what_changed_and_nothing_else(tree):
    compiled, output = tree.build()
    assert compiled == ALL
    assert "CPU alone" in output
    assert tree.info()["tensorflow"] == "2.21.0" and tree.info()["abi"] == 7 and tree.info()["cuda_archs"] == ""

    compiled, output = tree.build()
    assert not compiled and "link" not in output

    time.sleep(0.01)
    (tree.folder / "src/kernels/abi.h").write_text("#define BLOCKSPARSE_ABI 8\n")
    assert tree.build()[0] == ALL - {"src/cpu/b_avx2.cc"}
    assert tree.info()["abi"] == 8

    (tree.folder / "site/tensorflow-2.21.0.dist-info").rename(tree.folder / "site/tensorflow_cpu-2.20.1.dist-info")
    assert tree.build()[0] == {"src/ops/c.cc"}
    assert tree.info()["tensorflow"] == "2.20.1"

    assert tree.build("EXTRA_CXXFLAGS=-g")[0] == ALL
    assert not tree.build("EXTRA_CXXFLAGS=-g")[0]

    (tree.folder / "src/cpu/b_avx2.cc").unlink()
    compiled, output = tree.build("EXTRA_CXXFLAGS=-g")
    assert not compiled and "link" in output


def test_make_mends_the_package(tree):
    tree.build()
    library, info = (tree.folder / "blocksparse" / name for name in ("blocksparse_ops.so", "_build_info.json"))
    good = library.read_bytes(), info.read_bytes()
    library.write_bytes(b"spoilt")
    info.unlink()
    compiled, output = tree.build()
    assert not compiled
    assert (library.read_bytes(), info.read_bytes()) == good


def test_interpreter_without_tensorflow(tree):
    shutil.rmtree(tree.folder / "site" / "tensorflow")
    _, output = tree.make("PYTHON=/usr/bin/false")
    assert tree.returncode and "/usr/bin/false has no TensorFlow: /usr/bin/false -m pip install" in output


@pytest.fixture
def pythons(tree):
    """A folder for the front of the path in which no Python runs: what a version manager's shims can look like."""
    folder = tree.folder / "bin"
    folder.mkdir()
    for name in ("python3.13", "python3.12", "python3.11", "python3.10", "python3"):
        (folder / name).write_text("#!/bin/sh\necho not here >&2; exit 127\n")
        (folder / name).chmod(0o755)
    return folder


def test_no_python(tree, pythons):
    _, output = tree.make(path=f"{pythons}:{os.environ['PATH']}")
    assert tree.returncode and "No Python from 3.10 to 3.13 is on the path" in output


def test_python_without_ensurepip(tree, pythons):
    (pythons / "python3.12").write_text(
        '#!/bin/sh\ncase "$2" in *ensurepip*) exit 1;; *print*) echo python3.12;; *) exit 0;; esac\n'
    )
    _, output = tree.make(path=f"{pythons}:{os.environ['PATH']}")
    assert tree.returncode and "apt-get install python3.12-venv" in output


def test_help_and_clean_need_no_python(tree, pythons):
    for goal in ("help", "clean"):
        _, output = tree.make(goal, path=f"{pythons}:{os.environ['PATH']}")
        assert tree.returncode == 0 and "not here" not in output


def test_readme_snippets_run():
    """What the README shows is what works."""
    snippets = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert len(snippets) >= 3
    for snippet in snippets:
        exec(compile(snippet, "README.md", "exec"), {"__name__": "readme"})
