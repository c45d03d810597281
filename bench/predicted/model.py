"""The arithmetic of a prediction: each launch takes the longest of its limits, and what nothing
overlaps comes on top.

A launch's limits are its traffic, its products, the instructions that it issues, and the latency of
a tile where too few tiles are in flight. Launches follow one another. What counts do not tell is
left out, and said.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from bench.page.files import counts_of
from bench.page.text import number
from bench.predicted.launches import Launch, Pass
from bench.predicted.roofs import E2M1, E4M3, Roofs
from tilewright.core.registry import Cost
from tilewright.kernels.device import SMS, resident

# The width of heads in the counted launches of attention (tests/ptx/test_triton_ptx.py).
COUNTED_WIDTH = 64
# Products of a score's block in each kernel of attention: q k and p v forward; in backward p and dp
# are computed again by both kernels, and once by the one of specialized warps.
ATTENTION = {"_forward": 2, "_backward_q": 3, "_backward_kv": 4, "_backward": 5}


# Machine instructions for one of PTX: about the middle of nine kernels without a loop that have
# both a budget and counts, read by hand, from 0.9 (NVFP4's dequantization) to 1.6 (normalization
# with quantization).
PER_PTX = 1.2
# Counted instructions a byte above which a kernel's cost is that of its few programs, such as those
# that sort, and does not grow with the bytes.
FIXED = 25.0
TENSOR_MEMORY = 512  # columns of an SM's (PTX ISA, "Tensor Memory Addressing")
LOSSES = (
    "cross_entropy",
    "linear_cross_entropy",
    "logprob_entropy",
    "linear_logprob",
    "linear_policy_loss",
    "linear_preference_loss",
)
# Kernels of whose code each tile runs one of several branches.
BRANCHED = {(op, "_backward") for op in LOSSES}
# The tensors whose elements are those of a launch's tiles, where these are not its largest; and the
# copies of the loop's code, of which each element runs one: heads of queries and of keys.
ELEMENTS: dict[tuple[str, str], tuple[tuple[str, ...], int]] = {
    **{(op, "_collect"): (("y_ptr",), 1) for op in ("permute", "unpermute", "moe_mlp", "moe_lora")},
    ("permute", "_spread"): (("x_ptr",), 1),
    ("unpermute", "_backward"): (("dy_ptr",), 1),
    ("rope", "_rotate"): (("q_ptr", "k_ptr"), 2),
    ("qk_norm_rope", "_forward"): (("q_ptr", "k_ptr"), 2),
    ("qk_norm_rope", "_backward"): (("dq_ptr", "dk_ptr"), 2),
    # A row's whole blocks, and its last one.
    **{(op, "_forward"): ((), 2) for op in LOSSES},
}


# Tensors that a launch reads in part: as many bytes as these have.
READ_IN_PART: dict[tuple[str, str], dict[str, tuple[str, ...]]] = {
    # The queries and keys of a projection.
    ("qk_norm_rope", "_forward"): {"x_ptr": ("q_ptr", "k_ptr")},
    ("qk_norm_rope", "_backward"): {"x_ptr": ("dq_ptr", "dk_ptr")},
}


@dataclass(frozen=True)
class Products:
    """The matrix products of a launch.

    per_byte: FLOPs for a byte that a tile's loop reads from L2.
    tiles, out: output tiles, and bytes of the results.
    step: bytes of shared memory that a step of a tile's loop needs in each of its stages; 0 where
        that is not known.
    between: warp instructions between a tile's products; no epilogue's arithmetic is counted.
        Attention's softmax: all PTX instructions of the loop for the scores, of which the machine
        code of products has fewer (it moves no registers to their operands).
    what: what these do.
    dtype: whose products these are.
    columns: columns of tensor memory that a block allocates; 0 where sums are in registers.
    unknown: what is not derived of these products alone, and why.
    """

    flops: int
    per_byte: float
    tiles: int
    out: int
    between: float = 0.0
    step: int = 0
    what: str = "softmax"
    dtype: str = "bfloat16"
    columns: int = 0
    unknown: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Steps:
    """A launch whose products are short beside what they wait for: each program takes steps, one
    after another, of a tile each.

    flops: FLOPs of matrix products of the inputs' type.
    ahead: steps whose loads are in flight.
    """

    flops: float
    steps: int = 1
    ahead: int = 1


# ---- products by kernel


def _named(launch: Launch, name: str):
    return launch.tensors.get(f"{name}_ptr") or launch.tensors[name]


def _tile(m: int, n: int, itemsize: float) -> float:
    return 2 * m * n / ((m + n) * itemsize)


def _grouped(launch: Launch, cost: Cost) -> Products:
    v, w, out = launch.values, _named(launch, "w"), _named(launch, "out")
    rows, columns = out.shape[0], w.elements // w.shape[0] // v["K"]
    tiles = math.ceil(rows / v["BLOCK_M"]) * math.ceil(columns / v["BLOCK_N"])
    written = out.bytes + sum(
        t.bytes for n, t in launch.tensors.items() if n in ("pre_ptr", "pre", "hw_ptr")
    )
    per_byte = _tile(v["BLOCK_M"], v["BLOCK_N"], w.itemsize)
    step = (v["BLOCK_M"] + v["BLOCK_N"]) * v.get("BLOCK_K", 0) * w.itemsize
    return Products(2 * rows * columns * v["K"], per_byte, tiles, written, step=step)


def _dweight(launch: Launch, cost: Cost) -> Products:
    v, out = launch.values, _named(launch, "out")
    tiles = out.shape[0] * math.ceil(v["N"] / v["BLOCK_N"]) * math.ceil(v["K"] / v["BLOCK_K"])
    per_byte = _tile(v["BLOCK_N"], v["BLOCK_K"], out.itemsize)
    return Products(2 * v["R"] * v["N"] * v["K"], per_byte, tiles, out.bytes)


def _symmetric(launch: Launch, cost: Cost) -> Products:
    v, left, out = launch.values, _named(launch, "left"), _named(launch, "out")
    rows = math.ceil(v["M"] / v["BLOCK"])
    tiles = left.shape[0] * rows * (rows + 1) // 2
    per_byte = _tile(v["BLOCK"], v["BLOCK"], left.itemsize)
    return Products(tiles * 2 * v["BLOCK"] ** 2 * v["K"], per_byte, tiles, out.bytes)


def _attention(launch: Launch, cost: Cost) -> Products:
    v, products = launch.values, ATTENTION[launch.kernel]
    one = cost.forward_flops // 2
    # What a block keeps: queries (forward, dq) or keys; the loop reads two tiles of the others.
    kept = v.get("BLOCK_N" if launch.kernel.startswith("_backward_kv") else "BLOCK_M", 128)
    scores = one / (2 * v["D"])
    written = sum(
        t.bytes
        for n, t in launch.tensors.items()
        if n in ("out_ptr", "dq_ptr", "dk_ptr", "dv_ptr", "part_ptr")
    )
    # The backward by specialized warps has no counts; its scores are those of dk and dv.
    alike = "_backward_kv" if launch.kernel == "_backward" else launch.kernel
    softmax = 0.0
    if counted := _counts().get("attention", {}).get(alike):
        counted_scores = counted["products"] / (ATTENTION[alike] * COUNTED_WIDTH)
        softmax = scores * sum(counted["issued"].values()) / counted_scores
    return Products(products * one, products * kept / 2, launch.programs, written, softmax)


# The number of scales that an element of a sum of 128 columns is multiplied by in FP8 products; one
# scale is the product of a row's and a tile's.
FP8 = {"_fp8": 1, "_fp8_wide": 1, "_rows": 1, "_by_rows": 2, "_weights": 2, "_dweight": 2}


def _fp8(launch: Launch, cost: Cost) -> Products:
    """The products of an op whose three products have as many FLOPs each, without the places of
    experts that have no row.
    """
    v, out, flops = launch.values, _named(launch, "out"), cost.forward_flops
    m, n = v.get("BLOCK_M") or v["M"], v.get("BLOCK_N") or v["COLUMNS"]
    tiles = math.ceil(out.shape[-2] / m) * math.ceil(out.shape[-1] / n) * math.prod(out.shape[:-2])
    scaled = FP8[launch.kernel] * flops / (2 * 128) / 32
    return Products(
        flops,
        _tile(m, n, 1),
        tiles,
        out.bytes,
        scaled,
        (m + n) * 128,
        "scales",
        E4M3,
    )


# The kernels of MXFP8 and NVFP4, whose scales the tensor cores apply.
SCALED = ("_scaled", "_scaled_rows", "_scaled_weights")


def _scaled(launch: Launch, cost: Cost) -> Products:
    """The products of an op whose three products have as many FLOPs each."""
    v, out = launch.values, _named(launch, "out")
    e2m1 = v["PER"] == 1 if launch.specialized else v["E2M1"]
    m, n, shared = v.get("BLOCK_M", 128), v["BLOCK_N"], 16 if e2m1 else 32
    # An element's code and its share of a scale: a tile's loop reads both from L2.
    itemsize = (1 / 2 if e2m1 else 1) + 1 / shared
    # The rows of experts alone: no program multiplies the places between them that have none.
    tiles = math.prod(out.shape[:-2]) * math.ceil(out.shape[-2] / m) * math.ceil(out.shape[-1] / n)
    unknown = [("copies of scales to tensor memory", "no count")]
    columns = TENSOR_MEMORY  # all of it: sums in turn, and scales of steps to come
    if not launch.specialized:
        # Sums of 32 bits; four scales of 128 rows are four columns; a power of two is allocated.
        scales = v["BLOCK_K"] // shared * (m + n) // 128
        columns = 1 << (n + scales - 1).bit_length()
    elif n == 256:
        unknown.append(("the wait for a sum's registers", "no second sum fits, no rate"))
    return Products(
        cost.forward_flops,
        _tile(m, n, itemsize),
        tiles,
        out.bytes,
        dtype=E2M1 if e2m1 else E4M3,
        columns=columns,
        unknown=tuple(unknown),
    )


PRODUCTS: dict[tuple[str, str], Callable[[Launch, Cost], Products]] = {
    **{
        (op, kernel): _fp8
        for op in ("fp8_linear", "low_precision_linear", "low_precision_grouped_gemm")
        for kernel in FP8
    },
    **{
        (op, kernel): _scaled
        for op in ("low_precision_linear", "low_precision_grouped_gemm")
        for kernel in SCALED
    },
    **{(op, "_gemm"): _grouped for op in ("grouped_gemm", "moe_mlp", "moe_lora")},
    **{(op, "_dweight"): _dweight for op in ("grouped_gemm", "moe_mlp", "moe_lora")},
    ("newton_schulz", "_symmetric"): _symmetric,
    **{("attention", kernel): _attention for kernel in ATTENTION},
}


# The products for a chunk and a value head in each kernel of the gated delta rule: those of the
# chunk's rows with the state, those of rows with each other, and the width that both have.
DELTA = {
    "_states": (2, 1, "BV"),
    "_outputs": (1, 1, "BV"),
    "_state_gradients": (3, 2, "BV"),
    "_row_gradients": (3, 4, "BK"),
}


def _delta(launch: Launch) -> Steps:
    v = launch.values
    C, DK, DV = v["C"], v["DK"], v.get("DV", 0)
    if launch.kernel == "_scores":
        # The inverse: two products for each doubling of its blocks, of float32, at half the rate.
        solved = 2 * (C.bit_length() - 2) * 2 * 2 * C**3 if v["SOLVE"] else 0
        return Steps(launch.programs * ((1 + v["SOLVE"]) * 2 * C * C * DK + solved))
    if launch.kernel == "_pair_gradients":
        return Steps(launch.programs * 2 * 2 * C * C * (DK + DV))
    states, rows, block = DELTA[launch.kernel]
    width = v[block]
    steps = v["GROUP"] if block == "BK" else math.ceil(v["S"] / C) if "STAGES" in v else 1
    each = 2 * C * width * (states * (DV if block == "BK" else DK) + rows * C)
    return Steps(launch.programs * steps * each, steps, max(1, v.get("STAGES", 1) - 1))


def _few_rows(launch: Launch) -> Steps:
    v = launch.values
    steps = math.ceil(v["piece"] / v["BLOCK_K"])
    each = 2 * v["BLOCK_T"] * v["BLOCK_N"] * v["BLOCK_K"]
    return Steps(launch.programs * steps * each, steps, max(1, v.get("num_stages", 3) - 1))


def _sorted(launch: Launch) -> Steps:
    """Tiles of slots, whose next one is loaded while one is ranked; before, counts of all runs."""
    v = launch.values
    return Steps(0, v["steps"] + (math.ceil(v["runs"] / v["ROWS"]) if "runs" in v else 0))


STEPS: dict[tuple[str, str], Callable[[Launch], Steps]] = {
    **{
        (op, kernel): _sorted
        for op in ("permute", "moe_mlp", "moe_lora")
        for kernel in ("_histogram", "_place")
    },
    **{("gated_delta_rule", kernel): _delta for kernel in ("_scores", "_pair_gradients", *DELTA)},
    ("quantized_linear", "_few_rows"): _few_rows,
}


# ---- limits


@dataclass(frozen=True)
class Timed:
    """Seconds of a launch.

    limits: by name.
    roof: seconds of a copy of its bytes, or of its products at the device's rate.
    exposed: what comes on top of the longest.
    words: the arithmetic.
    unknown: what could not be derived, and why.
    """

    limits: dict[str, float]
    roof: float
    exposed: float = 0.0
    words: str = ""
    unknown: tuple[tuple[str, str], ...] = ()

    @property
    def limit(self) -> str:
        return max(self.limits, key=self.limits.__getitem__)

    @property
    def seconds(self) -> float:
        return self.limits[self.limit] + self.exposed


@functools.cache
def _counts() -> dict[str, dict[str, dict]]:
    """Counts of emulated launches; those of the newest Triton that has them."""
    path = max(counts_of("x").parent.glob(counts_of("*").name), default=None)
    return json.loads(path.read_text()) if path else {}


def _issued_per_byte(op: str, kernel: str) -> float | None:
    """Warp instructions for a byte, by the counts of an op's kernel."""
    counted = _counts().get(op, {}).get(kernel)
    moved = 32 * sum(counted["least"].values()) if counted else 0
    return sum(counted["issued"].values()) / moved if counted and moved else None


