"""Launch configurations: a heuristic for every launch, and a table of tuned ones per tuned device.

A launcher looks up its `Tunable`'s configuration by a key, such as the row width and the element
size. An entry of `tuned/<device>/<op>.json` with exactly this key takes precedence over the
heuristic. A program never searches while it runs: `python -m tilewright.bench tune` searches, and
writes the tables.

A launch of the implementation `triton` may have kernels of `gluon` beside it (`Specialized`), whose
configurations say which of the two languages takes a key.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from tilewright.core import platform

TABLES = pathlib.Path(__file__).with_name("tuned")
# Written by `compile-gate --space --update`: {launch, arch, triton, key, config}, one a line.
REJECTED = pathlib.Path(__file__).with_name("rejected.json")
SCHEMA = 1
Config = dict[str, Any]
# In a configuration of `gluon`: whether its kernel of specialized warps takes the key, or Triton's.
ROLES = "ROLES"


def arch_of_device() -> int | None:
    """The compute capability of the current CUDA device, as 90; None without one."""
    if not torch.cuda.is_available():
        return None
    return _arch(torch.device("cuda"))


def _arch(device: torch.device) -> int | None:
    if device.type != "cuda":
        return None
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def identity(launch: str, arch: int | None, key: dict[str, Any], config: Config) -> str:
    """The identity of a candidate on a compute capability, as text."""
    return json.dumps([launch, arch, key, config], sort_keys=True)


@functools.cache
def rejected() -> frozenset[str]:
    """The candidates that spill registers, lose wide accesses or do not compile under this Triton;
    or under any that the gate ran, if it did not run this one.
    """
    rows = json.loads(REJECTED.read_text())
    version = platform.describe().get("triton", "").split("+")[0]
    own = [r for r in rows if r["triton"] == version]
    return frozenset(identity(r["launch"], r["arch"], r["key"], r["config"]) for r in own or rows)


def _no_specs(key: dict[str, Any], config: Config) -> list:
    return []


class Tunable:
    """The configuration of one launch.

    op, launch: locate its tuned entries: `launches[launch]` of tuned/<device>/<op>.json. Ops that
        share a launch share its entries.
    fields: names of the key's parts, which are ints, bools or strings.
    pass_name: the pass of the op that a search times: "forward", "backward" or "forward_backward".
    heuristic: (**key) -> configuration. It defines the set of names.
    space: (**key) -> candidate configurations; the heuristic's need not be among them.
    keys: representative keys, for which the compile gate compiles the whole space.
    specs: (key, configuration) -> what the gate compiles; [] for a launch that is not compiled.
    hopper: (**key) -> what compute capability 9.0 takes in place of the heuristic's, unless the
        gate rejected it there; None for a key for which it has nothing.
    """

    def __init__(
        self,
        op: str,
        launch: str,
        fields: tuple[str, ...],
        pass_name: str,
        heuristic: Callable[..., Config],
        space: Callable[..., Iterable[Config]],
        keys: Iterable[tuple] = (),
        specs: Callable[[dict[str, Any], Config], list] = _no_specs,
        hopper: Callable[..., Config | None] | None = None,
    ):
        self.op, self.launch, self.fields, self.pass_name = op, launch, fields, pass_name
        self.heuristic, self.specs, self.keys = heuristic, specs, tuple(keys)
        self._space, self._hopper = space, hopper
        self._chosen: dict[tuple, Config] = {}

    @property
    def name(self) -> str:
        return f"{self.op}/{self.launch}"

    def config(self, device: torch.device, *key) -> Config:
        """The configuration of a launch on `device`; the caller must not modify it."""
        if _lookups is not None:
            _lookups[self, key] = None
        config = self._chosen.get((device, key))
        if config is None:
            config = self._chosen[device, key] = self._look_up(device, key)
        return config

    def _untuned(self, device: torch.device, key: tuple) -> Config:
        return self.choice(_arch(device), **self.named(key))

    def _look_up(self, device: torch.device, key: tuple) -> Config:
        key_fields, default = self.named(key), self._untuned(device, key)
        for entry in table(device_folder(device), self.op).get(self.launch, ()):
            if entry["key"] == key_fields:
                if set(entry["config"]) != set(default):
                    raise ValueError(
                        f"{_path(device_folder(device), self.op)}: {self.launch}: the config of "
                        f"{key_fields} "
                        f"must name {sorted(default)}, got {sorted(entry['config'])}"
                    )
                return entry["config"]
        return default

    def choice(self, arch: int | None, /, **key) -> Config:
        """The configuration for a compute capability where none was tuned; None: any."""
        config = self._hopper(**key) if arch == 90 and self._hopper is not None else None
        return config if config and self._fits(arch, key, config) else self.heuristic(**key)

    def named(self, key: tuple) -> dict[str, Any]:
        return dict(zip(self.fields, key, strict=True))

    def candidates(self, arch: int | None = None, /, **key) -> list[Config]:
        """What a launch takes first, then the rest of the space, without duplicates.

        arch: leaves out what has no kernel for this compute capability, or was rejected for it by
            the compile gate; None: nothing.
        """
        configs = [self.choice(arch, **key)]
        for config in (self.heuristic(**key), *self._space(**key)):
            if set(config) != set(configs[0]):
                raise ValueError(
                    f"{self.name}: a candidate must name {sorted(configs[0])}, got {sorted(config)}"
                )
            if config not in configs:
                configs.append(config)
        first, *rest = configs
        return [first, *(c for c in rest if self._fits(arch, key, c))]

    def _fits(self, arch: int | None, key: dict[str, Any], config: Config) -> bool:
        if arch is None:
            return True
        specs = self.specs(key, config)
        launched = not specs or any(s.min_arch <= arch <= s.max_arch for s in specs)
        return launched and identity(self.name, arch, key, config) not in rejected()

    def compiled(self, **key) -> list[Config]:
        """The candidates whose kernels no other launch's space has, for the compile gate."""
        return self.candidates(**key)

    @contextlib.contextmanager
    def override(self, device: torch.device, key: tuple, config: Config) -> Iterator[None]:
        """Uses this configuration for this key inside the block."""
        before = self._chosen.get((device, key))
        self._chosen[device, key] = config
        try:
            yield
        finally:
            del self._chosen[device, key]
            if before is not None:
                self._chosen[device, key] = before


