"""tilewright.integrations.trl: TRL's trainers have the loss, the metrics and the gradients of eager
logits, in each layout.
"""

import copy
import functools

import pytest
import torch
from helpers import forked_processes, join_group

pytest.importorskip("trl", reason="needs trl, of the extra trl")

import trl_rows as rows
from trl.trainer.utils import add_fused_lm_head
from trl_rows import KINDS, LAYOUTS, LORA, eager_step, planted, step

from tilewright.core.registry import ImplementationUnavailable
from tilewright.integrations.trl import accelerate_trainer, build_trainer, head, policy, trainers
from tilewright.ops import CISPO, PPO, DrGRPO, GuardedPPO, Reinforce
from tilewright.ops.loss.head import Chunks

pytestmark = pytest.mark.packages

# Errors are relative to the norm: gradients of one layer have a few roundings of sums of 30 tokens.
SLACK = 2e-6
HEADS = {"dense": None, "lora": LORA}
ALL = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")


@functools.cache
def reference(kind, lora):
    """(float64, float32): TRL's trainer in one process over eager logits of the head's forward."""
    options = {"lora": HEADS[lora]}
    return eager_step(kind, dtype=torch.float64, **options), eager_step(kind, **options)


def worst(found, expected):
    """{name: error relative to the norm; of metrics, some of which are small differences, to 1}."""
    assert found.keys() == expected.keys()
    sizes = {n: t.norm().clamp_min(1.0 if "metric" in n else 1e-9) for n, t in expected.items()}
    return {n: float((found[n].double() - t).norm() / sizes[n]) for n, t in expected.items()}


def assert_equal(found, kind, lora, slack=SLACK):
    """Within the numerics contract of the reference."""
    truth, eager = reference(kind, lora)
    mine, theirs = worst(found, truth), worst(eager, truth)
    for name, error in mine.items():
        assert error <= 2 * theirs[name] + slack, f"{name}: {error:.2e}, eager {theirs[name]:.2e}"


# ---- the matrix: one process


@pytest.mark.parametrize("lora", HEADS)
@pytest.mark.parametrize("kind", KINDS)
def test_one_process(kind, lora):
    assert_equal(step(kind, lora=HEADS[lora]), kind, lora)


@pytest.mark.parametrize("kind", KINDS)
def test_trl_is_the_reference(kind):
    """The reference's eager logits have TRL's own results, where TRL computes them."""
    assert_equal(step(kind, ours=False), kind, "dense")


# ---- the policy loss in the head's forward

POLICIES = {
    "on_policy": ({"loss_type": "dapo"}, {}, Reinforce()),
    **{kind: ({"loss_type": kind}, {}, PPO()) for kind in ("dapo", "bnpo", "grpo", "dr_grpo")},
    "beta": (
        {"loss_type": "dapo", "use_bias_correction_kl": False},
        {"beta": 0.3},
        DrGRPO(clip=0.2, beta=0.3),
    ),
    "delta": ({"loss_type": "grpo", "delta": 1.5}, {}, GuardedPPO(dual_clip=1.5)),
    "cispo": ({"loss_type": "cispo", "epsilon_high": 1.1}, {}, CISPO(clip_high_threshold=1.1)),
}


def scored(rank, world):
    """Rollouts with other log-probabilities, on both sides of the thresholds; of a tool, too."""
    found = rollouts(rank, world)
    mask, g = found["completion_mask"], torch.Generator().manual_seed(3)
    found["old_per_token_logps"] = -3.5 - torch.rand(mask.shape, generator=g)
    found["ref_per_token_logps"] = -3.0 - torch.rand(mask.shape, generator=g)
    return found | {"tool_mask": mask.clone().index_fill_(1, torch.tensor([1]), 0)}


rollouts = rows.rollouts


