"""Codes as plain tensors: save and load the state of a quantized model, on any mesh.

    NAME.weight.codes, NAME.weight.scale_inv, ...   the parts of a quantized weight, unsharded
    NAME.weight.format                              uint8 [bytes]: the name of the format, such as "int4[32]", with the shape
                                                    of the weight if the codes are padded: "int4[32] of 64 x 48"
    NAME.x_scale, NAME.y_scale                      multiplier of x or y, for a static cast to per-tensor FP8
    NAME.x_amax, NAME.y_amax                        amax of x or y, for other static casts; with zero points the largest value
                                                    and minus the smallest value
    NAME                                            every other parameter and buffer, unsharded

The tensors can be read without dlp and without high-precision values.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from dlp.flows.frozen import scale_name, static_slots
from dlp.parallel.linear.modules import ParallelLinear
from dlp.parallel.weight.held import HeldWeight
from dlp.parallel.weight.local import local_values, shards_of
from dlp.quant.parameter import QuantizedParameter
from dlp.quant.quantizer import Quantizer
from dlp.quant.tensor import Part, QuantizedTensor

FORMAT = "format"


class Held(NamedTuple):
    """A quantized weight by name: parts on this rank, the parameter with the placement of the parts, and the quantizers of x
    and y (None: the tensor stays in high precision)."""

    name: str
    q: QuantizedTensor
    parameter: Tensor
    activation: Quantizer | None
    y: Quantizer | None = None


def held_weights(model: nn.Module) -> Iterator[Held]:
    for name, module in model.named_modules():
        if isinstance(module, ParallelLinear):
            for weight in module.core.weights:
                if isinstance(weight, HeldWeight) and weight.member.module is module:
                    recipe, x = weight.recipe, weight.recipe.x.rowwise
                    q, activation = recipe.w.rowwise.format.wrap(weight.parts), None if x.format.keeps_source else x
                    yield Held(f"{name}.{weight.member.weight}", q, weight.parameter, activation, recipe.y)
            continue
        for key, parameter in module.named_parameters(recurse=False):
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            if isinstance(local, QuantizedParameter):
                yield Held(f"{name}.{key}" if name else key, local.quantized, parameter, local.use.activation)


def static_scales(model: nn.Module) -> Iterator[tuple[str, list[Tensor]]]:
    """Yield the static scales of x and y by name: the tensors that casts read, which are equal."""
    for name, module in model.named_modules():
        if isinstance(module, ParallelLinear):
            if isinstance(next(iter(module.core.weights)), HeldWeight):
                yield from ((f"{name}.{key}", slots) for key, slots in static_slots(module).items())
            continue
        weight = getattr(module, "weight", None)
        local = weight.to_local() if isinstance(weight, DTensor) else weight
        if isinstance(local, QuantizedParameter) and local.x_scale is not None:
            assert local.use.activation is not None
            key = scale_name("x", local.use.activation)
            yield (f"{name}.{key}" if name else key), [local.x_scale]


def _placements(held: Held, part: Part) -> list[Placement]:
    """The placements of a part on the mesh of its parameter. Raises ValueError for a block that spans two ranks, and
    for unequal shards."""
    assert isinstance(held.parameter, DTensor)
    made: list[Placement] = []
    shards = shards_of(held.parameter)
    for placement in held.parameter.placements:
        if placement.is_replicate():
            made.append(Replicate())
            continue
        cut, local = int(placement.dim), local_values(held.parameter).shape  # type: ignore[attr-defined]
        if held.parameter.shape[cut] % shards[cut]:
            raise ValueError(
                f"{held.name}: {held.parameter.shape[cut]} along dimension {cut} cannot be divided evenly into "
                f"{shards[cut]} shards: save on a mesh whose size divides this dimension"
            )
        if held.q.shape[cut] != local[cut] or not held.q.format.concatenates(cut, local[cut]):
            raise ValueError(
                f"{held.name}: shards of {local[cut]} along dimension {cut} cut blocks of {held.q.format.name}, so "
                f"that codes differ from the codes of the unsharded weight: use a mesh whose shards hold complete "
                f"blocks"
            )
        along = part.moves_along(cut)
        if along is None:
            made.append(Replicate())
        elif along == cut:
            made.append(placement)  # handles FSDP over tp, too, whose shards are strided
        else:
            made.append(Shard(along))
    return made


@torch.no_grad()
def quantized_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """Return the state of a model with quantized weights as complete plain tensors, codes and scales included.

    For models of `dlp.freeze`, `dlp.quantize_` and `dlp.quantized_model_init`. All ranks call `quantized_state_dict`.

    Args:
        model: quantized model.

    Returns:
        Tensors by name.

    Raises:
        ValueError: when tp shards a block of a format.

    Examples:
        >>> model = dlp.quantize_(nn.Sequential(nn.Linear(64, 64)), "int8")
        >>> len(dlp.quantized_state_dict(model)) > 1
        True
    """
    found: dict[str, Tensor] = {}
    weights = {held.name: held for held in held_weights(model)}
    for name, held in weights.items():
        for part, tensor in zip(held.q.format.parts, held.q.parts, strict=True):
            found[f"{name}.{part.name}"] = whole_part(held, part, tensor)
        found[f"{name}.{FORMAT}"] = _bytes_of(held)
    found |= {name: slots[0].clone() for name, slots in static_scales(model)}
    others = [*model.named_parameters(), *saved_buffers(model)]
    for name, tensor in others:
        if name not in weights:
            found[name] = (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()
    return found


def _bytes_of(held: Held) -> Tensor:
    """uint8 [bytes]: `_format_of` a weight."""
    return torch.tensor(list(_format_of(held).encode()), dtype=torch.uint8, device=held.parameter.device)


def _format_of(held: Held) -> str:
    """The name of a weight's format, with the shape of the unsharded weight if the codes are padded."""
    rows, columns = held.parameter.shape
    padded = tuple(local_values(held.parameter).shape) != held.q.shape
    return held.q.format.name + (f" of {rows} x {columns}" if padded else "")


