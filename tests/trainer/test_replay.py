"""Routes that an inference engine recorded are replayed: the same experts with today's weights."""

import base64
import io
import itertools
import json
import re
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest
import torch

pytest.importorskip("pydantic")
pytest.importorskip("transformers")

from preparing import prepare_of
from ranks import ROOT, STEEP, fsdp2, same_training, together_and_alone
from training import MOE, QWEN3, make_bins, rows, run, write_config

from tilewright import ops as tw
from tilewright.nn import read_routed_experts
from tilewright.trainer.config import ConfigError, load
from tilewright.trainer.data.cache_key import cache_key
from tilewright.trainer.data.columns import of_tokens
from tilewright.trainer.data.encode import Use
from tilewright.trainer.data.routes import Routes
from tilewright.trainer.engine import Engine
from tilewright.trainer.models import moe
from tilewright.trainer.models.model import Transformer
from tilewright.trainer.models.positions import Sequence

L, K, E = MOE["num_hidden_layers"], MOE["num_experts_per_tok"], MOE["num_experts"]


def random_routes(tokens, seed, recorded=None):
    """int16 [tokens, layers x K], of which the first `recorded` (default: all but one) are."""
    draw = np.random.default_rng(seed)
    found = draw.random((tokens, L, E)).argsort(-1)[..., :K].reshape(tokens, -1).astype(np.int16)
    found[tokens - 1 if recorded is None else recorded :] = -1
    return found


# ---- what engines return


def engines_routes(tokens=5, layers=3, top_k=2, experts=300):
    draw = np.random.default_rng(0)
    return draw.random((tokens, layers, experts)).argsort(-1)[..., :top_k].astype(np.int32)


def npy(array):
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def text(data):
    return base64.b64encode(data).decode()


def test_what_each_engine_returns_is_read():
    routes = engines_routes()
    small = routes.astype(np.uint16)
    options = {"layers": 3, "top_k": 2, "experts": 300, "tokens": 6}
    want = torch.full((3, 6, 2), -1, dtype=torch.int32)
    want[:, :5] = torch.from_numpy(routes).transpose(0, 1)
    for given in (
        routes,  # vLLM
        small,
        torch.from_numpy(routes),
        routes.tolist(),
        npy(small),  # vLLM's server
        text(npy(routes)),
        routes.tobytes(),  # SGLang
        text(routes.tobytes()),
        {"routed_experts": text(routes.tobytes())},
        {"routed_experts": text(small.tobytes()), "routed_experts_dtype": "uint16"},
    ):
        found = read_routed_experts(given, **options)
        assert found.dtype == torch.int32 and torch.equal(found, want), type(given)
    found = read_routed_experts(text(small.tobytes()), **options, dtype="uint16")
    assert torch.equal(found, want)
    assert torch.equal(read_routed_experts(routes, **options | {"tokens": None}), want[:, :5])
    assert torch.equal(read_routed_experts(routes, **options | {"tokens": 5}), want[:, :5])
    # A model whose first layer is dense: an engine's buffer has zeros there, or no row.
    dense = {**options, "routed": (1, 2)}
    zeros = np.where(np.arange(3)[:, None] == 0, 0, routes)
    for given in (zeros, routes[:, 1:], text(zeros.tobytes()), text(routes[:, 1:].tobytes())):
        assert torch.equal(read_routed_experts(given, **dense), want[1:])


