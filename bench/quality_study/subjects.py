"""Subjects of the quality study: what each branch changes in the bf16 config, and the bars that a subject must hold.

A subject's `arguments` are overrides of `launch/configs/quality.toml`, in which half of the global batch of a study replaces
the word `HALF`.

The six blocks stand for the 62 blocks of the published nvfp4 run (arXiv 2509.25149), of which the first 2 and the last 8 stay
in bf16: in proportion 0.2 and 0.8 of six blocks. `nvfp4` therefore keeps the last block in bf16, `nvfp4-first-last` both ends.
"""

from __future__ import annotations

from dataclasses import dataclass

from launch.config.sections import Train

TAIL = 0.82  # share of the steps after which a recipe change is tried: 18 % remain, as published


@dataclass(frozen=True)
class Family:
    """Subjects that share bars and a pooled standard deviation. `early`, `end`: largest relative loss above bf16 before the
    learning rate decays and at the end. `resolution`: largest half-width of the interval of a subject that is "within".
    `common`: the effect of the family as a whole may differ from seed to seed."""

    name: str
    early: float
    end: float
    resolution: float | None = None
    common: bool = False


EIGHT = Family("8 bits", early=0.0015, end=0.0015, resolution=0.0010)
FOUR = Family("4 bits", early=0.0100, end=0.0080, common=True)


@dataclass(frozen=True)
class Subject:
    """One kind of branch. `ranks`: GPUs of one branch. `needs`: a package that the branch imports."""

    name: str
    arguments: tuple[str, ...] = ()
    family: Family = EIGHT
    ranks: int = 1
    needs: str = ""

    def overrides(self, train: Train) -> list[str]:
        """The arguments for a study with these settings."""
        return [argument.replace("HALF", str(train.global_batch // 2)) for argument in self.arguments]


def _recipe(name: str, **options: str) -> tuple[str, str]:
    table = {"name": f'"{name}"', **options}
    return "--recipe", "{ " + ", ".join(f"{key} = {value}" for key, value in table.items()) + " }"


def _in_bf16(*patterns: str) -> tuple[str, str]:
    """Patterns of layers, and the head, in bf16."""
    return "--groups.edges.match", "[" + ", ".join(f'"{pattern}"' for pattern in (*patterns, "lm_head")) + "]"


def _four(name: str, *arguments: str, edges: tuple[str, ...] = ("layers.-1.**",), **options: str) -> Subject:
    return Subject(name, (*_recipe("nvfp4", **options), *_in_bf16(*edges), *arguments), FOUR)


def _tail(recipe: str) -> tuple[str, str]:
    return "--groups.default.swap", f"[{{ at_step = {TAIL}, recipe = {recipe} }}]"


# A second branch in bf16 differs from the first in the order of a sum: gradients of two microbatches are added.
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
    # The check of the protocol: four bits in five of six blocks, judged by the bars of eight bits, must be "outside"
    Subject("planted-nvfp4", (*_recipe("nvfp4"), *_in_bf16("layers.-1.**"))),
    *(Subject(name, ("--train.optimizer", name), needs="torchao") for name in ("adamw8bit", "adamw4bit", "adamwfp8")),
    Subject("wire-bf16", (*_recipe("bf16", wire='{ fprop = "bf16", dgrad = "bf16" }'), "--mesh.tp", "2"), ranks=2),
    Subject("wire-fp8", (*_recipe("bf16", wire=FP8_WIRE), "--mesh.tp", "2"), ranks=2),
    Subject("wire-fp8-fp8_current", (*_recipe("fp8_current", wire=FP8_WIRE), "--mesh.tp", "2"), ranks=2),
    Subject("grad_wire-bf16", ("--mesh.grad_wire", "bf16"), ranks=2),
    Subject("grad_wire-fp8", ("--mesh.grad_wire", "fp8"), ranks=2),
)  # fmt: skip
BY_NAME = {subject.name: subject for subject in SUBJECTS}
