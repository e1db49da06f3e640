"""Generate text from a checkpoint.

    python -m launch.generate CHECKPOINT --prompt "def main" [--tokens 100] [--temperature 0.8 [--top-k 50] [--top-p 0.9]]
                              [--tokenizer tokenizer.json]
    python -m launch.generate CHECKPOINT --prompts FILE

Several prompts are continued one after the other, so no text depends on another prompt. Under torchrun all ranks are
tensor-parallel. Keys and values are cached, so that each new token costs the forward of one token.
The model uses the recipes of its training unless `--recipe` is given. `--profile FILE` traces ten tokens.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from dlp.comm.mesh import CP, DP_REPLICATE, DP_SHARD, TP, shutdown, world_size
from launch.common.program import run_program
from launch.config.run_config import count
from launch.data.documents import has_rows, rows
from launch.data.tokenizer import Text, Tokenizer, add_options, open_tokenizer
from launch.evaluate import as_asked
from launch.inference.trained_model import Changes, Trained, check_length, check_tokens, command_line, open_trained
from launch.models.kv_cache import KeyValues
from launch.models.modules import Llama
from launch.report.exposed_communication import profiled
from launch.settings.schema import ConfigError
from launch.weights import weights_only

PROFILED = 10  # tokens that --profile traces


@dataclass(frozen=True)
class Written:
    """Result of `write`.

    tokens    int64 [B, prompt + continuation], equal on all ranks
    reading   seconds until the first new token was generated
    writing   seconds for all further tokens
    """

    tokens: Tensor
    reading: float
    writing: float

    def speed(self, prompt: int) -> str:
        batch, after = self.tokens.shape[0], self.tokens.shape[1] - prompt - 1
        written = f", then {batch * after / self.writing:,.1f} tokens/s" if after > 0 else ""
        return f"read {batch * prompt} tokens in {self.reading:.3f} s{written}"


@dataclass(frozen=True)
class Sampling:
    """Choice of the next token from logits.

    Args:
        temperature: 0 takes the most likely token; otherwise a token is drawn from softmax(logits / temperature).
        top_k: Draw only from the k most likely tokens; 0: from all tokens.
        top_p: Draw only from the smallest set of most likely tokens whose probabilities sum to at least p.
        seed: Seed of the random numbers.
    Raises:
        ConfigError: A value is out of range, or top_k or top_p is set at temperature 0.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise ConfigError(f"--temperature: expected a number >= 0, got {self.temperature:g}")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"--top-p: expected a number > 0 and <= 1, got {self.top_p:g}")
        if self.top_k < 0:
            raise ConfigError(f"--top-k: expected an integer >= 0, got {self.top_k}")
        if self.temperature == 0 and (self.top_k or self.top_p < 1):
            raise ConfigError(
                "--top-k, --top-p: these options need sampling, and temperature 0 takes the most likely token; set "
                "--temperature"
            )

    def chances(self, logits: Tensor) -> Tensor:
        """Return the probabilities with which each token is drawn, fp32 [B, V], from logits [B, V]."""
        # The largest logit becomes 0, so that a tiny temperature gives -inf and 0, not NaN
        logits = logits.float() - logits.amax(-1, keepdim=True).float()
        scaled = logits / max(self.temperature, torch.finfo(torch.float32).tiny)
        if 0 < self.top_k < scaled.shape[-1]:
            least = scaled.topk(self.top_k, dim=-1).values[..., -1:]
            scaled = scaled.masked_fill(scaled < least, -math.inf)
        chances = scaled.softmax(-1)
        if self.top_p < 1:
            ranked, order = chances.sort(dim=-1, descending=True, stable=True)
            before = ranked.cumsum(-1) - ranked  # sum of the probabilities of all more likely tokens
            dropped = torch.zeros_like(chances, dtype=torch.bool).scatter(-1, order, before >= self.top_p)
            chances = chances.masked_fill(dropped, 0.0)
        return chances / chances.sum(-1, keepdim=True)


GREEDY = Sampling()


