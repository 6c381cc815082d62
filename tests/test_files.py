"""Files that a user gives: what is wrong with them is one line that names them."""

import os
from pathlib import Path

import pytest

from mtpkit.errors import UserError, listed, raise_problems
from mtpkit.files import parse_json, read_json, read_text


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "cannot be read as JSON"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"a":' * 100_000, "nested too deeply"),
        (b"[1]", "is not a JSON object"),
        (b"null", "is not a JSON object"),
        (b"\xff{}", "is not UTF-8"),
        ('{"a": 1}'.encode("utf-16"), "is not UTF-8"),
        (b'{"a": ' + b"1" * 5000 + b"}", "cannot be read as JSON"),
        (b"", "cannot be read as JSON"),
        (b'{"a": {"b": 1, "c": 2, "b": 1}}', "the key 'b' is repeated"),
    ],
    ids=lambda value: repr(value)[:24],
)
def test_unreadable_json_is_named(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(UserError, match=message) as raised:
        read_json(path)
    assert str(path) in str(raised.value) and len(str(raised.value)) < 400


def test_missing_files_and_directories_are_named(tmp_path: Path) -> None:
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    for path in (tmp_path / "none", tmp_path, loop, tmp_path / "a\0b"):
        with pytest.raises(UserError, match="cannot be read") as raised:
            read_text(path)
        assert str(path) in str(raised.value)


@pytest.mark.timeout(10)
def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    """A named pipe may have no writer; the pipe of a shell's `<(...)` has one."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("pipe")
    for name in ("pipe", "link"):
        with pytest.raises(UserError, match=f"{name} cannot be read: it is a pipe"):
            read_text(tmp_path / name)
    reader, writer = os.pipe()
    os.write(writer, b"text")
    os.close(writer)
    assert read_text(f"/dev/fd/{reader}") == "text"
    os.close(reader)


def test_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(b'\xef\xbb\xbf{"a": 1}')
    assert read_json(path) == {"a": 1}


def test_a_line_is_named() -> None:
    with pytest.raises(UserError, match=r"data\.jsonl, line 3 cannot be read"):
        parse_json("{", "data.jsonl, line 3")


def test_long_lists_are_cut() -> None:
    assert listed([]) == ""
    assert listed("abc", most=3) == "a, b, c"
    assert listed("abcd", most=3) == "a, b, c and 1 more"
    assert listed(["a" * 30] * 9, width=70) == f"{'a' * 30}, {'a' * 30} and 7 more"
    assert listed(["a" * 300, "b"]) == f"{'a' * 300} and 1 more", "one is shown, however long it is"
    assert listed(["a" * 1000], width=100) == "a" * 100 + "..."
    assert listed("abc", most=2, separator="; ") == "a; b and 1 more"


def test_many_problems_fit_a_line() -> None:
    with pytest.raises(UserError) as caught:
        raise_problems(
            "model config", [f"field_{n} {'x' * 30} is not a whole number" for n in range(50)]
        )
    assert str(caught.value).startswith("model config: field_0 ") and str(caught.value).endswith(
        " more"
    )
    assert len(str(caught.value)) < 400
