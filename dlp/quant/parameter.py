"""QuantizedParameter: a tensor subclass for a quantized matrix, for the weight of a plain `nn.Linear` or `nn.Embedding`.

One class supports all formats, because a format defines how each part is sliced, concatenated and gathered. A weight can be
saved by `torch.save` and loaded with weights_only=True, sharded as a DTensor or by FSDP2, and compiled. Implementation of
operations:

    embedding                    decodes only the rows that are looked up
    linear; mm, addmm by w^T     one custom op, `dlp::quantized_linear`: cast x by `activation`, then run the GEMM of both
                                 formats
    mm by w                      decodes w
    detach, clone, to(device),   run on each part, if the result has complete blocks; else on decoded values
    t, slice, narrow, split,
    cat, view (same shape or
    flat), copy_, empty_like,
    zeros_like, all_gather,
    scatter, broadcast
    other operations             run on decoded values, with one warning per operation

Values are read-only: operations that write to the tensor raise ValueError, except for copy_, scatter and broadcast from a
QuantizedParameter of the same format.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass
from functools import partial
from math import lcm
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from dlp.quant.fp8 import CurrentScaling, DelayedScaling, Fp8Tensor, unchanged
from dlp.quant.fp8_block import BlockScaling, Fp8Block
from dlp.quant.fp8_rowwise import Fp8Rowwise, RowwiseScaling
from dlp.quant.gemm import GemmOptions
from dlp.quant.integers import Int, IntScaling
from dlp.quant.mxfp8 import Mxfp8, MxScaling
from dlp.quant.nvfp4 import Nvfp4, Nvfp4Scaling
from dlp.quant.quantized_linear import PLAIN, Use, autocasts, decoded, number_of, quantized_linear
from dlp.quant.quantizer import KeepHighPrecision, Quantizer, caps_of
from dlp.quant.static import StaticScaling
from dlp.quant.tensor import SHARED, UNSAID, Format, HighPrecision, QuantizedTensor, as_bytes

LOG = logging.getLogger("dlp")
aten, c10d = torch.ops.aten, torch.ops._c10d_functional


class QuantizedParameter(Tensor):
    """Tensor subclass of a quantized matrix. Operations see the decoded values, or with `turned` their transpose.

    Args:
        q: the quantized matrix.
        dtype: dtype of decoded values.
        use: format of the weight, and quantizer of x and GEMM options of linears with this weight; None: the format of `q`, and
            x stays in high precision.
        x_scale: for a static quantizer of x: the scale of per-tensor FP8, else the range (`dlp.quant.static`); None: x has no
            static quantizer.
        turned: whether this tensor is the transpose of the matrix.
        shape: shape of this tensor; None: the shape of the matrix without padding, or if `turned` the shape of its transpose.

    Shape:
        - decoded values: [N, K], or [K, N] if `turned`

    Examples:
        >>> model = dlp.quantize_(nn.Sequential(nn.Linear(64, 128)), "fp8_current")
        >>> type(model[0].weight).__name__, model[0].weight.shape
        ('QuantizedParameter', torch.Size([128, 64]))
    """

    use: Use
    names: tuple[str, ...]
    x_scale: Tensor | None
    turned: bool

    @staticmethod
    def __new__(
        cls, q: QuantizedTensor, dtype: torch.dtype, use: Use | None = None, x_scale: Tensor | None = None,
        turned: bool = False, shape: tuple[int, ...] | None = None,
    ) -> QuantizedParameter:  # fmt: skip
        values = q.shape if use is None else use.values_shape(q.parts)
        size = shape or (values[::-1] if turned else values)
        made: QuantizedParameter = torch.Tensor._make_wrapper_subclass(
            cls, size, dtype=dtype, device=q.payload.device, requires_grad=False
        )
        return made

    def __init__(
        self, q: QuantizedTensor, dtype: torch.dtype, use: Use | None = None, x_scale: Tensor | None = None,
        turned: bool = False, shape: tuple[int, ...] | None = None,
    ) -> None:  # fmt: skip
        """Store the parts as attributes. The docstring of the class describes the arguments."""
        self.use = use or Use(q.format)
        self.part_names = tuple(f"part_{part.name}" for part in q.format.parts)
        for name, part in zip(self.part_names, q.parts, strict=True):
            setattr(self, name, part)
        self.x_scale, self.turned = x_scale, turned

    @classmethod
    def from_float(
        cls, values: Tensor, quantizer: Quantizer, activation: Quantizer | None = None, *,
        x_scale: Tensor | None = None, options: GemmOptions = PLAIN,
    ) -> QuantizedParameter:  # fmt: skip
        """Return the QuantizedParameter of w [N, K].

        Args:
            values: w. If w has partial blocks, a zero-padded copy is quantized, as in training; the parameter has the shape of
                w.
            quantizer: quantizer of w.
            activation: quantizer of x; None: x stays in high precision.
            x_scale: scale or range of a static quantizer of x, fp32 [] or [2].
            options: options of the GEMM.

        Raises:
            ValueError: if w is no matrix of floats, if `quantizer` has delayed scales, or if the quantizer of x is static and
                `x_scale` is missing.
        """
        if caps_of(quantizer).slot is not None:
            raise ValueError(
                f"{quantizer} has delayed scales, and a single weight has no history: use current or block scales"
            )
        if activation is not None and caps_of(activation).slot is not None and x_scale is None:
            raise ValueError(
                f"{activation} computes no scale from x: pass x_scale, the scale or the range of x (see dlp.calibrate)"
            )
        if values.dim() != 2 or not values.is_floating_point():
            raise ValueError(
                f"QuantizedParameter.from_float takes one matrix [N, K] of floats; got {tuple(values.shape)} of "
                f"{values.dtype}: quantize matrices one by one"
            )
        values = values.detach()
        padded = quantizer.format.padded(values)
        q = quantizer.cast(padded, quantizer.observe(padded))
        shape = None if padded.shape == values.shape else (values.shape[0], values.shape[1])
        return cls(q, values.dtype, Use(quantizer.format, activation, options, shape), x_scale)

    @property
    def quantized(self) -> QuantizedTensor:
        """The quantized matrix [N, K], not transposed."""
        return QuantizedTensor(self.use.format, self.parts)

    @property
    def parts(self) -> tuple[Tensor, ...]:
        return tuple(getattr(self, name) for name in self.part_names)

    @property
    def inside(self) -> tuple[Tensor, ...]:
        """Plain tensors of this parameter: the parts, and the static scale of x if there is one."""
        return self.parts if self.x_scale is None else (*self.parts, self.x_scale)

    def share_memory_(self) -> QuantizedParameter:
        """Move the plain tensors of this parameter to shared memory. The method of torch would crash, because this tensor has
        no storage."""
        for each in self.inside:
            each.share_memory_()
        return self

    def is_shared(self) -> bool:
        return all(each.is_shared() for each in self.inside)

    def like(self, parts: Sequence[Tensor], **changes: Any) -> QuantizedParameter:
        """Return a QuantizedParameter with these parts and the same `use`. `changes`: constructor arguments that replace
        the arguments of this parameter; `shape` is not inherited."""
        kept: dict[str, Any] = {
            "dtype": self.dtype,
            "use": self.use,
            "x_scale": self.x_scale,
            "turned": self.turned,
        } | changes
        return QuantizedParameter(QuantizedTensor(self.use.format, tuple(parts)), **kept)

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return the decoded values in the shape of this parameter. `dtype` None: the dtype of this parameter."""
        made = decoded(list(self.parts), dtype or self.dtype, number_of(self.use))
        return (made.t() if self.turned else made).reshape(self.shape)

    def linear(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return y = x w^T + bias [..., N] for x [..., K], in the dtype of x, or of torch.autocast if it is on."""
        if autocasts(x):
            with torch.autocast(x.device.type, enabled=False):
                return self.linear(x.to(torch.get_autocast_dtype(x.device.type)), bias)
        y: Tensor = quantized_linear(x, list(self.parts), self.x_scale, bias, number_of(self.use))
        return y

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"QuantizedParameter({tuple(self.shape)}, {self.use.format.name}, {self.dtype}, {self.device})"

    # hooks of torch.compile, torch.save and FSDP2

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        scale = [] if self.x_scale is None else ["x_scale"]
        return [*self.part_names, *scale], (self.use, self.dtype, self.turned, self.dim() == 2)

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], how: Any, size: Any, stride: Any) -> QuantizedParameter:
        use, dtype, turned, matrix = how
        parts = tuple(inner[f"part_{part.name}"] for part in use.format.parts)
        shape = None if matrix else tuple(size)
        return QuantizedParameter(QuantizedTensor(use.format, parts), dtype, use, inner.get("x_scale"), turned, shape)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _rebuild, (tuple(map(as_bytes, self.parts)), self.dtype, _spelled(self.use), self.x_scale, self.turned)

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], Any]:
        """Return (parts that FSDP gathers, this parameter); FSDP passes the second to `fsdp_post_all_gather` as `mine`. Raises
        ValueError, on all ranks, if the number of ranks does not divide the rows."""
        if outer_size[0] % mesh.size():
            raise ValueError(
                f"a quantized weight {tuple(outer_size)} has {outer_size[0]} rows, which FSDP cannot shard evenly over "
                f"{mesh.size()} ranks: exclude the layer (filter_fn of dlp.quantize_), or shard over a number of ranks that "
                f"divides the rows"
            )
        moving = [
            _bytes(p) for p, part in zip(self.parts, self.use.format.parts, strict=True) if part.rows is not SHARED
        ]
        return tuple(moving), self

    def fsdp_post_all_gather(
        self, outputs: tuple[Tensor, ...], mine: QuantizedParameter, param_dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        moved = iter(outputs)
        whole = [
            p if part.rows is SHARED else next(moved).view(p.dtype)
            for p, part in zip(mine.parts, mine.use.format.parts, strict=True)
        ]
        if out is None:
            return mine.like(whole), outputs
        for old, new in zip(out.parts, whole, strict=True):
            if old.data_ptr() != new.data_ptr():
                old.copy_(new)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.nn.functional.linear:
            x, w, bias = _of_linear(*args, **kwargs)
            if isinstance(w, QuantizedParameter) and not w.turned and type(x) is Tensor:
                return w.linear(x, bias)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        known = OPS.get(func)
        done = NotImplemented if known is None else known(*args, **kwargs)
        return _decode_and_run(func, args, kwargs) if done is NotImplemented else done


def _of_linear(input: Any, weight: Any, bias: Any = None) -> tuple[Any, Any, Any]:
    """Return the arguments of a call of F.linear as (x, weight, bias). Parameters have the names of F.linear, for keywords."""
    return input, weight, bias


def _bytes(part: Tensor) -> Tensor:
    """Return a contiguous part for a transfer. Parts with one-byte elements are viewed as uint8, since gloo has no FP8."""
    return as_bytes(part.contiguous())


def _spelled(value: Any) -> Any:
    """Return a format, quantizer or `Use` as (class, {field: value}) for pickling, without cached values; other values are
    returned unchanged."""
    if not is_dataclass(value):
        return value
    return type(value), {each.name: _spelled(getattr(value, each.name)) for each in fields(value) if each.init}


def _read(value: Any) -> Any:
    """Return the object that `_spelled` converted: the inverse of `_spelled`."""
    if not (isinstance(value, tuple) and value and isinstance(value[0], type)):
        return value
    kind, given = value
    return kind(**{name: _read(each) for name, each in given.items()})


def _rebuild(
    parts: tuple[Tensor, ...], dtype: torch.dtype, use: Any, x_scale: Tensor | None, turned: bool
) -> QuantizedParameter:
    how: Use = _read(use)
    typed = [tensor.view(part.dtype or tensor.dtype) for part, tensor in zip(how.format.parts, parts, strict=True)]
    return QuantizedParameter(QuantizedTensor(how.format, tuple(typed)), dtype, how, x_scale, turned)


def _written(func: Any, args: Any, kwargs: Any) -> list[Any]:
    """Return the arguments that an operation writes to. The schemas of c10d do not mark these arguments: an operation of c10d
    whose name ends with "_" writes to its first argument."""
    if func.namespace == "c10d":
        return [args[0]] if func._schema.name.endswith("_") else []
    given = {**dict(zip([each.name for each in func._schema.arguments], args, strict=False)), **kwargs}
    into = [each.name for each in func._schema.arguments if each.alias_info is not None and each.alias_info.is_write]
    return [given[name] for name in into if name in given]


_TOLD: set[Any] = set()  # operations for which `_decode_and_run` has logged the warning


def _decode_and_run(func: Any, args: Any, kwargs: Any) -> Any:
    written = (each for each in tree_leaves(_written(func, args, kwargs)) if isinstance(each, QuantizedParameter))
    if (weight := next(written, None)) is not None:
        raise ValueError(
            f"{func} would write to a weight that is stored as {weight.use.format.name} codes: convert the new values by "
            f"QuantizedParameter.from_float, or load the values before the model is quantized"
        )
    if func not in _TOLD:
        _TOLD.add(func)
        LOG.warning("%s of a quantized weight runs on its decoded values", func)
    plain = tree_map(lambda each: each.dequantize() if isinstance(each, QuantizedParameter) else each, (args, kwargs))
    return func(*plain[0], **plain[1])


Run = Callable[..., Any]
OPS: dict[Any, Run] = {}


def _runs(*funcs: Any) -> Callable[[Run], Run]:
    """Decorator that registers a function as the implementation of these operations. If the function returns NotImplemented,
    the operation runs on decoded values."""

    def enter(run: Run) -> Run:
        OPS.update({func: partial(run, func) for func in funcs})
        return run

    return enter


@_runs(aten.detach.default, aten.alias.default, aten.contiguous.default, c10d.wait_tensor.default)
# registered only if torch has the operation _wrap_tensor_autograd, which torch 2.11 lacks
@_runs(*(getattr(c10d, name).default for name in ("_wrap_tensor_autograd",) if hasattr(c10d, name)))
def _each_part(func: Any, w: QuantizedParameter, **kwargs: Any) -> QuantizedParameter:
    return w.like([func(part) for part in w.parts], shape=_flat(w))


@_runs(aten.is_pinned.default)
def _first_part(func: Any, w: QuantizedParameter, *args: Any, **kwargs: Any) -> Any:
    return func(w.parts[0], *args, **kwargs)


@_runs(aten.clone.default)
def _clone(func: Any, w: QuantizedParameter, **kwargs: Any) -> QuantizedParameter:
    scale = None if w.x_scale is None else func(w.x_scale)
    return w.like([func(part) for part in w.parts], x_scale=scale, shape=_flat(w))


def _flat(w: QuantizedParameter) -> tuple[int, ...] | None:
    return None if w.dim() == 2 else tuple(w.shape)


@_runs(aten._to_copy.default)
def _to_copy(func: Any, w: QuantizedParameter, *, dtype: Any = None, device: Any = None, **kwargs: Any) -> Any:
    """Copy to a device. `dtype` changes only the dtype of decoded values, not the codes."""
    scale = None if w.x_scale is None else func(w.x_scale, device=device)
    return w.like(
        [func(part, device=device) for part in w.parts], dtype=dtype or w.dtype, x_scale=scale, shape=_flat(w)
    )


@_runs(aten.t.default, aten.transpose.int, aten.permute.default)
def _turn(func: Any, w: QuantizedParameter, *dims: Any) -> Any:
    if func is aten.t.default or {d % 2 for d in (dims[0] if func is aten.permute.default else dims)} == {0, 1}:
        same = func is aten.permute.default and list(dims[0])[0] % 2 == 0
        return w.like(w.parts, turned=w.turned ^ (not same))
    return NotImplemented


@_runs(aten.view.default, aten._unsafe_view.default, aten.as_strided.default)
def _view(func: Any, w: QuantizedParameter, size: Sequence[int], stride: Any = None, offset: Any = None) -> Any:
    if offset or (stride is not None and list(stride) != list(torch.empty(size, device="meta").stride())):
        return NotImplemented
    if list(size) == [-1] or list(size) == [w.numel()]:
        return w.like(w.parts, shape=(w.numel(),))
    return w.like(w.parts) if list(size) == list(w.shape) and not w.turned else NotImplemented


@_runs(aten.slice.Tensor)
def _slice(func: Any, w: QuantizedParameter, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Any:
    if w.dim() == 1:  # FSDP2 slices flat views, and only over their full length
        return w.like(w.parts, shape=_flat(w)) if (end or w.numel()) >= w.numel() and not start else NotImplemented
    size = w.shape[dim]
    first, last = slice(start, end).indices(size)[:2]
    cut = (dim % 2) ^ w.turned  # dimension of the operand
    fmt = w.use.format
    whole = first == 0 and last == size
    unit = lcm(fmt.block[cut] or 1, fmt.multiple[cut])  # slices do not cut blocks or packed codes
    aligned = first % unit == 0 and (last % unit == 0 or last == size)
    said = w.use.shape is None and all(part.moves_along(cut) != UNSAID for part in fmt.parts)
    if step != 1 or last < first or not (whole or (aligned and said)):
        return NotImplemented
    before, behind = (fmt.part_shapes(_resized(w.quantized.shape, cut, end)) for end in (first, last))
    parts = []
    for part, tensor, start_of, end_of in zip(fmt.parts, w.parts, before, behind, strict=True):
        along = part.moves_along(cut)
        if along is SHARED or whole:
            parts.append(aten.alias(tensor))
        else:
            parts.append(tensor.narrow(along, start_of[along], end_of[along] - start_of[along]))
    return w.like(parts)


def _resized(shape: tuple[int, int], dim: int, size: int) -> tuple[int, int]:
    return (size, shape[1]) if dim == 0 else (shape[0], size)


@_runs(aten.split.Tensor, aten.split_with_sizes.default)
def _split(func: Any, w: QuantizedParameter, sizes: Any, dim: int = 0) -> Any:
    total = w.shape[dim]
    if isinstance(sizes, int):
        sizes = [min(sizes, total - at) for at in range(0, total, sizes)]
    made, at = [], 0
    for size in sizes:
        made.append(_slice(func, w, dim, at, at + size))
        at += size
    return NotImplemented if any(each is NotImplemented for each in made) else made


@_runs(aten.cat.default)
def _cat(func: Any, tensors: Sequence[Any], dim: int = 0) -> Any:
    first = tensors[0]
    if not all(isinstance(w, QuantizedParameter) and (w.use, w.turned) == (first.use, first.turned) for w in tensors):
        return NotImplemented
    cut = (dim % 2) ^ first.turned
    fmt: Format = first.use.format
    if first.use.shape or not all(fmt.concatenates(cut, w.quantized.shape[cut]) for w in tensors):
        return NotImplemented
    parts = []
    for i, part in enumerate(fmt.parts):
        along, given = part.moves_along(cut), [w.parts[i] for w in tensors]
        if along is not SHARED:
            parts.append(_joined(given, along))
        elif all(torch.equal(each, given[0]) for each in given[1:]):
            parts.append(given[0])
        else:
            return NotImplemented  # different shared scales cannot be concatenated
    if not all(_same(w.x_scale, first.x_scale) for w in tensors):
        return NotImplemented
    return first.like(parts)


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    return a is b or (a is not None and b is not None and torch.equal(a, b))


def _joined(given: Sequence[Tensor], along: int | None) -> Tensor:
    """Concatenate parts along a dimension. FP8 codes are concatenated as bytes, since not all devices concatenate FP8."""
    assert along is not None
    if given[0].dtype.itemsize == 1 and given[0].is_floating_point():
        return torch.cat([each.view(torch.uint8) for each in given], along).view(given[0].dtype)
    return torch.cat(list(given), along)


@_runs(c10d.all_gather_into_tensor.default)
def _gather(func: Any, w: QuantizedParameter, size: int, group: Any) -> Any:
    """All-gather along the first dimension. SHARED parts are not sent; they are equal on all ranks, because ranks have agreed
    on amaxes (`amax_scope`), or because the shards were cut from one quantized weight."""
    if w.use.shape:
        return NotImplemented
    cut, fmt = int(w.turned), w.use.format
    parts = []
    for part, tensor in zip(fmt.parts, w.parts, strict=True):
        along = part.moves_along(cut)
        if along is SHARED:
            parts.append(tensor)
            continue
        payload = _bytes(tensor)
        gathered = c10d.wait_tensor(func(payload, size, group))
        if along:
            gathered = torch.cat(gathered.chunk(size, 0), along)
        parts.append(gathered.view(tensor.dtype) if payload.dtype != tensor.dtype else gathered)
    return w.like(parts)


@_runs(torch.ops.c10d.scatter_.default)
def _scatter(func: Any, outputs: list[Any], inputs: list[list[Any]], group: Any, root: int, *_: Any) -> Any:
    """Scatter shards to ranks, part by part. `distribute_tensor` and `parallelize_module` call this operation."""
    if not _alike([*outputs, *[each for given in inputs for each in given]]):
        return NotImplemented
    return _by_part(
        lambda i, mine: func([mine], [[_sent(each, i) for each in given] for given in inputs], group, root), outputs
    )


@_runs(torch.ops.c10d.broadcast_.default)
def _broadcast(func: Any, tensors: list[Any], group: Any, root: int, at: int, *_: Any) -> Any:
    return _by_part(lambda i, mine: func([mine], group, root, at), tensors) if _alike(tensors) else NotImplemented


def _alike(given: Sequence[Any]) -> bool:
    """Return whether all tensors are QuantizedParameters with equal `use` and `turned`, all with or all without a scale of x,
    so that an operation can run part by part."""
    kinds = {(w.use, w.turned, w.x_scale is None) if isinstance(w, QuantizedParameter) else None for w in given}
    return len(kinds) == 1 and None not in kinds


def _sent(w: QuantizedParameter, i: int) -> Tensor:
    return _bytes(w.inside[i])


def _by_part(collective: Callable[[int, Tensor], tuple[Any, Any]], into: list[QuantizedParameter]) -> tuple[Any, Any]:
    """Run a collective for each plain tensor of the output, and wait for it. `collective`: function of the index of the plain
    tensor and the tensor.

    The collectives are asynchronous: for a synchronous collective NCCL returns no work, and torch 2.11 crashes when Python asks
    for the missing work."""
    (w,) = into
    for i, part in enumerate(w.inside):
        mine = _sent(w, i)
        _, work = collective(i, mine)
        work.wait()
        if mine.data_ptr() != part.data_ptr():
            part.copy_(mine.view(part.dtype))
    return into, work


@_runs(aten.copy_.default)
def _copy(func: Any, w: Any, other: Any, non_blocking: bool = False) -> Any:
    """Copy the parts and the scale of x from a QuantizedParameter. Raises ValueError if format, shape or orientation differ, or
    if only one parameter has a scale of x."""
    if not (isinstance(w, QuantizedParameter) and isinstance(other, QuantizedParameter)):
        return NotImplemented
    target, same_format = f"a weight of {w.use.format.name} codes {tuple(w.shape)}", w.use.format == other.use.format
    if w.shape != other.shape or w.turned != other.turned:
        shape = f"the source has the shape {tuple(other.shape)}"
        differs = shape if w.shape != other.shape else "one of the two is transposed"
        raise ValueError(
            f"{target} cannot be overwritten: {differs}; copy from a weight of the same shape and orientation"
        )
    if not same_format or (w.x_scale is None) != (other.x_scale is None):
        kind = f"the source has the format {other.use.format.name}"
        differs = "one of the two has a static scale of x" if same_format else kind
        raise ValueError(
            f"{target} cannot be overwritten: {differs}; quantize the source with the same recipe and mode (dlp.quantize_), or "
            f"load the weight with assign=True"
        )
    for part, source in zip(w.inside, other.inside, strict=True):
        part.copy_(source)
    return w


@_runs(aten.empty_like.default, aten.zeros_like.default, aten.new_zeros.default, aten.new_empty.default)
def _empty(func: Any, w: QuantizedParameter, *size: Any, dtype: Any = None, device: Any = None, **kwargs: Any) -> Any:
    """Allocate a QuantizedParameter in the shape of w, or with a different number of rows if these rows are complete blocks, as
    FSDP2 needs for padded shards. The scale of x is copied."""
    shape: Any = tuple(size[0]) if size else tuple(w.shape)
    fmt, same = w.use.format, shape == tuple(w.shape)
    rows = w.dim() == len(shape) == 2 and shape[1] == w.shape[1] and fmt.concatenates(int(w.turned), shape[0])
    rows = rows and w.use.shape is None
    if not (same or rows) or dtype not in (None, w.dtype):
        return NotImplemented
    of = w.quantized.shape if same else shape[::-1] if w.turned else shape
    made = fmt.empty(of, dtype=w.dtype, device=device or w.device)
    if "zeros" in str(func):
        for part in made.parts:
            part.zero_()
    scale = None if w.x_scale is None else w.x_scale.to(device or w.device, copy=True)
    return w.like(made.parts, x_scale=scale, shape=_flat(w) if same else None)


@_runs(aten.embedding.default)
def _embedding(func: Any, w: Any, indices: Tensor, *how: Any) -> Any:
    """Look up rows, and decode only these rows. The full table is decoded if scales span several rows, if the format
    does not define how rows are sliced, or if the table is transposed or padded."""
    if not isinstance(w, QuantizedParameter) or w.turned or w.use.shape:
        return NotImplemented
    fmt, rows = w.use.format, indices.reshape(-1)
    if fmt.block[0] > 1 or any(part.rows not in (0, SHARED) for part in fmt.parts):
        return NotImplemented
    parts = [
        p if part.rows is SHARED else _bytes(p).index_select(0, rows).view(p.dtype)
        for p, part in zip(w.parts, fmt.parts, strict=True)
    ]
    return decoded(parts, w.dtype, number_of(w.use)).reshape(*indices.shape, -1)


@_runs(aten.linear.default)
def _linear(func: Any, x: Any, w: Any, bias: Any = None) -> Any:
    return w.linear(x, bias) if isinstance(w, QuantizedParameter) and not w.turned else NotImplemented


@_runs(aten.mm.default)
def _mm(func: Any, x: Any, w: Any) -> Any:
    if not isinstance(w, QuantizedParameter):
        return NotImplemented
    return w.linear(x) if w.turned else x @ w.dequantize(x.dtype)  # turned: fprop; not turned: dgrad


@_runs(aten.addmm.default)
def _addmm(func: Any, bias: Any, x: Any, w: Any, *, beta: Any = 1, alpha: Any = 1) -> Any:
    plain = beta == 1 and alpha == 1 and bias.dim() == 1
    return w.linear(x, bias) if isinstance(w, QuantizedParameter) and w.turned and plain else NotImplemented


def allow(*kinds: Any) -> None:
    """Allow `torch.load(weights_only=True)` to load these user-defined formats and quantizers."""
    torch.serialization.add_safe_globals(list(kinds))


allow(
    QuantizedParameter, Use, GemmOptions, _rebuild, HighPrecision, KeepHighPrecision, Fp8Tensor, Fp8Rowwise, Fp8Block, Mxfp8,
    Nvfp4, Int, CurrentScaling, RowwiseScaling, BlockScaling, MxScaling, Nvfp4Scaling, IntScaling, DelayedScaling,
    StaticScaling, unchanged,
)  # fmt: skip
