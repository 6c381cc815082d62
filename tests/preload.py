"""Modules that training and decoding import as they go, for the process that those of tests are
forked from."""

import gc

import datasets  # noqa: F401
import omegaconf  # noqa: F401
import pandas  # noqa: F401  # by pyarrow, with the first array
import torch._dynamo
import torch.utils.tensorboard  # noqa: F401
import transformers.models.auto.tokenization_auto  # noqa: F401

import mtpkit.engine
import mtpkit.training.loop  # noqa: F401

gc.collect()
gc.freeze()  # forks look at no object of these, and so need no copies of their memory
