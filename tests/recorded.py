"""Tests that have passed with the same sources, and are drawn at random since.

A test with the marker `recorded` is deterministic and depends on nothing but sources and versions.
Its group is its file, or with `recorded(op=...)` its file and an op. recorded.json has the digest
of each group of which all tests have passed, and the other files that they read. `make test` runs a
group that has changed whole, which adds it if all pass; of the others, it draws one test in twenty,
and one that fails removes its group. Where groups of more than 5,000 tests have changed, as after
an edit of the core or on another processor, it draws one test in six of them. In
place of single tests, `recorded(whole=True)` draws a file with all of its tests, which share a
fixture that takes long, such as a run in ranks.
`make whole-tests` runs all. Any other call of pytest runs what it names, and records nothing.

A digest is of the environment, the test's file and conftest.py, all that these import (but for this
module), wherever an import stands, and modules that tests name in strings. Of a folder of
tilewright that is imported from, all modules count, with what they import, and all of csrc. A test
that starts a process, or goes through a command, depends on all of tilewright, lab, bench,
examples, scripts and requirements. A test of an op depends on no other: of ops and kernels, it has
what identifies the op's measurements (tilewright/bench/sources.py). Files that a test opened, by
Python's audit events, are kept beside its digest, other tests' too.
"""

import ast
import functools
import hashlib
import importlib.metadata
import json
import os
import pathlib
import platform
import random
import re
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]
FILE = ROOT / "tests/recorded.json"
SHARE = 20  # one test in so many is repeated
WHY = f"has passed with these sources; one in {SHARE} is drawn, `make whole-tests` runs all"
# Of more than MOST tests whose sources have changed, one in PART is run.
MOST, PART = 5_000, 6
MANY = (
    f"the sources of more than {MOST:,} tests have changed; one in {PART} of them is drawn, "
    "`make whole-tests` runs all"
)
PLACES = ("", "lab", "tests", "tests/trainer")  # that modules are imported from, as in pyproject
PYTHON = ("tilewright", "lab", "bench", "tests")
PACKAGE, CSRC = ROOT / "tilewright", ROOT / "csrc"
FAMILIES = ("ops", "kernels")
NAMED = re.compile(r"[A-Za-z_]\w*(?:\.\w+)+")
STARTS = re.compile(
    r"subprocess|multiprocessing|forked|runpy|__main__|sys\.executable|processes\(|\bcompiling\b"
)
# What another process may read, and what is in no commit.
ELSEWHERE = ("bench", "examples", "lab", "pyproject.toml", "requirements", "scripts")
ELSEWHERE += ("tests/preloaded.py",)  # which what forks imports by its name
MADE = {"__pycache__", "build", "outputs", "units", "last_prepared_dataset", ".lock"}
MADE.add("results")  # of measurements, which no test takes but by what it opens itself
MADE |= {"commit.json", "triton-cache.tar.gz"}  # of a GPU's results
# What all tests have: its processes and preloaded modules are not a test's own.
COMMON = ("conftest.py", "helpers.py", "forked.py", "recorded.py")
# Variables that results may depend on, but for those that name places, or that tests or make set.
VARIABLES = ("CUDA_LAUNCH", "CXXFLAGS", "OMP_NUM_THREADS", "TILEWRIGHT_", "TORCH", "TRITON_")
APART = re.compile(
    r".*(_DIR|_HOME|_PATH)|TRITON_INTERPRET|TILEWRIGHT_(REQUIRE|SEED|TESTS)", re.DOTALL
)


# ---- digests


def _modules(name):
    """The files that an import of this name runs: packages', and the module's."""
    parts = name.split(".")
    for place in PLACES:
        for i in range(len(parts)):
            path = ROOT.joinpath(place, *parts[: i + 1])
            yield from (p for p in (path.with_suffix(".py"), path / "__init__.py") if p.is_file())


def _of_a_test(path):
    return path.is_relative_to(ROOT / "tests") and path.name not in COMMON


