"""Train a config on several meshes and on one rank, and compare the results tensor by tensor (`dlp.prove`, docs/prove.md).

    python -m launch.prove [CONFIG] [--meshes tp2 tp2+sp dp2 ...] [--steps N] [--exact] [--layers N] [--width N]
                           [--section.key value ...]

The model is shrunk to `--layers` blocks and hidden size `--width`; ffn and heads shrink about in proportion. kv_heads stays, so
that the shrunk model allows the same tp sizes as the full model. Tokens are random.
The exit code is 0 if on every mesh the run ends, the tensors agree with the tensors of one rank (within bounds, or bitwise with
`--exact`), and counted bytes agree with the plan; else 1.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

import dlp
from dlp.comm.mesh import ParallelDims
from dlp.optim.encodings import ENCODINGS
from dlp.parallel.traffic.ledger import activation_dtypes, plan_of
from dlp.parallel.traffic.predict import Traffic
from dlp.proof.cases import MESHES, MeshCase
from dlp.proof.report import Report
from launch.config.run_config import Config, command_line, count, make_parser
from launch.models.settings import Model
from launch.ranks.loopback_store import meet_on_loopback
from launch.ranks.process_exit import refuse
from launch.training.build import build, plan_for
from launch.training.step_update import Update
from launch.training.wire_bytes import planned, workload

LAYERS, WIDTH, VOCABULARY = 4, 256, 512
SEQUENCES, TOKENS, STEPS = 8, 64, 3  # sequences per step, largest number of tokens per sequence, optimizer steps


class Size(NamedTuple):
    """Number of blocks and hidden size of the shrunk model; None: the value of the config."""

    layers: int | None = LAYERS
    width: int | None = WIDTH


def shrunk(model: Model, size: Size) -> Model:
    """Return the model settings with at most `size.layers` blocks and hidden size `size.width`.

    ffn and heads shrink about in proportion; ffn becomes a multiple of 256 and head_dim a multiple of 16; kv_heads is
    unchanged. vocab becomes at most `VOCABULARY`, and rope_scaling is removed. If `size.width` is not smaller than the hidden
    size, only the number of blocks changes."""
    layers = min(size.layers or model.layers, model.layers)
    width = size.width or model.hidden
    if width >= model.hidden:
        return replace(model, layers=layers)
    groups = max(1, round(model.heads // model.kv_heads * width / model.hidden))
    heads = model.kv_heads * groups
    head_dim = max(16, round(width / heads / 16) * 16)
    ffn = max(256, round(model.ffn * width / model.hidden / 256) * 256)
    vocab = min(model.vocab, VOCABULARY)
    return replace(
        model, layers=layers, hidden=width, ffn=ffn, heads=heads, head_dim=head_dim, vocab=vocab, rope_scaling=None
    )


def provable(config: Config, size: Size, exact: bool = False) -> tuple[Config, list[str]]:
    """Return the config that `dlp.prove` runs, shrunk and without settings that `dlp.prove` does not support, and sentences
    about changes of the model, compile, cuda_graph, optimizer and invariant. Other changes have no sentence."""
    changes: dict[str, Any] = {"micro_batch": -1, "global_batch": SEQUENCES, "init_from": None}
    changes["sequence"] = min(config.train.sequence, TOKENS)
    remarks = []
    if config.train.compile:
        changes["compile"] = False
        remarks.append("[train] compile = false: compiled code calls no hooks")
    changes["cuda_graph"] = False
    if config.train.cuda_graph is True:
        remarks.append("[train] cuda_graph = false: a replayed graph calls no hooks")
    if config.train.optimizer in ENCODINGS:
        changes["optimizer"] = "adamw"
        remarks.append(
            f'[train] optimizer = "adamw": {config.train.optimizer} encodes averages by shard, '
            "and shards differ between meshes"
        )
    mesh = replace(config.mesh, dp_replicate=1, dp_shard=1, cp=1, tp=1)
    if exact:
        changes |= {"invariant": True, "reduce_gradients": "auto", "sentinel": 0, "main_grads": "off", "ledger": "off"}
        mesh = replace(mesh, grad_wire="auto")
        remarks.append("[train] invariant = true: bitwise equality between meshes requires invariant mode")
    model = shrunk(config.family, size)
    if model.fused:
        model = replace(model, fused=False)
        remarks.append("[model] fused = false: modules inside of a fused sequence call no hooks")
    data = replace(config.data, reset_attention=False)
    found = replace(config, model=model, train=replace(config.train, **changes), data=data, mesh=mesh)
    found = with_blocks_for_groups(found, config.family.layers)
    if found.family != config.family:
        model = found.family
        remarks.append(
            f"[model] layers = {model.layers}, hidden = {model.hidden}, ffn = {model.ffn}, heads = {model.heads}, "
            f"kv_heads = {model.kv_heads}, head_dim = {model.head_dim}, vocab = {model.vocab}: shrunk by --layers and --width"
        )
    return found, remarks


def with_blocks_for_groups(config: Config, most: int) -> Config:
    """Return the config with enough blocks that every layer group matches a layer.

    Tries 0, 1, 2, 4, 8, ... additional blocks, up to `most` blocks in total. If no number suffices, the config is returned
    unchanged.
    """
    least = config.family.layers
    if least == most:
        return config
    for layers in (least, *(least + 2**i for i in range(most.bit_length()) if least + 2**i <= most)):
        enlarged = replace(config, model=replace(config.family, layers=layers))
        try:
            plan_for(enlarged, 1, "cpu")
        except ValueError:  # if all sizes fail, `dlp.prove` raises the error again
            continue
        return enlarged
    return config


class _Updating:
    """Adapter from `Update` of the training loop to an optimizer; `step()` returns the gradient norm."""

    def __init__(self, update: Update, optimizer: Optimizer) -> None:
        self._update, self.zero_grad = update, optimizer.zero_grad

    def step(self) -> Tensor:
        return self._update()[0]


def on_mesh(config: Config, mesh: DeviceMesh, case: MeshCase) -> Config:
    """Return the config with the axis sizes of `mesh`, and the microbatch and sequence parallelism of `case`."""
    micro = config.train.global_batch // case.pieces
    asked = replace(
        config.mesh, **ParallelDims.from_mesh(mesh).sizes, sequence_parallel=case.sequence_parallel  # type: ignore[arg-type]
    )  # fmt: skip
    reduces = config.train.reduce_gradients if config.train.invariant else "step"
    train = replace(config.train, micro_batch=micro, reduce_gradients=reduces)
    return replace(config, mesh=asked, train=train)


def model_on(config: Config, mesh: DeviceMesh, case: MeshCase) -> tuple[Any, _Updating]:
    """Build the model and the optimizer as the training loop does on this mesh."""
    here = on_mesh(config, mesh, case)
    device = (
        torch.device(mesh.device_type, torch.cuda.current_device())
        if mesh.device_type == "cuda"
        else torch.device("cpu")
    )
    built = build(here, mesh, device)
    return built.model, _Updating(Update(built.model, built.optimizer, here.train, device), built.optimizer)


def tokens_of(config: Config, step: int) -> Tensor:
    """Return the random tokens [B, S + 1] of a step, equal on all ranks and meshes."""
    generator = torch.Generator().manual_seed(config.train.seed + step)
    shape = (config.train.global_batch, config.train.sequence + 1)
    return torch.randint(0, config.family.vocab, shape, generator=generator)


def loss(config: Config, model: Any, batch: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return this rank's share of the mean loss of a microbatch, as in the training loop: the sum over the tokens of this cp
    rank, divided by the number of tokens over all cp ranks."""
    tokens, targets = map(dlp.Context.of(mesh).split, (batch[:, :-1], batch[:, 1:]))
    z_loss, invariant = config.train.z_loss, config.train.invariant
    total = dlp.cross_entropy(model(tokens), targets.reshape(-1), mesh, z_loss=z_loss, invariant=invariant)
    return total / batch[:, 1:].numel()


