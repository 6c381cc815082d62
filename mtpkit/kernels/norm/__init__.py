from mtpkit.kernels.dispatch import pick
from mtpkit.kernels.norm import reference

add_rms_norm = pick(reference.add_rms_norm)
gated_rms_norm = pick(reference.gated_rms_norm)
rms_norm = pick(reference.rms_norm)

__all__ = ["add_rms_norm", "gated_rms_norm", "rms_norm"]
