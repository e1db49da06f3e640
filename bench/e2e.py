"""Complete training steps of one model under FSDP: dlp's recipes compared with a plain FSDP2 + torch.compile script, in
one run.

    torchrun --nproc-per-node 4 -m bench.e2e [CONFIG] [--subjects A,B,...] [--section.key value ...]

CONFIG is `bench_8b` by default: eight blocks of 8B shape, one sequence of 8192 tokens a rank. A subject is

    peer_bf16                      bench.e2e_peer, the baseline of all ratios
    peer_tensorwise, peer_rowwise  bench.e2e_peer with torchao's float8; torchao must be installed
    RECIPE                         dlp with this recipe in the blocks, otherwise as CONFIG says
    RECIPE:hp_gather               RECIPE with weights gathered in high precision
    RECIPE:eager                   RECIPE without a CUDA graph
    PEER:graph                     a peer whose step is captured in a CUDA graph

Each subject trains on random tokens. The results are the median time from step to step after a warm-up, measured on the
device; the peak memory of the timed steps; and the memory that the previous subject left allocated (limit: LEFT GiB). The
power of a GEMM depends on its data, so subjects must have similar losses: at the default learning rate of 1e-7, the last losses
must agree within 2 %. RECIPE and RECIPE:hp_gather must have bitwise equal losses; on GPUs this is checked only with
`--train.deterministic true`, since attention otherwise sums gradients in order of arrival. If losses or memory violate these
rules, a line reports it and the exit code is 1. If one of the subjects cannot run here, the program ends with exit code 2
before it measures the first subject. Files are rewritten after each subject.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import dlp
from bench.e2e_peer import Peer
from bench.e2e_subjects import BASELINE, EAGER, GRAPH, HP_GATHER, PEERS, Subject, subjects_of
from bench.files import add_files, write_files
from bench.kernel_profile import longest_kernels
from dlp.comm.mesh import shutdown, world_size
from launch.config.groups import SCHEMA
from launch.config.rules import validate_world
from launch.config.run_config import Config, command_line
from launch.ranks.process_exit import refuse
from launch.report.recorder import Stopwatch
from launch.settings import overrides
from launch.settings.schema import ConfigError, check, integer, setting
from launch.train import make_mesh
from launch.training.build import build

DEFAULT = [BASELINE, "bf16", f"fp8_current{HP_GATHER}", "fp8_current"]
COUNTS = {
    "warmup": setting(integer(">= 0"), "steps that are not timed", 4),
    "steps": setting(integer(">= 1"), "steps that are timed", 10),
}
# With larger rates, for example 1e-5, the losses of bf16 and FP8 differ too much after a few steps on two random batches
LEARNING_RATE = "1e-7"
ALIKE = 0.02  # allowed relative difference of last losses
LEFT = 0.1  # GiB that may still be allocated after a subject: workspaces of cuBLASLt, tables of kernels
Step = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Result:
    """Result of one subject.

    tokens_per_second    tokens per second of one rank, by the median step of the slowest rank
    peak                 peak memory of the timed steps in GiB; 0 on a CPU
    losses               losses of this rank, step by step, including the warm-up
    before               GiB that were allocated before the subject was built
    """

    subject: str
    tokens_per_second: float
    peak: float
    losses: list[float]
    before: float = 0.0


def ours(config: Config, subject: Subject, mesh: DeviceMesh, device: torch.device) -> Step:
    """Build the model and the optimizer as `launch.train` does, and return their step, without gradient clipping; captured in a
    CUDA graph if `launch.train` would capture the step."""
    recipe = subject.base
    groups = tuple(replace(group, recipe=recipe) if group.name == "default" else group for group in config.groups)
    mesh_section = replace(config.mesh, quantized_gather=HP_GATHER not in subject.suffixes)
    train = replace(config.train, cuda_graph=False) if EAGER in subject.suffixes else config.train
    built = build(replace(config, groups=groups, mesh=mesh_section, train=train), mesh, device)

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        loss = dlp.cross_entropy(built.model(tokens), targets, mesh) / targets.numel()
        loss.backward()
        built.optimizer.step()
        built.optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return replayed(step, config, mesh, device) if built.graph else step


def replayed(step: Step, config: Config, mesh: DeviceMesh, device: torch.device) -> Step:
    """Return `step` captured in a CUDA graph."""
    like = torch.zeros(validate_world(config, mesh.size()).micro, config.own_sequence, dtype=torch.int64, device=device)
    graphed = dlp.graphed_step(step, (like, like))
    return lambda tokens, targets: graphed(tokens, targets).clone()


def make_step(subject: Subject, config: Config, mesh: DeviceMesh, device: torch.device) -> Step:
    if subject.base not in PEERS:
        return ours(config, subject, mesh, device)
    graph = GRAPH in subject.suffixes
    step = Peer(config, mesh, device, float8=PEERS[subject.base], capturable=graph).step
    return replayed(step, config, mesh, device) if graph else step


def measure(
    subject: Subject,
    config: Config,
    mesh: DeviceMesh,
    device: torch.device,
    warmup: int,
    steps: int,
    where: bool = False,
) -> Result:
    """Free the previous subject, then build this subject and time its steps. `where`: print the kernels of a step."""
    before = give_back(device)
    step = make_step(subject, config, mesh, device)
    generator = torch.Generator().manual_seed(dist.get_rank())
    micro = validate_world(config, mesh.size()).micro
    shape = (micro, config.own_sequence + 1)
    text = [torch.randint(0, config.family.vocab, shape, generator=generator).to(device) for _ in range(2)]
    losses, watch = [], Stopwatch(device)
    for i in range(warmup + steps):
        if i == warmup:
            _synchronize(device)
            dist.barrier()
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            watch = Stopwatch(device)
        losses.append(step(text[i % 2][:, :-1], text[i % 2][:, 1:]))
        watch.lap(str(i))
    _synchronize(device)
    seconds = statistics.median(watch.split().values())
    slowest = torch.tensor(seconds, dtype=torch.float64, device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    peak = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else 0.0
    tokens = micro * config.own_sequence
    if where:
        kernels = longest_kernels(lambda: step(text[0][:, :-1], text[0][:, 1:]), times=2, most=24)
        if dist.get_rank() == 0:
            print("\n".join(kernels))
    return Result(subject.name, tokens / slowest.item(), peak, [loss.item() for loss in losses], before)


def give_back(device: torch.device) -> float:
    """Free the memory of the previous subject. Returns the GiB that are still allocated."""
    torch._dynamo.reset()
    for _ in range(3):  # because objects that one collection frees may have kept other objects alive
        gc.collect()
    if device.type != "cuda":
        return 0.0
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated() / 2**30


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def rows(results: Sequence[Result]) -> list[str]:
    """Format a table of results, with the ratios to the baseline and to dlp's bf16; a ratio is "-" if its denominator was not
    measured."""
    by_name = {result.subject: result.tokens_per_second for result in results}
    lines = [f"{'subject':24} {'tokens/s/rank':>14} {'x peer':>7} {'x bf16':>7} {'peak GiB':>9} {'last loss':>10}"]
    for result in results:
        ratios = [f"{result.tokens_per_second / by_name[b]:.3f}" if b in by_name else "-" for b in (BASELINE, "bf16")]
        lines.append(
            f"{result.subject:24} {result.tokens_per_second:14,.0f} {ratios[0]:>7} {ratios[1]:>7} {result.peak:9.2f} "
            f"{result.losses[-1]:10.4f}"
        )
    return lines


def unlike(results: Sequence[Result]) -> list[str]:
    """Return a message for each subject whose last loss differs from the first subject's by more than ALIKE, or which started
    with more than LEFT GiB allocated."""
    first = results[0]
    found = [
        f"{result.subject}: last loss {result.losses[-1]:.4f}, {first.subject} has {first.losses[-1]:.4f}: more than "
        f"{ALIKE:.0%} apart, so their data and power differ; give a smaller --train.lr"
        for result in results
        if not abs(result.losses[-1] - first.losses[-1]) <= ALIKE * abs(first.losses[-1])
    ]
    return found + [
        f"{result.subject}: {result.before:.2f} GiB were still allocated before it, and are part of its peak"
        for result in results
        if result.before > LEFT
    ]


def differing(results: Sequence[Result]) -> list[str]:
    """Return a message for each recipe whose losses change if weights are gathered in high precision."""
    losses = {result.subject: result.losses for result in results}
    names = [name for name in losses if name + HP_GATHER in losses and losses[name] != losses[name + HP_GATHER]]
    return [f"{name}: losses differ between quantized and high-precision gathers" for name in names]


def plot(results: Sequence[Result], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 0.6 * len(results) + 1.2), layout="constrained")
    axes = figure.subplots()
    bars = axes.barh([r.subject for r in results], [r.tokens_per_second for r in results])
    axes.bar_label(bars, fmt="{:,.0f}", padding=3)
    axes.margins(x=0.15)  # room for the labels inside the frame
    axes.invert_yaxis()
    axes.set_xlabel("tokens/s per rank")
    figure.savefig(path, dpi=120)


def main(arguments: Sequence[str]) -> None:
    description = "Times complete training steps under FSDP, compared with plain FSDP2 + torch.compile."
    parser = overrides.make_parser("bench.e2e", description, "bench_8b", SCHEMA)
    parser.add_argument(
        "--subjects",
        default=",".join(DEFAULT),
        help=f"comma-separated: RECIPE, RECIPE:hp_gather, RECIPE:eager, {', '.join(PEERS)}, PEER:graph",
    )
    for name, count in COUNTS.items():
        parser.add_argument(f"--{name}", type=int, default=count.default, help=count.metadata["doc"])
    parser.add_argument("--where", action="store_true", help="list the kernels of a step, on a GPU")
    add_files(parser)
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        defaults = ["--train.global_batch", str(world_size()), "--train.lr", LEARNING_RATE]
        known, config = command_line(parser, [*defaults, *arguments])
        subjects = checked(known, kind)
        mesh = make_mesh(config)
    except ValueError as error:
        refuse(str(error), code=2)
    device = torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)
    torch.use_deterministic_algorithms(config.train.deterministic)
    results = measure_all(subjects, known, partial(measure, config=config, mesh=mesh, device=device))
    repeatable = config.train.deterministic or kind == "cpu"
    problems = unlike(results) + (differing(results) if repeatable else [])
    if dist.get_rank() == 0:
        print("", *rows(results), *problems, sep="\n")
    shutdown()
    sys.exit(1 if problems else 0)


def checked(known: argparse.Namespace, kind: str) -> list[Subject]:
    """Check the options, and return the subjects to measure. Raises ConfigError for an invalid count or subject, and for
    --where without a GPU."""
    for name, count in COUNTS.items():
        check(count, getattr(known, name), f"--{name}")
    if known.where and kind != "cuda":
        raise ConfigError("--where lists the kernels of GPUs, and this program runs on the CPU: leave --where out")
    return subjects_of(known.subjects, kind)


def measure_all(
    subjects: Sequence[Subject], known: argparse.Namespace, measured: Callable[..., Result]
) -> list[Result]:
    """Measure subjects one after the other. Rank 0 prints each result and rewrites the files, so that a failure of a later
    subject loses nothing."""
    results: list[Result] = []
    for subject in subjects:
        results.append(measured(subject, warmup=known.warmup, steps=known.steps, where=known.where))
        if dist.get_rank() == 0:
            print(rows(results)[-1], flush=True)
            write_files(known, [asdict(result) for result in results], partial(plot, results))
    return results


if __name__ == "__main__":
    main(sys.argv[1:])
