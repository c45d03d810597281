"""The cases of `route`."""

from __future__ import annotations

import torch

from tilewright.core.registry import Case, Cost
from tilewright.ops import cases


def _separate_near_ties(logits, bias, groups):
    """Replaces rows in which two choices differ only by rounding: there any implementation may
    choose by its own rounding. A thousandth of a score's spacing is far more than the float32
    error.
    """
    s = torch.sigmoid(logits.double()) + (0 if bias is None else bias.double())
    near = torch.zeros(s.shape[0], dtype=torch.bool, device=s.device)
    of_groups = s.unflatten(1, (groups, -1))
    values = of_groups.topk(min(2, of_groups.shape[-1]), dim=-1).values.sum(-1)
    for v in (s, values):
        if v.shape[1] > 1:
            near |= v.sort(dim=1).values.diff(dim=1).amin(1) < 2e-6
    good = (~near).to(torch.uint8).argmax(0, keepdim=True)  # the first
    return torch.where(near[:, None], logits[good], logits)


def case(
    name,
    T,
    E,
    k,
    *,
    biased=False,
    strided=False,
    ties=False,
    skew=False,
    masked=False,
    tags=cases.CONTRACT,
    **options,
):
    replayed = options.pop("replayed", False)
    sigmoid, groups = options.get("score") == "sigmoid", options.get("groups", 1)

    def make(device, dtype, seed):
        new = {
            "device": device,
            "dtype": dtype,
            "gen": cases.generator(device, seed),
            "requires_grad": False,
        }
        x = cases.randn(T, 2 * E if strided else E, **new)[:, :E]
        bias = None
        if biased:
            bias = cases.randn(E, **{**new, "dtype": torch.float32}, scale=0.1)
        if sigmoid or biased:
            x.copy_(_separate_near_ties(x, bias, groups)) if T else None
        if ties:  # a few values only
            x.mul_(1.5).round_()
        if skew:  # the last expert gets all tokens and some get none
            x[:, -1] += 12
            x[:, : E // 2] -= 12
        if masked:
            x[:, 1::3] = float("-inf")
        recorded = {}
        if replayed:
            draw = torch.rand(T, E, device=device, generator=new["gen"])
            recorded = {"expert_index": draw.topk(k).indices}
        return {
            "logits": x.requires_grad_(),
            "k": k,
            **({"bias": bias} if biased else {}),
            **recorded,
            **options,
        }

    # Logits in; out: int64 indices and fp32 weights; backward: those and a gradient.
    def cost(itemsize):
        return Cost(
            T * E * itemsize + 12 * T * k,
            2 * T * E * itemsize + 12 * T * k,
            T * E * (8 + k),
            T * E * 16,
        )

    return Case(name, make, cost, tags)


# E, K and options of models' routers, and tokens of timed cases: on a GPU enough for the permuted
# rows to be large.
_DEEPSEEK = {
    "score": "sigmoid",
    "renormalize": True,
    "biased": True,
    "groups": 8,
    "topk_groups": 4,
    "scale": 2.5,
}
MODELS = {
    "qwen3-30b-a3b": (128, 8, {"renormalize": True}),
    "mixtral-8x7b": (8, 2, {"renormalize": True}),
    "deepseek-v3": (256, 8, _DEEPSEEK),
}


def all_cases():
    small = [
        case("ragged", 37, 12, 3),
        case("renormalized", 9, 16, 4, renormalize=True, scale=0.5),
        case("sigmoid", 21, 10, 2, score="sigmoid"),
        case("deepseek", 13, 24, 4, **{**_DEEPSEEK, "groups": 4, "topk_groups": 2}),
        case("bias_softmax", 11, 9, 2, biased=True),
        case("groups_softmax", 10, 15, 3, groups=5, topk_groups=2),
        case("groups_sigmoid", 10, 12, 3, score="sigmoid", groups=3, topk_groups=2),
        case("groups_of_one", 8, 6, 2, biased=True, groups=6, topk_groups=3),
        case("no_tokens", 0, 8, 2),
        case("one_token", 1, 5, 2),
        case("one_expert", 6, 1, 1, renormalize=True),
        case("k_is_1", 17, 8, 1),
        case("k_is_all", 7, 6, 6, renormalize=True),
        case("strided", 12, 20, 2, strided=True),
        case("skewed", 25, 8, 2, skew=True),
        case("masked", 8, 13, 2, masked=True, renormalize=True),
        # Larger than gradcheck accepts: the op is not differentiable at ties.
        case("ties", 320, 10, 4, ties=True),
        case("rounded", 50, 6, 2, renormalize=True, round_to=4),
        case("replayed", 19, 12, 3, replayed=True, renormalize=True, scale=0.5),
        case("replayed_sigmoid", 9, 10, 2, replayed=True, score="sigmoid", biased=True, groups=5),
        case("many_experts", 3, 700, 8, renormalize=True),
    ]
    timed = [
        case(name, cases.TOKENS[device], E, k, tags=tags, **options)
        for device, tags in (("cuda", cases.CUDA), ("cpu", cases.CPU))
        for name, (E, k, options) in MODELS.items()
    ]
    return (*small, *timed)
