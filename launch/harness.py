"""Evaluate a checkpoint on tasks of lm_eval (EleutherAI).

    python -m launch.harness CHECKPOINT --tasks hellaswag,arc_easy [--tokenizer tokenizer.json] [--limit 100]

By torchrun the ranks are tensor-parallel. The package fetches the data of its tasks, or reads what it has fetched before.

The model reads at most `[train] sequence` tokens at once, the length that it was trained with. Longer requests are handled as
lm_eval handles them: a whole document is scored in windows (`rolling_windows`), a context is cut on the left.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dlp.comm.mesh import shutdown
from launch.common.optional_packages import need
from launch.config.run_config import count
from launch.data.tokenizer import Tokenizer, add_options, open_tokenizer
from launch.evaluate import as_asked
from launch.generate import GREEDY, Sampling, on_tp, text_after, whole, write
from launch.inference.trained_model import Trained, command_line, open_trained
from launch.settings.schema import ConfigError
from launch.weights import weights_only


@torch.no_grad()
def score(trained: Trained, context: Sequence[int], continuation: Sequence[int]) -> tuple[float, bool]:
    """The log of the chance that `continuation` follows `context`, which is not empty, in nats, and whether each of its tokens
    is the most likely one."""
    context, continuation = list(context), list(continuation)
    most = longest(trained)
    if len(continuation) > most:
        raise ConfigError(
            f"a continuation of {len(continuation)} tokens is longer than [train] sequence = {most}, which the model was "
            f"trained with; choose another task, or set --train.sequence, with which the model reads longer texts"
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
    """Tokens that the model reads at once: those of a sequence of its training."""
    return trained.config.train.sequence


def rolling_windows(text: Sequence[int], prefix: int, most: int) -> Iterator[tuple[list[int], list[int]]]:
    """(context, continuation) of each window of a document, as lm_eval makes them with a context of one token: every token is
    scored once, in windows of at most `most` tokens, the first behind `prefix`, and the last with a context as long as the
    window has room for."""
    for start in range(0, len(text), most):
        end = min(start + most, len(text))
        context = text[end - most - 1 : start] if start else [prefix]
        yield list(context), list(text[start:end])


def _remark_cut(trained: Trained) -> None:
    """Say once that contexts are cut."""
    sentence = f"contexts are cut on the left to [train] sequence = {longest(trained)} tokens, as lm_eval cuts them"
    if sentence not in trained.remarks:
        trained.remarks.append(sentence)
        if dist.get_rank() == 0:
            print(sentence, flush=True)


def go_on(trained: Trained, tokenizer: Tokenizer, context: Sequence[int], asked: dict[str, Any]) -> str:
    """Text after a context, up to the first of the strings in `until`, most likely tokens unless a temperature is asked for."""
    count, until = int(asked.get("max_gen_toks", 256)), asked.get("until") or []
    most = longest(trained)
    if count >= most:
        raise ConfigError(
            f"a task that asks for {count} tokens leaves no room for its context in [train] sequence = {most}; choose another "
            f"task, or set --train.sequence, with which the model reads longer texts"
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
    """What a request of lm_eval asks for; without do_sample the most likely tokens."""
    temperature = float(asked.get("temperature") or 0.0)
    if not (asked.get("do_sample") and temperature):
        return GREEDY
    return Sampling(temperature, int(asked.get("top_k") or 0), float(asked.get("top_p") or 1.0))


def adapted(trained: Trained, tokenizer: Tokenizer) -> Any:
    """What lm_eval calls a model. MissingPackage, a ValueError, without the package."""
    package = need("lm_eval.api.model", "lm_eval", "launch.harness")

    class Adapted(package.TemplateLM):  # type: ignore[name-defined]
        eot_token_id = tokenizer.separator

        def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
            found: list[int] = tokenizer.encode([("a request", string.encode())])[0].tolist()
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
    parser = argparse.ArgumentParser(prog="launch.harness", description="A checkpoint on the tasks of lm_eval.")
    parser.add_argument("checkpoint", type=Path, help="of a run (checkpoints/step-N), or imported")
    parser.add_argument("--tasks", required=True, help="names of lm_eval's tasks, with commas between")
    add_options(parser)
    parser.add_argument("--limit", type=count, help="so many examples of each task [all]")
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
    try:
        main(sys.argv[1:])
    except (ValueError, OSError) as error:
        sys.exit(str(error))
