"""Fixtures and order of the suite: tests without ranks first, then those on 1, 2 and 4 ranks (see tests/pool.py).

    @pytest.mark.ranks(2)
    def test_sum(ranks):
        assert ranks(2).run(job, 3) == [..., ...]          # job(3) on each rank; job is at module level

    @pytest.mark.parametrize("world", [2, 4])              # a parameter of this name counts as the mark
    def test_sums(ranks, world): ...

A run leaves out cases that other cases cover. `--all-cases` (as in `make test-all`, `make multigpu`, `make gpu-test`)
runs all cases. How a run without `--all-cases` chooses cases, by the decorators of a test (left):

    several decorators `parametrize`   without ranks: every pair of rows of two decorators is in some case that runs;
                                       with ranks, where a case takes a second: every row is in some case that runs
    @pytest.mark.full, or `nightly`,   the cases do not run, because another case of the decorator covers the same
    `few` and `of_these` of            code, such as recipes with the same granularity of scales, or 4 ranks in addition to 2
    tests/cases.py
    hypothesis                         10 examples of each case, unless the test sets a number; 25 with `--all-cases`

The choice is the same in every run. If a test has only one decorator `parametrize`, all rows of the decorator run.

Ranks are gloo processes on the CPU. With `--device cuda`, ranks are NCCL processes with one GPU each; with
`--share-gpu` in addition, all ranks use the same GPU (tests/shared_gpu.py). With pytest-xdist (`-n 2 --dist loadfile
--no-loadscope-reorder`) a worker of xdist runs complete files, so that fixtures of a file are created once, and starts
with the slow files. Each worker of xdist has separate pools of ranks, so that two workers can run tests on 2 ranks at
the same time.
"""

from __future__ import annotations

import gc
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.pool import Pool, collect_garbage_seldom

pytest.register_assert_rewrite("tests.metrics")
torch.set_num_threads(1)  # as in the processes of ranks, so that sums are added in the same order

