"""The Python code blocks in README.md and docs/*.md run.

    ```python               is displayed, but does not run
    ```python test          runs; the blocks of a page run in order and share their names
    ```python test ranks=2  runs on each of 2 ranks (1, 2 or 4)

A page runs once without ranks, with the plain test blocks, and once for each number n of ranks, with the plain test
blocks and the blocks marked ranks=n, in the order of the page and in one namespace. Blocks are compiled with the name
and line of the page, so that a traceback points into the page.
"""

from __future__ import annotations

import contextlib
import functools
import posixpath
import re
import textwrap
import traceback
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from dlp.comm.mesh import shutdown
from dlp.quant.__main__ import reference
from tests.restored_tables import restored_fusions, restored_table
from tools import site

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
LINKING = [*PAGES, *sorted((ROOT / "bench" / "results").glob("*.md")), ROOT / "dev" / "log.md"]

_FENCE = re.compile(r"^( *)```(.*)\n((?:.*\n)*?)\1```$", re.MULTILINE)
_INFO = re.compile(r"python(?P<test> test(?: ranks=(?P<ranks>[124]))?)?")


@dataclass(frozen=True)
class Block:
    """A block that runs: code, line of the page at which it begins, and number of ranks (0: no ranks)."""

    code: str
    line: int
    ranks: int


def blocks(text: str) -> list[Block]:
    """The blocks of a page that are marked as tests. Raises ValueError for an unknown `python...` mark."""
    found = []
    for fence in _FENCE.finditer(text):
        indent, info, code = fence.groups()
        line = text.count("\n", 0, fence.start(3)) + 1
        if not info.startswith("py"):
            continue
        mark = _INFO.fullmatch(info.strip())
        if mark is None:
            raise ValueError(f"line {line - 1}: ```{info} is none of: python, python test, python test ranks=1|2|4")
        if mark["test"]:
            found.append(Block(textwrap.dedent(code) if indent else code, line, int(mark["ranks"] or 0)))
    return found


def run_blocks(page: str, chosen: Sequence[Block], directory: str) -> None:
    """Run `chosen` in one namespace, with `directory` as the working directory."""
    namespace: dict[str, object] = {"__name__": "__main__"}
    with contextlib.chdir(directory), restored_table(), restored_fusions(), warnings.catch_warnings():
        warnings.filterwarnings("error", "FSDP2-wrapped module")  # torch warns if the output of a model is a view
        for block in chosen:
            code = "\n" * (block.line - 1) + block.code
            exec(compile(code, page, "exec"), namespace)


def runs() -> list[tuple[Path, int]]:
    """Return (page, number of ranks) of every run; 0 ranks: the run uses no ranks."""
    worlds = {page: sorted({block.ranks for block in blocks(page.read_text())}) for page in PAGES}
    return [(page, world) for page in PAGES for world in worlds[page]]


@pytest.mark.parametrize(("page", "world"), [pytest.param(p, w, id=f"{p.name}-{w}") for p, w in runs()])
def test_page(page, world, ranks, tmp_path):
    chosen = [block for block in blocks(page.read_text()) if block.ranks in (0, world)]
    if world:
        ranks(world).run(run_blocks, str(page), chosen, str(tmp_path))
    else:
        try:
            run_blocks(str(page), chosen, str(tmp_path))
        finally:
            shutdown()  # a page may build a mesh of one rank


