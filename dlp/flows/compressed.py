"""Layout of one linear in compressed-tensors, the file format from which vLLM and transformers read codes.

    format of dlp          tensors, after NAME.                                      scheme (format, strategy)
    fp8 per tensor         weight e4m3 [N, K], weight_scale fp32 [1]                 float-quantized, tensor
    fp8 per row            weight e4m3 [N, K], weight_scale fp32 [N, 1]              float-quantized, channel
    fp8 in 128x128 tiles   weight e4m3 [N, K], weight_scale fp32 [N/128, K/128]      float-quantized, block
    fp8 in blocks of 1x128 weight e4m3 [N, K], weight_scale fp32 [N, K/128]          float-quantized, group
    mxfp8                  weight e4m3 [N, K], weight_scale uint8 [N, K/32]          mxfp8-quantized, group
    nvfp4                  weight_packed uint8 [N, K/2], weight_scale e4m3 [N, K/16],
                           weight_global_scale fp32 [1] = 2688 / amax                nvfp4-pack-quantized, tensor_group
    int8 rows, x in int8   weight int8 [N, K], weight_scale fp32 [N, 1]              int-quantized, channel
    other integers         weight_packed int32 [N, ceil(K * bits / 32)], weight_scale fp32 [N, 1] or [N, K/group],
                           weight_shape int64 [2], weight_zero_point int32           pack-quantized, channel or group
    static x               input_scale fp32 [1]; with zero points also input_zero_point int8 [1]

Codes are copied bit by bit. If a scheme has no entry for x, its format is naive-quantized instead of float-quantized. If the
layout has no tiles (mxfp8, nvfp4), the scales of tiles are repeated for each row. Three numbers are rounded in the layout: the
amax of nvfp4, and the multiplier or the range of a static x. Their exact values are also stored in the header of the
safetensors file, as `float.hex`, so that reading returns the exact scales. In a file of another program there are no exact
values; the static scale of x is then exact within two units in the last place.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from dlp.kernels import ops
from dlp.quant.fp8 import CurrentScaling, Fp8Tensor, static
from dlp.quant.fp8_block import BlockScaling, Fp8Block
from dlp.quant.fp8_rowwise import Fp8Rowwise, RowwiseScaling
from dlp.quant.integers import Int, IntScaling, pack, pack_bits, unpack, unpack_bits
from dlp.quant.mxfp8 import Mxfp8, MxScaling
from dlp.quant.nvfp4 import FACTOR, Nvfp4
from dlp.quant.quantizer import Quantizer, ScaleSlot
from dlp.quant.static import StaticScaling
from dlp.quant.tensor import Format, QuantizedTensor

METHOD = "compressed-tensors"
AMAX, X_SCALE, X_AMAX = EXACT = (
    "weight_amax",
    "x_scale",
    "x_amax",
)  # names of exact numbers in the header of the safetensors file
X_PARTS = "input_scale", "input_zero_point"
NAMES = (
    "weight", "weight_packed", "weight_scale", "weight_global_scale", "weight_shape", "weight_zero_point", *X_PARTS,
)  # fmt: skip
FLOATS = (Fp8Tensor, Fp8Rowwise, Fp8Block)


class Encoded(NamedTuple):
    """Result of `encode` for one linear.

    tensors   tensors of the layout; key: the name after the name of the module, such as "weight_scale"
    exact     exact numbers for the header of the file, fp32 [] or [2]; key: one of `EXACT`
    """

    tensors: dict[str, Tensor]
    exact: dict[str, Tensor]


def encode(
    q: QuantizedTensor, shape: tuple[int, int], activation: Quantizer | None, x_scale: Tensor | None = None
) -> Encoded:  # fmt: skip
    """Convert a quantized weight to the tensors of the layout.

    q           the rowwise operand of w; its rows may be padded
    shape       (N, K) of the weight
    activation  quantizer of x; None: x stays in high precision. The layout of int8 weights depends on it
    x_scale     static scale of x; None: x has no static scale

    Raises ValueError for a format that the layout does not have, and for a padded contraction.
    """
    fmt, (rows, columns) = q.format, shape
    if q.shape[1] != columns:
        raise ValueError(
            f"compressed-tensors has no padding: a contraction of {columns} is not a multiple of {fmt.multiple[1]}, which "
            f"{fmt.name} needs: choose another format, or export the model in high precision"
        )
    _check_format(fmt)
    codes, scale = q.parts[0][:rows], q.parts[1]
    made, exact = dict[str, Tensor](), dict[str, Tensor]()
    if isinstance(fmt, Nvfp4):
        made = {"weight_packed": codes, "weight_scale": _each_row(scale, fmt.block[0], rows)}
        amax = q.parts[2].float()
        made["weight_global_scale"] = torch.where(amax == 0, 1.0, 1 / (amax * FACTOR)).reshape(1)
        exact = {AMAX: amax}
    elif isinstance(fmt, Mxfp8):
        made = {"weight": codes, "weight_scale": _each_row(scale, fmt.block[0], rows)}
    elif isinstance(fmt, Int):
        made = _encode_integers(fmt, codes, scale, q.parts[2:], shape, activation is not None)
    else:
        two_dim = isinstance(fmt, Fp8Block)
        made = {"weight": codes, "weight_scale": scale if two_dim else scale.reshape(-1, 1 if scale.dim() else 1)}
        if isinstance(fmt, Fp8Tensor):
            made["weight_scale"] = scale.reshape(1)
    if x_scale is not None and activation is not None:
        made |= zip(X_PARTS, x_parts(activation, x_scale), strict=False)
        exact[X_AMAX if isinstance(activation, StaticScaling) else X_SCALE] = x_scale.float()
    return Encoded({name: tensor.contiguous() for name, tensor in made.items()}, exact)


def _check_format(fmt: Format) -> None:
    """Raise ValueError for a format that compressed-tensors does not have."""
    known = isinstance(fmt, (*FLOATS, Mxfp8, Nvfp4, Int)) and fmt.element != "e5m2" and not fmt.basis
    if not known:
        raise ValueError(
            f"compressed-tensors has no layout for {fmt.name}; choose fp8_current, fp8_rowwise, fp8_block, mxfp8, nvfp4, int8 "
            f"or integers in groups, or save codes with dlp.quantized_state_dict"
        )


def _each_row(scale: Tensor, block: int, rows: int) -> Tensor:
    """Return one row of scales for each of `rows` rows: repeat the rows of `scale`, each of which belongs to `block` rows of
    codes. They are repeated as bytes, because torch cannot repeat FP8 tensors; the result has the dtype of `scale`."""
    return scale.view(torch.uint8).repeat_interleave(block, 0)[:rows].view(scale.dtype) if block > 1 else scale[:rows]


def _encode_integers(
    fmt: Int, codes: Tensor, scale: Tensor, zero: tuple[Tensor, ...], shape: tuple[int, int], x_in_codes: bool
) -> dict[str, Tensor]:
    """Return the tensors of the layout for an integer format. zero: zero points, if the format has them; x_in_codes: whether x
    is quantized."""
    scales = scale if fmt.group else scale[:, None]
    if _plain_int8(fmt, x_in_codes):
        return {"weight": codes, "weight_scale": scales}
    made = {
        "weight_packed": pack_words(unpack(codes, fmt.bits), fmt.bits), "weight_scale": scales,
        "weight_shape": torch.tensor(shape),
    }  # fmt: skip
    if zero:
        made["weight_zero_point"] = pack_words(zero[0].reshape(scales.shape).t(), fmt.bits).t()
    return made


def _plain_int8(fmt: Int, x_in_codes: bool) -> bool:
    """Whether weights are stored as int8 (int-quantized) and not packed into int32."""
    return fmt.bits == 8 and fmt.symmetric and not fmt.group and x_in_codes


def pack_words(codes: Tensor, bits: int) -> Tensor:
    """Pack signed codes int8 [rows, C] into int32 [rows, ceil(C * bits / 32)]: the bytes of `pack_bits`, zero-padded to a
    multiple of 4 bytes."""
    packed = pack_bits(codes, bits)
    return F.pad(packed, (0, -packed.shape[1] % 4)).view(torch.int32)


def unpack_words(packed: Tensor, bits: int, columns: int) -> Tensor:
    """Unpack codes int8 [rows, columns]; the inverse of `pack_words`."""
    return unpack_bits(packed.contiguous().view(torch.uint8), bits, columns)


def x_parts(activation: Quantizer, slot: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors `X_PARTS` of a static cast of x: scale_inv, fp32 [1]; for integers with zero points also the zero
    point, int8 [1]. slot: range of x if `activation` is a StaticScaling, else the multiplier."""
    if not isinstance(activation, StaticScaling):
        return ((1 / slot).float().reshape(1),)
    row = torch.zeros(1, activation.format.multiple[1], device=slot.device)
    return activation.cast(row, None, slot=ScaleSlot(slot, torch.zeros_like(slot))).parts[1:]


