"""Tokenizers: bytes, or a tokenizer.json that the package tokenizers reads.

Every document ends with a separator token: 256 for bytes; otherwise the token of --separator, or `eos_token` in the
tokenizer_config.json beside the tokenizer.json. Tokens that the tokenizer adds to a text, such as a begin-of-text token, are
kept.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from launch.common.optional_packages import need
from launch.data.shard import Tokens

SEPARATOR = 256  # separator token of the byte tokenizer; tokens 0 to 255 are the byte values
MOST_UNKNOWN = 0.01  # maximum share of unknown tokens in the prepared text

Text = tuple[str, bytes]  # name of a document in messages, and its text in UTF-8


@dataclass(frozen=True)
class Tokenizer:
    """Tokenizer with its encode and decode functions.

    name        name in messages: "bytes" or the path of the tokenizer.json
    digest      SHA-256 of the tokenizer.json; "" for bytes
    vocabulary  number of tokens
    separator   token that ends a document
    encode      function that returns the tokens of each document, with the separator
    decode      function that converts tokens to text, without separators
    unknown     token for text that the tokenizer cannot encode; None: no such token
    """

    name: str
    digest: str
    vocabulary: int
    separator: int
    encode: Callable[[Sequence[Text]], list[Tokens]]
    decode: Callable[[Sequence[int]], str]
    unknown: int | None = None


def encode_bytes(text: bytes) -> Tokens:
    """Return the bytes of one document and the separator, uint16 [len(text) + 1]."""
    return np.append(np.frombuffer(text, np.uint8).astype(np.uint16), np.uint16(SEPARATOR))


def decode_bytes(tokens: Sequence[int]) -> str:
    """Decode byte tokens as UTF-8, without separators; invalid bytes, such as an incomplete last character, are replaced."""
    return bytes(token for token in tokens if token < SEPARATOR).decode(errors="replace")


BYTES = Tokenizer("bytes", "", 257, SEPARATOR, lambda texts: [encode_bytes(text) for _, text in texts], decode_bytes)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options --tokenizer and --separator, the arguments of `open_tokenizer`, to a parser."""
    parser.add_argument("--tokenizer", default=BYTES.name, help=f"bytes, or a tokenizer.json [{BYTES.name}]")
    parser.add_argument("--separator", help="token that ends a document [eos_token of tokenizer_config.json]")


def open_tokenizer(name: str, separator: str | None = None) -> Tokenizer:
    """Open the tokenizer "bytes" or a tokenizer.json. `separator`: token that ends a document; None: see the module docstring.
    Raises ValueError if the file is not a tokenizer, if no separator is known, or if a separator is given for bytes."""
    if name == BYTES.name:
        if separator is not None:
            raise ValueError("--separator: bytes are separated by 256; leave it out")
        return BYTES
    path = Path(name)
    if not path.is_file():
        raise ValueError(f"{path}: no such tokenizer, expected bytes or the tokenizer.json of a model")
    package = need("tokenizers", "tokenizers", f"{path}: a tokenizer")
    try:
        made = package.Tokenizer.from_file(str(path))
    except Exception as error:  # the package raises the base class Exception
        raise ValueError(
            f"{path}: not a tokenizer of the package tokenizers ({error}); give the tokenizer.json of a model"
        ) from None
    made.no_truncation()
    made.no_padding()
    vocabulary = made.get_vocab(with_added_tokens=True)
    end = vocabulary[_separator(path, vocabulary, separator)]

    def encode(texts: Sequence[Text]) -> list[Tokens]:
        decoded = [_decoded(*text) for text in texts]
        try:
            found = made.encode_batch(decoded)
        except Exception as error:  # the package raises the base class Exception
            raise ValueError(
                f"{path}: this tokenizer cannot encode the documents from {texts[0][0]} to {texts[-1][0]} ({error}); "
                f"give a tokenizer for this text"
            ) from None
        return [np.array([*each.ids, *[end] * (each.ids[-1:] != [end])], np.uint32) for each in found]

    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    unknown = vocabulary.get(getattr(made.model, "unk_token", None) or "")
    return Tokenizer(str(path), digest, max(vocabulary.values()) + 1, end, encode, made.decode, unknown)


def _decoded(name: str, text: bytes) -> str:
    try:
        return text.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{name}: not UTF-8 at byte {error.start}; convert it, or leave it out") from None


def _separator(path: Path, vocabulary: dict[str, int], asked: str | None) -> str:
    """Return the token that ends a document, as text: `asked`, or eos_token of tokenizer_config.json. Raises ValueError if
    there is none, or if the vocabulary lacks it."""
    beside = path.with_name("tokenizer_config.json")
    if asked is None and beside.is_file():
        try:
            found: Any = json.loads(beside.read_text(encoding="utf-8")).get("eos_token")
            asked = found["content"] if isinstance(found, dict) else found
        except (ValueError, AttributeError, KeyError) as error:
            raise ValueError(
                f"{beside}: no readable eos_token ({type(error).__name__}: {error}); fetch the file again, or name the "
                f"token that ends a document with --separator"
            ) from None
    if asked is None:
        raise ValueError(
            f"{path}: no tokenizer_config.json in this folder names an eos_token, so the token that ends a document is "
            f"not known; name it with --separator"
        )
    if asked not in vocabulary:
        raise ValueError(
            f"{path}: the separator {asked!r} is not one of the {len(vocabulary)} tokens of this tokenizer; name one "
            f"of its tokens with --separator"
        )
    return asked


class KnownTokens:
    """Check that a tokenizer fits the text: at most `MOST_UNKNOWN` of the tokens may be the unknown token."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer, self._unknown, self._all = tokenizer, 0, 0

    def check(self, name: str, tokens: Tokens) -> None:
        """Count the tokens of the next document. After at least 1000 tokens in all, raises ValueError if the share of unknown
        tokens exceeds `MOST_UNKNOWN`."""
        if self._tokenizer.unknown is None:
            return
        self._all += len(tokens)
        self._unknown += int((tokens == self._tokenizer.unknown).sum())
        if self._all >= 1000 and self._unknown > MOST_UNKNOWN * self._all:
            raise ValueError(
                f"{self._tokenizer.name}: {self._unknown / self._all:.0%} of the tokens up to {name} are the unknown "
                f"token, so this tokenizer does not fit the text; give another tokenizer"
            )
