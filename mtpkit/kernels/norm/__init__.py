from mtpkit.kernels.dispatch import pick
from mtpkit.kernels.norm import reference

gated_rms_norm = pick(reference.gated_rms_norm)
rms_norm = pick(reference.rms_norm)

__all__ = ["gated_rms_norm", "rms_norm"]
