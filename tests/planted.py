"""Planted faults of parallel training, each with the layer, the tensor and the kind that `dlp.prove` should name.

`FAULTS` lists the faults; `built` builds a small Llama with biases on a mesh and plants one fault. A fault patches dlp,
the model or FSDP, and thus imitates a mistake in their code. Its docstring, or its name in `FAULTS`, states the wrong
behaviour.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

import dlp
from dlp import LayerGroup
from dlp.comm import collectives
from dlp.comm.collectives import done
from dlp.comm.mesh import ParallelDims
from dlp.parallel import casts
from dlp.parallel.linear import functional
from dlp.parallel.linear.modules import ParallelLinear
from dlp.parallel.model import embedding
from dlp.parallel.model.session import session_of
from dlp.parallel.weight.fsdp2 import CodecReduceScatter
from dlp.parallel.weight.local import LocalWeight, local_values
from dlp.proof.cases import MeshCase
from dlp.quant.fp8 import CurrentScaling
from launch.models import modules
from launch.models.modules import Llama
from launch.models.parallel import parallel_groups, set_context
from launch.models.settings import Model
from launch.training.gradient_norm import GradientNorm
from tests.multigpu import test_equivalence as equivalence

CONFIG = Model(layers=2, hidden=64, ffn=192, heads=4, kv_heads=4, head_dim=16, vocab=64)
BATCH, SEQUENCE = 8, 16
MODELS = {"fp32": "bf16", "fp8": "fp8_current", "delayed": "fp8_delayed", "tied": "bf16", "dropout": "bf16"}


class SeededDropout(nn.Dropout):
    """Dropout with a mask that depends on `seed` and the number of the call. Ranks with different tokens get different
    seeds."""

    seed = 0
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        with torch.random.fork_rng([]):
            torch.manual_seed(1000 * self.seed + self.calls)
            return super().forward(x)


class Here(NamedTuple):
    """Model, optimizer, mesh and case in which a fault is planted. `stack` removes the patches at the end."""

    model: Any
    optimizer: torch.optim.Optimizer
    mesh: DeviceMesh
    case: MeshCase
    stack: ExitStack

    @property
    def tp(self) -> int:
        return self.mesh.get_local_rank("tp")

    @property
    def dp(self) -> int:
        return ParallelDims.from_mesh(self.mesh).dp_rank

    def patch(self, owner: Any, name: str, value: Any) -> None:
        self.stack.enter_context(patch.object(owner, name, value))


class _Stepping:
    """An optimizer whose step returns the global gradient norm."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.norm, self.optimizer, self.zero_grad = GradientNorm(model.parameters()), optimizer, optimizer.zero_grad

    def step(self) -> Tensor:
        norm = self.norm()
        self.optimizer.step()
        return norm


def llama(kind: str) -> Llama:
    with torch.device("meta"):
        model = Llama(replace(CONFIG, tie_embeddings=kind == "tied"), torch.float32)
        for module in model.model.layers.modules():
            if isinstance(module, nn.Linear):
                module.bias = nn.Parameter(torch.empty(module.out_features))
        for block in model.model.layers if kind == "dropout" else ():
            block.mlp.dropout = SeededDropout(0.25)
            block.mlp.register_forward_hook(lambda mlp, args, y: mlp.dropout(y))
    return model


