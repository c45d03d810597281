"""Isolates a launch: the kernels that one `Tunable` launches in a pass of an op, as a callable that
launches them again.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

import torch

from tilewright.bench import contract, timing
from tilewright.core.registry import Implementation, Op
from tilewright.kernels import tuning
from tilewright.kernels.tuning import Config, Tunable

LARGE = 2**20  # bytes


def usable(op: Op, device: str, dtype: torch.dtype) -> list[Implementation]:
    """Tunable implementations that can be timed here."""
    return [
        i
        for i in op.implementations
        if i.why_not(device, dtype) is None
        and i.tunables()
        and not (i.name == "triton" and device == "cpu")
    ]


def requested_keys(
    op: Op, impl: Implementation, kwargs: dict[str, Any]
) -> list[tuple[Tunable, tuple]]:
    """The (launch, key) pairs of one forward and backward, restricted to launches that this
    implementation declares.
    """
    own_tunables = set(impl.tunables())
    with tuning.recording() as lookups:
        contract.run(op, impl.name, contract.convert(kwargs, None))
    return [(tunable, key) for tunable, key in lookups if tunable in own_tunables]


def kernels(tunable: Tunable, key: tuple, config: Config) -> list[Any]:
    """The Triton kernels of a launch; empty for constants of something else, such as rows per
    chunk.
    """
    jit_functions = [
        spec.kernel for spec in tunable.specs(tunable.named(key), config) if hasattr(spec, "kernel")
    ]
    return list({id(k): k for k in jit_functions}.values())


@contextlib.contextmanager
def _launch_hooks(
    on_config: Callable[[Tunable, tuple], object], on_launch: Callable[..., object]
) -> Iterator[None]:
    """Inside, `seen` is called for each (tunable, key) whose configuration is requested, and
    `started` for each launch.
    """
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    from tilewright.kernels.launch import no_launch_cache

    original_config = Tunable.config

    def config(self, device, *key):
        on_config(self, key)
        return original_config(self, device, *key)

    with contextlib.ExitStack() as stack:
        stack.enter_context(no_launch_cache())
        stack.enter_context(mock.patch.object(Tunable, "config", config))
        for kind in (JITFunction, InterpretedFunction):

            def spy(kernel, *args, run=kind.run, **options):
                on_launch(kernel, functools.partial(run, kernel), args, options)
                return run(kernel, *args, **options)

            stack.enter_context(mock.patch.object(kind, "run", spy))
        yield


def record_launches(
    tunable: Tunable,
    key: tuple,
    config: Config,
    place: torch.device,
    call: Callable[[], object],
    shared: dict[tuple, torch.Tensor] | None = None,
) -> Callable[[], object] | None:
    """Runs `call` with this configuration. Returns a callable that launches the kernels again with
    the same arguments; None if none was launched.

    This is for timing only: results are ignored, and in-place changes of inputs persist between
    launches.
    shared: large results of the launch with other configurations, reused in place of this one's.
    """
    own_kernels = kernels(tunable, key, config)
    # By kernel id: whether this launch was the last to request a configuration for the kernel.
    is_last: dict[int, bool] = {}
    launched = []

    def on_config(other, other_key):
        if other is tunable and other_key == key:
            is_last.update((id(k), True) for k in own_kernels)
        elif is_last:
            other_config = other.choice(tuning.arch_of_device(), **other.named(other_key))
            is_last.update(
                (id(k), False) for k in kernels(other, other_key, other_config) if id(k) in is_last
            )

    def on_launch(kernel, run, args, options):
        if is_last.get(id(kernel)) and not options.get("warmup"):
            launched.append((run, args, options))

    with tunable.override(place, key, config), _launch_hooks(on_config, on_launch):
        call()
    if not launched:
        return None
    if shared is not None:
        launched = [
            (run, [_first(shared, (n, i), a) for i, a in enumerate(args)], options)
            for n, (run, args, options) in enumerate(launched)
        ]

    def relaunch():
        for run, args, options in launched:
            run(*args, **options)

    return relaunch


def timed(
    tunable: Tunable,
    key: tuple,
    config: Config,
    place: torch.device,
    passes: Mapping[str, Callable[[], object]],
    first: Callable[[], object] = lambda: None,
    shared: dict[tuple, torch.Tensor] | None = None,
) -> Callable[[], object]:
    """The callable that a clock times for this configuration: a launch of kernels in isolation, its
    first call within the op's pass; constants of something else always within that pass.

    passes: the op's passes (see `run.passes`).
    first: called before the configuration is first used.
    """
    pass_fn = passes.get(tunable.pass_name, passes["forward"])

    def with_config(call):
        def called():
            first()
            with tunable.override(place, key, config):
                return call()

        return called

    if not kernels(tunable, key, config):
        return (
            timing.After(with_config(pass_fn.before), with_config(pass_fn.fn))
            if isinstance(pass_fn, timing.After)
            else with_config(pass_fn)
        )
    relaunches = []

    def called():
        if relaunches:
            return relaunches[0]()
        first()
        # Some ops launch it only if an autograd graph is recorded.
        for call in dict.fromkeys((pass_fn, passes.get("forward_backward", pass_fn))):
            if relaunch := record_launches(tunable, key, config, place, call, shared):
                relaunches.append(relaunch)
                return None
        raise RuntimeError(
            f"no pass of the op starts a kernel of {tunable.name} for {tunable.named(key)}"
        )

    return called


def _first(shared: dict[tuple, torch.Tensor], at: tuple, value: Any) -> Any:
    """The first large floating-point tensor at this argument position with this layout, so that
    candidates share one. Integers are indices into other results and differ between tile sizes.
    """
    if not isinstance(value, torch.Tensor) or not value.is_floating_point() or value.nbytes < LARGE:
        return value
    return shared.setdefault((*at, value.dtype, value.shape, value.stride()), value)
