"""Context managers and functions with the names and arguments of `transformer_engine.pytorch` (TE).

An autocast region without recipe runs under fp8_current, which needs no amax history. TE's default on Hopper is delayed
scaling.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, NoReturn

from torch.distributed import ProcessGroup

from dlp.parallel.model.autocast import autocast as _autocast
from dlp.parallel.weight.held import quantized_model_init as _quantized_model_init
from dlp.te_arguments import INITIALIZE_UB, sentences

DEFAULT = "fp8_current"


def autocast(
    enabled: bool = True,
    calibrating: bool = False,
    recipe: Any = None,
    amax_reduction_group: ProcessGroup | None = None,
) -> AbstractContextManager[None]:
    """Call `dlp.autocast`. The default recipe is fp8_current, if enabled or calibrating."""
    chosen = DEFAULT if recipe is None and (enabled or calibrating) else recipe
    return _autocast(enabled, chosen, calibrating, amax_reduction_group)


def fp8_autocast(
    enabled: bool = True, calibrating: bool = False, fp8_recipe: Any = None, fp8_group: ProcessGroup | None = None
) -> AbstractContextManager[None]:
    """Call `autocast`. TE renamed fp8_autocast to autocast."""
    return autocast(enabled, calibrating, fp8_recipe, fp8_group)


def quantized_model_init(
    enabled: bool = True, recipe: Any = None, preserve_high_precision_init_val: bool = False
) -> AbstractContextManager[None]:
    """Call `dlp.quantized_model_init`. The default recipe is fp8_current."""
    return _quantized_model_init(enabled, DEFAULT if recipe is None else recipe, preserve_high_precision_init_val)


fp8_model_init = quantized_model_init


def is_fp8_available(return_reason: bool = False) -> bool | tuple[bool, str]:
    """Return True, or (True, "") if `return_reason`, because every recipe runs on every device, emulated if necessary."""
    return (True, "") if return_reason else True


def initialize_ub(*arguments: Any, **keywords: Any) -> NoReturn:
    """Raise RuntimeError: overlap is an option of each layer, and needs no initialization."""
    names = dict.fromkeys(
        [*list(INITIALIZE_UB)[: len(arguments)], *[name for name in keywords if name in INITIALIZE_UB]]
    )
    said = sentences(INITIALIZE_UB, names)
    raise RuntimeError(
        f'initialize_ub: remove the call; overlap= of each layer, "auto" by default, chooses how transfers run under GEMMs'
        f"{'. ' + said if said else ''}"
    )


def destroy_ub() -> None:
    """Do nothing, because buffers of transfers belong to the process group."""
