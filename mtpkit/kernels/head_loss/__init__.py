"""Losses of draft heads for a chunk of logits, and the gradient with respect to the logits,
computed in place."""

from mtpkit.kernels.dispatch import pick
from mtpkit.kernels.head_loss import reference
from mtpkit.kernels.head_loss.slices import LossKind as LossKind

HeadLoss = pick(reference.HeadLoss)
