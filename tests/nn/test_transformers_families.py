"""Every small-buildable language model of transformers, with attention by tilewright: it has the
logits of transformers' eager attention or is rejected in one sentence. Likewise for every class of
fused experts.
"""

import collections
import importlib
import inspect
import pathlib
import re

import pytest
import torch
from helpers import keep_tables
from small_models import AUTO, build, kinds

from tilewright import ImplementationUnavailable
from tilewright.integrations import transformers as integration

pytestmark = pytest.mark.packages

TESTED = "5.23"  # the version of transformers for the numbers and names below
# Families with eager's logits, computed here; those that are rejected; and those that have their
# own attention, or none, and never request one. Other versions have most of the first.
COUNTED = {
    "causal": {"computed": 140, "refused": 13, "not asked": 24},
    "masked": {"computed": 22, "refused": 6, "not asked": 22},
    "seq2seq": {"computed": 22, "refused": 8, "not asked": 4},
}
# whose masks alone say who sees whom, and those that compute with their mask or add keys of their
# own
COMPUTED = ("nllb-moe", "pegasus_x", "qwen2_moe", "phimoe", "afmoe", "jetmoe", "llama4_text")
LEFT = ("deepseek_v4", "doge", "hy_v4", "deepseek_v32", "glm_moe_dsa", "axk2", "t5gemma2")
NAMED = dict.fromkeys(COMPUTED, "computed") | dict.fromkeys(LEFT, "refused")

# ---- what they compute

FIRST = [7, 12, 9, 33, 21, 40, 18, 25]
TOKENS = torch.tensor([[*FIRST, 11], [*FIRST, 14]])
KEPT = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 1], [1] * 9])


def logits(model, padded):
    """The logits of rows that differ in the last token, without a mask or, if padded, each with
    padding on the left and without: [rows, 9, vocabulary], 0 at padding; and how far the last token
    moves the earlier logits.
    """
    tokens, mask = (TOKENS.repeat_interleave(2, 0), KEPT.repeat(2, 1)) if padded else (TOKENS, None)
    inputs = {"input_ids": tokens, "attention_mask": mask}
    kept = torch.ones_like(tokens) if mask is None else mask
    if model.config.is_encoder_decoder:
        inputs |= {"input_ids": tokens[:1].expand_as(tokens), "decoder_input_ids": tokens}
        kept = torch.ones_like(tokens)
    if "use_cache" in inspect.signature(model.forward).parameters:
        inputs["use_cache"] = False
    with torch.no_grad():
        found = model(**inputs)
    found = getattr(found, "logits", found[0])
    if found.shape[1] == tokens.shape[1]:
        found = found * kept[..., None]
    one, other = found.chunk(2)
    return found, (one - other)[:, :-1].abs().max().item()


# Whose eager attention is no truth: Moshi's of 5.17 sees later tokens where there is no mask.
TRUTH = {"moshi": "sdpa"}


@pytest.fixture
def attentions(monkeypatch):
    """Records calls of attention; transformers' tables are restored after the test."""
    pytest.importorskip(
        "transformers", minversion="5.17", reason="needs transformers 5.17 or later"
    )
    keep_tables(monkeypatch)
    integration.register()
    seen, compute = [], integration.attention.attention
    monkeypatch.setattr(
        integration.attention, "attention", lambda *a, **k: (seen.append(k), compute(*a, **k))[1]
    )
    return seen


def check(model, attentions):
    """Returns "computed", "refused" or "not asked". Fails where logits differ from eager's, or a
    token sees a later one.
    """
    expected = [logits(model, padded) for padded in (False, True)]
    model.set_attn_implementation("tilewright")
    attentions.clear()
    outcome = "computed"
    for padded, (truth, moved) in enumerate(expected):
        try:
            found, moves = logits(model, padded)
        except ImplementationUnavailable as error:
            said = str(error)
            assert "\n" not in said and 'attn_implementation="tilewright"' in said, error
            outcome = "refused"
            continue
        # 1e-4 of the largest: about a hundred float32 roundings in another order, after two to four
        # layers.
        error = ((found - truth).abs().max() / truth.abs().max()).item()
        assert error <= 1e-4, f"padded {padded}: logits differ from eager's by {error:.1e}"
        assert moves <= 1e-5 or moved > 1e-5, f"padded {padded}: {moves:.1e} of a later token"
    return outcome if outcome == "refused" or attentions else "not asked"