TWICE = "(did the engine record nothing, or is the layer dense, and missing in `routed`?)"
REFUSED = [
    (ValueError, "have the shape [5, 2, 2]; accepted is [tokens, 3, 2]", lambda r: r[:, :2]),
    (ValueError, "are of 3 tokens; accepted are 5 or 6", lambda r: r[:3]),
    (ValueError, "have the shape [18]; accepted is [tokens, 3, 2]", lambda r: r[:3].tobytes()),
    (ValueError, "of token 4 in layer 2 hold 300: accept", lambda r: put(r, (4, 2, 1), 300)),
    (ValueError, "of token 1 in layer 0 hold -1: accepted", lambda r: put(r, (1, 0, 0), -1)),
    (ValueError, f"layer 0 hold 0: an expert is chosen twice for it {TWICE}", lambda r: 0 * r),
    (ValueError, "are 119 bytes, which hold no whole int32", lambda r: r.tobytes()[:-1]),
    (ValueError, "are a string that is not base64", lambda r: "???"),
    (ValueError, "are a damaged .npy file", lambda r: npy(r)[:90]),
    (TypeError, "must be integers, got float64", lambda r: r.astype(float)),
    (TypeError, "must be integers, got float64", lambda r: npy(r.astype(float))),
    (ValueError, "have no shape", lambda r: [[[1, 2]], [[1]]]),
    (TypeError, "a mapping needs routed_experts, has ['text']", lambda r: {"text": ""}),
    (
        ValueError,
        "dtype must be one of uint8, uint16, int16, int32, int64, got 'int4'",
        lambda r: {"routed_experts": text(r.tobytes()), "routed_experts_dtype": "int4"},
    ),
]


@pytest.mark.parametrize("error, message, change", REFUSED)
def test_what_cannot_be_replayed_is_one_sentence(error, message, change):
    with pytest.raises(error) as caught:
        read_routed_experts(change(engines_routes()), layers=3, top_k=2, experts=300, tokens=6)
    assert message in str(caught.value)


def test_an_expert_may_not_return_in_a_later_slot():
    with pytest.raises(ValueError, match="of token 1 in layer 0 hold 4: an expert is chosen twice"):
        read_routed_experts([[[1, 2, 3]], [[4, 1, 4]]], layers=1, top_k=3, experts=8)


def test_an_engine_that_recorded_nothing_is_seen_with_one_expert_per_token():
    options = {"layers": 4, "top_k": 1, "experts": 8, "tokens": 17}
    zeros = np.zeros((16, 4, 1), np.int32)
    with pytest.raises(ValueError, match="of 16 tokens are expert 0 in every layer") as caught:
        read_routed_experts(zeros, **options)
    assert str(caught.value).endswith("(did the engine record nothing?)")
    for given, change in (
        (put(zeros, (9, 2, 0), 1), {}),
        (zeros[:15], {"tokens": 16}),  # few: a router could have chosen them
        (zeros, {"experts": 1}),
    ):
        assert read_routed_experts(given, **options | change).shape[2] == 1


def put(array, at, value):
    array = array.copy()
    array[at] = value
    return array


# ---- layouts

TWO = {"micro_batch_size": 2}
RECOMPUTED = {"enable_gradient_checkpointing": True}
LAYOUTS = {
    "train_ddp": ["--train.data_parallel_mode=ddp"],
    "train_experts": fsdp2(expert_parallel_size=2),
    "train_tensor": fsdp2(tensor_parallel_size=2, **TWO),
    "train_pipeline": fsdp2(pipeline_parallel_size=2, **TWO),
    "train_ulysses_recompute": fsdp2(ulysses_parallel_size=2, **TWO, **RECOMPUTED),
    "train_ring_experts": fsdp2(
        ringattn_parallel_size=2,
        expert_parallel_size=4,
        moe_checkpoint_method="moe_act",
        **TWO,
        **RECOMPUTED,
    ),
}


@pytest.fixture(scope="module")
def spread(tmp_path_factory):
    """Steps on random routes, which no router would choose, in four processes and in one."""
    folder = tmp_path_factory.mktemp("replay")
    path = write_config(
        folder,
        MOE | {"vocab_size": 98},
        train__micro_batch_size=1,
        train__gradient_accumulation_steps=2,
        model__merge_qkv=False,
        **STEEP,
    )
    bins = [
        [
            (ids, labels, {"routed_experts": random_routes(len(ids), 10 * i + j)})
            for j, (ids, labels) in enumerate(b)
        ]
        for i, b in enumerate(make_bins())
    ]
    found, alone = together_and_alone(folder, path, bins, LAYOUTS, {"replayed": []})
    return found, alone["replayed"]


