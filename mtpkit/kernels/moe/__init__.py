from mtpkit.kernels.dispatch import pick
from mtpkit.kernels.moe import reference

choose_experts = pick(reference.choose_experts)
route = pick(reference.route)
expert_mlp = pick(reference.expert_mlp)
