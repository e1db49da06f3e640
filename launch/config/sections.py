"""The settings of a training run, section by section: names, ranges, defaults and what they mean.

Each class is one table of the TOML file, and each field one key. The page docs/config.md and `--help` are made from
what is written here; what several settings must agree on is in run_config.py.
"""

from dataclasses import dataclass
from typing import Any

from dlp.comm.mesh import TP, TRANSPORTS, WORLD
from dlp.parallel.linear.spec import LayerOptions
from dlp.parallel.model.groups import FIELDS
from launch.models.settings import Model
from launch.optimizers.encodings import ENCODINGS
from launch.settings.schema import Rule, Section, choice, flag, integer, number, numbers, setting, text, texts


@dataclass(frozen=True, kw_only=True)
class Mesh(Section):
    """How ranks are laid out: world size = dp_replicate x dp_shard x tp. One dp axis may be -1: what is left."""

    dp_replicate: int = setting(integer(">= 1", also=(-1,)), "replicas of the whole model", 1)
    dp_shard: int = setting(integer(">= 1", also=(-1,)), "ranks that share parameters and optimizer by FSDP", -1)
    tp: int = setting(integer(">= 1"), "tensor-parallel ranks, which cut every layer", 2)
    sequence_parallel: bool = setting(flag(), "between layers, tokens are cut over the tp ranks", True)
    transport: str = setting(
        choice(*TRANSPORTS),
        "carrier of transfers over tp; mapped: memory that the GPUs of one host map from each other; auto: mapped where the tp "
        "ranks can, else NCCL (gloo on CPUs)",
        "auto",
    )
    overlap_table: str | None = setting(
        text(),
        'a file of dlp.parallel.tune, by which overlap = "auto" is chosen; unset: the tables that dlp ships',
        None,
    )
    amax_group: str = setting(
        choice("auto", TP, "tp+dp", WORLD), "ranks that share a scale; auto agrees only what must be", "auto"
    )
    quantized_gather: bool = setting(flag(), "FSDP gathers weights as their recipe quantizes them", True)
    reshard_after_forward: bool = setting(
        flag(), "FSDP frees a block's gathered weights after its forward; false: they stay until its backward", True
    )
    grad_wire: str = setting(
        choice("auto", "fp32", "bf16", "fp8"),
        "dtype in which FSDP's gradients travel; fp32: by FSDP's own reduce-scatter, the others are summed in fp32; auto: bf16 "
        "where gradients are bf16 before they are reduced (the same values), else fp32",
        "auto",
    )


GRAPH = Rule('"auto", true or false', (bool, str), lambda value: isinstance(value, bool) or value == "auto")


def _are_sources(value: Any) -> bool:
    if isinstance(value, str):
        return bool(value)
    return len(value) > 0 and all(
        isinstance(each, dict)
        and each.keys() == {"path", "weight"}
        and text().accepts(each["path"])
        and number("> 0").accepts(each["weight"])
        for each in value
    )