@pytest.mark.parametrize("mode", LAYOUTS)
def test_routes_stay_with_their_tokens_in_every_layout(mode, spread):
    found, want = spread
    same_training(found[mode], want)


# ---- runs


def read(routes):
    """The column that a model with these routes reads."""
    return {"routed_experts": of_tokens.recorded(routes)}


def write_rows(path, samples):
    """samples: (input_ids, routes or None)."""
    with path.open("w") as file:
        for ids, routes in samples:
            row = {"input_ids": [int(i) for i in ids]}
            if routes is not None:
                row["routed_experts"] = routes
            file.write(json.dumps(row) + "\n")
    return str(path)


def settings(folder, shape=MOE, **changes):
    options = {
        "data__datasets": [{"path": str(folder / "train.jsonl")}],
        "train__checksum_steps": 1,
        "train__save_hf_weights": False,
        "train__max_steps": 4,
        "train__router_replay": True,
        **changes,
    }
    return write_config(folder, shape, **options)


def recorded(folder, name="out"):
    text = (folder / name / "checksums.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


@pytest.fixture(scope="module")
def of_a_run(tmp_path_factory):
    """A run, and a file with the routes that its tokens had, when they were trained on."""
    folder = tmp_path_factory.mktemp("recorded")
    draw = np.random.default_rng(3)
    samples = [draw.integers(0, 97, n) for n in draw.integers(5, 20, 24)]
    path = settings(folder, train__router_replay=False)
    write_rows(folder / "train.jsonl", [(ids, None) for ids in samples])
    seen, packed = [], []
    real, forward = tw.route, Engine.forward_backward

    def route(*args, **options):
        found = real(*args, **options)
        seen.append(found.expert_index)
        return found

    def forward_backward(self, given, loss):
        packed.extend(given)
        return forward(self, given, loss)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(moe.tw, "route", route)
        patch.setattr(Engine, "forward_backward", forward_backward)
        run(path)
    assert len(seen) == L * len(packed) == L * 4
    found = {}
    for i, batch in enumerate(packed):
        routes = torch.stack(seen[i * L : (i + 1) * L], 1)  # tokens, layers, K
        ends = batch["cu_seqlens"].tolist()
        for a, b in itertools.pairwise(ends):
            found[tuple(batch["input_ids"][0, a:b].tolist())] = routes[a:b].numpy()
    (folder / "replayed").mkdir()
    return folder, samples, found


def test_a_replayed_run_has_the_bits_of_the_recorded_one(of_a_run):
    """The engines' layouts in turns; tokens that were not trained on do not matter."""
    folder, samples, found = of_a_run
    again = folder / "replayed"
    trained = [tuple(ids.tolist()) for ids in samples if tuple(ids.tolist()) in found]
    assert len(trained) > 6
    cells = []
    for ids in samples:
        routes = found.get(tuple(ids.tolist()))
        if routes is None:
            routes = random_routes(len(ids), 1, len(ids)).reshape(len(ids), L, K)
        cells.append((ids, routes.tolist()))
    path = settings(again)
    write_rows(again / "train.jsonl", cells)
    run(path)
    assert recorded(again) == recorded(folder)
    for a, b in zip(rows(again), rows(folder), strict=True):
        assert (a["loss"], a["grad_norm"]) == (b["loss"], b["grad_norm"])
    # The same in the layouts of servers, all but the last token.
    write_rows(
        again / "train.jsonl",
        [
            (ids, text(np.array(r[:-1], np.int32).tobytes() if i % 2 else npy(np.array(r[:-1]))))
            for i, (ids, r) in enumerate(cells)
        ],
    )
    run(path, f"--train.output_dir={again / 'coded'}")
    for a, b in zip(recorded(again, "coded"), recorded(again), strict=True):
        assert a == b


def test_recorded_routes_and_not_todays_are_taken(of_a_run, tmp_path, monkeypatch):
    """With other weights the router would choose other experts; its weights still learn."""
    found = of_a_run[2]
    calls, real = [], tw.route

    def route(logits, k, *, expert_index=None, **options):
        calls.append(expert_index)
        return real(logits, k, expert_index=expert_index, **options)

    monkeypatch.setattr(moe.tw, "route", route)
    write_rows(tmp_path / "train.jsonl", [(ids, r.tolist()) for ids, r in found.items()])
    path = settings(
        tmp_path, train__max_steps=2, train__seed=7, train__router_replay_compare_steps=2
    )
    run(path)
    replayed = [c for c in calls if c is not None]
    assert len(replayed) >= 2 * L
    first, second = rows(tmp_path)
    assert "logprob_replayed" not in first
    assert second["logprob_replayed"] == pytest.approx(-second["loss"], rel=1e-6)
    assert second["logprob_difference"] > 1e-4
    apart = abs(second["logprob_replayed"] - second["logprob_routed_today"])
    assert 0 < apart <= second["logprob_difference"]
    names = json.loads((tmp_path / "out/certificate.json").read_text())["trained"]
    gates = [i for i, name in enumerate(names) if name.endswith("mlp.gate.weight")]
    assert len(gates) == L
    for row in recorded(tmp_path):
        assert all(row["gradients"][i] for i in gates)


def test_a_resumed_run_replays_what_belongs_to_its_tokens(tmp_path):
    draw = np.random.default_rng(4)
    samples = [draw.integers(0, 97, n) for n in draw.integers(5, 20, 24)]
    cells = [
        (ids, random_routes(len(ids), i, len(ids)).reshape(-1, L, K).tolist())
        for i, ids in enumerate(samples)
    ]
    path = settings(tmp_path, train__save_steps=2)
    write_rows(tmp_path / "train.jsonl", cells)
    run(path)
    at = tmp_path / "out/checkpoints/global_step_2"
    more = [f"--train.assert_deterministic={tmp_path / 'out'}"]
    run(path, f"--train.output_dir={tmp_path / 'b'}", f"--train.load_checkpoint_path={at}", *more)
    assert recorded(tmp_path, "b") == recorded(tmp_path)[2:]
    # Other routes of the same tokens are other data.
    cells[3][1][0] = [[1, 0], [0, 1]] if cells[3][1][0] != [[1, 0], [0, 1]] else [[2, 3], [3, 2]]
    write_rows(tmp_path / "train.jsonl", cells)
    with pytest.raises(ValueError, match="the content of the data differs"):
        run(path, f"--train.output_dir={tmp_path / 'c'}", *more)


def test_compiled_layers_replay_without_a_graph_for_each(tmp_path, backend, caplog):
    draw, layers = np.random.default_rng(5), 4
    cells = []
    for n in draw.integers(5, 20, 24):
        routes = draw.random((n, layers, E)).argsort(-1)[..., :K]
        cells.append((draw.integers(0, 97, n), routes.tolist()))
    write_rows(tmp_path / "train.jsonl", cells)
    more = {"model__attn_implementation": "eager", "train__max_steps": 3}
    path = settings(tmp_path, MOE | {"num_hidden_layers": layers}, **more)
    run(path)
    run(path, "--train.enable_compile=true", f"--train.output_dir={tmp_path / 'compiled'}")
    assert 1 <= backend.frame_count <= 3 and "runs uncompiled" not in caplog.text
    compiled = (tmp_path / "compiled/metrics.jsonl").read_text().splitlines()
    for a, b in zip(map(json.loads, compiled), rows(tmp_path), strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-6)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-4)


