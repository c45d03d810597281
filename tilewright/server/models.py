"""Models of one base, as the workers hold them: adapters that train apart, or all weights of one.

Every rank has them, and makes the same calls. `KINDS` are the requests.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import pathlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch

from tilewright.core.files import folder_size
from tilewright.nn import LoRALinear
from tilewright.nn.sharded import assign, shard, whole
from tilewright.nn.weights import Adapted, adapted, is_adapter
from tilewright.server import losses, passes, sending
from tilewright.server.datums import ROUTES, Data
from tilewright.server.frames import Arrays
from tilewright.server.names import PARTS, folder_of, path_of
from tilewright.server.passes import Asked, Packing
from tilewright.server.refused import Refused
from tilewright.trainer.bank import Bank, Sole
from tilewright.trainer.build import of_main
from tilewright.trainer.checkpoint import checkpoint, hf
from tilewright.trainer.engine import Engine, NotFinite
from tilewright.trainer.field_tree import ConfigError
from tilewright.trainer.parallel.gradients import global_norm
from tilewright.trainer.reference import adapters_off, holding, scaled

# Samplers whose weights are in memory, one where all weights train; others are read when they are
# asked for.
SNAPSHOTS = 4
BASE = "/base"  # among them, where all weights train


@dataclasses.dataclass(frozen=True)
class About:
    """What a model is created with. rank: of its adapters; None: it is all weights.   parts: of
    PARTS, which have some, and `targets` the projections; None: all.   seed: they are drawn from
    it.   scale: times their product.
    """

    rank: int | None
    scale: float
    seed: int
    parts: tuple[str, ...] = PARTS
    targets: tuple[str, ...] | None = None

    @classmethod
    def of(cls, given: dict[str, Any]) -> About:
        targets = given["targets"]
        targets = None if targets is None else tuple(targets)
        return cls(given["rank"], given["scale"], given["seed"], tuple(given["parts"]), targets)

    def has(self, path: str, name: str) -> bool:
        """Whether a projection of a module has an adapter."""
        return part_of(path) in self.parts and (self.targets is None or name in self.targets)


def part_of(path: str) -> str:
    """Which of PARTS an adapted module belongs to."""
    if path == "lm_head":
        return "unembed"
    return "mlp" if ".mlp" in path else "attn"


EXPERTS = ("gate", "up", "down")  # the projections of experts


def _projections(path: str, module: Adapted) -> list[str]:
    """Those of a module, in the order of its A."""
    if isinstance(module, LoRALinear):
        return [name or path.rpartition(".")[2] for name in module.slices]
    return [f"{name}_proj" for name in EXPERTS]


def kind_of(name: str) -> str:
    """The kind of layer that a parameter belongs to."""
    path = f".{name}"
    for kind, sign in (
        ("head", ".lm_head."),
        ("embedding", ".embed_tokens."),
        ("norms", "norm."),
        ("experts", ".experts."),
        ("router", ".mlp.gate."),
        ("mlp", ".mlp."),
    ):
        if sign in path:
            return kind
    return "attention"


class Settings(NamedTuple):
    """What results tell, and what is saved.

    norms: of gradients by kind of layer.   routers: their statistics.   most: bytes below the
    server's folder; what would be more is not saved.   dtype: of exported weights.   tokenizer: its
    folder, which exports have.   folders: whether the sampler reads all weights from folders.
    """

    norms: bool
    routers: bool
    most: float
    dtype: torch.dtype | None
    tokenizer: str | None
    folders: bool


class Done(NamedTuple):
    """What a request has come to, on the main rank.

    saved: paths that it has saved, with what is known of them.   ended: whether the model is gone.
    why: that is so, where no client asked for it.
    """

    value: Any
    arrays: Arrays = {}  # noqa: RUF012 (nothing is added to it)
    saved: dict[str, Any] = {}  # noqa: RUF012
    ended: bool = False
    why: str | None = None


class Snapshot(NamedTuple):
    """Weights that a sampler has: this rank's shards by name, and the scale of the adapters."""

    tensors: dict[str, torch.Tensor]
    scale: float


