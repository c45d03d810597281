"""QuACK's ops, called with the arguments of tilewright's."""

from __future__ import annotations

from tilewright.bench.peer import PLAIN_LOSS, Unsupported, only


def _bias(weight, bias):
    if weight.dim() == 2 and bias is not None:
        raise Unsupported(
            "quack-kernels takes one bias a head with one weight a head, not one for all heads"
        )


def rmsnorm(x, weight, eps=1e-6, *, bias=None, offset=0.0, cast="llama", noise=None):
    from quack.rmsnorm import rmsnorm

    only("quack-kernels", {"noise": noise}, noise=None)
    _bias(weight, bias)
    return rmsnorm(x, weight, bias=bias, eps=eps, weight_offset=offset)


def add_rmsnorm(x, residual, weight, eps=1e-6, *, bias=None, offset=0.0, cast="llama", noise=None):
    from quack.rmsnorm import rmsnorm

    only("quack-kernels", {"noise": noise}, noise=None)
    _bias(weight, bias)
    return rmsnorm(
        x,
        weight,
        bias=bias,
        residual=residual,
        residual_dtype=residual.dtype,
        eps=eps,
        prenorm=True,
        weight_offset=offset,
    )


_LOSS = {**PLAIN_LOSS, "label_smoothing": 0.0, "z_loss": 0.0, "softcap": None}


def cross_entropy(
    logits, target, *, ignore_index=-100, class_weight=None, reduction="mean", inplace=False, **more
):
    from quack.cross_entropy import cross_entropy

    only("quack-kernels", more, **_LOSS)
    loss = cross_entropy(
        logits.reshape(-1, logits.shape[-1]),
        target.reshape(-1),
        weight=class_weight,
        ignore_index=ignore_index,
        reduction=reduction,
        inplace_backward=inplace,
    )
    return (loss.reshape(target.shape) if reduction == "none" else loss).float()


def linear_cross_entropy(
    x,
    weight,
    target,
    *,
    bias=None,
    ignore_index=-100,
    reduction="mean",
    accumulate="fp32",
    chunk_size=None,
    **more,
):
    from quack.linear_cross_entropy import chunked_linear_cross_entropy

    only(
        "quack-kernels",
        {"bias": bias, "accumulate": accumulate, **more},
        bias=None,
        accumulate="fp32",
        class_weight=None,
        **_LOSS,
    )
    if reduction == "none":
        raise Unsupported("quack-kernels' chunked loss does not take reduction='none'")
    rows, chunk = target.numel(), {} if chunk_size is None else {"chunk_size": chunk_size}
    for name, length in (
        ("rows", rows),
        ("columns of x", x.shape[-1]),
        ("classes", weight.shape[0]),
        *(("rows a chunk", c) for c in chunk.values()),
    ):
        if length % 8:  # it copies 16 bytes at a time and does not check this everywhere
            raise Unsupported(
                f"quack-kernels' chunked loss takes {name} in multiples of 8, not {length}"
            )
    return chunked_linear_cross_entropy(
        x.reshape(-1, x.shape[-1]),
        weight,
        target.reshape(-1),
        ignore_index=ignore_index,
        reduction=reduction,
        **chunk,
    ).float()
