"""Name of the test of each row of docs/from-transformer-engine.md, by section and first cell of the row. tests/test_te.py
reads and tests the page's tables of arguments and of missing names, which are not listed here.
"""

_TE, _RECIPES, _OPS, _CUSTOM = "test_te.py::", "test_recipes.py::", "test_ops", "multigpu/test_custom_recipe.py::"
_OPTIONS = f"{_TE}test_recipes_have_the_options_of_the_same_names"
_EQUAL = f"{_TE}test_recipes_of_the_page_are_equal"
_FORMATS = f"{_RECIPES}test_a_users_format_decodes_or_brings_its_own_gemm"
_ROLES = f"{_CUSTOM}test_a_factory_is_asked_for_every_role_and_told_the_layer"

ROWS = {
    "Recipes": {
        "`DelayedScaling()`": _EQUAL,
        "`Float8CurrentScaling()`": _EQUAL,
        "`Float8BlockScaling()`": _EQUAL,
        "`MXFP8BlockScaling()`": _EQUAL,
        "`NVFP4BlockScaling()`": _EQUAL,
        "`CustomRecipe(qfactory)`": f"{_RECIPES}test_a_custom_recipe_asks_once_per_role",
        "`autocast(enabled=False)`, no FP8":
            "multigpu/test_autocast.py::test_regions_nest_and_the_innermost_decides",
        "–": f"{_RECIPES}test_every_recipe_loads_by_name_and_is_a_value",
        "`fp8_format=Format.HYBRID` / `Format.E4M3`": f"{_RECIPES}test_fp8_format_sets_the_elements",
        "`margin`, `amax_history_len`, `reduce_amax`": _OPTIONS,
        "`amax_compute_algo`": "multigpu/test_delayed.py::test_a_callable_algorithm_and_most_recent",
        "`scaling_factor_compute_algo`": _OPTIONS,
        "`fp8_quant_fwd_inp`, `_fwd_weight`, `_bwd_grad`: `QParams(power_2_scale, amax_epsilon)`": _OPTIONS,
        "`fp8_gemm_fprop`, `_dgrad`, `_wgrad`: `MMParams(use_split_accumulator)`": _OPTIONS,
        "`x_block_scaling_dim`, `w_block_scaling_dim`, `grad_block_scaling_dim`": _OPTIONS,
        "`disable_rht`, `disable_stochastic_rounding`, `disable_2d_quantization`, `enable_2d_quantization`": _OPTIONS,
        "`NVFP4Quantizer(with_random_sign_mask=False)`": "test_nvfp4.py::test_signs_are_a_part_of_the_basis",
        '`backward_override="high_precision"`': f"{_RECIPES}test_shared_options_apply_to_every_recipe",
        "`fp8_dpa`, `fp8_mha`, `row_scaled_activation`, `nvfp4_4over6`": _OPTIONS,
        "`NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES=1`": _OPTIONS,
        "`NVTE_FP8_BLOCK_SCALING_FP32_SCALES=1`": "test_block_scaled.py::test_inexact_scales_are_not_taken_for_powers_of_two",
    },
    "Regions and layers": {
        '`te.Linear(..., parallel_mode="column", sequence_parallel=True, tp_group=group)`':
            f"{_TE}test_a_parallel_layer_takes_shards_of_the_sequence",
        "`te.autocast(enabled, calibrating, recipe, amax_reduction_group)`":
            "multigpu/test_autocast.py::test_the_amax_group_of_a_region",
        "`te.Linear(..., fuse_wgrad_accumulation=True)`": "test_main_grads.py::test_megatrons_main_grad",
        "`te.Linear(..., delay_wgrad_compute=True)`, `layer.backward_dw()`":
            f"{_TE}test_weight_gradients_wait_for_backward_dw",
        "`te.Linear(..., return_bias=True)`":
            "test_linear_options.py::test_bias_comes_beside_y_and_learns_from_who_adds_it",
        "`te.Linear(..., save_original_input=True)`":
            "test_linear_options.py::test_x_that_is_kept_as_it_is_gives_the_same_bits",
        "recipe of a region":
            "multigpu/test_autocast.py::test_inside_the_regions_recipe_runs_forward_and_backward_and_again_in_recomputation",
        "`is_first_microbatch`, cached FP8 weights":
            "multigpu/test_weight_casts.py::"
            "test_training_on_weights_cast_at_the_boundary_is_training_on_weights_cast_at_use",
        "`te.make_graphed_callables(..., fp8_enabled, fp8_weight_caching)`, `is_first_microbatch` or its flag in the graph":
            "test_regions.py::test_what_a_graph_warms_up_with_leaves_nothing_behind",
        "`te.checkpoint`": "test_regions.py::test_a_reentrant_checkpoint_in_a_region_is_refused_and_one_outside_is_not",
        "`FP8GlobalStateManager`, extra state in `state_dict`":
            "test_regions.py::test_scales_of_regions_are_saved_without_a_step_boundary",
        "debug features, statistics": "multigpu/test_stats.py::test_every_recipe_is_measured_and_measuring_changes_no_bit",
    },
    "From te.ops": {
        "`ops.Sequential`, `ops.Linear`, norms, activations, `ops.Bias`, `ops.AddExtraInput`, `ops.MakeExtraOutput`, "
        "`ops.Quantize`, ...": f"{_TE}test_a_listing_runs",
        "`ops.Linear(..., tensor_parallel_mode, tensor_parallel_group, sequence_parallel)`":
            f"{_OPS}_ranks.py::test_a_block_is_that_of_one_rank_and_its_fusions_that_of_its_ops",
        "`ops.BasicOperation.op_forward`, `op_backward`; `ops.FusedOperation.fuser_forward`, `fuser_backward`":
            f"{_OPS}.py::test_a_fused_op_of_the_users",
        "`ops.register_forward_fusion`, `register_backward_fusion`":
            f"{_OPS}_fusions.py::test_what_is_registered_first_stands_where_it_was_asked_to",
        "a bias of a row-parallel `Linear`, added on each rank before the sum":
            f"{_OPS}_ranks.py::test_a_row_parallel_linear_does_not_add_a_bias_that_it_returns",
        "`Linear(H, 2F)`, `SwiGLU` under tp": f"{_OPS}_ranks.py::test_one_tensor_in_halves_is_refused_where_tp_cuts_it",
        "plans compared by the types of recipes": f"{_OPS}.py::test_a_plan_for_each_state",
        "parameters of a `Linear` under `basic_ops.`: `1.basic_ops.0.weight`":
            f"{_OPS}_modules.py::test_states_of_sequences_of_ops_load_and_go_back",
        "`tensor_parallel_mode` without a group: all ranks":
            f"{_OPS}_ranks.py::test_a_mode_without_a_group_is_refused_where_there_are_ranks",
        "`accumulate_into_main_grad=True` of a `Linear`": f"{_TE}test_layers_of_dlp_say_what_replaces_an_argument",
        "`te.LayerNormLinear`, `te.LayerNormMLP`, `te.TransformerLayer`, `te.DotProductAttention`":
            f"{_OPS}_modules.py::test_a_transformer_layer_is_that_of_torch",
        "`TransformerLayer` on [S, B, H] by default": f"{_TE}test_a_layer_is_the_same_on_both_layouts",
        "`hidden_dropout=0.1`, `attention_dropout=0.1` of `TransformerLayer` by default":
            f"{_TE}test_dropouts_are_those_of_the_page",
        "`rotary_pos_emb` of `TransformerLayer`, angles [S, 1, 1, D]": f"{_TE}test_a_transformer_layer_norms_and_rotates_heads",
        "the attribute `sequence_parallel` of norm parameters, for a sum of their gradients over tp in user code":
            f"{_OPS}_ranks.py::test_a_converted_sequence_on_shards_sums_the_gradients_of_its_norms",
        "`get_rng_state_tracker` of these modules":
            f"{_TE}test_each_argument_of_a_constructor_is_taken_or_refused_by_its_sentence",
        "other options of these modules": f"{_TE}test_each_argument_of_a_constructor_is_taken_or_refused_by_its_sentence",
        "`return_bias`, `return_layernorm_output` of these modules":
            f"{_OPS}_modules.py::test_modules_return_the_norm_and_the_bias_where_asked",
        "state dicts of these modules": f"{_OPS}_modules.py::test_states_of_transformer_engine_load_and_go_back",
        "`ops.GroupedLinear`": f"{_TE}test_the_advice_for_experts_runs",
        "`set_extra_output_channel`, `ops.AdaptiveLayerNorm`, `ops.ScaledSwiGLU` and other scaled gates":
            f"{_TE}test_ops_without_counterpart_are_missing",
    },
    "Custom recipes": {
        '`"input"`': _ROLES,
        '`"weight"`': _ROLES,
        '`"output"`': _ROLES,
        '`"grad_output"`': _ROLES,
        '`"grad_input"`': _ROLES,
        "`name`": f"{_RECIPES}test_a_custom_recipe_may_choose_by_layer",
        "`rowwise`, `columnwise` usage flags, `set_usage`": f"{_RECIPES}test_current_scaling_forward_and_mxfp8_backward",
        "`quantize(tensor)`": f"{_CUSTOM}test_a_custom_recipe_trains_under_tp_sp_and_fsdp_as_on_one_rank",
        "amax reduction inside the quantizer": "test_quantized_shards.py::test_forgetting_to_agree_is_noticed",
        "`DelayedScalingRequest`": "test_quantizers.py::test_a_delayed_cast_uses_the_slot_and_records_the_amax",
        "random number generator state": "multigpu/test_stochastic.py::test_a_network_rounds_alike_however_it_is_cut",
        "`qgemm(qx, qw, m_params, out_dtype, sx, sw, bias, out, accumulate, gemm_type, ...)`": _FORMATS,
        "`gemm_type`": _FORMATS,
        "`data`, `scale`, `data_t`, `scale_t` of a custom tensor": _FORMATS,
        "`dequantize`": _FORMATS,
        "`supports_only_rowwise_all_gather` and the like":
            f"{_CUSTOM}test_a_silent_format_travels_in_high_precision_with_as_many_transfers_as_bf16",
    },
}  # fmt: skip
