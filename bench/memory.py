"""Predicted memory of a step (`launch.estimate.memory`) compared with measured memory, case by case.

    torchrun --nproc-per-node 2 -m bench.memory [--cases A,B,...] [--steps 3] [--section.key value ...]

Settings apply to every case. Each case counts static memory tensor by tensor. On a GPU it also measures the peak of
`max_memory_allocated` in forward, backward and update, and the memory allocated after each of these stages. The exit code is 1
if the prediction of a case differs from the measured peak by more than 5 %. Tokens are random; the model and the step are
those of `launch.train`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

import dlp
from bench.e2e import give_back
from bench.files import add_files, write_files
from dlp.comm.mesh import shutdown
from dlp.parallel.model.session import session_of
from launch.config.run_config import Config, load
from launch.estimate.memory import Memory, memory
from launch.ranks.process_exit import refuse
from launch.settings.overrides import split
from launch.train import make_mesh
from launch.training import wire_bytes
from launch.training.build import Built, build
from launch.training.gradient_norm import GradientNorm

BOUND = 0.05  # largest relative difference of predicted and measured peak
EAGER = "--train.cuda_graph=false"  # peaks are measured in steps without a CUDA graph
LLAMA = ("llama3_1b", EAGER, "--train.global_batch=4", "--train.compile=true")
BLOCKS = ("bench_8b", EAGER, "--model.layers=4", "--train.global_batch=2")
FULL = "--train.checkpointing=full"
CASES: dict[str, tuple[str, ...]] = {
    "1b fsdp": (*LLAMA, "--mesh.tp=1"),
    "1b fsdp recomputed": (*LLAMA, "--mesh.tp=1", FULL),
    "1b tp": (*LLAMA, "--mesh.tp=2"),
    "1b tp recomputed": (*LLAMA, "--mesh.tp=2", FULL),
    "1b fsdp eager bf16": (*LLAMA, "--mesh.tp=1", "--train.compile=false", "--recipe=bf16"),
    "8b blocks": BLOCKS,
    "8b blocks recomputed": (*BLOCKS, FULL),
    "8b blocks eager bf16": (*BLOCKS, "--train.compile=false", "--recipe=bf16"),
}


@dataclass
class Result:
    """Result of one case, in bytes.

    predicted    rows of the prediction, `launch.estimate.memory.Memory.rows`
    counted      counted static memory, by row of the prediction
    peaks        peak memory in each stage of a step; empty on a CPU
    behind       memory allocated after each stage of a step; empty on a CPU
    before       memory allocated before the model was built
    """

    case: str
    predicted: dict[str, dict[str, float]]
    counted: dict[str, float]
    peaks: dict[str, float] = field(default_factory=dict)
    behind: dict[str, float] = field(default_factory=dict)
    before: float = 0.0

    @property
    def ratio(self) -> float | None:
        """Predicted peak relative to the measured peak; None on a CPU."""
        return Memory(self.predicted).peak / (max(self.peaks.values()) - self.before) if self.peaks else None


def counted(built: Built) -> dict[str, float]:
    """Return the static memory between steps in bytes, by row of the prediction; each storage counts once."""
    session = session_of(built.model)
    batch = session.weight_batch
    copies = [] if batch is None else list(batch.values._copies.values())
    casts = [part for weight in session.weights() for part in weight.parts]
    casts += [part for w in session.weights() for q in getattr(w, "own", {}).values() for part in q.parts]
    states = tree_leaves(list(built.optimizer.state.values()))
    return {
        "parameters": _bytes(built.model.parameters()), "cached operands": _bytes([*copies, *casts]),
        "optimizer": _bytes(states),
    }  # fmt: skip


def _bytes(tensors: Any) -> float:
    local = [each._local_tensor if isinstance(each, DTensor) else each for each in tensors]
    return float(sum({s._cdata: s.nbytes() for s in (each.untyped_storage() for each in local)}.values()))


class Peaks:
    """Recorder of the peak memory in each stage of a step, and of the memory after the stage; it records only on a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self.peaks: dict[str, float] = {}
        self.behind: dict[str, float] = {}

    def begin(self) -> None:
        if self._cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()

    def end(self, part: str) -> None:
        if self._cuda:
            torch.cuda.synchronize()
            self.peaks[part] = max(self.peaks.get(part, 0.0), float(torch.cuda.max_memory_allocated()))
            self.behind[part] = float(torch.cuda.memory_allocated())
            torch.cuda.reset_peak_memory_stats()


