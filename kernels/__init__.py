"""plait.kernels: the ops of a transformer, each with its plain reference, registered with torch.

Imports torch, triton and the standard library only. CUDA tensors run Triton (fp64 ones the reference), CPU tensors
the plain path, and everything runs Triton when the process was started with TRITON_INTERPRET=1. An op runs on the
card of its tensors. torch.autocast changes no op: dtypes are those of the arguments. linear without an activation,
its two gradients, dropout and rope can be differentiated twice; the other ops raise where that is asked for.
"""

from plait.kernels.attention_plain import attention_ref
from plait.kernels.dropout_op import dropout, dropout_ref
from plait.kernels.embed import embedding, embedding_ref, embedding_wgrad
from plait.kernels.entropy import cross_entropy, cross_entropy_ref, merge_stats, token_loss
from plait.kernels.flash import attention
from plait.kernels.gated import geglu, geglu_ref, swiglu, swiglu_ref
from plait.kernels.layernorm import layer_norm, layer_norm_ref
from plait.kernels.loss import linear_cross_entropy, linear_cross_entropy_ref
from plait.kernels.loss_ops import linear_cross_entropy_grad, linear_cross_entropy_stats
from plait.kernels.matmul import (
    linear,
    linear_dgrad,
    linear_dgrad_ref,
    linear_ref,
    linear_swiglu,
    linear_swiglu_ref,
    linear_wgrad,
    linear_wgrad_ref,
)
from plait.kernels.norms import l2_norm, l2_norm_ref, l2_norm_squared, l2_norm_squared_ref
from plait.kernels.optim import adamw_, adamw_ref
from plait.kernels.philox import philox_ref
from plait.kernels.rmsnorm import rms_norm, rms_norm_ref
from plait.kernels.rotary import rope, rope_, rope_ref

__all__ = [
    "adamw_",
    "adamw_ref",
    "attention",
    "attention_ref",
    "cross_entropy",
    "cross_entropy_ref",
    "dropout",
    "dropout_ref",
    "embedding",
    "embedding_ref",
    "embedding_wgrad",
    "geglu",
    "geglu_ref",
    "l2_norm",
    "l2_norm_ref",
    "l2_norm_squared",
    "l2_norm_squared_ref",
    "layer_norm",
    "layer_norm_ref",
    "linear",
    "linear_cross_entropy",
    "linear_cross_entropy_grad",
    "linear_cross_entropy_ref",
    "linear_cross_entropy_stats",
    "linear_dgrad",
    "linear_dgrad_ref",
    "linear_ref",
    "linear_swiglu",
    "linear_swiglu_ref",
    "linear_wgrad",
    "linear_wgrad_ref",
    "merge_stats",
    "philox_ref",
    "rms_norm",
    "rms_norm_ref",
    "rope",
    "rope_",
    "rope_ref",
    "swiglu",
    "swiglu_ref",
    "token_loss",
]
