"""Fills Triton's cache, without a GPU, with the kernels that the first calls on a GPU launch.

    python -m bench gpu-cache [--arch 90] [--out FILE.tar.gz] [--triton DIR]
        [--goals DIR] [--what WHAT,..] [--dtype DTYPE,..]

It compiles the kernels of the suite's stages `smoke` to `counters` on a device of this compute
capability, and every candidate of the configuration search behind the goals (--goals DIR: those
that the results in DIR show to be missed). --what parity is for the stages `parity` and `graph`.
The ops' own code paths run (see `tilewright_lab.pretend`), so the cache keys equal those of a
launch on the GPU if these are the same there: the sources with their line numbers, Triton's Python
files and library, ptxas, and the environment variables in the key (such as TRITON_PTXAS_PATH).
Triton's library differs for each version of Python; nothing else in a key depends on it. --triton
DIR names the unpacked build for another version, whose library is used in the keys. The packed
cache holds what a launch needs, machine code and its description, but no text.
"""

from __future__ import annotations

import argparse
import base64
import collections
import contextlib
import dataclasses
import hashlib
import io
import itertools
import multiprocessing
import os
import pathlib
import sys
import tarfile
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import Any
from unittest import mock

import torch

from bench import commands, variants
from bench.stages import goals as of_goals
from bench.stages import questions
from tilewright import selection
from tilewright.bench import contract, launches, run
from tilewright.bench.options import names
from tilewright.bench.units import BY_NAME, smallest
from tilewright.core import platform, registry
from tilewright.kernels import tuning
from tilewright.kernels.tuning import Config, Tunable
from tilewright_lab import pretend

WHAT = ("smoke", "goals", "ab", "search", "parity")
USUAL = WHAT[: WHAT.index("parity")]
COMMIT = "commit.json"  # beside the archive; see `run.record_commit`
LARGEST = 48 * 2**20  # bytes of the archive: it travels with the sources, in a few tens of MiB
DTYPE = torch.bfloat16  # of goals without a dtype, of variants, and of the search


@dataclasses.dataclass(frozen=True)
class Call:
    """Forward and backward of one implementation on one case; with `launch`, under this `config`
    of that launch.

    layout: the layout of upstream gradients, whose strides specialize kernels.
    """

    op: str
    implementation: str
    case: str
    tag: str
    dtype: str
    launch: str | None = None
    key: tuple = ()
    config: tuple[tuple[str, Any], ...] = ()
    layout: str = contract.LAYOUTS[0]

    def run(self) -> None:
        """Requests all kernels of the call from Triton; call it inside `pretend.gpu`."""
        op = selection.operations()[self.op]
        impl = op.implementation(self.implementation)
        case = next(c for c in op.cases if c.name == self.case and self.tag in c.tags)
        kwargs = case.make("cuda", BY_NAME[self.dtype], 0)
        with contextlib.ExitStack() as stack:
            if self.launch:
                tunable = next(t for t in impl.tunables() if t.name == self.launch)
                stack.enter_context(tunable.override(pretend.CUDA, self.key, dict(self.config)))
            contract.run(op, impl.name, kwargs, self.layout)
            with torch.no_grad():  # the "forward" of `run.passes`, which searches time too
                op.public(
                    **{
                        n: v.detach() if isinstance(v, torch.Tensor) else v
                        for n, v in kwargs.items()
                    },
                    implementation=impl.name,
                )


