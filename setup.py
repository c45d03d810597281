"""Builds the optional C++ extension tilewright/_C. Everything else is in pyproject.toml.

A missing torch or a failing compiler skips the extension and leaves the rest of the package working:
`tilewright explain` then shows the `cpp` implementations as unavailable, with the reason.
TILEWRIGHT_SKIP_CPP=1 skips the build; TILEWRIGHT_REQUIRE_CPP=1 turns a skip into an error (CI uses it).
"""

import glob
import os
import sys

from setuptools import setup

REQUIRED = os.environ.get("TILEWRIGHT_REQUIRE_CPP") == "1"
# The oldest torch whose stable ABI holds all that csrc/ calls (parallel_for came with 2.10).
STABLE_ABI = "0x020A000000000000"


def skip(reason: str) -> dict:
    if REQUIRED:
        raise SystemExit(f"tilewright: the C++ extension was required but not built: {reason}")
    print(f"tilewright: building without the C++ extension: {reason}", file=sys.stderr)
    return {}


def extension() -> dict:
    if os.environ.get("TILEWRIGHT_SKIP_CPP") == "1":
        return skip("TILEWRIGHT_SKIP_CPP=1")
    if os.name == "nt" or sys.platform == "darwin":
        return skip(f"only Linux is supported, this is {sys.platform}")
    try:
        from torch.utils.cpp_extension import BuildExtension, CppExtension
    except ImportError as error:
        return skip(f"{error}; install torch first and pass --no-build-isolation to pip")

    class OptionalBuild(BuildExtension):
        def run(self):
            try:
                super().run()
            except Exception as error:  # a compiler's failure has no common base class
                skip(f"{type(error).__name__}: {error}")

    sources = sorted(glob.glob("csrc/cpu/*.cpp"))
    flags = ["-O3", "-std=c++17", "-fno-math-errno", "-fno-trapping-math", "-fopenmp-simd",
             f"-DTORCH_TARGET_VERSION={STABLE_ABI}", "-Wno-psabi"]
    module = CppExtension("tilewright._C", sources, include_dirs=[os.path.abspath("csrc")],
                          extra_compile_args={"cxx": flags}, py_limited_api=True)
    return {
        "ext_modules": [module],
        "cmdclass": {"build_ext": OptionalBuild.with_options(no_python_abi_suffix=True)},
        "options": {"bdist_wheel": {"py_limited_api": "cp311"}},
    }


setup(**extension())
