"""Compilation of csrc/ with nvcc, ninja and pybind11 into the module `dlp_kernels`, once per machine, and import of the module.

The first use on a CUDA machine compiles the module; `python -m dlp.kernels.build` compiles ahead of the first use. The module
is stored in the user's cache (`cache_folder`), in a folder named by a digest of sources, flags, architectures and the versions
of torch, Python and CUDA. If many ranks start together, one rank compiles under a file lock while the others wait. No source
includes a torch header: compilation takes seconds and works under a CPU build of torch, unlike `torch.utils.cpp_extension`.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import importlib.util
import logging
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import torch

CSRC = Path(__file__).parent / "csrc"
MODULE = "dlp_kernels"
ARCHITECTURES = {(9, 0): "sm_90a", (10, 0): "sm_100a"}  # by compute capability
LOG = logging.getLogger("dlp")
CUDA = "/usr/local/cuda/bin"  # folder that is searched last for programs
PACKAGED = "13"  # major release of CUDA of the extra `gpu` in pyproject.toml
INSTALL = {  # program or header -> command that installs the program or header
    "nvcc": "pip install 'dlp[gpu]'",
    "ninja": "pip install ninja",
    "c++": "apt-get install g++, or the package of your system with a C++ compiler",
    "Python.h": "apt-get install python3-dev, or the package of your system with the headers of Python",
}
INSTEAD = "without native kernels casts run the plain-torch reference, and GEMMs run torch"

# Packages that nvcc from PyPI needs: package -> a path that the package installs, relative to the folder nvidia/cu<major> of
# this environment or of a parent environment.
PARTS = {
    "nvidia-nvvm": "nvvm/bin/cicc", "nvidia-cuda-crt": "include/crt/host_config.h",
    "nvidia-cuda-runtime": "lib/libcudart.so.{major}", "nvidia-cuda-cccl": "include/cccl",
}  # fmt: skip

# Scales need IEEE arithmetic: no approximations, no contraction of a * b + c to an FMA, denormals are preserved.
NVCC_FLAGS = ("-std=c++17 -O3 -lineinfo -ftz=false -prec-div=true -prec-sqrt=true -fmad=false "
              "-Xcompiler=-fPIC,-fvisibility=hidden")  # fmt: skip
CXX_FLAGS = "-std=c++17 -O2 -fPIC -fvisibility=hidden"


class Added(NamedTuple):
    """Flags that are appended to NVCC_FLAGS and CXX_FLAGS."""

    nvcc: str = ""
    cxx: str = ""


NOTHING = Added()
# Flags for a check that the sources compile: the sources are compiled to machine code and linked, but not optimized, because
# the optimization of device code takes most of the time of a full compilation.
CHECK = Added(" -Ofc=max -Xcompiler=-O0", " -O0")


class BuildError(RuntimeError):
    """Error of a compilation. The message is one sentence, followed by the output of the program that failed, if there is
    any."""


class MissingError(BuildError):
    """Error for a program, package or GPU that is missing or has an unsupported version. The message says what is missing;
    in messages of `load`, the fallback follows."""


@dataclass(frozen=True)
class Toolchain:
    """Paths of programs and headers, and the version of CUDA, such as "13.0".

    includes  folders of the headers of Python and pybind11
    runtime   shared libcudart for linking; "": nvcc links the static libcudart
    origin    source of nvcc, for messages
    headers   folders of CUDA headers that nvcc does not search by default
    """

    nvcc: str
    cuda: str
    ninja: str
    cxx: str
    includes: tuple[str, ...]
    runtime: str = ""
    origin: str = "PATH"
    headers: tuple[str, ...] = ()


def cache_folder(name: str) -> Path:
    """Return the cache folder of this name: under DLP_CACHE if set, else under ~/.cache/dlp."""
    return Path(os.environ.get("DLP_CACHE") or "~/.cache/dlp").expanduser() / name


def _choose(toolkit: str) -> str:
    """Return the advice how to select another nvcc: `toolkit` describes the CUDA toolkit that is needed."""
    return f"set CUDA_HOME to {toolkit}, or put its nvcc first on PATH"


def _cuda_version(nvcc: str) -> str:
    try:
        said = subprocess.run([nvcc, "--version"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True).stdout
    except OSError as error:
        said = str(error)
    found = re.search(r"release (\d+\.\d+)", said)
    if found is None:
        raise BuildError(
            f"native kernels need an nvcc that works, and {nvcc} --version prints no release of CUDA; "
            f"{_choose('a complete toolkit')}; output of {nvcc}:\n{said[-6000:]}"
        )
    return found[1]


class Packaged(NamedTuple):
    """Paths of nvcc from the PyPI package nvidia-cuda-nvcc, of the shared libcudart from nvidia-cuda-runtime, and of headers
    that are not in the folder of nvcc."""

    nvcc: str
    runtime: str
    includes: tuple[str, ...] = ()


def packaged_nvcc() -> Packaged | None:
    """Return the nvcc that pip installed for torch's major release of CUDA; None if there is none, or if CUDA_HOME is set.

    Raises MissingError for an incomplete installation."""
    major = _major_release()
    spec = None if os.environ.get("CUDA_HOME") else importlib.util.find_spec("nvidia")
    folders = () if spec is None else spec.submodule_search_locations or ()
    roots = [Path(folder) / f"cu{major}" for folder in folders]
    root = next((each for each in roots if (each / "bin" / "nvcc").exists()), None)
    if root is None:
        return None
    found = {package: _root_of(package, root, roots, major) for package in PARTS}
    lacking = [package for package, where in found.items() if where is None]
    if lacking:
        raise MissingError(
            f"native kernels need the packages {', '.join(lacking)} for the nvcc in {root}; {INSTALL['nvcc']} installs all "
            f"packages"
        )
    includes = [f"{where}/include" for where in dict.fromkeys(found.values()) if where != root]
    if found["nvidia-cuda-cccl"] != root:  # nvcc looks for cccl beside its own headers
        includes.append(f"{found['nvidia-cuda-cccl']}/{PARTS['nvidia-cuda-cccl']}")
    runtime = f"{found['nvidia-cuda-runtime']}/lib/libcudart.so.{major}"
    return Packaged(str(root / "bin" / "nvcc"), runtime, tuple(includes))


def _root_of(package: str, root: Path, roots: Sequence[Path], major: str) -> Path | None:
    """Return the folder in which a package of PARTS is installed, preferably `root`, the folder of nvcc; None: not installed.
    nvcc looks for nvvm only in `root`."""
    allowed = [root] if package == "nvidia-nvvm" else [root, *roots]
    return next((each for each in allowed if (each / PARTS[package].format(major=major)).exists()), None)


def find_program(name: str) -> str | None:
    """Return the path of a program in CUDA_HOME/bin, on PATH, in pip's scripts folder, or in /usr/local/cuda/bin, else None."""
    home = os.environ.get("CUDA_HOME")
    named = [f"{home}/bin"] if home else []
    folders = [*named, os.environ.get("PATH", os.defpath), sysconfig.get_path("scripts"), CUDA]
    return shutil.which(name, path=os.pathsep.join(folders))


