"""Test suites for built-in and user-defined formats: `check_format`.

    dlp.testing.check_format(MyQuantizer())                   runs the suites basic, pieces, transpose, linear, saving, compile
    dlp.testing.check_format(MyQuantizer(), mesh=mesh)        also runs the suites DTensor and FSDP; call on all ranks

A suite that fails raises AssertionError with the name of the suite and the rule; if an SQNR is too small, the message has the
SQNR and the minimum.
"""

from __future__ import annotations

import copy
import io
import math
from dataclasses import is_dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

from dlp.quant.parameter import QuantizedParameter
from dlp.quant.quantizer import Origin, Quantizer, caps_of, quantized_values
from dlp.quant.tensor import SHARED, UNSAID, QuantizedTensor

SIZE = (256, 512)  # shape of the test matrices, whose halves consist of complete blocks of the built-in formats
# Minimum SQNR in dB by element format; "": formats without an element format
FLOORS = {"e4m3": 30.0, "e5m2": 24.0, "e2m1": 15.0, "": 40.0}
FLOORS |= {f"int{bits}": 6.0 * bits - 8 for bits in range(2, 9)}


def sqnr(found: Tensor, expected: Tensor) -> float:
    """Return the signal-to-quantization-noise ratio in dB.

    Args:
        found: tensor with quantization noise.
        expected: tensor without noise.

    Returns:
        Ratio of the power of `expected` to the power of the difference; inf for equal tensors.

    Examples:
        >>> dlp.testing.sqnr(torch.tensor([1.0, 1.0]), torch.tensor([1.0, 1.0]))
        inf
    """
    noise = (found.double() - expected.double()).square().sum()
    power = expected.double().square().sum()
    return math.inf if not noise else float(10 * torch.log10(power / noise))


def check_format(
    quantizer: Quantizer, *, device: torch.device | str = "cpu", mesh: DeviceMesh | None = None, floor: float | None = None,
    compiles: bool = True,
) -> dict[str, float]:  # fmt: skip
    """Check that a quantizer and its format fulfil the requirements of dlp.

    The suites check casts, pieces of a matrix, transposes, a linear, saving and compilation. For a format with a transform
    (`Format.basis`), only casts, pieces and transposes are checked.

    Args:
        quantizer: quantizer that computes scales from the tensor itself.
        device: device of the test matrices.
        mesh: mesh whose first axis has at least two ranks. With a mesh, sharding by DTensor and FSDP2 is checked as well, and
            all ranks must call this function.
        floor: smallest accepted SQNR of decoded values in dB; y may be 1 dB lower. None: 30 for E4M3, 24 for E5M2, 15 for E2M1,
            6 * bits - 8 for integers, and 40 for other formats.
        compiles: check torch.compile, which takes a few seconds.

    Returns:
        SQNRs in dB: entry "values" for decoded values, and entry "linear" for y of the linear. A format with a transform has no
        entry "linear".

    Raises:
        AssertionError: for a check that fails, with the name of the suite and the rule.
        ValueError: for a quantizer with delayed scales.

    Examples:
        >>> from dlp.quant.fp8 import CurrentScaling
        >>> measured = dlp.testing.check_format(CurrentScaling(), compiles=False)
    """
    if caps_of(quantizer).slot is not None:
        raise ValueError(
            f"{quantizer} uses delayed scaling, and a single matrix has no amax history: check the format with current scales"
        )
    least = FLOORS.get(_element(quantizer), FLOORS[""]) if floor is None else floor
    made = torch.Generator().manual_seed(0)
    values = torch.randn(SIZE, generator=made).to(torch.bfloat16).to(device)
    x = torch.randn(64, SIZE[1], generator=made).to(torch.bfloat16).to(device)
    q = _cast(quantizer, values)
    found = {"values": check_basic(quantizer, values, q, least)}
    check_pieces(quantizer, values, q)
    check_transpose(quantizer, values, q)
    if quantizer.format.basis:  # the values are rotated, so a GEMM needs a second operand with the same rotation
        return found
    weight = QuantizedParameter(q, values.dtype)
    found["linear"] = check_linear(weight, values, x, least)
    read = check_saved(weight)
    if compiles:
        check_compile(read, x)
    if mesh is not None:
        check_mesh(weight, x, mesh)
    return found


def _element(quantizer: Quantizer) -> str:
    """Return the name of the element format: `element` of the format, else "e2m1" if a code holds two elements, else ""."""
    fmt = quantizer.format
    element = getattr(fmt, "element", "")
    return element or ("e2m1" if fmt.elements_per_code == 2 else "")


def _must(holds: bool, suite: str, said: str) -> None:
    """Raise AssertionError with the message `said` unless a condition holds."""
    if not holds:
        raise AssertionError(f"check_format, {suite}: {said}")


