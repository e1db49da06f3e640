"""Memory of a rank during a step, computed from a config. `--plan` prints the table; with `--device BOARD` a config that does
not fit is rejected. The sum of two parts is predicted:

    static      parameters, weights cast at the step boundary, optimizer states, workspaces, mapped memory, and, if steps are
                replayed as a CUDA graph, the memory of an eager validation and of an eager step with the sentinel
    temporary   gradients, saved activations, gathered weights, and working memory

The peak of a step is at one of four moments:

    loss         all activations are saved, and logits and their gradient exist
    last block   backward of the last block, while the activations of all other blocks are saved
    first block  backward of the first block: few activations, all gradients
    update       optimizer step and step boundary
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch

from dlp import Context, Plan
from dlp.comm.mapped import LEAST, slot_bytes
from dlp.comm.mesh import MAPPED, TP
from dlp.comm.slots import MAXIMA, mapped_bytes
from dlp.parallel.casts import operand_shape
from dlp.parallel.model.plan import table
from dlp.parallel.model.rows import LayerPlan, ParameterPlan
from dlp.parallel.traffic.predict import Workload, gather_passes, linear_weights, predicting, travels_as
from dlp.quant.recipe import Recipe
from launch.common.units import said_bytes
from launch.config.run_config import Config
from launch.estimate.saved_activations import REST, Saved, saved_by
from launch.models.architecture import block_of
from launch.ranks.links import transport_name
from launch.training.cuda_graph import replays_steps
from launch.training.gradient_accumulation import Accumulation
from launch.training.optimizer import state_bytes
from launch.training.recomputation import recomputed

WORKSPACES = 4 * 32 * 2**20  # bytes of the workspaces of cuBLASLt and cuBLAS, on the two streams that run GEMMs
MOMENTS = ("loss", "last block", "first block", "update")
ROWS = (
    "parameters", "cached operands", "optimizer", "gradients", "saved activations", "gathered", "at work",
    "symmetric memory", "validation", "sentinel", "workspaces",
)  # fmt: skip

OF_STEP = ("gradients", "saved activations", "gathered", "at work")  # rows of memory that a step allocates and frees


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank: `rows[row][moment]`, with rows of `ROWS` and moments of `MOMENTS`. `after`: number of completed steps
    after which the recipes change to those of this estimate; 0: the first recipes of the run."""

    rows: dict[str, dict[str, float]]
    after: int = 0

    @property
    def peak(self) -> float:
        return max(self.total(moment) for moment in MOMENTS)

    def total(self, moment: str) -> float:
        return sum(row[moment] for row in self.rows.values())

    def describe(self) -> list[str]:
        """Return the lines of the plan: the peak, and a table without rows that are zero."""
        cells = [
            (name, *(said_bytes(row[moment]) for moment in MOMENTS)) for name, row in self.rows.items() if any(row.values())
        ]  # fmt: skip
        cells.append(("together", *(said_bytes(self.total(moment)) for moment in MOMENTS)))
        worst = max(MOMENTS, key=self.total)
        said = f"memory: each rank needs {said_bytes(self.peak)} of tensors at once, most at the moment {worst!r}"
        said += f" with the recipes after step {self.after}" if self.after else ""
        return [said, "", *table(("what", *MOMENTS), cells)]


def memory(config: Config, plan: Plan, load: Workload, waits: Accumulation) -> Memory:
    """Return the memory of a rank in a step. `load`: sizes of a step; `waits`: decision about gradient accumulation. Raises
    Unpredictable if a user-defined format or strategy does not state sizes."""
    with predicting("a step in memory"):
        return _Estimate(config, plan, load, waits).memory()


def kinds_of_blocks(plan: Plan, blocks: Sequence[str]) -> dict[str, str]:
    """Map the name of each block to the name of the first block whose layers have equal rows in the plan."""
    said: dict[str, list[Any]] = {block: [] for block in blocks}
    for row in plan.layers:
        block = block_of(row.name, said)
        if block:
            kind = (
                row.name.removeprefix(block),
                row.shape,
                row.row,
                row.recipe,
                row.options,
                len(row.siblings),
            )
            said[block].append(kind)
    first: dict[Any, str] = {}
    return {block: first.setdefault(tuple(rows), block) for block, rows in said.items()}