class Specialized(Tunable):
    """Triton's launch for `gluon`: by the kernel `run`, or by Triton's kernel. It has the
    configurations of both, with ROLES.

    beside: Triton's launch.
    run: launches the kernel in Gluon on arguments that Triton's launcher has prepared.
    fits: whether the kernel can take these (see `choose`).
    usual: (**key) -> the kernel's configuration for a key that it takes where none was tuned, or
        None for Triton's.
    roles: (**key) -> the kernel's configurations, for a search.
    compiles: (key, configuration) -> what the gate compiles of the kernel.
    """

    def __init__(
        self,
        beside: Tunable,
        run: Callable[..., Any],
        fits: Callable[..., bool],
        usual: Callable[..., Config | None],
        roles: Callable[..., list[Config]],
        compiles: Callable[[dict[str, Any], Config], list],
    ):
        def heuristic(**key) -> Config:
            return usual(**key) or {**beside.heuristic(**key), ROLES: False}

        def space(**key) -> list[Config]:
            return [{**c, ROLES: False} for c in beside.candidates(**key)] + roles(**key)

        def specs(key: dict[str, Any], config: Config) -> list:
            return compiles(key, config) if config[ROLES] else beside.specs(key, plain(config))

        super().__init__(
            beside.op,
            gluon_name(beside.launch),
            beside.fields,
            beside.pass_name,
            heuristic,
            space,
            beside.keys,
            specs,
        )
        self.beside, self.run, self.fits, self._usual = beside, run, fits, usual

    def _untuned(self, device: torch.device, key: tuple) -> Config:
        named = self.named(key)
        chosen = self.choice(_arch(device), **named)
        return chosen if chosen[ROLES] else {**self.beside._look_up(device, key), ROLES: False}

    def choice(self, arch: int | None, /, **key) -> Config:
        chosen = self._usual(**key)
        if chosen and self._fits(arch, key, chosen):
            return chosen
        return {**self.beside.choice(arch, **key), ROLES: False}

    def compiled(self, **key) -> list[Config]:
        return [c for c in self.candidates(**key) if c[ROLES]]

    def _fits(self, arch: int | None, key: dict[str, Any], config: Config) -> bool:
        if not config[ROLES]:
            return self.beside._fits(arch, key, plain(config))
        specs = self.specs(key, config)  # of Triton's kernels around it too
        compiled = arch is None or all(s.min_arch <= arch <= s.max_arch for s in specs)
        return compiled and super()._fits(arch, key, config)


Others = Mapping[Tunable, Specialized]
ALONE: Others = {}  # of `triton`, which launches no kernels but its own


def gluon_name(launch: str) -> str:
    """The name under which the tables have the configurations of a launch's `Specialized`."""
    return f"{launch}_gluon"


def plain(config: Config) -> Config:
    """A configuration without ROLES."""
    return {n: v for n, v in config.items() if n != ROLES}


