from mtpkit.kernels.dispatch import pick
from mtpkit.kernels.embedding import reference

embedding_part = pick(reference.embedding_part)
