"""The experts of a `GroupedLinear` as one autograd function: all fprops run as one grouped GEMM, and all dgrads as another.

    y_e  [m_e, N] = x_e [m_e, K] @ w_e [N, K].T       one launch for all experts e (`dlp.kernels.grouped`)
    dx_e [m_e, K] = dy_e [m_e, N] @ w_e [N, K]        one launch for all experts e
    dw_e [N, K]   = dy_e.T @ x_e                      one GEMM for each expert

x_e has the m_e rows of x that belong to expert e. Everything but the two grouped launches is done by the forward and backward
of each linear (`dlp.parallel.linear.autograd`), which run with a `Finish` that collects the operands of fprop or dgrad instead
of multiplying. The codes of all experts are then copied into one tensor, which the launch reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dlp.kernels.grouped import grouped_fp8_rowwise, why_not_grouped
from dlp.parallel.linear import autograd
from dlp.parallel.linear.active import active_region
from dlp.parallel.linear.functional import Finish
from dlp.parallel.linear.modules import LinearCore
from dlp.parallel.linear.spec import LinearSpec
from dlp.parallel.linear.step import in_backward
from dlp.quant.gemm import Gemm
from dlp.quant.tensor import Format, QuantizedTensor, as_bytes
from dlp.runtime.function import Passes, apply_pass, autocast_is_on, opaque, refuse_transforms


def _formats(spec: LinearSpec) -> list[Format]:
    """Return the formats of both operands of fprop and of both operands of dgrad."""
    return [quantizer.format for which in ("fprop", "dgrad") for quantizer in spec.recipe.operands(which)]


def are_rowwise(cores: Sequence[LinearCore]) -> bool:
    """Return whether fprop and dgrad of all layers have rowwise FP8 operands."""
    return all(each.gemm_kind == "fp8_rowwise" for core in cores for each in _formats(core.spec))


def region_decides(cores: Sequence[LinearCore]) -> bool:
    """Return whether a region of `dlp.autocast` chooses the recipes of this forward: the innermost active region, or the region
    of the first run, if backward recomputes the forward."""
    return active_region() is not None or (any(core.session.regions for core in cores) and in_backward())


def obstacle(cores: Sequence[LinearCore], x: Tensor) -> str:
    """Return the reason why experts of rowwise FP8 run one after the other; "": fprop and dgrad run as grouped GEMMs."""
    specs, weights = [core.spec for core in cores], [core.parameters()[0] for core in cores]
    gemms = {(spec.recipe.fprop, spec.recipe.dgrad) for spec in specs}
    out_dtypes = {gemm.out_dtype for both in gemms for gemm in both}
    if opaque() or autocast_is_on(x) or region_decides(cores):
        return "grouped GEMMs do not run under dispatch modes, torch.autocast and dlp.autocast"
    if x.dtype is not torch.bfloat16 or not out_dtypes <= {None, torch.bfloat16}:
        return "the grouped GEMM returns bf16"
    if any(format.parts[0].dtype is not torch.float8_e4m3fn for spec in specs for format in _formats(spec)):
        return "the grouped GEMM multiplies E4M3"
    if any(parameter is not None for core in cores for parameter in core.parameters()[1:]):
        return "the grouped GEMM adds no bias"
    if any(spec.tp > 1 or spec.invariant or spec.return_bias or spec.recipe.y or spec.recipe.dx for spec in specs):
        return "tp, invariant, return_bias and quantizers of y and dx need results of each expert"
    if len(gemms) > 1 or len({weight.shape for weight in weights}) > 1:
        return "experts differ in shape or recipe"
    return why_not_grouped(x, len(cores), *weights[0].shape)


class _Collected:
    """The operands of fprop or of dgrad of all experts, which are launched as one GEMM.

    gemms    for each expert: its rows of x or dy, and the `Gemm` with the weight
    finish   passed to the forward or backward of each expert, so that they add to `gemms`
    """

    def __init__(self) -> None:
        self.gemms = list[tuple[QuantizedTensor, Gemm]]()
        self.finish = Finish(run=self._collect)

    def _collect(
        self, spec: LinearSpec, reduce: Any, operands: Sequence[Any], gemms: Sequence[Gemm], dtype: torch.dtype
    ) -> Tensor:
        """Replacement of `token_gemm`: add the operands to `gemms`, and return an empty result on the meta device."""
        (a,), (gemm,) = operands, gemms
        self.gemms.append((a, gemm))
        return torch.empty(a.shape[0], gemm.b.shape[0], dtype=gemm.out_dtype, device="meta")

    def launch(self, ends: Tensor) -> Tensor:
        """Launch the grouped GEMM and return the result [M, features] for the rows of all experts. ends: see `Bank`."""
        (a_codes, a_scales), (b_codes, b_scales) = (
            zip(*(operand.parts for operand in operands), strict=True)
            for operands in zip(*((a, gemm.b) for a, gemm in self.gemms), strict=True)
        )
        codes = torch.cat([as_bytes(each) for each in a_codes]), torch.stack([as_bytes(each) for each in b_codes])
        a, b = (each.view(torch.float8_e4m3fn) for each in codes)
        fast = self.gemms[0][1].options.fast_accumulation
        return grouped_fp8_rowwise(a, b, torch.cat(a_scales), torch.stack(b_scales), ends, fast)


class Bank(NamedTuple):
    """One call of a `GroupedLinear`.

    runs    for each expert the arguments of its forward and backward (`autograd.Run`)
    sizes   for each expert its number of rows
    ends    for each expert the index at which its rows end; int32 [E] on the device of x
    """

    runs: Sequence[autograd.Run]
    sizes: list[int]
    ends: Tensor


def _forward(ctx: Any, bank: Bank, tensors: Sequence[Any]) -> tuple[Tensor]:
    """Compute y [M, N] from tensors = [x, *weights]. ctx: context of autograd; None: there will be no backward."""
    (x, *weights), collected = tensors, _Collected()
    saved = list[tuple[Tensor, ...]]()
    contexts = [SimpleNamespace(save_for_backward=lambda *kept: saved.append(kept)) for _ in weights]
    for context, run, rows, weight in zip(contexts, bank.runs, x.split(bank.sizes), weights, strict=True):
        autograd.forward(None if ctx is None else context, run, (rows, weight, None), collected.finish)
    if ctx is not None:
        ctx.states, ctx.counts = [context.state for context in contexts], [len(kept) for kept in saved]
        ctx.save_for_backward(*[tensor for kept in saved for tensor in kept])
    return (collected.launch(bank.ends),)


def _backward(ctx: Any, bank: Bank, dys: Sequence[Tensor | None]) -> Sequence[Any]:
    """Compute the gradients of [x, *weights] from dys = [dy [M, N]]."""
    (dy,), saved, collected = dys, iter(ctx.saved_tensors), _Collected()
    assert dy is not None, "the only result has a gradient"
    dxs, dws, needs = list[Any](), list[Any](), ctx.needs_input_grad
    for i, (run, rows) in enumerate(zip(bank.runs, dy.split(bank.sizes), strict=True)):
        tensors = tuple([next(saved) for _ in range(ctx.counts[i])])
        own = (*needs[:3], needs[3 + i], False)
        context = SimpleNamespace(state=ctx.states[i], saved_tensors=tensors, needs_input_grad=own)
        dx, dw, *_ = autograd.backward(context, run, (rows,), collected.finish) if any(own) else (None, None)
        dxs.append(dx)
        dws.append(dw)
    if not needs[2]:
        return [None, *dws]
    # Under a dispatch mode the backward of each expert has run its own dgrad, and nothing was collected.
    return [collected.launch(bank.ends) if collected.gemms else torch.cat(dxs), *dws]


BANK = Passes(_forward, _backward)


def _prepared(core: LinearCore, rows: Tensor) -> tuple[autograd.Run, Tensor]:
    """Return the `autograd.Run` of an expert, prepared as in `LinearCore.__call__`, and the parameter of its weight."""
    bound, weights, parameters = core.active_spec(), core.weights, core.parameters()
    cast_weights = weights.operands_for(bound, rows.dtype)
    if weights.held:
        weights.check_in_place(parameters)
    call = autograd.call_of(bound, torch.is_grad_enabled(), rows, parameters, cast_weights)
    return (call, cast_weights), parameters[0]


def multiply(cores: Sequence[LinearCore], x: Tensor, sizes: list[int], offsets: Tensor) -> Tensor:
    """Compute y [M, N] from x [M, K], whose rows are sorted by expert. Call this function only if `obstacle` returns ""."""
    refuse_transforms(cores[0].spec.name)
    runs, weights = zip(*map(_prepared, cores, x.split(sizes)), strict=True)
    bank = Bank(runs, sizes, offsets.to(x.device, torch.int32, non_blocking=True))
    if any(call.differentiable for call, _ in runs):
        (y,) = apply_pass(BANK, bank, x, *weights)
        return y
    return _forward(None, bank, (x, *weights))[0]
