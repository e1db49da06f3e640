"""State dicts of LayerNormLinear, LayerNormMLP and TransformerLayer under the names of Transformer Engine, and back.

    model.load_state_dict(from_te(model, state))     what was saved there, loaded here
    other.load_state_dict(to_te(model))              what is here, loaded there

Each module says by `te_names` which of its tensors are one of there. Siblings are one tensor there, one behind the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor


class Joined(NamedTuple):
    """Tensors that are one there, by name. `head`: rows of a head, where heads of a group of q, k and v are together."""

    parts: tuple[str, ...]
    head: int = 0


TeNames = dict[str, Joined]


def names_of(module: nn.Module, path: str, te: str) -> TeNames:
    """Those of a norm or a Linear at `path`, all siblings as one; there they begin with `te`."""
    found: dict[str, list[str]] = {}
    for name, _ in module.get_submodule(path).named_parameters():
        found.setdefault(te + name.partition("_")[0], []).append(f"{path}.{name}")
    return {name: Joined(tuple(parts)) for name, parts in found.items()}


def from_te(model: nn.Module, state: Mapping[str, Tensor], *, qkv_weight_interleaved: bool = True) -> dict[str, Tensor]:
    """`state` under the names of `model`, which holds such modules or is one; other tensors as they are. What tp cuts may be
    whole, or this rank's part, as each rank saves it there. q, k and v may be one tensor, in the order that
    `qkv_weight_interleaved` says. States of recipes (`_extra_state`) are left out: `dlp.load_state_dict` has those of dlp.

    Raises ValueError for a tensor of another shape.
    """
    found, own = dict(state), dict(model.named_parameters())
    for prefix, module in _named(model):
        for fused in (False, True):
            for name, joined in module.te_names(fused).items():  # type: ignore[operator]
                tensor = found.pop(prefix + name, None)
                if tensor is not None:
                    names = [prefix + part for part in joined.parts]
                    head = joined.head if qkv_weight_interleaved else 0
                    parts = _apart(prefix + name, tensor, [own[part] for part in names], head)
                    found.update(zip(names, parts, strict=True))
        for name in [name for name in found if name.startswith(prefix) and name.endswith("_extra_state")]:
            del found[name]
    return found


def to_te(model: nn.Module, *, fuse_qkv_params: bool = False, qkv_weight_interleaved: bool = True) -> dict[str, Tensor]:
    """The state dict of `model` under the names of there: of what tp cuts, this rank's part, as each rank loads it there."""
    found = {name: t.to_local() if isinstance(t, DTensor) else t for name, t in model.state_dict().items()}
    for prefix, module in _named(model):
        for name, joined in module.te_names(fuse_qkv_params).items():  # type: ignore[operator]
            if prefix + joined.parts[0] in found:  # else the module around it has named it
                parts = [found.pop(prefix + part) for part in joined.parts]
                found[prefix + name] = _together(parts, joined.head if qkv_weight_interleaved else 0)
    return found


def _named(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for path, module in model.named_modules():
        if hasattr(module, "te_names"):
            yield f"{path}." if path else "", module


def _apart(name: str, tensor: Tensor, own: Sequence[Tensor], head: int) -> list[Tensor]:
    """The parts of a tensor, as parameters of these shapes lie."""
    here = [each.to_local() if isinstance(each, DTensor) else each for each in own]
    shapes = {False: [each.shape for each in own], True: [each.shape for each in here]}
    fits = {part: (sum(shape[0] for shape in its), *its[0][1:]) for part, its in shapes.items()}
    part = next((part for part, shape in fits.items() if shape == tuple(tensor.shape)), None)
    if part is None:
        raise ValueError(
            f"{name} is {tuple(tensor.shape)}; here it must be {fits[False]}, or of this rank {fits[True]}"
        )
    rows = [shape[0] for shape in shapes[part]]
    if head:
        groups = min(rows) // head
        shared = tensor.reshape(groups, -1, *tensor.shape[1:])
        parts = [each.reshape(-1, *tensor.shape[1:]) for each in shared.split([count // groups for count in rows], 1)]
    else:
        parts = list(tensor.split(rows))
    return [_laid(each, like, part) for each, like in zip(parts, own, strict=True)]


def _laid(values: Tensor, like: Tensor, part: bool) -> Tensor:
    """Values as `like` lies on its mesh; `part`: they are this rank's."""
    if not isinstance(like, DTensor):
        return values
    mesh, placements = like.device_mesh, like.placements
    if not part:
        return distribute_tensor(values.to(mesh.device_type), mesh, placements, src_data_rank=None)
    values = values.to(mesh.device_type)
    return DTensor.from_local(values, mesh, placements, run_check=False, shape=like.shape, stride=like.stride())


def _together(parts: Sequence[Tensor], head: int) -> Tensor:
    if not head:
        return parts[0] if len(parts) == 1 else torch.cat(list(parts))
    groups = min(part.shape[0] for part in parts) // head
    rest = parts[0].shape[1:]
    return torch.cat([part.reshape(groups, -1, *rest) for part in parts], 1).reshape(-1, *rest)
