"""Token shard: a binary file of tokens, which is memory-mapped.

    offset  bytes          field (little-endian)
    0       8              magic "dlpshard"
    8       4              version, u32
    12      4              dtype of a token, "<u2" or "<u4", zero-padded
    16      8              size of the vocabulary, u64; every token is smaller
    24      8              number of tokens, u64
    32      8              number of documents, u64
    40      32             SHA-256 of everything after the header
    72      8 x documents  index of the first token of each document, int64, ascending from 0
    ...     size x tokens  the tokens

`open_shard` checks the header and the starts of documents. `verify` reads the complete file and checks the hash and the tokens;
every run calls it before the first step (`shard_check.py`). Checkpoints identify the data by the hash in the header. The format
`.npy` is not used, since it has no vocabulary, documents or hash.
"""

import hashlib
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

MAGIC = b"dlpshard"
VERSION = 1
DTYPES = ("<u2", "<u4")
HEADER = struct.Struct("<8sI4sQQQ32s")

REMEDY = "prepare it again"

Tokens = np.ndarray[Any, np.dtype[np.unsignedinteger[Any]]]


@dataclass(frozen=True)
class Shard:
    """Open shard.

    vocabulary  size of the vocabulary
    digest      SHA-256 in the header, hexadecimal
    starts      index of the first token of each document, int64 [num_documents], memory-mapped
    tokens      tokens, uint16 or uint32 [num_tokens], memory-mapped
    remedy      remedy in messages about a damaged shard
    """

    path: Path
    vocabulary: int
    digest: str
    starts: np.ndarray[Any, np.dtype[np.int64]]
    tokens: Tokens
    remedy: str = REMEDY


def write_shard(path: Path, documents: Sequence[Tokens], vocabulary: int) -> None:
    """Write documents, each with at least one token, as one shard. Raises ValueError for a token >= `vocabulary`."""
    lengths = [len(document) for document in documents]
    assert lengths and min(lengths) > 0, "a shard holds documents of at least one token"
    starts = np.concatenate([[0], np.cumsum(lengths)[:-1]]).astype("<i8")
    dtype = DTYPES[vocabulary > 1 << 16]
    wide = np.concatenate(documents)
    _check_tokens(path, wide, vocabulary)
    tokens = wide.astype(dtype)
    digest = hashlib.sha256(starts.data)
    digest.update(tokens.data)
    header = HEADER.pack(MAGIC, VERSION, dtype.encode(), vocabulary, len(tokens), len(documents), digest.digest())
    with path.open("wb") as file:
        for part in (header, starts.data, tokens.data):
            file.write(part)
        file.flush()
        os.fsync(file.fileno())


def open_shard(path: Path, remedy: str = REMEDY) -> Shard:
    """Map a shard into memory. Raises ValueError if the header is invalid or does not fit the size of the file."""
    found = path.stat().st_size
    if found < HEADER.size:
        raise ValueError(
            f"{path}: not a token shard: {found} bytes are fewer than the {HEADER.size} of a header; {remedy}"
        )
    with path.open("rb") as file:
        magic, version, code, vocabulary, num_tokens, num_documents, digest = HEADER.unpack(file.read(HEADER.size))
    dtype = code.rstrip(b"\0").decode("ascii", "replace")
    if magic != MAGIC:
        raise ValueError(f"{path}: not a token shard, it begins with {magic!r} instead of {MAGIC!r}; {remedy}")
    if version != VERSION:
        raise ValueError(f"{path}: version {version} of the format, but this program reads {VERSION}; {remedy}")
    if dtype not in DTYPES:
        raise ValueError(f"{path}: tokens of dtype {dtype!r}, but this program reads {' and '.join(DTYPES)}; {remedy}")
    tokens_at = HEADER.size + 8 * num_documents
    expected = tokens_at + int(dtype[-1]) * num_tokens
    if found != expected:
        word = "truncated" if found < expected else "too long"
        raise ValueError(f"{path}: {word}, the header states {expected} bytes and the file has {found}; {remedy}")
    if not 0 < num_documents <= num_tokens:
        raise ValueError(f"{path}: {num_documents} documents in {num_tokens} tokens is not possible; {remedy}")
    starts = np.memmap(path, "<i8", "r", HEADER.size, (num_documents,))
    tokens = np.memmap(path, dtype, "r", tokens_at, (num_tokens,))
    if starts[0] != 0 or starts[-1] >= num_tokens or not (starts[1:] > starts[:-1]).all():
        raise ValueError(f"{path}: document starts do not ascend from 0 to below {num_tokens}; {remedy}")
    return Shard(path, vocabulary, digest.hex(), starts, tokens, remedy)


def verify(shard: Shard) -> None:
    """Read the complete shard. Raises ValueError if the content does not match the hash, or if a token is outside of the
    vocabulary."""
    digest = hashlib.sha256(shard.starts.data)
    digest.update(shard.tokens.data)
    if digest.hexdigest() != shard.digest:
        raise ValueError(
            f"{shard.path}: damaged, the SHA-256 of the content begins with {digest.hexdigest()[:16]}, in the header "
            f"with {shard.digest[:16]}; {shard.remedy}"
        )
    _check_tokens(shard.path, shard.tokens, shard.vocabulary)


def _check_tokens(path: Path, tokens: np.ndarray[Any, Any], vocabulary: int) -> None:
    """Raise ValueError if a token is outside of the vocabulary; the message names the first such token."""
    if tokens.min() < 0 or tokens.max() >= vocabulary:
        position = int(np.argmax((tokens < 0) | (tokens >= vocabulary)))
        raise ValueError(
            f"{path}: token {tokens[position]} at position {position} of {len(tokens)} is outside the vocabulary of "
            f"{vocabulary}; encode the text again with the tokenizer of that vocabulary"
        )
