"""Prints CHANGELOG.md's section of a tag, which must be the package's version.

python scripts/release_notes.py v0.1.0

Exits with 1 and a sentence if the tag is another version, or has no section, or if that says that
it is not released.
"""

import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).parents[1]


def section(version: str, text: str) -> str:
    """The text below `## VERSION`. Raises ValueError without one, or with "(not released)"."""
    for part in re.split(r"^## ", text, flags=re.M)[1:]:
        title, _, body = part.partition("\n")
        if re.match(r"[\w.]*\w", title)[0] == version:
            if "not released" in title:
                raise ValueError(f"CHANGELOG.md says that {version} is not released")
            return body.strip() + "\n"
    raise ValueError(f"CHANGELOG.md has no section for {version}")


def main(tag: str) -> str:
    said = (ROOT / "tilewright/_version.py").read_text()
    version = re.search(r'"(.+)"', said)[1]
    if tag != f"v{version}":
        raise ValueError(f"the tag {tag} is not v{version}, the version in tilewright/_version.py")
    return section(version, (ROOT / "CHANGELOG.md").read_text())


if __name__ == "__main__":
    try:
        print(main(sys.argv[1]), end="")
    except ValueError as error:
        sys.exit(f"release_notes: {error}")
