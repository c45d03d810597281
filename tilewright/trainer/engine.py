"""Operations on a model prepared for training: gradients, steps, evaluation, checkpoints, exports.
The training loop, the tests and other callers share them.

    sums = engine.forward_backward(batches, language_modeling)      # any number of times
    norm = engine.optim_step(lr_factor, max_norm)                   # divides by the denominators

Backward passes are of sums. The step divides gradients once, by the denominators of all calls since
the previous step, so a step's gradient does not depend on how it was split into calls.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from tilewright.core.torch_names import FakeTensor
from tilewright.nn.peft import save_adapter
from tilewright.ops.attention.context_parallel import unshard
from tilewright.trainer.checkpoint import checkpoint, hf
from tilewright.trainer.checkpoint.made_of import NOTHING, MadeOf
from tilewright.trainer.losses.before import Counted
from tilewright.trainer.losses.loss import Loss
from tilewright.trainer.models.head import LossFunction, OfSequence, Shaping
from tilewright.trainer.models.model import Outcome, Transformer
from tilewright.trainer.models.moe import statistics
from tilewright.trainer.optim.optim import kinds, peaks, set_lr, set_values
from tilewright.trainer.parallel.gradients import global_norm, scale
from tilewright.trainer.parallel.mesh import Mesh
from tilewright.trainer.parallel.parts import Parts
from tilewright.trainer.reference import Compared

Batch = Mapping[str, torch.Tensor]
TASKS = {"language_model": "CAUSAL_LM", "reward": "SEQ_CLS"}  # PEFT's, of heads


class NotFinite(ValueError):
    """A loss or a norm that is infinite or NaN."""


class Reading:
    """Numbers on their way to the host from now on: reading them waits for what the device was
    asked for before, not for the optimizer's step that may have followed.
    """

    def __init__(self, tensor: torch.Tensor):
        self._host = tensor.to("cpu", non_blocking=True)  # in pinned memory
        real = tensor.is_cuda and not isinstance(tensor, FakeTensor)
        self._there = torch.cuda.Event() if real else None
        if self._there is not None:
            self._there.record()

    def tensor(self) -> torch.Tensor:
        if self._there is not None:
            self._there.synchronize()
        return self._host


@dataclasses.dataclass(frozen=True)
class Sums:
    """The sums of one call over all ranks. Reading a number waits for this call alone.

    totals: [loss, denominator, *further sums of the loss], float64.   per_token: this rank's, one
        entry per micro-batch.
    reports: the routers' [layers with experts, E + 2]: tokens per expert, load-balance loss and
        z-loss, over all ranks, padding left out; sums of `passes`.
    names: names of the further sums.   over: names of those that are means over another, by name.
    """

    totals: torch.Tensor
    per_token: list[torch.Tensor | None]
    reports: torch.Tensor | None = None
    passes: int = 1
    names: tuple[str, ...] = ()
    over: Mapping[str, str] = dataclasses.field(default_factory=dict)
    _read: list[Reading] = dataclasses.field(default_factory=list, init=False, repr=False)

    def __post_init__(self) -> None:
        self._read.extend(Reading(t) for t in (self.totals, self.reports) if t is not None)

    @property
    def values(self) -> list[float]:
        """`totals` on the host."""
        return self._read[0].tensor().tolist()

    @classmethod
    def joined(cls, sums: list[Sums]) -> Sums:
        """The sums of several calls with one loss, without per-token values and router reports."""
        totals = torch.stack([s.totals for s in sums]).sum(0)
        return cls(totals, [], names=sums[0].names, over=sums[0].over)

    @property
    def denominator(self) -> float:
        return self.values[1]

    @property
    def mean(self) -> float:
        """NaN if the denominator is 0: a sum without a target has no mean."""
        total, denominator, *_ = self.values
        return total / denominator if denominator else math.nan

    def reported(self) -> dict[str, float]:
        """The loss's further sums over its denominator, by name."""
        if not self.names:
            return {}
        _, denominator, *more = self.values
        sums = dict(zip(self.names, more, strict=True))
        divisors = {n: sums[self.over[n]] if n in self.over else denominator for n in sums}
        return {n: v / divisors[n] for n, v in sums.items() if divisors[n]}

    def router(self) -> dict[str, float]:
        """{} without experts. The busiest expert's tokens relative to the mean, for the mean layer
        and the worst, and the two router losses, which are not trained on: means over the rows of
        micro-batches. {} without a token, too: padding is none.
        """
        report = self._read[1].tensor() / self.passes if self.reports is not None else None
        if report is None or not report.any():
            return {}
        load = report[:, :-2].amax(1) / report[:, :-2].mean(1)
        balance, z = report[:, -2:].mean(0)
        names = ("expert_load", "worst_expert_load", "load_balance_loss", "z_loss")
        values = torch.stack((load.mean(), load.max(), balance, z)).tolist()
        return dict(zip(names, values, strict=True))


