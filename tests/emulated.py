"""Emulate a GPU on the CPU: replace the module of compiled kernels by Python functions that take addresses, like the
kernels.

With the fixture `emulated`, or inside `emulation()`, CPU tensors take the code paths of CUDA tensors: jobs, plans,
launches and captured launches. The functions compute the reference in plain torch on the memory at the addresses. GEMMs
sum in fp32 in the order of torch.

`tests/cuda_on_cpu` tests the kernels themselves, compiled for the CPU. The Python functions show two kinds of faults that
compiled kernels do not show: `launch_trace` records the memory that each launch reads and writes, so that `launch_order`
finds missing waits between streams and ranks, and a late side stream (`simulated_transport`) exposes memory that is reused
before it was read.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from dlp.comm import transport
from dlp.kernels import codes, cuda, cuda_producers, gemms, loader, ops, reference, table, wire
from dlp.kernels.reference import Fp8Scale
from dlp.runtime import capture as captured
from dlp.runtime import function
from tests import pointer_arguments
from tests.simulated_transport import STEPS

ALIGNMENT = 64  # bytes; alignment of memory that torch allocates on CPUs
CODES = (torch.float8_e4m3fn, torch.float8_e5m2)
TYPES = {number: dtype for dtype, number in gemms.TYPES.items()}
PIECE = 2**30
TYPE = (torch.bfloat16, torch.float32)


def at(address: int, shape: Sequence[int], dtype: torch.dtype, stride: Sequence[int] | None = None) -> Tensor:
    """Return the tensor at an address."""
    steps = stride or torch.empty(shape, device="meta").stride()
    count = 1 + sum((size - 1) * step for size, step in zip(shape, steps, strict=True))
    memory = (ctypes.c_char * (count * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype).as_strided(tuple(shape), tuple(steps))


def matrix(words: Sequence[int], wide: bool) -> Tensor:
    return at(words[0], words[1:3], torch.float32 if wide else torch.bfloat16, (words[3], 1))


def made(words: Sequence[int], wide: bool, source: Sequence[int]) -> Tensor:
    """Return the values that a cast quantizes, computed from the matrix and the packed arguments of a producer
    (csrc/kernels.h). If the producer has an address for sums, write the sums of the tiles there."""
    x, (producer, rstd, weight, fp32, up, stride, sums, act, slope, mean, bias) = matrix(words, wide), source
    if producer == cuda_producers.RMS_NORM:
        factors = at(rstd, (len(x), 1), torch.float32), at(weight, x.shape[1:], TYPE[fp32]).float()
        return (x.float() * factors[0] * factors[1]).to(x.dtype)
    if producer == cuda_producers.LAYER_NORM:
        centred = x.float() - at(mean, (len(x), 1), torch.float32)
        factor, shift = (at(each, x.shape[1:], TYPE[fp32]).float() for each in (weight, bias))
        return (centred * at(rstd, (len(x), 1), torch.float32) * factor + shift).to(x.dtype)
    if producer == cuda_producers.SWIGLU:
        return reference.swiglu(x, at(up, x.shape, x.dtype, (stride, 1)))
    if producer in (cuda_producers.ACTIVATION, cuda_producers.BESIDE):
        name = tuple(cuda_producers.ACTS)[act]
        beside = at(up, x.shape, x.dtype, (stride, 1)) if up else None
        made = reference.activation_backward if slope else reference.gated
        x = reference.activation(x, name) if beside is None else made(*((beside, x) if slope else (x, beside)), name)
    if sums:
        found = reference.tile_sums(x)
        at(sums, found.shape, torch.float32).copy_(found)
    return x


def scalar(address: int) -> Tensor | None:
    return at(address, (), torch.float32) if address else None


def of_jobs(kernel: Callable[..., None]) -> Callable[..., None]:
    """Wrap the kernel of one job: run the job in `words` or, if `many` is not 0, the `count` jobs in the table at
    address `many` (`cuda._table`)."""

    @wraps(kernel)
    def run(words: Sequence[int], many: int, count: int, items: int, *more: Any) -> None:
        jobs = at(many, (count, len(words)), torch.int64).tolist() if many else [words]
        for job in jobs:
            kernel(tuple(job), 0, 1, 1, *more)

    return run


class Plan:
    """A GEMM with the packed arguments of csrc/cublaslt.h."""

    candidates = 1

    def __init__(self, words: Sequence[int], device: int, workspace: int, wanted: int) -> None:
        self.words = words

    def choose(self, candidate: int) -> None: ...

    def run(self, *arguments: int) -> None:
        a, b, d, *rest = arguments
        for segment in range(max(self.words[20], 1)):
            (a_kind, b_kind, d_kind), rows, contraction = self.words[:3], self.words[4], self.words[6]
            along, beside = segment * contraction, segment * rows * self.words[9]
            self._one(
                a + along * TYPES[a_kind].itemsize,
                b + along * TYPES[b_kind].itemsize,
                d + beside * TYPES[d_kind].itemsize,
                *rest,
            )

    def _one(self, *arguments: int) -> None:
        a, b, d, a_scale, b_scale, bias, alpha, _, _, _ = arguments
        types, (rows, cols, contraction), strides = self.words[:4], self.words[4:7], self.words[7:10]
        left = self._operand(a, types[0], rows, contraction, strides[0], self.words[10], a_scale, self.words[12])
        right = self._operand(b, types[1], cols, contraction, strides[1], self.words[11], b_scale, self.words[13])
        out = at(d, (rows, cols), TYPES[types[2]], (strides[2], 1))
        made = left @ right.t()
        made = made * at(alpha, (), torch.float32) if alpha else made
        made = made + at(bias, (cols,), TYPES[types[3]]).float() if bias else made
        out.copy_(made + out.float() if self.words[14] else made)

    @staticmethod
    def _operand(
        address: int, kind: int, lines: int, along: int, stride: int, flipped: int, scale: int, mode: int
    ) -> Tensor:
        steps = (1, stride) if flipped else (stride, 1)
        values = at(address, (lines, along), TYPES[kind], steps).float()
        if mode == gemms.NONE:
            return values
        if mode == gemms.TENSOR:
            return values * at(scale, (), torch.float32)
        if mode == gemms.ROWWISE:
            return values * at(scale, (lines, 1), torch.float32)
        shape = cuda.block_scale_shape(lines, along, tile=mode == gemms.BLOCK_2D, gemm_layout=True)
        scales = at(scale, shape, torch.float32)
        lies = scales.repeat_interleave(128, 0)[:lines] if mode == gemms.BLOCK_2D else scales.t()[:lines]
        return values * lies.repeat_interleave(128, 1)[:, :along]


class Program:
    """Captured launches as in csrc/program.cpp. `run` updates each argument that csrc declares as an address, if the
    tensor at this address has moved since the recording."""

    def __init__(self, steps: Any, memory: Sequence[tuple[int, int, int, int]], bases: int) -> None:
        self.steps, self.memory, self.bases, self.runs = list(steps), list(memory), bases, 0

    def run(self, bases: Sequence[int], stream: int) -> None:
        assert len(bases) == self.bases
        self.runs += 1
        for name, arguments, lane in self.steps:
            run, *words = arguments if name == "gemm" else (getattr(Module, name), *arguments)
            kinds = (True,) * len(words) if name == "gemm" else pointer_arguments.addresses()[name]
            moved = [self._moved(word, kind, bases) for word, kind in zip(words, kinds, strict=True)]
            (run.run if name == "gemm" else run)(*moved, lane or stream)

    def _moved(self, value: Any, kind: pointer_arguments.Kind, bases: Sequence[int]) -> Any:
        if isinstance(kind, frozenset):
            return tuple(self._moved(each, i in kind, bases) for i, each in enumerate(value))
        if not kind or not value:
            return value
        for address, size, base, offset in self.memory:
            if address <= value < address + size:
                return value if base < 0 else bases[base] + value - address + offset
        raise ValueError(f"{value} was not declared")


class Module:
    """The functions of csrc/bindings.cpp that layers and fused ops with per-tensor and block FP8 call: casts, GEMMs, norms,
    activations and sums."""

    AMAX_CHUNK, TILE, NORM_PARTS = 16384, 128, 512
    GemmPlan, Program = Plan, Program

    @staticmethod
    @of_jobs
    def amax(words: Any, many: int, count: int, items: int, wide: bool, out: int, stream: int) -> None:
        at(words[5], (), torch.float32).copy_(reference.amax(matrix(words, wide)))

    @staticmethod
    def cast_tensor(words: Any, wide: bool, e5m2: bool, rule: Any, stream: int) -> None:
        Module.cast_transpose(words, 0, 1, 1, wide, e5m2, rule, False, cuda.MATRIX, stream)

    @staticmethod
    @of_jobs
    def cast_transpose(
        words: Any, many: int, count: int, items: int, wide: bool, e5m2: bool, rule: Any, observe: bool, producer: Any,
        stream: int,
    ) -> None:  # fmt: skip
        x, (row, col, amax, scale, staging, scale_inv, flag) = made(words, wide, producer), words[5:]
        reference.watched(x, scalar(flag))
        source = Fp8Scale(scalar(amax), scalar(scale), scalar(staging), power_of_two=rule[3], epsilon=rule[1])
        codes, inverse = reference.cast_fp8_tensor(x, CODES[e5m2], source)
        at(scale_inv, (), torch.float32).copy_(inverse)
        for address, values in ((row, codes), (col, codes.t())):
            if address:
                at(address, values.shape, CODES[e5m2]).copy_(values)

    @staticmethod
    def cast_block(
        tile: bool, words: Any, wide: bool, e5m2: bool, rule: Any, gemm_layout: bool, producer: Any = cuda.MATRIX
    ) -> None:
        x = reference.watched(made(words, wide, producer), scalar(words[9]))
        for source, (payload, scale) in ((x, words[5:7]), (x.t(), words[7:9])):
            if payload:
                options = {"power_of_two": rule[3], "epsilon": rule[1]}
                codes, compact = reference.cast_fp8_block(source, (128 if tile else 1, 128), CODES[e5m2], **options)
                at(payload, codes.shape, CODES[e5m2]).copy_(codes)
                laid = reference.block_2d_layout(compact) if tile else reference.block_1d_layout(compact)
                lies = laid if gemm_layout else compact
                at(scale, lies.shape, torch.float32).copy_(lies)

    @staticmethod
    @of_jobs
    def cast_block_1d(words: Any, many: int, count: int, items: int, *more: Any) -> None:
        Module.cast_block(False, words, *more[:-1])

    @staticmethod
    @of_jobs
    def cast_block_2d(words: Any, many: int, count: int, items: int, *more: Any) -> None:
        Module.cast_block(True, words, *more[:-1])

    @staticmethod
    def gemm_fp8_blocks(words: Any, e5m2: bool, wide: bool, stream: int) -> None:
        rows, cols, contraction, *strides = words[6:12]
        out, blocks = at(words[2], (rows, cols), TYPE[wide], (strides[2], 1)), -(-contraction // 128)
        a_scale = at(words[3], (blocks, words[12]), torch.float32, (words[13], 1)).t()[:rows]
        left = at(words[0], (rows, contraction), CODES[e5m2], (strides[0], 1)).float()
        left = left * a_scale.repeat_interleave(128, 1)[:, :contraction]
        b_scale = at(words[4], (words[14], blocks), torch.float32, (words[15], 1))
        right = at(words[1], (cols, contraction), CODES[0], (strides[1], 1)).float()
        right = right * b_scale.repeat_interleave(128, 0)[:cols].repeat_interleave(128, 1)[:, :contraction]
        made = left @ right.t()
        made = made + at(words[5], (cols,), out.dtype).float() if words[5] else made
        out.copy_(made + out if words[16] else made)

    @staticmethod
    def gemm_fp8_sum(job: Any, *rest: Any) -> None:
        (*terms, e5m2, wide, _), (out, count, rows, cols, stride) = rest, job
        pairs = [
            (
                at(a, (rows, along), CODES[e5m2], (a_step, 1)),
                at(b, (cols, along), CODES[0], (b_step, 1)),
                *map(scalar, scales),
            )
            for a, b, *scales, along, a_step, b_step in terms[:count]
        ]
        at(out, (rows, cols), TYPE[wide], (stride, 1)).copy_(reference.gemm_fp8_tensor_sum(pairs))

    @staticmethod
    def rms_norm(words: Any, eps: float, wide: bool, stream: int) -> None:
        x, (weight, fp32, rstd, y, amax, more, stride, total) = matrix(words, wide), words[5:]
        if more:
            x = at(total, x.shape, x.dtype).copy_(x + at(more, x.shape, x.dtype, (stride, 1)))
        value, found = reference.rms_norm(x, at(weight, x.shape[1:], TYPE[fp32]), eps)
        at(rstd, found.shape, torch.float32).copy_(found)
        Module._written(value, y, amax)

    @staticmethod
    def rms_norm_backward(words: Any, wide: bool, stream: int) -> None:
        x, (weight, fp32, rstd, dy, stride, dx, parts, add, add_stride) = matrix(words, wide), words[5:]
        given = at(dy, x.shape, x.dtype, (stride, 1)), x, at(weight, x.shape[1:], TYPE[fp32])
        more = at(add, x.shape, x.dtype, (add_stride, 1)) if add else None
        dvalue, dweight = reference.rms_norm_backward(*given, at(rstd, (len(x),), torch.float32), more)
        at(dx, x.shape, x.dtype).copy_(dvalue)
        sums = at(parts, (min(len(x), Module.NORM_PARTS), x.shape[1]), torch.float32)
        sums.zero_()[0] = dweight

    @staticmethod
    def layer_norm(words: Any, eps: float, wide: bool, stream: int) -> None:
        x, (weight, bias, fp32, mean, rstd, y, amax) = matrix(words, wide), words[5:]
        vectors = [at(each, x.shape[1:], TYPE[fp32]) for each in (weight, bias)]
        value, *found = reference.layer_norm(x, *vectors, eps)
        Module._written(value, y, amax)
        for to, its in zip((mean, rstd), found, strict=True):
            at(to, its.shape, torch.float32).copy_(its)

    @staticmethod
    def layer_norm_backward(words: Any, wide: bool, stream: int) -> None:
        x, (weight, fp32, mean, rstd, dy, stride, dx, *parts) = matrix(words, wide), words[5:]
        rows = [at(each, (len(x),), torch.float32) for each in (mean, rstd)]
        dvalue, *found = reference.layer_norm_backward(
            at(dy, x.shape, x.dtype, (stride, 1)), x, at(weight, x.shape[1:], TYPE[fp32]), *rows
        )
        at(dx, x.shape, x.dtype).copy_(dvalue)
        for to, its in zip(parts, found, strict=True):
            at(to, (min(len(x), Module.NORM_PARTS), x.shape[1]), torch.float32).zero_()[0] = its

    @staticmethod
    def activation(words: Any, act: int, wide: bool, stream: int) -> None:
        x, (dy, stride, out, amax) = matrix(words, wide), words[5:]
        name = tuple(cuda_producers.ACTS)[act]
        grad = at(dy, x.shape, x.dtype, (stride, 1)) if dy else None
        made = reference.activation(x, name) if grad is None else reference.activation_backward(grad, x, name)
        Module._written(made, out, amax)

    @staticmethod
    def gate(words: Any, act: int, wide: bool, stream: int) -> None:
        gate, (up, stride, h, amax) = matrix(words, wide), words[5:]
        name = tuple(cuda_producers.ACTS)[act]
        Module._written(reference.gated(gate, at(up, gate.shape, gate.dtype, (stride, 1)), name), h, amax)

    @staticmethod
    def gate_backward(words: Any, act: int, wide: bool, stream: int) -> None:
        gate, (up, up_stride, dh, dh_stride, dgate, dup, _) = matrix(words, wide), words[5:]
        name = tuple(cuda_producers.ACTS)[act]
        given = (at(each, gate.shape, gate.dtype, (stride, 1)) for each, stride in ((dh, dh_stride), (up, up_stride)))
        grad, other = given
        for to, value in zip((dgate, dup), reference.gated_backward(grad, gate, other, name), strict=True):
            at(to, gate.shape, gate.dtype).copy_(value)

    @staticmethod
    def swiglu(words: Any, wide: bool, stream: int) -> None:
        gate, (up, stride, h, amax) = matrix(words, wide), words[5:]
        Module._written(reference.swiglu(gate, at(up, gate.shape, gate.dtype, (stride, 1))), h, amax)

    @staticmethod
    def swiglu_backward(words: Any, wide: bool, stream: int) -> None:
        *_, dgate, dup, amax = words
        for i, (to, grad) in enumerate(zip((dgate, dup), Module._gradients(words, wide), strict=True)):
            Module._written(grad, to, amax and amax + 4 * i)

    @staticmethod
    def _gradients(words: Any, wide: bool) -> tuple[Tensor, Tensor]:
        gate, (up, up_stride, dh, dh_stride) = matrix(words, wide), words[5:9]
        grad, other = (
            at(each, gate.shape, gate.dtype, (stride, 1)) for each, stride in ((dh, dh_stride), (up, up_stride))
        )
        return reference.swiglu_backward(grad, gate, other)

    @staticmethod
    def _of_gradients(words: Any, *jobs: Any) -> Iterator[tuple[int, ...]]:
        """Yield the packed arguments of each job, with the computed gradient as the input matrix."""
        for job, x in zip(jobs, Module._gradients(words, False), strict=True):
            yield (x.data_ptr(), *x.shape, x.stride(0), *job[4:])

    @staticmethod
    def cast_gate_grads_tensor(
        words: Any, of_gate: Any, of_up: Any, e5m2: bool, rule: Any, observe: bool, stream: int
    ) -> None:
        for given in Module._of_gradients(words, of_gate, of_up):
            Module.cast_transpose(given, 0, 1, 1, False, e5m2, rule, observe, cuda.MATRIX, stream)

    @staticmethod
    def cast_gate_grads_block(
        words: Any, of_gate: Any, of_up: Any, e5m2: bool, rule: Any, gemm_layout: bool, stream: int
    ) -> None:
        for given in Module._of_gradients(words, of_gate, of_up):
            Module.cast_block_1d(given, 0, 1, 1, False, e5m2, rule, gemm_layout, cuda.MATRIX, stream)

    @staticmethod
    def _written(value: Tensor, out: int, amax: int) -> None:
        if out:
            at(out, value.shape, value.dtype).copy_(value)
        if amax:
            at(amax, (), torch.float32).copy_(reference.amax(value))

    @staticmethod
    def tile_sums(words: Any, items: int, sums: int, wide: bool, stream: int) -> None:
        found = reference.tile_sums(matrix(words, wide))
        at(sums, found.shape, torch.float32).copy_(found)

    @staticmethod
    def sum_parts(parts: int, count: int, cols: int, out: int, stream: int) -> None:
        at(out, (cols,), torch.float32).copy_(reference.sum_parts(at(parts, (count, cols), torch.float32)))

    @staticmethod
    def transpose_bytes(words: Any, tiles: int, stream: int) -> None:
        given = at(words[0], words[1:3], torch.uint8)
        at(words[5], given.shape[::-1], torch.uint8).copy_(given.t())

    @staticmethod
    def pack_fp8_wire(words: Any, least: float, wide: bool, stream: int) -> None:
        given, rows, cols, codes, scale = words
        made = wire.reference.pack_fp8(at(given, (rows, cols), TYPE[wide]))
        at(codes, (rows, cols), CODES[0]).copy_(made[0])
        at(scale, made[1].shape, torch.float32).copy_(made[1])

    @staticmethod
    def sum_fp8_wire(words: Any, wide: bool, stream: int) -> None:
        codes, apart, scale, scales_apart, out, ranks, rows, cols, own_codes, own_scale, own = words
        blocks = -(-cols // wire.BLOCK)
        given = at(codes, (ranks, rows, cols), CODES[0], (apart, cols, 1))
        scales = at(scale, (ranks, rows, blocks), torch.float32, (scales_apart, blocks, 1))
        mine = own, at(own_codes, (rows, cols), CODES[0]), at(own_scale, (rows, blocks), torch.float32)
        at(out, (rows, cols), TYPE[wide]).copy_(wire.reference.sum_fp8(given, scales, TYPE[wide], mine))

    @staticmethod
    def transpose_words(given: int, out: int, rows: int, cols: int, stream: int) -> None:
        at(out, (cols, rows), torch.float32).copy_(at(given, (rows, cols), torch.float32).t())

    @staticmethod
    def sum_in_order(
        given: int, own: int, index: int, out: int, contributions: int, count: int, wide: bool, wide_sum: bool, divisor: int,
        stream: int,
    ) -> None:  # fmt: skip
        each, mine = at(given, (contributions, count), TYPE[wide]), (index, at(own, (count,), TYPE[wide]))
        at(out, (count,), TYPE[wide_sum]).copy_(reference.sum_in_order(each, TYPE[wide_sum], mine, divisor))

    @staticmethod
    def sum_by_tree(given: int, out: int, parts: int, count: int, wide: bool, stream: int) -> None:
        at(out, (count,), TYPE[wide]).copy_(reference.sum_by_tree(at(given, (parts, count), torch.float32), TYPE[wide]))

    @staticmethod
    def round_to_bf16(words: Any, stream: int) -> None:
        at(words[1], (words[2],), torch.bfloat16).copy_(at(words[0], (words[2],), torch.float32))


class OnGpu(TorchFunctionMode):
    """Context in which `is_cuda` is True for CPU tensors, `cuda()` returns the tensor itself, and functions with the argument
    device="cuda" return CPU tensors."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func == torch.Tensor.is_cuda.__get__:
            return True
        if func == torch.Tensor.cuda:
            return args[0]
        given = kwargs or {}
        return func(*args, **(given | {"device": "cpu"} if given.get("device") == "cuda" else given))