@functools.cache
def _imports(path):
    """The files of this repository that a file imports or, if it is a test's, names."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(a.name for a in node.names)
        elif isinstance(node, ast.ImportFrom):
            folder = path.relative_to(ROOT).parts[: -node.level] if node.level else ()
            module = ".".join([*folder, *filter(None, [node.module])])
            names.update((module, *(f"{module}.{a.name}" for a in node.names)))
        elif _of_a_test(path) and isinstance(getattr(node, "value", None), str):
            names.update(NAMED.findall(node.value))
    return {file for name in names for file in _modules(name)}


@functools.cache
def _starts(path):
    return _of_a_test(path) and STARTS.search(path.read_text()) is not None


def _beside(path):
    """What counts with a file: modules beside it may be found by their names."""
    parts = path.relative_to(ROOT).parts
    if _starts(path):
        return set().union(*map(_modules_in, PYTHON[:3]))
    if parts[0] == "tilewright" and len(parts) > 2:
        return _modules_in(f"tilewright/{parts[1]}")
    return set()


@functools.cache
def _modules_in(folder):
    return set((ROOT / folder).rglob("*.py"))


def _of_an_op(path):
    """Whether a file is of a family of ops or kernels: of some ops, and not of others."""
    return len(path.parts) > 2 and path.parents[2] == PACKAGE and path.parts[-3] in FAMILIES


@functools.cache
def sources(file, of_op):
    """The Python files that a test file depends on; of_op: beside those of the op itself."""
    todo, found = [ROOT / file, ROOT / "tests/conftest.py"], set()
    while todo:
        path = todo.pop()
        if path in found or path.name == "recorded.py" or (of_op and _of_an_op(path)):
            continue
        found.add(path)
        if not of_op:
            todo += _imports(path) | _beside(path)
        elif PACKAGE / "ops" not in path.parents:  # whose own imports are families'
            todo += _imports(path)
    return found


@functools.cache
def environment():
    """The versions of all that requirements.lock names, the processor, what can run here, and the
    variables that results may depend on: the same on every machine that has these.
    """
    import helpers
    import torch

    from tilewright.core.platform import cpu_name, slug

    lock = (ROOT / "requirements.lock").read_text()
    found = [f"Python {sys.version_info[:2]}", f"torch {torch.__version__}"]
    found += [torch.backends.cpu.get_cpu_capability(), platform.machine(), helpers.DEVICE]
    found.append(slug(cpu_name()))  # of tables of tuned configurations
    for name in ["triton", *re.findall(r"^([\w.-]+)==", lock, re.MULTILINE)]:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            found.append(f"no {name}")
    found += [f"{name}: {helpers.cannot_run(name)}" for name in ("cpp", "triton")]
    variables = {
        n: v for n, v in os.environ.items() if n.startswith(VARIABLES) and not APART.fullmatch(n)
    }
    try:
        from triton._C.libtriton import get_cache_invalidating_env_vars

        variables |= get_cache_invalidating_env_vars()
    except ImportError:  # no Triton, whose absence is above
        pass
    return "\n".join([*found, *(f"{n}={v}" for n, v in sorted(variables.items()))])


def files(group):
    """All that a group depends on, but for what the digest of its op is for."""
    file, _, op = group.partition(" ")
    csrc = (CSRC / "cpu/portable.cpp",) if op else CSRC.rglob("*.*")
    found = {*sources(file, bool(op)), *PACKAGE.rglob("*.json"), *csrc, ROOT / "setup.py"}
    if not op and any(map(_starts, sources(file, False))):
        found.update(path for name in ELSEWHERE for path in _files_in(name))
    return found


def _files_in(folder):
    paths = [ROOT / folder, *(ROOT / folder).rglob("*")]
    return [p for p in paths if p.is_file() and not MADE & {*p.relative_to(ROOT).parts}]


def digest(group, read=()):
    """Of everything that the tests of a group depend on.   read: further files, and folders."""
    parts, op = [environment()], group.partition(" ")[2]
    if op:
        from tilewright.bench import sources as measured
        from tilewright.ops import OPS

        parts.append(measured.digest(OPS[op]))
    paths = files(group) | {ROOT / name for name in read}
    parts += [f"{p.relative_to(ROOT)} {_content(p)}" for p in sorted(paths)]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def is_there(group):
    file, _, op = group.partition(" ")
    if not op:
        return (ROOT / file).exists()
    from tilewright.ops import OPS

    return (ROOT / file).exists() and op in OPS


@functools.cache
def _content(path):
    if path.is_dir():
        return sorted(p.name for p in path.iterdir() if p.name != "__pycache__")
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.exists() else None


# ---- what a test reads

READ = {}  # a test file -> what was opened or listed while it was imported or its tests ran
_NOW = []  # the test file of this moment


def _listen(event, arguments):
    reads = _NOW and event in ("open", "os.listdir", "os.scandir")
    writes = reads and event == "open" and arguments[2] & os.O_WRONLY
    if reads and not writes and isinstance(arguments[0], str | os.PathLike):
        path = os.path.abspath(arguments[0])
        if path.startswith(f"{ROOT}{os.sep}"):
            READ.setdefault(_NOW[-1], {})[path] = None


@functools.cache
def _counts(name):
    """Whether a file or folder is none that digests have anyway."""
    path = pathlib.Path(name)
    parts = path.relative_to(ROOT).parts
    if parts[0].startswith(".") or parts[0] == "build" or not path.exists():
        return False
    code = (parts[0] in PYTHON[:3] and path.suffix == ".py") or any(path.glob("*.py"))
    known = parts[0] == "csrc" or (parts[0] == "tilewright" and path.suffix == ".json")
    built = path.suffix in (".so", ".pyc") or "__pycache__" in parts or path == FILE
    return not (code or known or built)


def further(file):
    """What a test file read beyond what digests have anyway, relative to the repository."""
    found = {*map(pathlib.Path, filter(_counts, [*READ.get(file, ())]))}
    return sorted(path.relative_to(ROOT).as_posix() for path in found - files(file))


def written():
    """When each source was."""
    folders = (*PYTHON, "csrc", "docs", "examples", "scripts")
    paths = (path for folder in folders for path in _files_in(folder))
    return {p: p.stat().st_mtime_ns for p in paths if p != FILE and p.exists()}


# ---- the plugin


def left_out(item):
    """Whether a test was not drawn."""
    return LEFT_OUT in item.stash


GROUP, LEFT_OUT = pytest.StashKey[list](), pytest.StashKey[str]()  # why it was not drawn


def group_of(item, marker):
    """The name of a test's group."""
    op, file = marker.kwargs.get("op"), item.path.relative_to(ROOT).as_posix()
    if op == "parameter":
        from tilewright.core.registry import Op
        from tilewright.ops import OPS

        values = item.callspec.params.values() if hasattr(item, "callspec") else ()
        ops = [v.name for v in values if isinstance(v, Op)]
        op = next(iter([*ops, *(v for v in values if isinstance(v, str) and v in OPS)]), None)
    return f"{file} {getattr(op, 'name', op)}" if op else file


