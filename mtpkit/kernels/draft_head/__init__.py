from mtpkit.kernels.dispatch import pick
from mtpkit.kernels.draft_head import reference

argmax = pick(reference.argmax)
linear_argmax = pick(reference.linear_argmax)
best = pick(reference.best)
linear_best = pick(reference.linear_best)
top_tokens = pick(reference.top_tokens)