@pytest.fixture
def emulated() -> Iterator[None]:
    with emulation():
        yield


@contextmanager
def recorded() -> Iterator[list[tuple[str, tuple[Any, ...]]]]:
    """Record, inside `emulation()`, the names and arguments of launched kernels. GEMMs of cuBLASLt, `set_zero` and kernels
    that another kernel calls are not recorded."""
    found, inside = list[tuple[str, tuple[Any, ...]]](), list[str]()

    def run(name: str, kernel: Callable[..., Any], *arguments: Any) -> Any:
        if not inside and name != "set_zero":
            found.append((name, arguments))
        inside.append(name)  # a kernel of the emulation can call another kernel
        try:
            return kernel(*arguments)
        finally:
            inside.pop()

    kernels = [name for name, value in vars(Module).items() if isinstance(value, staticmethod) and name[0] != "_"]
    with ExitStack() as patches:
        for name in kernels:
            replaced = staticmethod(partial(run, name, getattr(Module, name)))
            patches.enter_context(patch.object(Module, name, replaced))
        yield found


@contextmanager
def emulation(module: Any = Module, *, kind: str = "sm_90", batches: bool = False) -> Iterator[None]:
    """Context in which CPU tensors take the code paths of CUDA tensors, on one device with one stream, and in which
    `module` replaces the module of compiled kernels.

    Args:
        kind: the architecture of the device. On "sm_100", scales are compact, like the scales of the references.
        batches: whether the device can cast many matrices in one launch.
    """
    space = torch.empty(ALIGNMENT, dtype=torch.uint8)
    patches: list[tuple[Any, str, Any]] = [
        (torch._C, "_cuda_getDevice", lambda: -1), (torch._C, "_cuda_getCurrentRawStream", lambda device: 0),
        (loader, "load", lambda: module), (loader, "missing", lambda: ""),
        (codes, "ON_DEVICE", ()), *([] if batches else [(ops, "has_batches", lambda x: False)]),
        (gemms, "_module", lambda: Module),
        (gemms, "choices", lambda device: {}), (gemms, "_PLANS", {}), (gemms, "WORKSPACE", ALIGNMENT),
        (gemms, "workspace", lambda device, stream: space.data_ptr()), (captured, "runs_kernels", lambda x: True),
        (transport, "_OF_GROUP", {}),
        (captured, "ALIGNMENT", ALIGNMENT), (function, "ALIGNMENT", ALIGNMENT),
    ]  # fmt: skip
    from tests.emulated_casts import CASTS  # imported here because emulated_casts imports this module

    for name, step in {**STEPS, **CASTS}.items():
        patches.append((Module, name, step))
    with pytest.MonkeyPatch.context() as monkeypatch:
        for where, name, value in patches:
            monkeypatch.setattr(where, name, value, raising=False)
        monkeypatch.setitem(table.DEVICE_AT, -1, kind)
        yield