# Long: each part of the plan adds its calls to one table, in the order in which they are compiled.
def calls(
    parts: Sequence[str],
    ops: Iterable[registry.Op],
    goals: pathlib.Path | None = None,
    dtypes: Sequence[torch.dtype] = (DTYPE,),
) -> list[Call]:
    """All calls of these parts of the plan on a device; call it inside `pretend.gpu`.

    dtypes: the dtypes of the part `parity`; the other parts have their own.
    """
    planned: dict[Call, None] = {}
    ops = list(ops)
    by_name = {op.name: op for op in ops}
    # The launches behind goals, each with the first case that requests it.
    requested: dict[tuple, tuple[Call, Tunable, tuple]] = {}

    for op in ops:
        aims, timed_names = {}, dict.fromkeys([op.choose("cuda", DTYPE)])
        for goal, case, dtype in of_goals.goals_on(op, "cuda"):
            aims[case.name, dtype] = case
            timed_names |= dict.fromkeys([goal.by] if goal.by else [])
        unmet = aims if goals is None else of_goals.unmet(op, "cuda", goals)
        small = smallest(op)
        # The stages `smoke`, `host` and `sanitize`: by name, since `auto` may not be our kernel.
        own = [n for n in ("gluon", "triton") if n in op.usable("cuda")]
        if "smoke" in parts and small is not None and own:
            planned[Call(op.name, own[0], small.name, "contract", registry.short(DTYPE))] = None
        # And `graph`, which takes a part of them.
        for name in own if "parity" in parts else ():
            for case, dtype, layout in itertools.product(op.cases, dtypes, contract.LAYOUTS):
                if "contract" in case.tags and dtype in op.implementation(name).dtypes:
                    call = Call(op.name, name, case.name, "contract", registry.short(dtype))
                    planned[dataclasses.replace(call, layout=layout)] = None
        for (name, dtype), case in aims.items():
            short = registry.short(dtype)
            if "goals" in parts:
                for impl in timed_names:
                    planned[Call(op.name, impl, name, "cuda", short)] = None
            if "search" in parts and (name, dtype) in unmet and dtype == DTYPE:
                for impl in launches.usable(op, "cuda", dtype):
                    # NotImplementedError: it reads values, which meta tensors do not have.
                    with contextlib.suppress(
                        NotImplementedError, registry.ImplementationUnavailable
                    ):
                        for t, key in launches.requested_keys(
                            op, impl, case.make("cuda", dtype, 0)
                        ):
                            requested.setdefault(
                                (t.name, key),
                                (Call(op.name, impl.name, name, "cuda", short), t, key),
                            )
    if "ab" in parts:
        for v in variants.asked(tuning.arch_of_device()):
            for op, case in (
                [(by_name[v.op], c) for c in by_name[v.op].cases] if v.op in by_name else ()
            ):
                if case.name != v.case or "cuda" not in case.tags:
                    continue
                for way in v.ways.values():
                    impl = questions.implementation(v, op, way, "cuda")
                    assert impl is not None, "every launch here is of some implementation"
                    if impl.name == "cute":  # not compiled by Triton
                        continue
                    call = Call(op.name, impl.name, case.name, "cuda", registry.short(DTYPE))
                    planned[call] = None
                    if not isinstance(way, str):
                        t, key = next(
                            (t, key)
                            for t, key in launches.requested_keys(
                                op, impl, case.make("cuda", DTYPE, 0)
                            )
                            if t.name == v.launch
                        )
                        usual = t.choice(tuning.arch_of_device(), **t.named(key))
                        planned[_with(call, t, key, {**usual, **way})] = None
    for call, t, key in requested.values():
        for config in (
            t.candidates(tuning.arch_of_device(), **t.named(key))
            if launches.kernels(t, key, t.choice(tuning.arch_of_device(), **t.named(key)))
            else ()
        ):
            planned[_with(call, t, key, config)] = None
    return list(planned)


def _with(call: Call, tunable: Tunable, key: tuple, config: Config) -> Call:
    return dataclasses.replace(call, launch=tunable.name, key=key, config=tuple(config.items()))


# ---- compiling


