"""The run's configuration: who wins over whom, and each wrong value with its message."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from plait.config import HELP, KINDS, PRESETS, ConfigError, as_plain, build, flag_of, parse, split_source

# flags, what the message must name
BAD = (
    (["--preset", "huge"], "--preset 'huge' is unknown; valid: tiny"),
    (["--steps", "-1"], "--steps is -1"),
    (["--steps", "many"], "argument --steps: invalid int value: 'many'"),
    (["--global-batch", "0"], "--global-batch is 0"),
    (["--schedule", "zigzag"], "--schedule 'zigzag' is unknown; valid: gpipe, 1f1b, interleaved"),
    (["--recompute", "some"], "--recompute 'some'"),
    (["--dtype", "int8"], "--dtype 'int8'"),
    (["--zero", "4"], "--zero 4 is unknown; valid: 0, 1, 2, 3"),
    (["--wire-dtype", "float16"], "--wire-dtype 'float16' is unknown; valid: float32, bfloat16"),
    (["--node-size", "0"], "--node-size is 0; it must be at least 1"),
    (["--bucket-mib", "0"], "--bucket-mib '0'; it takes 1 to 4096, or measured"),
    (["--bucket-mib", "4097"], "--bucket-mib '4097'; it takes 1 to 4096, or measured"),
    (["--bucket-mib", "half"], "--bucket-mib 'half'; it takes 1 to 4096, or measured"),
    (["--dropout", "1.0"], "--dropout is 1.0"),
    (["--lr", "0"], "--lr is 0.0"),
    (["--lr", "inf"], "--lr is inf; it must be above 0 and finite"),
    (["--resume", "\u00b2"], "it takes latest, none or a step"),
    (["--seed", "-4"], "--seed is -4"),
    (["--resume", "newest"], "--resume 'newest'; it takes latest, none or a step"),
    (["--data", "/nowhere/text"], "--data: no file '/nowhere/text'"),
    (["--from", "/nowhere/run@4"], "--from: no folder '/nowhere/run'"),
    (["--config", "/nowhere/run.toml"], "--config: cannot read '/nowhere/run.toml'"),
    (["--fancy"], "unrecognized arguments: --fancy"),
    (["--save", "often"], "--save 'often' is unknown; valid: steps, auto"),
    (["--save", "auto"], "--save auto and --mtbf-hours go together"),
    (["--mtbf-hours", "3"], "--save auto and --mtbf-hours go together"),
    (["--save", "auto", "--mtbf-hours", "inf"], "--mtbf-hours is inf; it must be above 0 and finite"),
    (["--save-every-minutes", "0"], "--save-every-minutes is 0.0"),
    (["--keep-best", "0"], "--keep-best is 0; it must be at least 1"),
    (["--out", "/etc/passwd"], "--out: '/etc/passwd' is not a folder"),
    (["--out", "/etc/passwd/run"], "--out: '/etc/passwd/run' cannot be: Not a directory"),
    (["--json", "x" * 300], "cannot be: File name too long"),
    (["--from", "a\0b"], "cannot be: embedded null byte"),
    (["--out", ""], "argument --out: '' is no path"),
    (["--config", ""], "argument --config: '' is no path"),
)

BAD_TOML = (
    ("stepz = 3", "unknown key 'stepz'; valid: mesh, preset, steps"),
    ("from_ = 'x'", "unknown key 'from_'"),
    ("steps = '3'", "steps is '3'; it takes an integer"),
    ("out = ''", "out is ''; it takes a path"),
    ("steps = true", "steps is True; it takes an integer"),
    ("sequence-parallel = 1", "sequence-parallel is 1; it takes true or false"),
    ("steps = ", "Invalid value"),
)


@pytest.mark.parametrize(("flags", "message"), BAD, ids=lambda value: " ".join(value)[:40] if value else "")
def test_a_bad_flag_is_named(flags: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(flags)
    assert message in str(caught.value)


@pytest.mark.parametrize(("text", "message"), BAD_TOML)
def test_a_bad_toml_key_is_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "run.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        parse(["--config", str(path)])
    assert message in str(caught.value)


def test_flags_win_over_the_file_which_wins_over_the_preset(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("steps = 7\nsave-every = 3\nlr = 1\nsequence-parallel = true\nresume = 4\nfrom = '.'\n")
    config = parse(["--config", str(path), "--steps", "9"])
    assert (config.steps, config.save_every, config.lr, config.sequence_parallel) == (9, 3, 1.0, True)
    assert config.seq == PRESETS["tiny"]["seq"]
    assert (config.resume, config.from_) == ("4", ".")
    assert parse(["--config", str(path), "--no-sequence-parallel"]).sequence_parallel is False


def test_the_preset_may_come_from_the_file(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("preset = 'small'")
    assert parse(["--config", str(path)]).seq == PRESETS["small"]["seq"]


def test_every_field_has_a_flag_and_a_help_line() -> None:
    assert set(HELP) == set(KINDS)
    assert flag_of("from_") == "--from" and flag_of("keep_every") == "--keep-every"


def test_an_unknown_field_is_refused() -> None:
    with pytest.raises(ConfigError, match="unknown key 'stride'"):
        build({"stride": 2})


def test_plain_form_is_json_ready() -> None:
    plain = as_plain(build({"from_": "."}))
    assert plain["out"] == "runs/default" and plain["from"] == "."


def test_source_with_and_without_a_step() -> None:
    assert split_source("a/b@12") == (Path("a/b"), 12)
    assert split_source("a@b/c") == (Path("a@b/c"), None)
    assert split_source("runs/x") == (Path("runs/x"), None)


def test_from_alone_resumes_nothing_unless_resume_says_so(tmp_path: Path) -> None:
    assert parse([]).resume == "latest" and parse(["--from", "."]).resume == "none"
    assert parse(["--from", ".", "--resume", "latest"]).resume == "latest"
    path = tmp_path / "run.toml"
    path.write_text("from = '.'\nresume = 'latest'\n")
    assert parse(["--config", str(path)]).resume == "latest"
    assert "--resume latest" in HELP["from_"]


def test_a_bad_flag_ends_the_command_before_torch_is_loaded() -> None:
    code = (
        "import sys; from plait.train_cli import main; status = main(['--steps', 'x']);"
        "assert 'torch' not in sys.modules; sys.exit(status)"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2 and "plait train: argument --steps" in done.stderr


def test_minutes_and_auto_take_the_place_of_the_presets_steps() -> None:
    assert parse([]).save_every == PRESETS["tiny"]["save_every"]
    assert parse(["--save-every-minutes", "10"]).save_every is None
    assert parse(["--save", "auto", "--mtbf-hours", "4"]).save_every is None
    both = parse(["--save-every-minutes", "10", "--save-every", "7"])
    assert (both.save_every, both.save_every_minutes) == (7, 10.0)
