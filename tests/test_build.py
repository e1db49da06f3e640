"""Building the kernels without a GPU: key and folder of the cache, chosen compilers, messages about missing or broken
compilers, the lock."""

from __future__ import annotations

import os
import platform
import re
import shutil
import sys
import time
import tomllib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from bench import __main__ as bench
from bench import boundary as bench_boundary
from bench import gemm as bench_gemm
from bench import host as bench_host
from bench import linear as bench_linear
from bench import quantize as bench_quantize
from dlp.kernels import build, gemms, loader, registry, tune
from dlp.kernels.loader import BuildError, MissingError, Toolchain, build_key, compile_module, sources
from tests.cases import of_these
from tests.refusals import must_raise, refuses

TOOLS = Toolchain("nvcc", "13.0", "ninja", "c++", ())
ARCH = ["sm_90a"]

# Code that is less accurate than IEEE arithmetic: PTX that approximates or flushes denormals, and CUDA functions that
# are not correctly rounded, or that round differently from the reference (rsqrt).
APPROXIMATE = re.compile(
    r"[._]approx|\.ftz|\.full\.f|__fdividef"
    r"|\b(__f?|h2?)?(rsqrt|exp|exp2|exp10|expm1|log|log2|log10|log1p|pow|sin|cos|sincos|tan|tanh|erf|rcp)f?\s*\("
    r"|\b__f?rsqrt_r[nzud]"
)
ALLOWED = {
    # Sigmoid in activations: tests bound its results, and do not compare bits
    ("elements.cuh", 'asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(__fadd_rn(1.0f, expf(-x))));'),
    # tanh in GELU, for the same reason
    ("activations.cuh", "const float t = tanhf(__fmul_rn(__fadd_rn(g, __fmul_rn(__fmul_rn(square, g), b)), a));"),
    # Loss and its gradient, for the same reason
    ("cross_entropy.cu", "__device__ float factor(float other) const "
     "{ return largest == other ? 1.0f : expf(largest - finite(other)); }"),
    ("cross_entropy.cu", "for (int i = 0; i < 8; ++i) sum = __fadd_rn(sum, expf(__fsub_rn(x[i], shift)));"),
    ("cross_entropy.cu", "__device__ float log_sum() const { return __fadd_rn(finite(largest), logf(sum)); }"),
    ("cross_entropy.cu", "const float softmax = expf(__fsub_rn(x[i][k], log_sum));"),
}  # fmt: skip


@pytest.fixture
def ninja(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Path]:
    """Set up a separate cache, and a stand-in for ninja. Return the list of the folders that it builds."""
    monkeypatch.setenv("DLP_CACHE", str(tmp_path))
    built: list[Path] = []

    def run(tools: Toolchain, folder: Path) -> None:
        built.append(folder)
        time.sleep(0.05)
        (folder / f"{loader.MODULE}.so").write_text("module")

    monkeypatch.setattr(loader, "run_ninja", run)
    return built


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    return Path(shutil.copytree(loader.CSRC, tmp_path / "csrc"))


def test_key_covers_everything(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def key(cuda: str = "13.0", architectures: list[str] = ARCH) -> str:
        return build_key(sources(copied), cuda, architectures)

    keys = [
        key(),
        key(cuda="12.9"),
        key(architectures=["sm_100a"]),
        build_key(sources(), "13.0", ARCH, "", loader.CHECK),
    ]
    assert key() == keys[0] == build_key(sources(), "13.0", ARCH)  # the folder of the sources is not part of the key
    for owner, name, value in [
        (loader, "NVCC_FLAGS", "-O0"), (loader, "CXX_FLAGS", "-O0"), (torch, "__version__", "2.0"), (sys, "version", "3.0"),
        (platform, "machine", lambda: "other"),
    ]:  # fmt: skip
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, value)
            keys.append(key())
    for file in sources(copied):
        before = file.read_bytes()
        file.write_bytes(before + b"\n")
        keys.append(key())
        file.write_bytes(before)
    copied.joinpath("amax.cu").rename(copied / "bmax.cu")
    keys.append(key())
    assert len(set(keys)) == len(keys)