def built(
    mesh: DeviceMesh, case: MeshCase, kind: str, plant: Any = None, stack: ExitStack | None = None
) -> tuple[Any, Any]:
    model = llama(kind)
    recipe = LayerGroup("recipe", ["layers.**.*_proj"], recipe=MODELS[kind])
    groups = [*parallel_groups(model.config, case.sequence_parallel), recipe]
    micro = BATCH // case.pieces
    if case.cp > 1:
        set_context(model, dlp.Context.of(mesh))
    dlp.convert(model, groups, mesh, batch=(micro, SEQUENCE // case.cp))
    if case.dp * case.cp > 1:
        policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
        for block in model.model.layers:
            dlp.fully_shard(block, mesh=mesh, mp_policy=policy)
        dlp.fully_shard(model, mesh=mesh, mp_policy=policy)
    equivalence.materialise(model)
    tp, dp = mesh.get_local_rank("tp"), ParallelDims.from_mesh(mesh).dp_rank
    for module in model.modules():
        if isinstance(module, SeededDropout):
            module.seed = 1 + dp * case.tp + (tp if case.sequence_parallel else 0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
    dlp.attach(model, optimizer)
    if plant is not None:
        assert stack is not None
        plant(Here(model, optimizer, mesh, case, stack))
    return model, _Stepping(model, optimizer)


def tokens(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(5 + step)
    return torch.randint(0, CONFIG.vocab, (BATCH, SEQUENCE + 1), generator=generator)


def loss(model: nn.Module, text: Tensor, mesh: DeviceMesh) -> Tensor:
    context = dlp.Context.of(mesh)
    tokens, targets = context.split(text[:, :-1]), context.split(text[:, 1:]).reshape(-1)
    return dlp.cross_entropy(model(tokens), targets, mesh) / text[:, 1:].numel()


# ---- faults


def unsummed(linears: bool) -> Callable[[Here], None]:
    def plant(here: Here) -> None:
        partial = here.model.partial_gradients
        kept = [slot for slot in partial.slots if isinstance(slot.module, ParallelLinear) != linears]
        assert 0 < len(kept) < len(partial.slots)
        here.patch(partial, "slots", kept)

    return plant


def summed_again(here: Here) -> None:
    """All partial gradients (of norms and biases) are summed over tp twice."""
    partial = here.model.partial_gradients
    once = partial._sum

    def twice() -> None:
        due = list(partial._due)
        once()
        for parameter in due:
            grad = local_values(parameter.grad)
            grad.copy_(collectives.all_reduce(grad, partial.group).wait())

    here.patch(partial, "_sum", twice)


def never_cleared(here: Here) -> None:
    """Every tp rank keeps the summed gradient, so that gradients of earlier microbatches are summed again."""

    class One:
        def __init__(self, group: Any) -> None:
            self.group = group

        def rank(self) -> int:
            return 0

        def size(self) -> int:
            return self.group.size()

    partial = here.model.partial_gradients
    group, once = partial.group, partial._sum
    partial.group = One(group)

    def summed() -> None:
        partial.group = group
        once()
        partial.group = One(group)

    here.patch(partial, "_sum", summed)


def no_reduction(which: str, layer: str) -> Callable[[Here], None]:
    """Return a fault: one GEMM of a layer keeps the partial result of the rank, which is not summed over tp."""

    def plant(here: Here) -> None:
        original = functional.token_gemm

        def token_gemm(spec: Any, reduce: Any, operands: Any, gemms: Any, wire: Any) -> Any:
            if not spec.name.startswith(f"model.{layer}") or reduce is None or gemms[0].which != which:
                return original(spec, reduce, operands, gemms, wire)
            result = original(spec, None, operands, gemms, wire)
            assert isinstance(result, Tensor)
            if reduce.how == "scatter":
                result = result.chunk(spec.tp)[spec.tp_group.rank()].contiguous()
            return done(result.to(wire))

        here.patch(functional, "token_gemm", token_gemm)

    return plant


def reduced_over_dp(here: Here) -> None:
    """o_proj of block 1 sums its result over dp instead of tp."""
    original, dp = functional.token_gemm, here.mesh.get_group("dp_shard")

    def token_gemm(spec: Any, reduce: Any, operands: Any, gemms: Any, wire: Any) -> Any:
        if spec.name != "model.layers.1.self_attn.o_proj" or reduce is None:
            return original(spec, reduce, operands, gemms, wire)
        return collectives.all_reduce(original(spec, None, operands, gemms, wire), dp)

    here.patch(functional, "token_gemm", token_gemm)


def one_sibling(here: Here) -> None:
    """dx of q, k and v lacks the contribution of v."""
    original = functional.token_gemm

    def token_gemm(spec: Any, reduce: Any, operands: Any, gemms: Any, wire: Any) -> Any:
        if spec.name.startswith("model.layers.1.self_attn.q_proj") and len(gemms) == 3:
            operands, gemms = operands[:2], [gemms[0], replace(gemms[1], out_dtype=gemms[2].out_dtype)]
        return original(spec, reduce, operands, gemms, wire)

    here.patch(functional, "token_gemm", token_gemm)


def other_pass(layer: str, change: Callable[[Here, Tensor, int], Tensor]) -> Callable[[Here], None]:
    """Return a fault that replaces every output y of a module by `change(here, y, number of the call)`."""

    def plant(here: Here) -> None:
        module, calls = here.model.get_submodule(f"model.{layer}" if layer != "lm_head" else layer), [0]
        forward = module.forward

        def changed(*args: Any) -> Any:
            calls[0] += 1
            return change(here, forward(*args), calls[0])

        here.patch(module, "forward", changed)

    return plant


def wgrad(layer: str, change: Callable[[Here, Tensor, int], Tensor]) -> Callable[[Here], None]:
    """Return a fault that replaces every dw of a layer by `change(here, dw, number of the call)`."""

    def plant(here: Here) -> None:
        original, calls = functional.contract_gemm, [0]

        def contract_gemm(bound: Any, *args: Any, **more: Any) -> Tensor:
            dw = original(bound, *args, **more)
            if bound.spec.name != f"model.{layer}":
                return dw
            calls[0] += 1
            return change(here, dw, calls[0])

        here.patch(functional, "contract_gemm", contract_gemm)

    return plant


def gradient_factor(factor: float) -> Callable[[Here], None]:
    """Return a fault: after FSDP's reduction, the gradients of block 1 are multiplied by `factor`."""

    class Scaled(CodecReduceScatter):
        def __call__(self, output_tensor: Tensor, *args: Any, **more: Any) -> None:
            super().__call__(output_tensor, *args, **more)
            output_tensor.mul_(factor)

    return lambda here: here.model.model.layers[1].set_custom_reduce_scatter(Scaled(collectives.AS_IT_IS))


def gradients_of_one_rank(here: Here) -> None:
    """FSDP does not reduce the gradients of block 1, so they cover only the tokens of this rank."""

    class Own(CodecReduceScatter):
        def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, *args: Any, **more: Any) -> None:
            super().__call__(output_tensor, input_tensor, group, *args, **more)
            output_tensor.copy_(input_tensor.chunk(group.size())[group.rank()] / group.size())

    here.model.model.layers[1].set_custom_reduce_scatter(Own(collectives.AS_IT_IS))


def never_recast(here: Here) -> None:
    """The step boundary casts the weight of one layer only once, and not again after updates."""
    original = LocalWeight.casts

    def cast_once(weight: Any, values: Any) -> Any:
        stale = weight.name == "model.layers.1.mlp.down_proj" and weight.parts
        return [] if stale else original(weight, values)

    here.patch(LocalWeight, "casts", cast_once)
    weights = here.model.model.layers[1].mlp.down_proj.core.weights.members[0]
    take = type(weights).take
    here.patch(type(weights), "take", lambda self, operands: take(self, operands) if operands else None)


def stale_gather(here: Here) -> None:
    """For one layer, FSDP gathers the weight of the previous step."""
    module = here.model.model.layers[1].mlp.down_proj
    before: list[Tensor] = []

    def old(module: nn.Module, args: Any) -> None:
        weight = local_values(module.weight).data  # autograd does not see writes into `data`, nor writes of FSDP
        now = weight.clone()
        if before:
            weight.copy_(before[-1])
        before.append(now)

    module.register_forward_pre_hook(old)


def agrees_nowhere(here: Here) -> None:
    here.patch(casts, "agrees", lambda *_, **__: False)


def agreed_over_tp(here: Here) -> None:
    """Ranks agree on delayed scales over tp, but not over dp."""
    session_of(here.model).amax_group = here.mesh.get_group("tp")


def other_scale(here: Here) -> None:
    """For one weight, tp rank 1 reads a scale that is 1.37 times too large."""
    if here.tp == 1:
        other_pass("layers.0.mlp.up_proj", lambda here, y, call: 1.37 * (y - held_bias(here)) + held_bias(here))(here)


def held_bias(here: Here) -> Tensor:
    return local_values(here.model.model.layers[0].mlp.up_proj.bias)


def other_shard(here: Here) -> None:
    """The ranks of tp have each other's shard of a weight."""
    weight = here.model.model.layers[0].mlp.down_proj.weight
    gathered = collectives.all_gather(
        (local_values(weight)[None].contiguous(),), (0,), here.mesh.get_group("tp")
    ).wait()[0]
    with torch.no_grad():
        local_values(weight).copy_(gathered[1 - here.tp])


def own_seed(here: Here) -> None:
    """Ranks begin with unequal weights of a norm: tp rank 1 adds noise to its copy."""
    with torch.no_grad():
        weight = local_values(here.model.model.layers[1].input_layernorm.weight)
        weight.add_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)) * here.tp)


