"""Save and load the state of a quantized model as plain tensors: codes, scales and high-precision tensors, for any mesh.

The tensors have these names, where NAME is the name of a module, and in the last line the name of a parameter or buffer:

    NAME.weight.codes, NAME.weight.scale_inv, ...   the parts of a quantized weight, unsharded
    NAME.weight.format                              uint8 [bytes]: the name of the format as text, such as "int4[32]"; if the
                                                    codes are padded, with the shape of the weight: "int4[32] of 64 x 48"
    NAME.x_scale, NAME.y_scale                      multiplier of x or y in a static cast to per-tensor FP8
    NAME.x_amax, NAME.y_amax                        amax of x or y in another static cast; with zero points [2]: the largest
                                                    value, and minus the smallest value
    NAME                                            every other parameter and every other persistent buffer, unsharded

The tensors are plain torch tensors, which other programs can read without dlp.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
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
    """A quantized weight of a model.

    name         name of the parameter in the model
    q            the rowwise operand on this rank
    parameter    the parameter of this name; a DTensor parameter has the placements of the weight
    activation   quantizer of x; None: x stays in high precision
    y            quantizer of y; None: y stays in high precision
    """

    name: str
    q: QuantizedTensor
    parameter: Tensor
    activation: Quantizer | None
    y: Quantizer | None = None


def held_weights(model: nn.Module) -> Iterator[Held]:
    """Yield each quantized weight of a model, both in converted layers and in plain modules."""
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
    """Yield each static scale of x and y: its name in saved codes, and the tensors that casts read. For y of siblings
    these are several tensors with equal values."""
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
    """Return the placements of a part on the mesh of its parameter. Raises ValueError if shards cut scaling blocks, and
    for shards of unequal sizes."""
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
                f"{held.name}: shards of size {local[cut]} along dimension {cut} cut blocks of {held.q.format.name}, so "
                f"codes would differ from the codes of the unsharded weight: use a mesh whose shards hold complete "
                f"blocks"
            )
        along = part.moves_along(cut)
        if along is None:
            made.append(Replicate())
        elif along == cut:
            made.append(placement)  # reuses the placement, which may be strided (FSDP over tp)
        else:
            made.append(Shard(along))
    return made


@torch.no_grad()
def quantized_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """Return the state of a model with quantized weights as unsharded plain tensors, including codes and scales.

    The model was quantized by `dlp.freeze`, `dlp.quantize_` or `dlp.quantized_model_init`. All ranks call
    `quantized_state_dict`.

    Args:
        model: quantized model.

    Returns:
        Tensors by name.

    Raises:
        ValueError: if a shard cuts a scaling block of a format, and for shards of unequal sizes.

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
    """Return the text of `_format_of` as a tensor, uint8 [bytes]."""
    return torch.tensor(list(_format_of(held).encode()), dtype=torch.uint8, device=held.parameter.device)


def _format_of(held: Held) -> str:
    """Return the name of a weight's format; if the codes are padded, with the shape of the unsharded weight."""
    rows, columns = held.parameter.shape
    padded = tuple(local_values(held.parameter).shape) != held.q.shape
    return held.q.format.name + (f" of {rows} x {columns}" if padded else "")


