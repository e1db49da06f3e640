"""Choice of the attention backend by `[train] attention`."""

from __future__ import annotations

import torch

from launch.config.sections import Train
from launch.models.attention import Choice

CUDNN, CUDNN_HEAD_DIM = 91501, 128  # oldest supported version of cuDNN, and largest supported head_dim
INVARIANT = "flash"  # backend in invariant mode
FASTEST = "cudnn"  # fastest backend on the GPUs that dlp's kernels support, as measured by bench.attention


def choose(train: Train, head_dim: int, documents: bool, kind: str) -> Choice:
    """Choose the attention backend by `[train] attention`.

    Args:
        train: Settings of the run.
        head_dim: Number of features of a head.
        documents: Whether attention restarts at each document.
        kind: One of `dlp.kernels.table.DEVICES`.

    Raises:
        ValueError: `[train] attention` names a backend that cannot run with these settings on this kind of device.
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
    """Return the choice in invariant mode: the backend with a deterministic backward, one head of k and v at a time. Raises
    ValueError if this backend cannot run."""
    obstacle = _obstacle(INVARIANT, train, 0, documents, kind)
    if train.attention not in ("auto", INVARIANT):
        obstacle = f"the backward of {train.attention} is not deterministic"
    if obstacle is not None:
        raise ValueError(f'[train] invariant = true: expected attention = "{INVARIANT}" to run on this GPU: {obstacle}')
    return Choice(INVARIANT, "invariant: one head of k and v at a time, so that sums do not depend on tp", by_head=True)


def _obstacle(backend: str, train: Train, head_dim: int, documents: bool, kind: str) -> str | None:
    """Return the reason why `backend` cannot run; None if it can."""
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
    # without a GPU this is a plan for another host, which is assumed to have a supported version
    version = torch.backends.cudnn.version() if torch.cuda.is_available() else CUDNN
    return (
        None if version and version >= CUDNN else f"cuDNN {CUDNN} or newer is needed, and cuDNN {version} is installed"
    )
