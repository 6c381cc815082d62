from mtpkit.kernels.adamw import reference
from mtpkit.kernels.dispatch import pick

adamw_ = pick(reference.adamw_)
