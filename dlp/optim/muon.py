"""Muon for the matrices of transformer blocks and AdamW for other parameters, as one optimizer.

    b  = mu b + (1 - mu) g              momentum, sharded like the parameter
    u  = NS(mu b + (1 - mu) g)          Nesterov momentum; NS makes all singular values of the full matrix about 1
    w -= lr (wd w + 0.2 sqrt(max(rows, columns)) u)

With the factor 0.2 sqrt(max(rows, columns)), lr and wd can have the values of AdamW (Jordan et al., "Muon", 2024; Liu et al.,
arXiv 2502.16982, section 2.2). The results equal those of torch.optim.Muon(adjust_lr_fn="match_rms_adamw"), which does not
support sharded parameters, `grad_scale` and `found_inf`. NS needs the full matrix: each rank gathers the argument of NS in bf16
and computes the complete NS. The cost of NS therefore does not fall with the number of ranks, and a step sends 2 bytes for each
element of these matrices.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.optim.adamw import adamw

from dlp.comm import observer
from dlp.optim.encodings import AVERAGES
from dlp.optim.scaled import ScaledOptimizer
from dlp.parallel.weight.local import local_values

MOMENTUM = 0.95
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
STEPS = 5
LEAST = 1e-7  # minimum of the norm by which a matrix is divided
BUFFER = "momentum_buffer"


MUON = "muon"
OWN = {"layer": "dlp.optim", "purpose": "other"}  # labels of the gathers of a step for `dlp.comm.observer`


def is_matrix_of_block(parameter: str, shape: Sequence[int]) -> bool:
    """Return whether Muon updates a parameter: a matrix whose dotted full name `parameter` has a component "layers". Embeddings
    and heads are outside of "layers"."""
    return len(shape) == 2 and "layers" in parameter.split(".")


def muon_groups(model: nn.Module, *, weight_decay: float = 0.0) -> list[dict[str, Any]]:
    """Return parameter groups of a model for `dlp.optim.Muon`.

    Args:
        model: model whose transformer blocks lie in an nn.ModuleList; 2-D parameters of the blocks are the matrices.
        weight_decay: weight decay of parameters with at least two dimensions; other parameters have weight decay 0.

    Returns:
        Up to three groups of the parameters that require gradients: matrices of blocks, other parameters with at least two
        dimensions, and parameters with fewer dimensions. Empty groups are left out.

    Raises:
        ValueError: for a model without such matrices.

    Examples:
        >>> model = nn.Sequential(nn.ModuleList([nn.Linear(64, 64)]))
        >>> len(dlp.optim.muon_groups(model))
        2
    """
    lists = [name and f"{name}." for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    learning = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    matrices = {name for name, p in learning.items() if p.dim() == 2 and name.startswith(tuple(lists))}
    if not matrices:
        raise ValueError(
            f"muon_groups: {type(model).__name__} has no matrix in an nn.ModuleList: write the groups explicitly, with "
            f"matrices=True for the parameters that Muon updates"
        )
    rest = {name: parameter for name, parameter in learning.items() if name not in matrices}
    groups: list[dict[str, Any]] = [
        {
            "params": [learning[name] for name in learning if name in matrices],
            "weight_decay": weight_decay,
            "matrices": True,
        },
        {"params": [p for p in rest.values() if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in rest.values() if p.dim() < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


class Muon(ScaledOptimizer):
    """Muon (orthogonalized momentum) for matrices, AdamW for other parameters, also for sharded parameters.

    A step divides gradients by the attribute `grad_scale`, and changes nothing if the attribute `found_inf` is 1, as in torch's
    fused AdamW. Both are fp32 [] tensors.

    Args:
        groups: groups of parameters, for example from `dlp.optim.muon_groups`. Muon updates the groups with `matrices` true,
            whose parameters are 2-D; AdamW updates the other groups. `weight_decay` of a group is 0 by default.
        lr: number, or tensor on the device.
        betas: decay rates of the averages of AdamW. The momentum of Muon is always 0.95.
        eps: number added to the denominator of AdamW.

    Raises:
        ValueError: for a group with `matrices` true that holds a parameter that is not 2-D, for lr, eps or weight_decay that is
            negative or not finite, and for betas outside [0, 1).

    Examples:
        >>> model = nn.Sequential(nn.ModuleList([nn.Linear(64, 64)]))
        >>> optimizer = dlp.optim.Muon(dlp.optim.muon_groups(model, weight_decay=0.1), lr=1e-3)
    """

    def __init__(
        self, groups: Iterable[dict[str, Any]], *, lr: float | Tensor = 1e-3, betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
    ) -> None:  # fmt: skip
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0, "matrices": False})

    def check_group(self, group: dict[str, Any]) -> None:
        super().check_group(group)
        for parameter in group["params"] if group["matrices"] else ():
            if parameter.dim() != 2:
                raise ValueError(
                    f"Muon: a group with matrices holds 2-D parameters; got shape {tuple(parameter.shape)}: put the "
                    f"parameter into a group without matrices"
                )

    def new_state(self, parameter: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        if group["matrices"]:
            return {BUFFER: torch.zeros_like(parameter)}
        return super().new_state(parameter, group)

    def step_of_group(self, group: dict[str, Any]) -> None:
        learning = [(parameter, parameter.grad) for parameter in group["params"] if parameter.grad is not None]
        if group["matrices"]:
            for parameter, grad in learning:
                self._step_of_matrix(parameter, grad, group)
        elif learning:
            self._step_of_others(learning, group)

    def _step_of_others(self, learning: list[tuple[Tensor, Tensor]], group: dict[str, Any]) -> None:
        states = [self.state_of(parameter, group) for parameter, _ in learning]
        first, second = ([local_values(state[name]) for state in states] for name in AVERAGES)
        beta1, beta2 = group["betas"]
        adamw(
            [local_values(parameter) for parameter, _ in learning], [local_values(grad) for _, grad in learning],
            first, second, [], [state["step"] for state in states], fused=True, grad_scale=self.grad_scale,
            found_inf=self.found_inf, amsgrad=False, beta1=beta1, beta2=beta2, lr=group["lr"],
            weight_decay=group["weight_decay"], eps=group["eps"], maximize=False,
        )  # fmt: skip

    def _step_of_matrix(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        values, held = local_values(parameter), local_values(self.state_of(parameter, group)[BUFFER])
        grad = local_values(gradient) / self.grad_scale
        momentum = held.lerp(grad, 1 - MOMENTUM)
        made = shard_of(orthogonal(whole(grad.lerp(momentum, MOMENTUM).bfloat16(), parameter)), parameter)
        lr, skipped = group["lr"], self.found_inf > 0
        moved = values * (1 - lr * group["weight_decay"]) - made.float() * (lr * 0.2 * math.sqrt(max(parameter.shape)))
        held.copy_(torch.where(skipped, held, momentum))
        values.copy_(torch.where(skipped, values, moved))


def orthogonal(u: Tensor) -> Tensor:
    """Orthogonalize u [rows, columns] in the dtype of u, bf16, to singular values of about 1 (0.7 to 1.2), by five steps of a
    quintic Newton-Schulz iteration."""
    a, b, c = COEFFICIENTS
    x = u.t() if u.shape[0] > u.shape[1] else u
    x = x / x.norm().clamp(min=LEAST)
    for _ in range(STEPS):
        gram = x @ x.t()
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.t() if u.shape[0] > u.shape[1] else x


def whole(shard: Tensor, like: Tensor) -> Tensor:
    """Return the full matrix of a shard that is sharded like the parameter `like`. Gathers over one mesh axis after the other,
    in the order of the mesh: dp_shard, then tp."""
    if not isinstance(like, DTensor):
        return shard
    mesh: DeviceMesh = like.device_mesh
    placements: Sequence[Any] = like.placements
    for axis, placement in enumerate(placements):
        if isinstance(placement, Replicate):
            continue
        shape = list(like.shape)  # shape of the matrix after this gather: only later mesh axes still shard it
        for later in range(axis + 1, mesh.ndim):
            if not isinstance(placements[later], Replicate):
                shape[placements[later].dim] //= mesh.size(later)
        over = mesh if mesh.ndim == 1 else mesh[(mesh.mesh_dim_names or ())[axis]]
        cut = DTensor.from_local(
            shard, over, [Shard(placement.dim)], run_check=False, shape=torch.Size(shape), stride=(shape[1], 1)
        )
        with observer.label(**OWN):
            shard = cut.full_tensor()
    return shard


def shard_of(matrix: Tensor, like: Tensor) -> Tensor:
    """Return this rank's shard of a full matrix, sharded like the parameter `like`."""
    if not isinstance(like, DTensor):
        return matrix
    return distribute_tensor(matrix, like.device_mesh, like.placements, src_data_rank=None).to_local()
