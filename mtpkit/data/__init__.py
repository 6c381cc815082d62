"""From text to packed token sequences (sources -> documents -> dataset -> loader), and the base's
own answers.

`mtpkit.data.prepare` does the steps up to packing once and writes a directory that `build_dataset`
memory-maps.
"""
