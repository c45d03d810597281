"""`tilewright verify MODEL`: whether a transformers model, patched by whatever library, computes
what its configuration and weights say.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from tilewright.core import platform
from tilewright.core.registry import ImplementationUnavailable, short
from tilewright.integrations.transformers import report_of
from tilewright_lab.verify.diagnose import Diagnosis, scaled, seen, window_of
from tilewright_lab.verify.modules import Replayer, Row, attention_masks
from tilewright_lab.verify.probes import (
    Moved,
    cache_drift,
    draws,
    forward,
    leak,
    mask_leaks,
    probes,
    stale_cache,
)
from tilewright_lab.verify.record import Call, observable
from tilewright_lab.verify.reference import (
    Twin,
    Unverifiable,
    Weights,
    build,
    check_memory,
    check_weights,
    read_config,
    said,
    unwrapped,
    weights_of,
)
from tilewright_lab.verify.result import WHOLE_LIMIT, Finding, Verification, apart, spoken
from tilewright_lab.verify.run import DETACHED, Compared, compare_forward, compare_scene, run
from tilewright_lab.verify.scenes import LEAST_TOKENS, Scene, left_in_training, quiet_state, scenes
from tilewright_lab.verify.structure import structure

DRIFT = 4  # of what decoding moves in the eager twin

__all__ = ["Finding", "Unverifiable", "Verification", "verify"]


def verify(
    model: nn.Module,
    batch: Mapping[str, Any] | None = None,
    *,
    config: Any = None,
    tokens: int = 48,
    lengths: Sequence[int] = (),
) -> Verification:
    """Compares every module of a transformers model, its gradients, masks, cache and loss with
    their definition in float64.

    The reference is a model of the configuration's class, whose module is read again from its file,
    with eager attention and experts and this model's weights. So it shows what `accelerate`, Liger
    or a change of one's own made of the model. Each module is replayed in float64 from what it was
    given, with the gradient that arrived at its output, and so is an unpatched one in the model's
    dtype, the eager twin: an error belongs to the module that makes it. One contract unit is twice
    the twin's error and a rounding (`tilewright.bench.contract`); more is a finding. Values are
    compared in evaluation mode under torch.no_grad, too. Then the same input is given twice,
    tokens, documents and padding are changed that must not be seen, tokens are decoded from a
    cache, and attributes, buffers, ties and adapters are compared with the configuration. The
    module in which a difference begins is named.

    Takes the time of some twenty training steps of the batch, most of it in float64, and, beside
    the model, 32 bytes for each parameter in bfloat16. The model is as before
    afterwards: its gradients, modes, hooks and random numbers.

    Args:
        model: A language model of transformers, of any dtype, also inside PEFT's wrapper, also with
            LoRA and with quantized layers of this library, whose definition is the dequantized
            weight.
        batch: What its forward takes: input_ids [B, S] int64, and labels, attention_mask,
            position_ids as wanted. None: two rows of random tokens. Variants with padding and with
            packed documents are made of its input_ids.
        config: The configuration that is right, or a folder with one; None: the model's.
        tokens: The length of the random rows. A window or a scaling of the rotary embedding that is
            longer is not exercised.
        lengths: The lengths of further rows of random tokens, beside the batch.

    Returns:
        A `Verification`: `.ok`, `.findings` (each with `.module` and `.message`), `.rows`, and as
        `str()` the table.

    Raises:
        Unverifiable: There is no reference for the model, as for a compiled or sharded one; or the
            batch is not as above. It is a ValueError.
        ImplementationUnavailable: transformers is not installed.

    Example:
        >>> import tilewright
        >>> from transformers import AutoConfig, AutoModelForCausalLM
        >>> config = AutoConfig.for_model("llama", vocab_size=64, hidden_size=32,
        ...     intermediate_size=48, num_hidden_layers=1, num_attention_heads=2)
        >>> model = AutoModelForCausalLM.from_config(config)
        >>> model.model.rotary_emb.inv_freq[1:] *= 2
        >>> result = tilewright.verify(model, tokens=16)
        >>> result.ok, [finding.module for finding in result.findings]
        (False, ['model.rotary_emb'])
    """
    if reason := platform.no_module("transformers"):
        raise ImplementationUnavailable(reason)
    if not isinstance(tokens, int) or tokens < LEAST_TOKENS:
        raise Unverifiable(f"tokens must be an int of {LEAST_TOKENS} or more, got {tokens!r}")
    if wrong := [n for n in lengths if not isinstance(n, int) or n < LEAST_TOKENS]:
        raise Unverifiable(f"lengths must be ints of {LEAST_TOKENS} or more, got {wrong[0]!r}")
    root = unwrapped(model)
    if not hasattr(root, "config"):
        raise Unverifiable(f"model is a {type(root).__name__} without a config")
    check_weights(root)
    if batch is not None and not isinstance(batch, Mapping):
        raise Unverifiable(f"batch must be a mapping with input_ids, got {type(batch).__name__}")
    given = None if batch is None else dict(batch)
    check_memory(root, getattr((given or {}).get("input_ids"), "shape", (2, tokens)))
    check_memory(root, (1, max(lengths, default=1)))
    inputs = scenes(root, given, tokens, lengths)
    work = _Work(model, root, root.config if config is None else read_config(config))
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.autocast(next(root.parameters()).device.type, enabled=False))
        stack.enter_context(torch.enable_grad())
        for scene in inputs:
            work.compare(scene)
        work.probe([s for s in inputs if s.name in work.compared])
    return work.result()


class _Work:
    """One verification."""

    def __init__(self, model: nn.Module, root: nn.Module, config: Any):
        self.model, self.root, self.config = model, root, config
        self.weights: Weights = weights_of(root)
        self.wide: Twin = build(root, config, self.weights, wide=True)
        self.eager: Twin = build(root, config, self.weights, wide=False)
        self.modules = observable(root, self.weights)
        self.parameters = dict(root.named_parameters())
        self.compared: dict[str, tuple[Scene, Compared]] = {}
        self.said: dict[str, list[str]] = defaultdict(list)
        self.units: dict[str, float] = {}
        self.notes: list[str] = []
        self.seen: Counter[tuple[str, str]] = Counter()
        self.other_rows: list[Row] = []  # of other modes than training
        if not (model.training or root.training):
            self._left_in_training()
        if self.weights.quantized:
            self.notes.append(
                f"{self.weights.quantized} quantized layers: right are their dequantized weights"
            )
        for path, adapter in self.weights.adapters.items():
            zero = [b for _, b, _ in adapter.factors if not self._parameter(path, b).any()]
            if zero:
                self.notes.append("adapters whose B is zero add nothing, and are not exercised")
                break

    def _parameter(self, plain: str, name: str) -> torch.Tensor:
        own = next(p for p, q in self.weights.paths.items() if q == plain)
        return self.parameters[f"{own}.{name}"].detach()

    def _left_in_training(self) -> None:
        for path, dropout in left_in_training(self.root):
            text = "in training mode, while the model is in evaluation mode"
            if dropout:
                plain = self.weights.paths.get(path, path)
                self.said[plain].append(f"it is {text}: its dropout is on ({dropout})")
            else:
                self.notes.append(f"{path}: {text}")

    # ---- modules

    def compare(self, scene: Scene) -> None:
        first = not self.compared
        with quiet_state(self.root, True) as note:
            try:
                compared = compare_scene(
                    self.root, self.modules, scene, self.wide, self.eager, self.parameters
                )
            except Exception as error:  # anyone's code
                if first:
                    raise Unverifiable(
                        f"a training step on the {scene.name} input fails with {said(error)}"
                    ) from error
                self._fails(scene, error)
                return
        if note and first:
            self.notes.append(note)
        if scene.documents is not None and self._documents_meet(compared, scene.documents):
            self.notes.append(
                f"{scene.name} input: not compared, since documents given by position ids see each "
                "other in transformers' own model"
            )
            return
        if compared.flips:
            self.notes.append(
                f"{scene.name} input: {compared.flips} choices of experts differ from float64's, by "
                "a rounding or by a finding, so that the end-to-end error tells nothing"
            )
        self.compared[scene.name] = scene, compared
        for path, reason in compared.unchecked.items():
            self.notes.append(f"{path}: not compared ({reason})")
        if first:
            self._note_implementations(compared)
        for path, rows in _broken(compared.rows).items():
            self._say(path, rows, scene, compared)

    def _fails(self, scene: Scene, error: Exception) -> None:
        """A model that refuses a kind of input says so; one that fails, alone, has a fault."""
        if isinstance(error, ImplementationUnavailable) or self._twin_fails(scene):
            self.notes.append(
                f"{scene.name} input: not compared, since the model or its reference refuses it "
                f"({said(error)})"
            )
        else:
            self.said[""].append(
                f"fails on the {scene.name} input with {said(error)}; transformers' own does not"
            )

    def _twin_fails(self, scene: Scene) -> bool:
        try:
            run(self.eager.model, {}, self.eager.parameters, scene)
        except Exception:  # of transformers' code, of any class
            return True
        return False

    def _documents_meet(self, compared: Compared, documents: torch.Tensor) -> bool:
        apart = documents[:, None, :, None] != documents[:, None, None, :]
        for masks in compared.truth.masks().values():
            for mask in attention_masks(masks).values():
                return bool((seen(mask) & apart).any())
        return False

    def _say(
        self, path: str, rows: list[Row], scene: Scene, compared: Compared, where: str = ""
    ) -> None:
        # A value rather than the gradients that are wrong because of it.
        worst = max(
            rows,
            key=lambda r: (math.isfinite(r.error), not r.what.startswith("gradient"), r.units),
        )
        self.units[path] = max(self.units.get(path, 0.0), *(r.units for r in rows))
        if self.said[path]:
            return  # said of an earlier input
        error, allowed = apart(worst.error, worst.budget)
        text = (
            f"{spoken(worst.what)} differs from float64 by {worst.units:.3g} contract units (error "
            f"{error} at {list(worst.where)}, allowed {allowed}, {scene.name} input){where}"
        )
        if worst.what.endswith((DETACHED, ")")):  # or its shape
            text = f"{spoken(worst.what)} ({scene.name} input){where}"
        if worst.shared:
            factor, _ = apart(1 + worst.factor, 1.0, 6)
            text = (
                f"{spoken(worst.what)} differs from float64 by {worst.units:.3g} contract units (a "
                f"factor of {factor} in all elements, {scene.name} input){where}"
            )
        why = self._why(worst, rows, scene, compared)
        self.said[path].append(f"{text}; {why}" if why else text)

    def _why(self, worst: Row, rows: list[Row], scene: Scene, compared: Compared) -> str:
        """A cause, from the worst row that is a value, or a gradient of one."""
        calls = [c for c in compared.ran.calls if c.path == worst.path]
        order = sorted(rows, key=lambda r: (r.what.startswith("gradient"), -r.units))
        replayer = Replayer(self.wide, compared.truth.masks())
        for row in order[:2]:
            for call in calls:
                if text := Diagnosis(call, row, scene, replayer).text():
                    return text
        ratios = (Diagnosis(call, order[0], scene, replayer).ratio() for call in calls)
        return next(filter(None, (*ratios, *map(scaled, (worst, *order[:2])))), "")

    def _note_implementations(self, compared: Compared) -> None:
        done: set[str] = set()
        for call in compared.ran.calls:
            if call.path in done or call.path not in self.modules:
                continue
            done.add(call.path)
            module = self.modules[call.path]
            self.seen[type(module).__name__, _by(module, call)] += 1

    def _note_windows(self) -> None:
        config = self.config.get_text_config()
        S = max(scene.batch["input_ids"].shape[1] for scene, _ in self.compared.values())
        window = getattr(config, "sliding_window", None)
        used = getattr(config, "use_sliding_window", True)
        if isinstance(window, int) and used and window >= S:
            self.notes.append(
                f"the window of {window} is not exercised by {S} tokens (--lengths {window + 8})"
            )

    # ---- probes

    def probe(self, scenes: list[Scene]) -> None:
        self._note_windows()
        try:
            random = self._draws(scenes[0])
            for scene in scenes:
                self._evaluate(scene)
            if random:
                self.notes.append(
                    "leaks and the cache: not looked at, since two runs of the same input differ"
                )
                return
            with quiet_state(self.root, False):
                self._probe(scenes)
        except Exception as error:  # anyone's code
            text = f"a forward in evaluation mode fails with {said(error)}"
            if not any(self.said.values()):
                raise Unverifiable(text) from error
            self.notes.append(f"leaks and the cache: not looked at, since {text}")

    def _draws(self, scene: Scene) -> bool:
        """Whether a module draws random numbers, which every other comparison takes for a fault."""
        for training in (True, False):
            with quiet_state(self.root, training):
                moved = draws(self.root, self.modules, scene.without_labels())
            if moved is not None:
                self.units[moved.path] = max(self.units.get(moved.path, 0.0), moved.units)
                self.said[moved.path].insert(0, moved.text)
                return True
        return False

    def _evaluate(self, scene: Scene) -> None:
        """Compares values in evaluation mode without gradients, and says which of both it is."""
        scene, earlier = self.compared[scene.name]
        named = scene._replace(name=f"evaluated {scene.name}")

        def ran(training: bool, gradients: bool) -> Compared:
            with quiet_state(self.root, training):
                return compare_forward(self.root, self.modules, named, earlier, gradients=gradients)

        compared = ran(False, False)
        self.other_rows += compared.rows
        broken = _broken(compared.rows)
        if all(self.said[path] for path in broken):
            return
        modes = {
            "in evaluation mode": _broken(ran(False, True).rows),
            "under torch.no_grad": _broken(ran(True, False).rows),
        }
        agrees: dict[tuple[str, ...], str] = {
            ("in evaluation mode",): "in training mode it agrees",
            ("under torch.no_grad",): "with gradients it agrees",
        }
        for path, rows in broken.items():
            by = tuple(mode for mode, others in modes.items() if path in others)
            where = f" {' and '.join(by or modes)}; {agrees.get(by, 'in training it agrees')}"
            self._say(path, rows, named, compared, where)

    def _probe(self, scenes: list[Scene]) -> None:
        root: Any = self.root
        vocab = root.get_input_embeddings().num_embeddings
        for probe in probes(scenes, vocab, self._reach()):
            moved = leak(self.root, self.modules, probe)
            if moved is None:
                continue
            if leak(self.eager.model, self._twins(), probe) is not None:
                self.notes.append(
                    f"{probe.changed} moves {probe.stays} in transformers' own model too"
                )
                continue
            self._leaks(moved, f"leak: {probe.changed}, changed, moves {probe.stays} here ")
        for scene in scenes:
            masks = self.compared[scene.name][1].truth.masks()
            batch = scene.without_labels()
            recorder = forward(self.root, self.modules, batch)
            for moved in mask_leaks(recorder, masks, scene):
                self._leaks(moved, "leak: ")
        self._decode(scenes)

    def _twins(self) -> dict[str, nn.Module]:
        return {p: m for p in self.modules if (m := self.eager.module(p)) is not None}

    def _leaks(self, moved: Moved, start: str) -> None:
        said = self.said[moved.path]
        self.units[moved.path] = max(self.units.get(moved.path, 0.0), moved.units)
        if not any(text.startswith("leak") for text in said):
            said.append(f"{start}{moved.text}")

    def _reach(self) -> int | None:
        """How far back the last layer sees, if every layer has a window."""
        for scene, compared in self.compared.values():
            if scene.documents is None and scene.kept is None:
                windows = {}
                for key, masks in compared.truth.masks().items():
                    if key[0].endswith(("attn", "attention")):
                        for mask in attention_masks(masks).values():
                            windows[key] = window_of(seen(mask))
                if windows and None not in windows.values():
                    return sum(w - 1 for w in windows.values() if w) + 1
        return None

    def _decode(self, scenes: list[Scene]) -> None:
        scene = next((s for s in scenes if s.documents is None), None)
        if scene is None or not hasattr(self.root, "generate"):
            return
        plain = scene._replace(batch={"input_ids": scene.batch["input_ids"]})
        try:
            moved = stale_cache(self.root, self.modules, plain)
        except Exception as error:  # anyone's code
            self.notes.append(f"decoding with a cache: not compared ({said(error)})")
            return
        if moved is None:
            return
        if stale_cache(self.eager.model, self._twins(), plain) is not None:
            self.notes.append("decoding with a cache differs in transformers' own model too")
            return
        if moved.by <= DRIFT * cache_drift(self.eager.model, self._twins(), plain):
            return  # roundings, which norms amplify behind massive activations
        self.units[moved.path] = max(self.units.get(moved.path, 0.0), moved.units)
        self.said[moved.path].append(f"stale cache: {moved.text}")

    # ---- the result

    def result(self) -> Verification:
        for path, sentences in structure(self.root, self.config, self.weights, self.wide).items():
            known = " ".join(self.said[path])
            self.said[path] += [s for s in sentences if s not in known]
        name = type(self.root).__name__
        findings = [
            Finding(path or name, "; ".join(texts), self.units.get(path, math.inf))
            for path, texts in self.said.items()
            if texts
        ]
        trained = [r for _, c in self.compared.values() for r in c.rows]
        rows = sorted((*trained, *self.other_rows), key=lambda r: -r.units)
        whole = [r for _, c in self.compared.values() for r in c.whole]
        flips = any(c.flips for _, c in self.compared.values())
        far = [r for r in whole if r.units > WHOLE_LIMIT]
        if far and not findings and not flips:
            worst = max(far, key=lambda r: r.units)
            findings.append(
                Finding(
                    name,
                    f"{worst.what} end to end differs from float64 by {worst.units:.3g} contract "
                    f"units ({worst.scene} input), and no module alone does",
                    worst.units,
                )
            )
        values = {r.path for r in rows if r.units > 1 and not r.what.startswith("gradient")}
        gradients = {r.path or name for r in rows if r.units > 1 and r.path not in values}
        # A wrong value makes gradients wrong elsewhere: those of a tied embedding, for one.
        findings.sort(key=lambda f: (f.module in gradients, -min(f.units, 1e300)))
        report = report_of(self.model)
        return Verification(
            model=name,
            dtype=short(next(self.root.parameters()).dtype),
            scenes=tuple(self.compared),
            findings=findings,
            rows=rows,
            whole=whole,
            seen=self.seen,
            left={} if report is None else dict(report.left),
            notes=list(dict.fromkeys(self.notes)),
        )


def _broken(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """The rows that break the contract, by module."""
    by_path: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        if row.units > 1:
            by_path[row.path].append(row)
    return dict(by_path)


def _by(module: nn.Module, call: Call) -> str:
    """What computed a module: the registry's choices, what autograd says, and whose forward."""
    own: Any = module.forward
    own = getattr(own, "__func__", own)
    while hasattr(own, "__wrapped__"):
        own = own.__wrapped__
    package = (getattr(own, "__module__", None) or "").split(".")[0]
    parts = list(call.picks)
    if package not in ("transformers", "torch", "tilewright", ""):
        parts.append(f"a forward of {own.__module__}")
    return ", ".join(parts) or "PyTorch, as transformers has it"