class Writer:
    """Model with a key-value cache for `room` tokens, prompt and continuation together. All ranks draw the same tokens, since
    random numbers and logits are equal on all ranks."""

    def __init__(self, trained: Trained, room: int, sampling: Sampling = GREEDY) -> None:
        check_length(trained.config, room)
        assert isinstance(trained.model, Llama), "check_length refuses models of transformers"
        self.trained, self.model, self.sampling = trained, trained.model, sampling
        self.past = [KeyValues(room) for _ in self.model.model.layers]
        self.generator = torch.Generator().manual_seed(sampling.seed)

    @torch.no_grad()
    def next(self, tokens: Tensor) -> Tensor:
        """Append tokens [B, S] to the cached context, and return the next token of each sequence, int64 [B, 1]."""
        hidden = self.model.model(tokens, None, self.past)
        logits = whole(self.trained, self.model.lm_head(hidden[:, -1])).float()
        if self.sampling.temperature == 0:
            return logits.argmax(-1, keepdim=True)
        chances = self.sampling.chances(logits.cpu())
        return torch.multinomial(chances, 1, generator=self.generator).to(tokens.device)


def whole(trained: Trained, logits: Tensor) -> Tensor:
    """Gather logits [M, V/tp] over tp, and return logits [M, V]."""
    group = trained.dims.group(TP)
    if group.size() == 1:
        return logits
    parts = [torch.empty_like(logits) for _ in range(group.size())]
    dist.all_gather(parts, logits.contiguous(), group=group)
    return torch.cat(parts, -1)


def on_tp() -> Changes:
    """Return overrides of `[mesh]` with tp = number of ranks, and all other axes 1."""
    mesh = {TP: str(world_size()), DP_SHARD: "1", CP: "1", DP_REPLICATE: "1", "sequence_parallel": "false"}
    return [(f"mesh.{key}", value) for key, value in mesh.items()]


def write(
    trained: Trained, prompt: Tensor, count: int, sampling: Sampling = GREEDY, *, trace: Path | None = None,
    stop: int | None = None,
) -> Written:  # fmt: skip
    """Generate `count` tokens after `prompt` [B, S], which is equal on all ranks. Generation ends earlier if every sequence has
    reached the token `stop`.

    trace: file for a profile of `PROFILED` tokens. Raises ValueError if prompt and continuation exceed the sliding window of
    attention, or for a model of transformers."""
    writer = Writer(trained, prompt.shape[1] + count, sampling)
    began = time.perf_counter()
    tokens = [prompt.to(trained.device)]
    tokens.append(writer.next(tokens[0]))
    _wait(trained)
    read = time.perf_counter()

    ended = torch.zeros_like(tokens[-1], dtype=torch.bool)

    def more(steps: int) -> None:
        for _ in range(steps):
            if stop is not None and bool(ended.logical_or_(tokens[-1] == stop).all()):
                return
            tokens.append(writer.next(tokens[-1]))

    first = min(PROFILED, count - 1) if trace is not None else 0
    if trace is not None and dist.get_rank() == 0:
        profiled(lambda: more(first), trained.device, trace)
    else:
        more(first)
    more(count - 1 - first)
    _wait(trained)
    return Written(torch.cat(tokens, 1).cpu(), read - began, time.perf_counter() - read)


def text_after(found: Written, prompt: int, stop: int) -> list[int]:
    """Return the new tokens of the first sequence, without `stop` and everything after it. `prompt`: length of the prompt."""
    tokens: list[int] = found.tokens[0, prompt:].tolist()
    return tokens[: tokens.index(stop)] if stop in tokens else tokens


def _wait(trained: Trained) -> None:
    if trained.device.type == "cuda":
        torch.cuda.synchronize(trained.device)


def prompts_of(options: argparse.Namespace) -> list[Text]:
    """Return the prompts of `--prompt`, then those of the file `--prompts`. Raises ConfigError if a `--prompt` is not UTF-8,
    or if the file does not exist or has no prompt."""
    given = options.prompt or []
    try:
        found = [("--prompt", text.encode()) for text in given]
    except UnicodeEncodeError as error:
        raise ConfigError(f"--prompt: expected UTF-8, got {error.object[error.start : error.end]!r}") from None
    path = options.prompts
    if path is None:
        return found
    if not path.is_file():
        raise ConfigError(f"--prompts {path}: no such file; expected one prompt per line, or rows with text")
    if has_rows(path):
        read = [(f"{path}, row {number}", text) for number, text, _ in rows(path, "text")]
    else:
        read = [(f"{path}, line {number}", text) for number, text in enumerate(path.read_bytes().splitlines(), start=1)]
    found += [each for each in read if each[1].strip()]
    if len(found) == len(given):
        raise ConfigError(f"--prompts {path}: no prompt in the file; expected one prompt per line, or rows with text")
    return found