def blocks_per_sm(launch: Launch, roofs: Roofs) -> int | None:
    """None where registers are not known."""
    facts = launch.facts
    if not facts:
        return None
    return resident(facts["registers"], facts["shared"], launch.warps, SMS[roofs.arch])


def moved(op: str, launch: Launch) -> int:
    """Bytes of a launch's tensors, each read or written once."""
    parts = READ_IN_PART.get((op, launch.kernel), {})
    return sum(
        sum(launch.tensors[n].bytes for n in parts[name]) if name in parts else t.bytes
        for name, t in launch.tensors.items()
    )


def elements(op: str, launch: Launch, work: Steps | None = None) -> int:
    """The elements of all tiles of a streaming launch, masked ones too; or of all steps."""
    if work is not None:
        return launch.covered * work.steps
    names, _ = ELEMENTS.get((op, launch.kernel), ((), 1))
    count = sum(launch.tensors[n].elements for n in names if n in launch.tensors)
    return max(launch.covered, count or launch.largest)


def issued(
    op: str, launch: Launch, bytes_: int, work: Steps | None = None
) -> tuple[float | None, bool, str]:
    """(warp instructions of a streaming launch, whether they may be fewer, how they were found)."""
    ways: list[tuple[float, str]] = []
    per_element = launch.facts.get("per_element")
    n = elements(op, launch, work)
    loops = n > launch.covered or (op, launch.kernel) in BRANCHED
    _, copies = ELEMENTS.get((op, launch.kernel), ((), 1))
    if per_element and n:
        of = per_element / copies
        ways.append((n * of / 32, f"{of:.3g} instructions x {number(n / 1e6)} M elements"))
    # The counted launches have no softcap.
    uncounted = (launch.facts and not per_element) or launch.values.get("CAPPED")
    per_byte = None if uncounted else _issued_per_byte(op, launch.kernel)
    if (loops or not ways) and per_byte and 32 * per_byte < FIXED:
        words = f"{number(32 * PER_PTX * per_byte)} instructions a byte by counts"
        ways.append((PER_PTX * per_byte * bytes_, words))
    if not ways:
        return None, False, ""
    # The code around a loop counts for each of its rounds, so that the lesser is nearer.
    least, words = min(ways)
    return least, loops and len(ways) == 1 and bool(per_element), words


