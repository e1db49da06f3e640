"""The Python files of dlp/parallel that x crosses in an eager forward of a linear, counted by a trace.

    python -m tools.forward_files [--recipe fp8_current]

Traced are a layer alone and a column- and a row-parallel one under sequence parallelism, on a group of two ranks whose
collectives move nothing; hooks of the model around them are not theirs. A file is crossed where one of its functions is entered
with x, or with what the forward has made of it, among its arguments: in a list, an object or a closure, too. Parameters and
what is kept from step to step are not of x.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import dlp

FOLDER = Path(dlp.__file__).parent / "parallel"
LIMIT, DEPTH = 5, 4
OBJECTS = ("dlp.quant", "dlp.kernels", "dlp.parallel.overlap", "dlp.parallel.linear.core", "dlp.comm.collectives")


def tensors_in(value: Any, depth: int = DEPTH) -> Iterator[Tensor]:
    """Those that a function can reach by an argument: it, its items, its fields, what a closure holds."""
    if isinstance(value, Tensor):
        yield value
    elif depth and isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item, depth - 1)
    elif depth and isinstance(value, dict):
        yield from tensors_in(list(value.values()), depth - 1)
    elif depth and getattr(value, "__closure__", None):
        yield from tensors_in([cell.cell_contents for cell in value.__closure__], depth - 1)
    elif depth and type(value).__module__.startswith(OBJECTS) and hasattr(value, "__dict__"):
        yield from tensors_in(list(vars(value).values()), depth - 1)


def _address(tensor: Tensor) -> int:
    try:
        return tensor.data_ptr()
    except (RuntimeError, ValueError):  # of a fake one, or a lazy module's
        return 0


def crossed(run: Callable[[], Any], x: Tensor) -> dict[str, set[str]]:
    """File -> functions of dlp/parallel that `run`, which reads x, enters with x or what it makes of it."""
    others = (each for each in gc.get_objects() if issubclass(type(each), Tensor) and each is not x)
    before = {_address(each) for each in others}
    found: dict[str, set[str]] = {}

    def trace(frame: FrameType, event: str, _: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if event != "call" or not path.is_relative_to(FOLDER):
            return
        if any(
            _address(tensor) not in before for tensor in tensors_in(list(frame.f_locals.values())) if tensor.numel()
        ):
            found.setdefault(str(path.relative_to(FOLDER)), set()).add(frame.f_code.co_name)

    sys.setprofile(trace)
    try:
        run()
    finally:
        sys.setprofile(None)
    return found


def layers(recipe: str) -> dict[str, nn.Module]:
    """What is traced, on a group of two ranks that exists."""
    options: dict[str, Any] = {"recipe": recipe, "dtype": torch.bfloat16}
    parallel = options | {"tp": dist.group.WORLD, "sequence_parallel": True}
    return {
        "alone": dlp.Linear(128, 128, **options),
        "column": dlp.ColumnParallelLinear(128, 128, **parallel),
        "row": dlp.RowParallelLinear(128, 128, **parallel),
    }


def files(recipe: str) -> dict[str, dict[str, set[str]]]:
    """By layer, what x crosses in a forward that is like others before it."""
    found = {}
    for name, layer in layers(recipe).items():
        model = nn.Sequential(layer)
        dlp.attach(model, torch.optim.SGD(model.parameters(), 0.0))
        tokens, features = (256, 64) if name == "row" else (256, 128)
        x = torch.randn(tokens, features).bfloat16().requires_grad_()
        for _ in range(3):
            model(x).sum().backward()
            dlp.end_step(model)
        found[name] = crossed(lambda layer=layer, x=x: layer(x), x)  # type: ignore[misc]
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.forward_files", description=__doc__.split("\n")[0])
    parser.add_argument("--recipe", default="fp8_current")
    options = parser.parse_args(arguments)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        found = files(options.recipe)
    finally:
        dist.destroy_process_group()
    for name, its in found.items():
        print(f"{name}: {len(its)} files")
        for file, functions in sorted(its.items()):
            print(f"    {file:24} {', '.join(sorted(functions))}")
    return int(max(map(len, found.values())) > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
