"""clip_: clipping by the norm of all gradients inside of an optimizer's step, without waiting for the device."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer


@torch.no_grad()
def clip_(optimizer: Optimizer, max_norm: float) -> Tensor:
    """Clip the gradients in the next step of an optimizer of `dlp.optim`, or skip the step if their norm is not finite.

    The host does not wait for the device.

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
            f"torch.nn.utils.clip_grad_norm_"
        )
    if not max_norm > 0:
        raise ValueError(f"dlp.optim.clip_: max_norm must be positive; got {max_norm}")
    grads = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    total = torch.nn.utils.get_total_norm(grads)
    norm = (total.full_tensor() if isinstance(total, DTensor) else total).float()
    optimizer.grad_scale.copy_((norm / max_norm).clamp(min=1.0).nan_to_num(1.0))
    optimizer.found_inf.copy_((~norm.isfinite()).float())
    return norm
