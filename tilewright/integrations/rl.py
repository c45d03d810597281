"""Log-probabilities and entropies for the actors of reinforcement learning.

Functions with the signatures of verl's and SkyRL's own, computed by `ops.logprob_entropy` and
`ops.linear_logprob`, so that one line substitutes them:

    from tilewright.integrations import rl
    from verl.utils.experimental.torch_functional import FusedLinearForPPO
    from verl.workers.engine.fsdp import transformer_impl

    transformer_impl.logprobs_from_logits = rl.logprobs_from_logits
    FusedLinearForPPO.forward = lambda self, *args, **given: rl.logprobs_and_entropy(*args, **given)

Results are float32 whatever the logits' dtype is. Neither project is imported.
"""

from __future__ import annotations

import torch

from tilewright import ops


def logprobs_from_logits(
    logits: torch.Tensor,
    labels: torch.Tensor,
    inplace_backward: bool = True,
    *,
    temperature: float = 1.0,
    group: torch.distributed.ProcessGroup | None = None,
) -> torch.Tensor:
    """Log-probability of each label.

    The signature of `logprobs_from_logits` in verl's `utils.torch_functional` and in SkyRL's
    `skyrl_train.utils.torch_utils`.

    Args:
        logits: [..., V] fp32 | bf16 | fp16; differentiable.
        labels: [...] int64, each in [0, V), or -100, whose log-probability is 0.
        inplace_backward: Backward overwrites the logits with their gradient. A backward that still
            needs them raises RuntimeError. Without effect under torch.compile.
        temperature: > 0, divides the logits.
        group: logits are this rank's shard of the vocabulary, in rank order, and labels are
            replicated and relative to the whole vocabulary (tensor parallelism).

    Returns:
        [...] float32, in nats.

    Raises:
        TypeError, ValueError, IndexError: As `ops.logprob_entropy`.

    Example:
        >>> from tilewright.integrations import rl
        >>> logprobs = rl.logprobs_from_logits(torch.zeros(2, 3, 4), torch.ones(2, 3).long())
        >>> f"{logprobs[1, 2].item():.4f}"
        '-1.3863'
    """
    inplace = inplace_backward and not torch.compiler.is_compiling()
    logprobs, _ = ops.logprob_entropy(
        logits, labels, temperature=temperature, inplace=inplace, group=group
    )
    return logprobs


def entropy_from_logits(
    logits: torch.Tensor,
    requires_grad: bool = True,
    attention_mask: torch.Tensor | None = None,
    chunk_size: int | None = None,
    *,
    temperature: float = 1.0,
    group: torch.distributed.ProcessGroup | None = None,
) -> torch.Tensor:
    """Entropy of each row's distribution.

    Serves verl's `entropy_from_logits(logits)` and `entropy_from_logits_with_chunking(logits,
    chunk_size=)`, and SkyRL's `chunked_entropy_from_logits(logits, requires_grad=, attention_mask=,
    chunk_size=)`, whose callers pass requires_grad by name.

    Args:
        logits: [..., V] fp32 | bf16 | fp16; differentiable.
        requires_grad: Whether the entropy is differentiable.
        attention_mask: [...]; the entropy is multiplied by it.
        chunk_size: How many elements of the second-to-last dimension are computed at a time; None:
            all. Memory does not depend on it: no temporary is as large as the logits.
        temperature: > 0, divides the logits.
        group: As in `logprobs_from_logits`.

    Returns:
        [...] float32, in nats.

    Raises:
        TypeError: As `ops.logprob_entropy`.
        ValueError: attention_mask does not have the shape of the rows; or as `ops.logprob_entropy`.

    Example:
        >>> from tilewright.integrations import rl
        >>> f"{rl.entropy_from_logits(torch.zeros(1, 4)).item():.4f}"
        '1.3863'
    """
    if attention_mask is not None and attention_mask.shape != logits.shape[:-1]:
        raise ValueError(
            f"attention_mask must have shape {list(logits.shape[:-1])} (logits without its last "
            f"dimension), got {list(attention_mask.shape)}"
        )
    if not requires_grad:
        logits = logits.detach()
    parts = (logits,) if chunk_size is None else logits.split(chunk_size, dim=-2)
    entropies = []
    for part in parts:
        nothing = torch.zeros(part.shape[:-1], dtype=torch.int64, device=part.device)
        entropies.append(
            ops.logprob_entropy(part, nothing, temperature=temperature, group=group)[1]
        )
    entropy = entropies[0] if len(entropies) == 1 else torch.cat(entropies, -1)
    return entropy if attention_mask is None else entropy * attention_mask


def logprobs_and_entropy(
    hidden_states: torch.Tensor,
    vocab_weights: torch.Tensor,
    input_ids: torch.Tensor,
    temperature: float = 1.0,
    *,
    group: torch.distributed.ProcessGroup | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability of each label and entropy, from hidden states and the head, whose logits are
    never built.

    The signature of verl's `FusedLinearForPPO.forward`, and the first four arguments of its
    `linear_cross_entropy`.

    Args:
        hidden_states: [..., H] fp32 | bf16 | fp16; differentiable.
        vocab_weights: [V, H] in the dtype of hidden_states; differentiable.
        input_ids: [...] of an integer dtype: the labels, aligned with hidden_states (rolled by the
            caller), each in [0, V) or -100, where both results are 0.
        temperature: > 0, divides the logits.
        group: vocab_weights is this rank's shard of the vocabulary, in rank order; hidden_states
            and input_ids are replicated. The gradient of hidden_states is the whole one on every
            rank, where verl's and SkyRL's functions leave this rank's part: what gathered them must
            not sum it again (Megatron: `gather_from_sequence_parallel_region(hidden_states,
            tensor_parallel_output_grad=False)`).

    Returns:
        (log-probabilities [...], entropies [...]) float32, in nats.

    Raises:
        TypeError, ValueError, IndexError: As `ops.linear_logprob`.

    Example:
        >>> from tilewright.integrations import rl
        >>> x, weight = torch.zeros(1, 2, 8), torch.zeros(4, 8)
        >>> logprobs, entropy = rl.logprobs_and_entropy(x, weight, torch.tensor([[0, 3]]))
        >>> f"{logprobs[0, 1].item():.4f} {entropy[0, 1].item():.4f}"
        '-1.3863 1.3863'
    """
    logprobs, entropy = ops.linear_logprob(
        hidden_states, vocab_weights, input_ids.long(), temperature=temperature, group=group
    )
    return logprobs, entropy
