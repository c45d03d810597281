"""The model, the weights that it has, and the requests that wait for others."""

from __future__ import annotations

import collections
import contextlib
import itertools
import logging
import math
import pathlib
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from typing import Any, NamedTuple

import torch
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.continuous_batching import ContinuousBatchingManager
from transformers.generation.continuous_batching.cb_logits_processors import (
    ContinuousBatchingLogitsProcessor,
    ContinuousBatchingLogitsProcessorList,
)
from transformers.generation.stopping_criteria import StoppingCriteria, StoppingCriteriaList

from tilewright.nn import ADAPTER_CONFIG, load_adapter, merge_and_unload, reset_adapters
from tilewright.nn.weights import adapted
from tilewright.ops import BlockFP8, dequantize_block_fp8
from tilewright.sampler.asked import Asked, drawn, number

BASE = ""  # the name of the weights that the model begins with
CONFIG = "config.json"  # beside all weights
PAGE = 16  # tokens of a page of the cache
LOOK = 0.05  # seconds between looks for what has ended
TRIED = 6  # tokens by which continuous batching is tried on a model, of a prompt and after it
# What log-probabilities may differ by then from those of generate.
APART = collections.defaultdict(lambda: 0.25, {torch.float32: 1e-3, torch.float64: 1e-3})
DTYPES = {name: getattr(torch, name) for name in ("float32", "bfloat16", "float16")}
FP8 = "float8_e4m3fn"  # the dtype of weights in block-FP8
SCALES = "_scale_inv"  # what the names of their scales end in
Receive = Callable[[torch.Tensor], None]
log = logging.getLogger(__name__)


class Sample(NamedTuple):
    """What followed a prompt.

    tokens, logprobs: of each token, at temperature 1.   topk: of each token, the most probable ones
    with theirs.   reason: "stop" or "length".   weights: the name of the weights.   scored: of each
    token, the log-probabilities of those that were asked for.
    """

    tokens: list[int]
    logprobs: list[float]
    topk: list[list[tuple[int, float]]]
    reason: str
    weights: str
    scored: list[list[float]]


class Unsampled(RuntimeError):
    """What was asked for cannot be sampled."""


class Unknown(Unsampled):
    """Weights that were not loaded."""


class Drawing:
    """A sample that grows.   text: of its tokens, where texts end it."""

    def __init__(
        self,
        weights: str,
        asked: Asked,
        text: Callable[[list[int]], str] | None,
        name: str | None = None,
    ):
        self.weights, self.asked, self.text, self.name = weights, asked, text, name
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.topk: list[list[tuple[int, float]]] = []
        self.scored: list[list[float]] = []
        self.done: Future[Sample] = Future()
        self.stopped = False  # by a text, or aborted: continuous batching does not know it

    def __deepcopy__(self, memo: Any) -> Drawing:
        """Itself: continuous batching copies a request that has to make room, to go on with it."""
        return self

    def draw(self, logits: torch.Tensor) -> int:
        """The next token of logits [V]."""
        asked = self.asked
        if self.done.done():  # and not canceled yet
            return 0
        logits = logits.float()
        token = drawn(logits, asked, number(asked.seed, asked.sample, len(self.tokens)))
        logprobs = logits.log_softmax(-1)
        self.tokens.append(token)
        self.logprobs.append(logprobs[token].item())
        if asked.topk:
            best = logprobs.topk(min(asked.topk, len(logprobs)))
            self.topk.append([*zip(best.indices.tolist(), best.values.tolist(), strict=True)])
        if asked.scored:
            self.scored.append(logprobs[list(asked.scored)].tolist())
        if token in asked.ends:
            self._end("stop")
        elif asked.stops and self._has_stop():
            self.stopped = True
            self._end("stop")
        elif len(self.tokens) >= asked.max_tokens:
            self._end("length")
        return token

    def _has_stop(self) -> bool:
        assert self.text is not None  # the engine has checked that
        text = self.text(self.tokens)
        return any(stop in text for stop in self.asked.stops)

    def _end(self, reason: str) -> None:
        # It may be aborted by another thread at this time.
        with contextlib.suppress(InvalidStateError):
            given = self.tokens, self.logprobs, self.topk, reason, self.weights, self.scored
            self.done.set_result(Sample(*given))

    def fail(self, error: Exception) -> None:
        with contextlib.suppress(InvalidStateError):
            self.done.set_exception(Unsampled(f"{type(error).__name__}: {error}"))


