"""dlp.optim: optimizers for custom training loops (docs/optimizers.md).

    AdamW8bit, AdamW4bit, AdamWFp8   AdamW whose optimizer states are stored in 8 or 4 bits, in torchao's encodings
    InvariantAdamW                   AdamW whose bits do not depend on the sharding of parameters, for `invariant=True` on CPUs
    Muon                             orthogonalized momentum for matrices, AdamW for other parameters

All optimizers accept sharded, replicated and plain parameters. A step divides gradients by the attribute `grad_scale`, and
changes nothing if `found_inf` is 1. Both are fp32 [] tensors on the device, so that the host need not wait. `clip_` sets both;
`clip_grad_norm_` clips gradients before the step of any optimizer. The names of `__all__` are public.
"""

from dlp.optim.clip import clip_, clip_grad_norm_
from dlp.optim.invariant_adamw import InvariantAdamW
from dlp.optim.low_bit_adamw import AdamW4bit, AdamW8bit, AdamWFp8
from dlp.optim.muon import Muon, muon_groups

__all__ = ["AdamW4bit", "AdamW8bit", "AdamWFp8", "InvariantAdamW", "Muon", "clip_", "clip_grad_norm_", "muon_groups"]