def other_rows(here: Here) -> None:
    """The gather of x returns the tokens of ranks in another order."""
    other_pass("layers.0.self_attn.q_proj", lambda here, y, call: torch.cat(y.chunk(2)[::-1]))(here)


def swapped_shards(here: Here) -> None:
    """The reduce-scatter of o_proj gives each rank the tokens of the other rank."""

    def swapped(here: Here, y: Tensor, call: int) -> Tensor:
        whole = dlp.gather_tokens(y, here.mesh)
        return whole.chunk(2)[1 - here.tp]

    other_pass("layers.1.self_attn.o_proj", swapped)(here)


def same_data(here: Here) -> None:
    """Every dp rank reads the tokens of dp rank 0."""

    def first(module: nn.Module, args: Any) -> Any:
        text = args[0].clone()
        dist.broadcast(text, 0)
        return (text, *args[1:])

    here.model.register_forward_pre_hook(first)


def masked_on_one_rank(here: Here) -> None:
    """Attention on tp rank 1 reads later tokens."""
    if here.tp == 1:
        attend = torch.nn.functional.scaled_dot_product_attention
        here.patch(modules, "attend", lambda q, k, v, *more: attend(q, k, v))


def swapped_positions(here: Here) -> None:
    """Positions 2 and 3 are swapped on tp rank 0."""
    table = modules.rotary_table

    def swapped(positions: Tensor, *args: Any) -> Any:
        order = positions.clone()
        order[2], order[3] = 3, 2
        return table(order, *args)

    if here.tp == 0:
        here.patch(modules, "rotary_table", swapped)


