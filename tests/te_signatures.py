"""The arguments of Transformer Engine 2.20.2, by name, in order: constructors, `forward` and `initialize_ub`."""

CONSTRUCTORS = {
    "Linear": (
        "in_features out_features sequence_parallel fuse_wgrad_accumulation tp_group tp_size get_rng_state_tracker "
        "rng_tracker_name init_method bias return_bias params_dtype parallel_mode parameters_split device ub_overlap_ag "
        "ub_overlap_rs ub_overlap_rs_dgrad ub_bulk_dgrad ub_bulk_wgrad ub_name delay_wgrad_compute symmetric_ar_type "
        "save_original_input name"
    ).split(),
    "LayerNormLinear": (
        "in_features out_features eps sequence_parallel fuse_wgrad_accumulation tp_group tp_size get_rng_state_tracker "
        "init_method bias normalization return_bias params_dtype parallel_mode return_layernorm_output "
        "return_layernorm_output_gathered parameters_split zero_centered_gamma device ub_overlap_ag ub_overlap_rs "
        "ub_overlap_rs_dgrad ub_bulk_wgrad ub_bulk_dgrad ub_name delay_wgrad_compute symmetric_ar_type name"
    ).split(),
    "LayerNormMLP": (
        "hidden_size ffn_hidden_size eps sequence_parallel return_bias get_rng_state_tracker tp_group tp_size "
        "init_method bias normalization activation activation_params output_layer_init_method fuse_wgrad_accumulation "
        "params_dtype return_layernorm_output return_layernorm_output_gathered seq_length micro_batch_size "
        "set_parallel_mode zero_centered_gamma device ub_overlap_ag name ub_overlap_rs ub_overlap_rs_dgrad "
        "ub_bulk_dgrad ub_bulk_wgrad delay_wgrad_compute symmetric_ar_type checkpoint"
    ).split(),
    "TransformerLayer": (
        "hidden_size ffn_hidden_size num_attention_heads num_gqa_groups layernorm_epsilon hidden_dropout "
        "attention_dropout init_method output_layer_init_method layer_number kv_channels self_attn_mask_type "
        "window_size bottom_right_diagonal softcap enc_dec_attn_mask_type enc_dec_bottom_right_diagonal enc_dec_window_size "
        "tp_group tp_size params_dtype get_rng_state_tracker fuse_wgrad_accumulation seq_length micro_batch_size "
        "sequence_parallel apply_residual_connection_post_layernorm output_layernorm parallel_attention_mlp layer_type "
        "drop_path_rate set_parallel_mode fuse_qkv_params rotary_pos_interleaved zero_centered_gamma "
        "qkv_weight_interleaved ub_tp_comm_overlap ub_overlap_ag ub_overlap_rs ub_overlap_rs_dgrad ub_bulk_dgrad "
        "ub_bulk_wgrad bias activation activation_params normalization device attn_input_format name qk_norm_type "
        "qk_norm_eps qk_norm_before_rope softmax_type"
    ).split(),
    "DotProductAttention": (
        "num_attention_heads kv_channels num_gqa_groups attention_dropout qkv_format attn_mask_type window_size "
        "bottom_right_diagonal softcap sequence_parallel tp_size get_rng_state_tracker tp_group layer_number attention_type "
        "cp_group cp_global_ranks cp_stream cp_comm_type softmax_scale softmax_type return_max_logit name"
    ).split(),
}  # fmt: skip
FORWARDS = {
    "Linear": (
        "inp is_first_microbatch fp8_output fp8_grad"
    ).split(),
    "LayerNormLinear": (
        "inp is_first_microbatch fp8_output fp8_grad"
    ).split(),
    "LayerNormMLP": (
        "inp is_first_microbatch"
    ).split(),
    "TransformerLayer": (
        "hidden_states attention_mask self_attn_mask_type window_size bottom_right_diagonal encoder_output "
        "enc_dec_attn_mask enc_dec_attn_mask_type enc_dec_window_size enc_dec_bottom_right_diagonal is_first_microbatch "
        "checkpoint_core_attention inference_params rotary_pos_emb core_attention_bias_type core_attention_bias "
        "alibi_slopes cu_seqlens_q cu_seqlens_kv cu_seqlens_q_padded cu_seqlens_kv_padded max_seqlen_q max_seqlen_kv "
        "fast_zero_fill pad_between_seqs thd_attention_policies thd_attention_policy_dispatch softcap"
    ).split(),
    "DotProductAttention": (
        "query_layer key_layer value_layer attention_mask qkv_format cu_seqlens_q cu_seqlens_kv cu_seqlens_q_padded "
        "cu_seqlens_kv_padded max_seqlen_q max_seqlen_kv attn_mask_type window_size bottom_right_diagonal softcap "
        "checkpoint_core_attention core_attention_bias_type core_attention_bias alibi_slopes fast_zero_fill "
        "inference_params pad_between_seqs fp8_output bf16_backward num_splits score_mod score_mod_bprop "
        "score_mod_tensors score_mod_bprop_tensors qkv_layer kv_layer qkv_interleave_dim thd_attention_policies "
        "thd_attention_policy_dispatch"
    ).split(),
}  # fmt: skip
INITIALIZE_UB = "shape tp_size use_fp8 quantization_modes dtype ub_cfgs bootstrap_backend with_cublasmp".split()
