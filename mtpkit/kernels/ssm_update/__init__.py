from mtpkit.kernels.ssm_update.reference import ssm_replay_update, ssm_snapshot_update

__all__ = ["ssm_replay_update", "ssm_snapshot_update"]
