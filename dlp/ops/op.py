"""Operations: the names and signatures of `transformer_engine.pytorch.ops`, so that code written for these runs here.

    BasicOperation   one step: `op_forward(ctx, input_, ...)` and `op_backward(ctx, grad_output)`; a module, callable by itself
    FusedOperation   several basic ops in one: `fuser_forward`, `fuser_backward`, either of which may lack
    ctx              an `OperationContext`: what one forward of an op keeps for its backward

An op computes under `no_grad`: autograd sees the fuser that runs it (`dlp.ops.fuser`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dlp.ops.fuser import OperationFuser
from dlp.ops.traced import one_op
from dlp.ops.values import Value, each

Extras = Sequence[Sequence[Tensor | None]]


class FusibleOperation(nn.Module):
    """Base of all operations. `basic_ops`: what it runs as one, in order, itself if it is basic."""

    @property
    def basic_ops(self) -> Sequence[BasicOperation]:
        raise NotImplementedError

    @property
    def expanded(self) -> Sequence[BasicOperation]:
        """The basic ops that it is to a fuser."""
        return self.basic_ops

    @property
    def owners(self) -> Sequence[nn.Module]:
        """The modules whose work it does: whoever has hooks there expects that they are called."""
        return (self,)

    @property
    def is_fused_operation(self) -> bool:
        return len(self.expanded) > 1

    @property
    def basic_extra_inputs(self) -> int:
        """How many extra inputs its basic ops take."""
        return sum(op.num_extra_inputs for op in self.expanded)

    @property
    def basic_extra_outputs(self) -> int:
        return sum(op.num_extra_outputs for op in self.expanded)

    def forward(self, x: Any, *extra_inputs: Tensor, **kwargs: Any) -> Any:
        """By itself: a fuser of its own basic ops."""
        kwargs_by_op = [kwargs] + [{}] * (len(self.expanded) - 1)
        return self.own_fuser()(x, *extra_inputs, basic_op_kwargs=kwargs_by_op)

    def own_fuser(self) -> OperationFuser:
        found: OperationFuser | None = vars(self).get("_fuser")
        if found is None:
            found = vars(self)["_fuser"] = OperationFuser([self])
        return found

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_fuser"}

    def obstacle(self, basic_op_ctxs: Sequence[Any], which: str) -> str:
        """Why this direction cannot be captured: on a GPU it is something else than launches of this package. Empty: it can."""
        raise NotImplementedError

    # What a fuser calls: a fused op overrides both or one of these, a basic op is adapted to them

    def fuser_forward(
        self, basic_op_ctxs: Sequence[Any], input_: Value, *, basic_op_extra_inputs: Extras,
        prev_op_grad_output_quantizer: Any, next_op_input_quantizer: Any, basic_op_kwargs: Sequence[Mapping[str, Any]],
    ) -> tuple[Value, Sequence[Sequence[Tensor]]]:  # fmt: skip
        raise NotImplementedError

    def fuser_backward(
        self, basic_op_ctxs: Sequence[Any], grad_output: Value, *, basic_op_grad_extra_outputs: Extras
    ) -> tuple[Value, Sequence[Sequence[Tensor | None]], Sequence[Sequence[Tensor | None]]]:
        raise NotImplementedError


class BasicOperation(FusibleOperation):
    """One step of a computation.

    num_extra_inputs, num_extra_outputs   tensors that it takes or returns beside input and output. An op with some
                                          overrides `fuser_forward` and `fuser_backward` instead of `op_forward`, `op_backward`
    takes        what its input and its gradient may be beside a tensor of floating point: "lazy", "many", "handed" (see
                 `dlp.ops.values`), and, of the first op of a sequence, "integers"
    none_grads   it takes None for the gradient of an extra output, or of one of several outputs, that nobody used; else zeros
                 are made
    launches     all that it does on a GPU is launches of this package, so that a pass may be captured
    settings     names of attributes that may be set otherwise between calls, where fusions look at them or launches depend on
                 them: then what was planned and captured is dropped. They are compared in every call
    """

    num_extra_inputs = 0
    num_extra_outputs = 0
    takes: frozenset[str] = frozenset()
    none_grads = False
    launches = False
    settings: tuple[str, ...] = ()
    token_rows: int | None = None  # of a token shard, once conversion has replicated it over tp
    looked_through: tuple[str, ...] = ()  # by those who ask for these quantizers: it hands on what it is given
    part_of: Any = None  # a linear that does this itself where ops run one by one
    traced_otherwise = ""  # what it does else where torch traces or watches, for plans
    layer_name: (
        str  # that of a converted model, else the class: read as an attribute, so that traced blocks share a graph
    )

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        cls.layer_name = cls.__name__

    @property
    def basic_ops(self) -> Sequence[BasicOperation]:
        return (self,)

    def op_parameters(self) -> Sequence[Tensor]:
        """The parameters whose gradients `op_backward` returns, in order."""
        return [parameter for parameter in self._parameters.values() if parameter is not None]

    def plain(self, x: Any, *extra_inputs: Tensor, **kwargs: Any) -> Any:
        """The same for what traces: of tensors, by code that autograd differentiates. With extra outputs, a tuple."""
        return one_op(self, type(self).__name__, x, extra_inputs, kwargs)

    def as_prologue(self, x: Any, behind: Any) -> Any:
        """((name, *options), what it is given), where the linear behind can run this op in its cast; else None."""
        return None

    # What a fuser asks beside: ops with a linear's core, or with quantizers, have answers of their own

    def planned(self, ctx: Any) -> None:
        """A plan is about to be made for calls like this one."""

    def recipe_of(self, ctx: Any) -> Any:
        """The recipe it runs under."""
        return None

    def input_quantizer(self, ctx: Any) -> Any:
        """The quantizers of what it casts of its input, a `dlp.quant.recipe.Operand`; None where it casts nothing."""
        return None

    def grad_output_quantizer(self, ctx: Any) -> Any:
        """Those of what it casts of its gradient."""
        return None

    @property
    def takes_keywords(self) -> bool:
        """Whether a caller may pass some to its forward: ops of dlp's own take none."""
        own = type(self).op_forward if self.overrides("op_forward") else type(self).fuser_forward
        return not own.__module__.startswith("dlp.ops.")

    def overrides(self, name: str) -> bool:
        """Whether it answers this question in its own way: the others are not asked with every call."""
        return getattr(type(self), name) is not getattr(BasicOperation, name)

    def obstacle(self, basic_op_ctxs: Sequence[Any], which: str) -> str:
        return "" if self.launches else "it computes by torch"

    def goes(self, which: str) -> bool:
        return True

    def op_forward(
        self,
        ctx: Any,
        input_: Value,
        *,
        prev_op_grad_output_quantizer: Any,
        next_op_input_quantizer: Any,
        **kwargs: Any,
    ) -> Value:
        """input [..., C] -> output. `prev_op_grad_output_quantizer`, `next_op_input_quantizer`: those of the neighbours, which
        will cast what this op returns; None where they cast nothing."""
        raise NotImplementedError(f"{type(self).__name__} must define op_forward")

    def op_backward(self, ctx: Any, grad_output: Value) -> tuple[Value, Sequence[Tensor | None]]:
        """The gradient of the output -> that of the input, and those of `parameters(recurse=False)`, in order."""
        raise NotImplementedError(f"{type(self).__name__} must define op_backward")

    def fuser_forward(
        self, basic_op_ctxs: Sequence[Any], input_: Value, *, basic_op_extra_inputs: Extras,
        prev_op_grad_output_quantizer: Any, next_op_input_quantizer: Any, basic_op_kwargs: Sequence[Mapping[str, Any]],
    ) -> tuple[Value, Sequence[Sequence[Tensor]]]:  # fmt: skip
        if self.token_rows is not None:
            self.check_tokens(input_)
        output = self.op_forward(
            basic_op_ctxs[0], input_, prev_op_grad_output_quantizer=prev_op_grad_output_quantizer,
            next_op_input_quantizer=next_op_input_quantizer, **basic_op_kwargs[0],
        )  # fmt: skip
        return output, [()]

    def fuser_backward(
        self, basic_op_ctxs: Sequence[Any], grad_output: Value, *, basic_op_grad_extra_outputs: Extras
    ) -> tuple[Value, Sequence[Sequence[Tensor | None]], Sequence[Sequence[Tensor | None]]]:
        found = self.op_backward(basic_op_ctxs[0], grad_output)
        if not isinstance(found, tuple | list) or len(found) != 2:
            raise RuntimeError(
                f"{type(self).__name__}: op_backward must return two things, the gradient of the input and a tuple of those of "
                f"the parameters"
            )
        return found[0], [found[1]], [()]

    def check_tokens(self, input_: Value) -> None:
        """Of an op that conversion has replicated: ValueError for token shards where its groups say that it gets whole tokens,
        and the other way round."""
        for value in each(input_) if self.token_rows is not None else ():
            like = value if isinstance(value, Tensor) else torch.empty(value.shape, dtype=value.dtype, device="meta")
            self._check_tokens(like)  # type: ignore[operator]


