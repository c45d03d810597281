"""The experts of Hugging Face transformers' mixture-of-experts models, computed by `ops.moe_mlp`.

    from tilewright.integrations.transformers import register

    register()
    model = AutoModelForCausalLM.from_pretrained(name, experts_implementation="tilewright")

transformers (5.7 and later) keeps a table of functions that compute a layer's experts from its tokens and the router's
choice. `register` adds entries to it and changes nothing else; what the router does, and everything around the experts,
stays transformers'. Importing this module imports no transformers.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tilewright import platform
from tilewright.ops import _checks, moe_mlp
from tilewright.ops.moe import MOE_MLP
from tilewright.registry import ImplementationUnavailable

NAME = "tilewright"
OLDEST = (5, 7)   # of transformers
ACCEPTED = ("experts that compute down_proj(silu(gate) * up) without biases, with gate_up_proj [E, 2 I, H] (all gates "
            "before all ups) and down_proj [E, H, I], or both transposed")


def register(implementation: str = "auto") -> tuple[str, ...]:
    """Adds "tilewright" to the values that transformers takes as `experts_implementation`, in `from_pretrained`,
    `from_config` and `set_experts_implementation`.

    implementation: what "tilewright" stands for, a name of moe_mlp's implementations or "auto". Beside it each name
        gets an entry of its own: "tilewright:triton", "tilewright:cpp", "tilewright:eager" and so on.
    Returns the names added, "tilewright" first. They hold for the whole process; registering again replaces them.

    A layer that moe_mlp cannot compute (`why_not`), and a named implementation that cannot run here, raise
    ImplementationUnavailable when the layer is called: transformers asks no sooner. Products are in the weights' dtype,
    in autocast's where that is on (which copies the weights at each call, as it does for a linear layer); the result
    is in the dtype of the hidden states. Under transformers' expert parallelism, slots of experts on other ranks add
    nothing.
    Raises ImplementationUnavailable if transformers is missing or too old, ValueError or TypeError for a name that
    does not exist.
    """
    if implementation != "auto":
        MOE_MLP.implementation(implementation)
    interface = _interface()
    entries = {NAME: implementation, **{f"{NAME}:{name}": name for name in MOE_MLP.names()}}
    for name, chosen in entries.items():
        interface.register(name, _experts(name, chosen))
    return tuple(entries)


def why_not(experts: torch.nn.Module) -> str | None:
    """None if moe_mlp computes what this experts module of transformers does, else the reasons, in words."""
    reasons = []
    # A version of transformers without a flag has no experts that it would tell apart.
    if not getattr(experts, "has_gate", True):
        reasons.append("have no gate")
    if getattr(experts, "has_bias", False):
        reasons.append("have biases")
    if not getattr(experts, "is_concatenated", True):
        reasons.append("interleave gates with ups")
    if getattr(experts, "has_post_expert_norm", False):
        reasons.append("normalise what each of them gives")
    # transformers puts its own function where a class has none.
    if type(experts)._apply_gate.__module__ != "transformers.integrations.moe":
        reasons.append("apply their gate in a way of their own (_apply_gate)")
    elif not _is_silu(experts.act_fn):
        reasons.append(f"are activated by {getattr(experts.act_fn, '__name__', type(experts.act_fn).__name__)}")
    return ", ".join(reasons) or None


def _is_silu(act) -> bool:
    kind = type(act)
    return act is F.silu or kind is torch.nn.SiLU or (
        kind.__module__ == "transformers.activations" and kind.__name__ == "SiLUActivation")


def _interface():
    if reason := platform.no_module("transformers"):
        raise ImplementationUnavailable(f"{reason} (pip install 'tilewright[transformers]')")
    import transformers

    # Before, the table was there or not, but from_pretrained took transformers' own names only.
    if tuple(map(int, transformers.__version__.split(".")[:2])) < OLDEST:
        raise ImplementationUnavailable(f"transformers {transformers.__version__} takes no experts_implementation but "
                                        f"its own; {OLDEST[0]}.{OLDEST[1]} and later do")
    from transformers.integrations.moe import ExpertsInterface

    return ExpertsInterface


def _experts(name, implementation):
    def experts_forward(self: torch.nn.Module, hidden_states: torch.Tensor, top_k_index: torch.Tensor,
                        top_k_weights: torch.Tensor) -> torch.Tensor:
        if reason := why_not(self):
            raise ImplementationUnavailable(
                f'{self.config.model_type}: experts_implementation="{name}" cannot compute {type(self).__name__}, '
                f'which {reason}; it takes {ACCEPTED} (others: "grouped_mm", "eager")')
        gate_up, down = self.gate_up_proj, self.down_proj
        if getattr(self, "is_transposed", False):
            gate_up, down = gate_up.mT, down.mT   # read as they lie where the implementation can
        device = hidden_states.device.type
        autocast = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
        if autocast:
            gate_up, down = (t.to(torch.get_autocast_dtype(device)) for t in (gate_up, down))
        if getattr(self, "_is_expert_parallel", False):
            # There any index from num_experts on is that of an expert elsewhere; moe_mlp has one for all of them.
            top_k_index = top_k_index.clamp(max=gate_up.shape[0])
        with _checks.no_autocast(hidden_states):   # moe_mlp's products are not autocast's
            y = moe_mlp(hidden_states.to(gate_up.dtype), gate_up, down, top_k_index, top_k_weights,
                        implementation=implementation)
        return y.to(hidden_states.dtype)

    return experts_forward
