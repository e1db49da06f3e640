"""Linear, LayerNormLinear, LayerNormMLP, TransformerLayer with keywords and defaults of `transformer_engine.pytorch` (TE).

The modules are subclasses of layers of `dlp.ops`. They add TE's defaults and initial values, `parameters_split`, TE's arguments
of forward, and `backward_dw`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dlp import ops
from dlp.ops.basic.quantize import HandOver
from dlp.ops.fuser import OperationFuser
from dlp.ops.modules import linear_options, own_options
from dlp.ops.te_names import Joined, TeNames
from dlp.parallel.model.grads import backward_dw
from dlp.te_arguments import FORWARD, refuse

Split = Sequence[str] | Mapping[str, int] | None


class SplitLinear(ops.Linear):
    """`ops.Linear` with `parameters_split`: several named weights and biases, whose outputs are concatenated.

    parameters_split   names for equal parts of out_features, or a dict name -> size; "query" and "query_" both name the
                       parameters query_weight and query_bias. None: one weight and one bias

    Raises ValueError if the sizes do not sum to out_features, if two names differ only in a trailing "_", and for a
    row-parallel layer with parameters_split.
    """

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, *, parameters_split: Split = None, **options: Any
    ) -> None:
        sizes = _sizes(out_features, parameters_split)
        vars(self)["_split"] = None if parameters_split is None else tuple(sizes)
        out: Any = out_features if parameters_split is None else tuple(sizes.values())
        super().__init__(in_features, out, bias, **options)

    def _parameter_names(self, count: int) -> list[tuple[str, str]]:
        split = vars(self)["_split"]
        if split is None:
            return super()._parameter_names(count)
        return [(f"{name}weight", f"{name}bias") for name in split]

    def te_names(self, fused: bool = False) -> TeNames:
        return {name: Joined((name,)) for name, _ in self.named_parameters()}


def _sizes(out_features: int, split: Split) -> dict[str, int]:
    """Return a dict from the prefix of the names of each weight and its bias to the number of output features of the weight.

    Raises ValueError if the sizes do not sum to `out_features`, or if two names give the same prefix."""
    if split is None:
        return {"": out_features}
    if not isinstance(split, Mapping):
        split = dict.fromkeys(split, out_features // max(len(split), 1))
    found = {f"{name.rstrip('_')}_": size for name, size in split.items()}
    if sum(found.values()) != out_features or len(found) != len(split):
        raise ValueError(
            f"parameters_split {dict(split)} does not add up to out_features {out_features}: give names whose number "
            f"divides out_features, or sizes whose sum is out_features"
        )
    return found


def joined(results: Any, count: int) -> Any:
    """Concatenate the results of a layer with `count` weights along features: the ys and, with return_bias, the biases. Other
    results are returned unchanged."""
    if count == 1:
        return results
    if not isinstance(results[0], tuple):
        return torch.cat(results, dim=-1)
    ys, *rest = results
    biases, others = rest[:count], rest[count:]
    return (torch.cat(ys, dim=-1), *([torch.cat(biases, dim=-1)] if biases else []), *others)


def on_tokens(forward: Callable[[Any], Any], x: Any, sharded: bool) -> Any:
    """Call `forward` with x, in the layout that layers of dlp expect.

    If `sharded`, a 3-D x [S / tp, B, K] is TE's token shard of this rank. x is reshaped to [(S / tp) * B, K], and 2-D results
    are reshaped to [S / tp, B, ...]."""
    if not sharded or not isinstance(x, Tensor) or x.dim() != 3:
        return forward(x)
    batch, results = x.shape[1], forward(x.flatten(0, 1))
    if isinstance(results, tuple):
        return tuple(each.unflatten(0, (-1, batch)) if each.dim() == 2 else each for each in results)
    return results.unflatten(0, (-1, batch))


def normal(weight: Tensor) -> None:
    """Fill a weight with TE's default initial values."""
    nn.init.normal_(weight, std=0.023)


