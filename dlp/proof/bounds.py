"""Bounds on the difference between a mesh and one rank, from formats and contraction lengths.

A rounding with unit roundoff u adds an independent error of variance u^2 value^2 / 3. For a GEMM C = A @ B.T with contraction
length L, the difference of two computations has at most the variance

    2 (var(A) @ (B^2).T + (A^2) @ var(B).T)      casts of A and B with different scales; var: variance of a cast error
    + 2 u_sum^2 L (A^2) @ (B^2).T                sums of L terms in another order; u_sum: unit roundoff of fp32
    + u_out^2 (2 C^2 + (A^2) @ (B^2).T)          roundings of results and partial sums; u_out: of the dtype of the result

`Spread` holds the terms that depend on the tensor, and `variance` computes the sum for a dtype. `measure` compares the 2-norm
of a difference with the root of the summed variances: over all values of a rank, each row, each column, and each element. The
norm of n values may be 1.5 + 6.5 / sqrt(n) times as large as expected: 8 standard deviations for a single element. For all
values of a rank, n is the smaller of the numbers of rows and columns if this is above 1.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import sqrt
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dlp.parallel.linear.modules import ParallelLinear
from dlp.proof.record import Key, Trace, is_activation_gradient, is_parameter_gradient
from dlp.quant.quantizer import caps_of
from dlp.quant.recipe import Operand

Part = slice | Tensor  # terms of a contraction: a slice, or indices
EVERYTHING = slice(None)

FP32 = torch.finfo(torch.float32).eps / 2
UNITS = {"e4m3": 2.0**-4, "e5m2": 2.0**-3, "e2m1": 2.0**-2}  # unit roundoff of normal numbers
# Half the smallest step of a format, divided by the largest value
STEPS = {
    "e4m3": 2.0**-10 / 448,
    "e5m2": 2.0**-17 / 57344,
    "e2m1": 0.25 / 6,
}
UPDATE = 4  # number of roundings of a weight in an optimizer's step: decay, update, and the inputs of both
SLACK, DEVIATIONS = 1.5, 6.5  # see `allowed`


def roundoff(dtype: torch.dtype) -> float:
    """Return the unit roundoff of a dtype: half the distance from 1 to the next number."""
    return torch.finfo(dtype).eps / 2


def rows_of(tensor: Tensor) -> Tensor:
    """Reshape [..., F] to fp32 [rows, F]. A vector is one row."""
    return tensor.float().reshape(-1, tensor.shape[-1]) if tensor.dim() else tensor.float().reshape(1, 1)


def cast_variance(values: Tensor, quantizer: Any) -> Tensor | None:
    """Return the variance of the rounding error of each element of `values` [rows, contraction]; None: no quantization."""
    if quantizer is None or quantizer.format.keeps_source:
        return None
    fmt = quantizer.format
    element = fmt.element or ("e2m1" if fmt.elements_per_code == 2 else "")
    unit, step = UNITS.get(element, 0.0), STEPS.get(element, 0.5 / 127)
    if step == 0.5 / 127 and (bits := getattr(fmt, "bits", 8)):
        step = 0.5 / (2 ** (bits - 1) - 1)
    squares = values.square()
    if fmt.basis:  # a rotation spreads each error over its group
        squares = _by_block(squares, (1, 16), torch.mean)
    amax = _by_block(values.abs(), fmt.block, torch.amax)
    stochastic = 2 if caps_of(quantizer).origin else 1
    return stochastic * (unit**2 * squares + (step * amax).square()) / 3


def _by_block(values: Tensor, block: tuple[int, int], reduce: Any) -> Tensor:
    """Replace each element by a reduction over its block; 0 in `block`: the complete dimension."""
    rows, columns = values.shape
    high, wide = (min(size or whole, whole) for size, whole in zip(block, values.shape, strict=True))
    padded = nn.functional.pad(values, (0, -columns % wide, 0, -rows % high))
    tiles = padded.unflatten(1, (-1, wide)).unflatten(0, (-1, high))
    reduced = reduce(reduce(tiles, 3, keepdim=True), 1, keepdim=True)
    return reduced.expand_as(tiles).flatten(0, 1).flatten(1, 2)[:rows, :columns]


@dataclass
class Gemm:
    """Contraction C [rows, columns] = a [rows, L] @ b [columns, L].T.

    quantizers   quantizers of a and b; None: high precision
    over         "features": tp shards L; "tokens": all ranks shard L
    """

    a: Tensor
    b: Tensor
    quantizers: tuple[Any, Any] = (None, None)
    over: str = "features"

    @property
    def length(self) -> int:
        return self.a.shape[1]

    def product(self, part: Part = EVERYTHING) -> Tensor:
        """Return C, or the contribution of a part of the terms of the contraction."""
        return self.a[:, part] @ self.b[:, part].t()

    def squares(self) -> Tensor:
        """Return the sum of the squared terms of each element of C."""
        return self.a.square() @ self.b.square().t()

    def casts(self) -> Tensor | float:
        """Return the variance of C due to casts of a and b."""
        of_a, of_b = (cast_variance(each, q) for each, q in zip((self.a, self.b), self.quantizers, strict=True))
        total: Tensor | float = 0.0
        if of_a is not None:
            total = total + of_a @ self.b.square().t()
        if of_b is not None:
            total = total + self.a.square() @ of_b.t()
        return total


@dataclass
class TokenSum:
    """Contraction C [1, F] = sum of `terms` [tokens, F] over tokens."""

    terms: Tensor
    over: str = "tokens"

    @property
    def length(self) -> int:
        return self.terms.shape[0]

    def product(self, part: Part = EVERYTHING) -> Tensor:
        return self.terms[part].sum(0, keepdim=True)

    def squares(self) -> Tensor:
        return self.terms.square().sum(0, keepdim=True)

    def casts(self) -> Tensor | float:
        return 0.0


@dataclass
class Scatter:
    """Contraction C [V, H], the gradient of an embedding: row v is the sum of the rows of dy [tokens, H] with token v."""

    tokens: Tensor
    dy: Tensor
    vocabulary: int
    over: str = "tokens"

    @property
    def length(self) -> int:
        return len(self.tokens)

    def product(self, part: Part = EVERYTHING) -> Tensor:
        return self.dy.new_zeros(self.vocabulary, self.dy.shape[1]).index_add_(0, self.tokens[part], self.dy[part])

    def squares(self) -> Tensor:
        return self.dy.new_zeros(self.vocabulary, self.dy.shape[1]).index_add_(0, self.tokens, self.dy.square())

    def casts(self) -> Tensor | float:
        return 0.0


@dataclass
class Lookup:
    """Embedding as a contraction over V: C [tokens, H] = rows of w [V, H]; tp shards V."""

    tokens: Tensor
    w: Tensor
    over: str = "features"

    @property
    def length(self) -> int:
        return self.w.shape[0]

    def product(self, part: Part = EVERYTHING) -> Tensor:
        assert isinstance(part, slice), "tp shards the vocabulary in slices"
        first, last, _ = part.indices(self.length)
        mine = (self.tokens >= first) & (self.tokens < last)
        return self.w[self.tokens] * mine.unsqueeze(1)

    def squares(self) -> Tensor:
        return self.w[self.tokens].square() / self.length  # a single term; `variance` multiplies by `length`

    def casts(self) -> Tensor | float:
        return 0.0


Terms = Gemm | TokenSum | Scatter | Lookup


def _quantizers(module: nn.Module, first: tuple[str, str], second: tuple[str, str]) -> tuple[Any, Any]:
    """Return the quantizers of two operands of a layer, given as (tensor, orientation); None for high precision."""
    if not isinstance(module, ParallelLinear):
        return None, None
    recipe = module.core.spec.recipe
    found = []
    for tensor, orientation in (first, second):
        operand = recipe.of(tensor)
        assert isinstance(operand, Operand)
        found.append(getattr(operand, orientation))
    return found[0], found[1]


def terms(trace: Trace, key: Key, *, weights_of: int | None = None) -> list[Terms]:
    """Return the contractions whose sum is the tensor `key` on one rank; [] if they are not known.

    `weights_of`: step whose weights are used; None: the step of the tensor."""
    step, layer, tensor, call = key
    if tensor == "y":
        found = [_forward(trace, key, weights_of)]
    elif tensor == "dx":
        found = [_backward(trace, step, name, at) for name, at in trace.readers(key)]
    elif is_parameter_gradient(key):
        layers = [name for name, _ in trace.tied.get((layer, "weight"), [(layer, "")])] if tensor == "dw" else [layer]
        runs = [(name, at) for name in layers for (of, ran, at) in trace.recorder.outputs if (of, ran) == (step, name)]
        found = [_gradient(trace, key._replace(layer=name), at) for name, at in runs]
    else:
        return []
    return [each for each in found if each is not None]


def _is_linear(module: nn.Module | None) -> bool:
    return isinstance(module, nn.Linear | ParallelLinear) and isinstance(getattr(module, "weight", None), Tensor)


def _forward(trace: Trace, key: Key, weights_of: int | None) -> Terms | None:
    step, layer, _, call = key
    module = trace.modules.get(layer)
    x, w = trace.input(step, layer, call), trace.weight(step if weights_of is None else weights_of, layer)
    if x is None or w is None or module is None:
        return None
    if isinstance(module, nn.Embedding):
        return Lookup(x.reshape(-1), w.float())
    if not _is_linear(module):
        return None
    return Gemm(rows_of(x), w.float(), _quantizers(module, ("x", "rowwise"), ("w", "rowwise")))


def _backward(trace: Trace, step: int, layer: str, call: int) -> Terms | None:
    module = trace.modules.get(layer)
    dy, w = trace.output_grad(step, layer, call), trace.weight(step, layer)
    if dy is None or w is None or module is None or not _is_linear(module):
        return None
    return Gemm(rows_of(dy), w.float().t(), _quantizers(module, ("dy", "rowwise"), ("w", "columnwise")))


def _gradient(trace: Trace, key: Key, call: int) -> Terms | None:
    step, layer, tensor, _ = key
    module = trace.modules.get(layer)
    x, dy = trace.input(step, layer, call), trace.output_grad(step, layer, call)
    if dy is None or module is None:
        return None
    if tensor == "db":
        return TokenSum(rows_of(dy))
    w, y = trace.weight(step, layer), trace.output(step, layer, call)
    if tensor != "dw" or w is None or y is None or x is None:
        return None
    if isinstance(module, nn.Embedding):
        return Scatter(x.reshape(-1), rows_of(dy), w.shape[0])
    if _is_linear(module):
        quantizers = _quantizers(module, ("dy", "columnwise"), ("x", "columnwise"))
        return Gemm(rows_of(dy).t(), rows_of(x).t(), quantizers, over="tokens")
    if w.dim() == 1 and w.shape[0] == y.shape[-1]:  # a norm: y = w * normalized + b
        b = trace.weight(step, layer, "bias")
        shifted = rows_of(y) - (0 if b is None else b.float())
        return TokenSum(rows_of(dy) * shifted / torch.where(w == 0, torch.inf, w).float())
    return None


class Spread(NamedTuple):
    """Terms of the variance of one tensor on one rank; see the module docstring.

    casts     variance due to one cast of each operand, in the shape of the tensor
    squares   sum of the squared terms of the contraction, in the shape of the tensor
    length    number of terms of the contraction
    """

    casts: Tensor | float
    squares: Tensor
    length: int


def spread(trace: Trace, key: Key) -> Spread:
    """Return the spread of a tensor.

    For an activation or gradient, the spread covers the known contractions (`terms`) and one further sum over a row or column
    of the tensor, as a model of other modules and of code between modules. The terms of this sum have the root mean square of
    the row; for dx and dy without a known contraction, at least the root mean square of the tensor. For a weight, the spread
    covers the roundings of all updates so far, and the last update. For any other tensor, the spread is 0."""
    value = trace.values[key].float()
    if not is_computed(key):
        before = trace.values.get(key._replace(step=key.step - 1))
        if before is None or before.shape != value.shape or not is_weight(key):
            return Spread(0.0, torch.zeros_like(value), 0)
        rounded = UPDATE * (key.step + 1) * FP32**2 * value.square()  # over all steps so far
        moved = (value - before.float()).square()
        return Spread(rounded, moved + moved.mean(), trace.elements)  # clipping sums over all gradients
    found, rows = terms(trace, key), rows_of(value)
    typical = rows.square().mean(-1, keepdim=True)
    # If a query attends to a single key, its gradient is a difference of equal terms: 0 but for rounding errors, which are as
    # large as in other rows. A row thus counts with at least the mean over rows
    if not found and is_activation_gradient(key):
        typical = typical.clamp(min=typical.mean())
    squares = typical.expand_as(rows).reshape(value.shape)
    casts: Tensor | float = 0.0
    for each in found:
        squares = squares + each.squares().reshape(value.shape)
        of_casts = each.casts()
        casts = casts + (of_casts.reshape(value.shape) if isinstance(of_casts, Tensor) else of_casts)
    return Spread(casts, squares, max(*rows.shape, *(each.length for each in found)))


def is_computed(key: Key) -> bool:
    """Whether a tensor is an activation or a gradient."""
    return re.fullmatch(r"d?[xy]\d*", key.tensor) is not None or is_parameter_gradient(key)


def is_weight(key: Key) -> bool:
    return not is_computed(key) and bool(key.layer) and not key.tensor.startswith("scale")


def variance(value: Tensor, of: Spread, dtype: torch.dtype) -> Tensor:
    """Return the variance of the difference of a tensor from the tensor of one rank. `dtype`: dtype of the computation."""
    out, total = roundoff(dtype), FP32
    return 2 * of.casts + (2 * total**2 * of.length + out**2) * of.squares + 2 * out**2 * value.float().square()


class Measured(NamedTuple):
    """Difference of two tensors on one rank.

    ratio           difference divided by the bound
    error           relative difference in the 2-norm
    equal           whether the bits are equal
    rows, columns   indices of rows and columns that exceed the bound
    """

    ratio: float
    error: float
    equal: bool
    rows: list[int]
    columns: list[int]


def allowed(count: int) -> float:
    """Return the largest accepted ratio of the norm of a difference of `count` values to the expected norm."""
    return SLACK + DEVIATIONS / sqrt(count)


def measure(found: Tensor, expected: Tensor, deviations: Tensor) -> Measured:
    """Compare the tensor `found` of this rank with `expected`. `deviations`: variance of the difference, elementwise."""
    if torch.equal(found, expected.to(found.dtype)) and found.isfinite().all():
        return Measured(0.0, 0.0, True, [], [])
    got, want, var = rows_of(found), rows_of(expected), rows_of(deviations)
    squares = (got - want).square()
    norm = float(want.norm())
    error = float(squares.sum().sqrt()) / norm if norm else float("inf")
    if not bool(got.isfinite().all()):
        bad = (~got.isfinite()).any(1).nonzero().flatten().tolist()
        return Measured(float("inf"), float("inf"), False, bad, [])
    by_row = _over(squares.sum(1), var.sum(1)) / allowed(got.shape[1])
    by_column = _over(squares.sum(0), var.sum(0)) / allowed(got.shape[0])
    whole = float(_over(squares.sum(), var.sum())) / allowed(min(got.shape) if min(got.shape) > 1 else got.numel())
    single = float(_over(squares, var).amax()) / allowed(1)
    ratio = max(whole, single, float(by_row.amax()), float(by_column.amax()))
    rows, columns = ((each > 1).nonzero().flatten().tolist() for each in (by_row, by_column))
    return Measured(ratio, error, False, rows, columns)


def _over(squares: Tensor, var: Tensor) -> Tensor:
    """Return sqrt(squares / var), and 0 where `squares` is 0."""
    tiny = torch.finfo(torch.float32).tiny
    return torch.where(squares > 0, (squares / var.clamp(min=tiny)).sqrt(), 0.0)
