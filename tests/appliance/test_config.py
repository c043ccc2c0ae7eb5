"""The config file: strict, with errors that carry their path."""

from pathlib import Path

import pytest

from appliance import config
from appliance.config import Config, ConfigError, EngineConfig

MINIMAL = '[engine]\nbundle = "/b"\n'


def test_what_is_not_there_has_its_default() -> None:
    assert config.parse(MINIMAL, "x") == Config(EngineConfig(Path("/b")))


def test_the_file_that_init_writes_says_what_the_defaults_are() -> None:
    found = config.parse(config.DEFAULT, "default")
    assert found == Config(EngineConfig(Path("/var/lib/duplexbox/bundle")))


def test_the_file_that_init_writes_names_every_setting() -> None:
    for table in Config.__struct_fields__:
        assert f"[{table}]" in config.DEFAULT
        if table == "sip":  # optional, hence commented: tests/appliance/lines/test_sip_config.py
            continue
        if table == "beside":  # any number of them, none by default, hence commented
            for name in config.BesideConfig.__struct_fields__:
                assert f"\n#{name} = " in config.DEFAULT
            continue
        kind = type(getattr(config.parse(config.DEFAULT, "default"), table))
        for name in kind.__struct_fields__:
            assert f"\n{name} = " in config.DEFAULT


@pytest.mark.parametrize("folder", ["out", "/srv/a box", 'a "quoted" one', "/"])
def test_a_config_for_one_s_own_folder_keeps_everything_in_it(folder: str) -> None:
    state = Path(folder)
    found = config.parse(config.with_paths(Path("out/small"), state), "written")
    assert found.engine.bundle == Path("out/small")
    assert found.engine.kernels == state / "kernels"
    assert found.control.socket == state / "box.sock"
    assert found.ledger.folder == state / "calls"
    assert found.persona.snapshots == state / "personas"
    assert "/duplexbox/sip.sqlite" not in config.with_paths(None, state)
    assert config.with_paths(None, None) == config.DEFAULT


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (MINIMAL + "slotz = 3\n", "unknown field `slotz` - at `$.engine`"),
        (MINIMAL + 'slots = "3"\n', "Expected `int`, got `str` - at `$.engine.slots`"),
        (MINIMAL + "slots = -1\n", "Expected `int` >= 0 - at `$.engine.slots`"),
        (MINIMAL + "[clok]\n", "unknown field `clok`"),
        (MINIMAL + "[clock]\nlag_limit_frames = 0\n", "at `$.clock.lag_limit_frames`"),
        ("[engine]\nbundle = 3\n", "Expected `str`, got `int` - at `$.engine.bundle`"),
        ('[engine]\nbundle = ""\n', "a path cannot be empty, nor hold"),
        (MINIMAL + '[ledger]\nfolder = "/a\\u0000b"\n', "NUL character - at `$.ledger.folder`"),
        ("[engine]\n", "missing required field `bundle` - at `$.engine`"),
        ("", "missing required field `engine`"),
        ("[engine\n", "line 1"),
    ],
)
def test_a_mistake_is_named_with_its_place_and_the_remedy(text: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config.parse(text, "duplexbox.toml")
    message = str(caught.value)
    assert message.startswith("duplexbox.toml: ")
    assert words in message
    assert "duplexbox appliance init" in message
    assert "\n" not in message


def test_a_missing_file_says_how_to_write_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Write one: duplexbox appliance init"):
        config.load(tmp_path / "none.toml")


def test_a_file_that_is_no_text_is_an_error_not_a_crash(tmp_path: Path) -> None:
    path = tmp_path / "x.toml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="cannot be read"):
        config.load(path)