def key_of_build(triton: pathlib.Path | None) -> str:
    """Triton's part of its cache keys, computed with the library of the build unpacked in this
    folder.

    Raises ValueError if the folder holds no such build, or if more than the library differs.
    """
    import triton as here
    from triton.runtime import cache

    key = cache.triton_key()
    if triton is None:
        return key
    ours = pathlib.Path(here.__file__).parent
    for path in ours.rglob("*.py"):
        other = triton / path.relative_to(ours)
        if not other.exists() or other.read_bytes() != path.read_bytes():
            raise ValueError(
                f"{triton} is another Triton than {here.__version__}, which compiles: {other} "
                f"differs"
            )
    library = "_C/libtriton.so"
    old, new = (
        hashlib.sha256((where / library).read_bytes()).hexdigest() for where in (ours, triton)
    )
    if old not in key:
        raise ValueError(
            f"Triton {here.__version__} does not make its key of its library's digest, as is "
            f"relied on"
        )
    return key.replace(old, new)


@contextlib.contextmanager
def _compiling(arch: int, name: str | None, key: str, cached: dict[str, bool]) -> Iterator[None]:
    """Inside, calls compile into Triton's cache under this key. found: hash -> whether it was
    cached already.
    """
    from triton import knobs
    from triton.runtime import cache

    def listen(*, metadata, cache_hit, **_):
        cached.setdefault(metadata["hash"], cache_hit)

    with (
        mock.patch.object(cache, "triton_key", lambda: key),
        mock.patch.object(knobs.compilation, "listener", listen),
        pretend.gpu(arch, name),
    ):
        yield


_FOUND: dict[str, bool] = {}
_PROCESS = contextlib.ExitStack()  # contexts that a pool process keeps open until it ends


def _begin(arch: int, name: str | None, key: str) -> None:
    # Compilers are verbose about candidates that do not fit.
    sys.stdout = sys.stderr = io.StringIO()
    torch.set_num_threads(1)
    _PROCESS.enter_context(_compiling(arch, name, key, _FOUND))


def _compile(call: Call) -> tuple[dict[str, bool], str]:
    """The kernels that the call requested, and its exception as a line; configurations that do not
    fit raise on a GPU, too.
    """
    _FOUND.clear()
    try:
        call.run()
        return dict(_FOUND), ""
    except Exception as error:
        return dict(_FOUND), f"{type(error).__name__}: {error}".splitlines()[0]


def fill(
    todo: Sequence[Call],
    arch: int,
    key: str,
    jobs: int,
    until: float = float("inf"),
    name: str | None = None,
) -> tuple[dict, list[str]]:
    """Compiles the kernels of calls in `jobs` processes. Returns hash -> whether it was cached
    already, and a line for each call that raised or was not reached.
    """
    cached: dict[str, bool] = {}
    messages: list[str] = []
    pool = ProcessPoolExecutor(jobs, multiprocessing.get_context("fork"), _begin, (arch, name, key))
    try:
        running = {pool.submit(_compile, call): call for call in todo}
        with contextlib.suppress(TimeoutError):
            for done in as_completed(
                running, timeout=max(0.0, until - time.time()) if until < 1e12 else None
            ):
                kernels, error = done.result()
                for name, hit in kernels.items():
                    cached[name] = cached.get(name, True) and hit
                if error:
                    messages.append(f"{_text(running[done])}: {error}")
        messages += [f"{_text(call)}: no time" for done, call in running.items() if not done.done()]
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for process in list((pool._processes or {}).values()):  # those still compiling
            process.kill()
    return cached, messages


def _text(call: Call) -> str:
    constants = " ".join(f"{n}={v}" for n, v in call.config)
    return f"{call.op}[{call.implementation}] {call.case}" + (
        f" {call.launch} {constants}" if call.launch else ""
    )


# ---- packing


def folder(name: str) -> str:
    """The folder of this hash in Triton's cache."""
    return base64.b32encode(bytes.fromhex(name)).decode().rstrip("=")


NEEDED = (".cubin", ".json")  # a kernel's other files are text, which a launch does not read


