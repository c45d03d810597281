"""Other libraries' kernels, called with an op's arguments, for comparison with tilewright.

`PEERS` is the only list of them. A peer is imported only when one of its ops is called: importing
quack changes CuTe's tensor classes for the whole process, and importing flash-attn 2 loads its CUDA
extension.
"""

from __future__ import annotations

from dataclasses import replace

from tilewright.bench import peers_attention, peers_liger, peers_packages, peers_quack
from tilewright.bench.peer import Peer, on_cuda
from tilewright.core import platform


def versions() -> dict[str, str]:
    """Distribution and version of every peer, or "not installed", except torch's."""
    return dict(
        peer.installed() or (peer.distribution, "not installed")
        for peer in PEERS.values()
        if peer.distribution != "torch"
    )


def peer_of(provider: str) -> str:
    """The peer of which a provider is a way; the provider itself if it is no way of another."""
    return (PEERS[provider].of if provider in PEERS else "") or provider


PEERS: dict[str, Peer] = {
    "liger": Peer(
        "liger-kernel",
        on_cuda("liger-kernel", "liger_kernel", 80),
        {
            "rmsnorm": peers_liger.rmsnorm,
            "add_rmsnorm": peers_liger.add_rmsnorm,
            "silu_mul": peers_liger.silu_mul,
            "gelu_mul": peers_liger.gelu_mul,
            "rope": peers_liger.rope,
            "cross_entropy": peers_liger.cross_entropy,
            "linear_cross_entropy": peers_liger.linear_cross_entropy,
            "moe_mlp": peers_liger.moe_mlp,
        },
        consumes=frozenset({"cross_entropy", "rope"}),  # by the gradient, and the rotated rows
    ),
    "quack": Peer(
        "quack-kernels",
        on_cuda("quack-kernels", "quack", 90),
        {
            "rmsnorm": peers_quack.rmsnorm,
            "add_rmsnorm": peers_quack.add_rmsnorm,
            "cross_entropy": peers_quack.cross_entropy,
            "linear_cross_entropy": peers_quack.linear_cross_entropy,
        },
    ),
    "flash-attn": Peer(
        "flash-attn-4",
        peers_attention.no_flash,
        {"attention": peers_attention.flash_attention},
        elsewhere=("flash-attn-3", "flash-attn"),
    ),
    "flex": Peer(
        "torch",
        lambda device: (
            platform.no_cuda()
            if device == "cuda"
            else f"flex_attention has gradients for CUDA tensors, not {device}"
        ),
        {"attention": peers_attention.flex_attention},
    ),
    "transformers": Peer(
        "transformers",
        peers_packages.no_transformers,
        {"moe_mlp": peers_packages.experts_of_transformers("eager")},
    ),
    "transformers-grouped": Peer(
        "transformers",
        peers_packages.no_transformers,
        {"moe_mlp": peers_packages.experts_of_transformers("grouped_mm")},  # their default
        of="transformers",
    ),
    "torch-default": Peer(
        "torch",
        lambda device: peers_packages.no_linear_cross_entropy(),
        {"linear_cross_entropy": peers_packages.torch_linear_cross_entropy},
        of="torch",
    ),
    "torch-randn": Peer(
        "torch",
        lambda device: None,
        {"aqn_noise": peers_packages.torch_randn},
        of="torch",
        draws=frozenset({"aqn_noise"}),
    ),
    "torch-fused": Peer(
        "torch", lambda device: None, {"adamw_": peers_packages.torch_adamw(fused=True)}, of="torch"
    ),
    "torch-foreach": Peer(
        "torch",
        lambda device: None,
        {"adamw_": peers_packages.torch_adamw(foreach=True)},
        of="torch",
    ),
    "bitsandbytes": Peer(
        "bitsandbytes",
        lambda device: platform.no_module("bitsandbytes"),
        {
            "quantize_nf4": peers_packages.bitsandbytes_quantize_nf4,
            "dequantize_nf4": peers_packages.bitsandbytes_dequantize_nf4,
        },
    ),
    "torchao": Peer(
        "torchao",
        lambda device: platform.no_module("torchao"),
        {
            "quantize_nvfp4": peers_packages.torchao_quantize_nvfp4,
            "dequantize_nvfp4": peers_packages.torchao_dequantize_nvfp4,
        },
    ),
}
# The same functions in torch.compile, as the authors of both advise.
for _name in ("bitsandbytes", "torchao"):
    PEERS[f"{_name}-compiled"] = replace(
        PEERS[_name],
        ops={n: peers_packages.in_compile(f) for n, f in PEERS[_name].ops.items()},
        of=_name,
    )