def anchors(page: Path) -> set[str]:
    """Anchors of the headings of a page, in GitHub's spelling."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", LINKING, ids=lambda page: page.name)
def test_links_inside_the_repository_lead_somewhere(page):
    missing = []
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if "://" not in link and (not target.exists() or (anchor and anchor not in anchors(target))):
            missing.append(link)
    assert not missing, f"{page.name} links to {missing}"


def test_the_readme_leads_to_every_page():
    found, at = {ROOT / "README.md"}, [ROOT / "README.md"]
    while at:
        page = at.pop()
        links = {(page.parent / link).resolve() for link in re.findall(r"\]\(([^)#\s]+\.md)", page.read_text())}
        at += [link for link in links - found if link.exists()]
        found |= links
    assert not set(PAGES) - found, "these pages cannot be reached by links from the README"


def test_the_navigation_of_the_site_has_every_page_once():
    listed = re.findall(r"^ +- (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(["index.md", *(page.name for page in PAGES if page.name != "README.md")])


def test_links_of_the_site_lead_to_pages_of_the_site():
    """The same check as `mkdocs build --strict`, for machines without mkdocs."""
    folder = ROOT / "docs"
    pages = {page.name: site.relink(page.read_text(), f"docs/{page.name}") for page in folder.glob("*.md")}
    pages |= dict(site.generated())
    places = {*pages, *(file.name for file in folder.glob("*.png"))}
    found = [
        (name, link)
        for name, text in pages.items()
        for link in re.findall(r"\]\(([^)\s#]+)[^)]*\)", text)
        if "://" not in link and posixpath.normpath(posixpath.join(posixpath.dirname(name), link)) not in places
    ]
    assert not found, found


def test_a_link_to_a_file_that_is_no_page_becomes_text():
    text = (
        "[a](../README.md#x), [`b`](../bench/results/gemm.md), ![c](e2e-8b.png), [d](../Makefile), [e](https://e.org)"
    )
    expected = "[a](index.md#x), [`b`](results/gemm.md), ![c](e2e-8b.png), d, [e](https://e.org)"
    assert site.relink(text, "docs/page.md") == expected


def test_the_recipes_page_has_what_dlp_quant_prints():
    page = (ROOT / "docs" / "recipes.md").read_text()
    shown = re.search(r"<!-- printed by .*? -->\n\n(.*)\n\n<!-- end -->", page, re.DOTALL)
    assert shown, "docs/recipes.md has no part between <!-- printed by ... --> and <!-- end -->"
    assert shown[1] == reference(), "put what python -m dlp.quant --docs prints between the two comments"


ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text()
OBJECTS = re.findall(r"^\| (`.+?) \| (`[^|]*?) \|[^|]*\|[^|]*\|$", ARCHITECTURE, re.MULTILINE)


@functools.cache
def folders() -> list[Path]:
    tops = [ROOT / top for top in ("dlp", "launch", "bench", "tests")]
    inside = [place for top in tops for place in top.rglob("*") if place.is_dir() and place.name != "__pycache__"]
    return [ROOT, *tops, *inside]


def files(mention: str) -> list[Path]:
    """Return the files or folders of the repository whose paths end with `mention`, a path in a page."""
    return [place / mention for place in folders() if (place / mention).exists()]


@pytest.mark.parametrize("mention", sorted(set(re.findall(r"`([a-z_0-9/]+(?:\.py|/))`", ARCHITECTURE))))
def test_a_file_of_the_architecture_exists(mention):
    assert files(mention), f"docs/architecture.md names {mention}"


@pytest.mark.parametrize(("named", "places"), OBJECTS)
def test_an_object_of_the_architecture_is_in_its_file(named, places):
    found = [file for place in re.findall(r"`([^`]+)`", places) for file in files(place)]
    sources = "\n".join(
        file.read_text() for each in found for file in ([each] if each.is_file() else each.glob("*.py"))
    )
    defined = set(re.findall(r"^(?:class |def )?(\w+)(?= =|[:(\[])", sources, re.M))
    lacking = set(re.findall(r"`(\w+)`", named)) - defined
    assert not lacking, f"docs/architecture.md looks for {lacking} in {places}"


PAGE = """\
```bash
exit 1
```
```python
raise RuntimeError("shown, not run")
```
- a list

  ```python test
  x = 1
  ```

```python test ranks=2
y = x + undefined
```
"""


def test_only_marked_blocks_are_taken_with_line_and_ranks():
    assert blocks(PAGE) == [Block("x = 1\n", 10, 0), Block("y = x + undefined\n", 14, 2)]


@pytest.mark.parametrize(
    "info", ["python tset", "python test ranks=3", "python test rank=2", "pycon test", "python  test"]
)
def test_a_misspelt_mark_is_an_error(info):
    with pytest.raises(ValueError, match="line 2: ```py"):
        blocks(f"text\n```{info}\n1\n```\n")


def test_a_failing_block_points_into_the_page(tmp_path):
    with pytest.raises(NameError, match="undefined") as failure:
        run_blocks("docs/page.md", blocks(PAGE), str(tmp_path))
    where = traceback.extract_tb(failure.tb)[-1]
    assert (where.filename, where.lineno) == ("docs/page.md", 14)


@pytest.mark.ranks(2)
def test_blocks_run_inside_the_ranks(ranks, tmp_path):
    code = "import torch.distributed as dist\nopen(f'rank-{dist.get_rank()}', 'w').close()\n"
    ranks(2).run(run_blocks, "docs/page.md", [Block(code, 1, 2)], str(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rank-0", "rank-1"]
