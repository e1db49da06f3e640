"""Convert state dicts between dlp.ops and Transformer Engine (TE).

    model.load_state_dict(from_te(model, state))     `state` was saved by a module of TE
    te_module.load_state_dict(to_te(model))

The method `te_names` of a module maps names of TE's tensors to names of the module's parameters. In TE, siblings such as gate
and up are one tensor, concatenated along the first dimension.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor


class Joined(NamedTuple):
    """Names of the parameters that form one tensor of TE.

    parts   names of the parameters, in order
    head    0: the tensor is their concatenation. Else number of rows of a head: q, k and v are interleaved by groups of heads
    """

    parts: tuple[str, ...]
    head: int = 0


TeNames = dict[str, Joined]  # key: name in TE


def names_of(module: nn.Module, path: str, te: str) -> TeNames:
    """Return `TeNames` of the norm or linear at `path` ("": the module itself); siblings form one tensor of TE.

    te: prefix of the names in TE.
    """
    names: dict[str, list[str]] = {}
    for name, _ in module.get_submodule(path).named_parameters():
        names.setdefault(te + name.partition("_")[0], []).append(f"{path}.{name}".lstrip("."))
    return {name: Joined(tuple(parts)) for name, parts in names.items()}


def from_te(model: nn.Module, state: Mapping[str, Tensor], *, qkv_weight_interleaved: bool = True) -> dict[str, Tensor]:
    """Convert a state dict with Transformer Engine's names to a state dict for a model of dlp.ops.

    If tp shards a parameter, its tensor in `state` may be the full tensor or the shard of this rank, which Transformer Engine
    saves on each rank. Recipe states of Transformer Engine (`_extra_state`) are removed; tensors of other modules are kept.

    Args:
        model: model that is, or contains, modules with names of Transformer Engine.
        state: tensors by Transformer Engine's names. q, k and v may be one tensor or three.
        qkv_weight_interleaved: whether q, k and v in one tensor are interleaved by groups of heads, as the option of this name
            in Transformer Engine; False: they are concatenated.

    Returns:
        State dict for `model.load_state_dict`.

    Raises:
        ValueError: for a tensor whose shape is neither that of the full parameter nor that of the shard of this rank.

    Examples:
        >>> model = ops.LayerNormLinear(64, 128)
        >>> result = model.load_state_dict(ops.from_te(model, ops.to_te(model)))
    """
    found, own = dict(state), dict(model.named_parameters())
    for prefix, module in _named(model):
        for fused in (False, True):
            for name, joined in module.te_names(fused).items():  # type: ignore[operator]
                tensor = found.pop(prefix + name, None)
                if tensor is not None:
                    names = [prefix + part for part in joined.parts]
                    head = joined.head if qkv_weight_interleaved else 0
                    parts = _split(prefix + name, tensor, [own[part] for part in names], head)
                    found.update(zip(names, parts, strict=True))
    ours = tuple([f"{path}." if path else "" for path, module in model.named_modules() if _has_te_state(module)])
    return {name: t for name, t in found.items() if not (name.startswith(ours) and name.endswith("_extra_state"))}


def to_te(model: nn.Module, *, fuse_qkv_params: bool = False, qkv_weight_interleaved: bool = True) -> dict[str, Tensor]:
    """Return the state dict of a model of dlp.ops with Transformer Engine's names.

    If tp shards a parameter, the tensor is the shard of this rank, which each rank of Transformer Engine loads.

    Args:
        model: model that is, or contains, modules with names of Transformer Engine.
        fuse_qkv_params: join q, k and v into one tensor.
        qkv_weight_interleaved: whether to interleave q, k and v in the joined tensor by groups of heads, as the option of this
            name in Transformer Engine.

    Returns:
        Tensors by name.

    Examples:
        >>> sorted(ops.to_te(ops.LayerNormLinear(64, 128)))
        ['bias', 'layer_norm_bias', 'layer_norm_weight', 'weight']
    """
    found = {name: t.to_local() if isinstance(t, DTensor) else t for name, t in model.state_dict().items()}
    for prefix, module in _named(model):
        for name, joined in module.te_names(fuse_qkv_params).items():  # type: ignore[operator]
            if prefix + joined.parts[0] in found:  # otherwise `te_names` of an outer module has renamed the tensor
                parts = [found.pop(prefix + part) for part in joined.parts]
                found[prefix + name] = _join(parts, joined.head if qkv_weight_interleaved else 0)
    return found


def _has_te_state(module: nn.Module) -> bool:
    """Whether the module of TE that corresponds to this module saves an `_extra_state`."""
    return hasattr(module, "te_names") or hasattr(module, "basic_ops")


def _named(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield each module with `te_names`, with the prefix of its names in the state dict of `model`."""
    for path, module in model.named_modules():
        if hasattr(module, "te_names"):
            yield f"{path}." if path else "", module


def _split(name: str, tensor: Tensor, own: Sequence[Tensor], head: int) -> list[Tensor]:
    """Split a tensor of TE, full or this rank's shard, into values for the parameters `own`; head: see `Joined`. Raises
    ValueError for a tensor of another shape."""
    local = [each.to_local() if isinstance(each, DTensor) else each for each in own]
    shapes = {False: [each.shape for each in own], True: [each.shape for each in local]}  # by is_local
    fits = {is_local: (sum(shape[0] for shape in its), *its[0][1:]) for is_local, its in shapes.items()}
    is_local = next((is_local for is_local, shape in fits.items() if shape == tuple(tensor.shape)), None)
    if is_local is None:
        raise ValueError(
            f"{name} has shape {tuple(tensor.shape)}; expected {fits[False]}, or {fits[True]} for the shard of this rank"
        )
    rows = [shape[0] for shape in shapes[is_local]]
    if head:
        groups = min(rows) // head
        shared = tensor.reshape(groups, -1, *tensor.shape[1:])
        parts = [each.reshape(-1, *tensor.shape[1:]) for each in shared.split([count // groups for count in rows], 1)]
    else:
        parts = list(tensor.split(rows))
    return [_distributed(each, like, is_local) for each, like in zip(parts, own, strict=True)]


def _distributed(values: Tensor, like: Tensor, is_local: bool) -> Tensor:
    """Convert values to a DTensor with mesh and placements of `like`, if `like` is a DTensor. is_local: the values are this
    rank's shard, not the full tensor."""
    if not isinstance(like, DTensor):
        return values
    mesh, placements = like.device_mesh, like.placements
    if not is_local:
        return distribute_tensor(values.to(mesh.device_type), mesh, placements, src_data_rank=None)
    values = values.to(mesh.device_type)
    return DTensor.from_local(values, mesh, placements, run_check=False, shape=like.shape, stride=like.stride())


def _join(parts: Sequence[Tensor], head: int) -> Tensor:
    """Join tensors to one tensor of TE; the inverse of `_split`."""
    if not head:
        return parts[0] if len(parts) == 1 else torch.cat(list(parts))
    groups = min(part.shape[0] for part in parts) // head
    rest = parts[0].shape[1:]
    return torch.cat([part.reshape(groups, -1, *rest) for part in parts], 1).reshape(-1, *rest)
