"""Programs that load a checkpoint of a run: evaluation, which must find the validation loss that the run found, and text
generation."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import json
import re
import types
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from launch import convert_hf, evaluate, generate, harness
from launch.checkpoint.manifest import CheckpointError, read_manifest
from launch.config.run_config import from_text
from launch.data.sources import described
from launch.data.tokenizer import BYTES
from launch.inference import trained_model
from launch.settings.schema import ConfigError
from tests import pool as worker
from tests import training
from tests.command import command
from tests.refusals import must_raise, refuses

PROMPT = torch.tensor([[100, 101, 102, 32, 109]])


def opened(path: str, tp: int, *settings: tuple[str, str]) -> trained_model.Trained:
    """Open a checkpoint on another mesh. Runs in a worker."""
    changes = [("mesh.tp", str(tp)), ("mesh.sequence_parallel", "false"), *settings]
    config = from_text(read_manifest(Path(path))["config"], "its config", changes)
    return trained_model.fill(Path(path), config, worker.mesh(tp=tp))


def train(config: Any) -> None:
    """Train a run. Runs in a worker."""
    training.run(config)
    training.end_determinism()


@pytest.fixture(scope="module")
def checkpoint(pools: Any, device_type: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, float]:
    """Checkpoint of a run of four steps, and the validation loss of the run."""
    folder = tmp_path_factory.mktemp("run")
    config = training.config(folder, training.shards(folder), "--train.steps=4", "--train.eval_every=4")
    pools.setdefault(2, worker.Pool(2, device_type)).run(train, config)
    return str(folder / "run" / "checkpoints" / "step-4"), training.metrics(config, "validation_loss")[4]


def measured(path: str, *settings: tuple[str, str]) -> evaluate.Perplexity:
    """Evaluate a checkpoint. Runs in a worker."""
    found = opened(path, 2, ("mesh.sequence_parallel", "true"), *settings)
    return evaluate.perplexity(found, evaluate.read_data(found, Path(path)), "validation", 1)


def frozen(path: str, recipe: str, mode: str, *settings: tuple[str, str]) -> tuple[float, str]:
    """Return the loss of a quantized model, and the message about the quantization. Runs in a worker."""
    known = types.SimpleNamespace(checkpoint=Path(path), quantize=recipe, mode=mode, calibration=2)
    found = evaluate.as_asked(opened(path, 2, ("mesh.sequence_parallel", "true"), *settings), known)
    loss = evaluate.perplexity(found, evaluate.read_data(found, Path(path)), "validation", 1).loss
    return loss, found.remarks[-1]


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("recipe", "mode", "size"),
    [("mxfp8", "weight_only", 8.25 / 16), ("fp8_current", "dynamic", 0.5), ("fp8_current", "static", 0.5)],
)
def test_a_quantized_checkpoint_is_evaluated(ranks, checkpoint, recipe, mode, size):
    path, loss = checkpoint
    (found, said), other = ranks(2).run(frozen, path, recipe, mode)
    assert other[0] == found and 0 < abs(found - loss) < 0.02
    codes, values = (float(number) for number in re.findall(r"([\d.]+) MB", said))
    assert said.startswith(f"quantized: 7 linears, {recipe}, {mode}: ")
    assert codes / values == pytest.approx(size, abs=0.03)


@pytest.mark.ranks(2)
def test_it_finds_the_loss_that_the_run_found(ranks, checkpoint):
    path, loss = checkpoint
    found = ranks(2).run(measured, path)
    assert found[0] == found[1] and found[0].tokens == 8 * 64
    assert found[0].loss == pytest.approx(loss, abs=1e-6)
    assert abs(ranks(2).run(measured, path, ("groups.default.recipe", "nvfp4"))[0].loss - loss) > 1e-6
    assert "perplexity" in str(found[0])


def on_one_rank(path: str, *settings: tuple[str, str]) -> float:
    """Evaluate a checkpoint on one rank, as the program does. Runs in a worker."""
    found = trained_model.open_trained(Path(path), settings)
    return evaluate.perplexity(found, evaluate.read_data(found, Path(path)), "validation", 1).loss


@pytest.mark.ranks(2)
def test_a_recipe_that_is_asked_for_replaces_that_of_a_recipe_change(ranks, tmp_path):
    swap = '--groups.default.swap=[{at_step = 2, recipe = "bf16"}]'
    settings = "--train.steps=4", "--train.eval_every=4", "--train.dtype=fp32", "--recipe=nvfp4", swap
    config = training.config(tmp_path, training.shards(tmp_path), *settings)
    ranks(2).run(train, config)
    path, loss = str(tmp_path / "run" / "checkpoints" / "step-4"), training.metrics(config, "validation_loss")[4]
    assert ranks(1).run(on_one_rank, path)[0] == pytest.approx(loss, abs=1e-5)
    coarse = ranks(1).run(on_one_rank, path, ("groups.default.recipe", "nvfp4"))[0]
    assert abs(coarse - loss) > 1e-4


def by_main(name: str, *arguments: str) -> str:
    """Run a program in a worker of one rank, without destroying its process group; return the output."""
    out, program = io.StringIO(), {"evaluate": evaluate, "generate": generate}[name]
    with patch.object(program, "shutdown"), contextlib.redirect_stdout(out):
        program.main(arguments)
    return out.getvalue()


@pytest.mark.slow
@pytest.mark.ranks(2)
def test_trained_for_codes_exported_and_quantized_it_has_one_loss(ranks, checkpoint, tmp_path):
    """In fp32, three models have the same loss: the model under qat, the model quantized to codes on the mesh of the run,
    and the exported and imported model quantized to codes on one rank."""
    pytest.importorskip("safetensors")
    path, fp32 = checkpoint[0], ("train.dtype", "fp32")
    loss = ranks(2).run(measured, path, fp32, ("groups.default.recipe", "qat"))[0].loss
    assert abs(loss - ranks(2).run(measured, path, fp32, ("groups.default.recipe", "bf16"))[0].loss) > 1e-4
    codes, said = ranks(2).run(frozen, path, "qat", "dynamic", fp32)[0]
    assert codes == pytest.approx(loss, abs=1e-6) and said.startswith("quantized: 7 linears, qat, dynamic: ")
    convert_hf.export(Path(path), tmp_path / "theirs", "fp32", None)
    convert_hf.import_folder(tmp_path / "theirs", tmp_path / "back")
    data = Path(path).parents[2] / "data"
    settings = ["--train.dtype=fp32", "--train.sequence=64", "--train.global_batch=8", "--recipe=bf16"]
    asked = ["--data", str(data), "--batches=1", "--quantize=qat", "--mode=dynamic", *settings]
    printed = ranks(1).run(by_main, "evaluate", str(tmp_path / "back"), *asked)[0]
    assert "quantized: 7 linears, qat, dynamic: " in printed
    found = re.search(r"validation of .*: ([\d.]+) nats per token, perplexity [\d.]+, over 512 tokens", printed)
    assert found and float(found[1]) == pytest.approx(loss, abs=6e-5)


@pytest.mark.slow
@pytest.mark.ranks(1)
def test_a_quantized_model_writes_and_is_profiled(ranks, checkpoint, tmp_path):
    trace = tmp_path / "trace.json"
    asked = ["--prompt=def", "--tokens=4", f"--profile={trace}", "--quantize=fp8_current", "--mode=dynamic"]
    printed = ranks(1).run(by_main, "generate", checkpoint[0], *asked)[0]
    assert re.search(
        r"quantized: 7 linears, fp8_current, dynamic: .*\ndef.*read 3 tokens in .* tokens/s\n$", printed, re.S
    )
    names = [event.get("name", "") for event in json.loads(trace.read_text())["traceEvents"]]
    assert "model.layers.0.mlp.down_proj.cast_x" in names and "aten::argmax" in names


def test_several_sources_are_named_as_a_sentence() -> None:
    both = ({"path": "data/web", "weight": 0.7}, {"path": "data/code", "weight": 0.3})
    assert described(both) == "data/web (weight 0.7) and data/code (weight 0.3)"
    assert described("builtin:stdlib") == "builtin:stdlib"


def too_many(path: str) -> str:
    """Error for too many tokens. Runs in a worker."""
    found = opened(path, 1)
    data = evaluate.read_data(found, Path(path))
    return must_raise(ConfigError, evaluate.perplexity, found, data, "validation", 10**6)


def other_tokenizer(path: str) -> str:
    """Error for a checkpoint of a model with another tokenizer. Runs in a worker."""
    found = opened(path, 1)
    found.opened.manifest["data"]["tokenizer"] = "0123456789abcdef"
    return must_raise(CheckpointError, evaluate.read_data, found, Path(path))


def written(path: str, tp: int, temperature: float, seed: int) -> list[int]:
    """Return generated tokens. The model runs in fp32, so that sharding and the cache do not change the tokens. Runs in
    a worker."""
    found = opened(path, tp, ("train.dtype", "fp32"), ("groups.default.recipe", "bf16"))
    return generate.write(found, PROMPT, 12, generate.Sampling(temperature, seed=seed)).tokens[0].tolist()


def read_again(path: str) -> tuple[list[int], str]:
    """Return (tokens, message): the most likely tokens, computed by reading the full text for each token, and the message
    about a text that is too long. Runs in a worker."""
    found, tokens = opened(path, 1, ("train.dtype", "fp32"), ("groups.default.recipe", "bf16")), PROMPT
    for _ in range(12):
        last = found.model(tokens).unflatten(0, tokens.shape)[:, -1]
        tokens = torch.cat([tokens, last.argmax(-1, keepdim=True).cpu()], 1)
    return tokens[0].tolist(), must_raise(ValueError, generate.Writer(found, 3).next, PROMPT)


@pytest.mark.ranks(2)
def test_it_writes_what_reading_all_again_would_write(ranks, checkpoint):
    path, _ = checkpoint
    expected, no_room = ranks(1).run(read_again, path)[0]
    assert "a cache for 3 tokens got 5; create a larger cache" in no_room
    assert ranks(1).run(written, path, 1, 0.0, 0)[0] == expected
    both = ranks(2).run(written, path, 2, 0.0, 0)
    assert both == [expected, expected]
    drawn = [ranks(2).run(written, path, 2, 2.0, seed) for seed in (0, 1)]
    assert drawn[0][0] == drawn[0][1] != drawn[1][0] == drawn[1][1]
    assert "batches of 8: ask for fewer --batches" in ranks(1).run(too_many, path)[0]
    said = ranks(1).run(other_tokenizer, path)[0]
    assert "bytes instead of a file whose SHA-256 begins 0123456789abcdef" in said


def ends(path: str, tp: int) -> tuple[list[int], list[int], list[int], int]:
    """Return (whole, short, after, stop), and check that texts of a batch stop separately. Runs in a worker.

    whole   tokens of the prompt and a generated text
    stop    stop token of the other texts: the fifth new token of `whole`
    short   tokens of the prompt and a text that is generated until the stop token
    after   new tokens of `short` before the stop token
    """
    found, prompt = opened(path, tp, ("train.dtype", "fp32"), ("groups.default.recipe", "bf16")), PROMPT.shape[1]
    hot = generate.Sampling(3.0)
    whole = generate.write(found, PROMPT, 12, hot).tokens[0].tolist()
    stop = whole[prompt + 4]
    short = generate.write(found, PROMPT, 12, hot, stop=stop)
    two = generate.write(found, torch.cat([PROMPT, PROMPT]), 40, hot, stop=stop).tokens[:, prompt:]
    assert two.shape[1] == 40 or (two == stop).any(1).all()
    return whole, short.tokens[0].tolist(), generate.text_after(short, prompt, stop), stop


@pytest.mark.ranks(2)
def test_a_text_ends_where_its_document_does(ranks, checkpoint):
    both = ranks(2).run(ends, checkpoint[0], 2)
    assert both[0] == both[1]
    whole, short, after, stop = both[0]
    end = whole.index(stop, PROMPT.shape[1]) + 1
    assert short == whole[:end] and len(short) < len(whole) and after == whole[PROMPT.shape[1] : end - 1]


def without_scales(path: str) -> str:
    """Return the message for a checkpoint of fp8_current that is evaluated with fp8_delayed: the checkpoint has no delayed
    scales. Runs in a worker."""
    return must_raise(CheckpointError, opened, path, 1, ("groups.default.recipe", "fp8_delayed"))


@pytest.mark.ranks(1)
def test_a_recipe_whose_scales_a_checkpoint_has_not_is_refused(ranks, checkpoint):
    assert ranks(1).run(without_scales, checkpoint[0])[0] == (
        f"{checkpoint[0]} has none of 18 delayed scales (model.layers.0.mlp.down_proj.dy, ...), and scales of 1 would "
        f"change the model; use the recipes of the training, or --recipe fp8_current"
    )


@pytest.mark.parametrize("temperature", ["nan", "inf", "-1"])
def test_a_temperature_is_a_number(temperature: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"^--temperature: expected a number >= 0, got {temperature}$"):
        generate.main([str(tmp_path), "--prompt=x", f"--temperature={temperature}"])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            ["--top-k=5"],
            "--top-k, --top-p: these options need sampling, and temperature 0 takes the most likely token; set --temperature",
        ),
        (
            ["--top-p=0.5"],
            "--top-k, --top-p: these options need sampling, and temperature 0 takes the most likely token; set --temperature",
        ),
        (["--temperature=1", "--top-p=0"], "--top-p: expected a number > 0 and <= 1, got 0"),
        (["--temperature=1", "--top-p=nan"], "--top-p: expected a number > 0 and <= 1, got nan"),
        (["--temperature=1", "--top-k=-1"], "--top-k: expected an integer >= 0, got -1"),
    ],
)
def test_top_k_and_top_p_are_numbers_of_something_that_is_drawn(options, said, tmp_path) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(said)}$"):
        generate.main([str(tmp_path), "--prompt=x", *options])


def test_top_k_and_top_p_keep_the_most_likely_tokens() -> None:
    """The expected values are those of Hugging Face's TopKLogitsWarper and TopPLogitsWarper: logits are divided by the
    temperature, then `top_k` is applied, then `top_p`."""
    logits = torch.tensor([[0.1, 0.4, 0.2, 0.3]]).log()
    for sampling, kept in (
        (generate.Sampling(1.0), [0.1, 0.4, 0.2, 0.3]),
        (generate.Sampling(0.5), [1 / 30, 16 / 30, 4 / 30, 9 / 30]),
        (generate.Sampling(1.0, top_k=2), [0, 4 / 7, 0, 3 / 7]),
        (generate.Sampling(1.0, top_k=9), [0.1, 0.4, 0.2, 0.3]),
        (generate.Sampling(1.0, top_p=0.65), [0, 4 / 7, 0, 3 / 7]),
        (generate.Sampling(1.0, top_p=0.75), [0, 4 / 9, 2 / 9, 3 / 9]),
        (generate.Sampling(1.0, top_p=0.01), [0, 1, 0, 0]),
        (generate.Sampling(1.0, top_k=3, top_p=0.7), [0, 4 / 7, 0, 3 / 7]),
        (generate.Sampling(1e-45), [0, 1, 0, 0]),
        (generate.Sampling(1e-300, top_k=3, top_p=0.7), [0, 1, 0, 0]),
    ):
        torch.testing.assert_close(sampling.chances(logits), torch.tensor([kept], dtype=torch.float32))


def prompts(*arguments: str, file: Path | None = None) -> list[tuple[str, bytes]]:
    return generate.prompts_of(argparse.Namespace(prompt=list(arguments), prompts=file))


def test_a_prompt_is_text(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--prompt: expected UTF-8, got '.udcff'"):
        prompts("a\udcffb")
    with pytest.raises(ConfigError, match="^--prompt: expected nonempty text"):
        generate.prompt_of(BYTES, ("--prompt", b""))
    with pytest.raises(SystemExit):
        generate.main([str(tmp_path)])
    file = tmp_path / "prompts"
    with refuses(f"^--prompts {file}: no such file; expected one prompt per line, or rows with text$", ConfigError):
        prompts(file=file)
    file.write_text("\n \n")
    with pytest.raises(
        ConfigError, match=f"^--prompts {file}: no prompt in the file; expected one prompt per line, or rows with text$"
    ):
        prompts("a", file=file)


def test_prompts_are_lines_or_rows(tmp_path: Path) -> None:
    lines, rows = tmp_path / "prompts.txt", tmp_path / "prompts.jsonl"
    lines.write_text("def\n\nK\u00e4se \n")
    rows.write_text('{"text": "two\\nlines"}\n')
    assert prompts("x", "y", file=lines) == [
        ("--prompt", b"x"), ("--prompt", b"y"), (f"{lines}, line 1", b"def"), (f"{lines}, line 3", "K\u00e4se ".encode())
    ]  # fmt: skip
    assert prompts(file=rows) == [(f"{rows}, row 1", b"two\nlines")]


def written_with(tokenizer: str, path: str, prompt: str) -> str:
    """Return the message for a prompt of another tokenizer, of a checkpoint that names none. Runs in a worker."""
    asked = [path, f"--prompt={prompt}", f"--tokenizer={tokenizer}", "--separator=</s>"]
    with patch.object(generate.weights_only, "check_tokenizer"):
        return must_raise(ConfigError, by_main, "generate", *asked)


@pytest.mark.ranks(1)
def test_a_prompt_outside_of_the_vocabulary_is_refused(ranks, checkpoint, tmp_path):
    package = pytest.importorskip("tokenizers")
    words = {"</s>": 0, **{str(number): number for number in range(1, 400)}}
    package.Tokenizer(package.models.WordLevel(words)).save(str(tmp_path / "tokenizer.json"))
    assert ranks(1).run(written_with, str(tmp_path / "tokenizer.json"), checkpoint[0], "399")[0] == (
        "--prompt: token 399 is outside of the vocabulary of the model, [model] vocab = 384; give the tokenizer of the "
        "training with --tokenizer"
    )


@pytest.mark.ranks(1)
def test_each_of_several_prompts_is_written_on_as_if_it_were_alone(ranks, checkpoint, tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("import\nfrom a\n")
    asked = [checkpoint[0], "--tokens=6", "--temperature=2", "--seed=3"]
    alone, (together,) = (
        [ranks(1).run(by_main, "generate", *asked, *prompt)[0] for prompt in given]
        for given in ([["--prompt=d"], ["--prompt=import"], ["--prompt=from a"]], [["--prompt=d", f"--prompts={file}"]])
    )

    assert "WARNING" not in together
    (longer,) = ranks(1).run(by_main, "generate", checkpoint[0], "--tokens=70", "--prompt=d")
    assert "WARNING: a text of 71 tokens is longer than [train] sequence = 64, the length of the training" in longer

    def texts(printed: str) -> list[str]:
        return re.findall(r"^((?:d|import|from a)(?s:.*?))\nread ", printed, re.M)

    assert texts(together) == [text for each in alone for text in texts(each)] and len(texts(together)) == 3
    assert re.findall(r"^(. of 3) \((.*)\):$", together, re.M) == [
        ("1 of 3", "--prompt"), ("2 of 3", f"{file}, line 1"), ("3 of 3", f"{file}, line 2")
    ]  # fmt: skip


def scored(path: str, tp: int) -> tuple[list[float], list[bool], str, list[Any]]:
    """Return (scores, greedy, text, results), and check that a generated text ends before a given string. Runs in a worker.

    scores    log-probabilities of the greedy continuation and of two other continuations
    greedy    for each continuation, whether every token is the argmax
    text      text generated after the prompt
    results   results of loglikelihood and loglikelihood_rolling; empty if lm_eval is not installed
    """
    found = opened(path, tp, ("train.dtype", "fp32"), ("groups.default.recipe", "bf16"))
    context, follows = PROMPT[0].tolist(), generate.write(found, PROMPT, 3).tokens[0, 5:].tolist()
    scores = [harness.score(found, context, each) for each in (follows, [*follows[:2], 0], [255])]
    told: list[Any] = []
    if importlib.util.find_spec("lm_eval") is not None:
        model, request = harness.adapted(found, BYTES), types.SimpleNamespace(args=("de", "f m"))
        told += model.loglikelihood([request])
        told += model.loglikelihood_rolling([types.SimpleNamespace(args=("def",))])
    text = harness.go_on(found, BYTES, context, {"max_gen_toks": 3})
    cut = harness.go_on(found, BYTES, context, {"max_gen_toks": 3, "until": [text[1]]})
    assert text[0] == cut or text[0] == text[1]
    return [value for value, _ in scores], [most for _, most in scores], text, told


def by_cross_entropy(path: str, text: list[int]) -> float:
    """Return the log-probability of the tokens of a text from the sixth on, computed with torch alone. Runs in a worker."""
    found = opened(path, 1, ("train.dtype", "fp32"), ("groups.default.recipe", "bf16"))
    logits, targets = found.model(torch.tensor([text[:-1]])), torch.tensor(text[1:])
    return -torch.nn.functional.cross_entropy(logits[4:], targets[4:], reduction="sum").item()


@pytest.mark.ranks(2)
def test_continuations_are_scored(ranks, checkpoint):
    path, _ = checkpoint
    values, most, text, told = ranks(1).run(scored, path, 1)[0]
    follows = list(text.encode()) if text.isascii() else None
    assert most == [True, False, False] and values[0] > values[1]
    if follows is not None and len(follows) == 3:
        expected = ranks(1).run(by_cross_entropy, path, [*PROMPT[0].tolist(), *follows])[0]
        assert values[0] == pytest.approx(expected, abs=1e-4)
    both = ranks(2).run(scored, path, 2)
    assert both[0] == both[1] and both[0][0] == pytest.approx(values, abs=1e-4)
    assert not told or (told[0][0] < 0 and told[1] < 0)


def test_a_document_is_scored_in_windows() -> None:
    """The test expects the windows of lm_eval.utils.get_rolling_token_windows and make_disjoint_window with a context
    of one token."""
    assert list(harness.rolling_windows(range(10), -1, 4)) == [
        ([-1], [0, 1, 2, 3]), ([3], [4, 5, 6, 7]), ([5, 6, 7], [8, 9])
    ]  # fmt: skip
    assert list(harness.rolling_windows(range(8), -1, 4)) == [([-1], [0, 1, 2, 3]), ([3], [4, 5, 6, 7])]
    assert list(harness.rolling_windows(range(3), -1, 4)) == [([-1], [0, 1, 2])] and not [
        *harness.rolling_windows([], 0, 4)
    ]


def long_requests(path: str) -> tuple[list[int], list[Any], list[Any], list[str]]:
    """Run requests that are longer than [train] sequence, which is set to 8. Return (lengths, told, by_hand, messages).
    Runs in a worker.

    lengths   number of tokens of each forward
    told      results of the requests for lm_eval
    by_hand   results of the same requests with explicit windows
    messages  refusals, and remarks about truncation
    """
    found = opened(path, 1, ("train.dtype", "fp32"), ("groups.default.recipe", "bf16"), ("train.sequence", "8"))
    with patch.object(harness, "need", return_value=types.SimpleNamespace(TemplateLM=object)):
        model = harness.adapted(found, BYTES)
    text, read = "def main(path): # 19", list[int]()
    tokens = model.tok_encode(text)
    hook = found.model.model.register_forward_pre_hook(lambda _, given: read.append(given[0].shape[1]))
    told = [
        model.loglikelihood_rolling([types.SimpleNamespace(args=(text,))])[0],
        model._loglikelihood_tokens([(None, tokens[:15], tokens[15:])])[0],
        model.generate_until([types.SimpleNamespace(args=(text, {"max_gen_toks": 3}))])[0],
    ]
    lengths = list(read)
    rolled = [([256], tokens[:8]), (tokens[7:8], tokens[8:16]), (tokens[11:16], tokens[16:])]
    by_hand = [
        sum(harness.score(found, *window)[0] for window in rolled),
        harness.score(found, tokens[11:15], tokens[15:]),
        harness.go_on(found, BYTES, tokens[-5:], {"max_gen_toks": 3}),
    ]
    hook.remove()
    refused = []
    for ask in (lambda: harness.score(found, [1], tokens[:9]), lambda: harness.go_on(found, BYTES, [1], {})):
        refused.append(must_raise(ConfigError, ask))
    return lengths, told, by_hand, [*refused, *found.remarks]


@pytest.mark.ranks(1)
def test_no_request_of_a_task_is_longer_than_the_trained_sequence(ranks, checkpoint):
    lengths, told, by_hand, said = ranks(1).run(long_requests, checkpoint[0])[0]
    assert told == by_hand and max(lengths) == 8
    assert said[0].startswith(
        "a continuation of 9 tokens is longer than [train] sequence = 8, the length of the training"
    )
    assert said[1].startswith(
        "a task that asks for 256 tokens leaves no room for its context in [train] sequence = 8; choose"
    )
    assert said.count("contexts are truncated on the left to [train] sequence = 8 tokens, as in lm_eval") == 1


def traced(path: str, trace: Path) -> str:
    """Generate in the recipe of the training, and write a trace; return the message about the speed. Runs in a worker."""
    return generate.write(opened(path, 1), PROMPT, 4, trace=trace).speed(PROMPT.shape[1])


@pytest.mark.slow
@pytest.mark.ranks(1)
def test_its_speed_and_a_trace_of_it(ranks, checkpoint, tmp_path):
    said = ranks(1).run(traced, checkpoint[0], tmp_path / "trace.json")[0]
    assert said.startswith("read 5 tokens in ") and said.endswith(" tokens/s")
    assert (tmp_path / "trace.json").stat().st_size > 0


@pytest.mark.parametrize("option", ["--batches", "--calibration"])
def test_no_batches_are_no_evaluation(option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        evaluate.main([str(tmp_path), option, "0"])
    said = capsys.readouterr().err
    assert said.endswith(f"argument {option}: expected an integer >= 1, got '0'\n")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--mode", "static"], "--mode static has no effect without quantization: add --quantize RECIPE"),
        (["--quantize", "int8", "--calibration", "2"], "--calibration 2 is for static scales: add --quantize RECIPE"),
    ],
)
def test_what_quantizing_would_read_is_not_passed_over(options, said, tmp_path, capsys) -> None:
    with pytest.raises(SystemExit):
        evaluate.main([str(tmp_path), *options])
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("program", ["launch.evaluate", "launch.generate"])
def test_what_is_no_checkpoint_is_one_sentence(program: str, tmp_path: Path) -> None:
    prompt = ["--prompt", "x"] if program == "launch.generate" else []
    code, out, error = command(program, str(tmp_path), *prompt)
    assert (code, out) == (1, "") and "it has no manifest.json" in error and error.count("\n") == 1


def test_bytes_are_text_again() -> None:
    tokens = BYTES.encode([("a name", "Käse".encode())])[0].tolist()
    assert BYTES.decode(tokens) == "Käse" and BYTES.decode(tokens[:2]) == "K\ufffd"
