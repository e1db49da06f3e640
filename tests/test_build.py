"""Building the kernels, without a GPU: what the cache is keyed by, what is said when something is missing, the lock."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from dlp.kernels import build, loader, tune
from dlp.kernels.loader import BuildError, MissingError, Toolchain, build_key, compile_module, sources
from launch import bench, bench_boundary, bench_gemm, bench_host, bench_linear, bench_quantize

TOOLS = Toolchain("nvcc", "13.0", "ninja", "c++", ())
ARCH = ["sm_90a"]


@pytest.fixture
def ninja(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The folders that were built; ninja itself is not run."""
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

    keys = [key(), key(cuda="12.9"), key(architectures=["sm_100a"])]
    assert key() == keys[0] == build_key(sources(), "13.0", ARCH)  # not where the sources lie
    for owner, name, value in [
        (loader, "NVCC_FLAGS", "-O0"), (loader, "CXX_FLAGS", "-O0"), (torch, "__version__", "2.0"), (sys, "version", "3.0"),
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


def test_sources_are_plain_cuda() -> None:
    """No torch header, which would tie the build to a torch version; nothing that approximates or flushes."""
    assert {"bindings.cpp", "amax.cu", "kernels.h"} <= {file.name for file in sources()}
    for file in sources():
        assert "torch/" not in file.read_text() and "ATen" not in file.read_text(), file.name
    assert "fast" not in loader.NVCC_FLAGS and "-ftz=false -prec-div=true" in loader.NVCC_FLAGS


def test_every_source_is_compiled_once(copied: Path) -> None:
    text = loader.ninja_file(TOOLS, sources(copied), ["sm_90a", "sm_100a"])
    for file in sources(copied):
        assert text.count(str(file)) == (file.suffix in {".cu", ".cpp"}), file.name
    assert "-gencode=arch=compute_90a,code=sm_90a -gencode=arch=compute_100a,code=sm_100a" in text


def test_one_of_many_builds(tmp_path: Path, ninja: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    with ThreadPoolExecutor(4) as pool:
        modules = list(pool.map(lambda _: compile_module(TOOLS, ARCH, tmp_path), range(4)))
    assert len(ninja) == 1 and len(set(modules)) == 1 and modules[0].read_text() == "module"
    assert capsys.readouterr().err.count("\n") == 1, "one line of progress"
    compile_module(TOOLS, ["sm_100a"], tmp_path)
    assert len(ninja) == 2


def test_a_failed_build_leaves_nothing(tmp_path: Path, ninja: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(tools: Toolchain, folder: Path) -> None:
        (folder / f"{loader.MODULE}.so").write_text("half")
        raise BuildError("native kernels do not compile")

    with monkeypatch.context() as patch, pytest.raises(BuildError):
        patch.setattr(loader, "run_ninja", fail)
        compile_module(TOOLS, ARCH, tmp_path)
    assert compile_module(TOOLS, ARCH, tmp_path).read_text() == "module"


@pytest.mark.parametrize("missing", ["nvcc", "ninja", "c++"])
def test_a_missing_program_is_named(
    missing: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(loader, "_cuda_version", lambda nvcc: "13.0")
    monkeypatch.setattr(shutil, "which", lambda name, path=None: None if name == missing else f"/bin/{name}")
    assert build.main(["--compile-only", "sm_90a", "sm_100a"]) == 2
    said = capsys.readouterr()
    assert said.err == f"native kernels need {missing}, which is not on PATH: the plain-torch reference runs instead\n"
    assert said.out == ""


def test_what_was_compiled_is_said(
    ninja: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(loader, "find_toolchain", lambda: TOOLS)
    monkeypatch.setattr(loader, "compile_module", lambda tools, names: compile_module(tools, names, tmp_path))
    assert build.main(["--compile-only", "sm_90a", "sm_100a"]) == 0
    count = len(list(loader.CSRC.glob("*.cu")))
    assert capsys.readouterr().out == f"compiled {count} files for sm_90a sm_100a\n"


def test_a_machine_that_cannot_run_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(MissingError, match="need a CUDA device, and torch .* sees none: the plain-torch"):
        loader.architecture()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA L4")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 9))
    with pytest.raises(MissingError, match=r"capability 9.0 and 10.0, and NVIDIA L4 has 8.9: the plain-torch"):
        loader.architecture()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    assert loader.architecture() == "sm_90a"


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
    with pytest.raises(MissingError, match="torch has 12.8 where nvcc has 13.0: the plain-torch"):
        loader.check_cuda(TOOLS)
    monkeypatch.setattr(torch.version, "cuda", "13.1")
    loader.check_cuda(TOOLS)


def test_the_benchmark_runs_its_parts_and_stops_at_one_that_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[list[str]] = []

    def stand_in(code: int) -> Callable[[Sequence[str]], int]:
        return lambda arguments: ran.append(list(arguments)) or code

    monkeypatch.setattr(loader, "load", lambda: None)
    first, *others = bench.PARTS.items()
    parts = {first[0]: first[1]._replace(main=stand_in(0))} | {n: p._replace(main=stand_in(1)) for n, p in others}
    monkeypatch.setattr(bench, "PARTS", parts)
    assert bench.main([*parts, "--out", str(tmp_path), "--quick"]) == 1
    assert [arguments[1] for arguments in ran] == [str(tmp_path / "host.json"), str(tmp_path / "quantize.json")]
    assert "--plot" not in ran[0] and ran[1][2:4] == ["--plot", str(tmp_path / "quantize.png")] and "--sizes" in ran[1]
    assert bench.main([first[0], "--out", str(tmp_path)]) == 0 and ran[2] == ran[0][:2]
    assert f"results in {tmp_path}" in capsys.readouterr().out
