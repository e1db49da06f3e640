"""Architecture of models of transformers, from a folder with config.json and *.safetensors. Origin or treatment of each part:

config.json     defines the model, constructed on the meta device (`dlp.meta_model`), and the settings that checkpoints compare
tp              layer groups follow from `base_model_tp_plan` of the model (`dlp.tp_plan`); modules without an entry are not
                sharded
blocks          classes in `_no_split_modules` of the model
weights         fp32, read from the files into the shards of each rank (`dlp.load_pretrained`)
activations     FSDP casts parameters to [train] dtype, even with one data-parallel rank, because modules of transformers
                compute in the dtype of their parameters
dropout         not applied; the plan has a line about it if config.json sets a dropout probability
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from dlp import LayerGroup, Plan
from dlp.optim.muon import MUON, is_matrix_of_block
from dlp.pretrained import allocate, load_pretrained, meta_model
from dlp.tp_plan import named_blocks, tp_plan
from launch.models.architecture import Architecture, block_of
from launch.models.attention import Choice, Documents
from launch.models.folder import check_folder
from launch.models.settings import PretrainedModel
from launch.settings.schema import ConfigError

# Keys of config.json that may differ between checkpoint and run, since they do not affect parameters
UNCOMPARED = ("transformers_version", "dtype", "torch_dtype", "_name_or_path", "use_cache")


def _opened(folder: str) -> Any:
    """Return the config object of transformers for a folder. Raises ConfigError if the model is not a causal language model."""
    kind = check_folder(folder)["model_type"]
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL

    if kind not in CONFIG_MAPPING:
        raise ConfigError(
            f"--model {folder}: model_type {kind!r} is unknown to the installed transformers; choose another model, or a newer "
            f"transformers"
        )
    if kind not in CAUSAL:
        raise ConfigError(
            f"--model {folder}: model_type {kind!r} is not a causal language model of transformers; choose another model"
        )
    try:
        return AutoConfig.from_pretrained(folder)
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(
            f"--model {folder}: config.json cannot be read by transformers: {error}; correct config.json"
        ) from None


@functools.cache
def _sizes_of(folder: str, content: str) -> tuple[tuple[str, ...], int, int]:
    """Return (names of the blocks, number of matmul parameters that a token uses, number of blocks * query heads * head_dim).
    Parameters of experts count in proportion to the share of the experts to which a token is routed.

    content: settings of config.json as text; part of the cache key, so that a changed file is read again.
    """
    model: Any = meta_model(folder)
    config = _text(_opened(folder))
    names = tuple(named_blocks(model))
    if not names:
        raise ConfigError(f"--model {folder}: {type(model).__name__} has no blocks; choose another model")
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
    chosen = getattr(config, "num_experts_per_tok", 1)
    read = chosen / experts if experts else 1  # share of the experts that a token is routed to
    matmul = 0.0
    for name, parameter in model.named_parameters():
        if parameter.dim() < 2 or id(parameter) in embeddings:
            continue
        routed = ".experts." in name and "shared" not in name
        matmul += parameter.numel() * (read if routed else 1)
    head = model.get_output_embeddings()
    if head is not None and id(head.weight) in embeddings:
        matmul += head.weight.numel()  # a tied weight counts as the head, not as the embedding
    heads = getattr(config, "num_attention_heads", 0)
    size = getattr(config, "head_dim", None) or (config.hidden_size // heads if heads else 0)
    return names, int(matmul), int(len(names) * heads * size)


def _text(config: Any) -> Any:
    return config.get_text_config() if hasattr(config, "get_text_config") else config


class Pretrained(Architecture):
    """Architecture of a model of transformers in a folder; see `Architecture` for the methods."""

    fsdp_casts = True
    cuts_logits = False
    equal_blocks = False

    def __init__(self, model: PretrainedModel) -> None:
        self.folder = model.folder

    @property
    def config(self) -> Any:
        """Config object of transformers for the folder."""
        return _opened(self.folder)

    @property
    def _sizes(self) -> tuple[tuple[str, ...], int, int]:
        return _sizes_of(self.folder, json.dumps(self.settings, sort_keys=True))

    @property
    def vocab(self) -> int:
        return int(_text(self.config).vocab_size)

    @property
    def head_dim(self) -> None:
        return None

    @property
    def blocks(self) -> Sequence[str]:
        return self._sizes[0]

    @property
    def settings(self) -> dict[str, Any]:
        return {key: value for key, value in check_folder(self.folder).items() if key not in UNCOMPARED}

    def rules(self, config: Any) -> Iterator[tuple[bool, str]]:
        longest, length = getattr(_text(self.config), "max_position_embeddings", None), config.train.sequence
        yield (
            not isinstance(longest, int) or length <= longest,
            f"[train] sequence: expected at most max_position_embeddings = {longest} of --model {self.folder}, got {length}",
        )
        yield (
            config.train.optimizer != MUON or any(is_matrix_of_block(block, (1, 1)) for block in self.blocks),
            f"[train] optimizer: Muon updates matrices of modules named 'layers', and the blocks of --model {self.folder} are "
            f'{self.blocks[0]!r} and so on, got {MUON}: set optimizer = "adamw"',
        )

    def flops_per_token(self, sequence: int) -> float:
        _, matmul, q_size = self._sizes
        return 6.0 * matmul + 12.0 * q_size * sequence

    def meta(self, dtype: torch.dtype) -> nn.Module:
        """Return the model on the meta device. `dtype` is not used: FSDP casts the fp32 parameters."""
        model: Any = meta_model(self.folder)
        model.config.use_cache = False
        return model.eval()

    def groups(self, tp: int, sequence_parallel: bool) -> list[LayerGroup]:
        return list(tp_plan(self.meta(torch.float32), tp=tp).groups)

    def check(self, plan: Plan) -> None:
        blocks = frozenset(self.blocks)
        for row in plan.layers:
            if plan.tp > 1 and row.sequence_parallel:
                raise ValueError(
                    f"{row.name}: its groups set sequence_parallel = true, but modules of transformers compute all tokens: "
                    f"leave sequence_parallel out"
                )
            if plan.tp > 1 and row.style != "local" and not block_of(row.name, blocks):
                raise ValueError(
                    f"{row.name}: style = {row.style!r}, but outside of the blocks modules of transformers read and return "
                    f"unsharded features: leave style out of the layer groups of this layer"
                )

    def describe(self, tp: int) -> list[str]:
        model: Any = self.meta(torch.float32)
        plan = tp_plan(model, tp=tp)
        lines = [
            f"model: {type(model).__name__} of {self.folder}; FSDP units: {len(self.blocks)} {', '.join(plan.blocks)}"
        ]
        lines += plan.describe() if tp > 1 else []
        if dropout := dropouts(self.config):
            said = ", ".join(f"{name} = {value}" for name, value in dropout.items())
            lines.append(f"dropout is not applied ({said} in config.json): steps draw no random numbers")
        return ["", *lines]

    def prepare(self, model: nn.Module, attention: Choice) -> None:
        """Do nothing: the modules of transformers choose their attention backend."""

    def allocate(self, model: nn.Module, device: torch.device) -> None:
        allocate(model, device)
        if any(name in model.state_dict() for name, _ in model.named_buffers()):
            self.initialize(model, 0)  # a checkpoint has only parameters; the values of buffers come from the folder

    def initialize(self, model: nn.Module, seed: int) -> None:
        load_pretrained(model, self.folder)

    def logits(self, model: nn.Module, tokens: Tensor, documents: Documents | None = None) -> Tensor:
        with without_reads():
            logits: Tensor = model(tokens, use_cache=False).logits
        return logits.flatten(0, -2)

    def estimated(self, tp: int, layers: int, dtype: torch.dtype) -> tuple[nn.Module, Sequence[str]]:
        model: Any = meta_model(self.folder, dtype=dtype)
        model.config.use_cache = False
        return model.eval(), self.blocks


@contextmanager
def without_reads() -> Iterator[None]:
    """Context in which modules of transformers choose attention masks without reading device memory.

    To find packed sequences, transformers compares positions on the device, for whose result the host would wait in each
    microbatch; the launcher packs no sequences. While a CUDA graph is captured, some versions of transformers give attention
    a mask in place of `is_causal`, with which slower kernels run than in launched steps."""
    from transformers import masking_utils
    from transformers.utils import import_utils

    answers = {
        (masking_utils, "find_packed_sequence_indices"): lambda positions: None,
        (import_utils, "is_cuda_stream_capturing"): lambda: False,
    }
    with ExitStack() as stack:
        for place, answer in answers.items():
            if hasattr(*place):
                stack.callback(setattr, *place, getattr(*place))
                setattr(*place, answer)
        yield


def dropouts(config: Any) -> dict[str, float]:
    """Return the nonzero dropout probabilities in a config of transformers, by name."""
    return {
        name: value for name, value in _text(config).to_dict().items()
        if ("drop" in name) and isinstance(value, float) and value > 0
    }  # fmt: skip
