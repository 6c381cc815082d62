"""Settings: defaults, overrides, and one-line errors that name the key."""

import dataclasses
import itertools
import re
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
import yaml
from typer.testing import CliRunner

from mtpkit.cli.train import app
from mtpkit.errors import UserError
from mtpkit.training.config.describe import describe_settings
from mtpkit.training.config.reading import load_config
from mtpkit.training.config.settings import LossConfig, TrainConfig
from mtpkit.training.run import save_config
from tests.shared import each

SECTIONS = [
    name for name, hint in get_type_hints(TrainConfig).items() if dataclasses.is_dataclass(hint)
]
NEEDED = ["model=base", "output=run", "data.train=[a.txt]"]


def test_file_and_overrides(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(
        "model: base\noutput: run\nsteps: 7\ndata: {train: [a.txt]}\noptimizer: {warmup_steps: 2}\n"
    )
    config = load_config(path, ["loss.kind=tv", "data.train=[b.txt,c.txt]"])
    assert (config.steps, config.loss.kind, config.data.train) == (7, "tv", ("b.txt", "c.txt"))


def test_an_empty_value_is_an_empty_text(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(
        "model: base\noutput: run\ncache: hidden\ndata: {train: [a.txt]}\nlog: {wandb: project}\n"
    )
    config = load_config(path, ["cache=", "log.wandb=", "parallel.pipeline=2"])
    assert config.cache == config.log.wandb == ""
    with pytest.raises(UserError, match=r"set parallel\.pipeline=1, or an empty cache="):
        load_config(path, ["parallel.pipeline=2"])


def test_anchors_that_expand_to_too_much_are_refused(tmp_path):
    path = tmp_path / "config.yaml"
    lines = ["a: &a [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]"]
    lines += [
        f"{name}: &{name} [{', '.join([f'*{before}'] * 10)}]"
        for before, name in itertools.pairwise("abcd")
    ]
    path.write_text("\n".join(lines))
    with pytest.raises(
        UserError, match=r"config\.yaml.* its anchors expand to more than 10,000 values; write"
    ):
        load_config(path)


def test_a_single_file_of_data_needs_no_brackets(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("model: base\noutput: run\ndata: {train: a.txt, eval: b.txt}\n")
    data = load_config(path).data
    assert (data.train, data.eval) == (("a.txt",), ("b.txt",))
    data = load_config(path, ["data.train=c d.txt", "data.eval="]).data
    assert (data.train, data.eval) == (("c d.txt",), ())
    with pytest.raises(UserError, match=r"data\.train is empty"):
        load_config(path, ["data.train="])
    path.write_text("model: base\noutput: run\ndata: {train: '${oc.env:NO_SUCH_PLACE}'}\n")
    assert load_config(path, ["data.train=x.txt", "data.eval=['${model}']"]).data.eval == ("base",)
    path.write_text("model: base\noutput: run\ndata: [a.txt, b.txt]\n")
    with pytest.raises(UserError, match="data"):
        load_config(path)


@pytest.mark.parametrize("pattern", ["*", "*-", "-", "M*-", "E"])
def test_patterns_are_taken_as_they_stand(pattern):
    assert load_config(None, [*NEEDED, f"heads.pattern={pattern}"]).heads.pattern == pattern
    assert load_config(None, [*NEEDED, f"heads.pattern='{pattern}'"]).heads.pattern == pattern


def test_the_script_needs_no_file(tmp_path):
    """All settings may be on the command line, as in the README."""
    result = CliRunner().invoke(
        app, [f"model={tmp_path / 'none'}", "output=run", "data.train=[a.txt]"]
    )
    assert isinstance(result.exception, UserError) and str(tmp_path / "none") in str(
        result.exception
    )


def test_saved_config_reads_back(tmp_path):
    config = load_config(None, [*NEEDED, "loss.depth_weights=[3,2,1]", "optimizer.betas=[0.8,0.9]"])
    save_config(config, tmp_path / "config.yaml")
    assert load_config(tmp_path / "config.yaml") == config


def test_depth_weights_sum_to_one():
    weights = LossConfig().weights(3)
    assert weights == pytest.approx([1 / 1.96, 0.6 / 1.96, 0.36 / 1.96])
    assert load_config(None, [*NEEDED, "loss.depth_weights=[2,1,1]"]).loss.weights(3) == (
        0.5,
        0.25,
        0.25,
    )
    halves = load_config(None, [*NEEDED, "loss.beta=0.5", "heads.num_depths=2"])
    assert halves.loss.weights(2) == pytest.approx([2 / 3, 1 / 3])


@each(
    ("override", "says"),
    [
        ("stepz=3", "stepz"),
        ("loss.sort=kl", "loss.sort"),
        ("loss.kind=huber", "loss.kind"),
        ("steps=many", "steps"),
        ("steps=0", "override steps=0: steps is 0, must be from 1 to "),
        ("heads.num_depths=-1", "heads.num_depths is -1, must be from 1 to 256"),
        ("data.train=[]", "data.train is empty"),
        ("output=", "output is empty: name a directory"),
        ("data.train={a: b}", "Cannot merge incompatible"),
        ("data=[a.txt]", "data is a section of settings: set data.train=[FILE], and so on"),
        ("data.sequence_length=4", "data.sequence_length must be at least 5"),
        (
            "data.micro_batch_size=3",
            "data.global_batch_size 8 is not a multiple of data.micro_batch_size 3",
        ),
        ("loss.temperature=0", "loss.temperature is 0, must be from 0.001 to 1000000"),
        ("loss.depth_weights=[1,2]", "loss.depth_weights has 2 entries for heads.num_depths=3"),
        ("optimizer.min_lr=1", "optimizer.min_lr 1.0 exceeds optimizer.lr"),
        ("optimizer.lr=-1", "optimizer.lr is -1, must be from 1e-30 to 10"),
        ("seed=-1", "seed is -1, must be from 0 to "),
        ("optimizer.lr=nan", "optimizer.lr is nan, must be a finite number"),
        ("optimizer.weight_decay=.inf", "optimizer.weight_decay is inf, must be a finite number"),
        (
            "optimizer.betas=[1.0,0.95]",
            "optimizer.betas is [1.0, 0.95], must be at least 0 and below 1",
        ),
        (
            "optimizer.betas=[0.9,.nan]",
            "optimizer.betas is [0.9, nan], must be a list of 2 finite numbers",
        ),
        ("optimizer.eps=-1", "optimizer.eps is -1, must be from 1e-30 to 1"),
        ("verbose", "overrides must be key=value, such as steps=100, not verbose"),
        ("loss.depth_weights=[1,2", "while parsing"),
    ],
)
def test_errors_name_the_key(override, says):
    with pytest.raises(UserError) as error:
        load_config(None, [*NEEDED, override])
    assert says in str(error.value)
    assert "\n" not in str(error.value)


def test_a_base_in_fp8_has_no_other_dtype_than_bfloat16():
    for dtype in ("auto", "bfloat16"):
        assert load_config(None, [*NEEDED, "base_fp8=true", f"dtype={dtype}"]).base_fp8
    with pytest.raises(UserError, match="base_fp8 needs dtype=bfloat16: set it, or base_fp8=false"):
        load_config(None, [*NEEDED, "base_fp8=true", "dtype=float32"])


def test_every_problem_is_named_at_once():
    with pytest.raises(
        UserError, match=r"steps is 0.*loss\.temperature has no effect on loss\.kind=tv"
    ):
        load_config(None, [*NEEDED, "steps=0", "loss.kind=tv", "loss.temperature=2"])


def test_a_wrong_override_is_named_and_not_the_file(tmp_path):
    path = tmp_path / "config.yaml"
    save_config(load_config(None, NEEDED), path)
    with pytest.raises(UserError) as error:
        load_config(
            path,
            [
                *("stepz=3", "seed=1", "lr=0.1", "loss.kind=huber"),
                *("optimiser.lr=1", "date.train=[a]", "optimizer.qqqq=1"),
            ],
        )
    text = str(error.value)
    assert text.startswith("override stepz=3: there is no setting 'stepz'; did you mean steps?")
    assert "override lr=0.1: there is no setting 'lr'; did you mean optimizer.lr" in text
    assert (
        "override loss.kind=huber: loss.kind is 'huber', must be 'kl', " in text
        and "seed" not in text
        and str(path) not in text
    )
    assert "there is no setting 'optimiser'; did you mean optimizer?" in text
    assert "there is no setting 'date'; did you mean data or dtype?" in text
    assert text.endswith("there is no setting 'optimizer.qqqq'; mtpkit train --settings lists them")
    path.write_text("stepz: 3\n")
    with pytest.raises(
        UserError, match=rf"^config {path}: there is no setting 'stepz'; did you mean steps\?"
    ):
        load_config(path, ["seed=1"])


def test_a_setting_that_is_gone_names_the_remedy(tmp_path):
    """Unless its value changed nothing: the settings of an earlier run name every setting."""
    path = tmp_path / "config.yaml"
    needed = "model: m\noutput: o\ndata: {train: [a.txt], sequence_length: 8}\n"
    path.write_text(f"{needed}optimizer: {{offload: true}}\n")
    for file, overrides in ((None, ["optimizer.offload=true"]), (path, [])):
        with pytest.raises(UserError) as error:
            load_config(file, overrides)
        text = str(error.value)
        assert "optimizer.offload is no setting any more; remove it" in text
        assert "cache=DIR" in text and "\n" not in text
    path.write_text(f"{needed}optimizer: {{offload: false, lr: 0.5}}\n")
    assert load_config(path).optimizer.lr == 0.5


@pytest.mark.parametrize(
    ("value", "files"),
    [
        ("[*.jsonl]", ("*.jsonl",)),
        ("[a.txt, **/*.jsonl,*b*]", ("a.txt", "**/*.jsonl", "*b*")),
        ("*.jsonl", ("*.jsonl",)),
        ("*", ("*",)),
        ("[001,1.50,true]", ("001", "1.50", "true")),
        ("[*it's*]", ("*it's*",)),
        ("['*.txt', \"*.md\", code=*.py]", ("*.txt", "*.md", "code=*.py")),
    ],
)
def test_globs_that_begin_with_a_star(tmp_path, value, files):
    assert (
        load_config(None, [*NEEDED[:2], f"data.train={value}", f"data.eval={value}"]).data.train
        == files
    )
    if "001" in value:
        return
    path = tmp_path / "config.yaml"
    path.write_text(f"model: base\noutput: run # [*.x]\ndata: {{train: {value}}}\n")
    assert load_config(path).data.train == files
    blocks = "".join(f"    - {name}\n" for name in ("*.jsonl", "code=*.py", "*"))
    path.write_text(
        f"model: base\noutput: run\ndata:\n  train:\n{blocks}  eval: *.txt\nheads:\n  pattern: *-\n"
    )
    config = load_config(path)
    assert config.data.train == ("*.jsonl", "code=*.py", "*") and config.data.eval == ("*.txt",)
    assert config.heads.pattern == "*-"


def test_aliases_of_a_config_stay_aliases(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("model: base\noutput: run\ndata: {train: &own [*.txt], eval: *own}\n")
    assert load_config(path).data.eval == ("*.txt",)


@each("value", ["[*[0-9].txt]", "[?.txt]", "[", "[a: b]", "[[a]]", "['']"])
def test_globs_that_yaml_does_not_read_say_how_they_are_written(value):
    with pytest.raises(UserError, match=r"put names in quotes, .*\['a\[0-9\]\.jsonl'\]$"):
        load_config(None, [*NEEDED, f"data.train={value}"])


def test_the_last_of_several_overrides_holds():
    assert load_config(None, [*NEEDED, "seed=1", "seed=2", "seed=1"]).seed == 1


def test_an_override_indexes_into_the_list_of_an_earlier_one():
    overrides = [*NEEDED, "data.train=[a,b]", "seed=2", "data.train[0]=z"]
    assert load_config(None, overrides).data.train == ("z", "b")
    with pytest.raises(
        UserError, match=r"^override seed=x: [^;]*; override data\.train\[7\]=y: [^;]*$"
    ):
        load_config(
            None, [*overrides, "seed=x", "data.train[1]=y", "data.train[7]=y", "data.train[0]=x"]
        )


@pytest.mark.parametrize("content", [None, "a: [1", "just words", "\x00", "- a\n- b\n"])
def test_unreadable_files(tmp_path, content):
    path = tmp_path / "config.yaml"
    if content is not None:
        path.write_text(content)
    with pytest.raises(UserError) as error:
        load_config(path)
    assert str(path) in str(error.value) and "\n" not in str(error.value)


def test_numbers_and_texts_are_taken_for_each_other_where_one_is_meant(tmp_path, monkeypatch):
    """YAML and the environment have no other way to write them."""
    monkeypatch.setenv("STEPS", "300")
    monkeypatch.setenv("RATE", "1e-4")
    path = tmp_path / "config.yaml"
    path.write_text("model: 8\noutput: run\nsteps: ${oc.env:STEPS}\ndata: {train: [2024, 1.5]}\n")
    config = load_config(
        path, ["optimizer.lr=${oc.env:RATE}", "output=2024", "data.train[1]=b.txt"]
    )
    assert (config.model, config.output, config.data.train) == ("8", "2024", ("2024", "b.txt"))
    assert (config.steps, config.optimizer.lr) == (300, 1e-4)
    with pytest.raises(
        UserError, match=r"^override steps=3\.5: steps is 3\.5, must be a whole number$"
    ):
        load_config(path, ["steps=3.5"])


def test_the_last_override_of_a_key_is_at_fault(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("model: base\noutput: run\nseed: -1\ndata: {train: [a]}\n")
    with pytest.raises(UserError) as error:
        load_config(path, ["loss.beta=30", "loss={beta: 20}", "data.train[0]=''"])
    assert str(error.value).startswith(f"config {path}: seed is -1, must be from 0 to ")
    assert "; override loss={beta: 20}: loss.beta is 20, must be from 0 to 10; " in str(error.value)
    assert "; override data.train[0]='': data.train is [''], must be a list of files" in str(
        error.value
    )
    assert "beta=30" not in str(error.value)


def test_missing_keys_are_named():
    with pytest.raises(UserError, match=r"model is required"):
        load_config(None, [])


@pytest.mark.parametrize("given", [[], ["data.eval=[a]"]])
def test_what_is_said_of_missing_data_can_be_followed(given):
    with pytest.raises(UserError, match=r"is required, set (data.train=\[FILE\])$") as error:
        load_config(None, ["model=base", "output=run", *given])
    assert load_config(
        None, ["model=base", "output=run", str(error.value).rsplit(" ", 1)[1]]
    ).data.train == ("FILE",)


def test_the_example_is_valid():
    config = load_config(Path(__file__).parents[2] / "examples" / "train_tiny.yaml")
    assert config.loss.kind == "kl" and config.heads.num_depths == 3


def test_the_listing_is_a_config_of_all_defaults_with_a_comment_for_each(tmp_path):
    text = describe_settings()
    lines = [line.strip() for line in text.splitlines()]
    for before, line in itertools.pairwise(["", *lines]):
        assert line.startswith("#") or before.startswith("#"), line
    (tmp_path / "all.yaml").write_text(text)
    assert load_config(tmp_path / "all.yaml", NEEDED) == load_config(None, NEEDED)
    with pytest.raises(UserError, match="model is required"):
        load_config(tmp_path / "all.yaml", NEEDED[1:])
    keys = yaml.safe_load(text)
    assert {name: set(value) for name, value in keys.items() if isinstance(value, dict)} == {
        name: {inner.name for inner in dataclasses.fields(hint)}
        for name, hint in get_type_hints(TrainConfig).items()
        if dataclasses.is_dataclass(hint)
    }
    assert keys.keys() == {field.name for field in dataclasses.fields(TrainConfig)}


def test_the_script_lists_the_settings_without_a_config():
    result = CliRunner().invoke(app, ["--settings"])
    assert result.exit_code == 0 and result.output.strip() == describe_settings()


def leaves(cls=TrainConfig, prefix=""):
    """(key, type) of every setting."""
    for name, hint in get_type_hints(cls).items():
        if dataclasses.is_dataclass(hint):
            yield from leaves(hint, f"{prefix}{name}.")
        else:
            yield prefix + name, hint


def refusal(*arguments):
    """The error of `load_config`, on one short line; None if it accepts the settings."""
    try:
        load_config(*arguments)
    except UserError as error:
        assert "\n" not in str(error) and len(str(error)) < 400, str(error)
        return str(error)


NUMBERS = [
    key for key, hint in leaves() if hint in (int, float) or {int, float} & set(get_args(hint))
]
HUGE = ["1e30", "1e300", str(10**22), str(10**400), "9" * 5000]


@each(
    "value",
    ["-1", ".nan", ".inf", "-.inf", *HUGE],
)
def test_every_number_has_a_range(value):
    assert len(NUMBERS) > 25
    for key in NUMBERS:
        several = {"optimizer.betas": 2, "loss.depth_weights": 3}.get(key)
        text = f"[{','.join([value] * several)}]" if several else value
        said = refusal(None, [*NEEDED, "optimizer.min_lr=0", f"{key}={text}"])
        assert said is not None and key in said, f"{key}={text[:20]}"


VALUES = [
    *(
        "null",
        "[]",
        "{}",
        "[[]]",
        "{a: {b: c}}",
        "[null]",
        "true",
        "2.5",
        "-3",
        "some words",
        "2026-01-01",
    ),
    *("!!python/object:os.system {}", "&a [*a]", "*b", "${no}", "a: b: c", "'" + "x" * 5000 + "'"),
]


@pytest.mark.parametrize("key", ["nothing", "", *SECTIONS, *(key for key, _ in leaves())])
def test_a_file_with_anything_at_any_key_is_read_or_refused_in_one_line(tmp_path, key):
    path = tmp_path / "config.yaml"
    section, _, name = key.rpartition(".")
    for number, value in enumerate(VALUES):
        if number % 2:
            refusal(None, [*NEEDED, f"{key}={value}"])
            continue
        lines = {"model": "base", "output": "run", "data": "{train: [a.txt]}"}
        needed = "\n  train: [a.txt]" if section == "data" and name != "train" else ""
        lines |= {section: f"\n  {name}: {value}{needed}"} if section else {name: value}
        path.write_text("".join(f"{line}: {text}\n" for line, text in lines.items()))
        refusal(path)


FILES = [
    *(
        b"\xff\xfe",
        "steps: 3".encode("utf-16"),
        b"a: \x00",
        b"",
        b"null",
        b"5",
        b"- 1",
        b"a: &a\n  b: *a",
    ),
    *(
        b"{" * 1500,
        b"[" * 1500,
        b"a: " * 3000,
        b"5: 3",
        b"null: 3",
        b"[1]: 3",
        b"{}: {}",
        b"model: a\nmodel: b",
    ),
    *(b"%YAML 9.9\n---\na: 1", b"--- 1\n--- 2", b'a: "\\ud800"', b"steps: " + b"9" * 5000, b"? a"),
    "\n".join(
        ["a0: &a0 [x]", *(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 12))]
    ).encode(),
]


@pytest.mark.parametrize("content", FILES, ids=lambda content: repr(content[:12]))
def test_any_file_is_refused_in_one_line(tmp_path, content):
    path = tmp_path / "config.yaml"
    path.write_bytes(content)
    said = refusal(path)
    assert said and str(path) in said
    for place in (tmp_path, tmp_path / "none", "/dev/null/x"):
        assert refusal(place)


def test_what_is_missing_is_there_when_the_advice_is_followed():
    """One message after the other, each followed by what it says, to settings that are taken."""
    overrides = []
    for _ in range(5):
        said = refusal(None, overrides)
        if said is None:
            break
        advice = re.search(r"set (\S+=[^;\s]+)", said)[1]
        overrides.append(advice.replace("...", "somewhere"))
    assert load_config(None, overrides).data.train == ("FILE",)
    for section in SECTIONS:
        advice = re.search(r"set (\S+=[^, ]+)", refusal(None, [*NEEDED, f"{section}=[a.txt]"]))[1]
        load_config(None, [*NEEDED, advice])


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    "brackets", ["[" * 50_000, "[" * 50_000 + "]" * 50_000, "{a: " * 50_000 + "1" + "}" * 50_000]
)
def test_deep_brackets_are_refused_at_once(tmp_path, brackets):
    """YAML's scanner takes minutes for them."""
    (tmp_path / "config.yaml").write_text(f"steps: {brackets}\n")
    with pytest.raises(UserError, match=r"config\.yaml is not YAML: it is nested too deeply"):
        load_config(tmp_path / "config.yaml")
    with pytest.raises(UserError, match=r"override steps=.* it is nested too deeply"):
        load_config(None, [f"steps={brackets}"])


@pytest.mark.parametrize("value", ["${model", "${", "${oc.env:", "${a.${b}"])
def test_an_open_interpolation_is_one_line(tmp_path, value):
    (tmp_path / "config.yaml").write_text(f"steps: 2\nmodel: {value}\n")
    with pytest.raises(UserError, match=r"config\.yaml is not YAML: "):
        load_config(tmp_path / "config.yaml")
