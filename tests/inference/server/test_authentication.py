"""Tokens: where they come from, how they are sent, and that no record shows one."""

from pathlib import Path

import httpx
import pytest

from kitforge.cli.main import run
from kitforge.composition import compose_config
from kitforge.core.nn.decoder import Decoder
from kitforge.foundation.config import from_dict, to_dict
from kitforge.foundation.errors import ConfigError
from kitforge.inference.options import EngineOptions
from kitforge.inference.server.authentication import auth_tokens, has_token
from kitforge.inference.server.options import TOKEN_VARIABLE, ServeOptions
from kitforge.kits.registry import kit_of
from tests.inference.server.conftest import make_service, serving
from tests.small_run import write_run

SECRET = "s3cret-token"


def test_tokens_come_from_the_environment_a_file_and_an_option(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "tokens"
    file.write_bytes(b"ann\r\n\n  bob  \n")
    assert auth_tokens(ServeOptions()) == ()
    assert auth_tokens(ServeOptions(token_file=str(file))) == ("ann", "bob")
    monkeypatch.setenv(TOKEN_VARIABLE, "carl, dora,,ann")
    assert auth_tokens(ServeOptions()) == ("carl", "dora", "ann")
    assert auth_tokens(ServeOptions(token=SECRET, token_file=str(file))) == (SECRET, "ann", "bob", "carl", "dora")


@pytest.mark.parametrize("variable", ["", ",", " , "])
def test_a_server_for_others_is_never_open(variable: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, variable)
    with pytest.raises(ConfigError, match=r"token"):
        auth_tokens(ServeOptions(host="0.0.0.0"))
    (tmp_path / "empty").write_text("\n \n")
    with pytest.raises(ConfigError, match="is empty"):
        auth_tokens(ServeOptions(host="0.0.0.0", token_file=str(tmp_path / "empty")))
    with pytest.raises(ConfigError, match="cannot be read"):
        auth_tokens(ServeOptions(host="0.0.0.0", token_file=str(tmp_path / "nothing")))


def test_what_is_no_token_is_refused_without_being_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, "pässword")
    with pytest.raises(ConfigError, match="ASCII") as told:
        auth_tokens(ServeOptions())
    assert "ssword" not in str(told.value)
    with pytest.raises(ConfigError, match="ASCII") as told:
        ServeOptions(token="päss")
    assert "ss" not in str(told.value).replace("ASCII", "")


@pytest.mark.slow
def test_any_of_the_tokens_lets_in_however_the_scheme_is_spelt(model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, "ann,bob")
    with serving(make_service(model, ServeOptions(), EngineOptions())) as guarded:
        for right in ("Bearer ann", "Bearer bob", "bearer ann", "BEARER  bob"):
            assert httpx.get(f"{guarded.url}/v1/models", headers={"Authorization": right}).status_code == 200, right
        for wrong in ("Bearer", "Bearer an", "Bearer ann,bob", "Basic ann", "ann", "Bearer ann bob"):
            response = httpx.get(f"{guarded.url}/v1/models", headers={"Authorization": wrong})
            assert (response.status_code, response.headers["www-authenticate"]) == (401, "Bearer"), wrong
        assert "<label>Token" in httpx.get(guarded.url).text


def test_only_pages_of_allowed_origins_may_send_requests(model: Decoder) -> None:
    asked = {"Origin": "http://page.test", "Access-Control-Request-Method": "POST"}
    asked |= {"Access-Control-Request-Headers": "authorization"}
    options = ServeOptions(token=SECRET, allowed_origins=("http://page.test",))
    with serving(make_service(model, options, EngineOptions())) as open_to_one:
        url = f"{open_to_one.url}/v1/models"
        told = httpx.options(url, headers=asked)
        assert told.status_code == 200
        assert told.headers["access-control-allow-origin"] == "http://page.test"
        assert "authorization" in told.headers["access-control-allow-headers"]
        # A page that asks still needs the token, and reads why it is refused.
        refused = httpx.get(url, headers=asked)
        assert refused.status_code == 401 and refused.headers["access-control-allow-origin"] == "http://page.test"
        let_in = httpx.get(url, headers=asked | {"Authorization": f"Bearer {SECRET}"})
        assert let_in.status_code == 200 and let_in.headers["vary"] == "Origin"
        other = httpx.options(url, headers=asked | {"Origin": "http://other.test"})
        assert other.status_code == 400 and "access-control-allow-origin" not in other.headers


def test_without_tokens_nothing_is_one() -> None:
    assert not has_token(b"Bearer ", ()) and not has_token(b"Bearer ***", ("x",))


def test_a_recorded_mask_is_no_token() -> None:
    recorded = to_dict(ServeOptions(token=SECRET, host="0.0.0.0"))
    assert recorded["token"] == "***"
    with pytest.raises(ConfigError, match="mask"):
        auth_tokens(from_dict(ServeOptions, recorded))
    assert to_dict(ServeOptions())["token"] is None
    assert SECRET not in repr(ServeOptions(token=SECRET))


@pytest.mark.slow
def test_a_configuration_is_shown_without_its_token(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["config", "model=llama_tiny", f"serve.token={SECRET}"]) == 0
    shown = capsys.readouterr().out
    assert SECRET not in shown and 'token: "***"' in shown
    kit = kit_of("text_generation")
    assert kit.read_options(compose_config("text_generation", {"serve.token": SECRET}).values).serve.token == SECRET


@pytest.mark.slow
def test_no_file_of_a_run_holds_its_token(tmp_path: Path) -> None:
    folder = write_run(tmp_path, **{"serve.token": SECRET})
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert {"config.yaml", "state.json", "report.html"} <= {path.name for path in files}
    assert [path.name for path in files if SECRET.encode() in path.read_bytes()] == []
    assert 'token: "***"' in (folder / "config.yaml").read_text("utf-8")