@pytest.mark.parametrize("lora", HEADS)
@pytest.mark.parametrize("case", POLICIES)
def test_a_policys_gradient_is_computed_in_forward(case, lora):
    """That of TRL's own code on the path without it; logits are computed once."""
    options, after, formula = POLICIES[case]
    told, chunks, made = [], Chunks.__iter__, []

    def prepare(trainer):
        vars(trainer).update(after)

    def formula_of(*given):
        told.append(own(*given))
        return told[-1]

    own, found = policy.formula_of, {}
    for way in ("forward", "backward"):
        here = formula_of if way == "forward" else lambda *_: None
        counted = planted(
            Chunks, "__iter__", lambda self, way=way: (made.append(way), chunks(self))[1]
        )
        generated = planted(rows, "rollouts", rollouts if case == "on_policy" else scored)
        with planted(policy, "formula_of", here), counted, generated:
            found[way] = step(
                "grpo", entropy_coef=0.0, prepare=prepare, lora=HEADS[lora], **options
            )
    assert {*told} == {formula}
    assert made.count("forward") == 2 and made.count("backward") == 4  # two steps
    for name, error in worst(found["forward"], found["backward"]).items():
        # TRL adds up an estimate of the KL, 1.8e6 here, from exponentials of float32 differences.
        assert error <= (1e-4 if case == "beta" else 2 * SLACK), name
    if case not in ("on_policy", "cispo"):
        assert found["forward"]["metric clip_ratio/region_mean"] > 0


@pytest.mark.parametrize(
    "changes, after",
    [
        ({"entropy_coef": 0.1}, {}),
        ({"top_entropy_quantile": 0.5}, {}),
        ({"off_policy_mask_threshold": 0.5}, {}),
        ({"loss_type": "grpo", "importance_sampling_level": "sequence"}, {}),
        ({"loss_type": "sapo"}, {}),
        ({"use_bias_correction_kl": False}, {"beta": 0.1}),  # on policy
    ],
    ids=str,
)
def test_another_policy_stays_trls(changes, after, tmp_path):
    with rows.fresh():
        trainer = rows.build("grpo", rows.tiny(), tmp_path, **{"entropy_coef": 0.0, **changes})
        vars(trainer).update(after)
        assert policy.formula_of(trainer, rollouts(0, 1)) is None


def test_a_loss_that_is_not_that_of_its_settings_is_refused():
    said = pytest.raises(RuntimeError, match=r"is not that of its settings.*policy=False")
    wrong = planted(policy, "formula_of", lambda *_: PPO())
    with wrong, planted(rows, "rollouts", scored), said:
        step("grpo", entropy_coef=0.0, loss_type="sapo")


def test_bfloat16():
    """Under accelerate's autocast, which is around the reference model's forward already."""
    truth, eager = reference("dpo", "dense")[0], eager_step("dpo", bf16=True)
    own, autocast = head.statistics, []

    def recorded(*args):
        autocast.append(torch.is_autocast_enabled("cpu"))
        return own(*args)

    with planted(head, "statistics", recorded):
        found = step("dpo", bf16=True)
    assert autocast == [True] * 4  # policy and reference, two steps
    mine, theirs = worst(found, truth), worst(eager, truth)
    assert mine["lm_head.weight"] > 1e-4, "not in bfloat16"
    for name, error in mine.items():
        assert error <= 2 * theirs[name] + 2**-6, f"{name}: {error:.2e}, eager {theirs[name]:.2e}"


# ---- the matrix: two ranks


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("ranks"))
    forked_processes(2, rows.two_ranks, folder)
    return torch.load(f"{folder}/found.pt")


PAIRS = [(kind, layout) for layout in LAYOUTS for kind in KINDS[:3]]


@pytest.mark.parametrize("kind, layout", [p for p in PAIRS if p[1] != "fsdp2" or p[0] == "sft"])
def test_two_ranks(found, kind, layout):
    assert_equal(found[kind, layout], kind, "lora" if "lora" in layout else "dense")


@pytest.mark.parametrize("layout", rows.POLICY_LAYOUTS)
def test_a_policy_on_two_ranks(found, layout):
    alone = step("grpo", entropy_coef=0.0)
    for name, error in worst(found["policy", layout], alone).items():
        assert error <= 2 * SLACK, name


