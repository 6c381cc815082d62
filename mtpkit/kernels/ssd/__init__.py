from mtpkit.kernels.ssd.reference import ssd_chunk_scan

__all__ = ["ssd_chunk_scan"]