SOURCES = Rule(
    '"builtin:stdlib", a folder made by launch.data prepare, or a list of { path = one of these, weight = a number > 0 }',
    (str, list, tuple), _are_sources, lambda value: value if isinstance(value, str) else tuple(value),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Data(Section):
    """What is read. See data.md for the formats."""

    path: str | tuple[dict[str, Any], ...] = setting(
        SOURCES, "where the tokens are; of several, a step has each as often as its weight says", "builtin:stdlib"
    )
    validation: float = setting(
        number("> 0", "< 1"), "share of builtin:stdlib's files held out; a prepared folder has its own split", 0.05
    )
    reset_attention: bool = setting(
        flag(),
        "attention and positions begin anew with each document of a sequence, and see none of those before",
        False,
    )


@dataclass(frozen=True, kw_only=True)
class Train(Section):
    """The steps. A sequence is one row of a batch; a step reads global_batch x sequence tokens on any mesh."""

    steps: int = setting(integer(">= 1"), "optimizer steps")
    micro_batch: int = setting(
        integer(">= 1", also=(-1,)),
        "sequences per data-parallel rank in one forward; -1: its whole share of a step",
        -1,
    )
    global_batch: int = setting(integer(">= 1"), "sequences per step over all ranks, the rest is accumulated")
    sequence: int = setting(integer(">= 1"), "tokens per sequence")
    reduce_gradients: str = setting(
        choice("auto", "step", "microbatch"),
        "when FSDP reduces gradients; step: they wait whole in fp32 for the last microbatch; microbatch: shards wait, and "
        "each microbatch reduces; auto: step where that fits",
        "auto",
    )
    seed: int = setting(integer(">= 0"), "of the initial weights and the order of the data", 0)
    optimizer: str = setting(
        choice("adamw", "muon", *ENCODINGS),
        "muon: for matrices of blocks; adamw8bit, adamw4bit, adamwfp8: averages in so many bits, by torchao",
        "adamw",
    )
    init_from: str | None = setting(
        text("a checkpoint's folder"),
        "the weights of step 0: a checkpoint of the same [model], as launch.convert_hf makes; unset: random ones",
        None,
    )
    lr: float = setting(number("> 0"), "peak learning rate")
    min_lr: float = setting(
        number(">= 0", "<= 1"), "the last step's learning rate, as a fraction of lr; constant ignores it", 0.1
    )
    warmup: int = setting(integer(">= 0"), "steps of linear warm-up", 0)
    schedule: str = setting(
        choice("cosine", "linear", "wsd", "constant"),
        "the learning rate after the warm-up; wsd: constant, then a straight line down in the last part of the steps",
        "cosine",
    )
    decay: float = setting(number("> 0", "<= 1"), "that last part of wsd, as a share of all steps", 0.2)
    weight_decay: float = setting(number(">= 0"), "AdamW's, on matrices only", 0.1)
    betas: tuple[float, float] = setting(numbers(2, ">= 0", "< 1"), "AdamW's averages", (0.9, 0.95))
    eps: float = setting(number("> 0"), "AdamW's denominator", 1e-8)
    z_loss: float = setting(
        number(">= 0"),
        "weight of each token's squared logsumexp of logits in the training loss, which has it; validation does not",
        0.0,
    )
    clip: float = setting(number("> 0"), "largest global gradient norm", 1.0)
    skip_spikes: float = setting(
        Rule("a number > 1, or 0", (int, float), lambda value: value == 0 or 1 < value < float("inf"), float),
        "steps whose gradient norm is over so many times the median of the last 100 are not made, 5 in a row at most; 0: all "
        "are made",
        0.0,
    )
    dtype: str = setting(choice("bf16", "fp32"), "of activations and of layers that are not quantized", "bf16")
    checkpointing: str = setting(
        choice("none", "selective", "full"),
        "what runs again in backward; full: blocks, of which only inputs are kept; selective: all of them but GEMMs and "
        "attention",
        "none",
    )
    recompute_every: int = setting(integer(">= 1"), "with checkpointing: every n-th block does, the others keep all", 1)
    compile: bool = setting(flag(), "torch.compile, block by block; blocks that torch gives up on end the run", False)
    attention: str = setting(
        choice("auto", "flash", "cudnn"),
        "backend of scaled_dot_product_attention on GPUs; auto: the fastest by measurement that fits the run",
        "auto",
    )
    weight_cache: str = setting(
        choice("step", "forward"),
        "step: weights are cast once a step and kept; forward: wherever they are used, which keeps nothing",
        "step",
    )
    main_grads: str = setting(
        choice("off", "grad"),
        "who adds the gradients of microbatches; grad: wgrads do in their GEMM, for weights that FSDP has not, uncompiled",
        "off",
    )
    cuda_graph: bool | str = setting(
        GRAPH, "steps are captured in a CUDA graph and replayed; auto: on GPUs, wherever nothing forbids it", "auto"
    )
    sentinel: int = setting(
        integer(">= 1", also=(0,)),
        "in every n-th step the first microbatch runs twice, and other bits end the run before the update; 0: never",
        0,
    )
    profile: int = setting(integer(">= 1", also=(0,)), "the step that is profiled; 0: none", 0)
    profiler: str = setting(
        choice("torch", "nvtx"),
        "torch: a trace of that step, and the time of exposed communication; nvtx: ranges for NVIDIA's profilers, on GPUs",
        "torch",
    )
    memory_history: bool = setting(
        flag(), "the snapshot of a GPU that is out of memory has the stack of each allocation, slower", False
    )
    deterministic: bool = setting(flag(), "the same bits on every run on GPUs too, slower", False)
    ledger: str = setting(
        choice("first", "always", "off"),
        "steps whose bytes on the wire are counted and compared with the plan; first: the third of a run and after a swap",
        "first",
    )
    eval_every: int = setting(integer(">= 1"), "steps between validations; the last step always has one", 100)
    eval_batches: int = setting(integer(">= 1"), "batches of global_batch sequences in one validation", 4)
    log_every: int = setting(
        integer(">= 1"),
        "steps between lines in a file or a pipe, and between statistics of casts; metrics.jsonl has every step",
        10,
    )


@dataclass(frozen=True, kw_only=True)
class Checkpoint(Section):
    """When to save and what to continue from."""

    every: int = setting(integer(">= 0"), "steps between checkpoints; 0: none before the last step", 100)
    at_end: bool = setting(
        flag(),
        "the last step has a checkpoint; false: it has none, and steps after the newest checkpoint are lost",
        True,
    )
    keep: int = setting(integer(">= 1"), "newest checkpoints kept", 3)
    asynchronous: bool = setting(
        flag(),
        "a checkpoint is copied to the host's memory and written while the next steps run; false: training waits",
        True,
    )
    resume: str = setting(
        text('"auto", "none" or a path'), "auto: the newest complete checkpoint of the run, if any", "auto"
    )

    def due(self, step: int, last: bool) -> bool:
        """Whether step `step`, which is the run's last or not, has a checkpoint."""
        return self.at_end if last else self.every > 0 and step % self.every == 0

    @property
    def none(self) -> bool:
        """Whether the run saves nothing, not even when it is stopped."""
        return not (self.every or self.at_end)


METRICS = Rule(
    'a list of "csv", "tensorboard" and "wandb"', (list, tuple),
    lambda value: set(map(str, value)) <= {"csv", "tensorboard", "wandb"} and len(set(value)) == len(value), tuple,
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Run(Section):
    """Where a run leaves its files."""

    dir: str = setting(text(), "folder of the run: config, plan, logs, metrics, plots, checkpoints")
    hang_after: float = setting(
        number("> 0"),
        "seconds without a move of any rank in a step, after which each rank's place is said and the run ends; six times as "
        "long where things are slow",
        50.0,
    )
    metrics: tuple[str, ...] = setting(METRICS, "where the numbers of metrics.jsonl go besides", ())


def _names_a_recipe(value: Any) -> bool:
    return bool(value) if isinstance(value, str) else isinstance(value.get("name"), str)


def _names_strategies(value: Any) -> bool:
    return bool(value) if isinstance(value, str) else value.keys() <= {"fprop", "dgrad", "wgrad"}


def _are_swaps(value: Any) -> bool:
    return all(
        isinstance(entry, dict)
        and entry.keys() == {"at_step", "recipe"}
        and type(entry["at_step"]) is int
        and entry["at_step"] >= 1
        and RECIPE.accepts(entry["recipe"])
        for entry in value
    )


RECIPE = Rule("a recipe's name or { name = ..., its options }", (str, dict), _names_a_recipe)
SWAP = Rule(
    "a list of { at_step = an integer >= 1, recipe = as above }", (list, tuple), _are_swaps, lambda value: tuple(value)
)
OVERLAP = Rule("auto, a strategy's name or { fprop = ..., dgrad = ..., wgrad = ... }", (str, dict), _names_strategies)


@dataclass(frozen=True, kw_only=True)
class _Choices(Section):
    """The settings of a group that stand before the switches of layers."""

    name: str = setting(text(), "for messages, the plan and --groups.NAME.key")
    match: tuple[str, ...] = setting(texts(), "patterns of layer names, as in layer-groups.md")
    recipe: str | dict[str, Any] | None = setting(RECIPE, "how the three GEMMs are quantized", None)
    style: str | None = setting(choice("column", "row", "local"), "how tp cuts the weight", None)
    sequence_parallel: bool | None = setting(flag(), "its tokens are cut over the tp ranks", None)
    siblings: bool | None = setting(flag(), "layers of one parent read the same x and share its quantization", None)
    overlap: str | dict[str, str] | None = setting(OVERLAP, "who schedules GEMMs and collectives", None)


@dataclass(frozen=True, kw_only=True)
class Group(LayerOptions, _Choices):
    """Layers chosen by name. Groups are a list: the last match wins, key by key; what is unset stays as it was."""

    swap: tuple[dict[str, Any], ...] | None = setting(
        SWAP,
        "recipes that take over when so many steps are done; a later group's recipe ends them for its layers",
        None,
    )
    stats: bool | None = setting(flag(), "scale, underflow, saturation and SQNR of each cast go into the metrics", None)

    def title(self) -> str:
        return f"[[groups]] {self.name!r}"

    def layer_fields(self) -> dict[str, Any]:
        """What this group sets of the layers themselves, for `dlp.LayerGroup`. Prologues are the model's."""
        return {name: value for name in FIELDS if (value := getattr(self, name, None)) is not None}

    def recipes(self) -> list[str | dict[str, Any]]:
        """All recipes that are named here."""
        return [
            recipe for recipe in (self.recipe, *(entry["recipe"] for entry in self.swap or ())) if recipe is not None
        ]


SCHEMA: dict[str, type[Section]] = {
    "mesh": Mesh,
    "model": Model,
    "data": Data,
    "train": Train,
    "checkpoint": Checkpoint,
    "run": Run,
    "groups": Group,
}
