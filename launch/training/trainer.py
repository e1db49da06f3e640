"""Training loop of one rank.

    ┌─ step: microbatches forward and backward, clip, optimizer (step boundary) ─┐
    └─ read the results of the previous step; validate, save or stop if due     ◄┘

The host reads the results of a step after the launch of the next step, so that the device has work while the host waits for
the results. One all-reduce at the end of a step adds loss, stop requests and flags of all ranks.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

import dlp
from dlp.comm import observer
from dlp.parallel.linear import capture
from dlp.parallel.model.boundary import cast_weights_first
from dlp.parallel.model.checks import OnTheWay
from dlp.parallel.model.embedding import IGNORED
from dlp.parallel.model.graph import Replays
from dlp.parallel.model.session import session_of
from launch.checkpoint import manifest, save_load
from launch.checkpoint.background_saver import Saver
from launch.checkpoint.save_load import SaveError
from launch.config.run_config import Config, recipe_files, to_toml
from launch.data.counting_baseline import baseline
from launch.data.shard_check import check_data
from launch.data.sources import open_sources
from launch.data.token_stream import TokenStream
from launch.models.modules import DTYPES
from launch.ranks import rank_objects
from launch.ranks.hang_watch import Place
from launch.ranks.links import OWN
from launch.ranks.process_exit import StopFlag
from launch.report.exposed_communication import profiled
from launch.report.nvtx_ranges import marked
from launch.report.recorder import Recorder, Stopwatch
from launch.report.run_dir import RunDir, move_aside
from launch.training import initial_scales
from launch.training.build import Built
from launch.training.invariant_loss import sum_of_pieces
from launch.training.learning_rate import learning_rate, rate_remarks
from launch.training.nonfinite_origin import origin
from launch.training.recipe_schedule import some
from launch.training.sentinel import Sentinel
from launch.training.step_update import Update
from launch.training.wire_bytes import WARM, WireWatch
from launch.weights import weights_only

Batch = tuple[Tensor, ...]
# Number of steps after which every pass that can be captured (`dlp.parallel.linear.capture`) has been captured, even if the
# ledger counted one of these steps, in which passes with transfers are not captured
SETTLED = WARM + 2


@dataclass
class Step:
    """Launched step whose results the host has not read yet.

    number    number of the step, counted from 1
    numbers   results on the way to the host: mean loss x tp, number of ranks with a stop request, number of ranks with a flag,
              gradient norm, limit above which a norm is a spike, whether the update was skipped, flags of this rank
    lr        learning rate of the step
    watch     times of the parts of the step
    began     host clock at the begin of the step, in seconds
    wire      planned bytes that this rank sends in the step, by process group
    ended     host clock at the begin of the next step; None: the step ends when the host has read the results
    damage    sentence about the difference for which the update was skipped (`Sentinel`); "": no difference
    remarks   lines to print after the results
    """

    number: int
    numbers: OnTheWay
    lr: float
    watch: Stopwatch
    began: float
    wire: dict[str, int]
    ended: float | None = None
    damage: str = ""
    remarks: list[str] = field(default_factory=list)


class NotFinite(Exception):
    """Error for a NaN or Inf in the loss, the gradient norm or a cast tensor. The message is equal on all ranks and names the
    layer where it arose."""


class Trainer:
    """State and loop of a training run on this rank. Raises ValueError for data that does not fit the config."""

    def __init__(self, config: Config, built: Built, run: RunDir, stop: StopFlag) -> None:
        self.config, self.built, self.run, self.stop = config, built, run, stop
        train = config.train
        self.shards = open_sources(config.data.path, config.architecture.vocab, config.data.validation)
        settings: dict[str, Any] = {
            "sequence": train.sequence, "global_batch": train.global_batch, "micro_batch": built.batch.micro,
            "weights": self.shards.weights,
        }  # fmt: skip
        self.train_data = TokenStream(self.shards.train, split="train", seed=train.seed, **settings)
        self.validation_data = TokenStream(self.shards.validation, split="validation", seed=0, **settings)
        run.say(check_data((*self.shards.train, *self.shards.validation)))
        run.say(*self.train_data.describe(train.steps))
        self.update = Update(built.model, built.optimizer, train, built.device)
        self.state = save_load.Training(
            built.model, built.optimizer, self.train_data, built.device, config.architecture.settings,
            to_toml(config), recipe_files(config), self.shards.tokenizer, self.update.spikes.state(),
        )  # fmt: skip
        self.recorder = Recorder(config, run, built.device, dist.get_world_size())
        self.recipes = session_of(built.model)
        self.wire = WireWatch(config, built)
        saves = config.checkpoint
        self.saver = Saver(run.checkpoints, self.state, saves.keep, saves.asynchronous)
        # With resume = "none", existing checkpoints in the folder are from another run
        self.starts_a_lineage = config.checkpoint.resume == "none"
        self.sentinel = Sentinel(
            built.model, train.sentinel, built.optimizer, skips=train.sentinel_action == "skip",
            folder=run.path if train.sentinel_tensors else None,
        )  # fmt: skip
        self.damage = ""  # difference that the sentinel found in the current step; "": none
        self.wants_stop = False
        self.replays = Replays([self.recipes], torch.cuda.Stream(built.device) if built.graph else None)
        self.skipped = 0  # number of skipped updates since the start of this process
        # Current slow activity, "" within a normal step; seconds of the last step whose results were read
        self.doing, self.took = "starting", 0.0

    def resume(self) -> int:
        """Load the checkpoint that `[checkpoint] resume` names, or the weights of `[train] init_from`; return the number of
        completed steps. Raises CheckpointError."""
        resume = self.config.checkpoint.resume
        path = rank_objects.from_rank_0(lambda: manifest.resolve(resume, self.run.checkpoints))
        if path is None:
            self.start_from_weights()
            return 0
        self.starts_a_lineage = path.resolve().parent != self.run.checkpoints.resolve()
        loaded = save_load.load(path, self.state)
        self.run.say(f"resuming from step {loaded.step} ({path})")
        self.run.say(*loaded.remarks, *rate_remarks(loaded.step, loaded.config, self.config.train))
        return loaded.step

    def start_from_weights(self) -> None:
        """Load the weights of `[train] init_from`, if set. Raises CheckpointError."""
        config = self.config
        if config.train.init_from is None:
            return
        path = Path(config.train.init_from)
        opened, remarks = weights_only.load(path, self.built.model, self.state.settings)
        data = str(self.shards.train[0].path.parent)
        weights_only.check_tokenizer(path, opened.manifest, data, self.shards.tokenizer)
        self.run.say(f"weights from {path}", *remarks)

    def place(self) -> Place:
        """Return the current place of this rank, for `HangWatch`."""
        last, pass_name, doing = self.recipes.last, self.recipes.last_pass, self.doing
        layer = "none yet" if last is None else f"{', '.join(last.members)} in {pass_name}"
        text = f"step {self.recipes.steps + 1}, {doing + ', ' if doing else ''}last layer {layer}"
        return Place(text, bool(doing), self.took)

    @contextmanager
    def slowly(self, what: str, is_so: bool = True) -> Iterator[None]:
        """Return a context in which this rank is at a slow place (`launch.ranks.hang_watch`), if `is_so`. `what`: description
        of the work."""
        before = self.doing
        self.doing = what if is_so else before
        try:
            yield
        finally:
            self.doing = before

    def replace_later(self, done: int) -> None:
        """Rename the checkpoints of steps after `done`, so that this run, which resumes from step `done`, can save these steps
        again."""
        if self.run.leader:
            for later in (each for each in manifest.complete(self.run.checkpoints) if manifest.step_of(each) > done):
                self.run.say(
                    f"{later} belongs to an earlier continuation that this run replaces; it was moved to "
                    f"{move_aside(later)}"
                )

    def batches(self, data: TokenStream, step: int) -> Iterator[Batch]:
        """Yield this rank's microbatches of a global batch on the device: tokens, targets, and the fields of `Documents` if
        attention restarts at documents."""
        for micro in range(self.built.batch.num_micro):
            place = (step, micro, self.built.dims.dp_rank, self.built.batch.dp_size)
            documents = data.documents(*place) if self.config.data.reset_attention else ()
            tokens = map(self.built.context.split, data.batch(*place))
            yield tuple(self.on_device(each) for each in (*tokens, *documents))

    def on_device(self, tokens: Tensor) -> Tensor:
        """Copy a tensor to the device; on a GPU from pinned memory, so that the host does not wait."""
        device = self.built.device
        return tokens.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tokens

    def loss(self, batch: Batch) -> Tensor:
        """Return the loss summed over the tokens of a microbatch, fp32 []; it includes z_loss if gradients are enabled."""
        z_loss = self.config.train.z_loss if torch.is_grad_enabled() else 0.0
        invariant = self.config.train.invariant
        return self.config.architecture.loss(self.built.model, batch, self.built.mesh, z_loss, invariant)

    def valid_tokens(self, batches: Sequence[Batch]) -> Tensor:
        """Return the number of targets in the global batch that the loss does not ignore, fp32 []."""
        valid = torch.stack([(batch[1] != IGNORED).sum() for batch in batches]).sum().float()
        if dist.get_world_size() > 1:
            with observer.label(**OWN):
                dist.all_reduce(valid)
        return valid / self.built.dims.tp

    def watched_step(self, step: int) -> Step:
        """Run `train_step`; in steps that `[train] ledger` selects, compare the bytes sent with the plan. Raises LedgerError on
        all ranks if they differ."""
        with self.wire.step() as watched:
            current = self.train_step(step)
        if watched:
            current.remarks.append(f"step {step + 1}: {self.wire.said()}")
        return current

    def profiled_step(self, step: int) -> Step:
        """Run `watched_step`; on rank 0 in step `[train] profile`, run it under the profiler."""
        if step + 1 != self.config.train.profile or not self.run.leader:
            return self.watched_step(step)
        if self.config.train.profiler == "nvtx":
            return marked(lambda: self.watched_step(step), self.built.model, self.built.device)
        trace = self.run.path / f"trace-step-{step + 1}.json"
        with self.slowly("profiling"):
            current, found = profiled(lambda: self.watched_step(step), self.built.device, trace)
        self.recorder.exposure(step + 1, found)
        current.remarks.append(
            f"step {step + 1}: transfers took {found.transfers:.1f} ms of {found.step:.1f} under the profiler, "
            f"{found.exposed:.1f} ms of them without concurrent computation; trace {trace}"
        )
        return current

    def train_step(self, step: int) -> Step:
        """Launch a step: forward and backward of all microbatches, optimizer, reduction of the results. The host reads no
        results."""
        began, watch = time.perf_counter(), Stopwatch(self.built.device)
        with self.slowly("reading data"):
            batches, lr = list(self.batches(self.train_data, step)), learning_rate(step, self.config.train)
        watch.lap("data")
        self.damage = ""
        self.set_learning_rate(lr)
        # The sentinel needs hooks of modules, which a replay does not call
        graph = self.built.graph and self.replays.next() and not self.sentinel.due(self.recipes.steps + 1)
        numbers = self.replay(batches) if graph else self.compute(batches, watch.lap)
        flags = torch.cat([torch.zeros_like(numbers[:0]), *self.recipes.flags.closed])
        wish = torch.full_like(numbers[0], float(self.stop.requested))
        shared = torch.stack([numbers[0], wish, flags.isnan().any().float()])
        with observer.label(**OWN):
            dist.all_reduce(shared)
        watch.lap("graph" if graph else "optimizer")
        coming = OnTheWay(torch.cat([shared, numbers[1:], flags]))
        return Step(step + 1, coming, lr, watch, began, self.wire.bytes(), damage=self.damage)

    def compute(self, batches: Sequence[Batch], lap: Callable[[str], None] = lambda part: None) -> Tensor:
        """Run forward, backward and optimizer of a step; return this rank's part of the loss and the results of `optimize`,
        fp32 [4]."""
        return torch.cat([self.forward_backward(batches, lap).unsqueeze(0), self.optimize()])

    def forward_backward(
        self, batches: Sequence[Batch], lap: Callable[[str], None] = lambda part: None, *, sentinel: bool = True
    ) -> Tensor:
        """Compute the gradients of a step; return this rank's part of the loss, fp32 []. `sentinel`: run the sentinel if it is
        due and the ledger does not count this step."""
        model = self.built.model
        valid = self.valid_tokens(batches)
        losses: list[Tensor] = []
        watched = sentinel and self.sentinel.due(self.recipes.steps + 1) and not self.wire.watches
        # If FSDP reduces once per step, gradients are not reduced after the first of several microbatches, so the sentinel
        # does not compare them
        once = isinstance(model, FSDPModule) and self.built.accumulation.reductions == 1
        gradients = len(batches) == 1 or not once
        if watched:
            self.sentinel.rehearse(lambda: self.microbatch(batches[0], valid), gradients=gradients)
        for i, batch in enumerate(batches):
            if isinstance(model, FSDPModule):
                model.set_requires_gradient_sync(self.built.accumulation.reductions > 1 or i == len(batches) - 1)
            if watched and i == 0:
                with self.sentinel.recording() as sums:
                    loss = self.microbatch(batch, valid, lap)
                self.sentinel.close(sums, loss, gradients=gradients)
            else:
                loss = self.microbatch(batch, valid, lap)
            losses.append(loss)
            lap("backward")
        if watched:
            self.damage = self.sentinel.compare(sums, self.recipes.steps + 1, self.built.device)
        return self.total(losses)

    def total(self, losses: Sequence[Tensor]) -> Tensor:
        """Return this rank's part of the sum of the losses of microbatches, fp32 []."""
        if self.config.train.invariant:
            return sum_of_pieces(losses, self.built.dims)
        total = torch.zeros((), device=self.built.device)
        for loss in losses:
            total += loss
        return total

    def microbatch(self, batch: Batch, valid: Tensor, lap: Callable[[str], None] = lambda part: None) -> Tensor:
        """Run forward and backward of one microbatch; return its contribution to the mean loss, fp32 []."""
        loss = self.loss(batch) / valid
        lap("forward")
        # FSDP averages gradients over the ranks, but the gradient of the mean loss is their sum
        averaged = 1 if self.config.train.invariant else self.built.batch.token_ranks
        (loss * averaged).backward()
        dlp.backward_dw(self.built.model)
        return loss.detach()

    def replay(self, batches: Sequence[Batch]) -> Tensor:
        """Run `compute` as a CUDA graph, which is captured first if necessary. Same result as `compute`. Raises RuntimeError if
        the step cannot be captured."""
        self.saver.before_update()
        if not self.replays.captured:
            with self.wire.capture():
                try:
                    self.replays.make(self.compute, batches)
                except torch.AcceleratorError as error:
                    raise RuntimeError(
                        "the step cannot be captured as a CUDA graph, for example because a module reads device memory on the "
                        "host; set [train] cuda_graph = false"
                    ) from error
        numbers = self.replays(batches)
        self.wire.replayed()
        return numbers

    def rehearse(self) -> None:
        """Run one microbatch forward and backward without side effects: gradients are dropped, recipe state is restored."""
        with self.replays.stream():
            before = dlp.state_dict(self.built.model)
            self.loss(next(self.batches(self.train_data, 0))).backward()
            dlp.backward_dw(self.built.model)
            self.built.optimizer.zero_grad(set_to_none=True)
            dlp.load_state_dict(self.built.model, before)

    def find_scales(self, step: int) -> None:
        """Calibrate delayed scales without history on the batches of the next step."""

        def without_update() -> None:
            self.forward_backward(list(self.batches(self.train_data, step)), sentinel=False)
            self.built.optimizer.zero_grad(set_to_none=True)
            self.stop.beat()

        with self.slowly("finding first scales"):
            if found := initial_scales.find(self.built.model, without_update):
                passes = initial_scales.PASSES
                self.run.say(f"step {step + 1}: {passes} passes without an update found {found} delayed scales")

    def set_learning_rate(self, lr: float) -> None:
        """Set the learning rate of all parameter groups, in device memory if a CUDA graph reads it."""
        for group in self.built.optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr

    def optimize(self) -> Tensor:
        """Run `Update`, and return its result, fp32 [3]. The update is skipped if the sentinel has found a difference."""
        self.saver.before_update()
        return self.update(skip=bool(self.damage))

    def read(self, step: Step) -> None:
        """Wait for the results of a step, record them, and note a stop request. Raises NotFinite for a NaN or Inf."""
        loss, wishes, flagged, norm, limit, skipped, *flags = step.numbers.read()
        loss /= self.built.dims.tp  # every tp rank contributed the same loss
        self.took = seconds = (step.ended or time.perf_counter()) - step.began
        if flagged or not (math.isfinite(loss) and math.isfinite(norm)):
            self.run.say(*step.remarks)
            self.replays.drop()  # running the step again needs the memory that the graph has reserved
            names, steps = self.recipes.flags.names, self.recipes.steps
            with self.slowly("locating non-finite values"):
                where, numbers = origin(names, flags, self.built.model, partial(self.repeat, step.number - 1), steps)
            if numbers:
                self.run.describe("not-finite", {"step": step.number, **numbers})
            raise NotFinite(f"step {step.number}: loss {loss}, gradient norm {norm}: {where}")
        split = step.watch.split()
        self.recorder.step(
            step.number, loss=loss, norm=norm, lr=step.lr, seconds=seconds, split=split, wire_bytes=step.wire,
            skipped=skipped > 0,
        )  # fmt: skip
        if skipped:
            self.skipped += 1
            step.remarks.append(
                step.damage
                or f"step {step.number}: the update was skipped, since the gradient norm of {norm:.4g} exceeds "
                f"{limit:.4g}, {self.config.train.skip_spikes:g} times the median ({self.skipped} skipped since the "
                f"start)"
            )
        self.run.say(*step.remarks)
        self.wants_stop = wishes > 0

    def repeat(self, step: int) -> None:
        """Run forward and backward of a step again for diagnosis. Gradients are not cleared."""
        for batch in self.batches(self.train_data, step):
            self.loss(batch).backward()
            dlp.backward_dw(self.built.model)

    @torch.no_grad()
    def validate(self) -> float:
        """Return the mean loss over the validation batches, in nats per token."""
        totals, losses = torch.zeros(2, device=self.built.device), list[Tensor]()
        for step in range(self.config.train.eval_batches):
            for batch in self.batches(self.validation_data, step):
                losses.append(self.loss(batch))
                totals[1] += (batch[1] != IGNORED).sum()
            self.stop.beat()
        if isinstance(self.built.model, FSDPModule):
            # After a forward without backward the root FSDP unit keeps unsharded parameters; free them
            self.built.model.reshard()
        totals[0] = self.total(losses)
        dist.all_reduce(totals)
        return (totals[0] / totals[1]).item()

    def save(self, step: int, final: bool = False) -> None:
        """Save a checkpoint. `final`: the run ends after this save. Raises SaveError on all ranks."""
        with self.slowly("saving"), self.stop.saving():
            self.run.say(*self.saver.save(step, final))

    def loop(self, done: int) -> tuple[int, float]:
        """Train after `done` completed steps; return the number of completed steps (fewer than `[train] steps` after SIGTERM)
        and the last validation loss. Raises NotFinite. The results of a step are read before the step is saved."""
        config, steps, loss, begun = self.config, self.config.train.steps, math.nan, done
        settled = begun + SETTLED
        in_flight: Step | None = None
        cast_weights_first(self.built.model, DTYPES[config.train.dtype])
        while done < steps and not self.wants_stop:
            with self.slowly("a first step, which compiles", done < settled):
                current = self.profiled_step(done)
            if in_flight is not None:
                in_flight.ended = current.began
                self.read(in_flight)
            in_flight, done = current, done + 1
            self.stop.beat()
            if done == begun + SETTLED and self.built.device.type == "cuda":
                current.remarks += capture.describe(self.built.model)
            saves = config.checkpoint.due(done, done == steps)
            validates = done % config.train.eval_every == 0 or done == steps
            if self.tell_recipes(current):
                settled = done + SETTLED
                self.read(in_flight)  # handle a stop request or NaN before `find_scales`
                in_flight = None
                if validates or not self.wants_stop:
                    self.find_scales(done)
            if in_flight is not None and (saves or validates or self.wants_stop):
                self.read(in_flight)
                in_flight = None
            if validates:
                with self.slowly("validating"):
                    loss = self.validate()
                self.recorder.validation(done, loss)
            if saves or (self.wants_stop and not config.checkpoint.none):
                self.save(done, final=done == steps or self.wants_stop)
        with self.slowly("saving"), self.stop.saving():
            self.run.say(*self.saver.settle(final=True))  # a save may be in flight if the last step has no checkpoint
        return done, loss

    def tell_recipes(self, current: Step) -> bool:
        """Record counted bytes, recipe changes and cast statistics of a step; return whether recipes changed at the step
        boundary."""
        done, swaps = current.number, [swap for swap in self.recipes.swaps if swap.step == current.number]
        if self.wire.watches:
            self.recorder.ledger(done, self.wire.account())
        for swap in swaps:
            current.remarks.append(f"step {done}: {some(swap.layers)} now {swap.said}")
            self.recorder.swap(done, swap.said, len(swap.layers))
        if self.recipes.stats is not None and done % self.config.train.log_every == 0:
            self.recorder.stats(done, dlp.read_stats(self.built.model))
        return bool(swaps)

    def train(self, done: int) -> None:
        """Train after `done` completed steps until the last step or SIGTERM, and print how the training ended."""
        steps = self.config.train.steps
        if done >= steps:
            self.run.say(
                f"nothing to do: {done} of {steps} steps are done. To continue, raise --train.steps; to start again, "
                f"use --checkpoint.resume none (this run is then moved aside) or another --run.dir"
            )
        self.recorder.begin(done)
        self.saver.saved = done
        if self.run.leader:
            to_beat = baseline(self.shards.train, self.shards.validation)
            self.recorder.baseline(done, to_beat)
        began, self.doing = time.perf_counter(), ""
        try:
            with self.replays.stream():
                self.find_scales(done)
                done, loss = self.loop(done) if done < steps else (done, self.validate())
        except NotFinite:
            try:
                self.run.say(*self.saver.settle(final=False))
            except SaveError as error:
                self.run.say(f"WARNING: {error}")
            raise
        finally:
            self.doing = "ending"
            self.replays.drop()
        self.recorder.close()
        if self.saver.overhead.saves:
            self.run.say(self.saver.overhead.said(time.perf_counter() - began))
        unsaved = self.saver.unsaved(done)
        if done < steps:
            kept = unsaved or f", checkpoint {self.run.checkpoints / f'step-{done}'}"
            self.run.say(f"stopped by SIGTERM at step {done}{kept}")
        elif self.run.leader:
            self.run.say(str(to_beat))
            self.run.say(
                f"done: steps {done}, validation loss {loss:.3f} {to_beat.unit}, "
                f"{self.recorder.tokens_per_second:,.0f} tokens/s, run {self.run.path}{unsaved}"
            )