def test_a_sharded_vocabulary(found):
    """rl's functions on two ranks, with a shard each, have the results of one."""
    mine, whole = found["rl"], rows.of_rl(0, 1)
    assert mine.keys() == whole.keys()
    for name, t in whole.items():
        torch.testing.assert_close(mine[name], t, rtol=2e-6, atol=2e-6)


# ---- models


def fused(model, ours, labels, ids, num_items_in_batch=None, **options):
    """Outputs and gradients of the fused head, TRL's or this library's."""
    model = copy.deepcopy(model)
    add_fused_lm_head(model, outputs=ALL, **options)
    if ours:
        assert trainers.fuse(model) == ALL
    count = {} if num_items_in_batch is None else {"num_items_in_batch": num_items_in_batch}
    mask = torch.ones_like(ids)
    out = model(ids, attention_mask=mask, labels=labels, fused_lm_head=True, **count)
    of_tokens = (out.log_probs * torch.arange(labels.shape[1] - 1)).sum() + out.entropy.sum()
    (out.loss + of_tokens).backward()
    grads = {n: p.grad for n, p in model.named_parameters()}
    return {k: v for k, v in out.items() if torch.is_tensor(v)} | grads


@pytest.mark.parametrize(
    "changes, options",
    [
        ({}, {"temperature": 0.7}),
        ({"kind": "gemma2", "final_logit_softcapping": 2.0}, {"temperature": 1.3}),
        ({"kind": "cohere", "logit_scale": 0.25}, {"temperature": 0.7}),
        ({"kind": "granite", "logits_scaling": 3.0}, {"num_items_in_batch": 50}),
        ({"kind": "qwen3_moe", "num_experts": 3, "num_experts_per_tok": 3, "moe_intermediate_size": 24,
          "output_router_logits": True, "router_aux_loss_coef": 0.5}, {}),
        ({"tie_word_embeddings": True}, {"cast_lm_head_to_fp32": True}),
    ],
    ids=["temperature", "softcap", "scale", "scaling", "experts", "tied"],
)  # fmt: skip
def test_what_a_model_does_with_its_logits(changes, options):
    model = rows.tiny(**changes)
    ids = torch.tensor([rows.ids(9, 1), rows.ids(9, 2)])
    with torch.no_grad():  # every other label is the likeliest token
        labels = torch.cat([ids[:, :1], model(ids).logits.argmax(-1)[:, :-1]], 1)
    labels[:, ::2] = ids[:, ::2]
    labels[0, :4] = -100
    mine, theirs = (fused(model, ours, labels, ids, **options) for ours in (True, False))
    assert mine.keys() == theirs.keys() and set(ALL) <= mine.keys()
    assert 0 < mine["is_top1"].sum() < (labels != -100).sum()
    assert ("aux_loss" in mine) == ("num_experts" in changes)
    for name, t in theirs.items():
        torch.testing.assert_close(
            mine[name], t, rtol=2e-5, atol=2e-5, msg=lambda m, n=name: f"{n}: {m}"
        )


def test_a_head_in_float32_is_outside_of_autocast():
    own, seen = head.statistics, []

    def recorded(module, x, *args):
        seen.append((torch.is_autocast_enabled("cpu"), x.dtype))
        return own(module, x, *args)

    labels, model = torch.ones(1, 4, dtype=torch.long), rows.tiny()
    with planted(head, "statistics", recorded), torch.autocast("cpu", torch.bfloat16):
        for fp32 in (False, True):
            x = torch.ones(1, 4, 32, dtype=torch.bfloat16 if fp32 else torch.float32)
            scaling = head.Scaling(1.0, None, 1.0, fp32)
            trainers.token_statistics(model.lm_head, x, labels, scaling, ALL)
    assert seen == [(True, torch.float32), (False, torch.float32)]


def test_nothing_to_learn():
    """No label at all: zeros, with gradients, so that no rank waits for another's."""
    ids = torch.tensor([rows.ids(5, 1)])
    mine = fused(rows.tiny(), True, torch.full_like(ids, -100), ids)
    assert mine["loss"] == 0 and all(t is not None and not t.any() for t in mine.values())