def streamed(
    op: str, launch: Launch, roofs: Roofs, bytes_: int, work: Steps | None = None
) -> Timed:
    """A launch that no product limits. bytes_: what it reads and writes."""
    share = min(1.0, launch.programs / roofs.sms)  # of the SMs
    limits = {"bytes": bytes_ / (roofs.copy * share)}
    words = [
        f"{_bytes(bytes_)} / {number(roofs.copy * share / 1e12)} TB/s = {_us(limits['bytes'])}"
    ]
    roof = bytes_ / roofs.copy
    if work is not None and work.flops:
        limits["tensor cores"] = work.flops / (roofs.flops["bfloat16"] * share)
        roof = max(roof, work.flops / roofs.flops["bfloat16"])
        words.append(f"{number(work.flops / 1e9)} GFLOP = {_us(limits['tensor cores'])}")
    unknown = []
    instructions, at_most, how = issued(op, launch, bytes_, work)
    blocks, text = blocks_per_sm(launch, roofs), ""
    if blocks is None or not (launch.tile or work):
        unknown.append(("residency", "no budget" if blocks is None else "its tile is not known"))
    else:
        limits["latency"], text = _latency(op, launch, roofs, blocks, work)
    if instructions is None:
        unknown.append(("issue slots", "no count"))
    else:
        seconds = instructions / (roofs.issue * share)
        if at_most and seconds > max(limits.values()):
            unknown.append(("issue slots", f"at most {_us(seconds)}, by all of its code"))
        else:
            limits["issue"] = seconds
        words.append(f"{how} = {'at most ' if at_most else ''}{_us(seconds)}")
    words += [text] if text else []
    return Timed(limits, roof, 0.0, "; ".join(words), tuple(unknown))