class FusedOperation(FusibleOperation):
    """Several basic ops, forward, backward or both. Its parameters are theirs, under their places."""

    takes: frozenset[str] = frozenset()
    none_grads = False

    def obstacle(self, basic_op_ctxs: Sequence[Any], which: str) -> str:
        asked = zip(self.basic_ops, basic_op_ctxs, strict=True)
        return next((why for op, ctx in asked if (why := op.obstacle([ctx], which))), "")

    def goes(self, which: str) -> bool:
        """Whether it runs in this direction; else its basic ops do."""
        method = f"fuser_{which}"
        return getattr(type(self), method) is not getattr(FusibleOperation, method)

    def __init__(self, basic_ops: Sequence[BasicOperation]) -> None:
        super().__init__()
        for place, op in enumerate(basic_ops):
            self.add_module(str(place), op)

    @property
    def basic_ops(self) -> Sequence[BasicOperation]:
        return tuple(self._modules.values())  # type: ignore[arg-type]


class InnerFused(FusedOperation):
    """One that a fusion makes: it is no part of a model, so it registers nothing."""

    def __init__(self, *basic_ops: BasicOperation) -> None:
        super().__init__(())
        vars(self)["_ops"] = tuple(basic_ops)

    @property
    def basic_ops(self) -> Sequence[Any]:
        ops: Sequence[Any] = vars(self)["_ops"]
        return ops