@pytest.mark.parametrize("state", ["two", "merged", "disabled", "to_save", "bias"])
def test_heads(state):
    peft = pytest.importorskip("peft")
    base = rows.tiny()
    if state == "bias":
        base.lm_head.bias = torch.nn.Parameter(torch.randn(rows.VOCAB))
    if state == "to_save":
        config = peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"])
    else:
        config = peft.LoraConfig(r=2, target_modules=["lm_head"], init_lora_weights=False)
    model = peft.get_peft_model(base, config)
    layer = base.lm_head
    if state == "two":
        other = peft.LoraConfig(
            r=3, lora_alpha=5, target_modules=["lm_head"], init_lora_weights=False
        )
        model.add_adapter("other", other)
        layer.set_adapter(["default", "other"])
    elif state == "merged":
        layer.merge()
    elif state == "to_save":
        with torch.no_grad():
            layer.modules_to_save["default"].weight.mul_(2)
    elif state == "disabled":
        layer.merge()
        layer.enable_adapters(False)
    x = torch.randn(2, 6, 32)
    labels = torch.randint(rows.VOCAB, (2, 6))
    scaling = head.Scaling(0.8, 3.0, 1.5, False)
    results = []
    for function in (trainers.token_statistics, rows.eager_statistics):
        model.zero_grad()
        y = x.clone().requires_grad_()
        found = function(layer, y, labels, scaling, ALL)
        (found["log_probs"] * torch.arange(6) + found["entropy"]).sum().backward()
        grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        results.append({**found, **grads, "x": y.grad})
    assert results[0].keys() == results[1].keys()
    for name, t in results[1].items():
        torch.testing.assert_close(results[0][name], t, rtol=2e-5, atol=2e-5)


def test_prompt_learning(tmp_path):
    """PEFT's prompt tuning: virtual tokens before the labels."""
    from peft import PromptTuningConfig, get_peft_model

    results = []
    for ours in (True, False):
        torch.manual_seed(3)
        model = get_peft_model(rows.tiny(), PromptTuningConfig("CAUSAL_LM", num_virtual_tokens=2))
        with rows.fresh():
            trainer = rows.build("sft", model, tmp_path, ours=ours)
            trainer.train()
        results.append(trainer.recorder.found)
    for name, t in results[1].items():
        torch.testing.assert_close(results[0][name], t, rtol=2e-5, atol=2e-5)


def test_parameters_that_are_there_inside_their_module_alone():
    """As under ZeRO-3: gathered before a module's forward and backward, empty otherwise."""
    model = rows.tiny()
    expected = fused_head_gradients(model)
    base = model.lm_head
    weight, full = base.weight, base.weight.detach().clone()
    log = []

    def gather(*_):
        log.append("gather")
        weight.data = full

    def release(*_):
        weight.data = torch.empty(0)

    class Before(torch.autograd.Function):
        @staticmethod
        def forward(ctx, t):
            return t.view_as(t)

        @staticmethod
        def backward(ctx, grad):
            gather()
            return grad

    def after(module, args, outputs):
        release()
        return tuple(
            Before.apply(t) if torch.is_tensor(t) and t.requires_grad else t for t in outputs
        )

    base.register_forward_pre_hook(gather)
    base.register_forward_hook(after)
    release()
    found = fused_head_gradients(model)
    assert log == ["gather"] * 3  # forward; backward of log_probs and of entropy
    for name, t in expected.items():
        torch.testing.assert_close(found[name], t, rtol=1e-6, atol=1e-6)
    with planted(head, "within", lambda modules, compute, x: compute(x)):
        release()
        with pytest.raises(ImplementationUnavailable, match="offloaded or not gathered"):
            fused_head_gradients(model)


