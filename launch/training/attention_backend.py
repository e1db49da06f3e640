"""Choice of the attention backend by `[train] attention`."""

from __future__ import annotations

import torch

from launch.config.sections import Train
from launch.models.attention import Choice

CUDNN, CUDNN_HEAD_DIM = 91501, 128  # oldest supported version of cuDNN, and largest supported head_dim
INVARIANT = "flash"
FASTEST = "cudnn"  # fastest backend on GPUs with dlp's kernels, by bench.attention


def choose(train: Train, head_dim: int, documents: bool, kind: str) -> Choice:
    """Decide `[train] attention`.

    Args:
        train: settings of the run.
        head_dim: width of one head.
        documents: whether attention begins anew with each document.
        kind: one of `dlp.kernels.table.DEVICES`.

    Raises:
        ValueError: for a named backend that cannot run in this configuration.
    """
    asked = train.attention
    if train.invariant and kind != "cpu":
        return _invariant(train, documents, kind)
    obstacle = _obstacle(FASTEST if asked == "auto" else asked, train, head_dim, documents, kind)
    if obstacle is None:
        return Choice(
            *((FASTEST, "auto: the fastest backend in measurements") if asked == "auto" else (asked, "as set"))
        )
    if asked != "auto":
        raise ValueError(f"[train] attention: expected auto, got {asked}: {obstacle}")
    return Choice(None, f"auto: {obstacle}")


def _invariant(train: Train, documents: bool, kind: str) -> Choice:
    """The backend whose backward can be deterministic, for one head of k and v at a time."""
    obstacle = _obstacle(INVARIANT, train, 0, documents, kind)
    if train.attention not in ("auto", INVARIANT):
        obstacle = f"the backward of {train.attention} is not deterministic"
    if obstacle is not None:
        raise ValueError(f'[train] invariant = true: expected attention = "{INVARIANT}" to run on this GPU: {obstacle}')
    return Choice(INVARIANT, "invariant: one head of k and v at a time, so that sums do not depend on tp", by_head=True)


def _obstacle(backend: str, train: Train, head_dim: int, documents: bool, kind: str) -> str | None:
    """Return the reason why a backend cannot be set; None if it can."""
    if kind == "cpu":
        return "backends are chosen on GPUs only"
    if documents:
        return "[data] reset_attention uses a separate kernel for sequences of different lengths"
    if train.dtype != "bf16":
        return f'backends need [train] dtype = "bf16", and dtype is {train.dtype}'
    if backend != "cudnn":
        return None
    if train.deterministic:
        return "cuDNN's backward is not deterministic, and [train] deterministic is set"
    if head_dim > CUDNN_HEAD_DIM or head_dim % 8:
        return (
            f"cuDNN supports heads of at most {CUDNN_HEAD_DIM} features in multiples of 8, and head_dim is {head_dim}"
        )
    # Without a GPU, the plan is for another host
    version = torch.backends.cudnn.version() if torch.cuda.is_available() else CUDNN
    return (
        None if version and version >= CUDNN else f"cuDNN {CUDNN} or newer is needed, and cuDNN {version} is installed"
    )
