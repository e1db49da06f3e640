"""The rules of imports, checked in the source: which packages a package may import, that recipes and overlap strategies
are loaded by name, and that there are no circular imports.

     bench ──► launch ──► dlp.ops, dlp.flows ──► dlp.parallel ──► dlp.runtime, dlp.quant, dlp.comm ──► dlp.kernels

An arrow means "may import". dlp.runtime, dlp.quant and dlp.comm never import each other, dlp.kernels imports no other
package of dlp, and only `load` imports a recipe or an overlap strategy. There are no circular imports of any length.
Imports inside functions and under TYPE_CHECKING count too, and so does `import_module` of a literal name.

    python -m tests.test_imports      prints circular imports, the longest chain of imports and the number of files
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from types import ModuleType

import pytest
from torch import nn
from torch.distributed import fsdp

from tests.syntax import tree_of

ROOT = Path(__file__).parent.parent

BELOW = {"dlp.runtime", "dlp.quant", "dlp.comm", "dlp.kernels"}
PARALLEL = BELOW | {"dlp.parallel"}
# Each package, and the packages that its modules may import.
MAY_IMPORT = {
    "dlp.kernels": set(),
    "dlp.te_arguments": set(),  # a table, and the function that checks it
    "dlp.quant": {"dlp.kernels"},
    "dlp.comm": {"dlp.kernels"},
    "dlp.runtime": {"dlp.kernels"},
    "dlp.parallel": BELOW | {"dlp.te_arguments"},
    "dlp.ops": PARALLEL | {"dlp.te_arguments"},
    "dlp.optim": {"dlp.parallel", "dlp.comm"},
    "dlp.pretrained": {"dlp.parallel"},
    "dlp.tp_plan": {"dlp.parallel"},
    "dlp.te": {"dlp", "dlp.ops", "dlp.parallel", "dlp.quant", "dlp.te_arguments"},
    "dlp.flows": PARALLEL,
    "dlp.proof": PARALLEL,
    "dlp.testing": PARALLEL,
    # dlp/__init__.py, the table of contents
    "dlp": PARALLEL
    | {"dlp.ops", "dlp.optim", "dlp.pretrained", "dlp.tp_plan", "dlp.testing", "dlp.flows", "dlp.proof"},
    "launch": PARALLEL | {"dlp", "dlp.optim", "dlp.pretrained", "dlp.tp_plan", "dlp.ops", "dlp.flows", "dlp.proof"},
    "bench": PARALLEL | {"launch", "dlp", "dlp.ops", "dlp.flows", "dlp.proof"},
}
PROGRAMS = ("launch", "bench")
LOADED_BY_NAME = ("dlp.quant.recipes", "dlp.parallel.overlap")  # folders with one file per choice

# Within dlp.parallel: folder or module -> modules that it must not import. Decisions and objects of the forbidden modules
# are passed as arguments.
NEVER = {
    "dlp.parallel.linear": ("dlp.parallel.model", "dlp.parallel.traffic"),
    "dlp.parallel.weight": ("dlp.parallel.model", "dlp.parallel.traffic"),
    "dlp.parallel.overlap": (
        "dlp.parallel.linear",
        "dlp.parallel.weight",
        "dlp.parallel.model",
        "dlp.parallel.traffic",
    ),
    "dlp.parallel.casts": ("dlp.parallel.linear", "dlp.parallel.weight", "dlp.parallel.model", "dlp.parallel.traffic"),
    "dlp.parallel.style": ("dlp.parallel",),
    "dlp.parallel.model": ("dlp.parallel.traffic",),
}

FILES, FLOORS = 44, 11  # number of modules with code in dlp/parallel; length of the longest chain of imports there

Graph = Mapping[str, set[str]]  # module -> the modules that it imports


def package_of(module: str) -> str | None:
    """The package of MAY_IMPORT that contains `module`, or None for a module outside of the repository."""
    return max((name for name in MAY_IMPORT if f"{module}.".startswith(f"{name}.")), key=len, default=None)


@cache
def imports(source: str, package: str) -> list[tuple[int, str]]:
    return list(found_imports(source, package))


def found_imports(source: str, package: str) -> Iterator[tuple[int, str]]:
    """(line, dotted target) of each import in `source`; `from a import b` gives a.b, since b may be a module.

    package  the package of the source file, for relative imports
    """
    for node in ast.walk(tree_of(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) + 1 - node.level] if node.level else []
            base = ".".join([*parents, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call):
            called = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if called in ("import_module", "__import__"):
                literals = (arg.value for arg in node.args[:1] if isinstance(arg, ast.Constant))
                yield from ((node.lineno, str(name)) for name in literals)


def violations(source: str, module: str, package: str, choices: set[str]) -> list[str]:
    """Return the forbidden imports in `source`, the text of `module`. choices: modules that only `load` may import."""
    owner = package_of(module)
    assert owner is not None
    found = []
    for line, target in imports(source, package):
        layer = package_of(target)
        if layer not in {None, owner} and layer not in MAY_IMPORT[owner]:
            found.append(f"{module}:{line} imports {target}: {owner} may not import {layer}")
        found += [
            f"{module}:{line} imports {target}: reach it through load({choice.rpartition('.')[2]!r})"
            for choice in sorted(choices)
            if f"{target}.".startswith(f"{choice}.")
        ]
    return found


def sources() -> Iterator[tuple[Path, str, str]]:
    """(file, module, package) of every file under dlp/, launch/ and bench/."""
    for folder in ("dlp", *PROGRAMS):
        for file in sorted((ROOT / folder).rglob("*.py")):
            package = ".".join(file.relative_to(ROOT).parent.parts)
            yield file, package if file.stem == "__init__" else f"{package}.{file.stem}", package


def choice_modules() -> set[str]:
    return {module for _, module, package in sources() if package in LOADED_BY_NAME and module != package}


def test_the_source_keeps_to_the_arrows():
    choices = choice_modules()
    assert choices, f"no module found in {LOADED_BY_NAME}"
    found = [
        violation
        for file, module, package in sources()
        for violation in violations(file.read_text(), module, package, choices)
    ]
    assert not found, "\n".join(found)


def upward(source: str, module: str, package: str) -> list[str]:
    """Return the imports in `source`, the text of `module`, that NEVER forbids."""
    rules = {below for folder, below in NEVER.items() if f"{module}.".startswith(f"{folder}.")}
    return [
        f"{module}:{line} imports {target}: {target} is above {module}"
        for line, target in imports(source, package)
        for forbidden in {each for rule in rules for each in rule}
        if f"{target}.".startswith(f"{forbidden}.")
    ]


def test_no_arrow_points_up_inside_of_dlp_parallel():
    found = [each for file, module, package in sources() for each in upward(file.read_text(), module, package)]
    assert not found, "\n".join(found)
    assert upward("from dlp.parallel.model.session import Session", "dlp.parallel.weight.fsdp2", "dlp.parallel.weight")
    known = {module for _, module, _ in sources()}
    assert all(any(f"{module}.".startswith(f"{folder}.") for module in known) for folder in NEVER), (
        "NEVER has a stale name"
    )


def test_every_package_has_a_place_in_the_picture():
    packages = {".".join(module.split(".")[:2]) for _, module, _ in sources() if module.startswith("dlp.")}
    assert packages <= MAY_IMPORT.keys(), f"say in MAY_IMPORT what {sorted(packages - MAY_IMPORT.keys())} may import"


def has_code(source: str) -> bool:
    """Whether a file contains more than a docstring."""
    return any(
        not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)) for node in tree_of(source).body
    )


def graph(under: str) -> dict[str, set[str]]:
    """The modules with code in `under`, and for each module the modules in `under` that it imports."""
    found = {
        module: (file.read_text(), package)
        for file, module, package in sources()
        if f"{module}.".startswith(f"{under}.") and has_code(file.read_text())
    }
    edges: dict[str, set[str]] = {}
    for module, (source, package) in found.items():
        targets = [target for _, target in imports(source, package)]
        # An import names a module, or an object in a module
        named = {target if target in found else target.rpartition(".")[0] for target in targets}
        edges[module] = (named & found.keys()) - {module}
    return edges


def cycles(edges: Graph) -> list[set[str]]:
    """The sets of modules that import each other in a cycle, the largest set first."""
    reach = {module: reached(edges, module) for module in edges}
    sets = {frozenset(other for other in reach[module] if module in reach[other]) for module in edges}
    return sorted((set(each) for each in sets if each), key=len, reverse=True)


def reached(edges: Graph, module: str) -> set[str]:
    """Modules that a module imports, directly or indirectly."""
    found: set[str] = set()
    todo = [module]
    while todo:
        new = edges[todo.pop()] - found
        found |= new
        todo += new
    return found


def longest_chain(edges: Graph) -> list[str]:
    """The longest chain of modules in which each module imports the next. Raises CycleError if there are cycles."""
    chains: dict[str, list[str]] = {}
    for module in TopologicalSorter(edges).static_order():
        chains[module] = [module, *max((chains[target] for target in edges[module]), key=len, default=[])]
    return max(chains.values(), key=len)


def test_no_file_imports_one_that_imports_it():
    """Without import cycles, any module of dlp and launch can be imported first."""
    found = cycles(graph("dlp")) + cycles(graph("launch"))
    assert not found, "\n".join(", ".join(sorted(cycle)) for cycle in found)


def test_dlp_parallel_is_a_house_of_few_floors():
    edges = graph("dlp.parallel")
    assert len(edges) <= FILES, f"{len(edges)} files with code in dlp/parallel"
    chain = longest_chain(edges)
    assert len(chain) <= FLOORS, " -> ".join(chain)


def test_a_folder_of_launch_imports_only_folders_above_it():
    """A folder may import the folders above it in the table of docs/architecture.md. Programs, which are in launch/
    itself, are below all folders."""
    page = (ROOT / "docs" / "architecture.md").read_text()
    order = re.findall(r"^\| `launch/(\w+)/` \|", page, re.MULTILINE)
    folders = {file.parent.name for file in (ROOT / "launch").glob("*/__init__.py")}
    assert set(order) == folders and len(order) == len(folders), "the table has another set of folders than launch/"
    rank = {f"launch.{folder}": place for place, folder in enumerate(order)}

    def place(module: str) -> int:
        return rank.get(".".join(module.split(".")[:2]), len(rank))

    found = [
        f"{module} imports {target}"
        for module, targets in graph("launch").items()
        for target in sorted(targets)
        if place(target) > place(module)
    ]
    assert not found, "\n".join(found)


def test_the_architecture_says_these_limits():
    page = " ".join((ROOT / "docs" / "architecture.md").read_text().split())
    assert (
        FLOORS == 11 and f"`dlp.parallel` at most {FILES} files, and no chain of imports over more than eleven." in page
    )


def test_a_cycle_and_a_chain_are_found():
    edges = {"a": {"b"}, "b": {"c", "d"}, "c": {"b"}, "d": set()}
    assert cycles(edges) == [{"b", "c"}]
    with pytest.raises(CycleError):
        longest_chain(edges)
    assert longest_chain(edges | {"c": {"d"}}) == ["a", "b", "c", "d"]


def forget_programs() -> dict[str, ModuleType]:
    """Remove the modules of launch and bench from sys.modules, and return them."""
    ours = [name for name in sys.modules if name.partition(".")[0] in PROGRAMS]
    return {name: sys.modules.pop(name) for name in ours}


@pytest.mark.full  # the test of circular imports covers the modules of launch
@pytest.mark.slow
def test_every_program_can_be_the_first_module_that_is_imported():
    """The test imports each program first, as `python -m` does, because a circular import can fail for one first module
    and work for another."""
    before = forget_programs()
    try:
        for module in [module for _, module, package in sources() if package in PROGRAMS]:
            importlib.import_module(module)
            assert module in forget_programs()
    finally:
        forget_programs()
        sys.modules.update(before)


@pytest.mark.parametrize(
    ("module", "source", "message"),
    [
        (
            "dlp.kernels.ops",
            "import dlp.quant.tensor",
            "1 imports dlp.quant.tensor: dlp.kernels may not import dlp.quant",
        ),
        ("dlp.kernels.ops", "from .. import quant", "1 imports dlp.quant: dlp.kernels may not import dlp.quant"),
        ("dlp.kernels.ops", "import dlp", "1 imports dlp: dlp.kernels may not import dlp"),
        ("dlp.quant.tensor", "\nfrom ..comm import mesh", "2 imports dlp.comm.mesh: dlp.quant may not import dlp.comm"),
        (
            "dlp.quant.tensor",
            "\nfrom ..comm import transport",
            "2 imports dlp.comm.transport: dlp.quant may not import dlp.comm",
        ),
        (
            "dlp.comm.transport",
            "def f():\n from dlp import quant",
            "2 imports dlp.quant: dlp.comm may not import dlp.quant",
        ),
        ("dlp.comm.mesh", "from dlp.parallel import style", "may not import dlp.parallel"),
        (
            "dlp.parallel.linear.modules",
            "from launch.models.modules import Llama",
            "dlp.parallel may not import launch",
        ),
        ("dlp.parallel.linear.modules", "from dlp import convert", "dlp.parallel may not import dlp"),
        ("dlp.parallel.linear.modules", "from dlp.ops import fuse", "dlp.parallel may not import dlp.ops"),
        ("dlp.ops.fuse", "from launch.models.modules import Llama", "dlp.ops may not import launch"),
        ("dlp.quant.recipe", "from dlp.quant.recipes import mine", "reach it through load('mine')"),
        ("dlp.quant.recipes.other", "from .mine import X", "reach it through load('mine')"),
        ("launch.train", "from bench import host", "launch may not import bench"),
        ("launch.train", "importlib.import_module('dlp.quant.recipes.mine')", "reach it through load('mine')"),
    ],
)
def test_a_forbidden_import_is_found(module, source, message):
    found = violations(source, module, module.rpartition(".")[0], {"dlp.quant.recipes.mine"})
    assert len(found) == 1 and message in found[0], found


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("dlp.kernels.ops", "import torch\nfrom . import reference\nfrom dlp.kernels.reference import cast"),
        ("dlp.quant.recipe", "importlib.import_module(f'dlp.quant.recipes.{name}')\nfrom dlp.kernels import ops"),
        ("dlp.parallel.linear.functional", "from dlp.quant import recipes\nfrom ..comm.transport import agree"),
        ("launch.train", "import dlp\nfrom dlp.kernels import ops\nfrom .config import load"),
    ],
)
def test_an_allowed_import_is_not(module, source):
    assert violations(source, module, module.rpartition(".")[0], {"dlp.quant.recipes.mine"}) == []


if __name__ == "__main__":
    parallel, found = graph("dlp.parallel"), cycles(graph("dlp"))
    print(f"{len(parallel)} files with code in dlp/parallel (at most {FILES})")
    for cycle in found:
        print(f"cycle of {len(cycle)}:", *sorted(cycle), sep="\n  ")
    if not cycles(parallel):
        steps = longest_chain(parallel)
        print(f"longest chain of {len(steps)} (at most {FLOORS}):", *steps, sep="\n  ")


# Private names of FSDP2: its modules, and the attributes of objects that these modules define.
FSDP2 = "torch.distributed.fsdp._fully_shard"
THE_FILE = Path("dlp/parallel/weight/fsdp2.py")


def private_to_fsdp2() -> set[str]:
    """Return the names of attributes of FSDP2's internal objects that its public module and tensors do not have."""
    found: set[str] = set()
    for module, name in (
        ("_fsdp_param", "FSDPParam"),
        ("_fsdp_param_group", "FSDPParamGroup"),
        ("_fsdp_state", "FSDPState"),
    ):
        nodes = ast.walk(tree_of(inspect.getsource(getattr(importlib.import_module(f"{FSDP2}.{module}"), name))))
        found |= {node.attr for node in nodes if isinstance(node, ast.Attribute) and is_self(node.value)}
    found |= {"_get_fsdp_state", "fsdp_pre_all_gather", "fsdp_post_all_gather"}
    of_it = re.compile(r"_|.*(shard|gather|fsdp|mp_policy)")  # other names, such as `device`, are not specific to FSDP2
    return {name for name in found if of_it.match(name) and not hasattr(nn.Module, name)} - set(dir(fsdp.FSDPModule))


