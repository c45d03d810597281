"""Probes what this machine and the current CUDA device can run. The only module that reads
environment variables.

Each probe returns None if the feature is usable, else a sentence that gives the reason. Exceptions,
`tilewright explain`, skipped tests and benchmark listings show that sentence unchanged.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import importlib.util
import json
import math
import os
import pathlib
import re
import select
import shlex
import sys
import time
from collections.abc import Callable

import torch

# Imported packages of pyproject.toml's extras. A package of several extras is attributed to the
# first.
EXTRAS = {
    "transformers": ("transformers",),
    "trainer": ("datasets", "pydantic", "tqdm", "transformers", "xxhash", "yaml"),
    "trl": ("trl",),
    "bench": ("matplotlib",),
    "tensorboard": ("tensorboard",),
    "cute": ("nvidia-cutlass-dsl",),
    "s3": ("s3fs",),
    "gs": ("gcsfs",),
    "abfs": ("adlfs",),
    "http": ("aiohttp",),
}
# How to install a package alone.
INSTALL = {
    "triton": "pip install triton",
    "wandb": "pip install wandb",
    "quack": "pip install quack-kernels",
    "liger_kernel": "pip install liger-kernel",
    "bitsandbytes": "pip install bitsandbytes",
    "torchao": "pip install torchao",
    "flash-attn-4": "pip install --pre flash-attn-4",
    # Not on the package index, or another package under the same name.
    "flash-attn": "pip install --no-build-isolation flash-attn",
    "flash-attn-3": "built from hopper/ of github.com/Dao-AILab/flash-attention",
    "deep_ep": "built from github.com/deepseek-ai/DeepEP",
}
# The newest versions that were tested; docs/tested.md says with which tests.
TESTED = {"torch": "2.15", "transformers": "5.24", "triton": "3.9"}
# The oldest torch whose stable ABI holds all that csrc/ calls: STABLE_ABI in setup.py.
OLDEST_TORCH = "2.10"


def env_flag(name: str) -> bool:
    return os.environ.get(name, "") not in ("", "0", "false", "False")


def dataset_processes() -> int | None:
    """The number in TILEWRIGHT_DATASET_NUM_PROC, if any. Raises ValueError if it is not one."""
    given = os.environ.get("TILEWRIGHT_DATASET_NUM_PROC", "")
    if given and not (given.isdecimal() and int(given) >= 1):
        raise ValueError(
            f"TILEWRIGHT_DATASET_NUM_PROC = {given}: must be a number of processes, 1 or more"
        )
    return int(given) if given else None


def interpreting() -> bool:
    """True when Triton kernels run in Triton's interpreter, on CPU tensors."""
    return env_flag("TRITON_INTERPRET")


def not_installed(*names: str, extra: str | None = None) -> str:
    """A sentence that says that packages are not installed, and how to install them.

    extra: the extra to name; default: the first that has the packages.
    """
    extra = extra or next((e for e, packages in EXTRAS.items() if {*names} <= {*packages}), None)
    command = INSTALL.get(names[0]) if extra is None else f"pip install 'tilewright[{extra}]'"
    singular = len(names) == 1
    text = (
        f"the package{'' if singular else 's'} {', '.join(map(repr, names))} "
        f"{'is' if singular else 'are'} not installed"
    )
    return f"{text} ({command})" if command else text


def no_module(name: str) -> str | None:
    """None if `name` can be imported, else the reason, without importing it."""
    return None if importlib.util.find_spec(name) else not_installed(name)


def require(extra: str) -> None:
    """Exits with one sentence if packages of an extra are missing. Commands call it before they
    import those packages.
    """
    if missing := [name for name in EXTRAS[extra] if importlib.util.find_spec(name) is None]:
        sys.exit(f"error: {not_installed(*missing, extra=extra)}")


def command(main: Callable[..., int]) -> Callable[..., int]:
    """Decorates the main function of a command. If its output pipe is closed (`| head`), it returns
    141 without a traceback: 128 + SIGPIPE, as a shell reports it for other programs. Its first line
    says, on stderr, that the C++ kernels are missing where they would have been used.
    """

    @functools.wraps(main)
    def run(*args, **kwargs) -> int:
        _warn_of_missing_kernels()
        try:
            try:
                return main(*args, **kwargs)
            finally:
                sys.stdout.flush()  # at interpreter exit the error could not be caught
        except BrokenPipeError:
            output = select.poll()
            output.register(sys.stdout.fileno(), 0)  # errors are reported even with mask 0
            if not output.poll(0):  # another pipe
                raise
            # The interpreter flushes at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 141

    return run