def pack(cache: pathlib.Path, hashes: Iterable[str], path: pathlib.Path) -> int:
    """Writes the files that launches of these kernels read into an archive; returns its size. The
    file lists among them have absolute paths of this machine, which `bench/gpu.sh` replaces with
    its own.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w:gz", compresslevel=9) as archive:
        for name in sorted(map(folder, hashes)):
            for file in sorted((cache / name).iterdir()):
                if file.suffix in NEEDED:
                    archive.add(file, f"{name}/{file.name}")
    return path.stat().st_size


# ---- the command


def _parser(ops: Collection[str]) -> argparse.ArgumentParser:
    p = commands.parser("gpu-cache", __doc__)
    add = p.add_argument
    add(
        "--arch",
        type=int,
        choices=list(pretend.DEVICES),
        default=90,
        help="compute capability (default %(default)s)",
    )
    add("--name", help=f"the device's name (default: by compute capability, {pretend.NAMES})")
    add("--out", type=pathlib.Path, metavar="FILE", help="pack the kernels into this archive")
    add(
        "--triton",
        type=pathlib.Path,
        metavar="DIR",
        help="an unpacked Triton build for the Python version of the GPU's machine",
    )
    add(
        "--goals",
        type=pathlib.Path,
        metavar="DIR",
        help="include searches only for goals that the results in DIR miss",
    )
    add(
        "--what",
        type=names(WHAT),
        default=list(USUAL),
        metavar="WHAT,..",
        help=f"parts of the plan, of {','.join(WHAT)} (default: {','.join(USUAL)})",
    )
    add(
        "--dtype",
        type=names(BY_NAME),
        default=[registry.short(DTYPE)],
        metavar="DTYPE,..",
        help="of the part parity (default: %(default)s)",
    )
    add("--op", type=names(ops), default=list(ops), metavar="OP,..", help="default: every op")
    add(
        "--jobs",
        type=int,
        default=len(os.sched_getaffinity(0)),
        help="number of processes (default: one per core)",
    )
    add("--minutes", type=float, default=float("inf"), help="time budget (default: none)")
    add(
        "--verbose",
        action="store_true",
        help="also print the errors, such as configurations that exceed resources",
    )
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code. 0: everything that compiles is cached; 3: time ran out first; 2: nothing can be
    compiled here, with the reason.
    """
    ops = selection.operations()
    p = _parser(ops)
    args = p.parse_args(argv)
    began = time.time()
    if reason := pretend.no_compiling():
        print(f"gpu-cache: {reason}", file=sys.stderr)
        return 2
    from triton import knobs

    try:
        key = key_of_build(args.triton)
    except (ValueError, OSError) as error:
        p.error(f"argument --triton: {error}")
    with pretend.gpu(args.arch, args.name, compiles=False):
        todo = calls(
            args.what, [ops[n] for n in args.op], args.goals, [BY_NAME[n] for n in args.dtype]
        )
    cached, messages = fill(todo, args.arch, key, args.jobs, began + 60 * args.minutes, args.name)
    kinds = collections.Counter(
        "no time" if s.endswith(": no time") else "raised" for s in messages
    )
    for line in messages if args.verbose else ():
        print(line)
    print(
        f"{len(todo)} calls, {kinds['raised']} of which raised; {len(cached)} kernels for "
        f"sm_{args.arch} by Triton "
        f"{platform.describe()['triton']}, {sum(not hit for hit in cached.values())} compiled "
        f"now, "
        f"{time.time() - began:.0f} s"
    )
    if args.out:
        size = pack(pathlib.Path(knobs.cache.dir), cached, args.out)
        run.record_commit(args.out.parent / COMMIT)
        print(f"{args.out}: {size / 2**20:.1f} MiB")
        if size > LARGEST:
            print(f"OVER THE LIMIT of {LARGEST / 2**20:.0f} MiB: leave out a part (--what)")
    if kinds["no time"]:
        print(f"no time for {kinds['no time']} calls")
        return 3
    return 0
