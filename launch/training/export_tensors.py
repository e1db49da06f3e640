"""Read the tensors of an exported folder from a checkpoint, one file at a time: values in one dtype, and codes of linears."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from dlp.flows.compressed_models import header
from launch.models.families import EMBEDDING, HEAD
from launch.training.trained_codes import CodedLinear
from launch.weights.weights_only import Reader


class Source:
    """Tensors of an exported folder, by name.

    reader      reader of the checkpoint
    parameters  parameters by name, on the meta device
    dtype       dtype of all tensors that are not codes
    coded       linears that are exported as codes, by name
    tensors     attribute: all tensors of the folder, on the meta device
    header      attribute: metadata for the safetensors header of the file that `load` returned last; holds numbers that the
                tensors cannot represent exactly
    """

    def __init__(
        self, reader: Reader, parameters: Mapping[str, Tensor], dtype: torch.dtype, coded: Mapping[str, CodedLinear]
    ) -> None:
        self.reader, self.parameters, self.coded = reader, parameters, coded
        self.tensors, self.header = dict[str, Tensor](), dict[str, str]()
        self.origin: dict[str, str] = {}  # name of a tensor -> name of its parameter
        for name, parameter in parameters.items():
            layer = name.removesuffix(".weight")
            made = {name: parameter.to(dtype)}
            if layer in coded:
                made = {f"{layer}.{key}": each for key, each in coded[layer].shapes().items()}
            self.tensors |= made
            self.origin |= dict.fromkeys(made, name)

    def linears(self) -> list[str]:
        """Return the names of all linears, including a tied head."""
        names = [name for name, each in self.parameters.items() if each.dim() == 2 and name not in (EMBEDDING, HEAD)]
        return [name.removesuffix(".weight") for name in (*names, HEAD)]

    def load(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Read or encode the tensors of one file. A weight that is exported as codes is read once per file."""
        self.header.clear()
        plain = [name for name in names if self.origin[name].removesuffix(".weight") not in self.coded]
        found = self.reader.read({name: self.tensors[name] for name in plain})
        for weight in dict.fromkeys(self.origin[name] for name in names if name not in found):
            made = self.coded[weight.removesuffix(".weight")].encode(self._stored(weight))
            found |= {name: each for name, each in self._named(weight, made.tensors) if name in names}
            self.header |= header(dict(self._named(weight, made.exact)))
        return {name: found[name] for name in names}

    def _stored(self, weight: str) -> Tensor:
        """Read a weight in its dtype in the checkpoint."""
        dtype = self.reader.dtypes([weight]).pop()
        return self.reader.read({weight: self.parameters[weight].to(dtype)})[weight]

    def _named(self, weight: str, made: Mapping[str, Tensor]) -> list[tuple[str, Tensor]]:
        return [(f"{weight.removesuffix('.weight')}.{key}", each) for key, each in made.items()]
