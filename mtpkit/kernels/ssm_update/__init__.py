from mtpkit.kernels.dispatch import pick
from mtpkit.kernels.ssm_update import reference
from mtpkit.kernels.ssm_update.ring import ring_base, ring_capacity, ring_length

ssm_replay_update = pick(reference.ssm_replay_update)
ssm_snapshot_update = pick(reference.ssm_snapshot_update)

__all__ = ["ring_base", "ring_capacity", "ring_length", "ssm_replay_update", "ssm_snapshot_update"]