def saved_buffers(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Return the persistent buffers of a model by name."""
    saved = set()
    for prefix, module in model.named_modules():
        kept = module._buffers.keys() - module._non_persistent_buffers_set
        saved |= {f"{prefix}.{name}" if prefix else name for name in kept}
    return [(name, buffer) for name, buffer in model.named_buffers() if name in saved]


def whole_part(held: Held, part: Part, tensor: Tensor) -> Tensor:
    """Return a copy of the full part of a weight; if the parameter is a DTensor, gather the shards of all ranks. tensor: this
    rank's shard of the part."""
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
    """Load the result of `dlp.quantized_state_dict` into a model that is quantized in the same way, on this or another mesh.

    Args:
        model: quantized model.
        state: tensors by name.

    Raises:
        ValueError: before anything is changed, for missing or unknown entries, for other formats, shapes or dtypes, for NaN or
            Inf in codes or scales, for static scales that are negative or only 0, and for a model on the meta device.

    Examples:
        >>> model = nn.Sequential(nn.Linear(64, 64))
        >>> model = dlp.quantize_(model, "int8")
        >>> dlp.load_quantized_state_dict(model, dlp.quantized_state_dict(model))
    """
    weights = {held.name: held for held in held_weights(model)}
    scales = dict(static_scales(model))
    places = _places(model, weights, scales)
    formats = {f"{name}.{FORMAT}": _format_of(held) for name, held in weights.items()}
    _check_entries(places, formats, state)
    found = {name: place.shard_of(state[name]) for name, place in places.items()}
    for name, place in places.items():
        saved, tensor = found[name], place.tensors[0]
        if (saved.shape, saved.dtype) != (tensor.shape, tensor.dtype):
            raise ValueError(
                f"{name} was saved as {saved.dtype} {tuple(saved.shape)}, and the shard of this rank is {tensor.dtype} "
                f"{tuple(tensor.shape)} in the model: quantize this model as the saved model was quantized"
            )
    _check_values(weights, scales, found, state)
    for name, place in places.items():
        for tensor in place.tensors:
            tensor.copy_(found[name])


class Place(NamedTuple):
    """Destination of an entry of the saved codes.

    tensors      tensors of this rank, all of which get the same values
    parameter    the DTensor on whose mesh the entry is sharded; None: every rank loads the full entry
    placements   placements of the entry on this mesh
    """

    tensors: Sequence[Tensor]
    parameter: DTensor | None = None
    placements: Sequence[Placement] = ()

    def shard_of(self, entry: Tensor) -> Tensor:
        """Return this rank's shard of a full entry."""
        if self.parameter is None:
            return entry
        mesh = self.parameter.device_mesh
        shard = distribute_tensor(entry.to(self.parameter.device), mesh, self.placements, src_data_rank=None)
        return shard.to_local().contiguous()


def _places(model: nn.Module, weights: Mapping[str, Held], scales: Mapping[str, list[Tensor]]) -> dict[str, Place]:
    """Return the place of each entry of the model's saved codes, except formats, by name."""
    places: dict[str, Place] = {}
    for name, held in weights.items():
        for part, tensor in zip(held.q.format.parts, held.q.parts, strict=True):
            place = Place([tensor])
            if isinstance(held.parameter, DTensor):
                place = Place([tensor], held.parameter, _placements(held, part))
            places[f"{name}.{part.name}"] = place
    places |= {name: Place(slots) for name, slots in scales.items()}
    for name, tensor in [*model.named_parameters(), *saved_buffers(model)]:
        if name in weights:
            continue
        if isinstance(tensor, DTensor):
            places[name] = Place([local_values(tensor)], tensor, tensor.placements)
        else:
            places[name] = Place([tensor])
    return places


def _check_entries(places: Mapping[str, Place], formats: Mapping[str, str], state: Mapping[str, Tensor]) -> None:
    """Raise ValueError for missing and unknown entries, for entries that are no tensors with memory, for weights in another
    format, and for a model on the meta device. `formats`: the format of each quantized weight, by the name of the entry."""
    if unstated := next((name for name in formats if name not in state and places.keys() <= state.keys()), None):
        raise ValueError(
            f"the saved codes lack {unstated!r}, as in files of older versions: codes of one width may belong to "
            f"several formats. If the format is {formats[unstated]}, add state[{unstated!r}] = "
            f"torch.tensor(list(b{formats[unstated]!r}), dtype=torch.uint8), for each weight"
        )
    if missing := sorted((places.keys() | formats.keys()) - state.keys()):
        raise ValueError(
            f"the saved codes lack {missing[0]!r} ({len(missing)} missing entries): quantize this model as the saved model was "
            f"quantized"
        )
    if unknown := sorted(state.keys() - places.keys() - formats.keys()):
        raise ValueError(
            f"the saved codes have {unknown[0]!r}, which the model lacks ({len(unknown)} unknown entries): quantize "
            f"this model as the saved model was quantized"
        )
    for name in (*places, *formats):
        kind = state[name].device if isinstance(state[name], Tensor) else type(state[name]).__name__
        if str(kind) == "meta" or not isinstance(state[name], Tensor):
            raise ValueError(
                f"{name} must be a tensor with memory, as in the result of dlp.quantized_state_dict; got {kind}"
            )
    for name, wanted in formats.items():
        if (saved := bytes(state[name].byte().tolist()).decode(errors="replace")) != wanted:
            raise ValueError(
                f"{name.removesuffix(f'.{FORMAT}')} was saved as codes of {saved}, and the model has codes of {wanted}: "
                f"quantize this model as the saved model was quantized"
            )
    if without := next((name for name, place in places.items() if place.tensors[0].is_meta), None):
        raise ValueError(
            f"{without} is on the meta device and has no memory to load into: call model.to_empty(device=...) first"
        )


def _check_values(
    weights: Mapping[str, Held], scales: Iterable[str], found: Mapping[str, Tensor], state: Mapping[str, Tensor]
) -> None:
    """Raise ValueError for parts and static scales with NaN or Inf, and for static scales that are negative or only 0. Each
    rank checks all scales, which are small, but only its shard of the codes."""
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
