"""The engine as a server calls it: targets that are aligned, steps that fail, tenants, results by
document, an adapter on the head, checkpoints of any name.
"""

import itertools
import math
import os
import random
import shutil

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

pytest.importorskip("pydantic")
pytest.importorskip("transformers")

from helpers import processes
from training import MOE, QWEN3, engine_of, make_bins, run, tensors, write_config

from tilewright.nn.lora import LoRALinear
from tilewright.nn.sharded import assign, whole
from tilewright.nn.weights import adapted
from tilewright.trainer.bank import Bank
from tilewright.trainer.checkpoint import checkpoint
from tilewright.trainer.columns import IGNORE
from tilewright.trainer.config import load
from tilewright.trainer.data.batches import collate
from tilewright.trainer.data.columns.column import COLUMNS
from tilewright.trainer.data.columns.targets import target_columns
from tilewright.trainer.engine import NotFinite
from tilewright.trainer.losses.language_modeling import language_modeling
from tilewright.trainer.losses.loss import count_labels
from tilewright.trainer.losses.weighted import (
    weighted_language_modeling,
    weighted_targets,
)
from tilewright.trainer.parallel.mesh import Mesh, build, join, padding

LORA = {"lora__enable_lora": True, "lora__lora_rank": 4}
UNTIED = QWEN3 | {"tie_word_embeddings": False}


def micro_batches(size=2):
    bins = make_bins()
    return [collate(bins[i : i + size], 8) for i in range(0, len(bins), size)]


def values(per_token, batch):
    """Cross-entropy that computes what each token has."""
    return per_token.values().sum(), count_labels(batch)


def shifted(document):
    """What each of its tokens predicts."""
    ids, labels = document
    return ids, np.append(labels[1:], IGNORE)


# ---- targets


def test_aligned_targets_are_those_of_a_batch():
    bins = make_bins()
    aligned = [[shifted(d) for d in each] for each in bins]
    want, found = collate(bins, 8), collate(aligned, 8, aligned=True)
    assert want.keys() == found.keys()
    assert all(torch.equal(found[name], t) for name, t in want.items())
    weight = {"weight": COLUMNS["weight"]}
    numbers = itertools.count(1)

    def weighted(document, shift):
        own = np.array([next(numbers) for _ in document[0]], np.float32)
        return *document, {
            "weight": np.append([9.0], own[:-1]).astype(np.float32) if shift else own
        }

    want = collate([[weighted(d, True) for d in each] for each in bins], 8, columns=weight)
    numbers = itertools.count(1)
    found = collate(
        [[weighted(d, False) for d in each] for each in aligned], 8, columns=weight, aligned=True
    )
    there = want["labels"] != IGNORE
    assert torch.equal(found["weight"][there], want["weight"][there])
    assert found["weight"][0, -1] == 0 or found["labels"][0, -1] != IGNORE


