from mtpkit.kernels.dispatch import pick
from mtpkit.kernels.place_qkv import reference

place_qkv = pick(reference.place_qkv)
