"""Clipping by the norm of all gradients.

clip_               makes the next step of an optimizer of `dlp.optim` clip gradients; the host does not wait for the norm
clip_grad_norm_     clips before the step of any optimizer; accepts plain parameters together with DTensors
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from dlp.parallel.weight.local import local_values


@torch.no_grad()
def clip_(optimizer: Optimizer, max_norm: float) -> Tensor:
    """Clip the gradients in the next step of an optimizer of `dlp.optim`, or skip the step if the norm is not finite.

    `clip_` sets `grad_scale` and `found_inf` of the optimizer, which keep their values until the next call. Gradients are not
    changed, and the host does not wait for the device. All ranks call `clip_`.

    Args:
        optimizer: optimizer with the attributes `grad_scale` and `found_inf`.
        max_norm: largest norm of all gradients as one vector.

    Returns:
        Norm before clipping, fp32 [] on the device.

    Raises:
        TypeError: for an optimizer without `grad_scale`, such as an optimizer of torch.
        ValueError: for a max_norm that is not positive.

    Examples:
        >>> model = nn.Linear(64, 64)
        >>> optimizer = dlp.optim.AdamW8bit(model.parameters(), lr=1e-3)
        >>> model(torch.randn(16, 64)).sum().backward()
        >>> norm = dlp.optim.clip_(optimizer, 1.0)
        >>> optimizer.step()
    """
    if not hasattr(optimizer, "grad_scale") or not hasattr(optimizer, "found_inf"):
        raise TypeError(
            f"dlp.optim.clip_: {type(optimizer).__name__} has no grad_scale: clip its gradients with "
            f"dlp.optim.clip_grad_norm_"
        )
    if not max_norm > 0:
        raise ValueError(f"dlp.optim.clip_: max_norm must be positive; got {max_norm}")
    grads = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    norm = _total_norm(grads, optimizer.found_inf.device)
    optimizer.grad_scale.copy_((norm / max_norm).clamp(min=1.0).nan_to_num(1.0))
    optimizer.found_inf.copy_((~norm.isfinite()).float())
    return norm


@torch.no_grad()
def clip_grad_norm_(parameters: nn.Module | Iterable[Tensor], max_norm: float) -> Tensor:
    """Scale the gradients in place such that the norm of all gradients, as one vector, is at most `max_norm`.

    `torch.nn.utils.clip_grad_norm_` raises "got mixed torch.Tensor and DTensor" for models to which a module was added after
    `dlp.convert`. This function accepts such models, and DTensors on several meshes. A plain parameter counts once in the norm,
    so its gradient must be equal on all ranks. All ranks call this function.

    Args:
        parameters: a module, or parameters; parameters without a gradient are ignored.
        max_norm: largest norm after clipping.

    Returns:
        Norm before clipping, fp32 [], equal on all ranks that share the DTensors.

    Raises:
        ValueError: for a max_norm that is not positive.

    Examples:
        >>> model = nn.Linear(64, 64)
        >>> optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        >>> model(torch.randn(16, 64)).sum().backward()
        >>> norm = dlp.optim.clip_grad_norm_(model, 1.0)
        >>> optimizer.step()
    """
    if not max_norm > 0:
        raise ValueError(f"dlp.optim.clip_grad_norm_: max_norm must be positive; got {max_norm}")
    given = parameters.parameters() if isinstance(parameters, nn.Module) else parameters
    grads = [p.grad for p in ([given] if isinstance(given, Tensor) else given) if p.grad is not None]
    if not grads:
        return torch.zeros(())
    norm = _total_norm(grads, grads[0].device)
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for grad in map(local_values, grads):
        grad.mul_(factor.to(grad.device))
    return norm


def _total_norm(grads: list[Tensor], device: torch.device) -> Tensor:
    """Return the norm of all gradients, fp32 []. Call torch's `get_total_norm` once per mesh and once for plain tensors, since
    one call supports only DTensors of one mesh, or only plain tensors."""
    if not grads:
        return torch.zeros((), device=device)
    by_mesh: dict[DeviceMesh | None, list[Tensor]] = {}
    for grad in grads:
        by_mesh.setdefault(grad.device_mesh if isinstance(grad, DTensor) else None, []).append(grad)
    totals = [torch.nn.utils.get_total_norm(alike) for alike in by_mesh.values()]
    norms = [(total.full_tensor() if isinstance(total, DTensor) else total).float().to(device) for total in totals]
    return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))
