"""Public modules that moved answer under the old name for one version, and say where they are."""

import json
import pathlib
import subprocess
import sys

import tilewright

FOLDER = pathlib.Path(tilewright.__file__).parent / "_moved"
SCRIPT = """
import importlib, json, sys, warnings
said = {}
for name in sys.argv[1:]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        module = importlib.import_module(name)
    [warning] = [w for w in caught if name in str(w.message)]
    assert warning.category is DeprecationWarning
    assert importlib.import_module(module.__name__) is module
    parent, _, last = name.rpartition(".")
    assert getattr(sys.modules[parent], last) is module
    if parent == "tilewright":
        delattr(sys.modules[parent], last)  # as after `import tilewright` alone
        assert getattr(sys.modules[parent], last) is module
    said[name] = str(warning.message)
print(json.dumps(said))
"""


def test_old_names_are_the_modules_that_they_became():
    files = sorted(p for p in FOLDER.rglob("*.py") if p.name != "__init__.py")
    names = [f"tilewright.{'.'.join(p.relative_to(FOLDER).with_suffix('').parts)}" for p in files]
    assert "tilewright.registry" in names
    done = subprocess.run([sys.executable, "-c", SCRIPT, *names], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    said = json.loads(done.stdout)
    for name in names:
        old, _, new = said[name].removesuffix(" now").partition(" is ")
        assert old == name and new != name and new.startswith(("tilewright.", "tilewright_lab."))