def _drawn_as_in_te(options: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """Return `options` with TE's default for each of the init methods `names` that is missing or None."""
    return {**options, **{name: options.get(name) or normal for name in names}}


def _sharded(options: Mapping[str, Any]) -> bool:
    """Whether these layer options turn on sequence parallelism over a tp group."""
    return bool(options.get("sequence_parallel")) and options.get("tp_group") is not None


def _lacks_bias(options: Mapping[str, Any]) -> bool:
    """Whether these layer options ask for the bias of a layer without bias."""
    return bool(options.get("return_bias")) and not options.get("bias", True)


class _Module(nn.Module):
    """Base class with the method `backward_dw` of TE's modules.

    lacks_bias   whether forward returns None for the bias: return_bias=True without a bias
    """

    lacks_bias = False

    def with_bias(self, results: Any) -> Any:
        """Return the results of forward, with None in place of a missing bias (`lacks_bias`)."""
        if not self.lacks_bias:
            return results
        y, *others = results if isinstance(results, tuple) else (results,)
        return (y, None, *others)

    def backward_dw(self) -> None:
        """Compute the delayed weight gradients (delay_wgrad_compute=True)."""
        backward_dw(self)


class Linear(_Module, SplitLinear):
    """te.Linear: y = x @ weight.T + bias.

    Args:
        in_features: K, the last dimension of x.
        out_features: N, the last dimension of y.
        bias: whether the layer has a bias.
        parallel_mode: how `tp_group` shards the weight: "column" or "row"; None: not sharded.
        parameters_split: see `SplitLinear`.
        return_bias: True: return (y without bias, bias); (y, None) without a bias.
        options: tp_group, sequence_parallel, recipe, overlap, device, params_dtype, delay_wgrad_compute, init_method (default:
            normally distributed with standard deviation 0.023), name, save_original_input.

    Shape:
        - x: [..., in_features]; y: [..., out_features]
        - with sequence_parallel, tp shards the first dimension of the layout [S, B, ...]

    Raises:
        TypeError: for an argument of TE without counterpart; the message names the alternative.

    Example:
        >>> Linear(64, 32, params_dtype=torch.bfloat16).weight.dtype
        torch.bfloat16
    """

    def __init__(
        self, in_features: int, out_features: int, *, bias: bool = True, parallel_mode: str | None = None,
        parameters_split: Split = None, return_bias: bool = False, **options: Any,
    ) -> None:  # fmt: skip
        options = own_options("te.Linear", "module", options, Linear)
        super().__init__(
            in_features, out_features, bias, parameters_split=parameters_split, return_bias=return_bias,
            **linear_options(parallel_mode, _drawn_as_in_te(options, "init_method")),
        )  # fmt: skip
        self._on_shards, self.lacks_bias = _sharded(options), return_bias and not bias

    def forward(  # type: ignore[override]
        self, inp: Any, is_first_microbatch: bool | None = None, fp8_output: bool = False, fp8_grad: bool = False
    ) -> Any:
        """Run the layer.

        is_first_microbatch      without effect, since after `dlp.attach` weights are cast once per optimizer step
        fp8_output               return y quantized, by the quantizers of x in the recipe
        fp8_grad                 return dx quantized, by the quantizers of dy in the recipe
        """
        refuse("te.Linear.forward", FORWARD, {"is_first_microbatch": is_first_microbatch}, ())
        if not (fp8_output or fp8_grad):
            return self.with_bias(
                on_tokens(
                    lambda x: joined(super(Linear, self).forward(x), len(self.core.members)), inp, self._on_shards
                )
            )
        fusers = vars(self).setdefault("_handing", {})
        key = bool(fp8_output), bool(fp8_grad)
        if key not in fusers:
            if fp8_output and len(self.core.members) > 1:
                raise ValueError(
                    "te.Linear: fp8_output is not supported with parameters_split, which returns several tensors: "
                    "leave one of the two out"
                )
            before, behind = [HandOver(self, "backward")] * fp8_grad, [HandOver(self, "forward")] * fp8_output
            fusers[key] = OperationFuser([*before, self, *behind])
        return self.with_bias(joined(fusers[key](inp), len(self.core.members)))

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in super().__getstate__().items() if name != "_handing"}


