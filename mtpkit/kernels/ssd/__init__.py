from mtpkit.kernels.dispatch import pick
from mtpkit.kernels.ssd import reference
from mtpkit.kernels.ssd.reference import KeptStates as KeptStates
from mtpkit.kernels.ssd.reference import ssd_chunk_scan as ssd_chunk_scan

ssd_varlen = pick(reference.ssd_varlen)
