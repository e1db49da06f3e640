"""Train on this machine with torchrun, on every GPU or on two CPU ranks (`make pretrain`).

    python -m launch.local [--ranks N] [CONFIG] [--section.key value ...]

The number of ranks and tp are chosen so that mesh and global batch fit; a deviation from the config or from the number of
devices is printed. Values on the command line (--ranks, --mesh.tp) are used or rejected, never changed. Settings are checked
before any rank starts, so that a mistake is reported in one sentence and not as a failure report of torchrun.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from launch.config.early import refuse_early

if __name__ == "__main__":
    refuse_early(sys.argv[1:], ranks=False)  # importing torch takes seconds

import torch
from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from launch.checkpoint.manifest import other_weights, read_manifest, resolve
from launch.config.rules import choose, sizes_of_tp
from launch.config.run_config import Config, command_line, count, make_parser, to_toml
from launch.data.sources import open_sources
from launch.ranks.loopback_store import BACKEND, HOST, meet_on_loopback
from launch.ranks.process_exit import is_refusal, leave
from launch.report import metric_sinks
from launch.training.build import check_device

CPU_RANKS = 2


def devices_here() -> tuple[int, str]:
    """Return the largest number of ranks on this machine (one per GPU, else up to `CPU_RANKS`), and the name of a device."""
    gpus = torch.cuda.device_count()
    return (gpus, "GPU") if gpus else (min(CPU_RANKS, os.cpu_count() or 1), "CPU core")


def remarks(config: Config, chosen: tuple[int, int], devices: int, kind: str) -> Iterator[str]:
    """Yield lines about unused devices, and about a tp other than in the config. `chosen`: (ranks, tp)."""
    ranks, tp = chosen
    if ranks != devices:
        batch = config.train.global_batch
        yield f"using {ranks} of {devices} {kind}s: no mesh of more ranks fits tp and global_batch {batch}"
    if tp != config.mesh.tp:
        yield f"using tp = {tp} instead of {config.mesh.tp} on {ranks} {kind}{'s' * (ranks > 1)}"


def check_here(config: Config) -> None:
    """Raise ValueError for errors that the ranks would raise: a setting that needs another device, a missing package, missing
    data, or an invalid checkpoint."""
    check_device(config, "cuda" if torch.cuda.is_available() else "cpu")
    metric_sinks.check(config.run.metrics)
    open_sources(config.data.path, config.architecture.vocab, config.data.validation)
    if (path := resolve(config.checkpoint.resume, Path(config.run.dir, "checkpoints"))) is not None:
        read_manifest(path)
    elif config.train.init_from is not None:
        read_manifest(Path(config.train.init_from), other_weights)


def train(ranks: int, arguments: Sequence[str]) -> int:
    """Run `launch.train` on `ranks` ranks of this machine, and return the exit code: 0, 128 + signal number if a signal
    stopped torchrun, or 1 if a rank failed."""
    meet_on_loopback()
    meeting = [f"--rdzv-backend={BACKEND}", f"--rdzv-endpoint={HOST}", "--nnodes=1"]
    command = [*meeting, f"--nproc-per-node={ranks}", "-m", "launch.train", *arguments]
    try:
        torchrun.run(torchrun.parse_args(command))
    except SignalException as stopped:
        return 128 + stopped.sigval
    except ChildFailedError as failed:
        _, failure = failed.get_first_failure()
        ended = failure.exitcode == 1 and failure.error_file == "<N/A>"
        if not ended and not is_refusal(failure.error_file_data):  # otherwise the rank has already printed the message
            print(failed.format_msg(), file=sys.stderr)
        return 1
    return 0


def main(arguments: Sequence[str]) -> int:
    ours = argparse.ArgumentParser("launch.local", "%(prog)s [--ranks N] ...", add_help=False, allow_abbrev=False)
    ours.add_argument("--ranks", type=count)
    known, rest = ours.parse_known_args(arguments)
    parser = make_parser("launch.local", "Train on this machine, on every GPU or on two CPU ranks, or on --ranks N.")
    try:
        options, config = command_line(parser, rest)
        devices, kind = devices_here()
        ranks = [known.ranks] if known.ranks is not None else list(range(devices, 0, -1))
        chosen = choose(config, ranks, sizes_of_tp(config, rest))
        if not options.print_config:
            check_here(config)
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    if options.print_config:
        print(to_toml(config), end="")
        return 0
    for remark in remarks(config, chosen, ranks[0], kind):
        print(remark, flush=True)
    return train(chosen[0], [*rest, "--mesh.tp", str(chosen[1])])


if __name__ == "__main__":
    code = main(sys.argv[1:])
    if code or "--print-config" in sys.argv:
        sys.exit(code)
    leave(code)  # the normal exit of the interpreter takes seconds