def bias_on_each_rank(here: Here) -> None:
    """down_proj adds the bias before the sum over tp."""
    other_pass(
        "layers.0.mlp.down_proj", lambda here, y, call: y + local_values(here.model.model.layers[0].mlp.down_proj.bias)
    )(here)


def bias_left_out(here: Here) -> None:
    other_pass(
        "layers.1.mlp.down_proj", lambda here, y, call: y - local_values(here.model.model.layers[1].mlp.down_proj.bias)
    )(here)


def tied_head_alone(here: Here) -> None:
    """The gradient of a tied weight is the gradient of the embedding alone."""
    head = here.model.lm_head

    class Cut(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
            ctx.save_for_backward(w)
            return x @ w.t()

        @staticmethod
        def backward(ctx: Any, dy: Tensor) -> Any:
            dx = dy @ ctx.saved_tensors[0]
            return collectives.all_reduce(dx, here.mesh.get_group("tp")).wait(), None

    here.patch(head, "forward", lambda x: Cut.apply(x, local_values(head.weight)))


def embedding_unsummed(here: Here) -> None:
    """The partial embeddings of ranks are not summed."""
    here.patch(embedding.traced, "all_reduce", lambda rows, *more: rows)


def loss_of_one_rank(here: Here) -> None:
    """The logsumexp of the loss covers only this rank's shard of the vocabulary."""

    gather = embedding.traced.all_gather

    def alone(x: Tensor, group: Any, *more: Any) -> Tensor:
        if x.dim() == 3 and x.shape[1] == 2:
            own = x.repeat(group.size(), 1, 1)
            own[1:, 0] = -torch.inf
            own[1:, 1] = 0
            return own
        return gather(x, group, *more)

    here.patch(embedding.traced, "all_gather", alone)


def local_norm(here: Here) -> None:
    """The gradient norm covers only this rank's shards."""
    here.patch(GradientNorm, "__call__", _local_norm)


def _local_norm(self: Any) -> Tensor:
    grads = [local_values(parameter.grad) for parameter in self._parameters]
    return torch.stack([grad.square().sum() for grad in grads]).sum().sqrt()


def accumulated(here: Here) -> None:
    """The gradient of one bias is not cleared after a step."""
    bias = here.model.model.layers[1].self_attn.k_proj.bias
    kept: list[Tensor] = []

    def add(optimizer: Any, args: Any, kwargs: Any) -> None:
        kept[:] = [bias.grad.clone()]

    here.optimizer.register_step_pre_hook(add)

    def more(parameter: Tensor) -> None:
        if kept:
            parameter.grad.add_(kept[0])

    bias.register_post_accumulate_grad_hook(more)


def old_gradient(here: Here) -> None:
    """The gradient of one weight is replaced by the gradient of the previous step."""
    weight = here.model.model.layers[1].self_attn.v_proj.weight
    kept: list[Tensor] = []

    def old(parameter: Tensor) -> None:
        now = parameter.grad.clone()
        if kept:
            parameter.grad.copy_(kept[-1])
        kept.append(now)

    weight.register_post_accumulate_grad_hook(old)


def seeds(own: Callable[[Here], int]) -> Callable[[Here], None]:
    def plant(here: Here) -> None:
        for module in here.model.modules():
            if isinstance(module, SeededDropout):
                module.seed = own(here)

    return plant


def learning_rate(here: Here) -> None:
    """The learning rate of tp rank 1 is doubled."""
    if here.tp == 1:
        here.optimizer.param_groups[0]["lr"] *= 2


def doubled_scale(here: Here) -> None:
    """The stored scale of x of down_proj, and of every rowwise operand of this shape, is twice the scale of the codes."""
    original = CurrentScaling.both

    def both(self: Any, x: Tensor, *args: Any, **more: Any) -> Any:
        row, column = original(self, x, *args, **more)
        if x.shape == (BATCH * SEQUENCE, CONFIG.ffn // here.case.tp):
            row = row.format.wrap((row.parts[0], row.parts[1] * 2))
        return row, column

    here.patch(CurrentScaling, "both", both)


class Fault(NamedTuple):
    """A fault, the mesh and the kind of model in which the fault is planted, and the expected report of `prove`:
    `layer` (end of the layer's name), `tensor` and `kind`. `steps`: number of training steps until the fault shows."""

    name: str
    mesh: str
    model: str
    plant: Callable[[Here], None]
    layer: str
    tensor: str
    kind: str
    steps: int = 1


def _zeroed(here: Here, tensor: Tensor, call: int) -> Tensor:
    return torch.zeros_like(tensor)


def _not_last_micro(here: Here, dw: Tensor, call: int) -> Tensor:
    return dw * bool(
        call % here.case.accumulate
    )  # multiply in every call: a pass that runs an operation of torch is never captured


def _rounded(here: Here, tensor: Tensor, call: int) -> Tensor:
    return tensor.to(torch.bfloat16).to(tensor.dtype)


def _nan_on_rank_1(here: Here, tensor: Tensor, call: int) -> Tensor:
    return (
        torch.where(torch.arange(tensor.shape[-1], device=tensor.device) == 3, torch.nan, tensor)
        if here.tp == 1
        else tensor
    )


DOWN_0 = "layers.0.mlp.down_proj"
DOWN_1 = "layers.1.mlp.down_proj"
GATE_1 = "layers.1.mlp.gate_proj"
O_0 = "layers.0.self_attn.o_proj"
O_1 = "layers.1.self_attn.o_proj"
Q_0 = "layers.0.self_attn.q_proj"
Q_1 = "layers.1.self_attn.q_proj"
UP_0 = "layers.0.mlp.up_proj"
UP_1 = "layers.1.mlp.up_proj"

FAULTS = [
    Fault("norm gradients not summed", "tp2+sp", "fp32", unsummed(False), "model.norm", "dw", "missing sum"),
    Fault("bias gradients not summed", "tp2+sp", "fp32", unsummed(True), DOWN_1, "db", "missing sum"),
    Fault("partial gradients summed twice", "tp2+sp", "fp32", summed_again, "model.norm", "dw", "summed twice"),
    Fault("totals summed again", "tp2+sp+accumulate2", "fp32", never_cleared, "model.norm", "dw", "summed twice"),
    Fault("fprop not reduced", "tp2", "fp32", no_reduction("fprop", O_0), O_0, "y", "missing sum"),
    Fault("fprop not scattered", "tp2+sp", "fp8", no_reduction("fprop", DOWN_1), DOWN_1, "y", "missing sum"),
    Fault("dgrad not reduced", "tp2", "fp8", no_reduction("dgrad", GATE_1), GATE_1, "dx", "missing sum"),
    Fault("reduced over dp", "tp2xdp2", "fp32", reduced_over_dp, O_1, "y", "wrong group"),
    Fault("dgrad of v missing", "tp2+sp", "fp32", one_sibling, Q_1, "dx", "missing part"),
    Fault("gradient divided twice", "dp2", "fp32", gradient_factor(0.5), DOWN_1, "dw", "divided twice"),
    Fault("gradient not averaged", "dp2", "fp32", gradient_factor(2.0), DOWN_1, "dw", "summed twice"),
    Fault("gradients not summed over cp", "cp2", "fp32", gradients_of_one_rank, DOWN_1, "dw", "missing sum"),
    Fault("replicas summed", "hsdp2x2", "fp32", gradient_factor(2.0), DOWN_1, "dw", "summed twice"),
    Fault("weight cast not renewed", "tp2", "fp8", never_recast, DOWN_1, "codes of w", "stale weight", 3),
    Fault("stale gather", "dp2", "fp32", stale_gather, DOWN_1, "y", "stale weight", 2),
    Fault("amax not agreed", "tp2+sp", "fp8", agrees_nowhere, Q_0, "scales of fprop", "another scale"),
    Fault("amax agreed over tp", "tp2xdp2", "delayed", agreed_over_tp, "", "scale", "amax", 2),
    Fault("scale of another rank", "tp2", "fp8", other_scale, UP_0, "y", "another scale"),
    Fault("scale stored twice as large", "tp2", "fp8", doubled_scale, DOWN_0, "y", "summed twice"),
    Fault("shard of another rank", "tp2", "fp32", other_shard, DOWN_0, "w", "another rank's part"),
    Fault("replicas begin unequal", "tp2", "fp32", own_seed, "layers.1.input_layernorm", "w", "some ranks"),
    Fault("gather in another order", "tp2+sp", "fp32", other_rows, Q_0, "y", "another rank's part"),
    Fault("scatter of another rank", "tp2+sp", "fp32", swapped_shards, O_1, "y", "another rank's part"),
    Fault("data of dp rank 0", "dp2", "fp32", same_data, "embed_tokens", "x", "another rank's part"),
    Fault("mask on one rank", "tp2", "fp32", masked_on_one_rank, O_0, "x", "some ranks"),
    Fault("positions swapped", "tp2", "fp32", swapped_positions, O_0, "x", "some ranks"),
    Fault("bias on each rank", "tp2+sp", "fp8", bias_on_each_rank, DOWN_0, "y", "bias"),
    Fault("bias left out", "tp2xdp2", "fp32", bias_left_out, DOWN_1, "y", "bias"),
    Fault("tied head not summed", "tp2", "tied", tied_head_alone, "embed_tokens", "dw", "missing part"),
    Fault("embedding not summed", "tp2", "fp32", embedding_unsummed, "embed_tokens", "y", "missing sum"),
    Fault("loss of one rank", "tp2", "fp32", loss_of_one_rank, "", "loss", "values"),
    Fault("norm of one rank", "tp2", "fp32", local_norm, "", "gradient norm", "missing sum"),
    Fault("gradient not cleared", "tp2", "fp32", accumulated, "layers.1.self_attn.k_proj", "db", "not cleared", 2),
    Fault(
        "gradient of the previous step"
    , "tp2", "fp32", old_gradient, "layers.1.self_attn.v_proj", "dw", "stale value", 2),
    Fault("last microbatch dropped", "accumulate4", "fp32", wgrad(DOWN_1, _not_last_micro), DOWN_1, "dw", "missing microbatch"),
    Fault("wgrad is zero", "dp2", "fp32", wgrad(O_0, _zeroed), O_0, "dw", "zero"),
    Fault("bf16 in an fp32 sum", "tp2", "fp32", other_pass(DOWN_1, _rounded), DOWN_1, "y", "coarser rounding"),
    Fault("NaN on one rank", "tp2", "fp32", other_pass(UP_1, _nan_on_rank_1), UP_1, "y", "not finite"),
    Fault("dropout equal over dp", "dp2", "dropout", seeds(lambda here: 7), "layers.0.mlp.dropout", "y", "randomness"),
    Fault("dropout differs over tp", "tp2", "dropout", seeds(lambda here: here.tp), "layers.0.mlp.dropout", "y", "randomness"),
    Fault("learning rate of one rank", "tp2", "fp32", learning_rate, "embed_tokens", "w", "some ranks"),
]  # fmt: skip