@functools.cache
def _warn_of_missing_kernels() -> None:
    """Warns once per process, since commands call one another, and on the first of a launcher's
    ranks only. A machine with a CUDA device uses other kernels.
    """
    if (launched() or (0,))[0] == 0 and no_cuda() and (reason := no_extension()):
        print(f"without C++ kernels, CPU tensors take slower ones: {reason}", file=sys.stderr)


def no_distribution(name: str, oldest: str | None = None) -> str | None:
    """None if the distribution is installed and not older than `oldest`, else the reason. For
    packages whose module has a name that other packages use too.
    """
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return not_installed(name)
    if oldest is not None and _order(version) < _order(oldest):
        return f"{name} {version} is too old: it takes {oldest} or later"
    return None


def newer_than_tested(*names: str) -> list[str]:
    """A sentence for each of these installed packages (default: all in `TESTED`) that is newer than
    the newest version there.
    """
    sentences = []
    for name in names or TESTED:
        tested = TESTED[name]
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        if _order(version)[:2] > _order(tested)[:2]:
            sentences.append(f"{name} {version} is newer than {tested}, the newest that was tested")
    return sentences


def _order(version: str) -> list[float]:
    """A key that sorts versions, a beta (4.0.0b36) before the release (4.0.0)."""
    public = version.partition("+")[0]
    numbers = [float(n) for n in re.findall(r"\d+", public)]
    return numbers if re.search("[a-z]", public) else [*numbers, math.inf]


def no_cuda(min_capability: int = 0) -> str | None:
    """None if the current CUDA device has at least `min_capability` (80, 90, 100, ...), else the
    reason.

    Not cached: probes query the current device, which `Op.pick` sets to the tensor's.
    """
    if not torch.cuda.is_available():
        return "no CUDA device"
    major, minor = torch.cuda.get_device_capability()
    if 10 * major + minor < min_capability:
        return (
            f"needs compute capability {min_capability / 10:.1f}, this device has {major}.{minor}"
        )
    return None


def no_triton(device_type: str) -> str | None:
    """None if Triton kernels support this device type, else the reason. CPU tensors run only in
    Triton's interpreter (slow; for tests).
    """
    if reason := no_module("triton"):
        return reason
    if device_type == "cuda":
        return no_cuda(80)
    if device_type == "cpu" and not interpreting():
        return "Triton kernels take CPU tensors only under TRITON_INTERPRET=1"
    return None if device_type == "cpu" else f"no Triton kernels for {device_type} tensors"


# The first Triton with the Gluon that the kernels are written in.
OLDEST_GLUON = (3, 6)


def no_gluon(device_type: str, capabilities: tuple[int, ...] = (9,)) -> str | None:
    """None if Gluon kernels for these major compute capabilities support this device type, else the
    reason. Triton's interpreter does not run them.
    """
    if reason := no_module("triton"):
        return reason
    installed = importlib.metadata.version("triton")
    if tuple(map(int, installed.split(".")[:2])) < OLDEST_GLUON:
        needed = ".".join(map(str, OLDEST_GLUON))
        return f"Gluon kernels need triton {needed} or later, this is {installed}"
    if device_type != "cuda":
        return f"Gluon kernels take CUDA tensors, not {device_type}"
    if reason := no_cuda():
        return reason
    major, minor = torch.cuda.get_device_capability()
    needed = " or ".join(f"{capability}.x" for capability in capabilities)
    return (
        None
        if major in capabilities
        else f"needs compute capability {needed}, this device has {major}.{minor}"
    )


def no_cutlass() -> str | None:
    """None if CuTe DSL can be imported, else the reason. Other packages have a module `cutlass`
    too.
    """
    name = "nvidia-cutlass-dsl"
    return None if importlib.util.find_spec(name.replace("-", "_")) else not_installed(name)


