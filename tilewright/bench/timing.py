"""Timing: samples on a CPU or CUDA clock, interleaved rounds, quantiles, and the device's measured
roofline.

docs/benchmarking.md describes the protocol and its reasons.
"""

from __future__ import annotations

import functools
import gc
import math
import random
import time
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import TypeVar

import torch

from tilewright.core.registry import Cost, short

K = TypeVar("K", bound=Hashable)

CALLS_AT_MOST = 20_000  # in one sample
CUDA_CALLS = 5  # per sample, which is their median; each is flushed and timed separately
SLOW_CALL = 0.05  # seconds; longer calls vary less than the clock, so a sample is one call


def quantile(values: Iterable[float], q: float) -> float:
    """The q-quantile with linear interpolation. Raises ValueError for no values or q outside
    [0, 1].
    """
    ordered = sorted(values)
    if not ordered:
        raise ValueError("values must not be empty")
    if not 0 <= q <= 1:
        raise ValueError(f"q must be in [0, 1], got {q}")
    at = q * (len(ordered) - 1)
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (at - low) * (ordered[high] - ordered[low])


def geomean(values: Iterable[float]) -> float | None:
    """Geometric mean; None for no values."""
    logs = [math.log(v) for v in values]
    return math.exp(sum(logs) / len(logs)) if logs else None


@dataclass(frozen=True)
class Timing:
    """Seconds per call: quantiles over rounds.

    calls: per sample.
    host: seconds until a call returns (CUDA only).
    kernels: seconds of its kernels on the device, without gaps between them (CUDA only).
    idle: seconds of a call on an idle device, including host gaps and small kernels (CUDA only).
    """

    median: float
    p20: float
    p80: float
    samples: tuple[float, ...]
    calls: int
    host: float | None = None
    kernels: float | None = None
    idle: float | None = None

    @classmethod
    def of(
        cls,
        samples: Iterable[float],
        calls: int = 1,
        host: float | None = None,
        kernels: float | None = None,
        idle: float | None = None,
    ) -> Timing:
        samples = tuple(samples)
        p20, median, p80 = (quantile(samples, q) for q in (0.2, 0.5, 0.8))
        return cls(median, p20, p80, samples, calls, host, kernels, idle)


LEAST_ROUNDS = 7  # of a comparison; a row with fewer says so
LEAST_GAIN = 1.01  # a smaller difference would not outlive the next compiler version


def faster(a: Timing, b: Timing) -> bool:
    """Whether a is faster than b by more than the spread and by more than 1 %."""
    return a.p80 < b.p20 and a.median * LEAST_GAIN < b.median


@dataclass(frozen=True)
class After:
    """A timed callable with an untimed step before each call."""

    before: Callable[[], object]
    fn: Callable[[], object]

    def __call__(self):
        self.before()
        return self.fn()


def parts(fn: Callable[[], object]) -> tuple[Callable[[], object] | None, Callable[[], object]]:
    """A callable's untimed step, if it has one, and what is timed."""
    return (fn.before, fn.fn) if isinstance(fn, After) else (None, fn)


class CpuClock:
    """Wall-clock time of a loop of calls, long enough for the timer's resolution."""

    def __init__(self, sample_seconds: float = 0.008):
        self.sample_seconds = sample_seconds

    def prepare(self, fn: Callable[[], object]) -> int:
        """Warms `fn` up; returns how many calls make one sample."""
        fn()  # compiles, fills caches
        took = min(self._loop(fn, 1) for _ in range(2))
        return max(1, min(CALLS_AT_MOST, math.ceil(self.sample_seconds / max(took, 1e-9))))

    def sample(self, fn: Callable[[], object], calls: int) -> float:
        return self._loop(fn, calls) / calls

    def host_seconds(self, fn: Callable[[], object]) -> None:
        return None

    def isolated_times(self, fn: Callable[[], object]) -> tuple[None, None]:
        return None, None

    @staticmethod
    def _loop(fn, calls) -> float:
        before, fn = parts(fn)
        if before is None:
            start = time.perf_counter()
            for _ in range(calls):
                fn()
            return time.perf_counter() - start
        took = 0.0
        for _ in range(calls):
            before()
            start = time.perf_counter()
            fn()
            took += time.perf_counter() - start
        return took


