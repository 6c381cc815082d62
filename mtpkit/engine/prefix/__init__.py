"""The prefix cache: blocks found by their content, checkpoints of recurrent state, and the lookup
of both."""

from mtpkit.engine.prefix.blocks import CachedBlocks
from mtpkit.engine.prefix.cache import Hit, PrefixCache
from mtpkit.engine.prefix.store import CheckpointStore, checkpoint_bytes

__all__ = ["CachedBlocks", "CheckpointStore", "Hit", "PrefixCache", "checkpoint_bytes"]
