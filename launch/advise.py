"""Rank the settings (mesh, recipe, micro batch, recomputation) of a model on a number of GPUs by predicted tokens per second.

    python -m launch.advise CONFIG --world 64 --board h200 [--recipes fp8_current bf16] [--show 5] [--section.key value ...]

The program combines each mesh of `meshes` with each recipe and micro batch. Recomputation (`[train] checkpointing`) is tried
only for a mesh and recipe for which no micro batch fits in memory without it. No rank is started. The program plans models with
only a few blocks, and extrapolates seconds and bytes to the number of blocks of the config, since both are linear in the number
of equal blocks.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dlp.comm.mesh import DP_REPLICATE, DP_SHARD, TP
from dlp.parallel.model.plan import table
from launch.common.devices import BOARDS
from launch.common.program import run_program
from launch.common.units import said_bytes
from launch.config.run_config import Config, ConfigError, command_line, count, load, make_parser
from launch.estimate.few_blocks import Extended
from launch.estimate.rates import boards, rates_of
from launch.ranks.links import HOST
from launch.settings import overrides

MICRO_BATCHES = (8, 4, 2, 1)
CHECKPOINTING = ("none", "selective", "full")
SHOWN = 5


@dataclass(frozen=True)
class Candidate:
    """Predicted step of one combination of settings.

    settings            command-line overrides (`--section.key`, value, ...) that make this combination
    seconds             predicted seconds per step
    tokens_per_second   predicted tokens per second over all GPUs
    peak                predicted peak memory per GPU, in bytes
    reason              the three largest shares of the step time, as text
    """

    settings: tuple[str, ...]
    seconds: float
    tokens_per_second: float
    peak: float
    reason: str

    def cells(self, world: int) -> tuple[str, ...]:
        return (
            f"{self.tokens_per_second:,.0f}", f"{self.tokens_per_second / world:,.0f}", said_bytes(self.peak), self.reason,
            " ".join(self.settings),
        )  # fmt: skip


def candidate(extended: Extended, settings: Sequence[str]) -> Candidate:
    """Return the predicted step of `extended`, a model planned with the overrides `settings`."""
    seconds, shares = extended.seconds()
    largest = sorted(shares, key=lambda kind: -shares[kind])[:3]
    reason = ", ".join(f"{kind} {shares[kind] / seconds:.0%}" for kind in largest)
    train = extended.config.train
    return Candidate(tuple(settings), seconds, train.global_batch * train.sequence / seconds, extended.peak(), reason)


def meshes(config: Config, world: int) -> Iterator[tuple[str, ...]]:
    """Yield the command-line overrides of [mesh] to try.

    tp is 1, 2, 4 or 8, at most the number of GPUs of a host, and divides heads, kv_heads, ffn and vocab. cp is the value in the
    config. The remaining factor of the number of ranks becomes dp_shard, or dp_shard within a host times dp_replicate over
    hosts.
    """
    m = config.family
    for tp in (1, 2, 4, 8):
        if (
            world % (tp * config.mesh.cp)
            or tp > HOST
            or any(size % tp for size in (m.heads, m.kv_heads, m.ffn, m.vocab))
        ):
            continue
        rest = world // (tp * config.mesh.cp)
        inside = max(1, HOST // (tp * config.mesh.cp))
        for replicate in dict.fromkeys((1, rest // inside if rest % inside == 0 and rest > inside else 1)):
            yield (
                f"--mesh.{TP}", str(tp), f"--mesh.{DP_REPLICATE}", str(replicate), f"--mesh.{DP_SHARD}",
                str(rest // replicate),
            )  # fmt: skip


def advise(
    name: str, arguments: Sequence[str], world: int, board: str, recipes: Sequence[str]
) -> tuple[list[Candidate], list[str]]:
    """Return the candidates that fit in memory, fastest first, and one sentence for each combination that is invalid or does
    not fit. Combinations that only the rules of micro_batch reject have no sentence.

    Args:
        name: Name or path of the config.
        arguments: Command-line overrides of the config.
        world: Number of GPUs.
        board: Key of `launch.common.devices.BOARDS`.
        recipes: Recipes to try for the layer group `default`; empty: the recipe of the config.

    Raises:
        ValueError: There is no table of measured speeds for this board.
    """
    rates_of(board)
    usable, fit, refused = BOARDS[board].usable, list[Candidate](), list[str]()
    for mesh in meshes(load(name, arguments), world):
        for recipe in recipes or [""]:
            for checkpointing in CHECKPOINTING:
                found = list(_micro_batches(name, arguments, world, board, (*mesh, *_recipe(recipe)), checkpointing))
                fitting = [each for each in found if not isinstance(each, str) and each[1].peak() <= usable]
                fit += [candidate(extended, settings) for settings, extended in fitting]
                refused += [each for each in found if isinstance(each, str)]
                refused += [
                    f"{' '.join(settings)}: needs {said_bytes(extended.peak())} of {said_bytes(usable)}"
                    for settings, extended in (each for each in found if not isinstance(each, str))
                    if extended.peak() > usable
                ]
                if fitting:  # recomputation would only cost more time
                    break
    return sorted(fit, key=lambda each: each.seconds), refused


def _recipe(recipe: str) -> tuple[str, ...]:
    return ("--recipe", recipe) if recipe else ()


def _micro_batches(
    name: str, arguments: Sequence[str], world: int, board: str, mesh: Sequence[str], checkpointing: str
) -> Iterator[tuple[tuple[str, ...], Extended] | str]:
    """Try micro batches from the largest down to the second one that fits in memory.

    Yields (settings, planned model) for each micro batch, whether it fits or not; a sentence if the config is rejected for
    another reason than the micro batch.
    """
    fitting = 0
    for micro in MICRO_BATCHES:
        settings = (*mesh, "--train.micro_batch", str(micro), "--train.checkpointing", checkpointing)
        try:
            extended = Extended(load(name, [*arguments, *settings]), world, board)
        except ConfigError as error:
            if "micro_batch" not in str(error):
                yield f"{' '.join(settings)}: {error}"
            continue
        except ValueError as error:
            yield f"{' '.join(settings)}: {error}"
            return
        yield settings, extended
        fitting += extended.peak() <= BOARDS[board].usable
        if fitting == 2:
            return


def main(arguments: Sequence[str]) -> None:
    parser = make_parser("launch.advise", "Ranks meshes, recipes and recomputation by predicted tokens per second.")
    parser.add_argument("--world", type=count, default=8, help="the number of GPUs [8]")
    parser.add_argument("--board", choices=boards(), default=boards()[0], help="kind of GPU [%(default)s]")
    parser.add_argument("--recipes", nargs="+", default=[], help="recipes to try for group default [the config's]")
    parser.add_argument("--show", type=count, default=SHOWN, help=f"settings to print [{SHOWN}]")
    options, _ = command_line(parser, arguments)
    own = [part for name, text in overrides.split(arguments)[1] for part in (f"--{name}", text)]
    fit, refused = advise(options.config, own, options.world, options.board, options.recipes)
    if not fit:
        raise ValueError(
            f"{options.config} does not fit on {options.world} x {options.board} in any of {len(refused)} settings; "
            f"the first is rejected because {refused[0] if refused else 'no mesh divides the model'}: take more GPUs"
        )
    about = rates_of(options.board).about
    print(
        f"{options.config} on {options.world} x {options.board}: {len(fit)} settings fit, {len(refused)} do not; predicted "
        f"from rates of {about['device']}, {about['date']}, torch {about['torch']}\n"
    )
    header = ("tokens/s", "per GPU", "memory", "largest costs", "settings")
    print("\n".join(table(header, [each.cells(options.world) for each in fit[: options.show]])))
    best = shlex.join([options.config, *own, *fit[0].settings])
    print(f"\npython -m launch.train {best} --plan --world {options.world} --device {options.board}")


if __name__ == "__main__":
    run_program(main)