class CudaClock:
    """Device time between two events, with a cold L2 cache and the host ahead of the device.

    Before each timed call a buffer larger than L2 is read repeatedly, so that the device is busy
    for longer than the host needs to launch the call. (Writing it would leave dirty lines for the
    timed kernels to write back: a fifth or more of the traffic of a case of 200 MB.) So the events
    measure the kernels and not the gaps between launches, as in a training step with a full queue.
    The host's time is reported separately.
    """

    def __init__(self):
        l2 = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
        self._buffer = torch.zeros(
            max(4 * l2, 256 * 2**20) // 4, dtype=torch.float32, device="cuda"
        )
        self._sum = torch.empty((), dtype=torch.float32, device="cuda")
        self._flushes: dict[int, int] = {}
        self._host: dict[int, float] = {}
        self.flush()
        self._flush_seconds = quantile((self._events(self.flush) for _ in range(5)), 0.5)

    def flush(self) -> None:
        """Replaces the contents of L2 with clean lines of the buffer; dirty lines are written
        back.
        """
        torch.sum(self._buffer, dim=0, out=self._sum)

    def prepare(self, fn: Callable[[], object]) -> int:
        before, timed = parts(fn)
        fn()  # compiles, fills caches
        torch.cuda.synchronize()
        hosts, calls = [], []
        first_start = time.perf_counter()
        while len(hosts) < CUDA_CALLS and (
            not hosts or time.perf_counter() - first_start < 4 * SLOW_CALL
        ):
            if before is not None:
                before()
                torch.cuda.synchronize()
            start = time.perf_counter()
            timed()
            hosts.append(time.perf_counter() - start)
            torch.cuda.synchronize()
            calls.append(time.perf_counter() - start)
        self._host[id(fn)] = min(hosts)
        # Twice the median: a margin for slower launches.
        host = 2 * quantile(hosts, 0.5)
        self._flushes[id(fn)] = min(50, 1 + math.ceil(host / self._flush_seconds))
        return 1 if min(calls) > SLOW_CALL else CUDA_CALLS

    def sample(self, fn: Callable[[], object], calls: int) -> float:
        pairs = []
        before, timed = parts(fn)
        for _ in range(calls):
            if before is not None:
                before()
            for _ in range(self._flushes.get(id(fn), 1)):
                self.flush()
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            timed()
            end.record()
            pairs.append((start, end))
        torch.cuda.synchronize()
        return quantile((s.elapsed_time(e) / 1e3 for s, e in pairs), 0.5)

    def host_seconds(self, fn: Callable[[], object]) -> float:
        """Seconds until a call returned, as measured by `prepare`."""
        return self._host[id(fn)]

    def isolated_times(self, fn: Callable[[], object]) -> tuple[float | None, float]:
        """Seconds in kernels by the device profiler (None if unavailable), and of a call on an
        idle device.
        """
        before, timed = parts(fn)

        def prepared():
            if before is not None:
                before()
            self.flush()
            torch.cuda.synchronize()

        samples = []
        for _ in range(CUDA_CALLS):
            prepared()
            samples.append(self._events(timed))
        prepared()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            timed()
            torch.cuda.synchronize()
        busy = sum(e.self_device_time_total for e in profile.key_averages()) / 1e6
        return busy or None, quantile(samples, 0.5)

    @staticmethod
    def _events(fn) -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        fn()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / 1e3


def clock(device: str, sample_seconds: float = 0.008) -> CpuClock | CudaClock:
    """The clock of a device type."""
    if device == "cuda":
        return CudaClock()
    if device == "cpu":
        return CpuClock(sample_seconds)
    raise ValueError(f"device must be 'cpu' or 'cuda', got {device!r}")


