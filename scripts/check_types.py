"""Checks the types of all that is checked in, but for kernels: python scripts/check_types.py

basedpyright reads Triton, Gluon and CuTe DSL as Python, which their kernels are not: what it says
inside one is dropped, and launchers beside it are checked. pyproject.toml has its settings.
"""

import ast
import functools
import json
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[1]
KERNELS = {"triton.jit", "gluon.jit", "gl._core.builtin", "cute.jit", "cute.kernel"}
# What it cannot know: names that CuTe DSL makes when it is imported, or imports without exporting
# them; and packages that only GPU machines have.
UNSEEN = re.compile(
    r'"(const_expr|select_)" is not exported from module "cutlass"'
    r'|"exp2" is not a known attribute of module "\.math"'
    r'|"__getitem__" method not defined on type "Pointer"'
    r'|Import "(deep_ep|liger_kernel|quack)\b.*" could not be resolved'
)


@functools.cache
def kernels(path: pathlib.Path) -> list[range]:
    """The lines of each kernel in a file, from its `def` on."""
    return [
        range(node.lineno, (node.end_lineno or node.lineno) + 1)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef) and KERNELS & {*map(_name, node.decorator_list)}
    ]


def _name(decorator: ast.expr) -> str:
    return ast.unparse(decorator.func if isinstance(decorator, ast.Call) else decorator)


def errors(project: pathlib.Path) -> list[str]:
    """What basedpyright finds in a folder with a pyproject.toml, a line each, outside kernels."""
    command = pathlib.Path(sys.executable).with_name("basedpyright")
    run = subprocess.run(
        [command, "--outputjson", "--pythonpath", sys.executable, "--project", project],
        capture_output=True,
        text=True,
    )
    if run.returncode not in (0, 1):
        raise SystemExit(run.stdout + run.stderr)
    messages = []
    for one in json.loads(run.stdout)["generalDiagnostics"]:
        path, begin = pathlib.Path(one["file"]), one["range"]["start"]
        line = begin["line"] + 1
        if UNSEEN.search(one["message"]) or any(line in lines for lines in kernels(path)):
            continue
        message = f"{one['severity']}: {one['message']} ({one.get('rule')})"
        messages.append(f"{path}:{line}:{begin['character'] + 1} - {message}")
    return messages


if __name__ == "__main__":
    messages = errors(ROOT)
    print(*messages, f"types: {len(messages)} errors", sep="\n")
    sys.exit(bool(messages))
