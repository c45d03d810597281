"""What import-linter does not see: modules that are named in strings, and imported by them, follow
its arrows too; and no modules import each other, within functions and for types included.
"""

import ast
import graphlib
import pathlib
import re
import tomllib

import grimp
import pytest

ROOT = pathlib.Path(__file__).parents[2]
FOLDERS = {"tilewright": ROOT, "tilewright_lab": ROOT / "lab", "bench": ROOT}
CONTRACTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
[ARROWS] = [c for c in CONTRACTS["contracts"] if c["name"] == "arrows point one way"]
# Rooms from the lowest; those of one layer do not import each other.
LAYERS = [re.split(r" [|:] ", layer) for layer in reversed(ARROWS["layers"])]
# The package's face stands above every room.
FACES = ("tilewright/__init__.py", "tilewright/__main__.py")


def is_module(name: str) -> bool:
    package, *inner = name.split(".")
    if not inner or package not in FOLDERS:
        return False
    path = FOLDERS[package].joinpath(package, *inner)
    return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()


def named(tree: ast.AST) -> list[tuple[int, str]]:
    """Line and name of each module that a string is or imports; `from_kernels` takes its end."""
    found = []
    documentation = {n.value for n in ast.walk(tree) if isinstance(n, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "from_kernels":
            found.append((node.lineno, f"tilewright.kernels.{ast.literal_eval(node.args[0])}"))
        elif isinstance(node, ast.Constant) and node not in documentation:
            text = str(node.value)
            names = [text] if is_module(text) else re.findall(r"(?:from|import) ([\w.]+)", text)
            found += [(node.lineno, name) for name in names if is_module(name)]
    return found


def layer(module: str) -> tuple[int, str]:
    """The number of a module's layer, and its room; -1: of none."""
    for i, rooms in enumerate(LAYERS):
        for room in rooms:
            if module == room or module.startswith(f"{room}."):
                return i, room
    return -1, module


def against(path: str, tree: ast.AST) -> list[str]:
    """What a file names that is not below it."""
    if path.startswith(FACES):
        return []
    module = path.removeprefix("lab/").removesuffix(".py").replace("/", ".")
    own = layer(module)
    return [
        f"{path}:{line} names {name}"
        for line, name in named(tree)
        for there in [layer(name)]
        if own[1] != there[1] and own[0] <= there[0]
    ]


def test_strings_that_name_modules_follow_the_arrows():
    seen, wrong = 0, []
    for folder in ("tilewright", "lab/tilewright_lab", "bench"):
        for path in ROOT.glob(f"{folder}/**/*.py"):
            tree = ast.parse(path.read_text())
            seen += len(named(tree))
            wrong += against(str(path.relative_to(ROOT)), tree)
    assert seen > 60, "those of from_kernels alone are as many"
    assert not wrong


@pytest.mark.parametrize(
    "path, source, found",
    [
        ("tilewright/core/library.py", 'from_kernels("norm.rmsnorm_triton")', 1),
        ("tilewright/ops/norm/rmsnorm.py", 'from_kernels("norm.rmsnorm_triton")', 0),
        ("tilewright/bench/tune.py", 'command = ["-m", "bench.suite"]', 1),
        ("tilewright/trainer/loop.py", 'import_module("tilewright.integrations.hub")', 1),
        ("tilewright/__init__.py", 'LATER = {"verify": "tilewright_lab.verify.verify"}', 0),
    ],
)
def test_an_arrow_against_the_layers_is_found(path, source, found):
    assert len(against(path, ast.parse(source))) == found


def cycle(imports: dict[str, set[str]]) -> list[str]:
    """Modules of which each is imported by the next, and the first by the last; or none."""
    try:
        graphlib.TopologicalSorter(imports).prepare()
    except graphlib.CycleError as error:
        return error.args[1]
    return []


def test_no_modules_import_each_other():
    graph = grimp.build_graph(*FOLDERS, exclude_type_checking_imports=False, cache_dir=None)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    assert not cycle(imports)


def test_a_cycle_is_found():
    imports = {"a": {"b"}, "b": {"c"}, "c": {"d"}, "d": {"b"}}
    assert set(cycle(imports)) == {"b", "c", "d"}
    assert not cycle(imports | {"d": set()})
