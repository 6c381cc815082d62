from mtpkit.kernels.dispatch import pick
from mtpkit.kernels.moe import reference

route = pick(reference.route)
expert_mlp = pick(reference.expert_mlp)
