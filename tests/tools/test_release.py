"""What the release workflow runs."""

import importlib.util
import pathlib
import re
import shlex

import pytest

ROOT = pathlib.Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
spec = importlib.util.spec_from_file_location("release_notes", ROOT / "scripts/release_notes.py")
release_notes = importlib.util.module_from_spec(spec)
spec.loader.exec_module(release_notes)
TEXT = "# Changelog\n\n## 0.2.0 (not released)\n- b\n\n## 0.1.0, 2026-12-01\n### Ops\n- a\n"


def test_the_notes_of_a_tag_are_its_section_of_the_changelog():
    assert release_notes.section("0.1.0", TEXT) == "### Ops\n- a\n"
    with pytest.raises(ValueError, match=r"says that 0\.2\.0 is not released"):
        release_notes.section("0.2.0", TEXT)
    with pytest.raises(ValueError, match=r"no section for 0\.3\.0"):
        release_notes.section("0.3.0", TEXT)
    with pytest.raises(ValueError, match=r"the tag v9 is not v\d"):
        release_notes.main("v9")


def test_the_changelog_has_a_section_for_the_version():
    version = re.search(r'"(.+)"', (ROOT / "tilewright/_version.py").read_text())[1]
    titles = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert titles[0] == version and len(set(titles)) == len(titles)


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda p: p.name)
def test_workflows_name_what_exists_and_ask_for_no_more_than_they_need(path):
    text = path.read_text()
    targets = re.findall(r"^([\w./-]+):", (ROOT / "Makefile").read_text(), re.M)
    for line in re.findall(r"run: make (.+)", text):
        words = shlex.split(re.sub(r"\$\{\{.*?\}\}", "value", line))
        assert {w for w in words if "=" not in w} <= set(targets)
    for shards in re.findall(r"shard: \[(.*)\]", text):  # all of them
        found = re.findall(r"\d+/\d+", shards)
        assert found == [f"{i}/{len(found)}" for i in range(1, len(found) + 1)]
    for script in re.findall(r"scripts/\w+\.\w+", text):
        assert (ROOT / script).exists()
    for used in re.findall(r"uses: (\S+)", text):
        assert re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", used), "an action is pinned by its commit"
    assert re.search(r"^permissions:\n  contents: (read|write)\n", text, re.M)