def _cast(
    quantizer: Quantizer, values: Tensor, amax: Tensor | None = None, at: Origin | None = None
) -> QuantizedTensor:
    """Cast a matrix. `amax`: amax for the scale; None: the amax of this matrix. `at`: position of the matrix for random bits;
    None: the matrix is not a shard."""
    amax = quantizer.observe(values) if amax is None else amax
    if not caps_of(quantizer).origin:
        return quantizer.cast(values, amax)
    counter = torch.zeros((), dtype=torch.int64, device=values.device)
    return quantizer.cast(values, amax, at=at or Origin(0, 0, *SIZE, 0, 0, counter))


def check_basic(quantizer: Quantizer, values: Tensor, q: QuantizedTensor, least: float) -> float:
    """Check that the format is a dataclass, that dtypes and shapes of parts are as declared, that a cast into `out` equals a
    cast without `out`, that parts are contiguous, and that errors are small, also if the values are multiplied by 2^40.
    Returns the SQNR of the decoded values in dB. `q`: the cast of `values`; `least`: smallest accepted SQNR in dB."""
    fmt = quantizer.format
    _must(q.format == fmt, "basic", f"cast returns {q.format.name}, and the quantizer declares {fmt.name}")
    _must(is_dataclass(fmt) and fmt == copy.copy(fmt), "basic", "a format must be a value: a frozen dataclass")
    for part, tensor, shape in zip(fmt.parts, q.parts, fmt.part_shapes(SIZE), strict=True):
        said = f"part {part.name} is {tensor.dtype} {tuple(tensor.shape)}, declared {part.dtype} {tuple(shape)}"
        _must(tuple(tensor.shape) == tuple(shape) and tensor.dtype == (part.dtype or values.dtype), "basic", said)
    _must(q.shape == SIZE, "basic", f"shape is {q.shape}, of a matrix {SIZE}")
    given: dict[str, Any] = {"at": Origin(0, 0, *SIZE, 0, 0, torch.zeros((), dtype=torch.int64, device=values.device))}
    out = fmt.empty(SIZE, dtype=values.dtype, device=values.device)
    quantizer.cast(values, quantizer.observe(values), out=out, **(given if caps_of(quantizer).origin else {}))
    same = all(_equal(a, b) for a, b in zip(out.parts, q.parts, strict=True))
    _must(same, "basic", "a cast into `out` differs from a cast without `out`")
    view = _cast(quantizer, values.t().contiguous().t())  # strided like the transposed x of a columnwise operand
    strided = [part.name for part, tensor in zip(fmt.parts, view.parts, strict=True) if not tensor.is_contiguous()]
    _must(
        not strided,
        "basic",
        f"parts {strided} of a transposed matrix are not contiguous, which compiled code expects",
    )
    source = quantized_values(quantizer, values)
    ratio = sqnr(q.dequantize(torch.float32), source)
    _must(ratio >= least, "basic", f"SQNR of values is {ratio:.1f} dB, below the floor of {least:.1f}")
    large = values * 2.0**40
    far = sqnr(_cast(quantizer, large).dequantize(torch.float32) / 2.0**40, source)
    _must(
        far >= least - 1,
        "basic",
        f"SQNR of values multiplied by 2^40 is {far:.1f} dB: a scale does not follow the values",
    )
    return ratio


def _equal(a: Tensor, b: Tensor) -> bool:
    as_bytes = [each.contiguous().reshape(-1).view(torch.uint8) for each in (a, b)]
    return torch.equal(*as_bytes)