def static_x(
    choices: Sequence[Quantizer], tensors: Mapping[str, Tensor], exact: Mapping[str, Tensor]
) -> tuple[Quantizer, Tensor]:
    """Return the quantizer of a static x, and its static scale.

    choices   quantizers that the scheme in the file may mean (`static_choices`)
    tensors   tensors of the linear
    exact     numbers of the header

    The result is the first of `choices` for which the exact number in the header gives the tensors in the file. If there is no
    such choice, for example because the header has no exact number, the result is the first choice, with a static scale that is
    computed from the tensors.
    """
    stated = [tensors[name].reshape(1) for name in X_PARTS if name in tensors]
    for activation in choices:
        key = X_AMAX if isinstance(activation, StaticScaling) else X_SCALE
        if key in exact and all(map(torch.equal, x_parts(activation, exact[key]), stated)):
            return activation, exact[key]
    activation, scale = choices[0], stated[0].float()
    if not isinstance(activation, StaticScaling):
        return activation, (1 / scale).reshape(())
    if not isinstance(activation.inner, IntScaling):
        return activation, (scale * ops.FP8_MAX[torch.float8_e4m3fn]).reshape(())
    first, last = activation.inner.codes
    if activation.inner.symmetric:
        return activation, (scale * ((last - first) / 2)).reshape(())
    zero = stated[1].float()
    return activation, torch.cat([(last - zero) * scale, (zero - first) * scale])