class LayerNormLinear(_Module, ops.LayerNormLinear):
    """te.LayerNormLinear: `ops.LayerNormLinear` with parameters_split and fp8_output."""

    def __init__(
        self, in_features: int, out_features: int, eps: float = 1e-5, *, parameters_split: Split = None, **options: Any
    ) -> None:
        vars(self)["make_linear"] = partial(SplitLinear, parameters_split=parameters_split)
        super().__init__(in_features, out_features, eps, **_drawn_as_in_te(options, "init_method"))
        self._on_shards, self.lacks_bias = _sharded(options), _lacks_bias(options)

    def te_names(self, fused: bool = False) -> TeNames:
        linear = str(1 + self.returns_norm)
        norm = {name: each for name, each in super().te_names(fused).items() if name.startswith("layer_norm_")}
        return norm | {name: Joined((f"{linear}.{name}",)) for name, _ in self[-1].named_parameters()}

    def forward(  # type: ignore[override]
        self, inp: Any, is_first_microbatch: bool | None = None, fp8_output: bool = False, fp8_grad: bool = False
    ) -> Any:
        """Run the layer. fp8_output: return y quantized, by the quantizers of x in the recipe of the linear."""
        refuse(
            "te.LayerNormLinear.forward", FORWARD,
            {"is_first_microbatch": is_first_microbatch, "fp8_grad": fp8_grad}, ("fp8_output",),
        )  # fmt: skip
        linear: Any = self[-1]
        count = len(linear.core.members)
        if not fp8_output:
            return self.with_bias(
                on_tokens(lambda x: joined(super(LayerNormLinear, self).forward(x), count), inp, self._on_shards)
            )
        if count > 1 or self.returns_norm or linear.core.bias_apart:
            raise ValueError(
                "te.LayerNormLinear: fp8_output returns only y: leave parameters_split, return_bias and "
                "return_layernorm_output out"
            )
        if "_handing" not in vars(self):
            vars(self)["_handing"] = ops.Sequential(*self, HandOver(linear, "forward"))
        return vars(self)["_handing"](inp)


class LayerNormMLP(_Module, ops.LayerNormMLP):
    """te.LayerNormMLP: `ops.LayerNormMLP` with TE's arguments of forward."""

    def __init__(self, hidden_size: int, ffn_hidden_size: int, eps: float = 1e-5, **options: Any) -> None:
        super().__init__(
            hidden_size, ffn_hidden_size, eps, **_drawn_as_in_te(options, "init_method", "output_layer_init_method")
        )
        self._on_shards, self.lacks_bias = _sharded(options), _lacks_bias(options)

    def forward(self, inp: Any, is_first_microbatch: bool | None = None, **options: Any) -> Any:  # type: ignore[override]
        given = {"is_first_microbatch": is_first_microbatch, **options}
        refuse("te.LayerNormMLP.forward", FORWARD, given, ())
        return self.with_bias(on_tokens(super().forward, inp, self._on_shards))


class TransformerLayer(_Module, ops.TransformerLayer):
    """te.TransformerLayer: `ops.TransformerLayer` with TE's defaults: layout [S, B, H], and dropout probabilities of 0.1."""

    def __init__(
        self, hidden_size: int, ffn_hidden_size: int, num_attention_heads: int, num_gqa_groups: int | None = None,
        layernorm_epsilon: float = 1e-5, hidden_dropout: float = 0.1, attention_dropout: float = 0.1, *,
        attn_input_format: str = "sbhd", **options: Any,
    ) -> None:  # fmt: skip
        super().__init__(
            hidden_size, ffn_hidden_size, num_attention_heads, num_gqa_groups, layernorm_epsilon=layernorm_epsilon,
            hidden_dropout=hidden_dropout, attention_dropout=attention_dropout, attn_input_format=attn_input_format,
            **_drawn_as_in_te(options, "init_method", "output_layer_init_method"),
        )  # fmt: skip
        self._on_shards = _sharded(options)
        if self._on_shards and attn_input_format != "sbhd":
            raise ValueError(
                f"te.TransformerLayer: sequence_parallel shards the first dimension, which must be the sequence; got "
                f"attn_input_format {attn_input_format!r}: pass sbhd"
            )

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None, **options: Any) -> Tensor:
        """Run the layer on [S, B, H], or with sequence_parallel on this rank's shard [S / tp, B, H]. See
        `ops.TransformerLayer.forward`."""
        if self._on_shards and hidden_states.dim() == 3:
            options["batch"] = hidden_states.shape[1]
        run = partial(super().forward, attention_mask=attention_mask, **options)
        out: Tensor = on_tokens(run, hidden_states, self._on_shards)
        return out
