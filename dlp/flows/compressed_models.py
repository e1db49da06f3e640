"""Save a quantized model as a folder of compressed-tensors, and load such a folder into a plain model.

    dlp.quantize_(model, "nvfp4")
    model.save_pretrained(folder)                  for a model of transformers; else dlp.save_compressed(model, folder)
    dlp.load_compressed(plain, folder, "nvfp4")    the same codes, and the same forward

`dlp.flows.compressed` defines the layout of a linear. A file has at most `FILE_BYTES` bytes, unless one layer has more. All
ranks gather tensors, and rank 0 writes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dlp.flows import compressed
from dlp.flows.codes import Held, held_weights, saved_buffers, static_scales, whole_part
from dlp.flows.frozen import Mode, cast_in, check_mode, refuse_y
from dlp.parallel.linear.modules import ParallelLinear
from dlp.parallel.weight.local import fill
from dlp.quant import recipe as recipes
from dlp.quant.fake import deployed
from dlp.quant.gemm import GemmOptions
from dlp.quant.parameter import QuantizedParameter
from dlp.quant.quantized_linear import Use
from dlp.quant.quantizer import Quantizer
from dlp.quant.tensor import QuantizedTensor

CONFIG, FILE_BYTES = "config.json", 4 << 30
INDEX = "model.safetensors.index.json"
WRITTEN = ("model.safetensors", "model-[0-9]*-of-[0-9]*.safetensors", INDEX)  # patterns of files of `_Writer`


@torch.no_grad()
def save_compressed(model: nn.Module, folder: str | Path, config: Mapping[str, Any] | None = None) -> str:
    """Write a model with quantized weights as a folder of compressed-tensors.

    All ranks call `save_compressed`; rank 0 writes the full model.

    Args:
        model: model after `dlp.quantize_` or `dlp.freeze`.
        folder: folder, created if it does not exist. Model files of an earlier save in the folder are deleted.
        config: content of config.json besides `quantization_config`; None: `model.config.to_dict()` if the model has a config.

    Returns:
        A sentence with the number of layers and the bytes of codes and of other tensors.

    Raises:
        ValueError: before anything is written, for a model without quantized weights, for a format, padding or static scale of
            x that compressed-tensors does not have, and for a layer that quantizes y or has several weights.
        ImportError: without the package safetensors.

    Examples:
        >>> model = dlp.quantize_(nn.Sequential(nn.Linear(64, 64)), "int8")
        >>> dlp.save_compressed(model, "codes")
        '1 layers as codes (4368 bytes), 1 other tensors (256 bytes), in codes'
    """
    held = {each.name.removesuffix(".weight"): each for each in held_weights(model)}
    if not held:
        raise ValueError("save_compressed: no layer of the model holds codes; call dlp.quantize_ or dlp.freeze first")
    scales = {name.rpartition(".")[0]: slots[0] for name, slots in static_scales(model)}
    schemes = {}
    for name, each in held.items():
        try:
            if each.y is not None or each.name == name:
                what = "a quantized y" if each.y is not None else "several weights of one module"
                raise ValueError(
                    f"compressed-tensors files of dlp have no entry for {what}: save codes with dlp.quantized_state_dict"
                )
            _encoded(each, None, torch.device("meta"))
            schemes[name] = compressed.scheme(each.q.format, each.activation, with_scale=name in scales)
        except ValueError as error:
            raise ValueError(f"save_compressed: {name}: {error}") from None
    writer = _Writer(Path(folder)) if not dist.is_initialized() or dist.get_rank() == 0 else None
    sizes = {True: 0, False: 0}
    others = {name: tensor for name, tensor in _other_tensors(model) if name.removesuffix(".weight") not in held}
    for name, each in held.items():
        made = _encoded(each, scales.get(name))
        tensors = {f"{name}.{key}": tensor for key, tensor in made.tensors.items()}
        sizes[True] += _add(writer, tensors, {f"{name}.{key}": value for key, value in made.exact.items()})
    for name, tensor in others.items():
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        sizes[False] += _add(writer, {name: whole.detach()}, {})
    if writer is not None:
        linears = [name for name, module in model.named_modules() if isinstance(module, nn.Linear | ParallelLinear)]
        text = dict(config) if config is not None else _config_of(model)
        text["quantization_config"] = compressed.quantization_config(schemes, linears)
        writer.close(text)
    codes, rest = sizes[True], sizes[False]
    return f"{len(held)} layers as codes ({codes} bytes), {len(others)} other tensors ({rest} bytes), in {folder}"


def _encoded(held: Held, scale: Tensor | None, device: torch.device | None = None) -> compressed.Encoded:
    """Return the tensors of a layer, gathered from its shards. device: "meta" to check only whether the layer can be encoded:
    then nothing is gathered, and the tensors have no memory."""
    if device is not None:
        parts = tuple(part.to(device) for part in held.q.parts)
        shape = held.q.shape if isinstance(held.parameter, DTensor) else tuple(held.parameter.shape)
    else:
        fmt = held.q.format
        parts = tuple(whole_part(held, part, each) for part, each in zip(fmt.parts, held.q.parts, strict=True))
        shape = tuple(held.parameter.shape)
    q = QuantizedTensor(held.q.format, parts)
    return compressed.encode(q, shape, held.activation, scale)  # type: ignore[arg-type]


def _other_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters and persistent buffers by name; shared tensors once."""
    yield from model.named_parameters()
    yield from saved_buffers(model)


