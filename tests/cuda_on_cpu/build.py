"""Compile csrc with a C++ compiler and `emulator.h`, for machines without a GPU.

The compiled module has the functions of the module for GPUs, with addresses of CPU memory. PTX in the kernels is
translated to calls of `intrinsics.h`.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from dlp.kernels import loader

HERE = Path(__file__).parent
FLAGS = "-std=c++17 -O1 -fPIC -fvisibility=hidden -ffp-contract=off -fno-strict-aliasing -w"
# Text that an asm statement contains -> the function that replaces the statement. The function gets the operands in the
# order of the statement.
PTX = {
    "st.global.L2::cache_hint.b32": "store_hint", "rcp.approx.ftz.f32": "rcp_approx_ftz", "0xE4": "lop3_e4",
    "0xEA": "lop3_ea",
    "cvt.rz.f16x2.f32": "cvt_rz_f16x2", "min.xorsign.abs.f16x2": "min_xorsign_abs_f16x2", "max.NaN.f32": "max_nan_f32",
    "max.NaN.xorsign.abs.bf16x2": "max_nan_xorsign_abs_bf16x2", "mbarrier.init.": "barrier_init",
    "mbarrier.arrive.expect_tx": "barrier_expect", "cp.async.bulk.shared": "barrier_copy",
    "mbarrier.try_wait": "barrier_wait", "ld.acquire.sys": "ld_acquire", "st.release.sys": "st_release",
    "%globaltimer": "globaltimer", "mapa.": "barrier_arrive_at", "elect.sync": "elect",
    "complete_tx::bytes [%0], [%1, {": "tile_copy",
    "multicast::cluster": "tile_copy_to_all", "cluster_ctarank": "cluster_rank", "barrier.cluster": "cluster_sync",
    "fence.mbarrier_init": "fence_barriers", "bar.sync": "named_sync", "bar.arrive": "named_arrive",
    "setmaxnreg": "set_registers",
    "wgmma.fence": "begin_products", "wgmma.commit_group": "commit_products", "wgmma.wait_group": "wait_products",
    "f32.e4m3.e4m3": "product_e4m3", "f32.e5m2.e4m3": "product_e5m2", "m16n8k16.row.col.f32.bf16": "warp_product_bf16",
}  # fmt: skip


def _end_of(text: str, opened: int) -> int:
    """Return the index after the parenthesis that closes the parenthesis at `opened`. Parentheses in strings count, too;
    in the strings of csrc they are balanced."""
    depth = 0
    for at in range(opened, len(text)):
        depth += {"(": 1, ")": -1}.get(text[at], 0)
        if depth == 0:
            return at + 1
    raise ValueError(f"an asm statement has no closing parenthesis: {text[opened : opened + 200]}")


def _operands(inside: str) -> list[str]:
    """Return the expressions in `"=r"(a) : "l"(f(b))`, in order."""
    found, at = [], 0
    while match := re.compile(r'"=?\+?[a-z]+"\s*\(').search(inside, at):
        end = _end_of(inside, match.end() - 1)
        found.append(inside[match.end() : end - 1])
        at = end
    return found


def translate(text: str) -> str:
    """Translate CUDA C++ to C++, with `emulator.h` included first."""
    text = re.sub(r"DLP_D8\(0\)[^:]*", '"+f"(d) ', text)  # the result registers of a matrix product
    text = re.sub(r"extern __shared__[^;]*?(\w+)\[\];", r"uint8_t* \1 = emulator::dynamic_shared();", text)
    out, at = [], 0
    for match in re.finditer(r"\basm(?: volatile)?\s*\(", text):
        end = _end_of(text, match.end() - 1)
        body = text[match.end() : end - 1]
        ours = [name for words, name in PTX.items() if words in body]
        if len(ours) != 1:
            raise ValueError(
                f"the emulator does not support the asm {body!r}: add a function to intrinsics.h, and its name to PTX"
            )
        out += [text[at : match.start()], f"ptx::{ours[0]}({', '.join(_operands(body))})"]
        at = end
    return "".join([*out, text[at:]])


def _cuda_headers(nvcc: str) -> str:
    """Return the folder of the CUDA headers that nvcc uses."""
    said = subprocess.run([nvcc, "--dryrun", "-c", "none.cu"], capture_output=True, text=True).stderr
    found = re.search(r'^#\$ INCLUDES="-I([^"]+)"', said, re.MULTILINE)
    if found is None:
        raise loader.BuildError(f"the emulator needs CUDA's headers, and {nvcc} --dryrun prints no folder of headers")
    return found[1]


def translated(only: Sequence[str] = ()) -> list[Path]:
    """Return the files to translate: all sources of the module or, if `only` is given, the headers and the files in
    `only`; and emulator.cpp."""
    ours = [source for source in loader.sources() if not only or source.suffix in {".h", ".cuh"} or source.name in only]
    return [*ours, HERE / "emulator.cpp"]


def flags(tools: loader.Toolchain, folder: Path) -> list[str]:
    """Return the arguments of a C++ compiler that compiles the translated kernels in `folder`."""
    folders = (HERE / "include", HERE, folder, *tools.includes, _cuda_headers(tools.nvcc))
    return [*FLAGS.split(), *[f"-I{each}" for each in folders], "-include", f"{HERE}/emulator.h"]


def _ninja(tools: loader.Toolchain, folder: Path) -> str:
    compiled = sorted(each for each in folder.iterdir() if each.suffix in {".cu", ".cpp"})
    lines = [
        f"rule cxx\n  command = {tools.cxx} {' '.join(flags(tools, folder))} -x c++ -c $in -o $out",
        f"rule link\n  command = {tools.cxx} -shared $in -o $out -ldl",
        *(f"build {each.stem}.o: cxx {each}" for each in compiled),
        f"build {loader.MODULE}.so: link " + " ".join(f"{each.stem}.o" for each in compiled),
    ]
    return "\n".join(lines) + "\n"


def build(only: Sequence[str] = (), beside: str = "") -> Path:
    """Compile the module, unless it is compiled already, and return the path of the library. If `only` is given,
    compile a library of these files of csrc and of the source code in `beside`, without the Python functions of the
    module. Raises `loader.BuildError`."""
    tools = loader.find_toolchain()
    ours = [path for path in sorted(HERE.rglob("*")) if path.suffix in {".h", ".cpp", ".py"}]
    key = loader.build_key([*loader.sources(), *ours], " ".join([FLAGS, *only, beside]), ["cpu"])
    folder = loader.cache_folder("kernels") / f"{key}-cpu"
    module = folder / f"{loader.MODULE}.so"
    if module.exists():
        return module
    folder.mkdir(parents=True, exist_ok=True)
    for source in translated(only):
        (folder / source.name).write_text(translate(source.read_text()))
    if beside:
        (folder / "beside.cu").write_text(beside)
    (folder / "build.ninja").write_text(_ninja(tools, folder))
    loader.run_ninja(tools, folder)
    return module


def load() -> ModuleType:
    """Return the module, compiled if necessary."""
    spec = importlib.util.spec_from_file_location(loader.MODULE, build())
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