def test_hooks_and_forwards_of_the_head():
    """accelerate's hook of a device map and a hook that looks are right; what would be left out of
    the computation is refused.
    """
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    model, outputs = rows.tiny(), []
    expected = fused_head_gradients(model)
    add_hook_to_module(model.lm_head, AlignDevicesHook("cpu"))
    handle = model.lm_head.register_forward_hook(lambda m, args, out: outputs.append(out))
    found = fused_head_gradients(model)
    assert all(torch.equal(found[name], t) for name, t in expected.items())
    assert [type(out) for out in outputs] == [tuple]
    handle.remove()
    handle = model.lm_head.register_forward_hook(lambda m, args, out: out * 2)
    with pytest.raises(ImplementationUnavailable, match=r"^forward hooks on the head must leave"):
        fused_head_gradients(model)
    handle.remove()
    model.lm_head._old_forward = lambda x: x
    with pytest.raises(ImplementationUnavailable, match=r"^the forward of the head's Linear must"):
        fused_head_gradients(model)

    from peft import get_peft_model

    base = rows.tiny()
    get_peft_model(base, adapted(target_modules=["lm_head"]))
    for layer in (base.lm_head.lora_B["default"], base.lm_head):
        layer.forward = lambda x: x
        with pytest.raises(ImplementationUnavailable, match=r"^the forward of the head's Linear"):
            head.resolve(base.lm_head)
        del layer.forward


def fused_head_gradients(model):
    g = torch.Generator().manual_seed(0)
    x = torch.randn(1, 6, 32, generator=g).requires_grad_()
    labels = torch.randint(rows.VOCAB, (1, 6), generator=g)
    model.zero_grad()
    scaling = head.Scaling(1.0, None, 1.0, False)
    found = trainers.token_statistics(model.lm_head, x, labels, scaling, ALL[:2])
    (found["log_probs"] + found["entropy"]).sum().backward()
    return {**found, "x": x.grad, "weight": model.lm_head.weight.grad}


# ---- memory


def peak_bytes(fn):
    """The peak of all allocations that live at once during fn, as the allocator reports them."""
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=cpu, profile_memory=True) as p:
        fn()
    now = peak = 0
    for event in sorted(p.profiler.kineto_results.events(), key=lambda e: e.start_ns()):
        if event.name() == "[memory]":
            now += event.nbytes()
            peak = max(peak, now)
    return peak


@pytest.mark.parametrize("lora", HEADS)
def test_memory_does_not_grow_with_the_vocabulary(lora):
    """Forward and backward of 2,048 tokens, whose logits would take 64 and 256 MiB, and those of
    the eager path and their gradients several times that. The head is frozen, but for its adapter,
    whose gradients are small.
    """
    peaks = [peak_of_head(trainers.token_statistics, lora, V) for V in (8192, 32768)]
    assert peaks[1] < peaks[0] + 8 < 80, peaks
    assert peak_of_head(rows.eager_statistics, lora, 8192) > 150


def peak_of_head(function, lora, vocabulary):
    """In MiB."""
    layer = torch.nn.Linear(32, vocabulary, bias=False)
    if lora == "lora":
        from peft import LoraConfig
        from peft.tuners.lora.layer import Linear

        config = LoraConfig(init_lora_weights=False)
        layer = Linear(layer, "default", config=config, r=2, lora_alpha=2)
    getattr(layer, "base_layer", layer).requires_grad_(False)
    x = torch.randn(1, 2048, 32, requires_grad=True)
    labels = torch.randint(vocabulary, (1, 2048))
    scaling = head.Scaling(1.0, None, 1.0, False)

    def both():
        out = function(layer, x, labels, scaling, ("log_probs", "entropy", "mean_logits"))
        (out["log_probs"].sum() + out["entropy"].sum()).backward()

    return peak_bytes(both) / 2**20


@pytest.mark.parametrize("softcap", [None, 5.0])
def test_the_mean_logit_of_16_bits_is_computed_in_float32(softcap):
    """Capped logits are those of a product of 16 bits; what is made of them is in float32."""
    x, weight = (torch.randn(n, 32).bfloat16() for n in (6, 100))
    found = head.mean_logits(x, weight, {"bias": None, "softcap": softcap})
    wanted = x.double() @ weight.double().T
    if softcap:
        wanted = softcap * torch.tanh((x @ weight.T).double() / softcap)
    torch.testing.assert_close(found, wanted.mean(-1).float(), rtol=1e-5, atol=1e-6)


