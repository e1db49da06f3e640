"""Pretraining: `torchrun --nproc-per-node N -m launch.train CONFIG [--section.key value ...]`.

    settings ─► mesh ─► run directory ─► model ─► data, checkpoint ─► the loop (trainer.py)

An invalid config is refused before the first step, with one sentence. Without torchrun the process is the only rank, and
trains with tp = 1; `--plan` and `--print-config` start no ranks.
"""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path

from launch.config.early import refuse_early

if __name__ == "__main__":
    refuse_early(sys.argv[1:], ranks=True)  # importing torch takes seconds

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.elastic.multiprocessing.errors import record

import dlp
from dlp.comm import transport
from dlp.comm.mesh import TP, ranks_of_host, shutdown, world_size
from dlp.comm.watch import READING, within
from dlp.kernels.table import device_kind
from dlp.parallel.traffic.ledger import LedgerError
from dlp.parallel.traffic.predict import Unpredictable
from launch.checkpoint.background_saver import describe as describe_saves
from launch.checkpoint.save_load import SaveError
from launch.common.devices import NAMES, board_of, kind_of
from launch.config.rules import on_one_rank, validate_world
from launch.config.run_config import Config, command_line, count, make_parser, to_toml
from launch.estimate.memory_check import check_fits, exceeded, planned
from launch.estimate.step_time import forecast_or_reason
from launch.estimate.timeline_picture import write_timeline
from launch.ranks import rank_objects
from launch.ranks.hang_watch import HangWatch, Place
from launch.ranks.links import describe_transports
from launch.ranks.process_exit import StopFlag, end_hung, leave, leave_after_exceptions, leave_behind, refuse
from launch.report.metrics import peak_memory
from launch.report.out_of_memory import sentence, watch_memory
from launch.report.run_dir import RunDir
from launch.settings.schema import ConfigError
from launch.training import deterministic, wire_bytes
from launch.training.build import Built, attention_of, build, check_device, meta_model
from launch.training.cuda_graph import describe_graph
from launch.training.optimizer import describe as describe_optimizer
from launch.training.recipe_schedule import planned_swaps
from launch.training.recomputation import describe as describe_compilation
from launch.training.sentinel import SentinelError
from launch.training.trainer import NotFinite, Trainer


def plan_text(config: Config, world: int, device: str, timeline: Path | None = None) -> str:
    """Return the text of `--plan`: mesh, layer plan, memory, bytes sent and predicted time. No rank is started.

    Args:
        config: The config.
        world: Number of ranks.
        device: One of `launch.common.devices.NAMES`.
        timeline: File for the predicted schedule: a picture (.png) or a trace (.json).

    Raises:
        ValueError: The config does not fit the ranks or the memory of the board, or `timeline` cannot be drawn.
    """
    check_device(config, kind_of(device))
    found = planned(config, world, device)
    check_fits(config, world, device, found)
    swaps = planned_swaps(config.groups, config.train.steps, meta_model(config), found.plan)
    sent = [
        *describe_transports(config.mesh.transport, found.dims, kind_of(device)),
        *wire_bytes.describe_gradients(found.plan, found.load, found.waits),
        *wire_bytes.describe(found.plan, found.load, config.train.optimizer),
    ]
    held = [f"memory: {found.memory}"] if isinstance(found.memory, Unpredictable) else found.memory.describe()
    averages = describe_optimizer(config, found.plan, found.dims.shards)
    kind = kind_of(device)
    layers = [str(found.plan), *config.architecture.describe(config.mesh.tp), "", attention_of(config, kind).describe()]
    layers += [describe_graph(config, kind), *describe_compilation(config.train)]
    saves = describe_saves(config.checkpoint)
    time = forecast_or_reason(config, world, device, found)
    if timeline is not None:
        write_timeline(time, timeline)
    predicted = ["", f"time: not predicted: {time}"] if isinstance(time, str) else ["", *time.describe()]
    lines = [
        found.dims.describe(kind),
        *layers,
        "",
        *held,
        "",
        *sent,
        *averages,
        *map(str, swaps),
        saves,
        *(predicted if kind != "cpu" else []),
    ]
    return "\n".join(lines)


