from mtpkit.kernels.dispatch import pick
from mtpkit.kernels.ssm_update import reference

ssm_replay_update = pick(reference.ssm_replay_update)
ssm_snapshot_update = pick(reference.ssm_snapshot_update)