def choose(
    tunable: Tunable,
    others: Others,
    device: torch.device,
    key: tuple,
    *arguments: Any,
) -> tuple[Config, Callable[..., Any] | None]:
    """The configuration of a launch, without ROLES, and the other language's launcher if the
    configuration is that one's; None: Triton's.

    arguments: what `Specialized.fits` is to see.
    """
    other = others.get(tunable)
    if other is None or not other.fits(*arguments):
        return tunable.config(device, *key), None
    config = other.config(device, *key)
    return plain(config), other.run if config[ROLES] else None


def gives_gluon(op: str) -> bool:
    """Whether a configuration that was tuned for the current device is `gluon`'s kernel's."""
    entries = table(device_folder(torch.device("cuda")), op).values()
    return any(e["config"].get(ROLES) for each in entries for e in each)


_lookups: dict[tuple[Tunable, tuple], None] | None = None


@contextlib.contextmanager
def recording() -> Iterator[dict[tuple[Tunable, tuple], None]]:
    """Collects the (tunable, key) pairs that launches look up inside the block, in order."""
    global _lookups
    before, _lookups = _lookups, {}
    try:
        yield _lookups
    finally:
        _lookups = before


def device_folder(device: torch.device) -> str:
    """The name of a device's folder of tables."""
    return platform.slug(
        torch.cuda.get_device_name(device) if device.type == "cuda" else platform.cpu_name()
    )


def _path(folder: str, op: str) -> pathlib.Path:
    return TABLES / folder / f"{op}.json"


@functools.cache
def table(folder: str, op: str) -> dict[str, list[dict[str, Any]]]:
    """Entries by launch; {} where nothing was tuned. Raises ValueError, naming the file, for a
    malformed one.
    """
    path = _path(folder, op)
    return read(path)["launches"] if path.exists() else {}


def hashes(device: torch.device) -> dict[str, str]:
    """SHA-256 of each table of a device, by op."""
    files = sorted(TABLES.glob(f"{device_folder(device)}/*.json"))
    return {f.stem: hashlib.sha256(f.read_bytes()).hexdigest() for f in files}


def read(path: pathlib.Path) -> dict[str, Any]:
    """A table file:
    {"schema", "device", "device_type", "launches": {launch: [{"key", "config", ...}]}}.

    Earlier files have the configurations of `gluon` under the launch of `triton`, with ROLES: they
    are read as they are written now (`_by_language`).
    """
    try:
        document = json.loads(path.read_text())
        if document["schema"] != SCHEMA:
            raise ValueError(f"schema must be {SCHEMA}, got {document['schema']!r}")
        for entries in document["launches"].values():
            for entry in entries:
                if not (isinstance(entry["key"], dict) and isinstance(entry["config"], dict)):
                    raise ValueError(f"an entry must have a key and a config, got {entry!r}")
        document["launches"] = _by_language(document["launches"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path}: not a table of tuned constants: {type(error).__name__}: {error}"
        ) from error
    return document


def _by_language(launches: dict[str, list[dict[str, Any]]]) -> dict[str, list[dict[str, Any]]]:
    """Entries by launch, of `triton` and of `gluon`. An earlier file's entry with ROLES is
    `gluon`'s, and where ROLES is false, `triton`'s too.
    """
    out: dict[str, list[dict[str, Any]]] = {}
    for launch, entries in launches.items():
        own = launch.endswith(gluon_name(""))
        for entry in entries:
            config = entry["config"]
            if own or ROLES not in config:
                out.setdefault(launch, []).append(entry)
                continue
            out.setdefault(gluon_name(launch), []).append(entry)
            if not config[ROLES]:
                old = {n: plain(entry[n]) for n in ("config", "heuristic") if n in entry}
                out.setdefault(launch, []).append({**entry, **old})
    return out


def tuned(tunable: Tunable) -> Iterator[tuple[str, dict[str, Any], Config]]:
    """(device folder, key, configuration) of every committed entry of a launch, on any device.

    Raises ValueError for an entry that the launcher could not use.
    """
    for path in sorted(TABLES.glob(f"*/{tunable.op}.json")):
        for entry in read(path)["launches"].get(tunable.launch, ()):
            key, config = entry["key"], entry["config"]
            names = None if set(key) != set(tunable.fields) else set(tunable.heuristic(**key))
            if names is None or set(config) != names:
                raise ValueError(
                    f"{path}: {tunable.launch}: the key must name {list(tunable.fields)} and the "
                    f"config "
                    f"what the heuristic does, got {key} and {config}"
                )
            yield path.parent.name, key, config
