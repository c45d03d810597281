"""Checks the files of `make wheel`: python scripts/check_dist.py dist

Installs the wheels into an empty folder and runs a C++ kernel and a command of the laboratory
there; then runs some of the sdist's tests, in the unpacked sdist, with the wheel's compiled files.
This interpreter's torch is used.
"""

import os
import pathlib
import subprocess
import sys
import tarfile
import tempfile
import zipfile

# A few ops with C++ kernels, and the registry.
TESTS = ("tests/ops/test_rmsnorm.py", "tests/ops/test_activation.py", "tests/ops/test_registry.py")
KERNELS = """
import pathlib, sys, torch, tilewright
from tilewright.core import platform
from tilewright.bench import check
from tilewright.ops import OPS
assert pathlib.Path(tilewright.__file__).is_relative_to(sys.argv[1]), tilewright.__file__
assert (reason := platform.no_extension()) is None, reason
sys.exit(check.check(OPS["rmsnorm"], "cpp", "cpu", [torch.float32, torch.bfloat16]))
"""


def run(*command: str, folder: pathlib.Path, **variables: str) -> None:
    hidden = ("PYTHONPATH", "PYTEST_ADDOPTS")
    environment = {k: v for k, v in os.environ.items() if k not in hidden} | variables
    subprocess.run([sys.executable, *command], cwd=folder, env=environment, check=True)


def main(dist: pathlib.Path) -> None:
    (wheel,), (sdist,) = dist.glob("tilewright-*.whl"), dist.glob("tilewright-*.tar.gz")
    (lab,) = dist.glob("tilewright_lab-*.whl")
    with tempfile.TemporaryDirectory() as name:
        work = pathlib.Path(name)
        site = work / "site"
        options = ("-q", "--no-deps", "--no-index", "--target", str(site))
        run(
            "-m",
            "pip",
            "install",
            *options,
            *map(str, (wheel.resolve(), lab.resolve())),
            folder=work,
        )
        run("-m", "tilewright", "gate", "--help", folder=work, PYTHONPATH=str(site))
        run("-c", KERNELS, str(site), folder=work, PYTHONPATH=str(site))
        with tarfile.open(sdist) as archive:
            safely: dict = (
                {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
            )  # Python 3.11.4
            archive.extractall(work, **safely)
        root = work / sdist.name.removesuffix(".tar.gz")
        with zipfile.ZipFile(wheel) as archive:
            compiled = [n for n in archive.namelist() if n.endswith(".so")]
            archive.extractall(root, compiled)
        assert compiled, f"{wheel.name} has no C++ kernels"
        run("-m", "pytest", "-q", "-p", "no:cacheprovider", *TESTS, folder=root)
    print(f"checked: {wheel.name} and {sdist.name}")


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
