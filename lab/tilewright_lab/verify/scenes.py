"""The inputs that a model is verified on, and the state it is in meanwhile."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from tilewright_lab.verify.reference import IGNORED, Unverifiable

LEAST_TOKENS = 8


class Scene(NamedTuple):
    """A batch.

    kept: [B, S], False at padding; None: there is none.
    documents: [B, S], the number of each token's document in its row; None: one a row.
    """

    name: str
    batch: dict[str, Any]
    kept: torch.Tensor | None = None
    documents: torch.Tensor | None = None

    def without_labels(self, **changes: Any) -> dict[str, Any]:
        dropped = ("labels", "num_items_in_batch", "shift_labels")
        return {k: v for k, v in self.batch.items() if k not in dropped} | changes


def scenes(
    root: nn.Module, batch: dict[str, Any] | None, tokens: int, lengths: Sequence[int] = ()
) -> list[Scene]:
    """The given batch or random tokens as they are, with padding, and packed, as far as the model
    takes them; and a row of random tokens of each of the lengths.
    """
    forward = inspect.signature(type(root).forward).parameters
    kind = type(root).__name__
    if "input_ids" not in forward or not _vocabulary(root):
        raise Unverifiable(
            f"model's forward takes no input_ids, or it has no embedding of them ({kind}); only "
            "language models are verified"
        )
    if getattr(getattr(root, "config", None), "is_encoder_decoder", False):
        raise Unverifiable(
            f"model is an encoder and a decoder ({kind}); only one stack is verified"
        )
    device = next(root.parameters()).device
    ids = _given_ids(batch, root) if batch is not None else _random_ids(root, tokens)
    ids = ids.to(device)
    labels = "labels" in forward
    extra = any(p.kind == p.VAR_KEYWORD for p in forward.values())
    inputs = [_given(batch, ids, labels, device)]
    S = ids.shape[1]
    rows = torch.stack((ids[0], ids[-1].roll(1)))
    kept = torch.ones_like(rows, dtype=torch.bool)
    kept[0, : S // 4] = False
    kept[1, S - S // 3 :] = False
    target = rows.masked_fill(~kept | ~kept.roll(1, 1), IGNORED)
    target[:, 0] = IGNORED
    padded = {"input_ids": rows.masked_fill(~kept, _padding(root)), "attention_mask": kept.long()}
    if labels:
        padded["labels"] = target
        if extra:  # of a larger batch, as where gradients accumulate
            padded["num_items_in_batch"] = (target != IGNORED).sum() * 2 + 1
    inputs.append(Scene("padded", padded, kept))
    if "position_ids" in forward:
        inputs.append(_packed(ids[:1], labels))
    for length in lengths:
        row = _random_ids(root, length)[:1].to(device)
        inputs.append(_given(None, row, labels, device)._replace(name=f"{length} tokens"))
    for scene in inputs:
        if "use_cache" in forward or extra:
            scene.batch.setdefault("use_cache", False)
    return inputs


def _given_ids(batch: dict[str, Any], root: nn.Module) -> torch.Tensor:
    ids = batch.get("input_ids")
    if not isinstance(ids, torch.Tensor) or ids.dim() != 2 or ids.dtype != torch.int64:
        raise Unverifiable("batch must be a mapping with input_ids, an int64 tensor [B, S]")
    if not len(ids):
        raise Unverifiable(f"batch must have a row of tokens, got input_ids {list(ids.shape)}")
    if ids.shape[1] < LEAST_TOKENS:
        raise Unverifiable(
            f"batch has {ids.shape[1]} tokens a row; {LEAST_TOKENS} are the least that show a leak"
        )
    vocab = _vocabulary(root)
    _check_range("input_ids", ids, vocab)
    labels = batch.get("labels")
    if labels is not None:
        if not isinstance(labels, torch.Tensor) or labels.shape != ids.shape:
            got = list(labels.shape) if isinstance(labels, torch.Tensor) else type(labels).__name__
            raise Unverifiable(
                f"labels must be a tensor of input_ids' shape {list(ids.shape)}, got {got}"
            )
        counted = labels[labels != IGNORED]
        _check_range(f"labels that are not {IGNORED}", counted, vocab)
    return ids


def _check_range(name: str, values: torch.Tensor, vocab: int) -> None:
    wrong = values[(values < 0) | (values >= vocab)]
    if len(wrong):
        raise Unverifiable(f"{name} must be from 0 to {vocab - 1}, got {int(wrong[0])}")


def _vocabulary(root: Any) -> int:
    """The number of embeddings; 0: the model has none."""
    try:
        return int(getattr(root.get_input_embeddings(), "num_embeddings", 0))
    except (AttributeError, NotImplementedError):
        return 0


def _random_ids(root: Any, tokens: int) -> torch.Tensor:
    """Two rows of tokens that are none of the special ones."""
    vocab = _vocabulary(root)
    config = root.config.get_text_config()
    special: set[int | None] = set()
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        value = getattr(config, name, None)
        special.update(value if isinstance(value, (list, tuple)) else [value])
    known = range(min(vocab, 50_000))
    usable = torch.tensor([i for i in known if i not in special] or list(known))
    g = torch.Generator().manual_seed(0)
    return usable[torch.randint(len(usable), (2, tokens), generator=g)]


def _padding(root: Any) -> int:
    pad = root.config.get_text_config().pad_token_id
    return 0 if pad is None or pad < 0 else pad


def _given(batch, ids: torch.Tensor, labels: bool, device) -> Scene:
    if batch is None:
        inputs: dict[str, Any] = {"input_ids": ids}
        if labels:
            target = ids.clone()
            target[:, :3] = IGNORED  # a prompt
            inputs["labels"] = target
        return Scene("plain", inputs)
    inputs = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in batch.items()}
    if labels:
        inputs.setdefault("labels", ids)
    kept = inputs.get("attention_mask")
    kept = kept.bool() if isinstance(kept, torch.Tensor) and kept.shape == ids.shape else None
    if kept is not None and bool(kept.all()):
        kept = None
    target = inputs.get("labels") if labels else None
    if kept is not None and target is not None:
        # A token predicted from padding, where attention is arbitrary, has no defined loss.
        target = inputs["labels"] = target.masked_fill(~kept | ~kept.roll(1, 1), IGNORED)
    if target is not None and bool((target[:, 1:] == IGNORED).all()):
        raise Unverifiable(
            f"batch must have a target: labels after the first token are all {IGNORED}, or padding"
        )
    return Scene("given", inputs, kept, documents_of(inputs.get("position_ids")))


def documents_of(position_ids: torch.Tensor | None) -> torch.Tensor | None:
    """The number of each token's document, by position ids that start again."""
    if position_ids is None or position_ids.dim() != 2:
        return None
    starts = torch.ones_like(position_ids, dtype=torch.bool)
    starts[:, 1:] = position_ids.diff() != 1
    return starts.cumsum(1) - 1