def _program(name: str) -> str:
    found = find_program(name)
    if found is None:
        raise MissingError(f"native kernels need {name}, which is not on PATH: {_way_to_install(name)}")
    return found


def _major_release() -> str:
    """Return the major release of torch's CUDA, or PACKAGED for a torch without CUDA."""
    return (torch.version.cuda or PACKAGED).split(".")[0]


def _way_to_install(name: str) -> str:
    """Return the advice for a missing program. The extra `gpu` does not help a torch of another major release of CUDA."""
    major = _major_release()
    if name != "nvcc" or major == PACKAGED:
        return INSTALL[name]
    return (
        f"torch has CUDA {torch.version.cuda}, and {INSTALL[name]} brings CUDA {PACKAGED}: install a toolkit of CUDA {major}, "
        f"or a torch with CUDA {PACKAGED}"
    )


def find_toolchain() -> Toolchain:
    """Return the programs and headers for the compilation. Raises MissingError for the first missing part."""
    packaged = packaged_nvcc()
    nvcc = _program("nvcc") if packaged is None else packaged.nvcc
    ninja, cxx = map(_program, ("ninja", "c++"))
    if importlib.util.find_spec("pybind11") is None:
        raise MissingError(
            "native kernels need the Python package pybind11, which is not installed: pip install pybind11"
        )
    import pybind11

    includes = (sysconfig.get_path("include"), pybind11.get_include())
    if not (Path(includes[0]) / "Python.h").exists():
        raise MissingError(f"native kernels need Python.h, which is not in {includes[0]}: {INSTALL['Python.h']}")
    version = _cuda_version(nvcc)
    if packaged is None:
        return Toolchain(nvcc, version, ninja, cxx, includes, origin="CUDA_HOME or PATH")
    return Toolchain(nvcc, version, ninja, cxx, includes, packaged.runtime, "PyPI", packaged.includes)


