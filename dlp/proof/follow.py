"""The follower: compare this rank's part of each tensor on a mesh with the trace of one rank, and replace this part by the
same part of the trace."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.modules.dropout import _DropoutNd

from dlp.kernels.ops import rounded
from dlp.parallel.casts import BOTH
from dlp.parallel.linear.quantize import flatten, quantize
from dlp.parallel.linear.state import cores
from dlp.parallel.model.checks import check_gathered
from dlp.parallel.weight.local import LocalWeight, local_values
from dlp.proof.bounds import Measured, Spread, is_weight, measure, rows_of, spread, variance
from dlp.proof.cases import MeshCase, Place, parameter_part
from dlp.proof.diagnose import Case, Cut, Guess, diagnose
from dlp.proof.record import Key, Recorder, Trace, is_activation_gradient
from dlp.proof.report import places
from dlp.quant.tensor import QuantizedTensor

KEPT = 64  # largest number of differing tensors of a rank that are diagnosed
WHOLE = Measured(float("inf"), float("inf"), False, [], [])


class Seen(NamedTuple):
    """Comparison of a tensor that differs on this rank.

    key        step, layer and tensor
    measured   size of the difference
    shape      (rows, columns) of this rank's part
    guess      likely kind of mistake; None: not diagnosed
    """

    key: Key
    measured: Measured
    shape: tuple[int, int]
    guess: Guess | None = None

    def where(self) -> str:
        """Describe the differing rows and columns."""
        rows, columns = (places(*each) for each in zip(self.measured[3:], self.shape, ("rows", "columns"), strict=True))
        return f"{rows}, {columns}"


def gain_of(model: nn.Module, case: MeshCase) -> int:
    """Return the factor by which activation gradients are larger on a mesh than on one rank: dp * cp, since FSDP averages
    gradients over these ranks; 1 for an invariant model, since FSDP sums its gradients."""
    return 1 if is_invariant(model) else case.dp * case.cp


def is_invariant(model: nn.Module) -> bool:
    """Whether `dlp.convert(..., invariant=True)` converted the model or a part of the model."""
    return any("dlp_invariant" in vars(module) for module in model.modules())


class Bounds:
    """Cache of the spreads of a trace: `bounds(key)` returns the spread of a tensor."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self._spreads: dict[Key, Spread] = {}

    def __call__(self, key: Key) -> Spread:
        if key not in self._spreads:
            self._spreads[key] = spread(self.trace, key)
        return self._spreads[key]


