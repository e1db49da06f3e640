"""Evaluate a checkpoint on tasks of lm_eval (EleutherAI).

    python -m launch.harness CHECKPOINT --tasks hellaswag,arc_easy [--tokenizer tokenizer.json] [--limit 100]

Under torchrun all ranks are tensor-parallel. lm_eval downloads the data of the tasks, or reads its cache.

The model reads at most `[train] sequence` tokens at once, the length of its training. Longer requests are treated as in
lm_eval: a document is scored in windows (`rolling_windows`), and a context is truncated on the left.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dlp.comm.mesh import shutdown
from launch.common.optional_packages import need
from launch.common.program import run_program
from launch.config.run_config import count
from launch.data.tokenizer import Tokenizer, add_options, open_tokenizer
from launch.evaluate import as_asked
from launch.generate import GREEDY, Sampling, on_tp, text_after, whole, write
from launch.inference.trained_model import Trained, check_tokens, command_line, open_trained
from launch.settings.schema import ConfigError
from launch.weights import weights_only


@torch.no_grad()
def score(trained: Trained, context: Sequence[int], continuation: Sequence[int]) -> tuple[float, bool]:
    """Return the log probability of `continuation` after the nonempty `context`, in nats, and whether every token of the
    continuation is the most likely token at its position."""
    context, continuation = list(context), list(continuation)
    most = longest(trained)
    if len(continuation) > most:
        raise ConfigError(
            f"a continuation of {len(continuation)} tokens is longer than [train] sequence = {most}, the length of the "
            f"training; choose another task, or set a larger --train.sequence"
        )
    over = len(context) + len(continuation) - 1 - most
    if over > 0:
        _remark_cut(trained)
        context = context[over:]
    tokens = torch.tensor([*context, *continuation], device=trained.device)
    logits = whole(trained, trained.model(tokens[None, :-1]))[-len(continuation) :].float()
    follows = tokens[-len(continuation) :]
    chances = logits.log_softmax(-1).gather(1, follows.unsqueeze(1))
    return chances.sum().item(), bool((logits.argmax(-1) == follows).all())


def longest(trained: Trained) -> int:
    """Return the maximum number of tokens that the model reads at once: the sequence length of its training."""
    return trained.config.train.sequence


def rolling_windows(text: Sequence[int], prefix: int, most: int) -> Iterator[tuple[list[int], list[int]]]:
    """Split a document into (context, continuation) windows as lm_eval does with a context of one token.

    Every token is scored once, and each continuation has at most `most` tokens. The context of the first window is the token
    `prefix`. If there are several windows and the last continuation is shorter, its context is longer by as many tokens."""
    for start in range(0, len(text), most):
        end = min(start + most, len(text))
        context = text[end - most - 1 : start] if start else [prefix]
        yield list(context), list(text[start:end])


def _remark_cut(trained: Trained) -> None:
    """Print once, on rank 0, that contexts are truncated."""
    sentence = f"contexts are truncated on the left to [train] sequence = {longest(trained)} tokens, as in lm_eval"
    if sentence not in trained.remarks:
        trained.remarks.append(sentence)
        if dist.get_rank() == 0:
            print(sentence, flush=True)


def go_on(trained: Trained, tokenizer: Tokenizer, context: Sequence[int], asked: dict[str, Any]) -> str:
    """Generate text after a context for a request `asked` of lm_eval. The text ends before the first occurrence of a string in
    the entry `until` of the request."""
    count, until = int(asked.get("max_gen_toks", 256)), asked.get("until") or []
    most = longest(trained)
    if count >= most:
        raise ConfigError(
            f"a task that asks for {count} tokens leaves no room for its context in [train] sequence = {most}; choose "
            f"another task, or set a larger --train.sequence"
        )
    if len(context) > most - count:
        _remark_cut(trained)
        context = context[count - most :]
    written = write(trained, torch.tensor([list(context)]), count, _sampling(asked), stop=tokenizer.separator)
    text = tokenizer.decode(text_after(written, len(context), tokenizer.separator))
    for end in [until] if isinstance(until, str) else until:
        text = text.split(end)[0]
    return text


def _sampling(asked: dict[str, Any]) -> Sampling:
    """Return the sampling options of a request of lm_eval; greedy if do_sample or the temperature is not set."""
    temperature = float(asked.get("temperature") or 0.0)
    if not (asked.get("do_sample") and temperature):
        return GREEDY
    return Sampling(temperature, int(asked.get("top_k") or 0), float(asked.get("top_p") or 1.0))


def adapted(trained: Trained, tokenizer: Tokenizer) -> Any:
    """Wrap the model as a model of lm_eval. Raises MissingPackage (a ValueError) if lm_eval is not installed."""
    package = need("lm_eval.api.model", "lm_eval", "launch.harness")

    class Adapted(package.TemplateLM):  # type: ignore[name-defined]
        eot_token_id = tokenizer.separator

        def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
            found: list[int] = tokenizer.encode([("a request", string.encode())])[0].tolist()
            check_tokens(trained.config, "a request", found[:-1])
            return found[:-1]  # without the separator

        def _loglikelihood_tokens(self, requests: Sequence[Any], **kwargs: Any) -> list[tuple[float, bool]]:
            return [score(trained, context, continuation) for _, context, continuation in requests]

        def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
            texts = [self.tok_encode(*request.args) for request in requests]
            return [
                sum(
                    score(trained, *window)[0]
                    for window in rolling_windows(text, tokenizer.separator, longest(trained))
                )
                for text in texts
            ]

        def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
            return [
                go_on(trained, tokenizer, self.tok_encode(context) or [tokenizer.separator], asked)
                for context, asked in (request.args for request in requests)
            ]

    return Adapted()


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="launch.harness", description="Evaluate a checkpoint on tasks of lm_eval.")
    parser.add_argument("checkpoint", type=Path, help="checkpoint of a run (checkpoints/step-N), or an imported one")
    parser.add_argument("--tasks", required=True, help="comma-separated names of lm_eval's tasks")
    add_options(parser)
    parser.add_argument("--limit", type=count, help="number of examples of each task [all]")
    options, changes = command_line(parser, arguments)
    harness, tables = (need(module, "lm_eval", "launch.harness") for module in ("lm_eval", "lm_eval.utils"))
    tokenizer = open_tokenizer(options.tokenizer, options.separator)
    trained = open_trained(options.checkpoint, [*on_tp(), *changes])
    trained = as_asked(trained, options)
    weights_only.check_tokenizer(options.checkpoint, trained.opened.manifest, options.tokenizer, tokenizer.digest)
    model = adapted(trained, tokenizer)
    results = harness.simple_evaluate(model=model, tasks=options.tasks.split(","), limit=options.limit)
    if dist.get_rank() == 0:
        print(tables.make_table(results))
    shutdown()


if __name__ == "__main__":
    run_program(main)