def test_what_the_trainer_cannot_replay_is_one_sentence(tmp_path):
    good = [[[0, 1], [2, 3]]] * 3
    path = settings(tmp_path)

    def refused(*cells):
        write_rows(tmp_path / "train.jsonl", [([5, 6, 7, 8], cell) for cell in cells])
        with pytest.raises(ValueError) as caught:
            run(path)
        return str(caught.value)

    at = f"{tmp_path / 'train.jsonl'}: line 2: routed experts"
    assert refused(good, [*good[:2], [[0, 4], [1, 2]]]) == (
        f"{at} of token 2 in layer 0 hold 4: accepted are 0 to 3"
    )
    assert refused(good, [*good[:2], [[0], [1, 2]]]).startswith(f"{at} have no shape: lists of")
    assert "line 1: it has no routed_experts" in refused(None, good)
    assert "train.jsonl has no column routed_experts, has ['input_ids']" in refused(None)
    (tmp_path / "model/config.json").write_text(json.dumps(QWEN3))
    assert refused(good) == "train.router_replay = True: the model has no experts"
    not_replayed = ["--train.router_replay=false", "--train.router_replay_compare_steps=2"]
    for more, message in (
        (['--data.datasets=[{"path": "x", "type": "text"}]'], "records are of its tokens"),
        (['--data.datasets=[{"path": "dummy"}]'], "dummy data have no recorded routes"),
        (not_replayed, "nothing is replayed"),
    ):
        with pytest.raises(ConfigError, match=message):
            load(path, more)