def architecture() -> str:
    """Return nvcc's name of this machine's GPU, such as "sm_90a". Raises MissingError without a GPU, and for a GPU that is not
    in ARCHITECTURES."""
    if not torch.cuda.is_available():
        raise MissingError(f"native kernels need a CUDA device, and torch {torch.__version__} finds no CUDA device")
    capability = torch.cuda.get_device_capability()
    if capability not in ARCHITECTURES:
        known = " and ".join(f"{major}.{minor}" for major, minor in ARCHITECTURES)
        raise MissingError(
            f"native kernels are written for compute capability {known}, and {torch.cuda.get_device_name()} has "
            f"{capability[0]}.{capability[1]}"
        )
    return ARCHITECTURES[capability]


def check_cuda(tools: Toolchain) -> None:
    """Raise MissingError unless nvcc and torch have the same major release of CUDA."""
    ours = torch.version.cuda or "none"
    major = ours.split(".")[0]
    if major != tools.cuda.split(".")[0]:
        raise MissingError(
            f"native kernels need the same major release of CUDA in torch and nvcc: torch has {ours}, {tools.nvcc} has "
            f"{tools.cuda}; {_choose(f'a toolkit of CUDA {major}')}"
        )


def sources(folder: Path = CSRC) -> list[Path]:
    return sorted(file for file in folder.iterdir() if file.suffix in {".cu", ".cuh", ".cpp", ".h"})


def build_key(
    files: Sequence[Path], cuda: str, architectures: Sequence[str], runtime: str = "", added: Added = NOTHING
) -> str:
    """Return a digest of all inputs of the compilation, and of the host's architecture, since hosts may share a cache."""
    versions = [cuda, torch.__version__, sys.version, platform.machine()]
    facts = [NVCC_FLAGS, CXX_FLAGS, " ".join(architectures), *versions, runtime, *added]
    digest = hashlib.sha256("\0".join(facts).encode())
    for file in files:
        digest.update(f"\0{file.name}\0".encode() + file.read_bytes())
    return digest.hexdigest()[:16]


def ninja_file(tools: Toolchain, files: Sequence[Path], architectures: Sequence[str], added: Added = NOTHING) -> str:
    """Return the build file for ninja: one object per .cu and .cpp file, and one module."""
    targets = " ".join(f"-gencode=arch=compute_{name[3:]},code={name}" for name in architectures)
    headers, of_cuda = (" ".join(f"-I{folder}" for folder in each) for each in (tools.includes, tools.headers))
    compiled = [file for file in files if file.suffix in {".cu", ".cpp"}]
    lines = [
        f"rule cu\n  command = {tools.nvcc} {NVCC_FLAGS}{added.nvcc} {targets} {of_cuda} -c $in -o $out",
        f"rule cpp\n  command = {tools.cxx} {CXX_FLAGS}{added.cxx} {headers} -c $in -o $out",
        f"rule link\n  command = {_link(tools)}",
        *(f"build {file.stem}.o: {file.suffix[1:]} {file}" for file in compiled),
        f"build {MODULE}.so: link " + " ".join(f"{file.stem}.o" for file in compiled),
    ]
    return "\n".join(lines) + "\n"


