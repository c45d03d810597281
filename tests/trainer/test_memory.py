"""What a run needs in memory: the plan, what stays on a device, and what waits in host memory."""

import gc
import json
import weakref

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("pydantic")
pytest.importorskip("transformers")

from test_trainer import MOE, QWEN3, engine_of, make_bins, run, shape_of, write_config

from tilewright.trainer import memory_plan, offload, train
from tilewright.trainer.batches import collate
from tilewright.trainer.config import ConfigError, load
from tilewright.trainer.loss import language_modeling
from tilewright.trainer.mesh import join

CPU = torch.device("cpu")


# ---- activation offload


class Host:
    """A host beside a CPU: copies between two parts of its memory, with what is left overwritten
    and what is still under way unreadable, as on a GPU's stream.
    """

    def __init__(self):
        self.log, self.under_way, self.bytes, self.tensors = [], [], 0, weakref.WeakSet()

    def to_host(self, t):
        self.log.append("out")
        host = t.clone()
        self.bytes += t.numel() * t.element_size()
        return host

    def to_device(self, host):
        self.log.append("in")
        t = torch.full_like(host, torch.nan if host.is_floating_point() else 0)
        self.under_way.append((t, host))
        return t

    def wait(self):
        self.log.append("wait")
        for t, host in self.under_way:
            t.copy_(host)
        self.under_way.clear()


RECOMPUTED = {"train__enable_gradient_checkpointing": True}
OFFLOADED = {
    "dense": (QWEN3, {}),
    "autocast": (QWEN3, {"train__enable_mixed_precision": True}),
    "experts": (MOE, {}),
    "layers": (QWEN3, RECOMPUTED),
    "reentrant": (QWEN3, {**RECOMPUTED, "train__enable_reentrant": True}),
    "attention": (QWEN3, {**RECOMPUTED, "train__recompute_modules": ["self_attn"]}),
    "sharded": (QWEN3, {"train__data_parallel_mode": "fsdp2"}),
    "sharded experts": (
        MOE,
        {**RECOMPUTED, "train__data_parallel_mode": "fsdp2", "train__enable_mixed_precision": True},
    ),
}


@pytest.mark.parametrize("case", OFFLOADED)
def test_offloaded_activations_give_the_same_bits(case, tmp_path, monkeypatch):
    """Two micro-batches; everything, some and nothing leaves; parameters never do."""
    monkeypatch.setattr(offload, "SMALL", 0)
    shape, options = OFFLOADED[case]
    config = load(write_config(tmp_path, {**shape, "num_hidden_layers": 3}, **options))
    ranks = join(config.train)
    batches = [collate(make_bins()[i : i + 4], 8) for i in (0, 4)]
    left = {}
    try:
        gradients = []
        for limit in (None, 1e9, 3e4, 0):
            engine, host = engine_of(config, ranks), Host()
            if limit is not None:
                keeper = offload.offload_activations(engine.model, limit, host)
                seen = []
                monkeypatch.setattr(keeper, "copies", host)
                real = keeper._pack
                monkeypatch.setattr(
                    keeper, "_pack", lambda t, layer, real=real, k=keeper, seen=seen: (
                        real(t, layer), seen.append(k.kept)
                    )[0]
                )
            engine.forward_backward(batches, language_modeling)
            gradients.append([p.grad for p in engine.parameters])
            left[limit] = host.bytes
            if limit is not None:
                assert max(seen) <= limit and keeper.kept == 0  # all is freed with the graph
                assert host.log.count("in") == host.log.count("out")
    finally:
        dist.destroy_process_group()
    assert left[1e9] == 0 < left[3e4] < left[0]
    for other in gradients[1:]:
        for a, b in zip(gradients[0], other, strict=True):
            a, b = (g.to_local() if hasattr(g, "to_local") else g for g in (a, b))
            assert torch.equal(a, b)
