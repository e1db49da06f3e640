"""Tokens and targets outside of the vocabulary. torch raises for such tokens; a vocabulary-sharded layer must check
them itself.

On a CPU the check raises at once. On a GPU, where reading a value would wait for the device, the largest invalid token is
copied to the host, and the next call of the same layer raises. Until then the results are NaN: rows of an embedding, the loss
and its gradient. Compiled code and replays of CUDA graphs only produce the NaN.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

from dlp.kernels.launches import capturing
from dlp.parallel.model.checks import OnTheWay

_NONE = torch.iinfo(torch.int64).min  # no token is outside
_COMING: dict[tuple[str, torch.device], tuple[OnTheWay, str]] = {}  # largest invalid token of the last call


def outside(tokens: Tensor, vocabulary: int) -> Tensor:
    """Mask of tokens outside of [0, vocabulary): bool, in the shape of the tokens."""
    return (tokens < 0) | (tokens >= vocabulary)


def refuse(name: str, tokens: Tensor, wrong: Tensor, rule: str) -> None:
    """Raise IndexError if any element of `wrong`, bool, is set, for a token of this call or, on a GPU, of the previous
    call.

    name, rule   name of the layer, and the rule for its tokens, for the message
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
            _raise(name, worst, before[1], " in the previous call")


def _reads_at_once(tokens: Tensor) -> bool:
    return not tokens.is_cuda


def _raise(name: str, token: int, rule: str, when: str) -> None:
    raise IndexError(f"{name}: {token} is out of range{when}: {rule}; check the tokenizer and the data")