def no_cute(device_type: str) -> str | None:
    """None if the CuTe DSL kernels support this device type, else the reason. They use thread block
    clusters and are compiled for two architectures.
    """
    if reason := no_cutlass():
        return reason
    if device_type != "cuda":
        return f"the CuTe DSL kernels take CUDA tensors, not {device_type}"
    if reason := no_cuda():
        return reason
    major, minor = torch.cuda.get_device_capability()
    if (major, minor) != (9, 0) and major != 10:
        return f"needs compute capability 9.0 or 10.x, this device has {major}.{minor}"
    return None


@functools.cache
def no_extension() -> str | None:
    """Loads tilewright._C once, in the variant for this processor. Returns None if it loads, else
    the reason.
    """
    variants = {"AVX512": ("_C_avx512", "_C_avx2", "_C"), "AVX2": ("_C_avx2", "_C")}
    names = variants.get(torch.backends.cpu.get_cpu_capability(), ("_C",))
    if torch.__version__ < OLDEST_TORCH:  # loading could end the process
        return (
            f"the C++ extension tilewright._C needs torch {OLDEST_TORCH} or later, this is "
            f"{torch.__version__}"
        )
    package = pathlib.Path(__file__).parents[1]
    files = [f for f in (package / f"{name}.so" for name in names) if f.exists()]
    if not files:
        reason = package / "_no_extension.txt"  # written by the build
        why = f": {reason.read_text()}" if reason.exists() else ""
        # A program that runs in a checkout imports the checkout, also where an installed package
        # has the extension. A folder src/ would hide the checkout from it, but a checkout could
        # then not be used without an installation, which tests, `make` and copies of it do; an
        # editable installation builds into the checkout, and serves both.
        checkout = package.with_name("setup.py").exists()
        where = (
            f" in the checkout {package.parent}, which is what is imported here" if checkout else ""
        )
        how = f"-e {shlex.quote(str(package.parent))}" if checkout else "--force-reinstall ."
        return (
            f"the C++ extension tilewright._C is not built{where}{why} (`pip install -v --no-deps "
            f"{how}` where torch and a C++17 compiler are present)"
        )
    try:
        torch.ops.load_library(str(files[0]))
    except OSError as error:
        reason = str(error.__cause__ or error).splitlines()[0]  # torch's own names the file alone
        return f"the C++ extension tilewright._C does not load: {reason}"
    return None


def no_cpp(device_type: str) -> str | None:
    """None if the C++ kernels support this device type, else the reason."""
    if device_type != "cpu":
        return f"the C++ kernels take CPU tensors, not {device_type}"
    return no_extension()


def describe() -> dict[str, str]:
    """Versions and device, for `tilewright explain`, benchmark rows and run logs."""
    import platform as machine

    from tilewright._version import __version__

    out = {
        "tilewright": __version__,
        "torch": torch.__version__,
        "python": machine.python_version(),
        "cpu": cpu_name(),
        "threads": str(torch.get_num_threads()),
    }
    if importlib.util.find_spec("triton"):
        from importlib.metadata import version

        out["triton"] = version("triton")
    out["cuda device"] = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    return out


# Environment variables that change which algorithms libraries choose, and so results, by how their
# names begin, and those of these names that do not.
NUMERICS = (
    "ATEN_CPU_CAPABILITY",
    "CUBLAS",
    "CUDNN_",
    "DNNL_",
    "MKL_",
    "NCCL_",
    "NVIDIA_TF32_OVERRIDE",
    "ONEDNN_",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    "TRITON_INTERPRET",
)
NO_NUMERICS = re.compile("VERBOSE|DEBUG|_LOG|SOCKET|ASYNC_ERROR|TIMEOUT")


def provenance() -> dict[str, str]:
    """`describe`, and what else of this machine and process is known to change a computation's
    bits: libraries of the device, variables of the environment that are set, and a hash of this
    library's code.
    """
    out = describe()
    for name, value in sorted(os.environ.items()):
        if name.startswith(NUMERICS) and not NO_NUMERICS.search(name):
            out[name] = value
    if torch.cuda.is_available():
        from torch.cuda import nccl

        driver = pathlib.Path("/proc/driver/nvidia/version")
        out["driver"] = driver.read_text().splitlines()[0] if driver.is_file() else "unknown"
        out["cuda"], out["cudnn"] = str(torch.version.cuda), str(torch.backends.cudnn.version())
        out["nccl"] = ".".join(map(str, nccl.version()))
    return {**out, "code": code()}