def prompt_of(tokenizer: Tokenizer, text: Text) -> Tensor:
    """Encode a prompt as int64 [1, S]. Raises ConfigError if the prompt has no tokens, and ValueError if the tokenizer does not
    accept the bytes of the prompt."""
    tokens = tokenizer.encode([text])[0][:-1]  # without the separator
    if len(tokens) == 0:
        raise ConfigError(f"{text[0]}: expected nonempty text")
    return torch.from_numpy(tokens.astype("int64")).unsqueeze(0)


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="launch.generate", description="Generate text from a checkpoint.")
    parser.add_argument("checkpoint", type=Path, help="checkpoint of a run (checkpoints/step-N), or an imported one")
    parser.add_argument(
        "--prompt", action="append", metavar="TEXT", help="text to continue; may be given several times"
    )
    parser.add_argument(
        "--prompts", type=Path, metavar="FILE", help="file with one prompt per line, or rows as launch.data reads them"
    )
    parser.add_argument(
        "--tokens", type=count, default=100, help="maximum number of new tokens [100]; the separator ends a text"
    )
    parser.add_argument(
        "--temperature", type=float, default=0.0, help="sampling temperature; 0: always the most likely token [0]"
    )
    parser.add_argument("--top-k", type=int, default=0, help="draw from the K most likely tokens; 0: from all [0]")
    parser.add_argument(
        "--top-p",
        type=float,
        default=1.0,
        help="draw from the smallest set of most likely tokens whose probabilities sum to at least P; 1: from all [1]",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of sampling, restarted for each prompt [0]")
    add_options(parser)
    parser.add_argument("--profile", type=Path, metavar="FILE", help="trace the first tokens, for chrome://tracing")
    options, changes = command_line(parser, arguments)
    if options.prompt is None and options.prompts is None:
        parser.error("expected a --prompt TEXT, or --prompts FILE")
    sampling = Sampling(options.temperature, options.top_k, options.top_p, options.seed)
    tokenizer = open_tokenizer(options.tokenizer, options.separator)
    texts = prompts_of(options)
    prompts = [prompt_of(tokenizer, text) for text in texts]
    trained = open_trained(options.checkpoint, [*on_tp(), *changes])
    trained = as_asked(trained, options)
    weights_only.check_tokenizer(options.checkpoint, trained.opened.manifest, options.tokenizer, tokenizer.digest)
    for (name, _), prompt in zip(texts, prompts, strict=True):
        check_tokens(trained.config, name, prompt[0].tolist())
    longest = max(prompt.shape[1] for prompt in prompts) + options.tokens
    check_length(trained.config, longest)
    if longest > trained.config.train.sequence:
        trained.remarks.append(
            f"WARNING: a text of {longest} tokens is longer than [train] sequence = {trained.config.train.sequence}, "
            f"the length of the training; text beyond that length may be meaningless"
        )
    if dist.get_rank() == 0:
        print(*trained.remarks, sep="\n")
    for number, prompt in enumerate(prompts):
        trace = options.profile if number == 0 else None
        found = write(trained, prompt, options.tokens, sampling, trace=trace, stop=tokenizer.separator)
        if dist.get_rank() == 0:
            if len(prompts) > 1:
                print(f"\n{number + 1} of {len(prompts)} ({texts[number][0]}):")
            print(described(found, prompt, tokenizer, options.tokens), flush=True)
    shutdown()


def described(found: Written, prompt: Tensor, tokenizer: Tokenizer, asked: int) -> str:
    """Return prompt and continuation as text, and a line with the speed. asked: number of requested new tokens."""
    after = text_after(found, prompt.shape[1], tokenizer.separator)
    ended = f"; the text ended after {len(after)} tokens" if len(after) < asked else ""
    return f"{tokenizer.decode([*prompt[0].tolist(), *after])}\n{found.speed(prompt.shape[1])}{ended}"


if __name__ == "__main__":
    run_program(main)
