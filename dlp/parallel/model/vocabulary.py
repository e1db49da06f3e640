"""Tokens and targets outside of the vocabulary. torch refuses them; rows of another rank would hide them.

On a CPU they are refused at once. On a GPU, where reading a value would wait for the device, the largest one is copied to the
host and read at the next call of the same layer. What belongs to them is NaN meanwhile: rows of an embedding, the loss and its
gradient. Compiled code and replays of CUDA graphs have the NaN alone.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

from dlp.kernels.launches import capturing
from dlp.parallel.model.checks import OnTheWay

_NONE = torch.iinfo(torch.int64).min  # no token is outside
_COMING: dict[tuple[str, torch.device], tuple[OnTheWay, str]] = {}  # of the last call


def outside(tokens: Tensor, vocabulary: int) -> Tensor:
    """Where tokens are not in [0, vocabulary): bool, in their shape."""
    return (tokens < 0) | (tokens >= vocabulary)


def refuse(name: str, tokens: Tensor, wrong: Tensor, rule: str) -> None:
    """IndexError if any of `wrong`, bool, is set, for a token of this call or, on a GPU, of the call before.

    name, rule   of the layer, and what its tokens must be, for the message
    """
    if torch.compiler.is_compiling() or isinstance(tokens, FakeTensor) or tokens.is_meta or not tokens.numel():
        return
    if _reads_at_once(tokens):
        if wrong.any():
            _raise(name, int(tokens[wrong][0]), rule, "")
    elif not capturing():
        before = _COMING.pop((name, tokens.device), None)
        _COMING[name, tokens.device] = OnTheWay(torch.where(wrong, tokens, _NONE).amax()[None]), rule
        if before is not None and (worst := int(before[0].read()[0])) != _NONE:
            _raise(name, worst, before[1], " in the call before this one")


def _reads_at_once(tokens: Tensor) -> bool:
    return not tokens.is_cuda


def _raise(name: str, token: int, rule: str, when: str) -> None:
    raise IndexError(f"{name}: {token} is out of range{when}: {rule}; check the tokenizer and the data")