def approximate(folder: Path) -> set[tuple[str, str]]:
    """Return (file, line) of all code that APPROXIMATE matches, outside of comments."""
    lines = ((file.name, line.strip()) for file in sources(folder) for line in file.read_text().splitlines())
    return {(name, line) for name, line in lines if APPROXIMATE.search(line.partition("//")[0])}


def test_sources_are_plain_cuda() -> None:
    """The sources include no torch header, which would bind the build to a torch version, and no code in APPROXIMATE
    outside of ALLOWED."""
    assert {"bindings.cpp", "amax.cu", "kernels.h"} <= {file.name for file in sources()}
    for file in sources():
        assert "torch/" not in file.read_text() and "ATen" not in file.read_text(), file.name
    assert "fast" not in loader.NVCC_FLAGS
    assert "-ftz=false -prec-div=true -prec-sqrt=true -fmad=false" in loader.NVCC_FLAGS
    assert approximate(loader.CSRC) == ALLOWED


@pytest.mark.parametrize(
    "line",
    [
        'asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(scale));',
        'asm("add.ftz.f32 %0, %1, %2;" : "=f"(out) : "f"(a), "f"(b));',
        'asm("div.full.f32 %0, %1, %2;" : "=f"(out) : "f"(a), "f"(b));',
        "y = __expf(x);", "y = __fdividef(448.0f, amax);", "y = rsqrtf(mean);", "y = __frsqrt_rn(mean);", "y = __powf(2, x);",
        "y = htanh_approx(x);", "y = h2rcp(x);", "y = expf(x);",
    ],
)  # fmt: skip
def test_a_source_that_approximates_is_found(copied: Path, line: str) -> None:
    file = copied / "fp8.cuh"
    file.write_text(f"{file.read_text()}// {line}\n    {line} // why\n")
    assert approximate(copied) - ALLOWED == {("fp8.cuh", f"{line} // why")}


def test_every_source_is_compiled_once(copied: Path) -> None:
    text = loader.ninja_file(TOOLS, sources(copied), ["sm_90a", "sm_100a"])
    for file in sources(copied):
        assert text.count(str(file)) == (file.suffix in {".cu", ".cpp"}), file.name
    assert "-gencode=arch=compute_90a,code=sm_90a -gencode=arch=compute_100a,code=sm_100a" in text
    checked = loader.ninja_file(TOOLS, sources(copied), ARCH, loader.CHECK)
    assert f"{loader.CXX_FLAGS} -O0 " in checked and f"{loader.NVCC_FLAGS} -Ofc=max " in checked and "-O0" not in text


