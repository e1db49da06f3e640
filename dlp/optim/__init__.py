"""dlp.optim: optimizers for custom training loops (docs/optimizers.md).

    AdamW8bit, AdamW4bit, AdamWFp8   AdamW with averages stored in 8 or 4 bits, in torchao's encodings
    InvariantAdamW                   AdamW with the same bits wherever a parameter is cut, for `invariant=True` on CPUs
    Muon                             orthogonalized momentum for matrices, AdamW for other parameters

All step on shards, replicated parameters and plain tensors. A step divides gradients by the attribute `grad_scale` and leaves
every bit of parameters and states where `found_inf` is 1, both fp32 [] on the device, without waiting for the device;
`clip_` sets the two, and `clip_grad_norm_` clips before the step of any optimizer. All names of `__all__` are public.
"""

from dlp.optim.clip import clip_, clip_grad_norm_
from dlp.optim.invariant_adamw import InvariantAdamW
from dlp.optim.low_bit_adamw import AdamW4bit, AdamW8bit, AdamWFp8
from dlp.optim.muon import Muon, muon_groups

__all__ = ["AdamW4bit", "AdamW8bit", "AdamWFp8", "InvariantAdamW", "Muon", "clip_", "clip_grad_norm_", "muon_groups"]
