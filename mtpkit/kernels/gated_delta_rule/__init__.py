from mtpkit.kernels.dispatch import pick
from mtpkit.kernels.gated_delta_rule import reference

delta_inputs = pick(reference.delta_inputs)
delta_replay_update = pick(reference.delta_replay_update)
delta_rule = pick(reference.delta_rule, differentiable=True)
delta_snapshot_update = pick(reference.delta_snapshot_update)
delta_varlen = pick(reference.delta_varlen)
