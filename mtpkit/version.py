"""The version of mtpkit, which every layer of the package may import."""

__version__ = "0.1.0"