def _latency(
    op: str, launch: Launch, roofs: Roofs, blocks: int, work: Steps | None
) -> tuple[float, str]:
    """Seconds if each tile took the latency, and as many were in flight as fit."""
    # A loop with asynchronous copies loads its next tiles while it computes.
    ahead = work.ahead if work else max(1, int(launch.values.get("STAGES", 2)) - 1)
    depth = ahead if "cp.async" in launch.facts.get("uses", ()) else 1
    in_flight = min(blocks * roofs.sms, launch.programs) * depth
    tiles = launch.programs * work.steps if work else elements(op, launch) / launch.tile
    rounds = math.ceil(max(1.0, tiles) / in_flight)
    seconds = rounds * roofs.latency
    return seconds, f"{blocks} blocks/SM, {rounds} rounds of tiles = {_us(seconds)}"


def multiplied(launch: Launch, work: Products, roofs: Roofs) -> Timed:
    """A launch of matrix products."""
    peak = roofs.flops[work.dtype]
    fed = roofs.l2 * work.per_byte
    # A result through a descriptor and, where rows do not fill a tile, a pointer too.
    twice = {"out"} if "out_ptr" in launch.tensors else set()
    bytes_ = sum(t.bytes for name, t in launch.tensors.items() if name not in twice)
    limits = {
        "tensor cores": work.flops / peak,
        "L2 to SM": work.flops / fed,
        "bytes": bytes_ / roofs.copy,
    }
    words = [
        f"{number(work.flops / 1e12)} TFLOP / min({number(peak / 1e12)}, {work.per_byte:.0f} FLOP/B "
        f"x {number(roofs.l2 / 1e12)} TB/s = {number(fed / 1e12)}) TFLOP/s = "
        f"{_us(max(limits['tensor cores'], limits['L2 to SM']))}"
    ]
    exposed, unknown, epilogue = 0.0, [], None
    if work.between:
        issue = work.between / roofs.issue
        words.append(
            f"{work.what} {number(work.between / 1e9)} G counted instructions = {_us(issue)}"
        )
        if launch.specialized:
            limits["issue"] = issue
        else:
            exposed += issue
            words[-1] += ", not overlapped"
    elif per_element := launch.facts.get("per_element"):
        epilogue = per_element * launch.tile / 32 * work.tiles / roofs.issue
    else:
        unknown.append(("the epilogue's arithmetic", "no count"))
    blocks, memory = _blocks(launch, work, roofs)
    if launch.specialized:
        words.append("specialized warps overlap loads and epilogue")
    elif blocks is None:
        unknown.append(("residency", "no budget"))
    elif blocks > 1:
        words.append(f"{blocks} blocks/SM{memory} overlap each other's epilogues")
    else:
        fill = math.ceil(work.tiles / roofs.sms) * roofs.latency
        store = work.out / roofs.copy
        exposed += fill + store
        words.append(
            f"1 block/SM{memory} exposes {work.tiles} tiles' first loads {_us(fill)} and "
            f"their stores {_us(store)}"
        )
    if epilogue is not None:
        # All instructions once, of which the epilogue is a part.
        words.append(f"epilogue at most {_us(epilogue)}")
        if exposed or epilogue > max(limits.values()):
            unknown.append(("the epilogue's arithmetic", "not apart from its loop's"))
    roof = max(limits["tensor cores"], limits["bytes"])
    return Timed(limits, roof, exposed, "; ".join(words), (*unknown, *work.unknown))


