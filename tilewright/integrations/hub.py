"""Exports the library as a repository of Hugging Face `kernels`.

    python -m tilewright.integrations.hub export DIR

writes

    README.md             the hub's card
    build/torch-cpu/      __init__.py, layers.py, metadata.json, and the modules that they import
    build/torch-cuda/     the same for CUDA

in the layout that `kernels.get_kernel`, `LayerRepository` and their local forms read. The export is
self-contained: it imports neither the installed `tilewright` nor any other package than torch (and
Triton, on CUDA), since a kernel's metadata may name only a short list of packages as dependencies,
and since several versions of a kernel must be loadable in one process. So the modules are copied
with relative imports, and the operators are registered under the name that the loader gives the
kernel. The C++ kernels are left out: CPU tensors take PyTorch's own operators and the eager twins.
"""

from __future__ import annotations

import argparse
import ast
import base64
import hashlib
import json
import pathlib
import sys

from tilewright import __version__
from tilewright.core import platform
from tilewright.integrations import hub_layers

ROOT = pathlib.Path(__file__).parents[1]
NAME = "tilewright"
BACKENDS = ("cpu", "cuda")
# The oldest `kernels` that read this metadata in a test.
OLDEST = "0.17.2"
# Modules that are found by name when an op is first used.
FOUND_BY_NAME = ("kernels",)

LAYERS = tuple(
    name
    for name, value in vars(hub_layers).items()
    if getattr(value, "__module__", "") == hub_layers.__name__ and not name.startswith("_")
)
INIT = '''"""Fused operations for training language models: stateless layers, and functions in `ops`."""

from . import layers, ops

__all__ = ["layers", "ops"]
'''
CARD = """---
library_name: kernels
license: apache-2.0
tags:
- kernels
---

# Tilewright {version}

Fused operations for training language models: Triton kernels on CUDA (compute capability 8.0 and
later), plain PyTorch on a CPU. All layers are differentiable and work under `torch.compile`.

```python
from kernels import LayerRepository, Mode, kernelize, use_kernel_mapping

norm = LayerRepository(repo_id="{repository}", layer_name="RMSNorm", version={kernel_version})
with use_kernel_mapping({{"RMSNorm": {{"cuda": norm}}}}):
    kernelize(model, mode=Mode.TRAINING)
```

Layers:

{layers}
"""


def modules(start: pathlib.Path = pathlib.Path(hub_layers.__file__)) -> set[pathlib.Path]:
    """The files of this package that a module imports, directly or not, with those of `kernels`.

    A package's `__init__.py` is one of them only if a name that it defines is imported: what it
    imports for its other users stays here.
    """
    files: set[pathlib.Path] = set()
    waiting = [start, *(f for folder in FOUND_BY_NAME for f in (ROOT / folder).rglob("*.py"))]
    while waiting:
        path = waiting.pop()
        if path in files:
            continue
        files.add(path)
        for node, module in _imports(ast.parse(path.read_text())):
            # `from tilewright.ops import cases, silu_mul`: a module, and a name of the package.
            base = ROOT.joinpath(*module.split(".")[1:])
            of = [_file_of(base / alias.name) for alias in node.names]
            waiting += [file for file in of if file]
            if None in of and (file := _file_of(base)):
                waiting.append(file)
    return files - {ROOT / "__init__.py"}


def _file_of(name: pathlib.Path) -> pathlib.Path | None:
    """The file of a module or a package; None if there is no such."""
    files = (name.with_name(f"{name.name}.py"), name / "__init__.py")
    return next((file for file in files if file.exists()), None)


def _imports(tree: ast.AST) -> list[tuple[ast.ImportFrom, str]]:
    """The imports from this package, with the names of the modules."""
    return [
        (node, node.module)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        and node.module is not None
        and node.module.split(".")[0] == NAME
    ]