def test_a_prepared_set_without_routes_is_not_replayed(tmp_path):
    """Neither from the cache nor as it is given."""
    import datasets

    path = settings(tmp_path)
    write_rows(tmp_path / "train.jsonl", [([5, 6, 7], [[[0, 1], [2, 3]]] * 2)])
    config = load(path)
    data, model, seed = config.data, config.model, config.train.seed
    keys = {
        cache_key(data.datasets, Use(data, 97, columns), model, seed, True)
        for columns in ({}, read(Routes(L, (0, 1), K, E)), read(Routes(L, (1,), K, E)))
    }
    assert len(keys) == 3
    made = datasets.Dataset.from_dict({"input_ids": [[5, 6]], "labels": [[5, 6]]})
    made.save_to_disk(tmp_path / "saved")
    with pytest.raises(ValueError, match="saved has no column routed_experts"):
        run(path, *as_saved(tmp_path / "saved"))


def as_saved(folder):
    return ["--data.skip_prepare_dataset=true", f"--data.dataset_prepared_path={folder}"]


@pytest.mark.parametrize(
    "second, message",
    [
        ([0, 1, 2, 3, 0, 1], "sample 1 has 6 numbers in routed_experts; accepted are 8, 4 for"),
        ([0, 1, 2, 3, 0, 1, 2, 9], "sample 1: routed experts of token 1 in layer 1 hold 9: accept"),
        ([0, 1, 2, 3, None, 1, 2, 3], "sample 1: an expert in routed_experts is null"),
        (None, "sample 1 has 0 numbers in routed_experts"),
        ([[0, 1], [2, 3]], "routed_experts are list<item: list<item: int64>>; accepted are lists"),
        ([0, 1, 2, 3, -1, -1, -1, -1], None),
    ],
)
def test_routes_of_a_set_that_was_saved_are_checked(second, message, tmp_path):
    import datasets

    first = [[0, 1], [2, 3]] if second and isinstance(second[0], list) else [0, 1, 2, 3] * 2
    made = datasets.Dataset.from_dict(
        {"input_ids": [[5, 6]] * 2, "labels": [[5, 6]] * 2, "routed_experts": [first, second]}
    )
    made.save_to_disk(tmp_path)
    options = {"shuffle": False, "columns": read(Routes(L, (0, 1), K, E))}
    config = load(settings(tmp_path / "run"), as_saved(tmp_path))
    if message is None:
        assert len(prepare_of(config, None, 97, **options)) == 2
        return
    with pytest.raises(ValueError) as caught:
        prepare_of(config, None, 97, **options)
    said = f"data.skip_prepare_dataset: {tmp_path}: {message}"
    assert str(caught.value).startswith(said)