def saved_buffers(model: nn.Module) -> list[tuple[str, Tensor]]:
    """The persistent buffers of a model."""
    saved = set()
    for prefix, module in model.named_modules():
        kept = module._buffers.keys() - module._non_persistent_buffers_set
        saved |= {f"{prefix}.{name}" if prefix else name for name in kept}
    return [(name, buffer) for name, buffer in model.named_buffers() if name in saved]


def whole_part(held: Held, part: Part, tensor: Tensor) -> Tensor:
    if not isinstance(held.parameter, DTensor):
        return tensor.detach().clone()
    placements = _placements(held, part)
    sent = tensor.detach().contiguous()
    if tensor.dtype.itemsize == 1:
        sent = sent.view(torch.uint8)
    cut = {int(each.dim) for each in held.parameter.placements if not each.is_replicate()}  # type: ignore[attr-defined]
    rows, columns = (held.parameter.shape[dim] if dim in cut else held.q.shape[dim] for dim in (0, 1))
    shapes = dict(zip(held.q.format.parts, held.q.format.part_shapes((rows, columns)), strict=True))
    meta = torch.empty(shapes[part], device="meta")
    whole = DTensor.from_local(
        sent, held.parameter.device_mesh, placements, run_check=False, shape=meta.shape, stride=meta.stride()
    ).full_tensor()
    return whole.view(tensor.dtype).clone()


