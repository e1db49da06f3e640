"""Hooks of mkdocs for the documentation site (`make docs`). They add these pages, whose sources are not in docs/:

    index.md               README.md
    results/NAME.md        bench/results/NAME.md
    reference/NAME.md      one page for each public name, rendered by mkdocstrings from the docstring
    reference/index.md     all public names, with the first paragraph of the docstring

A link to a file that has a page is rewritten to a link to this page. A link to a file without a page (source code, LICENSE)
becomes plain text. Marks for tests behind the language of code fences (`python test ranks=2`, `bash gpus`) are removed.
"""

from __future__ import annotations

import importlib
import inspect
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
MODULES = ("dlp", "dlp.ops", "dlp.optim")  # each name of `__all__` that is not a module has a page

# Names outside of `__all__` that users need for user-defined formats and recipes (docs/custom-recipes.md).
FORMATS = (
    "dlp.testing.check_format", "dlp.testing.sqnr", "dlp.quant.recipe.Operand", "dlp.quant.recipe.both",
    "dlp.quant.quantizer.Quantizer", "dlp.quant.quantizer.QuantizerCaps", "dlp.quant.quantizer.KeepHighPrecision",
    "dlp.quant.tensor.Format", "dlp.quant.tensor.Part", "dlp.quant.tensor.QuantizedTensor",
    "dlp.quant.parameter.QuantizedParameter", "dlp.quant.integers.IntScaling",
)  # fmt: skip
TITLES = {
    "dlp": "Layers, models and recipes",
    "dlp.ops": "Operations",
    "dlp.optim": "Optimizers",
    "dlp.quant": "Formats and recipes of your own",
}

# Methods that a page shows; all other members are left out.
MEMBERS = {
    "dlp.ops.BasicOperation": ["op_forward", "op_backward", "fuser_forward", "fuser_backward"],
    "dlp.ops.FusedOperation": ["fuser_forward", "fuser_backward"],
    "dlp.ops.Handed": ["tensor"],
    "dlp.ops.OperationContext": ["save_for_backward", "mark_dirty"],
    "dlp.ops.Sequential": ["plan"],
    "dlp.quant.quantizer.Quantizer": ["observe", "cast"],
    "dlp.quant.tensor.Format": ["part_shapes", "dequantize"],
}

_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
_FENCE = re.compile(r"^( *```(?:python|bash)) .*$", re.MULTILINE)


def public_names() -> dict[str, list[str]]:
    """Return the dotted public names that have a page, by module; each module is a section of the reference."""
    found = {}
    for module in MODULES:
        names = importlib.import_module(module).__all__
        found[module] = [f"{module}.{name}" for name in names if not inspect.ismodule(_object(f"{module}.{name}"))]
    return found | {"dlp.quant": list(FORMATS)}


def _object(dotted: str) -> object:
    module, _, name = dotted.rpartition(".")
    return getattr(importlib.import_module(module), name)


def summary(dotted: str) -> str:
    """Return the first paragraph of the docstring of a public name, on one line."""
    return " ".join((inspect.getdoc(_object(dotted)) or "").split("\n\n")[0].split()).replace("|", "\\|")


def reference_page(dotted: str) -> str:
    members = MEMBERS.get(dotted, [])
    return f"# {dotted}\n\n::: {dotted}\n    options:\n      members: {members or 'false'}\n"


def reference_index() -> str:
    """Return the index page of the API reference: for each module, a table of the public names that have a page."""
    parts = ["# API reference\n"]
    for module, names in public_names().items():
        rows = [f"| [`{name}`]({name}.md) | {summary(name)} |" for name in names]
        parts.append("\n".join([f"## {TITLES[module]}\n", "| name | summary |", "|---|---|", *rows, ""]))
    return "\n".join(parts)


def results_index() -> str:
    pages = sorted((ROOT / "bench" / "results").glob("*.md"))
    return "# Raw results\n\n" + "".join(f"* [{page.stem}]({page.name})\n" for page in pages)


def generated() -> Iterator[tuple[str, str]]:
    """Yield the path in the site and the content of every file of the site that is not in docs/."""
    yield "index.md", relink((ROOT / "README.md").read_text(), "README.md")
    for file in sorted((ROOT / "bench" / "results").glob("*")):
        if file.suffix in (".md", ".csv", ".json"):
            path = f"bench/results/{file.name}"
            yield site_path(path) or "", relink(file.read_text(), path) if file.suffix == ".md" else file.read_text()
    yield "results/index.md", results_index()
    yield "reference/index.md", reference_index()
    for names in public_names().values():
        for name in names:
            yield f"reference/{name}.md", reference_page(name)


def site_path(path: str) -> str | None:
    """Return the path in the site of a file of the repository; None for a file that is not in the site."""
    if path == "README.md":
        return "index.md"
    if path == "bench/results":
        return "results/index.md"
    for folder, place in (("docs/", ""), ("bench/results/", "results/")):
        if path.startswith(folder) and (ROOT / path).is_file():
            return place + path.removeprefix(folder)
    return None


def relink(markdown: str, source: str) -> str:
    """Return the Markdown of the file `source` of the repository, with links to pages of the site."""
    here = site_path(source) or ""

    def link(match: re.Match[str]) -> str:
        mark, text, target = match.groups()
        path, _, anchor = target.partition("#")
        if "://" in target or target.startswith("mailto:") or not path:
            return match[0]
        place = site_path(posixpath.normpath(posixpath.join(posixpath.dirname(source), path)))
        if place is None:
            return text
        relative = posixpath.relpath(place, posixpath.dirname(here) or ".")
        return f"{mark}[{text}]({relative}{'#' + anchor if anchor else ''})"

    return _LINK.sub(link, markdown)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Append the sections of the reference and of the results to the navigation."""
    assert config.nav is not None
    reference = [
        {TITLES[module]: [f"reference/{name}.md" for name in names]} for module, names in public_names().items()
    ]
    results = [f"results/{page.name}" for page in sorted((ROOT / "bench" / "results").glob("*.md"))]
    config.nav += [
        {"API reference": ["reference/index.md", *reference]},
        {"Raw results": ["results/index.md", *results]},
    ]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    from mkdocs.structure.files import File

    for path, content in generated():
        files.append(File.generated(config, path, content=content))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    if page.file.generated_by is None:
        markdown = relink(markdown, f"docs/{page.file.src_uri}")
    return _FENCE.sub(r"\1", markdown)
