from mtpkit.kernels.kv_store.reference import store_kv

__all__ = ["store_kv"]
