"""Quantize the weights of a checkpoint exactly as the next training forward would quantize them, for export as codes.

A weight is rounded to the dtype of activations, then cast by the rowwise quantizer of w in the recipe that the layer has at the
step of the checkpoint, after scheduled recipe changes. Delayed scales are read from the checkpoint.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dlp.flows import compressed
from dlp.parallel.casts import agrees
from dlp.parallel.model.rows import LayerPlan
from dlp.quant.fake import deployed
from dlp.quant.quantizer import Quantizer, ScaleSlot, caps_of
from dlp.quant.recipe import Recipe, as_recipe
from launch.config.run_config import Config, from_text
from launch.models.modules import DTYPES
from launch.models.settings import Model
from launch.training.build import meta_model, plan_for
from launch.training.recipe_schedule import planned_swaps
from launch.weights.weights_only import Reader


@dataclass(frozen=True)
class CodedLinear:
    """A linear that is exported as codes.

    recipe  recipe of the training; quantizers of fake quantization are replaced by those that return codes
    shape   (N, K) of the weight
    dtype   dtype of activations, to which the weight is rounded before the cast
    scale   delayed scale of the weight, fp32 []; None: the quantizer computes scales from the weight
    """

    recipe: Recipe
    shape: tuple[int, int]
    dtype: torch.dtype
    scale: Tensor | None

    @property
    def quantizer(self) -> Quantizer:
        return self.recipe.w.rowwise

    @property
    def activation(self) -> Quantizer | None:
        x = self.recipe.x.rowwise
        return None if x.format.keeps_source else x

    def scheme(self) -> dict[str, Any]:
        return compressed.scheme(self.quantizer.format, self.activation)

    def shapes(self) -> dict[str, Tensor]:
        """Return the exported tensors of the linear on the meta device, by name without the name of the layer."""
        fmt = self.quantizer.format
        padded = fmt.padded(torch.empty(self.shape, device="meta"))
        q = fmt.empty((padded.shape[0], padded.shape[1]), dtype=self.dtype, device=torch.device("meta"))
        return {name: each.to("meta") for name, each in self._encoded(q).tensors.items()}

    def encode(self, weight: Tensor) -> compressed.Encoded:
        """Quantize the weight [N, K] of the checkpoint, and return its tensors in the compressed-tensors layout."""
        w = self.quantizer.format.padded(weight.to(self.dtype))
        slot: dict[str, Any] = (
            {} if self.scale is None else {"slot": ScaleSlot(self.scale, torch.zeros_like(self.scale))}
        )
        return self._encoded(self.quantizer.cast(w, self.quantizer.observe(w), **slot))

    def _encoded(self, q: Any) -> compressed.Encoded:
        return compressed.encode(q, self.shape, self.activation)


def coded_linears(reader: Reader, model: Model) -> dict[str, CodedLinear]:
    """Return the linears of a checkpoint whose recipe quantizes weights, by name.

    Raises ValueError if the recipes of the training differ from the saved config, if there is no such linear, if a head
    with such a recipe is tied to the embedding, if scales of a weight depended on the tp rank, if the checkpoint lacks a
    delayed scale, or if compressed-tensors lacks a format.
    """
    path, manifest = reader.path, reader.opened.manifest
    config = from_text(manifest["config"], f"the config of {path}")
    plan = plan_for(config, manifest["world_size"], "cpu")
    recipes = {row.name: row.recipe for row in plan.layers}
    for swap in planned_swaps(config.groups, config.train.steps, meta_model(config), plan):
        if swap.at_step <= manifest["step"]:
            recipes |= {name: as_recipe(swap.recipe).for_layer(name) for name in swap.layers}
    for name, said in manifest["recipes"].items():
        if str(recipes.get(name)) != said:
            raise ValueError(
                f"{path}: {name} was trained with {said}, and its config says {recipes.get(name)}; leave --codes out, and "
                f"quantize the folder with dlp.quantize_ and that recipe"
            )
    found = {}
    for row in plan.layers:
        recipe = deployed(recipes[row.name])
        if not recipe.w.rowwise.format.keeps_source:
            try:
                found[row.name] = _coded(row, recipe, config, plan.tp, reader)
            except ValueError as error:
                raise ValueError(f"{path}: {row.name}: {error}") from None
    if not found:
        raise ValueError(f"{path}: no recipe of this checkpoint quantizes weights; leave --codes out")
    if model.tie_embeddings and (tied := next((name for name in found if name.endswith("lm_head")), None)):
        raise ValueError(f"{path}: {tied} is the embedding, which has no codes; leave --codes out")
    return found


def _coded(row: LayerPlan, recipe: Recipe, config: Config, tp: int, reader: Reader) -> CodedLinear:
    quantizer, cut = recipe.w.rowwise, row.row.shard_dim
    if tp > 1 and cut is not None:
        shared = agrees(row.row, recipe, "w", quantizer, False, own_group=config.mesh.amax_group != "auto")
        if caps_of(quantizer).slot is None and cut in quantizer.reduces and not shared:
            raise ValueError(
                f"each of {tp} tp ranks had a separate scale of w in {recipe}, which the format cannot store; set "
                f"recipe = {{ name = {recipe.name!r}, amax_scope = 'all' }} in training, or leave --codes out"
            )
        if not quantizer.format.concatenates(cut, row.shape[cut] // tp):
            raise ValueError(
                f"in training, tp = {tp} split blocks of {quantizer.format.name} between ranks, so that scales depended on the "
                f"rank; leave --codes out"
            )
    scale = None
    if caps_of(quantizer).slot is not None:
        scale = reader.recipe_state().get(f"slots.{row.name}.w.scale")
        if scale is None or scale.dim():
            raise ValueError("the checkpoint has no delayed scale of w that all ranks share; leave --codes out")
    linear = CodedLinear(recipe, row.shape, DTYPES[config.train.dtype], scale)
    linear.shapes()  # raises ValueError for formats that compressed-tensors lacks
    return linear
