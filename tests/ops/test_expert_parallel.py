"""Experts sharded over processes (gloo) against all of them in one: results, gradients, and
communication.
"""

import contextlib
import sys
import tempfile
import types
import warnings

import pytest
import torch
import torch.distributed as dist
from helpers import DEVICE, join_group, operators_of, processes
from torch.utils.checkpoint import checkpoint

from tilewright.core.registry import ImplementationUnavailable
from tilewright.core.torch_names import uncompiled
from tilewright.ops.activation.gate import Gate
from tilewright.ops.moe import expert_parallel as ep
from tilewright.ops.moe.moe import moe_mlp
from tilewright.selection import use

E, H, I = 8, 12, 10

# name -> tokens per rank (repeated as needed), experts per token, and the routing
CASES = {
    "uniform": ((9, 7), 3, "uniform"),
    "one_token_a_rank": ((1, 1), 2, "uniform"),
    "idle_experts": ((8, 5), 2, "idle"),  # half of the experts, all of the first rank's
    "overloaded": ((6, 11), 2, "overloaded"),  # every token chooses expert 5
    "one_expert_has_all": ((7, 6), 1, "one"),
    "no_tokens_on_a_rank": ((0, 9), 2, "uniform"),
    "no_tokens": ((0, 0), 2, "uniform"),
    "without_an_expert": ((8, 9), 3, "sentinels"),  # some slots, and all of the first token's
    "every_expert": ((3, 4), E, "uniform"),
}


