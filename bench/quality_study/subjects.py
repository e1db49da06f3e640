"""Subjects of the quality study: the change of each branch to the bf16 config, and the bars, the largest accepted increases of
the loss.

The published nvfp4 run (arXiv 2509.25149) has 62 blocks, of which the first 2 and the last 8 stay in bf16. Scaled to the six
blocks of `launch/configs/quality.toml`, these are 0.2 and 0.8 blocks. Therefore `nvfp4` has the last block in bf16, and
`nvfp4-first-last` the first and the last.
"""

from __future__ import annotations

from dataclasses import dataclass

from launch.config.sections import Train

TAIL = 0.82  # fraction of the steps before the recipe change of a "-tail" subject: 18 % remain, as published


@dataclass(frozen=True)
class Family:
    """Subjects that share bars and a pooled standard deviation.

    early         bar before the learning rate decays: largest accepted increase of the loss relative to bf16
    end           bar at the end
    resolution    largest half-width of the interval for the verdict "within"; None: any
    common        whether a common effect of the family may differ between seeds
    """

    name: str
    early: float
    end: float
    resolution: float | None = None
    common: bool = False


EIGHT = Family("8 bits", early=0.0015, end=0.0015, resolution=0.0010)
FOUR = Family("4 bits", early=0.0100, end=0.0080, common=True)


@dataclass(frozen=True)
class Subject:
    """One kind of branch.

    arguments    overrides of `launch/configs/quality.toml`; the word HALF stands for half of the global batch
    ranks        number of GPUs
    needs        package that the branch imports; "": none
    """

    name: str
    arguments: tuple[str, ...] = ()
    family: Family = EIGHT
    ranks: int = 1
    needs: str = ""

    def overrides(self, train: Train) -> list[str]:
        """Return `arguments` with HALF replaced by half of the global batch of `train`."""
        return [argument.replace("HALF", str(train.global_batch // 2)) for argument in self.arguments]


def _recipe(name: str, **options: str) -> tuple[str, str]:
    table = {"name": f'"{name}"', **options}
    return "--recipe", "{ " + ", ".join(f"{key} = {value}" for key, value in table.items()) + " }"


def _in_bf16(*patterns: str) -> tuple[str, str]:
    """Return the override that runs the layers that match these patterns, and the head, in bf16."""
    return "--groups.edges.match", "[" + ", ".join(f'"{pattern}"' for pattern in (*patterns, "lm_head")) + "]"


def _four(name: str, *arguments: str, edges: tuple[str, ...] = ("layers.-1.**",), **options: str) -> Subject:
    return Subject(name, (*_recipe("nvfp4", **options), *_in_bf16(*edges), *arguments), FOUR)


def _tail(recipe: str) -> tuple[str, str]:
    return "--groups.default.swap", f"[{{ at_step = {TAIL}, recipe = {recipe} }}]"


# The second bf16 branch adds the gradients of two microbatches, and so differs from the first in the order of a sum.
BASELINES = (Subject("bf16"), Subject("bf16-again", ("--train.micro_batch", "HALF")))
RECIPES = ("fp8_current", "fp8_delayed", "fp8_rowwise", "fp8_block", "mxfp8", "int8")
FORWARD_TAIL = '{{ name = "nvfp4", high_precision = ["fprop"]{} }}'
FP8_WIRE = '{ fprop = "fp8", dgrad = "fp8" }'
SUBJECTS = (
    *BASELINES,
    *(Subject(name, ("--recipe", name)) for name in RECIPES),
    _four("nvfp4"),
    _four("nvfp4-forward-tail", *_tail(FORWARD_TAIL.format(""))),
    _four("nvfp4-bf16-tail", *_tail('"bf16"')),
    _four("nvfp4-first-last", edges=("layers.0.**", "layers.-1.**")),
    _four("nvfp4-all", edges=()),
    _four("nvfp4-attention", edges=("layers.*.self_attn.*", "layers.-1.**")),
    _four("nvfp4-no-signs", rht_signs='"none"'),
    _four("nvfp4-four-over-six", four_over_six="true"),
    _four("nvfp4-four-over-six-forward-tail", *_tail(FORWARD_TAIL.format(", four_over_six = true")), four_over_six="true"),
    # Negative control of the study: nvfp4 in five of six blocks must be "outside" of the bars of 8 bits
    Subject("planted-nvfp4", (*_recipe("nvfp4"), *_in_bf16("layers.-1.**"))),
    *(Subject(name, ("--train.optimizer", name), needs="torchao") for name in ("adamw8bit", "adamw4bit", "adamwfp8")),
    Subject("wire-bf16", (*_recipe("bf16", wire='{ fprop = "bf16", dgrad = "bf16" }'), "--mesh.tp", "2"), ranks=2),
    Subject("wire-fp8", (*_recipe("bf16", wire=FP8_WIRE), "--mesh.tp", "2"), ranks=2),
    Subject("wire-fp8-fp8_current", (*_recipe("fp8_current", wire=FP8_WIRE), "--mesh.tp", "2"), ranks=2),
    Subject("grad_wire-bf16", ("--mesh.grad_wire", "bf16"), ranks=2),
    Subject("grad_wire-fp8", ("--mesh.grad_wire", "fp8"), ranks=2),
)  # fmt: skip
BY_NAME = {subject.name: subject for subject in SUBJECTS}
