"""Base classes of operations, with the names and signatures of `transformer_engine.pytorch.ops`.

    BasicOperation   a single operation with `op_forward(ctx, input_, ...)` and `op_backward(ctx, grad_output)`; also a module,
                     which can be called outside of a sequence
    FusedOperation   several basic ops that run as one, by `fuser_forward`, `fuser_backward` or both
    ctx              an `OperationContext`: values that the forward of an op stores for its backward

Ops compute under `no_grad`; autograd sees a single function, the fuser (`dlp.ops.fuser`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dlp.ops.context import OperationContext
from dlp.ops.fuser import OperationFuser
from dlp.ops.traced import one_op
from dlp.ops.values import Grads, Tensors, Value, each
from dlp.quant.recipe import Operand, Recipe

Extras = Sequence[Sequence[Tensor | None]]


class FusibleOperation(nn.Module):
    """Base class of `ops.BasicOperation` and `ops.FusedOperation`.

    Examples:
        >>> isinstance(ops.GELU(), ops.FusibleOperation)
        True
    """

    @property
    def basic_ops(self) -> Sequence[BasicOperation]:
        """The basic ops that this op fuses, in order; for a basic op the op itself."""
        raise NotImplementedError

    @property
    def expanded(self) -> Sequence[BasicOperation]:
        """The basic ops that a fuser runs for this op. For a `Linear` they include the sum over ranks and the bias."""
        return self.basic_ops

    @property
    def owners(self) -> Sequence[nn.Module]:
        """The modules on which users may register hooks for this op. If one of them has hooks, the op is called as a module,
        and is not fused."""
        return (self,)

    @property
    def is_fused_operation(self) -> bool:
        return len(self.expanded) > 1

    @property
    def basic_extra_inputs(self) -> int:
        """The total number of extra inputs of the basic ops."""
        return sum(op.num_extra_inputs for op in self.expanded)

    @property
    def basic_extra_outputs(self) -> int:
        """The total number of extra outputs of the basic ops."""
        return sum(op.num_extra_outputs for op in self.expanded)

    def forward(self, x: Tensors, *extra_inputs: Tensor, **kwargs: Any) -> Tensors:
        """Run the op outside of a Sequential, with a fuser for this op. kwargs: keyword arguments of the first basic op."""
        kwargs_by_op = [kwargs] + [{}] * (len(self.expanded) - 1)
        return self.own_fuser()(x, *extra_inputs, basic_op_kwargs=kwargs_by_op)

    def own_fuser(self) -> OperationFuser:
        """Return the fuser for calls of this op outside of a Sequential. It is not a submodule, and not pickled."""
        fuser: OperationFuser | None = vars(self).get("_fuser")
        if fuser is None:
            fuser = vars(self)["_fuser"] = OperationFuser([self])
        return fuser

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in vars(self).items() if name != "_fuser"}

    def obstacle(self, basic_op_ctxs: Sequence[OperationContext], which: str) -> str:
        """Return the reason why pass `which` ("forward" or "backward") cannot be captured, because it has effects that a replay
        of its launches would not repeat; "": the pass can be captured."""
        raise NotImplementedError

    # The fuser calls the next two methods. Fused ops override one or both. In a basic op they call op_forward and op_backward.

    def fuser_forward(
        self, basic_op_ctxs: Sequence[OperationContext], input_: Value, *, basic_op_extra_inputs: Extras,
        prev_op_grad_output_quantizer: Operand | None, next_op_input_quantizer: Operand | None,
        basic_op_kwargs: Sequence[Mapping[str, Any]],
    ) -> tuple[Value, Sequence[Sequence[Tensor]]]:  # fmt: skip
        """Compute the output, and for each basic op its extra outputs. The `basic_op_` arguments have one element for each
        basic op; for the other arguments see `BasicOperation.op_forward`."""
        raise NotImplementedError

    def fuser_backward(
        self, basic_op_ctxs: Sequence[OperationContext], grad_output: Value, *, basic_op_grad_extra_outputs: Extras
    ) -> tuple[Value, Grads, Grads]:
        """Compute the gradient of the input, and for each basic op the gradients of its parameters and of its extra inputs. The
        `basic_op_` arguments have one element for each basic op."""
        raise NotImplementedError


class BasicOperation(FusibleOperation):
    """Base class of single operations for `ops.Sequential`. Subclasses define `op_forward` and `op_backward`.

    Autograd does not differentiate `op_forward`. An operation with extra inputs or outputs defines `fuser_forward` and
    `fuser_backward` instead.

    Attributes:
        num_extra_inputs: number of tensors that the operation takes besides its input.
        num_extra_outputs: number of tensors that the operation returns besides its output.
        takes: kinds of values that the operation can read besides floating-point tensors: "lazy" (`ops.Produced`), "many" (a
            tuple of siblings), "handed" (`ops.Handed`), and, in the first operation of a sequence, "integers".
        none_grads: whether the operation accepts None as the gradient of an unused output; False: it gets zeros instead.
        launches: whether the operation on a GPU only launches kernels of dlp, takes views, and calls torch by
            `dlp.kernels.launches`, so that its launches can be captured.
        settings: names of attributes that users may change between calls, and on which fusions or launches depend. After a
            change the fuser discards plans and captured launches.
        passes_through: contains "input_quantizer" if the operation returns its input unchanged, so that the operation before
            gets the quantizers of the operation after; contains "grad_output_quantizer" if it returns the gradient unchanged,
            so that the operation after gets the quantizers of the operation before.
        token_rows: number of rows of a token shard, if conversion has replicated the operation over tp; else None.
        traced_by: linear whose `plain` also computes this operation, when operations run one by one; else None.
        traced_note: text for the plan: how calls under torch.compile and dispatch modes differ; "": no difference.
        in_casts: True: the next cast on a GPU can compute the output; False: the output is always stored before a cast, and the
            plan says so; None: the plan says nothing.
        layer_name: name of the operation in a converted model; else the name of the class.

    Examples:
        >>> class Double(ops.BasicOperation):
        ...     def op_forward(self, ctx, input_, **quantizers):
        ...         return 2 * input_
        ...     def op_backward(self, ctx, grad_output):
        ...         return 2 * grad_output, ()
        >>> ops.Sequential(Double(), ops.Linear(64, 64))(torch.randn(16, 64)).shape
        torch.Size([16, 64])
    """

    num_extra_inputs = 0
    num_extra_outputs = 0
    takes: frozenset[str] = frozenset()
    none_grads = False
    launches = False
    settings: tuple[str, ...] = ()
    passes_through: tuple[str, ...] = ()
    token_rows: int | None = None
    traced_by: nn.Module | None = None
    traced_note = ""
    in_casts: bool | None = None
    layer_name: str

    def __init_subclass__(cls, **keywords: object) -> None:
        super().__init_subclass__(**keywords)
        cls.layer_name = cls.__name__

    @property
    def basic_ops(self) -> Sequence[BasicOperation]:
        return (self,)

    def op_parameters(self) -> Sequence[Tensor]:
        """The parameters whose gradients `op_backward` returns, in order."""
        return [parameter for parameter in self._parameters.values() if parameter is not None]

    def parameter_places(self) -> Sequence[tuple[Any, str]]:
        """For each of `op_parameters()`, the module that has the parameter, and the name of the parameter."""
        return [(self, name) for name in self._parameters]

    def plain(self, x: Tensors, *extra_inputs: Tensor, **kwargs: Any) -> Tensors:
        """Run the op under torch.compile or a dispatch mode, as code that autograd differentiates. Return the output, or a
        tuple of the output and the extra outputs. The default is an autograd function that calls the methods of this op."""
        return one_op(self, type(self).__name__, x, extra_inputs, kwargs)

    @property
    def plan_notes(self) -> Sequence[str]:
        """Texts about the last call of this op, which the printed plan shows after the name of the op."""
        return ()

    # The fuser calls the next five methods when it makes a plan. Linears override the first four, and `Bias` overrides
    # `passed`.

    def planned(self, ctx: OperationContext) -> None:
        """Prepare this op for a new plan. The fuser calls `planned` of every op before it looks for fusions. A linear stores
        its spec, which fusions read; other ops do nothing. ctx: context of this op in the call that is planned."""

    def recipe_of(self, ctx: OperationContext) -> Recipe | None:
        """Return the recipe of this op; None: the op has no recipe."""
        return None

    def input_quantizer(self, ctx: OperationContext) -> Operand | None:
        """Return the quantizers with which the op casts its input; None: it does not cast the input."""
        return None

    def grad_output_quantizer(self, ctx: OperationContext) -> Operand | None:
        """Return the quantizers with which the op casts the gradient of its output; None: it does not cast the gradient."""
        return None

    def passed(self, quantizers: Operand | None) -> Operand | None:
        """Return the quantizers that one neighbour of this op gets, given the quantizers of the other neighbour. Only called
        for an op that passes the tensor through (`passes_through`)."""
        return quantizers

    @property
    def takes_keywords(self) -> bool:
        """Whether callers may pass keyword arguments to the op: True for ops that are defined outside of dlp."""
        method = type(self).op_forward if self.overrides("op_forward") else type(self).fuser_forward
        return not method.__module__.startswith("dlp.ops.")

    def overrides(self, name: str) -> bool:
        """Whether the class overrides this method of `BasicOperation`."""
        return getattr(type(self), name) is not getattr(BasicOperation, name)

    def obstacle(self, basic_op_ctxs: Sequence[OperationContext], which: str) -> str:
        return "" if self.launches else "it computes by torch"

    def runs_in(self, which: str) -> bool:
        """Return True: a basic op defines both passes."""
        return True

    def op_forward(
        self,
        ctx: OperationContext,
        input_: Value,
        *,
        prev_op_grad_output_quantizer: Operand | None,
        next_op_input_quantizer: Operand | None,
        **kwargs: Any,
    ) -> Value:
        """Compute the output from the input [..., C].

        prev_op_grad_output_quantizer   quantizers with which the previous op casts the gradient of the input; None: no cast
        next_op_input_quantizer         quantizers with which the next op casts the output; None: no cast
        kwargs                          keyword arguments of the caller
        """
        raise NotImplementedError(f"{type(self).__name__} must define op_forward")

    def op_backward(self, ctx: OperationContext, grad_output: Value) -> tuple[Value, Sequence[Tensor | None]]:
        """Compute the gradient of the input, and the gradients of `op_parameters()` in order, from the gradient of the
        output."""
        raise NotImplementedError(f"{type(self).__name__} must define op_backward")

    def fuser_forward(
        self, basic_op_ctxs: Sequence[OperationContext], input_: Value, *, basic_op_extra_inputs: Extras,
        prev_op_grad_output_quantizer: Operand | None, next_op_input_quantizer: Operand | None,
        basic_op_kwargs: Sequence[Mapping[str, Any]],
    ) -> tuple[Value, Sequence[Sequence[Tensor]]]:  # fmt: skip
        if self.token_rows is not None:
            self.check_tokens(input_)
        output = self.op_forward(
            basic_op_ctxs[0], input_, prev_op_grad_output_quantizer=prev_op_grad_output_quantizer,
            next_op_input_quantizer=next_op_input_quantizer, **basic_op_kwargs[0],
        )  # fmt: skip
        return output, [()]

    def fuser_backward(
        self, basic_op_ctxs: Sequence[OperationContext], grad_output: Value, *, basic_op_grad_extra_outputs: Extras
    ) -> tuple[Value, Grads, Grads]:
        grads = self.op_backward(basic_op_ctxs[0], grad_output)
        if not isinstance(grads, tuple | list) or len(grads) != 2:
            raise RuntimeError(
                f"{type(self).__name__}: op_backward must return the gradient of the input and a tuple with the "
                f"gradients of the parameters"
            )
        return grads[0], [grads[1]], [()]

    def check_tokens(self, input_: Value) -> None:
        """Check the input of an op that conversion has replicated over tp. Raises ValueError if the input is a token shard, but
        sequence parallelism is off, and if the input has the tokens of all ranks, but sequence parallelism is on."""
        for value in each(input_) if self.token_rows is not None else ():
            tensor = value if isinstance(value, Tensor) else torch.empty(value.shape, dtype=value.dtype, device="meta")
            self._check_tokens(tensor)  # type: ignore[operator]  # set by conversion


class FusedOperation(FusibleOperation):
    """Base class of operations that run several basic operations as one, in forward, in backward or in both.

    Subclasses define `fuser_forward`, `fuser_backward` or both. A registered fusion creates the operation
    (`ops.register_forward_fusion`).

    Args:
        basic_ops: the operations in order; they are submodules "0", "1", ...

    Examples:
        >>> class ScaleAdd(ops.FusedOperation):
        ...     def fuser_forward(self, basic_op_ctxs, input_, *, basic_op_extra_inputs, **others):
        ...         output = torch.add(basic_op_extra_inputs[1][0], input_, alpha=self.basic_ops[0].scale)
        ...         return output, [(), ()]
        >>> fused = ScaleAdd([ops.ConstantScale(0.5), ops.AddExtraInput()])
    """

    takes: frozenset[str] = frozenset()
    none_grads = False

    def obstacle(self, basic_op_ctxs: Sequence[OperationContext], which: str) -> str:
        pairs = zip(self.basic_ops, basic_op_ctxs, strict=True)
        return next((why for op, ctx in pairs if (why := op.obstacle([ctx], which))), "")

    def runs_in(self, which: str) -> bool:
        """Whether the class overrides the method of this pass, `fuser_forward` or `fuser_backward`; if not, the basic ops
        run."""
        method = f"fuser_{which}"
        return getattr(type(self), method) is not getattr(FusibleOperation, method)

    def __init__(self, basic_ops: Sequence[BasicOperation]) -> None:
        super().__init__()
        for place, op in enumerate(basic_ops):
            self.add_module(str(place), op)

    @property
    def basic_ops(self) -> Sequence[BasicOperation]:
        return tuple(self._modules.values())  # type: ignore[arg-type]

    @property
    def expanded(self) -> Sequence[BasicOperation]:
        """The basic ops, including the sum over ranks and the bias of a `Linear`."""
        listed = self.basic_ops
        return [basic for op in listed for basic in op.expanded if basic is op or basic not in listed]


class InnerFused(FusedOperation):
    """Base class of the fused ops in `dlp.ops.fused`. Its basic ops are not submodules, since they belong to the model."""

    def __init__(self, *basic_ops: BasicOperation) -> None:
        super().__init__(())
        vars(self)["_ops"] = tuple(basic_ops)

    @property
    def basic_ops(self) -> Sequence[Any]:
        ops: Sequence[Any] = vars(self)["_ops"]
        return ops