@pytest.mark.parametrize("head", AUTO)
def test_every_family_has_eagers_logits_or_is_refused(attentions, head):
    import transformers

    outcomes, failures, unbuilt = {}, [], []
    for kind in kinds(head):
        try:
            model = build(kind, head, TRUTH.get(kind, "eager"))
            logits(model, False)
        except Exception as error:
            unbuilt.append(f"{kind}: {type(error).__name__}: {error}")
            continue
        try:
            outcomes[kind] = check(model, attentions)
        except Exception as error:
            failures.append(f"{kind}: {type(error).__name__}: {error}")
    assert not failures, "\n".join(failures)
    named = {kind: NAMED[kind] for kind in outcomes if kind in NAMED}
    assert {kind: outcomes[kind] for kind in named} == named
    found = collections.Counter(outcome.partition(":")[0] for outcome in outcomes.values())
    if transformers.__version__.startswith(TESTED):
        assert not unbuilt, "\n".join(["not in LEFT_OUT:", *unbuilt])
        assert found == COUNTED[head]
    assert found["computed"] >= 0.8 * COUNTED[head]["computed"], (outcomes, unbuilt)


# ---- experts

# Values of configuration fields that experts read, by name; limits low enough to matter.
EXPERTS = {
    re.compile(names): value
    for names, value in {
        r".*expert.*": 4,
        r".*latent.*": None,
        r".*intermediate.*": 24,
        r".*(hidden_size|dim)": 32,
        r"swiglu_limit": 0.71,
        r".*softcap": 1.3,
        r"swiglu_alpha": 1.702,
        r".*eps": 1e-6,
    }.items()
}
# Not of the form activation(gate) * up.
REFUSED = {"nemotron_h": "have no gate", "muse_spark": "normalize what each of them gives"}


def experts_of(module):
    """The experts that a module of transformers' models defines, with weights large enough to reach
    the limits.
    """
    from transformers import PreTrainedConfig

    classes = [v for v in vars(module).values() if isinstance(v, type)]
    configs = [c for c in classes if issubclass(c, PreTrainedConfig)]
    settings = next(c for c in configs if c is not PreTrainedConfig)
    # The activation is the family's default.
    activations = {
        n: v
        for c in configs
        for n, v in vars(c).items()
        if re.fullmatch(r".*hidden_act(ivation)?", n) and isinstance(v, str)
    }

    class Settings:
        model_type, _experts_implementation = settings.model_type, "eager"

        def __getattr__(self, name):
            if name in activations:
                return activations[name]
            for names, value in EXPERTS.items():
                if names.fullmatch(name):
                    return value
            raise AttributeError(name)

    for cls in vars(module).values():
        own = isinstance(cls, type) and cls.__module__ == module.__name__
        if own and hasattr(cls, "_apply_gate"):
            experts, g = cls(Settings()), torch.Generator().manual_seed(0)
            with torch.no_grad():
                for p in experts.parameters():
                    p.copy_(torch.randn(p.shape, generator=g) * 0.3)
            yield experts


def result(experts, implementation):
    experts.config._experts_implementation = implementation
    g = torch.Generator().manual_seed(1)
    x = torch.randn(9, 32, generator=g).requires_grad_()
    weight = torch.rand(9, 2, generator=g).requires_grad_()
    index = torch.rand(9, 4, generator=g).topk(2, -1).indices
    y, dy = experts(x, index, weight), torch.randn(9, 32, generator=g)
    return y, *torch.autograd.grad(y, (x, weight, *experts.parameters()), dy)


def test_every_familys_experts_are_computed_whatever_their_activation_and_biases(attentions):
    import transformers

    found, wrong = {}, []
    for path in sorted(pathlib.Path(transformers.__file__).parent.glob("models/*/modeling_*.py")):
        if "@use_experts_implementation" not in path.read_text():
            continue
        for experts in experts_of(
            importlib.import_module(f"transformers.models.{path.parent.name}.{path.stem}")
        ):
            name = type(experts).__name__
            truth = result(experts, "eager")
            try:
                ours = result(experts, "tilewright")
            except ImplementationUnavailable as error:
                found[path.parent.name] = str(error)
                continue
            found[path.parent.name] = None
            # 1e-5 of a tensor's norm: a few dozen float32 roundings in another order.
            for i, (a, b) in enumerate(zip(ours, truth, strict=True)):
                if not (a - b).norm() <= 1e-5 * b.norm():
                    wrong.append(f"{name}, tensor {i}: {(a - b).norm() / b.norm():.1e}")
    assert not wrong, "\n".join(wrong)
    refused = {kind: reason for kind, reason in found.items() if reason}
    assert refused.keys() <= REFUSED.keys(), refused
    for kind, reason in refused.items():
        assert REFUSED[kind] in reason and "\n" not in reason, reason
        assert re.match(r'\S+: experts_implementation="tilewright" cannot compute \S+, ', reason)
    if transformers.__version__.startswith(TESTED):
        assert len(found) == 64 and refused.keys() == REFUSED.keys()
