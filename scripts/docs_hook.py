"""What MkDocs does besides: pages made from the registry, from results and from the files at the
root, and links that leave docs/.

On GitHub, pages link to each other and to other files by relative paths. On the site, README,
CONTRIBUTING, CHANGELOG and some results are pages too, and every other path outside docs/ becomes
an address in the repository, after a check that the file exists.
"""

from __future__ import annotations

import fnmatch
import os
import pathlib
import re

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import get_plugin_logger
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from bench import margins
from bench.page import api, op
from bench.page.build import build
from bench.predicted import page as predicted
from tilewright.kernels.tuning import TABLES
from tilewright.ops import OPS

log = get_plugin_logger("docs_hook")

ROOT = pathlib.Path(__file__).parents[1]
AT_ROOT = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
# What a page of the site alone is made of: where links to it lead in the repository.
RESULTS = {
    "bench/results": "performance_ops.md",
    "bench/margins.json": "margins.md",
    "bench/predicted/predicted.json": "predicted.md",
}
LINK = re.compile(r"(\]\()([^)\s#]*)(#[^)\s]*)?(\))")
CODE = re.compile(r"(^```.*?^```|`[^`\n]+`)", re.MULTILINE | re.DOTALL)


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    for source, page in AT_ROOT.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text()))
    pages = {f"ops/{name}.md": text for name, text in op.pages(ROOT / "bench/results")}
    pages |= {f"api/{name}.md": text for name, text in api.pages()}
    listed = [*pages]
    pages |= of_results()
    for path, text in pages.items():
        files.append(File.generated(config, path, content=text))
    rest = {f.src_uri for f in files.documentation_pages()} - set(listed)
    order = [*listed, *sorted(rest)]
    config.nav = [e for entry in config.nav or [] for e in _expanded(entry, order)]
    return files


def of_results() -> dict[str, str]:
    return {
        "performance_ops.md": build(
            ROOT / "bench/results", ROOT / "docs/performance.md", TABLES
        ).by_op,
        "margins.md": margins.committed(),
        "predicted.md": predicted.page(predicted.read()),
    }


def _expanded(entry: str | dict[str, list], paths: list[str]) -> list:
    """An entry of the navigation with its patterns replaced by the pages that match them; a section
    without pages is left out.
    """
    if isinstance(entry, str):
        return [p for p in paths if fnmatch.fnmatch(p, entry)] if "*" in entry else [entry]
    [(title, children)] = entry.items()
    expanded: list = []
    for child in children:
        expanded += [e for e in _expanded(child, paths) if e not in expanded]
    return [{title: expanded}] if expanded else []


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    path = page.file.src_uri
    roots = {to: source for source, to in AT_ROOT.items()}
    folder = pathlib.PurePosixPath(roots.get(path, f"docs/{path}")).parent

    def link(matched: re.Match) -> str:
        target, anchor = matched[2], matched[3] or ""
        if not target or "://" in target or target.startswith("mailto:"):
            return matched[0]
        return matched[1] + _address(folder / target, path, files, config) + anchor + matched[4]

    parts = CODE.split(markdown)
    parts[::2] = [LINK.sub(link, text) for text in parts[::2]]
    text = "".join(parts)
    return _with_links_to_ops(text) if path == "ops.md" else text


def _address(target: pathlib.PurePosixPath, page: str, files: Files, config: MkDocsConfig) -> str:
    """Where a link to this file of the repository leads on the site."""
    at = os.path.normpath(target)
    inside = at.removeprefix("docs/") if at.startswith("docs/") else None
    to = AT_ROOT.get(at) or RESULTS.get(at) or inside
    if to and files.get_file_from_path(to):
        return os.path.relpath(to, pathlib.PurePosixPath(page).parent)
    if not (ROOT / at).exists():
        log.warning(f"{page}: a link leads to {at}, which does not exist")
    kind = "tree" if (ROOT / at).is_dir() else "blob"
    return f"{config.extra['source']}/{kind}/main/{at}"


def _with_links_to_ops(text: str) -> str:
    """Ops that the first column of a table names lead to their pages."""

    def row(matched: re.Match) -> str:
        return re.sub(
            r"`(\w+)`", lambda n: f"[{n[0]}](ops/{n[1]}.md)" if n[1] in OPS else n[0], matched[0]
        )

    return re.sub(r"^\| .*?`.*?\|", row, text, flags=re.MULTILINE)
