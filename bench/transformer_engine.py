"""Transformer Engine (TE) with its fastest settings, as a peer of `bench.tensor_parallel`: tensor and sequence parallelism,
userbuffers that overlap transfers with GEMMs, and CUDA graphs by `te.make_graphed_callables`.

PEERS are the names of the subjects. Subjects whose name contains "userbuffers" overlap GEMMs with transfers through memory that
the GPUs map from each other. This module imports TE only when a subject is constructed.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

if TYPE_CHECKING:
    from bench.parallel_subjects import Shape

USERBUFFERS = " userbuffers"
RECIPES = {"te bf16": "", "te delayed": "DelayedScaling", "te current": "Float8CurrentScaling"}
PEERS = (*RECIPES, *(name + USERBUFFERS for name in RECIPES))
# recipe of dlp -> subject of TE with the same quantization
COUNTERPARTS = {
    "bf16": "te bf16",
    "fp8_delayed": "te delayed",
    "fp8_current": "te current",
}


def installed() -> bool:
    return importlib.util.find_spec("transformer_engine") is not None


def is_peer(name: str) -> bool:
    return name in PEERS


class Userbuffers:
    """Userbuffers communicators of TE. A process has communicators for at most one shape of hidden states at a time."""

    def __init__(self) -> None:
        self._shape: tuple[int, int] | None = None

    def use(self, tokens: int, features: int, ranks: int) -> None:
        """Create the communicators for hidden states [tokens, features], without NVLink multicast; communicators for
        another shape are destroyed first. Do nothing if the communicators for this shape exist."""
        if self._shape == (tokens, features):
            return
        self.destroy()
        os.environ["UB_SKIPMC"] = "1"
        base: Any = importlib.import_module("transformer_engine.pytorch.module.base")
        modes = getattr(base, "UserBufferQuantizationMode", None)  # older versions have one mode for all layers
        kinds = {"use_fp8": True} if modes is None else {"quantization_modes": [modes.NONE, modes.FP8]}
        base.initialize_ub([tokens, features], ranks, dtype=torch.bfloat16, bootstrap_backend="nccl", **kinds)
        self._shape = tokens, features

    def destroy(self) -> None:
        if self._shape is not None:
            importlib.import_module("transformer_engine.pytorch.module.base").destroy_ub()
        self._shape = None


USERBUFFERS_OF_PROCESS = Userbuffers()


class TransformerEngine(nn.Module):
    """Two linears or one layer of TE, configured as the subject `name` of PEERS: token shards [M/R, K] -> [M/R, K]."""

    def __init__(self, name: str, shape: Shape, tokens: int, group: ProcessGroup) -> None:
        super().__init__()
        overlapped = name.endswith(USERBUFFERS)
        if overlapped:
            USERBUFFERS_OF_PROCESS.use(tokens, shape.features, group.size())
        te, made = (importlib.import_module(f"transformer_engine.{part}") for part in ("pytorch", "common.recipe"))
        kind = RECIPES[name.removesuffix(USERBUFFERS)]
        self.te, self.group, self.recipe = te, group, getattr(made, kind)() if kind else None
        self.layer = bool(shape.heads)
        self.inside: Callable[..., Any] = _layer(te, shape, tokens, group, overlapped) if self.layer else _pair(
            te, shape, group, overlapped
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        with self.te.fp8_autocast(enabled=self.recipe is not None, fp8_recipe=self.recipe, fp8_group=self.group):
            y: Tensor = self.inside(x.unsqueeze(1) if self.layer else x)
        return y.squeeze(1) if self.layer else y

    def graph(self, x: Tensor) -> None:
        """Replace forward and backward by replays of CUDA graphs, made by `te.make_graphed_callables`."""
        sample = torch.randn_like(x.unsqueeze(1) if self.layer else x).requires_grad_()
        known = inspect.signature(self.te.make_graphed_callables).parameters
        wanted = {
            "enabled": self.recipe is not None, "recipe": self.recipe, "amax_reduction_group": self.group,
        } if "recipe" in known else {
            "fp8_enabled": self.recipe is not None, "fp8_recipe": self.recipe, "fp8_group": self.group,
        }  # fmt: skip
        self.inside = self.te.make_graphed_callables(self.inside, (sample,), **wanted)


def _parallel(group: ProcessGroup) -> dict[str, Any]:
    return {"tp_group": group, "tp_size": group.size(), "sequence_parallel": True, "params_dtype": torch.bfloat16}


def _pair(te: Any, shape: Shape, group: ProcessGroup, overlapped: bool) -> nn.Module:
    """Build a column- and a row-parallel linear."""
    over, up, down = {"bias": False, **_parallel(group)}, {}, {}
    if overlapped:
        up = {"ub_overlap_ag": True, "ub_bulk_dgrad": True, "ub_bulk_wgrad": True, "ub_name": "fc1"}
        down = {"ub_overlap_ag": True, "ub_overlap_rs": True, "ub_name": "fc2"}
    return nn.Sequential(
        te.Linear(shape.features, shape.inner, parallel_mode="column", **up, **over),
        te.Linear(shape.inner, shape.features, parallel_mode="row", **down, **over),
    )


def _layer(te: Any, shape: Shape, tokens: int, group: ProcessGroup, overlapped: bool) -> nn.Module:
    """Build a Llama layer for one sequence."""
    return te.TransformerLayer(
        shape.features, shape.inner, shape.heads, num_gqa_groups=shape.kv_heads, hidden_dropout=0.0,
        attention_dropout=0.0, self_attn_mask_type="causal", normalization="RMSNorm", activation="swiglu", bias=False,
        set_parallel_mode=True, fuse_qkv_params=True, seq_length=tokens, micro_batch_size=1,
        ub_tp_comm_overlap=overlapped, **_parallel(group),
    )  # fmt: skip
