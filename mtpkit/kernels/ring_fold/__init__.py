from mtpkit.kernels.dispatch import pick
from mtpkit.kernels.ring_fold import reference

fold_ring = pick(reference.fold_ring)
