"""dlp: a distributed-first, low-precision training runtime for PyTorch.

What stands here is public; everything else may change.
"""

# the mesh
from dlp.comm.mesh import build_mesh

# what changes between steps
from dlp.parallel.autocast import autocast

# conversion of a model
from dlp.parallel.convert import convert

# layers
from dlp.parallel.delayed_wgrad import backward_dw
from dlp.parallel.embedding import VocabParallelEmbedding, cross_entropy
from dlp.parallel.fsdp import fully_shard
from dlp.parallel.ledger import wire_report
from dlp.parallel.linear import ColumnParallelLinear, Linear, RowParallelLinear
from dlp.parallel.masters import with_master_weights
from dlp.parallel.measure import read_stats, record_stats
from dlp.parallel.nonfinite import not_finite
from dlp.parallel.plan import Plan, make_plan
from dlp.parallel.quantized_init import quantized_model_init
from dlp.parallel.scales import check_scales, watch_scales
from dlp.parallel.state import load_state_dict, state_dict
from dlp.parallel.step import attach, end_step
from dlp.parallel.swap import set_recipe
from dlp.parallel.tokens import gather_tokens, scatter_tokens
from dlp.parallel.workload import Workload

# recipes
from dlp.quant.custom import CustomRecipe
from dlp.quant.groups import LayerGroup
from dlp.quant.recipe import Recipe
from dlp.quant.recipe import load as recipe

__all__ = [
    "ColumnParallelLinear", "CustomRecipe", "LayerGroup", "Linear", "Plan", "Recipe", "RowParallelLinear",
    "VocabParallelEmbedding", "Workload", "attach", "autocast", "backward_dw", "build_mesh", "check_scales", "convert",
    "cross_entropy", "end_step", "fully_shard", "gather_tokens", "load_state_dict", "make_plan", "not_finite",
    "quantized_model_init", "read_stats", "recipe", "record_stats", "scatter_tokens", "set_recipe", "state_dict",
    "watch_scales", "wire_report", "with_master_weights",
]  # fmt: skip