def relative(path: pathlib.Path) -> str:
    """A module's source, whose imports of this package are relative."""
    text = path.read_text()
    lines = text.splitlines(keepends=True)
    up = "." * len(path.relative_to(ROOT).parts)
    for node, module in _imports(ast.parse(text)):
        inner = module.partition(".")[2]
        line = lines[node.lineno - 1]
        lines[node.lineno - 1] = line.replace(
            f"from {module} import", f"from {up}{inner} import", 1
        )
    return "".join(lines)


def export(
    folder: pathlib.Path, *, kernel_version: int = 1, repository: str = ""
) -> list[pathlib.Path]:
    """Writes a kernel repository and returns its variants' folders.

    Args:
        folder: Created; must be missing or empty.
        kernel_version: The number that users pass as `version`; a breaking change takes the next.
        repository: "OWNER/NAME" on the hub, for the card; default: "OWNER/tilewright".

    Raises:
        FileExistsError: The folder holds files.
    """
    folder = pathlib.Path(folder)
    if folder.exists() and any(folder.iterdir()):
        raise FileExistsError(f"the folder {str(folder)!r} is not empty")
    sources = _sources()
    variants = [folder / "build" / f"torch-{backend}" for backend in BACKENDS]
    for backend, variant in zip(BACKENDS, variants, strict=True):
        _write_variant(variant, backend, kernel_version, sources)
    layers = "\n".join(
        f"- `{name}`: {' '.join((getattr(hub_layers, name).__doc__ or '').split())}"
        for name in LAYERS
    )
    (folder / "README.md").write_text(
        CARD.format(
            version=__version__,
            repository=repository or f"OWNER/{NAME}",
            kernel_version=kernel_version,
            layers=layers,
        )
    )
    return variants


def _sources() -> dict[str, str]:
    """What the variants hold in common, by path."""
    sources = {str(path.relative_to(ROOT)): relative(path) for path in modules()}
    for name in list(sources):
        for folder in pathlib.PurePath(name).parents:
            sources.setdefault(str(folder / "__init__.py"), "")
    for path in (ROOT / "kernels").rglob("*.json"):
        sources[str(path.relative_to(ROOT))] = path.read_text()
    sources["__init__.py"] = INIT
    sources["layers.py"] = (
        f'"""The layers."""\n\nfrom .integrations.hub_layers import {", ".join(LAYERS)}\n\n'
        f"__all__ = {list(LAYERS)}\n"
    )
    return sources


def _write_variant(
    variant: pathlib.Path, backend: str, kernel_version: int, sources: dict[str, str]
) -> None:
    files = {}
    for name, text in sorted(sources.items()):
        path, data = variant / name, text.encode()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        files[name] = base64.b64encode(hashlib.sha256(data).digest()).decode()
    content = hashlib.sha256(json.dumps(files).encode()).hexdigest()
    metadata = {
        "name": NAME,
        # The module's name in sys.modules, and the namespace of its operators.
        "id": f"_{NAME}_{backend}_{content[:12]}",
        "version": kernel_version,
        "kernels-minver": OLDEST,
        "license": "Apache-2.0",
        "python-depends": [],
        "backend": {"type": backend},
        "digest": {"algorithm": "sha256", "files": files},
    }
    (variant / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tilewright.integrations.hub")
    commands = parser.add_subparsers(dest="command", required=True)
    p = commands.add_parser("export", help="write a repository of Hugging Face kernels")
    p.add_argument("folder", metavar="DIR", type=pathlib.Path, help="missing or empty")
    p.add_argument("--version", type=int, default=1, help="of the kernel; default: 1")
    p.add_argument(
        "--repository", default="", metavar="OWNER/NAME", help="on the hub, for its card"
    )
    return parser


@platform.command
def main(argv: list[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    try:
        variants = export(args.folder, kernel_version=args.version, repository=args.repository)
    except FileExistsError as error:
        sys.exit(f"error: {error}")
    for variant in variants:
        print(f"wrote {variant}")
    print(f"layers: {', '.join(LAYERS)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
