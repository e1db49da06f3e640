"""List the operations of one training step of a rank, with seconds, in the order of their launches.

Seconds are computed from bytes, FLOPs and the measured speeds of a board (`Rates`):

    GEMM                    2 M N K / FLOP/s of the recipe at the nearest measured sizes
    attention               FLOPs / FLOP/s; causal forward: 2 B S^2 heads head_dim FLOPs for B
                            sequences of S tokens, backward: 2.5 times as many
    pointwise, cast, sum    bytes read and written / memory bandwidth
    transfer                bytes that the rank sends (`dlp.parallel.traffic.predict`) / speed of the link; over tp and cp, a
                            latency in addition
    every kernel            in addition, the gap between two kernels

Not predicted: savings by document masks (attention counts complete sequences), the GEMMs of Muon, the data loader, validation
and checkpoints.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from math import prod

import torch

from dlp.comm.mesh import CP, DP_REPLICATE, MAPPED, TP
from dlp.parallel.model.rows import ParameterPlan
from dlp.parallel.traffic.predict import (
    LinearTraffic,
    Sends,
    gather_passes,
    linear_weights,
    linears_of,
    nothing,
    units_of,
)
from dlp.quant.quantizer import caps_of
from dlp.quant.recipe import Operand
from launch.common.devices import kind_of
from launch.config.run_config import Config
from launch.estimate.memory_check import Planned
from launch.estimate.rates import Rates
from launch.estimate.timeline import COMPUTE, DP_LINK, TP_LINK, Program
from launch.models.architecture import block_of
from launch.ranks.links import NETWORK, leaves_host, transport_name
from launch.training.attention_backend import FASTEST
from launch.training.build import attention_of
from launch.training.optimizer import state_bytes
from launch.training.recomputation import compiles_blocks, recomputed

CAST, ATTENTION, POINTWISE, LOSS = "casts", "attention", "norms, rope, activations", "loss"
OPTIMIZER, BOUNDARY, SUMS, COPIES = "optimizer", "weight casts", "sums", "FSDP's copies"
TRANSFER = "transfer"
OTHER_ATTENTION = 1.7  # time of attention by other backends, relative to cuDNN (bench.attention)
UNCOMPILED = 2.5  # bytes of pointwise kernels without torch.compile, relative to fused kernels
WIDE = 2  # bytes per element of a bf16 activation


class StepWork:
    """Builder of the programs of a step: `microbatch` (forward and backward) and `boundary` (optimizer and step boundary).

    Private methods append operations to the current program. Arguments `waits` are indices of operations that must end first.
    """

    def __init__(self, config: Config, found: Planned, rates: Rates, device: str) -> None:
        self.config, self.plan, self.load, self.rates = config, found.plan, found.load, rates
        self.attention = attention_of(config, kind_of(device)).backend
        self.model, self.train, blocks = config.family, config.train, frozenset(config.architecture.blocks)
        self.tp, self.shards = self.load.ranks(TP), self.load.shards
        self.tokens = self.load.tokens
        self.own_tokens = self.tokens // (self.tp if config.mesh.sequence_parallel else 1)
        self.program, self.kernels, self.collectives = Program(), 0, 0
        self.linears: dict[str, list[LinearTraffic]] = {}
        for linear in linears_of(self.plan, self.load):
            self.linears.setdefault(block_of(linear.name, blocks), []).append(linear)
        self.weights = linear_weights(self.plan)
        self.blocks = [block for block in self.linears if block]
        self.recomputed = {self.blocks[i] for i in recomputed(config.train, len(self.blocks))}
        self.fsdp = bool(self.load.units) and self.shards > 1
        self.units = units_of(self.plan, self.load) if self.fsdp else {}
        self.sent: dict[tuple[str, str], dict[str, int]] = {}  # (linear, pass) -> bytes by purpose
        self.mapped = transport_name(config.mesh.transport, found.dims, kind_of(device)) == MAPPED
        network = NETWORK.speed
        self.tp_speed = rates.link if self.mapped else network if leaves_host(TP, found.dims) else rates.nccl
        self.shard_axis = self.load.dims.shard_axis
        self.dp_speed = {
            axis: network if leaves_host(axis, found.dims) else rates.nccl
            for axis in (self.shard_axis, DP_REPLICATE, CP)
        }

    # Programs

    def microbatch(self, last: bool) -> Program:
        """Return the program of forward and backward of one microbatch. `last`: whether this is the last microbatch of the
        step, in which FSDP reduces accumulated gradients."""
        self.program = Program()
        reduces = last or self.load.reductions > 1
        root = self._gather("", backward=False)
        waiting = self._gather(self.blocks[0], backward=False)
        self._pointwise("embedding", 2 * WIDE * self.tokens * self.model.hidden / self.tp, waits=root)
        for i, block in enumerate(self.blocks):
            arrived = waiting
            waiting = self._gather(self.blocks[i + 1], backward=False) if i + 1 < len(self.blocks) else ()
            self._unit_arrives(block, arrived, backward=False)
            self._forward(block)
        self._loss()
        order = self.blocks[::-1]
        waiting = self._gather(order[0], backward=True)
        for i, block in enumerate(order):
            arrived = waiting
            waiting = self._gather(order[i + 1], backward=True) if i + 1 < len(order) else ()
            self._unit_arrives(block, arrived, backward=True)
            self._backward(block)
            self._reduce(block, reduces)
        if not self.fsdp and self.load.microbatches > 1:  # gradients are accumulated in fp32
            elements = sum(prod(p.shape) for p in self.plan.weights)
            self._compute("gradients add up", SUMS, 12 * elements / self.rates.memory, kernels=len(self.plan.weights))
        rows = self.model.vocab / self.tp * self.model.hidden
        self._pointwise("embedding gradient", rows * (16 if self.model.tie_embeddings else 4), kernels=3)
        self._reduce("", reduces)
        return self.program

    def boundary(self) -> Program:
        """Return the program of gradient norm, optimizer and casts of weights."""
        self.program = Program()
        elements = sum(self._kept_here(p) for p in self.plan.weights)
        self._compute("gradient norm", OPTIMIZER, 4 * elements / self.rates.norm, kernels=60)
        moved = sum(self._kept_here(p) * (12 + 2 * self._state_bytes(p)) for p in self.plan.weights)
        self._compute("optimizer", OPTIMIZER, moved / self.rates.optimizer, kernels=30)
        for row, parameter in self.weights.values():
            if self.load.weight_cache != "step" and not self.fsdp:
                continue
            count = self._kept_here(parameter)
            copied = 6 * count if not (self.fsdp and row.recipe.w.keeps_source) else 0
            made = self._cast_bytes(row.recipe.w, count)
            self._compute(f"{row.name} weight", BOUNDARY, (copied + made) / self.rates.memory, kernels=2)
        return self.program

    def host_seconds(self) -> float:
        """Return the seconds that the host needs to launch the programs built so far, without a CUDA graph."""
        return self.kernels * self.rates.host + self.collectives * self.rates.host_collective

    # Blocks

    def _forward(self, block: str) -> None:
        self._norm(f"{block} norm", forward=True)
        self._forwards(block, "q_proj", "k_proj", "v_proj")
        self._rope(block)
        self._attention(block, forward=True)
        self._forwards(block, "o_proj")
        self._norm(f"{block} norm", forward=True)
        self._forwards(block, "gate_proj", "up_proj")
        self._activation(block, forward=True)
        self._forwards(block, "down_proj")

    def _backward(self, block: str) -> None:
        if block in self.recomputed:
            self._again(block)
        self._backwards(block, "down_proj")
        self._activation(block, forward=False)
        self._backwards(block, "up_proj", "gate_proj")
        self._norm(f"{block} norm", forward=False)
        self._backwards(block, "o_proj")
        self._attention(block, forward=False)
        self._rope(block)
        self._backwards(block, "v_proj", "k_proj", "q_proj")
        self._norm(f"{block} norm", forward=False)

    def _again(self, block: str) -> None:
        """Append the recomputation of a block: its complete forward, or only the pointwise kernels if selective."""
        if self.train.checkpointing == "full":
            self._forward(block)
            return
        for _ in range(2):
            self._norm(f"{block} norm again", forward=True)
        self._rope(block)
        if gathered := self._keys(block):
            self._compute(f"{block} keys again", ATTENTION, 0.0, waits=gathered)
        self._activation(block, forward=True)

    def _named(self, block: str, names: Sequence[str]) -> list[LinearTraffic]:
        """Return the linears of a block with these names. Siblings have one entry, under the name of the first sibling."""
        found = {linear.name.rpartition(".")[2]: linear for linear in self.linears[block]}
        return [found[name] for name in names if name in found]

    def _forwards(self, block: str, *names: str) -> None:
        for linear in self._named(block, names):
            self._linear_forward(linear)

    def _backwards(self, block: str, *names: str) -> None:
        for linear in self._named(block, names):
            self._linear_backward(linear)

    def _norm(self, name: str, *, forward: bool) -> None:
        """Append one kernel for a norm and the addition of the residual. Forward reads two tensors and writes two; backward
        reads and writes five tensors in total."""
        moved = (4 if forward else 5) * WIDE * self.own_tokens * self.model.hidden
        self._pointwise(name, moved)

    def _rope(self, block: str) -> None:
        features = (self.model.heads + self.model.kv_heads) * self.model.head_dim / self.tp
        self._pointwise(f"{block} rope", 2 * WIDE * self.tokens * features, kernels=2)

    def _activation(self, block: str, *, forward: bool) -> None:
        moved = (3 if forward else 5) * WIDE * self.tokens * self.model.ffn / self.tp
        self._pointwise(f"{block} SwiGLU", moved)

    def _attention(self, block: str, *, forward: bool) -> None:
        m, sequence = self.model, self.train.sequence
        rate = self.rates.attention_rate(sequence, m.head_dim)
        work = 2.0 * self.tokens * sequence * m.heads * m.head_dim / self.tp
        seconds = work / rate.forward if forward else 2.5 * work / rate.backward
        seconds *= 1.0 if self.attention == FASTEST else OTHER_ATTENTION
        pass_name = "forward" if forward else "backward"
        gathered = self._keys(block) if forward else ()
        self._compute(f"{block} attention {pass_name}", ATTENTION, seconds, kernels=2 if forward else 4, waits=gathered)
        if not forward and (reduced := self._keys(block)):
            self._compute(f"{block} gradients of keys", SUMS, 0.0, waits=reduced)

    def _keys(self, block: str) -> tuple[int, ...]:
        """Append the transfer of keys and values, or of their gradients, over cp; return its index as a tuple to wait for,
        empty without cp."""
        ranks = self.load.ranks(CP)
        if ranks == 1:
            return ()
        sent = self.load.tokens * self.load.keys_reduced / len(self.blocks) * WIDE * (ranks - 1)
        seconds = sent / self.dp_speed[CP] + self.rates.meeting
        self.collectives += 1
        return (self.program.add(f"{block} keys", TRANSFER, seconds, DP_LINK, self.program.last),)

    def _loss(self) -> None:
        """Append forward and backward of final norm, head and loss."""
        self._norm("final norm", forward=True)
        heads = self.linears.get("", [])
        for head in heads:
            self._linear_forward(head)
        logits = WIDE * self.tokens * self.model.vocab / self.tp
        self._compute("loss", LOSS, 3 * logits / self.rates.memory, kernels=6)
        for head in heads:
            self._linear_backward(head)
        self._norm("final norm", forward=False)

    # Linears

    def _linear_forward(self, linear: LinearTraffic) -> None:
        sent = self._sent(linear, "forward")
        self._cast(linear, "x", linear.shapes[0][1])
        seconds, kernels = self._gemm_seconds(linear, "fprop"), len(linear.rows)
        self._agree(linear, sent)
        if linear.style.fprop.gather:
            self._gathered(linear, "fprop", sent.get("fprop", 0), seconds, kernels)
        elif sent.get("fprop"):
            waits = self._sent_behind(linear, "fprop", sent["fprop"], seconds, kernels)
            self._sum(linear, "fprop", linear.shapes[0][0], waits)
        else:
            self._compute(f"{linear.name} fprop", gemms_of(linear), seconds, kernels=kernels)

    def _linear_backward(self, linear: LinearTraffic) -> None:
        sent = self._sent(linear, "backward")
        x_again: tuple[int, ...] = ()
        if sent.get("wgrad"):
            x_again = (self._transfer(f"{linear.name} gather x", sent["wgrad"]),)
        for n, _ in linear.shapes:
            self._cast(linear, "dy", n)
        self._agree(linear, sent)
        seconds, members, waits = self._gemm_seconds(linear, "dgrad"), len(linear.rows), tuple[int, ...]()
        if linear.style.dgrad.gather:
            self._gathered(linear, "dgrad", sent.get("dgrad", 0), seconds, members)
        elif sent.get("dgrad"):
            waits = self._sent_behind(linear, "dgrad", sent["dgrad"], seconds, members)
        else:
            self._compute(f"{linear.name} dgrad", gemms_of(linear), seconds, kernels=members)
        if members > 1 and not linear.rows[0].one_dgrad:  # results of the dgrad GEMMs of siblings are added in fp32
            rows = linear.plan.rows("x") * (self.tp if linear.style.cut_x == 0 else 1)
            moved = rows * linear.shapes[0][1] * (8 * (members - 1) + 4 + WIDE)
            self._compute(f"{linear.name} dgrad sums", SUMS, moved / self.rates.memory)
        if not linear.recipe.x.keeps_source and linear.style.cut_x == 0:  # gathered codes are transposed for wgrad
            moved = 2 * self.tokens * linear.shapes[0][1]
            self._compute(f"{linear.name} transpose", CAST, moved / self.rates.memory, waits=x_again)
        self._compute(
            f"{linear.name} wgrad",
            gemms_of(linear),
            self._gemm_seconds(linear, "wgrad"),
            kernels=members,
            waits=x_again,
        )
        if waits:
            self._sum(linear, "dgrad", linear.shapes[0][1], waits)

    def _sent(self, linear: LinearTraffic, pass_name: str) -> dict[str, int]:
        """Return the bytes that a linear sends in one pass, by purpose. Computed once for all microbatches."""
        key = linear.name, pass_name
        if key not in self.sent:
            self.sent[key] = by_purpose(linear.forward() if pass_name == "forward" else linear.backward())
        return self.sent[key]

    def _gemm_seconds(self, linear: LinearTraffic, gemm: str) -> float:
        gathered = linear.style.cut_x == 0 or linear.style.cut_dy == 0
        rows = self.tokens if gathered or not self.config.mesh.sequence_parallel else linear.plan.rows("x")
        features = sum(n for n, _ in linear.shapes)
        return self.rates.gemm(linear.recipe, gemm, (rows, features, linear.shapes[0][1]))

    def _cast(self, linear: LinearTraffic, tensor: str, features: int) -> None:
        operand: Operand = getattr(linear.recipe, tensor)
        rows = linear.plan.rows(tensor)
        moved = self._cast_bytes(operand, rows * features)
        if moved:
            self._compute(f"{linear.name} cast {tensor}", CAST, moved / self.rates.memory, kernels=3)

    def _cast_bytes(self, operand: Operand, elements: float) -> float:
        """Return the bytes that a cast in both orientations reads and writes: one read for the amax, if the quantizer needs it,
        one read for the cast, and the written codes."""
        if operand.keeps_source:
            return 0.0
        return elements * _bytes_per_element(operand, self.load.dtype)

    def _agree(self, linear: LinearTraffic, sent: dict[str, int]) -> None:
        """Append the agreement of tp ranks on amaxes, if the linear has one. Its duration is that of an empty transfer."""
        if sent.get("amax"):
            agreed = self._transfer(f"{linear.name} amax", 0)
            self._compute(f"{linear.name} scales", CAST, 0.0, waits=(agreed,))

    # Transfers of tp

    def _pieces(self, linear: LinearTraffic, gemm: str) -> int:
        """Return the number of pieces into which the strategy divides the transfer of a GEMM; 0: no overlap."""
        chosen = linear.rows[0].overlap
        name, _, per_rank = (chosen if isinstance(chosen, str) else chosen.get(gemm, "serial")).partition(":")
        return 0 if name == "serial" else (self.tp - 1) * int(per_rank or 1)

    def _gathered(self, linear: LinearTraffic, gemm: str, nbytes: int, seconds: float, kernels: int) -> None:
        """Append a gather and its GEMM: one GEMM after the transfer; or with overlap a GEMM on the local rows, and one GEMM on
        each piece as it arrives."""
        name, pieces = f"{linear.name} {gemm}", self._pieces(linear, gemm)
        if not pieces or not nbytes:
            waits = (self._transfer(f"{linear.name} gather", nbytes),) if nbytes else ()
            self._compute(name, gemms_of(linear), seconds, kernels=kernels, waits=waits)
            return
        ready = self.program.last
        transfers = [self._transfer(f"{linear.name} gather", nbytes / pieces, ready) for _ in range(pieces)]
        self._compute(name, gemms_of(linear), seconds / self.tp, kernels=kernels)
        for transfer in transfers:
            part = seconds * (1 - 1 / self.tp) / pieces
            self._compute(name, gemms_of(linear), part, kernels=kernels, waits=(transfer,))

    def _sent_behind(
        self, linear: LinearTraffic, gemm: str, nbytes: int, seconds: float, kernels: int
    ) -> tuple[int, ...]:
        """Append a GEMM and the transfers of its result to other ranks. Returns the last transfer as a tuple to wait for."""
        name, pieces = f"{linear.name} {gemm}", self._pieces(linear, gemm)
        if not pieces:
            self._compute(name, gemms_of(linear), seconds, kernels=kernels)
            return (self._transfer(f"{linear.name} reduce", nbytes),)
        transfers = []
        for _ in range(pieces):
            self._compute(name, gemms_of(linear), seconds * (1 - 1 / self.tp) / pieces, kernels=kernels)
            transfers.append(self._transfer(f"{linear.name} reduce", nbytes / pieces))
        self._compute(name, gemms_of(linear), seconds / self.tp, kernels=kernels)
        return (transfers[-1],)

    def _sum(self, linear: LinearTraffic, gemm: str, features: int, waits: tuple[int, ...]) -> None:
        """Append the sum of the contributions of all tp ranks."""
        moved = (self.tp + 1) * WIDE * self.own_tokens * features
        self._compute(f"{linear.name} {gemm} sum", SUMS, moved / self.rates.memory, waits=waits)

    def _transfer(self, name: str, nbytes: float, waits: tuple[int, ...] | None = None) -> int:
        seconds = nbytes / self.tp_speed + self.rates.meeting
        self.collectives += not self.mapped
        return self.program.add(name, TRANSFER, seconds, TP_LINK, self.program.last if waits is None else waits)

    # FSDP

    def _gather(self, unit: str, *, backward: bool) -> tuple[int, ...]:
        """Append the gather of the weights of an FSDP unit, which starts before the weights are needed, because FSDP prefetches
        units. Returns the index of the gather as a tuple to wait for, empty if nothing is gathered."""
        nbytes = self._gathered_bytes(unit, backward)
        if not nbytes:
            return ()
        sent = nbytes * (self.shards - 1) / self.shards
        seconds = sent / self.dp_speed[self.shard_axis]
        return (self.program.add(f"{unit or 'root'} gather weights", TRANSFER, seconds, DP_LINK, self.program.last),)

    def _unit_arrives(self, unit: str, waits: tuple[int, ...], *, backward: bool) -> None:
        """Append the copy of gathered weights out of the buffer of the collective."""
        if waits:
            seconds = 2 * self._gathered_bytes(unit, backward) / self.rates.memory
            self._compute(f"{unit} copy out", COPIES, seconds, kernels=2, waits=waits)

    def _gathered_bytes(self, unit: str, backward: bool) -> float:
        """Return the bytes of the gathered weights of a unit in one pass; 0 if the unit is not gathered."""
        again = bool(unit) and self.load.resharded
        if not self.fsdp or (backward and not again):
            return 0.0
        total = 0.0
        for parameter in self.units[unit]:
            layouts = gather_passes(self.weights.get(parameter.name), parameter, self.load, again)[backward]
            shape = (parameter.shape[0], prod(parameter.shape[1:]))
            total += sum(
                layout.format.nbytes(layout.of(shape), self.load.weight_dtype, along=int(layout.transposed))
                for layout in layouts
            )
        return total

    def _reduce(self, unit: str, reduces: bool) -> None:
        """Append the work on the gradients of an FSDP unit after its backward: the sum with gradients of earlier microbatches,
        and with `reduces` the copy into a buffer and the reduction."""
        if not self.fsdp:
            return
        elements = sum(prod(p.shape) for p in self.units[unit])
        if not reduces or (self.load.reductions == 1 and self.load.microbatches > 1):
            self._compute(
                f"{unit or 'root'} gradients are reduced", COPIES, 10 * elements / self.rates.memory, kernels=8
            )
        if not reduces:
            return
        width = 4 if self.load.grad_wire is None else {"fp8": 1.03}.get(self.load.grad_wire, WIDE)
        self._compute(f"{unit or 'root'} copy in", COPIES, (WIDE + width) * elements / self.rates.memory, kernels=2)
        sent = width * elements * (self.shards - 1) / self.shards / self.dp_speed[self.shard_axis]
        replicas = self.load.ranks(DP_REPLICATE)
        if replicas > 1:
            shard = 4 * elements / self.shards
            sent += 2 * shard * (replicas - 1) / replicas / self.dp_speed[DP_REPLICATE]
        reduced = self.program.add(f"{unit or 'root'} reduce", TRANSFER, sent, DP_LINK, self.program.last)
        if not unit:  # the optimizer waits for the reduction of the root unit, the last one
            self._compute("gradients arrive", COPIES, 0.0, waits=(reduced,))

    # Parts

    def _kept_here(self, parameter: ParameterPlan) -> int:
        return prod(self.load.shard(parameter.shape, padded=True)) if self.fsdp else prod(parameter.shape)

    def _state_bytes(self, parameter: ParameterPlan) -> float:
        return state_bytes(self.train.optimizer, parameter.name, parameter.shape, self.shards)

    def _pointwise(self, name: str, moved: float, kernels: int = 1, waits: Sequence[int] = ()) -> None:
        moved *= 1.0 if compiles_blocks(self.train) else UNCOMPILED
        self._compute(name, POINTWISE, moved / self.rates.memory, kernels=kernels, waits=waits)

    def _compute(self, name: str, kind: str, seconds: float, *, kernels: int = 1, waits: Sequence[int] = ()) -> None:
        self.program.add(name, kind, seconds + kernels * self.rates.gap, COMPUTE, waits)
        self.kernels += kernels


def gemms_of(linear: LinearTraffic) -> str:
    """Return the kind of device time of the GEMMs of a linear: "GEMMs, RECIPE"."""
    return f"GEMMs, {linear.recipe.name}"


@cache
def _bytes_per_element(operand: Operand, dtype: torch.dtype) -> float:
    observes = caps_of(operand.rowwise).slot is None and operand.rowwise.observe(nothing((128, 128))) is not None
    formats = operand.rowwise.format, operand.columnwise.format
    return WIDE * (1 + observes) + sum(fmt.nbytes((1024, 1024), dtype) / 2**20 for fmt in formats)


def by_purpose(sends: Sends) -> dict[str, int]:
    """Return the sums of bytes by purpose, without purposes that send nothing."""
    found: dict[str, int] = {}
    for sent, nbytes in sends:
        found[sent.purpose] = found.get(sent.purpose, 0) + nbytes
    return {purpose: nbytes for purpose, nbytes in found.items() if nbytes}