def _blocks(launch: Launch, work: Products, roofs: Roofs) -> tuple[int | None, str]:
    """Blocks of products on an SM, and what of it tensor memory says."""
    blocks, of_stages = blocks_per_sm(launch, roofs), work.step * launch.values.get("num_stages", 3)
    # Without a budget: the stages of operands alone may leave room for one block.
    alone = of_stages and resident(0, of_stages, launch.warps, SMS[roofs.arch]) == 1
    if blocks is None and alone:
        blocks = 1
    if blocks is None or not work.columns:
        return blocks, ""
    text = f", of {work.columns} columns of tensor memory each,"
    return min(blocks, TENSOR_MEMORY // work.columns), text


# ---- a pass


@dataclass(frozen=True)
class Predicted:
    """A pass. limit: that of the longest launch. words: the arithmetic, launch by launch. dtype:
    that of the products whose rate its roof is.
    """

    seconds: float
    limit: str
    words: str
    unknown: tuple[str, ...] = ()
    dtype: str = "bfloat16"


def traffic(cost: Cost, which: str) -> tuple[int, int]:
    """(bytes, FLOPs) of a pass."""
    forward, backward = which != "backward", which != "forward"
    return (
        forward * cost.forward_bytes + backward * cost.backward_bytes,
        forward * cost.forward_flops + backward * cost.backward_flops,
    )


def predict(op: str, which: str, of: Pass, cost: Cost, roofs: Roofs) -> Predicted:
    """Raises ValueError if the pass has no launch whose work is known."""
    if not of.launches:
        raise ValueError("launches no kernel of this library")
    least, _ = traffic(cost, which)
    rest = max(0, least - sum(moved(op, launch) for launch in of.launches))
    streaming = [i for i, one in enumerate(of.launches) if (op, one.kernel) not in PRODUCTS]
    # The largest launch has the bytes that no argument shows, as those behind a table of pointers.
    main = max(streaming, key=lambda i: moved(op, of.launches[i]), default=None)
    if of.vendor:  # its operands are no launch's arguments, and are part of its FLOP/s
        rest = 0
    timed: list[tuple[str, Timed]] = []
    dtype = "bfloat16"
    for i, launch in enumerate(of.launches):
        streams = moved(op, launch) + (rest if i == main else 0)
        if work := PRODUCTS.get((op, launch.kernel)):
            products = work(launch, cost)
            dtype = products.dtype
            estimate = multiplied(launch, products, roofs)
        elif steps := STEPS.get((op, launch.kernel)):
            estimate = streamed(op, launch, roofs, streams, steps(launch))
        elif {"wgmma", "mma", "tcgen05"} & set(launch.facts.get("uses", ())):
            raise ValueError(f"the products of {launch.kernel} are not derived")
        else:
            estimate = streamed(op, launch, roofs, streams)
        timed.append((_name(launch), estimate))
    count = len(of.launches) + len(of.operators)
    gaps = count * roofs.launch
    beside, told = _beside(of, roofs)
    total = sum(t.seconds for _, t in timed) + beside + gaps
    parts = [
        *_merged(timed),
        *told,
        f"{count} launch{'' if count == 1 else 'es'} = {_us(gaps)}",
    ]
    longest = max(timed, key=lambda pair: pair[1].seconds)[1]
    limit, longest_seconds = longest.limit, longest.seconds
    if beside > longest_seconds:
        limit, longest_seconds = "bytes", beside
    if of.vendor:
        seconds = of.vendor / roofs.flops["bfloat16"]
        total += seconds
        parts.insert(
            0,
            f"PyTorch's products: {number(of.vendor / 1e12)} TFLOP / "
            f"{number(roofs.flops['bfloat16'] / 1e12)} TFLOP/s = {_us(seconds)}",
        )
        limit = "tensor cores" if seconds > longest_seconds else limit
    if gaps > total / 2:
        limit = "launches"
    # The unknowns of launches that matter.
    unknown = dict.fromkeys(
        f"{what} of {name.partition(' ')[0]} ({why})"
        for name, t in timed
        for what, why in t.unknown
        if t.seconds > 0.05 * total
    )
    return Predicted(total, limit, ". ".join(parts), tuple(unknown), dtype)


def _beside(of: Pass, roofs: Roofs) -> tuple[float, list[str]]:
    """Seconds of PyTorch's operators beside the launches, at the rate of a copy, and the words."""
    if not of.operators:
        return 0.0, []
    whole = sum(bytes_ for _, bytes_ in of.operators)
    by_name: dict[str, int] = {}
    for name, bytes_ in of.operators:
        by_name[name] = by_name.get(name, 0) + bytes_
    most = sorted(by_name.items(), key=lambda item: -item[1])
    shown = ", ".join(f"{name} {_bytes(n)}" for name, n in most if n > 0.05 * whole)
    seconds = whole / roofs.copy
    words = (
        f"{len(of.operators)} operators of PyTorch, a launch each: {_bytes(whole)} ({shown}) / "
        f"{number(roofs.copy / 1e12)} TB/s = {_us(seconds)}"
    )
    return seconds, [words]


def _name(launch: Launch) -> str:
    return launch.kernel + (
        f" (budget of {launch.budget}{', which differs in ' + ', '.join(launch.differs) if launch.differs else ''})"
        if launch.budget
        else " (no budget of this launch)"
    )


def _merged(timed: Sequence[tuple[str, Timed]]) -> Iterable[str]:
    """The arithmetic of the launches; equal ones once."""
    count: dict[tuple[str, str], int] = {}
    for name, t in timed:
        words = f"{t.words}; {100 * t.roof / t.seconds:.0f} % of its roof"
        count[name, words] = count.get((name, words), 0) + 1
    for (name, words), n in count.items():
        yield f"{f'{n} x ' if n > 1 else ''}{name}: {words}"


def floor(cost: Cost, which: str, roofs: Roofs, dtype: str = "bfloat16") -> float:
    """Seconds of the roof: a copy of the same bytes, which is a launch too, or the products of a
    type.
    """
    halves = ("forward", "backward") if which == "forward_backward" else (which,)
    total = 0.0
    for half in halves:
        bytes_, flops = traffic(cost, half)
        copy = bytes_ / roofs.copy + roofs.launch if bytes_ else 0.0
        total += max(copy, flops / roofs.flops[dtype])
    return total


def _bytes(n: float) -> str:
    return f"{number(n / 1e6)} MB"


def _us(seconds: float) -> str:
    return f"{number(seconds * 1e6)} us" if seconds < 1e-3 else f"{number(seconds * 1e3)} ms"
