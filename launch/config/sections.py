"""Settings of a training run: names, ranges, defaults and descriptions, one class for each section of the TOML file.

docs/config.md and `--help` are generated from these classes. Rules across settings are in rules.py; the section [model] is in
launch/models/settings.py, and the layer options of [[groups]] in groups.py. This module does not import torch, so that programs
reject wrong settings before the import, which takes seconds.
"""

from dataclasses import dataclass
from typing import Any

from launch.models.settings import Model
from launch.settings.schema import Rule, Section, choice, flag, integer, number, numbers, setting, text, texts

AXES, CP = ("dp_replicate", "dp_shard", "tp"), "cp"  # as in `dlp.comm.mesh`, whose import would import torch


@dataclass(frozen=True, kw_only=True)
class Mesh(Section):
    """Device mesh: world size = dp_replicate x dp_shard x cp x tp. One dp axis may be -1: all remaining ranks."""

    dp_replicate: int = setting(integer(">= 1", also=(-1,)), "number of replicas of the model", 1)
    dp_shard: int = setting(integer(">= 1", also=(-1,)), "ranks that shard parameters and optimizer states by FSDP", -1)
    cp: int = setting(
        integer(">= 1"),
        "context-parallel ranks, over which each sequence is sharded; FSDP shards over dp_shard x cp ranks",
        1,
    )
    tp: int = setting(integer(">= 1"), "tensor-parallel ranks", 2)
    sequence_parallel: bool = setting(
        flag(), "sequence parallelism: between layers, tokens are sharded over the tp ranks", True
    )
    transport: str = setting(
        choice("auto", "nccl", "mapped"),
        "carrier of transfers over tp; mapped: memory that the GPUs of one host map from each other; auto: mapped where all tp "
        "ranks can map each other's memory, else NCCL (gloo on CPUs)",
        "auto",
    )
    overlap_table: str | None = setting(
        text(),
        'file of measured times from dlp.parallel.tune, from which overlap = "auto" chooses; unset: the shipped tables',
        None,
    )
    amax_group: str = setting(
        choice("auto", AXES[-1], "tp+cp", "tp+dp", "world"),
        "ranks that agree on an amax, and so share a scale; auto: only the ranks that correctness requires",
        "auto",
    )
    quantized_gather: bool = setting(flag(), "FSDP gathers quantized weights", True)
    reshard_after_forward: bool = setting(
        flag(), "FSDP frees the gathered weights of a block after forward; false: after backward", True
    )
    grad_wire: str = setting(
        choice("auto", "fp32", "bf16", "fp8"),
        "dtype in which FSDP sends gradients; fp32: FSDP's own reduce-scatter; bf16, fp8: sent in this dtype, summed in fp32; "
        "auto: bf16 where gradients are bf16 before the reduction (equal values), else fp32",
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
    """Training data. See data.md for the formats."""

    path: str | tuple[dict[str, Any], ...] = setting(
        SOURCES, "source of tokens; with several sources, each is sampled in proportion to its weight", "builtin:stdlib"
    )
    validation: float = setting(
        number("> 0", "< 1"),
        "share of files of builtin:stdlib that is held out; prepared folders already contain a split",
        0.05,
    )
    reset_attention: bool = setting(
        flag(),
        "attention and positions restart at each document; tokens do not attend to earlier documents of the sequence",
        False,
    )


@dataclass(frozen=True, kw_only=True)
class Train(Section):
    """Training steps. A sequence is one row of a batch; a step reads global_batch x sequence tokens on any mesh."""

    steps: int = setting(integer(">= 1"), "optimizer steps")
    micro_batch: int = setting(
        integer(">= 1", also=(-1,)),
        "sequences per data-parallel rank in one forward; -1: all sequences of the rank in a step",
        -1,
    )
    global_batch: int = setting(
        integer(">= 1"), "sequences per step over all ranks; a step accumulates the gradients of its microbatches"
    )
    sequence: int = setting(integer(">= 1"), "tokens per sequence")
    reduce_gradients: str = setting(
        choice("auto", "step", "microbatch"),
        "when FSDP reduces gradients; step: once, after the last microbatch, with unsharded fp32 gradients until then; "
        "microbatch: after each microbatch, with sharded gradients; auto: step if memory suffices",
        "auto",
    )
    seed: int = setting(integer(">= 0"), "seed of the initial weights and of the order of the data", 0)
    optimizer: str = setting(
        choice("adamw", "muon", "adamw8bit", "adamw4bit", "adamwfp8"),
        "muon: Muon for matrices of blocks, AdamW for other parameters; adamw8bit, adamw4bit, adamwfp8: optimizer states "
        "stored in 8 or 4 bits, by torchao",
        "adamw",
    )
    init_from: str | None = setting(
        text("the folder of a checkpoint"),
        "initial weights: a checkpoint of the same [model], for example from launch.convert_hf; unset: random weights",
        None,
    )
    lr: float = setting(number("> 0"), "peak learning rate")
    min_lr: float = setting(
        number(">= 0", "<= 1"),
        "learning rate of the last step, as a fraction of lr; not used by the schedule constant",
        0.1,
    )
    warmup: int = setting(integer(">= 0"), "steps of linear warm-up", 0)
    schedule: str = setting(
        choice("cosine", "linear", "wsd", "constant"),
        "learning rate after the warm-up; wsd: constant, then a linear decay over the last part of the steps",
        "cosine",
    )
    decay: float = setting(number("> 0", "<= 1"), "length of the decay of wsd, as a share of all steps", 0.2)
    weight_decay: float = setting(number(">= 0"), "weight decay of matrices; other parameters have none", 0.1)
    betas: tuple[float, float] = setting(numbers(2, ">= 0", "< 1"), "decay rates of the averages of AdamW", (0.9, 0.95))
    eps: float = setting(number("> 0"), "number added to the denominator of AdamW", 1e-8)
    z_loss: float = setting(
        number(">= 0"),
        "weight of the squared logsumexp of the logits of each token in the training loss; not part of the validation loss",
        0.0,
    )
    clip: float = setting(number("> 0"), "gradients are scaled down to this global norm if the norm is larger", 1.0)
    skip_spikes: float = setting(
        Rule("a number > 1, or 0", (int, float), lambda value: value == 0 or number("> 1").accepts(value), float),
        "the optimizer step is skipped, at most 5 times in a row, if the gradient norm exceeds this multiple of the median of "
        "the last 100 norms; 0: never",
        0.0,
    )
    dtype: str = setting(choice("bf16", "fp32"), "dtype of activations and of layers that are not quantized", "bf16")
    checkpointing: str = setting(
        choice("none", "selective", "full"),
        "recomputation in backward; full: complete blocks, whose inputs are saved; selective: all operations of a block except "
        "GEMMs and attention",
        "none",
    )
    recompute_every: int = setting(
        integer(">= 1"), "with checkpointing: every n-th block is recomputed, the other blocks save all activations", 1
    )
    compile: bool = setting(
        flag(), "torch.compile, block by block; the run ends if torch cannot compile a block", False
    )
    attention: str = setting(
        choice("auto", "flash", "cudnn"),
        "backend of scaled_dot_product_attention on GPUs; auto: the fastest measured backend that supports the run",
        "auto",
    )
    weight_cache: str = setting(
        choice("step", "forward"),
        "step: weights are cast once per step, and the operands are kept; forward: weights are cast in each forward and "
        "backward, which saves memory",
        "step",
    )
    main_grads: str = setting(
        choice("off", "grad"),
        "accumulation of weight gradients over microbatches; off: by autograd; grad: by the wgrad GEMM, only for weights that "
        "FSDP does not manage, without torch.compile",
        "off",
    )
    cuda_graph: bool | str = setting(
        GRAPH,
        "steps are captured as a CUDA graph and replayed; auto: on GPUs, unless another setting forbids a graph",
        "auto",
    )
    kernels: str = setting(
        choice("auto", "required"),
        "required: the run ends if native kernels are not available; auto: casts then run in plain torch, and the plan says so",
        "auto",
    )
    sentinel: int = setting(
        integer(">= 1", also=(0,)),
        "in every n-th step the first microbatch runs twice, and sentinel_action applies if the bits differ; 0: never",
        0,
    )
    sentinel_action: str = setting(
        choice("stop", "skip"),
        "with sentinel, if the bits differ: stop: the run ends; skip: the update of the step is skipped, unless a weight or "
        "optimizer state differs in memory or scales are delayed",
        "stop",
    )
    sentinel_tensors: bool = setting(
        flag(),
        "with sentinel: compared tensors are copied to host memory, and if they differ, both are written to the folder of the "
        "run; slower",
        False,
    )
    profile: int = setting(integer(">= 1", also=(0,)), "number of the step that is profiled; 0: none", 0)
    profiler: str = setting(
        choice("torch", "nvtx"),
        "torch: a trace of this step and the time of exposed communication; nvtx: NVTX ranges for NVIDIA's profilers, on GPUs",
        "torch",
    )
    memory_history: bool = setting(
        flag(),
        "record the stack of each allocation for the memory snapshot that an out-of-memory error writes; slower",
        False,
    )
    deterministic: bool = setting(flag(), "runs with equal settings are bitwise equal, on GPUs as well; slower", False)
    invariant: bool = setting(
        flag(),
        "results are bitwise equal on every mesh, with up to 8 ranks of tp and of dp_shard, and 2 of dp_replicate; slower, see "
        "prove.md",
        False,
    )
    ledger: str = setting(
        choice("first", "always", "off"),
        "steps in which the bytes on the wire are counted and compared with the plan; first: the third step of a run and the "
        "third step after a recipe change",
        "first",
    )
    eval_every: int = setting(integer(">= 1"), "steps between validations; the last step always validates", 100)
    eval_batches: int = setting(integer(">= 1"), "batches of global_batch sequences in a validation", 4)
    log_every: int = setting(
        integer(">= 1"),
        "steps between progress lines in a file or a pipe, and between statistics of casts; metrics.jsonl records every step",
        10,
    )


@dataclass(frozen=True, kw_only=True)
class Checkpoint(Section):
    """Checkpoints: when to save, and where to continue."""

    every: int = setting(integer(">= 0"), "steps between checkpoints; 0: no checkpoint before the last step", 100)
    at_end: bool = setting(
        flag(),
        "save after the last step; false: steps after the newest checkpoint are lost",
        True,
    )
    keep: int = setting(integer(">= 1"), "number of newest checkpoints that are kept", 3)
    asynchronous: bool = setting(
        flag(),
        "copy checkpoints to host memory and write them while the next steps run; false: training waits",
        True,
    )
    resume: str = setting(
        text('"auto", "none" or a path'),
        "checkpoint to continue from; auto: the newest complete checkpoint of the run, if there is one",
        "auto",
    )

    def due(self, step: int, last: bool) -> bool:
        """Return whether a checkpoint is saved after `step`; `last`: whether this is the last step of the run."""
        return self.at_end if last else self.every > 0 and step % self.every == 0

    @property
    def none(self) -> bool:
        """Return whether the run never saves a checkpoint, not even if SIGTERM stops it."""
        return not (self.every or self.at_end)


METRICS = Rule(
    'a list of "csv", "tensorboard" and "wandb"', (list, tuple),
    lambda value: set(map(str, value)) <= {"csv", "tensorboard", "wandb"} and len(set(value)) == len(value), tuple,
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Run(Section):
    """Output of a run."""

    dir: str = setting(text(), "folder of the run: config, plan, logs, metrics, plots, checkpoints")
    hang_after: float = setting(
        number("> 0"),
        "seconds without progress on any rank before the run stops and reports where each rank is; slow phases (compilation, "
        "saving) are given six times as long",
        50.0,
    )
    metrics: tuple[str, ...] = setting(METRICS, "outputs of the metrics in addition to metrics.jsonl", ())


def _names_a_recipe(value: Any) -> bool:
    return bool(value) if isinstance(value, str) else isinstance(value.get("name"), str)


def _names_strategies(value: Any) -> bool:
    return bool(value) if isinstance(value, str) else value.keys() <= {"fprop", "dgrad", "wgrad"}


def _are_swaps(value: Any) -> bool:
    return all(
        isinstance(entry, dict)
        and entry.keys() == {"at_step", "recipe"}
        and (NUMBER_OF_STEPS.accepts(entry["at_step"]) or SHARE_OF_STEPS.accepts(entry["at_step"]))
        and RECIPE.accepts(entry["recipe"])
        for entry in value
    )


RECIPE = Rule("a recipe's name or { name = ..., its options }", (str, dict), _names_a_recipe)
NUMBER_OF_STEPS, SHARE_OF_STEPS = integer(">= 1"), number("> 0", "< 1")
SWAP = Rule(
    f"a list of {{ at_step = {NUMBER_OF_STEPS.words}, or {SHARE_OF_STEPS.words}, recipe = as above }}",
    (list, tuple),
    _are_swaps,
    lambda value: tuple(value),
)
OVERLAP = Rule("auto, a strategy's name or { fprop = ..., dgrad = ..., wgrad = ... }", (str, dict), _names_strategies)


@dataclass(frozen=True, kw_only=True)
class Choices(Section):
    """Settings of a layer group that precede the layer options of `dlp` in the documentation."""

    name: str = setting(text(), "name in messages, in the plan and in --groups.NAME.key")
    match: tuple[str, ...] = setting(texts(), "patterns of layer names, as in layer-groups.md")
    recipe: str | dict[str, Any] | None = setting(RECIPE, "recipe: quantization of the three GEMMs", None)
    style: str | None = setting(
        choice("column", "row", "local"), "dimension of the weight that is sharded over tp", None
    )
    sequence_parallel: bool | None = setting(flag(), "tokens are sharded over the tp ranks", None)
    siblings: bool | None = setting(
        flag(), "layers of one parent module read the same x, which is quantized once", None
    )
    overlap: str | dict[str, str] | None = setting(OVERLAP, "overlap strategy: schedule of GEMMs and transfers", None)

    def title(self) -> str:
        return f"[[groups]] {self.name!r}"


@dataclass(frozen=True, kw_only=True)
class Schedule(Section):
    """Settings of a layer group that follow the layer options of `dlp` in the documentation."""

    swap: tuple[dict[str, Any], ...] | None = setting(
        SWAP,
        "scheduled recipe changes: at_step is the number of completed steps, or their share of [train] steps; a recipe of a "
        "later group cancels the changes of the layers in this group",
        None,
    )
    stats: bool | None = setting(
        flag(), "record scale, underflow, saturation and SQNR of each cast in the metrics", None
    )

    def swaps(self, steps: int) -> list[tuple[int, str | dict[str, Any]]]:
        """Return (number of completed steps, recipe) for each recipe change in a run of `steps` steps."""
        return [
            (at if isinstance(at := entry["at_step"], int) else max(1, round(at * steps)), entry["recipe"])
            for entry in self.swap or ()
        ]


@dataclass(frozen=True, kw_only=True)
class PlainGroup(Schedule, Choices):
    """Layer group for checks before torch is imported. It repeats the layer options that `groups.Group` inherits from `dlp`."""

    delay_wgrad: bool | None = setting(flag(), "layer option of dlp", None)
    save_original_input: bool | None = setting(flag(), "layer option of dlp", None)


SECTIONS: dict[str, type[Section]] = {
    "mesh": Mesh,
    "model": Model,
    "data": Data,
    "train": Train,
    "checkpoint": Checkpoint,
    "run": Run,
}