# ---- what is reported, left and refused


def test_the_report_and_what_stays(tmp_path, capsys):
    """A second call does nothing; logits, `generate`, signature and copies stay."""
    import inspect

    model = rows.tiny()
    expected = copy.deepcopy(model)
    with rows.fresh():
        trainer = rows.build("dpo", model, tmp_path, ours=False)
        report = accelerate_trainer(trainer)
        forward = model.forward
        assert accelerate_trainer(trainer, quiet=True) == report and model.forward is not None
        assert model.forward.__func__ is forward.__func__
    outputs = ("log_probs", "entropy", "mean_logits", "is_top1", "log_sum_sq_probs")
    assert report.models == (("LlamaForCausalLM", outputs), ("LlamaForCausalLM", ("log_probs",)))
    assert capsys.readouterr().out.endswith(f"{report}\n")
    assert inspect.signature(model.forward) == inspect.signature(expected.forward)
    ids = torch.tensor([rows.ids(5, 1)])
    for other in (model, copy.deepcopy(model)):
        found, wanted = (m(ids, labels=ids, num_items_in_batch=3) for m in (other, expected))
        assert torch.equal(found.loss, wanted.loss) and torch.equal(found.logits, wanted.logits)
    options = {"max_new_tokens": 3, "do_sample": False}
    assert torch.equal(model.generate(ids, **options), expected.generate(ids, **options))


def test_evaluation(tmp_path):
    """`evaluate` on the other path: metrics of the evaluation mode."""
    found = []
    for ours in (True, False):
        with rows.fresh():
            trainer = rows.build("sft", rows.tiny(), tmp_path, ours=ours)
            found.append(trainer.evaluate(rows.data("sft")))
    for name in ("eval_loss", "eval_entropy", "eval_mean_token_accuracy"):
        assert found[0][name] == pytest.approx(found[1][name], rel=1e-5)


def adapted(**options):
    from peft import LoraConfig

    return LoraConfig(**{**LORA, "init_lora_weights": True, **options})


@pytest.mark.parametrize(
    "options, sentence",
    [
        ({"use_dora": True}, "use_dora or another variant must not be set .* got True"),
        ({"lora_dropout": 0.1}, "lora_dropout must not be set .* got 0.1"),
        ({"lora_bias": True}, "lora_bias must not be set .* got True"),
    ],
)
def test_adapters_that_are_refused(options, sentence, tmp_path):
    model = rows.tiny()
    if "lora_bias" in options:
        options = {**options, "target_modules": ["lm_head"]}
        model.lm_head.bias = torch.nn.Parameter(torch.zeros(rows.VOCAB))
    with rows.fresh(), pytest.raises(ImplementationUnavailable, match=f"^{sentence}"):
        rows.build("sft", model, tmp_path, lora={**LORA, "init_lora_weights": True, **options})
    assert "get_output_embeddings" not in vars(model)


class Scaled(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x) * 2


@pytest.mark.parametrize(
    "change, sentence",
    [
        (
            lambda m: setattr(m, "lm_head", Scaled(32, rows.VOCAB)),
            r"the head must be a torch.nn.Linear, .*, got \S*Scaled$",
        ),
        (
            lambda m: setattr(m.lm_head, "forward", functools.partial(Scaled.forward, m.lm_head)),
            "the forward of the head's Linear must be its class's, got partial",
        ),
        (
            lambda m: setattr(m.config, "logit_scale", -1.0),
            "the scale of LlamaForCausalLM's logits must be positive, got -1.0",
        ),
    ],
)
def test_models_that_are_refused(change, sentence, tmp_path):
    model = rows.tiny()
    change(model)
    with rows.fresh():
        trainer = rows.build("sft", model, tmp_path, ours=False)
        before = model.forward
        with pytest.raises(ImplementationUnavailable, match=f"^{sentence}"):
            accelerate_trainer(trainer)
    assert model.forward == before


