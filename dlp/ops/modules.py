"""LayerNormLinear and LayerNormMLP, built from ops, with the names and keywords of `transformer_engine.pytorch`.

Both are subclasses of `Sequential`: their ops are fused, and parameters are named as in a `Sequential`. `te_names` maps the
names of Transformer Engine to these names (`dlp.ops.te_names`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from dlp.ops.basic.activations import (
    GEGLU,
    GELU,
    GLU,
    QGEGLU,
    QGELU,
    ClampedSwiGLU,
    ReGLU,
    ReLU,
    SiLU,
    SReGLU,
    SReLU,
    SwiGLU,
)
from dlp.ops.basic.arithmetic import MakeExtraOutput
from dlp.ops.basic.norms import LayerNorm, RMSNorm
from dlp.ops.linear import MODES, Linear
from dlp.ops.sequential import Sequential
from dlp.ops.te_names import TeNames, names_of
from dlp.ops.values import Tensors
from dlp.te_arguments import ARGUMENTS, keywords_of, refuse

NORMS = {"LayerNorm": LayerNorm, "RMSNorm": RMSNorm}
ACTIVATIONS = {
    "gelu": GELU, "qgelu": QGELU, "relu": ReLU, "silu": SiLU, "srelu": SReLU, "geglu": GEGLU, "qgeglu": QGEGLU,
    "reglu": ReGLU, "sreglu": SReGLU, "swiglu": SwiGLU, "glu": GLU, "clamped_swiglu": ClampedSwiGLU,
}  # fmt: skip
GATES = (GEGLU, QGEGLU, ReGLU, SReGLU, SwiGLU, GLU, ClampedSwiGLU)
SAME = ("recipe", "overlap", "device", "init_method", "name", "save_original_input")  # options passed on to `Linear`
OPTIONS = ("tp_group", "tp_size", "sequence_parallel", "params_dtype", "delay_wgrad_compute", *SAME)


def _chosen(what: str, table: dict[str, Any], name: str) -> Any:
    """Return the class of this name. Raises ValueError for a name that is not in the table. what: kind of class, for the
    message."""
    if name not in table:
        raise ValueError(f"unknown {what} {name!r:.60}: choose from {', '.join(table)}")
    return table[name]


def own_options(layer: str, family: str, options: dict[str, Any], *classes: Any) -> dict[str, Any]:
    """Return the entries of `options` that are supported (`OPTIONS`). Raises TypeError for other entries; the message lists the
    keywords of the constructors of `classes`, and `OPTIONS`."""
    others = {name: value for name, value in options.items() if name not in OPTIONS}
    named = (name for each in classes for name in keywords_of(each.__init__))
    refuse(layer, ARGUMENTS[family], others, dict.fromkeys((*named, *OPTIONS)))
    return {name: value for name, value in options.items() if name in OPTIONS}


def linear_options(mode: str | None, options: dict[str, Any]) -> dict[str, Any]:
    """Translate `options` of Transformer Engine and a parallel mode to keywords of `Linear`.

    Raises ValueError for an unknown mode, for tp_group or sequence_parallel without a mode, and for a tp_size that is neither 1
    nor the size of tp_group.
    """
    keywords: dict[str, Any] = {name: options[name] for name in SAME if name in options}
    if options.get("delay_wgrad_compute"):
        keywords["delay_wgrad"] = True
    if options.get("params_dtype") is not None:
        keywords["dtype"] = options["params_dtype"]
    group = options.get("tp_group")
    if mode not in MODES:
        raise ValueError(f"parallel_mode must be one of {MODES}; got {mode!r}")
    if mode is None and (group is not None or options.get("sequence_parallel")):
        raise ValueError(
            "tp_group and sequence_parallel have no effect without a mode: set parallel_mode, or set_parallel_mode=True"
        )
    if mode is None:
        return keywords
    size = options.get("tp_size", 1)
    if group is None:
        if size not in (1, None):
            raise ValueError(
                f"tp_size is {size}, but tp_group is None, and a group cannot be set later: pass tp_group to the constructor"
            )
        return keywords
    if size not in (1, None, group.size()):
        raise ValueError(f"tp_size is {size}, but tp_group has {group.size()} ranks: leave tp_size out")
    parallel = {"tensor_parallel_mode": mode, "tensor_parallel_group": group}
    return keywords | parallel | {"sequence_parallel": options.get("sequence_parallel", False)}


def _norm(normalization: str, size: int, eps: float, zero_centered_gamma: bool, options: dict[str, Any]) -> nn.Module:
    own = {"device": options.get("device"), "dtype": options.get("params_dtype")}
    norm: nn.Module = _chosen("normalization", NORMS, normalization)(
        size, eps=eps, zero_centered_gamma=zero_centered_gamma, **own
    )
    return norm


class _WithNorm(Sequential):
    """A Sequential that begins with a norm. returns_norm: whether forward also returns norm(x), as the last result."""

    returns_norm = False

    def forward(self, x: Tensors, *extra_inputs: Tensor) -> Tensors:
        results = super().forward(x, *extra_inputs)
        if not self.returns_norm:
            return results
        y, normed, *biases = results
        return (y, *biases, normed)


class LayerNormLinear(_WithNorm):
    """Compute Linear(norm(x)), with the names and keywords of Transformer Engine.

    Args:
        in_features: size of the last dimension of x.
        out_features: size of the last dimension of y; a tuple creates siblings.
        eps: number that the norm adds to the variance or the mean square.
        bias: whether the linear has a bias.
        normalization: "LayerNorm" or "RMSNorm".
        zero_centered_gamma: multiply by 1 + weight in the norm.
        parallel_mode: "column": `tp_group` shards out_features; "row": it shards in_features; None: no sharding.
        return_bias: return the bias as a further result, one for each sibling, instead of adding it.
        return_layernorm_output: return norm(x) as the last result.
        **options: tp_group, sequence_parallel, recipe, overlap, device, params_dtype, delay_wgrad_compute, init_method,
            name, save_original_input.

    Shape:
        - x: [..., in_features]
        - y: [..., out_features]

    Examples:
        >>> ops.LayerNormLinear(64, 128, recipe="fp8_current")(torch.randn(16, 64)).shape
        torch.Size([16, 128])
    """

    def __init__(  # noqa: PLR0913 (the parameters of the module of this name)
        self, in_features: int, out_features: int | tuple[int, ...], eps: float = 1e-5, *, bias: bool = True,
        normalization: str = "LayerNorm", zero_centered_gamma: bool = False, parallel_mode: str | None = None,
        return_bias: bool = False, return_layernorm_output: bool = False, **options: Any,
    ) -> None:  # fmt: skip
        options = own_options(type(self).__name__, "module", options, type(self), LayerNormLinear)
        linear = self.make_linear(
            in_features, out_features, bias, return_bias=return_bias, **linear_options(parallel_mode, options)
        )
        norm = _norm(normalization, in_features, eps, zero_centered_gamma, options)
        super().__init__(norm, *([MakeExtraOutput()] if return_layernorm_output else []), linear)
        self.returns_norm = return_layernorm_output

    make_linear: Callable[..., Linear] = Linear  # the class of the linear

    def te_names(self, fused: bool = False) -> TeNames:
        return names_of(self, "0", "layer_norm_") | names_of(self, str(1 + self.returns_norm), "")


class LayerNormMLP(_WithNorm):
    """Compute Linear(act(Linear(norm(x)))), with the names and keywords of Transformer Engine.

    With a gated activation such as "swiglu" the first linear consists of two siblings of `ffn_hidden_size` features each.

    Args:
        hidden_size: size of the last dimension of x and y.
        ffn_hidden_size: number of features between the two linears.
        eps: number that the norm adds to the variance or the mean square.
        bias: whether the linears have biases.
        normalization: "LayerNorm" or "RMSNorm".
        activation: "gelu", "qgelu", "relu", "silu", "srelu", "geglu", "qgeglu", "reglu", "sreglu", "swiglu", "glu" or
            "clamped_swiglu".
        activation_params: keywords of the activation, such as `limit` of "clamped_swiglu".
        zero_centered_gamma: multiply by 1 + weight in the norm.
        set_parallel_mode: make the first linear column-parallel and the second row-parallel over `tp_group`.
        return_bias: return the bias of the second linear as a further result instead of adding it.
        return_layernorm_output: return norm(x) as the last result.
        output_layer_init_method: init_method of the second linear; None: init_method of the first linear.
        **options: tp_group, sequence_parallel, recipe, overlap, device, params_dtype, delay_wgrad_compute, init_method,
            name, save_original_input.

    Shape:
        - x, y: [..., hidden_size]

    Examples:
        >>> ops.LayerNormMLP(64, 128, activation="swiglu", recipe="fp8_current")(torch.randn(16, 64)).shape
        torch.Size([16, 64])
    """

    def __init__(  # noqa: PLR0913 (the parameters of the module of this name)
        self, hidden_size: int, ffn_hidden_size: int, eps: float = 1e-5, *, bias: bool = True, normalization: str = "LayerNorm",
        activation: str = "gelu", activation_params: Mapping[str, float] | None = None, zero_centered_gamma: bool = False,
        set_parallel_mode: bool = False, return_bias: bool = False, return_layernorm_output: bool = False,
        output_layer_init_method: Callable[[Tensor], Any] | None = None, **options: Any,
    ) -> None:  # fmt: skip
        options = own_options(type(self).__name__, "module", options, type(self), LayerNormMLP)
        first, second = (
            {**options, "name": f"{name}.{part}"} if (name := options.get("name")) else options
            for part in ("fc1", "fc2")
        )
        if output_layer_init_method is not None:
            second = second | {"init_method": output_layer_init_method}
        act = _chosen("activation", ACTIVATIONS, activation)
        wide: Any = (ffn_hidden_size, ffn_hidden_size) if act in GATES else ffn_hidden_size
        column, row = ("column", "row") if set_parallel_mode else (None, None)
        super().__init__(
            _norm(normalization, hidden_size, eps, zero_centered_gamma, options),
            *([MakeExtraOutput()] if return_layernorm_output else []),
            Linear(hidden_size, wide, bias, **linear_options(column, first)), act(**(activation_params or {})),
            Linear(ffn_hidden_size, hidden_size, bias, return_bias=return_bias, **linear_options(row, second)),
        )  # fmt: skip
        self.returns_norm = return_layernorm_output

    def te_names(self, fused: bool = False) -> TeNames:
        first = 1 + self.returns_norm
        linears = names_of(self, str(first), "fc1_") | names_of(self, str(first + 2), "fc2_")
        return names_of(self, "0", "layer_norm_") | linears
