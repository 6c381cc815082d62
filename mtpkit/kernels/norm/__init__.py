from mtpkit.kernels.dispatch import pick
from mtpkit.kernels.norm import reference

gated_rms_norm = pick(reference.gated_rms_norm)
mtp_input = pick(reference.mtp_input)
rms_norm = pick(reference.rms_norm)