def make_mesh(config: Config) -> DeviceMesh:
    """Build the mesh of the config over the ranks of this run. Raises ValueError before any rank waits for another rank."""
    validate_world(config, world_size())
    check_restarts(config)
    if config.train.deterministic:
        deterministic.prepare()
    sizes = config.mesh
    return dlp.build_mesh(
        dp_replicate=sizes.dp_replicate, dp_shard=sizes.dp_shard, cp=sizes.cp, tp=sizes.tp, transport=sizes.transport
    )


def check_restarts(config: Config) -> None:
    """Raise ConfigError if torchrun may restart failed ranks and `[checkpoint] resume` is not auto, because a restart would
    then ignore checkpoints of this run."""
    resume, restarts = config.checkpoint.resume, int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0))
    if resume != "auto" and restarts:
        raise ConfigError(
            f"--checkpoint.resume {resume}: expected auto under torchrun --max-restarts {restarts}, since a restart "
            f"after a failure would begin at this checkpoint again and ignore later checkpoints; choose another "
            f"--run.dir, or start without restarts"
        )


def predict_here(config: Config, built: Built, mesh: DeviceMesh, run: RunDir) -> float | None:
    """Log and return the predicted seconds of a step on this GPU; None if no prediction is possible, with the reason in the
    log. Also log a warning if the predicted memory exceeds the memory of the GPU."""
    board = board_of(torch.cuda.get_device_name()) or mesh.device_type
    expected = planned(config, mesh.size(), board, built.plan)
    if too_large := exceeded(config, mesh.size(), board, expected):
        run.say(f"WARNING: {too_large}")
    found = forecast_or_reason(config, mesh.size(), board, expected)
    run.say(f"time: not predicted: {found}" if isinstance(found, str) else found.describe()[0])
    return None if isinstance(found, str) else found.seconds


def start(config: Config, mesh: DeviceMesh, stop: StopFlag) -> tuple[Trainer, int]:
    """Build the trainer and load its checkpoint, if there is one. Returns the trainer and the number of completed steps.
    Raises ValueError for an invalid config or checkpoint."""
    run = RunDir(Path(config.run.dir))
    with run.logged():
        device = (
            torch.device("cuda", torch.cuda.current_device()) if mesh.device_type == "cuda" else torch.device("cpu")
        )
        built = build(config, mesh, device)
        run.say(built.dims.describe(mesh.device_type))
        run.say(str(built.plan).splitlines()[0])
        run.say(*config.architecture.describe(config.mesh.tp))
        run.say(attention_of(config, device_kind(mesh.device_type)).describe())
        if mesh.device_type == "cuda" and built.dims.tp > 1:
            run.say(f"transport: {transport.describe(TP, mesh[TP].get_group())}")
        run.say(describe_graph(config, mesh.device_type), *describe_compilation(config.train))
        load = wire_bytes.workload(config, mesh.size(), built.accumulation.reductions)
        slow = wire_bytes.warn_of_tp(built.plan, load, config.train.optimizer, ranks_of_host())
        gradients = wire_bytes.describe_gradients(built.plan, load, built.accumulation)
        averages = describe_optimizer(config, built.plan, built.dims.shards)
        run.say(*slow, *gradients, *averages, *map(str, built.swaps), describe_saves(config.checkpoint))
        trainer = Trainer(config, built, run, stop)
        if device.type == "cuda" and run.leader:  # only rank 0 logs the prediction; the call has no collectives
            trainer.recorder.predicted = predict_here(config, built, mesh, run)
        done = trainer.resume()
        if not trainer.starts_a_lineage:
            rank_objects.from_rank_0(trainer.recorder.check)
        if config.train.deterministic:
            run.say(deterministic.switch_on(device, trainer.rehearse))
        run.begin(config, mesh, built.plan, aside=trainer.starts_a_lineage)
        trainer.replace_later(done)
        watch_memory(run.path, device, config.train.memory_history)
    return trainer, done


