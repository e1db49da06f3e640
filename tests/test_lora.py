"""LoRA: adapters over a frozen base of values or codes, PEFT's numbers and files, merging, and refusals."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from torch import Tensor, nn

import dlp
from dlp.flows.lora import LoRALinear, adapted
from dlp.quant.parameter import QuantizedParameter
from tests.refusals import refuses

INT4, INT3 = ({"name": "qat", "weight": f"int{bits} group 32"} for bits in (4, 3))
BASES = [None, "fp8_current", "fp8_rowwise", "fp8_block", "nvfp4", "mxfp8", "int8", INT4, INT3]


def made(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(128, 256), nn.SiLU(), nn.Linear(256, 64)).to(dtype)


def with_adapters(model: nn.Module, **options) -> nn.Module:
    """Add adapters with random lora_A and lora_B, so that every gradient is nonzero (`dlp.lora` sets lora_B to zero);
    return the model."""
    dlp.lora(model, rank=8, alpha=16, **options)
    generator = torch.Generator().manual_seed(1)
    for _, module in adapted(model):
        for side in (module.lora_A, module.lora_B):
            side.weight.data.copy_(torch.randn(side.weight.shape, generator=generator) / 8)
    return model


def gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    model(x).float().square().sum().backward()
    return [x.grad, *(p.grad for p in model.parameters() if p.requires_grad)]


@pytest.mark.parametrize("base", BASES, ids=str)
def test_gradients_are_those_over_the_decoded_base(base):
    model, x = with_adapters(made(torch.bfloat16), base=base), torch.randn(16, 128).bfloat16()
    plain = copy.deepcopy(model)
    for _, module in adapted(plain):
        weight = module.base.weight
        values = weight.dequantize() if base else weight.detach()
        module.base.weight = nn.Parameter(values.bfloat16(), requires_grad=False)
    for found, expected in zip(gradients(model, x), gradients(plain, x), strict=True):
        assert (found - expected).norm() <= 0.02 * expected.norm()
    assert [name for name, p in model.named_parameters() if p.requires_grad] == [
        f"{i}.{side}.weight" for i in (0, 2) for side in ("lora_A", "lora_B")
    ]


@pytest.mark.parametrize("base", [None, "nvfp4", INT4], ids=str)
def test_a_new_adapter_changes_nothing_and_compiles_to_one_graph(base):
    model, x = made(), torch.randn(16, 128)
    if base:
        dlp.quantize_(model, base)
    before = model(x)
    assert dlp.lora(model, rank=4, layers=["0", "2"]) == ["0", "2"]
    assert torch.equal(model(x), before)
    eager = with_adapters(made(), base=base)
    torch._dynamo.reset()
    compiled = torch.compile(copy.deepcopy(eager), backend="aot_eager", fullgraph=True)
    for found, expected in zip(gradients(compiled, x), gradients(eager, x), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("base", [None, "nvfp4"], ids=str)
def test_merged_weights_compute_what_adapters_did(base):
    model, x = with_adapters(made(), base=base), torch.randn(16, 128)
    y = model(x)
    assert dlp.merge_lora(model) == ["0", "2"]
    assert not list(adapted(model)) and type(model[0]) is nn.Linear
    torch.testing.assert_close(model(x), y, rtol=1e-4, atol=1e-4)
    merged = model[0].weight.detach().clone()
    dlp.quantize_(model, "nvfp4")  # merged weights are values, which can be quantized again
    codes = QuantizedParameter.from_float(merged, dlp.recipe("nvfp4").w.rowwise)
    assert all(map(torch.equal, model[0].weight.parts, codes.parts))


def test_files_are_those_of_peft_and_train_alike(tmp_path):
    peft = pytest.importorskip("peft")
    x, target = torch.randn(32, 128), torch.randn(32, 64)
    theirs = peft.get_peft_model(made(), peft.LoraConfig(r=8, lora_alpha=16, target_modules=["0", "2"]))
    for parameter in theirs.parameters():
        if parameter.requires_grad:
            parameter.data.normal_(generator=torch.Generator().manual_seed(parameter.numel())).div_(8)
    theirs.save_pretrained(tmp_path / "theirs")
    ours = made()
    dlp.lora(ours, rank=8, alpha=16)
    dlp.load_lora(ours, tmp_path / "theirs")
    for model in (theirs, ours):
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01)
        for _ in range(3):
            optimizer.zero_grad()
            (model(x) - target).square().mean().backward()
            optimizer.step()
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-6, atol=1e-6)
    dlp.save_lora(ours, tmp_path / "ours", base_model="made")
    again = peft.PeftModel.from_pretrained(made(), tmp_path / "ours")
    torch.testing.assert_close(again(x), ours(x), rtol=1e-6, atol=1e-6)


def test_what_cannot_be_adapted_or_loaded_is_refused(tmp_path):
    for options, said in (
        ({"rank": 0}, "rank must be an integer of at least 1; got 0: choose"),
        ({"rank": 4.0}, "rank must be an integer of at least 1; got 4.0: choose"),
        ({"alpha": float("nan")}, "alpha must be a finite number above 0; got nan: choose"),
        ({"alpha": 0}, "alpha must be a finite number above 0; got 0: choose"),
        ({"rank": "8"}, "rank must be an integer of at least 1; got '8': choose"),
        ({"alpha": "16"}, "alpha must be a finite number above 0; got '16': choose"),
        ({"dropout": 1.0}, r"dropout must be a number in \[0, 1\); got 1.0"),
    ):
        with pytest.raises(ValueError, match=said):
            dlp.lora(made(), **options)
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "adapter_config.json").write_text("{}")
    (tmp_path / "empty" / "adapter_model.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match="adapter_config.json has no r; pass a folder of LoRA adapters"):
        dlp.load_lora(with_adapters(made()), tmp_path / "empty")
    (tmp_path / "empty" / "adapter_config.json").write_text("{broken")
    with refuses("adapter_config.json is not valid JSON: Expecting property name .* copy the file again"):
        dlp.load_lora(with_adapters(made()), tmp_path / "empty")
    with pytest.raises(ValueError, match="has no adapter_config.json; pass a folder that dlp.save_lora or PEFT wrote"):
        dlp.load_lora(with_adapters(made()), tmp_path / "nowhere")
    with pytest.raises(ValueError, match="pattern 'x' matches no layer; nearest"):
        dlp.lora(made(), layers="x")
    for given, options in ((made(), {"layers": []}), (nn.Linear(8, 8), {})):
        with pytest.raises(ValueError, match="layers must be patterns of names of linears inside the model; got "):
            dlp.lora(given, **options)
        assert all(parameter.requires_grad for parameter in given.parameters())
    model = with_adapters(made())
    with pytest.raises(ValueError, match="0 has an adapter already; call dlp.lora once"):
        dlp.lora(model)
    with pytest.raises(ValueError, match="the model has no adapter; call dlp.lora first"):
        dlp.merge_lora(made())
    with pytest.raises(ValueError, match="the model has no adapter; call dlp.lora first"):
        dlp.save_lora(made(), tmp_path)
    dlp.save_lora(model, tmp_path)
    safetensors_torch = pytest.importorskip("safetensors.torch")
    weights = safetensors_torch.load_file(tmp_path / "adapter_model.safetensors")
    first = next(name for name in weights if "lora_A" in name)
    for value in (weights[first][:, :4].contiguous(), weights[first].to(torch.int8), weights[first] * torch.nan):
        (tmp_path / "wrong").mkdir(exist_ok=True)
        (tmp_path / "wrong" / "adapter_config.json").write_bytes((tmp_path / "adapter_config.json").read_bytes())
        safetensors_torch.save_file({**weights, first: value}, tmp_path / "wrong" / "adapter_model.safetensors")
        with pytest.raises(ValueError, match=r"0.lora_A in .* must be finite floats of shape \(8, 128\); got "):
            dlp.load_lora(model, tmp_path / "wrong")
    other = made()
    dlp.lora(other, rank=4, alpha=16)
    with pytest.raises(ValueError, match="has r = 8 and lora_alpha = 16, and 0 has rank 4 and alpha 16; pass these"):
        dlp.load_lora(other, tmp_path)
    fewer = made()
    dlp.lora(fewer, rank=8, alpha=16, layers="0")
    with pytest.raises(ValueError, match=r"0 missing \(\), 2 unknown .* call dlp.lora with layers = \['0', '2'\]"):
        dlp.load_lora(fewer, tmp_path)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps(config | {"use_dora": True}))
    with pytest.raises(ValueError, match="has use_dora = True, which dlp does not support; train the adapters without"):
        dlp.load_lora(model, tmp_path)
    (tmp_path / "adapter_config.json").write_text(json.dumps(config | {"alora_invocation_tokens": [5]}))
    with pytest.raises(ValueError, match=r"has alora_invocation_tokens = \[5\], which dlp does not support"):
        dlp.load_lora(model, tmp_path)
    for initial in ("pissa_niter_4", "olora", "loftq"):
        (tmp_path / "adapter_config.json").write_text(json.dumps(config | {"init_lora_weights": initial}))
        with pytest.raises(ValueError, match=f"init_lora_weights = '{initial}', which changed the weights of the base"):
            dlp.load_lora(model, tmp_path)
    for pattern in ("x", ["0", "2.base"]):
        with pytest.raises(
            ValueError, match="lora_groups: group 'none': pattern '(x|2.base)' matches no layer; nearest"
        ):
            dlp.lora_groups(model, [dlp.LayerGroup("none", pattern, recipe="bf16")])


def test_groups_cut_adapters_as_their_base():
    model = nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 64), nn.Linear(64, 64))
    dlp.lora(model, rank=4, layers="{0,1}")
    groups = [
        dlp.LayerGroup("all", "**", recipe="fp8_current", sequence_parallel=True),
        dlp.LayerGroup("in", "0", style="column"),
        dlp.LayerGroup("out", "1", style="row"),
    ]
    found = {match: (g.style, g.sequence_parallel) for g in dlp.lora_groups(model, groups) for match in g.match}
    assert found == {
        "0.base": ("column", None), "1.base": ("row", None), "2": (None, True), "0.lora_A": ("local", True),
        "0.lora_B": ("column", True), "1.lora_A": ("row", True), "1.lora_B": ("local", True),
    }  # fmt: skip


def test_groups_keep_norms_embeddings_and_modules_that_are_left_out():
    """Groups of a model with adapters plan the modules without adapters as groups of the plain model do, with the names that
    leave out the prefix of transformers."""

    def net() -> nn.Module:
        block = {"norm": nn.RMSNorm(64), "up": nn.Linear(64, 64), "down": nn.Linear(64, 64)}
        whole = nn.ModuleDict({"model": nn.ModuleDict({
            "embed": nn.Embedding(96, 64), "head": nn.Linear(64, 96), "own": nn.Sequential(nn.Linear(64, 64)),
            "layers": nn.ModuleList([nn.ModuleDict(block)]),
        })})  # fmt: skip
        whole.base_model_prefix = "model"
        return whole

    groups = [
        dlp.LayerGroup("region", "layers.**", sequence_parallel=True), dlp.LayerGroup("up", "layers.*.up", style="column"),
        dlp.LayerGroup("down", "layers.*.down", style="row"), dlp.LayerGroup("own", "own", convert=False),
        dlp.LayerGroup("vocabulary", ["embed", "head"], style="column"),
    ]  # fmt: skip
    plain, model = net(), net()
    assert dlp.lora(model, rank=4, layers="layers.*.up") == ["model.layers.0.up"]
    expected = dlp.make_plan(plain, groups, tp=2, batch=(1, 64))
    found = dlp.make_plan(model, dlp.lora_groups(model, groups), tp=2, batch=(1, 64))
    assert found.others == expected.others and found.left_out == expected.left_out
    styles = {row.name: row.style for row in found.layers}
    assert {row.name.replace("up", "up.base"): row.style for row in expected.layers}.items() <= styles.items()


def test_dropout_is_of_the_adapter_alone():
    model, x = made(), torch.ones(64, 128)
    dlp.lora(model, rank=4, layers="0", dropout=0.5)
    module = model[0]
    assert isinstance(module, LoRALinear)
    module.lora_B.weight.data.fill_(1.0)
    assert not torch.equal(module(x), module(x))
    model.eval()
    assert torch.equal(module(x), module(x))


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 7])
def test_an_integer_base_is_qat_in_groups_of_32(bits):
    x, by_name, by_recipe = torch.randn(16, 128), made(), made()
    dlp.lora(by_name, rank=4, base=f"int{bits}")
    dlp.lora(by_recipe, rank=4, base=dlp.recipe("qat", weight=f"int{bits} group 32"))
    codes = [module[0].base.weight for module in (by_name, by_recipe)]
    assert len(codes[0].parts) == len(codes[1].parts) and all(map(torch.equal, codes[0].parts, codes[1].parts))
    assert torch.equal(by_name(x), by_recipe(x))
    with pytest.raises(ValueError, match="int9"):
        dlp.lora(made(), base="int9")


def test_quantize_after_lora_is_the_base_option():
    torch.manual_seed(1)
    x, by_option, after = torch.randn(16, 128), with_adapters(made(), base="fp8_current"), with_adapters(made())
    dlp.quantize_(after, "fp8_current")
    assert torch.equal(after(x), by_option(x))
    assert all(type(side.weight) is nn.Parameter for _, m in adapted(after) for side in (m.lora_A, m.lora_B))
