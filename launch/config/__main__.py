"""Print a config with overrides and defaults filled in, or the documentation page of all settings.

python -m launch.config [CONFIG] [--section.key value ...]     prints the resolved config as TOML
python -m launch.config --docs                                 prints docs/config.md
"""

import sys
from collections.abc import Sequence

from launch.common.program import run_program
from launch.config.groups import SCHEMA
from launch.config.run_config import command_line, make_parser, to_toml
from launch.settings.schema import markdown_table

DOCS = """\
# Configuration

This page is printed by `python -m launch.config --docs`; a test compares both.

A run is described by one TOML file. `CONFIG` on a command line is the name of a file under `launch/configs` (without
`.toml`) or a path, and `tiny` if it is left out. Keys without a default must be in the file.

Settings are changed from the command line by `--section.key value`, in a group of layers by `--groups.NAME.key value`;
`--recipe X` is short for `--groups.default.recipe X`, and `--model FOLDER` for `--model.folder FOLDER`. A value is written as
in TOML, and a string needs no quotes:

```bash
python -m launch.config tiny --train.lr 1e-3 --mesh.sequence_parallel false --recipe bf16
```

prints the resolved file, which is itself a config. An invalid setting ends the program with an error message:

```
--train.lr: expected a number > 0, got 'fast'
```
"""


def docs() -> str:
    """Return the content of docs/config.md."""
    page = [DOCS]
    for name, cls in SCHEMA.items():
        title = f"[[{name}]]" if name == "groups" else f"[{name}]"
        page.append(f"## `{title}`\n")
        page += [f"{form.__doc__}\n\n{markdown_table(form)}\n" for form in (cls, *cls.other_forms)]
    return "\n".join(page)


def main(arguments: Sequence[str]) -> None:
    parser = make_parser("launch.config", "Print a config with overrides and defaults filled in.")
    parser.add_argument("--docs", action="store_true", help="print the documentation of all settings instead")
    options, config = command_line(parser, arguments)
    sys.stdout.write(docs() if options.docs else to_toml(config))


if __name__ == "__main__":
    run_program(main)
