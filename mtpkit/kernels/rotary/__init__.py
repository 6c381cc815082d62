from mtpkit.kernels.dispatch import pick
from mtpkit.kernels.rotary import reference

rotate = pick(reference.rotate)