class Engine:
    """Samples of a transformers model, in a thread of its own.

    Requests are grouped by the weights that they ask for: those of one name are generated together,
    by transformers' continuous batching, and the next name has its turn once they have ended. A
    family that continuous batching does not take is generated one sample at a time.

    Args:
        model: A transformers model of text; its weights are BASE's.
        path: Where these are read from again.
        tokens: How many tokens the cache has room for, of all samples at a time.
        text: Decodes tokens; None: texts cannot end a sample.
        block: Rows and columns of the blocks of FP8 that the weights at `path` are stored in, which
            the model has dequantized; None: they are not.
    """

    def __init__(
        self,
        model: Any,
        path: str,
        *,
        tokens: int = 32768,
        text: Callable[[list[int]], str] | None = None,
        block: tuple[int, int] | None = None,
    ):
        self.block = block
        self._codes: dict[str, torch.Tensor] = {}  # in FP8, without their scales yet
        self.model, self.tokens, self.text = model.eval().requires_grad_(False), tokens, text
        # Losses do not compute the head here, so that it may have an adapter as it is.
        model.adaptable = ("lm_head",)
        positions = getattr(model.config, "max_position_embeddings", None) or 0
        self.longest = min(tokens, positions) if positions > 0 else tokens
        why = unsupported(model)
        self.continuous = why is None
        if why is not None:
            log.warning("one sample at a time, by generate: %s", why)
        self.version = "default"  # what BASE's weights are called by who has sent them
        self._folders: dict[str, pathlib.Path | None] = {BASE: None}
        self._held: str | None = BASE
        self.path: str | pathlib.Path = path
        self._filled: str | pathlib.Path | None = path
        self._manager: ContinuousBatchingManager | None = None
        self._sent = False  # whether BASE's weights are no longer those that are read
        self._broken = False  # whether something was not sampled: a thread may be at its end
        self._scales: dict[Any, float] = {}  # of adapters that are off
        self._waiting: collections.deque[Drawing] = collections.deque()
        self._every: list[Drawing] = []  # that have not ended
        self._numbers = itertools.count()
        self._changed = threading.Condition()
        self._paused, self._closed, self._busy = 0, False, False
        self._thread = threading.Thread(target=self._run, name="sampler", daemon=True)
        self._thread.start()

    # ---- what other threads call

    def load(self, name: str, folder: pathlib.Path) -> None:
        """Makes weights known: adapters as PEFT has them, or all weights as transformers has. What
        was known by this name is replaced, for samples that begin from now on.

        Raises:
            FileNotFoundError: There is neither an adapter_config.json nor a config.json.
        """
        if not any((folder / name).is_file() for name in (ADAPTER_CONFIG, CONFIG)):
            raise FileNotFoundError(f"{folder} has no {ADAPTER_CONFIG}, and no {CONFIG}")
        with self._changed:
            if name not in self._folders:
                self._folders[name] = folder
                return
        with self.pausing():
            self._folders[name] = folder
            if self._held == name:
                self._held = None

    def forget(self, name: str) -> None:
        """Raises KeyError for weights that are not known."""
        with self.pausing():
            del self._folders[name]

    @property
    def names(self) -> list[str]:
        return [name for name in self._folders if name != BASE]

    @property
    def quantized(self) -> bool:
        """Whether it computes with weights in FP8; on a CPU transformers dequantizes them."""
        return any(t.dtype == torch.float8_e4m3fn for t in self.model.state_dict().values())

    def submit(
        self, weights: str, each: Sequence[Asked], name: str | None = None
    ) -> list[Future[Sample]]:
        """name: by which they are aborted. Raises Unknown, or Unsampled."""
        for asked in each:
            total = len(asked.tokens) + asked.max_tokens
            if not asked.tokens or total > self.longest:
                raise Unsampled(
                    f"the prompt has {len(asked.tokens)} tokens and max_tokens is "
                    f"{asked.max_tokens}; accepted are 1 to {self.longest} in all"
                )
            if asked.stops and self.text is None:
                raise Unsampled("stop: texts need a tokenizer, which this model has not")
        drawings = [Drawing(weights, asked, self.text, name) for asked in each]
        with self._changed:
            if weights not in self._folders:
                raise Unknown(f"there are no weights {weights!r}; known are {self.names}")
            self._waiting.extend(drawings)
            self._every = [d for d in self._every if not d.done.done()] + drawings
            self._changed.notify_all()
        return [drawing.done for drawing in drawings]

    def abort(self, name: str | None) -> None:
        """Ends what was submitted by this name, and has not ended, with Unsampled; None: all."""
        with self._changed:
            own = [d for d in self._every if name in (None, d.name) and not d.done.done()]
            kept = (d for d in self._waiting if d not in own)
            self._waiting = collections.deque(kept)
        for drawing in own:
            drawing.stopped = True
            drawing.fail(RuntimeError("it was aborted"))

    @contextlib.contextmanager
    def pausing(self) -> Any:
        """Within, nothing is generated: what has begun has ended, and what comes waits."""
        with self._changed:
            self._paused += 1
            self._changed.wait_for(lambda: not self._busy)
        try:
            yield
        finally:
            with self._changed:
                self._paused -= 1
                self._changed.notify_all()

    def receive(self, tensors: Sequence[tuple[str, str, Sequence[int]]], into: Receive) -> None:
        """Replaces weights of BASE, in a pause of its own.

        Args:
            tensors: The name, as the model's state_dict has it, the dtype and the shape of each.
                Weights of a model in block-FP8 may be, each followed by NAME_scale_inv.
            into: Fills a tensor.

        Raises:
            Unsampled: A name, a dtype or a shape is not the model's; nothing is received then.
            ValueError: Scales are not those of their weights.
        """
        with self.pausing():
            self._hold(BASE)
            own = self.model.state_dict()
            self._check(tensors, own)
            self._sent = True
            for name, dtype, shape in tensors:
                kind, there = getattr(torch, dtype), own.get(name)
                if there is not None and there.dtype == kind and there.is_contiguous():
                    into(there)
                    continue
                given = torch.empty(*shape, dtype=kind, device=self.model.device)
                into(given)
                if there is None:
                    base = name.removesuffix(SCALES)
                    stored = {base: self._codes.pop(base), name: given}
                    q = BlockFP8.from_safetensors(stored, base, block=self.block or (128, 128))
                    own[base].copy_(dequantize_block_fp8(q, dtype=own[base].dtype))
                elif dtype == FP8:
                    self._codes[name] = given  # until its scales come, maybe with the next tensors
                else:
                    there.copy_(given)
            self._forget_prefixes()

    def _check(
        self, tensors: Sequence[tuple[str, str, Sequence[int]]], own: Mapping[str, torch.Tensor]
    ) -> None:
        """Raises Unsampled for what does not fit the model."""
        dtypes, codes = [*DTYPES, *([] if self.block is None else [FP8])], {*self._codes}
        for name, dtype, shape in tensors:
            base = name.removesuffix(SCALES)
            wanted = [*own[name].shape] if name in own else None
            if wanted is None and base in codes and self.block is not None:
                sides = zip(own[base].shape, self.block, strict=True)
                wanted = [-(-side // one) for side, one in sides]
            if wanted != [*shape] or dtype not in dtypes:
                raise Unsampled(
                    f"{name}: {dtype} {[*shape]} was sent; the model has {wanted or 'none'}, and "
                    f"accepted dtypes are {', '.join(dtypes)}"
                )
            codes |= {name} if dtype == FP8 else set()

    def reset_cache(self) -> None:
        """Drops keys and values that are kept for other prompts."""
        with self.pausing():
            self._forget_prefixes()

    def close(self) -> None:
        """Ends the thread. What waits ends with Unsampled."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    # ---- the thread

    def _run(self) -> None:
        while True:
            with self._changed:
                self._busy = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._closed or (self._waiting and not self._paused))
                if self._closed:
                    self._drop()
                    for drawing in self._waiting:
                        drawing.fail(RuntimeError("the sampler has ended"))
                    return
                self._busy = True
                weights = self._waiting[0].weights
            try:
                self._hold(weights)
                self._group(weights)
            except Exception as error:
                self._drop()
                self._fail(weights, error)

    def _fail(self, weights: str, error: Exception) -> None:
        for drawing in self._taken(weights):
            drawing.fail(error)

    def _taken(self, weights: str) -> list[Drawing]:
        """What waits for these weights, and no longer does."""
        with self._changed:
            own = [d for d in self._waiting if d.weights == weights]
            self._waiting = collections.deque(d for d in self._waiting if d.weights != weights)
        return own

    def _group(self, weights: str) -> None:
        """Generates what asks for the weights that are held, and what comes if no other waits."""
        active: dict[str, Drawing] = {}
        try:
            for i in itertools.count():
                if not i or self._goes_on(weights):
                    for drawing in self._taken(weights):
                        self._begin(active, drawing)
                if not active:
                    break
                self._look(active)
            if self._broken:
                self._drop()
        except Exception as error:
            for drawing in active.values():
                drawing.fail(error)
            raise

    def _goes_on(self, weights: str) -> bool:
        with self._changed:
            others = any(drawing.weights != weights for drawing in self._waiting)
            return not (others or self._paused or self._closed)

    def _begin(self, active: dict[str, Drawing], drawing: Drawing) -> None:
        name = f"{next(self._numbers)}"
        if drawing.done.done():  # it was aborted
            return
        if not self.continuous:
            try:
                generate_alone(self.model, drawing)
            except Exception as error:  # of this one: the next may be sampled
                drawing.fail(error)
            return
        if self._manager is None:
            self._manager = manager_of(self.model, self.tokens)
        active[name] = drawing
        _add(self._manager, drawing, name)

    def _look(self, active: dict[str, Drawing]) -> None:
        """Takes out of `active` what has ended."""
        assert self._manager is not None
        output = self._manager.get_result(timeout=LOOK)
        if output is not None and output.is_finished():
            drawing = active.pop(output.request_id, None)
            if drawing is not None and not drawing.done.done():
                drawing.fail(RuntimeError(output.error or "it was not sampled"))
                self._broken = True
        for name in [name for name, drawing in active.items() if drawing.stopped]:
            self._manager.cancel_request(name)
            del active[name]
        if output is None:
            _check_running(self._manager)

    # ---- weights

    def _hold(self, name: str) -> None:
        """Puts weights into the model."""
        if name == self._held:
            return
        with contextlib.ExitStack() as paused:
            if (manager := self._manager) is not None:
                paused.enter_context(manager.pause())
                self._forget_prefixes()  # they are of other weights
            self._change(name)

    def _forget_prefixes(self) -> None:
        manager = self._manager
        if manager is not None and manager.batch_processor is not None:  # it has sampled
            manager.batch_processor.cache.reset()

    def _change(self, name: str) -> None:
        self._held, folder = None, self._folders[name]
        for module, scale in self._scales.items():
            module.scale = scale
        self._scales = {}
        if folder is not None and (folder / ADAPTER_CONFIG).is_file():
            self._fill(self.path)
            self._adapt(folder)
        else:
            self._scales = {module: module.scale for _, module in adapted(self.model)}
            for module in self._scales:
                module.scale = 0.0
            self._fill(self.path if folder is None else folder)
        self._held = name

    def _adapt(self, folder: pathlib.Path) -> None:
        try:
            load_adapter(self.model, folder)
        except ValueError:  # of another rank, or of other modules
            self._unload()
            load_adapter(self.model, folder)
        self.model.requires_grad_(False)

    def _fill(self, path: str | pathlib.Path) -> None:
        """Reads all weights, if they are not there."""
        if path == self._filled:
            return
        if path == self.path and self._sent:
            raise Unsampled("the weights that were sent were replaced by others; send them again")
        self._filled = None
        self._unload()
        other = type(self.model).from_pretrained(path, dtype=self.model.dtype)
        self.model.load_state_dict(other.state_dict())
        self._scales, self._filled = {}, path

    def _unload(self) -> None:
        """Plain layers again, with the bits that they had."""
        if any(True for _ in adapted(self.model)):
            reset_adapters(self.model)
            merge_and_unload(self.model)

    def _drop(self) -> None:
        """Ends continuous batching, with its cache."""
        if self._manager is not None:
            self._manager.stop(block=True, hard_stop=True)
            self._manager, self._broken = None, False


# ---- transformers


class _Drawn(ContinuousBatchingLogitsProcessor):
    """Draws a token for each row, and leaves it as the row's only one: what is greedy takes it."""

    supported_kwargs: dict[str, type] = {"drawing": Drawing}  # noqa: RUF012 (as its class has it)
    ignored_kwargs = ()

    def fill_defaults(self, int32_tensor: torch.Tensor) -> None:
        int32_tensor.zero_()

    def prepare_tensor_args(self, requests_with_new_token: list[Any]) -> torch.Tensor:
        self._rows = [
            request.state.logit_processor_kwargs["drawing"] for request in requests_with_new_token
        ]
        return torch.zeros(len(self._rows), dtype=torch.int32)

    def __call__(self, scores: torch.Tensor, tensor_arg: torch.Tensor) -> torch.Tensor:
        # Rows of requests whose prompt goes on in the next batch are the last, and are not read.
        tokens = [drawing.draw(row) for drawing, row in zip(self._rows, scores, strict=False)]
        return _only(scores, tokens + [0] * (len(scores) - len(tokens)))


class _Alone(LogitsProcessor):
    """As _Drawn, of one sample by generate."""

    def __init__(self, drawing: Drawing):
        self._drawing = drawing

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return _only(scores, [self._drawing.draw(scores[0])])


class _Ended(StoppingCriteria):
    def __init__(self, drawing: Drawing):
        self._drawing = drawing

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return torch.full((1,), self._drawing.done.done(), device=input_ids.device)


def _only(scores: torch.Tensor, tokens: list[int]) -> torch.Tensor:
    at = torch.tensor(tokens, device=scores.device)[:, None]
    return torch.full_like(scores, -torch.inf).scatter_(1, at, 0.0)


def manager_of(model: Any, tokens: int) -> ContinuousBatchingManager:
    """Continuous batching that has begun, with room for so many tokens."""
    manager = model.init_continuous_batching(
        generation_config=GenerationConfig(do_sample=False, eos_token_id=-1),
        continuous_batching_config=ContinuousBatchingConfig(
            page_size=PAGE,
            num_blocks=-(-tokens // PAGE),
            max_batch_tokens=min(tokens, 2048),
            use_async_batching=False,
            use_cuda_graph=False,  # tokens are drawn on the host
            auto_switch_to_flash=False,
        ),
    )
    # A processor of one's own cannot be passed; transformers makes those of its configuration.
    manager.logit_processor = ContinuousBatchingLogitsProcessorList(LogitsProcessorList([_Drawn()]))
    manager.logit_processor.tensors_required = 1
    manager.start()
    return manager


def _add(manager: ContinuousBatchingManager, drawing: Drawing, name: str) -> None:
    asked = drawing.asked
    manager.add_request(
        asked.tokens,
        request_id=name,
        max_new_tokens=asked.max_tokens,
        eos_token_id=[*asked.ends] or -1,
        drawing=drawing,
    )


def _check_running(manager: ContinuousBatchingManager) -> None:
    """Raises what its thread has ended with."""
    if not manager.is_running():
        error = manager.background_thread_status.fatal_error
        raise error or RuntimeError("continuous batching has ended")


def unsupported(model: Any) -> str | None:
    """Why continuous batching does not sample from a model; None where it does, as generate."""
    name = type(model).__name__
    if not (getattr(model, "_supports_sdpa", False) and hasattr(model, "init_continuous_batching")):
        return f"continuous batching does not take {name}"
    size = model.config.get_text_config().vocab_size
    tokens = [(7 * i + 1) % size for i in range(TRIED)]
    asked = [Asked(tokens[:n], TRIED, temperature=0.0) for n in (TRIED, TRIED // 2)]
    alone, together = ([Drawing(BASE, one, None) for one in asked] for _ in range(2))
    try:
        for drawing in alone:
            generate_alone(model, drawing)
    except Exception as error:
        return f"{name} does not generate: {type(error).__name__}: {error}"
    try:
        _generate_together(model, together)
    except Exception as error:
        return f"continuous batching fails for {name}: {type(error).__name__}: {error}"
    apart = max(map(_apart, alone, together))
    if not apart <= APART[model.dtype]:
        return f"continuous batching of {name} differs from generate by {apart:.3g}"
    return None


def _apart(one: Drawing, other: Drawing) -> float:
    """What log-probabilities differ by, until the first token that is another one: two that are as
    probable.
    """
    apart = 0.0
    each = zip(one.logprobs, other.logprobs, one.tokens, other.tokens, strict=False)
    for here, there, token, another in each:
        apart = max(apart, abs(here - there)) if math.isfinite(there) else math.inf
        if token != another:
            break
    return apart


def _generate_together(model: Any, drawings: Sequence[Drawing]) -> None:
    """By continuous batching, which is ended again. Raises what it has ended with."""
    before, manager = model.config._attn_implementation, None
    try:
        manager = manager_of(model, 4 * PAGE)
        for i, drawing in enumerate(drawings):
            _add(manager, drawing, f"{i}")
        while not all(drawing.done.done() for drawing in drawings):
            output = manager.get_result(timeout=LOOK)
            if output is not None and output.error:
                raise RuntimeError(output.error)
            if output is None:
                _check_running(manager)
    finally:
        if manager is not None:
            manager.stop(block=True, hard_stop=True)
        if model.config._attn_implementation != before:  # of a cache that was not made
            model.set_attn_implementation(before)


@torch.no_grad()
def generate_alone(model: Any, drawing: Drawing) -> None:
    """By transformers' generate. Raises what it raises."""
    asked = drawing.asked
    tokens = torch.tensor([asked.tokens], device=model.device)
    model.generate(
        tokens,
        attention_mask=torch.ones_like(tokens),
        # Without -1 the model's own would end it before the drawing does.
        generation_config=GenerationConfig(do_sample=False, pad_token_id=0, eos_token_id=-1),
        max_new_tokens=asked.max_tokens,
        logits_processor=LogitsProcessorList([_Alone(drawing)]),
        stopping_criteria=StoppingCriteriaList([_Ended(drawing)]),
    )
    if not drawing.done.done():
        drawing.fail(RuntimeError("generate has ended before it"))
