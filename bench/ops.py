"""An MLP and a transformer layer of `dlp.ops`, compared with the same ops unfused, compiled torch, and Transformer Engine.

    python -m bench.ops [--shapes 4096x14336,8192x28672] [--recipes bf16,fp8_current,fp8_block] [--tokens 8192] [--only mlp]
    python -m bench.ops --host          host time of a small MLP compared with one linear
    torchrun --nproc-per-node 2 -m bench.ops --tp                       over tp, with sequence parallelism

    fused     dlp.ops as users run it
    unfused   the same ops called one by one, each as a separate autograd function
    nn        nn.Linear, nn.RMSNorm and F.silu in bf16 under torch.compile
    te        `te.ops.Sequential`, `LayerNormMLP`, `TransformerLayer` of Transformer Engine, if it is installed

Subjects take turns; with --tp only `fused` and `unfused` run. The table shows the median milliseconds of one iteration
(forward, backward and, for dlp, the step boundary, which casts the weights), and the speed relative to `unfused`. Host times
are times of forward + backward without a step boundary.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import dlp
from bench.files import add_files, write_files
from bench.linear_subjects import TINY
from dlp import ops

Run = Callable[[], None]
HEAD, ROUNDS, COUNT = 128, 16, 5
TE_RECIPES = {"fp8_current": "Float8CurrentScaling", "fp8_delayed": "DelayedScaling", "fp8_block": "Float8BlockScaling"}
HOST_LIMIT = 1.3  # limit of the MLP's host time relative to the linear's


class Apart(nn.Module):
    """The ops of a `dlp.ops.Sequential`, called one by one."""

    def __init__(self, sequence: ops.Sequential) -> None:
        super().__init__()
        self.ops = nn.ModuleList(sequence)

    def forward(self, x: Any, *extra: Tensor) -> Any:
        for op in self.ops:
            x = op(x, *(extra if isinstance(op, ops.AddExtraInput) else ()))
        return x


def mlp(hidden: int, ffn: int, recipe: str, group: Any) -> nn.Module:
    return ops.LayerNormMLP(
        hidden, ffn, bias=False, normalization="RMSNorm", activation="swiglu", recipe=recipe,
        set_parallel_mode=group is not None, tp_group=group, sequence_parallel=group is not None,
    )  # fmt: skip


def layer(hidden: int, ffn: int, recipe: str, group: Any) -> nn.Module:
    return ops.TransformerLayer(
        hidden, ffn, hidden // HEAD, 8, bias=False, normalization="RMSNorm", activation="swiglu", recipe=recipe,
        set_parallel_mode=group is not None, tp_group=group, sequence_parallel=group is not None,
    )  # fmt: skip


def unfused(module: nn.Module) -> nn.Module:
    """Replace every `dlp.ops.Sequential` in a module by `Apart`, and return the module."""
    if isinstance(module, ops.Sequential):
        return Apart(module)
    for name, child in module.named_children():
        setattr(module, name, unfused(child))
    return module


class PlainMlp(nn.Module):
    def __init__(self, hidden: int, ffn: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(hidden)
        self.gate, self.up = (nn.Linear(hidden, ffn, bias=False) for _ in range(2))
        self.down = nn.Linear(ffn, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        y: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return y


class PlainLayer(nn.Module):
    def __init__(self, hidden: int, ffn: int) -> None:
        super().__init__()
        self.norm, self.mlp = nn.RMSNorm(hidden), PlainMlp(hidden, ffn)
        self.q, self.o = (nn.Linear(hidden, hidden, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(hidden, 8 * HEAD, bias=False) for _ in range(2))

    def forward(self, x: Tensor, batch: int) -> Tensor:
        n = self.norm(x)
        q, k, v = (
            each(n).view(batch, -1, each.out_features // HEAD, HEAD).transpose(1, 2)
            for each in (self.q, self.k, self.v)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)
        x = x + self.o(attended.reshape(x.shape))
        y: Tensor = x + self.mlp(x)
        return y


def te_subjects(kind: str, hidden: int, ffn: int, recipe: str) -> dict[str, tuple[nn.Module, Any]]:
    """Return the modules of Transformer Engine by name, each with a function that returns the autocast context; {} if
    Transformer Engine is not installed or has no such recipe."""
    if importlib.util.find_spec("transformer_engine") is None or recipe not in ("bf16", *TE_RECIPES):
        return {}
    te = importlib.import_module("transformer_engine.pytorch")
    recipes = importlib.import_module("transformer_engine.common.recipe")
    chosen = None if recipe == "bf16" else getattr(recipes, TE_RECIPES[recipe])()
    own: dict[str, Any] = {"params_dtype": torch.bfloat16, "device": "cuda"}
    shared = {"normalization": "RMSNorm", "activation": "swiglu", "bias": False} | own

    def region() -> Any:
        return te.fp8_autocast(enabled=chosen is not None, fp8_recipe=chosen)

    if kind == "layer":
        made = te.TransformerLayer(
            hidden, ffn, hidden // HEAD, num_gqa_groups=8, hidden_dropout=0.0, attention_dropout=0.0, **shared
        )
        return {"te TransformerLayer": (made, region)}
    own = {"dtype": torch.bfloat16, "device": "cuda"}
    sequence = te.ops.Sequential(
        te.ops.RMSNorm(hidden, **own), te.ops.Linear(hidden, 2 * ffn, bias=False, **own), te.ops.SwiGLU(),
        te.ops.Linear(ffn, hidden, bias=False, **own),
    )  # fmt: skip
    return {"te LayerNormMLP": (te.LayerNormMLP(hidden, ffn, **shared), region), "te.ops": (sequence, region)}


def step(module: nn.Module, x: Tensor, dy: Tensor, region: Callable[[], Any], more: Mapping[str, Any],
         boundary: Callable[[nn.Module], Any] | None = None) -> Run:  # fmt: skip
    """Return a function that runs forward, backward and, if given, the step boundary.

    Args:
        module: module that is called with x.
        x, dy: input, and gradient of the output.
        region: returns the context in which the forward runs.
        more: further keyword arguments of the module.
        boundary: step boundary, called with the module; None: no step boundary.
    """

    def run() -> None:
        with region():
            y = module(x, **more)
        y.backward(dy)
        if boundary is not None:
            boundary(module)
        for parameter in module.parameters():
            parameter.grad = None
        x.grad = None

    return run


def subjects(kind: str, hidden: int, ffn: int, recipe: str, tokens: int, group: Any) -> dict[str, Run]:
    make, device = (mlp if kind == "mlp" else layer), torch.device("cuda", torch.cuda.current_device())
    mine = tokens if group is None else tokens // group.size()
    x = torch.randn(mine, hidden, device=device, dtype=torch.bfloat16).requires_grad_()
    dy = torch.randn_like(x)
    more: dict[str, Any] = {"batch": 2} if kind == "layer" else {}
    found: dict[str, Run] = {}
    with torch.device(device):
        for name, change in (("fused", nn.Identity()), ("unfused", None)):
            module = make(hidden, ffn, recipe, group).bfloat16()
            module = module if change is not None else unfused(module)
            dlp.attach(module, torch.optim.SGD(module.parameters(), 0.0))
            found[name] = step(module, x, dy, nullcontext, more, dlp.end_step)
        if group is None:
            plain = (PlainMlp if kind == "mlp" else PlainLayer)(hidden, ffn).bfloat16()
            found["nn + compile, bf16"] = step(torch.compile(plain), x, dy, nullcontext, more)  # type: ignore[arg-type]
            te_x = x if kind == "mlp" else x.detach().view(-1, 2, hidden).requires_grad_()
            for name, (module, region) in te_subjects(kind, hidden, ffn, recipe).items():
                found[name] = step(module, te_x, dy.view_as(te_x), region, {})
    return found


def milliseconds(runs: Mapping[str, Run], host: bool = False) -> dict[str, float]:
    """Return the median milliseconds of each subject over rounds: device time, or host time if `host`.

    Subjects take turns, in reverse order in every second round, since the previous subject affects the clocks."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        for _ in range(4):
            run()
    for turn in range(ROUNDS):
        for name, run in [*runs.items()][:: -1 if turn % 2 else 1]:
            run()
            torch.cuda.synchronize()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begun = time.perf_counter()
            start.record()
            for _ in range(COUNT):
                run()
            end.record()
            spent = time.perf_counter() - begun
            torch.cuda.synchronize()
            times[name].append((1e3 * spent if host else start.elapsed_time(end)) / COUNT)
    return {name: statistics.median(its) for name, its in times.items()}


