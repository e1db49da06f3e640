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
    """Tensors of an exported folder, by Hugging Face name.

    reader      reader of the checkpoint
    parameters  parameters by name in dlp, on the meta device
    theirs      name in dlp -> Hugging Face name
    dtype       dtype of all tensors that are not codes
    coded       linears that are exported as codes, by name in dlp
    tensors     attribute: all tensors of the folder, on the meta device
    header      attribute: metadata for the safetensors header of the file that `load` returned last; holds numbers that the
                tensors cannot represent exactly
    """

    def __init__(
        self, reader: Reader, parameters: Mapping[str, Tensor], theirs: Mapping[str, str], dtype: torch.dtype,
        coded: Mapping[str, CodedLinear],
    ) -> None:  # fmt: skip
        self.reader, self.parameters, self.theirs, self.coded = reader, parameters, theirs, coded
        self.tensors, self.header = dict[str, Tensor](), dict[str, str]()
        self.origin: dict[str, str] = {}  # Hugging Face name of a tensor -> name in dlp of its parameter
        for name, parameter in parameters.items():
            linear = coded.get(name.removesuffix(".weight"))
            made = {theirs[name]: parameter.to(dtype)}
            if linear is not None:
                made = {f"{self.layer(name)}.{key}": each for key, each in linear.shapes().items()}
            self.tensors |= made
            self.origin |= dict.fromkeys(made, name)

    def layer(self, ours: str) -> str:
        """Return the Hugging Face name of a linear. `ours`: name in dlp of the linear or of its weight."""
        return self.theirs[f"{ours.removesuffix('.weight')}.weight"].removesuffix(".weight")

    def linears(self) -> list[str]:
        """Return the Hugging Face names of all linears, including a tied head."""
        names = [name for name, each in self.parameters.items() if each.dim() == 2 and self.theirs[name] != EMBEDDING]
        return [self.layer(name) for name in names] + (
            [HEAD.removesuffix(".weight")] if HEAD not in self.origin else []
        )

    def load(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Read or encode the tensors of one file. A weight that is exported as codes is read once per file."""
        self.header.clear()
        plain = [name for name in names if self.origin[name].removesuffix(".weight") not in self.coded]
        read = self.reader.read({self.origin[name]: self.tensors[name] for name in plain})
        found = {name: read[self.origin[name]] for name in plain}
        for ours in dict.fromkeys(self.origin[name] for name in names if name not in found):
            made = self.coded[ours.removesuffix(".weight")].encode(self._stored(ours))
            found |= {name: each for name, each in self._named(ours, made.tensors) if name in names}
            self.header |= header(dict(self._named(ours, made.exact)))
        return {name: found[name] for name in names}

    def _stored(self, ours: str) -> Tensor:
        """Read a weight in its dtype in the checkpoint."""
        dtype = self.reader.dtypes([ours]).pop()
        return self.reader.read({ours: self.parameters[ours].to(dtype)})[ours]

    def _named(self, ours: str, made: Mapping[str, Tensor]) -> list[tuple[str, Tensor]]:
        return [(f"{self.layer(ours)}.{key}", each) for key, each in made.items()]
