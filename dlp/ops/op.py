"""Base classes of operations, with the names and signatures of `transformer_engine.pytorch.ops`.

    BasicOperation   one step: `op_forward(ctx, input_, ...)` and `op_backward(ctx, grad_output)`; a module that can also be
                     called alone
    FusedOperation   several basic ops in one: `fuser_forward`, `fuser_backward`, or one of the two
    ctx              an `OperationContext`: values that one forward of an op keeps for the backward

Ops compute under `no_grad`; autograd sees one function, the fuser (`dlp.ops.fuser`).
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
        """The basic ops that a fuser runs for this op: for a `Linear` also the sum over ranks and the bias."""
        return self.basic_ops

    @property
    def owners(self) -> Sequence[nn.Module]:
        """The modules that users see in place of this op: if such a module has hooks, the op must be called as a module."""
        return (self,)

    @property
    def is_fused_operation(self) -> bool:
        return len(self.expanded) > 1

    @property
    def basic_extra_inputs(self) -> int:
        """The number of extra inputs of all basic ops."""
        return sum(op.num_extra_inputs for op in self.expanded)

    @property
    def basic_extra_outputs(self) -> int:
        """The number of extra outputs of all basic ops."""
        return sum(op.num_extra_outputs for op in self.expanded)

    def forward(self, x: Tensors, *extra_inputs: Tensor, **kwargs: Any) -> Tensors:
        """Call the op outside of a Sequential, by a fuser of the basic ops. kwargs: keywords of the first basic op."""
        kwargs_by_op = [kwargs] + [{}] * (len(self.expanded) - 1)
        return self.own_fuser()(x, *extra_inputs, basic_op_kwargs=kwargs_by_op)

    def own_fuser(self) -> OperationFuser:
        """The fuser of this op alone, which is not a submodule and is not pickled."""
        fuser: OperationFuser | None = vars(self).get("_fuser")
        if fuser is None:
            fuser = vars(self)["_fuser"] = OperationFuser([self])
        return fuser

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in vars(self).items() if name != "_fuser"}

    def obstacle(self, basic_op_ctxs: Sequence[OperationContext], which: str) -> str:
        """Reason why pass `which`, "forward" or "backward", cannot be captured: on a GPU the pass has effects that
        recorded launches do not repeat. Empty: the pass can be captured."""
        raise NotImplementedError

    # The fuser calls these two. A fused op overrides one or both of them; `BasicOperation` calls op_forward and op_backward.

    def fuser_forward(
        self, basic_op_ctxs: Sequence[OperationContext], input_: Value, *, basic_op_extra_inputs: Extras,
        prev_op_grad_output_quantizer: Operand | None, next_op_input_quantizer: Operand | None,
        basic_op_kwargs: Sequence[Mapping[str, Any]],
    ) -> tuple[Value, Sequence[Sequence[Tensor]]]:  # fmt: skip
        """The output, and the extra outputs of each basic op. All `basic_op_` arguments have one element for each basic op."""
        raise NotImplementedError

    def fuser_backward(
        self, basic_op_ctxs: Sequence[OperationContext], grad_output: Value, *, basic_op_grad_extra_outputs: Extras
    ) -> tuple[Value, Grads, Grads]:
        """The gradient of the input, and for each basic op the gradients of parameters and of extra inputs."""
        raise NotImplementedError


class BasicOperation(FusibleOperation):
    """Base class of one step of a computation: define `op_forward` and `op_backward`, and use the class in `ops.Sequential`.

    Autograd does not look inside. An operation with extra inputs or outputs defines `fuser_forward` and `fuser_backward`
    instead.

    Attributes:
        num_extra_inputs: tensors that the operation takes besides its input.
        num_extra_outputs: tensors that the operation returns besides its output.
        takes: kinds of input and gradient that the operation can read besides floating-point tensors: "lazy", "many", "handed",
            and "integers" for the first operation of a sequence.
        none_grads: the operation accepts None as the gradient of an output that was not used; otherwise zeros are allocated.
        launches: on a GPU the operation only launches kernels of dlp and takes views, so that its launches can be captured.
        settings: names of attributes that users may change between calls and that fusions or launches depend on; after a change
            plans and captured launches are made anew.
        passes_through: "input_quantizer" or "grad_output_quantizer", if the operation passes its input or gradient through, so
            that the neighbour on the other side provides the quantizer.
        token_rows: rows of a token shard, in an operation that conversion has replicated over tp; else None.
        traced_by: linear that does the work of this operation when operations run one by one; else None.
        traced_note: difference under torch.compile and dispatch modes, for the plan.
        in_casts: whether casts on a GPU compute the output, in place of reading a stored output; None: the output is a tensor.
        layer_name: name in a converted model, else the name of the class.

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

    def plain(self, x: Tensors, *extra_inputs: Tensor, **kwargs: Any) -> Tensors:
        """The op as code that autograd and torch.compile differentiate. Returns the output, or a tuple of the output and the
        extra outputs. By default an autograd function of this op alone."""
        return one_op(self, type(self).__name__, x, extra_inputs, kwargs)

    @property
    def plan_notes(self) -> Sequence[str]:
        """Text of the printed plan about the last call of this op, printed after the name of the op."""
        return ()

    # The fuser calls these methods when it makes a plan. Linears and ops with quantizers override them.

    def planned(self, ctx: OperationContext) -> None:
        """Prepare for a plan for calls like the call of `ctx`."""

    def recipe_of(self, ctx: OperationContext) -> Recipe | None:
        """The recipe of this op; None: no recipe."""
        return None

    def input_quantizer(self, ctx: OperationContext) -> Operand | None:
        """The quantizers of the input, a `dlp.quant.recipe.Operand`; None: the op does not cast the input."""
        return None

    def grad_output_quantizer(self, ctx: OperationContext) -> Operand | None:
        """The quantizers of the gradient of the output; None: the op does not cast the gradient."""
        return None

    def passed(self, quantizers: Operand | None) -> Operand | None:
        """The quantizers of a neighbour, for the op on the other side of an op that passes the tensor through."""
        return quantizers

    @property
    def takes_keywords(self) -> bool:
        """Whether callers may pass keywords to forward: true for user-defined ops."""
        method = type(self).op_forward if self.overrides("op_forward") else type(self).fuser_forward
        return not method.__module__.startswith("dlp.ops.")

    def overrides(self, name: str) -> bool:
        """Whether the class overrides this method of `BasicOperation`."""
        return getattr(type(self), name) is not getattr(BasicOperation, name)

    def obstacle(self, basic_op_ctxs: Sequence[OperationContext], which: str) -> str:
        return "" if self.launches else "it computes by torch"

    def runs_in(self, which: str) -> bool:
        """Whether the op has pass `which`: a basic op has both passes."""
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
        """input [..., C] -> output. prev_op_grad_output_quantizer: quantizers with which the previous op will cast dx of this
        op; next_op_input_quantizer: quantizers with which the next op will cast the output; None: no cast. kwargs: keywords of
        the caller."""
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
        """Check an op that conversion has replicated over tp: raise ValueError for a token shard outside of sequence
        parallelism, and for all tokens under sequence parallelism."""
        for value in each(input_) if self.token_rows is not None else ():
            tensor = value if isinstance(value, Tensor) else torch.empty(value.shape, dtype=value.dtype, device="meta")
            self._check_tokens(tensor)  # type: ignore[operator]  # set by conversion


class FusedOperation(FusibleOperation):
    """Base class of an operation that runs several basic operations as one, in forward, in backward or in both.

    Define `fuser_forward`, `fuser_backward` or both, and register a function that creates the operation
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
        """Whether the class overrides the method of this pass; else the basic ops run."""
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
        """The basic ops, including the sum and the bias of a `Linear`."""
        listed = self.basic_ops
        return [basic for op in listed for basic in op.expanded if basic is op or basic not in listed]


class InnerFused(FusedOperation):
    """A fused op of the fusions of dlp. The fused op is not part of the model, so basic ops are not registered as
    submodules."""

    def __init__(self, *basic_ops: BasicOperation) -> None:
        super().__init__(())
        vars(self)["_ops"] = tuple(basic_ops)

    @property
    def basic_ops(self) -> Sequence[Any]:
        ops: Sequence[Any] = vars(self)["_ops"]
        return ops
