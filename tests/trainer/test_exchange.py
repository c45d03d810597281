"""What ranks tell each other: JSON, exceptions and descriptions of quantized weights."""

import json

import pytest
import torch

pytest.importorskip("pydantic")

from helpers import processes
from torch import distributed as dist

from tilewright.core.files import load_tensors, save_tensors
from tilewright.ops.quant.block_fp8 import BlockFP8
from tilewright.ops.quant.nf4_format import NF4
from tilewright.ops.quant.nvfp4 import NVFP4
from tilewright.trainer.checkpoint import hf_load
from tilewright.trainer.checkpoint.checkpoint_files import Damaged, Incomplete
from tilewright.trainer.config import ConfigError
from tilewright.trainer.parallel import exchange
from tilewright.trainer.parallel.mesh import Group


@pytest.mark.parametrize(
    "problem, kind, message",
    [
        (ValueError("v"), ValueError, "v"),
        (Incomplete("i"), Incomplete, "i"),
        (
            FileNotFoundError(2, "No such file", "x"),
            FileNotFoundError,
            "[Errno 2] No such file: 'x'",
        ),
        (ConfigError(["a", "b"]), ValueError, "a\nb"),
        (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"), ValueError, None),
        (ConnectionResetError("gone"), OSError, "gone"),
        (KeyError("k"), RuntimeError, "KeyError: 'k'"),
        (KeyboardInterrupt("stopped"), KeyboardInterrupt, "stopped"),
    ],
)
def test_an_exception_arrives_as_the_nearest_that_a_message_makes(problem, kind, message):
    found = exchange.raised(json.loads(json.dumps(exchange.described(problem))))
    assert type(found) is kind and str(found) == (message or str(problem))


def test_a_rank_alone_raises_its_own_exception():
    problem = Damaged("d")
    with pytest.raises(Damaged) as caught:
        Group().agree(problem)
    assert caught.value is problem
    Group().agree(None)
    assert Group().gather((1, "a")) == [[1, "a"]] and Group().broadcast({1: None}) == {"1": None}


def test_a_quantized_weight_is_described_without_its_values():
    flat, whole = torch.zeros(32, dtype=torch.uint8), torch.zeros(3, 16, dtype=torch.uint8)
    scale = torch.zeros(3, 2, dtype=torch.float8_e4m3fn)
    for q in (
        NF4(flat, torch.zeros(1), None, None, (8, 8), torch.bfloat16, 64),
        NVFP4(whole, scale, torch.zeros(()), (3, 32), torch.float32),
        BlockFP8(scale, torch.zeros(1, 1), (128, 128), torch.bfloat16),
    ):
        made = hf_load._empty(json.loads(json.dumps(hf_load._described(q))), torch.device("cpu"))
        assert type(made) is type(q) and made.shape == q.shape and made.dtype == q.dtype
        assert [(t.shape, t.dtype) for t in made.tensors()] == [
            (t.shape, t.dtype) for t in q.tensors()
        ]


def test_tensors_of_any_dtype_come_back(tmp_path):
    shared = torch.arange(6.0)
    tensors = {
        "a/b": torch.tensor([1 + 2j, -3j]),
        "half": torch.tensor(1.5, dtype=torch.bfloat16),
        "none": torch.empty(0, 3),
        "byte": torch.tensor([True, False]),
        "fp8": torch.ones(2, 2).to(torch.float8_e4m3fn),
        "shared": shared,
        "view": shared.view(2, 3).T,
    }
    save_tensors(tmp_path / "file", tensors, {"x": [1, None]})
    found, about = load_tensors(tmp_path / "file")
    assert about == {"x": [1, None]} and found.keys() == tensors.keys()
    for name, t in tensors.items():
        assert found[name].dtype == t.dtype and found[name].shape == t.shape
        assert torch.equal(found[name].view(-1).float(), t.contiguous().view(-1).float()), name


def _rank(rank, size, port, folder):
    store = dist.TCPStore("localhost", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    own = Group(dist.group.WORLD, size)
    found = [own.gather(["x" * 1000 * rank, rank]), own.broadcast(f"of {rank}")]
    found.append(exchange.broadcast({"rank": rank}, source=1))
    if rank == 1:
        exchange.send(["sent", None], None, to=0)
    found.append(exchange.receive(None, 1) if rank == 0 else None)
    own.agree(None)
    try:
        own.agree(Damaged(f"file of {rank}") if rank else None)
    except Damaged as error:
        found.append(str(error))
    (folder / str(rank)).write_text(json.dumps(found))
    dist.destroy_process_group()


def test_two_ranks_tell_each_other(tmp_path):
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    processes(2, _rank, store.port, tmp_path)
    for rank in range(2):
        assert json.loads((tmp_path / str(rank)).read_text()) == [
            [["", 0], ["x" * 1000, 1]],
            "of 0",
            {"rank": 1},
            ["sent", None] if rank == 0 else None,
            "file of 1",
        ]