def check_pieces(quantizer: Quantizer, values: Tensor, q: QuantizedTensor) -> None:
    """Check that halves of a matrix consist of complete blocks. Cast the halves with the amax of the matrix, and check that the
    parts of the halves concatenate to the parts of `q`, the cast of the matrix; SHARED parts must equal the parts of `q`. Casts
    with stochastic rounding are not compared."""
    fmt = quantizer.format
    for dim, size in enumerate(SIZE):
        for part in fmt.parts:
            _must(
                part.moves_along(dim) != UNSAID, "pieces", f"part {part.name} does not declare a dimension along {dim}"
            )
        _must(fmt.concatenates(dim, size // 2), "pieces", f"halves of {size} along {dim} cut blocks of {fmt.block}")
        if caps_of(quantizer).origin:
            continue  # random bits depend on the position in the full matrix
        amax, halves = quantizer.observe(values), values.chunk(2, dim)
        row_amaxes = amax is not None and amax.dim() and amax.shape[-1] == SIZE[0] and dim == 0
        amaxes = amax.chunk(2, -1) if row_amaxes and amax is not None else (amax, amax)
        made = [_cast(quantizer, half.contiguous(), each) for half, each in zip(halves, amaxes, strict=True)]
        for i, part in enumerate(fmt.parts):
            along, given = part.moves_along(dim), [each.parts[i] for each in made]
            if along is SHARED:
                same = all(_equal(each, q.parts[i]) for each in given)
                _must(same, "pieces", f"part {part.name} is declared SHARED along {dim}, and differs between pieces")
                continue
            joined = torch.cat([each.view(torch.uint8) if each.dtype.itemsize == 1 else each for each in given], along)
            _must(
                _equal(joined, q.parts[i]),
                "pieces",
                f"part {part.name} of halves along {dim} does not concatenate to the part of the full matrix",
            )


def check_transpose(quantizer: Quantizer, values: Tensor, q: QuantizedTensor) -> None:
    """Check that the transpose of a quantized tensor decodes to the transposed values, if the format is transposable."""
    if quantizer.format.transposable:
        same = torch.equal(q.transpose().dequantize(), q.dequantize().t())
        _must(same, "transpose", "the transpose has other values")


def check_linear(weight: QuantizedParameter, values: Tensor, x: Tensor, least: float) -> float:
    """Check y of a quantized linear against y of the original weight and against y of the decoded weight. Returns the SQNR of y
    against the original weight, in dB."""
    y, expected = F.linear(x, weight), x.double() @ values.double().t()
    ratio = sqnr(y, expected)
    _must(ratio >= least - 1, "linear", f"SQNR of y is {ratio:.1f} dB, below the floor of {least - 1:.1f}")
    decoded = sqnr(y, x.double() @ weight.dequantize(torch.float32).double().t())
    _must(decoded >= 45, "linear", f"y differs from y of the decoded weight: {decoded:.1f} dB")
    return ratio


def check_saved(weight: QuantizedParameter) -> QuantizedParameter:
    """Check torch.save, and torch.load with weights_only=True. The class of the format is allowed temporarily for this load.
    Returns the loaded weight."""
    file = io.BytesIO()
    torch.save({"weight": weight}, file)
    file.seek(0)
    # `safe_globals` removes the given classes at the end, so a class that was allowed before is not given
    known = torch.serialization.get_safe_globals()
    with torch.serialization.safe_globals([kind for kind in [type(weight.use.format)] if kind not in known]):
        read: QuantizedParameter = torch.load(file, weights_only=True)["weight"]
    same = read.use == weight.use and all(_equal(a, b) for a, b in zip(read.parts, weight.parts, strict=True))
    _must(same, "saving", "the loaded tensor differs from the saved tensor")
    return read


def check_compile(weight: QuantizedParameter, x: Tensor) -> None:
    """Check that a linear with this weight compiles to one graph, and that y and dx have the bits of the eager linear."""
    layer = nn.Linear(SIZE[1], SIZE[0], bias=False, device="meta")
    layer.weight = nn.Parameter(weight, requires_grad=False)
    dy = torch.ones(len(x), SIZE[0], dtype=x.dtype, device=x.device)

    def results(run: Any) -> tuple[Tensor, Tensor]:
        given = x.clone().requires_grad_()
        y = run(given)
        return y.detach(), torch.autograd.grad(y, given, dy)[0]

    torch.compiler.reset()
    try:
        found = results(torch.compile(layer, fullgraph=True, backend="aot_eager"))
    except Exception as error:
        raise AssertionError(
            f"check_format, compile: a linear with this weight cannot be compiled: {type(error).__name__}: {error}"
        ) from error
    finally:
        torch.compiler.reset()
    for name, compiled, eager in zip(("y", "dx"), found, results(layer), strict=True):
        _must(_equal(compiled, eager), "compile", f"{name} of a compiled linear differs")


def check_mesh(weight: QuantizedParameter, x: Tensor, mesh: DeviceMesh) -> None:
    """Check that shards along each dimension gather to the full matrix, and that FSDP2 does not change y."""
    axis = mesh if mesh.ndim == 1 else mesh[mesh.mesh_dim_names[0]]  # type: ignore[index]
    expected = weight.dequantize()
    for dim in (0, 1):
        piece = weight.chunk(axis.size(), dim)[axis.get_local_rank()]
        _must(isinstance(piece, QuantizedParameter), "DTensor", f"a shard along {dim} is not a quantized weight")
        whole = DTensor.from_local(piece, axis, [Shard(dim)], run_check=False).full_tensor()
        same = isinstance(whole, QuantizedParameter) and _equal(whole.dequantize(), expected)
        _must(same, "DTensor", f"shards along {dim} do not gather to the full matrix")
    model = nn.Sequential(nn.Linear(SIZE[1], SIZE[0], bias=False, device="meta"))
    model[0].weight = nn.Parameter(weight, requires_grad=False)
    y = model(x)
    fully_shard(model, mesh=axis)
    _must(_equal(model(x), y), "FSDP", "y of a sharded model differs")


__all__ = ["check_format", "sqnr"]
