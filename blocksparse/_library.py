"""Finds, checks and loads blocksparse_ops.so.

`make` leaves `_build_info.json` beside the library. It is compared with what is installed before the library is
loaded, since a library built for another TensorFlow, or for another version of this package, fails in ways that name
no cause. Every mismatch is an ImportError that says what was found, what was expected and the command that mends it.

op_module: the generated Python wrapper of every op.
handle: the same library by ctypes, for the functions of src/kernels/c_api.h.
build_info: the content of `_build_info.json`.
"""

from __future__ import annotations

import ctypes
import json
import pathlib
import re
from types import ModuleType
from typing import Any

from blocksparse._eager import one_at_a_time

_FOLDER = pathlib.Path(__file__).resolve().parent
_LIBRARY = _FOLDER / "blocksparse_ops.so"
_INFO = _FOLDER / "_build_info.json"
_FIELDS = ("tensorflow", "abi", "cuda_archs", "compiler", "build_id", "bytes")


def _mend(wheel_command: str = "pip install --force-reinstall the wheel it came from") -> str:
    """The one command that puts a package right: in the source tree, `make`; where a wheel was installed, pip."""
    root = _FOLDER.parent
    return f"run `make` in {root}" if (root / "Makefile").exists() else wheel_command


def _read_info() -> dict[str, Any]:
    if not _LIBRARY.exists():
        raise ImportError(f"blocksparse needs its op library, and {_LIBRARY} does not exist; to build it, {_mend()}")
    try:
        info = json.loads(_INFO.read_text())
        missing = [field for field in _FIELDS if field not in info]
    except (OSError, ValueError) as error:
        raise ImportError(f"blocksparse cannot tell what {_LIBRARY} was built for ({error}); {_mend()}") from error
    if missing:
        raise ImportError(f"{_INFO} lacks {', '.join(missing)}; expected {', '.join(_FIELDS)}; {_mend()}")
    return info


def _check(info: dict[str, Any], tensorflow: str) -> None:
    """Raises ImportError unless the library described by `info` fits TensorFlow `tensorflow` and this package."""
    built, found = (".".join(version.split(".")[:2]) for version in (info["tensorflow"], tensorflow))
    if built != found:
        command = _mend(f"pip install 'tensorflow=={built}.*'")
        raise ImportError(
            f"blocksparse was built for TensorFlow {built}, and TensorFlow {tensorflow} is installed; {command}"
        )

    # An installed wheel holds the package and the library of one build, and no header; a source tree can hold a
    # library older than its sources.
    header = _FOLDER.parent / "src" / "kernels" / "abi.h"
    if header.exists():
        abi = int(re.search(r"#define BLOCKSPARSE_ABI (\d+)", header.read_text()).group(1))
        if info["abi"] != abi:
            raise ImportError(f"{_LIBRARY} has ABI {info['abi']}, and this source tree needs ABI {abi}; {_mend()}")

    # The build id is the linker's hash of all that it linked, left in the first page; with the size, so that a copy cut
    # short is noticed too. Hashing the whole file again would take longer the more kernels there are.
    with open(_LIBRARY, "rb") as file:
        first_page = file.read(4096)
    size = _LIBRARY.stat().st_size
    if bytes.fromhex(info["build_id"]) not in first_page or size != info["bytes"]:
        raise ImportError(
            f"{_LIBRARY} ({size} bytes) is not the file that {_INFO.name} describes, "
            f"expected {info['bytes']} bytes with build id {info['build_id']}; {_mend()}"
        )


def _load() -> tuple[ModuleType, ctypes.CDLL, dict[str, Any]]:
    info = _read_info()
    try:
        import tensorflow as tf  # before the library: it holds the symbols that the library needs
    except ImportError as error:
        version = ".".join(info["tensorflow"].split(".")[:2])
        raise ImportError(
            f"blocksparse needs TensorFlow {version}, and importing tensorflow failed ({error}); "
            f"pip install 'tensorflow=={version}.*'"
        ) from error
    _check(info, tf.__version__)
    try:
        op_module = tf.load_op_library(str(_LIBRARY))
        handle = ctypes.CDLL(str(_LIBRARY))
    except (OSError, tf.errors.OpError) as error:
        raise ImportError(f"{_LIBRARY} does not load ({error}); {_mend()}") from error
    if handle.bs_abi_version() != info["abi"]:
        raise ImportError(
            f"{_LIBRARY} has ABI {handle.bs_abi_version()}, and {_INFO.name} says {info['abi']}; {_mend()}"
        )
    one_at_a_time(op_module)
    return op_module, handle, info


op_module, handle, build_info = _load()
