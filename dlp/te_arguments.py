"""Arguments of Transformer Engine (TE) that layers of dlp do not have, with advice for the error message.

    ARGUMENTS        family of layers ("layer", "op", "module", "attention", "transformer") -> arguments of TE's constructors
    FORWARD          arguments of TE's `forward`
    INITIALIZE_UB    arguments of TE's `initialize_ub`

A layer passes keywords that its signature does not name to `refuse`. `docs/from-transformer-engine.md` has a row for each
entry; tests compare the page with these tables.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple


class Argument(NamedTuple):
    """A TE argument that a layer does not have.

    sentence   advice in the imperative, for the error message
    neutral    accepted values, which do not change the layer; None: every value is accepted
    """

    sentence: str
    neutral: Collection[Any] | None = ()


_OFF, _UNSET = (False,), (None,)
_OVERLAP = 'pass overlap="auto", the default, or a strategy per GEMM, such as overlap={"fprop": "chunked"}'
_BULK = "leave the argument out: backward always overlaps a gather or a reduction with the other GEMM"
_RANDOM = "leave the argument out, and give the ranks of a tp group equal seeds, or different seeds under sequence parallelism"
_EVERY: dict[str, Argument] = {
    "fuse_wgrad_accumulation": Argument('pass main_grads="main_grad" to dlp.attach, which covers all layers', _OFF),
    "tp_size": Argument("leave the argument out: the group determines the size", (1, None)),
    "get_rng_state_tracker": Argument(_RANDOM, _UNSET),
    "rng_tracker_name": Argument(_RANDOM, _UNSET),
    "ub_overlap_ag": Argument(_OVERLAP, _OFF),
    "ub_overlap_rs": Argument(_OVERLAP, _OFF),
    "ub_overlap_rs_dgrad": Argument(_OVERLAP, _OFF),
    "ub_bulk_dgrad": Argument(_BULK, _OFF),
    "ub_bulk_wgrad": Argument(_BULK, _OFF),
    "ub_name": Argument("leave the argument out: buffers have no names", None),
    "symmetric_ar_type": Argument('pass transport="mapped" to dlp.build_mesh, and the mesh as the group', _UNSET),
}
_LAYER = _EVERY | {
    "tp_group": Argument("pass tp=, a mesh axis such as mesh['tp'] or a process group", _UNSET),
    "parallel_mode": Argument("construct dlp.ColumnParallelLinear or dlp.RowParallelLinear", _UNSET),
    "params_dtype": Argument("pass dtype=", _UNSET),
    "parameters_split": Argument("pass a tuple of sizes as out_features, or construct dlp.te.Linear", _UNSET),
    "delay_wgrad_compute": Argument("pass delay_wgrad=True, and call dlp.backward_dw(model) after backward", _OFF),
}
_OP = _LAYER | {
    "tp_group": Argument("pass tensor_parallel_group=", _UNSET),
    "parallel_mode": Argument("pass tensor_parallel_mode=", _UNSET),
    "accumulate_into_main_grad": Argument('pass main_grads="main_grad" to dlp.attach, which covers all layers', _OFF),
    "userbuffers_options": Argument(_OVERLAP, _UNSET),
    "rng_state_tracker_function": Argument(_RANDOM, _UNSET),
}
_MODULE = {name: each for name, each in _EVERY.items() if name != "tp_size"} | {
    "delay_wgrad": Argument("pass delay_wgrad_compute=True", _OFF),
    "dtype": Argument("pass params_dtype=", _UNSET),
    "tp": Argument("pass tp_group=", _UNSET),
    "return_layernorm_output_gathered": Argument(
        "pass return_layernorm_output=True, and gather with dlp.gather_tokens", _OFF
    ),
    "checkpoint": Argument("call torch.utils.checkpoint.checkpoint(module, x, use_reentrant=False)", _OFF),
    "seq_length": Argument("leave the argument out: no kernel is warmed up for a sequence length", None),
    "micro_batch_size": Argument("leave the argument out: no kernel is warmed up for a batch size", None),
}
_SOFTCAP = "call torch.nn.attention.flex_attention with a score_mod that computes softcap * tanh(score / softcap)"
_ATTENTION = {
    "tp_size": Argument("pass num_attention_heads and num_gqa_groups of one rank", (1, None)),
    "tp_group": Argument("pass num_attention_heads and num_gqa_groups of one rank", _UNSET),
    "sequence_parallel": Argument("leave the argument out: attention reads whole sequences", _OFF),
    "get_rng_state_tracker": _EVERY["get_rng_state_tracker"],
    "layer_number": Argument("leave the argument out: scores are not scaled by layer", None),
    "attention_type": Argument('leave the argument out: "self" and "cross" compute the same', ("self", "cross")),
    "cp_group": Argument("leave the argument out: attention over cp is dlp.Context.attention", _UNSET),
    "cp_global_ranks": Argument("leave the argument out: attention over cp is dlp.Context.attention", _UNSET),
    "cp_stream": Argument("leave the argument out: attention over cp is dlp.Context.attention", _UNSET),
    "cp_comm_type": Argument("leave the argument out: attention over cp is dlp.Context.attention", ("p2p",)),
    "softmax_type": Argument('leave the argument out: softmax is "vanilla"', ("vanilla",)),
    "softcap": Argument(_SOFTCAP, (None, 0, 0.0)),
    "return_max_logit": Argument("leave the argument out: torch's attention does not return the largest logit", _OFF),
    "name": Argument("leave the argument out: attention has no parameters to name", None),
}
_LAYER_OF_TRANSFORMER = _MODULE | {
    "layer_number": _ATTENTION["layer_number"],
    "apply_residual_connection_post_layernorm": Argument(
        "build the layer from dlp.te.LayerNormLinear(return_layernorm_output=True) and dlp.te.LayerNormMLP", _OFF
    ),
    "parallel_attention_mlp": Argument("build the layer from dlp.te.LayerNormLinear and dlp.te.LayerNormMLP", _OFF),
    "layer_type": Argument('build a decoder with cross-attention from dlp.te.DotProductAttention; "encoder" is accepted',
                           ("encoder",)),
    "enc_dec_attn_mask_type": Argument("leave the argument out: there is no cross-attention", None),
    "enc_dec_window_size": Argument("leave the argument out: there is no cross-attention", None),
    "enc_dec_bottom_right_diagonal": Argument("leave the argument out: there is no cross-attention", None),
    "drop_path_rate": Argument("drop whole samples around the layer, in the model", (0, 0.0)),
    "fuse_qkv_params": Argument(
        "leave the argument out: q, k and v are siblings, one GEMM of three parameters; dlp.ops.to_te(fuse_qkv_params=True) "
        "writes one parameter", _OFF,
    ),
    "qkv_weight_interleaved": Argument("pass the argument to dlp.ops.from_te and dlp.ops.to_te", (True,)),
    "ub_tp_comm_overlap": Argument(_OVERLAP, _OFF),
    "ub_overlap_ag": Argument(_OVERLAP, None),  # any value: TE ignores ub_* unless ub_tp_comm_overlap is set
    "ub_overlap_rs": Argument(_OVERLAP, None),
    "ub_overlap_rs_dgrad": Argument(_OVERLAP, None),
    "ub_bulk_dgrad": Argument(_BULK, None),
    "ub_bulk_wgrad": Argument(_BULK, None),
    "softmax_type": _ATTENTION["softmax_type"],
    "softcap": _ATTENTION["softcap"],
}  # fmt: skip
ARGUMENTS: dict[str, dict[str, Argument]] = {
    "layer": _LAYER, "op": _OP, "module": _MODULE, "attention": _ATTENTION, "transformer": _LAYER_OF_TRANSFORMER,
}  # fmt: skip

_PACKED = "pad the sequences and pass attention_mask: packed sequences (thd) are not supported"
_CROSS = "attend to another sequence with dlp.te.DotProductAttention: there is no cross-attention"
_SCORE = "pass core_attention_bias, or call torch.nn.attention.flex_attention"
FORWARD: dict[str, Argument] = {
    "is_first_microbatch": Argument(
        "leave the argument out: after dlp.attach weights are cast once per optimizer step", (None, True, False)
    ),
    "fp8_output": Argument("leave the argument out: the output of this layer is a sum in high precision", (False, None)),
    "fp8_grad": Argument("leave the argument out: the preceding norm returns the gradient in high precision", (False, None)),
    "encoder_output": Argument(_CROSS, _UNSET),
    "enc_dec_attn_mask": Argument(_CROSS, _UNSET),
    "enc_dec_attn_mask_type": Argument(_CROSS, _UNSET),
    "enc_dec_window_size": Argument(_CROSS, _UNSET),
    "enc_dec_bottom_right_diagonal": Argument(_CROSS, _UNSET),
    "inference_params": Argument("generate with launch.generate, which has a cache of keys and values", _UNSET),
    "alibi_slopes": Argument(
        'pass core_attention_bias_type="post_scale_bias" and the slopes times the distances as core_attention_bias', _UNSET
    ),
    "cu_seqlens_q": Argument(_PACKED, _UNSET),
    "cu_seqlens_kv": Argument(_PACKED, _UNSET),
    "cu_seqlens_q_padded": Argument(_PACKED, _UNSET),
    "cu_seqlens_kv_padded": Argument(_PACKED, _UNSET),
    "max_seqlen_q": Argument(_PACKED, _UNSET),
    "max_seqlen_kv": Argument(_PACKED, _UNSET),
    "pad_between_seqs": Argument(_PACKED, (None, False)),
    "thd_attention_policies": Argument(_PACKED, _UNSET),
    "thd_attention_policy_dispatch": Argument(_PACKED, ("auto",)),
    "softcap": Argument(_SOFTCAP, (None, 0, 0.0)),
    "fast_zero_fill": Argument("leave the argument out: outputs are not filled before attention", None),
    "qkv_format": Argument("pass qkv_format to the constructor", _UNSET),
    "bf16_backward": Argument("leave the argument out: attention runs in the dtype of its inputs", _OFF),
    "num_splits": Argument("leave the argument out: torch chooses the splits", (1, None)),
    "score_mod": Argument(_SCORE, _UNSET),
    "score_mod_bprop": Argument(_SCORE, _UNSET),
    "score_mod_tensors": Argument(_SCORE, _UNSET),
    "score_mod_bprop_tensors": Argument(_SCORE, _UNSET),
    "qkv_layer": Argument("pass query_layer, key_layer and value_layer, such as views of one tensor", _UNSET),
    "kv_layer": Argument("pass key_layer and value_layer, such as views of one tensor", _UNSET),
    "qkv_interleave_dim": Argument("pass query_layer, key_layer and value_layer", (-3,)),
}  # fmt: skip

_SHAPE = "leave the argument out: buffers are allocated at the first call, for the shape of the input"
INITIALIZE_UB: dict[str, Argument] = {
    "shape": Argument(_SHAPE),
    "tp_size": Argument("leave the argument out: the group determines the size"),
    "use_fp8": Argument("leave the argument out: the recipe determines the format of transfers"),
    "quantization_modes": Argument("leave the argument out: the recipe determines the format of transfers"),
    "dtype": Argument(_SHAPE),
    "ub_cfgs": Argument("pass overlap= to each layer, or to the layer groups of dlp.convert"),
    "bootstrap_backend": Argument("leave the argument out: memory is mapped over the process group of the mesh"),
    "with_cublasmp": Argument('pass transport= to dlp.build_mesh: "auto", "mapped" or "nccl"'),
}


def sentences(table: Mapping[str, Argument], given: Iterable[str]) -> str:
    """Return the advice on the arguments `given` as one text: "tp_group: pass tp=...; ..."."""
    return "; ".join(f"{name}: {table[name].sentence}" for name in given)


def refuse(layer: str, table: Mapping[str, Argument], given: Mapping[str, Any], known: Iterable[str]) -> None:
    """Raise TypeError for keywords that the signature of a layer does not name, except for TE arguments with an accepted value
    (`Argument.neutral`).

    Args:
        layer: name of the layer or method, for the message.
        table: TE arguments that the layer does not have.
        given: keywords and their values.
        known: names of the keywords of the layer, for the message.

    Raises:
        TypeError: for a keyword in the table, with the advice, and for an unknown keyword.
    """
    requested = [name for name, value in given.items() if name in table and not _is_neutral(table[name], value)]
    if requested:
        raise TypeError(f"{layer}: {sentences(table, requested)}")
    if unknown := sorted(given.keys() - table.keys()):
        raise TypeError(f"{layer}: unknown option {', '.join(unknown)}; there are {', '.join(known)}")


def _is_neutral(argument: Argument, value: Any) -> bool:
    """Whether a value of a TE argument is accepted."""
    return argument.neutral is None or any(value is each or _equal(value, each) for each in argument.neutral)


def _equal(value: Any, other: Any) -> bool:
    return type(value) is type(other) and bool(value == other)


def keywords_of(function: Callable[..., Any]) -> list[str]:
    """Return the names of the parameters of a constructor or method, without self, in order."""
    code = function.__code__
    return list(code.co_varnames[1 : code.co_argcount + code.co_kwonlyargcount])
