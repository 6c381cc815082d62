"""Modules that training and decoding import as they go, for the process that those of tests are forked from."""

import omegaconf  # noqa: F401
import torch._dynamo
import torch.utils.tensorboard  # noqa: F401
import transformers.models.auto.tokenization_auto  # noqa: F401

import mtpkit.engine
import mtpkit.training.loop  # noqa: F401
