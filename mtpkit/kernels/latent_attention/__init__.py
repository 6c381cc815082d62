from mtpkit.kernels.dispatch import pick
from mtpkit.kernels.latent_attention import reference

chunk_attention = pick(reference.chunk_attention)
latent_attention = pick(reference.latent_attention)
latent_context_attention = pick(reference.latent_context_attention)
