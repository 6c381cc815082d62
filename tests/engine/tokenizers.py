"""Tokenizers of the four kinds that models have, with small vocabularies, made by the library
`tokenizers`."""

import functools

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SPECIAL = ("<s>", "<end>")
WORDS = ["the", "cat", "we", "re", "s", "don", "n", "t", "m", "ve", "x", "é"]
MARKS = [".", ",", "?", "!", "'"]


def _fast(tokenizer, **settings):
    tokenizer.add_special_tokens(list(SPECIAL))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="<end>", **settings
    )


def letters_of_bytes():
    """The letter that stands for each byte in byte-level vocabularies, as GPT-2 chose them."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return {byte: chr(byte) for byte in plain} | {
        byte: chr(256 + index) for index, byte in enumerate(others)
    }


def byte_level():
    """Token i is byte i; then some of several bytes, which begin or end inside a character."""
    letters = letters_of_bytes()
    several = [
        b" the",
        b"cat",
        b" \xe2\x82",
        b"\xac\xf0",
        b"\x9f\x98",
        "é".encode(),
        "\ufffd".encode(),
        b"\x80\x80",
    ]
    tokens = [
        "".join(letters[byte] for byte in token)
        for token in [*(bytes([n]) for n in range(256)), *several]
    ]
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return _fast(tokenizer)


def byte_fallback():
    """As Llama's: `<0xE2>` stands for a byte, `▁` for a space, and a text's first space is
    dropped."""
    tokens = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁"]
    tokens += [prefix + word for word in WORDS + MARKS + ["\ufffd"] for prefix in ("", "▁")]
    vocab = {token: index for index, token in enumerate(dict.fromkeys(tokens))}
    tokenizer = Tokenizer(
        models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    steps = [
        decoders.Replace("▁", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    ]
    tokenizer.decoder = decoders.Sequence(steps)
    return _fast(tokenizer)


def word_piece(cleans=True):
    tokens = ["[UNK]", *WORDS, *MARKS, *(f"##{word}" for word in WORDS + MARKS), "\ufffd"]
    tokenizer = Tokenizer(
        models.WordPiece({token: index for index, token in enumerate(tokens)}, unk_token="[UNK]")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    return _fast(tokenizer, clean_up_tokenization_spaces=cleans)


def unigram(cleans=True):
    tokens = [
        "<unk>",
        "▁",
        *(prefix + word for word in WORDS + MARKS for prefix in ("", "▁")),
        "\ufffd",
    ]
    tokenizer = Tokenizer(
        models.Unigram([(token, -1.0 - len(token)) for token in tokens], unk_id=0)
    )
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    return _fast(tokenizer, clean_up_tokenization_spaces=cleans)


KINDS = {
    "byte_level": byte_level,
    "byte_fallback": byte_fallback,
    "word_piece": word_piece,
    "word_piece, as written": lambda: word_piece(cleans=False),
    "unigram": unigram,
    "unigram, as written": lambda: unigram(cleans=False),
}


@functools.cache
def of_kind(name):
    """The tokenizer of a kind, made once."""
    return KINDS[name]()