class Recorded:
    """mode: of TILEWRIGHT_TESTS, which processes that tests start do not inherit: "drawn" draws and
    records, "all" records, "" does neither.
    """

    def __init__(self, config):
        self.config, self.controls = config, not hasattr(config, "workerinput")
        if self.controls:  # has workers, or runs tests itself
            mode = os.environ.pop("TILEWRIGHT_TESTS", "")
            if mode not in ("", "drawn", "all"):
                raise pytest.UsageError(f"TILEWRIGHT_TESTS is 'drawn' or 'all', not {mode!r}")
            known = self.recorded() if mode == "drawn" else {}
            same = [g for g, (was, *read) in known.items() if was == digest(g, read)]
            seed = int(os.environ.pop("TILEWRIGHT_SEED", random.randrange(1000)))
            self.given = {"mode": mode, "seed": seed, "same": same}
            self.began = written() if mode else {}
        else:
            self.given = config.workerinput["recorded"]
        self.mode, self.seed = self.given["mode"], self.given["seed"]
        self.sizes, self.ended, self.read = {}, {}, {}
        self.failed, self.not_drawn, self.stale = set(), 0, False
        if self.mode:
            sys.addaudithook(_listen)

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node):
        node.workerinput["recorded"] = self.given

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(self, collector):
        return (yield from self._watched(collector))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item, nextitem):
        return (yield from self._watched(item))

    def _watched(self, node):
        _NOW.append(node.path.relative_to(ROOT).as_posix() if ROOT in node.path.parents else "")
        try:
            return (yield)
        finally:
            _NOW.pop()

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items):
        """Before tests are deselected: a group of which some are does not run whole."""
        if not self.mode:
            return
        groups, whole = {}, set()
        for item in items:
            if marker := item.get_closest_marker("recorded"):
                group = group_of(item, marker)
                groups.setdefault(group, []).append(item)
                if marker.kwargs.get("whole"):
                    whole.add(item)
        for group, members in groups.items():
            for item in members:
                item.stash[GROUP] = [group, len(members)]
        same = [members for g, members in sorted(groups.items()) if g in self.given["same"]]
        self._draw(same, whole, SHARE, WHY)
        changed = [members for g, members in sorted(groups.items()) if g not in self.given["same"]]
        if self.mode == "drawn" and sum(map(len, changed)) > MOST:
            self._draw(changed, whole, PART, MANY)

    def _draw(self, groups, whole, share, why):
        """One in so many: of tests, and of groups of those that are run whole."""
        alone = [[item] for members in groups for item in members if item not in whole]
        shared = [[item for item in members if item in whole] for members in groups]
        draw = random.Random(self.seed)
        for units in (alone, [unit for unit in shared if unit]):
            drawn = draw.sample(range(len(units)), -(-len(units) // share))
            for i in {*range(len(units))}.difference(drawn):
                for item in units[i]:
                    item.stash[LEFT_OUT] = why

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item):
        if left_out(item):
            pytest.skip(item.stash[LEFT_OUT])

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item, call):
        report = yield
        if item.stash.get(GROUP, None):
            file = item.path.relative_to(ROOT).as_posix()
            read = further(file) if call.when == "teardown" and not left_out(item) else []
            found = [*item.stash[GROUP], left_out(item), read]
            report.user_properties.append(("recorded", found))
        return report

    def pytest_runtest_logreport(self, report):
        """In the process that starts the others: what they found."""
        found = dict(report.user_properties).get("recorded")
        if report.failed:  # a process that has ended says no more than the file
            self.failed.add(found[0] if found else report.nodeid.partition("::")[0])
        elif found and report.when == "teardown":
            group, self.sizes[group], not_drawn, read = found[0], *found[1:]
            self.not_drawn += not_drawn
            if not not_drawn:
                self.ended.setdefault(group, set()).add(report.nodeid)
                self.read.setdefault(group, set()).update(read)

    def recorded(self):
        return {g: row for g, row in json.loads(FILE.read_text()).items() if is_there(g)}

    def pytest_sessionfinish(self):
        option = self.config.option
        if not (self.controls and self.mode) or option.collectonly:
            return
        known = self.recorded()
        known = {g: r for g, r in known.items() if not {g, g.partition(" ")[0]} & self.failed}
        partial = any("::" in a for a in self.config.args) or getattr(option, "lf", False)
        self.stale = written() != self.began  # tests may have imported what was there before
        for group, ended in self.ended.items():
            whole = len(ended) == self.sizes[group] and not (partial or self.stale)
            if whole and group not in self.failed:
                read = sorted(self.read[group])
                known[group] = [digest(group, read), *read]
        rows = ",\n".join(f"{json.dumps(g)}: {json.dumps(known[g])}" for g in sorted(known))
        FILE.write_text(f"{{\n{rows}\n}}\n")

    def pytest_terminal_summary(self, terminalreporter):
        if self.controls and self.mode:
            ran = sum(map(len, self.ended.values()))
            stale = "; none was recorded, since a source changed meanwhile" if self.stale else ""
            terminalreporter.write_line(
                f"{ran} of {ran + self.not_drawn} recorded tests were run (TILEWRIGHT_SEED="
                f"{self.seed}); `make whole-tests` runs all{stale}"
            )
