from mtpkit.kernels.dispatch import pick
from mtpkit.kernels.norm import reference

gated_rms_norm = pick(reference.gated_rms_norm)
mtp_input = pick(reference.mtp_input)
norm_gate = pick(reference.norm_gate)
rms_norm = pick(reference.rms_norm)
