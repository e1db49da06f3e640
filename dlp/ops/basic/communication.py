"""AllGather, ReduceScatter, AllReduce: along the first dimension, over a group, with sums in fp32 in the order of ranks.

AllGather       [M, C] -> [R*M, C]    backward: ReduceScatter
ReduceScatter   [R*M, C] -> [M, C]    backward: AllGather
AllReduce       [...] -> [...]        backward: the gradient as it is

Next to a linear that is whole on its rank they become its own quantized gather, or its own sum (`dlp.ops.fused`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroup

from dlp.comm import collectives
from dlp.ops.op import BasicOperation
from dlp.ops.values import Value
from dlp.parallel.linear.spec import LinearSpec


def gathered(x: Tensor, group: ProcessGroup) -> Tensor:
    return collectives.all_gather((x.contiguous(),), (0,), group).wait()[0]


def scattered(x: Tensor, group: ProcessGroup) -> Tensor:
    return collectives.reduce_scatter(x.contiguous(), group).wait()


class _OverGroup(BasicOperation):
    """`process_group`: the ranks; None: this one alone."""

    launches = True
    settings = ("process_group",)

    def __init__(self, process_group: ProcessGroup | None = None) -> None:
        super().__init__()
        self.process_group = process_group

    @property
    def alone(self) -> bool:
        return self.process_group is None or self.process_group.size() == 1

    def apart_from(self, spec: LinearSpec) -> str | None:
        """Why a linear of this spec does not communicate in place of this op, with equal bits; None: it can."""
        if self.alone:
            return "one rank has nothing to send"
        if spec.group is not None:
            return "the linear is cut over ranks itself, by tensor_parallel_mode"
        if spec.slots:
            return "delayed scales of a linear without tensor_parallel_group are its own rank's"
        if spec.recipe.amax_scope == "all":
            return "its recipe shares scales between ranks that a tensor_parallel_mode names"
        return None

    def __deepcopy__(self, memo: dict[int, Any]) -> BasicOperation:
        return type(self)(self.process_group)

    def extra_repr(self) -> str:
        return "alone" if self.alone else f"{self.process_group.size()} ranks"  # type: ignore[union-attr]


class AllGather(_OverGroup):
    def op_forward(self, ctx: Any, input_: Value, **quantizers: Any) -> Value:
        return input_ if self.alone else gathered(input_, self.process_group)  # type: ignore[arg-type]

    def op_backward(self, ctx: Any, grad_output: Value) -> tuple[Value, Sequence[Any]]:
        return (grad_output if self.alone else scattered(grad_output, self.process_group)), ()  # type: ignore[arg-type]


class ReduceScatter(_OverGroup):
    def op_forward(self, ctx: Any, input_: Value, **quantizers: Any) -> Value:
        return input_ if self.alone else scattered(input_, self.process_group)  # type: ignore[arg-type]

    def op_backward(self, ctx: Any, grad_output: Value) -> tuple[Value, Sequence[Any]]:
        return (grad_output if self.alone else gathered(grad_output, self.process_group)), ()  # type: ignore[arg-type]


class AllReduce(_OverGroup):
    def op_forward(self, ctx: Any, input_: Value, **quantizers: Any) -> Value:
        if self.alone:
            return input_
        return collectives.all_reduce(input_.contiguous(), self.process_group).wait()  # type: ignore[arg-type]

    def op_backward(self, ctx: Any, grad_output: Value) -> tuple[Value, Sequence[Any]]:
        return grad_output, ()
