"""The two things pyproject.toml cannot say: what a wheel depends on, and that it is bound to the platform only."""

import os
import pathlib

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel

HERE = pathlib.Path(__file__).parent

# `make wheel` names the TensorFlow that the library in the wheel was built for; the sources build with any of these.
tensorflow = os.environ.get("BLOCKSPARSE_TENSORFLOW", ">=2.18,<2.22")


class WithLibrary(Distribution):
    def has_ext_modules(self):
        return True


class Wheel(bdist_wheel):
    def get_tag(self):
        return "py3", "none", super().get_tag()[2]

    def run(self):
        if not (HERE / "blocksparse" / "blocksparse_ops.so").exists():
            raise SystemExit("blocksparse/blocksparse_ops.so is not built yet; `make wheel` builds it and packs it")
        super().run()


setup(
    install_requires=[f"tensorflow{tensorflow}", "numpy>=1.26", "networkx>=3.0"],
    distclass=WithLibrary,
    cmdclass={"bdist_wheel": Wheel},
    # Apart from the objects, and emptied by `make wheel`: a module deleted since must not come back.
    options={"build": {"build_base": "build/wheel"}},
)
