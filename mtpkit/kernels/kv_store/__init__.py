from mtpkit.kernels.dispatch import pick
from mtpkit.kernels.kv_store import reference
from mtpkit.kernels.kv_store.reference import UNSCALED as UNSCALED
from mtpkit.kernels.kv_store.reference import KVScales as KVScales
from mtpkit.kernels.kv_store.reference import through_fp8 as through_fp8

store_kv = pick(reference.store_kv)
