from mtpkit.kernels.dispatch import pick
from mtpkit.kernels.step_rows import reference
from mtpkit.kernels.step_rows.reference import DecodeRows

decode_rows = pick(reference.decode_rows)
store_rows = pick(reference.store_rows)
kv_slots = pick(reference.kv_slots)
ring_lens_after = pick(reference.ring_lens_after)

__all__ = ["DecodeRows", "decode_rows", "kv_slots", "ring_lens_after", "store_rows"]
