from mtpkit.kernels.dispatch import pick
from mtpkit.kernels.latent_attention import reference

latent_attention = pick(reference.latent_attention)
latent_prefill_attention = pick(reference.latent_prefill_attention)