class Engine:
    """A prepared model and its optimizer on a mesh. Every rank must make the same calls.

    empty_steps: the number of steps so far whose denominator was 0.
    totals: the loss and the denominator of all calls since the last step, float64; None: no call.
    reference: what losses compare with; None: nothing, or what the data hold.
    """

    def __init__(self, parts: Parts, optimizer: torch.optim.Optimizer, mesh: Mesh):
        self.parts, self.optimizer, self.mesh = parts, optimizer, mesh
        self.parameters, self.peaks = list(parts.model.parameters()), peaks(optimizer)
        self.kinds = kinds(optimizer)
        self.empty_steps = 0
        self.reference: Compared | None = None
        parts.model.everywhere = mesh.loss.group
        self.totals: torch.Tensor | None = None

    @property
    def model(self) -> Transformer:
        """This rank's weights, under their names in the whole model."""
        return self.parts.model

    # ---- forward and backward

    def forward_backward(self, batches: Iterable[Batch], loss: LossFunction) -> Sums:
        """Accumulates the gradients of a loss's sum over the micro-batches.

        loss: a `Loss`, or a function that reports no further sums.
        """
        loss = Loss.of(loss)
        sums = self._sums(self.parts.forward_backward(self._before(batches, loss), loss), loss)
        own = sums.totals[:2]
        self.totals = own if self.totals is None else self.totals + own
        return sums

    def forward(
        self, batches: Iterable[Batch], loss: LossFunction, *, training: bool = False
    ) -> Sums:
        """The same without gradients and, unless `training`, without noise and dropout."""
        loss = Loss.of(loss)
        if training:
            batches = self._before(batches, loss)
            with torch.no_grad():
                return self._sums(self.parts.forward(batches, loss), loss)
        with self.evaluating(loss):  # one micro-batch at a time
            batches = batches if loss.before is None else loss.before(self, batches)
            return self._sums(self.parts.forward(batches, loss), loss)

    def _before(self, batches: Iterable[Batch], loss: Loss) -> list[Batch]:
        """The micro-batches of a step, as the loss gets them."""
        if loss.before is None:
            return list(batches)
        with self.evaluating(loss):
            return list(loss.before(self, batches))

    # What `Loss.before` asks for (`losses.before.Passes`).

    def compared(self, batch: Batch) -> Batch:
        """A micro-batch with the column reference_logprob, if there is a reference."""
        return batch if self.reference is None else self.reference.added(self.parts, batch)

    def sums(self, batch: Batch, function: LossFunction) -> torch.Tensor:
        """What a function of a micro-batch returns, float64, of this rank."""
        [outcome] = self.parts.forward([batch], function)
        sums = (outcome.total, outcome.denominator, *outcome.more)
        return torch.stack([t.double() for t in sums])

    def count(self, batches: list[Batch], function: Counted) -> torch.Tensor:
        """The sums of a function over micro-batches and all ranks; without a forward pass."""
        of = OfSequence(self.mesh.context.groups, self.mesh.loss.group)
        sums = [torch.stack(function(of, self.parts.moved(batch))) for batch in batches]
        return of.over_all(torch.stack(sums).sum(0))

    @contextlib.contextmanager
    def evaluating(self, loss: Loss | None = None) -> Iterator[None]:
        """Forward passes within are without gradients and without noise. Losses of tokens are
        cross-entropies, and those of a loss that is `tempered` have the temperature of training.
        """
        shaping, tempered = self.model.shaping, loss is not None and loss.tempered
        self.model.shaping = Shaping(shaping.loss_temperature) if tempered else Shaping()
        self.parts.wrapped.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            # No backward pass does it; gathered weights would outlive a step of the optimizer.
            self.parts.reshard()
            self.parts.wrapped.train()
            self.model.shaping = shaping

    def evaluate(self, batches: Iterable[Batch], loss: LossFunction) -> float:
        """The mean of a loss; NaN if no batch has a target."""
        return self.forward(batches, loss).mean

    def _sums(self, outcomes: list[Outcome], loss: Loss) -> Sums:
        totals = torch.zeros(2 + len(loss.reports), dtype=torch.float64, device=self.mesh.device)
        for outcome in outcomes:
            own = (outcome.total, outcome.denominator, *outcome.more)
            totals[: len(own)] += torch.stack([t.detach().double() for t in own])
        return Sums(
            self.mesh.loss.total(totals),
            [outcome.per_token for outcome in outcomes],
            self._of_routers([o.reports for o in outcomes if o.reports is not None]),
            names=loss.reports,
            over=loss.over,
        )

    def documents(
        self, batches: Sequence[Batch], values: Sequence[torch.Tensor | None]
    ) -> list[list[list[torch.Tensor]]]:
        """Values of tokens, such as `Sums.per_token`, by document. Every rank must call it.

        Args:
            batches: this rank's micro-batches.
            values: [1, T, ...] of each, of this rank's tokens.

        Returns:
            On the main rank [data-parallel ranks, their micro-batches, documents], tensors
            [tokens, ...] on the CPU, in the order in which `collate` took them, without padding;
            [] on other ranks.

        Raises:
            ValueError: a loss has computed no values of tokens; on every rank.
        """
        own: list[list[torch.Tensor]] = []
        for batch, value in zip(batches, values, strict=True):
            if value is None:  # of a stage of a pipeline that is not the last, too
                continue
            real = batch["real"].to(value.device)
            row, real = (unshard(t, 1, self.mesh.context)[0] for t in (value, real))
            ends = batch["cu_seqlens"].tolist()
            own.append([row[a:b] for a, b in itertools.pairwise(ends) if real[a]])
        sends = self.mesh.first_of_row and len(own) == len(batches)
        counts = [len(one) for one in own]
        told = self.mesh.control.gather([self.mesh.batch_rank, counts] if sends else None)
        if sum(about is not None for about in told) < self.mesh.layout.data:
            raise ValueError("there are no values of tokens: this loss computes their sum alone")
        sent = [t for one in own for t in one] if sends else []
        by_rank = {}
        for about, parts in zip(told, self.mesh.control.gather_tensors(sent), strict=False):
            if about is not None:
                each = iter(parts)
                by_rank[about[0]] = [[*itertools.islice(each, n)] for n in about[1]]
        return [by_rank[rank] for rank in sorted(by_rank)]

    def _of_routers(self, reports: list[torch.Tensor]) -> torch.Tensor | None:
        """What `Sums` has of these micro-batches of every rank."""
        if not reports:
            return None
        sums = self.mesh.row.total(torch.stack(reports).double())
        totals = self.mesh.pipeline.total(self.mesh.stage.total(statistics(sums)))
        rows = totals[:, -1:].clamp_min(1.0)
        return torch.cat((totals[:, :-3], totals[:, -3:-1] / rows), -1)

    # ---- the optimizer

    def divide(
        self, denominator: float | torch.Tensor | None = None, max_norm: float = 0.0
    ) -> torch.Tensor:
        """Divides the gradients of sums by a number (default: the denominators of all calls since
        the last step), and clips them to a global norm (0: no clipping). A divisor of 0 makes them
        0.

        Returns their norm before clipping, on the device.
        """
        # Copies that train apart have the mean of their denominators: the mean of their gradients
        # is then that of data parallelism.
        divisor = self._divisor(denominator) / self.mesh.layout.copies
        self.parts.sum_copies()
        elsewhere = set(self.parts.copies)
        counted = [p for p in self.parameters if p not in elsewhere]
        # DDP and FSDP2 average over ranks.
        factor = torch.where(divisor == 0, 0.0, self.mesh.layout.averaged / divisor)
        norm = global_norm(counted, self.mesh).to(factor.device) * factor
        if max_norm > 0:
            factor = factor * (max_norm / (norm + 1e-6)).clamp_max(1.0)
        scale(self.parameters, factor)
        return norm

    def _divisor(self, denominator: float | torch.Tensor | None) -> torch.Tensor:
        """A step's denominator, float64, on the device."""
        if denominator is None:
            if self.totals is None:
                raise ValueError("there is no gradient: call forward_backward first")
            denominator = self.totals[1]
        return torch.as_tensor(denominator, dtype=torch.float64, device=self.mesh.device)

    def set_values(self, values: Mapping[str, float]) -> None:
        """Sets what has another value from the next step on, by the names of the fields: of losses,
        of the optimizer's groups (weight_decay, adam_beta1, adam_beta2, adam_epsilon,
        muon_momentum), and peak learning rates (lr, and of its own groups the optimizer's other
        one). Call it before `forward_backward`. Groups that are exempt from weight decay stay so.

        Raises ValueError for a field that the optimizer's groups have no place for.
        """
        rest = {name: v for name, v in values.items() if name not in Shaping._fields}
        self.set_shaping(values)
        set_values(self.optimizer, self.kinds, self.peaks, rest)

    def set_shaping(self, values: Mapping[str, float]) -> None:
        """Sets those of these values that losses read."""
        of_losses = {name: v for name, v in values.items() if name in Shaping._fields}
        self.model.shaping = self.model.shaping._replace(**of_losses)

    def optim_step(
        self,
        factor: float = 1.0,
        max_norm: float = 0.0,
        denominator: float | torch.Tensor | None = None,
        watch: Callable[[], None] = lambda: None,
    ) -> float:
        """Divides gradients, clips them, and steps. Returns their norm before clipping.

        A step whose denominator is 0 has no target: it returns 0.0, changes no weight and no state
        of the optimizer (weight decay included), and `empty_steps` counts it.

        Args:
            factor: multiplies each group's peak learning rate.
            max_norm: gradients are clipped to this global norm; 0: no clipping.
            denominator: default: the sum of those of all calls since the last step.
            watch: called when the gradients are as the optimizer gets them, on every rank.

        Raises:
            NotFinite: the loss, the denominator or the norm is infinite or NaN, on every rank. No
                weight has changed, and nothing is left of the gradients.
            ValueError: the denominator is negative; as before.
        """
        divisor = self._divisor(denominator)
        norm = self.divide(divisor, max_norm)
        total = norm.new_zeros(()) if self.totals is None else self.totals[0]
        # A step's only synchronization.
        norm, total, divisor = torch.stack((norm, total, divisor)).tolist()
        if (problem := _problem(total, divisor, norm)) is not None:
            self.zero()
            raise problem
        watch()
        if divisor:
            set_lr(self.optimizer, self.peaks, factor)
            self.optimizer.step()
        else:
            self.empty_steps += 1
        self.zero()
        return norm

    def move(self, device: torch.device) -> None:
        """Moves weights, gradients and the optimizer's states. What computes with them needs them
        on the mesh's device.
        """
        self.parts.move(device)
        for state in self.optimizer.state.values():
            state.update(moved(state, device))

    def zero(self) -> None:
        """Drops gradients, and their denominators."""
        self.optimizer.zero_grad(set_to_none=True)
        self.totals = None

    # ---- files

    def save(
        self,
        saver: checkpoint.Saver,
        step: int,
        state: dict[str, Any],
        values: Mapping[str, float] | None = None,
    ) -> pathlib.Path:
        """See `Saver.save`."""
        return saver.save(step, self.parts, self.optimizer, state, values, self._moved())

    def load(
        self,
        folders: list[pathlib.Path],
        identity: dict[str, dict[str, Any]],
        ops: dict[str, str],
        checked: bool = True,
        states: bool = True,
        made_of: MadeOf = NOTHING,
    ) -> tuple[pathlib.Path, dict[str, Any]]:
        """See `checkpoint.resume`."""
        options = {"run": identity, "ops": ops, "checked": checked, "states": states}
        options["made_of"] = made_of
        options["reference"] = self._moved()
        return checkpoint.resume(folders, self.parts, self.optimizer, self.mesh, **options)

    def _moved(self) -> dict[str, dict[str, torch.Tensor]]:
        return {} if self.reference is None else self.reference.moved()

    def export(
        self,
        target: pathlib.Path,
        *,
        dtype: torch.dtype | None = None,
        tokenizer: str | None = None,
        adapter_of: str | None = None,
    ) -> None:
        """Writes Hugging Face's files: dense weights, or, with adapter_of, the adapters alone."""
        if adapter_of is not None:
            files = hf.tokenizer_files(tokenizer) if tokenizer is not None else []
            whole = self.parts.with_all_adapters()
            task = TASKS[whole.config.head]
            save_adapter(whole, target, base_model=adapter_of, files=files, task_type=task)
        else:
            hf.save_weights(self.parts, target, tokenizer_path=tokenizer, dtype=dtype)


def moved(tensors: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """Those of more than a number, on a device: counters stay where their optimizer has them."""
    return {
        name: t.to(device) if torch.is_tensor(t) and t.numel() > 1 else t
        for name, t in tensors.items()
    }


def _problem(total: float, divisor: float, norm: float) -> ValueError | None:
    """Why a step cannot be taken."""
    if not math.isfinite(total):
        return NotFinite(f"loss is {total}")
    if not math.isfinite(divisor):
        return NotFinite(f"denominator is {divisor}")
    if divisor < 0:
        return ValueError(f"denominator must be at least 0, got {divisor}")
    if not math.isfinite(norm):
        return NotFinite(f"norm of the gradients is {norm}")
    return None


@contextlib.contextmanager
def reproducible(seed: int, deterministic: bool) -> Iterator[None]:
    """Seeds this rank; with `deterministic` allows only deterministic algorithms until the end of
    the block.
    """
    torch.manual_seed(seed)
    if not deterministic:
        yield
        return
    was_on = torch.are_deterministic_algorithms_enabled()
    warned = torch.is_deterministic_algorithms_warn_only_enabled()
    benchmark = torch.backends.cudnn.benchmark
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was_on, warn_only=warned)
        torch.backends.cudnn.benchmark = benchmark
