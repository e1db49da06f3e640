"""Files of other programs that cannot be read are refused with one sentence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from dlp.optim.encodings import encoding_of
from launch.data import tokenizer
from launch.data.documents import saved_dataset
from launch.weights import safetensors_folder
from launch.weights.hf_config import read_config
from tests.refusals import refuses


def test_a_config_that_is_no_json(tmp_path: Path):
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config.json: not JSON \(.*\); fetch the file again"):
        read_config(tmp_path)


def test_an_index_that_names_what_is_not_there(tmp_path: Path):
    save_file({"a": torch.zeros(2)}, tmp_path / "one.safetensors")
    index = tmp_path / safetensors_folder.INDEX
    index.write_text(json.dumps({"weight_map": {"b": "one.safetensors"}}))
    with refuses("no tensor b in this file, although model.safetensors.index.json lists it; fetch the folder again"):
        safetensors_folder.entries(tmp_path)
    index.write_text(json.dumps({"weight_map": {"a": "../one.safetensors"}}))
    with pytest.raises(ValueError, match="'../one.safetensors' is no file beside it"):
        safetensors_folder.entries(tmp_path)


def test_a_state_that_no_saved_dataset_has(tmp_path: Path):
    (tmp_path / "state.json").write_text("[]")
    with pytest.raises(ValueError, match="state.json: not the state of a saved dataset"):
        saved_dataset(tmp_path)


def test_codes_of_no_encoding():
    with pytest.raises(ValueError, match=r"codes \[3\] with scales \[2\] match no encoding in "):
        encoding_of(torch.zeros(3, dtype=torch.uint8), torch.zeros(2))


def test_text_that_is_not_utf_8():
    with pytest.raises(ValueError, match="a.txt: not UTF-8 at byte 1; convert it, or leave it out"):
        tokenizer._decoded("a.txt", b"a\xff")
