"""Builds the optional C++ extension tilewright/_C. Everything else is in pyproject.toml.

On x86-64 the same sources are compiled three times, for AVX-512, for AVX2 and for the baseline, and
`platform.py` loads the one that suits the processor. (GCC 12's target_clones were tried first: they
vectorize the same loops to code that is three to five times slower in bf16.)

torch's headers are taken from the environment that builds or, where pip has isolated the build,
from the one that pip installs into: pip runs the build with that environment's interpreter, and
hides its packages from it. Any torch from 2.11 does, for the extension uses torch's stable ABI
only. Where neither has a torch (an empty environment; uv and `python -m build`, which isolate a
build in an environment of its own), requiring one would download gigabytes of CUDA packages to
build 5 MB.

A missing torch or a failing compiler skips the extension and leaves the rest of the package
working. pip hides what a build prints unless it fails, but shows the wheel's name, which says so:
tilewright-VERSION-0_without_cpp-py3-none-any.
The reason is written into the package: `tilewright explain` and the exceptions of `cpp` show it.
TILEWRIGHT_SKIP_CPP=1 skips the build; TILEWRIGHT_REQUIRE_CPP=1 turns a skip into an error (CI uses
it).
"""

import glob
import os
import pathlib
import platform
import sys
import sysconfig

from setuptools import setup
from setuptools.command.build_py import build_py

REQUIRED = os.environ.get("TILEWRIGHT_REQUIRE_CPP") == "1"
# The oldest torch whose stable ABI holds all that csrc/ calls (parallel_for came with 2.10).
STABLE_ABI = "0x020A000000000000"
# A wheel's build tag: it begins with a digit.
WITHOUT = "0_without_cpp"


def skip(reason: str) -> dict:
    if REQUIRED:
        raise SystemExit(f"tilewright: the C++ extension was required but not built: {reason}")
    print(f"tilewright: building without the C++ extension: {reason}", file=sys.stderr)

    class Build(build_py):
        def run(self):
            super().run()
            write_reason("." if self.editable_mode else self.build_lib, reason)

    return {"cmdclass": {"build_py": Build}, "options": {"bdist_wheel": {"build_number": WITHOUT}}}


def write_reason(folder: str, reason: str | None) -> None:
    """Why the package in this folder has no extension, for platform.py; None: it has one."""
    path = pathlib.Path(folder, "tilewright", "_no_extension.txt")
    if reason is None:
        path.unlink(missing_ok=True)
    else:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(" ".join(reason.split()))


def cpp_extension():
    """torch.utils.cpp_extension, see above."""
    try:
        from torch.utils import cpp_extension
    except ModuleNotFoundError as error:
        installed = sysconfig.get_path("platlib")
        if error.name != "torch" or not os.path.isdir(os.path.join(installed, "torch")):
            raise
        sys.path.append(installed)  # last: what the build requires comes first
        from torch.utils import cpp_extension
    return cpp_extension


def extension() -> dict:
    if os.environ.get("TILEWRIGHT_SKIP_CPP") == "1":
        return skip("TILEWRIGHT_SKIP_CPP=1")
    if os.name == "nt" or sys.platform == "darwin":
        return skip(f"only Linux is supported, this is {sys.platform}")
    try:
        torch = cpp_extension()
    except Exception as error:  # that of a torch whose libraries do not load is any
        return skip(f"{error}; install torch first, and build again with pip")

    class OptionalBuild(torch.BuildExtension):
        def run(self):
            folder, reason = "." if self.inplace else self.build_lib, None
            variants = ", ".join(ext.name.removeprefix("tilewright.") for ext in self.extensions)
            print(
                f"tilewright: compiling {len(sources)} C++ sources for each of {variants}: one to "
                f"two minutes on two cores, this machine has {os.cpu_count()}",
                flush=True,
            )
            try:
                super().run()
            except Exception as error:  # a compiler's failure has no common base class
                reason = f"{type(error).__name__}: {error}"
                skip(reason)
                self.give_up()
            write_reason(folder, reason)

        def give_up(self):
            """Nothing is compiled, whichever variant failed, and a wheel is tagged so."""
            for ext in self.extensions:
                pathlib.Path(self.build_lib, *ext.name.split(".")).with_suffix(".so").unlink(
                    missing_ok=True
                )
            self.extensions = self.distribution.ext_modules = []
            wheel = self.distribution.get_command_obj("bdist_wheel", create=False)
            if wheel is not None:
                wheel.root_is_pure, wheel.build_number = True, WITHOUT

        def build_extension(self, ext):
            # Objects of the variants have the same names: a folder for each keeps rebuilds
            # incremental.
            before, self.build_temp = self.build_temp, os.path.join(self.build_temp, ext.name)
            os.makedirs(self.build_temp, exist_ok=True)
            super().build_extension(ext)
            self.build_temp = before

    sources = sorted(glob.glob("csrc/cpu/*.cpp"))
    # -g0: Python's own flags ask for debug information, ten times the size of the code, and a third
    # of the time.
    flags = [
        "-O3",
        "-g0",
        "-std=c++17",
        "-fno-math-errno",
        "-fno-trapping-math",
        "-fopenmp-simd",
        f"-DTORCH_TARGET_VERSION={STABLE_ABI}",
        "-Wno-psabi",
    ]
    variants = {"_C": []}
    if platform.machine() == "x86_64":
        variants |= {
            "_C_avx2": ["-march=haswell"],
            "_C_avx512": ["-march=x86-64-v4", "-mprefer-vector-width=512"],
        }
    modules = [
        torch.CppExtension(
            f"tilewright.{name}",
            sources,
            include_dirs=[os.path.abspath("csrc")],
            extra_compile_args={"cxx": flags + extra},
            py_limited_api=True,
        )
        for name, extra in variants.items()
    ]
    return {
        "ext_modules": modules,
        "cmdclass": {"build_ext": OptionalBuild.with_options(no_python_abi_suffix=True)},
        "options": {"bdist_wheel": {"py_limited_api": "cp311"}},
    }


setup(**extension())