if importlib.util.find_spec("hypothesis"):  # optional: tests on GPUs do not need it
    from hypothesis import settings

    settings.register_profile("default run", deadline=None, max_examples=10, derandomize=True)
    settings.register_profile("all cases", deadline=None, max_examples=25, derandomize=True)
    settings.load_profile("default run")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", choices=("cpu", "cuda"), default="cpu", help="device of tests with ranks")
    parser.addoption("--share-gpu", action="store_true", help="with --device cuda: run all ranks of a test on one GPU")
    parser.addoption("--all-cases", action="store_true", help="run all cases of each test, instead of a selection")
    parser.addoption(
        "--fast",
        action="store_true",
        help="leave out tests marked slow; run one case of each test with ranks, on at most two ranks, and of each other test "
        "enough cases to contain every parameter value",
    )
    parser.addoption(
        "--cases",
        type=int,
        metavar="N",
        help="run at least N cases of each test, and enough cases to contain every parameter value",
    )
    parser.addoption(
        "--emulated",
        action="store_true",
        help="run the tests of kernels in tests/gpu on a GPU that is simulated on the CPU (tests/cuda_on_cpu)",
    )
    parser.addoption(
        "--golden", action="append", metavar="FILE", help="files for test_golden.py, instead of the files in tests/data"
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--all-cases") and importlib.util.find_spec("hypothesis"):
        settings.load_profile("all cases")


def world_of(item: pytest.Item) -> int:
    """Number of ranks that a test with the fixture `ranks` needs: the parameter `world`, else the argument of the mark
    `ranks(n)`, else 0."""
    if "ranks" not in getattr(item, "fixturenames", ()):
        return 0
    callspec = getattr(item, "callspec", None)
    if callspec is not None and "world" in callspec.params:
        return int(callspec.params["world"])
    mark = item.get_closest_marker("ranks")
    return int(mark.args[0]) if mark else 0


def met_by(item: pytest.Item) -> set[tuple[tuple[str, str], ...]]:
    """Return all parameter values of a case, and all pairs of these values."""
    callspec = getattr(item, "callspec", None)
    values = [(name, repr(value)) for name, value in sorted(callspec.params.items())] if callspec else []
    return {*combinations(values, 1), *combinations(values, 2)}


def rows_of(item: pytest.Item, strength: int) -> set[tuple[tuple[str, str], ...]]:
    """Return the rows of the `parametrize` decorators that a case combines; for strength 2, also all pairs of these
    rows."""
    callspec = getattr(item, "callspec", None)
    params = dict(callspec.params) if callspec else {}
    rows = []
    for mark in item.iter_markers("parametrize"):
        names = mark.args[0].split(",") if isinstance(mark.args[0], str) else mark.args[0]
        rows.append((str(mark.args[0]), repr([params.pop(name.strip(), None) for name in names])))
    rows += [(name, repr(value)) for name, value in params.items()]  # parameters of fixtures
    return {combination for size in range(1, strength + 1) for combination in combinations(sorted(rows), size)}


def thinned(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Choose the cases that run without `--all-cases`. Leave out cases marked `full`. Of each test with several
    `parametrize` decorators, choose enough cases to contain all pairs of rows of two decorators, or all rows if the test
    needs ranks."""
    by_function: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("full") is None:
            by_function.setdefault(item.nodeid.partition("[")[0], []).append(item)
    chosen = set[int]()
    for cases in by_function.values():
        strength = 1 if any(map(world_of, cases)) else 2
        left = {i: rows_of(case, strength) for i, case in enumerate(cases)}
        if min(map(len, left.values())) < 2:  # one decorator, or none
            chosen |= set(map(id, cases))
            continue
        pairs = {i: rows_of(case, 2) for i, case in enumerate(cases)}
        missing, new = set[Any]().union(*left.values()), set[Any]().union(*pairs.values())
        while missing:
            best = max(left, key=lambda i: (len(left[i] & missing), len(pairs[i] & new)))
            missing -= left.pop(best)
            new -= pairs[best]
            chosen.add(id(cases[best]))
    return [item for item in items if id(item) in chosen]


def covering(items: Sequence[pytest.Item], least: int) -> list[pytest.Item]:
    """Choose at least `least` cases of one test, and enough cases to contain every value of every parameter. The greedy
    choice takes the case with the most values and pairs of values that no chosen case contains yet."""
    left = {i: met_by(item) for i, item in enumerate(items)}
    if least == 1 and all(len(met) < 2 for met in left.values()) and len(set().union(*left.values())) == len(items):
        return list(items)  # each case has a value that no other case has
    missing, chosen = set().union(*left.values()), []
    while left and (len(chosen) < least or any(len(met) == 1 for met in missing)):
        chosen.append(max(left, key=lambda i: len(left[i] & missing)))
        missing -= left.pop(chosen[-1])
    return [items[i] for i in sorted(chosen)]


def some_cases(items: Sequence[pytest.Item], cases: int) -> list[pytest.Item]:
    """Choose at least `cases` cases of each test function, as `covering` does."""
    by_function: dict[str, list[pytest.Item]] = {}
    for item in items:
        by_function.setdefault(item.nodeid.partition("[")[0], []).append(item)
    return [item for its in by_function.values() for item in covering(its, cases)]


def fast_ones(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Choose the tests of a run with `--fast`: tests without the mark `slow`. Choose one case on at
    most two ranks of each test with ranks, and enough cases of each other test to contain every parameter value."""
    quick = [item for item in items if item.get_closest_marker("slow") is None]
    first = {item.nodeid.partition("[")[0]: item for item in reversed(quick) if 0 < world_of(item) <= 2}
    kept = {*some_cases([item for item in quick if not world_of(item)], 1), *first.values()}
    return [item for item in quick if item in kept]


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Ignore tests/gpu if there is no GPU, and the command line neither names the folder or a file in it nor has
    `--emulated`, because collecting tests/gpu takes as long as collecting all other tests. tests/test_imports.py checks
    that the files of tests/gpu can be imported."""
    if collection_path.name != "gpu" or torch.cuda.is_available() or config.getoption("--emulated"):
        return None
    named = [Path(arg.partition("::")[0]).resolve() for arg in config.args]
    return None if any(collection_path in (path, *path.parents) for path in named) else True


def without_a_device(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """In each file of tests/gpu, keep only one of the tests that use the fixture `device`; pytest reports it as skipped.
    Keep all other tests."""
    found: dict[object, pytest.Item] = {}
    for item in items:
        needs_one = item.path.parent.name == "gpu" and "device" in getattr(item, "fixturenames", ())
        found.setdefault(item.path if needs_one else item.nodeid, item)
    return list(found.values())


@pytest.hookimpl(hookwrapper=True)
def pytest_collection() -> Iterator[None]:
    """Turn Python's garbage collector off while pytest collects tests, because traversing torch and all tests would take
    a third of the time. Afterwards, let the collector run less often."""
    gc.disable()
    yield
    collect_garbage_seldom()
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--all-cases") and not config.getoption("--cases"):
        items[:] = thinned(items)
    if config.getoption("--fast"):
        items[:] = fast_ones(items)
    if cases := config.getoption("--cases"):
        items[:] = some_cases(items, cases)
    if not torch.cuda.is_available() and not config.getoption("--emulated"):
        items[:] = without_a_device(items)
    for item in items:
        if world_of(item) and item.get_closest_marker("ranks") is None:
            item.add_marker(pytest.mark.ranks(world_of(item)))
    items.sort(key=world_of)
    if hasattr(config, "workerinput"):  # this process is a worker of pytest-xdist
        long = {item.path for item in items if world_of(item) or item.get_closest_marker("slow")}
        items.sort(key=lambda item: (item.path not in long, item.path))


@pytest.fixture(autouse=True)
def no_process_group_is_left() -> Iterator[None]:
    """Fail a test that leaves a process group behind, before a later test fails because of this group."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
        pytest.fail("the test left a process group in the process of pytest", pytrace=False)


@pytest.fixture(scope="session")
def device_type(request: pytest.FixtureRequest) -> str:
    """Device of the workers' tensors: "cpu" or "cuda"."""
    return request.config.getoption("--device")


@pytest.fixture(scope="session")
def share_gpu(request: pytest.FixtureRequest, device_type: str) -> bool:
    """Whether all ranks use one GPU. Such ranks are slow, and cannot use NCCL."""
    return device_type == "cuda" and request.config.getoption("--share-gpu")


@pytest.fixture(scope="session")
def pools(device_type: str) -> Iterator[dict[int, Pool]]:
    pools: dict[int, Pool] = {}
    yield pools
    for pool in pools.values():
        pool.close()


@pytest.fixture
def ranks(
    request: pytest.FixtureRequest, pools: dict[int, Pool], device_type: str, share_gpu: bool
) -> Callable[[int], Pool]:
    """Return a function: `ranks(n)` is the pool of n ranks, which outlives a single test. `ranks` fails a test whose mark
    or parameter states fewer ranks, and skips a test for which the machine has too few GPUs."""
    announced, used = world_of(request.node), set[int]()

    def pool(world: int) -> Pool:
        if world > announced:
            pytest.fail(
                f"{request.node.name} asks for {world} ranks: mark it @pytest.mark.ranks({world})", pytrace=False
            )
        if device_type == "cuda" and not share_gpu and world > torch.cuda.device_count():
            pytest.skip(f"needs {world} GPUs, this machine has {torch.cuda.device_count()}")
        asked = pools.setdefault(world, Pool(world, device_type, share_gpu))
        if world not in used:  # at the first use in a test: all jobs of one test run in the same workers
            used.add(world)
            asked.refresh()
        return asked

    return pool


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory, pools: dict[int, Pool], device_type: str) -> Iterator[Path]:
    """Folder of prepared data for small runs. On GPUs, such a run makes the processes deterministic until the end of
    the test module."""
    from tests import training

    yield training.shards(tmp_path_factory.mktemp("data"))
    if device_type == "cuda":
        for pool in pools.values():
            pool.run(training.end_determinism)
