"""YAML with patterns such as `*.jsonl`, which YAML takes for aliases."""

import re

import yaml


class _Scanner(yaml.SafeLoader):
    """Takes `*name` for an alias only where the text has an anchor `&name`."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._anchors = set(re.findall(r"&([\w-]+)", text))

    def fetch_alias(self) -> None:
        name = re.match(r"[\w-]*", self.buffer[self.pointer + 1 :])
        if name and name[0] in self._anchors:
            super().fetch_alias()
        else:
            self.fetch_plain()


def quote_patterns(text: str, names: bool = False) -> str:
    """The same YAML with plain texts that begin with `*` in quotes.

    Example: "train: [*.jsonl, b.txt]" becomes "train: ['*.jsonl', b.txt]"

    Args:
        names: all plain texts are names of files, and put in quotes: `001` is no number.

    Raises:
        yaml.YAMLError: it is no YAML besides.
    """
    for token in reversed(list(yaml.scan(text, Loader=_Scanner))):
        if isinstance(token, yaml.ScalarToken) and token.plain and (names or token.value.startswith("*")):
            quoted = token.value.replace("'", "''")
            text = f"{text[: token.start_mark.index]}'{quoted}'{text[token.end_mark.index :]}"
    return text
