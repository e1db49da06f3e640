"""AdamW with low-bit averages, without ranks: the bits of torchao's optimizers if nothing is clipped or skipped,
clipping and skipping, which torchao's optimizers lack, fp32 averages, and the plan."""

from __future__ import annotations

import importlib.util
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import dlp
from dlp.optim.encodings import AVERAGES, ENCODINGS, decoded, write
from dlp.optim.low_bit_adamw import step_of_one
from launch.config.run_config import load
from launch.settings.schema import ConfigError
from launch.train import plan_text
from launch.training.optimizer import OPTIMIZERS, check_installed, state_bytes
from tests.cases import of_these
from tests.metrics import assert_all_bit_equal
from tests.refusals import refuses

SETTINGS = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8}
THEIRS = {"adamw8bit": "AdamW8bit", "adamw4bit": "AdamW4bit", "adamwfp8": "AdamWFp8"}


@pytest.fixture
def ao() -> ModuleType:
    return pytest.importorskip("torchao.optim")


def parameters() -> list[nn.Parameter]:
    """Return three parameters: the second has rows of 128 elements, and the third is too small for codes."""
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((16, 256), (32, 128), (256,))]


def optimizer(name: str, over: list[nn.Parameter]) -> Optimizer:
    train = load("tiny", [f"--train.optimizer={name}", "--train.lr=1e-2"]).train
    groups = [{"params": over, "weight_decay": 0.1}]
    if name == "muon":
        groups = [
            {"params": over[:1], "weight_decay": 0.1, "matrices": True},
            {"params": over[1:], "weight_decay": 0.1},
        ]
    return OPTIMIZERS[name](groups, train, train.lr)