def decode(tensors: Mapping[str, Tensor], weights: Mapping[str, Any], exact: Mapping[str, Tensor]) -> QuantizedTensor:
    """Convert the tensors of one linear to a quantized weight.

    tensors  tensors of the layout; key: the name after the name of the module
    weights  the table `weights` of the scheme in config.json
    exact    exact numbers of the header, by name; empty if another program wrote the file
    """
    scale, strategy = tensors["weight_scale"], weights["strategy"]
    if weights["type"] == "int":
        return _decode_integers(tensors, weights)
    if "weight_packed" in tensors:
        given = tensors.get("weight_global_scale", torch.ones(1)).float()
        amax = exact[AMAX] if AMAX in exact else (1 / (given * FACTOR)).reshape(())
        return QuantizedTensor(Nvfp4(), (tensors["weight_packed"], scale, amax.to(scale.device)))
    codes = tensors["weight"]
    if scale.dtype == torch.uint8:
        return QuantizedTensor(Mxfp8(), (codes, scale))
    scale = scale.float()
    if strategy == "tensor":
        return QuantizedTensor(Fp8Tensor(), (codes, scale.reshape(())))
    if strategy == "channel":
        return QuantizedTensor(Fp8Rowwise(), (codes, scale.reshape(-1)))
    exact_scales = bool(((scale.view(torch.int32) & 0x7FFFFF) == 0).all())  # powers of two
    return QuantizedTensor(Fp8Block(tile=strategy == "block", power_of_two=exact_scales), (codes, scale))