def bytes_of(config: Config, model: Any, mesh: DeviceMesh, case: MeshCase) -> Traffic:
    """Return the bytes that a rank sends in a step according to the plan, including the all-reduce of the gradient norm, which
    is one number."""
    here, dims = on_mesh(config, mesh, case), ParallelDims.from_mesh(mesh)
    load = workload(here, mesh.size(), 1)
    load = replace(load, dp_shard_rank=dims.rank(dims.shard_axis), dtypes=activation_dtypes(model))
    return planned(plan_of(model), load, config.train.optimizer, shared_numbers=(1,))


def fitting(meshes: Sequence[str], config: Config) -> Iterator[str]:
    """Yield the names of the meshes. Raises ValueError if the config cannot run on a mesh, for example if tp does not divide
    the sizes of the model."""
    for name in meshes:
        case = MeshCase.parse(name)
        mesh = replace(config.mesh, tp=case.tp, cp=case.cp, sequence_parallel=case.sequence_parallel)
        try:
            replace(config, mesh=mesh)
        except ValueError as error:
            raise ValueError(f"mesh {name!r}: {error}; choose other meshes") from None
        yield name


def prove_config(config: Config, meshes: Sequence[str], *, steps: int = STEPS, exact: bool = False) -> Report:
    """Run `dlp.prove` for a config that `provable` has returned."""
    names = list(fitting(meshes, config))
    build_model, batch = partial(model_on, config), partial(tokens_of, config)
    wire = None if config.train.invariant else partial(bytes_of, config)
    return dlp.prove(build_model, batch, partial(loss, config), meshes=names, steps=steps, exact=exact, wire=wire)


def main(arguments: Sequence[str]) -> int:
    parser = make_parser(
        "launch.prove",
        "Compare training steps on meshes with steps on one rank, tensor by tensor. The exit code is 0 if all tensors agree, "
        "else 1.",
    )
    parser.add_argument(
        "--meshes",
        nargs="+",
        default=list(MESHES),
        metavar="MESH",
        help=f"tpN, dpN, cpN, hsdpNxM, accumulateN and sp, joined by x or + [{' '.join(MESHES)}]",
    )
    parser.add_argument(
        "--steps",
        type=count,
        default=STEPS,
        help=f"optimizer steps; bytes are counted from the third step on [{STEPS}]",
    )
    parser.add_argument(
        "--exact",
        action="store_true",
        help="require bitwise equality, in invariant mode; default: agreement within bounds",
    )
    parser.add_argument("--layers", type=count, default=LAYERS, help=f"blocks of the shrunk model [{LAYERS}]")
    parser.add_argument("--width", type=count, default=WIDTH, help=f"hidden size of the shrunk model [{WIDTH}]")
    try:
        options, config = command_line(parser, arguments)
        config, remarks = provable(config, Size(options.layers, options.width), options.exact)
        print(*remarks, sep="\n", flush=True)
        meet_on_loopback()
        report = prove_config(config, options.meshes, steps=options.steps, exact=options.exact)
    except ValueError as error:
        refuse(str(error))
    print(report)
    return 0 if report.ok else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