def _config_of(model: nn.Module) -> dict[str, Any]:
    config: Any = getattr(model, "config", None)
    return dict(config.to_dict()) if hasattr(config, "to_dict") else {}


def _add(writer: _Writer | None, tensors: Mapping[str, Tensor], exact: Mapping[str, Tensor]) -> int:
    """Pass tensors to the writer, if this rank has one, and return their size in bytes."""
    if writer is not None:
        writer.add({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, exact)
    return sum(tensor.nbytes for tensor in tensors.values())


class _Writer:
    """Writer of safetensors files of at most FILE_BYTES each, their index, and config.json.

    tensors   tensors of the next file
    header    exact numbers of the next file, as text
    files     names of the tensors in each file written so far
    bytes     size of `tensors`; total: size of all files written so far
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.tensors, self.header = folder, dict[str, Tensor](), dict[str, str]()
        self.files: list[list[str]] = []
        self.bytes = self.total = 0
        folder.mkdir(parents=True, exist_ok=True)

    def add(self, tensors: Mapping[str, Tensor], exact: Mapping[str, Tensor]) -> None:
        size = sum(tensor.nbytes for tensor in tensors.values())
        if self.tensors and self.bytes + size > FILE_BYTES:
            self._write()
        self.tensors |= tensors
        self.header |= header(exact)
        self.bytes += size

    def _write(self) -> None:
        write_file(self._path(len(self.files)), self.tensors, self.header)
        self.files.append(list(self.tensors))
        self.total += self.bytes
        self.tensors, self.header, self.bytes = {}, {}, 0

    def _path(self, number: int) -> Path:
        return self.folder / f".part-{number}.safetensors"

    def close(self, config: Mapping[str, Any]) -> None:
        self._write()
        count, places = len(self.files), dict[str, str]()
        for i, names in enumerate(self.files):
            name = "model.safetensors" if count == 1 else f"model-{i + 1:05}-of-{count:05}.safetensors"
            self._path(i).replace(self.folder / name)
            places |= dict.fromkeys(names, name)
        if count > 1:
            index = {"metadata": {"total_size": self.total}, "weight_map": places}
            (self.folder / INDEX).write_text(json.dumps(index, indent=1))
        for file in (file for pattern in WRITTEN for file in self.folder.glob(pattern)):
            if file.name not in {*places.values(), *([INDEX] if count > 1 else [])}:
                file.unlink()  # of an earlier save, whose codes a reader would take
        (self.folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n")


def write_file(path: Path, tensors: dict[str, Tensor], header: Mapping[str, str]) -> None:
    """Write a safetensors file with the mode that follows from the umask: safetensors creates files with mode 0600, which other
    users cannot read."""
    from safetensors.torch import save_file

    path.touch()
    mode = path.stat().st_mode
    save_file(tensors, str(path), metadata={"format": "pt", **header})
    path.chmod(mode)


def header(exact: Mapping[str, Tensor]) -> dict[str, str]:
    """Convert exact numbers to text for the header of a safetensors file, by name."""
    return {name: " ".join(number.hex() for number in value.reshape(-1).tolist()) for name, value in exact.items()}


def exact_of(text: str) -> Tensor:
    """Convert text of the header to numbers: fp32 [], or fp32 [n] for n > 1 numbers; the inverse of `header`."""
    numbers = torch.tensor([float.fromhex(number) for number in text.split()])
    return numbers if len(numbers) > 1 else numbers[0]


class SavesCodes:
    """Replacement for `save_pretrained` of a model after `dlp.quantize_`: calls `save_compressed`."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __call__(self, save_directory: str | Path, **options: Any) -> None:
        """Save the model. The options is_main_process, safe_serialization and max_shard_size are accepted, but have no effect.
        Raises ValueError for other options of `save_pretrained`."""
        lost = sorted(options.keys() - {"is_main_process", "safe_serialization", "max_shard_size"})
        if lost:
            raise ValueError(
                f"save_pretrained: the model was quantized by dlp.quantize_ and is saved as compressed-tensors, where "
                f"{lost[0]!r} has no meaning; leave the option out, or save the model before dlp.quantize_"
            )
        save_compressed(self.model, save_directory)
        if (generation := getattr(self.model, "generation_config", None)) is not None:
            generation.save_pretrained(save_directory)


# Reading


class StoredLayer(NamedTuple):
    """Layer in a folder of compressed-tensors.

    q        quantized weight
    scheme   scheme of the layer, from config.json
    tensors  all stored tensors of the layer, by the name after the name of the layer
    exact    exact numbers of the layer in the header, by name (`compressed.EXACT`)
    """

    q: QuantizedTensor
    scheme: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    exact: Mapping[str, Tensor]

    @property
    def has_static_x(self) -> bool:
        x = self.scheme["input_activations"]
        return x is not None and not x["dynamic"] and "input_scale" in self.tensors


class Folder:
    """Reader of a folder of compressed-tensors. Raises ValueError if config.json is missing or states another quant_method.

    config   `quantization_config` of config.json
    files    name of a tensor -> file with this tensor
    exact    exact numbers of the headers, by "LAYER.NAME" with NAME in `compressed.EXACT`
    """

    def __init__(self, folder: str | Path) -> None:
        from safetensors import safe_open

        self.path, self.files, self.exact = Path(folder), dict[str, Path](), dict[str, Tensor]()
        try:
            self.config = json.loads((self.path / CONFIG).read_text())["quantization_config"]
        except (OSError, KeyError, ValueError):
            raise ValueError(
                f"{folder}: no {CONFIG} with a quantization_config; pass a folder of compressed-tensors"
            ) from None
        if self.config.get("quant_method") != compressed.METHOD:
            method = self.config.get("quant_method")
            raise ValueError(f"{folder}: quant_method is {method!r}, expected {compressed.METHOD!r}; convert it first")
        for file in sorted(self.path.glob("*.safetensors")):
            with safe_open(file, framework="pt") as opened:
                self.files |= dict.fromkeys(opened.keys(), file)
                texts = opened.metadata() or {}
                ours = {name: text for name, text in texts.items() if name.endswith(compressed.EXACT)}
                self.exact |= {name: exact_of(text) for name, text in ours.items()}

    def layers(self) -> list[str]:
        """Return the names of the layers whose weights are codes."""
        return [name.removesuffix(".weight_scale") for name in self.files if name.endswith(".weight_scale")]

    def tensor(self, name: str) -> Tensor:
        from safetensors import safe_open

        with safe_open(self.files[name], framework="pt") as opened:
            found: Tensor = opened.get_tensor(name)
            return found

    def layer(self, name: str) -> StoredLayer:
        scheme = compressed.scheme_of(self.config, name)
        given = {key: self.tensor(f"{name}.{key}") for key in compressed.NAMES if f"{name}.{key}" in self.files}
        exact = {key: self.exact[f"{name}.{key}"] for key in compressed.EXACT if f"{name}.{key}" in self.exact}
        return StoredLayer(compressed.decode(given, scheme["weights"], exact), scheme, given, exact)

    def others(self) -> list[str]:
        """Return the names of the tensors in the files that do not belong to a layer with codes."""
        own = {f"{layer}.{key}" for layer in self.layers() for key in compressed.NAMES}
        return [name for name in self.files if name not in own]


@torch.no_grad()
def load_compressed(
    model: nn.Module, folder: str | Path, recipe: Any = None, *, mode: Mode | None = None
) -> list[str]:  # fmt: skip
    """Load a folder of compressed-tensors into a plain model. Linears with codes in the folder get quantized weights.

    Args:
        model: plain model with the layer names of the folder, not on the meta device.
        folder: folder written by `dlp.save_compressed`, `launch.convert_hf export --codes` or another program.
        recipe: recipe whose quantizer of x is used, for example the recipe of training; or a function that returns a recipe for
            the name of a layer; None: x is quantized as config.json states, with default options.
        mode: "weight_only": x stays in high precision; "dynamic" or "static": as in `dlp.quantize_`; None: as config.json
            states, or "dynamic" if config.json does not quantize x and a `recipe` is given.

    Returns:
        Names of the layers with quantized weights.

    Raises:
        ValueError: for missing or unknown tensors, for shapes that differ, for a recipe that does not fit the files or the
            mode, and for mode "static" without a static scale in the folder.
        ImportError: without the package safetensors.

    Examples:
        >>> model = dlp.quantize_(nn.Sequential(nn.Linear(64, 64)), "int8")
        >>> saved = dlp.save_compressed(model, "codes")
        >>> dlp.load_compressed(nn.Sequential(nn.Linear(64, 64)), "codes")
        ['0']
    """
    read, modules = Folder(folder), dict(model.named_modules())
    own: dict[str, Tensor] = {**dict(model.named_parameters(remove_duplicate=False)), **dict(saved_buffers(model))}
    layers, loaded = read.layers(), set[int]()
    for name in layers:
        if not isinstance(modules.get(name), nn.Linear):
            raise ValueError(
                f"{folder}: {name} has codes, and the model has no nn.Linear {name}; load the model of the folder"
            )
    for name in read.others():
        if name not in own:
            raise ValueError(
                f"{folder}: {name} is in the files, and the model has no such tensor; load the model of the folder"
            )
        loaded.add(id(own[name]))
    weights = {id(modules[name].weight) for name in layers}
    missing = [name for name, tensor in own.items() if id(tensor) not in loaded | weights]
    if missing:
        raise ValueError(
            f"{folder}: no file has {missing[0]} ({len(missing)} missing tensors); pass the folder of this model"
        )
    for name in layers:
        _load_layer(read, name, modules[name], recipe, mode)
    for name in read.others():
        fill(own[name], read.tensor(name).to(own[name].device, own[name].dtype))
    return layers


def _load_layer(read: Folder, name: str, module: Any, recipe: Any, mode: Mode | None) -> None:
    """Set the weight of a linear to a quantized weight of the folder. recipe, mode: arguments of `load_compressed`."""
    stored, device = read.layer(name), module.weight.device
    q, x = stored.q, stored.scheme["input_activations"]
    if q.shape != tuple(module.weight.shape):
        raise ValueError(
            f"{read.path}: {name} is {list(q.shape)} in the files and {list(module.weight.shape)} in the model"
        )
    stated, options = compressed.activation_of(x), GemmOptions()
    mode = mode or (
        "static" if stored.has_static_x else "weight_only" if stated is None and recipe is None else "dynamic"
    )
    if mode == "static" and not stored.has_static_x:
        raise ValueError(f"{read.path}: {name} has no static scale of x; choose mode 'dynamic' or 'weight_only'")
    choices = compressed.static_choices(x, stored.scheme["weights"]) if mode == "static" else []
    activation: Quantizer | None = stated if mode == "dynamic" else None
    if recipe is not None:
        given = callable(recipe) and not isinstance(recipe, recipes.Recipe)
        made = deployed(recipes.as_recipe(recipe(name) if given else recipe).for_layer(name))
        check_mode(made, mode, name)
        refuse_y(made, mode, name)
        wanted = made.w.rowwise.format
        if type(wanted) is not type(q.format) or wanted.element != q.format.element:
            raise ValueError(f"{read.path}: {name} holds {q.format.name}, and {made} has weights of {wanted.name}")
        activation, options = cast_in(made.x.rowwise, mode), made.fprop
        if mode == "static" and activation is not None:
            choices = [activation]
            if not compressed.is_stated(x, activation):
                raise ValueError(
                    f"{read.path}: {name}: the file states a static cast of x with {x}, and {made} casts x to "
                    f"{activation.format.name}: choose mode 'dynamic', or the recipe by which the model was quantized"
                )
    scale: Tensor | None = None
    if choices:
        activation, scale = compressed.static_x(choices, stored.tensors, stored.exact)
        scale = scale.to(device)
    moved = QuantizedTensor(q.format, tuple(part.to(device) for part in q.parts))
    use = Use(q.format, activation, options)
    module.weight = nn.Parameter(QuantizedParameter(moved, module.weight.dtype, use, scale), requires_grad=False)