def test_trainers_that_are_refused(tmp_path, monkeypatch):
    with rows.fresh():
        trainer = rows.build("sft", rows.tiny(), tmp_path, ours=False)
    del trainer.model.forward  # as of RewardTrainer
    with pytest.raises(ImplementationUnavailable, match=r"^trainer must be one .* got SFT"):
        accelerate_trainer(trainer)
    with pytest.raises(TypeError, match=r"^trainer must be a .* got LlamaForCausalLM$"):
        accelerate_trainer(trainer.model)
    with pytest.raises(TypeError, match=r"^model must be a torch.nn.Module, got 'a/name'; load it"):
        build_trainer(type(trainer), "a/name")
    monkeypatch.setattr("importlib.metadata.version", lambda name: "1.17.0")
    with pytest.raises(ImplementationUnavailable, match=r"^trl must be of .*1.16, .* 1.17.0$"):
        accelerate_trainer(trainer)
    monkeypatch.setattr("tilewright.core.platform.no_module", lambda name: f"{name} is missing")
    with pytest.raises(ImplementationUnavailable, match=r"^trl is missing$"):
        accelerate_trainer(trainer)


def test_a_reference_adapter_that_trl_would_compute(tmp_path):
    """precompute_ref_log_probs runs while the trainer is built, without the head's adapter."""
    from peft import get_peft_model

    model = get_peft_model(rows.tiny(), adapted(task_type="CAUSAL_LM"))
    with rows.fresh(), pytest.raises(ValueError, match=r"^precompute_ref_log_probs must be False"):
        arguments = rows.arguments("dpo", str(tmp_path), 1, precompute_ref_log_probs=True)
        build_trainer(pytest.fail, model, args=arguments)


def test_a_tensor_parallel_head(tmp_path):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    join_group(0, 1, str(tmp_path))
    try:
        layer = torch.nn.Linear(32, rows.VOCAB, bias=False)
        weight = distribute_tensor(layer.weight, init_device_mesh("cpu", (1,)), [Shard(0)])
        layer.weight = torch.nn.Parameter(weight.detach())
        scaling = head.Scaling(1.0, None, 1.0, False)
        with pytest.raises(ImplementationUnavailable, match=r"^the head's weight must be whole"):
            head.statistics(layer, torch.randn(2, 32), torch.tensor([1, 2]), scaling, ALL)
    finally:
        torch.distributed.destroy_process_group()


def test_the_page(tmp_path, monkeypatch):
    """The blocks of docs/trl.md, on a tiny model."""
    import pathlib
    import re

    import trl

    page = pathlib.Path(__file__).parents[2] / "docs" / "trl.md"
    *blocks, actors = re.findall(r"```python\n(.*?)```", page.read_text(), re.S)
    rows.tiny().save_pretrained(tmp_path / "model")
    rows.tokenizer().save_pretrained(tmp_path / "model")
    calls, own = [], head.statistics
    monkeypatch.setattr(head, "statistics", lambda *a: calls.append(a) or own(*a))
    for block in blocks:
        names = {"SFTTrainer": trl.SFTTrainer, "dataset": rows.data("sft"), "model": rows.tiny()}
        names |= {"accelerate_trainer": accelerate_trainer}
        with rows.fresh():
            unprepared = {"skip_prepare_dataset": True}
            names["arguments"] = rows.arguments("sft", str(tmp_path), 1, dataset_kwargs=unprepared)
            if "SFTTrainer(model" in block or "build_trainer" in block:
                names["SFTTrainer"] = functools.partial(
                    trl.SFTTrainer, processing_class=rows.tokenizer()
                )
            exec(block.replace("HuggingFaceTB/SmolLM2-135M", str(tmp_path / "model")), names)
        assert len(calls) == 2, "two steps"
        calls.clear()
    assert len(blocks) == 1, "the script has a test of its own"
    logits, labels = torch.randn(2, 5), torch.tensor([1, 4])
    names = {"logits": logits, "labels": labels, "hidden_states": torch.randn(2, 3)}
    exec(actors, names | {"lm_head": torch.nn.Linear(3, 5)})