class Models:
    """Models on an engine with adapters, or one model, of all weights.

    root: the server's folder.   base: the weights that models begin with, for exports.   identity:
    of these, which checkpoints have.   how: documents become micro-batches.   again: reads the
    base's weights into the engine, on every rank.
    """

    def __init__(
        self,
        engine: Engine,
        root: pathlib.Path,
        base: str,
        identity: dict[str, dict[str, Any]],
        how: Packing,
        again: Callable[[], None],
        settings: Settings,
    ):
        self.engine, self.mesh, self.settings = engine, engine.mesh, settings
        self.root, self.base, self.identity, self.how = root, base, identity, how
        self._again, self.adapters = again, any(True for _ in adapted(engine.parts.whole))
        self.bank = Bank(engine) if self.adapters else Sole(engine, again)
        self.about: dict[str, About] = {}
        self.steps: dict[str, int] = {}
        # By what the next step of a model divides the sums of its passes: in one of the protocols
        # the tokens that they train on.
        self._divisors: dict[str, float] = {}
        self._snapshots: dict[str, Snapshot] = {}
        self._channels: dict[str, sending.Channel] = {}  # to engines, on the main rank
        self.asleep = False
        self._saver = checkpoint.Saver(str(root), self.mesh, asynchronous=False)

    def run(self, kind: str, model: str, value: Any, arrays: Arrays) -> Done:
        """Does what a request says.

        Raises Refused, on every rank, where it cannot be done; the model is as before then, but for
        gradients that are not finite.
        """
        if kind not in CREATES and kind not in APART:
            if model not in self.bank:
                raise Refused(404, f"there is no model {model}")
            self.bank.take(model)
        return KINDS[kind](self, model, value, arrays)

    # ---- their life

    def self_test(self) -> None:
        """A pass of every loss with numbers of no meaning. Raises ConfigError."""
        draw, name = np.random.default_rng(0), "self_test"
        tokens = draw.integers(0, self.engine.model.config.vocab_size, 16)
        rank = next((m.rank for _, m in adapted(self.engine.model)), None)
        self._add(name, About(rank, 1.0, 0))
        for loss in losses.LOSSES:
            rest = (n for n in losses.needed(loss, {}) if n != losses.TARGET)
            floats = {n: draw.normal(size=len(tokens)).astype(np.float32) for n in rest}
            inputs: Arrays = {losses.TARGET: tokens, **floats}
            data = Data(tokens, np.array([len(tokens)]), inputs)
            try:
                data = losses.checked(loss, {}, data, self.engine.model.config.vocab_size)
                passes.run(self.engine, data, loss, {}, self.how, backward=True)
            except Refused as refused:
                raise ConfigError([f"server.enable_self_test: {loss}: {refused}"]) from refused
            self.engine.zero()
        self.forget(name)

    def create(self, model: str, value: Any, arrays: Arrays) -> Done:
        self._add(model, About.of(value))
        return Done({"model_id": model, "type": "create_model"})

    def create_from(self, model: str, value: Any, arrays: Arrays) -> Done:
        """Creates a model from a checkpoint."""
        folder = self._folder(value["path"])
        stored = self._stored(folder)
        self._add(model, About.of(stored["server"]))
        try:
            self._read(model, folder, stored, states=value["optimizer"])
        except BaseException:
            self.forget(model)
            raise
        return Done({"path": value["path"], "model_id": model, "type": "load_weights"})

    def load(self, model: str, value: Any, arrays: Arrays) -> Done:
        """Replaces a model's weights, and its optimizer's states, by a checkpoint's."""
        folder = self._folder(value["path"])
        stored = self._stored(folder)
        own, other = self.about[model], About.of(stored["server"])
        for name in ("rank", "scale", "parts", "targets"):
            if getattr(own, name) != getattr(other, name):
                raise Refused(
                    400,
                    f"{value['path']}: its {name} is {getattr(other, name)}, and that of {model} "
                    f"{getattr(own, name)}",
                )
        self._read(model, folder, stored, states=value["optimizer"])
        return Done({"path": value["path"], "model_id": model, "type": "load_weights"})

    def unload(self, model: str, value: Any, arrays: Arrays) -> Done:
        """value: why it is unloaded, where no client asked for it."""
        self.forget(model)
        return Done({"model_id": model, "type": "unload_model"}, ended=True, why=value)

    def forget(self, model: str) -> None:
        """Frees what a model has."""
        if model in self.bank:
            self.bank.remove(model)
        self.about.pop(model, None)
        self.steps.pop(model, None)

    def restore(self, model: str, about: About, folder: pathlib.Path) -> None:
        """A model as `checkpoint` has written it.

        Raises Refused, on every rank, if it is damaged or of another base.
        """
        stored = self._stored(folder)
        self._add(model, about)
        self._read(model, folder, stored, states=True)

    @torch.no_grad()
    def _add(self, model: str, about: About) -> None:
        known = {n for path, m in adapted(self.engine.model) for n in _projections(path, m)}
        if unknown := sorted({*(about.targets or ())} - known):
            raise Refused(
                400,
                f"lora_config.target_modules: {unknown[0]} has no adapter here; accepted are "
                f"{', '.join(sorted(known))}",
            )
        self.forget(model)  # one of the same name that is created anew
        try:
            self.bank.add(model, about.seed)
        except ValueError:
            raise Refused(
                400,
                f"this server trains all weights, of one model, which is {self.bank.held}; unload "
                "it first",
            ) from None
        self.about[model], self.steps[model] = about, 0
        for path, module in adapted(self.engine.model):
            module.scale = about.scale
            # As PEFT's files have it, whose rank is that of all models.
            module.alpha = about.scale * module.rank
            own = [about.has(path, name) for name in _projections(path, module)]
            for name, p in module.named_parameters(recurse=False):
                if is_adapter(name) and name.endswith("A"):
                    # Rows beyond its rank, and adapters that it has not, stay zero: so are their
                    # gradients, since what B multiplies, and B, are zero.
                    full = whole(p)
                    row = torch.arange(full.shape[-2], device=full.device)
                    if isinstance(module, LoRALinear):
                        wanted = torch.tensor(own, device=full.device)[row // module.rank]
                    else:  # gate, up and down have a parameter each
                        wanted = own[EXPERTS.index(name.split("_")[1])]
                    beyond = (row % module.rank >= (about.rank or 0)) | ~torch.as_tensor(wanted)
                    assign(p, full.masked_fill(beyond[:, None], 0.0))

    # ---- training

    def forward(self, model: str, value: Any, arrays: Arrays) -> Done:
        return self._pass(value, arrays, backward=False)

    def forward_backward(self, model: str, value: Any, arrays: Arrays) -> Done:
        """divided: whether the step is to divide the sums of its passes by their tokens."""
        if self.engine.totals is None:
            self._divisors[model] = 0.0
        done = self._pass(value, arrays, backward=True)
        if value.get("divided", False):
            self._divisors[model] += Data.of(arrays).trained
        return done

    def abort(self, model: str, value: Any, arrays: Arrays) -> Done:
        """Drops the gradients since the last step."""
        self.engine.zero()
        about = {"model_id": model, "step": self.steps[model], "forward_backward_step": 0}
        return Done({"success": True, **about, "info": {}})

    def _pass(self, value: Any, arrays: Arrays, *, backward: bool) -> Done:
        data = Data.of(arrays)
        return Done(
            *passes.run(
                self.engine,
                data,
                value["loss"],
                value["options"],
                self.how,
                backward=backward,
                routers=self.settings.routers,
                routes=arrays.get(ROUTES),
            )
        )

    def optim_step(self, model: str, value: Any, arrays: Arrays) -> Done:
        if self.engine.totals is None:
            raise Refused(400, "there is no gradient: optim_step follows forward_backward")
        try:
            self.engine.set_values(value["settings"])
            # The losses are sums, which one protocol does not divide.
            divisor, most = self._divisors.get(model) or 1.0, value["max_norm"]
            norms: dict[str, torch.Tensor] = {}
            watch = functools.partial(self._measure, norms) if self.settings.norms else _nothing
            norm = self.engine.optim_step(max_norm=most, denominator=divisor, watch=watch)
        except NotFinite as error:
            raise Refused(
                400, f"step {self.steps[model] + 1}: {error}; the gradients are dropped"
            ) from error
        self.steps[model] += 1
        metrics = {"grad_norm": norm, "learning_rate": value["settings"]["lr"]}
        # As `Engine.divide` has clipped them.
        clipped = min(1.0, most / (norm + 1e-6)) if most > 0 else 1.0
        metrics |= {f"grad_norm/{kind}": v.item() / clipped for kind, v in norms.items()}
        return Done({"metrics": {**metrics, "step": self.steps[model]}})

    def _measure(self, norms: dict[str, torch.Tensor]) -> None:
        """Adds the norm of the gradients of each kind of layer."""
        elsewhere, kinds = set(self.engine.parts.copies), {}
        for name, p in self.engine.model.named_parameters():
            if p.requires_grad and p not in elsewhere:
                kinds.setdefault(kind_of(name), []).append(p)
        for kind in sorted(kinds):
            norms[kind] = global_norm(kinds[kind], self.mesh)

    # ---- files

    def checkpoint(self, model: str, folder: pathlib.Path) -> None:
        """Writes what a model is, which has no gradients at the time."""
        self.bank.take(model)
        self._write(model, folder, states=True)

    # A name in the log is not saved again (`Workers`); what a killed server has left under another
    # one is replaced.

    def save(self, model: str, value: Any, arrays: Arrays) -> Done:
        path = saved_as("save_weights", model, value)
        folder = self.folder(path)
        self._check_room(3 * self.trained_bytes)  # with two moments
        self._write(model, folder, states=True)
        about = self._known(model, "training", value, folder)
        return Done({"path": path, "type": "save_weights"}, saved={path: about})

    def save_for_sampler(self, model: str, value: Any, arrays: Arrays) -> Done:
        """Weights alone: under a path, as others read them too, or of a sampler that is made.

        Others read adapters as PEFT has them, and all weights, `dense`, as transformers has.
        """
        path = saved_as("save_weights_for_sampler", model, value)
        folder, trained = self.folder(path), self.trained_bytes
        held, given = value["sampler"] is not None, value["dense"]
        dense = given is not None or not self.adapters
        dtype = self.settings.dtype if given is None else getattr(torch, given)
        # All weights that are sent to an engine are read by the workers alone.
        exports = not held or not dense or (self.settings.folders and not value.get("sent"))
        every = sum(p.numel() for p in self.engine.parts.whole.parameters())
        beside = every * (dtype or torch.float32).itemsize if dense else trained
        self._check_room(trained + (beside if exports else 0))
        self._write(model, folder, states=False)
        answer: dict[str, Any] = {"type": "save_weights_for_sampler"}
        with _written():
            if exports and dense:
                target = folder / "model"
                self.engine.export(target, dtype=dtype, tokenizer=self.settings.tokenizer)
            elif exports:
                self.engine.export(folder / "adapter", adapter_of=self.base)
        if held:
            kind = "sent" if value.get("sent") else "sampler"
            own = {"weights": path, "kind": kind, "ttl_seconds": value["ttl_seconds"]}
            own |= {"inflight": model} if value["inflight"] else {}
            return Done({"sampling_session_id": path, **answer}, saved={path: own})
        if dense:
            answer["num_shards"] = len([*(folder / "model").glob("*.safetensors")])
        about = self._known(model, "sampler", value, folder)
        return Done({"path": path, **answer}, saved={path: about})

    @property
    def trained_bytes(self) -> int:
        """What trains, on all ranks."""
        trained = [p for p in self.engine.model.parameters() if p.requires_grad]
        return sum(p.numel() * p.element_size() for p in trained)

    def _check_room(self, needed: int) -> None:
        """Raises Refused, on every rank, where so many bytes are more than may be saved."""

        def check() -> None:
            there = folder_size(self.root)
            if there + needed > self.settings.most:
                raise ValueError(
                    f"StorageLimitError: {there / 1e6:.1f} MB are saved, and {needed / 1e6:.1f} "
                    f"more would be over storage_limit, {self.settings.most / 1e6:.1f} MB; delete "
                    "checkpoints"
                )

        try:
            of_main(self.mesh, check)
        except ValueError as error:
            raise Refused(400, str(error)) from error

    def _known(self, model: str, kind: str, value: Any, folder: pathlib.Path) -> dict[str, Any]:
        return {
            "model": model,
            "kind": kind,
            "size": folder_size(folder) if self.mesh.main else 0,
            "user_metadata": value["user_metadata"],
            "ttl_seconds": value["ttl_seconds"],
            **dataclasses.asdict(self.about[model]),
        }

    def _write(self, model: str, folder: pathlib.Path, *, states: bool) -> None:
        # DCP would make states of an optimizer without any, as after a step.
        states = states and bool(self.engine.optimizer.state)
        optimizers = [self.engine.optimizer] if states else []
        alone = self.adapters
        tensors, _ = checkpoint.contents(self.engine.model, optimizers, adapters_alone=alone)
        state = {
            "step": self.steps[model],
            "weights": "adapters" if alone else "all",
            "merged": False,
            "optimizer": states,
            "run": self.identity,
            "ops": {},
            "server": dataclasses.asdict(self.about[model]),
        }
        with _written():
            self._saver.write(folder, tensors, state)
        self._snapshots = {
            name: own
            for name, own in self._snapshots.items()
            if name == BASE or self.folder(name) != folder
        }

    def _read(
        self, model: str, folder: pathlib.Path, stored: dict[str, Any], *, states: bool
    ) -> None:
        """Fills a model from a checkpoint. Raises Refused, on every rank, where a file is damaged:
        the model is as before then, without gradients.
        """
        self.engine.zero()
        given = states and stored["optimizer"]
        self._restored(folder, states=given)
        if not given:
            self.engine.optimizer.state.clear()
        self.steps[model] = stored["step"] if states else 0

    def _stored(self, folder: pathlib.Path) -> dict[str, Any]:
        """The state of a checkpoint, on every rank. Raises Refused for one of another base."""

        def read() -> dict[str, Any]:
            state = checkpoint.read_state(folder)
            checkpoint.check(folder, state, self.identity)
            return state

        try:
            return of_main(self.mesh, read)
        except (OSError, ValueError) as error:
            raise Refused(400, str(error)) from error

    def _restored(self, folder: pathlib.Path, *, states: bool) -> dict[str, Any]:
        try:
            return checkpoint.restore(
                folder,
                self.engine.parts,
                self.engine.optimizer,
                self.mesh,
                run=self.identity,
                ops={},
                states=states,
            )
        except (OSError, ValueError) as error:
            raise Refused(400, str(error)) from error

    def _folder(self, path: str) -> pathlib.Path:
        folder = self.folder(path)
        there = self.mesh.control.broadcast((folder / "state.json").is_file())
        if not there:
            raise Refused(404, f"there is no checkpoint {path}")
        return folder

    # ---- samplers

    def sample(self, model: str, value: Any, arrays: Arrays) -> Done:
        """What follows a prompt, under the base's weights or those that a sampler has.

        model: the sampler's name.
        """
        source, generated = value["weights"], value.get("generated")
        base = source is None and self.adapters
        asked, lengths = Asked(**value["asked"]), (generated or {}).get("lengths", [])
        with adapters_off(self.engine.model) if base else self._weights(source):
            given = passes.scored(self.engine, arrays, lengths, asked, self.how)
        if generated is None:
            ends, drawn = {*value["ends"]}, given.get("sampled", np.empty(0, np.int64)).tolist()
            reasons = ["stop" if token in ends else "length" for token in drawn]
            generated = {"lengths": [1] * len(drawn), "stop_reasons": reasons}
        if "targets" in value:
            generated["targets"] = value["targets"]
        if not value["prompt_logprobs"]:
            given.pop("prompt_logprobs", None)
        elif value["last"] is not None and given:
            given["prompt_logprobs"][: -value["last"]] = np.nan
        return Done(generated, given)

    def send(self, model: str, value: Any, arrays: Arrays) -> Done:
        """All weights that a sampler has, to an engine, and their scores of tokens, as `sample`'s:
        where they are quantized on the way, of what arrives.

        model: whose request it is.
        """
        failed: str | None = None
        with self._weights(value["weights"]):
            tensors = hf.full_tensors(self.engine.parts, self.settings.dtype)
            sent = None
            if self.mesh.main:
                target, how = sending.Target(**value["target"]), value["quantization"]
                own = tensors if how is None else sending.quantized(tensors, how)
                try:
                    sent = sending.send(target, own, self._channels.get(target.url))
                except sending.Unsent as error:
                    failed = str(error)
                    self._channels.pop(target.url, None)
            else:
                for _ in tensors:
                    pass
            if (failed := self.mesh.control.broadcast(failed)) is not None:
                raise Refused(502, failed, category="server")
            if value["quantization"] is not None:
                self._quantize(value["quantization"])
            given = passes.scored(
                self.engine, arrays, value["lengths"], Asked(0, [], 1.0, -1, 1.0), self.how
            )
        return Done({} if sent is None else sent._asdict(), given)

    @torch.no_grad()
    def _quantize(self, how: dict[str, Any]) -> None:
        """Gives matrices the values that an engine has of them, in block-FP8."""
        config, dtype = self.engine.parts.whole.config, self.settings.dtype
        for name, p in self.engine.model.named_parameters():
            full, names = whole(p.detach()), hf.sources(name, config)
            parts = hf.split(name, full, config)  # of experts those of this rank
            own = [
                sending.rounded(source, part, how, dtype or part.dtype)
                for source, part in zip(names, parts, strict=False)
            ]
            if any(after is not before for after, before in zip(own, parts, strict=True)):
                assign(p, hf.fuse(name, own, config))

    def connect(self, model: str, value: Any, arrays: Arrays) -> Done:
        """Opens channels to engines, which stay open: by URL why one was not opened."""
        told: dict[str, str | None] = {}
        for given in value["targets"] if self.mesh.main else ():
            target = sending.Target(**given)
            self._disconnect(target.url)
            try:
                self._channels[target.url] = sending.opened(target)
                told[target.url] = None
            except sending.Unsent as error:
                told[target.url] = str(error)
        return Done({"connected": told})

    def disconnect(self, model: str, value: Any, arrays: Arrays) -> Done:
        """Closes all channels, and tells to which engines."""
        urls = [*self._channels]
        for url in urls:
            self._disconnect(url)
        return Done({"disconnected": urls})

    def _disconnect(self, url: str) -> None:
        if (channel := self._channels.pop(url, None)) is not None:
            with contextlib.suppress(sending.Unsent):  # the engine may have ended
                channel.close()

    # ---- memory

    def sleep(self, model: str, value: Any, arrays: Arrays) -> Done:
        """Moves what the device holds to the host, and samplers' weights out of memory."""
        self._snapshots.clear()
        self._move(torch.device("cpu"))
        if self.mesh.device.type == "cuda":
            torch.cuda.empty_cache()
        self.asleep = True
        return Done({"success": True, "message": "requests wait until POST /wake_up"})

    def wake_up(self, model: str, value: Any, arrays: Arrays) -> Done:
        self._move(self.mesh.device)
        self.asleep = False
        return Done({"success": True, "message": "requests are done"})

    def _move(self, device: torch.device) -> None:
        self.engine.move(device)
        self.bank.move(device)

    @contextlib.contextmanager
    def _weights(self, source: str | None) -> Iterator[None]:
        """Within, the engine has the weights of a sampler, of a saved path, or the base's."""
        source = source or BASE
        snapshot = self._snapshots.pop(source, None) or self._snapshot(source)
        self._snapshots[source] = snapshot  # the newest last
        while len(self._snapshots) > (SNAPSHOTS if self.adapters else 1):
            del self._snapshots[next(iter(self._snapshots))]
        scale = scaled(self.engine.model, snapshot.scale)
        with torch.no_grad(), holding(self.engine.parts, snapshot.tensors), scale:
            yield

    @torch.no_grad()
    def _snapshot(self, source: str) -> Snapshot:
        named = {n: p for n, p in self.engine.model.named_parameters() if p.requires_grad}
        with holding(self.engine.parts, named):
            scale = 1.0
            if source == BASE:
                self._again()
            else:
                scale = self._restored(self._folder(source), states=False)["server"]["scale"]
            tensors = {name: shard(p).clone() for name, p in named.items()}
        return Snapshot(tensors, scale)

    def folder(self, name: str) -> pathlib.Path:
        """That of a path, or of a sampler."""
        return folder_of(self.root, name) if "/" in name else self.root / "samplers" / name


def _nothing() -> None:
    """In the place of `Models._measure`."""


@contextlib.contextmanager
def _written() -> Iterator[None]:
    """A disk that is full, and the like, end the request, and nothing else."""
    try:
        yield
    except OSError as error:
        raise Refused(500, str(error), category="server") from error


def saved_as(kind: str, model: str, value: Any) -> str:
    """What a request saves: a path, or the name of a sampler."""
    if value.get("sampler") is not None:
        return value["sampler"]
    return path_of(model, "weights" if kind == SAVES[0] else "sampler_weights", value["name"])


KINDS: dict[str, Callable[[Models, str, Any, Arrays], Done]] = {
    "create_model": Models.create,
    "create_from": Models.create_from,
    "forward": Models.forward,
    "forward_backward": Models.forward_backward,
    "optim_step": Models.optim_step,
    "abort_gradient_epoch": Models.abort,
    "save_weights": Models.save,
    "save_weights_for_sampler": Models.save_for_sampler,
    "load_weights": Models.load,
    "unload_model": Models.unload,
    "sample": Models.sample,
    "send": Models.send,
    "connect": Models.connect,
    "disconnect": Models.disconnect,
    "sleep": Models.sleep,
    "wake_up": Models.wake_up,
}
SAVES = ("save_weights", "save_weights_for_sampler")
# Those of no model: of samplers, engines and memory.
MEMORY = ("sleep", "wake_up")
APART = ("sample", "send", "connect", "disconnect", *MEMORY)
# Those that make a model, and those that change what it is: they are run again from a checkpoint.
CREATES = ("create_model", "create_from")
LOADS = ("create_from", "load_weights")
CHANGES = (*CREATES, "forward_backward", "optim_step", "abort_gradient_epoch", "load_weights")
