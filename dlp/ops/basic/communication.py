"""AllGather, ReduceScatter and AllReduce over a process group of R ranks. Sums are in fp32, in the order of ranks.

AllGather       [M, C] -> [R*M, C]    backward: ReduceScatter
ReduceScatter   [R*M, C] -> [M, C]    backward: AllGather
AllReduce       [...] -> [...]        backward: dy unchanged

An AllGather can be fused with the next op, and a ReduceScatter or AllReduce with the previous op, if that op is a linear that
is not sharded over ranks (`dlp.ops.fused`). The fused op gathers quantized x, or sums y, with the overlap strategy of the
linear.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroup

from dlp.comm import traced
from dlp.ops.context import OperationContext
from dlp.ops.op import BasicOperation
from dlp.ops.values import Value
from dlp.parallel.linear.spec import LinearSpec
from dlp.quant.recipe import Operand


class OfRanks(BasicOperation):
    """Base of ops with a process group. A deepcopy of the op has the same group, not a copy of it.

    process_group: the ranks; None: this rank alone.
    """

    def __init__(self, process_group: ProcessGroup | None = None) -> None:
        super().__init__()
        self.process_group = process_group

    def __deepcopy__(self, memo: dict[int, Any]) -> BasicOperation:
        memo[id(self.process_group)] = self.process_group
        made = memo[id(self)] = type(self).__new__(type(self))
        made.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        return made


class _OverGroup(OfRanks):
    """Base of the collectives. Without a group, and for a group of one rank, the op returns its input."""

    launches = True
    settings = ("process_group",)

    @property
    def is_single(self) -> bool:
        """Whether the op sends nothing, since it has no group or the group has one rank."""
        return self.process_group is None or self.process_group.size() == 1

    def keep_group(self, ctx: OperationContext) -> ProcessGroup | None:
        """Return the group for this forward, and store it in ctx. Backward uses the stored group, even if `process_group` has
        changed."""
        ctx.group = self.process_group
        return self.process_group

    def group_of(self, ctx: OperationContext) -> ProcessGroup | None:
        """Return the group that the forward of this context used; `process_group` if no forward has stored a group."""
        group: ProcessGroup | None = getattr(ctx, "group", self.process_group)
        return group

    @staticmethod
    def run(collective: Callable[..., Tensor], x: Value, group: ProcessGroup | None) -> Tensor:
        """Run the collective over `group`; return x unchanged without a group."""
        return x if group is None else collective(x, group)

    def obstacle_to_fusion(self, spec: LinearSpec) -> str | None:
        """Return the reason why fusion with a linear of this spec would change results or is not possible; None: this op can be
        fused with the linear."""
        if self.is_single:
            return "the group has one rank, and nothing is sent"
        if spec.group is not None:
            return "the linear is sharded over ranks by tensor_parallel_mode"
        if spec.slots:
            return "delayed scales of a linear without tensor_parallel_group differ between ranks"
        if spec.recipe.amax_scope == "all":
            return "the recipe shares scales between the ranks of a tensor_parallel_mode"
        return None

    def extra_repr(self) -> str:
        return "one rank" if self.is_single else f"{self.process_group.size()} ranks"  # type: ignore[union-attr]


class AllGather(_OverGroup):
    """Gather rows of all ranks; backward reduce-scatters the gradient, summed in fp32 in the order of ranks.

    Before a linear that is not tensor-parallel, the gather is fused with the linear and sends quantized x. If it is not fused,
    the plan states the reason.

    Args:
        process_group: ranks; None: this rank alone, and the operation returns its input.

    Shape:
        - input: [M, C]
        - output: [R*M, C] with R ranks

    Examples:
        >>> ops.AllGather()(torch.randn(16, 64)).shape  # one rank
        torch.Size([16, 64])
    """

    def op_forward(self, ctx: OperationContext, input_: Value, **quantizers: Operand | None) -> Value:
        return self.run(traced.all_gather, input_, self.keep_group(ctx))

    def op_backward(self, ctx: OperationContext, grad_output: Value) -> tuple[Value, Sequence[Tensor | None]]:
        return self.run(traced.reduce_scatter, grad_output, self.group_of(ctx)), ()


class ReduceScatter(_OverGroup):
    """Sum rows over ranks in fp32, in the order of ranks, and return this rank's shard of the rows; backward gathers the
    gradient.

    After a linear that is not tensor-parallel, the sum is fused with the linear, and overlaps with its GEMM. If it is not
    fused, the plan states the reason.

    Args:
        process_group: ranks; None: this rank alone, and the operation returns its input.

    Shape:
        - input: [R*M, C] with R ranks
        - output: [M, C]

    Examples:
        >>> ops.ReduceScatter()(torch.randn(16, 64)).shape  # one rank
        torch.Size([16, 64])
    """

    def op_forward(self, ctx: OperationContext, input_: Value, **quantizers: Operand | None) -> Value:
        return self.run(traced.reduce_scatter, input_, self.keep_group(ctx))

    def op_backward(self, ctx: OperationContext, grad_output: Value) -> tuple[Value, Sequence[Tensor | None]]:
        return self.run(traced.all_gather, grad_output, self.group_of(ctx)), ()


class AllReduce(_OverGroup):
    """Sum a tensor over ranks in fp32, in the order of ranks; backward returns the gradient unchanged.

    Args:
        process_group: ranks; None: this rank alone, and the operation returns its input.

    Shape:
        - input, output: [...]

    Examples:
        >>> ops.AllReduce()(torch.randn(16, 64)).shape
        torch.Size([16, 64])
    """

    def op_forward(self, ctx: OperationContext, input_: Value, **quantizers: Operand | None) -> Value:
        return self.run(traced.all_reduce, input_, self.keep_group(ctx))

    def op_backward(self, ctx: OperationContext, grad_output: Value) -> tuple[Value, Sequence[Tensor | None]]:
        return grad_output, ()
