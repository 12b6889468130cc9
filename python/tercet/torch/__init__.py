"""Tercet for PyTorch: `attend`, differentiable and seen by torch.compile as one operator, and layers made of it.

    from tercet.torch import attend, GatedDeltaNet

Tensors are on the CPU. docs/torch.md has the whole of it.
"""

from tercet.torch._layers import GatedDeltaNet, GatedDeltaNetState, LinearAttention, LinearAttentionState, causal_conv
from tercet.torch._ops import attend

__all__ = ["GatedDeltaNet", "GatedDeltaNetState", "LinearAttention", "LinearAttentionState", "attend", "causal_conv"]
