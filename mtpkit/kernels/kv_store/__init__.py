from mtpkit.kernels.dispatch import pick
from mtpkit.kernels.kv_store import reference

store_kv = pick(reference.store_kv)