@pytest.mark.parametrize("k", [1, 3])
def test_targets_have_weights_of_either_sign(k, tmp_path):
    """One as labels, or several of each token: the sum and the gradients are autograd's of the
    logits.
    """
    engine = engine_of(load(write_config(tmp_path)))
    draw = np.random.default_rng(k)
    documents = []
    for n in (9, 4, 13):
        targets = np.stack([draw.permutation(97)[:k] for _ in range(n)])
        weights = draw.normal(size=(n, k)).astype(np.float32)
        targets[1, 0], weights[2] = -1, 0.0
        documents.append((draw.integers(0, 97, n), targets, weights))
    if k == 1:
        loss, columns = weighted_language_modeling, {"weight": COLUMNS["weight"]}
        rows = [
            (ids, np.where(t[:, 0] < 0, IGNORE, t[:, 0]), {"weight": w[:, 0]})
            for ids, t, w in documents
        ]
    else:
        loss, columns = weighted_targets, target_columns(k)
        rows = [
            (ids, np.full(len(ids), IGNORE), {"targets": t, "target_weights": w})
            for ids, t, w in documents
        ]
    batch = collate([rows], 8, columns=columns, aligned=True)
    sums = engine.forward_backward([batch], loss)
    got = [p.grad.clone() for p in engine.parameters]
    engine.zero()
    row = {n: batch[n] for n in ("input_ids", "position_ids", "cu_seqlens")}
    logprob = engine.model(**row)[0].log_softmax(-1)
    targets, weights = (np.concatenate([d[i] for d in documents]) for i in (1, 2))
    targets, weights = torch.from_numpy(targets), torch.from_numpy(weights)
    picked = logprob[: len(targets)].gather(1, targets.clamp_min(0))
    total = -(weights.where(targets >= 0, 0.0) * picked).sum()
    total.backward()
    assert sums.values[0] == pytest.approx(total.item(), rel=1e-5)
    for found, p in zip(got, engine.parameters, strict=True):
        torch.testing.assert_close(found, p.grad, rtol=1e-4, atol=1e-5 * float(p.grad.abs().max()))
    assert engine.totals is None
    own = torch.cat([torch.from_numpy(d[2]) for d in documents]).where(targets >= 0, 0.0)
    if k > 1:
        assert sums.denominator == (own != 0).any(-1).sum()
        [[found]] = engine.documents([batch], sums.per_token)
        assert [len(d) for d in found] == [9, 4, 13]
        want = (-picked).where(targets >= 0, 0.0).detach()  # also of those whose weight is 0
        torch.testing.assert_close(torch.cat(found), want, rtol=1e-4, atol=1e-5)


# ---- steps


def test_a_failed_step_leaves_nothing_behind(tmp_path):
    """The next step has the bits of an engine that has not failed, whose own caller cleans up
    nothing.
    """
    failed, other = (engine_of(load(write_config(tmp_path))) for _ in range(2))
    some = micro_batches()

    def infinite(per_token, batch):
        return per_token.sum() * math.inf, count_labels(batch)

    for engine, error in ((failed, NotFinite), (failed, ValueError)):
        engine.forward_backward(some, infinite if error is NotFinite else language_modeling)
        with pytest.raises(error):
            engine.optim_step(denominator=None if error is NotFinite else -1.0)
        assert engine.totals is None and all(p.grad is None for p in engine.parameters)
        with pytest.raises(ValueError, match="there is no gradient"):
            engine.optim_step()
    for engine in (failed, other):
        engine.forward_backward(some, language_modeling)
        engine.optim_step()
    assert all(map(torch.equal, failed.parameters, other.parameters))


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_every_setting_of_a_step_can_be_set(optimizer, tmp_path):
    """Rates, moments' factors, epsilon and decay: a step has the bits of an engine that was built
    with them, from one that was built with others.
    """
    wanted = {"lr": 3e-3, "adam_beta1": 0.8, "adam_beta2": 0.9, "weight_decay": 0.3}
    wanted |= {"adam_epsilon": 1e-5}
    wanted |= {"muon_lr": 0.01, "muon_momentum": 0.7} if optimizer == "muon" else {}
    fixed = {"train__optimizer": optimizer, "train__no_decay_modules": ["norm"]}
    fixed |= {"train__layerwise_lr_bound": 0.5}
    built = engine_of(
        load(write_config(tmp_path / "a", **fixed, **{f"train__{n}": v for n, v in wanted.items()}))
    )
    # No group decays when it is built.
    set_later = engine_of(load(write_config(tmp_path / "b", **fixed, train__weight_decay=0.0)))
    set_later.set_values(wanted)
    before = [p.detach().clone() for p in built.parameters]
    for engine in (built, set_later):
        for _ in range(2):
            engine.forward_backward(micro_batches(), language_modeling)
            engine.optim_step()
    assert all(map(torch.equal, built.parameters, set_later.parameters))
    assert not any(map(torch.equal, built.parameters, before))
    rates = {round(group["lr"] / 3e-3, 6) for group in set_later.optimizer.param_groups}
    assert len(rates) > 2, "the factors of layers stay"
    with pytest.raises(ValueError, match=r"train\.sgd_momentum: .* no sgd_momentum"):
        set_later.set_values({"lr": 1.0, "sgd_momentum": 0.5})
    assert 1.0 not in set_later.peaks, "nothing was set"


# ---- an adapter on the head