def problem(name, world):
    """Tokens of all ranks, and weights of all experts."""
    tokens, K, kind = CASES[name]
    sizes = [tokens[r % len(tokens)] for r in range(world)]
    g = torch.Generator().manual_seed(len(name))
    T = sum(sizes)
    scores = torch.rand(T, E, generator=g)
    if kind == "idle":
        scores[:, : E // 2] -= 2
    if kind == "overloaded":
        scores[:, 5] += 2
    if kind == "one":
        scores[:, E - 1] += 2
    index = scores.topk(K, -1).indices
    if kind == "sentinels":
        index[torch.rand(T, K, generator=g) < 0.4] = E
        index[0] = E
    whole = {
        "x": torch.randn(T, H, generator=g),
        "gate_up_proj": torch.randn(E, 2 * I, H, generator=g) * H**-0.5,
        "down_proj": torch.randn(E, H, I, generator=g) * I**-0.5,
        "expert_index": index,
        "expert_weight": torch.rand(T, K, generator=g),
    }
    return sizes, whole, torch.randn(T, H, generator=g)


def own(whole, sizes, rank):
    """A rank's part of each tensor: its tokens, its experts."""
    n = len(sizes)
    return {
        k: v.chunk(n)[rank].clone() if "proj" in k else v.split(sizes)[rank].clone()
        for k, v in whole.items()
    }


def leaves(parts):
    return [v.requires_grad_() for v in parts.values() if v.is_floating_point()]


def in_pieces(x, gate_up_proj, down_proj, expert_index, expert_weight, group):
    there = ep.dispatch(x, expert_index, expert_weight, E, group)
    assert bool((there.expert_index.diff(dim=0) >= 0).all())
    return ep.combine(moe_mlp(there.rows, gate_up_proj, down_proj, *there[1:3]), there.plan)


def with_biases(gate_up_proj, down_proj):
    """gpt-oss's gate, and biases through which gradients reach the weights."""
    return {
        "gate_up_bias": gate_up_proj.sum(-1),
        "down_bias": down_proj.sum(-1),
        "gate": Gate(alpha=1.7, limit=0.5, up_limit=0.5, up_offset=1.0),
    }


WAYS = {
    "biased": lambda *a: ep.ep_moe_mlp(*a, **with_biases(*a[1:3])),
    "biased_eager": lambda *a: ep.ep_moe_mlp(*a, dispatch="eager", **with_biases(*a[1:3])),
    "alltoall": ep.ep_moe_mlp,
    "eager": lambda *a: ep.ep_moe_mlp(*a, dispatch="eager"),
    "recompute": lambda *a: ep.ep_moe_mlp(*a, recompute=True),
    "pieces": in_pieces,
}


class Count:
    """Counts all-to-alls, rows sent, and host reads of tensors."""

    def __init__(self):
        self.calls, self.rows, self.reads = [], [], 0

    def __enter__(self):
        self.real, self.tolist = dist.all_to_all_single, torch.Tensor.tolist

        def counted(out, into, *args, **kwargs):
            self.calls.append(tuple(into.shape))
            return self.real(out, into, *args, **kwargs)

        def read(tensor):
            self.reads += 1
            return self.tolist(tensor)

        dist.all_to_all_single, torch.Tensor.tolist = counted, read
        return self

    def __exit__(self, *_):
        dist.all_to_all_single, torch.Tensor.tolist = self.real, self.tolist


def _everything(rank, world, folder):
    torch.set_num_threads(1)
    group = join_group(rank, world, folder)
    for name in CASES:
        sizes, whole, dy = problem(name, world)
        for way, call in WAYS.items():
            parts = own(whole, sizes, rank)
            wanted = leaves(parts)
            y = call(*parts.values(), group)
            grads = torch.autograd.grad(y, wanted, dy.split(sizes)[rank])
            torch.save([y.detach(), *grads], f"{folder}/{name}-{way}-{rank}")
    _what_travels(rank, world, group)
    _through_deepep(rank, world, group)
    if rank == 0:  # before any communication, or the others would wait
        _refusals(group)
    dist.barrier()
    dist.destroy_process_group()


def _what_travels(rank, world, group):
    sizes, whole, dy = problem("every_expert", world)
    parts, dy = own(whole, sizes, rank), dy.split(sizes)[rank]
    T, K = parts["expert_index"].shape
    for recompute in (False, True):
        wanted = leaves(parts)
        with Count() as forward:
            y = ep.ep_moe_mlp(*parts.values(), group, recompute=recompute)
        # Every rank has experts for every token; each row is sent once per rank, not once per
        # expert.
        assert forward.calls == [(world, 2), (T * world, H), (T * world, 2 * K), (sum(sizes), H)]
        assert forward.reads == 1
        with Count() as backward:
            torch.autograd.grad(y, wanted, dy)
        assert backward.calls == [(T * world, H), (sum(sizes), H), (sum(sizes), K)]
        assert backward.reads == 0
    for reentrant in (False, True):  # rows are sent again, sizes are not
        y = checkpoint(
            lambda *a: ep.ep_moe_mlp(*a[:-1], group, kept=a[-1]),
            *parts.values(),
            [],
            use_reentrant=reentrant,
        )
        with Count() as backward:
            y.backward(dy)
        again = [(T * world, H), (T * world, 2 * K), *([(sum(sizes), H)] if reentrant else [])]
        assert sorted(backward.calls) == sorted(
            [*again, (T * world, H), (sum(sizes), H), (sum(sizes), K)]
        )
        assert backward.reads == 0
    for x_needs, weight_needs, calls in ((True, False, 2), (False, True, 2), (False, False, 1)):
        parts["x"].requires_grad_(x_needs)
        parts["expert_weight"].requires_grad_(weight_needs)
        y = ep.ep_moe_mlp(*parts.values(), group)
        with Count() as backward:
            y.backward(dy)
        assert len(backward.calls) == calls
    with torch.no_grad(), Count() as forward:
        ep.ep_moe_mlp(*parts.values(), group, recompute=True)
    assert len(forward.calls) == 4
    whole_layer, alone = (
        kept(lambda again=again: ep.ep_moe_mlp(*parts.values(), group, recompute=again))
        for again in (False, True)
    )
    # Recomputed: one row per received token, not one per expert; the rest is 4 and 8 bytes per
    # slot.
    M, slots = sum(sizes), sum(sizes) * K
    parameters = sum(parts[n].numel() * 4 for n in ("gate_up_proj", "down_proj"))
    assert alone - parameters <= 4 * M * H + 64 * slots + 64 * T * K, (alone, parameters)
    assert whole_layer - alone >= 4 * (M * (E // world) - M) * H
    wanted = leaves(parts)
    small = {**parts, "expert_index": parts["expert_index"].int()}
    y, narrow = (ep.ep_moe_mlp(*p.values(), group) for p in (parts, small))
    assert torch.equal(y, narrow)
    for way in ("alltoall", "eager"):
        y = ep.ep_moe_mlp(*parts.values(), group, dispatch=way)
        try:
            torch.autograd.grad(y, wanted, dy, create_graph=True)
            raise AssertionError("a second derivative would be made up")
        except RuntimeError as error:
            assert "differentiable once" in str(error), error


def kept(call):
    """Bytes that a call saves for backward."""
    seen = {}

    def pack(t):
        seen[t.untyped_storage().data_ptr()] = t.numel() * t.element_size()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = call()
    assert y.requires_grad
    return sum(seen.values())


def _refusals(group):
    sizes, whole, _ = problem("uniform", dist.get_world_size(group))
    parts = own(whole, sizes, 0)
    index, weight = parts["expert_index"], parts["expert_weight"]
    for change, error, message in (
        ({"x": parts["x"][0]}, ValueError, r"x must have shape \[T, H\]"),
        ({"x": parts["x"][1:]}, ValueError, r"expert_index must have shape \[T, K\], where T"),
        ({"gate_up_proj": parts["gate_up_proj"][0]}, ValueError, "gate_up_proj must have shape"),
        ({"expert_weight": weight[:, 1:]}, ValueError, "expert_weight must have shape"),
        ({"expert_index": index + E}, IndexError, f"accepted are 0 to {E - 1}"),
        ({"expert_index": index.double()}, TypeError, "expert_index must be int32 or int64"),
    ):
        with pytest.raises(error, match=message):
            ep.ep_moe_mlp(*{**parts, **change}.values(), group)
    with pytest.raises(ValueError, match="dispatch must be one of"):
        ep.ep_moe_mlp(*parts.values(), group, dispatch="ring")
    with pytest.raises(ValueError, match="num_experts must be a multiple of the group's"):
        ep.dispatch(parts["x"], index, weight, E + 1, group)
    if ep.no_deepep("cpu"):
        sentence = r"ep_moe_mlp\[deepep\]: (the package 'deep_ep' is not inst|DeepEP takes CUDA)"
        with pytest.raises(ImplementationUnavailable, match=sentence):
            ep.ep_moe_mlp(*parts.values(), group, dispatch="deepep")


class StandIn:
    """DeepEP's Buffer as documented, over all_gather: checks that the calls fit together, not
    DeepEP itself.
    """

    made, num_sms = [], None

    def __init__(self, group, num_nvl_bytes, num_rdma_bytes):
        self.group, self.n, self.rank = group, dist.get_world_size(group), dist.get_rank(group)
        StandIn.made.append((num_nvl_bytes, num_rdma_bytes))

    @staticmethod
    def set_num_sms(number):
        StandIn.num_sms = number

    @staticmethod
    def get_dispatch_config(ranks):
        return types.SimpleNamespace(
            get_nvl_buffer_size_hint=lambda row, n: 1000 * row * n,
            get_rdma_buffer_size_hint=lambda row, n: 0,
        )

    get_combine_config = get_dispatch_config

    def get_dispatch_layout(self, topk_idx, num_experts):
        L = num_experts // self.n
        in_rank = torch.stack(
            [((topk_idx >= r * L) & (topk_idx < (r + 1) * L)).any(1) for r in range(self.n)], 1
        )
        per_expert = torch.stack([(topk_idx == e).sum() for e in range(num_experts)])
        return in_rank.sum(0), None, per_expert, in_rank, None

    def everyone(self, t):
        found = [None] * self.n
        dist.all_gather_object(found, t, group=self.group)
        return found

    def dispatch(
        self,
        x,
        handle=None,
        topk_idx=None,
        topk_weights=None,
        num_tokens_per_rank=None,
        num_tokens_per_rdma_rank=None,
        is_token_in_rank=None,
        num_tokens_per_expert=None,
    ):
        assert x.dtype == torch.bfloat16 and x.is_contiguous()
        mine = [m[:, self.rank] for m in (handle or self.everyone(is_token_in_rank))]
        received = torch.cat([t[m] for t, m in zip(self.everyone(x), mine, strict=True)])
        if handle is not None:
            return received, None, None, None, None, None
        assert topk_idx.dtype == torch.int64 and topk_weights.dtype == torch.float32
        handle, L = self.everyone(is_token_in_rank), num_tokens_per_expert.shape[0] // self.n
        index, weight = (
            torch.cat([t[m] for t, m in zip(self.everyone(own), mine, strict=True)])
            for own in (topk_idx, topk_weights)
        )
        index -= self.rank * L
        away = (index < 0) | (index >= L)
        counts = [int((index == e).sum()) for e in range(L)]
        index, weight = index.masked_fill(away, -1), weight.masked_fill(away, 0)
        return received, index, weight, counts, handle, None

    def combine(self, x, handle, topk_weights=None):
        assert x.dtype == torch.bfloat16 and x.is_contiguous()
        weights = None if topk_weights is None else self._sum(topk_weights, handle)
        return self._sum(x, handle), weights, None

    def _sum(self, t, handle):
        total = torch.zeros(handle[self.rank].shape[0], t.shape[1])
        for r, theirs in enumerate(self.everyone(t)):
            parts = theirs.split([int(m[:, r].sum()) for m in handle])
            total[handle[self.rank][:, r]] += parts[self.rank].float()
        return total.to(t.dtype)


def _through_deepep(rank, world, group):
    sys.modules["deep_ep"] = types.SimpleNamespace(Buffer=StandIn)
    real, ep.no_deepep = ep.no_deepep, lambda device_type: None
    options = ep.DeepEP(buffer_size_gb=1e-3, num_sms=6)
    for name in CASES:
        sizes, whole, dy = problem(name, world)
        parts = {
            k: v if k == "expert_weight" else v.bfloat16() if v.is_floating_point() else v
            for k, v in own(whole, sizes, rank).items()
        }
        wanted, found = leaves(parts), []
        for dispatch in ("alltoall", "deepep"):
            y = ep.ep_moe_mlp(*parts.values(), group, dispatch=dispatch, deepep=options)
            found.append([y, *torch.autograd.grad(y, wanted, dy.split(sizes)[rank].bfloat16())])
        for a, b in zip(*found, strict=True):  # the order of sums over ranks may differ
            torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)
    assert StandIn.made == [(10**6 // 128 * 128, 0)] and StandIn.num_sms == 6
    with pytest.raises(TypeError, match="x must be bfloat16 for DeepEP"):
        ep.ep_moe_mlp(*own(whole, sizes, rank).values(), group, dispatch="deepep")
    with pytest.raises(ValueError, match=r"deepep\.buffer_size_gb must be at least \S+ for"):
        ep.ep_moe_mlp(
            *parts.values(), group, dispatch="deepep", deepep=ep.DeepEP(buffer_size_gb=1e-9)
        )
    del sys.modules["deep_ep"]
    ep.no_deepep = real


def close(found, want, what):
    assert found.shape == want.shape, what
    if want.numel():
        assert (found - want).abs().max() <= 1e-5 * max(want.abs().max(), 1e-6), what


@pytest.mark.parametrize("world", [2, 4])
def test_spread_experts_equal_one_process(world):
    if DEVICE == "cuda":
        pytest.skip("gloo takes CPU tensors: run without a CUDA device")
    with tempfile.TemporaryDirectory() as folder:
        processes(world, _everything, folder)
        for name in CASES:
            _, whole, dy = problem(name, world)
            double = {k: v.double() if v.is_floating_point() else v for k, v in whole.items()}
            wanted = leaves(double)
            biases = with_biases(double["gate_up_proj"], double["down_proj"])
            expected_of = {}
            for biased, options in ((False, {}), (True, biases)):
                y = moe_mlp(*double.values(), **options, implementation="eager")
                grads = torch.autograd.grad(y, wanted, dy.double())
                expected_of[biased] = [y.detach(), *grads]
            for way in WAYS:
                expected = expected_of[way.startswith("biased")]
                parts = [torch.load(f"{folder}/{name}-{way}-{r}") for r in range(world)]
                for i, what in enumerate(("y", *(f"d{n}" for n in whole if n != "expert_index"))):
                    close(torch.cat([part[i] for part in parts]), expected[i], (name, way, what))


@pytest.fixture
def alone():
    """A group of this process, on the tests' device."""
    dist.init_process_group(
        "nccl" if DEVICE == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1
    )
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.parametrize("name", [n for n in CASES if CASES[n][0] != (0, 0)])
def test_a_group_of_one_equals_the_layer(name, alone):
    """The rank sends to itself. On a GPU, forward synchronizes once and backward never."""
    _, whole, dy = problem(name, 2)
    whole, dy = {k: v.to(DEVICE) for k, v in whole.items()}, dy.to(DEVICE)
    wanted = leaves(whole)
    y = moe_mlp(*whole.values())
    expected = [y, *torch.autograd.grad(y, wanted, dy)]
    waits = []
    for _ in range(2):  # the first call compiles
        with waiting() as forward:
            y = ep.ep_moe_mlp(*whole.values(), alone)
        with waiting() as backward:
            found = [y, *torch.autograd.grad(y, wanted, dy)]
        waits = [len(forward), len(backward)]
    assert waits == ([1, 0] if DEVICE == "cuda" else [0, 0])
    for a, b in zip(found, expected, strict=True):
        assert (a - b).abs().max() <= 1e-5 * max(b.abs().max(), 1e-6)


@pytest.mark.skipif(DEVICE != "cpu", reason="C++ is for the CPU")
def test_a_name_fixes_its_parts_whatever_is_pinned(alone):
    """The experts' parts, and the sort and sums of the exchange."""
    _, whole, _ = problem("uniform", 2)
    leaves(whole)

    def both_passes():
        ep.ep_moe_mlp(*whole.values(), alone, implementation="cpp").sum().backward()

    with use("eager"):
        ran = operators_of(both_passes)
    names = {n.removesuffix("_forward").removesuffix("_backward") for n in ran}
    # The exchange, its pairs and the experts; and in both passes the experts and their pairs (sums
    # over fewer rows than positions, those of the exchange here, are PyTorch's).
    assert ran["permute_cpp_sort"] == 3 and ran["permute_cpp_collect"] == 4
    gemm = {f"grouped_gemm_cpp{n}" for n in ("", "_backward_x", "_backward_weight")}
    rows = {"permute_cpp_sort", "permute_cpp_collect", "checked_expert_index"}
    assert names == gemm | rows | {"moe_mlp_cpp", "act_mul_cpp"}


@contextlib.contextmanager
def waiting():
    """The operations inside that synchronize with a CUDA device."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = []
        if DEVICE == "cuda":
            torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            if DEVICE == "cuda":
                torch.cuda.set_sync_debug_mode("default")
            found += [w for w in caught if "synchronizing" in str(w.message)]


def test_a_layer_with_collectives_stays_out_of_compiled_code(alone):
    _, whole, dy = problem("uniform", 2)
    parts = {k: v.to(DEVICE) for k, v in whole.items()}
    wanted = leaves(parts)
    compiled = torch.compile(ep.ep_moe_mlp, backend="eager")
    plain, compiled = (f(*parts.values(), alone) for f in (ep.ep_moe_mlp, compiled))
    assert torch.equal(plain, compiled)
    pair = (torch.autograd.grad(y, wanted, dy.to(DEVICE)) for y in (plain, compiled))
    assert all(map(torch.equal, *pair))


def test_results_of_other_rows_are_refused(alone):
    x, index, weight = (problem("uniform", 2)[1][k] for k in ("x", "expert_index", "expert_weight"))
    rows, _, _, plan = ep.dispatch(x.to(DEVICE), index.to(DEVICE), weight.to(DEVICE), E, alone)
    P = rows.shape[0]
    assert ep.combine(rows, plan).shape == x.shape
    for wrong in (rows[1:], torch.cat((rows, rows[:1])), rows.flatten()):
        sentence = rf"rows must have shape \[{P}, H\], as dispatched, got \[{wrong.shape[0]}"
        with pytest.raises(ValueError, match=sentence):
            ep.combine(wrong, plan)


def test_what_stays_out_of_compiled_code_is_called_between_two_graphs():
    graphs, compiling = [], []

    @uncompiled
    def middle(x):
        compiling.append(torch.compiler.is_compiling())
        return x * 2

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(lambda x: middle(x + 1) - 1, backend=backend)
    assert compiled(torch.ones(2)).tolist() == [3, 3]
    assert len(graphs) == 2 and compiling == [False]