def tiny(recipe: str, device: str) -> dict[str, nn.Module]:
    """Build a small linear, and a small MLP of four ops. A step boundary has cast the weights of both."""
    size = TINY[-1]
    with torch.device(device):
        modules = {"MLP": mlp(size, size, recipe, None), "linear": dlp.Linear(size, size, recipe=recipe)}
        x = torch.randn(TINY[:2], dtype=torch.bfloat16)
    for module in modules.values():
        module.bfloat16()
        dlp.attach(module, torch.optim.SGD(module.parameters(), 0.0))
        module(x)
        dlp.end_step(module)
    return modules


def host_times(recipe: str) -> dict[str, float]:
    """Return the host milliseconds of forward + backward of the modules of `tiny`."""
    x = torch.randn(TINY[:2], device="cuda", dtype=torch.bfloat16).requires_grad_()
    runs = {name: step(each, x, torch.randn_like(x), nullcontext, {}) for name, each in tiny(recipe, "cuda").items()}
    return milliseconds(runs, host=True)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        "python -m bench.ops", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", default="4096x14336,8192x28672")
    parser.add_argument("--recipes", default="bf16,fp8_current,fp8_block")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--only", choices=("mlp", "layer"))
    parser.add_argument("--host", action="store_true")
    parser.add_argument("--tp", action="store_true")
    add_files(parser, draws=False)
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("bench.ops needs a GPU")
        return 3
    group, rows = None, list[dict[str, Any]]()
    if options.tp:
        dist.init_process_group("cpu:gloo,cuda:nccl")
        torch.cuda.set_device(dist.get_rank())
        group = dlp.build_mesh(dp_shard=1, tp=dist.get_world_size(), device_type="cuda")["tp"].get_group()
    first = not options.tp or dist.get_rank() == 0
    if options.host:
        for recipe in options.recipes.split(","):
            found = host_times(recipe)
            ratio = found["MLP"] / found["linear"]
            rows.append({"recipe": recipe, "ratio": ratio, **found})
            print(
                f"{recipe:12} MLP {found['MLP']:.3f} ms, linear {found['linear']:.3f} ms: {ratio:.2f} (limit {HOST_LIMIT})"
            )
    else:
        for shape in options.shapes.split(","):
            hidden, ffn = map(int, shape.split("x"))
            for kind in (options.only,) if options.only else ("mlp", "layer"):
                for recipe in options.recipes.split(","):
                    found = milliseconds(subjects(kind, hidden, ffn, recipe, options.tokens, group))
                    torch.cuda.empty_cache()
                    for name, taken in found.items() if first else ():
                        ratio = found["unfused"] / taken
                        rows.append(
                            {"shape": shape, "what": kind, "recipe": recipe, "name": name, "ms": taken, "ratio": ratio}
                        )
                        print(
                            f"{kind:6} {shape:12} {recipe:12} {name:22} {taken:8.3f} ms   {ratio:.2f}x unfused",
                            flush=True,
                        )
    if first:
        write_files(options, rows)
    if options.tp:
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