@torch.no_grad()
def with_B(engine):
    """Adapters that have learned: else A has no gradient."""
    for name, p in engine.model.named_parameters():
        if name.endswith("lora_B"):
            draw = torch.Generator().manual_seed(sum(map(ord, name)))
            assign(p, 0.1 * torch.randn(p.shape, generator=draw))
    return engine


def of_head(tmp_path, shape=QWEN3, **changes):
    changes = LORA | {"lora__lora_target_modules": ["lm_head", "o_proj"]} | changes
    config = load(write_config(tmp_path, shape=shape, **changes))
    return with_B(engine_of(config))


@pytest.mark.parametrize("settings", ["", "lm_head_fp32"])
@pytest.mark.parametrize("loss", [language_modeling, values, weighted_targets])
def test_a_head_with_an_adapter_has_autograds_gradients(loss, settings, tmp_path):
    """They are those of its logits, and nothing but adapters is trained."""
    options = {f"model__{settings}": True} if settings else {}
    engine = of_head(tmp_path, **options)
    head = engine.model.head_layer
    assert (
        isinstance(head, LoRALinear) and head.base.weight is engine.model.model.embed_tokens.weight
    )
    bins = make_bins()
    if loss is weighted_targets:
        columns = target_columns(2)
        bins = [
            [
                (
                    ids,
                    labels,
                    {
                        "targets": np.stack([ids, (ids + 1) % 97], 1),
                        "target_weights": np.ones((len(ids), 2), np.float32),
                    },
                )
                for ids, labels in each
            ]
            for each in bins
        ]
        batch = collate(bins, 8, columns=columns)
    else:
        batch = collate(bins, 8)
    sums = engine.forward_backward([batch], loss)
    trained = {n: p for n, p in engine.model.named_parameters() if p.requires_grad}
    assert {"lm_head.lora_A", "lm_head.lora_B"} < trained.keys()
    assert all("lora_" in name for name in trained)
    got = {n: p.grad.clone() for n, p in trained.items()}
    engine.zero()
    row = {n: batch[n] for n in ("input_ids", "position_ids", "cu_seqlens")}
    logprob = engine.model(**row)[0].log_softmax(-1)
    if loss is weighted_targets:
        ids = batch["targets"][0]
        total = -logprob.gather(1, ids.clamp_min(0)).where(ids >= 0, 0.0).sum()
    else:
        total = F.nll_loss(logprob, batch["labels"][0], reduction="sum", ignore_index=IGNORE)
    total.backward()
    assert sums.values[0] == pytest.approx(total.item(), rel=1e-5)
    for name, p in trained.items():
        limit = 1e-5 * float(p.grad.abs().max())
        torch.testing.assert_close(got[name], p.grad, rtol=1e-4, atol=limit, msg=name)
    # It is in the logits: what is merged has the same.
    merged = head.merged_weight()
    x = torch.randn(3, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        out = head(x)
    torch.testing.assert_close(out, x @ merged.T, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape", [QWEN3, UNTIED], ids=["tied", "untied"])
def test_a_head_with_an_adapter_is_exported(shape, tmp_path):
    """Merged, as a head of its own, and as an adapter that PEFT loads: transformers computes the
    engine's logits with both. And it is read again.
    """
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    engine = of_head(tmp_path, shape=shape)
    engine.export(tmp_path / "merged")
    ids = torch.arange(24)[None] % 97
    with torch.no_grad():
        want = engine.model(ids)
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    assert not read.config.tie_word_embeddings
    with torch.no_grad():
        torch.testing.assert_close(read(ids).logits, want, rtol=1e-4, atol=1e-4)
    # The base, with the adapter switched off.
    for _, module in adapted(engine.model):
        module.scale, module.was = 0.0, module.scale
    with torch.no_grad():
        base = engine.model(ids)
    assert not torch.allclose(base, want, atol=1e-2)
    for _, module in adapted(engine.model):
        module.scale = module.was
    plain = engine_of(load(write_config(tmp_path / "plain", shape=shape)))
    with torch.no_grad():
        own = dict(engine.model.named_parameters())
        for name, p in plain.model.named_parameters():
            split = name.rpartition(".")
            p.copy_(own[name] if name in own else own[f"{split[0]}.base.{split[2]}"])
    plain.export(tmp_path / "base")
    engine.export(tmp_path / "adapter", adapter_of=str(tmp_path / "base"))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, base, rtol=1e-4, atol=1e-4)
    theirs = peft.PeftModel.from_pretrained(model, tmp_path / "adapter")
    with torch.no_grad():
        torch.testing.assert_close(theirs(ids).logits, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("mixed", [False, True])
def test_a_run_trains_saves_and_goes_on_with_a_heads_adapter(mixed, tmp_path):
    """By the command, also under autocast: a resumed run has the bits of a whole one, and its
    export a head that is not the embedding.
    """
    given = {"train__enable_mixed_precision": mixed, "train__max_steps": 4, "train__save_steps": 2}
    targets = {"lora__lora_target_modules": ["lm_head"]}
    path = write_config(tmp_path, **LORA, **targets, **given)
    run(path)
    whole_run = tensors(tmp_path, 4)
    head, embedding = (whole_run[n] for n in ("lm_head.weight", "model.embed_tokens.weight"))
    assert head.isfinite().all() and not torch.equal(head, embedding)
    shutil.rmtree(tmp_path / "out/checkpoints/global_step_4")
    run(path, "--train.load_checkpoint_path=auto")
    again = tensors(tmp_path, 4)
    assert again.keys() == whole_run.keys()
    assert all(torch.equal(again[name], t) for name, t in whole_run.items())


def test_what_a_heads_adapter_cannot_do_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"use_dora must be False for lm_head"):
        of_head(tmp_path, lora__use_dora=True)
    merging = {"lora__merge_lora_interval": 2}
    with pytest.raises(ValueError, match=r"merge_lora_interval = 2: lm_head is tied"):
        of_head(tmp_path, **merging)
    engine = of_head(tmp_path, shape=UNTIED, **merging)
    assert isinstance(engine.model.head_layer, LoRALinear)


def test_a_scale_recompiles_nothing():
    """And has the bits of a number, also in 16 bits."""
    layer = LoRALinear(torch.nn.Linear(32, 16), rank=4, alpha=8)
    torch.nn.init.normal_(layer.lora_B)
    x, graphs = torch.randn(5, 32), []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(layer, backend=backend, fullgraph=True)
    for scale in (2.0, 0.3, 1 / 7, 5.0):
        layer.scale = scale
        low = F.linear(x, layer.lora_A) * scale
        assert layer.scale == scale
        assert torch.equal(compiled(x), torch.addmm(layer.base(x), low, layer.lora_B.t()))
    assert len(graphs) == 1
    half = layer.bfloat16()
    y = x.bfloat16()
    low = F.linear(y, half.lora_A) * 5.0
    assert torch.equal(half(y), torch.addmm(half.base(y), low, half.lora_B.t()))


# ---- checkpoints


def test_a_checkpoint_has_any_name_and_any_number_of_optimizers(tmp_path):
    engine, saver = (
        of_head(tmp_path),
        checkpoint.Saver(str(tmp_path / "out"), Mesh(), False, keep=1),
    )
    engine.forward_backward(micro_batches(), language_modeling)
    engine.optim_step()
    run = {"step": 7, "run": {}, "ops": {}, "merged": False}
    saved = {}
    for name, optimizers in (("weights/first", [engine.optimizer]), ("weights/second", [])):
        tensors, _ = checkpoint.contents(engine.model, optimizers)
        saved[name] = saver.write(
            tmp_path / "out" / name, tensors, {**run, "optimizer": bool(optimizers)}
        )
    assert saver.save(1, engine.parts, engine.optimizer, {"run": {}, "ops": {}}).is_dir()
    assert all(folder.is_dir() for folder in saved.values()), "they are no checkpoints of steps"
    for name, folder in saved.items():
        other = of_head(tmp_path / "other")
        states = name.endswith("first")
        given = {"run": {}, "ops": {}, "states": states}
        state = checkpoint.restore(folder, other.parts, other.optimizer, Mesh(), **given)
        assert state["step"] == 7
        assert all(map(torch.equal, other.parameters, engine.parameters))
        assert bool(other.optimizer.state) == states
    with pytest.raises(ValueError, match="holds no states of the optimizer"):
        checkpoint.restore(
            saved["weights/second"], other.parts, other.optimizer, Mesh(), run={}, ops={}
        )


# ---- tenants

TENANTS = ("a", "b", "c")
STEPS, CALLS = 3, 2


def calls_of(name):
    """The batches and settings of a tenant's calls, in order."""
    at, bins = TENANTS.index(name), make_bins()
    for step in range(STEPS):
        for call in range(CALLS):
            yield "call", (at + 3 * step + call) % len(bins)
        yield (
            "step",
            {"lr": 1e-2 / (at + 1), "adam_beta2": 0.9 + at / 100, "weight_decay": 0.1 * at},
        )


def trained(config, ranks, names, seed=None):
    """What each tenant has in the end, when their calls are mixed at random."""
    engine = engine_of(config, ranks)
    bank, found = Bank(engine), {}
    left = {name: list(calls_of(name)) for name in names}
    for name in names:
        bank.add(name, TENANTS.index(name))
        for _, module in adapted(engine.model):
            module.scale = 1.0 + TENANTS.index(name)
    draw, bins = random.Random(seed), make_bins()
    while left:
        name = draw.choice(sorted(left))
        bank.take(name)
        kind, given = left[name].pop(0)
        if kind == "call":
            batch = collate([bins[(given + ranks.batch_rank) % len(bins)]], 8)
            sums = engine.forward_backward([batch], language_modeling)
            found.setdefault(name, []).append(torch.tensor(sums.values))
        else:
            engine.set_values(given)
            found[name].append(torch.tensor(engine.optim_step(max_norm=1.0)))
        if not left[name]:
            del left[name]
    for name in names:
        bank.take(name)
        p = {n: p for n, p in engine.model.named_parameters() if p.requires_grad}
        found[name] += [whole(t.detach()).clone() for t in p.values()]
        states = (engine.optimizer.state[t] for t in p.values())
        found[name] += [
            whole(v.detach()).clone() for s in states for v in s.values() if torch.is_tensor(v)
        ]
    return found


def alone_and_mixed(config, ranks):
    """Whether tenants that are mixed have the bits of each alone, twice."""
    alone = {name: trained(config, ranks, [name])[name] for name in TENANTS}
    for seed in range(2):
        mixed = trained(config, ranks, TENANTS, seed)
        for name in TENANTS:
            assert len(mixed[name]) == len(alone[name]) > STEPS
            assert all(map(torch.equal, mixed[name], alone[name])), (name, seed)
    assert not torch.equal(alone["a"][-1], alone["b"][-1])


@pytest.mark.parametrize("shape", [QWEN3, MOE], ids=["dense", "experts"])
def test_tenants_have_the_bits_of_each_alone(shape, tmp_path):
    alone_and_mixed(load(write_config(tmp_path, shape=shape, **LORA)), Mesh())


def test_a_bank_refuses_what_would_mix_tenants(tmp_path):
    with pytest.raises(ValueError, match="engine: it has no adapters"):
        Bank(engine_of(load(write_config(tmp_path / "plain"))))
    engine = of_head(tmp_path)
    engine.forward_backward(micro_batches(), language_modeling)
    with pytest.raises(ValueError, match="engine: it was trained"):
        Bank(engine)
    engine.zero()
    bank = Bank(engine)
    bank.add("a", 0)
    with pytest.raises(ValueError, match="there is a tenant 'a' already"):
        bank.add("a", 1)
    with pytest.raises(KeyError):
        bank.take("b")
    assert bank.held == "a" and "a" in bank
    bank.add("b", 1)
    assert bank.names == ["b", "a"]
    bank.remove("a")
    bank.remove("b")
    assert bank.names == []


# ---- ranks


def _of_ranks(rank, size, folder, wanted, port):
    """Each of the layouts in one pair of processes."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    ranks = None
    for name, path in wanted.items():
        config = load(path)
        ranks = build(config.train, rank, size, ranks.device) if ranks else join(config.train)
        if name.startswith("tenants"):
            alone_and_mixed(config, ranks)
        else:
            torch.save(one_step(config, ranks), f"{folder}/{name}-{rank}.pt")


def one_step(config, ranks):
    """Values of tokens by document, and gradients, of all bins on the first rank of data
    parallelism: the others have no document.
    """
    engine = with_B(engine_of(config, ranks))
    multiple = padding(8, ranks.context, ranks.layout.tp)
    bins = make_bins() if ranks.batch_rank == 0 else []
    halves = bins[:4], bins[4:]
    batches = [
        collate([[shifted(d) for d in b] for b in half], multiple, ranks.context, aligned=True)
        for half in halves
    ]
    sums = engine.forward_backward(batches, values)
    found = engine.documents(batches, sums.per_token)
    engine.divide(1.0)
    gradients = {
        n: whole(p.grad).cpu()
        for n, p in engine.model.named_parameters()
        if p.requires_grad and p.grad is not None
    }
    return {"documents": found, "gradients": gradients, "totals": sums.values}


LAYOUTS = {
    "fsdp2": {"data_parallel_mode": "fsdp2"},
    "ddp": {"data_parallel_mode": "ddp"},
    "tensor": {
        "data_parallel_mode": "fsdp2",
        "data_parallel_shard_size": 1,
        "tensor_parallel_size": 2,
    },
    "ring": {"data_parallel_mode": "fsdp2", "ringattn_parallel_size": 2},
    "ulysses": {"data_parallel_mode": "fsdp2", "ulysses_parallel_size": 2},
    "pipeline": {
        "data_parallel_mode": "fsdp2",
        "data_parallel_shard_size": 1,
        "pipeline_parallel_size": 2,
        "gradient_accumulation_steps": 2,
    },
}


def test_ranks_give_what_one_process_gives(tmp_path):
    """Values of tokens by document, and gradients of adapters, the head's too, in every layout,
    where ranks without a document take part; and tenants, with experts as well.
    """
    target = {"lora__lora_target_modules": ["lm_head", "q_proj", "down_proj"]}
    shape = UNTIED | {"vocab_size": 98}
    options = {"shape": shape, "model__merge_qkv": False, **LORA, **target}
    want = one_step(load(write_config(tmp_path / "one", **options)), Mesh())
    wanted = {
        name: write_config(
            tmp_path / name, **options, **{f"train__{n}": v for n, v in layout.items()}
        )
        for name, layout in LAYOUTS.items()
    }
    fsdp2 = {"train__data_parallel_mode": "fsdp2"}
    wanted["tenants"] = write_config(tmp_path / "tenants", **LORA, **fsdp2)
    wanted["tenants_experts"] = write_config(
        tmp_path / "tenants_experts", shape=MOE, **LORA, **fsdp2
    )
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    processes(2, _of_ranks, str(tmp_path), wanted, store.port)
    for name, layout in LAYOUTS.items():
        first, second = (torch.load(tmp_path / f"{name}-{rank}.pt") for rank in range(2))
        assert second["documents"] == []
        found = first["documents"]
        data = 2 if name in ("fsdp2", "ddp") else 1
        assert len(found) == data and found[1:] == [[[], []]] * (data - 1), name
        for got, of in zip(found[0], want["documents"][0], strict=True):
            assert [len(t) for t in got] == [len(t) for t in of], name
            torch.testing.assert_close(torch.cat(got), torch.cat(of), rtol=1e-5, atol=1e-5)
        assert first["totals"] == pytest.approx(want["totals"], rel=1e-6), name
        gradients = first["gradients"] | second["gradients"]
        assert gradients.keys() == want["gradients"].keys(), (name, layout)
        for path, g in want["gradients"].items():
            error = (gradients[path] - g).abs().max()
            assert error <= 1e-5 * g.abs().max(), (name, path)


def test_a_loss_that_computes_a_sum_has_no_values_of_tokens(tmp_path):
    engine, [batch, *_] = engine_of(load(write_config(tmp_path))), micro_batches()
    sums = engine.forward_backward([batch], language_modeling)
    with pytest.raises(ValueError, match="this loss computes their sum alone"):
        engine.documents([batch], sums.per_token)