def first_line(error: BaseException) -> str:
    """An exception as one line, for a row."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0]}" if text else type(error).__name__


class DeviceLost(BaseException):
    """The CUDA context is lost: no later result of this process on the device is valid.

    Not an Exception, so that handlers that continue after a failure do not catch it.
    """


def raise_if_lost(error: BaseException, who: str = "") -> None:
    """After an exception: raises DeviceLost, with its text, if the device no longer responds."""
    if not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return
    try:
        torch.cuda.synchronize()
    except Exception:
        raise DeviceLost(f"{who}: {first_line(error)}" if who else first_line(error)) from error


def interleave(
    tasks: Mapping[K, Callable[[], object]],
    clock: CpuClock | CudaClock,
    *,
    rounds: int,
    max_seconds: float = math.inf,
    seed: int = 0,
    isolated: bool = False,
) -> tuple[dict[K, Timing], dict[K, str]]:
    """Times every task once per round, in a new random order each round, so that drift of the
    machine affects all alike.

    rounds: number of rounds. None starts after `max_seconds`, or twice that for the first
        LEAST_ROUNDS; at least three are done (or `rounds`, if fewer), since quantiles of fewer say
        nothing.
    isolated: on CUDA, also measures kernel time and a call on an idle device.

    Returns the timings, and the first line of the exception for each task that raised one.
    Raises ValueError if rounds < 1.
    """
    if rounds < 1:
        raise ValueError(f"rounds must be at least 1, got {rounds}")
    errors: dict[K, str] = {}
    calls: dict[K, int] = {}
    samples: dict[K, list[float]] = {}

    def attempt(key, step):
        try:
            return step()
        except Exception as error:  # one provider's failure must not lose the others
            raise_if_lost(error, str(key))
            errors[key] = first_line(error)
            return None

    for key, fn in tasks.items():
        prepared = attempt(key, lambda fn=fn: clock.prepare(fn))
        if prepared is not None:
            calls[key], samples[key] = prepared, []
    order = random.Random(seed)
    start, done = time.perf_counter(), 0
    collecting = gc.isenabled()
    gc.disable()
    try:
        while True:
            keys = [k for k in calls if k not in errors]
            order.shuffle(keys)
            for key in keys:
                value = attempt(key, lambda key=key: clock.sample(tasks[key], calls[key]))
                if value is not None:
                    samples[key].append(value)
            done += 1
            passed = time.perf_counter() - start
            if done >= rounds:
                break
            if done >= min(3, rounds) and passed >= max_seconds * (1 + (done < LEAST_ROUNDS)):
                break
    finally:
        if collecting:
            gc.enable()
    timings = {}
    for key in [k for k in calls if k not in errors]:
        isolated_seconds = (
            attempt(key, lambda key=key: clock.isolated_times(tasks[key])) if isolated else ()
        )
        if isolated_seconds is not None:
            timings[key] = Timing.of(
                samples[key], calls[key], clock.host_seconds(tasks[key]), *isolated_seconds
            )
    return timings, errors


# ---- the roofline


@dataclass(frozen=True)
class Roofline:
    """Measured peaks of the device: bytes per second of a copy (read + written), FLOP/s of a
    matmul by dtype.
    """

    copy_bytes_per_second: float
    flops_per_second: dict[str, float]

    def seconds(
        self, bytes_: int, flops: float, dtype: str, copies: Mapping[int, float] | None = None
    ) -> float | None:
        """The least time for this traffic and arithmetic; None if neither is known.

        copies: number of bytes -> seconds of a copy with that traffic; sizes that it lacks use the
        large copy's bandwidth.
        """
        bound = (copies or {}).get(bytes_) or bytes_ / self.copy_bytes_per_second
        if dtype in self.flops_per_second:
            bound = max(bound, flops / self.flops_per_second[dtype])
        return bound or None

    def floors(
        self, cost: Cost, dtype: str, copies: Mapping[int, float] | None = None
    ) -> dict[str, float | None]:
        """Least seconds of each pass. Forward and backward run in sequence, so their bounds
        add.
        """
        forward = self.seconds(cost.forward_bytes, cost.forward_flops, dtype, copies)
        backward = self.seconds(cost.backward_bytes, cost.backward_flops, dtype, copies)
        return {
            "forward": forward,
            "backward": backward,
            "forward_backward": None if forward is None else forward + (backward or 0.0),
        }

    def asdict(self) -> dict:
        return asdict(self)


LARGEST_COPY = 2**31  # bytes; larger copies have the roofline's bandwidth
SLOW = 5.0  # seconds of samples of a peak


def copy_of(bytes_: int, device: str) -> Callable[[], object] | None:
    """A copy with this many bytes of traffic (read + written); None for 0 bytes and above
    LARGEST_COPY.
    """
    if not 0 < bytes_ <= LARGEST_COPY:
        return None
    source = torch.ones(-(-bytes_ // 2), dtype=torch.int8, device=device)
    return functools.partial(torch.empty_like(source).copy_, source)


def measure_roofline(
    device: str,
    dtypes: Iterable[torch.dtype],
    *,
    copy_bytes: int | None = None,
    matmul: int | None = None,
    samples: int = 12,
) -> Roofline:
    """Measures copy and matmul peaks: the fastest of several samples, since a roof is what the
    device can do, not its average. Slow ones, as of bfloat16 on a processor without instructions
    for it, are three samples.

    copy_bytes: size of the copied tensor. The default exceeds any cache; on a GPU it is 2 GiB, so
        that a copy's start and end do not count.
    matmul: side of the square matrices.
    """
    copy_bytes = copy_bytes or (2**31 if device == "cuda" else 2**28)
    timer = clock(device, 0.02)
    # Large enough for full speed on a GPU; on two CPU cores, tens of milliseconds.
    side = matmul or (8192 if device == "cuda" else 1024)

    def fastest(fn):
        calls, times, begun = timer.prepare(fn), [], time.perf_counter()
        while len(times) < min(samples, 3) or (
            len(times) < samples and time.perf_counter() - begun < SLOW
        ):
            times.append(timer.sample(fn, calls))
        return min(times)

    source = torch.ones(copy_bytes // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    bandwidth = 2 * source.numel() * 4 / fastest(functools.partial(target.copy_, source))
    del source, target
    flops = {}
    for dtype in dtypes:
        a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
        out = torch.empty_like(a)
        flops[short(dtype)] = 2 * side**3 / fastest(functools.partial(torch.mm, a, b, out=out))
    return Roofline(bandwidth, flops)
