from mtpkit.kernels.dispatch import pick
from mtpkit.kernels.ssm_update import reference
from mtpkit.kernels.ssm_update.reference import ring_base as ring_base
from mtpkit.kernels.ssm_update.reference import ring_capacity as ring_capacity
from mtpkit.kernels.ssm_update.reference import ring_length as ring_length

ssm_replay_update = pick(reference.ssm_replay_update)
ssm_snapshot_update = pick(reference.ssm_snapshot_update)
