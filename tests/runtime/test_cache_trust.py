"""The folder of the cubin cache: how large it may be, and whose."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from checking.native_tools import ARCH, compile_cold, new_unit
from jaxdnn import _native

pytestmark = pytest.mark.usefixtures("cache_folder")


@pytest.mark.parametrize(
    ("text", "limit"),
    [
        ("0", 0),
        ("123456789", 123456789),
        ("256MiB", 2**28),
        ("3 kib", 3 * 2**10),
        ("1GB", 10**9),
        ("16777215TiB", 16777215 * 2**40),
    ],
)
def test_limit(text: str, limit: int, log_file: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("JAXDNN_CACHE_LIMIT", text)
    assert _native.cache()["limit"] == limit
    assert not log_file.exists() or "JAXDNN_CACHE_LIMIT" not in log_file.read_text()


@pytest.mark.parametrize("text", ["much", "-1", "1.5GB", "10 apples", "MB", "16777216TiB", "99999999999999999999", " "])
def test_limit_that_is_no_number_of_bytes_is_said_once(text: str, log_file: Path, monkeypatch: pytest.MonkeyPatch):
    _native.set_log(0, str(log_file))  # warnings are written at every level
    monkeypatch.setenv("JAXDNN_CACHE_LIMIT", text)
    for _ in range(2):
        assert _native.cache()["limit"] == 256 << 20
    said = f'JAXDNN_CACHE_LIMIT must be a number of bytes, such as 268435456, 256MiB or 1GB; got "{text}"'
    assert log_file.read_text().count(said) == 1


def belongs_to_another(path: Path) -> str:
    if os.geteuid() != 0:
        pytest.skip("only root gives files away")
    os.chown(path, 12345, -1)
    return f"{path} is not used: it belongs to user 12345"


def writable_by_group(path: Path) -> str:
    path.chmod(0o720)
    return f"{path} is not used: other users may write to it"


def writable_by_all(path: Path) -> str:
    path.chmod(0o1777)  # as /tmp is
    return f"{path} is not used: other users may write to it"


@pytest.mark.parametrize("entry", [False, True], ids=["folder", "entry"])
@pytest.mark.parametrize("change", [belongs_to_another, writable_by_group, writable_by_all])
def test_what_others_may_have_written_is_not_run(
    change: Callable[[Path], str], entry: bool, cache_folder: Path, log_file: Path
):
    unit = new_unit()
    compiled = _native.compile(unit, ARCH)
    warning = change(cache_folder / f"{compiled.key}.cubin" if entry else cache_folder)
    assert compile_cold(unit).origin == "compiler"
    assert compile_cold(unit).origin == ("disk" if entry else "compiler")  # the entry is replaced by one of our own
    assert log_file.read_text().count(warning) == 1
    assert _native.cache()["trusted"] is entry


@pytest.mark.parametrize("end", ["", "/"])
def test_folder_is_made_for_its_user_alone(end: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("JAXDNN_CACHE_DIR", f"{tmp_path}/above/cache{end}")
    before = os.umask(0o002)
    try:
        compiled = _native.compile(new_unit(), ARCH)
    finally:
        os.umask(before)
    folder = tmp_path / "above" / "cache"
    modes = [path.stat().st_mode & 0o777 for path in (folder, folder / f"{compiled.key}.cubin")]
    assert modes == [0o700, 0o600]
