"""Every planted fault: what `tilewright verify`, `check-layout`, `emulate` and `gate` find of it.

    python tests/plants FILE      # a line of JSON for each; goes on where FILE ends

tests/tools/test_plants.py, test_check_layout.py and test_emulate.py run them too.
"""

import json
import pathlib
import sys

if __name__ == "__main__":
    # Not this folder, whose kernels.py would be the package of that name.
    sys.path[:1] = [str(tests := pathlib.Path(__file__).parents[1]), str(tests / "lib")]
    from plants import kernels, layout, verify

    path = pathlib.Path(sys.argv[1])
    done = path.read_text().splitlines() if path.exists() else []
    known = {(row["tool"], row["plant"]) for row in map(json.loads, done)}
    for tool, plants, names in (
        ("verify", verify, verify.PLANTS),
        ("check-layout", layout, layout.NAMES),
        ("emulate", kernels, kernels.NAMES),
    ):
        left = [name for name in names if (tool, name) not in known]
        for name, result in plants.results(left) if left else ():
            print(tool, name, "|", result.splitlines()[0], flush=True)
            with path.open("a") as file:
                file.write(json.dumps({"tool": tool, "plant": name, "result": result}) + "\n")
