from mtpkit.kernels.dispatch import pick
from mtpkit.kernels.ssd import reference
from mtpkit.kernels.ssd.reference import KeptStates as KeptStates

ssd_scan = pick(reference.ssd_scan, differentiable=True)
ssd_varlen = pick(reference.ssd_varlen)
