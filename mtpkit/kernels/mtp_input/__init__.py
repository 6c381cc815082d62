from mtpkit.kernels.dispatch import pick
from mtpkit.kernels.mtp_input import reference

mtp_input = pick(reference.mtp_input)

__all__ = ["mtp_input"]