Loss = Callable[[tuple[Tensor, Tensor]], Tensor]


def step(
    built: Built, batches: Sequence[tuple[Tensor, Tensor]], loss_of: Loss, norm: Callable[[], Tensor], peaks: Peaks
) -> None:
    """Run a step as `launch.train` does, and record the memory of its stages. `loss_of` returns the summed loss of a
    microbatch."""
    model = built.model
    peaks.begin()
    for i, batch in enumerate(batches):
        if isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(built.accumulation.reductions > 1 or i == len(batches) - 1)
        loss = loss_of(batch) / batch[1].numel()
        peaks.end("forward")
        loss.backward()
        dlp.backward_dw(model)
        peaks.end("backward")
    norm()
    built.optimizer.step()
    built.optimizer.zero_grad(set_to_none=True)
    peaks.end("update")


def measure(case: str, config: Config, mesh: DeviceMesh, steps: int, device: torch.device) -> Result:
    """Build the model of a case, run `steps` steps, and return predicted and measured memory of the last step."""
    before = give_back(device) * 2**30
    built = build(config, mesh, device)
    predicted = memory(
        config, built.plan, wire_bytes.workload(config, mesh.size(), built.accumulation.reductions), built.accumulation
    )
    shape = (built.batch.micro, config.own_sequence + 1)
    generator = torch.Generator().manual_seed(built.dims.dp_rank)
    text = [
        torch.randint(0, config.architecture.vocab, shape, generator=generator).to(device)
        for _ in range(built.batch.num_micro)
    ]
    batches, norm = [(each[:, :-1], each[:, 1:]) for each in text], GradientNorm(built.model.parameters())
    for _ in range(steps):
        peaks = Peaks(device)
        step(built, batches, lambda batch: config.architecture.loss(built.model, batch, mesh), norm, peaks)
    return Result(case, predicted.rows, counted(built), peaks.peaks, peaks.behind, before)


def said(result: Result) -> Iterator[str]:
    """Yield the lines that describe a result."""
    predicted, gib = Memory(result.predicted), 2**30
    ratio = "not measured" if result.ratio is None else f"{result.ratio:.3f} of the measured peak"
    yield f"== {result.case}: predicted peak {predicted.peak / gib:.2f} GiB, {ratio}"
    for name, nbytes in result.counted.items():
        told = next(iter(predicted.rows[name].values()))
        yield f"  {name:18} predicted {told / gib:8.3f}  counted {nbytes / gib:8.3f} GiB"
    for part, nbytes in result.peaks.items():
        rest = result.behind[part] - result.before
        yield f"  {part:18} peak {(nbytes - result.before) / gib:8.3f}  after it {rest / gib:8.3f} GiB"
    yield from (f"  {line}" for line in predicted.describe()[2:])


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser("python -m bench.memory", description="Compares predicted with measured memory.")
    parser.add_argument("--cases", default=",".join(CASES), help=f"comma-separated, of {', '.join(CASES)}")
    parser.add_argument("--steps", type=int, default=3, help="steps of each case, of which the last counts")
    add_files(parser, draws=False)
    known, rest = parser.parse_known_args(arguments)
    cuda = torch.cuda.is_available()
    results: list[Result] = []
    try:
        changes = [f"--{key}={value}" for key, value in split(rest)[1]]
        chosen = {case: load(CASES[case][0], [*CASES[case][1:], *changes]) for case in known.cases.split(",")}
        for case, config in chosen.items():
            mesh = make_mesh(config)
            device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
            results.append(measure(case, config, mesh, known.steps, device))
            if dist.get_rank() == 0:
                print("\n".join(said(results[-1])), flush=True)
                write_files(known, [asdict(result) | {"ratio": result.ratio} for result in results])
    except ValueError as error:
        refuse(str(error), code=2)
    except KeyError as error:
        refuse(f"--cases: unknown case {error}, expected some of {', '.join(CASES)}", code=2)
    off = [r.case for r in results if r.ratio is not None and abs(r.ratio - 1) > BOUND]
    if off and dist.get_rank() == 0:
        print(f"prediction and measurement differ by more than {BOUND:.0%}: {', '.join(off)}")
    shutdown()
    sys.exit(1 if off else 0)


if __name__ == "__main__":
    main(sys.argv[1:])