def is_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


def uses_of_fsdp2(source: str, package: str, private: set[str]) -> list[str]:
    """Return imports from FSDP2's modules, and attributes with private names of FSDP2: of objects other than `self`, or
    named in a call of getattr, setattr or hasattr."""
    found = [target for _, target in imports(source, package) if target.startswith(FSDP2)]
    for node in ast.walk(tree_of(source)):
        if isinstance(node, ast.Attribute) and not is_self(node.value) and node.attr in private:
            found.append(node.attr)
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "setattr", "hasattr"):
            found += [arg.value for arg in node.args[1:2] if isinstance(arg, ast.Constant) and arg.value in private]
    return found


def test_one_file_touches_what_is_private_in_fsdp2():
    private = private_to_fsdp2()
    uses = {
        file.relative_to(ROOT): found
        for file, _, package in sources()
        if (found := uses_of_fsdp2(file.read_text(), package, private))
    }
    assert {"_sharded_param_data", "_unsharded_param", "_module_info", "_init_extensions"} <= set(uses[THE_FILE])
    assert uses.keys() == {THE_FILE}, uses


def test_the_tests_of_gpus_can_be_imported():
    """Without a device pytest does not collect these tests, so a wrong import would be noticed only on a GPU."""
    files = sorted((ROOT / "tests" / "gpu").glob("*.py"))
    assert len(files) > 20
    for file in files:
        importlib.import_module(f"tests.gpu.{file.stem}")
