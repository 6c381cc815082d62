from mtpkit.kernels.dispatch import pick
from mtpkit.kernels.moe import reference

router_logits = pick(reference.router_logits)
route = pick(reference.route)
expert_mlp = pick(reference.expert_mlp)