def _decode_integers(tensors: Mapping[str, Tensor], weights: Mapping[str, Any]) -> QuantizedTensor:
    """Convert the tensors of one linear in an integer format to a quantized weight."""
    bits, group = int(weights["num_bits"]), int(weights.get("group_size") or 0)
    group = 0 if weights["strategy"] == "channel" else group
    fmt, scale = Int(bits, group, bool(weights["symmetric"])), tensors["weight_scale"].float()
    rows = scale.shape[0]
    if "weight_packed" in tensors:
        codes = unpack_words(tensors["weight_packed"], bits, int(tensors["weight_shape"][1]))
    else:
        codes = tensors["weight"]
    parts = [pack(codes, bits), scale if group else scale.reshape(-1)]
    if not fmt.symmetric:
        zero = unpack_words(tensors["weight_zero_point"].t(), bits, rows).t()
        parts.append((zero if group else zero.reshape(-1)).contiguous())
    return QuantizedTensor(fmt, tuple(parts))


# Schemes: the tables of `quantization_config` in config.json, which state how a linear is quantized


def scheme(fmt: Format, activation: Quantizer | None, *, with_scale: bool = False) -> dict[str, Any]:
    """Return the scheme of a linear: an entry of `config_groups` in `quantization_config`, without targets.

    fmt         format of the weight
    activation  quantizer of x; None: x stays in high precision
    with_scale  whether x has a static scale

    Raises ValueError for a static cast of x that compressed-tensors cannot express.
    """
    x = None if activation is None or isinstance(fmt, Nvfp4) else _x_args(activation, with_scale)
    if with_scale and x is None:
        raise ValueError(
            f"compressed-tensors has no static scale of this x for weights of {fmt.name}: save codes with "
            f"dlp.quantized_state_dict, or quantize by fp8_current"
        )
    if isinstance(fmt, Nvfp4):
        weights = _args(4, "float", "tensor_group", group_size=16, scale_dtype="torch.float8_e4m3fn")
        return {"weights": weights, "input_activations": None, "format": "nvfp4-pack-quantized"}
    if isinstance(fmt, Mxfp8):
        weights, layout = _args(8, "float", "group", group_size=32, scale_dtype="torch.uint8"), "mxfp8-quantized"
    elif isinstance(fmt, Int):
        strategy: dict[str, Any] = _group(fmt.group) if fmt.group else {"strategy": "channel"}
        weights = _args(fmt.bits, "int", symmetric=fmt.symmetric, **strategy)
        layout = "int-quantized" if _plain_int8(fmt, activation is not None) else "pack-quantized"
    else:
        how: dict[str, Any] = {"strategy": "tensor" if isinstance(fmt, Fp8Tensor) else "channel"}
        if isinstance(fmt, Fp8Block):
            how = {"strategy": "block", "block_structure": [128, 128]} if fmt.tile else _group(128)
        weights, layout = _args(8, "float", **how), "naive-quantized" if x is None else "float-quantized"
    return {"weights": weights, "input_activations": x, "format": layout}


def _group(size: int) -> dict[str, Any]:
    """Return the entries for scales of groups of `size` elements."""
    return {"strategy": "group", "group_size": size}


def _args(bits: int, kind: str, strategy: str = "tensor", **more: Any) -> dict[str, Any]:
    """Return a table `weights` or `input_activations`. kind: "int" or "float"; more: entries that differ from the defaults."""
    return {
        "num_bits": bits, "type": kind, "symmetric": True, "strategy": strategy, "group_size": None, "dynamic": False, **more,
    }  # fmt: skip


def _x_args(activation: Quantizer, with_scale: bool) -> dict[str, Any] | None:
    """Return the table `input_activations`; None for a cast of x that compressed-tensors cannot express."""
    inner = activation.inner if isinstance(activation, StaticScaling) else activation
    how: dict[str, Any] = {"strategy": "tensor" if with_scale else "token", "dynamic": not with_scale}
    if isinstance(inner, IntScaling):
        return _args(inner.bits, "int", symmetric=inner.symmetric, **how)
    if with_scale:
        return None if inner.format.element == "e5m2" else _args(8, "float")
    if isinstance(activation, MxScaling):
        return _args(8, "float", dynamic=True, scale_dtype="torch.uint8", **_group(32))
    if isinstance(activation, BlockScaling):
        return None if activation.tile else _args(8, "float", dynamic=True, **_group(128))
    if isinstance(activation, RowwiseScaling):
        return _args(8, "float", "token", dynamic=True)
    return _args(8, "float", dynamic=True) if isinstance(activation.format, Fp8Tensor) else None


