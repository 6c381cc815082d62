from mtpkit.kernels.adamw import reference
from mtpkit.kernels.dispatch import pick

adamw_ = pick(reference.adamw_)

__all__ = ["adamw_"]