def test_a_sample_is_named_by_its_number_in_the_set_and_not_in_a_part_of_it():
    right, wrong = [0, 1, 2, 3], [0, 1, 2, 9]
    column = pa.chunked_array([[right, right], [right, wrong]])
    with pytest.raises(ValueError, match=r"^sample 3: routed experts of token 0 in layer 1 hold 9"):
        Routes(L, (0, 1), K, E).check(column, pa.chunked_array([[[5]] * 4]))


def test_a_token_is_replayed_whole_or_not_at_all():
    logits = torch.tensor([[0.0, 3.0, 2.0, 1.0]] * 3)
    layer = SimpleNamespace(top_k=2, options={}, gate=SimpleNamespace(e_score_correction_bias=None))
    recorded = torch.tensor([[3, 0], [3, -1], [-1, -1]], dtype=torch.int16)
    found = moe.MoE._completed(layer, logits, recorded)
    assert found.tolist() == [[3, 0], [1, 2], [1, 2]]


def test_routes_stay_two_bytes_in_the_model(monkeypatch):
    whole = SimpleNamespace(own=lambda t: t)
    config = SimpleNamespace(num_experts_per_tok=K)
    model = SimpleNamespace(tp=whole, config=config, cp=None, training=False)
    monkeypatch.setattr(Sequence, "of", lambda *_, **options: SimpleNamespace())
    given = torch.from_numpy(random_routes(5, 0))[None]
    ids = torch.zeros(1, 5, dtype=torch.int64)
    found = Transformer.sequence(model, ids, routed_experts=given).routes
    assert found.dtype == torch.int16 and found.shape == (L, K, 5)
    assert torch.equal(found.permute(2, 0, 1).flatten(1), given[0])


def test_routes_of_a_model_are_of_its_layers_with_experts():
    class Config:
        num_hidden_layers, num_experts, num_experts_per_tok = 3, 8, 2

        def is_moe(self, layer):
            return layer > 0

    routes = Routes.of(Config())
    assert routes == Routes(3, (1, 2), 2, 8) and routes.width == 4
    given, want = [[[0, 0], [1, 2], [3, 4]]], [[1, 2, 3, 4], [-1] * 4]
    assert routes.read(given, 2).tolist() == want
    for lists in (
        pa.list_(pa.list_(pa.int16(), 2)),  # of fixed lengths
        pa.list_(pa.list_(pa.int64(), 2), 3),
        pa.large_list(pa.list_(pa.int32())),
    ):
        assert routes.read(pa.array(given * 3, lists).slice(1, 1), 2).tolist() == want


def test_the_example_of_the_page_writes_what_the_trainer_reads():
    page = (ROOT / "docs/trainer/experts.md").read_text()
    section = page.split("## Recorded routes")[1].split("\n## ")[0]
    [code] = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    names = {}
    exec(code, names)
    routes = engines_routes(4, L, K, E)
    made = names["row"]([5, 6], [7, 8, 9], {"routed_experts": text(routes.tobytes())}, MOE)
    row = json.loads(made)
    assert row["input_ids"] == [5, 6, 7, 8, 9]
    read = Routes(L, (0, 1), K, E).read(row["routed_experts"], 5)
    assert (read[:4].reshape(4, L, K) == routes).all() and (read[4] == -1).all()
    # A dense first layer, of which an engine's buffer has zeros.
    routes[:, 0] = 0
    record = {"routed_experts": text(routes.tobytes())}
    for name in ("n_routed_experts", "num_local_experts"):
        shape = {"num_hidden_layers": L, "num_experts_per_tok": K, name: E}
        made = names["row"]([5, 6], [7, 8, 9], record, shape, routed=range(1, L))
        read = Routes(L, (1,), K, E).read(json.loads(made)["routed_experts"], 5)
        assert (read[:4].reshape(4, L - 1, K) == routes[:, 1:]).all()