class Follower:
    """Comparison of a run on a mesh with a trace.

    gain       see `gain_of`
    place      coordinates of this rank
    exact      whether bits must be equal; else differences must be within the bounds
    recorder   hooks of the model
    micro      number of the running microbatch of this rank
    compared   number of comparisons; equal: number of these with equal bits
    worst      largest ratio of difference to bound, with the tensor
    failed     comparisons that exceed the bound or, if `exact`, find different bits; also tensors without counterpart in the
               trace, missing gradients, and failed checks of codes, scales and bytes
    remarks    lines for the report
    masks      (tensor, microbatch) -> whether tp shards the tensor, and a hash of the dropout mask
    """

    def __init__(self, model: nn.Module, bounds: Bounds, place: Place, exact: bool) -> None:
        self.gain = gain_of(model, place.case)
        self.trace, self._bounds, self.place, self.exact = bounds.trace, bounds, place, exact
        self.recorder = Recorder(model, self._take, self._again)
        self.micro = 0
        self._dtypes: dict[str, torch.dtype] = {}  # module -> dtype of the last y
        self.compared = self.equal = 0
        self.worst: tuple[float, Key | None] = (0.0, None)
        self.failed: list[Seen] = []
        self.remarks: list[str] = []
        self.masks: dict[tuple[Key, int], tuple[bool, str]] = {}
        self._random = {
            name for name, each in self.trace.modules.items() if isinstance(each, _DropoutNd) and each.p > 0
        }

    def _take(self, key: Key, tensor: Tensor) -> Tensor:
        """Compare a tensor of a module, and return this rank's part of the trace's tensor, times `gain` for dx and dy.

        For y and dx of dropout modules nothing is compared, but the mask of y is recorded. A tensor without counterpart in the
        trace is recorded in `failed` and returned unchanged."""
        if key.tensor == "y":
            self._dtypes[key.layer] = tensor.dtype
        place = self.place.at(self.micro)
        whole = self.trace.values.get(key)
        part = None if whole is None else place.part(whole, tensor.shape)
        if whole is None or part is None:
            said = "one rank has no such tensor" if whole is None else f"{tuple(tensor.shape)} of {tuple(whole.shape)}"
            self.failed.append(Seen(key, WHOLE, (1, 1), Guess("shape", said)))
            return tensor
        if key.layer in self._random and self.trace.modules[key.layer].training and key.tensor in ("y", "dx"):
            if key.tensor == "y":
                mask = (tensor == 0).cpu().contiguous().view(torch.uint8)
                digest = hashlib.sha256(mask.numpy().tobytes()).hexdigest()
                is_cut = tensor.numel() * place.case.pieces * place.case.cp < whole.numel()
                self.masks[key, self.micro] = is_cut, digest
        else:

            def cut(whole: Tensor, at: Place | None = None) -> Tensor | None:
                return (at or place).part(whole, tensor.shape)

            self._compare(key, tensor, cut, place)
        scaled = part * self.gain if is_activation_gradient(key) else part
        return scaled.to(tensor.dtype, copy=True)

    def _again(self, key: Key, tensor: Tensor) -> Tensor:
        """Return this rank's part of the trace's tensor, without comparison, in a forward that is recomputed in backward."""
        whole = self.trace.values.get(key)
        part = None if whole is None else self.place.at(self.micro).part(whole, tensor.shape)
        return tensor if part is None else part.to(tensor.dtype, copy=True)

    def add(self, key: Key, tensor: Tensor) -> Tensor:
        """Compare a tensor that must be equal on all ranks, such as the loss. Returns the tensor of this rank."""
        self._compare(key, tensor, _whole, self.place)
        return tensor

    def parameter(self, key: Key, tensor: Tensor, parameter: Tensor) -> Tensor:
        """Compare this rank's shard of a parameter or gradient, and return the shard of the trace's tensor."""

        def cut(whole: Tensor, at: Place | None = None) -> Tensor | None:
            part = parameter_part(whole, parameter, at)
            return part if part.shape == tensor.shape else None

        whole = self.trace.values.get(key)
        part = None if whole is None else cut(whole)
        if part is None:
            self.failed.append(Seen(key, WHOLE, (1, 1), Guess("shape", f"{tuple(tensor.shape)}")))
            return tensor
        self._compare(key, tensor, cut, self.place)
        return part.to(tensor.dtype)

    def begin(self, key: Key, value: Tensor) -> None:
        """Do nothing: the trace defines the order of tensors."""

    def gathered(self, layer: str, gemm: str, mine: QuantizedTensor, dim: int, group: ProcessGroup) -> None:
        """Check before a gather that scales which the gather does not send are equal on all ranks."""
        try:
            check_gathered(layer, gemm, mine, dim, group)
        except RuntimeError as error:
            key = Key(self.recorder.step, layer.removesuffix(" and siblings"), f"scales of {gemm}")
            self.failed.append(Seen(key, WHOLE, (1, 1), Guess("another scale", str(error))))

    def codes(self, model: nn.Module) -> None:
        """Check before a step that the codes from the step boundary equal a cast of the current weights, except for weights
        that FSDP shards."""
        for weight in (weight for core in cores(model) for weight in core.weights):
            if not isinstance(weight, LocalWeight) or not weight.parts or weight.bound.spec.recipe.w.keeps_source:
                continue
            dtype = weight.owner.dtype or weight.value.dtype
            now = quantize(weight.bound, "w", [rounded(weight.value, dtype)], BOTH, members=[weight.name], record=False)
            self.compared += 1
            pairs = zip(flatten(now), weight.parts, strict=True)
            if all(torch.equal(_bytes(new), _bytes(old)) for new, old in pairs):
                self.equal += 1
                continue
            key = Key(self.recorder.step, weight.name, "codes of w")
            self.failed.append(
                Seen(key, WHOLE, (1, 1), Guess("stale weight", "the codes are not a cast of the weight"))
            )

    def missing(self, key: Key) -> None:
        """Record that a parameter has no gradient on this mesh, although it has a gradient on one rank."""
        self.failed.append(Seen(key, WHOLE, (1, 1), Guess("zero", "the parameter has no gradient")))

    def _compare(self, key: Key, tensor: Tensor, cut: Cut, place: Place) -> None:
        whole = self.trace.values[key]
        expected = cut(whole)
        assert expected is not None
        if not tensor.numel():
            return
        factor = self.gain if is_activation_gradient(key) else 1
        given = expected * factor
        self.compared += 1
        if torch.equal(tensor, given.to(tensor.dtype)) and bool(tensor.isfinite().all()):
            self.equal += 1
            return
        dtypes = {tensor.dtype, whole.dtype, torch.float32}
        if not is_weight(key):  # a gradient may have been rounded to the dtype in which the layer computes
            dtypes.add(self._dtypes.get(key.layer, torch.float32))
        dtype = max((each for each in dtypes if each.is_floating_point), key=lambda each: torch.finfo(each).eps)
        deviations = cut(variance(whole, self._bounds(key), dtype))
        assert deviations is not None
        measured = measure(tensor, given, deviations * factor**2)
        self.worst = max(self.worst, (measured.ratio, key), key=lambda each: each[0])
        if measured.ratio <= 1 and not self.exact:
            return
        guess = None
        if len(self.failed) < KEPT:
            found, want = rows_of(tensor) / factor, rows_of(expected)
            guess = Guess("coarser rounding", "within the bound") if measured.ratio <= 1 else diagnose(
                Case(self.trace, key, place, found, want, cut)
            )  # fmt: skip
        self.failed.append(Seen(key, measured, tuple(rows_of(tensor).shape), guess))  # type: ignore[arg-type]


def _whole(whole: Tensor, at: Place | None = None) -> Tensor | None:
    """Return `whole`: the `Cut` of a tensor that is equal on all ranks."""
    return whole


def _bytes(part: Tensor) -> Tensor:
    return part.contiguous().reshape(-1).view(torch.uint8)


def gradients(
    model: nn.Module, run: Any, named: dict[tuple[str, str], nn.Parameter], name: Callable[[str], str]
) -> None:
    """Pass the gradients of parameters to a trace or follower, and write the returned gradients into `grad`.

    `name`: function from the name of a parameter in its module to the tensor name, such as "weight" -> "dw"."""
    for (layer, own), parameter in named.items():
        key = Key(run.recorder.step, layer, name(own))
        if parameter.grad is not None:
            grad = local_values(parameter.grad)
            grad.copy_(run.parameter(key, grad, parameter))
        elif isinstance(run, Follower) and key in run.trace.values:
            run.missing(key)
