"""Convert text files and rows into token shards (`prepare`), and check and describe shards (`inspect`).

python -m launch.data prepare --out DIR FILES_OR_FOLDERS... [--tokenizer tokenizer.json] [--column text]
python -m launch.data inspect SHARD_OR_FOLDER
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from launch.common.program import run_program
from launch.data.documents import has_rows, is_text, list_files, looks_like_rows
from launch.data.prepare import check_share, prepare
from launch.data.shard import Shard, open_shard, verify
from launch.data.tokenizer import add_options, open_tokenizer


def describe(shard: Shard) -> str:
    """Return a description of a shard: size, dtype, vocabulary, documents and hash."""
    lengths = np.diff(np.append(shard.starts, len(shard.tokens)))
    return (
        f"{shard.path}: {len(shard.tokens):,} tokens of dtype {shard.tokens.dtype.str}, vocabulary {shard.vocabulary}\n"
        f"documents: {len(lengths):,} of {lengths.min():,} to {lengths.max():,} tokens\n"
        f"sha256: {shard.digest}"
    )


def _prepare_command(options: argparse.Namespace) -> None:
    if options.out.exists():
        raise ValueError(f"{options.out}: exists already; remove it or choose another --out")
    check_share(options.validation)
    tokenizer = open_tokenizer(options.tokenizer, options.separator)
    files = list_files(options.files)
    read = {name: path for name, path in files.items() if has_rows(path, options.column) or is_text(path)}
    for name in files.keys() - read.keys():
        print(f"left out, not text: {name}", flush=True)
    try:
        prepare(
            read, options.out, validation=options.validation, tokenizer=tokenizer, column=options.column, progress=True
        )
    except OSError as error:
        where = f"{error.filename}: {error.strerror}" if error.filename else str(error)
        raise ValueError(f"{where}; {options.out} was not created") from None
    for name, path in read.items():
        if looks_like_rows(path) and not has_rows(path, options.column):
            print(
                f"read as one document, because the file is neither JSON lines nor an array of objects or strings: "
                f"{name}"
            )
    for path in sorted(options.out.glob("*.shard")):
        print(describe(open_shard(path)))


def _inspect_command(options: argparse.Namespace) -> None:
    paths = sorted(options.shard.glob("*.shard")) if options.shard.is_dir() else [options.shard]
    if not options.shard.exists():
        raise ValueError(f"{options.shard}: no such file or folder; give a shard, or a folder from launch.data prepare")
    if not paths:
        raise ValueError(
            f"{options.shard}: the folder has no *.shard files; give a shard, or a folder from launch.data prepare"
        )
    for path in paths:
        shard = open_shard(path)
        verify(shard)
        print(describe(shard) + ", matches the content")


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="launch.data", description="Create and inspect token shards.")
    commands = parser.add_subparsers(required=True)
    making = commands.add_parser(
        "prepare", help="convert text files and rows into shards; each file or row is a document"
    )
    kinds = (
        "text files, JSON lines and arrays (.jsonl, .ndjson, .json, also .gz), .parquet, .arrow, folders of them, saved "
        "Hugging Face datasets"
    )
    making.add_argument("files", nargs="+", type=Path, help=kinds)
    making.add_argument("--out", required=True, type=Path, help="folder to create")
    add_options(making)
    making.add_argument("--column", default="text", help="column of rows that holds the text (default: text)")
    making.add_argument(
        "--validation", type=float, default=0.05, help="share of documents held out for validation (default: 0.05)"
    )
    making.set_defaults(command=_prepare_command)
    inspecting = commands.add_parser("inspect", help="check shards and their hashes, and describe them")
    inspecting.add_argument("shard", type=Path, help="a shard, or a folder of shards")
    inspecting.set_defaults(command=_inspect_command)
    options = parser.parse_args(arguments)
    options.command(options)


if __name__ == "__main__":
    run_program(main)