@torch.no_grad()
def load_quantized_state_dict(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Load the result of `dlp.quantized_state_dict` into a model that is quantized alike, on this or another mesh.

    Args:
        model: quantized model.
        state: tensors by name.

    Raises:
        ValueError: before anything is changed, for missing or unknown entries, for other formats, shapes or dtypes, and for
            a model on the meta device.

    Examples:
        >>> model = nn.Sequential(nn.Linear(64, 64))
        >>> model = dlp.quantize_(model, "int8")
        >>> dlp.load_quantized_state_dict(model, dlp.quantized_state_dict(model))
    """
    into: dict[str, tuple[Tensor, Tensor | None, list[Placement]]] = {}
    weights = {held.name: held for held in held_weights(model)}
    for name, held in weights.items():
        spread = held.parameter if isinstance(held.parameter, DTensor) else None
        for part, tensor in zip(held.q.format.parts, held.q.parts, strict=True):
            into[f"{name}.{part.name}"] = tensor, spread, _placements(held, part) if spread is not None else []
    scales = dict(static_scales(model))
    into |= {name: (slots[0], None, []) for name, slots in scales.items()}
    for name, tensor in [*model.named_parameters(), *saved_buffers(model)]:
        if name not in weights:
            spread = tensor if isinstance(tensor, DTensor) else None
            into[name] = local_values(tensor), spread, list(tensor.placements) if isinstance(tensor, DTensor) else []
    formats = {f"{name}.{FORMAT}": _format_of(held) for name, held in weights.items()}
    if unstated := next((name for name in formats if name not in state and into.keys() <= state.keys()), None):
        raise ValueError(
            f"the saved codes lack {unstated!r}, as in files of older versions: codes of one width may belong to "
            f"several formats. If the format is {formats[unstated]}, add state[{unstated!r}] = "
            f"torch.tensor(list(b{formats[unstated]!r}), dtype=torch.uint8), for each weight"
        )
    if missing := sorted((into.keys() | formats.keys()) - state.keys()):
        raise ValueError(
            f"the saved codes lack {missing[0]!r} ({len(missing)} in all): quantize the model as it was saved"
        )
    if unknown := sorted(state.keys() - into.keys() - formats.keys()):
        raise ValueError(f"the saved codes have {unknown[0]!r}, which the model lacks ({len(unknown)} in all)")
    for name in (*into, *formats):
        kind = state[name].device if isinstance(state[name], Tensor) else type(state[name]).__name__
        if str(kind) == "meta" or not isinstance(state[name], Tensor):
            raise ValueError(
                f"{name} must be a tensor with memory, as in the result of dlp.quantized_state_dict; got {kind}"
            )
    for name, wanted in formats.items():
        if (saved := bytes(state[name].byte().tolist()).decode(errors="replace")) != wanted:
            raise ValueError(
                f"{name.removesuffix(f'.{FORMAT}')} was saved as codes of {saved}, and the model has codes of {wanted}: "
                f"quantize the model as it was saved"
            )
    if without := next((name for name, (tensor, _, _) in into.items() if tensor.is_meta), None):
        raise ValueError(
            f"{without} is on the meta device and has no memory to load into: call model.to_empty(device=...) first"
        )
    found = {name: _cut(state[name], spread, placements) for name, (_, spread, placements) in into.items()}
    for name, (tensor, _, _) in into.items():
        if (found[name].shape, found[name].dtype) != (tensor.shape, tensor.dtype):
            raise ValueError(
                f"{name} was saved as {found[name].dtype} {tuple(found[name].shape)}, and the shard of this rank is "
                f"{tensor.dtype} {tuple(tensor.shape)} in the model: quantize the model as it was saved"
            )
    _check_values(weights, scales, found, state)
    for name, (tensor, _, _) in into.items():
        tensor.copy_(found[name])
    for name, slots in scales.items():
        for slot in slots:
            slot.copy_(found[name])


def _check_values(
    weights: Mapping[str, Held], scales: Iterable[str], found: Mapping[str, Tensor], state: Mapping[str, Tensor]
) -> None:
    """Raise ValueError for parts and static scales with NaN or Inf, which `quantized_state_dict` never writes. Each rank
    checks the scales of all ranks, which are small, and its own codes."""
    for name, held in weights.items():
        for part in (f"{name}.{each.name}" for each in held.q.format.parts):
            looked_at = found[part] if part.endswith(".codes") else state[part]
            if not _finite(looked_at.view(torch.float8_e8m0fnu) if part.endswith("e8m0") else looked_at):
                raise ValueError(
                    f"{part} has NaN or Inf, which would spread to every y: save the codes again, or load another file"
                )
    for name in scales:
        if not (_finite(state[name]) and bool((state[name] >= 0).all()) and bool(state[name].any())):
            raise ValueError(
                f"{name} must be finite and positive, got {state[name].flatten()[:4].tolist()}: calibrate again"
            )


def _finite(part: Tensor) -> bool:
    return bool(part.float().isfinite().all()) if part.is_floating_point() else True


def _cut(whole: Tensor, spread: Tensor | None, placements: list[Placement]) -> Tensor:
    """This rank's shard of a full tensor."""
    if spread is None:
        return whole
    assert isinstance(spread, DTensor)
    cut = distribute_tensor(whole.to(spread.device), spread.device_mesh, placements, src_data_rank=None)
    return cut.to_local().contiguous()
