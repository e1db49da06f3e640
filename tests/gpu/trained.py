"""A few training steps with weights that are cast at the step boundary."""

from __future__ import annotations

import torch
from torch import Tensor

from dlp.parallel.linear.modules import Linear
from dlp.parallel.model.boundary import attach, end_step
from dlp.parallel.model.session import Session, session_of
from dlp.quant.recipe import load
from tests.gpu.inputs import values


def trained(
    recipe: str, steps: int = 4, device: str = "cpu", dtype: torch.dtype = torch.bfloat16, features: int = 160
) -> tuple[Tensor, Session]:
    """Train two linears with weights of `dtype` on bf16 activations; return the losses, fp32 [steps], and the session
    of the model. After two steps, `load_state_dict` halves the weights."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(Linear(features, features, recipe=load(recipe)) for _ in range(2))).to(device, dtype)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    attach(model, optimizer)
    losses, x = [], (values("gauss", 64, features, torch.bfloat16) / 4096).to(device)
    for step in range(steps):
        optimizer.zero_grad()
        loss = model(x).float().square().mean()
        loss.backward()
        losses.append(loss.detach())
        optimizer.step()
        if step == 1:
            model.load_state_dict({name: value / 2 for name, value in model.state_dict().items()})
            end_step(model)
    return torch.stack(losses).cpu(), session_of(model)