def _link(tools: Toolchain) -> str:
    """Return the command that links the module. nvcc from PyPI does not find the static libraries that nvcc links by default;
    then c++ links the module to the shared libcudart that torch loads."""
    if not tools.runtime:
        return f"{tools.nvcc} -shared $in -o $out"
    return f"{tools.cxx} -shared $in -o $out {tools.runtime}"


def run_ninja(tools: Toolchain, folder: Path) -> None:
    done = subprocess.run([tools.ninja, "-C", str(folder)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise BuildError(f"native kernels do not compile; output of {tools.ninja} in {folder}:\n{done.stdout[-6000:]}")


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Context manager that creates a folder and locks the folder against other processes."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = open(f"{folder}.lock", "w")
        fcntl.flock(lock, fcntl.LOCK_EX)
    except OSError as error:
        raise BuildError(
            f"native kernels need a cache folder that can be written and locked, and {folder} cannot: {error.strerror}; "
            "set the environment variable DLP_CACHE to another folder"
        ) from error
    with lock:
        yield


def compile_module(tools: Toolchain, architectures: Sequence[str], added: Added = NOTHING) -> Path:
    """Compile the module unless the cache has the module, and return the path."""
    files = sources()
    folder = cache_folder("kernels") / build_key(files, tools.cuda, architectures, tools.runtime, added)
    built, ready = folder / f"{MODULE}.so", folder / "ready" / f"{MODULE}.so"
    if os.path.exists(ready):  # checked before the lock, since the cache may be read-only
        return ready
    with _alone_in(folder):
        if not ready.exists():
            start = time.monotonic()
            print(
                f"dlp: compiling kernels for {' '.join(architectures)} with {tools.nvcc} (CUDA {tools.cuda}, {tools.origin}), "
                f"once, into {folder} ...", end="", file=sys.stderr, flush=True,
            )  # fmt: skip
            (folder / "build.ninja").write_text(ninja_file(tools, files, architectures, added))
            run_ninja(tools, folder)
            ready.parent.mkdir(exist_ok=True)
            built.replace(ready)  # `ready` exists only after a complete compilation
            print(f" {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)
    return ready


def _compiled() -> Path:
    """Return the path of the compiled module for this machine's GPU. Raises MissingError, with the fallback in the message, or
    BuildError for other failures."""
    try:
        arch, tools = architecture(), find_toolchain()
        check_cuda(tools)
    except MissingError as error:
        raise MissingError(f"{error}; {INSTEAD}") from None
    return compile_module(tools, [arch])


@functools.cache
def load() -> ModuleType:
    """Return the module for this machine's GPU, compiled at the first use. Raises BuildError."""
    spec = importlib.util.spec_from_file_location(MODULE, _compiled())
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def explain(error: BuildError) -> int:
    """Print an error of the compilation and return the exit status: 2 for MissingError, 1 for other errors."""
    print(error, file=sys.stderr)
    return 2 if isinstance(error, MissingError) else 1


def load_or_explain() -> int:
    """Load the kernels and return 0, or print the error and return the exit status; for commands that require kernels."""
    try:
        require()
    except BuildError as error:
        return explain(error)
    return 0


def require() -> None:
    """Load the kernels. Raises BuildError. Unlike the message of `load`, the message for a missing part names no fallback,
    since the caller requires kernels."""
    try:
        load()
    except MissingError as error:
        raise MissingError(str(error).removesuffix(f"; {INSTEAD}")) from None


@functools.cache
def missing() -> str:
    """Return the reason why kernels do not run on this machine, which is logged once; "" if kernels run.

    Raises BuildError for failures other than MissingError, for example if the sources do not compile.
    """
    try:
        load()
    except MissingError as error:
        LOG.warning("%s", error)
        return str(error)
    return ""
