"""dlp: a distributed-first, low-precision training runtime for PyTorch.

The names in `__all__` are public in dlp, dlp.ops, dlp.optim and dlp.te. Also public are the names in `FORMATS` of
tools/site.py, for user-defined formats and recipes. All other names may change.
"""

# submodules: operations, optimizers, checks of formats
from dlp import ops, optim, testing

# meshes
from dlp.comm.mesh import build_mesh

# quantized models, calibration, export, experts, LoRA; layers
from dlp.flows.calibrate import calibrate
from dlp.flows.codes import load_quantized_state_dict, quantized_state_dict
from dlp.flows.compressed_models import load_compressed, save_compressed
from dlp.flows.export import export
from dlp.flows.frozen import freeze
from dlp.flows.grouped import GroupedLinear, group_experts
from dlp.flows.int4 import pack_int4
from dlp.flows.lora import load_lora, lora, lora_groups, merge_lora, save_lora
from dlp.flows.plain import quantize_
from dlp.parallel.linear.modules import ColumnParallelLinear, Linear, RowParallelLinear

# autocast regions, recipe changes, the step boundary, statistics
from dlp.parallel.model.autocast import autocast
from dlp.parallel.model.boundary import attach, end_step, read_stats, record_stats, set_recipe

# conversion, embedding and loss, context parallelism
from dlp.parallel.model.context import Context
from dlp.parallel.model.convert import convert
from dlp.parallel.model.embedding import VocabParallelEmbedding, cross_entropy, gather_tokens, scatter_tokens

# delayed wgrads, CUDA graphs, layer groups, plans, checkpoints, counts of bytes, FSDP, quantized-only weights
from dlp.parallel.model.grads import backward_dw
from dlp.parallel.model.graph import graphed_step
from dlp.parallel.model.groups import LayerGroup
from dlp.parallel.model.plan import Plan, make_plan
from dlp.parallel.model.session import graphing, not_finite, watch_scales
from dlp.parallel.model.state import check_scales, load_state_dict, state_dict
from dlp.parallel.traffic.ledger import wire_report
from dlp.parallel.traffic.predict import Workload
from dlp.parallel.weight.fsdp2 import fully_shard
from dlp.parallel.weight.held import quantized_model_init, with_master_weights

# models of Hugging Face transformers
from dlp.pretrained import load_pretrained, meta_model

# comparison of steps on a mesh with the same steps on one rank
from dlp.proof.run import prove

# recipes; layer groups for models of Hugging Face transformers
from dlp.quant.custom import CustomRecipe
from dlp.quant.recipe import Recipe
from dlp.quant.recipe import load as recipe
from dlp.tp_plan import groups_for

__all__ = [
    "ColumnParallelLinear", "Context", "CustomRecipe", "GroupedLinear", "LayerGroup", "Linear", "Plan", "Recipe",
    "RowParallelLinear", "VocabParallelEmbedding", "Workload", "attach", "autocast", "backward_dw", "build_mesh",
    "calibrate", "check_scales", "convert", "cross_entropy", "end_step", "export", "freeze", "fully_shard",
    "gather_tokens", "graphed_step", "graphing", "group_experts", "groups_for", "load_compressed", "load_lora",
    "load_pretrained", "load_quantized_state_dict", "load_state_dict", "lora", "lora_groups", "make_plan", "merge_lora",
    "meta_model", "not_finite", "ops", "optim", "pack_int4", "prove", "quantize_", "quantized_model_init",
    "quantized_state_dict", "read_stats", "recipe", "record_stats", "save_compressed", "save_lora", "scatter_tokens",
    "set_recipe", "state_dict", "testing", "watch_scales", "wire_report", "with_master_weights",
]  # fmt: skip