def quantization_config(schemes: Mapping[str, Mapping[str, Any]], linears: list[str]) -> dict[str, Any]:
    """Return `quantization_config` for config.json.

    schemes  scheme of each quantized linear, by name
    linears  names of all linears; those without a scheme are listed in `ignore`
    """
    groups: list[tuple[Mapping[str, Any], list[str]]] = []
    for name, each in schemes.items():
        for known, names in groups:
            if known == each:
                names.append(name)
                break
        else:
            groups.append((each, [name]))
    one = len(groups) == 1
    tables = {
        f"group_{i}": {"targets": ["Linear"] if one else names, "output_activations": None, **each}
        for i, (each, names) in enumerate(groups)
    }
    layouts = sorted({str(each["format"]) for each, _ in groups})
    return {
        "quant_method": METHOD, "format": layouts[0] if len(layouts) == 1 else "mixed-precision",
        "quantization_status": "compressed", "global_compression_ratio": None, "kv_cache_scheme": None,
        "ignore": [name for name in linears if name not in schemes], "config_groups": tables,
    }  # fmt: skip


def scheme_of(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return the entry of `config_groups` that applies to a linear: the first entry with the name of the linear or a pattern
    (`re:`) that matches the name; if there is none, the last entry with the class "Linear".

    Raises ValueError for a linear that no entry matches.
    """
    found: Mapping[str, Any] | None = None
    for group in config["config_groups"].values():
        for target in group["targets"]:
            if target == name or (target.startswith("re:") and re.match(target[3:], name)):
                chosen: Mapping[str, Any] = group
                return chosen
            found = group if target == "Linear" else found
    if found is None:
        raise ValueError(
            f"{name} has codes, but no entry of config_groups in quantization_config matches this layer; "
            f"fetch config.json again"
        )
    return found


def static_choices(x: Mapping[str, Any], weights: Mapping[str, Any]) -> list[Quantizer]:
    """Return the static quantizers that the table `input_activations` x may mean; `static_x` chooses one of them. weights: the
    table `weights` of the same scheme."""
    if x["type"] == "int":
        symmetric = bool(x["symmetric"])
        narrow = (False, True) if symmetric else (False,)
        return [StaticScaling(IntScaling(int(x["num_bits"]), symmetric=symmetric, narrow=each)) for each in narrow]
    rows = StaticScaling(RowwiseScaling(power_of_two=False))  # also reproduces scales that are powers of two
    return [rows, static()] if weights["strategy"] == "channel" else [static(), rows]


def is_stated(x: Mapping[str, Any], activation: Quantizer) -> bool:
    """Whether a static quantizer matches the table `input_activations` x in bits, element type and zero points."""
    asked = _x_args(activation, True)
    return asked is not None and all(x[key] == asked[key] for key in ("num_bits", "type", "symmetric"))


def activation_of(x: Mapping[str, Any] | None) -> Quantizer | None:
    """Return the quantizer for the table `input_activations` x, with default options; None: x is not quantized, or `dynamic` is
    "local". The quantizer computes the scale in each forward, also if the table states a static scale (for which see
    `static_choices`)."""
    if x is None or x["dynamic"] == "local":
        return None
    if x["type"] == "int":
        return IntScaling(int(x["num_bits"]), symmetric=bool(x["symmetric"]), narrow=bool(x["symmetric"]))
    if x.get("group_size") == 32:
        return MxScaling()
    by_strategy: dict[str, Quantizer] = {
        "group": BlockScaling(), "token": RowwiseScaling(), "tensor": CurrentScaling(),
    }  # fmt: skip
    return by_strategy[x["strategy"]]
