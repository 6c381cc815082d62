"""Losses of draft heads from a chunk of logits, and the gradient with respect to the logits, in place."""

from mtpkit.kernels.dispatch import pick
from mtpkit.kernels.head_loss import reference
from mtpkit.kernels.head_loss.slices import LossKind as LossKind

HeadLoss = pick(reference.HeadLoss)