def _renamed(row: LayerPlan, block: str, to: str) -> LayerPlan:
    """Return the row of a layer of `block`, renamed as the same layer of the block `to`."""
    name, *siblings = (each.replace(f"{block}.", f"{to}.", 1) for each in (row.name, *row.siblings))
    return replace(row, name=name, siblings=tuple(siblings))


class _Estimate:
    """Computation of the rows of `Memory` for one config."""

    def __init__(self, config: Config, plan: Plan, load: Workload, waits: Accumulation) -> None:
        self.config, self.plan, self.load, self.waits = config, plan, load, waits
        self.ranks = load.shards
        self.fsdp = bool(load.units)
        self.linears = linear_weights(plan)
        self.blocks = list(config.architecture.blocks)
        self.wide = load.dtype.itemsize
        self.units: dict[str, list[ParameterPlan]] = {block: [] for block in ("", *self.blocks)}
        for parameter in plan.weights:
            self.units[block_of(parameter.name, self.units)].append(parameter)

    def memory(self) -> Memory:
        saved = self._activations()
        rows = {name: dict.fromkeys(MOMENTS, 0.0) for name in ROWS}

        def stays(name: str, nbytes: float) -> None:
            rows[name] = dict.fromkeys(MOMENTS, nbytes)

        stays("parameters", self._sum(lambda p: 4 * self._kept_here(p)))
        stays("cached operands", self._operands())
        stays("optimizer", self._sum(self._states))
        stays("symmetric memory", self._symmetric())
        stays("validation", self._validation())
        stays("workspaces", WORKSPACES)
        every = sum(saved.values())
        rows["saved activations"] |= {
            "loss": every, "last block": every - saved[REST], "first block": saved[self.blocks[0]]
        }  # fmt: skip
        rows["gradients"] |= self._gradients()
        rows["gathered"] |= self._gathered()
        rows["at work"] |= self._work()
        if self.config.train.sentinel and replays_steps(self.config, self.plan.device_type):
            # A step of the sentinel is eager, and cannot use the memory that the graph has reserved
            of_step = [rows[name] for name in OF_STEP]
            stays("sentinel", max(sum(row[moment] for row in of_step) for moment in MOMENTS))
        return Memory(rows)

    def _states(self, p: ParameterPlan) -> float:
        return self._kept_here(p) * state_bytes(self.config.train.optimizer, p.name, p.shape, self.ranks)

    def _sum(self, of: Callable[[ParameterPlan], float], within: str | None = None) -> float:
        """Sum over all parameters, or over the parameters of one FSDP unit."""
        return sum(of(p) for p in (self.plan.weights if within is None else self.units[within]))

    def _kept_here(self, parameter: ParameterPlan) -> int:
        """Return the number of elements of a parameter on this rank, including padding by FSDP."""
        return prod(self.load.shard(parameter.shape, padded=True)) if self.fsdp else prod(parameter.shape)

    # Static memory

    def _operands(self) -> float:
        """Return the bytes of weight casts at the step boundary: copies in the dtype of activations, and quantized operands."""
        casts = self._shard_casts if self.fsdp and self.ranks > 1 else self._whole_casts
        return sum(casts(row, parameter) for row, parameter in self.linears.values())

    def _whole_casts(self, row: LayerPlan, parameter: ParameterPlan) -> float:
        if self.config.train.weight_cache != "step":
            return 0.0
        shape = (parameter.shape[0], parameter.shape[1])
        padded = operand_shape(row.recipe, "w", shape, False)
        copy = 0 if self.load.dtype == torch.float32 and padded == shape else prod(padded) * self.wide
        w = row.recipe.w
        orientations = ((w.rowwise, False), (w.columnwise, True))
        made = [
            quantizer.format.nbytes(operand_shape(row.recipe, "w", shape, columnwise), self.load.dtype)
            for quantizer, columnwise in orientations
            if not quantizer.format.keeps_source
        ]
        if self.fsdp and not made:
            return 0.0  # weights in high precision are cast by FSDP
        return copy + sum(made)

    def _shard_casts(self, row: LayerPlan, parameter: ParameterPlan) -> float:
        layouts = travels_as(row, parameter, self.load)
        if layouts is None:
            return 0.0
        shape = self.load.shard(parameter.shape, padded=True)
        made = [
            layout.format.nbytes(layout.of((shape[0], shape[1])), self.load.dtype)
            for layout in dict.fromkeys(layouts)
            if not layout.format.keeps_source
        ]
        copy = prod(shape) * self.wide if self.load.weight_dtype != torch.float32 else 0
        return copy + sum(made)

    def _symmetric(self) -> float:
        """Return an upper bound of the bytes of mapped memory for transfers over tp (`dlp.comm.mapped`).

        There are two buffers for each style and transfer size, because a pass has at most two transfers. A strategy with n
        pieces per rank adds n - 1 buffers of the smallest size. One further buffer serves amax agreements. Sizes are rounded
        up to the granularity of mapped memory."""
        ranks = self.load.ranks(TP)
        if ranks == 1 or transport_name(self.config.mesh.transport, self.load.dims, self.plan.device_type) != MAPPED:
            return 0.0
        linears = [(row, parameter) for row, parameter in self.linears.values() if row.style in ("column", "row")]
        sizes = {
            (row.row.name, slot_bytes(int(parameter.shape[row.style != "row"] * self.load.tokens * width)))
            for row, parameter in linears for width in self._sent_widths(row.recipe)
        }  # fmt: skip
        chosen = {(row.row.name, name) for row, _ in linears for name in strategies(row)}
        pieces = sum(int(name.partition(":")[2] or 1) - 1 for _, name in chosen)
        others = pieces * mapped_bytes(LEAST) + mapped_bytes(2 * 4 * MAXIMA * ranks)
        return float(2 * sum(mapped_bytes(size) for _, size in sizes) + others)

    def _sent_widths(self, recipe: Recipe) -> set[float]:
        """Return the possible numbers of bytes per element of a transfer over tp: sizes of the dtypes of activations and
        results, and, if transfers may be quantized, a half and a quarter of the size of activations (8 and 4 bits for bf16)."""
        summed = recipe.fprop, recipe.dgrad
        widths = {float(self.wide), *(float(each.out_dtype.itemsize) for each in summed if each.out_dtype)}
        if not recipe.x.keeps_source or any(each.wire != "hp" for each in summed):
            widths |= {self.wide / 2, self.wide / 4}
        return widths

    # Temporary memory

    def _activations(self) -> dict[str, float]:
        """Return the bytes of saved activations by block; the key `REST` is for modules outside of blocks. If
        `equal_blocks` of the architecture is set, blocks with equal rows in the plan are computed once."""
        train, dtype = self.config.train, self.load.weight_dtype if self.fsdp else torch.float32
        architecture = self.config.architecture
        kind = kinds_of_blocks(self.plan, self.blocks) if architecture.equal_blocks else {b: b for b in self.blocks}
        firsts = list(dict.fromkeys(kind.values()))
        model, names = architecture.estimated(self.plan.tp, len(firsts), self.load.dtype)
        if self.config.mesh.cp > 1:
            architecture.share_sequences(model, Context(self.config.mesh.cp, 0))
        run = dict(zip(firsts, names, strict=False))
        rows: list[Any] = [other for other in self.plan.others if not block_of(other.name, kind)]
        for row in self.plan.layers:
            block = block_of(row.name, kind)
            if not block or block in run:
                rows.append(_renamed(row, block, run[block]) if block else row)
        found = saved_by(
            model, list(run.values()), rows, self.plan.tp,
            (self.load.tokens // self.config.own_sequence, self.config.own_sequence), dtype, architecture.logits,
        )  # fmt: skip
        self.found: Saved = found
        whole = found.compiled if train.compile else found.eager
        used = {block: run[kind[block]] for block in self.blocks}
        kept = {block: float(whole.get(name, 0)) for block, name in used.items()} | {REST: float(whole.get(REST, 0))}
        for block in (self.blocks[i] for i in recomputed(train, len(self.blocks))):
            points = found.points[used[block]] if train.checkpointing == "selective" else 0
            kept[block] = float(min(found.inputs[used[block]] + points, kept[block]))
        self.recomputed = float(max(whole.get(name, 0) - kept[block] for block, name in used.items()))
        return kept

    def _gradients(self) -> dict[str, float]:
        """Return the bytes of fp32 gradients by moment, including accumulated gradients of earlier microbatches."""
        shards = self._sum(lambda p: 4 * self._kept_here(p))
        rest = self._sum(lambda p: 4 * self._kept_here(p), "")
        whole = self._sum(lambda p: 4 * prod(p.shape)) if self.waits.whole and self.waits.reductions == 1 else 0.0
        if whole:
            return {"loss": whole, "last block": whole, "first block": whole + shards, "update": shards}
        if self.load.microbatches > 1:
            return dict.fromkeys(MOMENTS, shards)
        return {"last block": rest, "first block": shards, "update": shards}

    def _gathered(self) -> dict[str, float]:
        """Return the bytes of weights gathered by FSDP, by moment. The root unit stays gathered from forward to backward. At
        most two blocks are gathered, the block in use and the next, which is prefetched. With reshard_after_forward = false,
        all blocks stay gathered until backward."""
        if not self.fsdp:
            return dict.fromkeys(MOMENTS, 0.0)
        root = self._unit_gathered("", again=False)
        if not self.load.resharded:
            blocks = [self._unit_gathered(block, again=False) for block in self.blocks]
            every = root + sum(blocks)
            return {"loss": every, "last block": every, "first block": root + max(blocks)}
        forward, backward = (
            max(self._unit_gathered(block, again=True, backward=in_backward) for block in self.blocks)
            for in_backward in (False, True)
        )
        return {"loss": root + forward, "last block": root + 2 * backward, "first block": root + 2 * backward}

    def _unit_gathered(self, unit: str, *, again: bool, backward: bool = False) -> float:
        """Return the bytes of a gathered FSDP unit in one pass. `again`: whether backward gathers the unit again."""
        return self._sum(lambda p: self._travels(p, again, backward), unit)

    def _travels(self, parameter: ParameterPlan, again: bool, backward: bool) -> float:
        shape = parameter.shape[0], prod(parameter.shape[1:])
        if self.ranks == 1:  # weights on one shard are not quantized for a gather
            return prod(shape) * self.load.weight_dtype.itemsize
        layouts = gather_passes(self.linears.get(parameter.name), parameter, self.load, again)[backward]
        return sum(
            layout.format.nbytes(layout.of(shape), self.load.weight_dtype, along=int(layout.transposed))
            for layout in layouts
        )

    def _work(self) -> dict[str, float]:
        """Return the bytes of working memory by moment: logits and their gradient, activations of a recomputed block, temporary
        tensors in the backward of a block, gradients that FSDP is reducing, and the gradient of the embedding."""
        unit = max(self._sum(lambda p: prod(p.shape), block) for block in self.blocks)
        head = max((prod(p.shape) for p in self.units[""]), default=0)
        made = self.load.weight_dtype.itemsize if self.fsdp else 4
        reduced = (
            (2 if self.load.grad_wire == "bf16" and self.config.mesh.grad_wire == "auto" else 4) if self.fsdp else 0
        )
        block = self.recomputed + self._block_work()
        root = self._sum(lambda p: prod(p.shape), "")
        return {
            "loss": self.found.logits + max(self.found.logits, made * head),
            "last block": block + made * unit + (reduced + made) * root * self.fsdp,
            "first block": max(block + (made + 2 * reduced) * unit * self.fsdp, (4 + made) * head + reduced * root),
        }

    def _validation(self) -> float:
        """Return the bytes of an eager validation, which cannot use the memory that a CUDA graph has reserved: logits, and two
        tensors of the widest activation of a block. Return 0 if steps are not replayed as a CUDA graph."""
        if not replays_steps(self.config, self.plan.device_type):
            return 0.0
        return self.found.logits + self._block_work() / 2

    def _block_work(self) -> float:
        """Return the bytes of activation gradients in the backward of an MLP: four tensors with the largest out_features of a
        linear in the blocks; without such linears, with the largest dimension of a parameter."""
        of_linears = [max(p.shape[0], 1) for row, p in self.linears.values() if block_of(p.name, self.units)]
        widest = max(of_linears or [max(p.shape, default=1) for block in self.blocks for p in self.units[block]])
        return 4.0 * self.load.tokens * widest * self.wide


def strategies(row: LayerPlan) -> set[str]:
    """Return the names of the overlap strategies of a layer."""
    return {row.overlap} if isinstance(row.overlap, str) else set(row.overlap.values())
