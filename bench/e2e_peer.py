"""Peer of bench.e2e: the same Llama without dlp, with FSDP2, torch.compile and optionally torchao's float8.

    torchrun --nproc-per-node N -m bench.e2e [CONFIG] --subjects peer_bf16,peer_tensorwise,peer_rowwise

The training step follows PyTorch's documentation: `fully_shard` gathers bf16 parameters and reduces gradients in fp32, each
block is compiled, and AdamW is fused. The tensorwise recipe gathers weights in float8.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.optim import AdamW

from launch.config.run_config import Config
from launch.models.initial_weights import init_weights
from launch.models.modules import DTYPES, Llama


def convert_to_float8(model: nn.Module, recipe: str) -> None:
    """Convert the blocks' linears by torchao's float8 training. Raises ModuleNotFoundError if torchao is not installed."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig.from_recipe_name(recipe)
    if recipe == "tensorwise":
        config = Float8LinearConfig(enable_fsdp_float8_all_gather=True)
    convert_to_float8_training(model, config=config, module_filter_fn=lambda _, name: "lm_head" not in name)


class Peer:
    """The Llama of a config under FSDP2, with its optimizer.

    Args:
        config: config of the model and of the training.
        mesh: mesh whose axis dp_shard has all ranks.
        device: device of this rank.
        float8: torchao's recipe, "tensorwise" or "rowwise"; None for bf16.
        capturable: whether a CUDA graph can capture the step.
    """

    def __init__(
        self, config: Config, mesh: DeviceMesh, device: torch.device, *, float8: str | None = None, capturable: bool = False
    ) -> None:  # fmt: skip
        with torch.device("meta"):
            self.model = Llama(replace(config.family, fused=False), DTYPES[config.train.dtype])
        if float8 is not None:
            convert_to_float8(self.model, float8)
        self.after_step = None
        if float8 == "tensorwise":
            from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

            self.after_step = precompute_float8_dynamic_scale_for_fsdp
        policy = MixedPrecisionPolicy(param_dtype=DTYPES[config.train.dtype], reduce_dtype=torch.float32)
        for block in self.model.model.layers:
            if config.train.compile:
                block.compile()
            fully_shard(block, mesh=mesh["dp_shard"], mp_policy=policy)
        fully_shard(self.model, mesh=mesh["dp_shard"], mp_policy=policy)
        self.model.to_empty(device=device)
        init_weights(self.model, config.train.seed)
        self.optimizer = AdamW(self.model.parameters(), lr=config.train.lr, fused=True, capturable=capturable)

    def step(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Run one optimizer step on tokens and targets [B, S], and return the loss of this rank, fp32 []."""
        loss = F.cross_entropy(self.model(tokens).float(), targets.flatten())
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.after_step is not None:
            self.after_step(self.model)
        return loss.detach()