def _packed(ids: torch.Tensor, labels: bool) -> Scene:
    S = ids.shape[1]
    lengths = [S // 3, S // 4, S - S // 3 - S // 4]
    positions = torch.cat([torch.arange(n) for n in lengths]).to(ids.device).unsqueeze(0)
    batch: dict[str, Any] = {"input_ids": ids, "position_ids": positions}
    if labels:
        batch["labels"] = ids.masked_fill(positions == 0, IGNORED)
    return Scene("packed", batch, None, documents_of(positions))


@contextlib.contextmanager
def quiet_state(root: nn.Module, training: bool) -> Iterator[str | None]:
    """Training or evaluation mode without dropout and gradient checkpointing; afterwards all is as
    it was. Yields a note if only the model itself could be set to training mode.
    """
    before = {m: m.training for m in root.modules()}
    checkpointing: dict[Any, Any] = {
        m: m.gradient_checkpointing
        for m in root.modules()
        if getattr(m, "gradient_checkpointing", False)
    }
    note = None
    try:
        with torch.random.fork_rng():
            for m in checkpointing:
                m.gradient_checkpointing = False
            root.train(training)
            if training and (drops := _dropout(root)):
                for m in root.modules():
                    m.training = m is root
                note = f"dropout is off ({drops}), so modules run in evaluation mode"
            yield note
    finally:
        for m, was in before.items():
            m.training = was
        for m, was in checkpointing.items():
            m.gradient_checkpointing = was


def left_in_training(root: nn.Module) -> Iterator[tuple[str, str]]:
    """The outermost modules in training mode of a model in evaluation mode: paths, and which
    dropout is on in each, or "".
    """
    over = ()
    for path, module in root.named_modules():
        if module.training and not (over and f"{path}.".startswith(over)):
            over += (f"{path}.",)
            yield path, _dropout(module)


def _dropout(root: nn.Module) -> str:
    dropouts = {
        f"nn.Dropout({m.p})" for m in root.modules() if isinstance(m, nn.Dropout) and m.p > 0
    }
    for m in root.modules():
        for name, value in vars(m).items():
            if "dropout" in name and isinstance(value, float) and value > 0:
                dropouts.add(f"{name} {value}")
    return ", ".join(sorted(dropouts))