@functools.cache
def code() -> str:
    """SHA-256 of this library's modules and extensions."""
    root, digest = pathlib.Path(__file__).parents[1], hashlib.sha256()
    for file in sorted((*root.rglob("*.py"), *root.glob("*.so"))):
        digest.update(str(file.relative_to(root)).encode() + file.read_bytes())
    return digest.hexdigest()


@functools.cache
def cpu_name() -> str:
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    capability = torch.backends.cpu.get_cpu_capability()
    return f"{names[0] if names else 'unknown'} ({capability})"


def device_name(device_type: str) -> str:
    """The device's name, by which results and tables are filed."""
    return torch.cuda.get_device_name() if device_type == "cuda" else cpu_name()


def slug(name: str) -> str:
    """A name as a folder name: lower-case letters and digits, single hyphens.

    Example:
        >>> from tilewright.core import platform
        >>> platform.slug("NVIDIA H100 80GB HBM3")
        'nvidia-h100-80gb-hbm3'
    """
    return "-".join("".join(c if c.isalnum() else " " for c in name.lower()).split())


SERVER = "TILEWRIGHT_SERVER_LAUNCHER"


def server_launcher() -> int | None:
    """The process number of the launcher of the server that this process is a part of."""
    given = os.environ.get(SERVER)
    return None if given is None else int(given)


def for_server() -> dict[str, str]:
    """The environment of a server's processes, which this one launches."""
    return with_variables(**{SERVER: str(os.getpid())})


def with_variables(**given: str) -> dict[str, str]:
    """The environment of a process that is started, with these variables."""
    return {**os.environ, **given}


def launched() -> tuple[int, int, int] | None:
    """(rank, world size, local rank) if torchrun or a similar launcher started this process, else
    None.
    """
    try:
        rank, size, local = (int(os.environ[n]) for n in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    except KeyError:
        return None
    return rank, size, local


def become_rank(rank: int, size: int) -> None:
    """Sets what torchrun sets for a rank, and hides CUDA devices from it."""
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "CUDA_VISIBLE_DEVICES": "",
    }


def local_processes() -> int:
    """The number of processes that the launcher started on this machine; 1 without a launcher."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def launch_line(module: str, arguments: list[str]) -> str:
    """The command line that starts this process, or all processes that torchrun has started with
    it, with these arguments. "..." stands for what torchrun does not tell, such as the address of
    the first node.
    """
    start = "python"
    if launched() is not None:
        nodes = os.environ.get("GROUP_WORLD_SIZE", "1")
        far = "" if nodes == "1" else f" --nnodes {nodes} ..."
        start = f"torchrun{far} --nproc-per-node {local_processes()}"
    return f"{start} -m {module} {shlex.join(arguments)}"


def available_memory() -> int:
    """Bytes of host memory that can be allocated without swapping, within the control group's
    limit.
    """
    with open("/proc/meminfo") as file:
        lines = dict(line.split(":") for line in file)
    free = int(lines["MemAvailable"].split()[0]) * 1024
    group = pathlib.Path("/sys/fs/cgroup")
    for limit, used, stat in (
        ("memory.max", "memory.current", "memory.stat"),
        (
            "memory/memory.limit_in_bytes",
            "memory/memory.usage_in_bytes",
            "memory/memory.stat",
        ),
    ):
        if (group / limit).is_file() and (text := (group / limit).read_text().strip()) != "max":
            counts = dict(line.split() for line in (group / stat).read_text().splitlines())
            cached = int(counts.get("total_inactive_file", counts.get("inactive_file", 0)))
            free = min(free, int(text) - int((group / used).read_text()) + cached)
    return free


def report_failure(message: str, *, later: bool) -> None:
    """Reports to torchrun, if it started this process, why the process fails.

    torchrun names the earliest failure as the cause. For a process that was killed it takes the
    time at which it notices, in whole seconds.
    later: another process failed first and caused this failure.
    """
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        error = {"message": message, "extraInfo": {"timestamp": str(int(time.time()) + 10 * later)}}
        pathlib.Path(file).write_text(json.dumps({"message": error}))