def train(config: Config) -> None:
    """Run the training on this rank. Errors that a user can correct, out-of-memory errors and the loss of a peer end the
    process with one sentence instead of a traceback."""
    stop = StopFlag(waits=partial(within, READING, transport.waits))
    stop.watch()
    try:
        mesh = make_mesh(config)
        leave_after_exceptions()
        watch = watch_for_hangs(config, stop)
        trainer, done = start(config, mesh, stop)
        watch.where = trainer.place
    except ValueError as error:
        refuse(str(error))
    except OSError as error:
        refuse(said(error))
    try:
        with trainer.run.logged():
            trainer.train(done)
    except (NotFinite, LedgerError, SaveError, SentinelError) as error:
        refuse(str(error))
    except OSError as error:
        refuse(f"{said(error)}; earlier checkpoints are not affected")
    except torch.OutOfMemoryError as error:
        print(
            sentence(error, trainer.place().text, trainer.run.path, peak_memory(trainer.built.device)), file=sys.stderr
        )
        leave(1)
    except RuntimeError as error:
        waited = transport.complaint()
        if waited is None and not lost_peer(error):
            raise
        leave_behind(f"{waited}; {trainer.place().text}" if waited else str(error).splitlines()[0])
    shutdown()
    watch.stop()


def watch_for_hangs(config: Config, stop: StopFlag) -> HangWatch:
    """Start the thread that ends the run if no rank makes progress for `[run] hang_after` seconds, or for a longer time at slow
    places. The thread has a separate connection to the store."""
    after = config.run.hang_after
    store = dist.PrefixStore("launch", dist.distributed_c10d._get_default_store().clone())  # type: ignore[attr-defined]
    watch = HangWatch(
        store,
        after,
        lambda: Place("before the first step", slow=True),
        lambda told: end_hung(told, after, stop),
        transport.waits,
    )
    watch.start()
    return watch


def said(error: OSError) -> str:
    """Return the message of an OSError: file name and reason."""
    return f"{error.filename}: {error.strerror}" if error.filename else str(error)


def lost_peer(error: RuntimeError) -> bool:
    """Return whether the error is a failed collective. Errors of gloo can be recognized only by their text."""
    return isinstance(error, dist.DistError) or "gloo/transport" in str(error)


@record
def main() -> None:
    parser = make_parser("launch.train", "Pretrains a model, tensor-, sequence- and FSDP-parallel, in low precision.")
    parser.add_argument("--plan", action="store_true", help="print the plan and exit; starts no ranks")
    parser.add_argument("--world", type=count, help="with --plan: number of ranks [8]")
    parser.add_argument("--device", choices=NAMES, help="with --plan: kind of device, or GPU by name [this machine's]")
    parser.add_argument(
        "--timeline", type=Path, help="with --plan: write the predicted schedule, FILE.png or FILE.json (Perfetto)"
    )
    try:
        options, config = command_line(parser, sys.argv[1:])
        if not options.plan and (options.world or options.device or options.timeline):
            raise ConfigError(
                "--world, --device, --timeline: expected only with --plan; add --plan, or leave these options out"
            )
        here = device_kind("cuda" if torch.cuda.is_available() else "cpu")
        plan = ""
        if options.plan:
            plan = plan_text(config, options.world or 8, options.device or here, options.timeline)
        remarks: list[str] = []
        if not (options.plan or options.print_config or "RANK" in os.environ):
            config, remarks = on_one_rank(config, sys.argv[1:])
    except ValueError as error:
        refuse(str(error))
    except OSError as error:
        refuse(said(error))
    if options.print_config or options.plan:
        print(plan or to_toml(config).rstrip())
    else:
        print(*remarks, sep="\n", end="\n" * bool(remarks), flush=True)
        train(config)
        leave(0)  # the normal exit of the interpreter takes seconds, and torchrun would wait for it


if __name__ == "__main__":
    main()