def test_one_of_many_builds(ninja: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    with ThreadPoolExecutor(4) as pool:
        modules = list(pool.map(lambda _: compile_module(TOOLS, ARCH), range(4)))
    assert len(ninja) == 1 and len(set(modules)) == 1 and modules[0].read_text() == "module"
    assert capsys.readouterr().err.count("\n") == 1, "one line of progress"
    compile_module(TOOLS, ["sm_100a"])
    assert len(ninja) == 2


def test_a_failed_build_leaves_nothing(ninja: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(tools: Toolchain, folder: Path) -> None:
        (folder / f"{loader.MODULE}.so").write_text("half")
        raise BuildError("native kernels do not compile")

    with monkeypatch.context() as patch, pytest.raises(BuildError):
        patch.setattr(loader, "run_ninja", fail)
        compile_module(TOOLS, ARCH)
    assert compile_module(TOOLS, ARCH).read_text() == "module"


def test_the_cache_is_where_it_is_wanted(ninja: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    assert compile_module(TOOLS, ARCH).is_relative_to(tmp_path / "kernels")
    assert gemms.choice_file(0) == tmp_path / "gemms" / "a_GPU.json"
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("DLP_CACHE")
    assert compile_module(TOOLS, ARCH).is_relative_to(tmp_path / "home" / ".cache" / "dlp" / "kernels")
    assert gemms.choice_file(0) == tmp_path / "home" / ".cache" / "dlp" / "gemms" / "a_GPU.json"
    assert len(ninja) == 2


def test_a_cache_that_cannot_be_written(
    ninja: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("DLP_CACHE", str(tmp_path / "file"))
    monkeypatch.setattr(loader, "find_toolchain", lambda: TOOLS)
    assert build.main(["--compile-only", *ARCH]) == 1
    assert re.fullmatch(
        r"native kernels need a cache folder that can be written and locked, and \S+/file/kernels/\w+ cannot: "
        r"Not a directory; set the environment variable DLP_CACHE to another folder\n",
        capsys.readouterr().err,
    )
    assert not ninja


def test_what_is_built_needs_a_cache_that_can_be_read_only(ninja: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(folder: Path) -> None:
        raise AssertionError("nothing is to be written")

    module = compile_module(TOOLS, ARCH)
    monkeypatch.setattr(loader, "_alone_in", refuse)
    assert compile_module(TOOLS, ARCH) == module and len(ninja) == 1


def program(folder: Path, text: str, name: str = "nvcc") -> str:
    """Write an executable shell script, and return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text)
    (folder / name).chmod(0o755)
    return str(folder / name)


def test_a_named_toolkit_comes_before_path_and_path_before_the_usual_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = [tmp_path / "named" / "bin", tmp_path / "path", tmp_path / "usual"]
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "named"))
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    monkeypatch.setattr(loader, "CUDA", str(tmp_path / "usual"))
    made = [program(folder, "") for folder in folders]
    for path in made:
        assert loader.find_program("nvcc") == path
        os.remove(path)
    assert loader.find_program("nvcc") is None


def packages(root: Path, *left_out: str) -> Path:
    """Create empty files with the names of the files of PyPI's CUDA 13 compiler, except `left_out`, in a folder of
    packages; return the folder of the compiler."""
    for name in ("bin/nvcc", "nvvm/bin/cicc", "include/crt/host_config.h", "lib/libcudart.so.13", "include/cccl/cub"):
        if name not in left_out:
            (root / "nvidia" / "cu13" / name).parent.mkdir(parents=True, exist_ok=True)
            (root / "nvidia" / "cu13" / name).touch()
    return root / "nvidia" / "cu13"


def test_the_compiler_of_pypi_comes_before_path_and_links_the_shared_runtime(
    tmp_path: Path, ninja: list[Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The build prints the path and origin of the compiler, CUDA_HOME has precedence over PyPI's compiler, and the error
    for missing files names the packages to install."""
    root = packages(tmp_path / "site")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site"), *sys.path])
    monkeypatch.delitem(sys.modules, "nvidia", raising=False)
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(loader, "_cuda_version", lambda nvcc: "13.0")
    tools = loader.find_toolchain()
    assert (tools.nvcc, tools.runtime) == (f"{root}/bin/nvcc", f"{root}/lib/libcudart.so.13")
    text = loader.ninja_file(tools, sources(), ARCH)
    assert f"rule link\n  command = {tools.cxx} -shared $in -o $out {root}/lib/libcudart.so.13\n" in text
    compile_module(tools, ARCH)
    assert f"with {root}/bin/nvcc (CUDA 13.0, PyPI), once" in capsys.readouterr().err
    with monkeypatch.context() as patch:
        patch.setenv("CUDA_HOME", str(tmp_path / "named"))
        program(tmp_path / "named" / "bin", "")
        assert loader.find_toolchain().nvcc == f"{tmp_path}/named/bin/nvcc"
    (root / "nvvm" / "bin" / "cicc").unlink()
    (root / "lib" / "libcudart.so.13").unlink()
    with refuses(r"need the packages nvidia-nvvm, nvidia-cuda-runtime for the nvcc.*dlp\[gpu\]", MissingError):
        loader.find_toolchain()
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    assert loader.packaged_nvcc() is None


def test_parts_of_the_compiler_are_found_in_the_environment_below(
    tmp_path: Path, ninja: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a venv on top of torch's environment, pip does not install torch's nvidia-cuda-runtime once more. The search
    must therefore find it in the environment below."""
    root = packages(tmp_path / "venv", "lib/libcudart.so.13")
    base = packages(tmp_path / "base", "bin/nvcc", "nvvm/bin/cicc")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "venv"), str(tmp_path / "base"), *sys.path])
    monkeypatch.delitem(sys.modules, "nvidia", raising=False)
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(loader, "_cuda_version", lambda nvcc: "13.0")
    tools = loader.find_toolchain()
    assert (tools.nvcc, tools.runtime) == (f"{root}/bin/nvcc", f"{base}/lib/libcudart.so.13")
    assert f"code=sm_90a -I{base}/include -c $in -o $out" in loader.ninja_file(tools, sources(), ["sm_90a"])
    (root / "nvvm" / "bin" / "cicc").unlink()
    (base / "nvvm" / "bin").mkdir(parents=True)
    (base / "nvvm" / "bin" / "cicc").touch()  # does not count, because nvcc would not find it there
    with pytest.raises(MissingError, match="need the packages nvidia-nvvm for the nvcc"):
        loader.find_toolchain()


def test_kernels_that_are_required_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    """If kernels are required, a missing compiler raises an error that says what to install, and does not mention a
    fallback."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(shutil, "which", lambda name, path=None: None)
    monkeypatch.setattr(loader, "packaged_nvcc", lambda: None)
    monkeypatch.setattr(loader, "load", loader.load.__wrapped__)
    with refuses(r"^native kernels need nvcc, which is not on PATH: pip install 'dlp\[gpu\]'$", MissingError):
        loader.require()


def test_what_pip_installs_is_found_without_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path / name))
    assert loader.find_program("ninja") is None
    made = program(tmp_path / "scripts", "", "ninja")
    assert loader.find_program("ninja") == made


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("#!/bin/sh\necho no license >&2; exit 7", "no license"), ("#!/bin/sh\necho hello", "hello"),
        ("#!/no/such/shell", "No such file"), ("\0", "Exec format error"),
    ],
    ids=["fails", "says nothing", "no interpreter", "no program"],
)  # fmt: skip
def test_a_broken_nvcc(
    text: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    nvcc = program(tmp_path / "bin", text)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert build.main(["--compile-only", *ARCH]) == 1
    sentence, _, words = capsys.readouterr().err.partition(f"; output of {nvcc}:\n")
    assert said in words
    assert sentence == (
        f"native kernels need an nvcc that works, and {nvcc} --version prints no release of CUDA; "
        "set CUDA_HOME to a complete toolkit, or put its nvcc first on PATH"
    )


@pytest.mark.parametrize("missing", ["nvcc", "ninja", "c++"])
def test_a_missing_program_is_named(
    missing: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(loader, "_cuda_version", lambda nvcc: "13.0")
    monkeypatch.setattr(shutil, "which", lambda name, path=None: None if name == missing else f"/bin/{name}")
    assert build.main(["--compile-only", "sm_90a", "sm_100a"]) == 2
    said = capsys.readouterr()
    way = {"nvcc": "pip install 'dlp[gpu]'", "ninja": "pip install ninja", "c++": "apt-get install g++, or"}[missing]
    assert re.match(f"native kernels need {re.escape(missing)}, which is not on PATH: {re.escape(way)}", said.err)
    assert said.out == ""


@pytest.mark.parametrize(("release", "way"), [
    ("13.1", "pip install 'dlp[gpu]'"), (None, "pip install 'dlp[gpu]'"),
    ("12.8", "torch has CUDA 12.8, and pip install 'dlp[gpu]' brings CUDA 13: install a toolkit of CUDA 12, or a torch with "
             "CUDA 13"),
])  # fmt: skip
def test_the_packages_are_the_way_out_for_their_release_of_cuda(
    release: str | None, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "cuda", release)
    monkeypatch.setattr(loader, "packaged_nvcc", lambda: None)
    monkeypatch.setattr(shutil, "which", lambda name, path=None: None)
    with pytest.raises(MissingError, match=f"^native kernels need nvcc, which is not on PATH: {re.escape(way)}$"):
        loader.find_toolchain()
    project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]
    assert all(f">={loader.PACKAGED}." in each for each in project["optional-dependencies"]["gpu"])


def test_missing_headers_of_python_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name, path=None: f"/bin/{name}")
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    with refuses(rf"need Python\.h, which is not in {tmp_path}: apt-get install python3-dev, or", MissingError):
        loader.find_toolchain()


def test_what_is_missing_and_what_runs_instead_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(shutil, "which", lambda name, path=None: None)
    monkeypatch.setattr(loader, "load", loader.load.__wrapped__)  # without the cache of results
    assert build.main([]) == 2
    assert capsys.readouterr().err == (
        "native kernels need nvcc, which is not on PATH: pip install 'dlp[gpu]'; "
        "without native kernels casts run the plain-torch reference, and GEMMs run torch\n"
    )


def test_what_was_compiled_is_said(
    ninja: list[Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(loader, "find_toolchain", lambda: TOOLS)
    assert build.main(["--compile-only", "sm_90a", "sm_100a"]) == 0
    count = len(list(loader.CSRC.glob("*.cu")))
    assert capsys.readouterr().out == f"compiled {count} files for sm_90a sm_100a\n"


def test_a_machine_that_cannot_run_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(MissingError, match="need a CUDA device, and torch .* finds no CUDA device$"):
        loader.architecture()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA L4")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 9))
    with pytest.raises(MissingError, match=r"capability 9.0 and 10.0, and NVIDIA L4 has 8.9$"):
        loader.architecture()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    assert loader.architecture() == "sm_90a"


CASTS = sorted(file.stem for file in loader.CSRC.glob("*.cu") if file.stem.startswith(("amax", "cast_", "rowwise")))


@pytest.mark.slow
@pytest.mark.parametrize("name", of_these(["amax", "cast_tensor", "cast_transpose"], CASTS))
def test_casts_compile_for_gpus_on_which_none_has_run(name: str, tmp_path: Path) -> None:
    try:
        tools = loader.find_toolchain()
    except MissingError as error:
        pytest.skip(str(error))
    file = loader.CSRC / f"{name}.cu"
    (tmp_path / "build.ninja").write_text(loader.ninja_file(tools, [file], ["sm_89", "sm_120a"], loader.CHECK))
    loader.run_ninja(tools, tmp_path)


@pytest.mark.parametrize("name, capability", [("NVIDIA L4", (8, 9)), ("NVIDIA RTX PRO 6000", (12, 0))])
def test_gpus_without_kernels_of_dlp_say_so_once_and_run_torchs(
    name: str, capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: name)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index=None: capability)
    for function in ("load", "missing"):
        monkeypatch.setattr(loader, function, getattr(loader, function).__wrapped__)  # without the cached result
    assert registry.device_kind("cuda") == registry._Devices()[0] == "cuda"
    major, minor = capability
    assert set(caplog.messages) == {
        f"native kernels are written for compute capability 9.0 and 10.0, and {name} has {major}.{minor}; without native "
        f"kernels casts run the plain-torch reference, and GEMMs run torch"
    }


COMMANDS = [tune, bench, bench_boundary, bench_gemm, bench_host, bench_linear, bench_quantize]


@pytest.mark.parametrize("command", [module.main for module in COMMANDS], ids=[m.__name__ for m in COMMANDS])
@pytest.mark.parametrize(
    ("error", "code"), [(MissingError("there is no GPU"), 2), (BuildError("it does not compile"), 1)]
)
def test_commands_that_need_the_kernels_say_why_there_are_none(
    command: Callable[[list[str]], int], error: BuildError, code: int, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    def load() -> None:
        raise error

    monkeypatch.setattr(loader, "load", load)
    assert command([]) == code
    said = capsys.readouterr()
    assert (said.err, said.out) == (f"{error}\n", "")


def test_two_releases_of_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    assert must_raise(MissingError, loader.check_cuda, TOOLS) == (
        "native kernels need the same major release of CUDA in torch and nvcc: torch has 12.8, nvcc has 13.0; "
        "set CUDA_HOME to a toolkit of CUDA 12, or put its nvcc first on PATH"
    )
    monkeypatch.setattr(torch.version, "cuda", "13.1")
    loader.check_cuda(TOOLS)
