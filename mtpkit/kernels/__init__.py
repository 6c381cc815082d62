"""Operations with a plain-PyTorch reference; each folder is one operation and exports the functions callers use."""
