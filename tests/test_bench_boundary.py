"""The variants that `bench.boundary` compares, casts of all weights in one batch and casts one by one, give equal bits."""

from __future__ import annotations

import pytest
import torch

from bench.boundary import DTYPES, boundary_alone, model_of, nbytes
from bench.linear_subjects import RECIPES
from dlp.parallel.linear.state import cores
from dlp.parallel.model.boundary import end_step

LAYERS = ((256, (128, 64)), (128, (256,)))


@pytest.mark.parametrize("held", DTYPES)
@pytest.mark.parametrize("recipe", [recipe for recipe in RECIPES if recipe != "bf16"])
def test_together_and_one_by_one_make_the_same_bits(recipe: str, held: str) -> None:
    model = model_of(recipe, held, 1, LAYERS, "cpu")
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(torch.linspace(1, 2, weight.shape[1]))

    def parts() -> list[torch.Tensor]:
        kept = [part for core in cores(model) for part in core.weights.parts.parts]
        return [part.clone().reshape(-1).view(torch.uint8) for part in kept]

    before = parts()
    alone = boundary_alone(model)
    with torch.no_grad():
        alone()
    one_by_one = parts()
    with torch.no_grad():
        for part in (part for core in cores(model) for part in core.weights.parts.parts):
            part.reshape(-1).view(torch.uint8).zero_()
    end_step(model)
    assert all(map(torch.equal, parts(), one_by_one))
    assert not all(map(torch.equal, before, one_by_one))
    codes = {"nvfp4": 0.5}.get(recipe, 1.0)  # bytes per code; a weight has codes in both orientations
    assert nbytes(model) > (torch.tensor((), dtype=DTYPES[held]).itemsize + 2 * codes) * (256 * 192 + 128 * 256)