def steps(made: Optimizer, over: list[nn.Parameter], count: int = 3, scale: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        for each in over:
            each.grad = torch.randn(each.shape, generator=generator) * scale
        made.step()


def everything(made: Optimizer, over: list[nn.Parameter]) -> dict[str, Tensor]:
    """Return copies of the parameters and their optimizer states, by name."""
    found = {}
    for i, each in enumerate(over):
        found[f"{i}"] = each.detach().clone()
        for key, value in made.state[each].items():
            if hasattr(value, "__tensor_flatten__") and type(value) is not Tensor:  # a quantized state of torchao
                value = {part: getattr(value, part) for part in ("codes", "scale")}
            for part, tensor in (value if isinstance(value, dict) else {"": value}).items():
                found[f"{i}.{key}.{part}"] = tensor.detach().clone().view(-1)
    return found


@pytest.mark.parametrize("name", THEIRS)
def test_a_step_has_torchaos_bits(ao, name):
    ours, theirs = parameters(), parameters()
    made = optimizer(name, ours)
    steps(made, ours)
    with torch.compiler.set_stance("force_eager"):
        other = getattr(ao, THEIRS[name])(theirs, weight_decay=0.1, **SETTINGS)
        steps(other, theirs)
    if name != "adamw4bit":
        del ours[1], theirs[1]  # rows of half a block: dlp keeps the averages in fp32, torchao encodes them
    assert_all_bit_equal(everything(made, ours), everything(other, theirs))
    assert made.state[ours[0]]["exp_avg"]["codes"].shape == (16, 128 if name == "adamw4bit" else 256)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_gradients_are_divided_by_grad_scale(ao, name):
    """The divisor is a power of two, so no bit of a gradient is lost."""
    ours, scaled = parameters(), parameters()
    made, other = optimizer(name, ours), optimizer(name, scaled)
    other.grad_scale, other.found_inf = torch.tensor(4.0), torch.tensor(0.0)
    steps(made, ours)
    steps(other, scaled, scale=4.0)
    assert_all_bit_equal(everything(made, ours), everything(other, scaled))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_on_nan_leaves_every_bit(ao, name):
    over = parameters()
    made = optimizer(name, over)
    made.grad_scale, made.found_inf = torch.tensor(1.0), torch.tensor(0.0)
    steps(made, over)
    before = everything(made, over)
    made.grad_scale, made.found_inf = torch.tensor(torch.nan), torch.tensor(1.0)
    steps(made, over, 1, scale=torch.nan)
    assert_all_bit_equal(everything(made, over), before)
    made.grad_scale, made.found_inf = torch.tensor(1.0), torch.tensor(0.0)
    steps(made, over, 1)
    assert not torch.equal(over[0], before["0"]) and made.state[over[2]]["step"] == 4


def test_torchao_itself_does_neither(ao):
    """torchao's optimizers neither clip nor skip, so dlp has separate ones. If this test fails, torchao's can replace
    them."""
    plain, other = parameters(), parameters()
    with torch.compiler.set_stance("force_eager"):
        for over, scale in ((plain, None), (other, torch.tensor(4.0))):
            made = ao.AdamW8bit(over, **SETTINGS)
            made.grad_scale, made.found_inf = scale, torch.tensor(1.0)
            steps(made, over, 2)
    assert torch.equal(plain[0], other[0]) and not torch.equal(plain[0], parameters()[0])


@pytest.mark.slow
@pytest.mark.parametrize("name", of_these(["adamw4bit"], THEIRS))
def test_a_step_is_one_graph(ao, name):
    """A step can be traced as one functional graph, which compilers need. Tests on GPUs compile the graph with
    inductor."""
    ours, theirs = parameters()[:1], parameters()[:1]
    made, other = optimizer(name, ours), optimizer(name, theirs)
    other._step = torch.compile(step_of_one, fullgraph=True, dynamic=False, backend="aot_eager")
    for found_inf in (0.0, 1.0):
        for each, over in ((made, ours), (other, theirs)):
            each.found_inf = torch.tensor(found_inf)
            steps(each, over, 1)
    assert_all_bit_equal(everything(other, theirs), everything(made, ours))


@pytest.mark.parametrize(
    ("shape", "shards", "reason"),
    [
        ((16, 256), (1, 1), None),
        ((64, 1024), (4, 2), None),
        ((4096,), (1,), None),
        ((15, 256), (1, 1), "fewer than 4096 elements on a rank"),
        ((16, 256), (2, 1), "fewer than 4096 elements on a rank"),
        ((129, 1024), (2, 1), "2 shards of unequal size"),
        ((64, 256), (1, 2), "rows of 128 elements on a rank, not a multiple of 256"),
        ((64, 384), (1, 1), "rows of 384 elements on a rank, not a multiple of 256"),
    ],
)
def test_no_block_leaves_its_row_or_its_rank(shape, shards, reason):
    assert ENCODINGS["adamw8bit"].keeps_fp32(shape, shards) == reason


@pytest.mark.parametrize("name", THEIRS)
def test_what_is_decoded_is_what_was_written(ao, name):
    """Decoded averages differ from the written averages by at most the precision of the codes."""
    values = {key: torch.randn(32, 256).abs() for key in AVERAGES}
    parameter = nn.Parameter(torch.zeros(32, 256))
    for key, signed in AVERAGES.items():
        average = ENCODINGS[name].zeros(parameter)
        write(average, values[key], signed)
        assert isinstance(average, dict)
        error = (decoded(average, signed) - values[key]).norm() / values[key].norm()
        assert error < (0.2 if name == "adamw4bit" else 0.03), (key, error)


@pytest.mark.parametrize("name", THEIRS)
def test_states_are_as_large_as_said(ao, name):
    over = parameters()[:1]
    made = optimizer(name, over)
    steps(made, over, 1)
    state = made.state[over[0]]
    held = sum(part.nbytes for key in AVERAGES for part in state[key].values())
    assert held == state_bytes(name, "layers.0.weight", over[0].shape, 1) * over[0].numel() < 8 * over[0].numel() / 3.9


def test_a_plan_says_which_averages_are_in_few_bits():
    def lines(*overrides):
        return [line for line in plan_text(load("tiny", overrides), 4, "cpu").splitlines() if line.startswith("adamw")]

    assert lines() == []
    assert lines("--train.optimizer=adamw8bit") == [
        "adamw8bit: averages of 966,656 of a rank's 1,033,344 parameters in blocks of 256; 2.5 MB, where fp32 takes 8.3 MB",
        "adamw8bit: fp32 averages for model.layers.0.input_layernorm.weight and 8 more: fewer than 4096 elements on a rank",
        "adamw8bit: fp32 averages for model.layers.0.self_attn.o_proj.weight and 3 more: rows of 128 elements on a "
        "rank, not a multiple of 256",
    ]


def test_without_torchao_the_setting_says_how_to_install_it(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda package: None)
    check_installed(load("tiny"))
    with refuses(r"^tiny.toml: \[train\] optimizer: 'adamw8bit' .*: pip install 'dlp\[ao\]', or", ConfigError):
        check_installed(load("tiny", ["--train.optimizer=adamw8bit"]))


def movements(spread: float) -> list[float]:
    """Train 100 steps with AdamW8bit, AdamWFp8, AdamW4bit and torch's AdamW on the same gradients. Return, for each of the
    first three, the projection of the movement of the weights onto the movement by torch's AdamW, relative to the latter.
    The gradients have standard deviations exp(spread * n) with a normal n for each element."""
    generator = torch.Generator().manual_seed(0)
    deviation, mean, *noise = torch.randn(102, 32, 256, generator=generator)
    kinds = torch.optim.AdamW, dlp.optim.AdamW8bit, dlp.optim.AdamWFp8, dlp.optim.AdamW4bit
    weights = [nn.Parameter(torch.zeros(32, 256)) for _ in kinds]
    optimizers = [
        kind([weight], lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0)
        for kind, weight in zip(kinds, weights, strict=True)
    ]
    for each in noise:
        grad = torch.exp(spread * deviation) * (0.2 * mean + each)
        for weight, optimizer in zip(weights, optimizers, strict=True):
            weight.grad = grad.clone()
            optimizer.step()
    full, *low_bit = (weight.detach() for weight in weights)
    return [float((moved * full).sum() / full.square().sum()) for moved in low_bit]


def test_four_bit_averages_move_weights_less(ao):
    """If gradients in a block have different magnitudes, AdamW4bit moves weights less, like a smaller learning rate.
    The 8-bit optimizers move weights as AdamW does, except for an extreme spread, where averages of squares round to
    zero and weights move too far."""
    for spread, four in ((0.0, 0.94), (0.5, 0.74), (1.0, 0.33)):
        assert movements(spread) == pytest.approx([1.0, 1.0, four], abs=0.02), spread
    eight, fp8, four = movements(2.0)
    assert eight > 2 and fp8 > 2 and four < 0.2
