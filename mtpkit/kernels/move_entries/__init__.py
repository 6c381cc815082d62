from mtpkit.kernels.dispatch import pick
from mtpkit.kernels.move_entries import reference

move_entries = pick(reference.move_entries)
